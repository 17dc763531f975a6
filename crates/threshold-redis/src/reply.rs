//! The replies of the scripts, as values of their own.

use ::redis::Value;
use threshold_core::Timestamp;
use threshold_core::receipt::History;

use threshold_limiter::store::StoreError;

/// The bytes of records; `None` where there is no record.
pub(super) type Values = Vec<Option<Vec<u8>>>;

/// The reply of `swap.lua`.
#[derive(Debug)]
pub(super) struct Swapped {
    pub(super) done: Done,
    pub(super) now: Timestamp,
    /// Where a record had changed, those that were compared.
    pub(super) values: Values,
    pub(super) history: History,
}

/// What `swap.lua` did.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Done {
    /// Everything was changed.
    All,
    /// A record had changed before, and nothing was written.
    Changed,
    /// The script cannot tell how a balance changes, and nothing was written.
    Unusual,
    /// It was executed too late, and nothing was written.
    TooLate,
    /// A charge no longer fits, and nothing was written.
    Full,
}

/// The reply of `settle.lua`.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Settled {
    pub(super) verdict: Verdict,
    /// Whether a reservation of the partition has expired, whose charges are still there.
    pub(super) is_due: bool,
    pub(super) now: Timestamp,
    pub(super) history: History,
    pub(super) found: Values,
}

/// What `settle.lua` did.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Verdict {
    /// Everything fits and was charged.
    Charged,
    /// An enforced limit is full, and nothing was charged.
    Denied,
    /// The script cannot tell, and nothing was charged.
    Unusual,
    /// It was executed too late, and nothing was charged.
    TooLate,
}

/// The reply of `load.lua`.
#[derive(Debug)]
pub(super) struct Loaded {
    pub(super) now: Timestamp,
    pub(super) values: Values,
    pub(super) head: Head,
}

/// What a partition knows of itself.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Head {
    pub(super) history: History,
    /// When the first of its reservations expires that gives back its charges; the epoch if none does.
    next_expiry: Timestamp,
}

impl Head {
    const VERSION: u8 = 1;

    fn parse(bytes: Option<&[u8]>) -> Option<Self> {
        let Some(bytes) = bytes else { return Some(Self::default()) };
        let (version, rest) = bytes.split_first()?;
        let (history, rest) = rest.split_first_chunk()?;
        let next_expiry = Timestamp::from_micros(u64::from_be_bytes(rest.try_into().ok()?));
        (*version == Self::VERSION).then_some(Self { history: History::from_bytes(*history), next_expiry })
    }

    /// Returns whether a reservation has expired whose charges are still there.
    pub(super) fn is_due(&self, now: Timestamp) -> bool {
        self.next_expiry > Timestamp::EPOCH && self.next_expiry <= now
    }
}

/// Parses the reply of `settle.lua`.
pub(super) fn settled(reply: &Value) -> Result<Settled, StoreError> {
    let Value::BulkString(bytes) = reply else { return Err(StoreError::Unavailable) };
    parse_settled(bytes).ok_or(StoreError::Unavailable)
}

/// The bit of a verdict that says that a reservation has expired.
const DUE: u8 = 16;

fn parse_settled(bytes: &[u8]) -> Option<Settled> {
    let (verdict, rest) = bytes.split_first()?;
    let is_due = verdict & DUE != 0;
    let verdict = match verdict & !DUE {
        0 => Verdict::Denied,
        1 => Verdict::Charged,
        2 => Verdict::Unusual,
        3 => Verdict::TooLate,
        _ => return None,
    };
    let (micros, rest) = rest.split_first_chunk()?;
    let (history, mut rest) = rest.split_first_chunk()?;
    let mut found = Values::new();
    while !rest.is_empty() {
        let (length, after) = rest.split_first_chunk()?;
        let length = usize::try_from(u32::from_be_bytes(*length)).ok()?;
        let (value, after) = after.split_at_checked(length)?;
        // No record has no bytes.
        found.push(Some(value).filter(|value| !value.is_empty()).map(<[u8]>::to_vec));
        rest = after;
    }
    let now = Timestamp::from_micros(u64::from_be_bytes(*micros));
    Some(Settled { verdict, is_due, now, history: History::from_bytes(*history), found })
}

/// Parses the reply of `load.lua`. Its last record is the head of the partition, if that `has_head`.
pub(super) fn loaded(reply: Value, has_head: bool) -> Result<Loaded, StoreError> {
    let mut parts = array(reply)?.into_iter();
    let now = time(&mut parts)?;
    let mut values = values(parts.next())?;
    let head = if has_head { values.pop().ok_or(StoreError::Unavailable)? } else { None };
    let head = Head::parse(head.as_deref()).ok_or(StoreError::Unavailable)?;
    Ok(Loaded { now, values, head })
}

/// Parses the reply of `swap.lua`.
pub(super) fn swapped(reply: Value) -> Result<Swapped, StoreError> {
    let mut parts = array(reply)?.into_iter();
    let done = match number(parts.next())? {
        0 => Done::Changed,
        1 => Done::All,
        2 => Done::Unusual,
        3 => Done::TooLate,
        4 => Done::Full,
        _ => return Err(StoreError::Unavailable),
    };
    let now = time(&mut parts)?;
    let values = parts.next().map_or(Ok(Values::new()), |found| values(Some(found)))?;
    let history = match parts.next() {
        Some(Value::BulkString(bytes)) => {
            History::from_bytes(bytes.as_slice().try_into().map_err(|_| StoreError::Unavailable)?)
        }
        _ => History::default(),
    };
    Ok(Swapped { done, now, values, history })
}

/// Takes seconds and microseconds off the front of a reply.
pub(super) fn time(parts: &mut impl Iterator<Item = Value>) -> Result<Timestamp, StoreError> {
    let (seconds, micros) = (number(parts.next())?, number(parts.next())?);
    Ok(Timestamp::from_micros(seconds.saturating_mul(1_000_000).saturating_add(micros)))
}

/// Returns a number, which scripts return as an integer or as text.
pub(super) fn number(value: Option<Value>) -> Result<u64, StoreError> {
    let number = match value {
        Some(Value::Int(number)) => u64::try_from(number).ok(),
        Some(Value::BulkString(text)) => std::str::from_utf8(&text).ok().and_then(|text| text.parse().ok()),
        _ => None,
    };
    number.ok_or(StoreError::Unavailable)
}

fn values(value: Option<Value>) -> Result<Values, StoreError> {
    let values = array(value.unwrap_or_default())?.into_iter().map(|value| match value {
        Value::Nil => Ok(None),
        Value::BulkString(bytes) => Ok(Some(bytes)),
        _ => Err(StoreError::Unavailable),
    });
    values.collect()
}

/// Returns the parts of an array.
pub(super) fn array(value: Value) -> Result<Vec<Value>, StoreError> {
    match value {
        Value::Array(parts) => Ok(parts),
        _ => Err(StoreError::Unavailable),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A reply that is cut off must not pair a value with the record after it.
    #[test]
    fn a_reply_of_settle_is_parsed_whole_or_not_at_all() {
        let mut bytes =
            [&[17][..], &9_u64.to_be_bytes(), &7_u64.to_be_bytes(), &[0, 0, 0, 0, 0, 0, 0, 2, 7, 8]].concat();
        let parsed = Settled {
            verdict: Verdict::Charged,
            is_due: true,
            now: Timestamp::from_micros(9),
            history: History::from_bytes(7_u64.to_be_bytes()),
            found: vec![None, Some(vec![7, 8])],
        };
        assert_eq!(parse_settled(&bytes), Some(parsed));
        bytes.pop();
        assert_eq!(parse_settled(&bytes), None);
        bytes[0] = 4;
        assert_eq!(parse_settled(&bytes[..17]), None);
    }
}
