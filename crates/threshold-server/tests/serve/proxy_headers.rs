//! Tests, through real nginx and Caddy, headers that Threshold refuses and headers that must not reach an application.

use super::client::Answer;
use super::proxies::{CLIENT, Site};
use super::proxy::Kind;

/// A policy that counts by a header of the client.
const COUNTED: &str = r#"
    [identity]
    trusted_proxies = ["127.0.0.1/32"]
    client_ip = "x-forwarded-for"
    [[rule]]
    name = "key"
    per = ["header:x-key"]
    limit = "2/h"
    algorithm = "sliding-log"
    match = { path = "/keys" }
    on_missing = "skip"
    [[rule]]
    name = "address"
    layer = "edge"
    per = ["ip"]
    limit = "1000/h"
    algorithm = "sliding-log"
"#;

/// More header fields than Threshold accepts.
fn many_fields() -> Vec<(String, Vec<u8>)> {
    (0..150).map(|number| (format!("x-many-{number}"), b"1".to_vec())).collect()
}

/// More bytes than Threshold accepts, in lines that nginx accepts.
fn large_fields(count: usize) -> Vec<(String, Vec<u8>)> {
    (0..count).map(|number| (format!("x-large-{number}"), vec![b'y'; 7_900])).collect()
}

/// A control character, which nginx passes on and Threshold's HTTP parser refuses.
fn odd_accept() -> Vec<(String, Vec<u8>)> {
    vec![("accept".to_owned(), b"a\x01b".to_vec())]
}

fn ask(site: &Site, path: &str, fields: &[(String, Vec<u8>)]) -> Answer {
    site.client(CLIENT).ask_bytes("GET", path, fields).unwrap()
}

/// nginx once answered 500 to every client whose headers Threshold refuses.
#[test]
fn nginx_does_not_send_the_clients_headers_to_threshold() {
    let site = Site::new(Kind::Nginx);
    for fields in [many_fields(), large_fields(3)] {
        let answer = ask(&site, "/free", &fields);
        assert_eq!((answer.status, answer.body.as_str()), (200, "GET /free "), "{answer:?}");
    }
    // Accept is sent, because it selects the format of a denial.
    let answer = ask(&site, "/free", &odd_accept());
    assert_eq!(answer.status, 400, "{answer:?}");
}

/// If a rule counts by a client's header, nginx passes on all headers, so that a repeated header stays repeated.
#[test]
fn nginx_passes_on_the_status_of_refused_headers() {
    let site = Site::exported(Kind::Nginx, COUNTED, &[]);
    let seen = site.origin.seen();
    for (fields, status) in [(many_fields(), 431), (large_fields(3), 431), (odd_accept(), 400)] {
        let answer = ask(&site, "/free", &fields);
        assert_eq!(answer.status, status, "{answer:?}");
        assert!(answer.header("content-type").unwrap().starts_with("text/plain"), "{answer:?}");
    }
    assert_eq!(site.origin.seen(), seen);
    site.server.as_ref().unwrap().wait_for_log("431");
    // A repeated header counts as a missing key, as at every other door.
    let keys = |values: &[&str]| {
        let fields: Vec<_> = values.iter().map(|value| ("x-key".to_owned(), value.as_bytes().to_vec())).collect();
        ask(&site, "/keys", &fields).header("x-ratelimit-limit").map(str::to_owned)
    };
    assert_eq!(keys(&["a"]).as_deref(), Some("2"));
    assert_eq!(keys(&["a", "b"]).as_deref(), Some("1000"));
}

/// Caddy passes on Threshold's answer, also if the client sends far more than Threshold accepts.
#[test]
fn caddy_hands_a_431_to_the_client() {
    let site = Site::new(Kind::Caddy);
    let seen = site.origin.seen();
    for (count, fields) in [(1, many_fields()), (1, large_fields(3)), (20, large_fields(90))] {
        for _ in 0..count {
            let answer = ask(&site, "/free", &fields);
            assert_eq!(answer.status, 431, "{answer:?}");
        }
    }
    assert_eq!(ask(&site, "/free", &odd_accept()).status, 400);
    assert_eq!(site.origin.seen(), seen);
    site.server.as_ref().unwrap().wait_for_log("431");
}

/// Some frameworks route by these headers, and WSGI and CGI do not distinguish underscores and dashes.
#[test]
fn an_application_sees_no_header_that_replaces_its_path_or_its_caller() {
    let forged = [
        "x-original-url",
        "x-rewrite-url",
        "x_original_url",
        "x-rewrite_url",
        "x_user",
        "x_forwarded_for",
        "x_forwarded-for",
        "x-forwarded_host",
        "x_original-uri",
        "x_threshold_request-id",
    ];
    let fields: Vec<_> = forged.iter().map(|name| ((*name).to_owned(), b"/forged".to_vec())).collect();
    for kind in [Kind::Nginx, Kind::Caddy] {
        let site = Site::new(kind);
        assert_eq!(ask(&site, "/free", &fields).status, 200);
        let head = site.origin.head();
        assert!(head.starts_with("get /free") && !head.contains("forged"), "{kind:?}: {head}");
    }
}

/// nginx once warned at each start that its hash of header names is too small.
#[test]
fn nginx_starts_without_a_warning() {
    let user = format!("user = \"header:{}\"\n[[rule]]", "long".repeat(40));
    let long = COUNTED.replacen("[[rule]]", &user, 1);
    let grove = std::fs::read_to_string(concat!(env!("CARGO_MANIFEST_DIR"), "/../../policies/grove.toml")).unwrap();
    for site in [
        Site::new(Kind::Nginx),
        Site::exported(Kind::Nginx, &grove, &[]),
        Site::exported(Kind::Nginx, COUNTED, &[]),
        Site::exported(Kind::Nginx, &long, &[]),
    ] {
        assert_eq!(site.proxy.errors(), "");
    }
}
