//! What stands for a key in the table of one process: a tag of 64 bits, and the place where its probe begins.
//!
//! Keys of up to 64 bytes are hashed by a sum of their words and their length, each times a secret coefficient of 128
//! bits, of which the upper half is the tag ("Strongly universal string hashing is fast", Lemire and Kaser). Of any two
//! keys, whoever chose them, all pairs of tags are equally likely as long as nobody has seen one, so they are equal with a
//! chance of 2^-64. That is proven, and it is why this hash serves here and nowhere else: what it gives stays in this
//! table, never leaves the process and is told to nobody. Longer keys get SipHash.

use threshold_core::key::TextKeys;
use threshold_core::{Digest, DigestKey, Limit};

/// Words of the longest key that is hashed here: a name, an address, a digest in hexadecimal.
const WORDS: usize = 8;
/// The secret numbers that a hash is made of: one that is always added, a coefficient for the length and for each word,
/// a factor, and the key of SipHash.
const NUMBERS: usize = WORDS + 4;
const SECRET: usize = NUMBERS * size_of::<u128>();

/// Hashes keys under a secret of its own.
pub(super) struct KeyHash {
    always: u128,
    length: u128,
    words: [u128; WORDS],
    factor: u64,
    long: TextKeys,
}

/// What stands for one key.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Hashed {
    /// Whose a slot is; never 0.
    pub(super) tag: u64,
    /// Where the probe begins and how it goes on.
    pub(super) place: u64,
}

impl KeyHash {
    /// A hash that nobody can guess.
    pub(super) fn new(limit: &Limit) -> Self {
        // Under a scheduler that tries many orders, nothing else shall differ from run to run.
        Self::from_secret(limit, if cfg!(shuttle) { fixed_secret() } else { crate::random() })
    }

    fn from_secret(limit: &Limit, secret: [u8; SECRET]) -> Self {
        let mut numbers = secret.as_chunks().0.iter().map(|bytes| u128::from_le_bytes(*bytes));
        let mut number = || numbers.next().expect("a secret has all numbers");
        Self {
            always: number(),
            length: number(),
            words: [(); WORDS].map(|()| number()),
            factor: low(number()) | 1,
            long: TextKeys::new(DigestKey::new(number().to_le_bytes()), limit),
        }
    }

    /// What stands for this key.
    #[inline(always)]
    pub(super) fn hash(&self, key: &str) -> Hashed {
        let bytes = key.as_bytes();
        let (chunks, rest) = bytes.as_chunks();
        let mut sum = self.always.wrapping_add(times(self.length, bytes.len() as u64));
        let mut coefficients = self.words.iter();
        for chunk in chunks {
            let Some(coefficient) = coefficients.next() else { return self.hash_long(key) };
            sum = sum.wrapping_add(times(*coefficient, u64::from_le_bytes(*chunk)));
        }
        if !rest.is_empty() {
            let Some(coefficient) = coefficients.next() else { return self.hash_long(key) };
            sum = sum.wrapping_add(times(*coefficient, last_word(bytes)));
        }
        Hashed::new(high(sum), self.spread(high(sum) ^ low(sum).rotate_left(32)))
    }

    #[cold]
    #[inline(never)]
    fn hash_long(&self, key: &str) -> Hashed {
        let digest = Digest::to_u128(self.long.digest(key));
        Hashed::new(high(digest), low(digest))
    }

    /// Sums of similar keys are at even distances, and so would the keys be in the table: now close together, now far
    /// apart. The two halves of a product laid over each other have nothing even about them.
    #[inline]
    fn spread(&self, number: u64) -> u64 {
        let product = times(u128::from(self.factor), number);
        high(product) ^ low(product)
    }
}

impl Hashed {
    #[inline]
    fn new(tag: u64, place: u64) -> Self {
        Self { tag: tag.max(1), place }
    }
}

impl std::fmt::Debug for KeyHash {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("KeyHash(secret)")
    }
}

/// A secret that is none: the same in every run.
fn fixed_secret() -> [u8; SECRET] {
    use rand::{Rng as _, SeedableRng as _};
    let mut secret = [0; SECRET];
    rand::rngs::StdRng::seed_from_u64(7).fill_bytes(&mut secret);
    secret
}

/// The last bytes of a key, up to eight. Of two keys of one length they differ wherever the last words do: bytes may be
/// read twice, but none is left out.
#[inline]
fn last_word(bytes: &[u8]) -> u64 {
    if let Some(last) = bytes.last_chunk() {
        return u64::from_le_bytes(*last);
    }
    if let (Some(first), Some(last)) = (bytes.first_chunk(), bytes.last_chunk()) {
        return u64::from(u32::from_le_bytes(*first)) | u64::from(u32::from_le_bytes(*last)) << 32;
    }
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
        KeyHash::from_secret(&Limit::per_second(1), fixed_secret())
    }

    fn letter(number: u32) -> u8 {
        u8::try_from(number & 127).expect("seven bits")
    }

    /// Texts around the lengths at which words end, and beyond what is hashed as words; with few letters, so that many are
    /// alike but for one byte, or for zeros at the end.
    fn texts() -> impl Strategy<Value = String> {
        let ends = prop::sample::select(vec![0usize, 1, 2, 3, 4, 5, 7, 8, 9, 15, 16, 17, 24, 63, 64, 65, 72, 200]);
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
            let (a, b) = (hash.hash(&one), hash.hash(&other));
            prop_assert_eq!(one == other, a.tag == b.tag);
            prop_assert_eq!(one == other, a == b);
        }
    }

    /// Keys that are numbered, padded, have the same words in another order, or differ in the last bytes of their words:
    /// into 256 boxes of 64 on average, by the upper bits of the place, which choose a line, and by the lower ones, which
    /// choose a stride. By chance, the sum of squared differences over 64 is 255, give or take 23; it shall neither be much
    /// larger, nor smaller as when numbers are at even distances.
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
            let all: Vec<Hashed> = (0..1 << 14).map(|n| hash.hash(&pattern(n))).collect();
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
}
