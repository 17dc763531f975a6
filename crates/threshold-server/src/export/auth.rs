//! A proxy's forward-auth configuration, written from a policy: it sets or removes every header that the policy believes.

mod caddy;
mod nginx;
mod traefik;

use std::collections::BTreeSet;

use anyhow::bail;
use threshold_core::address::AddressSource;
use threshold_core::policy::{CLIENT_HEADERS, IdentitySource, Policy};

/// Where Threshold listens unless said.
const THRESHOLD: &str = "127.0.0.1:8080";
/// The application of the files that are a whole site.
const APP: &str = "127.0.0.1:3000";

/// What `/auth` believes of every trusted proxy besides the client's address, whatever the policy says.
const ASKED: [&str; 8] = [
    "x-original-method",
    "x-original-uri",
    "x-original-host",
    "x-original-content-length",
    "x-forwarded-method",
    "x-forwarded-uri",
    "x-threshold-request-id",
    "x-threshold-token",
];
/// By these some frameworks choose a route in place of the path, which is then not the path that was decided.
const REROUTES: [&str; 2] = ["x-original-url", "x-rewrite-url"];
/// The most dashes and underscores of a name whose other spellings are written out: each of them doubles their number.
const MAX_SEPARATORS: usize = 8;
/// What every proxy here sets by itself, or has as a part of the protocol.
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
/// The statuses that Threshold answers with whatever the policy says.
const STATUSES: [u16; 5] = [400, 413, 414, 429, 503];
/// nginx closes the connection instead of answering with this one.
const NGINX_CLOSES: u16 = 444;

/// Which proxy a file is for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Proxy {
    Nginx,
    /// The lines of nginx's file for a location that sets headers of its own.
    NginxLocation,
    Caddy,
    Traefik,
}

/// What a proxy has to set and to remove for one policy. Names of headers are in lower case.
#[derive(Debug, PartialEq, Eq)]
struct Believed {
    /// Where the proxy writes the client's address beside `x-forwarded-for`, if the policy does not read that.
    address: Option<String>,
    /// Other headers that the policy takes for the client's address: nobody's word counts.
    addresses: Vec<String>,
    /// Headers that say who is calling, and what they say.
    names: Vec<Named>,
    /// Headers that applications need from their clients and that the policy takes for a name.
    clients: Vec<Named>,
    /// Headers that rules count by as the client sends them.
    counted: Vec<String>,
    /// Whether the policy takes a name from the client's bearer token, which Threshold verifies itself.
    token: bool,
    statuses: BTreeSet<u16>,
}

#[derive(Debug, PartialEq, Eq)]
struct Named {
    header: String,
    /// `user`, or `tenant and user`.
    says: String,
}

pub(super) fn write(proxy: Proxy, policy: &Policy, name: &str) -> anyhow::Result<String> {
    let believed = Believed::new(proxy, policy, name)?;
    Ok(match proxy {
        Proxy::Nginx => nginx::write(&believed),
        Proxy::NginxLocation => nginx::write_location(&believed),
        Proxy::Caddy => caddy::write(&believed),
        Proxy::Traefik => traefik::write(&believed),
    })
}

impl Believed {
    /// The name that an example shows how to set: the user's, where the policy believes one.
    fn example(&self) -> Option<&Named> {
        self.names.iter().find(|own| own.says.contains("user")).or_else(|| self.names.first())
    }

    fn new(proxy: Proxy, policy: &Policy, name: &str) -> anyhow::Result<Self> {
        let identity = policy.identity();
        if identity.address.trusted.is_empty() {
            bail!(
                "{name} trusts no proxy, so it would believe nothing of what this one says; list the address that the \
                 proxy connects from: trusted_proxies = [\"127.0.0.1/32\"]"
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
        addresses.retain(|header| Some(header) != address.as_ref());
        let (mut names, mut clients) = (Vec::new(), Vec::new());
        let sources = [("tenant", &identity.tenant), ("user", &identity.user), ("tier", &identity.tier)];
        for (says, source) in sources {
            let header = match source {
                Some(IdentitySource::Header(header)) => header.as_ref(),
                Some(IdentitySource::Cookie(_)) => "cookie",
                Some(IdentitySource::Host(_) | IdentitySource::Path(_) | IdentitySource::Claim(_)) | None => continue,
            };
            let set = PROXIES_OWN.iter().chain(&ASKED).any(|own| *own == header);
            let address = address.iter().chain(&addresses).any(|own| own == header) || header == "forwarded";
            // A policy that believes what clients write themselves believes the client: Threshold is not told, and the
            // application still is.
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
        let known = |header: &str| names.iter().chain(&clients).any(|named: &Named| named.header == header);
        let counted = policy.header_names().into_iter().filter(|header| !known(header)).map(str::to_owned).collect();
        for Named { header, .. } in &names {
            if header.matches(['-', '_']).count() > MAX_SEPARATORS {
                bail!("{name} believes {header}, which has too many spellings to remove: use a name with fewer dashes");
            }
        }
        let statuses = policy.rules().iter().map(|rule| rule.status).chain(STATUSES).filter(|own| *own != NGINX_CLOSES);
        Ok(Self { address, addresses, names, clients, counted, token: claims, statuses: statuses.collect() })
    }

    /// Whatever a client must not send, neither to Threshold nor to the application, besides `x-forwarded-for` and
    /// `x-forwarded-host`, which proxies treat each in its own way.
    fn removed(&self) -> impl Iterator<Item = &str> {
        let addresses = self.address.iter().chain(&self.addresses).map(String::as_str);
        let addresses = addresses.filter(|header| *header != "forwarded");
        let names = self.names.iter().map(|named| named.header.as_str());
        ASKED.into_iter().chain(REROUTES).chain(["forwarded"]).chain(addresses).chain(names)
    }

    /// The spellings with other dashes and underscores of whatever a client must not send. CGI, WSGI and their like take
    /// `X_User` and `X-User` for the same header.
    fn respelled(&self) -> Vec<String> {
        let kept = |name: &str| {
            let own = PROXIES_OWN.iter().chain(&CLIENT_HEADERS).any(|own| *own == name);
            own || self.removed().any(|own| own == name) || self.counted.iter().any(|own| own == name)
        };
        let names = ["x-forwarded-for", "x-forwarded-host"].into_iter().chain(self.removed());
        let all: BTreeSet<String> = names.flat_map(respell).filter(|name| !kept(name)).collect();
        all.into_iter().collect()
    }

    /// Whether Threshold needs the client's cookies. They may be longer than a head that it reads.
    fn counts_cookies(&self) -> bool {
        self.counted.iter().any(|header| header == "cookie")
    }

    /// What the client's own headers are taken for, and how to hand them on, in words.
    fn clients_own(&self, hand_on: &str) -> Vec<String> {
        let said = |Named { header, says }: &Named| {
            let header = shown(header);
            [
                format!(
                    "The policy takes the {says} from {header}, which is the client's own word, so Threshold is not told."
                ),
                format!("To count by it all the same, {hand_on}."),
            ]
        };
        self.clients.iter().flat_map(said).collect()
    }

    /// The headers that are handed to Threshold as the client sent them, in words.
    fn counted_by(&self) -> Option<String> {
        let names: Vec<String> = self.counted.iter().map(|header| shown(header)).collect();
        (!names.is_empty()).then(|| format!("Counted as the client sends them: {}.", names.join(", ")))
    }
}

/// Every spelling of a name with dashes and underscores in each other's places.
fn respell(name: &str) -> Vec<String> {
    let mut spellings = vec![String::new()];
    for letter in name.chars() {
        let either: &[char] = if matches!(letter, '-' | '_') { &['-', '_'] } else { &[letter] };
        spellings =
            spellings.iter().flat_map(|begun| either.iter().map(move |next| format!("{begun}{next}"))).collect();
    }
    spellings
}

/// The headers that the policy looks for an address in, before it takes the peer's.
fn address_headers(sources: &[AddressSource]) -> Vec<String> {
    let mut headers: Vec<String> = Vec::new();
    for source in sources {
        let header = match source {
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

/// The header in which a proxy says the client's address, where the policy does not read `x-forwarded-for`.
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

fn add(named: &mut Vec<Named>, header: &str, says: &str) {
    match named.iter_mut().find(|own| own.header == header) {
        Some(own) => own.says = format!("{} and {says}", own.says),
        None => named.push(Named { header: header.to_owned(), says: says.to_owned() }),
    }
}

/// A header's name as people write it: `CF-Connecting-IP`.
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

/// Why Threshold is not told of cookies.
const NO_COOKIES: &str = "Threshold has no use for cookies, and they may be longer than a head that it reads.";

/// Why names with underscores are removed.
const RESPELLED: &str =
    "Applications behind CGI, WSGI and the like read these as the headers above, or as X-Forwarded-For and -Host.";

/// What each file begins with.
fn written_from(command: &str, lines: &[&str]) -> String {
    let first =
        format!("# Written by `threshold export {command} POLICY` from what the policy believes; write it again when");
    let mut text = format!(
        "{first}\n# the policy's [identity] or a rule's status changes. docs/forward-auth.md says why each line is there.\n"
    );
    if !lines.is_empty() {
        text.push_str("#\n");
    }
    for line in lines {
        text.push_str(&format!("# {line}\n"));
    }
    text
}
