//! A connection to one Redis server, over TCP, TLS or a Unix socket.
//!
//! The stream is opened here and not by the `redis` crate: it would read the system's certificates at every connect, and use the
//! cryptography provider of the process, which a library must not choose.

use std::error::Error;
use std::io;
use std::sync::Arc;
use std::time::Duration;

use ::redis::aio::MultiplexedConnection;
use ::redis::{AsyncConnectionConfig, ErrorKind, RedisConnectionInfo, RedisError, ServerErrorKind};
use threshold_core::KeyId;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::TcpStream;
use tokio::time::{Instant, timeout_at};
use tokio_rustls::TlsConnector;
use tokio_rustls::rustls::crypto::ring;
use tokio_rustls::rustls::pki_types::pem::PemObject as _;
use tokio_rustls::rustls::pki_types::{CertificateDer, PrivateKeyDer, ServerName};
use tokio_rustls::rustls::{self, CertificateError, ClientConfig, RootCertStore};

use super::RedisOpenError;
use super::errors;
use super::secret::{self, Checked, SecretIds, SecretRefusal};
use super::sentinel::Sentinels;
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
    /// Fails if a certificate cannot be used, or is given without TLS, or if there are no authorities to trust.
    pub(super) fn new(url: &RedisUrl, certificates: &Certificates) -> Result<Self, String> {
        let tls = if url.has_tls {
            Some(tls_connector(certificates)?)
        } else if certificates.authorities.is_some() || certificates.own.is_some() {
            return Err(
                "there are certificates, and the URL is without TLS: write rediss:// in place of redis://".to_owned()
            );
        } else {
            None
        };
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

/// Opens the connections to one primary: the first one, and those that replace it.
#[derive(Debug)]
pub(super) struct Connector {
    options: ConnectOptions,
    target: Target,
    /// The secrets that the server must have, checked on every connection.
    secrets: Option<SecretIds>,
}

#[derive(Debug)]
enum Target {
    Server(Address),
    Sentinels(Sentinels),
}

impl Connector {
    /// Connects to the one primary that a URL names, and checks that its records were made with one of these secrets.
    pub(super) fn new(options: ConnectOptions, url: &RedisUrl, secrets: SecretIds) -> Result<Self, RedisOpenError> {
        let target = match &url.kind {
            Kind::Single => Target::Server(url.seeds.first().cloned().ok_or(RedisOpenError::Unsupported("no host"))?),
            Kind::Sentinel { name } => {
                let sentinels = ConnectOptions { login: login(url.sentinel_login.as_ref()), tls: options.tls.clone() };
                Target::Sentinels(Sentinels::new(name.clone(), sentinels, url.seeds.clone()))
            }
            Kind::Cluster => return Err(RedisOpenError::Unsupported("a Cluster has several primaries")),
        };
        Ok(Self { options, target, secrets: Some(secrets) })
    }

    /// Connects to one primary of a Cluster. The secrets are checked on the one that has the control partition.
    pub(super) fn to(options: ConnectOptions, address: Address, secrets: SecretIds) -> Self {
        Self { options, target: Target::Server(address), secrets: Some(secrets) }
    }

    /// Returns the address, if it is always the same.
    pub(super) fn address(&self) -> Option<&Address> {
        match &self.target {
            Target::Server(address) => Some(address),
            Target::Sentinels(_) => None,
        }
    }

    /// Opens a connection that can be used at once.
    pub(super) async fn open(&self) -> Result<MultiplexedConnection, ConnectError> {
        let (mut connection, address) = match &self.target {
            Target::Server(address) => {
                let opened = open(&self.options, address).await;
                (opened.map_err(|error| ConnectError::at(address, error))?, address.clone())
            }
            Target::Sentinels(sentinels) => sentinels.open(&self.options).await?,
        };
        // Before the connection is given to anyone: no decision is made on the records of another secret.
        if let Some(secrets) = self.secrets {
            let checked = secret::check(&mut connection, secrets).await;
            let checked =
                checked.map_err(|error| ConnectError::at(&address, self.options.first_reply(&address, error)));
            if let Checked::Refused(refusal) = checked? {
                return Err(ConnectError::Secret { refusal, own: secrets.present });
            }
        }
        Ok(connection)
    }
}

/// Why there is no connection to a primary.
#[derive(Debug, thiserror::Error)]
pub(super) enum ConnectError {
    #[error("{address}: {}", explain(error))]
    Server { address: Address, error: RedisError },
    #[error("{0} is a replica")]
    Replica(Address),
    #[error("{0} is not a node of a Cluster: write redis://{0} for one server")]
    NoCluster(Address),
    #[error("no Sentinel names a primary that answers: {0}")]
    NoPrimary(String),
    #[error("{}", refusal.clone().of(*own))]
    Secret { refusal: SecretRefusal, own: KeyId },
}

impl ConnectError {
    pub(super) fn at(address: &Address, error: RedisError) -> Self {
        Self::Server { address: address.clone(), error }
    }
}

impl From<ConnectError> for RedisOpenError {
    fn from(error: ConnectError) -> Self {
        match error {
            ConnectError::Secret { refusal, own } => refusal.of(own),
            ConnectError::Server { address, error } if error.kind() == ErrorKind::Server(ServerErrorKind::ReadOnly) => {
                Self::Replica { server: address.to_string() }
            }
            error => Self::Connect(error.to_string()),
        }
    }
}

/// Returns an error of Redis, with what an operator can do about it.
pub(super) fn explain(error: &RedisError) -> String {
    const WRONG_LOGIN: &str = "the user or the password is wrong, or the user is off. In a URL the characters @ : / ? # & % of both are \
                               written %40 %3A %2F %3F %23 %26 %25";
    const NO_RIGHT: &str = "the ACL of the user does not suffice: docs/scale.md lists the rules";
    let advice = match error.code() {
        // An error of this file, in words already.
        _ if error.kind() == ErrorKind::InvalidClientConfig => return error.detail().unwrap_or_default().to_owned(),
        _ if error.kind() == ErrorKind::AuthenticationFailed => WRONG_LOGIN,
        Some("WRONGPASS") => WRONG_LOGIN,
        Some("NOAUTH") => "the server needs a password: redis://USER:PASSWORD@HOST",
        Some("NOPERM") => NO_RIGHT,
        Some("LOADING") => "the server is loading its data",
        Some("OOM") => "the memory of the server is full: raise maxmemory",
        Some("READONLY") => "the server is a replica",
        Some("MISCONF") => "the server cannot save its data, and refuses writes",
        Some("MASTERDOWN") => "the server is a replica without its primary",
        Some("WRONGTYPE") => "a key of the store was written by another program",
        _ if errors::is_denied_in_script(&error.to_string()) => NO_RIGHT,
        _ if error.is_connection_refusal() => "no server listens there",
        _ if error.is_timeout() => return "no answer in time".to_owned(),
        // The crate adds the kind to the text of an error of this one.
        _ if error.kind() == ErrorKind::Client => {
            return error.to_string().trim_end_matches(" - Client").to_owned();
        }
        _ => return error.to_string(),
    };
    format!("{advice} ({error})")
}

/// Returns an error that is already in words for operators.
fn in_words(text: String) -> RedisError {
    RedisError::from((ErrorKind::InvalidClientConfig, "cannot connect", text))
}

/// A server without TLS answers the handshake with an error, closes the connection, or waits for the end of what it takes for a command.
const NO_TLS: &str = "the server does not answer in TLS: write redis:// if the port is one without TLS";
/// Under TLS 1.3 a node hears that its certificate is missing only after the handshake, and often only by the end of the connection.
const CERTIFICATE: &str = "the server closed the connection: if it asks for a client certificate, give one that it accepts with --store-cert and --store-key";
const NEEDS_TLS: &str =
    "the server closed the connection before its first answer: write rediss:// if the port is one for TLS";

impl ConnectOptions {
    /// Explains an error of the first exchange on a connection. Until then a server may refuse TLS, the lack of it, or the lack of a
    /// certificate.
    pub(super) fn first_reply(&self, address: &Address, error: RedisError) -> RedisError {
        if let Some(tls) = tls_error_of(&error) {
            return in_words(explain_tls(tls));
        }
        let is_closed = error.kind() == ErrorKind::Parse || (error.is_io_error() && !error.is_timeout());
        match (address, &self.tls) {
            (Address::Tcp { .. }, None) if is_closed => in_words(NEEDS_TLS.to_owned()),
            (Address::Tcp { .. }, Some(_)) if is_closed => in_words(CERTIFICATE.to_owned()),
            _ => error,
        }
    }
}

/// Explains a TLS handshake that failed.
fn handshake_failure(error: &io::Error) -> RedisError {
    let tls = error.get_ref().and_then(|inner| inner.downcast_ref());
    in_words(tls.map_or_else(|| NO_TLS.to_owned(), explain_tls))
}

/// Returns what an operator can do about a failure of TLS.
fn explain_tls(error: &rustls::Error) -> String {
    let advice = match error {
        rustls::Error::InvalidMessage(_) => return NO_TLS.to_owned(),
        rustls::Error::AlertReceived(_) => return CERTIFICATE.to_owned(),
        rustls::Error::InvalidCertificate(CertificateError::UnknownIssuer) => {
            "the certificate of the server is from an unknown authority: name it with --store-ca"
        }
        rustls::Error::InvalidCertificate(
            CertificateError::NotValidForName | CertificateError::NotValidForNameContext { .. },
        ) => "the certificate of the server is for another host: write one of its names in the URL",
        _ => "the TLS handshake failed",
    };
    format!("{advice} ({error})")
}

/// Returns the error of TLS that caused an error of a connection.
fn tls_error_of(error: &RedisError) -> Option<&rustls::Error> {
    // The crate returns the `Arc` as the source, and its own source would be that of the error of TLS.
    let shared = error.source()?.downcast_ref::<Arc<dyn Error + Send + Sync>>()?;
    shared.downcast_ref::<io::Error>()?.get_ref()?.downcast_ref()
}

/// Opens a connection and logs in. Commands on it fail after two seconds without an answer.
pub(super) async fn open(options: &ConnectOptions, address: &Address) -> Result<MultiplexedConnection, RedisError> {
    let until = Instant::now().checked_add(CONNECT).unwrap_or_else(Instant::now);
    let late = |_| RedisError::from(io::Error::from(io::ErrorKind::TimedOut));
    match (address, &options.tls) {
        (Address::Tcp { host, port }, tls) => {
            let stream = timeout_at(until, TcpStream::connect((host.as_str(), *port))).await.map_err(late)??;
            stream.set_nodelay(true)?;
            let Some(tls) = tls else { return log_in(options, address, until, stream).await };
            let name = ServerName::try_from(host.clone()).map_err(io::Error::other)?;
            let stream = timeout_at(until, tls.connect(name, stream)).await;
            let stream = stream.map_err(|_| in_words(NO_TLS.to_owned()))?.map_err(|error| handshake_failure(&error))?;
            log_in(options, address, until, stream).await
        }
        #[cfg(unix)]
        (Address::Unix(path), _) => log_in(options, address, until, tokio::net::UnixStream::connect(path).await?).await,
        #[cfg(not(unix))]
        (Address::Unix(_), _) => Err(io::Error::from(io::ErrorKind::Unsupported).into()),
    }
}

async fn log_in<S>(
    options: &ConnectOptions,
    address: &Address,
    until: Instant,
    stream: S,
) -> Result<MultiplexedConnection, RedisError>
where
    S: AsyncRead + AsyncWrite + Unpin + Send + 'static,
{
    let config = AsyncConnectionConfig::new().set_response_timeout(Some(HANGS));
    let opened = timeout_at(until, MultiplexedConnection::new_with_config(&options.login, stream, config)).await;
    let opened = opened.unwrap_or_else(|_| Err(io::Error::from(io::ErrorKind::TimedOut).into()));
    let (connection, driver) = opened.map_err(|error| options.first_reply(address, error))?;
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
