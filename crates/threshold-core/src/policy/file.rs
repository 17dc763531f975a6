//! The policy file as written: the types that TOML is read into, and that the editors' schema is made from.

use std::fmt;
use std::marker::PhantomData;
use std::ops::Range;

#[cfg(feature = "schema")]
use schemars::JsonSchema;
use serde::de::{Deserialize, Deserializer, MapAccess, SeqAccess, Visitor};
use toml::Spanned;

use crate::limit::Algorithm;

/// A value and where it stands in the file.
#[derive(Debug, Clone)]
pub(crate) struct Located<T> {
    pub(crate) value: T,
    pub(crate) span: Range<usize>,
}

impl<'de, T: Deserialize<'de>> Deserialize<'de> for Located<T> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let spanned = Spanned::<T>::deserialize(deserializer)?;
        let span = spanned.span();
        Ok(Self { value: spanned.into_inner(), span })
    }
}

/// Text and where it stands.
pub(crate) type Text = Located<String>;

/// One string or a list of them.
#[derive(Debug, Clone)]
pub(crate) struct Texts {
    pub(crate) items: Vec<Text>,
    pub(crate) span: Range<usize>,
}

enum RawTexts {
    One(String),
    Many(Vec<Text>),
}

impl<'de> Deserialize<'de> for RawTexts {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct OneOrMany;
        impl<'de> Visitor<'de> for OneOrMany {
            type Value = RawTexts;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a string or a list of strings")
            }

            fn visit_str<E>(self, text: &str) -> Result<RawTexts, E> {
                Ok(RawTexts::One(text.to_owned()))
            }

            fn visit_seq<A: SeqAccess<'de>>(self, mut list: A) -> Result<RawTexts, A::Error> {
                let mut items = Vec::new();
                while let Some(item) = list.next_element()? {
                    items.push(item);
                }
                Ok(RawTexts::Many(items))
            }
        }
        deserializer.deserialize_any(OneOrMany)
    }
}

impl<'de> Deserialize<'de> for Texts {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let Located { value, span } = Located::<RawTexts>::deserialize(deserializer)?;
        let items = match value {
            RawTexts::One(value) => vec![Located { value, span: span.clone() }],
            RawTexts::Many(items) => items,
        };
        Ok(Self { items, span })
    }
}

/// A table whose keys the writer chooses, in the order of the file.
#[derive(Debug, Clone)]
pub(crate) struct NamedEntries<V>(pub(crate) Vec<(Text, V)>);

impl<V> Default for NamedEntries<V> {
    fn default() -> Self {
        Self(Vec::new())
    }
}

impl<'de, V: Deserialize<'de>> Deserialize<'de> for NamedEntries<V> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Entries<V>(PhantomData<V>);
        impl<'de, V: Deserialize<'de>> Visitor<'de> for Entries<V> {
            type Value = NamedEntries<V>;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a table")
            }

            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<NamedEntries<V>, A::Error> {
                let mut entries = Vec::new();
                while let Some(entry) = map.next_entry()? {
                    entries.push(entry);
                }
                Ok(NamedEntries(entries))
            }
        }
        deserializer.deserialize_map(Entries(PhantomData))
    }
}

/// Who may cross, how often, and what happens when they do not keep to it.
#[derive(Debug, Default, serde::Deserialize)]
#[serde(deny_unknown_fields, default)]
#[cfg_attr(feature = "schema", derive(JsonSchema))]
#[cfg_attr(feature = "schema", schemars(title = "Threshold policy"))]
pub(crate) struct PolicyFile {
    /// Findings of no rule that are meant: `"CODE: reason"`.
    pub(crate) allow: Option<Texts>,
    /// How a request's caller is found.
    pub(crate) identity: IdentityFile,
    /// Limits by tier and category: `[tiers.free] requests = "100/min"`.
    pub(crate) tiers: NamedEntries<NamedEntries<Text>>,
    /// What a tenant has of its own: `tier`, and limits by category.
    pub(crate) tenants: NamedEntries<NamedEntries<Text>>,
    /// What a user has of its own: `tier`, and limits by category.
    pub(crate) users: NamedEntries<NamedEntries<Text>>,
    /// Kinds of requests; the first that matches, else "requests".
    pub(crate) category: Vec<CategoryFile>,
    /// The limits. Every rule that matches applies.
    pub(crate) rule: Vec<Located<RuleFile>>,
    /// The graduated responses; `graduated`, `strict` and `gentle` are built in.
    pub(crate) ladders: NamedEntries<LadderFile>,
    /// Protection of a login.
    pub(crate) login: Option<LoginFile>,
    /// When to raise an alert.
    pub(crate) alerts: AlertsFile,
    /// Who is never limited, and who never gets in.
    pub(crate) lists: ListsFile,
    /// How much is kept in memory.
    pub(crate) memory: MemoryFile,
}

/// How a request's caller is found.
#[derive(Debug, Default, serde::Deserialize)]
#[serde(deny_unknown_fields, default)]
#[cfg_attr(feature = "schema", derive(JsonSchema))]
pub(crate) struct IdentityFile {
    /// CIDRs of the only peers whose forwarding and identity headers are believed.
    pub(crate) trusted_proxies: Option<Texts>,
    /// `peer`, `x-forwarded-for`, `forwarded` or the name of a single-value header; a list is tried in order.
    pub(crate) client_ip: Option<Texts>,
    /// IPv6 addresses that share this many leading bits share a budget (64).
    pub(crate) ipv6_prefix: Option<Located<u8>>,
    /// `header:NAME`, `cookie:NAME`, `host:{tenant}.example.com`, `path:/t/{tenant}/**` or `claim:NAME`.
    pub(crate) tenant: Option<Text>,
    /// As for `tenant`.
    pub(crate) user: Option<Text>,
    /// Whether a user's name means one user, or one user of each tenant (global).
    pub(crate) user_scope: Option<Located<UserScopeName>>,
    /// As for `tenant`.
    pub(crate) tier: Option<Text>,
    /// The tier of a request that has no other.
    pub(crate) default_tier: Option<Text>,
    /// Which of `tenant` and `user` are secrets, shown as `#` and 16 hexadecimal digits everywhere.
    pub(crate) secret: Option<Texts>,
    /// Whether log lines may hold users and addresses as they are (false).
    pub(crate) log_identifiers: bool,
    /// How `claim:` tokens are verified.
    pub(crate) jwt: Option<JwtFile>,
    /// What doors that face clients do with dot segments, backslashes and control characters in a path: answer 400, or
    /// match every reading (refuse).
    pub(crate) odd_paths: Option<Located<OddPathsName>>,
}

/// How `claim:` tokens are verified. Nothing is fetched.
#[derive(Debug, serde::Deserialize)]
#[serde(deny_unknown_fields)]
#[cfg_attr(feature = "schema", derive(JsonSchema))]
pub(crate) struct JwtFile {
    /// The one algorithm that is accepted: HS256, HS384, HS512, RS256, RS384, RS512, ES256, ES384 or EdDSA.
    pub(crate) alg: Text,
    /// The key itself; from the environment, as `"${JWT_KEY}"`.
    pub(crate) key: Option<Text>,
    /// The file that holds the key.
    pub(crate) key_file: Option<Text>,
    /// The issuer a token must name.
    pub(crate) iss: Option<Text>,
    /// The audience a token must name.
    pub(crate) aud: Option<Text>,
}

/// A kind of request.
#[derive(Debug, serde::Deserialize)]
#[serde(deny_unknown_fields)]
#[cfg_attr(feature = "schema", derive(JsonSchema))]
pub(crate) struct CategoryFile {
    /// The name that tiers give limits to.
    pub(crate) name: Text,
    /// Methods, any of them.
    pub(crate) method: Option<Texts>,
    /// Paths, any of them: `*` one segment, `**` anything.
    pub(crate) path: Option<Texts>,
    /// Hosts, any of them.
    pub(crate) host: Option<Texts>,
}

/// One limit: who it is counted by, how much, and what happens beyond it.
#[derive(Debug, serde::Deserialize)]
#[serde(deny_unknown_fields)]
#[cfg_attr(feature = "schema", derive(JsonSchema))]
pub(crate) struct RuleFile {
    /// The rule's name. With `per` and `algorithm` it is the rule's identity: what was used belongs to it.
    pub(crate) name: Text,
    /// Where it stands; by what it is counted by, unless said.
    pub(crate) layer: Option<Located<LayerName>>,
    /// Which requests it applies to; all, unless said.
    #[serde(rename = "match", default)]
    pub(crate) matches: MatchFile,
    /// What it is counted by: `ip`, `ip/48`, `tenant`, `user`, `tier`, `category`, `endpoint`, `method`, `host`,
    /// `header:NAME`, `fact:NAME`; `[]` is one budget for all.
    pub(crate) per: Option<Texts>,
    /// `"100/min"`, `"50MB/day"`, `"100/min burst 20"`, `"unlimited"`, or `"tier"`.
    pub(crate) limit: Option<Text>,
    /// How it is counted.
    pub(crate) algorithm: Option<Located<AlgorithmName>>,
    /// Where fixed windows begin: at the clock's multiples, or at a key's first request.
    pub(crate) anchor: Option<Located<AnchorName>>,
    /// Sub-windows of a sliding window (60).
    pub(crate) buckets: Option<Located<u32>>,
    /// How much at once, for a token bucket (the limit itself).
    pub(crate) burst: Option<Located<u64>>,
    /// How long a request may be in flight before it no longer counts, for concurrency ("60s").
    pub(crate) ttl: Option<Text>,
    /// The named cost that is charged instead of requests.
    pub(crate) cost: Option<Text>,
    /// Count by outcome: `"status:401,403"`, `"status:5xx"`.
    pub(crate) count: Option<Text>,
    /// Once exceeded, the key is denied this long.
    pub(crate) block_for: Option<Text>,
    /// Never: matching requests are always denied.
    pub(crate) deny: Option<Located<bool>>,
    /// Only when no other rule of its layer matched.
    pub(crate) fallback: Option<Located<bool>>,
    /// What to do without the identity it is counted by: key by the address, leave the rule out, or deny.
    pub(crate) on_missing: Option<Located<OnMissingName>>,
    /// The graduated response to going over this limit.
    pub(crate) ladder: Option<Text>,
    /// Which violations are strikes.
    pub(crate) strike: Option<Located<StrikeName>>,
    /// Accept that a ladder may ban an address or a tenant that several people share.
    pub(crate) ban_shared: Option<Located<bool>>,
    /// Enforce it, or only watch what it would do.
    pub(crate) mode: Option<Located<ModeName>>,
    /// How exact a distributed store must be.
    pub(crate) consistency: Option<Located<ConsistencyName>>,
    /// Accept that a store without atomic updates only approximates this limit.
    pub(crate) approximate: Option<Located<bool>>,
    /// What to do when the store fails.
    pub(crate) on_store_error: Option<Located<OnStoreErrorName>>,
    /// How much a denied client is told.
    pub(crate) disclosure: Option<Located<DisclosureName>>,
    /// The status of a denial (429).
    pub(crate) status: Option<Located<u16>>,
    /// A sentence for the body of a denial.
    pub(crate) message: Option<Text>,
    /// The whole body of a denial, instead of the usual one.
    pub(crate) body: Option<Text>,
    /// The limit in prose for the body of a denial: "10 posts per hour".
    pub(crate) period: Option<Text>,
    /// Whether each denial is logged, or a sample.
    pub(crate) log: Option<Located<LogName>>,
    /// Findings that are meant: `"CODE: reason"`.
    pub(crate) allow: Option<Texts>,
}

/// Which requests a rule applies to; all of the keys must hold, each with any of its values.
#[derive(Debug, Default, serde::Deserialize)]
#[serde(deny_unknown_fields, default)]
#[cfg_attr(feature = "schema", derive(JsonSchema))]
pub(crate) struct MatchFile {
    /// Methods. `GET` stands for `HEAD` too.
    pub(crate) method: Option<Texts>,
    /// Paths: `*` one segment, `**` anything, `{x}` a capture.
    pub(crate) path: Option<Texts>,
    /// Hosts.
    pub(crate) host: Option<Texts>,
    /// Categories.
    pub(crate) category: Option<Texts>,
    /// Tenants.
    pub(crate) tenant: Option<Texts>,
    /// Tiers.
    pub(crate) tier: Option<Texts>,
    /// The caller's own facts: `fact.inbox = "7"`.
    pub(crate) fact: NamedEntries<Texts>,
}

/// A graduated response.
#[derive(Debug, serde::Deserialize)]
#[serde(deny_unknown_fields)]
#[cfg_attr(feature = "schema", derive(JsonSchema))]
pub(crate) struct LadderFile {
    /// All strikes vanish together this long after the last ("24h").
    pub(crate) decay: Option<Text>,
    /// One a strike, the last repeats: `warn`, `deny`, `shadow`, `cooldown 1min`, `ban 24h`, joined by `+`.
    pub(crate) rungs: Option<Texts>,
    /// A cookie that is set with each warning.
    pub(crate) warning_cookie: Option<Text>,
}

/// Protection of a login.
#[derive(Debug, serde::Deserialize)]
#[serde(deny_unknown_fields)]
#[cfg_attr(feature = "schema", derive(JsonSchema))]
pub(crate) struct LoginFile {
    /// Attempts on one account ("5/15min").
    pub(crate) account: Option<Text>,
    /// Attempts from one address ("20/5min").
    pub(crate) ip: Option<Text>,
    /// Failures in a row, and how long they lock: `{ 3 = "1min", 5 = "5min", 10 = "1h" }`.
    pub(crate) locks: Option<NamedEntries<Text>>,
    /// Failures in a row at which unknown devices are refused until a reset (100).
    pub(crate) ceiling: Option<Located<u32>>,
    /// What to do when the store fails ("closed").
    pub(crate) on_store_error: Option<Located<OnStoreErrorName>>,
}

/// When to raise an alert.
#[derive(Debug, Default, serde::Deserialize)]
#[serde(deny_unknown_fields, default)]
#[cfg_attr(feature = "schema", derive(JsonSchema))]
pub(crate) struct AlertsFile {
    /// Denials of the edge layer.
    pub(crate) edge_blocks: Option<AlertFile>,
    /// Denials of the tenant layer.
    pub(crate) tenant_blocks: Option<AlertFile>,
    /// Bans of users.
    pub(crate) user_bans: Option<AlertFile>,
    /// Denials of any one address.
    pub(crate) ip_blocks: Option<AlertFile>,
}

/// Two thresholds over a period.
#[derive(Debug, serde::Deserialize)]
#[serde(deny_unknown_fields)]
#[cfg_attr(feature = "schema", derive(JsonSchema))]
pub(crate) struct AlertFile {
    /// The period: "min", "h".
    pub(crate) per: Text,
    /// Fires at so many.
    pub(crate) warning: Located<u64>,
    /// Fires at so many, louder.
    pub(crate) critical: Located<u64>,
}

/// Who is never limited, and who never gets in: CIDRs, `user:ID`, `tenant:ID`. The narrower entry wins, deny on a tie.
#[derive(Debug, Default, serde::Deserialize)]
#[serde(deny_unknown_fields, default)]
#[cfg_attr(feature = "schema", derive(JsonSchema))]
pub(crate) struct ListsFile {
    /// Never limited and never counted.
    pub(crate) allow: Option<Texts>,
    /// Always denied.
    pub(crate) deny: Option<Texts>,
}

/// How much is kept in memory.
#[derive(Debug, Default, serde::Deserialize)]
#[serde(deny_unknown_fields, default)]
#[cfg_attr(feature = "schema", derive(JsonSchema))]
pub(crate) struct MemoryFile {
    /// The most keys that are kept (1,000,000).
    pub(crate) max_keys: Option<Located<u64>>,
    /// When only protected keys are left: fold new ones into their prefix, share one budget, or deny.
    pub(crate) when_full: Option<Located<WhenFullName>>,
}

/// Declares an enumeration whose spelling in a policy is its names in kebab case.
macro_rules! names {
    ($(#[$doc:meta])* $name:ident { $($(#[$variant_doc:meta])* $variant:ident),+ $(,)? }) => {
        $(#[$doc])*
        #[derive(Debug, Clone, Copy, PartialEq, Eq, serde::Deserialize)]
        #[serde(rename_all = "kebab-case")]
        #[cfg_attr(feature = "schema", derive(JsonSchema))]
        pub(crate) enum $name { $($(#[$variant_doc])* $variant),+ }
    };
}

names!(
    /// Where a rule stands; limits are met in this order.
    LayerName { Global, Edge, Tenant, User, Endpoint }
);
/// How a limit is counted. Its names are those of the list of algorithms.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct AlgorithmName(pub(crate) Algorithm);

impl<'de> Deserialize<'de> for AlgorithmName {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let name = std::borrow::Cow::<'de, str>::deserialize(deserializer)?;
        let unknown = || serde::de::Error::unknown_variant(&name, &Algorithm::NAMES);
        Algorithm::named(&name).map(Self).ok_or_else(unknown)
    }
}

names!(
    /// Where fixed windows begin.
    AnchorName { Clock, First }
);
names!(
    /// What to do without the identity a rule is counted by.
    OnMissingName { Floor, Skip, Deny }
);
names!(
    /// Which violations are strikes.
    StrikeName { Window, Request, Ignored }
);
names!(
    /// Whether a rule binds.
    ModeName { Enforce, Observe }
);
names!(
    /// How exact a distributed store must be.
    ConsistencyName { Strong, Leased, Eventual }
);
names!(
    /// What to do when the store fails.
    OnStoreErrorName { Local, Open, Closed }
);
names!(
    /// How much a denied client is told.
    DisclosureName { Full, Minimal, None }
);
names!(
    /// How denials are logged.
    LogName { Sampled, Each }
);
names!(
    /// Among whom a user's name is unique.
    UserScopeName { Global, Tenant }
);
names!(
    /// What to do with paths that servers read differently.
    OddPathsName { Refuse, Match }
);
names!(
    /// What to do with new keys when only protected ones are left.
    WhenFullName { Fold, Shared, Deny }
);

#[cfg(feature = "schema")]
mod schema {
    //! Where a value stands is not part of the schema: only the value is.

    use std::borrow::Cow;

    use schemars::{JsonSchema, Schema, SchemaGenerator, json_schema};

    use super::{AlgorithmName, Located, NamedEntries, Texts};
    use crate::limit::Algorithm;

    impl<T: JsonSchema> JsonSchema for Located<T> {
        fn schema_name() -> Cow<'static, str> {
            T::schema_name()
        }

        fn inline_schema() -> bool {
            T::inline_schema()
        }

        fn json_schema(generator: &mut SchemaGenerator) -> Schema {
            T::json_schema(generator)
        }
    }

    impl JsonSchema for AlgorithmName {
        fn schema_name() -> Cow<'static, str> {
            "AlgorithmName".into()
        }

        fn json_schema(_: &mut SchemaGenerator) -> Schema {
            json_schema!({"description": "How a limit is counted.", "type": "string", "enum": Algorithm::NAMES})
        }
    }

    impl JsonSchema for Texts {
        fn schema_name() -> Cow<'static, str> {
            "Texts".into()
        }

        fn inline_schema() -> bool {
            true
        }

        fn json_schema(_: &mut SchemaGenerator) -> Schema {
            json_schema!({"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "string"}}]})
        }
    }

    impl<V: JsonSchema> JsonSchema for NamedEntries<V> {
        fn schema_name() -> Cow<'static, str> {
            format!("TableOf{}", V::schema_name()).into()
        }

        fn inline_schema() -> bool {
            true
        }

        fn json_schema(generator: &mut SchemaGenerator) -> Schema {
            let value = generator.subschema_for::<V>();
            json_schema!({"type": "object", "additionalProperties": value})
        }
    }

    /// The JSON Schema of the policy file, for editors.
    pub(crate) fn policy_schema() -> Schema {
        schemars::schema_for!(super::PolicyFile)
    }
}

#[cfg(feature = "schema")]
pub(crate) use schema::policy_schema;
