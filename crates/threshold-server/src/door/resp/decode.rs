//! Decodes RESP requests: arrays of bulk strings, and inline commands.

use std::fmt;
use std::ops::Range;

use memchr::memchr;

/// The largest request, in bytes: Redis's bound on an inline command. A key with its figures takes far less.
pub(super) const MAX_REQUEST: usize = 64 << 10;
/// The most arguments of a request. `COMMAND INFO` has the most, and there are far fewer commands.
const MAX_ARGUMENTS: usize = 1_024;
/// The most arguments before authentication, as in Redis.
const MAX_UNAUTHENTICATED_ARGUMENTS: usize = 10;
/// The largest argument before authentication, in bytes, as in Redis.
const MAX_UNAUTHENTICATED_BULK: usize = 16_384;
/// The longest line with a length: a sign and the digits of any 64-bit number, and the bytes around them.
const MAX_LENGTH_LINE: usize = 32;
/// Room for arguments that is kept from one request to the next.
const KEPT_ARGUMENTS: usize = 64;

/// Whether a client has authenticated, or needs not to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Trust {
    Authenticated,
    Unauthenticated,
}

/// Why bytes are no request. The connection cannot go on, because the end of the request is unknown. The texts are Redis's.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum ProtocolError {
    InlineTooBig,
    UnbalancedQuotes,
    CountTooBig,
    InvalidCount,
    UnauthenticatedCount,
    ExpectedBulk(u8),
    LengthTooBig,
    InvalidLength,
    UnauthenticatedLength,
    /// Not one of Redis's, which accepts a gigabyte.
    RequestTooBig,
}

impl fmt::Display for ProtocolError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Protocol error: ")?;
        match self {
            Self::InlineTooBig => f.write_str("too big inline request"),
            Self::UnbalancedQuotes => f.write_str("unbalanced quotes in request"),
            Self::CountTooBig => f.write_str("too big mbulk count string"),
            Self::InvalidCount => f.write_str("invalid multibulk length"),
            Self::UnauthenticatedCount => f.write_str("unauthenticated multibulk length"),
            // A line break would end the error.
            Self::ExpectedBulk(byte) => {
                let shown = if byte.is_ascii_graphic() { char::from(*byte) } else { '?' };
                write!(f, "expected '$', got '{shown}'")
            }
            Self::LengthTooBig => f.write_str("too big bulk count string"),
            Self::InvalidLength => f.write_str("invalid bulk length"),
            Self::UnauthenticatedLength => f.write_str("unauthenticated bulk length"),
            Self::RequestTooBig => write!(f, "too big request: at most {MAX_REQUEST} bytes"),
        }
    }
}

/// The decoder of one connection. It keeps the memory for arguments, so that a request allocates nothing.
#[derive(Debug, Default)]
pub(super) struct Decoder {
    /// Where the arguments are: in the input, or in `unquoted` for an inline command.
    arguments: Vec<Range<usize>>,
    unquoted: Vec<u8>,
    is_inline: bool,
}

/// The arguments of a request, the command's name first.
#[derive(Debug, Clone, Copy)]
pub(super) struct Arguments<'a> {
    bytes: &'a [u8],
    ranges: &'a [Range<usize>],
}

impl<'a> Arguments<'a> {
    pub(super) fn len(&self) -> usize {
        self.ranges.len()
    }

    pub(super) fn get(&self, place: usize) -> Option<&'a [u8]> {
        self.ranges.get(place).and_then(|range| self.bytes.get(range.clone()))
    }

    /// Returns the arguments from a place on.
    pub(super) fn from(&self, place: usize) -> impl Iterator<Item = &'a [u8]> {
        let Self { bytes, ranges } = *self;
        ranges.iter().skip(place).filter_map(move |range| bytes.get(range.clone()))
    }
}

impl Decoder {
    /// Decodes the request at the beginning of `input`, and returns its length; `None` if it is not complete.
    ///
    /// The result depends only on the bytes, and not on how they were split on their way.
    ///
    /// # Errors
    /// If the bytes are no request, or one beyond a bound. This is found out from the announced lengths, before the rest arrives.
    pub(super) fn decode(&mut self, input: &[u8], trust: Trust) -> Result<Option<usize>, ProtocolError> {
        if self.arguments.capacity() > KEPT_ARGUMENTS || self.unquoted.capacity() > MAX_REQUEST / 4 {
            *self = Self::default();
        }
        self.arguments.clear();
        self.unquoted.clear();
        match input.first() {
            None => Ok(None),
            Some(b'*') => self.array(input, trust),
            Some(_) => self.inline(input, trust),
        }
    }

    /// Returns the arguments of the request that was decoded last; none for an empty one. `input` is the same as for that.
    pub(super) fn arguments<'a>(&'a self, input: &'a [u8]) -> Arguments<'a> {
        Arguments { bytes: if self.is_inline { &self.unquoted } else { input }, ranges: &self.arguments }
    }

    fn array(&mut self, input: &[u8], trust: Trust) -> Result<Option<usize>, ProtocolError> {
        self.is_inline = false;
        let (too_big, invalid) = (ProtocolError::CountTooBig, ProtocolError::InvalidCount);
        let Some((count, mut at)) = length(input, 0, (too_big, invalid))? else { return Ok(None) };
        // An empty array, or a null one, is no command and has no reply.
        let Ok(count) = usize::try_from(count) else { return Ok(Some(at)) };
        if trust == Trust::Unauthenticated && count > MAX_UNAUTHENTICATED_ARGUMENTS {
            return Err(ProtocolError::UnauthenticatedCount);
        }
        if count > MAX_ARGUMENTS {
            return Err(ProtocolError::InvalidCount);
        }
        for _ in 0..count {
            let Some(argument) = bulk(input, at, trust)? else { return Ok(None) };
            at = argument.end.saturating_add(2);
            self.arguments.push(argument);
        }
        Ok(Some(at))
    }

    fn inline(&mut self, input: &[u8], trust: Trust) -> Result<Option<usize>, ProtocolError> {
        self.is_inline = true;
        let within = input.get(..MAX_REQUEST).unwrap_or(input);
        let Some(end) = memchr(b'\n', within) else {
            return if within.len() < MAX_REQUEST { Ok(None) } else { Err(ProtocolError::InlineTooBig) };
        };
        let most = match trust {
            Trust::Authenticated => MAX_ARGUMENTS,
            Trust::Unauthenticated => MAX_UNAUTHENTICATED_ARGUMENTS,
        };
        let mut rest = input.get(..end).unwrap_or_default();
        loop {
            rest = rest.trim_ascii_start();
            if rest.is_empty() {
                return Ok(Some(end.saturating_add(1)));
            }
            if self.arguments.len() >= most {
                let is_trusted = trust == Trust::Authenticated;
                return Err(if is_trusted { ProtocolError::InvalidCount } else { ProtocolError::UnauthenticatedCount });
            }
            let start = self.unquoted.len();
            rest = unquote(rest, &mut self.unquoted).ok_or(ProtocolError::UnbalancedQuotes)?;
            self.arguments.push(start..self.unquoted.len());
        }
    }
}

/// Reads a line with a length, such as `*3` or `$11`, and returns the length and where the line ends; `None` if it is not complete.
fn length(
    input: &[u8],
    at: usize,
    (too_big, invalid): (ProtocolError, ProtocolError),
) -> Result<Option<(i64, usize)>, ProtocolError> {
    let line = input.get(at.saturating_add(1)..).unwrap_or_default();
    let within = line.get(..MAX_LENGTH_LINE).unwrap_or(line);
    let Some(end) = memchr(b'\r', within) else {
        return if within.len() < MAX_LENGTH_LINE { Ok(None) } else { Err(too_big) };
    };
    let Some(after) = line.get(end.saturating_add(1)) else { return Ok(None) };
    let number = plain_integer(line.get(..end).unwrap_or_default()).filter(|_| *after == b'\n').ok_or(invalid)?;
    // The type byte before the line, and CRLF after it.
    Ok(Some((number, at.saturating_add(end).saturating_add(3))))
}

/// Reads a bulk string, and returns where its bytes are; `None` if it is not complete.
fn bulk(input: &[u8], at: usize, trust: Trust) -> Result<Option<Range<usize>>, ProtocolError> {
    match input.get(at) {
        None => return Ok(None),
        Some(b'$') => {}
        Some(other) => return Err(ProtocolError::ExpectedBulk(*other)),
    }
    let (too_big, invalid) = (ProtocolError::LengthTooBig, ProtocolError::InvalidLength);
    let Some((length, start)) = length(input, at, (too_big, invalid))? else { return Ok(None) };
    let length = usize::try_from(length).map_err(|_| invalid)?;
    if trust == Trust::Unauthenticated && length > MAX_UNAUTHENTICATED_BULK {
        return Err(ProtocolError::UnauthenticatedLength);
    }
    let end = start.saturating_add(length);
    if end.saturating_add(2) > MAX_REQUEST {
        return Err(ProtocolError::RequestTooBig);
    }
    match (input.get(end), input.get(end.saturating_add(1))) {
        (Some(b'\r'), Some(b'\n')) => Ok(Some(start..end)),
        (None, _) | (Some(b'\r'), None) => Ok(None),
        // Redis skips two bytes, whatever they are. A client that counted wrongly would then go on with other requests than it meant.
        _ => Err(ProtocolError::InvalidLength),
    }
}

/// Parses a whole number as Redis does: one spelling for each, without zeros at the beginning.
pub(super) fn plain_integer(text: &[u8]) -> Option<i64> {
    let has_zeros = matches!(text, [b'0', _, ..] | [b'-', b'0', ..]);
    if has_zeros { None } else { integer(text) }
}

/// Parses a whole number: decimal digits, and perhaps a minus.
pub(super) fn integer(text: &[u8]) -> Option<i64> {
    // Most numbers are short, and cannot overflow.
    if text.len() <= 18
        && let [first, rest @ ..] = text
        && first.is_ascii_digit()
    {
        return rest.iter().try_fold(i64::from(first ^ b'0'), |number, byte| {
            let digit = byte.is_ascii_digit().then(|| i64::from(byte ^ b'0'))?;
            number.checked_mul(10)?.checked_add(digit)
        });
    }
    // `parse` accepts a plus.
    let text = std::str::from_utf8(text).ok().filter(|text| !text.starts_with('+'))?;
    text.parse().ok()
}

/// Appends the first argument of a line to `into`, and returns the rest; `None` for quotes that do not end with their argument.
fn unquote<'l>(line: &'l [u8], into: &mut Vec<u8>) -> Option<&'l [u8]> {
    let mut rest = line;
    loop {
        let (byte, after) = match rest.split_first() {
            None => return Some(rest),
            Some((byte, _)) if byte.is_ascii_whitespace() => return Some(rest),
            Some(split) => split,
        };
        rest = match byte {
            b'"' | b'\'' => {
                let after = quoted(after, *byte, into)?;
                // The closing quote ends the argument.
                return after.first().is_none_or(u8::is_ascii_whitespace).then_some(after);
            }
            _ => {
                into.push(*byte);
                after
            }
        };
    }
}

/// Appends the bytes up to the closing quote, and returns what is after it.
fn quoted<'l>(line: &'l [u8], quote: u8, into: &mut Vec<u8>) -> Option<&'l [u8]> {
    let mut rest = line;
    loop {
        rest = match rest {
            [] => return None,
            [byte, after @ ..] if *byte == quote => return Some(after),
            [b'\\', b'x', high, low, after @ ..]
                if quote == b'"' && high.is_ascii_hexdigit() && low.is_ascii_hexdigit() =>
            {
                into.push(hex(*high) << 4 | hex(*low));
                after
            }
            [b'\\', escaped, after @ ..] if quote == b'"' => {
                into.push(match escaped {
                    b'n' => b'\n',
                    b'r' => b'\r',
                    b't' => b'\t',
                    b'b' => 8,
                    b'a' => 7,
                    other => *other,
                });
                after
            }
            [b'\\', b'\'', after @ ..] if quote == b'\'' => {
                into.push(b'\'');
                after
            }
            [byte, after @ ..] => {
                into.push(*byte);
                after
            }
        };
    }
}

/// Returns the value of a hexadecimal digit.
fn hex(digit: u8) -> u8 {
    char::from(digit).to_digit(16).and_then(|value| u8::try_from(value).ok()).unwrap_or(0)
}
