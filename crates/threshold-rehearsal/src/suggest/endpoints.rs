//! The most frequent endpoints of a log, in a bounded table. Segments that look like an id are replaced by `*`, and static files
//! are one endpoint.

use std::collections::HashMap;

use threshold_core::path::{normalize_method, normalize_path};

use crate::traffic::Request;

/// How many endpoints stay when the table is trimmed, at half of its bound.
const MIN_KEPT: usize = 4_096;
/// The most endpoints that get a limit of their own.
pub(super) const MAX_TARGETS: usize = 8;
/// An endpoint that only reads gets a limit of its own from one request in this many.
pub(super) const READS_FROM: u64 = 50;
/// An endpoint that writes gets one from this many requests.
pub(super) const WRITES_FROM: u64 = 20;
/// Longer paths make rules that are hard to read.
const MAX_SEGMENTS: usize = 8;
const MAX_PATH: usize = 56;

/// The endings of static files. A page loads many of them at once, and a limit on each would be noise.
pub(super) const STATIC: [&str; 16] = [
    "css", "js", "mjs", "map", "png", "jpg", "jpeg", "gif", "svg", "webp", "avif", "ico", "woff", "woff2", "ttf", "txt",
];

/// The requests that a limit applies to, and its window.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Target {
    /// All requests, in a minute.
    Minute,
    /// All requests, in an hour.
    Hour,
    /// Requests with a method that writes, in a minute.
    Writes,
    /// Static files, in a minute.
    Static,
    /// One endpoint, in a minute.
    Endpoint { method: String, pattern: String },
}

impl Target {
    /// Returns the window in seconds.
    pub(super) const fn window(&self) -> u64 {
        match self {
            Self::Hour => 3_600,
            Self::Minute | Self::Writes | Self::Static | Self::Endpoint { .. } => 60,
        }
    }
}

pub(super) fn is_write(method: &str) -> bool {
    matches!(method, "POST" | "PUT" | "PATCH" | "DELETE")
}

/// The endpoint of a request.
#[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(super) enum Endpoint {
    Static,
    Of { method: String, pattern: String },
}

/// Returns the endpoint of a request.
pub(super) fn endpoint_of(request: &Request<'_>) -> Option<Endpoint> {
    let method = normalize_method(request.method?).into_owned();
    let path = request.path?;
    if is_static(&method, path) {
        return Some(Endpoint::Static);
    }
    Some(Endpoint::Of { method, pattern: pattern_of(path) })
}

fn is_static(method: &str, path: &str) -> bool {
    // As the policy will see it: an upper-case or encoded ending is a static file to the rule as well.
    let path = normalize_path(path);
    let ending = path.rsplit('/').next().and_then(|name| name.rsplit_once('.')).map(|(_, ending)| ending);
    matches!(method, "GET" | "HEAD") && ending.is_some_and(|ending| STATIC.contains(&ending))
}

/// Normalises a path, and replaces each segment that looks like an id by `*`.
fn pattern_of(path: &str) -> String {
    let spelled = normalize_path(path);
    spelled.split('/').map(|segment| if is_id(segment) { "*" } else { segment }).collect::<Vec<_>>().join("/")
}

fn is_id(segment: &str) -> bool {
    let digits = segment.bytes().filter(u8::is_ascii_digit).count();
    let hexadecimal = segment.bytes().all(|byte| byte.is_ascii_hexdigit() || byte == b'-');
    // Any number, a UUID or another hexadecimal id, or a long token. Words of a path, such as `face` or `decade`,
    // have no digit, and stay.
    let all_digits = !segment.is_empty() && digits == segment.len();
    all_digits || (hexadecimal && segment.len() >= 8 && digits > 0) || (segment.len() >= 24 && digits >= 4)
}

/// The number of requests of each endpoint.
#[derive(Debug, Default)]
pub(super) struct Endpoints {
    requests: u64,
    statics: u64,
    counts: HashMap<(String, String), u64>,
    /// Whether rare endpoints were forgotten to make room.
    trimmed: bool,
}

/// The endpoints that get no limit of their own.
#[derive(Debug, Default)]
pub(super) struct LeftOut {
    /// Those with too few requests.
    pub(super) rare: usize,
    /// Whether there were more of them than are counted.
    pub(super) more_rare: bool,
    /// Those whose path is too long, or not plain enough for a policy.
    pub(super) odd: usize,
    /// Those beyond the most that are suggested, with their requests.
    pub(super) beyond: Vec<(String, u64)>,
}

impl Endpoints {
    pub(super) fn add(&mut self, request: &Request<'_>) {
        // Limits are suggested by address, so a request without one would change no figure but the total.
        if request.ip.is_none() {
            return;
        }
        self.requests = self.requests.saturating_add(1);
        let endpoint = match endpoint_of(request) {
            None => return,
            Some(Endpoint::Static) => {
                self.statics = self.statics.saturating_add(1);
                return;
            }
            Some(Endpoint::Of { method, pattern }) => (method, pattern),
        };
        if let Some(count) = self.counts.get_mut(&endpoint) {
            *count = count.saturating_add(1);
            return;
        }
        if self.counts.len() >= MIN_KEPT.saturating_mul(2) {
            self.trim();
        }
        self.counts.insert(endpoint, 1);
    }

    /// Returns the number of requests with an address.
    pub(super) fn requests(&self) -> u64 {
        self.requests
    }

    /// Returns what limits are suggested for: all requests, writes, static files and the most frequent endpoints; and what is
    /// left out.
    pub(super) fn targets(&self) -> (Vec<Target>, LeftOut) {
        let mut left_out = LeftOut { more_rare: self.trimmed, ..LeftOut::default() };
        let mut chosen: Vec<(&(String, String), u64)> = Vec::new();
        for (endpoint, count) in &self.counts {
            let (method, pattern) = endpoint;
            if !self.is_frequent(method, *count) {
                left_out.rare = left_out.rare.saturating_add(1);
            } else if !is_readable(pattern) || method.is_empty() {
                left_out.odd = left_out.odd.saturating_add(1);
            } else {
                chosen.push((endpoint, *count));
            }
        }
        // Writes first, because abuse of them costs more; then by number, then by name.
        chosen.sort_by_key(|(endpoint, count)| (!is_write(&endpoint.0), std::cmp::Reverse(*count), *endpoint));
        let beyond = chosen.iter().skip(MAX_TARGETS);
        left_out.beyond = beyond.map(|((method, pattern), count)| (format!("{method}:{pattern}"), *count)).collect();
        let own = chosen
            .into_iter()
            .take(MAX_TARGETS)
            .map(|((method, pattern), _)| Target::Endpoint { method: method.clone(), pattern: pattern.clone() });
        let statics = self.is_frequent("GET", self.statics).then_some(Target::Static);
        let targets = [Target::Minute, Target::Hour, Target::Writes].into_iter().chain(statics).chain(own).collect();
        (targets, left_out)
    }

    /// Whether an endpoint has enough requests for a limit of its own.
    fn is_frequent(&self, method: &str, count: u64) -> bool {
        if is_write(method) { count >= WRITES_FROM } else { count.saturating_mul(READS_FROM) >= self.requests }
    }

    #[cold]
    fn trim(&mut self) {
        let mut counts: Vec<u64> = self.counts.values().copied().collect();
        counts.sort_unstable_by(|one, other| other.cmp(one));
        let floor = counts.get(MIN_KEPT).copied().unwrap_or(0);
        // Strictly more, so that a log of a scanner, with each path once, cannot keep the table full.
        self.counts.retain(|_, count| *count > floor);
        self.trimmed = true;
    }
}

/// Whether a path is short and plain enough for a rule. A log has any bytes that clients sent, which must not get into the
/// policy.
fn is_readable(pattern: &str) -> bool {
    let plain = |byte: u8| byte.is_ascii_alphanumeric() || matches!(byte, b'/' | b'-' | b'_' | b'.' | b'*' | b'~');
    pattern.starts_with('/')
        && pattern.len() <= MAX_PATH
        && pattern.split('/').count() <= MAX_SEGMENTS
        && pattern.bytes().all(plain)
        && !pattern.contains("**")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn segments_that_look_like_ids_are_replaced_and_words_are_not() {
        let check = |path: &str, expect: &str| assert_eq!(pattern_of(path), expect);
        check("/api/posts/17?x=1", "/api/posts/*");
        check("/u/3f2504e0-4f89-11d3-9a0c-0305e82c3301/a", "/u/*/a");
        check("/commit/deadbeef01", "/commit/*");
        check("/facade/decade", "/facade/decade");
        check("//API/./v2/posts/", "/api/v2/posts");
        check("/", "/");
    }

    #[test]
    fn files_that_a_page_loads_are_static() {
        let check = |method: &str, path: &str, expect: bool| assert_eq!(is_static(method, path), expect, "{path}");
        check("GET", "/a/Style.CSS?v=2", true);
        check("HEAD", "/favicon.ico", true);
        check("GET", "/img/3f2504e0-4f89-11d3-9a0c-0305e82c3301.png", true);
        check("POST", "/upload.png", false);
        check("GET", "/css", false);
        check("GET", "/x.css/edit", false);
        check("GET", "/report.csv", false);
    }

    #[test]
    fn only_short_and_plain_paths_make_a_rule() {
        for bad in ["/a\"b", "/$HOME", "/a b", "/{x}", "/%2f", "a", "/é"] {
            assert!(!is_readable(bad), "{bad}");
        }
        assert!(is_readable("/api/v1/posts/*/comments.json"));
    }

    #[test]
    fn the_table_is_bounded() {
        let mut endpoints = Endpoints::default();
        for index in 0..50_000_u64 {
            let path = if index.is_multiple_of(3) { "/often".to_owned() } else { format!("/once-{index}x") };
            let ip = "192.0.2.1".parse().ok();
            endpoints.add(&Request { ip, method: Some("GET"), path: Some(&path), ..Request::default() });
            assert!(endpoints.counts.len() <= MIN_KEPT * 2);
        }
        let often = Target::Endpoint { method: "GET".to_owned(), pattern: "/often".to_owned() };
        let (targets, left_out) = endpoints.targets();
        assert!(targets.contains(&often) && left_out.more_rare && left_out.rare > 0);
    }
}
