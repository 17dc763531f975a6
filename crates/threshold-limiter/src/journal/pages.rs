//! The pages of a damaged SQLite file, read without SQLite: a row that is whole on any page is found, whatever is missing
//! around it. The format is that of <https://www.sqlite.org/fileformat2.html>.

use std::collections::{BTreeMap, BTreeSet};
use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt as _;
use std::path::Path;

use super::wal;

/// What pages have where the header cannot be read: what SQLite makes them, unless it is told otherwise.
const USUAL_SIZE: usize = 4_096;
/// No row is longer: an account with every counter and attempt that it may have takes less.
const LONGEST_ROW: usize = 1 << 24;

const INTERIOR_INDEX: u8 = 0x02;
const INTERIOR_TABLE: u8 = 0x05;
const LEAF_INDEX: u8 = 0x0a;
const LEAF_TABLE: u8 = 0x0d;

/// A file, with the pages of its write-ahead log in the place of its own.
#[derive(Debug)]
pub(super) struct Pages {
    file: File,
    size: usize,
    count: u32,
    log: BTreeMap<u32, Vec<u8>>,
}

/// One value of a row; `Missing` where the bytes end before it does.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Value {
    Null,
    Integer(i64),
    Text(String),
    Blob(Vec<u8>),
    Missing,
}

/// What one cell holds: the number of its row, if it is of a table that has one, and its values.
#[derive(Debug)]
pub(super) struct Cell {
    pub(super) rowid: Option<i64>,
    pub(super) values: Vec<Value>,
}

impl Pages {
    pub(super) fn open(path: &Path) -> io::Result<Self> {
        let file = File::open(path)?;
        let log = wal::committed(path);
        let mut header = [0; 18];
        let read = file.read_exact_at(&mut header, 0).is_ok() && header.starts_with(b"SQLite format 3\0");
        let stated = match u16::from_be_bytes([header[16], header[17]]) {
            1 => 1 << 16,
            size => usize::from(size),
        };
        let in_log = log.values().next().map(Vec::len);
        let sound = |size: &usize| size.is_power_of_two() && (512..=1 << 16).contains(size);
        let size = in_log.or_else(|| read.then_some(stated).filter(sound)).unwrap_or(USUAL_SIZE);
        let own = file.metadata()?.len().div_ceil(u64::try_from(size).unwrap_or(u64::MAX));
        let last = log.last_key_value().map_or(0, |(number, _)| *number);
        Ok(Self { file, size, count: u32::try_from(own).unwrap_or(u32::MAX).max(last), log })
    }

    /// `user_version`, as the header says.
    pub(super) fn user_version(&self) -> Option<i64> {
        number(&self.page(1)?, 60).map(i64::from)
    }

    /// Shows every cell that can be read. Those that the tables lead to come first; then those on pages whose way there is
    /// lost. Pages that are known to be free are left out: what they hold was deleted.
    pub(super) fn each(&self, mut show: impl FnMut(Cell)) {
        let mut visited = self.free();
        for root in self.roots() {
            self.walk(root, &mut visited, &mut show);
        }
        for page in 1..=self.count {
            if visited.insert(page) {
                self.cells(page, &mut show);
            }
        }
    }

    /// A page, filled up with zeros where the file ends within it.
    fn page(&self, number: u32) -> Option<Vec<u8>> {
        if let Some(page) = self.log.get(&number) {
            return Some(page.clone());
        }
        let at = u64::from(number.checked_sub(1)?).checked_mul(u64::try_from(self.size).ok()?)?;
        let mut page = vec![0; self.size];
        let mut filled = 0;
        while let Some(rest) = page.get_mut(filled..).filter(|rest| !rest.is_empty()) {
            match self.file.read_at(rest, at.saturating_add(u64::try_from(filled).ok()?)) {
                Ok(0) => break,
                Ok(read) => filled = filled.saturating_add(read),
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(_) => break,
            }
        }
        (filled > 0).then_some(page)
    }

    /// The first page of each table, as the schema says.
    fn roots(&self) -> Vec<u32> {
        let mut roots = vec![1];
        self.cells(1, &mut |cell: Cell| {
            if let [Value::Text(_), Value::Text(_), Value::Text(_), Value::Integer(root), _] = cell.values.as_slice() {
                roots.extend(u32::try_from(*root).ok());
            }
        });
        roots
    }

    /// The pages that the file says are not in use, as far as its list of them can be read.
    fn free(&self) -> BTreeSet<u32> {
        let mut free = BTreeSet::new();
        let mut trunk = self.page(1).and_then(|page| number(&page, 32)).unwrap_or(0);
        while trunk != 0 && trunk <= self.count && free.insert(trunk) {
            let Some(page) = self.page(trunk) else { break };
            let leaves = page.as_chunks::<4>().0.iter().map(|bytes| u32::from_be_bytes(*bytes));
            let count = usize::try_from(number(&page, 4).unwrap_or(0)).unwrap_or(usize::MAX);
            free.extend(leaves.skip(2).take(count).filter(|leaf| *leaf > 1));
            trunk = number(&page, 0).unwrap_or(0);
        }
        // A list that says so is damaged.
        free.remove(&1);
        free
    }

    fn walk(&self, root: u32, visited: &mut BTreeSet<u32>, show: &mut impl FnMut(Cell)) {
        let mut open = vec![root];
        while let Some(number) = open.pop() {
            if (1..=self.count).contains(&number) && visited.insert(number) {
                open.extend(self.cells(number, show));
            }
        }
    }

    /// Shows the cells of a page, if it is one of a tree; returns the pages below it.
    fn cells(&self, page: u32, show: &mut impl FnMut(Cell)) -> Vec<u32> {
        let mut below = Vec::new();
        let Some(bytes) = self.page(page) else { return below };
        // The first page begins with the file's header.
        let start: usize = if page == 1 { 100 } else { 0 };
        let kind = bytes.get(start).copied().unwrap_or(0);
        let first = match kind {
            INTERIOR_INDEX | INTERIOR_TABLE => {
                below.extend(number(&bytes, start.saturating_add(8)));
                start.saturating_add(12)
            }
            LEAF_INDEX | LEAF_TABLE => start.saturating_add(8),
            _ => return below,
        };
        let count = short(&bytes, start.saturating_add(3)).unwrap_or(0);
        let pointers = bytes.get(first..).unwrap_or_default().as_chunks::<2>().0;
        for pointer in pointers.iter().take(count) {
            let at = usize::from(u16::from_be_bytes(*pointer));
            let Some(mut cell) = bytes.get(at..).filter(|_| at >= first) else { continue };
            if matches!(kind, INTERIOR_INDEX | INTERIOR_TABLE) {
                below.extend(number(cell, 0));
                cell = cell.get(4..).unwrap_or_default();
            }
            if let Some(cell) = (kind != INTERIOR_TABLE).then(|| self.cell(kind, cell)).flatten() {
                show(cell);
            }
        }
        below
    }

    fn cell(&self, kind: u8, mut bytes: &[u8]) -> Option<Cell> {
        let length = usize::try_from(varint(&mut bytes)?).ok().filter(|length| *length <= LONGEST_ROW)?;
        let rowid = if kind == LEAF_TABLE { Some(varint(&mut bytes)?.cast_signed()) } else { None };
        let values = values(&self.payload(kind, length, bytes)?)?;
        Some(Cell { rowid, values })
    }

    /// A row's bytes: those in its cell, and those on the pages that it overflows to, as far as they are there.
    fn payload(&self, kind: u8, length: usize, cell: &[u8]) -> Option<Vec<u8>> {
        let share = |of: usize| self.size.checked_sub(12)?.checked_mul(of)?.checked_div(255)?.checked_sub(23);
        let most = if kind == LEAF_TABLE { self.size.checked_sub(35)? } else { share(64)? };
        if length <= most {
            return Some(cell.get(..length).unwrap_or(cell).to_vec());
        }
        let (least, whole) = (share(32)?, self.size.checked_sub(4)?);
        let over = least.checked_add(length.checked_sub(least)?.checked_rem(whole)?)?;
        let local = if over <= most { over } else { least };
        let mut payload = cell.get(..local)?.to_vec();
        let mut next = number(cell, local)?;
        while payload.len() < length && next != 0 {
            let Some(page) = self.page(next).filter(|_| next <= self.count) else { break };
            let missing = length.saturating_sub(payload.len()).min(whole);
            payload.extend_from_slice(page.get(4..)?.get(..missing)?);
            next = number(&page, 0)?;
        }
        Some(payload)
    }
}

/// The values of a row, from its bytes.
fn values(payload: &[u8]) -> Option<Vec<Value>> {
    let mut header = payload;
    let length = usize::try_from(varint(&mut header)?).ok()?;
    let mut body = payload.get(length..).unwrap_or_default();
    let used = payload.len().checked_sub(header.len())?;
    let mut types = header.get(..length.checked_sub(used)?)?;
    let mut values = Vec::new();
    while !types.is_empty() {
        values.push(value(varint(&mut types)?, &mut body));
    }
    Some(values)
}

fn value(kind: u64, body: &mut &[u8]) -> Value {
    let length = match kind {
        0 | 8 | 9 => 0,
        1..=4 => kind,
        5 => 6,
        6 | 7 => 8,
        _ => kind.saturating_sub(12) >> 1,
    };
    let Some((own, rest)) = usize::try_from(length).ok().and_then(|length| body.split_at_checked(length)) else {
        *body = &[];
        return Value::Missing;
    };
    *body = rest;
    match kind {
        0 => Value::Null,
        8 => Value::Integer(0),
        9 => Value::Integer(1),
        1..=6 => Value::Integer(integer(own)),
        12.. if kind & 1 == 0 => Value::Blob(own.to_vec()),
        13.. => String::from_utf8(own.to_vec()).map_or(Value::Missing, Value::Text),
        _ => Value::Missing,
    }
}

/// Big-endian, two's complement, of at most 8 bytes.
fn integer(bytes: &[u8]) -> i64 {
    let fill = if bytes.first().is_some_and(|first| first & 0x80 != 0) { u8::MAX } else { 0 };
    let mut whole = [fill; 8];
    whole.iter_mut().rev().zip(bytes.iter().rev()).for_each(|(own, byte)| *own = *byte);
    i64::from_be_bytes(whole)
}

/// SQLite's own: seven bits a byte, the most significant first; a ninth byte has eight.
fn varint(bytes: &mut &[u8]) -> Option<u64> {
    let mut value = 0u64;
    for place in 0..9 {
        let (&byte, rest) = bytes.split_first()?;
        *bytes = rest;
        if place == 8 {
            return Some(value << 8 | u64::from(byte));
        }
        value = value << 7 | u64::from(byte & 0x7f);
        if byte & 0x80 == 0 {
            return Some(value);
        }
    }
    None
}

fn number(bytes: &[u8], at: usize) -> Option<u32> {
    Some(u32::from_be_bytes(*bytes.get(at..)?.first_chunk()?))
}

fn short(bytes: &[u8], at: usize) -> Option<usize> {
    Some(usize::from(u16::from_be_bytes(*bytes.get(at..)?.first_chunk()?)))
}
