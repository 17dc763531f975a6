//! Compares two policies on the same traffic: the requests that one stops and the other allows.

use threshold_core::policy::Policy;

use super::rehearsal::ReplayedDecision;
use super::top_subjects::TopSubjects;

/// The differences between a policy and another, in both directions.
#[derive(Debug)]
pub(super) struct Comparison {
    /// Stopped by this policy, allowed by the other; by this policy's rules.
    pub(super) newly: Difference,
    /// Allowed by this policy, stopped by the other; by the other's rules.
    pub(super) no_longer: Difference,
}

/// The requests that one policy stops and the other allows.
#[derive(Debug)]
pub(super) struct Difference {
    pub(super) requests: u64,
    /// By rule, with the rules' names; penalties and lists last.
    pub(super) rules: Vec<(String, u64)>,
    pub(super) subjects: TopSubjects,
}

impl Difference {
    fn new(policy: &Policy) -> Self {
        let names = policy.rules().iter().map(|rule| rule.name.to_string());
        let rules = names.chain(["penalties and lists".to_owned()]).map(|name| (name, 0)).collect();
        Self { requests: 0, rules, subjects: TopSubjects::default() }
    }

    fn add(&mut self, name: &str, decided: &ReplayedDecision, micros: u64) {
        self.requests = self.requests.saturating_add(1);
        if let Some((_, count)) = self.rules.get_mut(decided.reason) {
            *count = count.saturating_add(1);
        }
        self.subjects.add(decided.kind, name, Some(decided.reason), decided.verdict, micros);
    }

    /// Returns the rules that stopped requests, the most frequent first.
    pub(super) fn by_rule(&self) -> Vec<(&str, u64)> {
        let mut rules: Vec<(&str, u64)> =
            self.rules.iter().filter(|(_, count)| *count > 0).map(|(name, count)| (name.as_str(), *count)).collect();
        rules.sort_by_key(|(_, count)| std::cmp::Reverse(*count));
        rules
    }
}

impl Comparison {
    pub(super) fn new(policy: &Policy, other: &Policy) -> Self {
        Self { newly: Difference::new(policy), no_longer: Difference::new(other) }
    }

    /// Counts one request, with the decision of each policy and the name of the subject that it affected.
    pub(super) fn add(&mut self, own: (&ReplayedDecision, &str), other: (&ReplayedDecision, &str), micros: u64) {
        // Only a change between allowed and stopped counts. Another rule or another wait makes no difference to the
        // client.
        match (own.0.verdict.allows(), other.0.verdict.allows()) {
            (false, true) => self.newly.add(own.1, own.0, micros),
            (true, false) => self.no_longer.add(other.1, other.0, micros),
            (true, true) | (false, false) => {}
        }
    }
}
