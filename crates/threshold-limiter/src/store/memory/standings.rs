//! The standings of a bill's subjects, locked while it is settled, so that a charge and a strike are one step.

use arrayvec::ArrayVec;
use threshold_core::bill::Subject;
use threshold_core::ladder::Standing;
use threshold_core::plan::{MAX_SUBJECTS, Verb};
use threshold_core::{Bill, Digest, Outcome, Standings, Timestamp};

use super::bounded_map::{BoundedMap, Worth, worth_until};
use super::{MemoryStore, lock};
use crate::sync::MutexGuard;

/// Standings with their shards locked.
pub(super) struct OpenStandings<'s, 'p> {
    store: &'s MemoryStore,
    bill: &'s Bill<'p>,
    now: Timestamp,
    /// Each shard once, locked in ascending order, so that two plans cannot deadlock.
    shards: ArrayVec<(usize, MutexGuard<'s, BoundedMap<Digest, Standing>>), MAX_SUBJECTS>,
    standings: ArrayVec<Standing, MAX_SUBJECTS>,
}

impl<'s, 'p> OpenStandings<'s, 'p> {
    pub(super) fn new(store: &'s MemoryStore, bill: &'s Bill<'p>, now: Timestamp) -> Self {
        let mut order: ArrayVec<usize, MAX_SUBJECTS> =
            bill.subjects().iter().map(|subject| store.standing_shard(subject.key())).collect();
        order.sort_unstable();
        let mut open = Self { store, bill, now, shards: ArrayVec::new(), standings: ArrayVec::new() };
        for shard in order {
            if open.shards.last().is_none_or(|(last, _)| *last != shard)
                && let Some(mutex) = store.standings.get(shard)
            {
                let _ = open.shards.try_push((shard, lock(mutex)));
            }
        }
        for subject in bill.subjects() {
            let standing = open.shard(subject).and_then(|map| map.get(subject.key()).cloned());
            let _ = open.standings.try_push(standing.unwrap_or_default());
        }
        open
    }

    /// Saves the changed standings. Strikes have found room in `has_room`; without room, a remembered denial is dropped.
    pub(super) fn save(mut self, outcome: &Outcome) {
        for (index, standing) in std::mem::take(&mut self.standings).into_iter().enumerate() {
            // The others need no write, and the journal need not hear of them.
            if outcome.standing_changed(index) {
                self.put(index, standing);
            }
        }
    }

    fn put(&mut self, index: usize, standing: Standing) -> bool {
        let (store, now) = (self.store, self.now);
        let Some(subject) = self.bill.subjects().get(index) else { return false };
        self.shard(subject).is_some_and(|map| store.put_standing(map, subject.key(), standing, now))
    }

    fn shard(&mut self, subject: &Subject<'_>) -> Option<&mut BoundedMap<Digest, Standing>> {
        let shard = self.store.standing_shard(subject.key());
        self.shards.iter_mut().find(|(own, _)| *own == shard).map(|(_, map)| &mut **map)
    }
}

impl Standings for OpenStandings<'_, '_> {
    fn all(&mut self) -> &mut [Standing] {
        &mut self.standings
    }

    /// Saves the standing at once, so that two subjects of one plan cannot get the same free entry.
    fn has_room(&mut self, index: usize, standing: &Standing) -> bool {
        let now = self.now;
        if self.bill.verb() != Verb::Peek {
            return self.put(index, standing.clone());
        }
        let Some(subject) = self.bill.subjects().get(index) else { return false };
        let worth = |other: &Standing| standing_worth(other, now);
        self.shard(subject).is_some_and(|map| map.would_keep(subject.key(), standing, worth))
    }
}

/// Returns the worth of a standing when the table is full. A penalty is never evicted before its time, and a strike only for a
/// penalty or for more strikes. If one strike could evict another, two subjects could take turns, and each would get a new
/// warning and one more request every time.
pub(super) fn standing_worth(standing: &Standing, now: Timestamp) -> Worth {
    let otherwise = match standing.penalty(now) {
        Some(_) => Worth::Protected,
        None => Worth::Some(u64::from(standing.strikes(now))),
    };
    worth_until(standing.silent_from(), now, otherwise)
}
