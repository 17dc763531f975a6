//! Commands and answers as bytes, for stores in another process.

mod bill;
mod control;

use arrayvec::ArrayVec;

use super::requests::MAX_ANSWER;
use super::{AccountChange, Answer, Command, Rekeyed, RequestKey, RequestState};
use crate::balance::Checked;
use crate::codec::{BytesError, Format, Reader, Versions, Writer, from_bytes, to_bytes};
use crate::control::ControlChange;
use crate::key::{Digest, TraceId};
use crate::ladder::Standing;
use crate::limit::{Limit, Look, Mark, SlidingLog};
use crate::lockout::{
    Account, Attempt, AttemptOutcome, Device, Factor, Login, ResultOutcome, Try, UnknownAttempt, Wider,
};
use crate::plan::{MAX_CHARGES, SubjectKeys};
use crate::policy::OnStoreError;
use crate::receipt::{CommitError, OnExpire, OwnedCost, Receipt};
use crate::time::{Span, Timestamp};

/// The versions in which commands and answers are read: they change with every record that they hold.
const VERSIONS: Versions = Versions::FIRST
    .containing(Receipt::VERSIONS)
    .containing(Limit::VERSIONS)
    .containing(Standing::VERSIONS)
    .containing(Account::VERSIONS)
    .containing(Attempt::VERSIONS)
    .containing(Device::VERSIONS)
    .containing(ControlChange::VERSIONS);
/// The most items of a list: more than any policy has rules or tiers, and each takes at least a byte.
const MAX_ITEMS: usize = 1 << 20;

impl Command {
    /// The bytes that travel to a store.
    #[must_use]
    pub fn to_bytes(&self, format: Format) -> Vec<u8> {
        to_bytes(VERSIONS, format, |out| self.write(out))
    }

    /// Reads what [`to_bytes`](Self::to_bytes) wrote.
    ///
    /// # Errors
    /// On another version, and on bytes no command has.
    pub fn from_bytes(bytes: &[u8]) -> Result<Self, BytesError> {
        from_bytes(bytes, VERSIONS, Self::read)
    }
}

impl Answer {
    /// The bytes that travel back.
    #[must_use]
    pub fn to_bytes(&self, format: Format) -> Vec<u8> {
        to_bytes(VERSIONS, format, |out| self.write(out))
    }

    /// Reads what [`to_bytes`](Self::to_bytes) wrote.
    ///
    /// # Errors
    /// On another version, and on bytes no answer has.
    pub fn from_bytes(bytes: &[u8]) -> Result<Self, BytesError> {
        from_bytes(bytes, VERSIONS, Self::read)
    }
}

/// A value inside of a command or an answer.
trait Field {
    fn write(&self, out: &mut Writer);

    fn read(from: &mut Reader<'_>) -> Result<Self, BytesError>
    where
        Self: Sized;
}

/// Which variant it is, then what it holds.
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
            Self::GiveBack(receipt) => put(out, 2, &[receipt]),
            Self::Renew(receipt) => put(out, 3, &[receipt]),
            Self::Reserve { receipt, ttl, on_expire } => put(out, 4, &[receipt, ttl, on_expire]),
            Self::Commit { id, cost } => put(out, 5, &[id, cost]),
            Self::Release { id } => put(out, 6, &[id]),
            Self::Pause { keys, until } => put(out, 7, &[keys, until]),
            Self::Forgive { keys } => put(out, 8, &[keys]),
            Self::BeginLogin { login, tried } => put(out, 9, &[login, tried]),
            Self::EndLogin { login, attempt, success, nonce } => put(out, 10, &[login, attempt, success, nonce]),
            Self::ChangeAccount { account, change } => put(out, 11, &[account, change]),
            Self::Limit { key, limit, cost, id } => put(out, 12, &[key, limit, cost, id]),
            Self::ReadStanding { key } => put(out, 13, &[key]),
            Self::ReadAccount { account } => put(out, 14, &[account]),
            Self::ReadBlock { keys } => put(out, 15, &[keys]),
            Self::Settle(bill) => put(out, 16, &[bill]),
            Self::Rekey(rekeyed) => put(out, 17, &[rekeyed]),
            Self::Control(change) => put(out, 30, &[change]),
            Self::ReadControl { after, most } => put(out, 31, &[after, most]),
            Self::BeginRequest { key, life, repeats } => put(out, 40, &[key, life, repeats]),
            Self::EndRequest { key, answer, life } => put(out, 41, &[key, answer, life]),
        }
    }

    fn read(from: &mut Reader<'_>) -> Result<Self, BytesError> {
        Ok(match from.byte()? {
            1 => Self::Refund(take(from)?),
            2 => Self::GiveBack(take(from)?),
            3 => Self::Renew(take(from)?),
            4 => Self::Reserve { receipt: take(from)?, ttl: take(from)?, on_expire: take(from)? },
            5 => Self::Commit { id: take(from)?, cost: take(from)? },
            6 => Self::Release { id: take(from)? },
            7 => Self::Pause { keys: take(from)?, until: take(from)? },
            8 => Self::Forgive { keys: take(from)? },
            9 => Self::BeginLogin { login: take(from)?, tried: take(from)? },
            10 => Self::EndLogin { login: take(from)?, attempt: take(from)?, success: take(from)?, nonce: take(from)? },
            11 => Self::ChangeAccount { account: take(from)?, change: take(from)? },
            12 => Self::Limit { key: take(from)?, limit: take(from)?, cost: take(from)?, id: take(from)? },
            13 => Self::ReadStanding { key: take(from)? },
            14 => Self::ReadAccount { account: take(from)? },
            15 => Self::ReadBlock { keys: take(from)? },
            16 => Self::Settle(take(from)?),
            17 => Self::Rekey(take(from)?),
            30 => Self::Control(take(from)?),
            31 => Self::ReadControl { after: take(from)?, most: take(from)? },
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
            Self::Attempted(outcome) => put(out, 5, &[outcome]),
            Self::LoginEnded(ended) => put(out, 6, &[ended]),
            Self::Limited(checked) => put(out, 7, &[checked]),
            Self::Standing(standing) => put(out, 8, &[standing]),
            Self::Account(account) => put(out, 9, &[account]),
            Self::Blocked(until) => put(out, 10, &[until]),
            Self::Settled(outcome) => put(out, 11, &[outcome]),
            Self::Controlled { number } => put(out, 30, &[number]),
            Self::Control(page) => put(out, 31, &[page]),
            Self::Request(state) => put(out, 40, &[state]),
        }
    }

    fn read(from: &mut Reader<'_>) -> Result<Self, BytesError> {
        Ok(match from.byte()? {
            1 => Self::Done,
            2 => Self::Refunded { first: take(from)? },
            3 => Self::Renewed(take(from)?),
            4 => Self::Ended(take(from)?),
            5 => Self::Attempted(take(from)?),
            6 => Self::LoginEnded(take(from)?),
            7 => Self::Limited(take(from)?),
            8 => Self::Standing(take(from)?),
            9 => Self::Account(take(from)?),
            10 => Self::Blocked(take(from)?),
            11 => Self::Settled(take(from)?),
            30 => Self::Controlled { number: take(from)? },
            31 => Self::Control(take(from)?),
            40 => Self::Request(take(from)?),
            _ => return Err(BytesError::Malformed("answer")),
        })
    }
}

impl Field for u64 {
    fn write(&self, out: &mut Writer) {
        out.number(*self);
    }

    fn read(from: &mut Reader<'_>) -> Result<Self, BytesError> {
        from.number()
    }
}

impl Field for u32 {
    fn write(&self, out: &mut Writer) {
        out.number(u64::from(*self));
    }

    fn read(from: &mut Reader<'_>) -> Result<Self, BytesError> {
        Self::try_from(from.number()?).map_err(|_| BytesError::Malformed("number"))
    }
}

impl Field for bool {
    fn write(&self, out: &mut Writer) {
        out.byte(u8::from(*self));
    }

    fn read(from: &mut Reader<'_>) -> Result<Self, BytesError> {
        match from.byte()? {
            0 => Ok(false),
            1 => Ok(true),
            _ => Err(BytesError::Malformed("flag")),
        }
    }
}

impl<T: Field> Field for Option<T> {
    fn write(&self, out: &mut Writer) {
        self.is_some().write(out);
        if let Some(value) = self {
            value.write(out);
        }
    }

    fn read(from: &mut Reader<'_>) -> Result<Self, BytesError> {
        Ok(if take(from)? { Some(take(from)?) } else { None })
    }
}

impl<T: Field, E: Field> Field for Result<T, E> {
    fn write(&self, out: &mut Writer) {
        self.is_ok().write(out);
        match self {
            Ok(value) => value.write(out),
            Err(error) => error.write(out),
        }
    }

    fn read(from: &mut Reader<'_>) -> Result<Self, BytesError> {
        Ok(if take(from)? { Ok(take(from)?) } else { Err(take(from)?) })
    }
}

impl<T: Field> Field for ArrayVec<T, MAX_CHARGES> {
    fn write(&self, out: &mut Writer) {
        out.number(self.len() as u64);
        self.iter().for_each(|item| item.write(out));
    }

    fn read(from: &mut Reader<'_>) -> Result<Self, BytesError> {
        (0..from.count(MAX_CHARGES)?).map(|_| take(from)).collect()
    }
}

impl Field for Timestamp {
    fn write(&self, out: &mut Writer) {
        out.number(self.micros());
    }

    fn read(from: &mut Reader<'_>) -> Result<Self, BytesError> {
        from.number().map(Self::from_micros)
    }
}

impl Field for Span {
    fn write(&self, out: &mut Writer) {
        out.number(self.micros());
    }

    fn read(from: &mut Reader<'_>) -> Result<Self, BytesError> {
        from.number().map(Self::from_micros)
    }
}

impl Field for Digest {
    fn write(&self, out: &mut Writer) {
        out.wide(self.to_u128());
    }

    fn read(from: &mut Reader<'_>) -> Result<Self, BytesError> {
        from.wide().map(Self::from_u128)
    }
}

impl Field for TraceId {
    fn write(&self, out: &mut Writer) {
        out.wide(self.to_u128());
    }

    fn read(from: &mut Reader<'_>) -> Result<Self, BytesError> {
        from.wide().map(Self::from_u128)
    }
}

impl Field for Box<[u8]> {
    fn write(&self, out: &mut Writer) {
        out.bytes(self);
    }

    fn read(from: &mut Reader<'_>) -> Result<Self, BytesError> {
        from.bytes(MAX_ANSWER).map(Self::from)
    }
}

impl Field for RequestKey {
    fn write(&self, out: &mut Writer) {
        let Self { id, request, by } = self;
        let fields: [&dyn Field; 3] = [id, request, by];
        fields.into_iter().for_each(|field| field.write(out));
    }

    fn read(from: &mut Reader<'_>) -> Result<Self, BytesError> {
        Ok(Self { id: take(from)?, request: take(from)?, by: take(from)? })
    }
}

impl Field for RequestState {
    fn write(&self, out: &mut Writer) {
        match self {
            Self::Begun => put(out, 0, &[]),
            Self::UnderWay => put(out, 1, &[]),
            Self::Answered(answer) => put(out, 2, &[answer]),
            Self::Reused => put(out, 3, &[]),
        }
    }

    fn read(from: &mut Reader<'_>) -> Result<Self, BytesError> {
        match from.byte()? {
            0 => Ok(Self::Begun),
            1 => Ok(Self::UnderWay),
            2 => Ok(Self::Answered(take(from)?)),
            3 => Ok(Self::Reused),
            _ => Err(BytesError::Malformed("request")),
        }
    }
}

impl Field for Limit {
    fn write(&self, out: &mut Writer) {
        Self::write(self, out);
    }

    fn read(from: &mut Reader<'_>) -> Result<Self, BytesError> {
        Self::read(from)
    }
}

impl Field for Box<Receipt> {
    fn write(&self, out: &mut Writer) {
        Receipt::write(self, out);
    }

    fn read(from: &mut Reader<'_>) -> Result<Self, BytesError> {
        Receipt::read(from).map(Self::new)
    }
}

impl Field for Box<Standing> {
    fn write(&self, out: &mut Writer) {
        Standing::write(self, out);
    }

    fn read(from: &mut Reader<'_>) -> Result<Self, BytesError> {
        Standing::read(from).map(Self::new)
    }
}

impl Field for Box<Account> {
    fn write(&self, out: &mut Writer) {
        Account::write(self, out);
    }

    fn read(from: &mut Reader<'_>) -> Result<Self, BytesError> {
        Account::read(from).map(Self::new)
    }
}

impl Field for OnExpire {
    fn write(&self, out: &mut Writer) {
        (*self == Self::Release).write(out);
    }

    fn read(from: &mut Reader<'_>) -> Result<Self, BytesError> {
        Ok(if take(from)? { Self::Release } else { Self::Charge })
    }
}

impl Field for OwnedCost {
    fn write(&self, out: &mut Writer) {
        self.requests.write(out);
        self.bytes.write(out);
        out.number(self.named.len() as u64);
        for (name, amount) in &self.named {
            out.number(*name);
            out.number(*amount);
        }
    }

    fn read(from: &mut Reader<'_>) -> Result<Self, BytesError> {
        let (requests, bytes) = (take(from)?, take(from)?);
        let count = from.count(MAX_ITEMS)?;
        let named: Result<_, BytesError> = (0..count).map(|_| Ok((from.number()?, from.number()?))).collect();
        Ok(Self { requests, bytes, named: named? })
    }
}

/// In ascending order, so that equal keys have equal bytes.
impl Field for SubjectKeys {
    fn write(&self, out: &mut Writer) {
        out.number(self.balances.len() as u64);
        for (key, limit) in &self.balances {
            key.write(out);
            limit.write(out);
        }
        out.number(self.standings.len() as u64);
        self.standings.iter().for_each(|key| key.write(out));
    }

    fn read(from: &mut Reader<'_>) -> Result<Self, BytesError> {
        const WRONG: BytesError = BytesError::Malformed("subject");
        let mut keys = Self::default();
        for _ in 0..from.count(MAX_ITEMS)? {
            let (key, limit) = (take(from)?, take(from)?);
            if keys.balances.last_key_value().is_some_and(|(last, _)| *last >= key) {
                return Err(WRONG);
            }
            keys.balances.insert(key, limit);
        }
        for _ in 0..from.count(MAX_ITEMS)? {
            let key = take(from)?;
            if keys.standings.last().is_some_and(|last| *last >= key) {
                return Err(WRONG);
            }
            keys.standings.insert(key);
        }
        Ok(keys)
    }
}

impl Field for Rekeyed {
    fn write(&self, out: &mut Writer) {
        out.number(self.balances.len() as u64);
        for (old, new, limit) in &self.balances {
            [old as &dyn Field, new, limit].into_iter().for_each(|field| field.write(out));
        }
        for pairs in [&self.standings, &self.accounts] {
            out.number(pairs.len() as u64);
            for (old, new) in pairs {
                old.write(out);
                new.write(out);
            }
        }
    }

    fn read(from: &mut Reader<'_>) -> Result<Self, BytesError> {
        let count = from.count(MAX_ITEMS)?;
        let balances: Result<_, BytesError> = (0..count).map(|_| Ok((take(from)?, take(from)?, take(from)?))).collect();
        let mut pairs = || {
            let count = from.count(MAX_ITEMS)?;
            (0..count).map(|_| Ok((take(from)?, take(from)?))).collect::<Result<_, BytesError>>()
        };
        Ok(Self { balances: balances?, standings: pairs()?, accounts: pairs()? })
    }
}

impl Field for SlidingLog {
    fn write(&self, out: &mut Writer) {
        Limit::from(*self).write(out);
    }

    fn read(from: &mut Reader<'_>) -> Result<Self, BytesError> {
        Limit::read(from)?.as_sliding_log().ok_or(BytesError::Malformed("log"))
    }
}

impl Field for Login {
    fn write(&self, out: &mut Writer) {
        let Self { account, ip, locks, ceiling, on_store_error } = self;
        account.write(out);
        ip.write(out);
        out.number(locks.len() as u64);
        for (failures, span) in locks {
            failures.write(out);
            span.write(out);
        }
        ceiling.write(out);
        out.byte(match on_store_error {
            OnStoreError::Local => 0,
            OnStoreError::Open => 1,
            OnStoreError::Closed => 2,
        });
    }

    fn read(from: &mut Reader<'_>) -> Result<Self, BytesError> {
        let (account, ip) = (take(from)?, take(from)?);
        let count = from.count(MAX_ITEMS)?;
        let locks: Result<_, BytesError> = (0..count).map(|_| Ok((take(from)?, take(from)?))).collect();
        let (locks, ceiling) = (locks?, take(from)?);
        let on_store_error = match from.byte()? {
            0 => OnStoreError::Local,
            1 => OnStoreError::Open,
            2 => OnStoreError::Closed,
            _ => return Err(BytesError::Malformed("login")),
        };
        Ok(Self { account, ip, locks, ceiling, on_store_error })
    }
}

impl Field for Try {
    fn write(&self, out: &mut Writer) {
        let Self { account, address, wider, factor, device, id } = self;
        let fields: [&dyn Field; 7] = [account, address, &wider.prefix, &wider.all, &factor.0, device, id];
        fields.into_iter().for_each(|field| field.write(out));
    }

    fn read(from: &mut Reader<'_>) -> Result<Self, BytesError> {
        Ok(Self {
            account: take(from)?,
            address: take(from)?,
            wider: Wider { prefix: take(from)?, all: take(from)? },
            factor: Factor(take(from)?),
            device: take(from)?,
            id: take(from)?,
        })
    }
}

impl Field for Device {
    fn write(&self, out: &mut Writer) {
        Self::write(self, out);
    }

    fn read(from: &mut Reader<'_>) -> Result<Self, BytesError> {
        Self::read(from)
    }
}

impl Field for Attempt {
    fn write(&self, out: &mut Writer) {
        Self::write(self, out);
    }

    fn read(from: &mut Reader<'_>) -> Result<Self, BytesError> {
        Self::read(from)
    }
}

impl Field for AccountChange {
    fn write(&self, out: &mut Writer) {
        (*self == Self::Lift).write(out);
    }

    fn read(from: &mut Reader<'_>) -> Result<Self, BytesError> {
        Ok(if take(from)? { Self::Lift } else { Self::Reset })
    }
}

impl Field for AttemptOutcome {
    fn write(&self, out: &mut Writer) {
        match self {
            Self::Allowed(attempt) => put(out, 0, &[attempt]),
            Self::TooMany { until } => put(out, 1, &[until]),
            Self::Locked { until } => put(out, 2, &[until]),
        }
    }

    fn read(from: &mut Reader<'_>) -> Result<Self, BytesError> {
        match from.byte()? {
            0 => Ok(Self::Allowed(take(from)?)),
            1 => Ok(Self::TooMany { until: take(from)? }),
            2 => Ok(Self::Locked { until: take(from)? }),
            _ => Err(BytesError::Malformed("attempt")),
        }
    }
}

impl Field for ResultOutcome {
    fn write(&self, out: &mut Writer) {
        let Self { allowed, locked_until, device } = self;
        allowed.write(out);
        locked_until.write(out);
        device.write(out);
    }

    fn read(from: &mut Reader<'_>) -> Result<Self, BytesError> {
        Ok(Self { allowed: take(from)?, locked_until: take(from)?, device: take(from)? })
    }
}

impl Field for UnknownAttempt {
    fn write(&self, _: &mut Writer) {}

    fn read(_: &mut Reader<'_>) -> Result<Self, BytesError> {
        Ok(Self)
    }
}

impl Field for CommitError {
    fn write(&self, out: &mut Writer) {
        (*self == Self::OtherCost).write(out);
    }

    fn read(from: &mut Reader<'_>) -> Result<Self, BytesError> {
        Ok(if take(from)? { Self::OtherCost } else { Self::Unknown })
    }
}

impl Field for Checked {
    fn write(&self, out: &mut Writer) {
        let Self { look, mark, changed } = self;
        let fields: [&dyn Field; 3] = [look, mark, changed];
        fields.into_iter().for_each(|field| field.write(out));
    }

    fn read(from: &mut Reader<'_>) -> Result<Self, BytesError> {
        Ok(Self { look: take(from)?, mark: take(from)?, changed: take(from)? })
    }
}

impl Field for Look {
    fn write(&self, out: &mut Writer) {
        let Self { allowed, remaining, ready_at, reset_if_charged, reset_if_not } = self;
        let fields: [&dyn Field; 5] = [allowed, remaining, ready_at, reset_if_charged, reset_if_not];
        fields.into_iter().for_each(|field| field.write(out));
    }

    fn read(from: &mut Reader<'_>) -> Result<Self, BytesError> {
        Ok(Self {
            allowed: take(from)?,
            remaining: take(from)?,
            ready_at: take(from)?,
            reset_if_charged: take(from)?,
            reset_if_not: take(from)?,
        })
    }
}

impl Field for Mark {
    fn write(&self, out: &mut Writer) {
        self.part.write(out);
        out.number(self.amount);
        out.number(self.fraction());
    }

    fn read(from: &mut Reader<'_>) -> Result<Self, BytesError> {
        Ok(Self::new(take(from)?, from.number()?).with_fraction(from.number()?))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_rekeyed_reads_back() {
        let digest = Digest::from_u128;
        let command = Command::Rekey(Rekeyed {
            balances: vec![(digest(1), digest(2), Limit::never()), (digest(3), digest(4), Limit::never())],
            standings: vec![(digest(5), digest(6))],
            accounts: vec![(digest(7), digest(u128::MAX)), (digest(0), digest(9))],
        });
        assert_eq!(Command::from_bytes(&command.to_bytes(Format::PRESENT)), Ok(command));
    }

    #[test]
    fn the_question_until_when_a_subject_is_blocked_reads_back() {
        let (key, other) = (Digest::from_u128(7), Digest::from_u128(u128::MAX));
        let keys = SubjectKeys { balances: [(key, Limit::never())].into(), standings: [other].into() };
        let command = Command::ReadBlock { keys };
        assert_eq!(Command::from_bytes(&command.to_bytes(Format::PRESENT)), Ok(command));
        let answer = Answer::Blocked(Timestamp::from_secs(1_767_225_600));
        assert_eq!(Answer::from_bytes(&answer.to_bytes(Format::PRESENT)), Ok(answer));
    }

    #[test]
    fn the_commands_of_request_ids_read_back() {
        let (id, request) = (Digest::from_u128(7), Digest::from_u128(u128::MAX));
        let key = RequestKey { id, request, by: TraceId::from_u128(9) };
        for repeats in [None, Some(0), Some(u32::MAX)] {
            let command = Command::BeginRequest { key, life: Span::from_secs(10), repeats };
            assert_eq!(Command::from_bytes(&command.to_bytes(Format::PRESENT)), Ok(command));
        }
        for answer in [None, Some(Box::default()), Some([0, 255].into())] {
            let command = Command::EndRequest { key, answer, life: Span::MINUTE };
            assert_eq!(Command::from_bytes(&command.to_bytes(Format::PRESENT)), Ok(command));
        }
        let states = [RequestState::Begun, RequestState::UnderWay, RequestState::Reused];
        for state in states.into_iter().chain([RequestState::Answered([1, 2, 3].into())]) {
            let answer = Answer::Request(state);
            assert_eq!(Answer::from_bytes(&answer.to_bytes(Format::PRESENT)), Ok(answer));
        }
    }
}
