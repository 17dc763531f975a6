//! The bytes of everything that is stored or handed out: a version, then varints, and nothing left over.

use std::fmt;

/// Why bytes could not be read. A store treats each of these as a failure, never as "no balance".
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum BytesError {
    /// Written by a version this one does not know.
    UnknownVersion(u8),
    /// The bytes end too early.
    Truncated,
    /// Bytes are left over at the end.
    Trailing,
    /// A value no writer produces; the text names it.
    Malformed(&'static str),
    /// The signature does not match.
    Unsigned,
}

impl fmt::Display for BytesError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::UnknownVersion(version) => write!(f, "unknown version {version}"),
            Self::Truncated => f.write_str("the bytes end too early"),
            Self::Trailing => f.write_str("bytes are left over at the end"),
            Self::Malformed(what) => write!(f, "malformed {what}"),
            Self::Unsigned => f.write_str("the signature does not match"),
        }
    }
}

impl std::error::Error for BytesError {}

/// A record by itself: its version, and what `write` appends.
pub(crate) fn to_bytes(version: u8, write: impl FnOnce(&mut Writer)) -> Vec<u8> {
    let mut out = Writer::new(version);
    write(&mut out);
    out.finish()
}

/// Reads a record by itself: of this version, and with nothing left over.
pub(crate) fn from_bytes<'a, T>(
    bytes: &'a [u8],
    version: u8,
    read: impl FnOnce(&mut Reader<'a>) -> Result<T, BytesError>,
) -> Result<T, BytesError> {
    let mut from = Reader::new(bytes, version)?;
    let value = read(&mut from)?;
    from.finish()?;
    Ok(value)
}

/// Appends values to a growing record.
#[derive(Debug, Default)]
pub(crate) struct Writer(Vec<u8>);

impl Writer {
    /// Room for a receipt of some charges, the largest of what is written often.
    const ROOM: usize = 192;

    pub(crate) fn new(version: u8) -> Self {
        let mut bytes = Vec::with_capacity(Self::ROOM);
        bytes.push(version);
        Self(bytes)
    }

    pub(crate) fn byte(&mut self, value: u8) {
        self.0.push(value);
    }

    /// LEB128, low bits first: small numbers, which most are, take one byte.
    pub(crate) fn number(&mut self, mut value: u64) {
        loop {
            let low = u8::try_from(value & 0x7f).unwrap_or(0);
            value >>= 7;
            if value == 0 {
                return self.0.push(low);
            }
            self.0.push(low | 0x80);
        }
    }

    pub(crate) fn wide(&mut self, value: u128) {
        self.0.extend_from_slice(&value.to_be_bytes());
    }

    /// A length, and the bytes of a text.
    pub(crate) fn text(&mut self, value: &str) {
        self.number(value.len() as u64);
        self.0.extend_from_slice(value.as_bytes());
    }

    pub(crate) fn finish(self) -> Vec<u8> {
        self.0
    }
}

/// Takes values off the front of a record.
#[derive(Debug)]
pub(crate) struct Reader<'a>(&'a [u8]);

impl<'a> Reader<'a> {
    /// Opens a record; versions other than `known` are errors.
    pub(crate) fn new(bytes: &'a [u8], known: u8) -> Result<Self, BytesError> {
        let mut reader = Self(bytes);
        match reader.byte()? {
            version if version == known => Ok(reader),
            other => Err(BytesError::UnknownVersion(other)),
        }
    }

    pub(crate) fn byte(&mut self) -> Result<u8, BytesError> {
        let (&first, rest) = self.0.split_first().ok_or(BytesError::Truncated)?;
        self.0 = rest;
        Ok(first)
    }

    pub(crate) fn number(&mut self) -> Result<u64, BytesError> {
        let mut value = 0u64;
        for shift in (0..64).step_by(7) {
            let byte = self.byte()?;
            let low = u64::from(byte & 0x7f);
            let part = low.checked_shl(shift).filter(|part| part >> shift == low);
            value |= part.ok_or(BytesError::Malformed("number"))?;
            if byte & 0x80 == 0 {
                // One number, one spelling: equal values have equal bytes.
                return if byte == 0 && shift > 0 { Err(BytesError::Malformed("number")) } else { Ok(value) };
            }
        }
        Err(BytesError::Malformed("number"))
    }

    pub(crate) fn wide(&mut self) -> Result<u128, BytesError> {
        let (head, rest) = self.0.split_first_chunk::<16>().ok_or(BytesError::Truncated)?;
        self.0 = rest;
        Ok(u128::from_be_bytes(*head))
    }

    /// A text of at most so many bytes.
    pub(crate) fn text(&mut self, at_most: usize) -> Result<&'a str, BytesError> {
        const WRONG: BytesError = BytesError::Malformed("text");
        let length = usize::try_from(self.number()?).ok().filter(|length| *length <= at_most).ok_or(WRONG)?;
        let (text, rest) = self.0.split_at_checked(length).ok_or(BytesError::Truncated)?;
        self.0 = rest;
        std::str::from_utf8(text).map_err(|_| WRONG)
    }

    /// A count of things that follow, each at least one byte, so that a forged count reserves no memory.
    pub(crate) fn count(&mut self, at_most: usize) -> Result<usize, BytesError> {
        let count = usize::try_from(self.number()?).map_err(|_| BytesError::Malformed("count"))?;
        if count > at_most || count > self.0.len() {
            return Err(BytesError::Malformed("count"));
        }
        Ok(count)
    }

    pub(crate) fn finish(self) -> Result<(), BytesError> {
        if self.0.is_empty() { Ok(()) } else { Err(BytesError::Trailing) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn numbers_round_trip(value: u64, wide: u128) {
            let mut writer = Writer::new(1);
            writer.number(value);
            writer.wide(wide);
            let bytes = writer.finish();
            let mut reader = Reader::new(&bytes, 1).unwrap();
            prop_assert_eq!(reader.number(), Ok(value));
            prop_assert_eq!(reader.wide(), Ok(wide));
            prop_assert_eq!(reader.finish(), Ok(()));
        }

        /// Accepting an overlong form, say `80 00` for 0, wakes this.
        #[test]
        fn a_number_has_one_spelling(bytes: Vec<u8>) {
            let mut reader = Reader(&bytes);
            if let Ok(value) = reader.number() {
                let mut writer = Writer::default();
                writer.number(value);
                prop_assert!(bytes.starts_with(&writer.finish()));
            }
        }
    }

    #[test]
    fn bad_bytes_are_told_apart() {
        assert_eq!(Reader::new(&[], 1).unwrap_err(), BytesError::Truncated);
        assert_eq!(Reader::new(&[9], 1).unwrap_err(), BytesError::UnknownVersion(9));
        assert_eq!(Reader::new(&[1, 0], 1).unwrap().finish(), Err(BytesError::Trailing));
        assert_eq!(Reader(&[0xff; 10]).number(), Err(BytesError::Malformed("number")));
        assert_eq!(Reader(&[200, 1]).count(1_000), Err(BytesError::Malformed("count")));
    }
}
