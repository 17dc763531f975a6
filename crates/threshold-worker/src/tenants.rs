//! The limits of tenants, from their `tenant.config.json` in a key-value namespace. They apply above those of the policy.

use std::collections::HashMap;
use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use futures_util::future::{Either, select};
use threshold_core::{Policy, Span, Timestamp};
use threshold_limiter::Clock as _;
use threshold_limiter::tenant_config::TenantConfig;
use worker::js_sys::{Object, Reflect};
use worker::kv::KvStore;
use worker::send::{SendFuture, SendWrapper};
use worker::{Delay, Env};

use crate::clock::DateClock;
use crate::guard::ObjectLimiter;
use crate::warnings::Warnings;

/// The namespace with the tenants' files. Under the same name another Worker may bind Durable Objects.
pub const TENANTS: &str = "TENANTS";
/// The name of a tenant's file, behind its name and a slash.
pub const FILE: &str = "tenant.config.json";

/// How long a file is in force before it is read again.
const FRESH: Span = Span::from_secs(10);
/// How long a request waits for a file.
const DEADLINE: Duration = Duration::from_secs(1);
/// The most tenants of an isolate. The names may come from clients.
const MAX_TENANTS: usize = 1_000;
/// The longest name, in bytes: a key of KV has 512, with the name of the file.
const MAX_NAME: usize = 480;

/// The files of the tenants that were seen lately.
pub struct Tenants {
    files: SendWrapper<KvStore>,
    limiter: Arc<ObjectLimiter>,
    known: Mutex<Known>,
    warnings: Warnings,
}

impl Tenants {
    /// Creates the tenants of a Worker that has the namespace.
    #[must_use]
    pub fn of(env: &Env, limiter: &Arc<ObjectLimiter>) -> Option<Self> {
        let binding = Reflect::get(env, &TENANTS.into()).ok().filter(|binding| !binding.is_undefined())?;
        if Object::from(binding).constructor().name() != "KvNamespace" {
            return None;
        }
        let files = SendWrapper::new(env.kv(TENANTS).ok()?);
        let known = Mutex::new(Known::new(limiter.policy()));
        Some(Self { files, limiter: Arc::clone(limiter), known, warnings: Warnings::default() })
    }

    /// Puts the limits in a tenant's file in force, if they were not read lately. While a file cannot be read or used, the tenant keeps
    /// the limits that it had.
    pub async fn load(&self, tenant: &str) {
        let now = DateClock.now();
        // A longer name has no key, and so no file.
        let fits = (1..=MAX_NAME).contains(&tenant.len());
        if !fits || !self.known().is_due(tenant, now) {
            return;
        }
        let file = self.read(tenant).await;
        let mut known = self.known();
        let emptied = known.note(tenant, now);
        let changed = file.and_then(|file| known.put(tenant, file.unwrap_or_default()));
        if emptied || changed == Ok(true) {
            self.limiter.swap(known.policy());
        }
        if let Err(reason) = changed {
            // A client may choose the name.
            self.warnings
                .warn(|| serde_json::json!({"event": "tenant_config_refused", "tenant": tenant, "reason": reason}));
        }
    }

    /// Reads and parses a tenant's file.
    async fn read(&self, tenant: &str) -> Result<Option<TenantConfig>, String> {
        let name = format!("{tenant}/{FILE}");
        let read = SendFuture::new(async {
            let (file, deadline) = (self.files.get(&name).bytes(), Delay::from(DEADLINE));
            match select(std::pin::pin!(file), std::pin::pin!(deadline)).await {
                // Its first line: the others are a stack of JavaScript.
                Either::Left((file, _)) => {
                    file.map_err(|error| error.to_string().lines().next().unwrap_or_default().to_owned())
                }
                Either::Right(_) => Err("the namespace does not answer".to_owned()),
            }
        });
        let parsed = read.await?.map(|text| TenantConfig::parse(&text));
        parsed.transpose().map_err(|error| format!("{name}:{error}"))
    }

    fn known(&self) -> MutexGuard<'_, Known> {
        self.known.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl fmt::Debug for Tenants {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Tenants").finish_non_exhaustive()
    }
}

/// The limits that are in force, and when they were read.
#[derive(Debug)]
struct Known {
    /// The policy without any of them.
    policy: Arc<Policy>,
    tenants: HashMap<Box<str>, Entry>,
}

#[derive(Debug, Default)]
struct Entry {
    limits: TenantConfig,
    read_at: Timestamp,
}

impl Known {
    fn new(policy: Arc<Policy>) -> Self {
        Self { policy, tenants: HashMap::new() }
    }

    /// Returns whether a tenant's file must be read. Those who ask meanwhile use what is in force.
    fn is_due(&mut self, tenant: &str, now: Timestamp) -> bool {
        match self.tenants.get_mut(tenant) {
            Some(entry) if now.since(entry.read_at) < FRESH => false,
            Some(entry) => {
                entry.read_at = now;
                true
            }
            None => true,
        }
    }

    /// Notes when a tenant's file was read. Returns whether the limits of all tenants were dropped, because there are too many; they
    /// are read again when the next request of their tenant comes.
    fn note(&mut self, tenant: &str, now: Timestamp) -> bool {
        let full = !self.tenants.contains_key(tenant) && self.tenants.len() >= MAX_TENANTS;
        if full {
            self.tenants.clear();
        }
        self.tenants.entry(tenant.into()).or_default().read_at = now;
        full
    }

    /// Takes the limits of a tenant, if they fit the policy. Returns whether they are others than before.
    fn put(&mut self, tenant: &str, limits: TenantConfig) -> Result<bool, String> {
        let entry = self.tenants.entry(tenant.into()).or_default();
        if entry.limits == limits {
            return Ok(false);
        }
        limits.apply(&mut (*self.policy).clone(), tenant).map_err(|error| format!("{tenant}/{FILE}: {error}"))?;
        entry.limits = limits;
        Ok(true)
    }

    /// Returns the policy with the limits of all tenants.
    fn policy(&self) -> Policy {
        let mut policy = (*self.policy).clone();
        for (tenant, entry) in &self.tenants {
            // Each of them was applied before it was taken.
            let _ = entry.limits.apply(&mut policy, tenant);
        }
        policy
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const POLICY: &str = r#"
        [identity]
        default_tier = "default"
        [tiers.default]
        requests = "60/min"
        [[rule]]
        name = "per-minute"
        per = ["tenant"]
        limit = "tier"
    "#;

    fn known() -> Known {
        Known::new(Arc::new(Policy::parse(POLICY, &|_| None).unwrap()))
    }

    fn limits(per_minute: u64) -> TenantConfig {
        TenantConfig::parse(format!(r#"{{"rateLimit": {{"perMinute": {per_minute}}}}}"#).as_bytes()).unwrap()
    }

    #[test]
    fn a_file_is_read_again_after_a_while() {
        let (mut known, start) = (known(), Timestamp::from_micros(1_000_000_000));
        assert!(known.is_due("acme", start));
        known.note("acme", start);
        assert!(!known.is_due("acme", start.plus(FRESH).minus(Span::SECOND)));
        assert!(known.is_due("acme", start.plus(FRESH)));
        assert!(!known.is_due("acme", start.plus(FRESH)), "one reader is enough");
    }

    #[test]
    fn limits_are_taken_and_dropped() {
        let mut known = known();
        assert_eq!(known.put("acme", limits(5)), Ok(true));
        assert_eq!(known.put("acme", limits(5)), Ok(false), "nothing has changed");
        let burst = TenantConfig::parse(br#"{"rateLimit": {"burst": 5}}"#).unwrap();
        let refused = known.put("acme", burst).unwrap_err();
        assert!(refused.starts_with("acme/tenant.config.json: rateLimit.burst: "), "{refused}");
        assert_eq!(known.put("acme", limits(5)), Ok(false), "what does not fit changes nothing");
        assert_eq!(known.put("acme", TenantConfig::default()), Ok(true), "a removed file");
    }

    #[test]
    fn a_flood_of_names_is_bounded() {
        let (mut known, start) = (known(), Timestamp::from_micros(1_000_000_000));
        let emptied = (0..MAX_TENANTS * 3).filter(|number| {
            let emptied = known.note(&format!("t{number}"), start);
            assert!(known.tenants.len() <= MAX_TENANTS);
            emptied
        });
        assert_eq!(emptied.count(), 2);
        assert!(!known.is_due(&format!("t{}", MAX_TENANTS * 3 - 1), start));
    }
}
