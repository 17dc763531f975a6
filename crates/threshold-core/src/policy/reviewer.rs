//! A reviewer's doubts: policies that can be used, and do not protect as they seem to.

mod believed;

use std::ops::Range;

use super::codes::{Code, Place};
use super::file::{PolicyFile, RuleFile, Texts};
use super::finding::Severity;
use super::load::Loader;
use super::rule::{Consistency, CostOf, Match, Measure, Measured, Mode, OnMissing, Per, Rule};
use super::{Identity, Pattern, UserScope};
use crate::limit::Limit;
use crate::time::Span;

/// A shared limit should hold at least so many clients at their own limits.
const CLIENTS: u64 = 50;
/// What the paths of logins are called.
const LOGIN_WORDS: [&str; 11] =
    ["login", "logon", "signin", "sign-in", "password", "passwd", "otp", "2fa", "mfa", "/auth", "oauth"];
/// What accounts are called among a caller's own facts.
const ACCOUNT_WORDS: [&str; 5] = ["account", "username", "user", "email", "login"];

type Placed = (Rule, Range<usize>);

pub(super) fn review(loader: &mut Loader<'_>, file: &PolicyFile, identity: &Identity, rules: &[Placed]) {
    allowances(loader, file.allow.as_ref(), Place::Policy);
    if file.rule.is_empty() && file.login.is_none() {
        let help = "add a [[rule]]; a server takes such a policy only with --allow-empty";
        loader.warning("no-rules", 0..0, "the policy has no rules and no [login]: it limits nobody", help);
    }
    believed::counts_the_proxy(loader, &file.identity, identity, rules.iter().map(|(rule, _)| rule));
    believed::passed_on(loader, &file.identity, identity);
    for located in &file.rule {
        let written = &located.value;
        allowances(loader, written.allow.as_ref(), Place::Rule);
        let Some((rule, _)) = rules.iter().find(|(rule, _)| rule.name.as_ref() == written.name.value) else { continue };
        before_login(loader, written, rule);
        if rule.mode == Mode::Enforce {
            failure_mode(loader, written, rule);
            burst(loader, written, rule);
            store_windows(loader, written, rule);
        }
    }
    for (rule, span) in rules {
        fallback_off(loader, rules, rule, span);
        path_info(loader, rule, span);
    }
    for (rule, span) in rules.iter().filter(|(rule, _)| rule.mode == Mode::Enforce) {
        client_chosen(loader, identity, rules, rule, span);
        cannot_bind(loader, rules, rule, span);
        shared_below_clients(loader, rules, rule, span);
    }
}

/// Allowances that silence nothing where they stand.
fn allowances(loader: &mut Loader<'_>, allow: Option<&Texts>, place: Place) {
    for text in allow.iter().flat_map(|texts| &texts.items) {
        let name = text.value.split(':').next().unwrap_or_default().trim();
        let (message, help) = match Code::named(name) {
            None => (format!("no finding is called \"{name}\""), "docs/lint.md lists them all"),
            Some(code) if code.severity == Severity::Error => {
                (format!("\"{name}\" is an error, and cannot be allowed"), "correct what it is about")
            }
            Some(code) if code.place == place || code.place == Place::Either => continue,
            Some(_) if place == Place::Policy => {
                (format!("\"{name}\" is about a rule"), "write it in that rule, where others do not hide behind it")
            }
            Some(_) => (format!("\"{name}\" is about no rule"), "write it at the top of the policy, above all tables"),
        };
        loader.warning("unknown-allowance", text.span.clone(), message, help);
    }
}

/// The limit of a rule that counts every request alike.
fn plain_limit(rule: &Rule) -> Option<&Limit> {
    match &rule.measure {
        Measure::Fixed(Measured { limit, cost: CostOf::Requests }) if rule.count.is_none() && !rule.fallback => {
            Some(limit).filter(|limit| limit.is_over_time())
        }
        Measure::Fixed(_) | Measure::Tier(_) | Measure::Unlimited => None,
    }
}

fn is_login(rule: &Rule) -> bool {
    let login = |pattern: &Pattern| LOGIN_WORDS.iter().any(|word| pattern.as_str().contains(word));
    rule.matches.path.iter().any(login)
}

fn before_login(loader: &mut Loader<'_>, written: &RuleFile, rule: &Rule) {
    let names_account = |per: &Per| matches!(per, Per::Fact(name) if ACCOUNT_WORDS.contains(&name.as_ref()));
    if let Some(ladder) = &written.ladder
        && is_login(rule)
        && rule.per.iter().any(names_account)
    {
        let help = "whoever types the name could get its owner banned; [login] locks with care";
        loader.error(
            "ladder-before-login",
            ladder.span.clone(),
            "an account's name is not proven before the login",
            help,
        );
    }
}

fn failure_mode(loader: &mut Loader<'_>, written: &RuleFile, rule: &Rule) {
    let limits = !matches!(rule.measure, Measure::Unlimited);
    if limits && is_login(rule) && written.on_store_error.is_none() {
        let message = format!("the rule \"{}\" guards a login and does not say what a failing store means", rule.name);
        let help =
            "write on_store_error = \"closed\" to refuse, \"local\" to limit on each node, \"open\" to let through";
        loader.warning("login-failure-mode", written.name.span.clone(), message, help);
    }
}

fn burst(loader: &mut Loader<'_>, written: &RuleFile, rule: &Rule) {
    let Some((text, limit)) = written.limit.as_ref().zip(plain_limit(rule)) else { return };
    if !limit.refills_smoothly() {
        return;
    }
    let said = written.burst.is_some() || text.value.contains("burst");
    let doubles = if said { limit.capacity() >= limit.quota() } else { limit.period() > Span::MINUTE };
    if doubles {
        let message =
            format!("{} may come in any {}, and the limit is {}", limit.bound(), limit.period(), limit.quota());
        let help = "write a smaller burst, or algorithm = \"sliding-window\"";
        loader.warning("double-burst", text.span.clone(), message, help);
    }
}

fn store_windows(loader: &mut Loader<'_>, written: &RuleFile, rule: &Rule) {
    let Some((text, limit)) = written.limit.as_ref().zip(plain_limit(rule)) else { return };
    match rule.consistency {
        Consistency::Eventual if limit.period() < Span::MINUTE => {
            let message = format!("Workers KV cannot promise a window of {}", limit.period());
            let help = "use a window of a minute or more, or consistency = \"strong\"";
            loader.warning("window-too-short", text.span.clone(), message, help);
        }
        Consistency::Leased if limit.period() > Span::MINUTE && limit.quota() < 100 => {
            let message = format!("1 % of {} is less than one request, so there is nothing to lease", limit.quota());
            loader.warning("lease-too-small", text.span.clone(), message, "use consistency = \"strong\"");
        }
        Consistency::Strong | Consistency::Leased | Consistency::Eventual => {}
    }
}

/// Whether a client can have as many different values as it likes.
fn is_client_chosen(per: &Per, identity: &Identity) -> bool {
    let weak = |source: &Option<super::IdentitySource>| source.as_ref().is_some_and(|source| !source.is_verified());
    match per {
        Per::Header(_) | Per::Host | Per::Method | Per::Endpoint => true,
        Per::User if identity.user_scope == UserScope::Tenant => weak(&identity.user) || weak(&identity.tenant),
        Per::User => weak(&identity.user),
        Per::Tenant => weak(&identity.tenant),
        // A client with a /64 has all the networks within it.
        Per::IpPrefix(prefix) => *prefix > 64,
        Per::Ip | Per::Tier | Per::Category | Per::Fact(_) => false,
    }
}

fn client_chosen(loader: &mut Loader<'_>, identity: &Identity, rules: &[Placed], rule: &Rule, span: &Range<usize>) {
    let Some(first) = rule.per.iter().find(|per| is_client_chosen(per, identity)) else { return };
    let bounds = |per: &Per| matches!(per, Per::Ip | Per::IpPrefix(_) | Per::Fact(_) | Per::User | Per::Tenant);
    let bounded = rule.per.iter().any(|per| bounds(per) && !is_client_chosen(per, identity));
    // A pattern without wildcards is one endpoint, whatever the client writes.
    let one_endpoint = !rule.matches.path.is_empty()
        && rule.per.iter().all(|per| matches!(per, Per::Endpoint | Per::Method | Per::Category | Per::Tier));
    let stands_behind = |other: &Rule| {
        let by_address = other.per.iter().all(|per| matches!(per, Per::Ip | Per::IpPrefix(..=64)));
        other.mode == Mode::Enforce && by_address && covers(&other.matches, &rule.matches)
    };
    if bounded || one_endpoint || rules.iter().any(|(other, _)| stands_behind(other)) {
        return;
    }
    let message = format!("\"{}\" counts by {first}, which the client itself chooses", rule.name);
    let help = "whoever sends another value gets another budget; add \"ip\" to per, or a rule by address beside it";
    loader.warning("client-chosen-key", span.clone(), message, help);
}

/// A rule that matches switches its layer's fallback off, also where it does not limit the request itself.
fn fallback_off(loader: &mut Loader<'_>, rules: &[Placed], rule: &Rule, span: &Range<usize>) {
    let observes = rule.mode == Mode::Observe;
    if rule.fallback || !(observes || skips_somebody(rule)) {
        return;
    }
    let overlaps = |other: &Rule| covers(&other.matches, &rule.matches) || covers(&rule.matches, &other.matches);
    // A fallback that skips the same requests is not missed.
    let missed = |other: &Rule| {
        let skips_alike = skips_somebody(other) && (observes || rule.per.iter().all(|per| other.per.contains(per)));
        other.fallback && other.layer == rule.layer && other.mode == Mode::Enforce && overlaps(other) && !skips_alike
    };
    let limits_too = |other: &Rule| {
        !other.fallback
            && other.layer == rule.layer
            && other.mode == Mode::Enforce
            && !skips_somebody(other)
            && covers(&other.matches, &rule.matches)
    };
    let Some((fallback, _)) = rules.iter().find(|(other, _)| missed(other)) else { return };
    if rules.iter().any(|(other, _)| limits_too(other)) {
        return;
    }
    let (message, help) = if observes {
        let message = format!("\"{}\" only observes, and switches the fallback \"{}\" off", rule.name, fallback.name);
        (message, "a fallback applies only where no other rule of its layer matches; add an enforced rule beside it")
    } else {
        let message = format!(
            "\"{}\" skips requests without {}, and switches the fallback \"{}\" off for them",
            rule.name,
            rule.per.iter().filter(|per| may_be_missing(per)).map(ToString::to_string).collect::<Vec<_>>().join(" or "),
            fallback.name
        );
        (message, "they meet no limit of this layer; write on_missing = \"floor\", or add a rule by address beside it")
    };
    loader.warning("fallback-off", span.clone(), message, help);
}

/// A rule for a script of PHP and not for what follows the script's name, which runs it as well.
fn path_info(loader: &mut Loader<'_>, rule: &Rule, span: &Range<usize>) {
    let paths = &rule.matches.path;
    let dodged = |script: &Pattern| {
        let follows = format!("{script}/x");
        script.as_str().ends_with(".php") && !paths.iter().any(|own| own.matches(&follows))
    };
    // A pattern is not repeated: it is in its one spelling, in which no variable's value is recognised.
    if paths.iter().any(dodged) {
        let message =
            format!("PHP runs a script also for what follows its name, which \"{}\" does not match", rule.name);
        let help = "write \"/login.php/**\" for \"/login.php\": it matches both";
        loader.warning("path-info", span.clone(), message, help);
    }
}

/// Whether there are requests that match a rule and are not limited by it.
fn skips_somebody(rule: &Rule) -> bool {
    rule.on_missing == OnMissing::Skip && rule.per.iter().any(may_be_missing)
}

fn may_be_missing(per: &Per) -> bool {
    matches!(per, Per::Tenant | Per::User | Per::Tier | Per::Header(_) | Per::Fact(_))
}

/// Whether every request that `narrow` meets is met by `wide`; patterns count as equal or not.
fn covers(wide: &Match, narrow: &Match) -> bool {
    let names = |wide: &[Box<str>], narrow: &[Box<str>]| {
        wide.is_empty() || (!narrow.is_empty() && narrow.iter().all(|name| wide.contains(name)))
    };
    let patterns = |wide: &[Pattern], narrow: &[Pattern]| {
        let everything = |pattern: &Pattern| matches!(pattern.as_str(), "**" | "/**");
        let has = |own: &Pattern| wide.iter().any(|other| other.as_str() == own.as_str());
        wide.is_empty() || wide.iter().any(everything) || (!narrow.is_empty() && narrow.iter().all(has))
    };
    names(&wide.method, &narrow.method)
        && names(&wide.category, &narrow.category)
        && patterns(&wide.path, &narrow.path)
        && patterns(&wide.host, &narrow.host)
        && patterns(&wide.tenant, &narrow.tenant)
        && patterns(&wide.tier, &narrow.tier)
        && wide.fact.is_empty()
}

fn cannot_bind(loader: &mut Loader<'_>, rules: &[Placed], rule: &Rule, span: &Range<usize>) {
    let Some(limit) = plain_limit(rule) else { return };
    // A rung that warns lets requests past a limit, so one with a ladder does not always come first.
    let first = rules.iter().map(|(other, _)| other).find(|other| {
        other.name != rule.name
            && other.mode == Mode::Enforce
            && other.subject.is_none()
            && holds_whenever(other, rule)
            && covers(&other.matches, &rule.matches)
            && plain_limit(other).is_some_and(|tighter| tighter.fills_before(limit, other.per == rule.per))
    });
    if let Some(other) = first {
        let message = format!("\"{}\" cannot bind: \"{}\" is always full first", rule.name, other.name);
        loader.warning("cannot-bind", span.clone(), message, "remove it, or make it tighter than the other");
    }
}

/// Whether all that one budget of `narrow` counts is also counted by one budget of `wide`.
fn holds_whenever(wide: &Rule, narrow: &Rule) -> bool {
    let given =
        |per: &Per| narrow.per.contains(per) || (matches!(per, Per::IpPrefix(_)) && narrow.per.contains(&Per::Ip));
    let may_be_missing = wide.per.iter().any(|per| !matches!(per, Per::Ip | Per::IpPrefix(_)));
    let skips = wide.on_missing == OnMissing::Skip && narrow.on_missing != OnMissing::Skip;
    wide.per.iter().all(given) && !(may_be_missing && skips)
}

/// Requests over a time, made comparable by the other's period.
fn rate(quota: u64, others_period: Span) -> u128 {
    u128::from(quota).saturating_mul(u128::from(others_period.micros()))
}

fn shared_below_clients(loader: &mut Loader<'_>, rules: &[Placed], rule: &Rule, span: &Range<usize>) {
    let is_shared = !rule.per.iter().any(Per::is_identity);
    let Some(limit) = plain_limit(rule).filter(|_| is_shared) else { return };
    for (client, _) in rules {
        let by_client = client.per.iter().any(|per| matches!(per, Per::Ip | Per::User | Per::Header(_)));
        let meet = covers(&rule.matches, &client.matches) || covers(&client.matches, &rule.matches);
        let Some(own) = plain_limit(client).filter(|_| by_client && meet && client.mode == Mode::Enforce) else {
            continue;
        };
        let needed = rate(own.quota().saturating_mul(CLIENTS), limit.period());
        if rate(limit.quota(), own.period()) < needed {
            let message = format!(
                "\"{}\" is everyone's, and holds fewer than {CLIENTS} clients at the limit of \"{}\"",
                rule.name, client.name
            );
            let help = "a few clients within their limits can shut out all others; raise it, or lower theirs";
            return loader.warning("shared-below-clients", span.clone(), message, help);
        }
    }
}
