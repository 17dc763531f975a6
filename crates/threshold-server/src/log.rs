//! Logging: its setup, and the lines about denials and charges.

mod queue;

use std::fmt::Write as _;
use std::net::IpAddr;
use std::sync::Mutex;

use threshold_core::address::AddressGroup;
use threshold_core::decision::{Cause, Reading};
use threshold_core::key::write_name;
use threshold_core::path::normalize_method;
use threshold_core::plan::{Subject, Verb};
use threshold_core::policy::{Layer, LogMode, Policy, Rule};
use threshold_core::{Decision, Facts, Timestamp};
use threshold_limiter::{ObservedDecision, Observer, Operation, Refused, TokenRefused};
use tracing::Level;
use tracing_subscriber::filter::{LevelFilter, Targets};
use tracing_subscriber::fmt;
use tracing_subscriber::layer::SubscriberExt as _;
use tracing_subscriber::util::SubscriberInitExt as _;

use crate::cli::LogForm;
pub(crate) use queue::FlushOnDrop;
use queue::Queue;

/// The most lines of one kind in a second: enough to see what happens, too few for a client to fill a disk.
const MAX_PER_SECOND: u32 = 10;

/// Starts logging to standard error, through a queue. `THRESHOLD_LOG` has the levels: `warn`, or
/// `info,threshold::reload=debug`; without it, `level` is the lowest one that is logged. The returned guard waits for the last lines when it is dropped.
pub(crate) fn start(form: LogForm, level: Level) -> anyhow::Result<FlushOnDrop> {
    let targets = targets(level)?;
    let (queue, flush) = Queue::to_stderr()?;
    let registry = tracing_subscriber::registry().with(targets);
    match form {
        // Without colours: the queue replaces control characters, and escape sequences are among them.
        LogForm::Text => registry.with(fmt::layer().with_ansi(false).with_writer(queue)).try_init()?,
        LogForm::Json => {
            let layer = fmt::layer().json().flatten_event(true).with_current_span(false).with_span_list(false);
            registry.with(layer.with_writer(queue)).try_init()?;
        }
    }
    // The default hook writes to standard error directly, and would block if its reader stalls.
    std::panic::set_hook(Box::new(|panic| {
        let location = panic.location().map(ToString::to_string);
        tracing::error!(location, panic = panic.payload_as_str().unwrap_or("no message"), "panic");
    }));
    Ok(flush)
}

/// Checks `THRESHOLD_LOG`, and logs nothing.
pub(crate) fn check() -> anyhow::Result<()> {
    targets(Level::INFO).map(drop)
}

fn targets(level: Level) -> anyhow::Result<Targets> {
    // An empty variable counts as unset: a deployment file often sets one to nothing in order to leave it out.
    let wanted = std::env::var_os("THRESHOLD_LOG").map(|text| text.to_string_lossy().into_owned());
    match wanted.filter(|text| !text.trim().is_empty()) {
        None => Ok(quiet(Targets::new().with_default(level))),
        Some(text) => parse_targets(&text).map(quiet),
    }
}

/// Silences the crates that speak HTTP, unless a module of theirs is named: clients cause their lines at will, one for each frame. What
/// matters of it is logged by the doors, in a bounded number of lines.
fn quiet(targets: Targets) -> Targets {
    let level = targets.default_level().unwrap_or(LevelFilter::OFF).min(LevelFilter::ERROR);
    let is_named = |name: &str| targets.iter().any(|(target, _)| target.starts_with(name));
    let unnamed: Vec<_> = ["h2", "hyper"].into_iter().filter(|name| !is_named(name)).collect();
    targets.with_targets(unnamed.into_iter().map(|name| (name, level)))
}

/// Parses `THRESHOLD_LOG`. tracing takes a misspelled level for the name of a module, and would then log nothing else: it is
/// refused.
fn parse_targets(text: &str) -> anyhow::Result<Targets> {
    if let Some(word) = text.split(',').find(|word| !word.contains('=') && word.trim().parse::<LevelFilter>().is_err())
    {
        anyhow::bail!(
            "THRESHOLD_LOG: \"{word}\" is not a level: use error, warn, info, debug, trace or off, or MODULE=LEVEL"
        );
    }
    text.parse().map_err(|error| anyhow::anyhow!("THRESHOLD_LOG: {error}"))
}

/// Returns an address as it is logged: a digest, unless the policy has `log_identifiers = true`.
pub(crate) fn shown_address(ip: IpAddr, policy: &Policy) -> String {
    if policy.identity().log_identifiers { ip.to_canonical().to_string() } else { address_digest(ip, policy) }
}

/// Returns the digest of an address: that of the block that shares a budget, as events and `threshold subject` have it.
fn address_digest(ip: IpAddr, policy: &Policy) -> String {
    policy.key().redact(&AddressGroup::of(ip, policy.identity().ipv6_prefix).to_string())
}

/// Logs denials: all of a rule with `log = "each"`, and a sample of the others.
#[derive(Debug, Default)]
pub(crate) struct DenialLog {
    denied: LogSampler,
    /// Samples the requests that were refused undecided, separately: they must not crowd denials out of the log.
    refused: LogSampler,
    /// Samples the JWTs that did not verify.
    tokens: LogSampler,
    /// Samples the strikes.
    escalations: LogSampler,
}

/// The name of a strike in the log.
const ESCALATION: &str = "abuse_escalation";

/// Selects which of many similar events are logged: the first ten of each second.
#[derive(Debug, Default)]
pub(crate) struct LogSampler(Mutex<CurrentSecond>);

#[derive(Debug, Default)]
struct CurrentSecond {
    number: u64,
    logged: u32,
    left_out: u64,
}

impl Observer for DenialLog {
    fn decided(&self, observed: &ObservedDecision<'_>) {
        let &ObservedDecision { operation, facts, decision, policy, .. } = observed;
        if !decision.escalations.is_empty() {
            self.log_strikes(observed);
        }
        if !decision.allowed() {
            self.log(operation, facts, decision, policy);
        }
    }

    fn refused(&self, refused: Refused<'_>, policy: &Policy) {
        let Some(left_out) = self.refused.sample(refused.at) else { return };
        let LoggedIdentity { ip, .. } = LoggedIdentity::new(&Facts { ip: refused.ip, ..Facts::default() }, policy);
        tracing::warn!(
            status = refused.status,
            reason = refused.reason,
            ip,
            trace_id = %refused.trace,
            left_out,
            "request refused undecided"
        );
    }

    fn token_refused(&self, refused: TokenRefused, _: &Policy) {
        let Some(left_out) = self.tokens.sample(refused.at) else { return };
        tracing::warn!(reason = refused.reason.name(), left_out, "JWT not accepted: the request has no identity");
    }
}

impl DenialLog {
    /// Logs how many lines were left out of bursts that are over at `now`, or of all without a time.
    pub(crate) fn report_left_out(&self, now: Option<Timestamp>) {
        if let Some(left_out) = self.denied.end_burst(now) {
            tracing::warn!(left_out, "denials left out of the log");
        }
        if let Some(left_out) = self.refused.end_burst(now) {
            tracing::warn!(left_out, "undecided requests left out of the log");
        }
        if let Some(left_out) = self.tokens.end_burst(now) {
            tracing::warn!(left_out, "JWTs left out of the log");
        }
        if let Some(left_out) = self.escalations.end_burst(now) {
            tracing::warn!(event = ESCALATION, left_out, "lines left out of the log");
        }
    }

    /// Logs each strike of a request, of which it adds at most one to a subject.
    #[cold]
    fn log_strikes(&self, &ObservedDecision { operation, facts, decision, policy, .. }: &ObservedDecision<'_>) {
        // A record takes costs for which a check has no plan.
        let verb = if operation == Operation::Record { Verb::Record } else { Verb::Check };
        // The same facts under the same policy have the same subjects, in the same order.
        let Ok(plan) = policy.plan_for(verb, facts) else { return };
        let LoggedIdentity { ip, user, tenant } = LoggedIdentity::new(facts, policy);
        for strike in &*decision.escalations {
            let rule = plan.rule_of(strike.charge);
            let layer = plan.subjects().get(strike.subject).map(Subject::layer);
            let each = rule.is_some_and(|rule| rule.log == LogMode::Each);
            let left_out = if each { Some(0) } else { self.escalations.sample(decision.at) };
            let Some(left_out) = left_out else { continue };
            let digest = subject_digest(layer, facts, policy);
            tracing::warn!(
                event = ESCALATION,
                // A ladder may count by tenant or address, and requests may come without a user.
                userId = user.as_deref().or(tenant.as_deref()).or(ip.as_deref()),
                warnings = strike.strikes,
                shadowBanned = strike.shadowed,
                bannedUntil = strike.banned_until.map(Timestamp::secs_ceil),
                layer = layer.map(Layer::name),
                rule = rule.map(|rule| rule.name.as_ref()),
                digest,
                trace_id = %decision.trace,
                left_out,
                "{ESCALATION}"
            );
        }
    }

    fn log(&self, operation: Operation, facts: &Facts<'_>, decision: &Decision, policy: &Policy) {
        let rule = decision.rule(policy);
        let is_each = |rule: &Rule| rule.log == LogMode::Each;
        // Also a rule that was exceeded but did not bind: with `log = "each"` an operator asks for every denial that
        // it took part in.
        let each = rule.is_some_and(is_each) || exceeded(decision, policy).any(|(rule, _)| is_each(rule));
        // A peek stops nobody by itself. An application that stops a request after it can ask for a line with `each`.
        if operation == Operation::Peek && !each {
            return;
        }
        // A line of `each` leaves the sampler alone, so that it neither uses up the ten lines of others nor reports
        // their number.
        let left_out = if each { Some(0) } else { self.denied.sample(decision.at) };
        let Some(left_out) = left_out else { return };
        let LoggedIdentity { ip, user, tenant } = LoggedIdentity::new(facts, policy);
        let bound = decision.bound_by();
        let layer = decision.penalty_layer().or_else(|| rule.map(|rule| rule.layer));
        tracing::warn!(
            verdict = decision.verdict.name(),
            rule = rule.map(|rule| rule.name.as_ref()),
            layer = layer.map(Layer::name),
            cause = decision.cause().map(Cause::name),
            method = facts.method.map(|method| normalize_method(method).into_owned()),
            // The pattern and not the path, which may contain a secret or a user's name.
            path = policy.path_pattern(rule, facts),
            digest = subject_digest(layer, facts, policy),
            count = bound.map(count),
            limit = bound.map(|reading| reading.limit),
            full = exceeded_text(decision, policy),
            retry_after = decision.retry_after().map(|wait| threshold_core::Span::from(wait).secs_ceil()),
            ip,
            user,
            tenant,
            degraded = decision.degraded.map(threshold_core::decision::Degraded::name),
            trace_id = %decision.trace,
            left_out,
            "denied"
        );
    }
}

/// Returns the digest of the subject that a denial is about, which `threshold subject` prints for it.
fn subject_digest(layer: Option<Layer>, facts: &Facts<'_>, policy: &Policy) -> Option<String> {
    let name = match layer {
        Some(Layer::User) => facts.user,
        Some(Layer::Tenant) => facts.tenant,
        // A rule of these layers may count by anything. The address is what an operator can look up.
        Some(Layer::Edge | Layer::Global | Layer::Endpoint) | None => None,
    };
    name.map(|name| policy.key().redact(name)).or_else(|| facts.ip.map(|ip| address_digest(ip, policy)))
}

/// Logs one line at DEBUG for each limit that a request was charged on.
#[inline]
pub(crate) fn charges(verb: &'static str, facts: &Facts<'_>, decision: &Decision, policy: &Policy) {
    if tracing::enabled!(Level::DEBUG) {
        charges_at_debug(verb, facts, decision, policy);
    }
}

#[cold]
fn charges_at_debug(verb: &'static str, facts: &Facts<'_>, decision: &Decision, policy: &Policy) {
    let LoggedIdentity { ip, user, tenant } = LoggedIdentity::new(facts, policy);
    let charged = decision.readings.iter().filter(|reading| reading.charged);
    for (rule, reading) in charged.filter_map(|reading| Some((policy.rules().get(reading.rule())?, reading))) {
        tracing::debug!(
            verb,
            rule = rule.name.as_ref(),
            count = count(reading),
            limit = reading.limit,
            cost = reading.cost,
            ip,
            user,
            tenant,
            trace_id = %decision.trace,
            "counted"
        );
    }
}

/// Returns how much of a limit is used, at most all of it.
fn count(reading: &Reading) -> u64 {
    reading.limit.saturating_sub(reading.remaining)
}

/// Returns the enforced limits that a request exceeded, with their rules.
fn exceeded<'d>(decision: &'d Decision, policy: &'d Policy) -> impl Iterator<Item = (&'d Rule, &'d Reading)> {
    let full = decision.readings.iter().filter(|reading| reading.enforced && !reading.allowed);
    full.filter_map(|reading| Some((policy.rules().get(reading.rule())?, reading)))
}

/// Formats the exceeded limits: `per-minute 10/10, per-hour 100/100`. `None` if a list, a ban or a penalty denied.
fn exceeded_text(decision: &Decision, policy: &Policy) -> Option<String> {
    let mut text = String::new();
    for (rule, reading) in exceeded(decision, policy) {
        let comma = if text.is_empty() { "" } else { ", " };
        let _ = write!(text, "{comma}{} {}/{}", rule.name, count(reading), reading.limit);
    }
    (!text.is_empty()).then_some(text)
}

/// The caller as it is logged: users and addresses as digests, unless the policy has `log_identifiers = true`.
struct LoggedIdentity {
    ip: Option<String>,
    user: Option<String>,
    tenant: Option<String>,
}

impl LoggedIdentity {
    fn new(facts: &Facts<'_>, policy: &Policy) -> Self {
        let identity = policy.identity();
        let shown =
            |name: &str, hidden: bool| if hidden { policy.key().redact(name) } else { write_name(name).into_owned() };
        let hides = !identity.log_identifiers;
        Self {
            ip: facts.ip.map(|ip| shown_address(ip, policy)),
            user: facts.user.map(|user| shown(user, hides || identity.secret_user)),
            // A tenant is an organisation and not a person, so only a secret name is hidden.
            tenant: facts.tenant.map(|tenant| shown(tenant, identity.secret_tenant)),
        }
    }
}

impl LogSampler {
    /// If this event is to be logged, returns the number of events since the last logged one.
    pub(crate) fn sample(&self, at: Timestamp) -> Option<u64> {
        let number = at.micros().checked_div(1_000_000).unwrap_or(0);
        let mut second = self.0.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
        // Compared for a difference and not for the order: a clock that steps back must not silence the log until it
        // has caught up.
        if second.number != number {
            second.number = number;
            second.logged = 0;
        }
        if second.logged >= MAX_PER_SECOND {
            second.left_out = second.left_out.saturating_add(1);
            return None;
        }
        second.logged = second.logged.saturating_add(1);
        // `left_out` is not reset with the second, only here: the first line of the next second reports it.
        Some(std::mem::take(&mut second.left_out))
    }
}

impl LogSampler {
    /// Returns the number of events that were left out since the last logged one, if their second is over at `now`; without a
    /// time it is taken to be over.
    pub(crate) fn end_burst(&self, now: Option<Timestamp>) -> Option<u64> {
        let mut second = self.0.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
        let is_over = now.is_none_or(|now| now.micros().checked_div(1_000_000).unwrap_or(0) != second.number);
        (is_over && second.left_out > 0).then(|| std::mem::take(&mut second.left_out))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_misspelled_level_is_refused() {
        for fine in ["warn", "INFO", "off", "info,threshold::reload=debug", "threshold=trace, warn"] {
            assert!(parse_targets(fine).is_ok(), "{fine}");
        }
        // A module without a level is refused as well: it looks the same as a misspelled level.
        for wrong in ["loud", "info,verbose", "threshold", "threshold=loud"] {
            assert!(parse_targets(wrong).is_err(), "{wrong}");
        }
    }

    /// A client could once write a line of h2's for each of its frames, without a token.
    ///
    /// Woken by: leaving out `quiet`, `min` or `is_named`.
    #[test]
    fn clients_cannot_write_the_lines_of_libraries() {
        let enables =
            |text: &str, target: &str, level| quiet(parse_targets(text).unwrap()).would_enable(target, &level);
        for text in ["info", "debug", "warn,threshold::reload=debug"] {
            assert!(!enables(text, "h2::proto::ping_pong", Level::WARN), "{text}");
            assert!(!enables(text, "hyper_util::server", Level::WARN), "{text}");
            assert!(enables(text, "h2::proto", Level::ERROR) && enables(text, "threshold", Level::WARN), "{text}");
        }
        assert!(!enables("off", "h2::proto", Level::ERROR));
        assert!(enables("info,h2::proto=debug", "h2::proto", Level::DEBUG));
    }

    #[test]
    fn ten_events_a_second_are_logged_and_the_others_counted() {
        let samples = LogSampler::default();
        let at = Timestamp::from_secs(1_767_225_600);
        let logged = (0..25).filter(|_| samples.sample(at).is_some()).count();
        assert_eq!(logged, 10);
        assert_eq!(samples.sample(Timestamp::from_secs(1_767_225_601)), Some(15));
        assert_eq!(samples.sample(Timestamp::from_secs(1_767_225_601)), Some(0));
    }

    /// A burst of 5,000 denials had ten lines; the other 4,990 were reported by the next denial, hours later.
    ///
    /// Fails if `end_burst` reports in the second of the burst, or twice.
    #[test]
    fn events_that_were_left_out_are_reported_when_their_second_is_over() {
        let samples = LogSampler::default();
        let (at, later) = (Timestamp::from_secs(1_767_225_600), Timestamp::from_secs(1_767_225_601));
        assert_eq!(samples.end_burst(Some(at)), None);
        assert_eq!((0..25).filter(|_| samples.sample(at).is_some()).count(), 10);
        assert_eq!(samples.end_burst(Some(at)), None);
        assert_eq!(samples.end_burst(Some(later)), Some(15));
        assert_eq!(samples.end_burst(Some(later)), None);
        assert_eq!(samples.sample(later), Some(0), "reported once");
        assert_eq!((0..25).filter(|_| samples.sample(later).is_some()).count(), 9);
        assert_eq!(samples.end_burst(None), Some(16), "before the process ends");
    }
}
