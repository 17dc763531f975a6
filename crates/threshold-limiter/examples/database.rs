//! Limits of tenants from a table, which change while the program runs.
//!
//! ```console
//! $ cargo run --example database
//! ```

use std::{collections::BTreeMap, error::Error, sync::Arc};

use rusqlite::Connection;
use threshold_limiter::threshold_core::control::ControlChange;
use threshold_limiter::threshold_core::policy::{IdentityBuilder, Owner, Per, Rule, Setting};
use threshold_limiter::{Facts, Limiter, Policy, Timestamp};

/// Puts the limits of the table in force. Call it every few seconds, or whenever the database tells of a change. On a store that
/// other processes share, one of them does it for all.
async fn follow(db: &Connection, limiter: &Limiter) -> Result<(), Box<dyn Error>> {
    let mut rows = db.prepare("SELECT tenant, per_minute FROM limits")?;
    let rows = rows.query_map((), |row| Ok((row.get(0)?, row.get(1)?)))?;
    let mut wanted = rows.collect::<Result<BTreeMap<String, Option<u32>>, _>>()?;
    // Tenants that are no longer in the table have the limits of their tier again.
    for (_, name, _) in limiter.policy().settings().filter(|(owner, ..)| *owner == Owner::Tenant) {
        wanted.entry(name.to_owned()).or_default();
    }
    for (tenant, per_minute) in wanted {
        let setting = per_minute.map(|limit| Arc::new(setting(limit)));
        let change = ControlChange::Setting { owner: Owner::Tenant, name: tenant.into(), setting };
        for (_, name, error) in limiter.change_control(change).await? {
            eprintln!("the limit of {name} does not fit, and is not in force: {error}");
        }
    }
    Ok(())
}

fn setting(per_minute: u32) -> Setting {
    Setting {
        tier: None,
        limits: BTreeMap::from([("requests".into(), format!("{per_minute}/min").into())]),
        times: 1,
        from: Timestamp::EPOCH,
        until: Timestamp::MAX,
        by: "database".into(),
        reason: "contract".into(),
    }
}

fn show(limiter: &Limiter) -> Result<(), Box<dyn Error>> {
    for tenant in ["acme", "other"] {
        let decision = limiter.check(&Facts { tenant: Some(tenant), ..Facts::default() })?;
        println!("{tenant}: {} a minute", decision.readings.first().map_or(0, |reading| reading.limit));
    }
    Ok(())
}

#[tokio::main(flavor = "current_thread")]
async fn main() -> Result<(), Box<dyn Error>> {
    let rule = Rule::builder("tenant").per([Per::Tenant]).limit("tier");
    let policy = Policy::builder().identity(IdentityBuilder::new().default_tier("free"));
    let policy = policy.tier("free", [("requests", "3/min")]).rule(rule).build()?;
    let limiter = Limiter::new(policy);
    let db = Connection::open_in_memory()?;
    db.execute_batch("CREATE TABLE limits (tenant TEXT PRIMARY KEY, per_minute INTEGER NOT NULL)")?;
    for change in ["INSERT INTO limits VALUES ('acme', 50)", "UPDATE limits SET per_minute = 200", "DELETE FROM limits"]
    {
        db.execute_batch(change)?;
        follow(&db, &limiter).await?;
        show(&limiter)?;
    }
    Ok(())
}
