//! The record of damage inside of a salvaged database.
//!
//! It stays until the damage was reported to an operator: a process that is killed before that reports it again at the next
//! start.

use std::ffi::OsString;
use std::os::unix::ffi::{OsStrExt as _, OsStringExt as _};

use rusqlite::{Transaction, params};

use super::rows::{Kind, Row, Summary};
use super::salvage::Damage;
use super::schema::put_row;

/// The kind of the row that describes the damage; its key is empty. No [`Kind`] has this number.
const DAMAGE: i64 = 7;
/// The kind of a row for each row whose value could not be read. Its key is the kind and the key of that row.
pub(super) const UNREADABLE: i64 = 8;
/// The stored form of an unknown number of lost rows.
const UNKNOWN: u64 = u64::MAX;

/// A row that describes damage.
pub(super) enum DamageRow {
    Damage(Damage),
    /// A row whose value could not be read.
    Unreadable(Row),
}

impl DamageRow {
    /// Decodes a row if it is of one of the two kinds. An unreadable row is described by its key alone, so its value may be
    /// damaged too.
    pub(super) fn decode(number: i64, key: &[u8], value: Option<&[u8]>) -> Option<Self> {
        match number {
            DAMAGE if key.is_empty() => decode(value?).map(Self::Damage),
            UNREADABLE => {
                let (kind, key) = key.split_first_chunk::<8>()?;
                let kind = Kind::from_number(i64::from_be_bytes(*kind))?;
                Some(Self::Unreadable(Row { kind, key: key.to_vec(), value: None }))
            }
            _ => None,
        }
    }
}

/// Records damage, and every row that could not be read.
pub(super) fn write(
    transaction: &Transaction<'_>,
    summary: &mut Summary,
    damage: &Damage,
    rows: &[Row],
) -> rusqlite::Result<()> {
    put_row(transaction, summary, DAMAGE, &[], Some(&encode(damage)))?;
    for row in rows.iter().filter(|row| row.value.is_none()) {
        let key = [row.kind.number().to_be_bytes().as_slice(), &row.key].concat();
        put_row(transaction, summary, UNREADABLE, &key, Some(&[]))?;
    }
    Ok(())
}

/// Removes the record.
pub(super) fn clear(transaction: &Transaction<'_>, summary: &mut Summary) -> rusqlite::Result<()> {
    // The summary has to lose the checksum of every deleted row.
    let mut delete = transaction.prepare_cached("DELETE FROM record WHERE kind IN (?1, ?2) RETURNING sum")?;
    let mut deleted = delete.query(params![DAMAGE, UNREADABLE])?;
    while let Some(row) = deleted.next()? {
        summary.remove(row.get(0)?);
    }
    Ok(())
}

fn encode(damage: &Damage) -> Vec<u8> {
    let Damage { reason, kept, lost, quarantine } = damage;
    let mut bytes = Vec::new();
    for number in [u64::try_from(*kept).unwrap_or(u64::MAX), lost.unwrap_or(UNKNOWN)] {
        bytes.extend(number.to_be_bytes());
    }
    bytes.extend(u64::try_from(reason.len()).unwrap_or(u64::MAX).to_be_bytes());
    bytes.extend(reason.bytes());
    bytes.extend(quarantine.as_os_str().as_bytes());
    bytes
}

fn decode(bytes: &[u8]) -> Option<Damage> {
    let (kept, bytes) = bytes.split_first_chunk::<8>()?;
    let (lost, bytes) = bytes.split_first_chunk::<8>()?;
    let (length, bytes) = bytes.split_first_chunk::<8>()?;
    let (reason, quarantine) = bytes.split_at_checked(usize::try_from(u64::from_be_bytes(*length)).ok()?)?;
    Some(Damage {
        reason: String::from_utf8(reason.to_vec()).ok()?,
        kept: usize::try_from(u64::from_be_bytes(*kept)).ok()?,
        lost: Some(u64::from_be_bytes(*lost)).filter(|lost| *lost != UNKNOWN),
        quarantine: OsString::from_vec(quarantine.to_vec()).into(),
    })
}
