//! The file of counters: balances that survive a clean stop.
//!
//! Balances change with every request, so they do not go through the journal. The whole table is written to a file beside it,
//! which replaces the previous one by a rename.

use std::io::{self, BufWriter, ErrorKind, Write as _};
use std::path::{Path, PathBuf};

use threshold_core::{Balance, Digest, KeyId, Limit, Timestamp, TraceId};

use super::fs::{create_replacing, resolve, sync_parent, with_suffix};
use super::rows::checksum;
use super::{CountersError, FORMAT, KeyIds};
use crate::files::{self, Trust};
use crate::store::memory::MemoryStore;

/// The first bytes of the file. The last of them is its version.
const MAGIC: &[u8; 8] = b"thrshld\x02";
/// Stands in for the kind of a row in the checksum of a record.
const COUNTER: i64 = 7;
/// The longest limit in bytes: a version, an algorithm and three numbers.
const MAX_LIMIT: usize = 64;
/// The length of the key, the checksum, and the lengths of limit and balance.
const HEADER: usize = 32;

pub(super) fn counters_path(journal: &Path) -> PathBuf {
    resolve(journal).with_extension("counters")
}

/// Writes every balance and the ids of refunded receipts. Returns the number of balances.
///
/// # Errors
/// Fails if the file cannot be written. The previous file stays.
pub fn save_counters(store: &MemoryStore, journal: &Path, key_id: KeyId, now: Timestamp) -> io::Result<usize> {
    let path = counters_path(journal);
    let next = with_suffix(&path, ".next");
    let file = create_replacing(&next)?;
    let mut out = BufWriter::with_capacity(1 << 16, file);
    out.write_all(MAGIC)?;
    out.write_all(&key_id.to_u32().to_be_bytes())?;
    let (mut written, mut failed) = (0usize, None);
    store.each_balance(now, |key, limit, balance| {
        // The walk cannot be stopped, so after an error it goes on without writing.
        if failed.is_none() {
            match write_balance(&mut out, key, limit, balance) {
                Ok(()) => written = written.saturating_add(1),
                Err(error) => failed = Some(error),
            }
        }
    });
    // After the balances: requests go on meanwhile. A refund whose id is written without its effect is lost; a refund whose
    // effect is written without its id could be repeated after the restart.
    store.each_refund(now, |id, void_from| {
        if failed.is_none() {
            failed = write_refund(&mut out, id, void_from).err();
        }
    });
    failed.map_or(Ok(()), Err)?;
    let file = out.into_inner().map_err(io::IntoInnerError::into_error)?;
    // The content before the name: else a power loss leaves the name with a file of zeros.
    file.sync_all()?;
    std::fs::rename(&next, &path)?;
    sync_parent(&path)?;
    Ok(written)
}

/// The result of reading a file of counters.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Counters {
    /// The number of balances that were restored.
    pub read: usize,
    /// The number of damaged records, and of records in formats of another version. If the lengths of a record are damaged
    /// too, all bytes up to the next sound record count as one.
    pub skipped: usize,
}

/// Restores the balances of the last clean stop, and deletes the file. Damaged records are skipped.
///
/// A file is read once: after a crash it would be older than the requests since.
///
/// # Errors
/// Fails if the file cannot be read, has another version, or was written under another secret.
pub fn load_counters(
    store: &MemoryStore,
    journal: &Path,
    keys: impl Into<KeyIds>,
    now: Timestamp,
) -> Result<Counters, CountersError> {
    let keys = keys.into();
    let path = counters_path(journal);
    let bytes = match files::read(&path, Trust::Own, usize::MAX) {
        Ok(bytes) => bytes,
        Err(error) if error.kind() == ErrorKind::NotFound => return Ok(Counters::default()),
        Err(error) => return Err(CountersError::Io(path, error)),
    };
    std::fs::remove_file(&path).map_err(|error| CountersError::Io(path.clone(), error))?;
    // A file from before a rotation has digests of the old secret, which requests still find.
    let known = |id: &[u8; 4]| [Some(keys.present), keys.old].contains(&Some(KeyId::from_u32(u32::from_be_bytes(*id))));
    let headed = bytes.strip_prefix(MAGIC).and_then(|rest| rest.split_first_chunk());
    let mut rest = headed.filter(|(id, _)| known(id)).map(|(_, rest)| rest).ok_or(CountersError::Unknown(path))?;
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
        // A record in an unknown format is sound too, and its lengths lead to the next one.
        rest = match record {
            Some(record) if record.is_sound() => record.rest,
            _ => next_sound(rest),
        };
    }
    Ok(counters)
}

/// Returns the bytes from the next sound record on, where `bytes` begin with a damaged one. Its lengths may be damaged, so
/// every byte may be the first of the next record. A checksum of 64 bits does not match by chance.
fn next_sound(bytes: &[u8]) -> &[u8] {
    let from = |at: usize| bytes.get(at..).unwrap_or_default();
    // If the lengths are sound, they lead to the next record.
    let by_length = Record::parse(bytes).map(|record| record.rest);
    if let Some(next) = by_length.filter(|rest| rest.is_empty() || begins_sound(rest)) {
        return next;
    }
    (1..bytes.len()).map(from).find(|rest| begins_sound(rest)).unwrap_or_default()
}

fn begins_sound(bytes: &[u8]) -> bool {
    let is_one = |record: &Record<'_>| record.limit.is_empty() || Limit::from_bytes(record.limit).is_ok();
    // The checksum comes last: this is called for every byte of damaged data.
    Record::parse(bytes).is_some_and(|record| is_one(&record) && record.is_sound())
}

/// Writes a refunded receipt: a record without a limit, whose balance is the end of the receipt's validity.
fn write_refund(out: &mut impl io::Write, id: TraceId, void_from: Timestamp) -> io::Result<()> {
    write_record(out, id.to_u128(), &[], &void_from.micros().to_be_bytes())
}

fn write_balance(out: &mut impl io::Write, key: Digest, limit: &Limit, balance: &Balance) -> io::Result<()> {
    write_record(out, key.to_u128(), &limit.to_bytes(FORMAT), &balance.to_bytes(FORMAT))
}

/// Writes key, checksum, the lengths of limit and balance, limit and balance.
fn write_record(out: &mut impl io::Write, key: u128, limit: &[u8], balance: &[u8]) -> io::Result<()> {
    let key = key.to_be_bytes();
    let value = [limit, balance].concat();
    let length = |bytes: &[u8]| u32::try_from(bytes.len()).unwrap_or(u32::MAX).to_be_bytes();
    out.write_all(&key)?;
    out.write_all(&checksum(COUNTER, &key, &value).to_be_bytes())?;
    out.write_all(&length(limit))?;
    out.write_all(&length(balance))?;
    out.write_all(&value)
}

/// One record as its lengths delimit it, sound or damaged.
struct Record<'a> {
    key: &'a [u8],
    sum: i64,
    value: &'a [u8],
    limit: &'a [u8],
    balance: &'a [u8],
    rest: &'a [u8],
}

impl<'a> Record<'a> {
    /// Returns `None` if the bytes end before the record does, or if its lengths exceed those of any record.
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
        checksum(COUNTER, self.key, self.value) == self.sum
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
