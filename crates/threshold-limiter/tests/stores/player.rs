//! Plays the test vectors in `conformance/` with each of the limiter's verbs, on any store.

use std::collections::BTreeMap;
use std::future::Future;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use serde_json::Value;
use threshold_core::case::{CaseFile, Lines, Player, play};
use threshold_core::{DigestKey, Timestamp};
use threshold_limiter::store::{Store, at_once};
use threshold_limiter::{Limiter, ManualClock, Policy, Secret};
use tokio::runtime::{Builder, Runtime};

#[path = "verbs.rs"]
mod verbs;

/// A limiter on one kind of store, and the runtime that drives its futures.
struct Played<'w, S> {
    world: &'w dyn World<S>,
    runtime: Runtime,
    clock: Arc<ManualClock>,
    limiter: Option<Limiter<S, Arc<ManualClock>>>,
    /// Whether the case has made a reservation, which may expire.
    reserves: bool,
}

/// How a kind of store is made for each case.
pub(crate) trait World<S> {
    /// Makes an empty store.
    fn store(&self, policy: &Policy, runtime: &Runtime) -> S;

    /// Sets the clock of a store that has one of its own.
    fn set_time(&self, now: Timestamp) {
        let _ = now;
    }

    /// Waits for what the store does after its answers. It ends reservations that have expired if the case `reserves`.
    fn settle_down(&self, store: &S, reserves: bool, runtime: &Runtime) {
        let _ = (store, reserves, runtime);
    }
}

impl<S: Store> Played<'_, S> {
    fn wait_for<T>(&self, future: impl Future<Output = T> + Send) -> T {
        if self.limiter().store().answers_at_once() { at_once(future) } else { self.runtime.block_on(future) }
    }
}

impl<S: Store> Player for Played<'_, S> {
    fn load(&mut self, policy: &str, env: &BTreeMap<String, String>, fresh: bool) -> Result<(), String> {
        let policy = Policy::parse(policy, &|name| env.get(name).cloned()).map_err(|error| error.to_string())?;
        match &self.limiter {
            Some(limiter) if !fresh => {
                limiter.swap(policy);
            }
            _ => {
                let (store, key) = (self.world.store(&policy, &self.runtime), DigestKey::new([7; 16]));
                let secret = Secret::new(&[9; 32]).unwrap();
                self.limiter = Some(
                    Limiter::builder(policy)
                        .store(store)
                        .clock(Arc::clone(&self.clock))
                        .digest_key(key)
                        .secrets(secret)
                        .build()
                        .unwrap(),
                );
            }
        }
        Ok(())
    }

    fn call(&mut self, verb: &str, args: &Value, now: Timestamp) -> Result<Value, String> {
        self.clock.set(now);
        self.world.set_time(now);
        self.world.settle_down(self.limiter().store(), self.reserves, &self.runtime);
        self.reserves |= verb == "reserve";
        self.wait_for(verbs::answer(self.limiter(), verb, args))
    }
}

impl<S: Store> Played<'_, S> {
    fn limiter(&self) -> &Limiter<S, Arc<ManualClock>> {
        self.limiter.as_ref().expect("a case begins with its policy")
    }
}

/// Returns the vectors, and the cases of the presets with the text of their presets.
fn files() -> Vec<(PathBuf, Option<String>)> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    let listed = |folder: PathBuf| std::fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path());
    let vectors = listed(root.join("conformance")).map(|path| (path, None));
    let presets = listed(root.join("policies/cases")).map(|path| {
        let preset = root.join("policies").join(path.file_name().unwrap()).with_extension("toml");
        (path, Some(std::fs::read_to_string(preset).unwrap()))
    });
    vectors.chain(presets).collect()
}

/// Plays every case on a store of its own. Those that `differ` must fail, so that the list stays short.
#[track_caller]
pub(crate) fn check<S: Store>(world: &dyn World<S>, differ: &[&str]) {
    let (mut failures, mut count) = (Vec::new(), 0);
    for (path, preset) in files() {
        let file: CaseFile = serde_json::from_str(&std::fs::read_to_string(&path).unwrap()).unwrap();
        let shared = file.policy.as_ref().map(Lines::text).or(preset);
        for case in &file.cases {
            count += 1;
            let runtime = Builder::new_current_thread().enable_all().build().unwrap();
            let mut player = Played { world, runtime, clock: Arc::default(), limiter: None, reserves: false };
            let file = path.file_name().unwrap().display();
            match (play(case, shared.as_deref(), &mut player), differ.contains(&case.name.as_str())) {
                (Err(failure), false) => failures.push(format!("{file}: {failure}")),
                (Ok(()), true) => failures.push(format!("{file}: {} is played as on one server", case.name)),
                _ => {}
            }
        }
    }
    assert!(failures.is_empty(), "{} of {count} cases failed:\n{}", failures.len(), failures.join("\n"));
}
