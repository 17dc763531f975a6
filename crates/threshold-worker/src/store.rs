//! The store of a Worker: Durable Objects, each with the records of one identity, and KV for eventual rules.

mod kv;
mod places;
mod rekey;

use std::fmt;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use futures_util::future::{Either, join_all, select};
use threshold_core::bill::Charge;
use threshold_core::decision::Degraded;
use threshold_core::key::Partition;
use threshold_core::plan::{Subject, Verb};
use threshold_core::policy::{Consistency, OnStoreError, Placed};
use threshold_core::receipt::HoldTerms;
use threshold_core::split::{Mixed, Side};
use threshold_core::{Answer, Balance, Command, Digest, Format, Outcome, OwnedBill, Plan, Timestamp, TraceId};
use threshold_limiter::store::partitioned::{self, PartitionError, Partitions};
use threshold_limiter::store::{Kind, Listed, Store, StoreError};
use worker::send::{SendFuture, SendWrapper};
use worker::{Delay, Env, Method, Request, RequestInit, Response, js_sys};

use crate::object::COMMAND;
use crate::warnings::Warnings;
pub use kv::DEFAULT_NAMESPACE;
use kv::{Kv, KvCharge, KvFailure};
use places::{Place, Places};

/// The binding of objects whose rule has no `place`.
pub const DEFAULT_BINDING: &str = "THRESHOLD";

/// How long a decision waits for an object. One that is started takes 100 to 500 ms, which is no outage.
const DEADLINE: Duration = Duration::from_secs(1);

/// Durable Objects as a store, and KV for eventual rules.
///
/// It is created once for each isolate. Commands that give back what another object has denied, and writes of KV that follow another
/// one within a second, are sent after the answer: [`send_later`](Self::send_later) sends them.
pub struct ObjectStore {
    env: SendWrapper<Env>,
    places: Mutex<Places>,
    kv: Kv,
    warnings: Warnings,
    /// Warnings of decisions that were made without the store.
    undecided: Warnings,
    later: Mutex<Vec<(Arc<Place>, Command)>>,
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
            kv: Kv::new(env.clone()),
            env: SendWrapper::new(env),
            places: Mutex::default(),
            warnings: Warnings::default(),
            undecided: Warnings::default(),
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

    /// Sends the commands that give something back and the writes of KV that were put off, and waits for them. A Worker calls it after each request, with `waitUntil`.
    pub async fn send_later(&self) {
        let commands = std::mem::take(&mut *self.later.lock().unwrap_or_else(PoisonError::into_inner));
        // What fails here stays charged until its window ends: its outcome is unknown, and giving back twice would let too much
        // through.
        let given_back = join_all(commands.into_iter().map(|(object, command)| self.send(object, command)));
        futures_util::future::join(given_back, self.kv.flush()).await;
    }

    /// Sets the time of all objects.
    #[cfg(feature = "vectors")]
    pub(crate) fn set_now(&self, now: Timestamp) {
        *self.now.lock().unwrap_or_else(PoisonError::into_inner) = Some(now);
    }

    fn call(&self) -> Call<'_> {
        Call { store: self, objects: Mutex::default(), has_own_names: false }
    }

    /// Returns the binding and the name of the object of a key that was planned lately.
    pub(crate) fn named(&self, key: Digest) -> Option<(String, String)> {
        self.place(key).map(|object| (object.binding.clone(), object.name.clone()))
    }

    /// Remembers the object of a key.
    pub(crate) fn learn(&self, key: Digest, binding: &str, name: String) {
        self.places.lock().unwrap_or_else(PoisonError::into_inner).insert(key, Place::object(binding, name));
    }

    fn place(&self, key: Digest) -> Option<Arc<Place>> {
        self.places.lock().unwrap_or_else(PoisonError::into_inner).get(key)
    }

    /// Sends a command to an object and waits for its answer, at most until the deadline.
    async fn send(&self, object: Arc<Place>, command: Command) -> Result<Answer, StoreError> {
        let bytes = self.exchange(&object, COMMAND, &command.to_bytes(Format::PRESENT)).await?;
        Answer::from_bytes(&bytes).map_err(|_| StoreError::Unavailable)
    }

    /// Sends a body to a path of an object and waits for its answer, at most until the deadline.
    async fn exchange(&self, object: &Place, path: &str, body: &[u8]) -> Result<Vec<u8>, StoreError> {
        SendFuture::new(async move {
            let deadline = Delay::from(DEADLINE);
            let sent = std::pin::pin!(self.fetch(object, path, body));
            match select(sent, std::pin::pin!(deadline)).await {
                Either::Left((answered, _)) => answered,
                Either::Right(_) => {
                    self.warn(object, "the object did not answer in time");
                    Err(StoreError::Timeout)
                }
            }
        })
        .await
    }

    fn warn(&self, object: &Place, reason: &str) {
        self.warnings
            .warn(|| serde_json::json!({"event": "object_failed", "binding": object.binding, "reason": reason}));
    }

    async fn fetch(&self, object: &Place, path: &str, body: &[u8]) -> Result<Vec<u8>, StoreError> {
        let mut response = match self.ask(object, path, body).await {
            Ok(response) => response,
            Err(error) => {
                self.warn(object, &error.to_string());
                // An object that is overloaded has refused the call; any other failure may have come after it was executed.
                return Err(if is_overloaded(&error) { StoreError::Unavailable } else { StoreError::Timeout });
            }
        };
        match response.status_code() {
            200 => response.bytes().await.map_err(|_| StoreError::Timeout),
            status => {
                let text = response.text().await.unwrap_or_default();
                let first = text.lines().next().unwrap_or_default();
                self.warn(object, &format!("the object answered {status}: {first}"));
                // It has answered that it did not execute the command.
                Err(if status == 507 { StoreError::Full } else { StoreError::Unavailable })
            }
        }
    }

    async fn ask(&self, object: &Place, path: &str, body: &[u8]) -> worker::Result<Response> {
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

/// A record of KV that was read, or that its rule lets pass unread.
type Loaded<'c, 'p> = (&'c KvCharge<'p>, Option<Balance>);

impl ObjectStore {
    /// Settles a plan that has eventual rules: KV is looked at first, so that what it denies calls no object, and charged last.
    async fn settle_mixed(
        &self,
        plan: &Plan<'_>,
        eventual: &[KvCharge<'_>],
        hold: Option<&HoldTerms>,
        now: Timestamp,
    ) -> Result<Outcome, StoreError> {
        let mut degraded = None;
        let mut loaded: Vec<Loaded<'_, '_>> = Vec::with_capacity(eventual.len());
        for (charge, read) in eventual.iter().zip(self.kv.load(eventual, now).await) {
            let read = match read {
                Ok(balance) => Some(balance),
                Err(failure) => {
                    self.kv.warn_of(charge, &failure);
                    degraded = Some(failure.reason());
                    self.without_kv(charge, &failure, now)?
                }
            };
            loaded.push((charge, read));
        }
        let side = |key| match loaded.iter().find(|(charge, _)| charge.digest == key) {
            None => Side::Strong,
            Some((_, Some(_))) => Side::Eventual,
            Some((_, None)) => Side::Unread,
        };
        let mixed = Mixed::new(plan.bill().to_owned(), side);
        let read: Vec<_> = loaded.iter().filter_map(|(charge, read)| Some((*charge, read.clone()?))).collect();
        let settle =
            |charges| self.kv.settle(&mixed.eventual(charges).as_bill(), &read, now).map_err(|_| StoreError::Full);
        let strong = match mixed.strong() {
            None => None,
            Some(bill) => {
                let looked = settle(false)?;
                if mixed.eventual_denies(&looked) && plan.verb() == Verb::Check {
                    None
                } else {
                    let strong = self.settle_strong(bill, hold.map(|terms| mixed.strong_terms(terms))).await?;
                    if mixed.strong_denies(&strong) {
                        return Ok(degrade(mixed.join(Some(&strong), &looked), degraded));
                    }
                    Some(strong)
                }
            }
        };
        // Others may have charged while the objects were asked, so that it can deny now. This step has no await.
        let charged = settle(true);
        let is_denied = charged.as_ref().map_or(true, |charged| mixed.eventual_denies(charged));
        if let Some(command) = strong.as_ref().filter(|_| is_denied).and_then(|strong| mixed.give_back(strong)) {
            self.give_back_later(&command);
        }
        let charged = charged?;
        for (charge, failure) in self.kv.save(read.iter().map(|(charge, _)| *charge)).await {
            self.kv.warn_of(charge, &failure);
            degraded = Some(failure.reason());
            // What was charged stays in this isolate: whether KV has it is not known.
            if charge.on_error == OnStoreError::Closed && !is_denied && plan.verb() == Verb::Check {
                if let Some(command) = strong.as_ref().and_then(|strong| mixed.give_back(strong)) {
                    self.give_back_later(&command);
                }
                return Err(StoreError::Unavailable);
            }
        }
        let outcome = mixed.join(strong.as_ref(), &charged);
        // What an object holds is saved with it. Of what is in KV alone, somebody still ends the reservation.
        if let Some(terms) = hold.filter(|_| strong.is_none() && !is_denied) {
            self.execute(terms.saving(plan.holding(&outcome)), now).await?;
        }
        Ok(degrade(outcome, degraded))
    }

    async fn settle_or_hold(
        &self,
        plan: &Plan<'_>,
        hold: Option<&HoldTerms>,
        now: Timestamp,
        outcome: &mut Outcome,
    ) -> Result<(), StoreError> {
        let charges = plan.charges().iter().map(Charge::key);
        let keys = charges.chain(plan.subjects().iter().map(Subject::key));
        // In another object a budget would be full again.
        if keys.into_iter().any(|key| self.place(key).is_none()) {
            return Err(StoreError::Unavailable);
        }
        let eventual = Kv::charges(plan, now, |key| self.place(key));
        let settled = if eventual.is_empty() {
            self.settle_strong(plan.bill().to_owned(), hold.cloned()).await
        } else {
            self.settle_mixed(plan, &eventual, hold, now).await
        };
        *outcome = settled.inspect_err(|error| self.warn_of_plan(plan, *error))?;
        Ok(())
    }

    /// Settles a bill in the objects, and holds there what it charges.
    async fn settle_strong(&self, bill: OwnedBill, hold: Option<HoldTerms>) -> Result<Outcome, StoreError> {
        let settled = match hold {
            Some(terms) => partitioned::reserve(&self.call(), Box::new(bill), &terms).await,
            None => partitioned::settle(&self.call(), Box::new(bill)).await,
        };
        settled.map(|outcome| *outcome)
    }

    /// Logs which rules are decided without the store, and how.
    fn warn_of_plan(&self, plan: &Plan<'_>, error: StoreError) {
        self.undecided.warn(|| {
            let rules = plan.met().iter().map(threshold_core::plan::Met::rule);
            let rules = rules.map(|rule| (rule.name.to_string(), rule.on_store_error.name().into()));
            serde_json::json!({
                "event": "decided_without_store",
                "rules": rules.collect::<serde_json::Map<_, _>>(),
                "reason": error.to_string(),
            })
        });
    }

    /// Returns what a rule is decided by while KV fails; `None` lets the request pass.
    fn without_kv(
        &self,
        charge: &KvCharge<'_>,
        failure: &KvFailure,
        now: Timestamp,
    ) -> Result<Option<Balance>, StoreError> {
        match charge.on_error {
            OnStoreError::Open => Ok(None),
            OnStoreError::Closed => Err(StoreError::Unavailable),
            OnStoreError::Local if matches!(failure, KvFailure::Full) => Err(StoreError::Full),
            OnStoreError::Local => self.kv.local(charge, failure, now).map(Some).map_err(|_| StoreError::Full),
        }
    }

    /// Gives back what objects were charged, after the answer.
    fn give_back_later(&self, command: &Command) {
        let Command::GiveBack { receipt, credit } = command else { return };
        let call = self.call();
        call.execute_later(partitioned::giving_back(&call, receipt, *credit));
    }
}

fn degrade(mut outcome: Outcome, reason: Option<Degraded>) -> Outcome {
    if let Some(reason) = reason {
        outcome.degrade(reason);
    }
    outcome
}

/// Returns whether the platform has refused a call because the object has too many. Such a call must not be repeated.
fn is_overloaded(error: &worker::Error) -> bool {
    let value = error.to_js_value();
    js_sys::Reflect::get(&value, &"overloaded".into()).is_ok_and(|overloaded| overloaded.is_truthy())
}

impl Store for ObjectStore {
    fn learn_places<'p>(&self, places: &mut dyn FnMut() -> Vec<Placed<'p>>) {
        let mut known = self.places.lock().unwrap_or_else(PoisonError::into_inner);
        for Placed { key, binding, name, consistency } in places() {
            // The vectors are about objects, and what they say of eventual rules holds on every exact store.
            let is_eventual = consistency == Consistency::Eventual && !cfg!(feature = "vectors");
            let place = if is_eventual {
                Place { binding: binding.unwrap_or(DEFAULT_NAMESPACE).to_owned(), name, is_eventual }
            } else {
                let is_object = consistency != Consistency::Eventual;
                Place::object(binding.filter(|_| is_object).unwrap_or(DEFAULT_BINDING), name)
            };
            known.insert(key, place);
        }
    }

    async fn settle(&self, plan: &Plan<'_>, now: Timestamp, outcome: &mut Outcome) -> Result<(), StoreError> {
        self.settle_or_hold(plan, None, now, outcome).await
    }

    async fn reserve(
        &self,
        plan: &Plan<'_>,
        terms: &HoldTerms,
        now: Timestamp,
        outcome: &mut Outcome,
    ) -> Result<(), StoreError> {
        self.settle_or_hold(plan, Some(terms), now, outcome).await
    }

    async fn execute(&self, command: Command, _: Timestamp) -> Result<Answer, StoreError> {
        match command {
            Command::Rekey(moves) => self.rekey(moves).await,
            command => {
                // These keys are no policy's.
                let has_own_names = matches!(
                    command,
                    Command::Limit { .. } | Command::BeginRequest { .. } | Command::EndRequest { .. }
                );
                partitioned::execute(&Call { has_own_names, ..self.call() }, command).await
            }
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
    objects: Mutex<Vec<Arc<Place>>>,
    /// Whether the keys of the command are the names of their objects.
    has_own_names: bool,
}

/// The partition of keys whose place is not known. No object has it, so that a command on it fails.
const NOWHERE: Partition = Partition::from_u16(u16::MAX);
/// The partition of keys of KV.
const IN_KV: Partition = Partition::from_u16(u16::MAX - 1);

impl Call<'_> {
    fn number(&self, object: Arc<Place>) -> Partition {
        let mut objects = self.objects.lock().unwrap_or_else(PoisonError::into_inner);
        let known = objects.iter().position(|own| *own == object);
        let number = known.unwrap_or_else(|| {
            objects.push(object);
            objects.len().saturating_sub(1)
        });
        Partition::from_u16(u16::try_from(number).unwrap_or(u16::MAX))
    }

    fn object(&self, partition: Partition) -> Option<Arc<Place>> {
        let objects = self.objects.lock().unwrap_or_else(PoisonError::into_inner);
        objects.get(usize::from(partition.to_u16())).cloned()
    }
}

impl Partitions for Call<'_> {
    fn partition(&self, key: Digest) -> Partition {
        let places = self.store.places.lock().unwrap_or_else(PoisonError::into_inner);
        match places.find(key, self.has_own_names, DEFAULT_BINDING) {
            None => NOWHERE,
            Some(place) if place.is_eventual => IN_KV,
            Some(place) => self.number(place),
        }
    }

    async fn execute(&self, partition: Partition, command: Command) -> Result<Answer, PartitionError> {
        // What KV has counted stays counted: another isolate may have read and written it since.
        match command {
            Command::GiveBack { .. } if partition == IN_KV => return Ok(Answer::Done),
            Command::Refund(_) if partition == IN_KV => return Ok(Answer::Refunded { first: true }),
            Command::Commit { .. } | Command::Release { .. } | Command::Expire { .. } if partition == IN_KV => {
                return Ok(Answer::Ended(Ok(Vec::new())));
            }
            _ => {}
        }
        let object = self.object(partition).ok_or(StoreError::Unavailable)?;
        Ok(self.store.send(object, command).await?)
    }

    fn home(&self, id: TraceId) -> Partition {
        self.number(Arc::new(Place::object(DEFAULT_BINDING, format!("id:{id}"))))
    }

    fn execute_later(&self, commands: Vec<(Partition, Command)>) {
        let commands = commands.into_iter().filter_map(|(partition, command)| Some((self.object(partition)?, command)));
        self.store.later.lock().unwrap_or_else(PoisonError::into_inner).extend(commands);
    }
}
