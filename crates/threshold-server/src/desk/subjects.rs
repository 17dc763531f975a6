//! What operators look up: the list of bans, and the state of a subject or an account.

use std::borrow::Cow;
use std::ops::ControlFlow;
use std::sync::Arc;

use threshold_core::address::AddressGroup;
use threshold_core::explain::{SubjectBudget, SubjectLadder, Why};
use threshold_core::ladder::Penalty;
use threshold_core::limit::{Limit, Look, Unit};
use threshold_core::lockout::Account;
use threshold_core::policy::{Ban, Layer, ListEntry, Listed, Policy};
use threshold_core::{Digest, Standing, Timestamp, TraceId};
use threshold_limiter::store::{Answer, Command, Kind, Listed as Record, StoreError};

use super::audit::moment;
use super::names::written_name;
use super::{Desk, OperationError};

/// What the budget of an address for logins is named by, where others have a rule: where the policy writes its limit.
const LOGIN_BUDGET: &str = "[login] ip";

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
    /// The digest that log lines have in place of the name.
    pub(crate) digest: Option<String>,
    /// All bans that apply to it, also on wider blocks and of imported sets, with their ids. The one that ends last is the first.
    pub(crate) bans: Vec<(Digest, Arc<Ban>)>,
    /// The entry of the policy's lists that decides about it, and its list.
    pub(crate) listed: Option<(ListEntry, Listed)>,
    /// Its standing under each ladder that counts its strikes.
    pub(crate) ladders: Vec<LadderState>,
    /// Its use of each budget that is its alone.
    pub(crate) budgets: Vec<BudgetState>,
    /// Of an account, and of a user whose account of this name has failed.
    pub(crate) account: Option<AccountState>,
}

/// The standing of a subject under one ladder.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct LadderState {
    pub(crate) ladder: String,
    /// The key of the standing, which is also the id of a ban by the ladder.
    pub(crate) id: Digest,
    /// The strikes that have not decayed.
    pub(crate) strikes: u32,
    /// When they are forgotten.
    pub(crate) forgotten_at: Option<Timestamp>,
    /// The consequences of the next strike.
    pub(crate) next: String,
    pub(crate) penalty: Option<Penalty>,
    /// Why the ladder has banned it: the strike and its rule.
    pub(crate) reason: Option<Box<str>>,
}

/// The use of one budget of a subject.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct BudgetState {
    /// The rule, or [`LOGIN_BUDGET`].
    pub(crate) rule: String,
    /// The category of requests that it is for, where the rule has a budget for each.
    pub(crate) category: Option<String>,
    /// The limit as the policy writes it.
    pub(crate) notation: String,
    pub(crate) used: u64,
    pub(crate) limit: u64,
    /// When it is free again, or more of it; `None` if nothing is used or the algorithm has no such time.
    pub(crate) free_at: Option<Timestamp>,
    /// Why the rule denies or skips requests of the subject, if it has no tier.
    pub(crate) why: Option<String>,
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
    pub(crate) fn with_key(self, key: &str) -> Target<'_> {
        match self {
            Self::Subject(layer, _) => Target::Subject(layer, key),
            Self::Account(_) => Target::Account(key),
        }
    }

    /// Normalises the key, or returns why it is invalid.
    pub(super) fn spelled(self, policy: &Policy) -> Result<Cow<'a, str>, OperationError> {
        let key = self.key();
        if key.is_empty() {
            return Err(OperationError::invalid("key", "the key is empty"));
        }
        match self {
            // A CIDR is refused: strikes and budgets are counted by address, and a block has none of its own.
            Self::Subject(Layer::Edge, _) if threshold_core::address::parse_address(key).is_none() => {
                Err(OperationError::invalid("key", format!("\"{key}\" is not an address")))
            }
            Self::Subject(layer, _) => {
                policy.subject_key(layer, key).map_err(|error| OperationError::invalid("key", error.to_string()))
            }
            // A digest is the account's, whosever it is.
            Self::Account(_) if written_name(Layer::User, key, policy).is_none() => Ok(key.into()),
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
            // A ladder's ban denies as well. It is not described twice.
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
            Target::Account(written) => {
                let found = self.account_with_digest(written).await?;
                let name = &*written_name(Layer::User, written, &self.policy()).unwrap_or_default();
                let digest = found.or_else(|| self.policy().account_digest(name).ok().flatten()).map(shown_digest);
                let known = match found {
                    Some(key) => self.limiter.account(key).await?,
                    None => self.limiter.account_named(name).await?,
                };
                Subject { account: Some(self.account_state(known)), digest, ..Subject::default() }
            }
        })
    }

    /// Returns at most `limit` bans with ids above `after`, by operators and by ladders, ordered by id. One page is read of
    /// each kind, so the cost does not grow with the number of bans.
    pub(crate) async fn bans(&self, after: Option<Digest>, limit: usize) -> Result<Vec<ListedBan>, OperationError> {
        let (book, now) = (self.limiter.bans(), self.now());
        let mut bans = Vec::new();
        // The walk holds the lock of the list, so it copies one page and ends. The store is asked afterwards.
        book.walk(after, now, |id, ban| {
            bans.push(ListedBan { id, ban: Some(ban.clone()), until: ban.until });
            if bans.len() < limit { ControlFlow::Continue(()) } else { ControlFlow::Break(()) }
        });
        let by_ladders = self.limiter.list(Kind::Banned, after, limit).await?;
        bans.extend(by_ladders.into_iter().filter_map(|listed| match listed {
            Record::Banned { key, until } => Some(ListedBan { id: key, ban: None, until }),
            _ => None,
        }));
        bans.sort_unstable_by_key(|listed| listed.id);
        // After the merge, not before: each kind alone may fill the page with ids that the other kind precedes.
        bans.truncate(limit);
        for listed in bans.iter_mut().filter(|listed| listed.ban.is_none()) {
            listed.ban = book.named(listed.id);
        }
        Ok(bans)
    }

    async fn layer_subject(&self, layer: Layer, key: &str) -> Result<Subject, StoreError> {
        let (policy, now) = (self.policy(), self.now());
        // While the secret is rotated, strikes may still be stored under the digests of the old one.
        self.limiter.rekey_subject(layer, key).await?;
        let mut standings: Vec<Standing> = Vec::new();
        let mut ladders = Vec::new();
        for ladder in policy.ladders_of(layer, key) {
            let standing = self.limiter.standing(ladder.key).await?.unwrap_or_default();
            ladders.push(self.ladder_state(&ladder, &standing, now));
            standings.push(standing);
        }
        let mut blocked_until = self.limiter.blocked_until(policy.keys_of(layer, key)).await?;
        // What has not moved yet denies all the same: a request would move it first.
        if let Some(old) = self.limiter.under_old_secret(&policy, |old| old.keys_of(layer, key)) {
            blocked_until = blocked_until.max(self.limiter.blocked_until(old).await?);
        }
        // As a request of this subject would be matched, so that the lookup and the decision cannot differ.
        let own = policy.with_subject(layer, key, |facts, who| {
            let hidden = |name: &str| policy.key().redact(name);
            let digest = match layer {
                Layer::Edge => {
                    facts.ip.map(|ip| hidden(&AddressGroup::of(ip, policy.identity().ipv6_prefix).to_string()))
                }
                Layer::Tenant => facts.tenant.map(hidden),
                Layer::User => facts.user.map(hidden),
                Layer::Global | Layer::Endpoint => None,
            };
            (digest, self.limiter.bans().covering(who, now), policy.lists().find_entry(who))
        });
        let (digest, bans, listed) = own.unwrap_or_default();
        let mut budgets = Vec::new();
        let keys = |policy: &Policy| policy.budgets_of(layer, key).iter().map(|budget| budget.key).collect();
        let old: Vec<Digest> = self.limiter.under_old_secret(&policy, keys).unwrap_or_default();
        for (index, budget) in policy.budgets_of(layer, key).into_iter().enumerate() {
            let SubjectBudget { rule, key, limit, unit, category, why, .. } = budget;
            let keys = (key, old.get(index).copied());
            let state = self.budget_state((rule.name.to_string(), category), keys, (limit, unit)).await?;
            add_budget(&mut budgets, state, &why);
        }
        // An allow-listed address has none.
        let exempt = matches!(listed, Some((ListEntry::Address(_), Listed::Allow)));
        let subject = key;
        if let Some((key, limit)) = policy.login_budget_of(layer, subject).filter(|_| !exempt) {
            let old = self.limiter.under_old_secret(&policy, |old| old.login_budget_of(layer, subject)).flatten();
            let keys = (key, old.map(|(old, _)| old));
            budgets.push(self.budget_state((LOGIN_BUDGET.to_owned(), None), keys, (limit, Unit::Count)).await?);
        }
        // A ban on the user applies to the login of this name too, so that its locks concern the same person.
        let account = match layer {
            Layer::User if policy.login().is_some() => self.limiter.account_named(key).await?,
            _ => None,
        };
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
            paused_until: blocked_until.map(Timestamp::from),
            banned_until: later(standings.iter().filter_map(Standing::banned_until).max()),
            ban,
            digest,
            bans,
            listed,
            ladders,
            budgets,
            account: account.map(|account| self.account_state(Some(account))),
        })
    }

    fn ladder_state(&self, ladder: &SubjectLadder<'_>, standing: &Standing, now: Timestamp) -> LadderState {
        let strikes = standing.strikes(now);
        let penalty = standing.penalty(now);
        let named = self.limiter.bans().named(ladder.key).filter(|_| matches!(penalty, Some(Penalty::Ban(_))));
        LadderState {
            ladder: ladder.name.to_owned(),
            id: ladder.key,
            strikes,
            forgotten_at: (strikes > 0).then(|| standing.decays_at()),
            next: ladder.next_rung(standing, now).to_string(),
            penalty,
            reason: named.map(|ban| ban.reason),
        }
    }

    async fn budget_state(
        &self,
        (rule, category): (String, Option<String>),
        keys: (Digest, Option<Digest>),
        (limit, unit): (Limit, Unit),
    ) -> Result<BudgetState, StoreError> {
        let (look, now) = self.look_at(keys, limit).await?;
        let (notation, free_at) = (limit.notation(unit), limit.reset_at(&look, false, now));
        let limit = limit.capacity();
        let used = limit.saturating_sub(look.available);
        Ok(BudgetState {
            rule,
            category,
            notation,
            used,
            limit,
            // An unused window has a reset time too, which says nothing about the subject.
            free_at: free_at.unless_never().filter(|free_at| used > 0 && *free_at > now),
            why: None,
        })
    }

    /// Returns what is left under a key, and the store's time. Under an old key, too, there is a budget that has not moved yet while the
    /// secret is rotated.
    pub(super) async fn look_at(
        &self,
        (key, old): (Digest, Option<Digest>),
        limit: Limit,
    ) -> Result<(Look, Timestamp), StoreError> {
        let mut found: Option<(Look, Timestamp)> = None;
        for key in [Some(key), old].into_iter().flatten() {
            // A cost of 0 charges nothing, and shows how much is left.
            let command = Command::Limit { key, limit, cost: 0, id: TraceId::default() };
            let Answer::Limited { checked, at } = self.limiter.execute(command).await? else {
                return Err(StoreError::Unavailable);
            };
            // One of the two is unused, unless a node with the old secret alone still counts under the old one.
            if found.as_ref().is_none_or(|(known, _)| checked.look.available < known.available) {
                found = Some((checked.look, at));
            }
        }
        found.ok_or(StoreError::Unavailable)
    }

    fn account_state(&self, known: Option<Account>) -> AccountState {
        let login = self.policy().login().cloned().unwrap_or_default();
        let (account, now) = (known.unwrap_or_default(), self.now());
        AccountState { failures: account.failures(now), locked_until: account.locked_until(&login, now) }
    }
}

/// Adds a budget. One that requests without a tier are not counted by has the reason in place of the figures of a tier.
fn add_budget(budgets: &mut Vec<BudgetState>, state: BudgetState, why: &Why) {
    match why {
        // Its categories are one: what is used of them was used by requests that named a tier.
        Why::Denied(_) => match budgets.iter_mut().find(|own| own.rule == state.rule && own.why.is_some()) {
            Some(own) => {
                own.used = own.used.saturating_add(state.used);
                own.free_at = own.free_at.max(state.free_at);
            }
            None => {
                let (notation, why) = ("none".to_owned(), Some(why.to_string()));
                budgets.push(BudgetState { category: None, notation, limit: 0, why, ..state });
            }
        },
        Why::Skipped(_) if state.used == 0 => {}
        Why::Skipped(_) => budgets.push(BudgetState { why: Some(why.to_string()), ..state }),
        _ => budgets.push(state),
    }
}

/// Returns a stored digest as it is shown: as long as those in the log.
pub(super) fn shown_digest(digest: Digest) -> String {
    format!("#{:016x}", digest.to_u128() >> 64)
}
