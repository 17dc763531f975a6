//! Limits: the list of algorithms, and every question that is asked of a limit.
//!
//! Each algorithm is a file of its own that implements `LimitAlgorithm` and is named in the list below. A [`Limit`] is one
//! of them with its figures. Nothing outside of this module knows which: it asks the limit.

mod algorithm;
mod build;
mod bytes;
mod compare;
mod concurrency;
mod entries;
mod error;
mod fixed_window;
mod list;
mod notation;
mod sliding_estimate;
mod sliding_log;
mod sliding_window;
mod token_bucket;
mod words;

use std::fmt;
use std::num::NonZeroU64;

use crate::balance::{Balance, Shaped, Small};
use crate::codec::{BytesError, Reader, Writer};
use crate::key::TraceId;
use crate::time::{Span, Timestamp};

pub(crate) use algorithm::LimitOption;
use algorithm::{AlgorithmState, Figures, LimitAlgorithm, StateSlot};
pub use build::LimitOptions;
#[cfg(test)]
pub(crate) use concurrency::Millis;
#[cfg(test)]
pub(crate) use concurrency::{Hold, Holds, MAX_HOLDS};
#[cfg(test)]
pub(crate) use entries::{Entries, Entry, MAX_ENTRIES};
pub use error::LimitError;
pub use fixed_window::Anchor;
pub use notation::{NotationError, Quota, Unit, parse_span};
pub use sliding_log::SlidingLog;
pub use token_bucket::{PackedRate, Ticks};
pub use words::Words;
pub(crate) use words::{any_period, quantity};

/// The largest quota or burst: the largest integer a structured header field can carry.
pub const MAX_QUOTA: u64 = 999_999_999_999_999;
/// The longest period: a hundred years.
pub const MAX_PERIOD: Span = Span::from_secs(100 * 365 * 86_400);
/// The most requests a sliding log keeps for one key.
pub const MAX_LOG: u16 = 1_024;
/// The most that may be in flight at once under one key.
pub const MAX_CONCURRENCY: u32 = 65_536;
/// The most sub-windows a sliding window is cut into.
pub const MAX_BUCKETS: u32 = 1_024;

list::algorithms! { [$]
    /// GCRA: a bucket that refills smoothly.
    TokenBucket in token_bucket keeps Bucket;
    /// One count per window.
    FixedWindow in fixed_window keeps WindowCount;
    /// Sub-windows that leave one by one.
    SlidingWindow in sliding_window keeps Entries;
    /// Two windows, weighted.
    SlidingEstimate in sliding_estimate keeps TwoWindows;
    /// The time of every request. It keeps the `Entries` of a sliding window.
    SlidingLog in sliding_log;
    /// How many at once.
    Concurrency in concurrency keeps Holds;
}

// After the list: they use its macros.
#[cfg(test)]
mod laws;
#[cfg(test)]
mod model;

impl Algorithm {
    /// The name as a policy writes it.
    #[must_use]
    pub const fn name(self) -> &'static str {
        each_algorithm!(self, A => <A as LimitAlgorithm>::NAME)
    }

    /// The algorithm of this name.
    #[must_use]
    pub fn named(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|algorithm| algorithm.name() == name)
    }

    /// Whether it counts requests in flight: what it charges is held until the request ends.
    #[must_use]
    pub const fn is_concurrency(self) -> bool {
        each_algorithm!(self, A => <A as LimitAlgorithm>::HELD)
    }

    /// The algorithm that serves a quota: this one, unless the quota is too large for it and another takes larger ones.
    #[must_use]
    pub const fn for_quota(self, quota: u64) -> Self {
        each_algorithm!(self, A => match <A as LimitAlgorithm>::LARGER {
            Some(larger) if quota > <A as LimitAlgorithm>::MAX_QUOTA => larger,
            Some(_) | None => self,
        })
    }

    /// Whether an option of a policy's rule is for this algorithm.
    pub(crate) fn takes(self, option: LimitOption) -> bool {
        each_algorithm!(self, A => <A as LimitAlgorithm>::OPTIONS.contains(&option))
    }

    /// The first algorithm that an option of a policy's rule is for.
    pub(crate) fn that_takes(option: LimitOption) -> Option<Self> {
        Self::ALL.into_iter().find(|algorithm| algorithm.takes(option))
    }

    fn make(self, figures: &Figures) -> Result<Limit, LimitError> {
        each_algorithm!(self, A => <A as LimitAlgorithm>::new(figures).map(Limit::from))
    }

    fn has_tag(self, tag: u8) -> bool {
        each_algorithm!(self, A => <A as LimitAlgorithm>::TAGS.contains(&tag))
    }

    fn read(self, tag: u8, from: &mut Reader<'_>) -> Result<Limit, BytesError> {
        each_algorithm!(self, A => <A as LimitAlgorithm>::read(tag, from).map(Limit::from))
    }
}

impl fmt::Display for Algorithm {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// One limit: an algorithm with its figures.
///
/// ```
/// use std::time::Duration;
/// use threshold_core::Limit;
///
/// let hundred_a_minute = Limit::per_minute(100);
/// let from_text: Limit = "100/min".parse()?;
/// assert_eq!(hundred_a_minute, from_text);
/// let exact = Limit::sliding_log(5, Duration::from_secs(900))?;
/// assert_eq!(exact.to_string(), "5/15min");
/// # Ok::<(), threshold_core::limit::LimitError>(())
/// ```
#[derive(Debug, Clone, Copy, Eq)]
pub struct Limit(Kind);

/// A table compares the limit of every balance it charges, and nearly all are token buckets.
impl PartialEq for Limit {
    #[inline]
    fn eq(&self, other: &Self) -> bool {
        if let (Kind::TokenBucket(own), Kind::TokenBucket(other)) = (&self.0, &other.0) {
            own == other
        } else {
            self.is_same_kind_as(other)
        }
    }
}

/// The answer of one limit about one cost at one moment.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Look {
    /// Whether the cost fits now.
    pub allowed: bool,
    /// The whole cost that fits now, before any charge. What an answer calls `remaining` is this less what was charged.
    pub available: u64,
    /// When this cost fits if no other request comes; `Timestamp::MAX` if it never will.
    pub ready_at: Timestamp,
    /// `resetAt` if this cost is charged now; `Timestamp::MAX` where the algorithm has none. For a sliding estimate, whose
    /// `resetAt` is the end of its window, it is when more fits.
    pub reset_if_charged: Timestamp,
    /// `resetAt` if nothing is charged; likewise.
    pub reset_if_not: Timestamp,
}

impl Look {
    /// The answer of a limit that nothing fits.
    const NEVER: Self = Self {
        allowed: false,
        available: 0,
        ready_at: Timestamp::MAX,
        reset_if_charged: Timestamp::MAX,
        reset_if_not: Timestamp::MAX,
    };
}

/// What a charge wrote: enough to give exactly that back, and nothing else.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Mark {
    /// Which part of the state was charged: the window's start, the log entry's or bucket's time, the hold's
    /// end; for a token bucket, when it is full again after the charge, plus what was given back before it.
    pub part: Timestamp,
    /// The cost that was charged. Less than was asked only where a debt saturates.
    pub amount: u64,
    /// What a token bucket's `part` has beyond whole microseconds, plus one. Never 0, so that an `Option<Mark>` is no
    /// larger than a mark.
    fraction: NonZeroU64,
}

impl Mark {
    /// A charge of `amount` to `part`.
    #[inline(always)]
    pub(crate) const fn new(part: Timestamp, amount: u64) -> Self {
        Self { part, amount, fraction: NonZeroU64::MIN }
    }

    /// Only so much of the same charge.
    pub(crate) const fn with_amount(self, amount: u64) -> Self {
        Self { amount, ..self }
    }

    /// The same charge, to a part that has a fraction of a microsecond.
    pub(crate) const fn with_fraction(self, fraction: u64) -> Self {
        Self { fraction: NonZeroU64::MIN.saturating_add(fraction), ..self }
    }

    /// What `part` has beyond whole microseconds, over the denominator of the bucket that was charged.
    pub(crate) const fn fraction(&self) -> u64 {
        self.fraction.get().saturating_sub(1)
    }
}

/// Questions about the figures.
impl Limit {
    const NEVER: Self = Self(Kind::Never);

    /// The algorithm; `None` for the limit that lets nothing through.
    #[must_use]
    #[inline]
    pub const fn algorithm(&self) -> Option<Algorithm> {
        self.0.algorithm()
    }

    /// Whether nothing ever fits: `none` or `deny = true` in a policy.
    #[must_use]
    #[inline]
    pub const fn is_never(&self) -> bool {
        matches!(self.0, Kind::Never)
    }

    /// Whether it counts requests in flight: what it charges is held until the request ends.
    #[must_use]
    #[inline]
    pub const fn is_concurrency(&self) -> bool {
        match self.algorithm() {
            Some(algorithm) => algorithm.is_concurrency(),
            None => false,
        }
    }

    /// Whether it limits how much comes over a time: all but concurrency and `none` do.
    #[must_use]
    pub const fn is_over_time(&self) -> bool {
        !self.is_never() && !self.is_concurrency()
    }

    /// Whether the capacity refills unit by unit, as a token bucket does.
    #[must_use]
    #[inline]
    pub const fn refills_smoothly(&self) -> bool {
        match self.algorithm() {
            Some(algorithm) => each_algorithm!(algorithm, A => <A as LimitAlgorithm>::REFILLS_SMOOTHLY),
            None => false,
        }
    }

    /// Whether an answer's `resetAt` is the end of the current window of the clock, [`clock_window_end`].
    #[must_use]
    #[inline]
    pub(crate) const fn resets_with_clock(&self) -> bool {
        match self.algorithm() {
            Some(algorithm) => each_algorithm!(algorithm, A => <A as LimitAlgorithm>::RESETS_WITH_CLOCK),
            None => false,
        }
    }

    /// L as written.
    #[must_use]
    #[inline]
    pub fn quota(&self) -> u64 {
        each_limit!(&self.0, limit => limit.quota(), never => 0)
    }

    /// The most that can fit at once: the burst of a token bucket, else L. A larger cost is the caller's error.
    #[must_use]
    #[inline]
    pub fn capacity(&self) -> u64 {
        each_limit!(&self.0, limit => limit.capacity(), never => 0)
    }

    /// W as written; for concurrency, how long a hold lasts at most.
    #[must_use]
    #[inline]
    pub fn period(&self) -> Span {
        each_limit!(&self.0, limit => limit.period(), never => Span::ZERO)
    }

    /// The `limit` of an answer: L as written, or the burst where that is larger. So `remaining` never exceeds it.
    #[must_use]
    #[inline]
    pub fn shown_quota(&self) -> u64 {
        each_limit!(&self.0, limit => limit.quota().max(limit.capacity()), never => 0)
    }

    /// The time in which [`shown_quota`](Self::shown_quota) is available again: W as written, or the time in which the burst
    /// refills where that is larger.
    #[must_use]
    #[inline]
    pub fn shown_period(&self) -> Span {
        each_limit!(&self.0, limit => limit.refill(), never => Span::ZERO)
    }

    /// The most this limit admits in any window of its period, by the bound of its algorithm.
    #[must_use]
    pub fn bound(&self) -> u64 {
        each_limit!(&self.0, limit => limit.bound(), never => 0)
    }

    /// The share of L, in percent rounded down, that a client gets who always asks; `None` if that is all of it.
    #[must_use]
    pub fn steady_share(&self) -> Option<u64> {
        each_limit!(&self.0, limit => limit.steady_share(), never => None)
    }

    /// The rate whose whole state is one number, for tables that keep millions of them; `None` where a state would not fit.
    #[must_use]
    pub fn packed_rate(&self, now: Timestamp) -> Option<PackedRate> {
        each_limit!(&self.0, limit => limit.packed_rate(now), never => None)
    }

    /// How long after a charge it can matter at the most: debt takes a second refill.
    pub(crate) fn memory(&self) -> Span {
        Span::from_micros(self.shown_period().micros().saturating_mul(2))
    }

    /// L and W, if it has both.
    const fn rate(&self) -> Option<(u64, Span)> {
        each_limit!(&self.0, limit => limit.rate(), never => None)
    }

    fn figures(&self) -> Option<Figures> {
        each_limit!(&self.0, limit => Some(limit.figures()), never => None)
    }

    /// Returns a limit of the same kind with another amount and period, and no burst.
    ///
    /// # Errors
    /// Returns an error if its algorithm cannot have them.
    pub(crate) fn with_rate(&self, amount: u64, period: Span) -> Result<Self, LimitError> {
        let (Some(algorithm), Some(figures)) = (self.algorithm(), self.figures()) else { return Ok(*self) };
        algorithm.make(&Figures {
            burst: None,
            anchor: figures.anchor,
            buckets: figures.buckets,
            ..Figures::new(amount, period)
        })
    }

    const fn of_bucket(bucket: token_bucket::TokenBucket) -> Self {
        Self(Kind::TokenBucket(bucket))
    }

    const fn of_window(window: sliding_window::SlidingWindow) -> Self {
        Self(Kind::SlidingWindow(window))
    }

    #[inline(never)]
    fn is_same_kind_as(&self, other: &Self) -> bool {
        self.0 == other.0
    }

    fn most_in(&self, window: Span) -> u64 {
        each_limit!(&self.0, limit => limit.most_in(window), never => 0)
    }

    fn most_in_clock_window(&self) -> u64 {
        each_limit!(&self.0, limit => limit.most_in_clock_window(), never => 0)
    }

    /// Whether it counts in windows that begin at multiples of its period since the epoch.
    #[must_use]
    pub fn counts_clock_windows(&self) -> bool {
        each_limit!(&self.0, limit => limit.counts_clock_windows(), never => false)
    }

    fn counted_for(&self) -> Span {
        each_limit!(&self.0, limit => limit.counted_for(), never => Span::ZERO)
    }

    /// What the algorithm itself says of [`fills_before`](Self::fills_before), of two limits of the same one.
    fn fills_before_own(&self, other: &Self, same_keys: bool) -> Option<bool> {
        each_limit!(&self.0, limit => limit.fills_before(InLimit::of(other)?, same_keys), never => None)
    }

    fn describe(&self, unit: Unit, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        each_limit!(&self.0, limit => limit.describe(unit, f), never => f.write_str("never"))
    }

    /// Appends the limit: a tag and its figures.
    pub(crate) fn write(&self, out: &mut Writer) {
        each_limit!(&self.0, limit => limit.write(out), never => out.byte(0));
    }

    /// Takes a limit off the front; figures that no limit can have are malformed.
    pub(crate) fn read(from: &mut Reader<'_>) -> Result<Self, BytesError> {
        let tag = from.byte()?;
        if tag == 0 {
            return Ok(Self::NEVER);
        }
        let mut result = Err(BytesError::Malformed("limit"));
        for algorithm in Algorithm::ALL.into_iter().filter(|algorithm| algorithm.has_tag(tag)) {
            // On a copy: two algorithms may share a tag, and one that refuses the figures must not consume them.
            let mut rest = from.clone();
            result = algorithm.read(tag, &mut rest);
            if result.is_ok() {
                *from = rest;
                break;
            }
        }
        result
    }

    /// The sliding log in this limit, if it is one.
    #[must_use]
    pub fn as_sliding_log(&self) -> Option<SlidingLog> {
        InLimit::of(self).copied()
    }
}

/// Questions about stored state.
impl Limit {
    /// The `resetAt` of an answer: when there is more, or all, again. `Timestamp::MAX` where the algorithm has none.
    #[must_use]
    pub fn reset_at(&self, look: &Look, charged: bool, now: Timestamp) -> Timestamp {
        match charged {
            _ if self.resets_with_clock() => clock_window_end(self.period(), now),
            true => look.reset_if_charged,
            false => look.reset_if_not,
        }
    }

    /// When `cost` would fit if this limit had just been used up by others, after `look` at it.
    pub(crate) fn ready_if_full(&self, cost: u64, look: &Look, now: Timestamp, id: TraceId) -> Timestamp {
        let reset_makes_room = match self.algorithm() {
            Some(algorithm) => each_algorithm!(algorithm, A => <A as LimitAlgorithm>::RESET_MAKES_ROOM),
            None => false,
        };
        // The oldest part of the state leaves at that moment. From a fresh balance that is filled now, nothing leaves
        // before a whole period.
        if reset_makes_room {
            return look.reset_if_charged;
        }
        let mut balance = Balance::default();
        balance.charge(self, self.capacity(), now, id);
        // A cost of 0 always fits a balance that is just full, so it would give no time to wait.
        balance.look(self, cost.max(1), now).0.ready_at
    }

    /// This limit with the figures that a state was written under, so that the state can be charged as it is.
    pub(crate) fn in_terms_of(&self, state: &State) -> Self {
        let Some((algorithm, mut figures)) = self.algorithm().zip(self.figures()) else { return *self };
        if !self.keeps(state) {
            return *self;
        }
        each_state!(state, own => own.set_terms(&mut figures), empty => {});
        // Figures of a state can be out of range for this limit, such as a burst that takes too long to refill at the
        // old rate.
        algorithm.make(&figures).unwrap_or(*self)
    }

    /// Whether the state is of the type that the algorithm keeps.
    fn keeps(&self, state: &State) -> bool {
        each_limit!(&self.0, limit => state_of(limit, state).is_some(), never => false)
    }

    /// Whether the state is in the figures of this limit, so that a mark made under it can be found again.
    #[inline]
    pub(crate) fn is_written_under(&self, state: &State) -> bool {
        each_limit!(
            &self.0,
            limit => state_of(limit, state).is_some_and(|own| limit.is_written_under(own)),
            never => false
        )
    }

    /// Converts state that was written under other figures, or by a clock that has since stepped back, into this limit's
    /// terms at `now`. What was used stays used. Returns whether anything changed.
    #[inline]
    pub(crate) fn bring(&self, state: &mut State, now: Timestamp) -> bool {
        each_limit!(&self.0, limit => bring(limit, state, now), never => false)
    }

    /// Looks at a state in any figures, and changes nothing of what it counts; see [`LimitAlgorithm::look_apart`].
    #[inline]
    pub(crate) fn look_beside(&self, state: &mut State, cost: u64, now: Timestamp) -> (Look, bool) {
        if self.is_brought(state, now) {
            return (self.look(state, cost, now), false);
        }
        self.look_apart(state, cost, now)
    }

    #[inline]
    fn is_brought(&self, state: &State, now: Timestamp) -> bool {
        each_limit!(&self.0, limit => state_of(limit, state).is_none_or(|own| limit.is_brought(own, now)), never => true)
    }

    #[cold]
    fn look_apart(&self, state: &mut State, cost: u64, now: Timestamp) -> (Look, bool) {
        let own = self.in_terms_of(state);
        each_limit!(&self.0, limit => look_apart(limit, &own, state, cost, now), never => (Look::NEVER, false))
    }

    /// Whether `cost` fits now. The state must have been brought to `now`.
    #[inline]
    pub(crate) fn look(&self, state: &State, cost: u64, now: Timestamp) -> Look {
        each_limit!(&self.0, limit => look(limit, state, cost, now), never => Look::NEVER)
    }

    /// Charges `cost`, whether or not it fits: past the capacity it becomes debt, up to one capacity more.
    #[inline]
    pub(crate) fn charge(&self, state: &mut State, cost: u64, now: Timestamp, id: TraceId) -> Mark {
        each_limit!(&self.0, limit => charge(limit, state, cost, now, id), never => Mark::new(now, 0))
    }

    /// What is left of the limit if the state counts with all that its loss would allow to be refunded again.
    pub(crate) fn remaining_if_lost(&self, state: &State, now: Timestamp) -> u64 {
        each_limit!(&self.0, limit => match state_of(limit, state) {
            Some(own) => limit.remaining_if_lost(own, now),
            None => limit.capacity(),
        }, never => 0)
    }

    /// Until when a charge counts that leaves the limit to reset at `reset`, where its mark alone cannot say that.
    pub(crate) fn counts_until(&self, reset: Timestamp) -> Timestamp {
        each_limit!(&self.0, limit => limit.counts_until(reset), never => Timestamp::MAX)
    }

    /// The latest moment at which a charge made at `now` counts, where its mark alone cannot say that.
    pub(crate) fn latest_reset(&self, mark: &Mark, now: Timestamp) -> Timestamp {
        each_limit!(&self.0, limit => limit.latest_reset(mark, now), never => Timestamp::MAX)
    }

    fn write_receipt(&self, mark: &Mark, counts_until: Timestamp, out: &mut Writer) {
        each_limit!(&self.0, limit => limit.write_receipt(mark, counts_until, out), never => {});
    }

    fn read_receipt(&self, mark: Mark, from: &mut Reader<'_>) -> Result<(Mark, Timestamp), BytesError> {
        each_limit!(&self.0, limit => limit.read_receipt(mark, from), never => Ok((mark, Timestamp::MAX)))
    }

    /// What a store's script needs to charge `cost`; `None` if it cannot.
    pub(crate) fn charge_shape(&self, cost: u64, id: TraceId) -> Option<Shaped> {
        each_limit!(&self.0, limit => limit.charge_shape(cost, id), never => None)
    }

    /// The state as two numbers, if it has constant size and is in these figures.
    #[inline]
    pub(crate) fn pack(&self, state: &State) -> Option<Small> {
        each_limit!(&self.0, limit => limit.pack(state_of(limit, state)?), never => None)
    }

    /// The state that [`pack`](Self::pack) packed.
    #[inline]
    pub(crate) fn unpack(&self, small: Small) -> State {
        each_limit!(
            &self.0,
            limit => limit.unpack(small).map_or(State::Empty, StateSlot::into_state),
            never => State::Empty
        )
    }

    /// [`look`](Self::look) at a packed state; `None` where looking would change it.
    #[inline]
    pub(crate) fn look_packed(&self, small: Small, cost: u64, now: Timestamp) -> Option<Look> {
        each_limit!(&self.0, limit => limit.look_packed(small, cost, now), never => None)
    }

    /// [`charge`](Self::charge) of a packed state; `None` where the result cannot be packed.
    #[inline]
    pub(crate) fn charge_packed(&self, small: Small, cost: u64, now: Timestamp) -> Option<(Small, Mark)> {
        each_limit!(&self.0, limit => limit.charge_packed(small, cost, now), never => None)
    }

    /// Both in one for the states that nearly all keys have; `None` for the rest.
    #[inline(always)]
    pub(crate) fn glance(&self, small: Small, cost: u64, now: Timestamp) -> Option<(Look, Small, Mark)> {
        each_limit!(&self.0, limit => limit.glance(small, cost, now), never => None)
    }
}

impl State {
    /// The first moment from which this is the same as no state.
    pub(crate) fn silent_from(&self) -> Timestamp {
        each_state!(self, own => own.silent_from(), empty => Timestamp::EPOCH)
    }

    /// The bytes it holds on the heap.
    pub(crate) fn heap_bytes(&self) -> usize {
        each_state!(self, own => own.heap_bytes(), empty => 0)
    }

    /// Gives back what `mark` charged for the request `id`, as far as that still counts.
    pub(crate) fn give_back(&mut self, mark: &Mark, now: Timestamp, id: TraceId) {
        each_state!(self, own => own.give_back(mark, now, id), empty => {});
    }

    /// Gives back an amount without its mark: what was charged last, and then what was charged before that.
    pub(crate) fn give_back_newest(&mut self, mut amount: u64, now: Timestamp) {
        while amount > 0
            && let Some(mark) = each_state!(self, own => own.newest(amount), empty => None)
        {
            self.give_back(&mark, now, TraceId::default());
            // At least 1, so that it ends whatever a state says.
            amount = amount.saturating_sub(mark.amount.max(1));
        }
    }

    /// The state as a store's script reads and writes it; `None` if no script does.
    pub(crate) fn to_shape(&self) -> Option<Shaped> {
        each_state!(self, own => own.to_shape(), empty => None)
    }

    /// The state that [`to_shape`](Self::to_shape) or a script wrote.
    pub(crate) fn from_shape(shaped: &Shaped) -> Option<Self> {
        first_state!(S => S::from_shape(shaped).map(StateSlot::into_state))
    }

    /// Appends the state: a tag and what the algorithm keeps.
    pub(crate) fn write(&self, out: &mut Writer) {
        each_state!(self, own => own.write(out), empty => out.byte(0));
    }

    /// Takes a state off the front.
    pub(crate) fn read(from: &mut Reader<'_>) -> Result<Self, BytesError> {
        let tag = from.byte()?;
        if tag == 0 {
            return Ok(Self::Empty);
        }
        let read = first_state!(S => S::TAGS.contains(&tag).then(|| S::read(tag, from).map(StateSlot::into_state)));
        read.unwrap_or(Err(BytesError::Malformed("balance")))
    }
}

/// The algorithm in a limit, if it is this one. The list implements it.
trait InLimit: Sized {
    fn of(limit: &Limit) -> Option<&Self>;
}

/// The end of the window of the clock that `now` is in.
pub(crate) fn clock_window_end(period: Span, now: Timestamp) -> Timestamp {
    now.floor_to(period).plus(period)
}

/// The state, if it is of the type that this algorithm keeps.
#[inline(always)]
fn state_of<'s, A: LimitAlgorithm>(_: &A, state: &'s State) -> Option<&'s A::State> {
    A::State::of(state)
}

#[inline]
fn bring<A: LimitAlgorithm>(limit: &A, state: &mut State, now: Timestamp) -> bool {
    match A::State::of_mut(state) {
        Some(own) => limit.bring(own, now),
        None => false,
    }
}

#[inline]
fn look<A: LimitAlgorithm>(limit: &A, state: &State, cost: u64, now: Timestamp) -> Look {
    match A::State::of(state) {
        Some(own) => limit.look(own, cost, now),
        None => limit.look(&limit.fresh(now), cost, now),
    }
}

fn look_apart<A: LimitAlgorithm + InLimit>(
    limit: &A,
    own: &Limit,
    state: &mut State,
    cost: u64,
    now: Timestamp,
) -> (Look, bool) {
    match A::State::of_mut(state) {
        Some(state) => limit.look_apart(A::of(own), state, cost, now),
        None => (limit.look(&limit.fresh(now), cost, now), false),
    }
}

#[inline]
fn charge<A: LimitAlgorithm>(limit: &A, state: &mut State, cost: u64, now: Timestamp, id: TraceId) -> Mark {
    // Empty, or the state of another algorithm. The latter is not expected, since the algorithm is a part of the key,
    // and counts as none.
    if A::State::of(state).is_none() {
        *state = limit.fresh(now).into_state();
    }
    match A::State::of_mut(state) {
        Some(own) => limit.charge(own, cost, now, id),
        // Not reached: the state was just made.
        None => Mark::new(now, 0),
    }
}

/// Checks the two figures that every limit over a time has.
fn check_figures(quota: u64, period: Span) -> Result<(), LimitError> {
    if quota == 0 || quota > MAX_QUOTA {
        return Err(LimitError::Quota { quota });
    }
    if period.is_zero() || period > MAX_PERIOD {
        return Err(LimitError::Period);
    }
    Ok(())
}
