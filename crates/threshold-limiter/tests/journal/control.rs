//! Bans and settings that a library changes: in the journal, and in force again after a restart.

use std::collections::BTreeMap;
use std::sync::Arc;

use threshold_core::Span;
use threshold_core::control::ControlChange;
use threshold_core::policy::{Ban, Layer, ListEntry, Owner, Setting};
use threshold_limiter::journal::{Kind, rows_in_memory};
use threshold_limiter::store::at_once;

use super::{SECOND, START, Scratch, World, saved, world};

fn change(world: &World, change: ControlChange) {
    assert_eq!(at_once(world.limiter.change_control(change)), Ok(vec![]));
}

fn times(name: &str, times: Option<u32>, until: threshold_core::Timestamp) -> ControlChange {
    let setting = times.map(|times| {
        let (limits, by, reason) = (BTreeMap::new(), "ops".into(), "".into());
        Arc::new(Setting { tier: None, limits, times, until, from: START, by, reason })
    });
    ControlChange::Setting { owner: Owner::User, name: name.into(), setting }
}

fn given(world: &World) -> Vec<(String, u32)> {
    let policy = world.limiter.policy();
    let mut given: Vec<_> = policy.settings().map(|(_, name, setting)| (name.to_owned(), setting.times)).collect();
    given.sort_unstable();
    given
}

/// Fails where the sink is not told of settings, where `restore` leaves them out, or where the store does not have the bans
/// that were restored.
#[test]
fn changes_are_there_again_after_a_restart_and_can_be_taken_back() {
    let scratch = Scratch::new();
    let later = START.plus(Span::HOUR);
    {
        let world = world(&scratch.db(), START);
        for user in ["mallory", "trudy"] {
            let whom = ListEntry::named(Layer::User, user).unwrap();
            let id = whom.ban_id(world.limiter.key());
            let ban = Ban { whom, reason: "r".into(), by: "ops".into(), from: START, until: later };
            change(&world, ControlChange::Ban { id, ban: Some(Arc::new(ban)) });
        }
        for (name, until) in [("u1", later), ("u2", later), ("short", START.plus(Span::MINUTE))] {
            change(&world, times(name, Some(3), until));
        }
        change(&world, times("u2", None, later));
        let rows = rows_in_memory(world.limiter.store(), &world.limiter.bans());
        let kinds = |kind| rows.iter().filter(|row| row.kind == kind).count();
        assert_eq!((kinds(Kind::Ban), kinds(Kind::User)), (2, 2));
        assert!(saved(&world.journal, SECOND));
    }
    {
        let now = START.plus(Span::MINUTE);
        let world = world(&scratch.db(), now);
        assert_eq!((world.restored.bans, world.restored.settings), (2, 1));
        assert!(world.is_banned("mallory") && world.is_banned("trudy"));
        let mut stored = 0;
        world.limiter.store().each_control(|_| stored += 1);
        assert_eq!((stored, given(&world)), (3, vec![]));
        assert_eq!(at_once(world.limiter.follow_control()), Ok(vec![]));
        assert_eq!(given(&world), [("u1".to_owned(), 3)]);
        let id = ListEntry::named(Layer::User, "trudy").unwrap().ban_id(world.limiter.key());
        change(&world, ControlChange::Ban { id, ban: None });
        change(&world, times("u1", None, later));
        assert_eq!(at_once(world.limiter.follow_control()), Ok(vec![]));
        assert!(world.is_banned("mallory") && !world.is_banned("trudy"));
        assert!(saved(&world.journal, SECOND));
    }
    let world = world(&scratch.db(), START.plus(Span::MINUTE));
    assert_eq!(at_once(world.limiter.follow_control()), Ok(vec![]));
    assert!(world.is_banned("mallory") && !world.is_banned("trudy"));
    assert_eq!((given(&world).len(), world.contents.rows.len()), (0, 1));
}
