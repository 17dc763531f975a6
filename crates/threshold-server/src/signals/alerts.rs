//! Alerts: counts what the policy's `[alerts]` are about, and tells when one begins, rises and ends.

mod addresses;
mod node;
mod notice;
mod steps;
#[cfg(test)]
mod tests;

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::sync::Arc;

use threshold_core::alert::{AlertLevel, Episode};
use threshold_core::policy::{Alert, AlertOn, Alerts, Layer};
use threshold_core::{Event, Policy, Timestamp};

use addresses::Addresses;
pub(crate) use node::{Node, host_name};
pub(crate) use notice::{EpisodeId, Notice};
use steps::{Scale, Steps};

/// The most addresses whose alert is raised at once. An attack by thousands must not send an operator thousands of messages.
const MAX_RAISED_ADDRESSES: usize = 20;
/// The most of these that are not critical: addresses that are blocked a little must not take the place of one that attacks.
const MAX_WARNED_ADDRESSES: usize = 10;
/// The most notices that are kept to be read.
const MAX_RECENT: usize = 100;

/// Counts events, and knows which alerts are raised.
///
/// The count of an alert is the largest in any period within the last one and 60 seconds before it. So an episode ends at most
/// that long after its last event, and not for a short pause.
#[derive(Debug, Default)]
pub(crate) struct AlertBook {
    /// The name of this server.
    node: Arc<str>,
    /// What is counted as a whole. A count that has not changed yet has no place here.
    totals: BTreeMap<AlertOn, Total>,
    addresses: Addresses,
    /// What the last policy says of alerts.
    alerts: Alerts,
    /// The step up to which addresses were last forgotten.
    forgotten: Option<(u64, u64)>,
    /// The alerts that are raised, each with what was told last, and the count of the last period.
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

/// What is counted of an alert.
#[derive(Debug, Clone, Copy, Default)]
struct Count {
    /// The largest count in any period that is judged.
    judged: u64,
    /// The count of the last period.
    present: u64,
}

impl Count {
    fn of(steps: &Steps, scale: Scale, alert: Alert, now: Timestamp) -> Self {
        let last = scale.number(now);
        Self { judged: steps.peak(scale, alert), present: steps.peak_in((last, last), scale, alert) }
    }
}

impl AlertBook {
    /// Creates an empty book of a server with this name.
    pub(crate) fn new(node: Arc<str>) -> Self {
        Self { node, ..Self::default() }
    }

    /// Counts an event.
    ///
    /// An event that is reported late counts at its own time, unless that is no longer judged; one from the future counts now. A denial
    /// for which the caller is not to blame, by an operator, a list or an outage, does not count.
    pub(crate) fn add(&mut self, event: &Event, now: Timestamp) {
        if event.blocked && !event.blames_caller() {
            return;
        }
        let is_user_ban =
            || event.user_id.is_some() && event.strike.as_ref().is_some_and(|it| it.banned_until.is_some());
        let on = match event.layer {
            Some(Layer::Edge) if event.blocked => Some(AlertOn::EdgeBlocks),
            Some(Layer::Tenant) if event.blocked => Some(AlertOn::TenantBlocks),
            _ => None,
        };
        for on in on.into_iter().chain(is_user_ban().then_some(AlertOn::UserBans)) {
            self.count((on, None), (event.at, event.count), now);
        }
        if let Some(address) = event.ip.as_deref().filter(|_| event.blocked) {
            self.count((AlertOn::IpBlocks, Some(address)), (event.at, event.count), now);
        }
    }

    fn count(&mut self, (on, address): (AlertOn, Option<&str>), (at, count): (Timestamp, u64), now: Timestamp) {
        let Some(alert) = self.alert(on) else { return };
        let scale = Scale::new(alert.per);
        let Some(number) = judged_step(scale, at.min(now), now) else { return };
        match address {
            None => self.totals.entry(on).or_insert(Total { scale, steps: Steps::default() }).steps.add(number, count),
            Some(address) => {
                let raised = &self.raised;
                let is_raised = |name: &str| raised.contains_key(&(on, Some(name.into())));
                self.addresses.add(address, (number, count), is_raised);
            }
        }
    }

    /// Takes over the alerts that were raised when the process before ended, and what `counts` returns of each kind of them: events
    /// by address (empty for a total), with their times. Returns the ends of those that are switched off by now.
    pub(crate) fn restore(
        &mut self,
        raised: Vec<Notice>,
        counts: impl Fn(AlertOn, Alert) -> Vec<(String, Timestamp, u64)>,
        policy: &Policy,
        now: Timestamp,
    ) -> Vec<Notice> {
        let kinds: BTreeSet<AlertOn> = raised.iter().map(|notice| notice.on).collect();
        self.raised.extend(raised.into_iter().map(|notice| ((notice.on, notice.key.clone()), notice)));
        let mut ended = Vec::new();
        self.set_thresholds(policy, now, &mut ended);
        for on in kinds {
            let Some(alert) = self.alert(on) else { continue };
            for (address, at, count) in counts(on, alert) {
                let address = Some(address.as_str()).filter(|_| on == AlertOn::IpBlocks);
                self.count((on, address), (at, count), now);
            }
        }
        // These blocks are not new.
        self.addresses.next_turn();
        ended
    }

    /// Returns from when on events are judged.
    pub(crate) fn judged_since(alert: Alert, now: Timestamp) -> Timestamp {
        now.minus(alert.per).minus(steps::HOLD)
    }

    /// Judges every count by the thresholds of the policy in force, and returns what has changed.
    pub(crate) fn judge(&mut self, policy: &Policy, now: Timestamp) -> Vec<Notice> {
        let mut notices = Vec::new();
        self.set_thresholds(policy, now, &mut notices);
        self.forget_old(now);
        for on in AlertOn::ALL {
            let Some(alert) = self.alert(on) else { continue };
            if on == AlertOn::IpBlocks {
                self.judge_addresses(alert, now, &mut notices);
            } else {
                let of = |total: &Total| Count::of(&total.steps, total.scale, alert, now);
                let count = self.totals.get(&on).map(of).unwrap_or_default();
                self.judge_count((on, None), (alert, count), now, &mut notices);
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
        self.raised.remove(&(AlertOn::IpBlocks, Some(address.into()))).map(|told| told.ended(now))
    }

    /// Returns the alerts that are raised, each as it was told last, with the count of the last period.
    pub(crate) fn raised(&self) -> impl Iterator<Item = &Notice> {
        self.raised.values()
    }

    /// Returns the last 100 notices, the newest first.
    pub(crate) fn recent(&self) -> impl Iterator<Item = &Notice> {
        self.recent.iter().rev()
    }

    /// Returns the thresholds of an alert; `None` if it is switched off.
    fn alert(&self, on: AlertOn) -> Option<Alert> {
        self.alerts.get(&on).copied().unwrap_or(Some(on.usual()))
    }

    fn set_thresholds(&mut self, policy: &Policy, now: Timestamp, notices: &mut Vec<Notice>) {
        if self.alerts == *policy.alerts() {
            return;
        }
        let before = AlertOn::ALL.map(|on| (on, self.alert(on)));
        self.alerts.clone_from(policy.alerts());
        for (on, before) in before {
            match (before, self.alert(on)) {
                (Some(before), Some(after)) => self.rescale(on, Scale::new(before.per), Scale::new(after.per)),
                (_, None) => self.switch_off(on, now, notices),
                (None, Some(_)) => {}
            }
        }
    }

    fn rescale(&mut self, on: AlertOn, before: Scale, after: Scale) {
        if before == after {
            return;
        }
        if on == AlertOn::IpBlocks {
            self.addresses.rescale(before, after);
            self.forgotten = None;
        } else if let Some(total) = self.totals.get_mut(&on) {
            total.steps.rescale(before, after);
            total.scale = after;
        }
    }

    /// Forgets what an alert has counted, and ends its episodes.
    fn switch_off(&mut self, on: AlertOn, now: Timestamp, notices: &mut Vec<Notice>) {
        self.totals.remove(&on);
        if on == AlertOn::IpBlocks {
            self.addresses = Addresses::default();
        }
        let ended = self.raised.extract_if(.., |(own, _), _| *own == on);
        notices.extend(ended.map(|(_, told)| told.ended(now)));
    }

    fn forget_old(&mut self, now: Timestamp) {
        for total in self.totals.values_mut() {
            total.steps.forget(total.scale.judged(now));
        }
        let Some(alert) = self.alert(AlertOn::IpBlocks) else { return };
        let judged = Scale::new(alert.per).judged(now);
        // All addresses are gone through only once a step.
        if self.forgotten != Some(judged) {
            self.addresses.forget(judged);
            self.forgotten = Some(judged);
        }
    }

    /// Judges the addresses that are raised, and as many others as there is room for. An address for which there was none is raised
    /// later only if it goes on: an operator needs no message about what was over before it.
    fn judge_addresses(&mut self, alert: Alert, now: Timestamp, notices: &mut Vec<Notice>) {
        let scale = Scale::new(alert.per);
        let of = |steps: &Steps| Count::of(steps, scale, alert, now);
        let raised = self.raised.keys().filter_map(|(_, address)| address.clone());
        let count = |address: &str| self.addresses.get(address).map(of).unwrap_or_default();
        let known: Vec<(Arc<str>, Count)> = raised.map(|address| (Arc::clone(&address), count(&address))).collect();
        let room = MAX_RAISED_ADDRESSES.saturating_sub(known.len());
        let warned =
            self.raised.values().filter(|told| told.key.is_some() && told.level() == AlertLevel::Warning).count();
        let mut room_to_warn = MAX_WARNED_ADDRESSES.saturating_sub(warned);
        let at_least = if room_to_warn == 0 { alert.critical } else { alert.warning };
        let is_new = |address: &Arc<str>| !self.raised.contains_key(&(AlertOn::IpBlocks, Some(Arc::clone(address))));
        let busy = self.addresses.busy(at_least, scale.number(now), (scale, alert));
        let busy = busy.filter(|(address, _)| is_new(address)).map(|(address, steps)| (Arc::clone(address), of(steps)));
        let has_room = |(_, count): &(_, Count)| match alert.level(count.judged) {
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
            self.judge_count((AlertOn::IpBlocks, Some(address)), (alert, count), now, notices);
        }
        self.addresses.next_turn();
    }

    fn judge_count(&mut self, key: Key, (alert, count): (Alert, Count), now: Timestamp, notices: &mut Vec<Notice>) {
        let told = self.raised.get_mut(&key);
        let before = told.as_ref().map(|told| Episode { level: told.level(), since: told.since });
        let peak = told.as_ref().map_or(0, |told| told.peak).max(count.judged);
        let (episode, change) = alert.judge(before, count.judged, now);
        let Some(change) = change else {
            if let Some(told) = told {
                (told.alert, told.count, told.peak) = (alert, count.present, peak);
            }
            return;
        };
        let since = episode.or(before).map_or(now, |episode| episode.since);
        let node = Arc::clone(told.map_or(&self.node, |told| &told.node));
        let (on, address) = key.clone();
        let notice = Notice { on, alert, key: address, change, count: count.judged, peak, since, at: now, node };
        if episode.is_some() {
            self.raised.insert(key, Notice { count: count.present, ..notice.clone() });
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
