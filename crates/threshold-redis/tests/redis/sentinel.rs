//! A primary and a replica under three Sentinels.

use std::sync::Arc;
use std::time::Duration;

use threshold_core::control::ControlChange;
use threshold_core::policy::{Ban, ListEntry};
use threshold_core::{DigestKey, Timestamp};
use threshold_limiter::store::Store as _;
use threshold_limiter::{Decision, Facts, Limiter, Policy};
use threshold_redis::{RedisOptions, RedisStore};

use crate::process::secret;
use crate::tcp::{TcpServer, free_port};

const POLICY: &str = "[[rule]]\nname = 'user'\nper = ['user']\nlimit = '20/day'\nalgorithm = 'fixed-window'\n\
                      on_store_error = 'closed'\n";

/// Two servers, of which one replicates the other, and three Sentinels.
pub(crate) struct Deployment {
    pub(crate) servers: [TcpServer; 2],
    pub(crate) sentinels: [TcpServer; 3],
}

impl Deployment {
    pub(crate) fn start() -> Self {
        let primary = TcpServer::start(&["--repl-diskless-sync-delay", "0"]);
        let port = primary.port.to_string();
        let replica = TcpServer::start(&["--replicaof", "127.0.0.1", &port, "--repl-diskless-sync-delay", "0"]);
        wait_until("the replica is in sync", || {
            replica.cli(&["INFO", "replication"]).contains("master_link_status:up")
        });
        let sentinels = [(); 3].map(|()| TcpServer::start_sentinel(primary.port));
        let deployment = Self { servers: [primary, replica], sentinels };
        for sentinel in &deployment.sentinels {
            wait_until("the Sentinels know each other and the replica", || {
                let known = sentinel.cli(&["SENTINEL", "MASTER", "main"]);
                known.contains("num-slaves\n1\n") && known.contains("num-other-sentinels\n2\n")
            });
        }
        deployment
    }

    /// Names a Sentinel that is not there before those that are.
    pub(crate) fn url(&self) -> String {
        let [first, second, third] = self.sentinels.each_ref().map(|sentinel| format!("127.0.0.1:{}", sentinel.port));
        format!("redis+sentinel://127.0.0.1:{},{first},{second},{third}/main", free_port())
    }

    /// Waits until the replica has everything that the primary has written so far. `WAIT` would wait for the writes of its own
    /// connection only.
    pub(crate) fn wait_for_replica(&self, primary: usize, replica: usize) {
        let offset = |server: usize, field: &str| {
            let info = self.servers[server].cli(&["INFO", "replication"]);
            let line = info.lines().find_map(|line| line.strip_prefix(field).map(str::to_owned));
            line.and_then(|line| line.trim().parse::<u64>().ok())
        };
        let written = offset(primary, "master_repl_offset:").unwrap();
        let has_all = || offset(replica, "slave_repl_offset:").is_some_and(|read| read >= written);
        wait_until("the replica has everything", has_all);
    }

    /// Waits until the Sentinels name this server.
    pub(crate) fn wait_for_promotion(&self, server: usize) {
        let port = format!("{}\n", self.servers[server].port);
        wait_until("a Sentinel names the new primary", || {
            self.sentinels[0].cli(&["SENTINEL", "GET-MASTER-ADDR-BY-NAME", "main"]).ends_with(&port)
        });
    }
}

pub(crate) fn wait_until(what: &str, is_true: impl Fn() -> bool) {
    for _ in 0..3_000 {
        if is_true() {
            return;
        }
        std::thread::sleep(Duration::from_millis(20));
    }
    panic!("not within a minute: {what}");
}

/// Decides until the store answers. It has five seconds for that.
async fn decision(node: &Limiter<RedisStore>) -> Decision {
    let facts = Facts { user: Some("ada"), ..Facts::default() };
    for _ in 0..250 {
        let decision = node.check_async(&facts).await.unwrap();
        if decision.degraded.is_none() {
            return decision;
        }
        assert!(!decision.allowed());
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    panic!("still degraded: {:?}", node.store().last_error());
}

/// The primary was replaced, first by an operator and then after a crash, and nodes went on asking the old one.
#[tokio::test(flavor = "multi_thread")]
async fn a_failover_is_followed_and_bans_hold() {
    let mut deployment = Deployment::start();
    let options = RedisOptions::new(deployment.url().parse().unwrap(), secret(9));
    let store = RedisStore::open(options.deadline(Duration::from_secs(5))).await.unwrap();
    let policy = Policy::parse(POLICY, &|_| None).unwrap();
    let builder = Limiter::builder(policy).store(store).digest_key(DigestKey::new([7; 16]));
    let node = builder.build().unwrap();
    let whom = ListEntry::parse("203.0.113.0/24").unwrap();
    let id = whom.ban_id(DigestKey::new([7; 16]));
    let ban = Ban { whom, reason: "scraping".into(), by: "ops".into(), from: Timestamp::EPOCH, until: Timestamp::MAX };
    node.change_control(ControlChange::Ban { id, ban: Some(Arc::new(ban)) }).await.unwrap();
    node.follow_control().await.unwrap();
    let banned = Facts { ip: "203.0.113.7".parse().ok(), user: Some("eve"), ..Facts::default() };

    assert_eq!(decision(&node).await.readings[0].remaining, 19);
    deployment.wait_for_replica(0, 1);
    assert_eq!(deployment.sentinels[0].cli(&["SENTINEL", "FAILOVER", "main"]), "OK\n");
    deployment.wait_for_promotion(1);
    // Until then it accepts charges, which are lost.
    let old = &deployment.servers[0];
    wait_until("the old primary is a replica", || old.cli(&["INFO", "replication"]).contains("master_link_status:up"));
    assert_eq!(decision(&node).await.readings[0].remaining, 18, "the replica had the balance");
    assert!(!node.check_async(&banned).await.unwrap().allowed());

    deployment.wait_for_replica(1, 0);
    deployment.servers[1].kill();
    assert!(!node.check_async(&banned).await.unwrap().allowed(), "a ban holds without a primary");
    deployment.wait_for_promotion(0);
    assert_eq!(decision(&node).await.readings[0].remaining, 17);
    assert!(!node.check_async(&banned).await.unwrap().allowed());
}

#[tokio::test(flavor = "multi_thread")]
async fn a_name_that_no_sentinel_knows_is_refused_with_the_reasons() {
    let primary = TcpServer::start(&[]);
    let sentinel = TcpServer::start_sentinel(primary.port);
    let url = format!("redis+sentinel://127.0.0.1:{},127.0.0.1:{}/other", free_port(), sentinel.port);
    let error = RedisStore::open(RedisOptions::new(url.parse().unwrap(), secret(9))).await.unwrap_err().to_string();
    assert!(error.contains("does not know other") && error.contains("refused"), "{error}");
}

/// A Sentinel that was cut off named a server that had become a replica, and charges to it were lost: it was configured to accept
/// writes.
#[tokio::test(flavor = "multi_thread")]
async fn a_replica_is_not_used_although_a_sentinel_names_it() {
    let primary = TcpServer::start(&[]);
    let port = primary.port.to_string();
    let replica = TcpServer::start(&["--replicaof", "127.0.0.1", &port, "--replica-read-only", "no"]);
    let (wrong, right) = (TcpServer::start_sentinel(replica.port), TcpServer::start_sentinel(primary.port));
    let open = |sentinels: String| {
        let url = format!("redis+sentinel://{sentinels}/main").parse().unwrap();
        RedisStore::open(RedisOptions::new(url, secret(9)))
    };
    let error = open(format!("127.0.0.1:{}", wrong.port)).await.unwrap_err().to_string();
    assert!(error.contains(&format!("127.0.0.1:{} is a replica", replica.port)), "{error}");
    open(format!("127.0.0.1:{},127.0.0.1:{}", wrong.port, right.port)).await.unwrap();
    assert_eq!(primary.cli(&["SCARD", "th:{control}secrets"]), "1\n", "the other Sentinel knew better");
}
