//! The write-ahead log as it lies on disk: SQLite reads it up to the first frame that is not whole and takes that for its
//! end, so what was committed behind a changed byte would be gone without a word.

use std::collections::BTreeMap;
use std::path::Path;

use super::file::beside;

const HEADER: usize = 32;
const FRAME: usize = 24;
/// What a log begins with; the lowest bit says how its sums are made.
const MAGIC: u32 = 0x377f_0682;

/// What is wrong with the log beside a file, if commits are lost in it. The last frame may be one that was being written
/// when the process ended, and nobody can tell; whatever comes before another commit was whole once.
pub(super) fn fault(path: &Path) -> Option<String> {
    let bytes = std::fs::read(beside(path, "-wal")).ok().filter(|bytes| bytes.len() > HEADER)?;
    let header = bytes.get(..HEADER)?;
    let (magic, page) = (number(header, 0)?, usize::try_from(number(header, 8)?).ok()?);
    let big = magic & 1 == 1;
    let sums = sum((0, 0), header.get(..FRAME)?, big);
    let begins_well = magic & !1 == MAGIC && Some(sums) == pair(header, FRAME);
    if !begins_well || !(512..=65_536).contains(&page) {
        return Some("the beginning of its write-ahead log is not what was written".to_owned());
    }
    let salts = pair(header, 16)?;
    let frames = bytes.get(HEADER..)?.chunks_exact(FRAME.saturating_add(page));
    let (mut sums, mut broken) = (sums, false);
    for frame in frames {
        let own = pair(frame, 8)?;
        // A log is written over from its start, and what is left of the one before has other salts: both of them.
        if own.0 != salts.0 && own.1 != salts.1 {
            return None;
        }
        if !broken {
            sums = sum(sum(sums, frame.get(..8)?, big), frame.get(FRAME..)?, big);
            broken = own != salts || Some(sums) != pair(frame, 16);
        } else if number(frame, 4)? != 0 {
            return Some("a part of its write-ahead log is not what was written, and commits come after it".to_owned());
        }
    }
    None
}

/// The latest state of each page in the log beside a file, as SQLite reads it: up to the last commit before the first frame
/// that is not whole.
pub(super) fn committed(path: &Path) -> BTreeMap<u32, Vec<u8>> {
    let bytes = std::fs::read(beside(path, "-wal")).unwrap_or_default();
    read_committed(&bytes).unwrap_or_default()
}

fn read_committed(bytes: &[u8]) -> Option<BTreeMap<u32, Vec<u8>>> {
    let (header, frames) = bytes.split_at_checked(HEADER)?;
    let (big, page) = (number(header, 0)? & 1 == 1, usize::try_from(number(header, 8)?).ok()?);
    let mut sums = sum((0, 0), header.get(..FRAME)?, big);
    let sound = number(header, 0)? & !1 == MAGIC && Some(sums) == pair(header, FRAME);
    if !sound || !(512..=65_536).contains(&page) {
        return None;
    }
    let (mut committed, mut open) = (BTreeMap::new(), BTreeMap::new());
    for frame in frames.chunks_exact(FRAME.saturating_add(page)) {
        let content = frame.get(FRAME..)?;
        sums = sum(sum(sums, frame.get(..8)?, big), content, big);
        if pair(frame, 8) != pair(header, 16) || Some(sums) != pair(frame, 16) {
            break;
        }
        open.insert(number(frame, 0)?, content.to_vec());
        if number(frame, 4)? != 0 {
            committed.append(&mut open);
        }
    }
    Some(committed)
}

fn number(bytes: &[u8], at: usize) -> Option<u32> {
    Some(u32::from_be_bytes(bytes.get(at..)?.first_chunk().copied()?))
}

fn pair(bytes: &[u8], at: usize) -> Option<(u32, u32)> {
    Some((number(bytes, at)?, number(bytes, at.checked_add(4)?)?))
}

/// SQLite's running sum over words of four bytes, two at a time.
fn sum((mut first, mut second): (u32, u32), bytes: &[u8], big: bool) -> (u32, u32) {
    let word = |bytes: &[u8; 4]| if big { u32::from_be_bytes(*bytes) } else { u32::from_le_bytes(*bytes) };
    for [one, two] in bytes.as_chunks::<4>().0.as_chunks::<2>().0 {
        first = first.wrapping_add(word(one)).wrapping_add(second);
        second = second.wrapping_add(word(two)).wrapping_add(first);
    }
    (first, second)
}
