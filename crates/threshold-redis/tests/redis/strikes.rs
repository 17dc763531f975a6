//! What a subject with strikes costs.

use std::sync::Arc;

use threshold_core::{DigestKey, Span, Timestamp};
use threshold_limiter::{Facts, Limiter, ManualClock, Policy};

use crate::process::RedisServer;

/// The requests of one struck user of a large tenant were written by compare-and-set. They waited until no other node charged the
/// tenant, which never happened.
///
/// Fails if `settle` leaves every bill of a subject with a standing to core.
#[tokio::test(flavor = "multi_thread")]
async fn the_charges_of_a_subject_with_strikes_are_additions() {
    let server = RedisServer::start_with_clock();
    let start = Timestamp::from_secs(1_767_225_600);
    server.set_time(start);
    let policy = "[ladders.l]\nrungs = ['deny', 'deny', 'cooldown 1min']\n\
                  [[rule]]\nname = 'tenant'\nper = ['tenant']\nlimit = '100/h'\n\
                  [[rule]]\nname = 'user'\nper = ['user']\nlimit = '2/s'\nladder = 'l'\nstrike = 'request'";
    let clock = Arc::new(ManualClock::new(start));
    let policy = Policy::parse(policy, &|_| None).unwrap();
    let limiter = Limiter::builder(policy)
        .store(server.open().await)
        .clock(clock)
        .digest_key(DigestKey::new([7; 16]))
        .build()
        .unwrap();
    let facts = Facts { user: Some("ada"), tenant: Some("acme"), ..Facts::default() };
    let mut allowed = 0;
    for _ in 0..3 {
        allowed += usize::from(limiter.check_async(&facts).await.unwrap().allowed());
    }
    assert_eq!(allowed, 2, "and one strike");
    server.set_time(start.plus(Span::from_secs(10)));
    server.cli(&["CONFIG", "RESETSTAT"]);
    let decision = limiter.check_async(&facts).await.unwrap();
    assert!(decision.allowed());
    assert_eq!(decision.readings[0].remaining, 97);
    // Nothing is deleted or compared: a swap would have read the records again.
    let stats = server.cli(&["INFO", "commandstats"]);
    let calls =
        |command: &str| stats.lines().find(|line| line.starts_with(&format!("cmdstat_{command}:"))).map(str::to_owned);
    assert!(calls("mget").unwrap().starts_with("cmdstat_mget:calls=2,"), "{stats}");
    assert!(calls("set").unwrap().starts_with("cmdstat_set:calls=2,"), "{stats}");
}
