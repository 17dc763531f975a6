//! A client of the server's API, over plain HTTP to this machine or a tunnel, or over a Unix socket.

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

/// How long to wait for an answer: twice the five seconds that a change waits for the disk.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(10);
/// The longest answer that is read: three times a page of 10,000 bans with the longest reasons.
const MAX_ANSWER: usize = 64 << 20;

/// A server, and the token to send to it.
pub(super) struct Api {
    server: String,
    token: Option<String>,
}

/// The error of a server that cannot be connected to.
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

    /// Calls the server and returns its answer. A status other than success is an error with the server's message.
    pub(super) fn call(&self, method: &str, path: &str, body: Option<&Value>) -> anyhow::Result<Value> {
        let mut request = Request::builder().method(method).uri(path).header(HOST, "localhost");
        if let Some(token) = &self.token {
            request = request.header(AUTHORIZATION, format!("Bearer {token}"));
        }
        let body = body.map(Value::to_string).unwrap_or_default();
        let request = request.header(CONTENT_TYPE, "application/json").body(Full::from(body))?;
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
        let answered = runtime.block_on(async { tokio::time::timeout(ANSWER_TIMEOUT, self.send(request)).await });
        let (status, body) = answered.with_context(|| format!("{} does not answer", self.server))??;
        let answer: Value = serde_json::from_slice(&body).context("the server's answer is not JSON")?;
        if !status.is_success() {
            let message = match answer.get("message").and_then(Value::as_str) {
                _ if status == StatusCode::UNAUTHORIZED => {
                    let problem = if self.token.is_some() { "does not accept this token" } else { "requires a token" };
                    format!("{} {problem}: set THRESHOLD_ADMIN_TOKEN, or THRESHOLD_READ_TOKEN to read", self.server)
                }
                Some(message) => printable(message).into_owned(),
                None => "the server refused the request".to_owned(),
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
                "\"{}\" is not a server: expected http://HOST:PORT or unix:PATH; use a tunnel to reach another machine, so \
                 that the token is encrypted",
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
    let body = Limited::new(body, MAX_ANSWER).collect().await;
    let body = body.map_err(|error| anyhow::anyhow!("cannot read the server's answer: {error}"))?;
    Ok((head.status, body.to_bytes()))
}
