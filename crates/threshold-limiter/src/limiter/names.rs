//! Records the names of subjects that a ladder has banned: a standing holds only a digest, and operators need the name.

use threshold_core::plan::{SubjectKeys, Verb};
use threshold_core::policy::Ban;
use threshold_core::settle::Escalation;
use threshold_core::{Decision, Digest, Facts, Plan};

use super::Limiter;
use crate::clock::Clock;
use crate::observer::Operation;
use crate::store::{Command, Store, StoreError};

impl<S: Store, C: Clock> Limiter<S, C> {
    /// Records the subjects that this decision's strikes have banned. Called for every decision, before observers are
    /// notified and before anyone waits for the disk: the name must be in the journal no later than the ban.
    #[inline]
    pub(crate) fn name_banned(&self, plan: &Plan<'_>, facts: &Facts<'_>, decision: &Decision) {
        if decision.escalations.iter().any(|strike| strike.rung.ban.is_some()) {
            self.name_each_banned(plan, facts, decision);
        }
    }

    #[cold]
    fn name_each_banned(&self, plan: &Plan<'_>, facts: &Facts<'_>, decision: &Decision) {
        for strike in decision.escalations.iter().filter(|strike| strike.rung.ban.is_some()) {
            self.name_struck(plan, facts, decision, strike);
        }
    }

    fn name_struck(&self, plan: &Plan<'_>, facts: &Facts<'_>, decision: &Decision, strike: &Escalation) {
        let (Some(subject), Some(until)) = (plan.subjects().get(strike.subject), strike.banned_until) else {
            return;
        };
        let Some(whom) = plan.policy().name_of(subject.layer(), facts) else { return };
        let rule = plan.rule_of(strike.charge).map_or("", |rule| &rule.name);
        let reason = format!("strike {} under the rule {rule}", strike.strikes);
        let ban = Ban { whom, reason: reason.into(), by: "ladder".into(), from: decision.at, until };
        self.bans.name(subject.key(), ban, decision.at);
    }

    /// Records the subjects that a decision on several requests has banned, each by the name in the request that it belongs to.
    pub(super) fn name_banned_of(&self, plan: &Plan<'_>, requests: &[&Facts<'_>], decision: &Decision) {
        for strike in decision.escalations.iter().filter(|strike| strike.rung.ban.is_some()) {
            let Some(subject) = plan.subjects().get(strike.subject) else { continue };
            let is_of = |facts: &&&Facts<'_>| {
                let mut alone = Plan::new(plan.policy(), Verb::Peek);
                alone.skip_missing(true);
                let planned = alone.add(&Facts { cost: Some(0), bytes: Some(0), costs: &[], ..***facts });
                planned.is_ok() && alone.subjects().iter().any(|own| own.key() == subject.key())
            };
            if let Some(facts) = requests.iter().find(is_of) {
                self.name_struck(plan, facts, decision, strike);
            }
        }
    }

    /// Ends the penalties of the subject with this key, and removes its strikes and its name.
    ///
    /// # Errors
    /// Returns an error if the store cannot answer.
    pub async fn forgive_standing(&self, key: Digest) -> Result<(), StoreError> {
        let keys = SubjectKeys { standings: [key].into(), ..SubjectKeys::default() };
        self.perform(Operation::Forgive, Some(key), async {
            self.execute(Command::Forgive { keys }).await?;
            self.bans.forget_name(key);
            Ok::<(), StoreError>(())
        })
        .await
    }
}
