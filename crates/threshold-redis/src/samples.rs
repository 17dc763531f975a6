//! The comparison of some writes of `settle.lua` with what core would have written. Both compute the same, and this shows it on the
//! servers and data of an installation.

use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::sync::{Mutex, PoisonError};

use threshold_core::{Balance, Format, Outcome};

use super::reply::Values;

/// One in so many writes is compared.
pub(super) const COMPARED: u32 = 1_000;

/// The writes that were compared.
#[derive(Debug)]
pub(super) struct Samples {
    every: u32,
    writes: AtomicU32,
    differences: AtomicU64,
    last: Mutex<Option<String>>,
}

impl Samples {
    pub(super) fn new(every: u32) -> Self {
        Self { every, writes: AtomicU32::new(0), differences: AtomicU64::new(0), last: Mutex::default() }
    }

    /// Returns whether the next write is compared.
    pub(super) fn takes_next(&self) -> bool {
        self.writes.fetch_add(1, Ordering::Relaxed).checked_rem(self.every) == Some(0)
    }

    /// Compares the balances that core has computed with those that the script wrote.
    pub(super) fn compare(&self, names: &[String], balances: &[Balance], outcome: &Outcome, written: &Values) {
        for (index, ((name, balance), written)) in names.iter().zip(balances).zip(written).enumerate() {
            let expected = outcome.balance_changed(index).then(|| balance.to_script(Format::PRESENT));
            if expected != *written {
                self.differences.fetch_add(1, Ordering::Relaxed);
                let text = format!("{name}: settle.lua wrote {written:02x?}, and core {expected:02x?}");
                *self.last.lock().unwrap_or_else(PoisonError::into_inner) = Some(text);
            }
        }
    }

    /// Returns the number of differences.
    pub(super) fn differences(&self) -> u64 {
        self.differences.load(Ordering::Relaxed)
    }

    /// Returns the last difference, for operators.
    pub(super) fn last(&self) -> Option<String> {
        self.last.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_in_so_many_writes_is_compared_and_a_difference_is_kept() {
        let samples = Samples::new(3);
        let taken: Vec<bool> = (0..6).map(|_| samples.takes_next()).collect();
        assert_eq!(taken, [true, false, false, true, false, false]);
        let (names, balances) = (["th:{0000}b:1".to_owned()], [Balance::default()]);
        samples.compare(&names, &balances, &Outcome::default(), &vec![None]);
        assert_eq!((samples.differences(), samples.last()), (0, None));
        // Nothing was to be written, and something was.
        samples.compare(&names, &balances, &Outcome::default(), &vec![Some(vec![1, 2])]);
        assert_eq!(samples.differences(), 1);
        assert!(samples.last().unwrap().contains("th:{0000}b:1"));
    }
}
