//! The messages of the journal's errors, and their causes.

use std::error::Error;
use std::io;
use std::path::PathBuf;

use threshold_core::secret::SameKeyId;
use threshold_limiter::journal::{CountersError, Journal, JournalError, SaveError, load_counters};

use super::{START, Scratch, key, world};

/// Every message once: what a command prints after `threshold: `, without the cause.
#[test]
fn each_error_has_a_message_of_its_own() {
    let (db, secret) = (|| PathBuf::from("j.db"), || PathBuf::from("j.secret"));
    let cause = || io::Error::other("no space left on device");
    let cases: Vec<(Box<dyn Error>, &str)> = vec![
        (JournalError::InUse(db()).into(), "j.db is in use by another process"),
        (
            JournalError::OtherSecret(db()).into(),
            "j.db was written under another secret: give THRESHOLD_SECRET, or the secret file, as it was then; to rotate \
             the secret, give that one as THRESHOLD_SECRET_OLD beside the new one; or start with another file",
        ),
        (JournalError::Newer(db(), 3).into(), "j.db has version 3, which this program does not know"),
        (
            JournalError::Older(db(), 1).into(),
            "j.db has version 1, which an earlier build wrote and this program does not read; it was left as it is. Start \
             with another file, or move it away and begin a new one (threshold serve --new-journal)",
        ),
        (JournalError::Io(db(), cause()).into(), "cannot use j.db"),
        (JournalError::Sqlite(db(), cause().into()).into(), "cannot use j.db"),
        (JournalError::Damaged(db(), "rows are missing".to_owned()).into(), "j.db is damaged: rows are missing"),
        (JournalError::BadSecret(secret()).into(), "j.secret holds no secret: 64 hexadecimal digits are one"),
        (
            JournalError::Missing(db(), secret()).into(),
            "j.db is missing or empty, but j.secret shows that there was a journal: its bans, strikes and locks would be \
             gone. Put it back, or a copy of it (threshold restore COPY --db j.db); or start without them (threshold serve \
             --new-journal)",
        ),
        (
            JournalError::SecretMissing(db(), secret()).into(),
            "j.db is there, and j.secret is missing: without the secret that it was written under nothing in it is \
             recognised. Put the secret back, or give it as THRESHOLD_SECRET; or start with another file",
        ),
        (
            JournalError::SameSecret(SameKeyId(key(0x2a))).into(),
            "the present and the old secret have the same key id, 0000002a: give another one, or no old one",
        ),
        (
            JournalError::OldSecretAlone("THRESHOLD_SECRET_OLD".to_owned(), secret()).into(),
            "THRESHOLD_SECRET_OLD is an old secret, and there is no present one: give THRESHOLD_SECRET, or write a new one \
             to j.secret (umask 077; openssl rand -hex 32 > j.secret)",
        ),
        (SaveError::NotOnDisk.into(), "the changes are not on disk yet"),
        (SaveError::AuditFull.into(), "too many audit lines wait for the disk"),
        (CountersError::Io(db(), cause()).into(), "cannot use j.db"),
        (CountersError::Unknown(db()).into(), "j.db has another version, or was written under another secret"),
    ];
    for (error, message) in cases {
        assert_eq!(error.to_string(), message);
        let source = error.source().map(ToString::to_string);
        let expect = (message == "cannot use j.db").then(|| "no space left on device".to_owned());
        assert_eq!(source, expect, "{message}");
    }
}

/// Real failures of the file system and of SQLite keep their cause.
#[test]
fn the_cause_of_a_failure_is_its_source() {
    let scratch = Scratch::new();
    let error = Journal::read(&scratch.db()).unwrap_err();
    let source = error.source().and_then(|source| source.downcast_ref::<io::Error>()).map(io::Error::kind);
    assert_eq!(source, Some(io::ErrorKind::NotFound), "{error}");
    // A folder in the place of the file.
    std::fs::create_dir(scratch.db()).unwrap();
    let error = Journal::read(&scratch.db()).unwrap_err();
    assert!(matches!(error, JournalError::Sqlite(..)), "{error:?}");
    let source = error.source().map(ToString::to_string).unwrap_or_default();
    assert!(source.starts_with("unable to open database file"), "{source}");
    std::fs::create_dir(scratch.0.join("threshold.counters")).unwrap();
    let other = Scratch::new();
    let world = world(&other.db(), START);
    let error = load_counters(world.limiter.store(), &scratch.db(), key(1), START).unwrap_err();
    assert!(matches!(error, CountersError::Io(..)) && error.source().is_some(), "{error:?}");
}
