//! Why a text does not name a subject.

use std::fmt;

use super::Layer;

/// Why a text does not name an address, a user or a tenant.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum SubjectError {
    /// The text is empty.
    Empty,
    /// The text is not an address or a block in CIDR notation.
    NotAnAddress(Box<str>),
    /// The text is not an entry of an allow or deny list.
    NotAListEntry(Box<str>),
    /// The layer has no subjects.
    NoSubjects(Layer),
    /// Users belong to tenants, and the name has no tenant. The second text is the user's name, percent-encoded.
    NoTenant(Box<str>, Box<str>),
    /// Users belong to tenants, and the name is not `TENANT/USER`.
    NotTenantUser(Box<str>),
    /// Users belong to tenants, and the name is not percent-encoded.
    NotEncoded(Box<str>),
}

impl fmt::Display for SubjectError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Empty => f.write_str("the key is empty"),
            Self::NotAnAddress(text) => write!(f, "\"{text}\" is not an address or a CIDR block"),
            Self::NotAListEntry(text) => {
                write!(f, "\"{text}\" is not an address, a CIDR block, \"user:ID\" or \"tenant:ID\"")
            }
            Self::NoSubjects(_) => f.write_str("only an address (edge), a tenant or a user can be banned"),
            Self::NoTenant(text, user) => write!(
                f,
                "\"{text}\" has no tenant: users belong to tenants (user_scope = \"tenant\"), so write \"TENANT/{user}\", \
                 or \"/{user}\" for a user without one"
            ),
            Self::NotTenantUser(text) => {
                write!(f, "\"{text}\" is not TENANT/USER: write a \"/\" within either part as %2F")
            }
            Self::NotEncoded(text) => {
                write!(f, "\"{text}\" is not percent-encoded: write a \"%\" within either part as %25")
            }
        }
    }
}

impl std::error::Error for SubjectError {}
