//! The metrics of a journal on a real file.

use std::sync::Arc;

use threshold_limiter::journal::{Journal, Kind};
use threshold_limiter::metrics::Metrics;

use super::{SECOND, Scratch, key, saved};

/// Returns the value of a series.
fn value(metrics: &Metrics, name: &str) -> f64 {
    let text = metrics.text();
    let line = text.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(' ').map(str::to_owned));
    line.unwrap().parse().unwrap()
}

/// Fails without `observe` in `writer::write`, or if a batch without rows is observed as well.
#[test]
fn every_commit_is_timed() {
    let scratch = Scratch::new();
    let (journal, _) = Journal::open(&scratch.db(), key(1)).unwrap();
    let (journal, metrics) = (Arc::new(journal), Metrics::new());
    metrics.watch_journal(&journal);
    let mut before = value(&metrics, "threshold_fsync_seconds_count");
    for name in [&b"one"[..], b"two", b"three"] {
        journal.put(Kind::Tenant, name, Some(vec![1]));
        assert!(saved(&journal, SECOND));
        let commits = value(&metrics, "threshold_fsync_seconds_count");
        assert!(commits > before, "{before} commits, then {commits}");
        before = commits;
    }
    let (sum, all) = (value(&metrics, "threshold_fsync_seconds_sum"), "threshold_fsync_seconds_bucket{le=\"+Inf\"}");
    assert!(sum > 0.0 && value(&metrics, all) == before, "{sum} s for {before} commits");
    assert_eq!(value(&metrics, "threshold_journal_up"), 1.0);
    // Nothing is waiting, so nothing is committed.
    assert!(saved(&journal, SECOND) && value(&metrics, "threshold_fsync_seconds_count") == before);
    drop(journal);
    assert!(!metrics.text().contains("threshold_fsync"), "metrics keep no journal alive");
}
