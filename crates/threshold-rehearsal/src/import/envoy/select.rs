//! Which limits apply to which descriptor, there and here.
//!
//! There, the entries of a descriptor select at most one node, from the top to the bottom: at each level an exact value comes before a
//! wildcard, and that before a key alone, and what has been selected is never taken back. Here, every rule applies that matches. The fact
//! `entry_keys` keeps rules for other sequences of keys away. Within one sequence, a limit that other nodes come before becomes a rule
//! with `fallback`, and rules without a limit switch it off for the values of those nodes. Two fallbacks of which one applies where the
//! other matches are in two layers, because what switches one of a layer off does so with all of them.

use std::collections::HashMap;
use std::ops::Bound;

use super::file::{Level, Node, Siblings};
use super::{ImportError, Values};

/// The most comparisons of one import. A hundred thousand descriptors take a few hundred thousand, unless many patterns match the same
/// values.
const MAX_WORK: usize = 5_000_000;

/// The layers of fallbacks, in the order in which they are used. What a limit counts does not depend on its layer.
pub(super) const LAYERS: [&str; 4] = ["edge", "user", "endpoint", "tenant"];

/// The rules that decide as the file does.
#[derive(Debug)]
pub(super) struct Selection<'n> {
    /// In the order of the file.
    pub(super) rules: Vec<SelectedRule<'n>>,
    pub(super) exceptions: Vec<Exception<'n>>,
}

/// A rule for a node with a limit.
#[derive(Debug)]
pub(super) struct SelectedRule<'n> {
    /// The nodes from the top to this one.
    pub(super) path: Vec<&'n Node>,
    /// The index of its layer.
    pub(super) layer: usize,
    pub(super) is_fallback: bool,
    /// The rules that it replaces, by index.
    pub(super) replaces: Vec<usize>,
}

/// A rule without a limit, which switches the fallbacks of a layer off.
#[derive(Debug)]
pub(super) struct Exception<'n> {
    pub(super) layer: usize,
    /// The path of one of the fallbacks.
    pub(super) path: Vec<&'n Node>,
    /// The values at each place of the path.
    pub(super) values: Vec<Vec<&'n Values>>,
}

/// Counts comparisons.
#[derive(Debug, Default)]
pub(super) struct Work(pub(super) usize);

impl Work {
    fn add(&mut self, comparisons: usize) -> Result<(), ImportError> {
        self.0 = self.0.saturating_add(comparisons);
        if self.0 > MAX_WORK {
            let message = format!("the values take more than {MAX_WORK} comparisons: split the configuration");
            return Err(ImportError { line: None, message });
        }
        Ok(())
    }
}

impl<'n> Selection<'n> {
    pub(super) fn of(nodes: &'n Level, work: &mut Work) -> Result<Self, ImportError> {
        let (mut order, mut paths) = (Order::default(), Vec::new());
        order.read(nodes, &mut Vec::new(), &mut paths, work)?;
        let mut shapes: HashMap<Vec<&str>, usize> = HashMap::new();
        let numbered = paths.into_iter().map(|path: Vec<&Node>| {
            let number = shapes.len();
            (*shapes.entry(path.iter().map(|node| &*node.key).collect()).or_insert(number), path)
        });
        let mut numbered: Vec<(usize, Vec<&Node>)> = numbered.collect();
        // One sequence of keys after the other; within each, what comes before other nodes comes first.
        numbered.sort_by_key(|(shape, _)| *shape);
        let mut rules = Vec::new();
        for (shape, path) in numbered {
            let is_fallback = path.iter().any(|node| order.is_after_others(node));
            let layer = if is_fallback { order.find_layer(nodes, shape, &path, work)? } else { 0 };
            rules.push(SelectedRule { path, layer, is_fallback, replaces: Vec::new() });
        }
        rules.sort_by_key(|rule| rule.node().line);
        let exceptions = exceptions(&rules, &order, work)?;
        add_replaces(&mut rules, work)?;
        Ok(Self { rules, exceptions })
    }
}

impl<'n> SelectedRule<'n> {
    /// Returns the node that has the limit.
    pub(super) fn node(&self) -> &'n Node {
        self.path.last().expect("a path ends with its node")
    }

    fn above(&self) -> &[&'n Node] {
        self.path.split_last().map_or(&[], |(_, above)| above)
    }
}

/// What is known of nodes, by their numbers.
#[derive(Debug, Default)]
struct Order<'n>(Vec<Place<'n>>);

#[derive(Debug, Default)]
struct Place<'n> {
    /// The siblings that come before the node and match some of its values.
    earlier: Vec<&'n Node>,
    /// In which layers there are fallbacks at and below it, for one sequence of keys: its number, and a bit for each layer.
    fallbacks: (usize, u8),
    /// The layer of its own fallback.
    layer: Option<usize>,
}

impl<'n> Order<'n> {
    /// Finds what comes before each node, and the paths to those with limits, in the order in which they come before one another.
    fn read(
        &mut self,
        level: &'n Level,
        above: &mut Vec<&'n Node>,
        paths: &mut Vec<Vec<&'n Node>>,
        work: &mut Work,
    ) -> Result<(), ImportError> {
        for siblings in level.values() {
            for node in siblings.all() {
                if node.id >= self.0.len() {
                    self.0.resize_with(node.id.saturating_add(1), Place::default);
                }
                let earlier = earlier(siblings, node, work)?;
                if let Some(place) = self.0.get_mut(node.id) {
                    place.earlier = earlier;
                }
                above.push(node);
                if node.limit.is_some() {
                    paths.push(above.clone());
                }
                self.read(&node.below, above, paths, work)?;
                above.pop();
            }
        }
        Ok(())
    }

    fn earlier(&self, node: &Node) -> &[&'n Node] {
        self.0.get(node.id).map_or(&[], |place| &place.earlier)
    }

    fn is_after_others(&self, node: &Node) -> bool {
        !self.earlier(node).is_empty()
    }

    /// Finds a layer for the fallback with this path, in which no other fallback applies where it matches.
    fn find_layer(
        &mut self,
        nodes: &'n Level,
        shape: usize,
        path: &[&'n Node],
        work: &mut Work,
    ) -> Result<usize, ImportError> {
        let mut search = Search { order: self, shape, path, found: 0, lines: Vec::new() };
        search.run(nodes, 0, work)?;
        let (found, lines) = (search.found, search.lines);
        let Some(layer) = (0..LAYERS.len()).find(|layer| found & bit(*layer) == 0) else {
            let lines = lines.iter().map(ToString::to_string).collect::<Vec<_>>().join(", ");
            let message = format!(
                "for some values the limits of lines {lines} come before this one, and a policy has no layer left for another fallback"
            );
            return Err(ImportError::new(path.last().map_or(1, |node| node.line), message));
        };
        for node in path {
            if let Some(Place { fallbacks: (own, layers), .. }) = self.0.get_mut(node.id) {
                *layers = bit(layer) | if *own == shape { *layers } else { 0 };
                *own = shape;
            }
        }
        if let Some(place) = path.last().and_then(|node| self.0.get_mut(node.id)) {
            place.layer = Some(layer);
        }
        Ok(layer)
    }
}

fn bit(layer: usize) -> u8 {
    u32::try_from(layer).ok().and_then(|layer| 1_u8.checked_shl(layer)).unwrap_or(0)
}

/// A search for the fallbacks that apply to some of the descriptors that a path matches. Those that come after it have no layer yet.
struct Search<'s, 'n> {
    order: &'s Order<'n>,
    shape: usize,
    path: &'s [&'n Node],
    /// The layers that were found.
    found: u8,
    /// The line of one limit in each of them.
    lines: Vec<u64>,
}

impl<'n> Search<'_, 'n> {
    fn run(&mut self, level: &'n Level, depth: usize, work: &mut Work) -> Result<(), ImportError> {
        let Some(own) = self.path.get(depth) else { return Ok(()) };
        let Some(siblings) = level.get(&own.key) else { return Ok(()) };
        let below = depth.saturating_add(1);
        for node in selected(siblings, own, self.order.earlier(own), work)? {
            work.add(1)?;
            let Some(place) = self.order.0.get(node.id) else { continue };
            let (shape, layers) = place.fallbacks;
            if shape != self.shape || layers & !self.found == 0 {
                continue;
            }
            if below < self.path.len() {
                self.run(&node.below, below, work)?;
            } else if let Some(layer) = place.layer.filter(|layer| self.found & bit(*layer) == 0) {
                self.found |= bit(layer);
                self.lines.push(node.line);
            }
        }
        Ok(())
    }
}

/// Returns the siblings that come before a node and match some of its values.
fn earlier<'n>(siblings: &'n Siblings, node: &'n Node, work: &mut Work) -> Result<Vec<&'n Node>, ImportError> {
    match &node.values {
        Values::One(_) => Ok(Vec::new()),
        Values::Pattern(beginning) => {
            let mut found = exact_like(siblings, beginning, work)?;
            // Numbers of nodes rise with the file.
            found.extend(patterns_like(siblings, beginning, work)?.filter(|other| other.id < node.id));
            Ok(found)
        }
        Values::Any => {
            work.add(siblings.exact.len().saturating_add(siblings.patterns.len()))?;
            Ok(siblings.exact.values().chain(&siblings.patterns).collect())
        }
    }
}

/// Returns the nodes that values of this one select among siblings, which may be those of another node. Of a pattern, values of the
/// patterns before it count too, because its exceptions are written with those.
fn selected<'n>(
    siblings: &'n Siblings,
    own: &'n Node,
    earlier: &[&'n Node],
    work: &mut Work,
) -> Result<Vec<&'n Node>, ImportError> {
    match &own.values {
        Values::One(value) => {
            if let Some(node) = siblings.exact.get(value) {
                return Ok(vec![node]);
            }
            let mut patterns = siblings.patterns.iter();
            work.add(patterns.len())?;
            let pattern = patterns.find(|node| node.values.contain(value));
            Ok(pattern.or(siblings.any.as_deref()).into_iter().collect())
        }
        Values::Any => Ok(siblings.all().collect()),
        Values::Pattern(beginning) => {
            let is_own = siblings.patterns.binary_search_by_key(&own.id, |node| node.id).is_ok();
            let before = earlier.iter().filter_map(|node| match &node.values {
                Values::Pattern(beginning) => Some(beginning),
                _ => None,
            });
            let mut found = Vec::new();
            for beginning in before.chain([beginning]) {
                found.extend(exact_like(siblings, beginning, work)?);
                // Of its own siblings, those after it are not selected by its values.
                found.extend(patterns_like(siblings, beginning, work)?.filter(|other| !is_own || other.id <= own.id));
            }
            found.extend(siblings.any.as_deref().filter(|_| !is_own));
            Ok(found)
        }
    }
}

/// Returns the exact values that a pattern matches.
fn exact_like<'n>(siblings: &'n Siblings, beginning: &str, work: &mut Work) -> Result<Vec<&'n Node>, ImportError> {
    let from = (Bound::Included(beginning), Bound::Unbounded);
    let alike = siblings.exact.range::<str, _>(from).take_while(|(value, _)| value.starts_with(beginning));
    let found: Vec<&Node> = alike.map(|(_, node)| node).collect();
    work.add(found.len())?;
    Ok(found)
}

/// Returns the patterns that match some of the values that a pattern matches.
fn patterns_like<'n>(
    siblings: &'n Siblings,
    beginning: &str,
    work: &mut Work,
) -> Result<impl Iterator<Item = &'n Node>, ImportError> {
    work.add(beginning.len())?;
    // Those that begin with a part of the beginning, and those that begin with all of it.
    let shorter = beginning.char_indices().filter_map(|(at, _)| siblings.beginnings.get(beginning.get(..at)?));
    let from = (Bound::Included(beginning), Bound::Unbounded);
    let longer = siblings.beginnings.range::<str, _>(from).take_while(|(other, _)| other.starts_with(beginning));
    let places = shorter.chain(longer.map(|(_, place)| place));
    let found: Vec<&Node> = places.filter_map(|place| siblings.patterns.get(*place)).collect();
    work.add(found.len())?;
    Ok(found.into_iter())
}

/// Switches fallbacks off where a node comes before one of their path. Fallbacks that differ only in their last value have these rules
/// together.
fn exceptions<'n>(
    rules: &[SelectedRule<'n>],
    order: &Order<'n>,
    work: &mut Work,
) -> Result<Vec<Exception<'n>>, ImportError> {
    let mut places: HashMap<(Vec<usize>, &str, usize), usize> = HashMap::new();
    let mut families: Vec<Vec<&SelectedRule<'n>>> = Vec::new();
    for rule in rules.iter().filter(|rule| rule.is_fallback) {
        let above = rule.above().iter().map(|node| node.id).collect();
        let place = *places.entry((above, &rule.node().key, rule.layer)).or_insert(families.len());
        if place == families.len() {
            families.push(Vec::new());
        }
        families.get_mut(place).into_iter().for_each(|family| family.push(rule));
    }
    let mut exceptions = Vec::new();
    let mut add = |rule: &SelectedRule<'n>, place: usize, others: Vec<&'n Values>, last: Vec<&'n Values>| {
        let mut values: Vec<Vec<&Values>> = rule.above().iter().map(|node| vec![&node.values]).collect();
        values.push(last);
        values.get_mut(place).into_iter().for_each(|values| *values = others.clone());
        work.add(values.iter().map(Vec::len).sum())?;
        exceptions.push(Exception { layer: rule.layer, path: rule.path.clone(), values });
        Ok(())
    };
    for family in families {
        let Some(first) = family.first() else { continue };
        let last: Vec<&Values> = family.iter().map(|rule| &rule.node().values).collect();
        let above = first.above().iter().enumerate().filter(|(_, node)| order.is_after_others(node));
        let is_clean = above.clone().next().is_none();
        for (place, node) in above {
            let others = order.earlier(node).iter().map(|other| &other.values).collect();
            add(first, place, others, last.clone())?;
        }
        for rule in family {
            // A rule of this layer switches it off itself.
            let is_rule =
                |other: &Node| is_clean && rule.layer == 0 && other.limit.is_some() && !order.is_after_others(other);
            let others = order.earlier(rule.node()).iter().filter(|other| !is_rule(other));
            let others: Vec<&Values> = others.map(|other| &other.values).collect();
            if !others.is_empty() {
                add(rule, rule.above().len(), others, Vec::new())?;
            }
        }
    }
    Ok(exceptions)
}

/// Finds the rules that others replace, by the names of their limits. A name that no limit has replaces nothing, there and here.
fn add_replaces(rules: &mut [SelectedRule<'_>], work: &mut Work) -> Result<(), ImportError> {
    let mut named: HashMap<&str, Vec<usize>> = HashMap::new();
    for (index, rule) in rules.iter().enumerate() {
        named.entry(&rule.node().name).or_default().push(index);
    }
    for rule in rules {
        for name in &rule.node().replaces {
            let others = named.get(name.as_str()).map_or(&[][..], Vec::as_slice);
            work.add(others.len())?;
            rule.replaces.extend(others);
        }
        rule.replaces.sort_unstable();
        rule.replaces.dedup();
    }
    Ok(())
}
