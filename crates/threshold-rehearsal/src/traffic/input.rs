//! Reads the lines of a file, plain or compressed, or of standard input, through a buffer of fixed size.

use std::fs::File;
use std::io::{self, Read};
use std::path::Path;

use anyhow::Context as _;

use super::Progress;

/// The longest line. Servers accept request lines of about 8 KiB, and escaping may multiply that by four.
const MAX_LINE: usize = 128 << 10;
/// The first bytes of a gzip file.
const GZIP: &[u8] = &[0x1f, 0x8b];
/// The byte order mark that some programs write before UTF-8.
const BYTE_ORDER_MARK: &[u8] = "\u{feff}".as_bytes();
/// The first bytes of a Zstandard frame.
const ZSTD: &[u8] = &[0x28, 0xb5, 0x2f, 0xfd];

/// Opens a log, or standard input for `-`. The compression is detected by the first bytes, not by the file name.
pub(crate) fn open(path: &Path, progress: &Progress) -> anyhow::Result<Lines> {
    let failed = || format!("cannot read {}", path.display());
    let (name, raw): (String, Box<dyn Read>) = if path.as_os_str() == "-" {
        progress.expect(None);
        ("<stdin>".to_owned(), Box::new(io::stdin().lock()))
    } else {
        let file = File::open(path).with_context(failed)?;
        let meta = file.metadata().with_context(failed)?;
        anyhow::ensure!(!meta.is_dir(), "cannot read {}: it is a directory", path.display());
        // A pipe has a length of 0, which would show as finished.
        progress.expect(meta.is_file().then_some(meta.len()));
        (path.display().to_string(), Box::new(file))
    };
    let mut raw = progress.watch(raw);
    let mut head = Vec::new();
    // A pipe may give fewer bytes at once, so one read is not enough. A pipe cannot be rewound either, so the bytes
    // are chained in front again.
    raw.by_ref().take(4).read_to_end(&mut head).with_context(failed)?;
    let whole = io::Cursor::new(head.clone()).chain(raw);
    let reader: Box<dyn Read> = if head.starts_with(GZIP) {
        // Log rotation appends members to a gzip file. A decoder of one member would silently end after the first.
        Box::new(flate2::read::MultiGzDecoder::new(whole))
    } else if head.starts_with(ZSTD) {
        Box::new(zstd::Decoder::new(whole).with_context(failed)?)
    } else {
        Box::new(whole)
    };
    Ok(Lines::new(name, reader))
}

/// The lines of one log.
pub(crate) struct Lines {
    pub(crate) name: String,
    reader: Box<dyn Read>,
    buffer: Box<[u8]>,
    start: usize,
    end: usize,
    /// The number of lines so far.
    pub(crate) number: u64,
    /// Whether the rest of a line that is too long is being skipped.
    skipping: bool,
    over: bool,
    /// The present line, if it is not valid UTF-8.
    lossy: String,
    /// Why the file could not be read to its end.
    pub(crate) problem: Option<String>,
}

/// One line, or why it cannot be used.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Line<'a> {
    Text(&'a str),
    /// With a replacement character for every invalid byte: some servers log the bytes of clients as they are.
    Lossy(&'a str),
    Bad(&'static str),
}

/// The next line in the buffer.
enum Cut {
    /// The length of a line, and of its line break.
    Line(usize, usize),
    TooLong,
    End,
}

impl Lines {
    pub(super) fn new(name: String, reader: Box<dyn Read>) -> Self {
        let buffer = vec![0; MAX_LINE].into_boxed_slice();
        Self {
            name,
            reader,
            buffer,
            start: 0,
            end: 0,
            number: 0,
            skipping: false,
            over: false,
            lossy: String::new(),
            problem: None,
        }
    }

    /// Returns the next line, without its line break; `None` at the end.
    pub(crate) fn next_line(&mut self) -> Option<Line<'_>> {
        loop {
            match self.cut() {
                Cut::End => return None,
                Cut::TooLong => {
                    // The rest of the line is skipped in the same way, until a line break is found.
                    let first = !std::mem::replace(&mut self.skipping, true);
                    // The whole buffer belongs to the long line, so all of it is discarded.
                    (self.start, self.end) = (0, 0);
                    if first {
                        self.number = self.number.saturating_add(1);
                        return Some(Line::Bad("the line is longer than 128 KiB"));
                    }
                }
                Cut::Line(length, passed) => {
                    let from = self.start;
                    self.start = from.saturating_add(length).saturating_add(passed);
                    // This is the end of a line that was reported as too long already.
                    if std::mem::take(&mut self.skipping) {
                        continue;
                    }
                    self.number = self.number.saturating_add(1);
                    let bytes = self.buffer.get(from..from.saturating_add(length)).unwrap_or_default();
                    let bytes = bytes.strip_suffix(b"\r").unwrap_or(bytes);
                    // Without this, the first line of a file from Windows would not be JSON.
                    let mark = if self.number == 1 { BYTE_ORDER_MARK } else { b"" };
                    let bytes = bytes.strip_prefix(mark).unwrap_or(bytes);
                    return Some(match std::str::from_utf8(bytes) {
                        Ok(text) => Line::Text(text),
                        Err(_) => {
                            self.lossy = String::from_utf8_lossy(bytes).into_owned();
                            Line::Lossy(&self.lossy)
                        }
                    });
                }
            }
        }
    }

    /// Finds the next line in the buffer, and fills the buffer until there is one.
    fn cut(&mut self) -> Cut {
        let mut searched = 0;
        loop {
            let buffer = self.buffer.get(self.start..self.end).unwrap_or_default();
            if let Some(at) = memchr::memchr(b'\n', buffer.get(searched..).unwrap_or_default()) {
                return Cut::Line(searched.saturating_add(at), 1);
            }
            // What was searched is not searched again after the next read, or a long line would cost the square of
            // its length.
            searched = buffer.len();
            if self.over {
                // The last line may lack its line break.
                return if searched == 0 { Cut::End } else { Cut::Line(searched, 0) };
            }
            if searched == self.buffer.len() {
                return Cut::TooLong;
            }
            self.fill();
        }
    }

    fn fill(&mut self) {
        // Moved only when more is needed: most calls find a whole line in the buffer.
        if self.start > 0 {
            self.buffer.copy_within(self.start..self.end, 0);
            self.end = self.end.saturating_sub(self.start);
            self.start = 0;
        }
        let Some(room) = self.buffer.get_mut(self.end..) else { return };
        match self.reader.read(room) {
            Ok(0) => self.over = true,
            Ok(read) => self.end = self.end.saturating_add(read),
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => {
                self.over = true;
                self.problem = Some(match error.kind() {
                    // A log that is still being compressed, or a copy that was cut off. What was read of it is still
                    // used.
                    io::ErrorKind::UnexpectedEof => format!("{} is truncated", self.name),
                    _ => format!("{} cannot be read to its end: {error}", self.name),
                });
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns one byte at a time, as a slow pipe does.
    struct Drip(io::Cursor<Vec<u8>>);

    impl Read for Drip {
        fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
            let one = buffer.len().min(1);
            self.0.read(buffer.get_mut(..one).unwrap_or_default())
        }
    }

    fn lines(bytes: Vec<u8>, slow: bool) -> Vec<Result<String, &'static str>> {
        let cursor = io::Cursor::new(bytes);
        let reader: Box<dyn Read> = if slow { Box::new(Drip(cursor)) } else { Box::new(cursor) };
        let mut lines = Lines::new("test".to_owned(), reader);
        let mut all = Vec::new();
        while let Some(line) = lines.next_line() {
            all.push(match line {
                Line::Text(text) => Ok(text.to_owned()),
                Line::Lossy(text) => Ok(format!("lossy {text}")),
                Line::Bad(why) => Err(why),
            });
        }
        // Messages name a line by this number, so every line counts exactly once.
        assert_eq!(lines.number, u64::try_from(all.len()).unwrap());
        all
    }

    #[test]
    fn lines_are_split_at_line_breaks_however_they_arrive() {
        for slow in [false, true] {
            let text = |text: &str| lines(text.as_bytes().to_vec(), slow);
            assert_eq!(text(""), []);
            assert_eq!(text("a\r\n\nb"), [Ok("a".to_owned()), Ok(String::new()), Ok("b".to_owned())]);
            assert_eq!(
                lines(b"a\n\xff\xe9b\nb\n".to_vec(), slow).get(1),
                Some(&Ok("lossy \u{fffd}\u{fffd}b".to_owned()))
            );
            // A byte order mark is removed from the first line only.
            assert_eq!(text("\u{feff}a\n\u{feff}b"), [Ok("a".to_owned()), Ok("\u{feff}b".to_owned())]);
        }
    }

    #[test]
    fn a_line_that_is_too_long_is_skipped_as_one_line() {
        // At the bound, just above it, and several buffers long: the skipped rest must not count as further lines.
        for longer in [0, 1, MAX_LINE, MAX_LINE * 3 + 7] {
            let mut bytes = b"a\n".to_vec();
            bytes.extend(vec![b'x'; MAX_LINE + longer]);
            bytes.extend(b"\nb\n");
            let all = lines(bytes, false);
            assert_eq!(all.len(), 3, "{longer}");
            assert!(all.get(1).is_some_and(Result::is_err) && all.get(2) == Some(&Ok("b".to_owned())), "{longer}");
        }
    }
}
