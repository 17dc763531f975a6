//! The server's API, called from a terminal on the same machine, or through a tunnel.

use std::time::Duration;

use anyhow::{Context as _, bail};
use bytes::Bytes;
use http::header::{AUTHORIZATION, CONTENT_TYPE, HOST};
use http::{Request, StatusCode};
use http_body_util::{BodyExt as _, Full, Limited};
use hyper::client::conn::http1;
use hyper_util::rt::TokioIo;
use serde_json::Value;
use threshold_core::text::printable;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::{TcpStream, UnixStream};

use crate::cli::ServerArgs;

/// How long the server may take. A change waits for the disk for five seconds.
const PATIENCE: Duration = Duration::from_secs(10);
/// The longest answer that is read: a page of ten thousand bans is a third of it.
const MOST: usize = 64 << 20;

/// A server, and the token to show it.
pub(super) struct Api {
    server: String,
    token: Option<String>,
}

/// Nobody answers at that address.
#[derive(Debug)]
pub(super) struct Unreachable(String);

impl std::fmt::Display for Unreachable {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "no server answers at {}", self.0)
    }
}

impl std::error::Error for Unreachable {}

impl Api {
    pub(super) fn new(args: &ServerArgs) -> Self {
        let variable = |name: &str| std::env::var(name).ok().filter(|text| !text.trim().is_empty());
        let server = args.server.clone().or_else(|| variable("THRESHOLD_SERVER"));
        let tokens = variable("THRESHOLD_ADMIN_TOKEN").or_else(|| variable("THRESHOLD_READ_TOKEN"));
        let first = |tokens: String| tokens.split([',', ' ']).find(|token| !token.is_empty()).map(str::to_owned);
        let server = server.unwrap_or_else(|| "http://127.0.0.1:8080".to_owned());
        Self { server: server.trim_end_matches('/').to_owned(), token: tokens.and_then(first) }
    }

    /// Calls, and returns what the server answers; an error of its own is one here.
    pub(super) fn call(&self, method: &str, path: &str, body: Option<&Value>) -> anyhow::Result<Value> {
        let mut request = Request::builder().method(method).uri(path).header(HOST, "localhost");
        if let Some(token) = &self.token {
            request = request.header(AUTHORIZATION, format!("Bearer {token}"));
        }
        let body = body.map(Value::to_string).unwrap_or_default();
        let request = request.header(CONTENT_TYPE, "application/json").body(Full::from(body))?;
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
        let answered = runtime.block_on(async { tokio::time::timeout(PATIENCE, self.send(request)).await });
        let (status, body) = answered.with_context(|| format!("{} does not answer", self.server))??;
        let answer: Value = serde_json::from_slice(&body).context("the server's answer is no JSON")?;
        if !status.is_success() {
            let message = match answer.get("message").and_then(Value::as_str) {
                _ if status == StatusCode::UNAUTHORIZED => {
                    let shown = if self.token.is_some() { "does not know this token" } else { "wants a token" };
                    format!("{} {shown}: set THRESHOLD_ADMIN_TOKEN, or THRESHOLD_READ_TOKEN for looking", self.server)
                }
                Some(message) => printable(message).into_owned(),
                None => "the server refused".to_owned(),
            };
            bail!("{message} ({status})");
        }
        Ok(answer)
    }

    async fn send(&self, request: Request<Full<Bytes>>) -> anyhow::Result<(StatusCode, Bytes)> {
        let unreachable = |_| Unreachable(self.server.clone());
        if let Some(path) = self.server.strip_prefix("unix:") {
            return exchange(UnixStream::connect(path).await.map_err(unreachable)?, request).await;
        }
        let Some(authority) = self.server.strip_prefix("http://") else {
            bail!(
                "write http://HOST:PORT or unix:PATH, not \"{}\"; tokens go to other machines in a tunnel",
                self.server
            );
        };
        let address = if authority.contains(':') { authority.to_owned() } else { format!("{authority}:80") };
        exchange(TcpStream::connect(address).await.map_err(unreachable)?, request).await
    }
}

async fn exchange<S>(stream: S, request: Request<Full<Bytes>>) -> anyhow::Result<(StatusCode, Bytes)>
where
    S: AsyncRead + AsyncWrite + Unpin + Send + 'static,
{
    let (mut sender, connection) = http1::handshake(TokioIo::new(stream)).await?;
    tokio::spawn(connection);
    let (head, body) = sender.send_request(request).await?.into_parts();
    let body = Limited::new(body, MOST).collect().await.map_err(|error| anyhow::anyhow!("the answer: {error}"))?;
    Ok((head.status, body.to_bytes()))
}
