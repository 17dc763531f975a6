//! Records on their way from one object to another. The names of most objects are digests, so that they change with the secret.
//!
//! A Worker copies a record first and deletes it then. If it dies in between, the next use of the record finds the copy and deletes the
//! original.

use std::fmt::Write as _;

use threshold_core::{Balance, Digest, Timestamp};

use super::records::{Kind, ObjectRecords, RowError, RowKey, Rows};

/// The path that reads records. The body and the answer are lists of [`Record`]; those that are not there are left out.
pub(crate) const READ: &str = "/move/read";
/// The path that writes records, except where there is one already: that one is more recent.
pub(crate) const WRITE: &str = "/move/write";
/// The path that deletes records.
pub(crate) const DELETE: &str = "/move/delete";

/// A record: its kind, its id, its end in microseconds and its bytes. A question has an end of 0 and no bytes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Record {
    pub(crate) kind: Kind,
    pub(crate) id: u128,
    pub(crate) until: Timestamp,
    pub(crate) bytes: Vec<u8>,
}

impl Record {
    /// Asks for a record.
    pub(crate) fn asked(kind: Kind, key: Digest) -> Self {
        Self { kind, id: key.to_u128(), until: Timestamp::EPOCH, bytes: Vec::new() }
    }
}

/// Encodes records.
pub(crate) fn to_bytes(records: &[Record]) -> Vec<u8> {
    let hex = |bytes: &[u8]| {
        bytes.iter().fold(String::new(), |mut text, byte| {
            // Writing to a string does not fail.
            let _ = write!(text, "{byte:02x}");
            text
        })
    };
    let all = records.iter().map(|Record { kind, id, until, bytes }| {
        serde_json::json!([*kind as u8, hex(&id.to_be_bytes()), until.micros(), hex(bytes)])
    });
    serde_json::Value::Array(all.collect()).to_string().into_bytes()
}

/// Parses records; `None` where they are none.
pub(crate) fn from_bytes(bytes: &[u8]) -> Option<Vec<Record>> {
    let hex = |text: &str| -> Option<Vec<u8>> {
        let digits = text.as_bytes().chunks(2);
        digits.map(|pair| u8::from_str_radix(std::str::from_utf8(pair).ok()?, 16).ok()).collect()
    };
    let all: Vec<(u8, String, u64, String)> = serde_json::from_slice(bytes).ok()?;
    let record = |(kind, id, until, bytes): (u8, String, u64, String)| {
        Some(Record {
            kind: [Kind::Balance, Kind::Standing, Kind::Account].into_iter().find(|own| *own as u8 == kind)?,
            id: u128::from_str_radix(&id, 16).ok()?,
            until: Timestamp::from_micros(until),
            bytes: hex(&bytes)?,
        })
    };
    all.into_iter().map(record).collect()
}

impl<R: Rows> ObjectRecords<'_, R> {
    /// Carries out one of the paths. Returns the records that were read.
    pub(super) fn carry(&mut self, path: &str, records: Vec<Record>, now: Timestamp) -> Result<Vec<Record>, RowError> {
        let mut found = Vec::new();
        for record in records {
            match path {
                READ => found.extend(self.take_out(&record)?),
                WRITE => self.put_in(record, now)?,
                _ => self.remove(record.kind, record.id)?,
            }
        }
        Ok(found)
    }

    fn take_out(&mut self, asked: &Record) -> Result<Option<Record>, RowError> {
        let found = match asked.kind {
            Kind::Balance => {
                let balance = self.balance(Digest::from_u128(asked.id))?;
                let is_used = balance != Balance::default();
                is_used.then(|| (balance.to_bytes(threshold_core::Format::PRESENT), balance.silent_from()))
            }
            kind => self.row(RowKey { kind, id: asked.id })?,
        };
        Ok(found.map(|(bytes, until)| Record { bytes, until, ..asked.clone() }))
    }

    fn put_in(&mut self, record: Record, now: Timestamp) -> Result<(), RowError> {
        let key = Digest::from_u128(record.id);
        if record.kind == Kind::Balance {
            if self.balance(key)? == Balance::default() {
                self.save_balance(key, &Balance::from_bytes(&record.bytes)?, now)?;
            }
            return Ok(());
        }
        if self.row(RowKey { kind: record.kind, id: record.id })?.is_none() {
            self.write(record.kind, record.id, record.bytes, record.until);
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn records_are_read_as_they_were_written_and_nothing_else_is() {
        let record = |kind, id, bytes: &[u8]| Record { kind, id, until: Timestamp::MAX, bytes: bytes.to_vec() };
        let all = [record(Kind::Standing, 1, &[0, 255, 16]), record(Kind::Account, u128::MAX, &[])];
        assert_eq!(from_bytes(&to_bytes(&all)).as_deref(), Some(&all[..]));
        for bad in
            ["", "{}", "[[8,\"00\",0,\"00\"]]", "[[3,\"x\",0,\"00\"]]", "[[3,\"00\",0,\"zz\"]]", "[[3,\"00\",-1,\"\"]]"]
        {
            assert_eq!(from_bytes(bad.as_bytes()), None, "{bad}");
        }
    }
}
