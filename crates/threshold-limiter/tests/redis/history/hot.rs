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
/// Longer than a call takes on a machine that is busy with this load, and shorter than a few tries of one.
const DEADLINE: Duration = Duration::from_millis(100);
/// How many of a hundred calls may fail. On a quiet machine none does, and on a busy one a few come late, plain checks too; a verb that
/// is starved fails in a third of its calls or more.
const MOST_FAILED: f64 = 10.0;

fn request(user: &str) -> Request {
    Request { user: user.to_owned(), tenant: "hot".to_owned(), category: "any".to_owned(), cost: 2 }
}

/// How often each verb was sent, and how often it failed.
#[derive(Default)]
struct Shares(BTreeMap<&'static str, (u32, u32)>);

impl Shares {
    fn add(&mut self, verb: &'static str, told: &Told) {
        let (sent, failed) = self.0.entry(verb).or_default();
        *sent += 1;
        *failed += u32::from(matches!(told, Told::Failed(_) | Told::Unsure { .. }));
    }

    fn share(sent: u32, failed: u32) -> f64 {
        100.0 * f64::from(failed) / f64::from(sent)
    }
}

/// A caller on the node beside: requests of the hot tenant that are refunded, committed and released, and logins of its own account.
async fn call(node: Node, caller: usize, end: Instant) -> Shares {
    let (mut shares, mut round) = (Shares::default(), 0);
    let ask = async |shares: &mut Shares, verb, asked| {
        let told = node::ask(&node, asked).await;
        shares.add(verb, &told);
        told
    };
    while Instant::now() < end {
        round += 1;
        let request = request(&format!("user {caller}"));
        if let Told::Admitted { receipt: Some(receipt) } = ask(&mut shares, "check", Ask::Check(request.clone())).await
        {
            ask(&mut shares, "refund", Ask::Refund { receipt }).await;
        }
        let ttl = Duration::from_secs(60);
        let reserve = Ask::Reserve { request: request.clone(), ttl, releases: true };
        if let Told::Reserved { id } = ask(&mut shares, "reserve", reserve).await {
            let end = if round % 2 == 0 { Ask::Commit { id, cost: 1 } } else { Ask::Release { id } };
            ask(&mut shares, if round % 2 == 0 { "commit" } else { "release" }, end).await;
        }
        ask(&mut shares, "record", Ask::Record(request)).await;
        let account = format!("account {caller} {}", round / 10);
        let attempt = Ask::Attempt { account, ip: format!("192.0.2.{caller}") };
        if let Told::Attempt { token } = ask(&mut shares, "login", attempt).await {
            ask(&mut shares, "result", Ask::Fail { attempt: token }).await;
        }
    }
    shares
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
    let end = Instant::now() + TIME - Duration::from_millis(600);
    let callers: JoinSet<Shares> = (0..8).map(|caller| call(Arc::clone(&beside), caller, end)).collect();
    let mut shares = Shares::default();
    for told in callers.join_all().await {
        for (verb, (sent, failed)) in told.0 {
            let all = shares.0.entry(verb).or_default();
            *all = (all.0 + sent, all.1 + failed);
        }
    }
    let mut rate = 0;
    for told in hammers.join_all().await {
        let Told::Hammered { admitted, .. } = told else { panic!("{told:?}") };
        rate += admitted / TIME.as_secs();
    }
    let mut text = format!("beside {rate} charges a second:");
    for (verb, (sent, failed)) in &shares.0 {
        write!(text, " {verb} {failed} of {sent} ({:.1} %)", Shares::share(*sent, *failed)).unwrap();
    }
    println!("{text}");
    assert!(
        shares.0.values().all(|(sent, failed)| *sent > 50 && Shares::share(*sent, *failed) < MOST_FAILED),
        "{text}"
    );
}
