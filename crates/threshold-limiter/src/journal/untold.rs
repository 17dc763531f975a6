//! The record of a damage in the salvaged file itself: it stays until the damage was reported, however often the process is
//! killed before that.

use std::ffi::OsString;
use std::os::unix::ffi::{OsStrExt as _, OsStringExt as _};

use rusqlite::{Transaction, params};

use super::file::put_row;
use super::rows::{Kind, Row, Total};
use super::salvage::Damage;

/// The kind of the row that describes the damage; its key is empty. No [`Kind`] has this number.
const DAMAGE: i64 = 7;
/// The kind of a row for each row of which only the key could be read; its own key is that row's kind and key.
pub(super) const UNREAD: i64 = 8;
/// How an unknown number of lost rows is stored.
const UNKNOWN: u64 = u64::MAX;

/// A row that is about the damage of the file it was salvaged from.
pub(super) enum Note {
    Damage(Damage),
    /// A row whose value could not be read.
    Unread(Row),
}

impl Note {
    /// Reads a row, if it is a note. The key of an unread row is enough, even where its value is damaged.
    pub(super) fn read(number: i64, key: &[u8], value: Option<&[u8]>) -> Option<Self> {
        match number {
            DAMAGE if key.is_empty() => decode(value?).map(Self::Damage),
            UNREAD => {
                let (kind, key) = key.split_first_chunk::<8>()?;
                let kind = Kind::from_number(i64::from_be_bytes(*kind))?;
                Some(Self::Unread(Row { kind, key: key.to_vec(), value: None }))
            }
            _ => None,
        }
    }
}

/// Records a damage, and every row that could not be read.
pub(super) fn record(
    transaction: &Transaction<'_>,
    total: &mut Total,
    damage: &Damage,
    rows: &[Row],
) -> rusqlite::Result<()> {
    put_row(transaction, total, DAMAGE, &[], Some(&encode(damage)))?;
    for row in rows.iter().filter(|row| row.value.is_none()) {
        let key = [row.kind.number().to_be_bytes().as_slice(), &row.key].concat();
        put_row(transaction, total, UNREAD, &key, Some(&[]))?;
    }
    Ok(())
}

/// Removes the record of a damage.
pub(super) fn clear(transaction: &Transaction<'_>, total: &mut Total) -> rusqlite::Result<()> {
    let mut delete = transaction.prepare_cached("DELETE FROM record WHERE kind IN (?1, ?2) RETURNING sum")?;
    let mut deleted = delete.query(params![DAMAGE, UNREAD])?;
    while let Some(row) = deleted.next()? {
        total.take(row.get(0)?);
    }
    Ok(())
}

fn encode(damage: &Damage) -> Vec<u8> {
    let Damage { reason, kept, lost, aside } = damage;
    let mut bytes = Vec::new();
    for number in [u64::try_from(*kept).unwrap_or(u64::MAX), lost.unwrap_or(UNKNOWN)] {
        bytes.extend(number.to_be_bytes());
    }
    bytes.extend(u64::try_from(reason.len()).unwrap_or(u64::MAX).to_be_bytes());
    bytes.extend(reason.bytes());
    bytes.extend(aside.as_os_str().as_bytes());
    bytes
}

fn decode(bytes: &[u8]) -> Option<Damage> {
    let (kept, bytes) = bytes.split_first_chunk::<8>()?;
    let (lost, bytes) = bytes.split_first_chunk::<8>()?;
    let (length, bytes) = bytes.split_first_chunk::<8>()?;
    let (reason, aside) = bytes.split_at_checked(usize::try_from(u64::from_be_bytes(*length)).ok()?)?;
    Some(Damage {
        reason: String::from_utf8(reason.to_vec()).ok()?,
        kept: usize::try_from(u64::from_be_bytes(*kept)).ok()?,
        lost: Some(u64::from_be_bytes(*lost)).filter(|lost| *lost != UNKNOWN),
        aside: OsString::from_vec(aside.to_vec()).into(),
    })
}
