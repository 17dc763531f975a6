//! Every code that `lint` reports. `docs/lint.md` is generated from this table.

use super::Severity;

/// A kind of finding.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Code {
    /// The short name, which is stable across versions.
    pub name: &'static str,
    /// Whether a policy with it can be used. A few codes are a warning in one place and an error in another; this is the
    /// milder one.
    pub severity: Severity,
    /// Where `allow` silences it, if it is a warning.
    pub place: Place,
    /// What the finding is about.
    pub says: &'static str,
    /// Why it matters.
    pub why: &'static str,
    /// How to fix it.
    pub fix: &'static str,
}

/// Where `allow` silences a warning.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum Place {
    /// In the rule that the warning is about.
    Rule,
    /// At the top of the policy, because the warning is about no rule.
    Policy,
    /// In the rule that the warning is about; or at the top of the policy, if that rule was removed or the warning is about a
    /// table.
    Either,
}

impl Code {
    /// Returns the code of this name.
    #[must_use]
    pub fn named(name: &str) -> Option<&'static Self> {
        CODES.iter().find(|code| code.name == name)
    }
}

macro_rules! place {
    () => {
        Place::Rule
    };
    ($place:ident) => {
        Place::$place
    };
}

macro_rules! codes {
    ($($severity:ident $name:literal $(of $place:ident)?: $says:literal, $why:literal, $fix:literal;)+) => {
        /// Every code: errors in the text come first, the doubts of a reviewer last.
        pub const CODES: &[Code] = &[$(
            Code { name: $name, severity: Severity::$severity, place: place!($($place)?), says: $says, why: $why, fix: $fix }
        ),+];
    };
}

codes! {
    Error "too-large": "the file is larger than 4 MiB",
        "a file of that size is a mistake, and would take a server long to read", "split it by deployment";
    Warning "review-incomplete" of Policy: "a policy that is too large to be reviewed completely",
        "what was not looked at may be wrong; a draft for the dashboard is an error then", "review it with `threshold lint`, or split it";
    Error "syntax": "the text is not TOML, or a value has the wrong type",
        "nothing in the file can be used", "write what the message asks for";
    Error "unknown-key": "a key that the table does not have",
        "a misspelt key would silently do nothing", "write the suggested key";
    Error "bad-value": "a value that the key does not accept",
        "the rule would not mean what was written", "write one of the listed values";
    Error "bad-variable": "a `${NAME}` that is not set, is not a number in a limit, or is too long",
        "a limit must not depend on a forgotten variable, nor a server's memory on a long one",
        "set it, or give it a default: `${NAME:-20}`";
    Error "bad-name": "a rule's name that header fields cannot carry",
        "names are shown to clients in `RateLimit` fields", "use at most 64 printable ASCII characters";
    Error "bad-limit": "a limit that cannot be parsed",
        "it would limit nothing", "write `N/period`, as in `\"100/min\"`";
    Error "bad-place": "a `place` that cannot be parsed, that does not follow from what the rule is counted by, or that two eventual budgets share",
        "one budget would be counted in several places, or several in one", "name records by the parts of `per`, or by `{hash}`";
    Error "bad-time": "a length of time that cannot be parsed",
        "it would be zero or infinite", "write a number and a unit, as in `\"5min\"`";
    Error "bad-rung": "a rung that cannot be parsed",
        "the penalty would not be the intended one", "join `warn`, `deny`, `shadow`, `cooldown D`, `ban D` by `+`";
    Error "bad-pattern": "a pattern that cannot be parsed, or that no normalized request matches",
        "the rule would never match", "`*` is one segment, `**` anything, `{x}` a captured segment";
    Error "bad-method": "a method that no request can have",
        "the rule would never match", "write a word such as `\"POST\"`, and several as a list";
    Error "unknown-placeholder": "a word in braces in a `body` that is no placeholder",
        "clients would read the braces", "write one of the listed placeholders, or `\\u007b` for a brace in JSON";
    Error "no-per": "a rule without `per`",
        "every rule states whose budget it is, even a budget shared by all", "write `per = [\"ip\"]`, or `per = []` for one shared budget";
    Error "no-limit": "a rule without a limit",
        "it would do nothing", "write `limit = \"100/min\"`, or `deny = true`";
    Error "impossible-limit": "figures that the algorithm does not support",
        "the limit could not be enforced", "change the algorithm or the figure, as the message says";
    Error "duplicate-name": "two rules, categories, tiers or ladders with the same name",
        "stored balances belong to a rule by its name", "rename one";
    Error "too-many-rules": "more than 1,000 rules",
        "every request is compared with every rule", "match several paths in one rule";
    Error "too-many-meet": "a request that more than 16 rules match",
        "a decision has room for 16 limits", "narrow what the rules match";
    Error "too-many-subjects": "ladders that count strikes by more than four combinations of `per` and ladder",
        "a decision has room for four subjects", "let rules with the same `per` share one ladder";
    Error "no-tiers": "`limit = \"tier\"` in a policy without tiers",
        "the rule would limit nothing", "add `[tiers.NAME]`, and `default_tier` under `[identity]`";
    Error "unknown-tier": "a tier that is not defined",
        "its requests would be denied, or not be limited", "add `[tiers.NAME]`";
    Error "unknown-ladder": "a ladder that is not defined",
        "no violation would be penalized", "name a built-in ladder, or add `[ladders.NAME]`";
    Error "unknown-rule": "a name in `[envoy.replaces]` that no rule has",
        "nothing would be replaced", "name a rule of the policy";
    Error "not-built-in": "a table that needs a feature which the program was built without",
        "the protection would be missing without notice", "build with that feature, as the message says";
    Error "no-jwt": "a `claim:` without `[identity.jwt]`",
        "a token that is not verified proves nothing", "state how tokens are verified";
    Error "bad-key": "a key that its algorithm cannot use: shorter than the hash, a public key as a shared secret, a private key",
        "tokens could be forged, or none would be accepted",
        "give HS algorithms a secret of at least 32, 48 or 64 bytes, the others a public key in PEM or a JWKS";
    Error "list-too-wide": "a list entry that covers a whole address space, this machine, or a trusted proxy",
        "it would exempt everyone, or lock everyone out", "write narrower prefixes";
    Error "ladder-for-nobody": "a ladder on a rule whose `per` identifies no caller",
        "a penalty needs a subject", "count by user, tenant or address";
    Error "unverified-ladder": "a ladder on an identity that anyone can claim",
        "anyone could get its owner banned", "use a claim, or a header that a trusted proxy sets";
    Error "ladder-before-login": "a ladder on an account name before the login has proven it",
        "anyone who types the name could get its owner banned", "leave the ladder out; `[login]` locks accounts without that risk";
    Error "shared-ban": "a ladder that can ban an address or a tenant",
        "several people may share it", "write `ban_shared = true` to accept that";
    Error "ladder-warns": "a rung that allows the request, on a limit that counts bytes, a named cost or requests in flight",
        "such a request may cost more than all requests before it", "use a ladder whose rungs all deny, such as `strict`";
    Error "eventual-ladder": "a ladder on a rule with `consistency = \"eventual\"`",
        "a strike that an eventually consistent store counts late or twice punishes wrongly", "write `consistency = \"strong\"`, or leave the ladder out";
    Error "window-too-short": "an eventually consistent limit over less than a minute, without `approximate = true`",
        "an eventually consistent store may show a write elsewhere only after about a minute, when the window is over",
        "use a window of a minute or more, or `consistency = \"strong\"`; `approximate = true` accepts it";
    Error "not-approximate": "an eventually consistent limit that is no `fixed-window`, without `approximate = true`",
        "a store without atomic updates loses charges of requests at the same time, and no bound holds",
        "use `algorithm = \"fixed-window\"` or `consistency = \"strong\"`; `approximate = true` accepts it";
    Warning "shared-ladder": "a ladder on an address or a tenant",
        "several people may share it and be penalized for one of them", "count by user";
    Warning "ladders-apart": "two ladders that one request can meet, counted by identities in different partitions of a store",
        "a Redis Cluster and Durable Objects settle partitions one after another, and only a denial by the last one is a strike: one of \
         the ladders is climbed more slowly than on one server",
        "count both by the same identity, with `user_scope = \"tenant\"` for users and their tenants; or leave one ladder out; or state in \
         `allow` that one server decides";
    Warning "no-ladder": "`strike` on a rule without a ladder",
        "it has no effect", "add `ladder`, or leave `strike` out";
    Warning "never-denies": "a ladder that never denies, with a strike for every request",
        "the rule would not limit anything", "add a rung that denies";
    Warning "strikes-decay": "a ladder that forgets a strike before the next one can follow",
        "strikes from one limit are as far apart as its period, at most an hour, so no subject gets past the first rung",
        "raise `decay` above that, or write `strike = \"request\"`";
    Warning "unused-jwt" of Policy: "`[identity.jwt]` in a policy without a `claim:`",
        "tokens would be verified for nothing", "take `tenant`, `user` or `tier` from `claim:NAME`, or remove the table";
    Warning "no-key-file" of Policy: "a `key_file` that cannot be read where lint runs",
        "a server that cannot read it does not start", "run lint where the file is, or state in `allow` that it is elsewhere";
    Warning "never-matches": "a rule that no request can match",
        "it looks like protection and is none", "correct what it matches, or remove it";
    Warning "no-rules" of Policy: "a policy without rules and without `[login]`",
        "it limits nothing; a file that was emptied or truncated by mistake looks like this",
        "add a `[[rule]]`; a server starts with such a policy only with `--allow-empty`";
    Warning "matches-all" of Policy: "a category that matches every request",
        "the categories after it match none", "give it a path, a method or a host";
    Warning "unknown-category" of Policy: "a limit for a category that does not exist",
        "it limits nothing", "add it as `[[category]]`";
    Warning "tier-without-category" of Policy: "a tier without a limit for some category",
        "such requests are not limited", "add a limit, or write `\"unlimited\"`";
    Warning "no-default-tier": "a rule with `limit = \"tier\"` in a policy without `default_tier`",
        "a request without one of the policy's tiers, or with one in another case, has no limit to be counted under: it is denied, or not \
         limited with `on_missing = \"skip\"`",
        "write `default_tier` under `[identity]`, or state in `allow` that every request has a tier";
    Warning "tiers-alike" of Policy: "two tiers whose names differ only in case",
        "tiers compare exactly, so a caller's limits depend on how its tier is spelled", "rename one, or remove it";
    Warning "never-believed" of Policy: "an address or a name that is taken from a header although no peer is trusted",
        "the header is ignored, so the name is always missing, and everyone is counted by the connection's address",
        "list the proxy under `trusted_proxies`";
    Warning "counts-the-proxy" of Policy: "trusted proxies, rules by address, and a `client_ip` that is the connection's own address",
        "behind a proxy that is the proxy's address, so that all its clients share one budget",
        "write `client_ip = \"x-forwarded-for\"`, or the header in which your proxy passes the client's address";
    Warning "trusts-everyone" of Policy: "trusted proxies that cover a whole address space",
        "every client can then claim any address or name", "list the proxies' own addresses";
    Warning "passed-on" of Policy: "an address or a name from a header that a proxy passes on as the client sent it",
        "most proxies set `X-Forwarded-For` and pass every other header on, so that the client chooses its value",
        "have your proxy set or remove it (`threshold export nginx-auth`, `caddy-auth` and `traefik-auth` write that), and state \
         in `allow` which proxy does; a cookie or `authorization` is always the client's own: use a `claim:`, or a header that \
         the gateway sets";
    Warning "narrow-ipv6" of Policy: "an `ipv6_prefix` above 64",
        "an IPv6 client usually has a /64 or more, so it can use a new budget for each request", "write 64 or less";
    Warning "high-ceiling" of Policy: "a login ceiling above 100",
        "NIST SP 800-63B allows at most 100 consecutive failures", "write 100 or less";
    Warning "one-ipv6-address" of Policy: "a single IPv6 address without a prefix on the deny list",
        "a client has 2^64 addresses, and returns with another one",
        "write its `/64`, or `/128` for that one address";
    Warning "unknown-allowance": "an `allow` that names an unknown code, an error, or a code that belongs elsewhere",
        "it silences nothing", "write a warning of this page, in the place it belongs to";
    Warning "client-chosen-key": "a budget that is counted only by values which the client chooses",
        "a client gets a new budget with each new value, so the limit does not stop an attacker",
        "add `\"ip\"` to `per`, or add a rule by address that matches the same requests";
    Warning "fallback-off": "a rule that switches its layer's fallback off for requests that it does not limit itself",
        "a fallback applies only if no other rule of its layer matches; a rule with `on_missing = \"skip\"` that matches \
         leaves anonymous requests without any limit of that layer, and a rule that observes leaves all of them",
        "write `on_missing = \"floor\"`, or add a rule by address that matches the same requests";
    Warning "path-info": "a rule for a `.php` script that does not match what follows the script's name",
        "PHP also runs the script for `/login.php/x` (path info), which bypasses the rule",
        "match `/login.php/**`, which is the script and everything below it, or configure the server to refuse path info";
    Warning "cannot-bind": "a limit that another, tighter one always reaches first",
        "it looks like protection and has no effect until the other limit is raised",
        "remove it, or make it tighter than the other";
    Warning "shared-below-clients": "a shared budget that is smaller than the limits of fifty clients together",
        "a few clients within their own limits can shut everyone else out",
        "raise it to fifty times the limit of one client, or lower that limit";
    Warning "idle-shards": "`shards` on a limit that is not above 500 a second",
        "one object or partition counts such a limit, so it is not split and the key has no effect",
        "leave `shards` out";
    Warning "login-failure-mode": "a rule for a login path that does not set `on_store_error`",
        "when the store fails, the default decides whether guessing is unlimited or nobody can log in",
        "write `on_store_error = \"closed\"`, or another mode";
    Warning "double-burst": "a bucket that allows twice its limit",
        "a client that has been idle gets the burst in addition to the rate",
        "write a smaller burst, or `algorithm = \"sliding-window\"`";
    Warning "bucket-gives-back": "a token bucket whose charges are given back: a rule with `count`, or one of a named cost",
        "what comes back in another order than it was charged, as where responses overtake each other, comes back in part: up to half of \
         the burst is lost at one moment, and all of it but one unit over time, until the bucket is full",
        "write `algorithm = \"sliding-window\"`, which gives back exactly; or state in `allow` that such requests do not overlap";
    Warning "zero-limit" of Either: "a limit of 0, which means unlimited",
        "it reads as if it denied everything, and allows everything",
        "write `\"unlimited\"` or `\"none\"`; if a variable may be 0, state in `allow` what that means";
    Warning "small-estimate" of Either: "a `sliding-estimate` of less than 10",
        "its weight is rounded up, so a client that sends continuously gets one less than the limit in each window: half of it at 1 \
         and 2, 80 % at 5",
        "use `sliding-log`, which is exact, or `sliding-window`";
    Warning "uncovered-path" of Policy: "requests in a log or an OpenAPI document that no rule limits (`--log`, `--openapi`)",
        "abuse moves to paths without limits", "add a rule that matches them, or a fallback";
    Warning "forgets" of Either: "a change that resets budgets or penalties (`--against OLD`)",
        "a rule is identified by its name, `per` and algorithm: under a new identity all its balances start from zero",
        "keep the identity, or change it when little is lost";
}
