//! The application's own response to a refused request.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use http::Response;
use http::request::Parts;
use threshold_core::Decision;
use threshold_core::policy::Policy;

use super::answer;
use super::gate::{Refused, Strike};

/// A request that the layer answers in place of the service; the argument of the function that
/// [`ThresholdLayer::on_refused`](super::ThresholdLayer::on_refused) takes.
#[non_exhaustive]
pub struct RefusedRequest<'r> {
    /// The request, without its body.
    pub request: &'r Parts,
    /// The decision that denied it, and the policy that it was made under; `None` where the request could not be decided,
    /// such as for a cost that never fits. Then [`response`](Self::response) has the reason.
    pub denied: Option<(&'r Decision, &'r Policy)>,
    /// The response that the layer would send.
    pub response: Response<Bytes>,
}

impl RefusedRequest<'_> {
    /// Returns how long the client should wait; `None` where the request could not be decided, and under a ban without an
    /// end.
    #[must_use]
    pub fn retry_after(&self) -> Option<Duration> {
        self.denied.and_then(|(decision, _)| decision.retry_after())
    }
}

/// Shows no header field of the request, which may hold credentials.
impl fmt::Debug for RefusedRequest<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let status = self.response.status();
        f.debug_struct("RefusedRequest").field("status", &status).finish_non_exhaustive()
    }
}

/// The function that makes the application's responses.
pub(super) type Respond = Arc<dyn Fn(RefusedRequest<'_>) -> Response<Bytes> + Send + Sync>;

/// Returns the response to a refused request: the application's, if it makes responses, or the layer's.
pub(super) fn respond(own: Option<&Respond>, request: &Parts, refused: Refused) -> (Response<Bytes>, Strike) {
    let Refused { response, strike, denied } = refused;
    let Some(own) = own else { return (response, strike) };
    let denied = denied.as_ref().map(|(decision, view)| (&**decision, &*view.policy));
    let mut response = own(RefusedRequest { request, denied, response });
    if let Some((decision, policy)) = denied {
        // A client that is not told when to come back comes back at once.
        answer::add_fields(response.headers_mut(), answer::fields(decision, policy));
    }
    (response, strike)
}
