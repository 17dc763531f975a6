//! The time of a server, as far as its replies have shown it.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Instant;

use threshold_core::{Span, Timestamp};

/// An estimate of a server's clock: the time in its last reply, and what has passed since by a clock that nobody sets. It is late
/// by as long as that reply took to arrive.
#[derive(Debug)]
pub(super) struct ServerClock {
    began: Instant,
    /// Microseconds since 1970 that the server's clock showed at `began`; 0 before the first reply.
    start: AtomicU64,
}

impl Default for ServerClock {
    fn default() -> Self {
        Self { began: Instant::now(), start: AtomicU64::new(0) }
    }
}

impl ServerClock {
    /// Takes over the time of a reply that has just arrived. A server whose clock was set, or its successor after a failover, is
    /// followed at once.
    pub(super) fn heard(&self, now: Timestamp) {
        self.start.store(now.micros().saturating_sub(self.elapsed()), Ordering::Relaxed);
    }

    /// Returns the server's present time; `None` before its first reply.
    pub(super) fn now(&self) -> Option<Timestamp> {
        let start = self.start.load(Ordering::Relaxed);
        (start > 0).then(|| Timestamp::from_micros(start.saturating_add(self.elapsed())))
    }

    /// Returns what the server's clock will show at a moment; `None` before its first reply.
    pub(super) fn at(&self, moment: Instant) -> Option<Timestamp> {
        let ahead = moment.saturating_duration_since(Instant::now());
        self.now().map(|now| now.plus(Span::from(ahead)))
    }

    fn elapsed(&self) -> u64 {
        u64::try_from(self.began.elapsed().as_micros()).unwrap_or(u64::MAX)
    }
}
