//! The encoding of stored records and tokens: a version byte, varints, and no trailing bytes.

use std::fmt;

use crate::secret::KeyId;

/// The reasons why a record or a token was not decoded. A store treats each of them as a failure, never as "no balance".
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum BytesError {
    /// Written in a version that this program does not read.
    #[error("the bytes have version {found}, and this program reads {}", Readable { oldest: *oldest, newest: *newest })]
    UnknownVersion {
        /// The version of the bytes.
        found: u8,
        /// The oldest version that is read.
        oldest: u8,
        /// The newest version that is read.
        newest: u8,
    },
    /// The bytes end before the record does.
    #[error("the bytes end too early")]
    Truncated,
    /// Bytes follow the end of the record.
    #[error("bytes are left over at the end")]
    Trailing,
    /// A field holds a value that no writer produces. The text names the field.
    #[error("malformed {0}")]
    Malformed(&'static str),
    /// The signature does not match.
    #[error("the signature does not match")]
    Unsigned,
    /// The token was signed under a secret that is not in force. The field is the key id of that secret.
    #[error("signed under the key {0}, which is not in force")]
    UnknownKey(KeyId),
}

/// The versions that are read, as an error message lists them.
struct Readable {
    oldest: u8,
    newest: u8,
}

impl fmt::Display for Readable {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { oldest, newest } = self;
        if oldest == newest { write!(f, "version {newest}") } else { write!(f, "versions {oldest} and {newest}") }
    }
}

/// The format of everything that a host writes. A release that changes a record raises it by one.
///
/// The version byte of a record is the format that introduced its layout, so that one number selects the version of every
/// record. A host writes [`Format::PRESENT`]. During a rolling upgrade, while some nodes still run the previous release, every
/// node writes the previous format, which all of them read.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct Format(u8);

impl Format {
    /// The newest format, which this program writes.
    pub const PRESENT: Self = Self(1);
}

/// The versions in which a record is read. The newest one that the format allows is written.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Versions {
    /// The version before the present one; `None` for a record that has not changed since it was introduced.
    pub(crate) before: Option<u8>,
    /// The format in which the record changed last.
    pub(crate) present: u8,
}

impl Versions {
    /// The versions of a record that has not changed since the first release.
    pub(crate) const FIRST: Self = Self { before: None, present: 1 };

    /// Returns the versions of a record that embeds another one without its version byte, and so changes with it.
    pub(crate) const fn containing(self, inner: Self) -> Self {
        // The whole changes whenever one of the two does, so its versions are the two latest formats in which either
        // changed.
        let (high, low) = if self.present >= inner.present { (self, inner) } else { (inner, self) };
        let other = if low.present < high.present { Some(low.present) } else { low.before };
        let before = match (high.before, other) {
            (Some(one), Some(two)) => Some(if one > two { one } else { two }),
            (Some(one), None) | (None, Some(one)) => Some(one),
            (None, None) => None,
        };
        Self { before, present: high.present }
    }

    /// Returns the version to write in a format.
    const fn written(self, format: Format) -> u8 {
        match self.before {
            Some(before) if self.present > format.0 => before,
            // Also for a record that is newer than the format and has no version before: older nodes do not know it in
            // any form.
            _ => self.present,
        }
    }
}

/// Encodes a record: its version byte, and what `write` appends.
pub(crate) fn to_bytes(versions: Versions, format: Format, write: impl FnOnce(&mut Writer)) -> Vec<u8> {
    let mut out = Writer::new(versions, format);
    write(&mut out);
    out.finish()
}

/// Decodes a record of one of these versions. Trailing bytes are an error.
pub(crate) fn from_bytes<'a, T>(
    bytes: &'a [u8],
    versions: Versions,
    read: impl FnOnce(&mut Reader<'a>) -> Result<T, BytesError>,
) -> Result<T, BytesError> {
    let mut from = Reader::new(bytes, versions)?;
    let value = read(&mut from)?;
    from.finish()?;
    Ok(value)
}

/// Appends values to a record.
#[derive(Debug)]
pub(crate) struct Writer {
    bytes: Vec<u8>,
    version: u8,
}

impl Writer {
    /// The initial capacity: a receipt of some charges, the largest record that is written often.
    const ROOM: usize = 192;

    fn new(versions: Versions, format: Format) -> Self {
        let version = versions.written(format);
        let mut bytes = Vec::with_capacity(Self::ROOM);
        bytes.push(version);
        Self { bytes, version }
    }

    /// Returns whether this version or a later one is written. Fields that the version added are written only then.
    #[cfg_attr(not(test), expect(dead_code, reason = "no record has a second version yet"))]
    pub(crate) fn has(&self, version: u8) -> bool {
        self.version >= version
    }

    pub(crate) fn byte(&mut self, value: u8) {
        self.bytes.push(value);
    }

    /// Appends an unsigned LEB128 varint. Most numbers are small and take one byte.
    pub(crate) fn number(&mut self, mut value: u64) {
        loop {
            let low = u8::try_from(value & 0x7f).unwrap_or(0);
            value >>= 7;
            if value == 0 {
                return self.bytes.push(low);
            }
            self.bytes.push(low | 0x80);
        }
    }

    pub(crate) fn wide(&mut self, value: u128) {
        self.bytes.extend_from_slice(&value.to_be_bytes());
    }

    /// Appends the length and the bytes of a text.
    pub(crate) fn text(&mut self, value: &str) {
        self.bytes(value.as_bytes());
    }

    /// Appends a length and that many bytes.
    pub(crate) fn bytes(&mut self, value: &[u8]) {
        self.number(value.len() as u64);
        self.bytes.extend_from_slice(value);
    }

    pub(crate) fn finish(self) -> Vec<u8> {
        self.bytes
    }
}

/// Takes values off the front of a record.
#[derive(Debug, Clone)]
pub(crate) struct Reader<'a> {
    bytes: &'a [u8],
    version: u8,
}

impl<'a> Reader<'a> {
    /// Reads the version byte. Other versions than these are errors.
    fn new(bytes: &'a [u8], versions: Versions) -> Result<Self, BytesError> {
        let (&found, bytes) = bytes.split_first().ok_or(BytesError::Truncated)?;
        let Versions { before, present: newest } = versions;
        if found == newest || Some(found) == before {
            return Ok(Self { bytes, version: found });
        }
        Err(BytesError::UnknownVersion { found, oldest: before.unwrap_or(newest), newest })
    }

    /// Returns whether the record has this version or a later one. Fields that the version added are there only then.
    #[cfg_attr(not(test), expect(dead_code, reason = "no record has a second version yet"))]
    pub(crate) fn has(&self, version: u8) -> bool {
        self.version >= version
    }

    pub(crate) fn byte(&mut self) -> Result<u8, BytesError> {
        let (&first, rest) = self.bytes.split_first().ok_or(BytesError::Truncated)?;
        self.bytes = rest;
        Ok(first)
    }

    pub(crate) fn number(&mut self) -> Result<u64, BytesError> {
        let mut value = 0u64;
        for shift in (0..64).step_by(7) {
            let byte = self.byte()?;
            let low = u64::from(byte & 0x7f);
            // Of the tenth byte only one bit fits 64. Other bits would be shifted out silently, and two encodings would
            // be read as one number.
            let part = low.checked_shl(shift).filter(|part| part >> shift == low);
            value |= part.ok_or(BytesError::Malformed("number"))?;
            if byte & 0x80 == 0 {
                // Overlong forms are errors, so that equal values have equal bytes.
                return if byte == 0 && shift > 0 { Err(BytesError::Malformed("number")) } else { Ok(value) };
            }
        }
        Err(BytesError::Malformed("number"))
    }

    pub(crate) fn wide(&mut self) -> Result<u128, BytesError> {
        let (head, rest) = self.bytes.split_first_chunk::<16>().ok_or(BytesError::Truncated)?;
        self.bytes = rest;
        Ok(u128::from_be_bytes(*head))
    }

    /// Reads a text of at most this many bytes.
    pub(crate) fn text(&mut self, at_most: usize) -> Result<&'a str, BytesError> {
        // An error and not a replacement character: two different names must not become one.
        std::str::from_utf8(self.bytes(at_most)?).map_err(|_| BytesError::Malformed("text"))
    }

    /// Reads a length and that many bytes, at most `at_most`.
    pub(crate) fn bytes(&mut self, at_most: usize) -> Result<&'a [u8], BytesError> {
        // Compared as a number before anything is taken, so that a forged length allocates nothing.
        let length = usize::try_from(self.number()?).ok().filter(|length| *length <= at_most);
        let (bytes, rest) =
            self.bytes.split_at_checked(length.ok_or(BytesError::Malformed("text"))?).ok_or(BytesError::Truncated)?;
        self.bytes = rest;
        Ok(bytes)
    }

    /// Reads a count of items. Each takes at least one byte, so a forged count cannot reserve more memory than it sent.
    pub(crate) fn count(&mut self, at_most: usize) -> Result<usize, BytesError> {
        let count = usize::try_from(self.number()?).map_err(|_| BytesError::Malformed("count"))?;
        if count > at_most || count > self.bytes.len() {
            return Err(BytesError::Malformed("count"));
        }
        Ok(count)
    }

    pub(crate) fn finish(self) -> Result<(), BytesError> {
        // Left-over bytes mean that writer and reader disagree about the layout. What was read may be wrong as well.
        if self.bytes.is_empty() { Ok(()) } else { Err(BytesError::Trailing) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const ONE: Versions = Versions::FIRST;
    const NOW: Format = Format::PRESENT;

    fn open(bytes: &[u8]) -> Reader<'_> {
        Reader { bytes, version: 1 }
    }

    proptest! {
        #[test]
        fn numbers_round_trip(value: u64, wide: u128) {
            let mut writer = Writer::new(ONE, NOW);
            writer.number(value);
            writer.wide(wide);
            let bytes = writer.finish();
            let mut reader = Reader::new(&bytes, ONE).unwrap();
            prop_assert_eq!(reader.number(), Ok(value));
            prop_assert_eq!(reader.wide(), Ok(wide));
            prop_assert_eq!(reader.finish(), Ok(()));
        }

        /// Accepting an overlong form, say `80 00` for 0, wakes this.
        #[test]
        fn a_number_has_one_spelling(bytes: Vec<u8>) {
            let mut reader = open(&bytes);
            if let Ok(value) = reader.number() {
                let written = to_bytes(ONE, NOW, |out| out.number(value));
                prop_assert!(bytes.starts_with(&written[1..]));
            }
        }
    }

    #[test]
    fn bad_bytes_are_told_apart() {
        assert_eq!(Reader::new(&[], ONE).unwrap_err(), BytesError::Truncated);
        let unknown = BytesError::UnknownVersion { found: 9, oldest: 1, newest: 1 };
        assert_eq!(Reader::new(&[9], ONE).unwrap_err(), unknown);
        assert_eq!(unknown.to_string(), "the bytes have version 9, and this program reads version 1");
        assert_eq!(Reader::new(&[1, 0], ONE).unwrap().finish(), Err(BytesError::Trailing));
        assert_eq!(open(&[0xff; 10]).number(), Err(BytesError::Malformed("number")));
        assert_eq!(open(&[200, 1]).count(1_000), Err(BytesError::Malformed("count")));
    }

    /// An invented record, as three releases in a row have it. The second adds a field; the third changes nothing.
    #[derive(Debug, Clone, Copy, PartialEq, Eq)]
    struct Note {
        units: u64,
        /// Added in format 2; 7 stands for it where it is missing.
        weight: u64,
    }

    /// What one release knows: the formats that it can write, and the versions of the record and of one that holds it.
    struct Release {
        note: Versions,
        folder: Versions,
    }

    const FIRST: Release = Release { note: Versions::FIRST, folder: Versions::FIRST.containing(Versions::FIRST) };
    const SECOND: Release = {
        let note = Versions { before: Some(1), present: 2 };
        Release { note, folder: Versions::FIRST.containing(note) }
    };
    const FOURTH: Release = {
        let note = Versions { before: Some(2), present: 4 };
        Release { note, folder: Versions { before: Some(1), present: 3 }.containing(note) }
    };

    impl Note {
        fn write(&self, out: &mut Writer) {
            out.number(self.units);
            if out.has(2) {
                out.number(self.weight);
            }
        }

        fn read(from: &mut Reader<'_>) -> Result<Self, BytesError> {
            Ok(Self { units: from.number()?, weight: if from.has(2) { from.number()? } else { 7 } })
        }
    }

    impl Release {
        fn write(&self, note: &Note, format: Format) -> Vec<u8> {
            to_bytes(self.note, format, |out| note.write(out))
        }

        fn read(&self, bytes: &[u8]) -> Result<Note, BytesError> {
            from_bytes(bytes, self.note, Note::read)
        }

        /// A record with two notes in it, which have no version bytes of their own.
        fn write_folder(&self, notes: &[Note; 2], format: Format) -> Vec<u8> {
            to_bytes(self.folder, format, |out| notes.iter().for_each(|note| note.write(out)))
        }

        fn read_folder(&self, bytes: &[u8]) -> Result<[Note; 2], BytesError> {
            from_bytes(bytes, self.folder, |from| Ok([Note::read(from)?, Note::read(from)?]))
        }
    }

    /// Woken by writing the present version whatever the format is, and by reading the present version alone.
    #[test]
    fn a_release_reads_the_version_before_and_can_be_held_there() {
        let (one, two) = (Format(1), Format(2));
        let plain = Note { units: 300, weight: 7 };
        let heavy = Note { units: 300, weight: 9 };
        // The release before wrote it.
        assert_eq!(SECOND.read(&FIRST.write(&plain, one)), Ok(plain));
        // Held at the format before, the release writes what the one before reads; what that cannot say is left out.
        assert_eq!(SECOND.write(&heavy, one), FIRST.write(&plain, one));
        assert_eq!(FIRST.read(&SECOND.write(&heavy, one)), Ok(plain));
        // Let go, it writes all of it, and reads that back.
        assert_eq!(SECOND.read(&SECOND.write(&heavy, two)), Ok(heavy));
        // The release before refuses that, and says what it found and what it reads.
        let refused = FIRST.read(&SECOND.write(&heavy, two)).unwrap_err();
        assert_eq!(refused, BytesError::UnknownVersion { found: 2, oldest: 1, newest: 1 });
        let text = SECOND.read(&[3, 1, 1]).unwrap_err().to_string();
        assert_eq!(text, "the bytes have version 3, and this program reads versions 1 and 2");
    }

    /// Woken by a record that keeps its version when one inside of it changes.
    #[test]
    fn a_record_changes_with_what_it_holds() {
        let (one, two) = (Format(1), Format(2));
        let heavy = [Note { units: 1, weight: 2 }, Note { units: 3, weight: 4 }];
        let plain = heavy.map(|note| Note { weight: 7, ..note });
        assert_eq!(SECOND.folder, Versions { before: Some(1), present: 2 });
        assert_eq!(SECOND.read_folder(&SECOND.write_folder(&heavy, two)), Ok(heavy));
        assert_eq!(FIRST.read_folder(&SECOND.write_folder(&heavy, one)), Ok(plain));
        assert_eq!(SECOND.read_folder(&FIRST.write_folder(&plain, one)), Ok(plain));
        assert!(FIRST.read_folder(&SECOND.write_folder(&heavy, two)).is_err());
        // A folder that changed in format 3, of notes that changed in 4: the format before 4 is 3.
        assert_eq!(FOURTH.folder, Versions { before: Some(3), present: 4 });
        assert_eq!(FOURTH.write(&heavy[0], Format(3))[0], 2);
        assert_eq!(FOURTH.write_folder(&heavy, Format(3))[0], 3);
        assert_eq!(Versions::FIRST.containing(Versions::FIRST), Versions::FIRST);
    }
}
