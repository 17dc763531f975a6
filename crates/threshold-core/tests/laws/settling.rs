//! All or nothing, the truth about waiting, what binds, and who is only watched.

use std::path::Path;
use std::sync::LazyLock;

use proptest::collection::vec;
use proptest::prelude::*;
use proptest::sample::{Index, select};
use threshold_core::bill::Charge;
use threshold_core::headers::{BodyForm, denial_body, header_fields};
use threshold_core::plan::Verb;
use threshold_core::policy::Layer;
use threshold_core::{Decision, Facts, Ledger, Limit, Policy, Reading, Span, Timestamp, TraceId, Verdict};

use crate::world::{
    ALICE, RuleShape, Shelf, World, noticed, parsed, place, rules, start, text_of, trace, with_a_ladder,
};

/// Where a rule stands: its layer, then its place in the file. Rules are named by that place.
fn rank(policy: &Policy, reading: &Reading) -> (Layer, usize) {
    let rule = &policy.rules()[reading.rule()];
    (rule.layer, place(&rule.name))
}

/// The reading whose figures must be shown, by trying them all.
fn must_bind(decision: &Decision, policy: &Policy) -> Option<usize> {
    let enforced = decision.readings.iter().enumerate().filter(|(_, reading)| reading.enforced);
    let wait = |reading: &Reading| reading.ready_at().unwrap_or(Timestamp::MAX);
    let further = |reading: &Reading| {
        (0..=reading.remaining).take_while(|n| (n + 1) * reading.cost.max(1) <= reading.remaining).count()
    };
    let mut ranked: Vec<_> = if decision.allowed() {
        enforced.map(|(index, reading)| ((further(reading) as u64, rank(policy, reading)), index)).collect()
    } else {
        let denying = enforced.filter(|(_, reading)| !reading.allowed);
        denying.map(|(index, reading)| ((u64::MAX - wait(reading).micros(), rank(policy, reading)), index)).collect()
    };
    ranked.sort_unstable();
    ranked.first().map(|(_, index)| *index)
}

proptest! {
    #![proptest_config(crate::cases(192))]

    /// A check that is denied changes no balance of anyone, except that a limit with `block_for` then has no room; one
    /// that is allowed takes its cost once from every limit it meets that has room, which is every enforced one unless
    /// a rung has lifted it, and from nobody else's. A denial says that nothing must be saved, unless it blocks or
    /// strikes.
    ///
    /// Woken by: calling `self.charge()` after `self.deny()` in `Step::check`; and replacing `settled.look.allowed` with
    /// `charge.enforced()` in `Step::charge`.
    #[test]
    fn all_or_nothing(
        rules in rules(),
        strike in prop::option::of(select(&["window", "request", "ignored"][..])),
        start in start(),
        trace in trace(),
    ) {
        let text = strike.map_or_else(|| text_of(&rules), |strike| with_a_ladder(rules.clone(), strike));
        let mut world = World::new(&text, start);
        let blocks = rules.iter().any(|rule| rule.block_for.is_some());
        for ask in trace {
            world.wait(ask.gap);
            let mut expect = world.all_room();
            let facts = world.facts(ask.who, ask.cost);
            let Ok(plan) = world.policy.plan(&facts) else {
                prop_assert!(world.settle(&facts).is_err());
                prop_assert_eq!(world.all_room(), expect);
                continue;
            };
            let keys: Vec<_> = plan.charges().iter().map(Charge::key).collect();
            let may_block: Vec<_> = plan.met().iter().map(|met| met.rule().block_for.is_some()).collect();
            drop(plan);
            let (outcome, decision) = world.settle(&facts).unwrap();
            for (index, reading) in decision.readings.iter().enumerate() {
                let due = decision.allowed() && reading.allowed && ask.cost > 0;
                prop_assert_eq!(reading.charged, due);
                if due {
                    *expect.get_mut(&keys[index]).unwrap() -= ask.cost;
                } else if !decision.allowed() && reading.enforced && !reading.allowed && may_block[index] {
                    expect.insert(keys[index], 0);
                }
                // All rules with a ladder count by user and name the same one, so that one rung lifts all of them.
                let rule = &world.policy.rules()[reading.rule()];
                let has_ladder = rule.layer == Layer::User && !rule.fixed_limit().is_some_and(Limit::is_concurrency);
                let lifted = has_ladder && decision.escalations.iter().any(|strike| strike.rung.allows());
                prop_assert!(!decision.allowed() || !reading.enforced || reading.allowed || lifted);
            }
            let mut after = world.all_room();
            if !decision.allowed() && blocks {
                // A rung may have lifted the limit that would have blocked.
                for (key, room) in &mut after {
                    prop_assert!(*room == expect[key] || expect[key] == 0, "{:?}", decision);
                    *room = expect[key];
                }
            }
            prop_assert_eq!(after, expect);
            prop_assert!(decision.allowed() || blocks || strike.is_some() || !outcome.changed());
        }
    }

    /// Whoever is denied and stays alone is denied until a microsecond before `ready_at`, and admitted at it, and so
    /// also after the whole seconds of `retryAfter`; however many limits and blocks are in the way.
    ///
    /// Woken by: replacing `>` with `<` in `longest_wait`.
    #[test]
    fn a_wait_is_the_truth(rules in rules(), start in start(), trace in trace()) {
        let mut world = World::new(&text_of(&rules), start);
        for ask in trace {
            world.wait(ask.gap);
            let facts = world.facts(ask.who, ask.cost);
            let Ok((_, decision)) = world.settle(&facts) else { continue };
            if decision.allowed() {
                prop_assert_eq!(decision.retry_after(), None);
                continue;
            }
            let ready = decision.ready_at.expect("every limit here lets everything through in time");
            prop_assert!(ready > world.now);
            prop_assert!(!world.peek_at(&facts, ready.minus(Span::from_micros(1))).allowed());
            prop_assert!(world.peek_at(&facts, ready).allowed());
            let seconds = Span::from_secs(Span::from(decision.retry_after().unwrap()).secs_ceil());
            prop_assert!(world.peek_at(&facts, world.now.plus(seconds)).allowed());
            prop_assert_eq!(decision.reset_at(), Some(world.now.plus(seconds).secs_ceil()));
        }
    }

    /// `remaining` never exceeds `limit`. At `more_at` more is left than was told, and until then not: what the draft calls
    /// the effective window. Where a rate has no whole microseconds, it may be a microsecond off; and where
    /// nothing is left, a denial says when its own cost fits.
    ///
    /// Woken by: replacing `last.saturating_sub(self.remaining)` with `last` in `Reading::more_at`; `resets` with
    /// `at.plus(self.period)`; and `shown_quota` with `quota` in `Plan::prepare`.
    #[test]
    fn more_is_left_when_an_answer_says_so(rules in rules(), start in start(), trace in trace()) {
        let mut world = World::new(&text_of(&rules), start);
        for ask in trace {
            world.wait(ask.gap);
            let facts = world.facts(ask.who, ask.cost);
            let Ok((_, decision)) = world.settle(&facts) else { continue };
            let look = Facts { cost: Some(0), ..facts };
            for (index, reading) in decision.readings.iter().enumerate() {
                prop_assert!(reading.remaining <= reading.limit);
                let rule = &rules[place(&world.policy.rules()[reading.rule()].name)];
                // Denied though it asks for nothing: blocked, which hides how much there is.
                let hidden = !reading.allowed && reading.cost == 0;
                if rule.algorithm.is_concurrency() || !reading.enforced || hidden {
                    continue;
                }
                let more = reading.more_at(world.now).expect("every limit here has more in time");
                prop_assert!(more > world.now);
                prop_assert!(reading.ready_at().is_none_or(|ready| more <= ready));
                let left = |world: &mut World, at: Timestamp| world.peek_at(&look, at).readings[index].remaining;
                if reading.remaining < rule.capacity() {
                    prop_assert!(left(&mut world, more.plus(Span::from_micros(1))) > reading.remaining, "{reading:?}");
                }
                if reading.allowed || reading.remaining > 0 || reading.cost <= 1 {
                    let just_before = more.minus(Span::from_micros(2));
                    prop_assert!(just_before < world.now || left(&mut world, just_before) <= reading.remaining, "{reading:?}");
                }
            }
        }
    }

    /// Without punishment a request is denied or charged as its limits and the penalties in force say: it is struck and
    /// lifted by nothing, and where it is denied, no standing and no balance changes. What denied it is of
    /// what it contests; somebody who is allowed was denied by nothing.
    ///
    /// Woken by: leaving out `&& self.plan.punishes` in `Step::check`; the same in `Step::deny`; and leaving out
    /// `penalised.is_none() &&` in `Plan::denied_by`.
    #[test]
    fn without_punishment_nobody_is_struck_blocked_or_lifted(
        rules in rules(),
        strike in select(&["window", "request", "ignored"][..]),
        start in start(),
        trace in trace(),
        spared in vec(any::<bool>(), 40),
    ) {
        let policy = parsed(&with_a_ladder(rules, strike));
        let (mut shelf, mut now) = (Shelf::default(), start);
        for (index, (ask, spared)) in trace.into_iter().zip(spared).enumerate() {
            now = now.plus(ask.gap);
            let trace = TraceId::from_u128(index as u128 + 1);
            let facts = Facts { cost: Some(ask.cost), trace, ..ask.who.facts() };
            let Ok(plan) = policy.plan(&facts) else { continue };
            let before = shelf.clone();
            if !spared {
                let _ = shelf.settle(&plan, now);
                continue;
            }
            let plan = plan.without_punishment();
            let outcome = shelf.settle(&plan, now);
            let decision = plan.decide(&outcome);
            let full = decision.readings.iter().filter(|reading| reading.enforced && !reading.allowed).count();
            prop_assert_eq!(decision.allowed(), full == 0 && decision.penalty.is_none());
            prop_assert!(decision.escalations.is_empty());
            prop_assert!(!decision.warning || decision.verdict == Verdict::Deny, "of earlier strikes, on a denial alone");
            let standing = |shelf: &Shelf| plan.subjects().iter().map(|own| shelf.standing(own.key())).collect::<Vec<_>>();
            prop_assert_eq!(standing(&shelf), standing(&before));
            let denied_by: Vec<_> = plan.denied_by(&outcome).collect();
            prop_assert!(denied_by.iter().all(|(key, _)| plan.contested().any(|own| own == *key)));
            if decision.penalty.is_some() {
                prop_assert_eq!(denied_by.len(), 1, "the penalty alone is waited for");
            } else if ask.cost > 0 {
                prop_assert_eq!(denied_by.len(), full);
                prop_assert_eq!(denied_by.iter().map(|(_, ready)| *ready).max(), decision.ready_at);
            }
            if !decision.allowed() {
                let again = plan.decide(&before.clone().settle(&plan, now));
                prop_assert_eq!(noticed(&decision, &policy), noticed(&again, &policy));
                let peek = policy.plan_for(Verb::Peek, &facts).unwrap();
                let told = |mut shelf: Shelf| noticed(&peek.decide(&shelf.settle(&peek, now)), &policy);
                prop_assert_eq!(told(shelf.clone()), told(before));
            }
        }
    }

    /// A peek says, to the last figure, what a check then answers, with ladders too; and however many peeks come in
    /// between, the checks are answered alike.
    ///
    /// Woken by: settling `Verb::Peek` like `Verb::Check` in `settle`.
    #[test]
    fn a_peek_foretells_and_changes_nothing(
        rules in rules(),
        strike in select(&["window", "request", "ignored"][..]),
        start in start(),
        trace in trace(),
        peeked in vec(any::<bool>(), 40),
    ) {
        let text = with_a_ladder(rules, strike);
        let (mut world, mut other) = (World::new(&text, start), World::new(&text, start));
        for (ask, peeked) in trace.into_iter().zip(peeked) {
            world.wait(ask.gap);
            other.wait(ask.gap);
            let facts = world.facts(ask.who, ask.cost);
            if peeked && other.policy.plan(&facts).is_ok() {
                let told = other.peek_at(&facts, other.now);
                let (_, done) = other.settle(&facts).unwrap();
                prop_assert_eq!(format!("{told:?}"), format!("{done:?}"));
                let (_, plain) = world.settle(&facts).unwrap();
                prop_assert_eq!(format!("{plain:?}"), format!("{done:?}"));
            } else {
                let answers = [&mut world, &mut other].map(|world| format!("{:?}", world.settle(&facts).map(|both| both.1)));
                prop_assert_eq!(&answers[0], &answers[1]);
            }
        }
    }

    /// The figures shown are those of the limit that binds: of those that deny, the one with the longest wait; where
    /// all allow, the one with room for the fewest further requests of this cost; of equals the first by layer, then
    /// by place in the file.
    ///
    /// Woken by: replacing `min_by_key` with `max_by_key` in `tightest`; `>` with `>=` in `longest_wait`; and leaving
    /// out `sort_by_key(… rule.layer)` in `Loader::policy`.
    #[test]
    fn the_limit_that_binds_is_shown(rules in rules(), start in start(), trace in trace()) {
        let mut world = World::new(&text_of(&rules), start);
        for ask in trace {
            world.wait(ask.gap);
            let facts = world.facts(ask.who, ask.cost);
            let Ok((_, decision)) = world.settle(&facts) else { continue };
            prop_assert_eq!(decision.binding, must_bind(&decision, &world.policy), "{:?}", decision);
        }
    }

    /// Rules that only watch change nothing that anyone notices: with them or without them, the verdicts, waits,
    /// strikes and figures are the same, whatever the watched rules are and wherever they stand.
    ///
    /// Woken by: leaving out `charge.enforced()` in `Step::denied`; likewise in `Step::strike`; likewise in `Plan::read`;
    /// and leaving out `reading.enforced` in `tightest`.
    #[test]
    fn whoever_watches_is_not_noticed(
        rules in rules(),
        strike in prop::option::of(select(&["window", "request", "ignored"][..])),
        start in start(),
        trace in trace(),
    ) {
        let text_with = |rules: &[RuleShape]| match strike {
            Some(strike) => with_a_ladder(rules.to_vec(), strike),
            None => text_of(rules),
        };
        let mut rules = rules;
        rules.sort_by_key(|rule| rule.observed);
        let enforced: Vec<_> = rules.iter().filter(|rule| !rule.observed).cloned().collect();
        let (mut all, mut few) = (World::new(&text_with(&rules), start), World::new(&text_with(&enforced), start));
        for ask in trace {
            all.wait(ask.gap);
            few.wait(ask.gap);
            let facts = all.facts(ask.who, ask.cost);
            match (all.settle(&facts), few.settle(&facts)) {
                (Ok((_, all_say)), Ok((_, few_say))) => {
                    prop_assert_eq!(noticed(&all_say, &all.policy), noticed(&few_say, &few.policy));
                }
                (all_say, few_say) => prop_assert_eq!(all_say.map(|_| ()), few_say.map(|_| ())),
            }
        }
    }

    /// Whoever is on the allow list is let through without figures, charged nothing, and changes nothing for others.
    ///
    /// Woken by: replacing `plan.listed.is_some()` with `plan.listed == Some(Listed::Deny)` in `Policy::plan_for`.
    #[test]
    fn the_allowed_cost_nobody_anything(
        rules in rules(),
        start in start(),
        trace in trace(),
        by_user in any::<bool>(),
    ) {
        let entry = if by_user { "user:bob" } else { "203.0.113.2" };
        let text = format!("[lists]\nallow = [\"{entry}\"]\n{}", text_of(&rules));
        let (mut world, mut other) = (World::new(&text, start), World::new(&text, start));
        for ask in trace {
            world.wait(ask.gap);
            other.wait(ask.gap);
            let facts = world.facts(ask.who, ask.cost);
            let listed = if by_user { ask.who.user == Some("bob") } else { ask.who.host == 2 };
            let answer = world.settle(&facts);
            if listed {
                let (outcome, decision) = answer.unwrap();
                prop_assert_eq!((decision.verdict, decision.binding), (Verdict::Allow, None));
                prop_assert!(decision.readings.is_empty() && !outcome.changed());
                prop_assert!(header_fields(&decision, &world.policy).is_empty());
            } else {
                let (answer, alone) = (answer.map(|both| both.1), other.settle(&facts).map(|both| both.1));
                prop_assert_eq!(format!("{answer:?}"), format!("{alone:?}"));
            }
        }
    }
}

/// Text that a stranger may send: any characters at all, the ones that mean something here, and nothing.
fn text() -> impl Strategy<Value = Option<String>> {
    let text = prop_oneof![
        any::<String>(),
        "[a-b:_=,/{}%\\u{0}\\r\\n.*\\[\\]é→ ]{0,12}",
        "/api/(posts|auth/login|ai/x|upload/image|signup|%2e%2e|//)(/.*)?",
        select(&["POST", "get", "HEAD", "oak", "ai", "auth.grove.place", "example"][..]).prop_map(str::to_owned),
    ];
    prop::option::weighted(0.8, text)
}

fn moment() -> impl Strategy<Value = Timestamp> {
    let micros = prop_oneof![
        Just(0),
        Just(u64::MAX),
        any::<u64>(),
        (0..200_000_000_000u64).prop_map(|micros| 1_750_000_000_000_000 + micros),
    ];
    micros.prop_map(Timestamp::from_micros)
}

fn cost() -> impl Strategy<Value = Option<u64>> {
    prop::option::of(prop_oneof![Just(0), Just(1), Just(u64::MAX), any::<u64>(), 0..200u64])
}

/// Everything a stranger may put into one request.
#[derive(Debug, Clone)]
struct Stranger {
    texts: Vec<Option<String>>,
    ip: Option<std::net::IpAddr>,
    costs: [Option<u64>; 3],
    verb: Verb,
    now: Timestamp,
    trace: u128,
}

fn stranger() -> impl Strategy<Value = Stranger> {
    let verb = select(&[Verb::Check, Verb::Check, Verb::Peek, Verb::Record][..]);
    let ip = prop::option::weighted(0.8, any::<std::net::IpAddr>());
    (vec(text(), 10), ip, [cost(), cost(), cost()], verb, moment(), any::<u128>())
        .prop_map(|(texts, ip, costs, verb, now, trace)| Stranger { texts, ip, costs, verb, now, trace })
}

/// The policies in `policies/`, under an environment that is empty.
#[expect(clippy::disallowed_methods, reason = "the presets are files, and a test may read them")]
static PRESETS: LazyLock<Vec<Policy>> = LazyLock::new(|| {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../policies");
    let files = std::fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path());
    let policies = files.filter(|path| path.extension().is_some_and(|extension| extension == "toml"));
    policies.map(|path| parsed(&std::fs::read_to_string(&path).unwrap())).collect()
});

/// Asks everything there is to ask about one request; what it cannot plan is an error in words.
fn survive(policy: &Policy, ledger: &mut Ledger, stranger: &Stranger) {
    let text = |index: usize| stranger.texts[index].as_deref();
    let own: Vec<_> = ["x-api-key", "authorization"].into_iter().zip([text(8), text(9)]).collect();
    let own: Vec<_> = own.into_iter().filter_map(|(name, value)| Some((name, value?))).collect();
    let costs: Vec<_> =
        [("tokens", stranger.costs[2])].into_iter().filter_map(|(name, cost)| Some((name, cost?))).collect();
    let facts = Facts {
        ip: stranger.ip,
        host: text(0),
        method: text(1),
        path: text(2),
        route: text(8),
        from_client: stranger.trace.is_multiple_of(2),
        tenant: text(3),
        user: text(4),
        tier: text(5),
        category: text(6),
        endpoint: text(7),
        facts: &own,
        headers: &own,
        cost: stranger.costs[0],
        bytes: stranger.costs[1],
        costs: &costs,
        trace: TraceId::from_u128(stranger.trace),
    };
    let _ = policy.explain(&facts);
    let _ = policy.category_of(&facts);
    for layer in crate::world::LAYERS {
        let _ = policy.keys_of(layer, text(4).unwrap_or_default());
    }
    match ledger.decide(policy, stranger.verb, &facts, stranger.now) {
        Ok(checked) => {
            let decision = &checked.decision;
            let _ = (decision.retry_after(), decision.reset_at(), header_fields(decision, policy));
            for form in [BodyForm::Json, BodyForm::Problem] {
                assert_eq!(denial_body(decision, policy, &facts, form).is_some(), !decision.allowed());
            }
            if let Some(receipt) = checked.receipt {
                let _ = ledger.refund(&receipt, stranger.now);
            }
        }
        Err(error) => assert!(!error.to_string().is_empty()),
    }
}

proptest! {
    #![proptest_config(crate::cases(96))]

    /// Nothing panics: no text, cost, address or time that a stranger sends to any preset, in any order.
    ///
    /// Woken by: replacing `saturating_add` with `+` in `Timestamp::plus`; and `checked_div(reading.cost.max(1))` with
    /// `/ reading.cost` in `tightest`.
    #[test]
    fn nothing_panics(strangers in vec(stranger(), 1..6), order in any::<Index>()) {
        prop_assert!(PRESETS.len() >= 6);
        let first = order.index(PRESETS.len());
        for policy in PRESETS.iter().cycle().skip(first).take(2) {
            let mut ledger = Ledger::default();
            for stranger in &strangers {
                survive(policy, &mut ledger, stranger);
            }
        }
    }
}

/// A limit by `deny = true` is the longest wait there is, though it names no time.
#[test]
fn never_is_the_longest_wait() {
    let text = "[[rule]]\nname = \"r0\"\nper = [\"user\"]\nlimit = \"1/h\"\n[[rule]]\nname = \"r1\"\nper = [\"user\"]\ndeny = true\n";
    let mut world = World::new(text, Timestamp::from_secs(1_750_000_000));
    let decision = world.check(ALICE, 1).unwrap().decision;
    assert_eq!((decision.verdict, decision.binding, decision.ready_at), (Verdict::Deny, Some(1), None));
    assert!(decision.reset_at().is_none() && !decision.readings[0].charged);
}
