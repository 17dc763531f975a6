//! core
pub mod balance;
pub mod codec;
pub mod key;
pub mod limit;
pub mod time;
