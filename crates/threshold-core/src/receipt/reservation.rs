//! Reservation: a charge made before its true cost is known.

use arrayvec::ArrayVec;

use super::{Charges, History, OwnedCost, Receipt};
use crate::balance::Balance;
use crate::codec::{BytesError, Format, Reader, Versions, Writer, from_bytes, to_bytes};
use crate::key::{Digest, TraceId};
use crate::limit::Limit;
use crate::plan::MAX_CHARGES;
use crate::time::{Span, Timestamp};

/// The longest a reservation may be held.
pub const MAX_RESERVATION: Span = Span::HOUR;

/// The effect of a reservation's expiry.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum OnExpire {
    /// The charges stay.
    #[default]
    Charge,
    /// The charges are given back.
    Release,
}

/// The stage of a reservation.
#[derive(Debug, Clone, PartialEq, Eq)]
enum Stage {
    Open,
    /// With the actual cost of each charge; `None` if an earlier version committed it, which did not save them.
    Committed(Option<Amounts>),
    Released,
}

/// One amount for each charge of a receipt.
type Amounts = ArrayVec<u64, MAX_CHARGES>;

/// The reservation is unknown or already ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("the reservation is unknown or already ended")]
pub struct UnknownReservation;

/// The reasons why a reservation was not committed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum CommitError {
    /// The reservation is unknown or already ended.
    #[error("{UnknownReservation}")]
    Unknown,
    /// The reservation was already committed with another cost, which stays.
    #[error("the reservation was already committed with another cost, which stays")]
    OtherCost,
}

impl From<UnknownReservation> for CommitError {
    fn from(_: UnknownReservation) -> Self {
        Self::Unknown
    }
}

/// The changes of balances that the end of a reservation causes.
///
/// The record of a reservation and the balances may lie in different partitions of a store. The record is ended first. If a
/// node dies before the balances are changed, the charges stay as they were reserved.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Adjustment {
    /// The charges that are given back, with the amounts.
    less: Receipt,
    /// The charges that are made in addition, with the amounts.
    more: Receipt,
    /// The time at which the charges are given back; `None` for the time at which this is applied.
    as_of: Option<Timestamp>,
}

impl Adjustment {
    /// Returns an adjustment that changes no balance.
    fn none(receipt: &Receipt) -> Self {
        let empty = Receipt { charged: Charges::new(), ..receipt.clone() };
        Self { less: empty.clone(), more: empty, as_of: None }
    }

    /// Returns the adjustment that gives back every charge of a receipt.
    #[must_use]
    pub fn giving_back(receipt: &Receipt) -> Self {
        Self { less: receipt.clone(), ..Self::none(receipt) }
    }

    /// Leaves out what is given back to another history than that which its partition has now: the store has lost that charge.
    #[must_use]
    pub fn in_history(&self, present: impl Fn(Digest) -> History) -> Self {
        let mut rest = self.clone();
        rest.less.charged.retain(|charged| charged.history.counts_in(present(charged.key)));
        rest
    }

    /// Returns the keys of the balances, each with its limit, in the order in which [`apply`](Self::apply) takes them.
    pub fn charges(&self) -> impl Iterator<Item = (Digest, Limit)> {
        self.less.charges().chain(self.more.charges())
    }

    /// Returns each change as a store's script makes it, with the key of its balance. `None` if a script does not know one of them.
    #[must_use]
    pub fn to_script(&self) -> Option<Vec<(Digest, Vec<u8>)>> {
        let less = self.less.credits_to_script(self.as_of);
        let more = self.more.debits_to_script();
        less.chain(more).collect()
    }

    /// Changes the balances. The caller ensures that this happens once.
    pub fn apply(&self, balances: &mut [Balance], now: Timestamp) {
        let (less, more) = balances.split_at_mut(self.less.charged.len().min(balances.len()));
        self.less.refund(less, self.as_of.map_or(now, |at| at.min(now)));
        for (charged, balance) in self.more.charged.iter().zip(more) {
            // Under the limit of the balance, not of the receipt. The policy may have replaced the receipt's limit since,
            // and converting the balance back to it could forget use.
            let limit = charged.limit.in_terms_of(&balance.state);
            limit.charge(&mut balance.state, charged.mark.amount, now, self.more.id);
        }
    }
}

/// Charges made before their actual cost is known, until a commit, a release or the expiry ends them.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Reservation {
    receipt: Receipt,
    expires: Timestamp,
    on_expire: OnExpire,
    stage: Stage,
}

impl Reservation {
    /// The versions that are read.
    pub(crate) const VERSIONS: Versions = Versions::FIRST.containing(Receipt::VERSIONS);

    /// Creates a reservation that holds the charges of a receipt.
    #[must_use]
    pub fn new(receipt: Receipt, ttl: Span, on_expire: OnExpire) -> Self {
        let expires = receipt.at.plus(ttl.min(MAX_RESERVATION));
        Self { receipt, expires, on_expire, stage: Stage::Open }
    }

    /// Returns the id, which is that of the decision.
    #[must_use]
    pub fn id(&self) -> TraceId {
        self.receipt.id
    }

    /// Returns when it expires.
    #[must_use]
    pub fn expires(&self) -> Timestamp {
        self.expires
    }

    /// Moves an expiry that is too far ahead to the latest that a reservation made now can have, and returns whether it did.
    /// That happens if the clock was ahead when the reservation was made and has stepped back since.
    pub fn bring_back(&mut self, now: Timestamp) -> bool {
        let latest = now.plus(MAX_RESERVATION);
        let is_ahead = self.expires > latest;
        self.expires = self.expires.min(latest);
        is_ahead
    }

    /// Returns the keys that it holds, in the order in which `commit` and `release` take their balances.
    pub fn keys(&self) -> impl Iterator<Item = Digest> {
        self.receipt.keys()
    }

    /// Returns the keys that it holds, each with the limit that it was charged under.
    pub fn charges(&self) -> impl Iterator<Item = (Digest, Limit)> {
        self.receipt.charges()
    }

    /// Returns whether it was neither committed nor released.
    #[must_use]
    pub fn is_open(&self) -> bool {
        self.stage == Stage::Open
    }

    /// Returns whether it was ended, or its expiry gives its charges back. Its receipt must then not be refunded.
    #[must_use]
    pub fn gives_back(&self) -> bool {
        !self.is_open() || self.on_expire == OnExpire::Release
    }

    /// Returns the time from which refunding its receipt has no effect.
    #[must_use]
    pub fn void_from(&self) -> Timestamp {
        self.receipt.void_from()
    }

    /// Ends it with its actual cost, and returns the changes of its balances: what was reserved beyond that is given back, or the
    /// rest is charged. Repeating a commit with the same cost changes nothing.
    ///
    /// # Errors
    /// If it has expired, was released, or was committed with another cost.
    pub fn commit(&mut self, cost: &OwnedCost, now: Timestamp) -> Result<Adjustment, CommitError> {
        // Compared by amounts and not by the cost as sent: two spellings of one cost are the same commit.
        let amounts = self.amounts(cost);
        match &self.stage {
            Stage::Committed(before) if before.as_ref().is_none_or(|before| *before == amounts) => {
                return Ok(Adjustment::none(&self.receipt));
            }
            Stage::Committed(_) => return Err(CommitError::OtherCost),
            Stage::Released => return Err(CommitError::Unknown),
            // A store that has not removed it yet must answer as one that has.
            Stage::Open if now >= self.expires => return Err(CommitError::Unknown),
            Stage::Open => self.stage = Stage::Committed(Some(amounts.clone())),
        }
        let mut adjustment = Adjustment::none(&self.receipt);
        for (charged, actual) in self.receipt.charged.iter().zip(amounts) {
            let reserved = charged.mark.amount;
            if charged.limit.is_concurrency() {
                // The request has ended, so its place is free, whatever it cost.
                adjustment.less.charged.push(*charged);
            } else if actual > reserved {
                // Charged even if it does not fit: the work is done, and the next requests wait for it.
                adjustment.more.charged.push(charged.with_amount(actual.saturating_sub(reserved)));
            } else if actual < reserved {
                adjustment.less.charged.push(charged.with_amount(reserved.saturating_sub(actual)));
            }
        }
        Ok(adjustment)
    }

    /// Returns the actual cost of each charge. A concurrency hold costs what it held: it ends, whatever the request cost.
    fn amounts(&self, cost: &OwnedCost) -> Amounts {
        let charges = self.receipt.charged.iter();
        charges
            .map(|charged| {
                let actual = if charged.limit.is_concurrency() { None } else { charged.actual(cost) };
                actual.unwrap_or(charged.mark.amount)
            })
            .collect()
    }

    /// Ends it without a cost, and returns the changes of its balances. Repeating a release changes nothing.
    ///
    /// # Errors
    /// If it has expired or was committed.
    pub fn release(&mut self, now: Timestamp) -> Result<Adjustment, UnknownReservation> {
        match self.stage {
            Stage::Released => return Ok(Adjustment::none(&self.receipt)),
            Stage::Committed(_) => return Err(UnknownReservation),
            Stage::Open if now >= self.expires => return Err(UnknownReservation),
            Stage::Open => self.stage = Stage::Released,
        }
        Ok(Adjustment { less: self.receipt.clone(), ..Adjustment::none(&self.receipt) })
    }

    /// Ends it if it has expired, and returns the changes of its balances; `None` if it has not expired. Under [`OnExpire::Release`] its charges are
    /// given back as of the expiry, however much later that is done. So the balances must not have changed since then, and
    /// reservations that expired earlier must have been ended before this one.
    pub fn expire(&mut self, now: Timestamp) -> Option<Adjustment> {
        if now < self.expires {
            return None;
        }
        let none = Adjustment::none(&self.receipt);
        if self.stage != Stage::Open || self.on_expire == OnExpire::Charge {
            return Some(none);
        }
        // A record that a store keeps must not be given back a second time.
        self.stage = Stage::Released;
        // At the expiry, so that the result does not depend on when a store ends it: stores that look often and stores
        // that look seldom agree.
        Some(Adjustment { less: self.receipt.clone(), as_of: Some(self.expires), ..none })
    }

    /// Returns the bytes that a store saves.
    #[must_use]
    pub fn to_bytes(&self, format: Format) -> Vec<u8> {
        to_bytes(Self::VERSIONS, format, |out| self.write(out))
    }

    fn write(&self, out: &mut Writer) {
        out.byte(match self.stage {
            Stage::Open => 0,
            // Written back as it was read: without amounts a repeated commit cannot be compared with the first one.
            Stage::Committed(None) => 1,
            Stage::Released => 2,
            Stage::Committed(Some(_)) => 3,
        });
        out.byte(u8::from(self.on_expire == OnExpire::Release));
        out.number(self.expires.micros());
        self.receipt.write(out);
        if let Stage::Committed(Some(amounts)) = &self.stage {
            amounts.iter().for_each(|amount| out.number(*amount));
        }
    }

    /// Reads the bytes that [`to_bytes`](Self::to_bytes) returns.
    ///
    /// # Errors
    /// On an unknown version, and on bytes that no reservation has.
    pub fn from_bytes(bytes: &[u8]) -> Result<Self, BytesError> {
        from_bytes(bytes, Self::VERSIONS, Self::read)
    }

    /// Reads the bytes that [`to_bytes`](Self::to_bytes) returns, or that a script has written for a [hold](Self::hold_to_script).
    ///
    /// # Errors
    /// As for [`from_bytes`](Self::from_bytes).
    pub fn from_script(bytes: &[u8]) -> Result<Self, BytesError> {
        Self::held_by_script(bytes).unwrap_or_else(|| Self::from_bytes(bytes))
    }

    /// Returns an open reservation of these charges that ends at a time.
    pub(super) fn open(receipt: Receipt, expires: Timestamp, on_expire: OnExpire) -> Self {
        Self { receipt, expires, on_expire, stage: Stage::Open }
    }

    fn read(from: &mut Reader<'_>) -> Result<Self, BytesError> {
        let mut stage = match from.byte()? {
            0 => Stage::Open,
            1 => Stage::Committed(None),
            2 => Stage::Released,
            3 => Stage::Committed(Some(Amounts::new())),
            _ => return Err(BytesError::Malformed("reservation")),
        };
        let on_expire = match from.byte()? {
            0 => OnExpire::Charge,
            1 => OnExpire::Release,
            _ => return Err(BytesError::Malformed("reservation")),
        };
        let expires = Timestamp::from_micros(from.number()?);
        let receipt = Receipt::read(from)?;
        if let Stage::Committed(Some(amounts)) = &mut stage {
            // One for each charge, so their number is not stored.
            for _ in &receipt.charged {
                amounts.push(from.number()?);
            }
        }
        Ok(Self { receipt, expires, on_expire, stage })
    }
}
