//! Interleaved rounds: everybody is visited once in each, so that a slow minute of the machine slows them all.

use std::ops::Range;
use std::sync::Barrier;
use std::thread;
use std::time::{Duration, Instant};

use findings::Spread;

/// Decisions between two looks at the clock: some 20 µs for the fastest, so that the clock is no part of the figure.
pub const CHUNK: usize = 1_024;

/// Somebody who decides the visits of a range and says how many were allowed.
pub struct Entry<'a> {
    /// Who.
    pub name: String,
    /// Decides.
    pub run: Box<dyn Fn(Range<usize>) -> usize + Sync + 'a>,
}

/// How long, how often, and by how many at once.
#[derive(Debug, Clone, Copy)]
pub struct Pace {
    /// Rounds that count; one more goes ahead to warm up.
    pub rounds: usize,
    /// For how long one entry is measured in one round.
    pub budget: Duration,
    /// How many visits there are, a multiple of [`CHUNK`].
    pub visits: usize,
    /// How many threads decide at once.
    pub threads: usize,
}

/// What an entry did in all rounds.
#[derive(Debug, Clone)]
pub struct Series {
    /// Who.
    pub name: String,
    /// Nanoseconds a decision, by round.
    pub ns: Vec<f64>,
    /// Decisions that allowed.
    pub allowed: usize,
    /// All decisions.
    pub decisions: usize,
}

/// Runs all rounds, each in another order.
pub fn run(entries: &[Entry<'_>], pace: Pace) -> Vec<Series> {
    let fresh = |entry: &Entry<'_>| Series { name: entry.name.clone(), ns: Vec::new(), allowed: 0, decisions: 0 };
    let mut all: Vec<Series> = entries.iter().map(fresh).collect();
    for round in 0..=pace.rounds {
        for place in 0..entries.len() {
            let at = (place + round) % entries.len();
            let (ns, allowed, decisions) = measure(&entries[at], pace);
            let series = &mut all[at];
            series.allowed += allowed;
            series.decisions += decisions;
            if round > 0 {
                series.ns.push(ns);
            }
        }
    }
    all
}

/// The time that one thread takes for a decision, while all of them decide.
fn measure(entry: &Entry<'_>, pace: Pace) -> (f64, usize, usize) {
    let barrier = Barrier::new(pace.threads);
    let work = |thread: usize| {
        let mut at = (pace.visits / pace.threads * thread).next_multiple_of(CHUNK) % pace.visits;
        let (mut allowed, mut decisions) = (0, 0);
        barrier.wait();
        let start = Instant::now();
        loop {
            allowed += (entry.run)(at..at + CHUNK);
            decisions += CHUNK;
            at = (at + CHUNK) % pace.visits;
            let elapsed = start.elapsed();
            if elapsed >= pace.budget {
                return (elapsed, allowed, decisions);
            }
        }
    };
    let done: Vec<(Duration, usize, usize)> = thread::scope(|scope| {
        let threads: Vec<_> = (0..pace.threads).map(|thread| scope.spawn(move || work(thread))).collect();
        threads.into_iter().map(|thread| thread.join().expect("a contender panicked")).collect()
    });
    let time: Duration = done.iter().map(|(elapsed, ..)| *elapsed).sum();
    let decisions = done.iter().map(|(.., decisions)| *decisions).sum::<usize>();
    let allowed = done.iter().map(|(_, allowed, _)| *allowed).sum();
    (time.as_nanos() as f64 / decisions as f64, allowed, decisions)
}

impl Series {
    /// Nanoseconds a decision.
    pub fn spread(&self) -> Spread {
        Spread::of(self.ns.iter().copied())
    }

    /// The median, over rounds, of how many times as long as `base` in the same round.
    pub fn ratio(&self, base: &Self) -> f64 {
        Spread::of(self.ns.iter().zip(&base.ns).map(|(own, base)| own / base)).median
    }
}
