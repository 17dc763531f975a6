//! Tests of events: what is recorded, under which names, and why.

use super::*;
use crate::command::Command;
use crate::ledger::Ledger;
use crate::plan::Verb;
use crate::time::Span;

const POLICY: &str = r#"
    [identity]
    log_identifiers = true
    [[rule]]
    name = "address"
    layer = "edge"
    per = ["ip"]
    match = { path = "/pages/**" }
    limit = "1/h"
    [[rule]]
    name = "posts"
    layer = "user"
    per = ["user"]
    match = { method = "POST", path = "/api/posts/*" }
    limit = "1/h"
    ladder = "quick"
    strike = "request"
    [ladders.quick]
    rungs = ["warn", "cooldown 1s + shadow", "ban 24h"]
    decay = "2h"
"#;

/// Returns the events of the same request at these seconds.
fn events(policy: &str, facts: &Facts<'_>, seconds: impl IntoIterator<Item = u64>) -> Vec<Option<Event>> {
    let policy = Policy::parse(policy, &|_| None).unwrap();
    let mut ledger = Ledger::default();
    let mut event = |second| {
        let now = Timestamp::from_micros(1_767_225_600_123_456).plus(Span::from_secs(second));
        let decision = ledger.decide(&policy, Verb::Check, facts, now).unwrap().decision;
        Event::from_decision(&decision, facts, &policy, || EventId::new([7; 16]))
    };
    seconds.into_iter().map(&mut event).collect()
}

fn poster<'a>() -> Facts<'a> {
    Facts {
        ip: "2001:db8:1:2:3::4".parse().ok(),
        user: Some("u1"),
        tenant: Some("acme"),
        method: Some("post"),
        path: Some("/api/posts/17?token=secret"),
        ..Facts::default()
    }
}

#[test]
fn an_id_is_a_uuid_and_reads_back() {
    for random in [[0; 16], [0xff; 16], [0x5a; 16]] {
        let text = EventId::new(random).to_string();
        assert_eq!(text.len(), 36);
        assert_eq!((text.as_bytes()[14], text.as_bytes()[8]), (b'4', b'-'));
        assert!(matches!(text.as_bytes()[19], b'8' | b'9' | b'a' | b'b'), "{text}");
        assert_eq!(EventId::parse(&text), Some(EventId::new(random)));
        assert_eq!(EventId::parse(&text.to_uppercase()), Some(EventId::new(random)));
    }
    assert_eq!(
        EventId::parse("01020304-0506-0708-090a-0b0c0d0e0f10").unwrap().0,
        0x0102_0304_0506_0708_090a_0b0c_0d0e_0f10
    );
    for wrong in ["", "0", "+1020304-0506-0708-090a-0b0c0d0e0f10", "01020304050607-08-090a-0b0c0d0e0f1011", "é"] {
        assert_eq!(EventId::parse(wrong), None, "{wrong}");
    }
}

#[test]
fn denials_warnings_and_strikes_are_recorded_and_nothing_else() {
    let seen = events(POLICY, &poster(), [0, 1, 2, 4, 5, 3_700]);
    let verdicts: Vec<_> = seen.iter().map(|event| event.as_ref().map(|event| event.verdict)).collect();
    use Verdict::{Ban, Deny, Warn};
    assert_eq!(verdicts, [None, Some(Warn), Some(Deny), Some(Ban), Some(Ban), Some(Ban)]);
    let seen: Vec<Event> = seen.into_iter().flatten().collect();
    assert_eq!(seen.iter().map(|event| event.blocked).collect::<Vec<_>>(), [false, true, true, true, true]);
    assert!(seen.iter().all(|event| event.layer == Some(Layer::User)));
    let strikes: Vec<_> = seen.iter().map(|event| event.strike.as_ref()).collect();
    let [Some(first), Some(second), Some(third), None, None] = strikes[..] else { panic!("{strikes:?}") };
    assert_eq!([first.strikes, second.strikes, third.strikes], [1, 2, 3]);
    assert!([first, second, third].iter().all(|strike| &*strike.subject == "user=u1"));
    let at = |second: u64| Timestamp::from_micros(1_767_225_600_123_000).plus(Span::from_secs(second));
    assert_eq!((first.shadow_until, first.banned_until), (None, None));
    assert_eq!((second.shadow_until, second.banned_until), (Some(at(2 + 7_200)), None));
    assert_eq!((third.shadow_until, third.banned_until), (Some(at(4 + 7_200)), Some(at(4 + 86_400))));
    let ip = seen[0].ip.as_deref();
    assert_eq!(ip, Some("2001:db8:1:2::/64"), "addresses that share a budget are one");
    assert_eq!(seen[0].endpoint.as_deref(), Some("POST:/api/posts/*"), "the path may hold secrets");
    assert_eq!(seen[0].at, at(1), "whole milliseconds");
    let lines: Vec<String> = seen.iter().filter_map(Event::escalation_to_json).collect();
    assert_eq!(lines.len(), 3);
    assert_eq!(
        lines[2],
        r#"{"event":"abuse_escalation","userId":"u1","warnings":3,"shadowBanned":true,"bannedUntil":1767312004,"#
            .to_owned()
            + r#""timestamp":"2026-01-01T00:00:04Z"}"#
    );
}

#[test]
fn names_are_hidden_as_the_policy_says() {
    let hidden = |text: &str| text.starts_with('#') && text.len() == 17;
    let one = |policy: &str, facts: &Facts<'_>| events(policy, facts, [0, 0]).pop().flatten().unwrap();
    let open = one(POLICY, &poster());
    assert_eq!((open.tenant.as_deref(), open.user_id.as_deref()), (Some("acme"), Some("u1")));
    let closed = one(&POLICY.replace("log_identifiers = true", ""), &poster());
    assert_eq!(closed.tenant.as_deref(), Some("acme"));
    assert!(closed.user_id.as_deref().is_some_and(hidden) && closed.ip.as_deref().is_some_and(hidden));
    let subject = &closed.strike.as_ref().unwrap().subject;
    assert!(subject.strip_prefix("user=").is_some_and(hidden), "{subject}");
    let secret = "log_identifiers = true\ntenant = 'cookie:t'\nuser = 'header:authorization'";
    let secret = one(&POLICY.replace("log_identifiers = true", secret).replace("ladder = \"quick\"", ""), &poster());
    assert!(secret.tenant.as_deref().is_some_and(hidden) && secret.user_id.as_deref().is_some_and(hidden));
    assert_eq!(secret.ip.as_deref(), Some("2001:db8:1:2::/64"));
    assert_eq!(secret.strike, None);
}

/// Anyone can send a long name, and an event is stored.
#[test]
fn a_text_is_bounded_in_length() {
    let long = "x".repeat(MAX_TEXT + 1);
    let fits = "é".repeat(MAX_TEXT / 2);
    let facts =
        Facts { user: Some(&long), tenant: Some(&fits), endpoint: Some(&long), method: Some(&long), ..poster() };
    let facts = Facts { method: Some("POST"), ..facts };
    let event = events(POLICY, &facts, [0, 0]).pop().flatten().unwrap();
    assert_eq!(event.tenant.as_deref(), Some(fits.as_str()));
    let texts = [event.user_id.as_deref(), event.endpoint.as_deref()];
    assert!(texts.iter().all(|text| text.is_some_and(|text| text.len() == 17)), "{texts:?}");
    assert!(event.to_json().len() < 7 * MAX_TEXT + 768);
}

/// Woken by leaving out observed limits.
#[test]
fn an_event_has_the_figures_of_every_limit() {
    let policy = format!(
        "{POLICY}\n[[rule]]\nname = 'flow'\nlayer = 'tenant'\nper = ['tenant']\nmatch = {{ path = '/pages/**' }}\n\
         limit = '3'\nalgorithm = 'concurrency'\nmode = 'observe'"
    );
    let facts = Facts { path: Some("/pages/a"), ..poster() };
    let event = events(&policy, &facts, [0, 600]).pop().flatten().unwrap();
    let figures = |limit: &EventLimit| (limit.limit, limit.period, limit.remaining, limit.cost);
    let [address, flow] = &*event.limits else { panic!("{event:?}") };
    assert_eq!(
        (&*address.rule, address.layer, address.enforced, address.allowed),
        ("address", Layer::Edge, true, false)
    );
    assert_eq!(figures(address), (1, Some(3_600_000), 0, 1));
    assert_eq!((address.reset_at, address.retry_after), (Some(1_767_225_600 + 3_661), Some(3_060)));
    assert_eq!((&*flow.rule, flow.layer, flow.enforced, flow.allowed), ("flow", Layer::Tenant, false, true));
    assert_eq!((flow.limit, flow.period, flow.retry_after), (3, None, None));
}

#[test]
fn equal_denials_are_one_event() {
    let facts = Facts { path: Some("/pages/a"), ..poster() };
    let seen: Vec<Event> = events(POLICY, &facts, 0..4).into_iter().flatten().collect();
    let (mut first, second) = (seen[0].clone(), &seen[1]);
    assert!(first.is_alike(second) && first != *second);
    first.merge(second);
    assert_eq!((first.count, first.id, first.at), (2, seen[0].id, seen[0].at));
    let other = events(POLICY, &Facts { user: Some("u2"), ..facts }, 0..2).pop().flatten().unwrap();
    assert!(!first.is_alike(&other));
    assert_ne!(first.limits, second.limits, "a second later");
    assert_eq!(other.clone().without_names().limits, Box::default());
    assert!(first.clone().without_names().is_alike(&other.without_names()));
    // The second strike is not the first.
    let strikes: Vec<Event> = events(POLICY, &poster(), 0..3).into_iter().flatten().collect();
    let mut later = strikes[0].clone();
    if let Some(strike) = &mut later.strike {
        strike.strikes = 2;
    }
    assert!(strikes[0].is_alike(&strikes[0]) && !strikes[0].is_alike(&later));
}

/// Returns the event of one more request in this state.
fn next(policy: &Policy, ledger: &mut Ledger, facts: &Facts<'_>, second: u64) -> Option<Event> {
    let now = Timestamp::from_secs(1_767_225_600).plus(Span::from_secs(second));
    let decision = ledger.decide(policy, Verb::Check, facts, now).unwrap().decision;
    Event::from_decision(&decision, facts, policy, || EventId::new([7; 16]))
}

/// Two full rules of different subjects, of which the first bans.
///
/// Woken by the subject of the last full rule, whichever was struck.
#[test]
fn a_strike_names_the_subject_of_the_rule_that_was_struck() {
    let rule = |name: &str, per: &str, ladder: &str| {
        format!(
            "[[rule]]\nname = '{name}'\nper = ['{per}']\nlimit = '1/h'\nladder = '{ladder}'\nban_shared = true\nstrike = 'request'\n"
        )
    };
    let ladders = "[ladders.bans]\nrungs = ['ban 1h']\n[ladders.warns]\nrungs = ['warn']\n";
    let policy = |first: &str, second: &str| {
        let rules = rule("a", "ip", first) + &rule("b", "user", second);
        Policy::parse(&format!("[identity]\nlog_identifiers = true\n{rules}{ladders}"), &|_| None).unwrap()
    };
    for (policy, subject) in [(policy("bans", "warns"), "ip=2001:db8:1:2::/64"), (policy("warns", "bans"), "user=u1")] {
        let mut ledger = Ledger::default();
        assert_eq!(next(&policy, &mut ledger, &poster(), 0), None);
        let struck = next(&policy, &mut ledger, &poster(), 1).and_then(|event| event.strike).unwrap();
        assert_eq!((&*struck.subject, struck.banned_until.is_some()), (subject, true));
    }
}

/// Woken by the order of the conditions in `Decision::cause`, and by leaving out `note_blocks`.
#[test]
fn an_event_says_why_the_request_was_denied() {
    let policy = format!(
        "{POLICY}\n[lists]\ndeny = ['user:mallory']\n[[rule]]\nname = 'blocks'\nper = ['user']\nmatch = {{ path = '/blocks' }}\n\
         limit = '1/h'\nblock_for = '2h'"
    );
    let policy = Policy::parse(&policy, &|_| None).unwrap();
    let mut ledger = Ledger::default();
    let at = |second: u64| Timestamp::from_secs(1_767_225_600).plus(Span::from_secs(second));
    let mut cause = |facts: &Facts<'_>, second| {
        let event = next(&policy, &mut ledger, facts, second)?;
        assert_eq!(Event::from_json(&event.to_json()).as_ref(), Ok(&event));
        Some((event.cause, event.until, event.rule.is_some()))
    };
    let limit = Some((Some(Cause::Limit), None, true));
    let poster = poster();
    let steps = [0, 1, 2, 3, 10].map(|second| cause(&poster, second));
    assert_eq!(steps[..3], [None, Some((None, None, true)), limit], "a warning is no denial");
    // A cool-down of one second, in which the request does not strike.
    let cooling = Facts { user: Some("u2"), ..poster };
    let steps_of_another = [0, 1, 2, 2].map(|second| cause(&cooling, second));
    assert_eq!(steps_of_another[3], Some((Some(Cause::Ladder), Some(at(3)), false)));
    assert_eq!(steps[3..], [limit, Some((Some(Cause::Ladder), Some(at(3 + 86_400)), false))]);
    let listed = Facts { user: Some("mallory"), ..poster };
    assert_eq!(cause(&listed, 0), Some((Some(Cause::List), None, false)));
    // A block of the rule's own is no pause.
    let blocked = Facts { user: Some("u3"), path: Some("/blocks"), ..Facts::default() };
    assert_eq!([0, 1, 2].map(|second| cause(&blocked, second)), [None, limit, limit]);
    let paged = Facts { path: Some("/pages/a"), user: Some("u4"), ip: "203.0.113.7".parse().ok(), ..Facts::default() };
    assert_eq!(cause(&paged, 0), None);
    let keys = policy.keys_of(Layer::Edge, "203.0.113.7");
    ledger.execute(&Command::Pause { keys, length: Span::from_secs(90_000) }, at(1));
    let paused = next(&policy, &mut ledger, &paged, 2).unwrap();
    assert_eq!((paused.cause, paused.until, paused.layer), (Some(Cause::Pause), Some(at(90_001)), Some(Layer::Edge)));
    assert!(!paused.blames_caller());
}

/// Gateways that sent no tier, or one in another case, had their callers denied by "a limit", which nobody had used up. So had requests
/// without an identity under `on_missing = "deny"`.
///
/// Woken by: `lacks` false in `add_charge`, and by striking a request that lacks its tier.
#[test]
fn what_a_request_lacks_is_a_cause_of_its_own() {
    let text = "[tiers.pro]\nrequests = '1/h'\n\
        [[rule]]\nname = 'plan'\nmatch = { path = '/plan' }\nper = ['tenant']\nlimit = 'tier'\nblock_for = '2h'\n\
        [[rule]]\nname = 'user'\nmatch = { path = '/user' }\nper = ['user']\nlimit = '1/h'\non_missing = 'deny'\n";
    let policy = Policy::parse(text, &|_| None).unwrap();
    let mut ledger = Ledger::default();
    let mut cause = |path, tier, second| {
        let facts = Facts { tenant: Some("acme"), path: Some(path), tier, ..Facts::default() };
        let event = next(&policy, &mut ledger, &facts, second)?;
        assert!(event.blames_caller() && event.limits.len() == 1, "{event:?}");
        Some((event.cause?, event.rule.as_deref()?.to_owned(), event.until))
    };
    let missing = |rule: &str| Some((Cause::Missing, rule.to_owned(), None));
    assert_eq!([0, 1].map(|second| cause("/plan", Some("Pro"), second)), [missing("plan"), missing("plan")]);
    assert_eq!([0, 1].map(|second| cause("/user", None, second)), [missing("user"), missing("user")]);
    // What was denied for its tier has used nothing, and blocks nothing.
    assert_eq!(cause("/plan", Some("pro"), 2), None);
    assert_eq!(cause("/plan", Some("pro"), 3), Some((Cause::Limit, "plan".to_owned(), None)));
    assert_eq!(cause("/plan", None, 4), missing("plan"));
}

/// Woken by the first rule in place of the first that denies.
#[test]
fn an_outage_names_the_rule_that_denies_in_it() {
    let rule = |name: &str, mode: &str| {
        format!("[[rule]]\nname = '{name}'\nlayer = 'user'\nper = ['user']\nlimit = '1/h'\non_store_error = '{mode}'\n")
    };
    let policy = Policy::parse(&(rule("a", "open") + &rule("b", "closed")), &|_| None).unwrap();
    let facts = poster();
    let event = |reason| {
        let decision = policy.plan(&facts).unwrap().decide_blind(false, reason, Timestamp::from_secs(1_767_225_600));
        assert_eq!(decision.blocked_layer(&policy), None);
        Event::from_decision(&decision, &facts, &policy, || EventId::new([7; 16])).unwrap()
    };
    let timeout = event(Degraded::Timeout);
    assert_eq!((timeout.cause, timeout.degraded), (Some(Cause::Outage), Some(Degraded::Timeout)));
    assert_eq!((timeout.rule.as_deref(), timeout.layer), (Some("b"), Some(Layer::User)));
    assert!(timeout.blocked && !timeout.blames_caller());
    // A store without room denies under every rule.
    let full = event(Degraded::StoreFull);
    assert_eq!((full.cause, full.rule, full.layer), (Some(Cause::Outage), None, None));
    assert!(!timeout.is_alike(&event(Degraded::StoreError)), "for other reasons");
}

/// Statistics and alerts go by it. Woken by any other cause in the list.
#[test]
fn a_caller_is_to_blame_for_limits_ladders_and_logins() {
    let blamed: Vec<&str> = Cause::ALL.into_iter().filter(|cause| cause.blames_caller()).map(Cause::name).collect();
    assert_eq!(blamed, ["limit", "missing", "ladder", "login"]);
    assert!(Cause::ALL.into_iter().all(|cause| Cause::named(cause.name()) == Some(cause)));
    // The same list in SQL, by which the Worker counts.
    let others: Vec<String> =
        Cause::ALL.into_iter().filter(|cause| !cause.blames_caller()).map(|cause| format!("'{cause}'")).collect();
    assert!(sql::STATS.contains(&format!("NOT IN ({})", others.join(", "))), "{others:?}");
}
