//! The commit mark: the number of the last acknowledged transaction, stored outside of the database.
//!
//! SQLite ends the recovery of a write-ahead log at the first frame whose checksum is wrong, and takes that for the end of
//! the log. One changed byte therefore drops every later commit, and what is left looks like a sound earlier state. So does a
//! log that was deleted, and an old copy in place of the database. The mark detects all three: `commits` in the table `meta`
//! counts transactions, the lock file holds the count that was last on disk, and a database that is behind it has lost
//! commits.
//!
//! The mark is written after SQLite has synced the commit, and is not synced itself. After a power loss it may be older than
//! the database but never newer, so it reports no loss that did not happen, and it costs no second sync.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt as _;

use super::rows::checksum;

/// Stands in for the kind of a row in the checksum of the mark. No [`Kind`](super::Kind) has this number.
const KIND: i64 = 9;
/// The count and its checksum.
const LENGTH: usize = 16;

/// Reads the mark from the lock file. Returns `None` if it was never written, or is damaged: then it proves nothing.
pub(super) fn read(lock: &File) -> Option<i64> {
    let mut bytes = [0; LENGTH];
    lock.read_exact_at(&mut bytes, 0).ok()?;
    let (count, sum) = bytes.split_first_chunk::<8>()?;
    let is_sound = checksum(KIND, &[], count).to_be_bytes() == *sum;
    is_sound.then(|| i64::from_be_bytes(*count))
}

/// Writes the mark to the lock file.
pub(super) fn write(lock: &File, commits: i64) -> io::Result<()> {
    let count = commits.to_be_bytes();
    let mut bytes = [0; LENGTH];
    let sum = checksum(KIND, &[], &count).to_be_bytes();
    bytes.iter_mut().zip(count.into_iter().chain(sum)).for_each(|(own, byte)| *own = byte);
    lock.write_all_at(&bytes, 0)
}

/// Removes the mark, before another database takes the place of this one.
pub(super) fn clear(lock: &File) -> io::Result<()> {
    lock.set_len(0)
}
