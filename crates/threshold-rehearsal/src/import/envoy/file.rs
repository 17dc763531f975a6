//! Reads the YAML into a tree of descriptors.

use std::collections::{BTreeMap, HashMap};
use std::ops::Bound;

use serde::Deserialize;
use serde_saphyr::{Error, Location, Spanned};

use super::{ImportError, Values};
use threshold_wire::envoy::{DOMAIN, ENTRY_KEYS};

/// The most values of a file. The largest known ones have some thousands.
const MAX_NODES: usize = 1_000_000;

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct RootFile {
    domain: Spanned<String>,
    #[serde(default)]
    descriptors: Option<Vec<DescriptorFile>>,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct DescriptorFile {
    key: Spanned<String>,
    #[serde(default)]
    value: Option<Spanned<String>>,
    #[serde(default)]
    rate_limit: Option<LimitFile>,
    #[serde(default)]
    descriptors: Option<Vec<Self>>,
    #[serde(default)]
    shadow_mode: Option<Spanned<bool>>,
    #[serde(default)]
    share_threshold: Option<Spanned<bool>>,
    #[serde(default)]
    quota_mode: Option<Spanned<bool>>,
    // Only for its dynamic metadata, which it sends if it is set to, and for its statistics.
    #[serde(default, rename = "metadata")]
    _metadata: serde::de::IgnoredAny,
    #[serde(default)]
    detailed_metric: Option<Spanned<bool>>,
    #[serde(default)]
    value_to_metric: Option<Spanned<bool>>,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct LimitFile {
    #[serde(default)]
    requests_per_unit: Option<Spanned<u32>>,
    #[serde(default)]
    unit: Option<Spanned<String>>,
    #[serde(default)]
    unlimited: Option<Spanned<bool>>,
    /// The name by which others replace it.
    #[serde(default)]
    name: Option<String>,
    #[serde(default)]
    replaces: Option<Vec<ReplacedFile>>,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct ReplacedFile {
    name: Spanned<Option<String>>,
}

/// What a file describes.
#[derive(Debug)]
pub(super) struct Domain {
    pub(super) line: u64,
    pub(super) name: String,
    pub(super) nodes: Level,
    /// The lines of descriptors that none selects, each with that of the value `*` that comes before it.
    pub(super) unselected: BTreeMap<u64, u64>,
}

/// The descriptors below another one, or at the top, by their keys. Two keys may become one fact: `k` below `k`, and `k_2`.
pub(super) type Level = BTreeMap<String, Siblings>;

/// The descriptors of one key below another one. Of these, a value of the key selects one: in the order of the fields.
#[derive(Debug, Default)]
pub(super) struct Siblings {
    pub(super) exact: BTreeMap<String, Node>,
    /// In the order of the file.
    pub(super) patterns: Vec<Node>,
    /// The places of the patterns by what their values begin with.
    pub(super) beginnings: BTreeMap<String, usize>,
    pub(super) any: Option<Box<Node>>,
}

impl Siblings {
    /// Leaves out what no value selects, adding its lines to `unselected`, and finds what patterns begin with.
    fn finish(&mut self, unselected: &mut BTreeMap<u64, u64>) {
        let is_any = |node: &Node| matches!(&node.values, Values::Pattern(beginning) if beginning.is_empty());
        if let Some(place) = self.patterns.iter().position(is_any) {
            let after = self.patterns.split_off(place.saturating_add(1));
            let star = self.patterns.last().map_or(0, |node| node.line);
            let left_out =
                after.iter().chain(self.any.take().as_deref()).map(|node| (node.line, star)).collect::<Vec<_>>();
            unselected.extend(left_out);
        }
        for (place, node) in self.patterns.iter().enumerate() {
            if let Values::Pattern(beginning) = &node.values {
                self.beginnings.insert(beginning.clone(), place);
            }
        }
    }

    /// Returns them in the order in which they come before one another.
    pub(super) fn all(&self) -> impl Iterator<Item = &Node> {
        self.exact.values().chain(&self.patterns).chain(self.any.as_deref())
    }
}

/// A descriptor, with those below it.
#[derive(Debug)]
pub(super) struct Node {
    /// Its place among all descriptors of the file.
    pub(super) id: usize,
    pub(super) line: u64,
    pub(super) key: String,
    /// The fact that its key becomes.
    pub(super) fact: String,
    pub(super) values: Values,
    pub(super) limit: Option<NodeLimit>,
    /// The name of the limit; empty if it has none.
    pub(super) name: String,
    /// The names of the limits that it replaces, in the other descriptors of a request.
    pub(super) replaces: Vec<String>,
    /// Whether the limit only watches.
    pub(super) is_shadow: bool,
    /// Whether all values of a wildcard share one counter.
    pub(super) is_shared: bool,
    pub(super) below: Level,
}

impl Node {
    /// Its key and value, as that service writes and compares them.
    fn joined(&self) -> String {
        match &self.values {
            Values::One(value) => format!("{}_{value}", self.key),
            Values::Pattern(beginning) => format!("{}_{beginning}*", self.key),
            Values::Any => self.key.clone(),
        }
    }

    /// Checks that no entry of another key of its level selects it: there, `user: "*"` comes before `user_id`, of which no rule can tell.
    fn check_reach(&self, level: &Level) -> Result<(), ImportError> {
        let joined = self.joined();
        let (beginning, is_pattern) = joined.strip_suffix('*').map_or((&*joined, false), |beginning| (beginning, true));
        let after = beginning.get(self.key.len()..).unwrap_or_default();
        // Each longer key that the text begins with, and for a pattern those that begin with the text.
        let ends = after.match_indices('_').map(|(at, _)| at).skip(1).chain([after.len()]);
        let mut keys = ends.filter_map(|end| beginning.get(..self.key.len().saturating_add(end)));
        let other = keys.find_map(|key| level.get_key_value(key).map(|(key, _)| key).filter(|key| **key != self.key));
        let longer = level.range::<str, _>((Bound::Included(beginning), Bound::Unbounded)).next();
        let longer = longer.map(|(key, _)| key).filter(|key| is_pattern && key.starts_with(beginning));
        match other.or(longer) {
            None => Ok(()),
            Some(other) => Err(ImportError::new(
                self.line,
                format!(
                    "\"{joined}\": there, key and value are one text joined by _, and this is for the key \"{other}\" too"
                ),
            )),
        }
    }
}

/// The limit of a descriptor.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum NodeLimit {
    Unlimited,
    /// 0 in any unit.
    Deny,
    /// As a policy writes it.
    Per(String),
}

/// Returns the domain and its descriptors.
pub(super) fn read(text: &str) -> Result<Domain, ImportError> {
    // Places in the text are counted without it.
    let text = text.strip_prefix('\u{feff}').unwrap_or(text);
    let options = serde_saphyr::options! {
        budget: serde_saphyr::budget! { max_nodes: MAX_NODES, max_events: MAX_NODES.saturating_mul(2) },
        with_snippet: false,
    };
    let root: RootFile = serde_saphyr::from_str_with_options(text, options)
        .map_err(|error| ImportError { line: error.location().map(|at| at.line()), message: describe(&error) })?;
    let scalars = Scalars(text);
    scalars.check_text(&root.domain)?;
    let (line, name) = (root.domain.referenced.line(), root.domain.value);
    if name.is_empty() {
        return Err(ImportError::new(line, "the domain is empty"));
    }
    if name.contains(['*', '{', '}']) {
        let message = format!("the domain \"{name}\": a pattern of a policy cannot have *, {{ or }} as themselves");
        return Err(ImportError::new(line, message));
    }
    let above = vec![DOMAIN.to_owned(), ENTRY_KEYS.to_owned()];
    let mut reader = Reader { scalars, above, nodes: 0, unselected: BTreeMap::new() };
    let nodes = reader.level(root.descriptors)?;
    Ok(Domain { line, name, nodes, unselected: reader.unselected })
}

/// Describes an error of the YAML in the words of the file, and not in those of types.
fn describe(error: &Error) -> String {
    let of_type = |name: &str| match name {
        "bool" | "boolean" => "true or false",
        _ => "a whole number up to 4294967295",
    };
    match error.without_snippet() {
        Error::NullIntoString { .. } => "a text is missing".to_owned(),
        Error::InvalidScalar { ty, .. } => format!("not {}", of_type(ty)),
        Error::SerdeMissingField { field, .. } => format!("there is no `{field}`"),
        Error::SerdeInvalidType { unexpected, .. } => format!("{unexpected} is not expected here"),
        Error::Unexpected { expected, .. } => format!("expected {expected}"),
        Error::Budget { .. } => format!("the file has more than {MAX_NODES} values, or is nested too deeply"),
        _ => {
            let message = error.to_string();
            // The place is told before it, as for all other errors.
            message.rsplit_once(" at line ").map_or(&*message, |(message, _)| message).to_owned()
        }
    }
}

/// Converts descriptors, from the top to the bottom.
struct Reader<'t> {
    scalars: Scalars<'t>,
    /// The facts of those above, and of the descriptor itself.
    above: Vec<String>,
    nodes: usize,
    unselected: BTreeMap<u64, u64>,
}

impl Reader<'_> {
    fn level(&mut self, files: Option<Vec<DescriptorFile>>) -> Result<Level, ImportError> {
        let mut level = Level::new();
        let mut lines: HashMap<String, u64> = HashMap::new();
        for file in files.unwrap_or_default() {
            let node = self.node(file)?;
            if let Some(other) = lines.insert(node.joined(), node.line) {
                let message = format!("the same key and value as in line {other}, joined by _");
                return Err(ImportError::new(node.line, message));
            }
            let siblings = level.entry(node.key.clone()).or_default();
            match &node.values {
                Values::One(value) => drop(siblings.exact.insert(value.clone(), node)),
                Values::Pattern(_) => siblings.patterns.push(node),
                Values::Any => siblings.any = Some(Box::new(node)),
            }
        }
        level.values_mut().for_each(|siblings| siblings.finish(&mut self.unselected));
        level.values().flat_map(Siblings::all).try_for_each(|node| node.check_reach(&level))?;
        Ok(level)
    }

    fn node(&mut self, file: DescriptorFile) -> Result<Node, ImportError> {
        self.scalars.check_text(&file.key)?;
        let (line, key) = (file.key.referenced.line(), file.key.value);
        check_key(line, &key)?;
        let switches =
            [&file.shadow_mode, &file.share_threshold, &file.quota_mode, &file.detailed_metric, &file.value_to_metric];
        switches.into_iter().flatten().try_for_each(|switch| self.scalars.check_plain(switch))?;
        if let Some(quota) = file.quota_mode.filter(|quota| quota.value) {
            let message = "quota_mode: a request is denied there only if all of its limits in quota_mode deny, and every \
                           limit of a policy denies by itself";
            return Err(ImportError::new(quota.referenced.line(), message));
        }
        let values =
            file.value.map_or(Ok(Values::Any), |value| self.scalars.check_text(&value).and_then(|()| values(value)))?;
        let shares = file.share_threshold.filter(|shares| shares.value);
        if let Some(shares) = shares.as_ref().filter(|_| !matches!(values, Values::Pattern(_))) {
            return Err(ImportError::new(shares.referenced.line(), "share_threshold: the value has no star"));
        }
        let mut limit_file = file.rate_limit;
        let name = limit_file.as_mut().and_then(|limit| limit.name.take()).unwrap_or_default();
        let replaces = limit_file.as_mut().and_then(|limit| limit.replaces.take()).unwrap_or_default();
        let replaces = replaces.into_iter().map(|replaced| replaced.read(&name)).collect::<Result<_, _>>()?;
        let limit = limit_file.map(|limit| limit.read(line, &self.scalars)).transpose()?;
        let (fact, id) = (self.fact(&key), self.nodes);
        self.nodes = self.nodes.saturating_add(1);
        self.above.push(fact.clone());
        let below = self.level(file.descriptors)?;
        self.above.pop();
        let (is_shadow, is_shared) = (file.shadow_mode.is_some_and(|shadow| shadow.value), shares.is_some());
        Ok(Node { id, line, key, fact, values, limit, name, replaces, is_shadow, is_shared, below })
    }

    /// Returns the fact of a key. The second of a name is counted on, as the door for Envoy does it.
    fn fact(&self, key: &str) -> String {
        let numbered = (2_usize..).map(|number| format!("{key}_{number}"));
        let mut names = std::iter::once(key.to_owned()).chain(numbered);
        names.find(|name| !self.above.contains(name)).unwrap_or_default()
    }
}

/// The text of the file, by which a scalar is known to be quoted.
struct Scalars<'t>(&'t str);

impl Scalars<'_> {
    fn written(&self, place: Location) -> Option<&str> {
        let span = place.span();
        let (start, length) = (span.byte_offset()?, span.byte_len()?);
        self.0.get(usize::try_from(start).ok()?..usize::try_from(start.saturating_add(length)).ok()?)
    }

    /// Refuses a number or a switch in quotes: there it is a text.
    fn check_plain<T>(&self, scalar: &Spanned<T>) -> Result<(), ImportError> {
        match self.written(scalar.referenced).filter(|written| written.starts_with(['"', '\''])) {
            Some(written) => {
                let message = format!("{written}: that service does not load it with quotes");
                Err(ImportError::new(scalar.referenced.line(), message))
            }
            None => Ok(()),
        }
    }

    /// Refuses a number that is not whole: there it is no text.
    fn check_text(&self, scalar: &Spanned<String>) -> Result<(), ImportError> {
        let text = scalar.value.as_str();
        if self.written(scalar.referenced) == Some(text) && is_float(text) {
            let message = format!("{text}: that service does not load it without quotes");
            return Err(ImportError::new(scalar.referenced.line(), message));
        }
        Ok(())
    }
}

/// Whether the YAML of that service takes a text for a number that is not whole.
fn is_float(text: &str) -> bool {
    let unsigned = text.strip_prefix(['+', '-']).unwrap_or(text).replace('_', "");
    let is_whole = match unsigned.strip_prefix('0') {
        Some(octal) => octal.bytes().all(|byte| matches!(byte, b'0'..=b'7')),
        None => unsigned.parse::<u64>().is_ok(),
    };
    let is_number = unsigned.bytes().all(|byte| byte.is_ascii_digit() || b".eE+-".contains(&byte));
    let is_special = matches!(&*unsigned, ".inf" | ".Inf" | ".INF" | ".nan" | ".NaN" | ".NAN");
    is_special || (is_number && !is_whole && unsigned.parse::<f64>().is_ok())
}

fn check_key(line: u64, key: &str) -> Result<(), ImportError> {
    if key.is_empty() {
        return Err(ImportError::new(line, "the key is empty"));
    }
    if key.contains('*') {
        let message = format!("the key \"{key}\": there, a star in it stands for other keys too");
        return Err(ImportError::new(line, message));
    }
    if key.contains(['{', '}']) {
        let message = format!("the key \"{key}\": a pattern of a policy cannot have {{ or }} as themselves");
        return Err(ImportError::new(line, message));
    }
    Ok(())
}

fn values(value: Spanned<String>) -> Result<Values, ImportError> {
    let line = value.referenced.line();
    let text = value.value;
    if text.contains(['{', '}']) {
        let message = format!("\"{text}\": a pattern of a policy cannot have {{ or }} as themselves");
        return Err(ImportError::new(line, message));
    }
    let beginning = text.strip_suffix('*');
    if beginning.unwrap_or(&text).contains('*') {
        let message = format!(
            "\"{text}\": there, only a star at the end is a wildcard, and a pattern of a policy cannot have * as itself"
        );
        return Err(ImportError::new(line, message));
    }
    Ok(match beginning {
        // A star alone is any value, as no value is; but it comes before that.
        Some(beginning) => Values::Pattern(beginning.to_owned()),
        None if text.is_empty() => Values::Any,
        None => Values::One(text),
    })
}

impl ReplacedFile {
    /// Returns the name of a limit that one of this name replaces.
    fn read(self, own: &str) -> Result<String, ImportError> {
        let Self { name } = self;
        match name.value {
            Some(name) if !name.is_empty() && name != own => Ok(name),
            _ => Err(ImportError::new(name.referenced.line(), "replaces: name another limit")),
        }
    }
}

impl LimitFile {
    fn read(self, line: u64, scalars: &Scalars<'_>) -> Result<NodeLimit, ImportError> {
        self.unlimited.iter().try_for_each(|switch| scalars.check_plain(switch))?;
        self.requests_per_unit.iter().try_for_each(|number| scalars.check_plain(number))?;
        if self.unlimited.is_some_and(|unlimited| unlimited.value) {
            return match self.unit {
                // That service does not load it either.
                Some(unit) => Err(ImportError::new(unit.referenced.line(), "unlimited: a limit with a unit is none")),
                None => Ok(NodeLimit::Unlimited),
            };
        }
        let Some(unit) = self.unit else { return Err(ImportError::new(line, "the rate_limit has no unit")) };
        let short = match unit.value.to_ascii_uppercase().as_str() {
            "SECOND" => "s",
            "MINUTE" => "min",
            "HOUR" => "h",
            "DAY" => "day",
            "WEEK" => "week",
            "MONTH" => "month",
            "YEAR" => "year",
            _ => {
                let message =
                    format!("unknown unit \"{}\": second, minute, hour, day, week, month or year", unit.value);
                return Err(ImportError::new(unit.referenced.line(), message));
            }
        };
        // As in that service, a limit without a number is one of 0.
        Ok(match self.requests_per_unit.map_or(0, |number| number.value) {
            0 => NodeLimit::Deny,
            number => NodeLimit::Per(format!("{number}/{short}")),
        })
    }
}
