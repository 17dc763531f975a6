//! Detects changed files by their metadata and by a digest of their contents.

use std::fs::Metadata;
use std::hash::{BuildHasher as _, RandomState};
use std::os::unix::fs::MetadataExt as _;
use std::path::PathBuf;
use std::time::{Duration, SystemTime};

use threshold_core::policy::MAX_FILE;
use threshold_limiter::files::Trust;

use threshold_rehearsal::source::read_trusted;

/// Metadata of a file that was modified more recently than this is not trusted: it may be modified again within the resolution
/// of the file system's timestamps, which is two seconds on FAT.
const MIN_AGE: Duration = Duration::from_secs(3);

/// The contents of files, or why one of them cannot be read.
pub(super) type Contents = Result<Vec<Vec<u8>>, String>;

/// The known state of files that are loaded together. Contents are kept as a digest, because one of them may be a private key.
#[derive(Debug)]
pub(super) struct Watch {
    hasher: RandomState,
    /// The metadata when the files were last read, if it can be trusted.
    seen: Option<Vec<FileStamp>>,
    /// The digest of the contents that were last loaded or refused.
    known: u64,
    /// The digest of other contents that were seen once.
    pending: Option<u64>,
}

/// The metadata and contents of files.
#[derive(Debug)]
pub(super) struct Found {
    stamps: Option<Vec<FileStamp>>,
    contents: Contents,
}

/// The metadata by which a change is detected without reading the file. Symbolic links are followed: Kubernetes updates a
/// mounted ConfigMap by replacing a link.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct FileStamp {
    device: u64,
    inode: u64,
    size: u64,
    modified: Option<SystemTime>,
}

impl Watch {
    /// A watch of files whose contents are known.
    pub(super) fn new(contents: &Contents) -> Self {
        // Keyed at random: the digest of a private key in memory then says nothing about the key.
        let hasher = RandomState::new();
        Self { known: hasher.hash_one(contents), hasher, seen: None, pending: None }
    }

    /// Returns the metadata with which the files need not be read.
    pub(super) fn trusted(&self) -> Option<Vec<FileStamp>> {
        // A change that was seen once must be read again, although its metadata is the same as then.
        self.seen.clone().filter(|_| self.pending.is_none())
    }

    /// Returns the contents if they have changed.
    ///
    /// A change counts once it was seen twice in a row: an editor may truncate a file before it writes it, and a certificate
    /// may be written before its key.
    pub(super) fn take(&mut self, Found { stamps, contents }: Found, now: SystemTime) -> Option<Contents> {
        // The metadata was read before the contents. If the file changes between the two, its metadata differs at the
        // next check.
        self.seen = stamps.filter(|stamps| stamps.iter().all(|stamp| stamp.is_settled(now)));
        // An error is hashed like contents, so that a file that cannot be read is reported once, and seen again when
        // it can.
        let found = self.hasher.hash_one(&contents);
        // Also ends a pending change: the file was restored before the change counted.
        if found == self.known {
            self.pending = None;
            return None;
        }
        if self.pending != Some(found) {
            self.pending = Some(found);
            return None;
        }
        self.pending = None;
        // Noted also if the contents turn out to be unusable, so that an error is reported once and not twice a
        // second.
        self.known = found;
        Some(contents)
    }
}

impl Found {
    /// Reads the files, unless their metadata is unchanged.
    pub(super) fn unless(paths: &[PathBuf], trust: Trust, seen: Option<&[FileStamp]>) -> Option<Self> {
        let stamps = |path: &PathBuf| std::fs::metadata(path).ok().map(|metadata| FileStamp::of(&metadata));
        let stamps: Option<Vec<FileStamp>> = paths.iter().map(stamps).collect();
        if seen.is_some() && stamps.as_deref() == seen {
            return None;
        }
        Some(Self { stamps, contents: read(paths, trust) })
    }
}

/// Reads all of the files.
pub(super) fn read(paths: &[PathBuf], trust: Trust) -> Contents {
    paths.iter().map(|path| read_trusted(path, trust, MAX_FILE).map_err(|error| format!("{error:#}"))).collect()
}

impl FileStamp {
    fn of(metadata: &Metadata) -> Self {
        Self {
            device: metadata.dev(),
            inode: metadata.ino(),
            size: metadata.size(),
            modified: metadata.modified().ok(),
        }
    }

    fn is_settled(&self, now: SystemTime) -> bool {
        // A time in the future, from another machine's clock, never settles. The file is then read at every check,
        // which is always right.
        self.modified.and_then(|modified| now.duration_since(modified).ok()).is_some_and(|age| age >= MIN_AGE)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A file that is removed after the test.
    struct Scratch(PathBuf);

    impl Scratch {
        fn new(name: &str) -> Self {
            Self(std::env::temp_dir().join(format!("threshold-watch-{}-{name}", std::process::id())))
        }

        fn write(&self, text: &str) {
            std::fs::write(&self.0, text).unwrap();
        }
    }

    impl Drop for Scratch {
        fn drop(&mut self) {
            let _ = std::fs::remove_file(&self.0);
        }
    }

    fn watching(text: &str) -> Watch {
        Watch::new(&Ok(vec![text.as_bytes().to_owned()]))
    }

    fn look(watch: &mut Watch, file: &Scratch, now: SystemTime) -> bool {
        let found = Found::unless(std::slice::from_ref(&file.0), Trust::Settings, watch.trusted().as_deref());
        found.is_some_and(|found| watch.take(found, now).is_some())
    }

    #[test]
    fn a_change_counts_once_it_was_seen_twice() {
        let file = Scratch::new("twice");
        let mut watch = watching("a");
        let mut look = |text: &str| {
            file.write(text);
            look(&mut watch, &file, SystemTime::now())
        };
        assert!(!look("a"));
        assert!(!look("b"));
        assert!(look("b"));
        assert!(!look("b"));
        // Truncated and rewritten: the empty text was seen only once.
        assert!(!look(""));
        assert!(!look("b"));
        assert!(!look("c"));
        assert!(!look("d"));
        assert!(look("d"));
    }

    #[test]
    fn a_file_that_is_removed_and_restored_is_a_change() {
        let file = Scratch::new("gone");
        let mut watch = watching("a");
        let mut look = || look(&mut watch, &file, SystemTime::now());
        assert!(!look());
        assert!(look());
        assert!(!look());
        file.write("a");
        assert!(!look());
        assert!(look());
    }

    #[test]
    fn a_recently_modified_file_is_read_again_although_its_metadata_is_unchanged() {
        let file = Scratch::new("racy");
        file.write("a");
        let mut watch = watching("a");
        let written = std::fs::metadata(&file.0).unwrap().modified().unwrap();
        assert!(!look(&mut watch, &file, written));
        // The same size and timestamp, as with a coarse clock.
        file.write("b");
        let same = || std::fs::File::options().write(true).open(&file.0).unwrap().set_modified(written).unwrap();
        same();
        assert!(!look(&mut watch, &file, written));
        assert!(look(&mut watch, &file, written + MIN_AGE));
        // Once the timestamp is old enough, the metadata is trusted.
        file.write("c");
        same();
        assert!(!look(&mut watch, &file, written + MIN_AGE));
        assert!(watch.pending.is_none());
    }
}
