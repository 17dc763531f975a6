//! A known device of an account, and its valid tokens.

use arrayvec::ArrayVec;

use super::device::{Device, KNOWN_FOR};
use crate::codec::{BytesError, Reader, Writer};
use crate::key::TraceId;
use crate::time::Timestamp;

/// The largest number of tokens of one device: the one that it used last, and those issued since and not used yet. There are
/// more than three only where answers were lost.
const MAX_TOKENS: usize = 4;

/// A known device. Its counters are found by its id, whichever token it uses.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct KnownDevice {
    /// The nonce of its first token.
    pub(super) id: u64,
    /// In the order in which they were issued, so the first one is the one used last.
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

/// Returns the number of a new token, never 0, which stands for unknown devices.
pub(super) fn nonce_of(id: TraceId) -> u64 {
    // Half of a random id is enough: a nonce is compared only with those of one account, and the token is signed.
    u64::try_from(id.to_u128() >> 64).unwrap_or(1).max(1)
}

impl KnownDevice {
    /// Makes a device without a token.
    pub(super) fn new(id: u64) -> Self {
        Self { id, tokens: ArrayVec::new() }
    }

    pub(super) fn known_until(&self) -> Timestamp {
        self.tokens.iter().map(Token::known_until).max().unwrap_or_default()
    }

    /// Returns whether a token is one of its own and has not expired.
    pub(super) fn has(&self, device: &Device, now: Timestamp) -> bool {
        self.tokens
            .iter()
            .any(|token| (token.nonce, token.issued) == (device.nonce, device.issued) && now < token.known_until())
    }

    /// Drops the tokens issued before one that was used: the device has that one, and no longer needs them.
    pub(super) fn show(&mut self, device: &Device) {
        // A stolen older token ends here too: it is worth nothing once the owner has used a newer one.
        if let Some(at) = self.tokens.iter().position(|token| token.nonce == device.nonce) {
            self.tokens.drain(..at);
        }
    }

    /// Adds a token. Without room, it replaces the oldest one that was never used.
    pub(super) fn issue(&mut self, nonce: u64, now: Timestamp) {
        // The first token is the one that the device used last, so it is certain to have that one.
        if self.tokens.is_full() {
            self.tokens.remove(1);
        }
        let _ = self.tokens.try_push(Token { nonce, issued: now });
    }

    /// Drops expired tokens. Returns whether any is left.
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
            // Fits: `count` refuses more than `MAX_TOKENS`.
            let _ = known.tokens.try_push(token);
        }
        Ok(known)
    }
}
