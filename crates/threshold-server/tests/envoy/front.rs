//! Runs Envoy on free ports in front of an application, with a server that it asks.

use std::cell::RefCell;
use std::collections::HashMap;
use std::net::{Ipv4Addr, SocketAddr, TcpListener, TcpStream};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use serde_json::{Value, json};

use super::client::{Answer, Client};
use super::origin::Origin;
use super::process::{PATIENCE, Scratch, Server, Start};

const TOKEN: &str = "0123456789abcdef0123456789abcdef";
const ADMIN_TOKEN: &str = "fedcba9876543210fedcba9876543210";

const POLICY: &str = r#"
[identity]
trusted_proxies = ["127.0.0.1/32"]
client_ip = "peer"
user = "header:x-user"

[envoy.descriptors]
"x-user" = "user"

[envoy.domains.done]
verb = "record"

[envoy.domains.optional-done]
verb = "record"

[ladders.hidden]
rungs = ["deny + shadow"]

[[rule]]
name = "address"
match = { fact.domain = "edge" }
per = ["ip"]
limit = "5/h"

[[rule]]
name = "optional"
match = { fact.domain = ["optional", "optional-done"] }
per = ["ip"]
limit = "1000000/h"

[[rule]]
name = "user"
match = { fact.domain = "edge" }
per = ["user"]
limit = "3/h"
on_missing = "skip"

[[rule]]
name = "cost"
match = { fact.cost = "*" }
per = []
limit = "100/h"

[[rule]]
name = "done"
match = { fact.done = "*" }
per = []
limit = "300/h"

[[rule]]
name = "shadow"
match = { fact.domain = "shadow" }
per = ["user"]
limit = "1/3s"
ladder = "hidden"

[[rule]]
name = "posts"
match = { path = "/api/posts" }
per = ["ip"]
limit = "2/h"

[[rule]]
name = "shadow-authz"
match = { host = "shadow-authz" }
per = ["user"]
limit = "1/3s"
ladder = "hidden"

[[rule]]
name = "rest"
per = ["ip"]
limit = "100000/h"
"#;

/// An Envoy with its application and its server.
pub(crate) struct Front {
    pub(crate) origin: Origin,
    threshold: RefCell<Option<Threshold>>,
    grpc: SocketAddr,
    http: SocketAddr,
    envoy: Child,
    /// The ports of its listeners, by name.
    ports: HashMap<String, u16>,
    folder: Scratch,
}

struct Threshold(Server);

impl Front {
    pub(crate) fn start() -> Self {
        let (origin, folder) = (Origin::start(), Scratch::folder());
        std::fs::write(folder.path().join("policy.toml"), POLICY).unwrap();
        // Fixed for the life of this test, because the server is stopped and started again.
        let [grpc, http] = [(); 2].map(|()| free_address());
        let threshold = Threshold::start(&folder, grpc, http);
        let config = config(grpc, http, origin.address()).to_string();
        let (envoy, ports) = start_envoy(folder.path(), &config, LISTENERS);
        Self { origin, threshold: RefCell::new(Some(threshold)), grpc, http, envoy, ports, folder }
    }

    /// Runs a file of `deploy/envoy` with its policy. Only its ports are others, and a busy machine does not let requests through.
    pub(crate) fn of_deploy(file: &str) -> Self {
        let deploy = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../deploy/envoy");
        let (origin, folder) = (Origin::start(), Scratch::folder());
        std::fs::copy(deploy.join("policy.toml"), folder.path().join("policy.toml")).unwrap();
        let [grpc, http] = [(); 2].map(|()| free_address());
        let threshold = Threshold::start(&folder, grpc, http);
        let mut text = std::fs::read_to_string(deploy.join(file)).unwrap();
        for (own, other) in [
            ("address: 0.0.0.0, port_value: 8000", "address: 127.0.0.1, port_value: 0".to_owned()),
            ("port_value: 8081", format!("port_value: {}", grpc.port())),
            ("port_value: 3000", format!("port_value: {}", origin.address().port())),
            ("timeout: 0.05s", "timeout: 5s".to_owned()),
        ] {
            assert_eq!(text.matches(own).count(), 1, "{own}");
            text = text.replace(own, &other);
        }
        // As its first lines say.
        let service = text.lines().find(|line| line.trim_start().starts_with("envoy_grpc:")).unwrap().to_owned();
        let indent = service.split("envoy_grpc").next().unwrap();
        let token = format!("{indent}initial_metadata: [{{key: authorization, value: \"Bearer {TOKEN}\"}}]");
        let text = text.replace(&service, &format!("{service}\n{token}"));
        let text = format!("{text}admin: {{address: {{socket_address: {{address: 127.0.0.1, port_value: 0}}}}}}\n");
        let (envoy, ports) = start_envoy(folder.path(), &text, 1);
        Self { origin, threshold: RefCell::new(Some(threshold)), grpc, http, envoy, ports, folder }
    }

    /// Asks a listener of Envoy.
    pub(crate) fn get(&self, listener: &str, path: &str, fields: &[(&str, &str)]) -> Answer {
        let port = self.ports.get(listener).unwrap_or_else(|| panic!("no listener {listener}"));
        let stream = TcpStream::connect((Ipv4Addr::LOCALHOST, *port)).unwrap();
        stream.set_read_timeout(Some(PATIENCE)).unwrap();
        let host = [("host", listener)];
        let fields: Vec<(&str, &str)> = host.into_iter().chain(fields.iter().copied()).collect();
        Client::new(stream).send("GET", path, &fields, "").unwrap()
    }

    pub(crate) fn stop_threshold(&mut self) {
        self.threshold.take();
    }

    /// Starts the server with no counters.
    pub(crate) fn restart_threshold(&self) {
        self.threshold.take();
        self.threshold.replace(Some(Threshold::start(&self.folder, self.grpc, self.http)));
        // Envoy waits a moment before it connects again.
        let begun = Instant::now();
        while self.get("authz", "/", &[]).status != 200 || self.get("authz-http", "/", &[]).status != 200 {
            assert!(begun.elapsed() < PATIENCE, "Envoy does not connect again");
            std::thread::sleep(Duration::from_millis(50));
        }
    }

    /// Waits for a line of the server's log that contains this text.
    pub(crate) fn log(&self, text: &str) -> String {
        self.threshold.borrow().as_ref().unwrap().0.wait_for_log(text)
    }

    /// Ends the penalties of a user.
    pub(crate) fn forgive(&self, user: &str) {
        let mut client = Client::new(TcpStream::connect(self.http).unwrap());
        let authorization = format!("Bearer {ADMIN_TOKEN}");
        let path = format!("/v1/subjects/user/{user}");
        let answer = client.send("DELETE", &path, &[("authorization", &authorization)], "").unwrap();
        assert!(answer.status < 300, "{answer:?}");
    }
}

impl Drop for Front {
    fn drop(&mut self) {
        let _ = self.envoy.kill();
        let _ = self.envoy.wait();
    }
}

impl Threshold {
    fn start(folder: &Scratch, grpc: SocketAddr, http: SocketAddr) -> Self {
        let policy = folder.path().join("policy.toml");
        let args = ["--grpc", &grpc.to_string(), "--http", &http.to_string()];
        let variables = [("THRESHOLD_TOKEN", TOKEN), ("THRESHOLD_ADMIN_TOKEN", ADMIN_TOKEN)];
        Self(Start { args: &args, policy: Some(&policy), variables: &variables, ..Start::default() }.server())
    }
}

impl Drop for Threshold {
    fn drop(&mut self) {
        self.0.signal("KILL");
    }
}

fn free_address() -> SocketAddr {
    TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap().local_addr().unwrap()
}

/// Starts Envoy with this many listeners, and reads the ports that it has chosen.
fn start_envoy(folder: &Path, config: &str, listeners: usize) -> (Child, HashMap<String, u16>) {
    std::fs::write(folder.join("envoy.yaml"), config).unwrap();
    let program = std::env::var("THRESHOLD_ENVOY").expect("THRESHOLD_ENVOY is the program");
    // Several Envoys on one machine need numbers of their own.
    let child = Command::new(program)
        .args(["-c", "envoy.yaml", "--admin-address-path", "admin", "--concurrency", "1", "--log-level", "error"])
        .args(["--use-dynamic-base-id"])
        .current_dir(folder)
        .stdout(Stdio::null())
        .stderr(std::fs::File::create(folder.join("envoy.log")).unwrap())
        .spawn()
        .expect("Envoy is installed");
    let begun = Instant::now();
    let started = loop {
        let log = || std::fs::read_to_string(folder.join("envoy.log")).unwrap_or_default();
        assert!(begun.elapsed() < PATIENCE, "Envoy does not start:\n{}", log());
        std::thread::sleep(Duration::from_millis(50));
        let Ok(admin) = std::fs::read_to_string(folder.join("admin")) else { continue };
        let Ok(mut answer) = ureq::get(format!("http://{admin}/listeners?format=json")).call() else { continue };
        let started: Value = serde_json::from_str(&answer.body_mut().read_to_string().unwrap()).unwrap();
        if started["listener_statuses"].as_array().is_some_and(|all| all.len() == listeners) {
            break started;
        }
    };
    let statuses = started["listener_statuses"].as_array().into_iter().flatten();
    let port = |status: &Value| {
        let port = status["local_address"]["socket_address"]["port_value"].as_u64().unwrap();
        (status["name"].as_str().unwrap().to_owned(), u16::try_from(port).unwrap())
    };
    (child, statuses.map(port).collect())
}

const LISTENERS: usize = 10;
/// How many optional headers the listener `optional` asks about.
pub(crate) const OPTIONAL: usize = 20;

fn config(grpc: SocketAddr, http: SocketAddr, origin: SocketAddr) -> Value {
    let user = json!([{"request_headers": {"header_name": "x-user", "descriptor_key": "x-user"}}]);
    let limits = json!([
        {"actions": [{"remote_address": {}}]},
        {"actions": user},
        {"actions": [{"request_headers": {"header_name": "x-cost", "descriptor_key": "cost"}}],
         "hits_addend": {"format": "%REQ(x-cost)%"}},
    ]);
    let at_end = json!([{"actions": [{"generic_key": {"descriptor_key": "done", "descriptor_value": "d"}}],
        "hits_addend": {"number": 100}, "apply_on_stream_done": true}]);
    let looked_at = json!([{"actions": [{"generic_key": {"descriptor_key": "done", "descriptor_value": "d"}}]}]);
    // As `failure_mode_deny` is by default: an error of the service lets a request through.
    let optional = optional(false);
    json!({
        "admin": {"address": socket(SocketAddr::from((Ipv4Addr::LOCALHOST, 0)))},
        "static_resources": {
            "listeners": [
                listener("limited", &[rate_limit("edge", &limits, true)]),
                listener("done", &[rate_limit("looks", &looked_at, true), rate_limit("done", &at_end, true)]),
                listener("open", &[rate_limit("edge", &limits, false)]),
                listener("optional", &[rate_limit("optional", &optional, false)]),
                listener("optional-done", &[rate_limit("optional-done", &self::optional(true), false)]),
                listener("shadow", &[rate_limit("shadow", &json!([{"actions": user}]), true), fault()]),
                listener("authz", &[authz(false)]),
                listener("open-authz", &[authz(true)]),
                listener("shadow-authz", &[authz(false), fault()]),
                listener("authz-http", &[authz_http(http)]),
            ],
            "clusters": [cluster("threshold", grpc, true), cluster("threshold-http", http, false), cluster("origin", origin, false)],
        },
    })
}

/// Asks about the address, and about headers that a client may send or leave out; also when a stream is done.
fn optional(is_done: bool) -> Value {
    let headers = (0..OPTIONAL).map(|n| format!("x-optional-{n}"));
    let mut limits: Vec<Value> = headers
        .map(|name| json!({"actions": [{"request_headers": {"header_name": name, "descriptor_key": name}}]}))
        .chain([json!({"actions": [{"remote_address": {}}]})])
        .collect();
    for limit in limits.iter_mut().filter(|_| is_done) {
        limit["apply_on_stream_done"] = true.into();
        limit["hits_addend"] = json!({"number": 1_000_000});
    }
    limits.into()
}

fn socket(address: SocketAddr) -> Value {
    json!({"socket_address": {"address": address.ip().to_string(), "port_value": address.port()}})
}

fn typed(kind: &str, mut config: Value) -> Value {
    config.as_object_mut().unwrap().insert("@type".to_owned(), format!("type.googleapis.com/{kind}").into());
    config
}

fn filter(name: &str, kind: &str, config: Value) -> Value {
    json!({"name": name, "typed_config": typed(kind, config)})
}

fn listener(name: &str, filters: &[Value]) -> Value {
    let router = filter("router", "envoy.extensions.filters.http.router.v3.Router", json!({}));
    let filters: Vec<Value> = filters.iter().cloned().chain([router]).collect();
    let routes = json!([{"match": {"prefix": "/"}, "route": {"cluster": "origin"}}]);
    let manager = json!({
        "stat_prefix": name,
        "use_remote_address": true,
        "max_request_headers_kb": 8192,
        "route_config": {"virtual_hosts": [{"name": "all", "domains": ["*"], "routes": routes}]},
        "http_filters": filters,
    });
    let kind = "envoy.extensions.filters.network.http_connection_manager.v3.HttpConnectionManager";
    json!({
        "name": name,
        "address": socket(SocketAddr::from((Ipv4Addr::LOCALHOST, 0))),
        "filter_chains": [{"filters": [filter("manager", kind, manager)]}],
    })
}

fn service() -> Value {
    let token = json!([{"key": "authorization", "value": format!("Bearer {TOKEN}")}]);
    // Far longer than in production, for a busy machine.
    json!({"envoy_grpc": {"cluster_name": "threshold"}, "timeout": "5s", "initial_metadata": token})
}

fn rate_limit(domain: &str, limits: &Value, denies: bool) -> Value {
    let config = json!({
        "domain": domain,
        "failure_mode_deny": denies,
        "timeout": "5s",
        "rate_limits": limits,
        "rate_limit_service": {"transport_api_version": "V3", "grpc_service": service()},
    });
    filter(&format!("ratelimit-{domain}"), "envoy.extensions.filters.http.ratelimit.v3.RateLimit", config)
}

fn fault() -> Value {
    let config = json!({"delay": {"header_delay": {}, "percentage": {"numerator": 100}}});
    filter("fault", "envoy.extensions.filters.http.fault.v3.HTTPFault", config)
}

fn authz(allows: bool) -> Value {
    let config = json!({"transport_api_version": "V3", "grpc_service": service(), "failure_mode_allow": allows});
    filter("authz", "envoy.extensions.filters.http.ext_authz.v3.ExtAuthz", config)
}

fn authz_http(http: SocketAddr) -> Value {
    let config = json!({
        "transport_api_version": "V3",
        "http_service": {
            "server_uri": {"uri": format!("http://{http}"), "cluster": "threshold-http", "timeout": "5s"},
            "path_prefix": "/auth",
            "authorization_request": {
                "headers_to_add": [{"key": "x-threshold-token", "value": TOKEN}],
            },
            "authorization_response": {
                "allowed_client_headers_on_success": {"patterns": [{"prefix": "x-ratelimit"}, {"prefix": "ratelimit"}]},
            },
        },
        "allowed_headers": {"patterns": [{"exact": "x-forwarded-for"}]},
    });
    filter("authz", "envoy.extensions.filters.http.ext_authz.v3.ExtAuthz", config)
}

fn cluster(name: &str, address: SocketAddr, is_http2: bool) -> Value {
    let protocol = if is_http2 { json!({"http2_protocol_options": {}}) } else { json!({"http_protocol_options": {}}) };
    let kind = "envoy.extensions.upstreams.http.v3.HttpProtocolOptions";
    json!({
        "name": name,
        "type": "STATIC",
        "connect_timeout": "5s",
        "typed_extension_protocol_options": {kind: typed(kind, json!({"explicit_http_config": protocol}))},
        "load_assignment": {
            "cluster_name": name,
            "endpoints": [{"lb_endpoints": [{"endpoint": {"address": socket(address)}}]}],
        },
    })
}
