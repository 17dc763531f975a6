//! Tests the desk's operations: their errors, their effect and their audit records.

use std::path::PathBuf;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::task::{Context, Waker};

use threshold_core::policy::{Ban, Layer, ListEntry, Owner, Policy};
use threshold_core::{Digest, Facts, Timestamp};
use threshold_limiter::ManualClock;
use threshold_limiter::journal::{AuditLine, GivenSecrets, Journal};
use threshold_limiter::store::memory::MemoryStore;
use threshold_limiter::store::{Answer, AnyStore, Command, Kind, Listed, Outcome, Plan, Store, StoreError, at_once};

use super::audit::Entry;
use super::{Desk, JournalLocation, NewBan, NewSetting, OpenDesk, OperationError, Target};

pub(crate) const START: Timestamp = Timestamp::from_secs(1_767_225_600);

const POLICY: &str = "
    [ladders.l]
    rungs = ['ban 1h']
    [[rule]]
    name = 'r'
    per = ['user']
    limit = '1/h'
    ladder = 'l'
    strike = 'request'
";

/// A folder with a journal, which is removed after the test.
pub(crate) struct Folder(PathBuf);

impl Folder {
    pub(crate) fn new() -> Self {
        // Tests run on several threads of one process, so the process id alone is not unique.
        static NEXT: AtomicU32 = AtomicU32::new(0);
        let number = NEXT.fetch_add(1, Ordering::Relaxed);
        let path = std::env::temp_dir().join(format!("threshold-desk-{}-{number}", std::process::id()));
        std::fs::create_dir_all(&path).unwrap();
        Self(path)
    }

    pub(crate) fn journal(&self) -> PathBuf {
        self.0.join("threshold.db")
    }

    /// Opens a desk with its journal in this folder. All folders have the same secret, so that records have the same keys.
    pub(crate) fn open(&self, policy: &str) -> OpenDesk {
        let policy = Policy::parse(policy, &|_| None).unwrap();
        let secrets = GivenSecrets { present: Some("one for all of them"), old: None };
        let location = JournalLocation { journal: &self.journal(), secrets, new_journal: false };
        Desk::with_journal(policy, Arc::new(ManualClock::new(START)), &location).unwrap()
    }

    /// Reads the audit from disk: who, action, about and why.
    pub(crate) fn audit(&self) -> Vec<[String; 4]> {
        // Without the journal's own code, which could read back its own mistake.
        let file = rusqlite::Connection::open(self.journal()).unwrap();
        let mut select = file.prepare("SELECT who, action, about, why FROM audit ORDER BY id").unwrap();
        let read = |row: &rusqlite::Row<'_>| Ok([row.get(0)?, row.get(1)?, row.get(2)?, row.get(3)?]);
        select.query_map([], read).unwrap().map(Result::unwrap).collect()
    }

    /// Whether the file has a record of this ban.
    fn holds(&self, id: Digest) -> bool {
        Journal::read(&self.journal()).unwrap().rows.iter().any(|row| row.digest() == Some(id))
    }

    /// Blocks writes to the journal until the returned connection is dropped.
    fn block_writes(&self) -> rusqlite::Connection {
        let other = rusqlite::Connection::open(self.journal()).unwrap();
        // Another writer's transaction looks to the journal like a disk that does not answer.
        other.execute_batch("BEGIN IMMEDIATE").unwrap();
        other
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

fn mallory() -> NewBan<'static> {
    NewBan { layer: Layer::User, key: "mallory", reason: "fraud", seconds: None }
}

fn is_banned(desk: &Desk, user: &str) -> bool {
    at_once(desk.limiter.peek_async(&Facts { user: Some(user), ..Facts::default() })).unwrap().banned()
}

/// With a full audit, the answer once claimed that the change was in effect, while nothing had been changed.
///
/// Fails if `begin` is left out or comes after the change.
#[tokio::test(start_paused = true)]
async fn a_change_is_not_made_if_the_audit_is_full() {
    let folder = Folder::new();
    let OpenDesk { desk, journal, .. } = folder.open(POLICY);
    let blocked = folder.block_writes();
    let filler = AuditLine {
        at: START,
        who: "filler".to_owned(),
        action: String::new(),
        about: String::new(),
        why: String::new(),
    };
    let journal = journal.unwrap();
    // Nothing is written meanwhile, so this fills the queue to its bound.
    while journal.audit(filler.clone()).is_ok() {}
    assert_eq!(desk.ban("ops", mallory()).await, Err(OperationError::NotRecorded));
    assert!(!is_banned(&desk, "mallory"));
    drop(blocked);
    assert!(journal.close());
    assert!(folder.audit().iter().all(|[who, ..]| who == "filler"));
    assert!(Journal::read(&folder.journal()).unwrap().rows.is_empty());
}

/// While the disk does not answer, the ban is in effect and the error says that it is not saved. Once the disk answers again,
/// both the ban and its audit record are written.
#[tokio::test(start_paused = true)]
async fn a_change_that_cannot_be_saved_is_in_effect_and_reported_as_not_saved() {
    let folder = Folder::new();
    let OpenDesk { desk, journal, .. } = folder.open(POLICY);
    let blocked = folder.block_writes();
    assert_eq!(desk.ban("ops", mallory()).await, Err(OperationError::NotSaved));
    assert!(is_banned(&desk, "mallory"));
    assert_eq!((folder.audit().len(), Journal::read(&folder.journal()).unwrap().rows.len()), (0, 0));
    drop(blocked);
    assert!(journal.unwrap().close());
    let id = ListEntry::named(Layer::User, "mallory").unwrap().ban_id(desk.limiter.key());
    assert_eq!((folder.audit().len(), folder.holds(id)), (1, true));
}

#[test]
fn a_change_is_recorded_as_confirmed_or_not_confirmed_unless_it_is_withdrawn() {
    let folder = Folder::new();
    let OpenDesk { desk, journal, .. } = folder.open(POLICY);
    let entry = |action: &str| Entry { who: "ops", action: action.to_owned(), layer: "user", key: "u", why: "w" };
    desk.begin(entry("made")).unwrap().confirm();
    desk.begin(entry("refused")).unwrap().withdraw();
    // As when its caller disconnects while it is made, or the store does not answer.
    drop(desk.begin(entry("left")).unwrap());
    assert!(journal.unwrap().close());
    let actions: Vec<String> = folder.audit().into_iter().map(|[_, action, ..]| action).collect();
    assert_eq!(actions, ["made", "left (not confirmed)"]);
}

/// An operation in progress.
type Pending<'a> = Pin<Box<dyn Future<Output = Result<(), OperationError>> + 'a>>;

/// The old state in an audit record is right only if no other operation comes between.
///
/// Fails if one of the operations does not take the lock.
#[tokio::test]
async fn operations_are_serialized() {
    let folder = Folder::new();
    let OpenDesk { desk, .. } = folder.open(POLICY);
    let (id, _) = desk.ban("ops", mallory()).await.unwrap();
    let setting = NewSetting { times: Some(2), ..NewSetting::default() };
    let turn = desk.operations.lock().await;
    let mut operations: Vec<Pending<'_>> = vec![
        Box::pin(async { desk.ban("ops", NewBan { key: "trudy", ..mallory() }).await.map(drop) }),
        Box::pin(desk.lift("ops", id, None)),
        Box::pin(desk.forgive("ops", Target::Subject(Layer::User, "eve"), None)),
        Box::pin(async { desk.set("ops", Owner::User, "u1", setting.clone()).await.map(drop) }),
    ];
    for operation in &mut operations {
        // Polled once: everything before the lock runs, and nothing behind it.
        let first = operation.as_mut().poll(&mut Context::from_waker(Waker::noop()));
        assert!(first.is_pending());
    }
    assert!(is_banned(&desk, "mallory") && !is_banned(&desk, "trudy"));
    assert_eq!(folder.audit().len(), 1);
    drop(turn);
    for operation in operations {
        assert_eq!(operation.await, Ok(()));
    }
    let actions: Vec<String> = folder.audit().into_iter().map(|[_, action, ..]| action).collect();
    let words: Vec<&str> = actions.iter().filter_map(|action| action.split(':').next()).collect();
    assert_eq!(words, ["ban", "ban", "lift", "forgive", "give"]);
}

/// Bans by operators and by ladders are one list, in pages of any length.
///
/// Woken by: leaving out `truncate`, the sorting, or either `after` in `bans`.
#[test]
fn pages_of_any_length_list_every_ban_once_and_in_order() {
    let policy = Policy::parse(POLICY, &|_| None).unwrap();
    let desk = Desk::new(policy, Arc::new(ManualClock::default()));
    let limiter = &desk.limiter;
    for number in 0..20 {
        let whom = ListEntry::named(Layer::User, &format!("by hand {number}")).unwrap();
        let id = whom.ban_id(limiter.key());
        // Five have ended already. They are in the list of bans until a sweep, and must not be on any page.
        let until = if number < 5 { Timestamp::from(limiter.now()) } else { Timestamp::MAX };
        let ban = Ban { whom, reason: "r".into(), by: "b".into(), from: Timestamp::from(limiter.now()), until };
        limiter.bans().set(id, ban, Timestamp::from(limiter.now())).unwrap();
        // The second request exceeds the limit of one, and its strike bans the user.
        for _ in 0..2 {
            let _ =
                at_once(limiter.check_async(&Facts { user: Some(&format!("u{number}")), ..Facts::default() })).unwrap();
        }
    }
    let page = |after, limit| at_once(desk.bans(after, limit)).unwrap();
    let whole = page(None, 1_000);
    assert_eq!(whole.len(), 35);
    assert!(whole.is_sorted_by_key(|listed| listed.id));
    let by_ladders = whole.iter().filter(|listed| listed.ban.as_ref().is_some_and(|ban| &*ban.by == "ladder"));
    assert_eq!(by_ladders.count(), 20);
    // Pages of one, pages that do not divide the list, and pages that end just before, at and after its end.
    for limit in [1, 2, 7, 34, 35, 36] {
        let mut listed: Vec<super::subjects::ListedBan> = Vec::new();
        for _ in 0..100 {
            let next = page(listed.last().map(|listed| listed.id), limit);
            let more = next.len() == limit;
            assert!(next.len() <= limit);
            listed.extend(next);
            if !more {
                break;
            }
        }
        assert_eq!(listed, whole, "in pages of {limit}");
    }
}

/// A store in memory that fails for bans and settings.
struct FailingStore(MemoryStore, StoreError);

impl Store for FailingStore {
    async fn settle(&self, plan: &Plan<'_>, now: Timestamp, outcome: &mut Outcome) -> Result<(), StoreError> {
        self.0.settle(plan, now, outcome).await
    }

    async fn execute(&self, command: Command, now: Timestamp) -> Result<Answer, StoreError> {
        match command {
            // Only these: counting must go on, so that the test can tell whether the ban is in force.
            Command::Control(_) | Command::ReadControl { .. } => Err(self.1),
            command => self.0.execute(command, now).await,
        }
    }

    async fn list(
        &self,
        kind: Kind,
        after: Option<Digest>,
        limit: usize,
        now: Timestamp,
    ) -> Result<Vec<Listed>, StoreError> {
        self.0.list(kind, after, limit, now).await
    }
}

/// Fails if a change is in force before it is in the store, or if a full store is reported as unavailable.
#[tokio::test]
async fn a_ban_or_setting_that_cannot_be_stored_is_refused_and_not_in_force() {
    for error in [StoreError::Full, StoreError::Timeout] {
        let policy = Policy::parse(POLICY, &|_| None).unwrap();
        let store = AnyStore::other(FailingStore(MemoryStore::new(policy.memory()), error));
        let desk = Desk::with_store(policy, store, Arc::new(ManualClock::new(START)));
        let full = error == StoreError::Full;
        let ban = desk.ban("ops", mallory()).await.unwrap_err();
        assert_eq!(ban, if full { OperationError::TooManyBans } else { OperationError::Store(error) });
        let setting = NewSetting { times: Some(2), ..NewSetting::default() };
        let set = desk.set("ops", Owner::User, "u1", setting).await.unwrap_err();
        assert_eq!(set, if full { OperationError::TooManySettings } else { OperationError::Store(error) });
        assert!(!is_banned(&desk, "mallory") && desk.setting_of(Owner::User, "u1").unwrap().is_none());
        assert_eq!(desk.bans(None, 10).await, Ok(vec![]));
        assert_eq!(desk.apply_remote_changes().await, Err(error));
    }
}
