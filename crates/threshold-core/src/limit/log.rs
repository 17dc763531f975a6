//! Sliding log and sliding window: what was charged, and when each part of it leaves.
//!
//! The two are one idea at two grains. A log keeps each charge at its own time; a sliding window keeps it at
//! the end of its sub-window, where charges of one sub-window meet and become one entry. An entry counts until
//! its time is W old, so at no moment is more than L in view, and rounding the time up can only deny.

use super::{LimitError, Look, MAX_BUCKETS, MAX_LOG, Mark, check_figures};
use crate::time::{Span, Timestamp};

/// The most entries one state holds: a log's worth, or both grains of a window whose `buckets` just changed.
pub(crate) const MAX_ENTRIES: usize = 2 * (MAX_BUCKETS as usize + 1);

/// At most L in any window of W.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Log {
    quota: u64,
    period: Span,
    /// 0: every charge keeps its own time.
    buckets: u32,
}

/// Entries in the order of their times, and their sum.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct LogState {
    pub(crate) entries: Vec<Entry>,
    pub(crate) period: Span,
}

/// Cost that counts until `time` is a period old.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Entry {
    pub(crate) time: Timestamp,
    pub(crate) cost: u64,
}

impl LogState {
    /// The first moment at which this says the same as no state.
    pub(crate) fn silent_from(&self) -> Timestamp {
        self.entries.last().map_or(Timestamp::EPOCH, |last| last.time.plus(self.period))
    }

    /// Gives back a charge, if its entry is still there.
    pub(crate) fn give_back(&mut self, amount: u64, time: Timestamp) {
        if let Ok(at) = self.entries.binary_search_by_key(&time, |entry| entry.time)
            && let Some(entry) = self.entries.get_mut(at)
        {
            entry.cost = entry.cost.saturating_sub(amount);
            if entry.cost == 0 {
                self.entries.remove(at);
            }
        }
    }

    fn in_view(&self, now: Timestamp) -> &[Entry] {
        let gone = self.entries.partition_point(|entry| entry.time.plus(self.period) <= now);
        self.entries.get(gone..).unwrap_or_default()
    }
}

fn sum(entries: &[Entry]) -> u64 {
    entries.iter().fold(0, |sum: u64, entry| sum.saturating_add(entry.cost))
}

impl Log {
    /// Keeps every charge's own time.
    ///
    /// # Errors
    /// Where a figure is out of range, or the log would be longer than [`MAX_LOG`].
    pub fn exact(quota: u64, period: Span) -> Result<Self, LimitError> {
        check_figures(quota, period)?;
        if quota > u64::from(MAX_LOG) {
            return Err(LimitError(format!(
                "a sliding-log keeps at most {MAX_LOG} times a key, and this limit is {quota}; \
                 write algorithm = \"sliding-window\""
            )));
        }
        Ok(Self { quota, period, buckets: 0 })
    }

    /// Cuts the period into `buckets` sub-windows.
    ///
    /// # Errors
    /// Where a figure is out of range, or a sub-window would be shorter than a microsecond.
    pub fn bucketed(quota: u64, period: Span, buckets: u32) -> Result<Self, LimitError> {
        check_figures(quota, period)?;
        if buckets == 0 || buckets > MAX_BUCKETS {
            return Err(LimitError(format!("buckets is between 1 and {MAX_BUCKETS}, not {buckets}")));
        }
        if u64::from(buckets) > period.micros() {
            return Err(LimitError(format!("{period} cannot be cut into {buckets} buckets")));
        }
        Ok(Self { quota, period, buckets })
    }

    /// L as written.
    #[must_use]
    pub const fn quota(&self) -> u64 {
        self.quota
    }

    /// W as written.
    #[must_use]
    pub const fn period(&self) -> Span {
        self.period
    }

    /// How many sub-windows; 0 for a log.
    #[must_use]
    pub const fn buckets(&self) -> u32 {
        self.buckets
    }

    /// Whether every charge keeps its own time.
    #[must_use]
    pub const fn is_exact(&self) -> bool {
        self.buckets == 0
    }

    pub(super) fn fresh(&self) -> LogState {
        LogState { entries: Vec::new(), period: self.period }
    }

    /// The time a charge made now is kept at: its own, or the end of its sub-window.
    fn kept_at(&self, now: Timestamp) -> Timestamp {
        match self.period.micros().checked_div(u64::from(self.buckets)) {
            None => now,
            Some(grain) => {
                let grain = Span::from_micros(grain);
                now.floor_to(grain).plus(grain)
            }
        }
    }

    pub(super) fn bring(&self, state: &mut LogState, now: Timestamp) -> bool {
        let mut changed = false;
        if state.period != self.period {
            // What has left under the old period does not come back under a longer one.
            let gone = state.entries.partition_point(|entry| entry.time.plus(state.period) <= now);
            state.entries.drain(..gone);
            state.period = self.period;
            changed = true;
        }
        // Entries from the future: the clock has stepped back, or the grain became finer. They were charged
        // before now, so keeping them as of now keeps them for a whole period yet.
        let latest = self.kept_at(now);
        if state.entries.last().is_some_and(|last| last.time > latest) {
            let from = state.entries.partition_point(|entry| entry.time <= latest);
            let late: u64 = sum(state.entries.get(from..).unwrap_or_default());
            state.entries.truncate(from);
            push(&mut state.entries, Entry { time: latest, cost: late });
            changed = true;
        }
        changed
    }

    pub(super) fn look(&self, state: &LogState, cost: u64, now: Timestamp) -> Look {
        let entries = state.in_view(now);
        let used = sum(entries);
        let remaining = self.quota.saturating_sub(used);
        let fits = cost <= remaining && used <= self.quota;
        let oldest_leaves = entries.first().map(|first| first.time.plus(self.period));
        Look {
            allowed: fits,
            remaining,
            ready_at: if fits { now } else { self.ready_at(entries, used, cost) },
            reset_if_charged: oldest_leaves.unwrap_or_else(|| self.kept_at(now).plus(self.period)),
            reset_if_not: oldest_leaves.unwrap_or(now),
        }
    }

    /// When so many of the oldest have left that `cost` fits.
    fn ready_at(&self, entries: &[Entry], used: u64, cost: u64) -> Timestamp {
        if cost > self.quota {
            return Timestamp::MAX;
        }
        let mut left = used;
        for entry in entries {
            left = left.saturating_sub(entry.cost);
            if left.saturating_add(cost) <= self.quota {
                return entry.time.plus(self.period);
            }
        }
        Timestamp::MAX
    }

    pub(super) fn charge(&self, state: &mut LogState, cost: u64, now: Timestamp) -> Mark {
        let gone = state.entries.partition_point(|entry| entry.time.plus(state.period) <= now);
        state.entries.drain(..gone);
        let room = self.quota.saturating_mul(2).saturating_sub(sum(&state.entries));
        let amount = cost.min(room);
        let time = self.kept_at(now);
        if amount > 0 {
            let most = if self.is_exact() { usize::from(MAX_LOG) } else { MAX_ENTRIES };
            if state.entries.len() >= most {
                // Only debt gets here, and periods that grew while sub-windows of the old ones still count. The
                // newest entry takes it in and stays longer for it.
                if let Some(last) = state.entries.last_mut() {
                    last.time = time;
                }
            }
            push(&mut state.entries, Entry { time, cost: amount });
        }
        Mark::new(time, amount)
    }
}

/// Appends an entry, or adds it to the last one if that has its time.
fn push(entries: &mut Vec<Entry>, entry: Entry) {
    match entries.last_mut() {
        Some(last) if last.time >= entry.time => last.cost = last.cost.saturating_add(entry.cost),
        _ => entries.push(entry),
    }
}
