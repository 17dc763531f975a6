//! The floor: bare axum that reads the same JSON and answers as much, or answers a GET with as many fields, and decides
//! nothing.

use std::net::SocketAddr;

use anyhow::{Context as _, Result};
use axum::routing::{get, post};
use axum::{Json, Router};
use serde::{Deserialize, Serialize};

/// What is asked, as typed as Threshold reads it.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "camelCase")]
#[expect(dead_code, reason = "reading it is what is measured")]
struct Asked {
    ip: Option<std::net::IpAddr>,
    host: Option<String>,
    tenant: Option<String>,
    user: Option<String>,
    tier: Option<String>,
    method: Option<String>,
    path: Option<String>,
    cost: Option<u64>,
    bytes: Option<u64>,
}

/// What Threshold answers to it, with its four limits.
#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
struct Answer {
    allowed: bool,
    verdict: &'static str,
    rule: &'static str,
    layer: &'static str,
    limit: u64,
    remaining: u64,
    reset_at: u64,
    retry_after: Option<u64>,
    retry_after_ms: Option<u64>,
    delay_ms: u64,
    warning: bool,
    banned: bool,
    degraded: bool,
    degraded_reason: Option<&'static str>,
    receipt: &'static str,
    trace_id: &'static str,
    limits: [LimitAnswer; 4],
}

#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
struct LimitAnswer {
    rule: &'static str,
    layer: &'static str,
    mode: &'static str,
    allowed: bool,
    limit: u64,
    remaining: u64,
    reset_at: u64,
    retry_after: Option<u64>,
}

fn answer() -> Answer {
    let limit = |name| LimitAnswer {
        rule: name,
        layer: name,
        mode: "enforce",
        allowed: true,
        limit: 250_000_000,
        remaining: 249_999_987,
        reset_at: 1_794_730_723,
        retry_after: None,
    };
    Answer {
        allowed: true,
        verdict: "allow",
        rule: "edge",
        layer: "edge",
        limit: 250_000_000,
        remaining: 249_999_987,
        reset_at: 1_794_730_723,
        retry_after: None,
        retry_after_ms: None,
        delay_ms: 0,
        warning: false,
        banned: false,
        degraded: false,
        degraded_reason: None,
        receipt: RECEIPT,
        trace_id: "ce96cf145e2f5e295dc2e6a4428e7856",
        limits: [limit("edge"), limit("tenant"), limit("user"), limit("endpoint")],
    }
}

/// The fields that Threshold answers to a client who may cross.
fn fields() -> [(&'static str, &'static str); 5] {
    [
        ("x-ratelimit-limit", "250000000"),
        ("x-ratelimit-remaining", "249999987"),
        ("x-ratelimit-reset", "1794730723"),
        ("ratelimit", LIMITS),
        ("ratelimit-policy", POLICIES),
    ]
}

const LIMITS: &str = "\"edge\";r=249999999;t=20, \"tenant\";r=249999987;t=260, \"user\";r=249999999;t=20, \
    \"endpoint\";r=249999999;t=20";
const POLICIES: &str = "\"edge\";q=1;w=20, \"tenant\";q=1;w=20, \"user\";q=1;w=20, \"endpoint\";q=1;w=20";

/// As long as Threshold's for four charges.
const RECEIPT: &str = "AQHOlswUXi9eKV3C5qRCjnhWAAAAAAAAAAEABkYxMjM0NTY3ODkwMTIzNDU2Nzg5MDEyMzQ1Njc4OTAxMjM0NTY3ODkwMTIzND\
    U2Nzg5MDEyMzQ1Njc4OTAxMjM0NTY3ODkwMTIzNDU2Nzg5MDEyMzQ1Njc4OTAxMjM0NTY3ODkwMTIzNDU2Nzg5MDEyMzQ1Njc4OTAxMjM0NTY3ODkw\
    MTIzNDU2Nzg5MDEyMzQ1Njc4OTAxMjM0NTY3ODkwMTIzNDU2Nzg5MDEyMzQ1Njc4OTAxMjM0NTY3ODkwMTIzNDU2Nzg5MDEyMzQ1Njc4OTA";

/// Serves on the address in the second argument, until it is ended.
pub fn serve() -> Result<()> {
    let address: SocketAddr = std::env::args().nth(2).context("floor takes an address")?.parse()?;
    let runtime = tokio::runtime::Runtime::new()?;
    runtime.block_on(async {
        let app = Router::new()
            .route("/v1/check", post(|Json::<Asked>(_)| async { Json(answer()) }))
            .route("/auth", get(|| async { fields() }));
        axum::serve(tokio::net::TcpListener::bind(address).await?, app).await?;
        anyhow::Ok(())
    })
}
