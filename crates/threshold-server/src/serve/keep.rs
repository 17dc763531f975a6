//! What is done about the journal while the server runs: troubles are told, what is over is swept, counters are saved.

use std::sync::Arc;
use std::time::Duration;

use tokio::time::{MissedTickBehavior, interval};

use crate::door::App;

/// How often bans that are over are taken out; nothing depends on it but memory.
const SWEEP: Duration = Duration::from_secs(60);
/// How often it is looked whether what somebody was given is over: it ends so much late at most.
const SETTINGS: Duration = Duration::from_millis(500);
/// How often counters are saved, where that is asked for.
const SAVE: Duration = Duration::from_secs(1);

/// Starts it all. `damage` is what was wrong with the journal when it was opened: that stays said until the next start.
pub(super) fn start(app: &Arc<App>, save_counters: bool, damage: Option<String>) {
    app.health.journal(damage.clone());
    if let Some(journal) = &app.desk.journal {
        let (app, mut troubles) = (Arc::clone(app), journal.troubles());
        tokio::spawn(async move {
            while troubles.changed().await.is_ok() {
                let trouble = troubles.borrow_and_update().clone();
                match &trouble {
                    Some(error) => tracing::error!(%error, "the journal cannot be written; decisions go on without it"),
                    None => tracing::info!("the journal is written again, and nothing is missing in it"),
                }
                let trouble = trouble.map(|error| format!("the journal cannot be written: {error}"));
                app.health.journal(trouble.or_else(|| damage.clone()));
            }
        });
    }
    if save_counters {
        let app = Arc::clone(app);
        every(SAVE, move || app.desk.save_counters());
    }
    let settings = Arc::clone(app);
    every(SETTINGS, move || settings.desk.end_settings(settings.desk.limiter.now()));
    let app = Arc::clone(app);
    every(SWEEP, move || app.desk.limiter.bans().sweep(app.desk.limiter.now()));
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
