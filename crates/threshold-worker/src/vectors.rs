//! Plays the conformance vectors inside of the Worker, for tests/vectors.mjs.
//!
//! One request has a file of cases and names the store to play them on. The limiter, its verbs and the comparison are those of the
//! tests on other targets.

use std::collections::BTreeMap;
use std::sync::Arc;

use serde::{Deserialize, Serialize};
use serde_json::Value;
use threshold_core::case::{Ask, Case, CaseFile, Lines, Play};
use threshold_core::{DigestKey, Policy, Secret, Timestamp};
use threshold_limiter::limiter::LimiterBuilder;
use threshold_limiter::store::Store;
use threshold_limiter::{Limiter, ManualClock};
use worker::{Env, HttpRequest, Request, Response, Result, js_sys};

use crate::store::ObjectStore;
use key_value::KeyValueStore;

#[path = "../../threshold-limiter/tests/stores/key_value.rs"]
#[expect(clippy::unwrap_used, reason = "it is shared with the tests of the limiter")]
mod key_value;
#[path = "../../threshold-limiter/tests/stores/verbs.rs"]
#[expect(clippy::unwrap_used, reason = "it is shared with the tests of the limiter")]
mod verbs;

/// What a test asks for.
#[derive(Deserialize)]
struct Asked {
    /// The name of the store.
    store: String,
    /// A file of cases.
    file: CaseFile,
    /// The policy of cases that have none.
    preset: Option<String>,
}

/// The result of a file.
#[derive(Serialize)]
struct Played {
    passed: usize,
    failures: Vec<String>,
}

/// How a kind of store is made for each case.
trait World {
    type Store: Store;

    /// Makes an empty store.
    fn store(&self) -> Self::Store;

    /// Prepares the store for a call at this time: a store with a clock of its own sets it, and one that works after its answers
    /// waits for that.
    async fn prepare(&self, store: &Self::Store, now: Timestamp) {
        let _ = (store, now);
    }
}

/// A store of bytes in memory.
struct KeyValue;

impl World for KeyValue {
    type Store = KeyValueStore;

    fn store(&self) -> KeyValueStore {
        KeyValueStore::default()
    }
}

/// Durable Objects. Objects outlive a case, so each case has names of its own.
struct Objects(Env);

impl World for Objects {
    type Store = ObjectStore;

    fn store(&self) -> ObjectStore {
        ObjectStore::with_prefix(self.0.clone(), format!("{}:", js_sys::Math::random()))
    }

    async fn prepare(&self, store: &ObjectStore, now: Timestamp) {
        // What the call before has to give back comes after its answer, and before the time of the next one.
        store.send_later().await;
        store.set_now(now);
    }
}

/// Plays a file of cases, and answers how many have passed and why others have not.
pub(crate) async fn play_all(request: HttpRequest, env: Env) -> Result<Response> {
    let asked: Asked = Request::try_from(request)?.json().await?;
    let played = match asked.store.as_str() {
        "key-value" => play_file(&KeyValue, &asked).await,
        "objects" => play_file(&Objects(env), &asked).await,
        _ => return Response::error("unknown store", 400),
    };
    Response::from_json(&played)
}

async fn play_file<W: World>(world: &W, asked: &Asked) -> Played {
    let preset = asked.file.policy.as_ref().map(Lines::text).or_else(|| asked.preset.clone());
    let mut played = Played { passed: 0, failures: Vec::new() };
    for case in &asked.file.cases {
        match play_case(world, case, preset.as_deref()).await {
            Ok(()) => played.passed = played.passed.saturating_add(1),
            Err(failure) => played.failures.push(failure),
        }
    }
    played
}

/// A case that is being played.
struct Playing<'w, W: World> {
    world: &'w W,
    clock: Arc<ManualClock>,
    limiter: Option<Limiter<W::Store, Arc<ManualClock>>>,
}

async fn play_case<W: World>(world: &W, case: &Case, preset: Option<&str>) -> core::result::Result<(), String> {
    let mut playing = Playing { world, clock: Arc::default(), limiter: None };
    let mut play = Play::new(case, preset).map_err(|failure| failure.to_string())?;
    while let Some(ask) = play.next_ask().map_err(|failure| failure.to_string())? {
        let answered = match ask {
            Ask::Load { policy, fresh } => playing.load(policy, &case.env, fresh),
            Ask::Call { verb, args, now } => playing.call(verb, args, now).await,
        };
        play.answer(answered).map_err(|failure| failure.to_string())?;
    }
    Ok(())
}

impl<W: World> Playing<'_, W> {
    fn load(
        &mut self,
        policy: &str,
        env: &BTreeMap<String, String>,
        fresh: bool,
    ) -> core::result::Result<Value, String> {
        let policy = Policy::parse(policy, &|name| env.get(name).cloned()).map_err(|error| error.to_string())?;
        match &self.limiter {
            Some(limiter) if !fresh => {
                limiter.swap(policy);
            }
            _ => {
                let secret = Secret::new(&[9; 32]).expect("32 bytes are enough for a secret");
                let builder = LimiterBuilder::new(policy, self.world.store(), Arc::clone(&self.clock));
                self.limiter = Some(
                    builder
                        .digest_key(DigestKey::new([7; 16]))
                        .secrets(secret)
                        .build()
                        .map_err(|error| error.to_string())?,
                );
            }
        }
        Ok(Value::Null)
    }

    async fn call(&self, verb: &str, args: &Value, now: Timestamp) -> core::result::Result<Value, String> {
        let limiter = self.limiter.as_ref().ok_or("a case begins with its policy")?;
        self.clock.set(now);
        self.world.prepare(limiter.store(), now).await;
        verbs::answer(limiter, verb, args).await
    }
}
