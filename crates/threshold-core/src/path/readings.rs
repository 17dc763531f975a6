//! The readings of a path: every path that the routers of common servers may take it for.
//!
//! One server resolves `..` and another matches it literally; one decodes `%2f` before it matches and another after. A rule
//! that is matched against one reading only can be bypassed with a spelling that the application reads differently. So a
//! path has every reading that a combination of these differences gives, and a request meets the rules of all of them.
//!
//! [`decoding`] has the differences in bytes, [`router`] those in segments. Each names the servers that show it, and the test
//! `spellings_that_bypassed_a_limit_are_read_as_the_login` has a request for each.

mod decoding;
mod router;

use super::{decoded, strip_authority};
use decoding::{Characters, Decoding};
use router::{Ambiguities, symbols_of};

/// The longest path that is matched, in bytes: as long as the longest header line that nginx takes by default.
pub const MAX_PATH: usize = 8 << 10;
/// The largest number of readings of one path.
pub const MAX_READINGS: usize = 8;
/// The largest number of differences in one path, apart from dot segments. Four are 16 combinations. No honest client sends
/// a path with more.
const MAX_DIFFERENCES: usize = 4;
/// The largest number of `.` and `..` segments in one path. A reading may end at each, and is compared with those before it.
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

/// The readings of a path. The first is its normal form.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Readings(Vec<String>);

impl Readings {
    /// Makes the only reading of an ordinary path.
    pub(crate) fn of(normal: &str) -> Self {
        Self(vec![normal.to_owned()])
    }

    /// Adds a reading, unless it is known.
    ///
    /// # Errors
    /// Fails where there are [`MAX_READINGS`] already.
    pub(crate) fn add(&mut self, reading: String) -> Result<(), PathError> {
        // At most `MAX_READINGS` comparisons. Most combinations of differences end in a reading that is known.
        if self.0.contains(&reading) {
            return Ok(());
        }
        if self.0.len() >= MAX_READINGS {
            return Err(PathError::TooManyReadings);
        }
        self.0.push(reading);
        Ok(())
    }

    /// Returns all readings, the normal form first.
    pub(crate) fn all(&self) -> &[String] {
        &self.0
    }

    /// Returns all readings but the normal form, the last one first.
    pub(crate) fn into_others(self) -> impl Iterator<Item = String> {
        self.0.into_iter().skip(1).rev()
    }

    /// Adds a reading, and the same without the control characters at its end: `$` in a regular expression matches before a
    /// line feed, and some servers trim.
    fn add_trimmed(&mut self, reading: &str) -> Result<(), PathError> {
        // A known reading was trimmed when it was added. Most are known.
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

/// The treatment of paths with dot segments, backslashes, control characters or number signs.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum OddPaths {
    /// Doors that face clients refuse them with 400.
    #[default]
    Refuse,
    /// They meet the rules of all their readings.
    Match,
}

/// Returns whether servers may read a path differently. This is a quick test, which is `false` for the many paths of letters,
/// digits and single slashes.
pub(crate) fn may_differ(path: &str) -> bool {
    // As if behind a slash, so that a dot at the very beginning counts as a segment.
    let mut before = b'/';
    for (at, byte) in strip_authority(path).bytes().enumerate() {
        match byte {
            b'?' => break,
            b'%' | b';' | b'\\' | b'#' | 0..=b' ' | 0x7f.. => return true,
            b'.' if before == b'/' => return true,
            // `//host` may be read as an authority. Elsewhere empty segments change nothing without a dot segment.
            b'/' if before == b'/' && at == 1 => return true,
            _ => before = byte,
        }
    }
    path.len() > MAX_PATH
}

/// Returns all readings of a path whose normal form is `normal`.
pub(crate) fn read(path: &str, normal: &str, odd: OddPaths) -> Result<Readings, PathError> {
    read_counting(path, normal, odd, &mut |_| {})
}

/// Does the work of [`read`], and calls `work` with the number of bytes of each step. Tests bound their sum.
fn read_counting(path: &str, normal: &str, odd: OddPaths, work: &mut impl FnMut(usize)) -> Result<Readings, PathError> {
    if path.len() > MAX_PATH {
        return Err(PathError::TooLong);
    }
    let path = strip_authority(path).split('?').next().unwrap_or_default();
    let characters: Characters = decoded(path).collect();
    // Before any combination is tried: a path that is refused costs one pass.
    if let Some(error) = Ambiguities::of(&symbols_of(&characters)).oddity().filter(|_| odd == OddPaths::Refuse) {
        return Err(error);
    }
    let mut readings = Readings::of(normal);
    readings.add_trim_of(normal)?;
    // Servers may stand behind each other, so each subset of the steps is possible, and not only single ones.
    let decodings = Decoding::that_matter(&characters);
    for combination in 0u32..1 << decodings.len() {
        let mut characters = characters.clone();
        for (bit, decoding) in decodings.iter().enumerate() {
            if combination >> bit & 1 == 1 {
                work(characters.len());
                characters = decoding.apply(&characters);
            }
        }
        let symbols = symbols_of(&characters);
        let ambiguities = Ambiguities::of(&symbols);
        // A dot segment can be hidden by an escape that only a second decoding undoes.
        if odd == OddPaths::Refuse && ambiguities.dot_segments > 0 {
            return Err(PathError::DotSegment);
        }
        // Counted in each combination: a decoding can uncover differences that the path as it came does not show.
        if decodings.len().saturating_add(ambiguities.count()) > MAX_DIFFERENCES {
            return Err(PathError::TooManyReadings);
        }
        ambiguities.read(&symbols, &mut readings, work)?;
    }
    Ok(readings)
}

/// Removes the escaped control characters and blanks at the end of a path, and the slashes before them.
fn trim_controls(path: &str) -> &str {
    let mut rest = path;
    while let Some((before, escape)) = rest.len().checked_sub(3).and_then(|at| rest.split_at_checked(at)) {
        let Some(digits) = escape.strip_prefix('%') else { break };
        let control = u8::from_str_radix(digits, 16).is_ok_and(|value| value <= b' ' || value == 0x7f);
        if !control {
            break;
        }
        // A reading has no slash at its end.
        rest = before.trim_end_matches('/');
    }
    if rest.is_empty() { "/" } else { rest }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::path::normalize_path;
    use proptest::prelude::*;

    fn readings(path: &str) -> Result<Vec<String>, PathError> {
        read(path, &normalize_path(path), OddPaths::Match).map(|readings| readings.0)
    }

    #[track_caller]
    fn check(path: &str, expect: &[&str]) {
        let mut found = readings(path).unwrap();
        assert_eq!(found[0], normalize_path(path), "{path}: the normal form comes first");
        found.sort();
        let mut expect = expect.to_vec();
        expect.sort_unstable();
        assert_eq!(found, expect, "{path}");
    }

    #[test]
    fn an_ordinary_path_has_one_reading() {
        for path in ["/", "/api/login", "/API/Login/", "/a%20b/caf\u{e9}", "/a//b", "/a.b/..c", "/%7euser?x=/../#y"] {
            assert_eq!(readings(path).unwrap(), [normalize_path(path)], "{path}");
        }
    }

    /// With the limit of `/api/login` used up, each of these paths still reached the login behind the server named beside it.
    #[test]
    fn spellings_that_bypassed_a_limit_are_read_as_the_login() {
        let bypasses = [
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
            ("/x%23#/../api/login", "servers that take both for characters"),
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
        for (path, server) in bypasses {
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
        // Dot segments are bounded by themselves, even where they give few readings.
        assert!(readings(&"/.".repeat(64)).is_ok());
        assert_eq!(readings(&"/.".repeat(65)), Err(PathError::TooManyReadings));
        assert_eq!(readings(&"/%252e".repeat(65)), Err(PathError::TooManyReadings));
        let long = |length: usize| format!("/{}", "a".repeat(length - 1));
        assert_eq!(readings(&long(MAX_PATH + 1)), Err(PathError::TooLong));
        assert!(readings(&long(MAX_PATH)).is_ok());
    }

    /// Returns how many bytes are processed to find the readings of a path.
    fn steps(path: &str) -> usize {
        let mut steps = 0usize;
        let _ = read_counting(path, &normalize_path(path), OddPaths::Match, &mut |bytes| {
            steps = steps.saturating_add(bytes);
        });
        steps
    }

    fn most_steps(path: &str) -> usize {
        const EACH: usize = {
            let (spellings, resolutions, dot_segments, decodings) = (16, 4, 64, 3);
            spellings * (1 + decodings + resolutions * (2 + dot_segments))
        };
        path.len().saturating_mul(EACH)
    }

    /// 8 KiB of this took 28 ms in a debug build, before dot segments were bounded.
    #[test]
    fn a_path_of_dot_segments_is_refused_before_it_is_read() {
        let path = "//..;".repeat(MAX_PATH / 5);
        assert_eq!(readings(&path), Err(PathError::TooManyReadings));
        assert!(steps(&path) <= path.len().saturating_mul(2), "{} steps for {} bytes", steps(&path), path.len());
    }

    #[test]
    fn odd_paths_are_refused_with_the_reason() {
        let check = |path: &str, expect: Option<PathError>| {
            assert_eq!(read(path, &normalize_path(path), OddPaths::Refuse).err(), expect, "{path}");
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
        /// A reading is a path in normal form, except for characters that its router leaves alone.
        #[test]
        fn readings_are_bounded_and_distinct(path in "/([ab/.;#\\\\]|%2[eEfF3]|%5c|%0a|%00|%3f|%25|%ff|%c4|%b1){0,16}") {
            let normal = normalize_path(&path);
            if let Ok(found) = readings(&path) {
                prop_assert_eq!(&found[0], &normal);
                prop_assert!(found.len() <= MAX_READINGS);
                for (index, reading) in found.iter().enumerate() {
                    prop_assert!(reading.starts_with('/') && !reading.contains("//"), "{} read as {}", path, reading);
                    prop_assert!(reading == "/" || !reading.ends_with('/'), "{} read as {}", path, reading);
                    prop_assert!(!found[..index].contains(reading));
                }
            }
        }

        /// The readings of any path take steps in proportion to its length: at most 16 combinations of differences times 4
        /// treatments of dot segments, each a few times the length, and a comparison for each of at most 64 dot segments.
        /// Fails with a `MAX_DOT_SEGMENTS` of 6,400.
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

        /// Fails if `may_differ` ignores `;`.
        #[test]
        fn a_path_that_passes_the_quick_test_has_one_reading(path in "(https?://h)?/?([a-cA /.;#?:\u{131}\u{e9}]|%2f){0,9}") {
            if !may_differ(&path) {
                prop_assert_eq!(readings(&path).map(|found| found.len()), Ok(1));
                prop_assert!(read(&path, &normalize_path(&path), OddPaths::Refuse).is_ok());
            }
        }

        /// A path that is accepted where odd ones are refused has no reading with a dot segment, whatever a router does to it.
        #[test]
        fn a_path_that_is_not_odd_has_no_dot_segments(path in "/([ab/.;#\\\\]|%2[eEfF3]|%5c|%3f|%25|2e|%ff){0,16}") {
            if let Ok(found) = read(&path, &normalize_path(&path), OddPaths::Refuse) {
                let dots = |reading: &String| reading.split('/').any(|segment| segment == "." || segment == "..");
                prop_assert!(!found.0.iter().any(dots), "{} is read as {:?}", path, found);
            }
        }

        #[test]
        fn no_path_panics(path: String, refuses: bool) {
            let odd = if refuses { OddPaths::Refuse } else { OddPaths::Match };
            let _ = read(&path, &normalize_path(&path), odd);
        }
    }
}
