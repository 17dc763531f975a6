//! This server, as its notices name it.

use std::sync::Arc;

use anyhow::bail;
use http::Uri;
use threshold_core::decision::Cause;
use threshold_core::policy::AlertOn;
use threshold_core::text::printable;

/// The variable with the name of this server.
const NODE: &str = "THRESHOLD_NODE";
/// The variable with the URL of the runbooks.
const RUNBOOKS_URL: &str = "THRESHOLD_RUNBOOKS_URL";
/// The longest name, in bytes: it is a part of keys of 255 bytes.
const MAX_NAME: usize = 100;
/// Where the runbooks are in the repository.
const RUNBOOKS: &str = "docs/runbooks";

/// The name of this server, and where an operator finds the runbooks.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Node {
    pub(crate) name: Arc<str>,
    /// Whether an operator has chosen the name.
    is_named: bool,
    /// A folder of the repository, or a URL.
    runbooks: Box<str>,
}

impl Default for Node {
    fn default() -> Self {
        Self { name: host_name(), is_named: false, runbooks: RUNBOOKS.into() }
    }
}

impl Node {
    /// Reads the name, unless `given` has it, and where the runbooks are.
    pub(crate) fn read(
        given: Option<&str>,
        variable: impl Fn(&str) -> anyhow::Result<Option<String>>,
    ) -> anyhow::Result<Self> {
        let mut node = match given {
            Some(name) => Self::named("--node", name)?,
            None => match variable(NODE)? {
                Some(name) => Self::named(NODE, &name)?,
                None => Self::default(),
            },
        };
        let Some(url) = variable(RUNBOOKS_URL)? else { return Ok(node) };
        let url = url.trim().trim_end_matches('/');
        let parsed: Option<Uri> = url.parse().ok();
        let is_usable = |url: &Uri| matches!(url.scheme_str(), Some("https" | "http")) && url.query().is_none();
        if !parsed.as_ref().is_some_and(is_usable) {
            bail!("{RUNBOOKS_URL}: expected https://HOST/PATH, to which /ip-blocks.md is added");
        }
        node.runbooks = url.into();
        Ok(node)
    }

    fn named(setting: &str, name: &str) -> anyhow::Result<Self> {
        let name = name.trim();
        if name.is_empty() || name.len() > MAX_NAME || printable(name) != name {
            bail!("{setting}: expected a name of at most {MAX_NAME} bytes without control characters");
        }
        Ok(Self { name: name.into(), is_named: true, ..Self::default() })
    }

    /// Adds where the server listens to the name of the machine, unless an operator has chosen another name. Two servers on one
    /// machine must not share a name: the end of an alert on one would close the incident of the other.
    pub(crate) fn listens_on(&mut self, place: &str) {
        if !self.is_named {
            self.name = format!("{}:{place}", self.name).into();
        }
    }

    /// Returns the runbook of an alert, most of which has this cause.
    pub(super) fn runbook(&self, on: AlertOn, cause: Option<Cause>) -> String {
        match cause {
            Some(Cause::Login) => format!("{}/login-attack.md", self.runbooks),
            _ => format!("{}/{}.md", self.runbooks, on.name().replace('_', "-")),
        }
    }

    /// Returns the list of all runbooks.
    pub(crate) fn all_runbooks(&self) -> String {
        format!("{}/README.md", self.runbooks)
    }

    #[cfg(test)]
    pub(crate) fn of_test() -> Self {
        Self { name: "node-1".into(), is_named: true, runbooks: RUNBOOKS.into() }
    }
}

/// Returns the name of this machine.
pub(crate) fn host_name() -> Arc<str> {
    rustix::system::uname().nodename().to_string_lossy().into()
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::*;

    fn read(url: &str) -> anyhow::Result<Node> {
        Node::read(None, |name| Ok((name == RUNBOOKS_URL).then(|| url.to_owned())))
    }

    #[test]
    fn every_alert_has_a_runbook_in_the_repository() {
        let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
        let node = Node::read(None, |_| Ok(None)).unwrap();
        let runbooks = AlertOn::ALL.map(|on| node.runbook(on, Some(Cause::Limit)));
        assert_eq!(runbooks.last().map(String::as_str), Some("docs/runbooks/ip-blocks.md"));
        let logins = node.runbook(AlertOn::IpBlocks, Some(Cause::Login));
        assert_eq!(logins, "docs/runbooks/login-attack.md");
        for runbook in runbooks.into_iter().chain([logins, node.all_runbooks()]) {
            assert!(root.join(&runbook).is_file(), "{runbook}");
        }
    }

    /// Fails if the port is added to a name that was chosen, or the variable prevails over the flag.
    #[test]
    fn a_server_has_the_name_that_is_chosen_or_its_machine_and_port() {
        let of = |given: Option<&str>, variable: Option<&str>| {
            let mut node = Node::read(given, |name| Ok(variable.filter(|_| name == NODE).map(str::to_owned)))?;
            node.listens_on("8080");
            anyhow::Ok(node.name)
        };
        assert_eq!(&*of(None, None).unwrap(), format!("{}:8080", host_name()));
        assert_eq!(&*of(None, Some("limits-1")).unwrap(), "limits-1");
        assert_eq!(&*of(Some(" limits-2 "), Some("limits-1")).unwrap(), "limits-2");
        for wrong in [" ", "a\u{202e}b", "a\nb", &"x".repeat(101)] {
            assert!(of(Some(wrong), None).is_err() && of(None, Some(wrong)).is_err(), "{wrong}");
        }
    }

    #[test]
    fn runbooks_may_be_elsewhere() {
        for url in ["https://wiki.example.com/run/", "https://wiki.example.com/run"] {
            let runbook = read(url).unwrap().runbook(AlertOn::IpBlocks, None);
            assert_eq!(runbook, "https://wiki.example.com/run/ip-blocks.md");
        }
        for url in ["wiki", "/runbooks", "ftp://wiki.example.com", "https://wiki.example.com/?page=", "https://a b/"] {
            assert!(read(url).is_err(), "{url}");
        }
    }
}
