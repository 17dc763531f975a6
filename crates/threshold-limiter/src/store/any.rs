//! A store that is chosen at run time.

use std::fmt;
use std::future::Future;
use std::pin::Pin;

use super::memory::MemoryStore;
use super::{
    Answer, Command, Digest, Durability, HoldTerms, Kind, LateAnswer, Listed, Outcome, Placed, Plan, Secrets, Share,
    Store, StoreError, StoreErrorCount, StoreNumbers, Timestamp,
};

/// The store in memory or any other, chosen at run time. If the store is known when the program is compiled, name its type: a
/// decision then needs no boxed future.
pub struct AnyStore(Inner);

enum Inner {
    /// The store in memory, without a boxed future.
    Memory(Box<MemoryStore>),
    /// Any other store.
    Other(Box<dyn ErasedStore>),
}

impl AnyStore {
    /// Wraps a store that is not in memory.
    pub fn other(store: impl Store + 'static) -> Self {
        Self(Inner::Other(Box::new(store)))
    }

    /// Returns the store in memory, if it is that one.
    #[must_use]
    pub fn memory(&self) -> Option<&MemoryStore> {
        match &self.0 {
            Inner::Memory(store) => Some(store),
            Inner::Other(_) => None,
        }
    }
}

impl From<MemoryStore> for AnyStore {
    fn from(store: MemoryStore) -> Self {
        Self(Inner::Memory(Box::new(store)))
    }
}

impl Store for AnyStore {
    #[inline]
    fn prefetch(&self, key: Digest) {
        match &self.0 {
            Inner::Memory(store) => store.prefetch(key),
            Inner::Other(store) => store.erased_prefetch(key),
        }
    }

    #[inline]
    fn learn_places<'p>(&self, places: &mut dyn FnMut() -> Vec<Placed<'p>>) {
        match &self.0 {
            Inner::Memory(store) => store.learn_places(places),
            Inner::Other(store) => store.erased_learn_places(places),
        }
    }

    #[inline]
    fn now(&self) -> Option<Timestamp> {
        match &self.0 {
            Inner::Memory(store) => store.now(),
            Inner::Other(store) => store.erased_now(),
        }
    }

    fn secrets(&self) -> Option<&Secrets> {
        match &self.0 {
            Inner::Memory(store) => store.secrets(),
            Inner::Other(store) => store.erased_secrets(),
        }
    }

    #[inline]
    async fn settle(&self, plan: &Plan<'_>, now: Timestamp, outcome: &mut Outcome) -> Result<(), StoreError> {
        match &self.0 {
            Inner::Memory(store) => store.settle(plan, now, outcome).await,
            Inner::Other(store) => store.erased_settle(plan, now, outcome).await,
        }
    }

    async fn reserve(
        &self,
        plan: &Plan<'_>,
        terms: &HoldTerms,
        now: Timestamp,
        outcome: &mut Outcome,
    ) -> Result<(), StoreError> {
        match &self.0 {
            Inner::Memory(store) => store.reserve(plan, terms, now, outcome).await,
            Inner::Other(store) => store.erased_reserve(plan, terms, now, outcome).await,
        }
    }

    async fn execute(&self, command: Command, now: Timestamp) -> Result<Answer, StoreError> {
        match &self.0 {
            Inner::Memory(store) => store.execute(command, now).await,
            Inner::Other(store) => store.erased_execute(command, now).await,
        }
    }

    async fn list(
        &self,
        kind: Kind,
        after: Option<Digest>,
        limit: usize,
        now: Timestamp,
    ) -> Result<Vec<Listed>, StoreError> {
        match &self.0 {
            Inner::Memory(store) => store.list(kind, after, limit, now).await,
            Inner::Other(store) => store.erased_list(kind, after, limit, now).await,
        }
    }

    fn answers_at_once(&self) -> bool {
        match &self.0 {
            Inner::Memory(store) => store.answers_at_once(),
            Inner::Other(store) => store.erased_answers_at_once(),
        }
    }

    fn share(&self) -> Option<Share> {
        match &self.0 {
            Inner::Memory(store) => store.share(),
            Inner::Other(store) => store.erased_share(),
        }
    }

    fn take_late(&self) -> Vec<LateAnswer> {
        match &self.0 {
            Inner::Memory(store) => store.take_late(),
            Inner::Other(store) => store.erased_take_late(),
        }
    }

    fn settles_partitions_together(&self) -> bool {
        match &self.0 {
            Inner::Memory(store) => store.settles_partitions_together(),
            Inner::Other(store) => store.erased_settles_partitions_together(),
        }
    }

    fn last_error(&self) -> Option<String> {
        match &self.0 {
            Inner::Memory(store) => store.last_error(),
            Inner::Other(store) => store.erased_last_error(),
        }
    }

    fn present_problem(&self) -> Option<String> {
        match &self.0 {
            Inner::Memory(store) => store.present_problem(),
            Inner::Other(store) => store.erased_present_problem(),
        }
    }

    fn is_reachable(&self) -> bool {
        match &self.0 {
            Inner::Memory(store) => store.is_reachable(),
            Inner::Other(store) => store.erased_is_reachable(),
        }
    }

    fn errors(&self) -> Vec<StoreErrorCount> {
        match &self.0 {
            Inner::Memory(store) => store.errors(),
            Inner::Other(store) => store.erased_errors(),
        }
    }

    fn differences(&self) -> u64 {
        match &self.0 {
            Inner::Memory(store) => store.differences(),
            Inner::Other(store) => store.erased_differences(),
        }
    }

    fn durability(&self) -> Option<Durability> {
        match &self.0 {
            Inner::Memory(store) => store.durability(),
            Inner::Other(store) => store.erased_durability(),
        }
    }

    fn numbers(&self) -> StoreNumbers {
        match &self.0 {
            Inner::Memory(store) => store.numbers(),
            Inner::Other(store) => store.erased_numbers(),
        }
    }
}

impl fmt::Debug for AnyStore {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.0 {
            Inner::Memory(_) => f.write_str("AnyStore::Memory"),
            Inner::Other(_) => f.write_str("AnyStore::Other"),
        }
    }
}

type Boxed<'a, T> = Pin<Box<dyn Future<Output = Result<T, StoreError>> + Send + 'a>>;

/// An object-safe form of [`Store`], implemented by every store.
trait ErasedStore: Send + Sync {
    fn erased_prefetch(&self, key: Digest);

    fn erased_learn_places<'p>(&self, places: &mut dyn FnMut() -> Vec<Placed<'p>>);

    fn erased_now(&self) -> Option<Timestamp>;

    fn erased_secrets(&self) -> Option<&Secrets>;

    fn erased_settle<'a>(&'a self, plan: &'a Plan<'_>, now: Timestamp, outcome: &'a mut Outcome) -> Boxed<'a, ()>;

    fn erased_reserve<'a>(
        &'a self,
        plan: &'a Plan<'_>,
        terms: &'a HoldTerms,
        now: Timestamp,
        outcome: &'a mut Outcome,
    ) -> Boxed<'a, ()>;

    fn erased_execute(&self, command: Command, now: Timestamp) -> Boxed<'_, Answer>;

    fn erased_list(&self, kind: Kind, after: Option<Digest>, limit: usize, now: Timestamp) -> Boxed<'_, Vec<Listed>>;

    fn erased_answers_at_once(&self) -> bool;

    fn erased_share(&self) -> Option<Share>;

    fn erased_take_late(&self) -> Vec<LateAnswer>;

    fn erased_settles_partitions_together(&self) -> bool;

    fn erased_last_error(&self) -> Option<String>;

    fn erased_present_problem(&self) -> Option<String>;

    fn erased_is_reachable(&self) -> bool;

    fn erased_errors(&self) -> Vec<StoreErrorCount>;

    fn erased_differences(&self) -> u64;

    fn erased_durability(&self) -> Option<Durability>;

    fn erased_numbers(&self) -> StoreNumbers;
}

impl<S: Store> ErasedStore for S {
    fn erased_prefetch(&self, key: Digest) {
        Store::prefetch(self, key);
    }

    fn erased_learn_places<'p>(&self, places: &mut dyn FnMut() -> Vec<Placed<'p>>) {
        Store::learn_places(self, places);
    }

    fn erased_now(&self) -> Option<Timestamp> {
        Store::now(self)
    }

    fn erased_secrets(&self) -> Option<&Secrets> {
        Store::secrets(self)
    }

    fn erased_settle<'a>(&'a self, plan: &'a Plan<'_>, now: Timestamp, outcome: &'a mut Outcome) -> Boxed<'a, ()> {
        Box::pin(Store::settle(self, plan, now, outcome))
    }

    fn erased_reserve<'a>(
        &'a self,
        plan: &'a Plan<'_>,
        terms: &'a HoldTerms,
        now: Timestamp,
        outcome: &'a mut Outcome,
    ) -> Boxed<'a, ()> {
        Box::pin(Store::reserve(self, plan, terms, now, outcome))
    }

    fn erased_execute(&self, command: Command, now: Timestamp) -> Boxed<'_, Answer> {
        Box::pin(Store::execute(self, command, now))
    }

    fn erased_list(&self, kind: Kind, after: Option<Digest>, limit: usize, now: Timestamp) -> Boxed<'_, Vec<Listed>> {
        Box::pin(Store::list(self, kind, after, limit, now))
    }

    fn erased_answers_at_once(&self) -> bool {
        Store::answers_at_once(self)
    }

    fn erased_share(&self) -> Option<Share> {
        Store::share(self)
    }

    fn erased_take_late(&self) -> Vec<LateAnswer> {
        Store::take_late(self)
    }

    fn erased_settles_partitions_together(&self) -> bool {
        Store::settles_partitions_together(self)
    }

    fn erased_last_error(&self) -> Option<String> {
        Store::last_error(self)
    }

    fn erased_present_problem(&self) -> Option<String> {
        Store::present_problem(self)
    }

    fn erased_is_reachable(&self) -> bool {
        Store::is_reachable(self)
    }

    fn erased_errors(&self) -> Vec<StoreErrorCount> {
        Store::errors(self)
    }

    fn erased_differences(&self) -> u64 {
        Store::differences(self)
    }

    fn erased_durability(&self) -> Option<Durability> {
        Store::durability(self)
    }

    fn erased_numbers(&self) -> StoreNumbers {
        Store::numbers(self)
    }
}
