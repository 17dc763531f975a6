//! The certificates that the operators' command line trusts.

use std::path::Path;
use std::sync::Arc;

use anyhow::{Context as _, bail};
use tokio_rustls::rustls::crypto::ring;
use tokio_rustls::rustls::pki_types::CertificateDer;
use tokio_rustls::rustls::pki_types::pem::PemObject as _;
use tokio_rustls::rustls::{self, RootCertStore};
use ureq::tls::{Certificate, RootCerts, TlsConfig};

use threshold_rehearsal::source::read_bytes;

/// The largest file, in bytes: the certificates of all public authorities together are a quarter of it.
const MAX_PEM: usize = 1 << 20;

/// Trusts the certificates of a file alone, or those of the system if there is none.
pub(super) fn config(ca: Option<&Path>) -> anyhow::Result<TlsConfig> {
    let trusted = match ca {
        Some(path) => read(path)?,
        None => system().map_err(|error| anyhow::anyhow!("{error}; --ca FILE names the server's"))?,
    };
    Ok(trusting(&trusted))
}

/// Trusts the certificates of the system.
pub(crate) fn system_tls() -> anyhow::Result<TlsConfig> {
    Ok(trusting(&system()?))
}

fn trusting(trusted: &[CertificateDer<'static>]) -> TlsConfig {
    let trusted: Vec<Certificate<'static>> =
        trusted.iter().map(|certificate| Certificate::from_der(certificate).to_owned()).collect();
    let config = TlsConfig::builder().root_certs(RootCerts::from(trusted));
    config.unversioned_rustls_crypto_provider(Arc::new(ring::default_provider())).build()
}

fn read(path: &Path) -> anyhow::Result<Vec<CertificateDer<'static>>> {
    let name = path.display();
    let certificates: Vec<CertificateDer<'static>> = CertificateDer::pem_slice_iter(&read_bytes(path, MAX_PEM)?)
        .collect::<Result<_, _>>()
        .with_context(|| format!("{name} is not a certificate in PEM"))?;
    if certificates.is_empty() {
        bail!("{name} has no certificate");
    }
    // The client ignores a certificate that it cannot parse, and would then report an unknown issuer.
    let mut store = RootCertStore::empty();
    for certificate in &certificates {
        store.add(certificate.clone()).with_context(|| format!("{name} has a certificate that cannot be used"))?;
    }
    Ok(certificates)
}

/// Reads the certificates of the system, or those that `SSL_CERT_FILE` and `SSL_CERT_DIR` name.
fn system() -> anyhow::Result<Vec<CertificateDer<'static>>> {
    let found = rustls_native_certs::load_native_certs();
    if found.certs.is_empty() {
        let reason = found.errors.first().map(|error| format!(": {error}")).unwrap_or_default();
        bail!("this system has no certificates of authorities{reason}");
    }
    Ok(found.certs)
}

/// Returns whether the server's certificate is the reason of an error.
pub(super) fn is_refused_certificate(error: &ureq::Error) -> bool {
    let refused = |error: &rustls::Error| matches!(error, rustls::Error::InvalidCertificate(_));
    match error {
        ureq::Error::Rustls(error) => refused(error),
        // The handshake reports it as the reason of a failed read.
        ureq::Error::Io(error) => {
            error.get_ref().and_then(|error| error.downcast_ref::<rustls::Error>()).is_some_and(refused)
        }
        _ => false,
    }
}
