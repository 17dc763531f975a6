//! The rows of a journal, and the sum by which a changed one is told from what was written.

use std::collections::HashMap;
use std::hash::Hasher as _;

use siphasher::sip::SipHasher13;
use threshold_core::{Digest, KeyId, Timestamp};

/// The bytes of a digest.
const DIGEST: usize = 16;
/// The bytes of a key id.
const KEY_ID: usize = 4;

/// What a row is about. The numbers are stored: never reuse one.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Kind {
    /// How it stands with a subject, by its digest.
    Standing = 1,
    /// What is known of an account, by its digest.
    Account = 2,
    /// A ban that an operator has set, by its number.
    Ban = 3,
    /// What a tenant has of its own, by its name.
    Tenant = 4,
    /// What a user has of its own, by their name.
    User = 5,
    /// Whom a ladder has banned, by the subject's digest: the standing itself holds no name.
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

    /// Whether its rows are found by digests.
    const fn has_digests(self) -> bool {
        !matches!(self, Self::Tenant | Self::User)
    }
}

/// One row.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Row {
    /// What it is about.
    pub kind: Kind,
    /// Whom it is about.
    pub key: Vec<u8>,
    /// What it says; `None` where it says something else than was written, and nobody knows what that was.
    pub value: Option<Vec<u8>>,
}

impl Row {
    /// The digest that its key is, if it is one.
    #[must_use]
    pub fn digest(&self) -> Option<Digest> {
        let (before, digest) = self.key.split_last_chunk().filter(|_| self.kind.has_digests())?;
        matches!(before.len(), 0 | KEY_ID).then(|| Digest::from_u128(u128::from_be_bytes(*digest)))
    }

    /// The key id of the old secret that its digest was made with; `None` for the journal's present one.
    #[must_use]
    pub fn old_key_id(&self) -> Option<KeyId> {
        let (id, _) = self.key.split_first_chunk().filter(|(_, digest)| digest.len() == DIGEST)?;
        self.kind.has_digests().then(|| KeyId::from_u32(u32::from_be_bytes(*id)))
    }

    /// The same row, if its digest was made with the journal's present secret, which is an old one from now on.
    pub(super) fn under_old(mut self, id: KeyId) -> Self {
        if self.kind.has_digests() && self.key.len() == DIGEST {
            self.key.splice(0..0, id.to_u32().to_be_bytes());
        }
        self
    }

    /// The same row, if its digest was made with a secret that was an old one and is the present one again.
    pub(super) fn under_present(mut self, id: KeyId) -> Self {
        if self.old_key_id() == Some(id) {
            self.key.drain(..KEY_ID);
        }
        self
    }
}

/// The digests in a journal that were made with an old secret. Their rows begin with its key id.
#[derive(Debug, Default)]
pub(super) struct OldDigests(HashMap<Digest, KeyId>);

impl OldDigests {
    pub(super) fn of(rows: &[Row]) -> Self {
        Self(rows.iter().filter_map(|row| row.digest().zip(row.old_key_id())).collect())
    }

    /// The row as it is stored.
    pub(super) fn stored(&self, row: Row) -> Row {
        match row.digest().and_then(|digest| self.0.get(&digest)) {
            Some(id) => row.under_old(*id),
            None => row,
        }
    }
}

/// Who changed what, and why.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct AuditLine {
    /// When.
    pub at: Timestamp,
    /// Who: the name of a token, never the token.
    pub who: String,
    /// What was done: a word (`ban`, `lift`, `forgive`), and behind a colon what was given or taken.
    pub action: String,
    /// To whom.
    pub about: String,
    /// Why.
    pub why: String,
}

/// The sum of a row. It stands against chance alone, so its key is no secret.
pub(super) fn row_sum(kind: i64, key: &[u8], value: &[u8]) -> i64 {
    let mut hasher = SipHasher13::new_with_key(b"threshold row 01");
    hasher.write(&kind.to_be_bytes());
    hasher.write(&u64::try_from(key.len()).unwrap_or(u64::MAX).to_be_bytes());
    hasher.write(key);
    hasher.write(value);
    hasher.finish().cast_signed()
}

/// The sum of all rows: it is the same in whatever order they were written, so one row changes it by its own sum.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(super) struct Total {
    pub(super) rows: i64,
    pub(super) sum: i64,
}

impl Total {
    pub(super) fn add(&mut self, sum: i64) {
        self.rows = self.rows.saturating_add(1);
        self.sum = self.sum.wrapping_add(sum);
    }

    pub(super) fn take(&mut self, sum: i64) {
        self.rows = self.rows.saturating_sub(1);
        self.sum = self.sum.wrapping_sub(sum);
    }
}
