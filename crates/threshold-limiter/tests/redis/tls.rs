//! `rediss://`: a server that speaks TLS with certificates of a private authority.

use rcgen::{BasicConstraints, CertificateParams, CertifiedIssuer, DnType, ExtendedKeyUsagePurpose, IsCa, KeyPair};
use threshold_core::KeyId;
use threshold_limiter::store::redis::{RedisOpenError, RedisOptions, RedisStore};

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

/// Starts a server whose certificate names this host.
pub(crate) fn server(authority: &Authority, name: &str, arguments: &[&str]) -> (TcpServer, Folder) {
    let (folder, (cert, key)) = (Folder::new(), certificate(authority, name));
    let files = [
        ("--tls-cert-file", folder.write("cert.pem", &cert)),
        ("--tls-key-file", folder.write("key.pem", &key)),
        ("--tls-ca-cert-file", folder.write("ca.pem", &authority.pem())),
    ];
    let mut all: Vec<&str> = files.iter().flat_map(|(option, file)| [*option, file]).collect();
    all.extend(arguments);
    (TcpServer::start_tls(&all), folder)
}

fn options(server: &TcpServer, host: &str) -> RedisOptions {
    RedisOptions::new(format!("rediss://{host}:{}", server.port).parse().unwrap(), KeyId::from_u32(1))
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
    assert!(RedisStore::open(RedisOptions::new(plain, KeyId::from_u32(1))).await.is_err());
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

/// An operator gave the file of a private authority and left `redis://` in the URL. The password went over the network in the
/// clear.
#[tokio::test(flavor = "multi_thread")]
async fn certificates_without_tls_and_unreadable_ones_are_refused() {
    let ours = authority("ours");
    let plain = || RedisOptions::new("redis://localhost:1".parse().unwrap(), KeyId::from_u32(1));
    let refused = RedisStore::open(plain().authorities(ours.pem())).await.unwrap_err();
    assert!(matches!(refused, RedisOpenError::Tls(_)) && refused.to_string().contains("rediss://"), "{refused}");
    let tls = || RedisOptions::new("rediss://localhost:1".parse().unwrap(), KeyId::from_u32(1));
    for pem in ["", "junk", "-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n"] {
        let refused = tls().authorities(pem).check().unwrap_err();
        assert!(matches!(refused, RedisOpenError::Tls(_)), "{refused}");
    }
    tls().authorities(ours.pem()).check().unwrap();
}
