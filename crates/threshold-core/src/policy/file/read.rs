//! TOML → the types of the policy file, each value with its span.

use std::borrow::Cow;
use std::fmt;
use std::marker::PhantomData;

use serde::de::value::MapAccessDeserializer;
use serde::de::{Deserialize, Deserializer, MapAccess, SeqAccess, Visitor};
use toml::Spanned;

use super::{AlertEntry, AlertFile, AlgorithmName, Located, NamedEntries, TenantFile, Text, Texts};
use crate::limit::Algorithm;

impl<'de, T: Deserialize<'de>> Deserialize<'de> for Located<T> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let spanned = Spanned::<T>::deserialize(deserializer)?;
        let span = spanned.span();
        Ok(Self { value: spanned.into_inner(), span })
    }
}

impl<'de> Deserialize<'de> for AlgorithmName {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let name = Cow::<'de, str>::deserialize(deserializer)?;
        let unknown = || serde::de::Error::unknown_variant(&name, &Algorithm::NAMES);
        Algorithm::named(&name).map(Self).ok_or_else(unknown)
    }
}

enum StringOrList {
    String(String),
    List(Vec<Text>),
}

impl<'de> Deserialize<'de> for StringOrList {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct StringOrListVisitor;
        impl<'de> Visitor<'de> for StringOrListVisitor {
            type Value = StringOrList;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a string or a list of strings")
            }

            // A string is a list of one, so that `path = "/x"` and `path = ["/x"]` mean the same.
            fn visit_str<E>(self, text: &str) -> Result<StringOrList, E> {
                Ok(StringOrList::String(text.to_owned()))
            }

            fn visit_seq<A: SeqAccess<'de>>(self, mut list: A) -> Result<StringOrList, A::Error> {
                let mut items = Vec::new();
                while let Some(item) = list.next_element()? {
                    items.push(item);
                }
                Ok(StringOrList::List(items))
            }
        }
        deserializer.deserialize_any(StringOrListVisitor)
    }
}

impl<'de> Deserialize<'de> for Texts {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let Located { value, span } = Located::<StringOrList>::deserialize(deserializer)?;
        let items = match value {
            StringOrList::String(value) => vec![Located { value, span: span.clone() }],
            StringOrList::List(items) => items,
        };
        Ok(Self { items, span })
    }
}

impl<'de> Deserialize<'de> for AlertEntry {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct EntryVisitor;
        impl<'de> Visitor<'de> for EntryVisitor {
            type Value = StringOrThresholds;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("\"off\", or a table with per, warning and critical")
            }

            fn visit_str<E>(self, text: &str) -> Result<StringOrThresholds, E> {
                Ok(StringOrThresholds::String(text.to_owned()))
            }

            fn visit_map<A: MapAccess<'de>>(self, map: A) -> Result<StringOrThresholds, A::Error> {
                AlertFile::deserialize(MapAccessDeserializer::new(map)).map(StringOrThresholds::Thresholds)
            }
        }
        enum StringOrThresholds {
            String(String),
            Thresholds(AlertFile),
        }
        impl<'de> Deserialize<'de> for StringOrThresholds {
            fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
                deserializer.deserialize_any(EntryVisitor)
            }
        }
        let Located { value, span } = Located::<StringOrThresholds>::deserialize(deserializer)?;
        Ok(match value {
            StringOrThresholds::String(value) => Self::Off(Located { value, span }),
            StringOrThresholds::Thresholds(file) => Self::Thresholds(file),
        })
    }
}

impl<'de> Deserialize<'de> for TenantFile {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct TenantVisitor;
        impl<'de> Visitor<'de> for TenantVisitor {
            type Value = TenantFile;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a table")
            }

            // By hand, because a flattened map would lose the spans.
            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<TenantFile, A::Error> {
                let mut file = TenantFile::default();
                while let Some(key) = map.next_key::<Text>()? {
                    match key.value.as_str() {
                        "spread" => file.spread = Some(map.next_value()?),
                        _ => file.overrides.0.push((key, map.next_value()?)),
                    }
                }
                Ok(file)
            }
        }
        deserializer.deserialize_map(TenantVisitor)
    }
}

impl<'de, V: Deserialize<'de>> Deserialize<'de> for NamedEntries<V> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct EntriesVisitor<V>(PhantomData<V>);
        impl<'de, V: Deserialize<'de>> Visitor<'de> for EntriesVisitor<V> {
            type Value = NamedEntries<V>;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a table")
            }

            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<NamedEntries<V>, A::Error> {
                let mut entries = Vec::new();
                while let Some(entry) = map.next_entry()? {
                    entries.push(entry);
                }
                Ok(NamedEntries(entries))
            }
        }
        deserializer.deserialize_map(EntriesVisitor(PhantomData))
    }
}
