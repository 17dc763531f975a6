//! The thread that posts spans and metrics to the collector.

use std::borrow::Cow;
use std::collections::VecDeque;
use std::io::Write as _;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, channel};
use std::thread;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use anyhow::Context as _;
use flate2::write::GzEncoder;
use http::header::{CONTENT_ENCODING, CONTENT_TYPE, RETRY_AFTER};
use http::{Request, StatusCode};
use opentelemetry_proto::tonic::collector::metrics::v1::ExportMetricsServiceRequest;
use opentelemetry_proto::tonic::collector::trace::v1::ExportTraceServiceRequest;
use opentelemetry_proto::tonic::common::v1::InstrumentationScope;
use opentelemetry_proto::tonic::metrics::v1::{ResourceMetrics, ScopeMetrics};
use opentelemetry_proto::tonic::resource::v1::Resource;
use opentelemetry_proto::tonic::trace::v1::{ResourceSpans, ScopeSpans};
use prost::Message as _;
use ureq::Agent;

use super::queue::{BATCH, SpanQueue, Taken};
use super::settings::{Compression, Settings, Target};
use super::spans::{Record, nanos, text};
use super::{STOP_WAIT, metrics};
use crate::operate::api_agent;

/// The pauses between two attempts while the collector does not accept spans.
const FIRST_PAUSE: Duration = Duration::from_secs(1);
const LONGEST_PAUSE: Duration = Duration::from_secs(30);
/// The longest pause that a collector can ask for by `Retry-After`.
const LONGEST_ASKED: Duration = Duration::from_secs(300);
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
        let (end, ended) = channel::<()>();
        let mut work = Work::new(settings, Arc::clone(&queue), metrics)?;
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
    target: Target,
    agent: Agent,
    is_failing: bool,
    /// Spans that were lost since the last report.
    lost: u64,
}

/// How an export ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Sent {
    Accepted,
    /// The same message may be accepted later: not before this time has passed, if the collector says so.
    Later(Option<Duration>),
    /// It never will be.
    Refused,
}

impl Work {
    fn new(settings: Settings, queue: Arc<SpanQueue>, metrics: Box<dyn Fn() -> String + Send>) -> anyhow::Result<Self> {
        let attributes = settings.resource.iter().map(|(key, value)| text(key, value)).collect();
        let spans = settings.traces.map(|target| Line::new("spans", target)).transpose()?;
        let metric_line = settings.metrics.map(|target| Line::new("metrics", target)).transpose()?;
        Ok(Self {
            queue,
            resource: Resource { attributes, ..Resource::default() },
            spans,
            unsent: VecDeque::new(),
            span_delay: settings.span_delay,
            metrics: metric_line.map(|line| (line, metrics)),
            metric_interval: settings.metric_interval,
            started: SystemTime::now(),
        })
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
                let sent = self.export_spans();
                spans_at = after(sent.pause(pause).unwrap_or(self.span_delay));
                let is_later = matches!(sent, Sent::Later(_));
                pause = if is_later { pause.saturating_mul(2).min(LONGEST_PAUSE) } else { FIRST_PAUSE };
            }
            if is_stopping || Instant::now() >= metrics_at {
                let sent = self.export_metrics();
                metrics_at = after(sent.pause(self.metric_interval).unwrap_or(self.metric_interval));
            }
            if is_stopping {
                return;
            }
        }
    }

    /// Exports the spans that wait, until the collector accepts no more.
    fn export_spans(&mut self) -> Sent {
        let Some(line) = &mut self.spans else { return Sent::Accepted };
        loop {
            if self.unsent.is_empty() {
                let Taken { spans, lost, .. } = self.queue.take(BATCH);
                line.lost = line.lost.saturating_add(lost);
                if spans.is_empty() {
                    return Sent::Accepted;
                }
                let count = spans.len();
                self.unsent.push_back((trace_message(&self.resource, spans), count));
            }
            let Some((message, count)) = self.unsent.front() else { return Sent::Accepted };
            match line.post(message) {
                later @ Sent::Later(_) => return later,
                Sent::Refused => line.lost = line.lost.saturating_add(u64::try_from(*count).unwrap_or(u64::MAX)),
                Sent::Accepted => {}
            }
            self.unsent.pop_front();
        }
    }

    /// Exports all metrics. A failure needs no repetition: the next export has the sums of this one.
    fn export_metrics(&mut self) -> Sent {
        let Some((line, metrics)) = &mut self.metrics else { return Sent::Accepted };
        let since = |time: SystemTime| nanos(time.duration_since(UNIX_EPOCH).unwrap_or_default());
        let metrics = metrics::from_text(&metrics(), since(self.started), since(SystemTime::now()));
        let scope_metrics = vec![ScopeMetrics { scope: Some(scope()), metrics, ..ScopeMetrics::default() }];
        let resource = Some(self.resource.clone());
        let resource_metrics = vec![ResourceMetrics { resource, scope_metrics, ..ResourceMetrics::default() }];
        line.post(&ExportMetricsServiceRequest { resource_metrics }.encode_to_vec())
    }
}

impl Sent {
    /// Returns how long to wait before the next attempt: at least `pause`, and as long as the collector asks for, within a bound. `None`
    /// if there is nothing to wait for.
    fn pause(self, pause: Duration) -> Option<Duration> {
        match self {
            Self::Later(asked) => Some(asked.unwrap_or_default().min(LONGEST_ASKED).max(pause)),
            Self::Accepted | Self::Refused => None,
        }
    }
}

impl Line {
    fn new(kind: &'static str, target: Target) -> anyhow::Result<Self> {
        let agent = target.agent()?;
        Ok(Self { kind, target, agent, is_failing: false, lost: 0 })
    }

    /// Posts a message. The first failure is logged, and the first success after it.
    fn post(&mut self, message: &[u8]) -> Sent {
        let (sent, reason) = match self.try_post(message) {
            Ok((status, _)) if status.is_success() => (Sent::Accepted, String::new()),
            Ok((status, asked)) => {
                let may_change = matches!(status.as_u16(), 408 | 429 | 502 | 503 | 504);
                (if may_change { Sent::Later(asked) } else { Sent::Refused }, format!("the collector answers {status}"))
            }
            Err(error) => (Sent::Later(None), error.to_string()),
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
            (Sent::Later(_) | Sent::Refused, false) => tracing::warn!(kind, reason, "OpenTelemetry: export failed"),
            _ => {}
        }
        self.is_failing = sent != Sent::Accepted;
        if !self.is_failing {
            self.lost = 0;
        }
        sent
    }

    /// Returns the status, and how long to wait if the answer says so.
    fn try_post(&self, message: &[u8]) -> Result<(StatusCode, Option<Duration>), ureq::Error> {
        let mut request = Request::post(&self.target.url).header(CONTENT_TYPE, "application/x-protobuf");
        for (name, value) in &self.target.headers {
            request = request.header(name, value);
        }
        let message = match self.target.compression {
            Compression::None => Cow::from(message),
            Compression::Gzip => {
                request = request.header(CONTENT_ENCODING, "gzip");
                Cow::from(gzip(message)?)
            }
        };
        let mut response = self.agent.run(request.body(&*message)?)?;
        // Read to its end, or the connection is closed. What it says is of no use.
        drop(response.body_mut().with_config().limit(MAX_ANSWER).read_to_vec());
        let asked = response.headers().get(RETRY_AFTER).and_then(|value| retry_after(value.to_str().ok()?));
        Ok((response.status(), asked))
    }
}

impl Target {
    /// Returns a client, or why its certificates cannot be used.
    pub(super) fn agent(&self) -> anyhow::Result<Agent> {
        api_agent(self.url.starts_with("https://"), self.certificate.as_deref(), self.timeout)
    }
}

fn gzip(message: &[u8]) -> std::io::Result<Vec<u8>> {
    let mut encoder = GzEncoder::new(Vec::new(), flate2::Compression::fast());
    encoder.write_all(message)?;
    encoder.finish()
}

/// Reads `Retry-After`: seconds, or a date.
fn retry_after(text: &str) -> Option<Duration> {
    if let Ok(seconds) = text.trim().parse() {
        return Some(Duration::from_secs(seconds));
    }
    let at = jiff::fmt::rfc2822::parse(text.trim()).ok()?.timestamp().as_second();
    let now = SystemTime::now().duration_since(UNIX_EPOCH).ok()?.as_secs();
    Some(Duration::from_secs(u64::try_from(at).ok()?.saturating_sub(now)))
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

#[cfg(test)]
mod tests {
    use super::*;

    /// Woken by leaving out either bound of `pause`.
    #[test]
    fn a_collector_may_ask_for_a_pause_within_bounds() {
        let second = Duration::from_secs(1);
        for (asked, expected) in [(None, 1), (Some(0), 1), (Some(7), 7), (Some(86_400), 300)] {
            let asked = asked.map(Duration::from_secs);
            assert_eq!(Sent::Later(asked).pause(second), Some(Duration::from_secs(expected)), "{asked:?}");
        }
        assert_eq!((Sent::Accepted.pause(second), Sent::Refused.pause(second)), (None, None));
    }

    #[test]
    fn retry_after_has_seconds_or_a_date() {
        assert_eq!(retry_after(" 120 "), Some(Duration::from_secs(120)));
        assert_eq!(retry_after("Wed, 21 Oct 2015 07:28:00 GMT"), Some(Duration::ZERO), "is over");
        let far = retry_after("Fri, 31 Dec 2100 23:59:59 GMT");
        assert!(far.is_some_and(|far| far > LONGEST_ASKED), "{far:?}");
        for wrong in ["", "-1", "1.5", "soon", "99999999999999999999"] {
            assert_eq!(retry_after(wrong), None, "{wrong}");
        }
    }
}
