//! A gRPC client over one connection of HTTP/2, which also sends what is no gRPC.

use std::io;
use std::net::SocketAddr;
use std::path::Path;
use std::sync::Arc;

use bytes::Bytes;
use http::{HeaderMap, Request, Response};
use http_body_util::{BodyExt as _, Full};
use hyper::body::Incoming;
use hyper::client::conn::http2::{SendRequest, handshake};
use hyper_util::rt::{TokioExecutor, TokioIo};
use prost::Message;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::{TcpStream, UnixStream};
use tokio::runtime::Runtime;
use tokio_rustls::TlsConnector;
use tokio_rustls::rustls::crypto::ring;
use tokio_rustls::rustls::pki_types::{CertificateDer, ServerName};
use tokio_rustls::rustls::{ClientConfig, RootCertStore};

pub(crate) const RATE_LIMIT: &str = "/envoy.service.ratelimit.v3.RateLimitService/ShouldRateLimit";
pub(crate) const AUTHORIZATION_CHECK: &str = "/envoy.service.auth.v3.Authorization/Check";
pub(crate) const HEALTH: &str = "/grpc.health.v1.Health/Check";

/// One connection.
pub(crate) struct GrpcClient {
    runtime: Runtime,
    sender: SendRequest<Full<Bytes>>,
    /// The name that it calls the server by.
    pub(crate) authority: &'static str,
    /// Metadata of every call.
    pub(crate) metadata: Vec<(&'static str, String)>,
}

/// The status of a call that failed, and its message.
pub(crate) type Failed = (u16, String);

impl GrpcClient {
    pub(crate) fn connect(address: SocketAddr) -> Self {
        Self::over(TcpStream::connect(address)).unwrap()
    }

    /// Connects to a socket of this machine.
    pub(crate) fn connect_unix(path: &Path) -> Self {
        Self::over(UnixStream::connect(path)).unwrap()
    }

    /// Connects over TLS as a client that trusts only this certificate, and asks for this protocol (ALPN).
    pub(crate) fn connect_tls(address: SocketAddr, cert: &CertificateDer<'static>, protocol: &str) -> io::Result<Self> {
        let mut roots = RootCertStore::empty();
        roots.add(cert.clone()).unwrap();
        let mut config = ClientConfig::builder_with_provider(Arc::new(ring::default_provider()))
            .with_safe_default_protocol_versions()
            .unwrap()
            .with_root_certificates(roots)
            .with_no_client_auth();
        config.alpn_protocols = vec![protocol.as_bytes().to_vec()];
        Self::over(async {
            let stream = TcpStream::connect(address).await?;
            let name = ServerName::try_from("localhost").unwrap();
            let stream = TlsConnector::from(Arc::new(config)).connect(name, stream).await?;
            assert_eq!(stream.get_ref().1.alpn_protocol(), Some(protocol.as_bytes()));
            Ok(stream)
        })
    }

    fn over<S: AsyncRead + AsyncWrite + Send + Unpin + 'static>(
        stream: impl Future<Output = io::Result<S>>,
    ) -> io::Result<Self> {
        let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build().unwrap();
        let sender = runtime.block_on(async {
            let (sender, connection) = handshake(TokioExecutor::new(), TokioIo::new(stream.await?)).await.unwrap();
            tokio::spawn(connection);
            io::Result::Ok(sender)
        })?;
        Ok(Self { runtime, sender, authority: "threshold.test", metadata: Vec::new() })
    }

    /// Calls a method with a message.
    pub(crate) fn call<A: Message + Default>(&mut self, path: &str, message: &impl Message) -> Result<A, Failed> {
        let message = message.encode_to_vec();
        let length = u32::try_from(message.len()).unwrap().to_be_bytes();
        self.call_bytes(path, [&[0], &length[..], &message].concat()).map(|bytes| A::decode(&bytes[..]).unwrap())
    }

    /// Calls a method with bytes in place of a message and its prefix. Returns the message of the answer.
    pub(crate) fn call_bytes(&mut self, path: &str, body: Vec<u8>) -> Result<Bytes, Failed> {
        let (response, trailers, body) =
            self.send(path, &[("content-type", "application/grpc"), ("te", "trailers")], body);
        assert_eq!(response.status(), 200, "{response:?} {body:?}");
        // An error has its trailers in its head.
        let fields = trailers.as_ref().filter(|trailers| !trailers.is_empty()).unwrap_or(response.headers());
        let text = |name: &str| fields.get(name).map(|value| value.to_str().unwrap().to_owned());
        match text("grpc-status").unwrap().as_str() {
            "0" => Ok(body.slice(5..)),
            status => Err((status.parse().unwrap(), text("grpc-message").unwrap_or_default())),
        }
    }

    /// Posts a body, and returns the head, the trailers and the body of the response.
    pub(crate) fn send(
        &mut self,
        path: &str,
        fields: &[(&str, &str)],
        body: Vec<u8>,
    ) -> (Response<()>, Option<HeaderMap>, Bytes) {
        let own = self.metadata.iter().map(|(name, value)| (*name, value.as_str()));
        let request = Request::post(format!("http://{}{path}", self.authority));
        let request =
            own.chain(fields.iter().copied()).fold(request, |request, (name, value)| request.header(name, value));
        let request = request.body(Full::from(body)).unwrap();
        let Self { runtime, sender, .. } = self;
        runtime.block_on(async {
            sender.ready().await.unwrap();
            let response: Response<Incoming> = sender.send_request(request).await.unwrap();
            let (parts, body) = response.into_parts();
            let body = body.collect().await.unwrap();
            (Response::from_parts(parts, ()), body.trailers().cloned(), body.to_bytes())
        })
    }
}
