//! The text of the policy as it runs, for operators who look at it, check a draft of another one, or save it.

mod comments;

use std::collections::HashSet;
use std::io::Write as _;
use std::os::unix::ffi::OsStrExt as _;
use std::os::unix::fs::{MetadataExt as _, OpenOptionsExt as _, PermissionsExt as _};
use std::path::{Path, PathBuf};
use std::time::Duration;

use threshold_core::policy::{Policy, Review, ReviewWork};

/// What follows the name of the policy in that of a draft which is being written.
const DRAFT: &str = ".draft-";
/// The age of a draft that nobody writes any more. A save takes milliseconds, and may be one of another server.
const ABANDONED_AFTER: Duration = Duration::from_secs(60);

/// The text of a policy, and the file that it is from.
#[derive(Debug, Default)]
pub(crate) struct PolicyFile {
    pub(crate) text: String,
    /// The file, if it may be changed.
    editable: Option<PathBuf>,
    /// Whether a policy without rules may be saved.
    allow_empty: bool,
}

/// Why a policy was not saved.
#[derive(Debug)]
pub(crate) enum SaveError {
    /// The file has another text by now.
    Changed,
    Io(std::io::Error),
}

impl From<std::io::Error> for SaveError {
    fn from(error: std::io::Error) -> Self {
        Self::Io(error)
    }
}

impl PolicyFile {
    /// A text whose file stays as it is.
    pub(crate) fn new(text: String) -> Self {
        Self { text, ..Self::default() }
    }

    /// A text whose file may be changed.
    pub(crate) fn editable(text: String, path: PathBuf, allow_empty: bool) -> Self {
        let _ = std::fs::canonicalize(&path).map(|path| remove_abandoned_drafts(&path));
        Self { text, editable: Some(path), allow_empty }
    }

    /// Returns the same file with another text.
    pub(crate) fn with_text(&self, text: String) -> Self {
        Self { text, editable: self.editable.clone(), allow_empty: self.allow_empty }
    }

    pub(crate) const fn is_editable(&self) -> bool {
        self.editable.is_some()
    }

    /// Reviews a text that this server has loaded.
    pub(crate) fn review(&self, text: &str) -> Review {
        self.review_draft(text, ReviewWork::default())
    }

    /// Reviews a draft, with so much work.
    ///
    /// Variables are read only if the draft refers to them where the policy in force does: a rule named after another one would show its
    /// value, which may be a secret of this process.
    pub(crate) fn review_draft(&self, draft: &str, work: ReviewWork<'_>) -> Review {
        let reads = self.new_variable(draft).is_none();
        Policy::review_draft(draft, &|name| reads.then(|| std::env::var(name).ok()).flatten(), work)
    }

    /// Returns the key of a value of a draft that refers to a variable, unless the policy in force has the same value under this key.
    ///
    /// Compared are values and not lines: TOML has many ways to write a dollar sign.
    pub(crate) fn new_variable(&self, draft: &str) -> Option<String> {
        // Variables of a text that is no TOML are never read.
        let draft = draft.parse::<toml::Table>().ok()?;
        let mut known = HashSet::new();
        if let Ok(table) = self.text.parse::<toml::Table>() {
            references(&mut String::new(), &toml::Value::Table(table), &mut |key, value| {
                known.insert((key.to_owned(), value.to_owned()));
            });
        }
        let mut new = None;
        references(&mut String::new(), &toml::Value::Table(draft), &mut |key, value| {
            if new.is_none() && !known.contains(&(key.to_owned(), value.to_owned())) {
                new = Some(key.to_owned());
            }
        });
        new
    }

    /// Checks that the file still has this text.
    pub(crate) fn check_unchanged(&self, text: &str) -> Result<(), SaveError> {
        let Some(path) = &self.editable else { return Err(SaveError::Changed) };
        if std::fs::read(path)? == text.as_bytes() { Ok(()) } else { Err(SaveError::Changed) }
    }

    /// Checks that a reload would accept a text.
    pub(crate) fn check_loadable(&self, text: &str, in_force: &Policy) -> Result<(), String> {
        let path = self.editable.as_deref().unwrap_or(Path::new(""));
        let loaded = crate::reload::usable(path, Ok(text.as_bytes().to_vec()), in_force, self.allow_empty);
        loaded.map(drop).map_err(|problem| problem.details)
    }

    /// Returns the text without the key of `[identity.jwt]`, and without comments, in which a former key may be.
    pub(crate) fn text_for_readers(&self) -> String {
        let hidden = "(not shown: it may contain a key)\n";
        let Some(text) = comments::removed(&self.text) else { return hidden.to_owned() };
        let span = self.review(&text).key_span;
        match span.and_then(|span| Some((text.get(..span.start)?, text.get(span.end..)?))) {
            Some((before, after)) => format!("{before}\"(not shown)\"{after}"),
            // The file has changed since it was loaded, and where its key is cannot be told.
            None if text.contains("jwt") => hidden.to_owned(),
            None => text,
        }
    }

    /// Returns the names of the rules with the lines that they are in.
    pub(crate) fn lines_of_rules(&self) -> Vec<(Box<str>, usize)> {
        let line = |at: usize| self.text.get(..at).map_or(1, |before| before.matches('\n').count().saturating_add(1));
        self.review(&self.text).rule_names.into_iter().map(|(name, span)| (name, line(span.start))).collect()
    }

    /// Replaces the file, if it still has the text that the new one is based on. Either all of it is written or nothing.
    pub(crate) fn save(&self, text: &str, based_on: &str) -> Result<(), SaveError> {
        self.check_unchanged(based_on)?;
        let Some(path) = &self.editable else { return Err(SaveError::Changed) };
        // A link stays one: its file is replaced.
        let path = &std::fs::canonicalize(path)?;
        remove_abandoned_drafts(path);
        let metadata = std::fs::metadata(path)?;
        let mode = metadata.permissions().mode();
        let draft = beside(path);
        // Created exclusively and without following a link: another user of the folder must not choose where it is written.
        let mut file = std::fs::OpenOptions::new().write(true).create_new(true).mode(mode & 0o777).open(&draft)?;
        // The umask may have removed bits. Only a privileged process can give a file away; others are its owner already.
        let _ = file.set_permissions(std::fs::Permissions::from_mode(mode & 0o777));
        let _ = std::os::unix::fs::fchown(&file, Some(metadata.uid()), Some(metadata.gid()));
        let written = file.write_all(text.as_bytes()).and_then(|()| file.sync_all());
        if let Err(error) = written.and_then(|()| std::fs::rename(&draft, path)) {
            let _ = std::fs::remove_file(&draft);
            return Err(error.into());
        }
        Ok(())
    }
}

/// Calls a function with every key and value of a table that may refer to a variable. The items of a list have the key of the list.
fn references(key: &mut String, value: &toml::Value, found: &mut impl FnMut(&str, &str)) {
    match value {
        // More than core expands: a mark that is not a reference does no harm here.
        toml::Value::String(text) if text.contains('$') => found(key, text),
        toml::Value::Array(items) => items.iter().for_each(|item| references(key, item, found)),
        toml::Value::Table(table) => {
            for (name, value) in table {
                let length = key.len();
                if length > 0 {
                    key.push('.');
                }
                key.push_str(name);
                if name.contains('$') {
                    found(key, name);
                }
                references(key, value, found);
                key.truncate(length);
            }
        }
        _ => {}
    }
}

/// Returns the name of a new file in the same folder, so that renaming it replaces the policy in one step.
fn beside(path: &Path) -> PathBuf {
    let mut name = path.as_os_str().to_owned();
    name.push(format!("{DRAFT}{:016x}", rand::random::<u64>()));
    name.into()
}

/// Removes the drafts of a policy that a process which was killed has left. What cannot be removed does no harm.
fn remove_abandoned_drafts(policy: &Path) {
    let (Some(folder), Some(name)) = (policy.parent(), policy.file_name()) else { return };
    let is_draft = |file: &std::ffi::OsStr| {
        let number = file.as_bytes().strip_prefix(name.as_bytes()).and_then(|rest| rest.strip_prefix(DRAFT.as_bytes()));
        number
            .is_some_and(|number| number.len() == 16 && number.iter().all(|digit| b"0123456789abcdef".contains(digit)))
    };
    let is_abandoned = |file: &std::fs::DirEntry| {
        // Of the entry itself: a link is not a draft.
        let metadata = file.metadata().ok().filter(std::fs::Metadata::is_file);
        let age = metadata.and_then(|metadata| metadata.modified().ok()?.elapsed().ok());
        age.is_some_and(|age| age >= ABANDONED_AFTER)
    };
    let files = std::fs::read_dir(folder).into_iter().flatten().filter_map(Result::ok);
    for file in files.filter(|file| is_draft(&file.file_name()) && is_abandoned(file)) {
        let removed = std::fs::remove_file(file.path());
        tracing::info!(file = %file.path().display(), removed = removed.is_ok(), "abandoned draft of the policy");
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn folder() -> PathBuf {
        let folder = std::env::temp_dir().join(format!("threshold-policy-file-{:x}", rand::random::<u64>()));
        std::fs::create_dir(&folder).unwrap();
        folder
    }

    /// Woken by leaving out the comparison, or by writing the file in place.
    #[test]
    fn a_file_is_replaced_as_a_whole_and_only_if_it_is_unchanged() {
        let folder = folder();
        let path = folder.join("policy.toml");
        std::fs::write(&path, "old").unwrap();
        std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o640)).unwrap();
        let file = PolicyFile::editable("old".to_owned(), path.clone(), false);
        let before = std::fs::File::open(&path).unwrap();
        assert!(matches!(file.save("new", "other"), Err(SaveError::Changed)));
        assert_eq!(std::fs::read_to_string(&path).unwrap(), "old");
        file.save("new", "old").unwrap();
        assert_eq!(std::fs::read_to_string(&path).unwrap(), "new");
        assert_eq!(std::fs::metadata(&path).unwrap().permissions().mode() & 0o777, 0o640);
        assert_eq!(std::io::read_to_string(before).unwrap(), "old", "a reader of the old file is not disturbed");
        assert_eq!(std::fs::read_dir(&folder).unwrap().count(), 1, "nothing is left beside it");
        assert!(matches!(PolicyFile::new("new".to_owned()).save("x", "new"), Err(SaveError::Changed)));
        std::fs::remove_dir_all(folder).unwrap();
    }

    /// Woken by passing every variable on, by looking for the name anywhere in the policy in force, and by comparing lines of text: a
    /// comment, another key or an escaped dollar sign would let a rule show the value.
    #[test]
    fn a_draft_reads_variables_only_where_the_policy_in_force_does() {
        let rule = |limit: &str| format!("# ${{PATH}}\n[[rule]]\nname = 'a'\nper = ['ip']\nlimit = \"{limit}\"");
        let file = PolicyFile::new(rule("${HOME}"));
        let found = |text: &str| file.review(text).findings.into_iter().map(|one| one.message).collect::<String>();
        // Both are set here. Of the second one a draft learns no more than of one that is not.
        assert!(!found(&rule("${HOME}")).contains("is not set"), "{}", found(&rule("${HOME}")));
        assert!(found(&rule("${PATH}")).contains("PATH is not set"), "{}", found(&rule("${PATH}")));
        let new = |text: &str| file.new_variable(text);
        assert_eq!(new(&rule("${HOME}")), None);
        assert_eq!(new(&rule("${PATH}")).as_deref(), Some("rule.limit"));
        assert_eq!(new(&rule("${HOME:-1/h}")).as_deref(), Some("rule.limit"));
        for name in ["${HOME}", "\\u0024{HOME}", "\\U00000024{HOME}", "$\\u007bHOME}"] {
            assert_eq!(new(&format!("[[rule]]\nname = \"{name}\"")).as_deref(), Some("rule.name"), "{name}");
        }
        assert_eq!(new("[[rule]]\nname = \"\"\"$\\\n{HOME}\"\"\"").as_deref(), Some("rule.name"));
        assert_eq!(new("[tiers.\"${HOME}\"]\nrequests = '1/h'").as_deref(), Some("tiers.${HOME}"));
    }

    /// A process that is killed in a save leaves its draft. Woken by leaving out either call, the age, or a part of the name.
    #[test]
    fn an_abandoned_draft_is_removed_at_the_next_start_and_save() {
        let folder = folder();
        let path = folder.join("policy.toml");
        std::fs::write(&path, "old").unwrap();
        let minutes_ago = std::time::SystemTime::now() - Duration::from_secs(120);
        let file = |name: &str, is_old: bool| {
            let file = std::fs::File::create(folder.join(name)).unwrap();
            if is_old {
                file.set_modified(minutes_ago).unwrap();
            }
        };
        let abandoned = "policy.toml.draft-0123456789abcdef";
        let kept = [
            "policy.toml.draft-0123456789abcdee",
            "policy.toml.draft-0123456789abcdeF",
            "policy.toml.draft-0123456789abcde",
            "policy.toml.draft-0123456789abcdef0",
            "policy.toml.0123456789abcdef",
            "other.toml.draft-0123456789abcdef",
        ];
        kept.iter().zip([false, true, true, true, true, true]).for_each(|(name, is_old)| file(name, is_old));
        std::os::unix::fs::symlink(folder.join(kept[4]), folder.join("policy.toml.draft-0123456789abcdff")).unwrap();
        file(abandoned, true);
        let policy = PolicyFile::editable("old".to_owned(), path, false);
        assert!(!folder.join(abandoned).exists(), "after the start");
        file(abandoned, true);
        policy.save("new", "old").unwrap();
        assert!(!folder.join(abandoned).exists(), "after a save");
        assert_eq!(std::fs::read_dir(&folder).unwrap().count(), kept.len() + 2, "nothing else is removed");
        std::fs::remove_dir_all(folder).unwrap();
    }

    /// Woken by replacing the link itself, or by leaving the umask's mode.
    #[test]
    fn a_link_stays_and_its_file_is_replaced() {
        let folder = folder();
        let (path, link) = (folder.join("policy.toml"), folder.join("link.toml"));
        std::fs::write(&path, "old").unwrap();
        std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o666)).unwrap();
        std::os::unix::fs::symlink(&path, &link).unwrap();
        PolicyFile::editable("old".to_owned(), link.clone(), false).save("new", "old").unwrap();
        assert!(std::fs::symlink_metadata(&link).unwrap().file_type().is_symlink());
        assert_eq!(std::fs::read_to_string(&path).unwrap(), "new");
        assert_eq!(std::fs::metadata(&path).unwrap().permissions().mode() & 0o777, 0o666);
        std::fs::remove_dir_all(folder).unwrap();
    }

    /// A former key in a comment was once shown. Woken by leaving out `comments::removed`, or `key_span`.
    #[test]
    fn a_key_is_not_shown_to_readers() {
        let text = "# key = 'a-secret-of-last-year'\n[identity.jwt]\nalg = 'HS256'\n\
            key = 'a-secret-of-at-least-32-characters-000' # not 'a-secret-of-last-year'\n";
        let shown = |text: &str| PolicyFile::new(text.to_owned()).text_for_readers();
        assert!(!shown(text).contains("a-secret") && shown(text).contains("alg = 'HS256'"), "{}", shown(text));
        let broken = format!("{text}\n[[rule");
        assert!(!shown(&broken).contains("a-secret"), "{}", shown(&broken));
    }

    #[test]
    fn rules_are_found_by_line() {
        let file = PolicyFile::new(
            "\n[[rule]]\nname = 'a'\nlimit = '1/h'\n\n[[rule]]\nname = 'b'\nlimit = '1/h'\n".to_owned(),
        );
        let lines: Vec<_> = file.lines_of_rules().iter().map(|(_, line)| *line).collect();
        assert_eq!(lines, [3, 7]);
    }
}
