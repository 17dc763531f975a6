//! Limits by tier and category, and what single tenants and users have of their own.

use std::collections::{BTreeMap, BTreeSet};

use crate::caller::Caller;
use crate::limit::Limit;
use crate::policy::{CostOf, Measured, Per, Shape};

/// One limit by tier, made ready once for each way in which rules count it (their shape); `None` is unlimited.
pub(crate) type Shaped = Vec<Option<Measured>>;

/// What a tier, a tenant or a user has, by category.
pub(crate) type Categories = BTreeMap<Box<str>, Shaped>;

/// What one tenant or user has of its own.
#[derive(Debug, Clone, Default)]
pub(crate) struct Own {
    pub(crate) tier: Option<Box<str>>,
    pub(crate) limits: Categories,
    /// All that it could have, so many times over, where it was given that.
    pub(crate) scaled: Option<Box<Scaled>>,
}

/// Limits so many times over.
#[derive(Debug, Clone, Default)]
pub(crate) struct Scaled {
    /// Those of rules that give everyone the same, by the rule's name.
    pub(crate) rules: BTreeMap<Box<str>, Measured>,
    pub(crate) own: Categories,
    pub(crate) tiers: BTreeMap<Box<str>, Categories>,
}

/// All limits by tier of a policy.
#[derive(Debug, Clone, Default)]
pub(crate) struct Tiers {
    pub(crate) tiers: BTreeMap<Box<str>, Categories>,
    pub(crate) tenants: BTreeMap<Box<str>, Own>,
    pub(crate) users: BTreeMap<Box<str>, Own>,
    /// Every way in which rules count a limit by tier.
    pub(crate) shapes: Vec<Shape>,
    /// Whether anybody has more than the policy gives them.
    pub(crate) any_scaled: bool,
}

/// Where a limit by tier was found.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Source<'p> {
    /// The tenant's or user's own limit.
    Own,
    /// A tier.
    Tier(&'p str),
}

impl Tiers {
    /// The tier of a request: the user's or tenant's own, else the one it came with, else the default. One that the policy
    /// does not know counts only where nothing else is said.
    pub(crate) fn tier_of<'t>(
        &'t self,
        user: Option<&str>,
        tenant: Option<&str>,
        given: Option<&'t str>,
        default: Option<&'t str>,
    ) -> Option<&'t str> {
        // Most policies have none, and then only what is said counts.
        if self.tiers.is_empty() {
            return given;
        }
        let own = user.and_then(|user| self.users.get(user)).and_then(|own| own.tier.as_deref());
        let owners = tenant.and_then(|tenant| self.tenants.get(tenant)).and_then(|own| own.tier.as_deref());
        let mut tiers = [own, owners, given, default].into_iter().flatten();
        tiers.find(|name| self.tiers.contains_key(*name)).or(given)
    }

    /// The limit of a rule with this shape: the user's or tenant's own, else its tier's. `None` is unlimited.
    pub(crate) fn limit<'p>(
        &'p self,
        shape: usize,
        per: &[Per],
        caller: &Caller<'_>,
    ) -> Option<(&'p Measured, Source<'p>)> {
        let pick = |categories: &'p Categories| categories.get(caller.category).map(|shaped| shaped.get(shape));
        let users = per.contains(&Per::User).then(|| caller.user.and_then(|user| self.users.get(user))).flatten();
        let tenants = caller.tenant.and_then(|tenant| self.tenants.get(tenant));
        for own in [users, tenants].into_iter().flatten() {
            let limits = own.scaled.as_deref().filter(|_| self.any_scaled).map_or(&own.limits, |scaled| &scaled.own);
            if let Some(limit) = pick(limits) {
                return Some((limit?.as_ref()?, Source::Own));
            }
        }
        let scaled = self.scaled(per, caller).map_or(&self.tiers, |scaled| &scaled.tiers);
        let (name, categories) = scaled.get_key_value(caller.tier?)?;
        let limit = pick(categories)??.as_ref()?;
        Some((limit, Source::Tier(name)))
    }

    /// What somebody has who was given so many times as much, of rules that count by them.
    pub(crate) fn scaled(&self, per: &[Per], caller: &Caller<'_>) -> Option<&Scaled> {
        if !self.any_scaled {
            return None;
        }
        let users = || per.contains(&Per::User).then(|| caller.user.and_then(|user| self.users.get(user))).flatten();
        let tenants =
            || per.contains(&Per::Tenant).then(|| caller.tenant.and_then(|tenant| self.tenants.get(tenant))).flatten();
        let own = users().and_then(|own| own.scaled.as_deref());
        own.or_else(|| tenants().and_then(|own| own.scaled.as_deref()))
    }

    /// Every category that somebody has a limit for.
    pub(crate) fn categories(&self) -> BTreeSet<&str> {
        let owners = self.tenants.values().chain(self.users.values()).map(|own| &own.limits);
        self.tiers.values().chain(owners).flat_map(Categories::keys).map(AsRef::as_ref).collect()
    }

    /// The limits of this shape that single tenants and users have of their own.
    pub(crate) fn owned(&self, shape: usize, category: &str) -> impl Iterator<Item = &Limit> {
        let owners = self.tenants.values().chain(self.users.values());
        let tables = owners.flat_map(|own| [Some(&own.limits), own.scaled.as_deref().map(|scaled| &scaled.own)]);
        let shaped = tables.flatten().filter_map(move |limits| limits.get(category)?.get(shape)?.as_ref());
        shaped.map(|measured| &measured.limit)
    }

    /// Every limit of this shape.
    pub(crate) fn all_of_shape(&self, shape: usize) -> impl Iterator<Item = &Limit> {
        let owners = self.tenants.values().chain(self.users.values()).map(|own| &own.limits);
        let shaped = self.tiers.values().chain(owners).flat_map(Categories::values);
        shaped.filter_map(move |shaped| shaped.get(shape)?.as_ref()).map(|measured| &measured.limit)
    }

    /// Whether any limit counts bytes.
    pub(crate) fn counts_bytes(&self) -> bool {
        let owners = self.tenants.values().chain(self.users.values()).map(|own| &own.limits);
        let mut shaped = self.tiers.values().chain(owners).flat_map(Categories::values);
        shaped.any(|shaped| shaped.iter().flatten().any(|measured| measured.cost == CostOf::Bytes))
    }
}
