//! Edge rules for nginx: `limit_req`, for its http block.

use std::fmt::Write as _;

use threshold_core::Span;
use threshold_core::policy::Policy;

use super::shape::Shape;
use super::{EdgeRule, EdgeRules};

/// The memory of a zone, for about 160,000 addresses.
const ZONE: &str = "10m";

/// Returns why nginx cannot count a rule.
pub(super) fn unsupported(rule: &EdgeRule<'_>) -> Option<&'static str> {
    if rule.prefix.is_some() {
        return Some("nginx counts by single addresses");
    }
    rate(rule).is_none().then_some("nginx counts no slower than one in a minute")
}

pub(super) fn write(exported: &EdgeRules<'_>, policy: &Policy) -> String {
    let (mut zones, mut limits, mut comments) = (String::new(), String::new(), Vec::new());
    comments.push("Include it in the http block: include threshold-edge.conf;".to_owned());
    comments.push(
        "nginx admits requests at an even rate, with a burst of the whole limit. It counts single IPv6 addresses, has no"
            .to_owned(),
    );
    comments.push("block time, and answers with its own error page.".to_owned());
    for rule in &exported.rules {
        let Some(rate) = rate(rule) else { continue };
        if let Some(slower) = rate.slower {
            comments.push(format!(
                "{}: nginx counts in whole requests, so {slower} instead of {:?}.",
                rule.rule.name,
                rule.rule.notation().unwrap_or_default()
            ));
        }
        let id = rule.identifier.as_str();
        let _ = writeln!(zones, "\n# {}", rule.about());
        let key = key(rule, id, &mut zones);
        let _ = writeln!(zones, "limit_req_zone {key} zone=threshold_{id}:{ZONE} rate={};", rate.text);
        // nginx admits one request beside the burst.
        let burst = rule.quota.saturating_sub(1);
        let burst = if burst > 0 { format!(" burst={burst}") } else { String::new() };
        let _ = writeln!(limits, "limit_req zone=threshold_{id}{burst} nodelay;");
    }
    let mut out = exported.comments(&comments);
    out.push_str(&real_ip(policy));
    out.push_str(&zones);
    let _ = write!(out, "\nlimit_req_status 429;\n{limits}");
    out
}

/// A rate for nginx, and a description if it is slower than the rule's.
struct Rate {
    text: String,
    slower: Option<String>,
}

/// Converts a limit to whole requests in a second or a minute, rounded down; `None` if that is less than one in a minute.
fn rate(rule: &EdgeRule<'_>) -> Option<Rate> {
    // In 128 bits: a large quota times a minute in microseconds exceeds 64.
    let period = u128::from(rule.period.micros());
    let within = |span: Span| {
        let requests = u128::from(rule.quota).saturating_mul(u128::from(span.micros()));
        Some((requests.checked_div(period)?, requests.checked_rem(period)? == 0))
    };
    let (each, exact) = within(Span::from_secs(1))?;
    if exact {
        // Whole requests in a second are preferred, because they are exact. Else a minute gives the finer rate.
        return Some(Rate { text: format!("{each}r/s"), slower: None });
    }
    let (each, exact) = within(Span::MINUTE).filter(|(each, _)| *each > 0)?;
    let text = format!("{each}r/m");
    Some(Rate { slower: (!exact).then(|| format!("{each} in a minute")), text })
}

/// Writes the maps of a rule, and returns the variable to count by: the address, or empty if the rule does not match.
fn key(rule: &EdgeRule<'_>, id: &str, zones: &mut String) -> String {
    let methods = &rule.rule.matches.method;
    let anything = |shapes: &[Shape]| shapes.is_empty() || shapes.contains(&Shape::Anything);
    if methods.is_empty() && anything(&rule.hosts) && anything(&rule.paths) {
        return "$binary_remote_addr".to_owned();
    }
    // One map for each condition; the value of each is the variable of the next.
    // nginx does not count a request whose key is empty.
    let mut next = "$binary_remote_addr".to_owned();
    let each = [("uri", "$uri", &rule.paths), ("host", "$host", &rule.hosts)];
    for (name, variable, shapes) in each.into_iter().filter(|(_, _, shapes)| !anything(shapes)) {
        let own = format!("$threshold_{id}_{name}");
        let _ = writeln!(zones, "map {variable} {own} {{\n    default \"\";");
        for shape in shapes {
            let _ = writeln!(zones, "    \"~*{}\" {next};", shape.regex().replace('"', "\\\""));
        }
        zones.push_str("}\n");
        next = own;
    }
    if !methods.is_empty() {
        let own = format!("$threshold_{id}_method");
        let _ = writeln!(zones, "map $request_method {own} {{\n    default \"\";");
        for method in methods {
            let _ = writeln!(zones, "    {method} {next};");
            if method.as_ref() == "GET" {
                let _ = writeln!(zones, "    HEAD {next};");
            }
        }
        zones.push_str("}\n");
        next = own;
    }
    next
}

/// Writes the policy's trusted proxies.
fn real_ip(policy: &Policy) -> String {
    let trusted = &policy.identity().address.trusted;
    if trusted.is_empty() {
        return String::new();
    }
    let mut out = String::from("\n# The policy's trusted proxies, whose X-Forwarded-For is used.\n");
    for proxy in trusted {
        let _ = writeln!(out, "set_real_ip_from {proxy};");
    }
    // Recursive: with several trusted proxies in a chain, the last address that none of them has is the client's.
    out.push_str("real_ip_header X-Forwarded-For;\nreal_ip_recursive on;\n");
    out
}
