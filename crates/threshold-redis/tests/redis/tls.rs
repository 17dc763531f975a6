//! `rediss://`: a server that speaks TLS with certificates of a private authority.

use std::time::{Duration, Instant};

use rcgen::{BasicConstraints, CertificateParams, CertifiedIssuer, DnType, ExtendedKeyUsagePurpose, IsCa, KeyPair};
use threshold_limiter::store::Store as _;
use threshold_limiter::{Facts, Limiter, Policy};
use threshold_redis::{RedisOpenError, RedisOptions, RedisStore};

use crate::process::{PATIENCE, secret};
use crate::tcp::{Folder, TcpServer};

pub(crate) type Authority = CertifiedIssuer<'static, KeyPair>;

pub(crate) fn authority(name: &str) -> Authority {
    let mut params = CertificateParams::new(Vec::new()).unwrap();
    params.distinguished_name.push(DnType::CommonName, name);
    params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
    CertifiedIssuer::self_signed(params, KeyPair::generate().unwrap()).unwrap()
}

/// Makes a certificate for a host name or an address, and its key, in PEM.
pub(crate) fn certificate(authority: &Authority, name: &str) -> (String, String) {
    let mut params = CertificateParams::new([name.to_owned()]).unwrap();
    params.extended_key_usages = vec![ExtendedKeyUsagePurpose::ServerAuth, ExtendedKeyUsagePurpose::ClientAuth];
    let key = KeyPair::generate().unwrap();
    (params.signed_by(&key, authority).unwrap().pem(), key.serialize_pem())
}

/// Writes a certificate for this host, and returns the options of a server that uses it.
fn files(authority: &Authority, name: &str, folder: &Folder) -> Vec<String> {
    let (cert, key) = certificate(authority, name);
    let files = [
        ("--tls-cert-file", folder.write("cert.pem", &cert)),
        ("--tls-key-file", folder.write("key.pem", &key)),
        ("--tls-ca-cert-file", folder.write("ca.pem", &authority.pem())),
    ];
    files.into_iter().flat_map(|(option, file)| [option.to_owned(), file]).collect()
}

/// Starts a server whose certificate names this host.
pub(crate) fn server(authority: &Authority, name: &str, arguments: &[&str]) -> (TcpServer, Folder) {
    let folder = Folder::new();
    let files = files(authority, name, &folder);
    let all: Vec<&str> = files.iter().map(String::as_str).chain(arguments.iter().copied()).collect();
    (TcpServer::start_tls(&all), folder)
}

/// Returns how many of ten requests two nodes with this store admit together, of a limit of five.
async fn admitted_of_five(open: impl AsyncFn() -> RedisStore) -> usize {
    let policy = "[[rule]]\nname = 'r'\nper = ['user']\nlimit = '5/h'\non_store_error = 'closed'\n";
    let mut nodes = Vec::new();
    for _ in 0..2 {
        let policy = Policy::parse(policy, &|_| None).unwrap();
        nodes.push(Limiter::builder(policy).store(open().await).build().unwrap());
    }
    let mut admitted = 0;
    for node in nodes.iter().cycle().take(10) {
        let decision = node.check_async(&Facts { user: Some("ada"), ..Facts::default() }).await.unwrap();
        assert!(decision.degraded.is_none(), "{:?}", node.store().last_error());
        admitted += usize::from(decision.allowed());
    }
    admitted
}

fn options(server: &TcpServer, host: &str) -> RedisOptions {
    RedisOptions::new(format!("rediss://{host}:{}", server.port).parse().unwrap(), secret(9))
}

async fn refusal(options: RedisOptions) -> String {
    RedisStore::open(options).await.unwrap_err().to_string()
}

#[tokio::test(flavor = "multi_thread")]
async fn a_server_is_used_only_if_its_certificate_is_of_the_authority_and_names_the_host() {
    let (ours, theirs) = (authority("ours"), authority("theirs"));
    let (server, _files) = server(&ours, "localhost", &["--tls-auth-clients", "no"]);
    RedisStore::open(options(&server, "localhost").authorities(ours.pem())).await.unwrap();
    let error = refusal(options(&server, "localhost").authorities(theirs.pem())).await;
    assert!(error.contains("UnknownIssuer"), "{error}");
    // The system's authorities do not know this one.
    let error = refusal(options(&server, "localhost")).await;
    assert!(error.contains("UnknownIssuer") || error.contains("no certificates of authorities"), "{error}");
    let error = refusal(options(&server, "127.0.0.1").authorities(ours.pem())).await;
    assert!(error.contains("not valid for name") || error.contains("NotValidForName"), "{error}");
    // A connection without TLS is not accepted in its place.
    let plain = format!("redis://localhost:{}", server.port).parse().unwrap();
    assert!(RedisStore::open(RedisOptions::new(plain, secret(9))).await.is_err());
}

#[tokio::test(flavor = "multi_thread")]
async fn a_server_that_asks_for_a_certificate_gets_that_of_the_node() {
    let ours = authority("ours");
    let (server, _files) = server(&ours, "127.0.0.1", &["--tls-auth-clients", "yes"]);
    let trusting = || options(&server, "127.0.0.1").authorities(ours.pem());
    let (cert, key) = certificate(&ours, "node");
    RedisStore::open(trusting().certificate(cert.clone(), key)).await.unwrap();
    refusal(trusting()).await;
    let (_, other_key) = certificate(&ours, "node");
    let error = refusal(trusting().certificate(cert, other_key)).await;
    assert!(error.contains("key"), "{error}");
}

/// The map of a Cluster names other ports, and connections to those must speak TLS too.
#[tokio::test(flavor = "multi_thread")]
async fn nodes_share_limits_on_a_cluster_that_speaks_only_tls() {
    let ours = authority("ours");
    let options = ["--tls-auth-clients", "no", "--tls-cluster", "yes", "--cluster-enabled", "yes"];
    let servers: Vec<_> = (0..3).map(|_| server(&ours, "127.0.0.1", &options)).collect();
    let places: Vec<String> = servers.iter().map(|(server, _)| format!("127.0.0.1:{}", server.port)).collect();
    let (first, folder) = &servers[0];
    let ca = folder.path().join("ca.pem").display().to_string();
    let tls = ["--tls", "--cacert", &ca];
    let create = ["--cluster", "create", &places[0], &places[1], &places[2], "--cluster-yes"];
    let printed = first.cli(&[&tls[..], &create].concat());
    assert!(printed.contains("All 16384 slots covered"), "{printed}");
    let begun = Instant::now();
    for (server, _) in &servers {
        while !server.cli(&[&tls[..], &["CLUSTER", "INFO"]].concat()).contains("cluster_state:ok") {
            assert!(begun.elapsed() < PATIENCE, "the Cluster is not ready");
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    }
    let open = async || {
        let url = format!("rediss+cluster://{}", places.join(",")).parse().unwrap();
        RedisStore::open(RedisOptions::new(url, secret(9)).authorities(ours.pem())).await.unwrap()
    };
    assert_eq!(admitted_of_five(open).await, 5);
}

/// A Sentinel names the port of the primary, and both connections must speak TLS.
#[tokio::test(flavor = "multi_thread")]
async fn nodes_share_limits_behind_a_sentinel_that_speaks_only_tls() {
    let ours = authority("ours");
    let (primary, _files) = server(&ours, "127.0.0.1", &["--tls-auth-clients", "no", "--tls-replication", "yes"]);
    let folder = Folder::new();
    let own = files(&ours, "127.0.0.1", &folder);
    let own: Vec<&str> = own.iter().map(String::as_str).chain(["--tls-auth-clients", "no"]).collect();
    let sentinel = TcpServer::start_tls_sentinel(primary.port, &own);
    let open = async || {
        let url = format!("rediss+sentinel://127.0.0.1:{}/main", sentinel.port).parse().unwrap();
        RedisStore::open(RedisOptions::new(url, secret(9)).authorities(ours.pem())).await.unwrap()
    };
    assert_eq!(admitted_of_five(open).await, 5);
}

/// An operator gave the file of a private authority and left `redis://` in the URL. The password went over the network in the
/// clear.
#[tokio::test(flavor = "multi_thread")]
async fn certificates_without_tls_and_unreadable_ones_are_refused() {
    let ours = authority("ours");
    let plain = || RedisOptions::new("redis://localhost:1".parse().unwrap(), secret(9));
    let refused = RedisStore::open(plain().authorities(ours.pem())).await.unwrap_err();
    assert!(matches!(refused, RedisOpenError::Tls(_)) && refused.to_string().contains("rediss://"), "{refused}");
    let tls = || RedisOptions::new("rediss://localhost:1".parse().unwrap(), secret(9));
    for pem in ["", "junk", "-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n"] {
        let refused = tls().authorities(pem).check().unwrap_err();
        assert!(matches!(refused, RedisOpenError::Tls(_)), "{refused}");
    }
    tls().authorities(ours.pem()).check().unwrap();
}
