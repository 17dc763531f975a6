//! `replay --login`: decides recorded logins under a policy's `[login]`.

mod page;
mod report;

use std::collections::BTreeMap;
use std::sync::Arc;

use anyhow::Context as _;
use threshold_core::policy::Identity;
use threshold_core::{DigestKey, Timestamp, Verdict};
use threshold_limiter::store::memory::MemoryStore;
use threshold_limiter::{Attempted, Clock, Limiter, LoginRequest, ManualClock, RefusedBy};

use super::log_digest::LogDigest;
use super::report::nothing_read;
use super::sample::Sample;
use super::series::Series;
use super::tally::{Subject, address_digest, name_digest};
use super::top_subjects::{Kind, TopSubjects};
use super::{ReplayArgs, write_page};
use crate::Report;
use crate::source::Source;
use crate::traffic::{Feed, LogKind, Request};

use report::LoginReport;

/// The most accounts and addresses that are counted exactly; with more, a sample is counted.
const MAX_SUBJECTS: usize = 1 << 18;
/// The most pairs of an account and an address that are named because a login of theirs was held.
const MAX_LET_IN: usize = 4_096;
/// Why an attempt is refused, in the order of `RefusedBy`.
const REASONS: [&str; 4] = ["the address' budget", "the account's lock", "the ceiling", "a deny list"];

/// The counts of a replay of logins.
struct Logins {
    attempts: u64,
    succeeded: u64,
    /// Attempts that would have been refused, by reason.
    held: [u64; REASONS.len()],
    /// Refused attempts that succeeded in the log: most likely legitimate users.
    held_successes: u64,
    /// The same by account and address.
    let_in: BTreeMap<(String, String), LetIn>,
    accounts: Sample<Subject>,
    addresses: Sample<Subject>,
    /// The start of a lock counts as a ban, a refused attempt as a denial.
    top_subjects: TopSubjects,
    series: Series,
    from: u64,
    until: u64,
}

/// The logins of an account from an address that succeeded at the time and would have been refused.
#[derive(Debug, Clone, Copy, Default)]
struct LetIn {
    count: u64,
    /// The reason of the first, as its place in `REASONS`.
    reason: usize,
    first: u64,
    last: u64,
}

pub(super) fn run(args: &ReplayArgs) -> anyhow::Result<Report> {
    let source = Source::read(&args.policy)?;
    let policy = source.policy()?;
    policy.login().with_context(|| format!("{} has no [login] to rehearse", source.name))?;
    let (identity, key) = (policy.identity().clone(), policy.key());
    let clock = Arc::new(ManualClock::default());
    let limiter = Limiter::builder(policy).clock(Arc::clone(&clock)).build();
    let mut feed = Feed::open_as(LogKind::Logins, &args.log.logs, args.log.fields()?, args.log.reorder)?;
    let (mut logins, mut digest) = (Logins::new(), LogDigest::default());
    while let Some(second) = feed.next_second() {
        for request in second {
            // Locks and budgets run on the time of the log, so that a month is replayed in seconds.
            clock.set(Timestamp::from_micros(request.at.micros));
            digest.add(&request);
            // syslog merges equal lines. Each of them was an attempt.
            for _ in 0..=request.repeated {
                logins.one(&limiter, &request, &identity)?;
            }
        }
    }
    let counts = feed.finish();
    if logins.attempts == 0 {
        // An auth log has lines about much else, so these two cases need different advice.
        let others = counts.others;
        anyhow::ensure!(others == 0, "none of the log's {} lines is about a login", counts.lines);
        anyhow::bail!(nothing_read(&counts, "login"));
    }
    let zone = args.tz.clone().unwrap_or_default();
    let keys: (DigestKey, DigestKey) = (key, digest.key());
    let report = LoginReport {
        logins: &logins,
        name: &source.name,
        counts: &counts,
        top: args.top,
        zone: &zone,
        identity: &identity,
        secret_key: keys.0,
        page_key: keys.1,
    };
    if let Some(file) = &args.html {
        write_page(file, &report.html())?;
    }
    let text = if args.json { report.json()? } else { report.text() };
    Ok(Report { text, code: 0 })
}

impl Logins {
    fn new() -> Self {
        Self {
            attempts: 0,
            succeeded: 0,
            held: [0; REASONS.len()],
            held_successes: 0,
            let_in: BTreeMap::new(),
            accounts: Sample::new(MAX_SUBJECTS),
            addresses: Sample::new(MAX_SUBJECTS),
            top_subjects: TopSubjects::default(),
            series: Series::new(REASONS.len()),
            from: 0,
            until: 0,
        }
    }

    fn one<C: Clock>(
        &mut self,
        limiter: &Limiter<MemoryStore, C>,
        request: &Request<'_>,
        identity: &Identity,
    ) -> anyhow::Result<()> {
        let micros = request.at.micros;
        let success = request.status == Some(200);
        if self.attempts == 0 {
            self.from = micros;
        }
        self.until = micros;
        bump(&mut self.attempts);
        self.succeeded = self.succeeded.saturating_add(u64::from(success));
        let name = request.user.map(|user| identity.user_scope.write(request.tenant, user));
        let account = name.as_deref().unwrap_or("(none)");
        let address = request.ip.map_or_else(|| "(none)".to_owned(), |ip| ip.to_canonical().to_string());
        let asked =
            LoginRequest { account: request.user, ip: request.ip, tenant: request.tenant, ..LoginRequest::default() };
        let (mut held, mut touched) = (None, (false, false));
        match limiter.login_attempt(&asked)? {
            Attempted::Refused(refusal) => {
                let reason = refusal.by as usize;
                held = Some(reason);
                if let Some(count) = self.held.get_mut(reason) {
                    bump(count);
                }
                // The log knows the outcome. A refused attempt that succeeded is the cost of the policy, and most
                // likely a legitimate user.
                if success {
                    self.held_success(account, &address, reason, micros);
                }
                match refusal.by {
                    RefusedBy::Address => {
                        touched.1 = true;
                        self.top_subjects.add(Kind::Ip, &address, None, Verdict::Deny, micros);
                    }
                    RefusedBy::Lock | RefusedBy::Ceiling => {
                        touched.0 = true;
                        self.top_subjects.add(Kind::User, account, None, Verdict::Deny, micros);
                    }
                    // Not listed among the top subjects: they are in the policy's own deny list.
                    RefusedBy::Ban | RefusedBy::CoolDown => {}
                }
            }
            // Only an allowed attempt has a result: in reality the secret of a refused one is never checked.
            Attempted::Allowed(token) => {
                if limiter.login_result(&token, success)?.lockout_remaining.is_some() {
                    touched.0 = true;
                    self.top_subjects.add(Kind::User, account, None, Verdict::Ban, micros);
                }
            }
        }
        self.series.add(micros.checked_div(1_000_000).unwrap_or(0), held);
        count(&mut self.accounts, name.as_deref().map(name_digest), touched.0);
        count(&mut self.addresses, request.ip.map(|ip| address_digest(ip, identity.ipv6_prefix)), touched.1);
        Ok(())
    }

    fn held_success(&mut self, account: &str, address: &str, reason: usize, micros: u64) {
        bump(&mut self.held_successes);
        let pair = (account.to_owned(), address.to_owned());
        // The total above stays exact. Only the names of further pairs are left out.
        if self.let_in.len() >= MAX_LET_IN && !self.let_in.contains_key(&pair) {
            return;
        }
        let own = self.let_in.entry(pair).or_insert(LetIn { count: 0, reason, first: micros, last: micros });
        bump(&mut own.count);
        own.last = micros;
    }

    fn all_held(&self) -> u64 {
        self.held.iter().sum()
    }

    /// Returns the accounts and addresses that were let in at the time and would have been held, the most frequent first.
    fn most_let_in(&self) -> Vec<(&str, &str, LetIn)> {
        let mut all: Vec<(&str, &str, LetIn)> =
            self.let_in.iter().map(|((account, address), own)| (account.as_str(), address.as_str(), *own)).collect();
        all.sort_by_key(|(_, _, own)| std::cmp::Reverse(own.count));
        all
    }
}

fn bump(count: &mut u64) {
    *count = count.saturating_add(1);
}

fn count(subjects: &mut Sample<Subject>, digest: Option<u64>, touched: bool) {
    if let Some(own) = digest.and_then(|digest| subjects.entry(digest, Subject::default)) {
        own.touched |= touched;
    }
}
