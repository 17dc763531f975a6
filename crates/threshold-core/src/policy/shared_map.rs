//! A persistent map by name (a hash array mapped trie): clones share their nodes, and a change copies only the nodes on its path.

use std::hash::Hasher as _;
use std::sync::Arc;

use siphasher::sip::SipHasher13;

/// The number of children of a branch, and the bits of the hash that choose one.
const WIDTH: usize = 16;
const BITS: u32 = 4;

/// Values by name. A clone increments one reference count, and later changes of either map do not affect the other.
#[derive(Debug)]
pub(crate) struct SharedMap<V> {
    root: Child<V>,
    len: usize,
}

type Child<V> = Option<Arc<Node<V>>>;

/// A node of the trie. The hash of a name leads to its leaf, four bits at each branch.
#[derive(Debug)]
enum Node<V> {
    /// The entries with one hash, nearly always a single one.
    Leaf {
        hash: u64,
        entries: Vec<Entry<V>>,
    },
    Branch([Child<V>; WIDTH]),
}

type Entry<V> = (Arc<str>, Arc<V>);

impl<V> SharedMap<V> {
    pub(crate) fn len(&self) -> usize {
        self.len
    }

    #[inline]
    pub(crate) fn is_empty(&self) -> bool {
        self.root.is_none()
    }

    #[inline]
    pub(crate) fn get(&self, name: &str) -> Option<&V> {
        // Usually the map is empty, and the name need not be hashed.
        let root = self.root.as_deref()?;
        root.find(hash(name), name)
    }

    /// Inserts a value and returns the previous one.
    pub(crate) fn insert(&mut self, name: &str, value: V) -> Option<Arc<V>> {
        self.insert_hashed(hash(name), (name.into(), Arc::new(value)))
    }

    /// Removes and returns a value.
    pub(crate) fn remove(&mut self, name: &str) -> Option<Arc<V>> {
        self.remove_hashed(hash(name), name)
    }

    /// Returns all entries, in the order of the trie.
    pub(crate) fn iter(&self) -> impl Iterator<Item = &Entry<V>> {
        let mut nodes: Vec<&Node<V>> = self.root.as_deref().into_iter().collect();
        let leaves = std::iter::from_fn(move || {
            loop {
                match nodes.pop()? {
                    Node::Leaf { entries, .. } => return Some(entries),
                    Node::Branch(children) => nodes.extend(children.iter().filter_map(Option::as_deref)),
                }
            }
        });
        leaves.flatten()
    }

    fn insert_hashed(&mut self, hash: u64, entry: Entry<V>) -> Option<Arc<V>> {
        let (root, before) = inserted(self.root.as_ref(), hash, 0, entry);
        self.root = Some(root);
        self.len = self.len.saturating_add(usize::from(before.is_none()));
        before
    }

    fn remove_hashed(&mut self, hash: u64, name: &str) -> Option<Arc<V>> {
        let root = self.root.as_deref()?;
        // Found first: removing a name that is not there must not copy any node.
        let removed = root.find_shared(hash, name).cloned()?;
        self.root = root.without(hash, 0, name);
        self.len = self.len.saturating_sub(1);
        Some(removed)
    }
}

impl<V> Node<V> {
    #[inline(never)]
    fn find(&self, hash: u64, name: &str) -> Option<&V> {
        self.find_shared(hash, name).map(AsRef::as_ref)
    }

    fn find_shared(&self, hash: u64, name: &str) -> Option<&Arc<V>> {
        let (mut node, mut depth) = (self, 0);
        loop {
            match node {
                Self::Leaf { hash: own, entries } => {
                    let mut named = entries.iter().filter(|(other, _)| *own == hash && **other == *name);
                    return named.next().map(|(_, value)| value);
                }
                Self::Branch(children) => node = children.get(place(hash, depth))?.as_deref()?,
            }
            depth = depth.saturating_add(1);
        }
    }

    /// Returns the node without a name that it contains. A branch with a single leaf left becomes that leaf.
    fn without(&self, hash: u64, depth: u32, name: &str) -> Child<V> {
        let children = match self {
            Self::Leaf { hash, entries } => {
                let others: Vec<Entry<V>> = entries.iter().filter(|(other, _)| **other != *name).cloned().collect();
                return (!others.is_empty()).then(|| Arc::new(Self::Leaf { hash: *hash, entries: others }));
            }
            Self::Branch(children) => children,
        };
        // A copy of 16 pointers. All subtrees but one stay shared with older clones.
        let mut children = children.clone();
        if let Some(child) = children.get_mut(place(hash, depth)) {
            *child = child.as_ref().and_then(|node| node.without(hash, depth.saturating_add(1), name));
        }
        let mut left = children.iter().flatten();
        match (left.next(), left.next()) {
            (None, _) => None,
            // Only a leaf can move up. The children of a branch are placed by the bits of its own depth.
            (Some(leaf), None) if matches!(**leaf, Self::Leaf { .. }) => Some(Arc::clone(leaf)),
            _ => Some(Arc::new(Self::Branch(children))),
        }
    }
}

/// Returns a node with an entry inserted or replaced, and the previous value.
fn inserted<V>(node: Option<&Arc<Node<V>>>, hash: u64, depth: u32, entry: Entry<V>) -> (Arc<Node<V>>, Option<Arc<V>>) {
    let mut children: [Child<V>; WIDTH] = match node.map(AsRef::as_ref) {
        None => return (Arc::new(Node::Leaf { hash, entries: vec![entry] }), None),
        Some(Node::Leaf { hash: own, entries }) if *own == hash => {
            // A copy, because an older clone of the map may share this leaf.
            let mut entries = entries.clone();
            let known = entries.iter_mut().find(|(name, _)| *name == entry.0);
            let before = match known {
                Some((_, value)) => Some(std::mem::replace(value, entry.1)),
                None => {
                    entries.push(entry);
                    None
                }
            };
            return (Arc::new(Node::Leaf { hash, entries }), before);
        }
        // Another hash: the leaf moves down, and the recursion goes on until the two hashes part.
        Some(Node::Leaf { hash: own, .. }) => {
            let mut children: [Child<V>; WIDTH] = Default::default();
            if let Some(child) = children.get_mut(place(*own, depth)) {
                *child = node.cloned();
            }
            children
        }
        Some(Node::Branch(children)) => children.clone(),
    };
    let mut before = None;
    if let Some(child) = children.get_mut(place(hash, depth)) {
        let (node, replaced) = inserted(child.as_ref(), hash, depth.saturating_add(1), entry);
        (*child, before) = (Some(node), replaced);
    }
    (Arc::new(Node::Branch(children)), before)
}

/// Returns the index of the child that a hash belongs to. Two different hashes are separated within 16 levels.
fn place(hash: u64, depth: u32) -> usize {
    // Not reached beyond depth 15: all 64 bits of two different hashes have been compared by then.
    let bits = hash.checked_shr(depth.saturating_mul(BITS)).unwrap_or(0);
    usize::try_from(bits % 16).unwrap_or(0)
}

/// Hashes without a secret: only operators add names, so nobody can flood one leaf.
fn hash(name: &str) -> u64 {
    let mut hasher = SipHasher13::new();
    hasher.write(name.as_bytes());
    hasher.finish()
}

impl<V> Clone for SharedMap<V> {
    fn clone(&self) -> Self {
        Self { root: self.root.clone(), len: self.len }
    }
}

impl<V> Default for SharedMap<V> {
    fn default() -> Self {
        Self { root: None, len: 0 }
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use proptest::prelude::*;

    use super::*;

    impl<V> SharedMap<V> {
        /// How many parts of this map another one does not have.
        pub(crate) fn parts_beside(&self, other: &Self) -> usize {
            fn parts<V>(root: Option<&Arc<Node<V>>>, all: &mut Vec<*const Node<V>>) {
                let Some(node) = root else { return };
                all.push(Arc::as_ptr(node));
                if let Node::Branch(children) = &**node {
                    children.iter().for_each(|child| parts(child.as_ref(), all));
                }
            }
            let (mut own, mut others) = (Vec::new(), Vec::new());
            parts(self.root.as_ref(), &mut own);
            parts(other.root.as_ref(), &mut others);
            others.sort_unstable();
            own.iter().filter(|part| others.binary_search(part).is_err()).count()
        }
    }

    proptest! {
        /// It is a map, whatever its names hash to, and a copy keeps what it had.
        ///
        /// Woken by: leaving out the comparison of names in a leaf, or the leaf that was there before in `inserted`; by
        /// `Some(leaf)` without its guard in `without`.
        #[test]
        fn it_is_a_map_and_copies_keep_what_they_had(
            steps in prop::collection::vec((0u8..24, any::<Option<u16>>()), 0..120),
            kept_at in 0usize..120,
            hashes in prop::collection::vec(prop_oneof![0u64..4, any::<u64>(), Just(1 << 60), Just(u64::MAX)], 24),
        ) {
            let (mut map, mut model) = (SharedMap::default(), BTreeMap::new());
            let mut kept = (map.clone(), model.clone());
            let name = |number: u8| format!("n{number}");
            for (step, (number, value)) in steps.into_iter().enumerate() {
                let (name, hash) = (name(number), hashes[usize::from(number)]);
                let before = match value {
                    Some(value) => (map.insert_hashed(hash, (name.as_str().into(), Arc::new(value))), model.insert(number, value)),
                    None => (map.remove_hashed(hash, &name), model.remove(&number)),
                };
                prop_assert_eq!(before.0.map(|value| *value), before.1);
                if step == kept_at {
                    kept = (map.clone(), model.clone());
                }
            }
            for (map, model) in [(map, model), kept] {
                prop_assert_eq!(map.len(), model.len());
                for number in 0..24 {
                    let root = map.root.as_deref();
                    let found = root.and_then(|root| root.find(hashes[usize::from(number)], &name(number)));
                    prop_assert_eq!(found, model.get(&number));
                }
                let mut listed: Vec<(String, u16)> = map.iter().map(|(name, value)| (name.to_string(), **value)).collect();
                let mut expected: Vec<(String, u16)> = model.iter().map(|(number, value)| (name(*number), *value)).collect();
                listed.sort_unstable();
                expected.sort_unstable();
                prop_assert_eq!(listed, expected);
            }
        }
    }

    /// A change makes the parts on the way to its leaf, and shares all others: with 16 ways at each branch there are a few
    /// more of them at 10,000 names than at 10.
    #[test]
    fn a_change_makes_a_few_parts_however_many_entries_there_are() {
        let mut map = SharedMap::default();
        let is_looked_at = |number: u32| number < 20 || number.is_multiple_of(499);
        for number in 0..10_000 {
            let before = map.clone();
            map.insert(&format!("tenant {number}"), number);
            // Two names that share the beginnings of their hashes part some branches deeper.
            assert!(!is_looked_at(number) || map.parts_beside(&before) <= 9, "at {number}");
        }
        for number in 0..10_000 {
            let before = map.clone();
            map.remove(&format!("tenant {number}"));
            assert!(!is_looked_at(number) || map.parts_beside(&before) <= 9, "at {number}");
        }
        assert_eq!((map.len(), map.root.is_none()), (0, true));
    }
}
