//! Tests which names are kept, which of them a digest finds, and when they are forgotten.

use std::collections::HashSet;
use std::net::IpAddr;

use threshold_core::plan::Verb;
use threshold_limiter::ManualClock;
use threshold_limiter::store::at_once;

use super::*;
use crate::desk::tests::START;

const POLICY: &str = "
    [[rule]]
    name = 'r'
    layer = 'user'
    per = ['user']
    limit = '1/h'
    on_missing = 'skip'
";

const SCOPED: &str = "identity = { user_scope = 'tenant' }\n";

fn desk(policy: &str) -> (Desk, Arc<ManualClock>) {
    let clock = Arc::new(ManualClock::new(START));
    let shared: Arc<dyn threshold_limiter::Clock> = Arc::<ManualClock>::clone(&clock);
    (Desk::new(Policy::parse(policy, &|_| None).unwrap(), shared), clock)
}

fn facts<'a>(ip: &str, tenant: &'a str, user: &'a str) -> Facts<'a> {
    Facts { ip: Some(ip.parse().unwrap()), tenant: Some(tenant), user: Some(user), ..Facts::default() }
}

/// Makes as many requests.
fn ask(desk: &Desk, facts: &Facts<'_>, times: usize) {
    for _ in 0..times {
        at_once(desk.decide(&desk.policy(), Verb::Check, facts)).unwrap();
    }
}

fn digest(desk: &Desk, name: &str) -> String {
    desk.policy().key().redact(name)
}

fn found(desk: &Desk, layer: Layer, key: &str) -> Result<String, OperationError> {
    desk.named(layer, key).map(Cow::into_owned)
}

/// Woken by keeping the names of allowed requests too, by `<` in `of`, and by leaving out a `retain` of `forget_old`.
#[test]
fn a_stopped_caller_is_found_for_an_hour_and_an_allowed_one_never() {
    let (desk, clock) = desk(POLICY);
    ask(&desk, &facts("203.0.113.7", "acme", "eve"), 2);
    ask(&desk, &facts("203.0.113.8", "beta", "ada"), 1);
    let names = [(Layer::Edge, "203.0.113.7"), (Layer::Tenant, "acme"), (Layer::User, "eve")];
    for (layer, name) in names {
        assert_eq!(found(&desk, layer, &digest(&desk, name)).as_deref(), Ok(name));
    }
    for (layer, name) in
        [(Layer::Edge, "203.0.113.8"), (Layer::Tenant, "beta"), (Layer::User, "ada"), (Layer::User, "acme")]
    {
        assert_eq!(found(&desk, layer, &digest(&desk, name)), Err(OperationError::UnknownDigest), "{name}");
    }
    // Other keys are names.
    for key in ["eve", "#5f1d", "#5F1D0C9B7A3E2210", "#5f1d0c9b7a3e22100", "5f1d0c9b7a3e2210", "#5f1d0c9b7a3e221g"] {
        assert_eq!(found(&desk, Layer::User, key).as_deref(), Ok(key));
    }
    assert_eq!(found(&desk, Layer::Endpoint, "#5f1d0c9b7a3e2210").as_deref(), Ok("#5f1d0c9b7a3e2210"));
    clock.set(START.plus(LIFETIME));
    desk.forget_old_names();
    assert_eq!(found(&desk, Layer::User, &digest(&desk, "eve")).as_deref(), Ok("eve"));
    clock.set(START.plus(LIFETIME).plus(Span::from_secs(1)));
    for (layer, name) in names {
        assert_eq!(found(&desk, layer, &digest(&desk, name)), Err(OperationError::UnknownDigest), "{name}");
    }
    let count = |tables: &Tables| tables.addresses.len() + tables.tenants.len() + tables.users.len();
    assert_eq!(count(&desk.names.tables()), 3);
    desk.forget_old_names();
    assert_eq!(count(&desk.names.tables()), 0);
}

/// Events show the block of an IPv6 client, and log lines its address.
///
/// Woken by leaving out either text of `Known::address`.
#[test]
fn an_address_is_found_by_the_digest_of_its_block_too() {
    let (desk, _) = desk(POLICY);
    ask(&desk, &facts("2001:db8::7", "acme", "eve"), 2);
    ask(&desk, &facts("::ffff:203.0.113.7", "acme", "eve"), 1);
    for text in ["2001:db8::7", "2001:db8::/64"] {
        assert_eq!(found(&desk, Layer::Edge, &digest(&desk, text)).as_deref(), Ok("2001:db8::7"), "{text}");
    }
    assert_eq!(found(&desk, Layer::Edge, &digest(&desk, "203.0.113.7")).as_deref(), Ok("203.0.113.7"));
    // One client takes one place, whichever of its 2^64 addresses it uses.
    for last in 0..100_u16 {
        ask(&desk, &facts(&format!("2001:db8::{last:x}"), "acme", "eve"), 1);
    }
    assert_eq!(desk.names.tables().addresses.len(), 2);
    assert_eq!(found(&desk, Layer::Edge, &digest(&desk, "2001:db8::/64")).as_deref(), Ok("2001:db8::63"));
}

/// A caller that took the digest of another one as its name could be banned or forgiven in place of it.
///
/// Woken by `key.into()` in place of `read_name`, and by taking a name for its digest.
#[test]
fn a_name_that_looks_like_a_digest_is_written_with_one_more_sign() {
    let ((scoped, _), (desk, _)) = (desk(&format!("{SCOPED}{POLICY}")), desk(POLICY));
    let odd = digest(&desk, "eve");
    ask(&desk, &facts("203.0.113.7", "acme", &odd), 2);
    assert_eq!(found(&desk, Layer::User, &odd), Err(OperationError::UnknownDigest), "it is the digest of nobody");
    for written in [format!("#{odd}"), digest(&desk, &odd)] {
        assert_eq!(found(&desk, Layer::User, &written), Ok(odd.clone()));
    }
    ask(&desk, &facts("203.0.113.7", "acme", "eve"), 2);
    assert_eq!(found(&desk, Layer::User, &odd).as_deref(), Ok("eve"));
    assert_eq!(found(&desk, Layer::User, &format!("#{odd}")), Ok(odd.clone()));
    assert_eq!(desk.shown_name(Layer::User, &odd), format!("#{odd}"));
    for written in [format!("acme/#{odd}"), format!("acme/%23{}", odd.trim_start_matches('#'))] {
        let name = found(&scoped, Layer::User, &written).unwrap();
        assert_eq!(scoped.policy().subject_key(Layer::User, &name).as_deref(), Ok(format!("acme/{odd}").as_str()));
    }
}

/// A user named `" eve"` could not be banned by its digest: the ban would have been on `"eve"`.
///
/// Woken by trimming a name in `see`, or a key in `named`.
#[test]
fn a_name_with_blanks_at_its_ends_is_found_and_banned_exactly() {
    let (desk, _) = desk(POLICY);
    ask(&desk, &facts("203.0.113.7", " acme", "eve "), 2);
    for (layer, name) in [(Layer::Tenant, " acme"), (Layer::User, "eve ")] {
        assert_eq!(found(&desk, layer, &digest(&desk, name)).as_deref(), Ok(name));
        assert_eq!(found(&desk, layer, name).as_deref(), Ok(name));
        assert_eq!(found(&desk, layer, &digest(&desk, name.trim())), Err(OperationError::UnknownDigest));
        let new = crate::desk::NewBan { layer, key: name, reason: "r", seconds: None };
        let (_, ban) = at_once(desk.ban("ops", new)).unwrap();
        assert_eq!(ban.whom.key(), name);
    }
    let banned = |tenant, user| {
        let decided = at_once(desk.decide(&desk.policy(), Verb::Peek, &facts("203.0.113.8", tenant, user))).unwrap();
        decided.decision.banned()
    };
    assert!(banned(" acme", "x") && banned("x", "eve ") && !banned("acme", "x") && !banned("x", "eve"));
    assert_eq!(at_once(desk.lift_subject("ops", (Layer::Tenant, "acme"), None)), Err(OperationError::UnknownBan));
    assert_eq!(at_once(desk.lift_subject("ops", (Layer::Tenant, " acme"), None)), Ok(1));
}

/// Woken by leaving out `is_of`, and by splitting the key after it is decoded.
#[test]
fn a_user_of_a_tenant_is_found_with_the_tenant() {
    let (desk, _) = desk(&format!("{SCOPED}{POLICY}"));
    let eve = digest(&desk, "eve");
    ask(&desk, &facts("203.0.113.7", "acme", "eve"), 2);
    assert_eq!(found(&desk, Layer::User, &eve).as_deref(), Ok("acme/eve"));
    ask(&desk, &facts("203.0.113.7", "be/ta", "eve"), 2);
    let both = [format!("acme/{eve}"), format!("be%2Fta/{eve}")];
    match found(&desk, Layer::User, &eve) {
        Err(OperationError::AmbiguousDigest(callers)) => {
            assert_eq!(callers.iter().collect::<HashSet<_>>(), both.iter().collect());
        }
        other => panic!("{other:?}"),
    }
    assert_eq!(found(&desk, Layer::User, &format!("acme/{eve}")).as_deref(), Ok("acme/eve"));
    assert_eq!(found(&desk, Layer::User, &format!("be%2Fta/{eve}")).as_deref(), Ok("be%2Fta/eve"));
    let hidden = format!("{}/{eve}", digest(&desk, "acme"));
    assert_eq!(found(&desk, Layer::User, &hidden).as_deref(), Ok("acme/eve"), "the tenant by its digest");
    let named = format!("{}/eve", digest(&desk, "acme"));
    assert_eq!(found(&desk, Layer::User, &named).as_deref(), Ok("acme/eve"), "as a list shows a secret tenant");
    for unknown in [format!("other/{eve}"), format!("/{eve}")] {
        assert_eq!(found(&desk, Layer::User, &unknown), Err(OperationError::UnknownDigest), "{unknown}");
    }
    let name = format!("acme/%23{}", eve.trim_start_matches('#'));
    assert_eq!(found(&desk, Layer::User, &name).as_deref(), Ok(name.as_str()), "a name that looks like a digest");
}

/// Woken by drawing one name instead of `COMPARED`, and by `places` that keep a name which has made room.
#[test]
fn a_caller_that_is_denied_again_and_again_is_found_in_a_flood_of_others() {
    let policy = Policy::parse(POLICY, &|_| None).unwrap();
    let names = RecentNames::default();
    let address = |number: u32| IpAddr::from(number.to_be_bytes());
    let flood = u32::try_from(MAX_ADDRESSES * 20).unwrap();
    for number in 0..flood {
        let user = format!("once-{number}");
        names.see(
            &Facts {
                ip: Some(address(number + (11 << 24))),
                user: Some(&user),
                tenant: Some(&user),
                ..Facts::default()
            },
            &policy,
            START,
        );
        if number % 1_000 == 0 {
            let busy = Facts { ip: Some(address(7)), user: Some("busy"), tenant: Some("busy"), ..Facts::default() };
            names.see(&busy, &policy, START);
        }
    }
    let known = |layer| names.of(layer, &policy, START);
    assert!(known(Layer::Edge).iter().any(|known| known.name == "0.0.0.7"));
    assert!(known(Layer::User).iter().any(|known| known.name == "busy"));
    assert!(known(Layer::Tenant).iter().any(|known| known.name == "busy"));
    for (layer, max) in [(Layer::Edge, MAX_ADDRESSES), (Layer::User, MAX_USERS), (Layer::Tenant, MAX_TENANTS)] {
        assert_eq!(known(layer).len(), max);
    }
    let tables = names.tables();
    assert_eq!(tables.users.len(), MAX_USERS);
    drop(tables);
    // Too long to be shown, and so to be kept.
    let long = "x".repeat(MAX_TEXT + 1);
    names.see(&Facts { user: Some(&long), ..Facts::default() }, &policy, START);
    assert!(!known(Layer::User).iter().any(|known| known.name == long));
}

/// Woken by comparing only names, or only digests, in `forget_names`; and by leaving out the tenant.
#[test]
fn an_erased_subject_is_forgotten_by_its_name_and_by_its_digest() {
    let (desk, _) = desk(&format!("{SCOPED}{POLICY}"));
    let all = [("acme", "eve"), ("beta", "eve"), ("acme", "ada"), ("acme", "bob")];
    for (tenant, user) in all {
        ask(&desk, &facts("203.0.113.7", tenant, user), 2);
    }
    let left = |desk: &Desk| {
        let mut left: Vec<_> =
            desk.names.of(Layer::User, &desk.policy(), START).into_iter().map(|one| one.name).collect();
        left.sort();
        left
    };
    let values = |name: &str| [name.to_owned(), digest(&desk, name)];
    desk.forget_names(Layer::User, &values("eve"), Some(&values("acme")));
    assert_eq!(left(&desk), ["acme/ada", "acme/bob", "beta/eve"]);
    desk.forget_names(Layer::User, &values("eve"), None);
    desk.forget_names(Layer::User, &[digest(&desk, "ada")], None);
    assert_eq!(left(&desk), ["acme/bob"]);
    ask(&desk, &facts("2001:db8::7", "acme", "bob"), 1);
    desk.forget_names(Layer::Edge, &values("2001:db8::/64"), None);
    let addresses = desk.names.of(Layer::Edge, &desk.policy(), START);
    assert_eq!(addresses.into_iter().map(|one| one.name).collect::<Vec<_>>(), ["203.0.113.7"]);
    desk.forget_names(Layer::Tenant, &values("acme"), None);
    assert_eq!(found(&desk, Layer::Tenant, &digest(&desk, "acme")), Err(OperationError::UnknownDigest));
    assert_eq!(found(&desk, Layer::Tenant, &digest(&desk, "beta")).as_deref(), Ok("beta"));
    // The table is usable after names have left it.
    ask(&desk, &facts("203.0.113.7", "acme", "eve"), 1);
    assert_eq!(found(&desk, Layer::User, &digest(&desk, "eve")).as_deref(), Ok("acme/eve"));
}
