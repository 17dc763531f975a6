//! The plan of one request: the rules it meets, the budgets they charge, and the subjects it can strike.
//!
//! A policy makes the plan, a store settles the plan's [`Bill`], and the plan turns the outcome into a decision. Everything is
//! inline: planning an ordinary request allocates nothing.

mod contention;
mod error;
mod fill;
mod known;
mod local;
mod met;
mod rekey;
mod several;
mod shadow;
mod stand_in;
mod subject_keys;

use std::net::IpAddr;

use arrayvec::ArrayVec;

use crate::bill::{self, Bill};
use crate::command::Command;
use crate::key::TraceId;
use crate::policy::{Banned, Listed, Policy, Rule};
use crate::time::Timestamp;

pub use error::PlanError;
pub use known::{Known, Repeated};
pub use met::{Met, Subject};
pub use subject_keys::SubjectKeys;

/// The largest number of charges in one plan. Outcomes hold a bit for each in a `u16`.
pub const MAX_CHARGES: usize = 16;
/// The largest number of subjects in one plan. Outcomes hold a bit for each in a `u8`.
pub const MAX_SUBJECTS: usize = 4;

/// The rules that one request meets under a policy, and the bill that a store settles for them.
#[derive(Debug, Clone)]
#[must_use = "a plan decides nothing until it is settled"]
pub struct Plan<'p> {
    pub(crate) policy: &'p Policy,
    pub(crate) listed: Option<Listed>,
    /// A ban of this caller. It may have ended by the time the plan is decided: planning does not know the time.
    pub(crate) ban: Option<Banned>,
    pub(crate) met: ArrayVec<Met<'p>, MAX_CHARGES>,
    pub(crate) subjects: ArrayVec<Subject<'p>, MAX_SUBJECTS>,
    pub(crate) ip: Option<IpAddr>,
    /// The number of requests that are planned.
    requests: usize,
    /// Whether a rule whose identity a request lacks does not apply to it.
    skips_missing: bool,
    pub(crate) bill: Bill<'p>,
}

/// What is done with a plan.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Verb {
    /// Decide and charge.
    Check,
    /// Return what `Check` would return, and change nothing.
    Peek,
    /// Charge after the fact; never denies.
    Record,
}

/// Returns when a ban ends; a time in the past where there is none.
fn banned_until(ban: &Option<Banned>) -> Timestamp {
    ban.map_or(Timestamp::EPOCH, |ban| ban.until)
}

impl<'p> Plan<'p> {
    /// Makes an empty plan.
    pub fn new(policy: &'p Policy, verb: Verb) -> Self {
        Self {
            policy,
            listed: None,
            ban: None,
            met: ArrayVec::new(),
            subjects: ArrayVec::new(),
            ip: None,
            requests: 0,
            skips_missing: false,
            bill: Bill::new(verb),
        }
    }

    /// Sets whether a rule applies to the requests that are added next if they lack its identity and an address to stand in for it.
    /// It does, and then the request cannot be planned, unless this is set: for requests that tell a part of what is known, such as
    /// one of several descriptors. An identity that a request names and leaves empty is not skipped.
    pub fn skip_missing(&mut self, skips: bool) {
        self.skips_missing = skips;
    }

    /// Makes a plan that charges nothing and finds out only which penalties of these subjects are in force.
    pub(crate) fn of_subjects(
        policy: &'p Policy,
        verb: Verb,
        trace: TraceId,
        (listed, ban): (Option<Listed>, Option<Banned>),
        subjects: ArrayVec<Subject<'p>, MAX_SUBJECTS>,
    ) -> Self {
        let mut plan = Self { listed, ban, ..Self::new(policy, verb) };
        plan.bill.trace = trace;
        plan.bill.banned_until = banned_until(&ban);
        for subject in subjects {
            // Cannot fail: both arrays hold `MAX_SUBJECTS`.
            let _ = plan.place_subject(subject);
        }
        plan
    }

    /// Gives the decision an id, unless the facts came with one.
    #[inline]
    pub fn identify(&mut self, draw: impl FnOnce() -> TraceId) {
        // Drawing costs a call of the host's random source, so it is a function and not a value.
        if self.bill.trace == TraceId::default() {
            self.bill.trace = draw();
            self.choose_shards();
        }
    }

    /// Settles this plan under an id of its own, and leaves its shards as they are: for a request that is tried again. A store remembers by
    /// the id what it has given back, so that no two charges may share one.
    pub fn retry_as(&mut self, id: TraceId) {
        self.bill.trace = id;
    }

    /// Chooses the shard of each limit that is split, by the id of the decision.
    #[inline]
    fn choose_shards(&mut self) {
        for met in self.met.iter_mut().filter(|met| met.shards > 1) {
            met.choose_shard(self.bill.trace);
            // Requests with one budget share a charge, and one id, so they choose the same shard.
            if let Some(charge) = self.bill.charges.get_mut(met.charge) {
                charge.key = met.key;
            }
        }
    }

    /// Returns the ban in force at `now`.
    pub(crate) fn banned(&self, now: Timestamp) -> Option<Banned> {
        // The settle step compares the same two times, by the store's clock. Decided here by any other `now`, a ban
        // could apply to a bill that was charged.
        self.ban.filter(|ban| ban.until > now)
    }

    /// Returns the policy of this plan.
    #[must_use]
    pub fn policy(&self) -> &'p Policy {
        self.policy
    }

    /// Returns the bill that a store settles.
    #[must_use]
    pub fn bill(&self) -> &Bill<'p> {
        &self.bill
    }

    /// Returns the command that settles this plan in another process.
    #[must_use]
    pub fn to_command(&self) -> Command {
        Command::Settle(Box::new(self.bill.to_owned()))
    }

    /// Returns the charges that a store settles, each key once.
    #[must_use]
    pub fn charges(&self) -> &[bill::Charge<'p>] {
        &self.bill.charges
    }

    /// Returns the rules that were met, in the order of the decision's readings.
    #[must_use]
    pub fn met(&self) -> &[Met<'p>] {
        &self.met
    }

    /// Returns the rule of the `charge`th charge.
    #[must_use]
    pub fn rule_of(&self, charge: usize) -> Option<&'p Rule> {
        // Several rules met can share a charge only under one key, and a key belongs to one rule, so the first one
        // found is right.
        self.met.iter().find(|met| met.charge == charge).map(|met| met.rule)
    }

    /// Returns the enforced rules that the request meets, in the order of the policy.
    pub(crate) fn enforced_rules(&self) -> impl Iterator<Item = &'p Rule> {
        self.met.iter().filter(|met| met.enforced()).map(|met| met.rule)
    }

    /// Returns the subjects that the request can be punished as.
    #[must_use]
    pub fn subjects(&self) -> &[Subject<'p>] {
        &self.subjects
    }

    /// Returns whether an operator's ban or a deny list names one of the requests.
    #[must_use]
    pub fn is_denied_by_name(&self) -> bool {
        self.ban.is_some() || self.listed == Some(Listed::Deny)
    }

    /// Returns what is done with this plan.
    #[must_use]
    pub fn verb(&self) -> Verb {
        self.bill.verb
    }

    /// Returns this plan for a door that sees responses: rules that count by outcome are charged now, and the door refunds
    /// those whose outcome did not occur.
    pub fn seeing_outcomes(mut self) -> Self {
        self.bill.outcomes_seen = true;
        self
    }

    /// Returns this plan without costs, bans and subjects, to look at nothing but its limits.
    pub fn only_limits(mut self) -> Self {
        // Plan and bill both hold costs and subjects, and a decision reads both.
        self.met.iter_mut().for_each(|met| met.cost = 0);
        self.subjects.clear();
        self.ban = None;
        self.bill.charges.iter_mut().for_each(|charge| charge.cost = 0);
        self.bill.subjects.clear();
        self.bill.banned_until = Timestamp::EPOCH;
        self
    }

    /// Returns this plan for a request that may exceed a limit unpunished: it adds no strike, so no rung lifts its denial
    /// either, and it begins no block. Penalties and blocks in force still apply.
    pub fn without_punishment(mut self) -> Self {
        self.bill.punishes = false;
        self
    }

    /// Returns the id of the decision.
    #[must_use]
    pub fn trace(&self) -> TraceId {
        self.bill.trace
    }
}
