//! Who is told of decisions: metrics, events, alerts. Told after the fact, and never waited for.

use threshold_core::{Decision, Facts, Policy};

/// Is told of every decision, on the thread that made it. It must not block: hand on what takes time.
pub trait Observer: Send + Sync {
    /// A decision was made under `policy`.
    fn decided(&self, facts: &Facts<'_>, decision: &Decision, policy: &Policy);
}
