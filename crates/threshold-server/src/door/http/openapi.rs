//! `/openapi.json`: the API described from the types that read and write it.

mod operators;

use std::sync::OnceLock;

use bytes::Bytes;
use schemars::generate::SchemaSettings;
use schemars::{JsonSchema, SchemaGenerator};
use serde_json::{Map, Value, json};

use super::answer::Answer;
use super::limit::LimitAnswer;
use super::request::{CommitBody, LimitBody, OneOrMany, PauseBody, RefundBody, ReleaseBody, RequestBody};
use super::{DoneBody, MAX_WAIT};
use crate::door::error::ErrorBody;
use crate::door::health::HealthBody;

/// The document, made once.
pub(super) fn document() -> Bytes {
    static DOCUMENT: OnceLock<Bytes> = OnceLock::new();
    DOCUMENT.get_or_init(|| Bytes::from(build().to_string())).clone()
}

fn build() -> Value {
    // OpenAPI 3.1 speaks JSON Schema itself, so nothing has to be turned into an older form.
    let settings = SchemaSettings::draft2020_12().with(|settings| {
        settings.definitions_path = "/components/schemas".into();
    });
    let mut generator = settings.into_generator();
    let paths = paths(&mut generator);
    let mut schemas = generator.take_definitions(true);
    only_reserve(&mut schemas);
    json!({
        "openapi": "3.1.0",
        "info": {
            "title": "Threshold",
            "description": "Decides, for every request, whether its caller may cross.",
            "version": env!("CARGO_PKG_VERSION"),
            "license": {"name": "MIT OR Apache-2.0", "identifier": "MIT OR Apache-2.0"},
        },
        "paths": paths,
        "components": {
            "schemas": schemas,
            "securitySchemes": {
                "token": {"type": "http", "scheme": "bearer"},
                "operator": {"type": "http", "scheme": "bearer"},
            },
        },
        "security": [{}, {"token": []}],
    })
}

fn paths(generator: &mut SchemaGenerator) -> Value {
    let request = generator.subschema_for::<RequestBody<'_>>().to_value();
    let asked = generator.subschema_for::<OneOrMany<'_>>().to_value();
    let decision = generator.subschema_for::<Answer<'_>>().to_value();
    let decisions = json!({"anyOf": [decision, {"type": "array", "items": decision}]});
    let done = generator.subschema_for::<DoneBody>().to_value();
    let limit = generator.subschema_for::<LimitBody<'_>>().to_value();
    let limited = generator.subschema_for::<LimitAnswer>().to_value();
    let explained = json!({
        "type": "object",
        "required": ["decision", "facts", "path", "rules", "penalties"],
        "properties": {
            "decision": decision,
            "facts": {"type": "object"},
            "path": explained_path(),
            "rules": {"type": "array", "items": {"type": "object"}},
            "penalties": {"type": "array", "items": {"type": "object"}},
        },
    });
    let reserve = json!({"$ref": "#/components/schemas/Reserve"});
    let mut calls = Calls { generator: &mut *generator };
    let mut paths = Map::new();
    let mut add = |path: &str, item: Value| paths.insert(path.to_owned(), item);
    let mut check = calls.post("check", "Decide and charge", &asked, &decisions, &[422, 503]);
    if let Some(operation) = check.get_mut("post").and_then(Value::as_object_mut) {
        operation.insert("parameters".to_owned(), json!([wait_parameter()]));
    }
    add("/v1/check", check);
    add("/v1/peek", calls.post("peek", "Say what check would answer", &asked, &decisions, &[503]));
    add("/v1/record", calls.post("record", "Charge after the fact; never denies", &asked, &decisions, &[422, 503]));
    add("/v1/explain", calls.post("explain", "Say which rules a request meets, and why", &request, &explained, &[503]));
    add("/v1/reserve", calls.post("reserve", "Charge before the true cost is known", &reserve, &decision, &[422, 503]));
    add(
        "/v1/commit",
        calls.post_of::<CommitBody<'_>>("commit", "End a reservation with its true cost", &done, &[404, 409]),
    );
    add("/v1/release", calls.post_of::<ReleaseBody<'_>>("release", "End a reservation without cost", &done, &[404]));
    add("/v1/refund", calls.post_of::<RefundBody<'_>>("refund", "Give back what a receipt was charged", &done, &[503]));
    add("/v1/pause", calls.post_of::<PauseBody<'_>>("pause", "Deny a subject for a while", &done, &[]));
    add("/v1/limit", calls.post("limit", "One limit by a key of your own", &limit, &limited, &[]));
    add("/check", calls.post("limitAlias", "The same as /v1/limit", &limit, &limited, &[]));
    add("/healthz", calls.health("healthz", "Whether the server lives"));
    add("/readyz", calls.health("readyz", "Whether it does all that it should"));
    add("/metrics", calls.metrics());
    operators::add(&mut paths, generator);
    Value::Object(paths)
}

/// Writes the operations.
struct Calls<'g> {
    generator: &'g mut SchemaGenerator,
}

impl Calls<'_> {
    fn post_of<T: JsonSchema>(&mut self, id: &str, summary: &str, answer: &Value, errors: &[u16]) -> Value {
        let body = self.generator.subschema_for::<T>().to_value();
        self.post(id, summary, &body, answer, errors)
    }

    fn post(&mut self, id: &str, summary: &str, body: &Value, answer: &Value, errors: &[u16]) -> Value {
        let error = self.generator.subschema_for::<ErrorBody>().to_value();
        let mut responses = Map::new();
        responses.insert("200".to_owned(), json!({"description": "The answer", "content": content(answer)}));
        let common = [
            (400, "What is wrong, and in which field"),
            (401, "A token is missing or wrong"),
            (403, "Host or Origin is no name of this server"),
            (408, "The body came too slowly"),
            (413, "The body is too large"),
            (415, "The body is compressed, or a page did not say that it sends JSON"),
            (429, "Too many wrong tokens came at once"),
        ];
        for (status, description) in common {
            responses.insert(status.to_string(), json!({"description": description, "content": content(&error)}));
        }
        if errors.contains(&404) {
            let unknown = json!({"description": "There is no such reservation", "content": content(&error)});
            responses.insert("404".to_owned(), unknown);
        }
        if errors.contains(&409) {
            let other = json!({"description": "It was committed with another cost", "content": content(&error)});
            responses.insert("409".to_owned(), other);
        }
        if errors.contains(&422) {
            let reused = "The requestId was used for a different request within the last 60 seconds";
            responses.insert("422".to_owned(), json!({"description": reused, "content": content(&error)}));
        }
        if errors.contains(&503) {
            let either = json!({"anyOf": [answer, error]});
            let closed = json!({"description": "The store cannot answer, or has no room", "content": content(&either)});
            responses.insert("503".to_owned(), closed);
        }
        json!({"post": {
            "operationId": id,
            "summary": summary,
            "requestBody": {"required": true, "content": content(body)},
            "responses": responses,
        }})
    }

    fn metrics(&mut self) -> Value {
        let error = self.generator.subschema_for::<ErrorBody>().to_value();
        json!({"get": {
            "operationId": "metrics",
            "summary": "What Prometheus scrapes",
            "responses": {
                "200": {
                    "description": "OpenMetrics text",
                    "content": {"application/openmetrics-text": {"schema": {"type": "string"}}},
                },
                "401": {"description": "The server has tokens, and none was shown", "content": content(&error)},
                "403": {"description": "Host or Origin is no name of this server", "content": content(&error)},
            },
        }})
    }

    fn health(&mut self, id: &str, summary: &str) -> Value {
        let health = self.generator.subschema_for::<HealthBody>().to_value();
        let error = self.generator.subschema_for::<ErrorBody>().to_value();
        json!({"get": {
            "operationId": id,
            "summary": summary,
            "security": [],
            "responses": {
                "200": {"description": "It does, perhaps with less than it should", "content": content(&health)},
                "403": {"description": "Host or Origin is no name of this server", "content": content(&error)},
                "503": {"description": "It is about to stop", "content": content(&health)},
            },
        }})
    }
}

/// What `explain` says of a path.
fn explained_path() -> Value {
    json!({
        "type": "object",
        "description": "How servers may read the path, and whether doors that face clients refuse it.",
        "required": ["readings", "refusedAtClientDoors"],
        "properties": {
            "readings": {
                "type": "array",
                "items": {"type": "string"},
                "description": "Every reading, the one spelling first; the rules of all of them apply.",
            },
            "refusedAtClientDoors": {
                "type": ["object", "null"],
                "description": "How the tower layer and forward auth refuse the path; null where they decide it.",
                "required": ["status", "message"],
                "properties": {"status": {"type": "integer"}, "message": {"type": "string"}},
            },
        },
    })
}

fn wait_parameter() -> Value {
    json!({
        "name": "waitMs",
        "in": "query",
        "description": "How long one request may wait for room",
        "schema": {"type": "integer", "minimum": 0, "maximum": MAX_WAIT},
    })
}

fn content(schema: &Value) -> Value {
    json!({"application/json": {"schema": schema}})
}

/// `ttlSec` and `onExpire` belong to a reservation alone: every other request is the same without them.
fn only_reserve(schemas: &mut Map<String, Value>) {
    let Some(request) = schemas.get_mut("Request") else { return };
    let reserve = request.clone();
    if let Some(fields) = request.get_mut("properties").and_then(Value::as_object_mut) {
        fields.remove("ttlSec");
        fields.remove("onExpire");
    }
    schemas.insert("Reserve".to_owned(), reserve);
}
