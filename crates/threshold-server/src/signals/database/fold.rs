//! Bounds the events that are recorded in a second, so that a flood fills no disk, and keeps their sums exact.

use std::borrow::Cow;
use std::collections::HashMap;
use std::hash::{BuildHasher as _, RandomState};

use threshold_core::event::Event;
use threshold_core::{Span, Timestamp};

/// The events of a second that are recorded each by itself.
const MAX_SINGLE: usize = 1_000;
/// The further ones of a second that differ in more than their time. Equal ones are counted together.
const MAX_DISTINCT: usize = 1_000;
/// The strikes among these, which have room of their own: they tell who is banned.
const MAX_STRIKES: usize = 1_000;

/// What was recorded in the present second.
#[derive(Debug, Default)]
pub(super) struct Folder {
    second: u64,
    single: usize,
    distinct: usize,
    strikes: usize,
}

impl Folder {
    /// Returns the events to record, and how many decisions among them have lost their names.
    pub(super) fn fold<'e>(&mut self, events: &'e [Event], now: Timestamp) -> (Vec<Cow<'e, Event>>, u64) {
        let second = now.micros().checked_div(1_000_000).unwrap_or(0);
        if second != self.second {
            *self = Self { second, ..Self::default() };
        }
        let single = MAX_SINGLE.saturating_sub(self.single).min(events.len());
        self.single = self.single.saturating_add(single);
        let (alone, rest) = events.split_at_checked(single).unwrap_or((events, &[]));
        let mut rows: Vec<Cow<'e, Event>> = alone.iter().map(Cow::Borrowed).collect();
        let mut merged = Merged::default();
        let (mut nameless, mut unnamed) = (Vec::<(Event, u64)>::new(), 0_u64);
        for event in rest {
            let minute = minute(event, now);
            if merged.merge(&mut rows, event, minute) {
                continue;
            }
            let (used, most) = match event.strike {
                Some(_) => (&mut self.strikes, MAX_STRIKES),
                None => (&mut self.distinct, MAX_DISTINCT),
            };
            if *used < most {
                *used = used.saturating_add(1);
                merged.push(&mut rows, event, minute);
                continue;
            }
            let stripped = event.clone().without_names();
            // One that has no names was counted by the queue, which took them.
            if stripped != *event {
                unnamed = unnamed.saturating_add(event.count);
            }
            let event = stripped;
            match nameless.iter_mut().find(|(own, at)| *at == minute && own.is_alike(&event)) {
                Some((own, _)) => own.merge(&event),
                // There are six layers and eight causes, with none, five verdicts, and 61 minutes.
                None => nameless.push((event, minute)),
            }
        }
        rows.extend(nameless.into_iter().map(|(event, _)| Cow::Owned(event)));
        (rows, unnamed)
    }
}

/// Returns the minute of an event, by which those that are reported late stay apart from those of now. All that are older than an
/// hour are in one.
fn minute(event: &Event, now: Timestamp) -> u64 {
    if now.since(event.at) > Span::HOUR { 0 } else { event.at.micros().checked_div(60_000_000).unwrap_or(0) }
}

/// The places of events that others are merged into.
#[derive(Default)]
struct Merged {
    places: HashMap<u64, Vec<usize>>,
    hasher: RandomState,
}

impl Merged {
    fn merge(&self, rows: &mut [Cow<'_, Event>], event: &Event, minute: u64) -> bool {
        for place in self.places.get(&self.hash(event, minute)).into_iter().flatten() {
            if let Some(own) = rows.get_mut(*place).filter(|own| own.is_alike(event)) {
                own.to_mut().merge(event);
                return true;
            }
        }
        false
    }

    fn push<'e>(&mut self, rows: &mut Vec<Cow<'e, Event>>, event: &'e Event, minute: u64) {
        self.places.entry(self.hash(event, minute)).or_default().push(rows.len());
        rows.push(Cow::Borrowed(event));
    }

    fn hash(&self, event: &Event, minute: u64) -> u64 {
        let strike = event.strike.as_ref().map(|strike| (&strike.subject, strike.strikes));
        let names = (&event.tenant, &event.user_id, &event.ip, &event.endpoint, &event.rule);
        self.hasher.hash_one((
            names,
            minute,
            strike,
            event.verdict.name(),
            event.layer.map(threshold_core::policy::Layer::name),
            event.cause,
        ))
    }
}
