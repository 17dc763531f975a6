//! Requests in the order of their own clock: several logs merged by time, and lines that were written a little late put
//! back in their place.

use std::collections::BTreeMap;
use std::path::PathBuf;

use threshold_core::Span;
use threshold_core::text::printable;

use super::batch::Batch;
use super::{Fields, Line, Lines, MomentReader, Progress, Request, Scalars, Unreadable, login, open, text};

/// The most lines that wait for their turn.
const MAX_HELD: usize = 65_536;
/// The most text of lines that wait.
const MAX_TEXT: usize = 64 << 20;
/// The most logs in one run: each has a buffer and an open file.
const MAX_LOGS: usize = 1_000;
/// How many of the lines that could not be read are shown.
const SHOWN: usize = 5;
/// Microseconds in a second.
const SECOND: u64 = 1_000_000;

/// A line that could not be read.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct BadLine {
    pub(crate) log: String,
    pub(crate) number: u64,
    pub(crate) why: &'static str,
    pub(crate) text: String,
}

/// What the lines came to.
#[derive(Debug, Default)]
pub(crate) struct LineCounts {
    pub(crate) lines: u64,
    pub(crate) unreadable: u64,
    /// Lines that can be read, and are about something else.
    pub(crate) others: u64,
    /// Lines older than the window allows, counted as if they had come when they were read.
    pub(crate) late: u64,
    pub(crate) shown: Vec<BadLine>,
    /// Logs that ended before their end.
    pub(crate) problems: Vec<String>,
}

/// What the lines of a log are about.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Form {
    Requests,
    Logins,
}

/// All requests of some logs, in order.
pub(crate) struct Feed {
    sources: Vec<Source>,
    reading: Reading,
    held: Held,
    window: u64,
    /// The second whose turn it was last.
    due: Batch,
    /// The last time that was given out.
    last: u64,
}

impl Feed {
    /// Opens logs. Lines that come late by no more than `window` are put in their place.
    pub(crate) fn open(logs: &[PathBuf], fields: Fields, window: Span) -> anyhow::Result<Self> {
        Self::open_as(Form::Requests, logs, fields, window)
    }

    /// As [`open`](Self::open), for logs of any form.
    pub(crate) fn open_as(form: Form, logs: &[PathBuf], fields: Fields, window: Span) -> anyhow::Result<Self> {
        anyhow::ensure!(logs.len() <= MAX_LOGS, "at most {MAX_LOGS} logs can be read at once");
        let progress = Progress::new();
        let lines = logs.iter().map(|path| open(path, &progress)).collect::<anyhow::Result<Vec<Lines>>>()?;
        Ok(Self::new(form, lines, fields, window, progress))
    }

    fn new(form: Form, lines: Vec<Lines>, fields: Fields, window: Span, progress: Progress) -> Self {
        let mut reading = Reading { form, fields, progress, counts: LineCounts::default() };
        let mut sources: Vec<Source> = lines
            .into_iter()
            .map(|lines| Source { lines, moments: MomentReader::default(), head: Batch::default() })
            .collect();
        // One log alone needs no head: there is no other to compare it with.
        if sources.len() > 1 {
            sources.iter_mut().for_each(|source| source.read_head(&mut reading));
        }
        Self { sources, reading, held: Held::default(), window: window.micros(), due: Batch::default(), last: 0 }
    }

    /// The requests of the next second that has any, in order. No time is ever before that of the request before it.
    pub(crate) fn next_second(&mut self) -> Option<impl Iterator<Item = Request<'_>>> {
        while !self.held.is_due(self.window) && self.read_one() {}
        self.held.take_first(&mut self.due)?;
        let Self { due, last, reading, .. } = self;
        Some(due.iter().map(move |mut request| {
            if request.at.micros < *last {
                reading.counts.late = reading.counts.late.saturating_add(1);
                request.at.micros = *last;
            }
            *last = request.at.micros;
            request
        }))
    }

    /// Ends the run: what was counted, and what went wrong.
    pub(crate) fn finish(mut self) -> LineCounts {
        self.reading.progress.finish();
        let mut counts = self.reading.counts;
        counts.problems.extend(self.sources.iter_mut().filter_map(|source| source.lines.problem.take()));
        counts
    }

    /// Moves the earliest of the logs' next requests to those that wait; says whether there was one.
    fn read_one(&mut self) -> bool {
        let held = &mut self.held;
        if let [only] = self.sources.as_mut_slice() {
            return only.read(&mut self.reading, |request| held.hold(request));
        }
        let heads = self.sources.iter().enumerate();
        let heads = heads.filter_map(|(index, source)| Some((source.head.first()?.at.micros, index)));
        let Some(source) = heads.min().and_then(|(_, index)| self.sources.get_mut(index)) else { return false };
        if let Some(request) = source.head.first() {
            held.hold(&request);
        }
        source.read_head(&mut self.reading);
        true
    }
}

/// Requests that wait for their turn.
#[derive(Default)]
struct Held {
    seconds: BTreeMap<u64, Batch>,
    requests: usize,
    text: usize,
    /// The newest time that was read.
    newest: u64,
    /// A batch that can be used again.
    spare: Batch,
}

impl Held {
    #[inline]
    fn hold(&mut self, request: &Request<'_>) {
        self.newest = self.newest.max(request.at.micros);
        let second = request.at.micros.checked_div(SECOND).unwrap_or(0);
        let batch = self.seconds.entry(second).or_insert_with(|| std::mem::take(&mut self.spare));
        self.text = self.text.saturating_add(batch.push(request));
        self.requests = self.requests.saturating_add(1);
    }

    /// Whether the turn of the earliest second has come: nothing of it is waited for any more, or there is no more room.
    fn is_due(&self, window: u64) -> bool {
        let full = self.requests >= MAX_HELD || self.text >= MAX_TEXT;
        let over = |second: u64| {
            let end = second.saturating_add(1).saturating_mul(SECOND);
            end.saturating_add(window) <= self.newest
        };
        full || self.seconds.first_key_value().is_some_and(|(second, _)| over(*second))
    }

    /// Puts the earliest second in the place of the one whose turn it was.
    fn take_first(&mut self, due: &mut Batch) -> Option<()> {
        let (_, mut batch) = self.seconds.pop_first()?;
        self.requests = self.requests.saturating_sub(batch.len());
        self.text = self.text.saturating_sub(batch.text_len());
        batch.sort();
        self.spare = std::mem::replace(due, batch);
        self.spare.clear();
        Some(())
    }
}

/// How lines are read, and what became of them.
struct Reading {
    form: Form,
    fields: Fields,
    progress: Progress,
    counts: LineCounts,
}

/// A log, and among several its next request, if there is one.
struct Source {
    lines: Lines,
    moments: MomentReader,
    head: Batch,
}

impl Source {
    fn read_head(&mut self, reading: &mut Reading) {
        let mut head = std::mem::take(&mut self.head);
        head.clear();
        self.read(reading, |request| {
            head.push(request);
        });
        self.head = head;
    }

    /// Reads on to the next request and hands it over; says whether there was one.
    fn read(&mut self, reading: &mut Reading, mut take: impl FnMut(&Request<'_>)) -> bool {
        let Reading { form, fields, progress, counts } = reading;
        while let Some(line) = self.lines.next_line() {
            counts.lines = counts.lines.saturating_add(1);
            progress.lines(counts.lines);
            let (text, read) = match line {
                Line::Bad(why) => ("", Err(Unreadable(why))),
                Line::Text(text) => (text, read_line(text, *form, fields, &mut self.moments, &mut take)),
                Line::Mended(text) => {
                    let read = read_line(text, *form, fields, &mut self.moments, &mut take);
                    (text, read.map_err(|_| Unreadable("it is not UTF-8 text")))
                }
            };
            match read {
                Ok(true) => return true,
                Ok(false) => counts.others = counts.others.saturating_add(1),
                Err(Unreadable(why)) => {
                    counts.unreadable = counts.unreadable.saturating_add(1);
                    if counts.shown.len() < SHOWN {
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

/// Reads a line of any format; says whether it is about what is looked for. An object is JSON, and nothing else begins
/// like one.
fn read_line(
    line: &str,
    form: Form,
    fields: &Fields,
    moments: &mut MomentReader,
    take: &mut impl FnMut(&Request<'_>),
) -> Result<bool, Unreadable> {
    if line.trim_start().starts_with('{') {
        let scalars = Scalars::read(line, fields)?;
        take(&match form {
            Form::Requests => scalars.request(moments)?,
            Form::Logins => login::event(&scalars, moments)?,
        });
        return Ok(true);
    }
    let read = match form {
        Form::Requests => Some(text::parse(line, fields, moments)?),
        Form::Logins => login::parse(line, moments)?,
    };
    if let Some(request) = &read {
        take(request);
    }
    Ok(read.is_some())
}

/// The beginning of a line, fit for a terminal.
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
        Feed::new(Form::Requests, lines.collect(), Fields::default(), Span::from_secs(window), Progress::new())
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
                assert!(request.at.micros >= last, "time runs backwards");
                last = request.at.micros;
                paths.push(request.path.unwrap().to_owned());
            }
        }
        (paths, feed.finish())
    }

    #[test]
    fn lines_within_the_window_are_put_in_order_and_later_ones_are_counted() {
        let (found, counts) = paths(feed(&[&log(&[3, 43, 47, 12, 50])], 60));
        assert_eq!(found, ["/0/3", "/0/12", "/0/43", "/0/47", "/0/50"]);
        assert_eq!((counts.lines, counts.late), (5, 0));
        // Once 47 is ten seconds ago, nothing before it is waited for.
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
    fn several_logs_are_one() {
        let (found, _) = paths(feed(&[&log(&[100, 101, 102]), &log(&[1, 2, 101]), ""], 0));
        assert_eq!(found, ["/0/1", "/0/2", "/1/40", "/1/41", "/1/41", "/1/42"]);
    }

    #[test]
    fn what_cannot_be_read_is_counted_and_the_first_lines_are_shown() {
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
    fn what_waits_is_bounded() {
        // All of one second, so that nothing would ever be old enough.
        let text = log(&[1]).repeat(MAX_HELD * 2);
        let mut feed = feed(&[&text], 3_600);
        let mut count = 0;
        while let Some(in_second) = feed.next_second().map(Iterator::count) {
            count += in_second;
            assert!(feed.held.requests + feed.due.len() <= MAX_HELD * 2);
        }
        assert_eq!(count, MAX_HELD * 2);
    }
}
