//! The OpenAPI descriptions of the operators' calls.

use serde_json::{Value, json};

use super::{BanBody, ChangedBody, NewBan, NewSetting, SettingBody, SubjectBody};
use crate::door::openapi::{Operation, Schemas, path_parameter};

const TOO_MANY_WRONG_TOKENS: (u16, &str) = (429, "Too many wrong tokens came from this address");
const NOT_SAVED: (u16, &str) = (503, "The change is not on disk yet (`not_saved`), or was not made (`not_recorded`)");
const READ_ONLY: (u16, &str) = (403, "The token is read-only, or Host or Origin is not a name of this server");
const NOT_FOUND: (u16, &str) = (404, "There is nothing at this path");

pub(super) fn list_bans(schemas: &mut Schemas) -> Operation {
    let bans = json!({"type": "array", "items": schemas.of::<BanBody>()});
    operator_call("bans", "List the bans, ordered by id", &bans)
        .parameter(
            json!({"name": "limit", "in": "query", "schema": {"type": "integer", "minimum": 1, "maximum": 10_000}}),
        )
        .parameter(json!({"name": "after", "in": "query", "schema": {"type": "string", "pattern": "^[0-9a-f]{32}$"}}))
        .errors(&[(503, "Too many large answers wait to be read")])
}

pub(super) fn add_ban(schemas: &mut Schemas) -> Operation {
    let body = schemas.of::<NewBan<'_>>();
    change("ban", "Ban an address, a tenant or a user", &schemas.of::<BanBody>())
        .body(body)
        .errors(&[(507, "The list of bans is full")])
}

pub(super) fn lift_ban(schemas: &mut Schemas) -> Operation {
    change("lift", "End a ban", &schemas.of::<ChangedBody>())
        .parameter(path_parameter("id"))
        .parameter(reason())
        .errors(&[(404, "The ban is unknown or already ended")])
}

pub(super) fn subject(schemas: &mut Schemas) -> Operation {
    operator_call("subject", "Return the state of a subject or an account", &schemas.of::<SubjectBody>())
        .parameter(path_parameter("layer"))
        .parameter(path_parameter("key"))
        .errors(&[NOT_FOUND])
}

pub(super) fn forgive(schemas: &mut Schemas) -> Operation {
    let summary = "Clear what a subject has used, its strikes and penalties, or an account's failures";
    change("forgive", summary, &schemas.of::<ChangedBody>())
        .parameter(path_parameter("layer"))
        .parameter(path_parameter("key"))
        .parameter(reason())
        .errors(&[NOT_FOUND])
}

pub(super) fn tenant(schemas: &mut Schemas) -> Operation {
    setting(schemas, "tenant", "Return the setting of a tenant")
}

pub(super) fn user(schemas: &mut Schemas) -> Operation {
    setting(schemas, "user", "Return the setting of a user")
}

pub(super) fn set_tenant(schemas: &mut Schemas) -> Operation {
    set(schemas, "giveTenant", "Give a tenant a tier, limits of its own or a multiple of its limits, until a time")
}

pub(super) fn set_user(schemas: &mut Schemas) -> Operation {
    set(schemas, "giveUser", "Give a user a tier, limits of its own or a multiple of its limits, until a time")
}

fn setting(schemas: &mut Schemas, id: &'static str, summary: &'static str) -> Operation {
    operator_call(id, summary, &schemas.of::<SettingBody>()).parameter(path_parameter("id")).errors(&[NOT_FOUND])
}

fn set(schemas: &mut Schemas, id: &'static str, summary: &'static str) -> Operation {
    let body = schemas.of::<NewSetting<'_>>();
    change(id, summary, &schemas.of::<SettingBody>())
        .parameter(path_parameter("id"))
        .body(body)
        .errors(&[NOT_FOUND, (507, "The list of settings is full")])
}

/// A call that a read-only token may make.
fn operator_call(id: &'static str, summary: &'static str, answer: &Value) -> Operation {
    Operation::call(id, summary, answer).errors(&[TOO_MANY_WRONG_TOKENS]).security(json!([{}, {"operator": []}]))
}

/// A call that changes something.
fn change(id: &'static str, summary: &'static str, answer: &Value) -> Operation {
    operator_call(id, summary, answer).errors(&[NOT_SAVED, READ_ONLY])
}

fn reason() -> Value {
    json!({
        "name": "reason",
        "in": "query",
        "description": "The reason, for the audit",
        "schema": {"type": "string", "minLength": 1, "maxLength": 1_000},
    })
}
