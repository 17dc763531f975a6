//! What is posted about an alert, in the form that its receiver takes.

use serde_json::{Value, json};
use sha2::{Digest as _, Sha256};
use threshold_core::headers::iso_8601;
use threshold_core::text::printable;

use crate::signals::alerts::Notice;

/// The longest `dedup_key` that PagerDuty takes, in characters.
const MAX_DEDUP_KEY: usize = 255;

/// The form of a body.
#[derive(Clone, PartialEq, Eq)]
pub(super) enum Form {
    /// The notice itself.
    Own,
    /// A message of Slack's incoming webhooks.
    Slack,
    /// An event of PagerDuty's Events API v2.
    PagerDuty {
        routing_key: Box<str>,
        /// The name of this machine. Each node raises and resolves alerts of its own.
        host: Box<str>,
    },
}

impl Form {
    /// Returns the kind of receiver, as metrics name it.
    pub(super) const fn kind(&self) -> &'static str {
        match self {
            Self::Own => "webhook",
            Self::Slack => "slack",
            Self::PagerDuty { .. } => "pagerduty",
        }
    }

    /// Writes the body of a notice.
    pub(super) fn write(&self, notice: &Notice) -> String {
        match self {
            Self::Own => notice.to_json(),
            Self::Slack => json!({"text": slack_text(notice)}).to_string(),
            Self::PagerDuty { routing_key, host } => pager_duty(notice, routing_key, host).to_string(),
        }
    }
}

/// Describes a notice in one sentence, with the address as it is.
fn sentence(notice: &Notice, key: &str) -> String {
    let (name, count, per) = (notice.on.name(), notice.count, notice.alert.per.secs_ceil());
    let of = if key.is_empty() { String::new() } else { format!(" of {key}") };
    let state = if notice.is_resolved() { "resolved" } else { notice.level().name() };
    format!("Threshold: {name}{of} {state}: {count} in {per} s, threshold {}", notice.threshold())
}

fn slack_text(notice: &Notice) -> String {
    let icon = if notice.is_resolved() { ":white_check_mark:" } else { ":rotating_light:" };
    // An edge reports addresses as text. As code it forms no link, and escaped it mentions nobody (`<!channel>`).
    let key = notice.key.as_deref().map(|key| format!("`{}`", key.replace('`', "'"))).unwrap_or_default();
    let text = printable(&sentence(notice, &key)).replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;");
    format!("{icon} {text}")
}

fn pager_duty(notice: &Notice, routing_key: &str, host: &str) -> Value {
    let key = notice.key.as_deref().unwrap_or_default();
    let seconds = notice.at.micros().checked_div(1_000_000).unwrap_or(0);
    let details: Value = serde_json::from_str(&notice.to_json()).unwrap_or_default();
    json!({
        "routing_key": routing_key,
        "event_action": if notice.is_resolved() { "resolve" } else { "trigger" },
        // The same for all of an episode: PagerDuty makes one incident of it. Another one for each node, or the end on one node would
        // close the incident of the others.
        "dedup_key": dedup_key(host, notice.on.name(), key),
        "payload": {
            "summary": printable(&sentence(notice, key)),
            "source": host,
            "severity": notice.level().name(),
            "timestamp": iso_8601(seconds),
            "class": notice.on.name(),
            "custom_details": details,
        },
    })
}

fn dedup_key(host: &str, name: &str, key: &str) -> String {
    let whole = format!("threshold/{host}/{name}/{key}");
    if whole.len() <= MAX_DEDUP_KEY {
        return whole;
    }
    let digest: String = Sha256::digest(format!("{host}/{key}")).iter().map(|byte| format!("{byte:02x}")).collect();
    format!("threshold/{name}/{digest}")
}

#[cfg(test)]
mod tests {
    use threshold_core::alert::{AlertChange, AlertLevel};
    use threshold_core::policy::AlertOn;
    use threshold_core::{Span, Timestamp};

    use super::*;

    fn notice(key: Option<&str>, change: AlertChange) -> Notice {
        let at = Timestamp::from_secs(1_767_225_600);
        let on = AlertOn::IpBlocks;
        Notice {
            on,
            alert: on.usual(),
            key: key.map(Into::into),
            change,
            count: 101,
            since: at,
            at: at.plus(Span::MINUTE),
        }
    }

    #[test]
    fn slack_gets_a_text_in_which_no_name_is_markup() {
        let raised = notice(Some("<!channel> & `*x*`"), AlertChange::Raised(AlertLevel::Critical));
        let body: Value = serde_json::from_str(&Form::Slack.write(&raised)).unwrap();
        let text = ":rotating_light: Threshold: ip_blocks of `&lt;!channel&gt; &amp; '*x*'` critical: 101 in 60 s, threshold 100";
        assert_eq!(body, json!({ "text": text }));
        let over = notice(None, AlertChange::Resolved(AlertLevel::Warning));
        let body: Value = serde_json::from_str(&Form::Slack.write(&over)).unwrap();
        let text = ":white_check_mark: Threshold: ip_blocks resolved: 101 in 60 s, threshold 20";
        assert_eq!(body, json!({ "text": text }));
    }

    #[test]
    fn pager_duty_gets_one_incident_for_an_episode() {
        let form = Form::PagerDuty { routing_key: "0123456789abcdef0123456789abcdef".into(), host: "node-1".into() };
        let of = |change| -> Value { serde_json::from_str(&form.write(&notice(Some("203.0.113.7"), change))).unwrap() };
        let warning = of(AlertChange::Raised(AlertLevel::Warning));
        let critical = of(AlertChange::Raised(AlertLevel::Critical));
        let over = of(AlertChange::Resolved(AlertLevel::Critical));
        let actions = [&warning, &critical, &over].map(|body| body["event_action"].as_str().unwrap());
        assert_eq!(actions, ["trigger", "trigger", "resolve"]);
        let keys = [&warning, &critical, &over].map(|body| body["dedup_key"].as_str().unwrap());
        assert_eq!(keys, ["threshold/node-1/ip_blocks/203.0.113.7"; 3]);
        assert_eq!(critical["routing_key"], "0123456789abcdef0123456789abcdef");
        assert_eq!(critical["payload"]["severity"], "critical");
        assert_eq!(critical["payload"]["timestamp"], "2026-01-01T00:01:00Z");
        assert_eq!(critical["payload"]["custom_details"]["key"], "203.0.113.7");
        assert_eq!(critical["payload"]["source"], "node-1");
        let long = notice(Some(&"x".repeat(256)), AlertChange::Raised(AlertLevel::Warning));
        let body: Value = serde_json::from_str(&form.write(&long)).unwrap();
        assert_eq!(body["dedup_key"].as_str().unwrap().len(), "threshold/ip_blocks/".len() + 64);
        assert!(body["payload"]["summary"].as_str().unwrap().len() <= 1_024);
    }

    #[test]
    fn without_a_form_the_notice_itself_is_posted() {
        let raised = notice(None, AlertChange::Raised(AlertLevel::Warning));
        assert_eq!(Form::Own.write(&raised), raised.to_json());
    }
}
