//! Tests that every key of a policy has an effect: two policies that differ only in it behave differently.
//!
//! The keys are those of the schema, which is generated from the parser's types. Each has a case, or is one of the exceptions
//! below. A case has one policy for each value; a key with a fixed set of values has all of them.

mod cases;
mod probes;

use std::collections::{BTreeMap, BTreeSet};

use serde_json::Value;
use toml::Table;

use cases::{Case, cases};

/// Keys without an effect on decisions, and why they exist.
const EXCEPTIONS: [(&str, &str); 7] = [
    ("allow", "silences findings of lint"),
    ("rule.allow", "silences findings of lint"),
    ("rule.place", "the name of a Durable Object, which the tests of the Worker check"),
    ("login.account_place", "the name of a Durable Object, which the tests of the Worker check"),
    ("login.ip_place", "the name of a Durable Object, which the tests of the Worker check"),
    ("envoy.", "concerns gRPC alone: the tests in envoy.rs"),
    ("alerts.", "decides nothing: alerts_are_raised_at_the_thresholds_of_the_policy"),
];

/// Keys with a value that is refused at the start.
const REFUSED: [(&str, &str); 4] = [
    // A rule has either a limit or `deny = true`.
    ("rule.deny", "false"),
    // Only `per = []` may have this layer.
    ("rule.layer", "global"),
    // Concurrency has no period, and all others have one.
    ("rule.algorithm", "concurrency"),
    // A shared penalty must be allowed explicitly.
    ("rule.ban_shared", "false"),
];

/// The keys of the schema. `*` stands for a name that the author of a policy chooses.
fn keys() -> BTreeMap<String, Option<BTreeSet<String>>> {
    let schema: Value = serde_json::from_str(include_str!("../../../../policies/schema.json")).unwrap();
    let mut keys = BTreeMap::new();
    walk(&schema, &schema, "", &mut keys);
    keys
}

/// Adds the keys under `node`, with their values if those are a fixed set.
fn walk(schema: &Value, node: &Value, path: &str, keys: &mut BTreeMap<String, Option<BTreeSet<String>>>) {
    let node = match node["$ref"].as_str() {
        Some(name) => &schema["$defs"][name.rsplit('/').next().unwrap()],
        None => node,
    };
    let below = |name: &str| if path.is_empty() { name.to_owned() } else { format!("{path}.{name}") };
    let mut children = Vec::new();
    for (name, child) in node["properties"].as_object().into_iter().flatten() {
        children.push((below(name), child));
    }
    if node["additionalProperties"].is_object() {
        children.push((below("*"), &node["additionalProperties"]));
    }
    let same = node["anyOf"].as_array().into_iter().flatten();
    // The items of a list count as the list's values, unless they have keys.
    let same: Vec<&Value> = same.chain(node.get("items")).collect();
    if children.is_empty() && same.is_empty() && !path.is_empty() && node["type"] != "null" {
        let values = node["enum"].as_array().map(|values| values.iter().map(text).collect());
        let known: &mut Option<BTreeSet<String>> = keys.entry(path.to_owned()).or_default();
        *known = known.take().or(values);
    }
    for (path, child) in children {
        walk(schema, child, &path, keys);
    }
    for child in same {
        walk(schema, child, path, keys);
    }
}

fn text(value: &Value) -> String {
    value.as_str().map_or_else(|| value.to_string(), str::to_owned)
}

/// Returns the values of a policy, by key and by position.
fn said(policy: &str, known: &BTreeSet<String>) -> BTreeMap<(String, String), String> {
    fn flatten(value: &toml::Value, path: &[String], out: &mut Vec<(Vec<String>, String)>) {
        let below = |name: String| [path, &[name]].concat();
        match value {
            toml::Value::Table(table) => {
                table.iter().for_each(|(name, value)| flatten(value, &below(name.clone()), out));
            }
            toml::Value::Array(list) if list.iter().all(toml::Value::is_table) && !list.is_empty() => {
                list.iter().enumerate().for_each(|(at, value)| flatten(value, &below(format!("[{at}]")), out));
            }
            other => out.push((path.to_vec(), other.as_str().map_or_else(|| format!("{other:?}"), str::to_owned))),
        }
    }
    let table: Table = policy.parse().unwrap_or_else(|error| panic!("{error}\n{policy}"));
    let mut leaves = Vec::new();
    flatten(&toml::Value::Table(table), &[], &mut leaves);
    let keyed = |path: &[String]| {
        let names: Vec<&String> = path.iter().filter(|name| !name.starts_with('[')).collect();
        let fits = |key: &&String| {
            let parts: Vec<&str> = key.split('.').collect();
            parts.len() == names.len() && parts.iter().zip(&names).all(|(part, name)| *part == "*" || part == name)
        };
        // A key of its own before a name that the author chooses.
        let key = known.iter().filter(fits).min_by_key(|key| key.matches('*').count());
        key.unwrap_or_else(|| panic!("no key of the schema is {path:?}")).clone()
    };
    leaves.into_iter().map(|(path, value)| ((keyed(&path), path.join(".")), value)).collect()
}

#[test]
fn every_key_has_a_case_or_is_an_exception() {
    let of_schema = keys();
    let known: BTreeSet<String> = of_schema.keys().cloned().collect();
    let excepted =
        |key: &String| EXCEPTIONS.iter().any(|(name, _)| key == name || (name.ends_with('.') && key.starts_with(name)));
    let wanted: BTreeSet<&String> = known.iter().filter(|key| !excepted(key)).collect();
    let cases = cases();
    let covered: BTreeSet<String> = cases.iter().map(|case| case.key.to_owned()).collect();
    assert_eq!(covered.iter().collect::<BTreeSet<_>>(), wanted, "keys with a case, and keys of the schema");
    // The policies of a case differ only in its key, and cover each of its values.
    let mut values: BTreeMap<&str, BTreeSet<String>> = BTreeMap::new();
    for case in &cases {
        let policies: Vec<_> = case.policies().iter().map(|policy| said(policy, &known)).collect();
        let [first, others @ ..] = &policies[..] else { panic!("{} has no policies", case.key) };
        assert!(!others.is_empty(), "{} has one policy alone", case.key);
        for other in others {
            let places: BTreeSet<_> = first.keys().chain(other.keys()).collect();
            let differing: BTreeSet<&str> = places
                .iter()
                .filter(|place| first.get(place) != other.get(place))
                .map(|(key, _)| key.as_str())
                .collect();
            assert_eq!(differing, BTreeSet::from([case.key]), "a case differs in its own key");
        }
        let own = policies.iter().flatten().filter(|((key, _), _)| key == case.key).map(|(_, value)| value.clone());
        values.entry(case.key).or_default().extend(own);
    }
    for (key, all) in
        of_schema.iter().filter_map(|(key, all)| Some((key, all.as_ref()?))).filter(|(key, _)| !excepted(key))
    {
        assert_eq!(&values[key.as_str()], all, "the values of {key}");
    }
}

/// Woken by: leaving out any code that reads a key.
#[test]
fn two_policies_that_differ_in_one_key_behave_differently() {
    for Case { key, policy, values, probe } in cases() {
        let mut seen: BTreeMap<String, &str> = BTreeMap::new();
        for value in values {
            let policy = policy.replacen('@', value, 1);
            let observed = probe(&policy).unwrap_or_else(|error| {
                let meant = |(own, which): &(&str, &str)| *own == key && value.contains(which);
                assert!(REFUSED.iter().any(meant), "{key}: {value} is refused: {error}\n{policy}");
                error
            });
            if seen.is_empty() {
                assert_eq!(probe(&policy).unwrap_or_else(|error| error), observed, "{key}: the same twice");
            }
            if let Some(other) = seen.insert(observed.clone(), value) {
                panic!("{key}: {value:?} does what {other:?} does\n{policy}\n{observed}");
            }
        }
    }
}
