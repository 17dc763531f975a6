//! The part of the description that is about logins and operators.

use schemars::{JsonSchema, SchemaGenerator};
use serde_json::{Map, Value, json};

use super::content;
use crate::door::admin::{BanBody, ChangedBody, NewBan, NewSetting, SettingBody, SubjectBody};
use crate::door::error::ErrorBody;
use crate::door::login::{AttemptBody, LoginBody, ResultBody};

const GUESSED: (u16, &str) = (429, "Too many wrong tokens came from this address");
const UNSAVED: (u16, &str) = (503, "The change is not on disk yet (`not_saved`), or was not made (`not_recorded`)");
const LOOKS_ONLY: (u16, &str) = (403, "The token is for looking only, or Host or Origin is no name of this server");

/// One operation.
struct Call<'a> {
    method: &'static str,
    id: &'static str,
    summary: &'static str,
    parameters: Value,
    body: Option<Value>,
    answer: &'a Value,
    errors: &'a [(u16, &'static str)],
    operators: bool,
}

/// Adds the paths.
pub(super) fn add(paths: &mut Map<String, Value>, generator: &mut SchemaGenerator) {
    let mut of = Of(generator);
    logins(paths, &mut of);
    bans(paths, &mut of);
    subjects(paths, &mut of);
    settings(paths, &mut of);
}

fn logins(paths: &mut Map<String, Value>, of: &mut Of<'_>) {
    let (attempt, result, login) = (of.of::<AttemptBody<'_>>(), of.of::<ResultBody<'_>>(), of.of::<LoginBody>());
    let mut item = of.call(&Call {
        method: "post",
        id: "loginAttempt",
        summary: "Before a secret is checked: whether it may be",
        parameters: json!([]),
        body: Some(attempt),
        answer: &login,
        errors: &[(503, "The store is full, and a login is closed then")],
        operators: false,
    });
    let refused = json!({"description": "Do not check it", "content": content(&login)});
    if let Some(responses) = item.pointer_mut("/post/responses").and_then(Value::as_object_mut) {
        responses.insert("429".to_owned(), refused);
    }
    paths.insert("/v1/login/attempt".to_owned(), item);
    let item = of.call(&Call {
        method: "post",
        id: "loginResult",
        summary: "After a secret was checked: how it went",
        parameters: json!([]),
        body: Some(result),
        answer: &login,
        errors: &[(404, "The attempt has ended, or its minute was up"), UNSAVED],
        operators: false,
    });
    paths.insert("/v1/login/result".to_owned(), item);
}

fn bans(paths: &mut Map<String, Value>, of: &mut Of<'_>) {
    let (ban, new, changed) = (of.of::<BanBody>(), of.of::<NewBan<'_>>(), of.of::<ChangedBody>());
    let all = json!({"type": "array", "items": ban});
    let page = json!([
        {"name": "limit", "in": "query", "schema": {"type": "integer", "minimum": 1, "maximum": 10_000}},
        {"name": "after", "in": "query", "schema": {"type": "string", "pattern": "^[0-9a-f]{32}$"}},
    ]);
    let mut item = of.call(&Call {
        method: "get",
        id: "bans",
        summary: "Everyone who is banned, by number",
        parameters: page,
        body: None,
        answer: &all,
        errors: &[GUESSED, (503, "Too many large answers wait to be read")],
        operators: true,
    });
    let post = of.call(&Call {
        method: "post",
        id: "ban",
        summary: "Ban an address, a tenant or a user",
        parameters: json!([]),
        body: Some(new),
        answer: &ban,
        errors: &[GUESSED, UNSAVED, LOOKS_ONLY, (507, "There are as many bans as there can be")],
        operators: true,
    });
    join(&mut item, post);
    paths.insert("/v1/bans".to_owned(), item);
    let item = of.call(&Call {
        method: "delete",
        id: "lift",
        summary: "End a ban",
        parameters: json!([path("id"), reason()]),
        body: None,
        answer: &changed,
        errors: &[(404, "There is no such ban"), GUESSED, UNSAVED, LOOKS_ONLY],
        operators: true,
    });
    paths.insert("/v1/bans/{id}".to_owned(), item);
}

fn subjects(paths: &mut Map<String, Value>, of: &mut Of<'_>) {
    let (subject, changed) = (of.of::<SubjectBody>(), of.of::<ChangedBody>());
    let mut item = of.call(&Call {
        method: "get",
        id: "subject",
        summary: "How it stands with a subject, or with an account",
        parameters: json!([path("layer"), path("key")]),
        body: None,
        answer: &subject,
        errors: &[(404, "There is nothing at this path"), GUESSED],
        operators: true,
    });
    let forgive = of.call(&Call {
        method: "delete",
        id: "forgive",
        summary: "Forget what a subject has used, its strikes and penalties, or an account's failures",
        parameters: json!([path("layer"), path("key"), reason()]),
        body: None,
        answer: &changed,
        errors: &[(404, "There is nothing at this path"), GUESSED, UNSAVED, LOOKS_ONLY],
        operators: true,
    });
    join(&mut item, forgive);
    paths.insert("/v1/subjects/{layer}/{key}".to_owned(), item);
}

fn settings(paths: &mut Map<String, Value>, of: &mut Of<'_>) {
    let (setting, new) = (of.of::<SettingBody>(), of.of::<NewSetting<'_>>());
    let of_tenants = ["/v1/tenants/{id}", "tenant", "giveTenant"];
    for [place, show, give] in [of_tenants, ["/v1/users/{id}", "user", "giveUser"]] {
        let mut item = of.call(&Call {
            method: "get",
            id: show,
            summary: "What somebody was given on top of the policy",
            parameters: json!([path("id")]),
            body: None,
            answer: &setting,
            errors: &[(404, "There is nothing at this path"), GUESSED],
            operators: true,
        });
        let put = of.call(&Call {
            method: "put",
            id: give,
            summary: "Give somebody a tier, limits of their own, or so many times as much, until a moment",
            parameters: json!([path("id")]),
            body: Some(new.clone()),
            answer: &setting,
            errors: &[
                (404, "There is nothing at this path"),
                GUESSED,
                UNSAVED,
                LOOKS_ONLY,
                (507, "There are as many settings as there can be"),
            ],
            operators: true,
        });
        join(&mut item, put);
        paths.insert(place.to_owned(), item);
    }
}

struct Of<'g>(&'g mut SchemaGenerator);

impl Of<'_> {
    fn of<T: JsonSchema>(&mut self) -> Value {
        self.0.subschema_for::<T>().to_value()
    }

    fn call(&mut self, call: &Call<'_>) -> Value {
        let error = self.of::<ErrorBody>();
        let mut responses = Map::new();
        responses.insert("200".to_owned(), json!({"description": "The answer", "content": content(call.answer)}));
        let common = [
            (400, "What is wrong, and in which field"),
            (401, "A token is missing or wrong"),
            (403, "Host or Origin is no name of this server"),
            (408, "The body came too slowly"),
            (413, "The body is too large"),
            (415, "A page did not say that it sends JSON"),
        ];
        for (status, description) in common.into_iter().chain(call.errors.iter().copied()) {
            responses.insert(status.to_string(), json!({"description": description, "content": content(&error)}));
        }
        let mut operation = json!({
            "operationId": call.id,
            "summary": call.summary,
            "parameters": call.parameters,
            "responses": responses,
        });
        if let Some(operation) = operation.as_object_mut() {
            if let Some(body) = &call.body {
                operation.insert("requestBody".to_owned(), json!({"required": true, "content": content(body)}));
            }
            if call.operators {
                operation.insert("security".to_owned(), json!([{}, {"operator": []}]));
            }
        }
        json!({ call.method: operation })
    }
}

fn join(item: &mut Value, other: Value) {
    if let (Some(item), Value::Object(other)) = (item.as_object_mut(), other) {
        item.extend(other);
    }
}

fn path(name: &str) -> Value {
    json!({"name": name, "in": "path", "required": true, "schema": {"type": "string", "minLength": 1}})
}

fn reason() -> Value {
    json!({
        "name": "reason",
        "in": "query",
        "description": "Why, for the audit",
        "schema": {"type": "string", "minLength": 1, "maxLength": 1_000},
    })
}
