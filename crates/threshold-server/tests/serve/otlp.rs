//! Tests the export to OpenTelemetry, with a collector that decodes what it receives.

use std::collections::BTreeMap;
use std::io::{BufRead as _, BufReader, Read as _, Write as _};
use std::net::{TcpListener, TcpStream};
use std::sync::atomic::{AtomicU16, Ordering};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Mutex};

use opentelemetry_proto::tonic::collector::metrics::v1::ExportMetricsServiceRequest;
use opentelemetry_proto::tonic::collector::trace::v1::ExportTraceServiceRequest;
use opentelemetry_proto::tonic::common::v1::{KeyValue, any_value};
use opentelemetry_proto::tonic::metrics::v1::metric::Data;
use opentelemetry_proto::tonic::metrics::v1::number_data_point::Value;
use opentelemetry_proto::tonic::trace::v1::Span;
use opentelemetry_proto::tonic::trace::v1::span::SpanKind;
use prost::Message as _;
use serde_json::json;

use super::client::Answer;
use super::process::{PATIENCE, Scratch, Server, Start};

const POLICY: &str = r#"
    [identity]
    trusted_proxies = ["127.0.0.1/32"]
    user = "header:x-user"
    [[rule]]
    name = "posts"
    per = ["user"]
    limit = "2/h"
    algorithm = "fixed-window"
"#;

const TRACE: &str = "4bf92f3577b34da6a3ce929d0e0e4736";
const PARENT: &str = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01";

/// What a collector received.
#[derive(Debug)]
struct Received {
    path: String,
    headers: BTreeMap<String, String>,
    body: Vec<u8>,
}

/// A collector on a free port. Its threads end with the process of the tests.
struct Collector {
    endpoint: String,
    /// The status of the next answers; 0 for none.
    status: Arc<AtomicU16>,
    received: Mutex<Receiver<Received>>,
}

impl Collector {
    fn start() -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let endpoint = format!("http://{}", listener.local_addr().unwrap());
        let (send, received) = channel();
        let status = Arc::new(AtomicU16::new(200));
        let answered = Arc::clone(&status);
        std::thread::spawn(move || {
            for stream in listener.incoming().map_while(Result::ok) {
                let (send, status) = (Sender::clone(&send), Arc::clone(&answered));
                std::thread::spawn(move || serve(&stream, &send, &status));
            }
        });
        Self { endpoint, status, received: Mutex::new(received) }
    }

    fn answer_with(&self, status: u16) {
        self.status.store(status, Ordering::SeqCst);
    }

    fn next(&self) -> Received {
        self.received.lock().unwrap().recv_timeout(PATIENCE).expect("the server exports")
    }

    /// Returns the next spans.
    fn spans(&self) -> Vec<Span> {
        loop {
            let received = self.next();
            if received.path == "/v1/traces" {
                return spans_in(&received);
            }
        }
    }
}

/// Reads requests and answers them. A request that is refused is not passed on.
fn serve(stream: &TcpStream, send: &Sender<Received>, status: &AtomicU16) -> Option<()> {
    let mut reader = BufReader::new(stream);
    loop {
        let mut line = String::new();
        reader.read_line(&mut line).ok().filter(|length| *length > 0)?;
        let path = line.split(' ').nth(1)?.to_owned();
        let mut headers = BTreeMap::new();
        loop {
            let mut line = String::new();
            reader.read_line(&mut line).ok()?;
            let Some((name, value)) = line.trim().split_once(':') else { break };
            headers.insert(name.to_ascii_lowercase(), value.trim().to_owned());
        }
        let mut body = vec![0; headers.get("content-length")?.parse().ok()?];
        reader.read_exact(&mut body).ok()?;
        let status = match status.load(Ordering::SeqCst) {
            // Until the client gives up.
            0 => return stream.peek(&mut [0]).ok().map(|_| ()),
            status => status,
        };
        if status == 200 {
            send.send(Received { path, headers, body }).ok()?;
        }
        reader.get_mut().write_all(format!("HTTP/1.1 {status} -\r\ncontent-length: 0\r\n\r\n").as_bytes()).ok()?;
    }
}

fn spans_in(received: &Received) -> Vec<Span> {
    let message = ExportTraceServiceRequest::decode(received.body.as_slice()).unwrap();
    let [of_resource] = message.resource_spans.as_slice() else { panic!("{message:?}") };
    assert_eq!(attribute(&of_resource.resource.as_ref().unwrap().attributes, "service.name"), "edge-limits");
    of_resource.scope_spans.iter().flat_map(|scope| scope.spans.clone()).collect()
}

fn attribute<'a>(attributes: &'a [KeyValue], key: &str) -> &'a str {
    let pair = attributes.iter().find(|pair| pair.key == key).unwrap_or_else(|| panic!("no {key} in {attributes:?}"));
    match pair.value.as_ref().unwrap().value.as_ref().unwrap() {
        any_value::Value::StringValue(text) => text,
        other => panic!("{key}: {other:?}"),
    }
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

/// Starts a server that exports to a collector, with further variables.
fn start(collector: &Collector, variables: &[(&str, &str)]) -> (Server, Scratch) {
    let policy = Scratch::file("policy.toml", POLICY);
    let mut all = vec![
        ("OTEL_EXPORTER_OTLP_ENDPOINT", collector.endpoint.as_str()),
        ("OTEL_EXPORTER_OTLP_HEADERS", "x-api-key=collector-key-1"),
        ("OTEL_SERVICE_NAME", "edge-limits"),
        ("OTEL_BSP_SCHEDULE_DELAY", "10"),
    ];
    all.extend(variables);
    let server = Start { policy: Some(policy.path()), variables: &all, ..Start::default() }.server();
    (server, policy)
}

fn check(server: &Server, user: &str, fields: &[(&str, &str)]) -> Answer {
    let fields = [&[("content-type", "application/json")], fields].concat();
    server.connect().send("POST", "/v1/check", &fields, &json!({"user": user}).to_string()).unwrap()
}

#[test]
fn a_decision_is_a_span_of_the_callers_trace() {
    let collector = Collector::start();
    let (server, _policy) = start(&collector, &[]);
    let answer = check(&server, "alice-secret", &[("traceparent", PARENT), ("tracestate", "vendor=1")]).json();
    let received = collector.next();
    assert_eq!((received.path.as_str(), received.headers["x-api-key"].as_str()), ("/v1/traces", "collector-key-1"));
    assert_eq!(received.headers["content-type"], "application/x-protobuf");
    assert!(!String::from_utf8_lossy(&received.body).contains("alice"), "no names of callers");
    let spans = spans_in(&received);
    let [span] = spans.as_slice() else { panic!("{spans:?}") };
    assert_eq!((span.name.as_str(), span.kind), ("threshold check", SpanKind::Server as i32));
    assert_eq!((hex(&span.trace_id).as_str(), hex(&span.parent_span_id).as_str()), (TRACE, "00f067aa0ba902b7"));
    assert_eq!((span.trace_state.as_str(), span.flags), ("vendor=1", 0x301));
    assert!(hex(&span.span_id) != "00f067aa0ba902b7" && span.span_id.len() == 8);
    assert!(span.start_time_unix_nano > 0 && span.start_time_unix_nano <= span.end_time_unix_nano);
    for (key, value) in [
        ("threshold.operation", "check"),
        ("threshold.verdict", "allow"),
        ("threshold.rule", "posts"),
        ("threshold.layer", "user"),
        // The decision has an id of its own: several decisions may belong to one trace.
        ("threshold.trace_id", answer["traceId"].as_str().unwrap()),
    ] {
        assert_eq!(attribute(&span.attributes, key), value, "{key}");
    }
    assert_ne!(answer["traceId"], TRACE);
    // Without a parent, the span begins a trace whose id is the answer's.
    let answer = check(&server, "alice-secret", &[]).json();
    let spans = collector.spans();
    let [span] = spans.as_slice() else { panic!("{spans:?}") };
    assert_eq!((hex(&span.trace_id), span.parent_span_id.len()), (answer["traceId"].as_str().unwrap().to_owned(), 0));
}

/// Spans of all verbs and of forward auth have the caller's as their parent. A caller that does not record its own has none.
#[test]
fn every_operation_has_the_parent_of_its_request() {
    let collector = Collector::start();
    let (server, _policy) = start(&collector, &[("OTEL_METRICS_EXPORTER", "none")]);
    let unsampled = PARENT.replace("-01", "-00");
    assert_eq!(check(&server, "bob", &[("traceparent", &unsampled)]).status, 200);
    let client = &mut server.connect();
    let mut post = |path: &str, body: &str| {
        let fields = [("content-type", "application/json"), ("traceparent", PARENT)];
        client.send("POST", path, &fields, body).unwrap().json()
    };
    let expect = |names: &[&str]| {
        let mut spans = Vec::new();
        while spans.len() < names.len() {
            spans.extend(collector.spans());
        }
        assert_eq!(spans.iter().map(|span| span.name.as_str()).collect::<Vec<_>>(), names);
        for span in &spans {
            let ids = (hex(&span.trace_id), hex(&span.parent_span_id));
            assert_eq!(ids, (TRACE.to_owned(), "00f067aa0ba902b7".to_owned()), "{}", span.name);
        }
        spans
    };
    let receipt = post("/v1/check", r#"{"user": "bob"}"#)["receipt"].clone();
    expect(&["threshold check"]);
    post("/v1/refund", &json!({"receipt": receipt}).to_string());
    let refunded = expect(&["threshold refund"]);
    assert_eq!(attribute(&refunded[0].attributes, "threshold.result"), "done");
    post("/v1/check", r#"[{"user": "bob"}, {"user": "bob"}]"#);
    let decided = expect(&["threshold check", "threshold check"]);
    let verdicts: Vec<_> = decided.iter().map(|span| attribute(&span.attributes, "threshold.verdict")).collect();
    assert_eq!(verdicts, ["allow", "deny"]);
    post("/v1/peek", r#"{"user": "bob"}"#);
    expect(&["threshold peek"]);
    post("/v1/check?waitMs=1", r#"{"user": "bob"}"#);
    expect(&["threshold wait"]);
    let reserved = post("/v1/reserve", r#"{"user": "eve"}"#)["reservation"].clone();
    expect(&["threshold reserve"]);
    post("/v1/commit", &json!({"reservation": reserved}).to_string());
    expect(&["threshold commit"]);
    post("/v1/limit", r#"{"key": "k", "limit": 1, "windowSec": 60}"#);
    expect(&["threshold limit"]);
    post("/v1/bans", r#"{"layer": "user", "key": "bob", "reason": "test"}"#);
    expect(&["threshold control"]);
    let fields = [("traceparent", PARENT), ("x-original-method", "GET"), ("x-original-uri", "/"), ("x-user", "bob")];
    assert_eq!(server.connect().send("GET", "/auth", &fields, "").unwrap().status, 429);
    let asked = expect(&["threshold check"]);
    assert_eq!(attribute(&asked[0].attributes, "threshold.verdict"), "ban");
}

#[test]
fn the_metrics_of_the_page_are_exported() {
    let collector = Collector::start();
    let (server, _policy) =
        start(&collector, &[("OTEL_METRIC_EXPORT_INTERVAL", "20"), ("OTEL_TRACES_EXPORTER", "none")]);
    for _ in 0..3 {
        check(&server, "carol", &[("traceparent", PARENT)]);
    }
    let expected = |value: i64| Some(Value::AsInt(value));
    loop {
        let received = collector.next();
        assert_eq!(received.path, "/v1/metrics");
        let message = ExportMetricsServiceRequest::decode(received.body.as_slice()).unwrap();
        let metrics = &message.resource_metrics[0].scope_metrics[0].metrics;
        let named = |name: &str| metrics.iter().find(|metric| metric.name == name).and_then(|found| found.data.clone());
        let Some(Data::Sum(decisions)) = named("threshold_decisions_total") else { panic!("{metrics:?}") };
        let Some(Data::Gauge(store_up)) = named("threshold_store_up") else { panic!("{metrics:?}") };
        assert_eq!(store_up.data_points[0].value, expected(1));
        let of = |verdict: &str| {
            let is_wanted = |of: &[KeyValue]| attribute(of, "verdict") == verdict && attribute(of, "rule") == "posts";
            let found = decisions.data_points.iter().find(|point| is_wanted(&point.attributes))?;
            assert!(found.start_time_unix_nano > 0 && found.start_time_unix_nano < found.time_unix_nano);
            found.value
        };
        // An export before the third decision has less.
        if of("allow") == expected(2) && of("deny") == expected(1) {
            let page = server.connect().send("GET", "/metrics", &[], "").unwrap().body;
            let on_page = page.lines().filter(|line| line.starts_with("# TYPE ")).count();
            assert!(metrics.len() <= on_page && metrics.len() > 5, "{page}");
            return;
        }
    }
}

/// Each signal goes where its own variables say, and the resource names the process.
#[test]
fn a_signal_has_header_fields_and_a_coding_of_its_own() {
    let (collector, other) = (Collector::start(), Collector::start());
    let metrics = format!("{}/push", other.endpoint);
    let (server, _policy) = start(
        &collector,
        &[
            ("OTEL_EXPORTER_OTLP_METRICS_ENDPOINT", &metrics),
            ("OTEL_EXPORTER_OTLP_METRICS_HEADERS", "x-api-key=other-key-2"),
            ("OTEL_EXPORTER_OTLP_METRICS_COMPRESSION", "gzip"),
            ("OTEL_METRIC_EXPORT_INTERVAL", "20"),
        ],
    );
    check(&server, "gina", &[]);
    let spans = collector.next();
    let message = ExportTraceServiceRequest::decode(spans.body.as_slice()).unwrap();
    let instance = |attributes: &[KeyValue]| attribute(attributes, "service.instance.id").to_owned();
    let own = instance(&message.resource_spans[0].resource.as_ref().unwrap().attributes);
    let received = other.next();
    assert_eq!((received.path.as_str(), received.headers["x-api-key"].as_str()), ("/push", "other-key-2"));
    assert_eq!(received.headers["content-encoding"], "gzip");
    let mut body = Vec::new();
    flate2::read::GzDecoder::new(received.body.as_slice()).read_to_end(&mut body).unwrap();
    let message = ExportMetricsServiceRequest::decode(body.as_slice()).unwrap();
    assert_eq!(instance(&message.resource_metrics[0].resource.as_ref().unwrap().attributes), own);
    assert_eq!(own.len(), 36);
}

/// Requests are answered meanwhile, one line of the log says so, and the spans arrive once the collector is back.
#[test]
fn a_failing_collector_is_logged_once_and_receives_the_spans_later() {
    let collector = Collector::start();
    collector.answer_with(503);
    let (server, _policy) = start(&collector, &[("OTEL_METRICS_EXPORTER", "none")]);
    let first = check(&server, "dave", &[]).json()["traceId"].clone();
    let line = server.wait_for_log("OpenTelemetry: export failed");
    assert!(line.contains("503") && !line.contains("collector-key-1"), "{line}");
    let second = check(&server, "dave", &[]).json()["traceId"].clone();
    collector.answer_with(200);
    let mut arrived = Vec::new();
    while arrived.len() < 2 {
        arrived.extend(collector.spans().iter().map(|span| hex(&span.trace_id)));
    }
    assert_eq!(arrived, [first.as_str().unwrap(), second.as_str().unwrap()]);
    server.wait_for_log("accepts exports again");
    server.signal("TERM");
    let (status, rest) = server.wait();
    assert!(status.success() && !rest.contains("OpenTelemetry"), "{status} {rest}");
}

#[test]
fn a_server_that_stops_exports_what_is_left() {
    let collector = Collector::start();
    let never = [("OTEL_BSP_SCHEDULE_DELAY", "3600000"), ("OTEL_METRIC_EXPORT_INTERVAL", "3600000")];
    let (server, _policy) = start(&collector, &never);
    let trace = check(&server, "erin", &[]).json()["traceId"].clone();
    server.signal("TERM");
    let spans = collector.next();
    assert_eq!(hex(&spans_in(&spans)[0].trace_id), trace.as_str().unwrap());
    assert_eq!(collector.next().path, "/v1/metrics");
    assert!(server.wait().0.success());
}

/// A collector that accepts connections and never answers holds up neither requests nor the end.
#[test]
fn a_collector_that_does_not_answer_holds_up_nothing() {
    let collector = Collector::start();
    collector.answer_with(0);
    let (server, _policy) = start(&collector, &[("OTEL_EXPORTER_OTLP_TIMEOUT", "3600000")]);
    for _ in 0..2_000 {
        assert_eq!(check(&server, "frank", &[("connection", "close")]).status, 200);
    }
    server.signal("TERM");
    let (status, rest) = server.wait();
    assert!(status.success() && rest.contains("the last export did not end in time"), "{rest}");
}

#[test]
fn a_wrong_variable_stops_the_start() {
    let variables = &[("OTEL_EXPORTER_OTLP_ENDPOINT", "token@collector:4317")];
    let output = Start { variables, ..Start::default() }.command().output().unwrap();
    let error = String::from_utf8(output.stderr).unwrap();
    assert_eq!(output.status.code(), Some(2), "{error}");
    assert!(error.contains("OTEL_EXPORTER_OTLP_ENDPOINT is no URL") && !error.contains("token@"), "{error}");
    // `--check` finds it too, and a certificate that cannot be read.
    let certificate = ("OTEL_EXPORTER_OTLP_CERTIFICATE", "/no/such/ca.pem");
    for variables in [&variables[..], &[("OTEL_EXPORTER_OTLP_ENDPOINT", "https://127.0.0.1:4318"), certificate]] {
        let output = Start { args: &["--check"], variables, ..Start::default() }.command().output().unwrap();
        let said = String::from_utf8(output.stdout).unwrap();
        let named = if variables.len() == 1 { "OTEL_EXPORTER_OTLP_ENDPOINT" } else { "/no/such/ca.pem" };
        assert!(output.status.code() == Some(2) && said.contains(named), "{said}");
    }
}
