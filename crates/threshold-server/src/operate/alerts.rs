//! `threshold alerts`: what is raised, and a test message to the receivers.

use std::fmt::Write as _;
use std::time::Duration;

use serde_json::Value;

use super::{AlertsArgs, AlertsCommand, Api, columns, millis, shown};
use threshold_rehearsal::Report;

/// How long a test may take: the server waits 10 seconds for each of two requests.
const TEST_TIMEOUT: Duration = Duration::from_secs(30);

/// Lists the alerts that are raised, or sends a test message.
pub(crate) fn alerts(args: &AlertsArgs) -> anyhow::Result<Report> {
    match args.command {
        Some(AlertsCommand::Test) => test(args),
        None => list(args),
    }
}

fn list(args: &AlertsArgs) -> anyhow::Result<Report> {
    let raised = Api::new(&args.server)?.call("GET", "/v1/alerts?state=raised", None)?;
    let items = raised.as_array().map_or(&[][..], Vec::as_slice);
    let text = match items {
        _ if args.json => format!("{raised:#}\n"),
        [] => "no alert is raised\n".to_owned(),
        items => {
            columns(&["ALERT", "LEVEL", "KEY", "COUNT", "PEAK", "SINCE", "CAUSE", "RULE", "RUNBOOK"], items, |alert| {
                let field = |name: &str| alert.get(name).unwrap_or(&Value::Null);
                let [name, level, key, count, peak, cause, rule, runbook] =
                    ["alert", "level", "key", "count", "peak", "cause", "rule", "runbook"]
                        .map(|name| shown(field(name)));
                let key = match field("addresses") {
                    Value::Null => key,
                    addresses => format!("{addresses} others, {}", shown(field("largest"))),
                };
                vec![name, level, key, count, peak, millis(field("since")), cause, rule, runbook]
            })
        }
    };
    Ok(Report { text, code: 0 })
}

fn test(args: &AlertsArgs) -> anyhow::Result<Report> {
    let answer = Api::with_timeout(&args.server, TEST_TIMEOUT)?.call("POST", "/v1/alerts/test", None)?;
    let receivers = answer.get("receivers").and_then(Value::as_array).map_or(&[][..], Vec::as_slice);
    let is_ok = |receiver: &Value| receiver.get("ok") == Some(&Value::Bool(true));
    let mut text = String::new();
    for receiver in receivers {
        let field = |name: &str| shown(receiver.get(name).unwrap_or(&Value::Null));
        let _ = match is_ok(receiver) {
            true => writeln!(text, "{}: accepted", field("name")),
            false => writeln!(text, "{}: failed: {}", field("name"), field("error")),
        };
    }
    if receivers.is_empty() {
        text.push_str("alerts go to the log only: THRESHOLD_ALERT_URL of the server names receivers\n");
    }
    if args.json {
        text = format!("{answer:#}\n");
    }
    Ok(Report { text, code: u8::from(receivers.is_empty() || !receivers.iter().all(is_ok)) })
}
