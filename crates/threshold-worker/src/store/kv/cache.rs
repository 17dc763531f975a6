//! The balances of KV that this isolate has used lately.
//!
//! Within one isolate counting is exact: a decision and its charge happen in one step, without a wait between them. What was charged
//! since the last write is kept apart, so that it is added to what other isolates have written meanwhile.

use std::collections::HashMap;

use threshold_core::{Balance, Bill, Digest, Limit, Outcome, OwnedBill, Span, Timestamp, TraceId, settle};

use super::value::{Form, Unreadable, ttl};

/// The most keys. An entry takes less than a kilobyte.
const MAX_KEYS: usize = 8_192;
/// A value is read again after this time.
const FRESH: Span = Span::SECOND;
/// KV takes one write a second of each key.
const BETWEEN_PUTS: Span = Span::SECOND;

/// A key of a namespace.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub(in crate::store) struct KvKey {
    pub(in crate::store) binding: String,
    pub(in crate::store) name: String,
}

/// A record of KV: its key, and how its value is read.
#[derive(Debug, Clone)]
pub(in crate::store) struct KvRecord {
    pub(in crate::store) key: KvKey,
    pub(in crate::store) limit: Limit,
    pub(in crate::store) form: Form,
    /// How long the rule blocks at most.
    pub(in crate::store) block_for: Span,
}

impl KvRecord {
    /// Reads a value. A block that is longer than the rule's is shortened to it: nobody who writes to the namespace can lock a caller
    /// out for years.
    pub(in crate::store) fn read(&self, text: &str, now: Timestamp) -> Result<Balance, Unreadable> {
        let balance = self.form.read(text, &self.limit)?;
        let longest = now.plus(self.block_for);
        if balance.blocked_until() <= longest {
            return Ok(balance);
        }
        let mut shortened = balance.without_block();
        shortened.block(longest);
        Ok(shortened)
    }
}

/// All places are taken by keys that are not written yet.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(in crate::store) struct Full;

/// A write that is due.
#[derive(Debug)]
pub(in crate::store) struct Put {
    pub(in crate::store) key: KvKey,
    pub(in crate::store) value: String,
    pub(in crate::store) ttl: u64,
    pending: u64,
}

#[derive(Debug)]
struct Entry {
    limit: Limit,
    form: Form,
    block_for: Span,
    balance: Balance,
    read_at: Timestamp,
    put_at: Timestamp,
    /// The cost that was charged since the last write began.
    pending: u64,
    is_dirty: bool,
    /// Whether KV has a value that is not of this rule. It is left as it is.
    is_foreign: bool,
    /// The values that this isolate has read or written last; `None` is no value. What they count is in the balance.
    known: [Option<Option<String>>; 2],
}

/// The balances by key.
#[derive(Debug, Default)]
pub(in crate::store) struct Cache {
    entries: HashMap<KvKey, Entry>,
}

impl Cache {
    /// Returns the balance of a key, unless it has to be read again.
    pub(in crate::store) fn fresh(&self, key: &KvKey, now: Timestamp) -> Option<Balance> {
        let entry = self.entries.get(key)?;
        (now.since(entry.read_at) < FRESH).then(|| entry.balance.clone())
    }

    /// Returns the balance of a key whose value this isolate has read or written before: nobody else has counted since, and what was
    /// charged here is counted at its own time.
    pub(in crate::store) fn unchanged(&mut self, key: &KvKey, read: Option<&str>, now: Timestamp) -> Option<Balance> {
        let entry = self.entries.get_mut(key)?;
        let is_known = entry.known.iter().flatten().any(|known| known.as_deref() == read);
        is_known.then(|| {
            entry.read_at = now;
            entry.balance.clone()
        })
    }

    /// Notes the value that was merged last.
    pub(in crate::store) fn learn(&mut self, key: &KvKey, value: Option<String>) {
        if let Some(entry) = self.entries.get_mut(key) {
            entry.learn(value);
        }
    }

    /// Takes in a value that was read, and returns the balance that counts: the more used one of what this isolate knows and of what was
    /// read, with what this isolate has charged and not written yet.
    pub(in crate::store) fn merge(
        &mut self,
        record: &KvRecord,
        read: Balance,
        now: Timestamp,
    ) -> Result<Balance, Full> {
        let entry = self.entry(record, now)?;
        entry.read_at = now;
        entry.is_foreign = false;
        let mut others = read;
        if entry.pending > 0 && entry.balance.silent_from() > now {
            let charge = (Digest::from_u128(0), record.limit, entry.pending);
            let bill = OwnedBill::record(TraceId::default(), [charge]);
            let _ = settle(&bill.as_bill(), std::slice::from_mut(&mut others), &mut [], now);
        }
        let block = others.blocked_until().max(entry.balance.blocked_until());
        let mut counts = more_used(entry.balance.clone(), others, &record.limit, now);
        counts.block(block);
        entry.balance = counts.clone();
        Ok(counts)
    }

    /// Returns what this isolate alone knows of a key, while KV fails or has a foreign value, which must not be overwritten.
    pub(in crate::store) fn local(
        &mut self,
        record: &KvRecord,
        is_foreign: bool,
        now: Timestamp,
    ) -> Result<Balance, Full> {
        let entry = self.entry(record, now)?;
        entry.is_foreign = is_foreign;
        entry.is_dirty &= !is_foreign;
        Ok(entry.balance.clone())
    }

    /// Settles a bill on these records, which are in the order of its charges, and keeps what it has changed. A record that was dropped
    /// since it was read is as it was then.
    pub(in crate::store) fn settle(
        &mut self,
        bill: &Bill<'_>,
        records: &[(&KvRecord, Balance)],
        now: Timestamp,
    ) -> Result<Outcome, Full> {
        let mut balances = Vec::with_capacity(records.len());
        for (record, read) in records {
            let is_known = self.entries.contains_key(&record.key);
            let entry = self.entry(record, now)?;
            if !is_known {
                entry.balance = read.clone();
            }
            balances.push(entry.balance.clone());
        }
        let outcome = settle(bill, &mut balances, &mut [], now);
        for (index, ((record, _), balance)) in records.iter().zip(balances).enumerate() {
            let Some(entry) = self.entries.get_mut(&record.key).filter(|_| outcome.balance_changed(index)) else {
                continue;
            };
            // What was charged before counts for nothing any more, so it is not added to what others have counted since.
            if entry.balance.silent_from() <= now {
                entry.pending = 0;
            }
            let cost = bill.charges().get(index).map_or(0, threshold_core::bill::Charge::cost);
            // A balance that is only blocked has charged nothing, and counts too much at most.
            let most = record.limit.capacity().saturating_mul(2);
            entry.pending = entry.pending.saturating_add(if balance.is_blocked(now) { 0 } else { cost }).min(most);
            entry.balance = balance;
            entry.is_dirty = !entry.is_foreign;
        }
        Ok(outcome)
    }

    /// Takes the write of a key, if one is due.
    pub(in crate::store) fn take_put(&mut self, key: &KvKey, now: Timestamp) -> Option<Put> {
        let entry = self.entries.get_mut(key).filter(|entry| entry.is_due(now))?;
        entry.put_at = now;
        entry.is_dirty = false;
        let pending = std::mem::take(&mut entry.pending);
        let Entry { limit, form, balance, .. } = &*entry;
        let (value, ttl) = (form.write(balance, limit, now), ttl(balance, limit, now));
        entry.learn(Some(value.clone()));
        Some(Put { key: key.clone(), value, ttl, pending })
    }

    /// Notes that a write has failed. It is tried again a second later.
    pub(in crate::store) fn put_failed(&mut self, put: &Put) {
        if let Some(entry) = self.entries.get_mut(&put.key) {
            entry.is_dirty = true;
            entry.pending = entry.pending.saturating_add(put.pending);
        }
    }

    /// Returns when the next write is due; `None` if there is nothing to write.
    pub(in crate::store) fn next_put(&self) -> Option<Timestamp> {
        let dirty = self.entries.values().filter(|entry| entry.is_dirty);
        dirty.map(|entry| entry.put_at.plus(BETWEEN_PUTS)).min()
    }

    /// Returns at most `most` records whose write is due.
    pub(in crate::store) fn due(&self, now: Timestamp, most: usize) -> Vec<KvRecord> {
        let due = self.entries.iter().filter(|(_, entry)| entry.is_due(now)).take(most);
        due.map(|(key, entry)| KvRecord {
            key: key.clone(),
            limit: entry.limit,
            form: entry.form,
            block_for: entry.block_for,
        })
        .collect()
    }

    /// Returns the entry of a record, which is created if there is room. Only entries that are written are dropped for it.
    fn entry(&mut self, record: &KvRecord, now: Timestamp) -> Result<&mut Entry, Full> {
        if !self.entries.contains_key(&record.key) {
            if self.entries.len() >= MAX_KEYS {
                self.entries.retain(|_, entry| entry.is_dirty || now.since(entry.read_at) < FRESH);
            }
            if self.entries.len() >= MAX_KEYS {
                self.entries.retain(|_, entry| entry.is_dirty);
            }
            if self.entries.len() >= MAX_KEYS {
                return Err(Full);
            }
        }
        let entry = self.entries.entry(record.key.clone()).or_insert_with(|| Entry {
            limit: record.limit,
            form: record.form,
            block_for: record.block_for,
            balance: Balance::default(),
            read_at: Timestamp::EPOCH,
            put_at: Timestamp::EPOCH,
            pending: 0,
            is_dirty: false,
            is_foreign: false,
            known: [None, None],
        });
        (entry.limit, entry.form, entry.block_for) = (record.limit, record.form, record.block_for);
        Ok(entry)
    }
}

impl Entry {
    /// Remembers a value. The one before may be read again for a while, because KV is eventually consistent.
    fn learn(&mut self, value: Option<String>) {
        let [newer, older] = &mut self.known;
        if newer.as_ref() != Some(&value) {
            *older = newer.replace(value);
        }
    }

    fn is_due(&self, now: Timestamp) -> bool {
        self.is_dirty && self.put_at.plus(BETWEEN_PUTS) <= now
    }
}

/// Returns the balance that has less room at `now`; of equal ones the one that counts for longer.
fn more_used(own: Balance, others: Balance, limit: &Limit, now: Timestamp) -> Balance {
    let room = |balance: &Balance| {
        let mut brought = balance.without_block();
        (brought.look(limit, 0, now).0.available, std::cmp::Reverse(brought.silent_from()))
    };
    if room(&others) < room(&own) { others } else { own }
}

#[cfg(test)]
mod tests {
    use proptest::collection::vec;
    use proptest::prelude::*;
    use proptest::sample::select;
    use threshold_core::limit::{Algorithm, LimitOptions};
    use threshold_core::{Facts, Policy};

    use super::*;

    const NOW: Timestamp = Timestamp::from_secs(1_767_225_600);

    fn policy() -> Policy {
        let rule =
            "[[rule]]\nname = 'r'\nper = ['user']\nlimit = '10/h'\nalgorithm = 'fixed-window'\nblock_for = '1min'";
        Policy::parse(rule, &|_| None).unwrap()
    }

    fn record(name: &str) -> KvRecord {
        let limit = LimitOptions::new().algorithm(Algorithm::FixedWindow).parse("10/h").unwrap();
        KvRecord {
            key: KvKey { binding: "KV".to_owned(), name: name.to_owned() },
            limit,
            form: Form::Window,
            block_for: Span::MINUTE,
        }
    }

    /// Charges one request, and returns whether it was allowed.
    fn charge(cache: &mut Cache, record: &KvRecord, now: Timestamp) -> bool {
        let policy = policy();
        let plan = policy.plan(&Facts { user: Some("ada"), ..Facts::default() }).unwrap();
        let outcome = cache.settle(plan.bill(), &[(record, Balance::default())], now).unwrap();
        plan.decide(&outcome).allowed()
    }

    fn count(value: &str) -> u64 {
        serde_json::from_str::<serde_json::Value>(value).unwrap()["count"].as_u64().unwrap()
    }

    fn read(record: &KvRecord, count: u64) -> Balance {
        record.form.read(&format!(r#"{{"count":{count},"start":1767225600000}}"#), &record.limit).unwrap()
    }

    #[test]
    fn one_isolate_counts_exactly_and_writes_once_a_second() {
        let (mut cache, record) = (Cache::default(), record("a"));
        cache.merge(&record, Balance::default(), NOW).unwrap();
        let allowed = (0..30).filter(|_| charge(&mut cache, &record, NOW)).count();
        assert_eq!(allowed, 10);
        let first = cache.take_put(&record.key, NOW).unwrap();
        assert_eq!((count(&first.value), first.ttl), (10, 3_600));
        assert!(first.value.contains("blockedUntil"), "the denial began a block: {}", first.value);
        assert!(cache.take_put(&record.key, NOW).is_none(), "nothing has changed since");
        // A write that has failed is due again after a second, and not before.
        cache.put_failed(&first);
        assert_eq!(cache.next_put(), Some(NOW.plus(Span::SECOND)));
        assert!(cache.take_put(&record.key, NOW.plus(Span::from_millis(999))).is_none());
        let again = cache.take_put(&record.key, NOW.plus(Span::SECOND)).unwrap();
        assert_eq!(count(&again.value), 10);
    }

    /// Woken by taking only the larger of the two counts.
    #[test]
    fn what_was_not_written_is_added_to_what_others_wrote() {
        let (mut cache, record) = (Cache::default(), record("a"));
        cache.merge(&record, read(&record, 2), NOW).unwrap();
        assert!(charge(&mut cache, &record, NOW));
        let put = cache.take_put(&record.key, NOW).unwrap();
        assert_eq!(count(&put.value), 3);
        assert!(charge(&mut cache, &record, NOW) && charge(&mut cache, &record, NOW));
        let later = NOW.plus(Span::SECOND);
        assert!(cache.fresh(&record.key, NOW).is_some() && cache.fresh(&record.key, later).is_none());
        // Others have written 6 in the meantime, which has the 3 and not the two requests since.
        cache.merge(&record, read(&record, 6), later).unwrap();
        assert_eq!(count(&cache.take_put(&record.key, later).unwrap().value), 8);
        // A value that is older than what is known counts for nothing.
        cache.merge(&record, read(&record, 1), later).unwrap();
        cache.merge(&record, read(&record, 1), later).unwrap();
        let policy = policy();
        let plan = policy.plan(&Facts { user: Some("ada"), ..Facts::default() }).unwrap();
        let outcome = cache.settle(plan.bill(), &[(&record, Balance::default())], later).unwrap();
        assert_eq!(plan.decide(&outcome).readings[0].remaining, 1);
    }

    #[test]
    fn a_full_cache_drops_what_is_written_and_then_refuses() {
        let mut cache = Cache::default();
        for number in 0..MAX_KEYS {
            let record = record(&number.to_string());
            cache.merge(&record, Balance::default(), NOW).unwrap();
            assert!(charge(&mut cache, &record, NOW));
        }
        assert_eq!(cache.merge(&record("new"), Balance::default(), NOW), Err(Full));
        assert_eq!(cache.local(&record("new"), false, NOW), Err(Full));
        assert!(charge(&mut cache, &record("1"), NOW), "known keys are still counted");
        // One that was written makes room. What it has counted is in KV.
        assert!(cache.take_put(&record("0").key, NOW).is_some());
        assert!(cache.merge(&record("new"), Balance::default(), NOW).is_ok());
        assert!(cache.entries.len() <= MAX_KEYS && !cache.entries.contains_key(&record("0").key));
        assert_eq!(cache.due(NOW, 100).len(), 100);
    }

    /// Woken by: leaving out `entry.pending = 0` in `settle`.
    #[test]
    fn what_was_charged_in_a_window_before_is_not_added() {
        let (mut cache, record) = (Cache::default(), record("a"));
        cache.merge(&record, Balance::default(), NOW).unwrap();
        assert!(cache.take_put(&record.key, NOW).is_none());
        (0..9).for_each(|_| assert!(charge(&mut cache, &record, NOW)));
        let next = NOW.plus(Span::from_secs(3_600));
        assert!(charge(&mut cache, &record, next));
        let others = record.form.read(r#"{"count":2,"start":1767229200000}"#, &record.limit).unwrap();
        cache.merge(&record, others, next).unwrap();
        assert_eq!(count(&cache.take_put(&record.key, next).unwrap().value), 3);
    }

    #[test]
    fn a_block_is_no_longer_than_the_rules() {
        let record = record("a");
        let value = |until: u64| format!(r#"{{"count":0,"start":1767225600000,"blockedUntil":{until}}}"#);
        let until = |until| record.read(&value(until), NOW).unwrap().blocked_until();
        assert_eq!(until(1_767_225_630_000), NOW.plus(Span::from_secs(30)));
        assert_eq!(until(9_007_199_254_740_991), NOW.plus(Span::MINUTE));
    }

    /// KV as one isolate uses it.
    struct OneIsolate {
        cache: Cache,
        record: KvRecord,
        value: Option<String>,
    }

    impl OneIsolate {
        fn read(&mut self, now: Timestamp) -> Balance {
            let Self { cache, record, value } = self;
            if let Some(balance) = cache.fresh(&record.key, now) {
                return balance;
            }
            if let Some(balance) = cache.unchanged(&record.key, value.as_deref(), now) {
                return balance;
            }
            let read = value.as_deref().map_or(Ok(Balance::default()), |text| record.read(text, now));
            let balance = cache.merge(record, read.unwrap(), now).unwrap();
            cache.learn(&record.key, value.clone());
            balance
        }

        fn write(&mut self, now: Timestamp) {
            if let Some(put) = self.cache.take_put(&self.record.key, now) {
                self.value = Some(put.value);
            }
        }

        /// Decides one request as the store does, with the write that is due and the ones that were put off.
        fn check(&mut self, policy: &Policy, now: Timestamp) -> bool {
            while let Some(due) = self.cache.next_put().filter(|due| *due <= now) {
                self.read(due);
                self.write(due);
            }
            let read = self.read(now);
            let plan = policy.plan(&Facts { user: Some("ada"), ..Facts::default() }).unwrap();
            let outcome = self.cache.settle(plan.bill(), &[(&self.record, read)], now).unwrap();
            self.write(now);
            plan.decide(&outcome).allowed()
        }
    }

    proptest! {
        /// One isolate that is alone on a key decides as a store in memory does, whenever it reads and writes.
        ///
        /// Woken by: leaving out `unchanged`, so that what was not written is charged once more when it is read.
        #[test]
        fn one_isolate_alone_is_exact(
            algorithm in select(vec!["fixed-window", "token-bucket"]),
            first in any::<bool>(),
            gaps in vec(0..1_500u64, 1..80),
            start in 0..60_000u64,
        ) {
            let anchor = if first && algorithm == "fixed-window" { "anchor = 'first'" } else { "" };
            let rule = format!("[[rule]]\nname = 'r'\nper = ['user']\nlimit = '10/5s'\nalgorithm = '{algorithm}'\n{anchor}");
            let policy = Policy::parse(&rule, &|_| None).unwrap();
            let limit = *policy.rules()[0].fixed_limit().unwrap();
            let key = KvKey { binding: "KV".to_owned(), name: "a".to_owned() };
            let record = KvRecord { key, limit, form: Form::of(&limit, None), block_for: Span::ZERO };
            let mut isolate = OneIsolate { cache: Cache::default(), record, value: None };
            let mut exact = Balance::default();
            let mut now = NOW.plus(Span::from_millis(start));
            for gap in gaps {
                now = now.plus(Span::from_millis(gap));
                let expected = exact.check(&limit, 1, now, TraceId::default()).look.allowed;
                prop_assert_eq!(isolate.check(&policy, now), expected, "at {:?}", now);
            }
        }
    }

    #[test]
    fn a_foreign_value_is_counted_locally_and_not_overwritten() {
        let (mut cache, record) = (Cache::default(), record("a"));
        cache.local(&record, true, NOW).unwrap();
        let allowed = (0..30).filter(|_| charge(&mut cache, &record, NOW)).count();
        assert_eq!(allowed, 10);
        assert!(cache.take_put(&record.key, NOW).is_none() && cache.next_put().is_none());
        // It was replaced by a value of the rule, so counting goes on there.
        cache.merge(&record, Balance::default(), NOW).unwrap();
        assert!(!charge(&mut cache, &record, NOW));
    }

    #[test]
    fn a_record_that_was_dropped_is_as_it_was_read() {
        let (mut cache, record) = (Cache::default(), record("a"));
        let known = read(&record, 9);
        let policy = policy();
        let plan = policy.plan(&Facts { user: Some("ada"), ..Facts::default() }).unwrap();
        let settle = |cache: &mut Cache| {
            plan.decide(&cache.settle(plan.bill(), &[(&record, known.clone())], NOW).unwrap()).allowed()
        };
        assert!(settle(&mut cache));
        assert!(!settle(&mut cache));
    }
}
