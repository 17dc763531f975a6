//! Policies from files and from the environment, and what a developer reads if they are wrong.

#![cfg(feature = "toml")]
#![expect(clippy::unwrap_used, reason = "a test that cannot go on should say so loudly, on the line where it stops")]

use std::path::{Path, PathBuf};
use std::process::Command;

use threshold_limiter::{Policy, PolicyFileError};

/// A policy file that is removed with this value.
struct PolicyFile(PathBuf);

impl PolicyFile {
    fn new(name: &str, text: &str) -> Self {
        let path = Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("{name}-{}.toml", std::process::id()));
        std::fs::write(&path, text).unwrap();
        Self(path)
    }
}

impl Drop for PolicyFile {
    fn drop(&mut self) {
        let _ = std::fs::remove_file(&self.0);
    }
}

const GOOD: &str = "[[rule]]\nname = 'address'\nper = ['ip']\nlimit = '${RULES_PER_MINUTE_OF_THIS_TEST:-7}/min'\n";

#[test]
fn a_policy_file_is_read_with_its_variables() {
    let file = PolicyFile::new("good", GOOD);
    assert_eq!(Policy::from_file(&file.0).unwrap().rules().len(), 1);
}

/// A developer moved the program to another folder, and read `Os { code: 2, kind: NotFound, message: … }` without a path.
#[test]
fn a_missing_file_is_named() {
    let error = Policy::from_file("no/such/policy.toml").unwrap_err();
    assert!(matches!(&error, PolicyFileError::Unreadable { .. }));
    assert_eq!(error.to_string(), "cannot read the policy file no/such/policy.toml");
    assert!(format!("{error:?}").starts_with("cannot read the policy file no/such/policy.toml: "), "{error:?}");
}

/// `Policy::from_file(…).unwrap()` shows the file, the line and the column, and underlines the text.
#[test]
fn an_error_in_a_file_shows_where() {
    let file = PolicyFile::new("bad", "[[rule]]\nname = 'r'\nper = ['ip']\nlimit = '10/fortnight'\n");
    let error = Policy::from_file(&file.0).unwrap_err();
    let printed = format!("{error:?}");
    assert!(printed.starts_with(&format!("{}:4:13: error[bad-limit]: ", file.0.display())), "{printed}");
    assert!(printed.contains("\n4 | limit = '10/fortnight'\n  |             ^^^^^^^^^"), "{printed}");
    assert_eq!(error.to_string(), printed);
}

/// Runs this test again in a process whose environment names a file, since a process should not change its own.
#[test]
fn a_variable_names_the_file() {
    const VARIABLE: &str = "THRESHOLD_POLICY_OF_THIS_TEST";
    let Err(error) = Policy::from_env(VARIABLE) else {
        println!("read from the environment");
        return;
    };
    assert_eq!(error.to_string(), format!("{VARIABLE} is not set: it must be the path of a policy file"));
    let file = PolicyFile::new("named", GOOD);
    let run = |value: &Path| {
        let mut again = Command::new(std::env::current_exe().unwrap());
        again.args(["--exact", "a_variable_names_the_file", "--nocapture"]).env(VARIABLE, value);
        String::from_utf8(again.output().unwrap().stdout).unwrap()
    };
    let printed = run(&file.0);
    assert!(printed.contains("read from the environment"), "{printed}");
}
