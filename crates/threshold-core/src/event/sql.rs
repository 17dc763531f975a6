//! The tables of events in SQLite, and the statements on them. Every host that keeps events there uses these: the Worker in D1.
//!
//! Times are whole milliseconds. Events go in as a batch of JSON, and figures come out as JSON, so that a host passes on text.

/// The condition of events that count for their layer and in alerts, as `Event::blames_caller` says. By the JSON, so that tables from
/// before need no new column.
macro_rules! blames_caller {
    () => {
        "blocked AND coalesce(event ->> 'cause', '') NOT IN ('ban', 'pause', 'list', 'outage')"
    };
}

/// Creates the tables, each statement by itself. It may be run any number of times.
pub const TABLES: [&str; 7] = [
    // The columns are for queries; `event` is the whole event. The order of `number` is the order of arrival, and none is given
    // twice, also if the newest event is deleted.
    "CREATE TABLE IF NOT EXISTS rate_limit_events (
        number INTEGER PRIMARY KEY AUTOINCREMENT,
        id TEXT NOT NULL UNIQUE,
        at INTEGER NOT NULL,
        layer TEXT,
        blocked INTEGER NOT NULL,
        tenant TEXT,
        user_id TEXT,
        endpoint TEXT,
        ip TEXT,
        rule TEXT,
        verdict TEXT NOT NULL,
        count INTEGER NOT NULL,
        subject TEXT,
        shadow_until INTEGER,
        banned_until INTEGER,
        unsent INTEGER,
        event TEXT NOT NULL
    )",
    "CREATE INDEX IF NOT EXISTS rate_limit_events_at ON rate_limit_events (at)",
    // Few events have these, so that the indexes are small.
    "CREATE INDEX IF NOT EXISTS rate_limit_events_shadow ON rate_limit_events (shadow_until) WHERE shadow_until IS NOT NULL",
    "CREATE INDEX IF NOT EXISTS rate_limit_events_ban ON rate_limit_events (banned_until) WHERE banned_until IS NOT NULL",
    "CREATE INDEX IF NOT EXISTS rate_limit_events_unsent ON rate_limit_events (number) WHERE unsent = 1",
    "CREATE TABLE IF NOT EXISTS rate_limit_alerts (
        alert TEXT NOT NULL,
        key TEXT NOT NULL,
        level TEXT,
        since INTEGER NOT NULL,
        notice TEXT,
        PRIMARY KEY (alert, key)
    )",
    // One row, of the run that judges alerts.
    "CREATE TABLE IF NOT EXISTS rate_limit_alert_runs (id INTEGER PRIMARY KEY, until INTEGER NOT NULL)",
];

/// Begins a run that judges alerts: it may take from now (`?1`) until a time (`?2`). Returns nothing while another one is under way: two
/// at once would tell an operator everything twice.
pub const BEGIN_ALERT_RUN: &str = "INSERT INTO rate_limit_alert_runs (id, until) VALUES (1, ?2)
    ON CONFLICT (id) DO UPDATE SET until = excluded.until WHERE until <= ?1 RETURNING CAST(until AS TEXT) AS until";

/// Ends the run that may take until `?1`.
pub const END_ALERT_RUN: &str = "UPDATE rate_limit_alert_runs SET until = 0 WHERE until = ?1";

/// Inserts a batch (`?1`, a JSON array). `?2` is 1 if the events are to be sent to a server, else null. An event that is known by its
/// id is left as it is.
pub const INSERT: &str = "INSERT OR IGNORE INTO rate_limit_events (id, at, layer, blocked, tenant, user_id, endpoint, ip, rule, verdict, count, subject, shadow_until, banned_until, unsent, event)
    SELECT value ->> 'id', value ->> 'at', value ->> 'layer', value ->> 'blocked', value ->> 'tenant', value ->> 'userId', value ->> 'endpoint', value ->> 'ip', value ->> 'rule', value ->> 'verdict', value ->> 'count', value ->> 'subject', value ->> 'shadowUntil', value ->> 'bannedUntil', ?2, value
    FROM json_each(?1)";

/// Selects as `batch` the oldest events that are to be sent, at most `?1`: a JSON array.
pub const UNSENT: &str = "SELECT json_group_array(json(event)) AS batch FROM
    (SELECT event FROM rate_limit_events WHERE unsent = 1 ORDER BY number LIMIT ?1)";

/// Records that events were sent: those with the ids of a batch (`?1`, a JSON array of events).
pub const SENT: &str =
    "UPDATE rate_limit_events SET unsent = NULL WHERE id IN (SELECT value ->> 'id' FROM json_each(?1))";

/// Deletes events from before `?1`.
pub const DELETE_OLD: &str = "DELETE FROM rate_limit_events WHERE at < ?1";

/// Deletes the oldest events, so that the newest `?1` are left.
pub const DELETE_SURPLUS: &str =
    "DELETE FROM rate_limit_events WHERE number <= (SELECT max(number) FROM rate_limit_events) - ?1";

/// Selects as `stats` the answer of `GET /v1/stats`, of events since `?1`; bans and shadow bans are those in force at `?2`.
pub const STATS: &str = concat!(
    "SELECT json_object(
        'edgeBlocks', coalesce(sum(count) FILTER (WHERE ", blames_caller!(), " AND layer = 'edge'), 0),
        'tenantBlocks', coalesce(sum(count) FILTER (WHERE ", blames_caller!(), " AND layer = 'tenant'), 0),
        'userBlocks', coalesce(sum(count) FILTER (WHERE ", blames_caller!(), " AND layer = 'user'), 0),
        'endpointBlocks', coalesce(sum(count) FILTER (WHERE ", blames_caller!(), " AND layer = 'endpoint'), 0),
        'warningsIssued', coalesce(sum(count) FILTER (WHERE verdict = 'warn'), 0),
        'shadowBansActive', (SELECT count(DISTINCT subject) FROM rate_limit_events WHERE shadow_until > ?2),
        'bansActive', (SELECT count(DISTINCT subject) FROM rate_limit_events WHERE banned_until > ?2),
        'topBlockedTenants', json((SELECT json_group_array(json_object('tenant', name, 'blocks', blocks)) FROM
            (SELECT tenant AS name, sum(count) AS blocks FROM rate_limit_events WHERE at >= ?1 AND blocked AND tenant IS NOT NULL
             GROUP BY name ORDER BY blocks DESC, name LIMIT 10))),
        'topBlockedEndpoints', json((SELECT json_group_array(json_object('endpoint', name, 'blocks', blocks)) FROM
            (SELECT endpoint AS name, sum(count) AS blocks FROM rate_limit_events WHERE at >= ?1 AND blocked AND endpoint IS NOT NULL
             GROUP BY name ORDER BY blocks DESC, name LIMIT 10))),
        'topBlockedIps', json((SELECT json_group_array(json_object('ip', name, 'blocks', blocks)) FROM
            (SELECT ip AS name, sum(count) AS blocks FROM rate_limit_events WHERE at >= ?1 AND blocked AND ip IS NOT NULL
             GROUP BY name ORDER BY blocks DESC, name LIMIT 10)))
    ) AS stats FROM rate_limit_events WHERE at >= ?1"
);

/// Selects as `counts` what an alert counts: a JSON array of `[key, step, count]` in order, of events since `?1`, in steps of `?2`
/// milliseconds. The key is the address for `ip_blocks`, and empty otherwise. An address with fewer blocks than `?3`, the threshold,
/// is left out, and of the others the 100 with the most are counted.
#[must_use]
pub const fn alert_counts(on: crate::policy::AlertOn) -> &'static str {
    use crate::policy::AlertOn;
    match on {
        AlertOn::EdgeBlocks => {
            concat!(
                "SELECT json_group_array(json_array('', step, count)) AS counts FROM
                 (SELECT at / CAST(?2 AS INTEGER) AS step, sum(count) AS count FROM rate_limit_events WHERE at >= ?1 AND ",
                blames_caller!(),
                " AND layer = 'edge' GROUP BY step HAVING ?3 > 0 ORDER BY step)"
            )
        }
        AlertOn::TenantBlocks => {
            concat!(
                "SELECT json_group_array(json_array('', step, count)) AS counts FROM
                 (SELECT at / CAST(?2 AS INTEGER) AS step, sum(count) AS count FROM rate_limit_events WHERE at >= ?1 AND ",
                blames_caller!(),
                " AND layer = 'tenant' GROUP BY step HAVING ?3 > 0 ORDER BY step)"
            )
        }
        AlertOn::UserBans => {
            "SELECT json_group_array(json_array('', step, count)) AS counts FROM
             (SELECT at / CAST(?2 AS INTEGER) AS step, sum(count) AS count FROM rate_limit_events
              WHERE at >= ?1 AND banned_until IS NOT NULL AND user_id IS NOT NULL
              GROUP BY step HAVING ?3 > 0 ORDER BY step)"
        }
        AlertOn::IpBlocks => {
            concat!(
                "SELECT json_group_array(json_array(ip, step, count)) AS counts FROM
                 (SELECT ip, at / CAST(?2 AS INTEGER) AS step, sum(count) AS count FROM rate_limit_events WHERE at >= ?1 AND ",
                blames_caller!(),
                " AND ip IN (SELECT ip FROM rate_limit_events WHERE at >= ?1 AND ip IS NOT NULL AND ",
                blames_caller!(),
                " GROUP BY ip HAVING sum(count) >= ?3 ORDER BY sum(count) DESC, ip LIMIT 100)
                 GROUP BY ip, step ORDER BY ip, step)"
            )
        }
    }
}

/// Selects as `alerts` the alerts that are raised, and the notices that are not delivered: a JSON array of
/// `{alert, key, level, since, notice}`.
pub const ALERTS: &str = "SELECT json_group_array(json_object('alert', alert, 'key', key, 'level', level, 'since', since, 'notice', notice)) AS alerts
    FROM rate_limit_alerts";

/// Saves an alert: its name, key, level (null if it is resolved), the time since when, and the notice that is to be delivered.
pub const SAVE_ALERT: &str =
    "INSERT OR REPLACE INTO rate_limit_alerts (alert, key, level, since, notice) VALUES (?1, ?2, ?3, ?4, ?5)";

/// Records that the notice of an alert (`?1`) and key (`?2`) was delivered.
pub const NOTICE_DELIVERED: &str = "UPDATE rate_limit_alerts SET notice = NULL WHERE alert = ?1 AND key = ?2";

/// Deletes alerts that are resolved and have nothing to deliver.
pub const DELETE_RESOLVED: &str = "DELETE FROM rate_limit_alerts WHERE level IS NULL AND notice IS NULL";
