//! Opens the files that a program depends on: only regular ones, and only if nobody can have planted them.
//!
//! A named pipe in place of a file would block its reader, and the file of another user may hold whatever that user likes.

use std::fs::{File, Metadata, OpenOptions};
use std::io::{self, ErrorKind, Read as _};
#[cfg(unix)]
use std::os::unix::fs::{MetadataExt as _, OpenOptionsExt as _};
use std::path::Path;

/// What is demanded of a file, apart from being a regular one.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Trust {
    /// Nothing else: an operator names the file, and reads it as any file.
    Any,
    /// That not everybody can write to it: a policy, which may belong to the user that deploys it.
    Settings,
    /// That it belongs to this user or to root, and nobody else can write to it: keys and certificates. Kubernetes mounts them as
    /// symbolic links to files of root that a group can read.
    Keys,
    /// As for keys, and that nobody else can read it: the secret.
    Secret,
    /// As for keys, and that it is no symbolic link: the files of a journal, which the program itself creates. A group may write to
    /// them if this process is in it, as `fsGroup` of Kubernetes makes it.
    Own,
}

/// The permissions to write that group and others have.
#[cfg(unix)]
const GROUP_AND_OTHERS_WRITE: u32 = 0o022;
#[cfg(unix)]
const OTHERS_WRITE: u32 = 0o002;
#[cfg(unix)]
const STICKY: u32 = 0o1000;

/// Opens a file to read it, without waiting for the writer of a named pipe.
///
/// # Errors
/// Fails if the file cannot be opened, or is not what is demanded. The message says how to mend that.
pub fn open(path: &Path, trust: Trust) -> io::Result<File> {
    let mut options = OpenOptions::new();
    options.read(true);
    #[cfg(unix)]
    options.custom_flags(flags(trust));
    let file = options.open(path).map_err(|error| refused_link(path, trust, error))?;
    // Of the open file: its name may lead to another one by now.
    judge(path, &file.metadata()?, trust)?;
    Ok(file)
}

/// Reads a file of at most so many bytes. Returns one byte more of a larger one.
///
/// # Errors
/// Fails as [`open`] does, and if the file cannot be read.
pub fn read(path: &Path, trust: Trust, at_most: usize) -> io::Result<Vec<u8>> {
    let limit = u64::try_from(at_most).unwrap_or(u64::MAX).saturating_add(1);
    let mut bytes = Vec::new();
    open(path, trust)?.take(limit).read_to_end(&mut bytes)?;
    Ok(bytes)
}

/// Checks a file that somebody else opens by its name, as SQLite does. A missing one is sound.
///
/// It is not opened here: closing it would end the locks that SQLite has on it.
///
/// # Errors
/// Fails if the file is not what is demanded, or cannot be looked at.
pub fn check(path: &Path, trust: Trust) -> io::Result<()> {
    let metadata = if trust == Trust::Own { path.symlink_metadata() } else { path.metadata() };
    match metadata {
        Ok(metadata) => judge(path, &metadata, trust),
        Err(error) if matches!(error.kind(), ErrorKind::NotFound | ErrorKind::NotADirectory) => Ok(()),
        Err(error) => Err(error),
    }
}

/// Returns why others can replace the files of a folder, and how to mend that.
#[cfg(unix)]
#[must_use]
pub fn unsafe_folder(folder: &Path) -> Option<String> {
    let metadata = folder.metadata().ok()?;
    let (mode, owner, own) = (metadata.mode(), metadata.uid(), rustix::process::geteuid().as_raw());
    let name = folder.display();
    if owner != own && owner != 0 {
        return Some(format!(
            "the folder {name} belongs to user {owner}, who can replace the files in it: run chown {own} {name}"
        ));
    }
    // In a sticky folder, as /tmp is, nobody can replace the file of another user.
    (mode & OTHERS_WRITE != 0 && mode & STICKY == 0).then(|| {
        format!(
            "the folder {name} has the permissions {:o}, so that everybody can replace the files in it: run chmod o-w {name}",
            mode & 0o7777
        )
    })
}

#[cfg(unix)]
fn flags(trust: Trust) -> i32 {
    use rustix::fs::OFlags;
    let links = if trust == Trust::Own { OFlags::NOFOLLOW } else { OFlags::empty() };
    (OFlags::NONBLOCK | OFlags::NOCTTY | links).bits().cast_signed()
}

/// Replaces the error of a link that is not followed, which speaks of too many links.
fn refused_link(path: &Path, trust: Trust, error: io::Error) -> io::Error {
    let is_link = trust == Trust::Own && path.symlink_metadata().is_ok_and(|metadata| metadata.is_symlink());
    if is_link { unfit(path, "a symbolic link") } else { error }
}

fn judge(path: &Path, metadata: &Metadata, trust: Trust) -> io::Result<()> {
    if !metadata.is_file() {
        return Err(unfit(path, kind(metadata)));
    }
    #[cfg(unix)]
    judge_owner(path, metadata, trust)?;
    Ok(())
}

#[cfg(unix)]
fn judge_owner(path: &Path, metadata: &Metadata, trust: Trust) -> io::Result<()> {
    let (mode, owner, own) = (metadata.mode(), metadata.uid(), rustix::process::geteuid().as_raw());
    let name = path.display();
    let (must_be_owned, refused) = match trust {
        Trust::Any => (false, 0),
        Trust::Settings => (false, OTHERS_WRITE),
        Trust::Own if is_own_group(metadata.gid()) => (true, OTHERS_WRITE),
        Trust::Keys | Trust::Own => (true, GROUP_AND_OTHERS_WRITE),
        Trust::Secret => (true, 0o077),
    };
    if must_be_owned && owner != own && owner != 0 && !is_served(path, owner) {
        return Err(io::Error::other(format!(
            "it belongs to user {owner}, and this process runs as user {own}: remove it, or, if nobody has planted it, run chown \
             {own} {name}"
        )));
    }
    let permissions = mode & 0o777;
    match mode & refused {
        0 => Ok(()),
        _ if trust == Trust::Secret => Err(io::Error::other(format!(
            "it has the permissions {permissions:03o}, so that others can use the secret: run chmod 600 {name}"
        ))),
        _ => Err(io::Error::other(format!(
            "it has the permissions {permissions:03o}, so that others can write to it: if nobody has, run chmod go-w {name}"
        ))),
    }
}

/// Returns whether root looks after the file of another user, as in `sudo threshold restore`: one in a folder of that user, who can
/// put any file there.
#[cfg(unix)]
fn is_served(path: &Path, owner: u32) -> bool {
    let folder = path.parent().filter(|folder| !folder.as_os_str().is_empty()).unwrap_or(Path::new("."));
    rustix::process::geteuid().is_root() && folder.metadata().is_ok_and(|folder| folder.uid() == owner)
}

#[cfg(unix)]
fn is_own_group(group: u32) -> bool {
    use rustix::process::{getegid, getgroups};
    let others = getgroups().unwrap_or_default();
    std::iter::once(getegid()).chain(others).any(|own| own.as_raw() == group)
}

fn unfit(path: &Path, kind: &str) -> io::Error {
    let name = path.display();
    io::Error::other(format!("it is {kind} and not a regular file: remove it (rm {name}), or name another"))
}

fn kind(metadata: &Metadata) -> &'static str {
    #[cfg(unix)]
    {
        use std::os::unix::fs::FileTypeExt as _;
        let kind = metadata.file_type();
        if kind.is_fifo() {
            return "a named pipe";
        }
        if kind.is_socket() {
            return "a socket";
        }
        if kind.is_block_device() || kind.is_char_device() {
            return "a device";
        }
    }
    if metadata.is_symlink() {
        "a symbolic link"
    } else if metadata.is_dir() {
        "a folder"
    } else {
        "no file"
    }
}
