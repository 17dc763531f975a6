//! The names of RocksDB that limitador's disk store uses, without a database.
//!
//! limitador's Redis store compiles only together with its disk store, and RocksDB takes longer to build than the rest of the
//! benchmarks together. No benchmark opens a database, and the type of one has no value here, so none can.

use std::fmt;
use std::path::Path;

/// An open database. There is none.
#[derive(Debug)]
pub enum DBWithThreadMode<T> {
    /// Holds the parameter, and cannot be made.
    Never(std::convert::Infallible, std::marker::PhantomData<T>),
}

/// The way in which threads share a database.
#[derive(Debug)]
pub enum MultiThreaded {}

/// A database that threads share.
pub type DB = DBWithThreadMode<MultiThreaded>;

/// A key and its value.
type Entry = Result<(Box<[u8]>, Box<[u8]>), Error>;

impl<T> DBWithThreadMode<T> {
    /// Fails.
    pub fn open(_: &Options, _: impl AsRef<Path>) -> Result<Self, Error> {
        Err(Error)
    }

    /// Returns a value.
    pub fn get(&self, _: impl AsRef<[u8]>) -> Result<Option<Vec<u8>>, Error> {
        match *self {
            Self::Never(never, _) => match never {},
        }
    }

    /// Deletes a value.
    pub fn delete(&self, _: impl AsRef<[u8]>) -> Result<(), Error> {
        match *self {
            Self::Never(never, _) => match never {},
        }
    }

    /// Merges a value.
    pub fn merge(&self, _: impl AsRef<[u8]>, _: impl AsRef<[u8]>) -> Result<(), Error> {
        match *self {
            Self::Never(never, _) => match never {},
        }
    }

    /// Returns all entries.
    pub fn iterator(&self, _: IteratorMode) -> std::vec::IntoIter<Entry> {
        match *self {
            Self::Never(never, _) => match never {},
        }
    }

    /// Returns the entries whose keys have a prefix.
    pub fn prefix_iterator(&self, _: impl AsRef<[u8]>) -> std::vec::IntoIter<Entry> {
        match *self {
            Self::Never(never, _) => match never {},
        }
    }
}

/// Settings of a database.
#[derive(Debug, Default)]
pub struct Options;

impl Options {
    /// Sets how values are compressed.
    pub fn set_compression_type(&mut self, _: DBCompressionType) {}

    /// Sets which values a compaction keeps.
    pub fn set_compaction_filter(&mut self, _: &str, _: impl FnMut(u32, &[u8], &[u8]) -> CompactionDecision) {}

    /// Sets how values are merged.
    pub fn set_merge_operator_associative(
        &mut self,
        _: &str,
        _: impl Fn(&[u8], Option<&[u8]>, &MergeOperands) -> Option<Vec<u8>>,
    ) {
    }

    /// Sets whether a missing database is created.
    pub fn create_if_missing(&mut self, _: bool) {}
}

/// How values are compressed.
#[derive(Debug)]
pub enum DBCompressionType {
    /// As bzip2 does.
    Bz2,
    /// Not at all.
    None,
}

/// Whether a compaction keeps a value.
#[derive(Debug)]
pub enum CompactionDecision {
    /// It does.
    Keep,
    /// It does not.
    Remove,
}

/// Where an iteration begins.
#[derive(Debug)]
pub enum IteratorMode {
    /// At the first key.
    Start,
}

/// Values that are merged.
#[derive(Debug)]
pub struct MergeOperands(Vec<Vec<u8>>);

impl<'a> IntoIterator for &'a MergeOperands {
    type Item = &'a [u8];
    type IntoIter = std::iter::Map<std::slice::Iter<'a, Vec<u8>>, fn(&'a Vec<u8>) -> &'a [u8]>;

    fn into_iter(self) -> Self::IntoIter {
        self.0.iter().map(Vec::as_slice)
    }
}

/// A failure. The only one is that there is no database.
#[derive(Debug)]
pub struct Error;

impl Error {
    /// Returns its kind.
    pub fn kind(&self) -> ErrorKind {
        ErrorKind::NotFound
    }
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("this build has no RocksDB")
    }
}

impl std::error::Error for Error {}

/// The kind of a failure.
#[derive(Debug, PartialEq, Eq)]
pub enum ErrorKind {
    /// There is nothing.
    NotFound,
    /// It took too long.
    TimedOut,
    /// It may succeed later.
    TryAgain,
}
