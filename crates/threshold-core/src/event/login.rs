//! The event of a login attempt that was refused.

use super::{Event, EventId, Names, in_millis, representable};
use crate::caller::Caller;
use crate::decision::{Cause, Verdict};
use crate::facts::Facts;
use crate::key::TraceId;
use crate::lockout::{LoginRequest, Refusal, canonical_account};
use crate::policy::Policy;
use crate::time::Timestamp;

/// The endpoint of events of logins.
const LOGIN: &str = "login";

impl Event {
    /// Returns whether the event is about a login that was refused. Its user is the account that somebody has tried, who may be anyone.
    #[must_use]
    pub fn is_login(&self) -> bool {
        // A ban or a penalty that refuses a login has a cause of its own, and no rule.
        self.cause == Some(Cause::Login) || self.rule.is_none() && self.endpoint.as_deref() == Some(LOGIN)
    }

    /// Returns the event of a login attempt that was refused at `at`. `trace` is the id that the answer carries.
    ///
    /// Names appear as in the events of decisions. An account whose user is not given appears in its normal form, so that another
    /// spelling of it is no other user.
    #[must_use]
    pub fn from_refusal(
        refusal: &Refusal,
        request: &LoginRequest<'_>,
        policy: &Policy,
        (id, trace): (EventId, TraceId),
        at: Timestamp,
    ) -> Self {
        let account = request.account.map(canonical_account);
        let user = request.user.filter(|user| !user.is_empty()).or(account.as_deref());
        let facts = Facts { ip: request.ip, tenant: request.tenant, user, trace, ..Facts::default() };
        let names = Names { caller: Caller::new(&facts, policy), policy };
        let until = refusal.retry_after.map(|wait| in_millis(at.plus(wait.into())));
        Self {
            id,
            at: in_millis(at),
            layer: refusal.layer,
            blocked: true,
            tenant: names.tenant(),
            user_id: names.user(),
            endpoint: Some(LOGIN.into()),
            ip: names.address(),
            rule: None,
            verdict: Verdict::Deny,
            count: 1,
            strike: None,
            cause: Some(refusal.cause),
            until: until.and_then(representable),
            degraded: None,
            trace,
            limits: Box::default(),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;
    use crate::lockout::RefusedBy;
    use crate::policy::Layer;

    /// Woken by the name as it was typed: an attacker could make each guess that of another user.
    #[test]
    fn a_refused_login_is_an_event_of_its_account_and_address() {
        let wait = Some(Duration::from_millis(1_500));
        let refusal = Refusal { by: RefusedBy::Lock, cause: Cause::Login, layer: Some(Layer::User), retry_after: wait };
        let event = |policy: &str, account: &str, user: Option<&str>| {
            let policy = Policy::parse(policy, &|_| None).unwrap();
            let ip = "2001:db8:1:2:3::4".parse().ok();
            let request = LoginRequest { account: Some(account), ip, user, ..LoginRequest::default() };
            let at = Timestamp::from_micros(1_767_225_600_123_456);
            let ids = (EventId::new([7; 16]), TraceId::from_u128(9));
            Event::from_refusal(&refusal, &request, &policy, ids, at)
        };
        let open = "[identity]\nlog_identifiers = true";
        let shown = event(open, " ADA ", None);
        assert_eq!((shown.user_id.as_deref(), shown.ip.as_deref()), (Some("ada"), Some("2001:db8:1:2::/64")));
        assert_eq!((shown.layer, shown.cause, shown.blocked), (Some(Layer::User), Some(Cause::Login), true));
        assert_eq!(shown.until, Some(Timestamp::from_micros(1_767_225_601_623_000)));
        assert!(shown.is_alike(&event(open, "Ada", None)) && shown.is_login());
        assert!(Event { cause: Some(Cause::Ban), ..shown.clone() }.is_login());
        assert!(!Event { cause: Some(Cause::Ban), endpoint: None, ..shown.clone() }.is_login());
        assert_eq!(event(open, "ada", Some("u1")).user_id.as_deref(), Some("u1"));
        let hidden = event("", "ada", None);
        let is_digest = |name: Option<&str>| name.is_some_and(crate::key::is_redacted);
        assert!(is_digest(hidden.user_id.as_deref()) && is_digest(hidden.ip.as_deref()), "{hidden:?}");
        assert_eq!(Event::from_json(&shown.to_json()), Ok(shown));
    }
}
