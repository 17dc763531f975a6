//! Calls to another service that stop while its own 429 and `Retry-After` ask for it.
//!
//! ```console
//! $ PROVIDER=https://api.example.com/v1/models cargo run --example provider
//! ```

use std::{
    error::Error,
    time::{Duration, UNIX_EPOCH},
};

use jiff::fmt::rfc2822;
use threshold_limiter::threshold_core::policy::{Per, Rule};
use threshold_limiter::{Facts, Limit, Limiter, Policy};
use ureq::http::{StatusCode, Uri};

/// The longest time that a provider may ask for.
const LONGEST: u64 = 3_600;

/// Returns the seconds that a `Retry-After` asks for. It is their number, or a date.
fn seconds(wait: &str) -> Option<u64> {
    let until_date = || {
        let date = u64::try_from(rfc2822::parse(wait).ok()?.timestamp().as_second()).ok()?;
        Some(date.saturating_sub(UNIX_EPOCH.elapsed().ok()?.as_secs()))
    };
    wait.parse().ok().or_else(until_date)
}

/// Asks a provider, unless its limit here is used up or it has asked to be left alone.
fn call(limiter: &Limiter, http: &ureq::Agent, url: &Uri) -> Result<String, Box<dyn Error>> {
    let facts = Facts { host: url.host(), ..Facts::default() };
    let decision = limiter.check(&facts)?;
    if !decision.allowed() {
        return Ok(format!("not sent: wait {} s", decision.retry_after_secs().unwrap_or(1)));
    }
    let response = http.get(url).call()?;
    if response.status() == StatusCode::TOO_MANY_REQUESTS {
        let asked = response.headers().get("retry-after").and_then(|wait| seconds(wait.to_str().ok()?));
        limiter.pause_rule("provider", &facts, Duration::from_secs(asked.unwrap_or(1).min(LONGEST)))?;
    }
    Ok(response.status().to_string())
}

fn main() -> Result<(), Box<dyn Error>> {
    let rule = Rule::builder("provider").per([Per::Host]).limit(Limit::per_second(10));
    let limiter = Limiter::new(Policy::builder().rule(rule).build()?);
    let http = ureq::Agent::config_builder().http_status_as_error(false).build().new_agent();
    let url = std::env::var("PROVIDER").map_err(|_| "PROVIDER is the URL that is called")?.parse()?;
    for _ in 0..3 {
        println!("{}", call(&limiter, &http, &url)?);
    }
    Ok(())
}
