//! The history of a partition of a store, by which a charge that the store has lost is not given back to what came after.

use crate::codec::{BytesError, Reader, Writer};

/// Which history of a partition a charge belongs to: a random number that the partition keeps beside its records since it was first
/// used. A store that has lost its records has lost the number too, and begins another history.
///
/// The default is that of a store with one history. It is never refused.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct History(u64);

impl History {
    /// Numbers in scripts are doubles, which are exact below this.
    const LARGEST: u64 = 1 << 53;

    /// Makes a history of a random number.
    #[must_use]
    pub const fn from_random(number: u64) -> Self {
        // Shifted, so that every value is as likely, and never the default.
        Self((number >> 11) | 1)
    }

    /// Returns the eight bytes that a store keeps.
    #[must_use]
    pub const fn to_bytes(self) -> [u8; 8] {
        self.0.to_be_bytes()
    }

    /// Reads what [`to_bytes`](Self::to_bytes) returned.
    #[must_use]
    pub const fn from_bytes(bytes: [u8; 8]) -> Self {
        Self(u64::from_be_bytes(bytes))
    }

    /// Returns whether what was charged in this history may be given back to a partition that has the `present` one.
    #[must_use]
    pub fn counts_in(self, present: Self) -> bool {
        self == Self::default() || self == present
    }

    pub(super) fn write_after(self, before: Self, out: &mut Writer) {
        out.number(self.0 ^ before.0);
    }

    pub(super) fn read_after(before: Self, from: &mut Reader<'_>) -> Result<Self, BytesError> {
        let number = from.number()? ^ before.0;
        if number < Self::LARGEST { Ok(Self(number)) } else { Err(BytesError::Malformed("history")) }
    }
}
