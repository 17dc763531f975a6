//! Every operation on stored state.
//!
//! A [`Command`] is owned and knows no policy, so that it can travel to the store, finish after its caller has left, and
//! be repeated. [`execute`] carries it out on the [`Records`] that it names; a store calls it inside its own lock,
//! transaction or compare-and-set. A new operation is written here, once, and works on every store.

mod bill;
mod bytes;
mod login;
mod rekey;
mod requests;

use arrayvec::ArrayVec;

use crate::balance::{Balance, Checked};
use crate::bill::OwnedBill;
use crate::control::{ControlChange, ControlPage, MAX_CHANGES_READ};
use crate::key::{Digest, TraceId};
use crate::ladder::Standing;
use crate::limit::Limit;
use crate::lockout::{Account, Attempt, AttemptOutcome, Login, ResultOutcome, Try, UnknownAttempt, Wider};
use crate::plan::{MAX_CHARGES, SubjectKeys};
use crate::receipt::{CommitError, OnExpire, OwnedCost, Receipt, Reservation, UnknownReservation};
use crate::settle::Outcome;
use crate::time::{Span, Timestamp};

pub use rekey::{Rekeyed, Renamed};
pub use requests::{RequestKey, RequestRecord, RequestState};

/// One operation on stored state.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Command {
    /// Settles a bill, as [`settle`](crate::settle()) does. Answered by [`Answer::Settled`].
    Settle(Box<OwnedBill>),
    /// Gives back what a receipt says was charged, once. Answered by [`Answer::Refunded`].
    Refund(Box<Receipt>),
    /// Gives back what was taken out of a [`Pending`](crate::receipt::Pending), whose owner takes it out once: nothing
    /// has to be remembered, and so nothing can be full. Answered by [`Answer::Done`].
    GiveBack(Box<Receipt>),
    /// Gives back what was charged and charges it again, as if the request came now. Answered by [`Answer::Renewed`].
    Renew(Box<Receipt>),
    /// Keeps a reservation of what a receipt says was charged. Answered by [`Answer::Done`].
    Reserve {
        /// What was charged.
        receipt: Box<Receipt>,
        /// How long it is kept.
        ttl: Span,
        /// What happens when nobody ends it by then.
        on_expire: OnExpire,
    },
    /// Ends a reservation with what it really cost. Answered by [`Answer::Ended`].
    Commit {
        /// Which reservation.
        id: TraceId,
        /// What it cost.
        cost: OwnedCost,
    },
    /// Ends a reservation without any cost. Answered by [`Answer::Ended`].
    Release {
        /// Which reservation.
        id: TraceId,
    },
    /// Denies a subject until a moment. Answered by [`Answer::Done`].
    Pause {
        /// Whose budgets.
        keys: SubjectKeys,
        /// Until when.
        until: Timestamp,
    },
    /// Forgets what a subject has used, and its strikes. Answered by [`Answer::Done`].
    Forgive {
        /// Whose budgets and standings.
        keys: SubjectKeys,
    },
    /// Counts a login whose secret is about to be checked. Answered by [`Answer::Attempted`].
    BeginLogin {
        /// How logins are protected.
        login: Login,
        /// Whose login it is.
        tried: Try,
    },
    /// Ends a login whose secret was checked. Answered by [`Answer::LoginEnded`].
    EndLogin {
        /// How logins are protected.
        login: Login,
        /// Which login.
        attempt: Attempt,
        /// Whether the secret was right.
        success: bool,
        /// Fresh and random: a new device gets it.
        nonce: TraceId,
    },
    /// Changes an account. Answered by [`Answer::Done`].
    ChangeAccount {
        /// Which account.
        account: Digest,
        /// How.
        change: AccountChange,
    },
    /// Moves what is stored under digests of an old secret. Answered by [`Answer::Done`].
    Rekey(Rekeyed),
    /// How it stands with a subject. Answered by [`Answer::Standing`].
    ReadStanding {
        /// Which subject.
        key: Digest,
    },
    /// Until when a subject is denied, whatever fits, by a pause or `block_for`. Answered by [`Answer::Blocked`].
    ReadBlock {
        /// Whose budgets.
        keys: SubjectKeys,
    },
    /// What is known of an account. Answered by [`Answer::Account`].
    ReadAccount {
        /// Which account.
        account: Digest,
    },
    /// Decides one cost on one key under one limit, which comes with the command. Answered by [`Answer::Limited`].
    Limit {
        /// Whose budget.
        key: Digest,
        /// Under which limit.
        limit: Limit,
        /// How much; 0 only looks.
        cost: u64,
        /// Fresh and random: what is held is known by it.
        id: TraceId,
    },
    /// Changes a ban or a setting for every node. Answered by [`Answer::Controlled`].
    Control(Box<ControlChange>),
    /// Bans and settings that were changed after a number. Answered by [`Answer::Control`].
    ReadControl {
        /// The number up to which they are known; 0 where none is.
        after: u64,
        /// How many at most.
        most: u32,
    },
    /// Begins a request that has an id, unless it was begun before. Answered by [`Answer::Request`].
    BeginRequest {
        /// Which request, and who begins it.
        key: RequestKey,
        /// How long it may be under way. Where it has not ended by then, as when its node died, the next one begins it.
        life: Span,
        /// How often its answer is given again before it is begun anew; `None` for any number of times.
        repeats: Option<u32>,
    },
    /// Ends a request that was begun. Answered by [`Answer::Done`].
    EndRequest {
        /// Which request, and who began it.
        key: RequestKey,
        /// What the next one with its id is answered; `None` where it is to be carried out as if there was none before.
        answer: Option<Box<[u8]>>,
        /// How long the answer is remembered.
        life: Span,
    },
}

/// What happens to an account at the request of its owner or an operator.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum AccountChange {
    /// Its secret was reset: nothing is locked, and every device is unknown.
    Reset,
    /// An operator lifts its locks; known devices stay known.
    Lift,
}

/// What became of a command.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Answer {
    /// What settling a bill found and did.
    Settled(Box<Outcome>),
    /// It was carried out.
    Done,
    /// Whether the receipt was refunded for the first time.
    Refunded {
        /// `false` where it had been refunded, or its reservation has ended.
        first: bool,
    },
    /// The receipt of what was charged again.
    Renewed(Box<Receipt>),
    /// The keys that a reservation was charged to: there may be room under them now.
    Ended(Result<ArrayVec<Digest, MAX_CHARGES>, CommitError>),
    /// Whether the secret may be checked.
    Attempted(AttemptOutcome),
    /// What somebody is told after the secret was checked.
    LoginEnded(Result<ResultOutcome, UnknownAttempt>),
    /// What one limit said.
    Limited(Checked),
    /// How it stands with a subject; `None` where it has no strikes.
    Standing(Option<Box<Standing>>),
    /// What is known of an account.
    Account(Option<Box<Account>>),
    /// Until when a subject is denied under one of its limits at least; in the past where it is not.
    Blocked(Timestamp),
    /// A ban or a setting was changed.
    Controlled {
        /// The sequence number of the change.
        number: u64,
    },
    /// Bans and settings that were changed.
    Control(Box<ControlPage>),
    /// How it stands with a request that has an id.
    Request(RequestState),
}

impl Answer {
    /// The outcome of a bill; `None` where this answers something else.
    #[must_use]
    pub fn settled(self) -> Option<Box<Outcome>> {
        match self {
            Self::Settled(outcome) => Some(outcome),
            _ => None,
        }
    }

    /// Whether a reservation was ended; any other answer says that it is unknown.
    ///
    /// # Errors
    /// Where it was not.
    pub fn ended(self) -> Result<(), CommitError> {
        match self {
            Self::Ended(ended) => ended.map(drop),
            _ => Err(CommitError::Unknown),
        }
    }
}

/// Where an account is counted.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum AccountKey {
    /// Under its own key.
    Own(Digest),
    /// Under a key that stands in for many accounts, in a store without room for its own.
    StandIn(Digest),
}

/// Why an account is saved. It decides what may be dropped to make room for it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum SaveReason {
    /// Somebody tried to log in to it.
    Attempted,
    /// Somebody did log in to it, and its device is known now.
    LoggedIn,
    /// It was there, and has changed.
    Changed,
}

/// What is stored, as a command sees it. A store answers from copies that it has loaded, or from where it keeps them; in
/// either case nothing else may come between the first call and the last of one command.
///
/// A store that works on copies answers with an error where one has not been loaded yet, loads it, and executes the
/// command again from the start.
pub trait Records {
    /// Why a record could not be read or kept.
    type Error;

    /// Changes the balances under these keys, in one step. A key without a balance has an empty one.
    ///
    /// # Errors
    /// Where the store cannot answer.
    fn balances<T>(
        &mut self,
        charges: &[(Digest, Limit)],
        now: Timestamp,
        change: impl FnOnce(&mut [Balance]) -> T,
    ) -> Result<T, Self::Error>;

    /// As [`Balance::check`], on the balance under this key.
    ///
    /// # Errors
    /// Where the store cannot answer.
    fn check(
        &mut self,
        key: Digest,
        limit: &Limit,
        cost: u64,
        now: Timestamp,
        id: TraceId,
    ) -> Result<Checked, Self::Error> {
        self.balances(&[(key, *limit)], now, |balances| match balances {
            [balance, ..] => balance.check(limit, cost, now, id),
            [] => Balance::default().check(limit, cost, now, id),
        })
    }

    /// As [`Balance::blocked_until`], of the balance under this key.
    ///
    /// # Errors
    /// Where the store cannot answer.
    fn blocked_until(&mut self, key: Digest, limit: &Limit, now: Timestamp) -> Result<Timestamp, Self::Error> {
        let read = |balances: &mut [Balance]| balances.first().map_or(Timestamp::EPOCH, Balance::blocked_until);
        self.balances(&[(key, *limit)], now, read)
    }

    /// Forgets the balance under this key.
    ///
    /// # Errors
    /// Where the store cannot answer.
    fn forget_balance(&mut self, key: Digest) -> Result<(), Self::Error>;

    /// The standing under this key.
    ///
    /// # Errors
    /// Where the store cannot answer.
    fn standing(&mut self, key: Digest) -> Result<Option<Standing>, Self::Error>;

    /// Keeps a standing. Says whether there was room for it.
    ///
    /// # Errors
    /// Where the store cannot answer.
    fn save_standing(&mut self, key: Digest, standing: Standing, now: Timestamp) -> Result<bool, Self::Error>;

    /// Whether there is room for a standing under this key. Asked before a strike takes effect; after a yes,
    /// [`save_standing`](Self::save_standing) finds it in the same command.
    ///
    /// # Errors
    /// Where the store cannot answer.
    fn has_room_for(&mut self, key: Digest, standing: &Standing, now: Timestamp) -> Result<bool, Self::Error> {
        let _ = (key, standing, now);
        Ok(true)
    }

    /// Forgets the standing under this key.
    ///
    /// # Errors
    /// Where the store cannot answer.
    fn forget_standing(&mut self, key: Digest) -> Result<(), Self::Error>;

    /// The reservation of this id.
    ///
    /// # Errors
    /// Where the store cannot answer.
    fn reservation(&mut self, id: TraceId) -> Result<Option<Reservation>, Self::Error>;

    /// Keeps a reservation, new or changed.
    ///
    /// # Errors
    /// Where there is no room for a new one.
    fn save_reservation(&mut self, reservation: Reservation, now: Timestamp) -> Result<(), Self::Error>;

    /// Takes out the reservation that expired first, if one has. A store that ends expired reservations by other means
    /// answers `None`.
    ///
    /// # Errors
    /// Where the store cannot answer.
    fn take_expired(&mut self, now: Timestamp) -> Result<Option<Reservation>, Self::Error>;

    /// Remembers until `void_from` that a receipt was refunded. Says whether this is the first time.
    ///
    /// # Errors
    /// Where there is no room to remember it.
    fn remember_refund(&mut self, id: TraceId, void_from: Timestamp, now: Timestamp) -> Result<bool, Self::Error>;

    /// Remembers until `void_from` that the reservation of a receipt has ended, so that the receipt is not refunded. Where
    /// there is no room, another one may be forgotten.
    ///
    /// # Errors
    /// Where the store cannot answer.
    fn remember_end(&mut self, id: TraceId, void_from: Timestamp, now: Timestamp) -> Result<(), Self::Error> {
        self.remember_refund(id, void_from, now).map(drop)
    }

    /// Where attempts on an account are counted: under its own key, unless there is no room for it.
    ///
    /// # Errors
    /// Where there is no room at all.
    fn account_key(
        &mut self,
        account: Digest,
        wider: &Wider,
        login: &Login,
        now: Timestamp,
    ) -> Result<AccountKey, Self::Error> {
        let _ = (wider, login, now);
        Ok(AccountKey::Own(account))
    }

    /// Where attempts from an address are counted: under its own key, unless there is no room for it.
    ///
    /// # Errors
    /// Where there is no room at all.
    fn address_key(&mut self, address: Digest, wider: &Wider, now: Timestamp) -> Result<Digest, Self::Error> {
        let _ = (wider, now);
        Ok(address)
    }

    /// What is known of an account.
    ///
    /// # Errors
    /// Where the store cannot answer.
    fn account(&mut self, key: AccountKey) -> Result<Option<Account>, Self::Error>;

    /// Keeps an account. Says whether there was room.
    ///
    /// # Errors
    /// Where the store cannot answer.
    fn save_account(
        &mut self,
        key: AccountKey,
        account: Account,
        reason: SaveReason,
        login: &Login,
        now: Timestamp,
    ) -> Result<bool, Self::Error>;

    /// Changes an account where one is known.
    ///
    /// # Errors
    /// Where the store cannot answer.
    fn change_account(&mut self, account: Digest, change: AccountChange) -> Result<(), Self::Error>;

    /// Takes away the record under `old`, if there is one, and keeps it under `new`, unless there is one already.
    ///
    /// # Errors
    /// Where the store cannot answer.
    fn rename(&mut self, what: Renamed, old: Digest, new: Digest, now: Timestamp) -> Result<(), Self::Error>;

    /// Keeps a change of a ban or setting under the next number, in place of the one with the same key, and returns the
    /// number. [`ControlLog::add`](crate::control::ControlLog::add) says what is dropped, and when.
    ///
    /// # Errors
    /// Where there is room for no more.
    fn save_control(&mut self, change: &ControlChange, now: Timestamp) -> Result<u64, Self::Error>;

    /// The changes of bans and settings after a number, at most so many.
    ///
    /// # Errors
    /// Where the store cannot answer.
    fn read_control(&mut self, after: u64, most: usize) -> Result<ControlPage, Self::Error>;

    /// What is known of the request with this id.
    ///
    /// # Errors
    /// Where the store cannot answer.
    fn request(&mut self, id: Digest) -> Result<Option<RequestRecord>, Self::Error>;

    /// Keeps what is known of the request with this id until [`RequestRecord::until`]; a record whose time is over takes
    /// the place of the one before and need not be kept itself.
    ///
    /// # Errors
    /// Where there is no room for a request that begins. An answer is kept all the same: its request was charged.
    fn save_request(&mut self, id: Digest, record: RequestRecord, now: Timestamp) -> Result<(), Self::Error>;
}

/// Carries out a command on the records that it names.
///
/// # Errors
/// Where a record could not be read or kept. Then nothing that the caller was promised has happened; a store that works on
/// copies drops them.
pub fn execute<R: Records>(command: &Command, records: &mut R, now: Timestamp) -> Result<Answer, R::Error> {
    match command {
        Command::Settle(bill) => bill::settle(&bill.as_bill(), records, now),
        Command::Refund(receipt) => refund(receipt, records, now),
        Command::GiveBack(receipt) => {
            expire(records, now)?;
            records.balances(&charges(receipt), now, |balances| receipt.refund(balances, now))?;
            Ok(Answer::Done)
        }
        Command::Renew(receipt) => {
            let mut receipt = receipt.clone();
            records.balances(&charges(&receipt), now, |balances| receipt.renew(balances, now))?;
            Ok(Answer::Renewed(receipt))
        }
        Command::Reserve { receipt, ttl, on_expire } => {
            expire(records, now)?;
            let reservation = Reservation::new((**receipt).clone(), *ttl, *on_expire);
            records.save_reservation(reservation, now)?;
            Ok(Answer::Done)
        }
        Command::Commit { id, cost } => {
            end(*id, records, now, |reservation, balances| reservation.commit(cost, balances, now))
        }
        Command::Release { id } => {
            end(*id, records, now, |reservation, balances| Ok(reservation.release(balances, now)?))
        }
        Command::Pause { keys, until } => pause(keys, *until, records, now),
        Command::Forgive { keys } => forgive(keys, records),
        Command::BeginLogin { login, tried } => Ok(Answer::Attempted(login::begin(login, tried, records, now)?)),
        Command::EndLogin { login, attempt, success, nonce } => {
            Ok(Answer::LoginEnded(login::end(login, attempt, (*success, *nonce), records, now)?))
        }
        Command::ChangeAccount { account, change } => {
            records.change_account(*account, *change)?;
            Ok(Answer::Done)
        }
        Command::Rekey(rekeyed) => {
            rekey::rekey(rekeyed, records, now)?;
            Ok(Answer::Done)
        }
        Command::ReadStanding { key } => Ok(Answer::Standing(records.standing(*key)?.map(Box::new))),
        Command::ReadBlock { keys } => read_block(keys, records, now),
        Command::ReadAccount { account } => {
            Ok(Answer::Account(records.account(AccountKey::Own(*account))?.map(Box::new)))
        }
        Command::Limit { key, limit, cost, id } => {
            expire(records, now)?;
            Ok(Answer::Limited(records.check(*key, limit, *cost, now, *id)?))
        }
        Command::Control(change) => Ok(Answer::Controlled { number: records.save_control(change, now)? }),
        Command::ReadControl { after, most } => {
            let most = usize::try_from(*most).map_or(MAX_CHANGES_READ, |most| most.min(MAX_CHANGES_READ));
            Ok(Answer::Control(Box::new(records.read_control(*after, most)?)))
        }
        Command::BeginRequest { key, life, repeats } => {
            Ok(Answer::Request(requests::begin(key, *life, *repeats, records, now)?))
        }
        Command::EndRequest { key, answer, life } => {
            requests::end(key, answer.as_deref(), *life, records, now)?;
            Ok(Answer::Done)
        }
    }
}

/// Ends the reservations whose time has come, in the order in which they were due. Everything that reads or changes a
/// balance does this first, so that nobody sees a balance in which a release is overdue.
///
/// # Errors
/// Where a record could not be read or kept.
pub fn expire<R: Records>(records: &mut R, now: Timestamp) -> Result<(), R::Error> {
    while let Some(mut reservation) = records.take_expired(now)? {
        if reservation.gives_back() {
            records.remember_end(reservation.id(), reservation.void_from(), now)?;
        }
        let charges: ArrayVec<(Digest, Limit), MAX_CHARGES> = reservation.charges().collect();
        records.balances(&charges, now, |balances| reservation.expire(balances, now))?;
    }
    Ok(())
}

impl AccountChange {
    /// Changes an account.
    pub fn apply(self, account: &mut Account) {
        match self {
            Self::Reset => account.reset(),
            Self::Lift => account.lift(),
        }
    }
}

fn refund<R: Records>(receipt: &Receipt, records: &mut R, now: Timestamp) -> Result<Answer, R::Error> {
    expire(records, now)?;
    let first = records.reservation(receipt.id())?.is_none()
        && records.remember_refund(receipt.id(), receipt.void_from(), now)?;
    if first {
        records.balances(&charges(receipt), now, |balances| receipt.refund(balances, now))?;
    }
    Ok(Answer::Refunded { first })
}

fn pause<R: Records>(
    keys: &SubjectKeys,
    until: Timestamp,
    records: &mut R,
    now: Timestamp,
) -> Result<Answer, R::Error> {
    expire(records, now)?;
    for (key, limit) in &keys.balances {
        let block = |balances: &mut [Balance]| balances.iter_mut().for_each(|balance| balance.block(until));
        records.balances(&[(*key, *limit)], now, block)?;
    }
    Ok(Answer::Done)
}

fn forgive<R: Records>(keys: &SubjectKeys, records: &mut R) -> Result<Answer, R::Error> {
    for key in keys.balances.keys() {
        records.forget_balance(*key)?;
    }
    for key in &keys.standings {
        records.forget_standing(*key)?;
    }
    Ok(Answer::Done)
}

fn read_block<R: Records>(keys: &SubjectKeys, records: &mut R, now: Timestamp) -> Result<Answer, R::Error> {
    let mut latest = Timestamp::EPOCH;
    for (key, limit) in &keys.balances {
        latest = latest.max(records.blocked_until(*key, limit, now)?);
    }
    Ok(Answer::Blocked(latest))
}

fn end<R: Records>(
    id: TraceId,
    records: &mut R,
    now: Timestamp,
    end: impl FnOnce(&mut Reservation, &mut [Balance]) -> Result<(), CommitError>,
) -> Result<Answer, R::Error> {
    expire(records, now)?;
    let Some(mut reservation) = records.reservation(id)? else {
        return Ok(Answer::Ended(Err(UnknownReservation.into())));
    };
    let charges: ArrayVec<(Digest, Limit), MAX_CHARGES> = reservation.charges().collect();
    let ended = records.balances(&charges, now, |balances| end(&mut reservation, balances))?;
    if let Err(error) = ended {
        return Ok(Answer::Ended(Err(error)));
    }
    records.save_reservation(reservation, now)?;
    Ok(Answer::Ended(Ok(charges.iter().map(|(key, _)| *key).collect())))
}

fn charges(receipt: &Receipt) -> ArrayVec<(Digest, Limit), MAX_CHARGES> {
    receipt.charges().collect()
}
