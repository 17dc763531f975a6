//! Tests exported edge rules on real nginx and HAProxy, and parses the Terraform with an HCL parser.
//!
//! `./test` installs what it needs. `THRESHOLD_HCL_PYTHON` is a Python with python-hcl2.

#![expect(clippy::unwrap_used, reason = "a test that cannot go on should say so loudly, on the line where it stops")]
#![expect(clippy::indexing_slicing, reason = "what is not there fails the test, as it should")]
#![expect(clippy::panic, reason = "a test that fails should say why")]

use std::io::{Read as _, Write as _};
use std::net::{TcpListener, TcpStream};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use serde_json::{Value, json};

/// Five a minute below /api for POST and GET, and three an hour for paths with "upload".
const POLICY: &str = r#"
[identity]
trusted_proxies = ["127.0.0.1/32"]
client_ip = "x-forwarded-for"

[[rule]]
name = "api"
per = ["ip"]
match = { method = ["GET", "POST"], path = "/api/**" }
limit = "5/min"
body = "{\"error\":\"it's you\"}"

[[rule]]
name = "up.loads"
per = ["ip"]
match = { path = ["**/upload**", "/files/*/new"] }
limit = "3/min"
"#;

fn export(edge: &str, policy: &Path) -> String {
    let output = Command::new(env!("CARGO_BIN_EXE_threshold")).args(["export", edge]).arg(policy).output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8(output.stdout).unwrap()
}

/// A folder that is removed after the test.
struct Folder(PathBuf);

impl Folder {
    fn new(name: &str) -> Self {
        let path = std::env::temp_dir().join(format!("threshold-edge-{}-{name}", std::process::id()));
        std::fs::create_dir_all(&path).unwrap();
        Self(path)
    }

    fn file(&self, name: &str, text: &str) -> PathBuf {
        let path = self.0.join(name);
        std::fs::write(&path, text).unwrap();
        path
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

/// A program that ends with the test.
struct Running(Child);

impl Running {
    /// Starts it, and waits until it accepts connections.
    fn start(command: &mut Command, port: u16) -> Self {
        let child = command.stdout(Stdio::null()).stderr(Stdio::piped()).spawn();
        let mut running = Self(child.unwrap_or_else(|error| panic!("{command:?} does not start: {error}")));
        for _ in 0..400 {
            if let Some(status) = running.0.try_wait().unwrap() {
                let mut said = String::new();
                running.0.stderr.take().unwrap().read_to_string(&mut said).unwrap();
                panic!("{command:?} ended with {status}: {said}");
            }
            if TcpStream::connect(("127.0.0.1", port)).is_ok() {
                return running;
            }
            std::thread::sleep(Duration::from_millis(25));
        }
        panic!("{command:?} does not listen");
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

fn free_port() -> u16 {
    TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port()
}

/// Returns the status and the whole text of an answer.
fn ask(port: u16, request: &str, client: &str) -> (u16, String) {
    let mut stream = TcpStream::connect(("127.0.0.1", port)).unwrap();
    let fields = format!("Host: example.com\r\nX-Forwarded-For: {client}\r\nConnection: close");
    stream.write_all(format!("{request} HTTP/1.1\r\n{fields}\r\n\r\n").as_bytes()).unwrap();
    // An edge that refuses may reset the connection, so that the read fails after the answer.
    let mut bytes = Vec::new();
    let ended = stream.read_to_end(&mut bytes);
    assert!(ended.is_ok() || !bytes.is_empty(), "{ended:?}");
    let text = String::from_utf8(bytes).unwrap();
    let status = text.split(' ').nth(1).and_then(|status| status.parse().ok());
    (status.unwrap_or_else(|| panic!("no answer: {text}")), text)
}

/// Returns how many of eight requests are allowed.
fn admitted(port: u16, request: &str, client: &str) -> usize {
    (0..8).filter(|_| ask(port, request, client).0 == 200).count()
}

#[test]
fn nginx_limits_by_exported_rules() {
    let folder = Folder::new("nginx");
    let policy = folder.file("policy.toml", POLICY);
    folder.file("ok.txt", "ok");
    let edge = folder.file("edge.conf", &export("nginx", &policy));
    let port = free_port();
    let home = folder.0.display();
    let config = format!(
        "daemon off;\nmaster_process off;\nerror_log stderr;\npid {home}/pid;\nevents {{}}\nhttp {{\n    access_log off;\n    \
         client_body_temp_path {home}/body;\n    proxy_temp_path {home}/proxy;\n    fastcgi_temp_path {home}/fastcgi;\n    \
         uwsgi_temp_path {home}/uwsgi;\n    scgi_temp_path {home}/scgi;\n    include {};\n    server {{\n        \
         listen 127.0.0.1:{port};\n        root {home};\n        location / {{ error_page 405 =200 /ok.txt; try_files /ok.txt =404; }}\n    }}\n}}\n",
        edge.display()
    );
    let config = folder.file("nginx.conf", &config);
    let _nginx = Running::start(Command::new("nginx").arg("-p").arg(&folder.0).arg("-c").arg(&config), port);
    assert_eq!(admitted(port, "GET /api/x", "192.0.2.1"), 5);
    assert_eq!(ask(port, "GET /api/x", "192.0.2.1").0, 429);
    assert_eq!(admitted(port, "GET /api/x", "192.0.2.2"), 5, "another address has a budget of its own");
    assert_eq!(admitted(port, "GET /apis", "192.0.2.1"), 8, "another path is not limited");
    assert_eq!(admitted(port, "GET /A/UPLOADS/b", "192.0.2.1"), 3);
    assert_eq!(admitted(port, "GET /files/7/new", "192.0.2.3"), 3);
    assert_eq!(admitted(port, "GET /files/7/8/new", "192.0.2.4"), 8);
}

#[test]
fn haproxy_limits_by_exported_rules() {
    let folder = Folder::new("haproxy");
    let policy = folder.file("policy.toml", POLICY);
    let edge = folder.file("edge.cfg", &export("haproxy", &policy));
    let port = free_port();
    let own = folder.file(
        "own.cfg",
        &format!("frontend web from threshold\n    bind 127.0.0.1:{port}\n    http-request return status 200 content-type text/plain string ok\n"),
    );
    let _haproxy = Running::start(Command::new("haproxy").arg("-db").arg("-f").arg(&edge).arg("-f").arg(&own), port);
    assert_eq!(admitted(port, "GET /api/x", "-"), 5);
    let (status, text) = ask(port, "POST /api/x", "-");
    assert!(status == 429 && text.contains("{\"error\":\"it's you\"}"), "{text}");
    assert!(text.to_ascii_lowercase().contains("retry-after: 60") && text.contains("application/json"), "{text}");
    assert_eq!(admitted(port, "GET /apis", "-"), 8, "another path is not limited");
    assert_eq!(admitted(port, "DELETE /api/x", "-"), 8, "another method is not limited");
    assert_eq!(admitted(port, "GET /A/UPLOADS/b", "-"), 3);
}

/// The preset has more rules than HAProxy has counters for, and limits that nginx cannot count: both still start.
#[test]
fn the_largest_preset_starts_everywhere() {
    let folder = Folder::new("grove");
    let policy = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../policies/grove.toml");
    let port = free_port();
    let edge = folder.file("edge.cfg", &export("haproxy", &policy));
    let own = folder.file(
        "own.cfg",
        &format!("frontend web from threshold\n    bind 127.0.0.1:{port}\n    http-request return status 200 string ok content-type text/plain\n"),
    );
    let _haproxy = Running::start(Command::new("haproxy").arg("-db").arg("-f").arg(&edge).arg("-f").arg(&own), port);
    assert_eq!(ask(port, "GET /api/upload", "-").0, 200);
    let edge = folder.file("edge.conf", &export("nginx", &policy));
    let config =
        format!("pid {}/pid;\nevents {{}}\nhttp {{\n    include {};\n}}\n", folder.0.display(), edge.display());
    let config = folder.file("nginx.conf", &config);
    let output = Command::new("nginx").arg("-t").arg("-e").arg("stderr").arg("-c").arg(&config).output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
}

/// The script that operators run against an edge finds at which request each rule denies.
#[test]
fn the_edge_check_reports_where_each_rule_denies() {
    let folder = Folder::new("edge-check");
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    let policy = root.join("policies/grove.toml");
    let port = free_port();
    let edge = folder.file("edge.cfg", &export("haproxy", &policy));
    let own = folder.file(
        "own.cfg",
        &format!("frontend web from threshold\n    bind 127.0.0.1:{port}\n    http-request return status 200 string ok content-type text/plain\n"),
    );
    let _haproxy = Running::start(Command::new("haproxy").arg("-db").arg("-f").arg(&edge).arg("-f").arg(&own), port);
    let check = |rules: &[&str]| {
        let mut command = Command::new("python3");
        command.arg(root.join("deploy/edge-check")).arg(&policy).arg(format!("http://127.0.0.1:{port}"));
        let output = command.args(rules.iter().flat_map(|rule| ["--rule", rule])).output().unwrap();
        let text = String::from_utf8(output.stdout).unwrap();
        (output.status.code(), text, String::from_utf8(output.stderr).unwrap())
    };
    let (code, text, errors) = check(&[]);
    assert_eq!((code, errors.as_str()), (Some(0), ""), "{text}");
    // What was sent for the other rules counts for the one without a match: 51 + 101 + 501 + 348 = 1,001.
    for expected in [
        "edge-auth: 429 at request 51; the limit is 50/5min; Retry-After: 300; {\"error\":\"auth_rate_limited\",\"retry_after\":300}",
        "edge-uploads: 429 at request 101; the limit is 100/h",
        "edge-ai: 429 at request 501; the limit is 500/day",
        "edge: 429 at request 348, after 653 of other rules; the limit is 1000/min; Retry-After: 60",
    ] {
        assert!(text.contains(expected), "{expected}\n{text}");
    }
    let (code, _, errors) = check(&["nope"]);
    assert!(code == Some(1) && errors.contains("no rule by address is called nope"), "{errors}");
}

/// A host that limits nothing is found out.
#[test]
fn the_edge_check_fails_without_limits() {
    let folder = Folder::new("edge-check-open");
    let policy = folder.file("policy.toml", "[[rule]]\nname = 'few'\nlayer = 'edge'\nper = ['ip']\nlimit = '20/min'\n");
    let port = free_port();
    let own = folder.file(
        "own.cfg",
        &format!("defaults\n    mode http\n    timeout client 5s\nfrontend web\n    bind 127.0.0.1:{port}\n    http-request return status 200 string ok content-type text/plain\n"),
    );
    let _haproxy = Running::start(Command::new("haproxy").arg("-db").arg("-f").arg(&own), port);
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../deploy/edge-check");
    let output =
        Command::new("python3").arg(script).arg(&policy).arg(format!("http://127.0.0.1:{port}")).output().unwrap();
    let text = String::from_utf8(output.stdout).unwrap();
    assert_eq!(output.status.code(), Some(1), "{text}");
    assert!(text.contains("few: no 429 within 24 requests"), "{text}");
}

fn parsed(text: &str) -> Value {
    let python = std::env::var_os("THRESHOLD_HCL_PYTHON")
        .unwrap_or_else(|| panic!("THRESHOLD_HCL_PYTHON names no Python with python-hcl2"));
    let mut child = Command::new(python)
        .args(["-c", "import hcl2, json, sys; print(json.dumps(hcl2.load(sys.stdin)))"])
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    child.stdin.take().unwrap().write_all(text.as_bytes()).unwrap();
    let output = child.wait_with_output().unwrap();
    assert!(output.status.success());
    serde_json::from_slice(&output.stdout).unwrap()
}

/// Normalises the parser's output: a block is a list of one, and strings may keep their quotes.
fn plain(value: &Value) -> Value {
    match value {
        Value::Array(items) if items.len() == 1 && items[0].is_object() => plain(&items[0]),
        Value::Array(items) => items.iter().map(plain).collect(),
        Value::Object(fields) => {
            let own = fields.iter().filter(|(name, _)| !name.starts_with("__"));
            own.map(|(name, value)| (name.trim_matches('"').to_owned(), plain(value))).collect()
        }
        Value::String(text) => {
            let inner = text.strip_prefix('"').and_then(|text| text.strip_suffix('"'));
            // Some versions of the parser do not decode escapes.
            Value::String(inner.unwrap_or(text).replace("\\\"", "\""))
        }
        other => other.clone(),
    }
}

/// The expected rules of the preset. The expression of the first, which is for all requests, is given.
fn four_edge_rules(general: &str) -> Vec<Value> {
    let rule = |error: &str, retry: u64, period: u64, requests: u64, timeout: u64, expression: &str| {
        json!({
            "action": "block",
            "enabled": true,
            "content": format!("{{\"error\":\"{error}\",\"retry_after\":{retry}}}"),
            "ratelimit": {
                "characteristics": ["cf.colo.id", "ip.src"], "period": period, "requests_per_period": requests,
                "mitigation_timeout": timeout,
            },
            "expression": expression,
        })
    };
    let path = "http.request.uri.path contains";
    vec![
        rule("rate_limited", 60, 60, 1_000, 60, general),
        rule(
            "auth_rate_limited",
            300,
            300,
            50,
            300,
            &format!("(http.host eq \"auth.grove.place\" and {path} \"/oauth\")"),
        ),
        rule(
            "upload_rate_limited",
            3_600,
            3_600,
            100,
            3_600,
            &format!("({path} \"/api/upload\" or {path} \"/api/images\")"),
        ),
        rule("ai_rate_limited", 86_400, 86_400, 500, 3_600, &format!("({path} \"/api/ai/\" or {path} \"/api/wisp/\")")),
    ]
}

/// Returns the rules of a resource, as the parser reads them.
fn rules_of(text: &str, resource: &str) -> Vec<Value> {
    let read = plain(&parsed(text));
    let ruleset = &read["resource"]["cloudflare_ruleset"][resource];
    assert_eq!((&ruleset["phase"], &ruleset["kind"]), (&"http_ratelimit".into(), &"zone".into()), "{read}");
    let own = |rule: &Value| {
        let response = &rule["action_parameters"]["response"];
        assert_eq!((&response["status_code"], &response["content_type"]), (&429.into(), &"application/json".into()));
        json!({
            "action": rule["action"], "enabled": rule["enabled"], "content": response["content"],
            "ratelimit": rule["ratelimit"], "expression": rule["expression"],
        })
    };
    ruleset["rules"].as_array().unwrap().iter().map(own).collect()
}

#[test]
fn terraform_has_the_four_edge_rules() {
    let policy = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../policies/grove.toml");
    for provider in ["4", "5"] {
        let output = Command::new(env!("CARGO_BIN_EXE_threshold"))
            .args(["export", "terraform", "--provider", provider])
            .arg(&policy)
            .output()
            .unwrap();
        let text = String::from_utf8(output.stdout).unwrap();
        assert_eq!(rules_of(&text, "threshold_edge"), four_edge_rules("true"), "provider {provider}");
    }
    // The shipped file is for one host.
    let shipped = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../deploy/terraform/rate_limiting.tf");
    let text = std::fs::read_to_string(shipped).unwrap();
    let general = "(http.host contains \"grove.place\")";
    assert_eq!(rules_of(&text, "grove_rate_limiting"), four_edge_rules(general));
}
