//! Tests the program's arguments, output and exit codes.

#![expect(clippy::unwrap_used, reason = "a test that cannot go on should say so loudly, on the line where it stops")]

use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use threshold_core::text::is_hidden;

/// The output and the exit code of a run.
struct Run {
    code: i32,
    out: String,
    err: String,
}

fn threshold(args: &[&str]) -> Run {
    threshold_with(args, "", &[])
}

fn threshold_with(args: &[&str], input: &str, variables: &[(&str, &str)]) -> Run {
    let mut child = Command::new(env!("CARGO_BIN_EXE_threshold"))
        .args(args)
        .env_clear()
        .envs(variables.iter().copied())
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    // A program that does not read its input may have ended.
    let _ = child.stdin.take().unwrap().write_all(input.as_bytes());
    let output = child.wait_with_output().unwrap();
    let text = |bytes: Vec<u8>| String::from_utf8(bytes).unwrap();
    Run { code: output.status.code().unwrap(), out: text(output.stdout), err: text(output.stderr) }
}

/// A file that is removed after the test.
struct Scratch(PathBuf);

impl Scratch {
    fn new(name: &str, text: &str) -> Self {
        let path = std::env::temp_dir().join(format!("threshold-{}-{name}", std::process::id()));
        std::fs::write(&path, text).unwrap();
        Self(path)
    }

    fn path(&self) -> &str {
        self.0.to_str().unwrap()
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        let _ = std::fs::remove_file(&self.0);
    }
}

const GROVE_POST: [&str; 12] = [
    "--method",
    "POST",
    "--path",
    "/api/posts",
    "--tenant",
    "t1",
    "--tier",
    "seedling",
    "--user",
    "u1",
    "--ip",
    "203.0.113.7",
];

#[test]
fn every_preset_is_printed_and_has_no_findings() {
    let listed = threshold(&["init", "--list"]);
    assert_eq!((listed.code, listed.out.lines().count()), (0, 6));
    for name in ["starter", "telegram-bot", "chat-tenants", "weather-api", "mail-sender", "grove"] {
        assert!(listed.out.contains(name), "{name} is not listed");
        let preset = threshold(&["init", name]);
        assert_eq!(preset.code, 0);
        let linted = threshold_with(&["lint", "--deny", "warnings", "-"], &preset.out, &[]);
        assert_eq!((linted.code, linted.out.as_str()), (0, "<stdin>: no errors, no warnings\n"), "{name}");
    }
    assert_eq!(threshold(&["init"]).out, threshold(&["init", "starter"]).out);
}

#[test]
fn a_preset_passes_its_own_cases() {
    let policies = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../policies");
    let (policy, cases) = (policies.join("grove.toml"), policies.join("cases/grove.json"));
    let run = threshold(&["test", policy.to_str().unwrap(), cases.to_str().unwrap()]);
    assert_eq!(run.code, 0, "{}{}", run.out, run.err);
}

#[test]
fn an_unknown_preset_is_an_error_that_lists_the_known_ones() {
    let run = threshold(&["init", "groove"]);
    assert_eq!((run.code, run.out.as_str()), (2, ""));
    assert!(run.err.contains("\"groove\"") && run.err.contains("grove"), "{}", run.err);
}

#[test]
fn lint_prints_file_line_and_column_and_exits_by_severity() {
    let bad = threshold(&["init", "grove"]).out.replacen("\"10/h\"", "\"10 per fortnight\"", 1);
    let line = bad.lines().position(|line| line.contains("fortnight")).unwrap() + 1;
    let file = Scratch::new("bad.toml", &bad);
    let run = threshold(&["lint", file.path()]);
    assert_eq!(run.code, 2);
    assert!(run.out.starts_with(&format!("{}:{line}:", file.path())), "{}", run.out);
    assert!(run.out.contains("10 per fortnight") && run.out.contains("^^^"), "{}", run.out);

    let warned = "[identity]\nuser = \"header:x-user\"\n";
    assert_eq!(threshold_with(&["lint", "-"], warned, &[]).code, 0);
    assert_eq!(threshold_with(&["lint", "-", "--deny", "warnings"], warned, &[]).code, 1);
}

#[test]
fn variables_come_from_the_environment() {
    let policy = threshold(&["init", "telegram-bot"]).out;
    let limit = |variables: &[(&str, &str)]| {
        let run = threshold_with(&["explain", "-", "--user", "u1", "--json"], &policy, variables);
        assert_eq!(run.code, 0, "{}", run.err);
        let answer: serde_json::Value = serde_json::from_str(&run.out).unwrap();
        answer["rules"][0]["limit"].as_str().unwrap().to_owned()
    };
    assert_eq!(limit(&[]), "20/h");
    assert_eq!(limit(&[("RATE_LIMIT_MAX", "5"), ("RATE_LIMIT_WINDOW_MS", "60000")]), "5/min");
    let run = threshold_with(&["lint", "-"], &policy, &[("RATE_LIMIT_MAX", "lots")]);
    assert_eq!(run.code, 2);
    assert!(run.out.contains("RATE_LIMIT_MAX is not a number") && !run.out.contains("lots"), "{}", run.out);
}

#[test]
fn explain_lists_every_layer_with_its_key() {
    let file = Scratch::new("grove.toml", &threshold(&["init", "grove"]).out);
    let args: Vec<&str> = ["explain", file.path()].into_iter().chain(GROVE_POST).collect();
    let run = threshold(&args);
    assert_eq!(run.code, 0, "{}", run.err);
    for expected in
        ["ip=203.0.113.7", "50/h (tier seedling)", "tenant=t1,category=writes", "user=t1/u1", "POST:/api/posts"]
    {
        assert!(run.out.contains(expected), "{expected} is missing:\n{}", run.out);
    }
    for layer in ["edge", "tenant", "user", "endpoint"] {
        assert!(run.out.lines().any(|line| line.trim_start().starts_with(layer)), "{layer}");
    }
    let spelled = |path: &'static str| {
        let args: Vec<&str> = args.iter().map(|arg| if *arg == "/api/posts" { path } else { arg }).collect();
        threshold(&args).out
    };
    assert_eq!(spelled("/API//%70osts/"), run.out);
    // A path with several readings matches the rules of each.
    let odd = spelled("/api%2fposts");
    assert!(odd.contains("POST:/api/posts") && odd.contains("user=t1/u1"), "{odd}");
}

/// `explain` wanted a policy file although `THRESHOLD_SERVER` named the server, as every other command takes it.
#[test]
fn explain_asks_the_server_of_the_environment() {
    let nowhere = std::env::temp_dir().join(format!("threshold-{}-no-server", std::process::id()));
    let server = format!("unix:{}", nowhere.display());
    let asked = threshold_with(&["explain", "--ip", "203.0.113.7"], "", &[("THRESHOLD_SERVER", &server)]);
    assert!(asked.code != 0 && asked.err.contains(&*nowhere.to_string_lossy()), "{}", asked.err);
    let unnamed = threshold(&["explain", "--ip", "203.0.113.7"]);
    assert!(unnamed.code == 2 && unnamed.err.contains("--server or THRESHOLD_SERVER"), "{}", unnamed.err);
    // Its help promised an address that it does not ask.
    for (command, asks_by_default) in [("explain", false), ("subject", true)] {
        let help = threshold(&[command, "--help"]).out;
        assert!(help.contains("THRESHOLD_SERVER by default"), "{help}");
        assert_eq!(help.contains("127.0.0.1:8080"), asks_by_default, "{help}");
    }
}

/// `explain` once answered "allow" for paths that client doors refuse, and did not list the readings of a path.
#[test]
fn explain_lists_the_readings_and_what_client_doors_refuse() {
    let policy = "[[rule]]\nname = \"r\"\nper = [\"ip\"]\nlimit = \"10/h\"\n";
    let explain = |policy: &str, path: &str, more: &[&str]| {
        let args: Vec<&str> =
            ["explain", "-", "--ip", "203.0.113.7", "--path", path].iter().chain(more).copied().collect();
        threshold_with(&args, policy, &[]).out
    };
    let odd = explain(policy, "/a/../b", &[]);
    for told in ["refuse such a path with 400: the path has a dot segment", "  /b\n", "  /a\n", "  /a/../b\n", "allow"]
    {
        assert!(odd.contains(told), "{told} is missing:\n{odd}");
    }
    let matched = explain(&format!("[identity]\nodd_paths = \"match\"\n{policy}"), "/a/../b", &[]);
    assert!(!matched.contains("refuse") && matched.contains("  /a/../b\n"), "{matched}");
    let several = explain(policy, "/a%2fb", &[]);
    assert!(!several.contains("refuse") && several.contains("  /a%2fb\n  /a/b\n"), "{several}");
    let plain = explain(policy, "/a/b", &[]);
    assert!(!plain.contains("refuse") && !plain.contains("read the path"), "{plain}");
    let long = explain(policy, &format!("/{}", "a".repeat(9_000)), &[]);
    assert!(long.contains("refuse such a path with 414"), "{long}");
    let tenants = format!("[identity]\ntenant = \"path:/t/{{tenant}}/**\"\n{policy}");
    let ambiguous = explain(&tenants, "/t/a%5cb/x", &[]);
    assert!(ambiguous.contains("with 400: servers may read different callers"), "{ambiguous}");
    let value: serde_json::Value = serde_json::from_str(&explain(policy, "/a/./b", &["--json"])).unwrap();
    assert_eq!(value["path"]["readings"], serde_json::json!(["/a/b", "/a", "/a/./b"]));
    assert_eq!(value["path"]["refusedAtClientDoors"]["status"], 400);
    assert_eq!(value["decision"]["allowed"], true);
}

#[test]
fn explain_reports_a_request_that_cannot_be_decided() {
    let policy = "[[rule]]\nname = \"r\"\nper = [\"user\"]\nlimit = \"10/h\"\n";
    let run = threshold_with(&["explain", "-", "--path", "/"], policy, &[]);
    assert_eq!(run.code, 2);
    assert!(run.out.contains("needs user"), "{}", run.out);
    assert!(run.out.contains("To a descriptor of Envoy with these facts, \"r\" and"), "{}", run.out);
    let run = threshold_with(&["explain", "-", "--user", "u1", "--cost", "11"], policy, &[]);
    assert!(run.code == 2 && run.out.contains("never fits"), "{}", run.out);
    for method in ["", "GET /", "POST:/api", "a\nb"] {
        let run = threshold_with(&["explain", "-", "--user", "u1", "--method", method], policy, &[]);
        assert!(run.code == 2 && run.err.contains("--method"), "{}", run.err);
    }
}

#[test]
fn test_runs_cases_against_a_policy() {
    let policy = Scratch::new("p.toml", "[[rule]]\nname = \"r\"\nper = [\"user\"]\nlimit = \"2/h\"\n");
    let case = |admits: u32| {
        format!(
            "{{\"cases\": [{{\"name\": \"two an hour\", \"steps\": \
             [{{\"check\": {{\"user\": \"u1\"}}, \"times\": 3, \"admits\": {admits}}}]}}]}}"
        )
    };
    let good = Scratch::new("good.json", &case(2));
    let run = threshold(&["test", policy.path(), good.path()]);
    assert_eq!((run.code, run.out.as_str()), (0, "ok     two an hour\n1 passed, 0 failed\n"));
    let bad = Scratch::new("bad.json", &case(3));
    let run = threshold(&["test", policy.path(), bad.path()]);
    assert_eq!(run.code, 1);
    assert!(run.out.contains("call 3 of 3 was denied"), "{}", run.out);
    let broken = Scratch::new("broken.json", "{\"cases\": [");
    let run = threshold(&["test", policy.path(), broken.path()]);
    assert!(run.code == 2 && run.err.contains("broken.json"), "{}", run.err);
}

#[test]
fn a_file_that_cannot_be_read_is_named() {
    let run = threshold(&["lint", "/no/such/policy.toml"]);
    assert!(run.code == 2 && run.err.contains("/no/such/policy.toml"), "{}", run.err);
    let binary = Scratch::new("binary.toml", "");
    std::fs::write(&binary.0, [0xff, 0xfe, 0x00]).unwrap();
    let run = threshold(&["lint", binary.path()]);
    assert!(run.code == 2 && run.err.contains("not UTF-8"), "{}", run.err);
    let run = threshold_with(&["explain", "-"], "[[rule]]\nname = 5\n", &[]);
    assert!(run.code == 2 && run.err.contains("<stdin>:2:8:"), "{}", run.err);
}

/// Completions and manual pages are generated from the definition of the command line.
#[test]
fn version_completions_and_manual_pages_are_printed() {
    let version = threshold(&["--version"]);
    assert_eq!(version.code, 0);
    assert!(version.out.starts_with(&format!("threshold {}", env!("CARGO_PKG_VERSION"))), "{}", version.out);
    for shell in ["bash", "zsh", "fish", "elvish", "powershell"] {
        let run = threshold(&["completions", shell]);
        assert!(run.code == 0 && run.out.contains("serve") && run.out.contains("max-connections"), "{shell}");
    }
    let page = threshold(&["man"]);
    assert!(page.code == 0 && page.out.contains(".TH threshold 1"), "{}", page.out);
    for command in ["serve", "init", "lint", "explain", "test"] {
        assert!(page.out.contains(&format!("threshold\\-{command}(1)")), "{command}:\n{}", page.out);
        let own = threshold(&["man", command]);
        assert!(own.code == 0 && own.out.contains(&format!(".TH threshold-{command} 1")), "{}", own.out);
    }
    let serve = threshold(&["man", "serve"]).out;
    for told in ["THRESHOLD_TOKEN", "SIGHUP", "unix:PATH"] {
        assert!(serve.contains(told), "{told}:\n{serve}");
    }
    let unknown = threshold(&["man", "nonsense"]);
    assert!(unknown.code == 2 && unknown.err.contains("nonsense"), "{}", unknown.err);
}

/// Characters that reverse text, break a line, start an escape sequence, or are invisible.
const HIDDEN: &str = "a\u{202e}b\u{2028}c\u{9b}31md\u{200b}e\u{1b}[2Jf";
/// The same, escaped.
const SHOWN: &str = "a\\u202eb\\u2028c\\u009b31md\\u200be\\u001b[2Jf";

/// Control characters are escaped in every quote of a policy, of cases and of arguments.
#[test]
fn control_characters_in_quoted_text_are_escaped() {
    let rule = "[[rule]]\nname = 'r'\nper = ['user']\nlimit = '1/h'\n";
    let policy = Scratch::new("hidden.toml", rule);
    let hidden = HIDDEN.replace('\u{1b}', "");
    let broken = Scratch::new("hidden-broken.toml", &format!("{rule}\tnote = '{hidden}' # {hidden}\n"));
    let case = "{\"cases\":[{\"name\":\"NAME\",\"steps\":[{\"check\":{\"user\":\"NAME\"},\"expect\":{\"limit\":7}}]}]}";
    let cases = Scratch::new("hidden.json", &case.replace("NAME", &hidden));
    let runs: [(&[&str], &str); 5] = [
        (&["lint", broken.path()], "note"),
        (&["explain", policy.path(), "--user", HIDDEN, "--path", "/x"], SHOWN),
        (&["explain", policy.path(), "--user", HIDDEN, "--path", "/x", "--json"], SHOWN),
        (&["test", policy.path(), cases.path()], &SHOWN.replace("\\u001b", "")),
        (&["lint", HIDDEN], SHOWN),
    ];
    for (args, shown) in runs {
        let run = threshold(args);
        let text = run.out + &run.err;
        let found: Vec<char> = text.chars().filter(|c| is_hidden(*c) && !matches!(c, '\n' | '\t')).collect();
        assert!(found.is_empty() && text.contains(shown), "{args:?}: {found:?} in {text}");
    }
    let json = threshold(&["explain", policy.path(), "--user", HIDDEN, "--path", "/x", "--json"]).out;
    let json: serde_json::Value = serde_json::from_str(&json).unwrap();
    assert_eq!(json["facts"]["user"], HIDDEN, "in JSON it is still the same text");
}

/// The underline has the position of the escaped text, which is longer than the source.
#[test]
fn an_underline_is_below_the_escaped_text() {
    let policy =
        Scratch::new("underline.toml", "[[rule]]\nname = 'r'\nper = ['ip']\nlimit = '1/h'\n\u{202e}\u{2028} = 1\n");
    let run = threshold(&["lint", policy.path()]);
    let text = run.out + &run.err;
    let lines: Vec<&str> = text.lines().collect();
    let at = lines.iter().position(|line| line.contains("\\u202e\\u2028") && line.contains(" | ")).unwrap();
    let (source, under) = (lines[at].split_once(" | ").unwrap().1, lines[at + 1].split_once(" | ").unwrap().1);
    assert!(under.trim_end().len() <= source.len() && under.contains("^^^^^^"), "{text}");
}

/// `threshold replay access.log policy.toml` printed an error for every line of the log.
#[test]
fn a_flood_of_findings_ends_with_a_hint() {
    let log: String =
        (0..1_000).map(|n| format!("203.0.113.7 - - [10/Oct/2026:13:55:36 +0000] \"GET /{n}\" 200 5\n")).collect();
    let (log, policy) = (Scratch::new("flood.log", &log), Scratch::new("flood.toml", "[[rule]]\n"));
    let (log, policy) = (log.0.to_str().unwrap(), policy.0.to_str().unwrap());
    for args in [&["replay", log, policy][..], &["lint", log]] {
        let run = threshold(args);
        let text = format!("{}{}", run.out, run.err);
        assert_eq!(run.code, 2, "{text}");
        assert!(text.lines().count() <= 24, "{} lines", text.lines().count());
        assert!(text.contains(" more; is this a policy file?"), "{text}");
    }
    // Many mistakes in a policy are a flood too, but it is one.
    let rules: String =
        (0..30).map(|n| format!("[[rule]]\nname = \"r{n}\"\nper = [\"ip\"]\nlimit = \"x\"\n")).collect();
    let wrong = Scratch::new("wrong.toml", &rules);
    let run = threshold(&["lint", wrong.0.to_str().unwrap()]);
    assert!(run.out.lines().count() <= 24 && run.out.contains(" more; correct these first"), "{}", run.out);
    assert!(run.out.ends_with("30 errors\n"), "{}", run.out);
    // A few are shown whole.
    let few = Scratch::new("few.toml", &rules.split_inclusive("\"x\"\n").take(10).collect::<String>());
    assert_eq!(threshold(&["lint", few.0.to_str().unwrap()]).out.matches("error[bad-limit]").count(), 10);
}

/// `threshold lint policy.toml | head -1` ended with a panic where the error went into the pipe too.
#[test]
fn a_closed_pipe_is_not_an_error() {
    for args in [&["init", "grove"][..], &["--help"], &["lint", "/nonexistent"], &["nonsense"]] {
        let (reader, writer) = std::io::pipe().unwrap();
        drop(reader);
        let mut command = Command::new(env!("CARGO_BIN_EXE_threshold"));
        let status = command.args(args).stdout(writer.try_clone().unwrap()).stderr(writer).status().unwrap();
        assert!(matches!(status.code(), Some(0 | 2)), "{args:?}: {status}");
    }
}

/// A file of cases with a misspelt list ran nothing, and passed.
#[test]
fn a_test_without_cases_fails() {
    let policy = Scratch::new("cases.toml", "[[rule]]\nname = \"r\"\nper = [\"ip\"]\nlimit = \"5/h\"\n");
    let cases = Scratch::new("none.json", "{\"about\": \"nothing\", \"cases\": []}");
    let run = threshold(&["test", policy.0.to_str().unwrap(), cases.0.to_str().unwrap()]);
    assert!(run.code == 2 && run.err.contains("has no cases"), "{} {}", run.code, run.err);
}

#[test]
fn an_unknown_command_is_answered_with_the_known_ones() {
    for args in [&["nonsense"][..], &["man", "nonsense"]] {
        let run = threshold(args);
        assert!(run.code == 2 && run.err.contains("the commands are serve, demo, init, lint,"), "{}", run.err);
    }
}
