//! `threshold tail`: prints events as they come.

use std::io::{BufRead, ErrorKind, Read as _, Write};
use std::time::Duration;

use anyhow::bail;
use serde_json::Value;
use threshold_core::text::printable;

use super::api::Refused;
use super::{Api, TailArgs, encoded, shown};
use crate::print_error;
use threshold_rehearsal::Report;

/// The longest line that is read: many times the longest event.
const MAX_LINE: u64 = 1 << 20;
/// How long to wait before a server that is gone is called again, and the longest that the wait may become.
const FIRST_WAIT: Duration = Duration::from_millis(100);
const LONGEST_WAIT: Duration = Duration::from_secs(10);

pub(crate) fn run(args: &TailArgs) -> anyhow::Result<Report> {
    let filters = args.filters.iter().map(|(name, value)| format!("{}={}", encoded(name), encoded(value)));
    let path = format!("/v1/events?{}", filters.collect::<Vec<_>>().join("&"));
    let api = Api::endless(&args.server)?;
    // The first time, a server that cannot be reached is an error: its name may be wrong.
    let mut stream = api.stream(&path, None)?;
    let mut tail = Tail { json: args.json, newest: None };
    let mut out = std::io::stdout().lock();
    while tail.print(&mut stream, &mut out)? == Ended::Stream {
        print_error(&format!("{} has ended the stream; connecting again", api.server()));
        stream = connect_again(|| api.stream(&path, tail.newest))?;
        print_error(&format!("{} streams again", api.server()));
    }
    Ok(Report { text: String::new(), code: 0 })
}

/// What has ended.
#[derive(Debug, PartialEq, Eq)]
enum Ended {
    Stream,
    /// A closed pipe (`| head`) is not an error.
    Output,
}

struct Tail {
    json: bool,
    /// The number of the newest event, after which the next stream begins.
    newest: Option<u64>,
}

impl Tail {
    /// Prints the events of a stream until it ends.
    fn print(&mut self, stream: &mut impl BufRead, out: &mut impl Write) -> anyhow::Result<Ended> {
        let (mut line, mut number) = (Vec::new(), self.newest);
        loop {
            line.clear();
            match stream.by_ref().take(MAX_LINE).read_until(b'\n', &mut line) {
                // A line without an end may be cut off.
                Ok(_) if line.last() == Some(&b'\n') => {}
                Ok(read) if u64::try_from(read)? == MAX_LINE => {
                    bail!("the server sends a line of more than {MAX_LINE} bytes, which no event has");
                }
                Ok(_) => return Ok(Ended::Stream),
                Err(error) if error.kind() == ErrorKind::Interrupted => continue,
                Err(_) => return Ok(Ended::Stream),
            }
            let line = String::from_utf8_lossy(&line);
            let line = line.trim_end();
            if let Some(text) = line.strip_prefix("id: ") {
                number = text.parse().ok();
            } else if let Some(event) = line.strip_prefix("data: ") {
                let text = if self.json { printable(event).into_owned() } else { described(event) };
                if writeln!(out, "{text}").and_then(|()| out.flush()).is_err() {
                    return Ok(Ended::Output);
                }
                self.newest = number;
            } else if line.is_empty() {
                // The number of an event that was cut off does not count: the next stream sends it again.
                self.newest = number;
            }
        }
    }
}

/// Connects as soon as the server answers again. An error that says that it never will is returned, such as that of a token that is no
/// longer accepted.
fn connect_again<S>(connect: impl Fn() -> anyhow::Result<S>) -> anyhow::Result<S> {
    let mut wait = FIRST_WAIT;
    let mut told = String::new();
    loop {
        std::thread::sleep(wait);
        let error = match connect() {
            Ok(stream) => return Ok(stream),
            Err(error) => error,
        };
        if error.downcast_ref::<Refused>().is_some_and(|refused| !refused.status.is_server_error()) {
            return Err(error);
        }
        let reason = format!("{error:#}; trying again");
        if reason != told {
            print_error(&reason);
            told = reason;
        }
        wait = wait.saturating_mul(2).min(LONGEST_WAIT);
    }
}

/// Describes an event on one line.
fn described(event: &str) -> String {
    let Ok(event) = serde_json::from_str::<Value>(event) else { return String::new() };
    let field = |name: &str| event.get(name).unwrap_or(&Value::Null);
    let mut text = format!("{}  {:<5}", time(field("at")), shown(field("verdict")));
    for (name, word) in
        [("layer", ""), ("rule", ""), ("endpoint", ""), ("tenant", "tenant "), ("userId", "user "), ("ip", "address ")]
    {
        if !field(name).is_null() {
            text.push_str(&format!("  {word}{}", shown(field(name))));
        }
    }
    if let Some(strikes) = field("strikes").as_u64() {
        text.push_str(&format!("  strike {strikes}"));
    }
    if let Some(count @ 2..) = field("count").as_u64() {
        text.push_str(&format!("  ×{count}"));
    }
    if !field("traceId").is_null() {
        text.push_str(&format!("  trace {}", shown(field("traceId"))));
    }
    printable(&text).into_owned()
}

/// Formats a time in Unix milliseconds with all three digits of them, so that what follows stays in its column.
fn time(value: &Value) -> String {
    let at = value.as_i64().and_then(|millis| jiff::Timestamp::from_millisecond(millis).ok());
    at.map_or_else(|| shown(value), |at| format!("{at:.3}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn printed(stream: &[u8]) -> (anyhow::Result<Ended>, Option<u64>, String) {
        let (mut tail, mut out) = (Tail { json: true, newest: None }, Vec::new());
        let ended = tail.print(&mut &*stream, &mut out);
        (ended, tail.newest, String::from_utf8(out).unwrap())
    }

    /// The columns of `tail` moved where the time of an event ended in a zero.
    #[test]
    fn every_time_has_three_digits_of_milliseconds() {
        for (at, text) in [(19_840, "1970-01-01T00:00:19.840Z"), (20_000, "1970-01-01T00:00:20.000Z")] {
            assert_eq!(time(&at.into()), text);
        }
    }

    /// Woken by reading with `lines`, which has no bound, by printing what was cut off, and by counting its number.
    #[test]
    fn a_line_has_a_bound_and_one_that_is_cut_off_is_not_printed() {
        let (ended, newest, out) = printed(b"retry: 1000\nid: 7\n\nid: 8\ndata: {\"a\":1}\n\nid: 9\ndata: {\"a\"");
        assert_eq!((ended.unwrap(), newest, out.as_str()), (Ended::Stream, Some(8), "{\"a\":1}\n"));
        let most = usize::try_from(MAX_LINE).unwrap();
        let line = |length: usize| [b"data: ", " ".repeat(length - 8).as_bytes(), b"1\n"].concat();
        let (ended, _, out) = printed(&line(most));
        assert_eq!((ended.unwrap(), out.len()), (Ended::Stream, most - 6));
        let (ended, _, out) = printed(&line(most + 1));
        assert!(ended.unwrap_err().to_string().contains("more than 1048576 bytes") && out.is_empty(), "{out}");
    }
}
