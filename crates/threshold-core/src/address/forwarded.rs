//! The `Forwarded` header field (RFC 7239), parsed from the right.
//!
//! A proxy appends its element to what its client sent, often on the same line. Parsed from the right, the elements of trusted
//! proxies are complete before anything that a client wrote is looked at, so that an open quote further left cannot swallow
//! them.

use std::borrow::Cow;
use std::net::IpAddr;

use super::{address_in, is_blank};

/// Returns the addresses of one line, nearest hop first; `None` for a hop that cannot be parsed.
///
/// Empty elements are left out. Where a quote stays open, nobody can tell which commas before it separate: the rest of the line is one
/// hop that cannot be parsed.
pub(super) fn hops(line: &[u8]) -> impl Iterator<Item = Option<IpAddr>> {
    let splits = std::iter::successors(Some(split_last(line)), |split| split.before.map(split_last));
    let splits = splits.filter(|split| !is_blank(split.element));
    splits.map(|split| if split.closed { address_of(split.element) } else { None })
}

/// The last element of a line, and the rest.
#[derive(Debug, Clone, Copy)]
struct Split<'l> {
    /// The line before the comma; `None` where there is no comma.
    before: Option<&'l [u8]>,
    element: &'l [u8],
    /// Whether all quotes of the element are closed.
    closed: bool,
}

/// Splits off the last element, at the last comma outside quotes.
fn split_last(line: &[u8]) -> Split<'_> {
    let mut quoted = false;
    for (at, byte) in line.iter().enumerate().rev() {
        match byte {
            b'"' if !quoted => quoted = true,
            // From the right, an escaped quote is still inside the string, and only an unescaped one opens it.
            b'"' => quoted = is_escaped(line, at),
            b',' if !quoted => {
                let (before, rest) = line.split_at(at);
                return Split { before: Some(before), element: rest.get(1..).unwrap_or_default(), closed: true };
            }
            _ => {}
        }
    }
    Split { before: None, element: line, closed: !quoted }
}

/// Returns whether a byte is escaped: an odd number of backslashes stands before it.
fn is_escaped(line: &[u8], at: usize) -> bool {
    let before = line.get(..at).unwrap_or_default();
    !before.iter().rev().take_while(|byte| **byte == b'\\').count().is_multiple_of(2)
}

/// Returns the address in the `for` parameter of an element; `None` if it is missing, given twice, `unknown`, obfuscated or
/// malformed.
fn address_of(element: &[u8]) -> Option<IpAddr> {
    let mut found = None;
    for pair in pairs(element) {
        // One malformed parameter spoils the element: nobody can tell which part of it is quoted.
        let (name, value) = pair?;
        // Two values: servers differ in which of them they take, so neither is believed.
        if name.eq_ignore_ascii_case(b"for") && found.replace(value).is_some() {
            return None;
        }
    }
    address_in(without_obfuscated_port(&found?))
}

/// Removes an obfuscated port, `:_id`. The address before it is still the real one (RFC 7239, 6).
fn without_obfuscated_port(node: &[u8]) -> &[u8] {
    let hidden = |port: &[u8]| port.iter().all(|byte| byte.is_ascii_alphanumeric() || b"._-".contains(byte));
    match node.iter().rposition(|byte| *byte == b':').and_then(|at| node.split_at_checked(at)) {
        Some((address, port)) if port.starts_with(b":_") && port.get(1..).is_some_and(hidden) => address,
        _ => node,
    }
}

/// The name and value of a parameter.
type Pair<'l> = (&'l [u8], Cow<'l, [u8]>);

/// Returns the parameters of an element, up to the first that cannot be parsed, which is `None`.
fn pairs(element: &[u8]) -> impl Iterator<Item = Option<Pair<'_>>> {
    let mut rest = Some(element);
    std::iter::from_fn(move || {
        let text = rest?.trim_ascii();
        if text.is_empty() {
            rest = None;
            return None;
        }
        let read = read_pair(text);
        rest = read.as_ref().and_then(|(_, rest)| *rest);
        Some(read.map(|(pair, _)| pair))
    })
}

/// Parses a parameter. Returns it and what follows its semicolon.
fn read_pair(text: &[u8]) -> Option<(Pair<'_>, Option<&[u8]>)> {
    let end = text.iter().position(|byte| matches!(byte, b'=' | b';' | b'"')).unwrap_or(text.len());
    let (name, rest) = text.split_at(end);
    let Some(value) = rest.strip_prefix(b"=") else {
        // A name without a value is ignored. A quote is not allowed in a name.
        let next = rest.strip_prefix(b";");
        return (rest.is_empty() || next.is_some()).then_some(((name, Cow::Borrowed(&[])), next));
    };
    let value = value.trim_ascii_start();
    let (value, rest) = match value.strip_prefix(b"\"") {
        Some(quoted) => read_quoted(quoted)?,
        None => {
            let end = value.iter().position(|byte| *byte == b';').unwrap_or(value.len());
            let (plain, rest) = value.split_at(end);
            (!plain.contains(&b'"')).then(|| (Cow::Borrowed(plain.trim_ascii()), rest))?
        }
    };
    let rest = rest.trim_ascii_start();
    let next = rest.strip_prefix(b";");
    (rest.is_empty() || next.is_some()).then_some(((name.trim_ascii(), value), next))
}

/// Parses a quoted string after its opening quote. Returns it unescaped, and what follows the closing quote.
fn read_quoted(text: &[u8]) -> Option<(Cow<'_, [u8]>, &[u8])> {
    let mut plain = Cow::Borrowed(&[][..]);
    let mut from = 0;
    let mut bytes = text.iter().enumerate();
    while let Some((at, byte)) = bytes.next() {
        let piece = || text.get(from..at);
        match byte {
            b'\\' => {
                plain.to_mut().extend_from_slice(piece()?);
                // A quoted pair stands for its second byte.
                from = bytes.next()?.0;
            }
            // No escape so far, as nearly always: nothing has to be copied.
            b'"' if from == 0 => return Some((Cow::Borrowed(piece()?), text.get(at.checked_add(1)?..)?)),
            b'"' => {
                plain.to_mut().extend_from_slice(piece()?);
                return Some((plain, text.get(at.checked_add(1)?..)?));
            }
            _ => {}
        }
    }
    None
}
