//! Bans and settings that hold on every node: a change is written to the store's log first, and each node follows the log.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::atomic::Ordering;
use std::sync::{Arc, PoisonError};
use std::time::SystemTime;

use threshold_core::command::{Answer, Command};
use threshold_core::control::{ControlChange, ControlKey, ControlPage, MAX_BANS, MAX_CHANGES_READ};
use threshold_core::policy::{Owner, Policy, Setting, SettingError};
use threshold_core::{Span, Timestamp};

use super::Limiter;
use crate::clock::Clock;
use crate::observer::Operation;
use crate::store::{Store, StoreError};
use crate::sync::MutexGuard;

/// How often changes are computed again because other nodes have changed bans or settings meanwhile.
const MAX_RECOMPUTED: usize = 16;

/// The number of changes that are read again at every poll, to notice a log that has lost some.
const MAX_RECENT: usize = 64;

/// How much a node's estimate of the store's time may be late. A ban that ends within it may have been dropped by the store.
const CLOCK_MARGIN: Span = Span::MINUTE;

/// A setting that does not fit the policy in force, and why. It is kept, but not in force.
pub type UnfitSetting = (Owner, Arc<str>, SettingError);

/// The position of a node in the log of bans and settings.
#[derive(Debug, Default)]
pub(super) struct Followed {
    /// When the log began that this node follows; `None` before it has read the first page.
    log: Option<Timestamp>,
    /// Every change up to this number has been applied.
    position: u64,
    /// Later changes that were made on this node, and so were applied before the ones between. The value is the number.
    ahead: BTreeMap<ControlKey, u64>,
    /// The last changes that were read from the log, by number. Each of them is there until a later change of its key replaces it, and
    /// no number is given to another key, unless the log has lost changes.
    recent: BTreeMap<u64, Recent>,
    /// How often the log was found to have lost changes.
    losses: u64,
}

/// A change that was read from the log.
#[derive(Debug)]
struct Recent {
    key: ControlKey,
    /// When the ban or setting ends; `None` for a removal.
    until: Option<Timestamp>,
}

/// All changes of a log.
struct WholeLog {
    /// The last page, without its changes.
    page: ControlPage,
    /// The newest change of each key.
    all: BTreeMap<ControlKey, ControlChange>,
    /// The last number when reading began.
    began: u64,
    /// The last changes.
    recent: BTreeMap<u64, Recent>,
}

impl Followed {
    /// Returns whether the log has given the number of a change that this node has read to a change of another key.
    fn contradicts(&self, page: &ControlPage) -> bool {
        page.changes
            .iter()
            .any(|(number, change)| self.recent.get(number).is_some_and(|recent| recent.key != change.key()))
    }

    /// Returns whether a change that this node has read is missing from the log: neither it nor a later change of its key is among the
    /// keys that were `read` from [`overlap`](Self::overlap) to the last page. A full log drops what has ended, and every log the oldest
    /// removals.
    fn misses_any(&self, read: &BTreeSet<ControlKey>, page: &ControlPage, now: Timestamp) -> bool {
        let (mut later, ended_by) = (BTreeSet::new(), now.plus(CLOCK_MARGIN));
        // Another thread may have read further. The last change of each key comes first: it has replaced those before it.
        self.recent.range(..=page.last).rev().any(|(number, Recent { key, until })| {
            let may_be_dropped = until.map_or(*number <= page.forgotten, |until| until <= ended_by);
            later.insert(key) && !may_be_dropped && !read.contains(key)
        })
    }

    /// Remembers the changes of a page.
    fn remember(&mut self, page: &ControlPage) {
        let recent = |change: &ControlChange| Recent { key: change.key(), until: change.until() };
        self.recent.extend(page.changes.iter().map(|(number, change)| (*number, recent(change))));
        while self.recent.len() > MAX_RECENT {
            self.recent.pop_first();
        }
    }

    /// Returns the number before the first change that is remembered.
    fn overlap(&self) -> u64 {
        self.recent.first_key_value().map_or(self.position, |(first, _)| first.saturating_sub(1).min(self.position))
    }

    /// Returns whether a change is to be applied: neither it nor a later change of the same key was applied before.
    fn is_new(&self, number: u64, change: &ControlChange) -> bool {
        number > self.position && self.ahead.get(&change.key()).is_none_or(|ahead| number > *ahead)
    }

    /// Counts a loss, once until the log is restored. Until then it counts as another log: none begins at the end of time.
    fn lose(&mut self) {
        if self.log.replace(Timestamp::MAX) != Some(Timestamp::MAX) {
            self.losses = self.losses.saturating_add(1);
        }
    }

    fn advance(&mut self, position: u64) {
        self.position = self.position.max(position);
        // The position covers these.
        self.ahead.retain(|_, number| *number > position);
    }
}

impl<S: Store, C: Clock> Limiter<S, C> {
    /// Sets or lifts a ban, or sets or removes a setting: in the store, and so on every node that
    /// [follows](Self::follow_control) it, and in this process at once. Returns the settings that do not fit the policy in
    /// force.
    ///
    /// # Errors
    /// Returns an error if the store cannot answer, or [`StoreError::Full`] if it has no room. Then nothing is changed in this
    /// process. After a timeout the store may have made the change all the same, and this node follows it like any other.
    pub async fn change_control(&self, change: ControlChange) -> Result<Vec<UnfitSetting>, StoreError> {
        self.perform(Operation::Control, None, self.change_one(change)).await
    }

    async fn change_one(&self, change: ControlChange) -> Result<Vec<UnfitSetting>, StoreError> {
        let last = match self.execute(Command::Control(Box::new(change.clone()))).await? {
            Answer::Controlled { number } => number,
            other => return Err(StoreError::unexpected(other)),
        };
        let (mut unfit, is_behind) = self.apply_own(last, std::slice::from_ref(&change));
        if is_behind {
            // Other nodes have made changes before this one. If they cannot be read now, the next call reads them.
            unfit.extend(self.follow_log().await.unwrap_or_default());
        }
        Ok(unfit)
    }

    /// Makes the changes that `compute` returns, as [`change_control`](Self::change_control) makes one. `compute` reads the
    /// [bans](Self::bans) and settings of this node. If other nodes have changed some that this node has not read, it reads them
    /// and calls `compute` again; so of two nodes that replace one set of bans at the same time, one set is in force in the end.
    ///
    /// Nodes apply the changes one after the other, so that requests do not wait for all of them: put new bans before lifted
    /// ones, and no caller that both sets contain is let through in between. The store in memory makes all changes or none. The
    /// store in Redis makes a thousand at a time; if it fails between two pieces, the first ones stay, and calling this again
    /// completes them.
    ///
    /// # Errors
    /// As for [`change_control`](Self::change_control). [`StoreError::Timeout`] if other nodes change bans all the time.
    pub async fn change_control_all(
        &self,
        compute: impl FnMut() -> Box<[ControlChange]> + Send,
    ) -> Result<Vec<UnfitSetting>, StoreError> {
        self.perform(Operation::Control, None, self.change_all(compute)).await
    }

    async fn change_all(
        &self,
        mut compute: impl FnMut() -> Box<[ControlChange]> + Send,
    ) -> Result<Vec<UnfitSetting>, StoreError> {
        let mut unfit = Vec::new();
        for _ in 0..MAX_RECOMPUTED {
            // Before the changes are computed: what is applied in between makes the store refuse them.
            let position = self.followed().position;
            let changes = compute();
            if changes.is_empty() {
                return Ok(unfit);
            }
            if !self.has_room_for(&changes) {
                return Err(StoreError::Full);
            }
            if let Some(more) = self.write_control(changes, Some(position)).await? {
                unfit.extend(more);
                return Ok(unfit);
            }
            unfit.extend(self.follow_log().await?);
        }
        Err(StoreError::Timeout)
    }

    /// Writes changes and applies them here. Returns `None` if the log has changes after the number that they were computed from.
    async fn write_control(
        &self,
        changes: Box<[ControlChange]>,
        after: Option<u64>,
    ) -> Result<Option<Vec<UnfitSetting>>, StoreError> {
        let count = u64::try_from(changes.len()).unwrap_or(u64::MAX);
        let last = match self.execute(Command::ControlAll { changes: changes.clone(), after }).await? {
            Answer::Controlled { number } => number,
            Answer::Outdated => return Ok(None),
            other => return Err(StoreError::unexpected(other)),
        };
        // Another node's change may have come between two pieces. Then only the log tells the numbers.
        if after.is_none_or(|after| after.saturating_add(count) != last) {
            return Ok(Some(self.follow_control().await?));
        }
        let (mut unfit, is_behind) = self.apply_own(last, &changes);
        if is_behind {
            unfit.extend(Box::pin(self.follow_log()).await.unwrap_or_default());
        }
        Ok(Some(unfit))
    }

    /// Returns whether the bans of this node have room for these changes. The store checks it too, but may have made a part of the
    /// changes by then.
    fn has_room_for(&self, changes: &[ControlChange]) -> bool {
        let (mut added, mut removed) = (0_usize, 0_usize);
        for change in changes {
            let ControlChange::Ban { id, ban } = change else { continue };
            match (ban.is_some(), self.bans.contains(*id)) {
                (true, false) => added = added.saturating_add(1),
                (false, true) => removed = removed.saturating_add(1),
                _ => {}
            }
        }
        added <= removed || self.bans.count().saturating_add(added).saturating_sub(removed) <= MAX_BANS
    }

    /// Applies the bans and settings that other nodes have changed since the last call; the first call applies all of them.
    /// Call it at the start, and every 500 ms if other processes use the same store. While the store is unavailable, this
    /// node goes on with the bans and settings that it has; when it is back, the first call records in it what this node has
    /// admitted without it. Returns the settings that do not fit the policy in force.
    ///
    /// # Errors
    /// Returns an error if the store cannot answer.
    pub async fn follow_control(&self) -> Result<Vec<UnfitSetting>, StoreError> {
        let unfit = self.follow_log().await?;
        // The store answers, so it can hear what this node has decided without it.
        self.catch_up().await;
        Ok(unfit)
    }

    /// Returns how often the store was found to have lost bans and settings that this node had read, as a server does that was restored
    /// from an older copy. This node has written its own back each time.
    pub fn control_losses(&self) -> u64 {
        self.followed().losses
    }

    async fn follow_log(&self) -> Result<Vec<UnfitSetting>, StoreError> {
        let (mut unfit, mut read) = (Vec::new(), BTreeSet::new());
        let (mut after, mut from) = {
            let followed = self.followed();
            (followed.position, followed.overlap())
        };
        loop {
            // From before the position, to see whether the changes there are still the same.
            let page = self.read_control(from).await?;
            // A node at 0 has applied nothing yet, so it takes over any log.
            let log = self.followed().log;
            // A node may have made changes of its own before it has read anything.
            // A store without bans and settings has no log, and the first change begins one.
            let had_log = log.is_some_and(|log| log > Timestamp::EPOCH);
            let is_another = log != Some(page.began) && (had_log || after > 0);
            read.extend(page.changes.iter().map(|(_, change)| change.key()));
            // A server that was restored from an older copy, or replaced by a replica that was behind, has lost the last changes.
            // It gives their numbers to other changes.
            let has_lost = page.last < after || self.followed().contradicts(&page);
            if is_another || has_lost {
                return self.restore_control(has_lost || had_log).await;
            }
            // The log has forgotten removals that this node has not read.
            if page.misses(after) {
                return self.read_whole_control().await;
            }
            if page.is_last() && self.followed().misses_any(&read, &page, self.time()) {
                return self.restore_control(true).await;
            }
            let end = page.end();
            // Not held while the store was asked. What was applied in the meantime is skipped by `is_new`.
            let mut followed = self.followed();
            // The first call does not know the log yet.
            followed.log = Some(page.began);
            let new = page.changes.iter().filter(|(number, change)| followed.is_new(*number, change));
            unfit.extend(self.apply(new.map(|(_, change)| change)));
            followed.advance(end);
            followed.remember(&page);
            drop(followed);
            if page.is_last() {
                return Ok(unfit);
            }
            (after, from) = (end, end);
        }
    }

    /// Puts another policy in force, as [`swap`](Self::swap) does, and keeps the settings of the policy before. Returns its
    /// generation and the settings that do not fit.
    pub fn reload(&self, mut policy: Policy) -> (u64, Vec<UnfitSetting>) {
        // Thousands of settings take a while, so most of the work is done before the lock is taken. The second call, under
        // the lock, takes over what has changed meanwhile.
        let unfit = policy.take_settings_of(&self.policy());
        let _followed = self.followed();
        policy.take_settings_of(&self.policy());
        (self.swap(policy), unfit)
    }

    /// Removes the settings that end at or before `now`. Every node does so by itself; call it about twice a second.
    pub fn end_settings(&self, now: SystemTime) {
        let now = Timestamp::from(now);
        let is_over = |(_, _, setting): &(Owner, &str, &Setting)| setting.until <= now;
        // Nearly always nothing has ended. Then no lock is taken and no policy is copied.
        if !self.policy().settings().any(|given| is_over(&given)) {
            return;
        }
        // A setting that is applied between the copy and the swap would be lost without this lock.
        let _followed = self.followed();
        let in_force = self.policy();
        let mut policy = Policy::clone(&in_force);
        let over = || in_force.settings().filter(is_over);
        for (owner, name, _) in over() {
            policy.take_back(owner, name);
            self.ended_settings.fetch_add(1, Ordering::Relaxed);
        }
        self.swap(policy);
        // The journal must not bring them back after a restart.
        if let Some(sink) = self.bans.sink() {
            over().for_each(|(owner, name, _)| sink.setting(owner, name, None));
        }
    }

    /// Returns how many settings were removed because they had ended.
    pub fn ended_settings(&self) -> u64 {
        self.ended_settings.load(Ordering::Relaxed)
    }

    /// Applies changes that were made on this node, with consecutive numbers up to `last`. Returns whether there are earlier
    /// changes that were not read yet.
    fn apply_own(&self, last: u64, changes: &[ControlChange]) -> (Vec<UnfitSetting>, bool) {
        let mut followed = self.followed();
        let count = u64::try_from(changes.len()).unwrap_or(u64::MAX);
        let before = last.saturating_sub(count);
        let numbers = (1..).map(|nth| before.saturating_add(nth));
        let new: Vec<(u64, &ControlChange)> =
            numbers.zip(changes).filter(|(number, change)| followed.is_new(*number, change)).collect();
        // `follow_control` was faster, and has read these changes from the log; or the log has lost changes, and gives their
        // numbers to these. Reading on tells which.
        if new.is_empty() {
            return (Vec::new(), true);
        }
        let unfit = self.apply(new.iter().map(|(_, change)| *change));
        // No change of another node is missing before these.
        if followed.position >= before {
            followed.advance(last);
            return (unfit, false);
        }
        followed.ahead.extend(new.into_iter().map(|(number, change)| (change.key(), number)));
        (unfit, true)
    }

    /// Writes the bans and settings of this node back to a store that has lost its log, as a Redis without persistence does in a
    /// restart: nobody has lifted them. What other nodes have written since is newer, and stays.
    async fn restore_control(&self, is_loss: bool) -> Result<Vec<UnfitSetting>, StoreError> {
        if is_loss {
            self.followed().lose();
        }
        let whole = self.read_all_control().await?;
        let Some((mut unfit, lost)) = self.take_new_log(whole) else { return Ok(Vec::new()) };
        // Boxed, because changing bans may follow the log again.
        if lost.is_empty() {
            return Ok(unfit);
        }
        let written = Box::pin(self.write_control(lost.into(), None)).await;
        if written.is_err() {
            // The next call finds another log and tries again.
            self.followed().log = Some(Timestamp::MAX);
        }
        unfit.extend(written?.unwrap_or_default());
        Ok(unfit)
    }

    /// Follows another log from now on, and applies its changes. Returns the bans and settings of this node that it lacks, and the
    /// settings that do not fit; `None` if another thread was faster.
    fn take_new_log(&self, whole: WholeLog) -> Option<(Vec<UnfitSetting>, Vec<ControlChange>)> {
        let WholeLog { page, all, recent, .. } = whole;
        let mut followed = self.followed();
        if followed.log == Some(page.began) {
            return None;
        }
        // The numbers of the old log mean nothing in this one.
        *followed = Followed { log: Some(page.began), losses: followed.losses, recent, ..Followed::default() };
        let mut known = Vec::new();
        self.bans.each(|id, ban| known.push(ControlChange::Ban { id, ban: Some(Arc::new(ban.clone())) }));
        let settings = self.policy();
        known.extend(settings.settings().map(|(owner, name, setting)| {
            let (name, setting) = (Arc::from(name), Some(Arc::new(setting.clone())));
            ControlChange::Setting { owner, name, setting }
        }));
        known.retain(|change| !all.contains_key(&change.key()));
        let unfit = self.apply(all.values());
        followed.advance(page.last);
        Some((unfit, known))
    }

    /// Reads the whole log.
    async fn read_all_control(&self) -> Result<WholeLog, StoreError> {
        let mut page = self.read_control(0).await?;
        let (mut all, began, mut read) = (BTreeMap::new(), page.last, Followed::default());
        loop {
            let end = page.end();
            read.remember(&page);
            all.extend(page.changes.drain(..).map(|(_, change)| (change.key(), change)));
            if end >= page.last {
                return Ok(WholeLog { page, all, began, recent: read.recent });
            }
            page = self.read_control(end).await?;
        }
    }

    /// Replaces all bans and settings by those of the store: the log no longer has the changes that removed some.
    async fn read_whole_control(&self) -> Result<Vec<UnfitSetting>, StoreError> {
        let WholeLog { page, mut all, began, recent } = self.read_all_control().await?;
        // Locked only now, because the store must not be awaited under this lock.
        let mut followed = self.followed();
        // Removals that were made while reading may be missing, or another thread has read further: leave it to the next
        // call.
        if page.forgotten > began || followed.position > page.last {
            return Ok(Vec::new());
        }
        // Changes that this node has made after the log was read.
        let ahead = |key: &ControlKey| followed.ahead.get(key).is_some_and(|number| *number > page.last);
        let mut gone = Vec::new();
        self.bans.each(|id, _| gone.push(ControlChange::Ban { id, ban: None }));
        let settings = self.policy();
        let given = settings.settings().map(|(owner, name, _)| (owner, Arc::from(name)));
        gone.extend(given.map(|(owner, name)| ControlChange::Setting { owner, name, setting: None }));
        gone.retain(|change| !all.contains_key(&change.key()) && !ahead(&change.key()));
        all.retain(|key, _| !ahead(key));
        let unfit = self.apply(gone.iter().chain(all.values()));
        followed.advance(page.last);
        followed.recent = recent;
        Ok(unfit)
    }

    async fn read_control(&self, after: u64) -> Result<ControlPage, StoreError> {
        let most = u32::try_from(MAX_CHANGES_READ).unwrap_or(u32::MAX);
        match self.execute(Command::ReadControl { after, most }).await? {
            Answer::Control(page) => Ok(*page),
            other => Err(StoreError::unexpected(other)),
        }
    }

    /// Applies changes in this process. The caller holds the lock on `followed`, so that changes of one key are applied in
    /// their order.
    fn apply<'c>(&self, changes: impl Iterator<Item = &'c ControlChange>) -> Vec<UnfitSetting> {
        // One copy of the policy and one swap for all settings.
        let (mut changed, mut unfit) = (None::<Policy>, Vec::new());
        let mut settings = Vec::new();
        for change in changes {
            match change {
                ControlChange::Ban { id, ban: Some(ban) } => self.bans.put(*id, Arc::clone(ban)),
                ControlChange::Ban { id, ban: None } => drop(self.bans.lift(*id)),
                ControlChange::Setting { owner, name, setting } => {
                    let policy = changed.get_or_insert_with(|| Policy::clone(&self.policy()));
                    if let Err(error) = policy.apply_setting(*owner, name, setting.as_ref()) {
                        unfit.push((*owner, Arc::clone(name), error));
                    }
                    // The journal keeps a setting that does not fit as well: it may fit a later policy.
                    settings.push((*owner, name, setting));
                }
            }
        }
        if let Some(policy) = changed {
            self.swap(policy);
        }
        if let Some(sink) = self.bans.sink() {
            settings.iter().for_each(|(owner, name, setting)| sink.setting(*owner, name, setting.as_deref()));
        }
        unfit
    }

    fn followed(&self) -> MutexGuard<'_, Followed> {
        // A poisoned lock is safe to use: a change that is applied twice has the same effect.
        self.followed.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
