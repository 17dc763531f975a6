//! `threshold tail`: prints events as they come.

use std::io::{BufRead as _, Write as _};

use serde_json::Value;
use threshold_core::text::printable;

use super::{Api, TailArgs, encoded, millis, shown};
use crate::Report;

pub(crate) fn run(args: &TailArgs) -> anyhow::Result<Report> {
    let filters = args.filters.iter().map(|(name, value)| format!("{}={}", encoded(name), encoded(value)));
    let query = filters.collect::<Vec<_>>().join("&");
    let stream = Api::endless(&args.server)?.stream(&format!("/v1/events?{query}"))?;
    let mut out = std::io::stdout().lock();
    for line in stream.lines() {
        let line = line?;
        let Some(event) = line.strip_prefix("data: ") else { continue };
        let text = if args.json { printable(event).into_owned() } else { described(event) };
        // A closed pipe (`| head`) is not an error.
        if writeln!(out, "{text}").and_then(|()| out.flush()).is_err() {
            break;
        }
    }
    Ok(Report { text: String::new(), code: 0 })
}

/// Describes an event on one line.
fn described(event: &str) -> String {
    let Ok(event) = serde_json::from_str::<Value>(event) else { return String::new() };
    let field = |name: &str| event.get(name).unwrap_or(&Value::Null);
    let mut text = format!("{}  {:<5}", millis(field("at")), shown(field("verdict")));
    for (name, word) in
        [("layer", ""), ("rule", ""), ("endpoint", ""), ("tenant", "tenant "), ("userId", "user "), ("ip", "address ")]
    {
        if !field(name).is_null() {
            text.push_str(&format!("  {word}{}", shown(field(name))));
        }
    }
    if let Some(strikes) = field("strikes").as_u64() {
        text.push_str(&format!("  strike {strikes}"));
    }
    if let Some(count @ 2..) = field("count").as_u64() {
        text.push_str(&format!("  ×{count}"));
    }
    if !field("traceId").is_null() {
        text.push_str(&format!("  trace {}", shown(field("traceId"))));
    }
    printable(&text).into_owned()
}
