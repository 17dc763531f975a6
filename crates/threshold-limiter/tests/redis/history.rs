//! Histories: what several nodes do on one store while servers and nodes fail, in a ledger that is kept by the test alone, and what
//! the store must hold in the end.

mod hot;
mod killed;
mod late_credits;
mod node;
mod once;
mod random;
mod remote;
mod rotation;
