//! What one node knows of the others, and its share by that. Every time is an argument.
//!
//! The shares of all nodes together must not exceed a limit, although no two nodes read the set of nodes at the same moment. A share
//! never grows with the number of nodes that its owner counts, so it is enough that a node with a share counts every other one that
//! has a share. These rules ensure it:
//!
//! - A node that has joined has no share until every other node has read the answer to a heartbeat since, and so has counted it; and
//!   not before nodes have sent heartbeats for [`LIFE`] without a long pause, because nodes that are alive may be missing in a set that is new.
//! - A node that is missing from the set is counted until it was missing for [`LIFE`], so that a server which has lost its data
//!   does not make each node believe that it is the only one.
//! - A node that did not run for half of that time, or did not reach the store for so long while others did, joins again. While the
//!   store is away for all of them, each keeps trying, and keeps its share.
//! - Nodes are counted by their names, so that one that is restarted takes the place of its predecessor. Of several nodes of one
//!   name, the first one to join has the share.

use std::collections::BTreeMap;
use std::time::Duration;

use threshold_limiter::store::Share;

/// The pause between two heartbeats.
pub(super) const PAUSE: Duration = Duration::from_secs(1);
/// How long a node counts after its last heartbeat. Too long makes the shares of the others smaller, too short makes them exceed
/// the limit when a node is slow.
pub(crate) const LIFE: Duration = Duration::from_secs(10);
/// A node that was silent for longer joins again. Half of what the others grant it, because it hears of them late.
const SILENCE: Duration = Duration::from_secs(5);
/// After this long without a heartbeat of its predecessor, a node takes its place: three pauses, in which a node that is alive
/// reconnects. One that was heard is another node of the same name, and has the share until it was silent for [`LIFE`].
const TAKEOVER: Duration = Duration::from_secs(3);

/// The answer to a heartbeat. Times are milliseconds of the server's clock.
#[derive(Debug, Clone)]
pub(super) struct Beaten {
    pub(super) now: u64,
    /// Since when nodes have sent heartbeats without a long pause.
    pub(super) since: u64,
    /// Whether the set had this node before.
    pub(super) was_listed: bool,
    pub(super) members: Vec<Member>,
}

/// A node in the set.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Member {
    /// A process. It is another one after a restart.
    pub(crate) id: String,
    /// The name of the node, or the id if it has none.
    pub(crate) name: String,
    pub(crate) joined: u64,
    /// The time of its last heartbeat.
    pub(crate) beat: u64,
    /// The time of its last heartbeat whose answer it has read.
    pub(crate) heard: u64,
    /// The key ids of its secret and its old one; `None` for a node of an earlier version.
    pub(crate) secrets: Option<(String, Option<String>)>,
}

/// What one node knows of the others. Times of its own are counted by a clock that goes on in suspend.
#[derive(Debug)]
pub(super) struct View {
    id: String,
    name: String,
    /// The last attempt to send a heartbeat.
    attempted: Option<Duration>,
    /// The server's time of the last heartbeat that was answered.
    beaten: Option<u64>,
    /// The server's time at which this node joined.
    joined: Option<u64>,
    /// The server's time since which nodes of the same name could have been heard.
    listening: u64,
    /// Whether every other node has counted this one.
    is_counted: bool,
    /// Whether a node of the same name has the share.
    has_rival: bool,
    /// Whether that one has sent a heartbeat since this one joined, and so is no predecessor that has ended.
    is_rival_alive: bool,
    /// Whether another living node has this name.
    has_namesake: bool,
    /// When each name was last in the set.
    seen: BTreeMap<String, Duration>,
    /// Whether the last heartbeat failed.
    is_away: bool,
}

impl View {
    /// Creates the view of a node that has not sent a heartbeat yet.
    pub(super) fn new(id: String, name: String) -> Self {
        Self {
            id,
            name,
            attempted: None,
            beaten: None,
            joined: None,
            listening: 0,
            is_counted: false,
            has_rival: false,
            is_rival_alive: false,
            has_namesake: false,
            seen: BTreeMap::new(),
            is_away: false,
        }
    }

    pub(super) fn id(&self) -> &str {
        &self.id
    }

    pub(super) fn name(&self) -> &str {
        &self.name
    }

    /// Returns the server's time at which this node joined; 0 if it joins with the next heartbeat.
    pub(super) fn joined(&self) -> u64 {
        self.joined.unwrap_or(0)
    }

    /// Returns the server's time of the last heartbeat whose answer was read; 0 before the first one.
    pub(super) fn heard(&self) -> u64 {
        self.beaten.unwrap_or(0)
    }

    /// Returns whether another node of the same name was alive at the last heartbeat.
    pub(super) fn has_namesake(&self) -> bool {
        self.has_namesake
    }

    /// Returns this node's share of every limit; `None` if another node may not count this one.
    pub(super) fn share(&self, now: Duration) -> Option<Share> {
        // A process that has just been woken decides before it sends a heartbeat.
        if !self.is_counted || self.has_rival || self.has_slept(now) {
            return None;
        }
        let place = self.seen.keys().position(|name| *name == self.name)?;
        let count = |number: usize| u64::try_from(number).unwrap_or(u64::MAX);
        Some(Share { nodes: count(self.seen.len()), place: count(place) })
    }

    fn has_slept(&self, now: Duration) -> bool {
        self.attempted.is_none_or(|attempted| now.saturating_sub(attempted) > SILENCE)
    }

    /// Notes that a heartbeat is about to be sent.
    pub(super) fn attempt(&mut self, now: Duration) {
        if self.has_slept(now) {
            self.leave();
        }
        self.attempted = Some(now);
    }

    /// Notes that a heartbeat was not answered. The rest stays as it is: the shares are those of the moment at which the store was
    /// lost.
    pub(super) fn fail(&mut self) {
        self.is_away = true;
    }

    /// Takes over the answer to a heartbeat.
    pub(super) fn succeed(&mut self, answer: &Beaten, now: Duration) {
        let in_use = millis(answer.now.saturating_sub(answer.since));
        let silent = self.beaten.map_or(Duration::ZERO, |beaten| millis(answer.now.saturating_sub(beaten)));
        // While the store is away for all nodes, none of them drops another one. This one alone was away.
        if silent > SILENCE && in_use > SILENCE {
            self.leave();
        }
        self.beaten = Some(answer.now);
        let is_back = std::mem::replace(&mut self.is_away, false);
        if is_back {
            // Nodes could not be seen. They are still there, and get the time to come back.
            self.seen.values_mut().for_each(|seen| *seen = now);
        }
        if is_back || !answer.was_listed || self.joined.is_none() {
            self.listening = answer.now;
        }
        // A clock that was set back would be behind the time of joining for as long as it was ahead.
        let joined = self.joined.map_or(answer.now, |joined| joined.min(answer.now));
        self.joined = Some(joined);
        self.seen.extend(answer.members.iter().map(|member| (member.name.clone(), now)));
        self.seen.retain(|_, seen| now.saturating_sub(*seen) <= LIFE);
        let mut others = answer.members.iter().filter(|member| member.name != self.name);
        self.is_counted |= in_use >= LIFE && others.all(|member| member.heard > joined);
        self.look_for_namesakes(answer, joined);
    }

    fn look_for_namesakes(&mut self, answer: &Beaten, joined: u64) {
        let order = |member: &Member| (member.joined, member.id.clone());
        let own = answer.members.iter().find(|member| member.id == self.id).map(order);
        let namesakes = answer.members.iter().filter(|member| member.name == self.name && member.id != self.id);
        let (before, after): (Vec<_>, Vec<_>) = namesakes.partition(|member| Some(order(member)) < own);
        let age = |time: u64| millis(answer.now.saturating_sub(time));
        let is_alive = |member: &Member| member.beat > joined;
        // A rival that the server has forgotten is still there, and gets the time to come back.
        let beat = before.iter().map(|member| member.beat).max().or(self.has_rival.then_some(0));
        self.is_rival_alive |= before.iter().any(|member| is_alive(member));
        let patience = if self.is_rival_alive { LIFE } else { TAKEOVER };
        self.has_rival = beat.is_some_and(|beat| age(beat.max(self.listening)) <= patience);
        self.is_rival_alive &= self.has_rival;
        let is_recent = |member: &Member| age(member.beat) <= TAKEOVER;
        self.has_namesake = after.iter().any(|member| is_recent(member))
            || before.iter().any(|member| is_alive(member) && is_recent(member));
    }

    /// Forgets everything that may have changed while this node was silent. It joins again.
    fn leave(&mut self) {
        (self.beaten, self.joined, self.is_counted) = (None, None, false);
        (self.has_rival, self.is_rival_alive, self.has_namesake) = (false, false, false);
        self.seen.clear();
    }
}

fn millis(millis: u64) -> Duration {
    Duration::from_millis(millis)
}

#[cfg(test)]
mod tests;
