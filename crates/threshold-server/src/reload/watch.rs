//! Whether files have come to say something else.

use std::fs::Metadata;
use std::hash::{BuildHasher as _, RandomState};
use std::os::unix::fs::MetadataExt as _;
use std::path::PathBuf;
use std::time::{Duration, SystemTime};

use threshold_core::policy::MAX_FILE;

use crate::source::read_bytes;

/// A file that was written so recently may be written again without its times telling.
const SETTLED: Duration = Duration::from_secs(3);

/// What files hold, one after the other, or why one of them cannot be read.
pub(super) type Contents = Result<Vec<Vec<u8>>, String>;

/// What is known of some files that belong together. Their contents are kept as a digest: one of them may be a key.
#[derive(Debug)]
pub(super) struct Watch {
    hasher: RandomState,
    /// How they looked when they were last read, if that can be trusted.
    seen: Option<Vec<Looks>>,
    /// The contents that are in force, or that were refused.
    known: u64,
    /// Other contents that were seen once.
    pending: Option<u64>,
}

/// Files as they were found.
#[derive(Debug)]
pub(super) struct Found {
    looks: Option<Vec<Looks>>,
    contents: Contents,
}

/// What tells one state of a file from another without reading it. Symbolic links are followed, so that a mounted
/// directory whose link is moved looks different too.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Looks {
    device: u64,
    inode: u64,
    size: u64,
    modified: Option<SystemTime>,
}

impl Watch {
    /// A watch over files that hold this.
    pub(super) fn new(contents: &Contents) -> Self {
        let hasher = RandomState::new();
        Self { known: hasher.hash_one(contents), hasher, seen: None, pending: None }
    }

    /// How the files look if there is nothing to read in them.
    pub(super) fn trusted(&self) -> Option<Vec<Looks>> {
        self.seen.clone().filter(|_| self.pending.is_none())
    }

    /// What the files have come to say, if that is something else.
    ///
    /// It counts when it is there twice in a row: an editor that empties a file before it writes it anew would else leave
    /// the server without a policy for a moment, and a certificate comes before its key.
    pub(super) fn take(&mut self, Found { looks, contents }: Found, now: SystemTime) -> Option<Contents> {
        self.seen = looks.filter(|looks| looks.iter().all(|looks| looks.is_settled(now)));
        let found = self.hasher.hash_one(&contents);
        if found == self.known {
            self.pending = None;
            return None;
        }
        if self.pending != Some(found) {
            self.pending = Some(found);
            return None;
        }
        self.pending = None;
        self.known = found;
        Some(contents)
    }
}

impl Found {
    /// Reads the files, unless they look as they did.
    pub(super) fn unless(paths: &[PathBuf], seen: Option<&[Looks]>) -> Option<Self> {
        let looks = |path: &PathBuf| std::fs::metadata(path).ok().map(|metadata| Looks::of(&metadata));
        let looks: Option<Vec<Looks>> = paths.iter().map(looks).collect();
        if seen.is_some() && looks.as_deref() == seen {
            return None;
        }
        Some(Self { looks, contents: read(paths) })
    }
}

/// Reads all of the files.
pub(super) fn read(paths: &[PathBuf]) -> Contents {
    paths.iter().map(|path| read_bytes(path, MAX_FILE).map_err(|error| format!("{error:#}"))).collect()
}

impl Looks {
    fn of(metadata: &Metadata) -> Self {
        Self {
            device: metadata.dev(),
            inode: metadata.ino(),
            size: metadata.size(),
            modified: metadata.modified().ok(),
        }
    }

    fn is_settled(&self, now: SystemTime) -> bool {
        self.modified.and_then(|modified| now.duration_since(modified).ok()).is_some_and(|age| age >= SETTLED)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A file that vanishes with the test.
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
        let found = Found::unless(std::slice::from_ref(&file.0), watch.trusted().as_deref());
        found.is_some_and(|found| watch.take(found, now).is_some())
    }

    #[test]
    fn a_change_counts_when_it_is_there_twice() {
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
        // Emptied and written anew: the empty text was there only once.
        assert!(!look(""));
        assert!(!look("b"));
        assert!(!look("c"));
        assert!(!look("d"));
        assert!(look("d"));
    }

    #[test]
    fn a_file_that_goes_and_comes_back_is_noticed() {
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
    fn a_file_that_was_written_just_now_is_read_again_though_it_looks_the_same() {
        let file = Scratch::new("racy");
        file.write("a");
        let mut watch = watching("a");
        let written = std::fs::metadata(&file.0).unwrap().modified().unwrap();
        assert!(!look(&mut watch, &file, written));
        // The same size at the same time, as a coarse clock would tell it.
        file.write("b");
        let same = || std::fs::File::options().write(true).open(&file.0).unwrap().set_modified(written).unwrap();
        same();
        assert!(!look(&mut watch, &file, written));
        assert!(look(&mut watch, &file, written + SETTLED));
        // Once it has settled, its looks are enough.
        file.write("c");
        same();
        assert!(!look(&mut watch, &file, written + SETTLED));
        assert!(watch.pending.is_none());
    }
}
