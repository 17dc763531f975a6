//! A limit's figures as bytes: in receipts, and beside the balances that were counted under it.

use super::{Limit, Mark};
use crate::codec::{BytesError, Format, Reader, Versions, Writer, from_bytes, to_bytes};
use crate::time::Timestamp;

impl Limit {
    /// The versions in which it is read.
    pub(crate) const VERSIONS: Versions = Versions::FIRST;

    /// The bytes that are stored beside a balance.
    #[must_use]
    pub fn to_bytes(&self, format: Format) -> Vec<u8> {
        to_bytes(Self::VERSIONS, format, |out| self.write(out))
    }

    /// Reads what [`to_bytes`](Self::to_bytes) wrote.
    ///
    /// # Errors
    /// On another version, and on bytes no limit has.
    pub fn from_bytes(bytes: &[u8]) -> Result<Self, BytesError> {
        from_bytes(bytes, Self::VERSIONS, Self::read)
    }

    /// Appends what a receipt keeps of one charge under this limit.
    pub(crate) fn write_charge(&self, mark: &Mark, counts_until: Timestamp, out: &mut Writer) {
        out.number(mark.part.micros());
        out.number(mark.amount);
        self.write_receipt(mark, counts_until, out);
    }

    /// Takes what [`write_charge`](Self::write_charge) wrote off the front: the mark, and until when the charge counts.
    pub(crate) fn read_charge(&self, from: &mut Reader<'_>) -> Result<(Mark, Timestamp), BytesError> {
        let mark = Mark::new(Timestamp::from_micros(from.number()?), from.number()?);
        self.read_receipt(mark, from)
    }
}
