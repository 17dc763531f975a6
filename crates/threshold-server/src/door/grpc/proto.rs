//! The messages of Envoy's and gRPC's protocols, as far as they are used: unknown fields are skipped.
//!
//! Written by hand, with the numbers of `envoy/service/ratelimit/v3/rls.proto`, `envoy/extensions/common/ratelimit/v3/ratelimit.proto`,
//! `envoy/service/auth/v3/external_auth.proto`, `envoy/service/auth/v3/attribute_context.proto`, `envoy/config/core/v3/base.proto` and
//! `grpc/health/v1/health.proto`.

use std::collections::HashMap;

use prost::{Enumeration, Message, Oneof};

#[derive(Clone, PartialEq, Message)]
pub(crate) struct RateLimitRequest {
    #[prost(string, tag = "1")]
    pub(crate) domain: String,
    #[prost(message, repeated, tag = "2")]
    pub(crate) descriptors: Vec<RateLimitDescriptor>,
    /// 0 means 1.
    #[prost(uint32, tag = "3")]
    pub(crate) hits_addend: u32,
}

#[derive(Clone, PartialEq, Message)]
pub(crate) struct RateLimitDescriptor {
    #[prost(message, repeated, tag = "1")]
    pub(crate) entries: Vec<Entry>,
    #[prost(message, optional, tag = "2")]
    pub(crate) limit: Option<RateLimitOverride>,
    /// A `google.protobuf.UInt64Value`: 0 is not the same as none.
    #[prost(message, optional, tag = "3")]
    pub(crate) hits_addend: Option<u64>,
    #[prost(bool, tag = "4")]
    pub(crate) is_negative_hits: bool,
}

#[derive(Clone, PartialEq, Message)]
pub(crate) struct Entry {
    #[prost(string, tag = "1")]
    pub(crate) key: String,
    /// Text in the protocol, but Envoy passes on what its client has sent, whatever the bytes are. A message that cannot be decoded
    /// would be an error, which Envoy lets through.
    #[prost(bytes = "vec", tag = "2")]
    pub(crate) value: Vec<u8>,
}

#[derive(Clone, Copy, PartialEq, Message)]
pub(crate) struct RateLimitOverride {
    #[prost(uint32, tag = "1")]
    pub(crate) requests_per_unit: u32,
    #[prost(enumeration = "Unit", tag = "2")]
    pub(crate) unit: i32,
}

/// A period. `RateLimitUnit` of overrides has the same numbers, and so do both of `WEEK`, which came last.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Enumeration)]
#[repr(i32)]
pub(crate) enum Unit {
    Unknown = 0,
    Second = 1,
    Minute = 2,
    Hour = 3,
    Day = 4,
    Month = 5,
    Year = 6,
    Week = 7,
}

#[derive(Clone, PartialEq, Message)]
pub(crate) struct RateLimitResponse {
    #[prost(enumeration = "Code", tag = "1")]
    pub(crate) overall_code: i32,
    #[prost(message, repeated, tag = "2")]
    pub(crate) statuses: Vec<DescriptorStatus>,
    #[prost(message, repeated, tag = "3")]
    pub(crate) response_headers_to_add: Vec<HeaderValue>,
    #[prost(message, repeated, tag = "4")]
    pub(crate) request_headers_to_add: Vec<HeaderValue>,
    #[prost(bytes = "vec", tag = "5")]
    pub(crate) raw_body: Vec<u8>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Enumeration)]
#[repr(i32)]
pub(crate) enum Code {
    /// Envoy lets such a request through.
    Unknown = 0,
    Ok = 1,
    OverLimit = 2,
}

#[derive(Clone, PartialEq, Message)]
pub(crate) struct DescriptorStatus {
    #[prost(enumeration = "Code", tag = "1")]
    pub(crate) code: i32,
    #[prost(message, optional, tag = "2")]
    pub(crate) current_limit: Option<RateLimit>,
    #[prost(uint32, tag = "3")]
    pub(crate) limit_remaining: u32,
    #[prost(message, optional, tag = "4")]
    pub(crate) duration_until_reset: Option<Duration>,
}

#[derive(Clone, PartialEq, Message)]
pub(crate) struct RateLimit {
    #[prost(uint32, tag = "1")]
    pub(crate) requests_per_unit: u32,
    #[prost(enumeration = "Unit", tag = "2")]
    pub(crate) unit: i32,
    /// Envoy puts it into a header without escaping it.
    #[prost(string, tag = "3")]
    pub(crate) name: String,
}

#[derive(Clone, Copy, PartialEq, Message)]
pub(crate) struct Duration {
    #[prost(int64, tag = "1")]
    pub(crate) seconds: i64,
    #[prost(int32, tag = "2")]
    pub(crate) nanos: i32,
}

#[derive(Clone, PartialEq, Message)]
pub(crate) struct HeaderValue {
    #[prost(string, tag = "1")]
    pub(crate) key: String,
    #[prost(string, tag = "2")]
    pub(crate) value: String,
    /// The value of a header that is no UTF-8; then `value` is empty.
    #[prost(bytes = "vec", tag = "3")]
    pub(crate) raw_value: Vec<u8>,
}

#[derive(Clone, PartialEq, Message)]
pub(crate) struct CheckRequest {
    #[prost(message, optional, tag = "1")]
    pub(crate) attributes: Option<AttributeContext>,
}

#[derive(Clone, PartialEq, Message)]
pub(crate) struct AttributeContext {
    #[prost(message, optional, tag = "1")]
    pub(crate) source: Option<Peer>,
    #[prost(message, optional, tag = "4")]
    pub(crate) request: Option<AttributeRequest>,
}

#[derive(Clone, PartialEq, Message)]
pub(crate) struct Peer {
    #[prost(message, optional, tag = "1")]
    pub(crate) address: Option<Address>,
}

#[derive(Clone, PartialEq, Message)]
pub(crate) struct Address {
    /// Pipes and Envoy's own listeners have none.
    #[prost(message, optional, tag = "1")]
    pub(crate) socket_address: Option<SocketAddress>,
}

#[derive(Clone, PartialEq, Message)]
pub(crate) struct SocketAddress {
    #[prost(string, tag = "2")]
    pub(crate) address: String,
    #[prost(uint32, tag = "3")]
    pub(crate) port_value: u32,
}

#[derive(Clone, PartialEq, Message)]
pub(crate) struct AttributeRequest {
    #[prost(message, optional, tag = "2")]
    pub(crate) http: Option<HttpRequest>,
}

#[derive(Clone, PartialEq, Message)]
pub(crate) struct HttpRequest {
    #[prost(string, tag = "2")]
    pub(crate) method: String,
    #[prost(map = "string, string", tag = "3")]
    pub(crate) headers: HashMap<String, String>,
    /// The path as the client spelled it, with its query.
    #[prost(string, tag = "4")]
    pub(crate) path: String,
    #[prost(string, tag = "5")]
    pub(crate) host: String,
    /// The length of the body; -1 if it is not known.
    #[prost(int64, tag = "9")]
    pub(crate) size: i64,
    /// The headers in place of `headers`, with `encode_raw_headers`.
    #[prost(message, optional, tag = "13")]
    pub(crate) header_map: Option<HeaderMap>,
}

#[derive(Clone, PartialEq, Message)]
pub(crate) struct HeaderMap {
    #[prost(message, repeated, tag = "1")]
    pub(crate) headers: Vec<HeaderValue>,
}

#[derive(Clone, PartialEq, Message)]
pub(crate) struct CheckResponse {
    #[prost(message, optional, tag = "1")]
    pub(crate) status: Option<Status>,
    #[prost(oneof = "HttpResponse", tags = "2, 3, 5")]
    pub(crate) http_response: Option<HttpResponse>,
}

/// A `google.rpc.Status`.
#[derive(Clone, PartialEq, Message)]
pub(crate) struct Status {
    #[prost(int32, tag = "1")]
    pub(crate) code: i32,
    #[prost(string, tag = "2")]
    pub(crate) message: String,
}

#[derive(Clone, PartialEq, Oneof)]
pub(crate) enum HttpResponse {
    #[prost(message, tag = "2")]
    Denied(DeniedHttpResponse),
    #[prost(message, tag = "3")]
    Ok(OkHttpResponse),
    /// Counts as an error of the service, so that Envoy's `failure_mode_allow` decides.
    #[prost(message, tag = "5")]
    Error(DeniedHttpResponse),
}

#[derive(Clone, PartialEq, Message)]
pub(crate) struct DeniedHttpResponse {
    #[prost(message, optional, tag = "1")]
    pub(crate) status: Option<HttpStatus>,
    #[prost(message, repeated, tag = "2")]
    pub(crate) headers: Vec<HeaderValueOption>,
    #[prost(string, tag = "3")]
    pub(crate) body: String,
}

#[derive(Clone, Copy, PartialEq, Message)]
pub(crate) struct HttpStatus {
    #[prost(int32, tag = "1")]
    pub(crate) code: i32,
}

#[derive(Clone, PartialEq, Message)]
pub(crate) struct OkHttpResponse {
    /// Headers for the request to the upstream.
    #[prost(message, repeated, tag = "2")]
    pub(crate) headers: Vec<HeaderValueOption>,
    /// Headers that the upstream must not see, because only this server sets them.
    #[prost(string, repeated, tag = "5")]
    pub(crate) headers_to_remove: Vec<String>,
    #[prost(message, repeated, tag = "6")]
    pub(crate) response_headers_to_add: Vec<HeaderValueOption>,
}

#[derive(Clone, PartialEq, Message)]
pub(crate) struct HeaderValueOption {
    #[prost(message, optional, tag = "1")]
    pub(crate) header: Option<HeaderValue>,
    #[prost(enumeration = "AppendAction", tag = "3")]
    pub(crate) append_action: i32,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Enumeration)]
#[repr(i32)]
pub(crate) enum AppendAction {
    AppendOrAdd = 0,
    AddIfAbsent = 1,
    OverwriteOrAdd = 2,
}

#[derive(Clone, PartialEq, Message)]
pub(crate) struct HealthCheckRequest {
    #[prost(string, tag = "1")]
    pub(crate) service: String,
}

#[derive(Clone, Copy, PartialEq, Message)]
pub(crate) struct HealthCheckResponse {
    #[prost(enumeration = "ServingStatus", tag = "1")]
    pub(crate) status: i32,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Enumeration)]
#[repr(i32)]
pub(crate) enum ServingStatus {
    Unknown = 0,
    Serving = 1,
    NotServing = 2,
}
