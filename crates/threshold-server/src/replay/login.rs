//! `replay --login`: decides recorded logins under a policy's `[login]`.

use std::fmt::Write as _;
use std::sync::Arc;

use anyhow::Context as _;
use serde_json::{Value, json};
use threshold_core::policy::UserScope;
use threshold_core::text::printable;
use threshold_core::{Timestamp, Verdict};
use threshold_limiter::{Attempted, Limiter, LoginRequest, ManualClock, RefusedBy};

use super::ReplayArgs;
use super::report::{grouped, moment, nothing_read, share, unreadable_lines};
use super::sample::Sample;
use super::tally::{Subject, address_digest, name_digest};
use super::top_subjects::{Kind, SubjectCounts, TopSubjects};
use crate::Report;
use crate::source::Source;
use crate::traffic::{Feed, LineCounts, LogKind, Request};

/// The most accounts and addresses that are counted exactly; with more, a sample is counted.
const MAX_SUBJECTS: usize = 1 << 18;

/// The counts of a replay of logins.
struct Logins {
    attempts: u64,
    succeeded: u64,
    /// Attempts that would have been refused: by the address' budget, a lock, the ceiling, or a deny list.
    held: [u64; 4],
    /// Refused attempts that succeeded in the log: most likely legitimate users.
    held_successes: u64,
    accounts: Sample<Subject>,
    addresses: Sample<Subject>,
    /// The start of a lock counts as a ban, a refused attempt as a denial.
    top_subjects: TopSubjects,
    from: u64,
    until: u64,
}

pub(super) fn run(args: &ReplayArgs) -> anyhow::Result<Report> {
    let source = Source::read(&args.policy)?;
    let policy = source.policy()?;
    policy.login().with_context(|| format!("{} has no [login] to rehearse", source.name))?;
    let (prefix, scope) = (policy.identity().ipv6_prefix, policy.identity().user_scope);
    let clock = Arc::new(ManualClock::default());
    let limiter = Limiter::builder(policy).clock(Arc::clone(&clock)).build();
    let mut feed = Feed::open_as(LogKind::Logins, &args.log.logs, args.log.fields()?, args.log.reorder)?;
    let mut logins = Logins {
        attempts: 0,
        succeeded: 0,
        held: [0; 4],
        held_successes: 0,
        accounts: Sample::new(MAX_SUBJECTS),
        addresses: Sample::new(MAX_SUBJECTS),
        top_subjects: TopSubjects::default(),
        from: 0,
        until: 0,
    };
    while let Some(second) = feed.next_second() {
        for request in second {
            clock.set(Timestamp::from_micros(request.at.micros));
            for _ in 0..=request.repeated {
                logins.one(&limiter, &request, (prefix, scope))?;
            }
        }
    }
    let counts = feed.finish();
    if logins.attempts == 0 {
        let others = counts.others;
        anyhow::ensure!(others == 0, "none of the log's {} lines is about a login", counts.lines);
        anyhow::bail!(nothing_read(&counts, "login"));
    }
    let text = if args.json {
        let mut text = serde_json::to_string_pretty(&logins.json(&counts, args.top))?;
        text.push('\n');
        text
    } else {
        logins.text(&source.name, &counts, args.top)
    };
    Ok(Report { text, code: 0 })
}

impl Logins {
    fn one<C: threshold_limiter::Clock>(
        &mut self,
        limiter: &Limiter<threshold_limiter::store::memory::MemoryStore, C>,
        request: &Request<'_>,
        (ipv6_prefix, scope): (u8, UserScope),
    ) -> anyhow::Result<()> {
        let micros = request.at.micros;
        let success = request.status == Some(200);
        if self.attempts == 0 {
            self.from = micros;
        }
        self.until = micros;
        bump(&mut self.attempts);
        self.succeeded = self.succeeded.saturating_add(u64::from(success));
        let name = request.user.map(|user| scope.write(request.tenant, user));
        let account = name.as_deref().unwrap_or("(none)");
        let address = request.ip.map_or_else(|| "(none)".to_owned(), |ip| ip.to_canonical().to_string());
        let asked =
            LoginRequest { account: request.user, ip: request.ip, tenant: request.tenant, ..LoginRequest::default() };
        let mut touched = (false, false);
        match limiter.login_attempt(&asked)? {
            Attempted::Refused(refusal) => {
                self.held_successes = self.held_successes.saturating_add(u64::from(success));
                if let Some(count) = self.held.get_mut(refusal.by as usize) {
                    bump(count);
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
            Attempted::Allowed(token) => {
                if limiter.login_result(&token, success)?.lockout_remaining.is_some() {
                    touched.0 = true;
                    self.top_subjects.add(Kind::User, account, None, Verdict::Ban, micros);
                }
            }
        }
        count(&mut self.accounts, name.as_deref().map(name_digest), touched.0);
        count(&mut self.addresses, request.ip.map(|ip| address_digest(ip, ipv6_prefix)), touched.1);
        Ok(())
    }

    fn all_held(&self) -> u64 {
        self.held.iter().sum()
    }

    fn text(&self, name: &str, counts: &LineCounts, top: usize) -> String {
        let mut out = String::new();
        let _ = writeln!(out, "{} on {} logins", printable(name), grouped(self.attempts));
        let _ = writeln!(out, "from {} until {}\n", moment(self.from), moment(self.until));
        let [address, lock, ceiling, list] = self.held;
        let reached = self.attempts.saturating_sub(self.all_held());
        for (what, figure) in [
            ("succeeded in the log", self.succeeded),
            ("would reach the secret", reached),
            ("held by the address' budget", address),
            ("held by an account's lock", lock),
            ("held at the ceiling", ceiling),
            ("held by a deny list", list),
            ("held, and let in at the time", self.held_successes),
        ] {
            let _ = writeln!(out, "  {what:<28} {:>12}  {:>9}", grouped(figure), share(figure, self.attempts));
        }
        for (subjects, what) in [(&self.accounts, "accounts locked"), (&self.addresses, "addresses held")] {
            let (all, touched) = (subjects.count(|_| true), subjects.count(|subject| subject.touched));
            let about = if subjects.is_exact() { "" } else { "about " };
            let _ = writeln!(
                out,
                "\n{about}{} of {about}{} {what} ({})",
                grouped(touched),
                grouped(all),
                share(touched, all)
            );
        }
        let worst = self.top_subjects.top(top);
        if !worst.is_empty() {
            out.push_str("\nHeld most:\n");
        }
        for (kind, name, own) in worst {
            let what = if kind == Kind::Ip { "address" } else { "account" };
            let locks = if own.banned > 0 { format!("{} locks, ", grouped(own.banned)) } else { String::new() };
            let _ = writeln!(
                out,
                "  {what} {}: {locks}{} tries held, {} to {}",
                printable(name),
                grouped(own.denied),
                moment(own.first),
                moment(own.last)
            );
        }
        if counts.unreadable > 0 || !counts.problems.is_empty() {
            let (bad, all) = (grouped(counts.unreadable), grouped(counts.lines));
            let _ = writeln!(out, "\n{bad} of {all} lines could not be read:{}", unreadable_lines(counts));
        }
        if counts.others > 0 {
            let _ = writeln!(out, "\n{} lines are about other things.", grouped(counts.others));
        }
        out.push_str("\nA log knows no devices: every login is rehearsed as one from an unknown device.\n");
        out
    }

    fn json(&self, counts: &LineCounts, top: usize) -> Value {
        let [address, lock, ceiling, list] = self.held;
        let worst = |wanted: Kind| {
            let all = self.top_subjects.top(usize::MAX);
            let own = all.into_iter().filter(|(kind, _, _)| *kind == wanted).take(top);
            own.map(|(_, name, own): (Kind, &str, &SubjectCounts)| {
                json!({"name": name, "locks": own.banned, "held": own.denied, "first": moment(own.first), "last": moment(own.last)})
            })
            .collect::<Vec<Value>>()
        };
        json!({
            "lines": counts.lines,
            "unreadable": counts.unreadable,
            "others": counts.others,
            "attempts": self.attempts,
            "succeeded": self.succeeded,
            "reachedSecret": self.attempts.saturating_sub(self.all_held()),
            "heldByAddress": address,
            "heldByLock": lock,
            "heldAtCeiling": ceiling,
            "heldByList": list,
            "heldSuccesses": self.held_successes,
            "accounts": self.accounts.count(|_| true),
            "accountsLocked": self.accounts.count(|subject| subject.touched),
            "addresses": self.addresses.count(|_| true),
            "addressesHeld": self.addresses.count(|subject| subject.touched),
            "from": moment(self.from),
            "until": moment(self.until),
            "worstAccounts": worst(Kind::User),
            "worstAddresses": worst(Kind::Ip),
            "problems": counts.problems,
        })
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
