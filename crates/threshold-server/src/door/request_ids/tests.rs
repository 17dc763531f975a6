//! What is remembered by the ids of requests, for how long, and within which bounds.

use std::pin::pin;
use std::task::{Context, Poll, Waker};

use super::*;

const MIB: usize = 1 << 20;

fn answered(body: &'static str, charged: bool) -> Answered {
    Answered { body: Bytes::from_static(body.as_bytes()), charged, closed: false, generation: 1 }
}

/// An id of a verb, for a request that is always the same.
fn named(ids: &RequestIds, verb: &str, id: &str) -> Named {
    Named { id: ids.digest(&(verb, id)), question: ids.digest(&"the same") }
}

fn try_run(ids: &RequestIds, named: Named, second: u64, answer: Answered) -> Result<Bytes, Refused> {
    let now = || Timestamp::from_secs(second);
    let mut running = pin!(ids.run::<Refused>(named, now, None, async { Ok(answer) }));
    match running.as_mut().poll(&mut Context::from_waker(Waker::noop())) {
        Poll::Ready(answer) => answer.map(|answer| answer.body),
        Poll::Pending => panic!("nobody else is asking"),
    }
}

fn ask(ids: &RequestIds, id: &str, second: u64, body: &'static str, charged: bool) -> Bytes {
    try_run(ids, named(ids, "check", id), second, answered(body, charged)).unwrap()
}

fn used(ids: &RequestIds) -> Freed {
    Freed { promised: ids.promised.load(Ordering::Relaxed), spare: ids.spare.load(Ordering::Relaxed) }
}

/// What is remembered, counted by hand.
fn counted(ids: &RequestIds) -> Freed {
    let mut counted = Freed::default();
    for shard in &ids.shards {
        shard.lock().unwrap().answers.values().for_each(|known| counted.add(known.freed()));
    }
    counted
}

fn proxied(ids: &RequestIds, number: usize) -> Digest {
    ids.digest(&("auth", number))
}

fn fields(remaining: &'static str) -> HeaderMap {
    [(HeaderName::from_static("x-ratelimit-remaining"), HeaderValue::from_static(remaining))].into_iter().collect()
}

#[test]
fn a_repeat_within_a_minute_gets_the_first_answer() {
    let ids = RequestIds::new(MIB);
    assert_eq!(ask(&ids, "a", 0, "first", true), "first");
    assert_eq!(ask(&ids, "a", 59, "second", true), "first");
    assert_eq!(ask(&ids, "b", 59, "other", true), "other");
    assert_eq!(ask(&ids, "a", 60, "third", true), "third");
    assert_eq!(ask(&ids, "a", 119, "fourth", true), "third");
}

/// The same id for another request was answered as the first, which may have been somebody else's.
///
/// Woken by: leaving out the comparison of questions in `is_reused`, `under_way` there, and each `Reused` in `room_for`.
#[tokio::test]
async fn an_id_of_another_request_is_refused() {
    let ids = RequestIds::new(MIB);
    let at = Timestamp::from_secs;
    let own = named(&ids, "check", "a");
    let other = Named { question: ids.digest(&"another"), ..own };
    let third = named(&ids, "check", "b");
    assert_eq!(try_run(&ids, own, 0, answered("first", true)).unwrap(), "first");
    assert_eq!(try_run(&ids, other, 59, answered("second", true)), Err(Refused::Reused));
    assert_eq!(ids.room_for(&[third, other], at(59)).err(), Some((Some(1), Refused::Reused)));
    assert_eq!(try_run(&ids, own, 59, answered("third", true)).unwrap(), "first");
    // After its minute it is free, and so it is after a denial.
    assert_eq!(try_run(&ids, other, 60, answered("denied", false)).unwrap(), "denied");
    let mut deciding = Box::pin(ids.run::<Refused>(own, || at(61), None, std::future::pending()));
    assert!(deciding.as_mut().poll(&mut Context::from_waker(Waker::noop())).is_pending());
    assert_eq!(try_run(&ids, other, 61, answered("second", true)), Err(Refused::Reused));
    drop(deciding);
    assert_eq!(try_run(&ids, other, 61, answered("second", true)).unwrap(), "second");
    // A list must not use one id for two requests either, before anything of it is decided.
    let list = [third, Named { question: ids.digest(&"another"), ..third }];
    assert_eq!(ids.room_for(&list, at(61)).err(), Some((Some(1), Refused::Reused)));
    assert!(ids.room_for(&[third, third], at(61)).is_ok());
}

#[test]
fn what_was_not_charged_is_decided_again() {
    let ids = RequestIds::new(MIB);
    assert_eq!(ask(&ids, "a", 0, "denied", false), "denied");
    assert_eq!(ask(&ids, "a", 1, "allowed", true), "allowed");
    assert_eq!(ask(&ids, "a", 2, "again", true), "allowed");
}

#[test]
fn a_verb_is_not_another() {
    let ids = RequestIds::new(MIB);
    ask(&ids, "a", 0, "checked", true);
    let record = named(&ids, "record", "a");
    assert_eq!(try_run(&ids, record, 1, answered("recorded", true)).unwrap(), "recorded");
}

/// The second waits for the first; the first is given up, and the second decides; the third waits for that.
#[tokio::test]
async fn a_repeat_waits_for_the_first_and_takes_over_where_it_leaves() {
    let ids = RequestIds::new(MIB);
    let (now, a) = (|| Timestamp::from_secs(1), named(&ids, "check", "a"));
    let mut first = Box::pin(ids.run::<Refused>(a, now, None, std::future::pending()));
    let mut second = pin!(ids.run::<Refused>(a, now, None, async { Ok(answered("second", true)) }));
    let mut third = pin!(ids.run::<Refused>(a, now, None, async { Ok(answered("third", true)) }));
    let mut context = Context::from_waker(Waker::noop());
    assert!(first.as_mut().poll(&mut context).is_pending());
    assert!(second.as_mut().poll(&mut context).is_pending());
    assert!(third.as_mut().poll(&mut context).is_pending());
    drop(first);
    assert_eq!(second.await.unwrap().body, "second");
    assert_eq!(third.await.unwrap().body, "second");
    assert!(ids.shards.iter().all(|shard| shard.lock().unwrap().under_way.is_empty()));
}

/// Large answers are fewer. None is forgotten before its minute is over: a request that comes when it is full is refused,
/// decides nothing, and finds room again later.
///
/// Woken by: leaving out `promise` in `room`; `sweep` there; `give_back` of what was swept or replaced; and by copying
/// nothing in `remember`, so that an answer keeps what it was written into.
#[test]
fn memory_has_a_bound_in_bytes_and_nothing_is_forgotten_before_its_time() {
    let mut remembered = [0, 0];
    for (size, remembered) in [100, 10_000].into_iter().zip(&mut remembered) {
        let ids = RequestIds::new(MIB);
        let large = || {
            let mut body = Vec::with_capacity(10 * size);
            body.resize(size, b'x');
            Answered { body: body.into(), ..answered("", true) }
        };
        for number in 0..100_000 {
            let id = named(&ids, "check", &number.to_string());
            if try_run(&ids, id, 1, large()).is_err() {
                *remembered = number;
                break;
            }
            assert!(used(&ids).promised <= MIB - MIB / PARTS + size);
        }
        assert_eq!(used(&ids).promised, counted(&ids).promised);
        for number in 0..*remembered {
            assert_eq!(ask(&ids, &number.to_string(), 60, "again", true).len(), size);
        }
        // The one that was refused was not decided, and is decided when there is room.
        let refused = named(&ids, "check", &remembered.to_string());
        assert_eq!(try_run(&ids, refused, 60, large()), Err(Refused::NoRoom));
        assert_eq!(try_run(&ids, refused, 61, answered("late", true)).unwrap(), "late");
        assert_eq!((counted(&ids).promised, used(&ids).promised), (4 + OVERHEAD, counted(&ids).promised));
    }
    let [small, large] = remembered;
    assert!(small > 15 * large && large > 80, "{small} small ones, {large} large ones");
}

/// Whatever becomes of a request, the room for its answer is given back or used.
#[tokio::test]
async fn room_is_given_back_where_nothing_is_remembered() {
    let ids = RequestIds::new(MIB);
    let now = || Timestamp::from_secs(1);
    ask(&ids, "denied", 1, "denied", false);
    let failed = ids.run::<Refused>(named(&ids, "check", "failed"), now, None, async { Err(Refused::NoRoom) }).await;
    assert_eq!((failed.err(), used(&ids).promised), (Some(Refused::NoRoom), 0));
    let left = named(&ids, "check", "left");
    let mut given_up = Box::pin(ids.run::<Refused>(left, now, None, std::future::pending()));
    assert!(given_up.as_mut().poll(&mut Context::from_waker(Waker::noop())).is_pending());
    assert_eq!(used(&ids).promised, EXPECTED);
    drop(given_up);
    assert_eq!(used(&ids).promised, 0);
}

/// A list has room for all of its answers before any of it is charged, and needs none for those that are known.
///
/// Woken by: leaving out the look at `answer` or `SOON` in `room_for`; and by leaving out `split` in `run`.
#[tokio::test]
async fn a_list_has_room_for_all_of_its_answers_or_for_none() {
    // Room for three, beside the part that is the proxies'.
    let ids = RequestIds::new(3 * EXPECTED * PARTS / (PARTS - 1));
    let at = Timestamp::from_secs;
    let list = |verb: &str, names: &[&str]| names.iter().map(|id| named(&ids, verb, id)).collect::<Vec<_>>();
    let four = list("check", &["a", "b", "c", "d"]);
    assert_eq!(ids.room_for(&four, at(1)).err(), Some((None, Refused::NoRoom)));
    let three = list("check", &["a", "b", "c"]);
    let mut room = ids.room_for(&three, at(1)).unwrap();
    assert_eq!(try_run(&ids, named(&ids, "check", "other"), 1, answered("x", true)), Err(Refused::NoRoom));
    for id in &three {
        let decide = async { Ok(answered("x", true)) };
        ids.run::<Refused>(*id, || at(1), Some(&mut room), decide).await.unwrap();
    }
    drop(room);
    assert_eq!(used(&ids).promised, counted(&ids).promised);
    // A repeat of the list needs no room, unless its answers are about to be forgotten.
    let full = ids.room_for(&list("record", &["d", "e"]), at(1)).unwrap();
    assert!(ids.room_for(&three, at(50)).is_ok());
    assert!(ids.room_for(&three, at(51)).is_err());
    drop(full);
}

#[test]
fn a_proxy_gets_the_same_answer_for_a_minute() {
    let ids = RequestIds::new(MIB);
    let (at, asked) = (Timestamp::from_secs, proxied(&ids, 1));
    assert_eq!(ids.repeat(asked, at(0)), None);
    ids.keep(asked, at(0), &fields("2"));
    assert_eq!(ids.repeat(asked, at(59)), Some(fields("2")));
    assert_eq!(ids.repeat(asked, at(60)), None);
}

/// As often as nginx redirects one request, and no oftener: an id that a client chose would else be free for a minute.
#[test]
fn a_proxy_is_answered_again_ten_times() {
    let ids = RequestIds::new(MIB);
    let (now, asked) = (Timestamp::from_secs(1), proxied(&ids, 1));
    ids.keep(asked, now, &fields("2"));
    for _ in 0..MAX_REPEATS {
        assert_eq!(ids.repeat(asked, now), Some(fields("2")));
    }
    assert_eq!((ids.repeat(asked, now), ids.repeat(asked, now)), (None, None));
    ids.keep(asked, now, &fields("1"));
    assert_eq!(ids.repeat(asked, now), Some(fields("1")));
}

/// Woken by: leaving out `evict` in `keep`, the subtraction of what was replaced, and `retain` in `insert`.
#[test]
fn the_oldest_answers_to_proxies_make_room_for_others() {
    let most = 16 * MIB;
    let ids = RequestIds::new(most);
    for number in 0..40_000 {
        // Again, as after an answer that was given too often: it must not count twice.
        for _ in 0..2 {
            ids.keep(proxied(&ids, number), Timestamp::from_secs(1), &fields("2"));
        }
        assert!(used(&ids).spare <= most);
    }
    assert_eq!(used(&ids).spare, counted(&ids).spare);
    let kept: usize = ids.shards.iter().map(|shard| shard.lock().unwrap().answers.len()).sum();
    assert!(kept > 30_000, "{kept}");
    assert_eq!(ids.repeat(proxied(&ids, 0), Timestamp::from_secs(1)), None);
    assert!(ids.repeat(proxied(&ids, 39_999), Timestamp::from_secs(1)).is_some());
    // An answer that is replaced many times has few places, and all are gone with the next that comes after their minute.
    for micros in 0..10_000 {
        ids.keep(proxied(&ids, 39_999), Timestamp::from_micros(2_000_000 + micros), &fields("2"));
    }
    let places = || ids.shards.iter().map(|shard| shard.lock().unwrap().spare.len()).max().unwrap();
    assert!(places() < 2 * kept / SHARDS + 2_000, "{}", places());
    for number in 0..1_000 {
        ids.keep(proxied(&ids, number), Timestamp::from_secs(100), &fields("2"));
    }
    assert_eq!((places() < 200, counted(&ids).spare), (true, used(&ids).spare));
}

/// Both doors share one bound, and what a caller was promised is never forgotten for a proxy.
///
/// Woken by: leaving out `evict` in `room` or in `remember`, or `PARTS` in `promise`.
#[test]
fn callers_take_the_room_of_proxies_but_not_their_share() {
    let ids = RequestIds::new(MIB);
    let now = Timestamp::from_secs(1);
    for number in 0..10_000 {
        ids.keep(proxied(&ids, number), now, &fields("2"));
    }
    assert!(used(&ids).spare > MIB - 1_000 && used(&ids).spare <= MIB);
    let total = || used(&ids).promised + used(&ids).spare;
    // Room that is taken for a list, and an answer that takes more than it was expected to.
    let list: Vec<Named> = (0..100).map(|number| named(&ids, "record", &number.to_string())).collect();
    let room = ids.room_for(&list, now).unwrap();
    assert!(total() <= MIB, "{}", total());
    drop(room);
    for number in 10_000..12_000 {
        ids.keep(proxied(&ids, number), now, &fields("2"));
    }
    let large = Answered { body: vec![b'x'; 20_000].into(), ..answered("", true) };
    assert!(try_run(&ids, named(&ids, "check", "large"), 1, large).is_ok() && total() <= MIB, "{}", total());
    let called = (0..).find(|number: &usize| {
        let id = named(&ids, "check", &number.to_string());
        let refused = try_run(&ids, id, 1, answered("x", true)).is_err();
        assert!(total() <= MIB, "{}", total());
        refused
    });
    let Freed { promised, spare } = used(&ids);
    assert!(promised > MIB * 7 / 8 - EXPECTED && spare > MIB / 8 - EXPECTED, "{promised} and {spare}");
    for number in 10_000..20_000 {
        ids.keep(proxied(&ids, number), now, &fields("2"));
        assert!(ids.repeat(proxied(&ids, number), now).is_some());
    }
    for number in 0..called.unwrap() {
        assert_eq!(ask(&ids, &number.to_string(), 1, "again", true), "x");
    }
    assert_eq!((used(&ids).promised, used(&ids).spare), (counted(&ids).promised, counted(&ids).spare));
}
