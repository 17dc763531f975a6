//! Heartbeats: how many nodes use this store, and this node's place among them. Both decide its share of every limit while the
//! store is away.

mod view;

use std::sync::{Arc, LazyLock, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use ::redis::Value;

use super::keys;
use super::reply::{array, number};
use super::secret::{self, Checked, SecretIds};
use super::server::{Server, ServerScript, jittered};
use super::servers::{Looks, Servers};
use futures_util::future::join;
use threshold_limiter::host::random_id;
use threshold_limiter::store::{Share, StoreError};
use view::{Beaten, PAUSE, View};
pub(super) use view::{LIFE, Member};

static BEAT: LazyLock<ServerScript> = LazyLock::new(|| ServerScript::new(include_str!("nodes.lua")));

/// How long a heartbeat waits for its answer. A node that waited for longer would be silent for too long.
const DEADLINE: Duration = Duration::from_secs(2);

/// The nodes that use a store, as this one sees them.
#[derive(Debug)]
pub(super) struct Nodes {
    secrets: SecretIds,
    state: Mutex<State>,
}

#[derive(Debug)]
struct State {
    view: View,
    /// The nodes of the last answer.
    members: Vec<Member>,
    /// What the store has last said of this node's secrets.
    checked: Checked,
}

impl Nodes {
    /// Sends the first heartbeat, and further ones until the returned value is dropped. A node without a name is named by its id.
    pub(super) async fn start(
        servers: Servers,
        secrets: SecretIds,
        name: Option<String>,
        checked: Checked,
    ) -> Arc<Self> {
        let id = random_id().to_string();
        let view = View::new(id.clone(), name.unwrap_or(id));
        let nodes = Arc::new(Self { secrets, state: Mutex::new(State { view, members: Vec::new(), checked }) });
        nodes.beat(&servers).await;
        let own = Arc::downgrade(&nodes);
        tokio::spawn(async move {
            let mut looks = Looks::default();
            loop {
                tokio::time::sleep(jittered(PAUSE)).await;
                let Some(nodes) = own.upgrade() else { return };
                looks.begin(&servers);
                // At the same time, so that a store that hangs delays the next heartbeat once.
                join(nodes.beat(&servers), nodes.check_secrets(&servers)).await;
            }
        });
        nodes
    }

    /// Returns this node's share of every limit; `None` before all other nodes have counted it.
    pub(super) fn share(&self) -> Option<Share> {
        self.state().view.share(boot_time())
    }

    /// Returns what an operator should change about the names and secrets of the nodes.
    pub(super) fn problems(&self) -> Vec<String> {
        let state = self.state();
        let name = state.view.name();
        let namesake = state.view.has_namesake().then(|| {
            format!("two nodes are named {name}, and one of them has no share while the store is away: give each a name of its own (--node)")
        });
        // The predecessor of a node that was restarted under its name is gone.
        let others: Vec<Member> = state.members.iter().filter(|member| member.name != name).cloned().collect();
        let secrets = secret::problems(self.secrets, &state.checked, &others);
        namesake.into_iter().chain(secrets).collect()
    }

    /// Returns that the old secret of this node is not needed any more.
    pub(super) fn retired_secret(&self) -> Option<String> {
        secret::retired(self.secrets, &self.state().checked)
    }

    async fn beat(&self, servers: &Servers) {
        let args = {
            let mut state = self.state();
            state.view.attempt(boot_time());
            let SecretIds { present, old } = self.secrets;
            let old = old.map_or_else(|| "-".to_owned(), |old| old.to_string());
            let (id, joined) = (state.view.id().to_owned(), state.view.joined().to_string());
            let (life, heard) = (LIFE.as_millis().to_string(), state.view.heard().to_string());
            let name = state.view.name().to_owned();
            [id, life, joined, heard, present.to_string(), old, name].map(String::into_bytes)
        };
        let names = [keys::control("nodes"), keys::control("members")];
        let reply = tokio::time::timeout(DEADLINE, servers.run(&BEAT, &names, &args)).await;
        let answer = reply.ok().and_then(Result::ok).and_then(|reply| beaten(reply).ok());
        let mut state = self.state();
        match answer {
            Some(answer) => {
                state.view.succeed(&answer, boot_time());
                state.members = answer.members;
            }
            None => state.view.fail(),
        }
    }

    /// A store that was emptied has no secrets either, and would accept a node with another one.
    async fn check_secrets(&self, servers: &Servers) {
        let Ok(Ok(checked)) = tokio::time::timeout(DEADLINE, secret::repeat(servers, self.secrets)).await else {
            return;
        };
        if checked.is_refused() {
            servers.all().iter().for_each(Server::check_again);
        }
        self.state().checked = checked;
    }

    fn state(&self) -> MutexGuard<'_, State> {
        // A poisoned lock is safe to use: a view that is half updated counts too many nodes.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Reads the answer of `nodes.lua`.
fn beaten(reply: Value) -> Result<Beaten, StoreError> {
    let mut parts = array(reply)?.into_iter();
    let (now, since) = (number(parts.next())?, number(parts.next())?);
    let was_listed = number(parts.next())? == 1;
    let listed = array(parts.next().unwrap_or(Value::Nil))?;
    let members = listed.chunks_exact(3).map(|member| match member {
        [Value::BulkString(id), beat, Value::BulkString(said)] => {
            let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
            Ok(member_of(text(id), number(Some(beat.clone()))?, &text(said)))
        }
        _ => Err(StoreError::Unavailable),
    });
    Ok(Beaten { now, since, was_listed, members: members.collect::<Result<_, _>>()? })
}

/// Reads what a node says of itself. A node of an earlier version says nothing, and counts under its id.
fn member_of(id: String, beat: u64, said: &str) -> Member {
    let parts: Vec<&str> = said.splitn(5, ' ').collect();
    let time = |text: &str| text.parse().unwrap_or(0);
    match parts.as_slice() {
        [joined, heard, present, old, name] => {
            let secrets = Some(((*present).to_owned(), Some(*old).filter(|old| *old != "-").map(str::to_owned)));
            Member { id, name: (*name).to_owned(), joined: time(joined), beat, heard: time(heard), secrets }
        }
        _ => Member { name: id.clone(), id, joined: 0, beat, heard: beat, secrets: None },
    }
}

/// Returns the time of a clock that goes on in suspend.
#[cfg(any(target_os = "linux", target_os = "android"))]
fn boot_time() -> Duration {
    let now = rustix::time::clock_gettime(rustix::time::ClockId::Boottime);
    let (seconds, nanos) = (u64::try_from(now.tv_sec).unwrap_or(0), u64::try_from(now.tv_nsec).unwrap_or(0));
    Duration::from_secs(seconds).saturating_add(Duration::from_nanos(nanos))
}

/// Returns the time of a monotonic clock. Whether it goes on in suspend depends on the system.
#[cfg(not(any(target_os = "linux", target_os = "android")))]
fn boot_time() -> Duration {
    static BEGAN: LazyLock<std::time::Instant> = LazyLock::new(std::time::Instant::now);
    BEGAN.elapsed()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Nodes of both versions run beside each other during an upgrade.
    #[test]
    fn what_a_node_says_of_itself_is_read_and_an_earlier_version_says_nothing() {
        let member = member_of("1f".to_owned(), 9, "7 8 0000002a 00000029 node of ada");
        let secrets = Some(("0000002a".to_owned(), Some("00000029".to_owned())));
        let (id, name) = ("1f".to_owned(), "node of ada".to_owned());
        assert_eq!(member, Member { id, name, joined: 7, beat: 9, heard: 8, secrets });
        assert_eq!(member_of("1f".to_owned(), 9, "7 8 0000002a - b").secrets, Some(("0000002a".to_owned(), None)));
        let (id, name) = ("1f".to_owned(), "1f".to_owned());
        assert_eq!(member_of(id.clone(), 9, ""), Member { id, name, joined: 0, beat: 9, heard: 9, secrets: None });
    }
}
