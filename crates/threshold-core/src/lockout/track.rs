//! The counters of one factor on one device: consecutive failures, the lock, the budget, attempts under way.

use super::{Factor, Login, RESULT_WITHIN};
use crate::balance::Balance;
use crate::codec::{BytesError, Reader, Writer};
use crate::key::TraceId;
use crate::limit::{Limit, MAX_LOG};
use crate::time::{Span, Timestamp};

/// How long after the last failure all failures below the ceiling are forgotten. Without this, every name that was ever
/// guessed would be stored for good.
const FORGOTTEN_AFTER: Span = Span::from_secs(30 * 86_400);
/// The largest number of attempts under way at once. Most budgets allow fewer within a minute, but one of a thousand a second
/// does not.
const MAX_UNDER_WAY: usize = MAX_LOG as usize;

/// The counters of one factor on one device. Device 0 stands for all unknown devices.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Track {
    pub(super) factor: Factor,
    pub(super) device: u64,
    pub(super) failures: u32,
    pub(super) locked_until: Timestamp,
    /// The time of the last failure.
    last: Timestamp,
    /// Attempts under way, the oldest first.
    pub(super) under_way: Vec<UnderWay>,
    pub(super) budget: Balance,
}

/// An attempt whose result is not known yet.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct UnderWay {
    id: TraceId,
    at: Timestamp,
    /// Whether it counts as a failure unless it succeeds. It does not after an operator has lifted the locks.
    counts: bool,
}

impl UnderWay {
    fn times_out(&self) -> Timestamp {
        self.at.plus(RESULT_WITHIN)
    }
}

impl Track {
    pub(super) fn new(factor: Factor, device: u64) -> Self {
        Self {
            factor,
            device,
            failures: 0,
            locked_until: Timestamp::EPOCH,
            last: Timestamp::EPOCH,
            under_way: Vec::new(),
            budget: Balance::default(),
        }
    }

    pub(super) fn fail(&mut self, login: &Login, at: Timestamp) {
        self.failures = self.failures.saturating_add(1);
        // An attempt that timed out is counted later than newer failures, with its own earlier time. Neither the last
        // failure nor a lock may move back for it.
        self.last = self.last.max(at);
        if let Some(span) = login.lock(self.failures) {
            self.locked_until = self.locked_until.max(at.plus(span));
        }
    }

    /// Resets the failures and the lock after a success.
    pub(super) fn forget_failures(&mut self) {
        self.failures = 0;
        self.locked_until = Timestamp::EPOCH;
    }

    /// Forgets everything but the attempts under way, which no longer count as failures.
    pub(super) fn lift(&mut self) {
        self.forget_failures();
        self.budget = Balance::default();
        for attempt in &mut self.under_way {
            attempt.counts = false;
        }
    }

    pub(super) fn begin(&mut self, id: TraceId, now: Timestamp) {
        // Not always the last: the clock may have been set back, and the oldest has to come first.
        let at = self.under_way.partition_point(|other| other.at <= now);
        self.under_way.insert(at, UnderWay { id, at: now, counts: true });
    }

    pub(super) fn has(&self, id: TraceId) -> bool {
        self.under_way.iter().any(|attempt| attempt.id == id)
    }

    /// Removes an attempt. Returns whether it counted as a failure; `None` where it is unknown.
    pub(super) fn end(&mut self, id: TraceId) -> Option<bool> {
        let at = self.under_way.iter().position(|attempt| attempt.id == id)?;
        Some(self.under_way.remove(at).counts)
    }

    pub(super) fn is_under_way(&self, now: Timestamp) -> bool {
        self.under_way.last().is_some_and(|newest| newest.times_out() > now)
    }

    /// Counts attempts that have timed out as failures, and forgets old failures.
    pub(super) fn bring(&mut self, login: &Login, now: Timestamp) {
        self.bring_back(now);
        let late = self.under_way.partition_point(|attempt| attempt.times_out() <= now);
        for attempt in self.under_way.drain(..late).collect::<Vec<_>>() {
            if attempt.counts {
                // It failed when it timed out, however long ago that was. Otherwise the lock would begin with the next visitor.
                self.fail(login, attempt.times_out());
            }
        }
        // Time does not lift the ceiling: an attacker would only have to wait. A reset or an operator does.
        if self.failures < login.ceiling && self.last.plus(FORGOTTEN_AFTER) <= now {
            self.failures = 0;
        }
    }

    /// Corrects times dated in the future by a clock that has since been set back, so that a lock lasts no longer than intended.
    fn bring_back(&mut self, now: Timestamp) {
        // A second of tolerance for differences between the clocks of nodes.
        let latest = now.plus(Span::SECOND);
        // The lock moves by as much as the failure that caused it.
        if self.last > latest {
            self.locked_until = self.locked_until.minus(self.last.since(now));
            self.last = now;
        }
        if self.under_way.last().is_some_and(|newest| newest.at > latest) {
            // The minimum keeps the oldest first. No attempt waits longer than `RESULT_WITHIN` from now on.
            for attempt in &mut self.under_way {
                attempt.at = attempt.at.min(now);
            }
        }
    }

    /// Returns the consecutive failures at `now`, including attempts that have timed out.
    pub(super) fn failures_at(&self, now: Timestamp) -> u32 {
        // `bring` would count these, but a question must not change the counters.
        let late = self.under_way.iter().filter(|attempt| attempt.counts && attempt.times_out() <= now).count();
        self.failures.saturating_add(u32::try_from(late).unwrap_or(u32::MAX))
    }

    /// Returns until when attempts are refused; [`Timestamp::MAX`] at the ceiling, `None` where they are not refused at `now`.
    pub(super) fn locked(&self, login: &Login, now: Timestamp) -> Option<Timestamp> {
        let until = self.opens_at(login, now);
        (until > now).then_some(until)
    }

    /// Returns the first time at which an attempt is allowed, if no other attempt is made and those under way time out;
    /// [`Timestamp::MAX`] at the ceiling.
    ///
    /// Attempts under way count as failures from the time at which they began. When they time out, they lock from that later
    /// time on, which this looks ahead for: a caller that waits as long as it was asked to must not be refused again.
    fn opens_at(&self, login: &Login, now: Timestamp) -> Timestamp {
        // A look without a charge, also for callers that only ask. The budget has the attempts under way in it.
        let fits_at = self.budget.peek(&Limit::from(login.account), 1, now).ready_at;
        let mut ahead = Ahead::of(self);
        // Ends: a round in which no attempt has timed out finds the same lock as the one before, and that is over by
        // then.
        let mut at = now;
        loop {
            // At each later moment the attempts that have timed out by then are failures, with locks of their own.
            ahead.time_out(login, at);
            if ahead.failures >= login.ceiling {
                return Timestamp::MAX;
            }
            let lock = ahead.locked_until(login, at);
            let until = lock.max(fits_at);
            // The attempts under way may still succeed. Whether this is the ceiling is known only when they have ended.
            if ahead.may_reach_ceiling(login) || until <= at {
                return until.max(at);
            }
            at = until;
        }
    }

    /// Returns the time from which these counters decide the same as empty ones.
    pub(super) fn silent_from(&self, ceiling_reached: bool) -> Timestamp {
        // An attempt under way can still become a failure, when it times out, and a failure is remembered from then on.
        let newest = self.under_way.last();
        let under_way = newest.map_or(Timestamp::EPOCH, |attempt| attempt.times_out().plus(FORGOTTEN_AFTER));
        let counted = match self.failures {
            0 => Timestamp::EPOCH,
            _ if ceiling_reached => Timestamp::MAX,
            _ => self.last.plus(FORGOTTEN_AFTER),
        };
        self.budget.silent_from().max(self.locked_until).max(counted).max(under_way)
    }

    pub(super) fn write(&self, out: &mut Writer) {
        out.number(u64::from(self.factor.0));
        out.number(self.device);
        out.number(u64::from(self.failures));
        out.number(self.locked_until.micros());
        out.number(self.last.micros());
        out.number(self.under_way.len() as u64);
        for attempt in &self.under_way {
            out.wide(attempt.id.to_u128());
            out.number(attempt.at.micros());
            out.byte(u8::from(attempt.counts));
        }
        self.budget.write(out);
    }

    pub(super) fn read(from: &mut Reader<'_>) -> Result<Self, BytesError> {
        const WRONG: BytesError = BytesError::Malformed("account");
        let factor = Factor(u32::try_from(from.number()?).map_err(|_| WRONG)?);
        let mut track = Self::new(factor, from.number()?);
        track.failures = u32::try_from(from.number()?).map_err(|_| WRONG)?;
        track.locked_until = Timestamp::from_micros(from.number()?);
        track.last = Timestamp::from_micros(from.number()?);
        for _ in 0..from.count(MAX_UNDER_WAY)? {
            let id = TraceId::from_u128(from.wide()?);
            let at = Timestamp::from_micros(from.number()?);
            let counts = match from.byte()? {
                0 => false,
                1 => true,
                _ => return Err(WRONG),
            };
            track.under_way.push(UnderWay { id, at, counts });
        }
        // Last, as in `write`: a balance has no fixed length.
        track.budget = Balance::read(from)?;
        Ok(track)
    }
}

/// The counters at a later time, if no attempt is made and those under way time out.
struct Ahead<'t> {
    failures: u32,
    locked_until: Timestamp,
    last: Timestamp,
    under_way: &'t [UnderWay],
    /// How many of those under way count as failures.
    counting: u32,
}

impl<'t> Ahead<'t> {
    fn of(track: &'t Track) -> Self {
        let under_way = track.under_way.as_slice();
        let counting = under_way.iter().filter(|attempt| attempt.counts).count();
        Self {
            failures: track.failures,
            locked_until: track.locked_until,
            last: track.last,
            under_way,
            counting: u32::try_from(counting).unwrap_or(u32::MAX),
        }
    }

    /// Times out attempts and forgets failures, as [`Track::bring`] does.
    fn time_out(&mut self, login: &Login, at: Timestamp) {
        // The oldest first, as in `bring`: the number of failures before it decides how long each one locks.
        while let Some((oldest, newer)) = self.under_way.split_first().filter(|(oldest, _)| oldest.times_out() <= at) {
            self.under_way = newer;
            if !oldest.counts {
                continue;
            }
            self.counting = self.counting.saturating_sub(1);
            self.failures = self.failures.saturating_add(1);
            self.last = self.last.max(oldest.times_out());
            if let Some(span) = login.lock(self.failures) {
                self.locked_until = self.locked_until.max(oldest.times_out().plus(span));
            }
        }
        if self.failures < login.ceiling && self.last.plus(FORGOTTEN_AFTER) <= at {
            self.failures = 0;
        }
    }

    fn with_under_way(&self) -> u32 {
        self.failures.saturating_add(self.counting)
    }

    fn may_reach_ceiling(&self, login: &Login) -> bool {
        self.counting > 0 && self.with_under_way() >= login.ceiling
    }

    /// Returns until when the counters lock at `at`, before anything else times out.
    fn locked_until(&self, login: &Login, at: Timestamp) -> Timestamp {
        // At the largest number of attempts under way, the next one has to wait for the oldest.
        let room = self.under_way.len().checked_sub(MAX_UNDER_WAY).and_then(|over| self.under_way.get(over));
        let locked = self.locked_until.max(room.map_or(at, UnderWay::times_out));
        let Some(newest) = self.under_way.iter().rev().find(|attempt| attempt.counts) else { return locked };
        // The next attempt could be one beyond the ceiling, so it waits until those under way have ended.
        if self.may_reach_ceiling(login) {
            return locked.max(newest.times_out());
        }
        // The latest attempt that counts, under way or failed, locks from its own time.
        let last = if self.failures > 0 { self.last.max(newest.at) } else { newest.at };
        login.lock(self.with_under_way()).map_or(locked, |span| locked.max(last.plus(span)))
    }
}
