//! Allow and deny lists of addresses, users and tenants.

use std::collections::BTreeMap;
use std::net::IpAddr;

use ipnet::{IpNet, Ipv4Net, Ipv6Net};
use prefix_trie::PrefixMap;

use super::bans::Who;
use super::{Layer, SubjectError};
use crate::address::Network;
use crate::lockout::Spellings;

/// The list that a caller is on.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Listed {
    /// The allow list: never limited and never counted.
    Allow,
    /// The deny list: always denied.
    Deny,
}

/// How narrow an entry is, for deciding which of two wins: users are narrower than addresses, addresses narrower than tenants.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Rank {
    /// A tenant.
    Tenant,
    /// A block of addresses, by the length of its prefix.
    Address(u8),
    /// A user.
    User,
}

impl Rank {
    /// Returns the layer of such an entry.
    pub(super) const fn layer(self) -> Layer {
        match self {
            Self::Tenant => Layer::Tenant,
            Self::Address(_) => Layer::Edge,
            Self::User => Layer::User,
        }
    }
}

/// One entry of a list.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum ListEntry {
    /// A block of addresses.
    Address(Network),
    /// A user.
    User(Box<str>),
    /// A tenant.
    Tenant(Box<str>),
}

impl ListEntry {
    /// Parses `203.0.113.0/24`, `203.0.113.7`, `user:ID` or `tenant:ID`.
    ///
    /// # Errors
    /// If the text is none of these.
    pub fn parse(text: &str) -> Result<Self, SubjectError> {
        // A name counts as it is written, as that of a request does.
        let named = |kind: &str| text.trim_start().strip_prefix(kind).filter(|name| !name.is_empty());
        if let Some(user) = named("user:") {
            return Ok(Self::User(user.into()));
        }
        if let Some(tenant) = named("tenant:") {
            return Ok(Self::Tenant(tenant.into()));
        }
        let text = text.trim();
        text.parse().map(Self::Address).map_err(|_| SubjectError::NotAListEntry(text.into()))
    }
}

/// The allow and deny lists. An address is found by one longest-prefix match, however many entries there are.
#[derive(Debug, Clone, Default)]
pub struct Lists {
    v4: PrefixMap<Ipv4Net, Listed>,
    v6: PrefixMap<Ipv6Net, Listed>,
    users: BTreeMap<Box<str>, Listed>,
    tenants: BTreeMap<Box<str>, Listed>,
    /// The canonical names of denied users, for logins.
    spellings: Spellings,
    /// Whether there are entries.
    any: bool,
}

impl Lists {
    /// Adds an entry. An entry on both lists is denied.
    pub fn insert(&mut self, entry: ListEntry, listed: Listed) {
        fn stricter(old: Option<Listed>, new: Listed) -> Listed {
            // A mistake that denies is noticed, one that allows is not.
            if old == Some(Listed::Deny) { Listed::Deny } else { new }
        }
        self.any = true;
        match entry {
            ListEntry::Address(network) => match network.net() {
                IpNet::V4(net) => {
                    let listed = stricter(self.v4.get(&net).copied(), listed);
                    self.v4.insert(net, listed);
                }
                IpNet::V6(net) => {
                    let listed = stricter(self.v6.get(&net).copied(), listed);
                    self.v6.insert(net, listed);
                }
            },
            ListEntry::User(user) => {
                // An allow entry must not be found by other spellings: anyone could name an allowed account in a login.
                if listed == Listed::Deny {
                    self.spellings.insert(&user);
                }
                let listed = stricter(self.users.get(&user).copied(), listed);
                self.users.insert(user, listed);
            }
            ListEntry::Tenant(tenant) => {
                let listed = stricter(self.tenants.get(&tenant).copied(), listed);
                self.tenants.insert(tenant, listed);
            }
        }
    }

    /// Returns whether there are no entries.
    #[must_use]
    #[inline]
    pub fn is_empty(&self) -> bool {
        !self.any
    }

    /// Returns the list that a caller is on. The narrowest entry wins: a user before an address before a tenant.
    #[must_use]
    pub fn find(&self, ip: Option<IpAddr>, user: Option<&str>, tenant: Option<&str>) -> Option<Listed> {
        self.find_ranked(Who { ip, user, tenant }).map(|(_, listed)| listed)
    }

    /// Returns the same as [`find`](Self::find), and how narrow the entry is.
    #[must_use]
    pub fn find_ranked(&self, Who { ip, user, tenant }: Who<'_>) -> Option<(Rank, Listed)> {
        if self.is_empty() {
            return None;
        }
        let user = user.and_then(|user| self.users.get(user)).map(|listed| (Rank::User, *listed));
        let tenant = || tenant.and_then(|tenant| self.tenants.get(tenant)).map(|listed| (Rank::Tenant, *listed));
        // From narrow to wide, and lazily: usually the first lookup that finds something is the only one.
        user.or_else(|| ip.and_then(|ip| self.find_address(ip))).or_else(tenant)
    }

    /// Returns the entry that decides about a caller, and its list.
    #[must_use]
    pub fn find_entry(&self, who: Who<'_>) -> Option<(ListEntry, Listed)> {
        let (rank, listed) = self.find_ranked(who)?;
        let entry = match rank {
            Rank::User => ListEntry::User(who.user?.into()),
            Rank::Tenant => ListEntry::Tenant(who.tenant?.into()),
            Rank::Address(prefix) => ListEntry::Address(Network::new(who.ip?.to_canonical(), prefix)?),
        };
        Some((entry, listed))
    }

    /// Returns the denied users whose canonical account name is `folded`, as the list writes them.
    pub(crate) fn spellings(&self, folded: &str) -> impl Iterator<Item = &str> {
        self.spellings.of(folded)
    }

    fn find_address(&self, ip: IpAddr) -> Option<(Rank, Listed)> {
        match ip.to_canonical() {
            IpAddr::V4(v4) => {
                let found = self.v4.get_lpm(&Ipv4Net::from(v4));
                found.map(|(net, listed)| (Rank::Address(net.prefix_len()), *listed))
            }
            IpAddr::V6(v6) => {
                let found = self.v6.get_lpm(&Ipv6Net::from(v6));
                found.map(|(net, listed)| (Rank::Address(net.prefix_len()), *listed))
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn lists(allow: &[&str], deny: &[&str]) -> Lists {
        let mut lists = Lists::default();
        for (entries, listed) in [(allow, Listed::Allow), (deny, Listed::Deny)] {
            for entry in entries {
                lists.insert(ListEntry::parse(entry).unwrap(), listed);
            }
        }
        lists
    }

    #[test]
    fn the_narrower_entry_wins_and_deny_on_a_tie() {
        let lists = lists(
            &["10.0.0.0/8", "user:alice", "tenant:acme", "10.9.9.9", "::ffff:192.0.2.0/120"],
            &["10.1.0.0/16", "10.9.9.9", "user:bob", "203.0.113.0/24", "2001:db8::/32"],
        );
        let check = |ip: &str, user: Option<&str>, tenant: Option<&str>, expect| {
            assert_eq!(lists.find(Some(ip.parse().unwrap()), user, tenant), expect, "{ip} {user:?} {tenant:?}");
        };
        check("10.0.0.1", None, None, Some(Listed::Allow));
        check("10.1.2.3", None, None, Some(Listed::Deny));
        check("::ffff:10.1.2.3", None, None, Some(Listed::Deny));
        check("10.9.9.9", None, None, Some(Listed::Deny));
        check("192.0.2.7", None, None, Some(Listed::Allow));
        check("203.0.113.7", Some("alice"), None, Some(Listed::Allow));
        check("10.0.0.1", Some("bob"), None, Some(Listed::Deny));
        check("203.0.113.7", None, Some("acme"), Some(Listed::Deny));
        check("198.51.100.7", None, Some("acme"), Some(Listed::Allow));
        check("198.51.100.7", Some("carol"), None, None);
        check("2001:db8::1", None, None, Some(Listed::Deny));
    }

    #[test]
    fn an_entry_is_an_address_a_user_or_a_tenant() {
        assert!(ListEntry::parse("bob").is_err());
        assert!(ListEntry::parse("user:").is_err());
        assert!(ListEntry::parse("10.0.0.0/33").is_err());
        assert_eq!(ListEntry::parse("10.1.2.3/8"), ListEntry::parse("10.0.0.0/8"));
    }
}
