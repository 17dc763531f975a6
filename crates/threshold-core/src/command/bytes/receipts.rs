//! Receipts, reservations and their costs inside commands and answers.

use super::{Field, MAX_ITEMS, take};
use crate::codec::{BytesError, Reader, Writer};
use crate::receipt::{CommitError, OnExpire, OwnedCost, Receipt};

impl Field for Box<Receipt> {
    fn write(&self, out: &mut Writer) {
        Receipt::write(self, out);
    }

    fn read(from: &mut Reader<'_>) -> Result<Self, BytesError> {
        Receipt::read(from).map(Self::new)
    }
}

impl Field for OnExpire {
    fn write(&self, out: &mut Writer) {
        (*self == Self::Release).write(out);
    }

    fn read(from: &mut Reader<'_>) -> Result<Self, BytesError> {
        Ok(if take(from)? { Self::Release } else { Self::Charge })
    }
}

impl Field for OwnedCost {
    fn write(&self, out: &mut Writer) {
        self.requests.write(out);
        self.bytes.write(out);
        out.number(self.named.len() as u64);
        for (name, amount) in &self.named {
            out.number(*name);
            out.number(*amount);
        }
    }

    fn read(from: &mut Reader<'_>) -> Result<Self, BytesError> {
        let (requests, bytes) = (take(from)?, take(from)?);
        let count = from.count(MAX_ITEMS)?;
        let named: Result<_, BytesError> = (0..count).map(|_| Ok((from.number()?, from.number()?))).collect();
        Ok(Self { requests, bytes, named: named? })
    }
}

impl Field for CommitError {
    fn write(&self, out: &mut Writer) {
        (*self == Self::OtherCost).write(out);
    }

    fn read(from: &mut Reader<'_>) -> Result<Self, BytesError> {
        Ok(if take(from)? { Self::OtherCost } else { Self::Unknown })
    }
}
