//! Headers that a policy believes from trusted proxies, and that a proxy passes on unless it is told otherwise.

use std::ops::Range;

use crate::address::AddressSource;
use crate::policy::file::{IdentityFile, Text};
use crate::policy::load::Loader;
use crate::policy::{Identity, IdentitySource};

const HELP: &str = "have the proxy set or remove it, as the files do that `threshold export nginx-auth` and its like \
                    write; then say which proxy does, in allow = [\"passed-on: …\"] above all tables";

/// Warns about each header that says whose request it is and that a proxy does not set by itself.
pub(super) fn passed_on(loader: &mut Loader<'_>, file: &IdentityFile, identity: &Identity) {
    // Without a trusted peer no header is believed.
    if identity.address.trusted.is_empty() {
        return;
    }
    let addresses = file.client_ip.iter().flat_map(|texts| &texts.items).zip(&identity.address.sources);
    for (text, source) in addresses {
        let header = match source {
            // Proxies put their peer's address last, where this is read from.
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
    let message = format!("a proxy that passes \"{header}\" on lets the client choose its {what}");
    loader.warning("passed-on", span, message, HELP);
}
