//! The readings of a path: everything that routers may take it for, where they differ.
//!
//! One server resolves `..` and the next matches it as it stands; one decodes `%2f` before it matches and the next after.
//! A rule that holds for one reading alone is dodged by a spelling that the application reads in another way. So a path
//! has every reading that a combination of these differences gives, and a request meets the rules of all of them.

use super::{decoded, decoded_bytes, escape, push_escape, strip_authority};

/// The longest path that is matched, in bytes: as long as the longest line of a header that nginx takes by default.
pub const MAX_PATH: usize = 8 << 10;
/// The most readings of one path.
pub const MAX_READINGS: usize = 8;
/// The most differences between routers that are combined, apart from dot segments. Four of them in one path are 16
/// combinations, and nobody's.
const MAX_DIFFERENCES: usize = 4;
/// The most `.` and `..` segments of one path: each is a place where a reading may end.
const MAX_DOT_SEGMENTS: usize = 64;

/// The reasons why a path is not matched.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum PathError {
    /// The path is longer than [`MAX_PATH`].
    #[error("the path is longer than {MAX_PATH} bytes")]
    TooLong,
    /// The path has, or may have, more than [`MAX_READINGS`] readings.
    #[error("servers may read the path in more than {MAX_READINGS} ways")]
    TooManyReadings,
    /// The path has a `.` or `..` segment, and `odd_paths` refuses it.
    #[error("the path has a dot segment (. or ..)")]
    DotSegment,
    /// The path has a backslash, and `odd_paths` refuses it.
    #[error("the path has a backslash")]
    Backslash,
    /// The path has a control character, and `odd_paths` refuses it.
    #[error("the path has a control character")]
    ControlCharacter,
    /// The path has a number sign that is not encoded, and `odd_paths` refuses it.
    #[error("the path has a number sign that is not encoded")]
    NumberSign,
    /// Two readings of the path name different callers.
    #[error("servers may read different callers from the path")]
    AmbiguousIdentity,
}

/// The readings of a path besides its one spelling, which comes first.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Readings(Vec<String>);

impl Readings {
    /// The one reading of an ordinary path.
    pub(crate) fn of(spelled: &str) -> Self {
        Self(vec![spelled.to_owned()])
    }

    /// One more reading, unless it is known.
    pub(crate) fn add(&mut self, reading: String) -> Result<(), PathError> {
        if self.0.contains(&reading) {
            return Ok(());
        }
        if self.0.len() >= MAX_READINGS {
            return Err(PathError::TooManyReadings);
        }
        self.0.push(reading);
        Ok(())
    }

    /// All of them, the one spelling first.
    pub(crate) fn all(&self) -> &[String] {
        &self.0
    }

    /// All but the one spelling, the last first.
    pub(crate) fn into_others(self) -> impl Iterator<Item = String> {
        self.0.into_iter().skip(1).rev()
    }

    /// As it reads to a router, and without the controls at its end: `$` in a regular expression matches before a line
    /// feed, and some servers trim.
    fn add_trimmed(&mut self, reading: &str) -> Result<(), PathError> {
        // One that is known was trimmed when it was added. Most are known.
        if self.0.iter().any(|known| known == reading) {
            return Ok(());
        }
        self.add(reading.to_owned())?;
        self.add_trim_of(reading)
    }

    fn add_trim_of(&mut self, reading: &str) -> Result<(), PathError> {
        let trimmed = trim_controls(reading);
        if trimmed.len() == reading.len() { Ok(()) } else { self.add(trimmed.to_owned()) }
    }
}

/// What is done with paths that have dot segments, backslashes or control characters.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum OddPaths {
    /// Doors that face clients answer 400.
    #[default]
    Refuse,
    /// They meet the rules of all their readings.
    Match,
}

/// Whether servers may read a path differently, at a glance: a path of letters, digits and single slashes they do not.
pub(crate) fn may_differ(path: &str) -> bool {
    let mut before = b'/';
    for (at, byte) in strip_authority(path).bytes().enumerate() {
        match byte {
            b'?' => break,
            b'%' | b';' | b'\\' | b'#' | 0..=b' ' | 0x7f.. => return true,
            b'.' if before == b'/' => return true,
            b'/' if before == b'/' && at == 1 => return true,
            _ => before = byte,
        }
    }
    path.len() > MAX_PATH
}

/// All readings of a path whose one spelling is `spelled`.
pub(crate) fn read(path: &str, spelled: &str, odd: OddPaths) -> Result<Readings, PathError> {
    read_counting(path, spelled, odd, &mut |_| {})
}

/// As [`read`]; tells `work` of each step and how many bytes it took.
fn read_counting(
    path: &str,
    spelled: &str,
    odd: OddPaths,
    work: &mut impl FnMut(usize),
) -> Result<Readings, PathError> {
    if path.len() > MAX_PATH {
        return Err(PathError::TooLong);
    }
    let path = strip_authority(path).split('?').next().unwrap_or_default();
    let characters: Characters = decoded(path).collect();
    let survey = Survey::of(&signs_of(&characters));
    if let Some(error) = survey.oddity().filter(|_| odd == OddPaths::Refuse) {
        return Err(error);
    }
    let mut readings = Readings::of(spelled);
    readings.add_trim_of(spelled)?;
    let decodings = Decoding::that_matter(&characters);
    for combination in 0u32..1 << decodings.len() {
        let mut characters = characters.clone();
        for (bit, decoding) in decodings.iter().enumerate() {
            if combination >> bit & 1 == 1 {
                work(characters.len());
                characters = decoding.apply(&characters);
            }
        }
        let signs = signs_of(&characters);
        let survey = Survey::of(&signs);
        if odd == OddPaths::Refuse && survey.dot_segments > 0 {
            return Err(PathError::DotSegment);
        }
        if decodings.len().saturating_add(survey.differences().len()) > MAX_DIFFERENCES {
            return Err(PathError::TooManyReadings);
        }
        survey.read(&signs, &mut readings, work)?;
    }
    Ok(readings)
}

/// The bytes that a path stands for, each with whether it is escaped.
type Characters = Vec<(u8, bool)>;

fn signs_of(characters: &Characters) -> Vec<Sign> {
    characters.iter().map(|(value, escaped)| Sign::of(*value, *escaped)).collect()
}

/// What some servers do to the characters of a path before their router sees it, besides undoing its escapes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Decoding {
    /// They undo escapes twice: nginx with `$uri` in `proxy_pass` sends what it has decoded to a server that decodes.
    Twice,
    /// They leave out bytes that are not UTF-8, as Bottle does.
    Utf8Only,
    /// They take letters beyond ASCII for the ASCII letters that they fold to, as regular expressions do that ignore case.
    FoldsCase,
}

impl Decoding {
    /// In the order in which a server does them.
    const ALL: [Self; 3] = [Self::Twice, Self::Utf8Only, Self::FoldsCase];

    /// Those that change this path, also where another one has to be done before.
    fn that_matter(characters: &Characters) -> Vec<Self> {
        let mut present = characters.clone();
        let changes = |decoding: &Self| {
            let after = decoding.apply(&present);
            let changes = signs_of(&after) != signs_of(&present);
            present = after;
            changes
        };
        // Nothing is left to decode in what is neither escaped nor beyond ASCII.
        let may_matter = characters.iter().any(|(value, escaped)| *value >= 0x80 || *escaped && *value == b'%');
        if may_matter { Self::ALL.into_iter().filter(changes).collect() } else { Vec::new() }
    }

    fn apply(self, characters: &Characters) -> Characters {
        match self {
            Self::Twice => decode_again(characters),
            Self::Utf8Only => without_invalid_utf8(characters),
            Self::FoldsCase => fold_case(characters),
        }
    }
}

/// Undoes the escapes that undoing escapes has left; nothing without one.
fn decode_again(characters: &Characters) -> Characters {
    let bytes: Vec<u8> = characters.iter().map(|(value, _)| *value).collect();
    let is_escaped_twice = |(at, (value, escaped)): (usize, &(u8, bool))| {
        let behind = bytes.get(at.saturating_add(1)..).unwrap_or_default();
        *value == b'%' && *escaped && escape(behind).is_some()
    };
    if !characters.iter().enumerate().any(is_escaped_twice) {
        return characters.clone();
    }
    decoded_bytes(&bytes).collect()
}

fn without_invalid_utf8(characters: &Characters) -> Characters {
    let bytes: Vec<u8> = characters.iter().map(|(value, _)| *value).collect();
    let mut rest = characters.as_slice();
    let mut valid = Characters::with_capacity(characters.len());
    for chunk in bytes.utf8_chunks() {
        let (own, others) = rest.split_at_checked(chunk.valid().len()).unwrap_or((rest, &[]));
        valid.extend_from_slice(own);
        rest = others.get(chunk.invalid().len()..).unwrap_or_default();
    }
    valid
}

/// The letters beyond ASCII that fold to one in it: those that Python's `re.IGNORECASE` documents; of other folds they are all.
fn fold_case(characters: &Characters) -> Characters {
    let mut folded = Characters::with_capacity(characters.len());
    let mut rest = characters.as_slice();
    while let Some((first, others)) = rest.split_first() {
        let value = |at: usize| rest.get(at).map_or(0, |(value, _)| *value);
        let (letter, length) = match (value(0), value(1), value(2)) {
            // U+0130 and U+0131, the dotted and the dotless i of Turkish.
            (0xc4, 0xb0 | 0xb1, _) => (b'i', 2),
            // U+017F, the long s.
            (0xc5, 0xbf, _) => (b's', 2),
            // U+212A, the sign of the kelvin.
            (0xe2, 0x84, 0xaa) => (b'k', 3),
            _ => {
                folded.push(*first);
                rest = others;
                continue;
            }
        };
        folded.push((letter, true));
        rest = rest.get(length..).unwrap_or_default();
    }
    folded
}

/// One character of a path, as far as routers differ on it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Sign {
    /// Itself to everybody.
    Plain(u8),
    /// Encoded, and so to everybody.
    Escaped(u8),
    Slash,
    EscapedSlash,
    Backslash {
        escaped: bool,
    },
    /// `;`: parameters may begin here, or the path may end.
    Semicolon {
        escaped: bool,
    },
    /// `#`, or `#` or `?` encoded: the path may end here.
    Mark {
        value: u8,
        escaped: bool,
    },
}

impl Sign {
    fn of(value: u8, escaped: bool) -> Self {
        match value {
            b'/' if escaped => Self::EscapedSlash,
            b'/' => Self::Slash,
            b'\\' => Self::Backslash { escaped },
            b'#' | b'?' => Self::Mark { value, escaped },
            b';' => Self::Semicolon { escaped },
            b'%' if escaped => Self::Escaped(value),
            0x21..=0x7e => Self::Plain(value.to_ascii_lowercase()),
            _ => Self::Escaped(value),
        }
    }
}

/// How a router reads a path; by default, as its one spelling says.
#[derive(Debug, Clone, Copy)]
struct Router {
    /// `%2f` separates.
    decodes_slash: bool,
    /// `\` separates.
    takes_backslash: bool,
    parameters: Parameters,
    /// `%3b` is `;`.
    decodes_semicolon: bool,
    /// The path ends at a plain `#`.
    ends_at_number_sign: bool,
    /// The path ends at an encoded `#` or `?`.
    decodes_marks: bool,
    /// `//host/path` names a host.
    takes_authority: bool,
    /// Empty segments vanish before `..` takes one back.
    merges_slashes: bool,
    dots: Dots,
}

/// What a router does with what follows `;`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Parameters {
    /// It is not part of its segment.
    Dropped,
    /// It is a part of its segment like any other.
    Kept,
    /// The path ends there.
    EndPath,
}

/// What a router does with dot segments.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Dots {
    /// `.` and `..` are resolved, below this many segments: an application that is mounted at `/api` or `/api/v1` may
    /// resolve what follows by itself.
    Resolved { below: usize },
    /// They are segments like any other.
    Kept,
}

impl Dots {
    const RESOLVED: Self = Self::Resolved { below: 0 };
    const ALL: [Self; 4] = [Self::RESOLVED, Self::Resolved { below: 1 }, Self::Resolved { below: 2 }, Self::Kept];
}

impl Default for Router {
    fn default() -> Self {
        Self {
            decodes_slash: false,
            takes_backslash: true,
            parameters: Parameters::Dropped,
            decodes_semicolon: false,
            ends_at_number_sign: true,
            decodes_marks: false,
            takes_authority: false,
            merges_slashes: true,
            dots: Dots::RESOLVED,
        }
    }
}

impl Router {
    /// Adds what this router takes a text for, and where it may stop at a dot segment: a router that matches prefixes
    /// hands on what follows, whatever that is.
    fn read(self, text: &str, readings: &mut Readings, work: &mut impl FnMut(usize)) -> Result<(), PathError> {
        let mut path = Segments::default();
        work(text.len());
        for segment in self.path_of(text).split('/') {
            let name = if self.parameters == Parameters::Dropped { before_parameters(segment) } else { segment };
            match (name, self.dots) {
                ("", _) if self.merges_slashes => {}
                ("." | "..", Dots::Resolved { below }) => {
                    work(path.text.len());
                    readings.add_trimmed(path.as_str())?;
                    if name == ".." && path.starts.len() > below {
                        path.pop();
                    }
                }
                _ => path.push(name),
            }
        }
        work(path.text.len());
        readings.add_trimmed(path.as_str())
    }

    /// The path with its separators decided.
    fn text(self, signs: &[Sign]) -> String {
        let mut text = String::with_capacity(signs.len());
        for sign in signs {
            match *sign {
                Sign::Plain(value) => text.push(char::from(value)),
                Sign::Escaped(value) => push_escape(&mut text, value),
                Sign::Slash => text.push('/'),
                Sign::EscapedSlash if self.decodes_slash => text.push('/'),
                Sign::EscapedSlash => push_escape(&mut text, b'/'),
                Sign::Backslash { .. } if self.takes_backslash => text.push('/'),
                Sign::Backslash { .. } => push_escape(&mut text, b'\\'),
                Sign::Semicolon { escaped: true } if !self.decodes_semicolon => push_escape(&mut text, b';'),
                Sign::Semicolon { .. } if self.parameters == Parameters::EndPath => break,
                Sign::Semicolon { .. } => text.push(';'),
                Sign::Mark { escaped: true, .. } if self.decodes_marks => break,
                Sign::Mark { escaped: false, .. } if self.ends_at_number_sign => break,
                Sign::Mark { value, .. } => push_escape(&mut text, value),
            }
        }
        text
    }

    /// What follows the first slash, or the host: URL parsers skip any number of slashes before one.
    fn path_of(self, text: &str) -> &str {
        if self.takes_authority && text.starts_with("//") {
            return text.trim_start_matches('/').split_once('/').map_or("", |(_, path)| path);
        }
        text.strip_prefix('/').unwrap_or(text)
    }
}

/// What a router does otherwise than the one spelling says.
type Difference = fn(&mut Router);

/// What of a path routers may differ on.
#[derive(Debug)]
struct Survey {
    escaped_slash: bool,
    backslash: bool,
    raw_backslash: bool,
    parameters: bool,
    escaped_semicolon: bool,
    escaped_mark: bool,
    raw_mark: bool,
    controls: bool,
    authority: bool,
    empty_segments: bool,
    dot_segments: usize,
}

impl Survey {
    fn of(signs: &[Sign]) -> Self {
        let any = |matches: fn(&Sign) -> bool| signs.iter().any(matches);
        // As a router reads it that separates wherever one can; a mark ends a segment as `;` does.
        let widest = Router { decodes_slash: true, decodes_semicolon: true, ..Router::default() };
        let ended = |sign: &Sign| match sign {
            Sign::Mark { .. } => Sign::Semicolon { escaped: false },
            other => *other,
        };
        let text = widest.text(&signs.iter().map(ended).collect::<Vec<_>>());
        Self {
            escaped_slash: any(|sign| *sign == Sign::EscapedSlash),
            backslash: any(|sign| matches!(sign, Sign::Backslash { .. })),
            raw_backslash: any(|sign| *sign == Sign::Backslash { escaped: false }),
            parameters: any(|sign| matches!(sign, Sign::Semicolon { .. })),
            escaped_semicolon: any(|sign| *sign == Sign::Semicolon { escaped: true }),
            escaped_mark: any(|sign| matches!(sign, Sign::Mark { escaped: true, .. })),
            raw_mark: any(|sign| matches!(sign, Sign::Mark { escaped: false, .. })),
            controls: any(|sign| matches!(sign, Sign::Escaped(0..=0x1f | 0x7f))),
            authority: text.starts_with("//"),
            empty_segments: text.contains("//") || text.contains("/;"),
            dot_segments: text.split('/').filter(|segment| matches!(before_parameters(segment), "." | "..")).count(),
        }
    }

    /// Why the path is refused where odd ones are.
    fn oddity(&self) -> Option<PathError> {
        let found = [
            (self.dot_segments > 0, PathError::DotSegment),
            (self.raw_backslash, PathError::Backslash),
            (self.controls, PathError::ControlCharacter),
            (self.raw_mark, PathError::NumberSign),
        ];
        found.into_iter().find_map(|(odd, error)| odd.then_some(error))
    }

    /// Adds what routers take a path for: every combination of what they may do otherwise.
    fn read(&self, signs: &[Sign], readings: &mut Readings, work: &mut impl FnMut(usize)) -> Result<(), PathError> {
        if self.dot_segments > MAX_DOT_SEGMENTS {
            return Err(PathError::TooManyReadings);
        }
        let differences = self.differences();
        let dots = if self.dot_segments > 0 { Dots::ALL.as_slice() } else { std::slice::from_ref(&Dots::RESOLVED) };
        for combination in 0u32..1 << differences.len() {
            let mut router = Router::default();
            for (bit, difference) in differences.iter().enumerate() {
                if combination >> bit & 1 == 1 {
                    difference(&mut router);
                }
            }
            work(signs.len());
            let text = router.text(signs);
            for dots in dots {
                Router { dots: *dots, ..router }.read(&text, readings, work)?;
            }
        }
        Ok(())
    }

    /// What a router may do otherwise than the one spelling says, as far as it matters here.
    fn differences(&self) -> Vec<Difference> {
        let differences: [(bool, Difference); 9] = [
            (self.escaped_slash, |router| router.decodes_slash = true),
            (self.backslash, |router| router.takes_backslash = false),
            (self.parameters, |router| router.parameters = Parameters::Kept),
            (self.parameters, |router| router.parameters = Parameters::EndPath),
            (self.escaped_semicolon, |router| router.decodes_semicolon = true),
            (self.escaped_mark, |router| router.decodes_marks = true),
            (self.raw_mark, |router| router.ends_at_number_sign = false),
            (self.authority, |router| router.takes_authority = true),
            (self.dot_segments > 0 && self.empty_segments, |router| router.merges_slashes = false),
        ];
        differences.into_iter().filter(|(matters, _)| *matters).map(|(_, difference)| difference).collect()
    }
}

fn before_parameters(segment: &str) -> &str {
    segment.split(';').next().unwrap_or_default()
}

/// The segments of a path as its text, without the empty ones. Taking the last one back takes no longer than adding it.
#[derive(Debug, Default)]
struct Segments {
    text: String,
    /// Where each segment begins, empty ones included.
    starts: Vec<usize>,
}

impl Segments {
    fn push(&mut self, name: &str) {
        self.starts.push(self.text.len());
        if !name.is_empty() {
            self.text.push('/');
            self.text.push_str(name);
        }
    }

    fn pop(&mut self) {
        if let Some(start) = self.starts.pop() {
            self.text.truncate(start);
        }
    }

    fn as_str(&self) -> &str {
        if self.text.is_empty() { "/" } else { &self.text }
    }
}

/// A path without the encoded controls and blanks at its end, and the slashes before them.
fn trim_controls(path: &str) -> &str {
    let mut rest = path;
    while let Some((before, escape)) = rest.len().checked_sub(3).and_then(|at| rest.split_at_checked(at)) {
        let Some(digits) = escape.strip_prefix('%') else { break };
        let control = u8::from_str_radix(digits, 16).is_ok_and(|value| value <= b' ' || value == 0x7f);
        if !control {
            break;
        }
        rest = before.trim_end_matches('/');
    }
    if rest.is_empty() { "/" } else { rest }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::path::spell_path;
    use proptest::prelude::*;

    fn readings(path: &str) -> Result<Vec<String>, PathError> {
        read(path, &spell_path(path), OddPaths::Match).map(|readings| readings.0)
    }

    #[track_caller]
    fn check(path: &str, expect: &[&str]) {
        let mut found = readings(path).unwrap();
        assert_eq!(found[0], spell_path(path), "{path}: the one spelling comes first");
        found.sort();
        let mut expect = expect.to_vec();
        expect.sort_unstable();
        assert_eq!(found, expect, "{path}");
    }

    #[test]
    fn an_ordinary_path_has_one_reading() {
        for path in ["/", "/api/login", "/API/Login/", "/a%20b/caf\u{e9}", "/a//b", "/a.b/..c", "/%7euser?x=/../#y"] {
            assert_eq!(readings(path).unwrap(), [spell_path(path)], "{path}");
        }
    }

    /// With rule `/api/login` used up, each of these still reached the login behind the server that is named.
    #[test]
    fn spellings_that_got_past_are_read_as_the_login() {
        let got_past = [
            ("/api%2flogin", "Flask, Django, FastAPI, nginx with a URI in proxy_pass"),
            ("/api%2Flogin%0a", "FastAPI"),
            ("/api/login%0a", "FastAPI"),
            ("/api/login/../../health", "Express app.use, axum nest"),
            ("/api/login/%2e%2e/%2E./health", "Express app.use, axum nest"),
            ("/api/login/..;/health", "Express app.use"),
            ("/api/login\\..\\health", "Express app.use"),
            ("/api/login%5c..%5chealth", "Express app.use"),
            ("/x\\y/../api/login", "nginx with a URI in proxy_pass"),
            ("/api//../login", "URL parsers that keep empty segments"),
            ("/api/./../login", "axum with a catch-all that resolves what it captured"),
            ("/api/x/../../login", "axum with a catch-all that resolves what it captured"),
            ("//anyhost/api/login", "new URL(path, base)"),
            ("////anyhost/api/login", "new URL(path, base)"),
            ("///%78/api/login", "new URL(path, base)"),
            ("http:///anyhost/api/login", "new URL(path, base)"),
            ("/x%23#/../api/login", "servers that take both as characters"),
            ("/api/login%3bx", "servlet containers behind nginx with a URI in proxy_pass"),
            ("/x/..%3b/api/login", "servlet containers behind nginx with a URI in proxy_pass"),
            ("/api/login;/x/y", "Fastify up to 4"),
            ("/api/login%20", "nginx with $uri in proxy_pass"),
            ("/api/login%3fx", "nginx with $uri in proxy_pass"),
            ("/api/login%23x", "nginx with $uri in proxy_pass"),
            ("/api/login/%00", "servers that end strings at NUL"),
            ("/api/%256cogin", "nginx with $uri in proxy_pass"),
            ("/api%252flogin", "nginx with $uri in proxy_pass, Flask behind it"),
            ("/api/%25%36cogin", "nginx with $uri in proxy_pass"),
            ("/x/%252e%252e/api/login", "nginx with $uri in proxy_pass"),
            ("/api/log%C4%B1n", "(?i) in Python"),
            ("/ap%c4%B0/log\u{131}n", "(?i) in Python"),
            ("/api/login%ff", "Bottle"),
            ("/api/lo%c4gin/%80", "Bottle"),
            ("/api/%256cog\u{131}n%ff", "all of them together"),
        ];
        for (path, server) in got_past {
            let readings = readings(path).unwrap();
            assert!(readings.iter().any(|reading| reading == "/api/login"), "{path} ({server}): {readings:?}");
        }
    }

    #[test]
    fn a_path_has_the_readings_that_routers_give_it_and_no_others() {
        check("/a%2fb", &["/a%2fb", "/a/b"]);
        check("/a%252fb", &["/a%252fb", "/a%2fb", "/a/b"]);
        check("/a%25zz%", &["/a%25zz%25"]);
        check("/100%25ab", &["/100%25ab", "/100%ab", "/100"]);
        check("/a%25252fb", &["/a%25252fb", "/a%252fb"]);
        check("/mas%c5%bfe/%E2%84%AAelvin", &["/mas%c5%bfe/%e2%84%aaelvin", "/masse/kelvin"]);
        check("/caf%e9/x", &["/caf%e9/x", "/caf/x"]);
        check("/caf%c3%a9/\u{131}\u{e9}", &["/caf%c3%a9/%c4%b1%c3%a9", "/caf%c3%a9/i%c3%a9"]);
        check("/a%5cb", &["/a/b", "/a%5cb"]);
        check("/a;x/b", &["/a/b", "/a;x/b", "/a"]);
        check("/a%3bx/b", &["/a%3bx/b", "/a/b", "/a;x/b", "/a"]);
        check("/a%0a", &["/a%0a", "/a"]);
        check("/a%0a/%20/", &["/a%0a/%20", "/a"]);
        check("/%00", &["/%00", "/"]);
        check("/a%20", &["/a%20", "/a"]);
        check("/a/../b", &["/b", "/a", "/a/b", "/a/../b"]);
        check("/a/x/../../b", &["/b", "/a/x", "/a", "/a/b", "/a/x/b", "/a/x/../../b"]);
        check("/a/./b", &["/a/b", "/a", "/a/./b"]);
        check("/..", &["/", "/.."]);
        check("/a//../b", &["/b", "/a", "/a/b", "/a/../b"]);
        check("//a/b", &["/a/b", "/b"]);
        check("/a#/../b", &["/a", "/b", "/a%23", "/a%23/b", "/a%23/../b"]);
        check("/a%23b", &["/a%23b", "/a"]);
    }

    #[test]
    fn a_path_with_too_many_readings_or_bytes_is_refused() {
        assert_eq!(readings("/x/../a/b/../../c"), Err(PathError::TooManyReadings));
        assert_eq!(readings("//a%2fb;c\\d%23e"), Err(PathError::TooManyReadings));
        assert_eq!(readings("//a%2fb;c%252fd%ff"), Err(PathError::TooManyReadings));
        // However few they are: 65 dot segments are nobody's.
        assert!(readings(&"/.".repeat(64)).is_ok());
        assert_eq!(readings(&"/.".repeat(65)), Err(PathError::TooManyReadings));
        assert_eq!(readings(&"/%252e".repeat(65)), Err(PathError::TooManyReadings));
        let long = |length: usize| format!("/{}", "a".repeat(length - 1));
        assert_eq!(readings(&long(MAX_PATH + 1)), Err(PathError::TooLong));
        assert!(readings(&long(MAX_PATH)).is_ok());
    }

    /// How many bytes are looked at to find the readings of a path.
    fn steps(path: &str) -> usize {
        let mut steps = 0usize;
        let _ =
            read_counting(path, &spell_path(path), OddPaths::Match, &mut |bytes| steps = steps.saturating_add(bytes));
        steps
    }

    fn most_steps(path: &str) -> usize {
        const EACH: usize = {
            let (spellings, resolutions, dot_segments, decodings) = (16, 4, 64, 3);
            spellings * (1 + decodings + resolutions * (2 + dot_segments))
        };
        path.len().saturating_mul(EACH)
    }

    /// 8 KiB of this took 28 ms in a debug build.
    #[test]
    fn paths_that_took_long_are_refused_soon() {
        let path = "//..;".repeat(MAX_PATH / 5);
        assert_eq!(readings(&path), Err(PathError::TooManyReadings));
        assert!(steps(&path) <= path.len().saturating_mul(2), "{} steps for {} bytes", steps(&path), path.len());
    }

    #[test]
    fn odd_paths_are_refused_for_what_they_have() {
        let check = |path: &str, expect: Option<PathError>| {
            assert_eq!(read(path, &spell_path(path), OddPaths::Refuse).err(), expect, "{path}");
        };
        for path in
            ["/a/../b", "/a/./b", "/a/%2e%2e/b", "/a/..;/b", "/a%2f..%2fb", "/a%5c..%5cb", "/..%23", "/.", "/a/..?b"]
        {
            check(path, Some(PathError::DotSegment));
        }
        for path in ["/a/%252e%252e/b", "/a%252f../b", "/a/%252e%ff/b"] {
            check(path, Some(PathError::DotSegment));
        }
        check("/a\\b", Some(PathError::Backslash));
        for path in ["/a%0a", "/a%00b", "/%7f", "/a\u{1}"] {
            check(path, Some(PathError::ControlCharacter));
        }
        check("/a#b", Some(PathError::NumberSign));
        for path in
            ["/a%5cb", "/a%2fb", "/a;b", "/a..b/...", "/.well-known/x", "//a//b/", "/a%23b", "/a%20b", "/a?/../b#c"]
        {
            check(path, None);
        }
    }

    proptest! {
        /// A reading is a path in its one spelling, but for the characters that it leaves as they are.
        #[test]
        fn readings_are_bounded_and_distinct(path in "/([ab/.;#\\\\]|%2[eEfF3]|%5c|%0a|%00|%3f|%25|%ff|%c4|%b1){0,16}") {
            let spelled = spell_path(&path);
            if let Ok(found) = readings(&path) {
                prop_assert_eq!(&found[0], &spelled);
                prop_assert!(found.len() <= MAX_READINGS);
                for (index, reading) in found.iter().enumerate() {
                    prop_assert!(reading.starts_with('/') && !reading.contains("//"), "{} read as {}", path, reading);
                    prop_assert!(reading == "/" || !reading.ends_with('/'), "{} read as {}", path, reading);
                    prop_assert!(!found[..index].contains(reading));
                }
            }
        }

        /// However a path is made, its readings take steps in proportion to its length: at most 16 ways to spell it times 4 ways
        /// to resolve it, each a few times its length, and comparing what stands before each of at most 64 dot segments.
        /// Woken by a `MAX_DOT_SEGMENTS` of 6,400.
        #[test]
        fn readings_take_linear_time(
            head in prop::sample::select(&["", ";", "%2f", ";%2f", "//;", "//%2f;", "%25ab;"][..]),
            long in prop::sample::select(&[0usize, 4_000][..]),
            unit in prop::sample::select(&["/x/..", "/.", "/x;/..", "//..;", "%2fx/..", "\\x\\..", "/%252e", "%ff", "/a", "%20", ";"][..]),
        ) {
            let head = format!("/{head}{}", "a".repeat(long));
            let path = format!("{head}{}", unit.repeat(MAX_PATH.saturating_sub(head.len()).checked_div(unit.len()).unwrap_or(0)));
            prop_assert!(steps(&path) <= most_steps(&path), "{} of {} for {unit}", steps(&path), most_steps(&path));
        }

        /// Woken by not looking at `;`.
        #[test]
        fn a_path_that_is_plain_at_a_glance_has_one_reading(path in "(https?://h)?/?([a-cA /.;#?:\u{131}\u{e9}]|%2f){0,9}") {
            if !may_differ(&path) {
                prop_assert_eq!(readings(&path).map(|found| found.len()), Ok(1));
                prop_assert!(read(&path, &spell_path(&path), OddPaths::Refuse).is_ok());
            }
        }

        /// What is refused for nothing has no reading with a dot segment, whatever a router does to it.
        #[test]
        fn a_path_that_is_not_odd_has_no_dot_segments(path in "/([ab/.;#\\\\]|%2[eEfF3]|%5c|%3f|%25|2e|%ff){0,16}") {
            if let Ok(found) = read(&path, &spell_path(&path), OddPaths::Refuse) {
                let dots = |reading: &String| reading.split('/').any(|segment| segment == "." || segment == "..");
                prop_assert!(!found.0.iter().any(dots), "{} is read as {:?}", path, found);
            }
        }

        #[test]
        fn no_path_panics(path: String, refuses: bool) {
            let odd = if refuses { OddPaths::Refuse } else { OddPaths::Match };
            let _ = read(&path, &spell_path(&path), odd);
        }
    }
}
