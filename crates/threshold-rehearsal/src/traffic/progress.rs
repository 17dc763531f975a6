//! A progress bar on a terminal; nothing in a pipe.

use std::cell::Cell;
use std::io::{self, Read};
use std::rc::Rc;

use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};

/// The lines between two updates of the bar, a few milliseconds.
const LINES_PER_UPDATE: u64 = 8_192;

/// The progress over all inputs.
#[derive(Debug, Clone)]
pub(crate) struct Progress {
    bar: ProgressBar,
    read: Rc<Cell<u64>>,
    /// The bytes of all inputs; `None` if the size of one is unknown.
    all: Rc<Cell<Option<u64>>>,
}

impl Progress {
    pub(crate) fn new() -> Self {
        // Draws only where standard error is a terminal.
        let bar = ProgressBar::with_draw_target(None, ProgressDrawTarget::stderr());
        Self { bar, read: Rc::default(), all: Rc::new(Cell::new(Some(0))) }
    }

    /// Adds the size of an input.
    pub(super) fn expect(&self, bytes: Option<u64>) {
        // One input of unknown size makes the whole unknown.
        let all = self.all.get().zip(bytes).map(|(all, bytes)| all.saturating_add(bytes));
        self.all.set(all);
        let style = match all {
            Some(all) => {
                self.bar.set_length(all);
                "{bar:30} {percent:>3} %  {msg}  {eta} left"
            }
            None => {
                self.bar.unset_length();
                "{spinner} {bytes}  {msg}"
            }
        };
        if let Ok(style) = ProgressStyle::with_template(style) {
            self.bar.set_style(style);
        }
    }

    /// Wraps a reader, so that its bytes are counted.
    pub(super) fn watch(&self, inner: Box<dyn Read>) -> CountingReader {
        CountingReader { inner, read: Rc::clone(&self.read) }
    }

    /// Updates the bar after this number of lines.
    #[inline]
    pub(crate) fn lines(&self, lines: u64) {
        if lines.is_multiple_of(LINES_PER_UPDATE) && !self.bar.is_hidden() {
            self.draw(lines);
        }
    }

    #[cold]
    fn draw(&self, lines: u64) {
        let rate = lines.saturating_mul(1_000).checked_div(u64::try_from(self.bar.elapsed().as_millis()).unwrap_or(0));
        self.bar.set_position(self.read.get());
        self.bar.set_message(format!("{lines} lines, {}/s", rate.unwrap_or(0)));
    }

    pub(crate) fn finish(&self) {
        self.bar.finish_and_clear();
    }
}

/// A reader that counts its bytes.
pub(super) struct CountingReader {
    inner: Box<dyn Read>,
    read: Rc<Cell<u64>>,
}

impl Read for CountingReader {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        // Counted before decompression, as the file's size is.
        let read = self.inner.read(buffer)?;
        self.read.set(self.read.get().saturating_add(u64::try_from(read).unwrap_or(0)));
        Ok(read)
    }
}
