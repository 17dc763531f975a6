//! The policy file as written: the types that TOML is read into, that `PolicyBuilder` fills, and that the editors' schema is
//! generated from.

mod print;
#[cfg(feature = "toml")]
mod read;
#[cfg(feature = "schema")]
mod schema;

use std::fmt;
use std::ops::Range;

use crate::limit::Algorithm;

#[cfg(feature = "schema")]
pub(crate) use schema::policy_schema;

/// A value and the bytes of the file it stands in.
#[derive(Debug, Clone, Default)]
pub(crate) struct Located<T> {
    pub(crate) value: T,
    pub(crate) span: Range<usize>,
}

/// A value that stands in no file yet: [`PolicyFile::print`] gives it a span.
impl<T> From<T> for Located<T> {
    fn from(value: T) -> Self {
        Self { value, span: 0..0 }
    }
}

/// A string with its span.
pub(crate) type Text = Located<String>;

/// One string or a list of strings.
#[derive(Debug, Clone, Default)]
pub(crate) struct Texts {
    pub(crate) items: Vec<Text>,
    pub(crate) span: Range<usize>,
}

/// A table whose keys the policy's author chooses, in the order of the file.
#[derive(Debug, Clone)]
pub(crate) struct NamedEntries<V>(pub(crate) Vec<(Text, V)>);

impl<V> Default for NamedEntries<V> {
    fn default() -> Self {
        Self(Vec::new())
    }
}

/// The overrides of one tenant.
#[derive(Debug, Clone, Default)]
pub(crate) struct TenantFile {
    /// `tier`, and limits by category.
    pub(crate) overrides: NamedEntries<Text>,
    /// The number of partitions that the records of the tenant's users are spread over.
    pub(crate) spread: Option<Located<u32>>,
}

/// Rate limits for a service: whom they count, how much they allow, and how violations are answered.
#[derive(Debug, Clone, Default)]
#[cfg_attr(feature = "toml", derive(serde::Deserialize), serde(deny_unknown_fields, default))]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema), schemars(title = "Threshold policy"))]
pub(crate) struct PolicyFile {
    /// Lint warnings to silence that concern no single rule: `"CODE: reason"`.
    pub(crate) allow: Option<Texts>,
    /// How the caller of a request is identified.
    pub(crate) identity: IdentityFile,
    /// Limits by tier and category: `[tiers.free] requests = "100/min"`.
    pub(crate) tiers: NamedEntries<NamedEntries<Text>>,
    /// Overrides for single tenants: `tier`, limits by category, and `spread`.
    pub(crate) tenants: NamedEntries<TenantFile>,
    /// Overrides for single users: `tier`, and limits by category.
    pub(crate) users: NamedEntries<NamedEntries<Text>>,
    /// Categories of requests. A request belongs to the first one that matches it, else to "requests".
    pub(crate) category: Vec<CategoryFile>,
    /// The rules. Every rule that matches a request applies to it.
    pub(crate) rule: Vec<Located<RuleFile>>,
    /// Escalating penalties for repeated violations; `graduated`, `strict` and `gentle` are built in.
    pub(crate) ladders: NamedEntries<LadderFile>,
    /// Login protection: attempt budgets and account lockouts.
    pub(crate) login: Option<Located<LoginFile>>,
    /// When to raise alerts.
    pub(crate) alerts: AlertsFile,
    /// Callers who are never limited, and callers who are always denied.
    pub(crate) lists: ListsFile,
    /// How requests are refused, whatever refuses them.
    pub(crate) answers: AnswersFile,
    /// How much state the memory store keeps.
    pub(crate) memory: MemoryFile,
    /// How Envoy's rate limit descriptors are understood.
    pub(crate) envoy: EnvoyFile,
}

/// How the caller of a request is identified.
#[derive(Debug, Clone, Default)]
#[cfg_attr(feature = "toml", derive(serde::Deserialize), serde(deny_unknown_fields, default))]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub(crate) struct IdentityFile {
    /// CIDR blocks of the peers whose forwarding and identity headers are believed. Those of other peers are ignored.
    pub(crate) trusted_proxies: Option<Texts>,
    /// Where the client's address is taken from: `peer`, `x-forwarded-for`, `forwarded` or the name of a single-value header. A
    /// list is tried in order.
    pub(crate) client_ip: Option<Texts>,
    /// IPv6 addresses that share this many leading bits share a budget. Default: 64.
    pub(crate) ipv6_prefix: Option<Located<u8>>,
    /// Where the tenant's name is taken from: `header:NAME`, `cookie:NAME`, `host:{tenant}.example.com`, `path:/t/{tenant}/**` or
    /// `claim:NAME`.
    pub(crate) tenant: Option<Text>,
    /// Where the user's name is taken from, written like `tenant`.
    pub(crate) user: Option<Text>,
    /// Whether user names are unique across all tenants or within each tenant. Default: `global`.
    pub(crate) user_scope: Option<Located<UserScopeName>>,
    /// Where the tier's name is taken from, written like `tenant`.
    pub(crate) tier: Option<Text>,
    /// The tier of requests that have no other.
    pub(crate) default_tier: Option<Text>,
    /// Which of `tenant` and `user` are secrets: every output shows them as `#` and 16 hexadecimal digits.
    pub(crate) secret: Option<Texts>,
    /// Whether log lines show users and addresses unredacted. Default: false.
    pub(crate) log_identifiers: bool,
    /// How the bearer tokens behind `claim:` sources are verified.
    pub(crate) jwt: Option<JwtFile>,
    /// How client-facing doors treat paths with dot segments, backslashes or control characters: answer 400, or match every
    /// reading of the path. Default: `refuse`.
    pub(crate) odd_paths: Option<Located<OddPathsName>>,
    /// Patterns of paths whose wildcards match secrets: `/reset/*`, `/invite/{token}/**`. What they match is never recorded or shown.
    pub(crate) private_paths: Option<Texts>,
}

/// How the bearer tokens behind `claim:` sources are verified. No key is ever downloaded.
#[derive(Clone, Default)]
#[cfg_attr(feature = "toml", derive(serde::Deserialize), serde(deny_unknown_fields))]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub(crate) struct JwtFile {
    /// The only accepted algorithm: HS256, HS384, HS512, RS256, RS384, RS512, ES256, ES384 or EdDSA.
    pub(crate) alg: Text,
    /// The key itself. Take it from the environment: `"${JWT_KEY}"`.
    pub(crate) key: Option<Text>,
    /// The path of the file that holds the key.
    pub(crate) key_file: Option<Text>,
    /// The issuer that tokens must name.
    pub(crate) iss: Option<Text>,
    /// The audience that tokens must name.
    pub(crate) aud: Option<Text>,
}

/// Leaves the key out.
impl fmt::Debug for JwtFile {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("JwtFile").field("alg", &self.alg.value).finish_non_exhaustive()
    }
}

/// A category of requests, for limits by tier.
#[derive(Debug, Clone, Default)]
#[cfg_attr(feature = "toml", derive(serde::Deserialize), serde(deny_unknown_fields))]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub(crate) struct CategoryFile {
    /// The name under which tiers set a limit for it.
    pub(crate) name: Text,
    /// Methods, any of which matches.
    pub(crate) method: Option<Texts>,
    /// Path patterns, any of which matches: `*` is one segment, `**` anything.
    pub(crate) path: Option<Texts>,
    /// Host patterns, any of which matches.
    pub(crate) host: Option<Texts>,
}

/// One rule: which requests it counts, by whom, up to how many, and how it answers beyond that.
#[derive(Debug, Clone, Default)]
#[cfg_attr(feature = "toml", derive(serde::Deserialize), serde(deny_unknown_fields))]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub(crate) struct RuleFile {
    /// The rule's name. Together with `per` and `algorithm` it identifies the stored balances, so changing one of them resets
    /// them.
    pub(crate) name: Text,
    /// The layer in which the rule is evaluated. Default: the layer of the narrowest part of `per`.
    pub(crate) layer: Option<Located<LayerName>>,
    /// Which requests the rule applies to. Default: all.
    #[cfg_attr(feature = "toml", serde(rename = "match", default))]
    pub(crate) matches: MatchFile,
    /// What requests are counted by: `ip`, `ip/48`, `tenant`, `user`, `tier`, `category`, `endpoint`, `method`, `host`,
    /// `header:NAME`, `fact:NAME`; `[]` is one budget shared by all requests.
    pub(crate) per: Option<Texts>,
    /// `"100/min"`, `"50MB/day"`, `"100/min burst 20"`, `"unlimited"`, `"tier"`, or `"tier:NAME"`.
    pub(crate) limit: Option<Text>,
    /// The algorithm. Default: `token-bucket` up to a minute, else `sliding-window`.
    pub(crate) algorithm: Option<Located<AlgorithmName>>,
    /// Where fixed windows begin: at multiples of the period on the clock, or at a key's first request. Default: `clock`.
    pub(crate) anchor: Option<Located<AnchorName>>,
    /// The number of sub-windows of a sliding window. Default: 60.
    pub(crate) buckets: Option<Located<u32>>,
    /// The capacity of a token bucket. Default: the limit's amount.
    pub(crate) burst: Option<Located<u64>>,
    /// How long a request in flight counts at most, for `concurrency`. Default: "60s".
    pub(crate) ttl: Option<Text>,
    /// The named cost to charge instead of one per request.
    pub(crate) cost: Option<Text>,
    /// Counts only responses with these statuses: `"status:401,403"`, `"status:5xx"`.
    pub(crate) count: Option<Text>,
    /// How long a key stays denied once it has exceeded the limit.
    pub(crate) block_for: Option<Text>,
    /// Denies every matching request; such a rule has no `limit`.
    pub(crate) deny: Option<Located<bool>>,
    /// Applies the rule only to requests that no other rule of its layer matches.
    pub(crate) fallback: Option<Located<bool>>,
    /// How to treat a request that lacks a part of `per`: count it by address, skip the rule, or deny it. Default: `floor`.
    pub(crate) on_missing: Option<Located<OnMissingName>>,
    /// The ladder of penalties for subjects that exceed this limit.
    pub(crate) ladder: Option<Text>,
    /// Which violations count as strikes. Default: `window`.
    pub(crate) strike: Option<Located<StrikeName>>,
    /// Accepts that the ladder may ban an address or a tenant that several people share.
    pub(crate) ban_shared: Option<Located<bool>>,
    /// Whether to enforce the rule, or only to observe what it would do. Default: `enforce`.
    pub(crate) mode: Option<Located<ModeName>>,
    /// How exact a distributed store must be. Default: `strong`.
    pub(crate) consistency: Option<Located<ConsistencyName>>,
    /// Accepts that a store without atomic updates only approximates this limit. Needed for an eventual limit that is no
    /// `fixed-window`, or over less than a minute.
    pub(crate) approximate: Option<Located<bool>>,
    /// The Durable Object that the rule's records are stored in on Cloudflare, as `BINDING/NAME`; the key in a KV namespace if the
    /// rule is eventual. The name may have `{tenant}`, `{user}`, `{ip}`, `{hash}` and, in a key, `{window}`. Other stores place
    /// records by themselves.
    pub(crate) place: Option<Text>,
    /// Over how many shards each limit above 500 a second is split, so that several objects or partitions count it. Each shard has an
    /// equal share, rounded down. Default: 1.
    pub(crate) shards: Option<Located<u32>>,
    /// How to decide when the store fails. Default: `local`.
    pub(crate) on_store_error: Option<Located<OnStoreErrorName>>,
    /// How much the answer to a denied client reveals. Default: `full`.
    pub(crate) disclosure: Option<Located<DisclosureName>>,
    /// The HTTP status of a denial. Default: 429.
    pub(crate) status: Option<Located<u16>>,
    /// A sentence for the body of a denial.
    pub(crate) message: Option<Text>,
    /// The whole body of a denial, instead of the usual one. It may have placeholders: `{message}`, `{traceId}`, `{retryAfter}`,
    /// `{limit}`, `{code}`, `{status}`, `{rule}`.
    pub(crate) body: Option<Text>,
    /// The limit in prose for the body of a denial: "10 posts per hour".
    pub(crate) period: Option<Text>,
    /// Whether every denial is logged, or a sample. Default: `sampled`.
    pub(crate) log: Option<Located<LogName>>,
    /// Lint warnings about this rule to silence: `"CODE: reason"`.
    pub(crate) allow: Option<Texts>,
}

/// Which requests a rule applies to. Every key must match, each with any of its values.
#[derive(Debug, Clone, Default)]
#[cfg_attr(feature = "toml", derive(serde::Deserialize), serde(deny_unknown_fields, default))]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub(crate) struct MatchFile {
    /// Methods. `GET` also matches `HEAD`.
    pub(crate) method: Option<Texts>,
    /// Path patterns: `*` is one segment, `**` anything, `{x}` a captured segment.
    pub(crate) path: Option<Texts>,
    /// Host patterns.
    pub(crate) host: Option<Texts>,
    /// Categories.
    pub(crate) category: Option<Texts>,
    /// Patterns of tenants' names.
    pub(crate) tenant: Option<Texts>,
    /// Patterns of tiers' names.
    pub(crate) tier: Option<Texts>,
    /// Custom facts that the application supplies: `fact.inbox = "7"`.
    pub(crate) fact: NamedEntries<Texts>,
}

/// Escalating penalties for repeated violations.
#[derive(Debug, Clone, Default)]
#[cfg_attr(feature = "toml", derive(serde::Deserialize), serde(deny_unknown_fields))]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub(crate) struct LadderFile {
    /// How long after the last strike all strikes are forgotten. Default: "24h".
    pub(crate) decay: Option<Text>,
    /// One rung per strike; the last one repeats: `warn`, `deny`, `shadow`, `cooldown 1min`, `ban 24h`, joined by `+`.
    pub(crate) rungs: Option<Texts>,
    /// The name of a cookie that is set with each warning.
    pub(crate) warning_cookie: Option<Text>,
}

/// Login protection: attempt budgets and account lockouts.
#[derive(Debug, Clone, Default)]
#[cfg_attr(feature = "toml", derive(serde::Deserialize), serde(deny_unknown_fields))]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub(crate) struct LoginFile {
    /// Attempts allowed on one account. Default: "5/15min".
    pub(crate) account: Option<Text>,
    /// Attempts allowed from one address. Default: "20/5min".
    pub(crate) ip: Option<Text>,
    /// How long so many consecutive failures lock the account. Default: `{ 3 = "1min", 5 = "5min", 10 = "1h" }`.
    pub(crate) locks: Option<NamedEntries<Text>>,
    /// The number of consecutive failures after which unknown devices are refused until a reset. Default: 100.
    pub(crate) ceiling: Option<Located<u32>>,
    /// How to decide when the store fails. Default: `closed`.
    pub(crate) on_store_error: Option<Located<OnStoreErrorName>>,
    /// On Cloudflare: the Durable Objects with the records of accounts, as `BINDING/NAME`. A name may have `{account}` and `{hash}`.
    pub(crate) account_place: Option<Text>,
    /// On Cloudflare: the Durable Objects with the budgets of addresses, as `BINDING/NAME`. A name may have `{ip}` and `{hash}`.
    pub(crate) ip_place: Option<Text>,
}

/// When to raise alerts.
#[derive(Debug, Clone, Default)]
#[cfg_attr(feature = "toml", derive(serde::Deserialize), serde(deny_unknown_fields, default))]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub(crate) struct AlertsFile {
    /// Denials of the edge layer.
    pub(crate) edge_blocks: Option<AlertEntry>,
    /// Denials of the tenant layer.
    pub(crate) tenant_blocks: Option<AlertEntry>,
    /// Bans of users.
    pub(crate) user_bans: Option<AlertEntry>,
    /// Denials of any one address.
    pub(crate) ip_blocks: Option<AlertEntry>,
}

/// The thresholds of an alert, or "off".
#[derive(Debug, Clone)]
pub(crate) enum AlertEntry {
    Off(Text),
    Thresholds(AlertFile),
}

/// Two thresholds for a count over a period.
#[derive(Debug, Clone)]
#[cfg_attr(feature = "toml", derive(serde::Deserialize), serde(deny_unknown_fields))]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub(crate) struct AlertFile {
    /// The period: "min", "h".
    pub(crate) per: Text,
    /// The count that raises a warning.
    pub(crate) warning: Located<u64>,
    /// The count that raises a critical alert.
    pub(crate) critical: Located<u64>,
}

/// Callers who are never limited or always denied: CIDR blocks, `user:ID`, `tenant:ID`. The narrower entry wins, deny on a tie.
#[derive(Debug, Clone, Default)]
#[cfg_attr(feature = "toml", derive(serde::Deserialize), serde(deny_unknown_fields, default))]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub(crate) struct ListsFile {
    /// Never limited and never counted.
    pub(crate) allow: Option<Texts>,
    /// Always denied.
    pub(crate) deny: Option<Texts>,
}

/// How requests are refused, whatever refuses them.
#[derive(Debug, Clone, Default)]
#[cfg_attr(feature = "toml", derive(serde::Deserialize), serde(deny_unknown_fields, default))]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub(crate) struct AnswersFile {
    /// The body of every answer that refuses a request, unless the rule has a `body`. Placeholders: `{code}`, `{message}`,
    /// `{traceId}`, `{status}`, `{rule}`, `{limit}`, `{retryAfter}`.
    pub(crate) body: Option<Text>,
}

/// How much state the memory store keeps.
#[derive(Debug, Clone, Default)]
#[cfg_attr(feature = "toml", derive(serde::Deserialize), serde(deny_unknown_fields, default))]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub(crate) struct MemoryFile {
    /// The maximum number of keys. Default: 1,000,000.
    pub(crate) max_keys: Option<Located<u64>>,
    /// How to treat new keys when the table is full and no key may be evicted: fold them into their address prefix, let them
    /// share one budget, or deny them. Default: `fold`.
    pub(crate) when_full: Option<Located<WhenFullName>>,
}

/// How Envoy's rate limit descriptors are understood.
#[derive(Debug, Clone, Default)]
#[cfg_attr(feature = "toml", derive(serde::Deserialize), serde(deny_unknown_fields, default))]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub(crate) struct EnvoyFile {
    /// What the entries of descriptors are, by key: `ip`, `tenant`, `user`, `tier`, `path`, `method`, `host`, `endpoint`,
    /// `category`, `fact:NAME` or `ignore`. Default: the fact of that name; `remote_address` and `masked_remote_address` are the `ip`.
    pub(crate) descriptors: NamedEntries<Text>,
    /// The settings of single domains.
    pub(crate) domains: NamedEntries<EnvoyDomainFile>,
    /// The rules that do not apply to any descriptor of a request, by the rule that applies to one of them.
    pub(crate) replaces: NamedEntries<Texts>,
}

/// The settings of one of Envoy's domains.
#[derive(Debug, Clone, Default)]
#[cfg_attr(feature = "toml", derive(serde::Deserialize), serde(deny_unknown_fields, default))]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub(crate) struct EnvoyDomainFile {
    /// Whether requests are decided (`check`), or only charged (`record`), as for hits that Envoy sends when a stream is done.
    /// Default: `check`.
    pub(crate) verb: Option<Located<EnvoyVerbName>>,
    /// Whether negative hits give back what was charged. Default: false.
    pub(crate) negative_hits: Option<Located<bool>>,
    /// Whether the limit in a descriptor replaces that of the rules that it meets. Default: false.
    #[cfg_attr(feature = "toml", serde(rename = "override"))]
    pub(crate) overrides: Option<Located<bool>>,
}

/// What is done with the requests of one of Envoy's domains.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[cfg_attr(feature = "toml", derive(serde::Deserialize))]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub(crate) enum EnvoyVerbName {
    #[cfg_attr(feature = "toml", serde(rename = "check"))]
    Check,
    #[cfg_attr(feature = "toml", serde(rename = "record"))]
    Record,
}

impl EnvoyVerbName {
    /// Returns the name as a policy writes it.
    const fn text(self) -> &'static str {
        match self {
            Self::Check => "check",
            Self::Record => "record",
        }
    }
}

/// Declares the values of a key, each with its name in a policy, and what they mean.
macro_rules! names {
    ($(#[$doc:meta])* $name:ident for $meaning:path { $($variant:ident = $text:literal),+ $(,)? }) => {
        $(#[$doc])*
        #[derive(Debug, Clone, Copy, PartialEq, Eq)]
        #[cfg_attr(feature = "toml", derive(serde::Deserialize))]
        #[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
        pub(crate) enum $name { $(#[cfg_attr(feature = "toml", serde(rename = $text))] $variant),+ }

        impl $name {
            /// Returns the name as a policy writes it.
            const fn text(self) -> &'static str {
                match self { $(Self::$variant => $text),+ }
            }
        }

        impl From<$name> for $meaning {
            fn from(name: $name) -> Self {
                match name { $($name::$variant => Self::$variant),+ }
            }
        }

        impl From<$meaning> for $name {
            fn from(meaning: $meaning) -> Self {
                match meaning { $(<$meaning>::$variant => Self::$variant),+ }
            }
        }
    };
}

names!(
    /// The layers, in the order in which limits are evaluated.
    LayerName for super::Layer {
        Global = "global", Edge = "edge", Tenant = "tenant", User = "user", Endpoint = "endpoint",
    }
);
/// An algorithm. Its names in a policy are those of the list of algorithms.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct AlgorithmName(pub(crate) Algorithm);

impl From<Algorithm> for AlgorithmName {
    fn from(algorithm: Algorithm) -> Self {
        Self(algorithm)
    }
}

names!(
    /// Where fixed windows begin.
    AnchorName for crate::limit::Anchor { Clock = "clock", First = "first" }
);
names!(
    /// How to treat a request that lacks a part of `per`.
    OnMissingName for super::OnMissing { Floor = "floor", Skip = "skip", Deny = "deny" }
);
names!(
    /// Which violations count as strikes.
    StrikeName for crate::ladder::StrikeMode { Window = "window", Request = "request", Ignored = "ignored" }
);
names!(
    /// Whether a rule is enforced.
    ModeName for super::Mode { Enforce = "enforce", Observe = "observe" }
);
names!(
    /// How exact a distributed store must be.
    ConsistencyName for super::Consistency { Strong = "strong", Eventual = "eventual" }
);
names!(
    /// How to decide when the store fails.
    OnStoreErrorName for super::OnStoreError { Local = "local", Open = "open", Closed = "closed" }
);
names!(
    /// How much the answer to a denied client reveals.
    DisclosureName for super::Disclosure { Full = "full", Minimal = "minimal", None = "none" }
);
names!(
    /// How denials are logged.
    LogName for super::LogMode { Sampled = "sampled", Each = "each" }
);
names!(
    /// Where user names are unique.
    UserScopeName for super::UserScope { Global = "global", Tenant = "tenant" }
);
names!(
    /// How to treat paths that servers read differently.
    OddPathsName for crate::path::OddPaths { Refuse = "refuse", Match = "match" }
);
names!(
    /// How to treat new keys when the table is full and no key may be evicted.
    WhenFullName for super::WhenFull { Fold = "fold", Shared = "shared", Deny = "deny" }
);
