//! Operators' bans: until when a client is told to stay away, and what is counted meanwhile.

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

    /// Bans Alice for so many seconds; for good, if for none.
    fn ban(&self, seconds: Option<u64>) {
        let (whom, now) = (ListEntry::named(Layer::User, "alice").unwrap(), self.limiter.now());
        let until = seconds.map_or(Timestamp::MAX, |seconds| now.plus(Span::from_secs(seconds)));
        let ban = Ban { reason: "r".into(), by: "b".into(), from: now, until, whom };
        self.limiter.bans().set(ban.whom.ban_id(self.limiter.key()), ban, now).unwrap();
    }

    fn check(&self) -> Decision {
        self.limiter.check(&alice()).unwrap()
    }

    /// Alice is banned and told to wait so many seconds; a moment earlier she is still denied, and then she is let in.
    #[track_caller]
    fn is_told(&self, seconds: u64) {
        let told = self.check();
        assert_eq!((told.verdict, told.penalty, told.readings.len()), (Verdict::Ban, Some(Layer::User), 0));
        assert_eq!(told.retry_after_secs(), Some(seconds));
        let peeked = self.limiter.peek(&alice()).unwrap();
        assert_eq!((peeked.verdict, peeked.ready_at), (told.verdict, told.ready_at));
        self.clock.set(told.ready_at.unwrap().minus(Span::from_micros(1)));
        assert!(!self.check().allowed());
        self.clock.set(told.ready_at.unwrap());
        assert!(self.check().allowed());
    }
}

const ONE_AN_HOUR: &str = "[[rule]]\nname = \"r\"\nper = [\"user\"]\nlimit = \"1/h\"\nalgorithm = \"sliding-log\"\n";

#[test]
fn a_ban_ends_when_the_limits_behind_it_have_room() {
    let world = World::new(ONE_AN_HOUR);
    assert!(world.check().allowed());
    world.ban(Some(600));
    world.is_told(3_600);
}

#[test]
fn a_ban_that_outlasts_the_limits_ends_by_itself() {
    let world = World::new(ONE_AN_HOUR);
    assert!(world.check().allowed());
    world.ban(Some(7_200));
    world.is_told(7_200);
}

/// Asking while banned charges nothing and strikes nobody.
#[test]
fn a_ban_ends_when_the_ladders_penalty_behind_it_does() {
    let ladder = "[ladders.l]\nrungs = [\"cooldown 2h\", \"ban 24h\"]\n";
    let world = World::new(&format!("{ladder}{ONE_AN_HOUR}ladder = \"l\"\nstrike = \"request\"\n"));
    assert!(world.check().allowed());
    assert_eq!(world.check().retry_after(), Some(Duration::from_secs(7_200)));
    world.ban(Some(600));
    for _ in 0..5 {
        assert!(world.check().escalations.is_empty());
    }
    world.is_told(7_200);
    assert_eq!(world.check().verdict, Verdict::Ban, "the second strike, and not an earlier one");
}

#[test]
fn a_limit_that_is_only_watched_does_not_lengthen_a_ban() {
    let world = World::new(&format!("{ONE_AN_HOUR}mode = \"observe\"\n"));
    assert!(world.check().allowed());
    world.ban(Some(600));
    world.is_told(600);
}

/// Whoever is on the deny list, or never has room, has no moment to come back at, whenever a ban ends.
#[test]
fn a_ban_on_somebody_who_never_gets_in_tells_no_end() {
    let never = "[[rule]]\nname = \"never\"\nper = [\"user\"]\ndeny = true\n";
    for policy in ["[lists]\ndeny = [\"user:alice\"]\n", "[lists]\ndeny = [\"tenant:t\", \"user:alice\"]\n", never] {
        let world = World::new(policy);
        let before = world.check();
        assert_eq!((before.allowed(), before.ready_at), (false, None), "{policy}");
        world.ban(Some(600));
        let told = world.check();
        assert_eq!((told.verdict, told.ready_at), (Verdict::Ban, None), "{policy}");
        world.clock.advance(Span::from_secs(600));
        assert_eq!(world.check().ready_at, None);
    }
    let world = World::new(ONE_AN_HOUR);
    world.ban(None);
    assert_eq!(world.check().ready_at, None);
}

/// An allowance that is wider than the ban comes after it: then nothing is counted.
#[test]
fn a_ban_on_somebody_in_an_allowed_tenant_ends_by_itself() {
    let world = World::new(&format!("[lists]\nallow = [\"tenant:t\"]\n{ONE_AN_HOUR}"));
    world.ban(Some(600));
    let told = world.limiter.check(&Facts { tenant: Some("t"), ..alice() }).unwrap();
    assert_eq!((told.verdict, told.retry_after()), (Verdict::Ban, Some(Duration::from_secs(600))));
}
