//! The URL of a store in Redis.
//!
//! Errors never quote the part of a URL that may hold a password. A password whose `/`, `?`, `#` or `@` is not percent-encoded
//! spills into other parts, so hosts, ports and paths are named by their position only.

use std::fmt;
use std::net::Ipv6Addr;
use std::path::PathBuf;
use std::str::FromStr;

use percent_encoding::percent_decode_str;

const SERVER_PORT: u16 = 6379;
const SENTINEL_PORT: u16 = 26379;
/// The most hosts in one URL. A client needs a few to begin with, and learns the others from them.
const MAX_HOSTS: usize = 64;

/// Where a store in Redis is, and how to log in there.
///
/// | URL | meaning |
/// |---|---|
/// | `redis://USER:PASSWORD@HOST:PORT/DATABASE` | one server |
/// | `redis+unix:///PATH?db=DATABASE&user=USER&pass=PASSWORD` | one server, over a Unix socket |
/// | `redis+sentinel://USER:PASSWORD@HOST:PORT,HOST:PORT/NAME/DATABASE` | the primary that these Sentinels name |
/// | `redis+cluster://USER:PASSWORD@HOST:PORT,HOST:PORT` | a Redis Cluster with these nodes |
/// | `rediss://`, `rediss+sentinel://`, `rediss+cluster://` | the same over TLS |
///
/// User, password, port and database are optional. Sentinels with credentials of their own take `?sentinel_user=USER` and
/// `&sentinel_password=PASSWORD`. Characters such as `@`, `:`, `/`, `?`, `#`, `&` and `%` in a user or password are percent-encoded.
///
/// Displayed, and in debug output, it is without user and password.
#[derive(Clone, PartialEq, Eq)]
pub struct RedisUrl {
    pub(super) kind: Kind,
    pub(super) has_tls: bool,
    /// Never empty. Of [`Kind::Single`] exactly one.
    pub(super) seeds: Vec<Address>,
    pub(super) login: Option<Login>,
    /// The login at the Sentinels.
    pub(super) sentinel_login: Option<Login>,
    pub(super) database: u32,
}

/// The kind of deployment that a URL names.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Kind {
    Single,
    /// The seeds are Sentinels, which know the primary under this name.
    Sentinel {
        name: String,
    },
    /// The seeds are some nodes of the Cluster.
    Cluster,
}

/// The address of one server.
#[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(super) enum Address {
    /// A host name, or an IP address without brackets.
    Tcp {
        host: String,
        port: u16,
    },
    Unix(PathBuf),
}

/// A password, and the ACL user it belongs to.
#[derive(Clone, PartialEq, Eq)]
pub(super) struct Login {
    pub(super) user: Option<String>,
    pub(super) password: String,
}

/// Why a text is not the URL of a store. Contains no password.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub struct RedisUrlError(String);

impl RedisUrlError {
    fn new(reason: impl Into<String>) -> Self {
        Self(reason.into())
    }
}

impl RedisUrl {
    /// Returns whether it names a Redis Cluster.
    #[must_use]
    pub fn is_cluster(&self) -> bool {
        self.kind == Kind::Cluster
    }
}

impl FromStr for RedisUrl {
    type Err = RedisUrlError;

    fn from_str(text: &str) -> Result<Self, RedisUrlError> {
        if text.chars().any(|character| character.is_whitespace() || character.is_control()) {
            return Err(RedisUrlError::new("the URL contains a space or a control character"));
        }
        let Some((scheme, rest)) = text.split_once("://") else {
            return Err(RedisUrlError::new("the URL has no scheme, such as redis://"));
        };
        match scheme {
            "redis+unix" => unix_socket(rest),
            "redis" | "redis+sentinel" | "redis+cluster" => over_tcp(scheme, false, rest),
            "rediss" => over_tcp("redis", true, rest),
            "rediss+sentinel" => over_tcp("redis+sentinel", true, rest),
            "rediss+cluster" => over_tcp("redis+cluster", true, rest),
            // A scheme that is no scheme may be anything, a password too.
            scheme if is_scheme(scheme) => Err(RedisUrlError::new(format!("{scheme}:// is not a URL of Redis"))),
            _ => Err(RedisUrlError::new("the URL does not begin with a scheme such as redis://")),
        }
    }
}

fn is_scheme(text: &str) -> bool {
    text.len() <= 20 && text.bytes().all(|byte| byte.is_ascii_alphanumeric() || matches!(byte, b'+' | b'-' | b'.'))
}

/// Parses a URL of TCP servers. The scheme is that without TLS.
fn over_tcp(scheme: &str, has_tls: bool, rest: &str) -> Result<RedisUrl, RedisUrlError> {
    let (authority, path, query) = split(rest)?;
    let (login, hosts) = match authority.split_once('@') {
        Some((_, hosts)) if hosts.contains('@') => return Err(not_encoded()),
        Some((login, hosts)) => (Some(parse_login(login)?), hosts),
        None => (None, authority),
    };
    let is_sentinel = scheme == "redis+sentinel";
    let seeds = parse_hosts(hosts, if is_sentinel { SENTINEL_PORT } else { SERVER_PORT })?;
    let mut parameters =
        Parameters::parse(query, if is_sentinel { &["sentinel_user", "sentinel_password"] } else { &[] })?;
    let sentinel_login = parameters.login("sentinel_user", "sentinel_password")?;
    let mut segments = path.strip_prefix('/').unwrap_or_default().split('/');
    let kind = match scheme {
        "redis+sentinel" => Kind::Sentinel { name: sentinel_name(segments.next())? },
        "redis+cluster" => Kind::Cluster,
        _ => Kind::Single,
    };
    let database = database(segments.next())?;
    if segments.next().is_some() {
        return Err(RedisUrlError::new("the path of the URL has too many parts"));
    }
    if kind == Kind::Cluster && database != 0 {
        return Err(RedisUrlError::new("a Redis Cluster has only database 0"));
    }
    if kind == Kind::Single && seeds.len() > 1 {
        return Err(RedisUrlError::new(
            "redis:// names one server: several are redis+cluster://HOST,HOST or redis+sentinel://HOST,HOST/NAME",
        ));
    }
    Ok(RedisUrl { kind, has_tls, seeds, login, sentinel_login, database })
}

/// Splits what follows the scheme into authority, path and query.
fn split(rest: &str) -> Result<(&str, &str, &str), RedisUrlError> {
    let end = rest.find(['/', '?', '#']).unwrap_or(rest.len());
    let (authority, tail) = rest.split_at_checked(end).unwrap_or((rest, ""));
    // No path or query that is accepted has an @, so a password was cut in two.
    if tail.contains('@') {
        return Err(not_encoded());
    }
    if tail.contains('#') {
        return Err(RedisUrlError::new("a URL of Redis has no part that begins with #"));
    }
    let (path, query) = tail.split_once('?').unwrap_or((tail, ""));
    Ok((authority, path, query))
}

fn not_encoded() -> RedisUrlError {
    RedisUrlError::new(
        "there is an @ where none belongs: user and password stand once, before the first host, and the characters @ : / ? # & % of \
         both are written %40 %3A %2F %3F %23 %26 %25",
    )
}

fn unix_socket(rest: &str) -> Result<RedisUrl, RedisUrlError> {
    let (path, query) = rest.split_once('?').unwrap_or((rest, ""));
    if !path.starts_with('/') || path.contains('#') {
        return Err(RedisUrlError::new(
            "redis+unix:// is followed by the absolute path of a socket: redis+unix:///PATH",
        ));
    }
    let mut parameters = Parameters::parse(query, &["db", "user", "pass"])?;
    Ok(RedisUrl {
        kind: Kind::Single,
        has_tls: false,
        seeds: vec![Address::Unix(PathBuf::from(decode(path, "the path")?))],
        login: parameters.login("user", "pass")?,
        sentinel_login: None,
        database: database(parameters.take("db").as_deref())?,
    })
}

fn parse_login(text: &str) -> Result<Login, RedisUrlError> {
    let Some((user, password)) = text.split_once(':') else {
        return Err(RedisUrlError::new("the part before @ is USER:PASSWORD, or :PASSWORD with its colon"));
    };
    let password = decode(password, "the password")?;
    if password.is_empty() {
        return Err(RedisUrlError::new("the password is empty"));
    }
    let user = decode(user, "the user")?;
    Ok(Login { user: (!user.is_empty()).then_some(user), password })
}

fn parse_hosts(text: &str, default_port: u16) -> Result<Vec<Address>, RedisUrlError> {
    let mut hosts = Vec::new();
    for (at, host) in text.split(',').enumerate() {
        let number = at.saturating_add(1);
        let reason = |what: &str| RedisUrlError::new(format!("host {number} of the URL {what}"));
        let (host, port) = match host.strip_prefix('[') {
            Some(rest) => {
                let (host, port) = rest.split_once(']').ok_or_else(|| reason("has no closing bracket"))?;
                host.parse::<Ipv6Addr>().map_err(|_| reason("is not an IPv6 address, although it is in brackets"))?;
                match port.strip_prefix(':') {
                    None if !port.is_empty() => return Err(reason("has text after its brackets that is not a port")),
                    port => (host, port),
                }
            }
            None => host.split_once(':').map_or((host, None), |(host, port)| (host, Some(port))),
        };
        if port.is_some_and(|port| port.contains(':')) {
            return Err(reason("has several colons: an IPv6 address is written in brackets, and : in a password %3A"));
        }
        if host.is_empty() {
            return Err(reason("is empty"));
        }
        let is_host = |byte: u8| byte.is_ascii_alphanumeric() || matches!(byte, b'-' | b'.' | b'_' | b':');
        if !host.bytes().all(is_host) {
            return Err(reason("is not a host name or an IP address"));
        }
        let port = match port {
            None => default_port,
            Some(port) => {
                let port = port.parse::<u16>().ok().filter(|port| *port != 0);
                port.ok_or_else(|| reason("has a port that is not a number from 1 to 65535"))?
            }
        };
        if hosts.len() == MAX_HOSTS {
            return Err(RedisUrlError::new(format!("the URL has more than {MAX_HOSTS} hosts")));
        }
        hosts.push(Address::Tcp { host: host.to_owned(), port });
    }
    Ok(hosts)
}

fn sentinel_name(segment: Option<&str>) -> Result<String, RedisUrlError> {
    let name = decode(segment.unwrap_or_default(), "the name of the primary")?;
    if name.is_empty() {
        return Err(RedisUrlError::new(
            "redis+sentinel:// needs the name under which the Sentinels know the primary: redis+sentinel://HOST/NAME",
        ));
    }
    Ok(name)
}

fn database(segment: Option<&str>) -> Result<u32, RedisUrlError> {
    let reason = |_| RedisUrlError::new("the database is not a number");
    segment.filter(|segment| !segment.is_empty()).map_or(Ok(0), |segment| segment.parse().map_err(reason))
}

fn decode(text: &str, what: &str) -> Result<String, RedisUrlError> {
    let mut parts = text.split('%');
    parts.next();
    // The decoder lets a lone % pass. A password with one was not encoded, and its other characters may be wrong too.
    let is_escape = |part: &str| part.bytes().take(2).filter(u8::is_ascii_hexdigit).count() == 2;
    if !parts.all(is_escape) {
        return Err(RedisUrlError::new(format!(
            "{what} has a % that is not followed by two hexadecimal digits: write %25"
        )));
    }
    let decoded = percent_decode_str(text).decode_utf8();
    decoded.map(Into::into).map_err(|_| RedisUrlError::new(format!("{what} is not UTF-8")))
}

/// The parameters of a query, each at most once.
struct Parameters(Vec<(&'static str, String)>);

impl Parameters {
    fn parse(query: &str, known: &[&'static str]) -> Result<Self, RedisUrlError> {
        let mut found = Self(Vec::new());
        for part in query.split('&').filter(|part| !part.is_empty()) {
            let (name, value) = part.split_once('=').unwrap_or((part, ""));
            let Some(name) = known.iter().copied().find(|known| *known == name) else {
                return Err(found.unknown(name));
            };
            if found.0.iter().any(|(before, _)| *before == name) {
                return Err(RedisUrlError::new(format!("the parameter {name} is given twice")));
            }
            found.0.push((name, decode(value, &format!("the parameter {name}"))?));
        }
        Ok(found)
    }

    fn unknown(&self, name: &str) -> RedisUrlError {
        // After a password this may be the rest of it, behind an & that was not encoded.
        match self.0.last() {
            Some((before @ ("pass" | "sentinel_password"), _)) => {
                RedisUrlError::new(format!("an unknown parameter follows {before}: in a password & is written %26"))
            }
            _ => RedisUrlError::new(format!("unknown parameter {name}")),
        }
    }

    fn take(&mut self, name: &str) -> Option<String> {
        let at = self.0.iter().position(|(own, _)| *own == name)?;
        Some(self.0.swap_remove(at).1)
    }

    fn login(&mut self, user: &str, password: &str) -> Result<Option<Login>, RedisUrlError> {
        let given = (self.take(user), self.take(password).filter(|password| !password.is_empty()));
        match given {
            (user, Some(password)) => Ok(Some(Login { user: user.filter(|user| !user.is_empty()), password })),
            (Some(_), None) => Err(RedisUrlError::new(format!("{user} needs {password}"))),
            (None, None) => Ok(None),
        }
    }
}

impl fmt::Display for RedisUrl {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let secure = if self.has_tls { "s" } else { "" };
        let (kind, name) = match &self.kind {
            Kind::Single if matches!(self.seeds.first(), Some(Address::Unix(_))) => ("+unix", None),
            Kind::Single => ("", None),
            Kind::Sentinel { name } => ("+sentinel", Some(name)),
            Kind::Cluster => ("+cluster", None),
        };
        write!(f, "redis{secure}{kind}://")?;
        for (at, seed) in self.seeds.iter().enumerate() {
            let comma = if at == 0 { "" } else { "," };
            write!(f, "{comma}{seed}")?;
        }
        if let Some(name) = name {
            write!(f, "/{name}")?;
        }
        match (self.database, kind) {
            (0, _) => Ok(()),
            (database, "+unix") => write!(f, "?db={database}"),
            (database, _) => write!(f, "/{database}"),
        }
    }
}

impl fmt::Debug for RedisUrl {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "RedisUrl({self})")
    }
}

impl fmt::Debug for Login {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Login").field("user", &self.user).finish_non_exhaustive()
    }
}

impl fmt::Display for Address {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Tcp { host, port } if host.contains(':') => write!(f, "[{host}]:{port}"),
            Self::Tcp { host, port } => write!(f, "{host}:{port}"),
            Self::Unix(path) => path.display().fmt(f),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(text: &str) -> RedisUrl {
        text.parse().unwrap_or_else(|error| panic!("{text}: {error}"))
    }

    fn tcp(host: &str, port: u16) -> Address {
        Address::Tcp { host: host.to_owned(), port }
    }

    fn login(user: Option<&str>, password: &str) -> Option<Login> {
        Some(Login { user: user.map(str::to_owned), password: password.to_owned() })
    }

    #[test]
    fn a_url_names_one_server_by_host_port_database_and_login() {
        let url = read("redis://ann:p%40ss%2F%3A@db.example:7000/3");
        assert_eq!(url.kind, Kind::Single);
        assert_eq!(url.seeds, [tcp("db.example", 7000)]);
        assert_eq!((url.login, url.database, url.has_tls), (login(Some("ann"), "p@ss/:"), 3, false));
        let url = read("rediss://:secret@[2001:db8::1]");
        assert_eq!(url.seeds, [tcp("2001:db8::1", 6379)]);
        assert_eq!((url.login, url.database, url.has_tls), (login(None, "secret"), 0, true));
        assert_eq!(read("redis://[::1]:7000/").seeds, [tcp("::1", 7000)]);
        // A password may have a colon: the first one ends the user.
        assert_eq!(read("redis://ann:a:b@h").login, login(Some("ann"), "a:b"));
    }

    #[test]
    fn a_url_names_a_socket_with_its_database_and_login() {
        let url = read("redis+unix:///run/my%20redis/socket?db=2&user=ann&pass=a%26b");
        assert_eq!(url.seeds, [Address::Unix("/run/my redis/socket".into())]);
        assert_eq!((url.login, url.database), (login(Some("ann"), "a&b"), 2));
    }

    #[test]
    fn a_url_names_sentinels_and_the_nodes_of_a_cluster() {
        let url = read("redis+sentinel://u:p@s1,s2:5000,[::1]/mymaster/4?sentinel_user=a&sentinel_password=b");
        assert_eq!(url.kind, Kind::Sentinel { name: "mymaster".to_owned() });
        assert_eq!(url.seeds, [tcp("s1", 26379), tcp("s2", 5000), tcp("::1", 26379)]);
        assert_eq!((url.login, url.database), (login(Some("u"), "p"), 4));
        assert_eq!(url.sentinel_login, login(Some("a"), "b"));
        assert!(read("rediss+sentinel://s1/mymaster").has_tls);
        let url = read("rediss+cluster://:p@h1:6379,h2/0");
        assert_eq!((url.kind, url.has_tls), (Kind::Cluster, true));
        assert_eq!(url.seeds, [tcp("h1", 6379), tcp("h2", 6379)]);
    }

    /// An operator pasted a password with a slash into the URL and found half of it in the log.
    #[test]
    fn an_error_says_what_is_wrong_and_never_the_password() {
        let refused = [
            ("redis://:hunter2/x@host", "%2F"),
            ("redis://:hunter2?x@host", "%3F"),
            ("redis://:x?hunter2@host", "%3F"),
            ("redis://:hunter2#x@host", "%23"),
            ("redis://:hunter2@x@host", "%40"),
            ("redis://hunter2@host", ":PASSWORD"),
            ("redis://:hunter2", "host 1 of the URL is empty"),
            ("redis://host:hunter2", "port"),
            ("redis://user:hunter2:host", "several colons"),
            ("redis://:hunter2%@host", "%25"),
            ("redis://:%ffhunter2@host", "UTF-8"),
            ("redis+unix:///s?pass=a&hunter2", "%26"),
            ("redis+sentinel://s/n?sentinel_password=a&hunter2=b", "%26"),
            ("redis://u:p@h1,u:hunter2@h2", "once"),
            ("hunter2", "no scheme"),
            ("hunter2@x://h", "scheme"),
            ("redis://h/hunter2", "database"),
        ];
        for (text, named) in refused {
            let error = text.parse::<RedisUrl>().expect_err(text).to_string();
            assert!(error.contains(named), "{text}: {error}");
            assert!(!error.contains("hunter2"), "{text}: {error}");
        }
    }

    #[test]
    fn an_unknown_or_missing_part_is_refused_by_name() {
        let refused = [
            ("mysql://h", "mysql://"),
            ("redis://", "host 1 of the URL is empty"),
            ("redis://h1,h2", "redis+cluster://"),
            ("redis+cluster://h1,,h2", "host 2 of the URL is empty"),
            ("redis+cluster://h/1", "only database 0"),
            ("redis+sentinel://h", "name"),
            ("redis+sentinel://h/n/1/x", "too many"),
            ("redis+sentinel://h/n?sentinel_user=a", "sentinel_password"),
            ("redis://h/x", "not a number"),
            ("redis://h/1/2", "too many"),
            ("redis://h:0", "65535"),
            ("redis://h:65536", "65535"),
            ("redis://2001:db8::1", "brackets"),
            ("redis://[::1", "closing bracket"),
            ("redis://[h]", "not an IPv6 address"),
            ("redis://[::1]x", "not a port"),
            ("redis://h?protocol=resp3", "unknown parameter protocol"),
            ("redis://h?sentinel_user=a", "unknown parameter sentinel_user"),
            ("redis+unix:///s?db=1&db=2", "twice"),
            ("redis+unix://s", "absolute path"),
            ("rediss://h#insecure", "#"),
            ("redis://@h", ":PASSWORD"),
            ("redis://:@h", "empty"),
            ("redis://a b", "space"),
            ("redis://h%41", "host name"),
        ];
        for (text, named) in refused {
            let error = text.parse::<RedisUrl>().expect_err(text).to_string();
            assert!(error.contains(named), "{text}: {error}");
        }
    }

    #[test]
    fn a_url_is_shown_without_user_and_password() {
        for (text, shown) in [
            ("redis://ann:hunter2@db.example/2", "redis://db.example:6379/2"),
            ("redis+unix:///run/redis.sock?db=1&pass=hunter2", "redis+unix:///run/redis.sock?db=1"),
            ("rediss+sentinel://:p@s1,[::1]:7/n/2?sentinel_password=hunter2", "rediss+sentinel://s1:26379,[::1]:7/n/2"),
            ("redis+cluster://ann:hunter2@h1,h2:7", "redis+cluster://h1:6379,h2:7"),
        ] {
            let url = read(text);
            assert_eq!(url.to_string(), shown);
            assert!(!format!("{url:?} {:?}", url.login).contains("hunter2"));
        }
    }
}
