//! Tests the files of an installation: one server for each journal, by whatever path, and no silent start without it.

use std::os::unix::fs::{PermissionsExt as _, symlink};
use std::path::Path;
use std::process::Command;
use std::time::{Duration, Instant};

use serde_json::json;
use threshold_limiter::journal::Journal;

use super::process::{PATIENCE, Scratch, Server, Start};

const POLICY: &str = r#"
[[rule]]
name = "posts"
per = ["user"]
limit = "1/day"
"#;

/// How a server is started here.
struct Installation {
    folder: Scratch,
    policy: Scratch,
}

impl Installation {
    fn new() -> Self {
        Self { folder: Scratch::folder(), policy: Scratch::file("policy.toml", POLICY) }
    }

    fn path(&self, name: &str) -> std::path::PathBuf {
        self.folder.path().join(name)
    }

    fn start(&self, db: &Path, more: &[&str]) -> Server {
        let args = [&["--db", db.to_str().unwrap()], more].concat();
        Start { policy: Some(self.policy.path()), args: &args, ..Start::default() }.server()
    }

    /// Starts a server that must not start. Returns its error.
    fn refusal(&self, db: &Path) -> String {
        let args = ["--db", db.to_str().unwrap()];
        let output = Start { policy: Some(self.policy.path()), args: &args, ..Start::default() }.command().output();
        let output = output.unwrap();
        assert!(!output.status.success());
        String::from_utf8(output.stderr).unwrap()
    }
}

fn ban(server: &Server, user: &str) {
    let body = json!({"layer": "user", "key": user, "reason": "test"}).to_string();
    let told = server.connect().post("/v1/bans", &body).unwrap();
    assert_eq!(told.status, 200);
}

fn is_banned(server: &Server, user: &str) -> bool {
    let told = server.connect().post("/v1/check", &json!({"user": user}).to_string()).unwrap();
    told.json()["banned"] == true
}

fn ready(server: &Server) -> serde_json::Value {
    server.connect().send("GET", "/readyz", &[], "").unwrap().json()
}

fn stop(server: Server) {
    server.signal("TERM");
    let (status, log) = server.wait();
    assert!(status.success(), "{log}");
}

#[test]
fn two_paths_to_one_journal_are_one_journal() {
    let place = Installation::new();
    let (db, link) = (place.path("threshold.db"), place.path("link.db"));
    let server = place.start(&db, &[]);
    ban(&server, "mallory");
    symlink(&db, &link).unwrap();
    assert!(place.refusal(&link).contains("is in use by another process"));
    stop(server);
    // The secret, the counters and the bans are the same.
    let server = place.start(&link, &[]);
    assert!(is_banned(&server, "mallory"));
    assert_eq!(ready(&server)["status"], "ok");
    assert!(!place.path("link.secret").exists());
}

#[test]
fn a_secret_file_that_others_can_read_is_refused() {
    let place = Installation::new();
    let (db, secret) = (place.path("threshold.db"), place.path("threshold.secret"));
    stop(place.start(&db, &[]));
    std::fs::set_permissions(&secret, std::fs::Permissions::from_mode(0o644)).unwrap();
    let said = place.refusal(&db);
    assert!(said.contains(&format!("chmod 600 {}", secret.display())), "{said}");
}

/// After its journal was deleted or emptied, a server once started without bans, and reported "ok".
#[test]
fn a_journal_that_is_missing_beside_its_secret_is_refused() {
    let place = Installation::new();
    let db = place.path("threshold.db");
    let copy = place.path("copy.db");
    {
        let server = place.start(&db, &[]);
        ban(&server, "mallory");
        stop(server);
    }
    std::fs::copy(&db, &copy).unwrap();
    std::fs::write(&db, "").unwrap();
    assert!(place.refusal(&db).contains("is missing or empty"));
    std::fs::remove_file(&db).unwrap();
    let said = place.refusal(&db);
    for part in ["threshold.secret", "threshold restore", "--new-journal"] {
        assert!(said.contains(part), "{said}");
    }
    assert!(!db.exists());
    // The error names two ways out: a copy is restored,
    let restore =
        Command::new(env!("CARGO_BIN_EXE_threshold")).args(["restore"]).arg(&copy).arg("--db").arg(&db).status();
    assert!(restore.unwrap().success());
    let server = place.start(&db, &[]);
    assert!(is_banned(&server, "mallory"));
    stop(server);
    // or a new journal is started, once.
    std::fs::remove_file(&db).unwrap();
    let server = place.start(&db, &["--new-journal"]);
    assert!(!is_banned(&server, "mallory"));
    assert_eq!(ready(&server)["status"], "ok");
    stop(server);
    let server = place.start(&db, &["--new-journal"]);
    server.wait_for_log("--new-journal ignored");
}

/// A server on a truncated file restores the bans that can be read, and reports the damage.
#[test]
fn a_truncated_journal_keeps_the_bans_that_can_be_read() {
    let place = Installation::new();
    let db = place.path("threshold.db");
    let users: Vec<String> = (0..400).map(|number| format!("mallory{number}")).collect();
    let server = place.start(&db, &[]);
    users.iter().for_each(|user| ban(&server, user));
    stop(server);
    let bytes = std::fs::read(&db).unwrap();
    std::fs::write(&db, &bytes[..bytes.len() / 2]).unwrap();
    let server = place.start(&db, &[]);
    let told = ready(&server);
    assert_eq!(told["status"], "degraded", "{told}");
    let banned = users.iter().filter(|user| is_banned(&server, user)).count();
    assert!(banned > 100, "{banned} of 400 bans are left");
    server.wait_for_log("journal damaged");
    // Once it was reported, the file does not say so any more: the next start is "ok".
    let begun = Instant::now();
    while Journal::read(&db).unwrap().damage.is_some() {
        assert!(begun.elapsed() < PATIENCE, "the file still records the damage");
        std::thread::yield_now();
    }
    assert_eq!(ready(&server)["status"], "degraded");
    stop(server);
    assert_eq!(ready(&place.start(&db, &[]))["status"], "ok");
}

/// A server that starts on a damaged file is killed at a random time: either it has logged the damage, or the next start does.
///
/// Woken by: no `damage_record::write` in `initialize`.
#[test]
fn a_killed_start_does_not_hide_damage() {
    let place = Installation::new();
    let db = place.path("threshold.db");
    let server = place.start(&db, &[]);
    (0..100).for_each(|number| ban(&server, &format!("mallory{number}")));
    stop(server);
    let mut bytes = std::fs::read(&db).unwrap();
    bytes.truncate(bytes.len() / 2);
    let args = ["--db", db.to_str().unwrap()];
    for after in (0..60).step_by(3) {
        for more in ["-wal", "-shm", ".next"] {
            let _ = std::fs::remove_file(place.path(&format!("threshold.db{more}")));
        }
        std::fs::write(&db, &bytes).unwrap();
        let mut killed = Start { policy: Some(place.policy.path()), args: &args, ..Start::default() }.command();
        let mut killed = killed.spawn().unwrap();
        std::thread::sleep(Duration::from_millis(after));
        killed.kill().unwrap();
        let log = String::from_utf8(killed.wait_with_output().unwrap().stderr).unwrap();
        let told = ready(&place.start(&db, &[]));
        let is_told = told["status"] == "degraded" && told["reason"].as_str().unwrap().contains("was damaged");
        assert!(is_told || log.contains("journal damaged"), "after {after} ms: {told}, {log}");
    }
}

fn run(args: &[&str], variables: &[(&str, &str)]) -> std::process::Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_threshold"));
    for name in ["THRESHOLD_SECRET", "THRESHOLD_SECRET_OLD"] {
        command.env_remove(name);
    }
    command.args(args).envs(variables.iter().copied()).output().unwrap()
}

/// A backup named the present secret alone, though rows under the old one need that one too. A restore under another secret
/// exited with 0, and the server then refused to start.
///
/// A restore without the right secret once replaced the journal first and complained afterwards: the server started on neither.
///
/// Fails without `old_secret_path` in `secret_names`, and if `restore` replaces the journal before it looks at the secret.
#[test]
fn a_backup_names_both_secrets_and_a_restore_under_another_one_fails() {
    let place = Installation::new();
    let (db, copy) = (place.path("threshold.db"), place.path("copy.db"));
    let server = place.start(&db, &[]);
    ban(&server, "mallory");
    stop(server);
    let (db, copy) = (db.to_str().unwrap(), copy.to_str().unwrap());
    let backup = |variables: &[(&str, &str)]| {
        let _ = std::fs::remove_file(copy);
        String::from_utf8(run(&["backup", copy, "--db", db], variables).stdout).unwrap()
    };
    let said = backup(&[]);
    assert!(said.contains("threshold.secret with it"), "{said}");
    let said = backup(&[("THRESHOLD_SECRET_OLD", "the secret before this one")]);
    assert!(said.contains("threshold.secret and THRESHOLD_SECRET_OLD with it"), "{said}");
    std::fs::write(place.path("threshold.secret.old"), "").unwrap();
    let said = backup(&[]);
    assert!(said.contains("threshold.secret.old with it"), "{said}");
    std::fs::remove_file(place.path("threshold.secret.old")).unwrap();
    assert_eq!(run(&["restore", copy, "--db", db], &[]).status.code(), Some(0));
    let wrong = run(&["restore", copy, "--db", db], &[("THRESHOLD_SECRET", "quite another secret of ours")]);
    let said = String::from_utf8(wrong.stderr).unwrap();
    assert_eq!(wrong.status.code(), Some(2), "{said}");
    assert!(said.contains("nothing was restored") && said.contains("was written under another secret"), "{said}");
    std::fs::remove_file(place.path("threshold.secret")).unwrap();
    let files = || {
        let names = std::fs::read_dir(place.path("")).unwrap().map(|entry| entry.unwrap().file_name());
        let mut all: Vec<_> =
            names.map(|name| (std::fs::read(place.path(name.to_str().unwrap())).unwrap(), name)).collect();
        all.sort();
        all
    };
    let before = files();
    let without = run(&["restore", copy, "--db", db], &[]);
    let said = String::from_utf8(without.stderr).unwrap();
    assert_eq!(without.status.code(), Some(2), "{said}");
    assert!(said.contains("neither the file") && said.contains("THRESHOLD_SECRET"), "{said}");
    assert!(files() == before, "a file was changed");
}

/// A server once took an application's own database, given as `--db` by mistake, for a damaged journal: it moved the data aside
/// and wrote a journal in its place.
#[test]
fn the_file_of_another_program_is_refused_and_left_as_it_is() {
    let place = Installation::new();
    let secret = [("THRESHOLD_SECRET", "the secret of this test")];
    let database = place.path("app.db");
    {
        let other = rusqlite::Connection::open(&database).unwrap();
        // Another program's table of the same name.
        other
            .execute_batch("CREATE TABLE meta (key TEXT, value TEXT); INSERT INTO meta VALUES ('version', '7');")
            .unwrap();
    }
    let database = std::fs::read(&database).unwrap();
    let short = b"precious".to_vec();
    let page = [b"precious ".repeat(1_000), vec![0; 4_096]].concat();
    for bytes in [database, short, page] {
        let folder = Scratch::folder();
        let db = folder.path().join("app.db");
        std::fs::write(&db, &bytes).unwrap();
        // A file of this name that holds no secret of ours.
        std::fs::write(db.with_extension("secret"), "hunter2").unwrap();
        let copy = folder.path().join("copy.db");
        let [db_text, copy] = [&db, &copy].map(|path| path.to_str().unwrap());
        let refused = |output: std::process::Output| {
            let said = String::from_utf8([output.stdout, output.stderr].concat()).unwrap();
            assert_eq!(output.status.code(), Some(2), "{said}");
            assert!(said.contains("app.db is not a journal of Threshold"), "{said}");
        };
        for more in [&[][..], &["--new-journal"], &["--check"]] {
            let args = [&["--db", db_text], more].concat();
            refused(Start { args: &args, variables: &secret, ..Start::default() }.command().output().unwrap());
        }
        refused(run(&["backup", copy, "--db", db_text], &[]));
        refused(run(&["bans", "list", "--server", "http://127.0.0.1:9", "--db", db_text], &[]));
        refused(run(&["audit", "--server", "http://127.0.0.1:9", "--db", db_text], &[]));
        assert_eq!(std::fs::read(&db).unwrap(), bytes);
        assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 2, "a file was created beside it");
        std::fs::remove_file(db.with_extension("secret")).unwrap();
        assert!(place.refusal(&db).contains("is not a journal of Threshold"));
    }
    // A restore does not replace it either.
    let (db, copy, app) = (place.path("threshold.db"), place.path("copy.db"), place.path("app.db"));
    stop(place.start(&db, &[]));
    let [db, copy, app_text] = [&db, &copy, &app].map(|path| path.to_str().unwrap());
    assert!(run(&["backup", copy, "--db", db], &[]).status.success());
    let before = std::fs::read(&app).unwrap();
    let output = run(&["restore", copy, "--db", app_text], &[]);
    assert_eq!(output.status.code(), Some(2));
    assert_eq!(std::fs::read(&app).unwrap(), before);
}

/// With the secret in the environment nothing but the file itself, or the mark in its lock file, shows that it is a journal. It
/// is repaired as one whose secret is beside it.
#[test]
fn a_damaged_journal_is_repaired_also_without_a_secret_file() {
    const SECRET: [(&str, &str); 1] = [("THRESHOLD_SECRET", "the secret of this test")];
    let place = Installation::new();
    let db = place.path("threshold.db");
    let args = ["--db", db.to_str().unwrap()];
    let start =
        || Start { policy: Some(place.policy.path()), args: &args, variables: &SECRET, ..Start::default() }.server();
    let server = start();
    (0..50).for_each(|number| ban(&server, &format!("mallory{number}")));
    stop(server);
    assert!(!place.path("threshold.secret").exists());
    let whole = std::fs::read(&db).unwrap();
    // The definitions of the tables are gone; the mark is left.
    let mut bytes = whole.clone();
    bytes[100..4_096].fill(b'x');
    std::fs::write(&db, &bytes).unwrap();
    let server = start();
    server.wait_for_log("journal damaged");
    assert!(is_banned(&server, "mallory7"));
    server.signal("KILL");
    drop(server);
    // The mark is gone; the definitions are left.
    for more in ["-wal", "-shm", ".lock"] {
        let _ = std::fs::remove_file(place.path(&format!("threshold.db{more}")));
    }
    std::fs::write(&db, &whole[..whole.len() - 4_096]).unwrap();
    let server = start();
    server.wait_for_log("journal damaged");
    stop(server);
}

/// `--db` in a folder that was never made said "cannot use /var/lib/threshold/threshold.db.lock: No such file or directory".
#[test]
fn a_missing_folder_is_named() {
    let place = Installation::new();
    let said = place.refusal(&place.path("no/folder/threshold.db"));
    let expect = format!("the folder {} of ", place.path("no/folder").display());
    assert!(said.contains(&expect) && said.contains("does not exist"), "{said}");
    assert!(!place.path("no").exists());
}

/// Returns the files of a folder with their contents. The index of a log is left out: SQLite makes it from the log.
fn contents(folder: &Path) -> Vec<(String, Vec<u8>)> {
    let files = std::fs::read_dir(folder).unwrap().map(|entry| entry.unwrap());
    let files = files.map(|file| (file.file_name().into_string().unwrap(), std::fs::read(file.path()).unwrap()));
    let mut files: Vec<_> = files.filter(|(name, _)| !name.ends_with("-shm")).collect();
    files.sort_unstable();
    files
}

/// `bans list --db FILE` once made a database of an empty file, and applied the log of a server that was killed.
///
/// Woken by `connect` in `read_only`, in `copy` or in `lookup`, and by reading an empty file with SQLite.
#[test]
fn commands_that_read_a_journal_change_no_file() {
    let installation = Installation::new();
    let nowhere = "http://127.0.0.1:1";
    let run = |args: &[&str]| {
        let mut command = Command::new(env!("CARGO_BIN_EXE_threshold"));
        let output = command.args(args).env_clear().env("THRESHOLD_SERVER", nowhere).output().unwrap();
        let text = |bytes: Vec<u8>| String::from_utf8(bytes).unwrap();
        (output.status.code(), text(output.stdout) + &text(output.stderr))
    };
    let empty = Scratch::file("empty.db", "");
    let name = empty.path().to_str().unwrap();
    let (code, text) = run(&["bans", "list", "--db", name]);
    assert!(code == Some(2) && text.contains("empty.db has no bans"), "{text}");
    let (code, text) = run(&["audit", "--db", name]);
    assert!(code == Some(0) && text.contains("there are no changes"), "{text}");
    assert_eq!(contents(empty.path().parent().unwrap()), [("empty.db".to_owned(), vec![])]);
    // The log of a server that was killed has the ban.
    let db = installation.path("threshold.db");
    let server = installation.start(&db, &[]);
    ban(&server, "eve");
    server.signal("KILL");
    drop(server);
    let name = db.to_str().unwrap();
    let before = contents(installation.folder.path());
    assert!(before.iter().any(|(name, bytes)| name.ends_with("-wal") && !bytes.is_empty()), "there is a log");
    let copies = Scratch::folder();
    let copy = copies.path().join("copy.db");
    let copy = copy.to_str().unwrap();
    for args in [&["bans", "list", "--db", name][..], &["audit", "--db", name], &["backup", copy, "--db", name]] {
        let (code, text) = run(args);
        assert!(code == Some(0) && (text.contains("eve") || args[0] == "backup"), "{args:?}: {text}");
        assert!(contents(installation.folder.path()) == before, "{args:?} has changed a file");
    }
    let before = contents(copies.path());
    let (code, text) = run(&["bans", "list", "--db", copy]);
    assert!(code == Some(0) && text.contains("eve"), "{text}");
    assert!(contents(copies.path()) == before, "the copy is changed");
}

/// Woken by leaving out the removal, and by removing a lock that was there before.
#[test]
fn a_start_that_fails_leaves_no_lock_behind() {
    let installation = Installation::new();
    let db = installation.path("threshold.db");
    // The journal is lost: its secret is still there.
    let secret = installation.path("threshold.secret");
    std::fs::write(&secret, "0123456789abcdef".repeat(4)).unwrap();
    std::fs::set_permissions(secret, std::fs::Permissions::from_mode(0o600)).unwrap();
    let before = contents(installation.folder.path());
    let error = installation.refusal(&db);
    assert!(error.contains("--new-journal"), "{error}");
    assert_eq!(contents(installation.folder.path()), before);
    std::fs::write(installation.path("threshold.db.lock"), "").unwrap();
    let before = contents(installation.folder.path());
    installation.refusal(&db);
    assert_eq!(contents(installation.folder.path()), before, "the lock of an earlier start stays");
}
