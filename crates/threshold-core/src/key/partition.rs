//! Partitions: the 16 bits of a stored digest that place its record, and the identity that they come from.

use std::fmt;
use std::net::IpAddr;

use super::{AddressGroup, Digest, DigestKey, Digester, Domain, KeyBuilder, Part};

/// One of the 65,536 partitions of stored state. One node of a shared store holds all records of a partition, so that one
/// transaction can change them.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Partition(u16);

impl Partition {
    /// The number of partitions.
    pub const COUNT: usize = 1 << 16;

    /// Creates a partition from its number.
    #[must_use]
    #[inline]
    pub const fn from_u16(number: u16) -> Self {
        Self(number)
    }

    /// Returns the number.
    #[must_use]
    #[inline]
    pub const fn to_u16(self) -> u16 {
        self.0
    }

    /// Returns the partition of a user, or of an account, of a tenant with this partition whose users are spread over so many.
    /// It is never the tenant's own.
    pub(crate) fn spread(self, user: Digest, over: u32) -> Self {
        let [_, lower] = user.halves();
        let place = lower.checked_rem(u64::from(over)).unwrap_or(0).saturating_add(1);
        // Multiples of an odd number are distinct, and those of the golden ratio are as far apart as can be, so that also a
        // store whose nodes hold ranges of partitions spreads them evenly.
        Self(self.0.wrapping_add(GOLDEN.wrapping_mul(u16::try_from(place).unwrap_or(0))))
    }
}

impl fmt::Display for Partition {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

/// The bits of a digest that are its partition: the last 16 of the upper half. Tables in memory choose a shard by the
/// first bits of the upper half and a slot by the lower half, so the keys of one partition spread over a whole table.
const PARTITION: u128 = 0xffff << SHIFT;
const SHIFT: u32 = 64;
/// 2^16 over the golden ratio, rounded to an odd number.
const GOLDEN: u16 = 40_503;
/// The bits of a budget's key that are those of the identity it is counted by; see [`Digest::halves`].
const BEGINNINGS: u128 = 0xffff_0000_0000_0000_ffff_ffff_0000_0000;

impl Digest {
    /// Returns the key of a shard of the budget under this key: in a partition of its own, so that several nodes or objects count it.
    pub(crate) fn in_shard(self, shard: u32) -> Self {
        let steps = GOLDEN.wrapping_mul(u16::try_from(shard).unwrap_or(0));
        self.in_partition(Partition(self.partition().0.wrapping_add(steps)))
    }

    /// Returns the partition of the record under this digest.
    ///
    /// 16 bits of every stored digest are set to the partition of its anchor, so that records that are used together are
    /// stored together. The other 112 bits identify the record.
    ///
    /// | what is stored | its anchor |
    /// |---|---|
    /// | a budget, a standing | the tenant if `per` has it (with `spread` and the user in `per`, one of so many partitions), else the user, else the /24 or /48 of the address, else the headers and facts; else the rule |
    /// | an account of a login | the tenant that it belongs to under `user_scope = "tenant"`, else the account's name |
    /// | the budget of a login's address | its /24 or /48 |
    /// | a shared budget for keys that a full store has no room for | the /24 or /48, or the rule |
    /// | a budget of a limit without a policy | its key |
    /// | a request with an id | the id |
    ///
    /// An address that replaces a missing name is also the anchor in its place.
    #[must_use]
    #[inline]
    #[expect(clippy::cast_possible_truncation, reason = "the last 16 bits are meant")]
    pub const fn partition(self) -> Partition {
        Partition((self.0 >> SHIFT) as u16)
    }

    /// Returns the same digest in another partition.
    #[inline]
    pub(crate) const fn in_partition(self, partition: Partition) -> Self {
        Self(self.0 & !PARTITION | (partition.0 as u128) << SHIFT)
    }
}

/// Computes the partitions of anchors. It depends on the secret alone, so that all nodes with one secret agree.
#[derive(Debug, Clone)]
pub(crate) struct Anchors {
    tenant: Digester,
    user: Digester,
    /// A mask and two odd factors.
    address: [u64; 3],
}

impl Anchors {
    pub(crate) fn new(key: DigestKey) -> Self {
        let numbers = |which: &str| {
            let mut builder = key.begin(Domain::Anchor);
            builder.text(Part::Address, which);
            builder.finish().halves()
        };
        let ([mask, first], [second, _]) = (numbers("first"), numbers("second"));
        Self {
            tenant: identity_secret(key, ["tenant"]).derive().digester(),
            user: identity_secret(key, ["user"]).derive().digester(),
            // Odd factors, because a product with an even number loses bits of the block.
            address: [mask, first | 1, second | 1],
        }
    }

    /// Returns the digest of a tenant, which holds its partition. `per = ["tenant"]` counts by the same digest, so that it is
    /// computed once for both.
    #[inline]
    pub(crate) fn tenant(&self, name: &str) -> Digest {
        self.tenant.digest(name.as_bytes())
    }

    /// Returns the digest of a user, which holds its partition. `per = ["user"]` counts by the same digest.
    #[inline]
    pub(crate) fn user(&self, name: &str) -> Digest {
        self.user.digest(name.as_bytes())
    }

    /// Returns the partition of a block of addresses: that of the /24 or /48 that it lies in, or begins with.
    // A partition only places a record and identifies nobody, so it needs no keyed hash: 16 well mixed bits are enough, and
    // cost a tenth of SipHash.
    #[inline]
    pub(crate) fn address(&self, group: AddressGroup) -> Partition {
        let block = match group.base {
            IpAddr::V4(v4) => u64::from(v4.to_bits() >> 8),
            // The bit above tells an IPv6 block from an IPv4 block with the same number.
            IpAddr::V6(v6) => 1 << 48 | (v6.to_bits() >> 80) as u64,
        };
        let [mask, first, second] = self.address;
        // Keyed by the secret, so that nobody can choose addresses that all fall into one partition.
        let mixed = (block ^ mask).wrapping_mul(first);
        Partition(((mixed ^ mixed >> 32).wrapping_mul(second) >> 48) as u16)
    }

    /// Returns the partition of a rule, for budgets that are not counted by caller.
    pub(crate) fn rule(key: DigestKey, names: impl IntoIterator<Item: AsRef<str>>) -> Partition {
        let mut builder = key.begin(Domain::Anchor);
        for name in names {
            builder.text(Part::Identity, name.as_ref());
        }
        builder.finish().partition()
    }
}

/// Begins the secret under which the identities of one `per` are digested.
pub(crate) fn identity_secret(key: DigestKey, per: impl IntoIterator<Item: AsRef<str>>) -> KeyBuilder {
    let mut builder = key.begin(Domain::CountedBy);
    for per in per {
        // The names of the parts and not their values, so that equal values of two different facts never make the same
        // identity.
        builder.text(Part::Identity, per.as_ref());
    }
    builder
}

/// What makes the key of a rule's budget, or of a ladder's standing, out of the digest of whom it is counted by.
#[derive(Clone, Copy)]
pub(crate) struct KeyPrefix {
    secret: DigestKey,
    /// The secret without the bits that are the identity's.
    own: u128,
}

impl KeyPrefix {
    /// `alone` is the partition of a rule that tells no callers apart, and so has no identity for an anchor.
    pub(crate) fn new(secret: DigestKey, alone: Option<Partition>) -> Self {
        // The bits that place a record stay the identity's: `over` combines with XOR, and XOR with 0 changes nothing.
        let own = u128::from_be_bytes(secret.0) & !BEGINNINGS & !PARTITION;
        // An identity that tells no callers apart has partition 0, so XOR sets that of the rule.
        let partition = alone.map_or(0, |partition| u128::from(partition.0) << SHIFT);
        Self { secret, own: own | partition }
    }

    /// Returns the key of a budget: the rule's secret combined with the digest of the identity it counts by. Both look random
    /// without the secret, so two budgets share a key as rarely as two digests of 112 bits are equal.
    ///
    /// Both halves begin as the identity's do, so that a store can keep together what belongs to one, and the partition
    /// is the identity's: see [`Digest::halves`].
    #[inline]
    pub(crate) fn over(&self, identity: Digest) -> Digest {
        Digest(self.own ^ identity.0)
    }

    /// Begins a digest under the secret.
    pub(crate) fn go_on(&self) -> KeyBuilder {
        self.secret.go_on()
    }
}

impl fmt::Debug for KeyPrefix {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("KeyPrefix(secret)")
    }
}
