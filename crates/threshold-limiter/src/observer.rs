//! Observers of a limiter: metrics, events, alerts.

use std::net::IpAddr;
use std::time::Duration;

use threshold_core::decision::Degraded;
use threshold_core::lockout::{Attempted, LoginResult};
use threshold_core::policy::TokenError;
use threshold_core::{Decision, Digest, Facts, Policy, Timestamp, TraceId};

use crate::clock::Clock;
use crate::limiter::{LimitDecision, Limiter, LoginError, UnfitSetting};
use crate::store::{EndError, Store, StoreError};

/// Is notified of everything that a limiter does, afterwards and on the thread that did it. It must not block: hand slow work on to
/// another thread.
pub trait Observer: Send + Sync {
    /// Called after a decision.
    fn decided(&self, decided: &ObservedDecision<'_>);

    /// Called after an operation that is no decision under the policy: a refund, a login, an operator's change.
    fn performed(&self, performed: &ObservedOperation) {
        let _ = performed;
    }

    /// Called when the tower layer has refused a request without a decision. `reason` holds nothing that the client sent.
    fn refused(&self, refused: Refused<'_>, policy: &Policy) {
        let _ = (refused, policy);
    }

    /// Called when the bearer token of a request did not verify. The request is then decided without its claims.
    fn token_refused(&self, refused: TokenRefused, policy: &Policy) {
        let _ = (refused, policy);
    }

    /// Called when a request could not give back its charges: the store failed, or too many requests gave back at once.
    /// Concurrency that it held stays held until its `ttl`, and what was charged stays charged.
    fn return_lost(&self) {}
}

/// What a limiter was asked to do.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Operation {
    /// A request was decided and charged.
    Check,
    /// A request was decided and not charged.
    Peek,
    /// A request that has already happened was charged.
    Record,
    /// A request was decided and charged, and its actual cost follows.
    Reserve,
    /// A request has waited until it fits.
    Wait,
    /// A receipt's charges were given back.
    Refund,
    /// A reservation ended with its actual cost.
    Commit,
    /// A reservation ended without any cost.
    Release,
    /// A cost was decided under one limit, without a policy.
    Limit,
    /// A login asked whether its secret may be checked.
    LoginAttempt,
    /// A login reported whether its secret was right.
    LoginResult,
    /// An account was unlocked.
    ChangeAccount,
    /// A subject was denied for a while.
    Pause,
    /// A subject's strikes and usage were reset.
    Forgive,
    /// Bans or settings were changed.
    Control,
}

impl Operation {
    /// All operations.
    pub const ALL: [Self; 15] = [
        Self::Check,
        Self::Peek,
        Self::Record,
        Self::Reserve,
        Self::Wait,
        Self::Refund,
        Self::Commit,
        Self::Release,
        Self::Limit,
        Self::LoginAttempt,
        Self::LoginResult,
        Self::ChangeAccount,
        Self::Pause,
        Self::Forgive,
        Self::Control,
    ];

    /// Returns the place in [`ALL`](Self::ALL).
    #[cfg(feature = "metrics")]
    #[inline]
    pub(crate) const fn place(self) -> usize {
        self as usize
    }

    /// Returns the name: `check`, `login_attempt`.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Check => "check",
            Self::Peek => "peek",
            Self::Record => "record",
            Self::Reserve => "reserve",
            Self::Wait => "wait",
            Self::Refund => "refund",
            Self::Commit => "commit",
            Self::Release => "release",
            Self::Limit => "limit",
            Self::LoginAttempt => "login_attempt",
            Self::LoginResult => "login_result",
            Self::ChangeAccount => "change_account",
            Self::Pause => "pause",
            Self::Forgive => "forgive",
            Self::Control => "control",
        }
    }
}

impl From<threshold_core::plan::Verb> for Operation {
    fn from(verb: threshold_core::plan::Verb) -> Self {
        use threshold_core::plan::Verb;
        match verb {
            Verb::Check => Self::Check,
            Verb::Peek => Self::Peek,
            Verb::Record => Self::Record,
        }
    }
}

/// A decision, and what it took.
#[derive(Debug, Clone, Copy)]
#[non_exhaustive]
pub struct ObservedDecision<'d> {
    /// What was asked for.
    pub operation: Operation,
    /// The request. It has a trace id only if its caller gave it one; the decision always has.
    pub facts: &'d Facts<'d>,
    /// The decision. `degraded` says whether the store failed.
    pub decision: &'d Decision,
    /// The policy that decided.
    pub policy: &'d Policy,
    /// How long it took. Time spent waiting for room is not part of it.
    pub elapsed: Duration,
    /// How much of that was spent in the store.
    pub in_store: Duration,
}

impl<'d> ObservedDecision<'d> {
    /// A check that took no time, for tests of observers.
    #[must_use]
    pub const fn new(facts: &'d Facts<'d>, decision: &'d Decision, policy: &'d Policy) -> Self {
        let (elapsed, in_store) = (Duration::ZERO, Duration::ZERO);
        Self { operation: Operation::Check, facts, decision, policy, elapsed, in_store }
    }
}

/// An operation that is no decision under the policy, and what it took.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub struct ObservedOperation {
    /// What was asked for.
    pub operation: Operation,
    /// When it was done.
    pub at: Timestamp,
    /// The key of the subject: of the account, the limit, the first charge. `None` if it has no single one.
    pub subject: Option<Digest>,
    /// How it ended.
    pub result: OperationResult,
    /// Why the store could not be asked, if a login was decided without it.
    pub degraded: Option<Degraded>,
    /// How long it took, which is almost all spent in the store.
    pub elapsed: Duration,
}

/// How an operation ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum OperationResult {
    /// It was done.
    Done,
    /// A limit or a lock denied it.
    Denied,
    /// It is not possible, such as the end of an unknown reservation.
    Rejected,
    /// The store failed.
    Failed(StoreError),
}

impl OperationResult {
    /// Returns the name: `done`, `denied`, `rejected`, `failed`.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Done => "done",
            Self::Denied => "denied",
            Self::Rejected => "rejected",
            Self::Failed(_) => "failed",
        }
    }
}

/// The answer to an operation, of which observers are told how it ended.
pub(crate) trait Performed {
    fn result(&self) -> OperationResult;

    /// Why the store could not be asked.
    fn degraded(&self) -> Option<Degraded> {
        None
    }
}

impl<T: MayDeny> Performed for Result<T, StoreError> {
    fn result(&self) -> OperationResult {
        self.as_ref().map_or_else(|error| OperationResult::Failed(*error), MayDeny::result)
    }
}

impl Performed for Result<(), EndError> {
    fn result(&self) -> OperationResult {
        match self {
            Ok(()) => OperationResult::Done,
            Err(EndError::Store(error)) => OperationResult::Failed(*error),
            Err(_) => OperationResult::Rejected,
        }
    }
}

impl<T: MayDeny> Performed for Result<T, LoginError> {
    fn result(&self) -> OperationResult {
        match self {
            Ok(answer) => answer.result(),
            Err(LoginError::Store(error)) => OperationResult::Failed(*error),
            Err(_) => OperationResult::Rejected,
        }
    }

    fn degraded(&self) -> Option<Degraded> {
        self.as_ref().ok().and_then(MayDeny::degraded)
    }
}

/// An answer of the store, which may be a denial.
pub(crate) trait MayDeny {
    fn result(&self) -> OperationResult {
        OperationResult::Done
    }

    fn degraded(&self) -> Option<Degraded> {
        None
    }
}

impl MayDeny for () {}
impl MayDeny for bool {}
impl MayDeny for LoginResult {}
impl MayDeny for Vec<UnfitSetting> {}

/// The answer to a login attempt, and the error of the store if it was decided without it.
pub(crate) struct DecidedAttempt {
    pub(crate) attempted: Attempted,
    pub(crate) failed: Option<StoreError>,
}

impl MayDeny for DecidedAttempt {
    fn result(&self) -> OperationResult {
        match self.attempted {
            Attempted::Allowed(_) => OperationResult::Done,
            Attempted::Refused(_) => OperationResult::Denied,
        }
    }

    fn degraded(&self) -> Option<Degraded> {
        self.failed.map(Degraded::from)
    }
}

impl MayDeny for LimitDecision {
    fn result(&self) -> OperationResult {
        if self.allowed { OperationResult::Done } else { OperationResult::Denied }
    }
}

impl<S: Store, C: Clock> Limiter<S, C> {
    /// Starts to measure an operation. Without observers nothing is measured, and no clock read.
    #[inline]
    pub(crate) fn start(&self) -> Stopwatch {
        Stopwatch(if self.observers.is_empty() { 0 } else { self.clock.ticks() })
    }

    /// Returns the present time, and starts to measure what is done at it.
    #[inline]
    pub(crate) fn time_and_start(&self) -> (Timestamp, Stopwatch) {
        match self.store().now() {
            Some(now) => (now, self.start()),
            None if self.observers.is_empty() => (self.clock.now(), Stopwatch(0)),
            None => {
                let (now, ticks) = self.clock.now_and_ticks();
                (now, Stopwatch(ticks))
            }
        }
    }

    /// Returns the time since a start.
    #[inline]
    pub(crate) fn since(&self, start: Stopwatch) -> Duration {
        if self.observers.is_empty() {
            return Duration::ZERO;
        }
        Duration::from_nanos(self.clock.nanos_between(start.0, self.clock.ticks()))
    }

    /// Notifies observers of a decision.
    #[inline]
    pub(crate) fn tell(
        &self,
        operation: Operation,
        facts: &Facts<'_>,
        decision: &Decision,
        policy: &Policy,
        (start, in_store): (Stopwatch, Duration),
    ) {
        if self.observers.is_empty() {
            return;
        }
        let observed = ObservedDecision { operation, facts, decision, policy, elapsed: self.since(start), in_store };
        for observer in &self.observers {
            observer.decided(&observed);
        }
    }

    /// Performs an operation that is no decision, and notifies observers of it.
    pub(crate) async fn perform<T, E>(
        &self,
        operation: Operation,
        subject: Option<Digest>,
        work: impl Future<Output = Result<T, E>>,
    ) -> Result<T, E>
    where
        Result<T, E>: Performed,
    {
        if self.observers.is_empty() {
            return work.await;
        }
        let start = self.start();
        let done = work.await;
        let (result, at, elapsed) = (done.result(), self.time(), self.since(start));
        let observed = ObservedOperation { operation, at, subject, result, degraded: done.degraded(), elapsed };
        for observer in &self.observers {
            observer.performed(&observed);
        }
        done
    }
}

/// The start of an operation, by the limiter's clock.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Stopwatch(u64);

/// A bearer token that did not verify.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub struct TokenRefused {
    /// When the token was refused.
    pub at: Timestamp,
    /// Why it was refused.
    pub reason: TokenError,
}

/// A request that was refused before any limit was checked.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub struct Refused<'r> {
    /// When the request was refused.
    pub at: Timestamp,
    /// The client's address, if it is known.
    pub ip: Option<IpAddr>,
    /// The status of the answer.
    pub status: u16,
    /// The reason, for operators.
    pub reason: &'r str,
    /// The trace id that the client was answered with.
    pub trace: TraceId,
}
