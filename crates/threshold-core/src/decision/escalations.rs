//! The strikes that one request added.

use std::ops::Deref;
use std::slice;

use smallvec::SmallVec;

use crate::settle::Escalation;

/// The strikes of one decision, in the order of the subjects. A slice of [`Escalation`] in every respect.
///
/// Nearly all requests that strike do so once: one strike is stored in the decision itself, more on the heap.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Escalations(SmallVec<[Escalation; 1]>);

impl Escalations {
    #[inline]
    pub(super) fn extend_from_slice(&mut self, strikes: &[Escalation]) {
        self.0.extend_from_slice(strikes);
    }

    #[inline]
    pub(super) fn clear(&mut self) {
        self.0.clear();
    }
}

impl Deref for Escalations {
    type Target = [Escalation];

    #[inline]
    fn deref(&self) -> &[Escalation] {
        &self.0
    }
}

impl<'s> IntoIterator for &'s Escalations {
    type Item = &'s Escalation;
    type IntoIter = slice::Iter<'s, Escalation>;

    fn into_iter(self) -> Self::IntoIter {
        self.iter()
    }
}
