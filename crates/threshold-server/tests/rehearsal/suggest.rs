//! Tests `threshold suggest`.

use crate::logs::{combined_lines, events};
use crate::running::{Scratch, threshold, threshold_with};

/// Seen to fail with the share not divided among the limits.
#[test]
fn the_suggested_limits_affect_at_most_the_given_share_and_have_no_findings() {
    for seed in 11..=14 {
        let log = Scratch::new("suggest.log", combined_lines(&events(seed, 4_000)));
        for (share, most) in [("0%", 0.0), ("0.1%", 0.001), ("10%", 0.1), ("30%", 0.3)] {
            let suggested = threshold(&["suggest", log.path(), "--touch", share]);
            assert_eq!(suggested.code, 0, "{}", suggested.err);
            let policy = Scratch::new("suggested.toml", &suggested.out);
            let linted = threshold(&["lint", policy.path(), "--deny", "warnings"]);
            assert_eq!(linted.code, 0, "{}\n{}", linted.out, suggested.out);
            let answer = threshold(&["replay", policy.path(), log.path(), "--json"]).json();
            let (touched, subjects) = (answer["touched"].as_f64().unwrap(), answer["subjects"].as_f64().unwrap());
            assert!(touched <= subjects * most, "seed {seed}, {share}: {touched} of {subjects}\n{}", suggested.out);
            // A replay gives the numbers of the comments.
            let said = format!("would have touched {touched} of them");
            assert!(suggested.out.contains(&said), "{said}\n{}", suggested.out);
        }
    }
}

#[test]
fn a_larger_share_gives_tighter_limits() {
    let log = Scratch::new("tighter.log", combined_lines(&events(15, 4_000)));
    let limit = |share: &str| {
        let text = threshold(&["suggest", log.path(), "--touch", share]).out;
        let line = text.lines().find(|line| line.starts_with("limit")).unwrap().to_owned();
        line.split(['"', '/']).nth(1).unwrap().parse::<u64>().unwrap()
    };
    assert!(limit("50%") < limit("0%"));
}

#[test]
fn a_log_without_requests_is_an_error() {
    let empty = Scratch::new("nothing.log", "");
    let run = threshold(&["suggest", empty.path()]);
    assert!(run.code == 2 && run.err.contains("none of the log's 0 lines"), "{}", run.err);
    let run = threshold_with(&["suggest", "-"], b"");
    assert!(run.code == 2 && run.err.contains("twice"), "{}", run.err);
    for share in ["lots", "100%", "-1%"] {
        assert_eq!(threshold(&["suggest", empty.path(), &format!("--touch={share}")]).code, 2, "{share}");
    }
}
