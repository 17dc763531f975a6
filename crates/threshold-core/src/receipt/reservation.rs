//! Reservation: a charge made before its true cost is known.

use arrayvec::ArrayVec;

use super::{OwnedCost, Receipt};
use crate::balance::Balance;
use crate::codec::{BytesError, Format, Reader, Versions, Writer, from_bytes, to_bytes};
use crate::key::{Digest, Partition, TraceId};
use crate::limit::Limit;
use crate::plan::MAX_CHARGES;
use crate::time::{Span, Timestamp};

/// The longest a reservation may be held.
pub const MAX_RESERVATION: Span = Span::HOUR;

/// What becomes of a reservation that nobody ends.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum OnExpire {
    /// It stays charged.
    #[default]
    Charge,
    /// It is given back.
    Release,
}

/// How a reservation stands.
#[derive(Debug, Clone, PartialEq, Eq)]
enum Stage {
    Open,
    /// With what each charge really cost; not known of one that an earlier version committed.
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

/// A charge made before its true cost is known: one record, ended by a commit, a release, or its time.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Reservation {
    receipt: Receipt,
    expires: Timestamp,
    on_expire: OnExpire,
    stage: Stage,
}

impl Reservation {
    /// The versions in which it is read.
    pub(crate) const VERSIONS: Versions = Versions::FIRST.containing(Receipt::VERSIONS);

    /// Holds what a receipt says was charged.
    #[must_use]
    pub fn new(receipt: Receipt, ttl: Span, on_expire: OnExpire) -> Self {
        let expires = receipt.at.plus(ttl.min(MAX_RESERVATION));
        Self { receipt, expires, on_expire, stage: Stage::Open }
    }

    /// Its id, which is that of the decision.
    #[must_use]
    pub fn id(&self) -> TraceId {
        self.receipt.id
    }

    /// The partition its record lies in; see [`Receipt::home`].
    #[must_use]
    pub fn home(&self) -> Partition {
        self.receipt.home()
    }

    /// When it ends by itself.
    #[must_use]
    pub fn expires(&self) -> Timestamp {
        self.expires
    }

    /// Ends no later than the longest reservation that begins now: a clock that was ahead when it was made has since gone
    /// back. Says whether that changed anything.
    pub fn bring_back(&mut self, now: Timestamp) -> bool {
        let latest = now.plus(MAX_RESERVATION);
        let is_ahead = self.expires > latest;
        self.expires = self.expires.min(latest);
        is_ahead
    }

    /// The keys it holds, in the order in which their balances are to be handed over.
    pub fn keys(&self) -> impl Iterator<Item = Digest> {
        self.receipt.keys()
    }

    /// The keys it holds, each with the limit it was charged under.
    pub fn charges(&self) -> impl Iterator<Item = (Digest, Limit)> {
        self.receipt.charges()
    }

    /// Whether it still waits for its end.
    #[must_use]
    pub fn is_open(&self) -> bool {
        self.stage == Stage::Open
    }

    /// Whether it was ended, or its expiry will give back what it holds: its receipt is then not to be refunded any more.
    #[must_use]
    pub fn gives_back(&self) -> bool {
        !self.is_open() || self.on_expire == OnExpire::Release
    }

    /// From when on refunding its receipt does nothing.
    #[must_use]
    pub fn void_from(&self) -> Timestamp {
        self.receipt.void_from()
    }

    /// Ends it with what it really cost: less is given back, more is recorded. Repeating it with the same cost changes
    /// nothing.
    ///
    /// # Errors
    /// Where it has expired, was released, or was committed with another cost.
    pub fn commit(&mut self, cost: &OwnedCost, balances: &mut [Balance], now: Timestamp) -> Result<(), CommitError> {
        let amounts = self.amounts(cost);
        match &self.stage {
            Stage::Committed(before) if before.as_ref().is_none_or(|before| *before == amounts) => return Ok(()),
            Stage::Committed(_) => return Err(CommitError::OtherCost),
            Stage::Released => return Err(CommitError::Unknown),
            Stage::Open if now >= self.expires => return Err(CommitError::Unknown),
            Stage::Open => self.stage = Stage::Committed(Some(amounts.clone())),
        }
        for ((charged, actual), balance) in self.receipt.charged.iter().zip(amounts).zip(balances) {
            let reserved = charged.mark.amount;
            if charged.limit.is_concurrency() {
                // What was in flight has landed.
                charged.give_back(reserved, balance, now, self.receipt.id);
                continue;
            }
            if let Some(more) = actual.checked_sub(reserved).filter(|more| *more > 0) {
                // Not brought to the receipt's limit: that may hold no more, and its terms could forget what was used.
                let limit = charged.limit.in_terms_of(&balance.state);
                balance.charge(&limit, more, now, self.receipt.id);
            } else {
                let less = reserved.saturating_sub(actual);
                charged.give_back(less, balance, now, self.receipt.id);
            }
        }
        Ok(())
    }

    /// What each charge costs after all. A hold costs what it held: it ends, whatever the request cost.
    fn amounts(&self, cost: &OwnedCost) -> Amounts {
        let charges = self.receipt.charged.iter();
        charges
            .map(|charged| {
                let actual = if charged.limit.is_concurrency() { None } else { charged.actual(cost) };
                actual.unwrap_or(charged.mark.amount)
            })
            .collect()
    }

    /// Ends it without any cost. Repeating it changes nothing.
    ///
    /// # Errors
    /// Where it has expired, or was committed.
    pub fn release(&mut self, balances: &mut [Balance], now: Timestamp) -> Result<(), UnknownReservation> {
        match self.stage {
            Stage::Released => return Ok(()),
            Stage::Committed(_) => return Err(UnknownReservation),
            Stage::Open if now >= self.expires => return Err(UnknownReservation),
            Stage::Open => self.stage = Stage::Released,
        }
        self.receipt.refund(balances, now);
        Ok(())
    }

    /// Ends it if its time has come, giving back what it held if that was chosen: as of its expiry, however much later it is
    /// noticed. Nothing may have changed the balances since, and those that expired before it must have been ended. Says
    /// whether it has ended.
    pub fn expire(&mut self, balances: &mut [Balance], now: Timestamp) -> bool {
        if now < self.expires {
            return false;
        }
        if self.stage == Stage::Open && self.on_expire == OnExpire::Release {
            self.receipt.refund(balances, self.expires);
        }
        true
    }

    /// The bytes a store keeps.
    #[must_use]
    pub fn to_bytes(&self, format: Format) -> Vec<u8> {
        to_bytes(Self::VERSIONS, format, |out| self.write(out))
    }

    fn write(&self, out: &mut Writer) {
        out.byte(match self.stage {
            Stage::Open => 0,
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

    /// Reads what [`to_bytes`](Self::to_bytes) wrote.
    ///
    /// # Errors
    /// On another version, and on bytes no reservation has.
    pub fn from_bytes(bytes: &[u8]) -> Result<Self, BytesError> {
        from_bytes(bytes, Self::VERSIONS, Self::read)
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
            for _ in &receipt.charged {
                amounts.push(from.number()?);
            }
        }
        Ok(Self { receipt, expires, on_expire, stage })
    }
}
