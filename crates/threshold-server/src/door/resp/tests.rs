//! Tests the door on streams in memory, under clocks that the tests set.

#![expect(clippy::arithmetic_side_effects, reason = "a test that overflows fails")]

use std::sync::Arc;
use std::time::Duration;

use proptest::prelude::*;
use threshold_core::{Policy, Timestamp};
use threshold_limiter::store::memory::MemoryStore;
use threshold_limiter::store::{AnyStore, StoreError};
use threshold_limiter::{ManualClock, ObservedDecision, ObservedOperation, Observer};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _, DuplexStream, duplex};
use tokio::sync::watch;
use tokio::time::Instant;

use super::decode_tests::cases;
use super::{Ended, serve};
use crate::desk::Desk;
use crate::door::test_server::dead_store::DeadStore;
use crate::door::{App, Bounds};
use crate::serve::Tokens;

const TOKEN: &str = "a-caller-token-1";
const PEER: std::net::IpAddr = std::net::IpAddr::V4(std::net::Ipv4Addr::LOCALHOST);
const START: Timestamp = Timestamp::from_secs(1_767_225_600);

fn policy() -> Policy {
    Policy::parse("", &|_| None).unwrap()
}

fn door(desk: Desk, tokens: Tokens) -> Arc<App> {
    Arc::new(App::new(desk, tokens, Bounds::default()))
}

/// A door whose time stands still, until the clock is set.
fn door_at(tokens: Tokens) -> (Arc<App>, Arc<ManualClock>) {
    let clock = Arc::new(ManualClock::new(START));
    (door(Desk::new(policy(), Arc::clone(&clock) as _), tokens), clock)
}

/// A connection in memory, and the server's side of it.
fn connect(door: &Arc<App>) -> (DuplexStream, watch::Sender<bool>, tokio::task::JoinHandle<std::io::Result<Ended>>) {
    let (client, mut server) = duplex(1 << 20);
    let (stop, stopped) = watch::channel(false);
    let door = Arc::clone(door);
    let serving = tokio::spawn(async move { serve(&door, &mut server, PEER, stopped, || ()).await });
    (client, stop, serving)
}

/// Sends parts of a conversation one after another, and returns all replies.
async fn talk(door: &Arc<App>, parts: &[&[u8]]) -> String {
    let (mut client, _stop, serving) = connect(door);
    for part in parts {
        // It fails after a part that has ended the connection.
        let _ = client.write_all(part).await;
        for _ in 0..3 {
            tokio::task::yield_now().await;
        }
    }
    client.shutdown().await.unwrap();
    let mut replies = Vec::new();
    client.read_to_end(&mut replies).await.unwrap();
    serving.await.unwrap().unwrap();
    String::from_utf8(replies).unwrap()
}

/// Sends inline commands, and checks the replies.
#[track_caller]
fn check(door: &Arc<App>, conversation: &[(&str, &str)]) {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    let sent: String = conversation.iter().map(|(command, _)| format!("{command}\r\n")).collect();
    let expected: String = conversation.iter().map(|(_, reply)| format!("{reply}\r\n")).collect();
    // A reply of its own has no line end.
    let expected = expected.replace("NOTHING\r\n", "");
    assert_eq!(runtime.block_on(talk(door, &[sent.as_bytes()])), expected);
}

/// The five integers of a reply.
fn five(limited: i64, limit: i64, remaining: i64, retry_after: i64, reset_after: i64) -> String {
    format!("*5\r\n:{limited}\r\n:{limit}\r\n:{remaining}\r\n:{retry_after}\r\n:{reset_after}")
}

/// What redis-cell answers, computed by its definition: capacity `max_burst` + 1, one unit each `period` / `count` seconds.
///
/// Woken by: a capacity of `max_burst`; `reset_at` of a denial in place of `reset_after`; rounding down.
#[test]
fn a_key_is_limited_as_redis_cell_limits_it() {
    let (door, clock) = door_at(Tokens::default());
    let story = [
        // In milliseconds.
        (0, "CL.THROTTLE user123 15 30 60", [0, 16, 15, -1, 2]),
        (0, "CL.THROTTLE user123 15 30 60 5", [0, 16, 10, -1, 12]),
        // A look charges nothing, and so does what never fits.
        (0, "CL.THROTTLE user123 15 30 60 0", [0, 16, 10, -1, 12]),
        (0, "CL.THROTTLE user123 15 30 60 17", [1, 16, 10, -1, 12]),
        (0, "CL.THROTTLE user123 15 30 60 9223372036854775807", [1, 16, 10, -1, 12]),
        (0, "CL.THROTTLE user123 15 30 60 11", [1, 16, 10, 2, 12]),
        (0, "CL.THROTTLE user123 15 30 60 10", [0, 16, 0, -1, 32]),
        (0, "CL.THROTTLE user123 15 30 60", [1, 16, 0, 2, 32]),
        // A look is never limited, also if nothing is left.
        (0, "CL.THROTTLE user123 15 30 60 0", [0, 16, 0, -1, 32]),
        // A part of a second is rounded up: a client that waits it is admitted.
        (500, "CL.THROTTLE user123 15 30 60", [1, 16, 0, 2, 32]),
        (1_001, "CL.THROTTLE user123 15 30 60", [1, 16, 0, 1, 31]),
        (1_999, "CL.THROTTLE user123 15 30 60", [1, 16, 0, 1, 31]),
        (2_000, "CL.THROTTLE user123 15 30 60", [0, 16, 0, -1, 32]),
        (34_000, "CL.THROTTLE user123 15 30 60", [0, 16, 15, -1, 2]),
        // Another key has a bucket of its own, and one without a burst holds one.
        (34_000, "CL.THROTTLE other 0 1 1", [0, 1, 0, -1, 1]),
        (34_000, "CL.THROTTLE other 0 1 1", [1, 1, 0, 1, 1]),
        (35_000, "cl.throttle other 0 1 1 1", [0, 1, 0, -1, 1]),
        // A third of a second is not rounded, so that three a second are three a second.
        (40_000, "CL.THROTTLE thirds 2 3 1 3", [0, 3, 0, -1, 1]),
        (41_000, "CL.THROTTLE thirds 2 3 1 3", [0, 3, 0, -1, 1]),
        // What was used stays used under another limit. A look leaves it at the rate of 16, by which 1 refills in 2 s, rounded up; a
        // charge converts it to the rate of 100, by which 2 refill in 1.2 s.
        (50_000, "CL.THROTTLE changed 15 30 60", [0, 16, 15, -1, 2]),
        (50_000, "CL.THROTTLE changed 99 100 60 0", [0, 100, 99, -1, 3]),
        (50_000, "CL.THROTTLE changed 99 100 60 1", [0, 100, 98, -1, 2]),
        // An empty key is a key.
        (60_000, "CL.THROTTLE \"\" 0 1 1", [0, 1, 0, -1, 1]),
    ];
    for (at, command, [limited, limit, remaining, retry_after, reset_after]) in story {
        clock.set(START.plus(threshold_core::Span::from_millis(at)));
        check(&door, &[(command, &five(limited, limit, remaining, retry_after, reset_after))]);
    }
}

#[test]
fn a_call_that_means_nothing_is_an_error_and_charges_nothing() {
    let (door, _) = door_at(Tokens::default());
    let usage = "-Cell error: Usage: cl.throttle <key> <max_burst> <count per period> <period> [<quantity>]";
    let parse = |text: &str| format!("-Cell error: Couldn't parse as integer: {text}");
    check(
        &door,
        &[
            ("CL.THROTTLE", usage),
            ("CL.THROTTLE k 1 1", usage),
            ("CL.THROTTLE k 1 1 1 1 1", usage),
            ("CL.THROTTLE k x 1 1", &parse("x")),
            ("CL.THROTTLE k 1 1.5 1", &parse("1.5")),
            ("CL.THROTTLE k 1 1 \"\"", &parse("")),
            ("CL.THROTTLE k 1 1 1 9223372036854775808", &parse("9223372036854775808")),
            ("CL.THROTTLE k \"a\\r\\nb\" 1 1", &parse("a  b")),
            ("CL.THROTTLE k 1 0 1", "-Cell error: Zero rates are not supported"),
            ("CL.THROTTLE k 1 1 0", "-Cell error: Zero rates are not supported"),
            ("CL.THROTTLE k -1 1 1", "-Cell error: max_burst is negative: -1"),
            ("CL.THROTTLE k 1 -1 1", "-Cell error: count is negative: -1"),
            ("CL.THROTTLE k 1 1 -1", "-Cell error: period is negative: -1"),
            ("CL.THROTTLE k 1 1 1 -1", "-Cell error: quantity is negative: -1"),
            ("CL.THROTTLE \"\\xff\" 1 1 1", "-Cell error: the key is not UTF-8"),
            ("CL.THROTTLE k 0 1 1", &five(0, 1, 0, -1, 1)),
        ],
    );
}

proptest! {
    #![proptest_config(ProptestConfig { cases: cases(128), ..ProptestConfig::default() })]

    /// However absurd the figures, there is one reply, and the limits hold.
    ///
    /// Woken by: a capacity of `max_burst`.
    #[test]
    fn any_figures_are_answered(burst in any::<i64>(), count in any::<i64>(), period in any::<i64>(), quantity in any::<i64>()) {
        let (door, _) = door_at(Tokens::default());
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        // Small figures too, of which most are valid.
        for shift in [0, 20, 40, 55] {
            let [burst, count, period, quantity] = [burst, count, period, quantity].map(|number| number >> shift);
            let sent = format!("CL.THROTTLE k {burst} {count} {period} {quantity}\r\n");
            let reply = runtime.block_on(talk(&door, &[sent.as_bytes()]));
            if reply.starts_with('-') {
                prop_assert!(reply.starts_with("-Cell error: ") && reply.matches("\r\n").count() == 1, "{}", reply);
                continue;
            }
            let numbers: Vec<i64> = reply.lines().skip(1).map(|line| line.trim_start_matches(':').parse().unwrap()).collect();
            let [limited, limit, remaining, retry_after, reset_after] = numbers[..] else { panic!("{reply}") };
            prop_assert_eq!(limit, burst + 1);
            prop_assert!((0..=limit).contains(&remaining) && reset_after >= 0, "{}", reply);
            // The key is charged under other figures before, so that a cost that fits may still be limited.
            prop_assert!(limited == 1 || quantity <= limit && retry_after == -1, "{}", reply);
        }
    }

    /// The replies do not depend on how the bytes of a conversation arrive.
    ///
    /// Woken by: clearing the input after a write.
    #[test]
    fn a_conversation_may_be_split_anywhere(
        commands in prop::collection::vec(prop::sample::select(vec![
            "PING\r\n", "*1\r\n$4\r\nping\r\n", "*6\r\n$11\r\nCL.THROTTLE\r\n$1\r\nk\r\n$1\r\n3\r\n$1\r\n1\r\n$1\r\n1\r\n$1\r\n1\r\n",
            "\r\n", "*0\r\n", "ECHO 'a b'\r\n", "nothing at all\r\n", "CL.THROTTLE l 1 1 1\r\n", "HELLO 3\r\n", "GARBAGE \"\r\n", "*1\r\n:\r\n",
            "AUTH default a-caller-token-1\r\n", "RESET\r\n", "QUIT\r\n", "*2\r\n$4\r\nECHO\r\n$20000\r\n",
        ]), 0..12),
        cuts in prop::collection::vec(1_usize..40, 1..12),
        needs_token in any::<bool>(),
    ) {
        let sent = commands.concat().into_bytes();
        let (mut parts, mut rest) = (Vec::new(), &sent[..]);
        for cut in cuts.iter().cycle() {
            if rest.is_empty() {
                break;
            }
            let (part, after) = rest.split_at((*cut).min(rest.len()));
            parts.push(part);
            rest = after;
        }
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        let tokens = || if needs_token { Tokens::of_callers(TOKEN) } else { Tokens::default() };
        let replies = |parts: &[&[u8]]| {
            let (door, _) = door_at(tokens());
            runtime.block_on(talk(&door, parts))
        };
        prop_assert_eq!(replies(&parts), replies(&[&sent]));
    }
}

#[test]
fn clients_get_the_replies_of_redis() {
    let (door, _) = door_at(Tokens::default());
    let proto = |mark: &str, version: i64| {
        format!(
            "{mark}\r\n$6\r\nserver\r\n$9\r\nthreshold\r\n$7\r\nversion\r\n$5\r\n{}\r\n$4\r\nmode\r\n$10\r\nstandalone\r\n$4\r\nrole\r\n\
             $6\r\nmaster\r\n$5\r\nproto\r\n:{version}\r\n$2\r\nid\r\n:1\r\n$7\r\nmodules\r\n*0",
            env!("CARGO_PKG_VERSION")
        )
    };
    check(
        &door,
        &[
            ("PING", "+PONG"),
            ("ping hello", "$5\r\nhello"),
            ("PING a b", "-ERR wrong number of arguments for 'ping' command"),
            ("ECHO \"a\\tb\"", "$3\r\na\tb"),
            ("ECHO", "-ERR wrong number of arguments for 'echo' command"),
            ("SELECT 0", "+OK"),
            ("SELECT 1", "-ERR DB index is out of range"),
            ("SELECT x", "-ERR value is not an integer or out of range"),
            ("SET k v", "-ERR unknown command 'SET', with args beginning with: 'k' 'v' "),
            (
                "AUTH x",
                "-ERR AUTH <password> called without any password configured for the default user. Are you sure your configuration is correct?",
            ),
            ("AUTH default x", "+OK"),
            ("AUTH a b c", "-ERR syntax error"),
            ("HELLO", &proto("*14", 2)),
            ("HELLO 4", "-NOPROTO unsupported protocol version"),
            ("HELLO x", "-ERR Protocol version is not an integer or out of range"),
            ("HELLO 3 LOUD", "-ERR Syntax error in HELLO option 'LOUD'"),
            ("HELLO 3 SETNAME me", &proto("%7", 3)),
            ("CLIENT GETNAME", "$2\r\nme"),
            ("CLIENT SETNAME \"a b\"", "-ERR Client names cannot contain spaces, newlines or special characters."),
            ("CLIENT SETINFO lib-name test", "+OK"),
            ("CLIENT SETINFO LIB-VER 1.0", "+OK"),
            ("CLIENT SETINFO other test", "-ERR Unrecognized option 'other'"),
            (
                "CLIENT SETINFO lib-name \"a\\nb\"",
                "-ERR lib-name cannot contain spaces, newlines or special characters.",
            ),
            ("CLIENT SETINFO lib-name", "-ERR wrong number of arguments for 'client|setinfo' command"),
            ("CLIENT ID", ":1"),
            ("CLIENT LIST", "-ERR unknown subcommand 'LIST'. Try CLIENT HELP."),
            ("CLIENT ID x", "-ERR wrong number of arguments for 'client|id' command"),
            ("COMMAND COUNT", ":16"),
            ("COMMAND COUNT x", "-ERR wrong number of arguments for 'command|count' command"),
            ("COMMAND LIST x", "-ERR syntax error"),
            ("COMMAND LIST FILTERBY x y", "-ERR syntax error"),
            ("COMMAND LIST FILTERBY MODULE x", "*0"),
            ("COMMAND LIST FILTERBY PATTERN *e*t", "*3\r\n$6\r\nclient\r\n$5\r\nreset\r\n$6\r\nselect"),
            ("COMMAND LIST FILTERBY pattern PIN?", "*1\r\n$4\r\nping"),
            ("COMMAND DOCS nothing", "%0"),
            ("COMMAND INFO nothing", "*1\r\n_"),
            ("COMMAND X", "-ERR unknown subcommand 'X'. Try COMMAND HELP."),
            ("", "NOTHING"),
            ("RESET", "+RESET"),
            ("CLIENT GETNAME", "$-1"),
            (
                "COMMAND INFO echo",
                "*1\r\n*10\r\n$4\r\necho\r\n:2\r\n*3\r\n+loading\r\n+stale\r\n+fast\r\n:0\r\n:0\r\n:0\r\n*0\r\n*0\r\n*0\r\n*0",
            ),
            ("QUIT", "+OK"),
            ("PING", "NOTHING"),
        ],
    );
}

/// `MULTI` was an unknown command, and what followed it was charged, although its client was told that all of it had failed.
///
/// Woken by: leaving out `in_transaction` in `execute`, or in `reset`.
#[test]
fn what_follows_multi_is_refused_and_charges_nothing_until_the_end() {
    let (door, _) = door_at(Tokens::default());
    let discarded = "-ERR discarded: this server has no transactions, send commands without MULTI";
    let aborted = "-EXECABORT Transaction discarded because of previous errors.";
    let first = five(0, 1, 0, -1, 60);
    check(
        &door,
        &[
            ("MULTI", "+OK"),
            ("CL.THROTTLE k 0 1 60", discarded),
            ("PING", discarded),
            ("AUTH default x", discarded),
            ("UNWATCH", discarded),
            ("SET k v", "-ERR unknown command 'SET', with args beginning with: 'k' 'v' "),
            ("ECHO", "-ERR wrong number of arguments for 'echo' command"),
            ("MULTI", "-ERR MULTI calls can not be nested"),
            ("WATCH k", "-ERR WATCH inside MULTI is not allowed"),
            ("EXEC", aborted),
            ("CL.THROTTLE k 0 1 60", &first),
            ("EXEC", "-ERR EXEC without MULTI"),
            ("DISCARD", "-ERR DISCARD without MULTI"),
            ("multi", "+OK"),
            ("CL.THROTTLE discard 0 1 60", discarded),
            ("DISCARD", "+OK"),
            ("CL.THROTTLE discard 0 1 60", &first),
            ("MULTI", "+OK"),
            ("CL.THROTTLE reset 0 1 60", discarded),
            ("RESET", "+RESET"),
            ("CL.THROTTLE reset 0 1 60", &first),
            ("WATCH k", "-ERR nothing can be watched: this server has no transactions"),
            ("UNWATCH", "+OK"),
            ("MULTI now", "-ERR wrong number of arguments for 'multi' command"),
            ("PING", "+PONG"),
            ("MULTI", "+OK"),
            ("QUIT", "+OK"),
            ("PING", "NOTHING"),
        ],
    );
}

/// Woken by: leaving out the check of `needs_no_auth`; a `RESET` that keeps the trust.
#[test]
fn a_client_needs_a_token_where_callers_need_one() {
    let (door, _) = door_at(Tokens::of_callers(TOKEN));
    let hello = "-NOAUTH HELLO must be called with the client already authenticated, otherwise the HELLO <proto> AUTH <user> <pass> option can be used to authenticate the client and select the RESP protocol version at the same time";
    check(
        &door,
        &[
            ("PING", "-NOAUTH Authentication required."),
            ("CL.THROTTLE k 0 1 1", "-NOAUTH Authentication required."),
            ("HELLO 3", hello),
            ("AUTH wrong", "-WRONGPASS invalid username-password pair or user is disabled."),
            ("AUTH default wrong", "-WRONGPASS invalid username-password pair or user is disabled."),
            ("HELLO 2 AUTH default wrong", "-WRONGPASS invalid username-password pair or user is disabled."),
            ("AUTH a-caller-token-1", "+OK"),
            ("CL.THROTTLE k 0 1 1", &five(0, 1, 0, -1, 1)),
            ("RESET", "+RESET"),
            ("PING", "-NOAUTH Authentication required."),
            ("AUTH anyone a-caller-token-1", "+OK"),
            ("PING", "+PONG"),
        ],
    );
    // Redis's bounds before authentication, and none of them after it.
    let long = format!("*2\r\n$4\r\nECHO\r\n$16385\r\n{}\r\n", "a".repeat(16_385));
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    let replies = runtime.block_on(talk(&door, &[long.as_bytes()]));
    assert_eq!(replies, "-ERR Protocol error: unauthenticated bulk length\r\n");
    let replies = runtime.block_on(talk(&door, &[b"AUTH a-caller-token-1\r\n", long.as_bytes()]));
    assert!(replies.starts_with("+OK\r\n$16385\r\naaa"), "{} bytes", replies.len());
}

/// As over HTTP: after ten wrong tokens in a minute the next answer comes a second late.
///
/// Woken by: leaving out `count_for_callers`.
#[tokio::test(start_paused = true)]
async fn guessed_tokens_are_counted_and_delayed() {
    let (door, _) = door_at(Tokens::of_callers(TOKEN));
    let before = Instant::now();
    assert_eq!(talk(&door, &[&b"AUTH wrong\r\n".repeat(10)]).await.matches("WRONGPASS").count(), 10);
    assert_eq!(before.elapsed(), Duration::ZERO);
    assert_eq!(talk(&door, &[b"AUTH wrong\r\n"]).await.matches("WRONGPASS").count(), 1);
    assert_eq!(before.elapsed(), Duration::from_secs(1));
    assert_eq!(talk(&door, &[b"AUTH a-caller-token-1\r\n"]).await, "+OK\r\n");
    assert_eq!(before.elapsed(), Duration::from_secs(1));
}

/// A pipeline of 50 guesses once had no reply for 40 seconds.
///
/// Woken by: leaving out `AfterReplies`, or `LastWrong`.
#[tokio::test(start_paused = true)]
async fn a_pipeline_of_guesses_is_answered_until_one_is_delayed() {
    let (door, _) = door_at(Tokens::of_callers(TOKEN));
    let before = Instant::now();
    let (mut client, _stop, serving) = connect(&door);
    client.write_all(&b"AUTH wrong\r\n".repeat(50)).await.unwrap();
    let reply = b"-WRONGPASS invalid username-password pair or user is disabled.\r\n";
    let mut replies = reply.repeat(10);
    client.read_exact(&mut replies).await.unwrap();
    assert_eq!((before.elapsed(), &replies), (Duration::ZERO, &reply.repeat(10)));
    replies.clear();
    client.read_to_end(&mut replies).await.unwrap();
    assert_eq!((before.elapsed(), &replies[..]), (Duration::from_secs(1), &reply[..]));
    assert_eq!(serving.await.unwrap().unwrap(), Ended::Refused);
}

/// A page made a browser send commands to Redis as the body of a request (cross-protocol scripting).
///
/// Woken by: leaving out the test in `Session::unknown`.
#[test]
fn a_request_over_http_ends_the_connection_before_its_body() {
    let (door, _) = door_at(Tokens::default());
    let body = "CL.THROTTLE k 0 1 1\r\n";
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    for request in ["POST / HTTP/1.1\r\n\r\n", "PUT / HTTP/1.1\r\nHost: 127.0.0.1:6380\r\n\r\n"] {
        let replies = runtime.block_on(talk(&door, &[format!("{request}{body}").as_bytes()]));
        assert!(!replies.contains(":1"), "{replies}");
    }
    check(&door, &[("CL.THROTTLE k 0 1 1", &five(0, 1, 0, -1, 1))]);
}

/// Woken by: a time for each read in place of one for the request; `MAX_IDLE` for everyone. Without the time of a write it hangs.
#[tokio::test(start_paused = true)]
async fn a_client_has_a_time_to_send_to_read_and_to_be_idle() {
    let patience = Bounds::default().client_timeout;
    let (open, _) = door_at(Tokens::default());
    let (closed, _) = door_at(Tokens::of_callers(TOKEN));
    for (door, first, expected) in
        [(&open, "PING\r\n", Duration::from_secs(300)), (&closed, "PING\r\n", patience), (&open, "PI", patience)]
    {
        let before = Instant::now();
        let (mut client, _stop, serving) = connect(door);
        client.write_all(first.as_bytes()).await.unwrap();
        assert_eq!(serving.await.unwrap().unwrap(), Ended::Closed);
        assert_eq!(before.elapsed(), expected, "{first}");
    }
    // Bytes now and then do not extend the time of a request.
    let before = Instant::now();
    let (mut client, _stop, serving) = connect(&open);
    while client.write_all(b"a").await.is_ok() && before.elapsed() < 2 * patience {
        tokio::time::sleep(Duration::from_secs(1)).await;
    }
    assert!(before.elapsed() <= patience + Duration::from_secs(2), "{:?}", before.elapsed());
    serving.await.unwrap().unwrap();
    // A client that does not read is closed, and what it is sent does not pile up.
    let before = Instant::now();
    let (client, mut server) = duplex(1 << 10);
    let (_stop, stopped) = watch::channel(false);
    let (mut unread, mut writes) = tokio::io::split(client);
    let sending = tokio::spawn(async move { while writes.write_all(&b"PING\r\n".repeat(64)).await.is_ok() {} });
    let error = serve(&open, &mut server, PEER, stopped, || ()).await.unwrap_err();
    assert_eq!((error.kind(), before.elapsed()), (std::io::ErrorKind::TimedOut, patience));
    drop(server);
    sending.await.unwrap();
    let mut left = Vec::new();
    unread.read_to_end(&mut left).await.unwrap();
    assert!(left.len() <= 1 << 10, "{}", left.len());
}

/// Woken by: leaving out `stop` in `serve`.
#[tokio::test(start_paused = true)]
async fn a_server_that_stops_answers_what_has_arrived_and_closes() {
    let before = Instant::now();
    let (door, _) = door_at(Tokens::default());
    let (mut client, stop, serving) = connect(&door);
    client.write_all(b"PING\r\nPI").await.unwrap();
    let mut reply = [0; 7];
    client.read_exact(&mut reply).await.unwrap();
    stop.send(true).unwrap();
    assert_eq!((serving.await.unwrap().unwrap(), before.elapsed()), (Ended::Closed, Duration::ZERO));
}

/// The most that a pipeline of any length takes: what was read, and what is not written yet.
#[test]
fn a_long_pipeline_is_answered_to_its_end() {
    let (door, _) = door_at(Tokens::default());
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    let command = b"*5\r\n$11\r\nCL.THROTTLE\r\n$1\r\nk\r\n$4\r\n9999\r\n$1\r\n1\r\n$4\r\n3600\r\n";
    let replies = runtime.block_on(talk(&door, &[&command.repeat(5_000)]));
    assert_eq!((replies.matches("*5\r\n:0\r\n").count(), replies.contains(":5000\r\n")), (5_000, true));
}

/// As for `/v1/limit`, nothing is decided: a limit of the caller's own has no rule that says otherwise.
#[test]
fn a_store_that_fails_is_an_error_and_the_connection_stays() {
    let clock = Arc::new(ManualClock::new(START));
    let door = door(Desk::with_store(policy(), AnyStore::other(DeadStore), clock), Tokens::default());
    let error = format!("-UNAVAILABLE {}", StoreError::Unavailable);
    check(&door, &[("CL.THROTTLE k 0 1 1", &error), ("PING", "+PONG")]);
}

/// What an observer has heard.
#[derive(Default)]
struct Heard(std::sync::Mutex<Vec<(&'static str, &'static str)>>);

impl Observer for Heard {
    fn decided(&self, _: &ObservedDecision<'_>) {}

    fn performed(&self, performed: &ObservedOperation) {
        assert!(performed.subject.is_some());
        self.0.lock().unwrap().push((performed.operation.name(), performed.result.name()));
    }
}

#[test]
fn observers_hear_of_each_call() {
    let heard = Arc::new(Heard::default());
    let store = MemoryStore::new(policy().memory()).into();
    let clock = Arc::new(ManualClock::new(START));
    let door = door(Desk::observed(policy(), store, clock, Arc::clone(&heard) as _), Tokens::default());
    let call = "CL.THROTTLE k 0 1 1";
    check(&door, &[(call, &five(0, 1, 0, -1, 1)), ("PING", "+PONG"), (call, &five(1, 1, 0, 1, 1))]);
    assert_eq!(*heard.0.lock().unwrap(), [("limit", "done"), ("limit", "denied")]);
}

/// A limit is a value of its key and not an entry of a table: callers may use as many as they like.
///
/// Woken by: keeping a map from figures to limits.
#[test]
fn any_number_of_limits_takes_the_memory_of_a_few() {
    let usage = |limits: u64| {
        let store = Arc::new(MemoryStore::new(policy().memory()));
        let clock = Arc::new(ManualClock::new(START));
        let desk = Desk::with_store(policy(), AnyStore::other(Arc::clone(&store)), clock);
        let door = door(desk, Tokens::default());
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        for thousand in 0..100 {
            let calls: String = (0..1_000)
                .map(|number| thousand * 1_000 + number)
                .map(|number| format!("CL.THROTTLE key{number} {} 1 {}\r\n", number % limits, 60 + number % limits))
                .collect();
            let replies = runtime.block_on(talk(&door, &[calls.as_bytes()]));
            assert_eq!(replies.matches("*5\r\n:0\r\n").count(), 1_000);
        }
        let usage = store.usage();
        (usage.keys, usage.bytes)
    };
    let (few, many) = (usage(100), usage(100_000));
    assert_eq!((few.0, many), (100_000, few));
}
