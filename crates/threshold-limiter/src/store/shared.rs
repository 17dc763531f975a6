//! A store in an `Arc`, which several limiters can share.

use std::future::Future;
use std::sync::Arc;

use super::{
    Answer, Command, Digest, Durability, HoldTerms, ImmediateStore, Kind, LateAnswer, Listed, Outcome, Placed, Plan,
    Secrets, Share, Store, StoreError, StoreErrorCount, StoreNumbers, Timestamp,
};

impl<S: Store> Store for Arc<S> {
    #[inline]
    fn prefetch(&self, key: Digest) {
        S::prefetch(self, key);
    }

    #[inline]
    fn learn_places<'p>(&self, places: &mut dyn FnMut() -> Vec<Placed<'p>>) {
        S::learn_places(self, places);
    }

    #[inline]
    fn now(&self) -> Option<Timestamp> {
        S::now(self)
    }

    fn secrets(&self) -> Option<&Secrets> {
        S::secrets(self)
    }

    #[inline]
    fn settle(
        &self,
        plan: &Plan<'_>,
        now: Timestamp,
        outcome: &mut Outcome,
    ) -> impl Future<Output = Result<(), StoreError>> + Send {
        S::settle(self, plan, now, outcome)
    }

    fn reserve(
        &self,
        plan: &Plan<'_>,
        terms: &HoldTerms,
        now: Timestamp,
        outcome: &mut Outcome,
    ) -> impl Future<Output = Result<(), StoreError>> + Send {
        S::reserve(self, plan, terms, now, outcome)
    }

    fn execute(&self, command: Command, now: Timestamp) -> impl Future<Output = Result<Answer, StoreError>> + Send {
        S::execute(self, command, now)
    }

    fn list(
        &self,
        kind: Kind,
        after: Option<Digest>,
        limit: usize,
        now: Timestamp,
    ) -> impl Future<Output = Result<Vec<Listed>, StoreError>> + Send {
        S::list(self, kind, after, limit, now)
    }

    fn answers_at_once(&self) -> bool {
        S::answers_at_once(self)
    }

    fn share(&self) -> Option<Share> {
        S::share(self)
    }

    fn take_late(&self) -> Vec<LateAnswer> {
        S::take_late(self)
    }

    fn settles_partitions_together(&self) -> bool {
        S::settles_partitions_together(self)
    }

    fn last_error(&self) -> Option<String> {
        S::last_error(self)
    }

    fn present_problem(&self) -> Option<String> {
        S::present_problem(self)
    }

    fn is_reachable(&self) -> bool {
        S::is_reachable(self)
    }

    fn errors(&self) -> Vec<StoreErrorCount> {
        S::errors(self)
    }

    fn differences(&self) -> u64 {
        S::differences(self)
    }

    fn durability(&self) -> Option<Durability> {
        S::durability(self)
    }

    fn numbers(&self) -> StoreNumbers {
        S::numbers(self)
    }
}

impl<S: ImmediateStore> ImmediateStore for Arc<S> {}
