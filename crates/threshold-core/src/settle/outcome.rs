//! The outcome of settling a bill: what was found, what was charged, and what has to be saved.

use arrayvec::ArrayVec;

use crate::balance::Checked;
use crate::decision::Degraded;
use crate::key::Digest;
use crate::ladder::{Penalty, Rung};
use crate::limit::{Look, Mark};
use crate::plan::{MAX_CHARGES, MAX_SUBJECTS};
use crate::receipt::History;
use crate::time::Timestamp;

/// The result of settling a bill.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
#[must_use = "an outcome is turned into a decision by `Plan::decide`"]
pub struct Outcome {
    /// The time of settling, by the store's clock; the latest one where several partitions settled parts of the bill.
    pub(crate) at: Timestamp,
    /// One entry for each charge, in the bill's order. Empty under an operator's ban, which is decided without limits.
    pub(crate) settled: ArrayVec<Settled, MAX_CHARGES>,
    /// The harshest penalty in force, with its subject's index on the bill.
    pub(crate) penalty: Option<(usize, Penalty)>,
    /// The end of the last penalty in force. A long cool-down can outlast a short ban, so this is not always the end of
    /// `penalty`.
    pub(crate) denied_until: Timestamp,
    pub(crate) escalations: ArrayVec<Escalation, MAX_SUBJECTS>,
    /// Whether an allowed request is delayed, because a subject is shadow banned.
    pub(crate) shadowed: bool,
    /// For each subject: until when a denial carries the warning; [`Timestamp::EPOCH`] where it carries none.
    pub(crate) warned_until: [Timestamp; MAX_SUBJECTS],
    /// One bit for each charge. Set on a delayed request where a denial by this charge would be a strike that the client can
    /// see. A full pool of delayed requests turns the delay into that denial, and it must look like any other one.
    pub(crate) would_warn: u16,
    /// Under an operator's ban: when the limits and the ladders would allow the request again. The ban may end earlier.
    pub(crate) behind_ban: Timestamp,
    /// Pairs of a key on the bill and the key that was charged in its place.
    pub(crate) stood_in: ArrayVec<(Digest, Digest), MAX_CHARGES>,
    /// One bit for each charge whose balance changed.
    pub(crate) changed_balances: u16,
    /// One bit for each subject whose standing changed.
    pub(crate) changed_standings: u8,
    /// One bit for each charge that was not looked at, so that nothing is known of its limit. It is not sent: what settles a bill for
    /// another process looks at all of it.
    pub(crate) unread: u16,
    /// Why part of the bill was settled without its records. It is not sent either.
    pub(crate) degraded: Option<Degraded>,
    /// For each charge the history of its partition; empty in a store that has only one. It is not sent either.
    pub(crate) histories: ArrayVec<History, MAX_CHARGES>,
}

/// The result of one charge.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Settled {
    /// The time of settling, by the clock of the partition that holds the key.
    pub(crate) at: Timestamp,
    /// The balance before the charge. A block that this request begins is included.
    pub(crate) look: Look,
    /// What was charged; `None` where nothing was.
    pub(crate) mark: Option<Mark>,
    /// What is special about the limit, if it has no room.
    pub(crate) exception: Exception,
}

/// What is special about a limit without room.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) enum Exception {
    /// Nothing: the cost does not fit.
    #[default]
    None,
    /// The strike that this brought only warns, so that the limit does not deny.
    Lifted,
    /// A pause or an earlier `block_for` denies the key, whatever fits. Known only if the request is denied.
    Blocked,
}

/// One strike, for logs and events.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Escalation {
    /// The subject's index on the bill.
    pub subject: usize,
    /// The index on the bill of the charge that caused the strike.
    pub charge: usize,
    /// The subject's strikes, this one included.
    pub strikes: u32,
    /// The rung that this strike reached.
    pub rung: Rung,
    /// Whether the subject is shadow banned now.
    pub shadowed: bool,
    /// When the ban of this rung ends; `None` where the rung bans nobody.
    pub banned_until: Option<Timestamp>,
}

impl Outcome {
    /// Returns whether the balance of the `index`th charge must be saved.
    #[must_use]
    pub fn balance_changed(&self, index: usize) -> bool {
        // Stores outside of this crate call this with any index. A plain shift by 16 or more would overflow.
        u32::try_from(index)
            .ok()
            .and_then(|index| self.changed_balances.checked_shr(index))
            .is_some_and(|bits| bits & 1 == 1)
    }

    /// Returns whether the standing of the `index`th subject must be saved.
    #[must_use]
    pub fn standing_changed(&self, index: usize) -> bool {
        u32::try_from(index)
            .ok()
            .and_then(|index| self.changed_standings.checked_shr(index))
            .is_some_and(|bits| bits & 1 == 1)
    }

    /// Returns whether a penalty was in force when the request came.
    #[must_use]
    pub fn is_penalised(&self) -> bool {
        self.penalty.is_some()
    }

    /// Returns whether the `index`th charge was looked at.
    pub(crate) fn is_read(&self, index: usize) -> bool {
        self.unread & bit(index) == 0
    }

    /// Marks the decision as one that was made without some of the records.
    pub fn degrade(&mut self, reason: Degraded) {
        self.degraded = Some(reason);
    }

    /// Sets the history of the partition that every charge lies in.
    pub fn set_history(&mut self, history: History) {
        self.histories = self.settled.iter().map(|_| history).collect();
    }

    /// Returns whether the `index`th charge had room.
    #[must_use]
    pub fn fits(&self, index: usize) -> bool {
        self.settled.get(index).is_some_and(|settled| settled.look.allowed && settled.exception == Exception::None)
    }

    /// Returns what was found of the only charge of a bill, as a check of one limit answers it.
    #[must_use]
    pub fn checked(&self) -> Option<Checked> {
        let settled = self.settled.first()?;
        let (changed, history) = (self.balance_changed(0), self.history(0));
        Some(Checked { look: settled.look, mark: settled.mark, changed, history })
    }

    /// Returns the history of the partition of the `index`th charge.
    pub(crate) fn history(&self, index: usize) -> History {
        self.histories.get(index).copied().unwrap_or_default()
    }

    /// Returns whether anything must be saved. A denial usually changes nothing.
    #[must_use]
    pub fn changed(&self) -> bool {
        self.changed_balances != 0 || self.changed_standings != 0
    }

    /// Records that the store charged `other` in place of `key`, because it had no room for `key`. A refund then returns the
    /// cost to the key that it was taken from.
    pub fn stands_in(&mut self, key: Digest, other: Digest) {
        // Keys on a bill are distinct and at most `MAX_CHARGES`, so there is a place for each of them.
        let _ = self.stood_in.try_push((key, other));
    }

    /// Returns whether another key was charged in place of any key on the bill.
    pub(crate) fn has_stand_ins(&self) -> bool {
        !self.stood_in.is_empty()
    }

    /// Returns the key that was charged where the bill has `key`.
    pub(crate) fn charged_key(&self, key: Digest) -> Digest {
        self.stood_in.iter().find(|(own, _)| *own == key).map_or(key, |(_, other)| *other)
    }

    /// Forgets what a peek would have charged, so that a decision on it shows what is left without it. Returns whether there was anything.
    #[must_use]
    pub fn forget_charges(&mut self) -> bool {
        let is_charged = self.settled.iter().any(|settled| settled.mark.is_some());
        self.settled.iter_mut().for_each(|settled| settled.mark = None);
        is_charged
    }

    /// Returns the strikes that this request added.
    #[must_use]
    pub fn escalations(&self) -> &[Escalation] {
        &self.escalations
    }

    /// Returns whether a denial by the `index`th charge would be a strike that the client can see.
    pub(crate) fn would_warn(&self, index: usize) -> bool {
        self.would_warn & bit(index) != 0
    }

    /// Returns the time of settling, by the store's clock. It is the time of the answer.
    #[must_use]
    pub fn at(&self) -> Timestamp {
        self.at
    }

    /// Empties the outcome for the next bill. `at` is left, because settling sets it first.
    pub(crate) fn clear(&mut self) {
        self.settled.clear();
        self.escalations.clear();
        self.stood_in.clear();
        self.penalty = None;
        self.denied_until = Timestamp::EPOCH;
        self.shadowed = false;
        self.warned_until = [Timestamp::EPOCH; MAX_SUBJECTS];
        self.would_warn = 0;
        self.behind_ban = Timestamp::EPOCH;
        self.changed_balances = 0;
        self.changed_standings = 0;
        self.unread = 0;
        self.degraded = None;
        self.histories.clear();
    }

    pub(super) fn mark_balance(&mut self, index: usize) {
        self.changed_balances |= bit(index);
    }

    pub(super) fn mark_standing(&mut self, index: usize) {
        let bit = u32::try_from(index).ok().and_then(|index| 1u8.checked_shl(index));
        self.changed_standings |= bit.unwrap_or(0);
    }
}

/// Returns the bit of the charge or subject with this index.
pub(crate) fn bit(index: usize) -> u16 {
    u32::try_from(index).ok().and_then(|index| 1u16.checked_shl(index)).unwrap_or(0)
}
