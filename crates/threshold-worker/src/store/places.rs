//! The places of keys that were planned lately.

use std::collections::HashMap;
use std::sync::Arc;

use threshold_core::Digest;

/// The keys of one generation. A request has at most 20, and a key is needed only while its request is under way.
const MAX_KEYS: usize = 8_192;

/// The place of a record: a Durable Object, or a key of KV.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Place {
    pub(super) binding: String,
    pub(super) name: String,
    /// Whether it is a key of KV.
    pub(super) is_eventual: bool,
}

impl Place {
    /// Returns the place of a Durable Object.
    pub(super) fn object(binding: &str, name: String) -> Self {
        Self { binding: binding.to_owned(), name, is_eventual: false }
    }

    /// Returns the object of a key that belongs to no policy: its name is the key itself.
    pub(super) fn of_key(binding: &str, key: Digest) -> Self {
        Self::object(binding, format!("key:{:032x}", key.to_u128()))
    }
}

/// The places of the keys that were planned last. The older half is dropped when there are too many.
#[derive(Debug, Default)]
pub(super) struct Places {
    recent: HashMap<Digest, Arc<Place>>,
    older: HashMap<Digest, Arc<Place>>,
}

impl Places {
    pub(super) fn insert(&mut self, key: Digest, place: Place) {
        if self.recent.len() >= MAX_KEYS {
            self.older = std::mem::take(&mut self.recent);
        }
        self.recent.insert(key, Arc::new(place));
    }

    /// Returns the place of a key of a command; `None` if it is not known, or no longer. Only a key that is no policy's, such as that of
    /// a limit without a policy, is the name of its object itself: in any other object the record would be a new one.
    pub(super) fn find(&self, key: Digest, is_own_name: bool, binding: &str) -> Option<Arc<Place>> {
        let by_key = || is_own_name.then(|| Arc::new(Place::of_key(binding, key)));
        self.get(key).or_else(by_key)
    }

    /// Returns the place of a key; `None` if it is not known, or no longer.
    pub(super) fn get(&self, key: Digest) -> Option<Arc<Place>> {
        self.recent.get(&key).or_else(|| self.older.get(&key)).cloned()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_flood_of_keys_forgets_the_oldest() {
        let mut places = Places::default();
        let key = |number: usize| Digest::from_u128(number as u128);
        for number in 0..MAX_KEYS * 5 {
            places.insert(key(number), Place::object("X", number.to_string()));
            assert!(places.recent.len() + places.older.len() <= 2 * MAX_KEYS);
        }
        // The keys of the latest requests are known, and the first are not.
        assert!((MAX_KEYS * 4..MAX_KEYS * 5).all(|number| places.get(key(number)).unwrap().name == number.to_string()));
        assert!(places.get(key(0)).is_none());
        // What is given back to a key that was forgotten must not go to another object.
        assert_eq!(places.find(key(0), false, "THRESHOLD"), None);
        let own = Place::object("THRESHOLD", "key:00000000000000000000000000000000".to_owned());
        assert_eq!(places.find(key(0), true, "THRESHOLD").as_deref(), Some(&own));
    }
}
