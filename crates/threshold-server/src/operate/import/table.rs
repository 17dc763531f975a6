//! Lists in CSV: any with a header, and CrowdSec's `cscli decisions list -o raw`.

use threshold_core::Span;
use threshold_core::limit::parse_span;
use threshold_core::text::printable;

use super::{BanFile, ListedBan, ListedEnd};

/// The names of the columns that are read, by their meaning. The first in the file counts.
const VALUE: [&str; 8] = ["value", "ip", "cidr", "network", "address", "key", "range", "prefix"];
const REASON: [&str; 4] = ["reason", "scenario", "comment", "description"];
const END: [&str; 5] = ["until", "expiration", "expires", "end", "duration"];

/// The fields of a decision, as CrowdSec names them.
#[derive(Debug, Default)]
pub(super) struct Decision<'a> {
    pub(super) value: Option<&'a str>,
    pub(super) scope: Option<&'a str>,
    pub(super) action: Option<&'a str>,
    pub(super) simulated: Option<&'a str>,
    /// A time in RFC 3339, Unix seconds, or a length such as `3h59m55s`.
    pub(super) end: Option<&'a str>,
}

/// Returns whether the first line is the header of a table: a list of names, one of which is a column of addresses.
pub(super) fn has_header(text: &str) -> bool {
    let first = text.lines().find(|line| !line.trim().is_empty()).unwrap_or_default();
    let mut names = first.split(',').map(|name| name.trim().trim_matches('"').to_ascii_lowercase());
    names.any(|name| VALUE.contains(&name.as_str()))
}

pub(super) fn read(text: &str, file: &mut BanFile) {
    // Flexible, because exported tables often lack trailing fields that are empty.
    let mut reader = csv::ReaderBuilder::new().flexible(true).trim(csv::Trim::Headers).from_reader(text.as_bytes());
    let names: Vec<String> = match reader.headers() {
        Ok(names) => names.iter().map(str::to_ascii_lowercase).collect(),
        Err(error) => return file.faults.push((1, error.to_string())),
    };
    let column = |wanted: &[&str]| names.iter().position(|name| wanted.contains(&name.as_str()));
    let (value, reason, end) = (column(&VALUE), column(&REASON), column(&END));
    let (scope, action, simulated) = (column(&["scope"]), column(&["action", "type"]), column(&["simulated"]));
    let layer = column(&["layer"]);
    for record in reader.records() {
        let record = match record {
            Ok(record) => record,
            Err(error) => {
                let line = error.position().map_or(0, csv::Position::line);
                file.faults.push((usize::try_from(line).unwrap_or(usize::MAX), error.to_string()));
                continue;
            }
        };
        let line = record.position().map_or(0, csv::Position::line);
        // A quote that is not closed makes the rest of the file one field, and its bans would be lifted.
        if record.iter().any(|field| field.contains('\n')) {
            file.faults.push((usize::try_from(line).unwrap_or(usize::MAX), "a quote is not closed".to_owned()));
            continue;
        }
        let raw = |at: Option<usize>| at.and_then(|at| record.get(at)).filter(|text| !text.trim().is_empty());
        let field = |at: Option<usize>| raw(at).map(str::trim);
        let ban = ListedBan {
            line: usize::try_from(line).unwrap_or(usize::MAX),
            layer: field(layer).map(str::to_owned),
            reason: field(reason).map(str::to_owned),
            ..ListedBan::default()
        };
        let decision = Decision {
            value: raw(value),
            scope: field(scope),
            action: field(action),
            simulated: field(simulated),
            end: field(end),
        };
        file.add(ban, &decision);
    }
}

impl BanFile {
    /// Adds a ban with the value and the end of a decision, or leaves it out if it is not a ban of an address.
    pub(super) fn add(&mut self, mut ban: ListedBan, decision: &Decision<'_>) {
        let Some(value) = decision.value else {
            return self.faults.push((ban.line, "there is no \"value\"".to_owned()));
        };
        // `cscli decisions list -o raw` has the scope in the same column: `Ip:203.0.113.7`.
        let (scope, value) = match value.split_once(':').filter(|_| ban.layer.is_none()) {
            Some((scope, value)) if scope.chars().all(char::is_alphabetic) && is_scope(scope) => (Some(scope), value),
            _ => (decision.scope, value),
        };
        // CrowdSec decides captchas and throttling too. To import those as bans would deny clients that it lets
        // through.
        if let Some(action) = decision.action.filter(|action| !action.eq_ignore_ascii_case("ban")) {
            return self.leave_out(format!("action {action}"));
        }
        if decision.simulated.is_some_and(|simulated| simulated.eq_ignore_ascii_case("true")) {
            return self.leave_out("simulated".to_owned());
        }
        let is_address = |scope: &str| scope.eq_ignore_ascii_case("ip") || scope.eq_ignore_ascii_case("range");
        if let Some(scope) = scope.filter(|scope| !is_address(scope)) {
            return self.leave_out(format!("scope {scope}"));
        }
        match decision.end.map(read_end).transpose() {
            Ok(end) => ban.end = end,
            Err(wrong) => return self.faults.push((ban.line, wrong)),
        }
        let is_name = ban.layer.as_deref().is_some_and(|layer| !matches!(layer, "edge" | "ip"));
        // Exactly this name is banned, and a table seldom means the blank after its comma.
        if is_name && value.trim() != value {
            let fault = format!("\"{}\" begins or ends with a blank: ban such a name by `bans add`", printable(value));
            return self.faults.push((ban.line, fault));
        }
        ban.key = value.trim().to_owned();
        self.bans.push(ban);
    }
}

/// Returns whether this is a scope of CrowdSec, and not the first group of an IPv6 address, such as `fade`.
fn is_scope(text: &str) -> bool {
    const SCOPES: [&str; 6] = ["ip", "range", "country", "as", "username", "session"];
    SCOPES.iter().any(|scope| text.eq_ignore_ascii_case(scope))
}

/// Reads the end of a ban.
fn read_end(text: &str) -> Result<ListedEnd, String> {
    if let Ok(at) = text.parse::<jiff::Timestamp>() {
        return Ok(ListedEnd::At(u64::try_from(at.as_second()).unwrap_or(0)));
    }
    if let Ok(at) = text.parse::<u64>() {
        return Ok(ListedEnd::At(at));
    }
    // CrowdSec lists decisions that have ended, with the time since then.
    if text.strip_prefix('-').and_then(go_duration).is_some() {
        return Ok(ListedEnd::At(0));
    }
    let span = parse_span(text).ok().or_else(|| go_duration(text));
    // At least a second: an entry without any length would be permanent.
    span.map(|span| ListedEnd::After(span.secs_ceil().max(1)))
        .ok_or_else(|| format!("\"{}\" is not a time or a length of time", printable(text)))
}

/// Reads a duration as Go writes it: `3h59m55.5s`.
fn go_duration(text: &str) -> Option<Span> {
    let mut rest = text.trim();
    let mut micros: u64 = 0;
    if rest.is_empty() {
        return None;
    }
    while !rest.is_empty() {
        let digits = rest.find(|c: char| !c.is_ascii_digit() && c != '.')?;
        let (number, after) = rest.split_at_checked(digits)?;
        let unit_end = after.find(|c: char| c.is_ascii_digit()).unwrap_or(after.len());
        let (unit, next) = after.split_at_checked(unit_end)?;
        let size: u64 = match unit {
            "h" => 3_600_000_000,
            "m" => 60_000_000,
            "s" => 1_000_000,
            "ms" => 1_000,
            "us" | "µs" => 1,
            // Less than the unit that is counted in.
            "ns" => 0,
            _ => return None,
        };
        let (whole, part) = number.split_once('.').unwrap_or((number, ""));
        let whole: u64 = whole.parse().ok()?;
        // Nine digits are a billionth; more are not written.
        let part: String = part.chars().chain("000000000".chars()).take(9).collect();
        let part: u128 = part.parse().ok()?;
        let part = u64::try_from(part.checked_mul(u128::from(size))?.checked_div(1_000_000_000)?).ok()?;
        micros = micros.checked_add(whole.checked_mul(size)?)?.checked_add(part)?;
        rest = next;
    }
    Some(Span::from_micros(micros))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// `cscli` prints the decisions of an alert that have ended too, with the time since their end. A list with one of them was
    /// refused as a whole.
    #[test]
    fn a_negative_duration_is_an_end_in_the_past() {
        for text in ["-1h2m3s", "-5m0s", "-0.5s"] {
            assert!(matches!(read_end(text), Ok(ListedEnd::At(0))), "{text}");
        }
        assert!(read_end("-").is_err() && read_end("-1x").is_err());
    }
}
