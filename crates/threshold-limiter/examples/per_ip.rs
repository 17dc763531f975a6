//! An axum app that is limited by the client's address, without a policy file.
//!
//! ```console
//! $ cargo run --example per_ip
//! $ curl -i 127.0.0.1:3000/    # 200 three times, then 429
//! ```

use std::{error::Error, net::SocketAddr};

use axum::{Router, routing::get};
use threshold_limiter::tower::ThresholdLayer;

#[tokio::main]
async fn main() -> Result<(), Box<dyn Error>> {
    let app = Router::new().route("/", get(|| async { "hello\n" })).layer(ThresholdLayer::per_ip("3/min")?);
    let address = std::env::args().nth(1).unwrap_or_else(|| "127.0.0.1:3000".to_owned());
    let listener = tokio::net::TcpListener::bind(address).await?;
    println!("listening on http://{}", listener.local_addr()?);
    axum::serve(listener, app.into_make_service_with_connect_info::<SocketAddr>()).await?;
    Ok(())
}
