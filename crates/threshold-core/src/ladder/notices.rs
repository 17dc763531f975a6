//! What rules remember of one subject, in little room: most subjects are known to one rule, or to none.

use arrayvec::ArrayVec;

use super::RuleTag;
use crate::time::{Span, Timestamp};

/// How many rules a standing remembers at once. With more, the one whose memory would end first is forgotten.
pub(super) const MAX_NOTICES: usize = 8;
/// Those beside the first.
const MORE: usize = MAX_NOTICES - 1;

/// What one rule remembers of a subject: when it last struck or denied, and until when that matters.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(super) struct Notice {
    pub(super) rule: RuleTag,
    pub(super) at: Timestamp,
    pub(super) until: Timestamp,
}

/// Notices by rule, in ascending order, so that equal standings have equal bytes. The first is here, any others elsewhere.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(super) struct Notices {
    rule: RuleTag,
    is_any: bool,
    at: Timestamp,
    until: Timestamp,
    more: Option<Box<ArrayVec<Notice, MORE>>>,
}

impl Notices {
    pub(super) fn iter(&self) -> impl Iterator<Item = Notice> {
        let first = self.is_any.then_some(Notice { rule: self.rule, at: self.at, until: self.until });
        first.into_iter().chain(self.more.iter().flat_map(|more| more.iter().copied()))
    }

    /// Adds one in place of the same rule's, and of all that have ended at its time.
    pub(super) fn add(&mut self, notice: Notice) {
        let kept = self.iter().filter(|own| own.rule != notice.rule && own.until > notice.at);
        let mut all: ArrayVec<Notice, MAX_NOTICES> = kept.collect();
        if all.is_full()
            && let Some((index, _)) = all.iter().enumerate().min_by_key(|(_, own)| own.until)
        {
            all.swap_remove(index);
            all.sort_unstable_by_key(|own| own.rule);
        }
        let index = all.partition_point(|own| own.rule < notice.rule);
        let _ = all.try_insert(index, notice);
        *self = Self::of(&all);
    }

    /// Brings back those that were made by a clock which was ahead by so much.
    pub(super) fn bring_back(&mut self, ahead: Span, now: Timestamp) {
        let all: ArrayVec<Notice, MAX_NOTICES> = self
            .iter()
            .map(|own| match own.at > now {
                true => Notice { at: now, until: own.until.minus(ahead).max(now), ..own },
                false => own,
            })
            .collect();
        *self = Self::of(&all);
    }

    /// Adds one at the end, as bytes have them; says whether it belongs there.
    pub(super) fn push(&mut self, notice: Notice) -> bool {
        let mut all: ArrayVec<Notice, MAX_NOTICES> = self.iter().collect();
        let sorted = all.last().is_none_or(|last| last.rule < notice.rule);
        let fits = sorted && all.try_push(notice).is_ok();
        *self = Self::of(&all);
        fits
    }

    fn of(all: &[Notice]) -> Self {
        let Some((first, more)) = all.split_first() else { return Self::default() };
        let more = (!more.is_empty()).then(|| Box::new(more.iter().copied().take(MORE).collect()));
        Self { rule: first.rule, is_any: true, at: first.at, until: first.until, more }
    }
}
