//! What is posted about an alert, in the form that its receiver takes.

use std::net::IpAddr;

use serde_json::{Map, Value, json};
use sha2::{Digest as _, Sha256};
use threshold_core::Timestamp;
use threshold_core::headers::iso_8601;
use threshold_core::text::printable;

use crate::signals::alerts::{Group, Node, Notice, Why};

/// The longest `dedup_key` that PagerDuty takes, in bytes.
const MAX_DEDUP_KEY: usize = 255;

/// The form of a body.
#[derive(Clone, PartialEq, Eq)]
pub(super) enum Form {
    /// The notice itself.
    Own,
    /// A message of Slack's incoming webhooks.
    Slack,
    /// An event of PagerDuty's Events API v2.
    PagerDuty { routing_key: Box<str> },
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

    /// Returns what tells a receiver from others of its kind: its URL, and at PagerDuty the service of its key.
    pub(super) fn address(&self, url: &http::Uri) -> String {
        match self {
            Self::Own | Self::Slack => url.to_string(),
            Self::PagerDuty { routing_key } => format!("{url} {routing_key}"),
        }
    }

    /// Writes the body of a notice.
    pub(super) fn write(&self, notice: &Notice, node: &Node) -> String {
        match self {
            Self::Own => notice.to_json(node),
            Self::Slack => json!({"text": slack_text(notice, node)}).to_string(),
            Self::PagerDuty { routing_key } => pager_duty(notice, routing_key, node).to_string(),
        }
    }

    /// Writes the bodies of a test message, by which an operator sees that alerts arrive.
    pub(super) fn write_test(&self, node: &Node, now: Timestamp) -> Vec<String> {
        let millis = now.micros().checked_div(1_000);
        let runbook = node.all_runbooks();
        let fields = json!({
            "event": "alert", "alert": "test", "state": "raised", "level": "warning", "key": null, "count": 0, "threshold": 0,
            "periodSec": 0, "since": millis, "at": millis, "peak": 0, "node": &*node.name, "runbook": runbook, "cause": null,
            "rule": null, "addresses": null, "largest": null,
        });
        let text = format!("Threshold on {}: this is a test of alerts, and nothing has happened.", node.name);
        match self {
            Self::Own => vec![printable(&fields.to_string()).into_owned()],
            Self::Slack => vec![json!({"text": format!(":wave: {}", slack_escaped(&text))}).to_string()],
            Self::PagerDuty { routing_key } => {
                let body = |action: &str| {
                    json!({
                        "routing_key": routing_key,
                        "event_action": action,
                        "dedup_key": dedup_key(&node.name, "test", ""),
                        "payload": {
                            "summary": printable(&text), "source": &*node.name, "severity": "warning", "class": "test",
                            "custom_details": fields,
                        },
                    })
                };
                // Resolved at once, or it would wake a person.
                ["trigger", "resolve"].map(|action| body(action).to_string()).into()
            }
        }
    }
}

/// Describes a notice in one sentence. `quoted` writes names that callers or other systems choose.
fn sentence(notice: &Notice, quoted: impl Fn(&str) -> String) -> String {
    let (name, count, per) = (notice.on.name(), notice.count, notice.alert.per.secs_ceil());
    let key = notice.key.as_deref().map(|key| format!(" of {}", quoted(key)));
    let (of, by) = match &notice.group {
        Some(Group { addresses, largest }) => {
            let plural = if *addresses == 1 { "" } else { "es" };
            let by = largest.as_deref().filter(|_| !notice.is_resolved());
            (format!(" of {addresses} other address{plural}"), by.map(|by| format!(" by {}", quoted(by))))
        }
        None => (key.unwrap_or_default(), None),
    };
    let Why { cause, rule } = &notice.why;
    let rule = rule.as_deref().map(|rule| format!("rule {}", quoted(rule)));
    let most: Vec<String> = cause.map(|cause| cause.name().to_owned()).into_iter().chain(rule).collect();
    let most = if most.is_empty() { String::new() } else { format!(", mostly {}", most.join(" by ")) };
    let state = if notice.is_resolved() { "resolved" } else { notice.level().name() };
    format!("{name}{of} {state}: {count} in {per} s{}, threshold {}{most}", by.unwrap_or_default(), notice.threshold())
}

/// Returns the command to begin with.
fn first_look(notice: &Notice) -> String {
    // An edge reports addresses as text. An operator copies what stands here into a shell, and a digest cannot be looked up.
    let is_address = |key: &&str| key.split('/').next().is_some_and(|address| address.parse::<IpAddr>().is_ok());
    let is_plain = |key: &&str| key.bytes().all(|byte| byte.is_ascii_hexdigit() || b":./".contains(&byte));
    match notice.address().map(|address| &**address).filter(is_address).filter(is_plain) {
        Some(address) => format!("`threshold subject edge {address}` shows what stops it"),
        None => "`threshold alerts` (GET /v1/alerts) shows what is raised".to_owned(),
    }
}

fn slack_text(notice: &Notice, node: &Node) -> String {
    let icon = if notice.is_resolved() { ":white_check_mark:" } else { ":rotating_light:" };
    // An edge reports addresses as text. As code it forms no link, and escaped it mentions nobody (`<!channel>`).
    let quoted = |name: &str| format!("`{}`", name.replace('`', "'"));
    let text = slack_escaped(&format!("Threshold on {}: {}", notice.node, sentence(notice, quoted)));
    if notice.is_resolved() {
        return format!("{icon} {text}");
    }
    let first = slack_escaped(&format!("First: {}. Then: {}", first_look(notice), notice.runbook(node)));
    format!("{icon} {text}\n{first}")
}

fn slack_escaped(text: &str) -> String {
    printable(text).replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;")
}

fn pager_duty(notice: &Notice, routing_key: &str, node: &Node) -> Value {
    let key = notice.key.as_deref().unwrap_or_default();
    let seconds = notice.at.micros().checked_div(1_000_000).unwrap_or(0);
    json!({
        "routing_key": routing_key,
        "event_action": if notice.is_resolved() { "resolve" } else { "trigger" },
        // The same for all of an episode: PagerDuty makes one incident of it. Another one for each node, or the end on one node would
        // close the incident of the others.
        "dedup_key": dedup_key(&notice.node, notice.on.name(), key),
        "payload": {
            "summary": printable(&format!("Threshold on {}: {}", notice.node, sentence(notice, str::to_owned))),
            "source": &*notice.node,
            "severity": notice.level().name(),
            "timestamp": iso_8601(seconds),
            "class": notice.on.name(),
            "custom_details": printable_texts(notice.fields(node)),
        },
    })
}

/// Escapes the characters that could make a person read something else, such as one that reverses the text after it.
fn printable_texts(mut fields: Map<String, Value>) -> Map<String, Value> {
    for value in fields.values_mut() {
        if let Value::String(text) = value {
            *text = printable(text).into_owned();
        }
    }
    fields
}

/// Returns the key of an incident. If PagerDuty would not take it as it is, a digest stands in for the names in it.
fn dedup_key(host: &str, name: &str, key: &str) -> String {
    let whole = format!("threshold/{host}/{name}/{key}");
    if whole.len() <= MAX_DEDUP_KEY && printable(&whole) == whole {
        return whole;
    }
    let digest: String = Sha256::digest(format!("{host}/{key}")).iter().map(|byte| format!("{byte:02x}")).collect();
    format!("threshold/{name}/{digest}")
}

#[cfg(test)]
mod tests {
    use threshold_core::alert::{AlertChange, AlertLevel};
    use threshold_core::decision::Cause;
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
            peak: 120,
            since: at,
            at: at.plus(Span::MINUTE),
            node: "node-1".into(),
            why: Why::default(),
            group: None,
        }
    }

    #[test]
    fn slack_gets_a_text_in_which_no_name_is_markup() {
        let raised = notice(Some("<!channel> & `*x*`"), AlertChange::Raised(AlertLevel::Critical));
        let text = |notice: &Notice| {
            let body: Value = serde_json::from_str(&Form::Slack.write(notice, &Node::of_test())).unwrap();
            body["text"].as_str().unwrap().to_owned()
        };
        let expect = ":rotating_light: Threshold on node-1: ip_blocks of `&lt;!channel&gt; &amp; '*x*'` critical: 101 in 60 s, \
                      threshold 100\nFirst: `threshold alerts` (GET /v1/alerts) shows what is raised. Then: docs/runbooks/ip-blocks.md";
        assert_eq!(text(&raised), expect);
        let over = notice(None, AlertChange::Resolved(AlertLevel::Warning));
        assert_eq!(
            text(&over),
            ":white_check_mark: Threshold on node-1: ip_blocks resolved: 101 in 60 s, threshold 20"
        );
    }

    /// Fails if what an edge reports as an address becomes a part of a command that an operator copies.
    #[test]
    fn slack_names_the_command_to_begin_with_for_addresses_alone() {
        let first = |key: &str| first_look(&notice(Some(key), AlertChange::Raised(AlertLevel::Warning)));
        for address in ["203.0.113.7", "2001:db8::7", "2001:db8::/64"] {
            assert_eq!(first(address), format!("`threshold subject edge {address}` shows what stops it"));
        }
        for other in ["#9b1e44c07d2a6f35", "203.0.113.7/$(id)", "203.0.113.7/; id", "localhost", ""] {
            assert!(first(other).starts_with("`threshold alerts`"), "{other}");
        }
    }

    #[test]
    fn a_test_message_is_none_of_the_alerts_and_leaves_no_incident_open() {
        let now = Timestamp::from_secs(1_767_225_600);
        let node = Node::of_test();
        let bodies = |form: Form| -> Vec<Value> {
            form.write_test(&node, now).iter().map(|body| serde_json::from_str(body).unwrap()).collect()
        };
        let own = bodies(Form::Own);
        assert_eq!((own.len(), &own[0]["alert"], &own[0]["node"]), (1, &json!("test"), &json!("node-1")));
        // Receivers find every field that notices have.
        let raised = notice(None, AlertChange::Raised(AlertLevel::Warning)).fields(&node);
        assert!(own[0].as_object().unwrap().keys().eq(raised.keys()), "{own:?}");
        assert!(bodies(Form::Slack)[0]["text"].as_str().unwrap().contains("on node-1: this is a test"));
        let pager = bodies(Form::PagerDuty { routing_key: "key".into() });
        let actions: Vec<_> = pager.iter().map(|body| (&body["event_action"], &body["dedup_key"])).collect();
        let key = json!("threshold/node-1/test/");
        assert_eq!(actions, [(&json!("trigger"), &key), (&json!("resolve"), &key)]);
    }

    #[test]
    fn pager_duty_gets_one_incident_for_an_episode() {
        let form = Form::PagerDuty { routing_key: "0123456789abcdef0123456789abcdef".into() };
        let node = Node::of_test();
        let of = |change| -> Value {
            serde_json::from_str(&form.write(&notice(Some("203.0.113.7"), change), &node)).unwrap()
        };
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
        // A phone shows the summary alone. Woken by leaving out the node.
        let summary = "Threshold on node-1: ip_blocks of 203.0.113.7 critical: 101 in 60 s, threshold 100";
        assert_eq!(critical["payload"]["summary"], summary);
        assert_eq!(critical["payload"]["custom_details"]["runbook"], "docs/runbooks/ip-blocks.md");
        // The key stays with the episode, whatever the server is called by now.
        let mut renamed = Node::of_test();
        renamed.name = "node-2".into();
        let over = form.write(&notice(Some("203.0.113.7"), AlertChange::Resolved(AlertLevel::Critical)), &renamed);
        assert!(over.contains(r#""dedup_key":"threshold/node-1/ip_blocks/203.0.113.7""#), "{over}");
        for odd in ["x".repeat(256), "\u{e9}".repeat(128), "203.0.113.7\u{202e}".to_owned(), "a\nb".to_owned()] {
            let odd = notice(Some(&odd), AlertChange::Raised(AlertLevel::Warning));
            let body: Value = serde_json::from_str(&form.write(&odd, &node)).unwrap();
            assert_eq!(body["dedup_key"].as_str().unwrap().len(), "threshold/ip_blocks/".len() + 64);
            let (summary, key) = (&body["payload"]["summary"], &body["payload"]["custom_details"]["key"]);
            assert!(summary.as_str().unwrap().len() <= 1_024);
            assert!([summary, key].map(|text| text.as_str().unwrap()).iter().all(|text| printable(text) == *text));
        }
    }

    #[test]
    fn without_a_form_the_notice_itself_is_posted() {
        let raised = notice(Some("203.0.113.7\u{202e}"), AlertChange::Raised(AlertLevel::Warning));
        assert_eq!(
            Form::Own.write(&raised, &Node::of_test()),
            r#"{"event":"alert","alert":"ip_blocks","state":"raised","level":"warning","key":"203.0.113.7\u202e","count":101,"#
                .to_owned()
                + r#""threshold":20,"periodSec":60,"since":1767225600000,"at":1767225660000,"peak":120,"node":"node-1","#
                + r#""runbook":"docs/runbooks/ip-blocks.md","cause":null,"rule":null,"addresses":null,"largest":null}"#
        );
    }

    #[test]
    fn a_notice_says_why_and_how_many_addresses_there_are() {
        let group = Some(Group { addresses: 12, largest: Some("203.0.113.9".into()) });
        let why = Why { cause: Some(Cause::Login), rule: Some("<b>".into()) };
        let raised = Notice { why, group, ..notice(None, AlertChange::Raised(AlertLevel::Critical)) };
        let text: Value = serde_json::from_str(&Form::Slack.write(&raised, &Node::of_test())).unwrap();
        assert_eq!(
            text["text"],
            ":rotating_light: Threshold on node-1: ip_blocks of 12 other addresses critical: 101 in 60 s by `203.0.113.9`, \
             threshold 100, mostly login by rule `&lt;b&gt;`\nFirst: `threshold subject edge 203.0.113.9` shows what stops it. \
             Then: docs/runbooks/login-attack.md"
        );
        let own: Value = serde_json::from_str(&Form::Own.write(&raised, &Node::of_test())).unwrap();
        let fields = ["cause", "rule", "addresses", "largest", "runbook"].map(|name| own[name].clone());
        let expect =
            [json!("login"), json!("<b>"), json!(12), json!("203.0.113.9"), json!("docs/runbooks/login-attack.md")];
        assert_eq!(fields, expect);
        let form = Form::PagerDuty { routing_key: "key".into() };
        let pager: Value = serde_json::from_str(&form.write(&raised, &Node::of_test())).unwrap();
        assert_eq!(pager["dedup_key"], "threshold/node-1/ip_blocks/");
        assert_eq!(pager["payload"]["custom_details"]["cause"], "login");
    }
}
