//! Wrong tokens: counted by the address they come from, on every path, and answered late where there were many.

use std::net::IpAddr;
use std::sync::Arc;
use std::time::Duration;

use http::StatusCode;
use threshold_core::address::AddressGroup;
use threshold_limiter::{Clock, KeyLimiter, Limit, SystemClock};
use tokio::sync::Semaphore;

use super::{ApiError, App};
use crate::log::Samples;

/// The wrong tokens that one address may show before it is answered late, or, as an operator, not at all. A person
/// mistypes; a program tries.
const GUESSES: Limit = Limit::per_minute(10);
/// When an operator may try again, in seconds: ten in a minute are one in six seconds.
pub(super) const GUESS_AGAIN_AFTER: &str = "6";
/// The most addresses whose wrong tokens are counted at once.
const GUESSERS: u64 = 10_000;
/// Whoever has an IPv6 address has a whole /64 of them.
const IPV6_PREFIX: u8 = 64;
/// How long a late answer waits.
const LATE: Duration = Duration::from_secs(1);
/// The most answers that wait at once.
const MAX_LATE: usize = 256;

/// How often each address has shown a wrong token.
pub(super) struct Guesses {
    /// Those of callers and of operators are counted apart: many callers share a proxy, and one with a wrong token must
    /// not keep operators out.
    callers: KeyLimiter<Arc<dyn Clock>>,
    operators: KeyLimiter<Arc<dyn Clock>>,
    late: Semaphore,
    logged: Samples,
}

impl Default for Guesses {
    fn default() -> Self {
        Self::new(GUESSERS, &(Arc::new(SystemClock::new()) as _))
    }
}

impl Guesses {
    /// Wrong tokens of so many addresses.
    fn new(addresses: u64, clock: &Arc<dyn Clock>) -> Self {
        let limiter = || KeyLimiter::new(GUESSES).max_keys(addresses).clock(Arc::clone(clock));
        Self { callers: limiter(), operators: limiter(), late: Semaphore::new(MAX_LATE), logged: Samples::default() }
    }
}

impl Guesses {
    /// Whether an address has shown so many wrong operators' tokens that it is not heard for a while.
    pub(super) fn bar_operators(&self, peer: Option<IpAddr>) -> bool {
        self.operators.check_cost(&source(peer), 0).remaining == 0
    }

    /// Counts a wrong token of somebody who wants to be an operator.
    pub(super) fn count_operator(&self, peer: Option<IpAddr>, app: &App) {
        let source = source(peer);
        let _ = self.operators.check(&source);
        if self.bar_operators(peer) {
            self.tell(&source, "too many wrong tokens for operators; this address is not heard for a while", app);
        }
    }

    /// Counts a wrong token of a caller; the answer waits if there were many. Right ones are never kept waiting, nor
    /// refused: whoever shares an address with somebody who guesses is still served.
    pub(super) async fn caller(&self, peer: Option<IpAddr>, app: &App) -> Result<(), ApiError> {
        let source = source(peer);
        if self.callers.check(&source).allowed {
            return Ok(());
        }
        self.tell(&source, "too many wrong tokens from this address; they are answered late", app);
        let Ok(_place) = self.late.try_acquire() else {
            let message = "too many wrong tokens";
            return Err(ApiError::new(StatusCode::TOO_MANY_REQUESTS, "too_many_requests", message));
        };
        tokio::time::sleep(LATE).await;
        Ok(())
    }

    /// Says so in the log, a few times a second at most.
    fn tell(&self, source: &str, message: &str, app: &App) {
        let Some(left_out) = self.logged.take(app.desk.now()) else { return };
        let policy = app.desk.policy();
        let ip = if policy.identity().log_identifiers { source.to_owned() } else { policy.key().redact(source) };
        tracing::warn!(ip, left_out, "{message}");
    }
}

impl std::fmt::Debug for Guesses {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Guesses").finish_non_exhaustive()
    }
}

/// Whom a connection is counted as.
fn source(peer: Option<IpAddr>) -> String {
    peer.map_or_else(String::new, |ip| AddressGroup::of(ip, IPV6_PREFIX).to_string())
}

#[cfg(test)]
mod tests {
    use threshold_core::Policy;
    use threshold_limiter::ManualClock;
    use tokio::time::Instant;

    use super::*;
    use crate::desk::Desk;
    use crate::door::Bounds;
    use crate::serve::Tokens;

    fn app() -> App {
        let policy = Policy::parse("", &|_| None).unwrap();
        let bounds = Bounds { patience: Duration::MAX, ..Bounds::default() };
        App::new(Desk::new(policy, Arc::new(SystemClock::new())), Tokens::default(), bounds)
    }

    /// How long the answer to a wrong token waits.
    async fn guess(app: &App, from: &str) -> Duration {
        let before = Instant::now();
        app.guesses.caller(Some(from.parse().unwrap()), app).await.unwrap();
        before.elapsed()
    }

    /// Broken once by a prefix of 128.
    #[tokio::test(start_paused = true)]
    async fn after_ten_a_minute_wrong_tokens_are_answered_late() {
        let app = app();
        for (first, sibling, stranger) in [
            ("203.0.113.7", "::ffff:203.0.113.7", "203.0.113.8"),
            ("2001:db8::1", "2001:db8::ffff:1", "2001:db8:0:1::1"),
        ] {
            for _ in 0..10 {
                assert_eq!(guess(&app, first).await, Duration::ZERO);
            }
            assert_eq!(guess(&app, first).await, LATE);
            assert_eq!(guess(&app, sibling).await, LATE);
            assert_eq!(guess(&app, stranger).await, Duration::ZERO);
        }
        // An operator who comes from the same address is heard.
        assert!(!app.guesses.bar_operators(Some("203.0.113.7".parse().unwrap())));
    }

    #[tokio::test(start_paused = true)]
    async fn so_many_answers_wait_at_once_and_no_more() {
        let app = Arc::new(app());
        for _ in 0..10 {
            guess(&app, "203.0.113.7").await;
        }
        let waiting: Vec<_> = (0..MAX_LATE)
            .map(|_| {
                let app = Arc::clone(&app);
                tokio::spawn(async move { guess(&app, "203.0.113.7").await })
            })
            .collect();
        while app.guesses.late.available_permits() > 0 {
            tokio::task::yield_now().await;
        }
        let before = Instant::now();
        let refused = app.guesses.caller(Some("203.0.113.7".parse().unwrap()), &app).await.unwrap_err();
        assert_eq!((refused.status, before.elapsed()), (StatusCode::TOO_MANY_REQUESTS, Duration::ZERO));
        for waited in waiting {
            assert_eq!(waited.await.unwrap(), LATE);
        }
        assert_eq!(guess(&app, "203.0.113.7").await, LATE);
    }

    /// However many addresses guess: the table does not grow, those that it has stay barred, and an operator at an address that
    /// it has no room for is heard. A caller's wrong token from there is answered late.
    ///
    /// Fails where a full table counts as a used-up budget in `bar_operators`.
    #[tokio::test(start_paused = true)]
    async fn a_full_table_of_guessers_keeps_no_operator_out() {
        let mut app = app();
        app.guesses = Guesses::new(100, &(Arc::new(ManualClock::default()) as _));
        let address = |number: u32| Some(IpAddr::from(std::net::Ipv4Addr::from_bits(0x0b00_0000 + number)));
        let mut known = 0;
        for number in 0..1_000 {
            let source = source(address(number));
            let fits = (0..10).filter(|_| app.guesses.operators.check(&source).allowed).count();
            let _ = (0..10).filter(|_| app.guesses.callers.check(&source).allowed).count();
            known += u32::from(fits == 10);
        }
        assert!((100..500).contains(&known), "{known}");
        let usage = (app.guesses.operators.usage().keys, app.guesses.callers.usage().keys);
        assert!(app.guesses.bar_operators(address(0)));
        let stranger = address(2_000);
        app.guesses.count_operator(stranger, &app);
        assert!(!app.guesses.bar_operators(stranger));
        assert_eq!(guess(&app, "192.0.2.9").await, LATE);
        assert_eq!((app.guesses.operators.usage().keys, app.guesses.callers.usage().keys), usage);
    }
}
