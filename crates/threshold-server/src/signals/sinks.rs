//! Sinks: the receivers of events and alerts, besides the database and the log. Each has a thread of its own and a bounded queue, so
//! that a slow one delays neither decisions nor other sinks.

mod body;
mod guard;
mod ledger;
mod lines;
mod settings;
#[cfg(test)]
mod tests;
mod webhook;

use std::collections::BTreeMap;
use std::fmt;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, SyncSender, channel, sync_channel};
use std::sync::{Arc, Mutex, PoisonError, TryLockError};
use std::thread::{self, ScopedJoinHandle};
use std::time::Duration;

use anyhow::Context as _;
use threshold_core::{Event, Timestamp};

use self::body::Form;
pub(crate) use self::guard::Reach;
use self::ledger::{Ledger, Turn};
pub(crate) use self::ledger::{Told, ToldTo};
pub(crate) use self::lines::Lines;
pub(crate) use self::settings::SinkSettings;
use self::settings::{Names, Target};
use self::webhook::{Delivery, Patience, Stop, Webhook, new_id};
use super::alerts::{Node, Notice};
use super::database::SavedAlert;
use super::lock;

/// The most events that wait for one sink: twice as many as one batch may have. One has about a kilobyte, and sinks share them.
const MAX_EVENTS: usize = 16_384;
/// The most batches that wait for one sink.
const MAX_BATCHES: usize = 1_024;
/// The most notices that wait for one receiver: those of many hours.
const MAX_NOTICES: usize = 1_000;
/// The most events and bytes in one request. A Threshold server takes a body of 1 MiB.
const MAX_POST: usize = 500;
const MAX_POST_BYTES: usize = 512 << 10;

/// All sinks.
pub(crate) struct Sinks {
    sinks: Mutex<Vec<Sink>>,
    /// The receivers of alerts, in the order of the setting.
    receivers: Vec<Arc<AlertReceiver>>,
    ledger: Arc<Mutex<Ledger>>,
    pub(crate) names: Names,
    /// Held while a test message is sent.
    testing: Mutex<()>,
    pub(crate) node: Arc<Node>,
    /// What each sink has lost, in the same order.
    lost: Vec<SinkLost>,
    stop: Arc<Stop>,
    /// Disconnected when all threads have ended.
    ended: Mutex<Receiver<()>>,
}

/// A receiver of alerts.
struct AlertReceiver {
    /// Its kind and its number of that kind, and the scheme and host of its URL: `slack-1 https://hooks.slack.com`.
    name: Arc<str>,
    /// Its kind and a digest of its URL, by which the next process recognises it, wherever it is in the setting.
    id: Arc<str>,
    webhook: Webhook,
    form: Form,
}

/// What became of a test message.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Tested {
    /// The name of the receiver.
    pub(crate) name: Arc<str>,
    /// `Err` has the reason.
    pub(crate) result: Result<(), String>,
}

impl fmt::Debug for Sinks {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Sinks").field("lost", &self.lost).finish_non_exhaustive()
    }
}

/// What a sink has lost.
#[derive(Debug)]
struct SinkLost {
    /// Its kind and its number of that kind: `slack-1`. It is a label in metrics, so it has nothing of a URL or of a path.
    label: String,
    count: Arc<AtomicU64>,
}

/// The queue of a sink.
enum Sink {
    Events(EventQueue),
    Alerts(SyncSender<Notice>, Arc<AlertReceiver>),
}

/// No sinks.
impl Default for Sinks {
    fn default() -> Self {
        let (_, ended) = channel();
        Self {
            sinks: Mutex::default(),
            receivers: Vec::new(),
            ledger: Arc::default(),
            names: Names::default(),
            testing: Mutex::default(),
            node: Arc::default(),
            lost: Vec::new(),
            stop: Arc::default(),
            ended: Mutex::new(ended),
        }
    }
}

/// The batches that wait, or are being taken.
struct EventQueue {
    batches: SyncSender<Arc<[Event]>>,
    events: Arc<AtomicUsize>,
}

impl EventQueue {
    /// Adds a batch, and returns whether there was room.
    fn add(&self, batch: &Arc<[Event]>) -> bool {
        // Before it is sent, so that the thread never subtracts what is not yet added.
        let before = self.events.fetch_add(batch.len(), Ordering::Relaxed);
        let has_room = before.saturating_add(batch.len()) <= MAX_EVENTS;
        let is_added = has_room && self.batches.try_send(Arc::clone(batch)).is_ok();
        if !is_added {
            self.events.fetch_sub(batch.len(), Ordering::Relaxed);
        }
        is_added
    }
}

impl Sinks {
    /// Opens the files, and starts a thread for each sink. `redact` returns a keyed digest of a URL, which may be a secret.
    pub(crate) fn start(settings: SinkSettings, redact: impl Fn(&str) -> String) -> anyhow::Result<Self> {
        Self::start_with(settings, redact, Patience::EVENTS, Patience::ALERTS)
    }

    fn start_with(
        settings: SinkSettings,
        redact: impl Fn(&str) -> String,
        for_events: Patience,
        for_alerts: Patience,
    ) -> anyhow::Result<Self> {
        let mut names = settings.names();
        let SinkSettings { lines, events, alerts, keys, reach, tls, node } = settings;
        let node = Arc::new(node);
        let stop = Arc::<Stop>::default();
        let (running, ended) = channel();
        let (mut sinks, mut lost) = (Vec::new(), Vec::<SinkLost>::new());
        let mut worker = |kind: &str, target: String| {
            let same = lost.iter().filter(|own| own.label.rsplit_once('-').is_some_and(|(own, _)| own == kind)).count();
            let label = format!("{kind}-{}", same.saturating_add(1));
            let name = format!("{label} {target}").into();
            let (count, stop, running) = (Arc::<AtomicU64>::default(), Arc::clone(&stop), running.clone());
            lost.push(SinkLost { label, count: Arc::clone(&count) });
            Worker { name, lost: count, stop, is_failing: false, _running: running }
        };
        for lines in lines {
            lines.open().with_context(|| format!("--events-to: cannot write {lines}"))?;
            let worker = worker(lines.kind(), lines.to_string());
            sinks.push(spawn_events(worker, move |worker, events| worker.write(&lines, events))?);
        }
        let agent = webhook::agent(tls, reach);
        let webhook =
            |url, token, patience| Webhook { agent: agent.clone(), url, token, keys: Arc::clone(&keys), patience };
        if let Some((Target { url, name }, token)) = events {
            let webhook = webhook(url, token, for_events);
            sinks.push(spawn_events(worker("events", name), move |worker, events| worker.post(&webhook, events))?);
        }
        let mut receivers = Vec::<Arc<AlertReceiver>>::new();
        let ledger = Arc::<Mutex<Ledger>>::default();
        for (Target { url, name }, form) in alerts {
            let worker = worker(form.kind(), name);
            let name = Arc::clone(&worker.name);
            let digest = redact(&form.address(&url));
            // A URL that is given twice is two receivers.
            let ids = (1..).map(|number| format!("{} {digest} {number}", form.kind()));
            let is_free = |id: &String| receivers.iter().all(|other| &*other.id != id.as_str());
            let id = ids.into_iter().find(is_free).unwrap_or_default().into();
            let receiver = Arc::new(AlertReceiver { name, id, webhook: webhook(url, None, for_alerts), form });
            sinks.push(spawn_alerts(worker, Arc::clone(&receiver), (Arc::clone(&node), Arc::clone(&ledger)))?);
            receivers.push(receiver);
        }
        names.alerts = receivers.iter().map(|receiver| receiver.name.to_string()).collect();
        let (sinks, testing, ended) = (Mutex::new(sinks), Mutex::default(), Mutex::new(ended));
        Ok(Self { sinks, receivers, ledger, names, testing, node, lost, stop, ended })
    }

    /// Sends a test message to every receiver of alerts, once and past its queue, and waits for all of them: at most 10 seconds for
    /// each request, of which PagerDuty gets two. Returns nothing while another test is being sent.
    pub(crate) fn test(&self, now: Timestamp) -> Option<Vec<Tested>> {
        let _turn = match self.testing.try_lock() {
            Ok(turn) => turn,
            Err(TryLockError::Poisoned(turn)) => turn.into_inner(),
            Err(TryLockError::WouldBlock) => return None,
        };
        let test = |receiver: &AlertReceiver| {
            let bodies = receiver.form.write_test(&self.node, now);
            let result = bodies.iter().try_for_each(|body| receiver.webhook.try_once(body));
            Tested { name: Arc::clone(&receiver.name), result }
        };
        // Side by side, so that several that do not answer keep the operator no longer than one.
        Some(thread::scope(|scope| {
            let start = |receiver| thread::Builder::new().spawn_scoped(scope, move || test(receiver));
            let threads: Vec<_> = self.receivers.iter().map(|receiver| (receiver, start(receiver))).collect();
            let end = |(receiver, thread): (&Arc<AlertReceiver>, std::io::Result<ScopedJoinHandle<'_, Tested>>)| {
                let tested = thread.ok().and_then(|thread| thread.join().ok());
                let failed = || Tested { name: Arc::clone(&receiver.name), result: Err("no thread for it".to_owned()) };
                tested.unwrap_or_else(failed)
            };
            threads.into_iter().map(end).collect()
        }))
    }

    /// Hands events to the sinks. It never waits: what has no room in a queue is lost there.
    pub(crate) fn events(&self, events: &Arc<[Event]>) {
        if events.is_empty() {
            return;
        }
        for (sink, lost) in self.sinks.lock().unwrap_or_else(PoisonError::into_inner).iter().zip(&self.lost) {
            if let Sink::Events(queue) = sink
                && !queue.add(events)
            {
                lost.count.fetch_add(events.len().try_into().unwrap_or(u64::MAX), Ordering::Relaxed);
            }
        }
    }

    /// Hands a notice to the receivers of alerts.
    pub(crate) fn alert(&self, notice: &Notice) {
        let ledger = &mut *lock(&self.ledger);
        ledger.note(notice);
        self.enqueue(notice, ledger, |_| true);
        ledger.forget_if_told(&notice.id());
    }

    /// Takes over an episode of the process before, and tells receivers what they have not accepted of it.
    pub(crate) fn restore(&self, saved: &SavedAlert, goes_on: bool, now: Timestamp) {
        let ledger = &mut *lock(&self.ledger);
        let ids = self.receivers.iter().map(|receiver| &receiver.id);
        for (id, notices) in ledger.restore(saved, goes_on, ids, now) {
            let receiver = self.receivers.iter().find(|receiver| receiver.id == id);
            tracing::info!(
                sink = receiver.map(|receiver| &*receiver.name),
                alert = saved.notice.on.name(),
                "alert told again: it was not delivered before the restart"
            );
            notices.iter().for_each(|notice| self.enqueue(notice, ledger, |receiver| receiver.id == id));
        }
        ledger.forget_if_told(&saved.notice.id());
    }

    /// Puts a notice into the queues of some receivers.
    fn enqueue(&self, notice: &Notice, ledger: &mut Ledger, is_for: impl Fn(&AlertReceiver) -> bool) {
        for (sink, lost) in lock(&self.sinks).iter().zip(&self.lost) {
            let Sink::Alerts(queue, receiver) = sink else { continue };
            if !is_for(receiver) {
                continue;
            }
            // The thread waits for the ledger before it takes its turn.
            match queue.try_send(notice.clone()) {
                Ok(()) => ledger.wait(notice, &receiver.id),
                Err(_) => drop(lost.count.fetch_add(1, Ordering::Relaxed)),
            }
        }
    }

    /// Returns what the next process needs to know of these alerts, which are raised, and of those whose end is not told to everybody.
    pub(crate) fn to_save<'a>(&self, raised: impl IntoIterator<Item = &'a Notice>) -> Vec<SavedAlert> {
        lock(&self.ledger).to_save(raised)
    }

    /// Returns whether a receiver has accepted or refused a notice since the last call.
    pub(crate) fn take_changed(&self) -> bool {
        lock(&self.ledger).take_changed()
    }

    /// Keeps what waits of an erased address out of what is saved.
    pub(crate) fn erase(&self, address: &str) {
        lock(&self.ledger).erase(address);
    }

    /// Returns how many events and notices each sink has lost: without room in its queue, or not accepted.
    pub(crate) fn lost_by_sink(&self) -> impl Iterator<Item = (&str, u64)> {
        self.lost.iter().map(|sink| (&*sink.label, sink.count.load(Ordering::Relaxed)))
    }

    /// Returns the sum over the sinks.
    #[cfg(test)]
    fn lost(&self) -> u64 {
        self.lost_by_sink().map(|(_, lost)| lost).sum()
    }

    /// Waits until the queues are empty, at most this long. Returns how many notices are left for each receiver.
    pub(crate) fn close(&self, at_most: Duration) -> BTreeMap<Arc<str>, usize> {
        lock(&self.sinks).clear();
        self.stop.stop(at_most);
        let ended = lock(&self.ended).recv_timeout(at_most);
        let waiting = lock(&self.ledger).waiting();
        let left = |receiver: &Arc<AlertReceiver>| Some((Arc::clone(&receiver.name), *waiting.get(&receiver.id)?));
        let left: BTreeMap<_, _> = self.receivers.iter().filter_map(left).collect();
        if ended == Err(RecvTimeoutError::Timeout) && left.is_empty() {
            tracing::warn!("events not delivered before the server stopped");
        }
        left
    }

    /// Counts notices as lost that were left when the server stopped, and that no later process knows of.
    pub(crate) fn count_left(&self, left: &BTreeMap<Arc<str>, usize>) {
        for lost in &self.lost {
            let of_sink = |name: &&Arc<str>| name.split(' ').next() == Some(&lost.label);
            let left = left.iter().filter(|(name, _)| of_sink(name)).map(|(_, left)| *left).sum::<usize>();
            lost.count.fetch_add(left.try_into().unwrap_or(u64::MAX), Ordering::Relaxed);
        }
    }
}

fn spawn_events(
    mut worker: Worker,
    mut take: impl FnMut(&mut Worker, &[Arc<[Event]>]) + Send + 'static,
) -> anyhow::Result<Sink> {
    let (sender, batches) = sync_channel::<Arc<[Event]>>(MAX_BATCHES);
    let queue = EventQueue { batches: sender, events: Arc::default() };
    let waiting = Arc::clone(&queue.events);
    let work = move || {
        while let Ok(first) = batches.recv() {
            // All that wait, so that a sink that is slow to begin takes them at once.
            let taken: Vec<_> = std::iter::once(first).chain(batches.try_iter().take(MAX_BATCHES)).collect();
            take(&mut worker, &taken);
            // Afterwards: they are in memory until then.
            waiting.fetch_sub(taken.iter().map(|batch| batch.len()).sum(), Ordering::Relaxed);
        }
    };
    thread::Builder::new().name("sink".to_owned()).spawn(work).context("cannot start a thread")?;
    Ok(Sink::Events(queue))
}

fn spawn_alerts(
    mut worker: Worker,
    receiver: Arc<AlertReceiver>,
    (node, ledger): (Arc<Node>, Arc<Mutex<Ledger>>),
) -> anyhow::Result<Sink> {
    let (queue, notices) = sync_channel::<Notice>(MAX_NOTICES);
    let own = Arc::clone(&receiver);
    let work = move || {
        for notice in notices {
            let turn = lock(&ledger).turn(&notice, &own.id);
            let delivery = match turn {
                Turn::Send => {
                    let (id, body) = (notice.message_id(), own.form.write(&notice, &node));
                    worker.deliver(&own.webhook, (&id, &body), 1)
                }
                Turn::Skip => Delivery::Lost,
                Turn::Lost => {
                    worker.count_lost(1);
                    Delivery::Lost
                }
            };
            // The rest waits too, for the next process.
            if delivery == Delivery::Stopped {
                break;
            }
            lock(&ledger).end(&notice, &own.id, delivery == Delivery::Accepted);
        }
    };
    thread::Builder::new().name("sink".to_owned()).spawn(work).context("cannot start a thread")?;
    Ok(Sink::Alerts(queue, receiver))
}

/// The thread of a sink: what it counts and logs.
struct Worker {
    /// The name in the log.
    name: Arc<str>,
    lost: Arc<AtomicU64>,
    stop: Arc<Stop>,
    is_failing: bool,
    /// Dropped when the thread ends.
    _running: Sender<()>,
}

impl Worker {
    fn write(&mut self, lines: &Lines, batches: &[Arc<[Event]>]) {
        for events in batches {
            match lines.write(events) {
                Ok(()) => self.worked(),
                Err(error) => {
                    self.failed(&error.to_string());
                    self.count_lost(events.len());
                }
            }
        }
    }

    /// Posts events as JSON arrays.
    fn post(&mut self, webhook: &Webhook, batches: &[Arc<[Event]>]) {
        let (mut body, mut number) = (String::new(), 0_usize);
        for event in batches.iter().flat_map(|batch| batch.iter()) {
            body.push(if body.is_empty() { '[' } else { ',' });
            body.push_str(&event.to_json());
            number = number.saturating_add(1);
            if number >= MAX_POST || body.len() >= MAX_POST_BYTES {
                self.post_batch(webhook, &body, number);
                (body, number) = (String::new(), 0);
            }
        }
        if number > 0 {
            self.post_batch(webhook, &body, number);
        }
    }

    /// Posts an array of events, all but its end.
    fn post_batch(&mut self, webhook: &Webhook, body: &str, number: usize) {
        if self.deliver(webhook, (&new_id(), &format!("{body}]")), number) == Delivery::Stopped {
            self.count_lost(number);
        }
    }

    /// Posts a body of so many events or notices, which are counted if they are lost.
    fn deliver(&mut self, webhook: &Webhook, message: (&str, &str), number: usize) -> Delivery {
        let stop = Arc::clone(&self.stop);
        let delivery = webhook.deliver(message, &stop, |reason| self.failed(reason));
        match delivery {
            Delivery::Accepted => self.worked(),
            Delivery::Lost => self.count_lost(number),
            Delivery::Stopped => {}
        }
        delivery
    }

    fn count_lost(&self, number: usize) {
        self.lost.fetch_add(number.try_into().unwrap_or(u64::MAX), Ordering::Relaxed);
    }

    /// Logs the first failure, and not those that follow: a receiver may be away for days.
    fn failed(&mut self, reason: &str) {
        if !std::mem::replace(&mut self.is_failing, true) {
            tracing::error!(sink = &*self.name, reason, "events or alerts not delivered");
        }
    }

    fn worked(&mut self) {
        if std::mem::take(&mut self.is_failing) {
            tracing::info!(
                sink = &*self.name,
                lost = self.lost.load(Ordering::Relaxed),
                "events and alerts delivered again"
            );
        }
    }
}
