//! Warnings about policies that are valid but do not protect as they appear to.

mod believed;
mod eventual;
mod tiers;

use std::ops::Range;

use super::codes::{Code, Place};
use super::file::{PolicyFile, RuleFile, Texts};
use super::finding::Severity;
use super::load::Loader;
use super::rule::{Consistency, CostOf, Match, Measure, Measured, Mode, OnMissing, Per, Rule};
use super::tiers::Tiers;
use super::{Identity, Pattern, UserScope};
use crate::limit::Limit;
use crate::time::Span;

/// A shared limit should leave room for at least this many clients at their own limits.
const CLIENTS: u64 = 50;
/// Words that occur in the paths of logins.
const LOGIN_WORDS: [&str; 11] =
    ["login", "logon", "signin", "sign-in", "password", "passwd", "otp", "2fa", "mfa", "/auth", "oauth"];
/// Names of custom facts that hold an account name.
const ACCOUNT_WORDS: [&str; 5] = ["account", "username", "user", "email", "login"];

type Placed = (Rule, Range<usize>);

/// Adds the warnings about a policy that has no errors. Returns how many rules were compared with the others, in so much work.
pub(super) fn review(
    loader: &mut Loader<'_>,
    file: &PolicyFile,
    identity: &Identity,
    tiers: &Tiers,
    rules: &[Placed],
) -> usize {
    allowances(loader, file.allow.as_ref(), Place::Policy);
    if file.rule.is_empty() && file.login.is_none() {
        let help = "add a [[rule]]; a server takes such a policy only with --allow-empty";
        loader.warning("no-rules", 0..0, "the policy has no rules and no [login], so it limits nothing", help);
    }
    believed::counts_the_proxy(loader, &file.identity, identity, rules.iter().map(|(rule, _)| rule));
    believed::passed_on(loader, &file.identity, identity);
    tiers::alike(loader, file);
    tiers::without_default(loader, file, tiers, rules);
    for located in &file.rule {
        let written = &located.value;
        allowances(loader, written.allow.as_ref(), Place::Rule);
        let Some((rule, _)) = rules.iter().find(|(rule, _)| rule.name.as_ref() == written.name.value) else { continue };
        before_login(loader, written, rule);
        if rule.consistency == Consistency::Eventual {
            eventual::check(loader, tiers, written, rule);
        }
        eventual::place(loader, tiers, identity, written, rule);
        if rule.mode == Mode::Enforce {
            failure_mode(loader, written, rule);
            burst(loader, written, rule);
            gives_back(loader, tiers, written, rule);
        }
    }
    eventual::shared_keys(loader, file, rules);
    let mut all = [0usize; LISTS];
    for (rule, _) in rules {
        all.iter_mut().zip(lengths(&rule.matches)).for_each(|(sum, own)| *sum = sum.saturating_add(own));
    }
    for (place, (rule, span)) in rules.iter().enumerate() {
        if !loader.spend(steps_of(rule, &all, rules.len())) || !path_info(loader, rule, span) {
            return place;
        }
        fallback_off(loader, rules, rule, span);
        ladders_apart(loader, identity, rules, place);
        if rule.mode == Mode::Enforce {
            client_chosen(loader, identity, rules, rule, span);
            shared_below_clients(loader, rules, rule, span);
            cannot_bind(loader, tiers, rules, rule, span);
        }
    }
    rules.len()
}

/// The number of lists of a match that [`covers`] compares.
const LISTS: usize = 6;
/// How often a rule is compared with all others.
const COMPARISONS: usize = 8;

/// Returns the number of items in each list of a match.
fn lengths(matches: &Match) -> [usize; LISTS] {
    let Match { method, category, path, host, tenant, tier, .. } = matches;
    [method.len(), category.len(), path.len(), host.len(), tenant.len(), tier.len()]
}

/// Returns the most steps that comparing a rule with all others takes. `all` are the lengths of the lists of all rules together.
fn steps_of(rule: &Rule, all: &[usize; LISTS], rules: usize) -> usize {
    let items = lengths(&rule.matches).into_iter().zip(all).map(|(own, all)| own.saturating_mul(*all));
    items.fold(rules, usize::saturating_add).saturating_mul(COMPARISONS)
}

/// Warns about each `allow` that silences nothing.
fn allowances(loader: &mut Loader<'_>, allow: Option<&Texts>, place: Place) {
    for text in allow.iter().flat_map(|texts| &texts.items) {
        let name = text.value.split(':').next().unwrap_or_default().trim();
        let (message, help) = match Code::named(name) {
            None => (format!("no finding is called \"{name}\""), "docs/lint.md lists them all"),
            Some(code) if code.severity == Severity::Error => {
                (format!("\"{name}\" is an error, which cannot be silenced"), "fix the error")
            }
            Some(code) if code.place == place || code.place == Place::Either => continue,
            Some(_) if place == Place::Policy => {
                (format!("\"{name}\" is about a rule"), "write it in that rule, so that it silences nothing else")
            }
            Some(_) => (format!("\"{name}\" is about no rule"), "write it at the top of the policy, above all tables"),
        };
        loader.warning("unknown-allowance", text.span.clone(), message, help);
    }
}

/// Returns the limit of a rule that counts every matching request as one.
fn plain_limit(rule: &Rule) -> Option<&Limit> {
    match &rule.measure {
        Measure::Fixed(Measured { limit, cost: CostOf::Requests, .. }) if rule.count.is_none() && !rule.fallback => {
            Some(limit).filter(|limit| limit.is_over_time())
        }
        Measure::Fixed(_) | Measure::Tier(_) | Measure::NamedByTier(_) | Measure::Unlimited => None,
    }
}

/// Returns the limits of a rule that counts every matching request as one: one, or those of all tiers. Empty if any of them
/// counts something else.
fn plain_limits<'r>(rule: &'r Rule, tiers: &'r Tiers) -> Vec<&'r Limit> {
    let (Measure::Tier(shape) | Measure::NamedByTier(shape)) = rule.measure else {
        return plain_limit(rule).into_iter().collect();
    };
    let is_plain = |own: &Measured| own.cost == CostOf::Requests && own.limit.is_over_time();
    let all: Vec<&Measured> = tiers.measured_of_shape(shape).collect();
    if rule.count.is_some() || rule.fallback || !all.iter().all(|own| is_plain(own)) {
        return Vec::new();
    }
    all.into_iter().map(|own| &own.limit).collect()
}

fn is_login(rule: &Rule) -> bool {
    let login = |pattern: &Pattern| LOGIN_WORDS.iter().any(|word| pattern.as_str().contains(word));
    rule.matches.path.iter().any(login)
}

/// Reports ladders by account name on a login.
fn before_login(loader: &mut Loader<'_>, written: &RuleFile, rule: &Rule) {
    let names_account = |per: &Per| matches!(per, Per::Fact(name) if ACCOUNT_WORDS.contains(&name.as_ref()));
    if let Some(ladder) = &written.ladder
        && is_login(rule)
        && rule.per.iter().any(names_account)
    {
        let help = "anyone who types the name could get its owner banned; [login] locks accounts without that risk";
        loader.error(
            "ladder-before-login",
            ladder.span.clone(),
            "an account name is not proven before the login",
            help,
        );
    }
}

/// Warns about login rules that leave the failure mode to the default.
fn failure_mode(loader: &mut Loader<'_>, written: &RuleFile, rule: &Rule) {
    let limits = !matches!(rule.measure, Measure::Unlimited);
    if limits && is_login(rule) && written.on_store_error.is_none() {
        let message = format!("the rule \"{}\" guards a login and does not set on_store_error", rule.name);
        let help = "write \"closed\" to deny while the store fails, \"local\" to limit on each node, \"open\" to allow";
        loader.warning("login-failure-mode", written.name.span.clone(), message, help);
    }
}

/// Warns about buckets that allow twice their limit.
fn burst(loader: &mut Loader<'_>, written: &RuleFile, rule: &Rule) {
    let Some((text, limit)) = written.limit.as_ref().zip(plain_limit(rule)) else { return };
    if !limit.refills_smoothly() {
        return;
    }
    let said = written.burst.is_some() || text.value.contains("burst");
    // A burst that is written is judged by its size. Without one it is the quota: usual up to a minute, where a bucket
    // is the default, and rarely meant beyond.
    let doubles = if said { limit.capacity() >= limit.quota() } else { limit.period() > Span::MINUTE };
    if doubles {
        let (most, period) = (limit.bound(), limit.period());
        let message = format!("up to {most} requests are allowed in any {period}, and the limit is {}", limit.quota());
        let help = "write a smaller burst, or algorithm = \"sliding-window\"";
        loader.warning("double-burst", text.span.clone(), message, help);
    }
}

/// Warns about buckets whose charges are given back: those of responses that are not counted, and named costs, of which the most is
/// reserved and the rest returned. Envoy's negative hits take from the latest charge, of which nothing is lost.
fn gives_back(loader: &mut Loader<'_>, tiers: &Tiers, written: &RuleFile, rule: &Rule) {
    let by_outcome = rule.count.is_some();
    let loses = |own: &Measured| own.limit.refills_smoothly() && (by_outcome || matches!(own.cost, CostOf::Named(_)));
    let is_found = match &rule.measure {
        Measure::Fixed(own) => loses(own),
        Measure::Tier(shape) | Measure::NamedByTier(shape) => tiers.measured_of_shape(*shape).any(loses),
        Measure::Unlimited => false,
    };
    if is_found {
        let what = if by_outcome { "requests that are not counted" } else { "what was reserved and not used" };
        let message = format!(
            "\"{}\" is a token bucket and gives back {what}: where that comes in another order than the charges, a part is lost",
            rule.name
        );
        let help = "write algorithm = \"sliding-window\", which gives back exactly";
        loader.warning("bucket-gives-back", written.name.span.clone(), message, help);
    }
}

/// Whether a client can choose any number of different values.
fn is_client_chosen(per: &Per, identity: &Identity) -> bool {
    let weak = |source: &Option<super::IdentitySource>| source.as_ref().is_some_and(|source| !source.is_verified());
    match per {
        Per::Header(_) | Per::Host | Per::Method | Per::Endpoint => true,
        Per::User if identity.user_scope == UserScope::Tenant => weak(&identity.user) || weak(&identity.tenant),
        Per::User => weak(&identity.user),
        Per::Tenant => weak(&identity.tenant),
        // A client with a /64 can use every longer prefix within it.
        Per::IpPrefix(prefix) => *prefix > 64,
        Per::Ip | Per::Tier | Per::Category | Per::Fact(_) => false,
    }
}

/// Warns about budgets that a client gets more of by choosing new values.
fn client_chosen(loader: &mut Loader<'_>, identity: &Identity, rules: &[Placed], rule: &Rule, span: &Range<usize>) {
    let Some(first) = rule.per.iter().find(|per| is_client_chosen(per, identity)) else { return };
    // These have few values for one client, if a client cannot choose them.
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
    let message = format!("\"{}\" counts by {first}, which the client chooses", rule.name);
    let help = "a client gets a new budget with each new value; add \"ip\" to per, or a rule by address beside it";
    loader.warning("client-chosen-key", span.clone(), message, help);
}

/// The identity whose partition of a store holds the records of a rule. [`Digest::partition`](crate::Digest::partition) lists them.
#[derive(PartialEq)]
enum Anchor<'r> {
    Tenant,
    User,
    Address,
    Others(Vec<&'r Per>),
}

fn anchor<'r>(rule: &'r Rule, identity: &Identity) -> Anchor<'r> {
    let has = |is_such: fn(&Per) -> bool| rule.per.iter().any(is_such);
    let has_user = has(|per| matches!(per, Per::User));
    if has(|per| matches!(per, Per::Tenant)) || (has_user && identity.user_scope == UserScope::Tenant) {
        Anchor::Tenant
    } else if has_user {
        Anchor::User
    } else if has(|per| matches!(per, Per::Ip | Per::IpPrefix(_))) {
        Anchor::Address
    } else {
        Anchor::Others(rule.per.iter().filter(|per| matches!(per, Per::Header(_) | Per::Fact(_))).collect())
    }
}

/// Warns about ladders that one request can meet in two partitions of a store. Only a denial by one of them is a strike.
fn ladders_apart(loader: &mut Loader<'_>, identity: &Identity, rules: &[Placed], place: usize) {
    let strikes = |rule: &Rule| rule.subject.is_some() && rule.mode == Mode::Enforce;
    let Some((rule, span)) = rules.get(place).filter(|(rule, _)| strikes(rule)) else { return };
    let earlier = rules.iter().take(place).map(|(other, _)| other).find(|other| {
        let meet = || covers(&other.matches, &rule.matches) || covers(&rule.matches, &other.matches);
        strikes(other) && anchor(other, identity) != anchor(rule, identity) && meet()
    });
    if let Some(other) = earlier {
        let message = format!(
            "\"{}\" and \"{}\" have ladders in different partitions: on a Cluster a denial by one of them is no strike",
            other.name, rule.name
        );
        let help = "count both by the same identity, or leave one ladder out; on one server every denial strikes";
        loader.warning("ladders-apart", span.clone(), message, help);
    }
}

/// Warns about rules that switch their layer's fallback off for requests that they do not limit themselves.
fn fallback_off(loader: &mut Loader<'_>, rules: &[Placed], rule: &Rule, span: &Range<usize>) {
    let observes = rule.mode == Mode::Observe;
    if rule.fallback || !(observes || skips_requests(rule)) {
        return;
    }
    let overlaps = |other: &Rule| covers(&other.matches, &rule.matches) || covers(&rule.matches, &other.matches);
    // A fallback that skips the same requests would not have limited them either.
    let missed = |other: &Rule| {
        let skips_alike = skips_requests(other) && (observes || rule.per.iter().all(|per| other.per.contains(per)));
        other.fallback && other.layer == rule.layer && other.mode == Mode::Enforce && overlaps(other) && !skips_alike
    };
    let limits_too = |other: &Rule| {
        !other.fallback
            && other.layer == rule.layer
            && other.mode == Mode::Enforce
            && !skips_requests(other)
            && covers(&other.matches, &rule.matches)
    };
    let Some((fallback, _)) = rules.iter().find(|(other, _)| missed(other)) else { return };
    if rules.iter().any(|(other, _)| limits_too(other)) {
        return;
    }
    let (message, help) = if observes {
        let message =
            format!("\"{}\" only observes, and still switches the fallback \"{}\" off", rule.name, fallback.name);
        (message, "a fallback applies only where no other rule of its layer matches; add an enforced rule beside it")
    } else {
        let message = format!(
            "\"{}\" skips requests without {}, and switches the fallback \"{}\" off for them",
            rule.name,
            rule.per.iter().filter(|per| may_be_missing(per)).map(ToString::to_string).collect::<Vec<_>>().join(" or "),
            fallback.name
        );
        (message, "no rule of this layer limits them; write on_missing = \"floor\", or add a rule by address beside it")
    };
    loader.warning("fallback-off", span.clone(), message, help);
}

/// Warns about rules for a PHP script that do not match what follows the script's name: PHP runs the script for that too. Returns whether
/// there was enough work for it.
fn path_info(loader: &mut Loader<'_>, rule: &Rule, span: &Range<usize>) -> bool {
    let paths = &rule.matches.path;
    let mut is_dodged = false;
    for script in paths.iter().filter(|script| script.as_str().ends_with(".php")) {
        let (follows, mut steps) = (format!("{script}/x"), 0);
        is_dodged |= !paths.iter().any(|own| own.matches_within(&follows, &mut steps));
        if !loader.spend(steps) {
            return false;
        }
        if is_dodged {
            break;
        }
    }
    // The message does not quote the pattern: it is normalized, so that a variable's value in it would not be recognized.
    if is_dodged {
        let message = format!(
            "PHP also runs a script for a path that continues after its name, which \"{}\" does not match",
            rule.name
        );
        let help = "write \"/login.php/**\" for \"/login.php\": it matches both";
        loader.warning("path-info", span.clone(), message, help);
    }
    true
}

/// Whether a rule skips some of the requests that it matches.
fn skips_requests(rule: &Rule) -> bool {
    rule.on_missing == OnMissing::Skip && rule.per.iter().any(may_be_missing)
}

fn may_be_missing(per: &Per) -> bool {
    matches!(per, Per::Tenant | Per::User | Per::Tier | Per::Header(_) | Per::Fact(_))
}

/// Whether `wide` matches every request that `narrow` matches. Patterns are only compared for equality.
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
        // Conditions on facts are not compared, so a rule with any covers nothing for certain.
        && wide.fact.is_empty()
}

/// Warns about limits that another rule always reaches first. A limit by tier has no effect if that is so for every tier.
fn cannot_bind(loader: &mut Loader<'_>, tiers: &Tiers, rules: &[Placed], rule: &Rule, span: &Range<usize>) {
    let limits = plain_limits(rule, tiers);
    if limits.is_empty() || !loader.spend(limits.len().saturating_mul(rules.len())) {
        return;
    }
    // A rung that warns allows requests beyond the limit, so a rule with a ladder does not always come first. Nor does one by
    // tier, which has a budget for each category.
    let first = rules.iter().map(|(other, _)| other).find(|other| {
        let fills_first =
            |tighter: &Limit| limits.iter().all(|limit| tighter.fills_before(limit, other.per == rule.per));
        other.name != rule.name
            && other.mode == Mode::Enforce
            && other.subject.is_none()
            && holds_whenever(other, rule)
            && covers(&other.matches, &rule.matches)
            && plain_limit(other).is_some_and(fills_first)
    });
    if let Some(other) = first {
        let message = format!("\"{}\" has no effect: \"{}\" is always reached first", rule.name, other.name);
        loader.warning("cannot-bind", span.clone(), message, "remove it, or make it tighter than the other");
    }
}

/// Whether everything that one budget of `narrow` counts is also counted by a single budget of `wide`.
fn holds_whenever(wide: &Rule, narrow: &Rule) -> bool {
    let given =
        |per: &Per| narrow.per.contains(per) || (matches!(per, Per::IpPrefix(_)) && narrow.per.contains(&Per::Ip));
    let may_be_missing = wide.per.iter().any(|per| !matches!(per, Per::Ip | Per::IpPrefix(_)));
    let skips = wide.on_missing == OnMissing::Skip && narrow.on_missing != OnMissing::Skip;
    wide.per.iter().all(given) && !(may_be_missing && skips)
}

/// Multiplies a quota by the other limit's period, which makes two rates comparable without a division.
fn rate(quota: u64, others_period: Span) -> u128 {
    u128::from(quota).saturating_mul(u128::from(others_period.micros()))
}

/// Warns about shared budgets that a few clients can use up.
fn shared_below_clients(loader: &mut Loader<'_>, rules: &[Placed], rule: &Rule, span: &Range<usize>) {
    let is_shared = !rule.per.iter().any(Per::is_identity);
    let Some(limit) = plain_limit(rule).filter(|_| is_shared) else { return };
    for (client, _) in rules {
        // One budget of such a rule is about one client.
        let by_client = client.per.iter().any(|per| matches!(per, Per::Ip | Per::User | Per::Header(_)));
        let meet = covers(&rule.matches, &client.matches) || covers(&client.matches, &rule.matches);
        let Some(own) = plain_limit(client).filter(|_| by_client && meet && client.mode == Mode::Enforce) else {
            continue;
        };
        // Cross products, because the two limits may have different periods.
        let needed = rate(own.quota().saturating_mul(CLIENTS), limit.period());
        if rate(limit.quota(), own.period()) < needed {
            let message = format!(
                "\"{}\" is shared by everyone and has room for fewer than {CLIENTS} clients at the limit of \"{}\"",
                rule.name, client.name
            );
            let help = "a few clients within their own limits can shut everyone else out; raise it, or lower theirs";
            return loader.warning("shared-below-clients", span.clone(), message, help);
        }
    }
}
