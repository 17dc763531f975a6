//! The recent strikes and denials of one subject, by rule, in little memory: most subjects have one, or none.

use arrayvec::ArrayVec;

use super::RuleTag;
use crate::time::{Span, Timestamp};

/// How many rules a standing remembers at once. With more, the one whose memory would end first is forgotten.
pub(super) const MAX_RECENT: usize = 8;
/// The entries beside the first.
const MORE: usize = MAX_RECENT - 1;

/// The last strike or denial by one rule, and until when it matters.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(super) struct Recent {
    pub(super) rule: RuleTag,
    pub(super) at: Timestamp,
    pub(super) until: Timestamp,
}

/// Recent strikes and denials in ascending order of their rules, so that equal standings have equal bytes.
///
/// The first entry is inline and its fields are spread out, which leaves no padding: stores hold many standings. The others
/// are on the heap.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(super) struct RecentList {
    rule: RuleTag,
    is_any: bool,
    at: Timestamp,
    until: Timestamp,
    more: Option<Box<ArrayVec<Recent, MORE>>>,
}

impl RecentList {
    pub(super) fn iter(&self) -> impl Iterator<Item = Recent> {
        let first = self.is_any.then_some(Recent { rule: self.rule, at: self.at, until: self.until });
        first.into_iter().chain(self.more.iter().flat_map(|more| more.iter().copied()))
    }

    /// Adds an entry in place of the same rule's. Drops all entries that have ended by its time.
    pub(super) fn add(&mut self, added: Recent) {
        let kept = self.iter().filter(|own| own.rule != added.rule && own.until > added.at);
        let mut all: ArrayVec<Recent, MAX_RECENT> = kept.collect();
        if all.is_full()
            && let Some((index, _)) = all.iter().enumerate().min_by_key(|(_, own)| own.until)
        {
            // The entry that would be forgotten first costs the least. Moving the last one into its place breaks the
            // order.
            all.swap_remove(index);
            all.sort_unstable_by_key(|own| own.rule);
        }
        let index = all.partition_point(|own| own.rule < added.rule);
        // Fits: an entry was removed if there was no room.
        let _ = all.try_insert(index, added);
        *self = Self::of(&all);
    }

    /// Corrects entries dated in the future by a clock that was `ahead` and has since been set back.
    pub(super) fn bring_back(&mut self, ahead: Span, now: Timestamp) {
        let all: ArrayVec<Recent, MAX_RECENT> = self
            .iter()
            .map(|own| match own.at > now {
                true => Recent { at: now, until: own.until.minus(ahead).max(now), ..own },
                false => own,
            })
            .collect();
        *self = Self::of(&all);
    }

    /// Appends an entry read from bytes. Returns whether it fits and is in order.
    pub(super) fn push(&mut self, read: Recent) -> bool {
        let mut all: ArrayVec<Recent, MAX_RECENT> = self.iter().collect();
        // Strictly ascending: a rule twice would be a state that `add` never leaves.
        let sorted = all.last().is_none_or(|last| last.rule < read.rule);
        let fits = sorted && all.try_push(read).is_ok();
        *self = Self::of(&all);
        fits
    }

    fn of(all: &[Recent]) -> Self {
        let Some((first, more)) = all.split_first() else { return Self::default() };
        let more = (!more.is_empty()).then(|| Box::new(more.iter().copied().take(MORE).collect()));
        Self { rule: first.rule, is_any: true, at: first.at, until: first.until, more }
    }
}
