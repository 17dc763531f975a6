//! TLS by a certificate and a key from files, which may change while the server runs.

use std::fmt;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{SystemTime, UNIX_EPOCH};

use anyhow::{Context as _, bail};
use arc_swap::ArcSwap;
use tokio_rustls::TlsAcceptor;
use tokio_rustls::rustls::ServerConfig;
use tokio_rustls::rustls::crypto::ring;
use tokio_rustls::rustls::pki_types::pem::PemObject as _;
use tokio_rustls::rustls::pki_types::{CertificateDer, PrivateKeyDer};
use tokio_rustls::rustls::server::{ClientHello, ResolvesServerCert};
use tokio_rustls::rustls::sign::CertifiedKey;
use x509_parser::parse_x509_certificate;

use crate::door::{Health, Trouble};
use crate::source::read_bytes;

/// The largest file of either kind, in bytes: chains are some kilobytes.
const MAX_PEM: usize = 1 << 20;

/// The certificate chain in force, and where the next one will be.
pub(crate) struct Certificates {
    /// The files of the chain and of its key.
    paths: [PathBuf; 2],
    in_force: ArcSwap<Pair>,
    /// Why clients do not accept what is in force, as it was last logged.
    told: Mutex<Option<String>>,
}

/// A certificate chain with its key, and when clients accept it.
struct Pair {
    key: Arc<CertifiedKey>,
    validity: Validity,
}

/// When every certificate of a chain is valid, in Unix seconds.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Validity {
    from: i64,
    until: i64,
}

impl Certificates {
    /// Reads a certificate chain and its key. Returns what their files hold, too.
    pub(super) fn read(cert: &Path, key: &Path) -> anyhow::Result<(Self, [Vec<u8>; 2])> {
        let paths = [cert.to_owned(), key.to_owned()];
        let files = [read_bytes(cert, MAX_PEM)?, read_bytes(key, MAX_PEM)?];
        let in_force = ArcSwap::from_pointee(pair(&paths, &files)?);
        Ok((Self { paths, in_force, told: Mutex::default() }, files))
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

    /// Says whether clients accept the certificate at this time: in the log where that has changed, and on `/readyz`.
    /// Connections go on either way, since some clients do not look.
    pub(crate) fn tell_validity(&self, now: SystemTime, health: &Health) {
        let trouble = self.in_force.load().validity.trouble(now);
        let mut told = self.told.lock().unwrap_or_else(PoisonError::into_inner);
        if *told != trouble {
            health.validity(trouble.clone().map(|trouble| Trouble { open: trouble.clone(), full: trouble }));
            if let Some(trouble) = &trouble {
                tracing::warn!(certificate = %self, "{trouble}: clients refuse it");
            }
            *told = trouble;
        }
    }
}

impl Validity {
    /// That of a chain: a client refuses it if one of its certificates is out of date. What cannot be read here is left to
    /// clients.
    fn of(chain: &[CertificateDer<'_>]) -> Self {
        let mut validity = Self { from: i64::MIN, until: i64::MAX };
        for certificate in chain {
            let Ok((_, certificate)) = parse_x509_certificate(certificate) else { continue };
            let own = certificate.validity();
            validity.from = validity.from.max(own.not_before.timestamp());
            validity.until = validity.until.min(own.not_after.timestamp());
        }
        validity
    }

    /// Why clients do not accept the chain at this time, if they do not.
    fn trouble(self, now: SystemTime) -> Option<String> {
        let now = now.duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs());
        let now = i64::try_from(now).unwrap_or(i64::MAX);
        let date = |seconds| jiff::Timestamp::from_second(seconds).map_or_else(|_| "?".to_owned(), |at| at.to_string());
        if now > self.until {
            return Some(format!("the certificate expired at {}", date(self.until)));
        }
        (now < self.from).then(|| format!("the certificate is not valid before {}", date(self.from)))
    }
}

fn pair([cert_path, key_path]: &[PathBuf; 2], [cert, key]: &[Vec<u8>; 2]) -> anyhow::Result<Pair> {
    let (name, key_name) = (cert_path.display(), key_path.display());
    let chain: Vec<CertificateDer<'static>> = CertificateDer::pem_slice_iter(cert)
        .collect::<Result<_, _>>()
        .with_context(|| format!("{name} is no certificate in PEM"))?;
    if chain.is_empty() {
        bail!("{name} has no certificate");
    }
    let key = PrivateKeyDer::from_pem_slice(key).with_context(|| format!("{key_name} has no key in PEM"))?;
    let validity = Validity::of(&chain);
    let key = CertifiedKey::from_der(chain, key, &ring::default_provider())
        .with_context(|| format!("{name} and {key_name} do not belong together"))?;
    Ok(Pair { key: Arc::new(key), validity })
}

impl ResolvesServerCert for Certificates {
    fn resolve(&self, _: ClientHello<'_>) -> Option<Arc<CertifiedKey>> {
        Some(Arc::clone(&self.in_force.load().key))
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
