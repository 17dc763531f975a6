//! Compares imported policies with a slow model of the service, and lists what cannot be imported.

#![expect(clippy::arithmetic_side_effects, reason = "a test that overflows fails")]

use std::collections::BTreeMap;

use proptest::prelude::*;
use proptest::sample::{Index, select};
use serde::Deserialize;
use threshold_core::ledger::Ledger;
use threshold_core::plan::Verb;
use threshold_core::policy::{Policy, Review};
use threshold_core::{Decision, Facts, Timestamp};

use super::file;
use super::select::{Selection, Work};
use crate::source::Source;
use threshold_wire::envoy::join_keys;

/// Configurations in the manner of the service's own examples.
const EXAMPLES: [&str; 11] = [
    // A key that Envoy repeats, and one with the name of the fact of the domain.
    "domain: twice\ndescriptors:\n- key: generic_key\n  value: a\n  descriptors:\n  - {key: generic_key, value: b, rate_limit: {unit: minute, requests_per_unit: 1}}\n\
     - {key: domain, rate_limit: {unit: minute, requests_per_unit: 2}}\n",
    // Two databases, and one of them without traffic.
    "domain: mongo\ndescriptors:\n- {key: database, value: users, rate_limit: {unit: second, requests_per_unit: 3}}\n\
     - {key: database, value: closed, rate_limit: {unit: second, requests_per_unit: 0}}\n",
    // Marketing messages are limited by number, and all messages to a number are.
    "domain: messaging\ndescriptors:\n- key: kind\n  value: marketing\n  descriptors:\n  - key: number\n    rate_limit:\n      unit: day\n      \
     requests_per_unit: 2\n- key: number\n  rate_limit:\n    unit: minute\n    requests_per_unit: 3\n",
    // A default, an exact value before it, and one that is not limited.
    "domain: edge\ndescriptors:\n- {key: user, rate_limit: {unit: hour, requests_per_unit: 2}}\n- {key: user, value: vip, rate_limit: {unlimited: true}}\n\
     - {key: user, value: bot, rate_limit: {unit: YEAR, requests_per_unit: 1}}\n",
    // Wildcards: each value has a counter of its own, or all of them share one.
    "domain: paths\ndescriptors:\n- {key: path, value: /api*, rate_limit: {unit: minute, requests_per_unit: 2}}\n\
     - {key: path, value: /img*, share_threshold: true, rate_limit: {unit: week, requests_per_unit: 3}}\n",
    // The first pattern of the file counts where two match.
    "domain: stars\ndescriptors:\n- {key: path, value: a*, rate_limit: {unit: minute, requests_per_unit: 2}}\n\
     - {key: path, value: 'a/1*', rate_limit: {unit: minute, requests_per_unit: 1}}\n\
     - {key: path, value: '*', share_threshold: true, rate_limit: {unit: hour, requests_per_unit: 3}}\n",
    // A key with the name of the fact of a repeated one.
    "domain: numbered\ndescriptors:\n- key: k\n  descriptors:\n  - {key: k_2, value: v, rate_limit: {unit: hour, requests_per_unit: 7}}\n\
     \x20 - {key: k, value: v, rate_limit: {unit: hour, requests_per_unit: 8}}\n",
    // The values of a pattern share one counter, also where the limit is below it.
    "domain: shared\ndescriptors:\n- key: file\n  value: f*\n  share_threshold: true\n  descriptors:\n  - key: user\n    \
     rate_limit: {unit: hour, requests_per_unit: 2}\n",
    // A limit that only watches, below a limit of its own.
    "domain: watch\ndescriptors:\n- key: tenant\n  rate_limit: {unit: month, requests_per_unit: 4}\n  descriptors:\n  - key: plan\n    value: free\n    \
     shadow_mode: true\n    rate_limit: {unit: minute, requests_per_unit: 1}\n",
    // Three levels, of which only the last has a limit.
    "domain: deep\ndescriptors:\n- key: a\n  value: x\n  descriptors:\n  - key: b\n    descriptors:\n    - {key: c, value: y*, rate_limit: {unit: second, requests_per_unit: 1}}\n",
    // Names that TOML and a policy quote.
    "domain: \"odd $NAME \\\"x\\\"\"\ndescriptors:\n- {key: \"x-user:id\", value: \"a\\\\b$c\", rate_limit: {unit: second, requests_per_unit: 1}}\n",
];

fn import(name: &str, text: &str) -> anyhow::Result<String> {
    import_all(&[(name, text)])
}

fn import_all(files: &[(&str, &str)]) -> anyhow::Result<String> {
    let source = |(name, text): &(&str, &str)| Source { name: (*name).to_owned(), text: (*text).to_owned() };
    super::import(&files.iter().map(source).collect::<Vec<_>>())
}

/// A configuration, as that service reads it.
#[derive(Debug, Deserialize)]
struct Config {
    domain: String,
    descriptors: Vec<Descriptor>,
}

#[derive(Debug, Clone, Default, Deserialize)]
#[serde(default)]
struct Descriptor {
    key: String,
    value: String,
    rate_limit: Option<RateLimit>,
    shadow_mode: bool,
    share_threshold: bool,
    descriptors: Vec<Self>,
}

#[derive(Debug, Clone, Default, Deserialize)]
#[serde(default)]
struct RateLimit {
    requests_per_unit: u64,
    unit: String,
    unlimited: bool,
}

/// The service: it picks one limit for a descriptor, and counts in windows of the clock.
#[derive(Default)]
struct Model(BTreeMap<(Vec<String>, u64), u64>);

impl Descriptor {
    /// Its key and value as one text: there it is known by that.
    fn joined(&self) -> String {
        if self.value.is_empty() { self.key.clone() } else { format!("{}_{}", self.key, self.value) }
    }
}

/// What that service picks for a descriptor.
struct Picked<'c> {
    /// The descriptor of the last entry.
    own: Option<&'c Descriptor>,
    /// For each entry what its value is counted as.
    counted: Vec<String>,
    /// Whether an entry was taken for one of another key, of which docs/envoy-import.md tells.
    is_of_another_key: bool,
}

/// `GetLimit` of that service.
fn get_limit<'c>(mut level: &'c [Descriptor], entries: &[(&str, &str)]) -> Picked<'c> {
    let mut picked = Picked { own: None, counted: Vec::new(), is_of_another_key: false };
    for (key, value) in entries {
        let joined = format!("{key}_{value}");
        let named = |name: &str| level.iter().find(|own| own.joined() == name);
        let begins = |own: &&Descriptor| own.joined().strip_suffix('*').is_some_and(|begin| joined.starts_with(begin));
        let next = named(&joined).or_else(|| level.iter().find(begins)).or_else(|| named(key));
        picked.own = next;
        let Some(next) = next else { break };
        if next.key != *key {
            let is_told = next.key.len() > key.len() || level.iter().all(|own| own.key != *key);
            assert!(is_told, "{key}={value} is one of {}, which was not refused", next.joined());
            picked.is_of_another_key = true;
        }
        picked.counted.push(format!("{key}={}", if next.share_threshold { &next.value } else { *value }));
        level = &next.descriptors;
    }
    picked
}

impl Model {
    fn allows(&mut self, Picked { own, counted, .. }: &Picked<'_>, now: u64) -> bool {
        let Some(own) = own else { return true };
        let Some(limit) = own.rate_limit.as_ref().filter(|limit| !limit.unlimited) else { return true };
        let seconds = match limit.unit.to_lowercase().as_str() {
            "second" => 1,
            "minute" => 60,
            "hour" => 3_600,
            "day" => 86_400,
            "week" => 7 * 86_400,
            "month" => 30 * 86_400,
            _ => 365 * 86_400,
        };
        let count = self.0.entry((counted.clone(), now / seconds)).or_default();
        *count += 1;
        *count <= limit.requests_per_unit || own.shadow_mode
    }
}

/// Decides a descriptor as the door for Envoy does.
fn decide(ledger: &mut Ledger, policy: &Policy, domain: &str, entries: &[(&str, &str)], now: u64) -> Decision {
    let keys = join_keys(entries.iter().map(|(key, _)| *key));
    let mut facts = vec![("domain".to_owned(), domain), ("entry_keys".to_owned(), keys.as_str())];
    for (key, value) in entries {
        let numbered = (2..).map(|number| format!("{key}_{number}"));
        let mut names = std::iter::once((*key).to_owned()).chain(numbered);
        let name = names.find(|name| facts.iter().all(|(own, _)| own != name)).unwrap();
        facts.push((name, if value.is_empty() { "(empty)" } else { value }));
    }
    let facts: Vec<(&str, &str)> = facts.iter().map(|(name, value)| (name.as_str(), *value)).collect();
    let facts = Facts { facts: &facts, ..Facts::default() };
    ledger.decide(policy, Verb::Check, &facts, Timestamp::from_secs(now)).unwrap().decision
}

/// Decides calls there and here, under a configuration.
fn compare(text: &str, calls: &[(Index, [Index; 5], u64)]) -> Result<(), TestCaseError> {
    let config: Config = serde_saphyr::from_str(text).unwrap();
    let policy_text = import("example.yaml", text).unwrap();
    let policy = parse(&policy_text);
    let (mut ledger, mut model) = (Ledger::default(), Model::default());
    let (mut shapes, mut values) = (Vec::new(), vec!["other".to_owned(), "another".to_owned(), String::new()]);
    collect(&config.descriptors, &[], &mut shapes, &mut values);
    let mut now = 1_767_225_600;
    for (shape, picks, seconds) in calls {
        now += seconds;
        let Some(keys) = shapes.get(shape.index(shapes.len().max(1))) else { continue };
        let values = picks.iter().map(|pick| values[pick.index(values.len())].as_str());
        let entries: Vec<(&str, &str)> = keys.iter().copied().zip(values).collect();
        let picked = get_limit(&config.descriptors, &entries);
        if picked.is_of_another_key {
            continue;
        }
        let decision = decide(&mut ledger, &policy, &config.domain, &entries, now);
        prop_assert_eq!(decision.allowed(), model.allows(&picked, now), "{:?}\n{}\n{}", entries, text, policy_text);
        // And by the same limit: of all that the file has, this one was looked at.
        let picked = picked.own.and_then(|own| own.rate_limit.as_ref()).filter(|limit| !limit.unlimited);
        let read: Vec<u64> = decision.readings.iter().map(|reading| reading.limit).collect();
        let expected = Vec::from_iter(picked.map(|limit| limit.requests_per_unit));
        prop_assert_eq!(read, expected, "{:?}\n{}\n{}", entries, text, policy_text);
    }
    Ok(())
}

/// Whether a star is not the last of a value, below these or at one of them.
fn has_star_within(tree: &[Descriptor]) -> bool {
    let is_within = |own: &Descriptor| own.value.strip_suffix('*').unwrap_or(&own.value).contains('*');
    tree.iter().any(|own| is_within(own) || has_star_within(&own.descriptors))
}

/// Whether one of these, or of those below, has a limit.
fn has_limit(tree: &[Descriptor]) -> bool {
    tree.iter().any(|own| own.rate_limit.is_some() || has_limit(&own.descriptors))
}

/// A policy of this program and not of a later one: the section for Envoy may be unknown to it.
fn parse(text: &str) -> Policy {
    let Review { policy, findings, .. } = Policy::review(text, &|_| None);
    assert!(findings.is_empty(), "{text}\n{findings:?}");
    policy.unwrap()
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 64, ..ProptestConfig::default() })]

    /// Woken by: leaving out `fallback`, `entry_keys` or the exceptions; a bucket in place of a fixed window; `per` without the wildcard's
    /// value; `shared` of the last node only.
    #[test]
    fn an_imported_policy_decides_as_the_service_does(calls in calls()) {
        for example in EXAMPLES {
            compare(example, &calls)?;
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 256, ..ProptestConfig::default() })]

    /// Three levels (a parent's limit, a child's default and a child's value) were refused, and so was a third of all configurations.
    ///
    /// Woken by: one layer for all fallbacks, exceptions for the last value only or without `earlier` patterns, `before` left out in
    /// `selected`, patterns in another order than that of the file, a star that is a wildcard within a value, siblings by facts and not
    /// by keys, and leaving out `check_reach`.
    #[test]
    fn random_configurations_of_four_levels_decide_as_the_service_does(
        tree in level(4),
        calls in calls(),
    ) {
        let text = yaml(&tree);
        match import("random.yaml", &text) {
            Ok(_) => {
                prop_assert!(!has_star_within(&tree), "{}", text);
                compare(&text, &calls)?;
            }
            // The line of the limit, and those of the others.
            Err(error) => {
                let error = error.to_string();
                let is_named = error.strip_prefix("random.yaml:").is_some_and(|rest| rest.starts_with(|c: char| c.is_ascii_digit()));
                let is_true = match &error {
                    error if error.contains("only a star at the end is a wildcard") => has_star_within(&tree),
                    error if error.contains("the policy would be empty") => !has_limit(&tree) || text.contains("value: '*'"),
                    error => ["no layer left", "key and value are one text joined by _"].iter().any(|why| error.contains(why)),
                };
                prop_assert!(is_named && is_true, "{}\n{}", error, text);
            }
        }
    }
}

fn calls() -> impl Strategy<Value = Vec<(Index, [Index; 5], u64)>> {
    prop::collection::vec((any::<Index>(), any::<[Index; 5]>(), 0_u64..30), 1..60)
}

/// Returns descriptors with few keys and values, so that many of them come before others.
fn level(depth: u32) -> BoxedStrategy<Vec<Descriptor>> {
    let below = if depth > 1 { level(depth - 1) } else { Just(Vec::new()).boxed() };
    let value = select(
        [vec![""; 10], ["x", "x", "y", "xy", "2", "x*", "xy*", "y*", "xyx*"].repeat(3), vec!["*", "*", "x*y", "x**"]]
            .concat(),
    );
    let one =
        (select(vec!["a", "a", "a", "a_2", "a_2", "a_x", "b", "b", "b"]), value, 0..8_u8, any::<[bool; 2]>(), below);
    let one = one.prop_map(|(key, value, kind, [shares, watches], descriptors)| Descriptor {
        key: key.to_owned(),
        value: value.to_owned(),
        // The number is given later, and is another for each.
        rate_limit: (kind > 1).then(|| RateLimit {
            unit: "hour".to_owned(),
            unlimited: kind == 2,
            ..RateLimit::default()
        }),
        shadow_mode: watches && kind == 3,
        share_threshold: shares && value.contains('*'),
        descriptors,
    });
    let all = prop::collection::vec(one, 0..4).prop_map(|mut all| {
        all.sort_by_key(Descriptor::joined);
        all.dedup_by_key(|own| own.joined());
        all
    });
    all.prop_shuffle().boxed()
}

/// Writes descriptors as a file. The limits are 0, 1, 2 and so on: each has a number of its own.
fn yaml(tree: &[Descriptor]) -> String {
    fn write(tree: &[Descriptor], depth: usize, number: &mut u64, text: &mut String) {
        let indent = " ".repeat(2 * depth);
        for own in tree {
            text.push_str(&format!("{indent}- key: {}\n{indent}  value: '{}'\n", own.key, own.value));
            text.push_str(&format!(
                "{indent}  shadow_mode: {}\n{indent}  share_threshold: {}\n",
                own.shadow_mode, own.share_threshold
            ));
            match &own.rate_limit {
                Some(limit) if limit.unlimited => {
                    text.push_str(&format!("{indent}  rate_limit: {{unlimited: true}}\n"));
                }
                Some(limit) => {
                    text.push_str(&format!(
                        "{indent}  rate_limit: {{unit: {}, requests_per_unit: {number}}}\n",
                        limit.unit
                    ));
                    *number += 1;
                }
                None => {}
            }
            if !own.descriptors.is_empty() {
                text.push_str(&format!("{indent}  descriptors:\n"));
                write(&own.descriptors, depth + 1, number, text);
            }
        }
    }
    let mut text = "domain: random\ndescriptors:\n".to_owned();
    if tree.is_empty() {
        return "domain: random\ndescriptors: []\n".to_owned();
    }
    write(tree, 0, &mut 0, &mut text);
    text
}

/// Collects every sequence of keys, also with one more, and values that match something.
fn collect<'c>(tree: &'c [Descriptor], above: &[&'c str], shapes: &mut Vec<Vec<&'c str>>, values: &mut Vec<String>) {
    for own in tree {
        let keys: Vec<&str> = above.iter().copied().chain([&*own.key]).collect();
        let between = ["", "/1", "c/2", "x", "y"].map(|between| own.value.replace('*', between));
        values.extend(between.into_iter().filter(|value| !values.contains(value)).collect::<Vec<_>>());
        shapes.push(keys.clone());
        shapes.push([&keys[..], &["a"]].concat());
        collect(&own.descriptors, &keys, shapes, values);
    }
}

/// An import compared every descriptor with every other one: a file of 50,000 took more than a minute.
///
/// Woken by: comparing patterns with all others and not with those that begin alike, looking for replaced limits in all rules, and by
/// exceptions for each rule below the same descriptors.
#[test]
fn eight_times_as_many_descriptors_are_eight_times_the_work() {
    let limit = "rate_limit: {unit: hour, requests_per_unit: 5}";
    let below = |text: &str| format!("rate_limit: {{unit: hour, requests_per_unit: 5}}, descriptors: [{text}]");
    let inner = format!("{{key: b, {limit}}}, {{key: b, value: z, {limit}}}");
    type Line<'l> = Box<dyn Fn(usize) -> String + 'l>;
    let families: [(&str, Line<'_>); 6] = [
        ("values", Box::new(|n| format!("{{key: a, value: v{n}, {limit}}}"))),
        ("keys", Box::new(|n| format!("{{key: k{n}, {limit}}}"))),
        ("beginnings", Box::new(|n| format!("{{key: a, value: v{n}/*, {limit}}}"))),
        ("two levels", Box::new(|n| format!("{{key: a, value: v{n}, {}}}", below(&inner)))),
        ("default below", Box::new(|n| format!("{{key: a, value: v{n}, descriptors: [{{key: b, {limit}}}]}}"))),
        (
            "names",
            Box::new(|n| {
                format!(
                    "{{key: a, value: v{n}, rate_limit: {{unit: hour, requests_per_unit: 5, name: n{n}, replaces: [{{name: m{n}}}]}}}}"
                )
            }),
        ),
    ];
    for (name, line) in families {
        let work = |count: usize| {
            let lines: String = (0..count).map(|n| format!("- {}\n", line(n))).collect();
            let text = format!("domain: d\ndescriptors:\n- {{key: a, {}}}\n{lines}", below(&inner));
            let domain = file::read(&text).unwrap();
            let mut work = Work::default();
            let selection = Selection::of(&domain.nodes, &mut work).unwrap();
            assert!(selection.rules.len() >= count, "{name}");
            work.0
        };
        let (few, many) = (work(250), work(2_000));
        assert!(many <= 9 * few + 1_000, "{name}: {few} and {many}");
    }
}

/// Every one of these patterns matches values of all others. Woken by: leaving out `MAX_WORK`.
#[test]
fn a_file_that_takes_too_much_work_is_an_error() {
    let lines: String = (1..=2_500)
        .map(|n| {
            format!("- {{key: a, value: '{}*', rate_limit: {{unit: hour, requests_per_unit: 5}}}}\n", "x".repeat(n))
        })
        .collect();
    let error = import("many.yaml", &format!("domain: d\ndescriptors:\n{lines}")).unwrap_err().to_string();
    assert_eq!(error, "many.yaml: the values take more than 5000000 comparisons: split the configuration");
    let deep = (0..65).map(|depth| format!("{}- key: k\n{0}  descriptors:\n", " ".repeat(2 * depth)));
    let deep = format!("domain: d\ndescriptors:\n{}", deep.collect::<String>());
    let error = import("deep.yaml", &deep).unwrap_err().to_string();
    assert_eq!(error, "deep.yaml:65: the file has more than 1000000 values, or is nested too deeply");
}

#[test]
fn the_policy_names_the_lines_that_its_rules_are_from() {
    let text = import(
        "rate.yaml",
        "domain: d\ndescriptors:\n- key: remote_address\n  rate_limit: {unit: minute, requests_per_unit: 10}\n\
         - key: remote_address\n  value: 50.0.0.5\n  rate_limit: {unit: second, requests_per_unit: 0}\n",
    );
    let expected = r#"# The domain d of rate.yaml, imported from a configuration of envoyproxy/ratelimit.
# docs/envoy-import.md of Threshold lists where the answers differ.

[envoy.descriptors]
remote_address = "fact:remote_address"

# Line 3: remote_address
[[rule]]
name = "d-remote_address"
layer = "edge"
match = { fact = { domain = "d", entry_keys = "remote_address", remote_address = "**" } }
per = ["fact:remote_address"]
limit = "10/min"
algorithm = "fixed-window"
fallback = true

# Line 5: remote_address=50.0.0.5
[[rule]]
name = "d-remote_address-50.0.0.5"
layer = "edge"
match = { fact = { domain = "d", entry_keys = "remote_address", remote_address = "50.0.0.5" } }
per = ["fact:domain"]
deny = true
"#;
    assert_eq!(text.unwrap(), expected);
}

/// Two policies could not be put into one, because each had a table for addresses.
///
/// Woken by: a table for each domain, and names that are unique in a domain only.
#[test]
fn several_files_become_one_policy() {
    let limit = "rate_limit: {unit: minute, requests_per_unit: 10}";
    let other = "rate_limit: {unit: minute, requests_per_unit: 10, name: own, replaces: [{name: all}]}";
    let all = "rate_limit: {unit: minute, requests_per_unit: 10, name: all}";
    let file = |domain: &str| {
        format!("domain: {domain}\ndescriptors:\n- key: remote_address\n  {other}\n- {{key: all, value: x, {all}}}\n")
    };
    let (one, two, three) =
        (file("a-b"), file("\"a b\""), format!("domain: c\ndescriptors:\n- {{key: user, {limit}}}\n"));
    let text = import_all(&[("1.yaml", &one), ("2.yaml", &two), ("3.yaml", &three)]).unwrap();
    let names: Vec<String> = parse(&text).rules().iter().map(|rule| rule.name.to_string()).collect();
    assert_eq!(names, ["a-b-remote_address", "a-b-all-x", "a-b-remote_address-2", "a-b-all-x-2", "c-user"]);
    let replaced =
        "\n[envoy.replaces]\na-b-remote_address = [\"a-b-all-x\"]\na-b-remote_address-2 = [\"a-b-all-x-2\"]\n\n";
    assert!(text.contains(replaced), "{text}");
    assert!(
        text.contains("# The domain a-b of 1.yaml,") && text.contains("\n# 2.yaml, line 3: remote_address\n"),
        "{text}"
    );
    let error = import_all(&[("1.yaml", &one), ("3.yaml", &three), ("2.yaml", &one)]).unwrap_err().to_string();
    assert!(error.starts_with("2.yaml: the domain \"a-b\" is that of 1.yaml too"), "{error}");
}

/// `metadata` is for other filters of Envoy, and a value may be any scalar, as in that service.
#[test]
fn what_decides_nothing_is_left_out_and_scalars_are_texts() {
    let text = "domain: d\ndescriptors:\n- key: a\n  value: 7\n  metadata: {any: [thing, 1]}\n  detailed_metric: true\n  \
                rate_limit: {unit: minute, requests_per_unit: 1, name: n}\n- key: b\n  value: ~\n  metadata: ~\n  value_to_metric: true\n  \
                rate_limit: {unit: minute, requests_per_unit: 1}\n";
    let policy = import("x.yaml", text).unwrap();
    assert!(policy.contains("a = \"7\"") && policy.contains("b = \"**\""), "{policy}");
}

/// A file of a thousand values is no more than a thousand rules, of which one applies.
///
/// Woken by: counting rules for other values of a fact in `too-many-meet`.
/// A sibling that no descriptor selects was left out without a word.
#[test]
fn what_comes_after_a_star_is_left_out_with_its_line() {
    let limit = "rate_limit: {unit: minute, requests_per_unit: 1}";
    let one = |value: &str| format!("- {{key: a{value}, {limit}}}\n");
    let rest = ["", ", value: 'w*'", ", value: '*'", ", value: 'x*'", ", value: 'y'"].map(one).concat();
    let text = import("rate.yaml", &format!("domain: d\ndescriptors:\n{rest}")).unwrap();
    let left_out: Vec<&str> = text.lines().filter(|line| line.contains("left out")).collect();
    let why = "left out: no descriptor selects it after the value * of line 5";
    assert_eq!(left_out, [format!("# Line 3: {why}"), format!("# Line 6: {why}")]);
    assert_eq!(text.matches("limit = ").count(), 3, "{text}");
}

#[test]
fn many_values_of_one_key_are_many_rules() {
    let values: String = (0..200)
        .map(|number| format!("- {{key: user, value: u{number}, rate_limit: {{unit: hour, requests_per_unit: 5}}}}\n"))
        .collect();
    let policy = parse(&import("many.yaml", &format!("domain: d\ndescriptors:\n{values}")).unwrap());
    assert_eq!(policy.rules().len(), 200);
    let values: String =
        (0..1_001).map(|n| format!("- {{key: user, value: u{n}, rate_limit: {{unlimited: true}}}}\n")).collect();
    let error = import("many.yaml", &format!("domain: d\ndescriptors:\n{values}")).unwrap_err().to_string();
    assert_eq!(error, "many.yaml:1003: a policy holds at most 1000 rules, and this configuration needs 1001");
}

#[test]
fn what_a_policy_cannot_express_is_an_error_with_its_line() {
    let limit = "rate_limit: {unit: second, requests_per_unit: 1}";
    let cases = [
        ("domain: ''\n".to_owned(), "x.yaml:1: the domain is empty"),
        (format!("domain: d\ndescriptors:\n- {{key: '', {limit}}}\n"), "x.yaml:3: the key is empty"),
        (format!("domain: d\ndescriptors:\n- key: a\n  value: b{{c}}\n  {limit}\n"), "x.yaml:4: \"b{c}\": a pattern"),
        (format!("domain: d\ndescriptors:\n- key: a\n  value: b\n  share_threshold: true\n  {limit}\n"), "x.yaml:5: share_threshold"),
        (
            "domain: d\ndescriptors:\n- key: a\n  rate_limit:\n    unlimited: true\n    unit: day\n".to_owned(),
            "x.yaml:6: unlimited: a limit with a unit is none",
        ),
        (format!("domain: d\ndescriptors:\n- {{key: a, {limit}}}\n- {{key: a, {limit}}}\n"), "x.yaml:4: the same key and value as in line 3"),
        ("domain: d\ndescriptors:\n- key: a\n  rate_limit:\n    unit: fortnight\n".to_owned(), "x.yaml:5: unknown unit \"fortnight\""),
        ("domain: d\ndescriptors:\n- key: a\n  rate_limit: {requests_per_unit: 1}\n".to_owned(), "x.yaml:3: the rate_limit has no unit"),
        (format!("domain: d\ndescriptors:\n- key: a\n  quota_mode: true\n  {limit}\n"), "x.yaml:4: quota_mode"),
        (
            "domain: d\ndescriptors:\n- key: a\n  rate_limit:\n    unit: second\n    requests_per_unit: 1\n    name: b\n    replaces:\n    - name: b\n".to_owned(),
            "x.yaml:9: replaces: name another limit",
        ),
        // Each comes before those that follow, and matches some of their values.
        (
            format!(
                "domain: d\ndescriptors:\n- {{key: a, value: xxxx, {limit}}}\n- {{key: a, value: xxxx*, {limit}}}\n- {{key: a, value: xxx*, {limit}}}\n\
                 - {{key: a, value: xx*, {limit}}}\n- {{key: a, value: x*, {limit}}}\n- {{key: a, {limit}}}\n"
            ),
            "x.yaml:8: for some values the limits of lines 4, 5, 6, 7 come before this one, and a policy has no layer left",
        ),
        (
            "domain: d\ndescriptors:\n- key: a\n  rate_limit:\n    unit: second\n    replaces:\n    - name:\n".to_owned(),
            "x.yaml:7: replaces: name another limit",
        ),
        ("domain: d\ndescriptors:\n- key: a\n  rate_limits: 1\n".to_owned(), "x.yaml:4: unknown field `rate_limits`"),
        ("domain: a*\n".to_owned(), "x.yaml:1: the domain \"a*\": a pattern"),
        (format!("domain: d\ndescriptors:\n- {{key: a*, {limit}}}\n"), "x.yaml:3: the key \"a*\""),
        // Words of types were shown for these.
        ("domain: d\ndescriptors:\n- key: ~\n".to_owned(), "x.yaml:3: a text is missing"),
        ("domain:\n".to_owned(), "x.yaml:1: a text is missing"),
        ("descriptors: []\n".to_owned(), "x.yaml:1: there is no `domain`"),
        (
            "domain: d\ndescriptors:\n- key: a\n  rate_limit: {unit: day, requests_per_unit: -1}\n".to_owned(),
            "x.yaml:4: not a whole number up to 4294967295",
        ),
        ("domain: d\ndescriptors:\n- key: a\n  shadow_mode: 7\n".to_owned(), "x.yaml:4: not true or false"),
        ("domain: d\ndescriptors:\n- key: [a]\n".to_owned(), "x.yaml:3: "),
        ("domain: d\ndescriptors: 7\n".to_owned(), "x.yaml:2: "),
        ("domain: d\ndescriptors:\n- a\n".to_owned(), "x.yaml:3: "),
        ("- not a mapping\n".to_owned(), "x.yaml"),
        ("domain: d\n  descriptors: [\n".to_owned(), "x.yaml"),
    ];
    for (text, expected) in cases {
        let error = import("x.yaml", &text).unwrap_err().to_string();
        assert!(error.starts_with(expected), "{text}\n{error}");
        // No names of types.
        assert!(["Option", "File", "struct", "u32"].iter().all(|word| !error.contains(word)), "{error}");
    }
}

/// A star within a value was a wildcard, so that a thousand an hour for `/api/*/edit` came before five an hour for all other paths.
///
/// Woken by: a star anywhere in a value as a wildcard.
#[test]
fn a_star_that_is_not_at_the_end_is_an_error() {
    for value in ["/api/*/edit", "*x", "bar*b", "foo**", "**"] {
        let text = format!(
            "domain: d\ndescriptors:\n- key: a\n  value: '{value}'\n  rate_limit: {{unit: hour, requests_per_unit: 5}}\n"
        );
        let error = import("x.yaml", &text).unwrap_err().to_string();
        let expected = format!("x.yaml:4: \"{value}\": there, only a star at the end is a wildcard");
        assert!(error.starts_with(&expected), "{error}");
    }
}

/// That service looks a descriptor up by `key_value`, and `user: "*"` before `user_id` takes all of it. Here `user_id` had its limit.
///
/// Woken by: leaving out `check_reach`, or one of its ways to find another key.
#[test]
fn a_value_that_reaches_into_another_key_is_an_error() {
    let limit = "rate_limit: {unit: hour, requests_per_unit: 5}";
    let import = |(key, value): (&str, &str), (other, its): (&str, &str)| {
        let text = format!(
            "domain: d\ndescriptors:\n- {{key: {key}, value: '{value}', {limit}}}\n- {{key: {other}, value: '{its}', {limit}}}\n"
        );
        import("x.yaml", &text).map_err(|error| error.to_string())
    };
    for (one, other) in [
        (("user", "*"), ("user_id", "")),
        (("user", "i*"), ("user_id", "")),
        (("user", "id*"), ("user_id", "7")),
        (("user", "id_*"), ("user_id", "")),
        (("user", "id_7*"), ("user_id", "")),
        (("user", "id"), ("user_id", "7")),
        (("user", "id_7"), ("user_id", "")),
        (("user", "*"), ("user_", "")),
    ] {
        let error = import(one, other).unwrap_err();
        assert!(error.starts_with("x.yaml:3: \"user_") && error.contains("joined by _"), "{error}");
        assert!(error.ends_with(&format!("this is for the key \"{}\" too", other.0)), "{error}");
    }
    for (one, other) in [(("a", "b"), ("a_b", "")), (("a", "b_c"), ("a_b", "c"))] {
        assert_eq!(import(one, other).unwrap_err(), "x.yaml:4: the same key and value as in line 3, joined by _");
    }
    for (one, other) in [
        (("user", ""), ("user_id", "")),
        (("user", "x*"), ("user_id", "")),
        (("user", "identity"), ("user_id", "")),
        (("user_id", "*"), ("user", "")),
        (("user", "id"), ("user_identity", "")),
    ] {
        import(one, other).unwrap();
    }
}

/// Its YAML takes numbers that are not whole for no texts, and nothing in quotes for a number or a switch.
///
/// Woken by: leaving out `check_text` or `check_plain` in one of these places, places in a text with a mark of its byte order.
#[test]
fn scalars_that_the_service_does_not_load_are_errors() {
    let file = |value: &str, rest: &str| {
        format!(
            "domain: d\r\ndescriptors:\r\n- key: a\r\n  value: {value}\r\n  {rest}\r\n  rate_limit: {{unit: hour, requests_per_unit: 5}}\r\n"
        )
    };
    for start in ["", "\u{feff}"] {
        for value in ["1.5", "1e3", "-.5", ".inf", "08", "1_0.5", "18446744073709551616"] {
            let error = import("x.yaml", &format!("{start}{}", file(value, ""))).unwrap_err().to_string();
            assert_eq!(error, format!("x.yaml:4: {value}: that service does not load it without quotes"));
            import("x.yaml", &format!("{start}{}", file(&format!("'{value}'"), ""))).unwrap();
        }
        for value in ["7", "010", "0x1F", "1_000", "1.2.3.4", "2024-01-01", "é1.5", "inf", "true"] {
            import("x.yaml", &format!("{start}{}", file(value, ""))).unwrap();
        }
        for name in ["shadow_mode", "share_threshold", "quota_mode", "detailed_metric", "value_to_metric"] {
            let error = import("x.yaml", &format!("{start}{}", file("é*", &format!("{name}: \"false\"")))).unwrap_err();
            assert_eq!(error.to_string(), "x.yaml:5: \"false\": that service does not load it with quotes");
            import("x.yaml", &format!("{start}{}", file("é*", &format!("{name}: false")))).unwrap();
        }
    }
    for (text, expected) in [
        (file("a", "").replace("unit: 5", "unit: '5'"), "x.yaml:6: '5': that service does not load it with quotes"),
        (
            file("a", "").replace("unit: hour", "unlimited: 'false'"),
            "x.yaml:6: 'false': that service does not load it with quotes",
        ),
        (file("a", "").replace("key: a", "key: 1.5"), "x.yaml:3: 1.5: that service does not load it without quotes"),
        (
            file("a", "").replace("domain: d", "domain: 1.5"),
            "x.yaml:1: 1.5: that service does not load it without quotes",
        ),
    ] {
        assert_eq!(import("x.yaml", &text).unwrap_err().to_string(), expected);
    }
}

/// The import succeeded, and `serve` refused the policy as empty.
#[test]
fn a_configuration_without_limits_is_an_error_with_its_line() {
    let empty = "\ndomain: d\ndescriptors:\n- key: a\n";
    let expected = "x.yaml:2: no descriptor has a rate_limit that applies: the policy would be empty";
    assert_eq!(import("x.yaml", empty).unwrap_err().to_string(), expected);
    let other = "domain: e\ndescriptors:\n- {key: a, rate_limit: {unit: hour, requests_per_unit: 5}}\n";
    import_all(&[("x.yaml", empty), ("y.yaml", other)]).unwrap();
}

/// Woken by: leaving out `replaces` in `policy`, and taking the names of rules for those of limits.
#[test]
fn a_limit_that_replaces_others_is_a_rule_that_replaces_theirs() {
    let limit = |rest: &str| format!("rate_limit: {{unit: hour, requests_per_unit: 1, {rest}}}");
    let text = format!(
        "domain: d\ndescriptors:\n- {{key: kind, value: read, {}}}\n- {{key: kind, value: write, {}}}\n\
         - {{key: path, {}}}\n- {{key: free, rate_limit: {{unlimited: true, replaces: [{{name: reads}}]}}}}\n",
        limit("name: reads"),
        limit("name: writes"),
        limit("replaces: [{name: reads}, {name: writes}, {name: unknown}]"),
    );
    let text = import("x.yaml", &text).unwrap();
    let tables: Vec<&str> = text.lines().skip_while(|line| *line != "[envoy.replaces]").take(3).collect();
    assert_eq!(
        tables,
        ["[envoy.replaces]", "d-path = [\"d-kind-read\", \"d-kind-write\"]", "d-free = [\"d-kind-read\"]"],
        "{text}"
    );
    drop(parse(&text));
}
