//! The store of a Worker: Durable Objects, each with the records of one identity.

mod places;
mod rekey;

use std::fmt;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use futures_util::future::{Either, join_all, select};
use threshold_core::bill::Charge;
use threshold_core::key::Partition;
use threshold_core::plan::Subject;
use threshold_core::policy::Placed;
use threshold_core::{Answer, Command, Digest, Format, Outcome, Plan, Timestamp, TraceId};
use threshold_limiter::store::partitioned::{self, PartitionError, Partitions};
use threshold_limiter::store::{Kind, Listed, Store, StoreError};
use worker::send::{SendFuture, SendWrapper};
use worker::{Delay, Env, Method, Request, RequestInit, Response, console_warn, js_sys};

use crate::object::COMMAND;
use places::{Object, Places};

/// The binding of objects whose rule has no `place`.
pub const DEFAULT_BINDING: &str = "THRESHOLD";

/// How long a decision waits for an object. One that is started takes 100 to 500 ms, which is no outage.
const DEADLINE: Duration = Duration::from_secs(1);

/// Durable Objects as a store.
///
/// It is created once for each isolate. Commands that give back what another object has denied are sent after the answer:
/// [`send_later`](Self::send_later) sends them.
pub struct ObjectStore {
    env: SendWrapper<Env>,
    places: Mutex<Places>,
    later: Mutex<Vec<(Arc<Object>, Command)>>,
    /// The time that objects are told and the beginning of their names, in tests.
    #[cfg(feature = "vectors")]
    now: Mutex<Option<Timestamp>>,
    #[cfg(feature = "vectors")]
    prefix: String,
}

impl ObjectStore {
    /// Creates a store on the bindings of a Worker.
    #[must_use]
    pub fn new(env: Env) -> Self {
        Self {
            env: SendWrapper::new(env),
            places: Mutex::default(),
            later: Mutex::default(),
            #[cfg(feature = "vectors")]
            now: Mutex::default(),
            #[cfg(feature = "vectors")]
            prefix: String::new(),
        }
    }

    /// Creates a store whose objects have names of its own.
    #[cfg(feature = "vectors")]
    pub(crate) fn with_prefix(env: Env, prefix: String) -> Self {
        Self { prefix, ..Self::new(env) }
    }

    /// Sends the commands that give something back, and waits for them. A Worker calls it after each request, with `waitUntil`.
    pub async fn send_later(&self) {
        let commands = std::mem::take(&mut *self.later.lock().unwrap_or_else(PoisonError::into_inner));
        // What fails here stays charged until its window ends: its outcome is unknown, and giving back twice would let too much
        // through.
        join_all(commands.into_iter().map(|(object, command)| self.send(object, command))).await;
    }

    /// Sets the time of all objects.
    #[cfg(feature = "vectors")]
    pub(crate) fn set_now(&self, now: Timestamp) {
        *self.now.lock().unwrap_or_else(PoisonError::into_inner) = Some(now);
    }

    fn call(&self) -> Call<'_> {
        Call { store: self, objects: Mutex::default() }
    }

    /// Returns the binding and the name of the object of a key that was planned lately.
    pub(crate) fn named(&self, key: Digest) -> Option<(String, String)> {
        self.place(key).map(|object| (object.binding.clone(), object.name.clone()))
    }

    /// Remembers the object of a key.
    pub(crate) fn learn(&self, key: Digest, binding: &str, name: String) {
        self.places.lock().unwrap_or_else(PoisonError::into_inner).insert(key, binding, name);
    }

    fn place(&self, key: Digest) -> Option<Arc<Object>> {
        self.places.lock().unwrap_or_else(PoisonError::into_inner).get(key)
    }

    /// Sends a command to an object and waits for its answer, at most until the deadline.
    async fn send(&self, object: Arc<Object>, command: Command) -> Result<Answer, StoreError> {
        let bytes = self.exchange(&object, COMMAND, &command.to_bytes(Format::PRESENT)).await?;
        Answer::from_bytes(&bytes).map_err(|_| StoreError::Unavailable)
    }

    /// Sends a body to a path of an object and waits for its answer, at most until the deadline.
    async fn exchange(&self, object: &Object, path: &str, body: &[u8]) -> Result<Vec<u8>, StoreError> {
        SendFuture::new(async move {
            let deadline = Delay::from(DEADLINE);
            let sent = std::pin::pin!(self.fetch(object, path, body));
            match select(sent, std::pin::pin!(deadline)).await {
                Either::Left((answered, _)) => answered,
                Either::Right(_) => Err(StoreError::Timeout),
            }
        })
        .await
    }

    async fn fetch(&self, object: &Object, path: &str, body: &[u8]) -> Result<Vec<u8>, StoreError> {
        let mut response = match self.ask(object, path, body).await {
            Ok(response) => response,
            Err(error) => {
                let text = error.to_string();
                console_warn!(
                    "{}",
                    serde_json::json!({"event": "object_failed", "binding": object.binding, "reason": text})
                );
                // An object that is overloaded has refused the call; any other failure may have come after it was executed.
                return Err(if is_overloaded(&error) { StoreError::Unavailable } else { StoreError::Timeout });
            }
        };
        match response.status_code() {
            200 => response.bytes().await.map_err(|_| StoreError::Timeout),
            507 => Err(StoreError::Full),
            // It has answered that it did not execute the command.
            _ => Err(StoreError::Unavailable),
        }
    }

    async fn ask(&self, object: &Object, path: &str, body: &[u8]) -> worker::Result<Response> {
        let namespace = self.env.durable_object(&object.binding)?;
        #[cfg(not(feature = "vectors"))]
        let stub = namespace.get_by_name(&object.name)?;
        #[cfg(feature = "vectors")]
        let stub = namespace.get_by_name(&format!("{}{}", self.prefix, object.name))?;
        let body = js_sys::Uint8Array::from(body);
        let mut init = RequestInit::new();
        init.with_method(Method::Post).with_body(Some(body.into()));
        #[cfg(feature = "vectors")]
        if let Some(now) = *self.now.lock().unwrap_or_else(PoisonError::into_inner) {
            let headers = worker::Headers::new();
            headers.set(crate::object::NOW, &now.micros().to_string())?;
            init.with_headers(headers);
        }
        // Only the path is read; a URL needs a host.
        stub.fetch_with_request(Request::new_with_init(&format!("https://object{path}"), &init)?).await
    }
}

/// Returns whether the platform has refused a call because the object has too many. Such a call must not be repeated.
fn is_overloaded(error: &worker::Error) -> bool {
    let value = error.to_js_value();
    js_sys::Reflect::get(&value, &"overloaded".into()).is_ok_and(|overloaded| overloaded.is_truthy())
}

impl Store for ObjectStore {
    fn learn_places<'p>(&self, places: &mut dyn FnMut() -> Vec<Placed<'p>>) {
        let mut known = self.places.lock().unwrap_or_else(PoisonError::into_inner);
        for placed in places() {
            let binding = placed.binding.unwrap_or(DEFAULT_BINDING);
            known.insert(placed.key, binding, placed.name);
        }
    }

    async fn settle(&self, plan: &Plan<'_>, _: Timestamp, outcome: &mut Outcome) -> Result<(), StoreError> {
        let bill = Box::new(plan.bill().to_owned());
        let charges = plan.charges().iter().map(Charge::key);
        let keys = charges.chain(plan.subjects().iter().map(Subject::key));
        // In another object a budget would be full again.
        if keys.into_iter().any(|key| self.place(key).is_none()) {
            return Err(StoreError::Unavailable);
        }
        *outcome = partitioned::settle(&self.call(), bill).await?;
        Ok(())
    }

    async fn execute(&self, command: Command, _: Timestamp) -> Result<Answer, StoreError> {
        match command {
            Command::Rekey(moves) => self.rekey(moves).await,
            command => partitioned::execute(&self.call(), command).await,
        }
    }

    /// Fails: Cloudflare has no way to ask all objects.
    async fn list(&self, _: Kind, _: Option<Digest>, _: usize, _: Timestamp) -> Result<Vec<Listed>, StoreError> {
        Err(StoreError::Unavailable)
    }
}

impl fmt::Debug for ObjectStore {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ObjectStore").finish_non_exhaustive()
    }
}

/// One call of the store. The objects that it uses are numbered in the order in which they are found.
struct Call<'s> {
    store: &'s ObjectStore,
    objects: Mutex<Vec<Arc<Object>>>,
}

impl Call<'_> {
    fn number(&self, object: Arc<Object>) -> Partition {
        let mut objects = self.objects.lock().unwrap_or_else(PoisonError::into_inner);
        let known = objects.iter().position(|own| *own == object);
        let number = known.unwrap_or_else(|| {
            objects.push(object);
            objects.len().saturating_sub(1)
        });
        Partition::from_u16(u16::try_from(number).unwrap_or(u16::MAX))
    }

    fn object(&self, partition: Partition) -> Option<Arc<Object>> {
        let objects = self.objects.lock().unwrap_or_else(PoisonError::into_inner);
        objects.get(usize::from(partition.to_u16())).cloned()
    }
}

impl Partitions for Call<'_> {
    fn partition(&self, key: Digest) -> Partition {
        // A key that no policy has named, as that of a limit without a policy, is the name of its object itself.
        let by_key = || Object::new(DEFAULT_BINDING, format!("key:{:032x}", key.to_u128()));
        self.number(self.store.place(key).unwrap_or_else(|| Arc::new(by_key())))
    }

    async fn execute(&self, partition: Partition, command: Command) -> Result<Answer, PartitionError> {
        let object = self.object(partition).ok_or(StoreError::Unavailable)?;
        Ok(self.store.send(object, command).await?)
    }

    fn home(&self, id: TraceId) -> Partition {
        self.number(Arc::new(Object::new(DEFAULT_BINDING, format!("id:{id}"))))
    }

    fn execute_later(&self, commands: Vec<(Partition, Command)>) {
        let commands = commands.into_iter().filter_map(|(partition, command)| Some((self.object(partition)?, command)));
        self.store.later.lock().unwrap_or_else(PoisonError::into_inner).extend(commands);
    }
}
