//! Tests the RESP door with the Python client of Redis.
//!
//! `./test` installs it: `THRESHOLD_RESP_PYTHON` is a Python that has it.

#![expect(
    clippy::indexing_slicing,
    clippy::panic,
    clippy::unwrap_used,
    reason = "a test that cannot go on should say so loudly, on the line where it stops"
)]

#[expect(dead_code, reason = "the server's tests use all of it")]
#[path = "../serve/client.rs"]
mod client;
#[expect(dead_code, reason = "the server's tests use all of it")]
#[path = "../serve/process.rs"]
mod process;

use std::process::Command;

use process::Start;

const TOKEN: &str = "a-caller-token-1";

/// One by one and in pipelines, in both versions of the protocol, with and without a token.
#[test]
fn the_python_client_calls_it() {
    let python = std::env::var("THRESHOLD_RESP_PYTHON").unwrap();
    for variables in [&[][..], &[("THRESHOLD_TOKEN", TOKEN)]] {
        let server = Start { args: &["--resp", "127.0.0.1:0"], variables, ..Start::default() }.server();
        let address = server.resp.as_deref().unwrap().strip_prefix("redis://").unwrap();
        let (_, port) = address.rsplit_once(':').unwrap();
        let token = variables.first().map_or("", |(_, token)| token);
        let script = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/resp/client.py");
        let output = Command::new(&python).args([script, port, token]).output().unwrap();
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    }
}
