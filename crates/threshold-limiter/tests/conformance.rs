//! The memory store plays the vectors in `conformance/`, and must answer each as core does.

use std::path::Path;

use threshold_core::case::{CaseFile, CasePlayer, Host, Lines, play};
use threshold_core::lockout::{Account, Attempt, AttemptOutcome, Login, ResultOutcome, Try, UnknownAttempt};
use threshold_core::plan::SubjectKeys;
use threshold_core::receipt::{ActualCost, OnExpire, UnknownReservation};
use threshold_core::{Digest, DigestKey, Outcome, Plan, Receipt, Span, Timestamp, TraceId};
use threshold_limiter::store::LocalStore;
use threshold_limiter::store::memory::MemoryStore;

struct Played(MemoryStore);

impl Host for Played {
    fn settle(&mut self, plan: &Plan<'_>, now: Timestamp) -> Outcome {
        let mut outcome = Outcome::default();
        self.0.settle(plan, now, &mut outcome).expect("a case fits the store");
        outcome
    }

    fn refund(&mut self, receipt: &Receipt, now: Timestamp) -> bool {
        self.0.refund(receipt, now)
    }

    fn reserve(&mut self, receipt: Receipt, ttl: Span, on_expire: OnExpire, now: Timestamp) -> TraceId {
        self.0.reserve(receipt, ttl, on_expire, now).expect("a case fits the store")
    }

    fn commit(
        &mut self,
        id: TraceId,
        actual: &ActualCost<'_>,
        key: DigestKey,
        now: Timestamp,
    ) -> Result<(), UnknownReservation> {
        self.0.commit(id, actual, key, now)
    }

    fn release(&mut self, id: TraceId, now: Timestamp) -> Result<(), UnknownReservation> {
        self.0.release(id, now)
    }

    fn pause(&mut self, keys: &SubjectKeys, until: Timestamp, now: Timestamp) {
        self.0.pause(keys, until, now);
    }

    fn forgive(&mut self, keys: &SubjectKeys) {
        self.0.forgive(keys);
    }

    fn login_attempt(&mut self, login: &Login, tried: &Try, now: Timestamp) -> AttemptOutcome {
        self.0.login_attempt(login, tried, now).expect("a case fits the store")
    }

    fn login_result(
        &mut self,
        login: &Login,
        attempt: &Attempt,
        success: bool,
        nonce: TraceId,
        now: Timestamp,
    ) -> Result<ResultOutcome, UnknownAttempt> {
        self.0.login_result(login, attempt, success, nonce, now)
    }

    fn change_account(&mut self, key: Digest, change: fn(&mut Account)) {
        self.0.change_account(key, change);
    }
}

#[test]
fn the_memory_store_answers_every_vector_as_written() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../conformance");
    let mut failures = Vec::new();
    let mut count = 0;
    for entry in std::fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        let file: CaseFile = serde_json::from_str(&std::fs::read_to_string(&path).unwrap()).unwrap();
        let shared = file.policy.as_ref().map(Lines::text);
        for case in &file.cases {
            count += 1;
            let mut player = CasePlayer::new(|policy| Played(MemoryStore::new(policy.memory())));
            if let Err(failure) = play(case, shared.as_deref(), &mut player) {
                failures.push(format!("{}: {failure}", path.file_name().unwrap().display()));
            }
        }
    }
    assert!(failures.is_empty(), "{} of {count} cases failed:\n{}", failures.len(), failures.join("\n"));
}
