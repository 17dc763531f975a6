//! The names of a journal's files: links lead to one lock and are never written through; a missing file is not a new one.

use std::os::unix::fs::{PermissionsExt as _, symlink};
use std::path::{Path, PathBuf};

use threshold_core::Timestamp;
use threshold_core::policy::Layer;
use threshold_limiter::journal::{
    GivenSecrets, Journal, JournalError, installation_secrets, load_counters, save_counters, secret_path,
};

use super::{START, Scratch, key, secret, world};

fn mode(path: &Path) -> u32 {
    std::fs::metadata(path).unwrap().permissions().mode() & 0o777
}

/// Two servers with two names for one file both started, and overwrote each other.
///
/// Woken by: not resolving the path in `Journal::open`.
#[test]
fn a_journal_has_one_lock_under_all_its_names() {
    let (scratch, other) = (Scratch::new(), Scratch::new());
    let link = other.0.join("elsewhere.db");
    // Also before the file exists: the first process creates it where the link leads to.
    symlink(scratch.db(), &link).unwrap();
    let (journal, contents) = Journal::open(&link, key(1)).unwrap();
    assert!(contents.is_new && scratch.db().exists());
    assert_eq!(journal.path(), scratch.db());
    assert!(matches!(Journal::open(&scratch.db(), key(1)), Err(JournalError::InUse(_))));
    let chain = other.0.join("chain.db");
    symlink("elsewhere.db", &chain).unwrap();
    assert!(matches!(Journal::open(&chain, key(1)), Err(JournalError::InUse(_))));
    let folder = other.0.join("folder");
    symlink(&scratch.0, &folder).unwrap();
    assert!(matches!(Journal::open(&folder.join("threshold.db"), key(1)), Err(JournalError::InUse(_))));
    assert!(matches!(Journal::replace(&scratch.db(), &link), Err(JournalError::InUse(_))));
    assert_eq!(secret_path(&link), secret_path(&scratch.db()));
    drop(journal);
    Journal::open(&chain, key(1)).unwrap();
}

/// A name that somebody has put a link under is not written through. A kill leaves such names behind too, and they must not
/// be in the way.
///
/// Woken by: `create(true).truncate(true)` for `.next`.
#[test]
fn nothing_is_written_through_a_link() {
    let scratch = Scratch::new();
    let victim = scratch.0.join("victim");
    std::fs::write(&victim, "precious").unwrap();
    let untouched = || assert_eq!(std::fs::read_to_string(&victim).unwrap(), "precious");
    let counters = |more: &str| scratch.0.join(format!("threshold.counters{more}"));
    let world = world(&scratch.db(), START);
    assert!(!world.strike("ada", 1));
    symlink(&victim, counters(".next")).unwrap();
    assert_eq!(save_counters(world.limiter.store(), &scratch.db(), key(9), START).unwrap(), 1);
    untouched();
    assert_eq!(mode(&counters("")), 0o600);
    assert!(!counters("").is_symlink());
    // What a kill has left.
    std::fs::write(counters(".next"), "half a").unwrap();
    assert_eq!(save_counters(world.limiter.store(), &scratch.db(), key(9), START).unwrap(), 1);
    assert_eq!(load_counters(world.limiter.store(), &scratch.db(), key(9), START).unwrap().read, 1);
    world.ban(Layer::User, "mallory", Timestamp::MAX);
    assert!(world.journal.close());
    drop(world);
    // A damaged file is rebuilt beside itself.
    let mut bytes = std::fs::read(scratch.db()).unwrap();
    let middle = bytes.len() / 2;
    bytes[middle..middle + 64].fill(0xff);
    bytes[100] = 0;
    std::fs::write(scratch.db(), &bytes).unwrap();
    symlink(&victim, scratch.0.join("threshold.db.next")).unwrap();
    symlink(&victim, scratch.0.join("threshold.db.next-journal")).unwrap();
    let opened = Journal::open(&scratch.db(), secret().key_id());
    untouched();
    let (_, contents) = opened.unwrap();
    let damage = contents.damage.unwrap();
    assert_eq!((mode(&scratch.db()), mode(&damage.quarantine)), (0o600, 0o600));
    drop(contents.rows);
    // A lock that is a link would let a second server in, as soon as it is changed.
    let locked = Scratch::new();
    symlink(&victim, locked.0.join("threshold.db.lock")).unwrap();
    assert!(matches!(Journal::open(&locked.db(), key(1)), Err(JournalError::Io(..))));
    untouched();
}

#[test]
fn a_secret_is_for_its_owner_alone() {
    let scratch = Scratch::new();
    let made = installation_secrets(&scratch.db(), GivenSecrets::default()).unwrap();
    assert_eq!(
        made.present().key_id(),
        installation_secrets(&scratch.db(), GivenSecrets::default()).unwrap().present().key_id()
    );
    drop(Journal::open(&scratch.db(), made.present().key_id()).unwrap());
    let path = secret_path(&scratch.db());
    for path in [scratch.db(), path.clone()] {
        assert_eq!(mode(&path), 0o600, "{}", path.display());
    }
    assert_eq!(
        made.present().key_id(),
        installation_secrets(&scratch.db(), GivenSecrets::default()).unwrap().present().key_id()
    );
    let given = |mode| {
        std::fs::set_permissions(&path, std::fs::Permissions::from_mode(mode)).unwrap();
        installation_secrets(&scratch.db(), GivenSecrets::default())
    };
    for mode in [0o640, 0o604, 0o644, 0o660] {
        let error = given(mode).unwrap_err();
        let error = format!("{error}: {}", std::error::Error::source(&error).unwrap());
        assert!(
            error.contains(&format!("chmod 600 {}", path.display())) && error.contains(&format!("{mode:o}")),
            "{error}"
        );
    }
    assert!(given(0o600).is_ok() && given(0o400).is_ok());
    std::fs::remove_file(&path).unwrap();
    std::fs::write(&path, "hunter2").unwrap();
    std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o600)).unwrap();
    assert!(matches!(installation_secrets(&scratch.db(), GivenSecrets::default()), Err(JournalError::BadSecret(_))));
    assert!(
        installation_secrets(&scratch.db(), GivenSecrets { present: Some("a secret of our own"), old: None }).is_ok()
    );
}

/// A journal that was deleted beside its secret began as a new one, with no bans, and nobody said so.
///
/// Woken by: `Missing::StartNew` in `Journal::open`.
#[test]
fn a_journal_that_is_missing_is_not_a_new_one() {
    let scratch = Scratch::new();
    let key_id = installation_secrets(&scratch.db(), GivenSecrets::default()).unwrap().present().key_id();
    drop(Journal::open(&scratch.db(), key_id).unwrap());
    let whole = std::fs::read(scratch.db()).unwrap();
    let lose: [&dyn Fn(PathBuf); 2] =
        [&|path| std::fs::remove_file(path).unwrap(), &|path| std::fs::write(path, "").unwrap()];
    for lose in lose {
        lose(scratch.db());
        let error = Journal::open(&scratch.db(), key_id).unwrap_err();
        assert!(matches!(&error, JournalError::Missing(_, trace) if *trace == secret_path(&scratch.db())));
        assert!(error.to_string().contains("--new-journal"), "{error}");
        let (journal, contents) = Journal::open_new(&scratch.db(), key_id).unwrap();
        assert!(contents.is_new);
        drop(journal);
        drop(Journal::open(&scratch.db(), key_id).unwrap());
    }
    // Nothing is asked of one that is there.
    let (_, contents) = Journal::open_new(&scratch.db(), key_id).unwrap();
    assert!(!contents.is_new);
    // With a secret that is given there is none beside it; what was used tells.
    std::fs::remove_file(scratch.db()).unwrap();
    std::fs::remove_file(secret_path(&scratch.db())).unwrap();
    std::fs::write(scratch.0.join("threshold.counters"), "thrshld").unwrap();
    assert!(matches!(Journal::open(&scratch.db(), key_id), Err(JournalError::Missing(..))));
    // The other way round: a journal whose secret is gone does not get another.
    std::fs::write(scratch.db(), whole).unwrap();
    assert!(matches!(
        installation_secrets(&scratch.db(), GivenSecrets::default()),
        Err(JournalError::SecretMissing(..))
    ));
    assert!(!secret_path(&scratch.db()).exists());
}

/// Whenever a first start is interrupted, the next one goes on.
#[test]
fn a_first_start_that_was_interrupted_is_not_a_loss() {
    let scratch = Scratch::new();
    let first = installation_secrets(&scratch.db(), GivenSecrets::default()).unwrap();
    // Killed before there was a journal: the same secret again.
    let second = installation_secrets(&scratch.db(), GivenSecrets::default()).unwrap();
    assert_eq!(first.present().key_id(), second.present().key_id());
    // Killed when the journal was there, and the secret had no name yet.
    drop(Journal::open(&scratch.db(), second.present().key_id()).unwrap());
    let next = secret_path(&scratch.db()).with_extension("secret.next");
    std::fs::rename(secret_path(&scratch.db()), &next).unwrap();
    let third = installation_secrets(&scratch.db(), GivenSecrets::default()).unwrap();
    drop(Journal::open(&scratch.db(), third.present().key_id()).unwrap());
    assert!(secret_path(&scratch.db()).exists() && !next.exists());
    // Killed within the secret.
    let other = Scratch::new();
    let half = secret_path(&other.db()).with_extension("secret.next");
    std::fs::write(&half, "0123").unwrap();
    std::fs::set_permissions(&half, std::fs::Permissions::from_mode(0o600)).unwrap();
    let made = installation_secrets(&other.db(), GivenSecrets::default()).unwrap();
    drop(Journal::open(&other.db(), made.present().key_id()).unwrap());
}
