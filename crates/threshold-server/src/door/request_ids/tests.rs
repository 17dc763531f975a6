//! Tests what is remembered under the ids of requests, for how long, and within which bounds.

use std::pin::pin;
use std::task::{Context, Poll, Waker};

use std::sync::atomic::Ordering;

use bytes::Bytes;
use http::{HeaderName, HeaderValue};

use super::cache::{DoorBytes, EXPECTED_ANSWER, MAX_REPEATS, OVERHEAD, PROXY_SHARE};
use super::*;

/// The number of shards, over which entries are spread.
const SHARDS: usize = 16;
const MIB: usize = 1 << 20;

fn answered(body: &'static str, charged: bool) -> EncodedAnswer {
    EncodedAnswer { body: Bytes::from_static(body.as_bytes()), charged, closed: false, generation: 1 }
}

/// The key of an id of a verb. The content is always the same.
fn key_of(ids: &RequestIds, verb: &str, id: &str) -> RequestKey {
    RequestKey { id: ids.digest(&(verb, id)), content: ids.digest(&"the same") }
}

fn try_run(ids: &RequestIds, key: RequestKey, second: u64, answer: EncodedAnswer) -> Result<Bytes, RequestIdError> {
    let now = || Timestamp::from_secs(second);
    let mut running = pin!(ids.run::<RequestIdError>(key, now, None, async { Ok(answer) }));
    match running.as_mut().poll(&mut Context::from_waker(Waker::noop())) {
        Poll::Ready(answer) => answer.map(|answer| answer.body),
        Poll::Pending => panic!("no other request has this id"),
    }
}

fn ask(ids: &RequestIds, id: &str, second: u64, body: &'static str, charged: bool) -> Bytes {
    try_run(ids, key_of(ids, "check", id), second, answered(body, charged)).unwrap()
}

fn used(ids: &RequestIds) -> DoorBytes {
    DoorBytes { api: ids.cache.api_bytes.load(Ordering::Relaxed), proxy: ids.cache.proxy_bytes.load(Ordering::Relaxed) }
}

/// Counts the bytes of all entries.
fn counted(ids: &RequestIds) -> DoorBytes {
    let mut counted = DoorBytes::default();
    for shard in &ids.cache.shards {
        shard.lock().unwrap().answers.values().for_each(|cached| counted.add(cached.size()));
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

/// The same id for a different request once got the first one's answer, which may have been another user's.
///
/// Woken by: leaving out the comparison of contents in `is_reused`, `in_progress` there, and each `Reused` in `reserve_list`.
#[tokio::test]
async fn an_id_of_a_different_request_is_refused() {
    let ids = RequestIds::new(MIB);
    let at = Timestamp::from_secs;
    let own = key_of(&ids, "check", "a");
    let other = RequestKey { content: ids.digest(&"another"), ..own };
    let third = key_of(&ids, "check", "b");
    assert_eq!(try_run(&ids, own, 0, answered("first", true)).unwrap(), "first");
    assert_eq!(try_run(&ids, other, 59, answered("second", true)), Err(RequestIdError::Reused));
    assert_eq!(ids.reserve_list(&[third, other], at(59)).err(), Some((Some(1), RequestIdError::Reused)));
    assert_eq!(try_run(&ids, own, 59, answered("third", true)).unwrap(), "first");
    // The id is free again after its minute, and after a denial.
    assert_eq!(try_run(&ids, other, 60, answered("denied", false)).unwrap(), "denied");
    let mut deciding = Box::pin(ids.run::<RequestIdError>(own, || at(61), None, std::future::pending()));
    assert!(deciding.as_mut().poll(&mut Context::from_waker(Waker::noop())).is_pending());
    assert_eq!(try_run(&ids, other, 61, answered("second", true)), Err(RequestIdError::Reused));
    drop(deciding);
    assert_eq!(try_run(&ids, other, 61, answered("second", true)).unwrap(), "second");
    // A list that uses one id for two requests is refused before any of it is decided.
    let list = [third, RequestKey { content: ids.digest(&"another"), ..third }];
    assert_eq!(ids.reserve_list(&list, at(61)).err(), Some((Some(1), RequestIdError::Reused)));
    assert!(ids.reserve_list(&[third, third], at(61)).is_ok());
}

#[test]
fn a_denial_is_decided_again() {
    let ids = RequestIds::new(MIB);
    assert_eq!(ask(&ids, "a", 0, "denied", false), "denied");
    assert_eq!(ask(&ids, "a", 1, "allowed", true), "allowed");
    assert_eq!(ask(&ids, "a", 2, "again", true), "allowed");
}

#[test]
fn each_verb_has_ids_of_its_own() {
    let ids = RequestIds::new(MIB);
    ask(&ids, "a", 0, "checked", true);
    let record = key_of(&ids, "record", "a");
    assert_eq!(try_run(&ids, record, 1, answered("recorded", true)).unwrap(), "recorded");
}

/// The second waits for the first. When the first is dropped, the second decides, and the third gets its answer.
#[tokio::test]
async fn a_repeat_waits_for_the_first_and_decides_if_that_is_cancelled() {
    let ids = RequestIds::new(MIB);
    let (now, a) = (|| Timestamp::from_secs(1), key_of(&ids, "check", "a"));
    let mut first = Box::pin(ids.run::<RequestIdError>(a, now, None, std::future::pending()));
    let mut second = pin!(ids.run::<RequestIdError>(a, now, None, async { Ok(answered("second", true)) }));
    let mut third = pin!(ids.run::<RequestIdError>(a, now, None, async { Ok(answered("third", true)) }));
    let mut context = Context::from_waker(Waker::noop());
    assert!(first.as_mut().poll(&mut context).is_pending());
    assert!(second.as_mut().poll(&mut context).is_pending());
    assert!(third.as_mut().poll(&mut context).is_pending());
    drop(first);
    assert_eq!(second.await.unwrap().body, "second");
    assert_eq!(third.await.unwrap().body, "second");
    assert!(ids.cache.shards.iter().all(|shard| shard.lock().unwrap().in_progress.is_empty()));
}

/// The bound is in bytes: of large answers fewer fit. None is forgotten before its minute is over. A request that finds no
/// space is refused and not decided, and fits again later.
///
/// Woken by: leaving out `try_reserve` in `reserve`; `remove_expired` there; `release` of what was removed or replaced; and by
/// not copying in `remember`, so that an answer keeps the buffer it was written to.
#[test]
fn memory_is_bounded_in_bytes_and_no_answer_is_forgotten_within_its_minute() {
    let mut remembered = [0, 0];
    for (size, remembered) in [100, 10_000].into_iter().zip(&mut remembered) {
        let ids = RequestIds::new(MIB);
        let large = || {
            // A buffer that is much larger than the answer, as the encoder's is.
            let mut body = Vec::with_capacity(10 * size);
            body.resize(size, b'x');
            EncodedAnswer { body: body.into(), ..answered("", true) }
        };
        for number in 0..100_000 {
            let id = key_of(&ids, "check", &number.to_string());
            if try_run(&ids, id, 1, large()).is_err() {
                *remembered = number;
                break;
            }
            // One answer may exceed its reservation, so the bound may be passed by the last one.
            assert!(used(&ids).api <= MIB - MIB / PROXY_SHARE + size);
        }
        assert_eq!(used(&ids).api, counted(&ids).api);
        // The last second of the minute: an answer that was evicted would be decided again here.
        for number in 0..*remembered {
            assert_eq!(ask(&ids, &number.to_string(), 60, "again", true).len(), size);
        }
        // The refused one is decided once there is space.
        let refused = key_of(&ids, "check", &remembered.to_string());
        assert_eq!(try_run(&ids, refused, 60, large()), Err(RequestIdError::Full));
        assert_eq!(try_run(&ids, refused, 61, answered("late", true)).unwrap(), "late");
        assert_eq!((counted(&ids).api, used(&ids).api), (4 + OVERHEAD, counted(&ids).api));
    }
    let [small, large] = remembered;
    assert!(small > 15 * large && large > 80, "{small} small ones, {large} large ones");
}

/// The space for an answer is released after a denial, an error and a cancelled request.
#[tokio::test]
async fn space_is_released_if_nothing_is_remembered() {
    let ids = RequestIds::new(MIB);
    let now = || Timestamp::from_secs(1);
    ask(&ids, "denied", 1, "denied", false);
    let failed = ids
        .run::<RequestIdError>(key_of(&ids, "check", "failed"), now, None, async { Err(RequestIdError::Full) })
        .await;
    assert_eq!((failed.err(), used(&ids).api), (Some(RequestIdError::Full), 0));
    let left = key_of(&ids, "check", "left");
    // Boxed, so that it can be dropped before the end of the test.
    let mut given_up = Box::pin(ids.run::<RequestIdError>(left, now, None, std::future::pending()));
    assert!(given_up.as_mut().poll(&mut Context::from_waker(Waker::noop())).is_pending());
    assert_eq!(used(&ids).api, EXPECTED_ANSWER);
    drop(given_up);
    assert_eq!(used(&ids).api, 0);
}

/// A list has space for all of its answers before any of it is charged, and needs none for answers that are known.
///
/// Woken by: leaving out `is_answered` or `EXPIRY_MARGIN` in `reserve_list`; and by leaving out `split` in `run`.
#[tokio::test]
async fn a_list_gets_space_for_all_of_its_answers_or_is_refused() {
    // Space for three answers, besides the share of proxies.
    let ids = RequestIds::new(3 * EXPECTED_ANSWER * PROXY_SHARE / (PROXY_SHARE - 1));
    let at = Timestamp::from_secs;
    let list = |verb: &str, names: &[&str]| names.iter().map(|id| key_of(&ids, verb, id)).collect::<Vec<_>>();
    let four = list("check", &["a", "b", "c", "d"]);
    assert_eq!(ids.reserve_list(&four, at(1)).err(), Some((None, RequestIdError::Full)));
    let three = list("check", &["a", "b", "c"]);
    let mut room = ids.reserve_list(&three, at(1)).unwrap();
    assert_eq!(try_run(&ids, key_of(&ids, "check", "other"), 1, answered("x", true)), Err(RequestIdError::Full));
    for id in &three {
        let decide = async { Ok(answered("x", true)) };
        ids.run::<RequestIdError>(*id, || at(1), Some(&mut room), decide).await.unwrap();
    }
    drop(room);
    assert_eq!(used(&ids).api, counted(&ids).api);
    // A repeat of the list needs no space, unless its answers are about to expire.
    let full = ids.reserve_list(&list("record", &["d", "e"]), at(1)).unwrap();
    assert!(ids.reserve_list(&three, at(50)).is_ok());
    assert!(ids.reserve_list(&three, at(51)).is_err());
    drop(full);
}

#[test]
fn a_proxy_gets_the_same_answer_for_a_minute() {
    let ids = RequestIds::new(MIB);
    let (at, asked) = (Timestamp::from_secs, proxied(&ids, 1));
    assert_eq!(ids.proxy_answer(asked, at(0)), None);
    ids.remember_proxy_answer(asked, at(0), &fields("2"));
    assert_eq!(ids.proxy_answer(asked, at(59)), Some(fields("2")));
    assert_eq!(ids.proxy_answer(asked, at(60)), None);
}

/// nginx redirects a request at most ten times. Without a bound, a client that can choose the id would be free for a minute.
#[test]
fn a_proxy_gets_the_same_answer_ten_times() {
    let ids = RequestIds::new(MIB);
    let (now, asked) = (Timestamp::from_secs(1), proxied(&ids, 1));
    ids.remember_proxy_answer(asked, now, &fields("2"));
    for _ in 0..MAX_REPEATS {
        assert_eq!(ids.proxy_answer(asked, now), Some(fields("2")));
    }
    assert_eq!((ids.proxy_answer(asked, now), ids.proxy_answer(asked, now)), (None, None));
    ids.remember_proxy_answer(asked, now, &fields("1"));
    assert_eq!(ids.proxy_answer(asked, now), Some(fields("1")));
}

/// Woken by: leaving out `evict` in `remember_proxy_answer`, the release of what was replaced, and `retain` in `insert`.
#[test]
fn the_oldest_answers_to_proxies_are_evicted() {
    let most = 16 * MIB;
    let ids = RequestIds::new(most);
    for number in 0..40_000 {
        // Twice, as after an answer that was repeated too often: the second replaces the first.
        for _ in 0..2 {
            ids.remember_proxy_answer(proxied(&ids, number), Timestamp::from_secs(1), &fields("2"));
        }
        assert!(used(&ids).proxy <= most);
    }
    assert_eq!(used(&ids).proxy, counted(&ids).proxy);
    let kept: usize = ids.cache.shards.iter().map(|shard| shard.lock().unwrap().answers.len()).sum();
    assert!(kept > 30_000, "{kept}");
    assert_eq!(ids.proxy_answer(proxied(&ids, 0), Timestamp::from_secs(1)), None);
    assert!(ids.proxy_answer(proxied(&ids, 39_999), Timestamp::from_secs(1)).is_some());
    // An answer that is replaced many times leaves few places in the queue, and none once their minute is over.
    for micros in 0..10_000 {
        ids.remember_proxy_answer(proxied(&ids, 39_999), Timestamp::from_micros(2_000_000 + micros), &fields("2"));
    }
    // The fullest shard: one id is always in the same one, and an average would hide it.
    let places = || ids.cache.shards.iter().map(|shard| shard.lock().unwrap().proxy_order.len()).max().unwrap();
    assert!(places() < 2 * kept / SHARDS + 2_000, "{}", places());
    for number in 0..1_000 {
        ids.remember_proxy_answer(proxied(&ids, number), Timestamp::from_secs(100), &fields("2"));
    }
    assert_eq!((places() < 200, counted(&ids).proxy), (true, used(&ids).proxy));
}

/// Both doors share one bound. An answer of the API is never evicted for a proxy's.
///
/// Woken by: leaving out `evict` in `reserve` or in `remember`, or `PROXY_SHARE` in `try_reserve`.
#[test]
fn the_api_evicts_answers_to_proxies_but_leaves_them_their_share() {
    let ids = RequestIds::new(MIB);
    let now = Timestamp::from_secs(1);
    for number in 0..10_000 {
        ids.remember_proxy_answer(proxied(&ids, number), now, &fields("2"));
    }
    assert!(used(&ids).proxy > MIB - 1_000 && used(&ids).proxy <= MIB);
    let total = || used(&ids).api + used(&ids).proxy;
    // The space of a list, and an answer that is larger than its reservation.
    let list: Vec<RequestKey> = (0..100).map(|number| key_of(&ids, "record", &number.to_string())).collect();
    let room = ids.reserve_list(&list, now).unwrap();
    assert!(total() <= MIB, "{}", total());
    drop(room);
    for number in 10_000..12_000 {
        ids.remember_proxy_answer(proxied(&ids, number), now, &fields("2"));
    }
    let large = EncodedAnswer { body: vec![b'x'; 20_000].into(), ..answered("", true) };
    assert!(try_run(&ids, key_of(&ids, "check", "large"), 1, large).is_ok() && total() <= MIB, "{}", total());
    // Until the API has used up its part. The proxies must still have theirs then.
    let called = (0..).find(|number: &usize| {
        let id = key_of(&ids, "check", &number.to_string());
        let refused = try_run(&ids, id, 1, answered("x", true)).is_err();
        assert!(total() <= MIB, "{}", total());
        refused
    });
    let DoorBytes { api, proxy } = used(&ids);
    assert!(api > MIB * 7 / 8 - EXPECTED_ANSWER && proxy > MIB / 8 - EXPECTED_ANSWER, "{api} and {proxy}");
    for number in 10_000..20_000 {
        ids.remember_proxy_answer(proxied(&ids, number), now, &fields("2"));
        assert!(ids.proxy_answer(proxied(&ids, number), now).is_some());
    }
    for number in 0..called.unwrap() {
        assert_eq!(ask(&ids, &number.to_string(), 1, "again", true), "x");
    }
    assert_eq!((used(&ids).api, used(&ids).proxy), (counted(&ids).api, counted(&ids).proxy));
}
