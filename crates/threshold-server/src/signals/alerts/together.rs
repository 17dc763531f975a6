//! Which addresses have an alert of their own, and when the others are told together: an operator can read a few messages an hour.

use std::collections::VecDeque;
use std::sync::Arc;

use threshold_core::{Span, Timestamp};

/// The most addresses with an alert of their own, at once and in an hour. The others are told together.
pub(super) const MAX_OWN: usize = 5;
/// The most further ones, each with at least [`HEAVIER`] times as many blocks as any that was told before: an attack must not hide
/// behind many small ones.
pub(super) const MAX_HEAVIER: usize = 5;
pub(super) const HEAVIER: u64 = 10;
const HOUR: Span = Span::HOUR;
/// How long the alert about several addresses stays raised after the last of them, and the least time between two notices of its growth.
pub(super) const QUIET: Span = Span::from_secs(600);

/// Several addresses that are told in one notice.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Group {
    /// The most at once in the episode so far.
    pub(crate) addresses: usize,
    /// The one with the most blocks; `None` if it was erased.
    pub(crate) largest: Option<Arc<str>>,
}

/// The alerts of single addresses that have begun in the last hour: when, and with how many blocks.
#[derive(Debug, Default)]
pub(super) struct OwnAlerts(VecDeque<(Timestamp, u64)>);

impl OwnAlerts {
    /// Forgets what is older than an hour, or in the future of a clock that was set back.
    pub(super) fn forget_old(&mut self, now: Timestamp) {
        self.0.retain(|(at, _)| *at <= now && now.since(*at) < HOUR);
    }

    /// Returns whether an address with so many blocks has an alert of its own, beside those that are `raised`, of which the heaviest
    /// has `heaviest`, and counts it. While others are told `together`, only a much heavier one has.
    pub(super) fn admit(
        &mut self,
        count: u64,
        (raised, heaviest): (usize, u64),
        together: bool,
        now: Timestamp,
    ) -> bool {
        let used = self.0.len().max(raised);
        let heaviest = self.0.iter().map(|(_, count)| *count).fold(heaviest, u64::max);
        let has_room = used < MAX_OWN && !together;
        let is_heavier = used < MAX_OWN.saturating_add(MAX_HEAVIER) && count >= heaviest.saturating_mul(HEAVIER);
        let is_admitted = has_room || is_heavier;
        if is_admitted {
            self.0.push_back((now, count));
        }
        is_admitted
    }

    #[cfg(test)]
    pub(super) fn clear(&mut self) {
        self.0.clear();
    }
}

/// What was told last of the alert about several addresses.
#[derive(Debug, Clone, Copy)]
pub(super) struct Together {
    /// When there was last an address that it is about.
    pub(super) busy: Timestamp,
    pub(super) told_at: Timestamp,
    pub(super) addresses: usize,
    pub(super) count: u64,
}

impl Together {
    /// Returns whether the episode has grown so much since the last notice that another one is due.
    pub(super) fn has_grown(&self, addresses: usize, count: u64, now: Timestamp) -> bool {
        let has_doubled = addresses >= self.addresses.saturating_mul(2) || count >= self.count.saturating_mul(2);
        has_doubled && now.since(self.told_at) >= QUIET
    }

    /// Returns whether there was no such address for long enough.
    pub(super) fn is_over(&self, now: Timestamp) -> bool {
        // Before: the clock was set back.
        now < self.busy || now.since(self.busy) >= QUIET
    }
}
