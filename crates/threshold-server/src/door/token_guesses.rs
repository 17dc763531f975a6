//! Limits guessed tokens: wrong ones are counted by address on every path, and after many of them answers are delayed.

use std::net::IpAddr;
use std::sync::Arc;
use std::time::Duration;

use http::StatusCode;
use threshold_core::address::AddressGroup;
use threshold_limiter::{Clock, KeyLimiter, Limit, SystemClock};
use tokio::sync::Semaphore;

use super::{ApiError, App};
use crate::log::LogSampler;

/// How many wrong tokens one address may send before callers are answered with a delay and operators are refused. A person
/// mistypes a few times; a program tries thousands.
const WRONG_TOKENS: Limit = Limit::per_minute(10);
/// When an operator may try again, in seconds: a bucket of ten in a minute refills one every six seconds.
pub(super) const RETRY_AFTER_SECS: &str = "6";
/// The most addresses whose wrong tokens are counted at once.
const MAX_ADDRESSES: u64 = 10_000;
/// One IPv6 client usually has a whole /64, and could send each guess from another address.
const IPV6_PREFIX: u8 = 64;
/// The delay of an answer to a wrong token.
const DELAY: Duration = Duration::from_secs(1);
/// The most answers that are delayed at once: each of them holds a connection.
const MAX_DELAYED: usize = 256;

/// How many wrong tokens an address has sent lately.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Guesses {
    Few,
    /// So many that the answer was delayed.
    Many,
}

/// The wrong tokens of each address.
pub(super) struct TokenGuesses {
    /// Callers and operators are counted separately: many callers share a proxy's address, and one of them with a wrong token
    /// must not block the operators who use that proxy too.
    callers: KeyLimiter<Arc<dyn Clock>>,
    operators: KeyLimiter<Arc<dyn Clock>>,
    delayed: Semaphore,
    log: LogSampler,
}

impl Default for TokenGuesses {
    fn default() -> Self {
        Self::new(MAX_ADDRESSES, &(Arc::new(SystemClock::new()) as _))
    }
}

impl TokenGuesses {
    /// Counts the wrong tokens of at most `addresses`.
    fn new(addresses: u64, clock: &Arc<dyn Clock>) -> Self {
        let limiter = || KeyLimiter::builder(WRONG_TOKENS).max_keys(addresses).clock(Arc::clone(clock)).build();
        Self {
            callers: limiter(),
            operators: limiter(),
            delayed: Semaphore::new(MAX_DELAYED),
            log: LogSampler::default(),
        }
    }
}

impl TokenGuesses {
    /// Whether an address has sent so many wrong tokens that its operators' calls are refused for a while.
    pub(super) fn blocks_operators(&self, peer: Option<IpAddr>) -> bool {
        // A cost of 0 reads the count without adding to it: a request with the right token must not use up the limit.
        self.operators.check_cost(&source(peer), 0).remaining == 0
    }

    /// Counts a wrong token of an operators' call.
    pub(super) fn count_for_operators(&self, peer: Option<IpAddr>, app: &App) {
        let source = source(peer);
        // Denied or not, it is counted. Whether operators are blocked is read from what remains.
        let _ = self.operators.check(&source);
        if self.blocks_operators(peer)
            && let Some((ip, left_out)) = self.sample(&source, app)
        {
            tracing::warn!(ip, left_out, "operators' calls refused: too many wrong tokens from this address");
        }
    }

    /// Counts a wrong token of a caller, and waits if there were many, which it returns. Requests with a valid token are neither delayed nor
    /// refused, so that a client who guesses harms no other client with the same address.
    ///
    /// # Errors
    /// 429 if too many answers are being delayed.
    pub(super) async fn count_for_callers(&self, peer: Option<IpAddr>, app: &App) -> Result<Guesses, ApiError> {
        let source = source(peer);
        if self.callers.check(&source).allowed {
            return Ok(Guesses::Few);
        }
        if let Some((ip, left_out)) = self.sample(&source, app) {
            tracing::warn!(ip, left_out, "answers delayed: too many wrong tokens from this address");
        }
        // Refused rather than queued: waiting guesses hold connections, and enough of them would lock out all
        // clients.
        let Ok(_permit) = self.delayed.try_acquire() else {
            let message = "too many wrong tokens";
            return Err(ApiError::new(StatusCode::TOO_MANY_REQUESTS, "too_many_requests", message));
        };
        tokio::time::sleep(DELAY).await;
        Ok(Guesses::Many)
    }

    /// If this event is to be logged, returns its address as logged and the number of earlier events that were not.
    fn sample(&self, source: &str, app: &App) -> Option<(String, u64)> {
        let left_out = self.log.sample(app.desk.now())?;
        let policy = app.desk.policy();
        // The group and not the address: that is what was counted, and one /64 gives one name in the log.
        let ip = if policy.identity().log_identifiers { source.to_owned() } else { policy.key().redact(source) };
        Some((ip, left_out))
    }
}

impl std::fmt::Debug for TokenGuesses {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("TokenGuesses").finish_non_exhaustive()
    }
}

/// Returns the key that an address is counted by.
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
        // Time is paused and advances by itself, so any other timeout would fire first.
        let bounds = Bounds { client_timeout: Duration::MAX, ..Bounds::default() };
        App::new(Desk::new(policy, Arc::new(SystemClock::new())), Tokens::default(), bounds)
    }

    /// Returns how long the answer to a wrong token is delayed.
    async fn guess(app: &App, from: &str) -> Duration {
        let before = Instant::now();
        app.token_guesses.count_for_callers(Some(from.parse().unwrap()), app).await.unwrap();
        before.elapsed()
    }

    /// Broken once by a prefix of 128.
    #[tokio::test(start_paused = true)]
    async fn after_ten_wrong_tokens_in_a_minute_answers_are_delayed() {
        let app = app();
        for (first, sibling, stranger) in [
            // An address, the same client in another spelling or in the same /64, and a client that must not be
            // affected.
            ("203.0.113.7", "::ffff:203.0.113.7", "203.0.113.8"),
            ("2001:db8::1", "2001:db8::ffff:1", "2001:db8:0:1::1"),
        ] {
            for _ in 0..10 {
                assert_eq!(guess(&app, first).await, Duration::ZERO);
            }
            assert_eq!(guess(&app, first).await, DELAY);
            assert_eq!(guess(&app, sibling).await, DELAY);
            assert_eq!(guess(&app, stranger).await, Duration::ZERO);
        }
        // Operators at the same address are not affected.
        assert!(!app.token_guesses.blocks_operators(Some("203.0.113.7".parse().unwrap())));
    }

    #[tokio::test(start_paused = true)]
    async fn the_number_of_delayed_answers_is_bounded() {
        let app = Arc::new(app());
        for _ in 0..10 {
            guess(&app, "203.0.113.7").await;
        }
        let waiting: Vec<_> = (0..MAX_DELAYED)
            .map(|_| {
                let app = Arc::clone(&app);
                tokio::spawn(async move { guess(&app, "203.0.113.7").await })
            })
            .collect();
        // Until all of them wait. Time stands still meanwhile, because this task is never idle.
        while app.token_guesses.delayed.available_permits() > 0 {
            tokio::task::yield_now().await;
        }
        let before = Instant::now();
        let refused =
            app.token_guesses.count_for_callers(Some("203.0.113.7".parse().unwrap()), &app).await.unwrap_err();
        assert_eq!((refused.status, before.elapsed()), (StatusCode::TOO_MANY_REQUESTS, Duration::ZERO));
        for waited in waiting {
            assert_eq!(waited.await.unwrap(), DELAY);
        }
        assert_eq!(guess(&app, "203.0.113.7").await, DELAY);
    }

    /// However many addresses guess, the table does not grow and the addresses in it stay blocked. An address that it has no
    /// room for is not blocked for operators, while its callers' wrong tokens are answered with a delay.
    ///
    /// Fails if a full table counts as a used-up budget in `blocks_operators`.
    #[tokio::test(start_paused = true)]
    async fn a_full_table_of_addresses_blocks_no_operator_at_another_address() {
        let mut app = app();
        app.token_guesses = TokenGuesses::new(100, &(Arc::new(ManualClock::default()) as _));
        let address = |number: u32| Some(IpAddr::from(std::net::Ipv4Addr::from_bits(0x0b00_0000 + number)));
        let mut known = 0;
        for number in 0..1_000 {
            let source = source(address(number));
            let fits = (0..10).filter(|_| app.token_guesses.operators.check(&source).allowed).count();
            let _ = (0..10).filter(|_| app.token_guesses.callers.check(&source).allowed).count();
            known += u32::from(fits == 10);
        }
        assert!((100..500).contains(&known), "{known}");
        let usage = (app.token_guesses.operators.usage().keys, app.token_guesses.callers.usage().keys);
        assert!(app.token_guesses.blocks_operators(address(0)));
        let stranger = address(2_000);
        app.token_guesses.count_for_operators(stranger, &app);
        assert!(!app.token_guesses.blocks_operators(stranger));
        assert_eq!(guess(&app, "192.0.2.9").await, DELAY);
        assert_eq!((app.token_guesses.operators.usage().keys, app.token_guesses.callers.usage().keys), usage);
    }
}
