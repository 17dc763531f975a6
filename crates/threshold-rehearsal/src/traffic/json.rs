//! Parses access logs as lines of JSON. Fields are found by name at any depth, and strings are borrowed unless they are escaped.

use std::borrow::Cow;
use std::fmt;

use serde::de::{DeserializeSeed, Deserializer, IgnoredAny, MapAccess, SeqAccess, Visitor};
use threshold_core::address::parse_address;

use super::moment::number_of_seconds;
use super::{Field, Fields, Moment, MomentReader, Request, Unreadable, request_line};

/// One value of a JSON line.
#[derive(Debug, Clone, PartialEq)]
pub(crate) enum Scalar<'a> {
    Text(Cow<'a, str>),
    Number(f64),
    Truth(bool),
}

/// The known fields of one line.
#[derive(Debug, Default)]
pub(crate) struct Scalars<'a> {
    found: [Option<(u8, Scalar<'a>)>; Field::COUNT],
    /// Numbers that are used as a name, as text.
    spelled: [Option<String>; Field::COUNT],
}

impl<'a> Scalars<'a> {
    /// Parses one line.
    pub(crate) fn read(line: &'a str, fields: &Fields) -> Result<Self, Unreadable> {
        let mut scalars = Self::default();
        let mut path = String::new();
        let mut json = serde_json::Deserializer::from_str(line);
        let seed = Object { fields, path: &mut path, scalars: &mut scalars };
        seed.deserialize(&mut json).map_err(|_| Unreadable("no JSON object"))?;
        // Two writers that share a file may interleave their lines. Half of such a line would be taken for a whole
        // request.
        json.end().map_err(|_| Unreadable("more than one JSON object"))?;
        for (found, spelled) in scalars.found.iter().zip(&mut scalars.spelled) {
            // Spelled once for the whole line, because `text` returns a reference that must live as long as the
            // request.
            if let Some((_, Scalar::Number(number))) = found {
                *spelled = Some(number.to_string());
            }
        }
        Ok(scalars)
    }

    pub(crate) fn get(&self, field: Field) -> Option<&Scalar<'a>> {
        self.found.get(field as usize)?.as_ref().map(|(_, scalar)| scalar)
    }

    /// Returns a field as text; a number is formatted. `null`, `-` and the empty string are `None`.
    pub(crate) fn text(&self, field: Field) -> Option<&str> {
        let text = match self.get(field)? {
            Scalar::Text(text) => text.as_ref(),
            Scalar::Number(_) => self.spelled.get(field as usize)?.as_deref()?,
            Scalar::Truth(_) => return None,
        };
        Some(text).filter(|text| !text.is_empty() && *text != "-")
    }

    pub(crate) fn moment(&self, moments: &mut MomentReader) -> Option<Moment> {
        match self.get(Field::Time)? {
            Scalar::Text(text) => moments.text(text),
            Scalar::Number(number) => number_of_seconds(*number),
            Scalar::Truth(_) => None,
        }
    }

    fn number<T: std::str::FromStr>(&self, field: Field) -> Option<T> {
        self.text(field)?.parse().ok()
    }

    /// Builds a request from the fields.
    pub(super) fn request(&self, moments: &mut MomentReader) -> Result<Request<'_>, Unreadable> {
        let at = self.moment(moments).ok_or(Unreadable("no time that can be read"))?;
        let whole = self.text(Field::Request).map(request_line);
        let (method, path) = whole.unwrap_or((None, None));
        Ok(Request {
            at,
            ip: self.text(Field::Ip).and_then(first_address),
            method: self.text(Field::Method).or(method),
            path: self.text(Field::Path).or(path).map(without_origin),
            host: self.text(Field::Host),
            user: self.text(Field::User),
            tenant: self.text(Field::Tenant),
            tier: self.text(Field::Tier),
            status: self.number(Field::Status),
            bytes: self.number(Field::Bytes),
            repeated: 0,
        })
    }

    fn keep(&mut self, field: Field, rank: u8, scalar: Scalar<'a>) {
        if let Some(slot) = self.found.get_mut(field as usize)
            // Several keys may name one field, such as `client_ip` and `remote_addr`. The better one wins wherever it
            // is in the line.
            && slot.as_ref().is_none_or(|(known, _)| rank < *known)
        {
            *slot = Some((rank, scalar));
        }
    }
}

/// Returns the first address of a list: some servers log the whole `X-Forwarded-For`, in which the client is first.
fn first_address(text: &str) -> Option<std::net::IpAddr> {
    parse_address(text.split(',').next().unwrap_or(text).trim())
}

/// Removes the scheme and host of `https://host/path`.
fn without_origin(path: &str) -> &str {
    let Some((scheme, rest)) = path.split_once("://") else { return path };
    // A path may contain a URL in its query: `/login?next=https://…` has no origin of its own.
    if scheme.contains(['/', '?']) {
        return path;
    }
    rest.find('/').and_then(|at| rest.get(at..)).unwrap_or("/")
}

struct Object<'s, 'a> {
    fields: &'s Fields,
    path: &'s mut String,
    scalars: &'s mut Scalars<'a>,
}

impl<'a> DeserializeSeed<'a> for Object<'_, 'a> {
    type Value = ();

    fn deserialize<D: Deserializer<'a>>(self, deserializer: D) -> Result<(), D::Error> {
        deserializer.deserialize_map(self)
    }
}

impl<'a> Visitor<'a> for Object<'_, 'a> {
    type Value = ();

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("an object")
    }

    fn visit_map<A: MapAccess<'a>>(self, mut map: A) -> Result<(), A::Error> {
        let outer = self.path.len();
        while let Some(key) = map.next_key_seed(Key)? {
            if outer > 0 {
                self.path.push('.');
            }
            self.path.push_str(&key);
            let wanted = self.fields.of_key(self.path).next().is_some() || self.fields.goes_below(self.path);
            if wanted {
                map.next_value_seed(Value { fields: self.fields, path: self.path, scalars: self.scalars })?;
            } else {
                // Skipped without allocating. A line may carry headers and bodies that no field asks for.
                map.next_value::<IgnoredAny>()?;
            }
            self.path.truncate(outer);
        }
        Ok(())
    }
}

/// A key, borrowed unless it is escaped.
struct Key;

impl<'a> DeserializeSeed<'a> for Key {
    type Value = Cow<'a, str>;

    fn deserialize<D: Deserializer<'a>>(self, deserializer: D) -> Result<Self::Value, D::Error> {
        deserializer.deserialize_str(self)
    }
}

impl<'a> Visitor<'a> for Key {
    type Value = Cow<'a, str>;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a key")
    }

    fn visit_borrowed_str<E>(self, text: &'a str) -> Result<Self::Value, E> {
        Ok(Cow::Borrowed(text))
    }

    fn visit_str<E>(self, text: &str) -> Result<Self::Value, E> {
        Ok(Cow::Owned(text.to_owned()))
    }
}

struct Value<'s, 'a> {
    fields: &'s Fields,
    path: &'s mut String,
    scalars: &'s mut Scalars<'a>,
}

impl<'a> Value<'_, 'a> {
    fn keep(self, scalar: &Scalar<'a>) {
        for (field, rank) in self.fields.of_key(self.path) {
            self.scalars.keep(field, rank, scalar.clone());
        }
    }
}

impl<'a> DeserializeSeed<'a> for Value<'_, 'a> {
    type Value = ();

    fn deserialize<D: Deserializer<'a>>(self, deserializer: D) -> Result<(), D::Error> {
        deserializer.deserialize_any(self)
    }
}

impl<'a> Visitor<'a> for Value<'_, 'a> {
    type Value = ();

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a value")
    }

    fn visit_borrowed_str<E>(self, text: &'a str) -> Result<(), E> {
        self.keep(&Scalar::Text(Cow::Borrowed(text)));
        Ok(())
    }

    fn visit_str<E>(self, text: &str) -> Result<(), E> {
        self.keep(&Scalar::Text(Cow::Owned(text.to_owned())));
        Ok(())
    }

    fn visit_f64<E>(self, number: f64) -> Result<(), E> {
        self.keep(&Scalar::Number(number));
        Ok(())
    }

    #[expect(clippy::cast_precision_loss, reason = "nanoseconds since the epoch lose less than a microsecond")]
    fn visit_u64<E>(self, number: u64) -> Result<(), E> {
        self.keep(&Scalar::Number(number as f64));
        Ok(())
    }

    #[expect(clippy::cast_precision_loss, reason = "no field of a log is a large negative number")]
    fn visit_i64<E>(self, number: i64) -> Result<(), E> {
        self.keep(&Scalar::Number(number as f64));
        Ok(())
    }

    fn visit_bool<E>(self, truth: bool) -> Result<(), E> {
        self.keep(&Scalar::Truth(truth));
        Ok(())
    }

    fn visit_unit<E>(self) -> Result<(), E> {
        Ok(())
    }

    fn visit_seq<A: SeqAccess<'a>>(self, mut seq: A) -> Result<(), A::Error> {
        // A list has no name for its items. It must be read to its end all the same, or the parser fails.
        while seq.next_element::<IgnoredAny>()?.is_some() {}
        Ok(())
    }

    fn visit_map<A: MapAccess<'a>>(self, map: A) -> Result<(), A::Error> {
        Object { fields: self.fields, path: self.path, scalars: self.scalars }.visit_map(map)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[track_caller]
    fn check(line: &str, expect: (u64, Option<&str>, Option<&str>, Option<&str>, Option<u16>)) {
        let fields = Fields::default();
        let scalars = Scalars::read(line, &fields).unwrap();
        let request = scalars.request(&mut MomentReader::default()).unwrap();
        let ip = request.ip.map(|ip| ip.to_string());
        let found = (request.at.micros, ip.as_deref(), request.method, request.path, request.status);
        assert_eq!(found, expect, "{line}");
    }

    #[test]
    fn fields_are_found_by_the_names_that_servers_use() {
        let at = 1_431_857_103_000_000;
        let full = (at, Some("203.0.113.7"), Some("GET"), Some("/a"), Some(200));
        check(
            r#"{"time":"2015-05-17T10:05:03Z","remote_addr":"203.0.113.7","request":"GET /a HTTP/1.1","status":"200"}"#,
            full,
        );
        check(
            r#"{"ts":1431857103,"request":{"remote_ip":"203.0.113.7","method":"GET","uri":"/a","headers":{"X":["y"]}},
               "status":200}"#,
            full,
        );
        check(
            r#"{"EdgeStartTimestamp":1431857103000000000,"ClientIP":"203.0.113.7","ClientRequestMethod":"GET",
               "ClientRequestURI":"/a","EdgeResponseStatus":200}"#,
            full,
        );
        check(
            r#"{"@timestamp":"2015-05-17T12:05:03+02:00","client":{"ip":"203.0.113.7"},"url":{"path":"/a"},
               "http":{"request":{"method":"GET"},"response":{"status_code":200}}}"#,
            full,
        );
        check(r#"{"time":1431857103,"ip":null,"url":"https://example.com/a"}"#, (at, None, None, Some("/a"), None));
    }

    #[test]
    fn a_field_name_of_the_command_line_replaces_the_known_names() {
        let pairs = [("ip".to_owned(), "peer".to_owned())];
        let fields = Fields::from_args(&pairs, Some("who.id"), None).unwrap();
        let line = r#"{"time":1431857103,"ip":"192.0.2.1","peer":"203.0.113.7","user":"x","who":{"id":7}}"#;
        let scalars = Scalars::read(line, &fields).unwrap();
        let request = scalars.request(&mut MomentReader::default()).unwrap();
        assert_eq!((request.ip.unwrap().to_string().as_str(), request.user), ("203.0.113.7", Some("7")));
        assert!(Fields::from_args(&[("adress".to_owned(), "x".to_owned())], None, None).is_err());
    }

    #[test]
    fn a_line_that_is_not_an_object_is_unreadable() {
        for line in ["{", "[1]", "{\"time\":}", "{} {}", "{\"a\":\u{1}}"] {
            assert!(Scalars::read(line, &Fields::default()).is_err(), "{line}");
        }
        let empty = Scalars::read("{}", &Fields::default()).unwrap();
        assert!(empty.request(&mut MomentReader::default()).is_err());
    }
}
