//! A connection to one Redis server, over TCP, TLS or a Unix socket.
//!
//! The stream is opened here and not by the `redis` crate: it would read the system's certificates at every connect, and use the
//! cryptography provider of the process, which a library must not choose.

use std::io;
use std::sync::Arc;
use std::time::Duration;

use ::redis::aio::MultiplexedConnection;
use ::redis::{AsyncConnectionConfig, RedisConnectionInfo, RedisError};
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::TcpStream;
use tokio_rustls::TlsConnector;
use tokio_rustls::rustls::crypto::ring;
use tokio_rustls::rustls::pki_types::pem::PemObject as _;
use tokio_rustls::rustls::pki_types::{CertificateDer, PrivateKeyDer, ServerName};
use tokio_rustls::rustls::{ClientConfig, RootCertStore};

use super::RedisOpenError;
use super::url::{Address, Kind, Login, RedisUrl};

/// How long a connection attempt may take, with the TLS handshake and the login.
const CONNECT: Duration = Duration::from_secs(1);
/// After this long without an answer the connection counts as broken. Callers have given up much earlier.
const HANGS: Duration = Duration::from_secs(2);

/// The certificates of TLS connections, each a file's content in PEM.
#[derive(Clone, Default)]
pub(super) struct Certificates {
    /// The authorities to trust in place of the system's.
    pub(super) authorities: Option<Vec<u8>>,
    /// This node's own certificate chain and its key.
    pub(super) own: Option<(Vec<u8>, Vec<u8>)>,
}

/// How connections are opened: the login, the database and TLS.
#[derive(Clone)]
pub(super) struct ConnectOptions {
    login: RedisConnectionInfo,
    tls: Option<TlsConnector>,
}

impl ConnectOptions {
    /// Returns the options for the servers that hold the records.
    ///
    /// # Errors
    /// Fails if a certificate cannot be used, or if TLS is wanted and there are no authorities to trust.
    pub(super) fn new(url: &RedisUrl, certificates: &Certificates) -> Result<Self, String> {
        let tls = if url.has_tls { Some(tls_connector(certificates)?) } else { None };
        Ok(Self { login: login(url.login.as_ref()).set_db(i64::from(url.database)), tls })
    }
}

fn login(login: Option<&Login>) -> RedisConnectionInfo {
    // Without CLIENT SETINFO an ACL user needs one permission less.
    let info = RedisConnectionInfo::default().set_skip_set_lib_name();
    let Some(login) = login else { return info };
    let info = info.set_password(&login.password);
    match &login.user {
        Some(user) => info.set_username(user),
        None => info,
    }
}

/// Opens the connections of one server: the first one, and those that replace it.
#[derive(Debug)]
pub(super) struct Connector {
    options: ConnectOptions,
    address: Address,
}

impl Connector {
    /// Connects to the server that a URL names.
    pub(super) fn new(options: ConnectOptions, url: &RedisUrl) -> Result<Self, RedisOpenError> {
        let unsupported = match url.kind {
            Kind::Single => None,
            Kind::Sentinel { .. } => Some("redis+sentinel:// is not supported yet"),
            Kind::Cluster => Some("redis+cluster:// is not supported yet"),
        };
        if let Some(reason) = unsupported {
            return Err(RedisOpenError::Unsupported(reason));
        }
        let address = url.seeds.first().cloned().ok_or(RedisOpenError::Unsupported("the URL names no server"))?;
        Ok(Self { options, address })
    }

    pub(super) async fn open(&self) -> Result<MultiplexedConnection, RedisError> {
        open(&self.options, &self.address).await
    }
}

/// Opens a connection and logs in. Commands on it fail after two seconds without an answer.
pub(super) async fn open(options: &ConnectOptions, address: &Address) -> Result<MultiplexedConnection, RedisError> {
    let opened = tokio::time::timeout(CONNECT, open_untimed(options, address));
    opened.await.unwrap_or_else(|_| Err(io::Error::from(io::ErrorKind::TimedOut).into()))
}

async fn open_untimed(options: &ConnectOptions, address: &Address) -> Result<MultiplexedConnection, RedisError> {
    match (address, &options.tls) {
        (Address::Tcp { host, port }, tls) => {
            let stream = TcpStream::connect((host.as_str(), *port)).await?;
            stream.set_nodelay(true)?;
            let Some(tls) = tls else { return log_in(options, stream).await };
            let name = ServerName::try_from(host.clone()).map_err(io::Error::other)?;
            log_in(options, tls.connect(name, stream).await?).await
        }
        #[cfg(unix)]
        (Address::Unix(path), _) => log_in(options, tokio::net::UnixStream::connect(path).await?).await,
        #[cfg(not(unix))]
        (Address::Unix(_), _) => Err(io::Error::from(io::ErrorKind::Unsupported).into()),
    }
}

async fn log_in<S>(options: &ConnectOptions, stream: S) -> Result<MultiplexedConnection, RedisError>
where
    S: AsyncRead + AsyncWrite + Unpin + Send + 'static,
{
    let config = AsyncConnectionConfig::new().set_response_timeout(Some(HANGS));
    let (connection, driver) = MultiplexedConnection::new_with_config(&options.login, stream, config).await?;
    // Ends when the last clone of the connection is dropped.
    tokio::spawn(driver);
    Ok(connection)
}

fn tls_connector(certificates: &Certificates) -> Result<TlsConnector, String> {
    let roots = match &certificates.authorities {
        Some(pem) => authorities(pem)?,
        None => system_authorities()?,
    };
    let config = ClientConfig::builder_with_provider(Arc::new(ring::default_provider()))
        .with_safe_default_protocol_versions()
        .map_err(|error| error.to_string())?
        .with_root_certificates(roots);
    let config = match &certificates.own {
        None => config.with_no_client_auth(),
        Some((chain, key)) => {
            let chain = pem_certificates(chain, "the certificate for Redis")?;
            let key = PrivateKeyDer::from_pem_slice(key).map_err(|error| {
                format!("the key of the certificate for Redis is not a private key in PEM: {error}")
            })?;
            config
                .with_client_auth_cert(chain, key)
                .map_err(|error| format!("the certificate for Redis cannot be used with its key: {error}"))?
        }
    };
    Ok(TlsConnector::from(Arc::new(config)))
}

fn authorities(pem: &[u8]) -> Result<RootCertStore, String> {
    let mut roots = RootCertStore::empty();
    for certificate in pem_certificates(pem, "the authority of Redis")? {
        roots
            .add(certificate)
            .map_err(|error| format!("a certificate of the authority of Redis cannot be used: {error}"))?;
    }
    Ok(roots)
}

fn pem_certificates(pem: &[u8], what: &str) -> Result<Vec<CertificateDer<'static>>, String> {
    let certificates = CertificateDer::pem_slice_iter(pem).collect::<Result<Vec<_>, _>>();
    let certificates = certificates.map_err(|error| format!("{what} is not a certificate in PEM: {error}"))?;
    if certificates.is_empty() {
        return Err(format!("{what} has no certificate in PEM"));
    }
    Ok(certificates)
}

/// Reads the certificates of the system, or those that `SSL_CERT_FILE` and `SSL_CERT_DIR` name.
fn system_authorities() -> Result<RootCertStore, String> {
    let found = rustls_native_certs::load_native_certs();
    let mut roots = RootCertStore::empty();
    // Systems have some that rustls refuses, such as those of old versions of X.509.
    roots.add_parsable_certificates(found.certs);
    if roots.is_empty() {
        let reason = found.errors.first().map(|error| format!(": {error}")).unwrap_or_default();
        return Err(format!("this system has no certificates of authorities{reason}"));
    }
    Ok(roots)
}

impl std::fmt::Debug for ConnectOptions {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("ConnectOptions").field("has_tls", &self.tls.is_some()).finish_non_exhaustive()
    }
}

impl std::fmt::Debug for Certificates {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Self { authorities, own } = self;
        f.debug_struct("Certificates")
            .field("authorities", &authorities.is_some())
            .field("own", &own.is_some())
            .finish()
    }
}
