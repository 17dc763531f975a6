//! Decides a number of requests through four layers, with observers or without, for callgrind to count instructions:
//!
//! ```text
//! RUSTFLAGS=--cfg=rustix_use_libc cargo build --release --bin instructions
//! valgrind --tool=callgrind --toggle-collect='*decide_all*' target/release/instructions off 20000
//! ```
//!
//! valgrind has no vDSO, which rustix would read the clock from. Only the second round of requests is counted: the first has seen every
//! user. `off` has no observer, `metrics` has the metrics, `all` has the queue of events and the count of penalties too.

use std::net::{IpAddr, Ipv4Addr};
use std::process::ExitCode;
use std::sync::Arc;

use threshold_limiter::metrics::Metrics;
use threshold_limiter::{ActivePenalties, Facts, Limiter, Policy, events};

/// The address, the tenant and the name of a user.
type User = (IpAddr, String, String);

const USERS: u32 = 5_000;
const POLICY: &str = r#"
    [[rule]]
    name = "edge"
    layer = "edge"
    per = ["ip"]
    limit = "1/s burst 1000000"
    algorithm = "token-bucket"
    [[rule]]
    name = "tenant"
    layer = "tenant"
    per = ["tenant"]
    limit = "1/s burst 1000000"
    algorithm = "token-bucket"
    [[rule]]
    name = "user"
    layer = "user"
    per = ["user"]
    limit = "1/s burst 1000000"
    algorithm = "token-bucket"
    [[rule]]
    name = "endpoint"
    layer = "endpoint"
    per = ["user"]
    limit = "1/s burst 1000000"
    algorithm = "token-bucket"
    match = { method = "POST", path = "/api/posts" }
    [memory]
    max_keys = 100000
"#;

fn main() -> ExitCode {
    let mut arguments = std::env::args().skip(1);
    let (observed, decisions) = (arguments.next(), arguments.next().and_then(|text| text.parse::<u32>().ok()));
    let (Some(observed), Some(decisions)) = (observed, decisions) else {
        eprintln!("usage: instructions off|metrics|all DECISIONS");
        return ExitCode::FAILURE;
    };
    let policy = Policy::parse(POLICY, &|_| None).expect("the policy of four layers");
    let (metrics, (sender, _receiver)) = (Metrics::new(), events::queue(8_192));
    let mut builder = Limiter::builder(policy);
    if observed != "off" {
        builder = builder.observer(metrics.observer());
    }
    if observed == "all" {
        builder = builder.observer(Arc::new(sender)).observer(Arc::new(ActivePenalties::default()));
    }
    let limiter = builder.build();
    let users: Vec<User> = (0..USERS)
        .map(|user| {
            let ip = Ipv4Addr::from_bits(0x0a00_0000 | user).into();
            (ip, format!("tenant-{:06}", user / 1_000), format!("user:{user:016x}-eu"))
        })
        .collect();
    let seen = check(&limiter, &users, USERS);
    let allowed = decide_all(&limiter, &users, decisions);
    println!("{allowed} of {decisions} allowed");
    if (seen, allowed) == (USERS, decisions) { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}

/// A function of its own, so that callgrind can count it alone.
#[inline(never)]
fn decide_all(limiter: &Limiter, users: &[User], decisions: u32) -> u32 {
    check(limiter, users, decisions)
}

fn check(limiter: &Limiter, users: &[User], decisions: u32) -> u32 {
    let mut allowed = 0;
    for (ip, tenant, user) in users.iter().cycle().take(decisions as usize) {
        let facts = Facts {
            ip: Some(*ip),
            method: Some("POST"),
            path: Some("/api/posts"),
            tenant: Some(tenant),
            user: Some(user),
            ..Facts::default()
        };
        allowed += u32::from(limiter.check(&facts).is_ok_and(|decision| decision.allowed()));
    }
    allowed
}
