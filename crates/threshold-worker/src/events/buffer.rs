//! The events of an isolate that are not written yet, bounded in number.

use threshold_core::{Event, Span, Timestamp};

/// The most denials and warnings of different callers in one write. A write to KV is billed, and a flood has any number of callers.
const MAX_CALLERS: usize = 32;
/// The most of these and strikes together. Strikes have room of their own, since they tell who is banned.
const MAX_NAMED: usize = 64;
/// How far apart two writes of an isolate are.
const INTERVAL: Span = Span::SECOND;
/// How long a task may be late before another one takes its place: the platform may have ended it.
const GRACE: Span = Span::from_secs(2);

/// The events that wait.
///
/// Equal ones are one event with their number. Those of callers beyond the bound are counted together without names, one event for
/// each layer, verdict and cause, so that sums stay exact.
#[derive(Debug, Default)]
pub(super) struct Buffer {
    named: Vec<Event>,
    unnamed: Vec<Event>,
    /// When events were last written.
    written: Timestamp,
    /// Until when a task is expected to write.
    expected: Option<Timestamp>,
}

impl Buffer {
    pub(super) fn add(&mut self, event: Event) {
        if let Some(own) = self.named.iter_mut().find(|own| own.is_alike(&event)) {
            return own.merge(&event);
        }
        let callers = self.named.iter().filter(|own| own.strike.is_none()).count();
        let has_room = if event.strike.is_some() { self.named.len() < MAX_NAMED } else { callers < MAX_CALLERS };
        if has_room && self.named.len() < MAX_NAMED {
            return self.named.push(event);
        }
        let event = event.without_names();
        match self.unnamed.iter_mut().find(|own| own.is_alike(&event)) {
            Some(own) => own.merge(&event),
            // There are six layers and eight causes, with none, and four verdicts.
            None => self.unnamed.push(event),
        }
    }

    /// Returns how long the caller waits before it takes the events and writes them; `None` if there are none, or if a task will.
    pub(super) fn begin(&mut self, now: Timestamp) -> Option<Span> {
        let is_expected = self.expected.is_some_and(|expected| now < expected);
        if is_expected || self.named.is_empty() && self.unnamed.is_empty() {
            return None;
        }
        // A clock that was set back must not keep events waiting.
        let wait = self.written.plus(INTERVAL).since(now).min(INTERVAL);
        self.expected = Some(now.plus(wait).plus(GRACE));
        Some(wait)
    }

    /// Takes all events, and the number of decisions among them that have no names.
    pub(super) fn take(&mut self, now: Timestamp) -> (Vec<Event>, u64) {
        self.written = now;
        self.expected = None;
        let unnamed = self.unnamed.iter().fold(0_u64, |sum, event| sum.saturating_add(event.count));
        let mut events = std::mem::take(&mut self.named);
        events.append(&mut self.unnamed);
        (events, unnamed)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(millis: u64) -> Timestamp {
        Timestamp::from_secs(1_767_225_600).plus(Span::from_millis(millis))
    }

    fn denial(number: u32, more: &str) -> Event {
        let json = format!(
            r#"{{"id":"00000000-0000-4000-8000-{number:012x}","at":1767225600000,"blocked":true,"layer":"edge"{more}}}"#
        );
        Event::from_json(&json).unwrap()
    }

    fn of_ip(number: u32) -> Event {
        denial(number, &format!(r#","ip":"203.0.113.{number}""#))
    }

    #[test]
    fn equal_events_are_one() {
        let mut buffer = Buffer::default();
        (0..1_000).for_each(|number| buffer.add(denial(number, r#","ip":"203.0.113.7""#)));
        let (events, unnamed) = buffer.take(at(0));
        assert_eq!(events.iter().map(|event| event.count).collect::<Vec<_>>(), [1_000]);
        assert_eq!(unnamed, 0);
    }

    /// Woken by leaving out `without_names`.
    #[test]
    fn a_flood_of_callers_is_bounded_and_its_sum_exact() {
        let mut buffer = Buffer::default();
        (0..10_000).for_each(|number| buffer.add(of_ip(number)));
        let struck = |number: u32| denial(number, &format!(r#","subject":"user=u{number}","strikes":5"#));
        (0..10_000).for_each(|number| buffer.add(struck(number)));
        let (events, unnamed) = buffer.take(at(0));
        assert_eq!(events.iter().filter(|event| event.ip.is_some()).count(), MAX_CALLERS);
        assert_eq!(events.iter().filter(|event| event.strike.is_some()).count(), MAX_NAMED - MAX_CALLERS);
        assert_eq!(events.len(), MAX_NAMED + 1);
        assert_eq!(events.iter().map(|event| event.count).sum::<u64>(), 20_000);
        assert_eq!(unnamed, 20_000 - MAX_NAMED as u64);
        assert_eq!(buffer.take(at(0)), (Vec::new(), 0));
    }

    #[test]
    fn the_first_event_is_written_at_once_and_later_ones_a_second_apart() {
        let mut buffer = Buffer::default();
        assert_eq!(buffer.begin(at(0)), None);
        buffer.add(of_ip(1));
        assert_eq!(buffer.begin(at(0)), Some(Span::ZERO));
        buffer.add(of_ip(2));
        assert_eq!(buffer.begin(at(0)), None, "the task that has begun takes this one too");
        assert_eq!(buffer.take(at(10)).0.len(), 2);
        buffer.add(of_ip(3));
        assert_eq!(buffer.begin(at(210)), Some(Span::from_millis(800)));
        buffer.add(of_ip(4));
        assert_eq!(buffer.begin(at(900)), None);
        // The platform has ended the task.
        assert_eq!(buffer.begin(at(3_100)), Some(Span::ZERO));
        assert_eq!(buffer.take(at(3_100)).0.len(), 2);
        // The clock is set back.
        buffer.add(of_ip(5));
        assert_eq!(buffer.begin(at(0)), Some(INTERVAL));
    }
}
