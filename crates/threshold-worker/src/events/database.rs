//! The D1 database of events.

use threshold_core::Timestamp;
use threshold_core::event::sql;
use worker::wasm_bindgen::JsValue;
use worker::{D1Database, D1PreparedStatement, Env};

use super::DATABASE;

/// Why the database cannot be used.
#[derive(Debug, thiserror::Error)]
pub(crate) enum DatabaseError {
    /// There is none.
    #[error("bind a D1 database as {DATABASE}")]
    Missing,
    /// It failed.
    #[error("D1: {0}")]
    Failed(#[from] worker::Error),
}

/// The database, with its tables.
pub(crate) struct Database(D1Database);

impl Database {
    /// Opens the database, and creates its tables where they are missing.
    pub(crate) async fn open(env: &Env) -> Result<Self, DatabaseError> {
        let database = Self(env.d1(DATABASE).map_err(|_| DatabaseError::Missing)?);
        let tables = sql::TABLES.iter().map(|statement| database.0.prepare(*statement)).collect();
        database.run_all(tables).await?;
        Ok(database)
    }

    /// Returns a statement with its values.
    pub(crate) fn statement(&self, sql: &str, values: &[JsValue]) -> Result<D1PreparedStatement, DatabaseError> {
        Ok(self.0.prepare(sql).bind(values)?)
    }

    /// Runs a statement.
    pub(crate) async fn run(&self, sql: &str, values: &[JsValue]) -> Result<(), DatabaseError> {
        self.run_all(vec![self.statement(sql, values)?]).await
    }

    /// Runs statements in one transaction.
    pub(crate) async fn run_all(&self, statements: Vec<D1PreparedStatement>) -> Result<(), DatabaseError> {
        for result in self.0.batch(statements).await? {
            if let Some(error) = result.error() {
                return Err(worker::Error::RustError(error).into());
            }
        }
        Ok(())
    }

    /// Returns the text in one column of the first row; empty if there is none.
    pub(crate) async fn text(&self, sql: &str, values: &[JsValue], column: &str) -> Result<String, DatabaseError> {
        let found = self.statement(sql, values)?.first::<Option<String>>(Some(column)).await?;
        Ok(found.flatten().unwrap_or_default())
    }
}

/// Returns a time in milliseconds for a statement.
pub(crate) fn millis(at: Timestamp) -> JsValue {
    number(at.micros().checked_div(1_000).unwrap_or(0))
}

/// Returns a number for a statement. Below 2^53 it is exact.
pub(crate) fn number(value: u64) -> JsValue {
    JsValue::from_f64(value as f64)
}
