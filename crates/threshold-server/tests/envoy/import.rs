//! Imports the configurations of envoyproxy/ratelimit itself, and asks a server about the one that it shows to new users.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use super::grpc_client::{GrpcClient, RATE_LIMIT};
use super::process::{Scratch, Start};
use super::proto::{Code, Entry, RateLimitDescriptor, RateLimitRequest, RateLimitResponse};

/// The files of `test/config` that are refused, with the line, and what is wrong there. That service loads only the last two of them.
const REFUSED: [(&str, &str); 14] = [
    ("bad_limit_unit.yaml", "6: unknown unit \"foo\""),
    ("bad_yaml.yaml", "1: unclosed quote"),
    ("duplicate_key.yaml", "6: the same key and value as in line 3"),
    ("empty_domain.yaml", "1: there is no `domain`"),
    ("empty_key.yaml", "3: there is no `key`"),
    ("misspelled_key.yaml", "5: unknown field `ratelimit`"),
    ("misspelled_key2.yaml", "7: unknown field `requestsperunit`"),
    ("non_map_list.yaml", "3: expected mapping start"),
    ("non_string_key.yaml", "1: unknown field `0.25`"),
    ("replaces_empty.yaml", "10: replaces: name another limit"),
    ("replaces_self.yaml", "10: replaces: name another limit"),
    ("unlimited_with_unit.yaml", "6: unlimited: a limit with a unit is none"),
    ("duplicate_domain.yaml", "1: no descriptor has a rate_limit that applies: the policy would be empty"),
    ("wildcard.yaml", "19: \"bar*b\": there, only a star at the end is a wildcard"),
];

fn folder() -> PathBuf {
    std::env::var("THRESHOLD_RATELIMIT").expect("THRESHOLD_RATELIMIT is the source of envoyproxy/ratelimit").into()
}

fn threshold(args: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_threshold")).args(args).env_clear().output().unwrap()
}

/// Collects the configurations below a folder.
fn files(folder: &Path, found: &mut BTreeMap<String, PathBuf>) {
    for entry in std::fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        if path.is_dir() {
            files(&path, found);
        } else if path.extension().is_some_and(|extension| extension == "yaml") {
            found.insert(path.strip_prefix(self::folder()).unwrap().display().to_string(), path);
        }
    }
}

/// Its example was refused, with a parent's limit, a child's default and a child's value.
///
/// Woken by: refusing what can be decided alike, and an error without the line.
#[test]
fn every_configuration_of_envoyproxy_ratelimit_is_imported_or_refused_with_its_line() {
    let mut found = BTreeMap::new();
    for part in ["examples/ratelimit", "test/config", "test/integration/runtime"] {
        files(&folder().join(part), &mut found);
    }
    assert_eq!(found.len(), 25, "{found:?}");
    for (name, path) in &found {
        let output = threshold(&["import", "envoy-ratelimit", path.to_str().unwrap()]);
        let (text, said) = (String::from_utf8(output.stdout).unwrap(), String::from_utf8(output.stderr).unwrap());
        let refused = REFUSED.iter().find(|(own, _)| Path::new(name) == Path::new("test/config").join(own));
        match refused {
            Some((_, expected)) => {
                assert_eq!((output.status.code(), text.as_str()), (Some(2), ""), "{name}");
                assert!(said.contains(&format!("{}:{expected}", path.display())), "{name}: {said}");
            }
            None => {
                assert!(output.status.success(), "{name}: {said}");
                let policy = Scratch::file("policy.toml", &text);
                let lint = threshold(&["lint", policy.path().to_str().unwrap()]);
                assert!(lint.status.success(), "{name}: {}", String::from_utf8_lossy(&lint.stdout));
            }
        }
    }
}

/// The entries of a descriptor, and the limit that the service applies to it; `None` is none.
type Decided = (&'static [(&'static str, &'static str)], Option<u32>);

/// Descriptors of that example.
const DECIDED: [Decided; 14] = [
    (&[("foo", "any")], Some(2)),
    (&[("foo", "any"), ("bar", "any")], Some(3)),
    (&[("foo", "any"), ("bar", "bkthomps")], Some(1)),
    (&[("foo", "any"), ("baz", "any")], Some(1)),
    (&[("foo", "any"), ("baz", "not-so-shady")], Some(3)),
    (&[("foo", "any"), ("bay", "any")], None),
    (&[("foo", "any"), ("bar", "any"), ("bar", "any")], None),
    (&[("foo", "any"), ("other", "any")], None),
    (&[("bar", "any")], None),
    (&[("bar", "any"), ("foo", "any")], None),
    (&[("category", "account")], Some(4)),
    (&[("category", "other")], None),
    (&[("source_cluster", "proxy"), ("destination_cluster", "mock")], Some(1)),
    (&[("source_cluster", "proxy"), ("destination_cluster", "other")], None),
];

#[test]
fn the_example_of_envoyproxy_ratelimit_limits_what_it_limits_there() {
    let file = folder().join("examples/ratelimit/config/example.yaml");
    let text = threshold(&["import", "envoy-ratelimit", file.to_str().unwrap()]).stdout;
    let policy = Scratch::file("policy.toml", &String::from_utf8(text).unwrap());
    let server = Start { args: &["--grpc", "127.0.0.1:0"], policy: Some(policy.path()), ..Start::default() }.server();
    let line = server.wait_for_log("listening");
    let (_, address) = line.split_once("grpc=").and_then(|(_, rest)| rest.split_once("://")).unwrap();
    let mut client = GrpcClient::connect(address.split(['"', ' ']).next().unwrap().parse().unwrap());
    let mut ask = |entries: &[(&str, &str)], hits: u64| -> RateLimitResponse {
        let entry = |(key, value): &(&str, &str)| Entry { key: (*key).to_owned(), value: (*value).into() };
        let entries = entries.iter().map(entry).collect();
        let descriptor = RateLimitDescriptor { entries, hits_addend: Some(hits), ..RateLimitDescriptor::default() };
        let request = RateLimitRequest { domain: "rl".to_owned(), descriptors: vec![descriptor], hits_addend: 0 };
        client.call(RATE_LIMIT, &request).unwrap()
    };
    for (entries, expected) in DECIDED {
        let limit = ask(entries, 0).statuses[0].current_limit.as_ref().map(|limit| limit.requests_per_unit);
        assert_eq!(limit, expected, "{entries:?}");
        // More than it ever holds.
        let answer = ask(entries, expected.map_or(1_000, |limit| u64::from(limit) + 1));
        assert_eq!(answer.overall_code(), if expected.is_some() { Code::OverLimit } else { Code::Ok }, "{entries:?}");
    }
    assert_eq!(ask(&[("foo", "any"), ("bar", "banned")], 1).overall_code(), Code::OverLimit);
    // It only watches.
    assert_eq!(ask(&[("foo", "any"), ("baz", "shady")], 9).overall_code(), Code::Ok);
}
