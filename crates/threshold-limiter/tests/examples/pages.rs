//! The commands in the documentation of each example give the results that the comments beside them show.

use std::process::Command;

use crate::console;
use crate::outside::Outside;
use crate::readme::{documentation, read};
use crate::running::Running;

/// Parses the statuses of a comment: "200", "401, and why", "200 twice, then 429", "401 five times, then 429".
fn promised(comment: &str) -> Vec<u16> {
    let number = |word: &str| word.get(..3)?.parse::<u16>().ok();
    let mut words = comment.split_whitespace();
    let Some(first) = words.next().and_then(number) else { return Vec::new() };
    let times = match words.next() {
        Some("twice,") => 2,
        Some("three") => 3,
        Some("five") => 5,
        _ => return vec![first],
    };
    let then = comment.split_once("then ").and_then(|(_, then)| number(then)).expect("what comes then");
    [vec![first; times], vec![then]].concat()
}

/// Starts an example with the command of its documentation, and sends the documented requests.
#[track_caller]
fn check(name: &str) {
    let outside = Outside::start();
    let url = outside.url();
    let commands = console::commands(&documentation(&read(&format!("examples/{name}.rs"))));
    let (asked, start): (Vec<_>, Vec<_>) = commands.iter().partition(|shown| shown.command.starts_with("curl"));
    assert!(start.last().unwrap().command.ends_with(&format!("cargo run --example {name}")), "{start:?}");
    let words = start.iter().flat_map(|shown| shown.command.split(' '));
    let mut variables: Vec<(&str, &str)> = words.filter_map(|word| word.split_once('=')).collect();
    variables.extend([("BOT_API", url.as_str()), ("RELAY", &url)]);
    let running = Running::start(name, &variables);
    let mut kept = Vec::new();
    for shown in asked {
        let command = shown.command.replace("127.0.0.1:3000", &running.address);
        let (_, comment) = command.split_once("# ").unwrap_or_default();
        for status in promised(comment) {
            let printed = Command::new("sh").args(["-c", &command]).output().unwrap();
            let head = String::from_utf8(printed.stdout).unwrap();
            assert!(head.starts_with(&format!("HTTP/1.1 {status} ")), "$ {command}\n{head}");
            kept.push(status);
        }
    }
    assert!(!kept.is_empty(), "{name} promises nothing");
}

#[test]
fn the_documented_commands_of_every_example_work() {
    for name in ["axum", "login", "mailer", "per_ip", "weather", "webhook"] {
        check(name);
    }
}
