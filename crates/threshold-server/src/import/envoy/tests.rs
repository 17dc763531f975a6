//! Compares imported policies with a slow model of the service, and lists what cannot be imported.

#![expect(clippy::arithmetic_side_effects, reason = "a test that overflows fails")]

use std::collections::BTreeMap;

use proptest::prelude::*;
use threshold_core::ledger::Ledger;
use threshold_core::plan::Verb;
use threshold_core::policy::{Policy, Review};
use threshold_core::{Facts, Timestamp};

use super::Values;
use super::file::{self, Domain, Node, NodeLimit};
use crate::source::Source;

/// Configurations in the manner of the service's own examples.
const EXAMPLES: [&str; 10] = [
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
    // Stars within a value. The first pattern of the file counts where two match.
    "domain: stars\ndescriptors:\n- {key: path, value: a*b, rate_limit: {unit: minute, requests_per_unit: 2}}\n\
     - {key: path, value: '*c**b', rate_limit: {unit: minute, requests_per_unit: 1}}\n\
     - {key: route, value: x*y*z, share_threshold: true, rate_limit: {unit: hour, requests_per_unit: 3}}\n",
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

/// The service: it picks one limit for a descriptor, and counts in windows of the clock.
struct Model<'n> {
    nodes: &'n [Node],
    counts: BTreeMap<(u64, Vec<String>, u64), u64>,
}

impl Model<'_> {
    fn allows(&mut self, descriptor: &[(&str, &str)], now: u64) -> bool {
        let (mut level, mut found, mut values) = (self.nodes, None, Vec::new());
        for (key, value) in descriptor {
            let rank = |node: &&Node| match &node.values {
                Values::One(own) if own == value => Some(0),
                Values::Pattern(parts) if is_like(&parts.join("*"), value) => Some(1),
                Values::Any => Some(2),
                _ => None,
            };
            let of_key = level.iter().filter(|node| node.fact == *key && rank(node).is_some());
            found = of_key.min_by_key(|node| rank(node));
            let Some(node) = found else { return true };
            values.extend(Some((*value).to_owned()).filter(|_| !node.is_shared));
            level = &node.below;
        }
        let Some(node) = found else { return true };
        let limit = match &node.limit {
            Some(NodeLimit::Per(limit)) => limit,
            Some(NodeLimit::Deny) => return node.is_shadow,
            _ => return true,
        };
        let (number, unit) = limit.split_once('/').unwrap();
        let seconds = match unit {
            "s" => 1,
            "min" => 60,
            "h" => 3_600,
            "day" => 86_400,
            "week" => 7 * 86_400,
            "month" => 30 * 86_400,
            _ => 365 * 86_400,
        };
        let count = self.counts.entry((node.line, values, now / seconds)).or_default();
        *count += 1;
        *count <= number.parse().unwrap() || node.is_shadow
    }
}

/// Whether a value is like a pattern, in which a star is anything.
fn is_like(pattern: &str, value: &str) -> bool {
    match pattern.split_at_checked(1) {
        None => value.is_empty(),
        Some(("*", rest)) => (0..=value.len()).any(|at| value.get(at..).is_some_and(|after| is_like(rest, after))),
        Some((first, rest)) => value.strip_prefix(first).is_some_and(|after| is_like(rest, after)),
    }
}

/// A policy of this program and not of a later one: the section for Envoy may be unknown to it.
fn parse(text: &str) -> Policy {
    let Review { policy, findings, .. } = Policy::review(text, &|_| None);
    assert!(findings.is_empty(), "{text}\n{findings:?}");
    policy.unwrap()
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 64, ..ProptestConfig::default() })]

    /// Woken by: leaving out `fallback` or the rules that pass; a bucket in place of a fixed window; `per` without the wildcard's value;
    /// `shared` of the last node only; leaving out `of_both`.
    #[test]
    fn an_imported_policy_decides_as_the_service_does(
        calls in prop::collection::vec((any::<prop::sample::Index>(), any::<[prop::sample::Index; 3]>(), 0_u64..30), 1..60),
    ) {
        for example in EXAMPLES {
            let Domain { name: domain, nodes } = file::read(example).unwrap();
            let text = import("example.yaml", example).unwrap();
            let policy = parse(&text);
            let (mut ledger, mut model) = (Ledger::default(), Model { nodes: &nodes, counts: BTreeMap::new() });
            let (mut shapes, mut values) = (Vec::new(), vec!["other".to_owned(), "another".to_owned()]);
            collect(&nodes, &[], &mut shapes, &mut values);
            let mut now = 1_767_225_600;
            for (shape, picks, seconds) in &calls {
                now += seconds;
                let keys: &Vec<&str> = &shapes[shape.index(shapes.len())];
                let descriptor: Vec<(&str, &str)> = keys.iter().zip(picks).map(|(key, pick)| (*key, values[pick.index(values.len())].as_str())).collect();
                let facts: Vec<(&str, &str)> = [("domain", domain.as_str())].into_iter().chain(descriptor.iter().copied()).collect();
                let facts = Facts { facts: &facts, ..Facts::default() };
                let decided = ledger.decide(&policy, Verb::Check, &facts, Timestamp::from_secs(now)).unwrap();
                prop_assert_eq!(decided.decision.allowed(), model.allows(&descriptor, now), "{:?}\n{}", descriptor, text);
            }
        }
    }
}

/// Collects every sequence of keys, and values that match something.
fn collect<'n>(nodes: &'n [Node], above: &[&'n str], shapes: &mut Vec<Vec<&'n str>>, values: &mut Vec<String>) {
    for node in nodes {
        let keys: Vec<&str> = above.iter().copied().chain([&*node.fact]).collect();
        match &node.values {
            Values::One(value) => values.push(value.clone()),
            Values::Pattern(parts) => values.extend(["", "/1", "c/2"].map(|between| parts.join(between))),
            Values::Any => {}
        }
        shapes.push(keys.clone());
        collect(&node.below, &keys, shapes, values);
    }
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
match = { fact = { domain = "d", remote_address = "**" } }
per = ["fact:remote_address"]
limit = "10/min"
algorithm = "fixed-window"
fallback = true

# Line 5: remote_address=50.0.0.5
[[rule]]
name = "d-remote_address-50.0.0.5"
layer = "edge"
match = { fact = { domain = "d", remote_address = "50.0.0.5" } }
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
#[test]
fn many_values_of_one_key_are_many_rules() {
    let values: String = (0..200)
        .map(|number| format!("- {{key: user, value: u{number}, rate_limit: {{unit: hour, requests_per_unit: 5}}}}\n"))
        .collect();
    let policy = parse(&import("many.yaml", &format!("domain: d\ndescriptors:\n{values}")).unwrap());
    assert_eq!(policy.rules().len(), 200);
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
        // Two fallbacks, which both apply where both match.
        (
            format!(
                "domain: d\ndescriptors:\n- {{key: a, value: x, {limit}}}\n- {{key: a, value: '*', {limit}}}\n- {{key: a, value: b*c, {limit}}}\n\
                 - {{key: a, value: '*d*', {limit}}}\n"
            ),
            "x.yaml:4: a descriptor of a=",
        ),
        (format!("domain: d\ndescriptors:\n- {{key: a, {limit}}}\n- {{key: a, {limit}}}\n"), "x.yaml:4: the same key and value as in line 3"),
        ("domain: d\ndescriptors:\n- key: a\n  rate_limit:\n    unit: fortnight\n".to_owned(), "x.yaml:5: unknown unit \"fortnight\""),
        ("domain: d\ndescriptors:\n- key: a\n  rate_limit: {requests_per_unit: 1}\n".to_owned(), "x.yaml:3: the rate_limit has no unit"),
        (format!("domain: d\ndescriptors:\n- key: a\n  quota_mode: true\n  {limit}\n"), "x.yaml:4: quota_mode"),
        (
            "domain: d\ndescriptors:\n- key: a\n  rate_limit:\n    unit: second\n    requests_per_unit: 1\n    name: b\n    replaces:\n    - name: b\n".to_owned(),
            "x.yaml:9: replaces: name another limit",
        ),
        // Exact before wildcard before any: three kinds, and a policy has two.
        (
            format!("domain: d\ndescriptors:\n- {{key: a, value: x1, {limit}}}\n- {{key: a, value: x*, {limit}}}\n- {{key: a, {limit}}}\n"),
            "x.yaml:4: a descriptor of a=x… has this limit, and a policy would apply that of line 5 to it too",
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
