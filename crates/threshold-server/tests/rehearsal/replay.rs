//! Tests `threshold replay`.

use std::collections::BTreeMap;
use std::io::Write as _;

use serde_json::Value;

use threshold_core::text::is_hidden;

use crate::kinds;
use crate::logs::{combined_lines, events, json_lines, with_sizes_and_misses};
use crate::recount::{POLICY, Recount, recount};
use crate::running::{Scratch, threshold, threshold_with};

const SIMPLE: &str = "[[rule]]\nname = \"address\"\nper = [\"ip\"]\nlimit = \"6/min\"\n";

fn as_recount(answer: &Value) -> Recount {
    let number = |name: &str| answer[name].as_u64().unwrap();
    let rules = answer["rules"].as_array().unwrap();
    let by_rule = |figure: &str| {
        let mut figures = BTreeMap::new();
        for name in ["address", "customer", "person", "guesses"] {
            let rule = rules.iter().find(|rule| rule["rule"] == name).unwrap();
            figures.insert(name, rule[figure].as_u64().unwrap());
        }
        figures
    };
    let penalties = answer["penalties"].as_array().unwrap();
    let penalty = |name: &str| penalties.iter().map(|own| own[name].as_u64().unwrap()).sum();
    let mut met = by_rule("met");
    // A penalty denies before limits are checked, but the rules still count as matched.
    met.retain(|_, count| *count > 0);
    let mut denied = by_rule("denied");
    denied.retain(|_, count| *count > 0);
    Recount {
        allowed: number("allowed"),
        warned: number("warned"),
        denied: number("denied"),
        banned: number("banned"),
        subjects: number("subjects"),
        touched: number("touched"),
        by_rule: denied,
        penalties: (penalty("denied"), penalty("banned")),
        met,
    }
}

/// Seen to fail with a burst one higher, with a rung left out, with `count` ignored, and with lines left in
/// the order of the file.
#[test]
fn the_numbers_are_those_of_a_slow_recount() {
    let policy = Scratch::new("recount.toml", POLICY);
    for seed in 1..=4 {
        let events = events(seed, 6_000);
        let log = Scratch::new("recount.json", json_lines(&events));
        let answer = threshold(&["replay", policy.path(), log.path(), "--json"]).json();
        let expected = recount(&events);
        assert!(expected.warned > 0 && expected.banned > 0 && expected.by_rule.len() == 4, "seed {seed}: {expected:?}");
        assert_eq!(as_recount(&answer), expected, "seed {seed}");
        assert_eq!(answer["lines"], 6_000);
        assert_eq!(answer["unreadable"], 0);
    }
}

/// An analyst rehearsed a rule that counts 404s. 90 of 1,753 addresses had one, and the page put 1,702 of them at 30 % of the
/// limit: a peak was read between the charge and the answer that gave it back. Seen to fail with that, and with observed
/// rules left out of `full`.
#[test]
fn rules_of_every_kind_have_the_numbers_of_a_slow_recount() {
    let policy = Scratch::new("kinds.toml", kinds::POLICY);
    for seed in 1..=4 {
        let events = with_sizes_and_misses(seed, 4_000);
        let log = Scratch::new("kinds.json", json_lines(&events));
        let answer = threshold(&["replay", policy.path(), log.path(), "--json"]).json();
        let expected = kinds::recount(&events);
        let [denied, banned, slowed] = expected.penalties;
        assert!(denied > 0 && banned > 0 && slowed > 0, "seed {seed}: {expected:?}");
        assert!(["watched", "misses", "errors", "volume", "pace"].iter().all(|rule| expected.rules[rule].full > 0));
        assert_eq!(as_counts(&answer), expected, "seed {seed}");
    }
}

fn as_counts(answer: &Value) -> kinds::Counts {
    let mut counts = kinds::Counts { touched: answer["touched"].as_u64().unwrap(), ..kinds::Counts::default() };
    for verdict in ["allowed", "warned", "slowed", "denied", "banned"] {
        counts.verdicts.insert(verdict, answer[verdict].as_u64().unwrap());
    }
    for name in ["watched", "misses", "errors", "volume", "pace", "open"] {
        let rule = answer["rules"].as_array().unwrap().iter().find(|rule| rule["rule"] == name).unwrap();
        let number = |value: &Value| value.as_u64().unwrap();
        let peaks = rule["peakUse"].as_object().map(|peaks| {
            let peaks = ["median", "p99", "most"].map(|name| number(&peaks[name]));
            (number(&rule["keys"]), number(&rule["keysCharged"]), peaks)
        });
        let [met, full, denied, banned, warned] =
            ["met", "full", "denied", "banned", "warned"].map(|name| number(&rule[name]));
        counts.rules.insert(name, kinds::RuleCounts { met, full, denied, banned, warned, peaks });
    }
    for own in answer["penalties"].as_array().unwrap() {
        for (sum, name) in counts.penalties.iter_mut().zip(["denied", "banned", "slowed"]) {
            *sum += own[name].as_u64().unwrap();
        }
    }
    counts
}

#[test]
fn the_same_traffic_gives_the_same_numbers_in_every_format() {
    let policy = Scratch::new("simple.toml", SIMPLE);
    let events = events(7, 3_000);
    let text = combined_lines(&events);
    let plain = Scratch::new("plain.log", &text);
    let expected = threshold(&["replay", policy.path(), plain.path(), "--json"]).json();
    assert!(expected["denied"].as_u64().unwrap() > 0);
    let check = |what: &str, answer: &Value| {
        for figure in ["requests", "allowed", "denied", "subjects", "touched", "series", "worst"] {
            assert_eq!(answer[figure], expected[figure], "{what}: {figure}");
        }
    };
    let json = Scratch::new("as.json", json_lines(&events));
    check("json", &threshold(&["replay", policy.path(), json.path(), "--json"]).json());
    let mut gzip = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::fast());
    gzip.write_all(text.as_bytes()).unwrap();
    let gzip = Scratch::new("log.gz", gzip.finish().unwrap());
    check("gzip", &threshold(&["replay", policy.path(), gzip.path(), "--json"]).json());
    // Two frames in one file, as after `cat a.zst b.zst`.
    let (first, second) = text.split_at(text.match_indices('\n').nth(999).unwrap().0 + 1);
    let frame = |text: &str| zstd::encode_all(text.as_bytes(), 1).unwrap();
    let zstd = Scratch::new("log.zst", [frame(first), frame(second)].concat());
    check("zstd", &threshold(&["replay", policy.path(), zstd.path(), "--json"]).json());
    check("stdin", &threshold_with(&["replay", policy.path(), "-", "--json"], text.as_bytes()).json());
    let (one, two) = (Scratch::new("1.log", first), Scratch::new("2.log", second));
    check("two files", &threshold(&["replay", policy.path(), two.path(), one.path(), "--json"]).json());
}

#[test]
fn users_and_tenants_come_from_the_fields_that_are_named() {
    let policy = "[[rule]]\nname = \"t\"\nper = [\"tenant\"]\nlimit = \"1/h\"\non_missing = \"skip\"\n\
                  [[rule]]\nname = \"u\"\nper = [\"user\"]\nlimit = \"2/h\"\non_missing = \"skip\"\n";
    let policy = Scratch::new("fields.toml", policy);
    let line = "{\"time\":1431856800,\"client\":\"192.0.2.1\",\"auth\":{\"sub\":\"ada\"},\"org\":\"acme\"}\n";
    let args = ["replay", policy.path(), "-", "--json", "--field", "ip=client", "--user-field", "auth.sub"];
    let answer = threshold_with(&args, line.repeat(3).as_bytes()).json();
    assert_eq!((&answer["denied"], &answer["users"]["all"]), (&1.into(), &1.into()));
    assert_eq!((&answer["worst"][0]["kind"], &answer["worst"][0]["subject"]), (&"user".into(), &"ada".into()));
    let more: Vec<&str> = args.into_iter().chain(["--tenant-field", "org"]).collect();
    let answer = threshold_with(&more, line.repeat(3).as_bytes()).json();
    assert_eq!((&answer["denied"], &answer["worst"][0]["subject"]), (&2.into(), &"acme".into()));
    // Without the fields no request has a user, and the report notes that.
    let nobody = line.replace("client", "wherefrom").repeat(3);
    let text = threshold_with(&["replay", policy.path(), "-"], nobody.as_bytes()).out;
    for note in ["3 requests have no address", "names no users", "--tenant-field NAME"] {
        assert!(text.contains(note), "{note} is missing:\n{text}");
    }
    let run = threshold_with(&["replay", policy.path(), "-", "--field", "adress=x"], b"");
    assert!(run.code == 2 && run.err.contains("\"adress\""), "{}", run.err);
}

#[test]
fn against_another_policy_both_directions_are_reported() {
    let tight = Scratch::new("tight.toml", SIMPLE);
    let loose = Scratch::new("loose.toml", SIMPLE.replace("6/min", "9/min").replace("address", "wide"));
    let log = Scratch::new("against.log", combined_lines(&events(3, 3_000)));
    let run = |policy: &Scratch, other: &Scratch| {
        threshold(&["replay", policy.path(), log.path(), "--against", other.path(), "--json"]).json()
    };
    let (forth, back) = (run(&tight, &loose), run(&loose, &tight));
    assert_eq!(forth["against"]["newlyStopped"]["requests"], back["against"]["noLongerStopped"]["requests"]);
    assert_eq!(forth["against"]["newlyStopped"]["rules"][0]["rule"], "address");
    let denied = |answer: &Value| answer["denied"].as_u64().unwrap();
    let newly = forth["against"]["newlyStopped"]["requests"].as_u64().unwrap();
    let no_longer = forth["against"]["noLongerStopped"]["requests"].as_u64().unwrap();
    assert!(newly > 0);
    assert_eq!(denied(&forth) - denied(&back), newly - no_longer);
    let same = run(&tight, &tight);
    assert_eq!(same["against"]["newlyStopped"]["requests"], 0);
    let text = threshold(&["replay", tight.path(), log.path(), "--against", loose.path()]).out;
    assert!(text.contains("newly stopped") && text.contains("no longer stopped"), "{text}");
}

#[test]
fn lines_that_cannot_be_parsed_are_reported_and_skipped() {
    let policy = Scratch::new("broken.toml", SIMPLE);
    let mut log = combined_lines(&events(5, 50));
    log.push_str("what is this\n");
    let run = threshold_with(&["replay", policy.path(), "-"], log.as_bytes());
    assert_eq!(run.code, 0, "{}", run.err);
    assert!(
        run.out.contains("1 of 51 lines could not be read") && run.out.contains("<stdin>:51: no [time]"),
        "{}",
        run.out
    );
    let check = |what: &str, input: &[u8], expect: &str| {
        let run = threshold_with(&["replay", policy.path(), "-"], input);
        assert!(run.code == 2 && run.out.is_empty(), "{what}: {}", run.out);
        assert!(run.err.contains(expect), "{what}: {}", run.err);
    };
    check("an empty file", b"", "the log is empty");
    check("binary", &[0x7f, 0x45, 0x4c, 0x46, 0xff, 0xfe, 0x00, 0x80].repeat(200), "not UTF-8 text");
    check("hardly a gzip", &[0x1f, 0x8b, 0x00, 0x00, 0x01], "is truncated");
    let run = threshold(&["replay", policy.path(), "/no/such/access.log"]);
    assert!(run.code == 2 && run.err.contains("/no/such/access.log"), "{}", run.err);
}

/// A byte order mark, CRLF line breaks, a user agent and a path in Latin-1, a line of a megabyte, and binary data.
#[test]
fn lines_with_invalid_utf_8_are_read() {
    let policy = Scratch::new("bytes.toml", SIMPLE);
    let line = |path: &[u8], agent: &[u8]| {
        let before = b"192.0.2.1 - - [17/May/2015:10:05:03 +0000] \"GET /";
        [before, path, b" HTTP/1.1\" 200 1 \"-\" \"", agent, b"\"\r\n"].concat()
    };
    let mut log = "\u{feff}".as_bytes().to_vec();
    log.extend(line(b"", b"curl"));
    log.extend(line(b"", b"caf\xe9"));
    log.extend(line(b"caf\xe9", b"\0"));
    log.extend(line(&[b'x'; 1 << 20], b""));
    log.extend(b"\xff\xfe\0\n");
    let answer = threshold_with(&["replay", policy.path(), "-", "--json"], &log).json();
    let figure = |name: &str| answer[name].as_u64().unwrap();
    assert_eq!((figure("lines"), figure("requests"), figure("unreadable")), (5, 3, 2), "{answer}");
    let text = threshold_with(&["replay", policy.path(), "-"], &log).out;
    assert!(text.contains("<stdin>:4: the line is longer than 128 KiB\n"), "{text}");
    assert!(text.contains("<stdin>:5: it is not UTF-8 text: \u{fffd}"), "{text}");
}

#[test]
fn a_truncated_gzip_is_read_up_to_its_end() {
    let policy = Scratch::new("cut.toml", SIMPLE);
    let mut gzip = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::default());
    gzip.write_all(combined_lines(&events(5, 5_000)).as_bytes()).unwrap();
    let mut bytes = gzip.finish().unwrap();
    bytes.truncate(bytes.len() / 2);
    let file = Scratch::new("cut.log.gz", bytes);
    let run = threshold(&["replay", policy.path(), file.path()]);
    assert_eq!(run.code, 0, "{}", run.err);
    assert!(run.out.contains("is truncated"), "{}", run.out);
    let answer = threshold(&["replay", policy.path(), file.path(), "--json"]).json();
    let requests = answer["requests"].as_u64().unwrap();
    assert!((1_000..4_500).contains(&requests), "{requests}");
    assert_eq!(answer["problems"].as_array().unwrap().len(), 1);
}

#[test]
fn control_characters_of_a_log_are_escaped() {
    let rule = "[[rule]]\nname = \"u\"\nper = [\"user\"]\nlimit = \"1/h\"\n";
    let policy = Scratch::new("esc.toml", rule);
    let line = "{\"time\":1431856800,\"ip\":\"192.0.2.1\",\"user\":\"\\u001b[2Jada\u{202e}\u{2028}\u{9b}\"}\n\u{1b}[31m\u{202e}\n";
    let log = line.repeat(3);
    let hidden = |text: &str| text.chars().any(|c| is_hidden(c) && !matches!(c, '\n' | '\t'));
    let run = threshold_with(&["replay", policy.path(), "-"], log.as_bytes());
    assert!(run.code == 0 && run.out.contains("\\u001b[2Jada\\u202e\\u2028\\u009b"), "{}", run.out);
    assert!(run.out.contains("\\u001b[31m\\u202e") && !hidden(&run.out), "{}", run.out);
    let json = threshold_with(&["replay", policy.path(), "-", "--json"], log.as_bytes());
    assert!(!hidden(&json.out) && json.out.contains("ada\\u202e"), "{}", json.out);
    json.json();
    let open = Scratch::new("esc-open.toml", format!("[identity]\nlog_identifiers = true\n{}", rule));
    let page = Scratch::new("esc.html", "");
    threshold_with(&["replay", open.path(), "-", "--html", page.path()], log.as_bytes());
    let page = std::fs::read_to_string(page.path()).unwrap();
    assert!(!hidden(&page) && page.contains("\\u001b[2Jada\\u202e"), "{page}");
}

#[test]
fn the_page_is_self_contained_and_hides_names_as_log_lines_do() {
    let policy = "[identity]\n[[rule]]\nname = \"<u>\"\nper = [\"user\"]\nlimit = \"1/h\"\n";
    let line = "{\"time\":1431856800,\"ip\":\"192.0.2.1\",\"user\":\"<script>alert(1)</script>\",\"path\":\"/\"}\n";
    let page = Scratch::new("page.html", "");
    let run = |policy: &str| {
        let policy = Scratch::new("<page>.toml", policy);
        let args = ["replay", policy.path(), "-", "--html", page.path(), "--against", policy.path()];
        let run = threshold_with(&args, line.repeat(5).as_bytes());
        assert_eq!(run.code, 0, "{}", run.err);
        std::fs::read_to_string(page.path()).unwrap()
    };
    let text = run(policy);
    for plot in [
        "over time",
        "against the limit",
        "affected subjects",
        "Hour and weekday",
        "<svg",
        "prefers-color-scheme",
        "@media print",
    ] {
        assert!(text.contains(plot), "{plot} is missing");
    }
    assert!(!text.contains("<u>") && !text.contains("<page>"), "what comes from outside is not escaped");
    assert!(
        !text.contains("script") && !text.contains("http") && !text.contains("src="),
        "the page wants more than itself"
    );
    let digest = text.split("user #").nth(1).unwrap();
    assert!(digest.chars().take(16).all(|c| c.is_ascii_hexdigit()), "{digest}");
    let text = run(&policy.replace("[identity]", "[identity]\nlog_identifiers = true"));
    assert!(text.contains("&lt;script&gt;") && !text.contains("<script"), "{text}");
}
