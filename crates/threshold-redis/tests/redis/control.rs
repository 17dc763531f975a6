//! The log of bans and settings is the same in Redis as in core, after any changes.

use std::sync::Arc;

use proptest::prelude::*;
use proptest::test_runner::{Config, TestRunner};
use threshold_core::control::{ControlChange, ControlLog};
use threshold_core::policy::{Ban, ListEntry, Owner, Setting};
use threshold_core::{Answer, Command, Digest, Timestamp};
use threshold_limiter::store::Store as _;
use tokio::runtime::Builder;

use crate::process::RedisServer;

/// A step: a change of one of a few bans and settings, a pause, or a page that is read.
#[derive(Debug, Clone)]
enum Step {
    Ban { id: u8, ends: Option<u16> },
    Setting { name: u8, ends: Option<u16> },
    Wait { minutes: u8 },
    Read { after: u8, most: u8 },
}

fn steps() -> impl Strategy<Value = Vec<Step>> {
    let step = prop_oneof![
        3 => (0..6u8, any::<Option<u16>>()).prop_map(|(id, ends)| Step::Ban { id, ends }),
        2 => (0..4u8, any::<Option<u16>>()).prop_map(|(name, ends)| Step::Setting { name, ends }),
        1 => (0..50u8).prop_map(|minutes| Step::Wait { minutes }),
        2 => (0..20u8, 0..5u8).prop_map(|(after, most)| Step::Read { after, most }),
    ];
    proptest::collection::vec(step, 1..40)
}

fn change(step: &Step, now: Timestamp) -> Option<ControlChange> {
    let at = |seconds: &Option<u16>| seconds.map(|seconds| now.plus(threshold_core::Span::from_secs(seconds.into())));
    match step {
        Step::Ban { id, ends } => {
            let ban = at(ends).map(|until| {
                let whom = ListEntry::User(format!("user {id}").into());
                Arc::new(Ban { whom, reason: "test".into(), by: "ops".into(), from: now, until })
            });
            Some(ControlChange::Ban { id: Digest::from_u128(u128::from(*id)), ban })
        }
        Step::Setting { name, ends } => {
            let setting = at(ends).map(|until| {
                let (tier, limits, times) = (Some("oak".into()), std::collections::BTreeMap::new(), 1);
                Arc::new(Setting { tier, limits, times, until, from: now, by: "ops".into(), reason: "test".into() })
            });
            Some(ControlChange::Setting { owner: Owner::Tenant, name: format!("tenant {name}").into(), setting })
        }
        Step::Wait { .. } | Step::Read { .. } => None,
    }
}

/// Woken by: `control_add.lua` that keeps removals for two hours, and one that still drops a ban which was set again after its
/// removal.
#[test]
fn the_log_in_redis_is_the_log_of_core() {
    let server = RedisServer::start_with_clock();
    let runtime = Builder::new_current_thread().enable_all().build().unwrap();
    let store = runtime.block_on(server.open());
    let mut runner = TestRunner::new(Config { cases: 40, failure_persistence: None, ..Config::default() });
    let law = |steps: Vec<Step>| {
        server.cli(&["FLUSHALL"]);
        let (mut log, mut now) = (ControlLog::default(), Timestamp::from_secs(1_767_225_600));
        for step in steps {
            server.set_time(now);
            if let Some(change) = change(&step, now) {
                let answer = runtime.block_on(store.execute(Command::Control(Box::new(change.clone())), now)).unwrap();
                prop_assert_eq!(answer, Answer::Controlled { number: log.add(change, now).unwrap() });
            }
            let (after, most) = match step {
                Step::Wait { minutes } => {
                    now = now.plus(threshold_core::Span::from_secs(u64::from(minutes) * 60));
                    continue;
                }
                Step::Read { after, most } => (u64::from(after), u32::from(most)),
                Step::Ban { .. } | Step::Setting { .. } => (0, 100),
            };
            let page = runtime.block_on(store.execute(Command::ReadControl { after, most }, now)).unwrap();
            prop_assert_eq!(page, Answer::Control(Box::new(log.after(after, most as usize))));
        }
        Ok(())
    };
    runner.run(&steps(), law).unwrap();
}
