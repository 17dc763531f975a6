//! A digest of a log's requests, which is the key of the digests on a page.

use std::hash::Hasher as _;
use std::net::IpAddr;

use siphasher::sip128::{Hasher128 as _, SipHasher13};
use threshold_core::DigestKey;

use crate::traffic::Request;

/// Digests requests in the order in which they are decided.
///
/// A page shows names as digests, and they should stay the same from run to run, so that two pages can be compared. A fixed key
/// would let every reader test guesses of a name. With a key from the log itself only its owner can do that, who knows the
/// names anyway.
#[derive(Default)]
pub(super) struct LogDigest(SipHasher13);

impl LogDigest {
    pub(super) fn add(&mut self, request: &Request<'_>) {
        self.0.write_u64(request.at.micros);
        match request.ip {
            Some(IpAddr::V4(ip)) => self.0.write_u32(ip.to_bits()),
            Some(IpAddr::V6(ip)) => self.0.write_u128(ip.to_bits()),
            None => self.0.write_u8(0),
        }
        for text in [request.path, request.user].into_iter().flatten() {
            self.0.write(text.as_bytes());
            // Not part of UTF-8, so that two neighbours cannot be read as one.
            self.0.write_u8(0xff);
        }
    }

    pub(super) fn key(&self) -> DigestKey {
        DigestKey::new(self.0.finish128().as_bytes())
    }
}
