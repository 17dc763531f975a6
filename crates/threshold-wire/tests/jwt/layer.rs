//! Tokens through the layer in front of a real service.

use std::net::SocketAddr;
use std::sync::{Arc, Mutex};

use axum::Router;
use axum::body::Body;
use axum::routing::any;
use http::{Request, StatusCode};
use serde_json::json;
use threshold_core::policy::TokenError;
use threshold_limiter::tower::{Identified, NoTokenVerifier, PeerAddr, ThresholdLayer};
use threshold_limiter::{Limiter, ManualClock, ObservedDecision, Observer, Policy, Refused, Span, TokenRefused};
use threshold_wire::jwt;
use tower::ServiceExt as _;

use crate::sign::{SECRET, hmac_of, of_texts, signed, token};
use crate::{NOW, START};

fn policy() -> Policy {
    let text = format!(
        r#"
        [identity]
        user = "claim:sub"
        tenant = "claim:org"
        [identity.jwt]
        alg = "HS256"
        key = "{SECRET}"
        iss = "https://id"
        aud = "api"
        [[rule]]
        name = "user"
        per = ["user"]
        limit = "2/h"
        on_missing = "floor"
        "#
    );
    Policy::parse(&text, &|_| None).unwrap()
}

/// Remembers whom requests were counted for, and why tokens were refused.
#[derive(Default)]
struct Ear {
    users: Mutex<Vec<Option<String>>>,
    tokens: Mutex<Vec<TokenError>>,
    refused: Mutex<Vec<(u16, String)>>,
}

impl Observer for Ear {
    fn decided(&self, ObservedDecision { facts, .. }: &ObservedDecision<'_>) {
        self.users.lock().unwrap().push(facts.user.map(str::to_owned));
    }

    fn refused(&self, refused: Refused<'_>, _: &Policy) {
        self.refused.lock().unwrap().push((refused.status, refused.reason.to_owned()));
    }

    fn token_refused(&self, refused: TokenRefused, _: &Policy) {
        self.tokens.lock().unwrap().push(refused.reason);
    }
}

struct World {
    clock: Arc<ManualClock>,
    limiter: Arc<Limiter<threshold_limiter::store::memory::MemoryStore, Arc<ManualClock>>>,
    ear: Arc<Ear>,
}

impl World {
    fn new() -> Self {
        let clock = Arc::new(ManualClock::new(START));
        let ear = Arc::new(Ear::default());
        let (policy, _) = jwt::attach(policy()).unwrap();
        let limiter = Limiter::builder(policy).clock(Arc::clone(&clock)).observer(Arc::clone(&ear) as _).build();
        Self { clock, limiter: Arc::new(limiter), ear }
    }

    fn layer(&self) -> ThresholdLayer {
        ThresholdLayer::new(Arc::clone(&self.limiter)).unwrap()
    }

    fn app(&self) -> Router {
        Router::new().route("/{*path}", any(|| async { "hello" })).layer(self.layer())
    }

    /// Whom a request with these fields is counted for, and why its token was refused.
    async fn ask(&self, app: &Router, fields: &[&str]) -> (Option<String>, Option<TokenError>) {
        let response = app.clone().oneshot(request(fields)).await.unwrap();
        assert!([StatusCode::OK, StatusCode::TOO_MANY_REQUESTS].contains(&response.status()));
        (self.ear.users.lock().unwrap().pop().unwrap(), self.ear.tokens.lock().unwrap().pop())
    }
}

/// A request of a peer that nobody trusts, with these `Authorization` fields.
fn request(fields: &[&str]) -> Request<Body> {
    let peer: SocketAddr = "203.0.113.7:4711".parse().unwrap();
    let builder =
        fields.iter().fold(Request::builder().uri("/x"), |built, value| built.header("authorization", *value));
    builder.extension(PeerAddr(peer)).body(Body::empty()).unwrap()
}

fn claims() -> serde_json::Value {
    json!({ "sub": "u1", "org": 7, "iss": "https://id", "aud": "api", "exp": NOW + 300 })
}

fn bearer(token: &str) -> String {
    format!("Bearer {token}")
}

#[tokio::test]
async fn a_verified_token_names_its_user_and_any_other_nobody() {
    let world = World::new();
    let app = world.app();
    let with = |name: &str, value: serde_json::Value| {
        let mut claims = claims();
        claims[name] = value;
        bearer(&token("HS256", &claims))
    };
    let good = bearer(&token("HS256", &claims()));
    assert_eq!(world.ask(&app, &[&good]).await, (Some("u1".to_owned()), None));
    assert_eq!(world.ask(&app, &[&good.replace("Bearer", "bearer")]).await, (Some("u1".to_owned()), None));
    assert_eq!(world.ask(&app, &[]).await, (None, None));
    assert_eq!(world.ask(&app, &["Basic dTpw"]).await, (None, None));
    let unsigned = of_texts(r#"{"alg":"none"}"#, &claims().to_string(), |_| Vec::new());
    let foreign = of_texts(r#"{"alg":"HS256"}"#, &claims().to_string(), |message| {
        hmac_of(ring::hmac::HMAC_SHA256, &[b'x'; 32], message)
    });
    let refused = [
        (bearer(&unsigned), TokenError::Algorithm),
        (bearer(&foreign), TokenError::Signature),
        (bearer(&token("HS512", &claims())), TokenError::Algorithm),
        (bearer(&token("RS256", &claims())), TokenError::Algorithm),
        (bearer(&signed(&json!({ "alg": "HS256" }), &claims(), "RS256")), TokenError::Signature),
        (with("exp", json!(NOW - 60)), TokenError::Expired),
        (with("nbf", json!(NOW + 61)), TokenError::NotYetValid),
        (with("iss", json!("https://evil")), TokenError::Issuer),
        (with("aud", json!("web")), TokenError::Audience),
        (with("fill", "x".repeat(8 << 10).into()), TokenError::TooLong),
        ("Bearer".to_owned(), TokenError::Malformed),
        (format!("{good}, {good}"), TokenError::Malformed),
    ];
    for (field, reason) in refused {
        assert_eq!(world.ask(&app, &[&field]).await, (None, Some(reason)), "{field}");
    }
    assert_eq!(world.ask(&app, &[&good, &good]).await, (None, Some(TokenError::Repeated)));
    assert_eq!(world.ask(&app, &["Basic dTpw", &good]).await, (None, Some(TokenError::Repeated)));
    // The limiter's clock is the one that counts.
    world.clock.advance(Span::from_secs(359));
    assert_eq!(world.ask(&app, &[&good]).await, (Some("u1".to_owned()), None));
    world.clock.advance(Span::SECOND);
    assert_eq!(world.ask(&app, &[&good]).await, (None, Some(TokenError::Expired)));
}

#[tokio::test]
async fn users_have_budgets_of_their_own_and_refused_tokens_none() {
    let world = World::new();
    let app = world.app();
    let status = async |fields: &[&str]| app.clone().oneshot(request(fields)).await.unwrap().status().as_u16();
    for user in ["u1", "U1", "u1 ", "12", "true"] {
        let mut claims = claims();
        claims["sub"] = user.into();
        let field = bearer(&token("HS256", &claims));
        assert_eq!(
            [status(&[&field]).await, status(&[&field]).await, status(&[&field]).await],
            [200, 200, 429],
            "{user}"
        );
    }
    // However many tokens are made up, they are one address.
    let made_up =
        |user: u32| of_texts(r#"{"alg":"HS256"}"#, &json!({ "sub": user, "exp": NOW }).to_string(), |_| vec![0; 32]);
    let mut statuses = Vec::new();
    for user in 0..3 {
        statuses.push(status(&[&bearer(&made_up(user))]).await);
    }
    assert_eq!(statuses, [200, 200, 429]);
}

#[tokio::test]
async fn what_the_application_knows_goes_before_a_token() {
    let world = World::new();
    let known = |_: &http::request::Parts| Identified {
        user: Some("known".to_owned()),
        tenant: Some("own".to_owned()),
        ..Identified::default()
    };
    let app = Router::new().route("/x", any(|| async { "hello" })).layer(world.layer().identify(known));
    // Its tokens may be something else than a JWT, and are not looked at.
    assert_eq!(world.ask(&app, &["Bearer opaque"]).await, (Some("known".to_owned()), None));
}

#[tokio::test]
async fn a_policy_whose_tokens_nobody_verifies_is_not_served() {
    let limiter = Arc::new(Limiter::new(policy()));
    assert_eq!(ThresholdLayer::new(limiter).err(), Some(NoTokenVerifier));
    assert!(NoTokenVerifier.to_string().contains("[identity.jwt]"));

    let world = World::new();
    let app = world.app();
    world.limiter.swap(policy());
    let good = bearer(&token("HS256", &claims()));
    for fields in [vec![], vec![good.as_str()]] {
        let response = app.clone().oneshot(request(&fields)).await.unwrap();
        assert_eq!(response.status(), StatusCode::SERVICE_UNAVAILABLE);
    }
    let told = world.ear.refused.lock().unwrap().pop().unwrap();
    assert!(told.0 == 503 && told.1.contains("[identity.jwt]"), "{told:?}");
    let (attached, _) = jwt::attach(policy()).unwrap();
    world.limiter.swap(attached);
    assert_eq!(world.ask(&app, &[&good]).await, (Some("u1".to_owned()), None));
}
