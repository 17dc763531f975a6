//! A descriptor → the facts of a request.

use std::borrow::Cow;
use std::net::IpAddr;

use threshold_core::Facts;
use threshold_core::address::parse_address;
use threshold_core::policy::{DescriptorTarget, EnvoySettings};

use crate::door::grpc::proto::{Entry, RateLimitDescriptor};

/// The name of the fact that has the domain.
const DOMAIN: &str = "domain";

/// The request that a descriptor describes.
pub(super) struct Described<'r> {
    /// Its facts, but for those in `own`.
    pub(super) facts: Facts<'r>,
    own: Vec<(Cow<'r, str>, &'r str)>,
    /// Whether every entry has a value that can be counted. If so, a rule that needs what the descriptor does not tell is not about
    /// it: Envoy leaves out descriptors that it cannot complete. If not, a client may have caused it, and must not avoid a rule by it.
    pub(super) is_complete: bool,
}

impl<'r> Described<'r> {
    pub(super) fn new(descriptor: &'r RateLimitDescriptor, domain: &'r str, settings: &EnvoySettings) -> Self {
        let mut described = Self { facts: Facts::default(), own: Vec::new(), is_complete: true };
        described.own.reserve(descriptor.entries.len().saturating_add(1));
        // The domain comes first: no entry may stand in for it.
        described.own.push((Cow::Borrowed(DOMAIN), domain));
        for entry in &descriptor.entries {
            described.add(entry, settings);
        }
        described
    }

    fn add(&mut self, Entry { key, value }: &'r Entry, settings: &EnvoySettings) {
        let facts = &mut self.facts;
        let mut named = Some(value.as_str()).filter(|value| !value.is_empty());
        let place = match settings.target(key) {
            None => return self.add_fact(Cow::Borrowed(key), value),
            Some(DescriptorTarget::Fact(name)) => return self.add_fact(Cow::Owned(name.to_string()), value),
            Some(DescriptorTarget::Ignore) => return,
            Some(DescriptorTarget::Ip) => {
                let ip = address(value);
                self.is_complete &= ip.is_some();
                facts.ip = facts.ip.or(ip);
                return;
            }
            Some(DescriptorTarget::Path) => {
                // `:path` has the query too, which is no part of a path.
                named = named.and_then(|path| path.split(['?', '#']).next());
                &mut facts.path
            }
            Some(DescriptorTarget::Tenant) => &mut facts.tenant,
            Some(DescriptorTarget::User) => &mut facts.user,
            Some(DescriptorTarget::Tier) => &mut facts.tier,
            Some(DescriptorTarget::Method) => &mut facts.method,
            Some(DescriptorTarget::Host) => &mut facts.host,
            Some(DescriptorTarget::Endpoint) => &mut facts.endpoint,
            Some(DescriptorTarget::Category) => &mut facts.category,
            // A target that is added to core is a fact until it is handled here.
            Some(_) => return self.add_fact(Cow::Borrowed(key), value),
        };
        self.is_complete &= named.is_some();
        *place = place.or(named);
    }

    /// Adds a fact. The second of a name is counted on, as `generic_key_2`, because Envoy repeats keys.
    fn add_fact(&mut self, name: Cow<'r, str>, value: &'r str) {
        self.is_complete &= !value.is_empty();
        let has = |name: &str| self.own.iter().any(|(own, _)| own == name);
        let name = if has(&name) {
            // At most as many as there are entries.
            let numbered = (2_usize..).map(|number| format!("{name}_{number}"));
            numbered.take(self.own.len().saturating_add(1)).find(|name| !has(name)).map_or(name, Cow::Owned)
        } else {
            name
        };
        self.own.push((name, value));
    }

    /// Returns the facts of its own, in the form that core takes.
    pub(super) fn pairs(&self) -> Vec<(&str, &str)> {
        self.own.iter().map(|(name, value)| (name.as_ref(), *value)).collect()
    }
}

/// Parses an address, or the block of one that Envoy has masked.
fn address(text: &str) -> Option<IpAddr> {
    parse_address(text.split_once('/').map_or(text, |(address, _)| address))
}

#[cfg(test)]
mod tests {
    use threshold_core::Policy;

    use super::*;

    const SETTINGS: &str = "[envoy.descriptors]\n\"x-user\" = 'user'\ncustomer = 'tenant'\nroute = 'fact:place'\nnoise = 'ignore'\n\
        \":path\" = 'path'\nplan = 'tier'\nverb = 'method'\nsite = 'host'\nkind = 'category'\ncall = 'endpoint'\n";

    fn descriptor(entries: &[(&str, &str)]) -> RateLimitDescriptor {
        let entry = |(key, value): &(&str, &str)| Entry { key: (*key).to_owned(), value: (*value).to_owned() };
        RateLimitDescriptor { entries: entries.iter().map(entry).collect(), ..RateLimitDescriptor::default() }
    }

    #[track_caller]
    fn check(entries: &[(&str, &str)], complete: bool, expect: &[(&str, &str)]) {
        let policy = Policy::parse(SETTINGS, &|_| None).unwrap();
        let descriptor = descriptor(entries);
        let described = Described::new(&descriptor, "edge", policy.envoy());
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
        let facts: Vec<(&str, &str)> = named.chain(described.pairs()).collect();
        assert_eq!((facts, described.is_complete), (expect.to_vec(), complete), "{entries:?}");
    }

    /// Woken by: any two targets exchanged in `add`, leaving out `split` of the path or of the address, and the number in `add_fact`.
    #[test]
    fn entries_become_the_facts_that_the_policy_says() {
        check(&[("remote_address", "192.0.2.7")], true, &[("ip", "192.0.2.7"), ("domain", "edge")]);
        check(&[("masked_remote_address", "2001:db8::/32")], true, &[("ip", "2001:db8::"), ("domain", "edge")]);
        check(
            &[("x-user", "u1"), ("customer", "acme"), ("plan", "oak"), ("verb", "POST"), ("site", "a.example")],
            true,
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
            true,
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
            &[("generic_key", "a"), ("generic_key", "b"), ("generic_key", "c"), ("domain", "forged")],
            true,
            &[
                ("domain", "edge"),
                ("generic_key", "a"),
                ("generic_key_2", "b"),
                ("generic_key_3", "c"),
                ("domain_2", "forged"),
            ],
        );
    }

    /// Woken by: leaving out `is_complete` in any of the three places.
    #[test]
    fn an_entry_without_a_value_that_can_be_counted_leaves_the_descriptor_incomplete() {
        check(&[("remote_address", "pipe")], false, &[("domain", "edge")]);
        check(&[("x-user", "")], false, &[("domain", "edge")]);
        check(&[("other", "")], false, &[("domain", "edge"), ("other", "")]);
        check(&[("noise", "")], true, &[("domain", "edge")]);
    }
}
