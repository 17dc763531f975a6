//! The thread that posts spans and metrics to the collector.

use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, channel};
use std::thread;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use anyhow::Context as _;
use http::header::CONTENT_TYPE;
use http::{HeaderName, HeaderValue, Request, StatusCode};
use opentelemetry_proto::tonic::collector::metrics::v1::ExportMetricsServiceRequest;
use opentelemetry_proto::tonic::collector::trace::v1::ExportTraceServiceRequest;
use opentelemetry_proto::tonic::common::v1::InstrumentationScope;
use opentelemetry_proto::tonic::metrics::v1::{ResourceMetrics, ScopeMetrics};
use opentelemetry_proto::tonic::resource::v1::Resource;
use opentelemetry_proto::tonic::trace::v1::{ResourceSpans, ScopeSpans};
use prost::Message as _;
use ureq::Agent;

use super::queue::{BATCH, SpanQueue, Taken};
use super::settings::Settings;
use super::spans::{Record, nanos, text};
use super::{STOP_WAIT, metrics};
use crate::operate::api_agent;

/// The pauses between two attempts while the collector does not accept spans.
const FIRST_PAUSE: Duration = Duration::from_secs(1);
const LONGEST_PAUSE: Duration = Duration::from_secs(30);
/// The most of a collector's answer that is read, so that its connection can be used again.
const MAX_ANSWER: u64 = 64 << 10;

/// The running thread.
#[derive(Debug)]
pub(crate) struct Exporter {
    queue: Arc<SpanQueue>,
    /// Disconnected when the thread has ended.
    ended: Receiver<()>,
}

impl Exporter {
    pub(super) fn start(
        settings: Settings,
        queue: Arc<SpanQueue>,
        metrics: Box<dyn Fn() -> String + Send>,
    ) -> anyhow::Result<Self> {
        let urls = [&settings.traces, &settings.metrics];
        let is_https = urls.into_iter().flatten().any(|url| url.starts_with("https://"));
        let agent = api_agent(is_https, settings.certificate.as_deref(), settings.timeout)?;
        let (end, ended) = channel::<()>();
        let mut work = Work::new(settings, agent, Arc::clone(&queue), metrics);
        let run = move || {
            work.run();
            drop(end);
        };
        thread::Builder::new()
            .name("otlp".to_owned())
            .spawn(run)
            .context("cannot start the thread of OpenTelemetry")?;
        Ok(Self { queue, ended })
    }

    /// Exports what is left, and waits for it for a few seconds at most.
    pub(crate) fn stop(self) {
        self.queue.stop();
        // An error either way: the sender is dropped without sending.
        if self.ended.recv_timeout(STOP_WAIT) == Err(std::sync::mpsc::RecvTimeoutError::Timeout) {
            tracing::warn!("OpenTelemetry: the last export did not end in time");
        }
    }
}

/// What the thread owns.
struct Work {
    agent: Agent,
    headers: Vec<(HeaderName, HeaderValue)>,
    queue: Arc<SpanQueue>,
    resource: Resource,
    spans: Option<Line>,
    /// Batches that the collector did not accept yet. No more are taken from the queue meanwhile.
    unsent: VecDeque<(Vec<u8>, usize)>,
    span_delay: Duration,
    metrics: Option<(Line, Box<dyn Fn() -> String + Send>)>,
    metric_interval: Duration,
    started: SystemTime,
}

/// One kind of messages, and how their export goes.
struct Line {
    kind: &'static str,
    url: String,
    is_failing: bool,
    /// Spans that were lost since the last report.
    lost: u64,
}

/// How an export ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Sent {
    Accepted,
    /// The same message may be accepted later.
    Later,
    /// It never will be.
    Refused,
}

impl Work {
    fn new(settings: Settings, agent: Agent, queue: Arc<SpanQueue>, metrics: Box<dyn Fn() -> String + Send>) -> Self {
        let line = |kind, url| Line { kind, url, is_failing: false, lost: 0 };
        let attributes = settings.resource.iter().map(|(key, value)| text(key, value)).collect();
        Self {
            agent,
            headers: settings.headers,
            queue,
            resource: Resource { attributes, ..Resource::default() },
            spans: settings.traces.map(|url| line("spans", url)),
            unsent: VecDeque::new(),
            span_delay: settings.span_delay,
            metrics: settings.metrics.map(|url| (line("metrics", url), metrics)),
            metric_interval: settings.metric_interval,
            started: SystemTime::now(),
        }
    }

    fn run(&mut self) {
        let (mut spans_at, mut metrics_at) = (after(self.span_delay), after(self.metric_interval));
        let mut pause = FIRST_PAUSE;
        loop {
            // While spans are refused, more of them are no reason to try earlier.
            let enough = if self.unsent.is_empty() && self.spans.is_some() { BATCH } else { usize::MAX };
            self.queue.wait(spans_at.min(metrics_at), enough);
            let is_stopping = self.queue.take(0).is_stopping;
            if is_stopping || Instant::now() >= spans_at || enough == BATCH {
                let all_sent = self.export_spans();
                spans_at = after(if all_sent { self.span_delay } else { pause });
                pause = if all_sent { FIRST_PAUSE } else { pause.saturating_mul(2).min(LONGEST_PAUSE) };
            }
            if is_stopping || Instant::now() >= metrics_at {
                self.export_metrics();
                metrics_at = after(self.metric_interval);
            }
            if is_stopping {
                return;
            }
        }
    }

    /// Exports the spans that wait. Returns whether the collector accepted them.
    fn export_spans(&mut self) -> bool {
        let Some(line) = &mut self.spans else { return true };
        loop {
            if self.unsent.is_empty() {
                let Taken { spans, lost, .. } = self.queue.take(BATCH);
                line.lost = line.lost.saturating_add(lost);
                if spans.is_empty() {
                    return true;
                }
                let count = spans.len();
                self.unsent.push_back((trace_message(&self.resource, spans), count));
            }
            let Some((message, count)) = self.unsent.front() else { return true };
            match line.post(&self.agent, &self.headers, message) {
                Sent::Later => return false,
                Sent::Refused => line.lost = line.lost.saturating_add(u64::try_from(*count).unwrap_or(u64::MAX)),
                Sent::Accepted => {}
            }
            self.unsent.pop_front();
        }
    }

    /// Exports all metrics. A failure needs no repetition: the next export has the sums of this one.
    fn export_metrics(&mut self) {
        let Some((line, metrics)) = &mut self.metrics else { return };
        let since = |time: SystemTime| nanos(time.duration_since(UNIX_EPOCH).unwrap_or_default());
        let metrics = metrics::from_text(&metrics(), since(self.started), since(SystemTime::now()));
        let scope_metrics = vec![ScopeMetrics { scope: Some(scope()), metrics, ..ScopeMetrics::default() }];
        let resource = Some(self.resource.clone());
        let resource_metrics = vec![ResourceMetrics { resource, scope_metrics, ..ResourceMetrics::default() }];
        line.post(&self.agent, &self.headers, &ExportMetricsServiceRequest { resource_metrics }.encode_to_vec());
    }
}

impl Line {
    /// Posts a message. The first failure is logged, and the first success after it.
    fn post(&mut self, agent: &Agent, headers: &[(HeaderName, HeaderValue)], message: &[u8]) -> Sent {
        let (sent, reason) = match self.try_post(agent, headers, message) {
            Ok(status) if status.is_success() => (Sent::Accepted, String::new()),
            Ok(status) => {
                let may_change = matches!(status.as_u16(), 408 | 429 | 502 | 503 | 504);
                (if may_change { Sent::Later } else { Sent::Refused }, format!("the collector answers {status}"))
            }
            Err(error) => (Sent::Later, error.to_string()),
        };
        let (kind, lost) = (self.kind, self.lost);
        match (sent, self.is_failing) {
            (Sent::Accepted, true) => {
                tracing::info!(kind, lost, "OpenTelemetry: the collector accepts exports again");
            }
            (Sent::Accepted, false) if lost > 0 => {
                tracing::warn!(lost, "OpenTelemetry: spans lost, more were made than exported");
            }
            // The collector may be away for hours, and every few seconds is an attempt.
            (Sent::Later | Sent::Refused, false) => tracing::warn!(kind, reason, "OpenTelemetry: export failed"),
            _ => {}
        }
        self.is_failing = sent != Sent::Accepted;
        if !self.is_failing {
            self.lost = 0;
        }
        sent
    }

    fn try_post(
        &self,
        agent: &Agent,
        headers: &[(HeaderName, HeaderValue)],
        message: &[u8],
    ) -> Result<StatusCode, ureq::Error> {
        let mut request = Request::post(&self.url).header(CONTENT_TYPE, "application/x-protobuf");
        for (name, value) in headers {
            request = request.header(name, value);
        }
        let mut response = agent.run(request.body(message)?)?;
        // Read to its end, or the connection is closed. What it says is of no use.
        drop(response.body_mut().with_config().limit(MAX_ANSWER).read_to_vec());
        Ok(response.status())
    }
}

/// Encodes one batch of spans.
fn trace_message(resource: &Resource, spans: Vec<Record>) -> Vec<u8> {
    let spans = spans.into_iter().map(Record::span).collect();
    let scope_spans = vec![ScopeSpans { scope: Some(scope()), spans, ..ScopeSpans::default() }];
    let resource_spans =
        vec![ResourceSpans { resource: Some(resource.clone()), scope_spans, ..ResourceSpans::default() }];
    ExportTraceServiceRequest { resource_spans }.encode_to_vec()
}

fn scope() -> InstrumentationScope {
    let (name, version) = ("threshold".to_owned(), env!("CARGO_PKG_VERSION").to_owned());
    InstrumentationScope { name, version, ..InstrumentationScope::default() }
}

/// Returns the time after a pause.
fn after(pause: Duration) -> Instant {
    let now = Instant::now();
    now.checked_add(pause).unwrap_or(now)
}
