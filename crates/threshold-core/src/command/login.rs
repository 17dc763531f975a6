//! Login commands: finds the keys under which an attempt is counted, also in a store without room for its account or address.

use super::{AccountKey, Records, SaveReason};
use crate::balance::Balance;
use crate::key::{Digest, TraceId};
use crate::limit::Limit;
use crate::lockout::{Account, Attempt, AttemptKeys, AttemptOutcome, Login, ResultOutcome, UnknownAttempt};
use crate::time::Timestamp;

/// Counts an attempt before its secret is checked, and saves its account.
pub(super) fn begin<R: Records>(
    login: &Login,
    tried: &AttemptKeys,
    records: &mut R,
    now: Timestamp,
) -> Result<AttemptOutcome, R::Error> {
    let mut account: Option<Account> = None;
    let mut place = None;
    if let Some(own) = tried.account {
        // Before anything is counted: where there is no room at all, the attempt fails and no guess is made for free.
        let key = records.account_key(own, &tried.stand_ins, login, now)?;
        place = Some(key);
        account = Some(records.account(key)?.unwrap_or_default());
    }
    let by_device = |account: &Account| tried.device.is_some_and(|device| account.recognises(login, &device, now));
    // An attempt from a known device is not counted by its address, so the address needs no room.
    let address = match tried.address.filter(|_| !account.as_ref().is_some_and(by_device)) {
        Some(address) => Some(records.address_key(address, &tried.stand_ins, now)?),
        None => None,
    };
    let tried = AttemptKeys { address, ..*tried };
    let mut stands_in = None;
    // A stand-in for many accounts has no ceiling: it has no owner who could reset it, and would lock all of them for good.
    let open_ended = login.without_ceiling();
    let mut rules = login;
    if let Some(AccountKey::StandIn(key)) = place {
        (stands_in, rules) = (Some(key), &open_ended);
    }
    // Account and address are counted in one step. Parallel guesses cannot pass one of them before the other has
    // counted.
    let mut outcome =
        with_address(login, address, records, now, |address| rules.attempt(&tried, account.as_mut(), address, now))?;
    if let AttemptOutcome::Allowed(attempt) = &mut outcome {
        // The attempt carries the stand-in, so that its end finds the count even if the account has a record of its own
        // by then.
        attempt.folded = stands_in;
    }
    if let (Some(key), Some(account)) = (place, account) {
        // Saved whatever the outcome is: also a refused attempt may have changed the account. The reason is one that
        // evicts little, because anyone can cause it for any name.
        records.save_account(key, account, SaveReason::Attempted, rules, now)?;
    }
    Ok(outcome)
}

/// Ends an attempt after its secret was checked.
pub(super) fn end<R: Records>(
    login: &Login,
    attempt: &Attempt,
    (success, nonce): (bool, TraceId),
    records: &mut R,
    now: Timestamp,
) -> Result<Result<ResultOutcome, UnknownAttempt>, R::Error> {
    // By the attempt and not by the present state of the store, which may have found room since.
    if let (Some(stand_in), Some(own)) = (attempt.folded, attempt.account) {
        return end_under_stand_in(login, attempt, (stand_in, own), (success, nonce), records, now);
    }
    let mut account = match attempt.account {
        Some(key) => records.account(AccountKey::Own(key))?,
        None => None,
    };
    let ended = with_address(login, attempt.address, records, now, |address| {
        login.result(attempt, success, account.as_mut(), address, nonce, now)
    })?;
    if let (Ok(_), Some(key), Some(account)) = (&ended, attempt.account, account) {
        let reason = if success { SaveReason::LoggedIn } else { SaveReason::Changed };
        records.save_account(AccountKey::Own(key), account, reason, login, now)?;
    }
    Ok(ended)
}

/// Withdraws an attempt, so that neither its account nor its address counts it any more. Returns whether it was under way.
pub(super) fn withdraw<R: Records>(
    login: &Login,
    attempt: &Attempt,
    records: &mut R,
    now: Timestamp,
) -> Result<bool, R::Error> {
    // Where the attempt was counted, by the rules that it was counted under.
    let open_ended = login.without_ceiling();
    let (key, rules) = match attempt.folded {
        Some(stand_in) => (Some(AccountKey::StandIn(stand_in)), &open_ended),
        None => (attempt.account.map(AccountKey::Own), login),
    };
    if let Some(key) = key {
        let Some(mut account) = records.account(key)? else { return Ok(false) };
        // It was withdrawn before, or is a failure by now. Its address must not get a charge back twice.
        if !account.withdraw(rules, attempt, now) {
            return Ok(false);
        }
        records.save_account(key, account, SaveReason::Changed, rules, now)?;
    }
    with_address(login, attempt.address, records, now, |address| attempt.give_back_to(address, now))?;
    Ok(true)
}

/// Ends an attempt that was counted under a stand-in for many accounts. A success makes its device known under the account's
/// own key, if there is room for it by now: a token that no account remembers would be worthless.
fn end_under_stand_in<R: Records>(
    login: &Login,
    attempt: &Attempt,
    (stand_in, own): (Digest, Digest),
    (success, nonce): (bool, TraceId),
    records: &mut R,
    now: Timestamp,
) -> Result<Result<ResultOutcome, UnknownAttempt>, R::Error> {
    // The same rules as at the beginning of the attempt, or the end would find a ceiling that `begin` did not apply.
    let rules = login.without_ceiling();
    let mut counted = records.account(AccountKey::StandIn(stand_in))?;
    let ended = with_address(login, attempt.address, records, now, |address| {
        rules.result(attempt, success, counted.as_mut(), address, nonce, now)
    })?;
    let mut outcome = match ended {
        Ok(outcome) => outcome,
        Err(error) => return Ok(Err(error)),
    };
    if let Some(counted) = counted {
        records.save_account(AccountKey::StandIn(stand_in), counted, SaveReason::Changed, &rules, now)?;
    }
    if success {
        let mut account = records.account(AccountKey::Own(own))?.unwrap_or_default();
        let device = account.remember_device(attempt, nonce, now);
        let kept = records.save_account(AccountKey::Own(own), account, SaveReason::LoggedIn, login, now)?;
        // The token is returned only if it was saved. Otherwise its owner would count on a device that the account does
        // not know.
        outcome.device = device.filter(|_| kept);
    }
    Ok(Ok(outcome))
}

/// Calls `change` with the balance of the attempt's address; with an empty one where its address is not counted.
fn with_address<R: Records, T>(
    login: &Login,
    address: Option<Digest>,
    records: &mut R,
    now: Timestamp,
    change: impl FnOnce(&mut Balance) -> T,
) -> Result<T, R::Error> {
    let Some(key) = address else { return Ok(change(&mut Balance::default())) };
    records.balances(&[(key, Limit::from(login.ip))], now, |balances| match balances {
        [balance, ..] => change(balance),
        [] => change(&mut Balance::default()),
    })
}
