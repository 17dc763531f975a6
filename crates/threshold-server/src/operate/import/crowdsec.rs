//! CrowdSec's decisions in JSON: `cscli decisions list -o json`, and the files of `cscli decisions import`.

use anyhow::Context as _;
use serde::Deserialize;

use super::table::Decision;
use super::{BanFile, ListedBan};

/// An alert with its decisions, or a decision by itself.
#[derive(Debug, Deserialize)]
#[serde(untagged)]
enum Item {
    Alert { decisions: Option<Vec<JsonDecision>> },
    Decision(JsonDecision),
}

#[derive(Debug, Deserialize)]
struct JsonDecision {
    value: Option<String>,
    scope: Option<String>,
    #[serde(alias = "scenario")]
    reason: Option<String>,
    duration: Option<String>,
    until: Option<String>,
    #[serde(rename = "type")]
    action: Option<String>,
    simulated: Option<bool>,
}

/// Reads a list of alerts or of decisions. The number of a line is that of the item in the list, from 1.
pub(super) fn read_json(text: &str, file: &mut BanFile) -> anyhow::Result<()> {
    let items: Vec<serde_json::Value> = serde_json::from_str(text).context("the list is not JSON")?;
    for (line, item) in (1..).zip(items) {
        // By its field, because every object could be a decision without any field.
        let item = if item.get("decisions").is_some() {
            Item::Alert { decisions: serde_json::from_value(item.get("decisions").cloned().unwrap_or_default())? }
        } else {
            Item::Decision(serde_json::from_value(item).with_context(|| format!("item {line}"))?)
        };
        let decisions = match item {
            Item::Alert { decisions } => decisions.unwrap_or_default(),
            Item::Decision(decision) => vec![decision],
        };
        for own in decisions {
            // A time first: a duration counts from when the list was written, which may be long ago.
            let end = own.until.as_deref().or(own.duration.as_deref());
            let simulated = own.simulated.unwrap_or(false).then_some("true");
            let decision = Decision {
                value: own.value.as_deref(),
                scope: own.scope.as_deref(),
                action: own.action.as_deref(),
                simulated,
                end,
            };
            let reason = own.reason.clone();
            file.add(ListedBan { line, reason, ..ListedBan::default() }, &decision);
        }
    }
    Ok(())
}
