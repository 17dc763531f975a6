//! Receipt and reservation: what was charged, so that exactly that can be given back, once.

use arrayvec::ArrayVec;

use crate::balance::Balance;
use crate::codec::{BytesError, Reader, Writer};
use crate::key::{Digest, DigestKey, Domain, Part, TraceId};
use crate::limit::{Limit, Mark};
use crate::plan::{Charge, MAX_CHARGES, Plan};
use crate::policy::{CostOf, StatusSet};
use crate::secret::{Purpose, Secret};
use crate::settle::Outcome;
use crate::time::{Span, Timestamp};

/// The version of the bytes below.
const VERSION: u8 = 1;
/// The longest a reservation may be held.
pub const MAX_RESERVATION: Span = Span::HOUR;

/// What one request was charged.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Receipt {
    id: TraceId,
    generation: u64,
    at: Timestamp,
    charged: ArrayVec<Charged, MAX_CHARGES>,
}

/// One charge on a receipt.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Charged {
    key: Digest,
    /// The rule, shortened.
    rule: u32,
    limit: Limit,
    unit: CostTag,
    mark: Mark,
}

/// What a charge counted: requests, bytes, or the digest of a name.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct CostTag(u64);

impl CostTag {
    const REQUESTS: Self = Self(0);
    const BYTES: Self = Self(1);

    fn named(key: DigestKey, name: &str) -> Self {
        let mut digest = key.begin(Domain::CostName);
        digest.text(Part::Fact, name);
        let number = u64::try_from(digest.finish().to_u128() >> 64).unwrap_or(u64::MAX);
        Self(number.max(2))
    }
}

/// What a reserved request really cost; what is not said stays as it was reserved.
#[derive(Debug, Clone, Copy, Default)]
pub struct ActualCost<'a> {
    /// In requests.
    pub cost: Option<u64>,
    /// In bytes.
    pub bytes: Option<u64>,
    /// In named units.
    pub costs: &'a [(&'a str, u64)],
}

impl Plan<'_> {
    /// The receipt of what was charged; `None` if nothing was.
    #[must_use]
    pub fn receipt(&self, outcome: &Outcome, now: Timestamp) -> Option<Receipt> {
        let mut receipt = self.holding(outcome, now);
        receipt.charged.retain(|charged| charged.mark.amount > 0);
        (!receipt.charged.is_empty()).then_some(receipt)
    }

    /// What a reservation holds: every limit that had room, also where nothing was charged yet.
    #[must_use]
    pub fn holding(&self, outcome: &Outcome, now: Timestamp) -> Receipt {
        let mut charged = ArrayVec::new();
        for (charge, settled) in
            self.charges.iter().zip(&outcome.settled).filter(|(_, settled)| settled.look.fits || settled.mark.is_some())
        {
            let mark = settled.mark.unwrap_or(Mark { part: now, amount: 0 });
            let _ = charged.try_push(self.charged(charge, mark));
        }
        Receipt { id: self.trace, generation: self.policy.generation, at: now, charged }
    }

    /// What was charged, at a door that sees how the request ends.
    #[must_use]
    pub fn pending(&self, outcome: &Outcome, now: Timestamp) -> Pending {
        let charges = self.charges.iter().zip(&outcome.settled);
        let charged = charges.filter_map(|(charge, settled)| {
            let mark = settled.mark.filter(|mark| mark.amount > 0)?;
            let ends = match (charge.limit, &charge.rule.count) {
                (Limit::Concurrency(_), _) => Ends::WithTheRequest,
                (_, Some(statuses)) => Ends::WithTheAnswer(statuses.clone()),
                (_, None) => Ends::Already,
            };
            Some((self.charged(charge, mark), ends))
        });
        let charged = charged.take(MAX_CHARGES).collect();
        Pending { id: self.trace, generation: self.policy.generation, at: now, charged }
    }

    fn charged(&self, charge: &Charge<'_>, mark: Mark) -> Charged {
        let unit = match charge.counts {
            CostOf::Requests => CostTag::REQUESTS,
            CostOf::Bytes => CostTag::BYTES,
            CostOf::Named(name) => CostTag::named(self.policy.key, name),
        };
        Charged { key: charge.key, rule: charge.rule.tag, limit: *charge.limit, unit, mark }
    }
}

impl Receipt {
    /// The id of the decision it is of. A store that has seen it refunded refunds it no more.
    #[must_use]
    pub fn id(&self) -> TraceId {
        self.id
    }

    /// When it was charged.
    #[must_use]
    pub fn at(&self) -> Timestamp {
        self.at
    }

    /// The policy it was charged under.
    #[must_use]
    pub fn generation(&self) -> u64 {
        self.generation
    }

    /// The keys that were charged, in the order in which their balances are to be handed to [`refund`](Self::refund).
    pub fn keys(&self) -> impl Iterator<Item = Digest> {
        self.charged.iter().map(|charged| charged.key)
    }

    /// The keys that were charged, each with the limit it was charged under.
    pub fn charges(&self) -> impl Iterator<Item = (Digest, Limit)> {
        self.charged.iter().map(|charged| (charged.key, charged.limit))
    }

    /// From when on refunding it does nothing, so that a store may forget that it was refunded.
    #[must_use]
    pub fn void_from(&self) -> Timestamp {
        let longest = self.charged.iter().map(|charged| charged.limit.memory()).max().unwrap_or_default();
        self.at.plus(longest)
    }

    /// Gives back what was charged, where it still counts. The caller sees to it that this happens once.
    pub fn refund(&self, balances: &mut [Balance], now: Timestamp) {
        for (charged, balance) in self.charged.iter().zip(balances) {
            charged.give_back(charged.mark.amount, self.at, balance, now, self.id);
        }
    }

    /// The opaque, signed text that callers hold.
    #[must_use]
    pub fn to_token(&self, secret: &Secret) -> String {
        secret.seal(Purpose::Receipt, &self.to_bytes())
    }

    /// Reads a token.
    ///
    /// # Errors
    /// Where it was not signed by this installation as a receipt.
    pub fn from_token(token: &str, secret: &Secret) -> Result<Self, BytesError> {
        Self::from_bytes(&secret.open(Purpose::Receipt, token)?)
    }

    /// The bytes that are signed and stored.
    #[must_use]
    pub fn to_bytes(&self) -> Vec<u8> {
        let mut out = Writer::new(VERSION);
        self.write(&mut out);
        out.finish()
    }

    /// Reads what [`to_bytes`](Self::to_bytes) wrote.
    ///
    /// # Errors
    /// On another version, and on bytes no receipt has.
    pub fn from_bytes(bytes: &[u8]) -> Result<Self, BytesError> {
        let mut from = Reader::new(bytes, VERSION)?;
        let receipt = Self::read(&mut from)?;
        from.finish()?;
        Ok(receipt)
    }

    fn write(&self, out: &mut Writer) {
        out.wide(self.id.to_u128());
        out.number(self.generation);
        out.number(self.at.micros());
        out.number(self.charged.len() as u64);
        for charged in &self.charged {
            out.wide(charged.key.to_u128());
            out.number(u64::from(charged.rule));
            charged.limit.write(out);
            out.number(charged.unit.0);
            out.number(charged.mark.part.micros());
            out.number(charged.mark.amount);
        }
    }

    fn read(from: &mut Reader<'_>) -> Result<Self, BytesError> {
        let mut receipt = Self {
            id: TraceId::from_u128(from.wide()?),
            generation: from.number()?,
            at: Timestamp::from_micros(from.number()?),
            charged: ArrayVec::new(),
        };
        for _ in 0..from.count(MAX_CHARGES)? {
            let charged = Charged {
                key: Digest::from_u128(from.wide()?),
                rule: u32::try_from(from.number()?).map_err(|_| BytesError::Malformed("receipt"))?,
                limit: Limit::read(from)?,
                unit: CostTag(from.number()?),
                mark: Mark { part: Timestamp::from_micros(from.number()?), amount: from.number()? },
            };
            let _ = receipt.charged.try_push(charged);
        }
        Ok(receipt)
    }
}

impl Charged {
    /// Gives `amount` of this charge back. A balance in other figures, or a clock that stands before the charge, cannot
    /// say any more which part of it this was: then there is nothing to give back. A hold is known by its id, whatever
    /// the clock says.
    fn give_back(&self, amount: u64, at: Timestamp, balance: &mut Balance, now: Timestamp, id: TraceId) {
        let tells = now >= at || matches!(self.limit, Limit::Concurrency(_));
        if tells && balance.is_in_terms_of(&self.limit) {
            balance.give_back(Mark { amount, ..self.mark }, now, id);
        }
    }

    fn actual(&self, actual: &ActualCost<'_>, key: DigestKey) -> Option<u64> {
        match self.unit {
            CostTag::REQUESTS => actual.cost,
            CostTag::BYTES => actual.bytes,
            named => actual.costs.iter().find(|(name, _)| CostTag::named(key, name) == named).map(|(_, cost)| *cost),
        }
    }
}

/// What a request was charged, while it is not over: some of it is given back when it is answered, some when it ends.
///
/// Each charge is taken out of it once, and it never leaves the process. So what it gives out can be given back without
/// anybody having to remember that it was; a receipt can be shown twice, and needs that.
#[derive(Debug)]
pub struct Pending {
    id: TraceId,
    generation: u64,
    at: Timestamp,
    charged: ArrayVec<(Charged, Ends), MAX_CHARGES>,
}

/// When it is known whether a charge stays.
#[derive(Debug)]
enum Ends {
    /// It stays.
    Already,
    /// It stays if the answer is one of these.
    WithTheAnswer(StatusSet),
    /// It is a hold, and does not stay.
    WithTheRequest,
}

impl Pending {
    /// Whether anything may be given back yet, unless the request is taken back as a whole.
    #[must_use]
    pub fn is_open(&self) -> bool {
        self.charged.iter().any(|(_, ends)| !matches!(ends, Ends::Already))
    }

    /// Whether it holds any concurrency.
    #[must_use]
    pub fn has_holds(&self) -> bool {
        self.charged.iter().any(|(_, ends)| matches!(ends, Ends::WithTheRequest))
    }

    /// Takes out what is held while the request lasts.
    pub fn take_holds(&mut self) -> Option<Receipt> {
        self.take(|ends| matches!(ends, Ends::WithTheRequest))
    }

    /// Takes out what rules charged that do not count an answer of this status; `None` if nobody was asked for one.
    pub fn take_uncounted(&mut self, status: Option<u16>) -> Option<Receipt> {
        self.take(|ends| match ends {
            Ends::WithTheAnswer(statuses) => !status.is_some_and(|status| statuses.contains(status)),
            Ends::Already | Ends::WithTheRequest => false,
        })
    }

    /// Takes out all that is left: the request is refused after all, and a refusal charges nothing.
    pub fn take_all(&mut self) -> Option<Receipt> {
        self.take(|_| true)
    }

    /// Adds what the same request was charged later.
    pub fn join(&mut self, later: Self) {
        for charged in later.charged {
            let _ = self.charged.try_push(charged);
        }
    }

    fn take(&mut self, which: impl Fn(&Ends) -> bool) -> Option<Receipt> {
        let mut taken = ArrayVec::new();
        self.charged.retain(|(charged, ends)| {
            let goes = which(ends);
            if goes {
                let _ = taken.try_push(*charged);
            }
            !goes
        });
        let receipt = Receipt { id: self.id, generation: self.generation, at: self.at, charged: taken };
        (!receipt.charged.is_empty()).then_some(receipt)
    }
}

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
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Stage {
    Open,
    Committed,
    Released,
}

/// There is no such reservation, or no longer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct UnknownReservation;

impl std::fmt::Display for UnknownReservation {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("there is no such reservation, or no longer")
    }
}

impl std::error::Error for UnknownReservation {}

/// A charge made before its true cost is known: one record, ended by a commit, a release, or its time.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Reservation {
    receipt: Receipt,
    expires: Timestamp,
    on_expire: OnExpire,
    stage: Stage,
}

impl Reservation {
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

    /// When it ends by itself.
    #[must_use]
    pub fn expires(&self) -> Timestamp {
        self.expires
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

    /// Ends it with what it really cost: less is given back, more is recorded. Repeating it changes nothing.
    ///
    /// # Errors
    /// Where it has expired, or was released.
    pub fn commit(
        &mut self,
        actual: &ActualCost<'_>,
        key: DigestKey,
        balances: &mut [Balance],
        now: Timestamp,
    ) -> Result<(), UnknownReservation> {
        match self.stage {
            Stage::Committed => return Ok(()),
            Stage::Released => return Err(UnknownReservation),
            Stage::Open if now >= self.expires => return Err(UnknownReservation),
            Stage::Open => self.stage = Stage::Committed,
        }
        for (charged, balance) in self.receipt.charged.iter().zip(balances) {
            let reserved = charged.mark.amount;
            if matches!(charged.limit, Limit::Concurrency(_)) {
                // What was in flight has landed.
                charged.give_back(reserved, self.receipt.at, balance, now, self.receipt.id);
                continue;
            }
            let actual = charged.actual(actual, key).unwrap_or(reserved);
            if let Some(more) = actual.checked_sub(reserved).filter(|more| *more > 0) {
                // Not brought to the receipt's limit: that may hold no more, and its terms could forget what was used.
                let limit = charged.limit.in_terms_of(&balance.state);
                balance.charge(&limit, more, now, self.receipt.id);
            } else {
                let less = reserved.saturating_sub(actual);
                charged.give_back(less, self.receipt.at, balance, now, self.receipt.id);
            }
        }
        Ok(())
    }

    /// Ends it without any cost. Repeating it changes nothing.
    ///
    /// # Errors
    /// Where it has expired, or was committed.
    pub fn release(&mut self, balances: &mut [Balance], now: Timestamp) -> Result<(), UnknownReservation> {
        match self.stage {
            Stage::Released => return Ok(()),
            Stage::Committed => return Err(UnknownReservation),
            Stage::Open if now >= self.expires => return Err(UnknownReservation),
            Stage::Open => self.stage = Stage::Released,
        }
        self.receipt.refund(balances, now);
        Ok(())
    }

    /// Ends it if its time has come, giving back what it held if that was chosen. Says whether it has ended.
    pub fn expire(&mut self, balances: &mut [Balance], now: Timestamp) -> bool {
        if now < self.expires {
            return false;
        }
        if self.stage == Stage::Open && self.on_expire == OnExpire::Release {
            self.receipt.refund(balances, now);
        }
        true
    }

    /// The bytes a store keeps.
    #[must_use]
    pub fn to_bytes(&self) -> Vec<u8> {
        let mut out = Writer::new(VERSION);
        out.byte(match self.stage {
            Stage::Open => 0,
            Stage::Committed => 1,
            Stage::Released => 2,
        });
        out.byte(u8::from(self.on_expire == OnExpire::Release));
        out.number(self.expires.micros());
        self.receipt.write(&mut out);
        out.finish()
    }

    /// Reads what [`to_bytes`](Self::to_bytes) wrote.
    ///
    /// # Errors
    /// On another version, and on bytes no reservation has.
    pub fn from_bytes(bytes: &[u8]) -> Result<Self, BytesError> {
        let mut from = Reader::new(bytes, VERSION)?;
        let stage = match from.byte()? {
            0 => Stage::Open,
            1 => Stage::Committed,
            2 => Stage::Released,
            _ => return Err(BytesError::Malformed("reservation")),
        };
        let on_expire = match from.byte()? {
            0 => OnExpire::Charge,
            1 => OnExpire::Release,
            _ => return Err(BytesError::Malformed("reservation")),
        };
        let expires = Timestamp::from_micros(from.number()?);
        let receipt = Receipt::read(&mut from)?;
        from.finish()?;
        Ok(Self { receipt, expires, on_expire, stage })
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use super::*;
    use crate::facts::Facts;
    use crate::policy::Policy;
    use crate::settle::settle;

    const RULES: &str = r#"
        [[rule]]
        name = "all"
        per = ["user"]
        limit = "10/h"
        [[rule]]
        name = "failures"
        per = ["user"]
        limit = "5/h"
        count = "status:401,5xx"
        [[rule]]
        name = "at-once"
        per = ["user"]
        limit = "2"
        algorithm = "concurrency"
    "#;

    /// One request under the rules above, and how many of its charges `take` takes out.
    #[track_caller]
    fn check(take: impl Fn(&mut Pending) -> Option<Receipt>, expect: [u64; 3]) {
        let policy = Policy::parse(RULES, &|_| None).unwrap();
        let facts = Facts { user: Some("u1"), trace: TraceId::from_u128(7), ..Facts::default() };
        let now = Timestamp::from_secs(1_767_225_600);
        let mut balances = vec![Balance::default(); 3];
        let plan = policy.plan(&facts).unwrap().seeing_outcomes();
        let outcome = settle(&plan, &mut balances, &mut [], now);
        let mut pending = plan.pending(&outcome, now);
        assert!(pending.is_open() && pending.has_holds());
        let mut stored: BTreeMap<Digest, Balance> = plan.charges().iter().map(Charge::key).zip(balances).collect();
        if let Some(receipt) = take(&mut pending) {
            let mut own: Vec<Balance> = receipt.keys().map(|key| stored[&key].clone()).collect();
            receipt.refund(&mut own, now);
            stored.extend(receipt.keys().zip(own));
        }
        assert!(take(&mut pending).is_none(), "what was taken out is gone");
        let looks = plan.charges().iter().map(|charge| stored[&charge.key()].look(charge.limit, 0, now));
        assert_eq!(looks.map(|look| look.remaining).collect::<Vec<_>>(), expect);
    }

    #[test]
    fn a_request_under_way_gives_back_each_charge_when_its_time_comes() {
        check(|_| None, [9, 4, 1]);
        check(Pending::take_holds, [9, 4, 2]);
        check(|pending| pending.take_uncounted(Some(200)), [9, 5, 1]);
        check(|pending| pending.take_uncounted(Some(401)), [9, 4, 1]);
        check(|pending| pending.take_uncounted(Some(503)), [9, 4, 1]);
        check(|pending| pending.take_uncounted(None), [9, 5, 1]);
        check(Pending::take_all, [10, 5, 2]);
    }
}
