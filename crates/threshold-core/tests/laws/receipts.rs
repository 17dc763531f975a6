//! Receipts and reservations act once and never create capacity, and stored bytes and tokens read back unchanged.

use std::collections::BTreeMap;

use proptest::collection::vec;
use proptest::prelude::*;
use proptest::sample::{Index, select};
use threshold_core::limit::Algorithm;
use threshold_core::lockout::{Account, Attempt, AttemptKeys, AttemptOutcome, Device, Factor, Login, StandInKeys};
use threshold_core::plan::Verb;
use threshold_core::policy::Layer;
use threshold_core::receipt::{ActualCost, CommitError, OnExpire, OwnedCost};
use threshold_core::secret::Purpose;
use threshold_core::{
    BytesError, Digest, Facts, Format, Receipt, Reservation, Secret, Secrets, Span, Standing, Timestamp, TraceId,
};

use crate::world::{ALICE, PlainStore, RuleShape, World, gap, parsed, place, rule, rules, start, text_of, trace};

const NOW: Format = Format::PRESENT;

/// One step of a caller that holds receipts.
#[derive(Debug, Clone, Copy)]
enum Act {
    Check(u64),
    Reserve {
        cost: u64,
        ttl: u64,
        on_expire: OnExpire,
    },
    Commit(Index, u64),
    Release(Index),
    Refund(Index),
    /// The host drops balances that no longer matter.
    Sweep,
}

fn acts() -> impl Strategy<Value = Vec<(Span, Act)>> {
    let on_expire = select(&[OnExpire::Charge, OnExpire::Release][..]);
    let act = prop_oneof![
        3 => (1..4u64).prop_map(Act::Check),
        3 => (1..4u64, select(&[1, 5, 60][..]), on_expire).prop_map(|(cost, ttl, on_expire)| Act::Reserve { cost, ttl, on_expire }),
        2 => (any::<Index>(), 0..6u64).prop_map(|(which, actual)| Act::Commit(which, actual)),
        2 => any::<Index>().prop_map(Act::Release),
        3 => any::<Index>().prop_map(Act::Refund),
        1 => Just(Act::Sweep),
    ];
    vec((gap(), act), 1..50)
}

/// The state of a charge.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Stage {
    /// Its receipt can be refunded.
    Charged,
    /// It is reserved until then.
    Held(Timestamp, OnExpire),
    /// Its reservation was committed (`true`) or released, and is remembered until then.
    Ended(Timestamp, bool),
    /// Nothing of it can be refunded.
    Done,
}

/// A charge, and how much of it is left.
#[derive(Debug)]
struct Entry {
    receipt: Receipt,
    at: Timestamp,
    cost: u64,
    /// The cost that was not given back, for each rule.
    net: Vec<u64>,
    stage: Stage,
    /// The cost that it was committed with.
    committed: u64,
}

/// A world with all charges of its only caller.
struct Accounting {
    world: World,
    rules: Vec<RuleShape>,
    entries: Vec<Entry>,
}

impl Accounting {
    fn new(rules: Vec<RuleShape>, start: Timestamp) -> Self {
        Self { world: World::new(&text_of(&rules), start), rules, entries: Vec::new() }
    }

    fn enter(&mut self, cost: u64, stage: impl FnOnce(&Receipt) -> Stage) {
        let Ok(checked) = self.world.check(ALICE, cost) else { return };
        let Some(receipt) = checked.receipt else { return };
        let stage = stage(&receipt);
        if let Stage::Held(until, on_expire) = stage {
            let id = self.world.ledger.reserve(receipt.clone(), until.since(self.world.now), on_expire);
            assert_eq!(id, receipt.id());
        }
        let net = vec![cost; self.rules.len()];
        self.entries.push(Entry { receipt, at: self.world.now, cost, net, stage, committed: 0 });
    }

    /// Ends the reservations that have expired.
    fn expire(&mut self) {
        for entry in &mut self.entries {
            match entry.stage {
                Stage::Held(until, OnExpire::Charge) if until <= self.world.now => {
                    entry.stage = Stage::Charged;
                }
                Stage::Held(until, OnExpire::Release) if until <= self.world.now => {
                    entry.net.fill(0);
                    entry.stage = Stage::Done;
                }
                Stage::Ended(until, _) if until <= self.world.now => entry.stage = Stage::Done,
                _ => {}
            }
        }
    }

    /// Ends one charge. Returns how much may be given back, for each rule.
    fn end(&mut self, act: Act) -> Vec<u64> {
        let now = self.world.now;
        let (Act::Commit(which, _) | Act::Release(which) | Act::Refund(which)) = act else {
            return Vec::new();
        };
        let place = which.index(self.entries.len());
        let entry = &mut self.entries[place];
        let before = entry.net.clone();
        match (act, entry.stage) {
            (Act::Refund(_), stage) => {
                let first = self.world.ledger.refund(&entry.receipt, now);
                match stage {
                    Stage::Charged => {
                        assert!(first || entry.receipt.void_from() <= now, "the first refund takes effect");
                        entry.net.fill(0);
                        entry.stage = Stage::Done;
                    }
                    Stage::Held(..) | Stage::Ended(..) => {
                        assert!(!first, "the receipt of a reservation is not refunded");
                    }
                    // Also when it is forgotten: the charge no longer counts by then.
                    Stage::Done => assert!(!first, "a refund takes effect once"),
                }
            }
            (Act::Commit(_, actual), stage) => {
                let cost = ActualCost { cost: Some(actual), ..ActualCost::default() };
                let answer = self.world.ledger.commit(entry.receipt.id(), &cost, now);
                match stage {
                    Stage::Held(until, _) => {
                        assert_eq!(answer, Ok(()));
                        entry.stage = Stage::Ended(until, true);
                        entry.committed = actual;
                        for (net, rule) in entry.net.iter_mut().zip(&self.rules) {
                            let landed = rule.algorithm.is_concurrency();
                            *net = actual.min(entry.cost).saturating_mul(u64::from(!landed));
                        }
                    }
                    // A commit ends a concurrency slot, whatever its cost.
                    Stage::Ended(_, true)
                        if actual == entry.committed
                            || self.rules.iter().all(|rule| rule.algorithm.is_concurrency()) =>
                    {
                        assert_eq!(answer, Ok(()));
                    }
                    Stage::Ended(_, true) => assert_eq!(answer, Err(CommitError::OtherCost)),
                    _ => assert_eq!(answer, Err(CommitError::Unknown)),
                }
            }
            (_, stage) => {
                let answer = self.world.ledger.release(entry.receipt.id(), now);
                match stage {
                    Stage::Held(until, _) => {
                        assert_eq!(answer, Ok(()));
                        entry.stage = Stage::Ended(until, false);
                        entry.net.fill(0);
                    }
                    Stage::Ended(_, false) => assert_eq!(answer, Ok(())),
                    _ => assert_eq!(answer, Err(CommitError::Unknown)),
                }
            }
        }
        before.iter().zip(&self.entries[place].net).map(|(before, after)| before - after).collect()
    }

    /// Returns what remains of each limit, in the order of the file.
    fn room(&mut self) -> Vec<u64> {
        let now = self.world.now;
        room_at(&mut self.world, self.rules.len(), now)
    }

    /// Checks that the admitted cost, less what was given back, is within each limit's bound in the window that ends now.
    fn audit(&self) -> Result<(), TestCaseError> {
        for rule in self.world.policy.rules() {
            let limit = rule.fixed_limit().unwrap();
            let index = place(&rule.name);
            let counted = self.entries.iter().filter(|entry| entry.at.plus(limit.period()) > self.world.now);
            let net: u64 = counted.map(|entry| entry.net[index]).sum();
            prop_assert!(net <= limit.bound(), "{limit}: {net}");
        }
        Ok(())
    }
}

/// Returns what remains of each limit for Alice at some time, in the order of the file.
fn room_at(world: &mut World, rules: usize, at: Timestamp) -> Vec<u64> {
    let facts = Facts { cost: Some(0), ..ALICE.facts() };
    let decision = world.peek_at(&facts, at);
    let mut room = vec![0; rules];
    for reading in &decision.readings {
        let index = place(&world.policy.rules()[reading.rule()].name);
        room[index] = reading.remaining;
    }
    room
}

fn plain(rule: RuleShape) -> RuleShape {
    RuleShape { observed: false, block_for: None, ..rule }
}

fn plain_rules() -> impl Strategy<Value = Vec<RuleShape>> {
    rules().prop_map(|rules| rules.into_iter().map(plain).collect())
}

fn at_most(one: &[u64], other: &[u64]) -> bool {
    one.iter().zip(other).all(|(one, other)| one <= other)
}

/// Makes two equal worlds with the same past.
fn twins(rules: &[RuleShape], start: Timestamp, before: &[(Span, u64)]) -> [World; 2] {
    [0, 1].map(|_| {
        let mut world = World::new(&text_of(rules), start);
        for (gap, cost) in before {
            world.wait(*gap);
            let _ = world.check(ALICE, *cost);
        }
        world
    })
}

fn record(world: &mut World, cost: u64) {
    let facts = world.facts(ALICE, cost);
    let _ = world.ledger.decide(&world.policy, Verb::Record, &facts, world.now).unwrap();
}

fn past() -> impl Strategy<Value = Vec<(Span, u64)>> {
    vec((gap(), 1..3u64), 0..8)
}

/// A short time: within a long period, and after several short ones.
fn soon() -> impl Strategy<Value = Span> {
    prop_oneof![3 => (0..2_000_000u64).prop_map(Span::from_micros), 1 => gap()]
}

proptest! {
    #![proptest_config(crate::cases(300))]

    /// In any sequence of checks, reservations, commits, releases, refunds, repetitions, expiries and sweeps: what is given back is
    /// never more than what was charged and not given back yet, each end takes effect once, and the net admitted cost stays
    /// within every limit's bound. A commit above the reserved cost is debt and admits nothing.
    ///
    /// Seen to fail after: leaving out `self.refunded.insert` in `Ledger::refund`; leaving out `self.stage = Stage::Released` in
    /// `Reservation::release`; and leaving out `self.refunded.insert` in `Ledger::expire_reservations`, which was
    /// a bug: a receipt gave back what its reservation had given back already, once the reservation was forgotten.
    #[test]
    fn nothing_is_given_back_twice_or_without_a_charge(rules in plain_rules(), start in start(), acts in acts()) {
        let mut accounting = Accounting::new(rules, start);
        for (gap, act) in acts {
            accounting.world.wait(gap);
            accounting.expire();
            let now = accounting.world.now;
            let before = accounting.room();
            match act {
                Act::Check(cost) => accounting.enter(cost, |_| Stage::Charged),
                Act::Reserve { cost, ttl, on_expire } => {
                    accounting.enter(cost, |_| Stage::Held(now.plus(Span::from_secs(ttl)), on_expire));
                }
                Act::Sweep => {
                    accounting.world.ledger.sweep(now);
                    prop_assert_eq!(accounting.room(), before);
                }
                _ if accounting.entries.is_empty() => {}
                _ => {
                    let due = accounting.end(act);
                    let after = accounting.room();
                    let most: Vec<u64> = before.iter().zip(&due).map(|(room, due)| room + due).collect();
                    prop_assert!(at_most(&after, &most), "{:?} {:?} {:?} {:?}", act, before, after, due);
                }
            }
            accounting.audit()?;
        }
    }

    /// After a commit, limits are used as if the actual cost had been charged at the time of the reservation. This is exact
    /// except for a token bucket that was charged since, and for a window that only the reservation opened. Cost beyond the
    /// reserved one counts as if recorded at the commit. Repeating the commit changes nothing, and nothing can be released
    /// after it.
    ///
    /// Seen to fail after: replacing `reserved.saturating_sub(actual)` with `reserved` in `Reservation::commit`; and
    /// `more` with `more + reserved` where it is charged there.
    #[test]
    fn a_commit_leaves_the_actual_cost(
        rules in plain_rules(),
        start in start(),
        past in past(),
        costs in (1..4u64, 0..7u64),
        between in vec(gap(), 0..3),
        later in vec(gap(), 1..4),
    ) {
        let rules: Vec<_> = rules.into_iter().filter(|rule| !rule.algorithm.is_concurrency()).collect();
        let count = rules.len();
        let (reserved, actual) = costs;
        let [mut held, mut charged] = twins(&rules, start, &past);
        let Ok(Some(receipt)) = held.check(ALICE, reserved).map(|checked| checked.receipt) else { return Ok(()) };
        let id = held.ledger.reserve(receipt, Span::HOUR, OnExpire::Charge);
        let _ = charged.check(ALICE, reserved.min(actual)).unwrap();
        // At most the capacity is recorded, so that no debt saturates.
        let least = rules.iter().map(RuleShape::capacity).min().unwrap_or(0);
        for gap in between.iter().take(usize::try_from(least).unwrap()) {
            for world in [&mut held, &mut charged] {
                world.wait(*gap);
                record(world, 1);
            }
        }
        let cost = ActualCost { cost: Some(actual), ..ActualCost::default() };
        let now = held.now;
        prop_assert_eq!(held.ledger.commit(id, &cost, now), Ok(()));
        if actual > reserved {
            record(&mut charged, actual - reserved);
        }
        let room = room_at(&mut held, count, now);
        prop_assert_eq!(held.ledger.commit(id, &cost, now), Ok(()));
        let other = ActualCost { cost: Some(actual + 1), ..ActualCost::default() };
        let answer = held.ledger.commit(id, &other, now);
        let holds_only = rules.iter().all(|rule| rule.algorithm.is_concurrency());
        prop_assert_eq!(answer, if holds_only { Ok(()) } else { Err(CommitError::OtherCost) });
        prop_assert_eq!(held.ledger.release(id, now), Err(CommitError::Unknown));
        prop_assert_eq!(&room_at(&mut held, count, now), &room);
        let mut at = now;
        for gap in [Span::ZERO].iter().chain(&later) {
            at = at.plus(*gap);
            let (one, other) = (room_at(&mut held, count, at), room_at(&mut charged, count, at));
            for (index, rule) in rules.iter().enumerate() {
                let opened = actual == 0 && rule.opens_its_own_windows() && (at > now || !between.is_empty());
                let exact = rule.algorithm != Algorithm::TokenBucket || actual >= reserved || between.is_empty();
                let fair = if exact { one[index] == other[index] } else { one[index] <= other[index] };
                prop_assert!(fair || opened, "{:?} {} {}", rule, one[index], other[index]);
            }
        }
    }

    /// A reservation that is released, or that expires with `OnExpire::Release`, leaves as much room as if it had never been
    /// made, and less only in a token bucket that was charged since. A window that it opened stays open. With
    /// `OnExpire::Charge`, its cost stays charged. Repeating a release changes nothing, and an expired reservation is unknown.
    ///
    /// Seen to fail after: leaving out `.min(left)` in `RefundedBucket::give_back`; replacing `OnExpire::Release` with
    /// `OnExpire::Charge` in `Reservation::expire`; and `<=` with `<` in `Ledger::expire_reservations`.
    #[test]
    fn a_released_reservation_leaves_no_trace(
        rules in plain_rules(),
        start in start(),
        past in past(),
        cost in 1..4u64,
        ttl in 1..100u64,
        end in select(&[None, Some(OnExpire::Charge), Some(OnExpire::Release)][..]),
        between in prop::option::of(gap()),
        wait in gap(),
        later in vec(gap(), 1..4),
    ) {
        let count = rules.len();
        let [mut held, mut other] = twins(&rules, start, &past);
        let Ok(Some(receipt)) = held.check(ALICE, cost).map(|checked| checked.receipt) else { return Ok(()) };
        let id = held.ledger.reserve(receipt, Span::from_secs(ttl), end.unwrap_or_default());
        let expires = held.now.plus(Span::from_secs(ttl));
        if end == Some(OnExpire::Charge) {
            let _ = other.check(ALICE, cost).unwrap();
        }
        // Another request comes meanwhile, with so little cost that its debt does not saturate.
        let between = between.filter(|gap| held.now.plus(*gap) < expires);
        if let Some(gap) = between {
            for world in [&mut held, &mut other] {
                world.wait(gap);
                record(world, 1);
            }
        }
        held.now = if end.is_none() { held.now.plus(wait).min(expires.minus(Span::from_micros(1))) } else { expires };
        let mut now = held.now;
        if end.is_none() {
            prop_assert_eq!(held.ledger.release(id, now), Ok(()));
            prop_assert_eq!(held.ledger.release(id, now), Ok(()));
        } else {
            let cost = ActualCost::default();
            prop_assert_eq!(held.ledger.commit(id, &cost, now), Err(CommitError::Unknown));
            prop_assert_eq!(held.ledger.release(id, now), Err(CommitError::Unknown));
        }
        let released = now;
        for gap in [Span::ZERO].iter().chain(&later) {
            now = now.plus(*gap);
            let (one, other) = (room_at(&mut held, count, now), room_at(&mut other, count, now));
            for (index, rule) in rules.iter().enumerate() {
                let opened = rule.opens_its_own_windows() && (now > released || between.is_some());
                let bucket = rule.algorithm == Algorithm::TokenBucket
                    && end != Some(OnExpire::Charge)
                    && between.is_some();
                let fair = if bucket { one[index] <= other[index] } else { one[index] == other[index] };
                prop_assert!(fair || opened, "{:?} {} {}", rule, one[index], other[index]);
            }
        }
    }

}

proptest! {
    #![proptest_config(crate::cases(1_500))]

    /// Renewing a charge frees no room at that time. From then on it counts as if its request had come then, whatever was charged
    /// meanwhile. A window that it opened stays open if other charges are in it.
    ///
    /// Seen to fail after: leaving out the `charge` in `Receipt::renew`.
    #[test]
    fn a_renewed_charge_counts_from_its_renewal(
        rules in plain_rules(),
        start in start(),
        before in past(),
        meanwhile in past(),
        cost in 1..3u64,
        waited in gap(),
    ) {
        let count = rules.len();
        let [mut renewed, mut late] = twins(&rules, start, &before);
        let Ok(Some(mut receipt)) = renewed.check(ALICE, cost).map(|checked| checked.receipt) else { return Ok(()) };
        let mut alone = true;
        for (gap, cost) in meanwhile {
            renewed.wait(gap);
            late.wait(gap);
            if renewed.check(ALICE, cost).is_ok_and(|checked| checked.decision.allowed()) {
                record(&mut late, cost);
                alone = false;
            }
        }
        renewed.wait(waited);
        late.wait(waited);
        let now = renewed.now;
        let held = room_at(&mut renewed, count, now);
        renewed.ledger.renew(&mut receipt, now);
        record(&mut late, cost);
        prop_assert!(at_most(&room_at(&mut renewed, count, now), &held));
        for wait in [Span::ZERO, Span::from_micros(1), Span::SECOND, Span::from_secs(30)] {
            let at = now.plus(wait);
            let (one, other) = (room_at(&mut renewed, count, at), room_at(&mut late, count, at));
            for (index, rule) in rules.iter().enumerate() {
                let opened = rule.opens_its_own_windows() && !alone;
                prop_assert!(one[index] <= other[index] || opened, "{rule:?} {} {}", one[index], other[index]);
            }
        }
    }

    /// After a change of its limit, a receipt gives back its own charge or nothing, and never a charge of later requests: there is
    /// no more room than if its request had never been made.
    ///
    /// Seen to fail after: replacing `balance.is_in_terms_of(&self.limit)` with `true` in `Charged::give_back`.
    #[test]
    fn a_receipt_of_an_old_limit_gives_back_only_its_own_charge(
        old in rule().prop_map(plain),
        new in rule().prop_map(plain),
        same in [prop::bool::weighted(0.3), prop::bool::weighted(0.3)],
        start in start(),
        past in past(),
        cost in 1..4u64,
        since in vec((soon(), 1..3u64), 0..4),
        wait in soon(),
    ) {
        let old = RuleShape { from_first: false, layer: Layer::User, ..old };
        let new = RuleShape {
            quota: if same[0] { old.quota } else { new.quota },
            period: if same[1] { old.period } else { new.period },
            burst: new.burst,
            ..old.clone()
        };
        // A bucket that shrinks to less than half forgets debt beyond its capacity.
        prop_assume!(old.algorithm != Algorithm::TokenBucket || 2 * new.capacity() >= old.capacity());
        let [mut charged, mut never] = twins(std::slice::from_ref(&old), start, &past);
        let Ok(Some(receipt)) = charged.check(ALICE, cost).map(|checked| checked.receipt) else { return Ok(()) };
        for world in [&mut charged, &mut never] {
            world.policy = parsed(&text_of(std::slice::from_ref(&new))).with_generation(1);
        }
        for (gap, cost) in since {
            charged.wait(gap);
            never.wait(gap);
            let allowed = charged.check(ALICE, cost).is_ok_and(|checked| checked.decision.allowed());
            if allowed {
                record(&mut never, cost);
            }
            // A denial converts a balance to the new limit too, so it is converted in both worlds.
            charged.convert(ALICE);
            never.convert(ALICE);
        }
        charged.wait(wait);
        prop_assert!(charged.ledger.refund(&receipt, charged.now) || receipt.void_from() <= charged.now);
        let now = charged.now;
        prop_assert!(at_most(&room_at(&mut charged, 1, now), &room_at(&mut never, 1, now)));
    }

    /// Committing more than was reserved never makes room, also where the limit has changed meanwhile.
    ///
    /// Seen to fail after: replacing `in_terms_of` with `balance.bring(&charged.limit, now)` in `Reservation::commit`, which was a
    /// bug: the balance was converted to the old limit, and forgot charges that had left its shorter period.
    #[test]
    fn committing_more_than_reserved_never_makes_room(
        old in rule().prop_map(plain),
        new in rule().prop_map(plain),
        start in start(),
        past in past(),
        more in 1..4u64,
        since in vec((gap(), 1..3u64), 0..8),
        later in vec(gap(), 1..4),
    ) {
        let new = RuleShape { algorithm: old.algorithm, from_first: old.from_first, layer: old.layer, ..new };
        let [mut world, _] = twins(std::slice::from_ref(&old), start, &past);
        let Ok(Some(receipt)) = world.check(ALICE, 1).map(|checked| checked.receipt) else { return Ok(()) };
        let id = world.ledger.reserve(receipt, Span::HOUR, OnExpire::Charge);
        world.policy = parsed(&text_of(std::slice::from_ref(&new))).with_generation(1);
        for (gap, cost) in since {
            world.wait(gap);
            let _ = world.check(ALICE, cost);
        }
        let moments: Vec<_> = [Span::ZERO].iter().chain(&later).map(|gap| world.now.plus(*gap)).collect();
        let rooms = |world: &mut World| moments.iter().map(|at| room_at(world, 1, *at)[0]).collect::<Vec<_>>();
        let before = rooms(&mut world);
        let cost = ActualCost { cost: Some(1 + more), ..ActualCost::default() };
        let now = world.now;
        prop_assert_eq!(world.ledger.commit(id, &cost, now), Ok(()));
        let after = rooms(&mut world);
        prop_assert!(at_most(&after, &before) || old.algorithm.is_concurrency(), "{:?} {:?}", before, after);
    }
}

/// Damage to bytes.
#[derive(Debug, Clone)]
struct Damage {
    cut: Index,
    version: u8,
    at: Index,
    flip: u8,
    noise: Vec<u8>,
}

fn damage() -> impl Strategy<Value = Damage> {
    let noise = vec(prop_oneof![Just(0u8), Just(1u8), any::<u8>()], 0..80);
    (any::<Index>(), any::<u8>(), any::<Index>(), 1..=255u8, noise).prop_map(|(cut, version, at, flip, noise)| Damage {
        cut,
        version,
        at,
        flip,
        noise,
    })
}

/// Checks that bytes read back as the same value, that truncated bytes and other versions are errors, and that any bytes that
/// can be read are exactly the bytes of the value read.
fn reads_back<T: PartialEq + std::fmt::Debug>(
    value: &T,
    to_bytes: impl Fn(&T) -> Vec<u8>,
    from_bytes: impl Fn(&[u8]) -> Result<T, BytesError>,
    damage: &Damage,
) -> Result<(), TestCaseError> {
    let bytes = to_bytes(value);
    let read = from_bytes(&bytes);
    prop_assert_eq!(read.as_ref(), Ok(value));
    prop_assert!(from_bytes(&bytes[..damage.cut.index(bytes.len())]).is_err());
    let trailing: Vec<u8> = bytes.iter().copied().chain([0]).collect();
    prop_assert!(from_bytes(&trailing).is_err());
    if damage.version != bytes[0] {
        let other: Vec<u8> = [damage.version].into_iter().chain(bytes[1..].iter().copied()).collect();
        prop_assert_eq!(
            from_bytes(&other),
            Err(BytesError::UnknownVersion { found: damage.version, oldest: 1, newest: 1 })
        );
    }
    let mut flipped = bytes.clone();
    flipped[damage.at.index(bytes.len())] ^= damage.flip;
    let noise: Vec<u8> = [bytes[0]].into_iter().chain(damage.noise.iter().copied()).collect();
    for strange in [flipped, noise] {
        if let Ok(read) = from_bytes(&strange) {
            prop_assert_eq!(to_bytes(&read), strange);
        }
    }
    Ok(())
}

/// Returns an account with attempts under way, failures, locks and known devices.
fn busy_account(steps: &[(Span, u8, bool)], start: Timestamp) -> (Account, Vec<Attempt>, Vec<Device>) {
    let login = Login { ceiling: 6, ..Login::default() };
    let key = parsed("").key();
    let (mut account, mut address) = (Account::default(), threshold_core::Balance::default());
    let (mut attempts, mut devices): (Vec<Attempt>, Vec<Device>) = (Vec::new(), Vec::new());
    let mut now = start;
    for (index, (gap, kind, success)) in steps.iter().enumerate() {
        now = now.plus(*gap);
        let factor = Factor::named([None, Some("totp")][usize::from(*kind) % 2]);
        let device = devices.last().copied().filter(|_| *kind > 3);
        let id = TraceId::from_u128((index as u128 + 1) << 64 | 7);
        let (account_key, address_key) = (Some(Digest::from_u128(5)), Some(Digest::from_u128(6)));
        let stand_ins = StandInKeys::of(key, None);
        let tried = AttemptKeys { account: account_key, address: address_key, stand_ins, factor, device, id };
        if let AttemptOutcome::Allowed(attempt) = login.attempt(&tried, Some(&mut account), &mut address, now) {
            attempts.push(attempt);
            if *kind % 3 > 0 {
                let ended = login.result(&attempt, *success, Some(&mut account), &mut address, id, now).unwrap();
                devices.extend(ended.device);
            }
        }
        if (*kind, *success) == (0, true) {
            account.lift();
        }
    }
    (account, attempts, devices)
}

fn logins() -> impl Strategy<Value = Vec<(Span, u8, bool)>> {
    vec((gap(), 0..6u8, prop::bool::weighted(0.4)), 1..20)
}

proptest! {
    #![proptest_config(crate::cases(300))]

    /// Receipts, reservations, standings and accounts read back unchanged, and malformed bytes are refused.
    ///
    /// Seen to fail after: leaving out `out.byte(u8::from(self.shadow))` in `Standing::to_bytes`; `from.finish()?` in
    /// `Reservation::from_bytes`; replacing the error with `true` for `shadow` in `Standing::from_bytes`; and writing `self.last` in place of
    /// `self.locked_until`, and leaving out `attempt.counts`, in `Track::write`.
    #[test]
    fn stored_bytes_read_back_unchanged(
        rules in rules(),
        start in start(),
        trace in trace(),
        logins in logins(),
        ttl in 1..5_000u64,
        stage in 0..3u8,
        damage in damage(),
    ) {
        let text = format!("{}\n[ladders.steps]\nrungs = [\"shadow\", \"cooldown 1s\"]\n", text_of(&rules)) + "
            [[rule]]\nname = \"hot\"\nper = [\"user\"]\nlimit = \"1/7s\"\nladder = \"steps\"
            [[rule]]\nname = \"cold\"\nper = [\"user\"]\nlimit = \"1/s\"\nladder = \"steps\"\nstrike = \"ignored\"";
        let mut world = World::new(&text, start);
        let mut store = PlainStore::default();
        for ask in trace {
            world.wait(ask.gap);
            let facts = world.facts(ask.who, ask.cost);
            let Ok(plan) = world.policy.plan(&facts) else { continue };
            let outcome = store.settle(&plan, world.now);
            let Some(receipt) = plan.receipt(&outcome) else { continue };
            reads_back(&receipt, |value| Receipt::to_bytes(value, NOW), Receipt::from_bytes, &damage)?;
            let mut reservation = Reservation::new(receipt, Span::from_secs(ttl), OnExpire::Release);
            let ended = match stage {
                0 => true,
                1 => reservation.commit(&OwnedCost::default(), world.now).is_ok(),
                _ => reservation.release(world.now).is_ok(),
            };
            prop_assert!(ended);
            reads_back(&reservation, |value| Reservation::to_bytes(value, NOW), Reservation::from_bytes, &damage)?;
        }
        for standing in store.standings.values().chain([&Standing::default()]) {
            reads_back(standing, |value| Standing::to_bytes(value, NOW), Standing::from_bytes, &damage)?;
        }
        let (account, ..) = busy_account(&logins, start);
        reads_back(&account, |value| Account::to_bytes(value, NOW), Account::from_bytes, &damage)?;
    }

    /// A token is refused if any of its characters is changed, and where a token for another purpose is expected.
    ///
    /// Seen to fail after: leaving out `mac.update(label)` in `begin`; leaving out `verify_truncated_left` in
    /// `Secret::verify`; and opening with the present secret alone.
    #[test]
    fn a_changed_token_or_one_for_another_purpose_is_refused(
        logins in logins(),
        start in start(),
        at in any::<Index>(),
        other in "[A-Za-z0-9_-]",
        bytes in vec(any::<u8>(), 16..40),
    ) {
        let secret = Secret::new(&bytes).unwrap();
        let mut world = World::new(&text_of(&[]), start);
        world.policy = parsed("[[rule]]\nname = \"r0\"\nper = [\"user\"]\nlimit = \"5/min\"\n");
        let receipt = world.check(ALICE, 1).unwrap().receipt.unwrap();
        let (_, attempts, devices) = busy_account(&logins, start);
        let reservation = Reservation::new(receipt.clone(), Span::MINUTE, OnExpire::Charge);
        let only = Secrets::new(secret.clone());
        let rotated = Secrets::new(Secret::new(b"the secret after a rotation").unwrap());
        let both = rotated.clone().with_old(secret.clone()).unwrap();
        let mut tokens = BTreeMap::from([
            (0, receipt.to_token(&secret, NOW)),
            (1, secret.seal(Purpose::Reservation, &reservation.to_bytes(NOW))),
        ]);
        tokens.extend(attempts.first().map(|attempt| (2, attempt.to_token(&secret, NOW))));
        tokens.extend(devices.first().map(|device| (3, device.to_token(&secret, NOW))));
        prop_assert_eq!(Receipt::from_token(&tokens[&0], &only), Ok(receipt));
        for attempt in &attempts {
            prop_assert_eq!(Attempt::from_token(&attempt.to_token(&secret, NOW), &both), Ok(*attempt));
        }
        for device in &devices {
            prop_assert_eq!(Device::from_token(&device.to_token(&secret, NOW), &both), Ok(*device));
        }
        let purposes = [Purpose::Receipt, Purpose::Reservation, Purpose::Attempt, Purpose::Device];
        for (kind, token) in &tokens {
            // A token is valid while its secret is in force, as the current or as the old one.
            for (secrets, in_force) in [(&only, true), (&both, true), (&rotated, false)] {
                for (index, purpose) in purposes.iter().enumerate() {
                    prop_assert_eq!(secrets.open(*purpose, token).is_ok(), in_force && index == *kind);
                }
                prop_assert_eq!(Receipt::from_token(token, secrets).is_ok(), in_force && *kind == 0);
                prop_assert_eq!(Attempt::from_token(token, secrets).is_ok(), in_force && *kind == 2);
                prop_assert_eq!(Device::from_token(token, secrets).is_ok(), in_force && *kind == 3);
            }
            let place = at.index(token.len());
            let mut forged = token.clone();
            forged.replace_range(place..=place, &other);
            prop_assert!(forged == *token || both.open(purposes[*kind], &forged).is_err());
        }
    }
}
