//! A lease: part of a limit that a store grants a node ahead of time.

use crate::codec::{BytesError, Format, Reader, Versions, Writer, from_bytes, to_bytes};
use crate::key::{Digest, TraceId};
use crate::time::Timestamp;

/// Units that a node may spend without asking the store, until a deadline.
///
/// Spent and granted units together never exceed the limit's bound. So a lease names the window or bucket it was taken from,
/// and the store's epoch: a store that has lost data raises its epoch and refuses grants of an older one.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Lease {
    /// The id of the grant; returning it twice does nothing.
    pub id: TraceId,
    /// The store's epoch when it was granted.
    pub epoch: u64,
    /// The policy it was granted under.
    pub generation: u64,
    /// The key whose limit it is part of.
    pub key: Digest,
    /// The units that may be spent.
    pub units: u64,
    /// The window or bucket it was taken from; for a token bucket, the time of the grant.
    pub part: Timestamp,
    /// The deadline.
    pub until: Timestamp,
}

impl Lease {
    /// The versions in which it is read.
    pub(crate) const VERSIONS: Versions = Versions::FIRST;

    /// The bytes a store and its nodes exchange.
    #[must_use]
    pub fn to_bytes(&self, format: Format) -> Vec<u8> {
        to_bytes(Self::VERSIONS, format, |out| self.write(out))
    }

    fn write(&self, out: &mut Writer) {
        out.wide(self.id.to_u128());
        out.number(self.epoch);
        out.number(self.generation);
        out.wide(self.key.to_u128());
        out.number(self.units);
        out.number(self.part.micros());
        out.number(self.until.micros());
    }

    /// Reads what [`to_bytes`](Self::to_bytes) wrote.
    ///
    /// # Errors
    /// On another version, and on bytes no lease has.
    pub fn from_bytes(bytes: &[u8]) -> Result<Self, BytesError> {
        from_bytes(bytes, Self::VERSIONS, Self::read)
    }

    fn read(from: &mut Reader<'_>) -> Result<Self, BytesError> {
        Ok(Self {
            id: TraceId::from_u128(from.wide()?),
            epoch: from.number()?,
            generation: from.number()?,
            key: Digest::from_u128(from.wide()?),
            units: from.number()?,
            part: Timestamp::from_micros(from.number()?),
            until: Timestamp::from_micros(from.number()?),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn bytes_round_trip(id: u128, key: u128, numbers: [u64; 5], cut: prop::sample::Index, version: u8) {
            let [epoch, generation, units, part, until] = numbers;
            let lease = Lease {
                id: TraceId::from_u128(id),
                epoch,
                generation,
                key: Digest::from_u128(key),
                units,
                part: Timestamp::from_micros(part),
                until: Timestamp::from_micros(until),
            };
            let mut bytes = lease.to_bytes(Format::PRESENT);
            prop_assert_eq!(Lease::from_bytes(&bytes), Ok(lease));
            prop_assert!(Lease::from_bytes(&bytes[..cut.index(bytes.len())]).is_err());
            if version != 1 {
                bytes[0] = version;
                prop_assert_eq!(Lease::from_bytes(&bytes), Err(BytesError::UnknownVersion { found: version, oldest: 1, newest: 1 }));
            }
        }
    }
}
