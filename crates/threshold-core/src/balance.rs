//! The stored state of one key, and its bytes.

mod script;
mod small;

use crate::codec::{BytesError, Format, Reader, Versions, Writer, from_bytes, to_bytes};
use crate::key::TraceId;
use crate::limit::{Limit, Look, Mark, State};
use crate::receipt::History;
use crate::time::Timestamp;

pub(crate) use script::{RECORDED, Shaped};
pub use small::Small;

/// The stored state of one key under one limit.
///
/// From its [`silent_from`](Self::silent_from) on a balance answers like no balance, so dropping it then is exact: that is
/// the garbage collector.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Balance {
    pub(crate) state: State,
    /// `block_for` or a pause: denied until then, whether or not a cost fits.
    pub(crate) blocked_until: Timestamp,
}

/// The answer of one limit about one cost.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Checked {
    /// What was found.
    pub look: Look,
    /// What was charged, if anything was.
    pub mark: Option<Mark>,
    /// Whether the balance must be saved. A denial changes nothing of what was used.
    pub changed: bool,
    /// The history of its partition. It is not sent.
    pub history: History,
}

impl Balance {
    /// The versions in which it is read.
    pub(crate) const VERSIONS: Versions = Versions::FIRST;

    /// No balance takes more bytes than this: a version, a time of at most 10 bytes, and the largest state.
    pub const MAX_BYTES: usize = 1 + 10 + State::MAX_BYTES;

    /// The first moment from which this balance is the same as none. Also its time to live in a store.
    #[must_use]
    pub fn silent_from(&self) -> Timestamp {
        self.state.silent_from().max(self.blocked_until)
    }

    /// The bytes this balance holds on the heap.
    #[must_use]
    pub fn heap_bytes(&self) -> usize {
        self.state.heap_bytes()
    }

    /// Whether more than half of the limit is used at `now`, or the key is blocked. A store that is full evicts no such
    /// balance: a client could reset its own limit by a flood of new keys.
    #[must_use]
    pub fn is_protected(&self, limit: &Limit, now: Timestamp) -> bool {
        // Doubled instead of halving the capacity, which would round: of a capacity of 1 nothing would ever be
        // protected.
        self.is_blocked(now) || self.remaining_if_lost(limit, now).saturating_mul(2) < limit.capacity()
    }

    /// How many millionths of the limit are used at `now`.
    #[must_use]
    pub fn used_share(&self, limit: &Limit, now: Timestamp) -> u64 {
        let used = limit.capacity().saturating_sub(self.remaining_if_lost(limit, now));
        let share = u128::from(used).saturating_mul(1_000_000).checked_div(u128::from(limit.capacity()));
        share.and_then(|share| u64::try_from(share).ok()).unwrap_or(0)
    }

    /// What is left of the limit, for deciding which balance to evict. What was given back to a token bucket counts as used
    /// there: without the balance, other receipts could give it back once more.
    fn remaining_if_lost(&self, limit: &Limit, now: Timestamp) -> u64 {
        if self.is_blocked(now) { 0 } else { limit.remaining_if_lost(&self.state, now) }
    }

    /// Returns this balance without its block.
    #[must_use]
    pub fn without_block(&self) -> Self {
        Self { blocked_until: Timestamp::EPOCH, ..self.clone() }
    }

    /// Denies every cost until `until`, unless it is denied for longer already.
    pub fn block(&mut self, until: Timestamp) {
        self.blocked_until = self.blocked_until.max(until);
    }

    /// Looks at the state, which may be in the figures of another limit and stays in them until something is charged. Returns whether
    /// it was changed all the same: if there is a cost, what lies in the future, after the clock has stepped back, is brought back.
    #[inline]
    pub fn look(&mut self, limit: &Limit, cost: u64, now: Timestamp) -> (Look, bool) {
        let (look, changed) = limit.look_beside(&mut self.state, cost, now);
        (self.with_block(look, now), changed)
    }

    /// Converts the state into the limit's figures at `now`, as a charge does. Returns whether that changed it.
    #[inline]
    pub fn bring(&mut self, limit: &Limit, now: Timestamp) -> bool {
        limit.bring(&mut self.state, now)
    }

    /// The answer of `limit` about `cost` at `now`. The balance must have been brought to `now`.
    pub(crate) fn peek(&self, limit: &Limit, cost: u64, now: Timestamp) -> Look {
        self.with_block(limit.look(&self.state, cost, now), now)
    }

    #[inline]
    fn with_block(&self, look: Look, now: Timestamp) -> Look {
        // A block changes what is answered and not the state: when it ends, the limit is as full as it would be without
        // it.
        if self.blocked_until <= now {
            return look;
        }
        let ready_at = look.ready_at.max(self.blocked_until);
        // The limit itself may have no room for longer than the block lasts, so the later time counts.
        Look { allowed: false, available: 0, ready_at, ..look }
    }

    /// Whether the state is in the figures of this limit, so that a mark made under it can be found again.
    #[inline]
    pub(crate) fn is_in_terms_of(&self, limit: &Limit) -> bool {
        limit.is_written_under(&self.state)
    }

    /// Until when every cost is denied, by `block_for` or a pause.
    #[must_use]
    pub fn blocked_until(&self) -> Timestamp {
        self.blocked_until
    }

    /// Whether every cost is denied at `now`, by `block_for` or a pause.
    #[must_use]
    #[inline]
    pub fn is_blocked(&self, now: Timestamp) -> bool {
        self.blocked_until > now
    }

    /// Decides one cost under one limit alone, and charges it if it fits.
    #[inline]
    pub fn check(&mut self, limit: &Limit, cost: u64, now: Timestamp, id: TraceId) -> Checked {
        let (look, brought) = self.look(limit, cost, now);
        // A cost of 0 must not create a record, or looking at keys would fill a store.
        let mark = (look.allowed && cost > 0).then(|| self.charge(limit, cost, now, id));
        Checked { look, mark, changed: brought || mark.is_some(), history: History::default() }
    }

    /// Converts the state into the limit's figures and charges, whether or not it fits.
    #[inline]
    pub fn charge(&mut self, limit: &Limit, cost: u64, now: Timestamp, id: TraceId) -> Mark {
        self.bring(limit, now);
        limit.charge(&mut self.state, cost, now, id)
    }

    /// Gives back exactly what `mark` says was charged, where it still counts.
    pub(crate) fn give_back(&mut self, mark: Mark, now: Timestamp, id: TraceId) {
        self.state.give_back(&mark, now, id);
    }

    /// Gives back an amount that nobody can show to have been charged: from what was charged last, and at most what still counts.
    pub fn credit(&mut self, limit: &Limit, amount: u64, now: Timestamp) {
        self.bring(limit, now);
        self.state.give_back_newest(amount, now);
    }

    /// The bytes that a store keeps.
    #[must_use]
    pub fn to_bytes(&self, format: Format) -> Vec<u8> {
        to_bytes(Self::VERSIONS, format, |out| self.write(out))
    }

    /// Appends this balance to a larger record.
    pub(crate) fn write(&self, out: &mut Writer) {
        out.number(self.blocked_until.micros());
        self.state.write(out);
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
        Ok(Self { state: State::read(from)?, blocked_until })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::limit::{Algorithm, Entries, Entry, Hold, Holds, LimitOptions, MAX_ENTRIES, MAX_HOLDS, Millis};
    use crate::time::Span;

    /// A table of a million keys unpacks and moves balances: a larger state is boxed, as that of a refunded bucket is.
    ///
    /// Woken by: `Refunded(RefundedBucket)` without the box.
    #[test]
    fn a_balance_stays_small() {
        assert_eq!(size_of::<Balance>(), 48);
    }

    /// Woken by: `MAX_HOLDS * (16 + 10)` in the `MAX_BYTES` of `Holds`.
    #[test]
    fn no_balance_takes_more_bytes_than_the_bound() {
        let most = u64::MAX;
        let holds = (0..MAX_HOLDS).map(|index| {
            let expires = Timestamp::from_micros(if index % 2 == 0 { most } else { 0 });
            Hold { id: TraceId::from_u128(u128::MAX), cost: most, expires }
        });
        let entries = (0..MAX_ENTRIES).map(|_| Entry { time: Timestamp::MAX, cost: most });
        let states = [
            State::Holds(Holds { holds: holds.collect(), ttl: Millis(u32::MAX), mean: Millis(u32::MAX) }),
            State::Entries(Entries { entries: entries.collect(), period: Span::from_micros(most) }),
        ];
        for state in states {
            let bytes = Balance { state, blocked_until: Timestamp::MAX }.to_bytes(Format::PRESENT);
            assert!(bytes.len() <= Balance::MAX_BYTES, "{} of {}", bytes.len(), Balance::MAX_BYTES);
        }
    }

    /// Woken by: `newest` that returns `None` or the oldest part, and leaving out the loop in `give_back_newest`.
    #[test]
    fn a_credit_gives_back_what_was_charged_last_and_at_most_what_counts() {
        let start = Timestamp::from_secs(1_767_225_600);
        for algorithm in Algorithm::ALL {
            let options = LimitOptions::new().algorithm(algorithm);
            let limit = options.parse(if algorithm.is_concurrency() { "10" } else { "10/year" }).unwrap();
            let mut balance = Balance::default();
            for (second, cost) in [(1, 4), (2, 3)] {
                assert!(
                    balance
                        .check(&limit, cost, start.plus(Span::from_secs(second)), TraceId::from_u128(7))
                        .look
                        .allowed
                );
            }
            let now = start.plus(Span::from_secs(3));
            let left = [2, 4, u64::MAX].map(|amount| {
                balance.credit(&limit, amount, now);
                balance.look(&limit, 0, now).0.available
            });
            // What is in flight is released by its own request.
            let expect = if algorithm.is_concurrency() { [3; 3] } else { [5, 9, 10] };
            assert_eq!(left, expect, "{algorithm:?}");
        }
    }
}
