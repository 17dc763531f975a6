//! Who a request's bearer token names.

use threshold_core::address::Headers;
use threshold_core::policy::{Claims, Policy};

use super::Limiter;
use crate::clock::Clock;
use crate::observer::TokenRefused;
use crate::store::Store;

impl<S: Store, C: Clock> Limiter<S, C> {
    /// The claims of a request's token at this moment. A token that does not hold names nobody, and observers are told.
    pub(crate) fn claims<H: Headers + ?Sized>(&self, policy: &Policy, headers: &H) -> Option<Claims> {
        match policy.claims(headers, || self.now()) {
            Ok(claims) => claims,
            Err(reason) => {
                let refused = TokenRefused { at: self.now(), reason };
                for observer in &self.observers {
                    observer.token_refused(refused, policy);
                }
                None
            }
        }
    }
}
