//! Keys: what each algorithm takes, and what is refused before any token comes.

use serde_json::json;
use threshold_core::policy::{Jwt, TokenError, TokenVerifier as _};
use threshold_limiter::Policy;
use threshold_wire::jwt::{self, KeyFault, Verifier};

use crate::sign::{SECRET, jwk, signed, token};
use crate::{NOW, START};

fn settings(alg: &str) -> Jwt {
    Jwt { alg: alg.into(), key: None, key_file: None, iss: None, aud: None }
}

/// Whether a key is taken, and else what the error must say. No error says anything of the key.
#[track_caller]
fn check(alg: &str, key: &str, expect: Result<(), &str>) {
    let made = Verifier::with_key(&settings(alg), key.as_bytes());
    match (made, expect) {
        (Ok(verifier), Ok(())) => {
            let shown = format!("{verifier:?}");
            assert!(shown.contains(alg) && !shown.contains(key), "{shown}");
        }
        (Err(error), Err(expect)) => {
            let text = error.to_string();
            assert!(text.contains(expect), "{alg}: {text}");
            assert!(key.is_empty() || key.len() < 8 || !text.contains(key), "{text}");
        }
        (Ok(_), Err(expect)) => panic!("{alg} takes {key:?}, and not: {expect}"),
        (Err(error), Ok(())) => panic!("{alg}: {error}"),
    }
}

#[test]
fn a_shared_secret_is_no_shorter_than_its_hash() {
    for (alg, least) in [("HS256", 32), ("HS384", 48), ("HS512", 64)] {
        check(alg, &SECRET[..least], Ok(()));
        check(alg, &SECRET[1..least], Err(&format!("at least {least} bytes")));
        // The line end of an editor is none of it.
        check(alg, &format!("{}\n", &SECRET[1..least]), Err(&format!("at least {least} bytes")));
        check(alg, "", Err("at least"));
    }
    let claims = json!({ "sub": "u1", "exp": NOW });
    for end in ["", "\n", "\r\n"] {
        let verifier = Verifier::with_key(&settings("HS256"), format!("{SECRET}{end}").as_bytes()).unwrap();
        verifier.verify(&token("HS256", &claims), START).unwrap();
    }
    // A secret may begin like JSON, and JSON that is no set of keys is a mistake.
    check("HS256", &format!("{{{SECRET}"), Ok(()));
    check("HS256", &json!({ "kty": "oct", "k": SECRET }).to_string(), Err("no JWKS"));
}

/// Were it taken, everybody who has the public key could sign.
#[test]
fn a_public_key_is_no_shared_secret() {
    for pem in [
        include_str!("pem/rsa_public.pem"),
        include_str!("pem/rsa_pkcs1_public.pem"),
        include_str!("pem/p256_public.pem"),
        include_str!("pem/rsa_certificate.pem"),
        include_str!("pem/rsa.pem"),
    ] {
        for alg in ["HS256", "HS384", "HS512"] {
            check(alg, pem, Err("shared secret"));
        }
    }
    check("HS256", &json!({ "keys": [jwk("RS256", "1")] }).to_string(), Err("no key for HS256"));
    // The same without its first and last line, and in other spellings.
    let pem = include_str!("pem/p256_public.pem");
    let bare: String = pem.lines().filter(|line| !line.starts_with('-')).collect();
    let set = json!({ "keys": [jwk("RS256", "1")] }).to_string();
    for text in [
        bare.as_str(),
        &pem.to_lowercase(),
        &format!("\u{feff}{set}"),
        &set[..set.len() - 9],
        &format!("[{set}]"),
        "ssh-rsa AAAAB3NzaC1yc2EAAAADAQABAAABAQDB ada@example.org",
        "ecdsa-sha2-nistp256 AAAAE2VjZHNhLXNoYTItbmlzdHAyNTYAAAAIbmlzdHAyNTY ada@example.org",
        "---- BEGIN SSH2 PUBLIC KEY ----\nAAAAB3NzaC1yc2EAAAADAQABAAABAQDB\n---- END SSH2 PUBLIC KEY ----",
        "<html><head><title>502 Bad Gateway</title></head><body></body></html>",
    ] {
        check("HS256", text, Err("not a shared secret"));
    }
}

#[test]
fn a_public_key_fits_its_algorithm() {
    let rsa = [
        include_str!("pem/rsa_public.pem"),
        include_str!("pem/rsa_pkcs1_public.pem"),
        include_str!("pem/rsa_certificate.pem"),
    ];
    let (p256, p384) = (include_str!("pem/p256_public.pem"), include_str!("pem/p384_public.pem"));
    let ed25519 = include_str!("pem/ed25519_public.pem");
    let claims = json!({ "sub": "u1", "exp": NOW });
    for pem in rsa {
        for alg in ["RS256", "RS384", "RS512"] {
            check(alg, pem, Ok(()));
            let verifier = Verifier::with_key(&settings(alg), pem.as_bytes()).unwrap();
            verifier.verify(&token(alg, &claims), START).unwrap();
        }
        for alg in ["ES256", "ES384", "EdDSA"] {
            check(alg, pem, Err("another kind"));
        }
    }
    for (pem, own) in [(p256, "ES256"), (p384, "ES384"), (ed25519, "EdDSA")] {
        for alg in ["RS256", "ES256", "ES384", "EdDSA"] {
            check(alg, pem, if alg == own { Ok(()) } else { Err("another kind") });
        }
    }
    check("RS256", include_str!("pem/rsa_1024_public.pem"), Err("1024 bits"));
    for private in [include_str!("pem/rsa.pem"), include_str!("pem/p256.pem"), include_str!("pem/ed25519.pem")] {
        check("RS256", private, Err("private key"));
    }
    check("RS256", SECRET, Err("neither a public key in PEM nor a JWKS"));
    check("RS256", "", Err("neither a public key in PEM nor a JWKS"));
    check("RS256", &format!("{}{}", rsa[0], p256), Err("more than one key"));
    check("RS256", &rsa[0].replace("MII", "XII"), Err("damaged"));
    check("PS256", rsa[0], Err("not supported"));
    check("none", SECRET, Err("not supported"));
    check("", SECRET, Err("not supported"));
}

#[test]
fn a_set_holds_a_key_for_the_algorithm() {
    let set = |keys: &[serde_json::Value]| json!({ "keys": keys }).to_string();
    for alg in ["HS256", "RS256", "ES256", "ES384", "EdDSA"] {
        check(alg, &set(&[jwk(alg, "1")]), Ok(()));
        let verifier = Verifier::with_key(&settings(alg), set(&[jwk(alg, "1")]).as_bytes()).unwrap();
        verifier.verify(&token(alg, &json!({ "exp": NOW })), START).unwrap();
        for other in ["HS256", "RS256", "ES256", "ES384", "EdDSA"].iter().filter(|other| **other != alg) {
            check(alg, &set(&[jwk(other, "1")]), Err("no key for"));
        }
        check(alg, &set(&[]), Err("no key for"));
        // Meant for something else.
        for (name, value) in [("use", json!("enc")), ("alg", json!("RS512")), ("key_ops", json!(["sign"]))] {
            let mut other = jwk(alg, "1");
            other[name] = value;
            check(alg, &set(&[other]), Err("no key for"));
        }
        let mut bare = jwk(alg, "1");
        for name in ["use", "alg", "kid"] {
            bare.as_object_mut().unwrap().remove(name);
        }
        check(alg, &set(&[bare]), Ok(()));
    }
    let mut short = jwk("HS256", "weak");
    short["k"] = "AAAA".into();
    check("HS256", &set(&[short]), Err("\"weak\" of the JWKS: the secret is too short"));
    let mut damaged = jwk("ES256", "cut");
    damaged["y"] = "AAAA".into();
    check("ES256", &set(&[damaged]), Err("\"cut\" of the JWKS"));
    // Keys of unknown types are ignored.
    check("ES256", &set(&[jwk("ES256", "1"), json!({ "kty": "AKP", "pub": "AAAA" })]), Ok(()));
}

/// One key that cannot be used refused the whole set, and with it every user of the issuer's other keys.
///
/// Fails where `key_set` returns the first fault.
#[test]
fn a_weak_key_of_a_set_is_skipped() {
    let mut weak = jwk("HS256", "weak");
    weak["k"] = "AAAA".into();
    let set = json!({ "keys": [weak, jwk("HS256", "1")] }).to_string();
    let verifier = Verifier::with_key(&settings("HS256"), set.as_bytes()).unwrap();
    assert_eq!(
        verifier.skipped_keys(),
        ["the key \"weak\" of the JWKS: the secret is too short: HS256 takes at least 32 bytes"]
    );
    let claims = json!({ "exp": NOW });
    verifier.verify(&token("HS256", &claims), START).unwrap();
    let named = signed(&json!({ "alg": "HS256", "kid": "weak" }), &claims, "HS256");
    assert_eq!(verifier.verify(&named, START).unwrap_err(), TokenError::Key);
}

/// The message names the setting and not the file, and the cause is the source.
#[test]
fn an_unreadable_file_has_a_cause() {
    let error = jwt::read_key_file(std::path::Path::new("/nonexistent/threshold.pem")).unwrap_err();
    assert_eq!(error.to_string(), "[identity.jwt] key_file: the file cannot be read");
    assert!(matches!(error.fault(), KeyFault::Unreadable(_)));
    let source = std::error::Error::source(&error).and_then(|source| source.downcast_ref::<std::io::Error>());
    assert_eq!(source.map(std::io::Error::kind), Some(std::io::ErrorKind::NotFound));
}

/// A file that vanishes with the test.
struct Scratch(std::path::PathBuf);

impl Drop for Scratch {
    fn drop(&mut self) {
        let _ = std::fs::remove_file(&self.0);
    }
}

/// Opening a pipe waits for somebody who writes: a reload never ended.
#[cfg(unix)]
#[test]
fn a_named_pipe_is_no_file_of_keys() {
    let pipe = Scratch(std::env::temp_dir().join(format!("threshold-jwt-{}.pipe", std::process::id())));
    assert!(std::process::Command::new("mkfifo").arg(&pipe.0).status().unwrap().success());
    let error = jwt::read_key_file(&pipe.0).unwrap_err();
    let cause = std::error::Error::source(error.fault()).unwrap().to_string();
    assert!(cause.contains("a named pipe and not a regular file"), "{cause}");
}

#[test]
fn a_file_is_read_again_when_asked_and_a_bad_one_changes_nothing() {
    let file = Scratch(std::env::temp_dir().join(format!("threshold-jwt-{}.jwks", std::process::id())));
    let settings = Jwt { key_file: Some(file.0.to_str().unwrap().into()), ..settings("ES256") };
    let error = Verifier::new(&settings).unwrap_err().to_string();
    assert!(error.contains("key_file: the file cannot be read"), "{error}");
    // A secret that was written there by mistake would be told.
    assert!(!error.contains(file.0.to_str().unwrap()), "{error}");

    let write = |keys: serde_json::Value| std::fs::write(&file.0, json!({ "keys": keys }).to_string()).unwrap();
    let own = token("ES256", &json!({ "sub": "u1", "exp": NOW }));
    let (other, foreign) = crate::sign::stranger("2", &json!({ "sub": "u1", "exp": NOW }));
    write(json!([jwk("ES256", "1")]));
    let verifier = Verifier::new(&settings).unwrap();
    assert_eq!(verifier.key_file(), Some(file.0.as_path()));
    let refused = |token: &str| verifier.verify(token, START).err();
    assert_eq!((refused(&own), refused(&foreign)), (None, Some(TokenError::Key)));
    write(json!([other]));
    assert_eq!((refused(&own), refused(&foreign)), (None, Some(TokenError::Key)));
    verifier.reload().unwrap();
    assert_eq!((refused(&own), refused(&foreign)), (Some(TokenError::Signature), None));
    for bad in ["", "{", "{\"keys\":[]}"] {
        std::fs::write(&file.0, bad).unwrap();
        verifier.reload().unwrap_err();
        assert_eq!((refused(&own), refused(&foreign)), (Some(TokenError::Signature), None), "{bad}");
    }
    std::fs::write(&file.0, vec![b' '; jwt::MAX_KEY_FILE + 1]).unwrap();
    assert!(verifier.reload().unwrap_err().to_string().contains("larger"), "a file is only so large");
}

#[test]
fn a_policy_is_given_its_verifier_or_an_error() {
    let policy = |alg: &str, key: &str| {
        let text = format!("[identity]\nuser = \"claim:sub\"\n[identity.jwt]\nalg = \"{alg}\"\n{key}\n");
        Policy::parse(&text, &|_| None).unwrap()
    };
    let plain = Policy::parse("", &|_| None).unwrap();
    assert!(!plain.lacks_token_verifier());
    assert!(jwt::attach(plain).unwrap().1.is_none());
    let whole = policy("HS256", &format!("key = \"{SECRET}\""));
    assert!(whole.lacks_token_verifier());
    let (whole, verifier) = jwt::attach(whole).unwrap();
    assert!(!whole.lacks_token_verifier() && verifier.is_some_and(|verifier| verifier.key_file().is_none()));
    jwt::attach(policy("RS256", "key_file = \"/nonexistent/threshold.pem\"")).unwrap_err();
}
