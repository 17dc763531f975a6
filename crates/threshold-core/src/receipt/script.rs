//! Charges in the form in which a store's scripts give them back and hold them; see `balance/script.rs` for the forms of balances.
//!
//! A change of a balance begins with a byte for what it does:
//!
//! | byte | change | then |
//! |---|---|---|
//! | 1 | gives a charge back | the time as of which, 0 for the present; the history; the shape and its numbers |
//! | 2 | charges, whether or not it fits | a charge as `settle.lua` takes it |
//! | 3 | gives back what was charged last | the shape of the charge, and its numbers |
//! | 4 | blocks | until when |

use super::{Charged, Charges, History, HoldTerms, OnExpire, Receipt, Reservation};
use crate::balance::{RECORDED, Shaped};
use crate::bill::Bill;
use crate::codec::{BytesError, Reader, Versions, from_bytes, to_bytes};
use crate::key::{Digest, TraceId};
use crate::limit::{Limit, Mark};
use crate::plan::MAX_CHARGES;
use crate::receipt::{CostTag, MAX_RESERVATION};
use crate::time::Timestamp;

const GIVE_BACK: u8 = 1;
const CHARGE: u8 = 2;
const CREDIT: u8 = 3;
const BLOCK: u8 = 4;

/// The first byte of a hold that a script has written. The version of no record is that large.
const HELD: u8 = 255;
/// What a script says of each charge of a hold: the limit was full, it had room and nothing was charged, or it was charged.
const FULL: u8 = 0;
const CHARGED: u8 = 2;

/// The first byte of a charge that is given back. Its bits mean something only in a charge that is made.
const NO_TERMS: u8 = 0;

const WRONG: BytesError = BytesError::Malformed("hold");

impl Receipt {
    /// Returns each charge that was made as a script gives it back, with its key; `None` for one that no script knows.
    pub(super) fn credits_to_script(
        &self,
        as_of: Option<Timestamp>,
    ) -> impl Iterator<Item = Option<(Digest, Vec<u8>)>> {
        let made = self.charged.iter().filter(|charged| charged.mark.amount > 0);
        made.map(move |charged| Some((charged.key, charged.credit_to_script(self.id, as_of.unwrap_or_default())?)))
    }

    /// Returns each charge as a script makes it, with its key; `None` for one that no script knows.
    pub(super) fn debits_to_script(&self) -> impl Iterator<Item = Option<(Digest, Vec<u8>)>> {
        self.charged.iter().map(|charged| {
            let shape = charged.limit.charge_shape(charged.mark.amount, self.id)?.write(RECORDED)?;
            Some((charged.key, charge_to_script(&shape)))
        })
    }
}

/// Returns the change by which a script makes a charge that [`Bill::to_script`] has returned.
#[must_use]
pub fn charge_to_script(charge: &[u8]) -> Vec<u8> {
    [&[CHARGE], charge].concat()
}

/// Returns the change by which a script gives back an amount that nobody can show to have been charged.
#[must_use]
pub fn credit_to_script(limit: &Limit, amount: u64) -> Option<Vec<u8>> {
    // Nothing that is held ends without its id.
    let shaped = limit.charge_shape(amount, TraceId::default()).filter(|_| !limit.is_concurrency())?;
    Some([&[CREDIT], shaped.write(NO_TERMS)?.as_slice()].concat())
}

/// Returns the change by which a script denies every cost until a time; `None` if the time has no form there.
#[must_use]
pub fn block_to_script(until: Timestamp) -> Option<Vec<u8>> {
    // A time beyond what the script can compare is left to core.
    (until.micros() < Shaped::LARGEST).then(|| [&[BLOCK], until.micros().to_be_bytes().as_slice()].concat())
}

impl Charged {
    fn credit_to_script(&self, id: TraceId, as_of: Timestamp) -> Option<Vec<u8>> {
        let Shaped { shape, numbers } = self.limit.charge_shape(self.mark.amount, id)?;
        let (at, part, amount) = (self.at.micros(), self.mark.part.micros(), self.mark.amount);
        let numbers = match (self.limit.refills_smoothly(), self.limit.is_concurrency(), &numbers[..]) {
            // The increment of a charge is what giving it back takes off.
            (true, _, [quota, period, parts, less, less_fraction, ..]) => {
                let (until, fraction) = (self.counts_until.micros(), self.mark.fraction());
                vec![*quota, *period, *parts, at, until, part, fraction, *less, *less_fraction]
            }
            // A hold is found by its id, whatever the clock says.
            (_, true, [_, _, _, _, high, middle, low]) => vec![amount, *high, *middle, *low],
            (false, false, [_, period, ..]) => vec![*period, at, part, amount],
            _ => return None,
        };
        let shaped = Shaped { shape, numbers }.write(NO_TERMS)?;
        Some([&[GIVE_BACK], as_of.micros().to_be_bytes().as_slice(), &self.history.to_bytes(), &shaped].concat())
    }
}

/// What a node knows of a hold before it is made.
struct Planned {
    id: TraceId,
    on_expire: OnExpire,
    charges: Vec<(Digest, u32, Limit, CostTag, u64)>,
}

impl Reservation {
    /// The versions of what a node passes to the script.
    const PLANNED: Versions = Versions::FIRST.containing(Limit::VERSIONS);

    /// Returns what a script needs to hold what it charges: for how long, whether it is given back then, and how long the record is kept
    /// after that, then what it keeps. It puts before that what only it knows: the byte 255, the time, the time of the expiry, the
    /// history, and for each charge whether it was made, the part of the balance that was charged with its fraction, and until when
    /// it counts.
    #[must_use]
    pub fn hold_to_script(bill: &Bill<'_>, terms: &HoldTerms) -> Vec<u8> {
        let is_released = terms.on_expire == OnExpire::Release;
        // As long as there is something to give back, in case that nobody asks for the partition for so long.
        let memory = bill.charges.iter().map(|charge| charge.limit.memory()).max().filter(|_| is_released);
        let [ttl, kept] = [terms.ttl.min(MAX_RESERVATION), memory.unwrap_or_default()];
        let terms_bytes = [&ttl.micros().to_be_bytes()[..], &[u8::from(is_released)], &kept.micros().to_be_bytes()];
        [terms_bytes.concat(), Self::planned(bill, terms)].concat()
    }

    fn planned(bill: &Bill<'_>, terms: &HoldTerms) -> Vec<u8> {
        to_bytes(Self::PLANNED, crate::codec::Format::PRESENT, |out| {
            out.wide(bill.trace.to_u128());
            out.byte(u8::from(terms.on_expire == OnExpire::Release));
            out.number(bill.charges.len() as u64);
            for (index, charge) in bill.charges.iter().enumerate() {
                out.wide(charge.key.to_u128());
                out.number(u64::from(charge.terms.tag));
                charge.limit.write(out);
                out.number(terms.unit(index).0);
                out.number(charge.cost);
            }
        })
    }

    /// Reads a hold that a script has written; `None` for other bytes.
    pub(super) fn held_by_script(bytes: &[u8]) -> Option<Result<Self, BytesError>> {
        let held = bytes.strip_prefix(&[HELD])?;
        Some(Self::read_held(held))
    }

    fn read_held(bytes: &[u8]) -> Result<Self, BytesError> {
        let mut numbers = Numbers(bytes);
        let (at, expires, history) = (numbers.time()?, numbers.time()?, History::from_bytes(numbers.next()?));
        let count = usize::from(numbers.byte()?);
        if count > MAX_CHARGES {
            return Err(WRONG);
        }
        let mut found = Vec::with_capacity(count);
        for _ in 0..count {
            let (state, part) = (numbers.byte()?, numbers.time()?);
            found.push((state, part, u64::from_be_bytes(numbers.next()?), numbers.time()?));
        }
        let planned = from_bytes(numbers.0, Self::PLANNED, Planned::read)?;
        if planned.charges.len() != count {
            return Err(WRONG);
        }
        let mut charged = Charges::new();
        for ((key, rule, limit, unit, cost), (state, part, fraction, until)) in planned.charges.into_iter().zip(found) {
            if state == FULL {
                continue;
            }
            let mark = if state == CHARGED {
                Mark::new(part, cost).with_fraction(fraction)
            } else {
                // It gives nothing back, whatever its time is.
                Mark::new(at, 0)
            };
            let counts_until = limit.counts_until(until);
            charged.push(Charged { key, at, history, rule, limit, unit, mark, counts_until });
        }
        let receipt = Receipt { id: planned.id, generation: 0, at, charged };
        Ok(Self::open(receipt, expires, planned.on_expire))
    }
}

impl Planned {
    fn read(from: &mut Reader<'_>) -> Result<Self, BytesError> {
        let id = TraceId::from_u128(from.wide()?);
        let on_expire = match from.byte()? {
            0 => OnExpire::Charge,
            1 => OnExpire::Release,
            _ => return Err(WRONG),
        };
        let mut charges = Vec::new();
        for _ in 0..from.count(MAX_CHARGES)? {
            let key = Digest::from_u128(from.wide()?);
            let rule = u32::try_from(from.number()?).map_err(|_| WRONG)?;
            charges.push((key, rule, Limit::read(from)?, CostTag(from.number()?), from.number()?));
        }
        Ok(Self { id, on_expire, charges })
    }
}

/// The numbers of fixed width at the front of what a script has written.
struct Numbers<'b>(&'b [u8]);

impl Numbers<'_> {
    fn byte(&mut self) -> Result<u8, BytesError> {
        let (byte, rest) = self.0.split_first().ok_or(BytesError::Truncated)?;
        self.0 = rest;
        Ok(*byte)
    }

    fn next(&mut self) -> Result<[u8; 8], BytesError> {
        let (number, rest) = self.0.split_first_chunk().ok_or(BytesError::Truncated)?;
        self.0 = rest;
        Ok(*number)
    }

    fn time(&mut self) -> Result<Timestamp, BytesError> {
        self.next().map(|bytes| Timestamp::from_micros(u64::from_be_bytes(bytes)))
    }
}
