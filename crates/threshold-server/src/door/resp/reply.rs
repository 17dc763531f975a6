//! Encodes RESP replies, in version 2 or 3 of the protocol.

use std::fmt;

/// The version of the protocol that a client has chosen.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Version {
    Resp2,
    Resp3,
}

impl Version {
    pub(super) const fn number(self) -> i64 {
        match self {
            Self::Resp2 => 2,
            Self::Resp3 => 3,
        }
    }
}

/// Replies that are not written yet.
#[derive(Debug)]
pub(super) struct Replies {
    pub(super) bytes: Vec<u8>,
    pub(super) version: Version,
}

impl Default for Replies {
    fn default() -> Self {
        Self { bytes: Vec::new(), version: Version::Resp2 }
    }
}

impl Replies {
    pub(super) fn simple(&mut self, text: &str) {
        self.bytes.push(b'+');
        self.bytes.extend_from_slice(text.as_bytes());
        self.line_end();
    }

    /// Replies with an error, whose first word is a code for programs.
    pub(super) fn error(&mut self, error: impl fmt::Display) {
        self.bytes.push(b'-');
        // An error may quote what the client sent, and a line break would end it.
        let text = error.to_string().replace(['\r', '\n'], " ");
        self.bytes.extend_from_slice(text.as_bytes());
        self.line_end();
    }

    pub(super) fn integer(&mut self, number: i64) {
        self.headed(b':', number);
    }

    pub(super) fn bulk(&mut self, bytes: &[u8]) {
        self.headed(b'$', length(bytes.len()));
        self.bytes.extend_from_slice(bytes);
        self.line_end();
    }

    /// A text for people to read.
    pub(super) fn verbatim(&mut self, text: &str) {
        match self.version {
            Version::Resp2 => self.bulk(text.as_bytes()),
            Version::Resp3 => {
                self.headed(b'=', length(text.len().saturating_add(4)));
                self.bytes.extend_from_slice(b"txt:");
                self.bytes.extend_from_slice(text.as_bytes());
                self.line_end();
            }
        }
    }

    /// Begins an array of this many values.
    pub(super) fn array(&mut self, values: usize) {
        self.headed(b'*', length(values));
    }

    /// Begins a map of this many pairs; in version 2 an array of keys and values.
    pub(super) fn map(&mut self, pairs: usize) {
        match self.version {
            Version::Resp2 => self.array(pairs.saturating_mul(2)),
            Version::Resp3 => self.headed(b'%', length(pairs)),
        }
    }

    /// Begins a set of this many values; in version 2 an array.
    pub(super) fn set(&mut self, values: usize) {
        match self.version {
            Version::Resp2 => self.array(values),
            Version::Resp3 => self.headed(b'~', length(values)),
        }
    }

    pub(super) fn null(&mut self) {
        match self.version {
            Version::Resp2 => self.bytes.extend_from_slice(b"$-1\r\n"),
            Version::Resp3 => self.bytes.extend_from_slice(b"_\r\n"),
        }
    }

    fn headed(&mut self, kind: u8, number: i64) {
        self.bytes.push(kind);
        self.bytes.extend_from_slice(itoa::Buffer::new().format(number).as_bytes());
        self.line_end();
    }

    fn line_end(&mut self) {
        self.bytes.extend_from_slice(b"\r\n");
    }
}

fn length(length: usize) -> i64 {
    i64::try_from(length).unwrap_or(i64::MAX)
}
