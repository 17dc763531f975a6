//! Compares the store with the ledger after a history.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use super::clients::pairs;
use super::node::{Ask, Request, Told};
use super::scenario::{GUESSES, HOT_LIMIT, TENANT_LIMIT, USER_LIMIT};
use super::world::World;

/// How long late answers may still be withdrawn. A busy machine needs the most of it.
const PATIENCE: Duration = Duration::from_secs(10);
/// What is wrong by then stays wrong. What is right must stay right.
const AGAIN: Duration = Duration::from_millis(1_300);

/// Returns what is wrong with the store.
pub(super) async fn judge(world: &World, is_rotated: bool) -> Result<(), Vec<String>> {
    balances(world).await?;
    tokio::time::sleep(AGAIN).await;
    balances(world).await?;
    kept(world).await?;
    if is_rotated {
        world.note("the end of the rotation");
        world.rotate(2, None).await;
        balances(world).await?;
        kept(world).await?;
    }
    totals(world).await
}

fn limit_of(request: &Request, is_tenant: bool) -> u64 {
    match (&*request.category, is_tenant) {
        ("hot", _) => HOT_LIMIT,
        (_, false) => USER_LIMIT,
        (_, true) => TENANT_LIMIT,
    }
}

/// Reads what every key has used. Pairs have tenants in common, which are then read again.
async fn read(world: &World) -> Result<BTreeMap<String, (i64, i64)>, Vec<String>> {
    let mut all = BTreeMap::new();
    for (number, request) in pairs(&world.scenario).into_iter().enumerate() {
        let node = number % world.scenario.nodes;
        let used = world.used(node, request.clone()).await;
        let used = used.map_err(|told| vec![format!("a peek of {request:?} at node {node}: {told:?}")])?;
        for (place, key) in super::clients::keys(&request).into_iter().enumerate() {
            let limit = i64::try_from(limit_of(&request, place == 0)).unwrap();
            all.insert(key, (used[place], limit));
        }
    }
    Ok(all)
}

/// Compares what every key has used with the ledger, until it agrees.
async fn balances(world: &World) -> Result<(), Vec<String>> {
    let begun = Instant::now();
    loop {
        let wrong = differences(world, &read(world).await?);
        if wrong.is_empty() {
            return Ok(());
        }
        if begun.elapsed() > PATIENCE {
            return Err(wrong);
        }
        for node in world.nodes() {
            let _ = world.ask(node, Ask::CatchUp).await;
        }
        tokio::time::sleep(Duration::from_millis(300)).await;
    }
}

fn differences(world: &World, used: &BTreeMap<String, (i64, i64)>) -> Vec<String> {
    let bounds = world.ledger.bounds(world.scenario.kind.is_cluster());
    let wrong = used.iter().filter_map(|(key, (used, limit))| {
        let bounds = bounds.get(key).copied().unwrap_or_default();
        // A bucket refills by less than a unit in a history, and a part of a unit counts as used.
        let slack = i64::from(key.starts_with("token-bucket"));
        let low = (bounds.low - slack).clamp(0, *limit);
        let high = (bounds.high + slack).clamp(0, *limit);
        let is_right = (low..=high).contains(used);
        let story = || world.ledger.story(key, world.start).join("\n    ");
        (!is_right).then(|| format!("{key}: {used} of {limit} are used and not {low} to {high}\n    {}", story()))
    });
    // One story is enough to begin with.
    let wrong: Vec<String> = wrong.collect();
    wrong.into_iter().enumerate().map(|(at, text)| first_lines(&text, if at == 0 { 80 } else { 1 })).collect()
}

fn first_lines(text: &str, most: usize) -> String {
    text.lines().take(most).collect::<Vec<_>>().join("\n")
}

/// Compares locks, penalties, bans and settings.
async fn kept(world: &World) -> Result<(), Vec<String>> {
    let mut wrong = Vec::new();
    let request = |user: &str, tenant: &str, category: &str| {
        let (user, tenant, category) = (user.to_owned(), tenant.to_owned(), category.to_owned());
        Request { user, tenant, category, cost: 1 }
    };
    let any = world.scenario.algorithms[0];
    for node in world.nodes() {
        let told = world.ask_until_answered(node, Ask::Check(request("banned", "t0", any))).await;
        if told != (Told::Denied { barred: true }) {
            wrong.push(format!("the banned user at node {node}: {told:?}"));
        }
        let double = Request { cost: 0, ..request("nobody", "double", any) };
        match world.ask_until_answered(node, Ask::Peek(double)).await {
            Told::Left { limits, .. } if limits[0] == 2 * TENANT_LIMIT => {}
            told => wrong.push(format!("the tenant with a setting at node {node}: {told:?}")),
        }
    }
    for what in world.ledger.kept(1) {
        if let Some(user) = what.strip_prefix("ban ") {
            let told = world.ask_until_answered(0, Ask::Check(request(user, "t0", "striker"))).await;
            if told != (Told::Denied { barred: true }) {
                wrong.push(format!("{user}, who was banned: {told:?}"));
            }
        }
    }
    for what in world.ledger.kept(GUESSES) {
        if let Some(account) = what.strip_prefix("lock ") {
            let attempt = Ask::Attempt { account: account.to_owned(), ip: "10.1.0.1".to_owned() };
            let told = world.ask_until_answered(0, attempt).await;
            if told != (Told::Denied { barred: true }) {
                wrong.push(format!("{account}, which was locked: {told:?}"));
            }
        }
    }
    for (account, guesses) in world.ledger.guesses() {
        if guesses > GUESSES * (1 + world.ledger.losses()) {
            wrong.push(format!("{guesses} guesses at {account}"));
        }
    }
    if wrong.is_empty() { Ok(()) } else { Err(wrong) }
}

/// Uses up some limits, and compares everything that was admitted with them.
async fn totals(world: &World) -> Result<(), Vec<String>> {
    let mut wrong = Vec::new();
    let bounds = world.ledger.bounds(world.scenario.kind.is_cluster());
    let times = i64::try_from(1 + world.ledger.losses()).unwrap();
    for (number, request) in pairs(&world.scenario).into_iter().enumerate() {
        if request.category == "hot" {
            continue;
        }
        let keys = super::clients::keys(&request);
        let mut more = 0;
        // Every other user, so that a tenant's total is met by two of them.
        let one = Request { cost: 1, ..request.clone() };
        while number % 2 == 0
            && matches!(world.ask_until_answered(0, Ask::Check(one.clone())).await, Told::Admitted { .. })
        {
            more += 1;
        }
        for (place, key) in keys.iter().enumerate() {
            let own = bounds.get(key).copied().unwrap_or_default();
            let limit = i64::try_from(limit_of(&request, place == 0)).unwrap();
            let slack = i64::from(key.starts_with("token-bucket"));
            // The rest of a tenant was perhaps used by another user.
            let total = own.admitted + if place == 1 { more } else { 0 };
            if total > limit * times + slack {
                wrong.push(format!("{key}: {total} admitted of {limit}, with {} losses", times - 1));
            }
            let lives = i64::try_from(1 + world.ledger.kills() + world.ledger.whole_losses()).unwrap();
            if world.scenario.mode == "local" && own.alone > limit * lives {
                wrong.push(format!("{key}: {} of {limit} admitted without the store, in {lives} lives", own.alone));
            }
        }
    }
    if wrong.is_empty() { Ok(()) } else { Err(wrong) }
}
