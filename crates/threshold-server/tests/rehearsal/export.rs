//! `threshold export`: what it refuses, and what it says of what it leaves out. That the edges understand the rest is
//! tried on the edges themselves.

use crate::running::{Scratch, threshold};

fn policy(rest: &str) -> Scratch {
    Scratch::new("edge.toml", format!("[[rule]]\nname = \"r\"\nper = [\"ip\"]\n{rest}\n"))
}

#[test]
fn what_cloudflare_cannot_count_is_an_error_that_names_what_it_can() {
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
fn what_no_edge_can_count_is_an_error_that_says_why() {
    for edge in ["terraform", "nginx", "haproxy"] {
        for (rest, why) in [
            ("limit = \"50MB/day\"", "counts bytes"),
            ("limit = \"50/day\"\ncost = \"tokens\"", "only the application knows"),
            ("limit = \"50/day\"\ncount = \"status:401\"", "by outcome"),
            ("limit = \"50/min\"\nfallback = true", "fallback"),
            ("limit = \"unlimited\"", "no limit"),
            ("limit = \"5\"\nalgorithm = \"concurrency\"", "over a time"),
            ("limit = \"5/min\"\nmatch = { method = \"GET;x\" }", "method that no request has"),
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

/// A tenth of a second rounded up to a whole one would be a tenth of the limit.
#[test]
fn a_short_period_stays_as_short() {
    let short = policy("limit = \"10/100ms\"");
    let text = threshold(&["export", "nginx", short.path()]).out;
    assert!(text.contains("rate=100r/s;") && text.contains("burst=9 "), "{text}");
    let text = threshold(&["export", "haproxy", short.path()]).out;
    assert!(text.contains("expire 100ms store http_req_rate(100ms)"), "{text}");
}

#[test]
fn what_is_written_stands_for_itself() {
    let file = policy(
        "limit = \"10/min\"\nbody = \"a \\\"b\\\" $${c} %{d}\\n\"\nmatch = { path = \"/api/**\", method = \"GET\" }",
    );
    let text = threshold(&["export", "terraform", file.path()]).out;
    assert!(text.contains(r#"content      = "a \"b\" $${c} %%{d}\n""#), "{text}");
    let expected = r#"(http.request.method in {\"GET\" \"HEAD\"} and (http.request.uri.path eq \"/api\" or starts_with(http.request.uri.path, \"/api/\")))"#;
    assert!(text.contains(expected), "{text}");
    assert!(text.contains("content_type = \"text/plain\""), "{text}");
}

#[test]
fn what_an_edge_leaves_out_is_said() {
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
