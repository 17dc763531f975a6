//! Tests of which addresses are counted, which have alerts of their own, and how few messages there are about them.

use super::super::addresses::MAX_ADDRESSES;
use super::*;

/// Woken by pushing out the oldest address, or by one with fewer blocks than the new one being kept.
#[test]
fn a_flood_of_addresses_pushes_out_no_busy_one() {
    let (mut book, policy) = (AlertBook::default(), policy(""));
    for number in 0..12 * u64::try_from(MAX_ADDRESSES).unwrap() {
        let now = at(number / 10);
        book.add(&event(i64::try_from(number / 10).unwrap(), &by(&format!("2001:db8::{number:x}"), 1)), now);
        // So seldom that the table is filled by others in between, and so often that it is not.
        if number > 20_000 && number % 2_500 == 0 {
            book.add(&event(i64::try_from(number / 10).unwrap(), &by("busy", 1)), now);
        }
    }
    let told = book.judge(&policy, at(9_830));
    assert_eq!(changes(&told), [("ip_blocks", Some("busy"), Raised(Warning))]);
    let (entries, order, _) = book.addresses.sizes();
    assert_eq!((entries, order), (MAX_ADDRESSES, MAX_ADDRESSES));
    book.judge(&policy, at(9_830 + 121_000));
    assert_eq!(book.addresses.sizes(), (0, 0, 0), "what is over is forgotten");
}

/// A table full of addresses with some blocks each, and two that take turns. Fails if a new address begins at the lowest rank: each
/// of the two would push out the other.
#[test]
fn addresses_that_take_turns_are_both_counted() {
    let (mut book, policy) = (AlertBook::default(), policy(""));
    for number in 0..MAX_ADDRESSES {
        for _ in 0..3 {
            book.add(&event(0, &by(&format!("2001:db8::{number:x}"), 1)), at(0));
        }
    }
    for _ in 0..25 {
        book.add(&event(1_000, &by("one", 1)), at(1_000));
        book.add(&event(1_000, &by("two", 1)), at(1_000));
    }
    let notices = book.judge(&policy, at(1_000));
    let mut told = changes(&notices);
    told.sort_unstable_by_key(|(_, key, _)| *key);
    assert_eq!(told, [("ip_blocks", Some("one"), Raised(Warning)), ("ip_blocks", Some("two"), Raised(Warning))]);
}

#[test]
fn an_address_has_a_bounded_history_however_short_the_period_is() {
    for per in ["1ms", "1s", "10s", "59s", "min", "90s", "h", "30day"] {
        let policy = policy(&format!("ip_blocks = {{ per = '{per}', warning = 1000000, critical = 1000000 }}"));
        let mut book = AlertBook::default();
        book.judge(&policy, at(0));
        for tick in 0..2_000_i64 {
            // From 10 ms to days between them.
            let millis = tick * 10 * if per == "30day" { 100_000 } else { 20 };
            book.add(&event(millis, &by("::1", 1)), at(u64::try_from(millis).unwrap()));
            book.judge(&policy, at(u64::try_from(millis).unwrap()));
        }
        let (.., longest) = book.addresses.sizes();
        assert!(longest <= Scale::MAX_COUNTS, "{per}: {longest}");
    }
}

/// Of an attack by many addresses, five have an alert of their own, and the others are told together: once, and once when it is over.
///
/// Woken by an end that does not wait for `QUIET`, and by alerts of their own while others are told together.
#[test]
fn an_attack_by_many_addresses_is_told_together() {
    let (mut book, policy) = (AlertBook::default(), policy(""));
    for number in 0..150 {
        book.add(&event(0, &by(&format!("10.0.0.{number}"), 20 + number)), at(0));
    }
    let told = book.judge(&policy, at(0));
    let of_group =
        |notice: &Notice| notice.group.clone().map(|group| (group.addresses, group.largest.map(|it| it.to_string())));
    assert_eq!(told.iter().map(|notice| notice.count).collect::<Vec<_>>(), [169, 168, 167, 166, 165, 164]);
    assert_eq!(told.iter().filter_map(of_group).collect::<Vec<_>>(), [(145, Some("10.0.0.144".to_owned()))]);
    assert_eq!((book.raised().count(), book.recent().count()), (6, 6));
    // Others go on for half an hour, each for a minute.
    let mut later = Vec::new();
    for minute in 1..30_i64 {
        let (millis, now) = (minute * 60_000, u64::try_from(minute).unwrap() * 60_000);
        (0..40).for_each(|number| book.add(&event(millis, &by(&format!("10.1.{minute}.{number}"), 30)), at(now)));
        later.extend(book.judge(&policy, at(now)));
    }
    let own: Vec<_> = later.iter().filter(|notice| notice.group.is_none()).map(|notice| notice.change).collect();
    assert_eq!(own, [Resolved(Critical); 5], "the five are over, and no others have alerts of their own");
    assert_eq!(later.len(), 5, "it has not grown");
    let end = 29 * 60_000 + 600_000;
    for millis in (29 * 60_000..end + 60_000).step_by(1_000) {
        later.extend(book.judge(&policy, at(millis)));
    }
    let over = &later[5];
    assert_eq!(
        (later.len(), over.change, of_group(over)),
        (6, Resolved(Critical), Some((145, Some("10.1.29.39".to_owned()))))
    );
    assert!(over.at >= at(end) && over.peak == 164, "{over:?}");
    assert_eq!(book.raised().count(), 0);
}

/// Woken by a notice of growth that does not wait, and by one without growth.
#[test]
fn growth_is_told_once_in_ten_minutes() {
    let (mut book, policy) = (AlertBook::default(), policy(""));
    let mut told = Vec::new();
    for second in (0..3_600_i64).step_by(10) {
        let (millis, now) = (second * 1_000, u64::try_from(second).unwrap() * 1_000);
        // Ever more addresses, up to 90.
        let many = (0..second / 40).map(|number| event(millis, &by(&format!("10.0.0.{number}"), 10)));
        many.for_each(|event| book.add(&event, at(now)));
        told.extend(book.judge(&policy, at(now)));
    }
    let together: Vec<_> = told.iter().filter(|notice| notice.key.is_none()).collect();
    let figures: Vec<_> =
        together.iter().map(|notice| (notice.group.as_ref().unwrap().addresses, notice.change)).collect();
    let times: Vec<_> = together.windows(2).map(|two| two[1].at.since(two[0].at).secs_ceil()).collect();
    assert_eq!(figures, [(1, Raised(Warning)), (16, Raised(Warning)), (32, Raised(Warning)), (64, Raised(Warning))]);
    assert!(times.iter().all(|seconds| *seconds >= 600), "{times:?}");
}

/// Operators had a message about each of thousands of addresses, for minutes after the burst was over: whenever one was resolved,
/// its place was taken by the next.
///
/// Fails if `busy` asks for blocks in any period that is judged, and not in the last one.
#[test]
fn a_burst_that_is_over_is_not_told_late() {
    let (mut book, policy) = (AlertBook::default(), policy(""));
    let mut told = Vec::new();
    // Of 50 seconds, so that the first addresses are over before the last ones.
    for number in 0..5_000 {
        book.add(
            &event(number * 10, &by(&format!("2001:db8::{number:x}"), 30)),
            at(u64::try_from(number * 10).unwrap()),
        );
        if number % 25 == 0 {
            told.extend(book.judge(&policy, at(u64::try_from(number * 10).unwrap())));
        }
    }
    assert_eq!(told.len(), 6);
    for millis in (50_000..800_000).step_by(250) {
        // Some of them go on a little, below the warning.
        if millis % 10_000 == 0 {
            let few = (0..50).map(|number| event(millis, &by(&format!("2001:db8::{number:x}"), 1)));
            few.for_each(|event| book.add(&event, at(u64::try_from(millis).unwrap())));
        }
        told.extend(book.judge(&policy, at(u64::try_from(millis).unwrap())));
    }
    let (over, raised): (Vec<_>, Vec<_>) = told.iter().partition(|notice| notice.is_resolved());
    assert_eq!((raised.len(), over.len(), book.raised().count()), (6, 6, 0));
    let keys = |notices: &[&Notice]| notices.iter().map(|notice| notice.key.clone()).collect::<BTreeSet<_>>();
    assert_eq!(keys(&raised), keys(&over), "each is resolved once");
}

/// Twenty addresses that were critical kept one with a thousand times as many blocks from being raised.
///
/// Fails without alerts of much heavier addresses, or if these have no bound.
#[test]
fn decoys_leave_room_for_an_attack() {
    let (mut book, policy) = (AlertBook::default(), policy(""));
    (0..200).for_each(|number| book.add(&event(0, &by(&format!("10.0.0.{number}"), 100)), at(0)));
    assert_eq!(book.judge(&policy, at(0)).len(), 6);
    book.add(&event(1_000, &by("203.0.113.7", 900)), at(1_000));
    assert_eq!(book.judge(&policy, at(1_000)), [], "it is one of the others");
    let grown = book.raised().find(|told| told.key.is_none()).unwrap().clone();
    assert_eq!((grown.count, grown.group.unwrap().largest.as_deref()), (900, Some("203.0.113.7")));
    book.add(&event(2_000, &by("203.0.113.8", 100_000)), at(2_000));
    let told = book.judge(&policy, at(2_000));
    assert_eq!(changes(&told), [("ip_blocks", Some("203.0.113.8"), Raised(Critical))]);
    // Each ten times as heavy as the one before.
    let heavier = |number: u32| event(3_000, &by(&format!("203.0.113.{}", 9 + number), 10_u64.pow(6 + number)));
    let told: Vec<usize> = (0..6)
        .map(|number| {
            book.add(&heavier(number), at(3_000));
            book.judge(&policy, at(3_000)).len()
        })
        .collect();
    assert_eq!(told, [1, 1, 1, 1, 0, 0]);
}

/// An address that grew slowly behind five small ones was never named: each step raised the peak that it was compared with.
///
/// Woken by comparing with the peak of the alert of all others.
#[test]
fn an_address_that_grows_slowly_gets_an_alert_of_its_own() {
    let (mut book, policy) = (AlertBook::default(), policy(""));
    (0..5).for_each(|number| book.add(&event(0, &by(&format!("10.0.0.{number}"), 21)), at(0)));
    assert_eq!(book.judge(&policy, at(0)).len(), 5);
    book.add(&event(0, &by("10.0.0.9", 101)), at(0));
    book.judge(&policy, at(0));
    let told = (1..40).find_map(|step| {
        let now = at(step * 250);
        book.add(&event(i64::try_from(step * 250).unwrap(), &by("203.0.113.7", 250)), now);
        book.judge(&policy, now).into_iter().find(|notice| notice.key.as_deref() == Some("203.0.113.7"))
    });
    assert!(told.is_some());
}

/// An event of an address with a count, or a wait.
fn any_traffic() -> impl Strategy<Value = (u16, u64, u64)> {
    let count = prop_oneof![4 => Just(25_u64), 2 => Just(120), 1 => 100..3_000_u64, 1 => (0..18_u32).prop_map(|zeros| 10_u64.pow(zeros))];
    let wait = prop_oneof![6 => Just(0_u64), 4 => 0..130_u64, 1 => 500..1_000_u64];
    (0..60_u16, count, wait)
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(48))]

    /// Whatever the traffic is, an operator has a bounded number of messages about addresses. Ten begin in an hour, and each has a
    /// warning, a critical notice and an end; ten more may be raised before. Several addresses together have an episode in ten minutes.
    ///
    /// Woken by `admit` without the hour, by `QUIET` of a minute.
    #[test]
    fn notices_about_addresses_are_few_in_any_hour(
        traffic in proptest::collection::vec(any_traffic(), 1..200),
        rotates in any::<bool>(),
    ) {
        let policy = policy("edge_blocks = 'off'");
        let mut book = AlertBook::default();
        let (mut now, mut told) = (0_u64, Vec::<Notice>::new());
        for (number, (address, count, wait)) in traffic.into_iter().enumerate() {
            let address = if rotates { format!("2001:db8::{number:x}") } else { format!("10.0.0.{address}") };
            book.add(&event(i64::try_from(now).unwrap(), &by(&address, count)), at(now));
            told.extend(book.judge(&policy, at(now)));
            for _ in 0..wait / 10 {
                now += 10_000;
                told.extend(book.judge(&policy, at(now)));
            }
            prop_assert!(book.raised().count() <= together::MAX_OWN + together::MAX_HEAVIER + 1);
        }
        for (first, notice) in told.iter().enumerate() {
            let hour: Vec<&Notice> = told[first..].iter().take_while(|other| other.at.since(notice.at) < Span::HOUR).collect();
            let (own, group): (Vec<&Notice>, Vec<&Notice>) = hour.iter().partition(|notice| notice.group.is_none());
            let begin = own.iter().filter(|notice| notice.at == notice.since).map(|notice| notice.id());
            let begin = begin.collect::<BTreeSet<_>>().len();
            prop_assert!(begin <= 10 && own.len() <= 10 * 3 + 10 * 2, "{} of {}", begin, own.len());
            // Seven episodes, each with a warning, a critical notice and an end, and six notices of growth.
            prop_assert!(group.len() <= 7 * 3 + 6, "{group:?}");
        }
        // Each end belongs to a beginning.
        let mut open = BTreeMap::new();
        for notice in &told {
            let is_due = match notice.is_resolved() {
                true => open.remove(&notice.id()).is_some(),
                false => open.insert(notice.id(), notice.level()) < Some(notice.level()) || notice.group.is_some(),
            };
            prop_assert!(is_due, "{:?}", notice);
        }
    }
}
