//! The objects of keys that were planned lately.

use std::collections::HashMap;
use std::sync::Arc;

use threshold_core::Digest;

/// The keys of one generation. A request has at most 20, and a key is needed only while its request is under way.
const MAX_KEYS: usize = 8_192;

/// A Durable Object: its binding and its name.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Object {
    pub(super) binding: String,
    pub(super) name: String,
}

impl Object {
    pub(super) fn new(binding: &str, name: String) -> Self {
        Self { binding: binding.to_owned(), name }
    }
}

/// The objects of the keys that were planned last. The older half is dropped when there are too many.
#[derive(Debug, Default)]
pub(super) struct Places {
    recent: HashMap<Digest, Arc<Object>>,
    older: HashMap<Digest, Arc<Object>>,
}

impl Places {
    pub(super) fn insert(&mut self, key: Digest, binding: &str, name: String) {
        if self.recent.len() >= MAX_KEYS {
            self.older = std::mem::take(&mut self.recent);
        }
        self.recent.insert(key, Arc::new(Object::new(binding, name)));
    }

    pub(super) fn get(&self, key: Digest) -> Option<Arc<Object>> {
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
            places.insert(key(number), "X", number.to_string());
            assert!(places.recent.len() + places.older.len() <= 2 * MAX_KEYS);
        }
        // The keys of the latest requests are known, and the first are not.
        assert!((MAX_KEYS * 4..MAX_KEYS * 5).all(|number| places.get(key(number)).unwrap().name == number.to_string()));
        assert!(places.get(key(0)).is_none());
    }
}
