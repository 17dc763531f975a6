//! Puts a changed policy file in force while the server runs. A bad one is reported, and the old one stays.

use std::fs::Metadata;
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use crate::door::App;
use crate::source::Source;

/// How often the file is looked at. A change must be there twice, so it is in force a second after it was written.
const EVERY: Duration = Duration::from_millis(500);
/// A file that was written so recently may be written again without its times telling.
const SETTLED: Duration = Duration::from_secs(3);

/// Watches one policy file.
pub(crate) struct Reloader {
    path: PathBuf,
    app: Arc<App>,
    watch: Watch,
}

/// What is known of the file.
#[derive(Debug)]
struct Watch {
    /// How it looked when it was last read, if that can be trusted.
    seen: Option<Looks>,
    /// The text that is in force, or that was refused.
    known: Result<String, String>,
    /// Another text that was seen once.
    pending: Option<Result<String, String>>,
}

/// The file as it was found.
#[derive(Debug)]
struct Found {
    looks: Option<Looks>,
    text: Result<String, String>,
}

/// What tells one state of a file from another without reading it. Symbolic links are followed, so that a mounted
/// directory whose link is moved looks different too.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Looks {
    device: u64,
    inode: u64,
    size: u64,
    modified: Option<SystemTime>,
}

impl Reloader {
    pub(crate) fn new(path: PathBuf, text: String, app: Arc<App>) -> Self {
        Self { path, app, watch: Watch { seen: None, known: Ok(text), pending: None } }
    }

    /// Looks at the file once, half a second from now; never, if there is none. Dropped before its end, it has changed
    /// nothing.
    pub(crate) async fn look(reloader: &mut Option<Self>) {
        let Some(reloader) = reloader else { return std::future::pending().await };
        tokio::time::sleep(EVERY).await;
        let (path, seen) = (reloader.path.clone(), reloader.watch.trusted());
        // A file system may take its time, and requests shall not wait for it.
        let found = tokio::task::spawn_blocking(move || Found::unless(&path, seen)).await;
        if let Ok(Some(found)) = found
            && reloader.watch.take(found, SystemTime::now())
        {
            reloader.load();
        }
    }

    /// Loads the file now, changed or not.
    pub(crate) async fn now(&mut self) {
        let path = self.path.clone();
        let read = tokio::task::spawn_blocking(move || read(&path)).await;
        if let Ok(read) = read {
            self.watch = Watch { seen: None, known: read, pending: None };
            self.load();
        }
    }

    /// Puts what is known in force, or says why not.
    fn load(&self) {
        let name = self.path.display().to_string();
        let parsed = match &self.watch.known {
            Ok(text) => {
                Source { name: name.clone(), text: text.clone() }.policy().map_err(|error| format!("{error:#}"))
            }
            Err(error) => Err(error.clone()),
        };
        match parsed {
            Ok(policy) => {
                let limiter = &self.app.desk.limiter;
                if policy.memory() != limiter.policy().memory() {
                    tracing::warn!(policy = name, "[memory] changed: that takes effect when the server starts again");
                }
                let rules = policy.rules().len();
                let generation = self.app.desk.swap(policy);
                self.app.health.recover();
                tracing::info!(policy = name, rules, generation, "a new policy is in force");
            }
            Err(error) => {
                self.app.health.degrade(format!("the policy file is not in force: {error}"));
                tracing::error!(policy = name, "the old policy stays in force: {error}");
            }
        }
    }
}

impl Watch {
    /// How the file looks if there is nothing to read in it.
    fn trusted(&self) -> Option<Looks> {
        self.seen.filter(|_| self.pending.is_none())
    }

    /// Whether the file has come to say something else.
    ///
    /// A text counts when it is there twice in a row: an editor that empties a file before it writes it anew would else
    /// leave the server without a policy for a moment.
    fn take(&mut self, Found { looks, text }: Found, now: SystemTime) -> bool {
        self.seen = looks.filter(|looks| looks.is_settled(now));
        if text == self.known {
            self.pending = None;
            return false;
        }
        if self.pending.as_ref() == Some(&text) {
            self.pending = None;
            self.known = text;
            return true;
        }
        self.pending = Some(text);
        false
    }
}

impl Found {
    /// Reads the file, unless it looks as it did.
    fn unless(path: &Path, seen: Option<Looks>) -> Option<Self> {
        let looks = std::fs::metadata(path).ok().map(|metadata| Looks::of(&metadata));
        if seen.is_some() && looks == seen {
            return None;
        }
        Some(Self { looks, text: read(path) })
    }
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

fn read(path: &Path) -> Result<String, String> {
    Source::read(path).map(|source| source.text).map_err(|error| format!("{error:#}"))
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
        Watch { seen: None, known: Ok(text.to_owned()), pending: None }
    }

    fn look(watch: &mut Watch, file: &Scratch, now: SystemTime) -> bool {
        Found::unless(&file.0, watch.trusted()).is_some_and(|found| watch.take(found, now))
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
