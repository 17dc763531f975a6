//! Threshold on the same servers: one limit, four layers, and the policy `grove`.

use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context as _, Result};
use threshold_redis::{RedisOptions, RedisStore};
use threshold_limiter::{Facts, Limiter, Policy, Secret};

use crate::contenders::{Contender, Deciding, Verdict};
use crate::requests::Request;
use crate::servers::Servers;

/// Long, so that a busy machine does not turn decisions into failures of the store.
const DEADLINE: Duration = Duration::from_secs(5);
/// The limits of rules by token bucket: no run uses up the first, and the second allows one request a day.
const FAR: &str = "1/s burst 100000000";
const NEAR: &str = "1/day";
/// The limit of windows that no run reaches.
const PLENTY: &str = "1000000000/h";
const GROVE: &str = include_str!("../../../policies/grove.toml");
/// The rules of `grove` that apply to a new post of a user, except the tenant's.
const RULES_OF_A_POST: [&str; 4] = ["edge", "edge-network", "posts/create", "POST:/api/posts"];

/// A policy that is measured.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Layers {
    /// One limit by tenant.
    One,
    /// Address, tenant, user and endpoint, by token buckets and without a ladder.
    Four,
    /// `policies/grove.toml` as it is, but for its figures: users belong to their tenant.
    Grove,
    /// The same without `user_scope`, so that users have a partition of their own.
    GroveUsers,
    /// `grove`, where users are denied by a limit with a ladder, and have strikes.
    GroveStrikes,
}

impl Layers {
    fn policy(self) -> Result<Policy> {
        let text = match self {
            Self::One => {
                [rule("allowed", "tenant", FAR, "/allowed"), rule("denied", "tenant", NEAR, "/denied")].concat()
            }
            Self::Four => four_layers(),
            Self::Grove => grove(),
            Self::GroveUsers => grove().replace("user_scope = \"tenant\"\n", ""),
            Self::GroveStrikes => strikes(),
        };
        Policy::parse(&text, &|_| None).context("the policy of a contender")
    }

    fn facts<'a>(self, request: &'a Request) -> Facts<'a> {
        let path = match (self, request.is_denied) {
            (Self::One | Self::Four, false) => "/allowed",
            (Self::One | Self::Four, true) => "/denied",
            (Self::GroveStrikes, true) => "/api/comments",
            (Self::Grove | Self::GroveUsers | Self::GroveStrikes, _) => "/api/posts",
        };
        // The tier decides which half of the tenants is denied.
        let is_small = request.is_denied && matches!(self, Self::Grove | Self::GroveUsers);
        Facts {
            ip: Some(request.ip),
            method: Some("POST"),
            path: Some(path),
            tenant: Some(&request.tenant),
            user: Some(&request.user),
            tier: Some(if is_small { "seedling" } else { "evergreen" }),
            ..Facts::default()
        }
    }
}

fn rule(name: &str, per: &str, limit: &str, path: &str) -> String {
    format!(
        "[[rule]]\nname = '{name}'\nper = ['{per}']\nlimit = '{limit}'\nalgorithm = 'token-bucket'\n\
         match = {{ path = '{path}' }}\n"
    )
}

fn four_layers() -> String {
    let layers = [
        rule("edge", "ip", FAR, "/**"),
        rule("tenant", "tenant", FAR, "/allowed"),
        rule("tenant-denied", "tenant", NEAR, "/denied"),
        rule("user", "user", FAR, "/**"),
        rule("endpoint", "user", FAR, "/*"),
    ];
    format!("{}[identity]\nuser_scope = 'tenant'\n", layers.concat())
}

/// Returns `grove` with figures that allow everything to the highest tier, and one write a day to the lowest.
fn grove() -> String {
    let mut name = "";
    let mut writes = 0;
    // A place in an object names the tenant of a user, and Redis uses none.
    let lines = GROVE.lines().filter(|line| !line.starts_with("place")).map(|line| {
        let value =
            |key: &str| line.strip_prefix(key).map(|rest| rest.trim_start_matches([' ', '=']).trim_matches('"'));
        name = value("name").unwrap_or(name);
        if value("limit").is_some() && RULES_OF_A_POST.contains(&name) {
            return format!("limit = \"{PLENTY}\"\n");
        }
        if value("writes").is_some() {
            writes += 1;
            return format!("writes = \"{}\"\n", if writes == 1 { NEAR } else { PLENTY });
        }
        format!("{line}\n")
    });
    lines.collect()
}

/// Returns `grove` where a user may write one comment a day.
fn strikes() -> String {
    grove().replace("limit          = \"20/5min\"", "limit = \"1/day\"")
}

/// A node of Threshold.
struct Node {
    limiter: Limiter<RedisStore>,
    layers: Layers,
}

impl Contender for Node {
    fn decide<'a>(&'a self, request: &'a Request) -> Deciding<'a> {
        Box::pin(async move {
            let decision = self.limiter.check_async(&self.layers.facts(request)).await?;
            Ok(match (decision.degraded, decision.allowed()) {
                (Some(_), _) => Verdict::Degraded,
                (None, true) => Verdict::Allowed,
                (None, false) => Verdict::Denied,
            })
        })
    }
}

/// Returns the secret of all nodes.
pub fn secret() -> Result<Secret> {
    Secret::new(&[7; 32]).context("32 bytes are a secret")
}

/// Opens a store, and a limiter on it.
pub async fn node(servers: &Servers, layers: Layers) -> Result<Arc<dyn Contender>> {
    let options = RedisOptions::new(servers.url().parse()?, secret()?).deadline(DEADLINE);
    let store = RedisStore::open(options).await?;
    // A key of its own for each policy, so that no two contenders share records.
    let digest_key = threshold_core::DigestKey::new([layers as u8; 16]);
    let limiter = Limiter::builder(layers.policy()?).store(store).digest_key(digest_key).build()?;
    Ok(Arc::new(Node { limiter, layers }))
}
