//! Merges several logs by time, and sorts lines that were written late, within a bounded buffer.

use std::collections::BTreeMap;
use std::path::PathBuf;

use threshold_core::Span;
use threshold_core::text::printable;

use super::batch::Batch;
use super::{Fields, Line, Lines, MomentReader, Progress, Request, Scalars, Unreadable, login, open, text};

/// The most buffered lines.
const MAX_BUFFERED: usize = 65_536;
/// The most text of buffered lines, in bytes.
const MAX_TEXT: usize = 64 << 20;
/// The most logs at once: each has a buffer and an open file.
const MAX_LOGS: usize = 1_000;
/// How many of the lines that could not be parsed are shown.
const SHOWN: usize = 5;
/// Microseconds in a second.
const SECOND: u64 = 1_000_000;

/// A line that could not be parsed.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct BadLine {
    pub(crate) log: String,
    pub(crate) number: u64,
    pub(crate) why: &'static str,
    pub(crate) text: String,
}

/// The counts of lines.
#[derive(Debug, Default)]
pub(crate) struct LineCounts {
    pub(crate) lines: u64,
    pub(crate) unreadable: u64,
    /// Lines about something else.
    pub(crate) others: u64,
    /// Lines of an access log that look like logins: an auth log was given without `--login`.
    pub(crate) logins: u64,
    /// Lines that were later than the window allows, and got the time of the line before.
    pub(crate) late: u64,
    pub(crate) shown: Vec<BadLine>,
    /// Errors of logs that could not be read to their end.
    pub(crate) problems: Vec<String>,
}

/// The kind of lines to look for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum LogKind {
    Requests,
    Logins,
}

/// All requests of several logs, in order of time.
pub(crate) struct Feed {
    sources: Vec<Source>,
    reading: Reading,
    buffer: ReorderBuffer,
    window: u64,
    /// The second that was returned last.
    due: Batch,
    /// The time of the request that was returned last.
    last: u64,
}

impl Feed {
    /// Opens access logs. Lines that are late by at most `window` are sorted.
    pub(crate) fn open(logs: &[PathBuf], fields: Fields, window: Span) -> anyhow::Result<Self> {
        Self::open_as(LogKind::Requests, logs, fields, window)
    }

    /// Opens logs of any kind.
    pub(crate) fn open_as(kind: LogKind, logs: &[PathBuf], fields: Fields, window: Span) -> anyhow::Result<Self> {
        anyhow::ensure!(logs.len() <= MAX_LOGS, "at most {MAX_LOGS} logs can be read at once");
        let progress = Progress::new();
        let lines = logs.iter().map(|path| open(path, &progress)).collect::<anyhow::Result<Vec<Lines>>>()?;
        Ok(Self::new(kind, lines, fields, window, progress))
    }

    fn new(kind: LogKind, lines: Vec<Lines>, fields: Fields, window: Span, progress: Progress) -> Self {
        let mut reading = Reading { kind, fields, progress, counts: LineCounts::default() };
        let mut sources: Vec<Source> = lines
            .into_iter()
            .map(|lines| Source { lines, moments: MomentReader::default(), head: Batch::default() })
            .collect();
        // With a single log, no next request is kept for the merge.
        if sources.len() > 1 {
            sources.iter_mut().for_each(|source| source.read_head(&mut reading));
        }
        Self {
            sources,
            reading,
            buffer: ReorderBuffer::default(),
            window: window.micros(),
            due: Batch::default(),
            last: 0,
        }
    }

    /// Returns the requests of the next second that has any, in order. Times never decrease.
    pub(crate) fn next_second(&mut self) -> Option<impl Iterator<Item = Request<'_>>> {
        // At the end of all logs nothing is read any more, and the rest of the buffer is returned second by second.
        while !self.buffer.is_due(self.window) && self.read_one() {}
        self.buffer.take_first(&mut self.due)?;
        let Self { due, last, reading, .. } = self;
        Some(due.iter().map(move |mut request| {
            // Later than the window, or its second was returned in part because the buffer was full. The limiter must
            // never see time go back, so the request gets the time of the one before.
            if request.at.micros < *last {
                reading.counts.late = reading.counts.late.saturating_add(1);
                request.at.micros = *last;
            }
            *last = request.at.micros;
            request
        }))
    }

    /// Returns the counts and the errors.
    pub(crate) fn finish(mut self) -> LineCounts {
        self.reading.progress.finish();
        let mut counts = self.reading.counts;
        counts.problems.extend(self.sources.iter_mut().filter_map(|source| source.lines.problem.take()));
        counts
    }

    /// Buffers the earliest of the logs' next requests. Returns whether there was one.
    fn read_one(&mut self) -> bool {
        let buffer = &mut self.buffer;
        // A single log needs no merge, so its lines go to the buffer without being copied to a head first.
        if let [only] = self.sources.as_mut_slice() {
            return only.read(&mut self.reading, |request| buffer.push(request));
        }
        let heads = self.sources.iter().enumerate();
        // With the index, so that equal times are merged in the order of the arguments, and two runs give the same
        // result.
        let heads = heads.filter_map(|(index, source)| Some((source.head.first()?.at.micros, index)));
        let Some(source) = heads.min().and_then(|(_, index)| self.sources.get_mut(index)) else { return false };
        if let Some(request) = source.head.first() {
            buffer.push(&request);
        }
        source.read_head(&mut self.reading);
        true
    }
}

/// Requests that may be preceded by a late line, by second.
#[derive(Default)]
struct ReorderBuffer {
    seconds: BTreeMap<u64, Batch>,
    requests: usize,
    text: usize,
    /// The latest time that was read.
    newest: u64,
    /// An empty batch whose memory is reused.
    spare: Batch,
}

impl ReorderBuffer {
    #[inline]
    fn push(&mut self, request: &Request<'_>) {
        self.newest = self.newest.max(request.at.micros);
        let second = request.at.micros.checked_div(SECOND).unwrap_or(0);
        // By second, because that is the resolution of most logs. A heap of single requests would compare and move
        // each of them.
        let batch = self.seconds.entry(second).or_insert_with(|| std::mem::take(&mut self.spare));
        self.text = self.text.saturating_add(batch.push(request));
        self.requests = self.requests.saturating_add(1);
    }

    /// Whether the earliest second is complete: no late line of it is within the window any more, or the buffer is full.
    fn is_due(&self, window: u64) -> bool {
        // Both bounds: lines may be long, and a record takes memory even if its line is short.
        let full = self.requests >= MAX_BUFFERED || self.text >= MAX_TEXT;
        let over = |second: u64| {
            // From the end of the second: a late line may belong to its last microsecond.
            let end = second.saturating_add(1).saturating_mul(SECOND);
            end.saturating_add(window) <= self.newest
        };
        full || self.seconds.first_key_value().is_some_and(|(second, _)| over(*second))
    }

    /// Moves the earliest second to `due`.
    fn take_first(&mut self, due: &mut Batch) -> Option<()> {
        let (_, mut batch) = self.seconds.pop_first()?;
        self.requests = self.requests.saturating_sub(batch.len());
        self.text = self.text.saturating_sub(batch.text_len());
        batch.sort();
        // The batch that was returned last is read by now, and its memory serves the next second.
        self.spare = std::mem::replace(due, batch);
        self.spare.clear();
        Some(())
    }
}

/// How lines are parsed, and their counts.
struct Reading {
    kind: LogKind,
    fields: Fields,
    progress: Progress,
    counts: LineCounts,
}

/// A log, and its next request for the merge.
struct Source {
    lines: Lines,
    moments: MomentReader,
    head: Batch,
}

impl Source {
    fn read_head(&mut self, reading: &mut Reading) {
        // Taken out, because `read` borrows the whole source while the closure fills it.
        let mut head = std::mem::take(&mut self.head);
        head.clear();
        self.read(reading, |request| {
            head.push(request);
        });
        self.head = head;
    }

    /// Reads to the next request and passes it to `take`. Returns whether there was one.
    fn read(&mut self, reading: &mut Reading, mut take: impl FnMut(&Request<'_>)) -> bool {
        let Reading { kind, fields, progress, counts } = reading;
        while let Some(line) = self.lines.next_line() {
            counts.lines = counts.lines.saturating_add(1);
            progress.lines(counts.lines);
            let (text, read) = match line {
                Line::Bad(why) => ("", Err(Unreadable(why))),
                Line::Text(text) => (text, read_line(text, *kind, fields, &mut self.moments, &mut take)),
                Line::Lossy(text) => {
                    let read = read_line(text, *kind, fields, &mut self.moments, &mut take);
                    // The replacement characters may be what could not be parsed, so the encoding is named as the
                    // cause.
                    (text, read.map_err(|_| Unreadable("it is not UTF-8 text")))
                }
            };
            match read {
                Ok(Found::Wanted) => return true,
                // Counted and still used: a site may log its login page in this form. The report then suggests
                // `--login`.
                Ok(Found::LooksLikeLogin) => {
                    counts.logins = counts.logins.saturating_add(1);
                    return true;
                }
                Ok(Found::Other) => counts.others = counts.others.saturating_add(1),
                Err(Unreadable(why)) => {
                    // Only for lines that could not be parsed, so the second attempt costs nothing on a good log.
                    let is_login = *kind == LogKind::Requests && login::is_login(text, &mut self.moments);
                    counts.logins = counts.logins.saturating_add(u64::from(is_login));
                    counts.unreadable = counts.unreadable.saturating_add(1);
                    if counts.shown.len() < SHOWN {
                        // A client chooses parts of the line. Its escape sequences must not reach the operator's
                        // terminal.
                        let text = shown(text);
                        let (log, number) = (self.lines.name.clone(), self.lines.number);
                        counts.shown.push(BadLine { log, number, why, text });
                    }
                }
            }
        }
        false
    }
}

/// The kind of a line that could be parsed.
enum Found {
    /// The wanted kind, or one that may be it.
    Wanted,
    /// A request as far as its fields go, which describes a login.
    LooksLikeLogin,
    Other,
}

/// Parses a line of any format, and returns its kind. Only JSON begins with a brace.
fn read_line(
    line: &str,
    kind: LogKind,
    fields: &Fields,
    moments: &mut MomentReader,
    take: &mut impl FnMut(&Request<'_>),
) -> Result<Found, Unreadable> {
    if line.trim_start().starts_with('{') {
        let scalars = Scalars::read(line, fields)?;
        take(&match kind {
            LogKind::Requests => scalars.request(moments)?,
            LogKind::Logins => login::event(&scalars, moments)?,
        });
        let is_login = kind == LogKind::Requests && login::looks_like_event(&scalars);
        return Ok(if is_login { Found::LooksLikeLogin } else { Found::Wanted });
    }
    let read = match kind {
        LogKind::Requests => Some(text::parse(line, fields, moments)?),
        LogKind::Logins => login::parse(line, moments)?,
    };
    let Some(request) = read else { return Ok(Found::Other) };
    take(&request);
    Ok(Found::Wanted)
}

/// Returns the beginning of a line, with control characters escaped.
fn shown(text: &str) -> String {
    printable(&text.chars().take(60).collect::<String>()).into_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn feed(logs: &[&str], window: u64) -> Feed {
        let lines = logs
            .iter()
            .zip('a'..)
            .map(|(text, name)| Lines::new(name.to_string(), Box::new(std::io::Cursor::new(text.as_bytes().to_vec()))));
        Feed::new(LogKind::Requests, lines.collect(), Fields::default(), Span::from_secs(window), Progress::new())
    }

    fn log(seconds: &[u64]) -> String {
        let line = |second: &u64| {
            let (minute, second) = (second / 60, second % 60);
            format!(
                "203.0.113.7 - - [17/May/2015:10:{minute:02}:{second:02} +0000] \"GET /{minute}/{second} HTTP/1.1\" 200 1\n"
            )
        };
        seconds.iter().map(line).collect()
    }

    fn paths(mut feed: Feed) -> (Vec<String>, LineCounts) {
        let mut paths = Vec::new();
        let mut last = 0;
        while let Some(second) = feed.next_second() {
            for request in second {
                // The limiter relies on this: a clock that steps back would give back what was used.
                assert!(request.at.micros >= last, "time runs backwards");
                last = request.at.micros;
                paths.push(request.path.unwrap().to_owned());
            }
        }
        (paths, feed.finish())
    }

    #[test]
    fn late_lines_within_the_window_are_sorted_and_later_ones_are_counted() {
        let (found, counts) = paths(feed(&[&log(&[3, 43, 47, 12, 50])], 60));
        assert_eq!(found, ["/0/3", "/0/12", "/0/43", "/0/47", "/0/50"]);
        assert_eq!((counts.lines, counts.late), (5, 0));
        // Once 47 is ten seconds ago, lines before it are too late.
        let (found, counts) = paths(feed(&[&log(&[3, 43, 47, 58, 12, 59])], 10));
        assert_eq!(found.len(), 6);
        assert_eq!(counts.late, 1);
    }

    #[test]
    fn equal_times_keep_the_order_of_the_log() {
        let text = log(&[5, 5, 5]).replacen("/0/5", "/first", 1);
        assert_eq!(paths(feed(&[&text], 60)).0, ["/first", "/0/5", "/0/5"]);
    }

    #[test]
    fn several_logs_are_merged_by_time() {
        let (found, _) = paths(feed(&[&log(&[100, 101, 102]), &log(&[1, 2, 101]), ""], 0));
        assert_eq!(found, ["/0/1", "/0/2", "/1/40", "/1/41", "/1/41", "/1/42"]);
    }

    #[test]
    fn lines_that_cannot_be_parsed_are_counted_and_the_first_are_shown() {
        let mut text = "nonsense\n".repeat(7);
        text.insert_str(0, &log(&[1]));
        text.push_str("\n{\"half\": \n\u{1b}[31mred\n");
        let (found, counts) = paths(feed(&[&text], 60));
        assert_eq!((found.len(), counts.lines, counts.unreadable, counts.shown.len()), (1, 11, 10, SHOWN));
        let first = counts.shown.first().unwrap();
        assert_eq!((first.log.as_str(), first.number, first.text.as_str()), ("a", 2, "nonsense"));
        assert_eq!(shown("\u{1b}[31m\u{202e}"), "\\u001b[31m\\u202e");
    }

    #[test]
    fn the_buffer_is_bounded() {
        // All lines are of one second, which is never complete before the end.
        let text = log(&[1]).repeat(MAX_BUFFERED * 2);
        let mut feed = feed(&[&text], 3_600);
        let mut count = 0;
        while let Some(in_second) = feed.next_second().map(Iterator::count) {
            count += in_second;
            // The buffer, and the part of the second that was returned last.
            assert!(feed.buffer.requests + feed.due.len() <= MAX_BUFFERED * 2);
        }
        assert_eq!(count, MAX_BUFFERED * 2);
    }
}
