//! The trait behind every limit, and the figures that a limit is made from.
//!
//! An algorithm is one file that implements [`LimitAlgorithm`] for its figures and [`AlgorithmState`] for what it
//! stores of one key, and one entry of the list in `limit.rs`. Everything else in this program asks a
//! [`Limit`](super::Limit), which dispatches to these traits statically.

use std::fmt;

use super::{Algorithm, Anchor, LimitError, Look, MAX_QUOTA, Mark, PackedRate, State, Unit};
use crate::balance::{Shaped, Small};
use crate::codec::{BytesError, Reader, Writer};
use crate::key::TraceId;
use crate::time::{Span, Timestamp};

/// One algorithm with its figures.
///
/// The four operations on stored state are [`bring`](Self::bring), [`look`](Self::look), [`charge`](Self::charge) and
/// [`AlgorithmState::give_back`]. Looking changes nothing, and charging never asks whether the cost fits.
///
/// Beside the trait every algorithm has a method of its own, `const fn rate(&self) -> Option<(u64, Span)>`: its quota and
/// period, if it has both. Constants cannot call traits, and [`Limit::burst`](super::Limit::burst) is one.
pub(crate) trait LimitAlgorithm: Copy + Eq + fmt::Debug {
    /// What is stored of one key. Two algorithms may share a type.
    type State: AlgorithmState;

    /// The name in policies, on the wire, and in the digests of keys.
    const NAME: &'static str;
    /// The first byte of the stored figures: never reuse one. Where two algorithms share a tag, the first of the list that
    /// can read the figures does.
    const TAGS: &'static [u8];
    /// The keys of a policy that are this algorithm's own.
    const OPTIONS: &'static [LimitOption] = &[];
    /// Whether a charge is held until its request ends, and its figures have a ttl in place of a period.
    const HELD: bool = false;
    /// The largest quota.
    const MAX_QUOTA: u64 = MAX_QUOTA;
    /// The algorithm that takes quotas beyond [`MAX_QUOTA`](Self::MAX_QUOTA).
    const LARGER: Option<Algorithm> = None;
    /// Whether the capacity refills unit by unit, so that there is more before there is all of it.
    const REFILLS_SMOOTHLY: bool = false;
    /// Whether [`Look::reset_if_charged`] is also when there is room again in a limit that is used up.
    const RESET_MAKES_ROOM: bool = false;
    /// Whether an answer's `resetAt` is the end of the current window of the clock.
    const RESETS_WITH_CLOCK: bool = false;

    /// Makes a limit of these figures.
    fn new(figures: &Figures) -> Result<Self, LimitError>;

    /// The figures this limit was made from, all of them said.
    fn figures(&self) -> Figures;

    /// L as written.
    fn quota(&self) -> u64;

    /// W as written, or the ttl of a hold.
    fn period(&self) -> Span;

    /// The largest cost that can ever fit.
    #[inline]
    fn capacity(&self) -> u64 {
        self.quota()
    }

    /// The time in which the whole capacity is available again, at least the period.
    #[inline]
    fn refill(&self) -> Span {
        self.period()
    }

    /// The most that is admitted in any window of the period.
    fn bound(&self) -> u64;

    /// The most that is admitted in any window of this length.
    fn most_in(&self, window: Span) -> u64 {
        self.bound().saturating_mul(periods_in(window, self.period()))
    }

    /// The most that is admitted in one window of the clock, which begins at a multiple of the period. Less than the
    /// [`bound`](Self::bound) for algorithms that count in such windows.
    fn most_in_clock_window(&self) -> u64 {
        self.bound()
    }

    /// Whether exactly the charges of the present window of the clock count.
    fn counts_clock_windows(&self) -> bool {
        false
    }

    /// The longest time for which a charge counts against later ones.
    fn counted_for(&self) -> Span {
        self.period()
    }

    /// The share of the quota, in percent rounded down, that a client gets who always asks; `None` if that is all of it.
    fn steady_share(&self) -> Option<u64> {
        None
    }

    /// Whether this limit is used up before `other` can be, if both are charged with the same requests; `None` if that
    /// follows from their bounds alone. `same_keys` says whether both count by the same keys.
    fn fills_before(&self, _other: &Self, _same_keys: bool) -> Option<bool> {
        None
    }

    /// Says the limit in words, counting in `unit`.
    fn describe(&self, unit: Unit, f: &mut fmt::Formatter<'_>) -> fmt::Result;

    /// Appends a tag and the figures.
    fn write(&self, out: &mut Writer);

    /// Takes the figures after `tag` off the front.
    fn read(tag: u8, from: &mut Reader<'_>) -> Result<Self, BytesError>;

    /// The state of a key that was never charged.
    fn fresh(&self, now: Timestamp) -> Self::State;

    /// Whether the state was written under these figures, so that a mark made under them can be found in it.
    fn is_written_under(&self, state: &Self::State) -> bool;

    /// Converts a state that was written under other figures, or by a clock that has since stepped back. The cost that was
    /// used stays used. Returns whether anything changed.
    fn bring(&self, state: &mut Self::State, now: Timestamp) -> bool;

    /// Whether [`bring`](Self::bring) would leave the state as it is; `false` where that is not quickly said.
    #[inline]
    fn is_brought(&self, state: &Self::State, now: Timestamp) -> bool {
        !self.bring(&mut state.clone(), now)
    }

    /// Looks at a state that a charge would convert, and leaves what it counts in its own figures, which are those of `own`: a request
    /// that is charged nothing must not change what was used. What lies in the future, after the clock has stepped back, is brought
    /// back if there is a cost; returns also whether it was.
    fn look_apart(&self, own: Option<&Self>, state: &mut Self::State, cost: u64, now: Timestamp) -> (Look, bool) {
        let own = own.filter(|own| own.is_written_under(state));
        let changed = cost > 0 && own.is_some_and(|own| own.bring(state, now));
        let mut brought = state.clone();
        self.bring(&mut brought, now);
        let mut look = self.look(&brought, cost, now);
        if let Some(stays) = own.map(|own| own.look(state, cost, now)) {
            // It is converted again at each look, and until then leaves as it would without any.
            look.ready_at = if look.allowed { now } else { look.ready_at.max(stays.ready_at) };
            look.reset_if_not = look.reset_if_not.max(stays.reset_if_not);
        }
        (look, changed)
    }

    /// Whether `cost` fits, and when. The state has been brought to `now`.
    fn look(&self, state: &Self::State, cost: u64, now: Timestamp) -> Look;

    /// Charges `cost`, whether or not it fits: beyond the capacity it becomes debt, up to one capacity more. The state has
    /// been brought to `now`.
    fn charge(&self, state: &mut Self::State, cost: u64, now: Timestamp, id: TraceId) -> Mark;

    /// What is left of the limit if the state counts with all that its loss would allow to be refunded again.
    fn remaining_if_lost(&self, state: &Self::State, now: Timestamp) -> u64 {
        self.look(state, 0, now).available
    }

    /// Until when a charge counts that leaves the limit to reset at `reset`, where the mark alone cannot say that.
    #[inline]
    fn counts_until(&self, _reset: Timestamp) -> Timestamp {
        Timestamp::MAX
    }

    /// The latest moment at which a charge made at `now` counts, where the mark alone does not say that.
    #[inline]
    fn latest_reset(&self, _mark: &Mark, _now: Timestamp) -> Timestamp {
        Timestamp::MAX
    }

    /// Appends what a receipt keeps of a charge beyond its part and amount.
    fn write_receipt(&self, _mark: &Mark, _counts_until: Timestamp, _out: &mut Writer) {}

    /// Takes what [`write_receipt`](Self::write_receipt) wrote off the front: the whole mark, and until when it counts.
    fn read_receipt(&self, mark: Mark, _from: &mut Reader<'_>) -> Result<(Mark, Timestamp), BytesError> {
        Ok((mark, Timestamp::MAX))
    }

    /// The state as two numbers, if it has constant size, is in these figures, and its numbers are small enough.
    #[inline(always)]
    fn pack(&self, _state: &Self::State) -> Option<Small> {
        None
    }

    /// The state that [`pack`](Self::pack) packed; `None` if it packs none.
    #[inline(always)]
    fn unpack(&self, _small: Small) -> Option<Self::State> {
        None
    }

    /// [`look`](Self::look) at a packed state; `None` where looking would change it.
    #[inline]
    fn look_packed(&self, small: Small, cost: u64, now: Timestamp) -> Option<Look> {
        let mut state = self.unpack(small)?;
        if self.bring(&mut state, now) { None } else { Some(self.look(&state, cost, now)) }
    }

    /// [`charge`](Self::charge) of a packed state; `None` where the result cannot be packed.
    #[inline]
    fn charge_packed(&self, small: Small, cost: u64, now: Timestamp) -> Option<(Small, Mark)> {
        let mut state = self.unpack(small)?;
        // A state that is packed keeps no ids.
        let mark = self.charge(&mut state, cost, now, TraceId::default());
        Some((self.pack(&state)?, mark))
    }

    /// Both in one for the states that nearly all keys have; `None` for the rest. The charge counts only if it fits.
    #[inline(always)]
    fn glance(&self, _small: Small, _cost: u64, _now: Timestamp) -> Option<(Look, Small, Mark)> {
        None
    }

    /// What a store's script needs to charge `cost` for the request `id` to a state that was written under these figures: the numbers
    /// that `charge.lua` takes for the shape of the state. `None` if the script does not know the state.
    fn charge_shape(&self, _cost: u64, _id: TraceId) -> Option<Shaped> {
        None
    }

    /// The rate whose whole state is one number, if this limit has one.
    fn packed_rate(&self, _now: Timestamp) -> Option<PackedRate> {
        None
    }
}

/// What an algorithm stores of one key.
pub(crate) trait AlgorithmState: StateSlot + Clone {
    /// The bytes that begin a stored state of this type: never reuse one.
    const TAGS: &'static [u8];
    /// No stored state is longer, its tag included.
    const MAX_BYTES: usize;

    /// The first moment from which this is the same as no state.
    fn silent_from(&self) -> Timestamp;

    /// The bytes it holds on the heap.
    fn heap_bytes(&self) -> usize {
        0
    }

    /// Changes `figures` to those the state was written under, as far as it says them.
    fn set_terms(&self, figures: &mut Figures);

    /// Gives back what `mark` charged for the request `id`, as far as that still counts.
    fn give_back(&mut self, mark: &Mark, now: Timestamp, id: TraceId);

    /// A mark of at most `most` of what was charged last, as far as that still counts; `None` if nothing does. Giving it back must leave
    /// less than before.
    fn newest(&self, most: u64) -> Option<Mark>;

    /// The state as a store's script reads and writes it; `None` if no script does.
    fn to_shape(&self) -> Option<Shaped> {
        None
    }

    /// The state that [`to_shape`](Self::to_shape) or a script wrote; `None` for the shapes of other states, and for numbers that
    /// no charge leaves.
    fn from_shape(_shaped: &Shaped) -> Option<Self> {
        None
    }

    /// Appends a tag and the state.
    fn write(&self, out: &mut Writer);

    /// Takes the state after `tag` off the front. Bytes that no charge or refund leaves are malformed.
    fn read(tag: u8, from: &mut Reader<'_>) -> Result<Self, BytesError>;
}

/// The place of a state type in [`State`]. The list implements it.
pub(crate) trait StateSlot: Sized {
    /// The state, if it is of this type.
    fn of(state: &State) -> Option<&Self>;

    /// The same, to be changed.
    fn of_mut(state: &mut State) -> Option<&mut Self>;

    /// As the state of any algorithm.
    fn into_state(self) -> State;
}

/// A key of a policy that belongs to some algorithms only.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum LimitOption {
    Anchor,
    Buckets,
    Burst,
    Ttl,
}

impl LimitOption {
    /// The key as a policy writes it.
    pub(crate) const fn name(self) -> &'static str {
        match self {
            Self::Anchor => "anchor",
            Self::Buckets => "buckets",
            Self::Burst => "burst",
            Self::Ttl => "ttl",
        }
    }
}

/// All figures that a limit may have. Each algorithm takes its own and leaves the others.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Figures {
    /// L.
    pub(crate) quota: u64,
    /// W, or the ttl of a hold.
    pub(crate) period: Span,
    /// The capacity of a token bucket; the quota, unless said.
    pub(crate) burst: Option<u64>,
    /// Where fixed windows begin.
    pub(crate) anchor: Anchor,
    /// Sub-windows of a sliding window.
    pub(crate) buckets: u32,
}

impl Figures {
    /// Sub-windows of a sliding window, unless said: those of an hour are a minute long.
    pub(crate) const BUCKETS: u32 = 60;

    /// `quota` per `period`, and everything else as in a policy that does not say.
    pub(crate) const fn new(quota: u64, period: Span) -> Self {
        Self { quota, period, burst: None, anchor: Anchor::Clock, buckets: Self::BUCKETS }
    }

    /// `factor` times as much in the same period.
    pub(super) fn times(self, factor: u64) -> Self {
        let more = |amount: u64| amount.saturating_mul(factor.max(1));
        Self { quota: more(self.quota), burst: self.burst.map(more), ..self }
    }
}

/// Writes a time as the difference to the one before it: neighbours are close together, so most take three bytes.
pub(super) fn write_time(time: Timestamp, before: Timestamp, out: &mut Writer) {
    out.number(time.since(before).micros());
}

/// Takes off what [`write_time`] wrote. A sum past the end of time is not rounded down to it: two spellings of one state
/// would be two states to a store that compares bytes.
pub(super) fn read_time(from: &mut Reader<'_>, before: Timestamp) -> Result<Timestamp, BytesError> {
    let micros = before.micros().checked_add(from.number()?);
    micros.map(Timestamp::from_micros).ok_or(BytesError::Malformed("time"))
}

/// Returns how many periods a window of this length touches at least: rounded up, and never 0.
pub(super) fn periods_in(window: Span, period: Span) -> u64 {
    window.micros().div_ceil(period.micros().max(1)).max(1)
}
