//! Heartbeats: how many nodes use this store, and this node's place among them. Both decide its share of every limit while the
//! store is away.
//!
//! The shares of all nodes together must not exceed a limit, although no two nodes read the set of nodes at the same moment. Two
//! rules ensure this, because a share never grows with the number of nodes that its owner counts:
//!
//! - A node that has joined has no share until every other node has sent a heartbeat since, and so has counted it.
//! - A node that is missing from the set is counted until it was missing for [`LIFE`], so that a server which has lost its data
//!   does not make each node believe that it is the only one.

use std::collections::BTreeMap;
use std::sync::{Arc, LazyLock, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use ::redis::Value;

use super::keys;
use super::reply::{array, number};
use super::secret::{self, SecretIds};
use super::server::{Server, ServerScript, jittered};
use super::servers::Servers;
use crate::random_id;
use crate::store::{Share, StoreError};

static BEAT: LazyLock<ServerScript> = LazyLock::new(|| ServerScript::new(include_str!("nodes.lua")));

/// The pause between two heartbeats.
const PAUSE: Duration = Duration::from_secs(1);
/// How long a node counts after its last heartbeat. Too long makes the shares of the others smaller, too short makes them exceed
/// the limit when a node is slow.
const LIFE: Duration = Duration::from_secs(10);

/// The nodes that use a store, as this one sees them.
#[derive(Debug)]
pub(super) struct Nodes {
    id: String,
    view: Mutex<View>,
}

#[derive(Debug, Default)]
struct View {
    /// The server's time of this node's first heartbeat, in milliseconds.
    joined: Option<u64>,
    /// Whether every other node has counted this one.
    is_known: bool,
    /// When each node was last in the set.
    seen: BTreeMap<String, Instant>,
    /// Whether the last heartbeat failed.
    is_away: bool,
}

impl Nodes {
    /// Sends the first heartbeat, and further ones until the returned value is dropped.
    pub(super) async fn start(servers: Servers, secrets: SecretIds) -> Arc<Self> {
        let nodes = Arc::new(Self { id: random_id().to_string(), view: Mutex::default() });
        nodes.beat(&servers).await;
        let own = Arc::downgrade(&nodes);
        tokio::spawn(async move {
            loop {
                tokio::time::sleep(jittered(PAUSE)).await;
                let Some(nodes) = own.upgrade() else { return };
                nodes.beat(&servers).await;
                // A store that was emptied has no secrets either, and would accept a node with another one.
                if let Ok(Some(_)) = secret::repeat(&servers, secrets).await {
                    servers.all().iter().for_each(Server::check_again);
                }
            }
        });
        nodes
    }

    /// Returns this node's share of every limit; `None` before all other nodes have counted it.
    pub(super) fn share(&self) -> Option<Share> {
        self.view().share(&self.id)
    }

    async fn beat(&self, servers: &Servers) {
        let args = [self.id.clone().into_bytes(), LIFE.as_millis().to_string().into_bytes()];
        let reply = servers.run(&BEAT, &[keys::control("nodes")], &args).await.map_err(StoreError::from);
        let members = reply.and_then(members);
        let mut view = self.view();
        match members {
            Ok((now, members)) => view.update(&self.id, now, &members, Instant::now()),
            // The view stays as it is: the shares are those of the moment at which the store was lost.
            Err(_) => view.is_away = true,
        }
    }

    fn view(&self) -> MutexGuard<'_, View> {
        // A poisoned lock is safe to use: a view that is half updated counts too many nodes.
        self.view.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl View {
    fn share(&self, own: &str) -> Option<Share> {
        let place = self.seen.keys().position(|id| id == own).filter(|_| self.is_known)?;
        let count = |number: usize| u64::try_from(number).unwrap_or(u64::MAX);
        Some(Share { nodes: count(self.seen.len()), place: count(place) })
    }

    /// Takes over the set of nodes, each with the time of its last heartbeat by the server's clock.
    fn update(&mut self, own: &str, now: u64, members: &[(String, u64)], heard: Instant) {
        // A clock that was set back would be behind the time of joining for as long as it was ahead.
        let joined = self.joined.map_or(now, |joined| joined.min(now));
        self.joined = Some(joined);
        if std::mem::replace(&mut self.is_away, false) {
            // While the store was away, nodes could not be seen. They are still there, and get the time to come back.
            self.seen.values_mut().for_each(|seen| *seen = heard);
        }
        self.seen.extend(members.iter().map(|(id, _)| (id.clone(), heard)));
        self.seen.retain(|_, seen| heard.saturating_duration_since(*seen) <= LIFE);
        self.is_known |= members.iter().all(|(id, beat)| id == own || *beat > joined);
    }
}

/// Reads the server's time and the members of the set.
fn members(reply: Value) -> Result<(u64, Vec<(String, u64)>), StoreError> {
    let mut parts = array(reply)?.into_iter();
    let now = number(parts.next())?;
    let mut listed = array(parts.next().unwrap_or(Value::Nil))?.into_iter();
    let mut members = Vec::new();
    while let (Some(Value::BulkString(id)), Some(beat)) = (listed.next(), listed.next()) {
        members.push((String::from_utf8_lossy(&id).into_owned(), number(Some(beat))?));
    }
    Ok((now, members))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn view_of(own: &str, now: u64, members: &[(&str, u64)], heard: Instant, view: &mut View) -> Option<Share> {
        let members: Vec<_> = members.iter().map(|(id, beat)| ((*id).to_owned(), *beat)).collect();
        view.update(own, now, &members, heard);
        view.share(own)
    }

    /// A node that had just started took its share before the others knew of it, and all shares together were more than the limit.
    #[test]
    fn a_node_has_no_share_until_all_others_have_counted_it() {
        let (start, mut view) = (Instant::now(), View::default());
        assert_eq!(view.share("b"), None);
        assert_eq!(view_of("b", 1_000, &[("a", 900), ("b", 1_000)], start, &mut view), None);
        assert_eq!(view_of("b", 1_500, &[("a", 900), ("b", 1_500), ("c", 1_400)], start, &mut view), None);
        let share = view_of("b", 2_000, &[("a", 1_900), ("b", 2_000), ("c", 1_400)], start, &mut view);
        assert_eq!(share, Some(Share { nodes: 3, place: 1 }));
        // A node that joins later makes the share smaller, and does not end it.
        let share = view_of("b", 3_000, &[("a", 2_900), ("b", 3_000), ("c", 2_500), ("d", 2_999)], start, &mut view);
        assert_eq!(share, Some(Share { nodes: 4, place: 1 }));
    }

    /// Redis came back without its data, and the first node that reached it took the whole limit in the next outage.
    #[test]
    fn nodes_are_counted_until_they_were_missing_for_long() {
        let (start, mut view) = (Instant::now(), View::default());
        let all = [("a", 1_000), ("b", 1_000)];
        assert_eq!(view_of("a", 1_000, &all[..1], start, &mut view), Some(Share { nodes: 1, place: 0 }));
        assert_eq!(view_of("a", 1_000, &all, start, &mut view), Some(Share { nodes: 2, place: 0 }));
        view.is_away = true;
        let back = start + 10 * LIFE;
        assert_eq!(view_of("a", 9_000, &all[..1], back, &mut view), Some(Share { nodes: 2, place: 0 }));
        assert_eq!(view_of("a", 9_000, &all[..1], back + LIFE, &mut view), Some(Share { nodes: 2, place: 0 }));
        let later = back + LIFE + Duration::from_millis(1);
        assert_eq!(view_of("a", 9_000, &all[..1], later, &mut view), Some(Share { nodes: 1, place: 0 }));
    }
}
