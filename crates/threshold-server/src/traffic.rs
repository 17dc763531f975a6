//! Recorded traffic: access logs in the formats that servers write, as requests in the order of their own clock.

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

pub(crate) use fields::{Field, Fields};
pub(crate) use input::{Line, Lines, open};
pub(crate) use json::Scalars;
pub(crate) use moment::{Moment, MomentReader};
pub(crate) use order::{Feed, Form, LineCounts};
pub(crate) use progress::Progress;

/// What a log says of one request.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Request<'a> {
    /// When it came.
    pub(crate) at: Moment,
    /// From where.
    pub(crate) ip: Option<IpAddr>,
    /// The method, as logged.
    pub(crate) method: Option<&'a str>,
    /// The path, with its query.
    pub(crate) path: Option<&'a str>,
    /// The host it was for.
    pub(crate) host: Option<&'a str>,
    /// Who was calling.
    pub(crate) user: Option<&'a str>,
    /// Whose customer that was.
    pub(crate) tenant: Option<&'a str>,
    /// The tenant's plan.
    pub(crate) tier: Option<&'a str>,
    /// How it was answered.
    pub(crate) status: Option<u16>,
    /// The size of the request itself, which few logs have.
    pub(crate) bytes: Option<u64>,
    /// How many times more the line says it came.
    pub(crate) repeated: u64,
}

/// Why a line is no request, for people.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Unreadable(pub(crate) &'static str);

/// As `str::split_once` by an ASCII character, several times as fast: of each line of a log this is asked six times.
fn split_once(text: &str, byte: u8) -> Option<(&str, &str)> {
    let at = memchr::memchr(byte, text.as_bytes())?;
    // The byte itself is one character, so there is one behind it.
    Some((text.get(..at)?, text.get(at.saturating_add(1)..)?))
}

/// Splits the line of a request, `GET /path HTTP/1.1`. What a scanner sent instead of one has neither method nor path.
fn request_line(text: &str) -> (Option<&str>, Option<&str>) {
    let Some((method, rest)) = split_once(text, b' ') else { return (None, None) };
    let last = memchr::memrchr(b' ', rest.as_bytes()).and_then(|at| rest.split_at_checked(at));
    let path = match last {
        Some((path, protocol)) if protocol.starts_with(" HTTP/") => path,
        _ => rest,
    };
    let is_method = !method.is_empty() && method.bytes().all(|byte| byte.is_ascii_alphabetic() || byte == b'-');
    if is_method { (Some(method), Some(path.trim())) } else { (None, None) }
}
