//! The memory that a balance takes on a server.

use std::time::Duration;

use anyhow::{Result, ensure};
use threshold_redis::{RedisOptions, RedisStore};
use threshold_limiter::{Facts, Limiter, Policy};

use crate::servers::Servers;

/// The algorithms whose balances are of constant size.
const ALGORITHMS: [&str; 3] = ["token-bucket", "fixed-window", "sliding-estimate"];

/// Returns the algorithms, and the bytes that a balance of each takes with its key and its time to live.
pub async fn bytes_per_record(records: usize) -> Result<Vec<(&'static str, f64)>> {
    let mut found = Vec::new();
    for algorithm in ALGORITHMS {
        // A server of its own for each, because the tables of keys grow by doubling.
        let servers = Servers::single().await?;
        let text = format!("[[rule]]\nname = 'r'\nper = ['user']\nlimit = '1000/day'\nalgorithm = '{algorithm}'\n");
        let options = RedisOptions::new(servers.url().parse()?, crate::nodes::secret()?).deadline(Duration::from_secs(5));
        let store = RedisStore::open(options).await?;
        let limiter = Limiter::builder(Policy::parse(&text, &|_| None)?).store(store).build()?;
        let before = servers.work().await?.memory;
        let users: Vec<String> = (0..records).map(|user| format!("user-{user}")).collect();
        for users in users.chunks(64) {
            let facts: Vec<Facts<'_>> =
                users.iter().map(|user| Facts { user: Some(user), ..Facts::default() }).collect();
            let decisions = facts.iter().map(|facts| limiter.check_async(facts));
            for decision in futures_util::future::join_all(decisions).await {
                ensure!(decision?.allowed(), "the first request of a user was denied");
            }
        }
        let grown = servers.work().await?.memory.saturating_sub(before);
        found.push((algorithm, grown as f64 / records as f64));
    }
    Ok(found)
}
