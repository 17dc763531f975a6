//! A policy for each value of each key, and the probe that shows the difference.

use super::probes::{answers, full_table, log, logins, partitions, recorded, started, without_store};

/// Policies that differ in one key.
pub(super) struct Case {
    /// The key, as in the schema.
    pub(super) key: &'static str,
    /// A policy with `@` in place of the key.
    pub(super) policy: String,
    /// The texts for that place: the key with a value, or nothing.
    pub(super) values: &'static [&'static str],
    /// Observes a policy, or returns why it is refused.
    pub(super) probe: fn(&str) -> Result<String, String>,
}

impl Case {
    pub(super) fn policies(&self) -> Vec<String> {
        self.values.iter().map(|value| self.policy.replacen('@', value, 1)).collect()
    }
}

const NAMES: &str = r#"
[identity]
trusted_proxies = ["127.0.0.1/32"]
client_ip = "x-forwarded-for"
user = "header:x-user"
tenant = "header:x-tenant"
tier = "header:x-tier"
"#;

const TIERS: &str = r#"
[tiers.gold]
requests = "3/h"
writes = "1/h"
reads = "2/h"
[tiers.silver]
requests = "1/h"
[[rule]]
name = "tenant"
per = ["tenant"]
limit = "tier"
"#;

const BY_USER: &str = "[[rule]]\nname = \"r\"\nper = [\"user\"]\nlimit = \"2/h\"\n";
const BY_ADDRESS: &str = "[[rule]]\nname = \"r\"\nper = [\"ip\"]\nlimit = \"2/h\"\n";

/// A policy with a rule by user, identities from headers, and `@` in the rule.
fn rule(more: &str) -> String {
    format!("{NAMES}{BY_USER}{more}\n@\n")
}

/// A policy with a rule without its limit and algorithm.
fn counted(limit: &str) -> String {
    format!("{NAMES}[[rule]]\nname = \"r\"\nper = [\"user\"]\n{limit}\n@\n")
}

/// A policy with identities from JWTs, and `@` in `[identity.jwt]`.
fn tokens(more: &str) -> String {
    format!("[identity]\nuser = \"claim:sub\"\n[identity.jwt]\n{more}\n@\n{BY_USER}")
}

pub(super) fn cases() -> Vec<Case> {
    let clients = [identity(), tables(), rules(), counting(), matching(), denials(), punishments()];
    let clients = clients.into_iter().flatten();
    let clients = clients.map(|(key, policy, values)| Case { key, policy, values, probe: answers });
    clients.chain(elsewhere()).collect()
}

type Row = (&'static str, String, &'static [&'static str]);

fn identity() -> Vec<Row> {
    let secret = "alg = \"HS256\"\nkey = \"0123456789abcdef0123456789abcdef0123456789abcdef0123456789abcdef\"\n";
    let identity = |lines: &str, rules: &str| format!("[identity]\n{lines}\n@\n{rules}");
    let trusts = "trusted_proxies = [\"127.0.0.1/32\"]\nclient_ip = \"x-forwarded-for\"\n";
    vec![
        (
            "identity.trusted_proxies",
            identity("client_ip = \"x-forwarded-for\"", BY_ADDRESS),
            &["", "trusted_proxies = [\"127.0.0.1/32\"]"],
        ),
        (
            "identity.client_ip",
            identity("trusted_proxies = [\"127.0.0.1/32\"]", BY_ADDRESS),
            &["", "client_ip = \"x-forwarded-for\""],
        ),
        ("identity.ipv6_prefix", identity(trusts, BY_ADDRESS), &["", "ipv6_prefix = 48"]),
        ("identity.user", identity(trusts, BY_USER), &["", "user = \"header:x-user\"", "user = \"header:x-other\""]),
        (
            "identity.tenant",
            identity(trusts, "[[rule]]\nname = \"r\"\nper = [\"tenant\"]\nlimit = \"2/h\"\n"),
            &["tenant = \"header:x-tenant\"", "tenant = \"header:x-user\""],
        ),
        (
            "identity.tier",
            identity(&format!("{trusts}tenant = \"header:x-tenant\"\ndefault_tier = \"silver\""), TIERS),
            &["", "tier = \"header:x-tier\""],
        ),
        (
            "identity.default_tier",
            identity(&format!("{trusts}tenant = \"header:x-tenant\""), TIERS),
            &["default_tier = \"gold\"", "default_tier = \"silver\""],
        ),
        (
            "identity.user_scope",
            format!("{NAMES}@\n{BY_USER}"),
            &["user_scope = \"global\"", "user_scope = \"tenant\""],
        ),
        ("identity.odd_paths", format!("{NAMES}@\n{BY_USER}"), &["odd_paths = \"refuse\"", "odd_paths = \"match\""]),
        (
            "identity.jwt.alg",
            tokens(&format!("iss = \"https://id\"\naud = \"api\"\n{}", secret.replace("alg = \"HS256\"\n", ""))),
            &["alg = \"HS256\"", "alg = \"HS512\""],
        ),
        (
            "identity.jwt.key",
            tokens("alg = \"HS256\"\naud = \"api\""),
            &[
                "key = \"0123456789abcdef0123456789abcdef0123456789abcdef0123456789abcdef\"",
                "key = \"another secret of the tests, which is long enough\"",
            ],
        ),
        (
            "identity.jwt.key_file",
            tokens("alg = \"HS256\"\naud = \"api\""),
            &["key_file = \"tests/serve/policy_keys/secret.txt\"", "key_file = \"tests/serve/policy_keys/other.txt\""],
        ),
        ("identity.jwt.iss", tokens(&format!("{secret}aud = \"api\"")), &["", "iss = \"https://evil\""]),
        ("identity.jwt.aud", tokens(secret), &["aud = \"api\"", "aud = \"web\""]),
    ]
}

fn tables() -> Vec<Row> {
    let names = format!("{NAMES}default_tier = \"gold\"\n{TIERS}");
    let category = |lines: &str| format!("{names}[[category]]\n{lines}\n@\n");
    vec![
        (
            "tiers.*.*",
            format!(
                "{NAMES}default_tier = \"gold\"\n[tiers.gold]\n@\n[[rule]]\nname = \"r\"\nper = [\"tenant\"]\nlimit = \"tier\"\n"
            ),
            &["requests = \"1/h\"", "requests = \"2/h\""],
        ),
        ("tenants.*.*", format!("{names}[tenants.t1]\n@\n"), &["", "requests = \"5/h\"", "tier = \"silver\""]),
        (
            "users.*.*",
            format!("{NAMES}default_tier = \"gold\"\n{}[users.u1]\n@\n", TIERS.replace("\"tenant\"", "\"user\"")),
            &["", "requests = \"5/h\"", "tier = \"silver\""],
        ),
        ("category.name", category("method = \"POST\""), &["name = \"writes\"", "name = \"reads\""]),
        ("category.method", category("name = \"writes\""), &["method = \"GET\"", "method = \"POST\""]),
        ("category.path", category("name = \"writes\""), &["path = \"/posts\"", "path = \"/x\""]),
        ("category.host", category("name = \"writes\""), &["host = \"a.example.com\"", "host = \"b.example.com\""]),
        (
            "lists.allow",
            format!("{NAMES}{BY_USER}[lists]\n@\n"),
            &["", "allow = [\"user:u1\"]", "allow = [\"203.0.113.0/24\"]"],
        ),
        ("lists.deny", format!("{NAMES}{BY_USER}[lists]\n@\n"), &["", "deny = [\"tenant:t2\"]"]),
    ]
}

fn rules() -> Vec<Row> {
    let first = "[[rule]]\nname = \"first\"\nper = [\"ip\"]\nmatch = { path = \"/posts\" }\nlayer = \"user\"\nlimit = \"1/h\"\n";
    vec![
        (
            "rule.name",
            format!("{NAMES}[[rule]]\nper = [\"user\"]\nlimit = \"2/h\"\n@\n"),
            &["name = \"r\"", "name = \"s\""],
        ),
        (
            "rule.layer",
            rule(""),
            &[
                "layer = \"global\"",
                "layer = \"edge\"",
                "layer = \"tenant\"",
                "layer = \"user\"",
                "layer = \"endpoint\"",
            ],
        ),
        (
            "rule.per",
            format!("{NAMES}[[rule]]\nname = \"r\"\nlimit = \"2/h\"\n@\n"),
            &["per = [\"user\"]", "per = [\"ip\"]", "per = [\"user\", \"host\"]"],
        ),
        ("rule.fallback", format!("{NAMES}{first}{BY_USER}@\n"), &["fallback = false", "fallback = true"]),
        ("rule.on_missing", rule(""), &["on_missing = \"floor\"", "on_missing = \"skip\"", "on_missing = \"deny\""]),
        ("rule.mode", rule(""), &["mode = \"enforce\"", "mode = \"observe\""]),
        ("rule.deny", counted(""), &["deny = true", "deny = false"]),
    ]
}

fn counting() -> Vec<Row> {
    vec![
        ("rule.limit", counted(""), &["limit = \"1/h\"", "limit = \"2/h\"", "limit = \"2/min\""]),
        (
            "rule.algorithm",
            counted("limit = \"3/min\""),
            &[
                "algorithm = \"token-bucket\"",
                "algorithm = \"fixed-window\"",
                "algorithm = \"sliding-window\"",
                "algorithm = \"sliding-estimate\"",
                "algorithm = \"sliding-log\"",
                "algorithm = \"concurrency\"",
            ],
        ),
        (
            "rule.anchor",
            counted("limit = \"3/min\"\nalgorithm = \"fixed-window\""),
            &["anchor = \"clock\"", "anchor = \"first\""],
        ),
        (
            "rule.buckets",
            counted("limit = \"3/min\"\nalgorithm = \"sliding-window\""),
            &["buckets = 2", "buckets = 30"],
        ),
        ("rule.burst", counted("limit = \"3/min\"\nalgorithm = \"token-bucket\""), &["burst = 1", "burst = 2"]),
        ("rule.ttl", counted("limit = \"2\"\nalgorithm = \"concurrency\""), &["ttl = \"10s\"", "ttl = \"10min\""]),
        ("rule.cost", counted("limit = \"12/h\""), &["", "cost = \"tokens\""]),
        ("rule.count", rule(""), &["", "count = \"status:401\""]),
        ("rule.block_for", counted("limit = \"3/min\""), &["", "block_for = \"10min\""]),
        ("rule.shards", counted("limit = \"1000/s\""), &["", "shards = 2"]),
    ]
}

fn matching() -> Vec<Row> {
    let tiers = format!("{NAMES}default_tier = \"gold\"\n{TIERS}[[category]]\nname = \"writes\"\nmethod = \"POST\"\n");
    vec![
        ("rule.match.method", rule(""), &["", "match = { method = \"POST\" }"]),
        ("rule.match.path", rule(""), &["", "match = { path = \"/posts\" }"]),
        ("rule.match.host", rule(""), &["", "match = { host = \"b.example.com\" }"]),
        ("rule.match.category", format!("{tiers}{BY_USER}@\n"), &["", "match = { category = \"writes\" }"]),
        ("rule.match.tenant", rule(""), &["", "match = { tenant = \"t2\" }"]),
        ("rule.match.tier", format!("{tiers}{BY_USER}@\n"), &["", "match = { tier = \"silver\" }"]),
        ("rule.match.fact.*", rule(""), &["match.fact.inbox = \"7\"", "match.fact.inbox = \"8\""]),
    ]
}

fn denials() -> Vec<Row> {
    vec![
        ("rule.disclosure", rule(""), &["disclosure = \"full\"", "disclosure = \"minimal\"", "disclosure = \"none\""]),
        ("rule.status", rule(""), &["", "status = 503"]),
        ("rule.message", rule(""), &["", "message = \"later\""]),
        ("rule.body", rule(""), &["", "body = \"{}\""]),
        ("answers.body", format!("{NAMES}{BY_USER}[answers]\n@\n"), &["", "body = \"{code}\""]),
        ("rule.period", rule(""), &["", "period = \"two an hour\""]),
    ]
}

fn punishments() -> Vec<Row> {
    let ladder = |more: &str| {
        format!(
            "{NAMES}{BY_USER}algorithm = \"sliding-log\"\nladder = \"l\"\nstrike = \"request\"\n[ladders.l]\n{more}\n@\n"
        )
    };
    vec![
        ("rule.ladder", rule("strike = \"request\""), &["", "ladder = \"graduated\"", "ladder = \"strict\""]),
        (
            "rule.strike",
            rule("ladder = \"graduated\""),
            &["strike = \"window\"", "strike = \"request\"", "strike = \"ignored\""],
        ),
        (
            "rule.ban_shared",
            format!("{NAMES}{BY_ADDRESS}ladder = \"strict\"\n@\n"),
            &["ban_shared = true", "ban_shared = false"],
        ),
        ("ladders.*.decay", ladder("rungs = [\"warn\", \"cooldown 1h\"]"), &["decay = \"1h\"", "decay = \"48h\""]),
        ("ladders.*.rungs", ladder(""), &["rungs = [\"warn\", \"deny\"]", "rungs = [\"cooldown 10min\"]"]),
        ("ladders.*.warning_cookie", ladder("rungs = [\"warn\", \"deny\"]"), &["", "warning_cookie = \"warned\""]),
    ]
}

/// Keys whose effect no client sees.
fn elsewhere() -> Vec<Case> {
    let stores = ["on_store_error = \"local\"", "on_store_error = \"open\"", "on_store_error = \"closed\""];
    let stores: &'static [&'static str] = Box::leak(Box::new(stores));
    let memory = format!("{BY_USER}[memory]\n");
    let locks = "[login]\nip = \"1000/h\"\naccount = \"1000/h\"\n";
    let case = |probe| move |key, policy, values| Case { key, policy, values, probe };
    let (at_start, logged, without) = (case(started), case(log), case(without_store));
    let (login, full) = (case(logins), case(full_table));
    vec![
        at_start(
            "rule.consistency",
            // Lint refuses other algorithms on an eventual rule.
            format!("{BY_USER}algorithm = \"fixed-window\"\n@\n"),
            &["consistency = \"strong\"", "consistency = \"eventual\""],
        ),
        at_start("rule.approximate", format!("{BY_USER}@\n"), &["approximate = false", "approximate = true"]),
        logged(
            "identity.log_identifiers",
            format!("[identity]\n@\n{}", BY_USER.replace("2/h", "1/h")),
            &["log_identifiers = false", "log_identifiers = true"],
        ),
        logged(
            "identity.secret",
            format!("[identity]\nlog_identifiers = true\n@\n{}", BY_USER.replace("2/h", "1/h")),
            &["", "secret = [\"user\"]"],
        ),
        case(recorded)(
            "identity.private_paths",
            "[identity]\n@\n".to_owned(),
            &["", "private_paths = [\"/invite/*\"]", "private_paths = [\"/**\"]"],
        ),
        logged("rule.log", format!("{}@\n", BY_USER.replace("2/h", "1/h")), &["log = \"sampled\"", "log = \"each\""]),
        without("rule.on_store_error", format!("{BY_USER}@\n[login]\n"), stores),
        without(
            "login.on_store_error",
            format!("{BY_USER}on_store_error = \"open\"\n[login]\naccount = \"2/h\"\n@\n"),
            stores,
        ),
        login("login.account", "[login]\nip = \"1000/h\"\n@\n".to_owned(), &["account = \"1/h\"", "account = \"2/h\""]),
        login("login.ip", "[login]\n@\n".to_owned(), &["ip = \"1/h\"", "ip = \"4/h\""]),
        login("login.locks.*", format!("{locks}@\n"), &["locks = { 2 = \"1min\" }", "locks = { 2 = \"5min\" }"]),
        login("login.ceiling", format!("{locks}locks = {{ 1 = \"1s\" }}\n@\n"), &["ceiling = 3", "ceiling = 5"]),
        Case {
            key: "tenants.*.spread",
            policy: format!("{NAMES}user_scope = \"tenant\"\n{BY_USER}[tenants.t1]\n@\n"),
            values: &["", "spread = 2", "spread = 8"],
            probe: partitions,
        },
        full("memory.max_keys", format!("{memory}@\n"), &["max_keys = 1000", "max_keys = 100000"]),
        full(
            "memory.when_full",
            format!("{memory}max_keys = 1000\n@\n"),
            &["when_full = \"fold\"", "when_full = \"shared\"", "when_full = \"deny\""],
        ),
    ]
}
