//! Tokens of a language model: the most that a call may use is reserved, and what it has used is committed.
//!
//! ```console
//! $ cargo run --example llm
//! ```

use std::{error::Error, time::Duration};

use threshold_limiter::{ActualCost, Facts, Limiter, OnExpire, Policy, Reserved};

const POLICY: &str = r#"
    [[rule]]
    name = "tokens"
    per = ["user"]
    limit = "2000/day"
    cost = "tokens"
"#;
/// The longest that a call takes. A reservation that nobody ends stays charged then, because the model may have answered.
const LONGEST: Duration = Duration::from_secs(120);

/// Asks the model, which is told to use at most this many tokens, if the user has so many left.
fn ask(limiter: &Limiter, user: &str, most: u64) -> Result<String, Box<dyn Error>> {
    let facts = Facts { user: Some(user), costs: &[("tokens", most)], ..Facts::default() };
    let Reserved { decision, reservation } = limiter.reserve(&facts, LONGEST, OnExpire::Charge)?;
    let Some(id) = reservation else { return Ok(format!("not asked: {} tokens are left", left(limiter, user)?)) };
    assert!(decision.allowed());
    match complete(most) {
        Ok(used) => limiter.commit(id, &ActualCost { costs: &[("tokens", used)], ..ActualCost::default() })?,
        Err(error) => {
            limiter.release(id)?;
            return Err(error);
        }
    }
    Ok(format!("answered: {} tokens are left", left(limiter, user)?))
}

fn left(limiter: &Limiter, user: &str) -> Result<u64, Box<dyn Error>> {
    let decision = limiter.peek(&Facts { user: Some(user), ..Facts::default() })?;
    Ok(decision.readings.first().map_or(0, |reading| reading.remaining))
}

/// Stands for the call of the model, whose answer says how many tokens it has used.
fn complete(most: u64) -> Result<u64, Box<dyn Error>> {
    Ok(most.min(420))
}

fn main() -> Result<(), Box<dyn Error>> {
    let limiter = Limiter::new(Policy::parse(POLICY, &|name| std::env::var(name).ok())?);
    for _ in 0..4 {
        println!("{}", ask(&limiter, "ada", 1_000)?);
    }
    Ok(())
}
