//! What operators are told: alerts, and what is recorded of decisions.

pub(crate) mod alerts;
#[cfg_attr(not(test), expect(dead_code, reason = "it is not connected to the server yet"))]
pub(crate) mod database;

use std::sync::Mutex;

use alerts::AlertBook;

/// What is counted for operators.
#[derive(Debug, Default)]
pub(crate) struct Signals {
    pub(crate) alerts: Mutex<AlertBook>,
}
