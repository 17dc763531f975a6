//! Takes the place of `otlp` in a program without that feature: it exports nothing, and says so if a collector is named.

use std::sync::Arc;

use http::HeaderMap;
use threshold_limiter::Observer;

/// There is none.
#[derive(Debug)]
pub(crate) enum Telemetry {}

/// There is none.
#[derive(Debug)]
pub(crate) enum Exporter {}

/// There is none.
#[derive(Debug)]
pub(crate) enum Parent {}

impl Telemetry {
    /// Warns if the environment names a collector.
    #[expect(clippy::unnecessary_wraps, reason = "reading the variables can fail in a program with the feature")]
    pub(crate) fn from_environment() -> anyhow::Result<Option<Self>> {
        let names = [
            "OTEL_EXPORTER_OTLP_ENDPOINT",
            "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT",
            "OTEL_EXPORTER_OTLP_METRICS_ENDPOINT",
        ];
        let is_set = |name: &&&str| std::env::var_os(name).is_some_and(|value| !value.is_empty());
        if let Some(variable) = names.iter().find(is_set) {
            tracing::warn!(
                variable,
                "nothing is exported to OpenTelemetry: this program was built without the feature otlp"
            );
        }
        Ok(None)
    }

    /// There is nothing to check: nothing is exported.
    #[expect(clippy::unnecessary_wraps, reason = "reading the variables can fail in a program with the feature")]
    pub(crate) const fn check_environment() -> anyhow::Result<()> {
        Ok(())
    }

    pub(crate) fn start(self, _: impl Fn() -> String + Send + 'static) -> anyhow::Result<Exporter> {
        match self {}
    }
}

impl Exporter {
    pub(crate) fn stop(self) {
        match self {}
    }
}

impl Parent {
    pub(crate) const fn of(_: &HeaderMap) -> Option<Self> {
        None
    }

    pub(crate) fn within<T>(&self, _: impl FnOnce() -> T) -> T {
        match *self {}
    }

    pub(crate) fn carried<F: Future>(self, work: F) -> impl Future<Output = F::Output> {
        work
    }
}

pub(crate) const fn observer() -> Option<Arc<dyn Observer>> {
    None
}
