//! Tests `threshold export`: its errors, and its comments about rules that it leaves out. `tests/edges` runs the output on real
//! edges.

use std::path::Path;

use serde_json::Value;

use crate::running::{Scratch, threshold};

fn policy(rest: &str) -> Scratch {
    Scratch::new("edge.toml", format!("[[rule]]\nname = \"r\"\nper = [\"ip\"]\n{rest}\n"))
}

#[test]
fn a_rule_that_cloudflare_cannot_count_is_an_error_that_names_the_nearest_values() {
    let check = |rest: &str, expect: &[&str]| {
        let run = threshold(&["export", "terraform", policy(rest).path()]);
        assert!(run.code == 2 && run.out.is_empty(), "{rest}: {}", run.out);
        for text in expect {
            assert!(run.err.contains(text), "{rest}: {}", run.err);
        }
    };
    check("limit = \"10/7min\"", &["7 min", "300 s and 600 s"]);
    check("limit = \"10/s\"", &["1 s", "10 s"]);
    check("limit = \"10/week\"", &["7 days", "86400 s"]);
    check("limit = \"10/min\"\nblock_for = \"90s\"", &["90 s", "60 s and 120 s"]);
    check("limit = \"10/min\"\nstatus = 503", &["400 to 499"]);
    check("limit = \"10/min\"\nmatch = { path = \"/a/*/b\" }", &["regular expressions"]);
    check("limit = \"10/min\"\nmode = \"observe\"", &["it only observes"]);
    check("limit = \"10/min\"\nlayer = \"user\"", &["no rule of the layer"]);
}

#[test]
fn a_rule_that_no_edge_can_count_is_an_error_with_the_reason() {
    for edge in ["terraform", "nginx", "haproxy"] {
        for (rest, why) in [
            ("limit = \"50MB/day\"", "counts bytes"),
            ("limit = \"50/day\"\ncost = \"tokens\"", "only the application knows"),
            ("limit = \"50/day\"\ncount = \"status:401\"", "by outcome"),
            ("limit = \"50/min\"\nfallback = true", "fallback"),
            ("limit = \"unlimited\"", "no limit"),
            ("limit = \"5\"\nalgorithm = \"concurrency\"", "over a period"),
            ("limit = \"5/min\"\nmatch = { method = \"GET.x\" }", "method that no request has"),
            ("limit = \"5/min\"\nmatch = { tenant = \"a\" }", "more than method, host and path"),
        ] {
            let run = threshold(&["export", edge, policy(rest).path()]);
            assert!(
                run.code == 2 && run.out.is_empty() && run.err.contains(why),
                "{edge} {rest}: {}{}",
                run.out,
                run.err
            );
        }
    }
}

/// A period of a tenth of a second that is rounded up to one second would divide the limit by ten.
#[test]
fn a_period_below_a_second_is_exported_exactly() {
    let short = policy("limit = \"10/100ms\"");
    let text = threshold(&["export", "nginx", short.path()]).out;
    assert!(text.contains("rate=100r/s;") && text.contains("burst=9 "), "{text}");
    let text = threshold(&["export", "haproxy", short.path()]).out;
    assert!(text.contains("expire 100ms store http_req_rate(100ms)"), "{text}");
}

#[test]
fn names_and_bodies_are_quoted() {
    let file = policy(
        "limit = \"10/min\"\nbody = \"a \\\"b\\\" $${c d} %{e f}\\n\"\nmatch = { path = \"/api/**\", method = \"GET\" }",
    );
    let text = threshold(&["export", "terraform", file.path()]).out;
    assert!(text.contains(r#"content      = "a \"b\" $${c d} %%{e f}\n""#), "{text}");
    let expected = r#"(http.request.method in {\"GET\" \"HEAD\"} and (http.request.uri.path eq \"/api\" or starts_with(http.request.uri.path, \"/api/\")))"#;
    assert!(text.contains(expected), "{text}");
    assert!(text.contains("content_type = \"text/plain\""), "{text}");
}

#[test]
fn a_rule_that_is_left_out_is_named_in_a_comment() {
    let slow = policy(
        "limit = \"5/day\"\n[[rule]]\nname = \"net\"\nper = [\"ip/48\"]\nlimit = \"9/min\"\n\
                       [[rule]]\nname = \"quick\"\nper = [\"ip\"]\nlimit = \"5/min\"",
    );
    let text = threshold(&["export", "nginx", slow.path()]).out;
    assert!(text.contains("Left out: r:") && text.contains("Left out: net:"), "{text}");
    let month = policy("limit = \"9/month\"");
    for (edge, why) in [("nginx", "one in a minute"), ("haproxy", "24.8 days")] {
        let run = threshold(&["export", edge, month.path()]);
        assert!(run.code == 2 && run.out.is_empty() && run.err.contains(why), "{edge}: {}{}", run.out, run.err);
    }
    let tenant =
        Scratch::new("t.toml", "[[rule]]\nname = \"t\"\nlayer = \"edge\"\nper = [\"tenant\"]\nlimit = \"1/min\"\n");
    let run = threshold(&["export", "haproxy", tenant.path()]);
    assert!(run.code == 2 && run.err.contains("does not count by address"), "{}", run.err);
}

/// The files in `deploy/` that are generated from a preset, and their arguments.
const SHIPPED: [(&str, &str, &[&str]); 5] = [
    ("nginx/threshold.conf", "starter", &["nginx-auth"]),
    ("nginx/threshold_location.conf", "starter", &["nginx-auth", "--location"]),
    ("caddy/Caddyfile", "starter", &["caddy-auth"]),
    ("traefik/dynamic.yml", "starter", &["traefik-auth"]),
    ("terraform/rate_limiting.tf", "grove", &["terraform", "--name", "grove_rate_limiting", "--host", "grove.place"]),
];

/// After a change of the output, run this test with `UPDATE_DEPLOY=1` to generate the files again.
#[test]
fn the_files_in_deploy_are_up_to_date() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    for (file, preset, args) in SHIPPED {
        let policy = root.join(format!("policies/{preset}.toml"));
        let run = threshold(&[&["export"], args, &[policy.to_str().unwrap()]].concat());
        assert_eq!(run.code, 0, "{}", run.err);
        let path = root.join("deploy").join(file);
        if std::env::var_os("UPDATE_DEPLOY").is_some() {
            std::fs::write(&path, &run.out).unwrap();
        }
        let shipped = std::fs::read_to_string(&path).unwrap_or_default();
        assert!(shipped == run.out, "deploy/{file} is not what is exported; run with UPDATE_DEPLOY=1");
    }
}

fn identity(lines: &str) -> Scratch {
    let rule = "[[rule]]\nname = \"r\"\nper = [\"ip\"]\nlimit = \"9/min\"\n";
    Scratch::new("auth.toml", format!("[identity]\n{lines}\n{rule}"))
}

#[test]
fn a_policy_that_a_proxy_cannot_serve_is_an_error_that_says_what_to_change() {
    let trusted = "trusted_proxies = [\"127.0.0.1\"]\n";
    let check = |proxy: &str, lines: &str, expect: &[&str]| {
        let run = threshold(&["export", proxy, identity(lines).path()]);
        assert!(run.code == 2 && run.out.is_empty(), "{proxy} {lines}: {}", run.out);
        for text in expect {
            assert!(run.err.contains(text), "{proxy} {lines}: {}", run.err);
        }
    };
    for proxy in ["nginx-auth", "caddy-auth", "traefik-auth"] {
        check(proxy, "client_ip = \"x-forwarded-for\"", &["trusts no proxy", "trusted_proxies"]);
        check(proxy, trusted, &["from the peer", "client_ip = \"x-forwarded-for\""]);
        let peer_first = format!("{trusted}client_ip = [\"peer\", \"x-forwarded-for\"]");
        check(proxy, &peer_first, &["from the peer"]);
        check(proxy, &format!("{trusted}client_ip = \"forwarded\""), &["from forwarded", "x-forwarded-for"]);
        // `Authorization` is not sent to Threshold as an identity, so the claim in it could not be read.
        let token = "[identity.jwt]\nalg = \"ES256\"\nkey_file = \"k\"";
        let both = "client_ip = \"x-forwarded-for\"\nuser = \"header:authorization\"\ntenant = \"claim:org\"";
        check(proxy, &format!("{trusted}{both}\n{token}"), &["header authorization", "take both from claims"]);
        let claims = both.replace("header:authorization", "claim:sub");
        let policy = identity(&format!("{trusted}{claims}\n{token}"));
        let run = threshold(&["export", proxy, policy.path()]);
        assert_eq!(run.code, 0, "{proxy}");
        // Caddy passes on all headers that it does not remove.
        let handed_on = match proxy {
            "nginx-auth" => "proxy_set_header Authorization $http_authorization;",
            "traefik-auth" => "          - Authorization\n",
            _ => "",
        };
        assert!(run.out.contains(handed_on) && !run.out.contains("-Authorization"), "{proxy}: {}", run.out);
    }
    check("traefik-auth", &format!("{trusted}client_ip = \"x-real-ip\""), &["from x-real-ip"]);
}

/// The help once mentioned only edges.
#[test]
fn the_help_names_both_kinds_of_files() {
    let help = threshold(&["export", "--help"]).out;
    let heading = help.lines().next().unwrap();
    assert!(heading.contains("proxy that asks Threshold") && heading.contains("edge rules"), "{heading}");
}

#[test]
fn an_option_without_effect_is_an_error() {
    let policy = policy("limit = \"10/min\"");
    for (target, option) in [
        ("nginx", &["--host", "example.com"][..]),
        ("haproxy", &["--name", "x"]),
        ("caddy-auth", &["--provider", "5"]),
        ("nginx", &["--location"]),
        ("traefik-auth", &["--location"]),
    ] {
        let run = threshold(&[&["export", target, policy.path()], option].concat());
        assert!(run.code == 2 && run.out.is_empty() && run.err.contains("threshold export"), "{target}: {}", run.err);
    }
    for (option, value) in [("--name", "9lives"), ("--name", "a b"), ("--name", ""), ("--host", "a\"b"), ("--host", "")]
    {
        let run = threshold(&["export", "terraform", policy.path(), option, value]);
        assert!(run.code == 2 && run.out.is_empty() && run.err.contains("expected"), "{option} {value}: {}", run.err);
    }
}

#[test]
fn a_host_restricts_only_the_rules_for_all_requests() {
    let two = policy(
        "limit = \"10/min\"\n[[rule]]\nname = \"api\"\nper = [\"ip\"]\nlimit = \"5/min\"\nmatch = { path = \"/api/**\" }",
    );
    let text = threshold(&["export", "terraform", two.path(), "--host", "Example.com", "--name", "edge"]).out;
    assert!(text.contains("resource \"cloudflare_ruleset\" \"edge\" {"), "{text}");
    assert_eq!(text.matches(r#""(http.host contains \"example.com\")""#).count(), 1, "{text}");
    assert_eq!(text.matches("http.host").count(), 1, "{text}");
}

/// The `[identity]` of a policy with trusted headers, and with a header that clients write themselves.
const BELIEVES: &str = "trusted_proxies = [\"127.0.0.1\"]\nclient_ip = [\"cf-connecting-ip\", \"true-client-ip\",                         \"x-forwarded-for\"]\nuser = \"header:X-User\"\ntenant = \"cookie:shop\"\ntier = \"header:x-plan\"";
/// The headers that a client must not send, whatever the policy.
const REMOVED: [&str; 16] = [
    "X-Original-URL",
    "X-Rewrite-URL",
    "Forwarded",
    "X-Forwarded-Method",
    "X-Forwarded-Uri",
    "X-Original-Method",
    "X-Original-URI",
    "X-Original-Host",
    "X-Original-Content-Length",
    "X-Threshold-Request-Id",
    "X-Threshold-Token",
    "CF-Connecting-IP",
    "True-Client-IP",
    "X-User",
    "X-Plan",
    "X-Forwarded-Host",
];

/// The headers that nginx sets within a block, with their values.
fn set_by_nginx(block: &str) -> Vec<(&str, &str)> {
    let lines = block.lines().filter_map(|line| line.trim().strip_prefix("proxy_set_header "));
    lines.filter_map(|line| line.split_once(';')?.0.split_once(' ')).collect()
}

#[test]
fn nginx_removes_all_trusted_headers_and_asks_with_only_the_needed_ones() {
    let policy = identity(BELIEVES);
    let text = threshold(&["export", "nginx-auth", policy.path()]).out;
    let (server, rest) = text.split_once("location = /_threshold {").unwrap();
    let (ask, _) = rest.split_once("\n}\n").unwrap();
    let location = threshold(&["export", "nginx-auth", "--location", policy.path()]).out;
    assert_eq!(set_by_nginx(server), set_by_nginx(&location));
    for header in REMOVED.into_iter().chain(["X-Forwarded-For"]) {
        assert!(set_by_nginx(server).contains(&(header, "\"\"")), "{header}: {server}");
    }
    assert!(!server.contains("Cookie \"\""), "{server}");
    assert!(ask.contains("    proxy_pass_request_headers off;\n"), "{ask}");
    let expect = [
        ("Content-Length", "\"\""),
        ("Connection", "\"\""),
        ("Host", "127.0.0.1:8080"),
        ("X-Original-Method", "$request_method"),
        ("X-Original-URI", "$request_uri"),
        ("X-Original-Host", "$host"),
        ("X-Original-Content-Length", "$content_length"),
        ("X-Threshold-Request-Id", "$request_id"),
        ("X-Forwarded-For", "$remote_addr"),
        ("Accept", "$http_accept"),
    ];
    assert_eq!(set_by_nginx(ask), expect, "{ask}");
    // The client's own headers are not sent, unless the operator uncomments them.
    for off in ["#proxy_set_header X-User $remote_user;", "#proxy_set_header Cookie $http_cookie;"] {
        assert_eq!(ask.matches(off).count(), 1, "{off}: {ask}");
    }
    // Without x-forwarded-for, the first header that the policy reads has the address.
    let real = identity("trusted_proxies = [\"127.0.0.1\"]\nclient_ip = [\"forwarded\", \"x-real-ip\"]");
    let text = threshold(&["export", "nginx-auth", real.path()]).out;
    assert!(text.contains("    proxy_set_header X-Real-IP $remote_addr;\n"), "{text}");
    assert!(text.contains("proxy_set_header X-Real-IP \"\";\n"), "{text}");
}

/// A policy that counts by a client's header needs it unchanged, also if it is repeated.
#[test]
fn nginx_sends_all_headers_but_the_trusted_ones_if_a_rule_counts_by_a_header() {
    let rule = "[[rule]]\nname = \"k\"\nper = [\"header:x-key\"]\nlimit = \"9/min\"\n";
    let policy = identity(&format!("{BELIEVES}\n{rule}"));
    let text = threshold(&["export", "nginx-auth", policy.path()]).out;
    let (_, rest) = text.split_once("location = /_threshold {").unwrap();
    let (ask, _) = rest.split_once("\n}\n").unwrap();
    assert!(!ask.contains("proxy_pass_request_headers"), "{ask}");
    for header in REMOVED.into_iter().filter(|header| !["X-Original-URL", "X-Rewrite-URL"].contains(header)) {
        assert_eq!(set_by_nginx(ask).iter().filter(|(own, _)| *own == header).count(), 1, "{header}: {ask}");
    }
    assert!(set_by_nginx(ask).contains(&("Cookie", "\"\"")) && !ask.contains("header X-Key"), "{ask}");
}

/// Caddy and Traefik pass on names with underscores, which WSGI does not distinguish from dashes. nginx drops them itself.
#[test]
fn other_spellings_of_trusted_headers_are_removed() {
    let names = "user = \"header:X-User-Id\"\ntier = \"header:x_plan\"";
    let policy = identity(&format!("trusted_proxies = [\"127.0.0.1\"]\nclient_ip = \"x-forwarded-for\"\n{names}"));
    let removed = |target: &str, before: &str, after: &str| {
        let text = threshold(&["export", target, policy.path()]).out;
        let lines = text.lines().filter_map(|line| line.trim().strip_prefix(before)?.strip_suffix(after));
        lines.map(str::to_ascii_lowercase).collect::<Vec<_>>()
    };
    let spellings = ["x-user_id", "x_user-id", "x_user_id", "x-plan", "x_forwarded_for", "x-forwarded_host"];
    for (target, before, after) in [("caddy-auth", "request_header -", ""), ("traefik-auth", "", ": \"\"")] {
        let removed = removed(target, before, after);
        for name in spellings {
            assert_eq!(removed.iter().filter(|own| *own == name).count(), 1, "{target} {name}: {removed:?}");
        }
        assert!(!removed.iter().any(|name| name == "x-forwarded-for"), "{target} writes it itself");
    }
    let removed = removed("nginx-auth", "proxy_set_header ", " \"\";");
    assert!(removed.iter().any(|name| name == "x-plan"), "{removed:?}");
    let long = identity(&format!(
        "trusted_proxies = [\"127.0.0.1\"]\nuser = \"header:{}x\"\nclient_ip = \"x-forwarded-for\"",
        "x-".repeat(9)
    ));
    let run = threshold(&["export", "caddy-auth", long.path()]);
    assert!(run.code == 2 && run.err.contains("too many spellings"), "{}", run.err);
}

#[test]
fn traefik_removes_all_trusted_headers() {
    let policy = identity(BELIEVES);
    let text = threshold(&["export", "traefik-auth", policy.path()]).out;
    let file: Value = serde_saphyr::from_str(&text).unwrap();
    let middlewares = &file["http"]["middlewares"];
    assert_eq!(
        middlewares["threshold"]["chain"]["middlewares"],
        serde_json::json!(["threshold-clean", "threshold-ask", "threshold-done"])
    );
    let cleaned = &middlewares["threshold-clean"]["headers"]["customRequestHeaders"];
    // Traefik sets X-Forwarded-Host and X-Forwarded-For itself.
    for header in REMOVED.into_iter().filter(|header| *header != "X-Forwarded-Host") {
        assert_eq!(cleaned[header], "", "{header}: {text}");
    }
    let ask = &middlewares["threshold-ask"]["forwardAuth"];
    assert_eq!(ask["trustForwardHeader"], false);
    // No other header is sent, also not the cookie that the policy takes for a tenant.
    assert_eq!(ask["authRequestHeaders"], serde_json::json!(["Accept", "X-Threshold-Token", "X-User", "X-Plan"]));
    assert!(text.contains("takes the tenant from Cookie"), "{text}");
}
