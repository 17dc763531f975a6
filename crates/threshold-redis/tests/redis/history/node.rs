//! A node of a history: what it can be asked, and what it answers.

use std::sync::Arc;
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};
use threshold_core::control::ControlChange;
use threshold_core::policy::{Ban, ListEntry, Owner, Setting};
use threshold_core::receipt::{ActualCost, OnExpire};
use threshold_core::{Decision, Receipt, Secrets, Timestamp, TraceId};
use threshold_limiter::store::EndError;
use threshold_limiter::{Attempted, Facts, Limiter, LoginRequest, Policy};
use threshold_redis::{RedisOptions, RedisStore};

use crate::process::secret;

/// How a node is started.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(super) struct Opening {
    pub(super) url: String,
    pub(super) policy: String,
    /// The byte that the secret consists of, and that of the secret before.
    pub(super) secret: u8,
    pub(super) old: Option<u8>,
    pub(super) deadline: Duration,
}

/// A request, which is counted by the limits of its category.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(super) struct Request {
    pub(super) user: String,
    pub(super) tenant: String,
    pub(super) category: String,
    pub(super) cost: u64,
}

impl Request {
    fn facts(&self) -> Facts<'_> {
        let (user, tenant, category) = (Some(&*self.user), Some(&*self.tenant), Some(&*self.category));
        Facts { user, tenant, category, cost: Some(self.cost), ..Facts::default() }
    }
}

/// What a node is asked for.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(super) enum Ask {
    Check(Request),
    Record(Request),
    /// What every limit of a request has left.
    Peek(Request),
    Refund {
        receipt: String,
    },
    Reserve {
        request: Request,
        ttl: Duration,
        releases: bool,
    },
    Commit {
        id: String,
        cost: u64,
    },
    Release {
        id: String,
    },
    Attempt {
        account: String,
        ip: String,
    },
    Fail {
        attempt: String,
    },
    Ban {
        user: String,
    },
    Double {
        tenant: String,
    },
    /// Checks so many times a second, if it can, until the time is over.
    Hammer {
        request: Request,
        rate: u32,
        time: Duration,
    },
    /// Withdraws what was charged too late, and waits until everything is given back.
    CatchUp,
}

/// What a node answers.
#[derive(Debug, Clone, Serialize, Deserialize, PartialEq, Eq)]
pub(super) enum Told {
    /// Admitted and counted by the store.
    Admitted {
        receipt: Option<String>,
    },
    /// Denied by the store; whether by a ban, a list or a penalty.
    Denied {
        barred: bool,
    },
    /// Decided without the store, which may have counted it.
    Unsure {
        admitted: bool,
    },
    Reserved {
        id: String,
    },
    Left {
        remaining: Vec<u64>,
        limits: Vec<u64>,
    },
    /// Done, or done before.
    Done,
    /// Unknown or already ended.
    Unknown,
    Attempt {
        token: String,
    },
    Hammered {
        admitted: u64,
        denied: u64,
        unsure: u64,
    },
    /// The store failed, and may have done it.
    Failed(String),
    /// The node was killed.
    Lost,
}

pub(super) type Node = Arc<Limiter<RedisStore>>;

/// Starts a node, which follows the log as a server does, until it is dropped.
pub(super) async fn open(opening: &Opening) -> Node {
    let secrets = Secrets::new(secret(opening.secret));
    let secrets = opening.old.into_iter().fold(secrets, |secrets, old| secrets.with_old(secret(old)).unwrap());
    let options = RedisOptions::new(opening.url.parse().unwrap(), secrets).deadline(opening.deadline);
    let begun = Instant::now();
    let store = loop {
        match RedisStore::open(options.clone()).await {
            Ok(store) => break store,
            Err(error) => assert!(begun.elapsed() < crate::process::PATIENCE, "{error}"),
        }
        tokio::time::sleep(Duration::from_millis(50)).await;
    };
    let policy = Policy::parse(&opening.policy, &|_| None).unwrap();
    let node = Arc::new(Limiter::builder(policy).store(store).build().unwrap());
    let own = Arc::downgrade(&node);
    tokio::spawn(async move {
        while let Some(node) = own.upgrade() {
            let _ = node.follow_control().await;
            drop(node);
            tokio::time::sleep(Duration::from_millis(500)).await;
        }
    });
    node
}

/// Sets a ban of a user, as an operator does.
pub(super) async fn ban(node: &Node, user: &str) -> Result<(), String> {
    let whom = ListEntry::User(user.into());
    let ban = Ban { whom, reason: "test".into(), by: "ops".into(), from: Timestamp::EPOCH, until: Timestamp::MAX };
    let change = ControlChange::Ban { id: ban.id(node.key()), ban: Some(Arc::new(ban)) };
    node.change_control(change).await.map(drop).map_err(|error| error.to_string())
}

/// Doubles the limits of a tenant, as an operator does.
async fn double(node: &Node, tenant: &str) -> Result<(), String> {
    let (by, reason, until) = ("ops".into(), "test".into(), Timestamp::MAX);
    let setting =
        Setting { tier: None, limits: Default::default(), times: 2, until, from: Timestamp::EPOCH, by, reason };
    let setting = Some(Arc::new(setting));
    let change = ControlChange::Setting { owner: Owner::Tenant, name: tenant.into(), setting };
    node.change_control(change).await.map(drop).map_err(|error| error.to_string())
}

/// Asks a node in this process.
pub(super) async fn ask(node: &Node, ask: Ask) -> Told {
    match ask {
        Ask::Check(request) => {
            let (decision, receipt) = node.check_with_receipt_async(&request.facts()).await.unwrap();
            told(node, &decision, receipt)
        }
        Ask::Record(request) => {
            let (decision, receipt) = node.record_async(&request.facts()).await.unwrap();
            told(node, &decision, receipt)
        }
        Ask::Peek(request) => peek(node, &request).await,
        Ask::Refund { receipt } => match node.read_receipt(&receipt) {
            Ok(receipt) => node.refund_async(&receipt).await.map_or_else(|error| failed(node, error), |_| Told::Done),
            Err(_) => Told::Unknown,
        },
        Ask::Reserve { request, ttl, releases } => {
            let on_expire = if releases { OnExpire::Release } else { OnExpire::Charge };
            let reserved = node.reserve_async(&request.facts(), ttl, on_expire).await.unwrap();
            let id = reserved.reservation.map(|id| Told::Reserved { id: id.to_string() });
            id.unwrap_or_else(|| told(node, &reserved.decision, None))
        }
        Ask::Commit { id, cost } => {
            let cost = ActualCost { cost: Some(cost), ..ActualCost::default() };
            ended(node, node.commit_async(id_of(&id), &cost).await)
        }
        Ask::Release { id } => ended(node, node.release_async(id_of(&id)).await),
        Ask::Attempt { account, ip } => {
            let request = LoginRequest { account: Some(&account), ip: ip.parse().ok(), ..LoginRequest::default() };
            match node.login_attempt_async(&request).await {
                Ok(Attempted::Allowed(token)) => Told::Attempt { token },
                Ok(Attempted::Refused(_)) => Told::Denied { barred: true },
                Err(error) => failed(node, error),
            }
        }
        Ask::Fail { attempt } => {
            node.login_result_async(&attempt, false).await.map_or_else(|error| failed(node, error), |_| Told::Done)
        }
        Ask::Ban { user } => ban(node, &user).await.map_or_else(Told::Failed, |()| Told::Done),
        Ask::Double { tenant } => double(node, &tenant).await.map_or_else(Told::Failed, |()| Told::Done),
        Ask::Hammer { request, rate, time } => hammer(node, &request, rate, time).await,
        Ask::CatchUp => {
            let followed = node.follow_control().await;
            node.store().returned().await;
            followed.map_or_else(|error| failed(node, error), |_| Told::Done)
        }
    }
}

async fn peek(node: &Node, request: &Request) -> Told {
    let decision = node.peek_async(&Facts { cost: Some(0), ..request.facts() }).await.unwrap();
    match decision.degraded {
        Some(_) => Told::Unsure { admitted: false },
        None if decision.readings.is_empty() => Told::Denied { barred: true },
        None => {
            let figures = decision.readings.iter().map(|reading| (reading.remaining, reading.limit));
            let (remaining, limits) = figures.unzip();
            Told::Left { remaining, limits }
        }
    }
}

fn told(node: &Node, decision: &Decision, receipt: Option<Receipt>) -> Told {
    if decision.degraded.is_some() {
        return Told::Unsure { admitted: decision.allowed() };
    }
    if decision.allowed() {
        return Told::Admitted { receipt: receipt.map(|receipt| node.sign(&receipt)) };
    }
    Told::Denied { barred: decision.penalty.is_some() || decision.listed.is_some() }
}

fn ended(node: &Node, ended: Result<(), EndError>) -> Told {
    match ended {
        Ok(()) => Told::Done,
        Err(EndError::Store(error)) => failed(node, error),
        Err(_) => Told::Unknown,
    }
}

fn failed(node: &Node, error: impl std::fmt::Display) -> Told {
    use threshold_limiter::store::Store as _;
    Told::Failed(format!("{error}: {}", node.store().last_error().unwrap_or_default()))
}

fn id_of(text: &str) -> TraceId {
    TraceId::from_u128(u128::from_str_radix(text, 16).unwrap())
}

/// Keeps so many checks under way at once.
const HAMMERS: u32 = 32;

async fn hammer(node: &Node, request: &Request, rate: u32, time: Duration) -> Told {
    let end = Instant::now() + time;
    let pause = Duration::from_secs(HAMMERS.into()) / rate;
    let tasks = (0..HAMMERS).map(|_| {
        let (node, request) = (Arc::clone(node), request.clone());
        tokio::spawn(async move {
            let (mut counts, mut next) = ([0; 3], Instant::now());
            while Instant::now() < end {
                // One that is late does not catch up: the load has a bound.
                next = Instant::now().max(next + pause);
                tokio::time::sleep_until(next.into()).await;
                let decision = node.check_async(&request.facts()).await.unwrap();
                let place = if decision.degraded.is_some() { 2 } else { usize::from(!decision.allowed()) };
                counts[place] += 1;
            }
            counts
        })
    });
    let mut all = [0; 3];
    for task in tasks.collect::<Vec<_>>() {
        all.iter_mut().zip(task.await.unwrap()).for_each(|(sum, count)| *sum += count);
    }
    let [admitted, denied, unsure] = all;
    Told::Hammered { admitted, denied, unsure }
}
