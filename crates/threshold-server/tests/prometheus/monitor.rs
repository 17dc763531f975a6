//! Runs Debian's Prometheus on a free port, and asks it.

use std::collections::BTreeSet;
use std::net::TcpListener;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use serde_json::Value;

use super::process::{PATIENCE, Scratch, Server};

pub(crate) struct Prometheus {
    child: Child,
    port: u16,
    /// Its configuration and its data.
    _folder: Scratch,
}

impl Prometheus {
    /// Starts a Prometheus that scrapes these servers and evaluates these rules every second.
    pub(crate) fn start(servers: &[&Server], rules: &str) -> Self {
        let folder = Scratch::folder();
        let targets: Vec<&str> = servers.iter().map(|server| server.place.split_once("://").unwrap().1).collect();
        let config = format!(
            "global: {{scrape_interval: 1s, evaluation_interval: 1s}}\nrule_files: [rules.yml]\n\
             scrape_configs:\n- job_name: threshold\n  static_configs:\n  - targets: {targets:?}\n"
        );
        std::fs::write(folder.path().join("prometheus.yml"), config).unwrap();
        std::fs::write(folder.path().join("rules.yml"), rules).unwrap();
        // Another process may take the port first. Then Prometheus ends, and another port is tried.
        let begun = Instant::now();
        loop {
            let port = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
            let child = Command::new("prometheus")
                .args(["--config.file=prometheus.yml", "--storage.tsdb.path=data", "--log.level=error"])
                .arg(format!("--web.listen-address=127.0.0.1:{port}"))
                .current_dir(folder.path())
                .stdout(Stdio::null())
                .stderr(Stdio::null())
                .spawn()
                .expect("prometheus is installed");
            let mut prometheus = Self { child, port, _folder: Scratch::folder() };
            loop {
                assert!(begun.elapsed() < PATIENCE, "Prometheus does not answer");
                if prometheus.child.try_wait().unwrap().is_some() {
                    break;
                }
                if prometheus.get("/-/ready").is_ok() {
                    prometheus._folder = folder;
                    return prometheus;
                }
                std::thread::sleep(Duration::from_millis(50));
            }
        }
    }

    fn get(&self, path: &str) -> Result<String, ureq::Error> {
        ureq::get(format!("http://127.0.0.1:{}{path}", self.port)).call()?.body_mut().read_to_string()
    }

    fn data(&self, path: &str) -> Value {
        let answer: Value = serde_json::from_str(&self.get(path).unwrap()).unwrap();
        answer["data"].clone()
    }

    /// Returns the alerts that fire: their names and severities.
    pub(crate) fn firing(&self) -> Vec<(String, String)> {
        let data = self.data("/api/v1/alerts");
        let text = |value: &Value| value.as_str().unwrap_or_default().to_owned();
        let firing = data["alerts"].as_array().into_iter().flatten().filter(|alert| alert["state"] == "firing");
        firing.map(|alert| (text(&alert["labels"]["alertname"]), text(&alert["labels"]["severity"]))).collect()
    }

    /// Returns the names of all metrics that have arrived.
    pub(crate) fn names(&self) -> BTreeSet<String> {
        let data = self.data("/api/v1/label/__name__/values");
        data.as_array().into_iter().flatten().filter_map(|name| Some(name.as_str()?.to_owned())).collect()
    }

    /// Returns the value of a query that has one.
    pub(crate) fn value(&self, query: &str) -> Option<f64> {
        let encoded: String = query.bytes().map(|byte| format!("%{byte:02x}")).collect();
        let data = self.data(&format!("/api/v1/query?query={encoded}"));
        data["result"].get(0)?["value"].get(1)?.as_str()?.parse().ok()
    }

    /// Waits until something is so.
    pub(crate) fn wait(&self, what: &str, mut is_so: impl FnMut(&Self) -> bool) {
        let begun = Instant::now();
        while !is_so(self) {
            assert!(begun.elapsed() < PATIENCE, "{what}: not within {PATIENCE:?}");
            std::thread::sleep(Duration::from_millis(100));
        }
    }
}

impl Drop for Prometheus {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
