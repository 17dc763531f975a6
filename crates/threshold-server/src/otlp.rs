//! OpenTelemetry: sends a span for each decision, and the metrics of `/metrics`, to a collector over OTLP.
//!
//! The spans are made by an observer of the limiter, when an operation has ended, and the metrics are those of the registry. So
//! nothing of an SDK is needed but the messages.

mod exporter;
mod metrics;
mod parent;
mod queue;
mod settings;
mod spans;

use std::sync::{Arc, OnceLock};
use std::time::Duration;

pub(crate) use exporter::Exporter;
pub(crate) use parent::Parent;
use queue::SpanQueue;
use settings::Settings;
use spans::Spans;
use threshold_limiter::Observer;

/// How long a server that stops waits for the last export.
const STOP_WAIT: Duration = Duration::from_secs(3);

/// The spans of this process. As with the subscriber of `tracing`, there is one.
static SPANS: OnceLock<Arc<Spans>> = OnceLock::new();

/// What the environment asks to export.
#[derive(Debug)]
pub(crate) struct Telemetry {
    settings: Settings,
    queue: Arc<SpanQueue>,
}

impl Telemetry {
    /// Reads the variables. Returns `None` if they name no collector.
    ///
    /// From here on spans are queued, so it is called once, before the limiter is built.
    pub(crate) fn from_environment() -> anyhow::Result<Option<Self>> {
        let Some(settings) = Self::settings()? else { return Ok(None) };
        let queue = Arc::<SpanQueue>::default();
        if settings.traces.is_some() {
            let _ = SPANS.set(Arc::new(Spans::new(settings.sampler, Arc::clone(&queue))));
        }
        Ok(Some(Self { settings, queue }))
    }

    /// Checks the variables, and exports nothing.
    pub(crate) fn check_environment() -> anyhow::Result<()> {
        let Some(settings) = Self::settings()? else { return Ok(()) };
        [settings.traces, settings.metrics].iter().flatten().try_for_each(|target| target.agent().map(drop))
    }

    fn settings() -> anyhow::Result<Option<Settings>> {
        // One that is no text cannot be right, and must not count as unset.
        Settings::read(&|name| std::env::var_os(name).map(|value| value.to_string_lossy().into_owned()))
    }

    /// Starts the thread that exports.
    pub(crate) fn start(self, metrics: impl Fn() -> String + Send + 'static) -> anyhow::Result<Exporter> {
        Exporter::start(self.settings, self.queue, Box::new(metrics))
    }
}

/// Returns the observer that makes spans; `None` if none are exported.
pub(crate) fn observer() -> Option<Arc<dyn Observer>> {
    SPANS.get().map(|spans| Arc::clone(spans) as Arc<dyn Observer>)
}
