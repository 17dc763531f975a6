//! One token at a time: every attack gives no identity, and says why.

use serde_json::{Value, json};
use threshold_core::policy::{Claims, Jwt, MAX_TOKEN, TokenError, TokenVerifier as _};
use threshold_limiter::{Span, Timestamp};
use threshold_wire::jwt::Verifier;

use crate::sign::{SECRET, hmac_of, jwk, of_texts, signature, signed, stranger, token};
use crate::{NOW, START};

fn settings(alg: &str) -> Jwt {
    Jwt { alg: alg.into(), key: None, key_file: None, iss: None, aud: None }
}

fn shared() -> Verifier {
    Verifier::with_key(&settings("HS256"), SECRET.as_bytes()).unwrap()
}

fn with_set(keys: &[Value]) -> Verifier {
    Verifier::with_key(&settings("ES256"), json!({ "keys": keys }).to_string().as_bytes()).unwrap()
}

fn claims() -> Value {
    json!({ "sub": "u1", "exp": NOW + 300 })
}

/// The claims with one of them changed; `null` takes it out.
fn but(name: &str, value: Value) -> Value {
    let mut claims = claims();
    if value.is_null() {
        claims.as_object_mut().unwrap().remove(name);
    } else {
        claims[name] = value;
    }
    claims
}

#[track_caller]
fn check(verifier: &Verifier, token: &str, expect: Result<&str, TokenError>) {
    let user = verifier.verify(token, START).map(|claims| claims.get("sub").map(str::to_owned));
    assert_eq!(user, expect.map(|user| Some(user.to_owned())), "{token}");
}

fn of_alg(alg: &str) -> Verifier {
    let key = match alg {
        "HS256" | "HS384" | "HS512" => SECRET,
        "RS256" | "RS384" | "RS512" => include_str!("pem/rsa_public.pem"),
        "ES256" => include_str!("pem/p256_public.pem"),
        "ES384" => include_str!("pem/p384_public.pem"),
        _ => include_str!("pem/ed25519_public.pem"),
    };
    Verifier::with_key(&settings(alg), key.as_bytes()).unwrap()
}

#[test]
fn a_token_of_each_algorithm_verifies_with_its_own_key_and_no_other() {
    let all = ["HS256", "HS384", "HS512", "RS256", "RS384", "RS512", "ES256", "ES384", "EdDSA"];
    for alg in all {
        let verifier = of_alg(alg);
        for other in all {
            let expect = if alg == other { Ok("u1") } else { Err(TokenError::Algorithm) };
            check(&verifier, &token(other, &claims()), expect);
            // The right name, signed otherwise.
            if alg != other {
                check(&verifier, &signed(&json!({ "alg": alg }), &claims(), other), Err(TokenError::Signature));
            }
        }
    }
}

/// An algorithm that no key is for was counted as `malformed`, also `none`.
///
/// Fails without `header_fault` in `verify`.
#[test]
fn a_token_without_a_signature_names_nobody() {
    for alg in ["none", "None", "NONE", "nOnE", ""] {
        let header = json!({ "alg": alg }).to_string();
        let unsigned = of_texts(&header, &claims().to_string(), |_| Vec::new());
        check(&shared(), &unsigned, Err(TokenError::Algorithm));
        check(&shared(), &signed(&json!({ "alg": alg }), &claims(), "HS256"), Err(TokenError::Algorithm));
    }
    let empty = of_texts(r#"{"alg":"HS256"}"#, &claims().to_string(), |_| Vec::new());
    check(&shared(), &empty, Err(TokenError::Signature));
    check(&shared(), &signed(&json!({ "typ": "JWT" }), &claims(), "HS256"), Err(TokenError::Malformed));
}

/// The public key is no secret: were it taken for one, everybody could sign.
#[test]
fn a_token_signed_with_the_public_key_as_a_secret_names_nobody() {
    let public = include_str!("pem/rsa_public.pem");
    let sign = |message: &[u8]| hmac_of(ring::hmac::HMAC_SHA256, public.as_bytes(), message);
    check(&of_alg("RS256"), &of_texts(r#"{"alg":"HS256"}"#, &claims().to_string(), sign), Err(TokenError::Algorithm));
    check(&of_alg("RS256"), &of_texts(r#"{"alg":"RS256"}"#, &claims().to_string(), sign), Err(TokenError::Signature));
}

#[test]
fn a_token_of_another_key_or_with_other_claims_names_nobody() {
    let sign = |message: &[u8]| hmac_of(ring::hmac::HMAC_SHA256, &[b'x'; 32], message);
    check(&shared(), &of_texts(r#"{"alg":"HS256"}"#, &claims().to_string(), sign), Err(TokenError::Signature));
    check(&of_alg("ES256"), &stranger("1", &claims()).1, Err(TokenError::Signature));
    let (own, other) = (token("HS256", &claims()), token("HS256", &but("sub", json!("u2"))));
    let (message, _) = own.rsplit_once('.').unwrap();
    let (_, signature) = other.rsplit_once('.').unwrap();
    check(&shared(), &format!("{message}.{signature}"), Err(TokenError::Signature));
}

#[test]
fn what_is_no_signed_jwt_names_nobody() {
    let whole = token("HS256", &claims());
    let parts: Vec<&str> = whole.split('.').collect();
    for text in ["", ".", "..", "...", "a.b.c", "x", parts[0], &whole[1..], &format!("{whole}."), &format!(".{whole}")]
    {
        check(&shared(), text, Err(TokenError::Malformed));
    }
    check(&shared(), &format!("{whole}="), Err(TokenError::Malformed));
    check(&shared(), &format!("{whole}, Bearer {whole}"), Err(TokenError::Malformed));
    let sign = |message: &[u8]| signature("HS256", message);
    for payload in ["", "[]", "7", "\"u1\"", "{\"sub\":\"u1\"", "null"] {
        check(&shared(), &of_texts(r#"{"alg":"HS256"}"#, payload, sign), Err(TokenError::Malformed));
    }
    for header in ["", "[]", "{}", r#"{"alg":256}"#, r#"{"alg":"HS256","crit":["b64"],"b64":false}"#] {
        check(&shared(), &of_texts(header, &claims().to_string(), sign), Err(TokenError::Malformed));
    }
}

#[test]
fn a_header_or_a_claim_that_comes_twice_names_nobody() {
    let sign = |message: &[u8]| signature("HS256", message);
    let (header, body) = (r#"{"alg":"HS256"}"#, claims().to_string());
    for twice in [r#"{"alg":"HS256","alg":"HS256"}"#, r#"{"alg":"HS256","kid":"1","kid":"2"}"#] {
        check(&shared(), &of_texts(twice, &body, sign), Err(TokenError::Malformed));
    }
    let twice = body.replace("{", r#"{"sub":"admin","#);
    check(&shared(), &of_texts(header, &twice, sign), Err(TokenError::Malformed));
    let twice = body.replace("{", r#"{"\u0073ub":"admin","#);
    check(&shared(), &of_texts(header, &twice, sign), Err(TokenError::Malformed));
}

#[test]
fn a_token_is_only_so_long() {
    let of_length = |length: usize| {
        let fill = (length / 2..length).find_map(|fill| {
            let text = token("HS256", &but("fill", "x".repeat(fill).into()));
            (text.len() >= length).then_some(text)
        });
        fill.unwrap()
    };
    let fits = of_length(MAX_TOKEN - 3);
    assert!(fits.len() <= MAX_TOKEN, "{}", fits.len());
    check(&shared(), &fits, Ok("u1"));
    check(&shared(), &of_length(MAX_TOKEN + 1), Err(TokenError::TooLong));
}

#[test]
fn a_token_holds_from_its_beginning_to_its_end_and_a_minute_around() {
    let check = |claims: &Value, micros: u64, expect: Result<(), TokenError>| {
        let now = Timestamp::from_secs(NOW - 1_000).plus(Span::from_micros(micros));
        let verified: Result<Claims, TokenError> = shared().verify(&token("HS256", claims), now);
        assert_eq!(verified.map(drop), expect, "{claims} {micros}");
    };
    let second = 1_000_000;
    let dated = json!({ "nbf": NOW - 900, "exp": NOW - 500 });
    check(&dated, 40 * second - 1, Err(TokenError::NotYetValid));
    check(&dated, 40 * second, Ok(()));
    check(&dated, 560 * second - 1, Ok(()));
    check(&dated, 560 * second, Err(TokenError::Expired));
    // Fractions are dates too.
    let dated = json!({ "exp": 1_767_225_100.5 });
    check(&dated, 560 * second + second / 2 - 1, Ok(()));
    check(&dated, 560 * second + second / 2, Err(TokenError::Expired));
    // What is no date is not taken for one that is not there.
    for bad in [json!("never"), json!(null), json!([NOW]), json!({}), json!(true), json!(NOW.to_string())] {
        check(&json!({ "exp": bad }), 0, Err(TokenError::Malformed));
        check(&json!({ "exp": NOW, "nbf": bad }), 0, Err(TokenError::Malformed));
    }
    check(&json!({}), 0, Err(TokenError::NoExpiry));
    check(&json!({ "exp": -1 }), 0, Err(TokenError::Expired));
    check(&json!({ "exp": 0 }), 0, Err(TokenError::Expired));
    check(&json!({ "exp": 1e300 }), 0, Ok(()));
    check(&json!({ "exp": u64::MAX }), u64::MAX, Ok(()));
    check(&json!({ "exp": NOW, "nbf": 1e300 }), 0, Err(TokenError::NotYetValid));
}

#[test]
fn the_issuer_and_the_audience_are_those_of_the_policy() {
    let settings = Jwt { iss: Some("https://id".into()), aud: Some("api".into()), ..settings("HS256") };
    let verifier = Verifier::with_key(&settings, SECRET.as_bytes()).unwrap();
    let with = |iss: Value, aud: Value| {
        let mut claims = but("iss", iss);
        if !aud.is_null() {
            claims["aud"] = aud;
        }
        token("HS256", &claims)
    };
    check(&verifier, &with(json!("https://id"), json!("api")), Ok("u1"));
    check(&verifier, &with(json!("https://id"), json!(["web", "api"])), Ok("u1"));
    for iss in [json!("https://id/"), json!("https://evil"), json!(""), json!(null), json!(7), json!(["https://id"])] {
        check(&verifier, &with(iss, json!("api")), Err(TokenError::Issuer));
    }
    for aud in [json!("API"), json!("web"), json!(["web"]), json!([]), json!(null)] {
        check(&verifier, &with(json!("https://id"), aud), Err(TokenError::Audience));
    }
    for aud in [json!(7), json!({ "api": true }), json!(["api", 7])] {
        check(&verifier, &with(json!("https://id"), aud), Err(TokenError::Malformed));
    }
    // A policy that is no audience takes no token that is meant for one.
    check(&shared(), &with(json!("anyone"), json!(null)), Ok("u1"));
    check(&shared(), &with(json!("anyone"), json!("api")), Err(TokenError::Audience));
}

#[test]
fn a_key_of_a_set_is_the_one_that_the_token_names() {
    let named = |kid: &str| signed(&json!({ "alg": "ES256", "kid": kid }), &claims(), "ES256");
    let (other, foreign) = stranger("2", &claims());
    let set = with_set(&[jwk("ES256", "1"), other.clone(), jwk("RS256", "3"), jwk("EdDSA", "4")]);
    check(&set, &named("1"), Ok("u1"));
    check(&set, &foreign, Ok("u1"));
    check(&set, &named("2"), Err(TokenError::Signature));
    // A key of another algorithm is none, whatever its name.
    for unknown in ["3", "4", "5", "", "1 "] {
        check(&set, &named(unknown), Err(TokenError::Key));
    }
    // Without a name, it would have to be tried with all.
    check(&set, &token("ES256", &claims()), Err(TokenError::Key));
    check(&with_set(&[jwk("ES256", "1"), jwk("RS256", "2")]), &token("ES256", &claims()), Ok("u1"));
    assert!(set.ambiguous_kids().is_empty());

    let mut twin = other;
    twin["kid"] = "1".into();
    let twins = with_set(&[jwk("ES256", "1"), twin, stranger("2", &claims()).0]);
    check(&twins, &named("1"), Err(TokenError::Key));
    check(&twins, &named("2"), Err(TokenError::Signature));
    assert_eq!(twins.ambiguous_kids(), ["1"]);
    // The same key twice is two keys as well: nobody knows which of them was meant to go.
    check(&with_set(&[jwk("ES256", "1"), jwk("ES256", "1")]), &named("1"), Err(TokenError::Key));
}

#[test]
fn a_single_key_has_no_name() {
    for kid in ["1", "", "anything"] {
        check(&of_alg("ES256"), &signed(&json!({ "alg": "ES256", "kid": kid }), &claims(), "ES256"), Ok("u1"));
    }
}

#[test]
fn claims_are_names_exactly_as_they_are_written() {
    let body = format!(
        r#"{{"exp":{},"a":" U\u0031\n","b":12345678901234567890123,"c":1.50,"d":true,"e":-0,"f":null,"g":["x"],"h":{{}},"i":""}}"#,
        NOW
    );
    let token = of_texts(r#"{"alg":"HS256"}"#, &body, |message| signature("HS256", message));
    let claims = shared().verify(&token, START).unwrap();
    let check = |name: &str, expect: Option<&str>| assert_eq!(claims.get(name), expect, "{name}");
    check("a", Some(" U1\n"));
    check("b", Some("12345678901234567890123"));
    check("c", Some("1.50"));
    check("d", Some("true"));
    check("e", Some("-0"));
    for none in ["f", "g", "h", "A", "j"] {
        check(none, None);
    }
    check("i", Some(""));
}
