//! The operations that an OpenAPI document describes, in JSON or YAML.

use std::path::Path;

use anyhow::Context as _;
use serde_json::Value;

use crate::source::read_text;

/// The largest document, in bytes.
const MAX_DOCUMENT: usize = 64 << 20;
/// The most values of a document in YAML: ten times those of the largest public ones.
const MAX_NODES: usize = 10_000_000;
/// The keys of a path that are operations.
const METHODS: [&str; 8] = ["get", "put", "post", "delete", "options", "head", "patch", "trace"];

/// A document, and what to call it.
pub(super) struct Document {
    name: String,
    root: Value,
}

impl Document {
    /// Reads a document. An object is JSON; anything else is taken for YAML.
    pub(super) fn read(path: &Path) -> anyhow::Result<Self> {
        let text = read_text(path, MAX_DOCUMENT)?;
        let name = path.display().to_string();
        let root = if text.trim_start().starts_with('{') {
            serde_json::from_str(&text).with_context(|| format!("{name} is no JSON"))
        } else {
            yaml(&text).with_context(|| format!("{name} is neither JSON nor YAML"))
        };
        Ok(Self { name, root: root? })
    }

    /// Each operation: its method, in lower case, and its path with the base that all of them have.
    pub(super) fn operations(&self) -> anyhow::Result<impl Iterator<Item = (&'static str, String)>> {
        let paths = self.root.get("paths").and_then(Value::as_object);
        let paths = paths.with_context(|| format!("{} has no \"paths\": it is no OpenAPI document", self.name))?;
        let (_, base) = self.server();
        Ok(paths.iter().flat_map(move |(template, item)| {
            let methods = METHODS.into_iter().filter(|method| item.get(*method).is_some());
            methods.map(move |method| (method, format!("{base}{template}")))
        }))
    }

    /// The host that the operations are of, if the document says.
    pub(super) fn host(&self) -> Option<&str> {
        self.server().0
    }

    /// Host and base path: those of the first server, or, in documents of version 2, the document's own.
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

/// YAML as the same values. What aliases repeat is bounded, as is all else.
fn yaml(text: &str) -> anyhow::Result<Value> {
    let options = serde_saphyr::options! {
        budget: serde_saphyr::budget! { max_nodes: MAX_NODES, max_events: MAX_NODES.saturating_mul(2) },
        with_snippet: false,
    };
    Ok(serde_saphyr::from_str_with_options(text, options)?)
}

/// A path that a template describes.
pub(super) fn sample(template: &str) -> String {
    let segment = |segment: &str| if segment.contains('{') { "x".to_owned() } else { segment.to_owned() };
    template.split('/').map(segment).collect::<Vec<_>>().join("/")
}
