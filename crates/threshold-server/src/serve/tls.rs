//! The TLS certificate and its key, from files that may change while the server runs.

use std::fmt;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{SystemTime, UNIX_EPOCH};

use anyhow::{Context as _, bail};
use arc_swap::ArcSwap;
use threshold_limiter::files::Trust;
use tokio_rustls::TlsAcceptor;
use tokio_rustls::rustls::ServerConfig;
use tokio_rustls::rustls::crypto::ring;
use tokio_rustls::rustls::pki_types::pem::PemObject as _;
use tokio_rustls::rustls::pki_types::{CertificateDer, PrivateKeyDer};
use tokio_rustls::rustls::server::{ClientHello, ResolvesServerCert};
use tokio_rustls::rustls::sign::CertifiedKey;
use x509_parser::parse_x509_certificate;

use super::connection::Protocols;
use crate::door::{Health, Problem};
use threshold_rehearsal::source::read_trusted;

/// The largest file, in bytes: a certificate chain is some kilobytes.
const MAX_PEM: usize = 1 << 20;

/// The certificate chain in use, and the files it is reloaded from.
pub(crate) struct Certificates {
    /// The files of the chain and of the key.
    paths: [PathBuf; 2],
    in_force: ArcSwap<Pair>,
    /// Why clients refuse the certificate, as last logged.
    logged: Mutex<Option<String>>,
}

/// A certificate chain with its key and its validity.
struct Pair {
    key: Arc<CertifiedKey>,
    validity: Validity,
}

/// The time in which every certificate of a chain is valid, in Unix seconds.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Validity {
    from: i64,
    until: i64,
}

impl Certificates {
    /// Reads a certificate chain and its key. Also returns the contents of the two files.
    pub(super) fn read(cert: &Path, key: &Path) -> anyhow::Result<(Self, [Vec<u8>; 2])> {
        let paths = [cert.to_owned(), key.to_owned()];
        let read = |path| read_trusted(path, Trust::Keys, MAX_PEM);
        let files = [read(cert)?, read(key)?];
        let in_force = ArcSwap::from_pointee(pair(&paths, &files)?);
        Ok((Self { paths, in_force, logged: Mutex::default() }, files))
    }

    /// Returns an acceptor that uses the certificate in force at each handshake.
    pub(super) fn acceptor(self: &Arc<Self>, protocols: Protocols) -> anyhow::Result<TlsAcceptor> {
        let mut config = ServerConfig::builder_with_provider(Arc::new(ring::default_provider()))
            .with_safe_default_protocol_versions()?
            .with_no_client_auth()
            .with_cert_resolver(Arc::clone(self) as _);
        // In the order of preference.
        config.alpn_protocols = match protocols {
            Protocols::Http => vec![b"h2".to_vec(), b"http/1.1".to_vec()],
            Protocols::Grpc => vec![b"h2".to_vec()],
            // Redis clients choose no protocol in a handshake, and have no TLS here.
            Protocols::Resp => Vec::new(),
        };
        Ok(TlsAcceptor::from(Arc::new(config)))
    }

    pub(crate) fn paths(&self) -> &[PathBuf] {
        &self.paths
    }

    /// Parses changed files, and uses them for new connections.
    pub(crate) fn load(&self, files: &[Vec<u8>]) -> anyhow::Result<()> {
        let files = files.as_array().context("expected two files, the certificate and its key")?;
        // Chain and key are replaced together, and only if they belong to each other. No handshake sees one without
        // the other.
        self.in_force.store(Arc::new(pair(&self.paths, files)?));
        Ok(())
    }

    /// Reports on `/readyz` whether the certificate is valid, and logs it when that changes. Connections are accepted either
    /// way, because some clients do not verify.
    pub(crate) fn report_validity(&self, now: SystemTime, health: &Health) {
        let validity = self.in_force.load().validity;
        health.set_expiry(Some(validity.until).filter(|until| *until != i64::MAX));
        let problem = validity.problem(now);
        // Called at every check of the files, so only a change is logged.
        let mut logged = self.logged.lock().unwrap_or_else(PoisonError::into_inner);
        if *logged != problem {
            health.set_validity(problem.clone().map(|problem| Problem { public: problem.clone(), details: problem }));
            if let Some(reason) = &problem {
                tracing::warn!(certificate = %self, reason, "clients refuse the certificate");
            }
            *logged = problem;
        }
    }
}

impl Validity {
    /// Returns the validity of a chain: a client refuses it if one of its certificates is not valid. A certificate that cannot
    /// be parsed here is left to clients to judge.
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

    /// Returns why clients refuse the chain at this time.
    fn problem(self, now: SystemTime) -> Option<String> {
        let now = now.duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs());
        let now = i64::try_from(now).unwrap_or(i64::MAX);
        let date = |seconds| jiff::Timestamp::from_second(seconds).map_or_else(|_| "?".to_owned(), |at| at.to_string());
        // Inclusive on both sides, as RFC 5280 defines the validity.
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
        .with_context(|| format!("{name} is not a certificate in PEM"))?;
    if chain.is_empty() {
        bail!("{name} has no certificate");
    }
    let key = PrivateKeyDer::from_pem_slice(key).with_context(|| format!("{key_name} has no private key in PEM"))?;
    let validity = Validity::of(&chain);
    let key = CertifiedKey::from_der(chain, key, &ring::default_provider())
        .with_context(|| format!("the key in {key_name} does not belong to the certificate in {name}"))?;
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
