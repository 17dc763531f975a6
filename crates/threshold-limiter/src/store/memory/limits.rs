//! The limits of small balances, by number: a slot has no room for the figures of its limit.

use std::sync::OnceLock;
use std::sync::atomic::{AtomicUsize, Ordering};

use threshold_core::Limit;

/// The bits of a limit's number. Policies have fewer than a thousand limits; the balances of further limits are in the slab,
/// with their figures.
pub(super) const NUMBER_BITS: u32 = 10;
const NUMBERS: usize = 1 << NUMBER_BITS;
/// How many numbers are tried for one limit, so that the search is short even when all are assigned.
const PROBES: usize = 16;

/// The limits by number, for all shards of a table: a hash table of the figures. A number is assigned once and never freed, so
/// reading needs no lock.
#[derive(Debug)]
pub(super) struct Limits {
    known: Box<[OnceLock<Limit>]>,
    given: AtomicUsize,
}

impl Default for Limits {
    fn default() -> Self {
        Self { known: (0..NUMBERS).map(|_| OnceLock::new()).collect(), given: AtomicUsize::new(0) }
    }
}

impl Limits {
    pub(super) fn bytes(&self) -> usize {
        size_of_val(&*self.known)
    }

    #[inline]
    pub(super) fn get(&self, number: u64) -> Option<&Limit> {
        self.known.get(usize::try_from(number).ok()?)?.get()
    }

    /// Returns the number of a limit, and assigns one if it has none; `None` if all numbers that it may have are taken.
    pub(super) fn number(&self, limit: &Limit) -> Option<u64> {
        for place in places(limit) {
            let own = self.known.get(place)?;
            if own.get().is_none() && own.set(*limit).is_ok() {
                self.given.fetch_add(1, Ordering::Relaxed);
            }
            // Another thread may have set it first, to this limit or another.
            if own.get() == Some(limit) {
                return u64::try_from(place).ok();
            }
        }
        None
    }

    /// Returns the number of a limit that the policy may no longer have, as after a restart. Such limits take at most half of
    /// the numbers.
    pub(super) fn number_if_few(&self, limit: &Limit) -> Option<u64> {
        let few = self.given.load(Ordering::Relaxed) < NUMBERS / 2;
        if few { self.number(limit) } else { self.find(limit) }
    }

    fn find(&self, limit: &Limit) -> Option<u64> {
        // Numbers are never freed, so no limit is beyond the first unassigned one of its numbers.
        let mut known = places(limit).map_while(|place| Some((place, self.known.get(place)?.get()?)));
        known.find(|(_, known)| *known == limit).and_then(|(place, _)| u64::try_from(place).ok())
    }

    #[cfg(test)]
    pub(super) fn given(&self) -> usize {
        self.given.load(Ordering::Relaxed)
    }
}

/// Returns the numbers that a limit may have.
fn places(limit: &Limit) -> impl Iterator<Item = usize> {
    let algorithm = limit.algorithm().map_or(0, |algorithm| algorithm as u64);
    let figures = [algorithm, limit.quota(), limit.capacity(), limit.period().micros()];
    // The figures come from policies, not from callers, so the hash need not resist chosen collisions.
    let hash = figures
        .into_iter()
        .fold(0u64, |hash, figure| (hash ^ figure).wrapping_mul(0x9e37_79b9_7f4a_7c15).rotate_left(29));
    let first = usize::try_from(hash >> (u64::BITS - NUMBER_BITS)).unwrap_or(0);
    (0..PROBES).map(move |step| first.wrapping_add(step) & (NUMBERS - 1))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Duration;

    fn limit(number: u64) -> Limit {
        Limit::fixed(number.saturating_add(1), Duration::from_secs(60)).unwrap()
    }

    #[test]
    fn a_limit_keeps_its_number_and_the_last_numbers_are_nobodys_before() {
        let limits = Limits::default();
        let numbers: Vec<_> = (0..2_000).map(|number| limits.number(&limit(number))).collect();
        let mut given: Vec<_> = numbers.iter().flatten().copied().collect();
        assert_eq!(given.len(), limits.given());
        assert!(given.len() > 1_000, "{}", given.len());
        for (number, known) in (0..).zip(&numbers) {
            assert_eq!(limits.number(&limit(number)), *known);
            assert_eq!(known.and_then(|known| limits.get(known).copied()), known.map(|_| limit(number)));
        }
        given.sort_unstable();
        given.dedup();
        assert_eq!(given.len(), limits.given());
    }

    /// Story: a restart gave a number to every limit that callers had ever chosen, and the policy's own got none.
    #[test]
    fn limits_of_the_past_leave_half_of_the_numbers() {
        let limits = Limits::default();
        let known = limits.number(&limit(0));
        for number in 1..2_000 {
            let _ = limits.number_if_few(&limit(number));
        }
        assert_eq!(limits.given(), NUMBERS / 2);
        assert_eq!(limits.number_if_few(&limit(0)), known);
        assert!((3_000..3_100).all(|number| limits.number(&limit(number)).is_some()));
    }
}
