//! Tenants and users behind a limiter, in axum.
//!
//! ```console
//! $ cargo run --example axum
//! $ curl -i -H 'Authorization: Bearer ada' 127.0.0.1:3000/notes    # 200 three times, then 429: her own limit
//! $ curl -i -H 'Authorization: Bearer bob' 127.0.0.1:3000/notes    # 200 twice, then 429: the limit of both at acme
//! $ curl -i -H 'Authorization: Bearer eve' 127.0.0.1:3000/notes    # 200: another tenant
//! $ curl -i -H 'Authorization: Bearer guess' 127.0.0.1:3000/notes  # 401 five times, then 429: too many guesses
//! ```

use std::error::Error;
use std::net::SocketAddr;
use std::sync::Arc;

use axum::extract::Request;
use axum::http::{StatusCode, header::AUTHORIZATION};
use axum::{Extension, Router, middleware::map_request, routing::get};
use threshold_limiter::Limiter;
use threshold_limiter::tower::{Identified, ThresholdLayer};

const POLICY: &str = r#"
    [[rule]]
    name = "guesses"
    per = ["ip"]
    limit = "5/h"
    count = "status:401"

    [[rule]]
    name = "tenant"
    per = ["tenant"]
    limit = "5/h"
    on_missing = "skip"

    [[rule]]
    name = "user"
    per = ["user"]
    limit = "3/h"
    on_missing = "skip"
"#;

/// Who has shown a token that is known.
#[derive(Clone)]
struct Account {
    tenant: &'static str,
    user: &'static str,
}

/// Finds the account of a request before the limiter sees it, so that it can count by it.
async fn authenticate(mut request: Request) -> Request {
    let token = request.headers().get(AUTHORIZATION).and_then(|value| value.to_str().ok()?.strip_prefix("Bearer "));
    let known = [("acme", "ada"), ("acme", "bob"), ("globex", "eve")].into_iter().find(|(_, own)| Some(*own) == token);
    if let Some((tenant, user)) = known {
        request.extensions_mut().insert(Account { tenant, user });
    }
    request
}

async fn notes(account: Option<Extension<Account>>) -> Result<String, StatusCode> {
    let Extension(account) = account.ok_or(StatusCode::UNAUTHORIZED)?;
    Ok(format!("the notes of {}\n", account.user))
}

#[tokio::main]
async fn main() -> Result<(), Box<dyn Error>> {
    let layer = ThresholdLayer::new(Arc::new(Limiter::new(POLICY.parse()?)))?.identify(|parts| {
        let account = parts.extensions.get::<Account>();
        let name = |of: fn(&Account) -> &'static str| account.map(|account| of(account).to_owned());
        Identified { tenant: name(|own| own.tenant), user: name(|own| own.user), ..Identified::default() }
    });
    // The last layer is the outermost: a request is authenticated, then counted, then answered.
    let app = Router::new().route("/notes", get(notes)).layer(layer).layer(map_request(authenticate));
    let address = std::env::args().nth(1).unwrap_or_else(|| "127.0.0.1:3000".to_owned());
    let listener = tokio::net::TcpListener::bind(address).await?;
    println!("listening on http://{}", listener.local_addr()?);
    axum::serve(listener, app.into_make_service_with_connect_info::<SocketAddr>()).await?;
    Ok(())
}
