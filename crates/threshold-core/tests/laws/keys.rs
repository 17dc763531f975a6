//! Keys: distinct callers, rules and subjects never share one.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use proptest::collection::vec;
use proptest::prelude::*;
use proptest::sample::{select, subsequence};
use threshold_core::limit::Algorithm;
use threshold_core::plan::Subject;
use threshold_core::{Digest, Facts, Policy};

use crate::world::{ALICE, parsed};

/// What the rules of these tests count by, and the index of its value in [`Caller::texts`]; the address has none.
const PARTS: [(&str, Option<usize>); 9] = [
    ("ip", None),
    ("tenant", Some(0)),
    ("user", Some(1)),
    ("tier", Some(2)),
    ("category", Some(3)),
    ("endpoint", Some(4)),
    ("header:x-key", Some(5)),
    ("fact:inbox", Some(6)),
    ("fact:box", Some(7)),
];

/// The identities that a ladder may punish.
const SUBJECTS: [&[&str]; 8] = [
    &["user"],
    &["tenant"],
    &["fact:inbox"],
    &["fact:box"],
    &["tenant", "user"],
    &["ip"],
    &["ip/64"],
    &["fact:inbox", "fact:box"],
];

/// A caller whose names contain characters that could be taken for separators.
#[derive(Debug, Clone)]
struct Caller {
    ip: IpAddr,
    texts: Vec<Option<String>>,
}

/// The value of one part of a key. Equal values mean the same budget.
#[derive(Debug, Clone, PartialEq, Eq)]
enum KeyPart {
    Group(u128),
    Text(String),
    /// The request lacks the value, and its address stands in for it.
    Floor(u128),
}

impl Caller {
    /// Calls `question` with the facts of this caller.
    fn ask<T>(&self, question: impl FnOnce(&Facts<'_>) -> T) -> T {
        let text = |index: usize| self.texts[index].as_deref();
        let own = |name, index: usize| text(index).map(|value| (name, value));
        let headers: Vec<_> = own("x-key", 5).into_iter().collect();
        let facts: Vec<_> = own("inbox", 6).into_iter().chain(own("box", 7)).collect();
        question(&Facts {
            ip: Some(self.ip),
            tenant: text(0),
            user: text(1),
            tier: text(2),
            category: text(3),
            endpoint: text(4),
            headers: &headers,
            facts: &facts,
            ..Facts::default()
        })
    }

    /// Returns the key of the only rule of a policy.
    fn key(&self, policy: &Policy) -> Digest {
        self.ask(|facts| policy.plan(facts).unwrap().charges()[0].key())
    }

    /// Returns the address group: the /64 of an IPv6 address, or the IPv4 address itself.
    fn group(&self) -> u128 {
        match self.ip {
            IpAddr::V4(v4) => u128::from(v4.to_bits()),
            IpAddr::V6(v6) => v6.to_bits() & !u128::from(u64::MAX),
        }
    }

    fn part(&self, part: &str) -> KeyPart {
        let place = PARTS.iter().find(|(name, _)| *name == part).and_then(|(_, place)| *place);
        match place.map(|place| self.texts[place].clone().filter(|text| !text.is_empty())) {
            None => KeyPart::Group(self.group()),
            Some(Some(text)) => KeyPart::Text(text),
            Some(None) if part == "category" => KeyPart::Text("requests".to_owned()),
            Some(None) => KeyPart::Floor(self.group()),
        }
    }

    fn tuple(&self, parts: &[&str]) -> Vec<KeyPart> {
        parts.iter().map(|part| self.part(part)).collect()
    }
}

fn caller() -> impl Strategy<Value = Caller> {
    let v6 = |low: u16, host: u16| IpAddr::V6(Ipv6Addr::new(0x2001, 0xdb8, 0, low, 0, 0, 0, host));
    let ips = vec![
        IpAddr::V4(Ipv4Addr::new(203, 0, 113, 7)),
        IpAddr::V4(Ipv4Addr::new(203, 0, 113, 8)),
        v6(1, 1),
        v6(1, 2),
        v6(2, 1),
    ];
    let text = prop::option::weighted(0.8, "[a:_\\u{0}]{0,2}");
    (select(ips), vec(text, 8)).prop_map(|(ip, texts)| Caller { ip, texts })
}

/// Two callers with mostly equal values.
fn two_callers() -> impl Strategy<Value = (Caller, Caller)> {
    (caller(), caller(), vec(prop::bool::weighted(0.75), 9)).prop_map(|(one, mut other, same)| {
        for (index, text) in other.texts.iter_mut().enumerate().filter(|(index, _)| same[*index]) {
            text.clone_from(&one.texts[index]);
        }
        let ip = if same[8] { one.ip } else { other.ip };
        (one, Caller { ip, ..other })
    })
}

fn list(parts: &[&str]) -> String {
    parts.iter().map(|part| format!("\"{part}\"")).collect::<Vec<_>>().join(", ")
}

fn one_rule(name: &str, parts: &[&str], algorithm: Algorithm, quota: u64) -> Policy {
    let limit = if algorithm.is_concurrency() { format!("{quota}") } else { format!("{quota}/min") };
    let per = list(parts);
    parsed(&format!("[[rule]]\nname = \"{name}\"\nper = [{per}]\nlimit = \"{limit}\"\nalgorithm = \"{algorithm}\"\n"))
}

fn parts() -> impl Strategy<Value = Vec<&'static str>> {
    let names: Vec<_> = PARTS.iter().map(|(name, _)| *name).collect();
    subsequence(names, 1..5).prop_shuffle()
}

proptest! {
    #![proptest_config(crate::cases(600))]

    /// Two requests share a budget exactly if all values that the rule counts by are equal, whatever characters they hold. An
    /// address that stands in for a missing value equals neither a value nor an address that is counted as such.
    ///
    /// Seen to fail after: replacing the address with an empty text under `Part::Floor` in `Caller::add_parts`; and `value` with
    /// `value.trim_matches('_')` in `Caller::add_part`.
    #[test]
    fn requests_share_a_key_exactly_if_all_parts_are_equal(callers in two_callers(), parts in parts()) {
        let policy = one_rule("r", &parts, Algorithm::TokenBucket, 5);
        let (one, other) = callers;
        let same = one.tuple(&parts) == other.tuple(&parts);
        prop_assert_eq!(one.key(&policy) == other.key(&policy), same);
    }

    /// Characters cannot move from one part to the next, whatever character might join the parts.
    ///
    /// Seen to fail after: leaving out the length in `KeyBuilder::bytes`.
    #[test]
    fn the_boundary_between_two_parts_matters(
        words in ["[ab]{1,2}", "[ab]{1,2}", "[ab]{1,2}"],
        joint in select((0..=13u8).chain(*b":_=,/{}% ").collect::<Vec<_>>()),
        pair in subsequence(&PARTS[1..], 2),
    ) {
        let parts = [pair[0].0, pair[1].0];
        let [one, two, three] = words;
        let joint = char::from(joint);
        let caller = |values: [String; 2]| {
            let mut texts = vec![None; 8];
            for ((_, place), value) in pair.iter().zip(values) {
                texts[place.unwrap()] = Some(value);
            }
            Caller { ip: ALICE.ip(), texts }
        };
        let policy = one_rule("r", &parts, Algorithm::TokenBucket, 5);
        let early = caller([one.clone(), format!("{two}{joint}{three}")]);
        let late = caller([format!("{one}{joint}{two}"), three]);
        prop_assert_ne!(early.key(&policy), late.key(&policy));
    }

    /// A rule that counts by address and a rule that falls back to the address for a missing value do not share a budget.
    ///
    /// Seen to fail after: leaving out the loop over `per` in `Rule::digest_with`, with `Part::Address` in place of `Part::Floor` in
    /// `Caller::add_parts`; each alone keeps them apart.
    #[test]
    fn an_address_that_stands_in_has_a_key_of_its_own(ip in caller(), part in select(&PARTS[1..])) {
        let bare = Caller { ip: ip.ip, texts: vec![None; 8] };
        let (by_ip, by_part) = (one_rule("r", &["ip"], Algorithm::TokenBucket, 5), one_rule("r", &[part.0], Algorithm::TokenBucket, 5));
        prop_assert_ne!(bare.key(&by_ip), bare.key(&by_part));
    }

    /// A rule is identified by its name, its `per` and its algorithm. A change of one of these changes the budget; a change of the
    /// limit's figures does not.
    ///
    /// Seen to fail after: leaving out `&self.name` in `Rule::digest_with`; likewise the algorithm; and, the other way,
    /// digesting `limit.quota()` in `Rule::prefix`.
    #[test]
    fn a_rule_is_identified_by_name_per_and_algorithm(
        caller in caller(),
        names in [select(&["r", "user", "r2", "tenant,user"][..]), select(&["r", "user"][..])],
        parts in [select(&SUBJECTS[..]), select(&SUBJECTS[..])],
        algorithms in [select(&Algorithm::ALL[..]), select(&Algorithm::ALL[..3])],
        quotas in [1..100u64, 1..100u64],
    ) {
        let keys: Vec<_> = (0..2)
            .map(|i| caller.key(&one_rule(names[i], parts[i], algorithms[i], quotas[i])))
            .collect();
        let same = (names[0], parts[0], algorithms[0]) == (names[1], parts[1], algorithms[1]);
        prop_assert_eq!(keys[0] == keys[1], same);
    }

    /// Two requests share a standing exactly if they have the same `per`, ladder and values. A plan never has the same standing
    /// twice: it would be loaded twice, and one copy would be lost.
    ///
    /// Seen to fail after: leaving out the names of `per` in `SubjectRule::digest_with`, which was a bug: `fact:a` and `fact:b` shared
    /// strikes, and so did callers at one address that lacked different identities.
    #[test]
    fn requests_share_a_standing_exactly_if_they_are_the_same_subject(callers in two_callers(), chosen in subsequence(&SUBJECTS[..], 1..5)) {
        let rule = |(index, parts): (usize, &&[&str])| {
            format!("[[rule]]\nname = \"r{index}\"\nper = [{}]\nlimit = \"5/min\"\nladder = \"gentle\"\nban_shared = true\n", list(parts))
        };
        let policy = parsed(&chosen.iter().enumerate().map(rule).collect::<String>());
        let subjects = |caller: &Caller| -> Vec<(usize, Vec<KeyPart>, Digest)> {
            let keys = caller.ask(|facts| {
                policy.plan(facts).unwrap().subjects().iter().map(Subject::key).collect::<Vec<_>>()
            });
            let all = keys.into_iter().enumerate();
            all.map(|(index, key)| (index, caller.tuple(chosen[index]), key)).collect()
        };
        let (one, other) = (subjects(&callers.0), subjects(&callers.1));
        prop_assert_eq!(one.len(), chosen.len());
        for (index, tuple, key) in &one {
            for (other_index, other_tuple, other_key) in one.iter().chain(&other) {
                prop_assert_eq!(key == other_key, index == other_index && tuple == other_tuple);
            }
        }
    }
}

/// The same values under another secret have other keys.
#[test]
fn keys_depend_on_the_secret() {
    let policy = one_rule("r", &["user"], Algorithm::TokenBucket, 5);
    let key = |policy: &Policy| policy.plan(&ALICE.facts()).unwrap().charges()[0].key();
    let before = key(&policy);
    assert_ne!(before, key(&policy.with_key(threshold_core::DigestKey::new([9; 16]))));
}
