//! Strings, whole numbers and maps in a request body, each with a bound. Strings are borrowed from the body unless escaped.

use std::borrow::Cow;
use std::fmt;
use std::marker::PhantomData;

use serde::de::{Error as _, MapAccess, Unexpected, Visitor};
use serde::{Deserialize, Deserializer};

/// The longest string, in characters: nginx and Apache accept request lines of at most 8 KiB by default.
pub(super) const MAX_TEXT: usize = 8_192;
/// The largest whole number that every JSON parser represents exactly: 2^53 - 1, as in JavaScript.
pub(super) const MAX_WHOLE: u64 = (1 << 53) - 1;
/// The most facts, costs or headers of one request: four for each of the 16 charges of a plan.
pub(super) const MAX_PAIRS: usize = 64;

/// A string of at most 8,192 characters.
#[derive(Debug, Default, Clone, PartialEq, Eq)]
pub struct Text<'a>(pub(super) Cow<'a, str>);

/// A whole number from 0 to 2^53 - 1.
#[derive(Debug, Clone, Copy)]
pub struct Whole(u64);

/// An object whose names are the caller's own, each at most once.
#[derive(Debug)]
pub struct Pairs<'a, V>(Vec<(Text<'a>, V)>);

impl Text<'_> {
    /// Returns the string.
    #[must_use]
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl Whole {
    /// Returns the number.
    #[must_use]
    pub fn number(self) -> u64 {
        self.0
    }
}

impl<V> Pairs<'_, V> {
    fn iter(&self) -> impl Iterator<Item = (&str, &V)> {
        self.0.iter().map(|(name, value)| (name.as_str(), value))
    }

    /// Converts every name to lower case.
    pub(super) fn lower_names(&mut self) {
        for (Text(name), _) in &mut self.0 {
            if name.bytes().any(|byte| byte.is_ascii_uppercase()) {
                name.to_mut().make_ascii_lowercase();
            }
        }
    }
}

impl Pairs<'_, Whole> {
    /// Returns named costs in the form of [`Facts`](threshold_core::Facts).
    #[must_use]
    pub fn costs(pairs: Option<&Self>) -> Vec<(&str, u64)> {
        pairs.into_iter().flat_map(Self::iter).map(|(name, cost)| (name, cost.0)).collect()
    }
}

impl Pairs<'_, Text<'_>> {
    /// Returns strings by name in the form of [`Facts`](threshold_core::Facts).
    #[must_use]
    pub fn texts(pairs: Option<&Self>) -> Vec<(&str, &str)> {
        pairs.into_iter().flat_map(Self::iter).map(|(name, text)| (name, text.as_str())).collect()
    }
}

impl<'de: 'a, 'a> Deserialize<'de> for Text<'a> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Read;
        impl<'de> Visitor<'de> for Read {
            type Value = Cow<'de, str>;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a string")
            }

            fn visit_borrowed_str<E>(self, text: &'de str) -> Result<Self::Value, E> {
                Ok(Cow::Borrowed(text))
            }

            fn visit_str<E>(self, text: &str) -> Result<Self::Value, E> {
                Ok(Cow::Owned(text.to_owned()))
            }

            fn visit_string<E>(self, text: String) -> Result<Self::Value, E> {
                Ok(Cow::Owned(text))
            }
        }
        let text = deserializer.deserialize_str(Read)?;
        // Most strings have fewer bytes than the limit has characters, and need not be counted.
        if text.len() > MAX_TEXT && text.chars().count() > MAX_TEXT {
            return Err(D::Error::custom(format!("a text has at most {MAX_TEXT} characters")));
        }
        Ok(Self(text))
    }
}

impl<'de> Deserialize<'de> for Whole {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Read;
        impl Visitor<'_> for Read {
            type Value = u64;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                write!(f, "a whole number from 0 to {MAX_WHOLE}")
            }

            fn visit_u64<E: serde::de::Error>(self, number: u64) -> Result<u64, E> {
                let fits = number <= MAX_WHOLE;
                if fits { Ok(number) } else { Err(E::invalid_value(Unexpected::Unsigned(number), &self)) }
            }
        }
        deserializer.deserialize_u64(Read).map(Self)
    }
}

impl<'de: 'a, 'a, V: Deserialize<'de>> Deserialize<'de> for Pairs<'a, V> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Read<'a, V>(PhantomData<(&'a (), V)>);
        impl<'de: 'a, 'a, V: Deserialize<'de>> Visitor<'de> for Read<'a, V> {
            type Value = Vec<(Text<'a>, V)>;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("an object")
            }

            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Self::Value, A::Error> {
                let mut pairs: Vec<(Text<'a>, V)> = Vec::new();
                while let Some(name) = map.next_key::<Text<'a>>()? {
                    // Before the value is read, and before the scan below, which takes the square of the number of
                    // names.
                    if pairs.len() == MAX_PAIRS {
                        return Err(A::Error::custom(format!("at most {MAX_PAIRS} names")));
                    }
                    // Parsers differ in which of two equal names counts. A caller that relies on another one than
                    // this would be limited by the wrong fact.
                    if pairs.iter().any(|(known, _)| *known == name) {
                        return Err(A::Error::custom(format!("duplicate field `{}`", name.as_str())));
                    }
                    pairs.push((name, map.next_value()?));
                }
                Ok(pairs)
            }
        }
        deserializer.deserialize_map(Read(PhantomData)).map(Self)
    }
}
