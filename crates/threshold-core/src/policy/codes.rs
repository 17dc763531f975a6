//! Everything `lint` can find, by its code: `docs/lint.md` is written from this table.

use super::Severity;

/// One kind of finding.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Code {
    /// The short name that does not change.
    pub name: &'static str,
    /// Whether a policy with it can be used. A few codes are a warning in one place and an error in another; this is the
    /// milder.
    pub severity: Severity,
    /// Where it is allowed, if it is a warning and is meant.
    pub place: Place,
    /// What is found.
    pub says: &'static str,
    /// Why it matters.
    pub why: &'static str,
    /// What to do about it.
    pub fix: &'static str,
}

/// Where `allow` silences a warning: where the finding belongs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Place {
    /// In the rule that it is about.
    Rule,
    /// At the top of the policy: it is about no rule.
    Policy,
    /// In the rule that it is about, or at the top of the policy where that rule is gone, or it is about a table that is none.
    Either,
}

impl Code {
    /// The code of this name.
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
        /// Every code, in the order in which a policy is read: errors of the text first, doubts of a reviewer last.
        pub const CODES: &[Code] = &[$(
            Code { name: $name, severity: Severity::$severity, place: place!($($place)?), says: $says, why: $why, fix: $fix }
        ),+];
    };
}

codes! {
    Error "too-large": "the file is larger than 4 MiB",
        "a file of that size is a mistake, and would take a server long to read", "split it by deployment";
    Error "syntax": "the text is not TOML, or a value has the wrong type",
        "nothing of the file can be used", "write what the message asks for";
    Error "unknown-key": "a key that no table knows",
        "a misspelt key would silently do nothing", "write the key that is suggested";
    Error "bad-value": "a value that its key cannot have",
        "a rule would not mean what was written", "write one of the values that are listed";
    Error "bad-variable": "a `${NAME}` that is unset, not digits in a limit, or too long",
        "a limit must not depend on a forgotten variable, nor a server's memory on a long one",
        "set it, or give a default: `${NAME:-20}`";
    Error "bad-name": "a rule's name that headers cannot carry",
        "names are shown to clients in `RateLimit` fields", "use up to 64 printable ASCII characters";
    Error "bad-limit": "a limit that cannot be read",
        "it would limit nothing", "write `N/period`, as in `\"100/min\"`";
    Error "bad-time": "a length of time that cannot be read",
        "it would be nothing or for ever", "write a number and a unit, as in `\"5min\"`";
    Error "bad-rung": "a rung that cannot be read",
        "somebody would be punished otherwise than was meant", "join `warn`, `deny`, `shadow`, `cooldown D`, `ban D` by `+`";
    Error "bad-pattern": "a pattern that cannot be read, or that no request's one spelling can meet",
        "the rule would never be met", "`*` is one segment, `**` anything, `{x}` a segment that is kept";
    Error "bad-method": "a method that no request can have",
        "the rule would never be met", "write a word such as `\"POST\"`, and several as a list";
    Error "no-per": "a rule without `per`",
        "whose budget it is must be said, also where it is everyone's", "write `per = [\"ip\"]`, or `per = []` for one budget";
    Error "no-limit": "a rule without a limit",
        "it would do nothing", "write `limit = \"100/min\"`, or `deny = true`";
    Error "impossible-limit": "figures that the algorithm cannot have",
        "the limit could not be kept", "change the algorithm or the figure, as the message says";
    Error "duplicate-name": "two rules or categories of one name",
        "what was used belongs to a rule by its name", "rename one";
    Error "too-many-rules": "more than 1,000 rules",
        "each request looks at every rule", "match several paths in one rule";
    Error "too-many-meet": "a request that meets more than 16 rules",
        "a decision has room for 16 limits", "narrow what the rules match";
    Error "too-many-subjects": "ladders that count strikes by more than four combinations of `per` and ladder",
        "a decision has room for four subjects", "let rules with the same `per` share one ladder";
    Error "no-tiers": "`limit = \"tier\"` in a policy without tiers",
        "the rule would limit nothing", "add `[tiers.NAME]`, and `default_tier` under `[identity]`";
    Error "unknown-tier": "a tier that no table defines",
        "its requests would not be limited", "add `[tiers.NAME]`";
    Error "unknown-ladder": "a ladder that no table defines",
        "nobody would be punished", "name a built-in one, or add `[ladders.NAME]`";
    Error "no-jwt": "a `claim:` without `[identity.jwt]`",
        "a token that nobody verifies proves nothing", "say how tokens are verified";
    Error "bad-key": "a key that its algorithm cannot use: shorter than the hash, a public key as a shared secret, a private key",
        "tokens could be forged, or none would be accepted",
        "give HS algorithms a secret of at least 32, 48 or 64 bytes, the others a public key in PEM or a JWKS";
    Error "list-too-wide": "a list entry that covers a whole address space, this machine, or a trusted proxy",
        "it would let everyone in, or lock everyone out", "write narrower prefixes";
    Error "ladder-for-nobody": "a ladder on a rule that counts by nobody",
        "a ladder punishes somebody", "count by user, tenant or address";
    Error "unverified-ladder": "a ladder on an identity that anyone can claim",
        "anyone could get its owner banned", "use a claim, or a header of a trusted proxy";
    Error "ladder-before-login": "a ladder on an account's name where it is not proven yet",
        "whoever types the name could get its owner banned", "leave the ladder out; `[login]` locks with care";
    Error "shared-ban": "a ladder that can ban an address or a tenant",
        "several people may share it", "write `ban_shared = true` if that is accepted";
    Error "ladder-warns": "a rung that lets a request through, on a limit in bytes, named costs or at once",
        "such a request may cost more than everything before it", "use a ladder whose rungs all deny, such as `strict`";
    Warning "shared-ladder": "a ladder on an address or a tenant",
        "several people may share it, and be punished for one", "count by user";
    Warning "no-ladder": "`strike` on a rule without a ladder",
        "it does nothing there", "add `ladder`, or leave `strike` out";
    Warning "never-denies": "a ladder that never denies, struck by every request",
        "the limit would not limit", "add a rung that denies";
    Warning "strikes-decay": "a ladder that forgets a strike before the next one can follow",
        "strikes from one limit are as far apart as its period, at most an hour; nobody gets past the first rung",
        "raise `decay` above that, or write `strike = \"request\"`";
    Warning "unused-jwt" of Policy: "`[identity.jwt]` in a policy without a `claim:`",
        "tokens would be verified for nothing", "take `tenant`, `user` or `tier` from `claim:NAME`, or remove the table";
    Warning "no-key-file" of Policy: "a `key_file` that cannot be read where lint runs",
        "a server that cannot read it does not start", "run lint where the file is, or say in `allow` that it is elsewhere";
    Warning "never-matches": "a rule that no request can meet",
        "it looks like protection and is none", "correct what it matches, or remove it";
    Warning "no-rules" of Policy: "a policy without rules and without `[login]`",
        "it limits nobody; a file that was emptied or cut by mistake looks like this",
        "add a `[[rule]]`; a server starts with such a policy only under `--allow-empty`";
    Warning "matches-all" of Policy: "a category that takes every request",
        "the categories after it get none", "give it a path, a method or a host";
    Warning "unknown-category" of Policy: "a limit for a category that does not exist",
        "it limits nothing", "add it as `[[category]]`";
    Warning "tier-without-category" of Policy: "a tier that says nothing of some category",
        "such requests are not limited", "add a limit, or write `\"unlimited\"`";
    Warning "never-believed" of Policy: "an address or a name from a header, where no peer is trusted",
        "it is never believed: the name is never there, and everyone is counted by the connection's address",
        "list the proxy under `trusted_proxies`; on Workers, where the platform is trusted, say so in `allow`";
    Warning "counts-the-proxy" of Policy: "trusted proxies, rules by address, and a `client_ip` that is the connection's own address",
        "behind a proxy that is the proxy's address, so that all its clients share one budget",
        "write `client_ip = \"x-forwarded-for\"`, or the header in which your proxy tells the client's address";
    Warning "trusts-everyone" of Policy: "trusted proxies that cover a whole address space",
        "every client may then say who it is", "list the proxies' own addresses";
    Warning "passed-on" of Policy: "an address or a name from a header that a proxy passes on as its client sent it",
        "most proxies set `X-Forwarded-For` and hand every other header on: whoever sends the header chooses what it says",
        "have your proxy set or remove it (`threshold export nginx-auth`, `caddy-auth` and `traefik-auth` write that), and say \
         in `allow` which proxy does; a cookie or `authorization` stays the client's own: use a `claim:`, or a header that \
         the gateway sets";
    Warning "narrow-ipv6" of Policy: "an `ipv6_prefix` above 64",
        "an IPv6 client usually has a /64 or more, so it can take a new budget for each request", "write 64, or less";
    Warning "high-ceiling" of Policy: "a login ceiling above 100",
        "NIST SP 800-63B allows 100 failures in a row", "write 100 or less";
    Warning "one-ipv6-address" of Policy: "a deny list with a single IPv6 address that has no prefix",
        "one client has 2^64 of them, and comes back with another",
        "write its `/64`, or `/128` if that one is meant";
    Warning "unknown-allowance": "`allow` names a finding that does not exist, an error, or one that belongs elsewhere",
        "it silences nothing, and hides that it does not", "write a warning of this page, in the place that it belongs to";
    Warning "client-chosen-key": "a budget counted only by what the client itself chooses",
        "whoever sends another value gets another budget, so the limit stops nobody who means harm",
        "add `\"ip\"` to `per`, or a rule by address that meets the same requests";
    Warning "fallback-off": "a rule that switches its layer's fallback off for requests that it does not limit itself",
        "a fallback applies only where no other rule of its layer matches; a rule with `on_missing = \"skip\"` that matches \
         leaves anonymous requests without any limit of that layer, and a rule that observes leaves all of them",
        "write `on_missing = \"floor\"`, or add a rule by address that matches the same requests";
    Warning "path-info": "a rule for a `.php` script that does not match what follows the script's name",
        "PHP runs the script for `/login.php/x` too (path info), so that the rule is dodged",
        "match `/login.php/**`, which is the script and everything below it, or have the server refuse path info";
    Warning "cannot-bind": "a limit that another, tighter one always reaches first",
        "it looks like protection and is never felt; whoever loosens the other will be surprised by it",
        "remove it, or make it tighter than the other";
    Warning "shared-below-clients": "a budget for everyone that is smaller than fifty clients' own",
        "a handful of clients within their limits can shut everyone else out",
        "raise it to fifty times what one client may do, or lower what one client may do";
    Warning "window-too-short": "an eventual limit over less than a minute",
        "Workers KV shows a write elsewhere only after a minute or so: the window is over before it was counted",
        "use a window of a minute or more, or `consistency = \"strong\"`";
    Warning "lease-too-small": "a leased limit of less than a hundred over more than a minute",
        "a lease is at most 1 % of such a limit, which is less than one request",
        "use `consistency = \"strong\"`";
    Warning "login-failure-mode": "a login path whose rule does not say what happens when the store fails",
        "guessing is unlimited in the mode nobody chose, or nobody gets in",
        "write `on_store_error = \"closed\"`, or the mode you mean";
    Warning "double-burst": "a bucket that lets through twice its limit",
        "whoever has been idle gets the burst and the rate together",
        "write a smaller burst, or `algorithm = \"sliding-window\"`";
    Warning "zero-limit" of Either: "a limit of 0, which is no limit",
        "it reads as if it let nothing through, and lets everything through",
        "write `\"unlimited\"` or `\"none\"`, whichever is meant";
    Warning "small-estimate" of Either: "a `sliding-estimate` of less than 10",
        "its weight is rounded up, so that somebody who always asks gets one less than the limit in each window: half of it at 1 and 2, \
         80 % at 5",
        "use `sliding-log`, which is exact, or `sliding-window`";
    Warning "uncovered-path" of Policy: "requests that no rule limits, in a log or an OpenAPI document (`--log`, `--openapi`)",
        "what is not limited is where abuse goes", "add a rule that meets them, or a fallback";
    Warning "forgets" of Either: "a change that forgets what was used or who is punished (`--against OLD`)",
        "a rule is known by name, `per` and algorithm: under new ones everybody begins anew, also who was banned",
        "keep them, or change the policy when little is lost";
}
