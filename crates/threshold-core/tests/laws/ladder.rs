//! The ladder climbs one rung at a time, forgets all at once, and counts what it says it counts.

use proptest::collection::vec;
use proptest::prelude::*;
use proptest::sample::select;
use threshold_core::ladder::{Penalty, Rung, StrikeMode};
use threshold_core::limit::Algorithm;
use threshold_core::policy::{Disclosure, Layer};
use threshold_core::{Decision, Facts, Policy, Span, Standing, Timestamp, TraceId, Verdict};

use crate::world::{ALICE, Ask, RuleShape, Shelf, Who, ask, gap, parsed, rule, start, text_of};

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

    /// Whether a client that was struck so often knows of it: a shadow ban alone tells nothing.
    fn has_told(&self, strikes: u32) -> bool {
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

/// Requests of one user, close together, so that most are over the limit.
fn pushing() -> impl Strategy<Value = Vec<Ask>> {
    let quick = (0..2_500_000u64).prop_map(Span::from_micros);
    let gap = prop_oneof![3 => quick, 2 => gap()];
    vec((gap, ask()).prop_map(|(gap, ask)| Ask { gap, who: ALICE, ..ask }), 1..60)
}

/// What must become of one subject, told by what it did and nothing else.
#[derive(Debug, Default)]
struct Model {
    strikes: u32,
    decays_at: Timestamp,
    shadow: bool,
    cooldown: Timestamp,
    ban: Timestamp,
    /// By rule: when it struck.
    struck: Vec<Vec<Timestamp>>,
    /// By rule: when it denied, and until when the client was told to wait.
    denied: Vec<Vec<(Timestamp, Timestamp)>>,
    /// By rule: the denial whose wait is running.
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
                self.waiting[rule].is_some_and(|(at, told)| at.plus(Span::SECOND) <= now && now < told)
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

    /// What a request must be told whose limits read like this; the rule that strikes, and its rung.
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
        // All rules count by user and name one ladder: what lifts one limit lifts all.
        let lifted = struck.is_some_and(|(_, rung)| rung.allows());
        for rule in over.iter().filter(|_| !lifted).map(|reading| reading.rule()) {
            let told = sent(decision);
            let runs = self.waiting[rule].filter(|(_, until)| now < *until && first != Some(rule));
            self.denied[rule].push((now, told));
            self.waiting[rule] = match runs {
                Some((at, until)) if told < until.plus(Span::SECOND) => Some((at, until)),
                _ => Some((now, told)),
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

/// When a denied client was told to come again, by the whole seconds of its Retry-After.
fn sent(decision: &Decision) -> Timestamp {
    let seconds = decision.retry_after_secs().unwrap();
    decision.at.plus(Span::from_secs(seconds))
}

/// One user, one subject, and a shelf.
struct Court {
    policy: Policy,
    shelf: Shelf,
    now: Timestamp,
    ids: u128,
}

impl Court {
    fn new(steps: &Steps, now: Timestamp) -> Self {
        Self { policy: parsed(&steps.text()), shelf: Shelf::default(), now, ids: 0 }
    }

    /// The decision, and the standing before and after it; `None` if the cost never fits.
    fn hear(&mut self, ask: &Ask) -> Option<(Decision, Standing, Standing)> {
        self.now = self.now.plus(ask.gap);
        self.ids += 1;
        let facts = Facts { cost: Some(ask.cost), trace: TraceId::from_u128(self.ids), ..ask.who.facts() };
        let plan = self.policy.plan(&facts).ok()?;
        let key = plan.subjects()[0].key();
        let before = self.shelf.standing(key);
        let outcome = self.shelf.settle(&plan, self.now);
        let after = self.shelf.standing(key);
        assert_eq!(outcome.standing_changed(0), before != after, "a change must be saved");
        Some((plan.decide(&outcome), before, after))
    }
}

proptest! {
    #![proptest_config(crate::cases(400))]

    /// A subject stands as a plain account of its deeds says: one strike more at most, on the rung of that strike, the
    /// last rung repeating; all strikes gone, and the shadow with them, `decay` after the last; no strike while a
    /// penalty is in force; a request let through by a rung that allows, and by no other, whichever of its limits are
    /// full; and penalties that never shorten. Whoever is denied and not banned is warned while strikes count that it
    /// knows of.
    ///
    /// Woken by: replacing `saturating_sub(1)` with `saturating_sub(0)` in `Ladder::rung`; leaving out
    /// `self.shadow = false` in `Standing::strike`; returning `None` for a cool-down in `Standing::penalty`; and
    /// replacing `lifts` with `false`, or with `lifts && *charge == struck` for `settled.lifted` in `Step::strike`; and
    /// leaving out `self.warn()` where `Step::check` finds a penalty.
    #[test]
    fn the_ladder_is_climbed_as_told(steps in steps(), start in start(), trace in pushing()) {
        let mut court = Court::new(&steps, start);
        let count = steps.rules.len();
        let mut model = Model { struck: vec![vec![]; count], denied: vec![vec![]; count], waiting: vec![None; count], ..Model::default() };
        for ask in &trace {
            let Some((decision, before, after)) = court.hear(ask) else { continue };
            let now = court.now;
            let held = before.penalty(now);
            let (verdict, struck) = model.answer(&steps, &decision);
            prop_assert_eq!(decision.verdict, verdict, "{:?} {:?}", decision, before);
            let told = decision.escalations.iter().map(|strike| (decision.readings[strike.charge].rule(), strike.rung));
            prop_assert_eq!(told.collect::<Vec<_>>(), struck.into_iter().collect::<Vec<_>>());
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
                Verdict::Deny => steps.has_told(strikes),
                Verdict::Allow | Verdict::Warn | Verdict::Slow => struck.is_some_and(|(_, rung)| rung.warn),
            };
            prop_assert_eq!(decision.warning, warned);
            let gone = model.decays_at.max(now);
            prop_assert_eq!((after.strikes(gone), after.is_shadowed(gone)), (0, false));
            let last = gone.minus(Span::from_micros(1));
            prop_assert!(last < now || after.strikes(last) == model.strikes);
        }
    }

    /// `strike = "window"`: two strikes of one rule are at least its period apart, which is under an hour here. `request`: every violation is one,
    /// unless another rule has struck for the same request. `ignored`: only in `[denial + 1 s, its Retry-After)` of a denial
    /// that was answered, and never for one that a rung let through.
    ///
    /// Woken by: replacing `now.plus(violation.wait)` with `now` in `Standing::strike`; `StrikeMode::Request => true`
    /// with `false`, and `notice.at.plus(IN_FLIGHT)` with `notice.at`, in `Standing::counts`.
    #[test]
    fn only_what_counts_strikes(steps in steps(), start in start(), trace in pushing()) {
        let mut court = Court::new(&steps, start);
        let count = steps.rules.len();
        let (mut struck, mut denied) = (vec![Vec::new(); count], vec![Vec::new(); count]);
        for ask in &trace {
            let Some((decision, before, _)) = court.hear(ask) else { continue };
            let now = court.now;
            if before.penalty(now).is_some() {
                prop_assert!(decision.escalations.is_empty());
                continue;
            }
            prop_assert!(decision.escalations.len() <= 1);
            for (index, reading) in decision.readings.iter().enumerate().filter(|(_, reading)| !reading.allowed) {
                let strike = decision.escalations.iter().find(|strike| strike.charge == index);
                if strike.is_some() {
                    let in_time = |(at, told): &(Timestamp, Timestamp)| at.plus(Span::SECOND) <= now && now < *told;
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
                    denied[reading.rule()].push((now, sent(&decision)));
                }
            }
        }
    }

    /// A ladder adds to the bound of a limit one request for each rung that lets one through, in each decay period. Its
    /// last rung must deny for that: it repeats.
    ///
    /// Woken by: replacing `self.strikes.saturating_add(1)` with `1` in `Standing::strike`.
    #[test]
    fn a_ladder_adds_its_warnings_and_no_more(steps in steps(), start in start(), trace in pushing()) {
        let steps = Steps { rungs: [&steps.rungs[..], &["deny"]].concat(), ..steps };
        let allows = |rung: &&&str| Rung::parse(rung).unwrap().allows();
        let lenient = steps.rungs.iter().filter(allows).count() as u64;
        let mut court = Court::new(&steps, start);
        let bounds: Vec<u64> = court.policy.rules().iter().map(|rule| rule.fixed_limit().unwrap().bound()).collect();
        let mut admitted: Vec<Timestamp> = Vec::new();
        for ask in &trace {
            let Some((decision, ..)) = court.hear(&Ask { cost: 1, ..*ask }) else { continue };
            if !decision.allowed() {
                continue;
            }
            admitted.push(court.now);
            for (index, bound) in bounds.iter().enumerate() {
                let period = steps.period(index);
                let within = admitted.iter().filter(|at| at.plus(period) > court.now).count() as u64;
                let climbs = period.micros() / (steps.decay * 1_000_000) + 1;
                prop_assert!(within <= bound + lenient * climbs, "{within} in {period}");
            }
        }
    }

    /// Requests that come at once cannot be the same strike: settled in any order, the nth of them is the nth.
    ///
    /// Woken by: replacing `standing.strike(…)` with a strike on a copy of the standing in `Step::strike`.
    #[test]
    fn no_two_requests_are_one_strike(
        order in Just(vec!["/a", "/b", "/c", "/d", "/e"]).prop_shuffle(),
        rung in select(&["warn", "deny", "shadow", "deny + warn"][..]),
        at in start(),
    ) {
        let text = format!(
            "[ladders.steps]\nrungs = [\"{rung}\"]\n[[rule]]\nname = \"r0\"\nlayer = \"user\"\nper = [\"user\", \"endpoint\"]\n\
             limit = \"1/h\"\nladder = \"steps\"\nstrike = \"request\"\n"
        );
        let policy = parsed(&text);
        let mut shelf = Shelf::default();
        let mut settle = |path| {
            let facts = Who { path, ..ALICE }.facts();
            let outcome = shelf.settle(&policy.plan(&facts).unwrap(), at);
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

/// `strike = "window"` on a limit over more than an hour: strikes are an hour apart, so that a ladder is climbed before its
/// strikes decay. They once were a day apart, which is when the last one had decayed.
///
/// Woken by: leaving out `.min(LONGEST_WAIT)` in `Violation::new`.
#[test]
fn a_strike_waits_an_hour_at_most() {
    for (period, wait) in [("59min", 3_540), ("1h", 3_600), ("61min", 3_600), ("day", 3_600), ("year", 3_600)] {
        let text = format!(
            "[ladders.steps]\ndecay = \"400day\"\nrungs = [\"deny\", \"ban 1h\"]\n[[rule]]\nname = \"r0\"\nper = [\"user\"]\n\
             limit = \"1/{period}\"\nalgorithm = \"token-bucket\"\nladder = \"steps\"\n"
        );
        let (policy, mut shelf) = (parsed(&text), Shelf::default());
        let facts = Facts { cost: Some(1), ..ALICE.facts() };
        let mut verdict = |micros: u64| {
            let (plan, now) = (policy.plan(&facts).unwrap(), Timestamp::from_micros(1_750_000_000_000_000 + micros));
            plan.decide(&shelf.settle(&plan, now)).verdict
        };
        assert_eq!([verdict(0), verdict(0)], [Verdict::Allow, Verdict::Deny]);
        assert_eq!(verdict(wait * 1_000_000 - 1), Verdict::Deny, "{period}");
        // Not a moment later: a limit over less than an hour has room again.
        if period != "59min" && period != "1h" {
            assert_eq!(verdict(wait * 1_000_000), Verdict::Ban, "{period}");
        }
    }
}

/// A warning was once remembered like a denial, with the wait of a request that was let through: whoever had waited as
/// told, and asked for a little less, was struck for a wait that nobody had told them of.
///
/// Woken by: calling `remember_denial` in `Step::check` whether or not the request is denied.
#[test]
fn a_warning_is_no_denial() {
    let text = "[ladders.steps]\nrungs = [\"warn\", \"ban 1h\"]\n[[rule]]\nname = \"r0\"\nper = [\"user\"]\nlimit = \"10/min\"\n\
                algorithm = \"sliding-log\"\nladder = \"steps\"\nstrike = \"ignored\"\n";
    let (policy, mut shelf) = (parsed(text), Shelf::default());
    let mut told = |seconds: u64, cost| {
        let facts = Facts { cost: Some(cost), ..ALICE.facts() };
        let (plan, now) = (policy.plan(&facts).unwrap(), Timestamp::from_secs(1_750_000_000 + seconds));
        let outcome = shelf.settle(&plan, now);
        let decision = plan.decide(&outcome);
        (decision.verdict, decision.retry_after_secs())
    };
    assert_eq!(told(0, 2).0, Verdict::Allow);
    assert_eq!(told(30, 8).0, Verdict::Allow);
    assert_eq!(told(40, 1), (Verdict::Deny, Some(20)));
    assert_eq!(told(45, 10).0, Verdict::Warn);
    // The 20 seconds are over. A cost of 10 would have had to wait until the 90th second, but nobody was told that.
    assert_eq!(told(61, 3), (Verdict::Deny, Some(29)));
}
