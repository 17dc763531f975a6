//! One limit for all processes on one Redis: start it twice within an hour.
//!
//! ```console
//! $ export REDIS=redis://127.0.0.1:6379 THRESHOLD_SECRET=$(openssl rand -hex 32)
//! $ cargo run --example redis
//! ```

use std::{env, error::Error, time::Duration};

use threshold_limiter::threshold_core::policy::{Per, Rule};
use threshold_limiter::{Facts, Limit, Limiter, Policy, Secret};
use threshold_redis::{RedisOptions, RedisStore};

#[tokio::main]
async fn main() -> Result<(), Box<dyn Error>> {
    let url = env::var("REDIS").map_err(|_| "REDIS is the URL of a server")?.parse()?;
    let secret = env::var("THRESHOLD_SECRET").map_err(|_| "THRESHOLD_SECRET is the same in every process")?;
    let secret = Secret::new(secret.as_bytes()).ok_or("THRESHOLD_SECRET has fewer than 16 bytes")?;
    // A decision waits 20 ms for the store by default, and then goes by `on_store_error` of its rules.
    let options = RedisOptions::new(url, secret).deadline(Duration::from_secs(5));
    let rule = Rule::builder("user").per([Per::User]).limit(Limit::per_hour(5));
    let policy = Policy::builder().rule(rule).build()?;
    let limiter = Limiter::builder(policy).store(RedisStore::open(options).await?).build()?;
    for _ in 0..3 {
        let decision = limiter.check_async(&Facts { user: Some("ada"), ..Facts::default() }).await?;
        println!("{}", if decision.allowed() { "allowed" } else { "denied" });
    }
    Ok(())
}
