//! Receipt: what was charged, so that exactly that can be given back, once.

mod pending;
mod reservation;

use arrayvec::ArrayVec;

use crate::balance::Balance;
use crate::bill::Bill;
use crate::codec::{BytesError, Format, Reader, Versions, Writer, from_bytes, to_bytes};
use crate::key::{Digest, DigestKey, Domain, Part, Partition, TraceId};
use crate::limit::{Limit, Mark, State};
use crate::plan::{MAX_CHARGES, Met, Plan};
use crate::policy::CostOf;
use crate::secret::{Purpose, Secret, Secrets};
use crate::settle::{Outcome, Settled};
use crate::time::{Span, Timestamp};

pub use pending::Pending;
pub use reservation::{CommitError, MAX_RESERVATION, OnExpire, Reservation, UnknownReservation};

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
    /// When it was charged, by the clock of the store's partition that it lies in.
    at: Timestamp,
    /// The rule, shortened.
    rule: u32,
    limit: Limit,
    unit: CostTag,
    mark: Mark,
    /// When a token bucket is full again after this charge, rounded up: from then on the charge has refilled. Other
    /// algorithms tell by the mark whether a charge still counts; for them this is the end of time.
    counts_until: Timestamp,
}

/// What a charge counted: requests, bytes, or the digest of a name.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct CostTag(u64);

impl CostTag {
    const REQUESTS: Self = Self(0);
    const BYTES: Self = Self(1);

    /// The same under every secret: a reservation may outlive a rotation.
    fn named(name: &str) -> Self {
        let mut digest = DigestKey::OF_NAMES.begin(Domain::CostName);
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

/// What a reserved request really cost, as a store is told: names are digests.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct OwnedCost {
    pub(crate) requests: Option<u64>,
    pub(crate) bytes: Option<u64>,
    /// Each name's digest and its amount.
    pub(crate) named: Vec<(u64, u64)>,
}

impl ActualCost<'_> {
    /// The same for a store.
    #[must_use]
    pub fn owned(&self) -> OwnedCost {
        let named = self.costs.iter().map(|(name, cost)| (CostTag::named(name).0, *cost)).collect();
        OwnedCost { requests: self.cost, bytes: self.bytes, named }
    }
}

impl Plan<'_> {
    /// The receipt of what was charged; `None` if nothing was.
    #[must_use]
    pub fn receipt(&self, outcome: &Outcome) -> Option<Receipt> {
        let mut receipt = self.holding(outcome);
        receipt.charged.retain(|charged| charged.mark.amount > 0);
        (!receipt.charged.is_empty()).then_some(receipt)
    }

    /// What a reservation holds: every limit that had room, also where nothing was charged yet.
    #[must_use]
    pub fn holding(&self, outcome: &Outcome) -> Receipt {
        let mut charged = ArrayVec::new();
        for (met, settled) in self.billed(outcome).filter(|(_, settled)| settled.look.allowed || settled.mark.is_some())
        {
            let mark = settled.mark.unwrap_or(Mark::new(settled.at, 0));
            let _ = charged.try_push(self.charged(met, settled, mark, outcome));
        }
        Receipt { id: self.trace(), generation: self.policy.generation, at: outcome.at(), charged }
    }

    /// What became of each charge, with the first rule that asked for it.
    fn billed<'o>(&'o self, outcome: &'o Outcome) -> impl Iterator<Item = (&'o Met<'o>, &'o Settled)> {
        let first = |charge: usize| self.met.iter().find(move |met| met.charge == charge);
        outcome.settled.iter().enumerate().filter_map(move |(charge, settled)| Some((first(charge)?, settled)))
    }

    fn charged(&self, met: &Met<'_>, settled: &Settled, mark: Mark, outcome: &Outcome) -> Charged {
        let unit = match met.counts {
            CostOf::Requests => CostTag::REQUESTS,
            CostOf::Bytes => CostTag::BYTES,
            CostOf::Named(name) => CostTag::named(name),
        };
        let limit = self.bill.charges.get(met.charge).map_or(met.limit, |charge| charge.limit);
        let counts_until = settled.counts_until(limit);
        let key = outcome.charged_key(met.key);
        Charged { key, at: settled.at, rule: met.rule.tag, limit: *limit, unit, mark, counts_until }
    }
}

impl Settled {
    /// Until when its charge counts, as far as the limit cannot tell by the mark.
    fn counts_until(&self, limit: &Limit) -> Timestamp {
        limit.counts_until(self.look.reset_if_charged)
    }
}

impl Receipt {
    /// What was charged of a bill, so that it can be given back at once; `None` if nothing was.
    pub(crate) fn of_bill(bill: &Bill<'_>, outcome: &Outcome) -> Option<Self> {
        let mut charged = ArrayVec::new();
        for (charge, settled) in bill.charges.iter().zip(&outcome.settled) {
            let Some(mark) = settled.mark.filter(|mark| mark.amount > 0) else { continue };
            let key = outcome.charged_key(charge.key);
            let unit = CostTag::REQUESTS;
            let counts_until = settled.counts_until(charge.limit);
            let rule = charge.terms.tag;
            let _ =
                charged.try_push(Charged { key, at: settled.at, rule, limit: *charge.limit, unit, mark, counts_until });
        }
        let receipt = Self { id: bill.trace, generation: 0, at: outcome.at(), charged };
        (!receipt.charged.is_empty()).then_some(receipt)
    }

    /// The same by partition, each with the charges that lie in it. Every part has the id of the whole, so that each
    /// partition gives back its own part once.
    #[must_use]
    pub fn split(&self) -> Vec<(Partition, Self)> {
        let mut parts: Vec<(Partition, Self)> = Vec::new();
        for charged in &self.charged {
            let partition = charged.key.partition();
            if let Some((_, known)) = parts.iter_mut().find(|(own, _)| *own == partition) {
                known.charged.push(*charged);
            } else {
                let charged = ArrayVec::from_iter([*charged]);
                parts.push((partition, Self { id: self.id, generation: self.generation, at: self.at, charged }));
            }
        }
        parts
    }

    /// The versions in which it is read.
    pub(crate) const VERSIONS: Versions = Versions::FIRST.containing(Limit::VERSIONS);

    /// The id of the decision it is of. A store that has seen it refunded refunds it no more.
    #[must_use]
    pub fn id(&self) -> TraceId {
        self.id
    }

    /// The partition in which the record of giving it back, or of its reservation, lies: that of its first charge. Where
    /// nothing was charged, its id says.
    #[must_use]
    pub fn home(&self) -> Partition {
        let first = self.charged.first().map(|charged| charged.key);
        first.unwrap_or(Digest::from_u128(self.id.to_u128())).partition()
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
        let ends = self.charged.iter().map(|charged| charged.at.plus(charged.limit.memory()));
        ends.max().unwrap_or(self.at)
    }

    /// The same receipt for keys that have moved, after a rotation of the secret.
    #[must_use]
    pub fn rekeyed(&self, present: impl Fn(Digest) -> Digest) -> Self {
        let mut receipt = self.clone();
        for charged in &mut receipt.charged {
            charged.key = present(charged.key);
        }
        receipt
    }

    /// Gives back what was charged, where it still counts. The caller sees to it that this happens once.
    pub fn refund(&self, balances: &mut [Balance], now: Timestamp) {
        for (charged, balance) in self.charged.iter().zip(balances) {
            charged.give_back(charged.mark.amount, balance, now, self.id);
        }
    }

    /// Gives back what was charged and charges it again, as if the request came now. In one step under a store's lock no
    /// limit has less in view than before, so this needs no room and never fails.
    pub fn renew(&mut self, balances: &mut [Balance], now: Timestamp) {
        self.refund(balances, now);
        for (charged, balance) in self.charged.iter_mut().zip(balances) {
            // Under other figures it was not given back.
            if balance.state == State::Empty || balance.is_in_terms_of(&charged.limit) {
                let (look, _) = balance.look(&charged.limit, charged.mark.amount, now);
                charged.mark = balance.charge(&charged.limit, charged.mark.amount, now, self.id);
                charged.at = now;
                charged.counts_until = charged.limit.counts_until(look.reset_if_charged);
            }
        }
        self.at = now;
    }

    /// The opaque, signed text that callers hold.
    #[must_use]
    pub fn to_token(&self, secret: &Secret, format: Format) -> String {
        secret.seal(Purpose::Receipt, &self.to_bytes(format))
    }

    /// Reads a token.
    ///
    /// # Errors
    /// Where it was not signed by this installation as a receipt.
    pub fn from_token(token: &str, secrets: &Secrets) -> Result<Self, BytesError> {
        Self::from_bytes(&secrets.open(Purpose::Receipt, token)?)
    }

    /// The bytes that are signed and stored.
    #[must_use]
    pub fn to_bytes(&self, format: Format) -> Vec<u8> {
        to_bytes(Self::VERSIONS, format, |out| self.write(out))
    }

    /// Reads what [`to_bytes`](Self::to_bytes) wrote.
    ///
    /// # Errors
    /// On another version, and on bytes no receipt has.
    pub fn from_bytes(bytes: &[u8]) -> Result<Self, BytesError> {
        from_bytes(bytes, Self::VERSIONS, Self::read)
    }

    pub(crate) fn write(&self, out: &mut Writer) {
        out.wide(self.id.to_u128());
        out.number(self.generation);
        out.number(self.at.micros());
        out.number(self.charged.len() as u64);
        for charged in &self.charged {
            out.wide(charged.key.to_u128());
            out.number(self.at.since(charged.at).micros());
            out.number(u64::from(charged.rule));
            charged.limit.write(out);
            out.number(charged.unit.0);
            charged.limit.write_charge(&charged.mark, charged.counts_until, out);
        }
    }

    pub(crate) fn read(from: &mut Reader<'_>) -> Result<Self, BytesError> {
        let mut receipt = Self {
            id: TraceId::from_u128(from.wide()?),
            generation: from.number()?,
            at: Timestamp::from_micros(from.number()?),
            charged: ArrayVec::new(),
        };
        for _ in 0..from.count(MAX_CHARGES)? {
            let _ = receipt.charged.try_push(Charged::read(from, receipt.at)?);
        }
        Ok(receipt)
    }
}

impl Charged {
    /// Reads one that was charged at `latest`, or so much before as it says.
    fn read(from: &mut Reader<'_>, latest: Timestamp) -> Result<Self, BytesError> {
        let key = Digest::from_u128(from.wide()?);
        let before = from.number()?;
        if before > latest.micros() {
            return Err(BytesError::Malformed("receipt"));
        }
        let at = latest.minus(Span::from_micros(before));
        let rule = u32::try_from(from.number()?).map_err(|_| BytesError::Malformed("receipt"))?;
        let limit = Limit::read(from)?;
        let unit = CostTag(from.number()?);
        let (mark, counts_until) = limit.read_charge(from)?;
        Ok(Self { key, at, rule, limit, unit, mark, counts_until })
    }

    /// Gives `amount` of this charge back. A balance in other figures, or a clock that stands before the charge, cannot
    /// say any more which part of it this was: then there is nothing to give back. A hold is known by its id, whatever
    /// the clock says.
    fn give_back(&self, amount: u64, balance: &mut Balance, now: Timestamp, id: TraceId) {
        let tells = now >= self.at || self.limit.is_concurrency();
        if tells && now < self.counts_until && balance.is_in_terms_of(&self.limit) {
            balance.give_back(self.mark.with_amount(amount), now, id);
        }
    }

    fn actual(&self, cost: &OwnedCost) -> Option<u64> {
        match self.unit {
            CostTag::REQUESTS => cost.requests,
            CostTag::BYTES => cost.bytes,
            CostTag(named) => cost.named.iter().find(|(name, _)| *name == named).map(|(_, amount)| *amount),
        }
    }
}
