//! Bearer tokens as `[identity.jwt]` of the policy demands, with the cryptography of the platform.
//!
//! The platform verifies signatures asynchronously, and a decision asks for claims at once. So the signature of a request's token is
//! verified before the decision, which then finds it verified.

use std::fmt;
use std::sync::{Mutex, PoisonError};

use http::HeaderMap;
use http::header::AUTHORIZATION;
use threshold_core::Timestamp;
use threshold_core::policy::{Claims, Jwt, Policy, TokenError, TokenVerifier};
use threshold_limiter::Clock as _;
use threshold_wire::token::Token;
use worker::js_sys::{Array, Promise, Reflect, Uint8Array};
use worker::send::SendWrapper;
use worker::wasm_bindgen::prelude::wasm_bindgen;
use worker::wasm_bindgen::{self, JsCast as _, JsValue};
use worker::wasm_bindgen_futures::JsFuture;

use crate::clock::DateClock;
use crate::config::ConfigError;

#[wasm_bindgen(module = "/src/jwt.js")]
extern "C" {
    #[wasm_bindgen(js_name = importKeys)]
    fn import_keys(alg: &str, text: &str) -> Promise;

    #[wasm_bindgen(js_name = verifySignature)]
    fn verify_signature(alg: &str, key: &JsValue, signature: &Uint8Array, message: &Uint8Array) -> Promise;
}

/// The verifier of tokens, once for each isolate.
pub(crate) struct Tokens {
    settings: Jwt,
    keys: Keys,
    /// The token whose signature was verified, while its request is decided.
    signed: Mutex<Option<Signed>>,
    /// The token that was asked for last, if nothing but its signature was missing.
    unsigned: Mutex<Option<String>>,
}

/// A token whose signature was verified.
pub(crate) struct Signed {
    token: String,
    claims: Result<Claims, TokenError>,
}

impl Signed {
    /// Returns the claims, if the token is valid.
    pub(crate) fn claims(&self) -> Option<&Claims> {
        self.claims.as_ref().ok()
    }
}

/// The imported keys of one algorithm, by their ids.
struct Keys {
    keys: Vec<(Option<String>, SendWrapper<JsValue>)>,
    /// Whether there is one key, whatever id a token names.
    any: bool,
}

impl Tokens {
    /// Imports the keys of these settings.
    ///
    /// # Errors
    /// Fails where a key cannot be used, or is in a file.
    pub(crate) async fn new(settings: &Jwt) -> Result<Self, ConfigError> {
        let key = settings.key.as_deref().filter(|_| settings.key_file.is_none());
        let key = key.ok_or_else(|| {
            ConfigError::Key("a Worker has no files: put the key into a secret, and write key = \"${NAME}\"".to_owned())
        })?;
        let fault = |error: JsValue| {
            let message = Reflect::get(&error, &"message".into()).ok().and_then(|message| message.as_string());
            ConfigError::Key(message.unwrap_or_else(|| "it cannot be used".to_owned()))
        };
        let imported = JsFuture::from(import_keys(&settings.alg, key)).await.map_err(fault)?;
        let keys = Keys::of(&imported).map_err(fault)?;
        Ok(Self { settings: settings.clone(), keys, signed: Mutex::default(), unsigned: Mutex::default() })
    }

    /// Verifies the signature of the token of a request. Returns the token if it is good.
    pub(crate) async fn signed(&self, policy: &Policy, headers: &HeaderMap) -> Option<Signed> {
        let lines = headers.get_all(AUTHORIZATION).iter().map(|line| (AUTHORIZATION.as_str(), line.as_bytes()));
        let lines: Vec<(&str, &[u8])> = lines.collect();
        // The policy finds the token and asks for it; the signature is all that it can lack now.
        let _ = policy.claims(lines.as_slice(), || DateClock.now());
        let asked = self.unsigned.lock().unwrap_or_else(PoisonError::into_inner).take()?;
        let token = Token::parse(&asked).ok()?;
        let key = self.keys.find(token.kid())?;
        let (signature, message) = (Uint8Array::from(token.signature()), Uint8Array::from(token.message()));
        let verified = JsFuture::from(verify_signature(&self.settings.alg, key, &signature, &message)).await;
        // An error is a signature that the platform cannot read.
        if !verified.is_ok_and(|verified| verified.is_truthy()) {
            return None;
        }
        let claims = token.claims(&self.settings, DateClock.now());
        Some(Signed { token: asked, claims })
    }

    /// Runs a decision on the request of this token. The decision asks for the claims at once, so no other one comes between.
    pub(crate) fn with_signed<T>(&self, signed: Option<Signed>, decide: impl FnOnce() -> T) -> T {
        *self.signed.lock().unwrap_or_else(PoisonError::into_inner) = signed;
        let decided = decide();
        *self.signed.lock().unwrap_or_else(PoisonError::into_inner) = None;
        decided
    }
}

impl TokenVerifier for Tokens {
    fn verify(&self, text: &str, _: Timestamp) -> Result<Claims, TokenError> {
        let token = Token::parse(text)?;
        // The policy chooses the algorithm. If the token could, a public key might be used as a secret.
        if *token.alg() != *self.settings.alg {
            return Err(TokenError::Algorithm);
        }
        if self.keys.find(token.kid()).is_none() {
            return Err(TokenError::Key);
        }
        let mut signed = self.signed.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(signed) = signed.take_if(|signed| signed.token == text) {
            return signed.claims;
        }
        *self.unsigned.lock().unwrap_or_else(PoisonError::into_inner) = Some(text.to_owned());
        Err(TokenError::Signature)
    }
}

impl fmt::Debug for Tokens {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Tokens").field("alg", &self.settings.alg).finish_non_exhaustive()
    }
}

impl Keys {
    fn of(imported: &JsValue) -> Result<Self, JsValue> {
        let any = Reflect::get(imported, &"any".into())?.is_truthy();
        let list: Array = Reflect::get(imported, &"keys".into())?.unchecked_into();
        let read = |entry: JsValue| {
            let kid = Reflect::get(&entry, &"kid".into())?.as_string();
            Ok((kid, SendWrapper::new(Reflect::get(&entry, &"key".into())?)))
        };
        Ok(Self { keys: list.iter().map(read).collect::<Result<_, JsValue>>()?, any })
    }

    /// Returns the key that a token names, or the only one there is.
    fn find(&self, kid: Option<&str>) -> Option<&JsValue> {
        let named = |own: Option<&str>| self.any || kid.is_none() || own == kid;
        let mut found = self.keys.iter().filter(|(own, _)| named(own.as_deref())).map(|(_, key)| &**key);
        let only = found.next();
        // If two keys match, either would be a guess.
        if found.next().is_none() { only } else { None }
    }
}
