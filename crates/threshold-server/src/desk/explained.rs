//! The causes of a penalty, for operators: the bans, list entries and standings that apply to a request.

use threshold_core::ladder::Penalty;
use threshold_core::policy::{Ban, Layer, Listed, Policy};
use threshold_core::{Decision, Digest, Facts, Timestamp};

use super::Desk;

/// One reason why a request is denied whatever its limits say.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct PenaltyCause {
    pub(crate) layer: Layer,
    pub(crate) verdict: &'static str,
    /// The banned address or block, user or tenant, with secret names redacted; `None` for a ladder's penalty.
    pub(crate) key: Option<String>,
    pub(crate) reason: String,
    /// The operator, `origin` and the name of an imported set, `ladder`, or `policy` for its deny list.
    pub(crate) by: String,
    /// The id of the ban.
    pub(crate) id: Option<Digest>,
    pub(crate) from: Option<Timestamp>,
    pub(crate) until: Option<Timestamp>,
}

impl Desk {
    /// Returns what a denied request was denied for, besides limits. The one that ends last is the first.
    pub(super) async fn penalty_causes(
        &self,
        policy: &Policy,
        facts: &Facts<'_>,
        decision: &Decision,
    ) -> Vec<PenaltyCause> {
        if decision.allowed() {
            return Vec::new();
        }
        let now = self.now();
        let mut causes = Vec::new();
        if let Some((entry, Listed::Deny)) = policy.listed_entry(facts) {
            let (layer, key) = (entry.layer(), Some(policy.shown_key(&entry)));
            let (reason, by) = ("on the policy's deny list".to_owned(), "policy".to_owned());
            causes.push(PenaltyCause { layer, verdict: "ban", key, reason, by, id: None, from: None, until: None });
        }
        // A limit or the deny list denied it: no ban and no ladder took part.
        if decision.penalty.is_none() {
            return causes;
        }
        let bans = policy.with_who(facts, |who| self.limiter.bans().covering(who, now));
        causes.extend(bans.iter().map(|(id, ban)| of_ban(policy, *id, ban)));
        let names = policy.with_who(facts, |who| {
            let ip = who.ip.map(|ip| (Layer::Edge, ip.to_string()));
            let tenant = who.tenant.map(|tenant| (Layer::Tenant, tenant.to_owned()));
            [ip, tenant, who.user.map(|user| (Layer::User, user.to_owned()))]
        });
        for (layer, name) in names.into_iter().flatten() {
            causes.extend(self.ladder_causes(policy, layer, &name, now).await);
        }
        causes
    }

    /// Returns the penalties of ladders. A store that does not answer has none to show; the decision says that it is degraded.
    async fn ladder_causes(&self, policy: &Policy, layer: Layer, name: &str, now: Timestamp) -> Vec<PenaltyCause> {
        let mut causes = Vec::new();
        for ladder in policy.ladders_of(layer, name) {
            let Ok(Some(standing)) = self.limiter.standing(ladder.key).await else { continue };
            let (verdict, until) = match standing.penalty(now) {
                Some(Penalty::Ban(until)) => ("ban", until),
                // A cool-down is answered like an exceeded limit. It has no id, because only bans can be lifted.
                Some(Penalty::CoolDown(until)) => ("deny", until),
                None => continue,
            };
            let named = self.limiter.bans().named(ladder.key).filter(|_| verdict == "ban");
            let strikes = standing.strikes(now);
            let reason = named.as_ref().map_or_else(
                || format!("strike {strikes} on the ladder {}", ladder.name),
                |ban| ban.reason.to_string(),
            );
            let (id, from) = ((verdict == "ban").then_some(ladder.key), named.map(|ban| ban.from));
            let (by, until) = ("ladder".to_owned(), Some(until));
            causes.push(PenaltyCause { layer, verdict, key: None, reason, by, id, from, until });
        }
        causes
    }
}

fn of_ban(policy: &Policy, id: Digest, ban: &Ban) -> PenaltyCause {
    PenaltyCause {
        layer: ban.whom.layer(),
        verdict: "ban",
        key: Some(policy.shown_key(&ban.whom)),
        reason: ban.reason.to_string(),
        by: ban.by.to_string(),
        id: Some(id),
        from: Some(ban.from),
        until: ban.until.unless_never(),
    }
}
