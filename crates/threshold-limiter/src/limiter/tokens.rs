//! The verified claims of a request's bearer token.

use threshold_core::address::Headers;
use threshold_core::policy::{Claims, Policy};

use super::Limiter;
use crate::clock::Clock;
use crate::observer::TokenRefused;
use crate::store::Store;

impl<S: Store, C: Clock> Limiter<S, C> {
    /// Returns the claims of a request's bearer token. A token that does not verify yields none, and observers are notified.
    pub(crate) fn claims<H: Headers + ?Sized>(&self, policy: &Policy, headers: &H) -> Option<Claims> {
        match policy.claims(headers, || self.time()) {
            Ok(claims) => claims,
            Err(reason) => {
                let refused = TokenRefused { at: self.time(), reason };
                for observer in &self.observers {
                    observer.token_refused(refused, policy);
                }
                None
            }
        }
    }
}
