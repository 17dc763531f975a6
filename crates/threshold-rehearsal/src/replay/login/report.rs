//! The report of a replay of logins, as text and as JSON.

use std::fmt::Write as _;

use serde_json::{Value, json};
use threshold_core::DigestKey;
use threshold_core::policy::Identity;
use threshold_core::text::printable;

use super::super::report::{grouped, share, unreadable_lines};
use super::super::top_subjects::{Kind, SubjectCounts};
use super::super::zone::Zone;
use super::{Logins, REASONS};
use crate::traffic::LineCounts;

/// A finished replay of logins.
pub(super) struct LoginReport<'r> {
    pub(super) logins: &'r Logins,
    pub(super) name: &'r str,
    pub(super) counts: &'r LineCounts,
    pub(super) top: usize,
    pub(super) zone: &'r Zone,
    pub(super) identity: &'r Identity,
    /// The key of digests of secret names, in text and JSON.
    pub(super) secret_key: DigestKey,
    /// The key of digests on the page.
    pub(super) page_key: DigestKey,
}

impl LoginReport<'_> {
    /// Returns the figures with their names, in the order of the text and the page.
    pub(super) fn figures(&self) -> [(&'static str, u64); 7] {
        let logins = self.logins;
        // By pattern, so that a reason that is added must be named here too.
        let [address, lock, ceiling, list] = logins.held;
        [
            ("succeeded in the log", logins.succeeded),
            ("would reach the secret", logins.attempts.saturating_sub(logins.all_held())),
            ("held by the address' budget", address),
            ("held by an account's lock", lock),
            ("held at the ceiling", ceiling),
            ("held by a deny list", list),
            ("held, and let in at the time", logins.held_successes),
        ]
    }

    /// Returns an account's name, or its digest if the policy marks users as secret.
    fn account(&self, name: &str) -> String {
        let shown = if self.identity.hides_users() { self.secret_key.redact(name) } else { name.to_owned() };
        printable(&shown).into_owned()
    }

    fn shown(&self, kind: Kind, name: &str) -> String {
        if kind == Kind::Ip { printable(name).into_owned() } else { self.account(name) }
    }

    pub(super) fn text(&self) -> String {
        let Self { logins, counts, zone, .. } = self;
        let mut out = String::new();
        let _ = writeln!(out, "{} on {} logins", printable(self.name), grouped(logins.attempts));
        let _ = writeln!(out, "from {} until {}\n", zone.moment(logins.from), zone.moment(logins.until));
        for (what, figure) in self.figures() {
            let _ = writeln!(out, "  {what:<28} {:>12}  {:>9}", grouped(figure), share(figure, logins.attempts));
        }
        for (subjects, what) in [(&logins.accounts, "accounts locked"), (&logins.addresses, "addresses held")] {
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
        self.let_in_lines(&mut out);
        let worst = logins.top_subjects.top(self.top);
        if !worst.is_empty() {
            out.push_str("\nHeld most:\n");
        }
        for (kind, name, own) in worst {
            let what = if kind == Kind::Ip { "address" } else { "account" };
            let locks = if own.banned > 0 { format!("{} locks, ", grouped(own.banned)) } else { String::new() };
            let _ = writeln!(
                out,
                "  {what} {}: {locks}{} tries held, {} to {}",
                self.shown(kind, name),
                grouped(own.denied),
                zone.moment(own.first),
                zone.moment(own.last)
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

    fn let_in_lines(&self, out: &mut String) {
        let all = self.logins.most_let_in();
        if all.is_empty() {
            return;
        }
        out.push_str("\nHeld, and let in at the time:\n");
        for (account, address, own) in all.iter().take(self.top) {
            let times = if own.count == 1 { "once".to_owned() } else { format!("{} times", grouped(own.count)) };
            let _ = writeln!(
                out,
                "  account {} from {}: {times}, first by {}, {} to {}",
                self.account(account),
                printable(address),
                reason(own.reason),
                self.zone.moment(own.first),
                self.zone.moment(own.last)
            );
        }
        if let Some(more) = all.len().checked_sub(self.top).filter(|more| *more > 0) {
            let _ = writeln!(out, "  and {more} more; --top N lists more");
        }
    }

    pub(super) fn json(&self) -> anyhow::Result<String> {
        let Self { logins, counts, zone, .. } = self;
        let [address, lock, ceiling, list] = logins.held;
        let worst = |wanted: Kind| {
            // All of them before the filter: the first entries may be of the other kind only.
            let all = logins.top_subjects.top(usize::MAX);
            let own = all.into_iter().filter(|(kind, _, _)| *kind == wanted).take(self.top);
            own.map(|(kind, name, own): (Kind, &str, &SubjectCounts)| {
                json!({
                    "name": self.shown(kind, name),
                    "locks": own.banned,
                    "held": own.denied,
                    "first": zone.moment(own.first),
                    "last": zone.moment(own.last),
                })
            })
            .collect::<Vec<Value>>()
        };
        let let_in = logins.most_let_in().into_iter().take(self.top).map(|(account, address, own)| {
            json!({
                "account": self.account(account),
                "address": address,
                "count": own.count,
                "by": reason(own.reason),
                "first": zone.moment(own.first),
                "last": zone.moment(own.last),
            })
        });
        let value = json!({
            "lines": counts.lines,
            "unreadable": counts.unreadable,
            "others": counts.others,
            "attempts": logins.attempts,
            "succeeded": logins.succeeded,
            "reachedSecret": logins.attempts.saturating_sub(logins.all_held()),
            "heldByAddress": address,
            "heldByLock": lock,
            "heldAtCeiling": ceiling,
            "heldByList": list,
            "heldSuccesses": logins.held_successes,
            "letIn": let_in.collect::<Vec<Value>>(),
            "accounts": logins.accounts.count(|_| true),
            "accountsLocked": logins.accounts.count(|subject| subject.touched),
            "addresses": logins.addresses.count(|_| true),
            "addressesHeld": logins.addresses.count(|subject| subject.touched),
            "from": zone.moment(logins.from),
            "until": zone.moment(logins.until),
            "worstAccounts": worst(Kind::User),
            "worstAddresses": worst(Kind::Ip),
            "problems": counts.problems,
        });
        let mut text = serde_json::to_string_pretty(&value)?;
        text.push('\n');
        Ok(text)
    }
}

/// Returns the name of a reason.
pub(super) fn reason(index: usize) -> &'static str {
    REASONS.get(index).copied().unwrap_or("a penalty")
}
