//! Requests in the order of their own clock: several logs merged by time, and lines that were written a little late put
//! back in their place.

use std::collections::BTreeMap;
use std::net::IpAddr;
use std::path::PathBuf;

use threshold_core::Span;

use super::{Fields, Line, Lines, Moment, MomentReader, Progress, Request, Scalars, Unreadable, login, open, text};

/// The most lines that wait for their turn.
const MOST_HELD: usize = 65_536;
/// The most text of lines that wait.
const MOST_TEXT: usize = 64 << 20;
/// The most logs in one run: each has a buffer and an open file.
const MOST_LOGS: usize = 1_000;
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
    form: Form,
    sources: Vec<Source>,
    fields: Fields,
    window: u64,
    /// Requests that wait for their turn, by their second.
    held: BTreeMap<u64, Batch>,
    held_requests: usize,
    held_text: usize,
    /// The second whose turn it is, in order, and how many of its requests have been given out.
    due: Batch,
    given: usize,
    /// A batch that can be used again.
    spare: Batch,
    /// The newest time that was read, and the last that was given out.
    newest: u64,
    last: u64,
    progress: Progress,
    pub(crate) counts: LineCounts,
}

/// A log, and its next request if there is one.
struct Source {
    lines: Lines,
    moments: MomentReader,
    head: Batch,
}

impl Source {
    fn head(&self) -> Option<&Record> {
        self.head.records.first()
    }
}

/// Which of a request's texts.
#[derive(Clone, Copy)]
enum Part {
    Method,
    Path,
    Host,
    User,
    Tenant,
    Tier,
}

impl Part {
    const ALL: [Self; 6] = [Self::Method, Self::Path, Self::Host, Self::User, Self::Tenant, Self::Tier];

    fn of<'a>(self, request: &Request<'a>) -> Option<&'a str> {
        match self {
            Self::Method => request.method,
            Self::Path => request.path,
            Self::Host => request.host,
            Self::User => request.user,
            Self::Tenant => request.tenant,
            Self::Tier => request.tier,
        }
    }
}

/// Requests that outlive their lines, side by side in memory: they are read in the order in which they were written.
#[derive(Default)]
struct Batch {
    records: Vec<Record>,
    text: String,
}

/// One request of a batch.
#[derive(Clone, Copy)]
struct Record {
    at: Moment,
    ip: Option<IpAddr>,
    status: Option<u16>,
    bytes: Option<u64>,
    repeated: u64,
    /// Where each part is in the batch's text; what is not there ends before it begins.
    parts: [(u32, u32); Part::ALL.len()],
}

const NOT_THERE: (u32, u32) = (1, 0);

impl Batch {
    fn push(&mut self, request: &Request<'_>) {
        let mut parts = [NOT_THERE; Part::ALL.len()];
        for (part, slot) in Part::ALL.into_iter().zip(&mut parts) {
            if let Some(value) = part.of(request) {
                let start = self.text.len();
                self.text.push_str(value);
                // A batch holds far less than fits; what did not would be as good as not logged.
                let place = u32::try_from(start).ok().zip(u32::try_from(self.text.len()).ok());
                *slot = place.unwrap_or(NOT_THERE);
            }
        }
        let Request { at, ip, status, bytes, repeated, .. } = *request;
        self.records.push(Record { at, ip, status, bytes, repeated, parts });
    }

    fn get(&self, index: usize) -> Option<Request<'_>> {
        let record = self.records.get(index)?;
        let part = |part: Part| {
            let (start, end) = *record.parts.get(part as usize)?;
            self.text.get(usize::try_from(start).ok()?..usize::try_from(end).ok()?)
        };
        Some(Request {
            at: record.at,
            ip: record.ip,
            method: part(Part::Method),
            path: part(Part::Path),
            host: part(Part::Host),
            user: part(Part::User),
            tenant: part(Part::Tenant),
            tier: part(Part::Tier),
            status: record.status,
            bytes: record.bytes,
            repeated: record.repeated,
        })
    }

    fn clear(&mut self) {
        self.records.clear();
        self.text.clear();
    }
}

impl Feed {
    /// Opens logs. Lines that come late by no more than `window` are put in their place.
    pub(crate) fn open(logs: &[PathBuf], fields: Fields, window: Span) -> anyhow::Result<Self> {
        Self::open_as(Form::Requests, logs, fields, window)
    }

    /// As [`open`](Self::open), for logs of any form.
    pub(crate) fn open_as(form: Form, logs: &[PathBuf], fields: Fields, window: Span) -> anyhow::Result<Self> {
        anyhow::ensure!(logs.len() <= MOST_LOGS, "at most {MOST_LOGS} logs can be read at once");
        let progress = Progress::new();
        let lines = logs.iter().map(|path| open(path, &progress)).collect::<anyhow::Result<Vec<Lines>>>()?;
        Ok(Self::new(form, lines, fields, window, progress))
    }

    fn new(form: Form, lines: Vec<Lines>, fields: Fields, window: Span, progress: Progress) -> Self {
        let sources = lines
            .into_iter()
            .map(|lines| Source { lines, moments: MomentReader::default(), head: Batch::default() })
            .collect();
        let mut feed = Self {
            form,
            sources,
            fields,
            window: window.micros(),
            held: BTreeMap::new(),
            held_requests: 0,
            held_text: 0,
            due: Batch::default(),
            given: 0,
            spare: Batch::default(),
            newest: 0,
            last: 0,
            progress,
            counts: LineCounts::default(),
        };
        for index in 0..feed.sources.len() {
            feed.read_head(index);
        }
        feed
    }

    /// The next request. Its time is never before that of the one before it.
    pub(crate) fn next_request(&mut self) -> Option<Request<'_>> {
        self.next_two().map(|(request, _)| request)
    }

    /// The next request, and the one after it if that is known already; its time may still be moved.
    pub(crate) fn next_two(&mut self) -> Option<(Request<'_>, Option<Request<'_>>)> {
        while self.given >= self.due.records.len() {
            let full = self.held_requests >= MOST_HELD || self.held_text >= MOST_TEXT;
            let first = self.held.first_key_value().map(|(second, _)| *second);
            if full || first.is_some_and(|second| self.is_over(second)) || !self.take_earliest_head() {
                self.bring_due()?;
            }
        }
        let index = self.given;
        self.given = index.saturating_add(1);
        let mut request = self.due.get(index)?;
        if request.at.micros < self.last {
            self.counts.late = self.counts.late.saturating_add(1);
            request.at.micros = self.last;
        }
        self.last = request.at.micros;
        Some((request, self.due.get(self.given)))
    }

    /// Whether nothing of this second is waited for any more.
    fn is_over(&self, second: u64) -> bool {
        let end = second.saturating_add(1).saturating_mul(SECOND);
        end.saturating_add(self.window) <= self.newest
    }

    /// Makes the earliest second that waits the one whose turn it is.
    fn bring_due(&mut self) -> Option<()> {
        let (_, mut batch) = self.held.pop_first()?;
        self.held_requests = self.held_requests.saturating_sub(batch.records.len());
        self.held_text = self.held_text.saturating_sub(batch.text.len());
        // Stable, so that equal times keep the order of the log; and quick where they are in order already.
        batch.records.sort_by_key(|record| record.at.micros);
        self.spare = std::mem::replace(&mut self.due, batch);
        self.spare.clear();
        self.given = 0;
        Some(())
    }

    /// Ends the run: what was counted, and what went wrong.
    pub(crate) fn finish(mut self) -> LineCounts {
        self.progress.finish();
        self.counts.problems.extend(self.sources.iter_mut().filter_map(|source| source.lines.problem.take()));
        self.counts
    }

    /// Moves the earliest of the logs' next requests to those that wait; says whether there was one.
    fn take_earliest_head(&mut self) -> bool {
        let heads = self.sources.iter().enumerate();
        let heads = heads.filter_map(|(index, source)| Some((source.head()?.at.micros, index)));
        let Some((at, index)) = heads.min() else { return false };
        let Some(request) = self.sources.get(index).and_then(|source| source.head.get(0)) else { return false };
        self.newest = self.newest.max(at);
        let second = at.checked_div(SECOND).unwrap_or(0);
        let batch = self.held.entry(second).or_insert_with(|| std::mem::take(&mut self.spare));
        let before = batch.text.len();
        batch.push(&request);
        self.held_text = self.held_text.saturating_add(batch.text.len().saturating_sub(before));
        self.held_requests = self.held_requests.saturating_add(1);
        self.read_head(index);
        true
    }

    /// Reads a log on to its next request.
    fn read_head(&mut self, index: usize) {
        let Some(Source { lines, moments, head }) = self.sources.get_mut(index) else { return };
        let counts = &mut self.counts;
        head.clear();
        while let Some(line) = lines.next_line() {
            counts.lines = counts.lines.saturating_add(1);
            self.progress.lines(counts.lines);
            let (text, read) = match line {
                Line::Bad(why) => ("", Err(Unreadable(why))),
                Line::Text(text) => (text, read_into(text, self.form, &self.fields, moments, head)),
            };
            let why = match read {
                Ok(true) => return,
                Ok(false) => {
                    counts.others = counts.others.saturating_add(1);
                    continue;
                }
                Err(Unreadable(why)) => why,
            };
            let text = shown(text);
            let number = lines.number;
            counts.unreadable = counts.unreadable.saturating_add(1);
            if counts.shown.len() < SHOWN {
                counts.shown.push(BadLine { log: lines.name.clone(), number, why, text });
            }
        }
    }
}

/// Reads a line of any format; says whether it is about what is looked for. An object is JSON, and nothing else begins
/// like one.
fn read_into(
    line: &str,
    form: Form,
    fields: &Fields,
    moments: &mut MomentReader,
    head: &mut Batch,
) -> Result<bool, Unreadable> {
    if line.trim_start().starts_with('{') {
        let scalars = Scalars::read(line, fields)?;
        head.push(&match form {
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
        head.push(request);
    }
    Ok(read.is_some())
}

/// The beginning of a line, fit for a terminal.
fn shown(text: &str) -> String {
    text.chars().take(60).map(|c| if c.is_control() { '\u{fffd}' } else { c }).collect()
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
        while let Some(request) = feed.next_request() {
            assert!(request.at.micros >= last, "time runs backwards");
            last = request.at.micros;
            paths.push(request.path.unwrap().to_owned());
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
        assert_eq!(shown("\u{1b}[31m"), "\u{fffd}[31m");
    }

    #[test]
    fn what_waits_is_bounded() {
        // All of one second, so that nothing would ever be old enough.
        let text = log(&[1]).repeat(MOST_HELD * 2);
        let mut feed = feed(&[&text], 3_600);
        let mut count = 0;
        while feed.next_request().is_some() {
            assert!(feed.held_requests + feed.due.records.len() <= MOST_HELD * 2);
            count += 1;
        }
        assert_eq!(count, MOST_HELD * 2);
    }
}
