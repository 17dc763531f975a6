//! Workers KV as the store of `eventual` rules: approximate, and it says so.

pub(super) mod cache;
pub(super) mod value;

use std::fmt;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use futures_util::future::{Either, join_all, select};
use threshold_core::decision::Degraded;
use threshold_core::policy::{OnStoreError, Placed};
use threshold_core::{Balance, Bill, Digest, Outcome, Plan, Span, Timestamp};
use threshold_limiter::Clock as _;
use worker::send::{SendFuture, SendWrapper};

use worker::{Delay, Env, KvError, js_sys};

use super::DEADLINE;
use super::places::Place;
use crate::clock::DateClock;
use crate::warnings::Warnings;
use cache::{Cache, Full, KvKey, KvRecord, Put};
use value::{Form, Unreadable};

/// The namespace of eventual rules without a `place`.
pub const DEFAULT_NAMESPACE: &str = "THRESHOLD_KV";

/// How long one event writes what others have left. Cloudflare ends an event 30 s after its answer.
const FLUSHES_FOR: Span = Span::from_secs(20);
/// The most keys that are written at once. Each takes a get and a put, and an event may make 1,000 of them.
const AT_ONCE: usize = 100;
/// The most keys that one event writes.
const MAX_FLUSHED: usize = 400;

/// The charge of an eventual rule.
#[derive(Debug)]
pub(super) struct KvCharge<'p> {
    /// The key of the charge.
    pub(super) digest: Digest,
    rule: &'p str,
    /// How to decide while KV fails.
    pub(super) on_error: OnStoreError,
    record: KvRecord,
}

/// Why a record of KV could not be read or written.
#[derive(Debug, thiserror::Error)]
pub(super) enum KvFailure {
    #[error("KV did not answer in time")]
    Timeout,
    #[error("{0}")]
    Failed(String),
    #[error(transparent)]
    Unreadable(#[from] Unreadable),
    #[error("too many keys wait to be written")]
    Full,
}

impl From<Full> for KvFailure {
    fn from(_: Full) -> Self {
        Self::Full
    }
}

impl KvFailure {
    pub(super) fn reason(&self) -> Degraded {
        match self {
            Self::Timeout => Degraded::Timeout,
            Self::Failed(_) | Self::Unreadable(_) => Degraded::StoreError,
            Self::Full => Degraded::StoreFull,
        }
    }

    /// Returns whether KV has refused a write because another isolate has written the key in the same second. It is written later,
    /// as a write that this isolate puts off by itself.
    fn is_too_many_writes(&self) -> bool {
        matches!(self, Self::Failed(reason) if reason.contains("429"))
    }
}

/// The namespaces of KV, and what this isolate knows of them.
pub(super) struct Kv {
    env: SendWrapper<Env>,
    cache: Mutex<Cache>,
    /// Until when an event writes what is left. A later one takes over if that event was ended before.
    flushed_until: Mutex<Timestamp>,
    warnings: Warnings,
}

impl Kv {
    pub(super) fn new(env: Env) -> Self {
        let (flushed_until, warnings) = (Mutex::default(), Warnings::default());
        Self { env: SendWrapper::new(env), cache: Mutex::default(), flushed_until, warnings }
    }

    /// Returns the charges of a plan that are kept in KV. `place` returns where a key is.
    pub(super) fn charges<'p>(
        plan: &Plan<'p>,
        now: Timestamp,
        place: impl Fn(Digest) -> Option<std::sync::Arc<Place>>,
    ) -> Vec<KvCharge<'p>> {
        let charges = plan.charges().iter().enumerate().filter_map(|(index, charge)| {
            let place = place(charge.key()).filter(|place| place.is_eventual)?;
            let rule = plan.rule_of(index)?;
            let limit = *charge.limit();
            let number = now.micros().checked_div(limit.period().micros()).unwrap_or(0);
            let window = Placed::has_window(&place.name).then_some(number);
            let name = Placed::in_window(&place.name, number);
            let key = KvKey { binding: place.binding.clone(), name };
            // A rule that observes never denies, so it cannot do so while KV fails.
            let on_error = if charge.enforced() { rule.on_store_error } else { OnStoreError::Open };
            let block_for = rule.block_for.unwrap_or(Span::ZERO);
            let record = KvRecord { key, limit, form: Form::of(&limit, window), block_for };
            Some(KvCharge { digest: charge.key(), rule: &rule.name, on_error, record })
        });
        charges.collect()
    }

    /// Reads the records of charges, all at once, unless this isolate has read them less than a second ago.
    pub(super) async fn load(&self, charges: &[KvCharge<'_>], now: Timestamp) -> Vec<Result<Balance, KvFailure>> {
        join_all(charges.iter().map(|charge| async move {
            if let Some(balance) = self.cache().fresh(&charge.record.key, now) {
                return Ok(balance);
            }
            self.read(&charge.record, now).await
        }))
        .await
    }

    async fn read(&self, record: &KvRecord, now: Timestamp) -> Result<Balance, KvFailure> {
        let text = self.get(&record.key).await?;
        if let Some(balance) = self.cache().unchanged(&record.key, text.as_deref(), now) {
            return Ok(balance);
        }
        let read = text.as_deref().map_or(Ok(Balance::default()), |text| record.read(text, now))?;
        let mut cache = self.cache();
        let balance = cache.merge(record, read, now)?;
        cache.learn(&record.key, text);
        Ok(balance)
    }

    /// Returns what this isolate alone has counted, for a rule with `on_store_error = "local"`.
    pub(super) fn local(
        &self,
        charge: &KvCharge<'_>,
        failure: &KvFailure,
        now: Timestamp,
    ) -> Result<Balance, KvFailure> {
        let is_foreign = matches!(failure, KvFailure::Unreadable(_));
        Ok(self.cache().local(&charge.record, is_foreign, now)?)
    }

    /// Settles a bill on records that were read, in one step.
    pub(super) fn settle(
        &self,
        bill: &Bill<'_>,
        read: &[(&KvCharge<'_>, Balance)],
        now: Timestamp,
    ) -> Result<Outcome, KvFailure> {
        let records: Vec<_> = read.iter().map(|(charge, balance)| (&charge.record, balance.clone())).collect();
        Ok(self.cache().settle(bill, &records, now)?)
    }

    /// Writes the records of charges, all at once. Those that were written less than a second ago are written later by
    /// [`flush`](Self::flush).
    pub(super) async fn save<'c, 'p>(
        &self,
        charges: impl Iterator<Item = &'c KvCharge<'p>>,
    ) -> Vec<(&'c KvCharge<'p>, KvFailure)>
    where
        'p: 'c,
    {
        let now = DateClock.now();
        let puts: Vec<_> =
            charges.filter_map(|charge| Some((charge, self.cache().take_put(&charge.record.key, now)?))).collect();
        let written =
            join_all(puts.into_iter().map(|(charge, put)| async move { (charge, self.put(put).await) })).await;
        let failed = written.into_iter().filter_map(|(charge, written)| Some((charge, written.err()?)));
        failed.filter(|(_, failure)| !failure.is_too_many_writes()).collect()
    }

    /// Writes what was not written at once, with what others have written meanwhile. One event of the isolate does it for all.
    pub(super) async fn flush(&self) {
        let begun = DateClock.now();
        {
            let mut flushed_until = self.flushed_until.lock().unwrap_or_else(PoisonError::into_inner);
            if *flushed_until > begun || self.cache().next_put().is_none() {
                return;
            }
            *flushed_until = begun.plus(FLUSHES_FOR);
        }
        let mut left = MAX_FLUSHED;
        while left > 0 {
            let next = self.cache().next_put();
            let Some(next) = next else { break };
            let now = DateClock.now();
            if now.since(begun) >= FLUSHES_FOR {
                break;
            }
            wait(next.since(now)).await;
            let now = DateClock.now();
            let due = self.cache().due(now, AT_ONCE.min(left));
            left = left.saturating_sub(due.len().max(1));
            join_all(due.into_iter().map(|record| self.rewrite(record))).await;
        }
        *self.flushed_until.lock().unwrap_or_else(PoisonError::into_inner) = Timestamp::EPOCH;
    }

    async fn rewrite(&self, record: KvRecord) {
        // What this isolate knows is written also if nothing can be read: the next reader takes the larger count.
        let read = self.read(&record, DateClock.now()).await;
        let put = self.cache().take_put(&record.key, DateClock.now());
        let written = match put {
            Some(put) => self.put(put).await,
            None => Ok(()),
        };
        for failure in [read.map(drop), written].into_iter().filter_map(Result::err) {
            if !failure.is_too_many_writes() {
                self.warn(None, &record.key.binding, &failure);
            }
        }
    }

    /// Logs that a rule is decided without KV, at most once a second.
    pub(super) fn warn_of(&self, charge: &KvCharge<'_>, failure: &KvFailure) {
        self.warn(Some(charge), &charge.record.key.binding, failure);
    }

    fn warn(&self, charge: Option<&KvCharge<'_>>, binding: &str, failure: &KvFailure) {
        self.warnings.warn(|| {
            serde_json::json!({
                "event": "kv_failed",
                "binding": binding,
                "rule": charge.map(|charge| charge.rule),
                "onStoreError": charge.map(|charge| charge.on_error.name()),
                "reason": failure.to_string(),
            })
        });
    }

    async fn get(&self, key: &KvKey) -> Result<Option<String>, KvFailure> {
        within_deadline(async {
            let namespace = self.env.kv(&key.binding).map_err(|error| error.to_string())?;
            namespace.get(&key.name).text().await.map_err(reason)
        })
        .await
    }

    async fn put(&self, put: Put) -> Result<(), KvFailure> {
        let Put { key, value, ttl, .. } = &put;
        let written = within_deadline(async {
            let namespace = self.env.kv(&key.binding).map_err(|error| error.to_string())?;
            let writing = namespace.put(&key.name, value).map_err(reason)?;
            writing.expiration_ttl(*ttl).execute().await.map_err(reason)
        });
        let written = written.await;
        if written.is_err() {
            self.cache().put_failed(&put);
        }
        written
    }

    fn cache(&self) -> MutexGuard<'_, Cache> {
        self.cache.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Waits for a call, at most until the deadline.
fn within_deadline<T>(
    call: impl Future<Output = Result<T, String>>,
) -> impl Future<Output = Result<T, KvFailure>> + Send {
    SendFuture::new(async move {
        match select(std::pin::pin!(call), std::pin::pin!(Delay::from(DEADLINE))).await {
            Either::Left((answered, _)) => answered.map_err(KvFailure::Failed),
            Either::Right(_) => Err(KvFailure::Timeout),
        }
    })
}

/// Returns the message of an error, without the stack of JavaScript.
#[expect(clippy::needless_pass_by_value, reason = "it is given to `map_err`")]
fn reason(error: KvError) -> String {
    let message = match &error {
        KvError::JavaScript(value) => {
            js_sys::Reflect::get(value, &"message".into()).ok().and_then(|text| text.as_string())
        }
        KvError::Serialization(_) | KvError::InvalidKvStore(_) => None,
    };
    message.unwrap_or_else(|| error.to_string()).lines().next().unwrap_or_default().to_owned()
}

async fn wait(length: Span) {
    SendFuture::new(Delay::from(Duration::from(length))).await;
}

impl fmt::Debug for Kv {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Kv").finish_non_exhaustive()
    }
}
