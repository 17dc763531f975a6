//! The JSON Schema of the policy file. It describes values; their spans are no part of it.

use std::borrow::Cow;

use schemars::{JsonSchema, Schema, SchemaGenerator, json_schema};

use super::{AlertEntry, AlertFile, AlgorithmName, Located, NamedEntries, PolicyFile, TenantFile, Texts};
use crate::limit::Algorithm;
use crate::policy::tiers::MAX_SPREAD;

impl<T: JsonSchema> JsonSchema for Located<T> {
    fn schema_name() -> Cow<'static, str> {
        T::schema_name()
    }

    fn inline_schema() -> bool {
        T::inline_schema()
    }

    fn json_schema(generator: &mut SchemaGenerator) -> Schema {
        T::json_schema(generator)
    }
}

impl JsonSchema for AlgorithmName {
    fn schema_name() -> Cow<'static, str> {
        "AlgorithmName".into()
    }

    fn json_schema(_: &mut SchemaGenerator) -> Schema {
        json_schema!({"description": "The algorithms that count requests.", "type": "string", "enum": Algorithm::NAMES})
    }
}

impl JsonSchema for Texts {
    fn schema_name() -> Cow<'static, str> {
        "Texts".into()
    }

    fn inline_schema() -> bool {
        true
    }

    fn json_schema(_: &mut SchemaGenerator) -> Schema {
        json_schema!({"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "string"}}]})
    }
}

impl<V: JsonSchema> JsonSchema for NamedEntries<V> {
    fn schema_name() -> Cow<'static, str> {
        format!("TableOf{}", V::schema_name()).into()
    }

    fn inline_schema() -> bool {
        true
    }

    fn json_schema(generator: &mut SchemaGenerator) -> Schema {
        let value = generator.subschema_for::<V>();
        json_schema!({"type": "object", "additionalProperties": value})
    }
}

impl JsonSchema for AlertEntry {
    fn schema_name() -> Cow<'static, str> {
        "AlertEntry".into()
    }

    fn inline_schema() -> bool {
        true
    }

    fn json_schema(generator: &mut SchemaGenerator) -> Schema {
        let thresholds = generator.subschema_for::<AlertFile>();
        json_schema!({"anyOf": [{"const": "off"}, thresholds]})
    }
}

impl JsonSchema for TenantFile {
    fn schema_name() -> Cow<'static, str> {
        "TenantFile".into()
    }

    fn inline_schema() -> bool {
        true
    }

    fn json_schema(_: &mut SchemaGenerator) -> Schema {
        let description = "Over how many partitions of a shared store the records of the tenant's users are spread. Default: all \
                           records of a tenant are in one.";
        json_schema!({
            "type": "object",
            "properties": {
                "spread": {"description": description, "type": "integer", "minimum": 1, "maximum": MAX_SPREAD},
            },
            "additionalProperties": {"type": "string"},
        })
    }
}

/// Generates the schema for editors.
pub(crate) fn policy_schema() -> Schema {
    schemars::schema_for!(PolicyFile)
}
