//! The small balances of an object, in one row: Cloudflare bills each row that is written, and most requests charge several limits.

use threshold_core::{Balance, BytesError, Digest, Timestamp};

use super::records::{Change, RowError};

/// The largest balance in the packed row. Token buckets, fixed windows and estimates are smaller; logs are not.
const MAX_BYTES: usize = 64;
/// The largest number of balances in the packed row, which is read and written as a whole.
const MAX_BALANCES: usize = 64;
/// The version of the row.
const VERSION: u8 = 1;
/// The bytes of a key and of a length.
const HEAD: usize = 17;

/// The small balances of an object.
#[derive(Debug)]
pub(super) struct Packed {
    entries: Vec<(Digest, Vec<u8>)>,
    /// The latest end of the balances that were saved by this command.
    until: Timestamp,
    changed: bool,
}

impl Packed {
    /// Parses a row; without one there are no balances.
    pub(super) fn from_row(row: Option<Vec<u8>>) -> Result<Self, RowError> {
        let entries = row.map_or(Ok(Vec::new()), |bytes| parse(&bytes))?;
        Ok(Self { entries, until: Timestamp::EPOCH, changed: false })
    }

    pub(super) fn get(&self, key: Digest) -> Option<&[u8]> {
        self.entries.iter().find(|(own, _)| *own == key).map(|(_, bytes)| bytes.as_slice())
    }

    pub(super) fn remove(&mut self, key: Digest) {
        let before = self.entries.len();
        self.entries.retain(|(own, _)| *own != key);
        self.changed |= self.entries.len() != before;
    }

    /// Saves a balance. Returns whether it belongs into this row; if not, it has been removed from it.
    pub(super) fn save(
        &mut self,
        key: Digest,
        bytes: &[u8],
        until: Timestamp,
        now: Timestamp,
    ) -> Result<bool, RowError> {
        if bytes.len() > MAX_BYTES {
            self.remove(key);
            return Ok(false);
        }
        if let Some((_, own)) = self.entries.iter_mut().find(|(own, _)| *own == key) {
            bytes.clone_into(own);
        } else {
            if self.entries.len() >= MAX_BALANCES {
                self.drop_silent(now)?;
            }
            if self.entries.len() >= MAX_BALANCES {
                return Ok(false);
            }
            self.entries.push((key, bytes.to_vec()));
        }
        self.until = self.until.max(until);
        self.changed = true;
        Ok(true)
    }

    fn drop_silent(&mut self, now: Timestamp) -> Result<(), RowError> {
        let mut kept = Vec::with_capacity(self.entries.len());
        for (key, bytes) in self.entries.drain(..) {
            if Balance::from_bytes(&bytes)?.silent_from() > now {
                kept.push((key, bytes));
            }
        }
        self.entries = kept;
        Ok(())
    }

    /// Returns the change of the row, if there is one.
    pub(super) fn into_change(self) -> Option<Change> {
        if !self.changed {
            return None;
        }
        if self.entries.is_empty() {
            return Some(Change::Delete);
        }
        let mut until = self.until;
        let mut bytes = vec![VERSION];
        for (key, balance) in &self.entries {
            // Balances that this command did not save have ends of their own. One that cannot be read is kept.
            until = until.max(Balance::from_bytes(balance).map_or(Timestamp::MAX, |balance| balance.silent_from()));
            bytes.extend(key.to_u128().to_be_bytes());
            bytes.push(u8::try_from(balance.len()).unwrap_or(0));
            bytes.extend(balance);
        }
        Some(Change::Write { bytes, until })
    }
}

fn parse(bytes: &[u8]) -> Result<Vec<(Digest, Vec<u8>)>, BytesError> {
    let mut rest = match bytes.split_first() {
        Some((&VERSION, rest)) => rest,
        Some((&found, _)) => return Err(BytesError::UnknownVersion { found, oldest: VERSION, newest: VERSION }),
        None => return Err(BytesError::Truncated),
    };
    let mut entries = Vec::new();
    while !rest.is_empty() {
        let (head, after) = rest.split_first_chunk::<HEAD>().ok_or(BytesError::Truncated)?;
        let [key @ .., length] = head;
        let (balance, after) = after.split_at_checked(usize::from(*length)).ok_or(BytesError::Truncated)?;
        entries.push((Digest::from_u128(u128::from_be_bytes(*key)), balance.to_vec()));
        rest = after;
    }
    Ok(entries)
}
