//! Reading: the figures of one limit that a request met, and the list of them in a decision.

use std::ops::{Deref, DerefMut};
use std::slice;

use smallvec::SmallVec;

use crate::limit::{Unit, clock_window_end};
use crate::time::{Span, Timestamp};

/// How many readings a decision holds without the heap. The largest preset meets five rules with one request.
const INLINE: usize = 6;

/// The figures of one limit that a request met.
// The fields fill one cache line of 64 bytes; a test below holds the size.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Reading {
    /// The rule's index in the policy of the decision's generation. A policy has at most 1,000 rules.
    pub(crate) rule: u16,
    /// Whether the rule is enforced, not only observed.
    pub enforced: bool,
    /// Whether the cost fits.
    pub allowed: bool,
    /// Whether this request was charged, and so whether the figures are those after its charge. A peek reports what a
    /// check would.
    pub charged: bool,
    /// What the limit counts.
    pub unit: Unit,
    /// Whether the limit is on requests in flight.
    pub(crate) at_once: bool,
    /// Whether the limit is a sliding estimate, whose `resetAt` is the end of its window.
    pub(crate) estimate: bool,
    /// The limit as written, or the burst where that is larger.
    pub limit: u64,
    /// The time in which `limit` becomes available again: the window as written, or the refill time of a larger burst.
    pub period: Span,
    /// The cost that still fits, after this request's charge.
    pub remaining: u64,
    /// The cost of this request.
    pub cost: u64,
    /// When more, or all, of the limit is available again; `Timestamp::MAX` is never.
    pub(crate) resets: Timestamp,
    /// If denied: when this cost fits; `Timestamp::MAX` is never. If allowed: `Timestamp::MAX`.
    pub(crate) ready: Timestamp,
    /// The capacity of a token bucket; 0 for limits that do not refill continuously.
    pub(crate) bucket: u64,
}

impl Reading {
    /// Returns the index of the rule in [`Policy::rules`](crate::Policy::rules) of the policy that decided.
    #[must_use]
    pub fn rule(&self) -> usize {
        usize::from(self.rule)
    }

    /// Returns when more, or all, of the limit is available again; `None` if no time can be given.
    #[must_use]
    pub fn resets(&self) -> Option<Timestamp> {
        self.resets.unless_never()
    }

    /// Returns, for a denial, when this cost fits; `None` if it never will.
    #[must_use]
    pub fn ready_at(&self) -> Option<Timestamp> {
        self.ready.unless_never()
    }

    /// Returns when more than `remaining` is available if no other request comes, for a decision made at `at`. This is the
    /// end of the draft's effective window. `None` if no time can be given.
    ///
    /// A denial with nothing remaining gives the time at which its own cost fits.
    #[must_use]
    pub fn more_at(&self, at: Timestamp) -> Option<Timestamp> {
        let more = match (self.bucket.checked_sub(1), self.resets()?) {
            // A bucket refills unit by unit and is full at `full`: count back from there to the next unit.
            (Some(last), full) if self.remaining <= last => {
                full.minus(self.refill_time(last.saturating_sub(self.remaining)))
            }
            // A full bucket has nothing to refill. One unit that is taken now is back after the time of one unit.
            (Some(_), _) => at.plus(self.refill_time(1)),
            (None, resets) if resets > at => resets,
            // Nothing is used yet: a charge made now expires one period later.
            (None, _) => at.plus(self.period),
        };
        match (self.allowed, self.remaining) {
            (true, _) => Some(more),
            // Under a `block_for` the true remainder is hidden behind a 0.
            (false, 0) => self.ready_at(),
            // A cost of several units is denied while a few are left. The next unit may come before the whole cost
            // fits.
            (false, _) => Some(self.ready_at().map_or(more, |ready| more.min(ready))),
        }
    }

    /// Returns `resets` as it would be if the request came at `later`, and nothing else were charged meanwhile: a window of the clock
    /// ends when it ends, and what this request has charged counts from its own time.
    pub(super) fn resets_if_decided(&self, at: Timestamp, later: Timestamp) -> Timestamp {
        let Some(resets) = self.resets() else { return self.resets };
        let own = resets.since(at);
        // Whether only this request is counted.
        let is_alone =
            self.remaining.saturating_add(self.cost) >= if self.bucket > 0 { self.bucket } else { self.limit };
        if self.bucket > 0 {
            let refill = if is_alone { own } else { self.refill_time(self.cost) };
            return resets.max(later.plus(refill));
        }
        if resets == clock_window_end(self.period, at) {
            return clock_window_end(self.period, later);
        }
        // A log keeps the time of a charge. A window in parts keeps the part, which mostly is the same after the delay.
        match (is_alone && own == self.period, resets > later) {
            (true, _) => later.plus(own),
            (false, true) => resets,
            // What was charged before has expired by then.
            (false, false) => later.plus(self.period),
        }
    }

    /// Returns how long `units` take to refill.
    fn refill_time(&self, units: u64) -> Span {
        let micros = u128::from(units).saturating_mul(u128::from(self.period.micros()));
        // `limit` refills in `period`, also where it is a burst: both are those that are shown.
        let micros = micros.checked_div(u128::from(self.limit)).unwrap_or(0);
        Span::from_micros(u64::try_from(micros).unwrap_or(u64::MAX))
    }

    /// Returns `resetAt` in Unix seconds, for a decision made at `at`.
    #[must_use]
    pub fn reset_at(&self, at: Timestamp) -> Option<u64> {
        if self.allowed { self.reset_if_allowed(at) } else { self.ready_at().map(|ready| reset_of_denial(ready, at)) }
    }

    /// Returns `resetAt` of an answer that allows.
    pub(super) fn reset_if_allowed(&self, at: Timestamp) -> Option<u64> {
        let reset = if self.estimate { Some(clock_window_end(self.period, at)) } else { self.resets() };
        reset.map(Timestamp::secs_ceil)
    }
}

/// Returns `resetAt` of a denial: now plus the whole seconds of `retryAfter`, so that both name the same moment.
pub(super) fn reset_of_denial(ready: Timestamp, at: Timestamp) -> u64 {
    at.plus(Span::from_secs(ready.since(at).secs_ceil())).secs_ceil()
}

/// The readings of one decision, in the order of the policy's rules. A slice of [`Reading`] in every respect.
///
/// The first six are stored in the decision itself and the rest on the heap, so a decision is small enough to be returned
/// and usually needs no allocation.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Readings(SmallVec<[Reading; INLINE]>);

impl Readings {
    #[inline]
    pub(super) fn push(&mut self, reading: Reading) {
        self.0.push(reading);
    }

    /// Removes the readings at these indices.
    pub(super) fn remove(&mut self, is_removed: impl Fn(usize) -> bool) {
        let mut index: usize = 0;
        self.0.retain(|_| {
            let is_kept = !is_removed(index);
            index = index.saturating_add(1);
            is_kept
        });
    }

    #[inline]
    pub(super) fn clear(&mut self) {
        self.0.clear();
    }
}

impl Deref for Readings {
    type Target = [Reading];

    #[inline]
    fn deref(&self) -> &[Reading] {
        &self.0
    }
}

impl DerefMut for Readings {
    #[inline]
    fn deref_mut(&mut self) -> &mut [Reading] {
        &mut self.0
    }
}

impl<'r> IntoIterator for &'r Readings {
    type Item = &'r Reading;
    type IntoIter = slice::Iter<'r, Reading>;

    fn into_iter(self) -> Self::IntoIter {
        self.iter()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_reading_fills_one_cache_line() {
        assert_eq!(size_of::<Reading>(), 64);
    }
}
