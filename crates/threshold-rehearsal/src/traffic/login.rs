//! Parses lines about logins: those of sshd, and JSON events.

use jiff::Zoned;
use threshold_core::address::parse_address;

use super::json::Scalar;
use super::{Field, MomentReader, Request, Scalars, Unreadable};

/// The most repetitions that one line may stand for: a forged line must not count as millions.
const MAX_REPEATED: u64 = 10_000;
/// The words for success and failure in JSON events.
const IN: [&str; 9] = ["success", "succeeded", "successful", "true", "ok", "accepted", "allow", "allowed", "pass"];
const OUT: [&str; 10] =
    ["failure", "failed", "fail", "false", "denied", "deny", "invalid", "error", "rejected", "unauthorized"];

/// Parses a line of an auth log; `None` for lines about other things, which most are. The account is the request's user, and
/// the status is 200 or 401.
pub(super) fn parse<'a>(line: &'a str, moments: &mut MomentReader) -> Result<Option<Request<'a>>, Unreadable> {
    if line.trim().is_empty() {
        return Err(Unreadable("it is empty"));
    }
    let (at, rest) = written_at(line, moments).ok_or(Unreadable("no time that can be read"))?;
    // The program is before the first colon, where no client can write. A name with "sshd" in the message is not
    // enough.
    let Some((_, message)) = rest.split_once(": ").filter(|(program, _)| program.contains("sshd")) else {
        return Ok(None);
    };
    let (message, repeated) = repeated(message);
    let (status, rest) = if let Some(rest) = message.strip_prefix("Failed ") {
        (401, rest)
    } else if let Some(rest) = message.strip_prefix("Accepted ") {
        (200, rest)
    } else {
        return Ok(None);
    };
    let (_, rest) = rest.split_once(" for ").ok_or(Unreadable("no account"))?;
    // Split from the right: a client chooses the name, which may be "root from 192.0.2.1".
    let (name, from) = rest.rsplit_once(" from ").ok_or(Unreadable("no address"))?;
    let ip = from.split(' ').next().and_then(parse_address).ok_or(Unreadable("no address"))?;
    // sshd tells operators that the account does not exist. To Threshold it is an account like any other.
    let name = name.strip_prefix("invalid user ").unwrap_or(name);
    Ok(Some(Request { at, ip: Some(ip), user: Some(name), status: Some(status), repeated, ..Request::default() }))
}

/// Whether a line that is no request of an access log is about a login.
pub(super) fn is_login(line: &str, moments: &mut MomentReader) -> bool {
    line.contains("sshd") && parse(line, moments).is_ok_and(|login| login.is_some())
}

/// Whether a JSON line has an account and an outcome, and nothing that a request has.
pub(super) fn looks_like_event(scalars: &Scalars<'_>) -> bool {
    let has = |field: Field| scalars.get(field).is_some();
    let is_request = [Field::Method, Field::Path, Field::Request].into_iter().any(has);
    !is_request && has(Field::Account) && scalars.get(Field::Success).is_some_and(|own| succeeded(own).is_some())
}

/// Builds a request from the fields of a JSON event.
pub(super) fn event<'s>(scalars: &'s Scalars<'_>, moments: &mut MomentReader) -> Result<Request<'s>, Unreadable> {
    let at = scalars.moment(moments).ok_or(Unreadable("no time that can be read"))?;
    let ip = scalars.text(Field::Ip).and_then(parse_address);
    let user = scalars.text(Field::Account);
    // With either of them there is something to count by.
    if ip.is_none() && user.is_none() {
        return Err(Unreadable("neither an account nor an address"));
    }
    let success = scalars.get(Field::Success).and_then(succeeded).ok_or(Unreadable("no outcome"))?;
    Ok(Request { at, ip, user, status: Some(if success { 200 } else { 401 }), ..Request::default() })
}

fn succeeded(scalar: &Scalar<'_>) -> Option<bool> {
    match scalar {
        Scalar::Truth(truth) => Some(*truth),
        // An HTTP status.
        Scalar::Number(number) if (200.0..600.0).contains(number) => Some(*number < 400.0),
        Scalar::Number(_) => None,
        Scalar::Text(text) => {
            let text = text.to_ascii_lowercase();
            let is = |words: &[&str]| words.contains(&text.as_str());
            if is(&IN) { Some(true) } else { is(&OUT).then_some(false) }
        }
    }
}

/// Splits syslog's `message repeated 3 times: [ … ]` into the message and the repetitions beyond the first.
fn repeated(message: &str) -> (&str, u64) {
    let inner = message.strip_prefix("message repeated ").and_then(|rest| rest.split_once(" times: [ "));
    match inner.and_then(|(times, rest)| Some((times.parse::<u64>().ok()?, rest))) {
        Some((times, rest)) => (rest.trim_end_matches(']').trim_end(), times.clamp(1, MAX_REPEATED).saturating_sub(1)),
        None => (message, 0),
    }
}

/// Splits off the time at the start: RFC 3339, or `May 17 10:05:03` without a year.
fn written_at<'a>(line: &'a str, moments: &mut MomentReader) -> Option<(super::Moment, &'a str)> {
    let (first, rest) = line.split_once(' ')?;
    if first.as_bytes().first().is_some_and(u8::is_ascii_digit) {
        return Some((moments.text(first)?, rest));
    }
    let rest = rest.trim_start();
    let (day, rest) = rest.split_once(' ')?;
    let (time, rest) = rest.split_once(' ')?;
    let now = Zoned::now().with_time_zone(jiff::tz::TimeZone::UTC);
    // The latest year with which the time is not in the future, with a day of tolerance for clocks and time zones.
    let latest = now.timestamp().as_microsecond().saturating_add(86_400_000_000);
    [0, 1].into_iter().find_map(|back| {
        let year = now.year().checked_sub(back)?;
        let at = moments.common(&format!("{day:0>2}/{first}/{year}:{time}"))?;
        // A log of December that is read in January has last year's dates.
        (i64::try_from(at.micros).ok()? <= latest).then_some((at, rest))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[track_caller]
    fn check(line: &str, expect: Option<(&str, &str, u16, u64)>) {
        let request = parse(line, &mut MomentReader::default()).unwrap();
        let found = request.map(|request| {
            (request.user.unwrap(), request.ip.unwrap().to_string(), request.status.unwrap(), request.repeated)
        });
        let expect = expect.map(|(user, ip, status, repeated)| (user, ip.to_owned(), status, repeated));
        assert_eq!(found, expect, "{line}");
    }

    #[test]
    fn sshd_lines_have_an_account_an_address_and_a_result() {
        let at = "2026-05-17T10:05:03.123456+02:00 host sshd[42]:";
        check(
            &format!("{at} Failed password for root from 192.0.2.1 port 4 ssh2"),
            Some(("root", "192.0.2.1", 401, 0)),
        );
        check(
            &format!("{at} Failed password for invalid user ad min from 2001:db8::1 port 4 ssh2"),
            Some(("ad min", "2001:db8::1", 401, 0)),
        );
        check(
            &format!("{at} Accepted publickey for ada from 192.0.2.1 port 4 ssh2: ED25519 SHA256:x"),
            Some(("ada", "192.0.2.1", 200, 0)),
        );
        check(
            &format!("{at} message repeated 3 times: [ Failed password for root from 192.0.2.1 port 4 ssh2]"),
            Some(("root", "192.0.2.1", 401, 2)),
        );
        check(&format!("{at} Connection closed by 192.0.2.1 port 4"), None);
        check("2026-05-17T10:05:03Z host CRON[1]: pam_unix(cron:session): opened", None);
        check(
            "May  7 10:05:03 host sshd[42]: Failed password for root from 192.0.2.1 port 4 ssh2",
            Some(("root", "192.0.2.1", 401, 0)),
        );
    }

    #[test]
    fn an_account_name_is_not_taken_for_an_address() {
        let line = "2026-05-17T10:05:03Z host sshd[42]: Failed password for invalid user x from 198.51.100.9 port 1 ssh2 \
                    from 192.0.2.1 port 4 ssh2";
        check(line, Some(("x from 198.51.100.9 port 1 ssh2", "192.0.2.1", 401, 0)));
    }

    #[test]
    fn a_line_without_a_year_is_never_in_the_future() {
        let now = Zoned::now().timestamp().as_microsecond();
        for month in ["Jan", "Jun", "Dec"] {
            let line =
                format!("{month} 28 10:05:03 host sshd[42]: Failed password for root from 192.0.2.1 port 4 ssh2");
            let at = parse(&line, &mut MomentReader::default()).unwrap().unwrap().at.micros;
            let ago = now - i64::try_from(at).unwrap();
            assert!((-86_400_000_000..=366 * 86_400_000_000).contains(&ago), "{month}: {ago}");
        }
    }

    #[test]
    fn json_events_have_many_words_for_the_result() {
        let fields = super::super::Fields::default();
        let check = |outcome: &str, expect: Option<u16>| {
            let line = format!("{{\"time\":1431856800,\"ip\":\"192.0.2.1\",\"email\":\"a@b.c\",{outcome}}}");
            let scalars = Scalars::read(&line, &fields).unwrap();
            let found = event(&scalars, &mut MomentReader::default());
            assert_eq!(found.ok().and_then(|event| event.status), expect, "{outcome}");
        };
        check("\"success\":true", Some(200));
        check("\"result\":\"FAILURE\"", Some(401));
        check("\"status\":401", Some(401));
        check("\"event\":{\"outcome\":\"success\"}", Some(200));
        check("\"success\":\"perhaps\"", None);
        check("\"x\":1", None);
    }

    #[test]
    fn a_line_without_a_time_is_unreadable() {
        assert!(
            parse("yesterday host sshd[1]: Failed password for a from 192.0.2.1", &mut MomentReader::default())
                .is_err()
        );
        assert!(super::super::moment::number_of_seconds(f64::NAN).is_none());
    }
}
