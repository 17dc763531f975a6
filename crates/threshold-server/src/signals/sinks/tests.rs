//! Tests of sinks against real receivers on this machine.

use std::io::{BufRead as _, BufReader, ErrorKind, Read as _, Write as _};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::os::unix::fs::PermissionsExt as _;
use std::path::Path;
use std::time::Instant;

use base64::Engine as _;
use base64::prelude::BASE64_STANDARD;
use http::Uri;
use threshold_core::alert::{AlertChange, AlertLevel};
use threshold_core::policy::AlertOn;
use threshold_core::{Event, Timestamp};
use ureq::config::Config;
use ureq::tls::TlsConfig;
use ureq::unversioned::resolver::{ResolvedSocketAddrs, Resolver};
use ureq::unversioned::transport::NextTimeout;

use super::*;
use crate::signals::alerts::Why;

/// The longest wait for something that is sure to come.
const LONG: Duration = Duration::from_secs(30);
const QUICK: Patience = Patience {
    tries: 3,
    first_pause: Duration::from_millis(1),
    longest_pause: Duration::from_millis(10),
    longest: LONG,
};
const SECRET: &str = "whsec_MDEyMzQ1Njc4OWFiY2RlZjAxMjM0NTY3ODlhYmNkZWY=";

/// A request that a receiver has got: its header fields and its body.
struct Got {
    path: String,
    fields: Vec<(String, String)>,
    body: String,
}

impl Got {
    fn field(&self, name: &str) -> Option<&str> {
        self.fields.iter().find(|(own, _)| own == name).map(|(_, value)| value.as_str())
    }

    /// Verifies the signature as the Standard Webhooks specification says, with another implementation of HMAC.
    fn is_signed_with(&self, key: &[u8]) -> bool {
        let (id, time) = (self.field("webhook-id").unwrap(), self.field("webhook-timestamp").unwrap());
        let signed = format!("{id}.{time}.{}", self.body);
        let key = ring::hmac::Key::new(ring::hmac::HMAC_SHA256, key);
        let mut signatures = self.field("webhook-signature").unwrap().split(' ');
        signatures.any(|signature| {
            let tag = BASE64_STANDARD.decode(signature.strip_prefix("v1,").unwrap()).unwrap();
            ring::hmac::verify(&key, signed.as_bytes(), &tag).is_ok()
        })
    }
}

/// An HTTP server that answers one request after another as it is told, and then ends.
fn receiver(answers: &[&'static str]) -> (SocketAddr, Receiver<Got>) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap();
    let (sender, requests) = channel();
    let answers = answers.to_vec();
    thread::spawn(move || {
        for answer in answers {
            let (stream, _) = listener.accept().unwrap();
            let got = read(&stream);
            let head = format!("HTTP/1.1 {answer}\r\ncontent-length: 0\r\nconnection: close\r\n\r\n");
            (&stream).write_all(head.as_bytes()).unwrap();
            drop(stream);
            let _ = sender.send(got);
        }
    });
    (address, requests)
}

fn read(stream: &TcpStream) -> Got {
    let mut reader = BufReader::new(stream);
    let mut line = || {
        let mut line = String::new();
        reader.read_line(&mut line).unwrap();
        line.trim_end().to_owned()
    };
    let path = line().split(' ').nth(1).unwrap().to_owned();
    let fields = std::iter::from_fn(|| Some(line()).filter(|line| !line.is_empty()));
    let fields =
        fields.map(|line| line.split_once(": ").map(|(name, value)| (name.to_lowercase(), value.to_owned())).unwrap());
    let mut got = Got { path, fields: fields.collect(), body: String::new() };
    let length = got.field("content-length").map_or(0, |length| length.parse().unwrap());
    reader.take(length).read_to_string(&mut got.body).unwrap();
    got
}

fn settings(lines: &[Lines], reach: Reach, variables: &[(&str, &str)]) -> anyhow::Result<SinkSettings> {
    let find = |name: &str| variables.iter().find(|(own, _)| *own == name).map(|(_, value)| (*value).to_owned());
    SinkSettings::read(lines, reach, None, |name| Ok(find(name)))
}

/// Starts sinks that may reach this machine and lose patience within milliseconds.
fn start(lines: &[Lines], variables: &[(&str, &str)]) -> Sinks {
    Sinks::start_with(settings(lines, Reach::Private, variables).unwrap(), str::to_owned, QUICK, QUICK).unwrap()
}

fn batch(numbers: std::ops::Range<usize>) -> Arc<[Event]> {
    let event = |number: usize| {
        let id = format!("00000000-0000-4000-8000-{number:012x}");
        Event::from_json(&format!(r#"{{"id":"{id}","at":1767225600000,"blocked":true}}"#)).unwrap()
    };
    numbers.map(event).collect()
}

fn notice(change: AlertChange) -> Notice {
    let (on, at) = (AlertOn::EdgeBlocks, Timestamp::from_secs(1_767_225_600));
    Notice {
        on,
        alert: on.usual(),
        key: None,
        change,
        count: 100,
        peak: 100,
        since: at,
        at,
        node: "node-1".into(),
        why: Why::default(),
        group: None,
    }
}

const RAISED: AlertChange = AlertChange::Raised(AlertLevel::Warning);

#[test]
fn webhooks_are_signed_as_the_specification_says() {
    let (events, got_events) = receiver(&["200 OK"]);
    let (alerts, got_alerts) = receiver(&["204 No Content"]);
    let secrets = format!("{SECRET} a-secret-that-is-text");
    let sinks = start(
        &[],
        &[
            ("THRESHOLD_EVENTS_URL", &format!("http://{events}/v1/events")),
            ("THRESHOLD_EVENTS_TOKEN", "token-of-the-receiver"),
            ("THRESHOLD_ALERT_URL", &format!("http://{alerts}/hook?a=b")),
            ("THRESHOLD_WEBHOOK_SECRET", &secrets),
        ],
    );
    sinks.events(&batch(0..3));
    sinks.alert(&notice(RAISED));
    let (event, alert) = (got_events.recv_timeout(LONG).unwrap(), got_alerts.recv_timeout(LONG).unwrap());
    for got in [&event, &alert] {
        assert!(got.is_signed_with(b"0123456789abcdef0123456789abcdef"));
        assert!(got.is_signed_with(b"a-secret-that-is-text"));
        assert!(!got.is_signed_with(b"another secret of 32 characters!"));
        assert_eq!(got.field("content-type"), Some("application/json"));
    }
    assert_eq!((event.path.as_str(), alert.path.as_str()), ("/v1/events", "/hook?a=b"));
    assert_eq!(event.field("authorization"), Some("Bearer token-of-the-receiver"));
    assert_eq!(alert.field("authorization"), None, "the token is for events");
    assert_eq!(alert.body, notice(RAISED).to_json(&sinks.node));
    let events: Vec<serde_json::Value> = serde_json::from_str(&event.body).unwrap();
    let events: Vec<Event> = events.iter().map(|event| Event::from_json(&event.to_string()).unwrap()).collect();
    assert_eq!(events, &*batch(0..3));
    sinks.close(LONG);
    assert_eq!(sinks.lost(), 0);
}

/// Woken by an id for each try, and by a try after success.
#[test]
fn what_fails_is_tried_again_under_the_same_id_until_it_is_accepted() {
    let (alerts, got) = receiver(&["500 Oops", "429 Slow\r\nretry-after: 0", "408 Late", "202 Accepted"]);
    let url = format!("http://{alerts}/");
    let patience = Patience { tries: 4, ..QUICK };
    let settings = settings(&[], Reach::Private, &[("THRESHOLD_ALERT_URL", &url)]).unwrap();
    let sinks = Sinks::start_with(settings, str::to_owned, QUICK, patience).unwrap();
    sinks.alert(&notice(RAISED));
    let tries: Vec<Got> = (0..4).map(|_| got.recv_timeout(LONG).unwrap()).collect();
    let ids: Vec<&str> = tries.iter().map(|got| got.field("webhook-id").unwrap()).collect();
    assert!(ids.iter().all(|id| *id == ids[0] && id.starts_with("msg_")), "{ids:?}");
    assert!(tries.iter().all(|got| got.body == tries[0].body && got.field("webhook-signature").is_none()));
    sinks.close(LONG);
    assert_eq!(sinks.lost(), 0);
    assert!(got.recv().is_err(), "the receiver has ended, and nothing was left to send");
}

#[test]
fn what_is_refused_is_lost_and_the_next_is_sent() {
    let (alerts, got) = receiver(&["400 No", "301 Moved\r\nlocation: http://127.0.0.1:1/", "200 OK"]);
    let sinks = start(&[], &[("THRESHOLD_ALERT_URL", &format!("http://{alerts}/"))]);
    let later = |seconds: u64| Timestamp::from_secs(1_767_225_600 + seconds);
    (0..3).for_each(|seconds| sinks.alert(&Notice { at: later(seconds), ..notice(RAISED) }));
    let ids: Vec<String> =
        (0..3).map(|_| got.recv_timeout(LONG).unwrap().field("webhook-id").unwrap().to_owned()).collect();
    assert!(ids[0] != ids[1] && ids[1] != ids[2], "{ids:?}");
    sinks.close(LONG);
    assert_eq!(sinks.lost(), 2);
}

/// Woken by a counter that all sinks share, and by numbers that go on over all kinds.
#[test]
fn what_is_lost_is_counted_by_sink() {
    let (alerts, got) = receiver(&["200 OK", "400 No", "200 OK"]);
    let folder = std::env::temp_dir().join(format!("threshold-lost-{}", std::process::id()));
    std::fs::create_dir_all(&folder).unwrap();
    let files = ["one", "two"].map(|name| Lines::File(folder.join(name)));
    let urls = format!("http://{alerts}/first slack+http://{alerts}/slack http://{alerts}/second");
    let sinks = start(&files, &[("THRESHOLD_ALERT_URL", &urls)]);
    // The second file can no longer be written. Neither can a file beside it be taken for it.
    std::fs::remove_file(folder.join("two")).unwrap();
    std::fs::create_dir(folder.join("two")).unwrap();
    sinks.events(&batch(0..3));
    sinks.alert(&notice(RAISED));
    let refused: Vec<String> = (0..3).map(|_| got.recv_timeout(LONG).unwrap().path).collect();
    sinks.close(LONG);
    let lost: Vec<(&str, u64)> = sinks.lost_by_sink().collect();
    let labels: Vec<&str> = lost.iter().map(|(label, _)| *label).collect();
    assert_eq!(labels, ["file-1", "file-2", "webhook-1", "slack-1", "webhook-2"]);
    let of = |path: &str| u64::from(refused[1] == path);
    assert_eq!(
        lost.iter().map(|(_, lost)| *lost).collect::<Vec<_>>(),
        [0, 3, of("/first"), of("/slack"), of("/second")]
    );
    std::fs::remove_dir_all(folder).unwrap();
}

/// Fails if the message waits in the queue behind others, is tried again, or counts as lost.
#[test]
fn a_test_message_is_sent_once_to_every_receiver() {
    let (refusing, got) = receiver(&["500 Oops"]);
    let (pager, incidents) = receiver(&["202 Accepted", "202 Accepted"]);
    let urls = format!("slack+http://{refusing}/secret pagerduty+http://{pager}/");
    let sinks = start(&[], &[("THRESHOLD_ALERT_URL", &urls), ("THRESHOLD_PAGERDUTY_KEY", "key")]);
    let tested = sinks.test(Timestamp::from_secs(1_767_225_600)).unwrap();
    let named = |kind, address, result| Tested { name: format!("{kind}-1 http://{address}").into(), result };
    let refused = named("slack", refusing, Err("answered 500".to_owned()));
    assert_eq!(tested, [refused, named("pagerduty", pager, Ok(()))]);
    assert!(got.recv_timeout(LONG).unwrap().body.contains("this is a test"));
    let actions: Vec<bool> =
        (0..2).map(|_| incidents.recv_timeout(LONG).unwrap().body.contains(r#""event_action":"resolve""#)).collect();
    assert_eq!(actions, [false, true]);
    sinks.close(LONG);
    assert_eq!((sinks.lost(), got.recv().is_err()), (0, true));
}

#[test]
fn one_test_message_is_sent_at_a_time() {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let url = format!("http://{}/", listener.local_addr().unwrap());
    let sinks = start(&[], &[("THRESHOLD_ALERT_URL", &url)]);
    thread::scope(|scope| {
        let first = scope.spawn(|| sinks.test(Timestamp::EPOCH));
        let (stream, _) = listener.accept().unwrap();
        read(&stream);
        assert_eq!(sinks.test(Timestamp::EPOCH), None);
        (&stream).write_all(b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\nconnection: close\r\n\r\n").unwrap();
        drop(stream);
        assert_eq!(first.join().unwrap().map(|tested| tested.len()), Some(1));
    });
    sinks.close(LONG);
}

#[test]
fn a_redirect_is_not_followed() {
    let (elsewhere, nothing) = receiver(&["200 OK"]);
    // A client that follows it asks with GET there.
    let answer = format!("302 Elsewhere\r\nlocation: http://{elsewhere}/").leak();
    let (alerts, got) = receiver(&[answer]);
    let sinks = start(&[], &[("THRESHOLD_ALERT_URL", &format!("http://{alerts}/"))]);
    sinks.alert(&notice(RAISED));
    got.recv_timeout(LONG).unwrap();
    sinks.close(LONG);
    assert_eq!((sinks.lost(), nothing.try_recv().is_err()), (1, true));
}

/// A receiver that accepts connections and never answers. Handing events over does not wait for it.
///
/// Woken by `send` in place of `try_send`: the test then takes as long as the deadlines of all requests together.
#[test]
fn a_dead_receiver_fills_its_queue_and_delays_nothing() {
    let dead = TcpListener::bind("127.0.0.1:0").unwrap();
    let url = format!("http://{}/", dead.local_addr().unwrap());
    let events = start(&[], &[("THRESHOLD_EVENTS_URL", &url)]);
    events.events(&batch(0..1));
    // Its thread waits for an answer from now on, and takes no more.
    let busy = dead.accept().unwrap();
    (0..40).for_each(|number| events.events(&batch(number * 1_000..(number + 1) * 1_000)));
    assert_eq!(events.lost(), 24_000, "16 batches have room beside the first event");
    let (alive, got) = receiver(&["200 OK"]);
    let alerts = start(&[], &[("THRESHOLD_ALERT_URL", &format!("{url} http://{alive}/"))]);
    alerts.alert(&notice(RAISED));
    got.recv_timeout(LONG).unwrap();
    let busy_too = dead.accept().unwrap();
    let only_dead = start(&[], &[("THRESHOLD_ALERT_URL", &url)]);
    only_dead.alert(&notice(RAISED));
    let busy_as_well = dead.accept().unwrap();
    (0..2 * MAX_NOTICES).for_each(|_| only_dead.alert(&notice(RAISED)));
    assert_eq!(only_dead.lost(), u64::try_from(MAX_NOTICES).unwrap());
    [events, alerts, only_dead].iter().for_each(|sinks| drop(sinks.close(Duration::ZERO)));
    drop((busy, busy_too, busy_as_well));
}

/// A receiver that returns while the server stops has the last alert, and what it does not take is left for the next process.
///
/// Woken by a pause that goes on when the server stops, and by counting what is left as lost.
#[test]
fn a_server_that_stops_tries_again_and_says_what_is_left() {
    let patience = Patience { tries: 20, first_pause: LONG, longest_pause: LONG, longest: LONG * 40 };
    let (returning, got) = receiver(&["503 Later", "503 Later", "200 OK"]);
    let (away, tried) = receiver(&["503 Later"]);
    let urls = format!("http://{returning}/ slack+http://{away}/");
    let settings = settings(&[], Reach::Private, &[("THRESHOLD_ALERT_URL", &urls)]).unwrap();
    let sinks = Sinks::start_with(settings, str::to_owned, QUICK, patience).unwrap();
    let (raised, over) = (notice(RAISED), notice(AlertChange::Resolved(AlertLevel::Warning)));
    sinks.alert(&raised);
    let first = got.recv_timeout(LONG).unwrap();
    tried.recv_timeout(LONG).unwrap();
    // It is over before anybody has heard of it.
    sinks.alert(&over);
    let left = sinks.close(Duration::from_secs(2));
    let second = got.recv_timeout(LONG).unwrap();
    assert_eq!(first.field("webhook-id"), second.field("webhook-id"));
    let third = got.recv_timeout(LONG).unwrap();
    assert!(third.body.contains(r#""state":"raised""#), "{}", third.body);
    // The receiver that has ended does not take the end.
    let names = [format!("webhook-1 http://{returning}"), format!("slack-1 http://{away}")];
    let expect: BTreeMap<Arc<str>, usize> =
        names.iter().zip([1, 2]).map(|(name, left)| (name.as_str().into(), left)).collect();
    assert_eq!((left.clone(), sinks.lost()), (expect, 0));
    let saved = sinks.to_save([]);
    assert_eq!((saved.len(), &saved[0].notice), (1, &over));
    let id = format!("webhook http://{returning}/ 1");
    assert_eq!(saved[0].told, Some(ToldTo::from([(id.as_str().into(), Told::Raised(AlertLevel::Warning))])));
    sinks.count_left(&left);
    assert_eq!(sinks.lost_by_sink().collect::<Vec<_>>(), [("webhook-1", 1), ("slack-1", 2)]);
    // The next process tells each what it has not heard.
    let (one, at_one) = receiver(&["200 OK"]);
    let (two, at_two) = receiver(&["200 OK", "200 OK"]);
    let next = start(&[], &[("THRESHOLD_ALERT_URL", &format!("http://{one}/ slack+http://{two}/"))]);
    let told = [(format!("webhook http://{one}/ 1").as_str().into(), Told::Raised(AlertLevel::Warning))].into();
    next.restore(&SavedAlert { notice: over.clone(), told: Some(told) }, false, over.at);
    assert!(at_one.recv_timeout(LONG).unwrap().body.contains("resolved"));
    let bodies = [(); 2].map(|()| at_two.recv_timeout(LONG).unwrap().body);
    assert!(bodies[0].contains(":rotating_light:") && bodies[1].contains("resolved"), "{bodies:?}");
    assert_eq!((next.close(LONG).len(), next.to_save([]), next.lost()), (0, vec![], 0));
}

/// A receiver that was put before another one on the same host was taken for it, and heard nothing of what was raised.
///
/// Woken by an id of the host alone, by the number of its kind, and by one id for a URL that is given twice.
#[test]
fn a_receiver_is_known_by_its_url_wherever_it_is_in_the_setting() {
    let start = |urls: &str| start(&[], &[("THRESHOLD_ALERT_URL", urls)]);
    let told_of = |sinks: &Sinks, raised: &Notice| {
        assert!(sinks.close(LONG).is_empty());
        sinks.to_save([raised]).remove(0)
    };
    let raised = notice(RAISED);
    let (host, got) = receiver(&["200 OK"; 4]);
    let first = start(&format!("slack+http://{host}/old"));
    first.alert(&raised);
    let saved = told_of(&first, &raised);
    let next =
        start(&format!("slack+http://{host}/new slack+http://{host}/old slack+http://{host}/old http://{host}/old"));
    next.restore(&saved, true, raised.at);
    let saved = told_of(&next, &raised);
    assert_eq!(saved.told.map(|told| told.len()), Some(4));
    let mut paths = [(); 4].map(|()| got.recv_timeout(LONG).unwrap().path);
    paths.sort_unstable();
    assert_eq!(
        paths,
        ["/new", "/old", "/old", "/old"],
        "of the same receiver once, of its copy, and of the one in another form"
    );
}

#[test]
fn a_receiver_that_is_away_loses_what_is_out_of_patience() {
    let address = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
    let sinks = start(&[], &[("THRESHOLD_EVENTS_URL", &format!("http://{address}/"))]);
    sinks.events(&batch(0..1_100));
    let begin = Instant::now();
    while sinks.lost() < 1_100 && begin.elapsed() < LONG {
        thread::sleep(Duration::from_millis(5));
    }
    assert_eq!(sinks.lost(), 1_100);
    sinks.close(LONG);
}

/// The path of a URL is often a secret: Slack's is.
#[test]
fn no_reason_of_a_failure_has_a_part_of_the_url() {
    let (plain, _got) = receiver(&["500 Oops", "200 Not HTTPS"]);
    let closed = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
    let tls = crate::operate::system_tls().unwrap_or_default();
    for (url, reach) in [
        (format!("http://{plain}/services/CANARY?key=CANARY"), Reach::Private),
        (format!("http://{closed}/services/CANARY"), Reach::Private),
        (format!("http://{closed}/services/CANARY"), Reach::Public),
        (format!("https://{closed}/services/CANARY"), Reach::Private),
        ("http://host.invalid/services/CANARY".to_owned(), Reach::Private),
    ] {
        let agent = webhook::agent(tls.clone(), reach);
        let patience = Patience { tries: 1, ..QUICK };
        let webhook =
            Webhook { agent, url: url.parse().unwrap(), token: Some("CANARY".into()), keys: [].into(), patience };
        let mut reasons = Vec::new();
        let delivery = webhook.deliver(("msg_1", "{}"), &Stop::default(), |reason| reasons.push(reason.to_owned()));
        assert_eq!(delivery, Delivery::Lost);
        assert!(
            reasons.len() == 1 && !reasons[0].contains("CANARY") && !reasons[0].contains("services"),
            "{reasons:?}"
        );
    }
    let variables = [
        ("THRESHOLD_EVENTS_URL", "https://hooks.example.com/CANARY"),
        ("THRESHOLD_EVENTS_TOKEN", "CANARY"),
        ("THRESHOLD_WEBHOOK_SECRET", "CANARY-CANARY-CANARY"),
    ];
    if let Ok(settings) = settings(&[], Reach::Public, &variables) {
        assert!(format!("{settings:?}").contains("https://hooks.example.com"));
        assert!(!format!("{settings:?}").contains("CANARY"));
    }
}

/// Posts to a host on the port of a real listener. Returns the reason of the failure, and whether anything connected.
fn try_host(host: &str, reach: Reach) -> (String, bool) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    listener.set_nonblocking(true).unwrap();
    let url: Uri = format!("http://{host}:{}/", listener.local_addr().unwrap().port()).parse().unwrap();
    let patience = Patience { tries: 1, ..QUICK };
    let agent = webhook::agent(TlsConfig::default(), reach);
    let webhook = Webhook { agent, url, token: None, keys: [].into(), patience };
    let mut reasons = Vec::new();
    let delivery = webhook.deliver(("msg_1", "{}"), &Stop::default(), |reason| reasons.push(reason.to_owned()));
    assert_eq!(delivery, Delivery::Lost);
    let connected = listener.accept().map(drop).map_err(|error| error.kind()) != Err(ErrorKind::WouldBlock);
    (reasons.concat(), connected)
}

/// Every spelling of an address inside is found, because the address is checked and not the text.
#[test]
fn no_spelling_of_a_private_address_is_connected_to() {
    let expect = guard::PrivateAddress.to_string();
    for host in [
        "127.0.0.1",
        "127.1",
        "127.255.255.254",
        "2130706433",
        "0x7f000001",
        "0x7f.1",
        "0177.0.0.1",
        "017700000001",
        "0",
        "0.0.0.0",
        "localhost",
        "LOCALHOST",
        "[::1]",
        "[::]",
        "[::ffff:7f00:1]",
        "[::ffff:127.0.0.1]",
        "[0:0:0:0:0:ffff:7f00:0001]",
        "169.254.169.254",
        "2852039166",
        "0xa9fea9fe",
        "[::ffff:a9fe:a9fe]",
        "[fe80::1]",
        "[fd00:ec2::254]",
        "10.0.0.1",
        "100.100.100.200",
        "172.16.0.1",
        "192.168.1.1",
        "[64:ff9b::7f00:1]",
        "[2002:7f00:1::]",
        "224.0.0.1",
        "255.255.255.255",
    ] {
        let (reason, connected) = try_host(host, Reach::Public);
        assert_eq!((reason.as_str(), connected), (expect.as_str(), false), "{host}");
    }
}

/// Answers with one address after the other.
#[derive(Debug)]
struct Rebinding(Mutex<Vec<SocketAddr>>);

impl Resolver for Rebinding {
    fn resolve(&self, _: &Uri, _: &Config, _: NextTimeout) -> Result<ResolvedSocketAddrs, ureq::Error> {
        let mut addresses = self.empty();
        addresses.push(self.0.lock().unwrap().remove(0));
        Ok(addresses)
    }
}

/// The name is resolved once for a request, and the connection goes to the address that was checked.
///
/// Woken by a connector that resolves again.
#[test]
fn a_name_that_changes_its_address_is_connected_to_where_it_was_checked() {
    let (checked, got) = receiver(&["500 Oops"]);
    let inside = TcpListener::bind("127.0.0.1:0").unwrap();
    inside.set_nonblocking(true).unwrap();
    let addresses = vec![checked, inside.local_addr().unwrap()];
    let url: Uri = "http://rebind.example/".parse().unwrap();
    let patience = Patience { tries: 1, ..QUICK };
    let agent = webhook::agent_with(TlsConfig::default(), Reach::Private, Rebinding(Mutex::new(addresses)));
    let webhook = Webhook { agent, url: url.clone(), token: None, keys: [].into(), patience };
    assert_eq!(webhook.deliver(("msg_1", "{}"), &Stop::default(), |_| ()), Delivery::Lost);
    assert_eq!(got.recv_timeout(LONG).unwrap().field("host"), Some("rebind.example"));
    assert_eq!(inside.accept().unwrap_err().kind(), ErrorKind::WouldBlock);
    // The next request resolves again, and is checked again.
    let addresses = vec![inside.local_addr().unwrap()];
    let agent = webhook::agent_with(TlsConfig::default(), Reach::Public, Rebinding(Mutex::new(addresses)));
    let webhook = Webhook { agent, url, token: None, keys: [].into(), patience };
    let mut reasons = Vec::new();
    let delivery = webhook.deliver(("msg_1", "{}"), &Stop::default(), |reason| reasons.push(reason.to_owned()));
    assert_eq!(delivery, Delivery::Lost);
    assert_eq!(reasons, [guard::PrivateAddress.to_string()]);
    assert_eq!(inside.accept().unwrap_err().kind(), ErrorKind::WouldBlock);
}

#[test]
fn a_pause_that_the_receiver_asks_for_is_bounded() {
    let (alerts, got) = receiver(&["503 Later\r\nretry-after: 999999", "200 OK"]);
    let sinks = start(&[], &[("THRESHOLD_ALERT_URL", &format!("http://{alerts}/"))]);
    sinks.alert(&notice(RAISED));
    (0..2).for_each(|_| drop(got.recv_timeout(LONG).unwrap()));
    sinks.close(LONG);
    assert_eq!(sinks.lost(), 0);
}

fn lines_of(path: &Path, at_least: usize) -> Vec<String> {
    let begin = Instant::now();
    loop {
        let text = std::fs::read_to_string(path).unwrap_or_default();
        if text.lines().count() >= at_least && text.ends_with('\n') || begin.elapsed() > LONG {
            return text.lines().map(str::to_owned).collect();
        }
        thread::sleep(Duration::from_millis(5));
    }
}

#[test]
fn lines_are_appended_to_a_file_that_may_be_rotated() {
    let folder = std::env::temp_dir().join(format!("threshold-sinks-{}", rand::random::<u64>()));
    std::fs::create_dir(&folder).unwrap();
    let (path, old) = (folder.join("events.jsonl"), folder.join("events.jsonl.1"));
    let sinks = start(&[Lines::File(path.clone())], &[]);
    assert_eq!(std::fs::metadata(&path).unwrap().permissions().mode() & 0o777, 0o600);
    sinks.events(&batch(0..2));
    assert_eq!(lines_of(&path, 2), [batch(0..1)[0].to_json(), batch(1..2)[0].to_json()]);
    std::fs::rename(&path, &old).unwrap();
    sinks.events(&batch(2..3));
    assert_eq!((lines_of(&path, 1).len(), lines_of(&old, 2).len()), (1, 2));
    // A folder in its place cannot be written to.
    std::fs::remove_file(&path).unwrap();
    std::fs::create_dir(&path).unwrap();
    sinks.events(&batch(3..7));
    let begin = Instant::now();
    while sinks.lost() < 4 && begin.elapsed() < LONG {
        thread::sleep(Duration::from_millis(5));
    }
    assert_eq!(sinks.lost(), 4);
    std::fs::remove_dir(&path).unwrap();
    sinks.events(&batch(7..8));
    assert_eq!(lines_of(&path, 1), [batch(7..8)[0].to_json()]);
    sinks.close(LONG);
    sinks.events(&batch(8..9));
    assert_eq!(lines_of(&path, 1).len(), 1, "nothing is written after the end");
    std::fs::remove_dir_all(folder).unwrap();
}

/// A pipe that nobody reads kept the server from starting.
///
/// Fails (it does not end) if the pipe is opened as a file is.
#[test]
fn a_pipe_without_a_reader_loses_events_and_is_written_when_it_has_one() {
    let folder = std::env::temp_dir().join(format!("threshold-pipe-{}", rand::random::<u64>()));
    std::fs::create_dir(&folder).unwrap();
    let path = folder.join("pipe");
    rustix::fs::mkfifoat(rustix::fs::CWD, &path, rustix::fs::Mode::from(0o600)).unwrap();
    let sinks = start(&[Lines::File(path.clone())], &[]);
    sinks.events(&batch(0..2));
    let begin = Instant::now();
    while sinks.lost() < 2 && begin.elapsed() < LONG {
        thread::sleep(Duration::from_millis(5));
    }
    // For reading and writing, so that opening does not wait.
    let pipe = std::fs::File::options().read(true).write(true).open(&path).unwrap();
    sinks.events(&batch(2..3));
    let mut line = String::new();
    BufReader::new(pipe).read_line(&mut line).unwrap();
    assert_eq!((line.trim_end(), sinks.lost()), (batch(2..3)[0].to_json().as_str(), 2));
    sinks.close(LONG);
    std::fs::remove_dir_all(folder).unwrap();
}

#[test]
fn a_mistake_in_a_setting_is_told_at_the_start() {
    let all = |variables: &[(&str, &str)], reach| {
        settings(&[], reach, variables).map(drop).map_err(|error| format!("{error:#}"))
    };
    let url = |url: &str| all(&[("THRESHOLD_ALERT_URL", url)], Reach::Public).unwrap_err();
    for (given, expect) in [
        ("CANARY", "THRESHOLD_ALERT_URL, URL 1: not a URL: expected https://HOST/PATH"),
        ("https:///CANARY", "THRESHOLD_ALERT_URL, URL 1: not a URL: expected https://HOST/PATH"),
        (
            "ftp://a.example/CANARY",
            "THRESHOLD_ALERT_URL, URL 1: unknown scheme: expected https://, and for alerts also slack+https:// or pagerduty+https://",
        ),
        (
            "http://a.example/CANARY",
            "THRESHOLD_ALERT_URL, URL 1: http:// is not encrypted: use https://, or allow it with --allow-private-webhooks",
        ),
        ("https://a:CANARY@a.example/", "THRESHOLD_ALERT_URL, URL 1: a name and password in the URL are not supported"),
        (
            "https://127.0.0.1/CANARY",
            "THRESHOLD_ALERT_URL, URL 1: 127.0.0.1 is not a public address: --allow-private-webhooks allows it",
        ),
        (
            "slack+https://[::ffff:7f00:1]/CANARY",
            "THRESHOLD_ALERT_URL, URL 1: ::ffff:7f00:1 is not a public address: --allow-private-webhooks allows it",
        ),
        (
            "pagerduty+https://a.example/",
            "THRESHOLD_ALERT_URL, URL 1: pagerduty+https:// needs THRESHOLD_PAGERDUTY_KEY",
        ),
    ] {
        assert_eq!(url(given), expect);
    }
    let hook = ("THRESHOLD_ALERT_URL", "http://127.0.0.1:1/ http://127.0.0.1:2/CANARY slack+http://localhost/");
    assert_eq!(all(&[hook], Reach::Private), Ok(()));
    for (variables, expect) in [
        (vec![("THRESHOLD_EVENTS_TOKEN", "x")], "THRESHOLD_EVENTS_TOKEN is set without THRESHOLD_EVENTS_URL"),
        (
            vec![hook, ("THRESHOLD_PAGERDUTY_KEY", "x")],
            "THRESHOLD_PAGERDUTY_KEY is set, but THRESHOLD_ALERT_URL has no pagerduty+https:// URL",
        ),
        (
            vec![("THRESHOLD_WEBHOOK_SECRET", "0123456789abcdef")],
            "THRESHOLD_WEBHOOK_SECRET is set without THRESHOLD_ALERT_URL or THRESHOLD_EVENTS_URL: there is nothing to sign",
        ),
        (
            vec![hook, ("THRESHOLD_WEBHOOK_SECRET", "short")],
            "THRESHOLD_WEBHOOK_SECRET is shorter than 16 bytes, or not base64 after whsec_: generate one with `echo whsec_$(openssl rand -base64 32)`",
        ),
        (
            vec![hook, ("THRESHOLD_WEBHOOK_SECRET", "whsec_CANARY-CANARY-CANARY")],
            "THRESHOLD_WEBHOOK_SECRET is shorter than 16 bytes, or not base64 after whsec_: generate one with `echo whsec_$(openssl rand -base64 32)`",
        ),
        (
            vec![("THRESHOLD_RUNBOOKS_URL", "CANARY")],
            "THRESHOLD_RUNBOOKS_URL: expected https://HOST/PATH, to which /ip-blocks.md is added",
        ),
        (
            vec![("THRESHOLD_EVENTS_URL", "http://127.0.0.1:1/"), ("THRESHOLD_EVENTS_TOKEN", "CAN\u{e9}RY")],
            "THRESHOLD_EVENTS_TOKEN has a character that a header cannot have",
        ),
    ] {
        assert_eq!(all(&variables, Reach::Private), Err(expect.to_owned()));
    }
    assert_eq!("jsonl:a/b".parse(), Ok(Lines::File("a/b".into())));
    assert_eq!("stdout".parse(), Ok(Lines::Stdout));
    assert!("jsonl:".parse::<Lines>().is_err() && "syslog".parse::<Lines>().is_err());
    let missing = settings(&[Lines::File("/no/such/folder/events".into())], Reach::Public, &[]).unwrap();
    assert!(missing.check_files().is_err() && Sinks::start(missing, str::to_owned).is_err());
    assert!(settings(&[Lines::File("events".into())], Reach::Public, &[]).unwrap().check_files().is_ok());
}
