//! Writes the banned addresses as sets of a Linux firewall: for `ipset restore` and for `nft -f`.

use std::fmt::Write as _;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use clap::ValueEnum;
use serde_json::Value;

/// The longest timeout of an entry in ipset, in seconds: its milliseconds have 32 bits.
const IPSET_MAX_TIMEOUT: u64 = 2_147_483;
/// The size of an ipset, the same for every list: a set is not created again with another one. There are at most 500,000 bans.
const IPSET_ENTRIES: usize = 1 << 20;
/// The number of elements on one line of nftables' file, so that no line is longer than its parser reads at once.
const ELEMENTS: usize = 1_000;

/// The form of an export.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum ExportForm {
    /// One address or CIDR on each line
    Plain,
    /// For ipset restore: the sets threshold4 and threshold6
    Ipset,
    /// For nft -f: the sets bans4 and bans6 of the table inet threshold
    Nftables,
}

/// A block of addresses, by its bits, which are at the top of the number for both families.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
struct Block {
    /// The address, aligned to the left.
    bits: u128,
    prefix: u32,
}

/// The banned blocks of one family, with the seconds that each ban still lasts; `None` for good.
#[derive(Debug, Default)]
struct Family {
    blocks: Vec<(Block, Option<u64>)>,
}

/// Writes the banned addresses. Returns the text, and the number of bans on users and tenants, which no firewall knows.
pub(super) fn write(bans: &[Value], form: ExportForm, now: u64) -> (String, usize) {
    let (mut v4, mut v6, mut others) = (Family::default(), Family::default(), 0usize);
    for ban in bans {
        let text = |name: &str| ban.get(name).and_then(Value::as_str).unwrap_or_default();
        let left = ban.get("until").and_then(Value::as_u64).map(|until| until.saturating_sub(now));
        match block(text("key")).filter(|_| text("layer") == "edge") {
            // A timeout of 0 means for good to ipset, so a ban that ends now must not be written.
            _ if left == Some(0) => {}
            Some((block, true)) => v4.blocks.push((block, left)),
            Some((block, false)) => v6.blocks.push((block, left)),
            None => others = others.saturating_add(1),
        }
    }
    let (v4, v6) = (v4.disjoint(), v6.disjoint());
    let text = match form {
        ExportForm::Plain => {
            let lines = v4.iter().map(|(block, _)| show_v4(*block)).chain(v6.iter().map(|(block, _)| show_v6(*block)));
            lines.map(|line| format!("{line}\n")).collect()
        }
        ExportForm::Ipset => ipset("threshold4", "inet", &v4, show_v4) + &ipset("threshold6", "inet6", &v6, show_v6),
        ExportForm::Nftables => nftables(&v4, &v6),
    };
    (text, others)
}

/// Reads an address or CIDR. Returns whether it is of IPv4.
fn block(key: &str) -> Option<(Block, bool)> {
    let network: threshold_core::address::Network = key.parse().ok()?;
    let prefix = u32::from(network.prefix_len());
    match network.addr() {
        // Aligned to the left, so that a prefix selects the same bits in both families.
        IpAddr::V4(ip) => Some((Block { bits: u128::from(ip.to_bits()).checked_shl(96)?, prefix }, true)),
        IpAddr::V6(ip) => Some((Block { bits: ip.to_bits(), prefix }, false)),
    }
}

impl Block {
    fn contains(self, other: Self) -> bool {
        // A prefix of 0 shifts by all bits, which `checked_shl` refuses. Its mask is 0.
        let mask = u128::MAX.checked_shl(u128::BITS.saturating_sub(self.prefix)).unwrap_or(0);
        self.prefix <= other.prefix && other.bits & mask == self.bits & mask
    }

    /// Returns the two halves.
    fn halves(self) -> [Self; 2] {
        let prefix = self.prefix.saturating_add(1);
        let bit = 1u128.checked_shl(u128::BITS.saturating_sub(prefix)).unwrap_or(0);
        [Self { bits: self.bits, prefix }, Self { bits: self.bits | bit, prefix }]
    }
}

impl Family {
    /// Returns blocks that do not overlap and cover the same addresses, each for as long as the ban on it that ends last. Sets
    /// of intervals accept no others.
    fn disjoint(mut self) -> Vec<(Block, Option<u64>)> {
        // Wider blocks come before those inside of them.
        self.blocks.sort_by_key(|(block, _)| (block.bits, block.prefix));
        let mut out = Vec::new();
        let mut rest = self.blocks.as_slice();
        while let Some(((outer, _), _)) = rest.split_first() {
            // Blocks either nest or are apart, so after sorting all blocks inside of this one follow it without a
            // gap.
            let inside = rest.iter().take_while(|(block, _)| outer.contains(*block)).count();
            let (group, later) = rest.split_at(inside);
            split(*outer, group, None, &mut out);
            rest = later;
        }
        out
    }
}

/// Whether a ban lasts at least as long as another.
fn outlasts(one: Option<u64>, other: Option<u64>) -> bool {
    one.is_none_or(|one| other.is_some_and(|other| one >= other))
}

/// Adds the parts of `block` that the bans of `group` cover. `around` is the ban of a wider block, if there is one.
fn split(
    block: Block,
    group: &[(Block, Option<u64>)],
    around: Option<Option<u64>>,
    out: &mut Vec<(Block, Option<u64>)>,
) {
    let own = group.iter().filter(|(other, _)| *other == block).map(|(_, left)| *left);
    let longest = own.chain(around).reduce(|one, other| if outlasts(one, other) { one } else { other });
    // Bans inside that end no later than the one around them say nothing more.
    let inside: Vec<(Block, Option<u64>)> = group
        .iter()
        .filter(|(other, left)| *other != block && longest.is_none_or(|longest| !outlasts(longest, *left)))
        .copied()
        .collect();
    if inside.is_empty() {
        out.extend(longest.map(|left| (block, left)));
        return;
    }
    // Halved only where a ban inside lasts longer. The parts around it keep the shorter ban.
    for half in block.halves() {
        let own: Vec<(Block, Option<u64>)> =
            inside.iter().filter(|(other, _)| half.contains(*other)).copied().collect();
        split(half, &own, longest, out);
    }
}

fn show_v4(block: Block) -> String {
    let bits = u32::try_from(block.bits.checked_shr(96).unwrap_or(0)).unwrap_or(0);
    let ip = Ipv4Addr::from_bits(bits);
    if block.prefix == 32 { ip.to_string() } else { format!("{ip}/{}", block.prefix) }
}

fn show_v6(block: Block) -> String {
    let ip = Ipv6Addr::from_bits(block.bits);
    if block.prefix == 128 { ip.to_string() } else { format!("{ip}/{}", block.prefix) }
}

/// Writes a set for `ipset restore`. It is filled under another name and then swapped in, so that no address is let through
/// meanwhile.
fn ipset(name: &str, family: &str, blocks: &[(Block, Option<u64>)], show: fn(Block) -> String) -> String {
    // `timeout 0` makes entries permanent by default, and allows a timeout for each.
    let options = format!("hash:net family {family} maxelem {IPSET_ENTRIES} timeout 0");
    let mut text = format!("create {name} {options} -exist\ncreate {name}-new {options} -exist\nflush {name}-new\n");
    for (block, left) in blocks {
        // A longer ban is cut to what ipset can store, and renewed by the next export.
        let timeout = left.map(|left| format!(" timeout {}", left.min(IPSET_MAX_TIMEOUT))).unwrap_or_default();
        let _ = writeln!(text, "add {name}-new {}{timeout}", show(*block));
    }
    let _ = writeln!(text, "swap {name} {name}-new\ndestroy {name}-new");
    text
}

/// Writes the sets for `nft -f`, which makes all changes of a file at once.
fn nftables(v4: &[(Block, Option<u64>)], v6: &[(Block, Option<u64>)]) -> String {
    let set = |name: &str, kind: &str| {
        format!("    set {name} {{\n        type {kind}\n        flags interval, timeout\n    }}\n")
    };
    let mut text = format!("table inet threshold {{\n{}{}}}\n", set("bans4", "ipv4_addr"), set("bans6", "ipv6_addr"));
    // After the table: the first run must create the sets that are flushed.
    text.push_str("flush set inet threshold bans4\nflush set inet threshold bans6\n");
    let mut add = |name: &str, blocks: &[(Block, Option<u64>)], show: fn(Block) -> String| {
        for chunk in blocks.chunks(ELEMENTS) {
            let timeout =
                |left: Option<u64>| left.map(|left| format!(" timeout {}", nft_time(left))).unwrap_or_default();
            let elements = chunk.iter().map(|(block, left)| format!("{}{}", show(*block), timeout(*left)));
            let elements = elements.collect::<Vec<_>>().join(", ");
            let _ = writeln!(text, "add element inet threshold {name} {{ {elements} }}");
        }
    };
    add("bans4", v4, show_v4);
    add("bans6", v6, show_v6);
    text
}

/// Writes seconds as nftables reads them: it refuses a number of more than eight digits.
fn nft_time(seconds: u64) -> String {
    let part =
        |size: u64, below: u64| seconds.checked_div(size).and_then(|count| count.checked_rem(below)).unwrap_or(0);
    format!("{}d{}h{}m{}s", part(86_400, u64::MAX), part(3_600, 24), part(60, 60), part(1, 60))
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use serde_json::json;
    use threshold_core::address::Network;

    fn ban(key: &str, until: Option<u64>) -> Value {
        json!({"layer": "edge", "key": key, "until": until})
    }

    #[test]
    fn blocks_inside_of_others_are_left_out_or_cut_out() {
        let check = |bans: &[(&str, Option<u64>)], expected: &str| {
            let bans: Vec<Value> = bans.iter().map(|(key, until)| ban(key, *until)).collect();
            let (text, _) = write(&bans, ExportForm::Ipset, 100);
            let added = text.lines().filter_map(|line| line.strip_prefix("add ")?.split_once(' '));
            let added: Vec<String> = added.map(|(_, entry)| entry.replace(" timeout ", "=")).collect();
            assert_eq!(added.join(" "), expected);
        };
        check(&[("203.0.113.7", None), ("203.0.113.0/24", None)], "203.0.113.0/24");
        check(&[("203.0.113.0/24", Some(160)), ("203.0.113.0/24", Some(150))], "203.0.113.0/24=60");
        check(&[("203.0.113.0/24", Some(160)), ("203.0.113.7", Some(150))], "203.0.113.0/24=60");
        check(&[("203.0.113.0/30", Some(160)), ("203.0.113.1", None)], "203.0.113.0=60 203.0.113.1 203.0.113.2/31=60");
        check(&[("203.0.113.7", Some(100)), ("203.0.113.8", Some(u64::MAX))], "203.0.113.8=2147483");
        check(&[("2001:db8::/32", None), ("2001:db8::1/128", None)], "2001:db8::/32");
    }

    proptest! {
        /// Fails if `split` drops a part of a block, or keeps the shorter of two bans.
        #[test]
        fn every_address_is_exported_once_and_for_as_long_as_it_is_banned(
            bans in prop::collection::vec((0u32..64, 26u8..=32, prop::option::of(1u64..10)), 0..12),
        ) {
            let ip = |bits: u32| IpAddr::V4(Ipv4Addr::from_bits(0x0b00_0000 | bits));
            let bans: Vec<(Network, Option<u64>)> =
                bans.into_iter().map(|(bits, prefix, left)| (Network::new(ip(bits), prefix).unwrap(), left)).collect();
            let all: Vec<Value> = bans.iter().map(|(net, left)| ban(&net.to_string(), *left)).collect();
            let (text, _) = write(&all, ExportForm::Ipset, 0);
            let added = text.lines().filter_map(|line| line.strip_prefix("add threshold4-new "));
            let added: Vec<(Network, Option<u64>)> = added.map(|line| {
                let mut words = line.split(' ');
                (words.next().unwrap().parse().unwrap(), words.nth(1).map(|left| left.parse().unwrap()))
            }).collect();
            for bits in 0..64 {
                let on = |all: &[(Network, Option<u64>)]| -> Vec<Option<u64>> {
                    all.iter().filter(|(net, _)| net.contains(ip(bits))).map(|(_, left)| *left).collect()
                };
                let longest = on(&bans).into_iter().reduce(|one, other| if outlasts(one, other) { one } else { other });
                prop_assert_eq!(on(&added), longest.into_iter().collect::<Vec<_>>());
            }
        }
    }
}
