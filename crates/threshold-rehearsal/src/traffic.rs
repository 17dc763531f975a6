//! Reads access logs in the formats that servers write, as requests in the order of their time.

mod batch;
mod fields;
mod input;
mod json;
mod login;
mod moment;
mod order;
mod progress;
mod text;

use std::net::IpAddr;

pub(crate) use fields::Field;
pub(crate) use fields::Fields;
pub(crate) use input::{Line, Lines, open};
pub(crate) use json::Scalars;
pub(crate) use moment::{Moment, MomentReader, zone_offset};
pub(crate) use order::{Feed, LineCounts, LogKind};
pub(crate) use progress::Progress;

/// One request of a log.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Request<'a> {
    /// The time of the request.
    pub(crate) at: Moment,
    /// The client's address.
    pub(crate) ip: Option<IpAddr>,
    /// The method, as logged.
    pub(crate) method: Option<&'a str>,
    /// The path, with its query.
    pub(crate) path: Option<&'a str>,
    /// The host of the request.
    pub(crate) host: Option<&'a str>,
    pub(crate) user: Option<&'a str>,
    pub(crate) tenant: Option<&'a str>,
    /// The tenant's plan.
    pub(crate) tier: Option<&'a str>,
    /// The status of the answer.
    pub(crate) status: Option<u16>,
    /// The size of the request itself, which few logs have.
    pub(crate) bytes: Option<u64>,
    /// How many more times the line says that it occurred.
    pub(crate) repeated: u64,
}

/// Why a line could not be parsed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Unreadable(pub(crate) &'static str);

/// Splits as `str::split_once` does, by an ASCII byte and several times as fast: it is called six times for each line.
fn split_once(text: &str, byte: u8) -> Option<(&str, &str)> {
    let at = memchr::memchr(byte, text.as_bytes())?;
    // An ASCII byte is a character of its own, so the position after it is a boundary.
    Some((text.get(..at)?, text.get(at.saturating_add(1)..)?))
}

/// Splits a request line, `GET /path HTTP/1.1`, into method and path. The bytes of a scanner may have neither.
fn request_line(text: &str) -> (Option<&str>, Option<&str>) {
    let Some((method, rest)) = split_once(text, b' ') else { return (None, None) };
    // From the right: a client may send spaces in the path, and the server logs them as they are.
    let last = memchr::memrchr(b' ', rest.as_bytes()).and_then(|at| rest.split_at_checked(at));
    let path = match last {
        Some((path, protocol)) if protocol.starts_with(" HTTP/") => path,
        _ => rest,
    };
    let is_method = !method.is_empty() && method.bytes().all(|byte| byte.is_ascii_alphabetic() || byte == b'-');
    if is_method { (Some(method), Some(path.trim())) } else { (None, None) }
}
