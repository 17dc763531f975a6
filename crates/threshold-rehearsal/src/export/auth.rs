//! A proxy's forward-auth configuration for a policy: it sets or removes every header that the policy trusts.

mod caddy;
mod nginx;
mod traefik;

use std::collections::BTreeSet;

use anyhow::bail;
use threshold_core::address::AddressSource;
use threshold_core::policy::{CLIENT_HEADERS, IdentitySource, Policy};

/// The default address of Threshold.
const THRESHOLD: &str = "127.0.0.1:8080";
/// The address of the application, in files that are a whole site.
const APP: &str = "127.0.0.1:3000";

/// The headers by which a trusted proxy describes a request to `/auth`, whatever the policy.
const DESCRIBING: [&str; 8] = [
    "x-original-method",
    "x-original-uri",
    "x-original-host",
    "x-original-content-length",
    "x-forwarded-method",
    "x-forwarded-uri",
    "x-threshold-request-id",
    "x-threshold-token",
];
/// Headers by which some frameworks select a route instead of by the path, which is then not the path that was decided.
const REROUTES: [&str; 2] = ["x-original-url", "x-rewrite-url"];
/// The most dashes and underscores of a header whose other spellings are removed: each doubles their number.
const MAX_SEPARATORS: usize = 8;
/// Headers that every proxy sets itself, or that belong to the protocol.
const PROXIES_OWN: [&str; 10] = [
    "x-forwarded-for",
    "x-forwarded-host",
    "host",
    "connection",
    "content-length",
    "keep-alive",
    "te",
    "trailer",
    "transfer-encoding",
    "upgrade",
];
/// The statuses that Threshold answers with, whatever the policy.
const STATUSES: [u16; 5] = [400, 413, 414, 429, 503];
/// nginx closes the connection instead of answering with this status.
const NGINX_CLOSES: u16 = 444;

/// The proxy that a file is for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Proxy {
    Nginx,
    /// The lines of nginx's file for a location that sets headers of its own.
    NginxLocation,
    Caddy,
    Traefik,
}

/// The headers that a proxy has to set and to remove for one policy, in lower case.
#[derive(Debug, PartialEq, Eq)]
struct TrustedHeaders {
    /// The header for the client's address, if the policy does not read `x-forwarded-for`.
    address: Option<String>,
    /// Other headers that the policy reads the client's address from; they are always removed.
    addresses: Vec<String>,
    /// Headers that identify the caller, and that a client must not send.
    names: Vec<IdentityHeader>,
    /// Headers that identify the caller in the policy, but that applications need from their clients.
    clients: Vec<IdentityHeader>,
    /// Headers that rules count by, passed on from the client.
    counted: Vec<String>,
    /// Whether the policy uses claims of the client's bearer token, which Threshold verifies itself.
    token: bool,
    statuses: BTreeSet<u16>,
}

#[derive(Debug, PartialEq, Eq)]
struct IdentityHeader {
    header: String,
    /// `user`, or `tenant and user`.
    says: String,
}

pub(super) fn write(proxy: Proxy, policy: &Policy, name: &str) -> anyhow::Result<String> {
    let trusted = TrustedHeaders::new(proxy, policy, name)?;
    Ok(match proxy {
        Proxy::Nginx => nginx::write(&trusted),
        Proxy::NginxLocation => nginx::write_location(&trusted),
        Proxy::Caddy => caddy::write(&trusted),
        Proxy::Traefik => traefik::write(&trusted),
    })
}

impl TrustedHeaders {
    /// Returns the header for an example in the file: the user's, if there is one.
    fn example(&self) -> Option<&IdentityHeader> {
        self.names.iter().find(|own| own.says.contains("user")).or_else(|| self.names.first())
    }

    fn new(proxy: Proxy, policy: &Policy, name: &str) -> anyhow::Result<Self> {
        let identity = policy.identity();
        // Every client would be counted as the proxy itself, and the first busy one would block all others.
        if identity.address.trusted.is_empty() {
            bail!(
                "{name} trusts no proxy, so it would ignore the headers of this one; list the address that the proxy connects \
                 from: trusted_proxies = [\"127.0.0.1/32\"]"
            );
        }
        let mut addresses = address_headers(&identity.address.sources);
        let address = match addresses.iter().position(|header| header == "x-forwarded-for") {
            Some(at) => {
                addresses.remove(at);
                None
            }
            None => Some(written_by(proxy, &addresses, name)?),
        };
        // `address` has a field of its own, and must not be in the list twice.
        addresses.retain(|header| Some(header) != address.as_ref());
        let (mut names, mut clients) = (Vec::new(), Vec::new());
        let sources = [("tenant", &identity.tenant), ("user", &identity.user), ("tier", &identity.tier)];
        for (says, source) in sources {
            let header = match source {
                Some(IdentitySource::Header(header)) => header.as_ref(),
                Some(IdentitySource::Cookie(_)) => "cookie",
                Some(IdentitySource::Host(_) | IdentitySource::Path(_) | IdentitySource::Claim(_)) | None => continue,
            };
            // These are overwritten or removed in any case, and need no line of their own.
            let set = PROXIES_OWN.iter().chain(&DESCRIBING).any(|own| *own == header);
            let address = address.iter().chain(&addresses).any(|own| own == header) || header == "forwarded";
            // A policy that trusts a header that clients write themselves trusts the client. The proxy keeps such a header
            // from Threshold, but passes it on to the application.
            match (set || address, CLIENT_HEADERS.contains(&header)) {
                (true, _) => {}
                (false, true) => add(&mut clients, header, says),
                (false, false) => add(&mut names, header, says),
            }
        }
        let claims = sources.iter().any(|(_, source)| matches!(source, Some(IdentitySource::Claim(_))));
        if claims && clients.iter().any(|named| named.header == "authorization") {
            bail!(
                "{name} takes a name from the header authorization, which is kept from Threshold, and another from a claim of \
                 the token in it: take both from claims"
            );
        }
        let known = |header: &str| names.iter().chain(&clients).any(|named: &IdentityHeader| named.header == header);
        // A header that names the caller is never passed on as the client sent it, even if a rule counts by it too.
        let counted = policy.header_names().into_iter().filter(|header| !known(header)).map(str::to_owned).collect();
        for IdentityHeader { header, .. } in &names {
            if header.matches(['-', '_']).count() > MAX_SEPARATORS {
                bail!("{name} trusts {header}, which has too many spellings to remove: use a name with fewer dashes");
            }
        }
        let statuses = policy.rules().iter().map(|rule| rule.status).chain(STATUSES).filter(|own| *own != NGINX_CLOSES);
        Ok(Self { address, addresses, names, clients, counted, token: claims, statuses: statuses.collect() })
    }

    /// Returns the headers that a client must not send to Threshold or the application, except for `x-forwarded-for` and
    /// `x-forwarded-host`, which each proxy handles differently.
    fn removed(&self) -> impl Iterator<Item = &str> {
        let addresses = self.address.iter().chain(&self.addresses).map(String::as_str);
        let addresses = addresses.filter(|header| *header != "forwarded");
        let names = self.names.iter().map(|named| named.header.as_str());
        DESCRIBING.into_iter().chain(REROUTES).chain(["forwarded"]).chain(addresses).chain(names)
    }

    /// Returns the spellings of these headers with other dashes and underscores: CGI and WSGI do not distinguish `X_User` and
    /// `X-User` (header smuggling).
    fn respelled(&self) -> Vec<String> {
        let kept = |name: &str| {
            let own = PROXIES_OWN.iter().chain(&CLIENT_HEADERS).any(|own| *own == name);
            own || self.removed().any(|own| own == name) || self.counted.iter().any(|own| own == name)
        };
        // Proxies replace these two, but only in the spelling with dashes.
        let names = ["x-forwarded-for", "x-forwarded-host"].into_iter().chain(self.removed());
        let all: BTreeSet<String> = names.flat_map(respell).filter(|name| !kept(name)).collect();
        all.into_iter().collect()
    }

    /// Whether Threshold needs the client's cookies, which may be longer than the heads that it accepts.
    fn counts_cookies(&self) -> bool {
        self.counted.iter().any(|header| header == "cookie")
    }

    /// Writes comments about the client's own headers, and how to pass them on.
    fn clients_own(&self, hand_on: &str) -> Vec<String> {
        let said = |IdentityHeader { header, says }: &IdentityHeader| {
            let header = shown(header);
            [
                format!(
                    "The policy takes the {says} from {header}, which clients write themselves, so it is not sent to Threshold."
                ),
                format!("To count by it anyway, {hand_on}."),
            ]
        };
        self.clients.iter().flat_map(said).collect()
    }

    /// Writes a comment about the headers that are passed on to Threshold.
    fn counted_by(&self) -> Option<String> {
        let names: Vec<String> = self.counted.iter().map(|header| shown(header)).collect();
        (!names.is_empty())
            .then(|| format!("Sent as the client wrote them, because rules count by them: {}.", names.join(", ")))
    }
}

/// Returns every spelling of a name with dashes and underscores exchanged.
fn respell(name: &str) -> Vec<String> {
    let mut spellings = vec![String::new()];
    for letter in name.chars() {
        let either: &[char] = if matches!(letter, '-' | '_') { &['-', '_'] } else { &[letter] };
        spellings =
            spellings.iter().flat_map(|begun| either.iter().map(move |next| format!("{begun}{next}"))).collect();
    }
    spellings
}

/// Returns the headers that the policy reads an address from, before it takes the peer's.
fn address_headers(sources: &[AddressSource]) -> Vec<String> {
    let mut headers: Vec<String> = Vec::new();
    for source in sources {
        let header = match source {
            // Sources are tried in order, and a connection always has a peer. Those behind it are never read.
            AddressSource::Peer => break,
            AddressSource::XForwardedFor => "x-forwarded-for",
            AddressSource::Forwarded => "forwarded",
            AddressSource::Header(name) => name,
        };
        if !headers.iter().any(|own| own == header) {
            headers.push(header.to_owned());
        }
    }
    headers
}

/// Returns the header in which a proxy sends the client's address, if the policy does not read `x-forwarded-for`.
fn written_by(proxy: Proxy, headers: &[String], name: &str) -> anyhow::Result<String> {
    let own = headers.iter().find(|header| *header != "forwarded").filter(|_| proxy != Proxy::Traefik);
    let Some(own) = own else {
        let found = match headers.first() {
            None => "from the peer, which is this proxy for all of its clients".to_owned(),
            Some(header) => format!("from {header}, which this proxy does not write"),
        };
        bail!("{name} takes the client's address {found}; write client_ip = \"x-forwarded-for\"");
    };
    Ok(own.clone())
}

fn add(named: &mut Vec<IdentityHeader>, header: &str, says: &str) {
    match named.iter_mut().find(|own| own.header == header) {
        Some(own) => own.says = format!("{} and {says}", own.says),
        None => named.push(IdentityHeader { header: header.to_owned(), says: says.to_owned() }),
    }
}

/// Returns a header's name in its usual case: `CF-Connecting-IP`.
fn shown(header: &str) -> String {
    let word = |word: &str| match word {
        "api" | "cf" | "id" | "ip" | "uri" | "url" => word.to_ascii_uppercase(),
        // As nginx' own documentation and the others' write it.
        _ => {
            let mut letters = word.chars();
            letters.next().map(|first| first.to_ascii_uppercase()).into_iter().chain(letters).collect()
        }
    };
    match header {
        "x-forwarded-uri" => "X-Forwarded-Uri".to_owned(),
        "x-threshold-request-id" => "X-Threshold-Request-Id".to_owned(),
        _ => header.split('-').map(word).collect::<Vec<_>>().join("-"),
    }
}

/// Why cookies are not passed on to Threshold.
const NO_COOKIES: &str = "Threshold does not need cookies, and they may exceed the size of headers that it accepts.";

/// Why names with underscores are removed.
const RESPELLED: &str = "CGI, WSGI and similar interfaces do not distinguish these from the headers above, or from X-Forwarded-For and -Host.";

/// Writes the comments at the top of a file.
fn written_from(command: &str, lines: &[&str]) -> String {
    let first = format!(
        "# Generated by `threshold export {command} POLICY` from the headers that the policy trusts; generate it again"
    );
    let mut text = format!(
        "{first}\n# when the policy's [identity] or a rule's status changes. docs/forward-auth.md explains each line.\n"
    );
    if !lines.is_empty() {
        text.push_str("#\n");
    }
    for line in lines {
        text.push_str(&format!("# {line}\n"));
    }
    text
}
