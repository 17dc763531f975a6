//! A bounded queue in front of standard error, written by a thread of its own: a reader that stalls blocks no request.

use std::borrow::Cow;
use std::io::{self, ErrorKind, Write};
use std::os::fd::AsFd as _;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, OnceLock, PoisonError};
use std::thread::ThreadId;
use std::time::Duration;

use threshold_core::text::printable;
use tracing_subscriber::fmt::MakeWriter;

/// The most bytes in the queue: some thousand lines. The writer's own buffer may hold as many again.
const MAX_QUEUED: usize = 1 << 20;
/// How long the process waits for the last lines before it ends.
const FLUSH_TIMEOUT: Duration = Duration::from_secs(1);
/// The pause before writing to a full non-blocking pipe again.
const RETRY_DELAY: Duration = Duration::from_millis(10);

/// The queue of log lines.
#[derive(Debug, Clone, Default)]
pub(super) struct Queue(Arc<Shared>);

#[derive(Debug, Default)]
struct Shared {
    waiting: Mutex<Waiting>,
    /// Notified when there are lines to write.
    filled: Condvar,
    /// Notified when all lines are written.
    emptied: Condvar,
    /// The writing thread. Its own lines are never dropped: they report the number of dropped lines.
    writer: OnceLock<ThreadId>,
}

/// The lines that wait to be written.
#[derive(Debug, Default)]
struct Waiting {
    lines: Vec<u8>,
    count: u64,
    is_writing: bool,
    /// The number of lines that did not fit or could not be written, and were not reported yet.
    dropped: u64,
}

/// A guard that waits, for a bounded time, until all lines are written.
#[derive(Debug)]
#[must_use = "it waits when it is dropped"]
pub(crate) struct FlushOnDrop(Queue);

impl Queue {
    /// Creates a queue, and a thread that writes it to standard error.
    pub(super) fn to_stderr() -> io::Result<(Self, FlushOnDrop)> {
        // A descriptor of its own: while the reader stalls, the lock of `io::stderr` would be held, and block every other user.
        let stderr = std::fs::File::from(io::stderr().as_fd().try_clone_to_owned()?);
        let queue = Self::default();
        let writer = queue.clone();
        std::thread::Builder::new().name("log".to_owned()).spawn(move || writer.write_to(stderr))?;
        Ok((queue.clone(), FlushOnDrop(queue)))
    }

    fn push(&self, line: &[u8]) {
        let mut waiting = self.lock();
        // The newest line is dropped. The oldest ones say how a problem began.
        let is_full = waiting.lines.len().saturating_add(line.len()) > MAX_QUEUED;
        if is_full && self.0.writer.get() != Some(&std::thread::current().id()) {
            waiting.dropped = waiting.dropped.saturating_add(1);
            return;
        }
        waiting.lines.extend_from_slice(line);
        waiting.count = waiting.count.saturating_add(1);
        // Unlocked before the thread is woken, which would otherwise wait for the lock at once.
        drop(waiting);
        self.0.filled.notify_one();
    }

    /// Writes lines until the process ends.
    fn write_to(&self, mut out: impl Write) {
        let _ = self.0.writer.set(std::thread::current().id());
        let mut lines = Vec::new();
        loop {
            let count = self.take(&mut lines);
            // Without the lock: this may block for as long as the reader of standard error stalls.
            let written = write_all(&mut out, &lines);
            let dropped = self.written(count, written.is_ok());
            if dropped > 0 {
                // An error, because errors may be among the dropped lines.
                tracing::error!(dropped, "log lines dropped: standard error was not read in time");
            }
        }
    }

    /// Waits for lines, and takes them all.
    fn take(&self, lines: &mut Vec<u8>) -> u64 {
        lines.clear();
        let mut waiting = self.lock();
        while waiting.lines.is_empty() {
            // Here and not after the write: the queue may have been filled again meanwhile.
            self.0.emptied.notify_all();
            waiting = self.0.filled.wait(waiting).unwrap_or_else(PoisonError::into_inner);
        }
        // The lines are in neither place for a moment, and a flush must not take the queue for empty.
        waiting.is_writing = true;
        // Swapped, so that both buffers keep their memory and no line allocates.
        std::mem::swap(&mut waiting.lines, lines);
        std::mem::take(&mut waiting.count)
    }

    /// Notes that lines were written, or could not be. Returns how many dropped lines to report: none if writing fails,
    /// because the report would be lost too.
    fn written(&self, count: u64, is_ok: bool) -> u64 {
        let mut waiting = self.lock();
        waiting.is_writing = false;
        if is_ok {
            return std::mem::take(&mut waiting.dropped);
        }
        // They count as dropped, and are reported as soon as a write succeeds again.
        waiting.dropped = waiting.dropped.saturating_add(count);
        0
    }

    fn lock(&self) -> MutexGuard<'_, Waiting> {
        self.0.waiting.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Writes everything. Another process that shares the pipe may have made it non-blocking, so `WouldBlock` is waited for.
fn write_all(out: &mut impl Write, mut lines: &[u8]) -> io::Result<()> {
    while !lines.is_empty() {
        match out.write(lines) {
            Ok(0) => return Err(ErrorKind::WriteZero.into()),
            Ok(written) => lines = lines.get(written..).unwrap_or_default(),
            // A signal arrived during the write. Nothing was written, and the same bytes are tried again.
            Err(error) if error.kind() == ErrorKind::Interrupted => {}
            Err(error) if error.kind() == ErrorKind::WouldBlock => std::thread::sleep(RETRY_DELAY),
            Err(error) => return Err(error),
        }
    }
    Ok(())
}

impl Drop for FlushOnDrop {
    fn drop(&mut self) {
        let Queue(shared) = &self.0;
        let waiting = shared.waiting.lock().unwrap_or_else(PoisonError::into_inner);
        // Both: lines that were taken but not written yet are no longer in the queue.
        let busy = |waiting: &mut Waiting| waiting.is_writing || !waiting.lines.is_empty();
        // Lines that are not written by then have a reader that does not read.
        drop(shared.emptied.wait_timeout_while(waiting, FLUSH_TIMEOUT, busy));
    }
}

impl<'a> MakeWriter<'a> for Queue {
    type Writer = LineWriter<'a>;

    fn make_writer(&'a self) -> LineWriter<'a> {
        LineWriter(self)
    }
}

/// Returns an event as one line without control characters: a client's name in it could contain line breaks, which forge log
/// lines, or terminal escape sequences.
fn one_line(event: &[u8]) -> Cow<'_, str> {
    let text = match std::str::from_utf8(event) {
        Ok(text) => Cow::Borrowed(text),
        Err(_) => Cow::Owned(String::from_utf8_lossy(event).into_owned()),
    };
    let line = text.strip_suffix('\n').unwrap_or(&text);
    match printable(line) {
        Cow::Borrowed(_) => text,
        Cow::Owned(line) => Cow::Owned(line + "\n"),
    }
}

/// Writes one line into the queue. tracing writes each line in one call.
#[derive(Debug)]
pub(super) struct LineWriter<'a>(&'a Queue);

impl Write for LineWriter<'_> {
    fn write(&mut self, line: &[u8]) -> io::Result<usize> {
        self.0.push(one_line(line).as_bytes());
        // The length as given, whatever the line became: a shorter count would make the caller write the rest again.
        Ok(line.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_that_do_not_fit_are_dropped_and_counted() {
        let queue = Queue::default();
        let line = vec![b'x'; MAX_QUEUED / 4];
        // Four fit, three do not.
        for _ in 0..7 {
            queue.push(&line);
        }
        let mut lines = Vec::new();
        assert_eq!((queue.take(&mut lines), lines.len()), (4, MAX_QUEUED));
        // While these are being written, the queue has space again.
        queue.push(b"more\n");
        assert_eq!(queue.written(4, true), 3, "dropped lines to report");
        assert_eq!((queue.take(&mut lines), lines.as_slice()), (1, b"more\n".as_slice()));
        assert_eq!(queue.written(1, true), 0, "they are reported once");
        queue.push(b"lost\n");
        assert_eq!(queue.take(&mut lines), 1);
        assert_eq!(queue.written(1, false), 0, "a report would be lost as well");
        queue.push(b"written\n");
        assert_eq!(queue.take(&mut lines), 1);
        assert_eq!(queue.written(1, true), 1);
    }

    #[test]
    fn an_event_is_one_line_without_control_characters() {
        let check = |event: &str, expect: &str| assert_eq!(one_line(event.as_bytes()), expect);
        check("a line\n", "a line\n");
        let json = "{\"user\":\"\u{202e}\u{9b}2J\u{2028}caf\u{e9}\"}\n";
        check(json, "{\"user\":\"\\u202e\\u009b2J\\u2028caf\u{e9}\"}\n");
        check("no policy:\nforged line\r\n", "no policy:\\nforged line\\r\n");
        assert_eq!(one_line(b"\xff\n"), "\u{fffd}\n");
    }

    #[test]
    fn everything_is_written_to_a_writer_that_takes_a_few_bytes_at_a_time() {
        /// Takes three bytes at a time, and every other time would block.
        struct Slow(Vec<u8>, bool);
        impl Write for Slow {
            fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
                self.1 = !self.1;
                if self.1 {
                    return Err(ErrorKind::WouldBlock.into());
                }
                let taken = bytes.len().min(3);
                self.0.extend_from_slice(&bytes[..taken]);
                Ok(taken)
            }
            fn flush(&mut self) -> io::Result<()> {
                Ok(())
            }
        }
        let mut slow = Slow(Vec::new(), false);
        write_all(&mut slow, b"0123456789").unwrap();
        assert_eq!(slow.0, b"0123456789");
    }
}
