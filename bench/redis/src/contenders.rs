//! The peers: `INCR` as the floor, a script for one limit through two client crates, and limitador.

use std::collections::HashMap;
use std::future::Future;
use std::hash::{DefaultHasher, Hash as _, Hasher as _};
use std::pin::Pin;
use std::sync::Arc;

use anyhow::{Context as _, Result, anyhow};
use fred::prelude::{Builder, Client, ClientLike as _, Config, LuaInterface as _};
use limitador::limit::{Expression, Limit, Namespace};
use limitador::storage::AsyncStorage;
use limitador::storage::redis::AsyncRedisStorage;
use limitador::{AsyncRateLimiter, AsyncRateLimiterBuilder};
use redis::aio::MultiplexedConnection;

use crate::requests::Request;
use crate::servers::Servers;

/// A script for one limit.
const GCRA: &str = include_str!("gcra.lua");
/// Figures of the script: one a second with a burst that no run uses up, and one a day.
const FAR: [&str; 2] = ["1000000", "100000000000000"];
const NEAR: [&str; 2] = ["86400000000", "86400000000"];
/// A limit that no run reaches.
const PLENTY: u64 = 1_000_000_000;
const HOUR: u64 = 3_600;
const DAY: u64 = 86_400;

/// The answer to a request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Verdict {
    /// The request may go on.
    Allowed,
    /// A limit is full.
    Denied,
    /// The store did not answer in time.
    Degraded,
}

impl Verdict {
    /// Returns the verdict of a limiter that has only two.
    fn of(allowed: bool) -> Self {
        if allowed { Self::Allowed } else { Self::Denied }
    }
}

/// A decision that is being made.
pub type Deciding<'a> = Pin<Box<dyn Future<Output = Result<Verdict>> + Send + 'a>>;

/// A limiter on Redis.
pub trait Contender: Send + Sync {
    /// Decides a request.
    fn decide<'a>(&'a self, request: &'a Request) -> Deciding<'a>;
}

/// Connections to all primaries, with a hash tag of each one's slots.
struct Routes(Vec<(String, MultiplexedConnection)>);

impl Routes {
    async fn open(servers: &Servers) -> Result<Self> {
        Ok(Self(servers.hash_tags().await?.into_iter().zip(servers.connections()).collect()))
    }

    /// Returns the key of a tenant, and a connection to the server that holds it.
    fn of(&self, kind: &str, tenant: &str) -> Result<(String, MultiplexedConnection)> {
        let mut hasher = DefaultHasher::new();
        tenant.hash(&mut hasher);
        let place = usize::try_from(hasher.finish() % self.0.len() as u64)?;
        let (tag, connection) = self.0.get(place).context("there is a server")?;
        Ok((format!("{kind}:{{{tag}}}{tenant}"), connection.clone()))
    }
}

/// `INCR` by tenant, which denies nothing.
struct Incr(Routes);

impl Contender for Incr {
    fn decide<'a>(&'a self, request: &'a Request) -> Deciding<'a> {
        Box::pin(async move {
            let (key, mut connection) = self.0.of("incr", &request.tenant)?;
            let _: u64 = redis::cmd("INCR").arg(key).query_async(&mut connection).await?;
            Ok(Verdict::Allowed)
        })
    }
}

/// Opens `INCR`.
pub async fn incr(servers: &Servers) -> Result<Arc<dyn Contender>> {
    Ok(Arc::new(Incr(Routes::open(servers).await?)))
}

/// The script for one limit, through the crate `redis`.
struct Script {
    routes: Routes,
    hash: String,
}

impl Contender for Script {
    fn decide<'a>(&'a self, request: &'a Request) -> Deciding<'a> {
        Box::pin(async move {
            let (key, mut connection) = self.routes.of("gcra", &request.tenant)?;
            let mut call = redis::cmd("EVALSHA");
            call.arg(&self.hash).arg(1).arg(key).arg(if request.is_denied { &NEAR } else { &FAR });
            let (allowed, _): (u8, u64) = call.query_async(&mut connection).await?;
            Ok(Verdict::of(allowed == 1))
        })
    }
}

/// Loads the script for one limit.
pub async fn script(servers: &Servers) -> Result<Arc<dyn Contender>> {
    servers.load(GCRA).await?;
    let hash = redis::Script::new(GCRA).get_hash().to_owned();
    Ok(Arc::new(Script { routes: Routes::open(servers).await?, hash }))
}

/// The script for one limit, through the crate `fred`.
struct Fred {
    client: Client,
    hash: String,
}

impl Contender for Fred {
    fn decide<'a>(&'a self, request: &'a Request) -> Deciding<'a> {
        Box::pin(async move {
            let key = format!("gcra:{{0}}{}", request.tenant);
            let figures = if request.is_denied { NEAR } else { FAR };
            let (allowed, _): (u8, u64) = self.client.evalsha(&self.hash, key, figures.to_vec()).await?;
            Ok(Verdict::of(allowed == 1))
        })
    }
}

/// Opens a client of the crate `fred`, which pipelines what several tasks send.
pub async fn fred(servers: &Servers) -> Result<Arc<dyn Contender>> {
    servers.load(GCRA).await?;
    let client = Builder::from_config(Config::from_url(&servers.url())?).build()?;
    client.init().await?;
    Ok(Arc::new(Fred { client, hash: redis::Script::new(GCRA).get_hash().to_owned() }))
}

/// limitador, with limits of fixed windows.
struct Limitador {
    limiter: AsyncRateLimiter,
    allowed: Namespace,
    denied: Namespace,
}

impl Contender for Limitador {
    fn decide<'a>(&'a self, request: &'a Request) -> Deciding<'a> {
        Box::pin(async move {
            // Each request needs a context of its own, with owned strings.
            let facts = [
                ("tenant", request.tenant.clone()),
                ("user", request.user.clone()),
                ("ip", request.ip.to_string()),
                ("path", "/api/posts".to_owned()),
            ];
            let context = HashMap::from(facts.map(|(name, value)| (name.to_owned(), value))).into();
            let namespace = if request.is_denied { &self.denied } else { &self.allowed };
            let result = self.limiter.check_rate_limited_and_update(namespace, &context, 1).await;
            Ok(Verdict::of(!result.map_err(|error| anyhow!("limitador: {error}"))?.limited))
        })
    }
}

/// Opens limitador with one limit by tenant, and with three more by address, user, and user and path.
pub async fn limitador(servers: &Servers, layers: bool) -> Result<Arc<dyn Contender>> {
    let counters = AsyncRedisStorage::new(&servers.url()).await.map_err(|error| anyhow!("limitador: {error}"))?;
    let limiter = AsyncRateLimiterBuilder::new(AsyncStorage::with_counter_storage(Box::new(counters))).build();
    // The two differ in their names, so that contenders with one limit and with four share no counters.
    let prefix = if layers { "layers" } else { "one" };
    let names = [format!("{prefix}-allowed"), format!("{prefix}-denied")];
    for (name, most, seconds) in [(&names[0], PLENTY, HOUR), (&names[1], 1, DAY)] {
        limiter.add_limit(limit(name, most, seconds, &["tenant"])?);
        let others: &[&[&str]] = if layers { &[&["ip"], &["user"], &["user", "path"]] } else { &[] };
        for variables in others {
            limiter.add_limit(limit(name, PLENTY, HOUR, variables)?);
        }
    }
    let [allowed, denied] = names.map(Namespace::from);
    Ok(Arc::new(Limitador { limiter, allowed, denied }))
}

fn limit(namespace: &str, most: u64, seconds: u64, variables: &[&str]) -> Result<Limit> {
    let variables =
        variables.iter().map(|name| Expression::try_from(*name).map_err(|error| anyhow!("limitador: {error}")));
    Ok(Limit::new(namespace, most, seconds, [], variables.collect::<Result<Vec<_>>>()?))
}
