//! The stored state of one key, and its bytes.

mod small;

use crate::codec::{BytesError, Format, Reader, Versions, Writer, from_bytes, to_bytes};
use crate::key::TraceId;
use crate::limit::LogState;
use crate::limit::{
    EstimateState, HoldsState, Limit, Look, MAX_ENTRIES, MAX_HOLDS, Mark, RateState, RefundedState, WindowState,
};
use crate::time::{Span, Timestamp};

pub use small::Small;

/// What is known of one key under one limit.
///
/// A balance that says nothing equals no balance, so dropping one once its [`silent_from`](Self::silent_from)
/// has come is exact: that is the garbage collector.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Balance {
    pub(crate) state: State,
    /// `block_for` or a pause: denied until then, whatever fits.
    pub(crate) blocked_until: Timestamp,
}

/// The part that each algorithm keeps.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) enum State {
    #[default]
    Empty,
    Rate(RateState),
    /// Boxed, so that every other balance stays as small as it is.
    Refunded(Box<RefundedState>),
    Window(WindowState),
    Log(LogState),
    Estimate(EstimateState),
    Holds(HoldsState),
}

/// What one limit alone said of one cost.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Checked {
    /// What was found.
    pub look: Look,
    /// What was charged, if anything was.
    pub mark: Option<Mark>,
    /// Whether the balance must be saved. A denial usually changes nothing.
    pub changed: bool,
}

impl Balance {
    /// The versions in which it is read.
    pub(crate) const VERSIONS: Versions = Versions::FIRST;

    /// No balance takes more bytes than this: a version, a time, a kind, a period, a count, and as many holds or log entries
    /// as one balance may have. A number takes at most 10 bytes.
    pub const MAX_BYTES: usize = 64 + max(MAX_HOLDS * (16 + 2 * 10), MAX_ENTRIES * 2 * 10);

    /// The first moment from which this balance says the same as none. Also its time to live in a store.
    #[must_use]
    pub fn silent_from(&self) -> Timestamp {
        let state = match &self.state {
            State::Empty => Timestamp::EPOCH,
            State::Rate(state) => state.silent_from(),
            State::Refunded(state) => state.silent_from(),
            State::Window(state) => state.end(),
            State::Log(state) => state.silent_from(),
            State::Estimate(state) => state.silent_from(),
            State::Holds(state) => state.silent_from(),
        };
        state.max(self.blocked_until)
    }

    /// The bytes this balance holds on the heap.
    #[must_use]
    pub fn heap_bytes(&self) -> usize {
        match &self.state {
            State::Log(state) => state.entries.capacity().saturating_mul(size_of::<crate::limit::Entry>()),
            State::Holds(state) => state.holds.capacity().saturating_mul(size_of::<crate::limit::Hold>()),
            State::Refunded(_) => size_of::<RefundedState>(),
            State::Empty | State::Rate(_) | State::Window(_) | State::Estimate(_) => 0,
        }
    }

    /// Whether more than half of the limit is used at `now`, or the key is blocked: such a balance is what a flood of
    /// new keys would most like to see forgotten.
    #[must_use]
    pub fn is_protected(&self, limit: &Limit, now: Timestamp) -> bool {
        self.is_blocked(now) || self.left_to_forget(limit, now).saturating_mul(2) < limit.capacity()
    }

    /// How many millionths of the limit are used at `now`.
    #[must_use]
    pub fn used_share(&self, limit: &Limit, now: Timestamp) -> u64 {
        let used = limit.capacity().saturating_sub(self.left_to_forget(limit, now));
        let share = u128::from(used).saturating_mul(1_000_000).checked_div(u128::from(limit.capacity()));
        share.and_then(|share| u64::try_from(share).ok()).unwrap_or(0)
    }

    /// What is left of the limit, for judging what would be lost with this balance. What was given back to a token bucket
    /// counts as used there: without the balance, other receipts could give it back once more.
    fn left_to_forget(&self, limit: &Limit, now: Timestamp) -> u64 {
        match &self.state {
            State::Refunded(state) => limit.look(&State::Rate(state.at_peak()), 0, now).remaining,
            _ => self.peek(limit, 0, now).remaining,
        }
    }

    /// Denied until `until`, if that is later than it already is.
    pub fn block(&mut self, until: Timestamp) {
        self.blocked_until = self.blocked_until.max(until);
    }

    /// Puts the state into the limit's terms at `now` and looks at it; says whether that changed it.
    #[inline]
    pub fn look(&mut self, limit: &Limit, cost: u64, now: Timestamp) -> (Look, bool) {
        let brought = self.bring(limit, now);
        (self.peek(limit, cost, now), brought)
    }

    #[inline]
    pub(crate) fn bring(&mut self, limit: &Limit, now: Timestamp) -> bool {
        limit.bring(&mut self.state, now)
    }

    /// What `limit` says of `cost` at `now`. The balance must have been brought there.
    #[inline]
    pub(crate) fn peek(&self, limit: &Limit, cost: u64, now: Timestamp) -> Look {
        let look = limit.look(&self.state, cost, now);
        if self.blocked_until <= now {
            return look;
        }
        let ready_at = look.ready_at.max(self.blocked_until);
        Look { allowed: false, remaining: 0, ready_at, ..look }
    }

    /// Whether the state is in the figures of this limit, so that a mark made under it can be found again.
    #[inline]
    pub(crate) fn is_in_terms_of(&self, limit: &Limit) -> bool {
        match (&self.state, limit) {
            (State::Rate(state), Limit::Rate(rate)) => state.is_in_terms_of(rate),
            (State::Refunded(state), Limit::Rate(rate)) => state.bucket.is_in_terms_of(rate),
            (State::Window(state), Limit::Window(window)) => state.period == window.period(),
            (State::Estimate(state), Limit::Estimate(estimate)) => state.period == estimate.period(),
            (State::Log(state), Limit::Log(log)) => state.period == log.period(),
            (State::Holds(_), Limit::Concurrency(_)) => true,
            _ => false,
        }
    }

    /// Until when it is denied, whatever fits, by `block_for` or a pause.
    #[must_use]
    pub fn blocked_until(&self) -> Timestamp {
        self.blocked_until
    }

    /// Whether it is denied at `now`, whatever fits.
    #[must_use]
    #[inline]
    pub fn is_blocked(&self, now: Timestamp) -> bool {
        self.blocked_until > now
    }

    /// Decides one cost under one limit alone, and charges it if it fits.
    #[inline]
    pub fn check(&mut self, limit: &Limit, cost: u64, now: Timestamp, id: TraceId) -> Checked {
        let (look, brought) = self.look(limit, cost, now);
        let mark = (look.allowed && cost > 0).then(|| self.charge(limit, cost, now, id));
        Checked { look, mark, changed: brought || mark.is_some() }
    }

    /// Charges, whether or not it fits. The balance must have been brought to `now`.
    #[inline]
    pub fn charge(&mut self, limit: &Limit, cost: u64, now: Timestamp, id: TraceId) -> Mark {
        limit.charge(&mut self.state, cost, now, id)
    }

    /// Gives back exactly what `mark` says was charged, where it still counts.
    pub(crate) fn give_back(&mut self, mark: Mark, now: Timestamp, id: TraceId) {
        match &mut self.state {
            State::Empty => {}
            State::Rate(state) => {
                if let Some(refunded) = state.give_back(&mark, now) {
                    self.state = State::Refunded(Box::new(refunded));
                }
            }
            State::Refunded(state) => state.give_back(&mark, now),
            State::Window(state) => state.give_back(mark.amount, mark.part),
            State::Log(state) => state.give_back(mark.amount, mark.part),
            State::Estimate(state) => state.give_back(mark.amount, mark.part),
            State::Holds(state) => state.give_back(mark.amount, id),
        }
    }

    /// The bytes a store keeps.
    #[must_use]
    pub fn to_bytes(&self, format: Format) -> Vec<u8> {
        to_bytes(Self::VERSIONS, format, |out| self.write(out))
    }

    /// Appends this balance to a larger record.
    pub(crate) fn write(&self, out: &mut Writer) {
        out.number(self.blocked_until.micros());
        match &self.state {
            State::Empty => out.byte(0),
            State::Rate(state) => {
                out.byte(1);
                write_rate(state, out);
            }
            State::Refunded(state) => {
                out.byte(6);
                write_rate(&state.bucket, out);
                out.wide(state.given);
                out.wide(state.peak);
            }
            State::Window(state) => {
                out.byte(2);
                out.number(state.start.micros());
                out.number(state.used);
                out.number(state.period.micros());
            }
            State::Log(state) => {
                out.byte(3);
                out.number(state.period.micros());
                out.number(state.entries.len() as u64);
                let mut before = Timestamp::EPOCH;
                for entry in &state.entries {
                    // Times as differences: they are close together, so most take three bytes.
                    out.number(entry.time.since(before).micros());
                    out.number(entry.cost);
                    before = entry.time;
                }
            }
            State::Estimate(state) => {
                out.byte(4);
                out.number(state.start.micros());
                out.number(state.current);
                out.number(state.previous);
                out.number(state.period.micros());
            }
            State::Holds(state) => {
                out.byte(5);
                out.number(state.holds.len() as u64);
                let mut before = Timestamp::EPOCH;
                for hold in &state.holds {
                    out.wide(hold.id.to_u128());
                    out.number(hold.cost);
                    out.number(hold.expires.since(before).micros());
                    before = hold.expires;
                }
            }
        }
    }

    /// Reads what [`to_bytes`](Self::to_bytes) wrote.
    ///
    /// # Errors
    /// On another version, and on bytes no balance has.
    pub fn from_bytes(bytes: &[u8]) -> Result<Self, BytesError> {
        from_bytes(bytes, Self::VERSIONS, Self::read)
    }

    /// Takes a balance off the front of a larger record.
    pub(crate) fn read(from: &mut Reader<'_>) -> Result<Self, BytesError> {
        let blocked_until = Timestamp::from_micros(from.number()?);
        let state = match from.byte()? {
            0 => State::Empty,
            1 => State::Rate(read_rate(from)?),
            2 => State::Window(WindowState {
                start: Timestamp::from_micros(from.number()?),
                used: from.number()?,
                period: Span::from_micros(from.number()?),
            }),
            3 => State::Log(read_log(from)?),
            4 => State::Estimate(EstimateState {
                start: Timestamp::from_micros(from.number()?),
                current: from.number()?,
                previous: from.number()?,
                period: Span::from_micros(from.number()?),
            }),
            5 => State::Holds(read_holds(from)?),
            6 => State::Refunded(Box::new(read_refunded(from)?)),
            _ => return Err(BytesError::Malformed("balance")),
        };
        Ok(Self { state, blocked_until })
    }
}

const fn max(one: usize, other: usize) -> usize {
    if one > other { one } else { other }
}

fn write_rate(state: &RateState, out: &mut Writer) {
    out.number(state.full_at.micros());
    out.number(state.part);
    out.number(state.quota);
    out.number(state.period.micros());
}

fn read_refunded(from: &mut Reader<'_>) -> Result<RefundedState, BytesError> {
    let state = RefundedState { bucket: read_rate(from)?, given: from.wide()?, peak: from.wide()? };
    if state.is_sound() { Ok(state) } else { Err(BytesError::Malformed("token bucket")) }
}

fn read_rate(from: &mut Reader<'_>) -> Result<RateState, BytesError> {
    let state = RateState {
        full_at: Timestamp::from_micros(from.number()?),
        part: from.number()?,
        quota: from.number()?,
        period: Span::from_micros(from.number()?),
    };
    if state.is_sound() { Ok(state) } else { Err(BytesError::Malformed("token bucket")) }
}

fn read_log(from: &mut Reader<'_>) -> Result<LogState, BytesError> {
    let period = Span::from_micros(from.number()?);
    let count = from.count(MAX_ENTRIES)?;
    let mut entries = Vec::with_capacity(count);
    let mut time = Timestamp::EPOCH;
    for index in 0..count {
        let before = time;
        time = read_time(from, before)?;
        if time == before && index > 0 {
            return Err(BytesError::Malformed("log"));
        }
        let cost = from.number()?;
        entries.push(crate::limit::Entry { time, cost });
    }
    Ok(LogState { entries, period })
}

/// Takes a time written as the difference to the one before it. A sum past the end of time is not rounded down
/// to it: two spellings of one balance would be two balances to a store that compares bytes.
fn read_time(from: &mut Reader<'_>, before: Timestamp) -> Result<Timestamp, BytesError> {
    let micros = before.micros().checked_add(from.number()?);
    micros.map(Timestamp::from_micros).ok_or(BytesError::Malformed("time"))
}

fn read_holds(from: &mut Reader<'_>) -> Result<HoldsState, BytesError> {
    let count = from.count(MAX_HOLDS)?;
    let mut holds = Vec::with_capacity(count);
    let mut expires = Timestamp::EPOCH;
    for _ in 0..count {
        let id = TraceId::from_u128(from.wide()?);
        let cost = from.number()?;
        expires = read_time(from, expires)?;
        holds.push(crate::limit::Hold { id, cost, expires });
    }
    Ok(HoldsState { holds })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::limit::{Entry, Hold};

    /// Woken by: `MAX_HOLDS * (16 + 10)` in `MAX_BYTES`.
    #[test]
    fn no_balance_takes_more_bytes_than_the_bound() {
        let most = u64::MAX;
        let holds = (0..MAX_HOLDS).map(|index| {
            let expires = Timestamp::from_micros(if index % 2 == 0 { most } else { 0 });
            Hold { id: TraceId::from_u128(u128::MAX), cost: most, expires }
        });
        let entries = (0..MAX_ENTRIES).map(|_| Entry { time: Timestamp::MAX, cost: most });
        let states = [
            State::Holds(HoldsState { holds: holds.collect() }),
            State::Log(LogState { entries: entries.collect(), period: Span::from_micros(most) }),
        ];
        for state in states {
            let bytes = Balance { state, blocked_until: Timestamp::MAX }.to_bytes(Format::PRESENT);
            assert!(bytes.len() <= Balance::MAX_BYTES, "{} of {}", bytes.len(), Balance::MAX_BYTES);
        }
    }
}
