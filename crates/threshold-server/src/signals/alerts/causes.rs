//! Why callers were stopped, of what an alert counts: the cause and the rule of most of it, in bounded memory.

use std::sync::Arc;

use threshold_core::Event;
use threshold_core::decision::Cause;

/// The most pairs of a cause and a rule that are counted at once. A new one takes the place of the rarest, and its count
/// (Space-Saving), so that one with more than a quarter of all is always among them.
const MAX_PAIRS: usize = 4;
/// After so many steps, which are a period, what was counted before has half its weight.
const HALF_LIFE: u64 = 60;

/// The cause and the rule of at least half of what was counted.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct Why {
    pub(crate) cause: Option<Cause>,
    pub(crate) rule: Option<Arc<str>>,
}

impl Why {
    pub(super) const fn is_known(&self) -> bool {
        self.cause.is_some() || self.rule.is_some()
    }
}

/// Counts causes and rules.
#[derive(Debug, Default)]
pub(super) struct Causes {
    pairs: Vec<(Why, u64)>,
    /// The step in which weights were last halved.
    since: u64,
}

impl Causes {
    /// Counts an event in a step.
    pub(super) fn add(&mut self, event: &Event, number: u64) {
        if number.abs_diff(self.since) >= HALF_LIFE {
            self.since = number;
            self.pairs.iter_mut().for_each(|(_, count)| *count = count.checked_div(2).unwrap_or(0));
        }
        let is_same =
            |(why, _): &&mut (Why, u64)| why.cause == event.cause && why.rule.as_deref() == event.rule.as_deref();
        if let Some((_, count)) = self.pairs.iter_mut().find(is_same) {
            *count = count.saturating_add(event.count);
            return;
        }
        let why = Why { cause: event.cause, rule: event.rule.as_deref().map(Into::into) };
        if self.pairs.len() < MAX_PAIRS {
            self.pairs.push((why, event.count));
        } else if let Some(rarest) = self.pairs.iter_mut().min_by_key(|(_, count)| *count) {
            *rarest = (why, rarest.1.saturating_add(event.count));
        }
    }

    /// Returns the cause and the rule of at least half of what was counted.
    pub(super) fn most(&self) -> Why {
        let sum = |of: &dyn Fn(&Why) -> bool| {
            let counts = self.pairs.iter().filter(|(why, _)| of(why)).map(|(_, count)| *count);
            counts.fold(0_u64, u64::saturating_add)
        };
        let all = sum(&|_| true);
        let is_most = |count: u64| count > 0 && count >= all.saturating_sub(count);
        let cause = self.pairs.iter().filter_map(|(why, _)| why.cause);
        let cause = cause.into_iter().find(|cause| is_most(sum(&|why| why.cause == Some(*cause))));
        let rule = self.pairs.iter().filter_map(|(why, _)| why.rule.as_ref());
        let rule = rule.into_iter().find(|rule| is_most(sum(&|why| why.rule.as_ref() == Some(*rule))));
        Why { cause, rule: rule.cloned() }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn event(cause: &str, rule: &str, count: u64) -> Event {
        let id = "00000000-0000-4000-8000-000000000001";
        let json = format!(
            r#"{{"id":"{id}","at":1767225600000,"blocked":true,"cause":{cause},"rule":{rule},"count":{count}}}"#
        );
        Event::from_json(&json).unwrap()
    }

    fn most(events: &[(Event, u64)]) -> (Option<&'static str>, Option<String>) {
        let mut causes = Causes::default();
        events.iter().for_each(|(event, number)| causes.add(event, *number));
        assert!(causes.pairs.len() <= MAX_PAIRS);
        let Why { cause, rule } = causes.most();
        (cause.map(Cause::name), rule.map(|rule| rule.to_string()))
    }

    /// Woken by a plurality in place of half, by weights that are not halved, and by a rare pair that is kept.
    #[test]
    fn the_cause_and_the_rule_of_half_of_all_are_named() {
        assert_eq!(most(&[]), (None, None));
        assert_eq!(most(&[(event("null", "null", 9), 0)]), (None, None));
        let posts = Some("posts".to_owned());
        let mixed = [(event(r#""limit""#, r#""posts""#, 5), 0), (event(r#""ladder""#, r#""posts""#, 4), 0)];
        assert_eq!(most(&mixed), (Some("limit"), posts.clone()));
        let third = (event(r#""login""#, "null", 4), 0);
        assert_eq!(most(&[&mixed[..], &[third]].concat()), (None, posts));
        // What is long over gives way to what goes on.
        let turned = (0..5).map(|number| (event(r#""login""#, "null", 60), number * 60));
        let before = (event(r#""limit""#, r#""posts""#, 200), 0);
        assert_eq!(most(&std::iter::once(before).chain(turned).collect::<Vec<_>>()), (Some("login"), None));
        // Rules that callers choose, as an edge reports them, do not hide one with most of it.
        let flood = (0..1_000).flat_map(|number| {
            [(event(r#""limit""#, &format!(r#""rule {number}""#), 1), 0), (event(r#""login""#, r#""login""#, 3), 0)]
        });
        assert_eq!(most(&flood.collect::<Vec<_>>()), (Some("login"), Some("login".to_owned())));
    }
}
