//! Compares the decoder with a slow one that reads byte by byte, and with itself on input that arrives in parts.

#![expect(
    clippy::arithmetic_side_effects,
    clippy::cast_possible_truncation,
    clippy::cast_sign_loss,
    reason = "a test that overflows fails"
)]

use proptest::prelude::*;

use super::decode::{Decoder, MAX_REQUEST, ProtocolError, Trust, integer};

/// Returns the number of cases of a property: `./test` tries more of them for ten seconds.
pub(super) fn cases(number: u32) -> u32 {
    number * std::env::var("THRESHOLD_LAW_FACTOR").map_or(1, |factor| factor.parse().unwrap())
}

/// The requests in some bytes, and the error that ends them.
type Requests = (Vec<Vec<Vec<u8>>>, Option<ProtocolError>);

/// Decodes bytes that arrive in parts of these sizes, as a connection does.
fn decode(bytes: &[u8], parts: &[usize], trust: Trust) -> Requests {
    let mut decoder = Decoder::default();
    let (mut requests, mut input) = (Vec::new(), Vec::new());
    let mut sizes = parts.iter().copied().cycle();
    let mut rest = bytes;
    while !rest.is_empty() {
        let (part, after) = rest.split_at(sizes.next().unwrap_or(rest.len()).clamp(1, rest.len()));
        input.extend_from_slice(part);
        rest = after;
        loop {
            match decoder.decode(&input, trust) {
                Ok(None) => break,
                Ok(Some(used)) => {
                    requests.push(decoder.arguments(&input).from(0).map(<[u8]>::to_vec).collect());
                    input.drain(..used);
                }
                Err(error) => return (requests, Some(error)),
            }
        }
    }
    (requests, None)
}

/// Where the slow decoder is in a request.
enum Place {
    Start,
    Line { kind: u8, line: Vec<u8>, arguments: Vec<Vec<u8>>, left: usize },
    Type { arguments: Vec<Vec<u8>>, left: usize },
    Bulk { bytes: Vec<u8>, length: usize, arguments: Vec<Vec<u8>>, left: usize },
    Inline(Vec<u8>),
}

/// The same one byte at a time, with a state in place of a position.
fn decode_slowly(bytes: &[u8], trust: Trust) -> Requests {
    let mut requests = Vec::new();
    let (mut place, mut size) = (Place::Start, 0);
    for byte in bytes.iter().copied() {
        size += 1;
        place = match step(place, byte, size, trust) {
            Ok(Ok(place)) => place,
            Ok(Err(request)) => {
                requests.push(request);
                size = 0;
                Place::Start
            }
            Err(error) => return (requests, Some(error)),
        };
    }
    (requests, None)
}

/// The place after a byte, or the request that it has ended.
fn step(place: Place, byte: u8, size: usize, trust: Trust) -> Result<Result<Place, Vec<Vec<u8>>>, ProtocolError> {
    let is_guest = trust == Trust::Unauthenticated;
    Ok(Ok(match place {
        Place::Start if byte == b'*' => Place::Line { kind: byte, line: vec![], arguments: vec![], left: 0 },
        Place::Start if byte == b'\n' => return Ok(Err(vec![])),
        Place::Start => Place::Inline(vec![byte]),
        Place::Type { arguments, left } if byte == b'$' => Place::Line { kind: byte, line: vec![], arguments, left },
        Place::Type { .. } => return Err(ProtocolError::ExpectedBulk(byte)),
        Place::Inline(line) if byte == b'\n' => {
            let words = split(&line).ok_or(ProtocolError::UnbalancedQuotes)?;
            let (most, error) = match is_guest {
                true => (10, ProtocolError::UnauthenticatedCount),
                false => (1_024, ProtocolError::InvalidCount),
            };
            return if words.len() > most { Err(error) } else { Ok(Err(words)) };
        }
        Place::Inline(_) if size >= MAX_REQUEST => return Err(ProtocolError::InlineTooBig),
        Place::Inline(mut line) => {
            line.push(byte);
            Place::Inline(line)
        }
        Place::Line { kind, mut line, arguments, left } => {
            let (too_big, invalid) = match kind {
                b'*' => (ProtocolError::CountTooBig, ProtocolError::InvalidCount),
                _ => (ProtocolError::LengthTooBig, ProtocolError::InvalidLength),
            };
            line.push(byte);
            let Some(end) = line.iter().position(|byte| *byte == b'\r') else {
                return if line.len() >= 32 {
                    Err(too_big)
                } else {
                    Ok(Ok(Place::Line { kind, line, arguments, left }))
                };
            };
            if line.len() == end + 1 {
                return Ok(Ok(Place::Line { kind, line, arguments, left }));
            }
            let number: i64 = std::str::from_utf8(&line[..end])
                .ok()
                .and_then(|text| text.parse().ok().filter(|number: &i64| byte == b'\n' && number.to_string() == text))
                .ok_or(invalid)?;
            match kind {
                b'*' if number <= 0 => return Ok(Err(vec![])),
                b'*' if is_guest && number > 10 => return Err(ProtocolError::UnauthenticatedCount),
                b'*' if number > 1_024 => return Err(invalid),
                b'*' => Place::Type { arguments, left: number as usize },
                _ if number < 0 => return Err(invalid),
                _ if is_guest && number > 16_384 => return Err(ProtocolError::UnauthenticatedLength),
                _ if number as u64 + size as u64 + 2 > MAX_REQUEST as u64 => return Err(ProtocolError::RequestTooBig),
                _ => Place::Bulk { bytes: vec![], length: number as usize, arguments, left },
            }
        }
        Place::Bulk { mut bytes, length, mut arguments, left } => {
            bytes.push(byte);
            match bytes.len() - length.min(bytes.len()) {
                0 => Place::Bulk { bytes, length, arguments, left },
                1 if byte == b'\r' => Place::Bulk { bytes, length, arguments, left },
                2 if byte == b'\n' => {
                    bytes.truncate(length);
                    arguments.push(bytes);
                    match left - 1 {
                        0 => return Ok(Err(arguments)),
                        left => Place::Type { arguments, left },
                    }
                }
                _ => return Err(ProtocolError::InvalidLength),
            }
        }
    }))
}

/// Splits an inline command, as `sdssplitargs` of Redis does, with a state for each byte.
fn split(line: &[u8]) -> Option<Vec<Vec<u8>>> {
    #[derive(PartialEq)]
    enum In {
        Space,
        Word,
        /// A closing quote, after which a space must follow.
        Closed,
        Quotes(u8),
    }
    let (mut words, mut state, mut at) = (Vec::<Vec<u8>>::new(), In::Space, 0);
    while let Some(byte) = line.get(at).copied() {
        at += 1;
        let is_space = byte.is_ascii_whitespace();
        match state {
            In::Space if is_space => continue,
            In::Closed if !is_space => return None,
            In::Closed | In::Word if is_space => {
                state = In::Space;
                continue;
            }
            In::Space => {
                words.push(Vec::new());
                state = In::Word;
            }
            _ => {}
        }
        let word = words.last_mut().unwrap();
        match (&state, byte) {
            (In::Word, b'"' | b'\'') => state = In::Quotes(byte),
            (In::Quotes(quote), byte) if byte == *quote => state = In::Closed,
            (In::Quotes(b'"'), b'\\') if line.get(at).is_some() => {
                let hex = line.get(at + 1..at + 3).and_then(|hex| std::str::from_utf8(hex).ok());
                let hex = hex.filter(|hex| !hex.contains('+')).and_then(|hex| u8::from_str_radix(hex, 16).ok());
                match (line[at], hex) {
                    (b'x', Some(value)) => {
                        word.push(value);
                        at += 3;
                    }
                    (escaped, _) => {
                        let meant = [(b'n', b'\n'), (b'r', b'\r'), (b't', b'\t'), (b'b', 8), (b'a', 7)];
                        word.push(meant.iter().find(|(name, _)| *name == escaped).map_or(escaped, |(_, value)| *value));
                        at += 1;
                    }
                }
            }
            (In::Quotes(b'\''), b'\\') if line.get(at) == Some(&b'\'') => {
                word.push(b'\'');
                at += 1;
            }
            (_, byte) => word.push(byte),
        }
    }
    (!matches!(state, In::Quotes(_))).then_some(words)
}

/// Bytes that are often almost a request.
fn input() -> impl Strategy<Value = Vec<u8>> {
    let pieces = prop::sample::select(vec![
        &b"*"[..],
        b"$",
        b"\r\n",
        b"\n",
        b"\r",
        b" ",
        b"\"",
        b"'",
        b"\\",
        b"\\x41",
        b"0",
        b"1",
        b"2",
        b"4",
        b"10",
        b"11",
        b"-1",
        b"+1",
        b"16384",
        b"16385",
        b"65000",
        b"65536",
        b"1024",
        b"1025",
        b"99999999999999999999",
        b"PING",
        b"*1\r\n",
        b"$4\r\n",
        b"*1\r\n$4\r\nPING\r\n",
        b"*2\r\n$4\r\nECHO\r\n$3\r\nabc\r\n",
        b"$0\r\n\r\n",
        b"\0",
        b"\xff",
        b"x",
    ]);
    prop_oneof![
        prop::collection::vec(pieces, 0..40).prop_map(|pieces| pieces.concat()),
        prop::collection::vec(any::<u8>(), 0..60),
        edited(),
        // Large values, whose bounds are met or not.
        (0_usize..70_000, any::<bool>()).prop_map(|(size, inline)| match inline {
            true => [&vec![b'a'; size][..], b"\r\nPING\r\n"].concat(),
            false =>
                [format!("*2\r\n$4\r\nECHO\r\n${size}\r\n").as_bytes(), &vec![b'a'; size], b"\r\nPING\r\n"].concat(),
        }),
    ]
}

/// Valid requests, of which some bytes are changed, left out or repeated.
fn edited() -> impl Strategy<Value = Vec<u8>> {
    let valid = prop::sample::select(vec![
        "*1\r\n$4\r\nPING\r\n",
        "*3\r\n$4\r\nECHO\r\n$0\r\n\r\n$12\r\ntwelve bytes\r\n",
        "ECHO \"a\\x41\\n\" 'it\\'s'\r\n",
        "*5\r\n$11\r\nCL.THROTTLE\r\n$1\r\nk\r\n$1\r\n1\r\n$1\r\n1\r\n$1\r\n1\r\n",
    ]);
    let edits = prop::collection::vec((any::<prop::sample::Index>(), 0..3, any::<u8>()), 0..3);
    (prop::collection::vec(valid, 1..4), edits).prop_map(|(requests, edits)| {
        let mut bytes = requests.concat().into_bytes();
        for (place, kind, byte) in edits {
            let at = place.index(bytes.len());
            match kind {
                0 => bytes[at] = byte,
                1 => drop(bytes.remove(at)),
                _ => bytes.insert(at, bytes[at]),
            }
        }
        bytes
    })
}

fn trust() -> impl Strategy<Value = Trust> {
    prop::sample::select(vec![Trust::Authenticated, Trust::Unauthenticated])
}

proptest! {
    #![proptest_config(ProptestConfig { cases: cases(512), ..ProptestConfig::default() })]

    /// Woken by: leaving out the check of CRLF after a bulk string, or of the count before authentication; `<=` in place of `<` for
    /// the length of an inline command; taking `\x4` for a whole escape.
    #[test]
    fn any_bytes_are_decoded_as_by_a_slow_decoder(bytes in input(), trust in trust()) {
        prop_assert_eq!(decode(&bytes, &[bytes.len()], trust), decode_slowly(&bytes, trust));
    }

    /// Woken by: looking for the end of a length in all that has arrived.
    #[test]
    fn the_requests_do_not_depend_on_how_the_bytes_arrive(
        bytes in input(),
        parts in prop::collection::vec(1_usize..9, 1..6),
        trust in trust(),
    ) {
        // Thousands of parts of a large request would only take long.
        let parts: Vec<usize> = parts.into_iter().map(|part| part.max(bytes.len() / 64)).collect();
        prop_assert_eq!(decode(&bytes, &parts, trust), decode(&bytes, &[bytes.len()], trust));
    }

    #[test]
    fn numbers_are_those_of_the_standard_library_without_a_plus(text in "[-+]?[0-9]{0,21}") {
        let expected = text.parse::<i64>().ok().filter(|_| !text.starts_with('+'));
        prop_assert_eq!(integer(text.as_bytes()), expected);
    }
}

/// The texts are those of Redis, which clients and scanners know.
#[test]
fn bytes_that_are_no_request_get_the_errors_of_redis() {
    let (known, unknown) = (Trust::Authenticated, Trust::Unauthenticated);
    let long = "a".repeat(MAX_REQUEST);
    let cases = [
        ("*x\r\n", known, "invalid multibulk length"),
        ("*2147483648\r\n", known, "invalid multibulk length"),
        ("*01\r\n", known, "invalid multibulk length"),
        ("*-0\r\n", known, "invalid multibulk length"),
        ("*1\r\n$04\r\n", known, "invalid bulk length"),
        ("*11\r\n", unknown, "unauthenticated multibulk length"),
        ("*00000000000000000000000000000000000", known, "too big mbulk count string"),
        ("*1\r\n:1\r\n", known, "expected '$', got ':'"),
        ("*1\r\n\r\n", known, "expected '$', got '?'"),
        ("*1\r\n$-1\r\n", known, "invalid bulk length"),
        ("*1\r\n$x\r\n", known, "invalid bulk length"),
        ("*1\r\n$16385\r\n", unknown, "unauthenticated bulk length"),
        ("*1\r\n$00000000000000000000000000000000000", known, "too big bulk count string"),
        ("*1\r\n$65536\r\n", known, "too big request: at most 65536 bytes"),
        ("*1\r\n$4\r\nPINGPONG", known, "invalid bulk length"),
        ("ECHO \"a\r\n", known, "unbalanced quotes in request"),
        ("ECHO \"a\"b\r\n", known, "unbalanced quotes in request"),
        (&long, known, "too big inline request"),
    ];
    for (bytes, trust, expected) in cases {
        let (requests, error) = decode(bytes.as_bytes(), &[bytes.len()], trust);
        let shown: String = bytes.chars().take(40).collect();
        assert_eq!((requests.len(), error.unwrap().to_string()), (0, format!("Protocol error: {expected}")), "{shown}");
    }
    // The largest that are accepted before authentication.
    let largest = format!("*10\r\n${}\r\n{}\r\n{}", 16_384, "a".repeat(16_384), "$1\r\nb\r\n".repeat(9));
    let (requests, error) = decode(largest.as_bytes(), &[largest.len()], unknown);
    assert_eq!((requests.first().map(Vec::len), error), (Some(10), None));
}
