//! Signs tokens for tests, with keys that nothing else uses.

use base64::Engine as _;
use base64::engine::general_purpose::{STANDARD, URL_SAFE_NO_PAD};
use ring::hmac;
use ring::rand::SystemRandom;
use ring::signature::{
    ECDSA_P256_SHA256_FIXED_SIGNING, ECDSA_P384_SHA384_FIXED_SIGNING, EcdsaKeyPair, Ed25519KeyPair, KeyPair as _,
    RSA_PKCS1_SHA256, RSA_PKCS1_SHA384, RSA_PKCS1_SHA512, RsaKeyPair,
};
use serde_json::{Value, json};

/// A secret that every HS algorithm takes.
pub(crate) const SECRET: &str = "0123456789abcdef0123456789abcdef0123456789abcdef0123456789abcdef";

/// A token of these claims, signed by the test's key for the algorithm.
pub(crate) fn token(alg: &str, claims: &Value) -> String {
    signed(&json!({ "typ": "JWT", "alg": alg }), claims, alg)
}

/// A token with this header. It is signed as `alg` says, whatever the header says.
pub(crate) fn signed(header: &Value, claims: &Value, alg: &str) -> String {
    of_texts(&header.to_string(), &claims.to_string(), |message| signature(alg, message))
}

/// A token of a header and claims as they are written.
pub(crate) fn of_texts(header: &str, claims: &str, sign: impl FnOnce(&[u8]) -> Vec<u8>) -> String {
    let message = format!("{}.{}", URL_SAFE_NO_PAD.encode(header), URL_SAFE_NO_PAD.encode(claims));
    let signature = URL_SAFE_NO_PAD.encode(sign(message.as_bytes()));
    format!("{message}.{signature}")
}

/// The signature of the test's key for an algorithm.
pub(crate) fn signature(alg: &str, message: &[u8]) -> Vec<u8> {
    match alg {
        "HS256" => hmac_of(hmac::HMAC_SHA256, SECRET.as_bytes(), message),
        "HS384" => hmac_of(hmac::HMAC_SHA384, SECRET.as_bytes(), message),
        "HS512" => hmac_of(hmac::HMAC_SHA512, SECRET.as_bytes(), message),
        "RS256" | "RS384" | "RS512" => {
            let pair = RsaKeyPair::from_pkcs8(&der(include_str!("pem/rsa.pem"))).unwrap();
            let padding: &dyn ring::signature::RsaEncoding = match alg {
                "RS256" => &RSA_PKCS1_SHA256,
                "RS384" => &RSA_PKCS1_SHA384,
                _ => &RSA_PKCS1_SHA512,
            };
            let mut signature = vec![0; pair.public().modulus_len()];
            pair.sign(padding, &SystemRandom::new(), message, &mut signature).unwrap();
            signature
        }
        "ES256" | "ES384" => ecdsa(alg).sign(&SystemRandom::new(), message).unwrap().as_ref().to_vec(),
        "EdDSA" => ed25519().sign(message).as_ref().to_vec(),
        other => panic!("no key for {other}"),
    }
}

pub(crate) fn hmac_of(algorithm: hmac::Algorithm, key: &[u8], message: &[u8]) -> Vec<u8> {
    hmac::sign(&hmac::Key::new(algorithm, key), message).as_ref().to_vec()
}

/// The test's key for an algorithm as a JWK.
pub(crate) fn jwk(alg: &str, kid: &str) -> Value {
    let encode = |bytes: &[u8]| URL_SAFE_NO_PAD.encode(bytes);
    let mut jwk = match alg {
        "HS256" => json!({ "kty": "oct", "k": encode(SECRET.as_bytes()) }),
        "RS256" => {
            let pair = RsaKeyPair::from_pkcs8(&der(include_str!("pem/rsa.pem"))).unwrap();
            let public: ring::rsa::PublicKeyComponents<Vec<u8>> = pair.public().into();
            json!({ "kty": "RSA", "n": encode(&public.n), "e": encode(&public.e) })
        }
        "ES256" | "ES384" => {
            let pair = ecdsa(alg);
            let point = &pair.public_key().as_ref()[1..];
            let (x, y) = point.split_at(point.len() / 2);
            let curve = if alg == "ES256" { "P-256" } else { "P-384" };
            json!({ "kty": "EC", "crv": curve, "x": encode(x), "y": encode(y) })
        }
        "EdDSA" => json!({ "kty": "OKP", "crv": "Ed25519", "x": encode(ed25519().public_key().as_ref()) }),
        other => panic!("no key for {other}"),
    };
    jwk["kid"] = kid.into();
    jwk["alg"] = alg.into();
    jwk["use"] = "sig".into();
    jwk
}

/// A key for ES256 that belongs to nobody, as a JWK, and a token that it signed.
pub(crate) fn stranger(kid: &str, claims: &Value) -> (Value, String) {
    let random = SystemRandom::new();
    let document = EcdsaKeyPair::generate_pkcs8(&ECDSA_P256_SHA256_FIXED_SIGNING, &random).unwrap();
    let pair = EcdsaKeyPair::from_pkcs8(&ECDSA_P256_SHA256_FIXED_SIGNING, document.as_ref(), &random).unwrap();
    let mut key = jwk("ES256", kid);
    let (x, y) = pair.public_key().as_ref()[1..].split_at(32);
    (key["x"], key["y"]) = (URL_SAFE_NO_PAD.encode(x).into(), URL_SAFE_NO_PAD.encode(y).into());
    let header = json!({ "alg": "ES256", "kid": kid });
    let sign = |message: &[u8]| pair.sign(&random, message).unwrap().as_ref().to_vec();
    (key, of_texts(&header.to_string(), &claims.to_string(), sign))
}

fn ecdsa(alg: &str) -> EcdsaKeyPair {
    let (kind, pem) = match alg {
        "ES256" => (&ECDSA_P256_SHA256_FIXED_SIGNING, include_str!("pem/p256.pem")),
        _ => (&ECDSA_P384_SHA384_FIXED_SIGNING, include_str!("pem/p384.pem")),
    };
    EcdsaKeyPair::from_pkcs8(kind, &der(pem), &SystemRandom::new()).unwrap()
}

fn ed25519() -> Ed25519KeyPair {
    Ed25519KeyPair::from_pkcs8_maybe_unchecked(&der(include_str!("pem/ed25519.pem"))).unwrap()
}

fn der(pem: &str) -> Vec<u8> {
    let lines: String = pem.lines().filter(|line| !line.starts_with('-')).collect();
    STANDARD.decode(lines).unwrap()
}
