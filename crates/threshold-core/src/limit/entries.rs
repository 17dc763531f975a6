//! The stored state of a sliding log and of a sliding window: what was charged, and until when each part of it counts.
//!
//! The two are one idea at two grains. A log keeps each charge at its own time; a sliding window keeps it at the end of its
//! sub-window, where the charges of one sub-window become one entry. An entry counts until its time is W old, so at no
//! moment is more than L in view, and rounding the time up can only deny.

use super::algorithm::{AlgorithmState, Figures, read_time, write_time};
use super::{Look, MAX_BUCKETS, Mark};
use crate::balance::Shaped;
use crate::codec::{BytesError, Reader, Writer};
use crate::key::TraceId;
use crate::time::{Span, Timestamp};

/// The most entries one state holds: a log's worth, or both grains of a window whose `buckets` just changed.
pub(crate) const MAX_ENTRIES: usize = 2 * (MAX_BUCKETS as usize + 1);

/// Entries in the order of their times, no two at the same time.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct Entries {
    pub(crate) entries: Vec<Entry>,
    pub(crate) period: Span,
}

/// A cost that counts until `time` is a period old.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Entry {
    pub(crate) time: Timestamp,
    pub(crate) cost: u64,
}

/// The figures of the limit that counts entries.
#[derive(Debug, Clone, Copy)]
pub(super) struct Sliding {
    pub(super) quota: u64,
    pub(super) period: Span,
    /// The time at which a charge made now is kept: its own, or the end of its sub-window.
    pub(super) kept_at: Timestamp,
    /// The most entries that a charge leaves.
    pub(super) max_entries: usize,
}

impl Sliding {
    pub(super) fn bring(&self, state: &mut Entries, now: Timestamp) -> bool {
        let mut changed = false;
        if state.period != self.period {
            // What has left under the old period does not come back under a longer one.
            state.drop_left(now);
            state.period = self.period;
            changed = true;
        }
        // Entries from the future: the clock has stepped back, or the grain became finer. They were charged
        // before now, so keeping them as of now keeps them for a whole period yet.
        let latest = self.kept_at;
        if state.entries.last().is_some_and(|last| last.time > latest) {
            let from = state.entries.partition_point(|entry| entry.time <= latest);
            let late: u64 = sum(state.entries.get(from..).unwrap_or_default());
            state.entries.truncate(from);
            state.push(Entry { time: latest, cost: late });
            changed = true;
        }
        changed
    }

    /// Looks at entries that are kept under another period: each counts until the shorter of both is over.
    pub(super) fn look_apart(&self, state: &Entries, cost: u64, now: Timestamp) -> Look {
        let mut state = state.clone();
        state.drop_left(now);
        let stays = Self { period: state.period, ..*self }.look(&state, cost, now);
        state.period = self.period;
        let mut look = self.look(&state, cost, now);
        look.ready_at = look.ready_at.min(stays.ready_at);
        look.reset_if_not = look.reset_if_not.min(stays.reset_if_not);
        look
    }

    pub(super) fn is_brought(&self, state: &Entries) -> bool {
        state.period == self.period && state.entries.last().is_none_or(|last| last.time <= self.kept_at)
    }

    pub(super) fn look(&self, state: &Entries, cost: u64, now: Timestamp) -> Look {
        let entries = state.in_view(now);
        let used = sum(entries);
        let available = self.quota.saturating_sub(used);
        // In debt nothing fits, not even a cost of 0.
        let fits = cost <= available && used <= self.quota;
        // Some room comes when the oldest entry leaves, however many are behind it.
        let oldest_leaves = entries.first().map(|first| first.time.plus(self.period));
        Look {
            allowed: fits,
            available,
            ready_at: if fits { now } else { self.ready_at(entries, used, cost) },
            reset_if_charged: oldest_leaves.unwrap_or_else(|| self.kept_at.plus(self.period)),
            reset_if_not: oldest_leaves.unwrap_or(now),
        }
    }

    /// When so many of the oldest have left that `cost` fits.
    fn ready_at(&self, entries: &[Entry], used: u64, cost: u64) -> Timestamp {
        if cost > self.quota {
            return Timestamp::MAX;
        }
        // The oldest leave first, so the first entry after which the cost fits gives the earliest moment.
        let mut left = used;
        for entry in entries {
            left = left.saturating_sub(entry.cost);
            if left.saturating_add(cost) <= self.quota {
                return entry.time.plus(self.period);
            }
        }
        // Not reached: without any entry every cost up to the quota fits.
        Timestamp::MAX
    }

    pub(super) fn charge(&self, state: &mut Entries, cost: u64, now: Timestamp) -> Mark {
        // First, so that the sum below has only what counts, and a log that is never idle does not grow.
        state.drop_left(now);
        let room = self.quota.saturating_mul(2).saturating_sub(sum(&state.entries));
        let amount = cost.min(room);
        let time = self.kept_at;
        if amount > 0 {
            if state.entries.len() >= self.max_entries {
                // Only debt gets here, and periods that grew while sub-windows of the old ones still count. The
                // newest entry takes it in and stays longer for it.
                // Receipts of what it held no longer find it, and give nothing back. That denies more, never less.
                if let Some(last) = state.entries.last_mut() {
                    last.time = time;
                }
            }
            state.push(Entry { time, cost: amount });
        }
        Mark::new(time, amount)
    }
}

impl Sliding {
    /// The numbers of a charge for a script. A log has a grain of 0.
    pub(super) fn charge_shape(&self, grain: Span, cost: u64) -> Option<Shaped> {
        let most = u64::try_from(self.max_entries).ok()?;
        let numbers = vec![self.quota, self.period.micros(), grain.micros(), cost, most];
        Some(Shaped { shape: Entries::SHAPE, numbers })
    }
}

impl Entries {
    /// Its shape in scripts.
    const SHAPE: u8 = 4;

    /// No entries, under this period.
    pub(super) fn none(period: Span) -> Self {
        Self { entries: Vec::new(), period }
    }

    fn has_left(&self, entry: &Entry, now: Timestamp) -> bool {
        entry.time.plus(self.period) <= now
    }

    fn in_view(&self, now: Timestamp) -> &[Entry] {
        let gone = self.entries.partition_point(|entry| self.has_left(entry, now));
        self.entries.get(gone..).unwrap_or_default()
    }

    /// Whether an entry lies further ahead than the end of any sub-window.
    pub(super) fn is_of_the_future(&self, now: Timestamp) -> bool {
        self.entries.last().is_some_and(|last| last.time > now.plus(self.period))
    }

    fn drop_left(&mut self, now: Timestamp) {
        let gone = self.entries.partition_point(|entry| self.has_left(entry, now));
        self.entries.drain(..gone);
    }

    /// Appends an entry, or adds it to the last one if that has its time.
    fn push(&mut self, entry: Entry) {
        match self.entries.last_mut() {
            // `bring` has moved later entries to the time of this one, so the last one is never later than that.
            Some(last) if last.time >= entry.time => last.cost = last.cost.saturating_add(entry.cost),
            _ => self.entries.push(entry),
        }
    }
}

fn sum(entries: &[Entry]) -> u64 {
    entries.iter().fold(0, |sum: u64, entry| sum.saturating_add(entry.cost))
}

impl AlgorithmState for Entries {
    const TAGS: &'static [u8] = &[3];
    /// A tag, a period, a count, and two numbers of at most 10 bytes for each entry.
    const MAX_BYTES: usize = 1 + 2 * 10 + MAX_ENTRIES * 2 * 10;

    fn silent_from(&self) -> Timestamp {
        self.entries.last().map_or(Timestamp::EPOCH, |last| last.time.plus(self.period))
    }

    fn heap_bytes(&self) -> usize {
        self.entries.capacity().saturating_mul(size_of::<Entry>())
    }

    fn set_terms(&self, figures: &mut Figures) {
        figures.period = self.period;
    }

    fn to_shape(&self) -> Option<Shaped> {
        let mut numbers = vec![self.period.micros(), sum(&self.entries)];
        numbers.extend(self.entries.iter().flat_map(|entry| [entry.time.micros(), entry.cost]));
        Some(Shaped { shape: Self::SHAPE, numbers })
    }

    /// The sum is for the script: it is the sum of the entries, or of all of which the one entry stands for the oldest.
    fn from_shape(shaped: &Shaped) -> Option<Self> {
        let (Self::SHAPE, [period, total, entries @ ..]) = (shaped.shape, &shaped.numbers[..]) else { return None };
        let (pairs, rest) = entries.as_chunks::<2>();
        let entries = pairs.iter().map(|[time, cost]| Entry { time: Timestamp::from_micros(*time), cost: *cost });
        let entries: Vec<Entry> = entries.collect();
        // `in_view` and `give_back` search by bisection, which is wrong on entries out of order.
        let in_order = entries.is_sorted_by(|one, next| one.time < next.time);
        let sound = rest.is_empty() && entries.len() <= MAX_ENTRIES && in_order && sum(&entries) == *total;
        sound.then(|| Self { entries, period: Span::from_micros(*period) })
    }

    /// A charge counts while its entry is there.
    fn give_back(&mut self, mark: &Mark, _now: Timestamp, _id: TraceId) {
        // No entry at the mark's time: it has left, or was moved when the clock stepped back. There is nothing to give
        // back then.
        if let Ok(at) = self.entries.binary_search_by_key(&mark.part, |entry| entry.time)
            && let Some(entry) = self.entries.get_mut(at)
        {
            entry.cost = entry.cost.saturating_sub(mark.amount);
            if entry.cost == 0 {
                self.entries.remove(at);
            }
        }
    }

    fn newest(&self, most: u64) -> Option<Mark> {
        self.entries.last().map(|entry| Mark::new(entry.time, entry.cost.min(most)))
    }

    fn write(&self, out: &mut Writer) {
        out.byte(3);
        out.number(self.period.micros());
        out.number(self.entries.len() as u64);
        let mut before = Timestamp::EPOCH;
        for entry in &self.entries {
            write_time(entry.time, before, out);
            out.number(entry.cost);
            before = entry.time;
        }
    }

    fn read(_tag: u8, from: &mut Reader<'_>) -> Result<Self, BytesError> {
        let period = Span::from_micros(from.number()?);
        let count = from.count(MAX_ENTRIES)?;
        let mut entries = Vec::with_capacity(count);
        let mut time = Timestamp::EPOCH;
        for index in 0..count {
            let before = time;
            time = read_time(from, before)?;
            // Two entries at one time would be a second spelling of one entry with their sum.
            if time == before && index > 0 {
                return Err(BytesError::Malformed("log"));
            }
            let cost = from.number()?;
            entries.push(Entry { time, cost });
        }
        Ok(Self { entries, period })
    }
}
