//! A limit's figures as bytes: in receipts, and beside the balances that were counted under it.

use super::{Anchor, Concurrency, Estimate, Limit, Log, Rate, Window};
use crate::codec::{BytesError, Format, Reader, Versions, Writer, from_bytes, to_bytes};
use crate::time::Span;

impl Limit {
    /// The versions in which it is read.
    pub(crate) const VERSIONS: Versions = Versions::FIRST;

    /// The bytes that are kept beside a balance.
    #[must_use]
    pub fn to_bytes(&self, format: Format) -> Vec<u8> {
        to_bytes(Self::VERSIONS, format, |out| self.write(out))
    }

    /// Reads what [`to_bytes`](Self::to_bytes) wrote.
    ///
    /// # Errors
    /// On another version, and on bytes no limit has.
    pub fn from_bytes(bytes: &[u8]) -> Result<Self, BytesError> {
        from_bytes(bytes, Self::VERSIONS, Self::read)
    }

    /// Appends this limit's figures.
    pub(crate) fn write(&self, out: &mut Writer) {
        match self {
            Self::Never => out.byte(0),
            Self::Rate(limit) => {
                out.byte(1);
                out.number(limit.quota());
                out.number(limit.period().micros());
                out.number(limit.burst());
            }
            Self::Window(limit) => {
                out.byte(if limit.anchor() == Anchor::Clock { 2 } else { 3 });
                out.number(limit.quota());
                out.number(limit.period().micros());
            }
            Self::Log(limit) => {
                out.byte(4);
                out.number(limit.quota());
                out.number(limit.period().micros());
                out.number(u64::from(limit.buckets()));
            }
            Self::Estimate(limit) => {
                out.byte(5);
                out.number(limit.quota());
                out.number(limit.period().micros());
            }
            Self::Concurrency(limit) => {
                out.byte(6);
                out.number(limit.quota());
                out.number(limit.ttl().micros());
            }
        }
    }

    /// Takes a limit off the front; figures that no limit can have are malformed.
    pub(crate) fn read(from: &mut Reader<'_>) -> Result<Self, BytesError> {
        let kind = from.byte()?;
        if kind == 0 {
            return Ok(Self::Never);
        }
        let quota = from.number()?;
        let period = Span::from_micros(from.number()?);
        let limit = match kind {
            1 => Rate::new(quota, period, from.number()?).map(Self::Rate),
            2 => Window::new(quota, period, Anchor::Clock).map(Self::Window),
            3 => Window::new(quota, period, Anchor::First).map(Self::Window),
            4 => {
                let buckets = u32::try_from(from.number()?).map_err(|_| BytesError::Malformed("limit"))?;
                if buckets == 0 { Log::exact(quota, period) } else { Log::bucketed(quota, period, buckets) }
                    .map(Self::Log)
            }
            5 => Estimate::new(quota, period).map(Self::Estimate),
            6 => Concurrency::new(quota, period).map(Self::Concurrency),
            _ => return Err(BytesError::Malformed("limit")),
        };
        limit.map_err(|_| BytesError::Malformed("limit"))
    }
}
