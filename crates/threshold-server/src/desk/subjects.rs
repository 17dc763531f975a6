//! What operators look up: the list of bans, and the state of a subject or an account.

use std::borrow::Cow;
use std::ops::ControlFlow;

use threshold_core::policy::{Ban, Layer, ListEntry, Policy};
use threshold_core::{Digest, Standing, Timestamp};
use threshold_limiter::store::{Kind, Listed, StoreError};

use super::audit::moment;
use super::{Desk, OperationError};

/// The target of a lookup: a subject in a layer of the policy, or the account of a login.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Target<'a> {
    Subject(Layer, &'a str),
    Account(&'a str),
}

/// The state of a subject or an account.
#[derive(Debug, Default, PartialEq, Eq)]
pub(crate) struct Subject {
    /// The strikes that have not decayed, on the ladder with the most of them.
    pub(crate) strikes: u32,
    pub(crate) shadow_banned: bool,
    /// The end of a ladder's cool-down or ban.
    pub(crate) denied_until: Option<Timestamp>,
    /// The end of a pause, or of a rule's `block_for`, under at least one of its limits.
    pub(crate) paused_until: Option<Timestamp>,
    /// The end of a ladder's ban.
    pub(crate) banned_until: Option<Timestamp>,
    /// The ban that an operator set, with its id.
    pub(crate) ban: Option<(Digest, Ban)>,
    pub(crate) account: Option<AccountState>,
}

/// The state of an account.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct AccountState {
    /// Consecutive failures from unknown devices.
    pub(crate) failures: u32,
    /// Until when it is locked for unknown devices; `Timestamp::MAX` at the ceiling.
    pub(crate) locked_until: Option<Timestamp>,
}

/// A ban in the list of all bans.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct ListedBan {
    pub(crate) id: Digest,
    /// `None` for a ban by a ladder whose subject's name could not be kept.
    pub(crate) ban: Option<Ban>,
    pub(crate) until: Timestamp,
}

impl<'a> Target<'a> {
    /// The name of accounts where others have the name of a layer.
    pub(crate) const ACCOUNT: &'static str = "account";

    pub(crate) fn layer_name(self) -> &'static str {
        match self {
            Self::Subject(layer, _) => layer.name(),
            Self::Account(_) => Self::ACCOUNT,
        }
    }

    pub(crate) fn key(self) -> &'a str {
        match self {
            Self::Subject(_, key) | Self::Account(key) => key,
        }
    }

    /// Returns the same kind of target with another key.
    pub(super) fn with_key(self, key: &str) -> Target<'_> {
        match self {
            Self::Subject(layer, _) => Target::Subject(layer, key),
            Self::Account(_) => Target::Account(key),
        }
    }

    /// Normalises the key, or returns why it is invalid.
    pub(super) fn spelled(self, policy: &Policy) -> Result<Cow<'a, str>, OperationError> {
        let key = self.key();
        if key.trim().is_empty() {
            return Err(OperationError::invalid("key", "the key is empty"));
        }
        match self {
            Self::Subject(Layer::Edge, _) if threshold_core::address::parse_address(key).is_none() => {
                Err(OperationError::invalid("key", format!("\"{key}\" is not an address")))
            }
            Self::Subject(layer, _) => {
                policy.subject_key(layer, key).map_err(|error| OperationError::invalid("key", error.to_string()))
            }
            Self::Account(_) => {
                policy.subject_key(Layer::User, key).map_err(|error| OperationError::invalid("key", error.to_string()))
            }
        }
    }
}

impl Subject {
    /// Describes what is forgiven, for the audit.
    pub(super) fn describe(&self) -> String {
        let until = |what: &str, until: Option<Timestamp>| until.map(|until| format!("{what} until {}", moment(until)));
        let locked = self.account.as_ref().and_then(|account| account.locked_until);
        let failures = self.account.as_ref().map(|account| account.failures).filter(|failures| *failures > 0);
        let all = [
            (self.strikes > 0).then(|| format!("{} strikes", self.strikes)),
            self.shadow_banned.then(|| "shadow ban".to_owned()),
            until("denied", self.denied_until.filter(|_| self.denied_until != self.banned_until)),
            until("paused", self.paused_until),
            until("banned", self.banned_until),
            failures.map(|failures| format!("{failures} failures")),
            until("locked", locked.and_then(Timestamp::unless_never)),
            locked.filter(|until| until.unless_never().is_none()).map(|_| "at the ceiling".to_owned()),
        ];
        let all: Vec<String> = all.into_iter().flatten().collect();
        if all.is_empty() { "what it has used".to_owned() } else { all.join(", ") }
    }
}

impl Desk {
    /// Returns the state of a subject or an account.
    pub(crate) async fn subject(&self, whom: Target<'_>) -> Result<Subject, OperationError> {
        let key = whom.spelled(&self.policy())?;
        Ok(match whom.with_key(&key) {
            Target::Subject(layer, key) => self.layer_subject(layer, key).await?,
            Target::Account(name) => Subject { account: Some(self.account(name).await?), ..Subject::default() },
        })
    }

    /// Returns at most `limit` bans with ids above `after`, by operators and by ladders, ordered by id. One page is read of
    /// each kind, so the cost does not grow with the number of bans.
    pub(crate) async fn bans(&self, after: Option<Digest>, limit: usize) -> Result<Vec<ListedBan>, OperationError> {
        let (book, now) = (self.limiter.bans(), self.now());
        let mut bans = Vec::new();
        book.walk(after, now, |id, ban| {
            bans.push(ListedBan { id, ban: Some(ban.clone()), until: ban.until });
            if bans.len() < limit { ControlFlow::Continue(()) } else { ControlFlow::Break(()) }
        });
        let by_ladders = self.limiter.list(Kind::Banned, after, limit).await?;
        bans.extend(by_ladders.into_iter().filter_map(|listed| match listed {
            Listed::Banned { key, until } => Some(ListedBan { id: key, ban: None, until }),
            _ => None,
        }));
        bans.sort_unstable_by_key(|listed| listed.id);
        bans.truncate(limit);
        for listed in bans.iter_mut().filter(|listed| listed.ban.is_none()) {
            listed.ban = book.named(listed.id);
        }
        Ok(bans)
    }

    async fn layer_subject(&self, layer: Layer, key: &str) -> Result<Subject, StoreError> {
        let (policy, now) = (self.policy(), self.now());
        self.limiter.rekey_subject(layer, key).await?;
        let keys = policy.keys_of(layer, key);
        let mut standings: Vec<Standing> = Vec::new();
        for key in &keys.standings {
            standings.extend(self.limiter.standing(*key).await?);
        }
        let blocked_until = self.limiter.blocked_until(keys).await?;
        let later = |until: Option<Timestamp>| until.filter(|until| *until > now);
        // An IPv6 address stands for its prefix, and may be banned as a single address too.
        let named = [policy.ban_target(layer, key), ListEntry::named(layer, key)];
        let ban = named.into_iter().flatten().find_map(|whom| {
            let id = whom.ban_id(self.limiter.key());
            Some((id, self.limiter.bans().one(id, now)?))
        });
        Ok(Subject {
            strikes: standings.iter().map(|standing| standing.strikes(now)).max().unwrap_or(0),
            shadow_banned: standings.iter().any(|standing| standing.is_shadowed(now)),
            denied_until: later(standings.iter().map(Standing::denied_until).max()),
            paused_until: later(Some(blocked_until)),
            banned_until: later(standings.iter().filter_map(Standing::banned_until).max()),
            ban,
            account: None,
        })
    }

    async fn account(&self, name: &str) -> Result<AccountState, StoreError> {
        let login = self.policy().login().cloned().unwrap_or_default();
        let known = self.limiter.account_named(name).await?;
        let (account, now) = (known.unwrap_or_default(), self.now());
        Ok(AccountState { failures: account.failures(now), locked_until: account.locked_until(&login, now) })
    }
}
