//! Edge rules for HAProxy: stick tables, and a named defaults section that counts in them.

use std::fmt::Write as _;

use threshold_core::Span;
use threshold_core::policy::Policy;

use super::shape::Shape;
use super::{EdgeRule, EdgeRules, is_whole_seconds};

/// The sticky counters of a request: HAProxy's default of `tune.stick-counters`.
const SLOTS: usize = 3;
/// The longest period: HAProxy counts milliseconds in 31 bits.
const MAX_PERIOD: Span = Span::from_millis(2_147_483_647);
/// The settings that every section requires.
const PLAIN: &str = "    mode http\n    timeout connect 5s\n    timeout client 30s\n    timeout server 30s\n";

/// Returns why HAProxy cannot count a rule.
pub(super) fn unsupported(rule: &EdgeRule<'_>) -> Option<&'static str> {
    (rule.period > MAX_PERIOD).then_some("HAProxy counts over 24.8 days at most")
}

pub(super) fn write(exported: &EdgeRules<'_>, policy: &Policy) -> String {
    let mut comments = vec![
        "Load it before your own file (haproxy -f this -f yours), and derive frontends from it:".to_owned(),
        "frontend web from threshold".to_owned(),
        "HAProxy counts over a sliding period and includes denied requests: a client that goes on stays blocked, one that"
            .to_owned(),
        "pauses is admitted again as the count falls. It counts by the peer's address.".to_owned(),
    ];
    if exported.rules.len() > SLOTS {
        comments.push(format!(
            "A request is counted in at most {SLOTS} tables: of the third and later rules, only the first that matches counts."
        ));
    }
    let mut out = exported.comments(&comments);
    out.push_str(
        "\ndefaults threshold\n    mode http\n    timeout connect 5s\n    timeout client 30s\n    timeout server 30s\n",
    );
    let ipv6_prefix = policy.identity().ipv6_prefix;
    for (index, rule) in exported.rules.iter().enumerate() {
        // Rules beyond the last counter share it. HAProxy refuses a configuration with a higher number than the tuned
        // one.
        let slot = index.min(SLOTS.saturating_sub(1));
        section(rule, slot, ipv6_prefix, &mut out);
    }
    // Backends without a `from` use the last defaults section, which must not be the one with the rules.
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

/// Writes the lines that count a matching request, and deny it beyond the limit.
fn section(rule: &EdgeRule<'_>, slot: usize, ipv6_prefix: u8, out: &mut String) {
    let id = rule.identifier.as_str();
    let _ = writeln!(out, "\n    # {}", rule.about());
    let conditions = conditions(rule, id, out);
    let conditions = conditions.join(" ");
    let when = if conditions.is_empty() { String::new() } else { format!(" if {conditions}") };
    let (v4, v6) = match rule.prefix {
        None => (32, ipv6_prefix),
        // A policy has one prefix for both families. Up to 32 it is meant for IPv4, since an IPv6 /32 is a whole
        // provider.
        Some(prefix @ ..=32) => (prefix, ipv6_prefix),
        Some(prefix) => (32, prefix),
    };
    let _ = writeln!(out, "    http-request track-sc{slot} src,ipmask({v4},{v6}) table threshold_{id}{when}");
    let (body, content_type) = rule.body();
    // The conditions are repeated: a shared counter may be over this limit for a request that does not match the rule.
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

/// Formats a rule's period for HAProxy, whose unit is milliseconds, as in policies.
fn period(rule: &EdgeRule<'_>) -> String {
    if is_whole_seconds(rule.period) {
        format!("{}s", rule.period.secs_ceil())
    } else {
        format!("{}ms", rule.period.millis_ceil())
    }
}

/// Writes the access lists of a rule, and returns their names; all of them must match.
fn conditions(rule: &EdgeRule<'_>, id: &str, out: &mut String) -> Vec<String> {
    let mut names = Vec::new();
    let methods: Vec<&str> = rule.rule.matches.method.iter().map(AsRef::as_ref).collect();
    if !methods.is_empty() {
        // A rule for GET matches HEAD too.
        let head = if methods.contains(&"GET") { " HEAD" } else { "" };
        let _ = writeln!(out, "    acl threshold_{id}_method method {}{head}", methods.join(" "));
        names.push(format!("threshold_{id}_method"));
    }
    let hosts = ("host", "req.hdr(host),field(1,:),lower", &rule.hosts);
    for (name, fetch, shapes) in [hosts, ("path", "path,lower", &rule.paths)] {
        // Lines of one access list are alternatives, so a pattern for everything makes the others superfluous.
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

/// Quotes text as one word of the configuration. A quote inside ends the quoting, is escaped, and starts it again.
fn quoted(text: &str) -> String {
    // A line break ends a directive even inside of quotes.
    let one_line: String = text.chars().map(|c| if c.is_control() { ' ' } else { c }).collect();
    format!("'{}'", one_line.replace('\'', "'\\''"))
}
