//! Knows the events that were reported lately, or sent away, so that none counts twice.

use std::collections::{HashSet, VecDeque};

use threshold_core::Event;
use threshold_core::event::EventId;

/// The most ids that are known: those of 65 of the largest batches. They take about 4 MB.
const MAX_IDS: usize = 1 << 16;

/// The ids of the last reported events.
///
/// An edge that got no answer reports the same events again. And two servers that report to each other, or one to itself, would
/// otherwise send the same events to and fro for ever.
#[derive(Debug, Default)]
pub(super) struct ReportedIds {
    known: HashSet<EventId>,
    /// The oldest first.
    order: VecDeque<EventId>,
}

impl ReportedIds {
    /// Removes the events that are known.
    pub(super) fn retain_new(&mut self, events: &mut Vec<Event>) {
        events.retain(|event| self.insert(event.id));
    }

    /// Adds an id.
    pub(super) fn add(&mut self, id: EventId) {
        self.insert(id);
    }

    pub(super) fn contains(&self, id: EventId) -> bool {
        self.known.contains(&id)
    }

    fn insert(&mut self, id: EventId) -> bool {
        if !self.known.insert(id) {
            return false;
        }
        self.order.push_back(id);
        if self.order.len() > MAX_IDS
            && let Some(oldest) = self.order.pop_front()
        {
            self.known.remove(&oldest);
        }
        true
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn id(number: usize) -> EventId {
        EventId::new(u128::try_from(number).unwrap().to_be_bytes())
    }

    /// Woken by a `pop_front` without `remove`, and the other way round.
    #[test]
    fn an_event_is_new_once_and_memory_is_bounded() {
        let mut reported = ReportedIds::default();
        assert!(reported.insert(id(0)) && !reported.insert(id(0)));
        assert!((1..MAX_IDS).all(|number| reported.insert(id(number))));
        assert!(!reported.insert(id(0)));
        assert!(reported.insert(id(MAX_IDS)), "the oldest is forgotten");
        assert!(!reported.insert(id(1)) && reported.insert(id(0)));
        assert_eq!((reported.known.len(), reported.order.len()), (MAX_IDS, MAX_IDS));
    }

    #[test]
    fn a_batch_with_known_events_is_reduced_to_the_others() {
        let event = |number: u8| {
            let id = format!("00000000-0000-4000-8000-{number:012}");
            Event::from_json(&format!(r#"{{"id":"{id}","at":1767225600000,"blocked":true}}"#)).unwrap()
        };
        let mut reported = ReportedIds::default();
        let mut first = vec![event(1), event(2), event(1)];
        reported.retain_new(&mut first);
        assert_eq!(first, [event(1), event(2)]);
        let mut second = vec![event(2), event(3)];
        reported.retain_new(&mut second);
        assert_eq!(second, [event(3)]);
    }
}
