//! Limits, balances, standings and their keys inside commands and answers.

use super::{Field, MAX_ITEMS, take};
use crate::balance::Checked;
use crate::codec::{BytesError, Reader, Writer};
use crate::command::KeyMoves;
use crate::ladder::Standing;
use crate::limit::{Limit, Look, Mark, SlidingLog};
use crate::plan::SubjectKeys;
use crate::receipt::History;

impl Field for Limit {
    fn write(&self, out: &mut Writer) {
        Self::write(self, out);
    }

    fn read(from: &mut Reader<'_>) -> Result<Self, BytesError> {
        Self::read(from)
    }
}

impl Field for SlidingLog {
    fn write(&self, out: &mut Writer) {
        Limit::from(*self).write(out);
    }

    fn read(from: &mut Reader<'_>) -> Result<Self, BytesError> {
        Limit::read(from)?.as_sliding_log().ok_or(BytesError::Malformed("log"))
    }
}

impl Field for Checked {
    fn write(&self, out: &mut Writer) {
        let Self { look, mark, changed, history: _ } = self;
        let fields: [&dyn Field; 3] = [look, mark, changed];
        fields.into_iter().for_each(|field| field.write(out));
    }

    fn read(from: &mut Reader<'_>) -> Result<Self, BytesError> {
        Ok(Self { look: take(from)?, mark: take(from)?, changed: take(from)?, history: History::default() })
    }
}

impl Field for Look {
    fn write(&self, out: &mut Writer) {
        let Self { allowed, available, ready_at, reset_if_charged, reset_if_not } = self;
        let fields: [&dyn Field; 5] = [allowed, available, ready_at, reset_if_charged, reset_if_not];
        fields.into_iter().for_each(|field| field.write(out));
    }

    fn read(from: &mut Reader<'_>) -> Result<Self, BytesError> {
        Ok(Self {
            allowed: take(from)?,
            available: take(from)?,
            ready_at: take(from)?,
            reset_if_charged: take(from)?,
            reset_if_not: take(from)?,
        })
    }
}

impl Field for Mark {
    fn write(&self, out: &mut Writer) {
        self.part.write(out);
        out.number(self.amount);
        out.number(self.fraction());
    }

    fn read(from: &mut Reader<'_>) -> Result<Self, BytesError> {
        Ok(Self::new(take(from)?, from.number()?).with_fraction(from.number()?))
    }
}

impl Field for Box<Standing> {
    fn write(&self, out: &mut Writer) {
        Standing::write(self, out);
    }

    fn read(from: &mut Reader<'_>) -> Result<Self, BytesError> {
        Standing::read(from).map(Self::new)
    }
}

/// In ascending order, so that equal values have equal bytes.
impl Field for SubjectKeys {
    fn write(&self, out: &mut Writer) {
        out.number(self.balances.len() as u64);
        for (key, limit) in &self.balances {
            key.write(out);
            limit.write(out);
        }
        out.number(self.standings.len() as u64);
        self.standings.iter().for_each(|key| key.write(out));
    }

    fn read(from: &mut Reader<'_>) -> Result<Self, BytesError> {
        const WRONG: BytesError = BytesError::Malformed("subject");
        let mut keys = Self::default();
        for _ in 0..from.count(MAX_ITEMS)? {
            let (key, limit) = (take(from)?, take(from)?);
            // Strictly ascending, which also refuses duplicates.
            if keys.balances.last_key_value().is_some_and(|(last, _)| *last >= key) {
                return Err(WRONG);
            }
            keys.balances.insert(key, limit);
        }
        for _ in 0..from.count(MAX_ITEMS)? {
            let key = take(from)?;
            if keys.standings.last().is_some_and(|last| *last >= key) {
                return Err(WRONG);
            }
            keys.standings.insert(key);
        }
        Ok(keys)
    }
}

impl Field for KeyMoves {
    fn write(&self, out: &mut Writer) {
        out.number(self.balances.len() as u64);
        for (old, new, limit) in &self.balances {
            [old as &dyn Field, new, limit].into_iter().for_each(|field| field.write(out));
        }
        for pairs in [&self.standings, &self.accounts] {
            out.number(pairs.len() as u64);
            for (old, new) in pairs {
                old.write(out);
                new.write(out);
            }
        }
    }

    fn read(from: &mut Reader<'_>) -> Result<Self, BytesError> {
        let count = from.count(MAX_ITEMS)?;
        let balances: Result<_, BytesError> = (0..count).map(|_| Ok((take(from)?, take(from)?, take(from)?))).collect();
        let mut pairs = || {
            let count = from.count(MAX_ITEMS)?;
            (0..count).map(|_| Ok((take(from)?, take(from)?))).collect::<Result<_, BytesError>>()
        };
        Ok(Self { balances: balances?, standings: pairs()?, accounts: pairs()? })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::codec::Format;
    use crate::command::{Answer, Command};
    use crate::key::Digest;
    use crate::time::Timestamp;

    #[test]
    fn a_rekey_command_reads_back() {
        let digest = Digest::from_u128;
        let command = Command::Rekey(KeyMoves {
            balances: vec![(digest(1), digest(2), Limit::never()), (digest(3), digest(4), Limit::never())],
            standings: vec![(digest(5), digest(6))],
            accounts: vec![(digest(7), digest(u128::MAX)), (digest(0), digest(9))],
        });
        assert_eq!(Command::from_bytes(&command.to_bytes(Format::PRESENT)), Ok(command));
    }

    #[test]
    fn read_block_and_its_answer_read_back() {
        let (key, other) = (Digest::from_u128(7), Digest::from_u128(u128::MAX));
        let keys = SubjectKeys { balances: [(key, Limit::never())].into(), standings: [other].into() };
        let command = Command::ReadBlock { keys };
        assert_eq!(Command::from_bytes(&command.to_bytes(Format::PRESENT)), Ok(command));
        let answer = Answer::Blocked(Some(Timestamp::from_secs(1_767_225_600)));
        assert_eq!(Answer::from_bytes(&answer.to_bytes(Format::PRESENT)), Ok(answer));
    }
}
