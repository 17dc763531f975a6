//! The keys of budgets: keyed 128-bit digests of a rule and the identity it counts by.
//!
//! The input of a digest is a sequence of tagged, length-prefixed parts, so that distinct tuples are distinct bytes whatever
//! characters they hold. The hash is keyed, so that nobody can prepare collisions.

mod partition;

use std::borrow::Cow;
use std::fmt;
use std::hash::{Hash, Hasher};
use std::net::IpAddr;

use arrayvec::ArrayVec;

use crate::limit::{Algorithm, Limit};
use siphasher::sip128::{Hasher128 as _, SipHasher13};

pub use partition::Partition;
pub(crate) use partition::{Anchors, KeyPrefix, identity_secret};

/// The digest that stands in for one key.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Digest(u128);

impl Digest {
    /// Creates a digest from its number.
    #[must_use]
    #[inline]
    pub const fn from_u128(value: u128) -> Self {
        Self(value)
    }

    /// Returns the number.
    #[must_use]
    #[inline]
    pub const fn to_u128(self) -> u128 {
        self.0
    }

    /// Returns the two halves.
    ///
    /// The first 16 bits of the first half and the first 32 bits of the second are the same for all budgets of one identity,
    /// whatever their rules: a store that places records by those bits finds them side by side. The last 16 bits of the first
    /// half are the [partition](Self::partition).
    #[must_use]
    #[inline]
    #[expect(clippy::cast_possible_truncation, reason = "each half is the 64 bits that remain")]
    pub const fn halves(self) -> [u64; 2] {
        [(self.0 >> 64) as u64, self.0 as u64]
    }
}

impl fmt::Debug for Digest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "#{:032x}", self.0)
    }
}

/// The id of one decision: 128 random bits from the host. Receipts, reservations and holds carry it, and the delay of a
/// shadow ban is derived from it under a secret.
#[derive(Clone, Copy, Default, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct TraceId(u128);

impl TraceId {
    /// Creates an id from its number.
    #[must_use]
    #[inline]
    pub const fn from_u128(value: u128) -> Self {
        Self(value)
    }

    /// Returns the number.
    #[must_use]
    #[inline]
    pub const fn to_u128(self) -> u128 {
        self.0
    }
}

impl fmt::Debug for TraceId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:032x}", self.0)
    }
}

/// Formats the id as 32 hexadecimal digits.
impl fmt::Display for TraceId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:032x}", self.0)
    }
}

/// The key of digests: random for each process if state is in memory alone, derived from the installation's secret if it is
/// stored.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct DigestKey([u8; 16]);

impl DigestKey {
    /// The public key for names in stored records that are no secret, as those of rules. They are digested to be short, and
    /// stay the same when the secret is rotated.
    pub(crate) const OF_NAMES: Self = Self(*b"threshold name 1");

    /// Creates a key from 16 secret bytes.
    #[must_use]
    pub const fn new(bytes: [u8; 16]) -> Self {
        Self(bytes)
    }

    /// Starts a digest. The domain is its first byte, so that digests of two domains never collide.
    pub(crate) fn begin(self, domain: Domain) -> KeyBuilder {
        // SipHash-1-3 with 128 bits of output: the keyed hash that the standard library uses against chosen collisions, and
        // the fastest of its family.
        let mut builder = KeyBuilder::new(self);
        builder.push(&[domain as u8]);
        builder
    }

    /// Starts a digest under a key that [`KeyBuilder::derive`] returned.
    #[inline]
    pub(crate) fn go_on(self) -> KeyBuilder {
        KeyBuilder::new(self)
    }

    /// Returns a hasher of single byte strings, under a key that [`KeyBuilder::derive`] returned.
    pub(crate) fn digester(self) -> Digester {
        Digester(SipHasher13::new_with_key(&self.0))
    }

    /// Digests the id of a request, or the request itself. Nodes with the same secret and release compute the same digest. It
    /// is its own anchor.
    #[must_use]
    pub fn request(self, value: &impl Hash) -> Digest {
        let mut hasher = PortableHasher(SipHasher13::new_with_key(&self.begin(Domain::Request).derive().0));
        value.hash(&mut hasher);
        Digest(hasher.0.finish128().as_u128())
    }

    /// Returns the short form of a secret value for people to read: `#` and 16 hexadecimal digits of its digest.
    #[must_use]
    pub fn redact(self, value: &str) -> String {
        let mut key = self.begin(Domain::Redacted);
        key.text(Part::Fact, value);
        // 64 bits are enough to tell values apart in a log.
        format!("#{:016x}", key.finish().0 >> 64)
    }
}

/// Returns whether a text has the form of [`DigestKey::redact`]: `#` and 16 hexadecimal digits in lower case.
#[must_use]
pub fn is_redacted(text: &str) -> bool {
    let digits = text.strip_prefix('#').filter(|digits| digits.len() == 16);
    digits.is_some_and(|digits| digits.bytes().all(|byte| matches!(byte, b'0'..=b'9' | b'a'..=b'f')))
}

/// Returns a name as it is written where a digest may stand in place of a name: with one more `#` in front, if it looks like a digest or
/// begins with `##`. So a text is a digest, or the name of one caller, and never both.
#[must_use]
pub fn write_name(name: &str) -> Cow<'_, str> {
    if is_redacted(name) || name.starts_with("##") { format!("#{name}").into() } else { name.into() }
}

/// Returns the name that [`write_name`] has written.
#[must_use]
pub fn read_name(written: &str) -> &str {
    written.strip_prefix('#').filter(|name| name.starts_with('#')).unwrap_or(written)
}

impl fmt::Debug for DigestKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        // With the key anyone could compute the digest of a name, or prepare keys that collide. It must not reach a
        // log.
        f.write_str("DigestKey(secret)")
    }
}

/// A hasher that writes integers alike on every machine: little-endian, and `usize` as 8 bytes.
struct PortableHasher(SipHasher13);

impl Hasher for PortableHasher {
    fn finish(&self) -> u64 {
        self.0.finish()
    }

    fn write(&mut self, bytes: &[u8]) {
        self.0.write(bytes);
    }

    // The default methods of `Hasher` write an integer in the machine's own byte order, and `usize` in its own width.
    fn write_u16(&mut self, value: u16) {
        self.write(&value.to_le_bytes());
    }

    fn write_u32(&mut self, value: u32) {
        self.write(&value.to_le_bytes());
    }

    fn write_u64(&mut self, value: u64) {
        self.write(&value.to_le_bytes());
    }

    fn write_u128(&mut self, value: u128) {
        self.write(&value.to_le_bytes());
    }

    fn write_usize(&mut self, value: usize) {
        self.write_u64(value as u64);
    }

    fn write_isize(&mut self, value: isize) {
        self.write(&(value as i64).to_le_bytes());
    }
}

/// A hasher that is keyed already, for many byte strings under one key.
#[derive(Clone, Copy)]
pub(crate) struct Digester(SipHasher13);

impl Digester {
    #[inline]
    pub(crate) fn digest(&self, bytes: &[u8]) -> Digest {
        Digest(self.0.hash(bytes).as_u128())
    }
}

impl fmt::Debug for Digester {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Digester(secret)")
    }
}

/// The keys of a limit without a policy, by any text.
#[derive(Debug, Clone, Copy)]
pub struct TextKeys(Digester);

impl TextKeys {
    /// Creates the keys of a limit. Each algorithm has keys of its own, as each rule of a policy does.
    #[must_use]
    pub fn new(key: DigestKey, limit: &Limit) -> Self {
        let mut builder = key.begin(Domain::Text);
        // Limits of two algorithms on the same text would otherwise overwrite each other's state.
        builder.text(Part::Identity, limit.algorithm().map_or("never", Algorithm::name));
        Self(builder.derive().digester())
    }

    /// Returns the digest of one key.
    #[must_use]
    #[inline]
    pub fn digest(&self, text: &str) -> Digest {
        // The hasher is for this limit alone and there is one part only, so it needs neither tag nor length. The key is its
        // own anchor, so the partition bits stay as they are.
        self.0.digest(text.as_bytes())
    }
}

/// The kind of thing that a digest stands for. The numbers are stored: never reuse one.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Domain {
    Rule = 1,
    Subject = 2,
    Account = 3,
    LoginAddress = 4,
    Redacted = 5,
    CostName = 6,
    Text = 7,
    Ban = 8,
    CountedBy = 9,
    Delay = 10,
    Anchor = 11,
    Request = 12,
}

/// The kind of a part of a key. The numbers are stored: never reuse one.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Part {
    Identity = 1,
    Address = 2,
    Tenant = 3,
    User = 4,
    Tier = 5,
    Category = 6,
    Endpoint = 7,
    Method = 8,
    Host = 9,
    Header = 10,
    Fact = 11,
    /// The address that stands in for an identity that the request lacks.
    Floor = 12,
    /// The block of addresses that keys share when a store is full.
    Folded = 13,
}

/// A digest under construction. Parts are buffered and hashed at once, which is twice as fast; most keys fit the buffer.
#[derive(Debug, Clone)]
pub(crate) struct KeyBuilder {
    key: DigestKey,
    buffer: [u8; Self::CAPACITY],
    len: usize,
    /// The hash so far, once the buffer was full.
    hashed: Option<SipHasher13>,
}

impl KeyBuilder {
    const CAPACITY: usize = 96;

    #[inline]
    fn new(key: DigestKey) -> Self {
        Self { key, buffer: [0; Self::CAPACITY], len: 0, hashed: None }
    }

    #[inline]
    pub(crate) fn text(&mut self, part: Part, value: &str) {
        self.bytes(part, value.as_bytes());
    }

    /// Appends a tag, the length as a varint, and the bytes: two different sequences of parts never have equal bytes.
    pub(crate) fn bytes(&mut self, part: Part, value: &[u8]) {
        match u8::try_from(value.len()) {
            // One push for tag and length: nearly all names are shorter than 128 bytes.
            Ok(short @ 0..128) => self.push(&[part as u8, short]),
            _ => self.push_long(part, value.len()),
        }
        self.push(value);
    }

    #[cold]
    fn push_long(&mut self, part: Part, mut length: usize) {
        self.push(&[part as u8]);
        while length > 127 {
            self.push(&[u8::try_from(length & 127).unwrap_or(0) | 128]);
            length >>= 7;
        }
        self.push(&[u8::try_from(length).unwrap_or(0)]);
    }

    /// Appends an address as its bits under a prefix, which do not depend on its spelling.
    pub(crate) fn address(&mut self, part: Part, group: AddressGroup) {
        self.push(&[part as u8]);
        // No length: the version byte inside tells whether 4 or 16 octets follow.
        self.push(&group.to_bytes());
    }

    fn push(&mut self, bytes: &[u8]) {
        let end = self.len.saturating_add(bytes.len());
        if let Some(room) = self.buffer.get_mut(self.len..end) {
            room.copy_from_slice(bytes);
            self.len = end;
        } else {
            self.spill(bytes);
        }
    }

    #[cold]
    fn spill(&mut self, bytes: &[u8]) {
        // The buffered bytes come first, then these. SipHash does not depend on how its input is divided, so the digest
        // is that of one buffer.
        let hasher = self.hashed.get_or_insert_with(|| SipHasher13::new_with_key(&self.key.0));
        hasher.write(self.buffer.get(..self.len).unwrap_or_default());
        hasher.write(bytes);
        self.len = 0;
    }

    /// Returns a key for everything that begins like this, so that the beginning is hashed once.
    pub(crate) fn derive(&self) -> DigestKey {
        DigestKey(self.finish().0.to_be_bytes())
    }

    pub(crate) fn finish(&self) -> Digest {
        let buffered = self.buffer.get(..self.len).unwrap_or_default();
        match &self.hashed {
            None => Digest(SipHasher13::new_with_key(&self.key.0).hash(buffered).as_u128()),
            Some(hasher) => {
                // On a copy: a builder can be finished several times, as for a key and what is derived from it.
                let mut hasher = *hasher;
                hasher.write(buffered);
                Digest(hasher.finish128().as_u128())
            }
        }
    }
}

/// A block of addresses that share one budget, from [`crate::address`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct AddressGroup {
    pub(crate) base: IpAddr,
    pub(crate) prefix: u8,
}

impl AddressGroup {
    /// Returns the prefix, the version (4 or 6), and the octets under the prefix.
    #[inline]
    pub(crate) fn to_bytes(self) -> ArrayVec<u8, 18> {
        let mut bytes = ArrayVec::new();
        // 18 bytes hold an IPv6 address.
        let _ = match self.base {
            IpAddr::V4(v4) => {
                let [a, b, c, d] = v4.octets();
                // The prefix is part of the key. Without it 10.0.0.0/8 and 10.0.0.0/24 would share a budget.
                bytes.try_extend_from_slice(&[self.prefix, 4, a, b, c, d])
            }
            IpAddr::V6(v6) => {
                bytes.extend([self.prefix, 6]);
                bytes.try_extend_from_slice(&v6.octets())
            }
        };
        bytes
    }
}

/// Formats a single address without its prefix.
impl fmt::Display for AddressGroup {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let whole = if self.base.is_ipv4() { 32 } else { 128 };
        if self.prefix == whole { write!(f, "{}", self.base) } else { write!(f, "{}/{}", self.base, self.prefix) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const KEY: DigestKey = DigestKey::new([7; 16]);

    fn digest(parts: &[(Part, String)]) -> Digest {
        let mut key = KEY.begin(Domain::Rule);
        for (part, value) in parts {
            key.text(*part, value);
        }
        key.finish()
    }

    fn parts() -> impl Strategy<Value = Vec<(Part, String)>> {
        let part = prop_oneof![Just(Part::Tenant), Just(Part::User), Just(Part::Fact)];
        // A small alphabet of separators, so that joined spellings collide often if joining is all that is done.
        let short = "[ab:_=,/{}%\u{0}]{0,4}";
        // Around the lengths at which the spelling of a length, or the use of the buffer, changes.
        let long = prop::sample::select(vec![60usize, 90, 91, 92, 93, 94, 95, 96, 126, 127, 128, 129, 200])
            .prop_map(|len| "a".repeat(len));
        prop::collection::vec((part, prop_oneof![4 => short.prop_map(String::from), 1 => long]), 0..4)
    }

    proptest! {
        /// Fails without the length in `bytes`.
        #[test]
        fn distinct_tuples_give_distinct_keys(a in parts(), b in parts()) {
            prop_assert_eq!(a == b, digest(&a) == digest(&b));
        }
    }

    #[test]
    fn the_pair_that_another_limiter_confuses_stays_apart() {
        let two = [(Part::Tenant, "a".to_owned()), (Part::User, "b".to_owned())];
        let one = [(Part::Tenant, "a_user_b".to_owned())];
        assert_ne!(digest(&two), digest(&one));
    }

    #[test]
    fn digests_depend_on_the_secret_and_on_their_field() {
        let parts = |key: DigestKey, domain| {
            let mut key = key.begin(domain);
            key.text(Part::User, "u1");
            key.finish()
        };
        assert_ne!(parts(KEY, Domain::Rule), parts(DigestKey::new([8; 16]), Domain::Rule));
        assert_ne!(parts(KEY, Domain::Rule), parts(KEY, Domain::Subject));
    }

    /// Nodes on different machines must compute the same digest. Woken by: a width or an order of bytes that is the machine's
    /// own.
    #[test]
    fn a_request_is_digested_alike_on_every_machine() {
        struct Written(&'static [u8]);
        impl Hash for Written {
            fn hash<H: Hasher>(&self, state: &mut H) {
                state.write(self.0);
            }
        }
        let key = DigestKey::new([1; 16]);
        let check = |left: Digest, bytes| assert_eq!(left, key.request(&Written(bytes)));
        check(key.request(&0x0102_u16), &[2, 1]);
        check(key.request(&0x0102_u32), &[2, 1, 0, 0]);
        check(key.request(&0x0102_u64), &[2, 1, 0, 0, 0, 0, 0, 0]);
        check(key.request(&0x0102_u128), &[2, 1, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0]);
        check(key.request(&0x0102_usize), &[2, 1, 0, 0, 0, 0, 0, 0]);
        check(key.request(&-2_isize), &[254, 255, 255, 255, 255, 255, 255, 255]);
        check(key.request(&("check", "r")), b"check\xffr\xff");
        assert_ne!(key.request(&"r"), DigestKey::new([2; 16]).request(&"r"));
    }

    /// A change of this value orphans every stored balance.
    #[test]
    fn the_digest_of_a_known_key_stays_what_it_is() {
        let parts = [(Part::Tenant, "acme".to_owned()), (Part::User, "u1".to_owned())];
        assert_eq!(format!("{:?}", digest(&parts)), "#397a989360e1748b7e6e55dc61389b41");
    }

    #[test]
    fn a_redacted_value_is_short_and_says_nothing() {
        let text = KEY.redact("session-cookie");
        assert!(is_redacted(&text));
        // A name may begin like a digest, and is none.
        for other in [
            "#",
            "#0123456789abcde",
            "#0123456789abcdef0",
            "#0123456789ABCDEF",
            "0123456789abcdef0",
            "#0123456789abcdeé",
        ] {
            assert!(!is_redacted(other), "{other}");
        }
        assert_eq!(text.len(), 17);
        assert!(text.strip_prefix('#').is_some_and(|hex| hex.chars().all(|c| c.is_ascii_hexdigit())));
        assert_ne!(text, KEY.redact("session-cookie2"));
        // Woken by leaving out either condition of `write_name`: two names, or a name and a digest, would be written alike.
        let names =
            [text.as_str(), &format!("#{text}"), &format!("##{text}"), "#", "##", "###", "#ada", "##ada", "ada"];
        let written: std::collections::BTreeSet<_> = names.iter().map(|name| write_name(name)).collect();
        assert_eq!(written.len(), names.len());
        assert!(written.iter().all(|written| !is_redacted(written)));
        assert!(names.iter().all(|name| read_name(&write_name(name)) == *name));
        assert_eq!((write_name("#ada"), write_name(&text)), ("#ada".into(), format!("#{text}").into()));
    }
}
