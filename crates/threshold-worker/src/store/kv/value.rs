//! The values of KV, and the balances that core settles.
//!
//! Every conversion rounds against the client: a value that is read and written again never has more room than before.

use serde_json::{Map, Number, Value};
use threshold_core::balance::Small;
use threshold_core::limit::Algorithm;
use threshold_core::{Balance, Format, Limit, Span, Timestamp};

/// KV accepts no shorter time to live.
const MIN_TTL: u64 = 60;
/// Tokens are written in millionths.
const MICRO: u128 = 1_000_000;
/// Above this capacity tokens are written as whole numbers: JSON's doubles hold no more digits.
const MAX_FRACTIONAL: u64 = 1_000_000_000;
/// The largest integer that JavaScript holds exactly.
const LAST: u64 = 9_007_199_254_740_991;

/// How a limit is written.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(in crate::store) enum Form {
    /// The count of the clock window with this number, which is part of the key: `17`.
    Count(u64),
    /// A fixed window: `{"count":17,"start":1767225600000}`.
    Window,
    /// A token bucket: `{"tokens":3.5,"lastRefill":1767225600000,"ttl":60}`.
    Bucket,
    /// Any other algorithm: `{"balance":"…"}`, core's own bytes in hexadecimal digits.
    Bytes,
}

/// A value that is none of ours.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("the value is not one of this rule")]
pub(in crate::store) struct Unreadable;

impl Form {
    /// Returns the form of a limit. `window` is the number of the clock window, where the key has it.
    pub(in crate::store) fn of(limit: &Limit, window: Option<u64>) -> Self {
        match (limit.algorithm(), window) {
            (_, Some(window)) => Self::Count(window),
            (Some(Algorithm::FixedWindow), None) => Self::Window,
            (Some(Algorithm::TokenBucket), None) => Self::Bucket,
            _ => Self::Bytes,
        }
    }

    /// Parses a value.
    pub(in crate::store) fn read(self, text: &str, limit: &Limit) -> Result<Balance, Unreadable> {
        if let Self::Count(window) = self {
            let is_number = !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit());
            let used = is_number.then(|| text.parse().unwrap_or(u64::MAX)).ok_or(Unreadable)?;
            let start = window.saturating_mul(limit.period().micros());
            return Ok(Balance::from_small(Small { large: start, figure: used }, limit));
        }
        let Ok(Value::Object(object)) = serde_json::from_str(text) else { return Err(Unreadable) };
        let mut balance = match self {
            Self::Count(_) => return Err(Unreadable),
            Self::Window => {
                let (count, start) = (whole(&object, "count")?, millis(&object, "start")?);
                Balance::from_small(Small { large: start.micros(), figure: count }, limit)
            }
            Self::Bucket => {
                let Some(Value::Number(tokens)) = object.get("tokens") else { return Err(Unreadable) };
                let full_at = full_at(limit, millionths(tokens), millis(&object, "lastRefill")?);
                Balance::from_small(Small { large: full_at.micros(), figure: 0 }, limit)
            }
            Self::Bytes => {
                let Some(Value::String(digits)) = object.get("balance") else { return Err(Unreadable) };
                return Balance::from_bytes(&from_hex(digits)?).map_err(|_| Unreadable);
            }
        };
        if object.contains_key("blockedUntil") {
            balance.block(millis(&object, "blockedUntil")?);
        }
        Ok(balance)
    }

    /// Returns the value of a balance.
    pub(in crate::store) fn write(self, balance: &Balance, limit: &Limit, now: Timestamp) -> String {
        let mut brought = balance.clone();
        brought.bring(limit, now);
        let small = brought.without_block().to_small(limit);
        let block = if balance.is_blocked(now) {
            format!(",\"blockedUntil\":{}", balance.blocked_until().micros().div_ceil(1_000).min(LAST))
        } else {
            String::new()
        };
        match self {
            Self::Count(_) => small.map_or(0, |small| small.figure).to_string(),
            Self::Window => {
                let Small { large: start, figure: count } = small.unwrap_or(Small { large: now.micros(), figure: 0 });
                format!("{{\"count\":{count},\"start\":{}{block}}}", start.div_ceil(1_000).min(LAST))
            }
            Self::Bucket => {
                let at = now.micros().checked_div(1_000).unwrap_or(0);
                let tokens = tokens(limit, small, at.saturating_mul(1_000));
                let ttl = ttl(balance, limit, now);
                format!("{{\"tokens\":{tokens},\"lastRefill\":{at},\"ttl\":{ttl}{block}}}")
            }
            Self::Bytes => format!("{{\"balance\":\"{}\"}}", to_hex(&balance.to_bytes(Format::PRESENT))),
        }
    }
}

/// Returns the `expirationTtl` of a value, in seconds: the window, or longer if the balance counts longer, and at least a minute.
pub(in crate::store) fn ttl(balance: &Balance, limit: &Limit, now: Timestamp) -> u64 {
    balance.silent_from().since(now).max(limit.period()).secs_ceil().max(MIN_TTL)
}

/// Returns when a bucket is full again, rounded up to a microsecond.
fn full_at(limit: &Limit, millionths: i128, last_refill: Timestamp) -> Timestamp {
    let capacity = u128::from(limit.capacity()).saturating_mul(MICRO);
    let most = capacity.saturating_mul(2);
    // Debt is at most one capacity, and no more tokens than fit count.
    let used = i128::try_from(capacity).unwrap_or(i128::MAX).saturating_sub(millionths);
    let used = u128::try_from(used).unwrap_or(0).min(most);
    let micros = used.saturating_mul(u128::from(limit.period().micros()));
    let micros = micros.div_ceil(u128::from(limit.quota()).saturating_mul(MICRO).max(1));
    last_refill.plus(Span::from_micros(u64::try_from(micros).unwrap_or(u64::MAX)))
}

/// Returns the tokens of a bucket at a moment, rounded down to a millionth.
fn tokens(limit: &Limit, small: Option<Small>, at: u64) -> String {
    // The fraction of a microsecond counts as a whole one.
    let full_at = small.map_or(at, |small| small.large.saturating_add(u64::from(small.figure > 0)));
    let missing =
        u128::from(full_at.saturating_sub(at)).saturating_mul(u128::from(limit.quota())).saturating_mul(MICRO);
    let missing = missing.div_ceil(u128::from(limit.period().micros()).max(1));
    let unit = if limit.capacity() > MAX_FRACTIONAL { MICRO } else { 1 };
    let missing = missing.div_ceil(unit).saturating_mul(unit);
    let capacity = u128::from(limit.capacity()).saturating_mul(MICRO);
    let (sign, amount) = match capacity.checked_sub(missing) {
        Some(left) => ("", left),
        None => ("-", missing.saturating_sub(capacity)),
    };
    let (whole, part) = (amount.checked_div(MICRO).unwrap_or(0), amount.checked_rem(MICRO).unwrap_or(0));
    if part == 0 {
        return format!("{sign}{whole}");
    }
    format!("{sign}{whole}.{}", format!("{part:06}").trim_end_matches('0'))
}

/// Returns a number in millionths, rounded down.
fn millionths(number: &Number) -> i128 {
    let micro = i128::try_from(MICRO).unwrap_or(i128::MAX);
    // The shortest text of a double is the decimal number that was written.
    let text = number.to_string();
    let (negative, digits) = match text.strip_prefix('-') {
        Some(digits) => (true, digits),
        None => (false, text.as_str()),
    };
    let magnitude = if digits.contains(['e', 'E']) {
        // Less than ten millionths, or more than any bucket holds.
        let less = if negative { 10 } else { 0 };
        if digits.contains("e-") { less } else { i128::MAX }
    } else {
        let (whole, part) = digits.split_once('.').unwrap_or((digits, ""));
        let kept: String = part.chars().chain("000000".chars()).take(6).collect();
        let rest = part.get(6..).unwrap_or_default().bytes().any(|digit| digit != b'0');
        let whole = whole.parse::<i128>().unwrap_or(i128::MAX).saturating_mul(micro);
        whole.saturating_add(kept.parse().unwrap_or(0)).saturating_add(i128::from(negative && rest))
    };
    if negative { magnitude.saturating_neg() } else { magnitude }
}

fn whole(object: &Map<String, Value>, name: &str) -> Result<u64, Unreadable> {
    object.get(name).and_then(Value::as_u64).ok_or(Unreadable)
}

fn millis(object: &Map<String, Value>, name: &str) -> Result<Timestamp, Unreadable> {
    let millis = whole(object, name)?;
    if millis > LAST { Err(Unreadable) } else { Ok(Timestamp::from_micros(millis.saturating_mul(1_000))) }
}

fn to_hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

fn from_hex(digits: &str) -> Result<Vec<u8>, Unreadable> {
    if !digits.len().is_multiple_of(2) || digits.len() > 2 * Balance::MAX_BYTES {
        return Err(Unreadable);
    }
    let pairs = digits.as_bytes().chunks(2).map(|pair| {
        let pair = std::str::from_utf8(pair).ok().filter(|pair| pair.bytes().all(|digit| digit.is_ascii_hexdigit()));
        pair.and_then(|pair| u8::from_str_radix(pair, 16).ok()).ok_or(Unreadable)
    });
    pairs.collect()
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use threshold_core::limit::{Anchor, LimitOptions};
    use threshold_core::{OwnedBill, TraceId, settle};

    use super::*;

    const NOW: Timestamp = Timestamp::from_secs(1_767_225_600);

    fn limit(text: &str, algorithm: Algorithm) -> Limit {
        LimitOptions::new().algorithm(algorithm).parse(text).unwrap()
    }

    /// Returns a balance with this cost charged, whether or not it fits.
    fn charged(limit: &Limit, cost: u64, at: Timestamp) -> Balance {
        let mut balance = Balance::default();
        let bill = OwnedBill::record(TraceId::default(), [(threshold_core::Digest::from_u128(1), *limit, cost)]);
        let _ = settle(&bill.as_bill(), std::slice::from_mut(&mut balance), &mut [], at);
        balance
    }

    fn available(balance: &Balance, limit: &Limit, now: Timestamp) -> u64 {
        balance.clone().look(limit, 0, now).0.available
    }

    #[test]
    fn values_are_those_that_the_page_states() {
        let hour = limit("20/h", Algorithm::FixedWindow);
        let window = NOW.micros() / hour.period().micros();
        let balance = charged(&hour, 3, NOW);
        assert_eq!(Form::Count(window).write(&balance, &hour, NOW), "3");
        assert_eq!(Form::Window.write(&balance, &hour, NOW), r#"{"count":3,"start":1767225600000}"#);
        let mut blocked = balance.clone();
        blocked.block(NOW.plus(Span::from_secs(90)));
        let text = r#"{"count":3,"start":1767225600000,"blockedUntil":1767225690000}"#;
        assert_eq!(Form::Window.write(&blocked, &hour, NOW), text);
        assert!(Form::Window.read(text, &hour).unwrap().is_blocked(NOW));
        let bucket = limit("10/min", Algorithm::TokenBucket);
        let balance = charged(&bucket, 3, NOW);
        assert_eq!(Form::Bucket.write(&balance, &bucket, NOW), r#"{"tokens":7,"lastRefill":1767225600000,"ttl":60}"#);
        let later = NOW.plus(Span::from_secs(3));
        assert_eq!(
            Form::Bucket.write(&balance, &bucket, later),
            r#"{"tokens":7.5,"lastRefill":1767225603000,"ttl":60}"#
        );
        let debt = charged(&bucket, 13, NOW);
        assert_eq!(Form::Bucket.write(&debt, &bucket, NOW), r#"{"tokens":-3,"lastRefill":1767225600000,"ttl":78}"#);
        assert_eq!(ttl(&charged(&hour, 1, NOW), &hour, NOW), 3_600);
        assert_eq!(ttl(&Balance::default(), &limit("20/s", Algorithm::FixedWindow), NOW), 60);
    }

    #[test]
    fn foreign_and_damaged_values_are_refused() {
        let (bucket, hour) = (limit("10/min", Algorithm::TokenBucket), limit("20/h", Algorithm::FixedWindow));
        for text in ["", "x", "-1", "1.5", "{}", " 3", "３"] {
            assert_eq!(Form::Count(1).read(text, &hour), Err(Unreadable), "{text}");
        }
        for text in [
            "",
            "3",
            "{}",
            "[]",
            r#"{"tokens":"3","lastRefill":1}"#,
            r#"{"tokens":3}"#,
            r#"{"tokens":3,"lastRefill":-1}"#,
        ] {
            assert_eq!(Form::Bucket.read(text, &bucket), Err(Unreadable), "{text}");
        }
        for text in [r#"{"count":3}"#, r#"{"count":-3,"start":1}"#, r#"{"count":3,"start":1,"blockedUntil":"x"}"#] {
            assert_eq!(Form::Window.read(text, &hour), Err(Unreadable), "{text}");
        }
        for text in [r#"{"balance":"0"}"#, r#"{"balance":"zz"}"#, r#"{"balance":"ff"}"#, r#"{"balance":"+1+1"}"#] {
            assert_eq!(Form::Bytes.read(text, &hour), Err(Unreadable), "{text}");
        }
        // More tokens than fit, and times of another world, give no more than the limit.
        let full = Form::Bucket.read(r#"{"tokens":1e30,"lastRefill":1}"#, &bucket).unwrap();
        assert_eq!(available(&full, &bucket, NOW), 10);
        let future = Form::Bucket.read(r#"{"tokens":0,"lastRefill":9007199254740991}"#, &bucket).unwrap();
        assert_eq!(available(&future, &bucket, NOW), 0);
    }

    #[test]
    fn tokens_are_rounded_down_to_millionths() {
        let read = |text: &str| millionths(&serde_json::from_str(text).unwrap());
        let exact = [("3", 3_000_000), ("-3", -3_000_000), ("7.1", 7_100_000), ("0.000011", 11), ("-0.5", -500_000)];
        for (text, expected) in exact {
            assert_eq!(read(text), expected, "{text}");
        }
        for (text, expected) in [("1.9999999", 1_999_999), ("-1.9999999", -2_000_000), ("0.000009", 0)] {
            assert_eq!(read(text), expected, "{text}");
        }
        assert!(read("-0.000009") <= -9 && read("1e300") > 0 && read("-1e300") < 0);
    }

    fn limits() -> impl Strategy<Value = Limit> {
        let kinds =
            prop::sample::select(vec![Algorithm::TokenBucket, Algorithm::FixedWindow, Algorithm::SlidingEstimate]);
        let quotas = prop_oneof![1_u64..1_000, 1_u64..5_000_000_000];
        (quotas, 60_u64..100_000, kinds, any::<bool>()).prop_map(|(quota, secs, algorithm, first)| {
            let options = LimitOptions::new().algorithm(algorithm);
            let first = first && algorithm == Algorithm::FixedWindow;
            let options = if first { options.anchor(Anchor::First) } else { options };
            options.parse(&format!("{quota}/{secs}s")).unwrap()
        })
    }

    proptest! {
        /// A value that is read again has never more room, at any later time, and little less: a unit by rounding, and what refills in
        /// a microsecond. Woken by rounding the tokens up.
        #[test]
        fn writing_and_reading_never_creates_room(
            limit in limits(), share in 0_u64..250, charged_at in 0_u64..3_600_000_000, after in 0_u64..100_000_000,
            later in 0_u64..100_000_000,
        ) {
            let at = NOW.plus(Span::from_micros(charged_at));
            let now = at.plus(Span::from_micros(after));
            let cost = u64::try_from(u128::from(limit.capacity()).saturating_mul(u128::from(share)).div_ceil(100)).unwrap();
            let mut balance = charged(&limit, cost, at);
            let mut value = String::new();
            let window = limit.counts_clock_windows().then(|| at.micros().checked_div(limit.period().micros()).unwrap());
            let forms = window.map(Form::Count).into_iter().chain([Form::of(&limit, None)]);
            for form in forms {
                for times in 0..4 {
                    value = form.write(&balance, &limit, now);
                    let read = form.read(&value, &limit).unwrap();
                    // To the microsecond, where whole units may hide it.
                    let counts = balance.silent_from() > now;
                    prop_assert!(!counts || read.silent_from() >= balance.silent_from(), "{value} after {times}");
                    for moment in [now, now.plus(Span::from_micros(later))] {
                        let (before, found) = (available(&balance, &limit, moment), available(&read, &limit, moment));
                        prop_assert!(found <= before, "{value}: {found} of {before} after {times}");
                        let lost = limit.quota().div_ceil(limit.period().micros()).saturating_add(1).saturating_mul(2);
                        prop_assert!(found.saturating_add(lost) >= before, "{value}: {found} of {before} after {times}");
                    }
                    balance = read;
                }
            }
            prop_assert!(value.len() < 256);
        }

        /// Nothing that somebody else has written is a panic, or more room than the limit.
        #[test]
        fn any_value_is_read_or_refused(text in "\\PC{0,40}", tokens in any::<f64>(), at in any::<u64>(), limit in limits()) {
            for form in [Form::Count(at), Form::of(&limit, None), Form::Bytes, Form::Window, Form::Bucket] {
                let values = [text.clone(), format!(r#"{{"tokens":{tokens},"lastRefill":{at},"count":{at},"start":{at}}}"#)];
                for value in values {
                    if let Ok(balance) = form.read(&value, &limit) {
                        prop_assert!(available(&balance, &limit, NOW) <= limit.capacity());
                        let _ = form.write(&balance, &limit, NOW);
                    }
                }
            }
        }
    }
}
