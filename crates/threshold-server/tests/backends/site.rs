//! An application behind nginx, with or without Threshold, and many connections of one client.

use std::io;
use std::net::{SocketAddr, TcpStream};
use std::sync::atomic::{AtomicUsize, Ordering};

use super::backend::{Backend, without_threshold};
use super::client::{Answer, Client};
use super::origin::connect_from;
use super::process::{PATIENCE, Scratch, Server};
use super::proxy::{Files, Kind, Proxy, Setup};
use super::spellings::Spelling;

/// The limit of logins in an hour.
pub(crate) const LIMIT: u64 = 5;

/// The client's address, which is not a trusted proxy.
const CLIENT: [u8; 4] = [127, 0, 0, 2];
/// The address of another client.
const OTHER: [u8; 4] = [127, 0, 0, 3];

/// The number of open connections.
const CONNECTIONS: usize = 8;

/// nginx in front of an application.
pub(crate) struct Site {
    proxy: Proxy,
    _threshold: Option<(Server, Scratch)>,
}

/// The result of a request.
#[derive(Debug, Clone)]
pub(crate) struct Ended {
    pub(crate) status: u16,
    /// Whether the login answered it.
    pub(crate) ran: bool,
}

impl Site {
    /// A site with Threshold: `LIMIT` requests an hour for paths that match this pattern.
    pub(crate) fn limited(backend: &Backend, pattern: &str, odd_paths: &str) -> Self {
        let (server, policy) = Server::with(&policy(pattern, odd_paths));
        let place = server.place.strip_prefix("http://").unwrap().to_owned();
        let origin = backend.address.to_string();
        let (kind, threshold, files) = (Kind::Nginx, place.as_str(), Files::Shipped);
        let proxy = Setup { kind, threshold, origin: &origin, files, edits: &[], rewrite: None }.start();
        Self { proxy, _threshold: Some((server, policy)) }
    }

    /// The same site without Threshold.
    pub(crate) fn unlimited(backend: &Backend) -> Self {
        let proxy = Proxy::edited("127.0.0.1:1", &backend.address.to_string(), &without_threshold);
        Self { proxy, _threshold: None }
    }

    /// Uses up the limit of logins, and checks that the next one is denied.
    pub(crate) fn spend(&self) {
        for _ in 0..LIMIT {
            let ended = self.ask(b"/api/login");
            assert!(ended.ran, "a login within the limit: {ended:?}");
        }
        let ended = self.ask(b"/api/login");
        assert!(!ended.ran && ended.status == 429, "a login beyond the limit: {ended:?}");
        let ended = self.ask(b"/other/page");
        assert_eq!(ended.status, 404, "a page that is not limited, and not there");
    }

    /// Logs in as another client within its limit, to show that the site does not deny everything.
    pub(crate) fn log_in_as_another(&self) {
        let ended = Sender::new(OTHER, self.proxy.address).send(b"/api/login");
        assert!(ended.ran, "another client's login: {ended:?}");
    }

    pub(crate) fn ask(&self, target: &[u8]) -> Ended {
        Sender::new(CLIENT, self.proxy.address).send(target)
    }

    /// Sends all spellings, and returns the results.
    pub(crate) fn ask_all(&self, spellings: &[Spelling]) -> Vec<Ended> {
        let (address, next) = (self.proxy.address, AtomicUsize::new(0));
        let work = || {
            let mut sender = Sender::new(CLIENT, address);
            let mine = std::iter::from_fn(|| {
                let at = next.fetch_add(1, Ordering::Relaxed);
                Some((at, spellings.get(at)?))
            });
            mine.map(|(at, spelling)| (at, sender.send(&spelling.target))).collect::<Vec<_>>()
        };
        let mut ended = std::thread::scope(|scope| {
            let workers: Vec<_> = (0..CONNECTIONS).map(|_| scope.spawn(work)).collect();
            workers.into_iter().flat_map(|worker| worker.join().unwrap()).collect::<Vec<_>>()
        });
        ended.sort_by_key(|(at, _)| *at);
        ended.into_iter().map(|(_, ended)| ended).collect()
    }
}

/// Sends to an application directly, without nginx.
pub(crate) fn ask_directly(backend: &Backend, target: &[u8]) -> Ended {
    Sender::new(CLIENT, backend.address).send(target)
}

fn policy(pattern: &str, odd_paths: &str) -> String {
    format!(
        r#"
[identity]
trusted_proxies = ["127.0.0.1/32"]
client_ip = "x-forwarded-for"
odd_paths = "{odd_paths}"

[[rule]]
name = "login"
layer = "endpoint"
per = ["ip"]
match = {{ path = "{pattern}" }}
limit = "{LIMIT}/h"
algorithm = "sliding-log"
"#
    )
}

/// A keep-alive connection.
struct Sender {
    from: [u8; 4],
    address: SocketAddr,
    client: Option<Client<TcpStream>>,
}

impl Sender {
    fn new(from: [u8; 4], address: SocketAddr) -> Self {
        Self { from, address, client: None }
    }

    /// Sends a request whose target is these bytes.
    fn send(&mut self, target: &[u8]) -> Ended {
        // A keep-alive connection may be closed just before it is used again: then a new one is opened.
        let kept = self.client.is_some();
        let answer = match self.try_send(target) {
            Err(_) if kept => self.try_send(target),
            other => other,
        };
        let answer = answer.unwrap_or_else(|error| panic!("{error}: no answer to {}", target.escape_ascii()));
        Ended { status: answer.status, ran: answer.header("x-login").is_some() }
    }

    fn try_send(&mut self, target: &[u8]) -> io::Result<Answer> {
        let mut client = self.client.take().unwrap_or_else(|| connect(self.from, self.address));
        let request = [b"POST ", target, b" HTTP/1.1\r\nhost: site\r\ncontent-length: 0\r\n\r\n"].concat();
        client.write_bytes(&request)?;
        let (answer, _) = client.read_bytes()?;
        if answer.header("connection") != Some("close") {
            self.client = Some(client);
        }
        Ok(answer)
    }
}

fn connect(from: [u8; 4], address: SocketAddr) -> Client<TcpStream> {
    let stream = connect_from(from, address);
    stream.set_read_timeout(Some(PATIENCE)).unwrap();
    stream.set_write_timeout(Some(PATIENCE)).unwrap();
    stream.set_nodelay(true).unwrap();
    Client::new(stream)
}
