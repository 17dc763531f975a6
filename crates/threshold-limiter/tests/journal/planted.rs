//! Files and triggers that somebody else has put where a journal is: none of them is used.

use std::os::unix::fs::{PermissionsExt as _, chown, symlink};
use std::path::Path;

use rustix::fs::{CWD, FileType, Mode, mknodat};
use threshold_core::Timestamp;
use threshold_core::policy::Layer;
use threshold_limiter::files::unsafe_folder;
use threshold_limiter::journal::{
    GivenSecrets, Journal, JournalError, check_installation, installation_secrets, load_counters,
};

use super::rebuild::repaired;
use super::{SECOND, START, Scratch, key, saved, secret, world};

/// A user that no test runs as.
const STRANGER: u32 = 54_321;

/// Gives a file to another user, which only root can do.
fn give_away(path: &Path) {
    let given = chown(path, Some(STRANGER), None);
    given.expect("the tests of files of other users run as root, as in CI: sudo -E env PATH=$PATH ./test");
}

fn set_mode(path: &Path, mode: u32) {
    std::fs::set_permissions(path, std::fs::Permissions::from_mode(mode)).unwrap();
}

fn refusal(error: &dyn std::error::Error) -> String {
    format!("{error}: {}", error.source().map(ToString::to_string).unwrap_or_default())
}

/// Opens a journal as a server does: its secret, then the journal. Returns why that fails.
fn open(db: &Path) -> Result<(), String> {
    let given = GivenSecrets::default();
    let opened = installation_secrets(db, given).and_then(|secrets| Journal::open(db, &secrets).map(drop));
    let checked = check_installation(db, given);
    assert_eq!(checked.is_ok(), opened.is_ok(), "a check says the same as a start: {checked:?} {opened:?}");
    opened.map_err(|error| refusal(&error))
}

/// An empty journal of another user, which everybody could write to, was used; the secret that another user had put beside it became
/// the installation's; and a named pipe in place of either kept the server waiting for ever.
///
/// Woken by leaving out `check_planted`, by `Trust::Any` in place of `Own` or `Secret`, and by opening without `NONBLOCK`.
#[test]
fn a_planted_file_is_refused_in_every_place() {
    let digits = "0123456789abcdef".repeat(4);
    let places = ["db", "db-wal", "db-shm", "db-journal", "db.lock", "counters"];
    for name in places.into_iter().chain(["secret", "secret.next", "secret.old"]) {
        let scratch = Scratch::new();
        let file = scratch.db().with_extension(name);
        let shown = file.display().to_string();
        let check = |plant: &dyn Fn(), expect: &str| {
            plant();
            let error = open(&scratch.db()).expect_err(name);
            assert!(error.contains(&shown) && error.contains(expect), "{name}: {error}");
            std::fs::remove_file(&file).or_else(|_| std::fs::remove_dir(&file)).unwrap();
        };
        let write = |mode| {
            std::fs::write(&file, if name.starts_with("secret") { &digits } else { "" }).unwrap();
            set_mode(&file, mode);
        };
        // Not by a program: until it runs, it has the locks of the tests beside this one.
        let pipe = || mknodat(CWD, &file, FileType::Fifo, Mode::RUSR | Mode::WUSR, 0).unwrap();
        check(&pipe, "it is a named pipe and not a regular file: remove it (rm ");
        check(&|| std::fs::create_dir(&file).unwrap(), "it is a folder and not a regular file");
        check(&|| write(0o622), if matches!(name, "secret" | "secret.old") { "chmod 600" } else { "chmod go-w" });
        let stranger = |mode| {
            write(mode);
            give_away(&file);
        };
        check(&|| stranger(0o600), &format!("it belongs to user {STRANGER}, and this process runs as user "));
        check(&|| stranger(0o666), "remove it, or, if nobody has planted it, run chown ");
        // The journal itself may be reached by a link, and a secret may be mounted as one.
        if !matches!(name, "db" | "secret" | "secret.old") {
            let target = scratch.0.join("target");
            std::fs::write(&target, &digits).unwrap();
            set_mode(&target, 0o600);
            check(&|| symlink(&target, &file).unwrap(), "it is a symbolic link and not a regular file");
        }
        assert_eq!(
            std::fs::read_dir(&scratch.0)
                .unwrap()
                .filter(|file| !file.as_ref().unwrap().path().ends_with("target"))
                .count(),
            0
        );
    }
}

/// A check refused a planted `secret.next` beside a good secret, and a start did not look at it.
///
/// Woken by leaving out `read_next` in either.
#[test]
fn a_planted_secret_is_refused_beside_a_good_one_too() {
    let scratch = Scratch::new();
    open(&scratch.db()).unwrap();
    let next = scratch.db().with_extension("secret.next");
    std::fs::write(&next, "0123456789abcdef".repeat(4)).unwrap();
    set_mode(&next, 0o622);
    for given in [GivenSecrets::default(), GivenSecrets { present: Some("a secret of the environment"), old: None }] {
        let started = installation_secrets(&scratch.db(), given).map(drop).unwrap_err();
        let checked = check_installation(&scratch.db(), given).unwrap_err();
        assert_eq!(refusal(&started), refusal(&checked));
        assert!(refusal(&started).contains("chmod go-w"), "{started}");
    }
    set_mode(&next, 0o600);
    open(&scratch.db()).unwrap();
}

/// A database that waits to replace a damaged journal is put in its place at the next start, so that another user could choose all of it.
///
/// Woken by leaving out `is_planted`.
#[test]
fn a_planted_replacement_is_removed() {
    let (scratch, other) = (Scratch::new(), Scratch::new());
    for (scratch, name) in [(&scratch, "eve"), (&other, "mallory")] {
        let world = world(&scratch.db(), START);
        world.ban(Layer::User, name, Timestamp::MAX);
        assert!(world.journal.close());
    }
    let next = scratch.0.join("threshold.db.next");
    for mode in [0o600, 0o666] {
        std::fs::copy(other.db(), &next).unwrap();
        set_mode(&next, mode);
        if mode == 0o600 {
            give_away(&next);
        }
        let world = world(&scratch.db(), START);
        assert!(world.is_banned("eve") && !world.is_banned("mallory") && !next.exists());
    }
}

/// Kubernetes mounts a secret as a link to a link to a file of root.
#[test]
fn a_secret_may_be_a_link_to_a_private_file() {
    let scratch = Scratch::new();
    assert_eq!(open(&scratch.db()), Ok(()));
    let secret = scratch.0.join("threshold.secret");
    std::fs::create_dir(scratch.0.join("..data")).unwrap();
    std::fs::rename(&secret, scratch.0.join("..data/secret")).unwrap();
    symlink("..data/secret", &secret).unwrap();
    assert_eq!(open(&scratch.db()), Ok(()));
    set_mode(&secret, 0o440);
    assert!(open(&scratch.db()).unwrap_err().contains("chmod 600"));
}

/// Kubernetes opens the files of a volume to the group that is the pod's `fsGroup`. Another group may not write to them.
#[test]
fn the_own_group_may_write_to_a_journal() {
    let scratch = Scratch::new();
    assert_eq!(open(&scratch.db()), Ok(()));
    set_mode(&scratch.db(), 0o660);
    assert_eq!(open(&scratch.db()), Ok(()));
    chown(scratch.db(), None, Some(STRANGER)).expect("the tests of files of other users run as root");
    assert!(open(&scratch.db()).unwrap_err().contains("has the permissions 660, so that others can write to it"));
}

/// Counters are also read by programs that open no journal.
#[test]
fn planted_counters_are_not_read() {
    let scratch = Scratch::new();
    let world = world(&scratch.db(), START);
    let counters = scratch.0.join("threshold.counters");
    std::fs::write(&counters, "thrshld").unwrap();
    set_mode(&counters, 0o666);
    let error = load_counters(world.limiter.store(), &scratch.db(), key(1), START).unwrap_err();
    assert!(refusal(&error).contains("chmod go-w") && counters.exists(), "{error}");
}

/// A folder that others can write to makes every check of a file worth little.
#[test]
fn a_folder_of_others_is_told() {
    let scratch = Scratch::new();
    let check = |mode, expect: Option<&str>| {
        set_mode(&scratch.0, mode);
        let found = unsafe_folder(&scratch.0);
        assert_eq!(found.is_some(), expect.is_some(), "{mode:o}: {found:?}");
        assert!(found.unwrap_or_default().contains(expect.unwrap_or_default()));
    };
    check(0o777, Some("has the permissions 777, so that everybody can replace the files in it: run chmod o-w "));
    check(0o1777, None);
    check(0o2770, None);
    give_away(&scratch.0);
    check(0o700, Some("belongs to user 54321, who can replace the files in it"));
    // Root looks after the files of others in their own folders: `sudo threshold restore`.
    std::fs::write(scratch.db(), "").unwrap();
    give_away(&scratch.db());
    assert_eq!(open(&scratch.db()), Ok(()));
}

/// A trigger in the file dropped every later ban as it was written, and the next start came up without them.
///
/// Woken by leaving out `check_schema`, and, while the file is in use, `SQLITE_DBCONFIG_ENABLE_TRIGGER`.
#[test]
fn what_somebody_has_added_to_the_tables_is_refused() {
    let trigger = "CREATE TRIGGER keep BEFORE INSERT ON record BEGIN SELECT RAISE(IGNORE); END";
    for (added, expect) in [
        (trigger, "added the trigger keep on record to "),
        ("CREATE VIEW other AS SELECT * FROM record", "the view other on other"),
        ("CREATE INDEX fast ON record (sum)", "the index fast on record"),
        ("CREATE TABLE \"a\u{1b}[2J\nb\" (c)", "the table a\\u001b[2J\\nb on"),
    ] {
        let scratch = Scratch::new();
        let world = world(&scratch.db(), START);
        world.ban(Layer::User, "mallory", Timestamp::MAX);
        assert!(world.journal.close());
        let add = |sql: &str| rusqlite::Connection::open(scratch.db()).unwrap().execute_batch(sql).unwrap();
        // A statistic for the planner is none of it.
        add("ANALYZE");
        drop(Journal::open(&scratch.db(), secret().key_id()).unwrap());
        add(added);
        let before = std::fs::read(scratch.db()).unwrap();
        let error = Journal::open(&scratch.db(), secret().key_id()).unwrap_err();
        assert!(matches!(error, JournalError::Added(..)), "{error:?}");
        let error = error.to_string();
        assert!(error.contains(expect) && error.contains("threshold restore COPY --db "), "{error}");
        assert_eq!(std::fs::read(scratch.db()).unwrap(), before, "the file stays as it is");
        let copy = scratch.0.join("copy.db");
        assert!(matches!(Journal::copy(&scratch.db(), &copy), Err(JournalError::Damaged(..))), "it is not copied");
    }
}

/// The same while the journal is in use: the file is written again without the trigger.
#[test]
fn a_trigger_in_a_journal_in_use_drops_no_ban() {
    let scratch = Scratch::new();
    let world = world(&scratch.db(), START);
    world.ban(Layer::User, "eve", Timestamp::MAX);
    assert!(saved(&world.journal, SECOND));
    let other = rusqlite::Connection::open(scratch.db()).unwrap();
    other.busy_timeout(SECOND).unwrap();
    other.execute_batch("CREATE TRIGGER keep BEFORE INSERT ON record BEGIN SELECT RAISE(IGNORE); END").unwrap();
    drop(other);
    let repair = repaired(&world.journal);
    assert!(repair.reason.contains("somebody else has added the trigger keep on record"), "{repair}");
    world.ban(Layer::User, "mallory", Timestamp::MAX);
    assert!(world.journal.close());
    drop(world);
    let again = super::world(&scratch.db(), START);
    assert!(again.is_banned("eve") && again.is_banned("mallory"));
}
