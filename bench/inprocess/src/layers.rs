//! A whole decision: four layers of one policy, from the facts of a request.

use std::net::{IpAddr, Ipv4Addr};

use anyhow::{Context as _, Result};
use threshold_limiter::{Facts, Limiter, Policy};

use crate::contenders::{Answer, NEAR, far};

/// How many requests `check_many` takes at once.
const BATCH: usize = 64;
/// How many users a tenant has.
const USERS_PER_TENANT: usize = 1_000;

/// Requests of so many users, each from an address of its own.
pub struct Layers {
    limiter: Limiter,
    requests: Vec<Request>,
}

/// What a door holds of one request before it makes facts of it.
#[derive(Clone)]
struct Request {
    ip: IpAddr,
    tenant: String,
    user: String,
}

impl Request {
    fn of(user: usize, name: &str) -> Self {
        // Below 10.0.0.0/8 there is room for every user of the benchmark.
        let ip = Ipv4Addr::from_bits(0x0a00_0000 | user as u32).into();
        Self { ip, tenant: format!("tenant-{:06}", user / USERS_PER_TENANT), user: name.to_owned() }
    }

    fn facts(&self) -> Facts<'_> {
        Facts {
            ip: Some(self.ip),
            method: Some("POST"),
            path: Some("/api/posts"),
            tenant: Some(&self.tenant),
            user: Some(&self.user),
            ..Facts::default()
        }
    }
}

impl Layers {
    /// A limiter in which every user has been seen, and the requests in the order of `visits`. Denied, it is the third
    /// layer that denies.
    pub fn new(answer: Answer, users: &[String], visits: &[u32]) -> Result<Self> {
        let far = far();
        let user = if answer == Answer::Allowed { far.clone() } else { format!("1/day burst {NEAR}") };
        // Each user has three keys of its own, and some are tenants.
        let max_keys = users.len() * 3 + users.len() / USERS_PER_TENANT + 1;
        let rule = |name: &str, per: &str, limit: &str, more: &str| {
            format!(
                "[[rule]]\nname = '{name}'\nlayer = '{name}'\nper = ['{per}']\nlimit = '{limit}'\n\
                 algorithm = 'token-bucket'\n{more}\n"
            )
        };
        let text = [
            rule("edge", "ip", &far, ""),
            rule("tenant", "tenant", &far, ""),
            rule("user", "user", &user, ""),
            rule("endpoint", "user", &far, "match = { method = 'POST', path = '/api/posts' }"),
            format!("[memory]\nmax_keys = {max_keys}\n"),
        ];
        let policy = Policy::parse(&text.concat(), &|_| None).context("the policy of four layers")?;
        let limiter = Limiter::new(policy);
        for (user, name) in users.iter().enumerate() {
            let request = Request::of(user, name);
            while limiter.check(&request.facts())?.allowed() && answer == Answer::Denied {}
        }
        let requests = visits.iter().filter_map(|user| Some(Request::of(*user as usize, users.get(*user as usize)?)));
        Ok(Self { limiter, requests: requests.collect() })
    }

    /// How many of these visits are allowed, one by one.
    pub fn check(&self, visits: std::ops::Range<usize>) -> usize {
        let allowed =
            |request: &&Request| self.limiter.check(&request.facts()).is_ok_and(|decision| decision.allowed());
        self.requests[visits].iter().filter(allowed).count()
    }

    /// The same in batches.
    pub fn check_many(&self, visits: std::ops::Range<usize>) -> usize {
        let mut allowed = 0;
        for batch in self.requests[visits].chunks(BATCH) {
            let mut facts = [Facts::default(); BATCH];
            for (facts, request) in facts.iter_mut().zip(batch) {
                *facts = request.facts();
            }
            let decisions = self.limiter.check_many(&facts[..batch.len()]);
            allowed += decisions.iter().flatten().filter(|decision| decision.allowed()).count();
        }
        allowed
    }

    /// The most slots that one decision moved so far.
    pub fn most_moved(&self) -> u64 {
        self.limiter.store().usage().counts.most_moved
    }
}
