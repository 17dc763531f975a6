//! The history of a partition of a store, by which a charge that the store has lost is not given back to what came after.

use crate::codec::{BytesError, Reader, Writer};

/// Which history of a partition a charge belongs to: a random number that the partition keeps beside its records since it was first
/// used. A store that has lost its records has lost the number too, and begins another history.
///
/// The default is that of a store with one history. A store with several does not know in which of them such a charge is, and gives
/// nothing back for it.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct History {
    number: u64,
    /// The connection over which this node heard of it; 0 if it was read from bytes. Neither sent nor stored.
    heard_over: u64,
}

impl History {
    /// Numbers in scripts are doubles, which are exact below this.
    const LARGEST: u64 = 1 << 53;

    /// Makes a history of a random number.
    #[must_use]
    pub const fn from_random(number: u64) -> Self {
        // Shifted, so that every value is as likely, and never the default.
        Self::of((number >> 11) | 1)
    }

    /// Returns the eight bytes that a store keeps.
    #[must_use]
    pub const fn to_bytes(self) -> [u8; 8] {
        self.number.to_be_bytes()
    }

    /// Reads what [`to_bytes`](Self::to_bytes) returned.
    #[must_use]
    pub const fn from_bytes(bytes: [u8; 8]) -> Self {
        Self::of(u64::from_be_bytes(bytes))
    }

    const fn of(number: u64) -> Self {
        Self { number, heard_over: 0 }
    }

    /// Returns this history as it was heard over a connection of this node, which has a number above 0.
    #[must_use]
    pub const fn heard_over(self, connection: u64) -> Self {
        Self { heard_over: connection, ..self }
    }

    pub(super) const fn connection(self) -> u64 {
        self.heard_over
    }

    /// Returns whether what was charged in this history may be given back to a partition that has the `present` one.
    #[must_use]
    pub fn counts_in(self, present: Self) -> bool {
        self.number != 0 && self.number == present.number
    }

    pub(crate) fn write_after(self, before: Self, out: &mut Writer) {
        out.number(self.number ^ before.number);
    }

    pub(crate) fn read_after(before: Self, from: &mut Reader<'_>) -> Result<Self, BytesError> {
        let number = from.number()? ^ before.number;
        if number < Self::LARGEST { Ok(Self::of(number)) } else { Err(BytesError::Malformed("history")) }
    }
}
