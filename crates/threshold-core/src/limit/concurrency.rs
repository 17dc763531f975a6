//! Concurrency: how many at once, each held until it is released or its time is up.

use super::{LimitError, Look, MAX_CONCURRENCY, MAX_PERIOD, Mark};
use crate::key::TraceId;
use crate::time::{Span, Timestamp};

/// The most holds one state has: every unit of the largest limit, and as much debt.
pub(crate) const MAX_HOLDS: usize = 2 * MAX_CONCURRENCY as usize;

/// At most L at once; a hold nobody ends lasts `ttl`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Concurrency {
    quota: u64,
    ttl: Span,
}

/// What is in flight, in the order in which it would expire.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct HoldsState {
    pub(crate) holds: Vec<Hold>,
}

/// One request in flight.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Hold {
    pub(crate) id: TraceId,
    pub(crate) cost: u64,
    pub(crate) expires: Timestamp,
}

impl HoldsState {
    pub(crate) fn silent_from(&self) -> Timestamp {
        self.holds.last().map_or(Timestamp::EPOCH, |last| last.expires)
    }

    /// Gives back `amount` of what a request holds; the rest of it stays in flight.
    pub(crate) fn give_back(&mut self, amount: u64, id: TraceId) {
        let mut left = amount;
        for hold in self.holds.iter_mut().filter(|hold| hold.id == id) {
            let back = hold.cost.min(left);
            hold.cost = hold.cost.saturating_sub(back);
            left = left.saturating_sub(back);
        }
        self.holds.retain(|hold| hold.cost > 0);
    }

    fn in_flight(&self, now: Timestamp) -> &[Hold] {
        let ended = self.holds.partition_point(|hold| hold.expires <= now);
        self.holds.get(ended..).unwrap_or_default()
    }
}

fn sum(holds: &[Hold]) -> u64 {
    holds.iter().fold(0, |sum: u64, hold| sum.saturating_add(hold.cost))
}

impl Concurrency {
    /// `quota` at once, each for at most `ttl`.
    ///
    /// # Errors
    /// Where a figure is out of range.
    pub fn new(quota: u64, ttl: Span) -> Result<Self, LimitError> {
        if quota == 0 || quota > u64::from(MAX_CONCURRENCY) {
            return Err(LimitError(format!("a concurrency limit is between 1 and {MAX_CONCURRENCY}, not {quota}")));
        }
        if ttl.is_zero() || ttl > MAX_PERIOD {
            return Err(LimitError("a ttl is between 1 µs and 100 years".to_owned()));
        }
        Ok(Self { quota, ttl })
    }

    /// L as written.
    #[must_use]
    pub const fn quota(&self) -> u64 {
        self.quota
    }

    /// How long a hold lasts at most.
    #[must_use]
    pub const fn ttl(&self) -> Span {
        self.ttl
    }

    pub(super) fn bring(&self, state: &mut HoldsState, now: Timestamp) -> bool {
        // No hold lasts longer than the ttl from now, whatever a former clock or policy said.
        let latest = now.plus(self.ttl);
        let from = state.holds.partition_point(|hold| hold.expires <= latest);
        let late = state.holds.get_mut(from..).unwrap_or_default();
        let changed = !late.is_empty();
        for hold in late {
            hold.expires = latest;
        }
        changed
    }

    pub(super) fn look(&self, state: &HoldsState, cost: u64, now: Timestamp) -> Look {
        let holds = state.in_flight(now);
        let used = sum(holds);
        let remaining = self.quota.saturating_sub(used);
        let fits = cost <= remaining && used <= self.quota;
        Look {
            allowed: fits,
            remaining,
            ready_at: if fits { now } else { self.ready_at(holds, used, cost) },
            reset_if_charged: Timestamp::MAX,
            reset_if_not: Timestamp::MAX,
        }
    }

    fn ready_at(&self, holds: &[Hold], used: u64, cost: u64) -> Timestamp {
        if cost > self.quota {
            return Timestamp::MAX;
        }
        let mut left = used;
        for hold in holds {
            left = left.saturating_sub(hold.cost);
            if left.saturating_add(cost) <= self.quota {
                return hold.expires;
            }
        }
        Timestamp::MAX
    }

    pub(super) fn charge(&self, state: &mut HoldsState, cost: u64, now: Timestamp, id: TraceId) -> Mark {
        let ended = state.holds.partition_point(|hold| hold.expires <= now);
        state.holds.drain(..ended);
        let room = self.quota.saturating_mul(2).saturating_sub(sum(&state.holds));
        let amount = cost.min(room);
        let expires = now.plus(self.ttl);
        if amount > 0 {
            state.holds.push(Hold { id, cost: amount, expires });
        }
        Mark::new(expires, amount)
    }
}
