//! Rotations of the secret: what was stored and handed out under the old one holds while that is given, and bans after that.

use std::convert::Infallible;
use std::os::unix::fs::PermissionsExt as _;
use std::path::Path;
use std::sync::Arc;

use threshold_core::policy::Layer;
use threshold_core::{BytesError, Receipt, Secret, Secrets, Timestamp};
use threshold_limiter::journal::{
    GivenSecrets, Journal, JournalError, Kind, installation_secrets, load_counters, old_secret_path, save_counters,
    secret_path,
};
use threshold_limiter::{Attempted, Facts, LoginError, LoginRequest};

use threshold_limiter::tower::{Identified, ThresholdLayer};
use tower::{Layer as _, ServiceExt as _};

use super::{SECOND, START, Scratch, World, saved, world_under};

/// The names of tenants are secret: the journal has them hidden.
const POLICY: &str = r#"
[identity]
secret = ["tenant"]

[login]
ip = "3/5min"

[ladders.l]
rungs = ["warn", "warn", "ban 24h"]

[[rule]]
name = "posts"
per = ["user"]
limit = "1/day"
on_missing = "skip"
ladder = "l"
strike = "request"

[[rule]]
name = "reads"
per = ["ip"]
limit = "2/day"
on_missing = "skip"
ban_shared = true
ladder = "l"
strike = "request"

[[rule]]
name = "writes"
per = ["tenant"]
limit = "1/day"
ban_shared = true
ladder = "l"
strike = "request"
on_missing = "skip"

[[rule]]
name = "plain"
layer = "endpoint"
per = ["fact:object"]
limit = "1/day"
on_missing = "skip"
"#;

fn secret(byte: u8) -> Secret {
    Secret::new(&[byte; 32]).unwrap()
}

fn only(byte: u8) -> Secrets {
    Secrets::new(secret(byte))
}

fn both(present: u8, old: u8) -> Secrets {
    only(present).with_old(secret(old)).unwrap()
}

/// A world that goes on from the journal and the counters, as a server does.
fn open(scratch: &Scratch, secrets: &Secrets) -> World {
    let world = world_under(POLICY, &scratch.db(), secrets, START);
    load_counters(world.limiter.store(), &scratch.db(), secrets, START).unwrap();
    world
}

fn close(scratch: &Scratch, world: World) {
    save_counters(world.limiter.store(), &scratch.db(), world.limiter.key_id(), START).unwrap();
    assert!(world.journal.close());
    drop(world);
}

fn object(name: &str) -> [(&str, &str); 1] {
    [("object", name)]
}

impl World {
    /// Uses the one unit that an object has.
    fn take(&self, name: &str) -> Option<Receipt> {
        let facts = Facts { facts: &object(name), ..Facts::default() };
        self.limiter.check_with_receipt(&facts).unwrap().1
    }

    fn count(&self, facts: &Facts<'_>, times: usize) -> bool {
        (0..times).fold(false, |_, _| self.limiter.check(facts).unwrap().banned())
    }

    fn log_in(&self, account: &str, device: Option<&str>) -> Option<String> {
        let ip = "192.0.2.50".parse().ok();
        let request = LoginRequest { account: Some(account), ip, device, ..LoginRequest::default() };
        let Attempted::Allowed(attempt) = self.limiter.login_attempt(&request).unwrap() else { return None };
        self.limiter.login_result(&attempt, true).unwrap().device
    }
}

fn from(ip: &str) -> Facts<'static> {
    Facts { ip: ip.parse().ok(), ..Facts::default() }
}

fn of_user(user: &str) -> Facts<'_> {
    Facts { user: Some(user), ..Facts::default() }
}

fn of_tenant(tenant: &str) -> Facts<'_> {
    Facts { tenant: Some(tenant), ..Facts::default() }
}

/// Woken by: restoring rows of the old secret under their old keys alone; leaving out `settle_of` in `settle_planned`; and
/// opening tokens with the present secret alone.
#[test]
fn everything_holds_while_the_old_secret_is_given() {
    let scratch = Scratch::new();
    let (receipt, late_receipt, device, attempt, late_attempt);
    {
        let world = open(&scratch, &only(1));
        assert!(world.strike("eve", 4) && !world.strike("bob", 2));
        assert!(world.count(&from("192.0.2.9"), 5) && world.count(&from("2001:db8:1:2::3"), 5));
        assert!(world.count(&of_tenant("acme"), 4));
        world.ban(Layer::User, "mallory", Timestamp::MAX);
        world.ban(Layer::Edge, "203.0.113.0/24", Timestamp::MAX);
        world.lock("victim");
        device = world.log_in("ada", None).unwrap();
        let token = |receipt: Option<Receipt>| world.limiter.sign(&receipt.unwrap());
        (receipt, late_receipt) = (token(world.take("one")), token(world.take("two")));
        (attempt, late_attempt) = (world.attempt("carol"), world.attempt("dan"));
        close(&scratch, world);
    }
    let world = open(&scratch, &both(2, 1));
    // Two bans, and the names and the standings of one user and of two addresses.
    assert_eq!((world.restored.rekeyed, world.restored.forgotten), (8, 0));
    assert!(world.is_banned("eve") && world.is_banned("mallory") && !world.is_banned("somebody"));
    assert!(world.limiter.peek(&from("192.0.2.9")).unwrap().banned());
    assert!(world.limiter.peek(&from("2001:db8:1:2:ffff::")).unwrap().banned());
    assert!(world.limiter.peek(&from("203.0.113.77")).unwrap().banned());
    assert!(world.limiter.peek(&of_tenant("acme")).unwrap().banned(), "a hidden name is found when it comes back");
    // What was used is used, and what was struck is struck: this is the third.
    assert!(world.take("one").is_none() && !world.strike("bob", 1) && world.strike("bob", 1));
    // The budget of one has moved by now, and that of the other has not.
    for token in [&receipt, &late_receipt] {
        let read = world.limiter.read_receipt(token).unwrap();
        assert_eq!(world.limiter.refund(&read), Ok(true));
        assert_eq!(world.limiter.refund(&read), Ok(false));
    }
    assert!(world.take("one").is_some() && world.take("two").is_some() && world.take("two").is_none());
    assert!(world.is_locked("victim"));
    // Another attempt on carol's account moves it. Her own attempt, which came before, ends all the same.
    assert!(!world.is_locked("carol"));
    for attempt in [&attempt, &late_attempt] {
        let token = attempt.token().unwrap();
        assert!(world.limiter.login_result(token, true).unwrap().device.is_some());
        assert_eq!(world.limiter.login_result(token, true).unwrap_err(), LoginError::UnknownAttempt);
    }
    // The address has made its three attempts in five minutes: a known device is not counted by it.
    for _ in 0..3 {
        let _ = world.attempt_from("stranger", "192.0.2.50");
    }
    assert!(world.attempt_from("ada", "192.0.2.50").token().is_none());
    let known = world.log_in("ada", Some(&device)).unwrap();
    assert_ne!(known, device);
    close(&scratch, world);
    assert_alone(&scratch, &device, &known, &receipt);
}

/// With the present secret alone: what has come back under it is there, and the rest is forgotten.
fn assert_alone(scratch: &Scratch, old_device: &str, device: &str, receipt: &str) {
    let world = open(scratch, &only(2));
    assert!(world.is_banned("eve") && world.is_banned("mallory") && world.is_banned("bob"));
    assert!(world.limiter.peek(&from("192.0.2.9")).unwrap().banned());
    assert!(world.limiter.peek(&of_tenant("acme")).unwrap().banned());
    assert!(world.is_locked("victim"));
    assert_eq!(world.limiter.read_receipt(receipt), Err(BytesError::UnknownKey(secret(1).key_id())));
    assert!(world.log_in("ada", Some(old_device)).is_none());
    assert!(world.log_in("ada", Some(device)).is_some());
    assert_eq!(world.restored.forgotten, 1, "dan's account, on which nobody has tried again");
    close(scratch, world);
    assert!(matches!(Journal::open(&scratch.db(), &only(1)), Err(JournalError::OtherSecret(_))));
    assert!(matches!(Journal::open(&scratch.db(), &both(3, 1)), Err(JournalError::OtherSecret(_))));
}

impl World {
    fn attempt_from(&self, account: &str, ip: &str) -> Attempted {
        let request = LoginRequest { account: Some(account), ip: ip.parse().ok(), ..LoginRequest::default() };
        self.limiter.login_attempt(&request).unwrap()
    }
}

#[test]
fn without_the_old_secret_bans_hold_and_who_has_not_come_back_is_forgotten() {
    let scratch = Scratch::new();
    {
        let world = open(&scratch, &only(1));
        assert!(world.strike("eve", 4) && !world.strike("bob", 2));
        world.lock("victim");
        world.ban(Layer::Tenant, "acme", Timestamp::MAX);
        close(&scratch, world);
    }
    // Nobody comes.
    close(&scratch, open(&scratch, &both(2, 1)));
    let rows = Journal::read(&scratch.db()).unwrap().rows;
    let old = |kind: Kind| rows.iter().filter(|row| row.kind == kind && row.old_key_id().is_some()).count();
    assert_eq!((old(Kind::Standing), old(Kind::Account), old(Kind::Ban), old(Kind::Named)), (1, 1, 0, 0));
    let world = open(&scratch, &only(2));
    assert_eq!((world.restored.forgotten, world.restored.bans, world.restored.subjects), (2, 1, 1));
    assert!(world.is_banned("eve") && !world.is_locked("victim"));
    assert!(world.limiter.peek(&of_tenant("acme")).unwrap().banned());
    close(&scratch, world);
    assert!(Journal::read(&scratch.db()).unwrap().rows.iter().all(|row| row.old_key_id().is_none()));
}

/// A kill right after the first start under the new secret lost bans that had been moved and were not on disk.
///
/// Woken by: leaving out `wait_until_saved` in `restore`.
#[test]
fn what_was_moved_is_on_disk_as_soon_as_it_is_restored() {
    let scratch = Scratch::new();
    let names: Vec<String> = (0..200).map(|number| format!("user{number}")).collect();
    let world = open(&scratch, &only(1));
    for name in &names {
        assert!(world.count(&of_user(name), 4));
    }
    close(&scratch, world);
    let world = open(&scratch, &both(2, 1));
    // What a kill leaves: the files as they are.
    let killed = Scratch::new();
    for file in std::fs::read_dir(scratch.db().parent().unwrap()).unwrap() {
        let file = file.unwrap();
        std::fs::copy(file.path(), killed.db().with_file_name(file.file_name())).unwrap();
    }
    drop(world);
    let world = open(&killed, &only(2));
    let held = names.iter().filter(|name| world.limiter.peek(&of_user(name)).unwrap().banned());
    assert_eq!(held.count(), names.len());
}

/// The layer found nothing that was still under the old secret.
///
/// Woken by: `settle` in place of `settle_moving` in `admit_planned`.
#[tokio::test]
async fn the_layer_finds_what_is_under_the_old_secret() {
    let scratch = Scratch::new();
    let world = open(&scratch, &only(1));
    assert!(!world.count(&of_user("carol"), 3), "two strikes");
    close(&scratch, world);
    let World { limiter, journal: _journal, .. } = open(&scratch, &both(2, 1));
    let carol = |_: &_| Identified { user: Some("carol".to_owned()), ..Identified::default() };
    let layer = ThresholdLayer::new(Arc::new(limiter)).unwrap().identify(carol);
    let service = tower::service_fn(|_| async { Ok::<_, Infallible>(http::Response::new(axum::body::Body::empty())) });
    let request = http::Request::new(axum::body::Body::empty());
    let response = layer.layer(service).oneshot(request).await.unwrap();
    assert_eq!(response.status(), 429);
    assert!(response.headers().contains_key("x-ratelimit-banned"), "{:?}", response.headers());
}

/// Woken by: leaving out `under_present`.
#[test]
fn going_back_to_the_old_secret_forgets_nothing() {
    let scratch = Scratch::new();
    let carol = of_user("carol");
    let world = open(&scratch, &only(1));
    assert!(!world.count(&carol, 3), "two strikes");
    close(&scratch, world);
    for secrets in [both(2, 1), both(1, 2), both(2, 1), both(1, 2)] {
        let world = open(&scratch, &secrets);
        close(&scratch, world);
    }
    let world = open(&scratch, &only(1));
    assert!(world.count(&carol, 2), "the third strike bans");
}

#[test]
fn forgiven_subjects_and_reset_accounts_stay_so_during_a_rotation() {
    let scratch = Scratch::new();
    let device;
    {
        let world = open(&scratch, &only(1));
        assert!(world.strike("eve", 4) && !world.strike("bob", 3) && world.count(&of_tenant("acme"), 4));
        world.lock("victim");
        device = world.log_in("ada", None).unwrap();
        close(&scratch, world);
    }
    let world = open(&scratch, &both(2, 1));
    for (layer, key) in [(Layer::User, "eve"), (Layer::User, "bob"), (Layer::Tenant, "acme")] {
        world.limiter.forgive(layer, key).unwrap();
    }
    world.limiter.pardon_account("victim").unwrap();
    world.limiter.reset_account("ada").unwrap();
    assert!(!world.is_banned("eve") && !world.is_banned("bob") && !world.is_locked("victim"));
    assert!(!world.limiter.peek(&of_tenant("acme")).unwrap().banned());
    assert!(!world.strike("bob", 3), "the strikes are gone too");
    for _ in 0..3 {
        let _ = world.attempt_from("stranger", "192.0.2.50");
    }
    assert!(world.log_in("ada", Some(&device)).is_none(), "a reset makes every device unknown");
    assert!(saved(&world.journal, SECOND));
}

/// A journal that is rotated and damaged at once is both salvaged and rotated.
#[test]
fn a_damaged_journal_is_rotated_with_what_can_be_read_of_it() {
    let scratch = Scratch::new();
    {
        let world = open(&scratch, &only(1));
        for number in 0..40 {
            assert!(world.strike(&format!("eve{number}"), 4));
        }
        close(&scratch, world);
    }
    let connection = rusqlite::Connection::open(scratch.db()).unwrap();
    let first: Vec<u8> = connection.query_row("SELECT key FROM record WHERE kind = 1", [], |row| row.get(0)).unwrap();
    connection.execute("UPDATE record SET value = x'00' WHERE kind = 1 AND key = ?1", [first]).unwrap();
    drop(connection);
    let world = open(&scratch, &both(2, 1));
    assert!(world.contents.damage.is_some());
    let banned = (0..40).filter(|number| world.is_banned(&format!("eve{number}"))).count();
    assert_eq!(banned, 40, "the subject of an unreadable row is blocked");
}

#[test]
fn secrets_that_cannot_be_in_force_together_are_refused() {
    let scratch = Scratch::new();
    let given = |present, old| installation_secrets(&scratch.db(), GivenSecrets { present, old });
    let (one, two) = ("the first secret of all", "the second secret of all");
    assert!(given(Some(one), Some(two)).is_ok());
    assert!(matches!(given(Some(one), Some(one)), Err(JournalError::SameSecret(_))));
    assert!(matches!(given(Some(one), Some("short")), Err(JournalError::BadSecret(_))));
    // An old one alone, given or in its file, makes no new one.
    let error = given(None, Some(one)).unwrap_err();
    assert!(matches!(&error, JournalError::OldSecretAlone(name, _) if name == "THRESHOLD_SECRET_OLD"));
    let old = old_secret_path(&scratch.db());
    write(&old, &"ab".repeat(32), 0o600);
    assert!(matches!(given(None, None), Err(JournalError::OldSecretAlone(..))));
    assert!(!secret_path(&scratch.db()).exists());
    // In files: the old one is accepted beside the present one, which may also be given.
    write(&secret_path(&scratch.db()), &"cd".repeat(32), 0o600);
    let secrets = given(None, None).unwrap();
    assert_eq!(secrets.old().unwrap().key_id(), Secret::new("ab".repeat(32).as_bytes()).unwrap().key_id());
    assert_eq!(secrets.present().key_id(), Secret::new("cd".repeat(32).as_bytes()).unwrap().key_id());
    assert!(given(Some(one), None).unwrap().old().is_some());
    for (text, mode, expect) in [("", 0o600, "no secret"), ("abcd", 0o600, "no secret"), ("x", 0o644, "chmod 600")] {
        write(&old, text, mode);
        let error = given(None, None).unwrap_err();
        let error = format!("{error}: {:?}", std::error::Error::source(&error).map(ToString::to_string));
        assert!(error.contains(expect) && error.contains("threshold.secret.old"), "{error}");
    }
}

fn write(path: &Path, text: &str, mode: u32) {
    std::fs::write(path, text).unwrap();
    std::fs::set_permissions(path, std::fs::Permissions::from_mode(mode)).unwrap();
}
