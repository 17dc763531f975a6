//! Tests that a server uses no file that another user has planted, and that a named pipe in place of a file keeps nothing waiting.

use std::os::unix::fs::{PermissionsExt as _, chown, symlink};
use std::path::{Path, PathBuf};
use std::process::Command;

use rcgen::{CertifiedKey, generate_simple_self_signed};

use super::process::{POLICY, Scratch, Server, Start};

/// A user that no test runs as.
const STRANGER: u32 = 54_321;
const JWT: &str = "[identity]\nuser = 'claim:sub'\n[identity.jwt]\nalg = 'HS256'\nkey_file = 'KEYS'\n";

/// A folder with every file that a server reads at its start.
struct Place {
    folder: Scratch,
}

impl Place {
    fn new() -> Self {
        let place = Self { folder: Scratch::folder() };
        let CertifiedKey { cert, signing_key } = generate_simple_self_signed(["127.0.0.1".to_owned()]).unwrap();
        place.write("cert.pem", &cert.pem());
        place.write("key.pem", &signing_key.serialize_pem());
        place.write("keys", "a secret of at least thirty-two bytes");
        place.write("policy.toml", &format!("{}{POLICY}", JWT.replace("KEYS", &place.text("keys"))));
        place
    }

    fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    fn text(&self, name: &str) -> String {
        self.path(name).into_os_string().into_string().unwrap()
    }

    fn write(&self, name: &str, text: &str) {
        std::fs::write(self.path(name), text).unwrap();
        set_mode(&self.path(name), 0o600);
    }

    fn args(&self) -> [String; 8] {
        let [db, cert, key] = ["threshold.db", "cert.pem", "key.pem"].map(|name| self.text(name));
        let lines = format!("jsonl:{}", self.text("events.jsonl"));
        ["--db", &db, "--tls-cert", &cert, "--tls-key", &key, "--events-to", &lines].map(str::to_owned)
    }

    /// Starts a server that must not start. Returns its error, which `--check` has too.
    fn refusal(&self) -> String {
        let args = self.args();
        let mut args: Vec<&str> = args.iter().map(String::as_str).collect();
        let policy = self.path("policy.toml");
        let start = Start { args: &args, policy: Some(&policy), ..Start::default() };
        let output = start.command().output().unwrap();
        assert_eq!(output.status.code(), Some(2), "{output:?}");
        let error = String::from_utf8(output.stderr).unwrap();
        args.push("--check");
        let checked = Start { args: &args, policy: Some(&policy), ..Start::default() }.command().output().unwrap();
        assert_eq!(checked.status.code(), Some(2), "{checked:?}");
        let checked = String::from_utf8([checked.stdout, checked.stderr].concat()).unwrap();
        let reason = error.trim_end().rsplit_once(": it ").unwrap_or_else(|| panic!("{error}")).1;
        assert!(checked.contains(reason), "a check says {checked}, and a start {error}");
        error
    }

    fn start(&self) -> Server {
        let args = self.args();
        let args: Vec<&str> = args.iter().map(String::as_str).collect();
        Start { args: &args, policy: Some(&self.path("policy.toml")), ..Start::default() }.server()
    }
}

fn set_mode(path: &Path, mode: u32) {
    std::fs::set_permissions(path, std::fs::Permissions::from_mode(mode)).unwrap();
}

/// Gives a file to another user, which only root can do.
fn give_away(path: &Path) {
    let given = chown(path, Some(STRANGER), None);
    given.expect("the tests of files of other users run as root, as in CI: sudo -E env PATH=$PATH ./test");
}

fn pipe(path: &Path) {
    assert!(Command::new("mkfifo").arg(path).status().unwrap().success());
}

/// A start waited for ever for the writer of a named pipe, and no signal but KILL ended it. An empty journal of another user was
/// used, and so was the secret that another user had put beside it.
///
/// Woken by reading without `NONBLOCK`, and by leaving out the check of any of these files.
#[test]
fn no_planted_file_is_used_and_no_pipe_blocks_the_start() {
    let place = Place::new();
    let beside = ["db", "db-wal", "db-shm", "db.lock", "secret", "secret.next", "secret.old", "counters"];
    let beside =
        beside.into_iter().chain(["events", "events-wal", "events-shm"]).map(|name| format!("threshold.{name}"));
    let given = ["policy.toml", "cert.pem", "key.pem", "keys", "events.jsonl"].map(str::to_owned);
    for name in beside.chain(given) {
        let file = place.path(&name);
        let before = std::fs::read(&file).ok();
        let expect = |expect: &str| {
            let error = place.refusal();
            assert!(error.contains(file.to_str().unwrap()) && error.contains(expect), "{name}: {error}");
            std::fs::remove_file(&file).unwrap();
        };
        let _ = std::fs::remove_file(&file);
        // A sink may be a pipe, which a program reads.
        if name != "events.jsonl" {
            pipe(&file);
            expect("it is a named pipe and not a regular file: remove it (rm ");
        }
        let plant = |mode| {
            std::fs::write(&file, before.as_deref().unwrap_or(b"0123456789abcdef".repeat(4).as_slice())).unwrap();
            set_mode(&file, mode);
        };
        plant(0o606);
        expect("run chmod ");
        // A policy may belong to the user that deploys it.
        if name != "policy.toml" {
            plant(0o600);
            give_away(&file);
            expect(&format!("it belongs to user {STRANGER}, and this process runs as user "));
        }
        if let Some(before) = before {
            place.write(&name, std::str::from_utf8(&before).unwrap());
        }
    }
    // Nothing of this is left, and the server starts.
    let server = place.start();
    server.signal("TERM");
    let (status, log) = server.wait();
    assert!(status.success(), "{log}");
}

/// Kubernetes mounts a ConfigMap and a secret as links to files of root, in a folder with the sticky bit, and a policy may belong to
/// another user than the server's.
#[test]
fn mounted_files_are_links() {
    let place = Place::new();
    std::fs::create_dir(place.path("..data")).unwrap();
    for (name, mode) in [("policy.toml", 0o644), ("cert.pem", 0o644), ("key.pem", 0o440), ("keys", 0o440)] {
        let target = place.path("..data").join(name);
        std::fs::rename(place.path(name), &target).unwrap();
        set_mode(&target, mode);
        symlink(Path::new("..data").join(name), place.path(name)).unwrap();
    }
    give_away(&place.path("..data/policy.toml"));
    set_mode(place.folder.path(), 0o1777);
    let server = place.start();
    server.signal("TERM");
    let (status, log) = server.wait();
    assert!(status.success() && !log.contains("others can replace files of this server"), "{log}");
}

/// Files that are read again are looked at again. A pipe in place of the policy kept a thread waiting, and with it every later change.
#[test]
fn a_file_that_is_replaced_by_a_planted_one_is_not_loaded() {
    let place = Place::new();
    let server = place.start();
    let policy = std::fs::read(place.path("policy.toml")).unwrap();
    std::fs::remove_file(place.path("policy.toml")).unwrap();
    pipe(&place.path("policy.toml"));
    server.signal("HUP");
    let line = server.wait_for_log("policy not reloaded");
    assert!(line.contains("it is a named pipe and not a regular file"), "{line}");
    std::fs::remove_file(place.path("policy.toml")).unwrap();
    std::fs::write(place.path("policy.toml"), policy).unwrap();
    server.wait_for_log("policy reloaded");
    give_away(&place.path("key.pem"));
    server.signal("HUP");
    let line = server.wait_for_log("certificate not reloaded");
    assert!(line.contains("belongs to user"), "{line}");
    give_away(&place.path("keys"));
    server.signal("HUP");
    server.wait_for_log("JWT keys not reloaded");
    server.signal("TERM");
    assert!(server.wait().0.success());
}

/// Who can replace a file need not be able to write to it.
#[test]
fn a_folder_that_everybody_can_write_to_is_told() {
    let place = Place::new();
    set_mode(place.folder.path(), 0o777);
    let server = place.start();
    let line = server.wait_for_log("others can replace files of this server");
    assert!(line.contains("WARN") && line.contains("run chmod o-w"), "{line}");
    drop(server);
    let (db, policy) = (place.text("threshold.db"), place.path("policy.toml"));
    let args = ["--check", "--deny", "warnings", "--db", &db];
    let checked = Start { args: &args, policy: Some(&policy), ..Start::default() }.command().output().unwrap();
    let said = String::from_utf8(checked.stdout).unwrap();
    assert!(checked.status.code() == Some(1) && said.contains("warning: the folder "), "{said}");
}

/// The folders of the files for a store with TLS, and of a file of events, were not looked at.
///
/// Woken by leaving out any of them in `unsafe_folders`.
#[test]
fn the_folder_of_every_file_that_is_named_is_examined() {
    let (place, open) = (Place::new(), Scratch::folder());
    let path = |name: &str| open.path().join(name).into_os_string().into_string().unwrap();
    for name in ["cert.pem", "key.pem"] {
        std::fs::copy(place.path(name), path(name)).unwrap();
    }
    set_mode(open.path(), 0o777);
    let (policy, db) = (place.path("policy.toml"), place.text("threshold.db"));
    let (cert, key, lines) = (path("cert.pem"), path("key.pem"), format!("jsonl:{}", path("events.jsonl")));
    let (own_cert, own_key) = (place.text("cert.pem"), place.text("key.pem"));
    let store = ["--store", "rediss://127.0.0.1:1"];
    for (args, authorities) in [
        (vec!["--events-to", &lines], None),
        (vec!["--tls-cert", &cert, "--tls-key", &own_key], None),
        ([&store[..], &["--store-ca", &cert]].concat(), None),
        (store.to_vec(), Some(&cert)),
        ([&store[..], &["--store-cert", &cert, "--store-key", &own_key]].concat(), None),
        ([&store[..], &["--store-cert", &own_cert, "--store-key", &key]].concat(), None),
    ] {
        let args = [&["--check", "--db", &db], &args[..]].concat();
        let secret = ("THRESHOLD_SECRET", "a secret of at least 16");
        let variables: Vec<_> =
            authorities.map(|path| ("THRESHOLD_STORE_CA", path.as_str())).into_iter().chain([secret]).collect();
        let checked = Start { args: &args, variables: &variables, policy: Some(&policy), ..Start::default() };
        let said = String::from_utf8(checked.command().output().unwrap().stdout).unwrap();
        let folder = open.path().display();
        assert!(said.contains(&format!("warning: the folder {folder} has the permissions 777")), "{args:?}: {said}");
    }
}
