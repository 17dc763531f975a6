//! TLS by a certificate and a key from files, which may change while the server runs.

use std::fmt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use anyhow::{Context as _, bail};
use arc_swap::ArcSwap;
use tokio_rustls::TlsAcceptor;
use tokio_rustls::rustls::ServerConfig;
use tokio_rustls::rustls::crypto::ring;
use tokio_rustls::rustls::pki_types::pem::PemObject as _;
use tokio_rustls::rustls::pki_types::{CertificateDer, PrivateKeyDer};
use tokio_rustls::rustls::server::{ClientHello, ResolvesServerCert};
use tokio_rustls::rustls::sign::CertifiedKey;

use crate::source::read_bytes;

/// The largest file of either kind, in bytes: chains are some kilobytes.
const MAX_PEM: usize = 1 << 20;

/// The certificate chain in force, and where the next one will be.
pub(crate) struct Certificates {
    /// The files of the chain and of its key.
    paths: [PathBuf; 2],
    in_force: ArcSwap<CertifiedKey>,
}

impl Certificates {
    /// Reads a certificate chain and its key. Returns what their files hold, too.
    pub(super) fn read(cert: &Path, key: &Path) -> anyhow::Result<(Self, [Vec<u8>; 2])> {
        let paths = [cert.to_owned(), key.to_owned()];
        let files = [read_bytes(cert, MAX_PEM)?, read_bytes(key, MAX_PEM)?];
        let in_force = ArcSwap::from_pointee(pair(&paths, &files)?);
        Ok((Self { paths, in_force }, files))
    }

    /// What connections shake hands with: each by the certificate that is in force then.
    pub(super) fn acceptor(self: &Arc<Self>) -> anyhow::Result<TlsAcceptor> {
        let mut config = ServerConfig::builder_with_provider(Arc::new(ring::default_provider()))
            .with_safe_default_protocol_versions()?
            .with_no_client_auth()
            .with_cert_resolver(Arc::clone(self) as _);
        config.alpn_protocols = vec![b"http/1.1".to_vec()];
        Ok(TlsAcceptor::from(Arc::new(config)))
    }

    pub(crate) fn paths(&self) -> &[PathBuf] {
        &self.paths
    }

    /// Puts what its files hold in force for the connections to come.
    pub(crate) fn load(&self, files: &[Vec<u8>]) -> anyhow::Result<()> {
        let files = files.as_array().context("a certificate and its key are two files")?;
        self.in_force.store(Arc::new(pair(&self.paths, files)?));
        Ok(())
    }
}

fn pair([cert_path, key_path]: &[PathBuf; 2], [cert, key]: &[Vec<u8>; 2]) -> anyhow::Result<CertifiedKey> {
    let (name, key_name) = (cert_path.display(), key_path.display());
    let chain: Vec<CertificateDer<'static>> = CertificateDer::pem_slice_iter(cert)
        .collect::<Result<_, _>>()
        .with_context(|| format!("{name} is no certificate in PEM"))?;
    if chain.is_empty() {
        bail!("{name} has no certificate");
    }
    let key = PrivateKeyDer::from_pem_slice(key).with_context(|| format!("{key_name} has no key in PEM"))?;
    CertifiedKey::from_der(chain, key, &ring::default_provider())
        .with_context(|| format!("{name} and {key_name} do not belong together"))
}

impl ResolvesServerCert for Certificates {
    fn resolve(&self, _: ClientHello<'_>) -> Option<Arc<CertifiedKey>> {
        Some(self.in_force.load_full())
    }
}

impl fmt::Display for Certificates {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let [cert, _] = &self.paths;
        cert.display().fmt(f)
    }
}

impl fmt::Debug for Certificates {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Certificates").field("paths", &self.paths).finish_non_exhaustive()
    }
}
