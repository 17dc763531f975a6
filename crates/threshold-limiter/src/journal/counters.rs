//! Counters in a file of their own: what was used survives a stop, and with it nothing has to be fast on disk.
//!
//! They change with every request, so they do not go through the journal. The whole table is written beside it and takes
//! the place of the last one in one step.

use std::io::{self, BufWriter, ErrorKind, Write as _};
use std::path::{Path, PathBuf};

use threshold_core::{Balance, Digest, KeyId, Limit, Timestamp, TraceId};

use super::file::{beside, create_exclusively, resolve, settle_in};
use super::rows::row_sum;
use super::{FORMAT, KeyIds};
use crate::store::memory::MemoryStore;

/// What the file begins with; the last byte is its version.
const MAGIC: &[u8; 8] = b"thrshld\x02";
/// What stands in the place of a row's kind in the sum of a record.
const COUNTER: i64 = 7;
/// No limit takes more bytes than this: a version, a kind and three numbers.
const MAX_LIMIT: usize = 64;
/// Key, sum, and the lengths of limit and balance.
const HEADER: usize = 32;

pub(super) fn counters_path(journal: &Path) -> PathBuf {
    resolve(journal).with_extension("counters")
}

/// Writes down every balance, and which receipts were refunded. Returns how many balances there are.
///
/// # Errors
/// Where the file cannot be written; the one before it is then still there.
pub fn save_counters(store: &MemoryStore, journal: &Path, key_id: KeyId, now: Timestamp) -> io::Result<usize> {
    let path = counters_path(journal);
    let next = beside(&path, ".next");
    let file = create_exclusively(&next)?;
    let mut out = BufWriter::with_capacity(1 << 16, file);
    out.write_all(MAGIC)?;
    out.write_all(&key_id.to_u32().to_be_bytes())?;
    let (mut written, mut failed) = (0usize, None);
    store.each_balance(now, |key, limit, balance| {
        if failed.is_none() {
            match write_one(&mut out, key, limit, balance) {
                Ok(()) => written = written.saturating_add(1),
                Err(error) => failed = Some(error),
            }
        }
    });
    // After the balances: a refund that is written without what it gave back gives back nothing, and the other way round it
    // would give it back again after the restart.
    store.each_refund(now, |id, void_from| {
        if failed.is_none() {
            failed = write_refund(&mut out, id, void_from).err();
        }
    });
    failed.map_or(Ok(()), Err)?;
    let file = out.into_inner().map_err(io::IntoInnerError::into_error)?;
    file.sync_all()?;
    std::fs::rename(&next, &path)?;
    settle_in(&path)?;
    Ok(written)
}

/// What a file of counters held.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Counters {
    /// Balances that are as they were written.
    pub read: usize,
    /// Damaged records, and those in formats of another version. Where lengths are damaged too, all the bytes up to the next
    /// sound record count as one.
    pub skipped: usize,
}

/// Reads back what was saved; a file is read once, so that none is ever older than the last stop. A damaged record is
/// skipped, and the ones after it are read.
///
/// # Errors
/// Where the file is there and cannot be read, and where it does not begin as counters of this installation do.
pub fn load_counters(
    store: &MemoryStore,
    journal: &Path,
    keys: impl Into<KeyIds>,
    now: Timestamp,
) -> io::Result<Counters> {
    let keys = keys.into();
    let path = counters_path(journal);
    let bytes = match std::fs::read(&path) {
        Ok(bytes) => bytes,
        Err(error) if error.kind() == ErrorKind::NotFound => return Ok(Counters::default()),
        Err(error) => return Err(error),
    };
    std::fs::remove_file(&path)?;
    let known = |id: &[u8; 4]| [Some(keys.present), keys.old].contains(&Some(KeyId::from_u32(u32::from_be_bytes(*id))));
    let headed = bytes.strip_prefix(MAGIC).and_then(|rest| rest.split_first_chunk());
    let mut rest = headed.filter(|(id, _)| known(id)).map(|(_, rest)| rest).ok_or_else(|| {
        let text = format!("{} has another version, or was written under another secret", path.display());
        io::Error::new(ErrorKind::InvalidData, text)
    })?;
    let mut counters = Counters::default();
    while !rest.is_empty() {
        let record = Record::parse(rest);
        if let Some((key, limit, balance)) = record.as_ref().and_then(Record::decode) {
            store.restore_balance(key, &limit, balance, now);
            counters.read = counters.read.saturating_add(1);
        } else if let Some((id, void_from)) = record.as_ref().and_then(Record::refund) {
            store.restore_refund(id, void_from, now);
        } else {
            counters.skipped = counters.skipped.saturating_add(1);
        }
        rest = match record {
            Some(record) if record.is_sound() => record.rest,
            _ => next_sound(rest),
        };
    }
    Ok(counters)
}

/// What follows from the next sound record on, if what `bytes` begin with is damaged. Its lengths may be what is damaged, so
/// every further byte may be the next record's first. A sum of 64 bits is not met by chance.
fn next_sound(bytes: &[u8]) -> &[u8] {
    let from = |at: usize| bytes.get(at..).unwrap_or_default();
    // Lengths that are as they were written lead to it at once.
    let by_length = Record::parse(bytes).map(|record| record.rest);
    if let Some(next) = by_length.filter(|rest| rest.is_empty() || begins_sound(rest)) {
        return next;
    }
    (1..bytes.len()).map(from).find(|rest| begins_sound(rest)).unwrap_or_default()
}

fn begins_sound(bytes: &[u8]) -> bool {
    let is_one = |record: &Record<'_>| record.limit.is_empty() || Limit::from_bytes(record.limit).is_ok();
    Record::parse(bytes).is_some_and(|record| is_one(&record) && record.is_sound())
}

/// A receipt that was refunded: a record without a limit, with its id and when it gives nothing back any more.
fn write_refund(out: &mut impl io::Write, id: TraceId, void_from: Timestamp) -> io::Result<()> {
    write_record(out, id.to_u128(), &[], &void_from.micros().to_be_bytes())
}

/// Key, sum, the lengths of limit and balance, limit, balance.
fn write_one(out: &mut impl io::Write, key: Digest, limit: &Limit, balance: &Balance) -> io::Result<()> {
    write_record(out, key.to_u128(), &limit.to_bytes(FORMAT), &balance.to_bytes(FORMAT))
}

fn write_record(out: &mut impl io::Write, key: u128, limit: &[u8], balance: &[u8]) -> io::Result<()> {
    let key = key.to_be_bytes();
    let value = [limit, balance].concat();
    let length = |bytes: &[u8]| u32::try_from(bytes.len()).unwrap_or(u32::MAX).to_be_bytes();
    out.write_all(&key)?;
    out.write_all(&row_sum(COUNTER, &key, &value).to_be_bytes())?;
    out.write_all(&length(limit))?;
    out.write_all(&length(balance))?;
    out.write_all(&value)
}

/// One record as its lengths say, sound or not.
struct Record<'a> {
    key: &'a [u8],
    sum: i64,
    value: &'a [u8],
    limit: &'a [u8],
    balance: &'a [u8],
    rest: &'a [u8],
}

impl<'a> Record<'a> {
    /// `None` where the bytes end before the record does, or no record is as long as this one says.
    fn parse(bytes: &'a [u8]) -> Option<Self> {
        let (header, rest) = bytes.split_first_chunk::<HEADER>()?;
        let (key, header) = header.split_at_checked(16)?;
        let (sum, header) = header.split_first_chunk::<8>()?;
        let (limit, header) = header.split_first_chunk::<4>()?;
        let length =
            |bytes: &[u8; 4], most| usize::try_from(u32::from_be_bytes(*bytes)).ok().filter(|own| *own <= most);
        let limit = length(limit, MAX_LIMIT)?;
        let balance = length(header.first_chunk::<4>()?, Balance::MAX_BYTES)?;
        let (value, rest) = rest.split_at_checked(limit.checked_add(balance)?)?;
        let (limit, balance) = value.split_at_checked(limit)?;
        Some(Self { key, sum: i64::from_be_bytes(*sum), value, limit, balance, rest })
    }

    fn is_sound(&self) -> bool {
        row_sum(COUNTER, self.key, self.value) == self.sum
    }

    fn refund(&self) -> Option<(TraceId, Timestamp)> {
        let id = self.key.try_into().ok().filter(|_| self.is_sound() && self.limit.is_empty())?;
        let void_from = u64::from_be_bytes(self.balance.try_into().ok()?);
        Some((TraceId::from_u128(u128::from_be_bytes(id)), Timestamp::from_micros(void_from)))
    }

    fn decode(&self) -> Option<(Digest, Limit, Balance)> {
        let key = self.key.try_into().ok().filter(|_| self.is_sound())?;
        let limit = Limit::from_bytes(self.limit).ok()?;
        Some((Digest::from_u128(u128::from_be_bytes(key)), limit, Balance::from_bytes(self.balance).ok()?))
    }
}
