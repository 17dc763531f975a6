//! The OpenAPI descriptions of the calls that decide requests.

use serde_json::{Value, json};
use threshold_wire::{Answer, ErrorBody, LimitAnswer, LimitBody, MAX_WAIT_MS, RequestBody, Requests};

use super::DoneBody;
use super::request::{CommitBody, PauseBody, RefundBody, ReleaseBody};
use crate::door::openapi::{Operation, Schemas, WRONG_HOST, json_content};

const REUSED_ID: (u16, &str) = (422, "The requestId was used for a different request within the last 60 seconds");

/// Whether the call had an effect is not known after a timeout.
const NO_STORE: (u16, &str) = (503, "The store cannot answer");

pub(super) fn check(schemas: &mut Schemas) -> Operation {
    let wait = json!({
        "name": "waitMs",
        "in": "query",
        "description": "How long one request may wait until it fits, in milliseconds",
        "schema": {"type": "integer", "minimum": 0, "maximum": MAX_WAIT_MS},
    });
    requests(schemas, "check", "Decide and charge").errors(&[REUSED_ID]).parameter(wait)
}

pub(super) fn peek(schemas: &mut Schemas) -> Operation {
    requests(schemas, "peek", "Return what check would answer, without charging")
}

pub(super) fn record(schemas: &mut Schemas) -> Operation {
    requests(schemas, "record", "Charge after the fact; never denies").errors(&[REUSED_ID])
}

pub(super) fn explain(schemas: &mut Schemas) -> Operation {
    let decision = schemas.of::<Answer<'_>>();
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
    let request = schemas.of::<RequestBody<'_>>();
    let operation = Operation::call("explain", "Return which rules a request meets, and why", &explained).body(request);
    may_be_unavailable(operation, &explained, schemas)
}

pub(super) fn reserve(schemas: &mut Schemas) -> Operation {
    let decision = schemas.of::<Answer<'_>>();
    let request = json!({"$ref": "#/components/schemas/Reserve"});
    let summary = "Charge before the actual cost is known; without `reservation` there is nothing to commit";
    let operation = Operation::call("reserve", summary, &decision).body(request);
    may_be_unavailable(operation, &decision, schemas).errors(&[REUSED_ID])
}

pub(super) fn commit(schemas: &mut Schemas) -> Operation {
    let body = schemas.of::<CommitBody<'_>>();
    let errors =
        [(404, "The reservation is unknown or already ended"), (409, "It was committed with another cost"), NO_STORE];
    done(schemas, "commit", "End a reservation with its actual cost").body(body).errors(&errors)
}

pub(super) fn release(schemas: &mut Schemas) -> Operation {
    let body = schemas.of::<ReleaseBody<'_>>();
    let unknown = (404, "The reservation is unknown or already ended");
    done(schemas, "release", "End a reservation without cost").body(body).errors(&[unknown, NO_STORE])
}

pub(super) fn refund(schemas: &mut Schemas) -> Operation {
    let (body, answer) = (schemas.of::<RefundBody<'_>>(), schemas.of::<DoneBody>());
    let operation = done(schemas, "refund", "Give back what a receipt was charged").body(body);
    may_be_unavailable(operation, &answer, schemas)
}

pub(super) fn pause(schemas: &mut Schemas) -> Operation {
    let body = schemas.of::<PauseBody<'_>>();
    done(schemas, "pause", "Deny a subject for a while").body(body).errors(&[NO_STORE])
}

pub(super) fn limit(schemas: &mut Schemas) -> Operation {
    one_limit(schemas, "limit", "Check one limit by a key of your own")
}

pub(super) fn limit_alias(schemas: &mut Schemas) -> Operation {
    one_limit(schemas, "limitAlias", "The same as /v1/limit")
}

pub(super) fn openapi(_: &mut Schemas) -> Operation {
    let document = json!({"type": "object", "required": ["openapi", "paths"]});
    Operation::new("openapi", "This document")
        .response(200, "An OpenAPI 3.1 document", &json_content(&document))
        .errors(&[(401, "The token is missing or wrong"), WRONG_HOST, (429, "Too many wrong tokens")])
}

/// A call that takes one request or a list, and answers with one decision or a list.
fn requests(schemas: &mut Schemas, id: &'static str, summary: &'static str) -> Operation {
    let body = schemas.of::<Requests<'_>>();
    let decision = schemas.of::<Answer<'_>>();
    let decisions = json!({"anyOf": [decision, {"type": "array", "items": decision}]});
    may_be_unavailable(Operation::call(id, summary, &decisions).body(body), &decisions, schemas)
}

fn done(schemas: &mut Schemas, id: &'static str, summary: &'static str) -> Operation {
    Operation::call(id, summary, &schemas.of::<DoneBody>())
}

fn one_limit(schemas: &mut Schemas, id: &'static str, summary: &'static str) -> Operation {
    let body = schemas.of::<LimitBody<'_>>();
    Operation::call(id, summary, &schemas.of::<LimitAnswer>()).body(body).errors(&[NO_STORE])
}

/// Adds 503: a decision where the store fails and the rules are closed, else an error.
fn may_be_unavailable(operation: Operation, answer: &Value, schemas: &mut Schemas) -> Operation {
    let either = json!({"anyOf": [answer, schemas.of::<ErrorBody>()]});
    operation.response(503, "The store cannot answer, or is full", &json_content(&either))
}

/// The part of an explanation that is about the path.
fn explained_path() -> Value {
    json!({
        "type": "object",
        "description": "How servers may read the path, and whether doors that face clients refuse it.",
        "required": ["readings", "refusedAtClientDoors"],
        "properties": {
            "readings": {
                "type": "array",
                "items": {"type": "string"},
                "description": "Every reading, the normalised one first; the rules of all of them apply.",
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
