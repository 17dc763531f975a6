//! `GET /metrics`: the metrics for Prometheus, in the format that a scraper asks for. Any token of the server is accepted; without
//! configured tokens none is needed.

use std::sync::Arc;

use axum::extract::State;
use axum::response::Response;
use http::header::{ACCEPT, AUTHORIZATION, CONTENT_TYPE};
use http::{HeaderMap, HeaderValue, StatusCode};
use serde_json::json;

use super::admin::memory_of;
use super::health::Viewer;
use super::openapi::{BUSY, Operation, Schemas, WRONG_HOST};
use super::routes::{Route, get};
use super::{ApiError, App};
use crate::metrics::in_text_format;

pub(super) fn routes() -> Vec<Route> {
    vec![get("/metrics", metrics, describe)]
}

fn describe(_: &mut Schemas) -> Operation {
    let text = json!({"schema": {"type": "string"}});
    let formats = json!({"text/plain": text, "application/openmetrics-text": text});
    let answer = "Prometheus' text format 0.0.4, or OpenMetrics text if `Accept` prefers it";
    Operation::new("metrics", "The metrics for Prometheus").response(200, answer, &formats).errors(&[
        (401, "The server has tokens, and the request has none of them"),
        WRONG_HOST,
        BUSY,
    ])
}

async fn metrics(State(app): State<Arc<App>>, viewer: Viewer, headers: HeaderMap) -> Result<Response, ApiError> {
    // Names of rules and the volume of traffic are not for everyone. Any token will do, because a scraper needs no
    // more than to read.
    if app.token_guesses.any_configured() && viewer == Viewer::Anonymous {
        let message = "send Authorization: Bearer with a token of this server";
        return Err(ApiError::new(StatusCode::UNAUTHORIZED, "unauthorized", message));
    }
    let memory = memory_of(headers.get(AUTHORIZATION), &app).await?;
    let openmetrics = app.metrics_text();
    let (text, kind) = match Format::accepted(&headers) {
        Format::OpenMetrics => (openmetrics, "application/openmetrics-text; version=1.0.0; charset=utf-8"),
        Format::Text => (in_text_format(&openmetrics), "text/plain; version=0.0.4; charset=utf-8"),
    };
    let mut response = Response::new(memory.body(text.into_bytes(), app.bounds.client_timeout)?);
    response.headers_mut().insert(CONTENT_TYPE, HeaderValue::from_static(kind));
    Ok(response)
}

/// A format of metrics.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Format {
    OpenMetrics,
    /// Prometheus' text format 0.0.4, which every scraper reads.
    Text,
}

impl Format {
    /// Returns the format with the highest `q` in `Accept`, of equal ones the first. As Prometheus' own libraries do, it is the text
    /// format if `Accept` names neither, and no scraper is refused.
    fn accepted(headers: &HeaderMap) -> Self {
        let fields = headers.get_all(ACCEPT).iter().filter_map(|field| field.to_str().ok());
        let mut best = (0.0, Self::Text);
        for (quality, format) in fields.flat_map(|field| field.split(',')).filter_map(Self::parse) {
            if quality > best.0 {
                best = (quality, format);
            }
        }
        best.1
    }

    /// Parses one range of `Accept`, such as `application/openmetrics-text;version=1.0.0;q=0.5`.
    fn parse(range: &str) -> Option<(f32, Self)> {
        let mut parts = range.split(';').map(str::trim);
        let name = parts.next()?;
        let (mut quality, mut version) = (1.0, "");
        for (key, value) in parts.filter_map(|part| part.split_once('=')) {
            if key.eq_ignore_ascii_case("q") {
                quality = value.parse().ok()?;
            } else if key.eq_ignore_ascii_case("version") {
                version = value.trim_matches('"');
            }
        }
        // Of a version that is not known here, another range may be acceptable. A newer text format is asked for together with this one.
        if name.eq_ignore_ascii_case("text/plain") && matches!(version, "" | "0.0.4") {
            Some((quality, Self::Text))
        } else if name.eq_ignore_ascii_case("application/openmetrics-text") && matches!(version, "" | "0.0.1" | "1.0.0")
        {
            Some((quality, Self::OpenMetrics))
        } else {
            None
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Woken by taking the last of equal ones, by ignoring `q` or `version`, and by another format without `Accept`.
    #[test]
    fn the_format_is_the_one_that_accept_prefers() {
        // What Prometheus 2.42 and 3.5 send.
        const PROMETHEUS_2: &str = "application/openmetrics-text;version=1.0.0,application/openmetrics-text;version=0.0.1;q=0.75,\
                                    text/plain;version=0.0.4;q=0.5,*/*;q=0.1";
        const PROMETHEUS_3: &str = "application/openmetrics-text;version=1.0.0;escaping=allow-utf-8;q=0.5,\
                                    application/openmetrics-text;version=0.0.1;q=0.4,\
                                    text/plain;version=1.0.0;escaping=allow-utf-8;q=0.3,text/plain;version=0.0.4;q=0.2,*/*;q=0.1";
        for (fields, format) in [
            (&[][..], Format::Text),
            (&["*/*"], Format::Text),
            (&["text/html,application/xhtml+xml,*/*;q=0.8"], Format::Text),
            (&["text/plain"], Format::Text),
            (&["text/plain;version=0.0.4"], Format::Text),
            (&[PROMETHEUS_2], Format::OpenMetrics),
            (&[PROMETHEUS_3], Format::OpenMetrics),
            (&["application/openmetrics-text"], Format::OpenMetrics),
            (&["Application/OpenMetrics-Text; Version=\"1.0.0\""], Format::OpenMetrics),
            (&["application/openmetrics-text;version=2.0.0"], Format::Text),
            (&["application/openmetrics-text;q=0.2, text/plain;q=0.9"], Format::Text),
            (&["text/plain;q=0.2, application/openmetrics-text;q=0.9"], Format::OpenMetrics),
            (&["text/plain, application/openmetrics-text"], Format::Text),
            (&["application/openmetrics-text, text/plain"], Format::OpenMetrics),
            (&["text/plain;q=0.1", "application/openmetrics-text;q=0.2"], Format::OpenMetrics),
            (&["application/openmetrics-text;q=0"], Format::Text),
            (&["application/openmetrics-text;q=a lot", "application/openmetrics-text;q=NaN"], Format::Text),
            (&[",;,q=1"], Format::Text),
        ] {
            let accept = fields.iter().map(|field| (ACCEPT, HeaderValue::from_static(field)));
            assert_eq!(Format::accepted(&accept.collect()), format, "{fields:?}");
        }
    }
}
