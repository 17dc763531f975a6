//! A page scan of a damaged SQLite database: finds every row that is whole on some page, without SQLite.
//!
//! This reads the [file format of SQLite](https://www.sqlite.org/fileformat2.html), because SQLite itself reaches a row only
//! from the root of its table. It opens no database whose first page is damaged, and reads nothing below a damaged inner
//! page: a single page can hide thousands of bans. `PRAGMA integrity_check` and our checksums find the damage but bring no
//! row back. The tests `no_page_leads_to_the_loss_of_others`, `a_page_that_is_gone_hides_no_more_than_itself` and
//! `a_file_that_was_cut_keeps_every_row_that_is_whole` fail without this file. The scan never decides whether a row is
//! right: that is the checksum in the row.

use std::collections::BTreeSet;
use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt as _;
use std::path::Path;

/// The page size of a journal, SQLite's default, for files whose header cannot be read.
pub(super) const PAGE_SIZE: u64 = 4_096;
/// The longest row that is read. An account with every counter and attempt that it may have takes less.
const MAX_ROW: usize = 1 << 24;

// The types of b-tree pages.
const INTERIOR_INDEX: u8 = 0x02;
const INTERIOR_TABLE: u8 = 0x05;
const LEAF_INDEX: u8 = 0x0a;
const LEAF_TABLE: u8 = 0x0d;

/// The pages of a database file.
#[derive(Debug)]
pub(super) struct Pages {
    file: File,
    /// The size of a page in bytes.
    size: usize,
    count: u32,
}

/// One value of a row; `Missing` if it is cut off or of a type that no journal holds.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Value {
    Null,
    Integer(i64),
    Text(String),
    Blob(Vec<u8>),
    Missing,
}

/// One cell of a b-tree page: the values of a row, and its row id if its table has row ids.
#[derive(Debug)]
pub(super) struct Cell {
    pub(super) rowid: Option<i64>,
    pub(super) values: Vec<Value>,
}

impl Pages {
    pub(super) fn open(path: &Path) -> io::Result<Self> {
        let file = File::open(path)?;
        let mut header = [0; 18];
        let has_header = file.read_exact_at(&mut header, 0).is_ok() && header.starts_with(b"SQLite format 3\0");
        let stated = match u16::from_be_bytes([header[16], header[17]]) {
            // 65536 does not fit into two bytes.
            1 => 1 << 16,
            size => u64::from(size),
        };
        let is_valid = |size: &u64| size.is_power_of_two() && (512..=1 << 16).contains(size);
        let size = has_header.then_some(stated).filter(is_valid).unwrap_or(PAGE_SIZE);
        let count = u32::try_from(file.metadata()?.len().div_ceil(size)).unwrap_or(u32::MAX);
        Ok(Self { file, size: usize::try_from(size).unwrap_or(usize::MAX), count })
    }

    /// Passes every readable cell to `show`.
    ///
    /// Cells that the tables lead to come first, then cells on pages that no readable page points to: of two versions of a
    /// row the first is the current one. Pages on the free list are skipped, because their rows were deleted.
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

    /// Reads a page. One that the end of the file cuts off is filled up with zeros.
    fn page(&self, number: u32) -> Option<Vec<u8>> {
        let at = u64::from(number.checked_sub(1)?).checked_mul(u64::try_from(self.size).ok()?)?;
        let mut page = vec![0; self.size];
        let mut filled = 0;
        while let Some(rest) = page.get_mut(filled..).filter(|rest| !rest.is_empty()) {
            match self.file.read_at(rest, at.saturating_add(u64::try_from(filled).ok()?)) {
                Ok(0) => break,
                Ok(read) => filled = filled.saturating_add(read),
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                // A sector that cannot be read. The bytes before it may hold whole rows.
                Err(_) => break,
            }
        }
        (filled > 0).then_some(page)
    }

    /// Returns the root page of each table, from the schema on the first page.
    fn roots(&self) -> Vec<u32> {
        // The schema is a table itself, with its root on the first page.
        let mut roots = vec![1];
        self.cells(1, &mut |cell: Cell| {
            // The columns of the schema: type, name, table, root page, definition.
            if let [Value::Text(_), Value::Text(_), Value::Text(_), Value::Integer(root), _] = cell.values.as_slice() {
                roots.extend(u32::try_from(*root).ok());
            }
        });
        roots
    }

    /// Returns the pages of the free list, as far as it can be read.
    fn free(&self) -> BTreeSet<u32> {
        let mut free = BTreeSet::new();
        let mut trunk = self.page(1).and_then(|page| number(&page, 32)).unwrap_or(0);
        // A damaged list may lead back to itself. It ends at the first page that was met before.
        while trunk != 0 && trunk <= self.count && free.insert(trunk) {
            let Some(page) = self.page(trunk) else { break };
            // A trunk page holds the next trunk, the number of its leaves, and the leaves.
            let leaves = page.as_chunks::<4>().0.iter().map(|bytes| u32::from_be_bytes(*bytes));
            let count = usize::try_from(number(&page, 4).unwrap_or(0)).unwrap_or(usize::MAX);
            free.extend(leaves.skip(2).take(count).filter(|leaf| *leaf > 1));
            trunk = number(&page, 0).unwrap_or(0);
        }
        // The first page is never free: a list that names it is damaged.
        free.remove(&1);
        free
    }

    /// Passes the cells of a tree to `show`. `visited` ends the walk where damaged pages point to each other.
    fn walk(&self, root: u32, visited: &mut BTreeSet<u32>, show: &mut impl FnMut(Cell)) {
        let mut open = vec![root];
        while let Some(number) = open.pop() {
            if (1..=self.count).contains(&number) && visited.insert(number) {
                open.extend(self.cells(number, show));
            }
        }
    }

    /// Passes the cells of a b-tree page to `show`. Returns the pages below it.
    fn cells(&self, page: u32, show: &mut impl FnMut(Cell)) -> Vec<u32> {
        let mut below = Vec::new();
        let Some(bytes) = self.page(page) else { return below };
        // The first page begins with the file's header.
        let start: usize = if page == 1 { 100 } else { 0 };
        let kind = bytes.get(start).copied().unwrap_or(0);
        let first = match kind {
            INTERIOR_INDEX | INTERIOR_TABLE => {
                // The rightmost child is in the header. Each cell has the child to its left.
                below.extend(number(&bytes, start.saturating_add(8)));
                start.saturating_add(12)
            }
            LEAF_INDEX | LEAF_TABLE => start.saturating_add(8),
            _ => return below,
        };
        // The number of cells is at offset 3 of the page's header.
        let count = short(&bytes, start.saturating_add(3)).unwrap_or(0);
        let pointers = bytes.get(first..).unwrap_or_default().as_chunks::<2>().0;
        for pointer in pointers.iter().take(count) {
            let at = usize::from(u16::from_be_bytes(*pointer));
            // A pointer into the header is damaged.
            let Some(mut cell) = bytes.get(at..).filter(|_| at >= first) else { continue };
            if matches!(kind, INTERIOR_INDEX | INTERIOR_TABLE) {
                below.extend(number(cell, 0));
                cell = cell.get(4..).unwrap_or_default();
            }
            // Cells of an interior page have a row only in an index, and a table without row ids is stored as one.
            if let Some(cell) = (kind != INTERIOR_TABLE).then(|| self.cell(kind, cell)).flatten() {
                show(cell);
            }
        }
        below
    }

    fn cell(&self, kind: u8, mut bytes: &[u8]) -> Option<Cell> {
        // A damaged length must not allocate gigabytes.
        let length = usize::try_from(varint(&mut bytes)?).ok().filter(|length| *length <= MAX_ROW)?;
        let rowid = if kind == LEAF_TABLE { Some(varint(&mut bytes)?.cast_signed()) } else { None };
        let values = values(&self.payload(kind, length, bytes)?)?;
        Some(Cell { rowid, values })
    }

    /// Returns the bytes of a row: those in its cell and those on its overflow pages, as far as they exist.
    fn payload(&self, kind: u8, length: usize, cell: &[u8]) -> Option<Vec<u8>> {
        // The file format prescribes how much of a long row is in its cell. The rest is on overflow pages.
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
        // Every page adds bytes, so that pages which point to each other do not keep this going.
        while payload.len() < length && next != 0 {
            let Some(page) = self.page(next).filter(|_| next <= self.count) else { break };
            let missing = length.saturating_sub(payload.len()).min(whole);
            payload.extend_from_slice(page.get(4..)?.get(..missing)?);
            next = number(&page, 0)?;
        }
        Some(payload)
    }
}

/// Decodes the values of a row.
fn values(payload: &[u8]) -> Option<Vec<Value>> {
    let mut header = payload;
    // The header of a row holds its own length and the type of each value. The values follow.
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
    // The serial types of the file format. 7 is a float, and 10 and 11 are reserved: no journal has them.
    let length = match kind {
        0 | 8 | 9 => 0,
        1..=4 => kind,
        5 => 6,
        6 | 7 => 8,
        _ => kind.saturating_sub(12) >> 1,
    };
    let Some((own, rest)) = usize::try_from(length).ok().and_then(|length| body.split_at_checked(length)) else {
        // Everything behind a value that is cut off is missing too.
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

/// Decodes a big-endian two's complement integer of at most 8 bytes.
fn integer(bytes: &[u8]) -> i64 {
    let fill = if bytes.first().is_some_and(|first| first & 0x80 != 0) { u8::MAX } else { 0 };
    let mut whole = [fill; 8];
    whole.iter_mut().rev().zip(bytes.iter().rev()).for_each(|(own, byte)| *own = *byte);
    i64::from_be_bytes(whole)
}

/// Decodes a variable-length integer of SQLite: seven bits a byte, most significant first; a ninth byte has eight.
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
