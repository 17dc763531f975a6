//! A login: an attempt counts before its password is looked at, and nobody can lock others out of a device they know.
//!
//! ```console
//! $ cargo run --example login
//! $ curl -i --json '{"account":"ada","password":"guess"}' 127.0.0.1:3000/login          # 401 three times, then 429
//! $ curl -i --json '{"account":"bob","password":"correct horse"}' 127.0.0.1:3000/login  # 200, and a cookie
//! ```

use std::{collections::HashMap, error::Error, net::SocketAddr, sync::Arc};

use argon2::password_hash::{PasswordHasher as _, PasswordVerifier as _, generate_salt, phc::PasswordHash};
use axum::extract::{ConnectInfo, State};
use axum::http::{HeaderMap, StatusCode, header};
use axum::{Json, Router, response::AppendHeaders, response::IntoResponse, response::Result, routing::post};
use serde_json::{Value, json};
use threshold_limiter::{Attempted, Limiter, LoginRequest};
use tokio::{sync::Semaphore, task::spawn_blocking};

const POLICY: &str =
    r#"login = { account = "5/15min", ip = "20/5min", locks = { 3 = "1min", 5 = "5min", 10 = "1h" } }"#;
/// For this host and TLS alone, out of the reach of scripts, for 180 days.
const COOKIE: &str = "Path=/; Max-Age=15552000; HttpOnly; Secure; SameSite=Lax";
/// How many passwords are checked at once: each takes 19 MiB.
static CHECKS: Semaphore = Semaphore::const_new(4);

struct Accounts {
    /// Its secret is random, so a restart forgets all devices. `Limiter::builder(policy).secrets(secret)` takes one that you keep.
    limiter: Limiter,
    hashes: HashMap<&'static str, PasswordHash>,
    /// Of a password that nobody has: what is asked of an account that is unknown, it takes as long to answer.
    nobody: PasswordHash,
}

async fn login(
    State(own): State<Arc<Accounts>>,
    ConnectInfo(peer): ConnectInfo<SocketAddr>,
    headers: HeaderMap,
    Json(body): Json<Value>,
) -> Result<impl IntoResponse> {
    let text = |name| body.get(name).and_then(Value::as_str).unwrap_or_default().to_owned();
    let (account, password) = (text("account"), text("password"));
    let cookies = headers.get_all(header::COOKIE).iter().flat_map(|line| line.to_str().unwrap_or_default().split("; "));
    let device = cookies.filter_map(|cookie| cookie.strip_prefix("__Host-device=")).next();
    let request = LoginRequest { account: Some(&account), ip: Some(peer.ip()), device, ..LoginRequest::default() };
    let attempt = match own.limiter.login_attempt(&request).map_err(|_| StatusCode::SERVICE_UNAVAILABLE)? {
        Attempted::Allowed(attempt) => attempt,
        Attempted::Refused(refusal) => {
            let wait = refusal.retry_after_secs().map(|wait| (header::RETRY_AFTER, wait.to_string()));
            let body = Json(json!({ "error": refusal.code(), "message": refusal.message() }));
            return Err((StatusCode::TOO_MANY_REQUESTS, AppendHeaders(wait), body).into());
        }
    };
    let place = CHECKS.acquire().await.map_err(|_| StatusCode::SERVICE_UNAVAILABLE)?;
    // A client who leaves does not stop a thread: what was checked has its result.
    let checked = spawn_blocking(move || {
        let _until_checked = place;
        tracing::info!("a password is checked");
        let hash = own.hashes.get(&*account).unwrap_or(&own.nobody);
        let success = argon2::Argon2::default().verify_password(password.as_bytes(), hash).is_ok();
        own.limiter.login_result(&attempt, success).ok()
    });
    let result = checked.await.ok().flatten().ok_or(StatusCode::SERVICE_UNAVAILABLE)?;
    let cookie = result.device.map(|device| (header::SET_COOKIE, format!("__Host-device={device}; {COOKIE}")));
    let wrong = (StatusCode::UNAUTHORIZED, Json(json!({ "error": "invalid_credentials" })));
    if result.success { Ok(AppendHeaders(cookie)) } else { Err(wrong.into()) }
}

#[tokio::main]
async fn main() -> Result<(), Box<dyn Error>> {
    tracing_subscriber::fmt().with_writer(std::io::stderr).init();
    let hash = |password: &[u8]| argon2::Argon2::default().hash_password(password);
    let hashes = HashMap::from([("ada", hash(b"lovelace")?), ("bob", hash(b"correct horse")?)]);
    let accounts = Accounts { limiter: Limiter::new(POLICY.parse()?), hashes, nobody: hash(&generate_salt())? };
    let app = Router::new().route("/login", post(login)).with_state(Arc::new(accounts));
    let address = std::env::args().nth(1).unwrap_or_else(|| "127.0.0.1:3000".to_owned());
    let listener = tokio::net::TcpListener::bind(address).await?;
    println!("listening on http://{}", listener.local_addr()?);
    Ok(axum::serve(listener, app.into_make_service_with_connect_info::<SocketAddr>()).await?)
}
