//! Reads what `rustdoc --output-format json` writes.

use std::path::Path;

use serde_json::Value;

/// The version of the format that these files read. rustdoc raises it whenever it renames or moves a field, so another number
/// means: compare the fields used here with the `rustdoc-types` crate of that version, then change it.
const FORMAT_VERSION: u64 = 57;

/// The documentation of one crate.
pub(crate) struct Docs {
    json: Value,
}

/// Where an item is defined.
pub(crate) struct Origin<'a> {
    pub(crate) krate: &'a str,
    pub(crate) path: Vec<&'a str>,
}

impl Docs {
    pub(crate) fn read(file: &Path) -> Result<Self, String> {
        let text = std::fs::read_to_string(file).map_err(|error| format!("{}: {error}", file.display()))?;
        let json: Value = serde_json::from_str(&text).map_err(|error| format!("{}: {error}", file.display()))?;
        match json["format_version"].as_u64() {
            Some(FORMAT_VERSION) => Ok(Self { json }),
            found => Err(format!(
                "rustdoc wrote JSON of format {found:?}, and tests/public_api reads {FORMAT_VERSION}, that of Rust 1.95: \
                 run the tests with that toolchain, or change FORMAT_VERSION in tests/public_api/rustdoc.rs"
            )),
        }
    }

    pub(crate) fn version(&self) -> &str {
        self.json["crate_version"].as_str().unwrap_or_default()
    }

    pub(crate) fn root(&self) -> &Value {
        self.item(&self.json["root"]).expect("the crate itself is in the index")
    }

    /// An item of this crate. Those of others, and those that are not public, are not in the index.
    pub(crate) fn item(&self, id: &Value) -> Option<&Value> {
        self.json["index"].get(id.to_string())
    }

    pub(crate) fn origin(&self, id: &Value) -> Option<Origin<'_>> {
        let summary = self.json["paths"].get(id.to_string())?;
        let path: Vec<&str> = summary["path"].as_array()?.iter().filter_map(Value::as_str).collect();
        let krate = match &summary["crate_id"] {
            own if own == 0 => self.root()["name"].as_str()?,
            other => self.json["external_crates"].get(other.to_string())?["name"].as_str()?,
        };
        Some(Origin { krate, path })
    }
}

/// A variant of an enum in JSON: its name alone, or an object with one entry.
pub(crate) fn variant(value: &Value) -> (&str, &Value) {
    match value {
        Value::Object(fields) => fields.iter().next().map_or(("", value), |(name, held)| (name, held)),
        other => (other.as_str().unwrap_or_default(), &Value::Null),
    }
}

/// An item's kind and what it holds.
pub(crate) fn inner(item: &Value) -> (&str, &Value) {
    variant(&item["inner"])
}

/// A list, empty where there is none.
pub(crate) fn list(value: &Value) -> impl Iterator<Item = &Value> {
    value.as_array().into_iter().flatten()
}

/// The first paragraph of an item's documentation on one line, without links that lead nowhere outside of rustdoc.
pub(crate) fn summary(item: &Value) -> String {
    let docs = item["docs"].as_str().unwrap_or_default();
    let paragraph: Vec<&str> = docs.lines().map(str::trim).take_while(|line| !line.is_empty()).collect();
    without_links(&paragraph.join(" "))
}

/// The first sentence of a summary: the rest is for the full documentation.
pub(crate) fn first_sentence(text: &str) -> String {
    let ends = text.match_indices(". ").map(|(at, _)| at).find(|at| {
        let next = text.get(at.saturating_add(2)..).and_then(|rest| rest.chars().next());
        next.is_some_and(|c| c.is_uppercase() || c == '`')
    });
    ends.and_then(|at| text.get(..at)).map_or_else(|| text.to_owned(), |sentence| format!("{sentence}."))
}

/// Text with `[label](target)` and ``[`label`]`` as their labels.
fn without_links(text: &str) -> String {
    let mut plain = String::new();
    let mut rest = text;
    while let Some((before, after)) = rest.split_once('[') {
        plain.push_str(before);
        let Some((label, behind)) = after.split_once(']') else {
            plain.push('[');
            rest = after;
            break;
        };
        let target = behind.strip_prefix('(').and_then(|target| target.split_once(')'));
        match target {
            Some((_, behind)) => {
                plain.push_str(label);
                rest = behind;
            }
            None if label.starts_with('`') => {
                plain.push_str(label);
                rest = behind;
            }
            None => {
                plain.push('[');
                rest = after;
            }
        }
    }
    plain + rest
}

#[test]
fn a_sentence_ends_before_the_next_one() {
    assert_eq!(first_sentence("Returns it. Never fails."), "Returns it.");
    assert_eq!(first_sentence("Reads e.g. one line."), "Reads e.g. one line.");
}

#[test]
fn links_become_their_labels() {
    assert_eq!(
        without_links("A [`Plan`] of [rules](Rule), [identity] `[[rule]]`."),
        "A `Plan` of rules, [identity] `[[rule]]`."
    );
}
