//! The servers of a history, and what befalls them.

use std::thread::sleep;
use std::time::{Duration, Instant};

use super::ledger::Loss;
use super::random::Random;
use super::scenario::{Fault, Kind};
use crate::process::{Cluster, RedisServer, SlotMove};
use crate::sentinel::{Deployment, wait_until};
use crate::tcp::TcpServer;

pub(super) enum Servers {
    One(RedisServer),
    /// With the index of the primary.
    Sentinel(Box<Deployment>, usize),
    Cluster(Cluster),
}

impl Servers {
    pub(super) fn start(kind: Kind) -> Self {
        match kind {
            Kind::One => Self::One(RedisServer::start_with_data(1_000_000)),
            Kind::Sentinel => Self::Sentinel(Box::new(Deployment::start()), 0),
            Kind::Cluster => Self::Cluster(Cluster::start_with_data()),
            Kind::ClusterWithReplicas => Self::Cluster(Cluster::start_with_failover()),
        }
    }

    pub(super) fn url(&self) -> String {
        match self {
            Self::One(server) => server.url(),
            Self::Sentinel(deployment, _) => deployment.url(),
            Self::Cluster(cluster) => cluster.url(),
        }
    }

    /// Carries out a fault of the servers, and waits until they are well again. Returns what was lost.
    pub(super) fn suffer(&mut self, fault: Fault, random: &mut Random) -> Option<Loss> {
        let from = Instant::now();
        let loss = |whole| Some(Loss { from, to: Instant::now(), whole });
        match fault {
            Fault::Restart { down } => self.restart(None, down, random),
            Fault::PauseAndKill { time } => self.restart(Some(time), Duration::from_millis(200), random),
            Fault::Pause { time } => self.pause(time, random),
            Fault::FailOver => {
                self.fail_over(random);
                return loss(false);
            }
            Fault::Flush => {
                self.on_primaries(&["FLUSHALL"]);
                return loss(true);
            }
            Fault::ForgetScripts => self.on_primaries(&["SCRIPT", "FLUSH"]),
            Fault::HandOver | Fault::Reshard => {
                let Self::Cluster(cluster) = self else { return None };
                if fault == Fault::HandOver {
                    cluster.hand_over(*random.of(&cluster.primaries()));
                } else {
                    reshard(cluster, random);
                }
            }
            // Not of a server.
            Fault::Rotate | Fault::KillNode { .. } | Fault::SuspendNode { .. } => {}
        }
        None
    }

    fn on_primaries(&self, command: &[&str]) {
        match self {
            Self::One(server) => drop(server.cli(command)),
            Self::Sentinel(deployment, primary) => drop(deployment.servers[*primary].cli(command)),
            Self::Cluster(cluster) => {
                cluster.primaries().into_iter().for_each(|node| drop(cluster.node(node).cli(command)));
            }
        }
    }

    fn pause(&self, time: Duration, random: &mut Random) {
        match self {
            Self::One(server) => {
                server.suspend();
                sleep(time);
                server.go_on();
            }
            Self::Sentinel(deployment, primary) => {
                deployment.servers[*primary].suspend();
                sleep(time);
                deployment.servers[*primary].go_on();
            }
            Self::Cluster(cluster) => {
                let node = cluster.node(*random.of(&cluster.primaries()));
                node.suspend();
                sleep(time);
                node.go_on();
            }
        }
    }

    /// Kills a server that keeps its data, perhaps a moment after it was suspended, and starts it again.
    fn restart(&mut self, pause: Option<Duration>, down: Duration, random: &mut Random) {
        let going_on = Duration::from_millis(random.below(60));
        let suspend = |server: &RedisServer| {
            let Some(time) = pause else { return };
            server.suspend();
            sleep(time);
            server.go_on();
            sleep(going_on);
        };
        match self {
            Self::One(server) => {
                suspend(server);
                server.kill();
                sleep(down);
                server.restart();
            }
            Self::Cluster(cluster) => {
                let node = *random.of(&cluster.primaries());
                suspend(cluster.node(node));
                cluster.kill(node);
                sleep(down);
                cluster.restart(node);
                cluster.wait_until_ready();
            }
            Self::Sentinel(..) => {}
        }
    }

    fn fail_over(&mut self, random: &mut Random) {
        match self {
            Self::Cluster(cluster) => {
                let primary = *random.of(&cluster.primaries());
                cluster.kill(primary);
                cluster.wait_for_failover(primary);
                cluster.restart(primary);
                cluster.wait_until_ready();
            }
            Self::Sentinel(deployment, primary) => {
                let (old, new) = (*primary, 1 - *primary);
                deployment.servers[old].kill();
                deployment.wait_for_promotion(new);
                *primary = new;
                let port = deployment.servers[new].port.to_string();
                let replica = TcpServer::start(&["--replicaof", "127.0.0.1", &port, "--repl-diskless-sync-delay", "0"]);
                deployment.servers[old] = replica;
                wait_until("the new replica is in sync", || {
                    deployment.servers[old].cli(&["INFO", "replication"]).contains("master_link_status:up")
                });
            }
            Self::One(_) => {}
        }
    }
}

/// Moves a slot with keys to another primary.
fn reshard(cluster: &Cluster, random: &mut Random) {
    let keys = cluster.keys("th:{*}b:*");
    if keys.is_empty() {
        return;
    }
    let slot = cluster.slot(keys[random.index(keys.len())].as_str());
    let in_slot = |node: &usize| cluster.node(*node).cli(&["CLUSTER", "COUNTKEYSINSLOT", &slot.to_string()]);
    let primaries = cluster.primaries();
    let Some(from) = primaries.iter().copied().find(|node| in_slot(node).trim() != "0") else { return };
    let others: Vec<usize> = primaries.into_iter().filter(|node| *node != from).collect();
    let there = SlotMove { slot, from, to: *random.of(&others) };
    cluster.begin_move(there);
    sleep(Duration::from_millis(random.between(50, 400)));
    while cluster.move_keys(there, 50) > 0 {}
    sleep(Duration::from_millis(random.between(20, 200)));
    cluster.end_move(there);
}
