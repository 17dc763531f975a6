//! Policies built in code: the same keys, checks and meaning as a policy file.

mod identity;
mod rule;
mod tables;
mod values;

use super::file::{
    AlertEntry, AlertFile, EnvoyDomainFile, EnvoyVerbName, Located, PolicyFile, TenantFile, Text, Texts,
};
use super::{Alert, AlertOn, EnvoyDomain, Policy, PolicyError, Review, WhenFull, load};
use crate::plan::Verb;

pub use identity::{IdentityBuilder, JwtBuilder};
pub use rule::RuleBuilder;
pub use tables::{CategoryBuilder, LadderBuilder, LoginBuilder};
pub use values::{LimitText, PeriodText};

/// A policy in the making. Every key of a policy file has a method.
///
/// [`build`](Self::build) makes the same checks as [`Policy::parse`], and [`to_toml`](Self::to_toml) prints the policy as a
/// file that says the same.
///
/// ```
/// use threshold_core::policy::{Per, Rule};
/// use threshold_core::{Limit, Policy};
///
/// let posts = Rule::builder("posts").per([Per::User]).method("POST").path("/api/posts").limit(Limit::per_minute(2));
/// let builder = Policy::builder()
///     .rule(posts.ladder("standard"))
///     .rule(Rule::builder("uploads").per([Per::User]).limit("50MB/day"))
///     .ladder("standard", ["warn", "cooldown 15min", "ban 24h"]);
/// assert_eq!(
///     builder.to_toml(),
///     r#"[ladders.standard]
/// rungs = ["warn", "cooldown 15min", "ban 24h"]
///
/// [[rule]]
/// name = "posts"
/// match = { method = "POST", path = "/api/posts" }
/// per = ["user"]
/// limit = "2/min"
/// algorithm = "token-bucket"
/// ladder = "standard"
///
/// [[rule]]
/// name = "uploads"
/// per = ["user"]
/// limit = "50MB/day"
/// "#
/// );
/// let policy = builder.build()?;
/// # assert_eq!(policy.rules().len(), 2);
/// # Ok::<(), threshold_core::PolicyError>(())
/// ```
///
/// Strings are taken literally: `${NAME}` is not a variable here, and `to_toml` prints a dollar sign as `$$`.
#[derive(Debug, Clone, Default)]
#[must_use = "a builder does nothing until `build` is called"]
pub struct PolicyBuilder {
    file: PolicyFile,
}

impl PolicyBuilder {
    /// Adds a rule. Rules are evaluated by layer and, within a layer, in the order in which they were added.
    pub fn rule(mut self, rule: RuleBuilder) -> Self {
        self.file.rule.push(rule.file.into());
        self
    }

    /// Adds a category. A request belongs to the first category that matches it, else to `requests`.
    pub fn category(mut self, category: CategoryBuilder) -> Self {
        self.file.category.push(category.file);
        self
    }

    /// Adds a tier: the limit of each category, as `("requests", "100/min")`.
    pub fn tier<C: Into<String>, L: Into<String>>(
        mut self,
        name: impl Into<String>,
        limits: impl IntoIterator<Item = (C, L)>,
    ) -> Self {
        self.file.tiers.0.push((text(name), values::named(limits)));
        self
    }

    /// Adds a tenant's overrides: its tier, as `("tier", "gold")`, and limits by category.
    pub fn tenant<C: Into<String>, L: Into<String>>(
        mut self,
        name: impl Into<String>,
        overrides: impl IntoIterator<Item = (C, L)>,
    ) -> Self {
        let overrides = values::named(overrides);
        self.file.tenants.0.push((text(name), TenantFile { overrides, ..TenantFile::default() }));
        self
    }

    /// Spreads the records of a tenant's users over this many partitions of a shared store, at most 1,024.
    pub fn spread(mut self, tenant: impl Into<String>, partitions: u32) -> Self {
        let (tenant, tenants) = (text(tenant), &mut self.file.tenants.0);
        match tenants.iter_mut().find(|(name, _)| name.value == tenant.value) {
            Some((_, known)) => known.spread = some(partitions),
            None => tenants.push((tenant, TenantFile { spread: some(partitions), ..TenantFile::default() })),
        }
        self
    }

    /// Adds a user's overrides: the tier, as `("tier", "gold")`, and limits by category. Where users belong to tenants, the
    /// name is `TENANT/USER`.
    pub fn user<C: Into<String>, L: Into<String>>(
        mut self,
        name: impl Into<String>,
        overrides: impl IntoIterator<Item = (C, L)>,
    ) -> Self {
        self.file.users.0.push((text(name), values::named(overrides)));
        self
    }

    /// Adds a ladder of penalties, or changes one that is built in. The rungs alone are enough: `["warn", "ban 24h"]`.
    pub fn ladder(mut self, name: impl Into<String>, ladder: impl Into<LadderBuilder>) -> Self {
        self.file.ladders.0.push((text(name), ladder.into().file));
        self
    }

    /// Sets how callers are identified.
    pub fn identity(mut self, identity: IdentityBuilder) -> Self {
        self.file.identity = identity.file;
        self
    }

    /// Turns on login protection. It needs the feature `login`.
    pub fn login(mut self, login: LoginBuilder) -> Self {
        self.file.login = Some(login.file.into());
        self
    }

    /// Adds callers who are never limited: `203.0.113.0/24`, `user:ID` or `tenant:ID`.
    pub fn allow_list<E: Into<String>>(mut self, entries: impl IntoIterator<Item = E>) -> Self {
        extend(&mut self.file.lists.allow, entries);
        self
    }

    /// Adds callers who are always denied, written like those of [`allow_list`](Self::allow_list).
    pub fn deny_list<E: Into<String>>(mut self, entries: impl IntoIterator<Item = E>) -> Self {
        extend(&mut self.file.lists.deny, entries);
        self
    }

    /// Sets when an alert is raised.
    pub fn alert(self, on: AlertOn, alert: Alert) -> Self {
        let Alert { per, warning, critical } = alert;
        let alert = AlertFile { per: period(per), warning: warning.into(), critical: critical.into() };
        self.alert_entry(on, AlertEntry::Thresholds(alert))
    }

    /// Switches an alert off, which is otherwise raised at its [usual thresholds](AlertOn::usual).
    pub fn no_alert(self, on: AlertOn) -> Self {
        self.alert_entry(on, AlertEntry::Off(text("off")))
    }

    fn alert_entry(mut self, on: AlertOn, entry: AlertEntry) -> Self {
        let alerts = &mut self.file.alerts;
        *match on {
            AlertOn::EdgeBlocks => &mut alerts.edge_blocks,
            AlertOn::TenantBlocks => &mut alerts.tenant_blocks,
            AlertOn::UserBans => &mut alerts.user_bans,
            AlertOn::IpBlocks => &mut alerts.ip_blocks,
        } = Some(entry);
        self
    }

    /// Sets the body of every answer that refuses a request, unless the rule has a body of its own. It may have placeholders:
    /// `{code}`, `{message}`, `{traceId}`, `{status}`, `{rule}`, `{limit}`, `{retryAfter}`.
    pub fn answer_body(mut self, body: impl Into<String>) -> Self {
        self.file.answers.body = Some(text(body));
        self
    }

    /// Sets the maximum number of keys in memory. Default: 1,000,000.
    pub fn max_keys(mut self, keys: u64) -> Self {
        self.file.memory.max_keys = some(keys);
        self
    }

    /// Sets how to treat new keys when the table is full and no key may be evicted. Default: [`WhenFull::Fold`].
    pub fn when_full(mut self, when_full: WhenFull) -> Self {
        self.file.memory.when_full = name(when_full);
        self
    }

    /// Sets what an entry of Envoy's descriptors is: `ip`, `tenant`, `user`, `tier`, `path`, `method`, `host`, `endpoint`, `category`,
    /// `fact:NAME` or `ignore`. Default: the fact of that name.
    pub fn envoy_descriptor(mut self, key: impl Into<String>, target: impl Into<String>) -> Self {
        self.file.envoy.descriptors.0.push((text(key), text(target)));
        self
    }

    /// Lets a rule replace others in requests of Envoy: where it applies to one descriptor of a request, they apply to none.
    pub fn envoy_replaces<I: Into<String>>(
        mut self,
        rule: impl Into<String>,
        rules: impl IntoIterator<Item = I>,
    ) -> Self {
        let mut replaced = None;
        extend(&mut replaced, rules);
        self.file.envoy.replaces.0.push((text(rule), replaced.unwrap_or_default()));
        self
    }

    /// Sets what one of Envoy's domains may do.
    pub fn envoy_domain(mut self, name: impl Into<String>, domain: EnvoyDomain) -> Self {
        let EnvoyDomain { verb, negative_hits, overrides } = domain;
        let verb = if verb == Verb::Record { EnvoyVerbName::Record } else { EnvoyVerbName::Check };
        let file = EnvoyDomainFile { verb: some(verb), negative_hits: some(negative_hits), overrides: some(overrides) };
        self.file.envoy.domains.0.push((text(name), file));
        self
    }

    /// Silences a lint warning that concerns no single rule, and says why. [`CODES`](super::CODES) lists them all.
    pub fn allow_finding(mut self, code: &str, reason: &str) -> Self {
        extend(&mut self.file.allow, [format!("{code}: {reason}")]);
        self
    }

    /// Checks the policy and compiles it.
    ///
    /// # Errors
    /// If the policy cannot be used; the error has every finding. Warnings are dropped; [`review`](Self::review) has them.
    pub fn build(self) -> Result<Policy, PolicyError> {
        let mut file = self.file;
        let source = file.print();
        let Review { policy, findings, rule_names, .. } = load::review_file(&file, &source);
        policy.ok_or_else(|| PolicyError::of_builder(findings, &source, &rule_names))
    }

    /// Checks the policy and returns everything that is wrong or doubtful about it. Spans point into the text of
    /// [`to_toml`](Self::to_toml).
    #[must_use]
    pub fn review(&self) -> Review {
        let mut file = self.file.clone();
        let source = file.print();
        load::review_file(&file, &source)
    }

    /// Prints the policy as TOML that [`Policy::parse`] reads as the same policy.
    ///
    /// The text has the key of [`JwtBuilder::key`] in it, if there is one.
    #[must_use]
    pub fn to_toml(&self) -> String {
        self.file.clone().print()
    }
}

#[cfg(feature = "toml")]
impl PolicyBuilder {
    /// Reads a policy file to add to it, with variables filled in as by [`Policy::parse`].
    ///
    /// ```
    /// use threshold_core::policy::{Per, PolicyBuilder, Rule};
    ///
    /// let base = "[[rule]]\nname = 'address'\nper = ['ip']\nlimit = '100/min'";
    /// let policy = PolicyBuilder::parse(base, &|_| None)?
    ///     .rule(Rule::builder("posts").per([Per::User]).method("POST").limit("10/h"))
    ///     .build()?;
    /// # assert_eq!(policy.rules().len(), 2);
    /// # Ok::<(), threshold_core::PolicyError>(())
    /// ```
    ///
    /// # Errors
    /// If the text is not TOML, has unknown keys, or has variables that are not set. Everything else is checked by
    /// [`build`](Self::build).
    pub fn parse(source: &str, variable: &dyn Fn(&str) -> Option<String>) -> Result<Self, PolicyError> {
        load::read_file(source, variable).map(|file| Self { file })
    }
}

fn text(text: impl Into<String>) -> Text {
    let text: String = text.into();
    text.into()
}

fn period(period: impl Into<PeriodText>) -> Text {
    let PeriodText(text) = period.into();
    text.into()
}

/// A value of a key that was not set before.
fn some<T>(value: T) -> Option<Located<T>> {
    Some(value.into())
}

/// A value by the name that a policy has for it.
fn name<N: From<M>, M>(meaning: M) -> Option<Located<N>> {
    some(N::from(meaning))
}

fn extend<T: Into<String>>(texts: &mut Option<Texts>, items: impl IntoIterator<Item = T>) {
    texts.get_or_insert_default().items.extend(items.into_iter().map(text));
}
