//! What is done about the journal while the server runs: troubles are told, what is over is swept, counters are saved.

use std::sync::Arc;
use std::time::Duration;

use threshold_limiter::journal::Journal;
use tokio::time::{Instant, MissedTickBehavior, interval};

use crate::door::{App, Trouble};

/// How often bans that are over are taken out; nothing depends on it but memory.
const SWEEP: Duration = Duration::from_secs(60);
/// How often it is looked whether what somebody was given is over: it ends so much late at most.
const SETTINGS: Duration = Duration::from_millis(500);
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
    let settings = Arc::clone(app);
    every(SETTINGS, move || settings.desk.end_settings(settings.desk.now()));
    let app = Arc::clone(app);
    every(SWEEP, move || app.desk.sweep_bans());
}

/// Tells of everything that is wrong with the journal, as it comes and goes.
async fn watch(app: Arc<App>, journal: Arc<Journal>, damage: Option<String>) {
    let (mut troubles, mut repairs) = (journal.troubles(), journal.repairs());
    let mut ticks = interval(LOOK);
    let (mut is_slow, mut repaired) = (false, None::<(Instant, String)>);
    let (since, mut is_recorded) = (Instant::now(), damage.is_some());
    loop {
        tokio::select! {
            // What was mended is told before that all is well.
            biased;
            Ok(()) = repairs.changed() => {
                if let Some(repair) = &*repairs.borrow_and_update() {
                    tracing::error!("{repair}");
                    repaired = Some((Instant::now(), repair.to_string()));
                }
            }
            changed = troubles.changed() => {
                if changed.is_err() {
                    return;
                }
                match &*troubles.borrow_and_update() {
                    Some(error) => tracing::error!(%error, "the journal cannot be written; decisions go on without it"),
                    None => tracing::info!("the journal is written again, with everything that has changed meanwhile"),
                }
            }
            _ = ticks.tick() => {}
        }
        let trouble = troubles.borrow().as_ref().map(|error| format!("the journal cannot be written: {error}"));
        let slow = journal.behind().filter(|behind| *behind >= SLOW && trouble.is_none());
        match (slow, is_slow) {
            (Some(_), false) => tracing::warn!("the disk is slow; what must be on it before it is answered waits"),
            (None, true) => tracing::info!("the disk is no longer slow"),
            _ => {}
        }
        is_slow = slow.is_some();
        let slow = slow.map(|behind| {
            format!("the journal is slow: what was changed {} s ago is not on disk yet", behind.as_secs())
        });
        let recent = repaired.as_ref().filter(|(since, _)| since.elapsed() < REPAIRED);
        let recent = recent.map(|(_, repair)| repair.clone());
        let told = trouble.or(slow).or(recent).or_else(|| damage.clone());
        app.health.journal(told.map(|told| Trouble::hiding(told, &[journal.path()])));
        // By now the error is in the log. If the process is killed before, the next start reports the damage again.
        if is_recorded && since.elapsed() >= LOOK {
            journal.damage_told();
            is_recorded = false;
        }
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
