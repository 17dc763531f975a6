//! The store that `--store` names.

use std::fmt;
use std::str::FromStr;

use anyhow::Context as _;
use threshold_core::{KeyId, Secret, Secrets};
use threshold_limiter::store::AnyStore;
use threshold_limiter::store::redis::{RedisOptions, RedisStore, RedisUrl};

use crate::cli::ServeArgs;

/// Where records are stored.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) enum StoreUrl {
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
        if let Some(store) = &args.store {
            return Ok(store.clone());
        }
        match std::env::var("THRESHOLD_STORE") {
            Ok(text) if !text.trim().is_empty() => text.trim().parse().context("THRESHOLD_STORE"),
            Ok(_) => anyhow::bail!("THRESHOLD_STORE is set but empty: give a URL, or unset it"),
            Err(std::env::VarError::NotPresent) => Ok(Self::Memory),
            Err(std::env::VarError::NotUnicode(_)) => anyhow::bail!("THRESHOLD_STORE is not UTF-8"),
        }
    }
}

/// Makes the secrets of a server on a shared store. They must be given: all nodes need the same.
pub(super) fn secrets(present: Option<&str>, old: Option<&str>) -> anyhow::Result<Secrets> {
    let secret = |text: Option<&str>| text.and_then(|text| Secret::new(text.as_bytes()));
    let present = secret(present).context(
        "a shared store needs THRESHOLD_SECRET, the same on every node: generate one with `openssl rand -hex 32`",
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

/// Connects to a Redis server.
pub(super) async fn open(url: &RedisUrl, secrets: &Secrets) -> anyhow::Result<AnyStore> {
    let old: Option<KeyId> = secrets.old().map(Secret::key_id);
    let options = RedisOptions::new(url.clone(), secrets.present().key_id()).old_key(old);
    let store = RedisStore::open(options).await.with_context(|| url.to_string())?;
    for warning in store.warnings() {
        tracing::warn!(store = "redis", "{warning}");
    }
    Ok(AnyStore::other(store))
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
            [("rediss://a/b/c", "too many"), ("redis://u:p@ss@a", "%40"), ("mysql://a", "mysql"), ("redis", "memory")]
        {
            let error = read(text).unwrap_err().to_string();
            assert!(error.contains(named), "{error}");
        }
    }
}
