//! A secret, a public key in PEM or a JWKS → the keys that signatures are checked with.

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use jsonwebtoken::jwk::{AlgorithmParameters, EllipticCurve, Jwk, JwkSet, KeyOperations, PublicKeyUse};
use jsonwebtoken::{Algorithm, DecodingKey, DecodingKeyKind};
use ring::signature::{
    ECDSA_P256_SHA256_FIXED, ECDSA_P384_SHA384_FIXED, ED25519, RSA_PKCS1_2048_8192_SHA256, RSA_PKCS1_2048_8192_SHA384,
    RSA_PKCS1_2048_8192_SHA512, RsaParameters, RsaPublicKeyComponents, UnparsedPublicKey, VerificationAlgorithm,
};
use ring::{digest, hmac};
use x509_parser::oid_registry::{OID_EC_P256, OID_NIST_EC_P384, OID_SIG_ED25519};
use x509_parser::pem::Pem;
use x509_parser::prelude::FromDer as _;
use x509_parser::public_key::{PublicKey, RSAPublicKey};
use x509_parser::x509::SubjectPublicKeyInfo;

use super::KeyError;

/// The keys of one algorithm.
pub(super) enum Keys {
    /// One key, whatever id a token gives it.
    One(Key),
    /// The usable keys of a JWKS by their ids.
    Set(Vec<(Option<String>, Key)>),
}

/// One key and what it is used with.
pub(super) enum Key {
    Hmac(hmac::Key),
    Rsa(&'static RsaParameters, RsaPublicKeyComponents<Vec<u8>>),
    Curve(UnparsedPublicKey<Vec<u8>>),
}

/// What an algorithm is made of.
enum Kind {
    Hmac(hmac::Algorithm, &'static digest::Algorithm),
    Rsa(&'static RsaParameters),
    Curve(&'static dyn VerificationAlgorithm, EllipticCurve),
}

/// Whether a text is in a form in which public keys are handed out, or begins as JSON and pages do: an error page, say, that was
/// stored in the place of the keys.
fn is_public(text: &[u8]) -> bool {
    let text = text.strip_prefix("\u{feff}".as_bytes()).unwrap_or(text).trim_ascii();
    let packed: Vec<u8> = text.iter().copied().filter(|byte| !byte.is_ascii_whitespace()).collect();
    let lower = packed.to_ascii_lowercase();
    let documents = ["{\"", "[{", "[\"", "<!", "<?", "<html"];
    let keys = ["ssh-", "ecdsa-sha2-", "sk-ssh-", "sk-ecdsa-", "----begin", "-----begin"];
    let is_der = |der: &[u8]| SubjectPublicKeyInfo::from_der(der).is_ok();
    documents.iter().chain(&keys).any(|begin| lower.starts_with(begin.as_bytes()))
        || is_der(text)
        || STANDARD.decode(packed).is_ok_and(|der| is_der(&der))
}

impl Keys {
    /// The keys in a text: for HS algorithms the secret itself or a JWKS, for the others a public key in PEM or a JWKS.
    pub(super) fn parse(alg: Algorithm, text: &[u8]) -> Result<Self, KeyError> {
        let kind = Kind::of(alg).ok_or_else(|| KeyError::new("the algorithm is not supported"))?;
        let is_pem = text.windows(11).any(|window| window == b"-----BEGIN ");
        if is_pem && matches!(kind, Kind::Hmac(..)) {
            let message = format!(
                "this is a key in PEM, and {alg:?} takes a shared secret: whoever has a public key could \
                                   sign tokens with it"
            );
            return Err(KeyError::new(message));
        }
        if is_pem {
            return kind.pem_key(alg, text).map(Self::One);
        }
        let is_object = text.trim_ascii_start().first() == Some(&b'{');
        match (kind, serde_json::from_slice::<JwkSet>(text)) {
            (kind, Ok(set)) => kind.key_set(alg, &set),
            (Kind::Hmac(..), Err(_)) if is_object && serde_json::from_slice::<serde::de::IgnoredAny>(text).is_ok() => {
                Err(KeyError::new("this is JSON, and no JWKS"))
            }
            (Kind::Hmac(..), Err(_)) if is_public(text) => Err(KeyError::new(
                "this is a public key or a document, not a shared secret: whoever can read it could sign tokens with it",
            )),
            (kind @ Kind::Hmac(..), Err(_)) => kind.secret(alg, without_line_end(text)).map(Self::One),
            (_, Err(_)) => Err(KeyError::new("this is neither a public key in PEM nor a JWKS")),
        }
    }

    /// The one key that a token names, or the only one there is.
    pub(super) fn find(&self, kid: Option<&str>) -> Option<&Key> {
        let keys = match self {
            Self::One(key) => return Some(key),
            Self::Set(keys) => keys,
        };
        let mut named = keys.iter().filter(|(own, _)| kid.is_none() || own.as_deref() == kid).map(|(_, key)| key);
        let only = named.next();
        if named.next().is_none() { only } else { None }
    }

    /// The ids that several keys have.
    pub(super) fn ambiguous_kids(&self) -> Vec<String> {
        let Self::Set(keys) = self else { return Vec::new() };
        let mut kids: Vec<&String> = keys.iter().filter_map(|(kid, _)| kid.as_ref()).collect();
        kids.sort_unstable();
        let mut twice: Vec<String> = kids
            .windows(2)
            .filter_map(|pair| if pair.first() == pair.last() { pair.first() } else { None })
            .map(|kid| (*kid).clone())
            .collect();
        twice.dedup();
        twice
    }
}

impl Key {
    pub(super) fn verifies(&self, message: &[u8], signature: &[u8]) -> bool {
        match self {
            Self::Hmac(key) => hmac::verify(key, message, signature).is_ok(),
            Self::Rsa(parameters, key) => key.verify(parameters, message, signature).is_ok(),
            Self::Curve(key) => key.verify(message, signature).is_ok(),
        }
    }
}

impl Kind {
    fn of(alg: Algorithm) -> Option<Self> {
        Some(match alg {
            Algorithm::HS256 => Self::Hmac(hmac::HMAC_SHA256, &digest::SHA256),
            Algorithm::HS384 => Self::Hmac(hmac::HMAC_SHA384, &digest::SHA384),
            Algorithm::HS512 => Self::Hmac(hmac::HMAC_SHA512, &digest::SHA512),
            Algorithm::RS256 => Self::Rsa(&RSA_PKCS1_2048_8192_SHA256),
            Algorithm::RS384 => Self::Rsa(&RSA_PKCS1_2048_8192_SHA384),
            Algorithm::RS512 => Self::Rsa(&RSA_PKCS1_2048_8192_SHA512),
            Algorithm::ES256 => Self::Curve(&ECDSA_P256_SHA256_FIXED, EllipticCurve::P256),
            Algorithm::ES384 => Self::Curve(&ECDSA_P384_SHA384_FIXED, EllipticCurve::P384),
            Algorithm::EdDSA => Self::Curve(&ED25519, EllipticCurve::Ed25519),
            _ => return None,
        })
    }

    /// A shared secret, which is no shorter than the hash (RFC 7518, 3.2).
    fn secret(&self, alg: Algorithm, secret: &[u8]) -> Result<Key, KeyError> {
        match self {
            Self::Hmac(algorithm, digest) if secret.len() >= digest.output_len() => {
                Ok(Key::Hmac(hmac::Key::new(*algorithm, secret)))
            }
            Self::Hmac(_, digest) => {
                let least = digest.output_len();
                Err(KeyError::new(format!("the secret is too short: {alg:?} takes at least {least} bytes")))
            }
            Self::Rsa(_) | Self::Curve(..) => Err(wrong_kind(alg)),
        }
    }

    /// An RSA key of a length that signatures are checked with.
    fn rsa(&self, alg: Algorithm, modulus: &[u8], exponent: &[u8]) -> Result<Key, KeyError> {
        let Self::Rsa(parameters) = self else { return Err(wrong_kind(alg)) };
        let (n, e) = (without_zeros(modulus), without_zeros(exponent));
        let bits =
            n.len().saturating_mul(8).saturating_sub(n.first().map_or(0, |first| first.leading_zeros() as usize));
        if !(2048..=8192).contains(&bits) {
            return Err(KeyError::new(format!("this RSA key has {bits} bits, and 2048 to 8192 are accepted")));
        }
        Ok(Key::Rsa(parameters, RsaPublicKeyComponents { n: n.to_vec(), e: e.to_vec() }))
    }

    /// A point of this curve, not compressed.
    fn point(&self, alg: Algorithm, curve: &EllipticCurve, point: &[u8]) -> Result<Key, KeyError> {
        let (verification, length) = match self {
            Self::Curve(verification, own) if own == curve => (*verification, point_length(own)),
            _ => return Err(wrong_kind(alg)),
        };
        let is_whole = point.len() == length && (length == 32 || point.first() == Some(&4));
        if !is_whole {
            return Err(KeyError::new("the public key is not a whole point of its curve"));
        }
        Ok(Key::Curve(UnparsedPublicKey::new(verification, point.to_vec())))
    }

    fn pem_key(&self, alg: Algorithm, text: &[u8]) -> Result<Key, KeyError> {
        let blocks: Result<Vec<Pem>, _> = Pem::iter_from_buffer(text).collect();
        let blocks = blocks.map_err(|_| KeyError::new("the PEM is damaged"))?;
        let [block] = blocks.as_slice() else {
            return Err(KeyError::new("there is more than one key in PEM: put them into a JWKS"));
        };
        let damaged = || KeyError::new("the key in PEM is damaged");
        match block.label.as_str() {
            label if label.ends_with("PRIVATE KEY") => {
                Err(KeyError::new("this is a private key, and a verifier needs the public one"))
            }
            "RSA PUBLIC KEY" => {
                let (_, key) = RSAPublicKey::from_der(&block.contents).map_err(|_| damaged())?;
                self.rsa(alg, key.modulus, key.exponent)
            }
            "PUBLIC KEY" => {
                let (_, info) = SubjectPublicKeyInfo::from_der(&block.contents).map_err(|_| damaged())?;
                self.public_key(alg, &info)
            }
            "CERTIFICATE" => {
                let certificate = block.parse_x509().map_err(|_| damaged())?;
                self.public_key(alg, certificate.public_key())
            }
            _ => Err(KeyError::new("the PEM holds no public key")),
        }
    }

    fn public_key(&self, alg: Algorithm, info: &SubjectPublicKeyInfo<'_>) -> Result<Key, KeyError> {
        if info.algorithm.algorithm == OID_SIG_ED25519 {
            return self.point(alg, &EllipticCurve::Ed25519, &info.subject_public_key.data);
        }
        match info.parsed() {
            Ok(PublicKey::RSA(key)) => self.rsa(alg, key.modulus, key.exponent),
            Ok(PublicKey::EC(key)) => {
                let named = info.algorithm.parameters.as_ref().and_then(|parameters| parameters.as_oid().ok());
                let curve = match named {
                    Some(oid) if oid == OID_EC_P256 => EllipticCurve::P256,
                    Some(oid) if oid == OID_NIST_EC_P384 => EllipticCurve::P384,
                    _ => return Err(wrong_kind(alg)),
                };
                self.point(alg, &curve, key.data())
            }
            _ => Err(wrong_kind(alg)),
        }
    }

    /// The keys of a set that are meant for this algorithm. Sets hold keys for other uses too.
    fn key_set(&self, alg: Algorithm, set: &JwkSet) -> Result<Keys, KeyError> {
        let mut keys = Vec::new();
        for jwk in set.keys.iter().filter(|jwk| self.is_for(alg, jwk)) {
            let kid = jwk.common.key_id.clone();
            let key = self.jwk(alg, jwk).map_err(|error| {
                let named =
                    kid.as_deref().map_or_else(|| "a key without kid".to_owned(), |kid| format!("the key {kid:?}"));
                KeyError::new(format!("{named} of the JWKS: {}", error.message))
            })?;
            keys.push((kid, key));
        }
        if keys.is_empty() {
            return Err(KeyError::new(format!("the JWKS holds no key for {alg:?}")));
        }
        Ok(Keys::Set(keys))
    }

    /// Whether a key of a set is meant for checking signatures of this algorithm.
    fn is_for(&self, alg: Algorithm, jwk: &Jwk) -> bool {
        let common = &jwk.common;
        let kind = match (self, &jwk.algorithm) {
            (Self::Hmac(..), AlgorithmParameters::OctetKey(_)) | (Self::Rsa(_), AlgorithmParameters::RSA(_)) => true,
            (Self::Curve(_, own), AlgorithmParameters::EllipticCurve(key)) => *own == key.curve,
            (Self::Curve(_, own), AlgorithmParameters::OctetKeyPair(key)) => *own == key.curve,
            _ => false,
        };
        kind && common.key_algorithm.is_none_or(|own| own == alg.into())
            && common.public_key_use.as_ref().is_none_or(|own| *own == PublicKeyUse::Signature)
            && common.key_operations.as_ref().is_none_or(|own| own.contains(&KeyOperations::Verify))
    }

    fn jwk(&self, alg: Algorithm, jwk: &Jwk) -> Result<Key, KeyError> {
        let key = DecodingKey::from_jwk(jwk).map_err(|_| KeyError::new("it is damaged"))?;
        match (self, key.kind()) {
            (_, DecodingKeyKind::RsaModulusExponent { n, e }) => self.rsa(alg, n, e),
            (Self::Curve(_, curve), DecodingKeyKind::SecretOrDer(point)) => self.point(alg, curve, point),
            (_, DecodingKeyKind::SecretOrDer(secret)) => self.secret(alg, secret),
        }
    }
}

fn point_length(curve: &EllipticCurve) -> usize {
    match curve {
        EllipticCurve::P256 => 65,
        EllipticCurve::P384 => 97,
        _ => 32,
    }
}

fn wrong_kind(alg: Algorithm) -> KeyError {
    KeyError::new(format!("this is a key of another kind, and tokens of {alg:?} are not checked with it"))
}

/// A number without leading zeros, as `ring` reads it.
fn without_zeros(number: &[u8]) -> &[u8] {
    let zeros = number.iter().take_while(|byte| **byte == 0).count();
    number.get(zeros..).unwrap_or_default()
}

/// A text without the line end that editors put there.
fn without_line_end(text: &[u8]) -> &[u8] {
    let text = text.strip_suffix(b"\n").unwrap_or(text);
    text.strip_suffix(b"\r").unwrap_or(text)
}
