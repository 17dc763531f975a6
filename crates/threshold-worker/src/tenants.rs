//! The limits of tenants, from their `tenant.config.json` in a key-value namespace. They apply above those of the policy.
//!
//! The limits of the last good file stay in force while a later one cannot be used. They are kept beside it, for isolates that have not
//! seen it.

use std::collections::HashMap;
use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use futures_util::future::{Either, select};
use serde_json::Value;
use threshold_core::{Policy, Span, Timestamp};
use threshold_limiter::Clock as _;
use threshold_wire::tenant_config::TenantConfig;
use worker::js_sys::{Object, Reflect};
use worker::kv::{KvError, KvStore};
use worker::send::{SendFuture, SendWrapper};
use worker::{Delay, Env};

use crate::clock::DateClock;
use crate::events::Events;
use crate::guard::ObjectLimiter;
use crate::warnings::Warnings;

/// The namespace with the tenants' files. Under the same name another Worker may bind Durable Objects.
pub const TENANTS: &str = "TENANTS";
/// The name of a tenant's file, behind its name and a slash.
pub const FILE: &str = "tenant.config.json";
/// The name of the copy of the limits in the last good file.
const KEPT: &str = "tenant.config.last-good.json";

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
    events: Arc<Events>,
    known: Mutex<Known>,
    /// The tenants whose limits were not compared with their copies yet. Each answer takes all of them.
    unkept: Mutex<Vec<Box<str>>>,
    warnings: Warnings,
}

impl Tenants {
    /// Creates the tenants of a Worker that has the namespace.
    #[must_use]
    pub(crate) fn of(env: &Env, limiter: &Arc<ObjectLimiter>, events: &Arc<Events>) -> Option<Self> {
        let binding = Reflect::get(env, &TENANTS.into()).ok().filter(|binding| !binding.is_undefined())?;
        if Object::from(binding).constructor().name() != "KvNamespace" {
            return None;
        }
        Some(Self {
            files: SendWrapper::new(env.kv(TENANTS).ok()?),
            limiter: Arc::clone(limiter),
            events: Arc::clone(events),
            known: Mutex::new(Known::new(limiter.policy())),
            unkept: Mutex::default(),
            warnings: Warnings::default(),
        })
    }

    /// Puts the limits in a tenant's file in force, if they were not read lately. While a file cannot be read or used, the limits of
    /// the last good one stay.
    pub async fn load(&self, tenant: &str) {
        let now = DateClock.now();
        // A longer name has no key, and so no file.
        let fits = (1..=MAX_NAME).contains(&tenant.len());
        if !fits || !self.known().is_due(tenant, now) {
            return;
        }
        let file = self.read(tenant, FILE).await;
        let (emptied, taken) = {
            let mut known = self.known();
            (known.note(tenant, now), file.and_then(|file| known.put(tenant, file)))
        };
        let changed = match taken {
            Ok(changed) => {
                let mut unkept = self.unkept();
                if changed && unkept.len() < MAX_TENANTS {
                    unkept.push(tenant.into());
                }
                changed
            }
            Err(reason) => self.refuse(tenant, &reason, now).await,
        };
        if emptied || changed {
            let policy = self.known().policy();
            self.limiter.swap(policy);
        }
    }

    /// Reports why a file is not used, once until it has another mistake. An isolate that has seen no good file takes the copy of the
    /// last one. Returns whether that has changed the limits.
    async fn refuse(&self, tenant: &str, reason: &str, now: Timestamp) -> bool {
        let mut changed = false;
        if self.known().good(tenant).is_none()
            && let Ok(Some(kept)) = self.read(tenant, KEPT).await
        {
            // One that does not fit the policy any more is none.
            changed = self.known().put(tenant, Some(kept)) == Ok(true);
        }
        let mut known = self.known();
        if known.is_refused(tenant, reason) {
            return changed;
        }
        let in_force = known.good(tenant).map_or_else(|| "the policy".into(), |limits| to_json(&limits));
        // A client may choose the name, and the namespace may be down for every tenant.
        let is_logged = self.warnings.warn(|| {
            serde_json::json!({"event": "tenant_config_refused", "tenant": tenant, "reason": reason, "inForce": in_force})
        });
        if is_logged {
            known.note_refused(tenant, reason);
            self.events.note_refused(tenant, FILE, now);
        }
        changed
    }

    /// Keeps a copy of the limits that have changed, where there is another one. A Worker calls it after the answer.
    pub(crate) async fn keep(&self) {
        let unkept = std::mem::take(&mut *self.unkept());
        for tenant in unkept {
            let limits = self.known().good(&tenant).unwrap_or_default();
            let kept = self.read(&tenant, KEPT).await;
            if kept.is_ok_and(|kept| kept.unwrap_or_default() == limits) {
                continue;
            }
            if let Err(error) = SendFuture::new(self.write(&tenant, limits)).await {
                let reason = error.to_string();
                self.warnings.warn(
                    || serde_json::json!({"event": "tenant_config_not_kept", "tenant": tenant, "reason": reason}),
                );
            }
        }
    }

    async fn write(&self, tenant: &str, limits: TenantConfig) -> Result<(), KvError> {
        let name = format!("{tenant}/{KEPT}");
        if limits == TenantConfig::default() {
            return self.files.delete(&name).await;
        }
        self.files.put(&name, serde_json::json!({"rateLimit": to_json(&limits)}).to_string())?.execute().await
    }

    /// Reads and parses a file of a tenant.
    async fn read(&self, tenant: &str, file: &str) -> Result<Option<TenantConfig>, String> {
        let name = format!("{tenant}/{file}");
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

    fn unkept(&self) -> MutexGuard<'_, Vec<Box<str>>> {
        self.unkept.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn to_json(limits: &TenantConfig) -> Value {
    serde_json::json!({"perMinute": limits.per_minute, "burst": limits.burst})
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
    /// Whether the limits are those of a good file: without one they are the policy's.
    is_good: bool,
    /// What was reported of the present file.
    refused: Option<Box<str>>,
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

    /// Takes the limits of a tenant's file, if they fit the policy; without a file, those of the policy. Returns whether they are
    /// others than before.
    fn put(&mut self, tenant: &str, file: Option<TenantConfig>) -> Result<bool, String> {
        let limits = file.unwrap_or_default();
        let entry = self.tenants.entry(tenant.into()).or_default();
        let changed = entry.limits != limits;
        if changed {
            limits.apply(&mut (*self.policy).clone(), tenant).map_err(|error| format!("{tenant}/{FILE}: {error}"))?;
        }
        *entry = Entry { limits, read_at: entry.read_at, is_good: file.is_some(), refused: None };
        Ok(changed)
    }

    /// Returns the limits of the last good file; `None` if none was seen.
    fn good(&self, tenant: &str) -> Option<TenantConfig> {
        self.tenants.get(tenant).filter(|entry| entry.is_good).map(|entry| entry.limits)
    }

    /// Returns whether this mistake is the last that was reported.
    fn is_refused(&self, tenant: &str, reason: &str) -> bool {
        self.tenants.get(tenant).and_then(|entry| entry.refused.as_deref()) == Some(reason)
    }

    fn note_refused(&mut self, tenant: &str, reason: &str) {
        if let Some(entry) = self.tenants.get_mut(tenant) {
            entry.refused = Some(reason.into());
        }
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

    fn limits(per_minute: u64) -> Option<TenantConfig> {
        TenantConfig::parse(format!(r#"{{"rateLimit": {{"perMinute": {per_minute}}}}}"#).as_bytes()).ok()
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
        let refused = known.put("acme", Some(burst)).unwrap_err();
        assert!(refused.starts_with("acme/tenant.config.json: rateLimit.burst: "), "{refused}");
        assert_eq!(known.put("acme", limits(5)), Ok(false), "what does not fit changes nothing");
        assert_eq!(known.good("acme"), limits(5));
        known.note_refused("acme", &refused);
        assert!(known.is_refused("acme", &refused) && !known.is_refused("acme", "another mistake"));
        assert_eq!(known.put("acme", limits(5)), Ok(false));
        assert!(!known.is_refused("acme", &refused), "after a good file it is reported again");
        assert_eq!(known.put("acme", None), Ok(true), "a removed file");
        assert_eq!(known.good("acme"), None);
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
