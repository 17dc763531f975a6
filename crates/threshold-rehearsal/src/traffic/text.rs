//! Parses the common and combined log formats of Apache and nginx, with or without a virtual host in front.

use threshold_core::address::parse_address;

use super::fields::Column;
use super::{Fields, MomentReader, Request, Unreadable, request_line, split_once};

/// Parses `[host] ip ident user [time] "request" status bytes …`. What follows is ignored. Formats that omit columns after the
/// address or add some before the request are parsed too.
pub(super) fn parse<'a>(line: &'a str, fields: &Fields, moments: &mut MomentReader) -> Result<Request<'a>, Unreadable> {
    let Some((prefix, rest)) = until_time(line) else {
        return Err(Unreadable(if line.trim().is_empty() { "it is empty" } else { "no [time]" }));
    };
    let (time, rest) = split_once(rest, b']').ok_or(Unreadable("no [time]"))?;
    // The usual format first: the parser of all formats is much slower.
    let at = moments.common(time).or_else(|| moments.text(time)).ok_or(Unreadable("no time that can be read"))?;
    let prefix = Prefix::read(prefix).ok_or(Unreadable("no address"))?;
    let (_, quoted) = split_once(rest, b'"').ok_or(Unreadable("no \"request\""))?;
    let (request, rest) = until_quote(quoted).ok_or(Unreadable("no end of the \"request\""))?;
    // A request line that cannot be parsed is a request all the same: scanners send any bytes, and limits by address
    // count them.
    let (method, path) = request_line(request);
    let rest = rest.trim_ascii_start();
    let status = split_once(rest, b' ').map_or(rest, |(status, _)| status).parse().ok();
    let named = |column: Option<Column>| match column? {
        Column::Host => prefix.host,
        Column::Ident => known(prefix.ident),
        Column::User => known(prefix.user),
    };
    Ok(Request {
        at,
        ip: Some(prefix.ip),
        method,
        path,
        host: prefix.host,
        user: named(fields.columns.user),
        tenant: named(fields.columns.tenant),
        tier: named(fields.columns.tier),
        status,
        bytes: None,
        repeated: 0,
    })
}

/// The columns before the time.
struct Prefix<'a> {
    host: Option<&'a str>,
    ip: std::net::IpAddr,
    ident: &'a str,
    user: &'a str,
}

impl<'a> Prefix<'a> {
    fn read(text: &'a str) -> Option<Self> {
        let (first, rest) = split_once(text, b' ').unwrap_or((text, ""));
        let (host, ip, rest) = match parse_address(first) {
            Some(ip) => (None, ip, rest),
            None => {
                let (second, rest) = split_once(rest, b' ')?;
                (Some(first), parse_address(second)?, rest)
            }
        };
        // A user's name may contain spaces; the ident before it does not.
        let (ident, user) = split_once(rest, b' ').unwrap_or((rest, ""));
        Some(Self { host, ip, ident, user })
    }
}

fn known(value: &str) -> Option<&str> {
    Some(value).filter(|value| !value.is_empty() && *value != "-")
}

/// Splits at the first ` [`.
fn until_time(line: &str) -> Option<(&str, &str)> {
    memchr::memchr_iter(b'[', line.as_bytes()).find_map(|at| {
        let (before, rest) = line.split_at_checked(at)?;
        Some((before.strip_suffix(' ')?, rest.strip_prefix('[')?))
    })
}

/// Splits at the next quote that is not escaped.
fn until_quote(text: &str) -> Option<(&str, &str)> {
    let bytes = text.as_bytes();
    memchr::memchr_iter(b'"', bytes).find_map(|at| {
        let (before, _) = bytes.split_at_checked(at)?;
        // An even number of backslashes escapes itself, and the quote ends the text. A client could otherwise forge
        // the columns after it.
        let escapes = before.iter().rev().take_while(|byte| **byte == b'\\').count();
        if !escapes.is_multiple_of(2) {
            return None;
        }
        let (inside, rest) = text.split_at_checked(at)?;
        Some((inside, rest.strip_prefix('"')?))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(line: &str) -> Result<Request<'_>, Unreadable> {
        parse(line, &Fields::default(), &mut MomentReader::default())
    }

    #[test]
    fn all_variants_of_a_line_are_parsed() {
        let line = r#"203.0.113.7 - ada [17/May/2015:10:05:03 +0000] "POST /a%20b?c=\"d\" HTTP/1.1" 201 5 "-" "x""#;
        let request = read(line).unwrap();
        assert_eq!((request.method, request.path), (Some("POST"), Some(r#"/a%20b?c=\"d\""#)));
        assert_eq!((request.user, request.status, request.host), (Some("ada"), Some(201), None));
        let request = read(r#"[2001:db8::1]:443 - - [17/May/2015:10:05:03 +0000] "GET / HTTP/2.0" 200 -"#).unwrap();
        assert_eq!((request.ip.unwrap().to_string().as_str(), request.user), ("2001:db8::1", None));
        let request = read(r#"www.example.com:80 203.0.113.7 - - [17/May/2015:10:05:03 +0000] "GET /" 200 -"#).unwrap();
        assert_eq!((request.host, request.path), (Some("www.example.com:80"), Some("/")));
        // The bytes of a scanner count as a request without method and path.
        let request = read(r#"203.0.113.7 - - [17/May/2015:10:05:03 +0000] "\x16\x03\x01" 400 0"#).unwrap();
        assert_eq!((request.method, request.path, request.status), (None, None, Some(400)));
        let request = read(r#"203.0.113.7 - a b [17/May/2015:10:05:03 +0000] "GET /a b c HTTP/1.0" 200 0"#).unwrap();
        assert_eq!((request.user, request.path), (Some("a b"), Some("/a b c")));
        let request =
            read(r#"203.0.113.7 [17/May/2015:10:05:03 +0000] www.example.com 0.004 "GET /a HTTP/1.1" 200"#).unwrap();
        assert_eq!((request.user, request.path, request.status), (None, Some("/a"), Some(200)));
    }

    #[test]
    fn an_error_says_which_part_is_missing() {
        let check = |line: &str, why: &str| assert_eq!(read(line).unwrap_err().0, why, "{line}");
        check(" ", "it is empty");
        check("hello world", "no [time]");
        check("203.0.113.7 - - [17/May/2015:10:05:03 +0000", "no [time]");
        check("203.0.113.7 - - [yesterday] \"GET / HTTP/1.1\" 200 0", "no time that can be read");
        check("somebody - - [17/May/2015:10:05:03 +0000] \"GET / HTTP/1.1\" 200 0", "no address");
        check("203.0.113.7 - - [17/May/2015:10:05:03 +0000] GET", "no \"request\"");
        check("203.0.113.7 - - [17/May/2015:10:05:03 +0000] \"GET / HT", "no end of the \"request\"");
    }
}
