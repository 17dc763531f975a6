//! Commands and answers as bytes, for stores in another process.
//!
//! The number of a variant is part of the format and is never reused. Each family of commands has a file of its own with the
//! values that it carries.

mod basic;
mod bill;
mod budgets;
mod control;
mod login;
mod receipts;
mod requests;

use super::{Answer, Command};
use crate::codec::{BytesError, Format, Reader, Versions, Writer, from_bytes, to_bytes};
use crate::control::ControlChange;
use crate::ladder::Standing;
use crate::limit::Limit;
use crate::lockout::{Account, Attempt, Device};
use crate::receipt::Receipt;

/// The versions of commands and answers that are read. They change with every record that a command can hold.
// Nested records have no version byte of their own. If one was missing here, its next version would be read as the
// present one.
const VERSIONS: Versions = Versions::FIRST
    .containing(Receipt::VERSIONS)
    .containing(Limit::VERSIONS)
    .containing(Standing::VERSIONS)
    .containing(Account::VERSIONS)
    .containing(Attempt::VERSIONS)
    .containing(Device::VERSIONS)
    .containing(ControlChange::VERSIONS);
/// The largest number of items in a list: more than any policy has rules or tiers. Each item takes at least a byte, so a
/// longer count could only come from malformed bytes.
const MAX_ITEMS: usize = 1 << 20;

impl Command {
    /// Returns the bytes that are sent to a store.
    #[must_use]
    pub fn to_bytes(&self, format: Format) -> Vec<u8> {
        to_bytes(VERSIONS, format, |out| self.write(out))
    }

    /// Parses what [`to_bytes`](Self::to_bytes) wrote.
    ///
    /// # Errors
    /// Fails on an unknown version and on malformed bytes.
    pub fn from_bytes(bytes: &[u8]) -> Result<Self, BytesError> {
        from_bytes(bytes, VERSIONS, Self::read)
    }
}

impl Answer {
    /// Returns the bytes that a store sends back.
    #[must_use]
    pub fn to_bytes(&self, format: Format) -> Vec<u8> {
        to_bytes(VERSIONS, format, |out| self.write(out))
    }

    /// Parses what [`to_bytes`](Self::to_bytes) wrote.
    ///
    /// # Errors
    /// Fails on an unknown version and on malformed bytes.
    pub fn from_bytes(bytes: &[u8]) -> Result<Self, BytesError> {
        from_bytes(bytes, VERSIONS, Self::read)
    }
}

/// A value inside a command or an answer.
trait Field {
    fn write(&self, out: &mut Writer);

    fn read(from: &mut Reader<'_>) -> Result<Self, BytesError>
    where
        Self: Sized;
}

/// Writes the number of a variant, then its fields.
fn put(out: &mut Writer, variant: u8, fields: &[&dyn Field]) {
    out.byte(variant);
    fields.iter().for_each(|field| field.write(out));
}

fn take<T: Field>(from: &mut Reader<'_>) -> Result<T, BytesError> {
    T::read(from)
}

impl Field for Command {
    fn write(&self, out: &mut Writer) {
        match self {
            Self::Refund(receipt) => put(out, 1, &[receipt]),
            Self::GiveBack { receipt, credit } => put(out, 2, &[receipt, credit]),
            Self::Renew(receipt) => put(out, 3, &[receipt]),
            Self::SaveReservation { receipt, ttl, on_expire } => put(out, 4, &[receipt, ttl, on_expire]),
            Self::Commit { id, cost } => put(out, 5, &[id, cost]),
            Self::Release { id } => put(out, 6, &[id]),
            Self::Pause { keys, length } => put(out, 7, &[keys, length]),
            Self::Forgive { keys } => put(out, 8, &[keys]),
            Self::BeginLogin { login, keys } => put(out, 9, &[login, keys]),
            Self::EndLogin { login, attempt, success, nonce } => put(out, 10, &[login, attempt, success, nonce]),
            Self::ChangeAccount { account, change } => put(out, 11, &[account, change]),
            Self::Limit { key, limit, cost, id } => put(out, 12, &[key, limit, cost, id]),
            Self::ReadStanding { key } => put(out, 13, &[key]),
            Self::ReadAccount { account } => put(out, 14, &[account]),
            Self::ReadBlock { keys } => put(out, 15, &[keys]),
            Self::Settle(bill) => put(out, 16, &[bill]),
            Self::Rekey(rekeyed) => put(out, 17, &[rekeyed]),
            Self::Expire { id } => put(out, 18, &[id]),
            Self::EndReservation { id, end } => put(out, 19, &[id, end]),
            Self::Reserve { bill, terms } => put(out, 20, &[bill, terms]),
            Self::ReadDevice { login, account, device } => put(out, 22, &[login, account, device]),
            Self::WithdrawLogin { login, attempt } => put(out, 23, &[login, attempt]),
            Self::Credit { key, limit, amount } => put(out, 24, &[key, limit, amount]),
            Self::Control(change) => put(out, 30, &[change]),
            Self::ReadControl { after, most } => put(out, 31, &[after, most]),
            Self::ControlAll { changes, after } => put(out, 32, &[changes, after]),
            Self::BeginRequest { key, life, repeats } => put(out, 40, &[key, life, repeats]),
            Self::EndRequest { key, answer, life } => put(out, 41, &[key, answer, life]),
        }
    }

    fn read(from: &mut Reader<'_>) -> Result<Self, BytesError> {
        Ok(match from.byte()? {
            1 => Self::Refund(take(from)?),
            2 => Self::GiveBack { receipt: take(from)?, credit: take(from)? },
            3 => Self::Renew(take(from)?),
            4 => Self::SaveReservation { receipt: take(from)?, ttl: take(from)?, on_expire: take(from)? },
            5 => Self::Commit { id: take(from)?, cost: take(from)? },
            6 => Self::Release { id: take(from)? },
            7 => Self::Pause { keys: take(from)?, length: take(from)? },
            8 => Self::Forgive { keys: take(from)? },
            9 => Self::BeginLogin { login: take(from)?, keys: take(from)? },
            10 => Self::EndLogin { login: take(from)?, attempt: take(from)?, success: take(from)?, nonce: take(from)? },
            11 => Self::ChangeAccount { account: take(from)?, change: take(from)? },
            12 => Self::Limit { key: take(from)?, limit: take(from)?, cost: take(from)?, id: take(from)? },
            13 => Self::ReadStanding { key: take(from)? },
            14 => Self::ReadAccount { account: take(from)? },
            15 => Self::ReadBlock { keys: take(from)? },
            16 => Self::Settle(take(from)?),
            17 => Self::Rekey(take(from)?),
            18 => Self::Expire { id: take(from)? },
            19 => Self::EndReservation { id: take(from)?, end: take(from)? },
            20 => Self::Reserve { bill: take(from)?, terms: take(from)? },
            22 => Self::ReadDevice { login: take(from)?, account: take(from)?, device: take(from)? },
            23 => Self::WithdrawLogin { login: take(from)?, attempt: take(from)? },
            24 => Self::Credit { key: take(from)?, limit: take(from)?, amount: take(from)? },
            30 => Self::Control(take(from)?),
            31 => Self::ReadControl { after: take(from)?, most: take(from)? },
            32 => Self::ControlAll { changes: take(from)?, after: take(from)? },
            40 => Self::BeginRequest { key: take(from)?, life: take(from)?, repeats: take(from)? },
            41 => Self::EndRequest { key: take(from)?, answer: take(from)?, life: take(from)? },
            _ => return Err(BytesError::Malformed("command")),
        })
    }
}

impl Field for Answer {
    fn write(&self, out: &mut Writer) {
        match self {
            Self::Done => put(out, 1, &[]),
            Self::Refunded { first } => put(out, 2, &[first]),
            Self::Renewed(receipt) => put(out, 3, &[receipt]),
            Self::Ended(ended) => put(out, 4, &[ended]),
            Self::Attempted { outcome, at } => put(out, 5, &[outcome, at]),
            Self::LoginEnded { ended, at } => put(out, 6, &[ended, at]),
            Self::Limited { checked, at } => put(out, 7, &[checked, at]),
            Self::Standing(standing) => put(out, 8, &[standing]),
            Self::Account(account) => put(out, 9, &[account]),
            Self::Blocked(until) => put(out, 10, &[until]),
            Self::Settled(outcome) => put(out, 11, &[outcome]),
            Self::Recognised(known) => put(out, 13, &[known]),
            Self::Controlled { number } => put(out, 30, &[number]),
            Self::Control(page) => put(out, 31, &[page]),
            Self::Outdated => put(out, 32, &[]),
            Self::Request(state) => put(out, 40, &[state]),
        }
    }

    fn read(from: &mut Reader<'_>) -> Result<Self, BytesError> {
        Ok(match from.byte()? {
            1 => Self::Done,
            2 => Self::Refunded { first: take(from)? },
            3 => Self::Renewed(take(from)?),
            4 => Self::Ended(take(from)?),
            5 => Self::Attempted { outcome: take(from)?, at: take(from)? },
            6 => Self::LoginEnded { ended: take(from)?, at: take(from)? },
            7 => Self::Limited { checked: take(from)?, at: take(from)? },
            8 => Self::Standing(take(from)?),
            9 => Self::Account(take(from)?),
            10 => Self::Blocked(take(from)?),
            11 => Self::Settled(take(from)?),
            13 => Self::Recognised(take(from)?),
            30 => Self::Controlled { number: take(from)? },
            31 => Self::Control(take(from)?),
            32 => Self::Outdated,
            40 => Self::Request(take(from)?),
            _ => return Err(BytesError::Malformed("answer")),
        })
    }
}
