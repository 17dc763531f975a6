//! Parses bodies. An error names the field and, in a list, the item.

use std::fmt;
use std::marker::PhantomData;

use serde::de::value::MapAccessDeserializer;
use serde::de::{MapAccess, Visitor};
use serde::{Deserialize, Deserializer};
use serde_path_to_error::{Path, Segment};

use super::{ApiError, Requests};

/// Parses a body that is one object.
///
/// # Errors
/// 400 if it is not JSON, and if a field is unknown, missing, mistyped or too large.
pub fn read<'a, T: Deserialize<'a>>(body: &'a [u8]) -> Result<T, ApiError> {
    serde_json::from_slice(body).map(|Object(value)| value).map_err(|error| refusal::<Object<T>>(body, &error))
}

/// Parses one request or a list, as [`read`] does.
///
/// # Errors
/// As for [`read`].
pub fn read_requests(body: &[u8]) -> Result<Requests<'_>, ApiError> {
    serde_json::from_slice(body).map_err(|error| refusal::<Requests<'_>>(body, &error))
}

/// Describes an error. The path of a field is not tracked while parsing, because that would slow down valid requests.
#[cold]
fn refusal<'a, T: Deserialize<'a>>(body: &'a [u8], error: &serde_json::Error) -> ApiError {
    let message = error.to_string();
    // serde_json reports a number out of range as a syntax error, but it is valid JSON and belongs to a field.
    if !error.is_data() && !message.starts_with("number out of range") {
        return ApiError::new(400, "bad_request", format!("this is not JSON: {message}"));
    }
    let (index, field) = field_of::<T>(body, error);
    ApiError::new(400, "bad_request", message).about(field).at(index)
}

/// Returns the index in a list and the path of the field that an error is about, by parsing once more.
pub(crate) fn field_of<'a, T: Deserialize<'a>>(
    body: &'a [u8],
    error: &serde_json::Error,
) -> (Option<usize>, Option<String>) {
    let message = error.to_string();
    let mut reader = serde_json::Deserializer::from_slice(body);
    // The error is the same as before, so the second one is used only for its path.
    let (index, mut field) = match serde_path_to_error::deserialize::<_, T>(&mut reader) {
        Err(tracked) => place(tracked.path()),
        Ok(_) => (None, String::new()),
    };
    // For an unknown, missing or duplicate field the path ends at its object, and only the message names the field.
    let named = ["unknown field `", "missing field `", "duplicate field `"];
    if let Some(name) = named.iter().find_map(|start| message.strip_prefix(start)?.split('`').next()) {
        // For a duplicate, the path may already end with the name.
        if !field.is_empty() && !field.ends_with(name) {
            field.push('.');
            field.push_str(name);
        } else if field.is_empty() {
            field.push_str(name);
        }
    }
    (index, (!field.is_empty()).then_some(field))
}

/// Returns the index in a list, and the path of the field.
fn place(path: &Path) -> (Option<usize>, String) {
    let mut index = None;
    let mut names: Vec<&str> = Vec::new();
    for segment in path {
        match segment {
            // Only the outermost list is one of requests. An index further inside belongs to a field.
            Segment::Seq { index: item } if index.is_none() && names.is_empty() => index = Some(*item),
            Segment::Map { key } => names.push(key),
            _ => {}
        }
    }
    (index, names.join("."))
}

/// A JSON object. serde's derived structs would also accept an array of their values.
#[derive(Debug)]
pub struct Object<T>(pub T);

impl<'de, T: Deserialize<'de>> Deserialize<'de> for Object<T> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Read<T>(PhantomData<T>);
        impl<'de, T: Deserialize<'de>> Visitor<'de> for Read<T> {
            type Value = T;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("an object")
            }

            fn visit_map<A: MapAccess<'de>>(self, map: A) -> Result<T, A::Error> {
                T::deserialize(MapAccessDeserializer::new(map))
            }
        }
        deserializer.deserialize_map(Read(PhantomData)).map(Self)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::RequestBody;

    #[track_caller]
    fn check(body: &str, expected: &str) {
        let error = read_requests(body.as_bytes()).unwrap_err();
        assert_eq!((error.status, error.to_json().as_str()), (400, expected));
    }

    /// Two hosts answer with these bodies; a caller that moves from one to the other must not have to change its error handling.
    #[test]
    fn an_error_names_the_field_and_the_item() {
        check(
            r#"{"ipp": 1}"#,
            "{\"error\":\"bad_request\",\"message\":\"unknown field `ipp`, expected one of `ip`, `host`, `tenant`, `user`, \
             `tier`, `method`, `path`, `cost`, `bytes`, `costs`, `facts`, `headers`, `endpoint`, `category`, `requestId`, \
             `ttlSec`, `onExpire` at line 1 column 6\",\"field\":\"ipp\"}",
        );
        check(
            r#"[{}, {"costs": {"t": -1}}]"#,
            "{\"error\":\"bad_request\",\"message\":\"invalid type: integer `-1`, expected a whole number from 0 to \
             9007199254740991 at line 1 column 23\",\"field\":\"costs.t\",\"index\":1}",
        );
        check(
            "{",
            "{\"error\":\"bad_request\",\"message\":\"this is not JSON: EOF while parsing an object at line 1 column 1\",\
             \"field\":null}",
        );
        check(
            &format!("[{}]", vec!["{}"; 1_001].join(",")),
            "{\"error\":\"bad_request\",\"message\":\"a list has at most 1000 items at line 1 column 3004\",\"field\":null}",
        );
    }

    /// A derived struct alone would take `["203.0.113.7"]` for a request with this address.
    #[test]
    fn an_object_is_not_an_array_of_its_values() {
        let error = read::<RequestBody<'_>>(br#"["203.0.113.7"]"#).unwrap_err();
        assert_eq!(error.body.message(), "invalid type: sequence, expected an object at line 1 column 0");
    }
}
