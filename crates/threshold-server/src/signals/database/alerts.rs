//! The alerts that are raised, in the file of events: the next start must know what was told, and how high its counts were.

use std::sync::Arc;

use rusqlite::Connection;
use threshold_core::alert::AlertLevel;
use threshold_core::event::sql;
use threshold_core::policy::{Alert, AlertOn};
use threshold_core::{Span, Timestamp};

use super::file::is_damage;
use super::{DatabaseError, EventDatabase, integer, millis};

/// The most that are read: far more than are raised at once.
const MAX_SAVED: usize = 100;
const SELECT: &str = "SELECT alert, key, level, since FROM rate_limit_alerts WHERE level IS NOT NULL LIMIT ?1";

/// An alert that is raised.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct SavedAlert {
    pub(crate) on: AlertOn,
    /// The address, for alerts on one address.
    pub(crate) key: Option<Arc<str>>,
    pub(crate) level: AlertLevel,
    /// When the episode began.
    pub(crate) since: Timestamp,
}

impl EventDatabase {
    /// Saves the alerts that are raised, in place of those that were saved before. If that fails, the next start knows the older ones.
    pub(crate) fn save_alerts(&self, raised: &[SavedAlert], now: Timestamp) {
        self.with_writer(now, |writer| {
            let Some(connection) = &mut writer.connection else { return };
            let mut saved = save(connection, raised);
            if saved.as_ref().is_err_and(is_damage) {
                saved = renew_table(connection).and_then(|()| save(connection, raised));
            }
            if let Err(error) = saved {
                tracing::warn!(reason = %error, "raised alerts not saved");
            }
        });
    }

    /// Returns the alerts that were raised when the process before ended. A table that cannot be read is begun again.
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

fn save(connection: &mut Connection, raised: &[SavedAlert]) -> rusqlite::Result<()> {
    let transaction = connection.transaction()?;
    transaction.execute("DELETE FROM rate_limit_alerts", [])?;
    for SavedAlert { on, key, level, since } in raised {
        let values = (on.name(), key.as_deref().unwrap_or_default(), level.name(), millis(*since), None::<&str>);
        transaction.prepare_cached(sql::SAVE_ALERT)?.execute(values)?;
    }
    transaction.commit()
}

/// Returns the alerts, and the number of rows that mean nothing to this program.
fn read(connection: &Connection) -> rusqlite::Result<(Vec<SavedAlert>, usize)> {
    let mut statement = connection.prepare(SELECT)?;
    let rows = statement.query_map([integer(MAX_SAVED.try_into().unwrap_or(u64::MAX))], |row| {
        let (name, key): (String, String) = (row.get(0)?, row.get(1)?);
        let (level, since): (String, i64) = (row.get(2)?, row.get(3)?);
        let on = AlertOn::ALL.into_iter().find(|on| on.name() == name);
        let since = u64::try_from(since).ok().map(|since| Timestamp::EPOCH.plus(Span::from_millis(since)));
        let key = Some(key.into()).filter(|key: &Arc<str>| !key.is_empty());
        let saved = on.zip(AlertLevel::named(&level)).zip(since).map(|((on, level), since)| (on, level, since));
        // Of addresses, and of these alone, each has its own.
        let saved = saved.filter(|(on, ..)| key.is_some() == (*on == AlertOn::IpBlocks));
        Ok(saved.map(|(on, level, since)| SavedAlert { on, key, level, since }))
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
    Ok((alerts, unreadable))
}

fn renew_table(connection: &Connection) -> rusqlite::Result<()> {
    connection.execute_batch("DROP TABLE IF EXISTS rate_limit_alerts")?;
    sql::TABLES.iter().try_for_each(|statement| connection.execute_batch(statement))
}
