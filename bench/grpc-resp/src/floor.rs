//! The floor: bare tonic that reads four descriptors and answers OK, and decides nothing; alone, or with as many figures and headers
//! as Threshold adds.

use std::convert::Infallible;
use std::future::{Ready, ready};
use std::net::SocketAddr;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};

use anyhow::{Context as _, Result};
use tonic::body::Body;
use tonic::server::{Grpc, NamedService, UnaryService};
use tonic::{Request, Response, Status};
use tonic_prost::ProstCodec;
use tower_service::Service;

use crate::messages::{self, Duration, Entry, Limit, RATE_LIMIT_SERVICE, RateLimitRequest, RateLimitResponse};

/// How much is answered.
pub const FIGURES: &str = "figures";

/// Serves on the address in the second argument, until it is ended.
pub fn serve() -> Result<()> {
    let mut arguments = std::env::args().skip(2);
    let address: SocketAddr = arguments.next().context("floor takes an address")?.parse()?;
    let answer = if arguments.next().as_deref() == Some(FIGURES) { figures() } else { ok() };
    let runtime = tokio::runtime::Runtime::new()?;
    let service = RateLimitService(Answer(Arc::new(answer)));
    runtime.block_on(tonic::transport::Server::builder().add_service(service).serve(address))?;
    Ok(())
}

fn ok() -> RateLimitResponse {
    RateLimitResponse { overall_code: 1, ..RateLimitResponse::default() }
}

/// What Threshold answers.
fn figures() -> RateLimitResponse {
    let status = |name: &str| messages::Status {
        code: 1,
        current_limit: Some(Limit { requests_per_unit: 1_000_000_000, unit: 1, name: name.to_owned() }),
        limit_remaining: 999_999_987,
        duration_until_reset: Some(Duration { seconds: 1 }),
    };
    let header = |(key, value): (&str, &str)| Entry { key: key.to_owned(), value: value.to_owned() };
    RateLimitResponse {
        overall_code: 1,
        statuses: ["address", "tenant", "user", "path"].map(status).to_vec(),
        response_headers_to_add: HEADERS.map(header).to_vec(),
    }
}

const HEADERS: [(&str, &str); 6] = [
    ("x-ratelimit-limit", "1000000000"),
    ("x-ratelimit-remaining", "999999987"),
    ("x-ratelimit-reset", "1794730723"),
    (
        "ratelimit",
        "\"address\";r=999999999;t=1, \"tenant\";r=999999987;t=1, \"user\";r=999999999;t=1, \"path\";r=999999999;t=1",
    ),
    (
        "ratelimit-policy",
        "\"address\";q=1000000000;w=1, \"tenant\";q=1000000000;w=1, \"user\";q=1000000000;w=1, \"path\";q=1000000000;w=1",
    ),
    ("x-trace-id", "ce96cf145e2f5e295dc2e6a4428e7856"),
];

/// What tonic's generator writes for a service with one method.
#[derive(Debug, Clone)]
struct RateLimitService(Answer);

impl NamedService for RateLimitService {
    const NAME: &'static str = RATE_LIMIT_SERVICE;
}

impl Service<http::Request<Body>> for RateLimitService {
    type Response = http::Response<Body>;
    type Error = Infallible;
    type Future = Pin<Box<dyn Future<Output = Result<Self::Response, Infallible>> + Send>>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), Infallible>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, request: http::Request<Body>) -> Self::Future {
        let answer = self.0.clone();
        Box::pin(async move { Ok(Grpc::new(ProstCodec::default()).unary(answer, request).await) })
    }
}

/// Answers everybody the same.
#[derive(Debug, Clone)]
struct Answer(Arc<RateLimitResponse>);

impl UnaryService<RateLimitRequest> for Answer {
    type Response = RateLimitResponse;
    type Future = Ready<Result<Response<RateLimitResponse>, Status>>;

    fn call(&mut self, _: Request<RateLimitRequest>) -> Self::Future {
        ready(Ok(Response::new(RateLimitResponse::clone(&self.0))))
    }
}
