//! Pending charges of a request whose end is seen, as behind the tower layer.

use arrayvec::ArrayVec;

use super::{Charged, Charges, Receipt};
use crate::key::TraceId;
use crate::plan::{MAX_CHARGES, Met, Plan};
use crate::policy::StatusSet;
use crate::settle::Outcome;
use crate::time::Timestamp;

/// The charges of a request in flight. Some are given back when the request is answered, some when it ends.
///
/// Each charge can be taken out once, and the value never leaves the process. So a store need not remember what was given
/// back. A [`Receipt`] can be presented twice, and needs that.
#[derive(Debug)]
pub struct Pending {
    id: TraceId,
    generation: u64,
    at: Timestamp,
    charged: ArrayVec<(Charged, Ends), MAX_CHARGES>,
}

/// The event that decides whether a charge stays.
#[derive(Debug)]
enum Ends {
    /// None: the charge stays.
    Already,
    /// The answer: the charge stays if the answer has one of these statuses.
    WithTheAnswer(StatusSet),
    /// The end of the request: the charge is a concurrency hold, and is given back.
    WithTheRequest,
}

impl Pending {
    /// Returns whether the answer or the end of the request may give anything back.
    #[must_use]
    pub fn is_open(&self) -> bool {
        self.charged.iter().any(|(_, ends)| !matches!(ends, Ends::Already))
    }

    /// Returns whether the request holds a place in a concurrency limit.
    #[must_use]
    pub fn has_holds(&self) -> bool {
        self.charged.iter().any(|(_, ends)| matches!(ends, Ends::WithTheRequest))
    }

    /// Takes out the concurrency holds.
    pub fn take_holds(&mut self) -> Option<Receipt> {
        self.take(|ends| matches!(ends, Ends::WithTheRequest))
    }

    /// Takes out the charges of rules that do not count an answer of this status. `None` means that the service was never
    /// called.
    pub fn take_uncounted(&mut self, status: Option<u16>) -> Option<Receipt> {
        self.take(|ends| match ends {
            // A service that was never called has no status, and so no status that counts.
            Ends::WithTheAnswer(statuses) => !status.is_some_and(|status| statuses.contains(status)),
            Ends::Already | Ends::WithTheRequest => false,
        })
    }

    /// Returns the receipt of all charges but the holds, so that a store can [renew](Receipt::renew) them.
    #[must_use]
    pub fn charged(&self) -> Receipt {
        let charged = self.charged.iter().filter(|own| stays(own)).map(|(charged, _)| *charged).collect();
        Receipt { id: self.id, generation: self.generation, at: self.at, charged }
    }

    /// Replaces the charges by a renewed receipt that [`charged`](Self::charged) has returned.
    pub fn renewed(&mut self, receipt: Receipt) {
        self.at = receipt.at;
        let own = self.charged.iter_mut().filter(|own| stays(own));
        // In the order in which `charged` listed them. Nothing can be taken out between the two calls, because the
        // owner waits for the renewal.
        own.zip(receipt.charged).for_each(|((own, _), renewed)| *own = renewed);
    }

    /// Takes out all remaining charges: the request is refused after all, and a refused request is not charged.
    pub fn take_all(&mut self) -> Option<Receipt> {
        self.take(|_| true)
    }

    fn take(&mut self, which: impl Fn(&Ends) -> bool) -> Option<Receipt> {
        let mut taken = Charges::new();
        // Moved out, so that a second call finds nothing. This is what makes a give-back happen once without a memory
        // in the store.
        self.charged.retain(|(charged, ends)| {
            let goes = which(ends);
            if goes {
                taken.push(*charged);
            }
            !goes
        });
        let receipt = Receipt { id: self.id, generation: self.generation, at: self.at, charged: taken };
        (!receipt.charged.is_empty()).then_some(receipt)
    }
}

/// Returns whether a charge is not a hold.
fn stays((_, ends): &(Charged, Ends)) -> bool {
    !matches!(ends, Ends::WithTheRequest)
}

impl Plan<'_> {
    /// Returns whether anything that this plan charges may be given back by the answer or at the end of the request.
    #[must_use]
    pub fn ends_later(&self) -> bool {
        let open = |met: &Met<'_>| met.limit.is_concurrency() || met.rule.count.is_some();
        self.met.iter().any(open)
    }

    /// Returns the charges of a request whose end will be seen.
    #[must_use]
    pub fn pending(&self, outcome: &Outcome) -> Pending {
        let charged = self.billed(outcome).filter_map(|(met, settled)| {
            let mark = settled.mark.filter(|mark| mark.amount > 0)?;
            let ends = match &met.rule.count {
                // Before the statuses: a place is occupied until the request ends, whatever its answer is.
                _ if met.limit.is_concurrency() => Ends::WithTheRequest,
                Some(statuses) => Ends::WithTheAnswer(statuses.clone()),
                None => Ends::Already,
            };
            Some((self.charged(met, settled, mark, outcome), ends))
        });
        let charged = charged.take(MAX_CHARGES).collect();
        Pending { id: self.trace(), generation: self.policy.generation, at: outcome.at(), charged }
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use super::*;
    use crate::balance::Balance;
    use crate::facts::Facts;
    use crate::key::Digest;
    use crate::policy::Policy;
    use crate::settle::settle;

    const RULES: &str = r#"
        [[rule]]
        name = "all"
        per = ["user"]
        limit = "10/h"
        [[rule]]
        name = "failures"
        per = ["user"]
        limit = "5/h"
        count = "status:401,5xx"
        [[rule]]
        name = "at-once"
        per = ["user"]
        limit = "2"
        algorithm = "concurrency"
    "#;

    /// Charges one request under the rules above and checks what is left after `take` was given back.
    #[track_caller]
    fn check(take: impl Fn(&mut Pending) -> Option<Receipt>, expect: [u64; 3]) {
        let policy = Policy::parse(RULES, &|_| None).unwrap();
        let facts = Facts { user: Some("u1"), trace: TraceId::from_u128(7), ..Facts::default() };
        let now = Timestamp::from_secs(1_767_225_600);
        let mut balances = vec![Balance::default(); 3];
        let plan = policy.plan(&facts).unwrap().seeing_outcomes();
        let outcome = settle(plan.bill(), &mut balances, &mut [], now);
        let mut pending = plan.pending(&outcome);
        assert!(pending.is_open() && pending.has_holds());
        let mut stored: BTreeMap<Digest, Balance> =
            plan.charges().iter().map(crate::bill::Charge::key).zip(balances).collect();
        if let Some(receipt) = take(&mut pending) {
            let mut own: Vec<Balance> = receipt.keys().map(|key| stored[&key].clone()).collect();
            receipt.refund(&mut own, now);
            stored.extend(receipt.keys().zip(own));
        }
        assert!(take(&mut pending).is_none(), "what was taken out is gone");
        let looks = plan.charges().iter().map(|charge| stored[&charge.key()].peek(charge.limit, 0, now));
        assert_eq!(looks.map(|look| look.available).collect::<Vec<_>>(), expect);
    }

    #[test]
    fn a_request_under_way_gives_back_each_charge_when_its_time_comes() {
        check(|_| None, [9, 4, 1]);
        check(Pending::take_holds, [9, 4, 2]);
        check(|pending| pending.take_uncounted(Some(200)), [9, 5, 1]);
        check(|pending| pending.take_uncounted(Some(401)), [9, 4, 1]);
        check(|pending| pending.take_uncounted(Some(503)), [9, 4, 1]);
        check(|pending| pending.take_uncounted(None), [9, 5, 1]);
        check(Pending::take_all, [10, 5, 2]);
    }

    /// Five requests in flight took a whole bucket that counts by outcome. 12 s later none of them counted, and the bucket had
    /// only 1 of 5 left.
    #[test]
    fn what_was_not_counted_by_outcome_is_there_again() {
        let rule = "[[rule]]\nname = \"failures\"\nper = [\"user\"]\nlimit = \"5/min\"\ncount = \"status:401\"\n";
        let policy = Policy::parse(rule, &|_| None).unwrap();
        let start = Timestamp::from_secs(1_767_225_600);
        let mut balances = vec![Balance::default()];
        let plan = policy.plan(&Facts { user: Some("u1"), ..Facts::default() }).unwrap().seeing_outcomes();
        let mut under_way: Vec<Pending> =
            (0..5).map(|_| plan.pending(&settle(plan.bill(), &mut balances, &mut [], start))).collect();
        let left = |balances: &[Balance], now| balances[0].peek(plan.bill.charges[0].limit, 0, now).available;
        assert_eq!(left(&balances, start), 0);
        let now = start.plus(crate::time::Span::from_secs(12));
        for pending in &mut under_way {
            pending.take_uncounted(Some(200)).unwrap().refund(&mut balances, now);
        }
        assert_eq!(left(&balances, now), 5);
    }
}
