//! The names of callers that were stopped of late, so that operators can act on the digests that events and logs show.
//!
//! They are in memory only, for [`LIFETIME`] after the last time, and leave it by the calls of operators alone. No allowed request gets
//! here.

mod table;
#[cfg(test)]
mod tests;

use std::borrow::Cow;
use std::fmt;
use std::net::IpAddr;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use threshold_core::address::{AddressGroup, parse_address};
use threshold_core::event::MAX_TEXT;
use threshold_core::key::{is_redacted, read_name, write_name};
use threshold_core::policy::{Layer, ListEntry, Policy, UserScope};
use threshold_core::{Event, Facts, Span, Timestamp, Verdict};
use threshold_limiter::{ObservedDecision, Observer, Refused, TokenRefused};

use super::{Desk, OperationError};
use crate::log::DenialLog;
use table::Table;

/// How long a name is kept after it was seen.
pub(crate) const LIFETIME: Span = Span::HOUR;
/// The most names of each kind: 16,384 together. A name has at most 256 bytes, so they take less than 6 MiB.
const MAX_ADDRESSES: usize = 8_192;
const MAX_USERS: usize = 6_144;
const MAX_TENANTS: usize = 2_048;
/// The most callers that an ambiguous digest is answered with.
const MAX_AMBIGUOUS: usize = 20;

/// The names of callers that were denied, warned or struck of late.
pub(crate) struct RecentNames(Mutex<Tables>);

struct Tables {
    /// By the addresses that share a budget, with the one of them that was seen last.
    addresses: Table<AddressGroup, IpAddr>,
    tenants: Table<Arc<str>, ()>,
    /// By canonical names.
    users: Table<Arc<str>, ()>,
}

impl Default for RecentNames {
    fn default() -> Self {
        Self(Mutex::new(Tables {
            addresses: Table::new(MAX_ADDRESSES),
            tenants: Table::new(MAX_TENANTS),
            users: Table::new(MAX_USERS),
        }))
    }
}

/// Prints no name: debug output may end up in a log.
impl fmt::Debug for RecentNames {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("RecentNames").finish_non_exhaustive()
    }
}

/// A name, and the texts whose digests stand for it.
#[derive(Debug, PartialEq, Eq)]
struct Known {
    /// As operators write it.
    name: String,
    /// The tenant of a user, where users belong to tenants.
    tenant: Option<String>,
    texts: Vec<String>,
}

impl RecentNames {
    /// Keeps the names of a request.
    pub(super) fn see(&self, facts: &Facts<'_>, policy: &Policy, at: Timestamp) {
        // An empty name counts as missing, as it does for rules.
        let fits = |name: &str| !name.is_empty() && name.len() <= MAX_TEXT;
        let identity = policy.identity();
        let tables = &mut *self.tables();
        if let Some(ip) = facts.ip {
            let group = AddressGroup::of(ip, identity.ipv6_prefix);
            tables.addresses.see(&group, ip.to_canonical(), at, || group);
        }
        if let Some(tenant) = facts.tenant.filter(|tenant| fits(tenant)) {
            tables.tenants.see(tenant, (), at, || tenant.into());
        }
        if let Some(user) = facts.user.filter(|user| fits(user)) {
            let tenant = facts.tenant.filter(|tenant| !tenant.is_empty());
            let name = identity.user_scope.write(tenant, user);
            if fits(&name) {
                tables.users.see(&*name, (), at, || (&*name).into());
            }
        }
    }

    /// Keeps the names of an event that another system reports, before they are hidden.
    pub(crate) fn see_reported(&self, event: &Event, policy: &Policy, now: Timestamp) {
        let is_stopped = event.blocked || event.verdict == Verdict::Warn || event.strike.is_some();
        if !is_stopped || now.since(event.at) > LIFETIME {
            return;
        }
        // What is a digest by now cannot be traced back to its name.
        let named = |name: &'_ Option<Box<str>>| -> Option<String> {
            name.as_deref().filter(|name| !is_redacted(name)).map(|name| read_name(name).to_owned())
        };
        // A block of IPv6 is known by its first address.
        let ip = event.ip.as_deref().and_then(|ip| parse_address(ip.split('/').next().unwrap_or(ip)));
        let (tenant, user) = (named(&event.tenant), named(&event.user_id));
        // Without the name of its tenant, a user of one is not known.
        let is_whole = policy.identity().user_scope == UserScope::Global || event.tenant.is_none() || tenant.is_some();
        let user = user.as_deref().filter(|_| is_whole);
        self.see(&Facts { ip, tenant: tenant.as_deref(), user, ..Facts::default() }, policy, event.at);
    }

    /// Removes the names that are too old.
    fn forget_old(&self, now: Timestamp) {
        let tables = &mut *self.tables();
        tables.addresses.retain(|_, _, seen| now.since(seen) <= LIFETIME);
        tables.tenants.retain(|_, (), seen| now.since(seen) <= LIFETIME);
        tables.users.retain(|_, (), seen| now.since(seen) <= LIFETIME);
    }

    /// Removes the names for which `is_erased` holds.
    fn forget(&self, layer: Layer, policy: &Policy, is_erased: impl Fn(&Known) -> bool) {
        let tables = &mut *self.tables();
        let stays = |known: Option<Known>| known.is_none_or(|known| !is_erased(&known));
        match layer {
            Layer::Edge => tables.addresses.retain(|group, ip, _| stays(Some(Known::address(*group, *ip)))),
            Layer::Tenant => tables.tenants.retain(|name, (), _| stays(Some(Known::tenant(name)))),
            Layer::User => tables.users.retain(|name, (), _| stays(Known::user(name, policy))),
            Layer::Global | Layer::Endpoint => {}
        }
    }

    /// Returns the names of a layer.
    fn of(&self, layer: Layer, policy: &Policy, now: Timestamp) -> Vec<Known> {
        let is_recent = |seen: Timestamp| now.since(seen) <= LIFETIME;
        // Copied, so that no decision waits until all of them are digested.
        match layer {
            Layer::Edge => {
                let copied = self.tables().addresses.copied(is_recent);
                copied.into_iter().map(|(group, ip)| Known::address(group, ip)).collect()
            }
            Layer::Tenant => {
                let copied = self.tables().tenants.copied(is_recent);
                copied.into_iter().map(|(name, ())| Known::tenant(&name)).collect()
            }
            Layer::User => {
                let copied = self.tables().users.copied(is_recent);
                copied.into_iter().filter_map(|(name, ())| Known::user(&name, policy)).collect()
            }
            Layer::Global | Layer::Endpoint => Vec::new(),
        }
    }

    fn tables(&self) -> MutexGuard<'_, Tables> {
        // A poisoned lock is safe to use: at worst a name is missing.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Known {
    /// Events and log lines show the block that shares a budget. An address of IPv6 has a digest of its own too, which versions before
    /// have logged.
    fn address(group: AddressGroup, ip: IpAddr) -> Self {
        let name = ip.to_string();
        Self { texts: vec![group.to_string(), name.clone()], name, tenant: None }
    }

    fn tenant(name: &str) -> Self {
        Self { name: name.to_owned(), tenant: None, texts: vec![name.to_owned()] }
    }

    /// Events and log lines show the user without the tenant. `None` if the name is of another `user_scope`.
    fn user(name: &str, policy: &Policy) -> Option<Self> {
        let (tenant, user) = policy.identity().user_scope.read(name).ok()?;
        Some(Self { name: name.to_owned(), tenant: tenant.map(Cow::into_owned), texts: vec![user.into_owned()] })
    }

    fn has_digest(&self, digest: &str, policy: &Policy) -> bool {
        self.texts.iter().any(|text| policy.key().redact(text) == digest)
    }
}

/// A part of a key as operators write it.
enum Part<'k> {
    Digest(&'k str),
    Name(Cow<'k, str>),
}

impl Part<'_> {
    fn is_of(&self, name: &str, policy: &Policy) -> bool {
        match self {
            Self::Digest(digest) => policy.key().redact(name) == *digest,
            Self::Name(given) => given == name,
        }
    }
}

/// A key as operators write it.
enum AskedKey<'k> {
    /// A name, as limits and bans know it.
    Name(Cow<'k, str>),
    /// The digest of an address, a tenant or a user.
    Digest(&'k str),
    /// The user of a tenant, or of none, where one of the two is a digest: `TENANT/#…`.
    Scoped { tenant: Option<Part<'k>>, user: Part<'k> },
}

impl<'k> AskedKey<'k> {
    fn read(layer: Layer, key: &'k str, policy: &Policy) -> Self {
        let scope = policy.identity().user_scope;
        let is_scoped = layer == Layer::User && scope == UserScope::Tenant;
        match (layer, key.split_once('/').filter(|_| is_scoped)) {
            (Layer::Global | Layer::Endpoint, _) => Self::Name(key.into()),
            // Before it is decoded: `TENANT/%23…` is a user whose name begins so.
            (_, Some((tenant, user))) => {
                let name = format!("{}/{}", read_name(tenant), read_name(user));
                // What cannot be read is refused by those who use the name.
                let Some((own_tenant, own_user)) =
                    scope.read(&name).ok().filter(|_| is_redacted(tenant) || is_redacted(user))
                else {
                    return Self::Name(if name == key { key.into() } else { name.into() });
                };
                let part = |written, name: Cow<'_, str>| {
                    if is_redacted(written) { Part::Digest(written) } else { Part::Name(name.into_owned().into()) }
                };
                Self::Scoped { tenant: own_tenant.map(|name| part(tenant, name)), user: part(user, own_user) }
            }
            (Layer::Edge, None) if is_redacted(key.trim()) => Self::Digest(key.trim()),
            (_, None) if is_redacted(key) => Self::Digest(key),
            (_, None) => Self::Name(read_name(key).into()),
        }
    }

    fn is_of(&self, known: &Known, policy: &Policy) -> bool {
        match self {
            Self::Name(name) => *name == known.name,
            Self::Digest(digest) => known.has_digest(digest, policy),
            Self::Scoped { tenant, user } => {
                let is_tenants = match (tenant, &known.tenant) {
                    (Some(given), Some(own)) => given.is_of(own, policy),
                    (given, own) => given.is_none() && own.is_none(),
                };
                is_tenants && known.texts.iter().any(|text| user.is_of(text, policy))
            }
        }
    }
}

/// Returns the name that an operator has written, as limits and bans know it; `None` if a part of it is a digest.
pub(super) fn written_name<'k>(layer: Layer, key: &'k str, policy: &Policy) -> Option<Cow<'k, str>> {
    match AskedKey::read(layer, key, policy) {
        AskedKey::Name(name) => Some(name),
        AskedKey::Digest(_) | AskedKey::Scoped { .. } => None,
    }
}

impl Desk {
    /// Returns the name that an operator means by a key: that of a caller that was stopped of late, if the key is a digest, else the
    /// key itself.
    ///
    /// A name that looks like a digest is written with one more `#`: or a caller could take the digest of another one as its name, and be
    /// banned or forgiven in place of it.
    pub(crate) fn named<'k>(&self, layer: Layer, key: &'k str) -> Result<Cow<'k, str>, OperationError> {
        let policy = self.policy();
        let asked = match AskedKey::read(layer, key, &policy) {
            AskedKey::Name(name) => return Ok(name),
            digest => digest,
        };
        let all = self.names.of(layer, &policy, self.now());
        let found: Vec<&Known> = all.iter().filter(|known| asked.is_of(known, &policy)).collect();
        match found.as_slice() {
            [] => Err(OperationError::UnknownDigest),
            [one] => Ok(one.name.clone().into()),
            several => {
                let digest = match &asked {
                    AskedKey::Digest(digest) | AskedKey::Scoped { user: Part::Digest(digest), .. } => digest,
                    AskedKey::Name(_) | AskedKey::Scoped { .. } => key,
                };
                let shown = several.iter().take(MAX_AMBIGUOUS).map(|known| {
                    let tenant = known.tenant.as_deref().map(|tenant| shown_tenant(tenant, &policy));
                    policy.identity().user_scope.write(tenant.as_deref(), digest).into_owned()
                });
                Err(OperationError::AmbiguousDigest(shown.collect()))
            }
        }
    }

    /// Returns the name of a subject for an operator who gave its digest. A secret name stays a digest.
    pub(crate) fn shown_name(&self, layer: Layer, name: &str) -> String {
        match ListEntry::named(layer, name) {
            Ok(entry) if layer != Layer::Edge => self.policy().shown_key(&entry),
            _ => name.to_owned(),
        }
    }

    /// Forgets the names of a subject whose events are erased, by any of its names or digests in `values`; of a user, only of the tenant
    /// in `tenant` if that is given.
    pub(crate) fn forget_names(&self, layer: Layer, values: &[String], tenant: Option<&[String]>) {
        let policy = self.policy();
        let is_in = |text: &String, values: &[String]| {
            values.iter().any(|value| *value == write_name(text) || *value == policy.key().redact(text))
        };
        self.names.forget(layer, &policy, |known| {
            let is_tenants = match (tenant, &known.tenant) {
                (Some(values), Some(own)) => is_in(own, values),
                _ => true,
            };
            is_tenants && known.texts.iter().any(|text| is_in(text, values))
        });
    }

    /// Forgets the users and accounts of an erased tenant, by its forms in events.
    pub(crate) fn forget_names_of_tenant(&self, values: &[String]) {
        let policy = self.policy();
        let is_erased = |tenant: &str| {
            values.iter().any(|value| *value == write_name(tenant) || *value == policy.key().redact(tenant))
        };
        self.names.forget(Layer::User, &policy, |known| known.tenant.as_deref().is_some_and(is_erased));
        self.forget_listed_accounts(|_, name| name.is_some_and(|(tenant, _)| tenant.is_some_and(is_erased)));
    }

    /// Forgets the names that were not seen for a while.
    pub(crate) fn forget_old_names(&self) {
        self.names.forget_old(self.now());
    }
}

/// Hears of decisions that stop or strike a caller: keeps its names, and logs it.
#[derive(Debug)]
pub(super) struct StopObserver {
    pub(super) denials: Arc<DenialLog>,
    pub(super) names: Arc<RecentNames>,
}

impl Observer for StopObserver {
    fn decided(&self, observed: &ObservedDecision<'_>) {
        if Event::is_recorded(observed.decision) {
            self.names.see(observed.facts, observed.policy, observed.decision.at);
            self.denials.decided(observed);
        }
    }

    fn refused(&self, refused: Refused<'_>, policy: &Policy) {
        self.denials.refused(refused, policy);
    }

    fn token_refused(&self, refused: TokenRefused, policy: &Policy) {
        self.denials.token_refused(refused, policy);
    }
}

fn shown_tenant(tenant: &str, policy: &Policy) -> String {
    if policy.identity().secret_tenant { policy.key().redact(tenant) } else { write_name(tenant).into_owned() }
}
