//! What operators are told of decisions, apart from their answers: events and alerts.
//!
//! A decision puts its event into a bounded queue and goes on. A few times a second the events are taken from there and handed to
//! everything that counts, keeps or forwards them.

pub(crate) mod alerts;
pub(crate) mod database;
pub(crate) mod draft;
pub(crate) mod recent_requests;
mod reported;
pub(crate) mod series;
pub(crate) mod sinks;
pub(crate) mod tops;

use std::borrow::Cow;
use std::collections::BTreeSet;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use threshold_core::policy::UserScope;
use threshold_core::{Event, Policy, Timestamp};
use threshold_limiter::events::{self, EventReceiver, EventSender};

use crate::metrics::Metrics;
use alerts::{AlertBook, EpisodeId, Notice};
use database::{DatabaseError, EventDatabase, Field, Filter, SavedAlert};
use reported::ReportedIds;
use series::SeriesBook;
use sinks::Sinks;
use tops::{Kind, Tops};

/// The most events that wait. One has about a kilobyte.
const QUEUE: usize = 8_192;
/// The most events of one report.
pub(crate) const MAX_REPORT: usize = 200_000;

/// The queue of events, whose beginning is an observer of the limiter.
#[derive(Debug)]
pub(crate) struct EventQueue {
    pub(crate) sender: EventSender,
    receiver: Mutex<EventReceiver>,
}

impl Default for EventQueue {
    fn default() -> Self {
        let (sender, receiver) = events::queue(QUEUE);
        Self { sender, receiver: Mutex::new(receiver) }
    }
}

/// What is counted for operators.
#[derive(Debug)]
pub(crate) struct Signals {
    queue: Arc<EventQueue>,
    pub(crate) alerts: Mutex<AlertBook>,
    pub(crate) tops: Mutex<Tops>,
    pub(crate) series: Mutex<SeriesBook>,
    pub(crate) database: EventDatabase,
    pub(crate) sinks: Sinks,
    reported: Mutex<ReportedIds>,
    /// The events of this server, which may be reported back to it.
    own: Mutex<ReportedIds>,
}

impl Signals {
    pub(crate) fn new(queue: Arc<EventQueue>, database: EventDatabase, sinks: Sinks) -> Self {
        let alerts = Mutex::new(AlertBook::new(Arc::clone(&sinks.node.name)));
        let (tops, series, reported, own) = (Mutex::default(), Mutex::default(), Mutex::default(), Mutex::default());
        Self { queue, alerts, tops, series, database, sinks, reported, own }
    }

    /// Records events that another system reports, unless it has reported them before or they are this server's own. Returns how many are
    /// new.
    ///
    /// They do not go through the queue, in which one report would leave no room for the names of its own events.
    pub(crate) fn report(&self, mut events: Vec<Event>, policy: &Policy, now: Timestamp) -> usize {
        lock(&self.reported).retain_new(&mut events);
        let mut receiver = lock(&self.queue.receiver);
        // Those before them, so that the order of arrival stays.
        self.count_own(&mut receiver, policy, now);
        let own = lock(&self.own);
        events.retain(|event| !own.contains(event.id));
        drop(own);
        for events in events.chunks(QUEUE) {
            self.count(&events.into(), policy, now);
        }
        drop(receiver);
        events.len()
    }

    /// Takes the events that wait, counts them, and tells what has changed. A call that shows a figure does this first, so that the
    /// figure includes every decision that was answered before.
    pub(crate) fn collect(&self, policy: &Policy, now: Timestamp) {
        // Held until all is counted, so that the second of two callers returns after the events of the first are counted too.
        let mut receiver = lock(&self.queue.receiver);
        self.count_own(&mut receiver, policy, now);
        drop(receiver);
    }

    /// Counts the events of this server's own decisions.
    fn count_own(&self, receiver: &mut EventReceiver, policy: &Policy, now: Timestamp) {
        let events: Arc<[Event]> = receiver.take(QUEUE, Duration::ZERO).into();
        let mut own = lock(&self.own);
        events.iter().for_each(|event| own.add(event.id));
        drop(own);
        self.count(&events, policy, now);
    }

    fn count(&self, events: &Arc<[Event]>, policy: &Policy, now: Timestamp) {
        let mut tops = lock(&self.tops);
        events.iter().for_each(|event| tops.add(event, policy.identity().user_scope, now));
        drop(tops);
        let mut book = lock(&self.alerts);
        for event in events.iter() {
            book.add(event, now);
        }
        let notices = book.judge(policy, now);
        drop(book);
        notices.iter().for_each(|notice| self.tell(notice));
        // Last, because it may wait for a disk: an alert must not. What receivers accept is saved with the next count.
        if self.sinks.take_changed() || !notices.is_empty() {
            self.save_alerts(now);
        }
        if events.is_empty() {
            self.database.look(Some(now));
        } else {
            self.sinks.events(events);
            self.database.insert(events, now);
        }
    }

    /// Takes over the alerts that were raised when the process before ended: one that is over by now is resolved, and one that goes
    /// on is told again only to receivers that have not accepted it.
    pub(crate) fn restore(&self, policy: &Policy, now: Timestamp) {
        let mut saved = self.database.saved_alerts(now);
        if saved.is_empty() {
            return;
        }
        for SavedAlert { notice, .. } in &mut saved {
            notice.alert = policy.alert(notice.on).unwrap_or(notice.on.usual());
        }
        let counts = |on, alert| {
            let counts = self.database.alert_counts((on, alert), AlertBook::judged_since(alert, now));
            counts.unwrap_or_else(|error| {
                tracing::error!(reason = %error, alert = on.name(), "alert restored without its count");
                Vec::new()
            })
        };
        let raised = saved.iter().map(|saved| &saved.notice).filter(|notice| !notice.is_resolved());
        let mut book = lock(&self.alerts);
        let mut notices = book.restore(raised.cloned().collect(), counts, policy, now);
        notices.extend(book.judge(policy, now));
        let raised: BTreeSet<EpisodeId> = book.raised().map(Notice::id).collect();
        drop(book);
        // Before what has changed: no receiver hears of an end first.
        saved.iter().for_each(|saved| self.sinks.restore(saved, raised.contains(&saved.notice.id()), now));
        notices.iter().for_each(|notice| self.tell(notice));
        self.save_alerts(now);
    }

    /// Deletes old events. Alerts are saved again, for the case that their file was replaced or could not be written.
    pub(crate) fn sweep(&self, now: Timestamp) {
        self.database.sweep(now);
        self.save_alerts(now);
    }

    /// Waits for receivers to take what is left for them, at most so long, and says what they have not taken.
    pub(crate) fn close(&self, at_most: Duration, now: Timestamp) {
        let left = self.sinks.close(at_most);
        let is_saved = self.save_alerts(now);
        for (sink, notices) in &left {
            if is_saved {
                tracing::warn!(sink = &**sink, notices, "alerts not delivered: the next start tells them");
            } else {
                tracing::error!(sink = &**sink, notices, "alerts lost: not delivered before the server stopped");
            }
        }
        if !is_saved {
            self.sinks.count_left(&left);
        }
    }

    /// Saves what the next process needs to know of alerts. Returns whether it will know.
    fn save_alerts(&self, now: Timestamp) -> bool {
        let alerts = self.sinks.to_save(lock(&self.alerts).raised());
        self.database.save_alerts(&alerts, now)
    }

    fn tell(&self, notice: &Notice) {
        notice.log(&self.sinks.node);
        self.sinks.alert(notice);
    }

    /// Deletes the events for which all filters hold, and removes what they name from the lists. Returns how many events there were.
    pub(crate) fn erase(&self, filters: &[Filter], scope: UserScope, now: Timestamp) -> Result<u64, DatabaseError> {
        // Several names are one subject, such as the user of a tenant. Only the narrowest leaves the lists: others share the rest.
        let narrowest = [Field::UserId, Field::Ip, Field::Tenant]
            .into_iter()
            .find(|field| filters.iter().any(|filter| filter.field == *field));
        let is_narrow = |filter: &&Filter| Some(filter.field) == narrowest;
        let names: Vec<&String> = filters.iter().filter(is_narrow).flat_map(|filter| &filter.values).collect();
        // By its kind: a user may have the name of an address.
        let kind = match narrowest {
            Some(Field::Tenant) => Kind::Tenant,
            Some(Field::Ip) => Kind::Ip,
            _ => Kind::User,
        };
        let tenants = filters.iter().find(|filter| filter.field == Field::Tenant).map(|filter| &filter.values);
        lock(&self.tops).forget(kind, |listed| match kind {
            Kind::Tenant | Kind::Ip => names.iter().any(|name| *name == listed),
            Kind::User => scope.read(listed).is_ok_and(|(tenant, user)| {
                let is_tenants =
                    |own: Cow<'_, str>| tenants.is_none_or(|tenants| tenants.iter().any(|name| *name == own));
                names.iter().any(|name| **name == user) && tenant.is_none_or(is_tenants)
            }),
        });
        if kind == Kind::Tenant {
            // Its users leave with it.
            let is_erased = |tenant: Cow<'_, str>| names.iter().any(|name| **name == tenant);
            lock(&self.tops)
                .forget(Kind::User, |listed| scope.read(listed).is_ok_and(|(tenant, _)| tenant.is_some_and(is_erased)));
        }
        if kind == Kind::Ip {
            let mut book = lock(&self.alerts);
            let ended: Vec<Notice> = names.iter().filter_map(|name| book.erase(name, now)).collect();
            drop(book);
            ended.iter().for_each(|notice| self.tell(notice));
            names.iter().for_each(|name| self.sinks.erase(name));
            // Before the events, with which every copy of the name leaves the file.
            self.save_alerts(now);
        }
        self.database.erase(filters, now)
    }

    /// Brings the metrics of events and alerts up to date.
    pub(crate) fn update(&self, metrics: &Metrics) {
        metrics.set_events_unnamed(self.queue.sender.unnamed().saturating_add(self.database.unnamed()));
        metrics.set_events_lost(self.database.lost());
        self.sinks.lost_by_sink().for_each(|(sink, lost)| metrics.set_sink_lost(sink, lost));
        let book = lock(&self.alerts);
        metrics.set_alerts(|alert, level| {
            book.raised().filter(|notice| notice.on == alert && notice.level() == level).count()
        });
    }
}

pub(crate) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    // A poisoned lock is safe to use: what is counted is never half changed.
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::desk::tests::{Folder, START};

    /// A sink may lead back to the server, directly or by another one.
    ///
    /// Woken by leaving out `own`.
    #[test]
    fn an_own_event_that_is_reported_back_counts_once() {
        let queue = Arc::<EventQueue>::default();
        let database = EventDatabase::open(None, database::Retention::default(), START);
        let signals = Signals::new(Arc::clone(&queue), database, Sinks::default());
        let policy = Policy::parse("", &|_| None).unwrap();
        let event = |number: u8| {
            let (id, at) = (format!("00000000-0000-4000-8000-{number:012}"), START.micros() / 1_000);
            Event::from_json(&format!(r#"{{"id":"{id}","at":{at},"blocked":true,"layer":"edge"}}"#)).unwrap()
        };
        queue.sender.send(event(1));
        assert_eq!(signals.report(vec![event(1), event(2)], &policy, START), 1);
        assert_eq!(signals.report(vec![event(1), event(2)], &policy, START), 0);
    }

    /// Fails if the table of alerts is not saved before the events are erased.
    #[test]
    fn an_erased_address_leaves_the_saved_alerts_too() {
        let folder = Folder::new();
        let path = folder.journal().with_file_name("threshold.events");
        let open = || EventDatabase::open(Some(&path), database::Retention::default(), START);
        let signals = Signals::new(Arc::default(), open(), Sinks::default());
        let at = START.micros() / 1_000;
        let event = |number: u64, address: &str| {
            let id = format!("00000000-0000-4000-8000-{number:012x}");
            let json = format!(r#"{{"id":"{id}","at":{at},"blocked":true,"ip":"{address}","count":30}}"#);
            Event::from_json(&json).unwrap()
        };
        let policy = Policy::parse("", &|_| None).unwrap();
        signals.report(vec![event(1, "203.0.113.7"), event(2, "203.0.113.8")], &policy, START);
        let saved = |signals: &Signals| -> Vec<String> {
            let saved = signals.database.saved_alerts(START);
            saved.iter().filter_map(|saved| saved.notice.key.as_deref().map(str::to_owned)).collect()
        };
        assert_eq!(saved(&signals), ["203.0.113.7", "203.0.113.8"]);
        let filter = Filter::new(Field::Ip, vec!["203.0.113.7".to_owned()]);
        assert_eq!(signals.erase(&[filter], UserScope::Global, START).unwrap(), 1);
        assert_eq!(saved(&signals), ["203.0.113.8"]);
        drop(signals);
        let bytes = std::fs::read(&path).unwrap();
        assert!(memchr::memmem::find(&bytes, b"203.0.113.7").is_none());
        assert!(memchr::memmem::find(&bytes, b"203.0.113.8").is_some());
        // The next process goes on with the other one.
        let next = Signals::new(Arc::default(), open(), Sinks::default());
        next.restore(&policy, START);
        next.collect(&policy, START);
        let book = lock(&next.alerts);
        let raised: Vec<_> = book.raised().map(|told| (told.key.as_deref(), told.count)).collect();
        assert_eq!((raised, book.recent().count()), (vec![(Some("203.0.113.8"), 30)], 0));
    }
}
