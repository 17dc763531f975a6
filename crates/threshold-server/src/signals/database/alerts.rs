//! The alerts that are raised, in the file of events: the next start must know what was told to whom, and how high its counts were.

use std::sync::Arc;

use rusqlite::{Connection, OptionalExtension as _};
use serde_json::{Map, Value, json};
use threshold_core::alert::{AlertChange, AlertLevel};
use threshold_core::decision::Cause;
use threshold_core::event::sql;
use threshold_core::policy::{Alert, AlertOn};
use threshold_core::{Span, Timestamp};

use super::file::is_damage;
use super::{DatabaseError, EventDatabase, integer, millis};
use crate::signals::alerts::{Group, Notice, Why, host_name};
use crate::signals::sinks::{Told, ToldTo};

/// The most that are read: far more than are raised at once.
const MAX_SAVED: usize = 100;
const SELECT: &str = "SELECT alert, key, level, since, notice FROM rate_limit_alerts WHERE level IS NOT NULL LIMIT ?1";
/// The row of alerts that are over and whose end is not told to everybody: an array in its last column. Another episode of the same
/// alert may be raised by now, and has the row of its own name.
const OVER: &str = "over";
const SELECT_OVER: &str = "SELECT notice FROM rate_limit_alerts WHERE alert = 'over' AND level IS NULL";

/// An alert that is raised, or that is over while a receiver has yet to hear of it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct SavedAlert {
    /// What was told last. Its thresholds are not saved.
    pub(crate) notice: Notice,
    /// What each receiver has accepted; `None` in a file of an earlier version, which does not say.
    pub(crate) told: Option<ToldTo>,
}

impl SavedAlert {
    fn to_json(&self) -> Value {
        let Notice { on, key, count, peak, since, at, node, why, group, .. } = &self.notice;
        let told = self.told.iter().flatten().map(|(receiver, told)| (receiver.to_string(), told.name().into()));
        json!({
            "alert": on.name(),
            "key": key.as_deref(),
            "level": self.notice.level().name(),
            "since": millis(*since),
            "at": millis(*at),
            "count": count,
            "peak": peak,
            "node": &**node,
            "cause": why.cause.map(Cause::name),
            "rule": why.rule.as_deref(),
            "addresses": group.as_ref().map(|group| group.addresses),
            "largest": group.as_ref().and_then(|group| group.largest.as_deref()),
            "told": Value::Object(told.collect()),
        })
    }

    /// Reads an alert; `None` if it means nothing to this program.
    fn from_json(value: &Value, change: impl Fn(AlertLevel) -> AlertChange) -> Option<Self> {
        let text = |name: &str| value.get(name).and_then(Value::as_str);
        let number = |name: &str| value.get(name).and_then(Value::as_u64);
        let time = |name: &str| number(name).map(|at| Timestamp::EPOCH.plus(Span::from_millis(at)));
        let on = AlertOn::ALL.into_iter().find(|on| Some(on.name()) == text("alert"))?;
        let key: Option<Arc<str>> = text("key").filter(|key| !key.is_empty()).map(Into::into);
        let addresses = number("addresses").and_then(|addresses| addresses.try_into().ok());
        let group = addresses.map(|addresses| Group { addresses, largest: text("largest").map(Into::into) });
        // Of addresses, and of these alone, each has its own, and several have one together.
        if (key.is_some() || group.is_some()) != (on == AlertOn::IpBlocks) || key.is_some() && group.is_some() {
            return None;
        }
        let (level, since) = (AlertLevel::named(text("level")?)?, time("since")?);
        let (at, count, peak) = (time("at").unwrap_or(since), number("count"), number("peak"));
        let notice = Notice {
            on,
            alert: on.usual(),
            key,
            change: change(level),
            count: count.unwrap_or(0),
            peak: peak.unwrap_or(0),
            since,
            at,
            // Earlier versions named every server by its machine.
            node: text("node").map_or_else(host_name, Into::into),
            why: Why { cause: text("cause").and_then(Cause::named), rule: text("rule").map(Into::into) },
            group,
        };
        let told = value.get("told").and_then(Value::as_object).map(|told| {
            let named =
                |(receiver, told): (&String, &Value)| Some((receiver.as_str().into(), Told::named(told.as_str()?)?));
            told.iter().filter_map(named).collect()
        });
        Some(Self { notice, told })
    }
}

impl EventDatabase {
    /// Saves alerts in place of those that were saved before. If that fails, the next start knows the older ones. Returns whether
    /// it will know these.
    pub(crate) fn save_alerts(&self, alerts: &[SavedAlert], now: Timestamp) -> bool {
        self.with_writer(now, |writer| {
            let Some(connection) = &mut writer.connection else { return false };
            let mut saved = save(connection, alerts);
            if saved.as_ref().is_err_and(is_damage) {
                saved = renew_table(connection).and_then(|()| save(connection, alerts));
            }
            if let Err(error) = &saved {
                tracing::warn!(reason = %error, "raised alerts not saved");
            }
            saved.is_ok() && self.path.is_some()
        })
    }

    /// Returns the alerts that the process before has saved. A table that cannot be read is begun again.
    pub(crate) fn saved_alerts(&self, now: Timestamp) -> Vec<SavedAlert> {
        self.with_writer(now, |writer| {
            let Some(connection) = &writer.connection else { return Vec::new() };
            let (alerts, unreadable) = match read(connection) {
                Ok(alerts) => alerts,
                Err(error) => {
                    tracing::error!(reason = %error, "raised alerts not restored: their table cannot be read");
                    if is_damage(&error)
                        && let Err(error) = renew_table(connection)
                    {
                        tracing::error!(reason = %error, "table of raised alerts not begun again");
                    }
                    return Vec::new();
                }
            };
            if unreadable > 0 {
                tracing::error!(rows = unreadable, "raised alerts not restored: unreadable rows");
            }
            alerts
        })
    }

    /// Returns what an alert counts, by address, of the events since a time. Of `ip_blocks`, only addresses with at least as many as
    /// the warning threshold.
    pub(crate) fn alert_counts(
        &self,
        (on, alert): (AlertOn, Alert),
        since: Timestamp,
    ) -> Result<Vec<(String, Timestamp, u64)>, DatabaseError> {
        let step = alert.per.micros().checked_div(60_000).unwrap_or(0).max(1);
        let values = (millis(since), integer(step), integer(alert.warning));
        let json: String =
            self.read(|connection| connection.query_row(sql::alert_counts(on), values, |row| row.get(0)))?;
        let rows: Vec<(String, u64, u64)> = serde_json::from_str(&json).unwrap_or_default();
        let at = |number: u64| Timestamp::EPOCH.plus(Span::from_millis(number.saturating_mul(step)));
        Ok(rows.into_iter().map(|(key, number, count)| (key, at(number), count)).collect())
    }
}

fn save(connection: &mut Connection, alerts: &[SavedAlert]) -> rusqlite::Result<()> {
    let transaction = connection.transaction()?;
    transaction.execute("DELETE FROM rate_limit_alerts", [])?;
    let (over, raised): (Vec<_>, Vec<_>) = alerts.iter().partition(|saved| saved.notice.is_resolved());
    for saved in raised {
        let Notice { on, key, since, .. } = &saved.notice;
        let level = saved.notice.level().name();
        let values =
            (on.name(), key.as_deref().unwrap_or_default(), level, millis(*since), saved.to_json().to_string());
        transaction.prepare_cached(sql::SAVE_ALERT)?.execute(values)?;
    }
    if !over.is_empty() {
        let over = Value::from_iter(over.into_iter().map(SavedAlert::to_json)).to_string();
        transaction.prepare_cached(sql::SAVE_ALERT)?.execute((OVER, "", None::<&str>, 0, over))?;
    }
    transaction.commit()
}

/// Returns the alerts, and the number of rows that mean nothing to this program.
fn read(connection: &Connection) -> rusqlite::Result<(Vec<SavedAlert>, usize)> {
    let mut statement = connection.prepare(SELECT)?;
    let rows = statement.query_map([integer(MAX_SAVED.try_into().unwrap_or(u64::MAX))], |row| {
        let (name, key): (String, String) = (row.get(0)?, row.get(1)?);
        let (level, since): (String, i64) = (row.get(2)?, row.get(3)?);
        let notice: Option<String> = row.get(4)?;
        let notice: Option<Map<String, Value>> = notice.and_then(|notice| serde_json::from_str(&notice).ok());
        let mut fields = notice.unwrap_or_default();
        // The columns prevail: earlier versions have nothing else.
        let columns = [("alert", json!(name)), ("key", json!(key)), ("level", json!(level)), ("since", json!(since))];
        fields.extend(columns.map(|(name, value)| (name.to_owned(), value)));
        Ok(SavedAlert::from_json(&fields.into(), AlertChange::Raised))
    })?;
    let (mut alerts, mut unreadable) = (Vec::new(), 0_usize);
    for row in rows {
        match row {
            Ok(Some(alert)) => alerts.push(alert),
            // A value of another type.
            Ok(None) | Err(rusqlite::Error::InvalidColumnType(..)) => unreadable = unreadable.saturating_add(1),
            Err(error) => return Err(error),
        }
    }
    let over: Option<String> = connection.query_row(SELECT_OVER, [], |row| row.get(0)).optional()?.flatten();
    let over: Vec<Value> = over.and_then(|over| serde_json::from_str(&over).ok()).unwrap_or_default();
    for value in over.iter().take(MAX_SAVED) {
        match SavedAlert::from_json(value, AlertChange::Resolved) {
            Some(alert) => alerts.push(alert),
            None => unreadable = unreadable.saturating_add(1),
        }
    }
    Ok((alerts, unreadable))
}

fn renew_table(connection: &Connection) -> rusqlite::Result<()> {
    connection.execute_batch("DROP TABLE IF EXISTS rate_limit_alerts")?;
    sql::TABLES.iter().try_for_each(|statement| connection.execute_batch(statement))
}
