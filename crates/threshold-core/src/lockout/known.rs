//! What an account knows of a device that has logged in: the tokens that it may show.

use arrayvec::ArrayVec;

use super::device::{Device, KNOWN_FOR};
use crate::codec::{BytesError, Reader, Writer};
use crate::key::TraceId;
use crate::time::Timestamp;

/// The tokens of one device at once: the one that it showed last, and those that were issued since and not shown yet. More
/// than three of them are in use only where answers were lost.
const MAX_TOKENS: usize = 4;

/// A known device. Its counters go by its number, whichever token it shows.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct KnownDevice {
    /// The nonce of its first token.
    pub(super) id: u64,
    /// In the order in which they were issued.
    tokens: ArrayVec<Token, MAX_TOKENS>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Token {
    nonce: u64,
    issued: Timestamp,
}

impl Token {
    fn known_until(&self) -> Timestamp {
        self.issued.plus(KNOWN_FOR)
    }
}

/// The number of a new token, never 0.
pub(super) fn nonce_of(id: TraceId) -> u64 {
    u64::try_from(id.to_u128() >> 64).unwrap_or(1).max(1)
}

impl KnownDevice {
    /// One without any token yet.
    pub(super) fn new(id: u64) -> Self {
        Self { id, tokens: ArrayVec::new() }
    }

    pub(super) fn known_until(&self) -> Timestamp {
        self.tokens.iter().map(Token::known_until).max().unwrap_or_default()
    }

    /// Whether a token is one of its own, and not too old.
    pub(super) fn has(&self, device: &Device, now: Timestamp) -> bool {
        self.tokens
            .iter()
            .any(|token| (token.nonce, token.issued) == (device.nonce, device.issued) && now < token.known_until())
    }

    /// A token was shown, so its device has it: those that were issued before it are no longer needed.
    pub(super) fn show(&mut self, device: &Device) {
        if let Some(at) = self.tokens.iter().position(|token| token.nonce == device.nonce) {
            self.tokens.drain(..at);
        }
    }

    /// Adds a token. Where there is no room, the oldest that was never shown goes.
    pub(super) fn issue(&mut self, nonce: u64, now: Timestamp) {
        if self.tokens.is_full() {
            self.tokens.remove(1);
        }
        let _ = self.tokens.try_push(Token { nonce, issued: now });
    }

    /// Drops tokens that are too old. Says whether any is left.
    pub(super) fn drop_expired(&mut self, now: Timestamp) -> bool {
        self.tokens.retain(|token| now < token.known_until());
        !self.tokens.is_empty()
    }

    pub(super) fn write(&self, out: &mut Writer) {
        out.number(self.id);
        out.number(self.tokens.len() as u64);
        for token in &self.tokens {
            out.number(token.nonce);
            out.number(token.issued.micros());
        }
    }

    pub(super) fn read(from: &mut Reader<'_>) -> Result<Self, BytesError> {
        let mut known = Self::new(from.number()?);
        for _ in 0..from.count(MAX_TOKENS)? {
            let token = Token { nonce: from.number()?, issued: Timestamp::from_micros(from.number()?) };
            let _ = known.tokens.try_push(token);
        }
        Ok(known)
    }
}
