//! The metrics for Prometheus: decisions by rule and verdict. Labels come only from the policy, so that no caller can add a
//! series.

use std::sync::Arc;

use arc_swap::ArcSwap;
use prometheus_client::encoding::EncodeLabelSet;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::registry::Registry;
use threshold_core::decision::{Degraded, Verdict};
use threshold_core::policy::Policy;
use threshold_limiter::{ObservedDecision, Observer, Refused, TokenRefused};

/// All metrics of one server.
#[derive(Debug)]
pub(crate) struct Metrics {
    registry: Registry,
    counts: Arc<Counts>,
}

/// The counters, which are updated as an observer of the limiter.
#[derive(Debug)]
struct Counts {
    decisions: Family<DecisionLabels, Counter>,
    blocks: Family<LayerLabel, Counter>,
    warnings: Counter,
    degraded: Family<ReasonLabel, Counter>,
    refused: Counter,
    tokens_refused: Family<ReasonLabel, Counter>,
    returns_lost: Counter,
    store_differences: Counter,
    charges_lost: Counter,
    store_up: Gauge,
    /// The series of the policy in force, looked up once for each generation.
    series: ArcSwap<Series>,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct DecisionLabels {
    layer: &'static str,
    rule: String,
    verdict: &'static str,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct LayerLabel {
    layer: &'static str,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct ReasonLabel {
    reason: &'static str,
}

const VERDICTS: [Verdict; 5] = [Verdict::Allow, Verdict::Warn, Verdict::Slow, Verdict::Deny, Verdict::Ban];

/// The counters of one policy's decisions.
#[derive(Debug)]
struct Series {
    generation: u64,
    /// By the rule's index in the policy.
    rules: Vec<RuleSeries>,
    /// For decisions without a binding rule: allow-listed, banned by an operator, or matched by no rule.
    unbound: RuleSeries,
}

#[derive(Debug, Default)]
struct RuleSeries {
    layer: &'static str,
    rule: String,
    verdicts: [Counter; VERDICTS.len()],
    blocks: Counter,
}

impl Metrics {
    pub(crate) fn new() -> Self {
        let counts = Arc::new(Counts {
            decisions: Family::default(),
            blocks: Family::default(),
            warnings: Counter::default(),
            degraded: Family::default(),
            refused: Counter::default(),
            tokens_refused: Family::default(),
            returns_lost: Counter::default(),
            store_differences: Counter::default(),
            charges_lost: Counter::default(),
            store_up: Gauge::default(),
            series: ArcSwap::from_pointee(Series { generation: 0, rules: Vec::new(), unbound: RuleSeries::default() }),
        });
        // A store in memory always answers, and a shared one has answered when the server starts.
        counts.store_up.set(1);
        // From the start: a rate over a series that appears with its first event misses that event.
        for reason in Degraded::ALL {
            counts.count_degraded(reason, 0);
        }
        let mut registry = Registry::with_prefix("threshold");
        registry.register("decisions", "Decisions, by the rule that bound them", counts.decisions.clone());
        registry.register("blocks", "Requests that were denied or banned, by layer", counts.blocks.clone());
        registry.register("warnings", "Requests that were let through with a warning", counts.warnings.clone());
        registry.register("degraded", "Decisions without all that they need, by reason", counts.degraded.clone());
        registry.register("refused", "Requests that client doors refused undecided", counts.refused.clone());
        registry.register(
            "tokens_refused",
            "Bearer tokens that did not verify, by reason",
            counts.tokens_refused.clone(),
        );
        registry.register(
            "returns_lost",
            "Requests whose refunds an asynchronous store did not receive",
            counts.returns_lost.clone(),
        );
        registry.register(
            "store_differences",
            "Writes of the store that differed from what the node would have written, of one in 1,000 that are compared",
            counts.store_differences.clone(),
        );
        registry.register(
            "charges_lost",
            "Charges of requests admitted without the store that it will not hear of, because too many keys waited for its return",
            counts.charges_lost.clone(),
        );
        registry.register(
            "store_up",
            "Whether the store answers: 0 while rules decide by on_store_error, also if only a part of it is away",
            counts.store_up.clone(),
        );
        Self { registry, counts }
    }

    /// Returns the observer that updates the counters.
    pub(crate) fn observer(&self) -> Arc<dyn Observer> {
        Arc::<Counts>::clone(&self.counts)
    }

    /// Counts writes of the store that were wrong. Returns whether there are new ones.
    pub(crate) fn set_store_differences(&self, total: u64) -> bool {
        let more = total.saturating_sub(self.counts.store_differences.get());
        self.counts.store_differences.inc_by(more);
        more > 0
    }

    /// Counts charges that the store will not hear of.
    pub(crate) fn set_charges_lost(&self, total: u64) {
        let more = total.saturating_sub(self.counts.charges_lost.get());
        self.counts.charges_lost.inc_by(more);
    }

    /// Sets whether the store answers.
    pub(crate) fn set_store_up(&self, is_up: bool) {
        self.counts.store_up.set(i64::from(is_up));
    }

    /// Encodes all metrics as OpenMetrics text.
    pub(crate) fn text(&self) -> String {
        let mut text = String::new();
        // Writing to a string cannot fail.
        let _ = prometheus_client::encoding::text::encode(&mut text, &self.registry);
        text
    }
}

impl Observer for Counts {
    fn decided(&self, &ObservedDecision { decision, policy, .. }: &ObservedDecision<'_>) {
        let mut series = self.series.load();
        // Looking up a series by its labels takes a lock and hashes strings. It is done once for each policy, not for
        // each decision.
        if series.generation != policy.generation() {
            let before = self.series.swap(Arc::new(self.series_of(policy)));
            self.remove_series(&before, policy);
            series = self.series.load();
        }
        let bound = decision.bound_by().and_then(|reading| series.rules.get(reading.rule())).unwrap_or(&series.unbound);
        if let Some(counter) = bound.verdicts.get(place(decision.verdict)) {
            counter.inc();
        }
        // By layer as well, so that an alert on blocks needs no list of the policy's rules.
        if !decision.allowed() {
            bound.blocks.inc();
        }
        if decision.verdict == Verdict::Warn {
            self.warnings.inc();
        }
        if let Some(reason) = decision.degraded {
            self.count_degraded(reason, 1);
        }
    }

    fn refused(&self, _: Refused<'_>, _: &Policy) {
        self.refused.inc();
    }

    fn token_refused(&self, refused: TokenRefused, _: &Policy) {
        self.tokens_refused.get_or_create(&ReasonLabel { reason: refused.reason.name() }).inc();
    }

    fn return_lost(&self) {
        self.returns_lost.inc();
    }
}

impl Counts {
    #[cold]
    fn series_of(&self, policy: &Policy) -> Series {
        let series = |layer: &'static str, rule: &str| RuleSeries {
            layer,
            rule: rule.to_owned(),
            // Every verdict of every rule has a series from the start: a rate over a series that appears with its
            // first event misses that event.
            verdicts: VERDICTS.map(|verdict| {
                let labels = DecisionLabels { layer, rule: rule.to_owned(), verdict: verdict.name() };
                self.decisions.get_or_create(&labels).clone()
            }),
            blocks: self.blocks.get_or_create(&LayerLabel { layer }).clone(),
        };
        let rules = policy.rules().iter().map(|rule| series(rule.layer.name(), &rule.name)).collect();
        Series { generation: policy.generation(), rules, unbound: series("none", "") }
    }

    /// Removes the series of rules that a newer policy no longer has. Otherwise each reload with new names would add series.
    fn remove_series(&self, before: &Series, policy: &Policy) {
        // A request that was decided under the old policy may be counted after the reload. It must not remove the new
        // policy's series.
        if before.generation > policy.generation() {
            return;
        }
        let stays = |old: &RuleSeries| {
            policy.rules().iter().any(|rule| (rule.layer.name(), &*rule.name) == (old.layer, old.rule.as_str()))
        };
        for RuleSeries { layer, rule, .. } in before.rules.iter().filter(|old| !stays(old)) {
            for verdict in VERDICTS {
                self.decisions.remove(&DecisionLabels { layer, rule: rule.clone(), verdict: verdict.name() });
            }
        }
    }

    #[cold]
    fn count_degraded(&self, reason: Degraded, decisions: u64) {
        self.degraded.get_or_create(&ReasonLabel { reason: reason.name() }).inc_by(decisions);
    }
}

fn place(verdict: Verdict) -> usize {
    VERDICTS.iter().position(|own| *own == verdict).unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use threshold_core::{Decision, Facts};

    use super::*;

    #[test]
    fn every_reason_of_a_degraded_decision_has_a_series_from_the_start() {
        let metrics = Metrics::new();
        let text = metrics.text();
        for reason in ["store_timeout", "store_error", "store_full", "too_many_rules", "journal", "shared_budget"] {
            let line = format!("threshold_degraded_total{{reason=\"{reason}\"}} 0");
            assert!(text.lines().any(|own| own == line), "{line}\n{text}");
        }
        let policy = Policy::parse("", &|_| None).unwrap();
        let mut decision = Decision::default();
        decision.degraded = Some(Degraded::Timeout);
        metrics.counts.decided(&ObservedDecision::new(&Facts::default(), &decision, &policy));
        metrics.set_charges_lost(3);
        metrics.set_charges_lost(5);
        let text = metrics.text();
        for line in [
            r#"threshold_degraded_total{reason="store_timeout"} 1"#,
            "threshold_charges_lost_total 5",
            "threshold_store_up 1",
        ] {
            assert!(text.lines().any(|own| own == line), "{line}\n{text}");
        }
    }

    /// Fails without `remove_series`.
    #[test]
    fn there_are_only_series_of_the_policy_in_force_however_often_it_is_reloaded() {
        let metrics = Metrics::new();
        let series = || metrics.text().lines().filter(|line| line.starts_with("threshold_decisions_total{")).count();
        for generation in 1..=100 {
            let text = format!(
                "[[rule]]\nname = 'stays'\nper = ['user']\nlimit = '1/h'\n\
                 [[rule]]\nname = 'rule {generation}'\nper = ['user']\nlimit = '1/h'"
            );
            let policy = Policy::parse(&text, &|_| None).unwrap().with_generation(generation);
            metrics.counts.decided(&ObservedDecision::new(&Facts::default(), &Decision::default(), &policy));
            // Two rules, and the decisions without a binding rule.
            assert_eq!(series(), 3 * VERDICTS.len(), "after {generation} policies");
        }
        assert!(metrics.text().contains(r#"rule="rule 100""#) && !metrics.text().contains(r#"rule="rule 99""#));
        let text = metrics.text();
        let allowed = text.lines().find(|line| line.contains(r#"layer="none""#) && line.contains("allow"));
        assert!(allowed.is_some_and(|line| line.ends_with(" 100")), "a series that stays keeps its count: {allowed:?}");
    }
}
