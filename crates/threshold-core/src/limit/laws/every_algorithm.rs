//! Every algorithm is in the laws, and is whole: its name, bytes and notation are its own.

use std::collections::BTreeSet;
use std::time::Duration;

use proptest::strategy::{Strategy as _, ValueTree as _};
use proptest::test_runner::TestRunner;

use super::world::{World, shapes};
use crate::balance::Balance;
use crate::codec::Format;
use crate::limit::algorithm::{AlgorithmState, LimitAlgorithm};
use crate::limit::{Algorithm, Limit, LimitOptions, State};
use crate::policy::Policy;
use crate::time::Timestamp;

const START: Timestamp = Timestamp::from_secs(1_767_225_600);

fn all() -> BTreeSet<Algorithm> {
    Algorithm::ALL.into_iter().collect()
}

/// The laws say nothing of an algorithm that their generator leaves out.
///
/// Woken by: `Algorithm::ALL[1..]` in `shapes`.
#[test]
fn the_laws_run_over_every_algorithm() {
    let mut runner = TestRunner::deterministic();
    let seen = (0..500).map(|_| shapes().new_tree(&mut runner).unwrap().current().limit().algorithm().unwrap());
    assert_eq!(seen.collect::<BTreeSet<_>>(), all());
}

/// An algorithm is found by its name, alone and in a policy, and makes a limit that decides, is written and read back.
///
/// Woken by: `NAME = "sliding-window"` for a sliding log; `out.byte(5)` for 4 in `SlidingLog::write`.
#[test]
fn every_algorithm_works_from_its_name_to_its_bytes() {
    let mut names = BTreeSet::new();
    for algorithm in Algorithm::ALL {
        assert!(names.insert(algorithm.name()), "{algorithm} is a name twice");
        assert_eq!(Algorithm::named(algorithm.name()), Some(algorithm));
        let limit = LimitOptions::new().algorithm(algorithm).limit(3, Duration::from_secs(60)).unwrap();
        assert_eq!(limit.algorithm(), Some(algorithm));
        assert_eq!(Limit::from_bytes(&limit.to_bytes(Format::PRESENT)), Ok(limit));
        let text = limit.to_string();
        assert_eq!(LimitOptions::new().algorithm(algorithm).parse(&text), Ok(limit), "{text}");
        let policy =
            format!("[[rule]]\nname = \"r\"\nper = [\"ip\"]\nlimit = \"{text}\"\nalgorithm = \"{algorithm}\"\n");
        let policy = Policy::parse(&policy, &|_| None).unwrap();
        assert_eq!(policy.rules()[0].fixed_limit(), Some(&limit));
        let mut world = World::new(limit, START);
        assert_eq!([true, true, true, false].map(|_| world.check(1).allowed), [true, true, true, false]);
        assert_eq!(Balance::from_bytes(&world.balance.to_bytes(Format::PRESENT)), Ok(world.balance));
    }
}

/// Stored bytes name one type: no two state types share a tag, none has that of an empty state, and algorithms that share the
/// tag of their figures read only their own.
///
/// Woken by: `TAGS = &[3]` for `TwoWindows`.
#[test]
fn no_two_states_share_a_tag() {
    let mut tags = vec![0];
    let _: Option<State> = first_state!(S => {
        tags.extend_from_slice(<S as AlgorithmState>::TAGS);
        None
    });
    let distinct: BTreeSet<u8> = tags.iter().copied().collect();
    assert_eq!(distinct.len(), tags.len(), "{tags:?}");
    for algorithm in Algorithm::ALL {
        let tags = each_algorithm!(algorithm, A => <A as LimitAlgorithm>::TAGS);
        assert!(!tags.is_empty() && !tags.contains(&0), "{algorithm}: {tags:?}");
    }
}
