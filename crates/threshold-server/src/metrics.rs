//! The metrics for Prometheus: those of the limiter, and what only a server knows. Labels come from the policy and from fixed lists,
//! so that no caller can add a series.

mod text_format;

use std::fmt;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{SystemTime, UNIX_EPOCH};

use prometheus_client::collector::Collector;
use prometheus_client::encoding::{DescriptorEncoder, EncodeLabelSet};
use prometheus_client::metrics::MetricType;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::metrics::info::Info;
use prometheus_client::registry::Registry;
use threshold_core::alert::AlertLevel;
use threshold_core::policy::AlertOn;
use threshold_limiter::Observer;

use crate::door::GrpcCode;

pub(crate) use text_format::in_text_format;

/// All metrics of one server.
#[derive(Debug)]
pub(crate) struct Metrics {
    /// The metrics of the limiter, to which its parts are added.
    pub(crate) limiter: threshold_limiter::metrics::Metrics,
    registry: Registry,
    store_differences: Counter,
    charges_lost: Counter,
    charges_unanswered: Counter,
    store_up: Gauge,
    share_nodes: Gauge,
    login_failures: Counter,
    events_unnamed: Counter,
    events_lost: Counter,
    sink_lost: Family<SinkLabels, Counter>,
    alerts_active: Family<AlertLabels, Gauge>,
    reload_failed: Family<FileLabels, Gauge>,
    policy_loaded: Gauge<f64, AtomicU64>,
    certificate_expiry: CertificateExpiry,
    grpc_errors: Family<GrpcLabels, Counter>,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct AlertLabels {
    alert: &'static str,
    level: &'static str,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct SinkLabels {
    sink: String,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct FileLabels {
    file: &'static str,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct GrpcLabels {
    code: &'static str,
}

/// When the certificate in use expires, in Unix seconds. A server without one does not have the gauge.
#[derive(Debug, Clone, Default)]
struct CertificateExpiry(Arc<Mutex<Option<i64>>>);

impl CertificateExpiry {
    fn lock(&self) -> std::sync::MutexGuard<'_, Option<i64>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Collector for CertificateExpiry {
    fn encode(&self, mut encoder: DescriptorEncoder<'_>) -> fmt::Result {
        let Some(expires) = *self.lock() else { return Ok(()) };
        let (name, help) =
            ("threshold_certificate_expires_timestamp_seconds", "When the TLS certificate in use expires");
        encoder.encode_descriptor(name, help, None, MetricType::Gauge)?.encode_gauge(&expires)
    }
}

const LEVELS: [AlertLevel; 2] = [AlertLevel::Warning, AlertLevel::Critical];

impl Metrics {
    pub(crate) fn new() -> Self {
        let metrics = Self {
            limiter: threshold_limiter::metrics::Metrics::new(),
            registry: Registry::default(),
            store_differences: Counter::default(),
            charges_lost: Counter::default(),
            charges_unanswered: Counter::default(),
            store_up: Gauge::default(),
            share_nodes: Gauge::default(),
            login_failures: Counter::default(),
            events_unnamed: Counter::default(),
            events_lost: Counter::default(),
            sink_lost: Family::default(),
            alerts_active: Family::default(),
            reload_failed: Family::default(),
            policy_loaded: Gauge::default(),
            certificate_expiry: CertificateExpiry::default(),
            grpc_errors: Family::default(),
        };
        // A store in memory always answers, and a shared one has answered when the server starts.
        metrics.store_up.set(1);
        metrics.set_alerts(|_, _| 0);
        // From the start, because a rise from nothing is none to Prometheus.
        for code in GrpcCode::ALL {
            let _ = metrics.grpc_errors.get_or_create(&GrpcLabels { code: code.name() });
        }
        metrics.registered()
    }

    fn registered(mut self) -> Self {
        let registry = &mut self.registry;
        self.limiter.register(registry);
        registry.register(
            "threshold_store_differences",
            "Writes of the store that differed from what the node would have written, of one in 1,000 that are compared",
            self.store_differences.clone(),
        );
        registry.register(
            "threshold_charges_lost",
            "Charges of requests admitted without the store that it will not hear of, because too many keys waited for its return",
            self.charges_lost.clone(),
        );
        registry.register(
            "threshold_charges_unanswered",
            "Charges of requests admitted without the store that it may have recorded or not, because its answer did not come",
            self.charges_unanswered.clone(),
        );
        registry.register(
            "threshold_store_up",
            "Whether the store answers: 0 while rules decide by on_store_error, also if only a part of it is away",
            self.store_up.clone(),
        );
        registry.register(
            "threshold_store_share_nodes",
            "Among how many nodes limits are divided by on_store_error = local; 0 while this node has no share",
            self.share_nodes.clone(),
        );
        registry.register("threshold_login_failures", "Logins with a wrong secret", self.login_failures.clone());
        registry.register(
            "threshold_events_unnamed",
            "Events that were recorded without their names, because there were too many",
            self.events_unnamed.clone(),
        );
        registry.register(
            "threshold_events_lost",
            "Events that were not recorded, because their file could not be written",
            self.events_lost.clone(),
        );
        registry.register(
            "threshold_sink_lost",
            "Events and alerts that a sink did not receive",
            self.sink_lost.clone(),
        );
        registry.register("threshold_alerts_active", "Alerts of [alerts] that are raised", self.alerts_active.clone());
        registry.register(
            "threshold_reload_failed",
            "Whether a changed file could not be loaded, and the one before stays in force",
            self.reload_failed.clone(),
        );
        registry.register(
            "threshold_policy_loaded_timestamp_seconds",
            "When the policy in force was loaded",
            self.policy_loaded.clone(),
        );
        registry.register(
            "threshold_grpc_errors",
            "Calls of Envoy that were answered with an error: by default it lets the request through that it asked about",
            self.grpc_errors.clone(),
        );
        registry.register_collector(Box::new(self.certificate_expiry.clone()));
        // `0.1.0 (41fd9721d7c7)`, as `threshold --version` prints it.
        let revision = crate::BUILD.split_once(" (").map_or("", |(_, revision)| revision.trim_end_matches(')'));
        let build = Info::new([("version", env!("CARGO_PKG_VERSION")), ("revision", revision)]);
        registry.register("threshold_build", "The version and the commit of the program", build);
        self
    }

    /// Returns the observer that updates the counters.
    pub(crate) fn observer(&self) -> Arc<dyn Observer> {
        self.limiter.observer()
    }

    /// Counts writes of the store that were wrong. Returns whether there are new ones.
    pub(crate) fn set_store_differences(&self, total: u64) -> bool {
        raise(&self.store_differences, total)
    }

    /// Counts charges that the store will not hear of.
    pub(crate) fn set_charges_lost(&self, total: u64) {
        raise(&self.charges_lost, total);
    }

    /// Counts charges of which it is not known whether the store has them.
    pub(crate) fn set_charges_unanswered(&self, total: u64) {
        raise(&self.charges_unanswered, total);
    }

    /// Sets whether the store answers.
    pub(crate) fn set_store_up(&self, is_up: bool) {
        self.store_up.set(i64::from(is_up));
    }

    /// Sets among how many nodes limits are divided while the store is away; 0 if this node has no share.
    pub(crate) fn set_share_nodes(&self, nodes: u64) {
        self.share_nodes.set(i64::try_from(nodes).unwrap_or(i64::MAX));
    }

    /// Counts a login whose secret was wrong.
    pub(crate) fn count_login_failure(&self) {
        self.login_failures.inc();
    }

    /// Sets how many events were recorded without their names.
    pub(crate) fn set_events_unnamed(&self, total: u64) {
        raise(&self.events_unnamed, total);
    }

    /// Sets how many events were not recorded.
    pub(crate) fn set_events_lost(&self, total: u64) {
        raise(&self.events_lost, total);
    }

    /// Sets how many events and alerts a sink has not received.
    pub(crate) fn set_sink_lost(&self, sink: &str, total: u64) {
        raise(&self.sink_lost.get_or_create(&SinkLabels { sink: sink.to_owned() }), total);
    }

    /// Counts a gRPC call that was answered with an error.
    pub(crate) fn count_grpc_error(&self, code: GrpcCode) {
        self.grpc_errors.get_or_create(&GrpcLabels { code: code.name() }).inc();
    }

    /// Sets whether a file that has changed could not be loaded.
    pub(crate) fn set_reload_failed(&self, file: &'static str, has_failed: bool) {
        self.reload_failed.get_or_create(&FileLabels { file }).set(i64::from(has_failed));
    }

    /// Sets when the policy in force was loaded.
    pub(crate) fn set_policy_loaded(&self, at: SystemTime) {
        self.policy_loaded.set(at.duration_since(UNIX_EPOCH).map_or(0.0, |since| since.as_secs_f64()));
    }

    /// Sets when the certificate in use expires, in Unix seconds.
    pub(crate) fn set_certificate_expiry(&self, expires: Option<i64>) {
        *self.certificate_expiry.lock() = expires;
    }

    /// Sets how many alerts of each kind and level are raised. Only `ip_blocks` has more than one, for each address.
    pub(crate) fn set_alerts(&self, raised: impl Fn(AlertOn, AlertLevel) -> usize) {
        for alert in AlertOn::ALL {
            for level in LEVELS {
                let labels = AlertLabels { alert: alert.name(), level: level.name() };
                let count = i64::try_from(raised(alert, level)).unwrap_or(i64::MAX);
                self.alerts_active.get_or_create(&labels).set(count);
            }
        }
    }

    /// Encodes all metrics as OpenMetrics text.
    pub(crate) fn text(&self) -> String {
        let mut text = String::new();
        // Writing to a string cannot fail.
        let _ = prometheus_client::encoding::text::encode(&mut text, &self.registry);
        text
    }
}

/// Raises a counter to a total that is counted elsewhere. Returns whether it was lower. A total never falls.
fn raise(counter: &Counter, total: u64) -> bool {
    counter.inner().fetch_max(total, Ordering::Relaxed) < total
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn totals_that_are_counted_elsewhere_are_raised_and_never_fall() {
        let metrics = Metrics::new();
        assert!(metrics.set_store_differences(2) && !metrics.set_store_differences(2));
        for total in [3, 5, 4] {
            metrics.set_charges_lost(total);
            metrics.set_charges_unanswered(total);
            metrics.set_events_unnamed(total);
            metrics.set_events_lost(total);
            metrics.set_sink_lost("file-1", total);
        }
        metrics
            .set_alerts(|alert, level| if (alert, level) == (AlertOn::IpBlocks, AlertLevel::Critical) { 7 } else { 0 });
        metrics.count_login_failure();
        metrics.set_share_nodes(3);
        metrics.set_policy_loaded(UNIX_EPOCH + std::time::Duration::from_millis(1_500));
        assert!(!metrics.text().contains("threshold_certificate"), "without a certificate");
        metrics.set_certificate_expiry(Some(1_577_836_800));
        let text = metrics.text();
        for line in [
            "threshold_store_differences_total 2",
            "threshold_charges_lost_total 5",
            "threshold_charges_unanswered_total 5",
            "threshold_events_unnamed_total 5",
            "threshold_events_lost_total 5",
            r#"threshold_sink_lost_total{sink="file-1"} 5"#,
            "threshold_login_failures_total 1",
            "threshold_store_up 1",
            "threshold_store_share_nodes 3",
            "threshold_policy_loaded_timestamp_seconds 1.5",
            "threshold_certificate_expires_timestamp_seconds 1577836800",
            concat!(r#"threshold_build_info{version=""#, env!("CARGO_PKG_VERSION"), r#"",revision="debug build"} 1"#),
            r#"threshold_alerts_active{alert="ip_blocks",level="critical"} 7"#,
            r#"threshold_alerts_active{alert="edge_blocks",level="warning"} 0"#,
        ] {
            assert!(text.lines().any(|own| own == line), "{line}\n{text}");
        }
        let names: Vec<_> = text.lines().filter(|line| line.starts_with("# TYPE")).collect();
        let unique: std::collections::BTreeSet<_> = names.iter().collect();
        assert_eq!(names.len(), unique.len(), "a metric is written twice");
    }
}
