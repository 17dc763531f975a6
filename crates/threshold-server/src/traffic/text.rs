//! The common and combined formats, which Apache and nginx write, with or without a virtual host in front.

use threshold_core::address::parse_address;

use super::{Field, Fields, MomentReader, Request, Unreadable, request_line};

/// Reads `[host] ip ident user [time] "request" status bytes …`; what follows is not looked at.
pub(super) fn parse<'a>(line: &'a str, fields: &Fields, moments: &mut MomentReader) -> Result<Request<'a>, Unreadable> {
    if line.trim().is_empty() {
        return Err(Unreadable("it is empty"));
    }
    let (who, rest) = line.split_once(" [").ok_or(Unreadable("no [time]"))?;
    let (time, rest) = rest.split_once(']').ok_or(Unreadable("no [time]"))?;
    let at = moments.common(time).or_else(|| moments.text(time)).ok_or(Unreadable("no time that can be read"))?;
    let who = Who::read(who).ok_or(Unreadable("no address"))?;
    let quoted = rest.strip_prefix(" \"").ok_or(Unreadable("no \"request\""))?;
    let (request, rest) = until_quote(quoted).ok_or(Unreadable("no end of the \"request\""))?;
    let (method, path) = request_line(request);
    let status = rest.trim_start().split(' ').next().and_then(|status| status.parse().ok());
    let named = |field: Field| match fields.text_column(field) {
        Some("host") => who.host,
        Some("ident") => known(who.ident),
        Some("user") => known(who.user),
        _ => None,
    };
    Ok(Request {
        at,
        ip: Some(who.ip),
        method,
        path,
        host: who.host,
        user: named(Field::User),
        tenant: named(Field::Tenant),
        tier: named(Field::Tier),
        status,
        bytes: None,
        repeated: 0,
    })
}

/// What stands before the time.
struct Who<'a> {
    host: Option<&'a str>,
    ip: std::net::IpAddr,
    ident: &'a str,
    user: &'a str,
}

impl<'a> Who<'a> {
    fn read(text: &'a str) -> Option<Self> {
        let (first, rest) = text.split_once(' ')?;
        let (host, ip, rest) = match parse_address(first) {
            Some(ip) => (None, ip, rest),
            None => {
                let (second, rest) = rest.split_once(' ')?;
                (Some(first), parse_address(second)?, rest)
            }
        };
        // A user's name may hold blanks; the identity before it does not.
        let (ident, user) = rest.split_once(' ').unwrap_or((rest, ""));
        Some(Self { host, ip, ident, user })
    }
}

fn known(value: &str) -> Option<&str> {
    Some(value).filter(|value| !value.is_empty() && *value != "-")
}

/// The text up to the next quote that is not escaped, and what follows it.
fn until_quote(text: &str) -> Option<(&str, &str)> {
    let bytes = text.as_bytes();
    memchr::memchr_iter(b'"', bytes).find_map(|at| {
        let (before, _) = bytes.split_at_checked(at)?;
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
    fn a_line_is_read_in_all_its_variants() {
        let line = r#"203.0.113.7 - ada [17/May/2015:10:05:03 +0000] "POST /a%20b?c=\"d\" HTTP/1.1" 201 5 "-" "x""#;
        let request = read(line).unwrap();
        assert_eq!((request.method, request.path), (Some("POST"), Some(r#"/a%20b?c=\"d\""#)));
        assert_eq!((request.user, request.status, request.host), (Some("ada"), Some(201), None));
        let request = read(r#"[2001:db8::1]:443 - - [17/May/2015:10:05:03 +0000] "GET / HTTP/2.0" 200 -"#).unwrap();
        assert_eq!((request.ip.unwrap().to_string().as_str(), request.user), ("2001:db8::1", None));
        let request = read(r#"www.example.com:80 203.0.113.7 - - [17/May/2015:10:05:03 +0000] "GET /" 200 -"#).unwrap();
        assert_eq!((request.host, request.path), (Some("www.example.com:80"), Some("/")));
        // A scanner's bytes are a request all the same.
        let request = read(r#"203.0.113.7 - - [17/May/2015:10:05:03 +0000] "\x16\x03\x01" 400 0"#).unwrap();
        assert_eq!((request.method, request.path, request.status), (None, None, Some(400)));
        let request = read(r#"203.0.113.7 - a b [17/May/2015:10:05:03 +0000] "GET /a b c HTTP/1.0" 200 0"#).unwrap();
        assert_eq!((request.user, request.path), (Some("a b"), Some("/a b c")));
    }

    #[test]
    fn what_cannot_be_read_says_why() {
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
