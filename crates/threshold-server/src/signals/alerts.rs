//! Alerts: counts what the policy's `[alerts]` are about, and tells when one begins, rises and ends.

mod addresses;
mod notice;
mod steps;
#[cfg(test)]
mod tests;

use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;

use threshold_core::alert::{AlertChange, AlertLevel, Episode};
use threshold_core::policy::{Alert, AlertOn, Layer};
use threshold_core::{Event, Policy, Timestamp};

use addresses::Addresses;
pub(crate) use notice::Notice;
use steps::{Scale, Steps};

/// The most addresses whose alert is raised at once. An attack by thousands must not send an operator thousands of messages.
const MAX_RAISED_ADDRESSES: usize = 100;
/// The most of these that are not critical: addresses that are blocked a little must not take the place of one that attacks.
const MAX_WARNED_ADDRESSES: usize = 50;
/// The most notices that are kept to be read.
const MAX_RECENT: usize = 100;

/// Counts events, and knows which alerts are raised.
///
/// The count of an alert is the largest in any period within the last one and 60 seconds before it. So an episode ends at most
/// that long after its last event, and not for a short pause.
#[derive(Debug, Default)]
pub(crate) struct AlertBook {
    /// What is counted as a whole. A count that has not changed yet has no place here.
    totals: BTreeMap<AlertOn, Total>,
    addresses: Addresses,
    /// The thresholds of the last policy.
    alerts: BTreeMap<AlertOn, Alert>,
    /// The step up to which addresses were last forgotten.
    forgotten: Option<(u64, u64)>,
    /// The alerts that are raised, each with what was told last.
    raised: BTreeMap<Key, Notice>,
    /// What was told, the newest last.
    recent: VecDeque<Notice>,
}

/// The alert, and the address if it is about one.
type Key = (AlertOn, Option<Arc<str>>);

#[derive(Debug)]
struct Total {
    scale: Scale,
    steps: Steps,
}

impl AlertBook {
    /// Counts an event.
    ///
    /// An event that is reported late counts at its own time, unless that is no longer judged; one from the future counts now. A denial
    /// for which the caller is not to blame, by an operator, a list or an outage, does not count.
    pub(crate) fn add(&mut self, event: &Event, now: Timestamp) {
        if event.blocked && !event.blames_caller() {
            return;
        }
        let at = event.at.min(now);
        let is_user_ban =
            || event.user_id.is_some() && event.strike.as_ref().is_some_and(|it| it.banned_until.is_some());
        let on = match event.layer {
            Some(Layer::Edge) if event.blocked => Some(AlertOn::EdgeBlocks),
            Some(Layer::Tenant) if event.blocked => Some(AlertOn::TenantBlocks),
            _ => None,
        };
        for on in on.into_iter().chain(is_user_ban().then_some(AlertOn::UserBans)) {
            let scale = Scale::new(self.alert(on).per);
            let total = self.totals.entry(on).or_insert(Total { scale, steps: Steps::default() });
            if let Some(number) = judged_step(total.scale, at, now) {
                total.steps.add(number, event.count);
            }
        }
        if let Some(address) = event.ip.as_deref().filter(|_| event.blocked) {
            let scale = Scale::new(self.alert(AlertOn::IpBlocks).per);
            if let Some(number) = judged_step(scale, at, now) {
                let raised = &self.raised;
                let is_raised = |name: &str| raised.contains_key(&(AlertOn::IpBlocks, Some(name.into())));
                self.addresses.add(address, (number, event.count), is_raised);
            }
        }
    }

    /// Judges every count by the thresholds of the policy in force, and returns what has changed.
    pub(crate) fn judge(&mut self, policy: &Policy, now: Timestamp) -> Vec<Notice> {
        self.set_thresholds(policy);
        self.forget_old(now);
        let mut notices = Vec::new();
        for on in AlertOn::ALL {
            if on == AlertOn::IpBlocks {
                self.judge_addresses(now, &mut notices);
            } else {
                let alert = self.alert(on);
                let count = self.totals.get(&on).map_or(0, |total| total.steps.peak(total.scale, alert));
                self.judge_count((on, None), count, now, &mut notices);
            }
        }
        let surplus = self.recent.len().saturating_add(notices.len()).saturating_sub(MAX_RECENT);
        self.recent.extend(notices.iter().cloned());
        self.recent.drain(..surplus);
        notices
    }

    /// Forgets an address, and returns the end of its alert if that is raised: receivers know it by this name.
    pub(crate) fn erase(&mut self, address: &str, now: Timestamp) -> Option<Notice> {
        self.addresses.remove(address);
        self.recent.retain(|notice| notice.key.as_deref() != Some(address));
        let told = self.raised.remove(&(AlertOn::IpBlocks, Some(address.into())))?;
        Some(Notice { change: AlertChange::Resolved(told.level()), count: 0, at: now, ..told })
    }

    /// Returns the alerts that are raised, each as it was told last.
    pub(crate) fn raised(&self) -> impl Iterator<Item = &Notice> {
        self.raised.values()
    }

    /// Returns the last 100 notices, the newest first.
    pub(crate) fn recent(&self) -> impl Iterator<Item = &Notice> {
        self.recent.iter().rev()
    }

    fn alert(&self, on: AlertOn) -> Alert {
        self.alerts.get(&on).copied().unwrap_or(on.usual())
    }

    fn set_thresholds(&mut self, policy: &Policy) {
        if self.alerts == *policy.alerts() {
            return;
        }
        let before = Scale::new(self.alert(AlertOn::IpBlocks).per);
        self.alerts.clone_from(policy.alerts());
        let after = Scale::new(self.alert(AlertOn::IpBlocks).per);
        if before != after {
            self.addresses.rescale(before, after);
            self.forgotten = None;
        }
        for on in AlertOn::ALL {
            let scale = Scale::new(self.alert(on).per);
            if let Some(total) = self.totals.get_mut(&on).filter(|total| total.scale != scale) {
                total.steps.rescale(total.scale, scale);
                total.scale = scale;
            }
        }
    }

    fn forget_old(&mut self, now: Timestamp) {
        for total in self.totals.values_mut() {
            total.steps.forget(total.scale.judged(now));
        }
        let judged = Scale::new(self.alert(AlertOn::IpBlocks).per).judged(now);
        // All addresses are gone through only once a step.
        if self.forgotten != Some(judged) {
            self.addresses.forget(judged);
            self.forgotten = Some(judged);
        }
    }

    fn judge_addresses(&mut self, now: Timestamp, notices: &mut Vec<Notice>) {
        let alert = self.alert(AlertOn::IpBlocks);
        let scale = Scale::new(alert.per);
        let raised = self.raised.keys().filter_map(|(_, address)| address.clone());
        let count = |address: &str| self.addresses.get(address).map_or(0, |steps| steps.peak(scale, alert));
        let known: Vec<(Arc<str>, u64)> = raised.map(|address| (Arc::clone(&address), count(&address))).collect();
        let room = MAX_RAISED_ADDRESSES.saturating_sub(known.len());
        let is_new = |address: &Arc<str>| !self.raised.contains_key(&(AlertOn::IpBlocks, Some(Arc::clone(address))));
        let busy = self.addresses.busy(alert.warning).filter(|(address, _)| is_new(address));
        let busy = busy.map(|(address, steps)| (Arc::clone(address), steps.peak(scale, alert)));
        let warned =
            self.raised.values().filter(|told| told.key.is_some() && told.level() == AlertLevel::Warning).count();
        let mut room_to_warn = MAX_WARNED_ADDRESSES.saturating_sub(warned);
        let has_room = |(_, count): &(_, u64)| match alert.level(*count) {
            Some(AlertLevel::Critical) => true,
            Some(AlertLevel::Warning) => {
                let before = room_to_warn;
                room_to_warn = before.saturating_sub(1);
                before > 0
            }
            None => false,
        };
        let new: Vec<_> = busy.filter(has_room).take(room).collect();
        for (address, count) in known.into_iter().chain(new) {
            self.judge_count((AlertOn::IpBlocks, Some(address)), count, now, notices);
        }
    }

    fn judge_count(&mut self, key: Key, count: u64, now: Timestamp, notices: &mut Vec<Notice>) {
        let alert = self.alert(key.0);
        let before = self.raised.get(&key).map(|told| Episode { level: told.level(), since: told.since });
        let (episode, change) = alert.judge(before, count, now);
        let Some(change) = change else { return };
        let since = episode.or(before).map_or(now, |episode| episode.since);
        let notice = Notice { on: key.0, alert, key: key.1.clone(), change, count, since, at: now };
        if episode.is_some() {
            self.raised.insert(key, notice.clone());
        } else {
            self.raised.remove(&key);
        }
        notices.push(notice);
    }
}

/// Returns the number of the step of a moment, if it is judged.
fn judged_step(scale: Scale, at: Timestamp, now: Timestamp) -> Option<u64> {
    let (first, _) = scale.judged(now);
    Some(scale.number(at)).filter(|number| *number >= first)
}
