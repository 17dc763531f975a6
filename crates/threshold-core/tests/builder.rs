//! Policies built in code say the same as policy files, and print as them.

#![expect(clippy::disallowed_methods, reason = "presets, vectors and the schema are files, and a test may read them")]
#![expect(
    clippy::arithmetic_side_effects,
    clippy::indexing_slicing,
    clippy::panic,
    clippy::unwrap_used,
    reason = "helpers of tests may panic"
)]

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::time::Duration;

use proptest::prelude::*;
use serde_json::Value;
use threshold_core::case::{CaseFile, LedgerPlayer, Lines, play};
use threshold_core::ladder::StrikeMode;
use threshold_core::limit::{Algorithm, Anchor, Limit, LimitOptions};
use threshold_core::path::OddPaths;
use threshold_core::plan::Verb;
use threshold_core::policy::{
    Alert, AlertOn, CategoryBuilder, Consistency, Disclosure, EnvoyDomain, IdentityBuilder, JwtBuilder, LadderBuilder,
    Layer, Location, LogMode, LoginBuilder, Mode, OnMissing, OnStoreError, Per, PolicyBuilder, Rule, UserScope,
    WhenFull,
};
use threshold_core::{Policy, Span};

/// Everything that a policy means, and what lint says about it. Keys of tokens are left out of `Debug`, so they are compared
/// apart.
fn meaning(source: &str) -> (String, Option<String>, Vec<(&'static str, String)>) {
    let review = Policy::review(source, &|_| None);
    let findings = review.findings.iter().map(|finding| (finding.code, finding.message.clone())).collect();
    let policy = review.policy.unwrap_or_else(|| panic!("{findings:?}\n{source}"));
    let key = policy.identity().jwt.as_ref().and_then(|jwt| jwt.key.as_deref().map(str::to_owned));
    (format!("{policy:#?}"), key, findings)
}

/// Prints a policy file, and checks that what is printed means the same and prints the same.
#[track_caller]
fn printed(source: &str) -> String {
    let printed = PolicyBuilder::parse(source, &|_| None).unwrap().to_toml();
    let (mut before, mut after) = (meaning(source), meaning(&printed));
    // Findings come in the order of the file, and tables are printed before the rules.
    before.2.sort();
    after.2.sort();
    assert!(before == after, "{:?}\n{:?}\n{printed}", before.2, after.2);
    assert_eq!(PolicyBuilder::parse(&printed, &|_| None).unwrap().to_toml(), printed);
    printed
}

fn folder(name: &str) -> Vec<PathBuf> {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..").join(name);
    let mut files: Vec<PathBuf> = std::fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path()).collect();
    files.sort();
    files
}

/// Woken by leaving out `approximate` in the printer, and by printing rules in reverse.
#[test]
fn every_preset_prints_as_a_file_that_means_the_same() {
    let presets = folder("policies").into_iter().filter(|path| path.extension().is_some_and(|own| own == "toml"));
    let presets: Vec<PathBuf> = presets.collect();
    assert!(presets.len() >= 6, "{presets:?}");
    for preset in presets {
        printed(&std::fs::read_to_string(preset).unwrap());
    }
}

/// Replaces each policy in a vector by the file that it prints as, with the variables of its case filled in.
fn print_policies(value: &mut Value, env: &BTreeMap<String, String>, count: &mut usize) {
    match value {
        Value::Object(members) => {
            let own: Option<BTreeMap<String, String>> =
                members.get("env").and_then(|env| serde_json::from_value(env.clone()).ok());
            let env = own.as_ref().unwrap_or(env);
            for (name, member) in members.iter_mut() {
                let lines = (name == "policy").then(|| serde_json::from_value::<Lines>(member.clone()).ok()).flatten();
                match lines.map(|lines| PolicyBuilder::parse(&lines.text(), &|name| env.get(name).cloned())) {
                    Some(Ok(builder)) => {
                        *member = builder.to_toml().into();
                        *count += 1;
                    }
                    // A vector about a policy that cannot be read.
                    Some(Err(_)) => {}
                    None => print_policies(member, env, count),
                }
            }
        }
        Value::Array(items) => items.iter_mut().for_each(|item| print_policies(item, env, count)),
        _ => {}
    }
}

#[test]
fn printed_policies_decide_every_vector_as_written() {
    let mut policies = 0;
    for path in folder("conformance") {
        let mut vectors: Value = serde_json::from_str(&std::fs::read_to_string(&path).unwrap()).unwrap();
        print_policies(&mut vectors, &BTreeMap::new(), &mut policies);
        let file: CaseFile = serde_json::from_value(vectors).unwrap();
        let shared = file.policy.as_ref().map(Lines::text);
        for case in &file.cases {
            if let Err(failure) = play(case, shared.as_deref(), &mut LedgerPlayer::default()) {
                panic!("{}: {failure}", path.display());
            }
        }
    }
    assert!(policies >= 100, "{policies} policies were printed");
}

/// One policy that sets every key. Some exclude each other, so that it cannot be built.
fn everything() -> PolicyBuilder {
    let rule = Rule::builder("all")
        .per([Per::Ip, Per::IpPrefix(48), Per::Header("x-key".into()), Per::Fact("tool".into())])
        .limit("100/min")
        .algorithm(Algorithm::SlidingLog)
        .anchor(Anchor::First)
        .buckets(30)
        .burst(20)
        .ttl(Duration::from_secs(90))
        .cost("tokens")
        .count("status:401,403")
        .block_for("1h")
        .deny()
        .layer(Layer::Endpoint)
        .fallback()
        .on_missing(OnMissing::Skip)
        .ladder("mine")
        .strike(StrikeMode::Ignored)
        .ban_shared()
        .mode(Mode::Observe)
        .consistency(Consistency::Eventual)
        .approximate()
        .place("OBJECTS/messages:{hash}")
        .shards(4)
        .on_store_error(OnStoreError::Open)
        .disclosure(Disclosure::Minimal)
        .status(503)
        .message("It's too \"much\".")
        .body(r#"{"cost":"$5"}"#)
        .period("100 per minute")
        .log(LogMode::Each)
        .allow_finding("double-burst", "the burst is wanted")
        .method("PUT")
        .method("PATCH")
        .path("/a/*")
        .host("*.example.com")
        .category("ai")
        .tenant("a*")
        .tier("free")
        .fact("tool", "search")
        .fact("tool", "image")
        .fact("inbox no", "7");
    let identity = IdentityBuilder::new()
        .trusted_proxies(["10.0.0.0/8"])
        .client_ip("cf-connecting-ip")
        .client_ip("x-forwarded-for")
        .ipv6_prefix(56)
        .tenant("header:x-tenant")
        .user("claim:sub")
        .user_scope(UserScope::Tenant)
        .tier("cookie:tier")
        .default_tier("free")
        .secret_tenant()
        .secret_user()
        .log_identifiers()
        .odd_paths(OddPaths::Match)
        .private_paths(["/reset/*"])
        .jwt(JwtBuilder::new("HS256").key("0123456789abcdef").key_file("/key").iss("me").aud("you"));
    Policy::builder()
        .allow_finding("passed-on", "the proxy sets it")
        .identity(identity)
        .tier("free", [("requests", "100/min"), ("ai", "5/day")])
        .tenant("acme", [("tier", "free"), ("ai", "10/day")])
        .spread("acme", 8)
        .user("acme/eve", [("requests", "none")])
        .category(CategoryBuilder::new("ai").method("POST").path("/ai/**").host("ai.example.com"))
        .rule(rule)
        .ladder("mine", LadderBuilder::new().rungs(["warn", "ban 1h"]).decay(Span::HOUR).warning_cookie("warned"))
        .ladder("short", ["deny"])
        .login(
            LoginBuilder::new()
                .account("5/15min")
                .ip("20/5min")
                .lock(3, "1min")
                .lock(5, Duration::from_secs(300))
                .ceiling(50)
                .on_store_error(OnStoreError::Local)
                .account_place("OBJECTS/auth:user:{account}")
                .ip_place("OBJECTS/auth:ip:{ip}"),
        )
        .allow_list(["198.51.100.0/28"])
        .deny_list(["user:acme/mallory"])
        .deny_list(["tenant:closed"])
        .alert(AlertOn::EdgeBlocks, Alert { per: Span::MINUTE, warning: 100, critical: 1_000 })
        .alert(AlertOn::TenantBlocks, Alert { per: Span::HOUR, warning: 1, critical: 2 })
        .alert(AlertOn::UserBans, Alert { per: Span::DAY, warning: 3, critical: 4 })
        .alert(AlertOn::IpBlocks, Alert { per: Span::from_millis(1_500), warning: 5, critical: 6 })
        .answer_body("{\"code\":\"{code}\"}")
        .max_keys(5_000)
        .when_full(WhenFull::Shared)
        .envoy_descriptor("x-user", "user")
        .envoy_descriptor(":path", "fact:place")
        .envoy_domain("edge", EnvoyDomain { verb: Verb::Record, negative_hits: true, overrides: false })
        .envoy_replaces("all", ["all"])
}

const EVERYTHING: &str = r#"allow = ["passed-on: the proxy sets it"]

[identity]
trusted_proxies = ["10.0.0.0/8"]
client_ip = ["cf-connecting-ip", "x-forwarded-for"]
ipv6_prefix = 56
tenant = "header:x-tenant"
user = "claim:sub"
user_scope = "tenant"
tier = "cookie:tier"
default_tier = "free"
secret = ["tenant", "user"]
log_identifiers = true
odd_paths = "match"
private_paths = ["/reset/*"]

[identity.jwt]
alg = "HS256"
key = "0123456789abcdef"
key_file = "/key"
iss = "me"
aud = "you"

[tiers.free]
requests = "100/min"
ai = "5/day"

[tenants.acme]
tier = "free"
ai = "10/day"
spread = 8

[users."acme/eve"]
requests = "none"

[[category]]
name = "ai"
method = "POST"
path = "/ai/**"
host = "ai.example.com"

[ladders.mine]
decay = "h"
rungs = ["warn", "ban 1h"]
warning_cookie = "warned"

[ladders.short]
rungs = ["deny"]

[login]
account = "5/15min"
ip = "20/5min"
locks = { 3 = "1min", 5 = "5min" }
ceiling = 50
on_store_error = "local"
account_place = "OBJECTS/auth:user:{account}"
ip_place = "OBJECTS/auth:ip:{ip}"

[lists]
allow = ["198.51.100.0/28"]
deny = ["user:acme/mallory", "tenant:closed"]

[alerts]
edge_blocks = { per = "min", warning = 100, critical = 1000 }
tenant_blocks = { per = "h", warning = 1, critical = 2 }
user_bans = { per = "day", warning = 3, critical = 4 }
ip_blocks = { per = "1500ms", warning = 5, critical = 6 }

[answers]
body = '{"code":"{code}"}'

[memory]
max_keys = 5000
when_full = "shared"

[envoy.descriptors]
x-user = "user"
":path" = "fact:place"

[envoy.domains.edge]
verb = "record"
negative_hits = true
override = false

[envoy.replaces]
all = "all"

[[rule]]
name = "all"
layer = "endpoint"
match = { method = ["PUT", "PATCH"], path = "/a/*", host = "*.example.com", category = "ai", tenant = "a*", tier = "free", fact = { tool = ["search", "image"], "inbox no" = "7" } }
per = ["ip", "ip/48", "header:x-key", "fact:tool"]
limit = "100/min"
algorithm = "sliding-log"
anchor = "first"
buckets = 30
burst = 20
ttl = "90s"
cost = "tokens"
count = "status:401,403"
block_for = "1h"
deny = true
fallback = true
on_missing = "skip"
ladder = "mine"
strike = "ignored"
ban_shared = true
mode = "observe"
consistency = "eventual"
approximate = true
place = "OBJECTS/messages:{hash}"
shards = 4
on_store_error = "open"
disclosure = "minimal"
status = 503
message = "It's too \"much\"."
body = '{"cost":"$$5"}'
period = "100 per minute"
log = "each"
allow = ["double-burst: the burst is wanted"]
"#;

#[test]
fn every_method_sets_its_key() {
    assert_eq!(everything().to_toml(), EVERYTHING);
}

#[test]
fn an_alert_may_be_switched_off() {
    let policy = Policy::builder().no_alert(AlertOn::IpBlocks).no_alert(AlertOn::UserBans);
    assert_eq!(policy.to_toml(), "[alerts]\nuser_bans = \"off\"\nip_blocks = \"off\"\n");
    let policy = policy.build().unwrap();
    let in_force = AlertOn::ALL.map(|on| policy.alert(on));
    assert_eq!(in_force, [Some(AlertOn::EdgeBlocks.usual()), Some(AlertOn::TenantBlocks.usual()), None, None]);
}

/// Woken by taking `Rule::status` out of `everything`.
#[test]
fn every_key_of_a_policy_has_a_method() {
    let schema = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../policies/schema.json");
    let schema: Value = serde_json::from_str(&std::fs::read_to_string(schema).unwrap()).unwrap();
    let mut known = BTreeSet::new();
    schema_keys(&schema, &schema, &[], &mut known);
    assert!(known.len() > 60, "{known:?}");
    let printed: toml::Table = everything().to_toml().parse().unwrap();
    let mut set = BTreeSet::new();
    printed_keys(&toml::Value::Table(printed), &mut Vec::new(), &known, &mut set);
    assert_eq!(set, known);
}

/// Adds the path of every key in the schema that has a value of its own; `*` stands for a name that the author chooses.
fn schema_keys(schema: &Value, node: &Value, path: &[&str], keys: &mut BTreeSet<String>) {
    let node = match node["$ref"].as_str() {
        Some(name) => &schema["$defs"][name.rsplit('/').next().unwrap()],
        None => node,
    };
    let empty = serde_json::Map::new();
    let named = node["properties"].as_object().unwrap_or(&empty).iter().map(|(name, child)| (name.as_str(), child));
    let any = Some(&node["additionalProperties"]).filter(|node| node.is_object()).map(|node| ("*", node));
    let children: Vec<(&str, &Value)> = named.chain(any).collect();
    let same: Vec<&Value> = node["anyOf"].as_array().into_iter().flatten().chain(node.get("items")).collect();
    // A constant is another way to write the value of a key that has keys of its own: `ip_blocks = "off"`.
    if children.is_empty() && same.is_empty() && node["type"] != "null" && node.get("const").is_none() {
        keys.insert(path.join("."));
    }
    children.into_iter().for_each(|(name, child)| schema_keys(schema, child, &[path, &[name]].concat(), keys));
    same.into_iter().for_each(|child| schema_keys(schema, child, path, keys));
}

/// Adds the keys that a file sets, as the schema writes them.
fn printed_keys(value: &toml::Value, path: &mut Vec<String>, known: &BTreeSet<String>, keys: &mut BTreeSet<String>) {
    match value {
        toml::Value::Table(table) => {
            for (name, value) in table {
                path.push(name.clone());
                printed_keys(value, path, known, keys);
                path.pop();
            }
        }
        toml::Value::Array(items) if items.iter().all(toml::Value::is_table) => {
            items.iter().for_each(|item| printed_keys(item, path, known, keys));
        }
        _ => {
            let fits = |key: &&String| {
                let parts: Vec<&str> = key.split('.').collect();
                parts.len() == path.len() && parts.iter().zip(&*path).all(|(part, own)| *part == "*" || part == own)
            };
            // A key of its own before a name that the author chooses.
            let key = known.iter().filter(fits).min_by_key(|key| key.matches('*').count());
            keys.insert(key.unwrap_or_else(|| panic!("no key is {path:?}")).clone());
        }
    }
}

#[test]
fn a_limit_that_is_a_value_stays_that_value() {
    let check = |limit: Limit, toml: &str| {
        let builder = Policy::builder().rule(Rule::builder("r").per([Per::User]).limit(limit));
        let printed = builder.to_toml();
        assert_eq!(printed.strip_prefix("[[rule]]\nname = \"r\"\nper = [\"user\"]\n"), Some(toml));
        let policy = builder.build().unwrap();
        assert_eq!(policy.rules()[0].fixed_limit(), Some(&limit));
        let reread: Policy = printed.parse().unwrap();
        assert_eq!(reread.rules()[0].fixed_limit(), Some(&limit));
    };
    let limit = |text: &str, algorithm| LimitOptions::new().algorithm(algorithm).parse(text).unwrap();
    check(Limit::per_minute(100), "limit = \"100/min\"\nalgorithm = \"token-bucket\"\n");
    check(
        limit("9/day burst 5", Algorithm::TokenBucket),
        "limit = \"9/day\"\nalgorithm = \"token-bucket\"\nburst = 5\n",
    );
    check(
        limit("5/90s", Algorithm::FixedWindow),
        "limit = \"5/90s\"\nalgorithm = \"fixed-window\"\nanchor = \"clock\"\n",
    );
    check(limit("5/h", Algorithm::SlidingWindow), "limit = \"5/h\"\nalgorithm = \"sliding-window\"\nbuckets = 60\n");
    check(limit("5/h", Algorithm::SlidingLog), "limit = \"5/h\"\nalgorithm = \"sliding-log\"\n");
    check(limit("50/h", Algorithm::SlidingEstimate), "limit = \"50/h\"\nalgorithm = \"sliding-estimate\"\n");
    check(limit("5", Algorithm::Concurrency), "limit = \"5\"\nalgorithm = \"concurrency\"\nttl = \"min\"\n");
    check(Limit::never(), "limit = \"none\"\n");
}

/// A value that is set after a limit replaces what the limit said.
#[test]
fn a_later_call_wins() {
    let limit = Limit::per_minute(10).burst(5);
    let rule = Rule::builder("r").per([]).limit("1/s burst 1").burst(1).limit(limit).burst(3);
    let policy = Policy::builder().rule(rule).build().unwrap();
    assert_eq!(policy.rules()[0].notation().as_deref(), Some("10/min burst 3"));
}

#[test]
fn an_error_names_the_rule_or_the_table() {
    let check = |builder: PolicyBuilder, location: Location, display: &str| {
        let error = builder.build().unwrap_err();
        assert_eq!(error.location(), &location);
        assert_eq!(error.to_string(), display);
    };
    let rule = |name: &str, limit: &str| Rule::builder(name).per([Per::User]).limit(limit);
    check(
        Policy::builder().rule(rule("posts", "10/h")).rule(rule("likes", "10/fortnight")),
        Location::Rule("likes".into()),
        "rule \"likes\": unknown unit \"fortnight\"",
    );
    check(
        Policy::builder().ladder("mine", ["warm"]).rule(rule("posts", "10/h")),
        Location::Table("ladders.mine".into()),
        "[ladders.mine]: unknown term \"warm\"",
    );
    check(Policy::builder().allow_finding("", ""), Location::Policy, "policy: an allowance needs a code and a reason");
    check(
        Policy::builder().tier("a", [("requests", "1/h")]).tier("a", [("requests", "2/h")]),
        Location::Table("tiers.a".into()),
        "[tiers.a]: two tiers are called \"a\"",
    );
    check(
        Policy::builder().login(LoginBuilder::new().lock(3, "1min").lock(3, "2min")),
        Location::Table("login".into()),
        "[login]: two locks are called \"3\"",
    );
    let error = "[[rule]]\nname = 'r'\nper = []\nlimit = '1/x'\n".parse::<Policy>().unwrap_err();
    assert_eq!(error.location().to_string(), "line 4, column 12");
    let built = Policy::builder().rule(rule("a", "none/h")).rule(Rule::builder("b").per([])).build().unwrap_err();
    assert_eq!(built.findings().iter().map(|finding| finding.code).collect::<Vec<_>>(), ["bad-limit", "no-limit"]);
    assert!(built.to_string().ends_with(" (and 1 more)"), "{built}");
}

/// Warnings can be allowed in the rule that they are about, and nowhere else.
#[test]
fn an_allowance_covers_its_own_rule() {
    let codes =
        |builder: &PolicyBuilder| builder.review().findings.iter().map(|finding| finding.code).collect::<Vec<_>>();
    let rule = |name: &str| Rule::builder(name).per([Per::Fact("a".into())]).limit("0/min");
    let both = Policy::builder().rule(rule("a")).rule(rule("b"));
    assert_eq!(codes(&both), ["zero-limit", "zero-limit"]);
    let one = Policy::builder().rule(rule("a").allow_finding("zero-limit", "meant")).rule(rule("b"));
    assert_eq!(codes(&one), ["zero-limit"]);
    assert_eq!(one.review().findings[0].render("p", &one.to_toml()).lines().nth(2), Some("10 | limit = \"0/min\""));
}

#[test]
fn a_key_is_printed_and_not_debugged() {
    let jwt = JwtBuilder::new("HS256").key("a very secret key, of 32 bytes !");
    let builder = Policy::builder().identity(IdentityBuilder::new().user("claim:sub").jwt(jwt.clone()));
    assert!(builder.to_toml().contains("very secret"));
    assert!(!format!("{builder:?}{jwt:?}").contains("very secret"));
}

proptest! {
    /// Woken by not doubling dollar signs, and by not escaping backslashes.
    #[test]
    fn any_text_survives_printing(text in ".*", key in ".+", newline in any::<bool>()) {
        let text = if newline { text + "\n\u{7f}\u{202e}'\"" } else { text };
        let rule = Rule::builder("r").per([Per::User]).limit("1/h").message(&*text).fact(&key, "x");
        let builder = Policy::builder().rule(rule).tenant(&*key, [("requests", "5/h")]);
        let built = builder.clone().build().unwrap();
        let read: Policy = builder.to_toml().parse().unwrap();
        prop_assert_eq!(built.rules()[0].message.as_deref(), Some(&*text));
        prop_assert_eq!(&*built.rules()[0].matches.fact[0].0, &*key);
        prop_assert_eq!(format!("{built:?}"), format!("{read:?}"));
    }
}
