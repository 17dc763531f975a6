//! Reads from flags and the environment where events and alerts go.

use std::fmt;
use std::net::IpAddr;
use std::path::PathBuf;
use std::str::FromStr;
use std::sync::Arc;

use anyhow::{Context as _, bail};
use http::Uri;
use ureq::tls::TlsConfig;

use super::body::Form;
use super::guard::{Reach, is_public};
use super::lines::{self, Lines};
use super::webhook::SigningKey;
use crate::operate::system_tls;
use crate::signals::alerts::Node;

const ALERT_URL: &str = "THRESHOLD_ALERT_URL";
const EVENTS_URL: &str = "THRESHOLD_EVENTS_URL";
const EVENTS_TOKEN: &str = "THRESHOLD_EVENTS_TOKEN";
const PAGERDUTY_KEY: &str = "THRESHOLD_PAGERDUTY_KEY";
const SECRET: &str = "THRESHOLD_WEBHOOK_SECRET";

/// Where events and alerts go.
pub(crate) struct SinkSettings {
    pub(super) lines: Vec<Lines>,
    pub(super) events: Option<(Target, Option<Box<str>>)>,
    pub(super) alerts: Vec<(Target, Form)>,
    pub(super) keys: Arc<[SigningKey]>,
    pub(super) reach: Reach,
    pub(super) tls: TlsConfig,
    pub(super) node: Node,
}

/// The names of all receivers, for operators. Of a URL, the scheme and the host.
#[derive(Debug, Default)]
pub(crate) struct Names {
    pub(crate) events: Vec<String>,
    pub(crate) alerts: Vec<String>,
}

/// The URL of a webhook.
#[derive(Clone)]
pub(super) struct Target {
    pub(super) url: Uri,
    /// Its scheme and host. The rest of a URL is often a secret.
    pub(super) name: String,
}

impl fmt::Debug for SinkSettings {
    /// Shows no secrets.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let names = self.events.iter().map(|(target, _)| target).chain(self.alerts.iter().map(|(target, _)| target));
        let names: Vec<&str> = names.map(|target| target.name.as_str()).collect();
        f.debug_struct("SinkSettings").field("lines", &self.lines).field("webhooks", &names).finish_non_exhaustive()
    }
}

/// The value of `--events-to`.
impl FromStr for Lines {
    type Err = &'static str;

    fn from_str(text: &str) -> Result<Self, &'static str> {
        match text.strip_prefix("jsonl:") {
            Some("") => Err("jsonl: needs a file, as in jsonl:/var/log/threshold/events.jsonl"),
            Some(path) => Ok(Self::File(PathBuf::from(path))),
            None if text == "stdout" => Ok(Self::Stdout),
            None => Err("expected jsonl:FILE or stdout"),
        }
    }
}

impl SinkSettings {
    /// Reads the environment. Nothing is opened and nothing is sent.
    pub(crate) fn from_environment(lines: &[Lines], reach: Reach, node: Option<&str>) -> anyhow::Result<Self> {
        Self::read(lines, reach, node, |name| match std::env::var(name) {
            Ok(text) if text.trim().is_empty() => bail!("{name} is set but empty: give a value, or unset it"),
            Ok(text) => Ok(Some(text)),
            Err(std::env::VarError::NotPresent) => Ok(None),
            Err(std::env::VarError::NotUnicode(_)) => bail!("{name} is not UTF-8"),
        })
    }

    pub(super) fn read(
        lines: &[Lines],
        reach: Reach,
        node: Option<&str>,
        variable: impl Fn(&str) -> anyhow::Result<Option<String>>,
    ) -> anyhow::Result<Self> {
        let node = Node::read(node, &variable)?;
        let token = variable(EVENTS_TOKEN)?.map(|token| header_text(EVENTS_TOKEN, &token)).transpose()?;
        let events = match variable(EVENTS_URL)? {
            Some(url) => Some((target(url.trim(), reach).context(EVENTS_URL)?, token)),
            None if token.is_some() => bail!("{EVENTS_TOKEN} is set without {EVENTS_URL}"),
            None => None,
        };
        let pager_duty = variable(PAGERDUTY_KEY)?.map(|key| header_text(PAGERDUTY_KEY, &key)).transpose()?;
        let urls = variable(ALERT_URL)?.unwrap_or_default();
        let mut alerts = Vec::new();
        for (number, url) in (1..).zip(urls.split_whitespace()) {
            let alert = alert_target(url, reach, pager_duty.as_deref());
            alerts.push(alert.with_context(|| format!("{ALERT_URL}, URL {number}"))?);
        }
        if pager_duty.is_some() && !alerts.iter().any(|(_, form)| matches!(form, Form::PagerDuty { .. })) {
            bail!("{PAGERDUTY_KEY} is set, but {ALERT_URL} has no pagerduty+https:// URL");
        }
        let secrets = variable(SECRET)?.unwrap_or_default();
        if !secrets.is_empty() && events.is_none() && alerts.is_empty() {
            bail!("{SECRET} is set without {ALERT_URL} or {EVENTS_URL}: there is nothing to sign");
        }
        let keys: Option<Vec<SigningKey>> = secrets.split_whitespace().map(SigningKey::parse).collect();
        let keys = keys.with_context(|| {
            format!("{SECRET} is shorter than 16 bytes, or not base64 after whsec_: generate one with `echo whsec_$(openssl rand -base64 32)`")
        })?;
        let mut targets = events.iter().map(|(target, _)| target).chain(alerts.iter().map(|(target, _)| target));
        // The system's certificates take a while to read, and a container may have none.
        let tls = match targets.any(|target| target.url.scheme_str() == Some("https")) {
            true => system_tls().context("https:// webhooks cannot be verified")?,
            false => TlsConfig::default(),
        };
        Ok(Self { lines: lines.to_vec(), events, alerts, keys: keys.into(), reach, tls, node })
    }

    /// Returns the settings of a server that listens there: the port, or the path of a socket.
    pub(crate) fn of_server_on(mut self, place: &str) -> Self {
        self.node.listens_on(place);
        self
    }

    /// Returns the name of this server.
    pub(crate) fn node_name(&self) -> &str {
        &self.node.name
    }

    /// Returns the names of the sinks of events. Receivers of alerts have theirs when they are started.
    pub(super) fn names(&self) -> Names {
        let lines = self.lines.iter().map(Lines::to_string);
        let events = self.events.iter().map(|(target, _)| target.name.clone());
        Names { events: lines.chain(events).collect(), alerts: Vec::new() }
    }

    /// Checks the files, and creates none.
    pub(crate) fn check_files(&self) -> anyhow::Result<()> {
        for sink in &self.lines {
            let Lines::File(path) = sink else { continue };
            // The parent of a bare name is "".
            let folder = path.parent().filter(|folder| !folder.as_os_str().is_empty());
            if path.is_dir() || folder.is_some_and(|folder| !folder.is_dir()) {
                bail!("--events-to: {} is a folder, or in no folder that exists", path.display());
            }
            lines::check(path).with_context(|| format!("--events-to: cannot write {sink}"))?;
        }
        Ok(())
    }
}

fn alert_target(url: &str, reach: Reach, pager_duty: Option<&str>) -> anyhow::Result<(Target, Form)> {
    if let Some(url) = url.strip_prefix("slack+") {
        return Ok((target(url, reach)?, Form::Slack));
    }
    let Some(url) = url.strip_prefix("pagerduty+") else { return Ok((target(url, reach)?, Form::Own)) };
    let key = pager_duty.with_context(|| format!("pagerduty+https:// needs {PAGERDUTY_KEY}"))?;
    Ok((target(url, reach)?, Form::PagerDuty { routing_key: key.into() }))
}

/// Parses a URL. No error quotes it, because its path may be a secret.
fn target(text: &str, reach: Reach) -> anyhow::Result<Target> {
    let url: Uri = text.parse().ok().context("not a URL: expected https://HOST/PATH")?;
    let (Some(scheme), Some(authority)) = (url.scheme_str(), url.authority()) else {
        bail!("not a URL: expected https://HOST/PATH");
    };
    match scheme {
        "https" => {}
        "http" if reach == Reach::Private => {}
        "http" => bail!("http:// is not encrypted: use https://, or allow it with --allow-private-webhooks"),
        _ => bail!("unknown scheme: expected https://, and for alerts also slack+https:// or pagerduty+https://"),
    }
    // Another URL after a comma would be taken for a part of this one's path.
    if text.contains(",http") {
        bail!("separate URLs by spaces, not by commas");
    }
    if authority.as_str().contains('@') {
        bail!("a name and password in the URL are not supported");
    }
    let host = authority.host().trim_start_matches('[').trim_end_matches(']');
    if host.is_empty() {
        bail!("the URL has no host");
    }
    // Names are checked whenever they are resolved; an address never changes.
    if reach == Reach::Public && host.parse::<IpAddr>().is_ok_and(|address| !is_public(address)) {
        bail!("{host} is not a public address: --allow-private-webhooks allows it");
    }
    let name = format!("{scheme}://{authority}");
    Ok(Target { url, name })
}

fn header_text(name: &str, text: &str) -> anyhow::Result<Box<str>> {
    let text = text.trim();
    if text.is_empty() || !text.bytes().all(|byte| byte.is_ascii_graphic()) {
        bail!("{name} has a character that a header cannot have");
    }
    Ok(text.into())
}
