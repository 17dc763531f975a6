//! Edge rules for Cloudflare's rate limiting, as Terraform.

use std::fmt::Write as _;

use anyhow::bail;

use super::shape::Shape;
use super::{EdgeRule, EdgeRules, ExportArgs, is_whole_seconds};

/// The periods, in seconds, that Cloudflare's documentation lists, and the day that its larger plans have.
const PERIODS: [u64; 7] = [10, 60, 120, 300, 600, 3_600, 86_400];
/// The lengths of a block, in seconds, that Cloudflare offers.
const TIMEOUTS: [u64; 7] = [10, 60, 120, 300, 600, 3_600, 86_400];
const DAY: u64 = 86_400;
/// The default name of the resource.
const RESOURCE: &str = "threshold_edge";

/// A rule in Cloudflare's terms.
struct CloudflareRule {
    about: String,
    status: u16,
    body: String,
    content_type: &'static str,
    period: u64,
    requests: u64,
    timeout: u64,
    expression: String,
}

/// Returns why Cloudflare cannot count a rule at all. A rule that could be changed to fit is an error instead.
pub(super) fn unsupported(rule: &EdgeRule<'_>) -> Option<&'static str> {
    rule.prefix.map(|_| "Cloudflare counts by single addresses")
}

/// Parses the name of a resource, which is an HCL identifier.
pub(super) fn resource_name(text: &str) -> Result<String, String> {
    let plain = text.bytes().all(|byte| byte.is_ascii_alphanumeric() || matches!(byte, b'_' | b'-'));
    let begins = text.starts_with(|first: char| first.is_ascii_alphabetic() || first == '_');
    let named = plain && begins;
    named
        .then(|| text.to_owned())
        .ok_or_else(|| "expected letters, digits, _ and -, not beginning with a digit".to_owned())
}

/// Parses a host, or a part of one.
pub(super) fn host_name(text: &str) -> Result<String, String> {
    // No quotes and no backslashes: the name is written into an expression.
    let plain = text.bytes().all(|byte| byte.is_ascii_alphanumeric() || matches!(byte, b'.' | b'-' | b'_'));
    let named = plain && !text.is_empty();
    named.then(|| text.to_ascii_lowercase()).ok_or_else(|| "expected a host, such as example.com".to_owned())
}

pub(super) fn write(exported: &EdgeRules<'_>, args: &ExportArgs) -> anyhow::Result<String> {
    let provider = args.provider.unwrap_or(4);
    let host = args.host.as_deref();
    let rules = exported
        .rules
        .iter()
        .map(|rule| cloudflare_rule(rule, host))
        .collect::<anyhow::Result<Vec<CloudflareRule>>>()?;
    let mut comments: Vec<String> = vec![
        format!(
            "For version {provider} of the provider cloudflare/cloudflare; threshold export --provider writes the other."
        ),
        "Cloudflare requires cf.colo.id beside ip.src: each data centre counts separately, so an address whose requests"
            .to_owned(),
        "reach several of them may exceed its limit by that factor.".to_owned(),
        "Paths are compared as received: enable URL normalization, or upper case and %2e bypass these rules.".to_owned(),
    ];
    if rules.iter().any(|rule| rule.period == DAY) {
        comments.push(
            "A period of a day is not available on every plan: the longest documented one is an hour.".to_owned(),
        );
    }
    let mut out = exported.comments(&comments);
    out.push_str("\nvariable \"zone_id\" {\n  type = string\n}\n\n");
    let name = args.name.as_deref().unwrap_or(RESOURCE);
    let _ = writeln!(out, "resource \"cloudflare_ruleset\" \"{name}\" {{\n  zone_id     = var.zone_id");
    out.push_str("  name        = \"Threshold edge\"\n  description = \"The edge rules of a Threshold policy\"\n");
    out.push_str("  kind        = \"zone\"\n  phase       = \"http_ratelimit\"\n");
    match provider {
        4 => rules.iter().for_each(|rule| rule.block(&mut out)),
        _ => {
            out.push_str("\n  rules = [\n");
            rules.iter().for_each(|rule| rule.object(&mut out));
            out.push_str("  ]\n");
        }
    }
    out.push_str("}\n");
    Ok(out)
}

fn cloudflare_rule(rule: &EdgeRule<'_>, host: Option<&str>) -> anyhow::Result<CloudflareRule> {
    let (body, content_type) = rule.body();
    let (period, timeout) = (rule.seconds(), rule.timeout());
    let name = &rule.rule.name;
    // An error and not a rounding: a limit over another period admits other clients than the policy says.
    if !is_whole_seconds(rule.period) || !PERIODS.contains(&period) {
        bail!(
            "Cloudflare has no period of {}, which \"{name}\" has; the nearest are {}",
            rule.period,
            near(period, &PERIODS)
        );
    }
    if !TIMEOUTS.contains(&timeout) {
        bail!(
            "Cloudflare cannot block for {timeout} s, which \"{name}\" has; the nearest are {}",
            near(timeout, &TIMEOUTS)
        );
    }
    if !(400..=499).contains(&rule.rule.status) {
        bail!("Cloudflare answers with a status from 400 to 499, but \"{name}\" has {}", rule.rule.status);
    }
    Ok(CloudflareRule {
        about: rule.about(),
        status: rule.rule.status,
        body,
        content_type,
        period,
        requests: rule.quota,
        timeout,
        expression: expression(rule, host)?,
    })
}

/// Lists the next smaller and the next larger value.
fn near(wanted: u64, known: &[u64]) -> String {
    let below = known.iter().rev().find(|own| **own < wanted);
    let above = known.iter().find(|own| **own > wanted);
    let named: Vec<String> = [below, above].into_iter().flatten().map(|secs| format!("{secs} s")).collect();
    named.join(" and ")
}

/// Writes the expression that selects a rule's requests. A rule for all requests is restricted to `host`, because a zone may
/// have other hosts.
fn expression(rule: &EdgeRule<'_>, host: Option<&str>) -> anyhow::Result<String> {
    let mut parts = Vec::new();
    let methods: Vec<String> = rule.rule.matches.method.iter().map(|method| methods_of(method)).collect();
    if !methods.is_empty() {
        parts.push(format!("http.request.method in {{{}}}", methods.join(" ")));
    }
    for (field, shapes) in [("http.host", &rule.hosts), ("http.request.uri.path", &rule.paths)] {
        if shapes.contains(&Shape::Anything) || shapes.is_empty() {
            continue;
        }
        let each: anyhow::Result<Vec<String>> =
            shapes.iter().map(|shape| clause(field, shape, &rule.rule.name)).collect();
        parts.push(each?.join(" or "));
    }
    // `and` binds stronger than `or` in Cloudflare's language, so alternatives need parentheses beside another
    // condition.
    let many = parts.len() > 1;
    let part = |part: String| if many && part.contains(" or ") { format!("({part})") } else { part };
    let all: Vec<String> = parts.into_iter().map(part).collect();
    Ok(match (all.is_empty(), host) {
        (false, _) => format!("({})", all.join(" and ")),
        (true, Some(host)) => format!("(http.host contains \"{}\")", inside(host)),
        // An empty expression is not valid. This one matches every request of the zone.
        (true, None) => "true".to_owned(),
    })
}

/// A rule for `GET` matches `HEAD` too.
fn methods_of(method: &str) -> String {
    if method == "GET" { "\"GET\" \"HEAD\"".to_owned() } else { format!("\"{}\"", inside(method)) }
}

fn clause(field: &str, shape: &Shape, name: &str) -> anyhow::Result<String> {
    Ok(match shape {
        Shape::Equals(text) => format!("{field} eq \"{}\"", inside(text)),
        Shape::Contains(text) => format!("{field} contains \"{}\"", inside(text)),
        Shape::Begins(text) => format!("starts_with({field}, \"{}\")", inside(text)),
        Shape::Ends(text) => format!("ends_with({field}, \"{}\")", inside(text)),
        Shape::Below(text) => {
            let text = inside(text);
            format!("{field} eq \"{text}\" or starts_with({field}, \"{text}/\")")
        }
        Shape::Anything => "true".to_owned(),
        Shape::Expression(_) => bail!(
            "\"{name}\" matches one segment by * or {{}}, which needs regular expressions, on Cloudflare's larger plans only; \
             write the pattern with ** at its ends"
        ),
    })
}

/// Escapes text for a string of Cloudflare's rules language.
fn inside(text: &str) -> String {
    text.replace('\\', "\\\\").replace('"', "\\\"")
}

/// Formats a string of HCL. `${` and `%{` begin templates, and are escaped.
fn hcl(text: &str) -> String {
    let escaped = text.replace('\\', "\\\\").replace('"', "\\\"").replace('\n', "\\n").replace('\r', "\\r");
    format!("\"{}\"", escaped.replace('\t', "\\t").replace("${", "$${").replace("%{", "%%{"))
}

impl CloudflareRule {
    /// Writes the rule for provider 4, as a block.
    fn block(&self, out: &mut String) {
        let _ = write!(
            out,
            "\n  rules {{\n    action = \"block\"\n    action_parameters {{\n      response {{\n        \
             status_code  = {}\n        content      = {}\n        content_type = \"{}\"\n      }}\n    }}\n    ratelimit {{\n      \
             characteristics     = [\"cf.colo.id\", \"ip.src\"]\n      period              = {}\n      \
             requests_per_period = {}\n      mitigation_timeout  = {}\n    }}\n    expression  = {}\n    \
             description = {}\n    enabled     = true\n  }}\n",
            self.status,
            hcl(&self.body),
            self.content_type,
            self.period,
            self.requests,
            self.timeout,
            hcl(&self.expression),
            hcl(&self.about),
        );
    }

    /// Writes the rule for provider 5, as an object of a list.
    fn object(&self, out: &mut String) {
        let _ = write!(
            out,
            "    {{\n      action = \"block\"\n      action_parameters = {{\n        response = {{\n          \
             status_code  = {}\n          content      = {}\n          content_type = \"{}\"\n        }}\n      }}\n      \
             ratelimit = {{\n        characteristics     = [\"cf.colo.id\", \"ip.src\"]\n        period              = {}\n        \
             requests_per_period = {}\n        mitigation_timeout  = {}\n      }}\n      expression  = {}\n      \
             description = {}\n      enabled     = true\n    }},\n",
            self.status,
            hcl(&self.body),
            self.content_type,
            self.period,
            self.requests,
            self.timeout,
            hcl(&self.expression),
            hcl(&self.about),
        );
    }
}
