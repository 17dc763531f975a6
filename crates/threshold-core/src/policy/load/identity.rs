//! Compiles `[identity]`: how callers are identified.

use super::{Loader, is_token};
use crate::address::{AddressSource, ClientAddress, Network};
use crate::path::OddPaths;
use crate::policy::file::{IdentityFile, JwtFile, Located, Text, Texts};
use crate::policy::{CLIENT_HEADERS, Identity, IdentitySource, Jwt, Kind, Pattern, UserScope};

impl Loader<'_> {
    pub(super) fn identity(&mut self, file: &IdentityFile) -> Identity {
        let trusted = file.trusted_proxies.iter().flat_map(|texts| &texts.items);
        let trusted: Vec<Network> = trusted.filter_map(|text| self.proxy(text)).collect();
        let sources = match &file.client_ip {
            None => vec![AddressSource::Peer],
            Some(texts) => self.address_sources(texts, trusted.is_empty()),
        };
        if let Some(prefix) = &file.ipv6_prefix {
            self.ipv6_prefix(prefix);
        }
        let mut source = |text: &Option<Text>| text.as_ref().and_then(|text| self.identity_source(text));
        let (tenant, user, tier) = (source(&file.tenant), source(&file.user), source(&file.tier));
        let named = [(&file.tenant, &tenant), (&file.user, &user), (&file.tier, &tier)];
        for (text, source) in named {
            let (Some(text), Some(source)) = (text, source) else { continue };
            self.source_is_usable(text, source, file.jwt.is_some(), trusted.is_empty());
        }
        // A table that verifies tokens and is not used suggests a protection that is not there.
        let claims = [&tenant, &user, &tier].into_iter().any(|source| matches!(source, Some(IdentitySource::Claim(_))));
        if let Some(jwt) = file.jwt.as_ref().filter(|_| !claims) {
            let message = "tokens are verified, but no identity is taken from a claim";
            let help = "write \"claim:NAME\" as a source of tenant, user or tier, or remove the table";
            self.warning("unused-jwt", jwt.alg.span.clone(), message, help);
        }
        let (secret_tenant, secret_user) = self.secrets(file);
        Identity {
            address: ClientAddress { trusted, sources },
            ipv6_prefix: file.ipv6_prefix.as_ref().map_or(64, |prefix| prefix.value),
            secret_tenant: secret_tenant || tenant.as_ref().is_some_and(IdentitySource::is_secret),
            secret_user: secret_user || user.as_ref().is_some_and(IdentitySource::is_secret),
            tenant,
            user,
            user_scope: file.user_scope.as_ref().map_or(UserScope::Global, |scope| scope.value.into()),
            tier,
            default_tier: file.default_tier.as_ref().map(|text| text.value.as_str().into()),
            log_identifiers: file.log_identifiers,
            jwt: file.jwt.as_ref().and_then(|jwt| self.jwt(jwt)),
            odd_paths: file.odd_paths.as_ref().map_or(OddPaths::Refuse, |odd| odd.value.into()),
            private_paths: self.private_paths(file.private_paths.as_ref()),
        }
    }

    fn proxy(&mut self, text: &Text) -> Option<Network> {
        let net: Option<Network> = text.value.parse().ok();
        if net.is_none() {
            let message = format!("\"{}\" is not a CIDR", text.value);
            self.error("bad-value", text.span.clone(), message, "write \"10.0.0.0/8\" or a single address");
        } else if net.is_some_and(|net| net.prefix_len() == 0) {
            // Only a warning: behind a firewall that lets only proxies in, every peer is one.
            let message = "every peer is trusted, so every client can claim any address";
            self.warning("trusts-everyone", text.span.clone(), message, "list the addresses of your proxies");
        }
        net
    }

    fn address_sources(&mut self, texts: &Texts, no_trusted_proxy: bool) -> Vec<AddressSource> {
        let help = "write \"peer\", \"x-forwarded-for\", \"forwarded\" or a header's name";
        if texts.items.is_empty() {
            self.error("bad-value", texts.span.clone(), "client_ip has no sources", help);
        }
        for text in &texts.items {
            let name = text.value.to_ascii_lowercase();
            match name.strip_prefix("header:") {
                Some(bare) if is_token(bare) => {
                    let help = format!("write the bare name: \"{bare}\"");
                    self.error(
                        "bad-value",
                        text.span.clone(),
                        "client_ip takes the name of a header without a prefix",
                        &help,
                    );
                }
                _ if !is_token(&name) => {
                    let message = format!("\"{}\" is not the name of a header", text.value);
                    self.error("bad-value", text.span.clone(), message, help);
                }
                _ if !may_contain_address(&name) => {
                    let message = format!("the header \"{}\" never contains a client's address", text.value);
                    self.error("bad-value", text.span.clone(), message, help);
                }
                _ if no_trusted_proxy && name != "peer" => {
                    let message = "this header is ignored because no proxy is trusted: everyone is counted by the \
                                   connection's address";
                    self.warning("never-believed", text.span.clone(), message, "list your proxies in trusted_proxies");
                }
                _ => {}
            }
        }
        texts.items.iter().map(|text| address_source(&text.value)).collect()
    }

    fn ipv6_prefix(&mut self, prefix: &Located<u8>) {
        if !(32..=128).contains(&prefix.value) {
            self.error("bad-value", prefix.span.clone(), "ipv6_prefix is between 32 and 128", "64 suits most services");
        } else if prefix.value > 64 {
            let message = format!("a client with a /64 gets a budget for each of its /{} networks", prefix.value);
            self.warning("narrow-ipv6", prefix.span.clone(), message, "write 64, or less");
        }
    }

    fn private_paths(&mut self, texts: Option<&Texts>) -> Box<[Pattern]> {
        let patterns = self.patterns(texts, Kind::Path);
        for text in texts.iter().flat_map(|texts| &texts.items).filter(|text| !text.value.contains(['*', '{'])) {
            let message = format!("\"{}\" has no wildcard, so it hides nothing", text.value);
            self.error("bad-value", text.span.clone(), message, "write * or {name} for the secret, as in \"/reset/*\"");
        }
        patterns.into()
    }

    /// Reports a source that can never provide a name.
    fn source_is_usable(&mut self, text: &Text, source: &IdentitySource, has_jwt: bool, no_trusted_proxy: bool) {
        match source {
            IdentitySource::Claim(_) if !has_jwt => {
                let help = "state how tokens are verified: alg, and key or key_file";
                self.error("no-jwt", text.span.clone(), "a claim needs [identity.jwt]", help);
            }
            IdentitySource::Header(_) | IdentitySource::Cookie(_) if no_trusted_proxy => {
                let message = "this source is ignored because no proxy is trusted";
                self.warning("never-believed", text.span.clone(), message, "list your proxies in trusted_proxies");
            }
            _ => {}
        }
    }

    /// Returns whether tenants, and whether users, are marked as secrets.
    fn secrets(&mut self, file: &IdentityFile) -> (bool, bool) {
        let mut secret = (false, false);
        for text in file.secret.iter().flat_map(|texts| &texts.items) {
            match text.value.as_str() {
                "tenant" => secret.0 = true,
                "user" => secret.1 = true,
                _ => self.error("bad-value", text.span.clone(), "only \"tenant\" and \"user\" can be secret", ""),
            }
        }
        secret
    }

    fn identity_source(&mut self, text: &Text) -> Option<IdentitySource> {
        let help = "write \"header:NAME\", \"cookie:NAME\", \"host:{tenant}.example.com\", \"path:/t/{tenant}/**\" or \
                    \"claim:NAME\"";
        let Some((kind, name)) = text.value.split_once(':').filter(|(_, name)| !name.is_empty()) else {
            self.error("bad-value", text.span.clone(), format!("\"{}\" is not a source of names", text.value), help);
            return None;
        };
        let named = match kind {
            "header" => is_token(name),
            "cookie" => is_cookie_name(name),
            _ => true,
        };
        if !named {
            let message = format!("\"{name}\" is not the name of a {kind}");
            self.error("bad-value", text.span.clone(), message, help);
            return None;
        }
        let kind = match kind {
            "header" => return Some(IdentitySource::Header(name.to_ascii_lowercase().into())),
            "cookie" => return Some(IdentitySource::Cookie(name.into())),
            "claim" => return Some(IdentitySource::Claim(name.into())),
            "host" => Kind::Host,
            "path" => Kind::Path,
            _ => {
                self.error("bad-value", text.span.clone(), format!("unknown source \"{kind}\""), help);
                return None;
            }
        };
        match Pattern::parse(name, kind) {
            Ok(pattern) if !name.contains('{') => {
                let message = format!("\"{pattern}\" captures nothing");
                self.error("bad-value", text.span.clone(), message, "put the name in braces, as in {tenant}");
                None
            }
            Ok(pattern) if kind == Kind::Host => Some(IdentitySource::Host(pattern)),
            Ok(pattern) => Some(IdentitySource::Path(pattern)),
            Err(message) => {
                self.error("bad-pattern", text.span.clone(), message, help);
                None
            }
        }
    }

    fn jwt(&mut self, file: &JwtFile) -> Option<Jwt> {
        const ALGS: [&str; 9] = ["HS256", "HS384", "HS512", "RS256", "RS384", "RS512", "ES256", "ES384", "EdDSA"];
        if !ALGS.contains(&file.alg.value.as_str()) {
            let help = format!("known: {}", ALGS.join(", "));
            // The message does not quote the value, which may be the key.
            self.error("bad-value", file.alg.span.clone(), "unknown algorithm", &help);
            return None;
        }
        if file.key.is_some() == file.key_file.is_some() {
            self.error(
                "bad-value",
                file.alg.span.clone(),
                "tokens are verified with exactly one key",
                "give either key or key_file",
            );
            return None;
        }
        if let Some(key) = &file.key
            && let Err(message) = key_fits(&file.alg.value, &key.value)
        {
            let help = "HS algorithms take a shared secret, the others a public key in PEM or a JWKS";
            self.error("bad-key", key.span.clone(), message, help);
            return None;
        }
        let text = |text: &Option<Text>| text.as_ref().map(|text| text.value.as_str().into());
        Some(Jwt {
            alg: file.alg.value.as_str().into(),
            key: text(&file.key),
            key_file: text(&file.key_file),
            iss: text(&file.iss),
            aud: text(&file.aud),
        })
    }
}

/// Checks that a key suits an algorithm, as far as its text shows. The errors reveal nothing about the key, not even its length.
fn key_fits(alg: &str, key: &str) -> Result<(), &'static str> {
    let (key, is_pem) = (key.trim(), key.contains("-----BEGIN "));
    // RFC 7518, 3.2: a key is at least as long as the output of the hash.
    let least = match alg {
        "HS256" => Some(32),
        "HS384" => Some(48),
        "HS512" => Some(64),
        _ => None,
    };
    match least {
        // First, whatever the algorithm is: verifying needs no key that can sign.
        _ if key.contains("PRIVATE KEY-----") => Err("this is a private key, and verification needs the public one"),
        // Algorithm confusion: under HMAC the public key would be the secret, and it is published.
        Some(_) if is_pem => Err("this is a public key: with this algorithm anyone who has it could sign tokens"),
        Some(least) if key.len() < least => {
            Err("the key is shorter than the hash of its algorithm, so it can be guessed")
        }
        None if !is_pem && !key.starts_with('{') => Err("this is neither a public key in PEM nor a JWKS"),
        _ => Ok(()),
    }
}

/// Whether a text is a token of RFC 9110, as the name of a cookie must be (RFC 6265, 4.1.1).
fn is_cookie_name(text: &str) -> bool {
    let mark = |byte: u8| b"!#$%&'*+-.^_`|~".contains(&byte);
    !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_alphanumeric() || mark(byte))
}

/// Whether a header may contain a client's address: it is not known to contain anything else. `name` is in lower case.
fn may_contain_address(name: &str) -> bool {
    const OTHERS: [&str; 29] = [
        "cache-control",
        "connection",
        "content-length",
        "date",
        "expect",
        "from",
        "host",
        "keep-alive",
        "max-forwards",
        "pragma",
        "prefer",
        "priority",
        "proxy-authorization",
        "proxy-connection",
        "range",
        "te",
        "trailer",
        "transfer-encoding",
        "upgrade",
        "via",
        "x-forwarded-host",
        "x-forwarded-port",
        "x-forwarded-prefix",
        "x-forwarded-proto",
        "x-forwarded-server",
        "x-original-method",
        "x-original-uri",
        "x-original-url",
        "x-requested-with",
    ];
    let families = ["accept-", "content-", "if-", "sec-"];
    !(OTHERS.contains(&name)
        || CLIENT_HEADERS.contains(&name)
        || families.iter().any(|family| name.starts_with(family)))
}

fn address_source(text: &str) -> AddressSource {
    match text.to_ascii_lowercase().as_str() {
        "peer" => AddressSource::Peer,
        "x-forwarded-for" => AddressSource::XForwardedFor,
        "forwarded" => AddressSource::Forwarded,
        header => AddressSource::Header(header.into()),
    }
}
