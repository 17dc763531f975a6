//! Commands: every operation on stored state.
//!
//! A [`Command`] owns its data and knows no policy, so that it can be sent to a store in another process, finish after its
//! caller has left, and be repeated. [`execute`] carries it out on [`Records`]; a store calls it inside its own lock,
//! transaction or compare-and-set. A new operation is written once, here, and works on every store.

mod bill;
mod bytes;
mod login;
mod refunds;
mod rekey;
mod requests;
mod reservations;

use arrayvec::ArrayVec;

use crate::balance::{Balance, Checked};
use crate::bill::OwnedBill;
use crate::control::{ControlChange, ControlPage, MAX_CHANGES_READ};
use crate::key::{Digest, TraceId};
use crate::ladder::Standing;
use crate::limit::Limit;
use crate::lockout::{
    Account, Attempt, AttemptKeys, AttemptOutcome, Device, Login, ResultOutcome, StandInKeys, UnknownAttempt,
};
use crate::plan::MAX_CHARGES;
use crate::plan::SubjectKeys;
use crate::receipt::{Adjustment, CommitError, HoldTerms, OnExpire, OwnedCost, Receipt, Reservation};
use crate::settle::Outcome;
use crate::time::{Span, Timestamp};

pub use refunds::CREDIT_REMEMBERED;
pub use rekey::{KeyMoves, MovedRecord};
pub use requests::{RequestKey, RequestRecord, RequestState};
pub use reservations::expire;

/// One operation on stored state.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Command {
    /// Settles a bill as [`settle`](crate::settle()) does. Answered by [`Answer::Settled`].
    Settle(Box<OwnedBill>),
    /// Refunds the charges of a receipt, once. Answered by [`Answer::Refunded`].
    Refund(Box<Receipt>),
    /// Gives charges back of which no client has a receipt: those of a request that was denied elsewhere or decided without its
    /// answer, or those of a [`Pending`](crate::receipt::Pending). If the receipt is that of an open reservation, this ends it.
    /// Answered by [`Answer::Done`].
    GiveBack {
        /// The charges.
        receipt: Box<Receipt>,
        /// The id under which the store remembers it for [`CREDIT_REMEMBERED`], so that it may be sent again; `None` where the
        /// caller and the store are in one process, and nothing is sent twice.
        credit: Option<TraceId>,
    },
    /// Refunds the charges of a receipt and makes them again, as if the request came now. Answered by [`Answer::Renewed`].
    Renew(Box<Receipt>),
    /// Settles a bill and, if it is allowed, holds its charges, in one step. Answered by [`Answer::Settled`].
    Reserve {
        /// The bill.
        bill: Box<OwnedBill>,
        /// What is held, and for how long.
        terms: Box<HoldTerms>,
    },
    /// Saves a reservation of the charges of a receipt, which were made before. Answered by [`Answer::Done`].
    SaveReservation {
        /// The charges.
        receipt: Box<Receipt>,
        /// How long the reservation lasts.
        ttl: Span,
        /// What happens when it is neither committed nor released by then.
        on_expire: OnExpire,
    },
    /// Ends a reservation with its actual cost. Answered by [`Answer::Ended`].
    Commit {
        /// The id of the reservation.
        id: TraceId,
        /// The actual cost.
        cost: OwnedCost,
    },
    /// Ends a reservation without a cost. Answered by [`Answer::Ended`].
    Release {
        /// The id of the reservation.
        id: TraceId,
    },
    /// Ends a reservation that has expired. Answered by [`Answer::Ended`].
    Expire {
        /// The id of the reservation.
        id: TraceId,
    },
    /// Ends the record of a reservation and changes no balance: the first step where its charges are held in other partitions.
    /// Answered by [`Answer::Ended`].
    EndReservation {
        /// The id of the reservation.
        id: TraceId,
        /// The way in which it ends.
        end: ReservationEnd,
    },
    /// Denies a subject for a while. Answered by [`Answer::Done`].
    Pause {
        /// The keys of the subject's budgets.
        keys: SubjectKeys,
        /// How long the pause lasts, from the store's present time.
        length: Span,
    },
    /// Forgets a subject's usage and its strikes. Answered by [`Answer::Done`].
    Forgive {
        /// The keys of the subject's budgets and standings.
        keys: SubjectKeys,
    },
    /// Counts a login attempt before its secret is checked. Answered by [`Answer::Attempted`].
    BeginLogin {
        /// The login settings of the policy.
        login: Login,
        /// The digests of the account, address and device of the attempt.
        keys: AttemptKeys,
    },
    /// Ends a login attempt after its secret was checked. Answered by [`Answer::LoginEnded`].
    EndLogin {
        /// The login settings of the policy.
        login: Login,
        /// The attempt.
        attempt: Attempt,
        /// Whether the secret was correct.
        success: bool,
        /// A fresh random number, for the token of a new device.
        nonce: TraceId,
    },
    /// Withdraws a login attempt that nobody acts on, because its answer came too late: it counts neither for its account nor for
    /// its address. Answered by [`Answer::Refunded`], as `first` where the attempt was under way.
    WithdrawLogin {
        /// The login settings of the policy.
        login: Login,
        /// The attempt.
        attempt: Attempt,
    },
    /// Changes an account. Answered by [`Answer::Done`].
    ChangeAccount {
        /// The digest of the account.
        account: Digest,
        /// The change.
        change: AccountChange,
    },
    /// Moves records from digests of an old secret to those of the current one. Answered by [`Answer::Done`].
    Rekey(KeyMoves),
    /// Reads the standing of a subject. Answered by [`Answer::Standing`].
    ReadStanding {
        /// The key of the standing.
        key: Digest,
    },
    /// Reads until when a subject is denied by a pause or `block_for`. Answered by [`Answer::Blocked`].
    ReadBlock {
        /// The keys of the subject's budgets.
        keys: SubjectKeys,
    },
    /// Reads the login state of an account. Answered by [`Answer::Account`].
    ReadAccount {
        /// The digest of the account.
        account: Digest,
    },
    /// Reads whether an account counts the attempts of a device by itself, and so not by their address. Answered by
    /// [`Answer::Recognised`].
    ReadDevice {
        /// The login settings of the policy.
        login: Login,
        /// The digest of the account.
        account: Digest,
        /// The device.
        device: Device,
    },
    /// Checks one cost on one key under a limit that comes with the command. Answered by [`Answer::Limited`].
    Limit {
        /// The key of the budget.
        key: Digest,
        /// The limit.
        limit: Limit,
        /// The cost; 0 charges nothing.
        cost: u64,
        /// A fresh random id, by which a concurrency slot is released.
        id: TraceId,
    },
    /// Gives back an amount on one key without a receipt: at most what still counts there. Answered by [`Answer::Done`].
    Credit {
        /// The key of the budget.
        key: Digest,
        /// The limit.
        limit: Limit,
        /// The amount.
        amount: u64,
    },
    /// Changes a ban or a setting for every node. Answered by [`Answer::Controlled`].
    Control(Box<ControlChange>),
    /// Changes many bans and settings for every node. A store makes them all or none; one that shares a server with others may
    /// make them in pieces, in their order, and fail between two. Answered by [`Answer::Controlled`] with the number of the last
    /// change, or by [`Answer::Outdated`].
    ControlAll {
        /// The changes.
        changes: Box<[ControlChange]>,
        /// The number of the latest change that the caller has read, if it has computed these changes from what it has read: if
        /// there are later ones, nothing is changed.
        after: Option<u64>,
    },
    /// Reads the changes of bans and settings after a sequence number. Answered by [`Answer::Control`].
    ReadControl {
        /// The last sequence number that the caller has read; 0 where it has read none.
        after: u64,
        /// The largest number of changes to return.
        most: u32,
    },
    /// Begins a request with an id, unless one with that id has begun. Answered by [`Answer::Request`].
    BeginRequest {
        /// The request, and the caller that begins it.
        key: RequestKey,
        /// How long it may run. If it has not ended by then, for example because its node died, a repetition begins it.
        life: Span,
        /// How often its answer may be repeated before the request is carried out again; `None` for no bound.
        repeats: Option<u32>,
    },
    /// Ends a request with an id. Answered by [`Answer::Done`].
    EndRequest {
        /// The request, and the caller that began it.
        key: RequestKey,
        /// The answer for repetitions; `None` where a repetition is to be carried out as if it were the first.
        answer: Option<Box<[u8]>>,
        /// How long the answer is remembered.
        life: Span,
    },
}

/// The way in which a reservation ends.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum ReservationEnd {
    /// With its actual cost.
    Commit(OwnedCost),
    /// Without a cost.
    Release,
    /// By its expiry.
    Expire,
}

/// A change of an account by its owner or an operator.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum AccountChange {
    /// Its secret was reset: all locks end, and no device is known any more.
    Reset,
    /// An operator lifts its locks. Known devices stay known.
    Lift,
}

/// The result of a command.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Answer {
    /// The outcome of a bill.
    Settled(Box<Outcome>),
    /// The command was carried out.
    Done,
    /// Whether the receipt was refunded, or the login attempt withdrawn, for the first time.
    Refunded {
        /// `false` where it was refunded before, belongs to a reservation, counts no longer or was lost, or is a login attempt that has
        /// ended.
        first: bool,
    },
    /// The receipt of the new charges.
    Renewed(Box<Receipt>),
    /// The keys that a reservation was charged to. There may be room under them now, for requests that wait.
    Ended(Result<Vec<Digest>, CommitError>),
    /// Whether the secret may be checked, or why not.
    Attempted {
        /// The result.
        outcome: AttemptOutcome,
        /// The store's time. Waiting times are counted from it, because a node's own clock may differ.
        at: Timestamp,
    },
    /// The result of a login attempt.
    LoginEnded {
        /// The result.
        ended: Result<ResultOutcome, UnknownAttempt>,
        /// The store's time, as in [`Attempted`](Self::Attempted).
        at: Timestamp,
    },
    /// The result of checking one limit.
    Limited {
        /// The result.
        checked: Checked,
        /// The store's time, as in [`Attempted`](Self::Attempted).
        at: Timestamp,
    },
    /// The standing of a subject; `None` where none is stored.
    Standing(Option<Box<Standing>>),
    /// The login state of an account; `None` where none is stored.
    Account(Option<Box<Account>>),
    /// Whether an account recognises a device.
    Recognised(bool),
    /// Until when a subject is denied by at least one of its limits; `None` where it is not.
    Blocked(Option<Timestamp>),
    /// A ban or a setting was changed.
    Controlled {
        /// The sequence number of the change.
        number: u64,
    },
    /// Nothing was changed, because the log of bans and settings has changes that the caller has not read.
    Outdated,
    /// Changes of bans and settings.
    Control(Box<ControlPage>),
    /// The state of a request with an id.
    Request(RequestState),
}

impl Answer {
    /// Returns the outcome of a bill; `None` for any other answer.
    #[must_use]
    pub fn settled(self) -> Option<Box<Outcome>> {
        match self {
            Self::Settled(outcome) => Some(outcome),
            _ => None,
        }
    }

    /// Returns whether a reservation was ended.
    ///
    /// # Errors
    /// Fails where it was not. Any other answer counts as an unknown reservation.
    pub fn ended(self) -> Result<(), CommitError> {
        match self {
            Self::Ended(ended) => ended.map(drop),
            _ => Err(CommitError::Unknown),
        }
    }
}

/// The key under which the attempts on an account are counted.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum AccountKey {
    /// The account's own key.
    Own(Digest),
    /// A key that stands in for many accounts, in a store without room for the own one.
    StandIn(Digest),
}

/// The reason why an account is saved. It decides what a store may evict to make room for it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum SaveReason {
    /// A login was attempted. Anybody can cause this for any name.
    Attempted,
    /// A login succeeded, and its device is known now.
    LoggedIn,
    /// A stored account has changed.
    Changed,
}

/// The stored state, as commands see it.
///
/// A store implements this on copies that it has loaded, or on the originals. In either case the calls of one command are one
/// atomic step: nothing else may change the same records between the first call and the last.
///
/// A store that works on copies returns an error for a record that is not loaded yet, loads it, and executes the command
/// again from the start. This is safe because a command changes nothing but its records.
pub trait Records {
    /// The reason why a record could not be read or saved.
    type Error;

    /// Calls `change` with the balances under these keys and saves the result. A key without a balance has an empty one.
    ///
    /// # Errors
    /// Fails where the store cannot answer.
    fn balances<T>(
        &mut self,
        charges: &[(Digest, Limit)],
        now: Timestamp,
        change: impl FnOnce(&mut [Balance]) -> T,
    ) -> Result<T, Self::Error>;

    /// Calls [`Balance::check`] on the balance under this key.
    ///
    /// # Errors
    /// Fails where the store cannot answer.
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

    /// Returns [`Balance::blocked_until`] of the balance under this key.
    ///
    /// # Errors
    /// Fails where the store cannot answer.
    fn blocked_until(&mut self, key: Digest, limit: &Limit, now: Timestamp) -> Result<Timestamp, Self::Error> {
        let read = |balances: &mut [Balance]| balances.first().map_or(Timestamp::EPOCH, Balance::blocked_until);
        self.balances(&[(key, *limit)], now, read)
    }

    /// Gives charges back, or makes more of them, as the end of a reservation or a refund says. A store whose balances others change at
    /// the same time may leave the sums to what keeps them.
    ///
    /// # Errors
    /// Fails where the store cannot answer.
    fn adjust(&mut self, adjustment: &Adjustment, now: Timestamp) -> Result<(), Self::Error> {
        let charges: ArrayVec<(Digest, Limit), { 2 * MAX_CHARGES }> = adjustment.charges().collect();
        self.balances(&charges, now, |balances| adjustment.apply(balances, now))
    }

    /// Gives back an amount that nobody can show to have been charged.
    ///
    /// # Errors
    /// Fails where the store cannot answer.
    fn credit(&mut self, budget: (Digest, Limit), amount: u64, now: Timestamp) -> Result<(), Self::Error> {
        let (_, limit) = budget;
        let credit = |balances: &mut [Balance]| balances.iter_mut().for_each(|own| own.credit(&limit, amount, now));
        self.balances(&[budget], now, credit)
    }

    /// Denies every cost until a time, unless it is denied for longer already.
    ///
    /// # Errors
    /// Fails where the store cannot answer.
    fn block(&mut self, budget: (Digest, Limit), until: Timestamp, now: Timestamp) -> Result<(), Self::Error> {
        let block = |balances: &mut [Balance]| balances.iter_mut().for_each(|balance| balance.block(until));
        self.balances(&[budget], now, block)
    }

    /// Removes the balance under this key.
    ///
    /// # Errors
    /// Fails where the store cannot answer.
    fn forget_balance(&mut self, key: Digest) -> Result<(), Self::Error>;

    /// Returns the standing under this key.
    ///
    /// # Errors
    /// Fails where the store cannot answer.
    fn standing(&mut self, key: Digest) -> Result<Option<Standing>, Self::Error>;

    /// Saves a standing. Returns whether there was room for it.
    ///
    /// # Errors
    /// Fails where the store cannot answer.
    fn save_standing(&mut self, key: Digest, standing: Standing, now: Timestamp) -> Result<bool, Self::Error>;

    /// Returns whether there is room for a standing under this key. Called before a strike takes effect. After `true`,
    /// [`save_standing`](Self::save_standing) in the same command must find room.
    ///
    /// # Errors
    /// Fails where the store cannot answer.
    fn has_room_for(&mut self, key: Digest, standing: &Standing, now: Timestamp) -> Result<bool, Self::Error> {
        let _ = (key, standing, now);
        Ok(true)
    }

    /// Removes the standing under this key.
    ///
    /// # Errors
    /// Fails where the store cannot answer.
    fn forget_standing(&mut self, key: Digest) -> Result<(), Self::Error>;

    /// Returns the reservation with this id.
    ///
    /// # Errors
    /// Fails where the store cannot answer.
    fn reservation(&mut self, id: TraceId) -> Result<Option<Reservation>, Self::Error>;

    /// Saves a new or changed reservation.
    ///
    /// # Errors
    /// Fails where there is no room for a new one.
    fn save_reservation(&mut self, reservation: Reservation, now: Timestamp) -> Result<(), Self::Error>;

    /// Removes the reservation with this id, which the same command has saved.
    ///
    /// # Errors
    /// Fails where the store cannot answer.
    fn forget_reservation(&mut self, id: TraceId, now: Timestamp) -> Result<(), Self::Error>;

    /// Removes and returns the reservation that expired first, if one has. A store that ends expired reservations by other
    /// means returns `None`.
    ///
    /// # Errors
    /// Fails where the store cannot answer.
    fn take_expired(&mut self, now: Timestamp) -> Result<Option<Reservation>, Self::Error>;

    /// Remembers until `void_from` that a receipt was refunded. Returns whether this is the first time. After `void_from` the
    /// receipt refunds nothing, so forgetting it then is exact.
    ///
    /// # Errors
    /// Fails where there is no room to remember it.
    fn remember_refund(&mut self, id: TraceId, void_from: Timestamp, now: Timestamp) -> Result<bool, Self::Error>;

    /// Remembers until `void_from` that the reservation of a receipt has ended, so that the receipt is not refunded as well.
    /// Where there is no room, another one may be forgotten: unlike a refund, an expiry cannot be refused.
    ///
    /// # Errors
    /// Fails where the store cannot answer.
    fn remember_end(&mut self, id: TraceId, void_from: Timestamp, now: Timestamp) -> Result<(), Self::Error> {
        self.remember_refund(id, void_from, now).map(drop)
    }

    /// Returns the key under which attempts on an account are counted: its own, or a stand-in from `stand_ins` where there is no
    /// room.
    ///
    /// # Errors
    /// Fails where there is no room at all.
    fn account_key(
        &mut self,
        account: Digest,
        stand_ins: &StandInKeys,
        login: &Login,
        now: Timestamp,
    ) -> Result<AccountKey, Self::Error> {
        let _ = (stand_ins, login, now);
        Ok(AccountKey::Own(account))
    }

    /// Returns the key under which attempts from an address are counted: its own, or a stand-in from `stand_ins` where there is no
    /// room.
    ///
    /// # Errors
    /// Fails where there is no room at all.
    fn address_key(&mut self, address: Digest, stand_ins: &StandInKeys, now: Timestamp) -> Result<Digest, Self::Error> {
        let _ = (stand_ins, now);
        Ok(address)
    }

    /// Returns the login state of an account.
    ///
    /// # Errors
    /// Fails where the store cannot answer.
    fn account(&mut self, key: AccountKey) -> Result<Option<Account>, Self::Error>;

    /// Saves an account. Returns whether there was room for it.
    ///
    /// # Errors
    /// Fails where the store cannot answer.
    fn save_account(
        &mut self,
        key: AccountKey,
        account: Account,
        reason: SaveReason,
        login: &Login,
        now: Timestamp,
    ) -> Result<bool, Self::Error>;

    /// Changes an account, if it is stored.
    ///
    /// # Errors
    /// Fails where the store cannot answer.
    fn change_account(&mut self, account: Digest, change: AccountChange) -> Result<(), Self::Error>;

    /// Removes the record under `old`, if there is one, and saves it under `new`, unless there is one already.
    ///
    /// # Errors
    /// Fails where the store cannot answer.
    fn rename(&mut self, what: MovedRecord, old: Digest, new: Digest, now: Timestamp) -> Result<(), Self::Error>;

    /// Saves changes of bans and settings under the next sequence numbers, each in place of the one with the same key, all or
    /// none, and returns the last number. [`ControlLog::add_all`](crate::control::ControlLog::add_all) defines what is dropped,
    /// and when.
    ///
    /// # Errors
    /// Fails where there is no room.
    fn save_control(&mut self, changes: &[ControlChange], now: Timestamp) -> Result<u64, Self::Error>;

    /// Returns up to `most` changes of bans and settings after a sequence number.
    ///
    /// # Errors
    /// Fails where the store cannot answer.
    fn read_control(&mut self, after: u64, most: usize) -> Result<ControlPage, Self::Error>;

    /// Returns the record of the request with this id.
    ///
    /// # Errors
    /// Fails where the store cannot answer.
    fn request(&mut self, id: Digest) -> Result<Option<RequestRecord>, Self::Error>;

    /// Saves the record of the request with this id until [`RequestRecord::until`]. A record whose time is over replaces the one
    /// before it and need not be saved itself.
    ///
    /// # Errors
    /// Fails where there is no room for a request that begins. An answer must be saved in any case: its request was charged,
    /// and would be charged again.
    fn save_request(&mut self, id: Digest, record: RequestRecord, now: Timestamp) -> Result<(), Self::Error>;
}

/// Carries out a command on the records that it names.
///
/// # Errors
/// Fails where a record could not be read or saved. A store that works on copies then drops them, so that nothing has
/// changed.
pub fn execute<R: Records>(command: &Command, records: &mut R, now: Timestamp) -> Result<Answer, R::Error> {
    match command {
        Command::Settle(bill) => bill::settle(&bill.as_bill(), records, now),
        Command::Refund(receipt) => refunds::refund(receipt, records, now),
        Command::GiveBack { receipt, credit } => refunds::give_back(receipt, *credit, records, now),
        Command::Renew(receipt) => refunds::renew(receipt, records, now),
        Command::Reserve { bill, terms } => reservations::reserve(&bill.as_bill(), terms, records, now),
        Command::SaveReservation { receipt, ttl, on_expire } => {
            let reservation = Reservation::new((**receipt).clone(), *ttl, *on_expire);
            reservations::save(reservation, records, now)
        }
        Command::Commit { id, cost } => reservations::end(*id, &ReservationEnd::Commit(cost.clone()), records, now),
        Command::Release { id } => reservations::end(*id, &ReservationEnd::Release, records, now),
        Command::Expire { id } => reservations::end(*id, &ReservationEnd::Expire, records, now),
        Command::EndReservation { id, end } => reservations::end_record(*id, end, records, now),
        Command::Pause { keys, length } => pause(keys, now.plus(*length), records, now),
        Command::Forgive { keys } => forgive(keys, records),
        Command::BeginLogin { login, keys } => {
            Ok(Answer::Attempted { outcome: login::begin(login, keys, records, now)?, at: now })
        }
        Command::EndLogin { login, attempt, success, nonce } => {
            let ended = login::end(login, attempt, (*success, *nonce), records, now)?;
            Ok(Answer::LoginEnded { ended, at: now })
        }
        Command::WithdrawLogin { login, attempt } => {
            Ok(Answer::Refunded { first: login::withdraw(login, attempt, records, now)? })
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
        Command::ReadDevice { login, account, device } => {
            let account = records.account(AccountKey::Own(*account))?;
            Ok(Answer::Recognised(account.is_some_and(|account| account.recognises(login, device, now))))
        }
        Command::Limit { key, limit, cost, id } => {
            expire(records, now)?;
            Ok(Answer::Limited { checked: records.check(*key, limit, *cost, now, *id)?, at: now })
        }
        Command::Credit { key, limit, amount } => credit((*key, *limit), *amount, records, now),
        Command::Control(change) => {
            Ok(Answer::Controlled { number: records.save_control(std::slice::from_ref(change), now)? })
        }
        Command::ControlAll { changes, after } => control_all(changes, *after, records, now),
        Command::ReadControl { after, most } => {
            // The bound holds whatever a caller asks for: a page is built in memory.
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

impl AccountChange {
    /// Applies the change to an account.
    pub fn apply(self, account: &mut Account) {
        match self {
            Self::Reset => account.reset(),
            Self::Lift => account.lift(),
        }
    }
}

fn credit<R: Records>(
    budget: (Digest, Limit),
    amount: u64,
    records: &mut R,
    now: Timestamp,
) -> Result<Answer, R::Error> {
    expire(records, now)?;
    records.credit(budget, amount, now)?;
    Ok(Answer::Done)
}

fn pause<R: Records>(
    keys: &SubjectKeys,
    until: Timestamp,
    records: &mut R,
    now: Timestamp,
) -> Result<Answer, R::Error> {
    expire(records, now)?;
    // Every budget of the subject, because each request meets only some of them. `block` never shortens an earlier
    // block.
    for (key, limit) in &keys.balances {
        records.block((*key, *limit), until, now)?;
    }
    Ok(Answer::Done)
}

fn forgive<R: Records>(keys: &SubjectKeys, records: &mut R) -> Result<Answer, R::Error> {
    // Balances are removed and not refunded, which also ends pauses and blocks.
    for key in keys.balances.keys() {
        records.forget_balance(*key)?;
    }
    for key in &keys.standings {
        records.forget_standing(*key)?;
    }
    Ok(Answer::Done)
}

fn control_all<R: Records>(
    changes: &[ControlChange],
    after: Option<u64>,
    records: &mut R,
    now: Timestamp,
) -> Result<Answer, R::Error> {
    // Of two nodes that replace one set of bans, each from what it has read, the second would leave bans of both.
    if let Some(after) = after
        && records.read_control(after, 0)?.last != after
    {
        return Ok(Answer::Outdated);
    }
    Ok(Answer::Controlled { number: records.save_control(changes, now)? })
}

fn read_block<R: Records>(keys: &SubjectKeys, records: &mut R, now: Timestamp) -> Result<Answer, R::Error> {
    let mut latest = Timestamp::EPOCH;
    for (key, limit) in &keys.balances {
        latest = latest.max(records.blocked_until(*key, limit, now)?);
    }
    Ok(Answer::Blocked(Some(latest).filter(|until| *until > now)))
}
