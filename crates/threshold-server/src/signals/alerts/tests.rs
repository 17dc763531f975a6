//! Tests of alerts: a naive model, scripted attacks, and the bounds.

#![expect(clippy::arithmetic_side_effects, reason = "figures of tests are small")]

mod addresses;

use std::collections::{BTreeMap, BTreeSet};

use proptest::prelude::*;
use threshold_core::Span;
use threshold_core::alert::AlertChange::{self, Raised, Resolved};
use threshold_core::alert::AlertLevel::{self, Critical, Warning};
use threshold_core::decision::Cause;

use super::steps::HOLD;
use super::*;

const BEGIN: u64 = 1_767_225_600_000;
const ID: &str = "00000000-0000-4000-8000-000000000001";

fn at(millis: u64) -> Timestamp {
    Timestamp::EPOCH.plus(Span::from_millis(BEGIN + millis))
}

fn policy(alerts: &str) -> Policy {
    let rule = "[[rule]]\nname = 'all'\nper = ['ip']\nlimit = '1/min'\n";
    Policy::parse(&format!("[alerts]\n{alerts}\n{rule}"), &|_| None).unwrap()
}

/// Returns an event in JSON's own words, at so many milliseconds after the beginning.
fn event(millis: i64, fields: &str) -> Event {
    let at = BEGIN.checked_add_signed(millis).unwrap();
    Event::from_json(&format!(r#"{{"id":"{ID}","at":{at},"blocked":true{fields}}}"#)).unwrap()
}

fn by(address: &str, count: u64) -> String {
    format!(r#","ip":"{address}","count":{count}"#)
}

fn changes(notices: &[Notice]) -> Vec<(&'static str, Option<&str>, AlertChange)> {
    notices.iter().map(|notice| (notice.on.name(), notice.key.as_deref(), notice.change)).collect()
}

#[test]
fn an_attack_is_told_when_it_begins_rises_and_ends() {
    let (mut book, policy) = (AlertBook::default(), policy(""));
    let mut told = Vec::new();
    // 25 blocks of one address in each of four seconds, and the edge's layer has them.
    for millis in [0, 1_000, 2_000, 3_000] {
        let event = event(millis, &format!(r#","layer":"edge"{}"#, by("203.0.113.7", 1)));
        let now = at(u64::try_from(millis).unwrap());
        (0..25).for_each(|_| book.add(&event, now));
        told.extend(book.judge(&policy, now));
    }
    let ip = Some("203.0.113.7");
    let expect = [
        ("ip_blocks", ip, Raised(Warning)),
        ("edge_blocks", None, Raised(Warning)),
        ("ip_blocks", ip, Raised(Critical)),
    ];
    assert_eq!(changes(&told), expect);
    assert_eq!(book.raised().map(Notice::level).collect::<Vec<_>>(), [Warning, Critical]);
    // It stays raised for a pause, and ends at most a period and 60 seconds after the last block.
    assert_eq!(book.judge(&policy, at(63_000)), []);
    let mut ended = Vec::new();
    for second in 64..=3 + 60 + 60 + 1 {
        ended.extend(book.judge(&policy, at(second * 1_000)));
    }
    assert_eq!(changes(&ended), [("edge_blocks", None, Resolved(Warning)), ("ip_blocks", ip, Resolved(Critical))]);
    assert!(ended.iter().all(|notice| notice.since < at(4_000) && notice.at > at(63_000)), "{ended:?}");
    assert_eq!(book.raised().count(), 0);
    assert_eq!(book.recent().count(), 5);
    assert!(book.recent().next().unwrap().is_resolved());
    assert_eq!(book.judge(&policy, at(1_000_000)), []);
    assert!(
        told[0]
            .to_json(&Node::of_test())
            .contains(r#""alert":"ip_blocks","state":"raised","level":"warning","key":"203.0.113.7""#)
    );
}

#[test]
fn each_alert_counts_its_own_events() {
    let alerts =
        AlertOn::ALL.map(|on| format!("{} = {{ per = 'min', warning = 1, critical = 9 }}", on.name())).join("\n");
    let policy = policy(&alerts);
    let ban = r#","subject":"user=u1","strikes":5,"bannedUntil":1767312000000,"verdict":"ban""#;
    for (fields, expect) in [
        (r#","layer":"edge""#.to_owned(), vec!["edge_blocks"]),
        (r#","layer":"tenant","tenant":"acme""#.to_owned(), vec!["tenant_blocks"]),
        (r#","layer":"user","userId":"u1""#.to_owned(), vec![]),
        (format!(r#","layer":"user","userId":"u1"{ban}"#), vec!["user_bans"]),
        // A ban of an address is no ban of a user.
        (format!(r#","layer":"edge"{ban}"#), vec!["edge_blocks"]),
        (r#","layer":"user","ip":"203.0.113.7""#.to_owned(), vec!["ip_blocks"]),
    ] {
        let mut book = AlertBook::default();
        book.add(&event(0, &fields), at(0));
        let names: Vec<_> = book.judge(&policy, at(0)).iter().map(|notice| notice.on.name()).collect();
        assert_eq!(names, expect, "{fields}");
        let passed =
            format!(r#"{{"id":"{ID}","at":{BEGIN},"blocked":false{}}}"#, fields.replace(r#","verdict":"ban""#, ""));
        let passed = Event::from_json(&passed).unwrap();
        let mut book = AlertBook::default();
        book.add(&passed, at(0));
        let names: Vec<_> = book.judge(&policy, at(0)).iter().map(|notice| notice.on.name()).collect();
        let bans: Vec<_> = expect.into_iter().filter(|name| *name == "user_bans").collect();
        assert_eq!(names, bans, "what was not blocked: {fields}");
    }
}

/// Refused logins and penalties of ladders are attacks. What an operator, a list or an outage stops is none.
///
/// Woken by leaving out the first condition of `add`.
#[test]
fn only_denials_that_the_caller_has_brought_about_count() {
    let alerts =
        AlertOn::ALL.map(|on| format!("{} = {{ per = 'min', warning = 1, critical = 9 }}", on.name())).join("\n");
    let policy = policy(&alerts);
    for (cause, expect) in [
        ("limit", vec!["edge_blocks", "ip_blocks"]),
        ("login", vec!["edge_blocks", "ip_blocks"]),
        ("ladder", vec!["edge_blocks", "ip_blocks"]),
        ("ban", vec![]),
        ("pause", vec![]),
        ("list", vec![]),
        ("outage", vec![]),
    ] {
        let mut book = AlertBook::default();
        let fields = format!(r#","layer":"edge","cause":"{cause}"{}"#, by("203.0.113.7", 1));
        book.add(&event(0, &fields), at(0));
        let names: Vec<_> = book.judge(&policy, at(0)).iter().map(|notice| notice.on.name()).collect();
        assert_eq!(names, expect, "{cause}");
    }
}

/// Times of reported events are chosen by others.
#[test]
fn reported_events_count_late_or_from_the_future_but_not_when_too_old() {
    let policy = policy("edge_blocks = { per = 'min', warning = 10, critical = 1000 }");
    for (millis, told) in
        [(0, true), (-119_000, true), (-121_000, false), (i64::MIN / 1_000_000, false), (86_400_000, true)]
    {
        let mut book = AlertBook::default();
        book.add(&event(millis.max(-1_700_000_000_000), r#","layer":"edge","count":10"#), at(0));
        assert_eq!(book.judge(&policy, at(0)).len(), usize::from(told), "{millis}");
        assert_eq!(book.judge(&policy, at(121_000)).len(), usize::from(told), "{millis}: it is over in time");
    }
    let mut book = AlertBook::default();
    book.add(&event(0, r#","layer":"edge","count":18446744073709551615"#), at(0));
    book.add(&event(0, r#","layer":"edge","count":18446744073709551615"#), at(0));
    assert_eq!(book.judge(&policy, at(0))[0].count, u64::MAX);
    assert_eq!(book.judge(&policy, at(121_000)).len(), 1);
}

/// Woken by a `forget` that leaves counts of the future: the alert then stayed raised until the clock had caught up.
#[test]
fn a_clock_that_is_set_back_keeps_no_alert_raised() {
    let policy = policy("edge_blocks = { per = 'min', warning = 10, critical = 1000 }");
    let mut book = AlertBook::default();
    book.add(&event(86_400_000, r#","layer":"edge","count":10"#), at(86_400_000));
    assert_eq!(book.judge(&policy, at(86_400_000)).len(), 1);
    assert_eq!(book.judge(&policy, at(0)), []);
    assert_eq!(changes(&book.judge(&policy, at(121_000))), [("edge_blocks", None, Resolved(Warning))]);
}

#[test]
fn a_reload_changes_the_thresholds_and_keeps_the_counts() {
    let mut book = AlertBook::default();
    let of = |per, warning, critical| {
        policy(
            &["edge_blocks", "ip_blocks"]
                .map(|on| format!("{on} = {{ per = '{per}', warning = {warning}, critical = {critical} }}"))
                .join("\n"),
        )
    };
    (0..30).for_each(|second| {
        book.add(&event(second * 1_000, &format!(r#","layer":"edge"{}"#, by("::1", 1))), at(30_000));
    });
    assert_eq!(book.judge(&of("min", 31, 100), at(30_000)), []);
    assert_eq!(book.judge(&of("min", 30, 100), at(30_000)).len(), 2);
    let risen = book.judge(&of("h", 10, 30), at(30_000));
    assert_eq!(risen.iter().map(|notice| (notice.count, notice.level())).collect::<Vec<_>>(), [(30, Critical); 2]);
    assert_eq!(
        book.judge(&of("10s", 30, 30), at(30_000)).len(),
        0,
        "from longer steps to shorter ones nothing is lost"
    );
    let over = book.judge(&of("min", 31, 31), at(30_000));
    assert!(over.len() == 2 && over.iter().all(Notice::is_resolved), "{over:?}");
}

/// What an edge reports a minute late is told when it arrives, though the last period has nothing of it.
#[test]
fn an_address_that_is_reported_late_is_raised() {
    let (mut book, policy) = (AlertBook::default(), policy(""));
    book.judge(&policy, at(200_000));
    book.add(&event(100_000, &by("203.0.113.7", 30)), at(200_000));
    book.add(&event(200_000, &by("203.0.113.7", 1)), at(200_000));
    assert_eq!(changes(&book.judge(&policy, at(200_000))), [("ip_blocks", Some("203.0.113.7"), Raised(Warning))]);
}

#[test]
fn what_is_raised_shows_the_count_of_the_last_period_and_the_highest() {
    let (mut book, policy) =
        (AlertBook::default(), policy("edge_blocks = { per = 'min', warning = 3, critical = 90 }"));
    let figures =
        |book: &AlertBook| book.raised().map(|told| (told.on.name(), told.count, told.peak)).collect::<Vec<_>>();
    let blocks = |count: u64| format!(r#","layer":"edge"{}"#, by("203.0.113.7", count));
    book.add(&event(0, &blocks(25)), at(0));
    assert_eq!(book.judge(&policy, at(0)).len(), 2);
    assert_eq!(figures(&book), [("edge_blocks", 25, 25), ("ip_blocks", 25, 25)]);
    book.add(&event(1_000, &blocks(15)), at(1_000));
    assert_eq!(book.judge(&policy, at(1_000)), []);
    assert_eq!(figures(&book), [("edge_blocks", 40, 40), ("ip_blocks", 40, 40)]);
    book.add(&event(70_000, &blocks(2)), at(70_000));
    assert_eq!(book.judge(&policy, at(70_000)), []);
    assert_eq!(figures(&book), [("edge_blocks", 2, 40), ("ip_blocks", 2, 40)]);
    let over = book.judge(&policy, at(130_000));
    assert_eq!(over.iter().map(|notice| (notice.count, notice.peak)).collect::<Vec<_>>(), [(2, 40); 2]);
}

#[test]
fn an_alert_that_is_switched_off_is_over_and_counts_nothing() {
    let mut book = AlertBook::default();
    let (on, off) = (policy(""), policy("ip_blocks = 'off'\nedge_blocks = 'off'"));
    let blocks = event(0, &format!(r#","layer":"edge"{}"#, by("203.0.113.7", 1_000)));
    book.add(&blocks, at(0));
    assert_eq!(book.judge(&on, at(0)).len(), 2);
    let over = book.judge(&off, at(1_000));
    let ip = Some("203.0.113.7");
    assert_eq!(changes(&over), [("edge_blocks", None, Resolved(Critical)), ("ip_blocks", ip, Resolved(Critical))]);
    assert_eq!((book.raised().count(), book.recent().count()), (0, 4));
    book.add(&blocks, at(2_000));
    assert_eq!((book.judge(&off, at(2_000)), book.addresses.sizes()), (vec![], (0, 0, 0)));
    // Another one is as before, and on again it begins with nothing.
    book.add(&event(3_000, r#","layer":"tenant","tenant":"acme","count":50"#), at(3_000));
    assert_eq!(changes(&book.judge(&off, at(3_000))), [("tenant_blocks", None, Raised(Warning))]);
    assert_eq!(book.judge(&on, at(4_000)), []);
    book.add(&event(5_000, &by("203.0.113.7", 20)), at(5_000));
    assert_eq!(changes(&book.judge(&on, at(5_000))), [("ip_blocks", ip, Raised(Warning))]);
}

/// A process that ends while alerts are raised, and the next one.
#[test]
fn after_a_restart_what_is_over_is_resolved_and_what_goes_on_is_not_told_again() {
    let policy = policy("");
    let mut before = AlertBook::default();
    before.add(&event(0, &by("203.0.113.7", 150)), at(0));
    before.add(&event(90_000, &format!(r#","layer":"edge"{}"#, by("203.0.113.8", 150))), at(90_000));
    before.judge(&policy, at(90_000));
    let saved: Vec<Notice> = before.raised().cloned().collect();
    let restart = |now: u64, policy: &Policy| {
        let mut book = AlertBook::default();
        // As the file has them: of `ip_blocks` those with at least as many as the threshold.
        let counts = |on, _| match on {
            AlertOn::IpBlocks => {
                vec![("203.0.113.7".to_owned(), at(0), 150), ("203.0.113.8".to_owned(), at(90_000), 150)]
            }
            _ => vec![(String::new(), at(90_000), 150)],
        };
        let mut told = book.restore(saved.clone(), counts, policy, at(now));
        told.extend(book.judge(policy, at(now)));
        (book, told)
    };
    assert_eq!(saved.len(), 3);
    let (mut book, told) = restart(100_000, &policy);
    assert_eq!(
        (told, book.raised().map(Notice::id).collect::<Vec<_>>()),
        (vec![], saved.iter().map(Notice::id).collect())
    );
    assert_eq!(
        book.raised().map(|told| (told.count, told.peak)).collect::<Vec<_>>(),
        [(150, 150), (0, 150), (150, 150)]
    );
    let later = book.judge(&policy, at(130_000));
    let (old, new) = (Some("203.0.113.7"), Some("203.0.113.8"));
    assert_eq!(changes(&later), [("ip_blocks", old, Resolved(Critical))]);
    let (_, told) = restart(130_000, &policy);
    assert_eq!(changes(&told), [("ip_blocks", old, Resolved(Critical))]);
    let (_, told) = restart(3_000_000, &policy);
    let all = [
        ("edge_blocks", None, Resolved(Warning)),
        ("ip_blocks", old, Resolved(Critical)),
        ("ip_blocks", new, Resolved(Critical)),
    ];
    assert_eq!(changes(&told), all);
    let (_, told) = restart(100_000, &self::policy("ip_blocks = 'off'"));
    assert_eq!(changes(&told), all[1..]);
    // The clock was set back meanwhile: what was counted in its future says nothing about now. Fails if it counts as now.
    let (_, told) = restart(30_000, &policy);
    assert_eq!(changes(&told), [all[0], all[2]]);
}

/// An operator who reads "login" looks for accounts, not for a limit.
///
/// Fails if the end of an episode does not say why it began.
#[test]
fn notices_say_why_most_was_stopped() {
    let (mut book, policy) = (AlertBook::default(), policy(""));
    let login = format!(r#","layer":"edge","cause":"login"{}"#, by("203.0.113.7", 90));
    book.add(&event(0, &login), at(0));
    book.add(&event(0, &format!(r#","layer":"edge","cause":"limit","rule":"posts"{}"#, by("203.0.113.8", 30))), at(0));
    let mut told = book.judge(&policy, at(0));
    told.extend(book.judge(&policy, at(121_000)));
    let why = |notice: &Notice| {
        (notice.key.as_deref().unwrap_or_default().to_owned(), notice.why.cause, notice.why.rule.clone())
    };
    let expect = [
        (String::new(), Some(Cause::Login), None),
        ("203.0.113.7".to_owned(), Some(Cause::Login), None),
        ("203.0.113.8".to_owned(), Some(Cause::Limit), Some("posts".into())),
    ];
    let all: Vec<_> = told.iter().map(why).collect();
    assert_eq!((&all[..3], &all[3..]), (&expect[..], &expect[..]));
    assert!(told[0].runbook(&Node::of_test()).ends_with("/login-attack.md"));
}

#[test]
fn an_address_that_is_erased_is_nowhere_and_its_alert_is_over() {
    let (mut book, policy) = (AlertBook::default(), policy(""));
    book.add(&event(0, &by("203.0.113.7", 20)), at(0));
    book.add(&event(0, &by("203.0.113.8", 20)), at(0));
    assert_eq!(book.judge(&policy, at(0)).len(), 2);
    let over = book.erase("203.0.113.7", at(1_000)).unwrap();
    assert_eq!(changes(&[over]), [("ip_blocks", Some("203.0.113.7"), Resolved(Warning))]);
    assert_eq!(book.erase("203.0.113.7", at(1_000)), None);
    assert_eq!(book.judge(&policy, at(1_000)), [], "it is told once");
    assert!(!format!("{book:?}").contains("203.0.113.7"));
    assert!((book.raised().count(), book.recent().count(), book.addresses.sizes().1) == (1, 1, 1));
    // The largest of several leaves their notice.
    (0..9).for_each(|number| book.add(&event(2_000, &by(&format!("198.51.100.{number}"), 40 - number)), at(2_000)));
    let together = book.judge(&policy, at(2_000)).pop().unwrap();
    let largest = together.group.unwrap().largest.unwrap();
    assert_eq!(book.erase(&largest, at(2_000)), None);
    assert!(!format!("{book:?}").contains(&format!("\"{largest}\"")), "{book:?}");
}

/// An alert by the naive model: every event there was.
#[derive(Default)]
struct Model {
    events: Vec<(Timestamp, u64)>,
    level: Option<AlertLevel>,
}

impl Model {
    fn count(&self, per: u64, now: Timestamp) -> u64 {
        let seconds = per.clamp(1, 60);
        let step = per.max(1) * 1_000_000 / seconds;
        let first = (now.micros() - per.max(1) * 1_000_000 - HOLD.micros()).div_ceil(step);
        let last = now.micros() / step;
        let sum = |begin: u64| {
            let within = self.events.iter().filter(|(at, _)| (begin..begin + seconds).contains(&(at.micros() / step)));
            within.map(|(_, count)| count).sum()
        };
        // Windows before the first step have events that are no longer judged.
        (first..=last.max(first)).map(sum).max().unwrap_or(0)
    }

    fn judge(&mut self, count: u64) -> Option<AlertChange> {
        let level =
            [(6, Critical), (3, Warning)].into_iter().find(|(least, _)| count >= *least).map(|(_, level)| level);
        match (self.level, level) {
            (Some(before), None) => {
                self.level = None;
                Some(Resolved(before))
            }
            (before, Some(level)) if before < Some(level) => {
                self.level = Some(level);
                Some(Raised(level))
            }
            _ => None,
        }
    }
}

#[derive(Debug, Clone)]
enum Step {
    /// An event of an address, so long ago (or ahead), with a count.
    Add {
        address: u8,
        ago: i64,
        count: u64,
    },
    Judge,
    Wait(u64),
}

fn any_step() -> impl Strategy<Value = Step> {
    let add = |ago: std::ops::Range<i64>| {
        (0..3_u8, ago, 1..4_u64).prop_map(|(address, ago, count)| Step::Add { address, ago, count })
    };
    prop_oneof![4 => add(0..1), 2 => add(-5_000..150_000), 3 => Just(Step::Judge), 2 => (0..70_000_u64).prop_map(Step::Wait)]
}

proptest! {
    /// Woken by another `HOLD`, by `>` in the clamp to now, by a step more or less, by a notice that is told twice.
    #[test]
    fn counts_and_notices_equal_those_of_a_naive_model(
        steps in proptest::collection::vec(any_step(), 1..80),
        per in prop_oneof![Just(1_u64), Just(10), Just(60), Just(90), Just(3_600)],
    ) {
        let thresholds = format!("{{ per = '{per}s', warning = 3, critical = 6 }}");
        let policy = policy(&format!("edge_blocks = {thresholds}\nip_blocks = {thresholds}"));
        let mut book = AlertBook::default();
        let mut models: BTreeMap<String, Model> = BTreeMap::new();
        let mut now = 10_000_000;
        book.judge(&policy, at(now));
        for step in steps {
            match step {
                Step::Wait(millis) => now += millis,
                Step::Add { address, ago, count } => {
                    let millis = i64::try_from(now).unwrap() - ago;
                    let address = format!("10.0.0.{address}");
                    let event = event(millis, &format!(r#","layer":"edge"{}"#, by(&address, count)));
                    book.add(&event, at(now));
                    for name in ["edge_blocks", &address] {
                        models.entry(name.to_owned()).or_default().events.push((event.at.min(at(now)), count));
                    }
                }
                Step::Judge => {
                    // How many have alerts of their own in an hour has its own test.
                    book.own.clear();
                    let told = book.judge(&policy, at(now));
                    let told: BTreeMap<String, _> = told
                        .iter()
                        .map(|notice| (notice.key.as_deref().unwrap_or("edge_blocks").to_owned(), (notice.change, notice.count)))
                        .collect();
                    let mut expect = BTreeMap::new();
                    for (name, model) in &mut models {
                        let count = model.count(per, at(now));
                        if let Some(change) = model.judge(count) {
                            expect.insert(name.clone(), (change, count));
                        }
                    }
                    prop_assert_eq!(told, expect);
                    let raised = models.values().filter(|model| model.level.is_some()).count();
                    prop_assert_eq!(book.raised().count(), raised);
                }
            }
        }
    }
}
