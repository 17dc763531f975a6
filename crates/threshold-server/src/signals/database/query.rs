//! Reads events: pages of them, chosen by filters.

use std::fmt::Write as _;

use rusqlite::{Connection, OptionalExtension as _, ToSql, params_from_iter};
use threshold_core::Timestamp;

use super::{integer, limit, millis};

/// The most bytes of events in one page, above which it has fewer than were asked for.
pub(crate) const PAGE_BYTES: usize = 1 << 20;

/// As [`Event::is_login`](threshold_core::Event::is_login).
const IS_LOGIN: &str = "(event ->> 'cause' IS 'login' OR rule IS NULL AND endpoint IS 'login')";

const NEWEST: &str = "SELECT seq FROM sqlite_sequence WHERE name = 'rate_limit_events'";

/// A field of an event by which events are chosen.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Field {
    Layer,
    Blocked,
    Tenant,
    UserId,
    Endpoint,
    Ip,
    Rule,
    Verdict,
    Cause,
    Subject,
    TraceId,
}

impl Field {
    const fn column(self) -> &'static str {
        match self {
            Self::Layer => "layer",
            Self::Blocked => "blocked",
            Self::Tenant => "tenant",
            Self::UserId => "user_id",
            Self::Endpoint => "endpoint",
            Self::Ip => "ip",
            Self::Rule => "rule",
            Self::Verdict => "verdict",
            Self::Subject => "subject",
            // No column: a file from before has none.
            Self::Cause => "event ->> 'cause'",
            // As in the index.
            Self::TraceId => "event ->> 'traceId'",
        }
    }
}

/// The events whose field has one of these values.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Filter {
    pub(crate) field: Field,
    pub(crate) values: Vec<String>,
    /// Further values, of refused logins only: these name an account by its normal form, which may be the name of another user.
    pub(crate) accounts: Vec<String>,
}

impl Filter {
    pub(crate) fn new(field: Field, values: Vec<String>) -> Self {
        Self { field, values, accounts: Vec::new() }
    }
}

/// The events that are asked for. All filters must hold.
#[derive(Debug, Clone, Default)]
pub(crate) struct EventQuery {
    /// Those that arrived after the one with this number, in order of arrival. Without it, the newest.
    pub(crate) after: Option<u64>,
    /// Those that arrived before the one with this number, the newest of them.
    pub(crate) before: Option<u64>,
    pub(crate) limit: usize,
    pub(crate) filters: Vec<Filter>,
    /// Those decided at this time or later.
    pub(crate) since: Option<Timestamp>,
}

/// Events in order of arrival.
#[derive(Debug, Default, PartialEq, Eq)]
pub(crate) struct Page {
    /// The number of each event, and its JSON.
    pub(crate) events: Vec<(u64, String)>,
    /// The number after which the next page begins.
    pub(crate) next: u64,
    /// The number before which the page of older events ends; `None` if there are none, or if they were not looked for.
    pub(crate) previous: Option<u64>,
}

pub(super) fn newest(connection: &Connection) -> rusqlite::Result<u64> {
    let newest: Option<i64> = connection.prepare_cached(NEWEST)?.query_row([], |row| row.get(0)).optional()?;
    Ok(newest.and_then(|newest| u64::try_from(newest).ok()).unwrap_or(0))
}

pub(super) fn page(connection: &Connection, query: &EventQuery) -> rusqlite::Result<Page> {
    // One transaction, so that the page and the newest number are of the same moment.
    let transaction = connection.unchecked_transaction()?;
    let newest = newest(&transaction)?;
    // The file was replaced since, and its numbers begin again.
    let after = query.after.map(|after| if after > newest { 0 } else { after });
    let (mut condition, mut values) = condition(&query.filters);
    if let Some(since) = query.since {
        condition.push_str(" AND at >= ?");
        values.push(Box::new(millis(since)));
    }
    if let Some(after) = after {
        condition.push_str(" AND number > ?");
        values.push(Box::new(integer(after)));
    }
    if let Some(before) = query.before {
        condition.push_str(" AND number < ?");
        values.push(Box::new(integer(before)));
    }
    values.push(Box::new(limit(query.limit)));
    let order = if after.is_some() { "ASC" } else { "DESC" };
    let statement =
        format!("SELECT number, event FROM rate_limit_events WHERE {condition} ORDER BY number {order} LIMIT ?");
    let mut statement = transaction.prepare(&statement)?;
    let mut rows = statement.query(params_from_iter(values))?;
    let (mut events, mut bytes) = (Vec::new(), 0_usize);
    let mut is_cut = false;
    while let Some(row) = rows.next()? {
        let (number, event): (i64, String) = (row.get(0)?, row.get(1)?);
        bytes = bytes.saturating_add(event.len());
        events.push((u64::try_from(number).unwrap_or(0), event));
        if bytes > PAGE_BYTES {
            is_cut = true;
            break;
        }
    }
    let is_whole = !is_cut && events.len() < query.limit;
    let last = events.last().map(|(number, _)| *number);
    // The next page need not look again at what these filters have left out.
    let next = match last.filter(|_| after.is_some() && !is_whole) {
        Some(last) => last,
        None => newest,
    };
    let previous = last.filter(|_| after.is_none() && !is_whole);
    if after.is_none() {
        events.reverse();
    }
    Ok(Page { events, next, previous })
}

/// Returns the condition of filters, and its values.
pub(super) fn condition(filters: &[Filter]) -> (String, Vec<Box<dyn ToSql>>) {
    let (mut condition, mut values) = ("true".to_owned(), Vec::<Box<dyn ToSql>>::new());
    for Filter { field, values: own, accounts } in filters {
        let marks = |values: &[String]| vec!["?"; values.len()].join(", ");
        let (column, own_marks, account_marks) = (field.column(), marks(own), marks(accounts));
        let _ = write!(condition, " AND ({column} IN ({own_marks})");
        if !accounts.is_empty() {
            let _ = write!(condition, " OR {column} IN ({account_marks}) AND {IS_LOGIN}");
        }
        condition.push(')');
        for value in own.iter().chain(accounts) {
            match field {
                Field::Blocked => values.push(Box::new(i64::from(value == "true"))),
                _ => values.push(Box::new(value.clone())),
            }
        }
    }
    (condition, values)
}
