//! A hot tenant: what other nodes charge as fast as they can starves no command beside it.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::sync::Arc;
use std::time::{Duration, Instant};

use tokio::task::JoinSet;

use super::node::{self, Ask, Node, Opening, Request, Told};
use super::remote::RemoteNode;
use crate::process::RedisServer;
use crate::proxy::Proxy;

const POLICY: &str = "[[rule]]\nname = 'tenant'\nper = ['tenant']\nlimit = '100000000/month'\nalgorithm = 'fixed-window'\n\
                      on_store_error = 'closed'\n\
                      [[rule]]\nname = 'user'\nper = ['user']\nlimit = '100000000/month'\nalgorithm = 'fixed-window'\n\
                      on_store_error = 'closed'\n\
                      [login]\naccount = '100/day'\nip = '1000/day'\nlocks = { 50 = '24h' }\n";
/// How often each of three nodes charges the tenant in a second.
const RATE: u32 = 4_000;
/// How long the tenant is hot.
const TIME: Duration = Duration::from_secs(6);
/// How long a call may take: a busy machine makes none of them fail, so a verb that is starved shows by its calls of scripts.
const DEADLINE: Duration = Duration::from_secs(10);
/// How many scripts a verb may call on average. A login attempt and its result call three, most others one; a verb that compares and swaps what
/// is hot calls two for each of its tries.
const MOST_CALLS: u64 = 3;
/// How many scripts the node calls by itself in a second: heartbeats, the log of changes, the search for expired reservations.
const OWN_CALLS: u64 = 10;

fn request(user: &str) -> Request {
    Request { user: user.to_owned(), tenant: "hot".to_owned(), category: "any".to_owned(), cost: 2 }
}

/// How often each verb was sent, and how often it failed.
#[derive(Default)]
struct Sent(BTreeMap<&'static str, (u64, u64)>);

impl Sent {
    fn add(&mut self, verb: &'static str, told: &Told) {
        let (sent, failed) = self.0.entry(verb).or_default();
        *sent += 1;
        *failed += u64::from(matches!(told, Told::Failed(_) | Told::Unsure { .. }));
    }
}

/// A caller on the node beside: requests of the hot tenant that are refunded, committed and released, and logins of its own account.
async fn call(node: Node, caller: usize, end: Instant) -> Sent {
    let (mut sent, mut round) = (Sent::default(), 0);
    let ask = async |sent: &mut Sent, verb, asked| {
        let told = node::ask(&node, asked).await;
        sent.add(verb, &told);
        told
    };
    while Instant::now() < end {
        round += 1;
        let request = request(&format!("user {caller}"));
        if let Told::Admitted { receipt: Some(receipt) } = ask(&mut sent, "check", Ask::Check(request.clone())).await {
            ask(&mut sent, "refund", Ask::Refund { receipt }).await;
        }
        let ttl = Duration::from_secs(60);
        let reserve = Ask::Reserve { request: request.clone(), ttl, releases: true };
        if let Told::Reserved { id } = ask(&mut sent, "reserve", reserve).await {
            let end = if round % 2 == 0 { Ask::Commit { id, cost: 1 } } else { Ask::Release { id } };
            ask(&mut sent, if round % 2 == 0 { "commit" } else { "release" }, end).await;
        }
        ask(&mut sent, "record", Ask::Record(request)).await;
        let account = format!("account {caller} {}", round / 10);
        let attempt = Ask::Attempt { account, ip: format!("192.0.2.{caller}") };
        if let Told::Attempt { token } = ask(&mut sent, "login", attempt).await {
            ask(&mut sent, "result", Ask::Fail { attempt: token }).await;
        }
    }
    sent
}

/// Three nodes charged one tenant 4,000 to 9,000 times a second. On a fourth one, a millisecond away, commits failed in 78 %, refunds
/// in 75 to 88 %, reservations in 37 %, records in 73 to 93 %, and logins of other accounts in up to 20 %: all of them compare and swap
/// records, and shared one queue with the tenant's.
#[tokio::test(flavor = "multi_thread")]
async fn a_hot_tenant_starves_no_command_beside_it() {
    let server = RedisServer::start();
    let proxy = Proxy::start(&server).await;
    let opening = |url| Opening { url, policy: POLICY.to_owned(), secret: 1, old: None, deadline: DEADLINE };
    let mut hot = Vec::new();
    for _ in 0..3 {
        hot.push(Arc::new(RemoteNode::start(&opening(server.url())).await));
    }
    let beside = node::open(&opening(proxy.url())).await;
    proxy.set_delay(Duration::from_millis(1));
    let hammers: JoinSet<Told> = hot
        .into_iter()
        .map(
            |node| async move { node.ask(Ask::Hammer { request: request("everybody"), rate: RATE, time: TIME }).await },
        )
        .collect();
    tokio::time::sleep(Duration::from_millis(300)).await;
    let (begun, calls) = (Instant::now(), proxy.script_calls());
    let end = begun + TIME - Duration::from_millis(600);
    let callers: JoinSet<Sent> = (0..8).map(|caller| call(Arc::clone(&beside), caller, end)).collect();
    let mut all = Sent::default();
    for sent in callers.join_all().await {
        for (verb, (sent, failed)) in sent.0 {
            let sum = all.0.entry(verb).or_default();
            *sum = (sum.0 + sent, sum.1 + failed);
        }
    }
    let own = OWN_CALLS * begun.elapsed().as_secs().saturating_add(1);
    let calls = proxy.script_calls() - calls;
    let mut rate = 0;
    for told in hammers.join_all().await {
        let Told::Hammered { admitted, .. } = told else { panic!("{told:?}") };
        rate += admitted / TIME.as_secs();
    }
    let sent: u64 = all.0.values().map(|(sent, _)| sent).sum();
    let mut text = format!("beside {rate} charges a second, {sent} verbs with {calls} calls:");
    for (verb, (sent, failed)) in &all.0 {
        write!(text, " {verb} {failed} of {sent}").unwrap();
    }
    println!("{text}");
    assert_eq!(all.0.len(), 8, "a verb was never sent: {text}");
    assert!(all.0.values().all(|(_, failed)| *failed == 0), "{text}");
    assert!(calls <= MOST_CALLS * sent + own, "{text}");
}
