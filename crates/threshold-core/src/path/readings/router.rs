//! How routers differ in splitting a decoded path into segments.

use super::decoding::Characters;
use super::{MAX_DOT_SEGMENTS, PathError, Readings};
use crate::path::push_escape;

/// One character of a path, by what routers may take it for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Symbol {
    /// A character that every router takes for itself.
    Plain(u8),
    /// A character that every router takes as escaped.
    Escaped(u8),
    Slash,
    EscapedSlash,
    Backslash {
        escaped: bool,
    },
    /// `;`, where path parameters may begin or the path may end.
    Semicolon {
        escaped: bool,
    },
    /// `#`, or an escaped `#` or `?`, where the path may end.
    EndMark {
        value: u8,
        escaped: bool,
    },
}

impl Symbol {
    fn of(value: u8, escaped: bool) -> Self {
        match value {
            b'/' if escaped => Self::EscapedSlash,
            b'/' => Self::Slash,
            b'\\' => Self::Backslash { escaped },
            b'#' | b'?' => Self::EndMark { value, escaped },
            b';' => Self::Semicolon { escaped },
            // A decoded `%` is written as `%25`, or the digits behind it would look like an escape.
            b'%' if escaped => Self::Escaped(value),
            0x21..=0x7e => Self::Plain(value.to_ascii_lowercase()),
            _ => Self::Escaped(value),
        }
    }
}

pub(super) fn symbols_of(characters: &Characters) -> Vec<Symbol> {
    characters.iter().map(|(value, escaped)| Symbol::of(*value, *escaped)).collect()
}

/// The choices of one router. The default gives the normal form of a path.
#[derive(Debug, Clone, Copy)]
struct Router {
    /// `%2f` separates segments: Flask, Django, FastAPI, and nginx with a URI in `proxy_pass`.
    decodes_slash: bool,
    /// `\` separates segments, as in URL parsers that follow the WHATWG standard. nginx takes it for a character.
    backslash_separates: bool,
    parameters: Parameters,
    /// `%3b` is `;`: servlet containers behind nginx with a URI in `proxy_pass`.
    decodes_semicolon: bool,
    /// The path ends at a plain `#`.
    ends_at_number_sign: bool,
    /// The path ends at an escaped `#` or `?`: servers behind nginx with `$uri` in `proxy_pass`.
    decodes_end_marks: bool,
    /// `//host/path` names a host: `new URL(path, base)` in JavaScript.
    reads_authority: bool,
    /// Empty segments are dropped before `..` removes one. URL parsers keep them, so that `/api//../login` is `/api/login`.
    merges_slashes: bool,
    dots: Dots,
}

/// The treatment of path parameters, which begin at `;`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Parameters {
    /// They are dropped from their segment, as in servlet containers.
    Dropped,
    /// They are part of their segment, as in most routers.
    Kept,
    /// The path ends at the first `;`, as in Fastify up to version 4.
    EndPath,
}

/// The treatment of dot segments.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Dots {
    /// `.` and `..` are resolved, but `..` never removes the first `below` segments: an application that is mounted at `/api`
    /// or `/api/v1` may resolve the rest by itself.
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
            backslash_separates: true,
            parameters: Parameters::Dropped,
            decodes_semicolon: false,
            ends_at_number_sign: true,
            decodes_end_marks: false,
            reads_authority: false,
            merges_slashes: true,
            dots: Dots::RESOLVED,
        }
    }
}

impl Router {
    /// Adds this router's reading of a text, and the prefixes before each dot segment: a router that matches prefixes
    /// (`app.use` in Express, `nest` in axum) stops there and hands the rest on, whatever it is.
    fn read(self, text: &str, readings: &mut Readings, work: &mut impl FnMut(usize)) -> Result<(), PathError> {
        let mut path = Segments::default();
        work(text.len());
        for segment in self.path_of(text).split('/') {
            let name = if self.parameters == Parameters::Dropped { before_parameters(segment) } else { segment };
            match (name, self.dots) {
                ("", _) if self.merges_slashes => {}
                ("." | "..", Dots::Resolved { below }) => {
                    work(path.text.len());
                    // Before the segment is resolved: this is the prefix that a mounted router has matched.
                    readings.add_trimmed(path.as_str())?;
                    // A `..` beyond the root is dropped. `below` makes the mount point the root.
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

    /// Returns the path as text, in which `/` separates wherever this router separates.
    fn text(self, symbols: &[Symbol]) -> String {
        let mut text = String::with_capacity(symbols.len());
        for symbol in symbols {
            match *symbol {
                Symbol::Plain(value) => text.push(char::from(value)),
                Symbol::Escaped(value) => push_escape(&mut text, value),
                Symbol::Slash => text.push('/'),
                Symbol::EscapedSlash if self.decodes_slash => text.push('/'),
                Symbol::EscapedSlash => push_escape(&mut text, b'/'),
                Symbol::Backslash { .. } if self.backslash_separates => text.push('/'),
                Symbol::Backslash { .. } => push_escape(&mut text, b'\\'),
                Symbol::Semicolon { escaped: true } if !self.decodes_semicolon => push_escape(&mut text, b';'),
                Symbol::Semicolon { .. } if self.parameters == Parameters::EndPath => break,
                Symbol::Semicolon { .. } => text.push(';'),
                Symbol::EndMark { escaped: true, .. } if self.decodes_end_marks => break,
                Symbol::EndMark { escaped: false, .. } if self.ends_at_number_sign => break,
                Symbol::EndMark { value, .. } => push_escape(&mut text, value),
            }
        }
        text
    }

    /// Returns what follows the first slash, or the host. URL parsers skip any number of slashes before a host.
    fn path_of(self, text: &str) -> &str {
        if self.reads_authority && text.starts_with("//") {
            return text.trim_start_matches('/').split_once('/').map_or("", |(_, path)| path);
        }
        text.strip_prefix('/').unwrap_or(text)
    }
}

/// One choice in which a router departs from the default.
type Difference = fn(&mut Router);

/// The parts of a path on which routers may differ.
#[derive(Debug)]
pub(super) struct Ambiguities {
    escaped_slash: bool,
    backslash: bool,
    raw_backslash: bool,
    parameters: bool,
    escaped_semicolon: bool,
    escaped_end_mark: bool,
    raw_end_mark: bool,
    controls: bool,
    authority: bool,
    empty_segments: bool,
    pub(super) dot_segments: usize,
}

impl Ambiguities {
    pub(super) fn of(symbols: &[Symbol]) -> Self {
        let any = |matches: fn(&Symbol) -> bool| symbols.iter().any(matches);
        // Dot segments are counted as a router sees them that separates wherever one can, so that none is missed. An end mark
        // ends a segment as `;` does.
        let widest = Router { decodes_slash: true, decodes_semicolon: true, ..Router::default() };
        let ended = |symbol: &Symbol| match symbol {
            Symbol::EndMark { .. } => Symbol::Semicolon { escaped: false },
            other => *other,
        };
        let text = widest.text(&symbols.iter().map(ended).collect::<Vec<_>>());
        Self {
            escaped_slash: any(|symbol| *symbol == Symbol::EscapedSlash),
            backslash: any(|symbol| matches!(symbol, Symbol::Backslash { .. })),
            raw_backslash: any(|symbol| *symbol == Symbol::Backslash { escaped: false }),
            parameters: any(|symbol| matches!(symbol, Symbol::Semicolon { .. })),
            escaped_semicolon: any(|symbol| *symbol == Symbol::Semicolon { escaped: true }),
            escaped_end_mark: any(|symbol| matches!(symbol, Symbol::EndMark { escaped: true, .. })),
            raw_end_mark: any(|symbol| matches!(symbol, Symbol::EndMark { escaped: false, .. })),
            controls: any(|symbol| matches!(symbol, Symbol::Escaped(0..=0x1f | 0x7f))),
            // In the widest text `/%2fhost` and `/\host` begin with two slashes as well.
            authority: text.starts_with("//"),
            // A segment of nothing but parameters is empty once they are dropped.
            empty_segments: text.contains("//") || text.contains("/;"),
            dot_segments: text.split('/').filter(|segment| matches!(before_parameters(segment), "." | "..")).count(),
        }
    }

    /// Returns the error for this path where odd paths are refused.
    pub(super) fn oddity(&self) -> Option<PathError> {
        let found = [
            (self.dot_segments > 0, PathError::DotSegment),
            (self.raw_backslash, PathError::Backslash),
            (self.controls, PathError::ControlCharacter),
            (self.raw_end_mark, PathError::NumberSign),
        ];
        found.into_iter().find_map(|(odd, error)| odd.then_some(error))
    }

    /// Adds the readings of every combination of differences.
    pub(super) fn read(
        &self,
        symbols: &[Symbol],
        readings: &mut Readings,
        work: &mut impl FnMut(usize),
    ) -> Result<(), PathError> {
        // Before the first text is built: each dot segment adds a reading to compare.
        if self.dot_segments > MAX_DOT_SEGMENTS {
            return Err(PathError::TooManyReadings);
        }
        let differences = self.differences();
        // Without dot segments all treatments give the same reading.
        let dots = if self.dot_segments > 0 { Dots::ALL.as_slice() } else { std::slice::from_ref(&Dots::RESOLVED) };
        for combination in 0u32..1 << differences.len() {
            let mut router = Router::default();
            for (bit, difference) in differences.iter().enumerate() {
                if combination >> bit & 1 == 1 {
                    difference(&mut router);
                }
            }
            work(symbols.len());
            let text = router.text(symbols);
            for dots in dots {
                Router { dots: *dots, ..router }.read(&text, readings, work)?;
            }
        }
        Ok(())
    }

    /// Returns how many differences can change the reading of this path.
    pub(super) fn count(&self) -> usize {
        self.differences().len()
    }

    fn differences(&self) -> Vec<Difference> {
        let differences: [(bool, Difference); 9] = [
            (self.escaped_slash, |router| router.decodes_slash = true),
            (self.backslash, |router| router.backslash_separates = false),
            // With both bits set the second wins. That repeats a reading, and `Readings::add` drops it.
            (self.parameters, |router| router.parameters = Parameters::Kept),
            (self.parameters, |router| router.parameters = Parameters::EndPath),
            (self.escaped_semicolon, |router| router.decodes_semicolon = true),
            (self.escaped_end_mark, |router| router.decodes_end_marks = true),
            (self.raw_end_mark, |router| router.ends_at_number_sign = false),
            (self.authority, |router| router.reads_authority = true),
            // Without dot segments it makes no difference, since a reading has no empty segments.
            (self.dot_segments > 0 && self.empty_segments, |router| router.merges_slashes = false),
        ];
        differences.into_iter().filter(|(matters, _)| *matters).map(|(_, difference)| difference).collect()
    }
}

fn before_parameters(segment: &str) -> &str {
    segment.split(';').next().unwrap_or_default()
}

/// The segments of a path as text. Removing the last one takes no longer than adding it, so that a path of many `..` takes
/// linear time.
#[derive(Debug, Default)]
struct Segments {
    /// The segments that are not empty.
    text: String,
    /// Where each segment begins, empty ones included.
    starts: Vec<usize>,
}

impl Segments {
    fn push(&mut self, name: &str) {
        // An empty segment has a start too, so that `..` removes it where slashes are not merged.
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
