//! What is done while the server runs: troubles of the journal are told, what is over is swept, counters are saved, and
//! changes of other nodes are taken over.

use std::sync::Arc;
use std::time::Duration;

use threshold_limiter::journal::{Journal, JournalEvent};
use tokio::time::{Instant, MissedTickBehavior, interval};

use crate::door::{App, Trouble};

/// How often bans that are over are taken out; nothing depends on it but memory.
const SWEEP: Duration = Duration::from_secs(60);
/// How often it is looked whether what somebody was given is over: it ends so much late at most.
const SETTINGS: Duration = Duration::from_millis(500);
/// How often bans and settings that other nodes have changed are read: they hold so much later at most.
const FOLLOW: Duration = Duration::from_millis(500);
/// How often it is looked whether the disk keeps up.
const LOOK: Duration = Duration::from_millis(250);
/// A write that takes longer than this is one of a disk in trouble: one that is well takes milliseconds.
const SLOW: Duration = Duration::from_secs(1);
/// How long it stays said that the journal was damaged and is whole again: longer than whoever watches looks away.
const REPAIRED: Duration = Duration::from_secs(60);
/// How often counters are saved, where that is asked for.
const SAVE: Duration = Duration::from_secs(1);

/// Starts it all. `damage` is what was wrong with the journal when it was opened: `/readyz` reports it until the process
/// ends.
pub(super) fn start(app: &Arc<App>, journal: Option<Arc<Journal>>, save_counters: bool, damage: Option<String>) {
    if let Some(journal) = journal {
        app.health.journal(damage.clone().map(|damage| Trouble::hiding(damage, &[journal.path()])));
        tokio::spawn(watch(Arc::clone(app), journal, damage));
    }
    if save_counters {
        let app = Arc::clone(app);
        every(SAVE, move || app.desk.save_counters());
    }
    if app.desk.shares_store() {
        tokio::spawn(follow(Arc::clone(app)));
    }
    let settings = Arc::clone(app);
    every(SETTINGS, move || settings.desk.end_settings(settings.desk.now()));
    let app = Arc::clone(app);
    every(SWEEP, move || app.desk.sweep_bans());
}

/// Takes over the bans and settings that other nodes change. While the store is away, those that are known stay in force.
async fn follow(app: Arc<App>) {
    let mut ticks = interval(FOLLOW);
    ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    let mut was_away = false;
    loop {
        ticks.tick().await;
        let followed = app.desk.follow().await;
        match (&followed, was_away) {
            (Err(error), false) => tracing::error!(%error, "bans and settings of other nodes cannot be read"),
            (Ok(()), true) => tracing::info!("bans and settings of other nodes are read again"),
            _ => {}
        }
        was_away = followed.is_err();
    }
}

/// Logs the events of the journal, and keeps `/readyz` up to date with its condition.
async fn watch(app: Arc<App>, journal: Arc<Journal>, damage: Option<String>) {
    let mut events = journal.events();
    let mut ticks = interval(LOOK);
    let (mut is_slow, mut repaired) = (false, None::<(Instant, String)>);
    let (since, mut is_recorded) = (Instant::now(), damage.is_some());
    loop {
        tokio::select! {
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
        let slow = journal.write_lag().filter(|lag| *lag >= SLOW && failure.is_none());
        match (slow, is_slow) {
            (Some(lag), false) => tracing::warn!(lag_ms = lag.as_millis(), "journal slow"),
            (None, true) => tracing::info!("journal no longer slow"),
            _ => {}
        }
        is_slow = slow.is_some();
        let slow =
            slow.map(|lag| format!("the journal is slow: what was changed {} s ago is not on disk yet", lag.as_secs()));
        let recent = repaired.as_ref().filter(|(since, _)| since.elapsed() < REPAIRED);
        let recent = recent.map(|(_, repair)| repair.clone());
        let reason = failure.or(slow).or(recent).or_else(|| damage.clone());
        app.health.journal(reason.map(|reason| Trouble::hiding(reason, &[journal.path()])));
        // By now the error is in the log. If the process is killed before, the next start reports the damage again.
        if is_recorded && since.elapsed() >= LOOK {
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

/// Does something again and again, where nobody has to wait for it.
fn every(period: Duration, work: impl Fn() + Clone + Send + 'static) {
    tokio::spawn(async move {
        let mut ticks = interval(period);
        ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
        loop {
            ticks.tick().await;
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
        let desk = Desk::on(policy, store, Arc::new(ManualClock::default()));
        Arc::new(App::new(desk, Tokens::default(), Bounds::default()))
    }

    /// Fails where nobody follows the store, or where it is followed once.
    #[tokio::test(start_paused = true)]
    async fn what_another_node_changes_holds_here_within_half_a_second() {
        let store = Arc::new(KeyValueStore::default());
        let (one, other) = (app(AnyStore::other(Arc::clone(&store))), app(AnyStore::other(store)));
        start(&other, None, false, None);
        tokio::time::sleep(FOLLOW * 2).await;
        let new = NewBan { layer: Layer::User, key: "mallory", reason: "fraud", seconds: None };
        let (id, _) = one.desk.ban("ops", new).await.unwrap();
        let setting = NewSetting { times: Some(3), ..NewSetting::default() };
        one.desk.set("ops", Owner::User, "bob", setting).await.unwrap();
        tokio::time::sleep(FOLLOW * 2).await;
        assert_eq!(other.desk.bans(None, 10).await.unwrap().first().map(|listed| listed.id), Some(id));
        assert_eq!(other.desk.given(Owner::User, "bob").unwrap().map(|setting| setting.times), Some(3));
        other.desk.lift("ops", id, None).await.unwrap();
        assert_eq!(one.desk.bans(None, 10).await.unwrap().len(), 1);
        one.desk.follow().await.unwrap();
        assert_eq!(one.desk.bans(None, 10).await.unwrap(), vec![]);
    }

    #[test]
    fn only_a_store_outside_of_this_process_is_followed() {
        let policy = Policy::parse("", &|_| None).unwrap();
        assert!(!app(MemoryStore::new(policy.memory()).into()).desk.shares_store());
        assert!(app(AnyStore::other(KeyValueStore::default())).desk.shares_store());
    }
}
