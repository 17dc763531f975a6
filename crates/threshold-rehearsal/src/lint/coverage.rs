//! Finds requests that no rule limits, in access logs and in OpenAPI documents.

use std::collections::BTreeMap;
use std::net::{IpAddr, Ipv4Addr};
use std::path::{Path, PathBuf};

use threshold_core::path::{normalize_method, normalize_path};
use threshold_core::policy::{Finding, Policy, Severity};
use threshold_core::{Facts, Span};

use super::openapi::{self, Document};
use crate::traffic::{Feed, Fields};

/// How many endpoints are listed.
const SHOWN: usize = 10;
/// How many different endpoints of a log are checked, which bounds memory.
const MAX_ENDPOINTS: usize = 100_000;
/// An address for rules by address, from a block that is reserved for documentation.
const SAMPLE_ADDRESS: IpAddr = IpAddr::V4(Ipv4Addr::new(192, 0, 2, 1));

/// Returns the requests of logs that no rule limits, the most frequent first.
pub(super) fn by_log(policy: &Policy, logs: &[PathBuf]) -> anyhow::Result<Vec<Finding>> {
    if logs.is_empty() {
        return Ok(Vec::new());
    }
    let mut feed = Feed::open(logs, Fields::default(), Span::ZERO)?;
    // For each endpoint, whether a rule limits it and how often it occurs.
    let mut endpoints: BTreeMap<(String, String, String), (bool, u64)> = BTreeMap::new();
    while let Some(second) = feed.next_second() {
        for request in second {
            let (Some(method), Some(path)) = (request.method, request.path) else { continue };
            let host = request.host.unwrap_or_default();
            let key = (normalize_method(method).into_owned(), normalize_path(path).into_owned(), host.to_owned());
            if let Some((_, count)) = endpoints.get_mut(&key) {
                *count = count.saturating_add(1);
            } else if endpoints.len() < MAX_ENDPOINTS {
                // Known endpoints are counted on. Only new ones are left out once the table is full, as a scanner's
                // paths would fill it.
                let covered = is_covered(policy, method, path, request.host);
                endpoints.insert(key, (covered, 1));
            }
        }
    }
    let counts = feed.finish();
    anyhow::ensure!(!endpoints.is_empty(), "none of the log's {} lines is a request", counts.lines);
    let open = endpoints.into_iter().filter(|(_, (covered, _))| !covered);
    let mut open: Vec<(String, u64)> =
        open.map(|((method, path, host), (_, count))| (format!("{method} {host}{path}"), count)).collect();
    open.sort_by_key(|(_, count)| std::cmp::Reverse(*count));
    Ok(findings(open.into_iter().map(|(endpoint, count)| format!("no rule limits {endpoint} ({count} in the log)"))))
}

/// Returns the operations of an OpenAPI document that no rule limits.
pub(super) fn by_openapi(policy: &Policy, path: &Path) -> anyhow::Result<Vec<Finding>> {
    let document = Document::read(path)?;
    let covered = |(method, path): &(&str, String)| is_covered(policy, method, &openapi::sample(path), document.host());
    let open: Vec<(&str, String)> = document.operations()?.filter(|operation| !covered(operation)).collect();
    Ok(findings(open.into_iter().map(|(method, path)| format!("no rule limits {} {path}", method.to_uppercase()))))
}

/// Whether any rule limits such a request with an address, a user and a tenant.
fn is_covered(policy: &Policy, method: &str, path: &str, host: Option<&str>) -> bool {
    let facts = Facts {
        ip: Some(SAMPLE_ADDRESS),
        // With all names, so that a rule by user or tenant counts as coverage even if this log has none.
        user: Some("sample"),
        tenant: Some("sample"),
        method: Some(method),
        path: Some(path),
        host,
        ..Facts::default()
    };
    policy.explain(&facts).iter().any(|explained| explained.limit.is_some())
}

fn findings(messages: impl ExactSizeIterator<Item = String>) -> Vec<Finding> {
    let more = messages.len().saturating_sub(SHOWN);
    let finding = |message: String| Finding {
        severity: Severity::Warning,
        code: "uncovered-path",
        span: 0..0,
        message,
        help: "add a rule that meets it, or one with fallback = true".to_owned(),
    };
    let mut findings: Vec<Finding> = messages.take(SHOWN).map(finding).collect();
    if more > 0 {
        findings.push(finding(format!("no rule limits {more} further endpoints")));
    }
    findings
}
