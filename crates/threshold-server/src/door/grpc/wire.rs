//! gRPC over HTTP/2: one message in, one message or an error out.

use std::borrow::Cow;
use std::convert::Infallible;
use std::future::ready;
use std::io::Read as _;

use axum::body::Body;
use axum::response::Response;
use bytes::{Bytes, BytesMut};
use flate2::bufread::GzDecoder;
use http::header::CONTENT_TYPE;
use http::{HeaderMap, HeaderName, HeaderValue};
use http_body_util::{BodyExt as _, Full};
use percent_encoding::{AsciiSet, CONTROLS, utf8_percent_encode};
use prost::Message;

use crate::door::client_memory::{ClientMemory, MemoryPermit};
use crate::door::json_body::SMALL_BODY;

/// The bytes before a message: a flag that says whether it is compressed, and its length.
const PREFIX: usize = 5;
const STATUS: HeaderName = HeaderName::from_static("grpc-status");
const MESSAGE: HeaderName = HeaderName::from_static("grpc-message");
const ENCODING: HeaderName = HeaderName::from_static("grpc-encoding");
const ACCEPT_ENCODING: HeaderName = HeaderName::from_static("grpc-accept-encoding");
const GRPC: HeaderValue = HeaderValue::from_static("application/grpc");
/// What has to be encoded in a status message, besides what is not ASCII.
const ENCODED: &AsciiSet = &CONTROLS.add(b'%');

/// The codes of gRPC that this server answers with, besides 0 for success.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u8)]
pub(crate) enum GrpcCode {
    InvalidArgument = 3,
    DeadlineExceeded = 4,
    NotFound = 5,
    ResourceExhausted = 8,
    Unimplemented = 12,
    Internal = 13,
    Unavailable = 14,
    Unauthenticated = 16,
}

impl GrpcCode {
    /// All of them.
    pub(crate) const ALL: [Self; 8] = [
        Self::InvalidArgument,
        Self::DeadlineExceeded,
        Self::NotFound,
        Self::ResourceExhausted,
        Self::Unimplemented,
        Self::Internal,
        Self::Unavailable,
        Self::Unauthenticated,
    ];

    /// Returns the name in metrics and logs.
    pub(crate) const fn name(self) -> &'static str {
        match self {
            Self::InvalidArgument => "invalid_argument",
            Self::DeadlineExceeded => "deadline_exceeded",
            Self::NotFound => "not_found",
            Self::ResourceExhausted => "resource_exhausted",
            Self::Unimplemented => "unimplemented",
            Self::Internal => "internal",
            Self::Unavailable => "unavailable",
            Self::Unauthenticated => "unauthenticated",
        }
    }
}

/// An error of a call.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct GrpcError {
    pub(crate) code: GrpcCode,
    pub(crate) message: Cow<'static, str>,
}

impl GrpcError {
    pub(crate) fn new(code: GrpcCode, message: impl Into<Cow<'static, str>>) -> Self {
        Self { code, message: message.into() }
    }

    pub(crate) fn invalid(message: impl Into<Cow<'static, str>>) -> Self {
        Self::new(GrpcCode::InvalidArgument, message)
    }

    /// Makes the response, which has its trailers in its head.
    pub(super) fn into_response(self) -> Response {
        let mut response = Response::new(Body::empty());
        let headers = response.headers_mut();
        headers.insert(CONTENT_TYPE, GRPC);
        headers.insert(STATUS, HeaderValue::from(self.code as u16));
        // A client that has compressed its message otherwise learns how to send it.
        if self.code == GrpcCode::Unimplemented {
            headers.insert(ACCEPT_ENCODING, HeaderValue::from_static("identity,gzip"));
        }
        let message = utf8_percent_encode(&self.message, ENCODED).to_string();
        if let Ok(message) = HeaderValue::try_from(message) {
            headers.insert(MESSAGE, message);
        }
        response
    }
}

/// Reads the one message of a call with these fields, of at most `max` bytes, compressed or not. One that is not small holds memory
/// meanwhile.
pub(super) async fn read<B, M>(
    fields: &HeaderMap,
    mut body: B,
    max: usize,
    memory: &ClientMemory,
) -> Result<M, GrpcError>
where
    B: http_body::Body<Data = Bytes> + Unpin,
    M: Message + Default,
{
    let mut first = Bytes::new();
    let (mut joined, mut acquired) = (Vec::new(), None);
    while let Some(frame) = body.frame().await {
        let early = |_| GrpcError::new(GrpcCode::Internal, "the message ended too early");
        let Ok(data) = frame.map_err(early)?.into_data() else { continue };
        // `joined` contains `first`, so the larger of the two is the sum so far.
        let sum = first.len().max(joined.len()).saturating_add(data.len());
        if sum > max.saturating_add(PREFIX) {
            return Err(too_large(max));
        }
        if sum > SMALL_BODY && acquired.is_none() {
            let whole = declared(if joined.is_empty() { &first } else { &joined }).unwrap_or(max).min(max);
            acquired = Some(acquire(whole, memory)?);
            // No more than was acquired: a vector that grows by itself has twice as much.
            joined.reserve_exact(whole.saturating_add(PREFIX));
        }
        // Most messages arrive in one frame, and are not copied.
        if first.is_empty() {
            first = data;
            continue;
        }
        if joined.is_empty() {
            joined.extend_from_slice(&first);
        }
        joined.extend_from_slice(&data);
    }
    let (is_compressed, mut message) = unframe(if joined.is_empty() { first } else { joined.into() })?;
    let mut inflated = None;
    if is_compressed {
        check_encoding(fields.get(ENCODING))?;
        (message, inflated) = inflate(&message, max, memory)?;
    }
    let read = decode(message);
    drop((acquired, inflated));
    read
}

/// Acquires memory without waiting: Envoy does not, and what is unread holds up the other calls on its connection.
fn acquire(bytes: usize, memory: &ClientMemory) -> Result<MemoryPermit, GrpcError> {
    let busy = |_| GrpcError::new(GrpcCode::ResourceExhausted, "too many large messages are being read");
    memory.try_acquire(bytes).map_err(busy)
}

fn too_large(max: usize) -> GrpcError {
    GrpcError::new(GrpcCode::ResourceExhausted, format!("a message has at most {max} bytes"))
}

/// Returns the length of a message by its prefix, if that has come.
fn declared(begun: &[u8]) -> Option<usize> {
    let [_, length @ ..] = *begun.first_chunk::<PREFIX>()?;
    usize::try_from(u32::from_be_bytes(length)).ok()
}

/// Returns whether a message is compressed, and the message without its prefix.
pub(super) fn unframe(mut framed: Bytes) -> Result<(bool, Bytes), GrpcError> {
    let prefix = framed.first_chunk::<PREFIX>().copied();
    let [compressed, length @ ..] = prefix.ok_or_else(|| GrpcError::invalid("a call has one message"))?;
    let message = framed.split_off(PREFIX);
    if usize::try_from(u32::from_be_bytes(length)) != Ok(message.len()) {
        return Err(GrpcError::invalid("a call has one message, of the length that its prefix says"));
    }
    Ok((compressed != 0, message))
}

/// Checks how a message is compressed.
fn check_encoding(encoding: Option<&HeaderValue>) -> Result<(), GrpcError> {
    match encoding.map(HeaderValue::as_bytes) {
        Some(b"gzip") => Ok(()),
        Some(encoding) if encoding != b"identity" => {
            Err(GrpcError::new(GrpcCode::Unimplemented, "send the message uncompressed, or compressed with gzip"))
        }
        _ => Err(GrpcError::new(GrpcCode::Internal, "the message is compressed, and grpc-encoding does not say how")),
    }
}

/// Decompresses a message of at most `max` bytes. A few bytes can expand to any size, so that one that is not small has memory of its own.
fn inflate(compressed: &[u8], max: usize, memory: &ClientMemory) -> Result<(Bytes, Option<MemoryPermit>), GrpcError> {
    let mut decoder = GzDecoder::new(compressed);
    let mut message = Vec::new();
    let mut read_up_to = |length: usize, message: &mut Vec<u8>| {
        let more = u64::try_from(length.saturating_sub(message.len())).unwrap_or(u64::MAX);
        let read = decoder.by_ref().take(more).read_to_end(message);
        read.map_err(|_| GrpcError::invalid("the message cannot be decompressed"))
    };
    let small = SMALL_BODY.min(max);
    read_up_to(small, &mut message)?;
    let mut acquired = None;
    if message.len() == small {
        // No more than is acquired: a vector that grows by itself has twice as much.
        acquired = Some(acquire(max, memory)?);
        message.reserve_exact(max.saturating_sub(small).saturating_add(1));
        read_up_to(max.saturating_add(1), &mut message)?;
    }
    if message.len() > max { Err(too_large(max)) } else { Ok((message.into(), acquired)) }
}

/// Decodes a message.
pub(super) fn decode<M: Message + Default>(message: Bytes) -> Result<M, GrpcError> {
    // What prost says of it names fields, and no values.
    M::decode(message).map_err(|error| GrpcError::invalid(format!("the message cannot be decoded: {error}")))
}

/// Makes the response with a message.
pub(super) fn response(message: &impl Message) -> Response {
    let length = message.encoded_len();
    let mut framed = BytesMut::with_capacity(length.saturating_add(PREFIX));
    framed.extend_from_slice(&[0]);
    // A response is some kilobytes.
    framed.extend_from_slice(&u32::try_from(length).unwrap_or(u32::MAX).to_be_bytes());
    if message.encode(&mut framed).is_err() {
        return GrpcError::new(GrpcCode::Internal, "the answer cannot be encoded").into_response();
    }
    let mut trailers = HeaderMap::with_capacity(1);
    trailers.insert(STATUS, HeaderValue::from_static("0"));
    let body = Full::new(framed.freeze()).with_trailers(ready(Some(Ok::<_, Infallible>(trailers))));
    let mut response = Response::new(Body::new(body));
    response.headers_mut().insert(CONTENT_TYPE, GRPC);
    response
}
