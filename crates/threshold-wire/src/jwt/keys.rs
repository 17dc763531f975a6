//! The keys that signatures are verified with, from a shared secret, a public key in PEM or a JWKS.

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

use super::KeyFault;

/// The keys of one algorithm.
pub(super) enum Keys {
    /// One key, whatever id a token names.
    One(Key),
    /// The keys of a JWKS.
    Set {
        /// The usable keys by their ids.
        keys: Vec<(Option<String>, Key)>,
        /// Why the others are not used.
        skipped: Vec<KeyFault>,
    },
}

/// One key, with the parameters of its algorithm.
pub(super) enum Key {
    Hmac(hmac::Key),
    Rsa(&'static RsaParameters, RsaPublicKeyComponents<Vec<u8>>),
    Curve(UnparsedPublicKey<Vec<u8>>),
}

/// The parameters of an algorithm.
enum Kind {
    Hmac(hmac::Algorithm, &'static digest::Algorithm),
    Rsa(&'static RsaParameters),
    Curve(&'static dyn VerificationAlgorithm, EllipticCurve),
}

/// Returns whether a text looks like a public key, or like JSON or HTML: an error page, say, that was stored in place of the
/// keys.
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
    /// Parses keys: for HS algorithms the secret itself or a JWKS, for the others a public key in PEM or a JWKS.
    pub(super) fn parse(alg: Algorithm, text: &[u8]) -> Result<Self, KeyFault> {
        let kind = Kind::of(alg).ok_or(KeyFault::Algorithm)?;
        // Anywhere in the text, because a PEM file may begin with other lines.
        let is_pem = text.windows(11).any(|window| window == b"-----BEGIN ");
        // A public key is no secret: as one, it would let everyone sign tokens.
        if is_pem && matches!(kind, Kind::Hmac(..)) {
            return Err(KeyFault::PemAsSecret(name(alg)));
        }
        if is_pem {
            return kind.pem_key(alg, text).map(Self::One);
        }
        let is_object = text.trim_ascii_start().first() == Some(&b'{');
        match (kind, serde_json::from_slice::<JwkSet>(text)) {
            (kind, Ok(set)) => kind.key_set(alg, &set),
            (Kind::Hmac(..), Err(_)) if is_object && serde_json::from_slice::<serde::de::IgnoredAny>(text).is_ok() => {
                Err(KeyFault::OtherJson)
            }
            (Kind::Hmac(..), Err(_)) if is_public(text) => Err(KeyFault::PublicAsSecret),
            // Most editors end a file with a line break, which is not part of the secret.
            (kind @ Kind::Hmac(..), Err(_)) => kind.secret(alg, without_line_end(text)).map(Self::One),
            (_, Err(_)) => Err(KeyFault::NoPublicKey),
        }
    }

    /// Returns the key that a token names, or the only one there is.
    pub(super) fn find(&self, kid: Option<&str>) -> Option<&Key> {
        let keys = match self {
            Self::One(key) => return Some(key),
            Self::Set { keys, .. } => keys,
        };
        let mut named = keys.iter().filter(|(own, _)| kid.is_none() || own.as_deref() == kid).map(|(_, key)| key);
        let only = named.next();
        // If two keys match, either would be a guess.
        if named.next().is_none() { only } else { None }
    }

    /// Returns why keys of a JWKS are not used.
    pub(super) fn skipped(&self) -> Vec<String> {
        match self {
            Self::One(_) => Vec::new(),
            Self::Set { skipped, .. } => skipped.iter().map(ToString::to_string).collect(),
        }
    }

    /// Returns the ids that several keys have.
    pub(super) fn ambiguous_kids(&self) -> Vec<String> {
        let Self::Set { keys, .. } = self else { return Vec::new() };
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

    /// Accepts a shared secret that is no shorter than the hash (RFC 7518, 3.2).
    fn secret(&self, alg: Algorithm, secret: &[u8]) -> Result<Key, KeyFault> {
        match self {
            // RFC 7518, 3.2: the key must be at least as long as the hash.
            Self::Hmac(algorithm, digest) if secret.len() >= digest.output_len() => {
                Ok(Key::Hmac(hmac::Key::new(*algorithm, secret)))
            }
            Self::Hmac(_, digest) => Err(KeyFault::TooShort { alg: name(alg), least: digest.output_len() }),
            Self::Rsa(_) | Self::Curve(..) => Err(wrong_kind(alg)),
        }
    }

    /// Accepts an RSA key of a length that `ring` verifies signatures with.
    fn rsa(&self, alg: Algorithm, modulus: &[u8], exponent: &[u8]) -> Result<Key, KeyFault> {
        let Self::Rsa(parameters) = self else { return Err(wrong_kind(alg)) };
        // DER puts a zero before a number whose first bit is set, and `ring` rejects it.
        let (n, e) = (without_zeros(modulus), without_zeros(exponent));
        let bits =
            n.len().saturating_mul(8).saturating_sub(n.first().map_or(0, |first| first.leading_zeros() as usize));
        if !(2048..=8192).contains(&bits) {
            return Err(KeyFault::RsaBits(bits));
        }
        Ok(Key::Rsa(parameters, RsaPublicKeyComponents { n: n.to_vec(), e: e.to_vec() }))
    }

    /// Accepts an uncompressed point of this curve.
    fn point(&self, alg: Algorithm, curve: &EllipticCurve, point: &[u8]) -> Result<Key, KeyFault> {
        let (verification, length) = match self {
            Self::Curve(verification, own) if own == curve => (*verification, point_length(own)),
            _ => return Err(wrong_kind(alg)),
        };
        // 4 marks an uncompressed point, the only form that `ring` accepts. A key of Ed25519 has no such mark.
        let is_whole = point.len() == length && (length == 32 || point.first() == Some(&4));
        if !is_whole {
            return Err(KeyFault::NotAPoint);
        }
        Ok(Key::Curve(UnparsedPublicKey::new(verification, point.to_vec())))
    }

    fn pem_key(&self, alg: Algorithm, text: &[u8]) -> Result<Key, KeyFault> {
        let blocks: Result<Vec<Pem>, _> = Pem::iter_from_buffer(text).collect();
        let blocks = blocks.map_err(|_| KeyFault::DamagedPem)?;
        // It could not be told which of several keys is meant.
        let [block] = blocks.as_slice() else {
            return Err(KeyFault::SeveralPems);
        };
        let damaged = || KeyFault::DamagedPem;
        match block.label.as_str() {
            label if label.ends_with("PRIVATE KEY") => Err(KeyFault::PrivateKey),
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
            _ => Err(KeyFault::OtherPem),
        }
    }

    fn public_key(&self, alg: Algorithm, info: &SubjectPublicKeyInfo<'_>) -> Result<Key, KeyFault> {
        // `parsed` does not know this kind of key.
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

    /// Returns the keys of a JWKS for this algorithm. A set also holds keys for other uses. A key that cannot be used is
    /// skipped, so that one weak key of an issuer does not lock out the users of the others.
    fn key_set(&self, alg: Algorithm, set: &JwkSet) -> Result<Keys, KeyFault> {
        let (mut keys, mut skipped) = (Vec::new(), Vec::new());
        // A set often has keys for encryption, and for other algorithms.
        for jwk in set.keys.iter().filter(|jwk| self.is_for(alg, jwk)) {
            let kid = jwk.common.key_id.clone();
            match self.jwk(alg, jwk) {
                Ok(key) => keys.push((kid, key)),
                // A key that cannot be used must not take the others out of use.
                Err(fault) => skipped.push(KeyFault::InSet { kid, fault: Box::new(fault) }),
            }
        }
        if keys.is_empty() {
            let fault = skipped.into_iter().next();
            return Err(fault.unwrap_or_else(|| KeyFault::NoneInSet(name(alg))));
        }
        Ok(Keys::Set { keys, skipped })
    }

    /// Returns whether a key of a set is meant for verifying signatures of this algorithm.
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

    fn jwk(&self, alg: Algorithm, jwk: &Jwk) -> Result<Key, KeyFault> {
        let key = DecodingKey::from_jwk(jwk).map_err(|_| KeyFault::DamagedJwk)?;
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

fn wrong_kind(alg: Algorithm) -> KeyFault {
    KeyFault::OtherKind(name(alg))
}

/// Returns the name of an algorithm as a policy writes it.
fn name(alg: Algorithm) -> String {
    format!("{alg:?}")
}

/// Removes the leading zeros of a number, which `ring` does not accept.
fn without_zeros(number: &[u8]) -> &[u8] {
    let zeros = number.iter().take_while(|byte| **byte == 0).count();
    number.get(zeros..).unwrap_or_default()
}

/// Removes the line end that editors add.
fn without_line_end(text: &[u8]) -> &[u8] {
    let text = text.strip_suffix(b"\n").unwrap_or(text);
    text.strip_suffix(b"\r").unwrap_or(text)
}
