//! Alerts: counts what the policy's `[alerts]` are about, and tells when one begins, rises and ends.

mod addresses;
mod causes;
mod node;
mod notice;
mod steps;
#[cfg(test)]
mod tests;
mod together;

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::sync::Arc;

use threshold_core::alert::Episode;
use threshold_core::policy::{Alert, AlertOn, Alerts, Layer};
use threshold_core::{Event, Policy, Timestamp};

use addresses::Addresses;
use causes::Causes;
pub(crate) use causes::Why;
pub(crate) use node::{Node, host_name};
pub(crate) use notice::{EpisodeId, Notice};
use steps::{Scale, Steps};
pub(crate) use together::Group;
use together::{OwnAlerts, Together};

/// The most addresses that are compared in one turn, those with the most blocks. Of the others only the number is told.
const MAX_COMPARED: usize = 100;
/// The alert about several addresses.
const TOGETHER: Key = (AlertOn::IpBlocks, None);
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
    own: OwnAlerts,
    /// What was told of addresses that have no alert of their own.
    together: Option<Together>,
    /// What the last policy says of alerts.
    alerts: Alerts,
    /// The step up to which addresses were last forgotten.
    forgotten: Option<(u64, u64)>,
    /// The alerts that are raised, each with what was told last, and the count of the last period.
    raised: BTreeMap<Key, Notice>,
    /// What was told, the newest last.
    recent: VecDeque<Notice>,
}

/// The alert, and the address if it is about one. Of `ip_blocks`, the one without an address is about several.
type Key = (AlertOn, Option<Arc<str>>);

#[derive(Debug)]
struct Total {
    scale: Scale,
    steps: Steps,
    causes: Causes,
}

/// What a count is judged by, and what a notice says besides.
struct Judged {
    alert: Alert,
    count: Count,
    why: Why,
    group: Option<Group>,
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
            self.count((on, None), (event.at, event.count), Some(event), now);
        }
        if let Some(address) = event.ip.as_deref().filter(|_| event.blocked) {
            self.count((AlertOn::IpBlocks, Some(address)), (event.at, event.count), Some(event), now);
        }
    }

    /// Adds to a count. `event` says why, if that is known.
    fn count(
        &mut self,
        (on, address): (AlertOn, Option<&str>),
        (at, count): (Timestamp, u64),
        event: Option<&Event>,
        now: Timestamp,
    ) {
        let Some(alert) = self.alert(on) else { return };
        let scale = Scale::new(alert.per);
        let Some(number) = judged_step(scale, at.min(now), now) else { return };
        match address {
            None => {
                let new = || Total { scale, steps: Steps::default(), causes: Causes::default() };
                let total = self.totals.entry(on).or_insert_with(new);
                total.steps.add(number, count);
                event.into_iter().for_each(|event| total.causes.add(event, number));
            }
            Some(address) => {
                let raised = &self.raised;
                let is_raised = |name: &str| raised.contains_key(&(on, Some(name.into())));
                self.addresses.add(address, (number, count), event, is_raised);
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
                // After a jump of the clock they may be in the future, and say nothing about now.
                if at <= now {
                    self.count((on, address), (at, count), None, now);
                }
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
                let of = |total: &Total| (Count::of(&total.steps, total.scale, alert, now), total.causes.most());
                let (count, why) = self.totals.get(&on).map(of).unwrap_or_default();
                self.judge_count((on, None), Judged { alert, count, why, group: None }, now, &mut notices);
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
        self.recent.iter_mut().chain(self.raised.values_mut()).for_each(|notice| notice.forget_largest(address));
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
            (self.addresses, self.own, self.together) = (Addresses::default(), OwnAlerts::default(), None);
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

    /// Judges the addresses that are raised, and those that go on beside them. A few of these have an alert of their own, and the
    /// others are told together. What was over before it was judged is not told.
    fn judge_addresses(&mut self, alert: Alert, now: Timestamp, notices: &mut Vec<Notice>) {
        let scale = Scale::new(alert.per);
        let of = |steps: &Steps| Count::of(steps, scale, alert, now);
        let raised: Vec<Arc<str>> = self.raised.keys().filter_map(|(_, address)| address.clone()).collect();
        for address in raised {
            let count = self.addresses.get(&address).map(of).unwrap_or_default();
            self.judge_address(address, (alert, count), now, notices);
        }
        let is_new = |address: &Arc<str>| !self.raised.contains_key(&(AlertOn::IpBlocks, Some(Arc::clone(address))));
        let busy = self.addresses.busy(alert.warning, scale.number(now), (scale, alert));
        let mut busy = busy.filter(|(address, _)| is_new(address));
        let compared = busy.by_ref().take(MAX_COMPARED).map(|(address, steps)| (Arc::clone(address), of(steps)));
        let mut compared: Vec<(Arc<str>, Count)> = compared.collect();
        let mut others = compared.len().saturating_add(busy.count());
        compared.sort_by_key(|(_, count)| std::cmp::Reverse(count.judged));
        self.own.forget_old(now);
        let mut largest = None;
        for (address, count) in compared {
            // The first for which there is no room is the largest of the others.
            if !self.admit(count.judged, now) {
                largest = Some((address, count));
                break;
            }
            others = others.saturating_sub(1);
            self.judge_address(address, (alert, count), now, notices);
        }
        self.judge_together(alert, largest.map(|(address, count)| (others, address, count)), now, notices);
        self.addresses.next_turn();
    }

    /// Returns whether an address with so many blocks has an alert of its own.
    fn admit(&mut self, count: u64, now: Timestamp) -> bool {
        // Without the alert of all others, whose peak an address that grows would raise before it.
        let own = || self.raised.values().filter(|told| told.key.is_some());
        let heaviest = own().map(|told| told.peak).max().unwrap_or(0);
        let own = own().count();
        self.own.admit(count, (own, heaviest), self.raised.contains_key(&TOGETHER), now)
    }

    fn judge_address(
        &mut self,
        address: Arc<str>,
        (alert, count): (Alert, Count),
        now: Timestamp,
        notices: &mut Vec<Notice>,
    ) {
        let why = self.addresses.why(&address);
        let judged = Judged { alert, count, why, group: None };
        self.judge_count((AlertOn::IpBlocks, Some(address)), judged, now, notices);
    }

    /// Judges the addresses that have no alert of their own: how many there are, and the one with the most blocks.
    fn judge_together(
        &mut self,
        alert: Alert,
        others: Option<(usize, Arc<str>, Count)>,
        now: Timestamp,
        notices: &mut Vec<Notice>,
    ) {
        let before = notices.len();
        let told = self.raised.get_mut(&TOGETHER);
        let so_far = told.as_ref().and_then(|told| told.group.as_ref()).map_or(0, |group| group.addresses);
        // After a restart, what was told before is not known, and neither is how long it has been quiet.
        let restored =
            told.as_ref().map(|told| Together { busy: now, told_at: now, addresses: so_far, count: told.peak });
        self.together = self.together.filter(|_| restored.is_some()).or(restored);
        let Some((addresses, largest, count)) = others else {
            let Some(together) = &mut self.together else { return };
            // A clock that was set back must not keep it raised.
            together.busy = together.busy.min(now);
            if together.is_over(now) {
                let judged = Judged { alert, count: Count::default(), why: Why::default(), group: None };
                self.judge_count(TOGETHER, judged, now, notices);
            } else if let Some(told) = told {
                told.count = 0;
            }
            return;
        };
        let why = self.addresses.why(&largest);
        let group = Some(Group { addresses: addresses.max(so_far), largest: Some(largest) });
        self.judge_count(TOGETHER, Judged { alert, count, why, group }, now, notices);
        let has_grown = self.together.is_some_and(|told| told.has_grown(addresses, count.judged, now));
        if notices.len() == before
            && has_grown
            && let Some(told) = self.raised.get_mut(&TOGETHER)
        {
            told.at = now;
            notices.push(Notice { count: count.judged, ..told.clone() });
        }
        let is_told = notices.len() > before;
        self.together = match self.together.filter(|_| !is_told) {
            Some(together) => Some(Together { busy: now, ..together }),
            None => Some(Together { busy: now, told_at: now, addresses, count: count.judged }),
        };
    }

    fn judge_count(&mut self, key: Key, judged: Judged, now: Timestamp, notices: &mut Vec<Notice>) {
        let Judged { alert, count, why, group } = judged;
        let told = self.raised.get_mut(&key);
        let before = told.as_ref().map(|told| Episode { level: told.level(), since: told.since });
        let peak = told.as_ref().map_or(0, |told| told.peak).max(count.judged);
        // At the end of an episode nothing may be left to say why.
        let why = told.as_ref().map(|told| &told.why).filter(|_| !why.is_known()).cloned().unwrap_or(why);
        let group = group.or_else(|| told.as_ref()?.group.clone());
        let (episode, change) = alert.judge(before, count.judged, now);
        let Some(change) = change else {
            if let Some(told) = told {
                (told.alert, told.count, told.peak) = (alert, count.present, peak);
                (told.why, told.group) = (why, group);
            }
            return;
        };
        let since = episode.or(before).map_or(now, |episode| episode.since);
        let node = Arc::clone(told.map_or(&self.node, |told| &told.node));
        let (on, address) = key.clone();
        let notice =
            Notice { on, alert, key: address, change, count: count.judged, peak, since, at: now, node, why, group };
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
