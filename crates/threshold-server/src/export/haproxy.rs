//! HAProxy's stick tables, and a named defaults section that keeps to them.

use std::fmt::Write as _;

use threshold_core::Span;
use threshold_core::policy::Policy;

use super::shape::Shape;
use super::{EdgeRule, Exported, is_whole_seconds};

/// How many tables one request can be counted in, unless a newer HAProxy is told otherwise.
const SLOTS: usize = 3;
/// The longest time it knows.
const LONGEST: Span = Span::from_millis(2_147_483_647);
/// What every section wants.
const PLAIN: &str = "    mode http\n    timeout connect 5s\n    timeout client 30s\n    timeout server 30s\n";

/// Why HAProxy cannot count a rule.
pub(super) fn cannot(rule: &EdgeRule<'_>) -> Option<&'static str> {
    (rule.period > LONGEST).then_some("HAProxy counts over 24.8 days at most")
}

pub(super) fn write(exported: &Exported<'_>, policy: &Policy) -> String {
    let mut comments = vec![
        "Load it before your own file (haproxy -f this -f yours), and let frontends begin with it:".to_owned(),
        "frontend web from threshold".to_owned(),
        "HAProxy counts over a sliding period, denied requests too: who does not stop stays out, who stops is let in"
            .to_owned(),
        "again as the count falls. It counts by the peer's address.".to_owned(),
    ];
    if exported.rules.len() > SLOTS {
        comments.push(format!(
            "A request is counted in {SLOTS} tables at most: of the rules from the third on, in that of the first it meets."
        ));
    }
    let mut out = exported.comments(&comments);
    out.push_str(
        "\ndefaults threshold\n    mode http\n    timeout connect 5s\n    timeout client 30s\n    timeout server 30s\n",
    );
    let ipv6_prefix = policy.identity().ipv6_prefix;
    for (index, rule) in exported.rules.iter().enumerate() {
        let slot = index.min(SLOTS.saturating_sub(1));
        section(rule, slot, ipv6_prefix, &mut out);
    }
    // Rules must not come to backends, and whatever follows without a name of its own takes the last section.
    let _ = write!(out, "\ndefaults threshold_plain\n{PLAIN}");
    for rule in &exported.rules {
        let period = period(rule);
        let _ = write!(
            out,
            "\nbackend threshold_{}\n    stick-table type ipv6 size 1m expire {period} store http_req_rate({period})\n",
            rule.identifier
        );
    }
    out
}

/// Counts a request that meets the rule, and denies it beyond the limit.
fn section(rule: &EdgeRule<'_>, slot: usize, ipv6_prefix: u8, out: &mut String) {
    let id = rule.identifier.as_str();
    let _ = writeln!(out, "\n    # {}", rule.about());
    let conditions = conditions(rule, id, out);
    let conditions = conditions.join(" ");
    let when = if conditions.is_empty() { String::new() } else { format!(" if {conditions}") };
    let (v4, v6) = match rule.prefix {
        None => (32, ipv6_prefix),
        Some(prefix @ ..=32) => (prefix, ipv6_prefix),
        Some(prefix) => (32, prefix),
    };
    let _ = writeln!(out, "    http-request track-sc{slot} src,ipmask({v4},{v6}) table threshold_{id}{when}");
    let (body, content_type) = rule.body();
    // The conditions again: where a slot is shared, the address may be over this limit and the request not meet it.
    let over = format!("{conditions} {{ sc_http_req_rate({slot},threshold_{id}) gt {} }}", rule.quota);
    let over = over.trim_start();
    let _ = writeln!(
        out,
        "    http-request deny deny_status {} content-type {content_type} string {} hdr Retry-After {} if {over}",
        rule.rule.status,
        quoted(&body),
        rule.timeout(),
    );
}

/// A rule's period as HAProxy writes times. It counts in milliseconds, as policies do.
fn period(rule: &EdgeRule<'_>) -> String {
    if is_whole_seconds(rule.period) {
        format!("{}s", rule.period.secs_ceil())
    } else {
        format!("{}ms", rule.period.millis_ceil())
    }
}

/// The access lists of a rule, by name; all of them must hold.
fn conditions(rule: &EdgeRule<'_>, id: &str, out: &mut String) -> Vec<String> {
    let mut names = Vec::new();
    let methods: Vec<&str> = rule.rule.matches.method.iter().map(AsRef::as_ref).collect();
    if !methods.is_empty() {
        // GET stands for HEAD too.
        let head = if methods.contains(&"GET") { " HEAD" } else { "" };
        let _ = writeln!(out, "    acl threshold_{id}_method method {}{head}", methods.join(" "));
        names.push(format!("threshold_{id}_method"));
    }
    let hosts = ("host", "req.hdr(host),field(1,:),lower", &rule.hosts);
    for (name, fetch, shapes) in [hosts, ("path", "path,lower", &rule.paths)] {
        if shapes.is_empty() || shapes.contains(&Shape::Anything) {
            continue;
        }
        for shape in shapes {
            let regex = shape.regex();
            let (how, text) = match shape {
                Shape::Equals(text) => ("str", text),
                Shape::Contains(text) => ("sub", text),
                Shape::Begins(text) => ("beg", text),
                Shape::Ends(text) => ("end", text),
                Shape::Below(_) | Shape::Anything | Shape::Expression(_) => ("reg", &regex),
            };
            let _ = writeln!(out, "    acl threshold_{id}_{name} {fetch} -m {how} {}", quoted(text));
        }
        names.push(format!("threshold_{id}_{name}"));
    }
    names
}

/// One word of a configuration, whatever it holds. A quote ends the quoting, is escaped, and begins it again.
fn quoted(text: &str) -> String {
    let one_line: String = text.chars().map(|c| if c.is_control() { ' ' } else { c }).collect();
    format!("'{}'", one_line.replace('\'', "'\\''"))
}
