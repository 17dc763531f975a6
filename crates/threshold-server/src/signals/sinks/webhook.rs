//! Posts JSON to a URL: signed, retried, within bounds of time.

use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use base64::Engine as _;
use base64::prelude::BASE64_STANDARD;
use hmac::{Hmac, KeyInit as _, Mac as _};
use http::header::{AUTHORIZATION, CONTENT_TYPE, RETRY_AFTER};
use http::{Request, StatusCode, Uri};
use rand::RngExt as _;
use sha2::Sha256;
use ureq::Agent;
use ureq::tls::TlsConfig;
use ureq::unversioned::resolver::{DefaultResolver, Resolver};
use ureq::unversioned::transport::DefaultConnector;

use super::guard::{GuardedResolver, PrivateAddress, Reach};

/// How long one request may take.
const DEADLINE: Duration = Duration::from_secs(10);

/// How long to go on trying.
#[derive(Debug, Clone, Copy)]
pub(super) struct Patience {
    pub(super) tries: u32,
    /// The pause after the first try. It doubles with each, and a random part of it of at most half is left out, so that the
    /// servers of an installation do not return at once.
    pub(super) first_pause: Duration,
    pub(super) longest_pause: Duration,
    /// No try begins later than this after the first one.
    pub(super) longest: Duration,
}

impl Patience {
    /// Of events, which are many, and are in the database too.
    pub(super) const EVENTS: Self = Self {
        tries: 5,
        first_pause: Duration::from_secs(1),
        longest_pause: Duration::from_secs(15),
        longest: Duration::from_secs(60),
    };
    /// Of alerts, which are few: a receiver may be away for most of an hour.
    pub(super) const ALERTS: Self = Self {
        tries: 20,
        first_pause: Duration::from_secs(1),
        longest_pause: Duration::from_secs(300),
        longest: Duration::from_secs(3_600),
    };
}

/// The key that signs requests, by the Standard Webhooks specification.
#[derive(Clone)]
pub(super) struct SigningKey(Hmac<Sha256>);

impl SigningKey {
    /// Reads a secret: `whsec_` and base64, or any text. At least 16 bytes.
    pub(super) fn parse(secret: &str) -> Option<Self> {
        let bytes = match secret.strip_prefix("whsec_") {
            Some(encoded) => BASE64_STANDARD.decode(encoded).ok()?,
            None => secret.as_bytes().to_vec(),
        };
        Hmac::new_from_slice(&bytes).ok().filter(|_| bytes.len() >= 16).map(Self)
    }

    fn sign(&self, id: &str, seconds: u64, body: &str) -> String {
        let mut mac = self.0.clone();
        mac.update(format!("{id}.{seconds}.{body}").as_bytes());
        format!("v1,{}", BASE64_STANDARD.encode(mac.finalize().into_bytes()))
    }
}

/// A URL that takes JSON.
pub(super) struct Webhook {
    pub(super) agent: Agent,
    pub(super) url: Uri,
    pub(super) token: Option<Box<str>>,
    /// One key, or two while the secret is rotated.
    pub(super) keys: Arc<[SigningKey]>,
    pub(super) patience: Patience,
}

/// What became of a body.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Delivery {
    Accepted,
    /// It was refused, or not accepted in time, and is given up.
    Lost,
    /// The server stops before it was accepted.
    Stopped,
}

/// Why a request was not accepted. The text has no part of the URL, whose path may be a secret.
struct Failure {
    reason: String,
    /// Whether to try again, and the pause that the receiver asks for.
    retry: Option<Option<Duration>>,
}

impl Webhook {
    /// Posts a body until it is accepted, with the same id for all tries: by it a receiver knows what it has already got. Tells the
    /// reason of each try that fails.
    pub(super) fn deliver(&self, (id, body): (&str, &str), stop: &Stop, mut failed: impl FnMut(&str)) -> Delivery {
        let begin = Instant::now();
        let mut pause = self.patience.first_pause;
        for _ in 0..self.patience.tries {
            let Err(Failure { reason, retry }) = self.post(id, body) else { return Delivery::Accepted };
            failed(&reason);
            let Some(asked) = retry else { return Delivery::Lost };
            let asked = asked.unwrap_or_default().min(self.patience.longest_pause);
            let wait = pause.mul_f64(rand::rng().random_range(0.5..=1.0)).max(asked);
            if begin.elapsed().saturating_add(wait) > self.patience.longest {
                break;
            }
            if !stop.pause(wait) {
                return Delivery::Stopped;
            }
            pause = pause.saturating_mul(2).min(self.patience.longest_pause);
        }
        if stop.is_stopping() { Delivery::Stopped } else { Delivery::Lost }
    }

    /// Posts a body once. Returns the reason if it is not accepted.
    pub(super) fn try_once(&self, body: &str) -> Result<(), String> {
        self.post(&new_id(), body).map_err(|failure| failure.reason)
    }

    fn post(&self, id: &str, body: &str) -> Result<(), Failure> {
        let seconds = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |time| time.as_secs());
        let mut request = Request::post(&self.url)
            .header(CONTENT_TYPE, "application/json")
            .header("webhook-id", id)
            .header("webhook-timestamp", seconds);
        if let Some(token) = &self.token {
            request = request.header(AUTHORIZATION, format!("Bearer {token}"));
        }
        if !self.keys.is_empty() {
            let signatures: Vec<String> = self.keys.iter().map(|key| key.sign(id, seconds, body)).collect();
            request = request.header("webhook-signature", signatures.join(" "));
        }
        let fatal = |_| Failure { reason: "the request cannot be written".to_owned(), retry: None };
        let answer = self.agent.run(request.body(body).map_err(fatal)?).map_err(|error| explain(&error))?;
        let status = answer.status();
        if status.is_success() {
            return Ok(());
        }
        let seconds = answer.headers().get(RETRY_AFTER).and_then(|value| value.to_str().ok()?.parse().ok());
        // A redirect is not followed: the token and the signature are for this URL, and its address was checked.
        let may_pass =
            status.is_server_error() || matches!(status, StatusCode::REQUEST_TIMEOUT | StatusCode::TOO_MANY_REQUESTS);
        let retry = may_pass.then(|| seconds.map(Duration::from_secs));
        Err(Failure { reason: format!("answered {}", status.as_u16()), retry })
    }
}

pub(super) fn new_id() -> String {
    format!("msg_{:032x}", rand::random::<u128>())
}

fn explain(error: &ureq::Error) -> Failure {
    let reason = match error {
        ureq::Error::Timeout(_) => "no answer in time".to_owned(),
        ureq::Error::HostNotFound => "unknown host".to_owned(),
        ureq::Error::Io(error) => error.to_string(),
        ureq::Error::Rustls(error) => error.to_string(),
        ureq::Error::Other(error) if error.is::<PrivateAddress>() => {
            return Failure { reason: error.to_string(), retry: None };
        }
        // Others may name the URL.
        _ => "the request failed".to_owned(),
    };
    Failure { reason, retry: Some(None) }
}

/// Returns a client that connects to addresses within reach, directly and without redirects.
pub(super) fn agent(tls: TlsConfig, reach: Reach) -> Agent {
    agent_with(tls, reach, DefaultResolver::default())
}

pub(super) fn agent_with(tls: TlsConfig, reach: Reach, resolver: impl Resolver) -> Agent {
    let config = Agent::config_builder()
        .http_status_as_error(false)
        .max_redirects(0)
        .max_redirects_will_error(false)
        // A proxy of the environment would connect to addresses that are not checked here.
        .proxy(None)
        .timeout_global(Some(DEADLINE))
        .user_agent(concat!("threshold/", env!("CARGO_PKG_VERSION")))
        .tls_config(tls)
        .build();
    Agent::with_parts(config, DefaultConnector::default(), GuardedResolver { resolver, reach })
}

/// The longest pause of a server that stops: it has a few seconds in which the receiver may return.
const LAST_PAUSE: Duration = Duration::from_millis(250);

/// Shortens the pauses between tries when the server stops.
#[derive(Debug, Default)]
pub(super) struct Stop {
    /// When no further try begins, once the server stops.
    until: Mutex<Option<Instant>>,
    changed: Condvar,
}

impl Stop {
    pub(super) fn stop(&self, at_most: Duration) {
        *self.until.lock().unwrap_or_else(PoisonError::into_inner) = Instant::now().checked_add(at_most);
        self.changed.notify_all();
    }

    fn is_stopping(&self) -> bool {
        self.until.lock().unwrap_or_else(PoisonError::into_inner).is_some()
    }

    /// Waits before the next try, and returns whether there is one. A pause during which the server stops is over.
    fn pause(&self, time: Duration) -> bool {
        let until = self.until.lock().unwrap_or_else(PoisonError::into_inner);
        let Some(end) = *until else {
            let waited = self.changed.wait_timeout_while(until, time, |until| until.is_none());
            return waited.unwrap_or_else(PoisonError::into_inner).0.is_none_or(|end| Instant::now() < end);
        };
        drop(until);
        let left = end.saturating_duration_since(Instant::now());
        std::thread::sleep(time.min(LAST_PAUSE).min(left));
        left > LAST_PAUSE
    }
}
