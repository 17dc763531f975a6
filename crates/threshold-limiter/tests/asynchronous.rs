//! A store that is elsewhere: it takes a while, and at times it does not answer.

#![expect(clippy::unwrap_used, reason = "a test that cannot go on should say so loudly, on the line where it stops")]

use std::sync::{Arc, Mutex};
use std::time::Duration;

use threshold_core::policy::{Ban, ListEntry};
use threshold_core::receipt::{ActualCost, OnExpire};
use threshold_core::{DigestKey, Span, TraceId};
use threshold_limiter::store::memory::MemoryStore;
use threshold_limiter::store::{Answer, Command, Digest, EndError, Kind, Listed, Outcome, Plan, StoreError, Timestamp};
use threshold_limiter::{
    Attempted, Degraded, Facts, Layer, Limiter, LoginError, LoginRequest, ManualClock, Policy, Refusal, RefusedBy,
    Secret, Store, Verdict,
};
use tokio::task::yield_now;

/// A store in memory behind a wire that can be cut. It answers only when it is asked again.
struct Far {
    memory: MemoryStore,
    fails: Arc<Mutex<Option<StoreError>>>,
    /// Whether the answer to `reserve` is lost, and if so, whether it was heard before.
    loses_reserve: Arc<Mutex<Option<Heard>>>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Heard {
    Yes,
    No,
}

impl Far {
    async fn reach(&self) -> Result<&MemoryStore, StoreError> {
        yield_now().await;
        self.fails.lock().unwrap().map_or(Ok(&self.memory), Err)
    }
}

impl Store for Far {
    async fn settle(&self, plan: &Plan<'_>, now: Timestamp, outcome: &mut Outcome) -> Result<(), StoreError> {
        self.reach().await?.settle(plan, now, outcome).await
    }

    async fn execute(&self, command: Command, now: Timestamp) -> Result<Answer, StoreError> {
        let reserves = matches!(command, Command::Reserve { .. });
        let loses = self.loses_reserve.lock().unwrap().filter(|_| reserves);
        let memory = self.reach().await?;
        match loses {
            None => memory.execute(command, now).await,
            Some(Heard::No) => Err(StoreError::Timeout),
            Some(Heard::Yes) => memory.execute(command, now).await.and(Err(StoreError::Timeout)),
        }
    }

    async fn list(
        &self,
        kind: Kind,
        after: Option<Digest>,
        limit: usize,
        now: Timestamp,
    ) -> Result<Vec<Listed>, StoreError> {
        self.reach().await?.list(kind, after, limit, now).await
    }
}

/// A limiter on a far store, and what cuts the wire.
struct World {
    limiter: Limiter<Far, Arc<ManualClock>>,
    clock: Arc<ManualClock>,
    fails: Arc<Mutex<Option<StoreError>>>,
    loses_reserve: Arc<Mutex<Option<Heard>>>,
}

impl World {
    fn new(policy: &str) -> Self {
        let policy = Policy::parse(&format!("{policy}\n[memory]\nmax_keys = 1000\n"), &|_| None).unwrap();
        let fails = Arc::new(Mutex::new(None));
        let loses_reserve = Arc::default();
        let memory = MemoryStore::new(policy.memory());
        let store = Far { memory, fails: Arc::clone(&fails), loses_reserve: Arc::clone(&loses_reserve) };
        let clock = Arc::new(ManualClock::new(Timestamp::from_secs(1_767_225_600)));
        let secret = Secret::new(&[7; 32]).unwrap();
        let limiter = Limiter::builder(policy)
            .store(store)
            .clock(Arc::clone(&clock))
            .digest_key(DigestKey::new([7; 16]))
            .secrets(secret)
            .build();
        Self { limiter, clock, fails, loses_reserve }
    }

    fn cut(&self, error: StoreError) {
        *self.fails.lock().unwrap() = Some(error);
    }

    fn mend(&self) {
        *self.fails.lock().unwrap() = None;
    }

    /// The verdict of a check, and why it was made without the store.
    async fn check(&self) -> (Verdict, Option<&'static str>) {
        let decision = self.limiter.check_async(&user()).await.unwrap();
        (decision.verdict, decision.degraded.map(Degraded::name))
    }
}

fn user() -> Facts<'static> {
    Facts { user: Some("u"), ..Facts::default() }
}

fn rule(more: &str) -> String {
    format!("[[rule]]\nname = \"r\"\nlayer = \"user\"\nper = [\"user\"]\nlimit = \"2/h\"\n{more}\n")
}

const DEAD: StoreError = StoreError::Unavailable;

#[tokio::test]
async fn a_far_store_decides_as_a_near_one() {
    let world = World::new(&rule(""));
    let (first, second, third) = tokio::join!(world.check(), world.check(), world.check());
    let allowed = [first, second, third].iter().filter(|(verdict, _)| *verdict == Verdict::Allow).count();
    assert_eq!(allowed, 2, "whoever is asked first, all were under way at once");
    let many = world.limiter.check_many_async(&[user(), user()]).await;
    assert!(many.into_iter().all(|decision| !decision.unwrap().allowed()));
}

#[tokio::test]
async fn without_the_store_each_rule_does_as_it_says() {
    let open = World::new(&rule("on_store_error = \"open\""));
    let closed = World::new(&rule("on_store_error = \"closed\""));
    for (error, reason) in [(DEAD, "store_error"), (StoreError::Timeout, "store_timeout")] {
        open.cut(error);
        closed.cut(error);
        for _ in 0..3 {
            assert_eq!(open.check().await, (Verdict::Allow, Some(reason)));
            assert_eq!(closed.check().await, (Verdict::Deny, Some(reason)));
        }
        let (recorded, receipt) = closed.limiter.record_async(&user()).await.unwrap();
        assert!(recorded.allowed() && receipt.is_none(), "what has happened is not denied");
    }
    // Full is an answer: there is no mode in which a flood of keys opens the door.
    open.cut(StoreError::Full);
    assert_eq!(open.check().await, (Verdict::Deny, Some("store_full")));
    open.mend();
    assert_eq!(open.check().await, (Verdict::Allow, None));
}

#[tokio::test]
async fn a_local_rule_is_held_to_its_limit_in_this_process() {
    let world = World::new(&rule("ladder = \"graduated\"\nstrike = \"request\""));
    world.cut(DEAD);
    let (first, receipt) = world.limiter.check_with_receipt_async(&user()).await.unwrap();
    assert!(first.allowed() && first.degraded.is_some());
    assert!(receipt.is_none(), "the store was not charged, so it must give nothing back");
    assert_eq!(world.check().await.0, Verdict::Allow);
    for _ in 0..5 {
        assert_eq!(world.check().await, (Verdict::Deny, Some("store_error")), "and nobody is struck for it");
    }
    assert!(!world.limiter.peek_async(&user()).await.unwrap().allowed());
    // Two here and two there: never more than twice the limit, and then the ladder from its first rung.
    world.mend();
    assert_eq!(world.check().await, (Verdict::Allow, None));
    assert_eq!(world.check().await, (Verdict::Allow, None));
    assert_eq!(world.check().await, (Verdict::Warn, None));
}

#[tokio::test]
async fn every_verb_says_that_the_store_is_away() {
    let world = World::new(&rule("on_store_error = \"closed\""));
    let limiter = &world.limiter;
    let (_, receipt) = limiter.check_with_receipt_async(&user()).await.unwrap();
    let reserved = limiter.reserve_async(&user(), Duration::from_secs(60), OnExpire::Charge).await.unwrap();
    let id = reserved.reservation.unwrap();
    world.cut(DEAD);
    assert_eq!(limiter.refund_async(receipt.as_ref().unwrap()).await, Err(DEAD));
    assert_eq!(limiter.commit_async(id, &ActualCost::default()).await, Err(EndError::Store(DEAD)));
    assert_eq!(limiter.release_async(id).await, Err(EndError::Store(DEAD)));
    assert_eq!(limiter.pause_async(Layer::User, "u", Duration::from_secs(60)).await, Err(DEAD));
    assert_eq!(limiter.forgive_async(Layer::User, "u").await, Err(DEAD));
    assert_eq!(limiter.reset_account_async("ada").await, Err(LoginError::Store(DEAD)));
    assert!(
        limiter.reserve_async(&user(), Duration::from_secs(60), OnExpire::Charge).await.unwrap().reservation.is_none()
    );
    // Nothing of this has happened.
    world.mend();
    assert_eq!(limiter.release_async(id).await, Ok(()));
    assert_eq!(limiter.release_async(TraceId::from_u128(1)).await, Err(EndError::Unknown));
    assert_eq!(limiter.refund_async(receipt.as_ref().unwrap()).await, Ok(true));
    let look = limiter.peek_async(&Facts { cost: Some(0), ..user() }).await.unwrap();
    assert_eq!(look.readings[0].remaining, 2);
}

/// The charge was heard of, the reservation perhaps. Where it was not made, the charge is given back at once; where it was,
/// the reservation gives it back when it expires, and nothing is given back twice.
///
/// Woken by: `give_back` for every error in `withdraw_async`; and doing nothing there on a timeout.
#[tokio::test]
async fn a_reservation_whose_answer_is_lost_gives_its_charge_back_once() {
    for heard in [Heard::No, Heard::Yes] {
        let world = World::new(&rule("algorithm = \"fixed-window\"\non_store_error = \"closed\""));
        let left = async || {
            let look = world.limiter.peek_async(&Facts { cost: Some(0), ..user() }).await.unwrap();
            look.readings[0].remaining
        };
        assert_eq!(world.check().await, (Verdict::Allow, None));
        *world.loses_reserve.lock().unwrap() = Some(heard);
        let reserved = world.limiter.reserve_async(&user(), Duration::from_secs(60), OnExpire::Release).await.unwrap();
        assert!(reserved.reservation.is_none());
        let told = (reserved.decision.verdict, reserved.decision.degraded);
        assert_eq!(told, (Verdict::Deny, Some(Degraded::Timeout)));
        assert_eq!(left().await, if heard == Heard::Yes { 0 } else { 1 }, "{heard:?}");
        world.clock.advance(Span::MINUTE);
        assert_eq!(left().await, 1, "{heard:?}");
    }
}

const ADA: LoginRequest<'static> =
    LoginRequest { account: Some("ada"), ip: None, factor: None, device: None, user: None, tenant: None };

/// Tries a login that fails; whether the secret was checked.
async fn fails(world: &World) -> Result<bool, LoginError> {
    match world.limiter.login_attempt_async(&ADA).await? {
        Attempted::Refused(_) => Ok(false),
        Attempted::Allowed(attempt) => world.limiter.login_result_async(&attempt, false).await.map(|_| true),
    }
}

#[tokio::test]
async fn a_login_is_closed_while_the_store_is_away_unless_the_policy_says_otherwise() {
    let world = World::new("[login]");
    let attempted = world.limiter.login_attempt_async(&ADA).await.unwrap();
    let attempt = attempted.token().unwrap();
    world.cut(DEAD);
    assert_eq!(fails(&world).await, Err(LoginError::Store(DEAD)));
    assert_eq!(world.limiter.login_result_async(attempt, true).await, Err(LoginError::Store(DEAD)));
    world.mend();
    assert!(world.limiter.login_result_async(attempt, true).await.unwrap().device.is_some());

    let open = World::new("[login]\non_store_error = \"open\"");
    open.cut(DEAD);
    let attempted = open.limiter.login_attempt_async(&ADA).await.unwrap();
    let attempt = attempted.token().unwrap();
    open.mend();
    let told = open.limiter.login_result_async(attempt, true).await.unwrap();
    assert!(told.allowed && told.device.is_none(), "nobody knows whose device it would be");
    open.cut(StoreError::Full);
    assert_eq!(fails(&open).await, Err(LoginError::Store(StoreError::Full)));
}

/// Bans and lists are known without the store. Penalties are not: then the login itself decides, as its mode says.
///
/// Woken by: `decide_blind` not asked in `barring`; its error passed on whatever the mode; and bars in any order.
#[tokio::test]
async fn no_mode_opens_a_login_to_whoever_is_banned() {
    for mode in ["open", "closed", "local"] {
        let edge = "[[rule]]\nname = \"e\"\nlayer = \"edge\"\nper = [\"ip\"]\nlimit = \"2/h\"\n";
        let punished = rule("ladder = \"strict\"") + edge + "ladder = \"gentle\"";
        let lists = "[lists]\ndeny = [\"user:mallory\"]";
        let world = World::new(&format!("{lists}\n[login]\non_store_error = \"{mode}\"\n{punished}"));
        world.cut(DEAD);
        // The address has a standing that nobody can be asked for; the user's ban is known all the same.
        let mallory = LoginRequest { account: Some("mallory"), ip: "203.0.113.7".parse().ok(), ..ADA };
        let refused = world.limiter.login_attempt_async(&mallory).await.unwrap();
        assert_eq!(refused, Attempted::Refused(Refusal { by: RefusedBy::Ban, retry_after: None }), "{mode}");
        let whom = ListEntry::named(Layer::Tenant, "closed").unwrap();
        let until = world.limiter.now().plus(Span::HOUR);
        let ban = Ban { whom, reason: "r".into(), by: "b".into(), from: Timestamp::EPOCH, until };
        world.limiter.bans().set(ban.whom.ban_id(world.limiter.key()), ban, Timestamp::EPOCH).unwrap();
        let theirs = LoginRequest { tenant: Some("closed"), ..ADA };
        let refused = world.limiter.login_attempt_async(&theirs).await.unwrap();
        assert_eq!(
            refused,
            Attempted::Refused(Refusal { by: RefusedBy::Ban, retry_after: Some(Span::HOUR) }),
            "{mode}"
        );
        let other = world.limiter.login_attempt_async(&ADA).await;
        assert_eq!(other.is_ok(), mode != "closed", "{mode}");
    }
}

/// A store that comes back between two questions of one login: whether there is a penalty, nobody has said.
///
/// Woken by: going on in `barring` though the login is closed.
#[tokio::test]
async fn a_login_that_is_closed_waits_for_no_half_of_an_answer() {
    let world = World::new(&format!("[login]\n{}", rule("ladder = \"strict\"")));
    world.cut(DEAD);
    let mends = async {
        yield_now().await;
        world.mend();
    };
    let (told, ()) = tokio::join!(biased; world.limiter.login_attempt_async(&ADA), mends);
    assert_eq!(told, Err(LoginError::Store(DEAD)));
    assert!(world.limiter.login_attempt_async(&ADA).await.unwrap().token().is_some());
}

#[tokio::test]
async fn a_login_that_is_local_locks_in_this_process() {
    let world = World::new("[login]\non_store_error = \"local\"");
    world.cut(DEAD);
    for _ in 0..3 {
        assert_eq!(fails(&world).await, Ok(true));
    }
    assert_eq!(fails(&world).await, Ok(false));
    // One that began while the store was away ends where it began.
    world.clock.advance(Span::MINUTE);
    let attempted = world.limiter.login_attempt_async(&ADA).await.unwrap();
    let attempt = attempted.token().unwrap();
    world.mend();
    assert!(world.limiter.login_result_async(attempt, true).await.unwrap().allowed);
    assert_eq!(fails(&world).await, Ok(true));
}

#[cfg(feature = "wait")]
#[tokio::test(start_paused = true)]
async fn a_far_store_is_waited_on_in_order() {
    let world = World::new(&rule(""));
    let (limiter, hour) = (&world.limiter, Duration::from_secs(7_200));
    assert!(world.check().await.0 == Verdict::Allow && world.check().await.0 == Verdict::Allow);
    let mends = async {
        tokio::time::sleep(Duration::from_secs(2)).await;
        // One who waits looks again while the store is away, and is denied until it is back.
        world.cut(StoreError::Full);
        tokio::time::sleep(Duration::from_secs(2)).await;
        world.mend();
        limiter.forgive_async(Layer::User, "u").await.unwrap();
    };
    let (one, two) = (user(), Facts { cost: Some(2), ..user() });
    let (large, small, ()) = tokio::join!(limiter.wait(&two, hour), limiter.wait(&one, Duration::from_secs(60)), mends);
    assert!(large.unwrap().allowed());
    assert!(!small.unwrap().allowed(), "the budget was for whoever came first");
    assert_eq!(limiter.waiting(), 0);
}

/// Whatever is awaited may be awaited on any thread, with facts that are borrowed.
#[test]
fn every_future_can_be_sent() {
    fn sent(_: impl Future + Send) {}
    let world = World::new("[login]");
    let limiter = &world.limiter;
    sent(limiter.check_async(&user()));
    sent(limiter.check_with_receipt_async(&user()));
    sent(limiter.check_many_async(&[user()]));
    sent(limiter.record_async(&user()));
    sent(limiter.reserve_async(&user(), Duration::from_secs(60), OnExpire::Charge));
    sent(limiter.commit_async(TraceId::default(), &ActualCost::default()));
    sent(limiter.pause_async(Layer::User, "u", Duration::from_secs(60)));
    sent(limiter.login_attempt_async(&ADA));
    sent(limiter.login_result_async("", true));
    sent(limiter.reset_account_async("ada"));
    #[cfg(feature = "wait")]
    sent(limiter.wait_with_receipt(&user(), Duration::ZERO));
}
