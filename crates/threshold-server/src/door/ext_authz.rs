//! Envoy's external authorization over gRPC: the request that Envoy describes goes through the gate of forward auth.

use std::net::{IpAddr, SocketAddr};
use std::str::FromStr as _;

use axum::body::Body;
use axum::response::{IntoResponse as _, Response};
use http::header::{CONTENT_LENGTH, CONTENT_TYPE, HOST};
use http::{HeaderMap, HeaderName, HeaderValue, Method, StatusCode};
use http_body_util::{BodyExt as _, Collected};
use threshold_limiter::tower::Unavailable;

use super::forward_auth::{self, DeclaredBody};
use super::grpc::GrpcError;
use super::grpc::proto::{
    self, AppendAction, CheckRequest, CheckResponse, DeniedHttpResponse, HeaderValueOption, HttpRequest, HttpResponse,
    HttpStatus, OkHttpResponse, Status,
};
use super::{ApiError, App};

/// The request header by which Envoy's fault filter delays a request, in milliseconds.
pub(super) const DELAY: HeaderName = HeaderName::from_static("x-envoy-fault-delay-request");
/// The request header by which that filter delays fewer requests than it is configured to.
const DELAY_PERCENTAGE: HeaderName = HeaderName::from_static("x-envoy-fault-delay-request-percentage");

/// The codes of `google.rpc.Status`.
const OK: i32 = 0;
const PERMISSION_DENIED: i32 = 7;
const UNAVAILABLE: i32 = 14;

/// Decides the request that Envoy describes.
pub(super) async fn check(app: &App, proxy: SocketAddr, asked: CheckRequest) -> Result<CheckResponse, GrpcError> {
    let attributes = asked.attributes.unwrap_or_default();
    let http = attributes.request.and_then(|request| request.http);
    let http = http.ok_or_else(|| GrpcError::invalid("attributes.request.http: there is no request to decide"))?;
    let source = attributes.source.and_then(|source| source.address?.socket_address);
    // Without an address the client is on Envoy's machine, or Envoy itself.
    let peer = source.and_then(|source| {
        let port = u16::try_from(source.port_value).unwrap_or(0);
        Some(SocketAddr::new(IpAddr::from_str(&source.address).ok()?.to_canonical(), port))
    });
    let request = match request(http) {
        Ok(request) => request,
        Err(reason) => return Ok(refuse(app, reason).await),
    };
    let mut gate = app.forward_auth.envoy_gate();
    let Ok(response) = gate.call_through(proxy, peer.unwrap_or(proxy), request).await;
    Ok(answer(response.map(Body::new)).await)
}

/// Denies a request whose client has sent what cannot be decided. It is no error of the call, which Envoy may let through.
pub(super) async fn refuse(app: &App, reason: &'static str) -> CheckResponse {
    if let Some(left_out) = app.refused.sample(app.desk.now()) {
        tracing::warn!(reason, left_out, "request of Envoy's client refused");
    }
    answer(ApiError::bad(reason, "Envoy's client sent what cannot be decided").into_response()).await
}

/// Rebuilds the client's request. Envoy tells the path as the client has spelled it.
///
/// # Errors
/// Returns the name of what is no part of a request.
fn request(http: HttpRequest) -> Result<http::Request<DeclaredBody>, &'static str> {
    let method = Method::from_bytes(http.method.as_bytes()).map_err(|_| "method")?;
    // `CONNECT` has none.
    let path = if http.path.is_empty() { "/" } else { &http.path };
    let (_, uri) = forward_auth::original_uri(path.as_bytes()).map_err(|_| "path")?;
    let mut request = http::Request::new(DeclaredBody(0));
    (*request.method_mut(), *request.uri_mut()) = (method, uri);
    let headers = request.headers_mut();
    let lines = http.headers.into_iter().map(|(name, value)| (name, value.into_bytes()));
    // With `encode_raw_headers` these are in place of the others.
    let raw = http.header_map.into_iter().flat_map(|map| map.headers);
    let raw =
        raw.map(|line| (line.key, if line.raw_value.is_empty() { line.value.into_bytes() } else { line.raw_value }));
    for (name, value) in lines.chain(raw) {
        // Pseudo-headers such as `:path` are no names. What was told of them stands above.
        if let (Ok(name), Ok(value)) = (HeaderName::try_from(name), HeaderValue::try_from(value)) {
            headers.append(name, value);
        }
    }
    // `size` is what has arrived so far: nothing, unless Envoy waits for the body. The client announces the rest.
    let announced = headers.get(CONTENT_LENGTH).and_then(|length| length.to_str().ok()?.parse().ok()).unwrap_or(0);
    let length = u64::try_from(http.size).unwrap_or(0).max(announced);
    // Envoy's own value: it is the one that the request is routed by.
    headers.remove(HOST);
    if !http.host.is_empty() {
        headers.insert(HOST, HeaderValue::try_from(http.host).map_err(|_| "host")?);
    }
    // A denial of a gRPC request would be a 200 with a status in its trailers, and Envoy makes that itself.
    headers.remove(CONTENT_TYPE);
    *request.body_mut() = DeclaredBody(length);
    Ok(request)
}

async fn answer(response: Response) -> CheckResponse {
    let (mut parts, body) = response.into_parts();
    let delay = parts.headers.remove(&DELAY);
    if parts.status == StatusCode::OK {
        let ok = OkHttpResponse {
            headers: delay.iter().map(|delay| option(&DELAY, delay)).collect(),
            // A client that sends a field itself would choose its own delay, or that it is not delayed.
            headers_to_remove: vec![(if delay.is_none() { DELAY } else { DELAY_PERCENTAGE }).to_string()],
            response_headers_to_add: options(&parts.headers),
        };
        return CheckResponse { status: status(OK, ""), http_response: Some(HttpResponse::Ok(ok)) };
    }
    // The body of a refusal is ready, and cannot fail.
    let text = body.collect().await.map(Collected::to_bytes).unwrap_or_default();
    let denied = DeniedHttpResponse {
        status: Some(HttpStatus { code: i32::from(parts.status.as_u16()) }),
        headers: options(&parts.headers),
        body: String::from_utf8_lossy(&text).into_owned(),
    };
    // An error and not a denial, so that Envoy's `failure_mode_allow` decides.
    if parts.extensions.get::<Unavailable>().is_some() {
        let status = status(UNAVAILABLE, "the limiter is degraded");
        return CheckResponse { status, http_response: Some(HttpResponse::Error(denied)) };
    }
    CheckResponse { status: status(PERMISSION_DENIED, "denied"), http_response: Some(HttpResponse::Denied(denied)) }
}

fn status(code: i32, message: &str) -> Option<Status> {
    Some(Status { code, message: message.to_owned() })
}

fn options(headers: &HeaderMap) -> Vec<HeaderValueOption> {
    headers.iter().map(|(name, value)| option(name, value)).collect()
}

fn option(name: &HeaderName, value: &HeaderValue) -> HeaderValueOption {
    let value = String::from_utf8_lossy(value.as_bytes()).into_owned();
    let header = proto::HeaderValue { key: name.as_str().to_owned(), value, raw_value: Vec::new() };
    // Cookies stand beside those of the upstream. Of any other field, this server's is the one that counts.
    let action =
        if *name == http::header::SET_COOKIE { AppendAction::AppendOrAdd } else { AppendAction::OverwriteOrAdd };
    HeaderValueOption { header: Some(header), append_action: action.into() }
}
