//! Reads the operations of an OpenAPI document, in JSON or YAML.

use std::path::Path;

use anyhow::Context as _;
use serde_json::Value;

use crate::source::read_text;

/// The largest document, in bytes.
const MAX_DOCUMENT: usize = 64 << 20;
/// The most values of a YAML document, after aliases are expanded: ten times those of the largest public documents.
const MAX_NODES: usize = 10_000_000;
/// The keys of a path that are operations.
const METHODS: [&str; 8] = ["get", "put", "post", "delete", "options", "head", "patch", "trace"];

/// A document, and its file name for messages.
pub(super) struct Document {
    name: String,
    root: Value,
}

impl Document {
    /// Reads a document: JSON if it begins with a brace, else YAML.
    pub(super) fn read(path: &Path) -> anyhow::Result<Self> {
        let text = read_text(path, MAX_DOCUMENT)?;
        let name = path.display().to_string();
        let root = if text.trim_start().starts_with('{') {
            serde_json::from_str(&text).with_context(|| format!("{name} is not JSON"))
        } else {
            yaml(&text).with_context(|| format!("{name} is neither JSON nor YAML"))
        };
        Ok(Self { name, root: root? })
    }

    /// Returns the method of each operation, in lower case, and its path with the base path.
    pub(super) fn operations(&self) -> anyhow::Result<impl Iterator<Item = (&'static str, String)>> {
        let paths = self.root.get("paths").and_then(Value::as_object);
        let paths = paths.with_context(|| format!("{} is not an OpenAPI document: it has no \"paths\"", self.name))?;
        let (_, base) = self.server();
        Ok(paths.iter().flat_map(move |(template, item)| {
            let methods = METHODS.into_iter().filter(|method| item.get(*method).is_some());
            methods.map(move |method| (method, format!("{base}{template}")))
        }))
    }

    /// Returns the host of the operations, if the document has one.
    pub(super) fn host(&self) -> Option<&str> {
        self.server().0
    }

    /// Returns the host and the base path: of the first server, or in version 2 of the document itself.
    fn server(&self) -> (Option<&str>, &str) {
        let text = |pointer: &str| self.root.pointer(pointer).and_then(Value::as_str);
        let Some(url) = text("/servers/0/url").map(|url| url.trim_end_matches('/')) else {
            return (text("/host"), text("/basePath").unwrap_or_default().trim_end_matches('/'));
        };
        match url.split_once("://") {
            None => (None, url),
            Some((_, rest)) => match rest.find('/').and_then(|at| rest.split_at_checked(at)) {
                Some((host, base)) => (Some(host), base),
                None => (Some(rest), ""),
            },
        }
    }
}

/// Parses YAML. The number of values is bounded, because aliases can expand to any number (a billion laughs attack).
fn yaml(text: &str) -> anyhow::Result<Value> {
    let options = serde_saphyr::options! {
        budget: serde_saphyr::budget! { max_nodes: MAX_NODES, max_events: MAX_NODES.saturating_mul(2) },
        with_snippet: false,
    };
    Ok(serde_saphyr::from_str_with_options(text, options)?)
}

/// Returns a path that matches a template.
pub(super) fn sample(template: &str) -> String {
    let segment = |segment: &str| if segment.contains('{') { "x".to_owned() } else { segment.to_owned() };
    template.split('/').map(segment).collect::<Vec<_>>().join("/")
}
