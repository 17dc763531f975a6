//! The limit of the object itself: `POST /check {"limit", "windowSec"}`. Its name is the key, and no policy is needed.

use threshold_core::limit::Algorithm;
use threshold_core::{Answer, Command, Digest, Limit, TraceId};
use threshold_limiter::LimitDecision;
use threshold_wire::{ApiError, LimitCall};

/// The path.
pub(super) const CHECK: &str = "/check";

/// The largest body. All fields together take less than a tenth of it.
const MAX_BODY: usize = 4 * 1024;

/// A call.
#[derive(Debug)]
pub(super) struct Check(LimitCall<'static>);

impl Check {
    /// Parses the body of a call.
    pub(super) fn read(body: &[u8]) -> Result<Self, ApiError> {
        if body.len() > MAX_BODY {
            return Err(ApiError::new(413, "body_too_large", format!("a body has at most {MAX_BODY} bytes")));
        }
        let call = LimitCall::read_for_key("", body)?;
        if call.limit().algorithm() == Some(Algorithm::Concurrency) {
            return Err(ApiError::not_served("algorithm", "concurrency"));
        }
        Ok(Self(call))
    }

    /// Returns the command that executes it.
    pub(super) fn command(&self) -> Command {
        let (limit, cost) = (*self.0.limit(), self.0.cost());
        // Only slots of concurrency are told apart by their ids.
        Command::Limit { key: key(&limit), limit, cost, id: TraceId::default() }
    }

    /// Returns the body of the answer to the command; `None` if it is the answer to another one.
    pub(super) fn answer(&self, answer: &Answer) -> Option<String> {
        let Answer::Limited { checked, at } = answer else { return None };
        Some(self.0.answer(&LimitDecision::new(self.0.limit(), checked, *at)).to_json())
    }
}

/// Returns the key of the record: each algorithm has its own. The digests of rules are keyed by the secret, so that none of them can be
/// made equal to one of these.
fn key(limit: &Limit) -> Digest {
    named(limit.algorithm().map_or("never", Algorithm::name))
}

fn named(name: &str) -> Digest {
    Digest::from_u128(name.bytes().fold(0, |key, byte| key << 8 | u128::from(byte)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_algorithm_has_a_key_of_its_own() {
        let keys = Algorithm::ALL.map(|algorithm| {
            let name = algorithm.name();
            assert!(name.len() <= size_of::<u128>(), "{name}");
            named(name)
        });
        assert!(keys.iter().enumerate().all(|(index, key)| !keys[..index].contains(key)));
    }
}
