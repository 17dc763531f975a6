//! Histories: what several nodes do on one store while servers and nodes fail, in a ledger that is kept by the test alone, and what
//! the store must hold in the end.
//!
//! `THRESHOLD_HISTORY_SEED=N` runs the history of one seed again, and `THRESHOLD_HISTORY_SECS=N` histories of new seeds for so long:
//! `cargo test -p threshold-limiter --all-features --test redis history::asked -- --show-output`.

mod clients;
mod hot;
mod judge;
mod killed;
mod late_credits;
mod ledger;
mod lost_charges;
mod node;
mod once;
mod random;
mod remote;
mod rotation;
mod run;
mod scenario;
mod servers;
mod world;

/// One server that keeps its data: nodes and the server are killed and suspended, the server is emptied, the secret is replaced.
#[tokio::test(flavor = "multi_thread")]
async fn on_one_server_the_store_holds_what_the_ledger_says() {
    run::run_seeds(&[0, 18, 30]).await;
}

/// A Cluster whose primaries keep their data: one is killed, or suspended and then killed, a slot moves, everything is emptied.
#[tokio::test(flavor = "multi_thread")]
async fn on_a_cluster_the_store_holds_what_the_ledger_says() {
    run::run_seeds(&[3, 4, 25]).await;
}

/// A Cluster with replicas, which take over from living and from dead primaries.
#[tokio::test(flavor = "multi_thread")]
async fn after_failovers_of_a_cluster_the_store_holds_what_the_ledger_says() {
    run::run_seeds(&[17, 27]).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn under_sentinels_the_store_holds_what_the_ledger_says() {
    run::run_seeds(&[7, 37]).await;
}

/// The history of `THRESHOLD_HISTORY_SEED`, or as many new ones as fit into `THRESHOLD_HISTORY_SECS`; without both, nothing.
#[tokio::test(flavor = "multi_thread")]
async fn asked() {
    run::run_asked().await;
}
