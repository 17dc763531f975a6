//! A circuit breaker: a store that fails again and again is left alone for a moment, so that requests do not wait for it.

use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use super::server::jittered;

/// The number of failures in a row after which the breaker opens.
const FAILURES: u32 = 5;
/// How long it stays open before one call is let through, at most. Exactness returns within 5 seconds of the store's return, and a
/// probe every half second costs nothing.
const OPEN: Duration = Duration::from_millis(500);

/// Counts failures in a row.
#[derive(Debug, Default)]
pub(super) struct Breaker(Mutex<State>);

#[derive(Debug, Default)]
struct State {
    failures: u32,
    open_until: Option<Instant>,
}

impl Breaker {
    /// Returns whether a call may be made now. An open breaker lets one call through from time to time.
    pub(super) fn lets_through(&self, now: Instant) -> bool {
        let mut state = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        match state.open_until {
            Some(until) if now < until => false,
            Some(_) => {
                // One call tests the server. The next one has to wait for another pause.
                state.open_until = now.checked_add(jittered(OPEN));
                true
            }
            None => true,
        }
    }

    /// Counts the end of a call.
    pub(super) fn ended(&self, succeeded: bool, now: Instant) {
        let mut state = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if succeeded {
            *state = State::default();
            return;
        }
        state.failures = state.failures.saturating_add(1);
        // Calls that were under way when it opened do not keep it open for longer.
        if state.failures >= FAILURES && state.open_until.is_none() {
            state.open_until = now.checked_add(jittered(OPEN));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Woken by: `failures > FAILURES`, and by an open breaker that lets everything through after its time.
    #[test]
    fn it_opens_after_failures_in_a_row_and_probes_one_call_at_a_time() {
        let (breaker, start) = (Breaker::default(), Instant::now());
        for _ in 1..FAILURES {
            breaker.ended(false, start);
            assert!(breaker.lets_through(start));
        }
        breaker.ended(true, start);
        for _ in 0..FAILURES {
            assert!(breaker.lets_through(start));
            breaker.ended(false, start);
        }
        assert!(!breaker.lets_through(start));
        let later = start + OPEN;
        assert!(breaker.lets_through(later), "a probe");
        assert!(!breaker.lets_through(later), "one probe at a time");
        breaker.ended(true, later);
        assert!(breaker.lets_through(later));
    }
}
