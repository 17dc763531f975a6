//! A limiter that the builder connects to a journal.

use super::*;

/// A list of bans that was given to the builder was once replaced by another without a word: its bans held nowhere.
///
/// Seen to fail after: `BanList::default()` in place of the given list in `build_with_journal`; and leaving out `report_to` in
/// `restore_memory`.
#[test]
fn a_given_list_of_bans_is_in_force_and_written_to_the_journal() {
    let scratch = Scratch::new();
    let open = |bans: &Arc<BanList>| {
        let builder = Limiter::builder(Policy::parse(POLICY, &|_| None).unwrap()).clock(ManualClock::new(START));
        builder.bans(Arc::clone(bans)).build_with_journal(scratch.db()).unwrap()
    };
    let whom = ListEntry::named(Layer::User, "u1").unwrap();
    let bans = Arc::<BanList>::default();
    let first = open(&bans);
    let id = whom.ban_id(first.limiter.key());
    let ban = Ban { whom, reason: "test".into(), by: "ops".into(), from: START, until: START.plus(Span::DAY) };
    bans.set(id, ban, START).unwrap();
    let facts = Facts { user: Some("u1"), ..Facts::default() };
    assert!(first.limiter.check(&facts).unwrap().banned());
    assert!(first.journal.close());
    drop(first);
    let bans = Arc::<BanList>::default();
    let second = open(&bans);
    assert_eq!((second.restored.bans, bans.all(START).len()), (1, 1));
    assert!(second.limiter.check(&facts).unwrap().banned());
}
