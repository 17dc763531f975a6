//! A descriptor → the facts of a request.

use std::borrow::Cow;
use std::net::{IpAddr, Ipv4Addr};

use threshold_core::Facts;
use threshold_core::address::parse_address;
use threshold_core::policy::{DescriptorTarget, EnvoySettings};
use threshold_wire::envoy::{DOMAIN, ENTRY_KEYS, join_keys};

use crate::door::grpc::proto::{Entry, RateLimitDescriptor};

/// In place of an empty value of a fact, which a policy would take for none: a client would avoid a rule by it.
const EMPTY: &str = "(empty)";

/// In place of what is no address.
const NO_ADDRESS: IpAddr = IpAddr::V4(Ipv4Addr::UNSPECIFIED);

/// The texts of a descriptor's entries.
pub(super) struct EntryTexts<'r> {
    entries: Vec<(&'r str, Cow<'r, str>)>,
    keys: String,
}

impl<'r> EntryTexts<'r> {
    pub(super) fn new(descriptor: &'r RateLimitDescriptor) -> Self {
        let entries = descriptor.entries.iter();
        let keys = join_keys(entries.clone().map(|entry| entry.key.as_str()));
        // What is no text is replaced, and what is around it still matches: a client may send any byte.
        let entries = entries.map(|Entry { key, value }| (key.as_str(), String::from_utf8_lossy(value))).collect();
        Self { entries, keys }
    }
}

/// The request that a descriptor describes.
pub(super) struct Described<'r> {
    /// Its facts, but for those in `own`.
    pub(super) facts: Facts<'r>,
    own: Vec<(Cow<'r, str>, &'r str)>,
    /// The keys that were repeated, and how often.
    repeated: Vec<(&'r str, usize)>,
}

impl<'r> Described<'r> {
    pub(super) fn new(texts: &'r EntryTexts<'r>, domain: &'r str, settings: &'r EnvoySettings) -> Self {
        let mut described = Self { facts: Facts::default(), own: Vec::new(), repeated: Vec::new() };
        described.own.reserve(texts.entries.len().saturating_add(2));
        // These come first: no entry may stand in for them.
        described.own.push((Cow::Borrowed(DOMAIN), domain));
        described.own.push((Cow::Borrowed(ENTRY_KEYS), &texts.keys));
        for (key, value) in &texts.entries {
            described.add(key, value, settings);
        }
        described
    }

    fn add(&mut self, key: &'r str, value: &'r str, settings: &'r EnvoySettings) {
        let facts = &mut self.facts;
        let place = match settings.target(key) {
            None => return self.add_fact(key, value),
            Some(DescriptorTarget::Fact(name)) => {
                // The address of a client is one whatever it is counted as: bans and lists name addresses.
                if key == EnvoySettings::REMOTE_ADDRESS {
                    facts.ip = facts.ip.or(address(value));
                }
                return self.add_fact(name, value);
            }
            Some(DescriptorTarget::Ignore) => return,
            Some(DescriptorTarget::Ip) => {
                // What is no address is counted as one, which all of them share: a client must not avoid a rule by it.
                facts.ip = facts.ip.or(Some(address(value).unwrap_or(NO_ADDRESS)));
                return;
            }
            Some(DescriptorTarget::Path) => {
                // `:path` has the query too, which is no part of a path.
                facts.path = facts.path.or(value.split(['?', '#']).next());
                return;
            }
            Some(DescriptorTarget::Tenant) => &mut facts.tenant,
            Some(DescriptorTarget::User) => &mut facts.user,
            Some(DescriptorTarget::Tier) => &mut facts.tier,
            Some(DescriptorTarget::Method) => &mut facts.method,
            Some(DescriptorTarget::Host) => &mut facts.host,
            Some(DescriptorTarget::Endpoint) => &mut facts.endpoint,
            Some(DescriptorTarget::Category) => &mut facts.category,
            // A target that is added to core is a fact until it is handled here.
            Some(_) => return self.add_fact(key, value),
        };
        // An empty one too: a rule that needs it then denies.
        *place = place.or(Some(value));
    }

    /// Adds a fact. The second of a name is counted on, as `generic_key_2`, because Envoy repeats keys.
    fn add_fact(&mut self, name: &'r str, value: &'r str) {
        let value = if value.is_empty() { EMPTY } else { value };
        let has = |name: &str| self.own.iter().any(|(own, _)| own == name);
        if !has(name) {
            return self.own.push((Cow::Borrowed(name), value));
        }
        let place = self.repeated.iter().position(|(own, _)| *own == name);
        let mut number = place.and_then(|place| self.repeated.get(place)).map_or(1, |(_, number)| *number);
        let numbered = loop {
            number = number.saturating_add(1);
            let numbered = format!("{name}_{number}");
            // At most as often as there are entries.
            if !has(&numbered) || number == usize::MAX {
                break numbered;
            }
        };
        match place.and_then(|place| self.repeated.get_mut(place)) {
            Some((_, own)) => *own = number,
            None => self.repeated.push((name, number)),
        }
        self.own.push((Cow::Owned(numbered), value));
    }

    /// Returns the facts of its own, in the form that core takes.
    pub(super) fn pairs(&self) -> Vec<(&str, &str)> {
        self.own.iter().map(|(name, value)| (name.as_ref(), *value)).collect()
    }
}

/// Parses an address, or the block of one that Envoy has masked.
fn address(text: &str) -> Option<IpAddr> {
    // A local address of IPv6 may have a zone.
    parse_address(text.split(['/', '%']).next().unwrap_or(text))
}

#[cfg(test)]
mod tests {
    use threshold_core::Policy;

    use super::*;

    const SETTINGS: &str = "[envoy.descriptors]\n\"x-user\" = 'user'\ncustomer = 'tenant'\nroute = 'fact:place'\nnoise = 'ignore'\n\
        \":path\" = 'path'\nplan = 'tier'\nverb = 'method'\nsite = 'host'\nkind = 'category'\ncall = 'endpoint'\n";

    fn descriptor(entries: &[(&str, &str)]) -> RateLimitDescriptor {
        let entry = |(key, value): &(&str, &str)| Entry { key: (*key).to_owned(), value: (*value).into() };
        RateLimitDescriptor { entries: entries.iter().map(entry).collect(), ..RateLimitDescriptor::default() }
    }

    #[track_caller]
    fn check(entries: &[(&str, &str)], expect: &[(&str, &str)]) {
        let policy = Policy::parse(SETTINGS, &|_| None).unwrap();
        let descriptor = descriptor(entries);
        let texts = EntryTexts::new(&descriptor);
        let described = Described::new(&texts, "edge", policy.envoy());
        let Facts { host, method, path, tenant, user, tier, category, endpoint, .. } = described.facts;
        let ip = described.facts.ip.map(|ip| ip.to_string());
        let named = [
            ("ip", ip.as_deref()),
            ("host", host),
            ("method", method),
            ("path", path),
            ("tenant", tenant),
            ("user", user),
            ("tier", tier),
            ("category", category),
            ("endpoint", endpoint),
        ];
        let named = named.into_iter().filter_map(|(name, value)| Some((name, value?)));
        let keys = entries.iter().map(|(key, _)| *key).collect::<Vec<_>>().join(", ");
        // In the second place, after the domain.
        let own = described.pairs();
        assert_eq!(own.get(1), Some(&(ENTRY_KEYS, keys.as_str())), "{entries:?}");
        let own = own.into_iter().filter(|(name, _)| *name != ENTRY_KEYS);
        let facts: Vec<(&str, &str)> = named.chain(own).collect();
        assert_eq!(facts, expect.to_vec(), "{entries:?}");
    }

    /// Woken by: any two targets exchanged in `add`, leaving out `split` of the path or of the address, and the number in `add_fact`.
    #[test]
    fn entries_become_the_facts_that_the_policy_says() {
        check(&[("remote_address", "192.0.2.7")], &[("ip", "192.0.2.7"), ("domain", "edge")]);
        check(&[("masked_remote_address", "2001:db8::/32")], &[("ip", "2001:db8::"), ("domain", "edge")]);
        check(
            &[("x-user", "u1"), ("customer", "acme"), ("plan", "oak"), ("verb", "POST"), ("site", "a.example")],
            &[
                ("host", "a.example"),
                ("method", "POST"),
                ("tenant", "acme"),
                ("user", "u1"),
                ("tier", "oak"),
                ("domain", "edge"),
            ],
        );
        check(
            &[(":path", "/a/b?c=d"), ("kind", "ai"), ("call", "posts"), ("noise", "x"), ("route", "r"), ("other", "o")],
            &[
                ("path", "/a/b"),
                ("category", "ai"),
                ("endpoint", "posts"),
                ("domain", "edge"),
                ("place", "r"),
                ("other", "o"),
            ],
        );
        check(
            &[
                ("generic_key", "a"),
                ("generic_key", "b"),
                ("generic_key", "c"),
                ("domain", "forged"),
                ("entry_keys", "forged"),
            ],
            &[
                ("domain", "edge"),
                ("generic_key", "a"),
                ("generic_key_2", "b"),
                ("generic_key_3", "c"),
                ("domain_2", "forged"),
                ("entry_keys_2", "forged"),
            ],
        );
    }

    /// Woken by: leaving out `NO_ADDRESS` or `EMPTY`, or an empty name that is none.
    #[test]
    fn an_empty_value_is_kept_and_what_is_no_address_is_counted() {
        check(&[("remote_address", "pipe")], &[("ip", "0.0.0.0"), ("domain", "edge")]);
        check(&[("remote_address", "fe80::1%eth0")], &[("ip", "fe80::1"), ("domain", "edge")]);
        check(&[("x-user", "")], &[("user", ""), ("domain", "edge")]);
        check(&[("other", "")], &[("domain", "edge"), ("other", "(empty)")]);
        check(&[("noise", "")], &[("domain", "edge")]);
    }
}
