//! The definition of a token bucket, for the laws.

#![expect(
    clippy::arithmetic_side_effects,
    reason = "a definition reads as the specification does; overflow fails the test"
)]

use super::TokenBucket;
use crate::limit::model::{Definition, Event, History};
use crate::time::Span;

impl Definition for TokenBucket {
    /// A bucket refills by L units of `1 / W` each microsecond.
    fn unit(&self) -> u128 {
        self.period.micros().into()
    }

    /// What is missing from the bucket, replayed event by event.
    fn used(&self, history: &History, now: u128) -> u128 {
        let quota = u128::from(self.quota);
        let (mut missing, mut last) = (0u128, 0);
        // Of each charge: its place, what was missing just after it, when, and how much of it is there unless it was
        // given back out of order.
        let mut charges: Vec<(usize, u128, u128, u128)> = Vec::new();
        // What was given back out of order, and by which event.
        let mut given: Vec<(usize, u128)> = Vec::new();
        for (place, (at, event)) in history.events.iter().enumerate() {
            missing = missing.saturating_sub((at - last) * quota);
            last = *at;
            match event {
                Event::Charge { amount } => {
                    missing += amount * self.unit();
                    charges.push((place, missing, *at, amount * self.unit()));
                }
                Event::GiveBack { charge, amount } => {
                    let index = charges.iter().position(|(own, ..)| own == charge).unwrap();
                    let (_, after, charged_at, _) = charges[index];
                    let is_latest = charges[index + 1..].iter().all(|(.., own)| *own == 0);
                    // What was given back before the charge is part of what was missing after it already.
                    let since: u128 = given.iter().filter(|(by, _)| by > charge).map(|(_, back)| back).sum();
                    let left = after.saturating_sub((at - charged_at) * quota + since);
                    let back = (amount * self.unit()).min(left);
                    missing -= back;
                    if is_latest {
                        charges[index].3 -= back;
                    } else {
                        given.push((place, back));
                    }
                }
            }
        }
        missing.saturating_sub((now - last) * quota)
    }

    /// Two fills.
    fn longest(&self) -> Span {
        let fill = 2 * u128::from(self.burst.max(self.quota)) * self.unit();
        Span::from_micros(u64::try_from(fill.div_ceil(self.quota.into())).unwrap())
    }

    /// What was used is carried over, so the larger of each figure is enough.
    fn bound_across(&self, new: &Self) -> u64 {
        self.burst.max(new.burst) + self.quota.max(new.quota)
    }
}
