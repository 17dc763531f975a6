//! The OpenAPI descriptions of the operators' calls.

use serde_json::{Value, json};

use super::audit::AuditBody;
use super::ban_sets::{BanSetBody, NewBanSet};
use super::locks::LockBody;
use super::shadow_bans::ShadowBanBody;
use super::{BanBody, ChangedBody, LiftedBody, NewBan, NewSetting, SettingBody, SubjectBody};
use crate::door::http::ForgiveBody;
use crate::door::openapi::{Operation, Schemas, path_parameter};

const TOO_MANY_WRONG_TOKENS: (u16, &str) = (429, "Too many wrong tokens came from this address");
const NOT_SAVED: (u16, &str) = (503, "The change is not on disk yet (`not_saved`), or was not made (`not_recorded`)");
const READ_ONLY: (u16, &str) = (403, "The token is read-only, or Host or Origin is not a name of this server");
const NOT_FOUND: (u16, &str) = (404, "There is nothing at this path");
/// The errors of a key that is a digest.
const UNKNOWN_DIGEST: (u16, &str) = (
    404,
    "The key is a digest of no caller that was stopped in the last hour (`unknown_digest`), or the path is another one",
);
const AMBIGUOUS_DIGEST: (u16, &str) =
    (409, "The key is a digest of users of several tenants, which the message lists (`ambiguous_digest`)");

pub(super) fn list_bans(schemas: &mut Schemas) -> Operation {
    let bans = json!({"type": "array", "items": schemas.of::<BanBody>()});
    page("bans", "List the bans, ordered by id", &bans).parameter(after())
}

pub(super) fn locks(schemas: &mut Schemas) -> Operation {
    let locks = json!({"type": "array", "items": schemas.of::<LockBody>()});
    page("locks", "List the locked accounts, ordered by id", &locks).parameter(after())
}

pub(super) fn shadow_bans(schemas: &mut Schemas) -> Operation {
    let bans = json!({"type": "array", "items": schemas.of::<ShadowBanBody>()});
    page("shadowBans", "List the shadow bans that this server has brought, those that end last first", &bans)
}

pub(super) fn audit(schemas: &mut Schemas) -> Operation {
    let lines = json!({"type": "array", "items": schemas.of::<AuditBody>()});
    page("audit", "List the operators' changes, the newest first", &lines)
        .parameter(json!({"name": "before", "in": "query", "schema": {"type": "integer", "minimum": 0}}))
        .errors(&[(404, "The server has no journal, and so no audit")])
}

pub(super) fn import_bans(schemas: &mut Schemas) -> Operation {
    let body = schemas.of::<NewBanSet<'_>>();
    change("importBans", "Replace the bans of an origin, all or none", &schemas.of::<BanSetBody>())
        .parameter(path_parameter("origin"))
        .body(body)
        .errors(&[NOT_FOUND, (507, "The list of bans is full")])
}

pub(super) fn lift_subject(schemas: &mut Schemas) -> Operation {
    let query = |name: &str| json!({"name": name, "in": "query", "required": true, "schema": {"type": "string"}});
    change("liftSubject", "End all bans on an address, a block, a tenant or a user", &schemas.of::<LiftedBody>())
        .parameter(query("layer"))
        .parameter(query("key"))
        .parameter(reason())
        .errors(&[(404, "There is no ban on exactly this subject, or its digest is unknown"), AMBIGUOUS_DIGEST])
}

pub(super) fn add_ban(schemas: &mut Schemas) -> Operation {
    let body = schemas.of::<NewBan<'_>>();
    change("ban", "Ban an address, a tenant or a user", &schemas.of::<BanBody>()).body(body).errors(&[
        UNKNOWN_DIGEST,
        AMBIGUOUS_DIGEST,
        (507, "The list of bans is full"),
    ])
}

pub(super) fn lift_ban(schemas: &mut Schemas) -> Operation {
    change("lift", "End a ban", &schemas.of::<ChangedBody>())
        .parameter(path_parameter("id"))
        .parameter(reason())
        .errors(&[
            (404, "The ban is unknown or already ended"),
            (409, "The id is the beginning of several bans' ids, which the message lists (`ambiguous_ban`)"),
        ])
}

pub(super) fn subject(schemas: &mut Schemas) -> Operation {
    operator_call("subject", "Return the state of a subject or an account", &schemas.of::<SubjectBody>())
        .parameter(path_parameter("layer"))
        .parameter(path_parameter("key"))
        .errors(&[UNKNOWN_DIGEST, AMBIGUOUS_DIGEST])
}

pub(super) fn forgive(schemas: &mut Schemas) -> Operation {
    let summary = "Clear what a subject has used, its strikes and penalties, or an account's failures";
    change("forgive", summary, &schemas.of::<ChangedBody>())
        .parameter(path_parameter("layer"))
        .parameter(path_parameter("key"))
        .parameter(reason())
        .errors(&[UNKNOWN_DIGEST, AMBIGUOUS_DIGEST])
}

pub(super) fn forgive_rule(schemas: &mut Schemas) -> Operation {
    let body = schemas.of::<ForgiveBody<'_>>();
    change("forgiveRule", "Clear what a rule counts under one key, with its pause", &schemas.of::<ChangedBody>())
        .body(body)
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
    operator_call(id, summary, &schemas.of::<SettingBody>())
        .parameter(path_parameter("id"))
        .errors(&[UNKNOWN_DIGEST, AMBIGUOUS_DIGEST])
}

fn set(schemas: &mut Schemas, id: &'static str, summary: &'static str) -> Operation {
    let body = schemas.of::<NewSetting<'_>>();
    change(id, summary, &schemas.of::<SettingBody>()).parameter(path_parameter("id")).body(body).errors(&[
        UNKNOWN_DIGEST,
        AMBIGUOUS_DIGEST,
        (507, "The list of settings is full"),
    ])
}

/// A call that a read-only token may make.
pub(in crate::door) fn operator_call(id: &'static str, summary: &'static str, answer: &Value) -> Operation {
    Operation::call(id, summary, answer).errors(&[TOO_MANY_WRONG_TOKENS]).security(json!([{}, {"operator": []}]))
}

/// A call that answers with a list.
fn page(id: &'static str, summary: &'static str, answer: &Value) -> Operation {
    let limit = json!({"name": "limit", "in": "query", "schema": {"type": "integer", "minimum": 1, "maximum": 10_000}});
    operator_call(id, summary, answer).parameter(limit)
}

fn after() -> Value {
    json!({"name": "after", "in": "query", "schema": {"type": "string", "pattern": "^[0-9a-f]{32}$"}})
}

/// A call that changes something.
pub(in crate::door) fn change(id: &'static str, summary: &'static str, answer: &Value) -> Operation {
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
