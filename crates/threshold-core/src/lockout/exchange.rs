//! What goes between a door and a login: the request, what it is told, and the tokens that it carries.

use std::fmt;
use std::net::IpAddr;

use super::device::Device;
use super::{Attempt, AttemptOutcome, Factor, ResultOutcome, Try, Wider, account_digest, address_digest};
use crate::address::AddressGroup;
use crate::codec::Format;
use crate::key::TraceId;
use crate::policy::{Listed, Policy, UserScope};
use crate::secret::{Secret, Secrets};
use crate::time::{Span, Timestamp};

/// A login whose secret is about to be checked.
#[derive(Clone, Copy, Default)]
pub struct LoginRequest<'a> {
    /// The account's name, in any spelling. Unknown ones are told what known ones are.
    pub account: Option<&'a str>,
    /// The client's address. A door that leaves it out gives up the budget by address.
    pub ip: Option<IpAddr>,
    /// Which secret is tried: a password, unless said.
    pub factor: Option<&'a str>,
    /// The device token that came with it. One that is not ours is as good as none.
    pub device: Option<&'a str>,
    /// Whose account it is, as bans and penalties name them; the account's own name, unless said.
    pub user: Option<&'a str>,
    /// The tenant whose login it is. Where users belong to tenants, each has accounts of its own.
    pub tenant: Option<&'a str>,
}

/// Names, addresses and tokens reach no log.
impl fmt::Debug for LoginRequest<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("LoginRequest").finish_non_exhaustive()
    }
}

impl LoginRequest<'_> {
    /// The tenant whose user the account is, where users belong to tenants.
    fn tenant_of_account(&self, policy: &Policy) -> Option<&str> {
        let scoped = policy.identity().user_scope == UserScope::Tenant;
        self.tenant.filter(|tenant| scoped && !tenant.is_empty())
    }

    /// The same in the terms of what is stored. `id` is fresh and random.
    #[must_use]
    pub fn tried(&self, policy: &Policy, secrets: &Secrets, id: TraceId) -> Try {
        let key = policy.key();
        // An allow-listed address skips its own budget; the account's locks still hold.
        let exempt = policy.lists().find(self.ip, None, None) == Some(Listed::Allow);
        let group = self.ip.map(|ip| AddressGroup::of(ip, policy.identity().ipv6_prefix));
        Try {
            account: self.account.and_then(|name| account_digest(key, self.tenant_of_account(policy), name)),
            address: group.filter(|_| !exempt).map(|group| address_digest(key, group)),
            wider: Wider::of(key, self.ip),
            factor: Factor::named(self.factor),
            device: self.device.and_then(|token| Device::from_token(token, secrets).ok()),
            id,
        }
    }
}

/// What somebody who wants to log in is told before the secret is checked.
#[derive(Clone, PartialEq, Eq)]
#[must_use = "an attempt that nobody reads protects nothing"]
pub enum Attempted {
    /// Check the secret, then say how it went, with this token.
    Allowed(String),
    /// Do not check it.
    Refused(Refusal),
}

impl Attempted {
    /// The token to end the attempt by, if the secret may be checked.
    #[must_use]
    pub fn token(&self) -> Option<&str> {
        match self {
            Self::Allowed(token) => Some(token),
            Self::Refused(_) => None,
        }
    }
}

/// A token reaches no log.
impl fmt::Debug for Attempted {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Allowed(_) => f.debug_tuple("Allowed").finish_non_exhaustive(),
            Self::Refused(refusal) => f.debug_tuple("Refused").field(refusal).finish(),
        }
    }
}

/// Why a secret is not checked, and for how long.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Refusal {
    /// Why.
    pub by: RefusedBy,
    /// When it is worth trying again; `None` at the ceiling, where only a reset or a pardon helps, and under a ban for good.
    pub retry_after: Option<Span>,
}

/// What refuses an attempt.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RefusedBy {
    /// The address has made too many.
    Address,
    /// The account is locked for this caller.
    Lock,
    /// The account has seen so many failures in a row that unknown devices are refused.
    Ceiling,
    /// A ban, or a deny list: of the address, the tenant or the user.
    Ban,
    /// A cool-down of the address, the tenant or the user.
    CoolDown,
}

impl Refusal {
    /// The name on the wire, with a 429.
    #[must_use]
    pub const fn code(&self) -> &'static str {
        match self.by {
            RefusedBy::Address | RefusedBy::CoolDown => "too_many_requests",
            RefusedBy::Ban => "banned",
            RefusedBy::Lock | RefusedBy::Ceiling => "account_locked",
        }
    }

    /// What a person reads.
    #[must_use]
    pub const fn message(&self) -> &'static str {
        match self.by {
            RefusedBy::Address | RefusedBy::CoolDown => "Too many authentication attempts. Please try again later.",
            RefusedBy::Ban => "Access is denied.",
            RefusedBy::Lock | RefusedBy::Ceiling => "Too many failed attempts. Account temporarily locked.",
        }
    }
}

impl AttemptOutcome {
    /// What the caller is told, with a signed token where the secret may be checked.
    pub fn told(self, secret: &Secret, format: Format, now: Timestamp) -> Attempted {
        let refused = |by, until: Option<Timestamp>| {
            Attempted::Refused(Refusal { by, retry_after: until.map(|until| until.since(now)) })
        };
        match self {
            Self::Allowed(attempt) => Attempted::Allowed(Attempt::to_token(&attempt, secret, format)),
            Self::TooMany { until } => refused(RefusedBy::Address, Some(until)),
            Self::Locked { until: Some(until) } => refused(RefusedBy::Lock, Some(until)),
            Self::Locked { until: None } => refused(RefusedBy::Ceiling, None),
        }
    }
}

/// What somebody is told after the secret was checked.
#[derive(Clone, PartialEq, Eq)]
#[must_use = "a result that nobody reads protects nothing"]
pub struct LoginResult {
    /// Whether the caller is in, or may try again.
    pub allowed: bool,
    /// How long the account is locked for this caller now; also `None` where it is refused for good, at the ceiling.
    pub lockout_remaining: Option<Span>,
    /// After a success: the token by which this device is known from now on, for a cookie that is `__Host-`, `HttpOnly`,
    /// `Secure` and `SameSite=Lax`.
    pub device: Option<String>,
}

/// A token reaches no log.
impl fmt::Debug for LoginResult {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("LoginResult")
            .field("allowed", &self.allowed)
            .field("lockout_remaining", &self.lockout_remaining)
            .finish_non_exhaustive()
    }
}

impl ResultOutcome {
    /// What the caller is told, with a signed token where its device is known now.
    pub fn told(self, secret: &Secret, format: Format, now: Timestamp) -> LoginResult {
        let locked = self.locked_until.and_then(Timestamp::unless_never);
        LoginResult {
            allowed: self.allowed,
            lockout_remaining: locked.map(|until| until.since(now)),
            device: self.device.map(|device| device.to_token(secret, format)),
        }
    }
}
