//! Makes every operation directly at the desk and over HTTP, and compares the audit, the records on disk and the errors.

use http::StatusCode;
use percent_encoding::{NON_ALPHANUMERIC, utf8_percent_encode};
use serde_json::{Value, json};
use threshold_core::plan::Verb;
use threshold_core::policy::{Layer, Owner};
use threshold_core::{Digest, Facts, Span, TraceId};
use threshold_limiter::journal::{Journal, Row};
use threshold_limiter::{Attempted, LoginRequest};

use crate::desk::tests::{Folder, START};
use crate::desk::{Desk, NewBan, NewSetting, OpenDesk, OperationError, Target};
use crate::door::ApiError;
use crate::door::test_server::TestServer;

const POLICY: &str = r#"
[identity]
default_tier = "seed"
[tiers.seed]
requests = "5/h"
[tiers.oak]
requests = "50/h"
[login]
[ladders.mine]
rungs = ["ban 1h"]
[[rule]]
name = "tenant"
per = ["tenant"]
limit = "tier"
on_missing = "skip"
[[rule]]
name = "user"
per = ["user"]
limit = "1/h"
ladder = "mine"
strike = "request"
on_missing = "skip"
"#;

/// A change that an operator or a caller makes.
enum Operation {
    Ban(Layer, &'static str, &'static str, Option<u64>),
    /// The ban at this index of the list.
    Lift(usize, Option<&'static str>),
    LiftUnknown,
    Forgive(Layer, &'static str, Option<&'static str>),
    Pardon(&'static str),
    Set(Owner, &'static str, NewSetting),
    Pause(Layer, &'static str, u64),
}

fn operations() -> Vec<Operation> {
    use Operation::{Ban, Forgive, Lift, LiftUnknown, Pardon, Pause, Set};
    let later = START.plus(Span::MINUTE).secs_ceil();
    let given =
        |tier: &str, times, until| NewSetting { tier: Some(tier.to_owned()), times, until, ..NewSetting::default() };
    let because = |reason: &str| NewSetting { reason: Some(reason.to_owned()), ..NewSetting::default() };
    vec![
        // These do not wait for the disk, but the ban after them waits until they are on it too.
        Pause(Layer::User, "bob", 60),
        Pause(Layer::Endpoint, "x", 60),
        Pause(Layer::User, "bob", 0),
        Ban(Layer::Edge, "198.51.100.0/24", "scrapers", Some(60)),
        Ban(Layer::Edge, "198.51.100.0/24", "  scrapers, again ", None),
        Ban(Layer::User, "mallory", "fraud", None),
        Ban(Layer::Tenant, "acme", "unpaid", Some(3_600)),
        Ban(Layer::User, "u", "", None),
        Ban(Layer::User, "u", "r", Some(0)),
        Ban(Layer::Edge, "0.0.0.0/0", "r", None),
        // The list has five bans: the three above, and two by a ladder.
        Lift(2, Some("a mistake")),
        Lift(0, None),
        Lift(1, Some(" ")),
        LiftUnknown,
        Forgive(Layer::User, "eve", Some("sorry")),
        Forgive(Layer::Edge, "no address", None),
        Pardon("ada"),
        Pardon("\u{200b}"),
        Set(Owner::Tenant, "acme", given("oak", Some(3), Some(later))),
        Set(Owner::Tenant, "acme", given("elm", None, None)),
        Set(Owner::User, "u1", NewSetting { times: Some(10), ..because("a launch") }),
        Set(Owner::User, "u2", NewSetting { times: Some(2), ..NewSetting::default() }),
        Set(Owner::User, "u2", NewSetting::default()),
        Set(Owner::User, "u2", NewSetting { times: Some(0), ..NewSetting::default() }),
        Set(Owner::User, "u2", NewSetting { until: Some(7), ..NewSetting::default() }),
        Set(Owner::User, "u2", because(" ")),
    ]
}

/// Has the ladder ban two users, and an account fail.
async fn prepare(desk: &Desk) {
    let policy = desk.policy();
    for user in ["eve", "trudy", "eve", "trudy"] {
        let facts = Facts { user: Some(user), ..Facts::default() };
        let _ = desk.decide(&policy, Verb::Check, &facts).await.unwrap();
    }
    let request = LoginRequest { account: Some("ada"), ip: "203.0.113.7".parse().ok(), ..LoginRequest::default() };
    let Attempted::Allowed(attempt) = desk.login_attempt(&request, TraceId::default()).await.unwrap() else {
        panic!("it was refused")
    };
    let _ = desk.login_result(&attempt, false).await.unwrap().unwrap();
}

async fn ban_at(desk: &Desk, index: usize) -> Digest {
    desk.bans(None, 10).await.unwrap().get(index).unwrap().id
}

async fn direct(desk: &Desk, operation: Operation) -> Result<(), OperationError> {
    let who = "local";
    match operation {
        Operation::Ban(layer, key, reason, seconds) => {
            desk.ban(who, NewBan { layer, key, reason, seconds }).await.map(drop)
        }
        Operation::Lift(at, reason) => desk.lift(who, ban_at(desk, at).await, reason).await,
        Operation::LiftUnknown => desk.lift(who, Digest::from_u128(7), None).await,
        Operation::Forgive(layer, key, reason) => desk.forgive(who, Target::Subject(layer, key), reason).await,
        Operation::Pardon(name) => desk.forgive(who, Target::Account(name), None).await,
        Operation::Set(owner, name, new) => desk.set(who, owner, name, new).await.map(drop),
        Operation::Pause(layer, key, seconds) => desk.pause(who, layer, key, seconds).await.map(drop),
    }
}

/// Makes the operation over HTTP, and returns the status.
fn over_http(server: &mut TestServer, runtime: &tokio::runtime::Runtime, operation: Operation) -> u16 {
    let app = server.app();
    let encoded = |text: &'static str| utf8_percent_encode(text, NON_ALPHANUMERIC);
    let reason = |text: Option<&'static str>| text.map(|text| format!("?reason={}", encoded(text))).unwrap_or_default();
    let (method, path, body) = match operation {
        Operation::Ban(layer, key, reason, seconds) => {
            let body = json!({"layer": layer.name(), "key": key, "reason": reason, "durationSec": seconds});
            ("POST", "/v1/bans".to_owned(), body)
        }
        Operation::Lift(at, why) => {
            let id = runtime.block_on(ban_at(&app.desk, at)).to_u128();
            ("DELETE", format!("/v1/bans/{id:032x}{}", reason(why)), Value::Null)
        }
        Operation::LiftUnknown => ("DELETE", format!("/v1/bans/{:032x}", 7), Value::Null),
        Operation::Forgive(layer, key, why) => {
            ("DELETE", format!("/v1/subjects/{}/{}{}", layer.name(), encoded(key), reason(why)), Value::Null)
        }
        Operation::Pardon(name) => ("DELETE", format!("/v1/subjects/account/{}", encoded(name)), Value::Null),
        Operation::Set(owner, name, NewSetting { tier, limits, times, until, reason }) => {
            let mut body = json!({"tier": tier, "limits": limits, "times": times, "until": until, "reason": reason});
            body.as_object_mut().unwrap().retain(|_, value| !value.is_null());
            ("PUT", format!("/v1/{}/{name}", if owner == Owner::User { "users" } else { "tenants" }), body)
        }
        Operation::Pause(layer, key, seconds) => {
            ("POST", "/v1/pause".to_owned(), json!({"layer": layer.name(), "key": key, "seconds": seconds}))
        }
    };
    let fields = [("content-type", "application/json")];
    server.client().send(method, &path, &fields, &body.to_string()).unwrap().status
}

fn rows(folder: &Folder) -> Vec<Row> {
    let mut rows = Journal::read(&folder.journal()).unwrap().rows;
    rows.sort_by(|a, b| (a.kind, &a.key).cmp(&(b.kind, &b.key)));
    rows
}

/// Handlers once made each change themselves, so that every further door would have had to repeat the same steps.
///
/// Fails if a handler leaves out or changes any argument of the desk's function.
#[test]
fn operations_over_http_have_the_same_effect_as_at_the_desk() {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_time().build().unwrap();
    let (here, there) = (Folder::new(), Folder::new());
    let OpenDesk { desk, .. } = here.open(POLICY);
    let mut server = TestServer::at(there.open(POLICY).desk);
    runtime.block_on(prepare(&desk));
    runtime.block_on(prepare(&server.app().desk));
    let mut refused = 0;
    for (number, (own, other)) in operations().into_iter().zip(operations()).enumerate() {
        let waits = !matches!(own, Operation::Pause(..));
        let done = runtime.block_on(direct(&desk, own));
        refused += u32::from(done.is_err());
        let expected = done.map_or_else(|refused| ApiError::from(refused).status, |()| StatusCode::OK);
        assert_eq!(over_http(&mut server, &runtime, other), expected.as_u16(), "operation {number}");
        assert!(!waits || there.audit() == here.audit(), "operation {number}: {:?}", there.audit());
    }
    assert_eq!((refused, here.audit().len()), (12, 13));
    assert_eq!(rows(&there), rows(&here));
    assert_eq!(runtime.block_on(server.app().desk.bans(None, 10)), runtime.block_on(desk.bans(None, 10)));
    for whom in [Target::Subject(Layer::User, "bob"), Target::Subject(Layer::User, "eve"), Target::Account("ada")] {
        let (own, other) = (desk.subject(whom), runtime.block_on(server.app().desk.subject(whom)));
        assert_eq!(other, runtime.block_on(own));
    }
}
