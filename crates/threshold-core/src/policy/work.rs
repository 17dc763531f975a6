//! The work that a review of a policy may take, in steps.

/// The steps of a review of a policy that its host has chosen: a thousand rules that are compared in every way take a tenth.
const STEPS: u64 = 1_000_000_000;
/// After how many steps it is asked whether the review is still wanted.
const ASK_AFTER: u64 = 100_000;

/// How much work a review may take, and whether it is still wanted.
///
/// Steps are counted and not time, so that a policy is reviewed alike on every machine. A step compares two names, or a pattern with a
/// character of a text.
#[derive(Clone, Copy)]
pub struct ReviewWork<'w> {
    left: u64,
    until_asked: u64,
    is_wanted: &'w dyn Fn() -> bool,
    is_bounded: bool,
}

impl std::fmt::Debug for ReviewWork<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("ReviewWork").field("left", &self.left).finish_non_exhaustive()
    }
}

impl Default for ReviewWork<'_> {
    /// The work for a policy that a host has chosen: its errors are always found, and its warnings within a large bound.
    fn default() -> Self {
        Self { left: STEPS, until_asked: u64::MAX, is_wanted: &|| true, is_bounded: false }
    }
}

impl<'w> ReviewWork<'w> {
    /// The work for a draft that anyone may have written. It also ends when it is no longer wanted.
    #[must_use]
    pub fn of_draft(steps: u64, is_wanted: &'w dyn Fn() -> bool) -> Self {
        Self { left: steps, until_asked: ASK_AFTER, is_wanted, is_bounded: true }
    }

    /// Takes steps, and returns whether there were as many.
    pub(crate) fn spend(&mut self, steps: usize) -> bool {
        let steps = u64::try_from(steps).unwrap_or(u64::MAX);
        self.until_asked = self.until_asked.saturating_sub(steps);
        if self.until_asked == 0 {
            self.until_asked = ASK_AFTER;
            if !(self.is_wanted)() {
                self.left = 0;
            }
        }
        self.left = self.left.saturating_sub(steps);
        self.left > 0
    }

    /// Takes steps of a check without which a policy must not be used. Only a draft is refused for them.
    pub(crate) fn spend_on_error(&mut self, steps: usize) -> bool {
        !self.is_bounded || self.spend(steps)
    }

    pub(crate) fn is_spent(&self) -> bool {
        self.left == 0
    }
}
