//! Knows the events that were reported lately, or sent away, so that none counts twice.

use std::collections::HashSet;

use threshold_core::Event;
use threshold_core::event::EventId;

use super::MAX_REPORT;

/// The ids of the last reported events: at least those of the largest report, at most those of two. They take about 9 MB.
///
/// An edge that got no answer reports the same events again. And two servers that report to each other, or one to itself, would
/// otherwise send the same events to and fro for ever.
#[derive(Debug, Default)]
pub(super) struct ReportedIds {
    new: HashSet<EventId>,
    /// Those before them. They are forgotten together, which takes half of the memory of a list in order of arrival.
    old: HashSet<EventId>,
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
        self.new.contains(&id) || self.old.contains(&id)
    }

    fn insert(&mut self, id: EventId) -> bool {
        if self.contains(id) {
            return false;
        }
        if self.new.len() >= MAX_REPORT {
            self.old = std::mem::take(&mut self.new);
        }
        self.new.insert(id)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn id(number: usize) -> EventId {
        EventId::new(u128::try_from(number).unwrap().to_be_bytes())
    }

    /// A report of more than 65,536 events that was repeated counted twice: each of its ids was forgotten before its turn came.
    ///
    /// Woken by half of the bound, and by replacing `old` without emptying `new`.
    #[test]
    fn the_largest_report_counts_once_and_memory_is_bounded() {
        let mut reported = ReportedIds::default();
        let mut report =
            |numbers: std::ops::Range<usize>| numbers.filter(|number| reported.insert(id(*number))).count();
        // It begins anywhere among the events before it.
        for begin in [0, 1, MAX_REPORT / 2, MAX_REPORT + 7] {
            let all = begin * 10..begin * 10 + MAX_REPORT;
            report(all.start.saturating_sub(begin)..all.start);
            report(all.clone());
            assert_eq!(report(all), 0, "{begin}");
        }
        assert_eq!(report(20 * MAX_REPORT..23 * MAX_REPORT), 3 * MAX_REPORT);
        assert_eq!(report(20 * MAX_REPORT..20 * MAX_REPORT + 1), 1, "the oldest are forgotten");
        assert!(reported.new.len() <= MAX_REPORT && reported.old.len() <= MAX_REPORT);
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
