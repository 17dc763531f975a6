//! The audit of what operators do that changes no stored state: erasures of events, tests of alerts, and saved policy files.

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
        self.record_erasure(who, "all", subjects, reason).await
    }

    /// Audits that an erasure has failed, which [`audit_erasure`](Self::audit_erasure) has announced.
    pub(crate) async fn audit_failed_erasure(&self, who: &str, subjects: &[(Layer, String)]) {
        // The caller hears of the erasure, which is what failed first.
        if self.record_erasure(who, "failed, not all", subjects, "").await.is_err() {
            tracing::warn!("failed erasure of events not recorded in the audit");
        }
    }

    async fn record_erasure(
        &self,
        who: &str,
        what: &str,
        subjects: &[(Layer, String)],
        why: &str,
    ) -> Result<(), OperationError> {
        let Some(((layer, key), others)) = subjects.split_first() else { return Ok(()) };
        let others: Vec<String> = others.iter().map(|(layer, key)| format!(" and {} {key}", layer.name())).collect();
        let action = format!("erase events: {what}{}", others.concat());
        let turn = self.operations.lock().await;
        self.begin(Entry { who, action, layer: layer.name(), key, why })?.confirm();
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

    /// Audits that the policy file is written, and waits until that is on disk.
    pub(crate) async fn audit_policy(&self, who: &str, changes: &str, reason: &str) -> Result<(), OperationError> {
        let why = reason_of(reason)?;
        let turn = self.operations.lock().await;
        self.begin(Entry { who, action: format!("save the policy: {changes}"), layer: "policy", key: "", why })?
            .confirm();
        drop(turn);
        self.acknowledged().await
    }
}
