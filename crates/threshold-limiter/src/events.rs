//! Events of decisions, for a thread that records them.
//!
//! A decision must not wait for whatever keeps its event, so the two are connected by a bounded queue:
//!
//! ```
//! # use std::{sync::Arc, time::Duration};
//! use threshold_limiter::{Facts, Limiter, Policy, events};
//!
//! let (observer, mut events) = events::queue(1_000);
//! let policy = Policy::parse("[[rule]]\nname = 'posts'\nper = ['user']\nlimit = '1/h'", &|_| None)?;
//! let limiter = Limiter::builder(policy).observer(Arc::new(observer)).build();
//! for _ in 0..3 {
//!     limiter.check(&Facts { user: Some("u1"), ..Facts::default() })?;
//! }
//! // On a thread of your own:
//! let recorded = events.take(100, Duration::from_secs(1));
//! assert_eq!(recorded.len(), 2);
//! println!("{}", recorded[0].to_json());
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError, SyncSender, TrySendError, sync_channel};
use std::time::Duration;

use threshold_core::decision::Cause;
use threshold_core::event::EventId;
use threshold_core::policy::Layer;
use threshold_core::{Decision, Event, Facts, Policy, TraceId, Verdict};

use crate::observer::{ObservedDecision, Observer, Operation};
use crate::random_id;

/// Creates a queue of at most `capacity` events.
///
/// Events beyond that lose their names and not their number: they arrive as one event for each layer, verdict and cause, without a
/// tenant, a user, an address, an endpoint and a rule, whose `count` is how many there were.
#[must_use]
pub fn queue(capacity: usize) -> (EventSender, EventReceiver) {
    let (sender, receiver) = sync_channel(capacity);
    let overflow = Arc::<Overflow>::default();
    let sender = EventSender { sender, overflow: Arc::clone(&overflow), allowed: Arc::default() };
    (sender, EventReceiver { receiver, overflow })
}

/// Puts the events of a limiter's decisions into a queue. It never waits.
#[derive(Debug, Clone)]
pub struct EventSender {
    sender: SyncSender<Event>,
    overflow: Arc<Overflow>,
    /// One in so many allowed requests is recorded; 0 for none.
    allowed: Arc<AtomicU32>,
}

impl EventSender {
    /// From now on, records one in `every` allowed requests too, so that some of them can be explained later; none if it is 0. They
    /// are chosen by their trace ids.
    pub fn record_allowed(&self, every: u32) {
        self.allowed.store(every, Ordering::Relaxed);
    }

    fn records(&self, trace: TraceId) -> bool {
        let every = self.allowed.load(Ordering::Relaxed);
        // Multiplied, because a client may send ids that differ in some of their digits only.
        let spread = || trace.to_u128().wrapping_mul(0x2545_f491_4f6c_dd1d_9e37_79b9_7f4a_7c15) >> 64;
        // Of the upper half, whose remainder takes one instruction.
        every > 0 && u64::try_from(spread()).unwrap_or(0).checked_rem(every.into()) == Some(0)
    }

    /// Adds an event.
    pub fn send(&self, event: Event) {
        match self.sender.try_send(event) {
            Ok(()) => {}
            Err(TrySendError::Full(event) | TrySendError::Disconnected(event)) => self.overflow.add(event),
        }
    }

    /// Returns how many decisions were recorded without their names, because the queue was full.
    #[must_use]
    pub fn unnamed(&self) -> u64 {
        self.overflow.total.load(Ordering::Relaxed)
    }
}

impl Observer for EventSender {
    fn decided(&self, observed: &ObservedDecision<'_>) {
        // A peek stops nobody.
        if observed.operation == Operation::Peek {
            return;
        }
        let &ObservedDecision { decision, facts, policy, .. } = observed;
        if Event::is_recorded(decision) || self.records(decision.trace) {
            self.record(decision, facts, policy);
        }
    }
}

impl EventSender {
    // Apart, so that a decision without an event does not pay for its memory on the stack.
    #[inline(never)]
    fn record(&self, decision: &Decision, facts: &Facts<'_>, policy: &Policy) {
        let id = EventId::new(random_id().to_u128().to_be_bytes());
        self.send(Event::from_any_decision(decision, facts, policy, id));
    }
}

/// The other end of the queue.
#[derive(Debug)]
pub struct EventReceiver {
    receiver: Receiver<Event>,
    overflow: Arc<Overflow>,
}

impl EventReceiver {
    /// Takes at most `most` events, and those that had no room. Waits at most `wait` for the first one.
    pub fn take(&mut self, most: usize, wait: Duration) -> Vec<Event> {
        let mut events = Vec::new();
        match self.receiver.recv_timeout(wait) {
            Ok(event) => events.push(event),
            Err(RecvTimeoutError::Timeout | RecvTimeoutError::Disconnected) => {}
        }
        events.extend(self.receiver.try_iter().take(most.saturating_sub(events.len())));
        self.overflow.take(&mut events);
        events
    }
}

/// The places of a layer, with none, of a verdict, and of a cause, with none.
const LAYERS: [Option<Layer>; 6] =
    [None, Some(Layer::Global), Some(Layer::Edge), Some(Layer::Tenant), Some(Layer::User), Some(Layer::Endpoint)];
const VERDICTS: [Verdict; 5] = [Verdict::Allow, Verdict::Warn, Verdict::Slow, Verdict::Deny, Verdict::Ban];
const CAUSES: usize = Cause::ALL.len() + 1;

/// The numbers of events that had no room.
#[derive(Debug, Default)]
struct Overflow {
    counts: [[[AtomicU64; CAUSES]; VERDICTS.len()]; LAYERS.len()],
    total: AtomicU64,
    /// One of the events, of which the time is used.
    last: std::sync::Mutex<Option<Event>>,
}

impl Overflow {
    fn add(&self, event: Event) {
        let layer = LAYERS.iter().position(|own| *own == event.layer);
        let verdict = VERDICTS.iter().position(|own| *own == event.verdict);
        // The last place is that of none.
        let cause = Cause::ALL.iter().position(|own| Some(*own) == event.cause).unwrap_or(Cause::ALL.len());
        let count = layer.zip(verdict).and_then(|(layer, verdict)| self.counts.get(layer)?.get(verdict)?.get(cause));
        if let Some(count) = count {
            count.fetch_add(event.count, Ordering::Relaxed);
        }
        self.total.fetch_add(event.count, Ordering::Relaxed);
        // Another thread that holds the lock has an event of the same moment.
        if let Ok(mut last) = self.last.try_lock() {
            *last = Some(event.without_names());
        }
    }

    fn take(&self, events: &mut Vec<Event>) {
        let Ok(Some(last)) = self.last.lock().map(|last| last.clone()) else { return };
        for (layer, counts) in LAYERS.iter().zip(&self.counts) {
            for (verdict, counts) in VERDICTS.iter().zip(counts) {
                let causes = Cause::ALL.into_iter().map(Some).chain([None]);
                for (cause, count) in causes.zip(counts) {
                    let count = count.swap(0, Ordering::Relaxed);
                    if count > 0 {
                        let mut event = last.clone();
                        event.id = EventId::new(random_id().to_u128().to_be_bytes());
                        (event.layer, event.verdict, event.blocked) = (*layer, *verdict, !verdict.allows());
                        (event.cause, event.count) = (cause, count);
                        events.push(event);
                    }
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use threshold_core::{Decision, Facts, Policy};

    use super::*;

    fn denial(layer: &str, ip: u32) -> Event {
        let json = format!(
            r#"{{"id":"00000000-0000-4000-8000-{ip:012x}","at":1767225600000,"blocked":true,"layer":"{layer}","ip":"10.0.{ip}"}}"#
        );
        Event::from_json(&json).unwrap()
    }

    /// Woken by leaving out `overflow.add`, or `swap` that does not reset.
    #[test]
    fn a_full_queue_loses_names_and_no_number() {
        let (sender, mut receiver) = queue(10);
        std::thread::scope(|scope| {
            for thread in 0..4 {
                let sender = sender.clone();
                scope.spawn(move || {
                    (0..1_000).for_each(|ip| sender.send(denial(if thread == 0 { "edge" } else { "user" }, ip)));
                });
            }
        });
        let events = receiver.take(usize::MAX, Duration::ZERO);
        let sum =
            |layer| events.iter().filter(|event| event.layer == Some(layer)).map(|event| event.count).sum::<u64>();
        assert_eq!((sum(Layer::Edge), sum(Layer::User)), (1_000, 3_000));
        assert_eq!((events.iter().filter(|event| event.ip.is_some()).count(), sender.unnamed()), (10, 3_990));
        assert!(events.len() <= 12 && events.iter().all(|event| event.blocked));
        assert_eq!(receiver.take(10, Duration::ZERO), []);
        sender.send(denial("edge", 7));
        assert_eq!(receiver.take(10, Duration::ZERO).len(), 1, "there is room again");
    }

    /// Woken by recording every allowed request, or none.
    #[test]
    fn one_in_so_many_allowed_requests_is_recorded() {
        let policy = Policy::builder().build().unwrap();
        let recorded = |every, operation| {
            let (sender, mut receiver) = queue(10_000);
            sender.record_allowed(every);
            for trace in 0..10_000_u128 {
                let facts = Facts { trace: TraceId::from_u128(trace << 64), ..Default::default() };
                let mut decision = Decision::default();
                decision.trace = facts.trace;
                let observed = ObservedDecision::new(&facts, &decision, &policy);
                sender.decided(&ObservedDecision { operation, ..observed });
            }
            receiver.take(usize::MAX, Duration::ZERO)
        };
        assert_eq!(recorded(0, Operation::Check), []);
        assert_eq!(recorded(1, Operation::Check).len(), 10_000);
        assert_eq!(recorded(1, Operation::Peek), []);
        let some = recorded(100, Operation::Check);
        assert!((50..200).contains(&some.len()), "{}", some.len());
        assert!(some.iter().all(|event| !event.blocked && event.verdict == Verdict::Allow));
    }

    /// Statistics and alerts count by the cause. Woken by one counter for all causes.
    #[test]
    fn a_full_queue_keeps_causes_apart() {
        let (sender, mut receiver) = queue(0);
        for cause in Cause::ALL.into_iter().map(Some).chain([None]) {
            let mut event = denial("edge", 1);
            event.cause = cause;
            sender.send(event.clone());
            sender.send(event);
        }
        let events = receiver.take(usize::MAX, Duration::ZERO);
        assert_eq!(events.len(), CAUSES);
        assert!(events.iter().all(|event| event.count == 2));
        assert!(Cause::ALL.iter().all(|cause| events.iter().any(|event| event.cause == Some(*cause))));
    }

    #[test]
    fn a_queue_whose_reader_has_ended_neither_blocks_nor_grows() {
        let (sender, receiver) = queue(1);
        drop(receiver);
        (0..1_000).for_each(|ip| sender.send(denial("edge", ip)));
        assert_eq!(sender.unnamed(), 1_000);
    }
}
