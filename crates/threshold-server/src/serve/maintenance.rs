//! Background tasks: watch the journal, count events, remove ended bans and settings, save counters, apply changes of other nodes.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use threshold_limiter::journal::{Journal, JournalEvent};
use threshold_limiter::store::{StoreError, StoreErrorCount, StoreErrorKind};
use tokio::time::{Instant, MissedTickBehavior, interval};

use crate::door::{App, Problem};

/// How often ended bans, old events and old names are removed. None of them has an effect after its end, so this only bounds memory.
const SWEEP_INTERVAL: Duration = Duration::from_secs(60);
/// How often the number of lines that were left out of the log is reported, if no further line reports it: at the end of the
/// second that they are counted by.
const LOG_INTERVAL: Duration = Duration::from_secs(1);
/// How often the events of decisions are counted, and so the most by which an alert is late.
const EVENTS_INTERVAL: Duration = Duration::from_millis(250);
/// How often decisions are counted for the charts of the dashboard: their shortest step.
const SERIES_INTERVAL: Duration = Duration::from_secs(1);
/// How often ended settings are removed, and so the most by which one ends late.
const SETTINGS_INTERVAL: Duration = Duration::from_millis(500);
/// How often changes of other nodes are read, and so the most by which they take effect late here.
const SYNC_INTERVAL: Duration = Duration::from_millis(500);
/// The pause between two lines about one kind of errors of the store.
const CALL_ERRORS_INTERVAL: Duration = Duration::from_secs(60);
/// The most reasons of one outage that are logged.
const MAX_REASONS: usize = 8;
/// How often the age of unsaved changes is checked.
const DISK_INTERVAL: Duration = Duration::from_millis(250);
/// The age of unsaved changes from which the disk counts as slow: a healthy one takes milliseconds.
const SLOW: Duration = Duration::from_secs(1);
/// How long `/readyz` reports a repaired journal: longer than the interval of usual health checks.
const REPORT_REPAIR: Duration = Duration::from_secs(60);
/// How often counters are saved with `--save-counters`.
const SAVE_INTERVAL: Duration = Duration::from_secs(1);

/// Starts the tasks. `damage` was found when the journal was opened; `/readyz` reports it until the process ends.
pub(super) fn start(app: &Arc<App>, journal: Option<Arc<Journal>>, save_counters: bool, damage: Option<String>) {
    if let Some(journal) = journal {
        // At once, and not with the first tick: a health check right after the start must already see it.
        app.health.set_journal(damage.clone().map(|damage| Problem::hiding(damage, &[journal.path()])));
        tokio::spawn(watch_journal(Arc::clone(app), journal, damage));
    }
    if save_counters {
        let app = Arc::clone(app);
        every(SAVE_INTERVAL, move || app.desk.save_counters());
    }
    app.desk.metrics.set_share_nodes(app.desk.share_nodes());
    if app.desk.shares_store() {
        tokio::spawn(apply_remote_changes(Arc::clone(app)));
    }
    let log = Arc::clone(app);
    every(LOG_INTERVAL, move || log.desk.report_left_out(Some(log.desk.now())));
    let events = Arc::clone(app);
    every(EVENTS_INTERVAL, move || events.collect_events());
    let series = Arc::clone(app);
    every(SERIES_INTERVAL, move || {
        series.add_to_series();
        series.desk.recent_requests.sweep(series.desk.now());
    });
    let settings = Arc::clone(app);
    every(SETTINGS_INTERVAL, move || settings.desk.end_settings(settings.desk.now()));
    let app = Arc::clone(app);
    every(SWEEP_INTERVAL, move || {
        app.desk.sweep_bans();
        app.desk.forget_old_names();
        app.signals.sweep(app.desk.now());
    });
}

/// Applies the bans and settings that other nodes change. While the store does not answer, the known ones stay in force.
async fn apply_remote_changes(app: Arc<App>) {
    let mut ticks = interval(SYNC_INTERVAL);
    // After a store that took long, the missed ticks are not made up for: a burst of requests would not help it.
    ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    let (mut logged, mut losses): (Vec<String>, u64) = (Vec::new(), 0);
    let mut call_errors = CallErrorLog::default();
    let mut named = Vec::new();
    loop {
        ticks.tick().await;
        let applied = app.desk.apply_remote_changes().await;
        let errors = app.desk.store_errors();
        let problem = match applied {
            Ok(()) => app.desk.store_problem().map(|reason| part_problem(&reason, &errors)),
            Err(error) => Some(store_problem(error, app.desk.store_error(), &errors)),
        };
        // A call that was lost or late is an error, and no sign that the next one fails too.
        let fails = errors.iter().any(|error| error.is_recent() && !error.kind.is_passing());
        let is_up = applied.is_ok() && app.desk.store_is_reachable() && !fails;
        app.desk.metrics.set_store_up(is_up);
        app.desk.metrics.set_share_nodes(app.desk.share_nodes());
        app.desk.count_charges();
        let differences = app.desk.store_differences();
        let has_new_differences = app.desk.metrics.set_store_differences(differences);
        let wrong = (differences > 0).then(|| wrong_writes(app.desk.store_error()));
        // Before the log: an operator who reads a line there finds the same in `/readyz`.
        app.health.set_store(problem.clone().or(wrong));
        match &problem {
            // The store may be unavailable for hours, so each reason is logged once. A second reason may be the one that
            // matters, such as a server that came back with the records of another secret.
            Some(Problem { details, .. }) if !is_up && !logged.contains(details) && logged.len() < MAX_REASONS => {
                tracing::error!(reason = details, "store unavailable: rules decide by on_store_error");
                logged.push(details.clone());
            }
            _ if is_up && !logged.is_empty() => {
                tracing::info!("store available again");
                logged.clear();
            }
            Some(_) | None => {}
        }
        call_errors.log(&errors, Instant::now());
        let lost = app.desk.control_losses();
        if lost > losses {
            tracing::warn!(
                times = lost,
                "store lost bans and settings: read again, and those of this node written back"
            );
            losses = lost;
        }
        if has_new_differences {
            tracing::error!(differences, last = app.desk.store_error(), "store writes wrong balances");
        }
        let nodes = match &*app.shared_store.load() {
            Some(store) => store.node_problems().into_iter().chain(store.retired_secret()).collect(),
            None => Vec::new(),
        };
        for problem in nodes.iter().filter(|problem| !named.contains(*problem)) {
            tracing::warn!("{problem}");
        }
        named = nodes;
    }
}

/// Describes a shared store that does not answer. The reason may name its address, which only requests with a token see.
fn store_problem(error: StoreError, reason: Option<String>, errors: &[StoreErrorCount]) -> Problem {
    let public = format!("{error}{}: rules decide by on_store_error", in_brackets(errors));
    let details = reason.map_or_else(|| public.clone(), |reason| format!("{public} ({reason})"));
    Problem { public, details }
}

/// Describes a shared store that answers, but not to everything: a primary is away, or calls have failed a moment ago.
fn part_problem(reason: &str, errors: &[StoreErrorCount]) -> Problem {
    let kinds = in_brackets(errors);
    let public = format!("a part of the store cannot be reached or fails calls{kinds}: rules decide by on_store_error");
    Problem { details: format!("{public} ({reason})"), public }
}

/// Returns the kinds of the last moments' errors. They are names from a fixed list, which everyone may read.
fn in_brackets(errors: &[StoreErrorCount]) -> String {
    let recent = errors.iter().filter(|error| error.is_recent());
    let kinds: Vec<&str> = recent.map(|error| error.kind.name()).collect();
    if kinds.is_empty() { String::new() } else { format!(" [{}]", kinds.join(", ")) }
}

/// Logs the errors of calls, each kind once in a while with its number since.
#[derive(Debug, Default)]
struct CallErrorLog(BTreeMap<StoreErrorKind, (u64, Instant)>);

impl CallErrorLog {
    fn log(&mut self, errors: &[StoreErrorCount], now: Instant) {
        for StoreErrorCount { kind, count, last, .. } in errors {
            let (before, at) = self.0.get(kind).copied().unzip();
            let new = count.saturating_sub(before.unwrap_or(0));
            let is_quiet = at.is_some_and(|at| now.saturating_duration_since(at) < CALL_ERRORS_INTERVAL);
            if new > 0 && !is_quiet {
                tracing::warn!(kind = kind.name(), count = new, last, "calls of the store failed");
                self.0.insert(*kind, (*count, now));
            }
        }
    }
}

/// Describes a store whose script computes other balances than this node.
fn wrong_writes(last: Option<String>) -> Problem {
    let public = "the store writes other balances than this node would: limits may be wrong".to_owned();
    let details = last.map_or_else(|| public.clone(), |last| format!("{public} ({last})"));
    Problem { public, details }
}

/// Logs the events of the journal, and keeps `/readyz` up to date with its condition.
async fn watch_journal(app: Arc<App>, journal: Arc<Journal>, damage: Option<String>) {
    let mut events = journal.events();
    let mut ticks = interval(DISK_INTERVAL);
    let (mut is_slow, mut repaired) = (false, None::<(Instant, String)>);
    let (since, mut is_recorded) = (Instant::now(), damage.is_some());
    loop {
        tokio::select! {
            // Events before ticks, so that a repair is noted before `/readyz` shows the state after it.
            biased;
            event = events.next() => {
                let Some(event) = event else { return };
                log(&event);
                if let JournalEvent::Repaired(repair) = event {
                    repaired = Some((Instant::now(), repair.to_string()));
                }
            }
            _ = ticks.tick() => {}
        }
        let failure = journal.failure().map(|error| format!("the journal cannot be written: {error}"));
        // A journal that fails lags as well. Only the failure is reported, because it is the cause.
        let slow = journal.write_lag().filter(|lag| *lag >= SLOW && failure.is_none());
        match (slow, is_slow) {
            (Some(lag), false) => tracing::warn!(lag_ms = lag.as_millis(), "journal slow"),
            (None, true) => tracing::info!("journal no longer slow"),
            _ => {}
        }
        is_slow = slow.is_some();
        let slow =
            slow.map(|lag| format!("the journal is slow: a change of {} s ago is not on disk yet", lag.as_secs()));
        // A repair is over when it is reported. It stays visible for a while, or no health check would ever see it.
        let recent = repaired.as_ref().filter(|(since, _)| since.elapsed() < REPORT_REPAIR);
        let recent = recent.map(|(_, repair)| repair.clone());
        // The most urgent one is shown: what is wrong now, then what was repaired, then what was found at the start.
        let problem = failure.or(slow).or(recent).or_else(|| damage.clone());
        app.health.set_journal(problem.map(|problem| Problem::hiding(problem, &[journal.path()])));
        // The log's thread has written the error by now. If the process is killed before, the next start reports it again.
        if is_recorded && since.elapsed() >= DISK_INTERVAL {
            journal.acknowledge_damage();
            is_recorded = false;
        }
    }
}

fn log(event: &JournalEvent) {
    match event {
        JournalEvent::Repaired(repair) => {
            let quarantine = repair.quarantine.as_ref().map(|path| path.display().to_string());
            let (rows, lines) = (repair.rows, repair.lines);
            tracing::error!(reason = repair.reason, rows, lines, quarantine, "journal rebuilt");
        }
        JournalEvent::Degraded(reason) => tracing::error!(%reason, "journal degraded"),
        JournalEvent::Recovered => tracing::info!("journal recovered"),
        other => tracing::warn!(event = ?other, "journal event"),
    }
}

/// Calls a blocking function at an interval, on a thread where it delays no request.
fn every(period: Duration, work: impl Fn() + Clone + Send + 'static) {
    tokio::spawn(async move {
        let mut ticks = interval(period);
        ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
        loop {
            ticks.tick().await;
            // The work panicked, or the runtime is being shut down.
            if tokio::task::spawn_blocking(work.clone()).await.is_err() {
                return;
            }
        }
    });
}

#[cfg(test)]
mod tests {
    use threshold_core::policy::{Layer, Owner, Policy};
    use threshold_limiter::ManualClock;
    use threshold_limiter::store::AnyStore;
    use threshold_limiter::store::memory::MemoryStore;

    use super::*;
    use crate::desk::{Desk, NewBan, NewSetting};
    use crate::door::{Bounds, KeyValueStore};
    use crate::serve::Tokens;

    fn app(store: AnyStore) -> Arc<App> {
        let policy = Policy::parse("[[rule]]\nname = 'r'\nper = ['user']\nlimit = '1/h'", &|_| None).unwrap();
        let desk = Desk::with_store(policy, store, Arc::new(ManualClock::default()));
        Arc::new(App::new(desk, Tokens::default(), Bounds::default()))
    }

    /// Fails if the store is not read, or only once.
    #[tokio::test(start_paused = true)]
    async fn changes_of_another_node_take_effect_within_half_a_second() {
        let store = Arc::new(KeyValueStore::default());
        let (one, other) = (app(AnyStore::other(Arc::clone(&store))), app(AnyStore::other(store)));
        start(&other, None, false, None);
        tokio::time::sleep(SYNC_INTERVAL * 2).await;
        let new = NewBan { layer: Layer::User, key: "mallory", reason: "fraud", seconds: None };
        let (id, _) = one.desk.ban("ops", new).await.unwrap();
        let setting = NewSetting { times: Some(3), ..NewSetting::default() };
        one.desk.set("ops", Owner::User, "bob", setting).await.unwrap();
        tokio::time::sleep(SYNC_INTERVAL * 2).await;
        assert_eq!(other.desk.bans(None, 10).await.unwrap().first().map(|listed| listed.id), Some(id));
        assert_eq!(other.desk.setting_of(Owner::User, "bob").unwrap().map(|setting| setting.times), Some(3));
        other.desk.lift("ops", id, None).await.unwrap();
        assert_eq!(one.desk.bans(None, 10).await.unwrap().len(), 1);
        one.desk.apply_remote_changes().await.unwrap();
        assert_eq!(one.desk.bans(None, 10).await.unwrap(), vec![]);
    }

    #[test]
    fn only_a_store_outside_of_this_process_is_shared() {
        let policy = Policy::parse("", &|_| None).unwrap();
        assert!(!app(MemoryStore::new(policy.memory()).into()).desk.shares_store());
        assert!(app(AnyStore::other(KeyValueStore::default())).desk.shares_store());
    }
}
