//! The replies of the scripts, as values of their own.

use ::redis::Value;
use threshold_core::Timestamp;

use crate::store::StoreError;

/// The bytes of records; `None` where there is no record.
pub(super) type Values = Vec<Option<Vec<u8>>>;

/// The reply of `swap.lua`.
#[derive(Debug)]
pub(super) enum Swapped {
    /// All records were changed.
    Done,
    /// A record had changed before, and nothing was written. The values are those of all records.
    Changed { now: Timestamp, values: Values },
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
}

/// Parses the reply of `settle.lua`: its verdict, the server's time, and what it found.
pub(super) fn settled(reply: Value) -> Result<(Verdict, Timestamp, Values), StoreError> {
    let Value::BulkString(bytes) = reply else { return Err(StoreError::Unavailable) };
    parse_settled(&bytes).ok_or(StoreError::Unavailable)
}

fn parse_settled(bytes: &[u8]) -> Option<(Verdict, Timestamp, Values)> {
    let (verdict, rest) = bytes.split_first()?;
    let verdict = match verdict {
        0 => Verdict::Denied,
        1 => Verdict::Charged,
        2 => Verdict::Unusual,
        _ => return None,
    };
    let (micros, mut rest) = rest.split_first_chunk()?;
    let mut values = Values::new();
    while !rest.is_empty() {
        let (length, after) = rest.split_first_chunk()?;
        let length = usize::try_from(u32::from_be_bytes(*length)).ok()?;
        let (value, after) = after.split_at_checked(length)?;
        // No record has no bytes.
        values.push(Some(value).filter(|value| !value.is_empty()).map(<[u8]>::to_vec));
        rest = after;
    }
    Some((verdict, Timestamp::from_micros(u64::from_be_bytes(*micros)), values))
}

/// Parses the reply of `load.lua`: the server's time, and the bytes of each record.
pub(super) fn loaded(reply: Value) -> Result<(Timestamp, Values), StoreError> {
    let mut parts = array(reply)?.into_iter();
    let now = time(&mut parts)?;
    Ok((now, values(parts.next())?))
}

/// Parses the reply of `swap.lua`.
pub(super) fn swapped(reply: Value) -> Result<Swapped, StoreError> {
    let mut parts = array(reply)?.into_iter();
    let done = number(parts.next())? == 1;
    let now = time(&mut parts)?;
    Ok(if done { Swapped::Done } else { Swapped::Changed { now, values: values(parts.next())? } })
}

/// Parses the reply of `give_back.lua`: whether the charges were given back, and the server's time.
pub(super) fn given_back(reply: Value) -> Result<(bool, Timestamp), StoreError> {
    let mut parts = array(reply)?.into_iter();
    let is_done = number(parts.next())? == 1;
    Ok((is_done, time(&mut parts)?))
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
        let mut bytes = vec![1, 0, 0, 0, 0, 0, 0, 0, 9, 0, 0, 0, 0, 0, 0, 0, 2, 7, 8];
        let parsed = parse_settled(&bytes);
        assert_eq!(parsed, Some((Verdict::Charged, Timestamp::from_micros(9), vec![None, Some(vec![7, 8])])));
        bytes.pop();
        assert_eq!(parse_settled(&bytes), None);
        assert_eq!(parse_settled(&[3, 0, 0, 0, 0, 0, 0, 0, 9]), None);
    }
}
