//! Warnings about identity headers that a proxy passes on as the client sent them.

use std::ops::Range;

use crate::address::AddressSource;
use crate::policy::file::{IdentityFile, Text};
use crate::policy::load::Loader;
use crate::policy::rule::{Per, Rule};
use crate::policy::{CLIENT_HEADERS, Identity, IdentitySource};

/// Help for headers that no proxy removes, because the application needs them.
const CLIENTS_OWN_HELP: &str = "clients write it themselves and applications need it, so the files of `threshold export` \
                                hide it from Threshold alone: take the name from claim:NAME, or from a header that the \
                                gateway sets once it has checked the session; if the values cannot be guessed, state that \
                                in allow = [\"passed-on: …\"] above all tables";
const HELP: &str = "have the proxy set or remove it, as the files from `threshold export nginx-auth`, `caddy-auth` and \
                    `traefik-auth` do; then state which proxy does, in allow = [\"passed-on: …\"] above all tables";

/// Warns if rules count by address and that address is always the proxy's.
pub(super) fn counts_the_proxy<'r>(
    loader: &mut Loader<'_>,
    file: &IdentityFile,
    identity: &Identity,
    mut rules: impl Iterator<Item = &'r Rule>,
) {
    let own_address = identity.address.sources.first() == Some(&AddressSource::Peer);
    let Some(proxies) = file.trusted_proxies.as_ref().filter(|_| own_address && !identity.address.trusted.is_empty())
    else {
        return;
    };
    if !rules.any(|rule| rule.per.iter().any(|per| matches!(per, Per::Ip | Per::IpPrefix(_)))) {
        return;
    }
    let written = file.client_ip.as_ref().and_then(|texts| texts.items.first());
    let span = written.map_or(&proxies.span, |text| &text.span);
    let message = "client_ip is the connection's own address, so all clients of a proxy share one budget by address";
    let help = "write client_ip = \"x-forwarded-for\", or the header in which your proxy passes the client's address";
    loader.warning("counts-the-proxy", span.clone(), message, help);
}

/// Warns about each header that identifies the caller and that proxies do not set by default.
pub(super) fn passed_on(loader: &mut Loader<'_>, file: &IdentityFile, identity: &Identity) {
    // Without a trusted peer no header is believed.
    if identity.address.trusted.is_empty() {
        return;
    }
    let addresses = file.client_ip.iter().flat_map(|texts| &texts.items).zip(&identity.address.sources);
    for (text, source) in addresses {
        let header = match source {
            // Proxies append their peer's address, and this header is read from its end.
            AddressSource::Peer | AddressSource::XForwardedFor => continue,
            AddressSource::Forwarded => "forwarded",
            AddressSource::Header(name) => name,
        };
        warn(loader, text.span.clone(), header, "address");
    }
    let named: [(&str, &Option<Text>, &Option<IdentitySource>); 3] = [
        ("tenant", &file.tenant, &identity.tenant),
        ("user", &file.user, &identity.user),
        ("tier", &file.tier, &identity.tier),
    ];
    for (what, text, source) in named {
        let (Some(text), Some(source)) = (text, source) else { continue };
        match source {
            IdentitySource::Header(name) => warn(loader, text.span.clone(), name, what),
            IdentitySource::Cookie(_) => warn(loader, text.span.clone(), "cookie", what),
            IdentitySource::Host(_) | IdentitySource::Path(_) | IdentitySource::Claim(_) => {}
        }
    }
}

fn warn(loader: &mut Loader<'_>, span: Range<usize>, header: &str, what: &str) {
    let message = format!("a proxy that passes \"{header}\" on lets clients choose their {what}");
    let help = if CLIENT_HEADERS.contains(&header) { CLIENTS_OWN_HELP } else { HELP };
    loader.warning("passed-on", span, message, help);
}
