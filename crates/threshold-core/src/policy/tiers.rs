//! Limits by tier and category, and the overrides of single tenants and users.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use super::settings::{Owner, Setting};
use super::shared_map::SharedMap;
use crate::caller::Caller;
use crate::limit::{Algorithm, Limit};
use crate::policy::{CostOf, Measured, Per, Shape};

/// The largest number of partitions that the users of one tenant are spread over: more than any cluster has processors.
pub(crate) const MAX_SPREAD: u32 = 1024;

/// One limit by tier, compiled for each [`Shape`] in which rules count it; `None` is unlimited.
pub(crate) type Shaped = Vec<Option<Measured>>;

/// The limits of a tier, a tenant or a user, by category.
pub(crate) type Categories = BTreeMap<Box<str>, Shaped>;

/// The overrides of one tenant or user.
#[derive(Debug, Clone, Default)]
pub(crate) struct Own {
    pub(crate) tier: Option<Box<str>>,
    pub(crate) limits: Categories,
    /// Every limit that applies to it, multiplied, if a setting has a multiplier.
    pub(crate) scaled: Option<Box<Scaled>>,
}

/// Multiplied limits.
#[derive(Debug, Clone, Default)]
pub(crate) struct Scaled {
    /// Those of rules whose limit is the same for everyone, by the rule's name.
    pub(crate) rules: BTreeMap<Box<str>, Measured>,
    pub(crate) own: Categories,
    pub(crate) tiers: BTreeMap<Box<str>, Categories>,
}

/// The limits by tier in a policy's file.
#[derive(Debug, Clone, Default)]
pub(crate) struct Tiers {
    pub(crate) tiers: BTreeMap<Box<str>, Categories>,
    pub(crate) tenants: BTreeMap<Box<str>, Own>,
    pub(crate) users: BTreeMap<Box<str>, Own>,
    /// The distinct shapes in which rules count limits by tier.
    pub(crate) shapes: Vec<Shape>,
    /// Over how many partitions the users of a tenant are spread, by the tenant's name. All others are in the tenant's own.
    pub(crate) spreads: BTreeMap<Box<str>, u32>,
}

/// The limits by tier in force: the file's, and the settings of single tenants and users above them. Clones share everything, so
/// the cost of a change does not depend on the number of settings.
#[derive(Debug, Clone, Default)]
pub(crate) struct TiersInForce {
    written: Arc<Tiers>,
    tenants: SharedMap<Given>,
    users: SharedMap<Given>,
    totals: Totals,
    has_tiers: bool,
    /// Whether any setting has a multiplier.
    pub(crate) any_scaled: bool,
}

/// The setting of one tenant or user.
#[derive(Debug)]
pub(crate) struct Given {
    pub(crate) setting: Arc<Setting>,
    /// The overrides of the file and the setting together; `None` if the setting does not fit the policy.
    pub(crate) own: Option<Own>,
}

/// Figures over all settings, updated with each change so that no one has to iterate over the settings.
#[derive(Debug, Clone, Default)]
struct Totals {
    scaled: usize,
    in_bytes: usize,
    /// One limit of each kind among them, and how many of that kind there are. The policy bounds the number of kinds.
    limits: Arc<BTreeMap<LimitKind, (usize, Limit)>>,
}

/// A category, a shape and an algorithm.
type LimitKind = (Box<str>, usize, Algorithm);

/// Why a rule has no limit for a request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum NoLimit {
    /// The request is unlimited.
    Unlimited,
    /// The limit is that of a tier, and the request has no tier that the policy defines.
    NoTier,
}

/// Where a limit by tier was found.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Source<'p> {
    /// The tenant's or user's own limit.
    Own,
    /// A tier.
    Tier(&'p str),
}

impl TiersInForce {
    pub(crate) fn new(written: Tiers) -> Self {
        let has_tiers = !written.tiers.is_empty();
        Self { written: Arc::new(written), has_tiers, ..Self::default() }
    }

    /// Returns the limits of the file.
    pub(crate) fn written(&self) -> &Tiers {
        &self.written
    }

    /// Adds limits to the table of a tenant in the file. Settings are compiled above that table, so they must be given afterwards.
    pub(crate) fn override_tenant(&mut self, name: Box<str>, limits: Categories) {
        Arc::make_mut(&mut self.written).tenants.entry(name).or_default().limits.extend(limits);
    }

    /// Returns over how many partitions the users of a tenant are spread; `None` if they are in the tenant's own.
    #[inline]
    pub(crate) fn spread(&self, tenant: &str) -> Option<u32> {
        // Usually no tenant is that large, and comparing names would be wasted.
        if self.written.spreads.is_empty() { None } else { self.written.spreads.get(tenant).copied() }
    }

    /// Returns the settings of tenants, or of users.
    pub(crate) fn given(&self, owner: Owner) -> &SharedMap<Given> {
        match owner {
            Owner::Tenant => &self.tenants,
            Owner::User => &self.users,
        }
    }

    /// Replaces a setting; `None` removes it. Returns whether there was one before.
    pub(crate) fn give(&mut self, owner: Owner, name: &str, given: Option<Given>) -> bool {
        // Added before the old setting is subtracted, so that a kind that both have is not removed and made again.
        if let Some(own) = given.as_ref().and_then(|given| given.own.as_ref()) {
            self.totals.add(own);
        }
        let owners = if owner == Owner::User { &mut self.users } else { &mut self.tenants };
        let before = match given {
            Some(given) => owners.insert(name, given),
            None => owners.remove(name),
        };
        if let Some(own) = before.as_ref().and_then(|before| before.own.as_ref()) {
            self.totals.subtract(own);
        }
        self.any_scaled = self.totals.scaled > 0;
        before.is_some()
    }

    #[inline]
    fn tenant(&self, name: &str) -> Option<&Own> {
        own_of(&self.tenants, &self.written.tenants, name)
    }

    /// Returns the overrides of a request's user. Usually no user has any: then the user's canonical name is not computed.
    #[inline]
    fn user_of(&self, caller: &Caller<'_>) -> Option<&Own> {
        if self.users.is_empty() && self.written.users.is_empty() {
            return None;
        }
        own_of(&self.users, &self.written.users, caller.user_name()?)
    }

    /// Whether any tenant has a table in the file, or a setting.
    pub(crate) fn has_tenants(&self) -> bool {
        !(self.tenants.is_empty() && self.written.tenants.is_empty())
    }

    /// Whether there are any tiers.
    #[inline]
    pub(crate) fn has_tiers(&self) -> bool {
        self.has_tiers
    }

    /// Returns the tier of a request: the user's or tenant's own, else the one in the request, else the default. A tier that the
    /// policy does not define counts only if there is no other.
    #[inline(never)]
    pub(crate) fn tier_of<'t>(
        &'t self,
        caller: &Caller<'_>,
        given: Option<&'t str>,
        default: Option<&'t str>,
    ) -> Option<&'t str> {
        let own = self.user_of(caller).and_then(|own| own.tier.as_deref());
        // The operator's word before the request's: a tier that a client can name must not replace one that was set for
        // it.
        let owners = caller.tenant.and_then(|tenant| self.tenant(tenant)).and_then(|own| own.tier.as_deref());
        let mut tiers = [own, owners, given, default].into_iter().flatten();
        // An unknown tier must not win over a known one: it has no limits, so it would be unlimited.
        tiers.find(|name| self.written.tiers.contains_key(*name)).or(given)
    }

    /// Returns the limit of a rule with this shape: the user's or tenant's own, else its tier's.
    pub(crate) fn limit<'p>(
        &'p self,
        shape: usize,
        per: &[Per],
        caller: &Caller<'_>,
    ) -> Result<(&'p Measured, Source<'p>), NoLimit> {
        let name = self.written.own_name(shape).unwrap_or(caller.category);
        let pick = |categories: &'p Categories| categories.get(name).map(|shaped| shaped.get(shape)?.as_ref());
        // A user's own limit applies only to budgets of single users. In a shared budget it would apply to everyone in
        // it.
        let users = per.contains(&Per::User).then(|| self.user_of(caller)).flatten();
        let tenants = caller.tenant.and_then(|tenant| self.tenant(tenant));
        for own in [users, tenants].into_iter().flatten() {
            let limits = own.scaled.as_deref().filter(|_| self.any_scaled).map_or(&own.limits, |scaled| &scaled.own);
            if let Some(limit) = pick(limits) {
                // An own limit ends the search, also where it is unlimited: the tier must not limit it again.
                return limit.map(|limit| (limit, Source::Own)).ok_or(NoLimit::Unlimited);
            }
        }
        let tiers = self.scaled(per, caller).map_or(&self.written.tiers, |scaled| &scaled.tiers);
        let Some((tier, categories)) = caller.tier.and_then(|tier| tiers.get_key_value(tier)) else {
            return Err(if self.written.is_by_tier(shape) { NoLimit::NoTier } else { NoLimit::Unlimited });
        };
        let limit = pick(categories).flatten().ok_or(NoLimit::Unlimited)?;
        Ok((limit, Source::Tier(tier)))
    }

    /// Returns the multiplied limits of the user or tenant that a rule counts by.
    pub(crate) fn scaled(&self, per: &[Per], caller: &Caller<'_>) -> Option<&Scaled> {
        if !self.any_scaled {
            return None;
        }
        let users = || per.contains(&Per::User).then(|| self.user_of(caller)).flatten();
        let tenants =
            || per.contains(&Per::Tenant).then(|| caller.tenant.and_then(|tenant| self.tenant(tenant))).flatten();
        // The user before the tenant, as for limits: the narrower setting wins.
        let own = users().and_then(|own| own.scaled.as_deref());
        own.or_else(|| tenants().and_then(|own| own.scaled.as_deref()))
    }

    /// Returns the limits of this shape that single tenants and users have, at least one of each algorithm.
    pub(crate) fn owned(&self, shape: usize, category: &str) -> impl Iterator<Item = &Limit> {
        let named = self.written.own_name(shape);
        let is_named = move |own: &str| own == named.unwrap_or(category);
        let given = self.totals.limits.iter().filter(move |((own, of, _), _)| *of == shape && is_named(own));
        self.written.owned(shape, category).chain(given.map(|(_, (_, limit))| limit))
    }

    /// Returns the algorithms of all limits of this shape.
    pub(crate) fn algorithms(&self, shape: usize) -> BTreeSet<Algorithm> {
        let given = self.totals.limits.keys().filter(|(_, of, _)| *of == shape).map(|(.., algorithm)| *algorithm);
        self.written.all_of_shape(shape).filter_map(Limit::algorithm).chain(given).collect()
    }

    /// Whether any limit counts bytes.
    pub(crate) fn counts_bytes(&self) -> bool {
        self.totals.in_bytes > 0 || self.written.counts_bytes()
    }
}

impl Totals {
    fn add(&mut self, own: &Own) {
        self.scaled = self.scaled.saturating_add(usize::from(own.scaled.is_some()));
        self.in_bytes = self.in_bytes.saturating_add(usize::from(own.counts_bytes()));
        // Copied if an older policy shares it. The number of kinds is small, whatever the number of settings is.
        let limits = Arc::make_mut(&mut self.limits);
        for (kind, limit) in own.kinds() {
            // Any limit of a kind will do: callers ask for its algorithm, and a key does not depend on the figures.
            let count = limits.entry(kind).or_insert((0, limit));
            count.0 = count.0.saturating_add(1);
        }
    }

    fn subtract(&mut self, own: &Own) {
        self.scaled = self.scaled.saturating_sub(usize::from(own.scaled.is_some()));
        self.in_bytes = self.in_bytes.saturating_sub(usize::from(own.counts_bytes()));
        let limits = Arc::make_mut(&mut self.limits);
        for (kind, _) in own.kinds() {
            if let Some(count) = limits.get_mut(&kind) {
                count.0 = count.0.saturating_sub(1);
            }
        }
        // A kind that no setting has any more must not be reported as one in use.
        limits.retain(|_, (count, _)| *count > 0);
    }
}

impl Own {
    fn counts_bytes(&self) -> bool {
        counts_bytes(self.limits.values())
    }

    /// Returns its limits, each with category, shape and algorithm.
    fn kinds(&self) -> impl Iterator<Item = (LimitKind, Limit)> {
        let tables = [Some(&self.limits), self.scaled.as_deref().map(|scaled| &scaled.own)];
        tables.into_iter().flatten().flatten().flat_map(|(category, shaped)| {
            let kinds = shaped.iter().enumerate().filter_map(|(shape, measured)| {
                let limit = measured.as_ref()?.limit;
                Some(((category.clone(), shape, limit.algorithm()?), limit))
            });
            kinds.collect::<Vec<_>>()
        })
    }
}

impl Tiers {
    /// Returns every category that has a limit.
    pub(crate) fn categories(&self) -> BTreeSet<&str> {
        self.tables().flat_map(Categories::keys).map(AsRef::as_ref).collect()
    }

    /// Returns the name of the limit that rules with this shape take, if it does not depend on the category.
    #[inline]
    fn own_name(&self, shape: usize) -> Option<&str> {
        self.shapes.get(shape)?.own_name()
    }

    /// Whether the limit of rules with this shape depends on the tier. One that a rule names, and no tier has, only belongs to single
    /// tenants and users.
    pub(crate) fn is_by_tier(&self, shape: usize) -> bool {
        self.own_name(shape).is_none_or(|name| self.tiers.values().any(|limits| limits.contains_key(name)))
    }

    /// Whether a rule takes the limit with this name: one for each category, or one that a rule names.
    pub(crate) fn takes(&self, name: &str) -> bool {
        self.shapes.iter().any(|shape| shape.takes(name))
    }

    /// Whether a rule has `limit = "tier:NAME"` with this name.
    pub(crate) fn is_named(&self, name: &str) -> bool {
        self.shapes.iter().any(|shape| shape.own_name() == Some(name))
    }

    /// Returns the limits of this shape that single tenants and users have.
    fn owned(&self, shape: usize, category: &str) -> impl Iterator<Item = &Limit> {
        let named = self.own_name(shape);
        let owners = self.tenants.values().chain(self.users.values());
        let shaped = owners.filter_map(move |own| own.limits.get(named.unwrap_or(category))?.get(shape)?.as_ref());
        shaped.map(|measured| &measured.limit)
    }

    /// Returns every limit of this shape.
    pub(crate) fn all_of_shape(&self, shape: usize) -> impl Iterator<Item = &Limit> {
        self.measured_of_shape(shape).map(|measured| &measured.limit)
    }

    /// Returns every limit of this shape, with what it counts.
    pub(crate) fn measured_of_shape(&self, shape: usize) -> impl Iterator<Item = &Measured> {
        let shaped = self.tables().flat_map(Categories::values);
        shaped.filter_map(move |shaped| shaped.get(shape)?.as_ref())
    }

    /// Whether any limit counts bytes.
    pub(crate) fn counts_bytes(&self) -> bool {
        counts_bytes(self.tables().flat_map(Categories::values))
    }

    /// Returns the limits of tiers, tenants and users.
    fn tables(&self) -> impl Iterator<Item = &Categories> {
        let owners = self.tenants.values().chain(self.users.values()).map(|own| &own.limits);
        self.tiers.values().chain(owners)
    }
}

/// Returns the overrides of an owner: with its setting if it has one, else by the file alone.
#[inline]
fn own_of<'t>(given: &'t SharedMap<Given>, written: &'t BTreeMap<Box<str>, Own>, name: &str) -> Option<&'t Own> {
    // Usually there are none, and hashing the name would be wasted.
    if given.is_empty() && written.is_empty() {
        return None;
    }
    given.get(name).and_then(|given| given.own.as_ref()).or_else(|| written.get(name))
}

fn counts_bytes<'t>(mut shaped: impl Iterator<Item = &'t Shaped>) -> bool {
    shaped.any(|shaped| shaped.iter().flatten().any(|measured| measured.cost == CostOf::Bytes))
}
