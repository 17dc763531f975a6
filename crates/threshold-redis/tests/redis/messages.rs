//! The messages of a store that cannot be opened. docs/scale.md lists each of them with its cause and what to do.

use threshold_redis::{RedisOptions, RedisStore};

use crate::process::{Cluster, secret};
use crate::tcp::{TcpServer, free_port};
use crate::tls::{authority, certificate, server};

/// Opens a store, and returns why that failed, with HOST:PORT for the place of the server and without the words of libraries.
async fn refusal(url: &str, change: impl FnOnce(RedisOptions) -> RedisOptions) -> String {
    let options = change(RedisOptions::new(url.parse().unwrap(), secret(9)));
    let error = RedisStore::open(options).await.unwrap_err().to_string();
    assert!(!error.contains("hunter2"), "{error}");
    let place = url.rsplit(['/', '@']).next().unwrap();
    assert!(error.contains(place), "the message names no server: {error}");
    error.split(" (").next().unwrap().replace(place, "HOST:PORT")
}

/// Returns the first column of the table of messages.
fn documented() -> Vec<String> {
    let page = std::fs::read_to_string(concat!(env!("CARGO_MANIFEST_DIR"), "/../../docs/scale.md")).unwrap();
    let (_, table) =
        page.split_once("| message | cause | what to do |\n|---|---|---|\n").expect("the table of messages");
    let rows = table.lines().take_while(|line| line.starts_with('|'));
    rows.map(|row| row.split('`').nth(1).expect("a message is quoted").to_owned()).collect()
}

/// An operator wrote `redis://` for a port with TLS, and read "connection reset by peer".
#[tokio::test(flavor = "multi_thread")]
async fn every_message_is_in_the_table_of_the_page() {
    let plain = TcpServer::start(&["--requirepass", "hunter2"]);
    let open = TcpServer::start(&[]);
    let replica = TcpServer::start(&["--replicaof", "127.0.0.1", &open.port.to_string()]);
    let (silent, limited) = (TcpServer::start(&[]), TcpServer::start(&[]));
    silent.cli(&["ACL", "SETUSER", "default", "-info"]);
    limited.cli(&["ACL", "SETUSER", "default", "-zadd"]);
    let cluster = Cluster::start();
    let (ours, theirs) = (authority("ours"), authority("theirs"));
    let (tls, _tls_files) = server(&ours, "127.0.0.1", &["--tls-auth-clients", "no"]);
    let (strict, _strict_files) = server(&ours, "127.0.0.1", &["--tls-auth-clients", "yes"]);
    let (elsewhere, _elsewhere_files) = server(&ours, "db.example", &["--tls-auth-clients", "no"]);
    let at = |scheme: &str, port: u16| format!("{scheme}://127.0.0.1:{port}");
    let trusting = |options: RedisOptions| options.authorities(ours.pem());
    let same = |options: RedisOptions| options;
    let node = cluster.url().split(',').next().unwrap().rsplit(':').next().unwrap().parse().unwrap();
    let stranger = certificate(&theirs, "node");
    // The system accepts connections for it, and nobody reads them.
    let unread = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let messages = [
        refusal(&at("redis", free_port()), same).await,
        refusal(&at("redis", unread.local_addr().unwrap().port()), same).await,
        refusal(&at("rediss", open.port), trusting).await,
        refusal(&at("redis", tls.port), same).await,
        refusal(&at("rediss", strict.port), trusting).await,
        refusal(&at("rediss", strict.port), |options| trusting(options).certificate(stranger.0, stranger.1)).await,
        refusal(&at("rediss", tls.port), |options| options.authorities(theirs.pem())).await,
        refusal(&at("rediss", elsewhere.port), trusting).await,
        refusal(&at("redis+cluster", open.port), same).await,
        refusal(&at("redis", node), same).await,
        refusal(&at("redis", plain.port), same).await,
        refusal(&format!("redis://:hunter2%40@127.0.0.1:{}", plain.port), same).await,
        refusal(&at("redis", replica.port), same).await,
        refusal(&at("redis", silent.port), same).await,
        refusal(&at("redis", limited.port), same).await,
    ];
    let documented = documented();
    for message in &messages {
        assert!(documented.contains(message), "not in the table: {message}\n{}", messages.join("\n"));
    }
    for message in documented {
        assert!(messages.contains(&message), "no server says this: {message}");
    }
}
