//! What operators are told: alerts.

pub(crate) mod alerts;

use std::sync::Mutex;

use alerts::AlertBook;

/// What is counted for operators.
#[derive(Debug, Default)]
pub(crate) struct Signals {
    pub(crate) alerts: Mutex<AlertBook>,
}
