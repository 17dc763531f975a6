//! Raises and resolves alerts, by the counts in the database.

use std::collections::BTreeMap;

use serde_json::Value;
use threshold_core::alert::{AlertChange, AlertLevel, AlertNotice, Episode};
use threshold_core::event::sql;
use threshold_core::policy::{Alert, AlertOn};
use threshold_core::{Policy, Span, Timestamp};
use threshold_limiter::Clock as _;
use worker::wasm_bindgen::JsValue;
use worker::{console_error, console_warn};

use super::database::{Database, DatabaseError, millis, number};
use super::send::Receiver;
use crate::clock::DateClock;

/// How late events may be: KV shows a value everywhere after a minute, and the handler runs once a minute. So long after its last
/// busy moment an alert is resolved.
const LATENESS: Span = Span::from_secs(120);

/// The alerts of the database: by name and key.
type Known = BTreeMap<(String, String), Episode>;

/// How long one run may take. A later one takes over if it was ended before.
const RUN: Span = Span::from_secs(50);

/// Counts the events of each alert, logs what has changed, and posts it to the operator's URL, unless another run does.
pub(super) async fn raise(
    database: &Database,
    policy: &Policy,
    operator: Option<&Receiver>,
) -> Result<(), DatabaseError> {
    let now = DateClock.now();
    let until = millis(now.plus(RUN));
    if database.text(sql::BEGIN_ALERT_RUN, &[millis(now), until.clone()], "until").await?.is_empty() {
        return Ok(());
    }
    let judged = judge(database, policy, operator, now).await;
    database.run(sql::END_ALERT_RUN, &[until]).await?;
    judged
}

async fn judge(
    database: &Database,
    policy: &Policy,
    operator: Option<&Receiver>,
    now: Timestamp,
) -> Result<(), DatabaseError> {
    let known = known(database).await?;
    for on in AlertOn::ALL {
        let in_force = policy.alert(on);
        // An alert that is switched off is over.
        let alert = in_force.unwrap_or(on.usual());
        let counts = match in_force {
            Some(alert) => counts(database, on, alert, now).await?,
            None => BTreeMap::new(),
        };
        let own = known.iter().filter(|((name, _), _)| name == on.name());
        let mut episodes: BTreeMap<&str, Option<Episode>> =
            own.map(|((_, key), episode)| (key.as_str(), Some(*episode))).collect();
        for key in counts.keys() {
            episodes.entry(key).or_default();
        }
        for (key, before) in episodes {
            let count = counts.get(key).copied().unwrap_or(0);
            let (episode, change) = alert.judge(before, count, now);
            let Some(change) = change else { continue };
            let since = episode.or(before).map_or(now, |episode| episode.since);
            let named = Some(key).filter(|key| !key.is_empty());
            let notice = AlertNotice { on, alert, key: named, change, count, since, at: now }.to_json();
            save(database, (on, key), episode, since, operator.map(|_| notice.as_str())).await?;
            // After it is saved, so that it is logged once.
            match change {
                AlertChange::Raised(AlertLevel::Critical) => console_error!("{notice}"),
                AlertChange::Raised(AlertLevel::Warning) | AlertChange::Resolved(_) => console_warn!("{notice}"),
            }
        }
    }
    if let Some(operator) = operator {
        deliver(database, operator).await?;
    }
    database.run(sql::DELETE_RESOLVED, &[]).await
}

/// Returns the largest count in any period, by key.
async fn counts(
    database: &Database,
    on: AlertOn,
    alert: Alert,
    now: Timestamp,
) -> Result<BTreeMap<String, u64>, DatabaseError> {
    let since = now.minus(alert.per).minus(LATENESS);
    // A minute in seconds, an hour in minutes: so many rows are read, however long the period is.
    let step = alert.per.micros().checked_div(60_000).unwrap_or(0).max(1);
    let values = [millis(since), number(step), number(alert.warning)];
    let text = database.text(sql::alert_counts(on), &values, "counts").await?;
    let rows: Vec<(String, u64, u64)> = serde_json::from_str(&text).unwrap_or_default();
    let mut keys: BTreeMap<String, Vec<(Timestamp, u64)>> = BTreeMap::new();
    for (key, at, count) in rows {
        let at = Timestamp::EPOCH.plus(Span::from_millis(at.saturating_mul(step)));
        keys.entry(key).or_default().push((at, count));
    }
    Ok(keys.into_iter().map(|(key, counts)| (key, alert.peak(counts))).collect())
}

/// Returns the alerts that are raised.
async fn known(database: &Database) -> Result<Known, DatabaseError> {
    let rows = rows(database).await?;
    let episode = |row: &Value| {
        let level = AlertLevel::named(row.get("level")?.as_str()?)?;
        let since = Timestamp::EPOCH.plus(Span::from_millis(row.get("since")?.as_u64()?));
        Some((identity(row)?, Episode { level, since }))
    };
    Ok(rows.iter().filter_map(episode).collect())
}

async fn rows(database: &Database) -> Result<Vec<Value>, DatabaseError> {
    let text = database.text(sql::ALERTS, &[], "alerts").await?;
    Ok(serde_json::from_str(&text).unwrap_or_default())
}

fn identity(row: &Value) -> Option<(String, String)> {
    Some((row.get("alert")?.as_str()?.to_owned(), row.get("key")?.as_str()?.to_owned()))
}

async fn save(
    database: &Database,
    (on, key): (AlertOn, &str),
    episode: Option<Episode>,
    since: Timestamp,
    notice: Option<&str>,
) -> Result<(), DatabaseError> {
    let text = |text: Option<&str>| text.map_or(JsValue::NULL, JsValue::from_str);
    let level = episode.map(|episode| episode.level.name());
    let values = [on.name().into(), key.into(), text(level), millis(since), text(notice)];
    database.run(sql::SAVE_ALERT, &values).await
}

/// Posts the notices that were not received yet. One that is not received now is posted in the next run.
async fn deliver(database: &Database, operator: &Receiver) -> Result<(), DatabaseError> {
    for row in rows(database).await? {
        let (Some((alert, key)), Some(notice)) = (identity(&row), row.get("notice").and_then(Value::as_str)) else {
            continue;
        };
        if let Err(error) = operator.post(notice).await {
            console_error!("{}", serde_json::json!({"event": "alert_not_delivered", "reason": error.to_string()}));
            break;
        }
        database.run(sql::NOTICE_DELIVERED, &[alert.into(), key.into()]).await?;
    }
    Ok(())
}
