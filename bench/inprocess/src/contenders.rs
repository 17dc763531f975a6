//! Threshold and its peers, each used as its own documentation uses it.

use std::collections::HashMap;
use std::num::NonZeroU32;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, SystemTime};

use anyhow::{Context as _, Result, anyhow};
use governor::{DefaultKeyedRateLimiter, Quota};
use limitador::limit::Namespace;
use threshold_core::limit::Algorithm;
use threshold_limiter::{KeyLimiter, Limit, LimitOptions};
use throttlecrab::PeriodicStore;
use trypema::RateLimiterBuilder as _;
use trypema::local::LocalRateLimiterProvider;

/// What every decision of a scenario answers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Answer {
    /// The limit is far away.
    Allowed,
    /// The limit is used up.
    Denied,
}

/// So many at once that no run gets there, and few enough for throttlecrab's nanoseconds at 20 s each.
pub const FAR: u32 = 250_000_000;
/// What one request takes to refill where the limit is far away: longer than it takes to fill all contenders, so that
/// every balance is live when it is measured. After a fast refill a balance says nothing, and Threshold drops it.
const REFILL: Duration = Duration::from_secs(20);
/// The smallest burst that every peer enforces: throttlecrab admits everything with a burst of 1.
pub const NEAR: u32 = 2;

const DAY: Duration = Duration::from_secs(86_400);

/// The far limit as Threshold writes it.
pub fn far() -> String {
    format!("1/{}s burst {FAR}", REFILL.as_secs())
}

/// One limit by key.
pub trait Contender: Send + Sync {
    /// Its name and how it is used.
    fn name(&self) -> &'static str;

    /// Decides and charges one request.
    ///
    /// A `&String`, since governor's keys are of a sized type: with a `&str` it would have to allocate for each call,
    /// which those of its users who hold a `String` do not.
    #[expect(clippy::ptr_arg, reason = "governor needs the `String` itself")]
    fn check(&self, key: &String) -> bool;

    /// How many of these are allowed. Provided here so that the loop is compiled for each contender.
    fn check_all(&self, keys: &[String]) -> usize {
        keys.iter().filter(|key| self.check(key)).count()
    }
}

/// How to make a contender for so many keys.
pub type Make = fn(Answer, usize) -> Result<Box<dyn Contender>>;

/// Everyone who takes part; governor is what the others are measured against.
pub const ALL: [Make; 5] = [Threshold::make, Governor::make, Throttlecrab::make, Trypema::make, Limitador::make];

/// A token bucket under a key, in a table for as many keys as there are.
pub struct Threshold(pub KeyLimiter);

impl Threshold {
    /// The limit; the same for every contender, as far as it can say it.
    pub fn limit(answer: Answer) -> Result<Limit> {
        let text = match answer {
            Answer::Allowed => far(),
            Answer::Denied => format!("1/day burst {NEAR}"),
        };
        LimitOptions::new().algorithm(Algorithm::TokenBucket).parse(&text).context("a limit for Threshold")
    }

    /// How many of these are allowed, in batches of 64.
    pub fn check_batches(&self, keys: &[String]) -> usize {
        let mut allowed = 0;
        for batch in keys.chunks(64) {
            let mut names = [""; 64];
            for (name, key) in names.iter_mut().zip(batch) {
                *name = key;
            }
            let decisions = self.0.check_many(&names[..batch.len()]);
            allowed += decisions.iter().filter(|decision| decision.allowed).count();
        }
        allowed
    }

    fn make(answer: Answer, keys: usize) -> Result<Box<dyn Contender>> {
        Ok(Box::new(Self(KeyLimiter::builder(Self::limit(answer)?).max_keys(keys as u64).build())))
    }
}

impl Contender for Threshold {
    fn name(&self) -> &'static str {
        "threshold"
    }

    fn check(&self, key: &String) -> bool {
        self.0.check(key).allowed
    }
}

/// `RateLimiter::keyed`, a DashMap with the standard hasher.
struct Governor(DefaultKeyedRateLimiter<String>);

impl Governor {
    fn make(answer: Answer, _: usize) -> Result<Box<dyn Contender>> {
        let burst = |figure| NonZeroU32::new(figure).unwrap_or(NonZeroU32::MIN);
        let quota = match answer {
            Answer::Allowed => Quota::with_period(REFILL).map(|quota| quota.allow_burst(burst(FAR))),
            Answer::Denied => Quota::with_period(DAY).map(|quota| quota.allow_burst(burst(NEAR))),
        };
        Ok(Box::new(Self(DefaultKeyedRateLimiter::keyed(quota.context("a quota for governor")?))))
    }
}

impl Contender for Governor {
    fn name(&self) -> &'static str {
        "governor"
    }

    fn check(&self, key: &String) -> bool {
        self.0.check_key(key).is_ok()
    }
}

/// Behind a mutex, as its documentation says to share it, in the store of its README, sized ahead for these keys.
struct Throttlecrab {
    limiter: Mutex<throttlecrab::RateLimiter<PeriodicStore>>,
    burst: i64,
    period: i64,
}

impl Throttlecrab {
    fn make(answer: Answer, keys: usize) -> Result<Box<dyn Contender>> {
        let (burst, period) = match answer {
            Answer::Allowed => (FAR, REFILL),
            Answer::Denied => (NEAR, DAY),
        };
        let limiter = Mutex::new(throttlecrab::RateLimiter::new(PeriodicStore::with_capacity(keys)));
        Ok(Box::new(Self { limiter, burst: i64::from(burst), period: period.as_secs() as i64 }))
    }
}

impl Contender for Throttlecrab {
    fn name(&self) -> &'static str {
        "throttlecrab"
    }

    fn check(&self, key: &String) -> bool {
        let now = SystemTime::now();
        let mut limiter = self.limiter.lock().unwrap_or_else(PoisonError::into_inner);
        limiter.rate_limit(key, self.burst, 1, self.period, 1, now).is_ok_and(|(allowed, _)| allowed)
    }
}

/// The absolute strategy of the local provider: a sliding window in buckets of 10 ms, as in its README.
struct Trypema {
    provider: Arc<LocalRateLimiterProvider>,
    rate: trypema::RateLimit,
}

impl Trypema {
    fn make(answer: Answer, _: usize) -> Result<Box<dyn Contender>> {
        let (window, rate) = match answer {
            Answer::Allowed => (trypema::WindowSize::minutes(1), trypema::RateLimit::per_minute(f64::from(FAR))),
            Answer::Denied => (trypema::WindowSize::days(1), trypema::RateLimit::per_day(f64::from(NEAR))),
        };
        let failed = |error| anyhow!("trypema: {error}");
        let provider = LocalRateLimiterProvider::builder()
            .window_size(window.map_err(failed)?)
            .bucket_size(trypema::BucketSize::milliseconds(10).map_err(failed)?)
            // Its thread would sweep while others are measured. Its own benchmarks do without it, too.
            .disable_cleanup()
            .build()
            .map_err(failed)?;
        Ok(Box::new(Self { provider, rate: rate.map_err(failed)? }))
    }
}

impl Contender for Trypema {
    fn name(&self) -> &'static str {
        "trypema"
    }

    fn check(&self, key: &String) -> bool {
        matches!(self.provider.absolute().inc(key, &self.rate, 1), trypema::RateLimitDecision::Allowed)
    }
}

/// One limit with one variable. Each request needs a context of its own, with owned strings.
struct Limitador {
    limiter: limitador::RateLimiter,
    namespace: Namespace,
}

impl Limitador {
    fn make(answer: Answer, keys: usize) -> Result<Box<dyn Contender>> {
        let (most, seconds) = match answer {
            Answer::Allowed => (FAR, 3_600),
            Answer::Denied => (NEAR, 86_400),
        };
        let variable = "key".try_into().map_err(|error| anyhow!("limitador: {error}"))?;
        let limit = limitador::limit::Limit::new("bench", u64::from(most), seconds, vec![], vec![variable]);
        // Room to spare: a cache that evicts would forget who is denied.
        let limiter = limitador::RateLimiter::new(keys as u64 * 2);
        limiter.add_limit(limit);
        Ok(Box::new(Self { limiter, namespace: "bench".into() }))
    }
}

impl Contender for Limitador {
    fn name(&self) -> &'static str {
        "limitador"
    }

    fn check(&self, key: &String) -> bool {
        let context = HashMap::from([("key".to_owned(), key.clone())]).into();
        let result = self.limiter.check_rate_limited_and_update(&self.namespace, &context, 1);
        result.is_ok_and(|result| !result.limited)
    }
}
