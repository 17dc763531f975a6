//! Tests real nginx and Caddy in front of an application, with the files in `deploy/`.

use serde_json::Value;

use super::client::{Answer, Client};
use super::origin::{Origin, connect_from};
use super::process::{PATIENCE, Scratch, Server};
use super::proxy::{Files, Kind, Proxy, Setup};

const POLICY: &str = r#"
[identity]
trusted_proxies = ["127.0.0.1/32"]
client_ip = "x-forwarded-for"
user = "header:x-user"

[[rule]]
name = "address"
layer = "edge"
per = ["ip"]
limit = "3/h"
algorithm = "sliding-log"
match = { path = "/page/**" }

[[rule]]
name = "login"
layer = "endpoint"
per = ["ip"]
limit = "1/h"
algorithm = "sliding-log"
match = { method = "POST", path = "/api/login" }

[[rule]]
name = "admin"
layer = "edge"
per = ["ip"]
limit = "1/h"
algorithm = "sliding-log"
match = { host = "admin.example.com" }

[[rule]]
name = "upload"
layer = "user"
per = ["user"]
limit = "100B/h"
algorithm = "sliding-window"
match = { path = "/upload" }

[[rule]]
name = "closed"
layer = "edge"
per = ["ip"]
deny = true
match = { path = "/closed" }
body = """
Closed,
all day.
"""
"#;

/// A client's address, which is not a trusted proxy.
pub(crate) const CLIENT: [u8; 4] = [127, 0, 0, 2];

/// An application, Threshold, and a proxy in front of both.
pub(crate) struct Site {
    pub(crate) proxy: Proxy,
    pub(crate) server: Option<Server>,
    pub(crate) origin: Origin,
    _policy: Scratch,
}

impl Site {
    /// Starts a site with the policy above and the files in `deploy/`.
    pub(crate) fn new(kind: Kind) -> Self {
        Self::edited(kind, &[])
    }

    /// Starts the same site with some lines of the files replaced.
    pub(crate) fn edited(kind: Kind, edits: &[(&str, &str)]) -> Self {
        let (server, policy) = Server::with(POLICY);
        Self::start(kind, server, policy, Files::Shipped, edits)
    }

    /// Starts a site with another policy and the files that are exported for it.
    pub(crate) fn exported(kind: Kind, policy: &str, edits: &[(&str, &str)]) -> Self {
        let (server, file) = Server::with(policy);
        let path = file.path().to_owned();
        Self::start(kind, server, file, Files::Exported(&path), edits)
    }

    fn start(kind: Kind, server: Server, policy: Scratch, files: Files<'_>, edits: &[(&str, &str)]) -> Self {
        let origin = Origin::start();
        let (threshold, app) = (server.place.strip_prefix("http://").unwrap(), origin.address().to_string());
        let proxy = Setup { kind, threshold, origin: &app, files, edits, rewrite: None }.start();
        Self { proxy, server: Some(server), origin, _policy: policy }
    }

    pub(crate) fn client(&self, ip: [u8; 4]) -> Client<std::net::TcpStream> {
        Client::new(connect_from(ip, self.proxy.address))
    }

    pub(crate) fn get(&self, ip: [u8; 4], path: &str, fields: &[(&str, &str)]) -> Answer {
        self.client(ip).send("GET", path, fields, "").unwrap()
    }
}

/// The proxies that every test runs on.
fn each(test: impl Fn(&Site)) {
    for kind in [Kind::Nginx, Kind::Caddy] {
        test(&Site::new(kind));
    }
}

#[track_caller]
fn is_denied_by(rule: &str, answer: &Answer) -> Value {
    assert_eq!(answer.status, 429, "{answer:?}");
    assert_eq!(answer.header("content-type"), Some("application/json"), "{answer:?}");
    assert_eq!(answer.header("cache-control"), Some("no-store"), "{answer:?}");
    let json = answer.json();
    assert_eq!(json["rule"], rule, "{answer:?}");
    json
}

#[test]
fn clients_are_allowed_up_to_their_limit_and_then_denied_with_retry_after() {
    each(|site| {
        for left in ["2", "1", "0"] {
            let answer = site.get(CLIENT, "/page/1?q=1", &[]);
            assert_eq!(answer.status, 200, "{answer:?}");
            assert!(answer.body.starts_with("GET /page/1?q=1 "), "{answer:?}");
            assert_eq!(answer.header("x-ratelimit-limit"), Some("3"));
            assert_eq!(answer.header("x-ratelimit-remaining"), Some(left));
            assert_eq!(answer.header("ratelimit-policy"), Some("\"address\";q=3;w=3600"));
            assert!(answer.header("ratelimit").unwrap().starts_with(&format!("\"address\";r={left};t=")));
            assert_eq!((answer.header("retry-after"), answer.header("cache-control")), (None, None));
        }
        let seen = site.origin.seen();
        let denied = site.get(CLIENT, "/page/2", &[]);
        let json = is_denied_by("address", &denied);
        assert_eq!(
            (&json["error"], &json["limit"], &json["remaining"]),
            (&"rate_limited".into(), &3.into(), &0.into())
        );
        assert_eq!(json["traceId"].as_str().unwrap().len(), 32);
        let wait = denied.header("retry-after").unwrap();
        assert_eq!(json["retryAfter"].to_string(), wait);
        assert_eq!(denied.header("x-ratelimit-limit"), Some("3"));
        assert_eq!(denied.header("x-ratelimit-remaining"), Some("0"));
        assert!(denied.header("x-ratelimit-reset").is_some());
        assert_eq!(denied.header("ratelimit-policy"), Some("\"address\";q=3;w=3600"));
        assert_eq!(denied.header("ratelimit"), Some(format!("\"address\";r=0;t={wait}").as_str()));
        assert_eq!(site.origin.seen(), seen, "the application saw a request that was denied");
        // No other header of Threshold's answer reaches the client.
        assert!(["status", "form", "body"].iter().all(|n| denied.header(&format!("x-threshold-{n}")).is_none()));
        // Each client has a budget of its own.
        assert_eq!(site.get([127, 0, 0, 3], "/page/1", &[]).status, 200);
    });
}

#[test]
fn no_header_of_a_client_changes_its_identity_or_its_request() {
    let forged = [
        ("x-forwarded-for", "203.0.113.9"),
        ("forwarded", "for=203.0.113.9"),
        ("x-real-ip", "203.0.113.9"),
        ("x-original-uri", "/free"),
        ("x-original-method", "OPTIONS"),
        ("x-original-host", "free.example.com"),
        ("x-forwarded-uri", "/free"),
        ("x-forwarded-method", "OPTIONS"),
        ("x-forwarded-host", "free.example.com"),
        ("x-original-content-length", "0"),
        ("content-type", "application/grpc"),
        ("x-user", "somebody"),
    ];
    each(|site| {
        for _ in 0..3 {
            assert_eq!(site.get(CLIENT, "/page/1", &[]).status, 200);
        }
        for field in forged {
            is_denied_by("address", &site.get(CLIENT, "/page/1", &[field]));
        }
        is_denied_by("address", &site.get(CLIENT, "/page/1", &forged));
    });
}

#[test]
fn rules_by_method_path_and_host_match_every_spelling() {
    each(|site| {
        let post = |path| site.client(CLIENT).send("POST", path, &[], "name=a").unwrap();
        assert_eq!(post("/api/login").body, "POST /api/login name=a");
        for path in ["/api/login", "//api//login", "/API/login/", "/api/%6cogin?x=1"] {
            is_denied_by("login", &post(path));
        }
        // An ambiguous path is refused, and the client gets the reason.
        for path in ["//api/./login", "/x/../api/login", "/api/login%0a"] {
            let answer = post(path);
            assert_eq!(
                (answer.status, answer.header("content-type")),
                (400, Some("application/json")),
                "{path}: {answer:?}"
            );
            assert_eq!(answer.json()["error"], "bad_request");
        }
        assert_eq!(site.get(CLIENT, "/api/login", &[]).status, 200);
        let mut client = site.client(CLIENT);
        let request = "GET / HTTP/1.1\r\nhost: Admin.Example.com:8080\r\n\r\n";
        client.write(request).unwrap();
        assert_eq!(client.read().unwrap().status, 200);
        client.write(request).unwrap();
        is_denied_by("admin", &client.read().unwrap());
        // Bytes that a URI cannot have, but that proxies pass on.
        assert!(matches!(site.get(CLIENT, "/odd/<a>^`|{}\"", &[]).status, 200 | 400));
    });
}

#[test]
fn bodies_are_passed_on_and_their_length_is_charged() {
    each(|site| {
        let post = |length| site.client(CLIENT).send("POST", "/upload", &[], &"x".repeat(length)).unwrap();
        assert_eq!(post(60).body, format!("POST /upload {}", "x".repeat(60)));
        is_denied_by("upload", &post(60));
        let never = post(101);
        assert_eq!((never.status, &never.json()["error"]), (413, &"cost_exceeds_limit".into()), "{never:?}");
        assert_eq!(post(40).status, 200);
    });
}

#[test]
fn a_denial_has_the_format_of_the_accept_header_or_of_the_rule() {
    each(|site| {
        (0..3).for_each(|_| drop(site.get(CLIENT, "/page/1.html", &[])));
        let problem = site.get(CLIENT, "/page/1.html", &[("accept", "application/problem+json")]);
        assert_eq!(problem.status, 429);
        assert_eq!(problem.header("content-type"), Some("application/problem+json"));
        assert_eq!(problem.json()["violated-policies"], serde_json::json!(["address"]));
        let own = site.get(CLIENT, "/closed", &[]);
        assert_eq!((own.status, own.header("content-type")), (429, Some("text/plain; charset=utf-8")), "{own:?}");
        assert_eq!(own.body.split_whitespace().collect::<Vec<_>>(), ["Closed,", "all", "day."]);
        let head = site.client(CLIENT);
        let answer = { head }.send_head("/page/1").unwrap();
        assert_eq!((answer.status, answer.header("x-ratelimit-remaining")), (429, Some("0")));
    });
}

#[test]
fn a_websocket_is_passed_on_and_counted_once() {
    each(|site| {
        let upgrade = [
            ("connection", "Upgrade"),
            ("upgrade", "websocket"),
            ("sec-websocket-version", "13"),
            ("sec-websocket-key", "dGhlIHNhbXBsZSBub25jZQ=="),
        ];
        let mut client = site.client(CLIENT);
        let fields: String = upgrade.iter().map(|(name, value)| format!("{name}: {value}\r\n")).collect();
        client.write(&format!("GET /page/socket HTTP/1.1\r\nhost: t\r\n{fields}\r\n")).unwrap();
        let answer = client.read().unwrap();
        assert_eq!(answer.status, 101, "{answer:?}");
        assert_eq!(client.echo("hello"), "hello");
        let next = site.get(CLIENT, "/page/1", &[]);
        assert_eq!(next.header("x-ratelimit-remaining"), Some("1"), "{next:?}");
        assert_eq!(site.get(CLIENT, "/page/1", &[]).status, 200);
        is_denied_by("address", &site.get(CLIENT, "/page/1", &upgrade));
    });
}

#[test]
fn if_threshold_does_not_answer_requests_are_refused() {
    for (kind, status) in [(Kind::Nginx, 500), (Kind::Caddy, 502)] {
        let mut site = Site::new(kind);
        assert_eq!(site.get(CLIENT, "/page/1", &[]).status, 200);
        site.server = None;
        assert_eq!(site.get(CLIENT, "/page/1", &[]).status, status);
    }
}

#[test]
fn nginx_removes_headers_and_can_be_configured_to_fail_open() {
    let site = Site::new(Kind::Nginx);
    let health = site.get(CLIENT, "/health", &[]);
    assert_eq!((health.status, health.header("x-ratelimit-limit")), (200, None));
    assert_eq!(health.body, "GET /health ");
    // Headers that make an application use another path do not reach it.
    for odd in ["/api/login/../../health", "/health?path=/api/login", "/api/login/%2e%2e/%2e%2e/health", "//health"] {
        let seen = site.origin.seen();
        let answer = site.get(CLIENT, odd, &[("x-user", "somebody")]);
        assert_eq!((answer.status, answer.body.as_str()), (200, "GET /health "), "{odd}");
        assert!(site.origin.seen() == seen + 1 && !site.origin.head().contains("x-user"), "{}", site.origin.head());
    }
    // Clients cannot request the internal locations.
    for inner in ["/_threshold", "/_threshold_denied/answer.json"] {
        assert_eq!(site.get(CLIENT, inner, &[]).status, 404);
    }
    // The commented lines of the file, uncommented.
    let lines =
        ["#error_page 502 504", "#location @threshold_away", "#    auth_request off;", "#    return 204;", "#}"];
    let open = |line: &str| match lines.iter().any(|wanted| line.trim_start().starts_with(wanted)) {
        true => line.replacen('#', "", 1),
        false => line.to_owned(),
    };
    let rewrite = |_: &str, text: String| text.lines().map(open).collect::<Vec<_>>().join("\n");
    let mut site = site;
    let threshold = site.server.as_ref().unwrap().place.strip_prefix("http://").unwrap().to_owned();
    site.proxy = Proxy::edited(&threshold, &site.origin.address().to_string(), &rewrite);
    site.server = None;
    assert_eq!(site.get(CLIENT, "/page/1", &[]).status, 200);
}

/// The headers that `grove` trusts: a client could once send a new address with each request, and a larger plan.
#[test]
fn behind_the_exported_files_a_client_cannot_change_its_address_or_tier() {
    let grove = std::fs::read_to_string(concat!(env!("CARGO_MANIFEST_DIR"), "/../../policies/grove.toml")).unwrap();
    // The operator's own authentication sets the tenant.
    let nginx = [("#proxy_set_header X-User $remote_user;", "proxy_set_header X-Tenant t1;")];
    let caddy = [("#request_header X-User {http.auth.user.id}", "request_header X-Tenant t1")];
    for (kind, edits) in [(Kind::Nginx, nginx), (Kind::Caddy, caddy)] {
        let site = Site::exported(kind, &grove, &edits);
        let post = |path: &str, number: usize| {
            let address = format!("203.0.113.{number}");
            let (user, tenant) = (format!("u{number}"), format!("t{}", number + 2));
            let fields = [
                ("cf-connecting-ip", address.as_str()),
                ("x-forwarded-for", address.as_str()),
                ("forwarded", "for=198.51.100.1"),
                ("x-user", user.as_str()),
                ("x-tenant", tenant.as_str()),
                ("x-tier", "evergreen"),
                ("x-threshold-request-id", "0123456789abcdef"),
                ("x-threshold-token", "a guess"),
            ];
            let answer = site.client(CLIENT).send("POST", path, &fields, "").unwrap();
            let head = site.origin.head();
            for (name, value) in fields {
                assert!(!head.contains(&format!("\n{name}: {value}")), "{kind:?}: the application was told {head}");
            }
            answer
        };
        // The limit is three sign-ups a day from one address.
        let statuses: Vec<u16> = (0..5).map(|number| post("/api/signup", number).status).collect();
        assert_eq!(statuses, [200, 200, 200, 429, 429], "{kind:?}");
        // The limit is ten uploads a day for a tenant with the default tier.
        let statuses: Vec<u16> = (0..12).map(|number| post("/api/uploads", number).status).collect();
        assert_eq!(statuses, [[200; 10].as_slice(), &[429, 429]].concat(), "{kind:?}");
        assert!(site.origin.head().contains("\nx-tenant: t1") == (kind == Kind::Caddy), "{}", site.origin.head());
    }
}

/// A policy that identifies callers by headers that proxies handle specially.
#[test]
fn every_trusted_header_is_set_or_removed_whatever_its_name() {
    const OTHER: &str = r#"
        [identity]
        trusted_proxies = ["127.0.0.1/32"]
        client_ip = ["x-real-ip", "forwarded"]
        user = "cookie:sid"
        tenant = "header:authorization"
        tier = "header:X_Plan-name"
        default_tier = "free"
        [tiers.free]
        requests = "2/h"
        [tiers.large]
        requests = "100/h"
        [[rule]]
        name = "address"
        layer = "edge"
        per = ["ip"]
        limit = "tier"
        algorithm = "sliding-log"
        [[rule]]
        name = "user"
        per = ["user"]
        limit = "1/h"
        match = { path = "/users" }
        algorithm = "sliding-log"
        on_missing = "skip"
        status = 418
        [[rule]]
        name = "key"
        per = ["header:x-key", "ip"]
        limit = "1/h"
        match = { path = "/keys" }
        algorithm = "sliding-log"
        layer = "endpoint"
        status = 418
    "#;
    for kind in [Kind::Nginx, Kind::Caddy] {
        let site = Site::exported(kind, OTHER, &[]);
        let get = |ip: [u8; 4], path: &str, number: u8| {
            let address = format!("203.0.113.{number}");
            let (cookie, token) = (format!("sid=s{number}; a=b"), format!("Bearer {number}"));
            let fields = [
                ("x-real-ip", address.as_str()),
                ("x-forwarded-for", address.as_str()),
                ("cookie", cookie.as_str()),
                ("authorization", token.as_str()),
                ("x_plan-name", "large"),
            ];
            let answer = site.get(ip, path, &fields);
            (answer.status, site.origin.head())
        };
        let statuses: Vec<u16> = (0..4).map(|number| get(CLIENT, "/", number).0).collect();
        assert_eq!(statuses, [200, 200, 429, 429], "{kind:?}");
        // Another client has another address, and the application still gets the header that clients write.
        let (status, head) = get([127, 0, 0, 3], "/users", 1);
        assert_eq!(status, 200);
        assert!(head.contains("authorization: bearer 1") && head.contains("cookie: sid=s1; a=b"), "{head}");
        assert!(!head.contains("203.0.113.1") && !head.contains("large"), "{head}");
        // The cookie is not sent to Threshold: no user is counted, so none is denied.
        assert_eq!(get([127, 0, 0, 3], "/users", 1).0, 200);
        // A key is counted as the client sends it, and the rule's status reaches the client.
        let key = |value| site.get([127, 0, 0, 4], "/keys", &[("x-key", value)]).status;
        assert_eq!((key("a"), key("a")), (200, 418), "{kind:?}");
    }
}

/// nginx asks again after each internal redirect, and each time once was charged.
#[test]
fn nginx_counts_a_request_once_despite_internal_redirects() {
    let files = Scratch::folder();
    for name in ["index.html", "missing.html"] {
        std::fs::write(files.path().join(name), name).unwrap();
    }
    std::fs::create_dir(files.path().join("page")).unwrap();
    std::fs::write(files.path().join("page/index.html"), "page").unwrap();
    let locations = format!(
        "root {};\n        index index.html;\n        error_page 404 /page/missing.html;\n\
         error_page 403 = /_threshold_denied/answer.$threshold_form;\n\
         location = /page/missing.html {{ try_files /missing.html =410; }}\n\
         location /page/tried/ {{ try_files $uri /page/also/ /page/index.html @app; }}\n\
         location @app {{ proxy_pass http://app; }}\n\
         location /page/app/ {{ try_files $uri @app; }}\n\
         location /page/ {{ }}\n        location / {{\n",
        files.path().display()
    );
    let site = Site::edited(Kind::Nginx, &[("location / {\n", &locations)]);
    let mut next = 2_u8;
    let mut check = |path: &str, status: u16, body: &str| {
        // Each path is requested by another client.
        next += 1;
        for left in ["2", "1", "0"] {
            let answer = site.get([127, 0, 0, next], path, &[]);
            assert_eq!(
                (answer.status, answer.header("x-ratelimit-remaining")),
                (status, Some(left)),
                "{path}: {answer:?}"
            );
            assert_eq!(answer.body, body, "{path}");
        }
        is_denied_by("address", &site.get([127, 0, 0, next], path, &[]));
    };
    check("/page/", 200, "page");
    check("/page/index.html", 200, "page");
    check("/page/tried/x", 200, "page");
    check("/page/app/x?y", 200, "GET /page/app/x?y ");
    check("/page/nowhere", 404, "missing.html");
}

/// A client cannot choose the request id: nginx replaces the header.
#[test]
fn a_client_cannot_choose_the_request_id() {
    each(|site| {
        let id = [("x-threshold-request-id", "0123456789abcdef0123456789abcdef")];
        let statuses = [(); 5].map(|()| site.get(CLIENT, "/page/1", &id).status);
        assert_eq!(statuses, [200, 200, 200, 429, 429]);
    });
}

/// nginx checks `auth_basic` before it asks Threshold: a request with a wrong password is not counted.
#[test]
fn nginx_sends_the_user_that_auth_basic_has_verified() {
    const USERS: &str = r#"
        [identity]
        trusted_proxies = ["127.0.0.1/32"]
        client_ip = "x-forwarded-for"
        user = "header:x-user"
        [[rule]]
        name = "user"
        per = ["user"]
        limit = "2/h"
        algorithm = "sliding-log"
    "#;
    let folder = Scratch::folder();
    let passwords = folder.path().join("passwords");
    std::fs::write(&passwords, "ada:{PLAIN}lovelace\n").unwrap();
    let basic = format!("include threshold.conf;\nauth_basic here;\nauth_basic_user_file {};\n", passwords.display());
    let edits = [
        ("include threshold.conf;\n", basic.as_str()),
        ("#proxy_set_header X-User $remote_user;", "proxy_set_header X-User $remote_user;"),
        ("proxy_set_header Host $host;", "proxy_set_header Host $host; proxy_set_header X-User $remote_user;"),
    ];
    let site = Site::exported(Kind::Nginx, USERS, &edits);
    let get = |ip: u8, credentials: &str| {
        let fields = [("authorization", credentials), ("x-user", "eve")];
        let answer = site.get([127, 0, 0, ip], "/", &fields);
        (answer.status, answer.header("x-ratelimit-remaining").map(str::to_owned))
    };
    let (right, wrong) = ("Basic YWRhOmxvdmVsYWNl", "Basic YWRhOmd1ZXNz");
    assert_eq!(get(2, wrong), (401, None));
    assert_eq!(get(2, right), (200, Some("1".to_owned())));
    assert_eq!(site.origin.head().matches("\nx-user: ").count(), 1, "{}", site.origin.head());
    assert!(site.origin.head().contains("\nx-user: ada"), "{}", site.origin.head());
    assert_eq!(get(3, right), (200, Some("0".to_owned())));
    assert_eq!(get(4, wrong), (401, None));
    assert_eq!(get(5, right).0, 429);
}

/// Whether every thread of a process has stopped. A signal takes effect after it was sent.
fn is_stopped(pid: u32) -> bool {
    let mut threads = std::fs::read_dir(format!("/proc/{pid}/task")).unwrap();
    threads.all(|thread| {
        let stat = std::fs::read_to_string(thread.unwrap().path().join("stat")).unwrap();
        stat.rsplit(") ").next().is_some_and(|rest| rest.starts_with('T'))
    })
}

/// While Threshold hung, every request behind Caddy once hung too.
#[test]
fn a_stopped_threshold_is_waited_for_only_until_a_timeout() {
    for (kind, statuses) in [(Kind::Nginx, [500, 500]), (Kind::Caddy, [502, 504])] {
        let site = Site::new(kind);
        assert_eq!(site.get(CLIENT, "/page/1", &[]).status, 200);
        let server = site.server.as_ref().unwrap();
        server.signal("STOP");
        while !is_stopped(server.pid()) {
            std::thread::yield_now();
        }
        let stream = connect_from(CLIENT, site.proxy.address);
        // Without a timeout, the proxy and this test would wait forever.
        stream.set_read_timeout(Some(PATIENCE)).unwrap();
        let answer = Client::new(stream).send("GET", "/page/1", &[], "");
        server.signal("CONT");
        let answer = answer.unwrap();
        assert!(statuses.contains(&answer.status), "{kind:?}: {answer:?}");
    }
}

/// Every status of Threshold reaches the client: one that is not in nginx's file would become a 500.
#[test]
fn every_status_reaches_the_client() {
    const STATUSES: &str = r#"
        [identity]
        trusted_proxies = ["127.0.0.1/32"]
        client_ip = "x-forwarded-for"
        [[rule]]
        name = "gone"
        per = ["ip"]
        deny = true
        match = { path = "/gone" }
        status = 410
        [[rule]]
        name = "forbidden"
        per = ["ip"]
        deny = true
        match = { path = "/forbidden" }
        status = 403
        [[rule]]
        name = "away"
        per = ["ip"]
        deny = true
        match = { path = "/away" }
        status = 503
        [[rule]]
        name = "bytes"
        per = ["ip"]
        limit = "9B/h"
        match = { path = "/bytes" }
    "#;
    for kind in [Kind::Nginx, Kind::Caddy] {
        let site = Site::exported(kind, STATUSES, &[]);
        for (path, body, status) in
            [("/gone", "", 410), ("/forbidden", "", 403), ("/away", "", 503), ("/bytes", "0123456789", 413)]
        {
            let answer = site.client(CLIENT).send("POST", path, &[], body).unwrap();
            assert_eq!(
                (answer.status, answer.header("content-type")),
                (status, Some("application/json")),
                "{kind:?} {path}"
            );
            assert!(answer.json()["error"].is_string(), "{answer:?}");
        }
    }
}

/// A reader who copied a page's policy and its lines for nginx had all clients share one budget: the policy trusted another network
/// than nginx's. The README's policy, the guide's lines, and the file that it says to export are sufficient.
#[test]
fn the_documented_nginx_lines_work_when_copied() {
    let read = |path: &str| std::fs::read_to_string(format!("{}/../../{path}", env!("CARGO_MANIFEST_DIR"))).unwrap();
    let (guide, policy) = (read("docs/forward-auth.md"), read("policy.example.toml"));
    let lines = guide.split_once("```nginx\n").unwrap().1.split_once("```").unwrap().0;
    let (server, policy) = Server::with(&policy);
    let path = policy.path().to_owned();
    let mut site = Site::start(Kind::Nginx, server, policy, Files::Shipped, &[]);
    let threshold = site.server.as_ref().unwrap().place.strip_prefix("http://").unwrap().to_owned();
    let origin = site.origin.address().to_string();
    // The file consists of the documented lines after its beginning; only ports differ.
    let copied = |name: &str, text: String| {
        if name != "nginx.conf" {
            return text;
        }
        let (beginning, own) = text.split_once("    upstream threshold {").unwrap();
        let listen = own.lines().find(|line| line.contains("listen ")).unwrap();
        let lines = lines.replace("127.0.0.1:8080", &threshold).replace("127.0.0.1:3000", &origin);
        format!("{beginning}{}}}\n", lines.replace("listen 80;", listen))
    };
    let (kind, files) = (Kind::Nginx, Files::Exported(&path));
    site.proxy =
        Setup { kind, threshold: &threshold, origin: &origin, files, edits: &[], rewrite: Some(&copied) }.start();
    let post = |ip, fields: &[(&str, &str)]| site.client(ip).send("POST", "/api/posts", fields, "").unwrap();
    for _ in 0..10 {
        let forged = [("x-user", "mallory"), ("x-forwarded-for", "203.0.113.7")];
        let answer = post(CLIENT, &forged);
        assert_eq!((answer.status, answer.body.as_str()), (200, "POST /api/posts "), "{answer:?}");
        assert_eq!(answer.header("x-trace-id").map(str::len), Some(32), "{answer:?}");
        let head = site.origin.head();
        assert!(!head.contains("mallory") && !head.contains("203.0.113.7"), "{head}");
    }
    let denied = post(CLIENT, &[]);
    is_denied_by("posts", &denied);
    assert_eq!(denied.header("x-trace-id"), denied.json()["traceId"].as_str());
    // Another client has a budget of its own.
    assert_eq!(post([127, 0, 0, 3], &[]).status, 200);
}

/// With a content delivery network in front, the proxy must trust it; and the policy too, if the proxy passes on the whole list
/// of addresses. Otherwise all of its clients share one budget.
#[test]
fn behind_a_content_delivery_network_each_client_has_a_budget_of_its_own() {
    const CDN: [u8; 4] = [127, 0, 0, 5];
    let both = POLICY.replace("[\"127.0.0.1/32\"]", "[\"127.0.0.1/32\", \"127.0.0.5/32\"]");
    let caddy = [("\t\tmethod GET\n", "\t\tmethod GET\n\t\ttrusted_proxies 127.0.0.5/32\n")];
    let real_ip = "include threshold.conf;\nset_real_ip_from 127.0.0.5;\nreal_ip_header CF-Connecting-IP;\n";
    let nginx = [("include threshold.conf;\n", real_ip)];
    let check = |kind: Kind, policy: &str, edits: &[(&str, &str)], own_budgets: bool| {
        let site = Site::exported(kind, policy, edits);
        let get = |peer: [u8; 4], client: &str| {
            // The network passes on its client's header, and appends the client's address.
            let chain = format!("198.51.100.1, {client}");
            let fields = [
                ("x-forwarded-for", chain.as_str()),
                ("cf-connecting-ip", client),
                ("x-forwarded-host", "other.example"),
            ];
            site.get(peer, "/page/1", &fields).status
        };
        let first: Vec<u16> = (0..4).map(|_| get(CDN, "203.0.113.7")).collect();
        assert_eq!(first, [200, 200, 200, 429], "{kind:?}");
        let second = if own_budgets { 200 } else { 429 };
        assert_eq!(get(CDN, "203.0.113.8"), second, "{kind:?}");
        // The header of other peers is not trusted.
        let direct: Vec<u16> = (10..14).map(|number| get(CLIENT, &format!("203.0.113.{number}"))).collect();
        assert_eq!(direct, [200, 200, 200, 429], "{kind:?}");
        // The host is the one of the request to the proxy.
        let admin =
            [("host", "admin.example.com"), ("x-forwarded-host", "other.example"), ("x-forwarded-for", "203.0.113.9")];
        assert_eq!([(); 2].map(|()| site.get(CDN, "/", &admin).status), [200, 429], "{kind:?}");
    };
    check(Kind::Caddy, &both, &caddy, true);
    check(Kind::Caddy, POLICY, &caddy, false);
    check(Kind::Caddy, &both, &[], false);
    check(Kind::Nginx, POLICY, &nginx, true);
    check(Kind::Nginx, POLICY, &[], false);
}

/// Records a proxy's question with an application in the place of Threshold.
#[test]
fn a_question_has_thresholds_own_host_and_only_the_needed_headers() {
    for kind in [Kind::Nginx, Kind::Caddy] {
        let (threshold, app) = (Origin::start(), Origin::start());
        let (at, to) = (threshold.address().to_string(), app.address().to_string());
        let proxy =
            Setup { kind, threshold: &at, origin: &to, files: Files::Shipped, edits: &[], rewrite: None }.start();
        let forged = [
            ("host", "shop.example.com"),
            ("cookie", "a=b"),
            ("x-user", "somebody"),
            ("x-threshold-token", "a guess"),
            ("x-forwarded-for", "203.0.113.7"),
            ("x-forwarded-host", "admin.example.com"),
            ("forwarded", "for=203.0.113.7"),
            ("connection", "x-forwarded-for, x-forwarded-uri, x-original-uri"),
        ];
        let answer = Client::new(connect_from(CLIENT, proxy.address)).send("PUT", "/a//b?c", &forged, "12345").unwrap();
        assert_eq!(answer.body, "PUT /a//b?c 12345", "{kind:?}");
        let (asked, passed) = (threshold.head(), app.head());
        assert_eq!(asked.matches("\nhost: ").count(), 1, "{asked}");
        for expect in [
            format!("\nhost: {at}\r"),
            "\nx-forwarded-for: 127.0.0.2\r".to_owned(),
            "-uri: /a//b?c\r".to_owned(),
            "-method: put\r".to_owned(),
            "-host: shop.example.com\r".to_owned(),
            "\nx-original-content-length: 5\r".to_owned(),
        ] {
            assert_eq!(asked.matches(&expect).count(), 1, "{kind:?} {expect}: {asked}");
        }
        for head in [&asked, &passed] {
            for forged in ["somebody", "a guess", "203.0.113.7", "admin.example.com"] {
                assert!(!head.contains(forged), "{kind:?}: {head}");
            }
        }
        assert!(!asked.contains("\ncookie:") && passed.contains("\ncookie: a=b\r"), "{asked}{passed}");
        let named = asked.lines().filter_map(|line| line.strip_prefix("x-threshold-request-id: "));
        let lengths: Vec<usize> = named.map(str::len).collect();
        assert_eq!(lengths, if kind == Kind::Nginx { vec![32] } else { vec![] }, "{asked}");
    }
}
