//! Connects the HTTP client to a Unix socket.

use std::io::{ErrorKind, Read as _, Write as _};
use std::os::unix::net::UnixStream;
use std::path::PathBuf;

use ureq::unversioned::transport::{Buffers, ConnectionDetails, Connector, LazyBuffers, NextTimeout, Transport};
use ureq::{Error, Timeout};

/// Connects every request to the same socket.
#[derive(Debug)]
pub(super) struct UnixConnector {
    path: PathBuf,
}

impl UnixConnector {
    pub(super) fn new(path: impl Into<PathBuf>) -> Self {
        Self { path: path.into() }
    }
}

impl Connector for UnixConnector {
    type Out = UnixTransport;

    fn connect(&self, details: &ConnectionDetails<'_>, _: Option<()>) -> Result<Option<UnixTransport>, Error> {
        let stream = UnixStream::connect(&self.path)?;
        let config = details.config;
        let buffers = LazyBuffers::new(config.input_buffer_size(), config.output_buffer_size());
        Ok(Some(UnixTransport { stream, buffers }))
    }
}

/// One connection.
#[derive(Debug)]
pub(super) struct UnixTransport {
    stream: UnixStream,
    buffers: LazyBuffers,
}

impl Transport for UnixTransport {
    fn buffers(&mut self) -> &mut dyn Buffers {
        &mut self.buffers
    }

    fn transmit_output(&mut self, amount: usize, timeout: NextTimeout) -> Result<(), Error> {
        let timeout = timeout.for_write();
        // The socket option refuses a timeout of zero, and `not_zero` never returns one.
        self.stream.set_write_timeout(timeout.not_zero().map(|timeout| *timeout))?;
        let output = self.buffers.output().get(..amount).unwrap_or_default();
        self.stream.write_all(output).map_err(timed_out(timeout.reason))
    }

    fn await_input(&mut self, timeout: NextTimeout) -> Result<bool, Error> {
        let timeout = timeout.for_read();
        self.stream.set_read_timeout(timeout.not_zero().map(|timeout| *timeout))?;
        let amount = self.stream.read(self.buffers.input_append_buf()).map_err(timed_out(timeout.reason))?;
        self.buffers.input_appended(amount);
        Ok(amount > 0)
    }

    /// Never reused: a command makes few calls, and connecting to a socket of this machine costs nothing.
    fn is_open(&mut self) -> bool {
        false
    }
}

fn timed_out(reason: Timeout) -> impl Fn(std::io::Error) -> Error {
    move |error| match error.kind() {
        // Linux reports an expired socket timeout as EAGAIN.
        ErrorKind::WouldBlock | ErrorKind::TimedOut => Error::Timeout(reason),
        _ => error.into(),
    }
}
