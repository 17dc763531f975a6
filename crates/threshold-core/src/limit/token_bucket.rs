//! Token bucket by GCRA: one moment says how full the bucket is.
//!
//! The theoretical arrival time (TAT) is when the bucket will be full again. A charge moves it on by
//! `cost * W / L`; it may lie at most `burst * W / L` ahead of now. The moment is kept exactly, as whole
//! microseconds and a fraction over the reduced denominator of `W / L`, so that nothing is rounded: a full
//! burst always fits, no refill is lost however fast the rate, and the bound `burst + L` is exact.

#[cfg(test)]
mod definition;
mod level;
mod packed;
mod refunded;

use std::fmt;

use super::algorithm::{AlgorithmState, Figures, LimitAlgorithm, LimitOption};
use super::words::{any_period, quantity};
use super::{LimitError, Look, MAX_QUOTA, Mark, Unit, check_figures};
use crate::balance::{Shaped, Small};
use crate::codec::{BytesError, Reader, Writer};
use crate::key::TraceId;
use crate::time::{Span, Timestamp};

use level::Interval;
pub(crate) use level::Level;
pub use packed::{PackedRate, Ticks};
pub(crate) use refunded::RefundedBucket;

/// The longest a bucket may take to fill from empty. With [`MAX_QUOTA`] it keeps every product below within 128 bits:
/// a moment is less than `2^64 * MAX_QUOTA`, which is less than `2^114`.
const MAX_FILL: Span = Span::from_secs(1_000 * 365 * 86_400);
/// Fractional bits kept while used cost is converted from one rate to another: a millionth of a unit.
const CARRY_BITS: u32 = 20;
/// A level further ahead than this, and than the burst that asks can leave it, was written before the clock stepped back. Few bursts
/// take longer to refill.
pub(super) const FUTURE: Span = Span::from_secs(600);

/// A token bucket: L per W, refilled smoothly, `burst` at once.
#[derive(Debug, Clone, Copy, Eq)]
pub(crate) struct TokenBucket {
    quota: u64,
    period: Span,
    burst: u64,
    /// The time in which one unit refills.
    interval: Interval,
    /// The time a burst takes to refill, in microseconds, where one unit takes a whole number of them.
    whole_capacity: Option<u64>,
    /// The same rounded up, but at least the period.
    refill: Span,
}

/// The other figures follow from these.
impl PartialEq for TokenBucket {
    #[inline]
    fn eq(&self, other: &Self) -> bool {
        (self.quota, self.period, self.burst) == (other.quota, other.period, other.burst)
    }
}

/// What is stored of one bucket.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Bucket {
    /// How full it is.
    Plain(Level),
    /// One that was given back to while later charges counted. Boxed, so that every other state stays as small as it is.
    Refunded(Box<RefundedBucket>),
}

impl Bucket {
    #[inline]
    fn level(&self) -> &Level {
        match self {
            Self::Plain(level) => level,
            Self::Refunded(refunded) => &refunded.level,
        }
    }
}

impl TokenBucket {
    /// The bucket of these figures, with the largest burst up to `burst` that refills within [`MAX_FILL`]. The quota and
    /// the period are in range, and the burst is not 0.
    pub(super) const fn clamped(quota: u64, period: Span, burst: u64) -> Self {
        // Reduced once, here: each charge then needs a multiplication and no division.
        let interval = Interval::new(quota, period);
        let most = interval.most_within(MAX_FILL);
        let burst = if burst > most { most } else { burst };
        // With more than one part to a microsecond a level has a fraction, which the 64-bit paths below do not carry.
        let whole_capacity = if interval.parts == 1 { burst.checked_mul(interval.step) } else { None };
        let full = interval.round_up(interval.cost(burst)).since(Timestamp::EPOCH);
        let refill = if full.micros() > period.micros() { full } else { period };
        Self { quota, period, burst, interval, whole_capacity, refill }
    }

    /// L and W.
    pub(super) const fn rate(&self) -> Option<(u64, Span)> {
        Some((self.quota, self.period))
    }

    /// The furthest ahead of now a state may lie: a whole burst and as much debt.
    fn deepest(&self) -> u128 {
        self.interval.cost(self.burst).saturating_mul(2)
    }

    /// The latest that a bucket can be full again, in ticks, whatever it is charged now.
    fn latest(&self, now: Timestamp) -> u128 {
        self.interval.moment(now, 0).saturating_add(self.deepest())
    }

    #[inline]
    fn bring_level(&self, level: &mut Level, now: Timestamp) -> bool {
        let in_terms = level.is_in_terms_of(self);
        // A level at most one burst ahead is as a charge leaves it. One further ahead is debt, or was written before
        // the clock stepped back, and the slow path bounds it.
        if in_terms && self.whole_capacity.is_some_and(|capacity| level.full_at.since(now).micros() <= capacity) {
            return false;
        }
        self.bring_from_afar(level, in_terms, now)
    }

    /// The same for a level in other figures, one with a fraction, and one far ahead.
    #[inline(never)]
    fn bring_from_afar(&self, level: &mut Level, in_terms: bool, now: Timestamp) -> bool {
        let before = *level;
        let furthest = self.furthest(level, now);
        if level.moment() > furthest {
            // Written by a clock that has since stepped back.
            (level.full_at, level.fraction) = level.interval().split(furthest);
        }
        if !in_terms && !self.is_overdrawn(level, now) {
            self.convert(level, now);
        }
        *level != before
    }

    /// The furthest ahead of now a level may lie, in its own ticks. A limit with another burst may have left it, so the bound is not
    /// that of this burst alone: a request under a small burst would forget what was used under a large one.
    fn furthest(&self, level: &Level, now: Timestamp) -> u128 {
        let own = level.interval();
        let most = own.cost(self.burst.max(level.quota)).saturating_mul(2);
        own.moment(now, 0).saturating_add(most)
    }

    /// Whether more is used of a level in other figures than this limit can count: its capacity and as much debt.
    ///
    /// Such a level keeps its figures until enough has refilled. Reduced to what this limit can count it would forget the rest, and the
    /// limit that it was charged under may be asked again, as where a client has two tiers.
    fn is_overdrawn(&self, level: &Level, now: Timestamp) -> bool {
        level.used(now) > u128::from(self.burst).saturating_mul(2 << CARRY_BITS)
    }

    /// Rescales a level that is not overdrawn, so that the cost that is used stays used under the new rate. Both divisions round up,
    /// so that a change never grants; a millionth of a unit is the most that is lost by it.
    fn convert(&self, level: &mut Level, now: Timestamp) {
        let used = level.used(now);
        let backlog = used.saturating_mul(u128::from(self.interval.step)).div_ceil(1 << CARRY_BITS);
        let (full_at, fraction) = self.interval.split(self.interval.moment(now, 0).saturating_add(backlog));
        *level = Level { full_at, fraction, quota: self.quota, period: self.period };
    }

    /// Brings a bucket that was given back to; it becomes a plain one as soon as that says the same.
    #[cold]
    fn bring_refunded(&self, bucket: &mut Bucket, now: Timestamp) -> bool {
        let Bucket::Refunded(refunded) = bucket else { return false };
        // Until then a receipt may ask for something, and only this state knows how much of it was given back before.
        if refunded.silent_from() > now {
            return refunded.bring(self, now);
        }
        // All receipts have run out, so what was given back matters to none of them.
        let mut level = refunded.level;
        self.bring_level(&mut level, now);
        *bucket = Bucket::Plain(level);
        true
    }

    #[inline]
    fn look_at(&self, level: &Level, cost: u64, now: Timestamp) -> Look {
        if !level.is_in_terms_of(self) {
            return self.look_at_other_figures(level, cost, now);
        }
        self.look_whole(level.full_at, cost, now).unwrap_or_else(|| self.look_exactly(level, cost, now))
    }

    /// The same where nothing has a fraction, nothing is owed and everything fits 64 bits, as nearly always: a third of the
    /// work. `None` where that is not so.
    #[inline(always)]
    fn look_whole(&self, full_at: Timestamp, cost: u64, now: Timestamp) -> Option<Look> {
        let (step, capacity) = (self.interval.step, self.whole_capacity?);
        let backlog = full_at.since(now).micros();
        // A cost from a client can be any 64-bit number. What overflows takes the exact path.
        let after = cost.checked_mul(step)?.checked_add(backlog)?;
        // `glance` comes here without `bring`, and a level this far ahead may have to be brought back first.
        if backlog > capacity {
            return None;
        }
        let later = |micros: u64| now.plus(Span::from_micros(micros));
        Some(Look {
            allowed: after <= capacity,
            available: capacity.saturating_sub(backlog).checked_div(step).unwrap_or(0),
            ready_at: if after <= capacity {
                now
            } else if cost > self.burst {
                Timestamp::MAX
            } else {
                later(after.saturating_sub(capacity))
            },
            reset_if_charged: later(after),
            reset_if_not: later(backlog),
        })
    }

    #[inline(never)]
    fn look_exactly(&self, level: &Level, cost: u64, now: Timestamp) -> Look {
        let interval = self.interval;
        let capacity = interval.cost(self.burst);
        let start = interval.moment(now, 0);
        let backlog = interval.moment(level.full_at, level.fraction).saturating_sub(start);
        let after = backlog.saturating_add(interval.cost(cost));
        let fits = after <= capacity;
        let later = |ticks: u128| interval.round_up(start.saturating_add(ticks));
        Look {
            allowed: fits,
            available: interval.whole_cost(capacity.saturating_sub(backlog)),
            ready_at: if fits {
                now
            } else if cost > self.burst {
                Timestamp::MAX
            } else {
                later(after.saturating_sub(capacity))
            },
            reset_if_charged: later(after),
            reset_if_not: later(backlog),
        }
    }

    #[cold]
    fn look_at_other_figures(&self, level: &Level, cost: u64, now: Timestamp) -> Look {
        if !self.is_overdrawn(level, now) {
            let mut converted = *level;
            self.convert(&mut converted, now);
            let mut look = self.look_exactly(&converted, cost, now);
            // Until it is charged it refills at its own rate, and is converted at each look, which rounds up.
            let own = level.interval();
            let rounded =
                u128::from(own.step >> CARRY_BITS).saturating_add(u128::from(own.step.div_ceil(self.interval.step)));
            let stays = level.moment().saturating_add(rounded).saturating_add(1);
            if !look.allowed && cost <= self.burst {
                let refilled = own.cost(self.burst.saturating_sub(cost));
                look.ready_at = look.ready_at.max(own.round_up(stays.saturating_sub(refilled)));
            }
            look.reset_if_not = look.reset_if_not.max(own.round_up(stays));
            return look;
        }
        // The level refills at its own rate until this limit can count it, and then at the rate of this limit, or still at its
        // own if nothing asks in between. The slower of the two is promised.
        let own = level.interval();
        let countable = own.cost(self.burst).saturating_mul(2);
        let counted_at = own.round_up(level.moment().saturating_sub(countable)).max(now);
        let refilled = |cost: u64| {
            // Converting rounds up by a millionth of a unit.
            let rounding = |interval: Interval| u128::from(interval.step >> CARRY_BITS).saturating_add(1);
            let slower = [own, self.interval].map(|interval| {
                let ticks = interval.cost(cost).saturating_add(rounding(interval));
                interval.round_up(interval.moment(counted_at, 0).saturating_add(ticks))
            });
            slower.into_iter().max().unwrap_or(Timestamp::MAX)
        };
        let whole = refilled(self.burst.saturating_mul(2));
        Look {
            allowed: false,
            available: 0,
            ready_at: if cost > self.burst { Timestamp::MAX } else { refilled(self.burst.saturating_add(cost)) },
            // It is not charged.
            reset_if_charged: whole,
            reset_if_not: whole,
        }
    }

    #[inline(always)]
    fn charge_level(&self, level: &mut Level, cost: u64, now: Timestamp) -> Mark {
        // What is used is already more than this limit can count.
        if !level.is_in_terms_of(self) {
            return Mark::new(level.full_at, 0);
        }
        // Debt takes the exact path, which bounds it.
        if let Some(full_at) = self.charged_whole(level.full_at, cost, now) {
            level.full_at = full_at;
            return Mark::new(full_at, cost);
        }
        self.charge_exactly(level, cost, now)
    }

    #[inline(never)]
    fn charge_exactly(&self, level: &mut Level, cost: u64, now: Timestamp) -> Mark {
        let interval = self.interval;
        let start = interval.moment(now, 0);
        let backlog = interval.moment(level.full_at, level.fraction).saturating_sub(start);
        // Debt ends at one burst beyond the limit: a single huge cost must not lock a key for years.
        let room = self.deepest().saturating_sub(backlog);
        let wanted = interval.cost(cost);
        // Whole units only: a mark says how many were charged, and a part of one would void earlier refunds.
        let amount = if wanted <= room { cost } else { interval.whole_cost(room) };
        let added = interval.cost(amount);
        (level.full_at, level.fraction) = interval.split(start.saturating_add(backlog).saturating_add(added));
        Mark::new(level.full_at, amount).with_fraction(level.fraction)
    }

    /// When the bucket is full again after a charge, where nothing has a fraction and the whole cost fits.
    #[inline(always)]
    fn charged_whole(&self, full_at: Timestamp, cost: u64, now: Timestamp) -> Option<Timestamp> {
        let backlog = full_at.since(now).micros();
        let after = backlog.checked_add(cost.checked_mul(self.interval.step)?)?;
        (after <= self.whole_capacity?).then(|| now.plus(Span::from_micros(after)))
    }

    #[inline(always)]
    fn unpack_level(&self, Small { large, figure }: Small) -> Level {
        Level { full_at: Timestamp::from_micros(large), fraction: figure, quota: self.quota, period: self.period }
    }

    #[inline(always)]
    fn pack_level(&self, level: &Level) -> Option<Small> {
        level.is_in_terms_of(self).then(|| Small { large: level.full_at.micros(), figure: level.fraction })
    }

    /// How long one unit takes to refill, rounded up, if that is at least a microsecond.
    fn unit_time(&self) -> Option<Span> {
        let micros = self.period.micros();
        (micros >= self.quota).then(|| Span::from_micros(micros.div_ceil(self.quota)))
    }
}

impl LimitAlgorithm for TokenBucket {
    type State = Bucket;

    const NAME: &'static str = "token-bucket";
    const TAGS: &'static [u8] = &[1];
    const OPTIONS: &'static [LimitOption] = &[LimitOption::Burst];
    const REFILLS_SMOOTHLY: bool = true;

    fn new(figures: &Figures) -> Result<Self, LimitError> {
        let Figures { quota, period, .. } = *figures;
        let burst = figures.burst.unwrap_or(quota);
        check_figures(quota, period)?;
        if burst == 0 || burst > MAX_QUOTA {
            return Err(LimitError::Burst { burst });
        }
        let bucket = Self::clamped(quota, period, burst);
        // A burst that was clamped is an error of the policy: a smaller limit than it says must not be in force.
        if bucket.burst == burst { Ok(bucket) } else { Err(LimitError::SlowRefill { burst }) }
    }

    fn figures(&self) -> Figures {
        Figures { burst: Some(self.burst), ..Figures::new(self.quota, self.period) }
    }

    #[inline]
    fn quota(&self) -> u64 {
        self.quota
    }

    #[inline]
    fn period(&self) -> Span {
        self.period
    }

    #[inline]
    fn capacity(&self) -> u64 {
        self.burst
    }

    #[inline]
    fn refill(&self) -> Span {
        self.refill
    }

    /// A full bucket can be emptied at once and refills by L in W.
    fn bound(&self) -> u64 {
        self.burst.saturating_add(self.quota)
    }

    /// A full bucket, and what refills during the window.
    fn most_in(&self, window: Span) -> u64 {
        let refilled = u128::from(self.quota).saturating_mul(u128::from(window.micros()));
        // Rounded down: a part of a unit admits nothing.
        let refilled = refilled.checked_div(u128::from(self.period.micros())).unwrap_or(0);
        self.burst.saturating_add(u64::try_from(refilled).unwrap_or(u64::MAX))
    }

    fn counted_for(&self) -> Span {
        self.refill
    }

    fn fills_before(&self, other: &Self, _same_keys: bool) -> Option<bool> {
        // Cross products of `L / W`: less than 2^114, so exact.
        let product = |quota: u64, period: Span| u128::from(quota).saturating_mul(u128::from(period.micros()));
        let (own, others) = (product(self.quota, other.period), product(other.quota, self.period));
        // Equal limits are used up together, so one figure has to be smaller.
        Some(own <= others && self.burst <= other.burst && (own < others || self.burst < other.burst))
    }

    fn describe(&self, unit: Unit, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (say, any) = (|amount| quantity(amount, unit), any_period(self.period));
        write!(f, "{} at once, then ", say(self.burst))?;
        match self.unit_time().filter(|_| unit == Unit::Count) {
            Some(each) => write!(f, "one each {each}")?,
            None => write!(f, "{} each {any}", say(self.quota))?,
        }
        write!(f, "; at most {} in any {any}", say(self.bound()))
    }

    fn write(&self, out: &mut Writer) {
        out.byte(1);
        out.number(self.quota);
        out.number(self.period.micros());
        out.number(self.burst);
    }

    fn read(_tag: u8, from: &mut Reader<'_>) -> Result<Self, BytesError> {
        let (quota, period) = (from.number()?, Span::from_micros(from.number()?));
        let figures = Figures { burst: Some(from.number()?), ..Figures::new(quota, period) };
        Self::new(&figures).map_err(|_| BytesError::Malformed("limit"))
    }

    #[inline]
    fn fresh(&self, now: Timestamp) -> Bucket {
        Bucket::Plain(Level { full_at: now, fraction: 0, quota: self.quota, period: self.period })
    }

    #[inline]
    fn is_written_under(&self, bucket: &Bucket) -> bool {
        bucket.level().is_in_terms_of(self)
    }

    #[inline]
    fn bring(&self, bucket: &mut Bucket, now: Timestamp) -> bool {
        match bucket {
            Bucket::Plain(level) => self.bring_level(level, now),
            Bucket::Refunded(_) => self.bring_refunded(bucket, now),
        }
    }

    #[inline]
    fn is_brought(&self, bucket: &Bucket, now: Timestamp) -> bool {
        let Bucket::Plain(level) = bucket else { return false };
        let ahead = level.full_at.since(now).micros();
        level.is_in_terms_of(self) && self.whole_capacity.is_some_and(|capacity| ahead <= capacity)
    }

    fn look_apart(&self, own: Option<&Self>, bucket: &mut Bucket, cost: u64, now: Timestamp) -> (Look, bool) {
        // Not what a larger burst has left there.
        let is_future = cost > 0 && bucket.level().full_at > now.plus(FUTURE);
        let own = own.filter(|own| is_future && own.is_written_under(bucket));
        let changed = own.is_some_and(|own| own.bring(bucket, now));
        (self.look(bucket, cost, now), changed)
    }

    #[inline]
    fn look(&self, bucket: &Bucket, cost: u64, now: Timestamp) -> Look {
        self.look_at(bucket.level(), cost, now)
    }

    #[inline]
    fn charge(&self, bucket: &mut Bucket, cost: u64, now: Timestamp, _id: TraceId) -> Mark {
        match bucket {
            Bucket::Plain(level) => self.charge_level(level, cost, now),
            Bucket::Refunded(refunded) => refunded.charge(self, cost, now),
        }
    }

    fn remaining_if_lost(&self, bucket: &Bucket, now: Timestamp) -> u64 {
        let level = match bucket {
            Bucket::Plain(level) => *level,
            Bucket::Refunded(refunded) => refunded.at_peak(),
        };
        self.look_at(&level, 0, now).available
    }

    #[inline]
    fn counts_until(&self, reset: Timestamp) -> Timestamp {
        reset
    }

    fn latest_reset(&self, mark: &Mark, now: Timestamp) -> Timestamp {
        // The mark's moment is exact, unless something was given back before the charge: then it is later. Debt saturates at
        // the other moment; `RefundedBucket::charge` does not forget what was given back before that.
        let marked = self.interval.moment(mark.part, mark.fraction());
        self.interval.round_up(marked.min(self.latest(now)))
    }

    fn write_receipt(&self, mark: &Mark, counts_until: Timestamp, out: &mut Writer) {
        out.number(mark.fraction());
        out.number(counts_until.micros());
    }

    fn read_receipt(&self, mark: Mark, from: &mut Reader<'_>) -> Result<(Mark, Timestamp), BytesError> {
        let fraction = from.number()?;
        if fraction >= self.interval.parts {
            return Err(BytesError::Malformed("receipt"));
        }
        Ok((mark.with_fraction(fraction), Timestamp::from_micros(from.number()?)))
    }

    #[inline(always)]
    fn pack(&self, bucket: &Bucket) -> Option<Small> {
        match bucket {
            Bucket::Plain(level) => self.pack_level(level),
            // A slot of the table has room for two numbers, and this state needs more.
            Bucket::Refunded(_) => None,
        }
    }

    #[inline(always)]
    fn unpack(&self, small: Small) -> Option<Bucket> {
        Some(Bucket::Plain(self.unpack_level(small)))
    }

    #[inline]
    fn look_packed(&self, small: Small, cost: u64, now: Timestamp) -> Option<Look> {
        let mut level = self.unpack_level(small);
        // A level that changes has to be written, and the caller of a look writes nothing.
        if self.bring_level(&mut level, now) { None } else { Some(self.look_at(&level, cost, now)) }
    }

    #[inline]
    fn charge_packed(&self, small: Small, cost: u64, now: Timestamp) -> Option<(Small, Mark)> {
        let mut level = self.unpack_level(small);
        let mark = self.charge_level(&mut level, cost, now);
        Some((self.pack_level(&level)?, mark))
    }

    #[inline(always)]
    fn glance(&self, small: Small, cost: u64, now: Timestamp) -> Option<(Look, Small, Mark)> {
        // No figures are compared: the table has compared the limit that the state was packed under.
        let look = self.look_whole(Timestamp::from_micros(small.large), cost, now)?;
        // A bucket's state is when it is full again.
        let charged = Small { large: look.reset_if_charged.micros(), figure: 0 };
        Some((look, charged, Mark::new(look.reset_if_charged, cost)))
    }

    fn charge_shape(&self, cost: u64, _id: TraceId) -> Option<Shaped> {
        let split = |cost: u64| {
            let (micros, fraction) = self.interval.split(self.interval.cost(cost));
            [micros.micros(), fraction]
        };
        let ([add, add_fraction], [capacity, capacity_fraction]) = (split(cost), split(self.burst));
        // The script has no wide integers, so it gets the increment and the capacity split as the level is.
        let parts = self.interval.parts;
        let figures = [self.quota, self.period.micros(), parts, add, add_fraction, capacity, capacity_fraction];
        Some(Shaped { shape: Level::SHAPE, numbers: figures.to_vec() })
    }

    fn packed_rate(&self, now: Timestamp) -> Option<PackedRate> {
        PackedRate::new(*self, now)
    }
}

impl AlgorithmState for Bucket {
    const TAGS: &'static [u8] = &[Level::TAG, RefundedBucket::TAG];
    /// A tag, four numbers of at most 10 bytes, and two wide ones.
    const MAX_BYTES: usize = 1 + 4 * 10 + 2 * 16;

    fn silent_from(&self) -> Timestamp {
        match self {
            Self::Plain(level) => level.silent_from(),
            Self::Refunded(refunded) => refunded.silent_from(),
        }
    }

    fn heap_bytes(&self) -> usize {
        match self {
            Self::Plain(_) => 0,
            Self::Refunded(_) => size_of::<RefundedBucket>(),
        }
    }

    fn set_terms(&self, figures: &mut Figures) {
        (figures.quota, figures.period) = (self.level().quota, self.level().period);
    }

    fn to_shape(&self) -> Option<Shaped> {
        let Level { full_at, fraction, quota, period } = self.level();
        let mut numbers = vec![full_at.micros(), *fraction, *quota, period.micros()];
        let Self::Refunded(refunded) = self else { return Some(Shaped { shape: Level::SHAPE, numbers }) };
        numbers.extend(refunded.script_numbers());
        Some(Shaped { shape: RefundedBucket::SHAPE, numbers })
    }

    fn from_shape(shaped: &Shaped) -> Option<Self> {
        let (level, refunded) = match (shaped.shape, &shaped.numbers[..]) {
            (Level::SHAPE, [full_at, fraction, quota, period]) => ([*full_at, *fraction, *quota, *period], None),
            (RefundedBucket::SHAPE, [full_at, fraction, quota, period, refunded @ ..]) => {
                ([*full_at, *fraction, *quota, *period], Some(<[u64; 4]>::try_from(refunded).ok()?))
            }
            _ => return None,
        };
        let [full_at, fraction, quota, period] = level;
        let full_at = Timestamp::from_micros(full_at);
        let level = Level { full_at, fraction, quota, period: Span::from_micros(period) };
        if !level.is_sound() {
            return None;
        }
        match refunded {
            None => Some(Self::Plain(level)),
            Some(numbers) => Some(Self::Refunded(Box::new(RefundedBucket::of_script(level, numbers)?))),
        }
    }

    fn give_back(&mut self, mark: &Mark, now: Timestamp, _id: TraceId) {
        match self {
            Self::Plain(level) => {
                if let Some(refunded) = level.give_back(mark, now) {
                    *self = Self::Refunded(Box::new(refunded));
                }
            }
            Self::Refunded(refunded) => refunded.give_back(mark, now),
        }
    }

    fn newest(&self, most: u64) -> Option<Mark> {
        // The moment to which the bucket was charged, with what was given back since, is that of the latest charge.
        let (level, given) = match self {
            Self::Plain(level) => (level, 0),
            Self::Refunded(refunded) => (&refunded.level, refunded.given),
        };
        let (part, fraction) = level.interval().split(level.moment().saturating_add(given));
        Some(Mark::new(part, most).with_fraction(fraction))
    }

    fn write(&self, out: &mut Writer) {
        match self {
            Self::Plain(level) => {
                out.byte(Level::TAG);
                level.write(out);
            }
            Self::Refunded(refunded) => {
                out.byte(RefundedBucket::TAG);
                refunded.write(out);
            }
        }
    }

    fn read(tag: u8, from: &mut Reader<'_>) -> Result<Self, BytesError> {
        if tag == RefundedBucket::TAG {
            return RefundedBucket::read(from).map(|refunded| Self::Refunded(Box::new(refunded)));
        }
        Level::read(from).map(Self::Plain)
    }
}
