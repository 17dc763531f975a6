//! A slow, obvious model of the six algorithms: it keeps every charge ever made and counts anew each time.
//!
//! It shares no arithmetic with the product. A bucket is replayed event by event in units of `1 / W`; a window
//! is summed over plain times; and when a cost fits is found by asking, not by a formula.

#![expect(
    clippy::arithmetic_side_effects,
    reason = "the model must read as the definition does; a figure that overflows it fails the test, as it should"
)]

use super::{Anchor, Limit, Log, Rate, Window};

/// Everything that ever happened to one key under one limit.
#[derive(Debug, Clone)]
pub(super) struct Model {
    limit: Limit,
    events: Vec<(u128, Event)>,
}

/// One thing that happened.
#[derive(Debug, Clone, Copy)]
enum Event {
    /// What was asked for, and the whole cost that was charged once debt had saturated.
    Charge { asked: u128, amount: u128 },
    /// Part or all of the charge at this place among the events.
    GiveBack { charge: usize, amount: u128 },
}

impl Model {
    pub(super) fn new(limit: Limit) -> Self {
        Self { limit, events: Vec::new() }
    }

    pub(super) fn fits(&self, cost: u64, now: u64) -> bool {
        self.used(now.into()) + u128::from(cost) * self.unit() <= self.capacity()
    }

    pub(super) fn remaining(&self, now: u64) -> u64 {
        let free = self.capacity().saturating_sub(self.used(now.into()));
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

    /// Charges up to twice the capacity; returns the place of the charge and what it came to.
    pub(super) fn charge(&mut self, cost: u64, now: u64) -> (usize, u64) {
        let room = (2 * self.capacity()).saturating_sub(self.used(now.into())) / self.unit();
        let asked = u128::from(cost);
        let amount = asked.min(room);
        self.events.push((now.into(), Event::Charge { asked, amount }));
        (self.events.len() - 1, u64::try_from(amount).unwrap())
    }

    pub(super) fn give_back(&mut self, charge: usize, amount: u64, now: u64) {
        self.events.push((now.into(), Event::GiveBack { charge, amount: amount.into() }));
    }

    /// How many of the model's units make one of cost: a bucket refills by L of them each microsecond.
    fn unit(&self) -> u128 {
        match &self.limit {
            Limit::Rate(rate) => rate.period().micros().into(),
            _ => 1,
        }
    }

    fn capacity(&self) -> u128 {
        u128::from(self.limit.capacity()) * self.unit()
    }

    fn used(&self, now: u128) -> u128 {
        let period = u128::from(self.limit.period().micros());
        match &self.limit {
            Limit::Rate(rate) => self.level(rate, now),
            Limit::Window(window) if window.anchor() == Anchor::First => self.own_window(window, now),
            Limit::Window(_) => self.sum(|at| at / period == now / period),
            Limit::Log(log) => self.sum(|at| bucket_end(log, at) + period > now),
            Limit::Estimate(_) => {
                let previous = self.sum(|at| at / period + 1 == now / period);
                self.sum(|at| at / period == now / period) + (previous * (period - now % period)).div_ceil(period)
            }
            Limit::Concurrency(_) => self.sum(|at| at + period > now),
            Limit::Never => 0,
        }
    }

    /// Everything charged at such times, less what was given back of it.
    fn sum(&self, counts: impl Fn(u128) -> bool) -> u128 {
        let charged = self.events.iter().map(|(at, event)| match event {
            Event::Charge { amount, .. } if counts(*at) => *amount,
            _ => 0,
        });
        let given_back = self.events.iter().map(|(_, event)| match event {
            Event::GiveBack { charge, amount } if counts(self.events[*charge].0) => *amount,
            _ => 0,
        });
        charged.sum::<u128>() - given_back.sum::<u128>()
    }

    /// What is missing from the bucket, in units of `1 / W`.
    fn level(&self, rate: &Rate, now: u128) -> u128 {
        let (quota, deepest) = (u128::from(rate.quota()), 2 * self.capacity());
        let (mut missing, mut last) = (0u128, 0);
        // Of each charge: its place, what was missing just after it, when, and how much of it is there unless it was given back
        // out of order.
        let mut charges: Vec<(usize, u128, u128, u128)> = Vec::new();
        // What was given back out of order, and by which event.
        let mut given: Vec<(usize, u128)> = Vec::new();
        for (place, (at, event)) in self.events.iter().enumerate() {
            missing = missing.saturating_sub((at - last) * quota);
            last = *at;
            match event {
                Event::Charge { asked, .. } => {
                    let before = missing;
                    missing = (missing + asked * self.unit()).min(deepest);
                    charges.push((place, missing, *at, missing - before));
                }
                Event::GiveBack { charge, amount } => {
                    let index = charges.iter().position(|(own, ..)| own == charge).unwrap();
                    let (_, after, charged_at, _) = charges[index];
                    let is_latest = charges[index + 1..].iter().all(|(.., own)| *own == 0);
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

    /// What would be missing from the bucket if nothing had ever been charged but what is left of each charge.
    pub(super) fn level_without_refunds(&self, now: u64) -> u128 {
        let mut net: Vec<(u128, u128)> = Vec::new();
        let mut places = Vec::new();
        for (place, (at, event)) in self.events.iter().enumerate() {
            match event {
                Event::Charge { amount, .. } => {
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

    /// What the window holds that the first charge opened; one whose charges all came back opens anew.
    fn own_window(&self, window: &Window, now: u128) -> u128 {
        let period = u128::from(window.period().micros());
        let (mut start, mut used, mut members) = (0, 0, Vec::new());
        for (place, (at, event)) in self.events.iter().enumerate() {
            match event {
                Event::Charge { amount, .. } => {
                    if used == 0 || *at >= start + period {
                        (start, used) = (*at, 0);
                        members.clear();
                    }
                    used += amount;
                    members.push(place);
                }
                Event::GiveBack { charge, amount } if members.contains(charge) => used -= amount,
                Event::GiveBack { .. } => {}
            }
        }
        if now < start + period { used } else { 0 }
    }
}

/// A charge's own time in a log; in a sliding window the first end of a sub-window after it.
fn bucket_end(log: &Log, at: u128) -> u128 {
    if log.is_exact() {
        return at;
    }
    let grain = u128::from(log.period().micros()) / u128::from(log.buckets());
    (at / grain + 1) * grain
}
