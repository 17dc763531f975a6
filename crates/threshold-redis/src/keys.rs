//! The names of records in Redis. docs/formats.md lists them.

use threshold_core::key::Partition;
use threshold_core::{Digest, TraceId};

/// The prefix of every key, so that a database can be shared with other programs.
const PREFIX: &str = "th";

/// The length of the name of a record.
const LONGEST: usize = "th:{cdef}b:0123456789abcdef0011223344556677".len();

/// The number of partitions that say in which partitions a reservation is held. It is found by an id that says nothing about that.
const HOMES: u16 = 64;

/// The place of every record that is found by an id, where all partitions are on one server.
pub(super) const WHOLE: Partition = Partition::from_u16(0);

/// The kinds of records that are stored as bytes under a key of their own.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(super) enum RecordKind {
    Balance,
    Standing,
    Account,
    /// The part of a reservation that is held in a partition, beside its charges.
    Reservation,
    /// The reservation as a whole, which says in which partitions it is held.
    Whole,
    Refund,
    Request,
}

/// The identity of a record.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(super) struct RecordKey {
    pub(super) kind: RecordKind,
    pub(super) partition: Partition,
    id: u128,
}

impl RecordKey {
    pub(super) fn balance(key: Digest) -> Self {
        Self::of_digest(RecordKind::Balance, key)
    }

    pub(super) fn of_digest(kind: RecordKind, digest: Digest) -> Self {
        Self { kind, partition: digest.partition(), id: digest.to_u128() }
    }

    /// Returns the record of a reservation or of a refund in a partition.
    pub(super) fn of_id(kind: RecordKind, partition: Partition, id: TraceId) -> Self {
        Self { kind, partition, id: id.to_u128() }
    }

    /// Returns the digest that the record is found by.
    pub(super) fn digest(&self) -> Digest {
        Digest::from_u128(self.id)
    }

    /// Returns the key in Redis. The hash tag is the partition alone, so that no text of a user chooses a slot of a Cluster.
    pub(super) fn name(&self) -> String {
        let kind = match self.kind {
            RecordKind::Balance => 'b',
            RecordKind::Standing => 's',
            RecordKind::Account => 'a',
            RecordKind::Reservation => 'v',
            RecordKind::Whole => 'w',
            RecordKind::Refund => 'r',
            RecordKind::Request => 'q',
        };
        let mut name = in_partition(self.partition);
        name.push(kind);
        name.push(':');
        push_hex(&mut name, &self.id.to_be_bytes());
        name
    }
}

/// Returns the beginning of a name in a partition, with room for the rest.
fn in_partition(place: Partition) -> String {
    let mut name = String::with_capacity(LONGEST);
    name.push_str(PREFIX);
    name.push_str(":{");
    push_hex(&mut name, &place.to_u16().to_be_bytes());
    name.push('}');
    name
}

/// Appends bytes in hexadecimal. A decision needs several names, and `format!` takes longer for them than core does to settle it.
fn push_hex(text: &mut String, bytes: &[u8]) {
    let digits = bytes.iter().flat_map(|byte| [byte >> 4, byte & 0xf]);
    text.extend(digits.filter_map(|digit| char::from_digit(u32::from(digit), 16)));
}

/// Returns the partition of the whole of a reservation.
pub(super) fn home(id: TraceId) -> Partition {
    let number = id.to_u128().checked_rem(u128::from(HOMES)).unwrap_or(0);
    Partition::from_u16(u16::try_from(number).unwrap_or(0))
}

/// Returns the key of the head of a partition: its history, and when the next of its reservations expires.
pub(super) fn head(place: Partition) -> String {
    in_partition(place) + "head"
}

/// Returns the key of the index of the reservations in a partition that give back their charges when they expire.
pub(super) fn expiring(place: Partition) -> String {
    in_partition(place) + "expiring"
}

/// Returns the member of a reservation in its index.
pub(super) fn member(id: TraceId) -> String {
    format!("{:032x}", id.to_u128())
}

/// Returns the id of a member of an index.
pub(super) fn id_of_member(member: &[u8]) -> Option<TraceId> {
    let text = std::str::from_utf8(member).ok()?;
    u128::from_str_radix(text, 16).ok().map(TraceId::from_u128)
}

/// Returns a key of the control partition, which holds bans, settings and the ids of the secrets in force.
pub(super) fn control(part: &str) -> String {
    format!("{PREFIX}:{{control}}{part}")
}

/// Returns the key of the list of standings with a ban, or of accounts with a lock, whose digests begin with this byte. Each list
/// is a range, so that all of them in the order of the digests are read one after another.
pub(super) fn list(kind: RecordKind, first: u8) -> String {
    let name = if kind == RecordKind::Account { "locked" } else { "banned" };
    format!("{PREFIX}:{{{name}{first:02x}}}")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_have_the_partition_as_their_hash_tag() {
        let digest = Digest::from_u128(0x0123_4567_89ab_cdef_0011_2233_4455_6677);
        let name = RecordKey::balance(digest).name();
        assert_eq!(name, "th:{cdef}b:0123456789abcdef0011223344556677");
        let id = TraceId::from_u128(0xff);
        let refund = RecordKey::of_id(RecordKind::Refund, home(id), id);
        assert_eq!(refund.name(), format!("th:{{003f}}r:{:032x}", 0xff));
        assert_eq!(id_of_member(member(id).as_bytes()), Some(id));
        assert_eq!(id_of_member(b"no number"), None);
    }
}
