//! Tests real applications behind nginx with Threshold as forward auth: no spelling of a limited path runs the login more often
//! than its limit.
//!
//! `./test` installs what it needs: `THRESHOLD_BACKENDS_PYTHON` is a Python with the frameworks, and
//! `THRESHOLD_BACKENDS_NODE_MODULES` a folder with Express. `THRESHOLD_SPELLINGS_SEED` repeats a run with its printed
//! seed; `THRESHOLD_SPELLINGS` is the number of spellings.

#![expect(
    clippy::arithmetic_side_effects,
    clippy::indexing_slicing,
    clippy::panic,
    clippy::unwrap_used,
    reason = "a test that cannot go on should say so loudly, on the line where it stops"
)]

mod backend;
#[expect(dead_code, reason = "the server's tests use all of it")]
#[path = "../serve/client.rs"]
mod client;
#[expect(dead_code, reason = "the server's tests use all of it")]
#[path = "../serve/origin.rs"]
mod origin;
#[expect(dead_code, reason = "the server's tests use all of it")]
#[path = "../serve/process.rs"]
mod process;
#[expect(dead_code, reason = "the server's tests use all of it")]
#[path = "../serve/proxy.rs"]
mod proxy;
mod report;
mod site;
mod spellings;

use std::sync::OnceLock;

use backend::{Backend, Kind};
use report::Report;
use site::{LIMIT, Site, ask_directly};
use spellings::{Spelling, spellings};

/// The values of `odd_paths`.
const ODD_PATHS: [&str; 2] = ["refuse", "match"];

/// How many of the spellings must reach each login without Threshold, so that the test is meaningful.
const ENOUGH: usize = 100;

/// The spellings of this run, and their seed.
fn run() -> &'static (u64, Vec<Spelling>) {
    static RUN: OnceLock<(u64, Vec<Spelling>)> = OnceLock::new();
    let variable = |name: &str| std::env::var(name).ok().map(|text| text.parse::<u64>().unwrap());
    RUN.get_or_init(|| {
        let seed = variable("THRESHOLD_SPELLINGS_SEED").unwrap_or_else(rand::random);
        let count = variable("THRESHOLD_SPELLINGS").unwrap_or(10_000);
        (seed, spellings(seed, count.try_into().unwrap()))
    })
}

/// Sends every spelling, first without Threshold, then with it after the limit is used up.
fn never_runs_more_often_than_the_limit(kind: Kind) {
    let (seed, spellings) = run();
    println!("THRESHOLD_SPELLINGS_SEED={seed}, {} spellings", spellings.len());
    let backend = Backend::start(kind);
    let pattern = if kind.takes_everything_below() { "/api/login/**" } else { "/api/login" };
    let mut report = Report::new(spellings);
    report.add("without Threshold", Site::unlimited(&backend).ask_all(spellings));
    let mut more = 0;
    for odd_paths in ODD_PATHS {
        let before = backend.logins();
        let site = Site::limited(&backend, pattern, odd_paths);
        site.spend();
        report.add(odd_paths, site.ask_all(spellings));
        site.log_in_as_another();
        more += backend.logins() - before - LIMIT - 1;
    }
    println!("{}", report.summary());
    if more > 0 || report.reached() < ENOUGH {
        println!("{}", report.tricks());
        println!("every request: {}", report.write(&format!("{kind:?}")).display());
        let what = format!("THRESHOLD_SPELLINGS_SEED={seed}: {more} logins more than the limit, {}", report.summary());
        panic!("{what}\n{}", report.passed());
    }
}

#[test]
fn flask() {
    never_runs_more_often_than_the_limit(Kind::Flask);
}

#[test]
fn django() {
    never_runs_more_often_than_the_limit(Kind::Django);
}

#[test]
fn fastapi_with_h11() {
    never_runs_more_often_than_the_limit(Kind::FastApiH11);
}

#[test]
fn fastapi_with_httptools() {
    never_runs_more_often_than_the_limit(Kind::FastApiHttptools);
}

#[test]
fn fastapi_with_everything_below() {
    never_runs_more_often_than_the_limit(Kind::FastApiBelow);
}

#[test]
fn express_post() {
    never_runs_more_often_than_the_limit(Kind::ExpressPost);
}

#[test]
fn express_use() {
    never_runs_more_often_than_the_limit(Kind::ExpressUse);
}

#[test]
fn axum_route() {
    never_runs_more_often_than_the_limit(Kind::AxumRoute);
}

#[test]
fn axum_catch_all_that_resolves() {
    never_runs_more_often_than_the_limit(Kind::AxumResolving);
}

#[test]
fn axum_catch_all_that_resolves_what_it_captured() {
    never_runs_more_often_than_the_limit(Kind::AxumResolvingBelow);
}

#[test]
fn axum_catch_all() {
    never_runs_more_often_than_the_limit(Kind::AxumCatchAll);
}

#[test]
fn axum_nest() {
    never_runs_more_often_than_the_limit(Kind::AxumNest);
}

#[test]
fn nginx_proxy_pass_with_a_path() {
    never_runs_more_often_than_the_limit(Kind::NginxUri);
}

/// Each of these once ran the login of these applications after the limit of `/api/login` was used up.
#[test]
fn spellings_that_once_bypassed_the_limit() {
    const BELOW: [Kind; 4] = [Kind::FastApiBelow, Kind::ExpressUse, Kind::AxumCatchAll, Kind::AxumNest];
    let decoding = [Kind::Flask, Kind::Django, Kind::FastApiH11, Kind::FastApiHttptools, Kind::NginxUri];
    let resolving = [Kind::NginxUri, Kind::AxumResolving, Kind::AxumResolvingBelow];
    let cases: [(&str, &[Kind]); 20] = [
        ("/api%2flogin", &decoding),
        ("/api%2Flogin", &decoding),
        ("/%2fapi/login", &[Kind::Flask, Kind::Django, Kind::NginxUri]),
        ("/api/%2flogin", &resolving),
        ("/api/login/x%2f..", &[Kind::AxumResolving, Kind::AxumResolvingBelow]),
        ("/api/x%2f..%2flogin", &resolving),
        ("/api/x/..%2flogin", &resolving),
        ("/api/login%0a", &[Kind::FastApiH11, Kind::FastApiHttptools]),
        ("/api%2flogin%0a", &[Kind::FastApiH11, Kind::FastApiHttptools]),
        ("/api%2flogin/../../other", &[Kind::FastApiBelow]),
        ("/api%2flogin%2f..%2f..%2fother", &[Kind::FastApiBelow]),
        ("/api/login/../../health", &BELOW),
        ("/api/login/../../other", &BELOW),
        ("/api/login/%2e%2e/%2e%2e/health", &BELOW),
        ("/api/login/%2e%2e/other", &BELOW),
        ("/api/login/..;/..;/health", &BELOW),
        ("/api/login/..;/other", &BELOW),
        ("/api/login/\\..\\..\\health", &BELOW),
        ("/api/login/..\\..\\other", &BELOW),
        ("/api/login/..%2f..%2fother", &BELOW),
    ];
    let mut passed = Vec::new();
    let kinds = decoding.into_iter().chain([Kind::AxumResolving, Kind::AxumResolvingBelow]).chain(BELOW);
    for backend in kinds.map(Backend::start) {
        let targets = cases.iter().filter(|(_, kinds)| kinds.contains(&backend.kind)).map(|(target, _)| *target);
        let targets: Vec<&str> = targets.collect();
        for target in &targets {
            let ended = ask_directly(&backend, target.as_bytes());
            assert!(ended.ran, "{:?} no longer takes {target} for its login: {ended:?}", backend.kind);
        }
        for odd_paths in ODD_PATHS {
            let site = Site::limited(&backend, "/api/login", odd_paths);
            site.spend();
            let ran = targets.iter().filter(|target| site.ask(target.as_bytes()).ran);
            passed.extend(ran.map(|target| format!("{:?}, {odd_paths}: {target}", backend.kind)));
            site.log_in_as_another();
        }
    }
    assert!(passed.is_empty(), "{}", passed.join("\n"));
}
