//! Answers that came after their deadline, until the limiter takes them.

use std::sync::{Mutex, MutexGuard, PoisonError};

use crate::store::LateAnswer;

/// The largest number of answers. Those of half a second wait here, and beyond that the charges of refused requests stay.
const MAX_LATE: usize = 10_000;

#[derive(Debug, Default)]
pub(super) struct LateAnswers(Mutex<Vec<LateAnswer>>);

impl LateAnswers {
    pub(super) fn add(&self, late: LateAnswer) {
        let mut answers = self.lock();
        if answers.len() < MAX_LATE {
            answers.push(late);
        }
    }

    pub(super) fn take(&self) -> Vec<LateAnswer> {
        std::mem::take(&mut *self.lock())
    }

    fn lock(&self) -> MutexGuard<'_, Vec<LateAnswer>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use threshold_core::{OwnedBill, TraceId};

    use super::*;
    use crate::store::StoreError;

    #[test]
    fn the_number_of_late_answers_is_bounded() {
        let answers = LateAnswers::default();
        for _ in 0..=MAX_LATE {
            let bill = Box::new(OwnedBill::record(TraceId::default(), []));
            answers.add(LateAnswer { bill, answer: Err(StoreError::Unavailable) });
        }
        assert_eq!(answers.take().len(), MAX_LATE);
        assert!(answers.take().is_empty());
    }
}
