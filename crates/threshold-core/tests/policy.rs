//! What is said about a policy: each finding by its code, its place, and the text it points at.

use threshold_core::policy::{Policy, Severity};

/// Reviews a policy and says each finding as `code "text pointed at"`.
fn findings(source: &str) -> Vec<String> {
    let review = Policy::review(source, &|name| (name == "SET").then(|| "7".to_owned()));
    let usable = review.findings.iter().all(|finding| finding.severity != Severity::Error);
    assert_eq!(review.policy.is_some(), usable, "a policy without errors can be used, and no other");
    let pointed = |span: std::ops::Range<usize>| source.get(span).unwrap_or("?").lines().next().unwrap_or_default();
    // Most tests here are about one table, and need no rule for it.
    let findings = review.findings.iter().filter(|finding| finding.code != "no-rules");
    findings.map(|finding| format!("{} {}", finding.code, pointed(finding.span.clone()))).collect()
}

/// A policy of one rule with these lines added.
fn rule(lines: &str) -> String {
    format!("[[rule]]\nname = \"r\"\nper = [\"user\"]\n{lines}\n")
}

#[track_caller]
fn check(source: &str, expect: &[&str]) {
    assert_eq!(findings(source), expect, "{source}");
}

#[test]
fn a_plain_policy_is_clean() {
    check("", &[]);
    check(&rule("limit = \"10/h\""), &[]);
    check(&rule("limit = \"${SET}/${UNSET:-5}min\""), &[]);
    check(&rule("limit = \"10/h\"\nladder = \"graduated\""), &[]);
}

#[test]
fn unknown_keys_and_values_are_named_where_they_stand() {
    check(&rule("limt = \"10/h\""), &["unknown-key limt"]);
    check("[identty]\n", &["unknown-key identty"]);
    check(&rule("limit = \"10/h\"\nmode = \"observed\""), &["bad-value \"observed\""]);
    check(&rule("limit = \"10/h\"\nmatch = { paht = \"/x\" }"), &["unknown-key paht"]);
    check("[login]\nlocks = { three = \"1min\" }", &["bad-value three"]);
    check("[alerts]\nip_blocks = \"off\"", &[]);
    check("[alerts]\nip_blocks = \"on\"", &["bad-value \"on\""]);
    check("[alerts]\nip_blocks = false", &["syntax false"]);
    check("[alerts]\nip_blocks = { per = \"min\", warnig = 1, critical = 2 }", &["unknown-key warnig"]);
    check("rule = 5", &["syntax 5"]);
    check("[[rule]\n", &["syntax "]);
    check("a = \"\n", &["syntax "]);
}

#[test]
fn a_misspelt_key_is_answered_with_the_right_one() {
    let help = |source: &str| Policy::review(source, &|_| None).findings.remove(0).help;
    assert_eq!(help(&rule("limt = \"10/h\"")), "did you mean \"limit\"?");
    assert_eq!(help(&rule("limit = \"1/h\"\nalgorithm = \"sliding-windw\"")), "did you mean \"sliding-window\"?");
    assert!(help(&rule("quux = 1")).starts_with("known here: "));
}

/// A header that cannot exist is never found, and the proxy's address was charged for all its clients.
#[test]
fn what_names_no_header_is_no_source() {
    let identity = |line: &str| format!("[identity]\ntrusted_proxies = [\"10.0.0.0/8\"]\n{line}\n");
    for name in ["\"\"", "\"cf connecting ip\"", "\"cf-connecting-ip:\"", "\"x-forwarded-for, x-real-ip\"", "\"é\""] {
        check(&identity(&format!("client_ip = {name}")), &[&format!("bad-value {name}")]);
        check(&identity(&format!("client_ip = [\"peer\", {name}]")), &[&format!("bad-value {name}")]);
    }
    check(&identity("client_ip = []"), &["bad-value []"]);
    check(&identity("user = \"header:x user\""), &["bad-value \"header:x user\""]);
    check(&identity("user = \"cookie:s;id\""), &["bad-value \"cookie:s;id\""]);
    check(&identity("user = \"cookie:connect.sid\""), &["passed-on \"cookie:connect.sid\""]);
}

#[test]
fn a_limit_is_pointed_at_by_the_character() {
    check(&rule("limit = \"10 per fortnight\""), &["bad-limit per"]);
    check(&rule("limit = \"10/fortnight\""), &["bad-limit fortnight"]);
    check("[tiers.free]\nrequests = \"many\"", &["bad-limit many"]);
    // After escapes or variables the characters no longer stand where the text does, so the whole string is marked.
    check(&rule("limit = \"10\\u002Ffortnight\""), &["bad-limit \"10\\u002Ffortnight\""]);
    check(&rule("limit = \"${SET}/fortnight\""), &["bad-limit \"${SET}/fortnight\""]);
    check(&rule("limit = \"10/h\"\nblock_for = \"a while\""), &["bad-time a"]);
    check("[ladders.mine]\nrungs = [\"warn\", \"cooldown soon\"]", &["bad-rung soon"]);
}

#[test]
fn impossible_limits_are_errors() {
    check(&rule("limit = \"2000/h\"\nalgorithm = \"sliding-log\""), &["impossible-limit \"2000/h\""]);
    check(&rule("limit = \"10\""), &["impossible-limit \"10\""]);
    check(&rule("limit = \"10/h\"\nalgorithm = \"concurrency\""), &["impossible-limit \"10/h\""]);
    check(&rule("limit = \"10/h burst 5\""), &["impossible-limit \"10/h burst 5\""]);
    check(&rule("limit = \"10/ms\"\nalgorithm = \"sliding-window\"\nbuckets = 5000"), &["impossible-limit \"10/ms\""]);
    check(&rule("limit = \"10/h\"\nalgorithm = \"sliding-log\"\nanchor = \"first\""), &["bad-value \"first\""]);
    check(&rule(""), &["no-limit \"r\""]);
    check(&rule("limit = \"10/h\"\ndeny = true"), &["bad-value \"10/h\""]);
    check(&rule("deny = true"), &[]);
    check("[[rule]]\nname = \"r\"\nlimit = \"1/h\"", &["no-per \"r\""]);
    check(&rule("limit = \"1MB/h\"\ncost = \"tokens\""), &["impossible-limit \"1MB/h\""]);
    let tier = "[tiers.free]\nrequests = \"5000/h\"\n";
    check(
        &format!("{tier}{}", rule("limit = \"tier\"\nalgorithm = \"sliding-log\"")),
        &["impossible-limit \"5000/h\""],
    );
}

/// `{trace_id}` once reached clients as it stands, because nothing said that there is no such placeholder.
#[test]
fn a_body_has_no_unknown_placeholders() {
    check(&rule("limit = \"1/h\"\nbody = 'id {trace_id}'"), &["unknown-placeholder {trace_id}"]);
    check("[answers]\nbody = '{\"id\":\"{trace}\"}'\n", &["unknown-placeholder {trace}"]);
    let review = Policy::review("[answers]\nbody = '{x}'\n", &|_| None);
    let help = &review.findings[0].help;
    assert_eq!(help, "known: {code}, {message}, {traceId}, {status}, {rule}, {limit}, {retryAfter}");
    check(&rule("limit = \"1/h\"\nbody = '{\"a\":{},\"b\":\"{traceId} {0}\"}'"), &[]);
}

/// `limit = 100` was "invalid type: integer `100`, expected a string", which does not say that the time is missing.
#[test]
fn a_number_without_quotes_is_explained() {
    let found = |text: &str| {
        let finding = Policy::review(text, &|_| None).findings.remove(0);
        assert_eq!(finding.code, "syntax");
        (finding.message, finding.help)
    };
    let check = |text: &str, number: &str, help: &str| {
        assert_eq!(found(text), (format!("expected a string, found the number {number}"), help.to_owned()), "{text}");
    };
    check(&rule("limit = 100"), "100", "write how many in which time: limit = \"100/min\"");
    check("[tiers.free]\nrequests = 50", "50", "write how many in which time: requests = \"50/min\"");
    check("[login]\naccount=5", "5", "write how many in which time: account = \"5/min\"");
    check(&rule("limit = \"5/h\"\nblock_for = 60"), "60", "write the unit: block_for = \"60s\"");
    check(&rule("limit = \"5/h\"\nmatch = { path = 7 }"), "7", "write it in quotes: path = \"7\"");
    // What stands in [identity.jwt] may be the key.
    let (message, _) = found("[identity.jwt]\nalg = \"HS256\"\nkey = 12345\n");
    assert_eq!(message, "a value of [identity.jwt] has the wrong type");
}

/// Unknown tiers and categories were reported without the ones that there are.
#[test]
fn unknown_names_are_reported_with_the_known_ones() {
    let help = |text: &str, code: &str| {
        let review = Policy::review(text, &|_| None);
        review.findings.into_iter().find(|finding| finding.code == code).unwrap().help
    };
    let tiers = "[tiers.free]\nrequests = \"1/h\"\n[tiers.gold]\nrequests = \"9/h\"\n";
    let default = format!("[identity]\ndefault_tier = \"fre\"\n{tiers}");
    assert_eq!(help(&default, "unknown-tier"), "known: free, gold; or add [tiers.fre]");
    let tenant = format!("{tiers}[tenants.acme]\ntier = \"golden\"\n");
    assert_eq!(help(&tenant, "unknown-tier"), "known: free, gold; or add [tiers.golden]");
    assert_eq!(help("[identity]\ndefault_tier = \"free\"\n", "unknown-tier"), "add [tiers.free]");
    let category = "[[category]]\nname = \"ai\"\npath = \"/ai\"\n";
    let text = format!("{category}{}", rule("limit = \"1/h\"\nmatch = { category = \"aj\" }"));
    assert_eq!(help(&text, "never-matches"), "known: ai, requests; or add it as [[category]]");
}

#[test]
fn names_are_unique() {
    check(&format!("{}{}", rule("limit = \"1/h\""), rule("limit = \"2/h\"")), &["duplicate-name \"r\""]);
    let twice = "[[category]]\nname = \"a\"\npath = \"/a\"\n[[category]]\nname = \"a\"\npath = \"/b\"\n";
    check(twice, &["duplicate-name \"a\""]);
    check("[tiers.a]\nrequests = \"1/h\"\n[tiers.a]\n", &["syntax a"]);
}

#[test]
fn rules_that_are_never_met_are_found() {
    let with = |matches: &str| rule(&format!("limit = \"1/h\"\nmatch = {{ {matches} }}"));
    check(&with("category = \"ai\""), &["never-matches \"ai\""]);
    check(&with("tier = \"gold\""), &["never-matches \"gold\""]);
    check(&with("method = []"), &["never-matches []"]);
    check(&with("path = \"/a/../b\""), &["bad-pattern \"/a/../b\""]);
    check(&with("path = \"api\""), &["bad-pattern \"api\""]);
    for method in ["", "POST PUT", "POST,PUT", " POST", "POST:/api", "GET\u{202e}"] {
        check(&with(&format!("method = [\"PUT\", \"{method}\"]")), &[&format!("bad-method \"{method}\"")]);
    }
    check("[[category]]\nname = \"a\"\nmethod = \"GET /\"\n", &["bad-method \"GET /\""]);
    // Meant as "every method", and matched by none.
    check(&with("method = \"*\""), &["bad-method \"*\""]);
    check(&with("method = [\"post\", \"M-SEARCH\"]"), &[]);
    let shadowed = format!(
        "{}\n[[rule]]\nname = \"f\"\nper = [\"user\"]\nlimit = \"1/h\"\nfallback = true",
        rule("limit = \"1/h\"")
    );
    check(&shadowed, &["never-matches true"]);
}

#[test]
fn tiers_that_leave_something_open_are_found() {
    let tier = |body: &str| format!("{body}\n{}", rule("limit = \"tier\""));
    let free = "[identity]\ndefault_tier = \"free\"\n[tiers.free]\nrequests = \"1/h\"\n";
    check(&tier(""), &["no-tiers \"r\""]);
    check(&tier(free), &[]);
    let ai = &format!("{free}[[category]]\nname = \"ai\"\npath = \"/ai/**\"\n");
    check(&tier(ai), &["tier-without-category free"]);
    check(&tier(&format!("{free}reqests = \"1/h\"")), &["unknown-category reqests"]);
    let bytes = "[identity]\ndefault_tier = \"free\"\n[tiers.free]\nrequests = \"1MB/h\"\n[[rule]]\nname = \"r\"\nper = [\"user\"]\nlimit = \"tier\"\n";
    check(bytes, &[]);
    check(&format!("{bytes}ladder = \"graduated\""), &["ladder-warns \"r\""]);
    check(&format!("{bytes}cost = \"tokens\""), &["impossible-limit \"1MB/h\""]);
    check("[identity]\ndefault_tier = \"gold\"", &["unknown-tier \"gold\""]);
    check("[tenants.acme]\ntier = \"gold\"", &["unknown-tier \"gold\""]);
    // A table that only spreads a tenant is no tier.
    check(&format!("{SCOPED}{}", tier("[tenants.acme]\nspread = 8")), &["no-tiers \"r\""]);
}

const SCOPED: &str = "[identity]\nuser_scope = \"tenant\"\n";

#[test]
fn a_spread_that_does_nothing_is_refused() {
    let spread = |value: &str| format!("[tenants.acme]\nspread = {value}\n{}", rule("limit = \"1/h\""));
    for value in ["1", "8", "1024"] {
        check(&format!("{SCOPED}{}", spread(value)), &[]);
    }
    for value in ["0", "1025"] {
        check(&format!("{SCOPED}{}", spread(value)), &[&format!("bad-value {value}")]);
    }
    // Without the scope each user is in a partition of its own already.
    check(&spread("8"), &["bad-value 8"]);
}

#[test]
fn a_ladder_needs_an_identity_that_cannot_be_forged() {
    let ladder = |per: &str, more: &str| {
        format!("[[rule]]\nname = \"r\"\nper = {per}\nlimit = \"10/h\"\nladder = \"graduated\"\n{more}\n")
    };
    check(&ladder("[]", ""), &["ladder-for-nobody \"graduated\""]);
    check(&ladder("[\"endpoint\"]", ""), &["ladder-for-nobody \"graduated\""]);
    check(&ladder("[\"header:x-key\"]", ""), &["unverified-ladder \"graduated\""]);
    check(
        &format!("[identity]\nuser = \"path:/u/{{id}}/**\"\n{}", ladder("[\"user\"]", "")),
        &["unverified-ladder \"graduated\""],
    );
    check(&ladder("[\"ip\"]", ""), &["shared-ban \"graduated\""]);
    check(&ladder("[\"tenant\"]", "ban_shared = true"), &["shared-ladder \"graduated\""]);
    check(&ladder("[\"tenant\"]", "ban_shared = true\nallow = [\"shared-ladder: one person each\"]"), &[]);
    check(&ladder("[\"user\"]", "cost = \"tokens\""), &["ladder-warns \"graduated\""]);
    let soft = "[ladders.soft]\nrungs = [\"warn\"]\n[[rule]]\nname = \"r\"\nper = [\"user\"]\nlimit = \"1/h\"\nladder = \"soft\"\n";
    check(soft, &[]);
    check(&format!("{soft}strike = \"request\""), &["never-denies \"soft\""]);
    check(&rule("limit = \"1/h\"\nladder = \"steep\""), &["unknown-ladder \"steep\""]);
    check(&rule("limit = \"1/h\"\nstrike = \"request\""), &["no-ladder \"request\""]);
    check("[ladders.mine]\ndecay = \"1h\"", &["bad-value mine"]);
}

#[test]
fn lists_cover_no_more_than_is_meant() {
    check("[lists]\ndeny = [\"203.0.113.0/24\", \"user:u1\", \"tenant:t1\"]", &[]);
    check("[lists]\ndeny = [\"0.0.0.0/0\"]", &["list-too-wide \"0.0.0.0/0\""]);
    check("[lists]\nallow = [\"::/0\"]", &["list-too-wide \"::/0\""]);
    check("[lists]\ndeny = [\"127.0.0.0/8\"]", &["list-too-wide \"127.0.0.0/8\""]);
    check("[lists]\ndeny = [\"::ffff:127.0.0.1\"]", &["list-too-wide \"::ffff:127.0.0.1\""]);
    let proxy = "[identity]\ntrusted_proxies = [\"10.0.0.5\"]\n[lists]\ndeny = [\"10.0.0.0/8\"]";
    check(proxy, &["list-too-wide \"10.0.0.0/8\""]);
    check("[lists]\ndeny = [\"bob\"]", &["bad-value \"bob\""]);
}

#[test]
fn identity_says_where_names_come_from() {
    check("[identity]\ntrusted_proxies = [\"10.0.0.0/8\"]\nuser = \"header:x-user\"", &["passed-on \"header:x-user\""]);
    check("[identity]\nuser = \"header:x-user\"", &["never-believed \"header:x-user\""]);
    check("[identity]\nuser = \"claim:sub\"", &["no-jwt \"claim:sub\""]);
    let secret = "0123456789abcdef0123456789abcdef";
    let jwt =
        |alg: &str, key: &str| format!("[identity]\nuser = \"claim:sub\"\n[identity.jwt]\nalg = \"{alg}\"\n{key}");
    check(&jwt("HS256", &format!("key = \"{secret}\"")), &[]);
    check(&jwt("ES256", "key_file = \"/k\""), &[]);
    check(&jwt("HS256", "key = \"${SET}\""), &["bad-key \"${SET}\""]);
    check(&jwt("HS384", &format!("key = \"{secret}\"")), &[&format!("bad-key \"{secret}\"")]);
    check(&jwt("RS256", &format!("key = \"{secret}\"")), &[&format!("bad-key \"{secret}\"")]);
    let pem = |what: &str| format!("key = '-----BEGIN {what} KEY-----{secret}-----END {what} KEY-----'");
    check(&jwt("RS256", &pem("PUBLIC")), &[]);
    for (alg, what) in [("HS256", "PUBLIC"), ("HS256", "PRIVATE"), ("RS256", "PRIVATE"), ("RS256", "RSA PRIVATE")] {
        let found = findings(&jwt(alg, &pem(what)));
        assert!(matches!(&found[..], [one] if one.starts_with("bad-key ")), "{alg} {what}: {found:?}");
    }
    check(&format!("[identity.jwt]\nalg = \"HS256\"\nkey = \"{secret}\""), &["unused-jwt \"HS256\""]);
    check("[identity]\nuser = \"claim:sub\"\n[identity.jwt]\nalg = \"none\"\nkey = \"k\"", &["bad-value \"none\""]);
    check("[identity]\nuser = \"x-user\"", &["bad-value \"x-user\""]);
    check("[identity]\ntenant = \"host:example.com\"", &["bad-value \"host:example.com\""]);
    check("[identity]\nprivate_paths = [\"/reset\"]", &["bad-value \"/reset\""]);
    check("[identity]\nprivate_paths = [\"reset/*\"]", &["bad-pattern \"reset/*\""]);
    check("[identity]\ntrusted_proxies = [\"0.0.0.0/0\"]", &["trusts-everyone \"0.0.0.0/0\""]);
    check("[identity]\ntrusted_proxies = [\"proxy\"]", &["bad-value \"proxy\""]);
    check("[identity]\nipv6_prefix = 8", &["bad-value 8"]);
}

#[test]
fn variables_are_named_when_they_cannot_be_filled_in() {
    check(&rule("limit = \"${NONE}/h\""), &["bad-variable \"${NONE}/h\""]);
    check(&rule("limit = \"${NONE:-ten}/h\""), &["bad-variable \"${NONE:-ten}/h\""]);
    check(&rule("limit = \"1/h\"\nmessage = \"costs $5\""), &["bad-variable \"costs $5\""]);
    check(&rule("limit = \"1/h\"\nmessage = \"costs $$5, ${NONE:-or more}\""), &[]);
}

/// Everything that a policy can say, each value in a line of its own.
const EVERY_TEXT: &str = r#"
allow = ["uncovered-path: x"]
[identity]
trusted_proxies = ["10.0.0.0/8"]
client_ip = "x-forwarded-for"
tenant = "host:{tenant}.example.com"
user = "claim:sub"
tier = "header:x-tier"
default_tier = "free"
secret = ["user"]
ipv6_prefix = 64
[identity.jwt]
alg = "HS256"
key = "0123456789abcdef0123456789abcdef"
iss = "https://id.example.com"
aud = "api"
[tiers.free]
requests = "100/min"
ai = "5/day"
[tenants.acme]
tier = "free"
requests = "200/min"
[users.u1]
requests = "300/min"
[[category]]
name = "ai"
path = "/ai/**"
method = "POST"
host = "*.example.com"
[[rule]]
name = "first"
layer = "tenant"
per = ["tenant", "header:x-key"]
limit = "tier"
[[rule]]
name = "second"
layer = "user"
per = ["user"]
match.method = ["POST"]
match.path = "/api/posts"
match.host = "api.example.com"
match.category = "ai"
match.tenant = "acme"
match.tier = "free"
match.fact.inbox = "7"
limit = "10/h"
algorithm = "sliding-log"
block_for = "60s"
ladder = "mine"
strike = "window"
mode = "enforce"
on_missing = "skip"
on_store_error = "closed"
consistency = "strong"
message = "slow down"
allow = ["cannot-bind: x"]
[[rule]]
name = "third"
per = []
limit = "5"
algorithm = "concurrency"
ttl = "1min"
[[rule]]
name = "fourth"
per = ["ip"]
limit = "10/h"
algorithm = "fixed-window"
anchor = "first"
count = "status:401"
[ladders.mine]
decay = "24h"
rungs = ["deny", "ban 24h"]
[login]
account = "5/15min"
ip = "20/5min"
locks.3 = "1min"
ceiling = 100
[alerts]
edge_blocks.per = "min"
edge_blocks.warning = 100
edge_blocks.critical = 1000
[lists]
allow = ["198.51.100.0/24"]
deny = ["user:mallory"]
[memory]
max_keys = 1000
when_full = "fold"
"#;

/// A secret that landed in the wrong variable is in no message, in whatever place of the policy it landed.
///
/// Broken once by: leaving out `without_values` in `review`.
#[test]
fn no_message_repeats_the_value_of_a_variable() {
    let review = Policy::review(EVERY_TEXT, &|_| None);
    assert!(review.policy.is_some(), "{:?}", review.findings);
    let mut refused = 0;
    for secret in ["hunter2 swordfish", "hunter2:swordfish", "/hunter2/{swordfish", "HUNTER2", "hunter2", "claim:"] {
        for (number, line) in EVERY_TEXT.lines().enumerate().filter(|(_, line)| line.contains('=')) {
            let (key, value) = line.split_once('=').unwrap_or_default();
            let value = if value.contains('[') { "[\"${SECRET}\"]" } else { "\"${SECRET}\"" };
            let mut lines: Vec<String> = EVERY_TEXT.lines().map(str::to_owned).collect();
            lines[number] = format!("{key}= {value}");
            let source = lines.join("\n");
            let review = Policy::review(&source, &|_| Some(secret.to_owned()));
            refused += usize::from(review.policy.is_none());
            let mut told: String = review.findings.iter().map(|finding| finding.render("p.toml", &source)).collect();
            if let Err(error) = Policy::parse(&source, &|_| Some(secret.to_owned())) {
                told.push_str(&error.to_string());
            }
            let lower = told.to_lowercase();
            assert!(!lower.contains("hunter2") && !lower.contains("swordfish"), "{line}\n{told}");
        }
    }
    assert!(refused > 200, "{refused} of these policies cannot be used");
}

#[test]
fn a_message_names_the_variable_in_the_place_of_its_value() {
    let told = |source: &str| {
        let review = Policy::review(source, &|_| Some("swordfish".to_owned()));
        review.findings.into_iter().map(|finding| finding.message).collect::<Vec<_>>()
    };
    let proxies = "[identity]\ntrusted_proxies = [\"${PROXY}\"]";
    assert_eq!(told(proxies), ["a value that the key does not accept: \"${PROXY}\""]);
    let twice = format!("{0}{0}", rule("limit = \"1/h\"").replace("\"r\"", "\"${NAME}-posts\""));
    assert_eq!(told(&twice), ["two rules, categories, tiers or ladders with the same name: \"${NAME}-posts\""]);
    let met = format!("{}match = {{ category = \"x\" }}", twice.split("[[rule]]").nth(1).unwrap_or_default());
    assert_eq!(told(&format!("[[rule]]{met}")), ["this rule never matches: no category is called \"x\""]);
}

/// A value is not recognised in a message that writes it in another way, as addresses and patterns are: such a message
/// repeats none.
#[test]
fn a_value_that_is_normalized_is_not_repeated() {
    let told = |source: &str, value: &str| {
        let review = Policy::review(source, &|_| Some(value.to_owned()));
        let told: Vec<String> = review.findings.iter().map(|finding| finding.render("p.toml", source)).collect();
        assert!(!told.is_empty(), "{source}");
        told.concat()
    };
    let lists = "[identity]\ntrusted_proxies = [\"${PROXY}\"]\n[lists]\ndeny = [\"2001:db8::/32\"]\n";
    let covers = told(lists, "2001:0DB8:0::5");
    assert!(covers.contains("a trusted proxy") && !covers.contains("::5"), "{covers}");
    let script = rule("limit = \"1/h\"\nmatch = { path = \"/${SCRIPT}.php\" }");
    let dodged = told(&script, "%48unter2");
    assert!(dodged.contains("path-info") && !dodged.contains("unter2"), "{dodged}");
}

/// The lines of `[identity.jwt]` hold a key, and are not shown, however they are written or broken.
///
/// Broken once by: showing every line in `Finding::render`.
#[test]
fn lines_of_the_key_are_not_shown() {
    for source in [
        "[identity.jwt]\nalg = \"HS256\"\nkey = \"swordfish",
        "[identity.jwt]\nalg = \"HS256\"\nkey = swordfish\n[[rule]]\n",
        "[identity.jwt]\nalg = \"swordfish\"\nkey = \"swordfish\"\n",
        "[identity.jwt]\nalg = \"HS256\"\nkeys = \"swordfish\"\n",
        "[identity.jwt]\nalg = \"HS256\"\nswordfish = 1\n",
        "[identity.jwt]\nalg = \"HS256\"\nkey = \"pass${swordfish!}\"\n",
        "[identity.jwt]\nalg = \"HS256\"\nkey = \"pass$swordfish\"\n",
        "[identity.jwt]\nalg = \"HS256\"\nkey = [\"swordfish\"]\n",
        "[identity.jwt]\nalg = \"HS256\"\nkey = \"\"\"\n[swordfish\nswordfish ${\n\"\"\"\n",
        "[identity.jwt]\nalg = \"HS256\"\nkey = \"\"\"\nswordfish\n[[rule]]\nswordfish",
        "[ identity . \"jwt\" ]\nalg = \"HS256\"\nkey = 'swordfish\n",
        "[identity.jwt\nkey = \"swordfish\"\nalg = \"swordfish\n",
        "[identity]\njwt = { alg = \"HS256\", key = swordfish }\n",
        "[identity]\njwt = { alg = \"HS256\",\n  key = swordfish }\n",
        "[identity]\njwt.key = \"swordfish\n",
        "identity.jwt.alg = \"swordfish\"\n",
        "identity = { jwt = { alg = \"swordfish\" } }\n",
        "[identity]\nkey = \"swordfish\"\n",
        "key = \"swordfish\"\n",
    ] {
        let review = Policy::review(source, &|_| None);
        let told: String = review.findings.iter().map(|finding| finding.render("p.toml", source)).collect();
        assert!(told.contains("error["), "{source}\n{told}");
        assert!(!told.contains("swordfish"), "{source}\n{told}");
        assert!(!Policy::parse(source, &|_| None).unwrap_err().to_string().contains("swordfish"), "{source}");
    }
    // Other lines are.
    let source = "[identity.jwt]\nalg = \"HS256\"\nkey = \"k\"\n[[rule]]\nname = \"jwt\"\nper = \"x-jwt\"\n";
    let told: String =
        Policy::review(source, &|_| None).findings.iter().map(|finding| finding.render("p.toml", source)).collect();
    assert!(told.contains("6 | per = \"x-jwt\""), "{told}");
}

/// Each of 200,000 strings takes in a variable of 64 KiB: 13 GB, were there no bound.
#[test]
fn long_variables_do_not_fill_the_memory() {
    let list = "\"${LONG}\",".repeat(200_000);
    let source = format!("[lists]\ndeny = [\n{list}]\n");
    let review = Policy::review(&source, &|_| Some("x".repeat(64 << 10)));
    let [finding] = review.findings.as_slice() else { panic!("{} findings", review.findings.len()) };
    assert_eq!((finding.code, finding.place(&source).0), ("bad-variable", 3));
    assert!(finding.message.contains("LONG") && finding.help.contains("4194304"), "{finding:?}");
}

#[test]
fn no_request_can_meet_more_rules_than_a_plan_holds() {
    let many: String =
        (0..17).map(|n| format!("[[rule]]\nname = \"r{n}\"\nper = [\"user\"]\nlimit = \"{}/h\"\n", n + 1)).collect();
    check(&many, &["too-many-meet \"r0\""]);
    // Rules about different facts, as those of Envoy's descriptors are, and about different values of one.
    for fact in ["f{n} = \"**\"", "f = \"{n}\""] {
        let rule = |n: usize| {
            let fact = fact.replace("{n}", &n.to_string());
            format!("[[rule]]\nname = \"r{n}\"\nmatch = {{ fact = {{ {fact} }} }}\nper = [\"ip\"]\nlimit = \"1/h\"\n")
        };
        check(&(0..17).map(rule).collect::<String>(), &[]);
    }
    let apart: String = (0..40)
        .map(|n| {
            format!("[[rule]]\nname = \"r{n}\"\nper = [\"user\"]\nmatch = {{ path = \"/{n}\" }}\nlimit = \"1/h\"\n")
        })
        .collect();
    check(&apart, &[]);
}

#[test]
fn a_finding_reads_as_a_compiler_would_say_it() {
    let source = "[[rule]]\nname = \"r\"\nper = [\"user\"]\n\tlimit = \"10 per fortnight\"\n";
    let finding = Policy::review(source, &|_| None).findings.remove(0);
    let expect = "p.toml:4:14: error[bad-limit]: expected \"/\" and a period, found \"per\"\n  \
                  |\n4 | \tlimit = \"10 per fortnight\"\n  | \t            ^^^\n  \
                  = write a slash for \"per\", as in \"10/h\"\n";
    assert_eq!(finding.render("p.toml", source), expect);
}

/// A developer called `Policy::parse(…).unwrap()` and read a list of structs with byte offsets, or one line without the text
/// that it was about. An error prints as `lint` does, in `Display` and in `Debug`.
#[test]
fn an_error_prints_as_lint_does() {
    let source = "[[rule]]\nname = \"r\"\nper = [\"nobody\"]\n\tlimit = \"10 per fortnight\"\n";
    let rendered = |file: &str| -> String {
        Policy::review(source, &|_| None).findings.iter().map(|finding| finding.render(file, source)).collect()
    };
    let error = Policy::parse(source, &|_| None).unwrap_err();
    assert_eq!(error.findings().len(), 2);
    assert_eq!(error.to_string(), rendered("policy").trim_end());
    assert!(error.to_string().starts_with("policy:3:"), "{error}");
    assert_eq!(format!("{error:?}"), error.to_string());
}

/// `Policy::parse` of a file that is no policy at all must not print thousands of lines.
#[test]
fn an_error_prints_ten_findings_and_counts_the_rest() {
    let rules = |count: usize| "[[rule]]\nname = 'r'\nper = ['nobody']\nlimit = '1/h'\n".repeat(count);
    let of = |count: usize| Policy::parse(&rules(count), &|_| None).unwrap_err();
    let (error, found) = (of(30).to_string(), of(30).findings().len());
    assert_eq!(error.matches("error[").count(), 10);
    assert!(error.ends_with(&format!("\nand {} more errors", found - 10)), "{error}");
}

#[test]
fn everything_wrong_is_said_at_once_and_in_order() {
    let source = "[lists]\ndeny = [\"x\"]\n[[rule]]\nname = \"r\"\nper = [\"nobody\"]\nlimit = \"1/eon\"\n";
    check(source, &["bad-value \"x\"", "bad-value \"nobody\"", "bad-limit eon"]);
}

/// The editors' schema is generated from the types the file is read into. After a change of those, run this test with
/// `UPDATE_SCHEMA=1` to regenerate it.
#[cfg(feature = "schema")]
#[test]
#[expect(clippy::disallowed_methods, reason = "the schema is a file, and a test may read it")]
fn the_schema_is_fresh() {
    let path = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("../../policies/schema.json");
    let fresh = threshold_core::policy::schema_json();
    if std::env::var_os("UPDATE_SCHEMA").is_some() {
        std::fs::write(&path, &fresh).unwrap();
    }
    let written = std::fs::read_to_string(&path).unwrap_or_default();
    assert!(written == fresh, "policies/schema.json is not what the types say; run with UPDATE_SCHEMA=1");
}
