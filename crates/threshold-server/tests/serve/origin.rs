//! An application behind a proxy: it answers with the request line it received, and echoes WebSocket messages.

use std::io::{BufRead as _, BufReader, Read as _, Write as _};
use std::net::{Ipv4Addr, SocketAddr, TcpListener, TcpStream};
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;

/// A server in this process that ends with its test.
pub(crate) struct Origin {
    address: SocketAddr,
    shared: Arc<Shared>,
    accepting: Option<JoinHandle<()>>,
}

#[derive(Default)]
struct Shared {
    stopped: AtomicBool,
    seen: AtomicU32,
    /// The head of the last request.
    head: Mutex<String>,
}

impl Origin {
    pub(crate) fn start() -> Self {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
        let address = listener.local_addr().unwrap();
        let shared = Arc::new(Shared::default());
        let own = Arc::clone(&shared);
        let accepting = std::thread::spawn(move || {
            for stream in listener.incoming().map_while(Result::ok) {
                if own.stopped.load(Ordering::SeqCst) {
                    break;
                }
                let own = Arc::clone(&own);
                // The thread ends when the proxy closes the connection.
                std::thread::spawn(move || while serve(&stream, &own).is_ok() {});
            }
        });
        Self { address, shared, accepting: Some(accepting) }
    }

    pub(crate) fn address(&self) -> SocketAddr {
        self.address
    }

    /// Returns the head of the last request, in lower case.
    pub(crate) fn head(&self) -> String {
        self.shared.head.lock().unwrap().clone()
    }

    /// Returns the number of requests so far.
    pub(crate) fn seen(&self) -> u32 {
        self.shared.seen.load(Ordering::SeqCst)
    }
}

impl Drop for Origin {
    fn drop(&mut self) {
        self.shared.stopped.store(true, Ordering::SeqCst);
        // Wakes the thread that accepts.
        let _ = TcpStream::connect(self.address);
        let _ = self.accepting.take().map(JoinHandle::join);
    }
}

/// Answers one request.
fn serve(stream: &TcpStream, shared: &Shared) -> std::io::Result<()> {
    let mut reader = BufReader::new(stream);
    let mut head = String::new();
    while !head.ends_with("\r\n\r\n") {
        if reader.read_line(&mut head)? == 0 {
            return Err(std::io::ErrorKind::UnexpectedEof.into());
        }
    }
    shared.seen.fetch_add(1, Ordering::SeqCst);
    let lower = head.to_ascii_lowercase();
    shared.head.lock().unwrap().clone_from(&lower);
    if lower.contains("upgrade: websocket") {
        { stream }
            .write_all(b"HTTP/1.1 101 Switching Protocols\r\nconnection: Upgrade\r\nupgrade: websocket\r\n\r\n")?;
        let mut line = String::new();
        reader.read_line(&mut line)?;
        { stream }.write_all(line.as_bytes())?;
        return Err(std::io::ErrorKind::ConnectionAborted.into());
    }
    let length = lower.lines().find_map(|line| line.strip_prefix("content-length: ")?.parse().ok());
    let mut body = vec![0; length.unwrap_or(0)];
    reader.read_exact(&mut body)?;
    let asked = head.lines().next().unwrap().trim_end_matches(" HTTP/1.1").trim_end_matches(" HTTP/1.0");
    let text = format!("{asked} {}", String::from_utf8_lossy(&body));
    { stream }.write_all(format!("HTTP/1.1 200 OK\r\ncontent-length: {}\r\n\r\n{text}", text.len()).as_bytes())
}

/// Connects from a given address: all of 127.0.0.0/8 is this machine.
pub(crate) fn connect_from(ip: [u8; 4], to: SocketAddr) -> TcpStream {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_io().build().unwrap();
    let stream = runtime.block_on(async {
        let socket = tokio::net::TcpSocket::new_v4().unwrap();
        socket.bind(SocketAddr::from((ip, 0))).unwrap();
        socket.connect(to).await.unwrap()
    });
    let stream = stream.into_std().unwrap();
    stream.set_nonblocking(false).unwrap();
    stream
}
