//! A store that is chosen while the program runs.

use std::fmt;
use std::future::Future;
use std::pin::Pin;

use super::memory::MemoryStore;
use super::{Answer, Command, Digest, Durability, Kind, Listed, Outcome, Plan, Store, StoreError, Timestamp};

/// The store in memory, or any other. Use it where one type of limiter has to serve whichever store was configured; where
/// the store is known, name it: a decision then needs no allocation for its future.
pub struct AnyStore(Inner);

enum Inner {
    /// In this process.
    Memory(Box<MemoryStore>),
    /// Elsewhere.
    Other(Box<dyn ErasedStore>),
}

impl AnyStore {
    /// A store that is not in memory.
    pub fn other(store: impl Store + 'static) -> Self {
        Self(Inner::Other(Box::new(store)))
    }

    /// The store in memory, if it is that one.
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
    async fn settle(&self, plan: &Plan<'_>, now: Timestamp, outcome: &mut Outcome) -> Result<(), StoreError> {
        match &self.0 {
            Inner::Memory(store) => store.settle(plan, now, outcome).await,
            Inner::Other(store) => store.erased_settle(plan, now, outcome).await,
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

    fn durability(&self) -> Option<Durability> {
        match &self.0 {
            Inner::Memory(store) => store.durability(),
            Inner::Other(store) => store.erased_saving(),
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

/// A [`Store`] whose type is not known. Every store is one.
trait ErasedStore: Send + Sync {
    fn erased_prefetch(&self, key: Digest);

    fn erased_settle<'a>(&'a self, plan: &'a Plan<'_>, now: Timestamp, outcome: &'a mut Outcome) -> Boxed<'a, ()>;

    fn erased_execute(&self, command: Command, now: Timestamp) -> Boxed<'_, Answer>;

    fn erased_list(&self, kind: Kind, after: Option<Digest>, limit: usize, now: Timestamp) -> Boxed<'_, Vec<Listed>>;

    fn erased_answers_at_once(&self) -> bool;

    fn erased_saving(&self) -> Option<Durability>;
}

impl<S: Store> ErasedStore for S {
    fn erased_prefetch(&self, key: Digest) {
        Store::prefetch(self, key);
    }

    fn erased_settle<'a>(&'a self, plan: &'a Plan<'_>, now: Timestamp, outcome: &'a mut Outcome) -> Boxed<'a, ()> {
        Box::pin(Store::settle(self, plan, now, outcome))
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

    fn erased_saving(&self) -> Option<Durability> {
        Store::durability(self)
    }
}
