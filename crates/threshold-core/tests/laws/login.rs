//! Login attempts: locks that are floors, attackers who lock out nobody, and names that are spelled one way.

use proptest::collection::vec;
use proptest::prelude::*;
use proptest::sample::{Index, select};
use threshold_core::key::AddressGroup;
use threshold_core::limit::SlidingLog;
use threshold_core::lockout::{
    Attempt, AttemptOutcome, Device, Factor, Login, ResultOutcome, Try, UnknownAttempt, Wider, account_digest,
    address_digest, canonical_account,
};
use threshold_core::policy::OnStoreError;
use threshold_core::{Answer, Command, Digest, DigestKey, Ledger, Span, Timestamp, TraceId};

use crate::login_model::{Asks, Model};
use crate::world::{gap, start};

const KEY: DigestKey = DigestKey::new([3; 16]);
const MICRO: Span = Span::from_micros(1);
const NAMES: [&str; 2] = ["ada", "bob"];

/// Some table of locks, with budgets that are sometimes in the way.
fn login() -> impl Strategy<Value = Login> {
    let lock = (1..7u32, select(&[1, 20, 60, 300][..]));
    let budget = (select(&[2u64, 5, 60][..]), select(&[30u64, 900][..]));
    (vec(lock, 0..4), budget.clone(), budget, 1..12u32).prop_map(|(mut locks, account, ip, ceiling)| {
        locks.sort_unstable();
        locks.dedup_by_key(|(failures, _)| *failures);
        let log = |(quota, seconds)| SlidingLog::new(quota, Span::from_secs(seconds)).unwrap();
        Login {
            account: log(account),
            ip: log(ip),
            locks: locks.into_iter().map(|(failures, seconds)| (failures, Span::from_secs(seconds))).collect(),
            ceiling,
            on_store_error: OnStoreError::Closed,
        }
    })
}

/// Budgets that are never in the way.
fn roomy(login: Login) -> Login {
    let log = SlidingLog::new(1_000, Span::SECOND).unwrap();
    Login { account: log, ip: log, ..login }
}

fn account(name: &str) -> Digest {
    account_digest(KEY, None, name).unwrap()
}

fn address(host: u8) -> Digest {
    let groups = [[203, 0, 113, host].into()].map(|ip| AddressGroup::of(ip, 64));
    address_digest(KEY, groups[0])
}

/// One thing that happens at a login.
#[derive(Debug, Clone, Copy)]
enum Deed {
    /// Of one of two accounts, with one of two factors, from one of two addresses, and with one of the tokens there are.
    Attempt {
        account: u8,
        factor: u8,
        host: u8,
        token: Option<Index>,
    },
    Result(Index, bool),
    Pardon(u8),
    Reset(u8),
}

fn deeds() -> impl Strategy<Value = Vec<(Span, Deed)>> {
    let factor = prop_oneof![4 => Just(0u8), 1 => Just(1u8)];
    let token = prop::option::weighted(0.6, any::<Index>());
    let attempt = (0..2u8, factor, 0..2u8, token).prop_map(|(account, factor, host, token)| Deed::Attempt {
        account,
        factor,
        host,
        token,
    });
    let result = (any::<Index>(), prop::bool::weighted(0.3)).prop_map(|(which, success)| Deed::Result(which, success));
    let gap = prop_oneof![3 => (0..3_000_000u64).prop_map(Span::from_micros), 2 => gap()];
    let deed = prop_oneof![
        16 => attempt,
        16 => result,
        1 => (0..2u8).prop_map(Deed::Pardon),
        1 => (0..2u8).prop_map(Deed::Reset),
    ];
    vec((gap, deed), 1..80)
}

/// A login with a ledger and a clock.
struct Gate {
    login: Login,
    ledger: Ledger,
    now: Timestamp,
    ids: u128,
}

impl Gate {
    fn new(login: Login, now: Timestamp) -> Self {
        Self { login, ledger: Ledger::default(), now, ids: 0 }
    }

    fn id(&mut self) -> TraceId {
        self.ids += 1;
        TraceId::from_u128(self.ids << 64 | self.ids)
    }

    fn attempt(&mut self, account: Digest, address: Option<Digest>, device: Option<Device>) -> AttemptOutcome {
        let (id, factor) = (self.id(), Factor::named(None));
        let tried = Try { account: Some(account), address, wider: Wider::of(KEY, None), factor, device, id };
        self.begin(tried)
    }

    fn begin(&mut self, tried: Try) -> AttemptOutcome {
        match self.ledger.execute(&Command::BeginLogin { login: self.login.clone(), tried }, self.now) {
            Answer::Attempted(outcome) => outcome,
            other => panic!("{other:?}"),
        }
    }

    fn result(&mut self, attempt: &Attempt, success: bool) -> Result<ResultOutcome, UnknownAttempt> {
        let nonce = self.id();
        let command = Command::EndLogin { login: self.login.clone(), attempt: *attempt, success, nonce };
        match self.ledger.execute(&command, self.now) {
            Answer::LoginEnded(ended) => ended,
            other => panic!("{other:?}"),
        }
    }

    /// Logs in from a device that is known from then on, and goes on after every budget and lock is forgotten.
    fn known_device(&mut self, account: Digest) -> Device {
        let AttemptOutcome::Allowed(attempt) = self.attempt(account, None, None) else { panic!("the first attempt") };
        let device = self.result(&attempt, true).unwrap().device.unwrap();
        self.now = self.now.plus(Span::HOUR);
        device
    }
}

/// What the attacker's address and the answers of known devices have to do with each other: nothing.
fn flood() -> impl Strategy<Value = Vec<(Span, u8)>> {
    vec(((0..30_000_000u64).prop_map(Span::from_micros), 0..4u8), 1..60)
}

proptest! {
    #![proptest_config(crate::cases(400))]

    /// Every answer is the model's: budgets by account and by address, locks that are floors, attempts under way that count
    /// as failures, results that come too late, tries on a locked account that count against nobody but their address,
    /// tokens that are good until the next one is shown, pardons and resets; and what is said of the time to wait is true.
    ///
    /// Woken by: leaving out `.rev()` in `Login::lock`; replacing `attempt.times_out()` with `now` for `fail` in
    /// `Track::bring`; leaving out `self.counting` in `Ahead::with_under_way`; counting a failure in `Account::begin` before
    /// it refuses; moving `address.charge` behind `account.begin` in `Login::attempt`; leaving out `fits_at` or the loop in
    /// `Track::opens_at`, and `self.last.max` in `Ahead::locked_until`; dropping all tokens but the shown one in
    /// `KnownDevice::show`, or none; dropping tracks with attempts under way in `Account::drop_idle_tracks`; and clearing
    /// the tracks in `Account::lift`.
    #[test]
    fn the_model_agrees(login in login(), start in start(), deeds in deeds()) {
        let mut gate = Gate::new(login.clone(), start);
        let mut model = Model::new(login);
        let (mut attempts, mut devices): (Vec<Attempt>, Vec<Device>) = (Vec::new(), Vec::new());
        for (gap, deed) in deeds {
            gate.now = gate.now.plus(gap);
            let now = gate.now;
            match deed {
                Deed::Attempt { account: name, factor, host, token } => {
                    let token = token.filter(|_| !devices.is_empty()).map(|token| token.index(devices.len()));
                    let id = gate.id();
                    let tried = Try {
                        account: Some(account(NAMES[usize::from(name)])),
                        address: Some(address(host)),
                        wider: Wider::of(KEY, None),
                        factor: Factor::named([None, Some("totp")][usize::from(factor)]),
                        device: token.map(|token| devices[token]),
                        id,
                    };
                    let told = gate.begin(tried);
                    match (model.attempt(&Asks { account: name, factor, host, token, id }, now), told) {
                        (None, AttemptOutcome::Allowed(attempt)) => attempts.push(attempt),
                        (expect, told) => prop_assert_eq!(expect, Some(told)),
                    }
                }
                Deed::Result(..) if attempts.is_empty() => {}
                Deed::Result(which, success) => {
                    let attempt = which.get(&attempts);
                    let told = gate.result(attempt, success);
                    let expect = model.result(attempt.id, success, now);
                    prop_assert_eq!(told.map(|told| told.locked_until), expect);
                    if let Ok(told) = told {
                        prop_assert_eq!(told.allowed, success || told.locked_until.is_none());
                        prop_assert_eq!(told.device.is_some(), success);
                        devices.extend(told.device);
                    }
                }
                Deed::Pardon(name) => {
                    gate.ledger.account(account(NAMES[usize::from(name)])).lift();
                    model.pardon(name);
                }
                Deed::Reset(name) => {
                    gate.ledger.account(account(NAMES[usize::from(name)])).reset();
                    model.reset(name);
                }
            }
        }
    }

    /// However many guess at once, no more of them reach the verifier than the first lock allows, nor than the budget
    /// or the ceiling does.
    ///
    /// Woken by: replacing `self.failures.saturating_add(flying)` with `self.failures` in `Track::locked`.
    #[test]
    fn parallel_guesses_gain_nothing(login in login(), start in start(), count in 1..40usize) {
        let first = login.locks.first().map_or(u64::MAX, |(failures, _)| u64::from(*failures));
        let most = first.min(login.account.quota()).min(u64::from(login.ceiling));
        let mut gate = Gate::new(login, start);
        let guess = |gate: &mut Gate| matches!(gate.attempt(account("ada"), None, None), AttemptOutcome::Allowed(_));
        let admitted = (0..count).filter(|_| guess(&mut gate)).count() as u64;
        prop_assert_eq!(admitted, most.min(count as u64));
    }

    /// Trying while locked neither extends the lock nor counts: the answer is the same time, whoever keeps trying, and
    /// the lock ends when it was to end.
    ///
    /// Woken by: calling `track.fail(login, now)` in `Account::begin` before it refuses.
    #[test]
    fn trying_while_locked_changes_nothing(login in login(), start in start(), tries in vec(0..1_000_000u64, 1..20)) {
        prop_assume!(!login.locks.is_empty());
        let login = roomy(Login { ceiling: 1_000, ..login });
        let mut gate = Gate::new(login, start);
        let until = loop {
            match gate.attempt(account("ada"), None, None) {
                AttemptOutcome::Allowed(attempt) => prop_assert!(gate.result(&attempt, false).is_ok()),
                AttemptOutcome::Locked { until } => break until.unwrap(),
                AttemptOutcome::TooMany { .. } => panic!("nobody is counted by address"),
            }
        };
        for gap in tries {
            gate.now = gate.now.plus(Span::from_micros(gap)).min(until.minus(MICRO));
            prop_assert_eq!(gate.attempt(account("ada"), None, None), AttemptOutcome::Locked { until: Some(until) });
        }
        gate.now = until;
        prop_assert!(matches!(gate.attempt(account("ada"), None, None), AttemptOutcome::Allowed(_)));
    }

    /// Whoever floods an account from unknown devices, from the owner's own address too, changes nothing of what a
    /// known device is told; and what happens on a known device changes nothing for the others.
    ///
    /// Woken by: leaving out `device == 0` for `counts_address` in `Login::attempt`; and replacing the device with `0` for
    /// the track in `Account::begin` and `Account::end`.
    #[test]
    fn an_attacker_locks_out_no_known_device(login in login(), start in start(), flood in flood()) {
        let mut calm = Gate::new(login.clone(), start);
        let mut stormy = Gate::new(login, start);
        let mut devices = [calm.known_device(account("ada")), stormy.known_device(account("ada"))];
        // Attackers guess all the while, and the owner fails now and then, but not so often as to be taken for one.
        let mut failures = 0;
        for (index, (gap, kind)) in flood.iter().enumerate() {
            calm.now = calm.now.plus(*gap);
            stormy.now = calm.now;
            let guess = stormy.attempt(account("ada"), Some(address(*kind % 2)), None);
            if let (AttemptOutcome::Allowed(attempt), 2..) = (guess, *kind) {
                prop_assert!(stormy.result(&attempt, false).is_ok());
            }
            if index % 4 > 0 {
                continue;
            }
            calm.ids = stormy.ids;
            let success = *kind == 0 || failures + 1 >= calm.login.ceiling;
            let told = [(&mut calm, devices[0]), (&mut stormy, devices[1])].map(|(gate, device)| {
                let told = gate.attempt(account("ada"), Some(address(0)), Some(device));
                match told {
                    AttemptOutcome::Allowed(attempt) => (told, gate.result(&attempt, success).ok()),
                    _ => (told, None),
                }
            });
            prop_assert_eq!(&told[0], &told[1]);
            if let Some(ended) = told[0].1 {
                failures = if success { 0 } else { failures + 1 };
                devices = ended.device.map_or(devices, |device| [device; 2]);
            }
        }
    }

    /// A success resets the count of its own class and not of the other: after one on a known device, unknown devices
    /// are as locked as before, and the other way round.
    ///
    /// Woken by: clearing the failures of every track in `Account::end` on a success.
    #[test]
    fn a_success_is_of_its_class(
        locks in vec((1..6u32, 100..300u64), 1..3),
        failed_known in any::<bool>(),
        start in start(),
    ) {
        let mut locks: Vec<_> = locks.into_iter().map(|(failures, seconds)| (failures, Span::from_secs(seconds))).collect();
        locks.sort_unstable();
        let mut gate = Gate::new(roomy(Login { locks, ..Login::default() }), start);
        let mut device = Some(gate.known_device(account("ada")));
        let until = loop {
            match gate.attempt(account("ada"), None, device.filter(|_| failed_known)) {
                AttemptOutcome::Allowed(attempt) => prop_assert!(gate.result(&attempt, false).is_ok()),
                locked => break locked,
            }
        };
        let AttemptOutcome::Allowed(attempt) = gate.attempt(account("ada"), None, device.filter(|_| !failed_known)) else {
            panic!("the other class is not locked");
        };
        let fresh = gate.result(&attempt, true).unwrap().device;
        if !failed_known {
            // The known device is known by a new token from now on.
            device = fresh;
        }
        prop_assert_eq!(gate.attempt(account("ada"), None, device.filter(|_| failed_known)), until);
    }

    /// An account that does not exist is answered like one that does: names change nothing but whose count it is.
    ///
    /// Woken by: locking an account only if it knows a device, in `Account::begin`.
    #[test]
    fn unknown_accounts_behave_alike(login in login(), start in start(), deeds in deeds(), names in ["[a-z]{1,8}", "[a-z@.]{1,8}"]) {
        let answers = names.map(|name| {
            let mut gate = Gate::new(login.clone(), start);
            if name.contains('a') {
                // One that exists has been used before.
                let _ = gate.known_device(account(&name));
            }
            gate.now = start.plus(Span::DAY);
            gate.ids = 1_000;
            let mut attempts: Vec<Attempt> = Vec::new();
            let mut told = Vec::new();
            for (gap, deed) in &deeds {
                gate.now = gate.now.plus(*gap);
                match deed {
                    Deed::Attempt { host, .. } => match gate.attempt(account(&name), Some(address(*host)), None) {
                        AttemptOutcome::Allowed(attempt) => {
                            attempts.push(attempt);
                            told.push("allowed".to_owned());
                        }
                        other => told.push(format!("{other:?}")),
                    },
                    Deed::Result(which, success) if !attempts.is_empty() => {
                        let ended = gate.result(which.get(&attempts), *success);
                        told.push(format!("{:?}", ended.map(|ended| (ended.allowed, ended.locked_until, ended.device.is_some()))));
                    }
                    Deed::Result(..) | Deed::Pardon(_) | Deed::Reset(_) => {}
                }
            }
            told
        });
        prop_assert_eq!(&answers[0], &answers[1]);
    }

    /// At the ceiling the secret is refused from unknown devices for good, however long they wait, until a reset or an
    /// operator lifts it; known devices and other factors still work, and a reset makes devices unknown.
    ///
    /// Woken by: leaving out `self.failures < login.ceiling &&` in `Track::bring`; replacing `Some(None)` with `None` in
    /// `Track::locked`; and leaving devices and credential as they are in `Account::reset`.
    #[test]
    fn the_ceiling_is_for_good(login in login(), start in start(), days in 1..1_000u64, reset in any::<bool>()) {
        let mut gate = Gate::new(roomy(login), start);
        let device = gate.known_device(account("ada"));
        loop {
            match gate.attempt(account("ada"), None, None) {
                AttemptOutcome::Allowed(attempt) => {
                    let told = gate.result(&attempt, false).unwrap();
                    gate.now = gate.now.plus(Span::SECOND);
                    prop_assert_eq!(told.locked_until == Some(Timestamp::MAX), {
                        let failures = gate.ledger.account(account("ada")).failures(gate.now);
                        failures == gate.login.ceiling
                    });
                }
                AttemptOutcome::Locked { until: Some(until) } => gate.now = until,
                AttemptOutcome::Locked { until: None } => break,
                AttemptOutcome::TooMany { .. } => panic!("nobody is counted by address"),
            }
        }
        let logs_in = |gate: &mut Gate, device| match gate.attempt(account("ada"), None, Some(device)) {
            AttemptOutcome::Allowed(attempt) => gate.result(&attempt, true).unwrap().device,
            _ => None,
        };
        let mut device = logs_in(&mut gate, device).unwrap();
        gate.now = gate.now.plus(Span::from_secs(86_400 * days));
        prop_assert_eq!(gate.attempt(account("ada"), None, None), AttemptOutcome::Locked { until: None });
        if days < 180 {
            device = logs_in(&mut gate, device).unwrap();
        }
        let other = Try {
            account: Some(account("ada")),
            address: None,
            wider: Wider::of(KEY, None),
            factor: Factor::named(Some("recovery")),
            device: None,
            id: gate.id(),
        };
        prop_assert!(matches!(gate.begin(other), AttemptOutcome::Allowed(_)));
        let now = gate.now;
        let stored = gate.ledger.account(account("ada"));
        let was_known = stored.knows(&device, now);
        if reset { stored.reset() } else { stored.lift() }
        prop_assert_eq!(stored.knows(&device, now), was_known && !reset);
        prop_assert!(matches!(gate.attempt(account("ada"), None, None), AttemptOutcome::Allowed(_)));
    }

    /// An account has one spelling: finding it again changes nothing, and space around it, case and width make no
    /// difference.
    ///
    /// Woken by: leaving out `default_case_fold()` in `canonical_account`.
    #[test]
    fn an_account_has_one_spelling(name in any::<String>(), plain in "[a-zA-Z0-9@._ßé]{1,12}", pad in "[ \t\u{a0}\u{3000}]{0,3}") {
        let once = canonical_account(&name);
        prop_assert_eq!(&canonical_account(&once), &once);
        let wide: String = plain.chars().map(|c| match c {
            '!'..='~' => char::from_u32(u32::from(c) + 0xfee0).unwrap(),
            other => other,
        }).collect();
        let unseen: String = plain.chars().flat_map(|c| [c, '\u{200b}']).collect();
        for other in [plain.to_uppercase(), plain.to_lowercase(), wide, unseen, format!("{pad}{plain}{pad}")] {
            prop_assert_eq!(account_digest(KEY, None, &other), account_digest(KEY, None, &plain));
        }
    }
}

/// Every character that another spelling could exist of keeps its own, alone and before marks that change places; and
/// characters that nobody sees beside it make no difference.
///
/// Woken by: leaving out the `nfkc()` before `default_case_fold()`, the last `trim()`, or U+3164 in `is_invisible`.
#[test]
fn every_character_has_one_spelling() {
    for c in ('\0'..'\u{20000}').chain('\u{2f800}'..='\u{2fa1f}') {
        for name in [c.to_string(), format!("a{c}\u{345}\u{301}")] {
            let once = canonical_account(&name);
            assert_eq!(canonical_account(&once), once, "{name:?}");
        }
        let (seen, unseen) = (format!("a{c}\u{301}"), format!("a\u{200b}{c}\u{3164}\u{301}\u{2060}"));
        assert_eq!(canonical_account(&unseen), canonical_account(&seen), "{unseen:?}");
    }
}
