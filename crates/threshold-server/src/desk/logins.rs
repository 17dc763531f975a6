//! Logins at the desk: attempts and results, their lines in the log, and the count of locked accounts.

use std::borrow::Cow;
use std::collections::{HashMap, HashSet, VecDeque};
use std::net::IpAddr;
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use threshold_core::address::AddressGroup;
use threshold_core::event::{EventId, MAX_TEXT};
use threshold_core::key::{is_redacted, read_name, write_name};
use threshold_core::lockout::{Attempt, canonical_account};
use threshold_core::policy::{Layer, Policy};
use threshold_core::{Digest, Event, Facts, Span, Timestamp, TraceId};
use threshold_limiter::{Attempted, LoginError, LoginRequest, LoginResult, Refusal, RefusedBy};

use super::subjects::shown_digest;
use super::{Desk, new_trace};
use crate::log::{LogSampler, shown_address};
use crate::signals::lock;
use crate::signals::tops::{FailedLogins, Period, Stats};

/// How long the result of a login waits for the disk before it is answered with an error.
const RESULT_TIMEOUT: Duration = Duration::from_secs(2);
/// The most attempts whose names are kept. One takes at most 750 bytes, and so all of them at most 12 MiB.
const MAX_ATTEMPTS: usize = 1 << 14;
/// How long an attempt may wait for its result.
const ATTEMPT_LIFETIME: Span = Span::MINUTE;
/// What is logged in place of an address that this node has not seen.
const UNKNOWN: &str = "unknown";

impl Desk {
    /// Decides whether the secret of a login may be checked. A refusal is recorded and logged under `trace`, which its answer carries.
    pub(crate) async fn login_attempt(
        &self,
        request: &LoginRequest<'_>,
        trace: TraceId,
    ) -> Result<Attempted, LoginError> {
        let attempted = self.limiter.login_attempt_async(request).await?;
        match &attempted {
            Attempted::Allowed(token) => {
                if let Ok(attempt) = self.limiter.read_attempt(token) {
                    self.logins.names.insert(attempt.id, CallerNames::new(request, &self.policy()), self.now());
                }
            }
            Attempted::Refused(refusal) => {
                let (policy, now) = (self.policy(), self.now());
                // An operator may act on the digests that the event shows.
                let account = request.account.map(canonical_account);
                let user = request.user.or(account.as_deref());
                let facts = Facts { ip: request.ip, tenant: request.tenant, user, ..Facts::default() };
                self.names.see(&facts, &policy, now);
                self.count_failure(&CallerNames::new(request, &policy), account_of(request, &policy));
                let id = EventId::new(new_trace().to_u128().to_be_bytes());
                let event = Event::from_refusal(refusal, request, &policy, (id, trace), now);
                match request.ip.filter(|_| refusal.by == RefusedBy::Address) {
                    Some(ip) => self.log_address_limit(ip),
                    // The beginning of a lock is logged by `login_result`. What meets one shows how long an attack goes on.
                    None => self.log_refusal(refusal, &event),
                }
                self.events.sender.send(event);
            }
        }
        Ok(attempted)
    }

    /// Records the result of a login, and waits until its changes are on disk; `None` if they are not in time.
    pub(crate) async fn login_result(&self, attempt: &str, success: bool) -> Result<Option<LoginResult>, LoginError> {
        let ended = self.limiter.login_result_async(attempt, success).await?;
        if !success {
            self.metrics.count_login_failure();
        }
        if let Ok(attempt) = self.limiter.read_attempt(attempt) {
            self.note_result(&attempt, &ended);
        }
        // A lock that a crash could undo must not be acknowledged: an attacker who makes the server crash would get
        // new attempts.
        if self.journal_has_records() && self.wait_until_saved(RESULT_TIMEOUT).await.is_err() {
            return Ok(None);
        }
        Ok(Some(ended))
    }

    /// Counts and logs the lock of an account.
    fn note_result(&self, attempt: &Attempt, ended: &LoginResult) {
        let names = self.logins.names.remove(attempt.id);
        if !ended.success {
            let names = names.clone().unwrap_or_default();
            // An operator may act on the digest that statistics show.
            self.names.see(&Facts { ip: names.ip, ..Facts::default() }, &self.policy(), self.now());
            self.count_failure(&names, attempt.account);
        }
        // At the ceiling the lock has no end.
        let is_locked = ended.lockout_remaining.is_some() || !(ended.success || ended.may_retry);
        if let Some(account) = attempt.account.filter(|_| !attempt.is_from_known_device()) {
            let end = || ended.lockout_remaining.map_or(Timestamp::MAX, |left| self.now().plus(left.into()));
            self.penalties.lock(account, is_locked.then(end));
        }
        if is_locked {
            self.log_lockout(attempt, names);
        }
    }

    /// Counts a login that failed or was refused, for statistics.
    fn count_failure(&self, names: &CallerNames, account: Option<Digest>) {
        let policy = self.policy();
        let group = names.ip.map(|ip| AddressGroup::of(ip, policy.identity().ipv6_prefix).to_string());
        let ip = group.map(|ip| if policy.identity().log_identifiers { ip } else { policy.key().redact(&ip) });
        // The digest of `threshold locks list`, by which an account is found as long as its failures are stored.
        let account = names.shown.as_deref().map(Cow::from).or_else(|| account.map(|key| shown_digest(key).into()));
        lock(&self.logins.failures).add(ip.as_deref(), account.as_deref(), self.now());
    }

    /// Adds the names with the most failed logins to statistics.
    pub(crate) fn add_failed_logins(&self, stats: &mut Stats, period: Period, now: Timestamp) {
        (stats.top_failed_login_ips, stats.top_failed_login_accounts) = lock(&self.logins.failures).top(period, now);
    }

    /// Removes an erased address from the statistics of logins, by its forms in events.
    pub(crate) fn forget_failed_addresses(&self, values: &[String]) {
        lock(&self.logins.failures).forget_ips(values);
    }

    /// Removes an erased account from the statistics of logins, by the forms of its name in events.
    pub(crate) fn forget_failed_accounts(&self, values: &[String], tenant: Option<&[String]>) {
        let policy = self.policy();
        let scope = policy.identity().user_scope;
        let names = values.iter().filter(|value| !is_redacted(value)).map(|value| read_name(value));
        let tenants: Vec<Option<&str>> = match tenant {
            Some(tenants) => tenants.iter().map(|tenant| Some(read_name(tenant))).collect(),
            None => vec![None],
        };
        let written = names.flat_map(|name| tenants.iter().map(move |tenant| scope.write(*tenant, name).into_owned()));
        let written: Vec<String> = written.collect();
        let digests = written.iter().filter_map(|name| Some(shown_digest(policy.account_digest(name).ok()??)));
        let all: HashSet<String> = digests.chain(written.iter().cloned()).chain(values.iter().cloned()).collect();
        // Without a tenant, the account is erased in all of them.
        let is_named = |user: &str| tenant.is_none() && values.iter().any(|value| *value == write_name(user));
        self.forget_listed_accounts(|listed, name| {
            all.contains(listed) || name.is_some_and(|(_, user)| is_named(user))
        });
    }

    /// Removes the accounts from the statistics of logins for which this holds: by what statistics show, and by the tenant and the name
    /// in it, unless it is a digest.
    pub(super) fn forget_listed_accounts(&self, is_erased: impl Fn(&str, Option<(Option<&str>, &str)>) -> bool) {
        let scope = self.policy().identity().user_scope;
        lock(&self.logins.failures).retain_accounts(|listed| {
            let read = scope.read(listed).ok();
            !is_erased(listed, read.as_ref().map(|(tenant, user)| (tenant.as_deref(), &**user)))
        });
    }

    /// Logs that an address has attempted too many logins.
    fn log_address_limit(&self, ip: IpAddr) {
        if let Some(left_out) = self.logins.address_limits.sample(self.now()) {
            let ip = shown_address(ip, &self.policy());
            tracing::warn!(event = ADDRESS_LIMIT, ip, left_out, "{ADDRESS_LIMIT}");
        }
    }

    /// Logs that a login met a lock, a ban or a penalty. Names are those of the event, which hides them as the policy says.
    fn log_refusal(&self, refusal: &Refusal, event: &Event) {
        let Some(left_out) = self.logins.refusals.sample(self.now()) else { return };
        tracing::warn!(
            reason = refusal.code(),
            cause = refusal.cause.name(),
            layer = refusal.layer.map(Layer::name),
            user = event.user_id.as_deref(),
            tenant = event.tenant.as_deref(),
            ip = event.ip.as_deref(),
            retry_after = refusal.retry_after_secs(),
            trace_id = %event.trace,
            left_out,
            "login refused"
        );
    }

    /// Logs that failures have locked an account.
    fn log_lockout(&self, attempt: &Attempt, names: Option<CallerNames>) {
        let Some(left_out) = self.logins.lockouts.sample(self.now()) else { return };
        let digest = attempt.account.map(shown_digest);
        let CallerNames { username, ip, .. } = names.unwrap_or_default();
        let username = username.as_deref().or(digest.as_deref());
        let ip = ip.map(|ip| shown_address(ip, &self.policy()));
        let ip = ip.as_deref().unwrap_or(UNKNOWN);
        tracing::warn!(event = LOCKOUT, username, ip, digest, left_out, "{LOCKOUT}");
    }
}

/// Returns the key of the account of a request.
fn account_of(request: &LoginRequest<'_>, policy: &Policy) -> Option<Digest> {
    let name = policy.identity().user_scope.write(request.tenant.filter(|tenant| !tenant.is_empty()), request.account?);
    policy.account_digest(&name).ok().flatten()
}

const ADDRESS_LIMIT: &str = "auth_ip_rate_limit";
const LOCKOUT: &str = "auth_user_lockout";

/// What the log needs to write about logins.
#[derive(Debug, Default)]
pub(super) struct LoginLog {
    address_limits: LogSampler,
    lockouts: LogSampler,
    /// Samples the attempts that met a lock, a ban or a penalty.
    refusals: LogSampler,
    names: AttemptNames,
    /// The addresses and accounts of logins that failed or were refused.
    failures: Mutex<FailedLogins>,
}

impl LoginLog {
    /// Logs how many lines were left out of bursts that are over at `now`, or of all without a time.
    pub(super) fn report_left_out(&self, now: Option<Timestamp>) {
        for (event, sampler) in [(ADDRESS_LIMIT, &self.address_limits), (LOCKOUT, &self.lockouts)] {
            if let Some(left_out) = sampler.end_burst(now) {
                tracing::warn!(event, left_out, "lines left out of the log");
            }
        }
        if let Some(left_out) = self.refusals.end_burst(now) {
            tracing::warn!(left_out, "refused logins left out of the log");
        }
    }
}

/// The caller of an attempt. Its token holds digests only, and the result comes without names.
#[derive(Debug, Default, Clone, PartialEq, Eq)]
struct CallerNames {
    /// The account, if it may be logged; `None` where its digest is logged in place of it.
    username: Option<Box<str>>,
    /// The account in its normal form, with its tenant where it belongs to one, if it may be shown.
    shown: Option<Box<str>>,
    ip: Option<IpAddr>,
}

impl CallerNames {
    fn new(request: &LoginRequest<'_>, policy: &Policy) -> Self {
        let identity = policy.identity();
        let shows = identity.log_identifiers && !identity.secret_user;
        let username = request.account.filter(|account| shows && account.len() <= MAX_TEXT);
        let shown = username.map(canonical_account).map(|account| {
            let tenant = request.tenant.filter(|tenant| !tenant.is_empty()).map(write_name);
            identity.user_scope.write(tenant.as_deref(), &write_name(&account)).into_owned()
        });
        let shown = shown.filter(|shown| !identity.secret_tenant && shown.len() <= MAX_TEXT);
        Self { username: username.map(Into::into), shown: shown.map(Into::into), ip: request.ip }
    }
}

/// The callers of attempts that wait for their results.
#[derive(Debug, Default)]
struct AttemptNames(Mutex<Attempts>);

#[derive(Debug, Default)]
struct Attempts {
    names: HashMap<TraceId, CallerNames>,
    /// The attempts in the order in which they began, with those that have ended since.
    began: VecDeque<(Timestamp, TraceId)>,
}

impl AttemptNames {
    /// Keeps the names of an attempt. If there are too many, those of the oldest are dropped.
    fn insert(&self, id: TraceId, names: CallerNames, now: Timestamp) {
        let mut attempts = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let Attempts { names: kept, began } = &mut *attempts;
        while let Some((at, oldest)) = began.front()
            && (began.len() >= MAX_ATTEMPTS || now.since(*at) > ATTEMPT_LIFETIME)
        {
            kept.remove(oldest);
            began.pop_front();
        }
        kept.insert(id, names);
        began.push_back((now, id));
    }

    /// Removes and returns the names of an attempt.
    fn remove(&self, id: TraceId) -> Option<CallerNames> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).names.remove(&id)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const NOW: Timestamp = Timestamp::from_secs(1_767_225_600);

    fn named(name: &str) -> CallerNames {
        CallerNames { username: Some(name.into()), ..CallerNames::default() }
    }

    /// Woken by leaving out either condition of the loop in `insert`.
    #[test]
    fn the_names_of_the_oldest_attempts_are_dropped_first_and_all_after_a_minute() {
        let attempts = AttemptNames::default();
        for number in 0..MAX_ATTEMPTS as u128 + 10 {
            attempts.insert(TraceId::from_u128(number), named("u"), NOW);
        }
        let sizes = || attempts.0.lock().map(|attempts| (attempts.names.len(), attempts.began.len())).unwrap();
        assert_eq!(sizes(), (MAX_ATTEMPTS, MAX_ATTEMPTS));
        assert_eq!(attempts.remove(TraceId::from_u128(9)), None);
        assert_eq!(attempts.remove(TraceId::from_u128(10)), Some(named("u")));
        assert_eq!(attempts.remove(TraceId::from_u128(10)), None);
        attempts.insert(TraceId::from_u128(1), named("v"), NOW.plus(ATTEMPT_LIFETIME).plus(Span::from_secs(1)));
        assert_eq!(sizes(), (1, 1));
    }
}
