//! Hashes the keys of one table: any `Hash` key becomes a tag of 64 bits and the place where its probe begins.
//!
//! What a key writes into its hasher is taken as a vector of words of 64 bits: an integer is a word, and bytes are their
//! length followed by their words. After the last word comes a 1, so that no vector is another one with zeros behind it. The
//! hash is the sum of all words, each times a secret coefficient of 128 bits; the upper half of the sum is the tag
//! ("Strongly universal string hashing is fast", Lemire and Kaser). Of two different vectors, even if an attacker chose them, all pairs
//! of tags are equally likely as long as nobody has seen one, so they are equal with a probability of 2^-64. That is proven,
//! and it is why this hash serves here and nowhere else: its output stays in this table and is never shown to anyone.
//!
//! A key with more words than there are coefficients is hashed with SipHash-1-3 under a secret from there on.

use std::hash::{Hash, Hasher};
use std::slice;

use siphasher::sip128::{Hasher128 as _, SipHasher13};
use threshold_core::Digest;

/// The coefficients: for the length and eight words of a text, which is a name, an address or a digest in hexadecimal; for
/// the mark at the end; and two to spare, for a tuple of such a text with integers.
const COEFFICIENTS: usize = 12;
/// The secret numbers of 128 bits: the coefficients, a factor, and the key of SipHash.
const NUMBERS: usize = COEFFICIENTS + 2;
const SECRET: usize = NUMBERS * size_of::<u128>();

/// A hash under a secret of its own.
pub(super) struct KeyHash {
    coefficients: [u128; COEFFICIENTS],
    factor: u64,
    long: [u8; 16],
}

/// The hash of one key.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Hashed {
    /// Identifies the key in its slot; never 0.
    pub(super) tag: u64,
    /// Chooses the line where the probe begins, and its stride.
    pub(super) place: u64,
}

impl Hashed {
    /// Returns both halves as the digest that stands for the key.
    pub(super) fn identity(self) -> Digest {
        Digest::from_u128(u128::from(self.tag) << 64 | u128::from(self.place))
    }
}

impl KeyHash {
    /// Creates a hash with a random secret.
    pub(super) fn new() -> Self {
        // Under a scheduler that tries many interleavings, nothing else may differ from run to run.
        Self::from_secret(if cfg!(shuttle) { fixed_secret() } else { crate::random() })
    }

    fn from_secret(secret: [u8; SECRET]) -> Self {
        let mut numbers = secret.as_chunks().0.iter().map(|bytes| u128::from_le_bytes(*bytes));
        let mut number = || numbers.next().expect("a secret has all numbers");
        Self {
            coefficients: [(); COEFFICIENTS].map(|()| number()),
            // Never 0, which would give every key the same place.
            factor: low(number()) | 1,
            long: number().to_le_bytes(),
        }
    }

    /// Hashes a key.
    #[inline(always)]
    pub(super) fn hash<K: Hash + ?Sized>(&self, key: &K) -> Hashed {
        let mut hasher =
            SumHasher { hash: self, sum: 0, coefficients: self.coefficients.iter(), is_after_bytes: false };
        key.hash(&mut hasher);
        hasher.hashed()
    }

    /// Replaces a sum by a keyed digest of it and of further bytes. Chained from call to call, it takes any number of them.
    #[cold]
    #[inline(never)]
    fn chain(&self, sum: u128, bytes: &[u8]) -> u128 {
        let mut hasher = SipHasher13::new_with_key(&self.long);
        hasher.write(&sum.to_le_bytes());
        hasher.write(bytes);
        hasher.finish128().as_u128()
    }

    /// Mixes a number for use as a place. Sums of similar keys are at even distances, and so would their places be: now
    /// close together, now far apart. Folding the two halves of a product breaks the pattern.
    #[inline]
    fn spread(&self, number: u64) -> u64 {
        let product = times(u128::from(self.factor), number);
        high(product) ^ low(product)
    }
}

/// The hasher of one key. All of its methods are in line, so that for a `str` only the sum over its words is left: the
/// branches on `is_after_bytes` are decided when it is compiled.
struct SumHasher<'h> {
    hash: &'h KeyHash,
    sum: u128,
    /// Those that no word has used yet.
    coefficients: slice::Iter<'h, u128>,
    /// Whether the last write was bytes.
    is_after_bytes: bool,
}

impl SumHasher<'_> {
    #[inline(always)]
    fn word(&mut self, word: u64) {
        self.is_after_bytes = false;
        self.sum = match self.coefficients.next() {
            Some(coefficient) => self.sum.wrapping_add(times(*coefficient, word)),
            None => self.hash.chain(self.sum, &word.to_le_bytes()),
        };
    }

    /// Chains bytes that have more words than there are coefficients. Some of the words may be part of the sum already,
    /// which does no harm.
    #[inline(always)]
    fn long(&mut self, bytes: &[u8]) {
        self.sum = self.hash.chain(self.sum, bytes);
        self.coefficients = [].iter();
    }

    #[inline(always)]
    fn hashed(mut self) -> Hashed {
        let sum = match self.coefficients.next() {
            // The mark at the end: a 1.
            Some(coefficient) => self.sum.wrapping_add(*coefficient),
            None => self.hash.chain(self.sum, &[]),
        };
        let tag = high(sum);
        // An unused slot has the tag 0.
        Hashed { tag: tag.max(1), place: self.hash.spread(tag ^ low(sum).rotate_left(32)) }
    }
}

impl Hasher for SumHasher<'_> {
    #[inline(always)]
    fn write(&mut self, bytes: &[u8]) {
        self.word(bytes.len() as u64);
        self.is_after_bytes = true;
        let (chunks, rest) = bytes.as_chunks();
        for chunk in chunks {
            let Some(coefficient) = self.coefficients.next() else { return self.long(bytes) };
            self.sum = self.sum.wrapping_add(times(*coefficient, u64::from_le_bytes(*chunk)));
        }
        if !rest.is_empty() {
            let Some(coefficient) = self.coefficients.next() else { return self.long(bytes) };
            self.sum = self.sum.wrapping_add(times(*coefficient, last_word(bytes)));
        }
    }

    #[inline(always)]
    fn write_u8(&mut self, value: u8) {
        // A `str` writes a 0xff after its bytes, where it ends. Here the length has said that.
        if self.is_after_bytes && value == 0xff {
            self.is_after_bytes = false;
        } else {
            self.word(u64::from(value));
        }
    }

    #[inline(always)]
    fn write_u16(&mut self, value: u16) {
        self.word(u64::from(value));
    }

    #[inline(always)]
    fn write_u32(&mut self, value: u32) {
        self.word(u64::from(value));
    }

    #[inline(always)]
    fn write_u64(&mut self, value: u64) {
        self.word(value);
    }

    #[inline(always)]
    fn write_u128(&mut self, value: u128) {
        self.word(low(value));
        self.word(high(value));
    }

    #[inline(always)]
    fn write_usize(&mut self, value: usize) {
        self.word(value as u64);
    }

    // Signed integers are written as unsigned ones by the standard library's defaults.

    fn finish(&self) -> u64 {
        high(self.sum)
    }
}

impl std::fmt::Debug for KeyHash {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("KeyHash(secret)")
    }
}

/// Returns the same "secret" in every run.
fn fixed_secret() -> [u8; SECRET] {
    use rand::{Rng as _, SeedableRng as _};
    let mut secret = [0; SECRET];
    rand::rngs::StdRng::seed_from_u64(7).fill_bytes(&mut secret);
    secret
}

/// Returns the last bytes of a key as a word, up to eight. Two keys of one length that differ in their last words differ
/// here: bytes may be read twice, but none is left out.
#[inline]
fn last_word(bytes: &[u8]) -> u64 {
    if let Some(last) = bytes.last_chunk() {
        return u64::from_le_bytes(*last);
    }
    // Four to seven bytes: the two halves overlap.
    if let (Some(first), Some(last)) = (bytes.first_chunk(), bytes.last_chunk()) {
        return u64::from(u32::from_le_bytes(*first)) | u64::from(u32::from_le_bytes(*last)) << 32;
    }
    // One to three bytes.
    let at = |place: usize| bytes.get(place).copied().map_or(0, u64::from);
    at(0) | at(1) << 8 | at(2) << 16
}

#[inline]
fn times(coefficient: u128, word: u64) -> u128 {
    coefficient.wrapping_mul(u128::from(word))
}

#[inline]
fn high(wide: u128) -> u64 {
    low(wide >> 64)
}

#[inline]
fn low(wide: u128) -> u64 {
    u64::try_from(wide & u128::from(u64::MAX)).unwrap_or(0)
}

#[cfg(all(test, not(shuttle)))]
mod tests {
    use std::collections::HashSet;

    use proptest::prelude::*;

    use super::*;

    fn hash() -> KeyHash {
        KeyHash::from_secret(fixed_secret())
    }

    fn letter(number: u32) -> u8 {
        u8::try_from(number & 127).expect("seven bits")
    }

    /// Generates texts around the lengths at which words end, and beyond what is hashed as words; with few letters, so that
    /// many differ in one byte only, or in zeros at the end.
    fn texts() -> impl Strategy<Value = String> {
        let ends =
            prop::sample::select(vec![0usize, 1, 2, 3, 4, 5, 7, 8, 9, 15, 16, 17, 24, 63, 64, 65, 72, 80, 81, 88, 200]);
        (ends, "[\u{0}a]{0,3}", any::<prop::sample::Index>(), "[\u{0}ab]").prop_map(|(len, end, at, letter)| {
            let mut text = "a".repeat(len) + &end;
            let at = at.index(text.len().max(1)).min(text.len());
            text.insert_str(at, &letter);
            text
        })
    }

    proptest! {
        #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::with_cases(4_096) })]

        /// Woken by: leaving out the length; zeros for the last word; `first_chunk` for `last_chunk`; and one coefficient
        /// for two words.
        #[test]
        fn distinct_keys_have_distinct_tags(one in texts(), other in texts()) {
            let hash = hash();
            let (a, b) = (hash.hash(one.as_str()), hash.hash(other.as_str()));
            prop_assert_eq!(one == other, a.tag == b.tag);
            prop_assert_eq!(one == other, a == b);
        }
    }

    /// Sorts keys into 256 boxes of 64 on average, by the upper bits of the place, which choose a line, and by the lower ones,
    /// which choose a stride. The keys are numbered, padded, have the same words in another order, or differ in the last
    /// bytes of their words. For random places the sum of squared differences over 64 is 255 ± 23. It must not be much
    /// larger, nor smaller, as it is for places at even distances.
    ///
    /// Woken by: the upper half of the sum for the place, without `spread`; and one coefficient for all words.
    #[test]
    fn similar_keys_are_spread_as_if_by_chance() {
        let patterns: [fn(u32) -> String; 8] = [
            |n| format!("{n}"),
            |n| format!("user:{n:08}"),
            |n| format!("{n:016x}-suffix"),
            |n| format!("10.0.{}.{}", n >> 8, n & 255),
            |n| "\u{0}".repeat(usize::try_from(n % 32).unwrap()) + &n.to_string(),
            |n| format!("{:08}{:08}", n >> 7, n & 127),
            |n| String::from_utf8([b"user/id", &[letter(n)][..], b"tenant/", &[letter(n >> 7)]].concat()).unwrap(),
            |n| String::from_utf8([letter(n), letter(n >> 7)].repeat(12)).unwrap(),
        ];
        let hash = hash();
        for (number, pattern) in patterns.iter().enumerate() {
            let all: Vec<Hashed> = (0..1 << 14).map(|n| hash.hash(pattern(n).as_str())).collect();
            let tags: HashSet<u64> = all.iter().map(|hashed| hashed.tag).collect();
            assert_eq!(tags.len(), all.len(), "pattern {number}");
            for shift in [56, 24] {
                let mut boxes = [0u32; 256];
                for hashed in &all {
                    boxes[usize::try_from(hashed.place >> shift & 255).unwrap()] += 1;
                }
                let squares: u32 = boxes.iter().map(|count| count.abs_diff(64).pow(2)).sum();
                assert!((140..=400).contains(&(squares / 64)), "pattern {number}, bits {shift}: {}", squares / 64);
            }
        }
    }

    /// Everything that two keys of one type may differ in: lengths, the ends of texts, numbers of elements, halves of a
    /// `u128`, and parts before and after a text that is too long for the sum.
    #[test]
    fn keys_of_every_type_are_told_apart() {
        fn check<K: Hash>(keys: &[K]) {
            let hash = hash();
            let tags: HashSet<u64> = keys.iter().map(|key| hash.hash(key).tag).collect();
            assert_eq!(tags.len(), keys.len());
        }
        let long = "x".repeat(100);
        check(&["", "\0", "a", "a\0", "a\u{ff}"]);
        check(&[("ab", "c"), ("a", "bc"), ("abc", ""), ("", "abc")]);
        check(&[("aaaaaaaa", 10u64), ("aaaaaaaa\t", 0), ("aaaaaaaa", 0)]);
        check(&[(long.as_str(), "a"), (long.as_str(), "b"), ("a", long.as_str()), ("b", long.as_str())]);
        check(&[0u64, 1, u64::MAX, 1 << 63]);
        check(&[0u128, 1, 1 << 64, u128::MAX]);
        check(&[-1i32, 0, 1, i32::MIN]);
        check(&[vec![0u64; 3], vec![0; 4], vec![], vec![0; 20], vec![0; 21]]);
        check(&[vec!["a"; 3], vec!["a"; 4], vec!["a"; 20], vec!["a"; 21]]);
        check(&[None, Some(0u8), Some(255)]);
        let address = |text: &str| text.parse::<std::net::IpAddr>().unwrap();
        check(&[address("0.0.0.0"), address("::"), address("::1"), address("0.0.0.1"), address("1::")]);
    }

    /// A key is the same however it is held.
    #[test]
    fn borrowed_and_owned_keys_are_the_same() {
        let hash = hash();
        for text in ["u1", "a name of more than eight bytes", &"x".repeat(200)] {
            assert_eq!(hash.hash(text), hash.hash(&text.to_owned()));
            assert_eq!(hash.hash(text), hash.hash(&std::borrow::Cow::Borrowed(text)));
        }
    }
}
