//! Partitions: records with the same anchor share one, and a partition reveals nothing else about a key.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write as _;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use proptest::collection::vec;
use proptest::prelude::*;
use proptest::sample::{select, subsequence};
use threshold_core::address::AddressGroup;
use threshold_core::bill::Charge;
use threshold_core::key::TextKeys;
use threshold_core::lockout::{StandInKeys, account_digest, address_digest};
use threshold_core::plan::Subject;
use threshold_core::{Digest, DigestKey, Facts, Partition, Policy};

use crate::world::parsed;

/// What the rules of these tests count by.
const PARTS: [&str; 9] =
    ["ip", "ip/16", "ip/40", "tenant", "user", "category", "endpoint", "header:x-key", "fact:inbox"];

const KEY: DigestKey = DigestKey::new([5; 16]);

/// The anchor of a record, as docs/formats.md defines it.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
enum Anchor {
    Tenant(String),
    User(String),
    Block(IpAddr),
    /// Headers and facts, each with its value.
    Other(BTreeSet<String>),
    Rule(String),
}

/// A caller. A text is empty where the request lacks it.
#[derive(Debug, Clone)]
struct Caller {
    ip: IpAddr,
    tenant: String,
    user: String,
    category: String,
    key: String,
}

impl Caller {
    fn ask<T>(&self, question: impl FnOnce(&Facts<'_>) -> T) -> T {
        let header = [("x-key", self.key.as_str())];
        question(&Facts {
            ip: Some(self.ip),
            tenant: Some(&self.tenant),
            user: Some(&self.user),
            category: Some(&self.category),
            path: Some("/a"),
            headers: if self.key.is_empty() { &[] } else { &header },
            facts: &[("inbox", &format!("i{}", self.key))],
            ..Facts::default()
        })
    }

    /// Returns the /24 or /48 of the address, or the first block of a wider group.
    fn block(&self, per: &str) -> IpAddr {
        match (self.ip, per) {
            (IpAddr::V4(v4), "ip/16") => Ipv4Addr::from_bits(v4.to_bits() & !0xffff).into(),
            (IpAddr::V4(v4), _) => Ipv4Addr::from_bits(v4.to_bits() & !0xff).into(),
            (IpAddr::V6(v6), "ip/40") => Ipv6Addr::from_bits(v6.to_bits() & !(u128::MAX >> 40)).into(),
            (IpAddr::V6(v6), _) => Ipv6Addr::from_bits(v6.to_bits() & !(u128::MAX >> 48)).into(),
        }
    }

    fn anchor(&self, name: &str, per: &[&str]) -> Anchor {
        let has = |part: &str, value: &str| per.contains(&part) && !value.is_empty();
        let lacks = |part: &str, value: &str| per.contains(&part) && value.is_empty();
        // Narrower groups come first.
        let addresses = match self.ip {
            IpAddr::V4(_) => ["ip", "ip/40", "ip/16"],
            IpAddr::V6(_) => ["ip", "ip/16", "ip/40"],
        };
        let others = ["header:x-key", "fact:inbox"].into_iter().filter(|part| per.contains(part));
        let others: BTreeSet<String> = others.map(|part| format!("{part} {}", self.key)).collect();
        if has("tenant", &self.tenant) {
            Anchor::Tenant(self.tenant.clone())
        } else if has("user", &self.user) {
            Anchor::User(self.user.clone())
        } else if let Some(part) = addresses.iter().find(|part| per.contains(part)) {
            Anchor::Block(self.block(part))
        } else if lacks("tenant", "") || lacks("user", "") || lacks("header:x-key", &self.key) {
            Anchor::Block(self.block("ip"))
        } else if others.is_empty() {
            Anchor::Rule(name.to_owned())
        } else {
            Anchor::Other(others)
        }
    }
}

fn caller() -> impl Strategy<Value = Caller> {
    let ips: Vec<IpAddr> =
        ["203.0.113.7", "203.0.113.208", "203.0.112.7", "2001:db8::1", "2001:db8:0:1::1", "2001:db8:1::1"]
            .iter()
            .map(|ip| ip.parse().unwrap())
            .collect();
    let name = || "[ab]?";
    (select(ips), name(), name(), name(), name()).prop_map(|(ip, tenant, user, category, key)| Caller {
        ip,
        tenant,
        user,
        category,
        key,
    })
}

fn list(parts: &[&str]) -> String {
    parts.iter().map(|part| format!("\"{part}\"")).collect::<Vec<_>>().join(", ")
}

/// Returns whether a rule with this `per` may have a ladder.
fn may_ban(per: &[&str]) -> bool {
    per.iter().any(|part| !matches!(*part, "category" | "endpoint")) && !per.contains(&"header:x-key")
}

/// Returns the identity that a ladder of a rule with this `per` punishes.
fn identity<'p>(per: &[&'p str]) -> Vec<&'p str> {
    let mut identity: Vec<&str> =
        per.iter().copied().filter(|part| !matches!(*part, "category" | "endpoint")).collect();
    identity.sort_unstable();
    identity
}

/// Returns a policy with one rule for each `per`, with a ladder where it may have one.
fn policy(pers: &[Vec<&str>]) -> Policy {
    let mut text = String::new();
    let mut ladders = BTreeSet::new();
    for (index, per) in pers.iter().enumerate() {
        let layer = if per.is_empty() { "global" } else { "edge" };
        let per_list = list(per);
        let _ =
            writeln!(text, "[[rule]]\nname = \"r{index}\"\nlayer = \"{layer}\"\nper = [{per_list}]\nlimit = \"5/min\"");
        if may_ban(per) && ladders.len() < 4 && ladders.insert(identity(per)) {
            text.push_str("ladder = \"gentle\"\nban_shared = true\n");
        }
    }
    parsed(&text).with_key(KEY)
}

proptest! {
    #![proptest_config(crate::cases(300))]

    /// Every budget, standing and stand-in is in the partition of its anchor, whatever the rule, algorithm and caller. A standing
    /// is in the same partition as the budgets of the rules with its ladder.
    ///
    /// Seen to fail after: leaving the partition out of what `KeyPrefix::new` masks; taking the user before the tenant, or the address
    /// before the user, in `CountedBy::anchor`; leaving out `in_partition` where an address stands in, or in `folded_key`;
    /// `v4.to_bits() >> 7` in `Anchors::address`.
    #[test]
    fn records_with_the_same_anchor_share_a_partition(
        callers in vec(caller(), 1..5),
        pers in vec(prop_oneof![3 => subsequence(PARTS.to_vec(), 0..4), 1 => subsequence(PARTS[6..].to_vec(), 1..4)].prop_shuffle(), 1..8),
    ) {
        let policy = policy(&pers);
        let mut partitions: BTreeMap<Anchor, Partition> = BTreeMap::new();
        let mut check = |anchor: Anchor, key: Digest| {
            let known = *partitions.entry(anchor.clone()).or_insert(key.partition());
            prop_assert_eq!(known, key.partition(), "{:?}", anchor);
            Ok(())
        };
        for caller in &callers {
            caller.ask(|facts| {
                let plan = policy.plan(facts).unwrap();
                for (place, charge) in plan.charges().iter().enumerate() {
                    let name = plan.rule_of(place).unwrap().name.as_ref();
                    let index: usize = name.strip_prefix('r').unwrap().parse().unwrap();
                    check(caller.anchor(name, &pers[index]), charge.key())?;
                    check(Anchor::Block(caller.block("ip")), plan.folded_key(place).unwrap())?;
                    check(Anchor::Rule(name.to_owned()), plan.shared_key(place).unwrap())?;
                }
                let mut laddered: Vec<Vec<&str>> = Vec::new();
                for per in pers.iter().filter(|per| may_ban(per)).map(|per| identity(per)) {
                    if !laddered.contains(&per) {
                        laddered.push(per);
                    }
                }
                for (per, subject) in laddered.iter().zip(plan.subjects()) {
                    check(caller.anchor("", per), subject.key())?;
                }
                check(Anchor::Block(caller.block("ip")), address_digest(KEY, AddressGroup::of(caller.ip, 64)))?;
                check(Anchor::Block(caller.block("ip")), StandInKeys::of(KEY, Some(caller.ip)).prefix.unwrap())
            })?;
        }
    }
}

proptest! {
    #![proptest_config(crate::cases(200))]

    /// Where users belong to tenants, all budgets of a tenant's request are in that tenant's partition, except those counted by
    /// address alone or for everyone. So is the account of its login. Users of two tenants never share a budget or a
    /// standing.
    ///
    /// Seen to fail after: leaving `scoped` out of `Anchored::by_name`, or out of what `CountedBy::digest_all` digests.
    #[test]
    fn all_records_of_a_tenants_request_are_in_one_partition(callers in vec(caller(), 2), category: bool) {
        let rules = [
            "per = ['tenant']", "per = ['user']\nladder = 'gentle'", "per = ['user', 'endpoint']", "per = ['user', 'tenant']",
            "per = ['header:x-key', 'user']", "per = ['user', 'ip']", "per = ['tenant', 'category']",
        ];
        let mut text = "[identity]\nuser_scope = 'tenant'\n".to_owned();
        for (index, rule) in rules.iter().enumerate() {
            let _ = writeln!(text, "[[rule]]\nname = 'r{index}'\n{rule}\nlimit = '5/min'");
        }
        let policy = parsed(&text).with_key(KEY);
        let mut keys: Vec<BTreeSet<u128>> = Vec::new();
        for mut caller in callers.iter().cloned() {
            caller.category = if category { caller.category } else { String::new() };
            caller.tenant.push('t');
            let home = account_digest(KEY, Some(&caller.tenant), "a").unwrap().partition();
            let all: BTreeSet<Digest> = caller.ask(|facts| {
                let plan = policy.plan(facts).unwrap();
                plan.charges().iter().map(Charge::key).chain(plan.subjects().iter().map(Subject::key)).collect()
            });
            for key in &all {
                prop_assert_eq!(key.partition(), home);
            }
            // Without the partition bits, which differ anyway.
            keys.push(all.iter().map(|key| key.to_u128() & !(0xffff << 64)).collect());
        }
        if callers[0].tenant != callers[1].tenant {
            prop_assert_eq!(keys[0].intersection(&keys[1]).count(), 0);
        }
    }
}

/// One tenant had more traffic than a processor could serve. Its users are spread, and its own budget is in a partition that no
/// user of it is in. All records of one user stay together, and another tenant's users stay in one partition.
#[test]
fn the_users_of_a_spread_tenant_are_in_so_many_partitions() {
    let rules = [
        "per = ['tenant']",
        "per = ['user']\nladder = 'gentle'",
        "per = ['user', 'endpoint']",
        "per = ['user', 'tenant']",
        "per = ['user', 'ip']",
        "per = ['tenant', 'category']",
    ];
    let mut text = "[identity]\nuser_scope = 'tenant'\n[tenants.huge]\nspread = 8\n[login]\n".to_owned();
    for (index, rule) in rules.iter().enumerate() {
        let _ = writeln!(text, "[[rule]]\nname = 'r{index}'\n{rule}\nlimit = '5/min'");
    }
    let policy = parsed(&text).with_key(KEY);
    for (tenant, spread) in [("huge", 8), ("small", 1)] {
        let (mut of_users, mut of_tenant, mut of_accounts) = (BTreeMap::new(), BTreeSet::new(), BTreeSet::new());
        for number in 0..800 {
            let user = format!("u{number}");
            let facts = Facts {
                tenant: Some(tenant),
                user: Some(&user),
                ip: "192.0.2.1".parse().ok(),
                path: Some("/x"),
                ..Facts::default()
            };
            let plan = policy.plan(&facts).unwrap();
            // Rules are in the order of their layers, and two of these count by the tenant.
            let (tenants, users) = plan.charges().split_at(2);
            let users = users.iter().map(Charge::key).chain(plan.subjects().iter().map(Subject::key));
            let own: BTreeSet<_> = users.map(Digest::partition).collect();
            assert_eq!(own.len(), 1, "all records of {user} are together");
            *of_users.entry(*own.first().unwrap()).or_insert(0) += 1;
            of_tenant.extend(tenants.iter().map(|charge| charge.key().partition()));
            of_accounts.insert(policy.account_digest(&format!("{tenant}/{user}")).unwrap().unwrap().partition());
        }
        assert_eq!((of_users.len(), of_accounts.len(), of_tenant.len()), (spread, spread, 1), "{tenant}");
        assert_eq!(of_users.contains_key(of_tenant.first().unwrap()), tenant == "small");
        assert!(of_users.values().all(|count| *count > 800 / spread / 2), "{of_users:?}");
    }
}

/// Returns how far counts are from even ones, in standard deviations of the chi-squared statistic for that many bins.
fn unevenness(counts: &[u32]) -> f64 {
    let total: f64 = counts.iter().map(|count| f64::from(*count)).sum();
    let free = f64::from(u32::try_from(counts.len() - 1).unwrap());
    let expected = total / (free + 1.0);
    let chi: f64 = counts.iter().map(|count| (f64::from(*count) - expected).powi(2) / expected).sum();
    (chi - free) / (2.0 * free).sqrt()
}

/// Fails unless these numbers below 256 are as evenly distributed as random ones.
fn assert_even(what: &str, numbers: impl Iterator<Item = u128>) {
    let mut counts = [0; 256];
    numbers.for_each(|number| counts[usize::try_from(number).unwrap()] += 1);
    let unevenness = unevenness(&counts);
    assert!(unevenness < 6.0, "{what}: {unevenness} standard deviations");
}

/// Returns the keys of that many callers under a rule with this `per`.
fn keys(per: &str, callers: u32, ask: impl Fn(u32, &mut dyn FnMut(&Facts<'_>))) -> Vec<Digest> {
    let policy =
        parsed(&format!("[[rule]]\nname = \"r\"\nlayer = \"edge\"\nper = [{per}]\nlimit = \"5/min\"\n")).with_key(KEY);
    let mut keys = Vec::new();
    for caller in 0..callers {
        ask(caller, &mut |facts| keys.push(policy.plan(facts).unwrap().charges()[0].key()));
    }
    keys
}

/// Anchors spread over all partitions like random numbers, also consecutive addresses and names.
///
/// Seen to fail after: `mixed >> 60` in `Anchors::address`, also with the first product alone; a fixed partition in `Anchors::tenant`.
#[test]
fn anchors_spread_evenly_over_partitions() {
    const MANY: u32 = 1 << 14;
    let tenants = keys("'tenant', 'endpoint'", MANY, |n, ask| {
        ask(&Facts { tenant: Some(&format!("t{n}")), path: Some("/a"), ..Facts::default() });
    });
    let users = keys("'user'", MANY, |n, ask| ask(&Facts { user: Some(&format!("u{n}")), ..Facts::default() }));
    let v4 = keys("'ip'", MANY, |n, ask| {
        ask(&Facts { ip: Some(Ipv4Addr::from_bits(0x0a00_0000 | n << 8).into()), ..Facts::default() });
    });
    let v6 = keys("'ip'", MANY, |n, ask| {
        let bits = 0x2001_0db8 << 96 | u128::from(n) << 80;
        ask(&Facts { ip: Some(Ipv6Addr::from_bits(bits).into()), ..Facts::default() });
    });
    let headers = keys("'header:x-key'", MANY, |n, ask| {
        ask(&Facts { headers: &[("x-key", &n.to_string())], ..Facts::default() });
    });
    let accounts: Vec<Digest> = (0..MANY).filter_map(|n| account_digest(KEY, None, &format!("a{n}"))).collect();
    let alone = TextKeys::new(KEY, &threshold_core::Limit::never());
    let texts: Vec<Digest> = (0..MANY).map(|n| alone.digest(&n.to_string())).collect();
    for (what, keys) in [
        ("tenants", tenants),
        ("users", users),
        ("IPv4", v4),
        ("IPv6", v6),
        ("headers", headers),
        ("accounts", accounts),
        ("texts", texts),
    ] {
        let numbers = || keys.iter().map(|key| u128::from(key.partition().to_u16()));
        assert_even(what, numbers().map(|number| number >> 8));
        assert_even(what, numbers().map(|number| number & 255));
        // Of 65,536 numbers, 16,384 draws are expected to meet 14,497, give or take 40.
        let met = numbers().collect::<BTreeSet<_>>().len();
        assert!((14_200..14_800).contains(&met), "{what} meet {met} partitions");
    }
}

/// Within one partition every other bit of a key is evenly distributed, and the bits that choose a slot in memory are
/// independent of the partition.
///
/// Seen to fail after: a partition in the first 16 bits of the upper half (`SHIFT` of 112); and one in the lower half (32).
#[test]
fn a_partition_reveals_nothing_else_about_a_key() {
    const MANY: u32 = 1 << 12;
    let of_one_tenant = keys("'tenant', 'user'", MANY, |n, ask| {
        ask(&Facts { tenant: Some("t"), user: Some(&format!("u{n}")), ..Facts::default() });
    });
    let partitions: BTreeSet<Partition> = of_one_tenant.iter().map(|key| key.partition()).collect();
    assert_eq!(partitions.len(), 1);
    for bit in (0..128).filter(|bit| !(64..80).contains(bit)) {
        let ones = of_one_tenant.iter().filter(|key| key.to_u128() >> bit & 1 == 1).count();
        // Half of them, give or take six standard deviations.
        assert!((2_048 - 192..2_048 + 192).contains(&ones), "bit {bit} is set in {ones} of {MANY}");
    }
    assert_even("the shard", of_one_tenant.iter().map(|key| key.to_u128() >> 120));
    assert_even("the slot", of_one_tenant.iter().map(|key| key.to_u128() >> 56 & 255));
    let of_many = keys("'ip'", MANY * 4, |n, ask| {
        ask(&Facts { ip: Some(Ipv4Addr::from_bits(0x0a00_0000 | n << 8).into()), ..Facts::default() });
    });
    let pair =
        |key: &Digest, shift: u32| (key.to_u128() >> shift & 15) << 4 | u128::from(key.partition().to_u16() >> 12);
    assert_even("shard and partition", of_many.iter().map(|key| pair(key, 124)));
    assert_even("slot and partition", of_many.iter().map(|key| pair(key, 60)));
}
