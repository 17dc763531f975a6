//! A mail gateway that caps what it sends in a minute and in an hour, in both ways there are.
//!
//! ```console
//! $ RELAY=http://127.0.0.1:8025 GLOBAL_SEND_RATE_LIMIT_PER_MINUTE=2 cargo run --example mailer
//! $ curl -i --json '{"to":"ada@a.example","text":"hi"}' 127.0.0.1:3000/v1/messages               # 202 twice, then 429
//! $ curl -i --json '{"to":"ada@a.example","text":"hi"}' 127.0.0.1:3000/v1/messages?mode=reserve  # never one too many
//! ```

use axum::extract::{RawQuery, State};
use axum::{Json, Router, http::StatusCode, response::IntoResponse, response::Result, routing::get};
use serde_json::{Value, json};
use std::{error::Error, sync::Arc, time::Duration};
use threshold_limiter::{ActualCost, Decision, Facts, Limiter, OnExpire, Policy};

const POLICY: &str = include_str!("policies/mail-sender.toml");
const DOMAINS: [&str; 2] = ["a.example", "b.example"];
const DECIDABLE: &str = "the policy's rules ask for nothing that a mail does not have";
/// What counts the mails, and what they are handed to.
type Gateway = Arc<(Limiter, ureq::Agent, String)>;

/// Filtered and failed mails count nothing. Nothing here awaits, so that a client who leaves cannot stop it half-way.
async fn send(State(own): State<Gateway>, RawQuery(mode): RawQuery, Json(mail): Json<Value>) -> Result<StatusCode> {
    let (limiter, http, relay) = &*own;
    let refuse = |status, detail: &str| (status, Json(json!({ "detail": detail })));
    let domain = mail.get("to").and_then(|to| to.as_str()?.rsplit('@').next());
    domain.filter(|to| DOMAINS.contains(to)).ok_or_else(|| refuse(StatusCode::FORBIDDEN, "to: no mail goes there"))?;
    let facts = Facts { method: Some("POST"), path: Some("/v1/messages"), ..Facts::default() };
    let post = || http.post(relay).content_type("application/json").send(mail.to_string());
    let send = || tokio::task::block_in_place(post).map_err(|_| refuse(StatusCode::BAD_GATEWAY, "the relay failed"));
    let counted = if mode.as_deref() == Some("mode=reserve") {
        // The place is taken before the mail leaves; a minute is longer than any send.
        let held = limiter.reserve(&facts, Duration::from_secs(60), OnExpire::Charge).expect(DECIDABLE);
        admit(limiter, &held.decision)?;
        let sent = send();
        let end = |id| if sent.is_ok() { limiter.commit(id, &ActualCost::default()) } else { limiter.release(id) };
        let _ended = held.reservation.map(end);
        sent.map(|_| held.decision)?
    } else {
        // Simpler, but two mails at the same moment may both find the last place free.
        admit(limiter, &limiter.peek(&facts).expect(DECIDABLE))?;
        send()?;
        limiter.record(&facts).expect(DECIDABLE).0
    };
    log(limiter, &counted, false);
    Ok(StatusCode::ACCEPTED)
}

/// Logs each limit that rejected a mail, or that it was counted by.
fn log(limiter: &Limiter, decision: &Decision, rejected: bool) {
    let policy = limiter.policy();
    for own in decision.readings.iter().filter(|own| if rejected { !own.allowed } else { own.charged }) {
        let name = policy.rules().get(own.rule()).map(|rule| &*rule.name);
        let (limit, count) = (own.limit, own.limit.saturating_sub(own.remaining));
        let warn = || tracing::warn!(name, count, limit, "rejected");
        if rejected { warn() } else { tracing::debug!(name, count, limit, "counted") }
    }
}

fn admit(limiter: &Limiter, decision: &Decision) -> Result<(), impl IntoResponse> {
    log(limiter, decision, true);
    let detail = decision.rule(&limiter.policy()).and_then(|rule| rule.message.clone());
    let wait = decision.retry_after_secs().unwrap_or(1).to_string();
    let refusal = (StatusCode::TOO_MANY_REQUESTS, [("retry-after", wait)], Json(json!({ "detail": detail })));
    if decision.allowed() { Ok(()) } else { Err(refusal) }
}

#[tokio::main]
async fn main() -> Result<(), Box<dyn Error>> {
    tracing_subscriber::fmt().with_writer(std::io::stderr).with_max_level(tracing::Level::DEBUG).init();
    let policy = Policy::parse(POLICY, &|name| std::env::var(name).ok())?;
    let http = ureq::Agent::config_builder().timeout_global(Some(Duration::from_secs(5))).build().new_agent();
    let relay = std::env::var("RELAY").map_err(|error| format!("RELAY: {error}"))?;
    let gateway = Arc::new((Limiter::new(policy), http, relay));
    let app = Router::new().route("/v1/messages", get("[]\n").post(send)).with_state(gateway);
    let address = std::env::args().nth(1);
    let listener = tokio::net::TcpListener::bind(address.as_deref().unwrap_or("127.0.0.1:3000")).await?;
    println!("listening on http://{}", listener.local_addr()?);
    Ok(axum::serve(listener, app).await?)
}
