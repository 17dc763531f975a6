//! Bans, deny lists and penalties in force, which apply to a login as to every other request.
//!
//! An attempt that one of them refuses is not counted, neither for the account nor for the address: a banned client must not
//! be able to lock another user's account.

use super::canonical_account;
use super::exchange::{LoginRequest, Refusal, RefusedBy};
use arrayvec::ArrayVec;

use crate::caller::Caller;
use crate::decision::{Cause, Decision, Verdict};
use crate::facts::Facts;
use crate::key::TraceId;
use crate::plan::{Plan, Verb};
use crate::policy::{Listed, Policy, Who};

/// The largest number of spellings of one name that are looked up. Operators would have to ban more of them on purpose.
const MAX_SPELLINGS: usize = 64;

impl LoginRequest<'_> {
    /// Returns plans that find whether this attempt is refused: they charge nothing, and the decision on each gives the refusal
    /// ([`Refusal::from_decision`]). There are none where no list, ban or ladder can apply.
    ///
    /// The address and the tenant are known. The user is only claimed: a ban of that user applies, but an allow list entry
    /// lifts nothing but the user's own penalties, since anyone can name an allow-listed account.
    #[must_use]
    pub fn penalty_checks<'p>(&self, policy: &'p Policy, id: TraceId) -> Vec<Plan<'p>> {
        let facts = Facts { ip: self.ip, tenant: self.tenant, trace: id, ..Facts::default() };
        let caller = Caller::new(&facts, policy);
        // Without the user, whose name is only a claim at this point.
        let known = Who { ip: caller.ip(), user: None, tenant: caller.tenant };
        let mut checks = vec![penalty_check(policy, known, &caller, id)];
        let exempt = checks.iter().any(|plan| plan.listed == Some(Listed::Allow));
        for name in self.names(policy) {
            let facts = Facts { user: Some(&name), ..facts };
            let caller = Caller::new(&facts, policy);
            let mut plan = penalty_check(policy, Who { user: caller.user_name(), ..Who::default() }, &caller, id);
            // The address or the tenant is on an allow list, which lifts penalties of the user as it does for other
            // requests. Bans of the user stay.
            if exempt {
                plan.subjects.clear();
            }
            checks.push(plan);
        }
        checks.retain(|plan| plan.ban.is_some() || plan.listed == Some(Listed::Deny) || !plan.subjects.is_empty());
        // Bans and lists first: they are decided without a store, also while the store is down.
        checks.sort_by_key(|plan| plan.ban.is_none() && plan.listed.is_none());
        checks
    }

    /// Returns the names that the user may have: the one that the door gives, or else the account's name; its normal form; and
    /// the names of banned or denied users with the same normal form.
    pub(crate) fn names(&self, policy: &Policy) -> Vec<String> {
        let name = self.user.filter(|user| !user.is_empty()).or(self.account.map(str::trim));
        let Some(name) = name.filter(|name| !name.is_empty()) else { return Vec::new() };
        let folded = canonical_account(name);
        // Rules and bans may count the user by the name as it came, while an operator banned another spelling of it.
        // All of them apply.
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
    /// Returns the refusal of an attempt, if the decision on one of its [checks](LoginRequest::penalty_checks) denies it.
    #[must_use]
    pub fn from_decision(decision: &Decision) -> Option<Self> {
        let by = match decision.verdict {
            Verdict::Allow | Verdict::Warn | Verdict::Slow => return None,
            Verdict::Deny => RefusedBy::CoolDown,
            Verdict::Ban => RefusedBy::Ban,
        };
        let cause = decision.cause().unwrap_or(Cause::Login);
        Some(Self { by, cause, layer: decision.penalty_layer(), retry_after: decision.retry_after() })
    }
}

/// Makes a plan that charges nothing and finds the lists, bans and penalties of one identity.
fn penalty_check<'p>(policy: &'p Policy, who: Who<'_>, caller: &Caller<'_>, id: TraceId) -> Plan<'p> {
    let (listed, ban) = policy.listing(|| who);
    let subjects = if listed.is_none() { policy.subjects_of(caller) } else { ArrayVec::new() };
    Plan::of_subjects(policy, Verb::Peek, id, (listed, ban), subjects)
}
