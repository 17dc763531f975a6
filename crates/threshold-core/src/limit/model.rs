//! A slow, obvious model of a limit: it keeps every charge ever made and counts all of them each time.
//!
//! It shares no arithmetic with the product. Each algorithm's file says with [`Definition`] how much of its limit is used
//! after a history; when a cost fits is found by trying, not by a formula.

#![expect(
    clippy::arithmetic_side_effects,
    reason = "the model must read as the definition does; a figure that overflows it fails the test, as it should"
)]

use super::algorithm::LimitAlgorithm;
use super::{Limit, Span};

/// The definition of an algorithm, for the laws to compare the product with.
pub(super) trait Definition: LimitAlgorithm {
    /// Whether a state knows the ages of its charges, so that a shorter period leaves out the older ones.
    const KNOWS_AGES: bool = false;

    /// How many units of the model make one of cost.
    fn unit(&self) -> u128 {
        1
    }

    /// How much is used at `now`, in the model's units.
    fn used(&self, history: &History, now: u128) -> u128;

    /// The longest that any state counts, from any clock reading on.
    fn longest(&self) -> Span;

    /// The most that is admitted in any window of the shorter period across a change from this limit to `new`.
    fn bound_across(&self, new: &Self) -> u64;

    /// Whether the window of a charge stays where that charge opened it, also once it is given back.
    fn opens_own_windows(&self) -> bool {
        false
    }
}

/// Everything that ever happened to one key.
#[derive(Debug, Clone, Default)]
pub(super) struct History {
    pub(super) events: Vec<(u128, Event)>,
}

/// One thing that happened.
#[derive(Debug, Clone, Copy)]
pub(super) enum Event {
    /// The whole cost that was charged: less than was asked where debt saturates.
    Charge { amount: u128 },
    /// Part or all of the charge at this place among the events.
    GiveBack { charge: usize, amount: u128 },
}

impl History {
    /// Everything charged at such times, less what was given back of it.
    pub(super) fn sum(&self, counts: impl Fn(u128) -> bool) -> u128 {
        let charged = self.events.iter().map(|(at, event)| match event {
            Event::Charge { amount } if counts(*at) => *amount,
            Event::Charge { .. } | Event::GiveBack { .. } => 0,
        });
        let given_back = self.events.iter().map(|(_, event)| match event {
            Event::GiveBack { charge, amount } if counts(self.events[*charge].0) => *amount,
            Event::Charge { .. } | Event::GiveBack { .. } => 0,
        });
        charged.sum::<u128>() - given_back.sum::<u128>()
    }
}

/// One key under one limit.
#[derive(Debug, Clone)]
pub(super) struct Model {
    limit: Limit,
    history: History,
}

impl Model {
    pub(super) fn new(limit: Limit) -> Self {
        Self { limit, history: History::default() }
    }

    pub(super) fn fits(&self, cost: u64, now: u64) -> bool {
        self.used(now) + u128::from(cost) * self.unit() <= self.capacity()
    }

    pub(super) fn remaining(&self, now: u64) -> u64 {
        let free = self.capacity().saturating_sub(self.used(now));
        u64::try_from(free / self.unit()).unwrap()
    }

    /// The first moment from now on at which `cost` fits, found by halving; `u64::MAX` if there is none.
    pub(super) fn ready_at(&self, cost: u64, now: u64) -> u64 {
        if u128::from(cost) * self.unit() > self.capacity() {
            return u64::MAX;
        }
        if self.fits(cost, now) {
            return now;
        }
        let mut wait = 1;
        // Doubling finds a moment at which it fits, and halving the first one. Once a cost fits it fits ever after, if
        // no other comes.
        while !self.fits(cost, now + wait) {
            wait *= 2;
        }
        let (mut denied, mut admitted) = (now + wait / 2, now + wait);
        while admitted - denied > 1 {
            let middle = denied + (admitted - denied) / 2;
            if self.fits(cost, middle) {
                admitted = middle;
            } else {
                denied = middle;
            }
        }
        admitted
    }

    /// Charges up to twice the capacity; returns the place of the charge and its amount.
    pub(super) fn charge(&mut self, cost: u64, now: u64) -> (usize, u64) {
        // Whole units, as in the product: a mark cannot hold a part of one.
        let room = (2 * self.capacity()).saturating_sub(self.used(now)) / self.unit();
        let amount = room.min(cost.into());
        self.history.events.push((now.into(), Event::Charge { amount }));
        (self.history.events.len() - 1, u64::try_from(amount).unwrap())
    }

    pub(super) fn give_back(&mut self, charge: usize, amount: u64, now: u64) {
        self.history.events.push((now.into(), Event::GiveBack { charge, amount: amount.into() }));
    }

    fn unit(&self) -> u128 {
        each_limit!(&self.limit.0, limit => limit.unit(), never => 1)
    }

    fn capacity(&self) -> u128 {
        u128::from(self.limit.capacity()) * self.unit()
    }

    fn used(&self, now: u64) -> u128 {
        each_limit!(&self.limit.0, limit => limit.used(&self.history, now.into()), never => 0)
    }

    /// What would be missing from a token bucket if nothing had ever been charged but what is left of each charge.
    pub(super) fn level_without_refunds(&self, now: u64) -> u128 {
        let mut net: Vec<(u128, u128)> = Vec::new();
        let mut places = Vec::new();
        for (place, (at, event)) in self.history.events.iter().enumerate() {
            match event {
                Event::Charge { amount } => {
                    net.push((*at, *amount));
                    places.push(place);
                }
                Event::GiveBack { charge, amount } => {
                    net[places.iter().position(|place| place == charge).unwrap()].1 -= amount;
                }
            }
        }
        let (quota, now) = (u128::from(self.limit.quota()), u128::from(now));
        let (mut missing, mut last) = (0u128, 0);
        for (at, amount) in net {
            missing = missing.saturating_sub((at - last) * quota) + amount * self.unit();
            last = at;
        }
        missing.saturating_sub((now - last) * quota)
    }

    /// The whole cost that fits while so much is missing.
    pub(super) fn room_beside(&self, missing: u128) -> u64 {
        u64::try_from(self.capacity().saturating_sub(missing) / self.unit()).unwrap()
    }
}

impl Limit {
    /// The longest that any state of this limit counts, from any clock reading on.
    pub(super) fn longest(&self) -> Span {
        each_limit!(&self.0, limit => limit.longest(), never => Span::ZERO)
    }

    /// The most that is admitted in any window of the shorter period across a change to a limit of the same algorithm.
    pub(super) fn bound_across(&self, new: &Self) -> u64 {
        let same = "limits of one algorithm";
        each_limit!(&self.0, limit => limit.bound_across(super::InLimit::of(new).expect(same)), never => 0)
    }

    pub(super) fn knows_ages(&self) -> bool {
        fn of<A: Definition>(_: &A) -> bool {
            A::KNOWS_AGES
        }
        each_limit!(&self.0, limit => of(limit), never => false)
    }

    pub(super) fn opens_own_windows(&self) -> bool {
        each_limit!(&self.0, limit => limit.opens_own_windows(), never => false)
    }
}
