//! Where the server listens: a TCP address or a Unix socket.

use std::fmt;
use std::io::ErrorKind;
use std::net::{SocketAddr, ToSocketAddrs as _};
use std::os::unix::fs::{FileTypeExt as _, PermissionsExt as _};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::str::FromStr;

use anyhow::{Context as _, bail};
use tokio::net::{TcpListener, UnixListener};

/// The permissions of a Unix socket: only its owner and its group may connect.
const SOCKET_MODE: u32 = 0o660;

/// An address to listen on.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Address {
    /// `HOST:PORT`.
    Tcp(String),
    /// `unix:PATH`.
    Unix(PathBuf),
}

/// A bound listener.
#[derive(Debug)]
pub(crate) enum Listener {
    Tcp(TcpListener),
    Unix(UnixListener, SocketFile),
}

/// The file of a Unix socket. It is removed when this is dropped.
#[derive(Debug)]
pub(crate) struct SocketFile(PathBuf);

impl FromStr for Address {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text.strip_prefix("unix:") {
            Some("") => Err("expected a path after unix:".to_owned()),
            Some(path) => Ok(Self::Unix(path.into())),
            None => match text.rsplit_once(':') {
                // A sign is a number to `parse`, and no port.
                Some((host, port)) if !host.is_empty() && port.bytes().all(|byte| byte.is_ascii_digit()) => {
                    match port.parse::<u16>() {
                        Ok(_) => Ok(Self::Tcp(text.to_owned())),
                        Err(_) => Err("the port must be from 1 to 65535, or 0 for a free one".to_owned()),
                    }
                }
                _ => Err("expected HOST:PORT, such as 127.0.0.1:8080, or unix:PATH".to_owned()),
            },
        }
    }
}

/// The variable whose token protects a listener that other machines can reach.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Guard {
    /// The token is set.
    Set,
    /// The token is missing; the variable has this name.
    Missing(&'static str),
}

impl Address {
    /// Returns the addresses to bind. Only loopback addresses are accepted without the token that guards them.
    pub(super) fn resolve(text: &str, guard: Guard) -> anyhow::Result<Vec<SocketAddr>> {
        let found = text.to_socket_addrs().with_context(|| format!("cannot resolve {text}"))?;
        let addresses: Vec<SocketAddr> = found.collect();
        if let Guard::Missing(variable) = guard
            // Every address that a name resolves to is checked: the first one could be loopback, and the second one
            // public.
            && let Some(open) = addresses.iter().find(|address| !address.ip().is_loopback())
        {
            bail!(
                "{open} can be reached from other machines, but {variable} is not set: set it, or listen on 127.0.0.1"
            );
        }
        Ok(addresses)
    }

    /// Checks that a listener could be bound here, and binds none. A server may be listening.
    pub(super) fn check(&self, guard: Guard) -> anyhow::Result<()> {
        match self {
            Self::Tcp(text) => Self::resolve(text, guard).map(drop),
            Self::Unix(path) => check_socket(path).map(drop),
        }
    }

    /// Binds a listener.
    pub(crate) async fn listen(&self, guard: Guard) -> anyhow::Result<Listener> {
        match self {
            Self::Tcp(text) => {
                // Bound to the addresses that were checked. To resolve the name again could give others.
                let listener = TcpListener::bind(Self::resolve(text, guard)?.as_slice()).await;
                Ok(Listener::Tcp(listener.with_context(|| format!("cannot listen on {text}"))?))
            }
            Self::Unix(path) => {
                remove_stale(path)?;
                let listener = UnixListener::bind(path).with_context(|| format!("cannot listen on {self}"))?;
                // Before the permissions are set: if that fails, the drop removes the file.
                let file = SocketFile(path.clone());
                std::fs::set_permissions(path, std::fs::Permissions::from_mode(SOCKET_MODE))?;
                Ok(Listener::Unix(listener, file))
            }
        }
    }
}

impl Listener {
    /// Returns where it listens on this machine: the port, or the path of the socket.
    pub(super) fn place(&self) -> String {
        match self {
            Self::Tcp(listener) => listener.local_addr().map_or(0, |address| address.port()).to_string(),
            Self::Unix(_, file) => file.path().display().to_string(),
        }
    }
}

/// Shows the address that it listens on.
impl fmt::Display for Listener {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Tcp(listener) => match listener.local_addr() {
                Ok(address) => address.fmt(f),
                Err(_) => f.write_str("unknown"),
            },
            Self::Unix(_, file) => write!(f, "unix:{}", file.path().display()),
        }
    }
}

impl fmt::Display for Address {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Tcp(text) => f.write_str(text),
            Self::Unix(path) => write!(f, "unix:{}", path.display()),
        }
    }
}

impl SocketFile {
    pub(super) fn path(&self) -> &Path {
        &self.0
    }
}

impl Drop for SocketFile {
    fn drop(&mut self) {
        let _ = std::fs::remove_file(&self.0);
    }
}

/// Returns whether there is a socket at this path. Fails if there is another file, or no folder for it.
fn check_socket(path: &Path) -> anyhow::Result<bool> {
    let folder = path.parent().filter(|folder| !folder.as_os_str().is_empty()).unwrap_or(Path::new("."));
    // A symbolic link is not followed: what it points to is not this server's to remove.
    let kind = match std::fs::symlink_metadata(path) {
        Ok(metadata) => metadata.file_type(),
        Err(error) if error.kind() == ErrorKind::NotFound && folder.is_dir() => return Ok(false),
        Err(error) if error.kind() == ErrorKind::NotFound => {
            bail!("the folder {} of the socket {} does not exist", folder.display(), path.display());
        }
        Err(error) => return Err(error).with_context(|| format!("cannot access {}", path.display())),
    };
    if !kind.is_socket() {
        bail!("{} exists and is not a socket", path.display());
    }
    Ok(true)
}

/// Removes the socket of a server that has ended. A socket that answers, or any other file, is left alone and is an error.
fn remove_stale(path: &Path) -> anyhow::Result<()> {
    if !check_socket(path)? {
        return Ok(());
    }
    match UnixStream::connect(path) {
        // Nothing listens: the server that made the file was killed before it could remove it.
        Err(error) if error.kind() == ErrorKind::ConnectionRefused => {
            std::fs::remove_file(path).with_context(|| format!("cannot remove {}", path.display()))
        }
        Err(error) => Err(error).with_context(|| format!("cannot find out whether {} is in use", path.display())),
        Ok(_) => bail!("another server listens on {}", path.display()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_are_parsed_or_refused() {
        assert_eq!("127.0.0.1:0".parse(), Ok(Address::Tcp("127.0.0.1:0".to_owned())));
        assert_eq!("[::1]:8080".parse(), Ok(Address::Tcp("[::1]:8080".to_owned())));
        assert_eq!("unix:/run/t.sock".parse(), Ok(Address::Unix("/run/t.sock".into())));
        for wrong in ["", "8080", ":8080", "127.0.0.1", "127.0.0.1:x", "127.0.0.1:99999", "unix:"] {
            assert!(wrong.parse::<Address>().is_err(), "{wrong}");
        }
    }
}
