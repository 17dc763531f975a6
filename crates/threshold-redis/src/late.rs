//! Answers that came after their deadline, until the limiter takes them.

use std::sync::{Mutex, MutexGuard, PoisonError};

use threshold_core::{Answer, Command};

use threshold_limiter::store::{LateAnswer, StoreError};

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

/// Returns whether a command charges or counts something that has to be withdrawn if its caller is refused because no answer has come.
pub(super) fn is_withdrawn(command: &Command) -> bool {
    matches!(command, Command::BeginLogin { .. } | Command::Limit { .. })
}

/// The place in which a command leaves its answer, and in which its caller looks for it when the deadline has passed. A caller that
/// has left before that never looks, and its command stays as it was executed.
#[derive(Debug, Default)]
pub(super) struct Handover(Mutex<Place>);

#[derive(Debug, Default)]
enum Place {
    /// The caller has not looked, and there is no answer.
    #[default]
    Empty,
    Answered(Result<Answer, StoreError>),
    /// The caller has looked, and decided without an answer.
    GivenUp,
}

impl Handover {
    /// Leaves an answer. Returns it if the caller has given up.
    pub(super) fn answer(&self, answer: Result<Answer, StoreError>) -> Option<Result<Answer, StoreError>> {
        let mut place = self.lock();
        if matches!(*place, Place::GivenUp) {
            return Some(answer);
        }
        *place = Place::Answered(answer);
        None
    }

    /// Takes the answer. Without one the caller gives up.
    pub(super) fn take(&self) -> Option<Result<Answer, StoreError>> {
        // In one step: an answer is either taken here or returned to the command.
        match std::mem::replace(&mut *self.lock(), Place::GivenUp) {
            Place::Answered(answer) => Some(answer),
            Place::Empty | Place::GivenUp => None,
        }
    }

    fn lock(&self) -> MutexGuard<'_, Place> {
        // A poisoned lock is safe to use: a place is replaced in one step.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use threshold_core::{OwnedBill, TraceId};

    use super::*;

    #[test]
    fn the_number_of_late_answers_is_bounded() {
        let answers = LateAnswers::default();
        for _ in 0..=MAX_LATE {
            let bill = Box::new(OwnedBill::record(TraceId::default(), []));
            answers.add(LateAnswer::Settled { bill, answer: Err(StoreError::Unavailable) });
        }
        assert_eq!(answers.take().len(), MAX_LATE);
        assert!(answers.take().is_empty());
    }

    #[test]
    fn an_answer_is_taken_by_its_caller_or_returned_to_its_command() {
        let in_time = Handover::default();
        assert_eq!(in_time.answer(Ok(Answer::Done)), None);
        assert_eq!(in_time.take(), Some(Ok(Answer::Done)));
        let late = Handover::default();
        assert_eq!(late.take(), None);
        assert_eq!(late.answer(Ok(Answer::Done)), Some(Ok(Answer::Done)));
    }
}
