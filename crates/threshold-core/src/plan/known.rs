//! Denials that a node may repeat for a moment without asking the store again.
//!
//! A store across a network answers a denial with what it found under each key of the bill. A node that keeps these findings can
//! deny the next request of the same caller by itself, as long as the store would deny it too.
//!
//! Three kinds of denial are not repeated, because the store must hear of the next request:
//!
//! - one by a limit, where a limit of the bill strikes a subject: the next request may be a strike. Under a penalty nothing strikes.
//! - one by a limit, where the bill spans partitions that are not settled in one step: another request may be about to give back
//!   what it was charged.
//! - one by a concurrency limit: a slot is free as soon as any request ends, on any node.

use arrayvec::ArrayVec;

use super::{MAX_CHARGES, Plan, Verb};
use crate::bill::{Charge, Terms};
use crate::decision::Decision;
use crate::key::Digest;
use crate::ladder::Penalty;
use crate::limit::{Limit, Look};
use crate::settle::{Exception, Outcome, Settled};
use crate::time::Timestamp;

/// What a store has found under one key of a request that it denied.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Known {
    /// The store's time of that.
    at: Timestamp,
    found: Found,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Found {
    /// What a limit answered about a cost. The limit and its terms are those of the policy that asked: an answer is repeated only
    /// under the same ones, whichever generation of the policy they come from.
    Balance { limit: Limit, terms: Terms, cost: u64, look: Look, exception: Exception },
    /// A penalty of a subject, the end of its last penalty, and until when its denials carry the warning.
    Standing { penalty: Penalty, denied_until: Timestamp, warned_until: Timestamp },
    /// A subject is under no penalty, and until when its denials carry the warning.
    Unpunished { warned_until: Timestamp },
    /// When limits and ladders would allow the request if there were no ban.
    BehindBan(Timestamp),
}

/// Whether a request can be denied by what is known.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Repeated {
    /// It is not known to be denied.
    No,
    /// It is denied, but the answer lacks the readings of limits that nothing is known of, or has the times of a smaller cost.
    Partly,
    /// It is denied, and the answer is complete.
    Fully,
}

/// A placeholder for a limit that nothing is known of. Its reading is removed from the decision.
const UNKNOWN: Look = Look {
    allowed: true,
    available: 0,
    ready_at: Timestamp::EPOCH,
    reset_if_charged: Timestamp::MAX,
    reset_if_not: Timestamp::MAX,
};

impl Known {
    /// Returns the store's time at which it was found.
    #[must_use]
    pub fn at(&self) -> Timestamp {
        self.at
    }

    /// Returns whether this denies requests at `now`, and does not only add figures to the answer.
    #[must_use]
    pub fn denies(&self, now: Timestamp) -> bool {
        match self.found {
            Found::Balance { terms, look, .. } => terms.enforced && !look.allowed && look.ready_at > now,
            Found::Standing { denied_until, .. } => denied_until > now,
            Found::Unpunished { .. } => false,
            Found::BehindBan(_) => true,
        }
    }

    /// Returns the cost that a limit was asked about; 0 for a penalty or a ban.
    #[must_use]
    pub fn cost(&self) -> u64 {
        match self.found {
            Found::Balance { cost, .. } => cost,
            Found::Standing { .. } | Found::Unpunished { .. } | Found::BehindBan(_) => 0,
        }
    }

    /// Returns what a check of one limit without a policy has found, if it is a denial that a node may repeat.
    #[must_use]
    pub fn of_denied_limit(limit: &Limit, cost: u64, look: &Look, at: Timestamp) -> Option<Self> {
        // A slot of a concurrency limit may be free again at any moment.
        if look.allowed || limit.is_concurrency() {
            return None;
        }
        let (terms, exception) = (Terms::OF_ONE_LIMIT, Exception::None);
        Some(Self { at, found: Found::Balance { limit: *limit, terms, cost, look: *look, exception } })
    }

    /// Returns the denial of a cost under one limit at `now`; `None` if it is not known to be denied.
    #[must_use]
    pub fn denial_of(&self, limit: &Limit, cost: u64, now: Timestamp) -> Option<Look> {
        let terms = &Terms::OF_ONE_LIMIT;
        let charge = Charge { key: Digest::from_u128(0), limit, cost, terms, subject: None };
        self.look_of(&charge).map(|(look, _)| look).filter(|look| !look.allowed && look.ready_at > now)
    }

    /// Returns what it says about a charge.
    fn look_of(&self, charge: &Charge<'_>) -> Option<(Look, Exception)> {
        let Found::Balance { limit, terms, cost, look, exception } = self.found else { return None };
        // What is full for a cost is full for a larger one. Whether it is full for a smaller one is not known, and neither is
        // what a limit with room says of any other cost.
        let says = if look.allowed { charge.cost == cost } else { charge.cost >= cost };
        (says && limit == *charge.limit && terms == *charge.terms).then_some((look, exception))
    }
}

impl Plan<'_> {
    /// Returns what a node may [repeat](Self::repeat) of this outcome, by key. `in_one_step` tells whether the store settles all
    /// partitions of a bill in one atomic step.
    pub fn repeatable<'o>(
        &'o self,
        outcome: &'o Outcome,
        in_one_step: bool,
    ) -> impl Iterator<Item = (Digest, Known)> + 'o {
        let bill = &self.bill;
        let now = outcome.at();
        let is_ban = self.banned(now).is_some();
        // A stand-in is full because of other callers.
        let is_genuine = bill.verb == Verb::Check && bill.punishes && !outcome.has_stand_ins() && !is_ban;
        let is_whole = in_one_step || bill.partitions().len() <= 1;
        let by_limit = !self.can_strike() && is_whole;
        let looks = is_genuine && (outcome.penalty.is_some() || by_limit);
        let read = bill.charges.iter().zip(&outcome.settled).enumerate().filter(|(index, _)| outcome.is_read(*index));
        let balances = read.filter_map(move |(_, (charge, settled))| {
            // Under a penalty, a full limit of a bill that spans partitions is left out for the same reason as without one.
            let is_certain = settled.look.allowed || is_whole;
            let Charge { key, limit, cost, terms, .. } = *charge;
            let Settled { look, exception, .. } = *settled;
            let found = Found::Balance { limit: *limit, terms: *terms, cost, look, exception };
            let known = Known { at: settled.at, found };
            // With room it only adds a figure to the answer.
            let may_deny = limit.is_concurrency() && !settled.look.allowed;
            (looks && is_certain && !may_deny).then_some((key, known))
        });
        let standing = self.penalty_in_force(outcome).filter(|_| is_genuine);
        let subjects = self.subjects.iter().zip(outcome.warned_until).filter(move |_| looks && standing.is_none());
        let unpunished = subjects.map(move |(subject, warned_until)| {
            (subject.key, Known { at: now, found: Found::Unpunished { warned_until } })
        });
        let behind = (is_ban && bill.verb == Verb::Check)
            .then(|| (self.ban_key(), Known { at: now, found: Found::BehindBan(outcome.behind_ban) }));
        balances.chain(standing).chain(unpunished).chain(behind)
    }

    /// Returns whether a denial by a limit of this bill may be a strike. A subject alone is only looked up for its penalties.
    fn can_strike(&self) -> bool {
        self.bill.charges.iter().any(|charge| charge.subject.is_some())
    }

    /// Returns what is known of each key that this outcome has charged, from then on; `None` where that is not enough for another
    /// charge of the same cost.
    pub fn charged_keys<'o>(&'o self, outcome: &'o Outcome) -> impl Iterator<Item = (Digest, Option<Known>)> + 'o {
        let settled = self.bill.charges.iter().zip(&outcome.settled);
        let is_charged = self.bill.verb != Verb::Peek;
        settled.filter(move |_| is_charged).filter_map(|(charge, settled)| {
            let Settled { at, look, mark: Some(mark), .. } = *settled else { return None };
            let Charge { key, limit, cost, terms, .. } = *charge;
            let available = look.available.saturating_sub(mark.amount);
            let look = Look { available, reset_if_not: look.reset_if_charged, ..look };
            let exception = Exception::None;
            let known = Known { at, found: Found::Balance { limit: *limit, terms: *terms, cost, look, exception } };
            Some((key, (look.allowed && available >= cost).then_some(known)))
        })
    }

    /// Returns the penalties that this outcome shows: the one in force, and those that the request has brought.
    pub fn penalties<'o>(&'o self, outcome: &'o Outcome) -> impl Iterator<Item = (Digest, Known)> + 'o {
        let now = outcome.at();
        let brought = outcome.escalations.iter().filter_map(move |strike| {
            let denied_until = self.rung_ends(strike, now)?;
            let penalty = match strike.banned_until {
                Some(until) => Penalty::Ban(until),
                None => Penalty::CoolDown(denied_until),
            };
            let warned_until = outcome.warned_until.get(strike.subject).copied().unwrap_or_default();
            let found = Found::Standing { penalty, denied_until, warned_until };
            Some((self.subjects.get(strike.subject)?.key, Known { at: now, found }))
        });
        self.penalty_in_force(outcome).into_iter().chain(brought)
    }

    fn penalty_in_force(&self, outcome: &Outcome) -> Option<(Digest, Known)> {
        let (subject, penalty) = outcome.penalty?;
        let warned_until = outcome.warned_until.get(subject).copied().unwrap_or_default();
        let found = Found::Standing { penalty, denied_until: outcome.denied_until, warned_until };
        Some((self.subjects.get(subject)?.key, Known { at: outcome.at(), found }))
    }

    /// Denies this request by penalties that are known, if one is in force; an operator's ban comes before them. The decision has
    /// no readings.
    pub fn decide_penalised(&self, mut known: impl FnMut(Digest) -> Option<(Known, Timestamp)>) -> Option<Decision> {
        // What is recorded has already happened, and is never denied.
        if self.ban.is_some() || self.bill.verb == Verb::Record {
            return None;
        }
        let (mut outcome, mut decision) = (Outcome::default(), Decision::default());
        if !self.repeat_penalties(&mut known, &mut outcome) {
            return None;
        }
        self.prepare(&mut decision);
        decision.remove_readings(|_| true);
        self.conclude(&outcome, &mut decision);
        Some(decision)
    }

    /// Returns the keys that [`repeat`](Self::repeat) may ask for.
    pub fn repeatable_keys(&self) -> impl Iterator<Item = Digest> {
        let keys = self.bill.charges.iter().map(|charge| charge.key);
        let ban = self.ban.is_some().then(|| self.ban_key());
        keys.chain(self.subjects.iter().map(|subject| subject.key)).chain(ban)
    }

    /// Denies a request that this plan has [prepared](Self::prepare) a decision for by what is known, if that denies it. `known`
    /// returns what was found under a key for this cost, or for a smaller one, and the store's time by now.
    pub fn repeat(
        &self,
        mut known: impl FnMut(Digest, u64) -> Option<(Known, Timestamp)>,
        outcome: &mut Outcome,
        decision: &mut Decision,
    ) -> Repeated {
        if self.bill.verb != Verb::Check || !self.bill.punishes {
            return Repeated::No;
        }
        outcome.clear();
        if let Some(ban) = self.ban {
            let found = known(self.ban_key(), 0).filter(|(_, now)| ban.until > *now);
            let Some((Known { found: Found::BehindBan(behind), .. }, now)) = found else { return Repeated::No };
            (outcome.at, outcome.behind_ban) = (now, behind);
            self.conclude(outcome, decision);
            return Repeated::Fully;
        }
        let mut denied = self.repeat_penalties(&mut |key| known(key, 0), outcome);
        let is_unpunished = !denied && !self.can_strike() && self.repeat_warnings(&mut |key| known(key, 0), outcome);
        let mut is_full = true;
        let mut unread: ArrayVec<bool, MAX_CHARGES> = ArrayVec::new();
        for charge in &self.bill.charges {
            let found = known(charge.key, charge.cost).and_then(|(known, now)| {
                is_full &= known.cost() == charge.cost;
                Some((known.look_of(charge)?, now))
            });
            // A full limit has room again from then on, and how much is not known.
            let found = found.filter(|((look, _), now)| look.allowed || look.ready_at > *now);
            if let Some(((look, _), now)) = found {
                outcome.at = outcome.at.max(now);
                denied |= charge.enforced() && !look.allowed && is_unpunished;
            }
            let ((look, exception), at) = found.unwrap_or(((UNKNOWN, Exception::None), Timestamp::EPOCH));
            let _ = outcome.settled.try_push(Settled { at, look, mark: None, exception });
            let _ = unread.try_push(found.is_none());
        }
        if !denied {
            return Repeated::No;
        }
        self.conclude(outcome, decision);
        if unread.contains(&true) {
            let is_unread = |charge: usize| unread.get(charge).copied().unwrap_or(false);
            decision.remove_readings(|index| self.met.get(index).is_some_and(|met| is_unread(met.charge)));
            is_full = false;
        }
        if is_full { Repeated::Fully } else { Repeated::Partly }
    }

    /// Finds the harshest penalty in force that is known. Returns whether there is one.
    fn repeat_penalties(
        &self,
        known: &mut impl FnMut(Digest) -> Option<(Known, Timestamp)>,
        outcome: &mut Outcome,
    ) -> bool {
        outcome.at = Timestamp::EPOCH;
        for (index, subject) in self.subjects.iter().enumerate() {
            let Some((known, now)) = known(subject.key).filter(|(known, now)| known.denies(*now)) else { continue };
            let Found::Standing { penalty, denied_until, warned_until } = known.found else { continue };
            // The time until which it is denied may be that of another penalty of the same request.
            if outcome.penalty.is_none_or(|(_, other)| penalty.rank() > other.rank()) {
                outcome.penalty = Some((index, penalty));
            }
            outcome.denied_until = outcome.denied_until.max(denied_until);
            outcome.at = outcome.at.max(now);
            if let Some(warned) = outcome.warned_until.get_mut(index) {
                *warned = if warned_until > now { warned_until } else { Timestamp::EPOCH };
            }
        }
        outcome.penalty.is_some()
    }

    /// Notes the warnings of subjects. Returns whether all of them are known to be under no penalty.
    fn repeat_warnings(
        &self,
        known: &mut impl FnMut(Digest) -> Option<(Known, Timestamp)>,
        outcome: &mut Outcome,
    ) -> bool {
        self.subjects.iter().zip(&mut outcome.warned_until).all(|(subject, warned)| {
            let Some((Known { found: Found::Unpunished { warned_until }, .. }, now)) = known(subject.key) else {
                return false;
            };
            *warned = if warned_until > now { warned_until } else { Timestamp::EPOCH };
            true
        })
    }

    /// Returns a key of the ban together with everything that it hides on this bill.
    fn ban_key(&self) -> Digest {
        let id = self.ban.map_or(0, |ban| ban.id.to_u128());
        let charges = self.bill.charges.iter().map(|charge| charge.key.to_u128() ^ u128::from(charge.cost));
        let keys = charges.chain(self.subjects.iter().map(|subject| subject.key.to_u128()));
        // Digests are random, so a sum of them in their order is as good as a digest of them.
        Digest::from_u128(keys.fold(id, |sum, key| sum.rotate_left(1).wrapping_add(key)))
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use super::*;
    use crate::balance::Balance;
    use crate::facts::Facts;
    use crate::ladder::Standing;
    use crate::policy::Policy;
    use crate::settle::settle;
    use crate::time::Span;

    const NOW: Timestamp = Timestamp::from_secs(1_767_225_630);

    fn policy(text: &str) -> Policy {
        Policy::parse(text, &|_| None).unwrap()
    }

    fn rule(name: &str, per: &str, more: &str) -> String {
        format!("[[rule]]\nname = '{name}'\nper = ['{per}']\n{more}\n")
    }

    fn ada() -> Facts<'static> {
        Facts { user: Some("ada"), tenant: Some("acme"), ..Facts::default() }
    }

    /// Sends requests to a store until it denies, and returns what is known from then on.
    fn denied<'p>(policy: &'p Policy, facts: &Facts<'_>) -> (Plan<'p>, BTreeMap<Digest, Known>) {
        let plan = policy.plan(facts).unwrap();
        let mut balances = vec![Balance::default(); plan.charges().len()];
        let mut standings = vec![Standing::default(); plan.subjects().len()];
        for _ in 0..100 {
            let outcome = settle(plan.bill(), &mut balances, &mut standings, NOW);
            // The request that brought a penalty may have been a strike. The next one is denied by the penalty alone.
            if !plan.decide(&outcome).allowed() && outcome.escalations().is_empty() {
                let known = plan.repeatable(&outcome, true).collect();
                return (plan, known);
            }
        }
        panic!("never denied");
    }

    fn repeat_how(plan: &Plan<'_>, known: &BTreeMap<Digest, Known>, now: Timestamp) -> (Repeated, Decision) {
        let (mut outcome, mut decision) = (Outcome::default(), Decision::default());
        plan.prepare(&mut decision);
        let found = |key: Digest, _| known.get(&key).map(|known| (*known, now));
        (plan.repeat(found, &mut outcome, &mut decision), decision)
    }

    fn repeat(plan: &Plan<'_>, known: &BTreeMap<Digest, Known>, now: Timestamp) -> Option<Decision> {
        let (repeated, decision) = repeat_how(plan, known, now);
        (repeated != Repeated::No).then_some(decision)
    }

    /// The repeated answer counts down like that of the store, and ends when the limit has room.
    #[test]
    fn a_repeated_denial_reads_like_that_of_the_store() {
        let text = rule("user", "user", "limit = '2/min'\nalgorithm = 'fixed-window'")
            + &rule("tenant", "tenant", "limit = '9/h'\nalgorithm = 'fixed-window'");
        let policy = policy(&text);
        let (plan, known) = denied(&policy, &ada());
        let (repeated, first) = repeat_how(&plan, &known, NOW);
        assert_eq!((repeated, first.retry_after_secs()), (Repeated::Fully, Some(30)));
        let remaining: Vec<_> = first.readings.iter().map(|reading| reading.remaining).collect();
        assert_eq!(remaining, [7, 0], "the tenant comes first");
        assert_eq!(first.rule(&policy).unwrap().name.as_ref(), "user");
        let later = repeat(&plan, &known, NOW.plus(Span::from_secs(7))).unwrap();
        assert_eq!(later.retry_after_secs(), Some(23));
        assert!(repeat(&plan, &known, NOW.plus(Span::from_secs(30))).is_none(), "the window is over");
    }

    /// A client over its limit sent each request as another tenant. Its denials were asked for each time, or answered with the
    /// figures of a tenant that nobody had looked at.
    #[test]
    fn a_limit_that_nothing_is_known_of_has_no_reading() {
        let text = rule("user", "user", "limit = '2/min'\nalgorithm = 'fixed-window'")
            + &rule("tenant", "tenant", "limit = '9/h'\nalgorithm = 'fixed-window'");
        let policy = policy(&text);
        let (_, known) = denied(&policy, &ada());
        let other = policy.plan(&Facts { tenant: Some("other"), ..ada() }).unwrap();
        let (repeated, decision) = repeat_how(&other, &known, NOW);
        assert_eq!((repeated, decision.readings.len()), (Repeated::Partly, 1));
        assert_eq!(decision.rule(&policy).unwrap().name.as_ref(), "user");
        let bob = policy.plan(&Facts { user: Some("bob"), ..ada() }).unwrap();
        assert!(repeat(&bob, &known, NOW).is_none(), "his own limit has room");
    }

    #[test]
    fn a_denial_is_repeated_for_its_cost_and_larger_ones() {
        let policy = policy(&rule("user", "user", "limit = '10/min'"));
        let (plan, known) = denied(&policy, &Facts { cost: Some(4), ..ada() });
        assert_eq!(repeat_how(&plan, &known, NOW).0, Repeated::Fully);
        let of = |cost| policy.plan(&Facts { cost: Some(cost), ..ada() }).unwrap();
        assert_eq!(repeat_how(&of(5), &known, NOW).0, Repeated::Partly, "its times are those of the smaller cost");
        assert!(repeat(&of(3), &known, NOW).is_none());
    }

    /// A denial was repeated under a policy that had raised the limit.
    #[test]
    fn a_changed_limit_ends_a_denial_and_the_same_policy_does_not() {
        let text = |limit: &str| rule("user", "user", &format!("limit = '{limit}'"));
        let first = policy(&text("2/min"));
        let (_, known) = denied(&first, &ada());
        let same = policy(&text("2/min")).with_generation(9);
        assert!(repeat(&same.plan(&ada()).unwrap(), &known, NOW).is_some());
        for other in [text("3/min"), text("2/min") + "mode = 'observe'\n"] {
            let other = policy(&other);
            assert!(repeat(&other.plan(&ada()).unwrap(), &known, NOW).is_none());
        }
    }

    /// Repeated denials would keep strikes from the store, and nobody would ever be banned. A penalty in force adds none.
    #[test]
    fn with_a_ladder_only_penalties_are_repeated() {
        let text = "[ladders.own]\nrungs = ['deny', 'cooldown 1min']\n".to_owned()
            + &rule("user", "user", "limit = '1/h'\nladder = 'own'\nstrike = 'request'");
        let policy = policy(&text);
        let (plan, known) = denied(&policy, &ada());
        let cooling = repeat(&plan, &known, NOW.plus(Span::from_secs(59))).unwrap();
        assert!(cooling.penalty.is_some() && !cooling.allowed());
        assert!(
            repeat(&plan, &known, NOW.plus(Span::MINUTE)).is_none(),
            "the cool-down is over: the next request strikes"
        );
        let gentle = "[ladders.own]\nrungs = ['deny']\n".to_owned()
            + &rule("user", "user", "limit = '1/h'\nladder = 'own'\nstrike = 'window'");
        let gentle = self::policy(&gentle);
        let (plan, known) = denied(&gentle, &ada());
        assert!(known.is_empty() && repeat(&plan, &known, NOW).is_none());
    }

    /// A rule on another path had a ladder by the same user. Each denial by a quota without one was asked for again, a thousand times a
    /// second, because the user had a standing to look up.
    #[test]
    fn a_ladder_that_the_request_cannot_climb_does_not_keep_its_denial_from_being_repeated() {
        let text = "[ladders.own]\nrungs = ['deny', 'ban 1h']\n".to_owned()
            + &rule("quota", "user", "limit = '2/min'\nmatch = { path = '/quota' }")
            + &rule(
                "other",
                "user",
                "limit = '1/min'\nmatch = { path = '/other' }\nladder = 'own'\nstrike = 'request'",
            );
        let policy = policy(&text);
        let at = |path| Facts { path: Some(path), method: Some("GET"), ..ada() };
        let (plan, known) = denied(&policy, &at("/quota"));
        assert_eq!(plan.subjects().len(), 1, "a ban by the ladder holds here too");
        assert_eq!(repeat_how(&plan, &known, NOW).0, Repeated::Fully);
        let (other, struck) = denied(&policy, &at("/other"));
        assert!(repeat_how(&other, &known, NOW).0 == Repeated::No, "it strikes");
        // Of a subject that nobody has looked at nothing is known, and one that is banned meanwhile is banned here.
        let subject = plan.subjects()[0].key;
        let without: BTreeMap<_, _> = known.clone().into_iter().filter(|(key, _)| *key != subject).collect();
        assert!(repeat(&plan, &without, NOW).is_none());
        let banned = known.into_iter().chain(struck).collect();
        assert!(repeat(&plan, &banned, NOW).is_some_and(|decision| decision.banned()));
    }

    #[test]
    fn peeks_records_observed_and_concurrency_limits_are_not_repeated() {
        let policy = policy(&rule("user", "user", "limit = '1/h'"));
        let (_, known) = denied(&policy, &ada());
        for verb in [Verb::Peek, Verb::Record] {
            assert!(repeat(&policy.plan_for(verb, &ada()).unwrap(), &known, NOW).is_none());
        }
        let waits = policy.plan(&ada()).unwrap().without_punishment();
        assert!(repeat(&waits, &known, NOW).is_none(), "a request that waits would be answered too late");
        let held = self::policy(&rule("user", "user", "limit = '1'\nalgorithm = 'concurrency'"));
        let (plan, known) = denied(&held, &ada());
        assert!(repeat(&plan, &known, NOW).is_none());
    }

    /// A denial that spans partitions may be by a charge that is about to be given back.
    #[test]
    fn a_denial_that_spans_partitions_is_repeated_only_if_it_was_one_step() {
        let text = rule("user", "user", "limit = '1/h'") + &rule("tenant", "tenant", "limit = '9/h'");
        let policy = policy(&text);
        let plan = policy.plan(&ada()).unwrap();
        assert_eq!(plan.bill().partitions().len(), 2);
        let mut balances = vec![Balance::default(); 2];
        let _ = settle(plan.bill(), &mut balances, &mut [], NOW);
        let outcome = settle(plan.bill(), &mut balances, &mut [], NOW);
        assert_eq!(plan.repeatable(&outcome, false).count(), 0);
        assert_eq!(plan.repeatable(&outcome, true).count(), 2);
    }
}
