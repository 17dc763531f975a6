//! The messages of Envoy's rate limit service and of throttlecrab's, as far as they are sent here, and four layers as descriptors.

use std::net::Ipv4Addr;

use bytes::{BufMut as _, Bytes, BytesMut};
use prost::Message;

use crate::load::mix;

/// So many requests at once, and so many a second: none is denied.
pub const FAR: i32 = 1_000_000_000;
/// How many users a tenant has.
const USERS_PER_TENANT: u64 = 1_000;
/// How many paths there are.
const PATHS: u64 = 16;

pub const SHOULD_RATE_LIMIT: &str = "/envoy.service.ratelimit.v3.RateLimitService/ShouldRateLimit";
pub const RATE_LIMIT_SERVICE: &str = "envoy.service.ratelimit.v3.RateLimitService";
pub const THROTTLE: &str = "/throttlecrab.RateLimiter/Throttle";
pub const DOMAIN: &str = "edge";

#[derive(Clone, PartialEq, Message)]
pub struct RateLimitRequest {
    #[prost(string, tag = "1")]
    pub domain: String,
    #[prost(message, repeated, tag = "2")]
    pub descriptors: Vec<Descriptor>,
    #[prost(uint32, tag = "3")]
    pub hits_addend: u32,
}

#[derive(Clone, PartialEq, Message)]
pub struct Descriptor {
    #[prost(message, repeated, tag = "1")]
    pub entries: Vec<Entry>,
}

#[derive(Clone, PartialEq, Message)]
pub struct Entry {
    #[prost(string, tag = "1")]
    pub key: String,
    #[prost(string, tag = "2")]
    pub value: String,
}

#[derive(Clone, PartialEq, Message)]
pub struct RateLimitResponse {
    /// 1 is `OK`.
    #[prost(int32, tag = "1")]
    pub overall_code: i32,
    #[prost(message, repeated, tag = "2")]
    pub statuses: Vec<Status>,
    #[prost(message, repeated, tag = "3")]
    pub response_headers_to_add: Vec<Entry>,
}

#[derive(Clone, PartialEq, Message)]
pub struct Status {
    #[prost(int32, tag = "1")]
    pub code: i32,
    #[prost(message, optional, tag = "2")]
    pub current_limit: Option<Limit>,
    #[prost(uint32, tag = "3")]
    pub limit_remaining: u32,
    #[prost(message, optional, tag = "4")]
    pub duration_until_reset: Option<Duration>,
}

#[derive(Clone, PartialEq, Message)]
pub struct Limit {
    #[prost(uint32, tag = "1")]
    pub requests_per_unit: u32,
    #[prost(int32, tag = "2")]
    pub unit: i32,
    #[prost(string, tag = "3")]
    pub name: String,
}

#[derive(Clone, Copy, PartialEq, Message)]
pub struct Duration {
    #[prost(int64, tag = "1")]
    pub seconds: i64,
}

#[derive(Clone, PartialEq, Message)]
struct ThrottleRequest {
    #[prost(string, tag = "1")]
    key: String,
    #[prost(int32, tag = "2")]
    max_burst: i32,
    #[prost(int32, tag = "3")]
    count_per_period: i32,
    #[prost(int32, tag = "4")]
    period: i32,
    #[prost(int32, tag = "5")]
    quantity: i32,
}

/// Four descriptors: an address, a tenant, a user, and a user with a path.
pub fn four_descriptors(key: u64) -> Bytes {
    let user = user(key);
    // Below 10.0.0.0/8 there is room for every key.
    let ip = Ipv4Addr::from_bits(0x0a00_0000 | key as u32).to_string();
    let descriptors = vec![
        descriptor(&[("remote_address", &ip)]),
        descriptor(&[("tenant", &format!("tenant-{:06}", key / USERS_PER_TENANT))]),
        descriptor(&[("user", &user)]),
        descriptor(&[("caller", &user), ("path", &format!("/api/posts/{:02}", key % PATHS))]),
    ];
    framed(&RateLimitRequest { domain: DOMAIN.to_owned(), descriptors, hits_addend: 0 })
}

/// One limit by key, with the limit in the request.
pub fn one_limit(key: u64) -> Bytes {
    framed(&ThrottleRequest { key: user(key), max_burst: FAR, count_per_period: FAR, period: 1, quantity: 1 })
}

fn user(key: u64) -> String {
    format!("user:{:016x}-eu", mix(key))
}

fn descriptor(entries: &[(&str, &str)]) -> Descriptor {
    let entry = |(key, value): &(&str, &str)| Entry { key: (*key).to_owned(), value: (*value).to_owned() };
    Descriptor { entries: entries.iter().map(entry).collect() }
}

/// A message as gRPC sends it: not compressed, and its length.
fn framed(message: &impl Message) -> Bytes {
    let length = message.encoded_len();
    let mut bytes = BytesMut::with_capacity(length + 5);
    bytes.put_u8(0);
    bytes.put_u32(length as u32);
    bytes.put(message.encode_to_vec().as_slice());
    bytes.freeze()
}

/// Whether an answer says OK, or that the request is allowed: in both services field 1 is then 1.
pub fn is_ok(framed: &[u8]) -> bool {
    framed.get(5..).is_some_and(|message| message.starts_with(&[0x08, 0x01]))
}
