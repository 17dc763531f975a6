//! Ladders: a subject climbs one rung at a time, all strikes decay together, and `strike` decides which violations count.

use proptest::collection::vec;
use proptest::prelude::*;
use proptest::sample::select;
use threshold_core::ladder::{Penalty, Rung, StrikeMode};
use threshold_core::limit::Algorithm;
use threshold_core::policy::{Disclosure, Layer};
use threshold_core::{Decision, Facts, Policy, Span, Standing, Timestamp, TraceId, Verdict};

use crate::world::{ALICE, Ask, PlainStore, RuleShape, Who, ask, gap, parsed, rule, start, text_of};

const RUNGS: [&str; 9] = [
    "warn",
    "warn",
    "shadow",
    "warn + shadow",
    "deny",
    "deny + warn",
    "cooldown 3s",
    "cooldown 2s + shadow",
    "ban 20s",
];
const MODES: [(&str, StrikeMode); 3] =
    [("window", StrikeMode::Window), ("request", StrikeMode::Request), ("ignored", StrikeMode::Ignored)];

/// A ladder, and the rules that name it, all counted by user.
#[derive(Debug, Clone)]
struct Steps {
    rungs: Vec<&'static str>,
    /// In seconds.
    decay: u64,
    rules: Vec<RuleShape>,
    modes: Vec<StrikeMode>,
}

impl Steps {
    fn text(&self) -> String {
        let rungs = self.rungs.iter().map(|rung| format!("\"{rung}\"")).collect::<Vec<_>>().join(", ");
        format!("[ladders.steps]\ndecay = \"{}s\"\nrungs = [{rungs}]\n{}", self.decay, text_of(&self.rules))
    }

    fn rung(&self, strikes: u32) -> Rung {
        let index = (strikes as usize).min(self.rungs.len()) - 1;
        Rung::parse(self.rungs[index]).unwrap()
    }

    fn period(&self, rule: usize) -> Span {
        Span::from_millis(self.rules[rule].period)
    }

    /// Returns whether a client notices any of its first `strikes` strikes. A shadow ban alone is not noticed.
    fn has_notified(&self, strikes: u32) -> bool {
        (1..=strikes).map(|strikes| self.rung(strikes)).any(|rung| rung.warn || !rung.allows())
    }
}

fn steps() -> impl Strategy<Value = Steps> {
    let rules = vec((rule(), select(&MODES[..])), 1..3);
    (vec(select(&RUNGS[..]), 1..6), select(&[5, 30, 100][..]), rules).prop_map(|(rungs, decay, rules)| {
        let modes = rules.iter().map(|(_, mode)| mode.1).collect();
        let plain = |(rule, mode): (RuleShape, (&str, StrikeMode))| RuleShape {
            layer: Layer::User,
            algorithm: if rule.algorithm.is_concurrency() { Algorithm::SlidingLog } else { rule.algorithm },
            observed: false,
            block_for: None,
            disclosure: Disclosure::Full,
            more: format!("ladder = \"steps\"\nstrike = \"{}\"\n", mode.0),
            ..rule
        };
        Steps { rungs, decay, rules: rules.into_iter().map(plain).collect(), modes }
    })
}

/// Requests of one user, close together, so that most exceed a limit.
fn burst() -> impl Strategy<Value = Vec<Ask>> {
    let quick = (0..2_500_000u64).prop_map(Span::from_micros);
    let gap = prop_oneof![3 => quick, 2 => gap()];
    vec((gap, ask()).prop_map(|(gap, ask)| Ask { gap, who: ALICE, ..ask }), 1..60)
}

/// A model of one subject, computed from its requests alone.
#[derive(Debug, Default)]
struct Model {
    strikes: u32,
    decays_at: Timestamp,
    shadow: bool,
    cooldown: Timestamp,
    ban: Timestamp,
    /// For each rule: the times of its strikes.
    struck: Vec<Vec<Timestamp>>,
    /// For each rule: the times of its denials, and the end of their `Retry-After`.
    denied: Vec<Vec<(Timestamp, Timestamp)>>,
    /// For each rule: the denial whose `Retry-After` has not passed.
    waiting: Vec<Option<(Timestamp, Timestamp)>>,
}

impl Model {
    fn penalty(&self, now: Timestamp) -> Option<Penalty> {
        let ban = (self.ban > now).then_some(Penalty::Ban(self.ban));
        ban.or((self.cooldown > now).then_some(Penalty::CoolDown(self.cooldown)))
    }

    fn counts(&self, steps: &Steps, rule: usize, now: Timestamp) -> bool {
        match steps.modes[rule] {
            StrikeMode::Request => true,
            StrikeMode::Window => self.struck[rule].iter().all(|at| at.plus(steps.period(rule)) <= now),
            StrikeMode::Ignored => {
                self.waiting[rule].is_some_and(|(at, until)| at.plus(Span::SECOND) <= now && now < until)
            }
        }
    }

    fn strike(&mut self, steps: &Steps, rule: usize, now: Timestamp) -> Rung {
        if now >= self.decays_at {
            (self.strikes, self.shadow) = (0, false);
        }
        self.strikes += 1;
        self.decays_at = now.plus(Span::from_secs(steps.decay));
        self.struck[rule].push(now);
        let rung = steps.rung(self.strikes);
        self.shadow |= rung.shadow;
        self.cooldown = self.cooldown.max(rung.cooldown.map_or(Timestamp::EPOCH, |span| now.plus(span)));
        self.ban = self.ban.max(rung.ban.map_or(Timestamp::EPOCH, |span| now.plus(span)));
        rung
    }

    /// Returns the verdict that a request with these readings must get, the rule that strikes, and its rung.
    fn answer(&mut self, steps: &Steps, decision: &Decision) -> (Verdict, Option<(usize, Rung)>) {
        let now = decision.at;
        match self.penalty(now) {
            Some(Penalty::Ban(_)) => return (Verdict::Ban, None),
            Some(Penalty::CoolDown(_)) => return (Verdict::Deny, None),
            None => {}
        }
        let over: Vec<_> = decision.readings.iter().filter(|reading| !reading.allowed).collect();
        let first = over.iter().map(|reading| reading.rule()).find(|rule| self.counts(steps, *rule, now));
        let struck = first.map(|rule| (rule, self.strike(steps, rule, now)));
        // All rules count by user and have the same ladder, so a rung that lifts one limit lifts all of them.
        let lifted = struck.is_some_and(|(_, rung)| rung.allows());
        for rule in over.iter().filter(|_| !lifted).map(|reading| reading.rule()) {
            let retry_at = retry_at(decision);
            let runs = self.waiting[rule].filter(|(_, until)| now < *until && first != Some(rule));
            self.denied[rule].push((now, retry_at));
            self.waiting[rule] = match runs {
                Some((at, until)) if retry_at < until.plus(Span::SECOND) => Some((at, until)),
                _ => Some((now, retry_at)),
            };
        }
        let refused = !over.is_empty() && !lifted;
        let verdict = match struck.map(|(_, rung)| rung) {
            Some(rung) if refused && rung.ban.is_some() => Verdict::Ban,
            _ if refused => Verdict::Deny,
            _ if self.shadow && now < self.decays_at => Verdict::Slow,
            Some(rung) if rung.warn => Verdict::Warn,
            _ => Verdict::Allow,
        };
        (verdict, struck)
    }
}

/// Returns the end of the whole seconds of a denial's `Retry-After`.
fn retry_at(decision: &Decision) -> Timestamp {
    let seconds = decision.retry_after_secs().unwrap();
    decision.at.plus(Span::from_secs(seconds))
}

/// One user, who is one subject, and a store.
struct LadderWorld {
    policy: Policy,
    store: PlainStore,
    now: Timestamp,
    ids: u128,
}

impl LadderWorld {
    fn new(steps: &Steps, now: Timestamp) -> Self {
        Self { policy: parsed(&steps.text()), store: PlainStore::default(), now, ids: 0 }
    }

    /// Returns the decision on a request, and the standing before and after it; `None` if the cost can never fit.
    fn check(&mut self, ask: &Ask) -> Option<(Decision, Standing, Standing)> {
        self.now = self.now.plus(ask.gap);
        self.ids += 1;
        let facts = Facts { cost: Some(ask.cost), trace: TraceId::from_u128(self.ids), ..ask.who.facts() };
        let plan = self.policy.plan(&facts).ok()?;
        let key = plan.subjects()[0].key();
        let before = self.store.standing(key);
        let outcome = self.store.settle(&plan, self.now);
        let after = self.store.standing(key);
        assert_eq!(outcome.standing_changed(0), before != after, "a change must be saved");
        Some((plan.decide(&outcome), before, after))
    }
}

proptest! {
    #![proptest_config(crate::cases(400))]

    /// Decisions and standings agree with the model. A request adds at most one strike and gets the rung of that strike; the last
    /// rung repeats. All strikes and the shadow ban end `decay` after the last strike. No strike is added while a penalty is in
    /// force. A rung that allows, and no other, lets a request through, whichever of its limits are full. Penalties never get
    /// shorter. A denied client that is not banned is warned while strikes count that it has noticed.
    ///
    /// Seen to fail after: replacing `saturating_sub(1)` with `saturating_sub(0)` in `Ladder::rung`; leaving out
    /// `self.shadow = false` in `Standing::strike`; returning `None` for a cool-down in `Standing::penalty`; and
    /// replacing `lifts` with `false`, or with `lifts && *charge == struck` for `settled.lifted` in `Step::strike`; and
    /// leaving out `self.note_warnings()` where `Step::check` finds a penalty.
    #[test]
    fn standings_and_verdicts_agree_with_the_model(steps in steps(), start in start(), trace in burst()) {
        let mut world = LadderWorld::new(&steps, start);
        let count = steps.rules.len();
        let mut model = Model { struck: vec![vec![]; count], denied: vec![vec![]; count], waiting: vec![None; count], ..Model::default() };
        for ask in &trace {
            let Some((decision, before, after)) = world.check(ask) else { continue };
            let now = world.now;
            let held = before.penalty(now);
            let (verdict, struck) = model.answer(&steps, &decision);
            prop_assert_eq!(decision.verdict, verdict, "{:?} {:?}", decision, before);
            let strikes = decision.escalations.iter().map(|strike| (decision.readings[strike.charge].rule(), strike.rung));
            prop_assert_eq!(strikes.collect::<Vec<_>>(), struck.into_iter().collect::<Vec<_>>());
            prop_assert!(decision.escalations.iter().all(|strike| strike.strikes == model.strikes));
            let strikes = if now < model.decays_at { model.strikes } else { 0 };
            prop_assert_eq!(after.strikes(now), strikes);
            prop_assert!(after.strikes(now) <= before.strikes(now) + 1);
            prop_assert_eq!(after.is_shadowed(now), model.shadow && strikes > 0);
            prop_assert_eq!(after.penalty(now), model.penalty(now));
            prop_assert!(after.banned_until() >= before.banned_until());
            prop_assert!(held.is_none() || (before == after && after.penalty(now) == held));
            let warned = match verdict {
                Verdict::Ban => false,
                Verdict::Deny => steps.has_notified(strikes),
                Verdict::Allow | Verdict::Warn | Verdict::Slow => struck.is_some_and(|(_, rung)| rung.warn),
            };
            prop_assert_eq!(decision.warning, warned);
            let gone = model.decays_at.max(now);
            prop_assert_eq!((after.strikes(gone), after.is_shadowed(gone)), (0, false));
            let last = gone.minus(Span::from_micros(1));
            prop_assert!(last < now || after.strikes(last) == model.strikes);
        }
    }

    /// With `strike = "window"`, two strikes of one rule are at least its period apart, which is under an hour here. With
    /// `request`, every violation is a strike, unless another rule has struck for the same request. With `ignored`, only a request
    /// at least a second after a denial and before its `Retry-After` has passed is a strike; a request that a rung let through
    /// was not denied.
    ///
    /// Seen to fail after: replacing `now.plus(violation.wait)` with `now` in `Standing::strike`; `StrikeMode::Request => true`
    /// with `false`, and `denial.at.plus(IN_FLIGHT)` with `denial.at`, in `Standing::counts`.
    #[test]
    fn only_violations_that_count_are_strikes(steps in steps(), start in start(), trace in burst()) {
        let mut world = LadderWorld::new(&steps, start);
        let count = steps.rules.len();
        let (mut struck, mut denied) = (vec![Vec::new(); count], vec![Vec::new(); count]);
        for ask in &trace {
            let Some((decision, before, _)) = world.check(ask) else { continue };
            let now = world.now;
            if before.penalty(now).is_some() {
                prop_assert!(decision.escalations.is_empty());
                continue;
            }
            prop_assert!(decision.escalations.len() <= 1);
            for (index, reading) in decision.readings.iter().enumerate().filter(|(_, reading)| !reading.allowed) {
                let strike = decision.escalations.iter().find(|strike| strike.charge == index);
                if strike.is_some() {
                    let in_time = |(at, until): &(Timestamp, Timestamp)| at.plus(Span::SECOND) <= now && now < *until;
                    let fair = match steps.modes[reading.rule()] {
                        StrikeMode::Request => true,
                        StrikeMode::Window => {
                            struck[reading.rule()].iter().all(|at: &Timestamp| at.plus(steps.period(reading.rule())) <= now)
                        }
                        StrikeMode::Ignored => denied[reading.rule()].iter().any(in_time),
                    };
                    prop_assert!(fair, "{:?} {:?}", decision, before);
                    struck[reading.rule()].push(now);
                } else if steps.modes[reading.rule()] == StrikeMode::Request {
                    prop_assert_eq!(decision.escalations.len(), 1);
                }
                if !decision.allowed() {
                    denied[reading.rule()].push((now, retry_at(&decision)));
                }
            }
        }
    }

    /// A ladder raises the bound of a limit by one request for each rung that allows, in each decay period. The last rung has to
    /// deny for that, because it repeats.
    ///
    /// Seen to fail after: replacing `self.strikes.saturating_add(1)` with `1` in `Standing::strike`.
    #[test]
    fn a_ladder_admits_one_more_request_for_each_rung_that_allows(steps in steps(), start in start(), trace in burst()) {
        let steps = Steps { rungs: [&steps.rungs[..], &["deny"]].concat(), ..steps };
        let allows = |rung: &&&str| Rung::parse(rung).unwrap().allows();
        let lenient = steps.rungs.iter().filter(allows).count() as u64;
        let mut world = LadderWorld::new(&steps, start);
        let bounds: Vec<u64> = world.policy.rules().iter().map(|rule| rule.fixed_limit().unwrap().bound()).collect();
        let mut admitted: Vec<Timestamp> = Vec::new();
        for ask in &trace {
            let Some((decision, ..)) = world.check(&Ask { cost: 1, ..*ask }) else { continue };
            if !decision.allowed() {
                continue;
            }
            admitted.push(world.now);
            for (index, bound) in bounds.iter().enumerate() {
                let period = steps.period(index);
                let within = admitted.iter().filter(|at| at.plus(period) > world.now).count() as u64;
                let climbs = period.micros() / (steps.decay * 1_000_000) + 1;
                prop_assert!(within <= bound + lenient * climbs, "{within} in {period}");
            }
        }
    }

    /// Concurrent requests are never the same strike: settled in any order, the nth of them is the nth strike.
    ///
    /// Seen to fail after: replacing `standing.strike(…)` with a strike on a copy of the standing in `Step::strike`.
    #[test]
    fn two_requests_are_never_the_same_strike(
        order in Just(vec!["/a", "/b", "/c", "/d", "/e"]).prop_shuffle(),
        rung in select(&["warn", "deny", "shadow", "deny + warn"][..]),
        at in start(),
    ) {
        let text = format!(
            "[ladders.steps]\nrungs = [\"{rung}\"]\n[[rule]]\nname = \"r0\"\nlayer = \"user\"\nper = [\"user\", \"endpoint\"]\n\
             limit = \"1/h\"\nladder = \"steps\"\nstrike = \"request\"\n"
        );
        let policy = parsed(&text);
        let mut store = PlainStore::default();
        let mut settle = |path| {
            let facts = Who { path, ..ALICE }.facts();
            let outcome = store.settle(&policy.plan(&facts).unwrap(), at);
            outcome.escalations().iter().map(|strike| strike.strikes).collect::<Vec<_>>()
        };
        for path in &order {
            prop_assert!(settle(path).is_empty());
        }
        for (strikes, path) in (1..).zip(&order) {
            prop_assert_eq!(settle(path), vec![strikes]);
        }
    }
}

/// With `strike = "window"` on a limit over more than an hour, strikes are an hour apart, so that a ladder is climbed before its
/// strikes decay. They used to be a day apart, and by then the last one had decayed.
///
/// Seen to fail after: leaving out `.min(LONGEST_WAIT)` in `Violation::new`.
#[test]
fn strikes_of_a_long_limit_are_an_hour_apart() {
    for (period, wait) in [("59min", 3_540), ("1h", 3_600), ("61min", 3_600), ("day", 3_600), ("year", 3_600)] {
        let text = format!(
            "[ladders.steps]\ndecay = \"400day\"\nrungs = [\"deny\", \"ban 1h\"]\n[[rule]]\nname = \"r0\"\nper = [\"user\"]\n\
             limit = \"1/{period}\"\nalgorithm = \"token-bucket\"\nladder = \"steps\"\n"
        );
        let (policy, mut store) = (parsed(&text), PlainStore::default());
        let facts = Facts { cost: Some(1), ..ALICE.facts() };
        let mut verdict = |micros: u64| {
            let (plan, now) = (policy.plan(&facts).unwrap(), Timestamp::from_micros(1_750_000_000_000_000 + micros));
            plan.decide(&store.settle(&plan, now)).verdict
        };
        assert_eq!([verdict(0), verdict(0)], [Verdict::Allow, Verdict::Deny]);
        assert_eq!(verdict(wait * 1_000_000 - 1), Verdict::Deny, "{period}");
        // A limit over an hour or less has room again by then.
        if period != "59min" && period != "1h" {
            assert_eq!(verdict(wait * 1_000_000), Verdict::Ban, "{period}");
        }
    }
}

/// A warned request used to be remembered like a denial, with the wait that it would have had. A client that had waited as long
/// as its denial asked was then struck for ignoring a wait that it had never seen.
///
/// Seen to fail after: calling `remember_denial` in `Step::check` whether or not the request is denied.
#[test]
fn a_warned_request_is_not_remembered_as_a_denial() {
    let text = "[ladders.steps]\nrungs = [\"warn\", \"ban 1h\"]\n[[rule]]\nname = \"r0\"\nper = [\"user\"]\nlimit = \"10/min\"\n\
                algorithm = \"sliding-log\"\nladder = \"steps\"\nstrike = \"ignored\"\n";
    let (policy, mut store) = (parsed(text), PlainStore::default());
    let mut check = |seconds: u64, cost| {
        let facts = Facts { cost: Some(cost), ..ALICE.facts() };
        let (plan, now) = (policy.plan(&facts).unwrap(), Timestamp::from_secs(1_750_000_000 + seconds));
        let outcome = store.settle(&plan, now);
        let decision = plan.decide(&outcome);
        (decision.verdict, decision.retry_after_secs())
    };
    assert_eq!(check(0, 2).0, Verdict::Allow);
    assert_eq!(check(30, 8).0, Verdict::Allow);
    assert_eq!(check(40, 1), (Verdict::Deny, Some(20)));
    assert_eq!(check(45, 10).0, Verdict::Warn);
    // The 20 seconds have passed. A cost of 10 would have had to wait until the 90th second, but no denial told the client so.
    assert_eq!(check(61, 3), (Verdict::Deny, Some(29)));
}
