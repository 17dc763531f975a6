//! Login attempts and accounts inside commands and answers.

use super::{Field, MAX_ITEMS, put, take};
use crate::codec::{BytesError, Reader, Writer};
use crate::command::AccountChange;
use crate::lockout::{
    Account, Attempt, AttemptKeys, AttemptOutcome, Device, Factor, Login, ResultOutcome, StandInKeys, UnknownAttempt,
};
use crate::policy::OnStoreError;

impl Field for Login {
    fn write(&self, out: &mut Writer) {
        let Self { account, ip, locks, ceiling, on_store_error } = self;
        account.write(out);
        ip.write(out);
        out.number(locks.len() as u64);
        for (failures, span) in locks {
            failures.write(out);
            span.write(out);
        }
        ceiling.write(out);
        out.byte(match on_store_error {
            OnStoreError::Local => 0,
            OnStoreError::Open => 1,
            OnStoreError::Closed => 2,
        });
    }

    fn read(from: &mut Reader<'_>) -> Result<Self, BytesError> {
        let (account, ip) = (take(from)?, take(from)?);
        let count = from.count(MAX_ITEMS)?;
        let locks: Result<_, BytesError> = (0..count).map(|_| Ok((take(from)?, take(from)?))).collect();
        let (locks, ceiling) = (locks?, take(from)?);
        let on_store_error = match from.byte()? {
            0 => OnStoreError::Local,
            1 => OnStoreError::Open,
            2 => OnStoreError::Closed,
            _ => return Err(BytesError::Malformed("login")),
        };
        Ok(Self { account, ip, locks, ceiling, on_store_error })
    }
}

impl Field for AttemptKeys {
    fn write(&self, out: &mut Writer) {
        let Self { account, address, stand_ins, factor, device, id } = self;
        let fields: [&dyn Field; 7] = [account, address, &stand_ins.prefix, &stand_ins.all, &factor.0, device, id];
        fields.into_iter().for_each(|field| field.write(out));
    }

    fn read(from: &mut Reader<'_>) -> Result<Self, BytesError> {
        Ok(Self {
            account: take(from)?,
            address: take(from)?,
            stand_ins: StandInKeys { prefix: take(from)?, all: take(from)? },
            factor: Factor(take(from)?),
            device: take(from)?,
            id: take(from)?,
        })
    }
}

impl Field for Device {
    fn write(&self, out: &mut Writer) {
        Self::write(self, out);
    }

    fn read(from: &mut Reader<'_>) -> Result<Self, BytesError> {
        Self::read(from)
    }
}

impl Field for Attempt {
    fn write(&self, out: &mut Writer) {
        Self::write(self, out);
    }

    fn read(from: &mut Reader<'_>) -> Result<Self, BytesError> {
        Self::read(from)
    }
}

impl Field for Box<Account> {
    fn write(&self, out: &mut Writer) {
        Account::write(self, out);
    }

    fn read(from: &mut Reader<'_>) -> Result<Self, BytesError> {
        Account::read(from).map(Self::new)
    }
}

impl Field for AccountChange {
    fn write(&self, out: &mut Writer) {
        (*self == Self::Lift).write(out);
    }

    fn read(from: &mut Reader<'_>) -> Result<Self, BytesError> {
        Ok(if take(from)? { Self::Lift } else { Self::Reset })
    }
}

impl Field for AttemptOutcome {
    fn write(&self, out: &mut Writer) {
        match self {
            Self::Allowed(attempt) => put(out, 0, &[attempt]),
            Self::TooMany { until } => put(out, 1, &[until]),
            Self::Locked { until } => put(out, 2, &[until]),
        }
    }

    fn read(from: &mut Reader<'_>) -> Result<Self, BytesError> {
        match from.byte()? {
            0 => Ok(Self::Allowed(take(from)?)),
            1 => Ok(Self::TooMany { until: take(from)? }),
            2 => Ok(Self::Locked { until: take(from)? }),
            _ => Err(BytesError::Malformed("attempt")),
        }
    }
}

impl Field for ResultOutcome {
    fn write(&self, out: &mut Writer) {
        let Self { success, locked_until, device } = self;
        success.write(out);
        locked_until.write(out);
        device.write(out);
    }

    fn read(from: &mut Reader<'_>) -> Result<Self, BytesError> {
        Ok(Self { success: take(from)?, locked_until: take(from)?, device: take(from)? })
    }
}

impl Field for UnknownAttempt {
    // The flag of the result says everything.
    fn write(&self, _: &mut Writer) {}

    fn read(_: &mut Reader<'_>) -> Result<Self, BytesError> {
        Ok(Self)
    }
}
