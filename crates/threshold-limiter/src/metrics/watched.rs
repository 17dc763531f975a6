//! Gauges and counters that others keep, and that are read when the metrics are written.

use std::fmt;
use std::sync::{Arc, Mutex, PoisonError, Weak};

use super::Metrics;
use super::encode::Encoder;
use crate::active_penalties::{ActivePenalties, PenaltyCounts};
use crate::clock::Clock;
use crate::histogram::HistogramReading;
use crate::limiter::Limiter;
use crate::store::{KeyUsage, Store, StoreErrorCount, StoreErrorKind};

impl Metrics {
    /// Adds the gauges of a limiter: its keys, its waiting requests, and what has expired. Reading them walks over no table. Its
    /// policy's series exist from now on, so that the first event of each is not missed by a rate.
    pub fn watch<S: Store + 'static, C: Clock + 'static>(&self, limiter: &Arc<Limiter<S, C>>) {
        self.0.series_of(&limiter.policy());
        self.add_source(limiter, |limiter, readings| {
            let numbers = limiter.store().numbers();
            readings.keys = numbers.keys;
            readings.store_errors = Some(limiter.store().errors());
            readings.expired = Some([
                ("reservation", numbers.expired_reservations),
                ("ban", limiter.bans().expired()),
                ("setting", limiter.ended_settings()),
            ]);
            #[cfg(feature = "wait")]
            {
                readings.waiters = Some(limiter.waiting());
            }
        });
    }

    /// Adds the number of penalties in force: bans of operators and of ladders, shadow bans and locks.
    pub fn watch_penalties<S: Store + 'static, C: Clock + 'static>(
        &self,
        penalties: &Arc<ActivePenalties>,
        limiter: &Arc<Limiter<S, C>>,
    ) {
        let limiter = Arc::downgrade(limiter);
        self.add_source(penalties, move |penalties, readings| {
            let Some(limiter) = limiter.upgrade() else { return };
            let mut counts = penalties.count(limiter.time());
            counts.bans = counts.bans.saturating_add(u64::try_from(limiter.bans().count()).unwrap_or(u64::MAX));
            readings.penalties = Some(counts);
        });
    }

    /// Adds the times of a journal's commits, and whether it can be written.
    #[cfg(feature = "sqlite")]
    pub fn watch_journal(&self, journal: &Arc<crate::journal::Journal>) {
        self.add_source(journal, |journal, readings| {
            readings.fsync = Some(journal.commit_times());
            readings.journal_up = Some(journal.failure().is_none());
        });
    }

    /// Adds the number of requests that a layer delays.
    #[cfg(feature = "tower")]
    pub fn watch_layer(&self, layer: &crate::tower::ThresholdLayer) {
        self.add_source(&layer.pool(), |pool, readings| {
            readings.delayed = Some(readings.delayed.unwrap_or(0).saturating_add(pool.used()));
        });
    }

    /// Adds a source, which is left out once it is gone: metrics keep nothing alive.
    fn add_source<T: Send + Sync + 'static>(
        &self,
        source: &Arc<T>,
        read: impl Fn(&T, &mut Readings) + Send + Sync + 'static,
    ) {
        let source = Arc::downgrade(source);
        let read =
            move |readings: &mut Readings| Weak::upgrade(&source).map(|source| read(&source, readings)).is_some();
        self.0.watched.sources().push(Box::new(read));
    }
}

/// Reads a source. Returns whether it still exists.
type Source = Box<dyn Fn(&mut Readings) -> bool + Send + Sync>;

/// The sources that are read.
#[derive(Default)]
pub(super) struct Watched(Mutex<Vec<Source>>);

/// What sources have said. `None` is not written.
#[derive(Default)]
struct Readings {
    keys: Option<KeyUsage>,
    store_errors: Option<Vec<StoreErrorCount>>,
    expired: Option<[(&'static str, u64); 3]>,
    penalties: Option<PenaltyCounts>,
    waiters: Option<usize>,
    delayed: Option<usize>,
    fsync: Option<HistogramReading>,
    journal_up: Option<bool>,
}

impl Watched {
    fn sources(&self) -> std::sync::MutexGuard<'_, Vec<Source>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn encode(&self, encoder: &mut Encoder<'_>) -> fmt::Result {
        let mut readings = Readings::default();
        self.sources().retain(|source| source(&mut readings));
        let number = |count: usize| u64::try_from(count).unwrap_or(u64::MAX);
        if let Some(keys) = readings.keys {
            encoder.gauge("threshold_keys", "Keys with a balance in memory", number(keys.used))?;
            encoder.gauge("threshold_keys_max", "Keys beyond which memory evicts others", number(keys.max))?;
            encoder.counter("threshold_keys_evicted", "Live balances that were evicted for others", keys.evicted)?;
            let help = "Keys that were counted by a shared one, because memory was full";
            encoder.counter("threshold_keys_folded", help, keys.folded)?;
        }
        if let Some(errors) = readings.store_errors {
            // All kinds from the start, because a rise from nothing is none to Prometheus.
            let series = StoreErrorKind::ALL.iter().map(|kind| {
                let count = errors.iter().find(|error| error.kind == *kind).map_or(0, |error| error.count);
                ([("kind", kind.name())], count)
            });
            encoder.counters("threshold_store_call_errors", "Calls of the store that failed, by kind", series)?;
        }
        if let Some(penalties) = readings.penalties {
            encoder.gauge("threshold_bans_active", "Bans in force, by operators and by ladders", penalties.bans)?;
            encoder.gauge("threshold_shadow_bans_active", "Shadow bans in force", penalties.shadow_bans)?;
            encoder.gauge("threshold_locks_active", "Accounts that failed logins have locked", penalties.locks)?;
        }
        if let Some(waiters) = readings.waiters {
            encoder.gauge("threshold_waiters", "Requests that wait until they fit", number(waiters))?;
        }
        if let Some(delayed) = readings.delayed {
            encoder.gauge(
                "threshold_delayed",
                "Requests of shadow-banned callers that are delayed",
                number(delayed),
            )?;
        }
        if let Some(expired) = readings.expired {
            let series = expired.map(|(kind, count)| ([("kind", kind)], count));
            encoder.counters("threshold_expired", "What ended by time and not by a call", series)?;
        }
        if let Some(fsync) = readings.fsync {
            encoder.histogram("threshold_fsync_seconds", "How long commits of the journal took", &fsync)?;
        }
        if let Some(is_up) = readings.journal_up {
            encoder.gauge("threshold_journal_up", "Whether the journal can be written", is_up.into())?;
        }
        Ok(())
    }
}

impl fmt::Debug for Watched {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Watched").finish_non_exhaustive()
    }
}
