//! Receipts and reservations act once and never mint, and everything that is stored or handed out reads back alike.

use std::collections::BTreeMap;

use proptest::collection::vec;
use proptest::prelude::*;
use proptest::sample::{Index, select};
use threshold_core::limit::Algorithm;
use threshold_core::lockout::{Account, Attempt, AttemptOutcome, Device, Factor, Login, Try, Wider};
use threshold_core::plan::Verb;
use threshold_core::policy::Layer;
use threshold_core::receipt::{ActualCost, CommitError, OnExpire, OwnedCost};
use threshold_core::secret::Purpose;
use threshold_core::{
    BytesError, Digest, Facts, Format, Receipt, Reservation, Secret, Secrets, Span, Standing, Timestamp, TraceId,
};

use crate::world::{ALICE, RuleShape, Shelf, World, gap, parsed, place, rule, rules, start, text_of, trace};

const NOW: Format = Format::PRESENT;

/// What a holder of receipts does.
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
    /// The host drops what says nothing.
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

/// How a charge stands with its holder.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Stage {
    /// Its receipt can be refunded.
    Charged,
    /// It is held until then.
    Held(Timestamp, OnExpire),
    /// Its reservation was committed or released, and is remembered until then.
    Ended(Timestamp, bool),
    /// Nothing of it can be given back.
    Done,
}

#[derive(Debug)]
struct Deal {
    receipt: Receipt,
    at: Timestamp,
    cost: u64,
    /// What is left of it, by rule.
    net: Vec<u64>,
    stage: Stage,
    /// What it was committed at.
    committed: u64,
}

/// A world with all that its one caller was ever charged.
struct Books {
    world: World,
    rules: Vec<RuleShape>,
    deals: Vec<Deal>,
}

impl Books {
    fn new(rules: Vec<RuleShape>, start: Timestamp) -> Self {
        Self { world: World::new(&text_of(&rules), start), rules, deals: Vec::new() }
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
        self.deals.push(Deal { receipt, at: self.world.now, cost, net, stage, committed: 0 });
    }

    /// Reservations whose time is up have ended, as was chosen.
    fn expire(&mut self) {
        for deal in &mut self.deals {
            match deal.stage {
                Stage::Held(until, OnExpire::Charge) if until <= self.world.now => {
                    deal.stage = Stage::Charged;
                }
                Stage::Held(until, OnExpire::Release) if until <= self.world.now => {
                    deal.net.fill(0);
                    deal.stage = Stage::Done;
                }
                Stage::Ended(until, _) if until <= self.world.now => deal.stage = Stage::Done,
                _ => {}
            }
        }
    }

    /// Ends one charge in some way; says what may come back, by rule.
    fn end(&mut self, act: Act) -> Vec<u64> {
        let now = self.world.now;
        let (Act::Commit(which, _) | Act::Release(which) | Act::Refund(which)) = act else {
            return Vec::new();
        };
        let place = which.index(self.deals.len());
        let deal = &mut self.deals[place];
        let before = deal.net.clone();
        match (act, deal.stage) {
            (Act::Refund(_), stage) => {
                let first = self.world.ledger.refund(&deal.receipt, now);
                match stage {
                    Stage::Charged => {
                        assert!(first, "the first refund acts");
                        deal.net.fill(0);
                        deal.stage = Stage::Done;
                    }
                    Stage::Held(..) | Stage::Ended(..) => assert!(!first, "a reservation is not refunded"),
                    // Once it is forgotten that it was refunded, there is nothing left to refund.
                    Stage::Done => assert!(!first || deal.receipt.void_from() <= now, "a refund acts once"),
                }
            }
            (Act::Commit(_, actual), stage) => {
                let cost = ActualCost { cost: Some(actual), ..ActualCost::default() };
                let answer = self.world.ledger.commit(deal.receipt.id(), &cost, now);
                match stage {
                    Stage::Held(until, _) => {
                        assert_eq!(answer, Ok(()));
                        deal.stage = Stage::Ended(until, true);
                        deal.committed = actual;
                        for (net, rule) in deal.net.iter_mut().zip(&self.rules) {
                            let landed = rule.algorithm.is_concurrency();
                            *net = actual.min(deal.cost).saturating_mul(u64::from(!landed));
                        }
                    }
                    // A hold costs nothing more or less by being committed.
                    Stage::Ended(_, true)
                        if actual == deal.committed
                            || self.rules.iter().all(|rule| rule.algorithm.is_concurrency()) =>
                    {
                        assert_eq!(answer, Ok(()));
                    }
                    Stage::Ended(_, true) => assert_eq!(answer, Err(CommitError::OtherCost)),
                    _ => assert_eq!(answer, Err(CommitError::Unknown)),
                }
            }
            (_, stage) => {
                let answer = self.world.ledger.release(deal.receipt.id(), now);
                match stage {
                    Stage::Held(until, _) => {
                        assert_eq!(answer, Ok(()));
                        deal.stage = Stage::Ended(until, false);
                        deal.net.fill(0);
                    }
                    Stage::Ended(_, false) => assert_eq!(answer, Ok(())),
                    _ => assert_eq!(answer, Err(CommitError::Unknown)),
                }
            }
        }
        before.iter().zip(&self.deals[place].net).map(|(before, after)| before - after).collect()
    }

    /// The room of each rule, in the order of the file.
    fn room(&mut self) -> Vec<u64> {
        let now = self.world.now;
        room_at(&mut self.world, self.rules.len(), now)
    }

    /// What was admitted, less what was given back, stays within each limit's bound in the window that ends now.
    fn audit(&self) -> Result<(), TestCaseError> {
        for rule in self.world.policy.rules() {
            let limit = rule.fixed_limit().unwrap();
            let index = place(&rule.name);
            let counted = self.deals.iter().filter(|deal| deal.at.plus(limit.period()) > self.world.now);
            let net: u64 = counted.map(|deal| deal.net[index]).sum();
            prop_assert!(net <= limit.bound(), "{limit}: {net}");
        }
        Ok(())
    }
}

/// What each rule would still take from Alice at some moment, in the order of the file.
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

/// The same world twice, so that one can go another way.
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

/// Mostly before anything is forgotten under a long period, and after much is under a short one.
fn soon() -> impl Strategy<Value = Span> {
    prop_oneof![3 => (0..2_000_000u64).prop_map(Span::from_micros), 1 => gap()]
}

proptest! {
    #![proptest_config(crate::cases(300))]

    /// Whatever is checked, reserved, committed, released, refunded, repeated, left to expire or swept away: what comes
    /// back is never more than what was charged and not yet given back, each end acts once, and what is admitted net of
    /// that stays within every limit's bound. A commit above what was reserved is debt, and admits nothing.
    ///
    /// Woken by: leaving out `self.refunded.insert` in `Ledger::refund`; leaving out `self.stage = Stage::Released` in
    /// `Reservation::release`; and leaving out `self.refunded.insert` in `Ledger::expire_reservations`, which is how it
    /// was: a receipt gave back again what its reservation had given back, once that was forgotten.
    #[test]
    fn what_is_given_back_was_charged(rules in plain_rules(), start in start(), acts in acts()) {
        let mut books = Books::new(rules, start);
        for (gap, act) in acts {
            books.world.wait(gap);
            books.expire();
            let now = books.world.now;
            let before = books.room();
            match act {
                Act::Check(cost) => books.enter(cost, |_| Stage::Charged),
                Act::Reserve { cost, ttl, on_expire } => {
                    books.enter(cost, |_| Stage::Held(now.plus(Span::from_secs(ttl)), on_expire));
                }
                Act::Sweep => {
                    books.world.ledger.sweep(now);
                    prop_assert_eq!(books.room(), before);
                }
                _ if books.deals.is_empty() => {}
                _ => {
                    let due = books.end(act);
                    let after = books.room();
                    let most: Vec<u64> = before.iter().zip(&due).map(|(room, due)| room + due).collect();
                    prop_assert!(at_most(&after, &most), "{:?} {:?} {:?} {:?}", act, before, after, due);
                }
            }
            books.audit()?;
        }
    }

    /// A reservation that is committed leaves as much used as if its true cost had been charged when it was reserved;
    /// exactly as much, but for a token bucket that was charged since, and for a window that the
    /// reservation opened and that nothing else did. What is more than was
    /// reserved is as if recorded at the commit. Repeating it changes nothing, and after it nothing is released.
    ///
    /// Woken by: replacing `reserved.saturating_sub(actual)` with `reserved` in `Reservation::commit`; and
    /// `more` with `more + reserved` where it is charged there.
    #[test]
    fn a_commit_is_the_true_cost(
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
        // No more than the capacity is recorded, so that no debt is saturated.
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
        let told = held.ledger.commit(id, &other, now);
        let holds_only = rules.iter().all(|rule| rule.algorithm.is_concurrency());
        prop_assert_eq!(told, if holds_only { Ok(()) } else { Err(CommitError::OtherCost) });
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

    /// A reservation that is released, or expires and was to be released, leaves no more room than if it had never
    /// been, and exactly that but for a token bucket that was charged since; so it stays, except that a window which it
    /// opened goes on. One that expires otherwise stays charged. Repeating a release changes nothing; after the end of its time there is no
    /// reservation any more.
    ///
    /// Woken by: leaving out `.min(left)` in `RefundedState::give_back`; replacing `OnExpire::Release` with
    /// `OnExpire::Charge` in `Reservation::expire`; and `<=` with `<` in `Ledger::expire_reservations`.
    #[test]
    fn a_release_is_as_if_never(
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
        // Somebody else comes meanwhile, but takes no more than there is room for in debt.
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

    /// A charge that is renewed frees no room at that moment, and from then on counts as if its request had come then: there
    /// is no more room, whatever others were charged meanwhile. A window of its own that it opened goes on if others are in
    /// it.
    ///
    /// Woken by: leaving out the `charge` in `Receipt::renew`.
    #[test]
    fn a_renewed_charge_came_now(
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

    /// After a change of its limit, a receipt gives back its own charge or nothing, never what others were charged
    /// since: there is no more room than if its request had never been.
    ///
    /// Woken by: replacing `balance.is_in_terms_of(&self.limit)` with `true` in `Charged::give_back`.
    #[test]
    fn an_old_receipt_gives_back_its_own(
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
        // A bucket that shrinks to less than half forgives what is beyond a debt of its capacity.
        prop_assume!(old.algorithm != Algorithm::TokenBucket || 2 * new.capacity() >= old.capacity());
        let [mut charged, mut never] = twins(std::slice::from_ref(&old), start, &past);
        let Ok(Some(receipt)) = charged.check(ALICE, cost).map(|checked| checked.receipt) else { return Ok(()) };
        for world in [&mut charged, &mut never] {
            world.policy = parsed(&text_of(std::slice::from_ref(&new))).with_generation(1);
        }
        for (gap, cost) in since {
            charged.wait(gap);
            never.wait(gap);
            // A denial stores a balance in the new terms too, so it is looked at in both worlds.
            let allowed = charged.check(ALICE, cost).is_ok_and(|checked| checked.decision.allowed());
            let _ = never.check(ALICE, 0).unwrap();
            let _ = charged.check(ALICE, 0).unwrap();
            if allowed {
                record(&mut never, cost);
            }
        }
        charged.wait(wait);
        prop_assert!(charged.ledger.refund(&receipt, charged.now));
        let now = charged.now;
        prop_assert!(at_most(&room_at(&mut charged, 1, now), &room_at(&mut never, 1, now)));
    }

    /// Committing more than was reserved takes room and never makes any, also where the limit has changed meanwhile.
    ///
    /// Woken by: replacing `in_terms_of` with `balance.bring(&charged.limit, now)` in `Reservation::commit`, which is how it
    /// was: the balance was put into the terms of a limit that no longer held, and forgot what had left under its
    /// shorter period.
    #[test]
    fn more_is_never_less(
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

/// What may happen to bytes on their way.
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

/// Bytes read back as what they were; what is cut off or of another version is an error; and what reads at all, reads
/// as something with exactly these bytes.
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

/// What a busy account looks like: attempts under way, failures, locks, and devices that are known.
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
        let wider = Wider::of(key, None);
        let tried = Try { account: account_key, address: address_key, wider, factor, device, id };
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

    /// Receipts, reservations, standings and accounts read back as what they were, and nothing else reads.
    ///
    /// Woken by: leaving out `out.byte(u8::from(self.shadow))` in `Standing::to_bytes`; `from.finish()?` in
    /// `Reservation::from_bytes`; replacing the error with `true` for `shadow` in `Standing::from_bytes`; and writing `self.last` in place of
    /// `self.locked_until`, and leaving out `attempt.counts`, in `Track::write`.
    #[test]
    fn bytes_read_back(
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
        let mut shelf = Shelf::default();
        for ask in trace {
            world.wait(ask.gap);
            let facts = world.facts(ask.who, ask.cost);
            let Ok(plan) = world.policy.plan(&facts) else { continue };
            let outcome = shelf.settle(&plan, world.now);
            let Some(receipt) = plan.receipt(&outcome) else { continue };
            reads_back(&receipt, |value| Receipt::to_bytes(value, NOW), Receipt::from_bytes, &damage)?;
            let mut reservation = Reservation::new(receipt, Span::from_secs(ttl), OnExpire::Release);
            let mut balances: Vec<_> = reservation.keys().map(|key| shelf.balances[&key].clone()).collect();
            let ended = match stage {
                0 => true,
                1 => reservation.commit(&OwnedCost::default(), &mut balances, world.now).is_ok(),
                _ => reservation.release(&mut balances, world.now).is_ok(),
            };
            prop_assert!(ended);
            reads_back(&reservation, |value| Reservation::to_bytes(value, NOW), Reservation::from_bytes, &damage)?;
        }
        for standing in shelf.standings.values().chain([&Standing::default()]) {
            reads_back(standing, |value| Standing::to_bytes(value, NOW), Standing::from_bytes, &damage)?;
        }
        let (account, ..) = busy_account(&logins, start);
        reads_back(&account, |value| Account::to_bytes(value, NOW), Account::from_bytes, &damage)?;
    }

    /// A token is refused if any of its characters is another, and where a token of another purpose is wanted.
    ///
    /// Woken by: leaving out `mac.update(label)` in `begin`; leaving out `verify_truncated_left` in
    /// `Secret::verify`; and opening with the present secret alone.
    #[test]
    fn tokens_are_for_one_purpose_and_as_they_were(
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
            // While its secret is in force, as the present or as the old one, and not after that.
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
