//! One rule built in code.

use super::{LimitText, PeriodText, extend, name, period, some, text};
use crate::ladder::StrikeMode;
use crate::limit::{Algorithm, Anchor};
use crate::policy::file::{RuleFile, Texts};
use crate::policy::{Consistency, Disclosure, Layer, LogMode, Mode, OnMissing, OnStoreError, Per, Rule};

/// A rule in the making, for [`PolicyBuilder::rule`](super::PolicyBuilder::rule).
///
/// It needs [`per`](Self::per) and either [`limit`](Self::limit) or [`deny`](Self::deny). The methods that restrict which
/// requests it applies to can be called several times: `method("PUT").method("PATCH")` matches either.
#[derive(Debug, Clone)]
#[must_use = "a rule does nothing until it is added to a policy"]
pub struct RuleBuilder {
    pub(super) file: RuleFile,
}

impl Rule {
    /// Begins a rule with this name.
    pub fn builder(name: impl Into<String>) -> RuleBuilder {
        RuleBuilder { file: RuleFile { name: text(name), ..RuleFile::default() } }
    }
}

impl RuleBuilder {
    /// Sets what requests are counted by. `[]` is one budget shared by all requests.
    pub fn per(mut self, parts: impl IntoIterator<Item = Per>) -> Self {
        let items = parts.into_iter().map(|part| text(part.to_string())).collect();
        self.file.per = Some(Texts { items, span: 0..0 });
        self
    }

    /// Sets the limit: `"100/min burst 20"`, `"50MB/day"`, `"unlimited"`, or a [`Limit`](crate::Limit), which also sets the
    /// algorithm.
    pub fn limit(mut self, limit: impl Into<LimitText>) -> Self {
        limit.into().set(&mut self.file);
        self
    }

    /// Takes the limit from the caller's tier, or from the overrides of its tenant or user.
    pub fn limit_by_tier(self) -> Self {
        self.limit("tier")
    }

    /// Denies every matching request. Such a rule has no limit.
    pub fn deny(mut self) -> Self {
        self.file.deny = some(true);
        self
    }

    /// Sets the algorithm. Default: a token bucket up to a minute, else a sliding window.
    pub fn algorithm(mut self, algorithm: Algorithm) -> Self {
        self.file.algorithm = name(algorithm);
        self
    }

    /// Sets where fixed windows begin. Default: [`Anchor::Clock`].
    pub fn anchor(mut self, anchor: Anchor) -> Self {
        self.file.anchor = name(anchor);
        self
    }

    /// Sets the number of sub-windows of a sliding window. Default: 60.
    pub fn buckets(mut self, buckets: u32) -> Self {
        self.file.buckets = some(buckets);
        self
    }

    /// Sets the capacity of a token bucket. Default: the limit's amount.
    pub fn burst(mut self, burst: u64) -> Self {
        self.file.burst = some(burst);
        self
    }

    /// Sets how long a request in flight counts at most, for [`Algorithm::Concurrency`]. Default: 60 seconds.
    pub fn ttl(mut self, ttl: impl Into<PeriodText>) -> Self {
        self.file.ttl = Some(period(ttl));
        self
    }

    /// Charges this named cost instead of one per request.
    pub fn cost(mut self, cost: impl Into<String>) -> Self {
        self.file.cost = Some(text(cost));
        self
    }

    /// Counts only responses with these statuses: `"status:401,403"`, `"status:5xx"`.
    pub fn count(mut self, outcomes: impl Into<String>) -> Self {
        self.file.count = Some(text(outcomes));
        self
    }

    /// Keeps a key denied for this long once it has exceeded the limit.
    pub fn block_for(mut self, length: impl Into<PeriodText>) -> Self {
        self.file.block_for = Some(period(length));
        self
    }

    /// Sets the layer. Default: the layer of the narrowest part of `per`.
    pub fn layer(mut self, layer: Layer) -> Self {
        self.file.layer = name(layer);
        self
    }

    /// Applies the rule only to requests that no other rule of its layer matches.
    pub fn fallback(mut self) -> Self {
        self.file.fallback = some(true);
        self
    }

    /// Sets how to treat a request that lacks a part of `per`. Default: [`OnMissing::Floor`].
    pub fn on_missing(mut self, on_missing: OnMissing) -> Self {
        self.file.on_missing = name(on_missing);
        self
    }

    /// Sets the ladder of penalties for subjects that exceed the limit.
    pub fn ladder(mut self, ladder: impl Into<String>) -> Self {
        self.file.ladder = Some(text(ladder));
        self
    }

    /// Sets which violations count as strikes. Default: [`StrikeMode::Window`].
    pub fn strike(mut self, strike: StrikeMode) -> Self {
        self.file.strike = name(strike);
        self
    }

    /// Accepts that the ladder may ban an address or a tenant that several people share.
    pub fn ban_shared(mut self) -> Self {
        self.file.ban_shared = some(true);
        self
    }

    /// Sets whether the rule is enforced. Default: [`Mode::Enforce`].
    pub fn mode(mut self, mode: Mode) -> Self {
        self.file.mode = name(mode);
        self
    }

    /// Sets how exact a distributed store must be. Default: [`Consistency::Strong`].
    pub fn consistency(mut self, consistency: Consistency) -> Self {
        self.file.consistency = name(consistency);
        self
    }

    /// Accepts that a store without atomic updates only approximates the limit.
    pub fn approximate(mut self) -> Self {
        self.file.approximate = some(true);
        self
    }

    /// Sets where the rule's records are stored on Cloudflare, as `BINDING/NAME`; see [`RecordPlace`](crate::policy::RecordPlace).
    pub fn place(mut self, place: impl Into<String>) -> Self {
        self.file.place = Some(text(place));
        self
    }

    /// Splits each limit above 500 a second over this many shards, 2 to 64. A request is counted by one of them, which has an equal
    /// share of the limit, rounded down.
    pub fn shards(mut self, shards: u32) -> Self {
        self.file.shards = some(shards);
        self
    }

    /// Sets how to decide when the store fails. Default: [`OnStoreError::Local`].
    pub fn on_store_error(mut self, on_store_error: OnStoreError) -> Self {
        self.file.on_store_error = name(on_store_error);
        self
    }

    /// Sets how much the answer to a denied client reveals. Default: [`Disclosure::Full`].
    pub fn disclosure(mut self, disclosure: Disclosure) -> Self {
        self.file.disclosure = name(disclosure);
        self
    }

    /// Sets the HTTP status of a denial. Default: 429.
    pub fn status(mut self, status: u16) -> Self {
        self.file.status = some(status);
        self
    }

    /// Sets a sentence for the body of a denial.
    pub fn message(mut self, message: impl Into<String>) -> Self {
        self.file.message = Some(text(message));
        self
    }

    /// Sets the whole body of a denial. It may have placeholders: `{message}`, `{traceId}`, `{retryAfter}`, `{limit}`, `{code}`,
    /// `{status}`, `{rule}`.
    pub fn body(mut self, body: impl Into<String>) -> Self {
        self.file.body = Some(text(body));
        self
    }

    /// Sets the limit in prose, for the body of a denial: `"10 posts per hour"`.
    pub fn period(mut self, prose: impl Into<String>) -> Self {
        self.file.period = Some(text(prose));
        self
    }

    /// Sets how denials are logged. Default: [`LogMode::Sampled`].
    pub fn log(mut self, log: LogMode) -> Self {
        self.file.log = name(log);
        self
    }

    /// Silences a lint warning about this rule, and says why. [`CODES`](crate::policy::CODES) lists them all.
    pub fn allow_finding(mut self, code: &str, reason: &str) -> Self {
        extend(&mut self.file.allow, [format!("{code}: {reason}")]);
        self
    }
}

/// Which requests the rule applies to: every kind of pattern must match, each with any of its values.
impl RuleBuilder {
    /// Matches this method. `GET` also matches `HEAD`.
    pub fn method(mut self, method: impl Into<String>) -> Self {
        extend(&mut self.file.matches.method, [method]);
        self
    }

    /// Matches this path pattern: `*` is one segment, `**` anything, `{x}` a captured segment.
    pub fn path(mut self, pattern: impl Into<String>) -> Self {
        extend(&mut self.file.matches.path, [pattern]);
        self
    }

    /// Matches this host pattern.
    pub fn host(mut self, pattern: impl Into<String>) -> Self {
        extend(&mut self.file.matches.host, [pattern]);
        self
    }

    /// Matches requests of this category.
    pub fn category(mut self, category: impl Into<String>) -> Self {
        extend(&mut self.file.matches.category, [category]);
        self
    }

    /// Matches tenants with this pattern.
    pub fn tenant(mut self, pattern: impl Into<String>) -> Self {
        extend(&mut self.file.matches.tenant, [pattern]);
        self
    }

    /// Matches tiers with this pattern.
    pub fn tier(mut self, pattern: impl Into<String>) -> Self {
        extend(&mut self.file.matches.tier, [pattern]);
        self
    }

    /// Matches this pattern of one of the application's own facts.
    pub fn fact(mut self, fact: &str, pattern: impl Into<String>) -> Self {
        let facts = &mut self.file.matches.fact.0;
        let pattern = text(pattern);
        match facts.iter_mut().find(|(name, _)| name.value == fact) {
            Some((_, patterns)) => patterns.items.push(pattern),
            None => facts.push((text(fact), Texts { items: vec![pattern], span: 0..0 })),
        }
        self
    }
}
