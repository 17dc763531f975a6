//! Random limits, random traces, and one key under one limit in which they are played.

use proptest::collection::vec;
use proptest::prelude::*;
use proptest::sample::{Index, select};

use crate::balance::Balance;
use crate::key::TraceId;
use crate::limit::algorithm::{Figures, LimitAlgorithm, LimitOption};
use crate::limit::model::Model;
use crate::limit::{Algorithm, Anchor, Limit, LimitError, Look, MAX_QUOTA, Mark};
use crate::time::{Span, Timestamp};

/// L and W in microseconds: figures as policies write them, and odd ones that divide badly.
pub(super) const FIGURES: [(u64, u64); 11] = [
    (7, 1_000_000),
    (3, 1_000_000),
    (1, 1_000_000),
    (1, 1_000),
    (1_500_000, 1_000_000),
    (100, 60_000_000),
    (10, 86_400_000_000),
    (13, 1_009),
    (20, 3_600_000_000),
    (5, 64),
    (2, 3),
];

/// Algorithms with a smaller largest quota than others stay below this, so that a limit four times as large is still one.
pub(super) const FEW: u64 = 200;

/// The figures of a limit, from which others like it are made.
#[derive(Debug, Clone, Copy)]
pub(super) struct Shape {
    pub(super) algorithm: Algorithm,
    pub(super) anchor: Anchor,
    pub(super) quota: u64,
    pub(super) period: Span,
    pub(super) burst: u64,
    pub(super) buckets: u32,
}

impl Shape {
    pub(super) fn limit(self) -> Limit {
        self.try_limit().unwrap()
    }

    pub(super) fn try_limit(self) -> Result<Limit, LimitError> {
        self.algorithm.make(&self.figures())
    }

    pub(super) fn figures(self) -> Figures {
        let Self { quota, period, anchor, .. } = self;
        let most = u32::try_from(period.micros()).unwrap_or(u32::MAX);
        Figures { quota, period, burst: Some(self.burst), anchor, buckets: self.buckets.min(most) }
    }

    /// This algorithm with another shape's figures: what a policy may change under a key in use.
    pub(super) fn with_figures_of(self, other: Self) -> Self {
        let few = max_quota(self.algorithm) < MAX_QUOTA;
        let quota = if few { other.quota.min(FEW) } else { other.quota };
        Self { algorithm: self.algorithm, anchor: self.anchor, quota, ..other }
    }

    /// The same limit with four times the capacity, under which a debt is still below the capacity.
    pub(super) fn widened(self) -> Limit {
        // A larger quota would refill a bucket faster, and its burst is the capacity.
        let quota = if self.algorithm.takes(LimitOption::Burst) { self.quota } else { self.quota * 4 };
        Self { quota, burst: self.burst * 4, ..self }.limit()
    }
}

pub(super) fn max_quota(algorithm: Algorithm) -> u64 {
    each_algorithm!(algorithm, A => <A as LimitAlgorithm>::MAX_QUOTA)
}

pub(super) fn shapes() -> impl Strategy<Value = Shape> {
    let figures = (select(&FIGURES[..]), select(&[1, 2, 7, 60][..]), 0..6usize);
    (select(&Algorithm::ALL[..]), any::<bool>(), figures).prop_map(|(algorithm, clock, figures)| {
        let ((quota, period), buckets, burst) = figures;
        let anchor = if clock { Anchor::Clock } else { Anchor::First };
        let burst = [1, quota.div_ceil(2), quota, quota, quota + 1, quota * 3][burst];
        let shape = Shape { algorithm, anchor, quota, period: Span::from_micros(period), burst, buckets };
        shape.with_figures_of(shape)
    })
}

/// A cost, said relative to the limit it is asked of.
#[derive(Debug, Clone, Copy)]
pub(super) enum Share {
    Nothing,
    One,
    Part(u8),
    Whole,
    TooMuch,
}

impl Share {
    pub(super) fn of(self, whole: u64) -> u64 {
        match self {
            Self::Nothing => 0,
            Self::One => 1,
            Self::Part(part) => (whole * u64::from(part)).div_ceil(256),
            Self::Whole => whole,
            Self::TooMuch => whole + 1,
        }
    }
}

pub(super) fn shares() -> impl Strategy<Value = Share> {
    prop_oneof![
        1 => Just(Share::Nothing),
        6 => Just(Share::One),
        4 => any::<u8>().prop_map(Share::Part),
        2 => Just(Share::Whole),
        1 => Just(Share::TooMuch),
    ]
}

/// How long until the next thing happens, said relative to the limit's period and its boundaries.
#[derive(Debug, Clone, Copy)]
pub(super) enum Gap {
    Micros(u64),
    /// In 256ths of the time in which one unit refills.
    Unit(u8),
    /// In 65,536ths of the period.
    Part(u16),
    /// To a microsecond around the next multiple of a fraction of the period.
    Edge {
        cut: u64,
        off: u64,
    },
    /// A microsecond around this many whole periods.
    Periods {
        count: u64,
        off: u64,
    },
}

impl Gap {
    pub(super) fn after(self, now: Timestamp, limit: &Limit) -> Span {
        let period = limit.period().micros();
        Span::from_micros(match self {
            Self::Micros(micros) => micros,
            Self::Unit(part) => (period / limit.quota() * u64::from(part)) / 128,
            Self::Part(part) => (u128::from(period) * u128::from(part) / 65_536).try_into().unwrap(),
            Self::Edge { cut, off } => {
                let grain = (period / cut).max(1);
                (grain - now.micros() % grain + off).saturating_sub(1)
            }
            Self::Periods { count, off } => (period * count + off).saturating_sub(1),
        })
    }
}

pub(super) fn gaps() -> impl Strategy<Value = Gap> {
    prop_oneof![
        4 => (0..3u64).prop_map(Gap::Micros),
        3 => any::<u8>().prop_map(Gap::Unit),
        4 => any::<u16>().prop_map(Gap::Part),
        4 => (select(&[1, 2, 7, 60][..]), 0..3u64).prop_map(|(cut, off)| Gap::Edge { cut, off }),
        2 => (1..4u64, 0..3u64).prop_map(|(count, off)| Gap::Periods { count, off }),
    ]
}

/// Mostly a microsecond or two, as around a boundary that the clock crosses more than once.
pub(super) fn close() -> impl Strategy<Value = Gap> {
    prop_oneof![3 => (0..3u64).prop_map(Gap::Micros), 1 => gaps()]
}

/// One thing a caller does.
#[derive(Debug, Clone, Copy)]
pub(super) enum Act {
    Check(Share),
    /// Takes all that fits.
    Drain,
    Record(Share),
    /// Releases a reservation, or refunds a charge.
    GiveBack(Index),
    /// Commits a reservation at less than it holds.
    Lower(Index, Share),
}

/// What callers who owe nothing do.
pub(super) fn orderly() -> impl Strategy<Value = Act> {
    prop_oneof![
        6 => shares().prop_map(Act::Check),
        3 => Just(Act::Drain),
        2 => any::<Index>().prop_map(Act::GiveBack),
        1 => (any::<Index>(), shares()).prop_map(|(which, share)| Act::Lower(which, share)),
    ]
}

/// What callers do who take whatever they can get.
pub(super) fn greedy() -> impl Strategy<Value = Act> {
    prop_oneof![Just(Act::Drain), orderly()]
}

/// What callers do who give back most of what they take.
pub(super) fn returning() -> impl Strategy<Value = Act> {
    prop_oneof![
        5 => indebted(),
        4 => any::<Index>().prop_map(Act::GiveBack),
        2 => (any::<Index>(), shares()).prop_map(|(which, share)| Act::Lower(which, share)),
    ]
}

/// What callers do who also record after the fact.
pub(super) fn indebted() -> impl Strategy<Value = Act> {
    prop_oneof![5 => orderly(), 1 => shares().prop_map(Act::Record)]
}

pub(super) type Trace = Vec<(Gap, Act)>;

pub(super) fn traces(acts: impl Strategy<Value = Act>) -> impl Strategy<Value = Trace> {
    vec((gaps(), acts), 1..40)
}

/// Where a trace begins: far from the epoch, anywhere within a period.
pub(super) fn starts() -> impl Strategy<Value = Timestamp> {
    (0..86_400_000_000u64).prop_map(|micros| Timestamp::from_micros(1_750_000_000_000_000 + micros))
}

/// A charge that was made, and what is left of it.
#[derive(Debug, Clone, Copy)]
pub(super) struct Charge {
    pub(super) id: TraceId,
    pub(super) mark: Mark,
    /// From when on a bucket has refilled it.
    pub(super) counts_until: Timestamp,
    pub(super) net: u64,
    /// In true time, whatever the clock said.
    pub(super) at: Timestamp,
    /// Whether the clock has not stepped back since.
    pub(super) refundable: bool,
}

/// One key under one limit, with a clock that may fall behind the true time.
#[derive(Debug, Clone)]
pub(super) struct World {
    pub(super) limit: Limit,
    pub(super) balance: Balance,
    pub(super) now: Timestamp,
    pub(super) behind: Span,
    pub(super) charges: Vec<Charge>,
    pub(super) ids: u128,
}

impl World {
    pub(super) fn new(limit: Limit, now: Timestamp) -> Self {
        Self { limit, balance: Balance::default(), now, behind: Span::ZERO, charges: Vec::new(), ids: 0 }
    }

    pub(super) fn play(shape: Shape, start: Timestamp, trace: &Trace) -> Self {
        let mut world = Self::new(shape.limit(), start);
        for (gap, act) in trace {
            world.wait(*gap);
            world.act(*act);
        }
        world
    }

    pub(super) fn wait(&mut self, gap: Gap) {
        self.now = self.now.plus(gap.after(self.now, &self.limit));
    }

    pub(super) fn step_back(&mut self, by: Span) {
        self.now = self.now.minus(by);
        self.behind = Span::from_micros(self.behind.micros() + by.micros());
        for charge in &mut self.charges {
            // The state that its mark names may have been moved, and another charge may have taken its place.
            charge.refundable = false;
        }
    }

    pub(super) fn true_now(&self) -> Timestamp {
        self.now.plus(self.behind)
    }

    pub(super) fn look(&self, cost: u64) -> Look {
        self.look_at(cost, self.now)
    }

    /// What would be answered at another time, if nothing happened until then.
    pub(super) fn look_at(&self, cost: u64, now: Timestamp) -> Look {
        let mut balance = self.balance.clone();
        balance.bring(&self.limit, now);
        balance.peek(&self.limit, cost, now)
    }

    pub(super) fn act(&mut self, act: Act) {
        match (act, self.asked(act)) {
            (Act::Record(_), Some(cost)) => {
                self.record(cost);
            }
            (_, Some(cost)) => {
                self.check(cost);
            }
            (Act::Lower(which, share), None) => self.give_back(which, share.of(self.limit.capacity())),
            (Act::GiveBack(which), None) => self.give_back(which, u64::MAX),
            (_, None) => {}
        }
    }

    /// Acts here and in the model. Says what was charged here, and what there.
    pub(super) fn act_beside(&mut self, act: Act, model: &mut Model, places: &mut Vec<usize>) -> (u64, u64) {
        let (now, asked) = (self.now.micros(), self.asked(act));
        let before = self.charges.clone();
        self.act(act);
        for (place, (old, new)) in before.iter().zip(&self.charges).enumerate() {
            if old.net != new.net {
                model.give_back(places[place], old.net - new.net, now);
            }
        }
        let (mut here, mut there) = (0, 0);
        for charge in &self.charges[before.len()..] {
            let (place, amount) = model.charge(asked.unwrap_or(1), now);
            places.push(place);
            (here, there) = (here + charge.mark.amount, there + amount);
        }
        (here, there)
    }

    /// The cost an act asks for; `None` if it gives back.
    pub(super) fn asked(&self, act: Act) -> Option<u64> {
        match act {
            Act::Check(share) | Act::Record(share) => Some(share.of(self.limit.capacity())),
            Act::Drain => Some(self.look(0).available),
            Act::GiveBack(_) | Act::Lower(..) => None,
        }
    }

    pub(super) fn check(&mut self, cost: u64) -> Look {
        // A denied request may store what it brought back from the future, too.
        let (look, _) = self.balance.look(&self.limit, cost, self.now);
        if look.allowed {
            self.record(cost);
        }
        look
    }

    /// Charges behind the world's back.
    pub(super) fn charge(&mut self, cost: u64, id: TraceId) -> Mark {
        self.balance.charge(&self.limit, cost, self.now, id)
    }

    /// Charges without asking; a cost of 0 only looks.
    pub(super) fn record(&mut self, cost: u64) -> u64 {
        if cost == 0 {
            return 0;
        }
        self.ids += 1;
        let id = TraceId::from_u128(self.ids);
        // Before the charge, as a receipt is made from the look that admitted it.
        let reset = self.look(cost).reset_if_charged;
        let mark = self.charge(cost, id);
        let counts_until = self.counts_until(reset, &mark);
        let at = self.true_now();
        self.charges.push(Charge { id, mark, counts_until, net: mark.amount, at, refundable: true });
        mark.amount
    }

    /// Until when a receipt of a charge that was just made says that it counts.
    pub(super) fn counts_until(&self, reset: Timestamp, mark: &Mark) -> Timestamp {
        self.limit.counts_until(reset.min(self.limit.latest_reset(mark, self.now)))
    }

    /// Gives back at most `amount` of what is left of some charge.
    pub(super) fn give_back(&mut self, which: Index, amount: u64) {
        if self.charges.is_empty() {
            return;
        }
        let at = which.index(self.charges.len());
        let charge = &mut self.charges[at];
        if charge.refundable {
            let mark = charge.mark.with_amount(amount.min(charge.net));
            // As a receipt that has run out: it is refused before it reaches the balance.
            if self.now < charge.counts_until {
                self.balance.give_back(mark, self.now, charge.id);
            }
            charge.net -= mark.amount;
            // As a receipt acts once.
            charge.refundable = !self.limit.refills_smoothly();
        }
    }

    /// The net cost admitted in the true window of this length that ends now. A window holds most when its
    /// last admission has just been made, so asking after each one covers every window.
    pub(super) fn admitted(&self, window: Span) -> u128 {
        let now = self.true_now();
        let counted = self.charges.iter().filter(|charge| charge.at.plus(window) > now);
        counted.map(|charge| u128::from(charge.net)).sum()
    }

    /// The cost in use, rounded up, debt included.
    pub(super) fn used(&self, shape: Shape) -> u64 {
        // Under its own limit a debt looks like no room. Under a wider one it can be read off.
        let wide = shape.widened();
        let mut balance = self.balance.clone();
        balance.bring(&wide, self.now);
        wide.capacity() - balance.peek(&wide, 0, self.now).available
    }
}

/// The request whose refund a law is about; a world numbers its own from 1.
pub(super) const GUEST: TraceId = TraceId::from_u128(u128::MAX);

/// Checks the net cost admitted in the true window that ends now.
pub(super) fn no_more_than(at_most: u64, world: &World, window: Span) -> Result<(), TestCaseError> {
    let admitted = world.admitted(window);
    prop_assert!(admitted <= u128::from(at_most), "{} admitted {admitted} in {window}", world.limit);
    Ok(())
}
