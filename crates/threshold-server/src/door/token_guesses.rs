//! Compares what requests show with the tokens of this server, for all doors: wrong ones are counted by address, and after many of them
//! answers are delayed or refused.
//!
//! No other file of the doors can see the tokens, so that none can compare one without counting it.

use std::net::IpAddr;
use std::sync::Arc;
use std::time::Duration;

use http::header::AUTHORIZATION;
use http::{HeaderMap, HeaderValue, StatusCode};
use threshold_core::address::AddressGroup;
use threshold_limiter::{Clock, KeyLimiter, Limit, SystemClock};
use tokio::sync::Semaphore;

use super::client_memory::ClientMemory;
use super::{ApiError, App};
use crate::log::LogSampler;
use crate::serve::{OperatorAccess, Tokens};

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

/// What a caller shows.
#[derive(Debug, Clone, Copy)]
pub(super) enum Shown<'a> {
    /// `Authorization`, also as the metadata of a gRPC call.
    Authorization(Option<&'a HeaderValue>),
    /// `X-Threshold-Token` of a proxy.
    Token(Option<&'a HeaderValue>),
    /// `AUTH` of a Redis client.
    Password(&'a [u8]),
}

/// Why a caller is refused.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Refused {
    /// It shows nothing.
    Missing,
    /// It shows a token that only reads as an operator.
    ReadOnly,
    Wrong(Guesses),
    /// It is wrong, and too many answers are being delayed.
    TooMany,
}

/// The callers of a call.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Callers {
    /// Callers and operators.
    Only,
    /// Those who read as operators too: the call changes nothing.
    AndReaders,
}

/// The tokens of this server, and the wrong ones of each address.
pub(super) struct TokenGuesses {
    tokens: Tokens,
    /// Callers and operators are counted separately: many callers share a proxy's address, and one of them with a wrong token
    /// must not block the operators who use that proxy too.
    callers: KeyLimiter<Arc<dyn Clock>>,
    operators: KeyLimiter<Arc<dyn Clock>>,
    /// Those that came on connections which had shown no right, on whatever path. Which of these are closed for others tells whether a token
    /// was right.
    proofs: KeyLimiter<Arc<dyn Clock>>,
    delayed: Semaphore,
    log: LogSampler,
}

impl TokenGuesses {
    pub(super) fn new(tokens: Tokens) -> Self {
        Self::bounded(tokens, MAX_ADDRESSES, &(Arc::new(SystemClock::new()) as _))
    }

    /// Counts the wrong tokens of at most `addresses`.
    fn bounded(tokens: Tokens, addresses: u64, clock: &Arc<dyn Clock>) -> Self {
        let limiter = || KeyLimiter::builder(WRONG_TOKENS).max_keys(addresses).clock(Arc::clone(clock)).build();
        Self {
            tokens,
            callers: limiter(),
            operators: limiter(),
            proofs: limiter(),
            delayed: Semaphore::new(MAX_DELAYED),
            log: LogSampler::default(),
        }
    }
}

impl TokenGuesses {
    /// Whether the server has any tokens.
    pub(super) fn any_configured(&self) -> bool {
        self.tokens.any_configured()
    }

    /// Whether callers must show a token.
    pub(super) fn require_from_callers(&self) -> bool {
        self.tokens.require_from_callers()
    }

    /// Whether a caller is admitted. One who is not must go on to [`admit`](Self::admit), which counts its wrong token.
    pub(super) fn admits(&self, shown: Shown<'_>) -> bool {
        match shown {
            Shown::Authorization(field) => self.tokens.admit_caller(field),
            Shown::Token(field) => self.tokens.admit_proxy(field),
            Shown::Password(password) => self.tokens.admit_password(password),
        }
    }

    /// Admits a caller who shows one of the tokens, or anyone if callers need none.
    ///
    /// # Errors
    /// If it must not call, after its wrong token was counted.
    pub(super) async fn admit(
        &self,
        shown: Shown<'_>,
        callers: Callers,
        peer: Option<IpAddr>,
        app: &App,
    ) -> Result<(), Refused> {
        if self.admits(shown) {
            return Ok(());
        }
        // A token that is valid elsewhere is not a guess, and neither is a missing one.
        if matches!(shown, Shown::Authorization(Some(field)) if self.tokens.is_any_known(field)) {
            return if callers == Callers::AndReaders { Ok(()) } else { Err(Refused::ReadOnly) };
        }
        if matches!(shown, Shown::Authorization(None) | Shown::Token(None)) {
            return Err(Refused::Missing);
        }
        Err(self.count_for_callers(peer, app).await.map_or(Refused::TooMany, Refused::Wrong))
    }

    /// Returns whether a request has any token of this server, for calls that everyone may make. A wrong one is counted, and else
    /// treated as none.
    pub(super) async fn is_known(&self, authorization: Option<&HeaderValue>, peer: Option<IpAddr>, app: &App) -> bool {
        let Some(shown) = authorization.filter(|_| self.any_configured()) else { return false };
        if self.tokens.is_any_known(shown) {
            return true;
        }
        // The error is ignored: a health check with an old token must not take the server out of service.
        let _ = self.count_for_callers(peer, app).await;
        false
    }

    /// Returns what a request may do as an operator, and counts a wrong token.
    ///
    /// # Errors
    /// 429 if its address has sent many wrong tokens. That comes before the token, so that a blocked address cannot go on guessing.
    pub(super) fn operator(
        &self,
        authorization: Option<&HeaderValue>,
        peer: Option<IpAddr>,
        app: &App,
    ) -> Result<OperatorAccess, ApiError> {
        self.refuse_guessers(peer)?;
        let access = self.tokens.operator_access(authorization);
        // A missing token is not a guess, and neither is a caller's token, which is valid elsewhere.
        if access == OperatorAccess::Denied && authorization.is_some_and(|shown| !self.tokens.is_any_known(shown)) {
            self.count_for_operators(peer, app);
        }
        Ok(access)
    }

    /// Refuses an operator's call from an address that has sent many wrong tokens.
    pub(super) fn refuse_guessers(&self, peer: Option<IpAddr>) -> Result<(), ApiError> {
        if self.blocks_operators(peer) {
            let message = "too many wrong tokens from this address";
            return Err(ApiError::new(StatusCode::TOO_MANY_REQUESTS, "too_many_requests", message));
        }
        Ok(())
    }

    /// Returns the name in the audit of a caller that was admitted: a digest of its token, if it has one.
    pub(super) fn name_of(&self, headers: &HeaderMap, app: &App) -> String {
        let authorization = headers.get(AUTHORIZATION);
        let redacted = |token: &str| app.desk.redact(token);
        match self.tokens.operator_access(authorization) {
            OperatorAccess::Operator(token) => format!("operator {}", redacted(&token)),
            OperatorAccess::Open => "local".to_owned(),
            OperatorAccess::Reader | OperatorAccess::Denied => {
                let token = authorization.and_then(|value| value.to_str().ok()?.split_once(' '));
                token.map_or_else(|| "caller".to_owned(), |(_, token)| format!("caller {}", redacted(token.trim())))
            }
        }
    }

    /// Whether a token that a connection shows proves its right. A wrong one is counted, and after many of them no token is a proof.
    pub(super) fn is_proof(&self, is_right: bool, peer: IpAddr, app: &App) -> bool {
        let source = source(Some(peer));
        if self.proofs.check_cost(&source, 0).remaining == 0 {
            return false;
        }
        if !is_right
            && self.proofs.check(&source).remaining == 0
            && let Some((ip, left_out)) = self.sample(&source, app)
        {
            tracing::warn!(
                ip,
                left_out,
                "no token proves the right of a connection: too many wrong ones from this address"
            );
        }
        is_right
    }

    /// Whether a request shows a right token of any kind. See [`is_proof`](Self::is_proof) for wrong ones.
    pub(super) fn is_any(&self, authorization: Option<&HeaderValue>) -> bool {
        authorization.is_some_and(|shown| self.tokens.is_any_known(shown))
    }

    /// Whether a request shows an operator's token, or operators need none. See [`is_proof`](Self::is_proof) for wrong ones.
    pub(super) fn is_operators(&self, authorization: Option<&HeaderValue>) -> bool {
        self.tokens.operator_access(authorization) != OperatorAccess::Denied
    }

    /// Whether a request shows a token that only reads as an operator.
    pub(super) fn only_reads(&self, authorization: Option<&HeaderValue>) -> bool {
        self.tokens.operator_access(authorization) == OperatorAccess::Reader
    }

    /// Returns the memory for the answer to a caller that was admitted: that of its kind.
    pub(super) fn answer_memory_of<'a>(&self, authorization: Option<&HeaderValue>, app: &'a App) -> &'a ClientMemory {
        match self.tokens.operator_access(authorization) {
            OperatorAccess::Operator(_) => &app.operator_answer_memory,
            OperatorAccess::Reader => &app.reader_answer_memory,
            OperatorAccess::Open | OperatorAccess::Denied => &app.answer_memory,
        }
    }

    /// Returns the memory for small bodies, and for others, of one who was admitted: that of its kind.
    pub(super) fn body_memory_of<'a>(
        &self,
        authorization: Option<&HeaderValue>,
        app: &'a App,
    ) -> [&'a ClientMemory; 2] {
        match self.tokens.operator_access(authorization) {
            OperatorAccess::Operator(_) => [&app.operator_body_memory; 2],
            OperatorAccess::Reader => [&app.reader_body_memory; 2],
            OperatorAccess::Open | OperatorAccess::Denied => [&app.small_body_memory, &app.body_memory],
        }
    }

    /// Whether an address has sent so many wrong tokens that its operators' calls are refused for a while.
    fn blocks_operators(&self, peer: Option<IpAddr>) -> bool {
        // A cost of 0 reads the count without adding to it: a request with the right token must not use up the limit.
        self.operators.check_cost(&source(peer), 0).remaining == 0
    }

    /// Counts a wrong token of an operators' call.
    fn count_for_operators(&self, peer: Option<IpAddr>, app: &App) {
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
    /// If too many answers are being delayed.
    async fn count_for_callers(&self, peer: Option<IpAddr>, app: &App) -> Result<Guesses, TooManyDelayed> {
        let source = source(peer);
        if self.callers.check(&source).allowed {
            return Ok(Guesses::Few);
        }
        if let Some((ip, left_out)) = self.sample(&source, app) {
            tracing::warn!(ip, left_out, "answers delayed: too many wrong tokens from this address");
        }
        // Refused rather than queued: waiting guesses hold connections, and enough of them would lock out all
        // clients.
        let Ok(_permit) = self.delayed.try_acquire() else { return Err(TooManyDelayed) };
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

/// As many answers are delayed as may be at once.
#[derive(Debug, PartialEq, Eq)]
struct TooManyDelayed;

impl From<Refused> for ApiError {
    fn from(refused: Refused) -> Self {
        let message = match refused {
            Refused::TooMany => {
                return Self::new(StatusCode::TOO_MANY_REQUESTS, "too_many_requests", "too many wrong tokens");
            }
            Refused::ReadOnly => {
                "this token is for operators who read (THRESHOLD_READ_TOKEN): this call needs a caller's or an operator's"
            }
            Refused::Missing | Refused::Wrong(_) => "send Authorization: Bearer with a token of this server",
        };
        Self::new(StatusCode::UNAUTHORIZED, "unauthorized", message)
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
    use std::collections::BTreeSet;

    use axum::Router;
    use axum::body::Body;
    use http::Request;
    use http::header::CONTENT_TYPE;
    use http_body_util::{BodyExt as _, Collected};
    use serde_json::json;
    use threshold_core::Policy;
    use threshold_limiter::ManualClock;
    use threshold_limiter::tower::PeerAddr;
    use tokio::time::Instant;
    use tower_service::Service as _;

    use super::*;
    use crate::desk::Desk;
    use crate::door::{Audience, Bounds, Doors, Hosts, routes};
    use crate::serve::ConnectionWatch;

    const CALLER: &str = "a-callers-token-0";
    const OPERATOR: &str = "an-operators-token-0";
    const READER: &str = "a-readers-token-01";

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
        let refused = app.token_guesses.count_for_callers(Some("203.0.113.7".parse().unwrap()), &app).await;
        assert_eq!((refused, before.elapsed()), (Err(TooManyDelayed), Duration::ZERO));
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
        app.token_guesses = TokenGuesses::bounded(Tokens::default(), 100, &(Arc::new(ManualClock::default()) as _));
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

    /// Answers a request from an address of a client, as it comes to a listener for everyone.
    async fn answer(app: &Arc<App>, (method, path): (&str, &str), token: &str, from: [u8; 4]) -> (StatusCode, String) {
        let mut request = Request::builder().method(method).uri(path).header(CONTENT_TYPE, "application/json");
        // A token to sign in with is in the body.
        if (method, path) != ("POST", "/v1/session") {
            request = request.header(AUTHORIZATION, format!("Bearer {token}"));
        }
        let body = if path == "/v1/session" { json!({ "token": token }).to_string() } else { "{}".to_owned() };
        let mut request = request.body(Body::from(body)).unwrap();
        request.extensions_mut().insert(PeerAddr((from, 1).into()));
        request.extensions_mut().insert(ConnectionWatch::default());
        let router = super::super::router(Arc::clone(app), Audience::Everyone);
        let Ok(response) = Router::clone(&router).call(request).await;
        let status = response.status();
        // Some answers are streams without an end.
        let body = tokio::time::timeout(DELAY, response.into_body().collect()).await;
        let body = body.ok().and_then(Result::ok).map(Collected::to_bytes).unwrap_or_default();
        // Without trace ids and times, of which no two answers have the same.
        (status, String::from_utf8_lossy(&body).chars().filter(|c| !c.is_ascii_hexdigit()).collect())
    }

    /// `GET /v1/session` told which token is right, as often as it was asked: its wrong ones were not counted.
    ///
    /// Every route either answers a wrong token as it answers the right ones, or counts it.
    #[tokio::test(start_paused = true)]
    async fn no_route_tells_which_token_is_right_without_counting() {
        let mut app = app();
        app.token_guesses = TokenGuesses::new(Tokens::of_each(CALLER, OPERATOR, READER));
        let app = Arc::new(app);
        let mut told = BTreeSet::new();
        for (number, route) in (0..).zip(routes::all()) {
            let path = route.path.replace(['{', '}'], "");
            let (asked, from) = ((&*route.method.to_uppercase(), &*path), [127, 0, 1, number]);
            let source = source(Some(IpAddr::from(from)));
            let left = || {
                let left = |limiter: &KeyLimiter<_>| limiter.check_cost(&source, 0).remaining;
                left(&app.token_guesses.callers).saturating_add(left(&app.token_guesses.operators))
            };
            let before = left();
            let wrong = answer(&app, asked, "a-wrong-token-0123", from).await;
            let is_counted = left() < before;
            for right in [CALLER, OPERATOR, READER] {
                let is_told = answer(&app, asked, right, [127, 0, 2, number]).await != wrong;
                assert!(is_counted || !is_told, "{asked:?} tells {right} and counts nothing");
                if is_told {
                    told.insert((route.method, route.path));
                }
            }
        }
        assert!(told.contains(&("get", "/v1/session")) && told.contains(&("post", "/v1/session")), "{told:?}");
        assert!(told.len() > 30, "{told:?}");
    }

    /// Which connections were closed for others told which of many tokens was right, on paths that count none, and also to an address that
    /// was refused: a connection that had shown a right one was kept.
    #[tokio::test(start_paused = true)]
    async fn a_connection_is_proven_by_no_more_guesses_than_are_counted() {
        let mut app = app();
        app.token_guesses = TokenGuesses::new(Tokens::of_each(CALLER, OPERATOR, READER));
        let app = Arc::new(app);
        for (number, audience) in [Audience::Operators, Audience::Everyone, Audience::Grpc].into_iter().enumerate() {
            let doors = Doors::new(Arc::clone(&app), Hosts::Any, audience);
            let number = u8::try_from(number).unwrap();
            let shows = |name: &'static str, token: &str, last: u8| {
                let value = if name == "authorization" { format!("Bearer {token}") } else { token.to_owned() };
                let headers = HeaderMap::from_iter([(http::HeaderName::from_static(name), value.parse().unwrap())]);
                doors.shows_right(([127, 0, 3 + number, last], 1).into(), &headers)
            };
            assert!(shows("authorization", OPERATOR, 1));
            for _ in 0..10 {
                assert!(
                    !shows("authorization", "a-wrong-token-0123", 1)
                        && !shows("x-threshold-token", "a-wrong-token-0123", 2)
                );
            }
            for right in [OPERATOR, READER, CALLER] {
                assert!(!shows("authorization", right, 1) && !shows("x-threshold-token", right, 2), "{right}");
            }
            // Other addresses are not affected.
            assert!(shows("authorization", OPERATOR, 3));
        }
    }

    /// An address that is refused elsewhere learned from `GET /v1/session` which token is right, and, where callers need none, from
    /// `/v1/explain`.
    #[tokio::test(start_paused = true)]
    async fn an_address_that_has_guessed_learns_nothing_from_any_operators_route() {
        let mut app = app();
        app.token_guesses = TokenGuesses::new(Tokens::of_operators(OPERATOR, READER));
        let app = Arc::new(app);
        let from = [127, 0, 0, 9];
        for _ in 0..10 {
            assert_eq!(answer(&app, ("GET", "/v1/session"), "a-wrong-token-0123", from).await.0, StatusCode::OK);
        }
        assert!(app.token_guesses.blocks_operators(Some(IpAddr::from(from))));
        for route in routes::all() {
            let path = route.path.replace(['{', '}'], "");
            let asked = (&*route.method.to_uppercase(), &*path);
            // Health and metrics take any token, and delay the answers to wrong ones.
            if matches!(route.path, "/readyz" | "/metrics") {
                continue;
            }
            let wrong = answer(&app, asked, "a-wrong-token-0123", from).await;
            for right in [OPERATOR, READER] {
                assert_eq!(answer(&app, asked, right, from).await, wrong, "{asked:?}");
            }
        }
    }
}
