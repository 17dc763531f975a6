//! Numbers, options, lists, times and digests inside commands and answers.

use arrayvec::ArrayVec;

use super::{Field, take};
use crate::codec::{BytesError, Reader, Writer};
use crate::command::requests::MAX_ANSWER;
use crate::key::{Digest, TraceId};
use crate::plan::MAX_CHARGES;
use crate::time::{Span, Timestamp};

impl Field for u64 {
    fn write(&self, out: &mut Writer) {
        out.number(*self);
    }

    fn read(from: &mut Reader<'_>) -> Result<Self, BytesError> {
        from.number()
    }
}

impl Field for u32 {
    fn write(&self, out: &mut Writer) {
        out.number(u64::from(*self));
    }

    fn read(from: &mut Reader<'_>) -> Result<Self, BytesError> {
        Self::try_from(from.number()?).map_err(|_| BytesError::Malformed("number"))
    }
}

/// An index in a list.
impl Field for usize {
    fn write(&self, out: &mut Writer) {
        out.number(*self as u64);
    }

    fn read(from: &mut Reader<'_>) -> Result<Self, BytesError> {
        Self::try_from(from.number()?).map_err(|_| BytesError::Malformed("place"))
    }
}

impl Field for bool {
    fn write(&self, out: &mut Writer) {
        out.byte(u8::from(*self));
    }

    fn read(from: &mut Reader<'_>) -> Result<Self, BytesError> {
        match from.byte()? {
            0 => Ok(false),
            1 => Ok(true),
            // Any other byte is an error, so that a value has one encoding.
            _ => Err(BytesError::Malformed("flag")),
        }
    }
}

impl<T: Field> Field for Option<T> {
    fn write(&self, out: &mut Writer) {
        self.is_some().write(out);
        if let Some(value) = self {
            value.write(out);
        }
    }

    fn read(from: &mut Reader<'_>) -> Result<Self, BytesError> {
        Ok(if take(from)? { Some(take(from)?) } else { None })
    }
}

impl<T: Field, E: Field> Field for Result<T, E> {
    fn write(&self, out: &mut Writer) {
        self.is_ok().write(out);
        match self {
            Ok(value) => value.write(out),
            Err(error) => error.write(out),
        }
    }

    fn read(from: &mut Reader<'_>) -> Result<Self, BytesError> {
        Ok(if take(from)? { Ok(take(from)?) } else { Err(take(from)?) })
    }
}

/// One list type is enough: everything that a command lists for one request is bounded by its charges.
impl<T: Field> Field for ArrayVec<T, MAX_CHARGES> {
    fn write(&self, out: &mut Writer) {
        out.number(self.len() as u64);
        self.iter().for_each(|item| item.write(out));
    }

    fn read(from: &mut Reader<'_>) -> Result<Self, BytesError> {
        (0..from.count(MAX_CHARGES)?).map(|_| take(from)).collect()
    }
}

impl Field for Vec<Digest> {
    fn write(&self, out: &mut Writer) {
        out.number(self.len() as u64);
        self.iter().for_each(|key| key.write(out));
    }

    fn read(from: &mut Reader<'_>) -> Result<Self, BytesError> {
        // No reservation holds more keys, so a longer list is no answer to one.
        (0..from.count(MAX_CHARGES)?).map(|_| take(from)).collect()
    }
}

impl Field for Timestamp {
    fn write(&self, out: &mut Writer) {
        out.number(self.micros());
    }

    fn read(from: &mut Reader<'_>) -> Result<Self, BytesError> {
        from.number().map(Self::from_micros)
    }
}

impl Field for Span {
    fn write(&self, out: &mut Writer) {
        out.number(self.micros());
    }

    fn read(from: &mut Reader<'_>) -> Result<Self, BytesError> {
        from.number().map(Self::from_micros)
    }
}

impl Field for Digest {
    fn write(&self, out: &mut Writer) {
        out.wide(self.to_u128());
    }

    fn read(from: &mut Reader<'_>) -> Result<Self, BytesError> {
        from.wide().map(Self::from_u128)
    }
}

impl Field for TraceId {
    fn write(&self, out: &mut Writer) {
        out.wide(self.to_u128());
    }

    fn read(from: &mut Reader<'_>) -> Result<Self, BytesError> {
        from.wide().map(Self::from_u128)
    }
}

impl Field for Box<[u8]> {
    fn write(&self, out: &mut Writer) {
        out.bytes(self);
    }

    fn read(from: &mut Reader<'_>) -> Result<Self, BytesError> {
        from.bytes(MAX_ANSWER).map(Self::from)
    }
}
