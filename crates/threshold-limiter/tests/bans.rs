//! Operators' bans: what `Retry-After` says under a ban, and what is charged meanwhile.

#![expect(clippy::unwrap_used, reason = "a test that cannot go on should say so loudly, on the line where it stops")]

use std::sync::Arc;
use std::time::Duration;

use threshold_core::policy::{Ban, Layer, ListEntry};
use threshold_core::{Span, Timestamp, Verdict};
use threshold_limiter::store::memory::MemoryStore;
use threshold_limiter::{Decision, Facts, Limiter, ManualClock, Policy};

const START: Timestamp = Timestamp::from_secs(1_767_225_600);

fn alice() -> Facts<'static> {
    Facts { user: Some("alice"), ..Facts::default() }
}

struct World {
    clock: Arc<ManualClock>,
    limiter: Limiter<MemoryStore, Arc<ManualClock>>,
}

impl World {
    fn new(policy: &str) -> Self {
        let clock = Arc::new(ManualClock::new(START));
        let policy = Policy::parse(policy, &|_| None).unwrap();
        Self { limiter: Limiter::builder(policy).clock(Arc::clone(&clock)).build(), clock }
    }

    /// Bans Alice for so many seconds, or permanently.
    fn ban(&self, seconds: Option<u64>) {
        let (whom, now) = (ListEntry::named(Layer::User, "alice").unwrap(), Timestamp::from(self.limiter.now()));
        let until = seconds.map_or(Timestamp::MAX, |seconds| now.plus(Span::from_secs(seconds)));
        let ban = Ban { reason: "r".into(), by: "b".into(), from: now, until, whom };
        self.limiter.bans().set(ban.whom.ban_id(self.limiter.key()), ban, now).unwrap();
    }

    fn check(&self) -> Decision {
        self.limiter.check(&alice()).unwrap()
    }

    /// Checks that Alice is banned with this `Retry-After`, is still denied a microsecond before it has passed, and is allowed then.
    #[track_caller]
    fn is_banned_for(&self, seconds: u64) {
        let decision = self.check();
        assert_eq!(
            (decision.verdict, decision.penalty_layer(), decision.readings.len()),
            (Verdict::Ban, Some(Layer::User), 0)
        );
        assert_eq!(decision.retry_after_secs(), Some(seconds));
        let peeked = self.limiter.peek(&alice()).unwrap();
        assert_eq!((peeked.verdict, peeked.ready_at), (decision.verdict, decision.ready_at));
        self.clock.set(decision.ready_at.unwrap().minus(Span::from_micros(1)));
        assert!(!self.check().allowed());
        self.clock.set(decision.ready_at.unwrap());
        assert!(self.check().allowed());
    }
}

const ONE_AN_HOUR: &str = "[[rule]]\nname = \"r\"\nper = [\"user\"]\nlimit = \"1/h\"\nalgorithm = \"sliding-log\"\n";

#[test]
fn retry_after_of_a_ban_includes_the_wait_for_full_limits() {
    let world = World::new(ONE_AN_HOUR);
    assert!(world.check().allowed());
    world.ban(Some(600));
    world.is_banned_for(3_600);
}

#[test]
fn retry_after_of_a_long_ban_is_the_end_of_the_ban() {
    let world = World::new(ONE_AN_HOUR);
    assert!(world.check().allowed());
    world.ban(Some(7_200));
    world.is_banned_for(7_200);
}

/// Requests during a ban are charged nothing and add no strikes.
#[test]
fn retry_after_of_a_ban_includes_the_penalty_of_a_ladder() {
    let ladder = "[ladders.l]\nrungs = [\"cooldown 2h\", \"ban 24h\"]\n";
    let world = World::new(&format!("{ladder}{ONE_AN_HOUR}ladder = \"l\"\nstrike = \"request\"\n"));
    assert!(world.check().allowed());
    assert_eq!(world.check().retry_after(), Some(Duration::from_secs(7_200)));
    world.ban(Some(600));
    for _ in 0..5 {
        assert!(world.check().escalations.is_empty());
    }
    world.is_banned_for(7_200);
    assert_eq!(world.check().verdict, Verdict::Ban, "this is the second strike");
}

#[test]
fn an_observed_limit_does_not_lengthen_retry_after_of_a_ban() {
    let world = World::new(&format!("{ONE_AN_HOUR}mode = \"observe\"\n"));
    assert!(world.check().allowed());
    world.ban(Some(600));
    world.is_banned_for(600);
}

/// A denied user, or one under a rule that always denies, has no time to come back at, whenever a ban ends.
#[test]
fn a_ban_of_a_user_who_is_always_denied_has_no_retry_after() {
    let never = "[[rule]]\nname = \"never\"\nper = [\"user\"]\ndeny = true\n";
    for policy in ["[lists]\ndeny = [\"user:alice\"]\n", "[lists]\ndeny = [\"tenant:t\", \"user:alice\"]\n", never] {
        let world = World::new(policy);
        let before = world.check();
        assert_eq!((before.allowed(), before.ready_at), (false, None), "{policy}");
        world.ban(Some(600));
        let decision = world.check();
        assert_eq!((decision.verdict, decision.ready_at), (Verdict::Ban, None), "{policy}");
        world.clock.advance(Span::from_secs(600));
        assert_eq!(world.check().ready_at, None);
    }
    let world = World::new(ONE_AN_HOUR);
    world.ban(None);
    assert_eq!(world.check().ready_at, None);
}

/// The allow list entry is wider than the ban, so the ban applies first. Behind it, nothing is counted.
#[test]
fn retry_after_of_a_ban_in_an_allow_listed_tenant_is_the_end_of_the_ban() {
    let world = World::new(&format!("[lists]\nallow = [\"tenant:t\"]\n{ONE_AN_HOUR}"));
    world.ban(Some(600));
    let decision = world.limiter.check(&Facts { tenant: Some("t"), ..alice() }).unwrap();
    assert_eq!((decision.verdict, decision.retry_after()), (Verdict::Ban, Some(Duration::from_secs(600))));
}
