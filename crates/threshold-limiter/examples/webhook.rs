//! A Telegram bot behind a webhook: who may write to it, then how much, and only then the work.
//!
//! ```console
//! $ export BOT_TOKEN=123:abc WEBHOOK_SECRET=hush ALLOWED_USERS=42,43 RATE_LIMIT_MAX=2
//! $ cargo run --example webhook
//! $ curl -i -H 'X-Telegram-Bot-Api-Secret-Token: hush' 127.0.0.1:3000/webhook \
//!     -d '{"message":{"from":{"id":42},"chat":{"id":42},"text":"hello"}}'  # 200: the bot has written to chat 42
//! ```
//! `BOT_API` is where the bot writes to: Telegram itself, unless you run a Bot API server of your own.

use std::{error::Error, sync::Arc, time::Duration};

use axum::http::{HeaderMap, HeaderValue, StatusCode, Uri};
use axum::{Json, Router, body::Bytes, extract::State, routing::post};
use serde_json::{Value, json};
use subtle::ConstantTimeEq as _;
use threshold_limiter::{Facts, Limiter, Policy};

const POLICY: &str = include_str!("policies/telegram-bot.toml");

struct Bot {
    limiter: Limiter,
    allowed_users: Vec<i64>,
    secret: String,
    http: ureq::Agent,
    send_message: Uri,
}

/// Any answer but 200 makes Telegram deliver the update again: whatever came from there is answered so.
async fn webhook(State(bot): State<Arc<Bot>>, headers: HeaderMap, body: Bytes) -> Result<Json<Value>, StatusCode> {
    let secret = headers.get("x-telegram-bot-api-secret-token").map(HeaderValue::as_bytes);
    if !bool::from(secret.unwrap_or_default().ct_eq(bot.secret.as_bytes())) {
        return Err(StatusCode::UNAUTHORIZED);
    }
    let update: Value = serde_json::from_slice(&body).map_err(|_| StatusCode::BAD_REQUEST)?;
    let id = |path| update.pointer(path).and_then(Value::as_i64);
    if let (Some(sender), Some(chat)) = (id("/message/from/id"), id("/message/chat/id"))
        && bot.allowed_users.contains(&sender)
    {
        let facts = Facts { user: Some(&sender.to_string()), ..Facts::default() };
        let decision = bot.limiter.check(&facts).map_err(|_| StatusCode::INTERNAL_SERVER_ERROR)?;
        let text = if decision.allowed() {
            // The expensive work goes here.
            format!("You said: {}", update.pointer("/message/text").and_then(Value::as_str).unwrap_or_default())
        } else {
            decision.rule(&bot.limiter.policy()).and_then(|rule| rule.message.clone()).unwrap_or_default().into()
        };
        let reply = json!({ "chat_id": chat, "text": text }).to_string();
        let send = move || bot.http.post(&bot.send_message).content_type("application/json").send(reply);
        if let Ok(Err(error)) = tokio::task::spawn_blocking(send).await {
            tracing::warn!(%error, "the reply was not sent");
        }
    }
    Ok(Json(json!({ "ok": true })))
}

#[tokio::main]
async fn main() -> Result<(), Box<dyn Error>> {
    tracing_subscriber::fmt().with_writer(std::io::stderr).init();
    let set = |name: &str| std::env::var(name).ok().filter(|value| !value.is_empty());
    let need = |name: &str| set(name).ok_or_else(|| format!("{name} is not set"));
    let api = set("BOT_API").unwrap_or_else(|| "https://api.telegram.org".to_owned());
    let send_message: Uri = format!("{api}/bot{}/sendMessage", need("BOT_TOKEN")?).parse()?;
    // An error that shows the whole address would show the token.
    send_message.host().ok_or("BOT_API: expected an address such as http://127.0.0.1:8081")?;
    let allowed_users: Result<_, _> = need("ALLOWED_USERS")?.split(',').map(|id| id.trim().parse()).collect();
    let bot = Bot {
        limiter: Limiter::new(Policy::parse(POLICY, &|name| std::env::var(name).ok())?),
        allowed_users: allowed_users.map_err(|error| format!("ALLOWED_USERS: {error}"))?,
        secret: need("WEBHOOK_SECRET")?,
        http: ureq::Agent::config_builder().timeout_global(Some(Duration::from_secs(5))).build().new_agent(),
        send_message,
    };
    let app = Router::new().route("/webhook", post(webhook)).with_state(Arc::new(bot));
    let address = std::env::args().nth(1).unwrap_or_else(|| "127.0.0.1:3000".to_owned());
    let listener = tokio::net::TcpListener::bind(address).await?;
    println!("listening on http://{}", listener.local_addr()?);
    Ok(axum::serve(listener, app).await?)
}
