//! The audit of what operators do that changes no stored state: erasures of events, and tests of alerts.

use threshold_core::policy::Layer;

use super::audit::Entry;
use super::operations::reason_of;
use super::{Desk, OperationError};

impl Desk {
    /// Audits that the events of a subject are erased, and waits until that is on disk. It comes before the erasure, which may take
    /// seconds: the journal writes nothing during a change.
    ///
    /// Subjects are named by their digests, or the audit would keep the name that is erased.
    pub(crate) async fn audit_erasure(
        &self,
        who: &str,
        subjects: &[(Layer, String)],
        reason: Option<&str>,
    ) -> Result<(), OperationError> {
        let reason = reason.map_or(Ok(""), reason_of)?;
        let Some(((layer, key), others)) = subjects.split_first() else { return Ok(()) };
        let others: Vec<String> = others.iter().map(|(layer, key)| format!(" and {} {key}", layer.name())).collect();
        let action = format!("erase events: all{}", others.concat());
        let turn = self.operations.lock().await;
        self.begin(Entry { who, action, layer: layer.name(), key, why: reason })?.confirm();
        drop(turn);
        self.acknowledged().await
    }

    /// Audits that a test message is sent to the receivers of alerts, who may ask who has sent it.
    pub(crate) async fn audit_alert_test(&self, who: &str) -> Result<(), OperationError> {
        let turn = self.operations.lock().await;
        self.begin(Entry { who, action: "test: sent".to_owned(), layer: "alerts", key: "test", why: "" })?.confirm();
        drop(turn);
        self.acknowledged().await
    }
}
