//! Concurrency: how many at once, each held until it is released or its ttl has passed.

use std::fmt;

use super::algorithm::{AlgorithmState, Figures, LimitAlgorithm, LimitOption, read_time, write_time};
use super::words::quantity;
use super::{LimitError, Look, MAX_CONCURRENCY, MAX_PERIOD, Mark, Unit};
use crate::balance::Shaped;
use crate::codec::{BytesError, Reader, Writer};
use crate::key::TraceId;
use crate::time::{Span, Timestamp};

/// The most holds one state has: every unit of the largest limit, and as much debt.
pub(crate) const MAX_HOLDS: usize = 2 * MAX_CONCURRENCY as usize;

/// How much the newest holding time counts in the mean: an eighth, as in TCP's estimate of the round trip (RFC 6298).
const NEWEST_WEIGHT: u32 = 8;
/// How many bits of an id are in one number of a script, which is exact below 2^53.
const ID_BITS: u32 = 43;
const ID_PART: u64 = (1 << ID_BITS) - 1;
/// The earliest guess. `Retry-After` has whole seconds.
const SOONEST: Span = Span::SECOND;

/// At most L at once; a hold that is never released lasts `ttl`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Concurrency {
    quota: u64,
    ttl: Span,
}

/// What is in flight, in the order in which it would expire, and how long recent requests were in flight.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct Holds {
    pub(crate) holds: Vec<Hold>,
    /// The ttl of the last charge. A hold began this long before it expires; earlier ones may have had another ttl, which a
    /// guess can bear.
    pub(crate) ttl: Millis,
    /// The moving mean of the times that recent requests were held; zero where none has ended yet.
    pub(crate) mean: Millis,
}

/// A length of time in milliseconds, up to 49 days: as exact as a guess needs to be, and small enough that a
/// [`Balance`](crate::Balance) does not grow.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct Millis(pub(crate) u32);

impl Millis {
    fn round_up(span: Span) -> Self {
        Self(u32::try_from(span.micros().div_ceil(1_000)).unwrap_or(u32::MAX))
    }

    fn span(self) -> Span {
        Span::from_micros(u64::from(self.0).saturating_mul(1_000))
    }

    fn read(from: &mut Reader<'_>) -> Result<Self, BytesError> {
        u32::try_from(from.number()?).map(Self).map_err(|_| BytesError::Malformed("holding time"))
    }
}

/// One request in flight.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Hold {
    pub(crate) id: TraceId,
    pub(crate) cost: u64,
    pub(crate) expires: Timestamp,
}

impl Holds {
    /// Its shape in scripts.
    const SHAPE: u8 = 6;

    fn in_flight(&self, now: Timestamp) -> &[Hold] {
        let ended = self.holds.partition_point(|hold| hold.expires <= now);
        self.holds.get(ended..).unwrap_or_default()
    }

    /// Adds the time that a request was held to the mean.
    fn note_held(&mut self, held: Span) {
        let (mean, held) = (self.mean.0, Millis::round_up(held).0.max(1));
        self.mean.0 = match mean {
            0 => held,
            // Both shares are rounded up, so that the mean stays above zero, which means that nothing has ended.
            _ => mean.saturating_sub(mean.div_ceil(NEWEST_WEIGHT)).saturating_add(held.div_ceil(NEWEST_WEIGHT)),
        };
    }

    /// Forgets the holding times when nothing is in flight. A store may drop the record at that moment, and its answers must
    /// not depend on whether it has.
    fn forget_if_idle(&mut self, now: Timestamp) {
        if self.in_flight(now).is_empty() {
            self.mean = Millis::default();
        }
    }

    /// Guesses when a hold ends. Only its expiry is certain, and that is far too late for a request that takes milliseconds.
    ///
    /// A hold is expected to last as long as recent ones. One that has lasted longer, or has no predecessors, is expected to
    /// last as long again as it has until now, so that a client who keeps asking waits longer each time.
    fn guess_end(&self, hold: &Hold, now: Timestamp) -> Timestamp {
        let began = hold.expires.minus(self.ttl.span());
        let expected = began.plus(self.mean.span());
        let guess = if expected > now { expected } else { now.plus(now.since(began)) };
        // The expiry comes last: it is certain, even where it is sooner than the earliest guess.
        guess.max(now.plus(SOONEST)).min(hold.expires)
    }
}

fn sum(holds: &[Hold]) -> u64 {
    holds.iter().fold(0, |sum: u64, hold| sum.saturating_add(hold.cost))
}

impl Concurrency {
    /// None: requests in flight do not refill.
    #[expect(clippy::unused_self, reason = "every algorithm has this method")]
    pub(super) const fn rate(&self) -> Option<(u64, Span)> {
        None
    }

    /// Guesses when so many of the oldest holds have ended that `cost` fits.
    fn guess_ready_at(&self, state: &Holds, used: u64, cost: u64, now: Timestamp) -> Timestamp {
        if cost > self.quota {
            return Timestamp::MAX;
        }
        let mut left = used;
        // In the order of expiry, which is the order of arrival as long as the ttl stays the same.
        for hold in state.in_flight(now) {
            left = left.saturating_sub(hold.cost);
            if left.saturating_add(cost) <= self.quota {
                return state.guess_end(hold, now);
            }
        }
        Timestamp::MAX
    }
}

impl LimitAlgorithm for Concurrency {
    type State = Holds;

    const NAME: &'static str = "concurrency";
    const TAGS: &'static [u8] = &[6];
    const OPTIONS: &'static [LimitOption] = &[LimitOption::Ttl];
    const HELD: bool = true;
    const MAX_QUOTA: u64 = MAX_CONCURRENCY as u64;

    fn new(figures: &Figures) -> Result<Self, LimitError> {
        let Figures { quota, period: ttl, .. } = *figures;
        if quota == 0 || quota > Self::MAX_QUOTA {
            return Err(LimitError::Concurrency { quota });
        }
        if ttl.is_zero() || ttl > MAX_PERIOD {
            return Err(LimitError::Ttl);
        }
        Ok(Self { quota, ttl })
    }

    fn figures(&self) -> Figures {
        Figures::new(self.quota, self.ttl)
    }

    #[inline]
    fn quota(&self) -> u64 {
        self.quota
    }

    #[inline]
    fn period(&self) -> Span {
        self.ttl
    }

    fn bound(&self) -> u64 {
        self.quota
    }

    fn describe(&self, unit: Unit, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "at most {} at once, each for up to {}", quantity(self.quota, unit), self.ttl)
    }

    fn write(&self, out: &mut Writer) {
        out.byte(6);
        out.number(self.quota);
        out.number(self.ttl.micros());
    }

    fn read(_tag: u8, from: &mut Reader<'_>) -> Result<Self, BytesError> {
        let figures = Figures::new(from.number()?, Span::from_micros(from.number()?));
        Self::new(&figures).map_err(|_| BytesError::Malformed("limit"))
    }

    fn fresh(&self, _now: Timestamp) -> Holds {
        Holds::default()
    }

    /// A hold is found by its id, whatever the figures were.
    #[inline]
    fn is_written_under(&self, _state: &Holds) -> bool {
        true
    }

    fn bring(&self, state: &mut Holds, now: Timestamp) -> bool {
        // No hold lasts longer than the ttl from now, whatever a former clock or policy said.
        let latest = now.plus(self.ttl);
        let from = state.holds.partition_point(|hold| hold.expires <= latest);
        let late = state.holds.get_mut(from..).unwrap_or_default();
        let changed = !late.is_empty();
        // As `late` is the tail of the list and gets one expiry, the holds stay in order.
        for hold in late {
            hold.expires = latest;
        }
        changed
    }

    #[inline]
    fn is_brought(&self, state: &Holds, now: Timestamp) -> bool {
        state.silent_from() <= now.plus(self.ttl)
    }

    /// A hold ends as it would without this look, also if that is later than it could end under this ttl.
    fn look_apart(&self, _own: Option<&Self>, state: &mut Holds, cost: u64, now: Timestamp) -> (Look, bool) {
        let longest = Self { ttl: self.ttl.max(state.ttl.span()), ..*self };
        let changed = cost > 0 && longest.bring(state, now);
        (self.look(state, cost, now), changed)
    }

    fn look(&self, state: &Holds, cost: u64, now: Timestamp) -> Look {
        let used = sum(state.in_flight(now));
        let available = self.quota.saturating_sub(used);
        // In debt nothing fits, not even a cost of 0.
        let fits = cost <= available && used <= self.quota;
        Look {
            allowed: fits,
            available,
            ready_at: if fits { now } else { self.guess_ready_at(state, used, cost, now) },
            // Room comes when requests end, which no limit knows.
            reset_if_charged: Timestamp::MAX,
            reset_if_not: Timestamp::MAX,
        }
    }

    fn charge(&self, state: &mut Holds, cost: u64, now: Timestamp, id: TraceId) -> Mark {
        // Expired holds go first: `sum` below counts all that are left.
        let ended = state.holds.partition_point(|hold| hold.expires <= now);
        state.holds.drain(..ended);
        state.forget_if_idle(now);
        // Only for guesses. The expiry of each hold is kept exactly.
        state.ttl = Millis::round_up(self.ttl);
        let room = self.quota.saturating_mul(2).saturating_sub(sum(&state.holds));
        let amount = cost.min(room);
        let expires = now.plus(self.ttl);
        if amount > 0 {
            // `bring` left no hold that expires later, so the end of the list is this one's place.
            state.holds.push(Hold { id, cost: amount, expires });
        }
        Mark::new(expires, amount)
    }

    fn charge_shape(&self, cost: u64, id: TraceId) -> Option<Shaped> {
        let figures = [self.quota, self.ttl.micros(), cost, u64::from(Millis::round_up(self.ttl).0)];
        Some(Shaped { shape: Holds::SHAPE, numbers: [figures.as_slice(), &parts_of(id)].concat() })
    }
}

/// Returns an id as three numbers that a script can hold.
fn parts_of(id: TraceId) -> [u64; 3] {
    let part = |shift: u32| u64::try_from((id.to_u128() >> shift) & u128::from(ID_PART)).unwrap_or(0);
    [part(2 * ID_BITS), part(ID_BITS), part(0)]
}

/// Returns the id of three numbers, unless no id has them.
fn id_of_parts(parts: [u64; 3]) -> Option<TraceId> {
    let [high, middle, low] = parts.map(u128::from);
    let id = high.checked_shl(2 * ID_BITS)? | (middle << ID_BITS) | low;
    (parts_of(TraceId::from_u128(id)) == parts).then(|| TraceId::from_u128(id))
}

impl AlgorithmState for Holds {
    const TAGS: &'static [u8] = &[5];
    /// A tag, a count, two lengths of time, and an id and two numbers for each hold; a number takes at most 10 bytes.
    const MAX_BYTES: usize = 1 + 10 + 2 * 10 + MAX_HOLDS * (16 + 2 * 10);

    fn silent_from(&self) -> Timestamp {
        self.holds.last().map_or(Timestamp::EPOCH, |last| last.expires)
    }

    fn heap_bytes(&self) -> usize {
        self.holds.capacity().saturating_mul(size_of::<Hold>())
    }

    fn set_terms(&self, _figures: &mut Figures) {}

    fn to_shape(&self) -> Option<Shaped> {
        let mut numbers = vec![self.ttl.0.into(), self.mean.0.into()];
        for Hold { id, cost, expires } in &self.holds {
            numbers.extend(parts_of(*id));
            numbers.extend([*cost, expires.micros()]);
        }
        Some(Shaped { shape: Self::SHAPE, numbers })
    }

    fn from_shape(shaped: &Shaped) -> Option<Self> {
        let (Self::SHAPE, [ttl, mean, holds @ ..]) = (shaped.shape, &shaped.numbers[..]) else { return None };
        let (rows, rest) = holds.as_chunks::<5>();
        let millis = |number: u64| u32::try_from(number).ok().map(Millis);
        let hold = |[high, middle, low, cost, expires]: &[u64; 5]| {
            let id = id_of_parts([*high, *middle, *low])?;
            Some(Hold { id, cost: *cost, expires: Timestamp::from_micros(*expires) })
        };
        let holds: Vec<Hold> = rows.iter().map(hold).collect::<Option<_>>()?;
        // `in_flight` searches by bisection, which is wrong on holds out of order.
        let in_order = holds.is_sorted_by(|one, next| one.expires <= next.expires);
        let is_sound = rest.is_empty() && holds.len() <= MAX_HOLDS && in_order;
        Some(Self { holds, ttl: millis(*ttl)?, mean: millis(*mean)? }).filter(|_| is_sound)
    }

    /// What is not given back stays in flight.
    fn give_back(&mut self, mark: &Mark, now: Timestamp, id: TraceId) {
        // A request that charged twice has two holds, and a commit at a lower cost gives back a part of them.
        let (mut left, mut began) = (mark.amount, None);
        // By id and not by the mark's time: `bring` may have moved the expiry, and two requests may have the same one.
        for hold in self.holds.iter_mut().filter(|hold| hold.id == id) {
            let back = hold.cost.min(left);
            hold.cost = hold.cost.saturating_sub(back);
            left = left.saturating_sub(back);
            // A hold that has expired says how long the ttl is, not how long the request took.
            if hold.cost == 0 && hold.expires > now {
                began = Some(hold.expires.minus(self.ttl.span()));
            }
        }
        self.holds.retain(|hold| hold.cost > 0);
        if let Some(began) = began {
            self.note_held(now.since(began));
        }
        self.forget_if_idle(now);
    }

    /// None: what is in flight is released by the one who holds it.
    fn newest(&self, _most: u64) -> Option<Mark> {
        None
    }

    fn write(&self, out: &mut Writer) {
        out.byte(5);
        out.number(self.holds.len() as u64);
        let mut before = Timestamp::EPOCH;
        for hold in &self.holds {
            out.wide(hold.id.to_u128());
            out.number(hold.cost);
            write_time(hold.expires, before, out);
            before = hold.expires;
        }
        out.number(self.ttl.0.into());
        out.number(self.mean.0.into());
    }

    fn read(_tag: u8, from: &mut Reader<'_>) -> Result<Self, BytesError> {
        let count = from.count(MAX_HOLDS)?;
        let mut holds = Vec::with_capacity(count);
        let mut expires = Timestamp::EPOCH;
        for _ in 0..count {
            let id = TraceId::from_u128(from.wide()?);
            let cost = from.number()?;
            expires = read_time(from, expires)?;
            holds.push(Hold { id, cost, expires });
        }
        let (ttl, mean) = (Millis::read(from)?, Millis::read(from)?);
        Ok(Self { holds, ttl, mean })
    }
}

#[cfg(test)]
#[expect(
    clippy::arithmetic_side_effects,
    reason = "a definition reads as the specification does; overflow fails the test"
)]
mod definition {
    use super::*;
    use crate::limit::model::{Definition, History};

    impl Definition for Concurrency {
        fn used(&self, history: &History, now: u128) -> u128 {
            history.sum(|at| at + u128::from(self.ttl.micros()) > now)
        }

        fn longest(&self) -> Span {
            self.ttl
        }

        fn bound_across(&self, new: &Self) -> u64 {
            self.quota.max(new.quota)
        }
    }
}
