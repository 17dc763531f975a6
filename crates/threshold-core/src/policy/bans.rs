//! Bans that operators set while a policy is in force: on whom, until when, and which of them applies to a request.

mod table;

use std::fmt;
use std::net::IpAddr;

use super::lists::{ListEntry, Rank};
use super::{Layer, Policy, SubjectError, check};
use crate::address::{AddressGroup, Network, canonical};
use crate::caller::Caller;
use crate::codec::{BytesError, Format, Reader, Versions, Writer, from_bytes, to_bytes};
use crate::facts::Facts;
use crate::key::{Digest, DigestKey, Domain, Part};
use crate::time::{Span, Timestamp};

pub use table::Bans;

/// The maximum length of a text in a ban, in bytes.
const MAX_TEXT: usize = 1 << 18;
/// The shortest prefixes that can be banned, of IPv4 and of IPv6. A wider block is taken for a mistake.
const WIDEST: (u8, u8) = (8, 16);

/// A ban.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Ban {
    /// The banned address, user or tenant.
    pub whom: ListEntry,
    /// Why. No answer to a client reveals it.
    pub reason: Box<str>,
    /// Who set it.
    pub by: Box<str>,
    /// Since when.
    pub from: Timestamp,
    /// Until when; `Timestamp::MAX` is permanent.
    pub until: Timestamp,
}

impl Ban {
    /// The start of [`by`](Self::by) in a ban of an imported set; the name of the set follows. No operator's name begins so.
    const ORIGIN: &str = "origin ";

    /// Returns the value of [`by`](Self::by) for bans of the imported set with this name.
    #[must_use]
    pub fn by_origin(origin: &str) -> Box<str> {
        format!("{}{origin}", Self::ORIGIN).into()
    }

    /// Returns the name of the imported set that the ban belongs to; `None` for a ban by an operator or a ladder.
    #[must_use]
    pub fn origin(&self) -> Option<&str> {
        self.by.strip_prefix(Self::ORIGIN)
    }

    /// Returns the id of the ban. Bans of an imported set have ids of their own, so that a set can be replaced without ending a
    /// ban that an operator or another set has on the same subject.
    #[must_use]
    pub fn id(&self, key: DigestKey) -> Digest {
        self.origin().map_or_else(|| self.whom.ban_id(key), |origin| self.whom.id_of(key, Some(origin)))
    }

    /// Returns whether the ban begins in the future, because the clock was set back after it was made.
    #[must_use]
    pub fn is_ahead(&self, now: Timestamp) -> bool {
        self.from > now.plus(Span::SECOND)
    }

    /// Moves a ban that [is ahead](Self::is_ahead) to begin now, with its length unchanged.
    #[must_use]
    pub fn brought_back(self, now: Timestamp) -> Self {
        if !self.is_ahead(now) {
            return self;
        }
        // A permanent ban stays permanent: `MAX` is a mark and not a time to subtract from.
        let until = if self.until == Timestamp::MAX { self.until } else { self.until.minus(self.from.since(now)) };
        Self { from: now, until, ..self }
    }
}

/// The ban that applies to a request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Banned {
    /// Until when.
    pub until: Timestamp,
    /// The layer of the banned address, tenant or user.
    pub layer: Layer,
    /// The id of the ban.
    pub id: Digest,
}

/// Looks up bans for a policy. Bans may change between two requests; the policy does not.
pub trait BanSource: fmt::Debug + Send + Sync {
    /// Returns whether there are no bans.
    fn is_empty(&self) -> bool;

    /// Returns the ban on a caller that ends last, among those no wider than `allowed`.
    fn find(&self, who: Who<'_>, allowed: Option<Rank>) -> Option<Banned>;

    /// Returns the banned users whose canonical account name is `folded` and whose name is written differently.
    fn spellings(&self, folded: &str) -> Vec<Box<str>>;
}

/// A caller, as lists and bans identify it.
#[derive(Debug, Clone, Copy, Default)]
pub struct Who<'a> {
    /// The address.
    pub ip: Option<IpAddr>,
    /// The user.
    pub user: Option<&'a str>,
    /// The tenant.
    pub tenant: Option<&'a str>,
}

impl ListEntry {
    /// Parses a subject as operators write it: an address or block for the edge layer, else the name of a tenant or user.
    ///
    /// # Errors
    /// If the layer has no subjects, or the key of the edge layer is not an address.
    pub fn named(layer: Layer, key: &str) -> Result<Self, SubjectError> {
        match layer {
            _ if key.is_empty() => Err(SubjectError::Empty),
            Layer::Edge => key.trim().parse().map(Self::Address).map_err(|_| SubjectError::NotAnAddress(key.into())),
            // Exactly as it is written: a request's names are not trimmed either, so `" acme"` is another tenant than `"acme"`.
            Layer::Tenant => Ok(Self::Tenant(key.into())),
            Layer::User => Ok(Self::User(key.into())),
            Layer::Global | Layer::Endpoint => Err(SubjectError::NoSubjects(layer)),
        }
    }

    /// Returns the layer of the subject.
    #[must_use]
    pub const fn layer(&self) -> Layer {
        match self {
            Self::Address(_) => Layer::Edge,
            Self::User(_) => Layer::User,
            Self::Tenant(_) => Layer::Tenant,
        }
    }

    /// Returns the key as operators write it. A single IPv4 address has no prefix; a single IPv6 address keeps it, because
    /// without one it stands for its whole network (see [`Policy::ban_target`]).
    #[must_use]
    pub fn key(&self) -> String {
        match self {
            Self::Address(network) if network.addr().is_ipv4() && network.is_single() => network.addr().to_string(),
            Self::Address(network) => network.to_string(),
            Self::User(name) | Self::Tenant(name) => name.to_string(),
        }
    }

    /// Returns the id of an operator's ban on this subject, which is the same for every such ban on it; see also [`Ban::id`].
    #[must_use]
    pub fn ban_id(&self, key: DigestKey) -> Digest {
        self.id_of(key, None)
    }

    fn id_of(&self, key: DigestKey, origin: Option<&str>) -> Digest {
        let mut digest = key.begin(Domain::Ban);
        // A user and a tenant may have the same name.
        digest.text(Part::Identity, self.layer().name());
        // A single address has no prefix here: journals contain ids that were made this way.
        match self {
            Self::Address(network) if network.is_single() => {
                digest.text(Part::Fact, &network.addr().to_string());
            }
            Self::Address(_) | Self::User(_) | Self::Tenant(_) => digest.text(Part::Fact, &self.key()),
        }
        // Nothing is added without an origin: journals contain ids that were made this way.
        if let Some(origin) = origin {
            digest.text(Part::Identity, origin);
        }
        digest.finish()
    }
}

impl Policy {
    /// Returns the subject of a request in a layer, as operators see it: secret names are redacted, and the address replaces a
    /// missing name.
    #[must_use]
    pub fn name_of(&self, layer: Layer, facts: &Facts<'_>) -> Option<ListEntry> {
        let caller = Caller::new(facts, self);
        let identity = self.identity();
        let hidden = |name: &str, secret: bool| if secret { self.key.redact(name) } else { name.to_owned() };
        let named = match layer {
            Layer::User => caller.user.map(|name| {
                let tenant = caller.tenant.map(|tenant| hidden(tenant, identity.secret_tenant));
                let name =
                    identity.user_scope.write(tenant.as_deref(), &hidden(name, identity.secret_user)).into_owned();
                ListEntry::User(name.into())
            }),
            Layer::Tenant => caller.tenant.map(|name| ListEntry::Tenant(hidden(name, identity.secret_tenant).into())),
            Layer::Global | Layer::Edge | Layer::Endpoint => None,
        };
        named.or_else(|| {
            let group = caller.group()?;
            Network::new(group.base, group.prefix).map(ListEntry::Address)
        })
    }

    /// Parses the subject of a ban like [`ListEntry::named`], except that a bare IPv6 address stands for its `ipv6_prefix`, as it
    /// does for limits. `ADDR/128` is that one address.
    ///
    /// # Errors
    /// The same as for `ListEntry::named`; and if a user's name needs a tenant and has none, see
    /// [`UserScope`](super::UserScope).
    pub fn ban_target(&self, layer: Layer, key: &str) -> Result<ListEntry, SubjectError> {
        let key = self.subject_key(layer, key)?;
        let named = ListEntry::named(layer, &key)?;
        // One IPv6 client has a whole network. A ban on the single address would last until the client takes the next
        // one.
        let Some(ip @ IpAddr::V6(_)) = key.trim().parse().ok().filter(|_| layer == Layer::Edge).map(canonical) else {
            return Ok(named);
        };
        let group = AddressGroup::of(ip, self.identity().ipv6_prefix);
        Ok(Network::new(group.base, group.prefix).map_or(named, ListEntry::Address))
    }

    /// Returns why a subject must not be banned, if it covers more than one client's addresses.
    #[must_use]
    pub fn refuses_ban(&self, whom: &ListEntry) -> Option<TooBroad> {
        let ListEntry::Address(network) = whom else { return None };
        let widest = if network.addr().is_ipv4() { WIDEST.0 } else { WIDEST.1 };
        // A ban acts like a deny entry, so what must not be denied must not be banned: a banned proxy locks out
        // everyone behind it.
        let covered = check::too_wide(whom, super::Listed::Deny, &self.identity().address);
        covered.or_else(|| {
            let loopback = network.addr().is_loopback().then_some(TooBroad::OwnAddress);
            loopback.or_else(|| (network.prefix_len() < widest).then_some(TooBroad::Prefix { widest }))
        })
    }
}

/// Why an entry of a list, or a ban, covers too much to be intended.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum TooBroad {
    /// It covers a whole address space.
    #[error("this covers a whole address space")]
    AddressSpace,
    /// It covers the address of this machine.
    #[error("this covers this machine's own address")]
    OwnAddress,
    /// It covers a trusted proxy. The message does not say which one: its address may be a variable's value in another
    /// notation.
    #[error("this covers a trusted proxy and everyone behind it")]
    TrustedProxy,
    /// It covers more addresses than a ban may.
    #[error("a ban covers at most a /{widest}")]
    #[non_exhaustive]
    Prefix {
        /// The shortest prefix that may be banned.
        widest: u8,
    },
}

impl Ban {
    /// The versions that can be read.
    pub(crate) const VERSIONS: Versions = Versions::FIRST;

    /// Returns the stored form.
    #[must_use]
    pub fn to_bytes(&self, format: Format) -> Vec<u8> {
        to_bytes(Self::VERSIONS, format, |out| self.write(out))
    }

    pub(crate) fn write(&self, out: &mut Writer) {
        let (kind, key) = match &self.whom {
            ListEntry::Address(net) => (1, net.to_string()),
            ListEntry::User(name) => (2, name.to_string()),
            ListEntry::Tenant(name) => (3, name.to_string()),
        };
        out.byte(kind);
        out.number(self.from.micros());
        out.number(self.until.micros());
        for text in [key.as_str(), &self.reason, &self.by] {
            out.text(text);
        }
    }

    /// Reads what [`to_bytes`](Self::to_bytes) wrote.
    ///
    /// # Errors
    /// If the version is unknown or the bytes are malformed.
    pub fn from_bytes(bytes: &[u8]) -> Result<Self, BytesError> {
        from_bytes(bytes, Self::VERSIONS, Self::read)
    }

    pub(crate) fn read(from: &mut Reader<'_>) -> Result<Self, BytesError> {
        const WRONG: BytesError = BytesError::Malformed("ban");
        let kind = from.byte()?;
        let (since, until) = (Timestamp::from_micros(from.number()?), Timestamp::from_micros(from.number()?));
        let (key, reason, by) = (from.text(MAX_TEXT)?, from.text(MAX_TEXT)?, from.text(MAX_TEXT)?);
        let whom = match kind {
            1 => ListEntry::Address(key.parse().map_err(|_| WRONG)?),
            2 => ListEntry::User(key.into()),
            3 => ListEntry::Tenant(key.into()),
            _ => return Err(WRONG),
        };
        Ok(Self { whom, reason: reason.into(), by: by.into(), from: since, until })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn nobody_bans_a_proxy_this_machine_or_half_the_world() {
        let text =
            "[identity]\ntrusted_proxies = [\"192.0.2.0/24\", \"2001:db8:1::/48\"]\nclient_ip = \"x-forwarded-for\"";
        let policy = Policy::parse(text, &|_| None).unwrap();
        let refused = |key: &str| policy.refuses_ban(&ListEntry::named(Layer::Edge, key).unwrap()).is_some();
        for wide in [
            "0.0.0.0/0",
            "::/0",
            "128.0.0.0/1",
            "10.0.0.0/7",
            "2000::/15",
            "127.0.0.1",
            "127.9.9.9",
            "127.0.0.0/8",
            "::1",
            "192.0.2.7",
            "192.0.0.0/16",
            "2001:db8:1:2::/64",
            "::ffff:192.0.2.7",
            "::/16",
            "::ffff:0:0/96",
        ] {
            assert!(refused(wide), "{wide}");
        }
        for fine in ["10.0.0.0/8", "203.0.113.7", "2001:db8:2::/48", "2600::/16"] {
            assert!(!refused(fine), "{fine}");
        }
        assert!(ListEntry::named(Layer::Endpoint, "GET:/").is_err());
        assert!(ListEntry::named(Layer::Edge, "somewhere").is_err());
        assert!(ListEntry::named(Layer::User, "").is_err());
    }

    /// A ban on `" acme"` was one on `"acme"`, an innocent tenant.
    ///
    /// Woken by trimming the key in `named`, in `ban_target` or in `ListEntry::parse`.
    #[test]
    fn a_name_is_banned_as_it_is_written_and_an_address_is_trimmed() {
        let policy = Policy::parse("", &|_| None).unwrap();
        for name in [" acme", "acme ", "\u{a0}acme", " ", "\tacme"] {
            let target = |layer| policy.ban_target(layer, name).map(|whom| whom.key());
            assert_eq!((target(Layer::Tenant).as_deref(), target(Layer::User).as_deref()), (Ok(name), Ok(name)));
            assert_eq!(ListEntry::parse(&format!("user:{name}")), Ok(ListEntry::User(name.into())));
        }
        assert_eq!(policy.ban_target(Layer::Edge, " 203.0.113.7 ").unwrap().key(), "203.0.113.7");
        assert_eq!(ListEntry::parse(" 203.0.113.7 ").unwrap().key(), "203.0.113.7");
        let scoped = Policy::parse("[identity]\nuser_scope = 'tenant'", &|_| None).unwrap();
        assert_eq!(scoped.ban_target(Layer::User, " acme/u1").unwrap().key(), "%20acme/u1");
    }

    #[test]
    fn a_bare_ipv6_address_stands_for_its_prefix_and_a_whole_one_for_itself() {
        let check = |identity: &str, key: &str, expect: &str| {
            let policy = Policy::parse(&format!("[identity]\n{identity}"), &|_| None).unwrap();
            let whom = policy.ban_target(Layer::Edge, key).unwrap();
            assert_eq!(whom.key(), expect, "{key}");
            // What is listed can be banned again, and is the same ban.
            let again = policy.ban_target(Layer::Edge, &whom.key()).unwrap();
            assert_eq!(again.ban_id(policy.key()), whom.ban_id(policy.key()), "{key}");
        };
        check("", "2001:db8:1:2:3::4", "2001:db8:1:2::/64");
        check("", " 2001:DB8:1:2:3::4 ", "2001:db8:1:2::/64");
        check("ipv6_prefix = 56", "2001:db8:1:2:3::4", "2001:db8:1::/56");
        check("", "2001:db8:1:2:3::4/128", "2001:db8:1:2:3::4/128");
        check("", "2001:db8:1:2:3::4/48", "2001:db8:1::/48");
        check("", "203.0.113.7", "203.0.113.7");
        check("", "203.0.113.7/32", "203.0.113.7");
        check("", "::ffff:203.0.113.7", "203.0.113.7");
        let policy = Policy::parse("", &|_| None).unwrap();
        assert_eq!(policy.ban_target(Layer::User, "2001:db8::1"), Ok(ListEntry::User("2001:db8::1".into())));
        // Those numbers are in journals.
        let one = ListEntry::named(Layer::Edge, "2001:db8::1/128").unwrap();
        assert_eq!(one, ListEntry::named(Layer::Edge, "2001:db8::1").unwrap());
        assert_eq!(
            format!("{:032x}", one.ban_id(DigestKey::new([7; 16])).to_u128()),
            "069c55000dc9cc94fcd06cd6d94ab0dd"
        );
    }

    proptest! {
        #[test]
        fn a_ban_reads_back_as_it_was_written(name in ".{1,40}", reason in ".{0,80}", from: u64, until: u64, prefix in 0u8..=32, bits: u32) {
            let network = Network::new(IpAddr::V4(bits.into()), prefix).unwrap();
            for whom in [ListEntry::User(name.as_str().into()), ListEntry::Tenant(name.as_str().into()), ListEntry::Address(network)] {
                let ban = Ban { whom, reason: reason.as_str().into(), by: "ops".into(), from: Timestamp::from_micros(from), until: Timestamp::from_micros(until) };
                let bytes = ban.to_bytes(Format::PRESENT);
                prop_assert_eq!(Ban::from_bytes(&bytes), Ok(ban));
                for cut in 0..bytes.len() {
                    prop_assert!(Ban::from_bytes(&bytes[..cut]).is_err());
                }
            }
        }
    }
}
