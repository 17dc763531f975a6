//! The keys of `[identity.jwt]`, which are read with their policy and again when their file changes.

use std::path::Path;
use std::sync::Arc;

use threshold_core::policy::Policy;
use threshold_wire::jwt::{KeyError, Verifier, read_key_file};

/// The verifier of a policy, and the contents of its key file.
pub(crate) struct TokenKeys {
    pub(crate) verifier: Arc<Verifier>,
    /// `None` if the key is in the policy itself.
    pub(crate) contents: Option<Vec<u8>>,
}

/// Attaches a verifier to a policy with `[identity.jwt]`.
///
/// # Errors
/// If the key cannot be read or parsed.
pub(crate) fn attach(policy: Policy) -> Result<(Policy, Option<TokenKeys>), KeyError> {
    let Some(settings) = &policy.identity().jwt else { return Ok((policy, None)) };
    let file = settings.key_file.as_deref().map(Path::new);
    // Read once and kept: the watch must compare with exactly what the verifier uses.
    let contents = file.map(read_key_file).transpose()?;
    let verifier = match &contents {
        Some(contents) => Verifier::with_key(settings, contents)?,
        None => Verifier::new(settings)?,
    };
    let verifier = Arc::new(verifier);
    warn_of_keys(&verifier);
    let policy = policy.with_token_verifier(Arc::<Verifier>::clone(&verifier));
    Ok((policy, Some(TokenKeys { verifier, contents })))
}

/// Loads changed keys into a verifier. After an error the present keys stay in use.
pub(crate) fn load(verifier: &Verifier, contents: &[u8]) -> Result<(), KeyError> {
    verifier.load(contents)?;
    warn_of_keys(verifier);
    Ok(())
}

/// Formats an error of a key with its cause.
pub(crate) fn describe(error: KeyError) -> String {
    format!("{:#}", anyhow::Error::from(error))
}

fn warn_of_keys(verifier: &Verifier) {
    for kid in verifier.ambiguous_kids() {
        tracing::warn!(kid, "JWKS has several keys with this kid: tokens that name it are refused");
    }
    for reason in verifier.skipped_keys() {
        tracing::warn!(reason, "key of the JWKS skipped");
    }
}
