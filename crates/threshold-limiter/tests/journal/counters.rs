//! Counters across a restart: a record that is large or damaged costs none of the others.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::time::Duration;

use threshold_core::{Balance, Digest, DigestKey, Format, KeyId, Limit, Policy, Secret, Span, Timestamp, TraceId};
use threshold_limiter::journal::{Counters, CountersError, load_counters, save_counters};
use threshold_limiter::store::memory::MemoryStore;
use threshold_limiter::{Facts, Limiter, ManualClock};

use super::{POLICY, START, Scratch};

const DAY: Duration = Duration::from_secs(86_400);

const SECRET: KeyId = KeyId::from_u32(9);
const OTHERS: usize = 200;

type SavedBalances = BTreeMap<u128, (Limit, Balance)>;

fn counters(scratch: &Scratch) -> PathBuf {
    scratch.0.join("threshold.counters")
}

/// A store with room for as many keys as a policy allows by default would take seconds to walk through.
fn small_store() -> MemoryStore {
    store_of(10_000)
}

fn store_of(max_keys: usize) -> MemoryStore {
    let policy = format!(
        "[memory]
max_keys = {max_keys}
{POLICY}"
    );
    MemoryStore::new(Policy::parse(&policy, &|_| None).unwrap().memory())
}

fn held(store: &MemoryStore) -> SavedBalances {
    let mut all = SavedBalances::new();
    store.each_balance(START, |key, limit, balance| {
        all.insert(key.to_u128(), (*limit, balance.clone()));
    });
    all
}

/// A key whose place in the table, and so in the file, is anywhere.
fn key(number: u64) -> Digest {
    let mixed = u128::from(number).wrapping_mul(0x9e37_79b9_7f4a_7c15_f39c_c060_5ced_c835);
    Digest::from_u128(mixed)
}

fn charged(limit: &Limit, times: u64) -> Balance {
    let mut balance = Balance::default();
    for number in 0..times {
        let at = Timestamp::from_micros(START.micros() + number * 1_000);
        assert!(balance.check(limit, 1, at, TraceId::from_u128(u128::from(number))).mark.is_some());
    }
    balance
}

/// A concurrency limit of the largest size that is full, from its bytes: charging it takes a minute.
fn full_concurrency() -> Balance {
    fn number(bytes: &mut Vec<u8>, mut value: u64) {
        while value > 0x7f {
            bytes.push(u8::try_from(value & 0x7f).unwrap() | 0x80);
            value >>= 7;
        }
        bytes.push(u8::try_from(value).unwrap());
    }
    let mut bytes = vec![1, 0, 5];
    number(&mut bytes, 65_536);
    for hold in 0..65_536u64 {
        bytes.extend(u128::from(hold).to_be_bytes());
        number(&mut bytes, 1);
        number(&mut bytes, if hold == 0 { START.plus(Span::HOUR).micros() } else { 1_000 });
    }
    // The ttl, and no holding time yet, in milliseconds.
    number(&mut bytes, 3_600_000);
    number(&mut bytes, 0);
    Balance::from_bytes(&bytes).unwrap()
}

/// A full log, and many small ones.
fn filled(store: MemoryStore) -> MemoryStore {
    let log = Limit::sliding_log(1_024, DAY).unwrap();
    let rate = Limit::token_bucket(10, DAY).unwrap();
    store.restore_balance(key(0), &log, charged(&log, 1_024), START);
    for number in 1..OTHERS as u64 {
        store.restore_balance(key(number), &rate, charged(&rate, 3), START);
    }
    assert_eq!(held(&store).len(), OTHERS);
    store
}

/// Loads the file and compares what is read with what was saved, but for keys that may be missing.
fn check_loaded(scratch: &Scratch, saved: &SavedBalances, other: &MemoryStore, expect: Counters) {
    assert_eq!(load_counters(other, &scratch.db(), SECRET, START).unwrap(), expect);
    let read = held(other);
    assert_eq!(read.len(), expect.read);
    for (key, own) in &read {
        assert_eq!(saved.get(key), Some(own));
    }
}

/// Where each record begins in the file.
fn records(bytes: &[u8]) -> Vec<usize> {
    let length = |at: usize| u32::from_be_bytes(bytes[at..at + 4].try_into().unwrap()) as usize;
    let (mut all, mut at) = (Vec::new(), 12);
    while at < bytes.len() {
        all.push(at);
        at += 32 + length(at + 24) + length(at + 28);
    }
    all
}

/// One record over 64 KiB lost every record after it, without an error.
///
/// Woken by: `1 << 16` in the place of `Balance::MAX_BYTES` in `parse`.
#[test]
fn a_large_record_and_those_after_it_come_back() {
    let scratch = Scratch::new();
    // Large enough that the large one pushes nobody out.
    let store = filled(store_of(1_000_000));
    let concurrency = Limit::concurrent(65_536, DAY).unwrap();
    let large = full_concurrency();
    assert!(
        large.to_bytes(Format::PRESENT).len() > 1 << 16 && large.to_bytes(Format::PRESENT).len() <= Balance::MAX_BYTES
    );
    store.restore_balance(key(OTHERS as u64), &concurrency, large, START);
    assert_eq!(save_counters(&store, &scratch.db(), SECRET, START).unwrap(), OTHERS + 1);
    let records = records(&std::fs::read(counters(&scratch)).unwrap());
    let large = records.windows(2).position(|pair| pair[1] - pair[0] > 1 << 16).expect("the large one is not the last");
    assert!(large + 10 < records.len());
    check_loaded(&scratch, &held(&store), &store_of(1_000_000), Counters { read: OTHERS + 1, skipped: 0 });
}

#[test]
fn a_damaged_record_is_skipped_and_counted() {
    let scratch = Scratch::new();
    let store = filled(small_store());
    let saved = held(&store);
    save_counters(&store, &scratch.db(), SECRET, START).unwrap();
    let whole = std::fs::read(counters(&scratch)).unwrap();
    let records = records(&whole);
    let begins = records[records.len() / 2];
    // A byte of the key, the sum, the limit's length (made longer, and too long), the balance's length (likewise), the value.
    for (at, bit) in [(0, 1), (16, 1), (27, 1), (24, 128), (31, 1), (29, 1), (28, 128), (33, 1)] {
        let mut bytes = whole.clone();
        bytes[begins + at] ^= bit;
        std::fs::write(counters(&scratch), &bytes).unwrap();
        check_loaded(&scratch, &saved, &small_store(), Counters { read: OTHERS - 1, skipped: 1 });
    }
    // Two in different places, one of them the last.
    let mut bytes = whole.clone();
    bytes[begins + 31] ^= 4;
    *bytes.last_mut().unwrap() ^= 1;
    std::fs::write(counters(&scratch), &bytes).unwrap();
    check_loaded(&scratch, &saved, &small_store(), Counters { read: OTHERS - 2, skipped: 2 });
    // Cut within the last record.
    std::fs::write(counters(&scratch), &whole[..whole.len() - 1]).unwrap();
    check_loaded(&scratch, &saved, &small_store(), Counters { read: OTHERS - 1, skipped: 1 });
}

/// Balances came back after a restart and the ids of refunded receipts did not, so that a receipt was refunded twice.
///
/// Woken by: leaving out `restore_refund` in `load_counters`.
#[test]
fn a_receipt_is_refunded_once_also_after_a_restart() {
    let scratch = Scratch::new();
    let policy = || Policy::parse("[[rule]]\nname = 'r'\nper = ['user']\nlimit = '10/day'", &|_| None).unwrap();
    let limiter = || {
        let (store, clock) = (MemoryStore::new(policy().memory()), ManualClock::new(START));
        let secret = Secret::new(&[9; 32]).unwrap();
        Limiter::builder(policy())
            .store(store)
            .clock(clock)
            .digest_key(DigestKey::new([7; 16]))
            .secrets(secret)
            .build()
            .unwrap()
    };
    let asks = |cost| Facts { user: Some("u1"), cost: Some(cost), ..Facts::default() };
    let before = limiter();
    let (_, receipt) = before.check_with_receipt(&asks(6)).unwrap();
    let receipt = receipt.unwrap();
    assert_eq!(before.refund(&receipt), Ok(true));
    assert!(before.check(&asks(8)).unwrap().allowed());
    save_counters(before.store(), &scratch.db(), SECRET, START).unwrap();

    let after = limiter();
    let loaded = load_counters(after.store(), &scratch.db(), SECRET, START).unwrap();
    assert_eq!(loaded, Counters { read: 1, skipped: 0 });
    assert_eq!(after.refund(&receipt), Ok(false));
    assert_eq!(after.peek(&asks(0)).unwrap().readings[0].remaining, 2);
}

/// A file of another kind is not taken for an empty file of counters.
#[test]
fn a_file_of_another_kind_is_an_error() {
    let scratch = Scratch::new();
    for text in [&b"something else"[..], b"thrshld\x01....", b"thrshld\x03....", b""] {
        std::fs::write(counters(&scratch), text).unwrap();
        let error = load_counters(&small_store(), &scratch.db(), SECRET, START).unwrap_err();
        assert!(matches!(error, CountersError::Unknown(_)), "{error}");
    }
}
