//! A node that reads the log of bans and settings in order holds the current set, however often it reads and in whatever pages.

use std::collections::BTreeMap;
use std::sync::Arc;

use proptest::prelude::*;
use threshold_core::command::{Answer, Command};
use threshold_core::control::{ControlChange, ControlKey, ControlLog, ControlPage, MAX_CHANGES_READ};
use threshold_core::policy::{Ban, ListEntry, Owner, Setting};
use threshold_core::{Digest, Format, Ledger, Span, Timestamp};

const START: Timestamp = Timestamp::from_secs(1_767_225_600);

/// A node: the bans and settings that it holds, and the last number that it has read.
#[derive(Default)]
struct Node {
    held: BTreeMap<ControlKey, ControlChange>,
    position: u64,
}

impl Node {
    fn follow(&mut self, most: u32, mut read: impl FnMut(u64, u32) -> ControlPage) {
        if read(self.position, most).misses(self.position) {
            *self = Self::default();
        }
        loop {
            let page = read(self.position, most);
            for (_, change) in &page.changes {
                if change.until().is_some() {
                    self.held.insert(change.key(), change.clone());
                } else {
                    self.held.remove(&change.key());
                }
            }
            self.position = page.end();
            if page.is_last() {
                return;
            }
        }
    }
}

fn change(key: u8, value: Option<u8>) -> ControlChange {
    let until = Timestamp::MAX;
    if key.is_multiple_of(2) {
        let whom = ListEntry::User(format!("u{key}").into());
        let ban = value.map(|value| {
            let reason = value.to_string().into();
            Arc::new(Ban { whom, reason, by: "ops".into(), from: START, until })
        });
        return ControlChange::Ban { id: Digest::from_u128(u128::from(key)), ban };
    }
    let owner = if key.is_multiple_of(3) { Owner::User } else { Owner::Tenant };
    let setting = value.map(|value| {
        let (times, limits) = (u32::from(value), BTreeMap::new());
        let (by, reason) = ("ops".into(), "".into());
        Arc::new(Setting { tier: None, limits, times, until, from: START, by, reason })
    });
    ControlChange::Setting { owner, name: format!("n{key}").into(), setting }
}

proptest! {
    /// Fails if a replaced change keeps its number, if a removal is dropped and the page does not tell so, or if a page ends too
    /// early.
    #[test]
    fn a_node_that_reads_in_order_holds_the_current_set(
        steps in prop::collection::vec((0u8..12, any::<Option<u8>>(), 0u64..2_000, prop::option::of((0usize..3, 1u32..5))), 0..80),
    ) {
        let (mut ledger, mut model, mut now) = (Ledger::default(), BTreeMap::new(), START);
        let mut log = ControlLog::default();
        let mut nodes: [Node; 3] = Default::default();
        let read = |ledger: &mut Ledger, after, most, now| {
            match ledger.execute(&Command::ReadControl { after, most }, now) {
                Answer::Control(page) => *page,
                other => panic!("{other:?}"),
            }
        };
        for (number, (key, value, seconds, follower)) in steps.into_iter().enumerate() {
            now = now.plus(Span::from_secs(seconds));
            let change = change(key, value);
            if value.is_some() {
                model.insert(change.key(), change.clone());
            } else {
                model.remove(&change.key());
            }
            // The log goes through bytes each time, as in a store that keeps it as one record.
            log = ControlLog::from_bytes(&log.to_bytes(Format::PRESENT)).unwrap();
            prop_assert_eq!(log.add(change.clone(), now), Ok(number as u64 + 1));
            let answer = ledger.execute(&Command::Control(Box::new(change)), now);
            prop_assert_eq!(answer, Answer::Controlled { number: number as u64 + 1 });
            if let Some((node, most)) = follower {
                nodes[node].follow(most, |after, most| read(&mut ledger, after, most, now));
                prop_assert_eq!(&nodes[node].held, &model);
            }
        }
        for mut node in nodes {
            node.follow(3, |after, most| log.after(after, most as usize));
            prop_assert_eq!(&node.held, &model);
        }
        prop_assert_eq!(log.set().count(), model.len());
    }
}

/// A store is asked for more than a page holds. Fails if `execute` does not bound `most`.
#[test]
fn one_page_has_at_most_500_changes() {
    let mut ledger = Ledger::default();
    for number in 0..=MAX_CHANGES_READ as u128 {
        let change = ControlChange::Ban { id: Digest::from_u128(number), ban: None };
        ledger.execute(&Command::Control(Box::new(change)), START);
    }
    let Answer::Control(page) = ledger.execute(&Command::ReadControl { after: 0, most: u32::MAX }, START) else {
        panic!("another answer");
    };
    assert_eq!((page.changes.len(), page.is_last()), (500, false));
    let Answer::Control(rest) = ledger.execute(&Command::ReadControl { after: page.end(), most: u32::MAX }, START)
    else {
        panic!("another answer");
    };
    assert_eq!((rest.changes.len(), rest.is_last()), (1, true));
}
