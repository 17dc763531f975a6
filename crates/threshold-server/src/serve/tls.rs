//! TLS by a certificate and a key from files.

use std::path::Path;
use std::sync::Arc;

use anyhow::{Context as _, bail};
use tokio_rustls::TlsAcceptor;
use tokio_rustls::rustls::ServerConfig;
use tokio_rustls::rustls::crypto::ring;
use tokio_rustls::rustls::pki_types::pem::PemObject as _;
use tokio_rustls::rustls::pki_types::{CertificateDer, PrivateKeyDer};

/// Reads a certificate chain and its key.
pub(super) fn acceptor(cert: &Path, key: &Path) -> anyhow::Result<TlsAcceptor> {
    let name = cert.display();
    let chain = CertificateDer::pem_file_iter(cert).with_context(|| format!("cannot read {name}"))?;
    let chain: Vec<CertificateDer<'static>> =
        chain.collect::<Result<_, _>>().with_context(|| format!("{name} is no certificate in PEM"))?;
    if chain.is_empty() {
        bail!("{name} has no certificate");
    }
    let private = PrivateKeyDer::from_pem_file(key).with_context(|| format!("{} has no key in PEM", key.display()))?;
    let mut config = ServerConfig::builder_with_provider(Arc::new(ring::default_provider()))
        .with_safe_default_protocol_versions()?
        .with_no_client_auth()
        .with_single_cert(chain, private)
        .with_context(|| format!("{name} and {} do not belong together", key.display()))?;
    config.alpn_protocols = vec![b"http/1.1".to_vec()];
    Ok(TlsAcceptor::from(Arc::new(config)))
}
