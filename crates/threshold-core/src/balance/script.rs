//! Balances and charges in the form of a store's script: fixed-width numbers that it compares and adds by itself.
//!
//! A script knows a few shapes of state. Core computes every increment, and every figure of the answer from what the script found,
//! so that a limit is computed in one place. What a script does not know has shape 0, and core decides about it.

use super::Balance;
use crate::bill::{Bill, Charge};
use crate::codec::{BytesError, Format};
use crate::limit::State;
use crate::plan::Verb;
use crate::time::Timestamp;

/// The version of the layouts in this file.
const VERSION: u8 = 1;
/// The shape of a balance that a script does not know. Its bytes follow.
const OTHER: u8 = 0;
/// The shape of a balance that is denied until a time, which follows. After it come the version and the shape of what is denied, if
/// there is anything.
const BLOCKED: u8 = 7;
/// The first byte of a charge has a bit for a limit that denies, one for a cost that is charged, and one for a record.
const ENFORCED: u8 = 1;
const CHARGED: u8 = 2;
/// The bit of a charge that is made whether or not it fits.
const RECORD: u8 = 4;
/// The terms of a charge that is made whether or not it fits: a recorded one.
pub(crate) const RECORDED: u8 = RECORD | ENFORCED | CHARGED;

const WRONG: BytesError = BytesError::Malformed("balance of a script");

/// A shape of state that a script knows, and its numbers.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Shaped {
    pub(crate) shape: u8,
    pub(crate) numbers: Vec<u64>,
}

impl Shaped {
    /// Numbers in scripts are doubles, which are exact below this.
    pub(crate) const LARGEST: u64 = 1 << 53;

    /// Appends the shape and its numbers; `None` if one of them is too large for a script.
    pub(crate) fn write(&self, first: u8) -> Option<Vec<u8>> {
        let mut bytes = vec![first, self.shape];
        for number in &self.numbers {
            // The script would round such a number silently. Without a shape core decides instead, on exact integers.
            if *number >= Self::LARGEST {
                return None;
            }
            bytes.extend_from_slice(&number.to_be_bytes());
        }
        Some(bytes)
    }
}

impl Balance {
    /// Returns the bytes of this balance for a script. They are the same for equal balances.
    #[must_use]
    pub fn to_script(&self, format: Format) -> Vec<u8> {
        self.shaped().unwrap_or_else(|| [&[VERSION, OTHER], self.to_bytes(format).as_slice()].concat())
    }

    fn shaped(&self) -> Option<Vec<u8>> {
        let state = match &self.state {
            State::Empty => Vec::new(),
            state => state.to_shape()?.write(VERSION)?,
        };
        let until = self.blocked_until.micros();
        if until == 0 {
            return Some(state).filter(|state| !state.is_empty());
        }
        (until < Shaped::LARGEST).then(|| [&[VERSION, BLOCKED], until.to_be_bytes().as_slice(), &state].concat())
    }

    /// Parses what [`to_script`](Self::to_script) or a script wrote.
    ///
    /// # Errors
    /// Fails on an unknown version or shape, and on malformed bytes.
    pub fn from_script(bytes: &[u8]) -> Result<Self, BytesError> {
        let (version, shape, rest) = match bytes {
            [version, shape, rest @ ..] => (*version, *shape, rest),
            _ => return Err(BytesError::Truncated),
        };
        if version != VERSION {
            return Err(BytesError::UnknownVersion { found: version, oldest: VERSION, newest: VERSION });
        }
        // The balance has a version of its own inside, so the two layouts can change independently.
        if shape == OTHER {
            return Self::from_bytes(rest);
        }
        if shape == BLOCKED {
            let (until, inner) = rest.split_first_chunk().ok_or(BytesError::Truncated)?;
            let blocked_until = Timestamp::from_micros(u64::from_be_bytes(*until));
            let inner = if inner.is_empty() { Self::default() } else { Self::from_script(inner)? };
            // One block is the latest of all, so none is within another.
            let sound = blocked_until > Timestamp::EPOCH && inner.blocked_until == Timestamp::EPOCH;
            return if sound { Ok(Self { blocked_until, ..inner }) } else { Err(WRONG) };
        }
        let (numbers, tail) = rest.as_chunks::<8>();
        if !tail.is_empty() {
            return Err(BytesError::Trailing);
        }
        let numbers: Vec<u64> = numbers.iter().map(|number| u64::from_be_bytes(*number)).collect();
        let state = State::from_shape(&Shaped { shape, numbers }).ok_or(WRONG)?;
        Ok(Self { state, blocked_until: Timestamp::EPOCH })
    }
}

impl Bill<'_> {
    /// Returns each charge as a script takes it. `None` if the script cannot settle this bill: it knows checks and records without a ban.
    #[must_use]
    pub fn to_script(&self) -> Option<Vec<Vec<u8>>> {
        // Whether a ban is over depends on the store's clock, so any ban is left to core. Subjects are not tested here:
        // the script denies and charges only if none of them has a standing.
        if self.verb == Verb::Peek || self.banned_until > Timestamp::EPOCH || self.charges.is_empty() {
            return None;
        }
        self.charges.iter().map(|charge| self.script_charge(charge)).collect()
    }

    fn script_charge(&self, charge: &Charge<'_>) -> Option<Vec<u8>> {
        let waits_for_outcome = charge.terms.by_outcome && !self.outcomes_seen;
        let charged = charge.cost > 0 && !waits_for_outcome;
        let terms = if charge.enforced() { ENFORCED } else { 0 }
            | if charged { CHARGED } else { 0 }
            | if self.verb == Verb::Record { RECORD } else { 0 };
        charge.limit.charge_shape(charge.cost, self.trace)?.write(terms)
    }
}
