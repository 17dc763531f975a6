//! The query string of a call: axum's extractor, with the API's own error body.

use std::sync::Arc;

use axum::extract::FromRequestParts;
use http::request::Parts;
use serde::de::DeserializeOwned;

use super::{ApiError, App};

/// The parameters of a call. `T` denies unknown fields and has no lists, so that each parameter comes at most once.
#[derive(Debug)]
pub(super) struct Query<T>(pub(super) T);

impl<T: DeserializeOwned> FromRequestParts<Arc<App>> for Query<T> {
    type Rejection = ApiError;

    async fn from_request_parts(parts: &mut Parts, app: &Arc<App>) -> Result<Self, ApiError> {
        match axum::extract::Query::from_request_parts(parts, app).await {
            Ok(axum::extract::Query(parameters)) => Ok(Self(parameters)),
            Err(rejection) => Err(refusal(&rejection.body_text())),
        }
    }
}

/// Turns serde's message about a field into one about a parameter. Fields are strings, so that nothing else goes wrong here.
///
/// The text is `Failed to deserialize query string: NAME: unknown field `NAME`, expected …`; a duplicate field comes without the
/// second prefix.
fn refusal(text: &str) -> ApiError {
    let message = text.split_once("string: ").map_or(text, |(_, message)| message);
    // serde quotes the name of the field in backticks, and axum gives no access to it otherwise.
    let name = message.split('`').nth(1).unwrap_or_default();
    let path = format!("{name}: ");
    let message = message.strip_prefix(path.as_str()).unwrap_or(message);
    ApiError::bad(name, message.replacen(" field ", " parameter ", 1))
}

#[cfg(test)]
mod tests {
    use serde::Deserialize;

    use super::*;

    #[derive(Debug, PartialEq, Eq, Deserialize)]
    #[serde(deny_unknown_fields)]
    struct Two {
        a: Option<String>,
        b: Option<String>,
    }

    fn parse(query: &str) -> Result<Two, (String, String)> {
        let uri = format!("/?{query}").parse().unwrap();
        let parsed = axum::extract::Query::<Two>::try_from_uri(&uri).map(|axum::extract::Query(two)| two);
        parsed.map_err(|rejection| {
            let error = refusal(&rejection.body_text());
            (error.body.field().unwrap().to_owned(), error.body.message().to_owned())
        })
    }

    #[test]
    fn parameters_are_decoded_and_an_unknown_or_repeated_one_is_refused_by_name() {
        let two = |a: Option<&str>, b: Option<&str>| Ok(Two { a: a.map(str::to_owned), b: b.map(str::to_owned) });
        assert_eq!(parse(""), two(None, None));
        assert_eq!(parse("b=1&&a=caf%C3%A9+%26"), two(Some("caf\u{e9} &"), Some("1")));
        assert_eq!(parse("a"), two(Some(""), None));
        for (query, name, message) in [
            ("a=1&b=2&a=1", "a", "duplicate parameter `a`"),
            ("a=1&c=2", "c", "unknown parameter `c`, expected `a` or `b`"),
            ("A=1", "A", "unknown parameter `A`, expected `a` or `b`"),
        ] {
            assert_eq!(parse(query), Err((name.to_owned(), message.to_owned())), "{query}");
        }
    }
}
