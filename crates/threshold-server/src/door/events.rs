//! `/v1/events`: what is recorded of decisions, as pages or as a stream; reports of other systems; the erasure of a subject.

mod describe;
mod report;
mod stream;

use std::sync::Arc;

use axum::extract::{Request, State};
use axum::response::Response;
use http::{HeaderMap, StatusCode};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use threshold_core::decision::Cause;
use threshold_core::key::{is_redacted, read_name, write_name};
use threshold_core::lockout::canonical_account;
use threshold_core::policy::{Layer, Policy, UserScope};
use threshold_core::{Event, Timestamp};
use threshold_wire::{layer_named, unknown_layer};

use super::admin::{Operator, Reader};
use super::client_memory::AnswerPage;
use super::http::trace_id;
use super::json_body::{Caller, JsonBody};
use super::query::Query;
use super::routes::{Route, delete, get, post};
use super::{ApiError, App, json, sse};
use crate::signals::database::{DatabaseError, EventQuery, Field, Filter, PAGE_BYTES, Page};
pub(super) use report::EventReports;
pub(super) use stream::streams;

const PATH: &str = "/v1/events";
/// The number of events in one answer by default.
const DEFAULT_PAGE: usize = 100;
/// The most events in one answer.
const MAX_PAGE: usize = 1_000;
const VERDICTS: [&str; 5] = ["allow", "warn", "slow", "deny", "ban"];

/// The query of a call that lists events.
#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "camelCase")]
struct ListQuery {
    after: Option<String>,
    before: Option<String>,
    limit: Option<String>,
    since: Option<String>,
    layer: Option<String>,
    blocked: Option<String>,
    tenant: Option<String>,
    user_id: Option<String>,
    endpoint: Option<String>,
    ip: Option<String>,
    rule: Option<String>,
    verdict: Option<String>,
    cause: Option<String>,
    subject: Option<String>,
    trace_id: Option<String>,
}

/// The query of a call that erases events.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "camelCase")]
struct EraseQuery {
    tenant: Option<String>,
    user_id: Option<String>,
    ip: Option<String>,
    reason: Option<String>,
}

/// The result of an erasure.
#[derive(Debug, Serialize, JsonSchema)]
#[schemars(rename = "Erased")]
struct ErasedBody {
    ok: bool,
    /// The number of events that were erased.
    erased: u64,
}

/// The result of a report.
#[derive(Debug, Serialize, JsonSchema)]
#[schemars(rename = "Reported")]
struct ReportedBody {
    /// The number of events that are counted.
    accepted: usize,
    /// The number of those that are known already, and of lines that stopped nobody.
    ignored: usize,
    /// The number of lines that cannot be read, and are not counted.
    #[serde(skip_serializing_if = "is_zero")]
    #[schemars(default)]
    refused: usize,
    /// What is wrong with the first ten of them.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    #[schemars(default)]
    faults: Vec<String>,
}

#[expect(clippy::trivially_copy_pass_by_ref, reason = "serde passes a reference")]
const fn is_zero(number: &usize) -> bool {
    *number == 0
}

/// The routes of operators.
pub(super) fn routes() -> Vec<Route> {
    vec![get(PATH, list, describe::list), delete(PATH, erase, describe::erase)]
}

/// The routes of callers.
pub(super) fn caller_routes() -> Vec<Route> {
    vec![post(PATH, report, describe::report)]
}

async fn list(
    reader: Reader,
    State(app): State<Arc<App>>,
    headers: HeaderMap,
    Query(query): Query<ListQuery>,
) -> Result<Response, ApiError> {
    let has_limit = query.limit.is_some();
    let has_before = query.before.is_some();
    let query = query.read(&app.desk.policy())?;
    if sse::is_wanted(&headers) {
        if has_limit {
            return Err(ApiError::bad("limit", "a stream has no limit"));
        }
        if has_before {
            return Err(ApiError::bad("before", "a stream has no end"));
        }
        return stream::open(app, &reader, &headers, query).await;
    }
    // Twice, as they are copied into the answer.
    let memory = reader.memory_for(&app, 2 * PAGE_BYTES).await?;
    let page = page(&app, query, Collect::First).await?;
    memory.page(&app, written(page)?)
}

fn written(Page { events, next, previous }: Page) -> Result<AnswerPage, ApiError> {
    let length = events.iter().fold(128, |sum: usize, (_, event)| sum.saturating_add(event.len()).saturating_add(1));
    let mut body = AnswerPage::new(length)?;
    body.push(r#"{"events":["#)?;
    for (index, (_, event)) in events.into_iter().enumerate() {
        if index > 0 {
            body.push(",")?;
        }
        body.push(&event)?;
    }
    let previous = previous.map_or_else(|| "null".to_owned(), |number| number.to_string());
    body.push(&format!(r#"],"next":{next},"previous":{previous}}}"#))?;
    Ok(body)
}

/// Whether events that wait in the queue are recorded first.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Collect {
    First,
    Later,
}

/// Reads a page, on a thread that may block.
async fn page(app: &Arc<App>, query: EventQuery, collect: Collect) -> Result<Page, ApiError> {
    let app = Arc::clone(app);
    let read = tokio::task::spawn_blocking(move || {
        if collect == Collect::First {
            app.signals.collect(&app.desk.policy(), app.desk.now());
        }
        app.signals.database.page(&query)
    });
    read.await.map_err(|_| unavailable())?.map_err(ApiError::from)
}

async fn erase(
    operator: Operator,
    State(app): State<Arc<App>>,
    Query(EraseQuery { tenant, user_id, ip, reason }): Query<EraseQuery>,
) -> Result<Response, ApiError> {
    let policy = app.desk.policy();
    let (user_id, tenant) = scoped(user_id, tenant, &policy);
    let given = [(Layer::User, "userId", user_id), (Layer::Edge, "ip", ip), (Layer::Tenant, "tenant", tenant)];
    let (mut filters, mut subjects) = (Vec::new(), Vec::new());
    for (layer, name, value) in given {
        let Some(value) = value else { continue };
        let filter = named(layer, name, &value, &policy)?;
        // By its digest: the audit must not keep the name that is erased.
        subjects.extend(filter.values.iter().find(|value| is_redacted(value)).map(|digest| (layer, digest.clone())));
        filters.push(filter);
    }
    if filters.is_empty() {
        return Err(ApiError::bad("userId", "name the subject: userId, ip or tenant"));
    }
    app.desk.audit_erasure(&operator.0, &subjects, reason.as_deref()).await?;
    forget_names(&app, &filters);
    let shared = Arc::clone(&app);
    let erased = tokio::task::spawn_blocking(move || {
        // Those that wait in the queue too.
        shared.signals.collect(&policy, shared.desk.now());
        shared.signals.erase(&filters, policy.identity().user_scope, shared.desk.now())
    });
    let erased = match erased.await.unwrap_or(Err(DatabaseError::Closed)) {
        Ok(erased) => erased,
        Err(error) => {
            app.desk.audit_failed_erasure(&operator.0, &subjects).await;
            return Err(error.into());
        }
    };
    Ok(json(StatusCode::OK, &ErasedBody { ok: true, erased }))
}

/// Forgets the names behind the digests of an erased subject: the narrowest that is named, as others share the rest.
fn forget_names(app: &App, filters: &[Filter]) {
    let values = |field| {
        let filter = filters.iter().find(|filter| filter.field == field)?;
        Some([filter.values.as_slice(), &filter.accounts].concat())
    };
    let tenant = values(Field::Tenant);
    match (values(Field::UserId), values(Field::Ip), tenant) {
        (Some(users), _, tenant) => {
            app.desk.forget_names(Layer::User, &users, tenant.as_deref());
            app.desk.forget_failed_accounts(&users, tenant.as_deref());
        }
        (None, Some(addresses), _) => {
            app.desk.forget_names(Layer::Edge, &addresses, None);
            app.desk.forget_failed_addresses(&addresses);
        }
        (None, None, Some(tenants)) => {
            app.desk.forget_names(Layer::Tenant, &tenants, None);
            app.desk.forget_names_of_tenant(&tenants);
        }
        (None, None, None) => {}
    }
}

async fn report(State(app): State<Arc<App>>, request: Request) -> Result<Response, ApiError> {
    // Before the turn: a client without a token must not keep others waiting for theirs.
    Caller::of(request.headers(), request.extensions(), &app).await?;
    // Before the body is read, so that only few large bodies are in memory at a time.
    let _turn = app.event_reports.turn().await?;
    let JsonBody(body) = JsonBody::read_compressed(request, &app, report::MAX_BODY).await?;
    let (policy, now) = (app.desk.policy(), app.desk.now());
    // Megabytes of JSON would hold up the requests of this thread.
    let shared = Arc::clone(&app);
    let reported = tokio::task::spawn_blocking(move || {
        let (mut all, mut accepted) = (0_usize, 0_usize);
        let mut take = |events: &mut Vec<Event>| {
            all = all.saturating_add(events.len());
            accepted = accepted.saturating_add(shared.signals.report(std::mem::take(events), &policy, now));
        };
        let named = |event: &Event| shared.desk.names.see_reported(event, &policy, now);
        let mut read = report::read(&body, &policy, now, named, &mut take)?;
        take(&mut read.events);
        shared.event_reports.log_refusals(&read, now);
        let report::Reported { ignored, refused, faults, .. } = read;
        let all = all.saturating_add(ignored);
        let faults = faults.iter().map(|fault| fault.body.message().to_owned()).collect();
        Ok::<_, ApiError>(ReportedBody { accepted, ignored: all.saturating_sub(accepted), refused, faults })
    });
    Ok(json(StatusCode::OK, &reported.await.map_err(|_| unavailable())??))
}

impl ListQuery {
    fn read(self, policy: &Policy) -> Result<EventQuery, ApiError> {
        let number = |name: &'static str, text: &str| {
            text.parse().map_err(|_| ApiError::bad(name, format!("{name} must be a whole number")))
        };
        let after = self.after.as_deref().map(|text| number("after", text)).transpose()?;
        let before = self.before.as_deref().map(|text| number("before", text)).transpose()?;
        if after.is_some() && before.is_some() {
            return Err(ApiError::bad("before", "after and before exclude each other"));
        }
        let since = self.since.as_deref().map(|text| number("since", text)).transpose()?;
        let mut filters = Vec::new();
        let mut add = |field, value: Option<String>, check: &dyn Fn(&str) -> Result<(), ApiError>| {
            let Some(value) = value else { return Ok(()) };
            check(&value)?;
            filters.push(Filter::new(field, vec![value]));
            Ok::<(), ApiError>(())
        };
        // By the name that events have: a layer may have another one, as `ip` of `edge`.
        let layer = |name: String| layer_named(&name).ok_or_else(|| ApiError::bad("layer", unknown_layer(&name)));
        let layer = self.layer.map(layer).transpose()?;
        add(Field::Layer, layer.map(|layer| layer.name().to_owned()), &|_| Ok(()))?;
        add(Field::Blocked, self.blocked, &|value| {
            let is_bool = matches!(value, "true" | "false");
            is_bool.then_some(()).ok_or_else(|| ApiError::bad("blocked", "blocked must be true or false"))
        })?;
        add(Field::Verdict, self.verdict, &|value| {
            let message = || format!("verdict must be one of {}", VERDICTS.join(", "));
            VERDICTS.contains(&value).then_some(()).ok_or_else(|| ApiError::bad("verdict", message()))
        })?;
        add(Field::Cause, self.cause, &|value| {
            let message = || format!("cause must be one of {}", Cause::ALL.map(Cause::name).join(", "));
            Cause::named(value).map(drop).ok_or_else(|| ApiError::bad("cause", message()))
        })?;
        add(Field::TraceId, self.trace_id.map(|id| id.to_ascii_lowercase()), &|value| {
            let message = "a trace id has 32 hexadecimal digits";
            trace_id(value).map(drop).ok_or_else(|| ApiError::bad("traceId", message))
        })?;
        for (field, name, value) in [
            (Field::Endpoint, "endpoint", self.endpoint),
            (Field::Rule, "rule", self.rule),
            (Field::Subject, "subject", self.subject),
        ] {
            add(field, value, &|value| if value.is_empty() { Err(empty(name)) } else { Ok(()) })?;
        }
        let (user_id, tenant) = scoped(self.user_id, self.tenant, policy);
        let names = [(Layer::Tenant, "tenant", tenant), (Layer::User, "userId", user_id), (Layer::Edge, "ip", self.ip)];
        for (layer, name, value) in names {
            filters.extend(value.map(|value| named(layer, name, &value, policy)).transpose()?);
        }
        Ok(EventQuery {
            after,
            before,
            limit: limit(self.limit.as_deref())?,
            filters,
            since: since.map(|millis: u64| Timestamp::from_micros(millis.saturating_mul(1_000))),
        })
    }
}

/// Returns a filter by a name, in each form in which events may show it: `log_identifiers` may have been changed since.
fn named(layer: Layer, name: &'static str, value: &str, policy: &Policy) -> Result<Filter, ApiError> {
    if value.is_empty() {
        return Err(empty(name));
    }
    let field = match layer {
        Layer::User => Field::UserId,
        Layer::Tenant => Field::Tenant,
        _ => Field::Ip,
    };
    if is_redacted(value) {
        return Ok(Filter::new(field, vec![value.to_owned()]));
    }
    let shown = match field {
        Field::Ip => {
            let whom = policy.ban_target(layer, value);
            whom.map_err(|_| ApiError::bad(name, "ip must be an address, or a block as events show it"))?.key()
        }
        _ => read_name(value).to_owned(),
    };
    let forms = |name: &str| vec![policy.key().redact(name), write_name(name).into_owned()];
    // Refused logins name an account by its normal form.
    let account = (field == Field::UserId).then(|| canonical_account(&shown)).filter(|account| *account != shown);
    let accounts = account.map(|account| forms(&account)).unwrap_or_default();
    Ok(Filter { accounts, ..Filter::new(field, forms(&shown)) })
}

/// Reads `TENANT/USER`, as operators name a user where users belong to tenants, into both. A digest, and a name beside a tenant, stay.
fn scoped(user: Option<String>, tenant: Option<String>, policy: &Policy) -> (Option<String>, Option<String>) {
    let scope = policy.identity().user_scope;
    let parts = user.as_deref().filter(|user| scope == UserScope::Tenant && tenant.is_none() && !is_redacted(user));
    match parts.and_then(|user| scope.read(user).ok()) {
        Some((Some(own), user)) => (Some(write_name(&user).into_owned()), Some(write_name(&own).into_owned())),
        Some((None, user)) => (Some(write_name(&user).into_owned()), None),
        None => (user, tenant),
    }
}

fn empty(name: &'static str) -> ApiError {
    ApiError::bad(name, format!("{name} must not be empty"))
}

fn limit(text: Option<&str>) -> Result<usize, ApiError> {
    text.map_or(Ok(DEFAULT_PAGE), |text| {
        let limit = text.parse().ok().filter(|limit| (1..=MAX_PAGE).contains(limit));
        limit.ok_or_else(|| ApiError::bad("limit", format!("limit must be from 1 to {MAX_PAGE}")))
    })
}

fn unavailable() -> ApiError {
    DatabaseError::Closed.into()
}

impl From<DatabaseError> for ApiError {
    fn from(error: DatabaseError) -> Self {
        tracing::warn!(reason = %error, "events not read or erased");
        let message = "the events cannot be reached; the server's log says why";
        Self::new(StatusCode::SERVICE_UNAVAILABLE, "unavailable", message)
    }
}
