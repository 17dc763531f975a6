//! The rows of a journal and their checksums.

use std::collections::HashMap;
use std::hash::Hasher as _;

use siphasher::sip::SipHasher13;
use threshold_core::{Digest, KeyId, Timestamp};

/// The length of a digest in bytes.
const DIGEST: usize = 16;
/// The length of a key id in bytes.
const KEY_ID: usize = 4;

/// The kind of a row. The numbers are stored: never reuse one.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
#[non_exhaustive]
pub enum Kind {
    /// Strikes and penalties of a subject, by its digest.
    Standing = 1,
    /// Login state of an account, by its digest.
    Account = 2,
    /// A ban set by an operator, by its id.
    Ban = 3,
    /// Settings of a tenant, by its name.
    Tenant = 4,
    /// Settings of a user, by its name.
    User = 5,
    /// The name of a subject that a ladder has banned, by its digest. The standing itself holds no name.
    Named = 6,
}

impl Kind {
    const ALL: [Self; 6] = [Self::Standing, Self::Account, Self::Ban, Self::Tenant, Self::User, Self::Named];

    pub(super) fn from_number(number: i64) -> Option<Self> {
        Self::ALL.into_iter().find(|kind| kind.number() == number)
    }

    pub(super) const fn number(self) -> i64 {
        self as i64
    }

    /// Returns whether the keys of this kind are digests.
    const fn has_digests(self) -> bool {
        !matches!(self, Self::Tenant | Self::User)
    }
}

/// One row of a journal.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Row {
    /// The kind of record.
    pub kind: Kind,
    /// The key of the record: a digest or a name.
    pub key: Vec<u8>,
    /// The record's bytes; `None` if the row is damaged, so that only its key is known.
    pub value: Option<Vec<u8>>,
}

impl Row {
    /// Returns the digest in the key, for kinds whose keys are digests.
    #[must_use]
    pub fn digest(&self) -> Option<Digest> {
        let (before, digest) = self.key.split_last_chunk().filter(|_| self.kind.has_digests())?;
        matches!(before.len(), 0 | KEY_ID).then(|| Digest::from_u128(u128::from_be_bytes(*digest)))
    }

    /// Returns the key id of the old secret that the digest was made with; `None` for the present secret.
    #[must_use]
    pub fn old_key_id(&self) -> Option<KeyId> {
        let (id, _) = self.key.split_first_chunk().filter(|(_, digest)| digest.len() == DIGEST)?;
        self.kind.has_digests().then(|| KeyId::from_u32(u32::from_be_bytes(*id)))
    }

    /// Marks a digest of the present secret as one of an old secret, which it becomes by a rotation.
    pub(super) fn under_old(mut self, id: KeyId) -> Self {
        if self.kind.has_digests() && self.key.len() == DIGEST {
            self.key.splice(0..0, id.to_u32().to_be_bytes());
        }
        self
    }

    /// Marks a digest of an old secret as one of the present secret, when that secret is in force again.
    pub(super) fn under_present(mut self, id: KeyId) -> Self {
        if self.old_key_id() == Some(id) {
            self.key.drain(..KEY_ID);
        }
        self
    }
}

/// The digests in a journal that were made with an old secret. The keys of their rows begin with its key id.
#[derive(Debug, Default)]
pub(super) struct OldDigests(HashMap<Digest, KeyId>);

impl OldDigests {
    pub(super) fn of(rows: &[Row]) -> Self {
        Self(rows.iter().filter_map(|row| row.digest().zip(row.old_key_id())).collect())
    }

    /// Returns the row under the key that it is stored by.
    pub(super) fn stored(&self, row: Row) -> Row {
        match row.digest().and_then(|digest| self.0.get(&digest)) {
            Some(id) => row.under_old(*id),
            None => row,
        }
    }
}

/// A line of the audit log: one change by an operator.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct AuditLine {
    /// When the change was made.
    pub at: Timestamp,
    /// The name of the token that made it, never the token.
    pub who: String,
    /// The action (`ban`, `lift`, `forgive`), and after a colon its arguments.
    pub action: String,
    /// The target of the action.
    pub about: String,
    /// The reason given.
    pub why: String,
}

/// Computes the checksum of a row. It detects accidental damage only, so its key is public.
pub(super) fn checksum(kind: i64, key: &[u8], value: &[u8]) -> i64 {
    // The key is public: a checksum detects damage, not forgery.
    let mut hasher = SipHasher13::new_with_key(b"threshold row 01");
    hasher.write(&kind.to_be_bytes());
    // Without the length, bytes that move from the key to the value would go unnoticed.
    hasher.write(&u64::try_from(key.len()).unwrap_or(u64::MAX).to_be_bytes());
    hasher.write(key);
    hasher.write(value);
    hasher.finish().cast_signed()
}

/// The summary that a database stores of itself in the table `meta`.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(super) struct Summary {
    /// The number of rows.
    pub(super) rows: i64,
    /// The sum of their checksums modulo 2^64. It does not depend on their order, so that changing one row changes it by the
    /// checksum of that row.
    pub(super) sum: i64,
    /// The number of transactions so far; see [`commit_mark`](super::commit_mark).
    pub(super) commits: i64,
}

impl Summary {
    pub(super) fn add(&mut self, checksum: i64) {
        self.rows = self.rows.saturating_add(1);
        self.sum = self.sum.wrapping_add(checksum);
    }

    pub(super) fn remove(&mut self, checksum: i64) {
        self.rows = self.rows.saturating_sub(1);
        self.sum = self.sum.wrapping_sub(checksum);
    }
}
