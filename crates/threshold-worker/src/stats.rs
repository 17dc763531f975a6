//! `GET /v1/stats`: what was blocked, from the events in D1.

use threshold_core::Span;
use threshold_core::event::sql;
use threshold_limiter::Clock as _;
use threshold_wire::ApiError;
use worker::{Env, console_error};

use crate::clock::DateClock;
use crate::events::{Database, DatabaseError, millis};

/// Answers the call: the figures of the last day, or of `?period=min` or `?period=h`.
pub(crate) async fn answer(env: &Env, query: Option<&str>) -> Result<(u16, Vec<u8>), ApiError> {
    let period = match query {
        None | Some("" | "period=day") => Span::DAY,
        Some("period=h") => Span::HOUR,
        Some("period=min") => Span::MINUTE,
        Some(query) if query.starts_with("period=") => {
            return Err(ApiError::bad("period", "must be min, h or day"));
        }
        Some(_) => return Err(ApiError::bad("query", "unknown parameter")),
    };
    let now = DateClock.now();
    let stats =
        async { Database::open(env).await?.text(sql::STATS, &[millis(now.minus(period)), millis(now)], "stats").await };
    match stats.await {
        Ok(stats) => Ok((200, stats.into_bytes())),
        Err(error @ DatabaseError::Missing) => Err(ApiError::new(404, "not_found", error.to_string())),
        Err(error) => {
            console_error!("{}", serde_json::json!({"event": "stats_failed", "reason": error.to_string()}));
            Err(ApiError::new(503, "unavailable", "the statistics cannot be read"))
        }
    }
}
