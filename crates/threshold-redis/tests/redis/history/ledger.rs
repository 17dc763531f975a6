//! What a history has done, by the clients' own knowledge, and what the store must hold after it.

use std::collections::BTreeMap;
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

/// How long before a failure of a primary its last writes may not have reached its replica.
const REPLICATION: Duration = Duration::from_secs(1);
/// How long a node goes on to give back what a partition has refused, after it has answered.
const GIVING_BACK: Duration = Duration::from_secs(35);

/// How long a node may answer what the store no longer knows.
const REPEATED: Duration = Duration::from_secs(2);

/// How long calls are under way before and after the end of a server.
const SETTLING: Duration = Duration::from_secs(1);

/// A change of what is used: between these figures, both included.
pub(super) type Change = (i64, i64);

/// One thing that was asked for: a charge, or what gives a part of it back.
#[derive(Debug, Clone)]
pub(super) struct Effect {
    /// The change if nothing was lost.
    pub(super) told: Change,
    /// The change if it may have been lost, or carried out in a part of its partitions only.
    pub(super) doubt: Change,
    /// Whether the node has refused it without an answer of the store. What was charged all the same is withdrawn.
    pub(super) is_unanswered: bool,
    pub(super) node: usize,
    pub(super) from: Instant,
    pub(super) to: Instant,
}

/// A charge and its end.
#[derive(Debug, Clone)]
pub(super) struct Entry {
    pub(super) keys: Vec<String>,
    /// The charge first.
    pub(super) effects: Vec<Effect>,
    /// What the store has admitted, and what a node has admitted without the store.
    pub(super) admitted: i64,
    pub(super) alone: i64,
}

/// Data that servers have lost.
#[derive(Debug, Clone, Copy)]
pub(super) struct Loss {
    pub(super) from: Instant,
    pub(super) to: Instant,
    /// Everything, and not only the last writes.
    pub(super) whole: bool,
}

impl Loss {
    fn touches(&self, from: Instant, to: Instant) -> bool {
        let margin = if self.whole { Duration::ZERO } else { REPLICATION };
        to + margin >= self.from && from <= self.to
    }
}

/// What must hold for one key.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Bounds {
    pub(super) low: i64,
    pub(super) high: i64,
    /// What the store has admitted, less everything that was perhaps given back.
    pub(super) admitted: i64,
    pub(super) alone: i64,
}

#[derive(Default)]
pub(super) struct Ledger(Mutex<Book>);

#[derive(Default)]
struct Book {
    entries: Vec<Entry>,
    losses: Vec<Loss>,
    /// When connections were cut by the end of a server: nobody learns what the last calls have done.
    cuts: Vec<(Instant, Instant)>,
    rotations: Vec<Instant>,
    /// Which node was killed, and when.
    kills: Vec<(usize, Instant)>,
    /// Things that were acknowledged and stay, by what they are: a lock, a penalty.
    kept: BTreeMap<String, Vec<Instant>>,
    /// How often accounts were opened for a guess.
    guesses: BTreeMap<String, usize>,
    /// How often each verb was asked for, and how often the store did not answer.
    verbs: BTreeMap<&'static str, (u32, u32)>,
}

impl Ledger {
    fn with<T>(&self, change: impl FnOnce(&mut Book) -> T) -> T {
        change(&mut self.0.lock().unwrap_or_else(PoisonError::into_inner))
    }

    pub(super) fn add(&self, entry: Entry) {
        self.with(|book| book.entries.push(entry));
    }

    pub(super) fn lose(&self, loss: Loss) {
        self.with(|book| book.losses.push(loss));
    }

    pub(super) fn cut(&self, from: Instant, to: Instant) {
        self.with(|book| book.cuts.push((from, to)));
    }

    pub(super) fn rotate(&self) {
        self.with(|book| book.rotations.push(Instant::now()));
    }

    pub(super) fn kill(&self, node: usize) {
        self.with(|book| book.kills.push((node, Instant::now())));
    }

    /// Notes something that was acknowledged and must stay.
    pub(super) fn keep(&self, what: String) {
        self.with(|book| book.kept.entry(what).or_default().push(Instant::now()));
    }

    pub(super) fn guess(&self, account: &str) {
        self.with(|book| *book.guesses.entry(account.to_owned()).or_default() += 1);
    }

    pub(super) fn count(&self, verb: &'static str, is_answered: bool) {
        self.with(|book| {
            let (sent, failed) = book.verbs.entry(verb).or_default();
            (*sent, *failed) = (*sent + 1, *failed + u32::from(!is_answered));
        });
    }

    pub(super) fn verbs(&self) -> BTreeMap<&'static str, (u32, u32)> {
        self.with(|book| book.verbs.clone())
    }

    pub(super) fn guesses(&self) -> BTreeMap<String, usize> {
        self.with(|book| book.guesses.clone())
    }

    pub(super) fn losses(&self) -> usize {
        self.with(|book| book.losses.len())
    }

    pub(super) fn whole_losses(&self) -> usize {
        self.with(|book| book.losses.iter().filter(|loss| loss.whole).count())
    }

    pub(super) fn kills(&self) -> usize {
        self.with(|book| book.kills.len())
    }

    pub(super) fn len(&self) -> usize {
        self.with(|book| book.entries.len())
    }

    /// Returns what was acknowledged so many times and not lost since.
    pub(super) fn kept(&self, times: usize) -> Vec<String> {
        self.with(|book| {
            let is_kept = |at: &Instant| {
                // For a second a node repeats the denial of a penalty that is lost.
                let lost = |loss: &Loss| loss.touches(*at, *at) || loss.whole && loss.to + REPEATED > *at;
                !book.losses.iter().any(lost)
            };
            let kept = book.kept.iter().filter(|(_, at)| at.iter().filter(|at| is_kept(at)).count() >= times);
            kept.map(|(what, _)| what.clone()).collect()
        })
    }

    /// Returns what must hold for each key. On a Cluster a killed node may leave an end in a part of the partitions.
    pub(super) fn bounds(&self, is_cluster: bool) -> BTreeMap<String, Bounds> {
        self.with(|book| {
            let mut all = BTreeMap::<String, Bounds>::new();
            for entry in &book.entries {
                let (low, high) = book.change_of(entry, is_cluster);
                let credited: i64 = entry.effects.iter().skip(1).map(|effect| effect.told.0.min(effect.doubt.0)).sum();
                for key in &entry.keys {
                    let bounds = all.entry(key.clone()).or_default();
                    // A bucket that is given back to in another order than it was charged may lose credits: docs/policy.md.
                    let high = if key.starts_with("token-bucket") { high.max(entry.effects[0].told.1) } else { high };
                    bounds.low += low;
                    bounds.high += high;
                    bounds.admitted += entry.admitted + credited;
                    bounds.alone += entry.alone;
                }
            }
            all
        })
    }

    /// Returns the entries of a key, for people.
    pub(super) fn story(&self, key: &str, start: Instant) -> Vec<String> {
        self.with(|book| {
            let own = book.entries.iter().filter(|entry| entry.keys.iter().any(|own| own == key));
            let mut told: Vec<_> = own.map(|entry| (entry.effects[0].from, entry)).collect();
            told.sort_by_key(|(from, _)| *from);
            let effect = |effect: &Effect| {
                let at = |at: Instant| at.saturating_duration_since(start).as_secs_f64();
                format!("[{:.3}-{:.3} node {} {:?}]", at(effect.from), at(effect.to), effect.node, effect.told)
            };
            told.into_iter().map(|(_, entry)| entry.effects.iter().map(effect).collect()).collect()
        })
    }
}

impl Book {
    /// Returns how much of an entry is used in the end.
    fn change_of(&self, entry: &Entry, is_cluster: bool) -> Change {
        let charge = &entry.effects[0];
        // What was charged for certain before everything was lost is gone, and its credits count nowhere.
        let is_gone = self.losses.iter().any(|loss| loss.whole && charge.to < loss.from);
        if is_gone && charge.told.0 == charge.told.1 {
            return (0, 0);
        }
        let changes = entry.effects.iter().map(|effect| {
            let is_lost = is_gone || self.losses.iter().any(|loss| loss.touches(effect.from, effect.to));
            // Digests have changed in between.
            let is_split = self.rotations.iter().any(|at| charge.from < *at && *at < effect.to);
            let is_credit = effect.told.0 != effect.told.1 || effect.told.0 <= 0;
            let killed = |(node, at): &(usize, Instant)| {
                *node == effect.node && effect.from <= *at && *at <= effect.to + GIVING_BACK
            };
            let is_killed = (effect.is_unanswered || is_cluster && is_credit) && self.kills.iter().any(killed);
            let cut = |(from, to): &(Instant, Instant)| *from <= effect.to + SETTLING && effect.from <= *to + SETTLING;
            let is_cut = effect.is_unanswered && self.cuts.iter().any(cut);
            if is_lost || is_split || is_killed || is_cut { effect.doubt } else { effect.told }
        });
        changes.fold((0, 0), |sum, change| (sum.0 + change.0, sum.1 + change.1))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SECOND: Duration = Duration::from_secs(1);

    fn effect(told: Change, at: Instant) -> Effect {
        let doubt = (told.0.min(0), told.1.max(0));
        Effect { told, doubt, is_unanswered: false, node: 0, from: at, to: at + SECOND / 100 }
    }

    /// Returns what must hold of a charge of 5 in the 10th second and a credit of 3 in the 20th.
    fn bounds(change: impl FnOnce(&Ledger, Instant)) -> Change {
        let (ledger, start) = (Ledger::default(), Instant::now());
        let effects = vec![effect((5, 5), start + 10 * SECOND), effect((-3, -3), start + 20 * SECOND)];
        ledger.add(Entry { keys: vec!["key".to_owned()], effects, admitted: 5, alone: 0 });
        change(&ledger, start);
        let bounds = ledger.bounds(true)["key"];
        (bounds.low, bounds.high)
    }

    fn lose(ledger: &Ledger, at: Instant, whole: bool) {
        ledger.lose(Loss { from: at, to: at + SECOND / 10, whole });
    }

    #[test]
    fn what_must_hold_follows_from_what_was_lost() {
        assert_eq!(bounds(|_, _| {}), (2, 2));
        assert_eq!(bounds(|ledger, start| lose(ledger, start + 5 * SECOND, true)), (2, 2), "lost before");
        assert_eq!(
            bounds(|ledger, start| lose(ledger, start + 15 * SECOND, true)),
            (0, 0),
            "no credit of a lost charge"
        );
        assert_eq!(bounds(|ledger, start| lose(ledger, start + 30 * SECOND, true)), (0, 0));
        assert_eq!(bounds(|ledger, start| lose(ledger, start + 15 * SECOND, false)), (2, 2), "both are on the replica");
        assert_eq!(bounds(|ledger, start| lose(ledger, start + 10 * SECOND, false)), (-3, 2));
        assert_eq!(bounds(|ledger, start| lose(ledger, start + 20 * SECOND, false)), (2, 5));
    }

    #[test]
    fn an_end_is_in_doubt_if_its_node_is_killed_on_a_cluster() {
        let kill = |ledger: &Ledger, start: Instant, node: usize| {
            ledger.with(|book| book.kills.push((node, start + 21 * SECOND)));
        };
        assert_eq!(bounds(|ledger, start| kill(ledger, start, 0)), (2, 5));
        assert_eq!(bounds(|ledger, start| kill(ledger, start, 1)), (2, 2), "another node");
    }
}
