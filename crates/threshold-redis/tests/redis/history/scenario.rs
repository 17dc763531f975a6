//! What a seed draws: servers, a policy, and the faults of a history.

use std::time::Duration;

use super::random::Random;

/// The servers of a history.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Kind {
    /// One server, which keeps what it has answered.
    One,
    /// A primary and a replica under three Sentinels.
    Sentinel,
    /// Three primaries, which keep what they have answered.
    Cluster,
    /// Three primaries with a replica each, which takes over.
    ClusterWithReplicas,
}

impl Kind {
    pub(super) fn is_cluster(self) -> bool {
        matches!(self, Self::Cluster | Self::ClusterWithReplicas)
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Fault {
    /// A server is killed and started again, with its data.
    Restart {
        down: Duration,
    },
    Pause {
        time: Duration,
    },
    PauseAndKill {
        time: Duration,
    },
    /// A primary is killed, and its replica takes over without its last writes.
    FailOver,
    /// A replica takes over from its living primary.
    HandOver,
    /// A slot with keys moves under load.
    Reshard,
    Flush,
    ForgetScripts,
    /// The secret is replaced.
    Rotate,
    KillNode {
        down: Duration,
    },
    SuspendNode {
        time: Duration,
    },
}

/// How long a history is, and its faults.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Form {
    /// For the ordinary run.
    Short,
    Long,
}

#[derive(Debug, Clone)]
pub(super) struct Scenario {
    pub(super) seed: u64,
    pub(super) kind: Kind,
    /// What nodes do without the store.
    pub(super) mode: &'static str,
    pub(super) algorithms: Vec<&'static str>,
    pub(super) nodes: usize,
    pub(super) clients: usize,
    /// Whether one node charges a tenant as fast as it can.
    pub(super) hot: bool,
    /// The faults, each with the quiet time before it.
    pub(super) faults: Vec<(Duration, Fault)>,
}

/// The limits of a user and of a tenant.
pub(super) const USER_LIMIT: u64 = 150;
pub(super) const TENANT_LIMIT: u64 = 500;
pub(super) const HOT_LIMIT: u64 = 100_000_000;
/// The limit of those who are banned when they exceed it.
pub(super) const STRIKER_LIMIT: u64 = 5;
/// How many guesses at a password an account takes.
pub(super) const GUESSES: usize = 3;

impl Scenario {
    pub(super) fn draw(seed: u64, form: Form) -> Self {
        let mut random = Random::new(seed);
        let kind = *random.of(&[Kind::One, Kind::Cluster, Kind::Sentinel, Kind::Cluster, Kind::ClusterWithReplicas]);
        let mode = *random.of(&["closed", "closed", "local", "open"]);
        let mut algorithms = threshold_core::limit::Algorithm::NAMES.to_vec();
        while algorithms.len() > 3 {
            algorithms.remove(random.index(algorithms.len()));
        }
        let count = if form == Form::Short { 3 } else { random.between(4, 8) };
        let mut faults = Vec::<(Duration, Fault)>::new();
        for _ in 0..count {
            let quiet = Duration::from_millis(random.between(200, 1_200));
            let fault = draw_fault(kind, form, &mut random);
            let once = matches!(fault, Fault::Flush | Fault::Rotate)
                || kind == Kind::Sentinel && matches!(fault, Fault::FailOver);
            if !once || faults.iter().all(|(_, other)| *other != fault) {
                faults.push((quiet, fault));
            }
        }
        let (nodes, clients) = if form == Form::Short { (3, 6) } else { (4, 10) };
        Self { seed, kind, mode, algorithms, nodes, clients, hot: random.percent(30), faults }
    }

    /// Returns the categories of requests. Each has a limit of its own for users and for tenants.
    pub(super) fn categories(&self) -> Vec<&'static str> {
        let hot = self.hot.then_some("hot");
        self.algorithms.iter().copied().chain(hot).collect()
    }

    pub(super) fn policy(&self) -> String {
        let mut text = String::from("[ladders.hard]\nrungs = ['ban 24h']\n");
        let mut rule = |name: &str, per: &str, limit: u64, algorithm: &str, more: &str| {
            let limit = match algorithm {
                "concurrency" => format!("'{limit}'\nttl = '1h'"),
                _ => format!("'{limit}/month'"),
            };
            text += &format!(
                "[[rule]]\nname = '{name} {per}'\nper = ['{per}']\nlimit = {limit}\nalgorithm = '{algorithm}'\n\
                 match = {{ category = '{name}' }}\non_store_error = '{}'\n{more}\n",
                self.mode
            );
        };
        for algorithm in &self.algorithms {
            rule(algorithm, "tenant", TENANT_LIMIT, algorithm, "");
            rule(algorithm, "user", USER_LIMIT, algorithm, "");
        }
        rule("hot", "tenant", HOT_LIMIT, "fixed-window", "");
        rule("hot", "user", HOT_LIMIT, "fixed-window", "");
        rule("striker", "user", STRIKER_LIMIT, "fixed-window", "ladder = 'hard'");
        text + "[login]\naccount = '100/day'\nip = '1000/day'\nlocks = { 3 = '24h' }\n"
    }
}

fn draw_fault(kind: Kind, form: Form, random: &mut Random) -> Fault {
    let longest = if form == Form::Short { 1_500 } else { 10_000 };
    let time = Duration::from_millis(random.between(100, longest));
    let down = Duration::from_millis(random.between(50, 600));
    // Short enough that no replica takes over: what a suspended primary still answers then is lost.
    let short = Duration::from_millis(random.between(100, 250));
    let node = [Fault::KillNode { down }, Fault::SuspendNode { time }, Fault::ForgetScripts];
    let own: &[Fault] = match kind {
        Kind::One => {
            &[Fault::Restart { down }, Fault::Pause { time }, Fault::PauseAndKill { time }, Fault::Flush, Fault::Rotate]
        }
        Kind::Cluster => &[
            Fault::Restart { down },
            Fault::Pause { time },
            Fault::PauseAndKill { time },
            Fault::Reshard,
            Fault::Flush,
            Fault::Rotate,
        ],
        Kind::Sentinel => {
            &[Fault::FailOver, Fault::FailOver, Fault::Pause { time: short }, Fault::Flush, Fault::Rotate]
        }
        Kind::ClusterWithReplicas => &[Fault::FailOver, Fault::HandOver, Fault::Reshard, Fault::Pause { time: short }],
    };
    if random.percent(60) { *random.of(own) } else { *random.of(&node) }
}
