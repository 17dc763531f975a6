//! What a reviewer would say of a policy: each finding on the shortest policy that deserves it, and on none that does not.

#![expect(clippy::unwrap_used, reason = "a test that cannot go on should say so loudly, on the line where it stops")]

use threshold_core::Policy;
use threshold_core::policy::{CODES, Place, ReviewWork, Severity};

/// The codes that are found, each with the text it points at.
#[track_caller]
fn check(source: &str, expect: &[&str]) {
    let review = Policy::review(source, &|_| None);
    let found: Vec<String> = review
        .findings
        .iter()
        .map(|finding| format!("{} {}", finding.code, source.get(finding.span.clone()).unwrap()))
        .collect();
    assert_eq!(found, expect, "\n{source}");
}

fn rule(name: &str, per: &str, rest: &str) -> String {
    format!("[[rule]]\nname = \"{name}\"\nper = {per}\n{rest}\n")
}

fn by_address(limit: &str) -> String {
    rule("address", "[\"ip\"]", &format!("limit = \"{limit}\""))
}

#[test]
fn a_key_that_the_client_chooses_needs_an_address_beside_it() {
    let key = rule("key", "[\"header:x-key\"]", "limit = \"10/min\"");
    check(&key, &["client-chosen-key \"key\""]);
    check(&rule("key", "[\"header:x-key\", \"ip\"]", "limit = \"10/min\""), &[]);
    check(&(by_address("5/min") + &key), &[]);
    let elsewhere = rule("address", "[\"ip\"]", "limit = \"5/min\"\nmatch = { path = \"/a\" }");
    check(&(elsewhere + &key), &["client-chosen-key \"key\""]);
    check(&(by_address("5/min") + "mode = \"observe\"\n" + &key), &["client-chosen-key \"key\""]);
    let identity = "[identity]\ntenant = \"path:/t/{tenant}/**\"\n";
    check(&format!("{identity}{}", rule("t", "[\"tenant\"]", "limit = \"10/min\"")), &["client-chosen-key \"t\""]);
    check(&rule("t", "[\"tenant\"]", "limit = \"10/min\""), &[]);
    check(&rule("e", "[\"endpoint\"]", "limit = \"10/min\""), &["client-chosen-key \"e\""]);
    check(&rule("e", "[\"endpoint\"]", "limit = \"10/min\"\nmatch = { path = \"/a/*\" }"), &[]);
    check(&rule("e", "[\"host\"]", "limit = \"1/min\"\nallow = [\"client-chosen-key: one host\"]"), &[]);
}

#[test]
fn a_header_that_a_proxy_passes_on_is_doubted() {
    let identity =
        |rest: &str| format!("[identity]\ntrusted_proxies = [\"10.0.0.0/8\"]\n{rest}\n{}", by_address("5/min"));
    check(&identity("client_ip = \"x-forwarded-for\""), &[]);
    check(&identity("client_ip = \"forwarded\""), &["passed-on \"forwarded\""]);
    let both = "client_ip = [\"CF-Connecting-IP\", \"x-forwarded-for\"]";
    check(&identity(both), &["passed-on \"CF-Connecting-IP\""]);
    let named = |line: &str| identity(&format!("client_ip = \"x-forwarded-for\"\n{line}"));
    check(&named("user = \"header:x-user\""), &["passed-on \"header:x-user\""]);
    check(&named("tenant = \"cookie:shop\""), &["passed-on \"cookie:shop\""]);
    check(&named("tier = \"header:x-tier\""), &["passed-on \"header:x-tier\""]);
    check(&named("tenant = \"host:{tenant}.example.com\""), &[]);
    let meant = format!("allow = [\"passed-on: the gateway removes it\"]\n{}", named("user = \"header:x-user\""));
    check(&meant, &[]);
    // Nobody is believed, so nothing can be smuggled.
    check(&by_address("5/min"), &[]);
}

/// The hint said to have the proxy set or remove it, and an application without cookies or `Authorization` has no users.
#[test]
fn what_applications_need_from_clients_is_not_to_be_removed() {
    let help = |source: &str| {
        let text = format!(
            "[identity]\ntrusted_proxies = [\"10.0.0.0/8\"]\nuser = \"{source}\"\n{}",
            rule("posts", "[\"user\"]", "limit = \"10/h\"") + &rule("all", "[]", "limit = \"1000/h\"")
        );
        let findings = Policy::review(&text, &|_| None).findings;
        findings.into_iter().find(|finding| finding.code == "passed-on").unwrap().help
    };
    for own in ["cookie:sid", "header:cookie", "header:Authorization", "header:user-agent"] {
        let help = help(own);
        assert!(!help.contains("remove") && help.contains("claim:") && help.contains("header"), "{own}: {help}");
    }
    assert!(help("header:x-user").contains("set or remove"));
}

/// Without a trusted proxy no header is believed, and everybody behind one shares a budget, where the policy seems to say
/// otherwise.
#[test]
fn an_address_from_a_header_needs_a_trusted_proxy() {
    for source in ["x-forwarded-for", "forwarded", "x-real-ip", "Cf-Connecting-Ip"] {
        let identity = |more: &str| format!("[identity]\nclient_ip = \"{source}\"\n{more}{}", by_address("5/min"));
        check(&identity(""), &[&format!("never-believed \"{source}\"")]);
        check(&identity("trusted_proxies = []\n"), &[&format!("never-believed \"{source}\"")]);
        check(&format!("allow = [\"never-believed: on Workers\"]\n{}", identity("")), &[]);
    }
    let list = "[identity]\nclient_ip = [\"x-real-ip\", \"x-forwarded-for\", \"peer\"]\n";
    check(
        &format!("{list}{}", by_address("5/min")),
        &["never-believed \"x-real-ip\"", "never-believed \"x-forwarded-for\""],
    );
    check(&format!("[identity]\nclient_ip = \"peer\"\n{}", by_address("5/min")), &[]);
}

/// With a trusted proxy in front and `client_ip` left at the connection's address, all its clients share one budget.
#[test]
fn a_proxy_s_own_address_is_not_its_clients() {
    let identity = |lines: &str| format!("[identity]\ntrusted_proxies = [\"10.0.0.0/8\"]\n{lines}");
    let trusted = "counts-the-proxy [\"10.0.0.0/8\"]";
    check(&(identity("") + &by_address("5/min")), &[trusted]);
    check(&(identity("client_ip = \"peer\"\n") + &by_address("5/min")), &["counts-the-proxy \"peer\""]);
    let first = "client_ip = [\"peer\", \"x-forwarded-for\"]\n";
    check(&(identity(first) + &by_address("5/min")), &["counts-the-proxy \"peer\""]);
    check(&(identity("client_ip = [\"x-forwarded-for\", \"peer\"]\n") + &by_address("5/min")), &[]);
    check(&(identity("") + &rule("net", "[\"ip/24\"]", "limit = \"5/min\"")), &[trusted]);
    // Trusted for the names that it tells: nothing is counted by address.
    let user = "user = \"header:x-user\"\n";
    let users = rule("users", "[\"user\"]", "limit = \"5/min\"");
    check(&(identity(user) + &users), &["passed-on \"header:x-user\""]);
    check(&(identity(user) + &users + &by_address("50/min")), &[trusted, "passed-on \"header:x-user\""]);
    let meant = "allow = [\"counts-the-proxy: a cap for all\"]\n";
    check(&(meant.to_owned() + &identity("") + &by_address("5/min")), &[]);
}

#[test]
fn a_header_that_holds_no_address_is_no_source_of_one() {
    let identity = |source: &str| {
        format!("[identity]\ntrusted_proxies = [\"10.0.0.0/8\"]\nclient_ip = {source}\n{}", by_address("5/min"))
    };
    for name in [
        "host",
        "Authorization",
        "proxy-authorization",
        "cookie",
        "content-length",
        "content-type",
        "transfer-encoding",
        "connection",
        "te",
        "upgrade",
        "accept",
        "accept-encoding",
        "user-agent",
        "referer",
        "origin",
        "date",
        "range",
        "if-none-match",
        "if-modified-since",
        "x-forwarded-host",
        "x-forwarded-proto",
        "x-forwarded-port",
        "via",
    ] {
        let text = format!("\"{name}\"");
        check(&identity(&text), &[&format!("bad-value {text}")]);
        check(&identity(&format!("[\"x-forwarded-for\", {text}]")), &[&format!("bad-value {text}")]);
    }
    let help = |source: &str| {
        let findings = Policy::review(&identity(source), &|_| None).findings;
        findings.into_iter().find(|finding| finding.code == "bad-value").unwrap().help
    };
    assert!(help("\"header:x-real-ip\"").contains("\"x-real-ip\""), "{}", help("\"header:x-real-ip\""));
    assert!(help("[\"peer\", \"header:x-real-ip\"]").contains("\"x-real-ip\""));
    assert!(!help("\"header:\"").contains("\"\""));
    assert!(help("\"cookie:ip\"").contains("x-forwarded-for"));
}

/// PHP runs a script also for what follows its name, so that `/wp-login.php/x` dodges a rule for `/wp-login.php`.
#[test]
fn a_rule_for_a_script_is_one_for_what_follows_it() {
    let script = |path: &str| rule("script", "[\"ip\"]", &format!("match = {{ path = {path} }}\nlimit = \"5/min\""));
    check(&script("\"/blog/admin.php\""), &["path-info \"script\""]);
    check(&script("[\"/a\", \"/*.PHP\"]"), &["path-info \"script\""]);
    check(&script("\"/blog/admin.php/**\""), &[]);
    check(&script("[\"/blog/admin.php\", \"/blog/**\"]"), &[]);
    check(&script("\"/admin.php/x\""), &[]);
    check(&(script("\"/admin.php\"") + "allow = [\"path-info: cgi.fix_pathinfo=0\"]\n"), &[]);
}

#[test]
fn an_ipv6_network_is_no_narrower_than_what_one_client_has() {
    let identity = |prefix: u8| format!("[identity]\nipv6_prefix = {prefix}\n{}", by_address("5/min"));
    check(&identity(64), &[]);
    check(&identity(65), &["narrow-ipv6 65"]);
    check(&format!("allow = [\"narrow-ipv6: a lab\"]\n{}", identity(128)), &[]);
    let single = rule("single", "[\"ip/128\"]", "limit = \"5/min\"");
    check(&single, &["client-chosen-key \"single\""]);
    check(&rule("net", "[\"ip/64\"]", "limit = \"5/min\""), &[]);
    check(&(single + &rule("net", "[\"ip/48\"]", "limit = \"50/min\"")), &[]);
}

/// A victim's session cookie, or its name in a cookie, was enough to have the victim banned.
#[test]
fn what_clients_send_themselves_is_no_identity_for_a_ladder() {
    let with = |source: &str| {
        let identity = format!("[identity]\ntrusted_proxies = [\"10.0.0.0/8\"]\nuser = \"{source}\"\n");
        let users = rule("posts", "[\"user\"]", "limit = \"10/h\"\nladder = \"graduated\"");
        format!(
            "allow = [\"passed-on: it is set\", \"counts-the-proxy: one\"]\n{identity}{users}{}",
            by_address("50/min")
        )
    };
    check(&with("header:x-user"), &[]);
    for source in ["cookie:sid", "header:Authorization", "header:cookie", "path:/u/{user}/**"] {
        check(&with(source), &["unverified-ladder \"graduated\""]);
    }
    let chosen = with("cookie:sid").replace("ladder = \"graduated\"\n", "").replace("\"ip\"", "\"tier\"");
    check(&chosen, &["client-chosen-key \"posts\""]);
}

#[test]
fn a_rule_that_limits_nobody_does_not_stand_in_for_the_fallback() {
    let layer = "layer = \"user\"\nlimit = \"10/min\"\n";
    let posts = |rest: &str| rule("posts", "[\"user\"]", &format!("{layer}match = {{ path = \"/posts\" }}\n{rest}"));
    let fallback = |per: &str, rest: &str| rule("rest", per, &format!("{layer}fallback = true\n{rest}"));
    let skip = "on_missing = \"skip\"";
    check(&(posts(skip) + &fallback("[\"ip\"]", "")), &["fallback-off \"posts\""]);
    check(&(posts(skip) + &fallback("[\"user\"]", "")), &["fallback-off \"posts\""]);
    check(&(posts("") + &fallback("[\"ip\"]", "")), &[]);
    // The fallback would skip them too, so nothing is lost.
    check(&(posts(skip) + &fallback("[\"user\"]", skip)), &[]);
    check(&(posts(skip) + &fallback("[\"tenant\"]", skip)), &["fallback-off \"posts\""]);
    // Another layer's fallback is not concerned, nor one that is never met together with it.
    check(&(posts(skip) + &fallback("[\"ip\"]", "").replace("\"user\"", "\"edge\"")), &[]);
    check(&(posts(skip) + &fallback("[\"ip\"]", "match = { path = \"/other\" }")), &[]);
    // Another rule of the layer takes them.
    let also = rule("also", "[\"ip\"]", &format!("{layer}match = {{ path = \"/posts\" }}"));
    check(&(posts(skip) + &also + &fallback("[\"ip\"]", "")), &[]);
    check(&(posts("mode = \"observe\"") + &fallback("[\"ip\"]", "")), &["fallback-off \"posts\""]);
    check(&(posts("mode = \"observe\"\nallow = [\"fallback-off: a trial\"]") + &fallback("[\"ip\"]", "")), &[]);
}

#[test]
fn a_limit_behind_a_tighter_one_cannot_bind() {
    let two = |one: &str, other: &str| {
        rule("one", "[\"ip\"]", &format!("limit = {one}")) + &rule("two", "[\"ip\"]", &format!("limit = {other}"))
    };
    check(&two("\"10/min\"", "\"20/min\""), &["cannot-bind \"two\""]);
    check(&two("\"20/min\"", "\"10/min\""), &["cannot-bind \"one\""]);
    check(&two("\"10/min\"", "\"10/min\""), &[]);
    // Fewer at once, more in the long run: either may be first.
    check(&two("\"10/min burst 9\"", "\"20/min burst 5\""), &[]);
    check(&two("\"10/h\"", "\"30/day\""), &[]);
    check(&two("\"10/h\"", "\"240/day\""), &["cannot-bind \"two\""]);
    check(&two("\"10/h\"", "\"239/day\""), &[]);
    check(&two("\"10/min\"\nmode = \"observe\"", "\"20/min\""), &[]);
    check(&two("\"10/min\"\nmatch = { path = \"/a\" }", "\"20/min\""), &[]);
    check(&two("\"10/min\"", "\"20/min\"\nmatch = { path = \"/a\" }"), &["cannot-bind \"two\""]);
    check(&two("\"10/h\"\ncount = \"status:401\"", "\"20/h\""), &[]);
    // Everybody's budget is gone before anybody's own.
    let all = rule("all", "[]", "limit = \"500/min\"\nallow = [\"shared-below-clients: small\"]");
    check(&(all + &by_address("600/min")), &["cannot-bind \"address\""]);
    let network = rule("net", "[\"ip/24\"]", "limit = \"5/min\"");
    check(&(network + &by_address("6/min")), &["cannot-bind \"address\""]);
    let skips = rule("user", "[\"user\"]", "limit = \"5/min\"\non_missing = \"skip\"");
    check(&(skips + &rule("also", "[\"user\", \"ip\"]", "limit = \"6/min\"")), &[]);
}

/// `suggest` proposed 110 a minute beside 110 an hour, both in windows of the clock, and lint had nothing to say: each minute lies
/// within one hour, so the first could never deny.
#[test]
fn a_shorter_limit_that_is_no_tighter_cannot_bind() {
    let two = |one: &str, other: &str, algorithm: &str| {
        let limit = |limit: &str| format!("limit = \"{limit}\"\n{algorithm}");
        rule("one", "[\"ip\"]", &limit(one)) + &rule("two", "[\"ip\"]", &limit(other))
    };
    let algorithms = ["fixed-window", "sliding-window", "sliding-log", "sliding-estimate", "token-bucket"];
    for algorithm in algorithms {
        let double = if algorithm == "token-bucket" { "\nallow = [\"double-burst: x\"]" } else { "" };
        let text = format!("algorithm = \"{algorithm}\"{double}");
        for (one, other) in
            [("110/min", "110/h"), ("110/s", "110/5min"), ("1000/h", "900/day"), ("100/min", "100/2min")]
        {
            check(&two(one, other, &text), &["cannot-bind \"one\""]);
            check(&two(other, one, &text), &["cannot-bind \"two\""]);
        }
        check(&two("100/min", "110/h", &text), &[]);
    }
    let fixed = "algorithm = \"fixed-window\"";
    // Nor can a longer one that is at least as wide as all of its parts together.
    check(&two("10/min", "600/h", fixed), &["cannot-bind \"two\""]);
    check(&two("10/min", "599/h", fixed), &[]);
    // Windows of 7 minutes and of an hour do not begin together: 20 fit into 7 minutes around the full hour.
    check(&two("10/7min", "10/h", fixed), &[]);
    check(&two("20/7min", "10/h", fixed), &["cannot-bind \"one\""]);
    // Windows that open with the first request do not lie within each other either.
    check(&two("110/min", "110/h", "algorithm = \"fixed-window\"\nanchor = \"first\""), &[]);
    // By default a minute is a bucket and an hour a sliding window, and a burst is what a bucket holds.
    check(&two("110/min", "110/h", ""), &["cannot-bind \"one\""]);
    check(&two("110/min burst 50", "110/h", ""), &[]);
    check(&two("60/min burst 110", "110/h", ""), &["cannot-bind \"one\"", "double-burst \"60/min burst 110\""]);
    // Different algorithms: an hour's estimate counts each of its minutes, a bucket of an hour refills by one each 33 s.
    let mixed = |one: &str, other: &str| rule("one", "[\"ip\"]", one) + &rule("two", "[\"ip\"]", other);
    let minute = "limit = \"110/min\"\nalgorithm = \"fixed-window\"";
    let estimate = "limit = \"110/h\"\nalgorithm = \"sliding-estimate\"";
    check(&mixed(minute, estimate), &["cannot-bind \"one\""]);
    let bucket = "limit = \"110/h burst 100\"\nalgorithm = \"token-bucket\"";
    check(&mixed(minute, bucket), &["cannot-bind \"one\""]);
    // A bucket that has just been emptied twice, around the full hour.
    check(&mixed("limit = \"110/min\"", "limit = \"110/h\"\nalgorithm = \"fixed-window\""), &[]);
    // Limits by tier: every tier must be behind the other rule.
    let tiers = |pro: &str| {
        format!(
            "[identity]\ndefault_tier = \"free\"\n[tiers.free]\nrequests = \"110/min\"\n[tiers.pro]\nrequests = \"{pro}\"\n{}{}",
            rule("tiers", "[\"ip\"]", "limit = \"tier\""),
            rule("hour", "[\"ip\"]", "limit = \"110/h\"")
        )
    };
    check(&tiers("500/min"), &["cannot-bind \"tiers\""]);
    check(&tiers("60/min"), &[]);
}

/// A rule by tier without a default tier admitted 50 of 50 requests at 3 a minute from a caller whose tier was missing, unknown or in
/// another case, and nobody was told.
#[test]
fn a_rule_by_tier_needs_a_default_and_tiers_that_differ_in_more_than_case() {
    let tiers = |head: &str, rest: &str| {
        let tiers = "[tiers.pro]\nrequests = \"3/min\"\n";
        format!("{head}{tiers}{}", rule("plan", "[\"tenant\"]", rest))
    };
    let default = "[identity]\ndefault_tier = \"pro\"\n";
    check(&tiers("", "limit = \"tier\""), &["no-default-tier \"plan\""]);
    check(&tiers("", "limit = \"tier\"\nmode = \"observe\""), &["no-default-tier \"plan\""]);
    check(&tiers("", "limit = \"tier\"\nallow = [\"no-default-tier: the gateway sets it\"]"), &[]);
    check(&tiers(default, "limit = \"tier\""), &[]);
    check(&tiers("", "limit = \"3/min\""), &[]);
    // A limit with a name, which a tier has or only a tenant.
    let burst = tiers("", "limit = \"tier:burst\"").replace("requests", "burst");
    check(&burst, &["no-default-tier \"plan\""]);
    check(&rule("plan", "[\"tenant\"]", "limit = \"tier:burst\""), &[]);
    let said = |on_missing: &str| {
        let source = tiers("", &format!("limit = \"tier\"\non_missing = \"{on_missing}\""));
        Policy::review(&source, &|_| None).findings.remove(0).message
    };
    assert!(said("floor").contains("denies") && said("deny").contains("denies") && said("skip").contains("not limit"));
    // An observed rule denies nothing, and the finding said that it did.
    let observed = Policy::review(&tiers("", "limit = \"tier\"\nmode = \"observe\""), &|_| None).findings.remove(0);
    assert!(observed.message.contains("\"plan\" observes a denial of a request without"), "{}", observed.message);
    let two = |name: &str| tiers(default, "limit = \"tier\"") + &format!("[tiers.{name}]\nrequests = \"9/min\"\n");
    check(&two("Pro"), &["tiers-alike pro"]);
    check(&two("prof"), &[]);
    assert!(
        Policy::review(&two("Pro"), &|_| None).findings[0].message.ends_with("\"Pro\" and \"pro\" differ only in case")
    );
}

/// A tier with `uploads = "0/day"` let everything through, and nobody was told.
#[test]
fn a_limit_of_zero_is_asked_about() {
    check(&by_address("0/min"), &["zero-limit \"0/min\""]);
    check(&by_address("0"), &["zero-limit \"0\""]);
    check(&by_address("0MB/day"), &["zero-limit \"0MB/day\""]);
    check(&by_address("unlimited"), &[]);
    check(&by_address("none"), &[]);
    check(&(by_address("0/min") + "allow = [\"zero-limit: until we know better\"]\n"), &[]);
    check(&by_address("${LIMIT:-0}/min"), &["zero-limit \"${LIMIT:-0}/min\""]);
    let tier = |limit: &str| {
        let tiers = format!("[identity]\ndefault_tier = \"free\"\n[tiers.free]\nrequests = \"{limit}\"\n");
        format!("{tiers}{}", by_address("tier"))
    };
    check(&tier("0/day"), &["zero-limit \"0/day\""]);
    check(&tier("none"), &[]);
    check(&tier("unlimited"), &[]);
    check(&format!("allow = [\"zero-limit: free of charge\"]\n{}", tier("0/day")), &[]);
    let own = "[tenants.acme]\nrequests = \"0\"\n[users.u1]\nrequests = \"0/h\"\n";
    check(&(tier("5/min") + own), &["zero-limit \"0\"", "zero-limit \"0/h\""]);
}

/// An operator set `MAX=0` to close a route in a hurry. Everything got through, and `lint` had nothing to say.
#[test]
fn a_variable_of_zero_is_asked_about() {
    let review = |source: &str, value: &str| Policy::review(source, &|name| (name == "MAX").then(|| value.to_owned()));
    let source = by_address("${MAX}/min");
    assert_eq!(review(&source, "5").findings, []);
    for zero in ["0", "00"] {
        let findings = review(&source, zero).findings;
        let found: Vec<(&str, &str)> =
            findings.iter().map(|finding| (finding.code, finding.message.as_str())).collect();
        assert_eq!(found, [("zero-limit", "a limit of 0, which means unlimited: \"${MAX}/min\"")]);
    }
    let meant = source + "allow = [\"zero-limit: 0 switches the limit off\"]\n";
    assert_eq!(review(&meant, "0").findings, []);
}

#[test]
fn a_small_estimate_gives_much_less_than_it_says() {
    let estimate = |limit: &str| by_address(limit) + "algorithm = \"sliding-estimate\"\n";
    check(&estimate("10/min"), &[]);
    check(&estimate("9/min"), &["small-estimate \"9/min\""]);
    check(&(estimate("1/min") + "allow = [\"small-estimate: half will do\"]\n"), &[]);
    check(&by_address("9/min"), &[]);
    let tiers = "[identity]\ndefault_tier = \"free\"\n[tiers.free]\nrequests = \"5/min\"\n";
    check(&format!("{tiers}{}", estimate("tier")), &["small-estimate \"5/min\""]);
    check(&format!("{tiers}{}", by_address("tier")), &[]);
}

#[test]
fn what_everyone_shares_holds_fifty_clients() {
    let all = |limit: &str| rule("all", "[]", &format!("limit = \"{limit}\""));
    check(&(all("499/min") + &by_address("10/min")), &["shared-below-clients \"all\""]);
    check(&(all("500/min") + &by_address("10/min")), &[]);
    check(&(all("499/min") + "mode = \"observe\"\n" + &by_address("10/min")), &[]);
    check(&(all("29999/h") + &by_address("10/min")), &["shared-below-clients \"all\""]);
    check(&(all("30000/h") + &by_address("10/min")), &[]);
    let meant = "allow = [\"shared-below-clients: one campus\"]\n";
    check(&(all("400/min") + meant + &by_address("10/min")), &[]);
}

/// A policy struck users and their networks on one server. On a Cluster no user was struck any more, and lint had not said so.
#[test]
fn ladders_of_one_request_are_in_one_partition() {
    let ladder = |name: &str, per: &str, more: &str| {
        rule(name, per, &format!("limit = \"10/min\"\nladder = \"gentle\"\n{more}"))
    };
    let network =
        |more: &str| ladder("net", "[\"ip\"]", &format!("allow = [\"shared-ladder: x\", \"cannot-bind: x\"]\n{more}"));
    let user = |more: &str| ladder("user", "[\"user\"]", more);
    check(&(network("") + &user("")), &["ladders-apart \"user\""]);
    check(&(network("") + &user("mode = \"observe\"")), &[]);
    check(&(network("") + &user("allow = [\"ladders-apart: one server\"]")), &[]);
    check(&(network("match = { path = \"/a\" }") + &user("match = { path = \"/b\" }")), &[]);
    check(&(network("match = { path = \"/a\" }") + &user("")), &["ladders-apart \"user\""]);
    let both = "allow = [\"cannot-bind: x\"]";
    check(&(user("") + &ladder("both", "[\"user\", \"ip\"]", both)), &[]);
    let tenant = ladder("tenant", "[\"tenant\"]", "allow = [\"shared-ladder: x\", \"cannot-bind: x\"]");
    check(&(tenant.clone() + &user("")), &["ladders-apart \"user\""]);
    check(&format!("[identity]\nuser_scope = \"tenant\"\n{tenant}{}", user("")), &[]);
}

#[test]
fn an_eventual_rule_has_no_ladder() {
    let eventual = "limit = \"10/h\"\nalgorithm = \"fixed-window\"\nconsistency = \"eventual\"\nladder = \"graduated\"";
    check(&rule("r", "[\"user\"]", eventual), &["eventual-ladder \"graduated\""]);
    check(&rule("r", "[\"user\"]", &eventual.replace("eventual", "strong")), &[]);
}

#[test]
fn windows_are_no_shorter_than_the_store_can_promise() {
    let with = |limit: &str, consistency: &str| {
        rule("r", "[\"ip\"]", &format!("limit = \"{limit}\"\nconsistency = \"{consistency}\""))
    };
    check(&with("10/s", "eventual"), &["window-too-short \"10/s\""]);
    check(&with("10/min", "eventual"), &["not-approximate \"10/min\""]);
    check(&with("10/h", "eventual"), &["not-approximate \"10/h\""]);
    check(&with("10/s", "strong"), &[]);
    let fixed = |limit: &str, more: &str| {
        let more = format!("limit = \"{limit}\"\nconsistency = \"eventual\"\nalgorithm = \"fixed-window\"\n{more}");
        rule("r", "[\"ip\"]", &more)
    };
    check(&fixed("10/min", ""), &[]);
    check(&fixed("10/h", "block_for = \"1h\"\nanchor = \"first\""), &[]);
    check(&fixed("10/s", ""), &["window-too-short \"10/s\""]);
    check(&fixed("10/s", "approximate = true"), &[]);
    check(&format!("{}approximate = true\n", with("10/min", "eventual")), &[]);
    let tiers = "[tiers.free]\nrequests = \"10/min\"\n[identity]\ndefault_tier = \"free\"\n";
    let by_tier = with("tier", "eventual").replace("[\"ip\"]", "[\"tenant\"]");
    check(&format!("{tiers}{by_tier}"), &["not-approximate \"tier\""]);
    let in_flight = "consistency = \"eventual\"\nalgorithm = \"concurrency\"\napproximate = true\nlimit = \"9\"";
    check(&rule("r", "[\"ip\"]", in_flight), &["impossible-limit \"9\""]);
}

#[test]
fn shards_split_only_large_limits() {
    let with = |limit: &str, shards: &str| rule("r", "[\"ip\"]", &format!("limit = \"{limit}\"\nshards = {shards}"));
    check(&with("501/s", "4"), &[]);
    check(&with("30001/min", "64"), &[]);
    check(&with("500/s", "4"), &["idle-shards 4"]);
    check(&with("30000/min", "4"), &["idle-shards 4"]);
    check(&with("900/s burst 3", "4"), &["idle-shards 4"]);
    check(&with("unlimited", "4"), &["idle-shards 4"]);
    check(&with("1000/s", "1"), &["bad-value 1"]);
    check(&with("1000/s", "65"), &["bad-value 65"]);
    let eventual = "consistency = \"eventual\"\nalgorithm = \"fixed-window\"";
    check(&format!("{}{eventual}\n", with("60000/min", "4")), &["bad-value 4"]);
}

#[test]
fn a_login_says_what_a_failing_store_means() {
    let login =
        |more: &str| rule("r", "[\"ip\"]", &format!("limit = \"10/h\"\nmatch = {{ path = \"/login\" }}\n{more}"));
    check(&login(""), &["login-failure-mode \"r\""]);
    check(&login("on_store_error = \"open\""), &[]);
    check(&login("mode = \"observe\""), &[]);
    check(&rule("r", "[\"ip\"]", "limit = \"10/h\"\nmatch = { path = \"/posts\" }"), &[]);
    let account = rule(
        "r",
        "[\"fact:account\"]",
        "limit = \"5/h\"\nmatch = { path = \"/login\" }\non_store_error = \"closed\"\nladder = \"strict\"",
    );
    check(&account, &["ladder-before-login \"strict\""]);
}

#[test]
fn a_burst_does_not_double_the_limit() {
    let with = |limit: &str, more: &str| rule("r", "[\"ip\"]", &format!("limit = \"{limit}\"\n{more}"));
    check(&with("100/min burst 100", ""), &["double-burst \"100/min burst 100\""]);
    check(&with("100/min", "burst = 200"), &["double-burst \"100/min\""]);
    check(&with("100/min burst 99", ""), &[]);
    check(&with("100/min", ""), &[]);
    check(&with("100/day", "algorithm = \"token-bucket\""), &["double-burst \"100/day\""]);
    check(&with("100/day burst 10", "algorithm = \"token-bucket\""), &[]);
}

/// Five in flight of ten a minute, answered out of order, used up a budget that counted none of them.
#[test]
fn a_bucket_does_not_give_back() {
    let with = |limit: &str, more: &str| rule("r", "[\"ip\"]", &format!("limit = \"{limit}\"\n{more}"));
    let count = "count = \"status:401\"";
    check(&with("10/min", count), &["bucket-gives-back \"r\""]);
    check(&with("10/min burst 5", count), &["bucket-gives-back \"r\""]);
    check(&with("10/min", &format!("{count}\nalgorithm = \"sliding-window\"")), &[]);
    check(&with("10/min", &format!("{count}\nalgorithm = \"fixed-window\"")), &[]);
    check(&with("10/h", count), &[]);
    check(&with("10/min", ""), &[]);
    check(&with("10/min", &format!("{count}\nmode = \"observe\"")), &[]);
    check(&with("10/min", &format!("{count}\nallow = [\"bucket-gives-back: one request at a time\"]")), &[]);
    check(&with("10000/min", "cost = \"tokens\""), &[]);
    let bucket = with("10000/min burst 5000", "cost = \"tokens\"\nalgorithm = \"token-bucket\"");
    check(&bucket, &["bucket-gives-back \"r\""]);
    check(&with("100MB/min burst 50MB", "algorithm = \"token-bucket\""), &[]);
    let tiers = |more: &str| {
        let tiers = "[identity]\ndefault_tier = \"t\"\n[tiers.t]\nrequests = \"9/h\"\nuploads = \"5/min\"\n[[category]]\nname = \"uploads\"\npath = \"/u\"\n";
        tiers.to_owned() + &rule("r", "[\"user\"]", &format!("limit = \"tier\"\n{more}"))
    };
    check(&tiers(count), &["bucket-gives-back \"r\""]);
    check(&tiers(""), &[]);
    // Envoy's negative hits take from the latest charge.
    check(&format!("{}[envoy.domains.x]\nnegative_hits = true\n", by_address("10/min")), &[]);
}

#[test]
fn a_ladder_remembers_a_strike_until_the_next_can_follow() {
    let with = |decay: &str, limit: &str, more: &str| {
        let ladder = format!("[ladders.l]\ndecay = \"{decay}\"\nrungs = [\"deny\", \"ban 1h\"]\n");
        ladder + &rule("r", "[\"user\"]", &format!("limit = \"{limit}\"\nladder = \"l\"\n{more}"))
    };
    check(&with("1h", "5/day", ""), &["strikes-decay \"r\""]);
    check(&with("61min", "5/day", ""), &[]);
    check(&with("24h", "5/day", ""), &[]);
    check(&with("10min", "5/10min", ""), &["strikes-decay \"r\""]);
    check(&with("10min", "5/9min", ""), &[]);
    for strike in ["request", "ignored"] {
        check(&with("1h", "5/day", &format!("strike = \"{strike}\"")), &[]);
    }
    check(&with("1h", "5/day", "mode = \"observe\""), &[]);
    check(&with("1h", "5/day", "allow = [\"strikes-decay: one warning a day is enough\"]"), &[]);
    // There is no second rung to reach.
    check(&with("1h", "5/day", "").replace("[\"deny\", \"ban 1h\"]", "[\"ban 1h\"]"), &[]);
    let tiers = "[identity]\ndefault_tier = \"t\"\n[tiers.t]\nrequests = \"5/min\"\nuploads = \"5/day\"\n\
                 [[category]]\nname = \"uploads\"\npath = \"/u\"\n";
    check(&(tiers.to_owned() + &with("30min", "tier", "")), &["strikes-decay \"r\""]);
    check(&(tiers.to_owned() + &with("2h", "tier", "")), &[]);
}

#[test]
fn a_deny_list_covers_more_than_one_ipv6_address() {
    let with = |list: &str, entry: &str| format!("[lists]\n{list} = [\"{entry}\"]\n{}", by_address("1/min"));
    check(&with("deny", "2001:db8::1"), &["one-ipv6-address \"2001:db8::1\""]);
    for entry in ["2001:db8::/64", "2001:db8::1/128", "203.0.113.7", "::ffff:203.0.113.7", "user:2001:db8::1"] {
        check(&with("deny", entry), &[]);
    }
    check(&with("allow", "2001:db8::1"), &[]);
    check(&format!("allow = [\"one-ipv6-address: a server\"]\n{}", with("deny", "2001:db8::1")), &[]);
}

#[test]
fn an_allowance_names_a_finding() {
    let with = |allow: &str| rule("r", "[\"ip\"]", &format!("limit = \"1/min\"\nallow = [\"{allow}\"]"));
    check(&with("canot-bind: meant"), &["unknown-allowance \"canot-bind: meant\""]);
    check(&with("cannot-bind: meant"), &[]);
    check(&with("shared-ban: meant"), &["unknown-allowance \"shared-ban: meant\""]);
    check(&with("high-ceiling: meant"), &["unknown-allowance \"high-ceiling: meant\""]);
    check(&with("forgets: meant"), &[]);
    let top = |allow: &str| format!("allow = [\"{allow}\"]\n{}", by_address("1/min"));
    check(&top("cannot-bind: meant"), &["unknown-allowance \"cannot-bind: meant\""]);
    check(&top("uncovered-path: meant"), &[]);
    check(&top("forgets: meant"), &[]);
    let without_reason = format!("allow = \"uncovered-path\"\n{}", by_address("1/min"));
    check(&without_reason, &["bad-value \"uncovered-path\""]);
}

#[test]
fn what_belongs_to_no_rule_is_allowed_at_the_top() {
    // A limit by tier, so that the tiers matter, and every table below the rule: a rule ends where they begin.
    let rule = rule("tenant", "[\"tenant\"]", "limit = \"tier\"\nallow = [\"forgets: meant\"]");
    let policy = rule
        + "[identity]\ntenant = \"header:x\"\ndefault_tier = \"free\"\n[tiers.free]\nmails = \"5/h\"\n[login]\nceiling = 200\n\
           [[category]]\nname = \"all\"\n";
    let all = ["never-believed", "tier-without-category", "unknown-category", "high-ceiling", "matches-all"];
    let found = |source: &str| -> Vec<&str> {
        Policy::review(source, &|_| None).findings.iter().map(|finding| finding.code).collect()
    };
    assert_eq!(found(&policy), all);
    for code in all {
        let rest: Vec<&str> = all.into_iter().filter(|other| *other != code).collect();
        assert_eq!(found(&format!("allow = [\"{code}: meant\"]\n{policy}")), rest, "{code}");
    }
}

#[test]
fn a_policy_that_limits_nobody_is_doubted() {
    check("", &["no-rules "]);
    check("# [[rule]]\n[lists]\ndeny = [\"203.0.113.0/24\"]\n", &["no-rules "]);
    check("allow = [\"no-rules: limits come later\"]\n", &[]);
    check("[login]\n", &[]);
    check(&by_address("1/min"), &[]);
}

#[test]
fn a_change_says_what_it_forgets() {
    let policy = |text: &str| Policy::parse(text, &|_| None).unwrap();
    let forgets = |old: &str, new: &str| -> Vec<String> {
        policy(new).forgets(&policy(old)).into_iter().map(|forgotten| forgotten.what).collect()
    };
    let old = rule("r", "[\"user\"]", "limit = \"10/h\"\nladder = \"graduated\"");
    assert!(forgets(&old, &old.replace("10/h", "500/day")).is_empty());
    assert!(forgets(&old, &old.replace("10/h", "10/min")).iter().any(|what| what.contains("token-bucket")));
    let expect = |new: String, texts: &[&str]| {
        let found = forgets(&old, &new);
        assert_eq!(found.len(), texts.len(), "{found:?}");
        for (found, text) in found.iter().zip(texts) {
            assert!(found.contains(text), "{found} does not say {text}");
        }
    };
    expect(old.replace("\"r\"", "\"renamed\""), &["\"renamed\" is the rule \"r\" renamed"]);
    expect(rule("s", "[\"ip\"]", "limit = \"10/h\""), &["\"r\" is removed", "strikes by user"]);
    expect(old.replace("[\"user\"]", "[\"tenant\", \"user\"]"), &["counts by tenant, user", "strikes by user"]);
    expect(old.replace("graduated", "strict"), &["ladder \"graduated\""]);
    assert_eq!(forgets("[login]", "").len(), 1);
    // A rollout changed `spread`, and every user of the tenant had a fresh limit.
    let spread = |value: &str| format!("[identity]\nuser_scope = 'tenant'\n[tenants.acme]\n{value}\n{old}");
    let found = forgets(&spread("spread = 8"), &spread("spread = 16"));
    assert_eq!(found.len(), 1, "{found:?}");
    assert!(found[0].contains("tenant \"acme\" are spread over 16 partitions instead of 8"), "{found:?}");
    assert_eq!(forgets(&spread("spread = 8"), &spread("")).len(), 1);
    assert_eq!(forgets(&spread("spread = 1"), &spread("")), [""; 0]);
    assert_eq!(forgets(&spread("spread = 8"), &spread("spread = 8")), [""; 0]);
}

/// Woken by: taking every text for the name of a fact.
#[test]
fn an_entry_of_envoys_descriptors_is_something_that_exists() {
    let with = |target: &str| format!("[envoy.descriptors]\nkey = {target}\n{}", by_address("10/min"));
    for target in ["ip", "tenant", "user", "tier", "path", "method", "host", "endpoint", "category", "fact:x", "ignore"]
    {
        check(&with(&format!("\"{target}\"")), &[]);
    }
    for wrong in ["\"address\"", "\"fact:\"", "\"\"", "\"IP\""] {
        check(&with(wrong), &[&format!("bad-value {wrong}")]);
    }
    check(&format!("[envoy.domains.\"\"]\nverb = \"record\"\n{}", by_address("10/min")), &["bad-value \"\""]);
}

/// A draft of 22 KB took a minute and a half: each pair of its rules was matched once for each of its two thousand methods.
///
/// Woken by matching patterns again for each method in `meetings`.
#[test]
fn many_methods_do_not_multiply_the_work_of_a_review() {
    let rule = |number: usize| {
        let methods: Vec<String> = (0..40).map(|method| format!("'M{number}X{method}'")).collect();
        let path = format!("/{}{number}", "*a".repeat(100));
        format!(
            "[[rule]]\nname='r{number}'\nper=['ip']\nlimit='{}/h'\nmatch={{path='{path}',method=[{}]}}\n",
            number + 5,
            methods.join(",")
        )
    };
    let draft: String = (0..36).map(rule).collect();
    assert!((20_000..24_000).contains(&draft.len()), "{}", draft.len());
    let review = Policy::review_draft(&draft, &|_| None, ReviewWork::of_draft(20_000_000, &|| true));
    assert_eq!(review.findings, []);
    assert!(review.policy.is_some());
}

/// Woken by leaving out `is_unchecked`, or `is_spent`.
#[test]
fn a_review_without_enough_work_says_what_was_reviewed() {
    let rule = |number: usize| {
        format!("[[rule]]\nname='r{number}'\nper=['ip']\nlimit='{}/h'\nmatch={{path='/{number}/**'}}\n", number + 5)
    };
    let draft: String = (0..100).map(rule).collect();
    let review = |steps, is_wanted: &dyn Fn() -> bool| {
        Policy::review_draft(&draft, &|_| None, ReviewWork::of_draft(steps, is_wanted))
    };
    let errors = review(1_000, &|| true);
    assert_eq!((errors.findings.len(), errors.findings[0].code), (1, "review-incomplete"));
    assert!(errors.policy.is_none() && errors.findings[0].message.contains("not all errors were looked for"));
    // Enough for the errors, and for the warnings of a part.
    let warnings = review(100_000, &|| true);
    assert_eq!((warnings.findings.len(), warnings.findings[0].code), (1, "review-incomplete"));
    assert!(warnings.findings[0].message.contains(" of 100 rules"), "{}", warnings.findings[0].message);
    assert!(warnings.policy.is_some(), "its errors are known");
    assert_eq!(review(100_000_000, &|| true).findings, []);
    assert!(review(100_000_000, &|| false).findings.iter().all(|finding| finding.code == "review-incomplete"));
}

/// Each of many findings listed all names of the policy, so that a draft of a megabyte took gigabytes.
///
/// Woken by listing all known names, and by keeping all findings.
#[test]
fn the_findings_of_a_policy_take_bounded_memory() {
    let categories: String =
        (0..5_000).map(|number| format!("[[category]]\nname='c{number}'\npath='/{number}'\n")).collect();
    let unknown: Vec<String> = (0..20_000).map(|number| format!("'x{number}'")).collect();
    let rule = format!("[[rule]]\nname='r'\nper=['ip']\nlimit='5/h'\nmatch={{category=[{}]}}\n", unknown.join(","));
    let findings = Policy::review(&format!("{categories}{rule}"), &|_| None).findings;
    assert_eq!(findings.len(), 1_000);
    assert!(findings.iter().all(|finding| finding.help.len() < 300), "{}", findings[0].help);
    assert!(findings[0].help.contains("c19 and 4981 more; or add it"), "{}", findings[0].help);
}

/// The page is generated from the table. After a change of the table, run this test with `UPDATE_DOCS=1` to generate it again.
#[test]
#[expect(clippy::disallowed_methods, reason = "the page is a file, and a test may read it")]
fn the_page_lists_every_code() {
    let mut page = String::from(
        "# Lint findings\n\n`threshold lint POLICY` reports errors and warnings about a policy: each with its code, its position, the \
         reason and\nwhat to write instead. It exits with 0 if there are none, with 2 on errors, and with 1 on warnings under\n\
         `--deny warnings`. The presets have neither.\n\nA warning that you accept is silenced in its own rule, with the \
         reason:\n\n```toml\nallow = [\"shared-below-clients: one campus, where abuse is noticed at once\"]\n```\n\nA \
         warning that belongs to no rule is silenced by the same line at the top of the policy, above all tables:\n",
    );
    let of_no_rule = CODES.iter().filter(|code| code.severity == Severity::Warning && code.place != Place::Rule);
    let names: Vec<String> = of_no_rule.map(|code| format!("`{}`", code.name)).collect();
    page.push_str(&names.chunks(5).map(|line| line.join(", ")).collect::<Vec<_>>().join(",\n"));
    page.push_str(
        " (if its rule was removed). An error cannot be silenced.\n\n`--against OLD` lists the rules and limits that \
         have changed, and adds the budgets and penalties that the change resets, `--log LOG`\nand `--openapi FILE` \
         (JSON or YAML) the requests that no rule limits.\n",
    );
    for (severity, title) in [(Severity::Error, "Errors"), (Severity::Warning, "Warnings")] {
        page.push_str(&format!(
            "\n## {title}\n\n| code | finding | why it matters | how to fix it |\n|---|---|---|---|\n"
        ));
        for code in CODES.iter().filter(|code| code.severity == severity) {
            page.push_str(&format!("| `{}` | {} | {} | {} |\n", code.name, code.says, code.why, code.fix));
        }
    }
    let path = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs/lint.md");
    if std::env::var_os("UPDATE_DOCS").is_some() {
        std::fs::write(&path, &page).unwrap();
    }
    let written = std::fs::read_to_string(&path).unwrap_or_default();
    assert!(written == page, "docs/lint.md is not what the table says; run with UPDATE_DOCS=1");
}

#[test]
fn every_code_is_told_apart() {
    let mut names: Vec<&str> = CODES.iter().map(|code| code.name).collect();
    names.sort_unstable();
    names.dedup();
    assert_eq!(names.len(), CODES.len());
}
