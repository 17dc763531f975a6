//! How callers are identified, built in code.

use super::{extend, name, some, text};
use crate::path::OddPaths;
use crate::policy::UserScope;
use crate::policy::file::{IdentityFile, JwtFile};

/// How callers are identified, for [`PolicyBuilder::identity`](super::PolicyBuilder::identity).
///
/// An application that passes tenant, user and address itself, in [`Facts`](crate::Facts), does not need it.
#[derive(Debug, Clone, Default)]
#[must_use = "an identity does nothing until it is added to a policy"]
pub struct IdentityBuilder {
    pub(super) file: IdentityFile,
}

impl IdentityBuilder {
    /// Begins with the defaults: nobody is trusted, and the client's address is that of the connection.
    pub fn new() -> Self {
        Self::default()
    }

    /// Adds CIDR blocks of peers whose forwarding and identity headers are believed.
    pub fn trusted_proxies<P: Into<String>>(mut self, blocks: impl IntoIterator<Item = P>) -> Self {
        extend(&mut self.file.trusted_proxies, blocks);
        self
    }

    /// Adds a source of the client's address: `peer`, `x-forwarded-for`, `forwarded` or the name of a single-value header.
    /// Sources are tried in the order in which they were added.
    pub fn client_ip(mut self, source: impl Into<String>) -> Self {
        extend(&mut self.file.client_ip, [source]);
        self
    }

    /// Sets how many leading bits IPv6 addresses share that share a budget. Default: 64.
    pub fn ipv6_prefix(mut self, bits: u8) -> Self {
        self.file.ipv6_prefix = some(bits);
        self
    }

    /// Sets where the tenant's name is taken from: `header:NAME`, `cookie:NAME`, `host:{tenant}.example.com`,
    /// `path:/t/{tenant}/**` or `claim:NAME`.
    pub fn tenant(mut self, source: impl Into<String>) -> Self {
        self.file.tenant = Some(text(source));
        self
    }

    /// Sets where the user's name is taken from, written like [`tenant`](Self::tenant).
    pub fn user(mut self, source: impl Into<String>) -> Self {
        self.file.user = Some(text(source));
        self
    }

    /// Sets where user names are unique. Default: [`UserScope::Global`].
    pub fn user_scope(mut self, scope: UserScope) -> Self {
        self.file.user_scope = name(scope);
        self
    }

    /// Sets where the tier's name is taken from, written like [`tenant`](Self::tenant).
    pub fn tier(mut self, source: impl Into<String>) -> Self {
        self.file.tier = Some(text(source));
        self
    }

    /// Sets the tier of requests that have no other.
    pub fn default_tier(mut self, tier: impl Into<String>) -> Self {
        self.file.default_tier = Some(text(tier));
        self
    }

    /// Marks tenants' names as secrets, which every output shows as a digest.
    pub fn secret_tenant(mut self) -> Self {
        extend(&mut self.file.secret, ["tenant"]);
        self
    }

    /// Marks users' names as secrets, which every output shows as a digest.
    pub fn secret_user(mut self) -> Self {
        extend(&mut self.file.secret, ["user"]);
        self
    }

    /// Lets log lines show users and addresses unredacted.
    pub fn log_identifiers(mut self) -> Self {
        self.file.log_identifiers = true;
        self
    }

    /// Sets how the bearer tokens behind `claim:` sources are verified.
    pub fn jwt(mut self, jwt: JwtBuilder) -> Self {
        self.file.jwt = Some(jwt.file);
        self
    }

    /// Sets how client-facing doors treat paths that servers read differently. Default: [`OddPaths::Refuse`].
    pub fn odd_paths(mut self, odd_paths: OddPaths) -> Self {
        self.file.odd_paths = name(odd_paths);
        self
    }

    /// Adds patterns of paths whose wildcards match secrets, such as `/reset/*`: what they match is never recorded or shown.
    pub fn private_paths<T: Into<String>>(mut self, patterns: impl IntoIterator<Item = T>) -> Self {
        extend(&mut self.file.private_paths, patterns);
        self
    }
}

/// How bearer tokens are verified, for [`IdentityBuilder::jwt`]. It needs either a key or a file that holds one.
#[derive(Debug, Clone)]
#[must_use = "a verifier does nothing until it is added to an identity"]
pub struct JwtBuilder {
    pub(super) file: JwtFile,
}

impl JwtBuilder {
    /// Begins with the only accepted algorithm: HS256, HS384, HS512, RS256, RS384, RS512, ES256, ES384 or EdDSA.
    pub fn new(alg: impl Into<String>) -> Self {
        Self { file: JwtFile { alg: text(alg), ..JwtFile::default() } }
    }

    /// Sets the key: a shared secret for HS algorithms, else a public key in PEM or a JWKS.
    pub fn key(mut self, key: impl Into<String>) -> Self {
        self.file.key = Some(text(key));
        self
    }

    /// Sets the path of the file that holds the key.
    pub fn key_file(mut self, path: impl Into<String>) -> Self {
        self.file.key_file = Some(text(path));
        self
    }

    /// Sets the issuer that tokens must name.
    pub fn iss(mut self, issuer: impl Into<String>) -> Self {
        self.file.iss = Some(text(issuer));
        self
    }

    /// Sets the audience that tokens must name.
    pub fn aud(mut self, audience: impl Into<String>) -> Self {
        self.file.aud = Some(text(audience));
        self
    }
}
