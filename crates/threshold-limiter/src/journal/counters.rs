//! Counters in a file of their own: what was used survives a stop, and with it nothing has to be fast on disk.
//!
//! They change with every request, so they do not go through the journal. The whole table is written beside it and takes
//! the place of the last one in one step.

use std::fs::OpenOptions;
use std::io::{self, BufWriter, ErrorKind, Write as _};
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::{Path, PathBuf};

use threshold_core::{Balance, Digest, Limit, Timestamp};

use super::file::{beside, settle_in};
use super::rows::row_sum;
use crate::store::memory::MemoryStore;

/// What the file begins with; the last byte is its version.
const MAGIC: &[u8; 8] = b"thrshld\x01";
/// The longest balance: a full log, of which an entry takes at most 20 bytes.
const MOST: usize = 1 << 16;

fn counters_path(journal: &Path) -> PathBuf {
    journal.with_extension("counters")
}

/// Writes down every balance. Returns how many there are.
///
/// # Errors
/// Where the file cannot be written; the one before it is then still there.
pub fn save_counters(store: &MemoryStore, journal: &Path, fingerprint: u32, now: Timestamp) -> io::Result<usize> {
    let path = counters_path(journal);
    let next = beside(&path, ".next");
    let file = OpenOptions::new().write(true).create(true).truncate(true).mode(0o600).open(&next)?;
    let mut out = BufWriter::with_capacity(1 << 16, file);
    out.write_all(MAGIC)?;
    out.write_all(&fingerprint.to_be_bytes())?;
    let (mut written, mut failed) = (0usize, None);
    store.each_balance(now, |key, limit, balance| {
        if failed.is_none() {
            match write_one(&mut out, key, limit, balance) {
                Ok(()) => written = written.saturating_add(1),
                Err(error) => failed = Some(error),
            }
        }
    });
    failed.map_or(Ok(()), Err)?;
    let file = out.into_inner().map_err(io::IntoInnerError::into_error)?;
    file.sync_all()?;
    std::fs::rename(&next, &path)?;
    settle_in(&path)?;
    Ok(written)
}

/// Reads back what was saved, as far as it is as it was written; a file is read once, so that none is ever older than the
/// last stop. Returns how many balances there were.
///
/// # Errors
/// Where the file is there and cannot be read.
pub fn load_counters(store: &MemoryStore, journal: &Path, fingerprint: u32, now: Timestamp) -> io::Result<usize> {
    let path = counters_path(journal);
    let bytes = match std::fs::read(&path) {
        Ok(bytes) => bytes,
        Err(error) if error.kind() == ErrorKind::NotFound => return Ok(0),
        Err(error) => return Err(error),
    };
    std::fs::remove_file(&path)?;
    let mut rest = bytes.strip_prefix(MAGIC).and_then(|rest| rest.strip_prefix(&fingerprint.to_be_bytes()));
    let mut read = 0usize;
    while let Some((key, limit, balance, after)) = rest.and_then(read_one) {
        store.restore_balance(key, &limit, balance, now);
        read = read.saturating_add(1);
        rest = Some(after);
    }
    Ok(read)
}

/// Key, sum, the lengths of limit and balance, limit, balance.
fn write_one(out: &mut impl io::Write, key: Digest, limit: &Limit, balance: &Balance) -> io::Result<()> {
    let (limit, balance) = (limit.to_bytes(), balance.to_bytes());
    let key = key.to_u128().to_be_bytes();
    let mut value = limit.clone();
    value.extend_from_slice(&balance);
    let length = |bytes: &[u8]| u32::try_from(bytes.len()).unwrap_or(u32::MAX).to_be_bytes();
    out.write_all(&key)?;
    out.write_all(&row_sum(7, &key, &value).to_be_bytes())?;
    out.write_all(&length(&limit))?;
    out.write_all(&length(&balance))?;
    out.write_all(&value)
}

fn read_one(bytes: &[u8]) -> Option<(Digest, Limit, Balance, &[u8])> {
    let (key, rest) = bytes.split_first_chunk::<16>()?;
    let (sum, rest) = rest.split_first_chunk::<8>()?;
    let (limit, rest) = rest.split_first_chunk::<4>()?;
    let (balance, rest) = rest.split_first_chunk::<4>()?;
    let length = |bytes: &[u8; 4]| usize::try_from(u32::from_be_bytes(*bytes)).ok().filter(|length| *length <= MOST);
    let (limit, balance) = (length(limit)?, length(balance)?);
    let (value, rest) = rest.split_at_checked(limit.checked_add(balance)?)?;
    let (own, other) = value.split_at_checked(limit)?;
    let whole = row_sum(7, key, value) == i64::from_be_bytes(*sum);
    let limit = Limit::from_bytes(own).ok().filter(|_| whole)?;
    Some((Digest::from_u128(u128::from_be_bytes(*key)), limit, Balance::from_bytes(other).ok()?, rest))
}
