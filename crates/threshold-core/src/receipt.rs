//! Receipt: a record of what was charged, so that exactly that can be refunded once.

mod history;
mod hold;
mod pending;
mod reservation;
mod script;

use smallvec::SmallVec;

use crate::balance::Balance;
use crate::bill::Bill;
use crate::codec::{BytesError, Format, Reader, Versions, Writer, from_bytes, to_bytes};
use crate::key::{Digest, DigestKey, Domain, Part, TraceId};
use crate::limit::{Limit, Mark, State};
use crate::plan::{MAX_CHARGES, Met, Plan};
use crate::policy::CostOf;
use crate::secret::{Purpose, Secret, Secrets};
use crate::settle::{Outcome, Settled};
use crate::time::{Span, Timestamp};

pub use history::History;
pub use hold::HoldTerms;
pub use pending::Pending;
pub use reservation::{Adjustment, CommitError, MAX_RESERVATION, OnExpire, Reservation, UnknownReservation};
pub use script::{block_to_script, charge_to_script, credit_to_script};

/// A record of what one request was charged.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Receipt {
    id: TraceId,
    generation: u64,
    at: Timestamp,
    charged: Charges,
}

/// The charges of a receipt. As many as a decision has readings in line, so that both are small enough to be returned.
type Charges = SmallVec<[Charged; 6]>;

/// One charge on a receipt.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Charged {
    key: Digest,
    /// When it was charged, by the clock of the store's partition that it lies in.
    at: Timestamp,
    /// The history of that partition.
    history: History,
    /// The rule, shortened.
    rule: u32,
    limit: Limit,
    unit: CostTag,
    mark: Mark,
    /// For a token bucket: when it is full again after this charge, rounded up. From then on the charge has refilled. For
    /// other algorithms, whose mark shows whether a charge still counts: [`Timestamp::MAX`].
    counts_until: Timestamp,
}

/// The unit of a charge: requests, bytes, or the digest of a cost's name.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct CostTag(u64);

impl CostTag {
    const REQUESTS: Self = Self(0);
    const BYTES: Self = Self(1);

    fn of(cost: &CostOf) -> Self {
        match cost {
            CostOf::Requests => Self::REQUESTS,
            CostOf::Bytes => Self::BYTES,
            CostOf::Named(name) => Self::named(name),
        }
    }

    /// Digests a cost's name with a fixed key: a reservation may outlive a rotation of the secret.
    fn named(name: &str) -> Self {
        let mut digest = DigestKey::OF_NAMES.begin(Domain::CostName);
        digest.text(Part::Fact, name);
        let number = u64::try_from(digest.finish().to_u128() >> 64).unwrap_or(u64::MAX);
        // 0 and 1 are requests and bytes.
        Self(number.max(2))
    }
}

/// The actual cost of a reserved request. A cost that is `None` or missing stays as it was reserved.
#[derive(Debug, Clone, Copy, Default)]
pub struct ActualCost<'a> {
    /// The cost in requests.
    pub cost: Option<u64>,
    /// The cost in bytes.
    pub bytes: Option<u64>,
    /// The named costs.
    pub costs: &'a [(&'a str, u64)],
}

/// An [`ActualCost`] that a store can keep: owned, with digests for names.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct OwnedCost {
    pub(crate) requests: Option<u64>,
    pub(crate) bytes: Option<u64>,
    /// The digest of each name, and its amount.
    pub(crate) named: Vec<(u64, u64)>,
}

impl ActualCost<'_> {
    /// Returns the cost in the form that stores take.
    #[must_use]
    pub fn owned(&self) -> OwnedCost {
        let named = self.costs.iter().map(|(name, cost)| (CostTag::named(name).0, *cost)).collect();
        OwnedCost { requests: self.cost, bytes: self.bytes, named }
    }
}

impl Plan<'_> {
    /// Returns the receipt of what was charged; `None` if nothing was.
    #[must_use]
    pub fn receipt(&self, outcome: &Outcome) -> Option<Receipt> {
        let mut receipt = self.holding(outcome);
        receipt.charged.retain(|charged| charged.mark.amount > 0);
        (!receipt.charged.is_empty()).then_some(receipt)
    }

    /// Returns what a reservation holds: every limit that had room, even if nothing was charged yet.
    #[must_use]
    pub fn holding(&self, outcome: &Outcome) -> Receipt {
        let receipt = Receipt::holding(&self.bill, &self.hold_terms(Span::ZERO, OnExpire::Charge), outcome);
        Receipt { generation: self.policy.generation, ..receipt }
    }

    /// Returns what a reservation of this plan holds, for how long, and what happens when its time is over.
    #[must_use]
    pub fn hold_terms(&self, ttl: Span, on_expire: OnExpire) -> HoldTerms {
        let unit = |charge: usize| self.met_by(charge).map_or(CostTag::REQUESTS, |met| CostTag::of(met.counts));
        HoldTerms { units: (0..self.bill.charges.len()).map(unit).collect(), ttl, on_expire }
    }

    /// Returns the first rule that asked for a charge.
    fn met_by(&self, charge: usize) -> Option<&Met<'_>> {
        self.met.iter().find(|met| met.charge == charge)
    }

    /// Pairs each settled charge with the first rule that asked for it.
    fn billed<'o>(&'o self, outcome: &'o Outcome) -> impl Iterator<Item = (&'o Met<'o>, &'o Settled)> {
        outcome.settled.iter().enumerate().filter_map(|(charge, settled)| Some((self.met_by(charge)?, settled)))
    }

    fn charged(&self, met: &Met<'_>, settled: &Settled, mark: Mark, outcome: &Outcome) -> Charged {
        let unit = CostTag::of(met.counts);
        // The limit that was charged. Where several requests share a charge, it is the smallest of theirs, and the
        // balance is in its terms.
        let limit = self.bill.charges.get(met.charge).map_or(met.limit, |charge| charge.limit);
        let counts_until = settled.counts_until(limit);
        // The stand-in, where the store had no room: a refund to the own key would give the cost to a budget that never
        // paid it.
        let key = outcome.charged_key(met.key);
        let (history, rule) = (outcome.history(met.charge), met.rule.terms.tag);
        Charged { key, at: settled.at, history, rule, limit: *limit, unit, mark, counts_until }
    }
}

impl Settled {
    /// Returns until when the charge counts, where the mark does not show it.
    fn counts_until(&self, limit: &Limit) -> Timestamp {
        limit.counts_until(self.look.reset_if_charged)
    }
}

impl Receipt {
    /// Returns the receipt of a settled bill, to give its charges back at once; `None` if nothing was charged.
    #[must_use]
    pub fn of_bill(bill: &Bill<'_>, outcome: &Outcome) -> Option<Self> {
        // The units are never read: this receipt is given back as a whole, and only a commit looks at them.
        let mut receipt = Self::holding(bill, &HoldTerms::default(), outcome);
        receipt.charged.retain(|charged| charged.mark.amount > 0);
        (!receipt.charged.is_empty()).then_some(receipt)
    }

    /// Returns what a reservation of a settled bill holds: every limit that had room, even if nothing was charged yet.
    #[must_use]
    pub fn holding(bill: &Bill<'_>, terms: &HoldTerms, outcome: &Outcome) -> Self {
        let mut charged = Charges::new();
        for (index, (charge, settled)) in bill.charges.iter().zip(&outcome.settled).enumerate() {
            // A charge of 0 is held too: a commit may name a cost that was not known when the request was reserved. A full
            // limit that a rung has lifted is left out, because the request never took from it.
            if !settled.look.allowed && settled.mark.is_none() {
                continue;
            }
            charged.push(Charged {
                // The stand-in, where the store had no room: a refund to the own key would give the cost to a budget that never
                // paid it.
                key: outcome.charged_key(charge.key),
                at: settled.at,
                history: outcome.history(index),
                rule: charge.terms.tag,
                limit: *charge.limit,
                unit: terms.unit(index),
                // A mark without an amount gives nothing back, whatever its time is.
                mark: settled.mark.unwrap_or(Mark::new(settled.at, 0)),
                counts_until: settled.counts_until(charge.limit),
            });
        }
        Self { id: bill.trace, generation: 0, at: outcome.at(), charged }
    }

    /// Returns the receipt of a request that was charged nothing.
    pub(crate) fn of_nothing(id: TraceId, at: Timestamp) -> Self {
        Self { id, generation: 0, at, charged: Charges::new() }
    }

    /// Splits the receipt into parts, each with the charges that `place` assigns to the same place, such as a partition. Every part
    /// keeps the id of the whole.
    #[must_use]
    pub fn split<P: Copy + PartialEq>(&self, place: impl Fn(Digest) -> P) -> Vec<(P, Self)> {
        let mut parts: Vec<(P, Self)> = Vec::new();
        for charged in &self.charged {
            let place = place(charged.key);
            if let Some((_, known)) = parts.iter_mut().find(|(own, _)| *own == place) {
                known.charged.push(*charged);
            } else {
                let charged = Charges::from_iter([*charged]);
                parts.push((place, Self { id: self.id, generation: self.generation, at: self.at, charged }));
            }
        }
        parts
    }

    /// Replaces the charges that a part of this receipt has too, after the part was charged again.
    pub fn join(&mut self, part: &Self) {
        for charged in &mut self.charged {
            if let Some(new) = part.charged.iter().find(|new| new.key == charged.key) {
                *charged = *new;
            }
        }
        self.at = self.at.max(part.at);
    }

    /// Adds the charges of another part of the same decision.
    pub(crate) fn append(&mut self, part: &Self) {
        self.charged.extend_from_slice(&part.charged);
        self.at = self.at.max(part.at);
    }

    /// Returns the receipt of one charge on one key, to give it back later.
    #[must_use]
    pub fn of_charge(id: TraceId, key: Digest, limit: &Limit, (mark, history): (Mark, History), at: Timestamp) -> Self {
        let (unit, counts_until) = (CostTag::REQUESTS, Timestamp::MAX);
        let charged = Charged { key, at, history, rule: 0, limit: *limit, unit, mark, counts_until };
        Self { id, generation: 0, at, charged: Charges::from_iter([charged]) }
    }

    /// The format versions that can be read.
    pub(crate) const VERSIONS: Versions = Versions::FIRST.containing(Limit::VERSIONS);

    /// Returns the id of the decision. A store remembers the ids that it has refunded.
    #[must_use]
    pub fn id(&self) -> TraceId {
        self.id
    }

    /// Returns when the request was charged.
    #[must_use]
    pub fn at(&self) -> Timestamp {
        self.at
    }

    /// Returns the generation of the policy that charged.
    #[must_use]
    pub fn generation(&self) -> u64 {
        self.generation
    }

    /// Returns the charged keys, in the order in which [`refund`](Self::refund) takes their balances.
    pub fn keys(&self) -> impl Iterator<Item = Digest> {
        self.charged.iter().map(|charged| charged.key)
    }

    /// Returns the charged keys, each with its limit.
    pub fn charges(&self) -> impl Iterator<Item = (Digest, Limit)> {
        self.charged.iter().map(|charged| (charged.key, charged.limit))
    }

    /// Returns the connections over which this node has heard of these charges; none of a receipt that was read from bytes.
    pub fn heard_over(&self) -> impl Iterator<Item = u64> {
        self.charged.iter().map(|charged| charged.history.connection()).filter(|connection| *connection != 0)
    }

    /// Returns whether a partition that has the `present` history has lost all of these charges.
    #[must_use]
    pub fn is_lost_in(&self, present: History) -> bool {
        !self.charged.iter().any(|charged| charged.history.counts_in(present))
    }

    /// Returns when a refund stops having any effect, so that a store may forget it.
    #[must_use]
    pub fn void_from(&self) -> Timestamp {
        // By the limit and not by the balance, which a store may have lost. Forgetting a refund too early would allow a
        // second one.
        let ends = self.charged.iter().map(|charged| charged.at.plus(charged.limit.memory()));
        ends.max().unwrap_or(self.at)
    }

    /// Returns the receipt with keys replaced by `present`, after a rotation of the secret has moved balances.
    #[must_use]
    pub fn rekeyed(&self, present: impl Fn(Digest) -> Digest) -> Self {
        let mut receipt = self.clone();
        for charged in &mut receipt.charged {
            charged.key = present(charged.key);
        }
        receipt
    }

    /// Gives back what was charged, where it still counts. The caller ensures that this happens once.
    pub fn refund(&self, balances: &mut [Balance], now: Timestamp) {
        for (charged, balance) in self.charged.iter().zip(balances) {
            charged.give_back(charged.mark.amount, balance, now, self.id);
        }
    }

    /// Gives back what was charged and charges it again, as if the request came now. Under one lock of the store this
    /// never needs more room than before, so it cannot fail.
    pub fn renew(&mut self, balances: &mut [Balance], now: Timestamp) {
        self.refund(balances, now);
        for (charged, balance) in self.charged.iter_mut().zip(balances) {
            // A balance under another limit was not refunded, so it must not be charged again.
            if balance.state == State::Empty || balance.is_in_terms_of(&charged.limit) {
                let (look, _) = balance.look(&charged.limit, charged.mark.amount, now);
                charged.mark = balance.charge(&charged.limit, charged.mark.amount, now, self.id);
                charged.at = now;
                let latest = charged.limit.latest_reset(&charged.mark, now);
                charged.counts_until = charged.limit.counts_until(look.reset_if_charged.min(latest));
            }
        }
        self.at = now;
    }

    /// Returns the receipt as an opaque, signed token.
    #[must_use]
    pub fn to_token(&self, secret: &Secret, format: Format) -> String {
        secret.seal(Purpose::Receipt, &self.to_bytes(format))
    }

    /// Verifies and decodes a token.
    ///
    /// # Errors
    /// Returns an error if the token is not a receipt that one of these secrets has signed.
    pub fn from_token(token: &str, secrets: &Secrets) -> Result<Self, BytesError> {
        Self::from_bytes(&secrets.open(Purpose::Receipt, token)?)
    }

    /// Encodes the receipt, for signing and for storage.
    #[must_use]
    pub fn to_bytes(&self, format: Format) -> Vec<u8> {
        to_bytes(Self::VERSIONS, format, |out| self.write(out))
    }

    /// Decodes what [`to_bytes`](Self::to_bytes) has encoded.
    ///
    /// # Errors
    /// Returns an error on an unknown version and on malformed bytes.
    pub fn from_bytes(bytes: &[u8]) -> Result<Self, BytesError> {
        from_bytes(bytes, Self::VERSIONS, Self::read)
    }

    pub(crate) fn write(&self, out: &mut Writer) {
        out.wide(self.id.to_u128());
        out.number(self.generation);
        out.number(self.at.micros());
        out.number(self.charged.len() as u64);
        let mut before = History::default();
        for charged in &self.charged {
            out.wide(charged.key.to_u128());
            // Most charges have the history of the one before, which takes one byte.
            charged.history.write_after(before, out);
            before = charged.history;
            // As a difference. One partition settles most bills, and then it is 0, which takes one byte.
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
            charged: Charges::new(),
        };
        let mut before = History::default();
        for _ in 0..from.count(MAX_CHARGES)? {
            let charged = Charged::read(from, receipt.at, before)?;
            before = charged.history;
            receipt.charged.push(charged);
        }
        Ok(receipt)
    }
}

impl Charged {
    /// Decodes one charge. Its time is stored as the difference to `latest`, the time of the receipt.
    fn read(from: &mut Reader<'_>, latest: Timestamp, history_before: History) -> Result<Self, BytesError> {
        let key = Digest::from_u128(from.wide()?);
        let history = History::read_after(history_before, from)?;
        let before = from.number()?;
        // `minus` would saturate at the epoch, and the same charge would then have two encodings.
        if before > latest.micros() {
            return Err(BytesError::Malformed("receipt"));
        }
        let at = latest.minus(Span::from_micros(before));
        let rule = u32::try_from(from.number()?).map_err(|_| BytesError::Malformed("receipt"))?;
        let limit = Limit::read(from)?;
        let unit = CostTag(from.number()?);
        let (mark, counts_until) = limit.read_charge(from)?;
        Ok(Self { key, at, history, rule, limit, unit, mark, counts_until })
    }

    /// Gives back `amount` of this charge. Does nothing if the balance is under another limit, or if the clock is before
    /// the charge: then nothing shows which part of the balance the charge was. A concurrency hold is found by its id,
    /// whatever the clock says.
    fn give_back(&self, amount: u64, balance: &mut Balance, now: Timestamp, id: TraceId) {
        // A refund must never create capacity, so in doubt nothing is given back.
        let found = now >= self.at || self.limit.is_concurrency();
        if found && now < self.counts_until && balance.is_in_terms_of(&self.limit) {
            balance.give_back(self.mark.with_amount(amount), now, id);
        }
    }

    fn with_amount(mut self, amount: u64) -> Self {
        self.mark = self.mark.with_amount(amount);
        self
    }

    fn actual(&self, cost: &OwnedCost) -> Option<u64> {
        match self.unit {
            CostTag::REQUESTS => cost.requests,
            CostTag::BYTES => cost.bytes,
            CostTag(named) => cost.named.iter().find(|(name, _)| *name == named).map(|(_, amount)| *amount),
        }
    }
}
