//! The JSON Schemas of types whose `Deserialize` or `Json` is written by hand.

use std::borrow::Cow;

use schemars::{JsonSchema, Schema, SchemaGenerator, json_schema};
use threshold_core::Verdict;
use threshold_core::limit::Algorithm;
use threshold_core::policy::Layer;

use super::answer::{Limits, ReadingAnswer};
use super::names::{Address, AlgorithmName, EDGE_ALIAS, LAYERS, LayerName, Method, RequestId};
use super::request::{HeaderPairs, MAX_ITEMS, RequestBody, Requests};
use super::text::{MAX_PAIRS, MAX_TEXT, MAX_WHOLE, Pairs, Text, Whole};

const VERDICTS: [Verdict; 5] = [Verdict::Allow, Verdict::Warn, Verdict::Slow, Verdict::Deny, Verdict::Ban];

pub(super) fn layer(_: &mut SchemaGenerator) -> Schema {
    let names = LAYERS.map(Layer::name);
    json_schema!({"type": ["string", "null"], "enum": names.iter().copied().map(Some).chain([None]).collect::<Vec<_>>()})
}

pub(super) fn verdict(_: &mut SchemaGenerator) -> Schema {
    json_schema!({"type": "string", "enum": VERDICTS.map(Verdict::name)})
}

/// Implements `JsonSchema` with a schema that is inlined where the type is used.
macro_rules! inline_schema {
    ($(<$($generic:tt),+>)? $kind:ty, $generator:ident => $schema:expr) => {
        impl$(<$($generic),+>)? JsonSchema for $kind {
            fn inline_schema() -> bool {
                true
            }

            fn schema_name() -> Cow<'static, str> {
                stringify!($kind).into()
            }

            fn json_schema($generator: &mut SchemaGenerator) -> Schema {
                $schema
            }
        }
    };
}

inline_schema!(Text<'_>, _g => json_schema!({"type": "string", "maxLength": MAX_TEXT}));
inline_schema!(Method<'_>, _g => json_schema!({
    "type": "string",
    "maxLength": MAX_TEXT,
    "pattern": "^[!#$%&'*+.^_`|~0-9A-Za-z-]*$",
}));
inline_schema!(RequestId<'_>, _g => json_schema!({"type": "string", "minLength": 1, "maxLength": 128}));
inline_schema!(Whole, _g => json_schema!({"type": "integer", "minimum": 0, "maximum": MAX_WHOLE}));
inline_schema!(Address, _g => json_schema!({"type": "string", "anyOf": [{"format": "ipv4"}, {"format": "ipv6"}]}));
inline_schema!(HeaderPairs<'_>, generator => <Pairs<'_, Text<'_>>>::json_schema(generator));
inline_schema!(LayerName, _g => {
    let names: Vec<&str> = LAYERS.into_iter().map(Layer::name).chain([EDGE_ALIAS]).collect();
    json_schema!({"type": "string", "enum": names})
});
inline_schema!(AlgorithmName, _g => json_schema!({"type": "string", "enum": Algorithm::NAMES}));

impl<V: JsonSchema> JsonSchema for Pairs<'_, V> {
    fn inline_schema() -> bool {
        true
    }

    fn schema_name() -> Cow<'static, str> {
        format!("PairsOf{}", V::schema_name()).into()
    }

    fn json_schema(generator: &mut SchemaGenerator) -> Schema {
        let value = generator.subschema_for::<V>();
        json_schema!({
            "type": "object",
            "maxProperties": MAX_PAIRS,
            "propertyNames": {"maxLength": MAX_TEXT},
            "additionalProperties": value,
        })
    }
}

impl JsonSchema for Requests<'_> {
    fn inline_schema() -> bool {
        true
    }

    fn schema_name() -> Cow<'static, str> {
        "Requests".into()
    }

    fn json_schema(generator: &mut SchemaGenerator) -> Schema {
        let one = generator.subschema_for::<RequestBody<'_>>();
        json_schema!({"anyOf": [one, {"type": "array", "maxItems": MAX_ITEMS, "items": one}]})
    }
}

impl JsonSchema for Limits<'_> {
    fn inline_schema() -> bool {
        true
    }

    fn schema_name() -> Cow<'static, str> {
        "Readings".into()
    }

    fn json_schema(generator: &mut SchemaGenerator) -> Schema {
        <Vec<ReadingAnswer<'_>>>::json_schema(generator)
    }
}
