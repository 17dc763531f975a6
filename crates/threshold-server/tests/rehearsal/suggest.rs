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

/// An analyst got 110 a minute beside 110 an hour, of which the first can never deny, three rules for the style sheets of one page,
/// and no word about the endpoints that had no rule.
#[test]
fn no_rule_is_idle_static_files_are_one_and_the_rest_is_named() {
    let mut events = events(21, 3_000);
    for (index, event) in events.iter_mut().enumerate() {
        event.method = "GET";
        event.path = match index % 6 {
            0 => "/style.css".to_owned(),
            1 => "/app.js?v=3".to_owned(),
            2 => format!("/img/{index}.png"),
            3 | 4 => format!("/pages/p{}.html", index / 6 % 10),
            _ => format!("/once-x{index}"),
        };
        // Bursts of an hour's requests within one minute, so that both limits come out equal.
        event.second = event.second / 3_600 * 3_600 + event.second % 60;
    }
    let log = Scratch::new("shop.log", combined_lines(&events));
    let run = threshold(&["suggest", log.path(), "--touch", "0%", "--reorder", "1h"]);
    let policy = Scratch::new("shop.toml", &run.out);
    assert_eq!(threshold(&["lint", policy.path(), "--deny", "warnings"]).code, 0, "{}", run.out);
    assert!(run.out.contains("\"address-hour\"") && !run.out.contains("name      = \"address\""), "{}", run.out);
    assert!(
        run.out.contains("# - address, ") && run.out.contains("/min: \"address-hour\" is always reached first"),
        "{}",
        run.out
    );
    assert_eq!(run.out.matches(".css").count(), 1, "{}", run.out);
    assert!(run.out.contains("name      = \"static-files\"") && run.out.contains("\"**.png\""), "{}", run.out);
    for note in ["# Left out:", "endpoints with few requests", "GET:/pages/p9.html, with 100 requests: 8 others"] {
        assert!(run.out.contains(note), "{note} is missing:\n{}", run.out);
    }
    // A replay counts static files as the evidence does.
    let answer = threshold(&["replay", policy.path(), log.path(), "--json", "--reorder", "1h"]).json();
    let rule = answer["rules"].as_array().unwrap().iter().find(|rule| rule["rule"] == "static-files").unwrap();
    assert_eq!((&rule["met"], &answer["denied"]), (&1_500.into(), &0.into()));
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
