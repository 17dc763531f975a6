//! Which receiver has accepted what of each episode of an alert, so that the next process can tell what this one could not.

use std::collections::BTreeMap;
use std::sync::Arc;

use threshold_core::alert::AlertLevel;
use threshold_core::{Span, Timestamp};

use crate::signals::alerts::{EpisodeId, Notice};
use crate::signals::database::SavedAlert;

/// The most episodes that are over while a receiver has yet to hear of it. The oldest gives way, and what waits of it is lost.
pub(super) const MAX_OVER: usize = 80;
/// How long after it was noticed a receiver is told by a later process of what is over by then: as long as a running server would try.
const LATE: Span = Span::HOUR;

/// What a receiver has accepted last of an episode.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Told {
    Raised(AlertLevel),
    Resolved,
}

impl Told {
    fn of(notice: &Notice) -> Self {
        if notice.is_resolved() { Self::Resolved } else { Self::Raised(notice.level()) }
    }

    pub(crate) const fn name(self) -> &'static str {
        match self {
            Self::Raised(level) => level.name(),
            Self::Resolved => "resolved",
        }
    }

    pub(crate) fn named(name: &str) -> Option<Self> {
        match name {
            "resolved" => Some(Self::Resolved),
            level => AlertLevel::named(level).map(Self::Raised),
        }
    }
}

/// What each receiver has accepted, by its id.
pub(crate) type ToldTo = BTreeMap<Arc<str>, Told>;

/// The episodes that are raised, and those whose end is not told to everybody.
#[derive(Debug, Default)]
pub(super) struct Ledger {
    episodes: BTreeMap<EpisodeId, Record>,
    /// Whether a receiver has accepted something since this was last asked.
    is_changed: bool,
}

#[derive(Debug)]
struct Record {
    /// What was told last.
    notice: Notice,
    told: ToldTo,
    /// How many notices wait for each receiver.
    waiting: BTreeMap<Arc<str>, usize>,
    /// Set if the address was erased, which must then be in no file.
    is_erased: bool,
}

/// What to do with a notice whose turn it is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Turn {
    Send,
    /// It is the end of an episode of which the receiver has not heard.
    Skip,
    /// Its episode has given way to others.
    Lost,
}

impl Ledger {
    /// Records what is told of an episode, before receivers are told.
    pub(super) fn note(&mut self, notice: &Notice) {
        let new =
            || Record { notice: notice.clone(), told: BTreeMap::new(), waiting: BTreeMap::new(), is_erased: false };
        self.episodes.entry(notice.id()).or_insert_with(new).notice = notice.clone();
        let over = self.episodes.values().filter(|record| record.notice.is_resolved());
        if over.clone().count() > MAX_OVER
            && let Some(oldest) = over.min_by_key(|record| record.notice.at).map(|record| record.notice.id())
        {
            self.episodes.remove(&oldest);
        }
    }

    /// Records that a notice waits for a receiver.
    pub(super) fn wait(&mut self, notice: &Notice, receiver: &Arc<str>) {
        if let Some(record) = self.episodes.get_mut(&notice.id()) {
            let waiting = record.waiting.entry(Arc::clone(receiver)).or_default();
            *waiting = waiting.saturating_add(1);
        }
    }

    /// Returns what to do with a notice that has waited for a receiver.
    pub(super) fn turn(&self, notice: &Notice, receiver: &str) -> Turn {
        match self.episodes.get(&notice.id()) {
            None => Turn::Lost,
            Some(record) if notice.is_resolved() && !record.told.contains_key(receiver) => Turn::Skip,
            Some(_) => Turn::Send,
        }
    }

    /// Records that a notice no longer waits, because it was accepted or given up.
    pub(super) fn end(&mut self, notice: &Notice, receiver: &Arc<str>, is_accepted: bool) {
        let id = notice.id();
        let Some(record) = self.episodes.get_mut(&id) else { return };
        if is_accepted {
            record.told.insert(Arc::clone(receiver), Told::of(notice));
        }
        if let Some(waiting) = record.waiting.get_mut(receiver) {
            *waiting = waiting.saturating_sub(1);
        }
        self.is_changed = true;
        self.forget_if_told(&id);
    }

    /// Forgets an episode that is over if nothing waits of it.
    pub(super) fn forget_if_told(&mut self, id: &EpisodeId) {
        let is_told = |record: &Record| record.notice.is_resolved() && record.waiting.values().all(|left| *left == 0);
        if self.episodes.get(id).is_some_and(is_told) {
            self.episodes.remove(id);
        }
    }

    /// Keeps the episode of an erased address out of what is saved.
    pub(super) fn erase(&mut self, address: &str) {
        for record in self.episodes.values_mut() {
            record.is_erased |= record.notice.key.as_deref() == Some(address);
            record.notice.forget_largest(address);
        }
    }

    /// Returns whether a receiver has accepted or refused something since the last call.
    pub(super) fn take_changed(&mut self) -> bool {
        std::mem::take(&mut self.is_changed)
    }

    /// Returns how many notices wait for each receiver.
    pub(super) fn waiting(&self) -> BTreeMap<Arc<str>, usize> {
        let mut sums = BTreeMap::<_, usize>::new();
        for (receiver, waiting) in self.episodes.values().flat_map(|record| &record.waiting) {
            let sum = sums.entry(Arc::clone(receiver)).or_default();
            *sum = sum.saturating_add(*waiting);
        }
        sums.retain(|_, waiting| *waiting > 0);
        sums
    }

    /// Returns what to save: these alerts, which are raised, and those whose end is not told to everybody.
    pub(super) fn to_save<'a>(&self, raised: impl IntoIterator<Item = &'a Notice>) -> Vec<SavedAlert> {
        let told =
            |notice: &Notice| self.episodes.get(&notice.id()).map(|record| record.told.clone()).unwrap_or_default();
        let raised = raised.into_iter().map(|notice| SavedAlert { notice: notice.clone(), told: Some(told(notice)) });
        let over = self.episodes.values().filter(|record| record.notice.is_resolved() && !record.is_erased);
        let over = over.map(|record| SavedAlert { notice: record.notice.clone(), told: Some(record.told.clone()) });
        raised.chain(over).collect()
    }

    /// Takes over an episode of the process before. Returns what each of these receivers is to be told of it once more: of one that
    /// is over, within an hour both its beginning and its end, and later neither.
    pub(super) fn restore<'a>(
        &mut self,
        saved: &SavedAlert,
        goes_on: bool,
        receivers: impl Iterator<Item = &'a Arc<str>>,
        now: Timestamp,
    ) -> Vec<(Arc<str>, Vec<Notice>)> {
        let notice = &saved.notice;
        let raised = Told::Raised(notice.level());
        let mut told = ToldTo::new();
        let mut left = Vec::new();
        for receiver in receivers {
            // A file of an earlier version does not say what was accepted. All of it, or each upgrade would tell it again.
            let before = match &saved.told {
                Some(told) => told.get(receiver).copied(),
                None => Some(raised),
            };
            told.extend(before.map(|before| (Arc::clone(receiver), before)));
            let mut notices = Vec::new();
            if before < Some(raised) && (goes_on || now.since(notice.at) <= LATE) {
                notices.push(notice.raised_again());
            }
            let has_heard = before.is_some() || !notices.is_empty();
            if notice.is_resolved() && before != Some(Told::Resolved) && has_heard {
                notices.push(notice.clone());
            }
            left.push((Arc::clone(receiver), notices));
        }
        left.retain(|(_, notices)| !notices.is_empty());
        self.note(notice);
        if let Some(record) = self.episodes.get_mut(&notice.id()) {
            record.told = told;
        }
        left
    }
}

#[cfg(test)]
mod tests {
    use threshold_core::alert::AlertChange::{self, Raised, Resolved};
    use threshold_core::alert::AlertLevel::{Critical, Warning};
    use threshold_core::policy::AlertOn;

    use super::*;
    use crate::signals::alerts::Why;

    fn at(minute: u64) -> Timestamp {
        Timestamp::from_secs(1_767_225_600).plus(Span::from_secs(minute.saturating_mul(60)))
    }

    fn notice(key: &str, change: AlertChange) -> Notice {
        let on = AlertOn::IpBlocks;
        let node = "node-1".into();
        Notice {
            on,
            alert: on.usual(),
            key: Some(key.into()),
            change,
            count: 9,
            peak: 30,
            since: at(0),
            at: at(1),
            node,
            why: Why::default(),
            group: None,
        }
    }

    fn changes(left: Vec<(Arc<str>, Vec<Notice>)>) -> Vec<(String, Vec<AlertChange>)> {
        let changes = |notices: Vec<Notice>| notices.iter().map(|notice| notice.change).collect();
        left.into_iter().map(|(name, notices)| (name.to_string(), changes(notices))).collect()
    }

    /// Woken by an end for a receiver without the beginning, and by a beginning for one that has accepted it.
    #[test]
    fn a_later_process_tells_each_receiver_what_it_has_not_heard() {
        let names: [Arc<str>; 4] = ["nothing", "warned", "all", "ended"].map(Into::into);
        let told = [("warned", Told::Raised(Warning)), ("all", Told::Raised(Critical)), ("ended", Told::Resolved)];
        let told: ToldTo = told.into_iter().map(|(name, told)| (name.into(), told)).collect();
        let restore = |change, told: Option<&ToldTo>, goes_on, now| {
            let saved = SavedAlert { notice: notice("203.0.113.7", change), told: told.cloned() };
            changes(Ledger::default().restore(&saved, goes_on, names.iter(), now))
        };
        let of = |name: &str, changes: &[AlertChange]| (name.to_owned(), changes.to_vec());
        let raised = [of("nothing", &[Raised(Critical)]), of("warned", &[Raised(Critical)])];
        assert_eq!(restore(Raised(Critical), Some(&told), true, at(900)), raised);
        assert_eq!(restore(Raised(Critical), Some(&told), false, at(60)), raised);
        assert_eq!(restore(Raised(Critical), Some(&told), false, at(62)), []);
        let both = [Raised(Critical), Resolved(Critical)];
        let soon = [of("nothing", &both), of("warned", &both), of("all", &both[1..])];
        assert_eq!(restore(Resolved(Critical), Some(&told), false, at(60)), soon);
        let late = [of("warned", &both[1..]), of("all", &both[1..])];
        assert_eq!(restore(Resolved(Critical), Some(&told), false, at(62)), late);
        assert_eq!(restore(Raised(Critical), None, true, at(2)), [], "a file of an earlier version");
        let again = notice("203.0.113.7", Resolved(Critical)).raised_again();
        assert_eq!((again.count, again.at), (30, at(0)));
        assert_ne!(again.message_id(), notice("203.0.113.7", Resolved(Critical)).message_id());
    }

    /// Fails if an episode is kept for as long as the process runs.
    #[test]
    fn an_episode_is_forgotten_when_its_end_is_told_and_the_oldest_gives_way() {
        let (mut ledger, name) = (Ledger::default(), Arc::<str>::from("slack-1"));
        let (raised, over) = (notice("203.0.113.7", Raised(Warning)), notice("203.0.113.7", Resolved(Warning)));
        for notice in [&raised, &over] {
            ledger.note(notice);
            ledger.wait(notice, &name);
        }
        assert_eq!(ledger.waiting(), BTreeMap::from([(Arc::clone(&name), 2)]));
        assert_eq!(ledger.turn(&over, &name), Turn::Skip);
        ledger.end(&raised, &name, true);
        assert_eq!(
            (ledger.turn(&over, &name), ledger.take_changed(), ledger.take_changed()),
            (Turn::Send, true, false)
        );
        assert_eq!(ledger.to_save([]).len(), 1);
        ledger.end(&over, &name, true);
        assert!(ledger.episodes.is_empty() && ledger.waiting().is_empty());
        for number in 0..MAX_OVER.saturating_add(7) {
            let over = notice(&format!("10.0.0.{number}"), Resolved(Warning));
            let at = at(u64::try_from(number).unwrap());
            let over = Notice { at, ..over };
            ledger.note(&over);
            ledger.wait(&over, &name);
        }
        assert_eq!(ledger.episodes.len(), MAX_OVER);
        assert_eq!(ledger.turn(&notice("10.0.0.6", Resolved(Warning)), &name), Turn::Lost);
        assert_eq!(ledger.turn(&notice("10.0.0.7", Resolved(Warning)), &name), Turn::Skip);
        ledger.erase("10.0.0.7");
        let saved = ledger.to_save([&raised]);
        assert_eq!(saved.len(), MAX_OVER, "the one that is raised, and all but the erased one");
        assert!(saved.iter().all(|saved| saved.notice.key.as_deref() != Some("10.0.0.7")));
    }
}
