//! Receipts, reservations and their costs inside commands and answers.

use super::{Field, MAX_ITEMS, put, take};
use crate::codec::{BytesError, Reader, Writer};
use crate::command::ReservationEnd;
use crate::receipt::{CommitError, HoldTerms, OnExpire, OwnedCost, Receipt};

impl Field for Box<Receipt> {
    fn write(&self, out: &mut Writer) {
        Receipt::write(self, out);
    }

    fn read(from: &mut Reader<'_>) -> Result<Self, BytesError> {
        Receipt::read(from).map(Self::new)
    }
}

impl Field for Box<HoldTerms> {
    fn write(&self, out: &mut Writer) {
        HoldTerms::write(self, out);
    }

    fn read(from: &mut Reader<'_>) -> Result<Self, BytesError> {
        HoldTerms::read(from).map(Self::new)
    }
}

impl Field for ReservationEnd {
    fn write(&self, out: &mut Writer) {
        match self {
            Self::Commit(cost) => put(out, 0, &[cost]),
            Self::Release => put(out, 1, &[]),
            Self::Expire => put(out, 2, &[]),
        }
    }

    fn read(from: &mut Reader<'_>) -> Result<Self, BytesError> {
        Ok(match from.byte()? {
            0 => Self::Commit(take(from)?),
            1 => Self::Release,
            2 => Self::Expire,
            _ => return Err(BytesError::Malformed("end of a reservation")),
        })
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
