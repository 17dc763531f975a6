//! What a reservation holds of a bill, for how long, and what happens when its time is over.

use arrayvec::ArrayVec;

use super::{CostTag, MAX_RESERVATION, OnExpire, Receipt};
use crate::codec::{BytesError, Reader, Writer};
use crate::command::Command;
use crate::plan::MAX_CHARGES;
use crate::time::Span;

/// The terms of a reservation that is made together with its charges.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct HoldTerms {
    /// The unit of each charge of the bill, so that a commit finds the actual cost of each.
    pub(super) units: ArrayVec<CostTag, MAX_CHARGES>,
    pub(crate) ttl: Span,
    pub(crate) on_expire: OnExpire,
}

impl HoldTerms {
    pub(super) fn unit(&self, charge: usize) -> CostTag {
        self.units.get(charge).copied().unwrap_or(CostTag::REQUESTS)
    }

    /// Returns after what time the charges are given back, if they are.
    #[must_use]
    pub fn released_after(&self) -> Option<Span> {
        (self.on_expire == OnExpire::Release).then(|| self.ttl.min(MAX_RESERVATION))
    }

    /// Returns the command that saves a reservation of these charges, which were made before.
    #[must_use]
    pub fn saving(&self, receipt: Receipt) -> Command {
        Command::SaveReservation { receipt: Box::new(receipt), ttl: self.ttl, on_expire: self.on_expire }
    }

    /// Returns the terms of a part of the bill, which has these charges.
    pub(crate) fn of_charges(&self, charges: &[usize]) -> Self {
        Self { units: charges.iter().map(|charge| self.unit(*charge)).collect(), ..*self }
    }

    pub(crate) fn write(&self, out: &mut Writer) {
        out.number(self.units.len() as u64);
        self.units.iter().for_each(|unit| out.number(unit.0));
        out.number(self.ttl.micros());
        out.byte(u8::from(self.on_expire == OnExpire::Release));
    }

    pub(crate) fn read(from: &mut Reader<'_>) -> Result<Self, BytesError> {
        let count = from.count(MAX_CHARGES)?;
        let units: Result<_, BytesError> = (0..count).map(|_| Ok(CostTag(from.number()?))).collect();
        let (units, ttl) = (units?, Span::from_micros(from.number()?));
        let on_expire = match from.byte()? {
            0 => OnExpire::Charge,
            1 => OnExpire::Release,
            _ => return Err(BytesError::Malformed("reservation")),
        };
        Ok(Self { units, ttl, on_expire })
    }
}
