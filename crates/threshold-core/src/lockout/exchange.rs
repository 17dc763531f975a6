//! Requests and answers of a login at a door, and the tokens that they carry.

use std::fmt;
use std::net::IpAddr;
use std::time::Duration;

use super::device::Device;
use super::{Attempt, AttemptKeys, AttemptOutcome, Factor, ResultOutcome, StandInKeys, address_digest};
use crate::address::{AddressGroup, parse_address};
use crate::codec::Format;
use crate::decision::Cause;
use crate::key::{Digest, TraceId};
use crate::limit::Limit;
use crate::plan::SubjectKeys;
use crate::policy::{Layer, Listed, Policy, UserScope};
use crate::secret::{Secret, Secrets};
use crate::time::{Span, Timestamp};

/// A login whose secret is about to be checked.
#[derive(Clone, Copy, Default)]
pub struct LoginRequest<'a> {
    /// The account's name, in any spelling. An unknown account gets the same answers as a known one.
    pub account: Option<&'a str>,
    /// The client's address. Without it, attempts are not counted by address.
    pub ip: Option<IpAddr>,
    /// The name of the factor that is tried; a password by default.
    pub factor: Option<&'a str>,
    /// The device token that came with it. A token that this installation did not sign is ignored.
    pub device: Option<&'a str>,
    /// The user whose account it is, as bans and penalties name the user; the account's name by default.
    pub user: Option<&'a str>,
    /// The tenant whose login it is. Where users belong to tenants, each tenant has accounts of its own.
    pub tenant: Option<&'a str>,
}

/// Shows no field, so that names, addresses and tokens reach no log.
impl fmt::Debug for LoginRequest<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("LoginRequest").finish_non_exhaustive()
    }
}

impl LoginRequest<'_> {
    /// Returns the tenant of the account, where users belong to tenants.
    fn tenant_of_account(&self, policy: &Policy) -> Option<&str> {
        let scoped = policy.identity().user_scope == UserScope::Tenant;
        self.tenant.filter(|tenant| scoped && !tenant.is_empty())
    }

    /// Returns the digests under which the attempt is counted. `id` is a fresh random id.
    #[must_use]
    pub fn attempt_keys(&self, policy: &Policy, secrets: &Secrets, id: TraceId) -> AttemptKeys {
        let key = policy.key();
        // An allow-listed address skips its own budget. The account's locks still apply.
        // Only by the address: anyone can write the name of a user or tenant that is on the list.
        let exempt = policy.lists().find(self.ip, None, None) == Some(Listed::Allow);
        let group = self.ip.map(|ip| AddressGroup::of(ip, policy.identity().ipv6_prefix));
        AttemptKeys {
            account: self.account.and_then(|name| policy.account_of(self.tenant_of_account(policy), name)),
            address: group.filter(|_| !exempt).map(|group| address_digest(key, group)),
            stand_ins: StandInKeys::of(key, self.ip),
            factor: Factor::named(self.factor),
            device: self.device.and_then(|token| Device::from_token(token, secrets).ok()),
            id,
        }
    }
}

impl Policy {
    /// Returns the key and the limit of the budget of login attempts of an address, as operators name it; `None` for another layer, and
    /// if the policy protects no login.
    #[must_use]
    pub fn login_budget_of(&self, layer: Layer, key: &str) -> Option<(Digest, Limit)> {
        let login = self.login().filter(|_| layer == Layer::Edge)?;
        let group = AddressGroup::of(parse_address(key)?, self.identity().ipv6_prefix);
        Some((address_digest(self.key(), group), login.ip.into()))
    }

    /// Returns the keys of everything that forgiving a subject clears: those of [`keys_of`](Self::keys_of), and of an address the
    /// budget of its login attempts.
    #[must_use]
    pub fn forgiven_keys(&self, layer: Layer, key: &str) -> SubjectKeys {
        let mut keys = self.keys_of(layer, key);
        keys.balances.extend(self.login_budget_of(layer, key));
        keys
    }
}

/// The answer to an attempt, before its secret is checked.
#[derive(Clone, PartialEq, Eq)]
#[must_use = "the secret may be checked only if the attempt is allowed"]
pub enum Attempted {
    /// The secret may be checked. The result is reported with this token.
    Allowed(String),
    /// The secret must not be checked.
    Refused(Refusal),
}

impl Attempted {
    /// Returns the token to report the result with; `None` where the attempt is refused.
    #[must_use]
    pub fn token(&self) -> Option<&str> {
        match self {
            Self::Allowed(token) => Some(token),
            Self::Refused(_) => None,
        }
    }
}

/// Leaves the token out, so that it reaches no log.
impl fmt::Debug for Attempted {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Allowed(_) => f.debug_tuple("Allowed").finish_non_exhaustive(),
            Self::Refused(refusal) => f.debug_tuple("Refused").field(refusal).finish(),
        }
    }
}

/// The refusal of an attempt.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Refusal {
    /// The reason.
    pub by: RefusedBy,
    /// The cause, as events name it: [`Cause::Login`], or that of a ban or penalty.
    pub cause: Cause,
    /// The layer: that of the address or the account, or of the penalty; `None` if a list refused.
    pub layer: Option<Layer>,
    /// How long to wait before the next attempt; `None` at the ceiling, where only a reset or an operator helps, and under a
    /// permanent ban.
    pub retry_after: Option<Duration>,
}

/// The reason why an attempt is refused.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RefusedBy {
    /// The address has made too many attempts.
    Address,
    /// The account is locked for this caller.
    Lock,
    /// The account has reached its ceiling of consecutive failures, and unknown devices are refused.
    Ceiling,
    /// A ban or a deny list entry of the address, the tenant or the user.
    Ban,
    /// A cool-down of the address, the tenant or the user.
    CoolDown,
}

impl Refusal {
    /// Returns the error code of the answer, which has status 429.
    #[must_use]
    pub const fn code(&self) -> &'static str {
        match self.by {
            RefusedBy::Address | RefusedBy::CoolDown => "too_many_requests",
            RefusedBy::Ban => "banned",
            RefusedBy::Lock | RefusedBy::Ceiling => "account_locked",
        }
    }

    /// Returns the message for people.
    #[must_use]
    pub const fn message(&self) -> &'static str {
        match self.by {
            RefusedBy::Address | RefusedBy::CoolDown => "Too many authentication attempts. Please try again later.",
            RefusedBy::Ban => "Access is denied.",
            RefusedBy::Lock | RefusedBy::Ceiling => "Too many failed attempts. Account temporarily locked.",
        }
    }
}

impl Refusal {
    /// Returns the value of a `Retry-After` field: whole seconds, rounded up, and at least one. A client that retries after
    /// them is not refused for being early.
    #[must_use]
    pub fn retry_after_secs(&self) -> Option<u64> {
        self.retry_after.map(|wait| Span::from(wait).secs_ceil().max(1))
    }
}

impl AttemptOutcome {
    /// Returns the answer for the caller, with a signed token where the secret may be checked.
    pub fn into_answer(self, secret: &Secret, format: Format, now: Timestamp) -> Attempted {
        let refused = |by, until: Option<Timestamp>| {
            let layer = if by == RefusedBy::Address { Layer::Edge } else { Layer::User };
            let retry_after = until.map(|until| until.since(now).into());
            Attempted::Refused(Refusal { by, cause: Cause::Login, layer: Some(layer), retry_after })
        };
        match self {
            Self::Allowed(attempt) => Attempted::Allowed(Attempt::to_token(&attempt, secret, format)),
            Self::TooMany { until } => refused(RefusedBy::Address, Some(until)),
            Self::Locked { until: Some(until) } => refused(RefusedBy::Lock, Some(until)),
            Self::Locked { until: None } => refused(RefusedBy::Ceiling, None),
        }
    }
}

/// The answer to the result of a login.
///
/// Log the client in where [`success`](Self::success) is true, and nowhere else.
#[derive(Clone, PartialEq, Eq)]
#[must_use = "the device token has to reach the client"]
pub struct LoginResult {
    /// Whether the attempt counted as a success. After a wrong secret it is false, locked or not.
    pub success: bool,
    /// Whether the account takes another attempt of this caller now. The budget of the address is checked by that attempt.
    pub may_retry: bool,
    /// How long the account is locked for this caller now; `None` where it is not locked, and at the ceiling, which has no end.
    pub lockout_remaining: Option<Duration>,
    /// The token by which this device is known from now on, after a success. It belongs in a cookie that is `__Host-`, `HttpOnly`,
    /// `Secure` and `SameSite=Lax`.
    pub device: Option<String>,
}

/// Leaves the token out, so that it reaches no log.
impl fmt::Debug for LoginResult {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("LoginResult")
            .field("success", &self.success)
            .field("may_retry", &self.may_retry)
            .field("lockout_remaining", &self.lockout_remaining)
            .finish_non_exhaustive()
    }
}

impl ResultOutcome {
    /// Returns the answer for the caller, with a signed token where its device is known now.
    pub fn into_answer(self, secret: &Secret, format: Format, now: Timestamp) -> LoginResult {
        let locked = self.locked_until.and_then(Timestamp::unless_never);
        LoginResult {
            success: self.success,
            may_retry: self.locked_until.is_none(),
            lockout_remaining: locked.map(|until| until.since(now).into()),
            device: self.device.map(|device| device.to_token(secret, format)),
        }
    }
}
