//! The messages of every error that is not the journal's: one table, so that a change of a text is seen.

use std::error::Error;

use threshold_core::codec::BytesError;
use threshold_core::control::ControlFull;
use threshold_core::lockout::UnknownAttempt;
use threshold_core::path::PathError;
use threshold_core::plan::PlanError;
use threshold_core::policy::{CostOf, TokenError};
use threshold_core::secret::{KeyId, SameKeyId};
use threshold_limiter::bans::TooManyBans;
use threshold_limiter::store::{EndError, StoreError};
use threshold_limiter::{CommitError, LoginError, UnknownReservation};

type Cases = Vec<(Box<dyn Error>, &'static str)>;

fn check(cases: Cases) {
    for (error, message) in cases {
        assert_eq!(error.to_string(), message);
        let is_plain = message.starts_with(|first: char| first.is_lowercase() || "\"[".contains(first));
        assert!(is_plain && !message.ends_with('.'), "{message}");
        // None of these has a cause of its own: an error that wraps another one shows that one's message.
        assert!(error.source().is_none(), "{message}");
    }
}

#[test]
fn errors_of_requests() {
    let rule = || "posts".into();
    check(vec![
        (
            PlanError::CostExceedsLimit { rule: rule(), cost: 9, capacity: 5, cost_of: CostOf::Requests }.into(),
            "a cost of 9 never fits rule \"posts\", which holds 5",
        ),
        (
            PlanError::Missing { rule: rule(), field: "user".to_owned() }.into(),
            "rule \"posts\" needs user, or an ip to stand in for it",
        ),
        (PlanError::TooManyRules.into(), "the request meets more than 16 rules"),
        (PlanError::Path(PathError::Backslash).into(), "the path has a backslash"),
        (PathError::TooLong.into(), "the path is longer than 8192 bytes"),
        (PathError::TooManyReadings.into(), "servers may read the path in more than 8 ways"),
        (PathError::DotSegment.into(), "the path has a dot segment (. or ..)"),
        (PathError::ControlCharacter.into(), "the path has a control character"),
        (PathError::NumberSign.into(), "the path has a number sign that is not encoded"),
        (PathError::AmbiguousIdentity.into(), "servers may read different callers from the path"),
        (TokenError::Repeated.into(), "several Authorization fields"),
        (TokenError::TooLong.into(), "the token is too long"),
        (TokenError::Malformed.into(), "not a signed JWT"),
        (TokenError::Algorithm.into(), "another algorithm"),
        (TokenError::Key.into(), "no such key"),
        (TokenError::Signature.into(), "the signature does not match"),
        (TokenError::Expired.into(), "expired"),
        (TokenError::NoExpiry.into(), "no expiry"),
        (TokenError::NotYetValid.into(), "not valid yet"),
        (TokenError::Issuer.into(), "another issuer"),
        (TokenError::Audience.into(), "another audience"),
    ]);
}

#[test]
fn errors_of_stores_and_records() {
    let version = |oldest| BytesError::UnknownVersion { found: 9, oldest, newest: 2 };
    let other_cost = "the reservation was already committed with another cost, which stays";
    check(vec![
        (StoreError::Full.into(), "the store is full of protected keys"),
        (StoreError::Timeout.into(), "the store did not answer in time"),
        (StoreError::Unavailable.into(), "the store cannot be reached"),
        (EndError::Unknown.into(), "unknown or already ended"),
        (EndError::OtherCost.into(), other_cost),
        (EndError::from(StoreError::Timeout).into(), "the store did not answer in time"),
        (UnknownReservation.into(), "the reservation is unknown or already ended"),
        (CommitError::from(UnknownReservation).into(), "the reservation is unknown or already ended"),
        (CommitError::OtherCost.into(), other_cost),
        (TooManyBans.into(), "there are 500000 bans already"),
        (ControlFull.into(), "there are 500000 bans or 10000 settings already"),
        (version(2).into(), "the bytes have version 9, and this program reads version 2"),
        (version(1).into(), "the bytes have version 9, and this program reads versions 1 and 2"),
        (BytesError::Truncated.into(), "the bytes end too early"),
        (BytesError::Trailing.into(), "bytes are left over at the end"),
        (BytesError::Malformed("count").into(), "malformed count"),
        (BytesError::Unsigned.into(), "the signature does not match"),
        (BytesError::UnknownKey(KeyId::from_u32(42)).into(), "signed under the key 0000002a, which is not in force"),
        (
            SameKeyId(KeyId::from_u32(42)).into(),
            "the present and the old secret have the same key id, 0000002a: give another one, or no old one",
        ),
    ]);
}

#[test]
fn errors_of_logins() {
    check(vec![
        (LoginError::NoLogin.into(), "the policy has no [login]"),
        (LoginError::NoAccount.into(), "the account has no name"),
        (
            LoginError::WhoseAccount.into(),
            "the account does not say whose it is: users belong to tenants (user_scope = \"tenant\"), so write \
             TENANT/ACCOUNT, each part percent-encoded, or /ACCOUNT for one without a tenant",
        ),
        (LoginError::NotOurs.into(), "the token is not a login attempt of this installation"),
        (LoginError::UnknownAttempt.into(), "the attempt is unknown, already ended, or expired"),
        (LoginError::Store(StoreError::Full).into(), "the store is full of protected keys"),
        (UnknownAttempt.into(), "the attempt is unknown, already ended, or expired"),
    ]);
}

#[cfg(feature = "tower")]
#[test]
fn errors_of_the_layer() {
    check(vec![(
        threshold_limiter::tower::NoTokenVerifier.into(),
        "the policy has [identity.jwt], and nothing verifies its tokens: pass the policy through \
         threshold_wire::jwt::attach first",
    )]);
}
