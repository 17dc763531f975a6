//! The store that `--store` names.

use std::fmt;
use std::path::PathBuf;
use std::str::FromStr;
use std::sync::Arc;
use std::time::Duration;

use anyhow::Context as _;
use threshold_core::{Secret, Secrets};
use threshold_limiter::files::Trust;
use threshold_redis::{RedisOptions, RedisStore, RedisUrl};

use crate::cli::ServeArgs;
use threshold_rehearsal::source::read_trusted;

/// The largest file, in bytes: the certificates of all public authorities together are a quarter of it.
const MAX_PEM: usize = 1 << 20;

/// Where records are stored.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(super) enum StoreUrl {
    /// In this process.
    #[default]
    Memory,
    /// In the Redis that this URL names.
    Redis(Box<RedisUrl>),
}

impl FromStr for StoreUrl {
    type Err = anyhow::Error;

    fn from_str(text: &str) -> anyhow::Result<Self> {
        if text == "memory" {
            return Ok(Self::Memory);
        }
        // Most often a mistyped word, and not a URL.
        if !text.contains("://") {
            anyhow::bail!("a store is memory, or a URL such as redis://HOST:PORT");
        }
        Ok(Self::Redis(Box::new(text.parse()?)))
    }
}

impl StoreUrl {
    /// Returns the store that the options or `THRESHOLD_STORE` name.
    pub(super) fn chosen(args: &ServeArgs) -> anyhow::Result<Self> {
        let store = match &args.store {
            Some(text) => text.parse().context("--store")?,
            None => variable("THRESHOLD_STORE")?.unwrap_or_default(),
        };
        let has_options = args.store_ca.is_some() || args.store_cert.is_some() || args.store_deadline.is_some();
        if store == Self::Memory && has_options {
            anyhow::bail!(
                "--store-ca, --store-cert and --store-deadline are for a store in Redis: name it with --store"
            );
        }
        Ok(store)
    }
}

/// Parses an environment variable. Set but empty is an error: the value was meant to come from somewhere.
fn variable<T: FromStr<Err: Into<anyhow::Error>>>(name: &str) -> anyhow::Result<Option<T>> {
    match std::env::var(name) {
        Ok(text) if !text.trim().is_empty() => {
            text.trim().parse::<T>().map(Some).map_err(Into::into).with_context(|| name.to_owned())
        }
        Ok(_) => anyhow::bail!("{name} is set but empty: give a value, or unset it"),
        Err(std::env::VarError::NotPresent) => Ok(None),
        Err(std::env::VarError::NotUnicode(_)) => anyhow::bail!("{name} is not UTF-8"),
    }
}

/// Makes the secrets of a server on a shared store. They must be given: all nodes need the same.
pub(super) fn secrets(present: Option<&str>, old: Option<&str>) -> anyhow::Result<Secrets> {
    let secret = |text: Option<&str>| text.and_then(|text| Secret::new(text.as_bytes()));
    let present = secret(present).context(
        "a shared store needs THRESHOLD_SECRET, the same on every node: set that of the other nodes. For a new installation generate one \
         with `openssl rand -hex 32`",
    )?;
    let secrets = Secrets::new(present);
    match secret(old) {
        Some(old) => Ok(secrets.with_old(old)?),
        None => Ok(secrets),
    }
}

/// Without the password.
impl fmt::Display for StoreUrl {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Memory => f.write_str("memory"),
            Self::Redis(url) => url.fmt(f),
        }
    }
}

/// Makes the options of a store in Redis, with the certificates and the deadline of the command line or the environment.
pub(super) fn options(args: &ServeArgs, url: &RedisUrl, secrets: &Secrets) -> anyhow::Result<RedisOptions> {
    let mut options = RedisOptions::new(url.clone(), secrets.clone());
    if let Some(path) = &authorities(args)? {
        options = options.authorities(read_trusted(path, Trust::Keys, MAX_PEM)?);
    }
    if let (Some(cert), Some(key)) = (&args.store_cert, &args.store_key) {
        let read = |path| read_trusted(path, Trust::Keys, MAX_PEM);
        options = options.certificate(read(cert)?, read(key)?);
    }
    if let Some(deadline) = deadline(args)? {
        options = options.deadline(deadline);
    }
    options.check()?;
    Ok(options)
}

/// Returns the file with the authorities to trust, by the command line or the environment.
pub(super) fn authorities(args: &ServeArgs) -> anyhow::Result<Option<PathBuf>> {
    args.store_ca.clone().map_or_else(|| variable("THRESHOLD_STORE_CA"), |path| Ok(Some(path)))
}

fn deadline(args: &ServeArgs) -> anyhow::Result<Option<Duration>> {
    let name = "THRESHOLD_STORE_DEADLINE";
    let milliseconds = args.store_deadline.map_or_else(|| variable::<u16>(name), |given| Ok(Some(given)))?;
    // The command line is checked by its parser, with the same bounds.
    if milliseconds.is_some_and(|given| !(1..=10_000).contains(&given)) {
        anyhow::bail!("{name} is a number of milliseconds from 1 to 10000");
    }
    Ok(milliseconds.map(|given| Duration::from_millis(given.into())))
}

/// Connects to Redis as the node of this name.
pub(super) async fn open(
    args: &ServeArgs,
    url: &RedisUrl,
    secrets: &Secrets,
    node: &str,
) -> anyhow::Result<Arc<RedisStore>> {
    let options = options(args, url, secrets)?.node(node);
    let store = RedisStore::open(options).await.with_context(|| url.to_string())?;
    for warning in store.warnings() {
        tracing::warn!(store = "redis", "{warning}");
    }
    Ok(Arc::new(store))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_store_is_named_by_its_url_and_shown_without_its_password() {
        let read = |text: &str| text.parse::<StoreUrl>();
        assert_eq!(read("memory").unwrap(), StoreUrl::Memory);
        let shown = |text: &str| read(text).unwrap().to_string();
        assert_eq!(shown("redis://127.0.0.1:6379"), "redis://127.0.0.1:6379");
        assert_eq!(shown("redis://user:p%40ss@db.example:6379/2"), "redis://db.example:6379/2");
        assert_eq!(shown("redis+unix:///run/redis.sock?db=1&pass=secret"), "redis+unix:///run/redis.sock?db=1");
        for (text, named) in
            [("rediss://a/1/2", "too many"), ("redis://u:p@ss@a", "%40"), ("mysql://a", "mysql"), ("redis", "memory")]
        {
            let error = read(text).unwrap_err().to_string();
            assert!(error.contains(named), "{error}");
        }
    }
}
