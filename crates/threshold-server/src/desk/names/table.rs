//! A table of names of a fixed size.

use std::borrow::Borrow;
use std::collections::HashMap;
use std::hash::Hash;

use threshold_core::Timestamp;

/// The names that are compared when one has to make room.
const COMPARED: usize = 8;

/// Names, with how often and when they were seen.
///
/// When it is full, a new name takes the place of the one that was seen least among [`COMPARED`] that are drawn at random. So a name that
/// is seen again and again stays while others come once, however many.
pub(super) struct Table<K, V> {
    places: HashMap<K, usize>,
    entries: Vec<Entry<K, V>>,
    max: usize,
}

struct Entry<K, V> {
    name: K,
    value: V,
    times: u32,
    seen: Timestamp,
}

impl<K: Clone + Eq + Hash, V: Clone> Table<K, V> {
    pub(super) fn new(max: usize) -> Self {
        Self { places: HashMap::new(), entries: Vec::new(), max }
    }

    /// Counts a name; `own` makes it, if it is new.
    pub(super) fn see<Q>(&mut self, name: &Q, value: V, at: Timestamp, own: impl FnOnce() -> K)
    where
        K: Borrow<Q>,
        Q: Eq + Hash + ?Sized,
    {
        if let Some(entry) = self.places.get(name).and_then(|place| self.entries.get_mut(*place)) {
            entry.value = value;
            entry.times = entry.times.saturating_add(1);
            entry.seen = entry.seen.max(at);
            return;
        }
        let entry = Entry { name: own(), value, times: 1, seen: at };
        let place = if self.entries.len() < self.max { self.entries.len() } else { self.seldom() };
        self.places.insert(entry.name.clone(), place);
        match self.entries.get_mut(place) {
            Some(old) => {
                let old = std::mem::replace(old, entry);
                self.places.remove(old.name.borrow());
            }
            None => self.entries.push(entry),
        }
    }

    /// Removes the names for which `stays` does not hold.
    pub(super) fn retain(&mut self, stays: impl Fn(&K, &V, Timestamp) -> bool) {
        self.entries.retain(|entry| stays(&entry.name, &entry.value, entry.seen));
        if self.entries.len() < self.places.len() {
            let names = self.entries.iter().map(|entry| entry.name.clone());
            self.places = names.enumerate().map(|(place, name)| (name, place)).collect();
        }
    }

    /// Returns a copy of the names that were seen at such times.
    pub(super) fn copied(&self, is_wanted: impl Fn(Timestamp) -> bool) -> Vec<(K, V)> {
        let wanted = self.entries.iter().filter(|entry| is_wanted(entry.seen));
        wanted.map(|entry| (entry.name.clone(), entry.value.clone())).collect()
    }

    #[cfg(test)]
    pub(super) fn len(&self) -> usize {
        assert_eq!(self.places.len(), self.entries.len());
        self.entries.len()
    }

    /// Returns the place of a name that was seen seldom.
    fn seldom(&self) -> usize {
        // 16 bits for each, which is more than there are places.
        let random: [u16; COMPARED] = rand::random();
        let places = random.into_iter().filter_map(|number| usize::from(number).checked_rem(self.entries.len()));
        let seen = |place: usize| self.entries.get(place).map(|entry| (entry.times, entry.seen));
        places.min_by_key(|place| seen(*place)).unwrap_or(0)
    }
}
