//! Who may not even try: bans, deny lists and penalties in force hold for a login as for every other request.
//!
//! Whoever is barred is not counted, neither against the account nor against the address: somebody who is banned must not
//! be able to lock anybody else.

use super::canonical_account;
use super::exchange::{LoginRequest, Refusal, RefusedBy};
use arrayvec::ArrayVec;

use crate::caller::Caller;
use crate::decision::{Decision, Verdict};
use crate::facts::Facts;
use crate::key::TraceId;
use crate::plan::{Plan, Verb};
use crate::policy::{Listed, Policy, Who};

/// The most spellings of one name that are looked up. There are no more unless somebody makes them up.
const MAX_SPELLINGS: usize = 64;

impl LoginRequest<'_> {
    /// What may bar this attempt, as plans that charge nothing: settled and decided, each says whether it does
    /// ([`Refusal::barring`]). There are none where nobody is listed, banned or punished.
    ///
    /// The address and the tenant are known. Who the user is, nobody has shown yet: their ban counts, and an allowance of
    /// theirs lifts nothing but their own penalties, since anybody can name a friend's account.
    #[must_use]
    pub fn bars<'p>(&self, policy: &'p Policy, id: TraceId) -> Vec<Plan<'p>> {
        let facts = Facts { ip: self.ip, tenant: self.tenant, trace: id, ..Facts::default() };
        let caller = Caller::new(&facts, policy);
        let known = Who { ip: caller.ip(), user: None, tenant: caller.tenant };
        let mut bars = vec![bar(policy, known, &caller, id)];
        let exempt = bars.iter().any(|plan| plan.listed == Some(Listed::Allow));
        for name in self.names(policy) {
            let facts = Facts { user: Some(&name), ..facts };
            let caller = Caller::new(&facts, policy);
            let mut plan = bar(policy, Who { user: caller.user_name(), ..Who::default() }, &caller, id);
            if exempt {
                plan.subjects.clear();
            }
            bars.push(plan);
        }
        bars.retain(|plan| plan.ban.is_some() || plan.listed == Some(Listed::Deny) || !plan.subjects.is_empty());
        // What is known without a store comes first, so that no store has to answer for it.
        bars.sort_by_key(|plan| plan.ban.is_none() && plan.listed.is_none());
        bars
    }

    /// What the user may be called: as the door says, else as the account was written; in its one spelling; and as anybody
    /// is written who is banned or denied and has the same one spelling.
    fn names(&self, policy: &Policy) -> Vec<String> {
        let name = self.user.filter(|user| !user.is_empty()).or(self.account.map(str::trim));
        let Some(name) = name.filter(|name| !name.is_empty()) else { return Vec::new() };
        let folded = canonical_account(name);
        let mut names = vec![name.to_owned()];
        let tenant = self.tenant.filter(|tenant| !tenant.is_empty());
        let others = policy.spellings(tenant, &folded).into_iter().take(MAX_SPELLINGS);
        for other in others.chain([folded]) {
            if !names.contains(&other) && !other.is_empty() {
                names.push(other);
            }
        }
        names
    }
}

impl Refusal {
    /// Why an attempt is barred, if the decision on one of its [bars](LoginRequest::bars) says that it is.
    #[must_use]
    pub fn barring(decision: &Decision) -> Option<Self> {
        let by = match decision.verdict {
            Verdict::Allow | Verdict::Warn | Verdict::Slow => return None,
            Verdict::Deny => RefusedBy::CoolDown,
            Verdict::Ban => RefusedBy::Ban,
        };
        Some(Self { by, retry_after: decision.retry_span() })
    }
}

/// What is known of somebody without charging them anything.
fn bar<'p>(policy: &'p Policy, who: Who<'_>, caller: &Caller<'_>, id: TraceId) -> Plan<'p> {
    let (listed, ban) = policy.listing(|| who);
    let subjects = if listed.is_none() { policy.subjects_of(caller) } else { ArrayVec::new() };
    Plan::of_subjects(policy, Verb::Peek, id, (listed, ban), subjects)
}
