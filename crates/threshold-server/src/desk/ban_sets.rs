//! Imported sets of bans: all bans of one origin, replaced as a whole.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use threshold_core::control::ControlChange;
use threshold_core::policy::{Ban, Layer, ListEntry, Policy};
use threshold_core::{Digest, Span, Timestamp};
use threshold_limiter::bans::MAX_BANS;

use super::audit::Entry;
use super::names::written_name;
use super::operations::{MAX_BAN, length, reason_of};
use super::{Desk, OperationError};

/// How long an import waits for the disk: half a million rows take a few seconds on a slow one.
const SAVE_TIMEOUT: Duration = Duration::from_secs(60);
/// The longest name of an origin.
const MAX_ORIGIN: usize = 64;
/// The most entries that one error describes: more of them would hide the first.
const MAX_DESCRIBED: usize = 20;

/// A set of bans to import.
#[derive(Debug)]
pub(crate) struct NewBanSet<'a> {
    /// The name of the set. An import replaces the set of the same name.
    pub(crate) origin: &'a str,
    /// The reason for bans without one of their own.
    pub(crate) reason: &'a str,
    /// The end of bans without one of their own.
    pub(crate) end: NewEnd,
    pub(crate) bans: Vec<NewSetBan<'a>>,
}

/// One ban of a set.
#[derive(Debug)]
pub(crate) struct NewSetBan<'a> {
    pub(crate) layer: Layer,
    pub(crate) key: &'a str,
    pub(crate) reason: Option<&'a str>,
    pub(crate) end: NewEnd,
    /// The line of the file that it was read from, for errors.
    pub(crate) line: Option<u64>,
}

/// The end of a ban as an operator gives it.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) enum NewEnd {
    /// None is given.
    #[default]
    Open,
    /// After this many seconds.
    After(u64),
    /// At this time, in Unix seconds.
    At(u64),
}

/// The result of an import.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct ImportedSet {
    /// The number of bans in the set now.
    pub(crate) bans: usize,
    /// The number of those that are new.
    pub(crate) added: usize,
    /// The number of bans of the set before that were lifted.
    pub(crate) lifted: usize,
    /// The number of entries that repeat another one, or that had ended already.
    pub(crate) left_out: usize,
}

/// A set that was checked, by the subjects of its bans.
struct CheckedSet {
    bans: BTreeMap<Digest, Arc<Ban>>,
    left_out: usize,
}

impl CheckedSet {
    /// Describes an import for the audit, in one line: one for each of thousands of bans would bury all others.
    fn describe(&self, ImportedSet { bans, added, lifted, .. }: ImportedSet) -> String {
        let ends = self.bans.values().map(|ban| ban.until);
        let end = ends.max().map(|until| format!(", the last {}", length(until))).unwrap_or_default();
        format!("import: {bans} bans, {added} new, {lifted} lifted{end}")
    }
}

impl Desk {
    /// Replaces the bans of an origin, with one audit record. An empty set lifts them. The journal commits all changes in one
    /// transaction, so that a crash leaves the old set or the new one.
    pub(crate) async fn import_bans(&self, who: &str, set: NewBanSet<'_>) -> Result<ImportedSet, OperationError> {
        let NewBanSet { origin, .. } = set;
        check_origin(origin)?;
        let reason = reason_of(set.reason)?;
        if set.bans.len() > MAX_BANS {
            return Err(OperationError::TooManyBans);
        }
        // Taken before the old set is read: another import of the same origin in between would leave bans of both
        // sets.
        let turn = self.operations.lock().await;
        let new = self.check_set(&set, reason)?;
        let (_, mut imported) = self.replacement(origin, &new);
        let action = new.describe(imported);
        let mut change = self.begin(Entry { who, action, layer: "origin", key: origin, why: reason })?;
        // Computed again if another node has changed bans meanwhile: if both had replaced the set that they knew, bans of both
        // would be in force.
        let made = self.limiter.change_control_all(|| {
            let (changes, now) = self.replacement(origin, &new);
            imported = now;
            changes
        });
        if let Err(error) = made.await {
            return Err(change.fail_control(error, OperationError::TooManyBans));
        }
        change.correct(new.describe(imported));
        change.confirm();
        drop(turn);
        self.wait_until_saved(SAVE_TIMEOUT).await.map_err(|_| OperationError::NotSaved)?;
        Ok(imported)
    }

    /// Returns the changes that put a set in place of the bans of its origin.
    fn replacement(&self, origin: &str, new: &CheckedSet) -> (Box<[ControlChange]>, ImportedSet) {
        let before: BTreeMap<Digest, Arc<Ban>> = self.limiter.bans().of_origin(origin).into_iter().collect();
        // A feed is imported every few minutes and hardly changes. Without this test, each import would write all of
        // its rows again. The begin is not compared, since it differs at every import.
        let is_same = |id: &Digest, ban: &Arc<Ban>| {
            before.get(id).is_some_and(|old| (&old.reason, old.until) == (&ban.reason, ban.until))
        };
        // New bans come first, so that an address in both sets is banned all the time.
        let set_bans = new.bans.iter().filter(|(id, ban)| !is_same(id, ban));
        let set_bans = set_bans.map(|(id, ban)| ControlChange::Ban { id: *id, ban: Some(Arc::clone(ban)) });
        // `before` has bans of this origin only, so that an import never lifts an operator's ban or one of another
        // set.
        let gone = before.keys().filter(|id| !new.bans.contains_key(id));
        let changes: Box<[ControlChange]> =
            set_bans.chain(gone.map(|id| ControlChange::Ban { id: *id, ban: None })).collect();
        let imported = ImportedSet {
            bans: new.bans.len(),
            added: new.bans.keys().filter(|id| !before.contains_key(id)).count(),
            lifted: before.keys().filter(|id| !new.bans.contains_key(id)).count(),
            left_out: new.left_out,
        };
        (changes, imported)
    }

    fn check_set(&self, set: &NewBanSet<'_>, reason: &str) -> Result<CheckedSet, OperationError> {
        let (policy, now, key) = (self.policy(), self.now(), self.limiter.key());
        let by = Ban::by_origin(set.origin);
        // Also for a set without bans, whose end nothing else would look at.
        let field = if matches!(set.end, NewEnd::At(_)) { "until" } else { "durationSec" };
        set.end.until(now).map_err(|message| OperationError::invalid(field, message))?;
        let mut checked = CheckedSet { bans: BTreeMap::new(), left_out: 0 };
        let mut refused = Vec::new();
        for (index, new) in set.bans.iter().enumerate() {
            // An end of its own wins also if it is later than that of the set.
            let end = if new.end == NewEnd::Open { set.end } else { new.end };
            let ban = check_ban(&policy, new).and_then(|whom| {
                let reason = new.reason.map_or(Ok(reason), reason_of).map_err(message_of)?;
                let until = end.until(now)?;
                Ok(Ban { whom, reason: reason.into(), by: by.clone(), from: now, until })
            });
            match ban {
                Ok(ban) if ban.until > now => {
                    // Of two entries on one subject the one that ends last counts.
                    let id = ban.id(key);
                    let known = checked.bans.get(&id).map(|known| known.until);
                    checked.left_out = checked.left_out.saturating_add(usize::from(known.is_some()));
                    if known.is_none_or(|known| ban.until > known) {
                        checked.bans.insert(id, Arc::new(ban));
                    }
                }
                // Lists contain entries that ended since they were downloaded. They are no reason to refuse the
                // others.
                Ok(_) => checked.left_out = checked.left_out.saturating_add(1),
                // All entries are checked before any is refused: an operator corrects a file of thousands of lines in
                // one pass.
                Err(message) => refused.push((index, new, message)),
            }
        }
        if refused.is_empty() { Ok(checked) } else { Err(refusal(&refused, set.bans.len())) }
    }
}

impl NewEnd {
    /// Returns the end of a ban that begins now.
    fn until(self, now: Timestamp) -> Result<Timestamp, String> {
        // An end beyond ten years is most likely a time in milliseconds, and not what the operator means.
        let latest = now.plus(Span::from_secs(MAX_BAN));
        match self {
            Self::Open => Ok(Timestamp::MAX),
            Self::After(seconds @ 1..=MAX_BAN) => Ok(now.plus(Span::from_secs(seconds))),
            Self::At(seconds) if Timestamp::from_secs(seconds) <= latest => Ok(Timestamp::from_secs(seconds)),
            Self::After(_) | Self::At(_) => Err(format!("a ban lasts between 1 and {MAX_BAN} seconds")),
        }
    }
}

fn check_ban(policy: &Policy, new: &NewSetBan<'_>) -> Result<ListEntry, String> {
    let name = written_name(new.layer, new.key, policy).ok_or_else(|| {
        let key = new.key;
        format!("\"{key}\" is a digest, which only `POST /v1/bans` takes; a name that looks like one is \"#{key}\"")
    })?;
    let whom = policy.ban_target(new.layer, &name).map_err(|error| error.to_string())?;
    policy.refuses_ban(&whom).map_or(Ok(whom), |why| Err(format!("\"{}\": {why}", new.key)))
}

fn message_of(error: OperationError) -> String {
    match error {
        OperationError::Invalid { message, .. } => message,
        other => format!("{other:?}"),
    }
}

/// Describes the first refused entries, by their lines if they have any.
fn refusal(refused: &[(usize, &NewSetBan<'_>, String)], all: usize) -> OperationError {
    let describe = |(index, new, message): &(usize, &NewSetBan<'_>, String)| match new.line {
        Some(line) => format!("line {line}: {message}"),
        None => format!("bans[{index}]: {message}"),
    };
    let mut described: Vec<String> = refused.iter().take(MAX_DESCRIBED).map(describe).collect();
    if let Some(more) = refused.len().checked_sub(MAX_DESCRIBED).filter(|more| *more > 0) {
        described.push(format!("and {more} more"));
    }
    let message =
        format!("nothing was imported: {} of {all} entries are refused: {}", refused.len(), described.join("; "));
    OperationError::InvalidEntry { index: refused.first().map_or(0, |(index, ..)| *index), message }
}

fn check_origin(origin: &str) -> Result<(), OperationError> {
    // The name is a part of a URL path and of audit lines. These characters need no escaping in either.
    let fits = |c: char| c.is_ascii_alphanumeric() || matches!(c, '.' | '_' | '-');
    if (1..=MAX_ORIGIN).contains(&origin.len()) && origin.chars().all(fits) {
        return Ok(());
    }
    let message =
        format!("the name of an origin has from 1 to {MAX_ORIGIN} letters, digits, dots, dashes or underscores");
    Err(OperationError::invalid("origin", message))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::desk::tests::{Folder, START};
    use crate::desk::{NewBan, OpenDesk};

    const POLICY: &str = "
        [identity]
        trusted_proxies = ['192.0.2.0/24']
        client_ip = 'x-forwarded-for'
        [[rule]]
        name = 'r'
        per = ['ip']
        limit = '1000/h'
    ";

    fn set<'a>(origin: &'a str, keys: &[&'a str]) -> NewBanSet<'a> {
        let bans = keys.iter().zip(1..).map(|(key, line)| NewSetBan {
            layer: Layer::Edge,
            key,
            reason: None,
            end: NewEnd::Open,
            line: Some(line),
        });
        NewBanSet { origin, reason: "a list", end: NewEnd::Open, bans: bans.collect() }
    }

    fn keys(desk: &Desk) -> Vec<String> {
        let mut keys: Vec<String> = desk.limiter.bans().all(START).iter().map(|(_, ban)| ban.whom.key()).collect();
        keys.sort();
        keys
    }

    /// An operator loaded a list of 30,000 networks with a loop around `bans add`: it took an hour of fsyncs, had 30,000 audit
    /// lines, and the networks that left the list stayed banned.
    ///
    /// Fails if an import adds to the set of before, or if it ends bans of an operator or of another origin.
    #[tokio::test]
    async fn an_import_replaces_the_set_of_its_origin_and_no_other_ban() {
        let folder = Folder::new();
        let OpenDesk { desk, .. } = folder.open(POLICY);
        let own = NewBan { layer: Layer::Edge, key: "203.0.113.0/24", reason: "mine", seconds: None };
        desk.ban("ops", own).await.unwrap();
        let first = set("drop", &["203.0.113.0/24", "198.51.100.0/24", "198.51.100.0/24"]);
        let done = desk.import_bans("ops", first).await.unwrap();
        assert_eq!(done, ImportedSet { bans: 2, added: 2, lifted: 0, left_out: 1 });
        desk.import_bans("ops", set("other", &["198.51.100.0/24"])).await.unwrap();
        let done = desk.import_bans("ops", set("drop", &["203.0.113.0/24", "2001:db8::/32"])).await.unwrap();
        assert_eq!(done, ImportedSet { bans: 2, added: 1, lifted: 1, left_out: 0 });
        let all = ["198.51.100.0/24", "2001:db8::/32", "203.0.113.0/24", "203.0.113.0/24"];
        assert_eq!(keys(&desk), all);
        let done = desk.import_bans("ops", set("drop", &[])).await.unwrap();
        assert_eq!(done, ImportedSet { bans: 0, added: 0, lifted: 2, left_out: 0 });
        assert_eq!(keys(&desk), ["198.51.100.0/24", "203.0.113.0/24"]);
        let audit = folder.audit();
        assert_eq!(audit.len(), 5, "{audit:?}");
        // What is on disk is what is in memory.
        drop(desk);
        let OpenDesk { desk, .. } = folder.open(POLICY);
        assert_eq!(keys(&desk), ["198.51.100.0/24", "203.0.113.0/24"]);
    }

    /// One line of a downloaded list was `0.0.0.0/0`, another the address of the load balancer.
    #[tokio::test]
    async fn a_set_with_one_bad_entry_is_refused_as_a_whole_with_line_numbers() {
        let folder = Folder::new();
        let OpenDesk { desk, .. } = folder.open(POLICY);
        desk.import_bans("ops", set("drop", &["203.0.113.0/24"])).await.unwrap();
        let bad = ["198.51.100.0/24", "0.0.0.0/0", "192.0.2.7", "127.0.0.1", "nonsense", "::/0"];
        let Err(OperationError::InvalidEntry { index, message }) = desk.import_bans("ops", set("drop", &bad)).await
        else {
            panic!("it was imported")
        };
        assert_eq!(index, 1);
        assert!(message.starts_with("nothing was imported: 5 of 6 entries are refused: line 2: "), "{message}");
        for line in ["line 3: ", "line 4: ", "line 5: ", "line 6: "] {
            assert!(message.contains(line), "{message}");
        }
        assert!(!message.contains("line 1: "), "{message}");
        let many: Vec<&str> = std::iter::repeat_n("nonsense", 50).collect();
        let Err(OperationError::InvalidEntry { message, .. }) = desk.import_bans("ops", set("drop", &many)).await
        else {
            panic!("it was imported")
        };
        assert!(message.contains("line 20: ") && message.ends_with("and 30 more"), "{message}");
        for origin in ["", "a b", "ä", &"x".repeat(65)] {
            assert!(desk.import_bans("ops", set(origin, &["203.0.113.0/24"])).await.is_err(), "{origin}");
        }
        assert_eq!((keys(&desk), folder.audit().len()), (vec!["203.0.113.0/24".to_owned()], 1));
    }

    /// Fails if an entry's own end does not win, or if entries that have ended are banned for good.
    #[tokio::test]
    async fn entries_end_by_themselves_or_with_their_set_and_ended_ones_are_left_out() {
        let folder = Folder::new();
        let OpenDesk { desk, .. } = folder.open(POLICY);
        let mut new = set("drop", &["203.0.113.1", "203.0.113.2", "203.0.113.3"]);
        new.end = NewEnd::After(60);
        let now = desk.now().secs_ceil();
        new.bans[1].end = NewEnd::At(now + 30);
        new.bans[2].end = NewEnd::At(now.saturating_sub(1));
        let done = desk.import_bans("ops", new).await.unwrap();
        assert_eq!((done.bans, done.left_out), (2, 1));
        let mut ends: Vec<u64> = desk.limiter.bans().all(START).iter().map(|(_, ban)| ban.until.secs_ceil()).collect();
        ends.sort_unstable();
        assert_eq!(ends, [now + 30, now + 60]);
        let mut new = set("drop", &["203.0.113.1"]);
        new.end = NewEnd::After(MAX_BAN + 1);
        assert!(desk.import_bans("ops", new).await.is_err());
        // An empty set lifts the one before, and its length is checked all the same.
        let mut none = set("drop", &[]);
        none.end = NewEnd::After(0);
        assert!(desk.import_bans("ops", none).await.is_err());
    }
}
