//! This server, as its notices name it.

use anyhow::bail;
use http::Uri;
use threshold_core::policy::AlertOn;

/// The variable with the URL of the runbooks.
const RUNBOOKS_URL: &str = "THRESHOLD_RUNBOOKS_URL";
/// Where the runbooks are in the repository.
const RUNBOOKS: &str = "docs/runbooks";

/// The name of this machine, and where an operator finds the runbooks.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Node {
    pub(crate) name: Box<str>,
    /// A folder of the repository, or a URL.
    runbooks: Box<str>,
}

impl Default for Node {
    fn default() -> Self {
        let name = rustix::system::uname().nodename().to_string_lossy().into();
        Self { name, runbooks: RUNBOOKS.into() }
    }
}

impl Node {
    /// Reads where the runbooks are.
    pub(crate) fn read(variable: impl Fn(&str) -> anyhow::Result<Option<String>>) -> anyhow::Result<Self> {
        let Some(url) = variable(RUNBOOKS_URL)? else { return Ok(Self::default()) };
        let url = url.trim().trim_end_matches('/');
        let parsed: Option<Uri> = url.parse().ok();
        let is_usable = |url: &Uri| matches!(url.scheme_str(), Some("https" | "http")) && url.query().is_none();
        if !parsed.as_ref().is_some_and(is_usable) {
            bail!("{RUNBOOKS_URL}: expected https://HOST/PATH, to which /ip-blocks.md is added");
        }
        Ok(Self { runbooks: url.into(), ..Self::default() })
    }

    /// Returns the runbook of an alert.
    pub(super) fn runbook(&self, on: AlertOn) -> String {
        format!("{}/{}.md", self.runbooks, on.name().replace('_', "-"))
    }

    /// Returns the list of all runbooks.
    pub(crate) fn all_runbooks(&self) -> String {
        format!("{}/README.md", self.runbooks)
    }

    #[cfg(test)]
    pub(crate) fn of_test() -> Self {
        Self { name: "node-1".into(), runbooks: RUNBOOKS.into() }
    }
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::*;

    fn read(url: &str) -> anyhow::Result<Node> {
        Node::read(|_| Ok(Some(url.to_owned())))
    }

    #[test]
    fn every_alert_has_a_runbook_in_the_repository() {
        let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
        let node = Node::read(|_| Ok(None)).unwrap();
        let runbooks = AlertOn::ALL.map(|on| node.runbook(on));
        assert_eq!(runbooks.last().map(String::as_str), Some("docs/runbooks/ip-blocks.md"));
        for runbook in runbooks.into_iter().chain([node.all_runbooks()]) {
            assert!(root.join(&runbook).is_file(), "{runbook}");
        }
    }

    #[test]
    fn runbooks_may_be_elsewhere() {
        for url in ["https://wiki.example.com/run/", "https://wiki.example.com/run"] {
            let runbook = read(url).unwrap().runbook(AlertOn::IpBlocks);
            assert_eq!(runbook, "https://wiki.example.com/run/ip-blocks.md");
        }
        for url in ["wiki", "/runbooks", "ftp://wiki.example.com", "https://wiki.example.com/?page=", "https://a b/"] {
            assert!(read(url).is_err(), "{url}");
        }
    }
}
