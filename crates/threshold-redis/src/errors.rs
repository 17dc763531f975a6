//! Counts the errors that calls end with, by kind. What is part of normal operation and handled is not counted, such as a redirect
//! that is followed.

use std::collections::BTreeMap;
use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Instant;

use ::redis::{ErrorKind, RedisError, ServerErrorKind};
use threshold_core::BytesError;
use threshold_core::text::printable;

use super::connect::ConnectError;
use super::keys::RecordKey;
use threshold_limiter::store::{StoreError, StoreErrorCount, StoreErrorKind};

/// The longest text of an error that is kept, in characters.
const LONGEST: usize = 300;

/// The errors of a store. A clone shares them.
#[derive(Debug, Clone, Default)]
pub(super) struct Errors(Arc<Mutex<Counts>>);

#[derive(Debug, Default)]
struct Counts {
    kinds: BTreeMap<StoreErrorKind, Counted>,
    seen: Seen,
}

#[derive(Debug)]
struct Counted {
    count: u64,
    last: String,
    at: Instant,
}

/// How much was counted at some moment.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(super) struct Seen {
    errors: u64,
    /// Calls that were refused because their slot is being moved. Most of them are carried out in another way.
    moving: u64,
}

impl Errors {
    /// Counts an error.
    pub(super) fn count(&self, kind: StoreErrorKind, text: impl fmt::Display) {
        let text: String = printable(&text.to_string()).chars().take(LONGEST).collect();
        let mut counts = self.lock();
        counts.seen.errors = counts.seen.errors.wrapping_add(1);
        let (before, at) = (counts.kinds.get(&kind).map_or(0, |counted| counted.count), Instant::now());
        counts.kinds.insert(kind, Counted { count: before.saturating_add(1), last: text, at });
    }

    /// Counts a record that core cannot read.
    pub(super) fn unreadable(&self, record: RecordKey, error: BytesError) -> StoreError {
        self.count(StoreErrorKind::UnreadableRecord, format_args!("{}: {error}", record.name()));
        StoreError::Unavailable
    }

    /// Counts a reply that could not be parsed.
    pub(super) fn parsed<T>(&self, script: &str, parsed: Result<T, StoreError>) -> Result<T, StoreError> {
        parsed.inspect_err(|_| self.count(StoreErrorKind::Protocol, format_args!("the reply to {script} is unknown")))
    }

    /// Notes a call that was refused because its slot is being moved.
    pub(super) fn refused_while_moving(&self) {
        let mut counts = self.lock();
        counts.seen.moving = counts.seen.moving.wrapping_add(1);
    }

    /// Returns how much was counted so far.
    pub(super) fn seen(&self) -> Seen {
        self.lock().seen
    }

    /// Counts the failure of a whole operation, unless an error was counted since it began. So no failure is silent, whatever part of
    /// the store it comes from.
    pub(super) fn count_failure(&self, begun: Seen) {
        let now = self.seen();
        if now.errors != begun.errors {
            return;
        }
        if now.moving == begun.moving {
            self.count(StoreErrorKind::Other, "an operation failed, and no call did");
        } else {
            self.count(StoreErrorKind::Moving, "the slot of several keys is being moved to another server");
        }
    }

    /// Returns the kinds of which there were errors.
    pub(super) fn all(&self) -> Vec<StoreErrorCount> {
        let counts = self.lock();
        let shown = counts.kinds.iter().map(|(kind, counted)| {
            StoreErrorCount::new(*kind, counted.count, counted.last.clone(), counted.at.elapsed())
        });
        shown.collect()
    }

    /// Returns the errors of the last moments, for operators.
    pub(super) fn present(&self) -> Option<String> {
        let recent = self.all().into_iter().filter(StoreErrorCount::is_recent);
        let texts: Vec<String> = recent.map(|error| format!("{}: {}", error.kind.name(), error.last)).collect();
        (!texts.is_empty()).then(|| texts.join("; "))
    }

    fn lock(&self) -> MutexGuard<'_, Counts> {
        // A poisoned lock is safe to use: a count is replaced in one step.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Returns the kind of an error that a server has sent, or that sending to it has brought.
pub(super) fn kind_of(error: &RedisError) -> StoreErrorKind {
    match error.kind() {
        ErrorKind::Server(kind) => of_server(kind, error),
        ErrorKind::Extension => of_code(error.code().unwrap_or_default()).unwrap_or(StoreErrorKind::Other),
        ErrorKind::AuthenticationFailed => StoreErrorKind::NoPermission,
        ErrorKind::Parse | ErrorKind::UnexpectedReturnType => StoreErrorKind::Protocol,
        _ if error.is_timeout() => StoreErrorKind::Timeout,
        ErrorKind::Io | ErrorKind::Client | ErrorKind::InvalidClientConfig => StoreErrorKind::Connection,
        _ => StoreErrorKind::Other,
    }
}

fn of_server(kind: ServerErrorKind, error: &RedisError) -> StoreErrorKind {
    match kind {
        ServerErrorKind::BusyLoading => StoreErrorKind::Loading,
        ServerErrorKind::Moved | ServerErrorKind::Ask | ServerErrorKind::TryAgain => StoreErrorKind::Moving,
        ServerErrorKind::ClusterDown => StoreErrorKind::ClusterDown,
        ServerErrorKind::MasterDown | ServerErrorKind::ReadOnly => StoreErrorKind::ReadOnly,
        ServerErrorKind::NoPerm => StoreErrorKind::NoPermission,
        ServerErrorKind::NoScript => StoreErrorKind::Script,
        // The general error. What a command in a script fails with is a part of the text in some releases.
        _ => of_text(&error.to_string()),
    }
}

/// Returns the kind of an error by the code that Redis begins it with.
fn of_code(code: &str) -> Option<StoreErrorKind> {
    Some(match code {
        "WRONGTYPE" => StoreErrorKind::WrongType,
        "OOM" => StoreErrorKind::OutOfMemory,
        "NOPERM" | "NOAUTH" | "WRONGPASS" => StoreErrorKind::NoPermission,
        "NOREPLICAS" => StoreErrorKind::NotEnoughReplicas,
        "MISCONF" => StoreErrorKind::CannotSave,
        "READONLY" | "MASTERDOWN" => StoreErrorKind::ReadOnly,
        "BUSY" | "UNKILLABLE" => StoreErrorKind::Busy,
        "LOADING" => StoreErrorKind::Loading,
        "CLUSTERDOWN" => StoreErrorKind::ClusterDown,
        _ => return None,
    })
}

/// Returns whether an error says that the user may not run a command of a script. It has no code in some releases.
pub(super) fn is_denied_in_script(text: &str) -> bool {
    text.contains("ACL failure") || text.contains("The user executing the script can't run this command")
}

fn of_text(text: &str) -> StoreErrorKind {
    let is_script = text.contains("user_script") || text.contains("script:");
    let code = text.split(|c: char| !c.is_ascii_uppercase()).find_map(of_code);
    match code {
        _ if is_denied_in_script(text) => StoreErrorKind::NoPermission,
        Some(kind) => kind,
        None if is_script => StoreErrorKind::Script,
        None => StoreErrorKind::Other,
    }
}

/// Returns the kind of an error of connecting.
pub(super) fn kind_of_connect(error: &ConnectError) -> StoreErrorKind {
    match error {
        // That the handshake ends in another way than it should says nothing about the protocol.
        ConnectError::Server { error, .. } => match kind_of(error) {
            StoreErrorKind::Protocol | StoreErrorKind::Other => StoreErrorKind::Connection,
            kind => kind,
        },
        ConnectError::Replica(_) => StoreErrorKind::ReadOnly,
        ConnectError::Secret { .. } => StoreErrorKind::OtherSecret,
        ConnectError::NoCluster(_) | ConnectError::NoPrimary(_) => StoreErrorKind::Connection,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn answered(text: &str) -> StoreErrorKind {
        let value = ::redis::parse_redis_value(format!("-{text}\r\n").as_bytes()).unwrap();
        kind_of(&value.extract_error().unwrap_err())
    }

    /// What Redis 7 and Valkey 8 have answered, and what Redis 6 writes of a command in a script.
    #[test]
    fn the_answers_of_servers_have_names() {
        let script = "script: 0a1b, on @user_script:12.";
        for (text, expected) in [
            (&*format!("WRONGTYPE Operation against a key holding the wrong kind of value {script}"), "wrong_type"),
            (
                "ERR Error running script (call to f_0a): @user_script:3: WRONGTYPE Operation against a key",
                "wrong_type",
            ),
            (&*format!("OOM command not allowed when used memory > 'maxmemory'. {script}"), "out_of_memory"),
            ("READONLY You can't write against a read only replica.", "read_only"),
            ("MASTERDOWN Link with MASTER is down", "read_only"),
            ("NOPERM User a has no permissions to run the 'evalsha' command", "no_permission"),
            (&*format!("ERR ACL failure in script: No permissions to access a key {script}"), "no_permission"),
            ("NOAUTH Authentication required.", "no_permission"),
            ("NOREPLICAS Not enough good replicas to write.", "not_enough_replicas"),
            ("MISCONF Redis is configured to save RDB snapshots", "cannot_save"),
            ("LOADING Redis is loading the dataset in memory", "loading"),
            ("BUSY Redis is busy running a script.", "busy"),
            ("CLUSTERDOWN The cluster is down", "cluster_down"),
            ("TRYAGAIN Multiple keys request during rehashing of slot", "moving"),
            ("MOVED 7 127.0.0.1:6379", "moving"),
            (&*format!("ERR user_script:4: attempt to index a nil value {script}"), "script"),
            ("ERR unknown command 'PEXPIRETIME'", "other"),
            ("CROSSSLOT Keys in request don't hash to the same slot", "other"),
        ] {
            assert_eq!(answered(text).name(), expected, "{text}");
        }
    }

    #[test]
    fn every_kind_has_a_name_of_its_own() {
        let names: std::collections::BTreeSet<_> = StoreErrorKind::ALL.iter().map(|kind| kind.name()).collect();
        assert_eq!(names.len(), StoreErrorKind::ALL.len());
    }

    /// Woken by counting every failure, and by counting none.
    #[test]
    fn a_failure_is_counted_once() {
        let errors = Errors::default();
        let named = || errors.all().iter().map(|error| (error.kind.name(), error.count)).collect::<Vec<_>>();
        let begun = errors.seen();
        errors.count(StoreErrorKind::WrongType, "a\nb");
        errors.count_failure(begun);
        assert_eq!(named(), [("wrong_type", 1)]);
        errors.count_failure(errors.seen());
        let begun = errors.seen();
        errors.refused_while_moving();
        errors.count_failure(begun);
        assert_eq!(named(), [("wrong_type", 1), ("moving", 1), ("other", 1)]);
        assert!(errors.present().unwrap().contains("wrong_type: a\\nb"), "{:?}", errors.present());
    }
}
