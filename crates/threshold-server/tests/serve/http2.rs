//! Tests HTTP/2 on the HTTP door: by prior knowledge, over TLS, and with clients that misbehave.

use std::io::{BufRead as _, BufReader, Read as _, Write as _};
use std::net::{Ipv4Addr, SocketAddr, TcpStream};
use std::process::{Command, Stdio};
use std::time::Duration;

use rcgen::{CertifiedKey, generate_simple_self_signed};

use super::envoy::grpc_address;
use super::grpc_client::HEALTH;
use super::process::{PATIENCE, POLICY, Scratch, Server, Start};

const PREFACE: &[u8] = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n";
const DATA: u8 = 0;
pub(super) const HEADERS: u8 = 1;
const RST_STREAM: u8 = 3;
const SETTINGS: u8 = 4;
const PING: u8 = 6;
const GOAWAY: u8 = 7;
const WINDOW_UPDATE: u8 = 8;
const CONTINUATION: u8 = 9;
const ACK: u8 = 1;
pub(super) const END_STREAM: u8 = 1;
pub(super) const END_HEADERS: u8 = 4;

/// A connection on which frames are written by hand.
pub(super) struct Frames(pub(super) TcpStream);

/// A frame.
#[derive(Debug)]
pub(super) struct Frame {
    pub(super) kind: u8,
    pub(super) stream: u32,
    pub(super) payload: Vec<u8>,
}

impl Frames {
    /// Connects and sends the preface and these settings.
    pub(super) fn connect(server: &Server, settings: &[(u16, u32)]) -> Self {
        Self::over(server.stream(), settings)
    }

    pub(super) fn over(stream: TcpStream, settings: &[(u16, u32)]) -> Self {
        let mut frames = Self(stream);
        frames.0.write_all(PREFACE).unwrap();
        let settings =
            settings.iter().flat_map(|(name, value)| [&name.to_be_bytes()[..], &value.to_be_bytes()].concat());
        frames.send(SETTINGS, 0, 0, &settings.collect::<Vec<u8>>()).unwrap();
        frames
    }

    pub(super) fn send(&mut self, kind: u8, flags: u8, stream: u32, payload: &[u8]) -> std::io::Result<()> {
        self.0.write_all(&frame(kind, flags, stream, payload))
    }

    /// Reads the next frame, and answers a ping, as a client does that is alive. Returns `None` at the end of the connection.
    pub(super) fn read(&mut self) -> Option<Frame> {
        let mut head = [0; 9];
        self.0.read_exact(&mut head).ok()?;
        let [a, b, c, kind, flags, stream @ ..] = head;
        let mut payload = vec![0; u32::from_be_bytes([0, a, b, c]).try_into().unwrap()];
        self.0.read_exact(&mut payload).ok()?;
        if (kind, flags) == (PING, 0) {
            let _ = self.send(PING, ACK, 0, &payload);
        }
        Some(Frame { kind, stream: u32::from_be_bytes(stream), payload })
    }

    /// Reads until a frame of this kind, which must come.
    fn read_until(&mut self, kind: u8) -> Frame {
        std::iter::from_fn(|| self.read()).find(|frame| frame.kind == kind).unwrap_or_else(|| panic!("no frame {kind}"))
    }

    /// Reads to the end of the connection. Returns the error of the last GOAWAY.
    fn read_goaway(&mut self) -> Option<u32> {
        let frames = std::iter::from_fn(|| self.read()).filter(|frame| frame.kind == GOAWAY);
        frames.last().map(|frame| u32::from_be_bytes(frame.payload[4..8].try_into().unwrap()))
    }
}

fn frame(kind: u8, flags: u8, stream: u32, payload: &[u8]) -> Vec<u8> {
    let length = u32::try_from(payload.len()).unwrap().to_be_bytes();
    [&length[1..], &[kind, flags], &stream.to_be_bytes(), payload].concat()
}

/// Encodes header fields without compression.
pub(super) fn fields(fields: &[(&str, &str)]) -> Vec<u8> {
    let text = |text: &str| [&[u8::try_from(text.len()).unwrap()], text.as_bytes()].concat();
    fields.iter().flat_map(|(name, value)| [&[0][..], &text(name), &text(value)].concat()).collect()
}

fn request(path: &str) -> Vec<u8> {
    fields(&[(":method", "GET"), (":scheme", "http"), (":path", path), (":authority", "localhost")])
}

fn start(args: &[&str]) -> (Server, Scratch) {
    let policy = Scratch::file("policy.toml", POLICY);
    let server = Start { args, policy: Some(policy.path()), ..Start::default() }.server();
    (server, policy)
}

/// Checks that others are served as before.
fn check_serves(server: &Server) {
    assert_eq!(server.connect().post("/v1/check", r#"{"ip": "203.0.113.7"}"#).unwrap().status, 200);
    let mut other = Frames::connect(server, &[]);
    other.send(HEADERS, END_HEADERS | END_STREAM, 1, &request("/healthz")).unwrap();
    // The first field of the head is the status: 200 is an entry of HPACK's static table.
    assert_eq!(other.read_until(HEADERS).payload.first(), Some(&0x88));
}

/// Connects from the last of these addresses of this machine, which makes the client another peer.
pub(super) fn stream_from(last: u8, address: SocketAddr) -> TcpStream {
    connect_from(last, address, tokio::net::TcpSocket::new_v4().unwrap())
}

/// As `stream_from`; the client's side holds little of what it does not read.
pub(super) fn narrow_stream_from(last: u8, address: SocketAddr) -> TcpStream {
    let socket = tokio::net::TcpSocket::new_v4().unwrap();
    socket.set_recv_buffer_size(4_096).unwrap();
    connect_from(last, address, socket)
}

fn connect_from(last: u8, address: SocketAddr, socket: tokio::net::TcpSocket) -> TcpStream {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    let stream = runtime.block_on(async {
        socket.bind(SocketAddr::from((Ipv4Addr::new(127, 0, 0, last), 0))).unwrap();
        socket.connect(address).await.unwrap().into_std().unwrap()
    });
    stream.set_nonblocking(false).unwrap();
    stream.set_nodelay(true).unwrap();
    stream.set_read_timeout(Some(PATIENCE)).unwrap();
    stream
}

/// The head of a health check, which needs no token.
fn health() -> Vec<u8> {
    let grpc = [(":path", HEALTH), (":authority", "localhost"), ("content-type", "application/grpc")];
    [fields(&[(":method", "POST"), (":scheme", "http")]), fields(&grpc)].concat()
}

/// Sends a whole health check. Returns the head of its answer, or `None` at the end of the connection.
pub(super) fn check_health(frames: &mut Frames, stream: u32) -> Option<Vec<u8>> {
    frames.send(HEADERS, END_HEADERS, stream, &health()).ok()?;
    frames.send(DATA, END_STREAM, stream, &[0; 5]).ok()?;
    let answers = std::iter::from_fn(|| frames.read());
    answers.into_iter().find(|frame| (frame.kind, frame.stream) == (HEADERS, stream)).map(|frame| frame.payload)
}

fn curl(args: &[&str]) -> String {
    let output = Command::new("curl")
        .args(["-s", "--max-time", "60", "-w", " %{http_version} %{http_code}"])
        .args(args)
        .output();
    String::from_utf8(output.unwrap().stdout).unwrap()
}

/// Woken by: `Protocol::Http1` for every connection, and leaving out `h2` in the list of ALPN.
#[test]
fn both_versions_are_spoken_on_one_port_with_tls_and_without() {
    let (server, _policy) = start(&[]);
    let check = format!("{}/v1/check", server.place);
    let body = r#"{"ip": "203.0.113.7"}"#;
    assert!(curl(&["--http2-prior-knowledge", "-d", body, &check]).ends_with(" 2 200"));
    assert!(curl(&["--http1.1", "-d", body, &check]).ends_with(" 1.1 200"));
    // A list takes several frames.
    let list = format!("[{}]", vec![body; 900].join(","));
    let answer = curl(&["--http2-prior-knowledge", "-d", &list, &check]);
    assert!(answer.ends_with(" 2 200") && answer.matches("allowed").count() >= 900);
    // The name of another host is refused in HTTP/2 too. Without a body: a stream that is refused before its body has come is reset
    // after the answer (RFC 9113, section 8.1), and curl 7.88 then loses the answer now and then.
    let other = curl(&["--http2-prior-knowledge", "-H", "Host: evil.example", &check]);
    assert!(other.ends_with(" 2 403"), "{other}");

    let CertifiedKey { cert, signing_key } = generate_simple_self_signed(["localhost".to_owned()]).unwrap();
    let cert = Scratch::file("cert.pem", &cert.pem());
    let key = Scratch::file("key.pem", &signing_key.serialize_pem());
    let files = [cert.path(), key.path()].map(|path| path.to_str().unwrap().to_owned());
    let (server, _policy) = start(&["--tls-cert", &files[0], "--tls-key", &files[1]]);
    let check = format!("{}/v1/check", server.place);
    assert!(curl(&["-k", "-d", body, &check]).ends_with(" 2 200"));
    assert!(curl(&["-k", "--http1.1", "-d", body, &check]).ends_with(" 1.1 200"));
    assert!(curl(&["-k", "--no-alpn", "-d", body, &check]).ends_with(" 1.1 200"));
}

/// Woken by: `max_pending_accept_reset_streams(None)`.
#[test]
fn a_client_that_resets_its_requests_at_once_is_disconnected() {
    let (server, _policy) = start(&[]);
    let mut attacker = Frames::connect(&server, &[]);
    let resets: Vec<u8> = (0..2_000)
        .map(|n| 2 * n + 1)
        .flat_map(|stream| {
            let opened = frame(HEADERS, END_HEADERS | END_STREAM, stream, &request("/healthz"));
            [opened, frame(RST_STREAM, 0, stream, &8_u32.to_be_bytes())].concat()
        })
        .collect();
    // It may be closed before all of it is written.
    let _ = attacker.0.write_all(&resets);
    // ENHANCE_YOUR_CALM, unless the reset that closes the connection is faster than its reason.
    assert!(matches!(attacker.read_goaway(), Some(11) | None));
    check_serves(&server);
}

/// A proxy passes on what its clients do, and lets them through when its connection ends. Woken by: `ClientBounds::CLIENT` for `--grpc`.
#[test]
fn resets_and_large_fields_that_a_proxy_passes_on_do_not_end_its_connection() {
    let (server, _policy) = start(&["--grpc", "127.0.0.1:0"]);
    let mut proxy = Frames::over(TcpStream::connect(grpc_address(&server)).unwrap(), &[]);
    let resets = (0..500).map(|n| 2 * n + 1).flat_map(|stream| {
        let opened = frame(HEADERS, END_HEADERS, stream, &request("/grpc.health.v1.Health/Check"));
        [opened, frame(RST_STREAM, 0, stream, &8_u32.to_be_bytes())].concat()
    });
    proxy.0.write_all(&resets.collect::<Vec<u8>>()).unwrap();
    // More than a client may send, as HPACK counts.
    let large = fields(&[("x-more", &"x".repeat(126))]).repeat(100);
    proxy.send(HEADERS, END_STREAM, 1_001, &request("/grpc.health.v1.Health/Check")).unwrap();
    proxy.send(CONTINUATION, END_HEADERS, 1_001, &large).unwrap();
    // 415: it is no gRPC, but it was read. A connection that has ended has no answer.
    let answer = std::iter::from_fn(|| proxy.read()).find(|frame| frame.stream == 1_001).unwrap();
    assert_eq!(answer.kind, HEADERS);
    assert!(!answer.payload.starts_with(&[0x48, 0x83, 0x69, 0x90, 0xff]), "431: {answer:?}");
}

/// Woken by: a larger `max_header_list_size`, leaving out `MAX_HEADERS` in `ConnectionService::call`.
#[test]
fn headers_without_an_end_and_headers_that_are_too_large_are_refused() {
    let (server, _policy) = start(&[]);
    let mut attacker = Frames::connect(&server, &[]);
    attacker.send(HEADERS, END_STREAM, 1, &request("/healthz")).unwrap();
    let more = fields(&[("x-more", &"x".repeat(100))]).repeat(100);
    // 100 MB, if they were accepted.
    for _ in 0..10_000 {
        if attacker.send(CONTINUATION, 0, 1, &more).is_err() {
            break;
        }
    }
    assert_ne!(attacker.read_goaway(), Some(0));

    // Its end comes, but it is 20 KB.
    let mut large = Frames::connect(&server, &[]);
    large.send(HEADERS, END_STREAM, 1, &request("/healthz")).unwrap();
    large.send(CONTINUATION, 0, 1, &more).unwrap();
    large.send(CONTINUATION, END_HEADERS, 1, &more).unwrap();
    let refused = std::iter::from_fn(|| large.read()).find(|frame| frame.stream == 1).unwrap();
    // The status is 431, which is no entry of the table, in Huffman's code.
    assert!(refused.kind == HEADERS && refused.payload.starts_with(&[0x48, 0x83, 0x69, 0x90, 0xff]), "{refused:?}");
    // As many small fields as HTTP/1.1 has no room for.
    for (count, status) in [(100, &[0x88][..]), (101, &[0x48, 0x83, 0x69, 0x90, 0xff])] {
        let mut many = Frames::connect(&server, &[]);
        let head = [request("/healthz"), fields(&[("x", "y")]).repeat(count)].concat();
        many.send(HEADERS, END_HEADERS | END_STREAM, 1, &head).unwrap();
        assert!(many.read_until(HEADERS).payload.starts_with(status), "{count}");
    }
    check_serves(&server);
}

/// Woken by: leaving out `max_concurrent_streams`.
#[test]
fn a_connection_has_a_bound_on_requests_at_once() {
    let (server, _policy) = start(&[]);
    let mut client = Frames::connect(&server, &[]);
    let settings = client.read_until(SETTINGS).payload;
    let setting = |name: u16| {
        let found = settings.chunks(6).find(|setting| setting[..2] == name.to_be_bytes());
        found.map(|setting| u32::from_be_bytes(setting[2..].try_into().unwrap()))
    };
    // Streams, the size of a head; a larger frame is not announced.
    assert_eq!((setting(3), setting(6)), (Some(256), Some(16_384)));
    assert!(setting(5).is_none_or(|frame| frame == 16_384));
    // Requests whose bodies never come: those above the bound are refused, and the others stay.
    for n in 0..300_u32 {
        let post =
            fields(&[(":method", "POST"), (":scheme", "http"), (":path", "/v1/check"), (":authority", "localhost")]);
        client.send(HEADERS, END_HEADERS, 2 * n + 1, &post).unwrap();
    }
    let refused = client.read_until(RST_STREAM);
    // REFUSED_STREAM: nothing was done, and it may be sent again.
    assert!(refused.stream > 2 * 256 && refused.payload == 7_u32.to_be_bytes(), "{refused:?}");
    check_serves(&server);
}

/// One connection could once use up the requests of `--grpc`, without a token: 256 calls whose messages never came.
///
/// Woken by: leaving out `of_peer` or `all` in `refusal`, one count for all peers in `PeerConnections::admit`.
#[test]
fn a_peer_has_at_most_its_share_of_the_requests() {
    let (server, _policy) = start(&["--grpc", "127.0.0.1:0"]);
    let address = grpc_address(&server);
    // More than 1,024 in all, so that each place is taken although the health checks below take one at times.
    let held: Vec<Frames> = (0..5)
        .map(|_| {
            let mut connection = Frames::over(stream_from(1, address), &[]);
            let calls: Vec<u8> = (0..256).flat_map(|n| frame(HEADERS, END_HEADERS, 2 * n + 1, &health())).collect();
            connection.0.write_all(&calls).unwrap();
            connection
        })
        .collect();
    let mut more = Frames::over(stream_from(1, address), &[]);
    // The status is 503, which is no entry of the table, in Huffman's code.
    let refused = (0..500).any(|n| {
        let head = check_health(&mut more, 2 * n + 1).unwrap();
        std::thread::sleep(Duration::from_millis(2));
        head.starts_with(&[0x48, 0x83, 0x6c, 0x0c, 0xff])
    });
    assert!(refused);
    assert!(server.wait_for_log("request refused").contains("too many requests of this client"));
    let other = check_health(&mut Frames::over(stream_from(2, address), &[]), 1);
    assert_eq!(other.unwrap().first(), Some(&0x88));
    drop(held);
}

/// Woken by: as many connections for a peer of `--grpc` as there are.
#[test]
fn a_peer_has_at_most_its_share_of_the_connections_to_grpc() {
    let (server, _policy) = start(&["--grpc", "127.0.0.1:0", "--max-connections", "8"]);
    let address = grpc_address(&server);
    let mut held = [(); 2].map(|()| Frames::over(stream_from(1, address), &[]));
    for connection in &mut held {
        assert_eq!(check_health(connection, 1).unwrap().first(), Some(&0x88));
    }
    let mut more = stream_from(1, address);
    assert!(!more.read(&mut [0]).is_ok_and(|read| read > 0));
    assert!(server.wait_for_log("connection closed").contains("max=2"));
    let other = check_health(&mut Frames::over(stream_from(2, address), &[]), 1);
    assert_eq!(other.unwrap().first(), Some(&0x88));
}

/// Answers that were not read once stayed for as long as others on their connection were.
///
/// Woken by: `Waits::ForServer` in `offered`.
#[test]
fn a_request_whose_answer_is_not_read_is_reset_while_others_are_served() {
    let (server, _policy) = start(&["--client-timeout", "1s"]);
    // A window of 0, so that an answer waits until the client asks for it.
    let mut client = Frames::connect(&server, &[(4, 0)]);
    client.send(HEADERS, END_HEADERS | END_STREAM, 1, &request("/healthz")).unwrap();
    for stream in (3..).step_by(2).take(1_000) {
        client.send(HEADERS, END_HEADERS | END_STREAM, stream, &request("/healthz")).unwrap();
        client.send(WINDOW_UPDATE, 0, stream, &4_096_u32.to_be_bytes()).unwrap();
        loop {
            let frame = client.read().expect("the connection stays");
            match (frame.kind, frame.stream) {
                // CANCEL.
                (RST_STREAM, 1) => return assert_eq!(frame.payload, 8_u32.to_be_bytes()),
                (DATA, read) if read == stream => break,
                _ => {}
            }
        }
        std::thread::sleep(Duration::from_millis(20));
    }
    panic!("the answer is still there");
}

/// Woken by: leaving out `is_idle`, `stalled::offered`, or the timeout of `Reread::detect`.
#[test]
fn clients_that_send_nothing_or_read_nothing_are_disconnected() {
    let (server, _policy) = start(&["--client-timeout", "1s"]);
    // Not even its preface.
    let mut silent = server.stream();
    silent.write_all(&PREFACE[..5]).unwrap();
    assert_eq!(silent.read(&mut [0]).unwrap(), 0);
    // No request. It is told before it is disconnected.
    assert_eq!(Frames::connect(&server, &[]).read_goaway(), Some(0));
    // A window of 0: the answer is ready, and cannot be sent.
    let mut unread = Frames::connect(&server, &[(4, 0)]);
    unread.send(HEADERS, END_HEADERS | END_STREAM, 1, &request("/healthz")).unwrap();
    assert_eq!(unread.read_until(HEADERS).stream, 1);
    while let Some(frame) = unread.read() {
        assert_ne!(frame.kind, DATA);
    }
    check_serves(&server);
}

/// Woken by: leaving out `graceful_shutdown` at the stop, or dropping the watcher early.
#[test]
fn a_server_that_stops_tells_its_clients_and_finishes_their_requests() {
    let (server, _policy) = start(&[]);
    let mut idle = Frames::connect(&server, &[]);
    idle.send(PING, 0, 0, &[7; 8]).unwrap();
    idle.read_until(PING);
    let mut busy = Frames::connect(&server, &[]);
    // Its body comes after the signal.
    let post = [(":method", "POST"), (":scheme", "http"), (":path", "/v1/check"), (":authority", "localhost")];
    busy.send(HEADERS, END_HEADERS, 1, &fields(&post)).unwrap();
    busy.send(PING, 0, 0, &[7; 8]).unwrap();
    busy.read_until(PING);
    server.signal("TERM");
    assert_eq!(idle.read_goaway(), Some(0));
    busy.read_until(GOAWAY);
    busy.send(DATA, END_STREAM, 1, br#"{"ip": "203.0.113.7"}"#).unwrap();
    assert_eq!(busy.read_until(HEADERS).payload.first(), Some(&0x88));
    drop(busy);
    let (status, log) = server.wait();
    assert!(status.success() && log.contains("stopped") && !log.contains("in progress"), "{log}");
}

/// Woken by: any protocol but HTTP/2 on `--grpc`, leaving out `refuse_http1` or `begins_a_request`.
#[test]
fn a_listener_for_grpc_speaks_nothing_else_and_says_so() {
    let (server, _policy) = start(&["--grpc", "127.0.0.1:0"]);
    let address = grpc_address(&server);
    let mut stream = TcpStream::connect(address).unwrap();
    stream.write_all(b"GET /healthz HTTP/1.1\r\nhost: localhost\r\n\r\n").unwrap();
    let mut answer = Vec::new();
    let _ = stream.read_to_end(&mut answer);
    let answer = String::from_utf8(answer).unwrap();
    assert!(answer.starts_with("HTTP/1.1 400 ") && answer.contains("speaks gRPC"), "{answer}");
    assert!(server.wait_for_log("request refused").contains("--grpc"));
    // What is no text gets no answer.
    let mut stream = TcpStream::connect(address).unwrap();
    stream.write_all(&[0x16, 3, 1]).unwrap();
    assert_eq!(stream.read(&mut [0; 8]).unwrap_or(0), 0);
}

/// Woken by: an error where the default address is in use, or none where an address is that was asked for.
#[test]
fn an_address_that_was_asked_for_must_be_free() {
    let taken = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let address = taken.local_addr().unwrap().to_string();
    let refused = Start { args: &["--grpc", &address], ..Start::default() }.command().output().unwrap();
    assert_eq!(refused.status.code(), Some(2));
    assert!(String::from_utf8(refused.stderr).unwrap().contains("cannot listen on"));
    // In use by this test, or by another program.
    let _default = std::net::TcpListener::bind("127.0.0.1:8081");
    let mut child = Command::new(env!("CARGO_BIN_EXE_threshold"))
        .args(["serve", "--no-db", "--no-resp", "--http", "127.0.0.1:0"])
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    let out = BufReader::new(child.stdout.take().unwrap());
    let banner: Vec<String> = out.lines().map_while(Result::ok).take_while(|line| !line.contains("tokens")).collect();
    // Before it is killed: its log is written by a thread of its own.
    let errors = BufReader::new(child.stderr.take().unwrap()).lines().map_while(Result::ok);
    let log: String = errors.take_while(|line| !line.contains("listening")).collect();
    let _ = child.kill();
    let _ = child.wait();
    assert!(log.contains("no gRPC (--grpc ADDR") && log.contains("127.0.0.1:8081"), "{log}");
    assert!(!banner.is_empty() && banner.iter().all(|line| !line.contains("grpc")), "{banner:?}");
    let open = Start { args: &["--grpc", "0.0.0.0:0"], ..Start::default() }.command().output().unwrap();
    assert!(String::from_utf8(open.stderr).unwrap().contains("THRESHOLD_TOKEN is not set"));
}
