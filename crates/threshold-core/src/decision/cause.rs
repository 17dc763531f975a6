//! The cause of a denial: what denied the request, and whether its caller is to blame for that.

use std::fmt;

use super::{Decision, Degraded, Verdict};
use crate::policy::{Layer, Listed, Policy};
use crate::time::Timestamp;

/// Why a request was denied.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Cause {
    /// A limit has no room, or its rule's `block_for` is not over.
    Limit,
    /// The request lacks an identity that its rule counts by, or the tier whose limit the rule takes.
    Missing,
    /// An operator's ban.
    Ban,
    /// A ladder's ban or cool-down in force, which an earlier request has earned.
    Ladder,
    /// A pause of the subject.
    Pause,
    /// A deny list of the policy.
    List,
    /// The store could not answer, and a rule denies then, or it has no room for another key.
    Outage,
    /// Login protection: the address has made too many attempts, or the account is locked.
    Login,
}

impl Cause {
    /// All causes.
    pub const ALL: [Self; 8] =
        [Self::Limit, Self::Missing, Self::Ban, Self::Ladder, Self::Pause, Self::List, Self::Outage, Self::Login];

    /// Returns the name on the wire.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Limit => "limit",
            Self::Missing => "missing",
            Self::Ban => "ban",
            Self::Ladder => "ladder",
            Self::Pause => "pause",
            Self::List => "list",
            Self::Outage => "outage",
            Self::Login => "login",
        }
    }

    /// Returns the cause with this name.
    #[must_use]
    pub fn named(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|cause| cause.name() == name)
    }

    /// Returns whether the caller has brought about the denial. Then it counts for its layer and in alerts. A caller that an operator
    /// or a list stops is known already, and for an outage it is not to blame.
    #[must_use]
    pub const fn blames_caller(self) -> bool {
        match self {
            Self::Limit | Self::Missing | Self::Ladder | Self::Login => true,
            Self::Ban | Self::Pause | Self::List | Self::Outage => false,
        }
    }
}

impl fmt::Display for Cause {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// The kind of a penalty in force.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum PenaltyKind {
    /// An operator's ban.
    OperatorBan,
    /// A ban by a ladder.
    LadderBan,
    /// A cool-down by a ladder.
    CoolDown,
}

/// The penalty that denied a request, whatever its limits were.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PenaltyInForce {
    /// The layer of the subject.
    pub layer: Layer,
    /// The kind.
    pub kind: PenaltyKind,
    /// When it ends; [`Timestamp::MAX`] is never.
    pub until: Timestamp,
}

impl Decision {
    /// Returns why the request was denied; `None` if it is allowed.
    #[must_use]
    pub fn cause(&self) -> Option<Cause> {
        if self.allowed() {
            return None;
        }
        Some(match self.penalty.map(|penalty| penalty.kind) {
            Some(PenaltyKind::OperatorBan) => Cause::Ban,
            Some(PenaltyKind::LadderBan | PenaltyKind::CoolDown) => Cause::Ladder,
            None if self.listed == Some(Listed::Deny) => Cause::List,
            None if self.unavailable() => Cause::Outage,
            None => self.denied_for,
        })
    }

    /// Returns when the ban, the penalty or the pause ends that denied the request; `None` if it has no end, or if something else
    /// denied.
    #[must_use]
    pub fn denied_until(&self) -> Option<Timestamp> {
        match self.cause()? {
            Cause::Ban | Cause::Ladder => self.penalty?.until.unless_never(),
            Cause::Pause => self.bound_by()?.ready_at(),
            Cause::Limit | Cause::Missing | Cause::List | Cause::Outage | Cause::Login => None,
        }
    }

    /// Returns the layer of the penalty that denied, if one did.
    #[must_use]
    pub fn penalty_layer(&self) -> Option<Layer> {
        self.penalty.map(|penalty| penalty.layer)
    }

    /// Returns the layer that a denial counts for in statistics; `None` if its caller is not to blame. `policy` must be the one
    /// that decided.
    #[must_use]
    pub fn blocked_layer(&self, policy: &Policy) -> Option<Layer> {
        self.cause().filter(|cause| cause.blames_caller())?;
        self.penalty_layer().or_else(|| self.rule(policy).map(|rule| rule.layer))
    }

    /// Returns whether the request was denied because the store could not answer.
    #[must_use]
    pub fn unavailable(&self) -> bool {
        // With these two the store did answer.
        let decided = |reason| matches!(reason, Degraded::Journal | Degraded::SharedBudget);
        // A limit that was counted without the store, under `on_store_error = "local"`, denies as any other does.
        // A penalty that the node has seen denies without it as well.
        let blind = self.verdict == Verdict::Deny && self.readings.is_empty() && self.penalty.is_none();
        blind && self.degraded.is_some_and(|reason| !decided(reason))
    }
}
