//! `axum`: tenants and users.

use crate::running::{Answer, Running, field};

#[test]
fn tenants_and_users_have_limits_of_their_own() {
    let running = Running::start("axum", &[]);
    let ask = |token: &str| running.ask("GET", "/notes", &[("authorization", &format!("Bearer {token}"))]);
    let statuses = |token: &str, times: usize| -> Vec<u16> {
        std::iter::repeat_with(|| ask(token).status().as_u16()).take(times).collect()
    };
    let first: Answer = ask("ada");
    assert_eq!((first.status().as_u16(), field(&first, "x-ratelimit-limit")), (200, "3"));
    assert_eq!(first.body(), "the notes of ada\n");
    assert_eq!(statuses("ada", 3), [200, 200, 429]);
    assert_eq!(statuses("bob", 2), [200, 200]);
    let denied = ask("bob");
    assert_eq!(denied.status().as_u16(), 429);
    assert!(
        denied.body().contains("tenant_rate_limited") && denied.headers().contains_key("retry-after"),
        "{denied:?}"
    );
    assert_eq!(statuses("eve", 1), [200]);
    assert_eq!(statuses("guess", 6), [401, 401, 401, 401, 401, 429]);
}
