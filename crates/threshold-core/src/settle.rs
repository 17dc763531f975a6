//! The one atomic step of a decision: all limits are charged or none, and strikes are added in the same step.
//!
//! A store loads the balances of a bill's charges and the standings of its subjects, calls [`settle`] inside its own
//! lock, transaction or script, and saves what changed. It does not know what a rule is. A store that keeps balances in
//! another form than [`Balance`] implements [`Balances`], and they are read and charged in place.
//!
//! Strikes belong to this step because two concurrent requests must not both be the third strike: the standing is read and
//! written under the same lock as the balances.

mod balances;
mod outcome;
mod standings;
mod step;

use crate::balance::Balance;
use crate::bill::Bill;
use crate::ladder::Standing;
use crate::plan::Verb;
use crate::time::Timestamp;
use balances::BalanceCopies;
use standings::StandingCopies;
use step::Step;

pub use balances::Balances;
pub use outcome::{Escalation, Outcome};
pub(crate) use outcome::{Exception, Settled, bit};
pub use standings::Standings;

/// Decides a bill and charges all of its limits or none.
///
/// `balances` and `standings` are those of the bill's charges and subjects, in its order. The outcome tells which of them
/// must be saved.
pub fn settle(bill: &Bill<'_>, balances: &mut [Balance], standings: &mut [Standing], now: Timestamp) -> Outcome {
    let mut outcome = Outcome::default();
    settle_into(bill, balances, standings, now, &mut outcome);
    outcome
}

/// Settles as [`settle`] does, on balances and standings in any form, into an existing outcome: an outcome is several
/// kilobytes, and moving it takes longer than deciding.
pub fn settle_into<B: Balances + ?Sized, S: Standings + ?Sized>(
    bill: &Bill<'_>,
    balances: &mut B,
    standings: &mut S,
    now: Timestamp,
    outcome: &mut Outcome,
) {
    outcome.clear();
    outcome.at = now;
    // A ban is the operator's word and needs no limit. Nothing is brought, struck or charged, so that a flood from a
    // banned client writes nothing.
    if bill.banned_until > now {
        outcome.behind_ban = ready_behind_ban(bill, balances, standings.all(), now);
        return;
    }
    match bill.verb {
        Verb::Check => Step { bill, balances, standings, now, outcome }.check(),
        Verb::Record => Step { bill, balances, standings, now, outcome }.record(),
        // A check on copies gives the answer that a check would give, and there is only one algorithm to keep right.
        Verb::Peek => {
            let mut balances = BalanceCopies::of(bill, balances);
            let mut standings = StandingCopies::of(standings);
            Step { bill, balances: &mut balances, standings: &mut standings, now, outcome }.check();
            // The changes were made to copies, so the store has nothing to save.
            outcome.changed_balances = 0;
            outcome.changed_standings = 0;
        }
    }
}

/// Returns when the limits and the ladders would allow the request if there were no ban, for its `Retry-After`. Changes
/// nothing: a request under a ban is charged nothing and is no violation.
#[cold]
fn ready_behind_ban<B: Balances + ?Sized>(
    bill: &Bill<'_>,
    balances: &mut B,
    standings: &[Standing],
    now: Timestamp,
) -> Timestamp {
    // On a copy: a look may bring back what lies in the future, and a request under a ban must change nothing. An observed
    // limit never denies, so no client has to wait for it.
    let enforced = bill.charges.iter().enumerate().filter(|(_, charge)| charge.enforced());
    let limits = enforced.map(|(index, charge)| charge.look(&mut balances.copied(index), now).0.ready_at);
    limits.chain(standings.iter().map(Standing::denied_until)).max().unwrap_or_default()
}
