//! `threshold export`: writes a policy's edge rules for an edge that counts by itself, or the configuration of a proxy that
//! asks Threshold.

mod auth;
mod haproxy;
mod nginx;
mod shape;
mod terraform;

use std::path::PathBuf;

use anyhow::bail;
use clap::{Args, ValueEnum};
use threshold_core::headers::exported_body;
use threshold_core::policy::{CostOf, Layer, Mode, Per, Policy, Rule};
use threshold_core::{Span, Timestamp};

use crate::Report;
use crate::source::Source;

use shape::Shape;

/// What `threshold export` is given.
#[derive(Debug, Args)]
pub struct ExportArgs {
    /// For which edge or proxy
    #[arg(value_enum)]
    pub(crate) target: Target,
    /// The policy file, or - for standard input
    pub(crate) policy: PathBuf,
    /// terraform: the major version of Cloudflare's provider; 4 by default
    #[arg(long, value_parser = clap::value_parser!(u8).range(4..=5))]
    pub(crate) provider: Option<u8>,
    /// terraform: the name of the resource; threshold_edge by default
    #[arg(long, value_name = "NAME", value_parser = terraform::resource_name)]
    pub(crate) name: Option<String>,
    /// terraform: the host that rules for all requests are limited to, and the hosts whose names contain it
    #[arg(long, value_name = "HOST", value_parser = terraform::host_name)]
    pub(crate) host: Option<String>,
    /// nginx-auth: the lines for a location that sets headers of its own
    #[arg(long)]
    pub(crate) location: bool,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum Target {
    /// Cloudflare's rate limiting rules, as Terraform
    Terraform,
    /// For the http block of nginx
    Nginx,
    /// A named defaults section of HAProxy, and its tables
    Haproxy,
    /// nginx asking Threshold for every request, for a server block
    NginxAuth,
    /// Caddy asking Threshold for every request
    CaddyAuth,
    /// Traefik asking Threshold for every request, for its file provider
    TraefikAuth,
}

/// Writes a policy in the language of another program.
///
/// # Errors
/// Returns an error if the policy cannot be read, or not be expressed there.
pub fn run(args: &ExportArgs) -> anyhow::Result<Report> {
    args.check()?;
    let source = Source::read(&args.policy)?;
    let policy = source.policy()?;
    let asking = |proxy| Ok(Report { text: auth::write(proxy, &policy, &source.name)?, code: 0 });
    match args.target {
        Target::Terraform => edge(args, &source, &policy, terraform::unsupported),
        Target::Nginx => edge(args, &source, &policy, nginx::unsupported),
        Target::Haproxy => edge(args, &source, &policy, haproxy::unsupported),
        Target::NginxAuth if args.location => asking(auth::Proxy::NginxLocation),
        Target::NginxAuth => asking(auth::Proxy::Nginx),
        Target::CaddyAuth => asking(auth::Proxy::Caddy),
        Target::TraefikAuth => asking(auth::Proxy::Traefik),
    }
}

impl ExportArgs {
    /// Refuses options that the target does not use.
    fn check(&self) -> anyhow::Result<()> {
        let terraform = [self.provider.is_some(), self.name.is_some(), self.host.is_some()];
        if terraform.contains(&true) && self.target != Target::Terraform {
            bail!("--provider, --name and --host are for threshold export terraform");
        }
        if self.location && self.target != Target::NginxAuth {
            bail!("--location is for threshold export nginx-auth");
        }
        Ok(())
    }
}

/// Writes the edge rules, without those that the edge cannot count.
fn edge(args: &ExportArgs, source: &Source, policy: &Policy, unsupported: Unsupported) -> anyhow::Result<Report> {
    // First what no edge can count, then what this one cannot, so that each rule is left out for the most general
    // reason.
    let mut exported = EdgeRules::new(policy);
    exported.leave_out(unsupported);
    // An empty file would look like protection and limit nothing.
    if exported.rules.is_empty() {
        let reasons: Vec<String> = exported.left_out.iter().map(|(name, why)| format!("\n  {name}: {why}")).collect();
        bail!("{} has no rule of the layer \"edge\" that an edge can count by itself{}", source.name, reasons.concat());
    }
    let text = match args.target {
        Target::Haproxy => haproxy::write(&exported, policy),
        Target::Nginx => nginx::write(&exported, policy),
        _ => terraform::write(&exported, args)?,
    };
    Ok(Report { text, code: 0 })
}

/// Returns why an edge cannot count a rule.
type Unsupported = fn(&EdgeRule<'_>) -> Option<&'static str>;

/// The edge rules that can be exported, and why others cannot.
struct EdgeRules<'p> {
    rules: Vec<EdgeRule<'p>>,
    left_out: Vec<(&'p str, &'static str)>,
}

/// One exportable rule: a number of requests of one address in a period.
struct EdgeRule<'p> {
    rule: &'p Rule,
    policy: &'p Policy,
    /// The rule's name as an identifier, unique among the rules.
    identifier: String,
    quota: u64,
    period: Span,
    /// The prefix by which addresses are grouped, if the rule has one.
    prefix: Option<u8>,
    paths: Vec<Shape>,
    hosts: Vec<Shape>,
}

impl<'p> EdgeRules<'p> {
    fn new(policy: &'p Policy) -> Self {
        let (mut rules, mut left_out): (Vec<EdgeRule<'_>>, _) = (Vec::new(), Vec::new());
        for rule in policy.rules().iter().filter(|rule| rule.layer == Layer::Edge) {
            match EdgeRule::new(rule, policy) {
                Ok(mut rule) => {
                    // Two names may become the same identifier.
                    let own = rule.identifier.clone();
                    let taken = |id: &str, rules: &[EdgeRule<'_>]| rules.iter().any(|other| other.identifier == id);
                    let mut number = 2_usize;
                    while taken(&rule.identifier, &rules) {
                        rule.identifier = format!("{own}_{number}");
                        number = number.saturating_add(1);
                    }
                    rules.push(rule);
                }
                Err(why) => left_out.push((rule.name.as_ref(), why)),
            }
        }
        Self { rules, left_out }
    }

    /// Removes the rules that one edge cannot count.
    fn leave_out(&mut self, unsupported: Unsupported) {
        self.rules.retain(|rule| {
            let why = unsupported(rule);
            self.left_out.extend(why.map(|why| (rule.rule.name.as_ref(), why)));
            why.is_none()
        });
    }

    /// Writes the comments at the top of the file.
    fn comments(&self, more: &[String]) -> String {
        let mut text = String::from(
            "# Generated by threshold export from the policy's edge rules; change the policy, not this file.\n",
        );
        let left_out = self.left_out.iter().map(|(name, why)| format!("Left out: {name}: {why}."));
        for line in left_out.chain(more.iter().cloned()) {
            text.push_str(&format!("# {line}\n"));
        }
        text
    }
}

impl<'p> EdgeRule<'p> {
    fn new(rule: &'p Rule, policy: &'p Policy) -> Result<Self, &'static str> {
        let Some(limit) = rule.fixed_limit() else {
            return Err(if rule.is_by_tier() { "its limit is not the same for everyone" } else { "it has no limit" });
        };
        // An edge can only block. A rule that observes would begin to deny requests.
        if rule.mode == Mode::Observe {
            return Err("it only observes");
        }
        match rule.counts() {
            Some(CostOf::Bytes) => return Err("it counts bytes, and edges count requests"),
            Some(CostOf::Named(_)) => return Err("it counts a cost that only the application knows"),
            Some(CostOf::Requests) | None => {}
        }
        if rule.count.is_some() {
            return Err("it counts by outcome, which is known only afterwards");
        }
        if rule.fallback {
            return Err("it is a fallback, and edges do not know the other rules of its layer");
        }
        // Edges know the address and nothing else about a caller. A rule by address and user, for example, would be
        // shared by all users behind it.
        let prefix = match rule.per.as_slice() {
            [Per::Ip] => None,
            [Per::IpPrefix(prefix)] => Some(*prefix),
            _ => return Err("it does not count by address"),
        };
        if !limit.is_over_time() {
            return Err("it is not a limit over a period");
        }
        let matches = &rule.matches;
        if !matches.category.is_empty()
            || !matches.tenant.is_empty()
            || !matches.tier.is_empty()
            || !matches.fact.is_empty()
        {
            return Err("it matches by more than method, host and path");
        }
        // The methods are written unquoted in some of the files, where other characters would change the
        // configuration.
        if !matches.method.iter().all(|method| method.bytes().all(|byte| byte.is_ascii_alphabetic() || byte == b'-')) {
            return Err("it matches a method that no request has");
        }
        let shapes = |patterns: &[threshold_core::policy::Pattern], between| {
            patterns.iter().map(|pattern| Shape::of(pattern.as_str(), between)).collect()
        };
        Ok(Self {
            rule,
            policy,
            identifier: identifier(&rule.name),
            quota: limit.quota(),
            period: limit.period(),
            prefix,
            paths: shapes(&matches.path, '/'),
            hosts: shapes(&matches.host, '.'),
        })
    }

    fn seconds(&self) -> u64 {
        self.period.secs_ceil()
    }

    /// Returns how long an address is blocked, in seconds: `block_for`, else the period.
    fn timeout(&self) -> u64 {
        self.rule.block_for.unwrap_or(self.period).secs_ceil()
    }

    /// Returns the body of a denial and its content type.
    fn body(&self) -> (String, &'static str) {
        let usual = || format!("{{\"error\":\"rate_limited\",\"retry_after\":{}}}", self.timeout());
        let own = exported_body(self.rule, self.policy, self.quota, self.timeout());
        let body = own.map_or_else(usual, |own| own.text);
        // A policy may have its own body as text, and clients parse what is declared as JSON.
        let json = body.trim_start().starts_with(['{', '[']);
        (body, if json { "application/json" } else { "text/plain" })
    }

    /// Describes the rule for a comment: `edge: 1000/min by ip`.
    fn about(&self) -> String {
        let by = self.rule.per.first().map(ToString::to_string).unwrap_or_default();
        format!("{}: {} by {by}", self.rule.name, self.rule.notation().unwrap_or_default())
    }
}

fn identifier(name: &str) -> String {
    let plain = |c: char| if c.is_ascii_alphanumeric() { c.to_ascii_lowercase() } else { '_' };
    name.chars().map(plain).collect()
}

/// Whether a period is whole seconds, the unit that most edges count in.
fn is_whole_seconds(span: Span) -> bool {
    Timestamp::EPOCH.plus(span) == Timestamp::from_secs(span.secs_ceil())
}
