//! Request ids on a store that several nodes share.

use std::time::Duration;

use http::HeaderMap;
use threshold_core::Digest;
use threshold_limiter::store::StoreError;

use super::cache::MAX_REPEATS;
use super::{EncodedAnswer, RequestIdError, RequestKey, encoding};
use crate::desk::{BeginOutcome, BegunRequest, SharedRequests};

/// The pause before the store is asked again whether another node has answered: it doubles from the first to the last.
const ASK_AGAIN: [Duration; 2] = [Duration::from_millis(10), Duration::from_millis(250)];

/// How a request starts whose id is unknown on this node.
pub(super) enum Started {
    /// This node decides it.
    Begun(BegunRequest),
    /// Another node has answered it.
    Answered(EncodedAnswer),
    /// The store does not answer. This node decides alone, and the policy's `on_store_error` says how.
    Unavailable,
}

/// Begins a request in the store, unless it has begun already, or waits until another node has answered it.
pub(super) async fn start(
    shared: &SharedRequests,
    key: RequestKey,
    mut begun: Option<BegunRequest>,
) -> Result<Started, RequestIdError> {
    let [mut pause, longest] = ASK_AGAIN;
    loop {
        let outcome = match begun.take() {
            Some(begun) if !begun.needs_renewal() => return Ok(Started::Begun(begun)),
            // A long list may outlive the lease of its last requests. Another node may have taken one over by then,
            // and decides it.
            Some(begun) => begun.renew(None).await,
            None => shared.begin((key.id, key.content), None).await,
        };
        match outcome {
            Ok(BeginOutcome::Begun(begun)) => return Ok(Started::Begun(begun)),
            Ok(BeginOutcome::Answered(bytes)) => {
                return encoding::decode_answer(&bytes).map(Started::Answered).ok_or(RequestIdError::Unreadable);
            }
            Ok(BeginOutcome::Reused) => return Err(RequestIdError::Reused),
            Ok(BeginOutcome::UnderWay) => {
                // The store sends no notification. Most decisions take milliseconds, so the first pauses are short,
                // and a request that waits in a queue costs four questions a second.
                tokio::time::sleep(pause).await;
                pause = pause.saturating_mul(2).min(longest);
            }
            Err(StoreError::Full) => return Err(RequestIdError::Full),
            Err(_) => return Ok(Started::Unavailable),
        }
    }
}

/// A proxy's question that this node answers for all nodes.
pub(in crate::door) struct ProxyClaim(BegunRequest);

impl ProxyClaim {
    /// Returns the header fields that any node has answered this question with.
    ///
    /// # Errors
    /// If there is no answer yet: with the claim to answer it, or with `None` if another node has the claim or the store does
    /// not answer. A proxy is promised nothing, so that this node then answers without a claim.
    pub(in crate::door) async fn begin(shared: &SharedRequests, question: Digest) -> Result<HeaderMap, Option<Self>> {
        match shared.begin((question, question), Some(u32::from(MAX_REPEATS))).await {
            Ok(BeginOutcome::Answered(fields)) => encoding::decode_fields(&fields).ok_or(None),
            Ok(BeginOutcome::Begun(begun)) => Err(Some(Self(begun))),
            // nginx repeats a question only after it was answered, so a claim of another node is rare and not worth a
            // wait.
            Ok(BeginOutcome::UnderWay | BeginOutcome::Reused) | Err(_) => Err(None),
        }
    }

    /// Stores the answer for the other nodes; `None` if the request was denied.
    pub(in crate::door) async fn end(self, fields: Option<&HeaderMap>) {
        self.0.end(fields.map(encoding::encode_fields)).await;
    }
}
