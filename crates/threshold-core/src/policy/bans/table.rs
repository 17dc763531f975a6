//! The table of bans, by the users, addresses and tenants that they are on.

use std::collections::BTreeMap;
use std::net::IpAddr;

use ipnet::{IpNet, Ipv4Net, Ipv6Net};
use prefix_trie::PrefixMap;

use super::{Banned, Who};
use crate::key::Digest;
use crate::lockout::Spellings;
use crate::policy::lists::{ListEntry, Rank};
use crate::time::Timestamp;

/// The bans on one subject, which may come from several sources: an operator and imported sets.
#[derive(Debug, Clone)]
struct SubjectBans {
    /// The ban that ends last. It decides.
    last: (Timestamp, Digest),
    /// Nearly always empty, and then without memory of its own.
    others: Vec<(Timestamp, Digest)>,
}

impl SubjectBans {
    const fn new(ban: (Timestamp, Digest)) -> Self {
        Self { last: ban, others: Vec::new() }
    }

    fn iter(&self) -> impl Iterator<Item = &(Timestamp, Digest)> {
        std::iter::once(&self.last).chain(&self.others)
    }

    /// Adds a ban, in place of the one with the same id.
    fn insert(&mut self, until: Timestamp, id: Digest) {
        // The usual case, a new end for the only ban, needs no list.
        if self.last.1 == id && self.others.is_empty() {
            self.last = (until, id);
            return;
        }
        let mut all: Vec<_> = self.iter().copied().filter(|(_, own)| *own != id).collect();
        all.push((until, id));
        self.replace(all);
    }

    /// Removes a ban. Returns whether none is left.
    fn remove(&mut self, id: Digest) -> bool {
        let all: Vec<_> = self.iter().copied().filter(|(_, own)| *own != id).collect();
        let is_empty = all.is_empty();
        self.replace(all);
        is_empty
    }

    fn replace(&mut self, mut all: Vec<(Timestamp, Digest)>) {
        all.sort_unstable();
        // Without any ban this stays as it is. The caller removes the whole entry then.
        if let Some(last) = all.pop() {
            *self = Self { last, others: all };
        }
    }
}

/// A table of bans. An address is found by one walk down its prefixes, however many bans there are.
#[derive(Debug, Clone, Default)]
pub struct Bans {
    v4: PrefixMap<Ipv4Net, SubjectBans>,
    v6: PrefixMap<Ipv6Net, SubjectBans>,
    users: BTreeMap<Box<str>, SubjectBans>,
    tenants: BTreeMap<Box<str>, SubjectBans>,
    spellings: Spellings,
}

impl Bans {
    /// Adds a ban, or changes the end of the one with the same id. Bans with different ids on the same subject stay apart, and
    /// the one that ends last decides.
    pub fn insert(&mut self, id: Digest, whom: &ListEntry, until: Timestamp) {
        let new = || SubjectBans::new((until, id));
        match whom {
            ListEntry::Address(network) => match network.net() {
                IpNet::V4(net) => match self.v4.get_mut(&net) {
                    Some(bans) => bans.insert(until, id),
                    None => drop(self.v4.insert(net, new())),
                },
                IpNet::V6(net) => match self.v6.get_mut(&net) {
                    Some(bans) => bans.insert(until, id),
                    None => drop(self.v6.insert(net, new())),
                },
            },
            ListEntry::User(user) => match self.users.get_mut(user) {
                Some(bans) => bans.insert(until, id),
                None => {
                    // Only with the first ban on this name: `remove` takes it back with the last one.
                    self.spellings.insert(user);
                    self.users.insert(user.clone(), new());
                }
            },
            ListEntry::Tenant(tenant) => match self.tenants.get_mut(tenant) {
                Some(bans) => bans.insert(until, id),
                None => drop(self.tenants.insert(tenant.clone(), new())),
            },
        }
    }

    /// Removes the ban with this id on a subject.
    pub fn remove(&mut self, id: Digest, whom: &ListEntry) {
        match whom {
            ListEntry::Address(network) => match network.net() {
                IpNet::V4(net) => {
                    if self.v4.get_mut(&net).is_some_and(|bans| bans.remove(id)) {
                        self.v4.remove(&net);
                    }
                }
                IpNet::V6(net) => {
                    if self.v6.get_mut(&net).is_some_and(|bans| bans.remove(id)) {
                        self.v6.remove(&net);
                    }
                }
            },
            ListEntry::User(user) => {
                if self.users.get_mut(user).is_some_and(|bans| bans.remove(id)) {
                    self.users.remove(user);
                    self.spellings.remove(user);
                }
            }
            ListEntry::Tenant(tenant) => {
                if self.tenants.get_mut(tenant).is_some_and(|bans| bans.remove(id)) {
                    self.tenants.remove(tenant);
                }
            }
        }
    }

    /// Implements [`BanSource::spellings`](super::BanSource::spellings).
    pub fn spellings(&self, folded: &str) -> impl Iterator<Item = &str> {
        self.spellings.of(folded)
    }

    /// Implements [`BanSource::find`](super::BanSource::find). Bans that are over are found too: the time of the request is not known here, and the ban
    /// that ends last decides.
    #[must_use]
    pub fn find(&self, who: Who<'_>, allowed: Option<Rank>) -> Option<Banned> {
        let mut found = None::<Banned>;
        self.each_covering(who, |rank, bans| {
            // The other bans on this subject end no later.
            let (until, id) = bans.last;
            // From wide to narrow, and `>=` for the end: of bans that end together the narrowest is reported.
            if allowed.is_none_or(|allowed| rank >= allowed) && found.is_none_or(|found| until >= found.until) {
                found = Some(Banned { until, layer: rank.layer(), id });
            }
        });
        found
    }

    /// Returns the ids of all bans on a caller, also those on wider blocks, and those that are over.
    #[must_use]
    pub fn covering(&self, who: Who<'_>) -> Vec<Digest> {
        let mut ids = Vec::new();
        self.each_covering(who, |_, bans| ids.extend(bans.iter().map(|(_, id)| *id)));
        ids
    }

    /// Returns the ids of the bans on exactly this subject.
    #[must_use]
    pub fn on(&self, whom: &ListEntry) -> Vec<Digest> {
        let bans = match whom {
            ListEntry::Address(network) => match network.net() {
                IpNet::V4(net) => self.v4.get(&net),
                IpNet::V6(net) => self.v6.get(&net),
            },
            ListEntry::User(user) => self.users.get(user),
            ListEntry::Tenant(tenant) => self.tenants.get(tenant),
        };
        bans.into_iter().flat_map(SubjectBans::iter).map(|(_, id)| *id).collect()
    }

    /// Calls `show` with the bans on the caller's user, its address and every block around it, and its tenant.
    fn each_covering(&self, who: Who<'_>, mut show: impl FnMut(Rank, &SubjectBans)) {
        if let Some(bans) = who.tenant.and_then(|tenant| self.tenants.get(tenant)) {
            show(Rank::Tenant, bans);
        }
        match who.ip.map(|ip| ip.to_canonical()) {
            None => {}
            Some(IpAddr::V4(v4)) => {
                let nets = self.v4.cover(&Ipv4Net::from(v4));
                nets.for_each(|(net, bans)| show(Rank::Address(net.prefix_len()), bans));
            }
            Some(IpAddr::V6(v6)) => {
                let nets = self.v6.cover(&Ipv6Net::from(v6));
                nets.for_each(|(net, bans)| show(Rank::Address(net.prefix_len()), bans));
            }
        }
        if let Some(bans) = who.user.and_then(|user| self.users.get(user)) {
            show(Rank::User, bans);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::address::Network;
    use crate::key::DigestKey;
    use crate::policy::{Ban, Layer, Listed, Lists};
    use proptest::prelude::*;

    const KEY: DigestKey = DigestKey::new([7; 16]);

    fn at(seconds: u64) -> Timestamp {
        Timestamp::from_secs(seconds)
    }

    fn bans(all: &[(&str, u64)]) -> Bans {
        let mut bans = Bans::default();
        for (whom, until) in all {
            let whom = ListEntry::parse(whom).unwrap();
            bans.insert(whom.ban_id(KEY), &whom, at(*until));
        }
        bans
    }

    /// Two lists named the same network. Replacing one of them once lifted the ban of the other, because there was only one
    /// ban for each network.
    ///
    /// Fails if `remove` drops all bans on the subject, or if `insert` keeps only the newest.
    #[test]
    fn bans_from_several_sources_on_one_network_are_apart_and_the_one_that_ends_last_decides() {
        let whom = ListEntry::parse("203.0.113.0/24").unwrap();
        let by = |origin: &str| {
            let by = if origin.is_empty() { "ops".into() } else { Ban::by_origin(origin) };
            Ban { whom: whom.clone(), reason: "r".into(), by, from: at(0), until: at(9) }.id(KEY)
        };
        let (operator, drop, other) = (by(""), by("drop"), by("other"));
        assert_eq!(operator, whom.ban_id(KEY));
        let mut bans = Bans::default();
        for (id, until) in [(operator, 20), (drop, 50), (other, 30), (drop, 40)] {
            bans.insert(id, &whom, at(until));
        }
        let who = Who { ip: "203.0.113.7".parse().ok(), ..Who::default() };
        let find = |bans: &Bans| bans.find(who, None).map(|found| (found.id, found.until.secs_ceil()));
        assert_eq!(find(&bans), Some((drop, 40)));
        let mut all = bans.covering(who);
        all.sort_unstable();
        let mut expected = vec![operator, drop, other];
        expected.sort_unstable();
        assert_eq!(all, expected);
        bans.remove(drop, &whom);
        bans.remove(drop, &whom);
        assert_eq!(find(&bans), Some((other, 30)));
        bans.remove(other, &whom);
        assert_eq!((find(&bans), bans.on(&whom)), (Some((operator, 20)), vec![operator]));
        bans.remove(operator, &whom);
        assert_eq!((find(&bans), bans.covering(who)), (None, vec![]));
    }

    #[test]
    fn of_all_bans_that_are_met_the_one_that_ends_last_counts_and_a_narrower_allowance_lifts_it() {
        let mut bans =
            bans(&[("10.0.0.0/8", 50), ("10.1.2.3", 20), ("user:eve", 30), ("tenant:bad", 90), ("2001:db8::/32", 5)]);
        let find = |bans: &Bans, ip: &str, user, tenant, allowed| {
            let found = bans.find(Who { ip: ip.parse().ok(), user, tenant }, allowed);
            found.map(|ban| (ban.until.secs_ceil(), ban.layer))
        };
        assert_eq!(find(&bans, "10.1.2.3", None, None, None), Some((50, Layer::Edge)));
        assert_eq!(find(&bans, "::ffff:10.1.2.3", None, None, None), Some((50, Layer::Edge)));
        assert_eq!(find(&bans, "10.1.2.3", None, None, Some(Rank::Address(16))), Some((20, Layer::Edge)));
        assert_eq!(find(&bans, "10.1.2.3", None, None, Some(Rank::Address(32))), Some((20, Layer::Edge)));
        assert_eq!(find(&bans, "10.1.2.4", None, None, Some(Rank::Address(16))), None);
        assert_eq!(find(&bans, "10.1.2.4", Some("eve"), None, Some(Rank::User)), Some((30, Layer::User)));
        assert_eq!(find(&bans, "192.0.2.1", Some("bob"), Some("bad"), None), Some((90, Layer::Tenant)));
        assert_eq!(find(&bans, "192.0.2.1", Some("bob"), Some("bad"), Some(Rank::Address(24))), None);
        assert_eq!(find(&bans, "2001:db8::1", None, None, None), Some((5, Layer::Edge)));
        for (whom, _) in [("10.0.0.0/8", 0), ("10.1.2.3", 0)] {
            let whom = ListEntry::parse(whom).unwrap();
            bans.remove(whom.ban_id(KEY), &whom);
        }
        assert_eq!(find(&bans, "10.1.2.3", None, None, None), None);
    }

    proptest! {
        /// Lists and bans are two tables that follow one rule: what a list denies, a ban denies.
        #[test]
        fn bans_and_deny_lists_agree(nets in prop::collection::vec((0u32..8, 24u8..=32), 0..12), allowed in prop::collection::vec((0u32..8, 24u8..=32), 0..6), asked in 0u32..8) {
            let net = |(bits, prefix): (u32, u8)| ListEntry::Address(Network::new(IpAddr::V4(bits.into()), prefix).unwrap());
            let (mut lists, mut only_allowed, mut bans) = (Lists::default(), Lists::default(), Bans::default());
            for own in nets {
                lists.insert(net(own), Listed::Deny);
                bans.insert(net(own).ban_id(KEY), &net(own), Timestamp::MAX);
            }
            for own in allowed {
                lists.insert(net(own), Listed::Allow);
                only_allowed.insert(net(own), Listed::Allow);
            }
            let who = Who { ip: Some(IpAddr::V4(asked.into())), ..Who::default() };
            let rank = only_allowed.find_ranked(who).map(|(rank, _)| rank);
            let denied = lists.find(who.ip, None, None) == Some(Listed::Deny);
            prop_assert_eq!(bans.find(who, rank).is_some(), denied);
        }
    }
}
