//! Bills and outcomes inside commands and answers.

use super::{Field, put, take};
use crate::bill::{OwnedBill, OwnedCharge, Terms};
use crate::codec::{BytesError, Reader, Writer};
use crate::key::Digest;
use crate::ladder::{Ladder, Penalty, Rung, StrikeMode};
use crate::plan::{MAX_CHARGES, MAX_SUBJECTS, Verb};
use crate::settle::{Escalation, Exception, Outcome, Settled};
use crate::time::Timestamp;

/// The largest number of rungs of a ladder on a bill. Policies have a handful.
const MAX_RUNGS: usize = 1 << 10;
/// The longest name of a warning cookie on a bill, in bytes: as much as browsers store for one cookie.
const MAX_COOKIE: usize = 1 << 12;

const WRONG_BILL: BytesError = BytesError::Malformed("bill");
const WRONG_OUTCOME: BytesError = BytesError::Malformed("outcome");

impl Field for Box<OwnedBill> {
    fn write(&self, out: &mut Writer) {
        // Destructured without `..`: a new field that is not written does not compile.
        let OwnedBill { verb, trace, banned_until, charges, subjects, outcomes_seen, punishes } = &**self;
        out.byte(match verb {
            Verb::Check => 0,
            Verb::Peek => 1,
            Verb::Record => 2,
        });
        let fields: [&dyn Field; 4] = [trace, banned_until, outcomes_seen, punishes];
        fields.into_iter().for_each(|field| field.write(out));
        out.number(charges.len() as u64);
        charges.iter().for_each(|charge| charge.write(out));
        out.number(subjects.len() as u64);
        for (key, ladder) in subjects {
            key.write(out);
            ladder.write(out);
        }
    }

    fn read(from: &mut Reader<'_>) -> Result<Self, BytesError> {
        let verb = match from.byte()? {
            0 => Verb::Check,
            1 => Verb::Peek,
            2 => Verb::Record,
            _ => return Err(WRONG_BILL),
        };
        let (trace, banned_until) = (take(from)?, take(from)?);
        let (outcomes_seen, punishes) = (take(from)?, take(from)?);
        let charges: Vec<OwnedCharge> = (0..from.count(MAX_CHARGES)?).map(|_| take(from)).collect::<Result<_, _>>()?;
        let mut subjects = Vec::new();
        for _ in 0..from.count(MAX_SUBJECTS)? {
            subjects.push((take(from)?, take(from)?));
        }
        // What a policy guarantees has to be checked on bytes: settling relies on valid subjects and distinct keys.
        let is_known = |subject: usize| subject < subjects.len();
        if !charges.iter().all(|charge| charge.subject.is_none_or(is_known)) {
            return Err(WRONG_BILL);
        }
        let repeats = |place: usize, key: Digest| charges.iter().take(place).any(|before| before.key == key);
        if charges.iter().enumerate().any(|(place, charge)| repeats(place, charge.key)) {
            return Err(WRONG_BILL);
        }
        Ok(Self::new(OwnedBill { verb, trace, banned_until, charges, subjects, outcomes_seen, punishes }))
    }
}

impl Field for OwnedCharge {
    fn write(&self, out: &mut Writer) {
        let Self { key, limit, cost, terms, subject } = self;
        let Terms { tag, strike, block_for, enforced, by_outcome, varies } = terms;
        let fields: [&dyn Field; 6] = [key, limit, cost, tag, strike, block_for];
        fields.into_iter().for_each(|field| field.write(out));
        out.byte(u8::from(*enforced) | u8::from(*varies) << 1);
        by_outcome.write(out);
        subject.write(out);
    }

    fn read(from: &mut Reader<'_>) -> Result<Self, BytesError> {
        let (key, limit, cost) = (take(from)?, take(from)?, take(from)?);
        let (tag, strike, block_for) = (take(from)?, take(from)?, take(from)?);
        let bits = from.byte()?;
        if bits > 3 {
            return Err(WRONG_BILL);
        }
        let (enforced, varies) = (bits & 1 != 0, bits & 2 != 0);
        let terms = Terms { tag, strike, block_for, enforced, by_outcome: take(from)?, varies };
        Ok(Self { key, limit, cost, terms, subject: take(from)? })
    }
}

impl Field for StrikeMode {
    fn write(&self, out: &mut Writer) {
        out.byte(match self {
            Self::Window => 0,
            Self::Request => 1,
            Self::Ignored => 2,
        });
    }

    fn read(from: &mut Reader<'_>) -> Result<Self, BytesError> {
        match from.byte()? {
            0 => Ok(Self::Window),
            1 => Ok(Self::Request),
            2 => Ok(Self::Ignored),
            _ => Err(WRONG_BILL),
        }
    }
}

impl Field for Ladder {
    fn write(&self, out: &mut Writer) {
        let Self { decay, rungs, warning_cookie } = self;
        decay.write(out);
        out.number(rungs.len() as u64);
        rungs.iter().for_each(|rung| rung.write(out));
        warning_cookie.is_some().write(out);
        if let Some(name) = warning_cookie {
            out.text(name);
        }
    }

    fn read(from: &mut Reader<'_>) -> Result<Self, BytesError> {
        let decay = take(from)?;
        let count = from.count(MAX_RUNGS)?;
        let rungs: Vec<Rung> = (0..count).map(|_| take(from)).collect::<Result<_, _>>()?;
        // A ladder is never empty. An empty one would have a rung that does nothing, and its strikes would let every
        // request through.
        if rungs.is_empty() {
            return Err(WRONG_BILL);
        }
        let warning_cookie = if take(from)? { Some(from.text(MAX_COOKIE)?.into()) } else { None };
        Ok(Self { decay, rungs, warning_cookie })
    }
}

impl Field for Rung {
    fn write(&self, out: &mut Writer) {
        let Self { warn, deny, shadow, cooldown, ban } = self;
        let fields: [&dyn Field; 5] = [warn, deny, shadow, cooldown, ban];
        fields.into_iter().for_each(|field| field.write(out));
    }

    fn read(from: &mut Reader<'_>) -> Result<Self, BytesError> {
        Ok(Self { warn: take(from)?, deny: take(from)?, shadow: take(from)?, cooldown: take(from)?, ban: take(from)? })
    }
}

impl Field for Box<Outcome> {
    fn write(&self, out: &mut Writer) {
        self.at.write(out);
        self.settled.write(out);
        self.penalty.is_some().write(out);
        if let Some((subject, penalty)) = &self.penalty {
            subject.write(out);
            penalty.write(out);
        }
        self.denied_until.write(out);
        out.number(self.escalations.len() as u64);
        self.escalations.iter().for_each(|strike| strike.write(out));
        self.shadowed.write(out);
        // Always `MAX_SUBJECTS` times, so no number is written. A change of that constant changes the format.
        self.warned_until.iter().for_each(|until| until.write(out));
        out.number(u64::from(self.would_warn));
        self.behind_ban.write(out);
        out.number(self.stood_in.len() as u64);
        for (own, other) in &self.stood_in {
            own.write(out);
            other.write(out);
        }
        out.number(u64::from(self.changed_balances));
        out.number(u64::from(self.changed_standings));
    }

    fn read(from: &mut Reader<'_>) -> Result<Self, BytesError> {
        let mut outcome = Outcome { at: take(from)?, settled: take(from)?, ..Outcome::default() };
        if take(from)? {
            outcome.penalty = Some((take(from)?, take(from)?));
        }
        outcome.denied_until = take(from)?;
        for _ in 0..from.count(MAX_SUBJECTS)? {
            outcome.escalations.push(take(from)?);
        }
        outcome.shadowed = take(from)?;
        for until in &mut outcome.warned_until {
            *until = take::<Timestamp>(from)?;
        }
        outcome.would_warn = u16::try_from(from.number()?).map_err(|_| WRONG_OUTCOME)?;
        outcome.behind_ban = take(from)?;
        for _ in 0..from.count(MAX_CHARGES)? {
            outcome.stood_in.push((take(from)?, take(from)?));
        }
        outcome.changed_balances = u16::try_from(from.number()?).map_err(|_| WRONG_OUTCOME)?;
        outcome.changed_standings = u8::try_from(from.number()?).map_err(|_| WRONG_OUTCOME)?;
        Ok(Self::new(outcome))
    }
}

impl Field for Settled {
    fn write(&self, out: &mut Writer) {
        let Self { at, look, mark, exception } = self;
        let fields: [&dyn Field; 4] = [at, look, mark, exception];
        fields.into_iter().for_each(|field| field.write(out));
    }

    fn read(from: &mut Reader<'_>) -> Result<Self, BytesError> {
        Ok(Self { at: take(from)?, look: take(from)?, mark: take(from)?, exception: take(from)? })
    }
}

impl Field for Exception {
    fn write(&self, out: &mut Writer) {
        out.byte(match self {
            Self::None => 0,
            Self::Lifted => 1,
            Self::Blocked => 2,
        });
    }

    fn read(from: &mut Reader<'_>) -> Result<Self, BytesError> {
        match from.byte()? {
            0 => Ok(Self::None),
            1 => Ok(Self::Lifted),
            2 => Ok(Self::Blocked),
            _ => Err(WRONG_OUTCOME),
        }
    }
}

impl Field for Penalty {
    fn write(&self, out: &mut Writer) {
        match self {
            Self::CoolDown(until) => put(out, 0, &[until]),
            Self::Ban(until) => put(out, 1, &[until]),
        }
    }

    fn read(from: &mut Reader<'_>) -> Result<Self, BytesError> {
        match from.byte()? {
            0 => Ok(Self::CoolDown(take(from)?)),
            1 => Ok(Self::Ban(take(from)?)),
            _ => Err(WRONG_OUTCOME),
        }
    }
}

impl Field for Escalation {
    fn write(&self, out: &mut Writer) {
        let Self { subject, charge, strikes, rung, shadowed, banned_until } = self;
        let fields: [&dyn Field; 6] = [subject, charge, strikes, rung, shadowed, banned_until];
        fields.into_iter().for_each(|field| field.write(out));
    }

    fn read(from: &mut Reader<'_>) -> Result<Self, BytesError> {
        Ok(Self {
            subject: take(from)?,
            charge: take(from)?,
            strikes: take(from)?,
            rung: take(from)?,
            shadowed: take(from)?,
            banned_until: take(from)?,
        })
    }
}
