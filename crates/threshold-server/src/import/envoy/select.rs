//! Which limits apply to which descriptor, there and here.
//!
//! There, the entries of a descriptor select at most one node: an exact value before a wildcard before a key alone, and the
//! whole descriptor must be used up. Here, every rule applies that matches. The difference is made up by `fallback`, which applies
//! only if no other rule matches, and by rules without a limit that switch fallbacks off. Whether that suffices is found out by
//! trying every kind of descriptor that the file describes.

use std::collections::{BTreeMap, BTreeSet};

use super::file::Node;
use super::{Entry, ImportError, Limited, Values};

/// The most descriptors that are tried.
const MAX_TRIED: usize = 200_000;
/// What no value of a file contains.
const OTHER: char = '\u{1}';
/// The same, in a value that two patterns of a key match.
const BOTH: char = '\u{2}';

/// The rules that decide as the file does.
#[derive(Debug)]
pub(super) struct Selection<'n> {
    pub(super) rules: Vec<SelectedRule<'n>>,
    /// Descriptors that are not limited, although rules match them.
    pub(super) passes: BTreeSet<Vec<Entry>>,
}

/// A rule, and whether it is a fallback.
#[derive(Debug)]
pub(super) struct SelectedRule<'n> {
    pub(super) limited: Limited<'n>,
    pub(super) is_fallback: bool,
}

/// A descriptor to try: keys and values in their order.
type Tried = Vec<(String, String)>;

impl<'n> Selection<'n> {
    pub(super) fn of(nodes: &'n [Node]) -> Result<Self, ImportError> {
        let mut limited = Vec::new();
        each_path(nodes, &mut Vec::new(), &mut |path, node| {
            if node.limit.is_some() {
                let shared = path.iter().filter(|node| node.is_shared).map(|node| node.fact.as_str()).collect();
                let path = path.iter().map(|node| (node.fact.clone(), node.values.clone())).collect();
                limited.push(Limited { path, shared, node });
            }
        });
        let tried = descriptors(nodes)?;
        let mut selection = Self {
            rules: limited.into_iter().map(|limited| SelectedRule { limited, is_fallback: false }).collect(),
            passes: BTreeSet::new(),
        };
        for descriptor in &tried {
            selection.make_room(nodes, descriptor);
        }
        match tried.iter().find_map(|descriptor| selection.difference(nodes, descriptor)) {
            Some(error) => Err(error),
            None => Ok(selection),
        }
    }

    /// Makes fallbacks of the rules that match a descriptor and shall not apply to it.
    fn make_room(&mut self, nodes: &[Node], descriptor: &Tried) {
        let picked = picked_line(nodes, descriptor);
        let mut others = false;
        for rule in self.rules.iter_mut().filter(|rule| matches(&rule.limited.path, descriptor)) {
            if Some(rule.limited.node.line) != picked {
                rule.is_fallback = true;
                others = true;
            }
        }
        // What two patterns match has more forms than the one that is tried: it passes only with one of the patterns.
        let is_of_both = descriptor.iter().any(|(_, value)| value.contains(BOTH));
        if others && picked.is_none() && !is_of_both {
            self.passes
                .insert(descriptor.iter().map(|(key, value)| (key.clone(), kind_of(nodes, key, value))).collect());
        }
    }

    /// Returns why a descriptor is decided differently.
    fn difference(&self, nodes: &[Node], descriptor: &Tried) -> Option<ImportError> {
        let picked = picked_line(nodes, descriptor);
        let matching = self.rules.iter().filter(|rule| matches(&rule.limited.path, descriptor));
        let (fallbacks, others): (Vec<_>, Vec<_>) = matching.partition(|rule| rule.is_fallback);
        let is_passed = self.passes.iter().any(|pass| matches(pass, descriptor));
        let applied = if others.is_empty() && !is_passed { fallbacks } else { others };
        let lines: Vec<u64> = applied.iter().map(|rule| rule.limited.node.line).collect();
        if lines == Vec::from_iter(picked) {
            return None;
        }
        let shown: Vec<String> = descriptor.iter().map(|(key, value)| shown(key, value)).collect();
        let shown = shown.join(", ");
        let (line, message) = match (picked, lines.iter().find(|line| Some(**line) != picked)) {
            (Some(picked), Some(other)) => (
                picked,
                format!(
                    "a descriptor of {shown} has this limit, and a policy would apply that of line {other} to it too"
                ),
            ),
            (Some(picked), None) => {
                (picked, format!("a descriptor of {shown} has this limit, and a policy would apply none to it"))
            }
            (None, other) => (
                other.copied().unwrap_or(1),
                format!("a descriptor of {shown} has no limit, and a policy would apply this one to it"),
            ),
        };
        let reason = "a policy has rules and fallbacks, and no third kind that both leave out";
        Some(ImportError::new(line, format!("{message}: {reason}")))
    }
}

/// Calls a function for each node with its path, which ends with it.
fn each_path<'n>(nodes: &'n [Node], above: &mut Vec<&'n Node>, each: &mut impl FnMut(&[&'n Node], &'n Node)) {
    for node in nodes {
        above.push(node);
        each(above, node);
        each_path(&node.below, above, each);
        above.pop();
    }
}

/// Returns the line of the node whose limit the service applies to a descriptor.
fn picked_line(nodes: &[Node], descriptor: &Tried) -> Option<u64> {
    let (mut level, mut picked) = (nodes, None);
    for (key, value) in descriptor {
        let of_key = |node: &&Node| node.fact == *key;
        let by = |wanted: fn(&Values) -> bool| {
            level.iter().filter(of_key).find(|node| wanted(&node.values) && node.values.contain(value))
        };
        let node = by(|values| matches!(values, Values::One(_)))
            .or_else(|| by(|values| matches!(values, Values::Pattern(_))))
            .or_else(|| by(|values| *values == Values::Any))?;
        picked = node.limit.is_some().then_some(node.line);
        level = &node.below;
    }
    picked
}

/// Whether a rule with this path matches a descriptor, as its facts.
fn matches(path: &[Entry], descriptor: &Tried) -> bool {
    path.iter().all(|(key, values)| descriptor.iter().any(|(own, value)| own == key && values.contain(value)))
}

/// Returns a descriptor of every kind that the file tells apart, for each sequence of keys in it.
fn descriptors(nodes: &[Node]) -> Result<Vec<Tried>, ImportError> {
    let (mut shapes, mut kinds) = (BTreeSet::new(), BTreeMap::<String, BTreeSet<String>>::new());
    let mut patterns = BTreeMap::<&str, BTreeSet<&[String]>>::new();
    each_path(nodes, &mut Vec::new(), &mut |path, node| {
        shapes.insert(path.iter().map(|node| node.fact.clone()).collect::<Vec<_>>());
        let kinds = kinds.entry(node.fact.clone()).or_insert_with(|| [OTHER.to_string()].into());
        match &node.values {
            Values::One(value) => drop(kinds.insert(value.clone())),
            Values::Pattern(parts) => {
                kinds.insert(parts.join(&OTHER.to_string()));
                let others = patterns.entry(&node.fact).or_default();
                kinds.extend(others.iter().filter_map(|other| of_both(parts, other)));
                others.insert(parts);
            }
            Values::Any => {}
        }
    });
    let mut tried = Vec::new();
    for shape in shapes {
        let mut of_shape: Vec<Tried> = vec![Vec::new()];
        for key in &shape {
            let values = kinds.get(key).into_iter().flatten();
            of_shape = values
                .flat_map(|value| {
                    let entry = (key.clone(), value.clone());
                    of_shape.iter().map(move |before| before.iter().cloned().chain([entry.clone()]).collect())
                })
                .take(MAX_TRIED)
                .collect();
        }
        tried.extend(of_shape);
        if tried.len() >= MAX_TRIED {
            let message = format!("the keys and values have more than {MAX_TRIED} combinations: split the file");
            return Err(ImportError { line: None, message });
        }
    }
    Ok(tried)
}

/// Returns a value that two patterns match, if there is one that neither says by itself.
fn of_both(one: &[String], other: &[String]) -> Option<String> {
    let ([first, one @ .., last], [other_first, other @ .., other_last]) = (one, other) else { return None };
    let longer =
        |a: &'_ String, b: &'_ String| if a.len() >= b.len() { (a.clone(), b.clone()) } else { (b.clone(), a.clone()) };
    let ((first, within_first), (last, within_last)) = (longer(first, other_first), longer(last, other_last));
    if !first.starts_with(&within_first) || !last.ends_with(&within_last) {
        return None;
    }
    let parts = [&[first], one, other, &[last]].concat();
    Some(parts.join(&BOTH.to_string()))
}

/// Returns the values of the same kind as one that was tried.
fn kind_of(nodes: &[Node], key: &str, value: &str) -> Values {
    let mut kind = Values::Any;
    if value.contains(OTHER) && value.chars().any(|c| c != OTHER) {
        return Values::Pattern(value.split(OTHER).map(str::to_owned).collect());
    }
    each_path(nodes, &mut Vec::new(), &mut |_, node| {
        if node.fact == key && node.values == Values::One(value.to_owned()) {
            kind = node.values.clone();
        }
    });
    kind
}

fn shown(key: &str, value: &str) -> String {
    if value.chars().all(|c| c == OTHER) {
        return format!("{key}=(another)");
    }
    format!("{key}={}", value.replace([OTHER, BOTH], "…"))
}
