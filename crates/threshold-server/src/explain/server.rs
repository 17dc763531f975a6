//! `threshold explain --server`: asks a running server, so that bans and what is used count too.

use std::fmt::Write as _;

use serde_json::{Map, Value, json};

use super::request_line;
use crate::cli::ExplainArgs;
use crate::operate::{Api, moment, shown};
use threshold_rehearsal::Report;

pub(super) fn run(args: &ExplainArgs) -> anyhow::Result<Report> {
    // Not the default address: a policy that was forgotten would look like a server that is down.
    anyhow::ensure!(Api::is_named(&args.server), "give a policy file, or a server with --server or THRESHOLD_SERVER");
    // A caller's token is enough, because an explanation changes nothing.
    let explained = Api::for_caller(&args.server)?.call("POST", "/v1/explain", Some(&body(args)))?;
    if args.json {
        return Ok(Report { text: format!("{explained:#}\n"), code: 0 });
    }
    Ok(Report { text: to_text(args, &explained), code: 0 })
}

/// Returns the facts of the command line as the API has them.
fn body(args: &ExplainArgs) -> Value {
    let mut body = Map::new();
    let texts = [
        ("method", &args.method),
        ("path", &args.path),
        ("host", &args.host),
        ("tenant", &args.tenant),
        ("user", &args.user),
        ("tier", &args.tier),
        ("endpoint", &args.endpoint),
        ("category", &args.category),
    ];
    let mut put = |name: &str, value: Option<Value>| body.extend(value.map(|value| (name.to_owned(), value)));
    for (name, text) in texts {
        put(name, text.as_ref().map(|text| json!(text)));
    }
    put("ip", args.ip.map(|ip| json!(ip.to_string())));
    put("cost", args.cost.map(|cost| json!(cost)));
    put("bytes", args.bytes.map(|bytes| json!(bytes)));
    let pairs = |pairs: &[(String, String)]| -> Map<String, Value> {
        pairs.iter().map(|(name, value)| (name.clone(), json!(value))).collect()
    };
    put("facts", (!args.facts.is_empty()).then(|| pairs(&args.facts).into()));
    put("headers", (!args.headers.is_empty()).then(|| pairs(&args.headers).into()));
    let costs: Map<String, Value> = args.costs.iter().map(|(name, cost)| (name.clone(), json!(cost))).collect();
    put("costs", (!costs.is_empty()).then(|| costs.into()));
    Value::Object(body)
}

fn to_text(args: &ExplainArgs, explained: &Value) -> String {
    let field = |value: &Value, name: &str| value.get(name).cloned().unwrap_or_default();
    let list = |name: &str| field(explained, name).as_array().cloned().unwrap_or_default();
    let mut text = request_line(args);
    let _ = writeln!(text, "category {}\n", shown(&field(&field(explained, "facts"), "category")));
    let penalties = list("penalties");
    if !penalties.is_empty() {
        text.push_str("Denied, whatever is left of its limits:\n");
    }
    for penalty in &penalties {
        let until = field(penalty, "until");
        let until = if until.is_null() { "for good".to_owned() } else { format!("until {}", moment(&until)) };
        let id = field(penalty, "id");
        let id = if id.is_null() { String::new() } else { format!(", ban {}", shown(&id)) };
        let (layer, verdict) = (shown(&field(penalty, "layer")), shown(&field(penalty, "verdict")));
        let key = field(penalty, "key");
        let key = if key.is_null() { String::new() } else { format!(" {}", shown(&key)) };
        let reason = field(penalty, "reason");
        let reason = if reason.is_null() { String::new() } else { format!(": {}", shown(&reason)) };
        let _ = writeln!(text, "  {verdict} on {layer}{key}{reason} ({until}{id})");
    }
    if !penalties.is_empty() {
        text.push('\n');
    }
    let (met, unmet): (Vec<Value>, Vec<Value>) = list("rules").into_iter().partition(|rule| rule["matched"] == true);
    if met.is_empty() {
        text.push_str("No rule limits this request.\n");
    }
    let names = met.iter().chain(&unmet).map(|rule| shown(&rule["rule"]).chars().count()).max().unwrap_or(0);
    for rule in &met {
        let binds = if rule["binding"] == true { ", binds" } else { "" };
        let passes = &rule["passesAt"];
        let passes = if rule["allowed"] == false && !passes.is_null() {
            format!(", passes at {}", moment(passes))
        } else {
            String::new()
        };
        let limit = shown(&rule["limit"]);
        // A request that is banned is not counted, so that its budgets are not read.
        let left = if rule["before"].is_null() {
            format!("limit {limit}")
        } else {
            format!("{} of {limit} left", shown(&rule["before"]))
        };
        // A missing identity or tier, or another reading of the path.
        let why = if rule["why"] == "met" { String::new() } else { format!(": {}", shown(&rule["why"])) };
        let (layer, name, key) = (shown(&rule["layer"]), shown(&rule["rule"]), shown(&rule["key"]));
        let _ = writeln!(text, "  {layer:<8}  {name:<names$}  {left}  {key}{binds}{passes}{why}");
    }
    if !unmet.is_empty() {
        text.push_str("\nNot applied:\n");
    }
    for rule in &unmet {
        let _ =
            writeln!(text, "  {:<8}  {:<names$}  {}", shown(&rule["layer"]), shown(&rule["rule"]), shown(&rule["why"]));
    }
    let _ = writeln!(text, "\nSuch a request now: {}", shown(&field(&field(explained, "decision"), "verdict")));
    text
}
