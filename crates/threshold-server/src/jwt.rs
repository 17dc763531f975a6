//! The keys of `[identity.jwt]`: read with the policy that names them, and again when their file changes.

use std::path::Path;
use std::sync::Arc;

use threshold_core::policy::Policy;
use threshold_limiter::jwt::{KeyError, MAX_KEY_FILE, Verifier};

use crate::source::read_bytes;

/// What verifies the tokens of the policy in force, and what its file held when it was read.
pub(crate) struct TokenKeys {
    pub(crate) verifier: Arc<Verifier>,
    /// Nothing, where the key is in the policy itself.
    pub(crate) contents: Option<Vec<u8>>,
}

/// A policy whose tokens are verified, and by what. Fails where its key cannot be read or used.
pub(crate) fn attach(policy: Policy) -> anyhow::Result<(Policy, Option<TokenKeys>)> {
    let Some(settings) = &policy.identity().jwt else { return Ok((policy, None)) };
    let contents = match settings.key_file.as_deref() {
        Some(file) => Some(
            read_bytes(Path::new(file), MAX_KEY_FILE)
                .map_err(|error| anyhow::anyhow!("[identity.jwt] key_file: {error:#}"))?,
        ),
        None => None,
    };
    let verifier = match &contents {
        Some(contents) => Verifier::with_key(settings, contents)?,
        None => Verifier::new(settings)?,
    };
    let verifier = Arc::new(verifier);
    warn_of_ambiguous(&verifier);
    let policy = policy.with_token_verifier(Arc::<Verifier>::clone(&verifier));
    Ok((policy, Some(TokenKeys { verifier, contents })))
}

/// Uses what the file of keys holds now. After an error the keys in use stay.
pub(crate) fn load(verifier: &Verifier, contents: &[u8]) -> Result<(), KeyError> {
    verifier.load(contents)?;
    warn_of_ambiguous(verifier);
    Ok(())
}

fn warn_of_ambiguous(verifier: &Verifier) {
    for kid in verifier.ambiguous_kids() {
        tracing::warn!(kid, "several keys of the JWKS have this kid: tokens that name it are refused");
    }
}
