//! Protection of logins: budgets, locks, a ceiling, and known devices that an attacker cannot lock out.
//!
//! An attempt is counted before its secret is checked, and counts as a failure until its result proves otherwise. If it were
//! counted after the check, a thousand parallel guesses would all reach the verifier before the first failure is counted.
//!
//! There is one budget for each account and one for each address, and never one for the pair: an attacker with many addresses
//! would have a fresh budget on each. Devices that have logged in before have counters of their own, so that guesses from
//! elsewhere never lock out the owner. An unknown account is treated exactly like a known one: otherwise the answers would
//! tell which accounts exist.

mod account;
mod barred;
mod device;
mod exchange;
mod known;
mod lock_key;
mod name;
mod track;

use std::net::IpAddr;

use crate::balance::{Balance, Checked};
use crate::codec::{BytesError, Format, Reader, Versions, Writer, from_bytes, to_bytes};
use crate::key::{AddressGroup, Anchors, Digest, DigestKey, Domain, Part, TraceId};
use crate::limit::{Limit, Mark, SlidingLog};
use crate::policy::OnStoreError;
use crate::receipt::{History, Receipt};
use crate::secret::{Purpose, Secret, Secrets};
use crate::time::{Span, Timestamp};

pub use account::Account;
pub use device::{Device, MAX_DEVICES};
pub use exchange::{Attempted, LoginRequest, LoginResult, Refusal, RefusedBy};
pub use lock_key::LockKey;
#[cfg(feature = "login")]
pub use name::canonical_account;
#[cfg(not(feature = "login"))]
pub(crate) use name::canonical_account;
pub use name::{Spellings, account_digest};

/// How long an attempt may wait for its result. After that it has failed, so that a guesser gains nothing by never reporting
/// one.
pub const RESULT_WITHIN: Span = Span::MINUTE;

/// The login settings of a policy.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Login {
    /// The budget of attempts on one account.
    pub account: SlidingLog,
    /// The budget of attempts from one address.
    pub ip: SlidingLog,
    /// Pairs of a number of consecutive failures and how long a failure locks from there on, in ascending order.
    pub locks: Vec<(u32, Span)>,
    /// The number of consecutive failures from which unknown devices are refused until a reset.
    pub ceiling: u32,
    /// What happens when the store fails.
    pub on_store_error: OnStoreError,
}

impl Default for Login {
    fn default() -> Self {
        let log =
            |quota, seconds| SlidingLog::new(quota, Span::from_secs(seconds)).expect("the default limits are valid");
        Self {
            account: log(5, 15 * 60),
            ip: log(20, 5 * 60),
            locks: vec![(3, Span::MINUTE), (5, Span::from_secs(300)), (10, Span::HOUR)],
            ceiling: 100,
            on_store_error: OnStoreError::Closed,
        }
    }
}

/// The factor that is tried, such as a password or a one-time code. Each has counters of its own.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Factor(pub(crate) u32);

impl Factor {
    /// Makes a factor from its name, which is `password` by default. It does not depend on the installation's secret, so that an
    /// account keeps its counters when the secret is rotated.
    #[must_use]
    pub fn named(name: Option<&str>) -> Self {
        let name = name.map(str::trim).filter(|name| !name.is_empty()).unwrap_or("password");
        let mut digest = DigestKey::OF_NAMES.begin(Domain::Account);
        digest.text(Part::Fact, name);
        Self(u32::try_from(digest.finish().to_u128() >> 96).unwrap_or(u32::MAX))
    }
}

/// The digests under which a login attempt is counted.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct AttemptKeys {
    /// The digest of the account; `None` where the login names none.
    pub account: Option<Digest>,
    /// The digest of the address; `None` where it is allow-listed, which skips the address's budget and nothing else.
    pub address: Option<Digest>,
    /// The keys under which a store counts the attempt if it has no room for its address or account.
    pub stand_ins: StandInKeys,
    /// The factor that is tried.
    pub factor: Factor,
    /// The device of the token that came with it, if its signature is valid.
    pub device: Option<Device>,
    /// The id of the attempt.
    pub id: TraceId,
}

/// The stand-in keys for an address or account that a store has no room for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct StandInKeys {
    /// The key of everyone in the same /24 or /48; `None` where the address is unknown.
    pub prefix: Option<Digest>,
    /// The key of everyone.
    pub all: Digest,
}

impl StandInKeys {
    /// Makes the keys for an attempt from this address.
    #[must_use]
    pub fn of(key: DigestKey, ip: Option<IpAddr>) -> Self {
        let prefix = ip.map(|ip| {
            let block = AddressGroup::block(ip);
            let mut digest = key.begin(Domain::LoginAddress);
            digest.address(Part::Folded, block);
            digest.finish().in_partition(Anchors::new(key).address(block))
        });
        let mut all = key.begin(Domain::LoginAddress);
        all.text(Part::Folded, "");
        Self { prefix, all: all.finish() }
    }
}

/// The decision on an attempt, before its secret is checked.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[must_use = "the secret may be checked only if the attempt is allowed"]
pub enum AttemptOutcome {
    /// The secret may be checked. The result must be reported.
    Allowed(Attempt),
    /// There were too many attempts from this address: `too_many_requests`.
    TooMany {
        /// When an attempt may be made again.
        until: Timestamp,
    },
    /// The account is locked for this caller: `account_locked`.
    Locked {
        /// When an attempt may be made again; `None` at the ceiling, where only a reset helps.
        until: Option<Timestamp>,
    },
}

/// An attempt under way. The caller gets it as a token and sends it back with the result.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Attempt {
    /// The id of the attempt.
    pub id: TraceId,
    /// The digest of the account.
    pub account: Option<Digest>,
    /// The digest of the address; `None` where the attempt does not count for its address.
    pub address: Option<Digest>,
    /// The stand-in key that is counted in place of the account, in a store without room for the account.
    pub folded: Option<Digest>,
    pub(crate) factor: Factor,
    /// The id of the known device it came from; 0 for an unknown device.
    pub(crate) device: u64,
    pub(crate) at: Timestamp,
    /// When the address was charged, by the clock of its own partition of the store.
    pub(crate) address_at: Timestamp,
    /// The history of that partition.
    address_history: History,
}

impl Attempt {
    /// Returns whether it came from a device that is known for the account.
    #[must_use]
    pub const fn is_from_known_device(&self) -> bool {
        self.device != 0
    }
}

/// The result of a login, as it is stored.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[must_use = "a result can lock the account or make a device known"]
pub struct ResultOutcome {
    /// Whether the attempt counted as a success.
    pub success: bool,
    /// Until when the account is locked now; [`Timestamp::MAX`] at the ceiling.
    pub locked_until: Option<Timestamp>,
    /// The device that is known from now on, after a success.
    pub device: Option<Device>,
}

/// The login attempt is unknown, already ended, or expired. An expired attempt counts as failed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("the attempt is unknown, already ended, or expired")]
pub struct UnknownAttempt;

/// Returns the digest of an address's login budget.
#[must_use]
pub fn address_digest(key: DigestKey, group: AddressGroup) -> Digest {
    let mut digest = key.begin(Domain::LoginAddress);
    digest.address(Part::Address, group);
    digest.finish().in_partition(Anchors::new(key).address(group))
}

impl Login {
    /// Counts an attempt before its secret is checked. `account` and `address` are the stored state under the digests of `tried`.
    pub fn attempt(
        &self,
        tried: &AttemptKeys,
        account: Option<&mut Account>,
        address: &mut Balance,
        now: Timestamp,
    ) -> AttemptOutcome {
        let ip = Limit::from(self.ip);
        // A login without an account name must not count on the record that the store passed for it.
        let mut account = account.filter(|_| tried.account.is_some());
        let device = match (&mut account, tried.device) {
            (Some(account), Some(device)) => account.recognise(self, &device, now),
            _ => 0,
        };
        // A known device has counters of its own. If it also needed room in the budget of its address, an attacker
        // behind the same address could lock the owner out.
        let counts_address = tried.address.is_some() && device == 0;
        // The address before the account: an attempt that its address has no budget for must not count on the account,
        // or one address could lock accounts without end.
        if counts_address {
            let (look, _) = address.look(&ip, 1, now);
            if !look.allowed {
                return AttemptOutcome::TooMany { until: look.ready_at };
            }
            // Charged even if the account turns out to be locked: an address that keeps trying locked accounts is guessing.
            address.charge(&ip, 1, now, tried.id);
        }
        if let Some(account) = &mut account
            && let Err(until) = account.begin(self, tried.factor, device, tried.id, now)
        {
            return AttemptOutcome::Locked { until };
        }
        AttemptOutcome::Allowed(Attempt {
            id: tried.id,
            account: tried.account,
            address: tried.address.filter(|_| counts_address),
            folded: None,
            factor: tried.factor,
            device,
            at: now,
            address_at: now,
            address_history: History::default(),
        })
    }

    /// Ends an attempt after its secret was checked. `nonce` is a fresh random number for the token of a new device.
    ///
    /// # Errors
    /// Fails where the attempt is not under way, or no longer.
    pub fn result(
        &self,
        attempt: &Attempt,
        success: bool,
        account: Option<&mut Account>,
        address: &mut Balance,
        nonce: TraceId,
        now: Timestamp,
    ) -> Result<ResultOutcome, UnknownAttempt> {
        let mut outcome = ResultOutcome { success, locked_until: None, device: None };
        match (attempt.account, account) {
            (Some(_), Some(account)) => {
                outcome.locked_until = account.end(self, attempt, success, now)?;
                // A stand-in for many accounts knows the devices of none.
                if success && attempt.folded.is_none() {
                    outcome.device = account.remember_device(attempt, nonce, now);
                }
            }
            // The record is gone, and with it the proof that this attempt was under way. A token alone must not log in.
            (Some(_), None) => return Err(UnknownAttempt),
            // Nothing is stored for an attempt without an account. Its own token has the time.
            (None, _) if now >= attempt.at.plus(RESULT_WITHIN) => return Err(UnknownAttempt),
            (None, _) => {}
        }
        // A success is no guess, so it does not use up the budget that its address may share with others.
        if success {
            attempt.give_back_to(address, now);
        }
        Ok(outcome)
    }

    /// Returns the settings for a stand-in for many accounts. It has no ceiling: it has no owner who could reset it.
    #[must_use]
    pub fn without_ceiling(&self) -> Self {
        Self { ceiling: u32::MAX, ..self.clone() }
    }

    /// Returns how long the `failures`th consecutive failure locks. Between two thresholds the lower one applies.
    pub(crate) fn lock(&self, failures: u32) -> Option<Span> {
        self.locks.iter().rev().find(|(floor, _)| failures >= *floor).map(|(_, span)| *span)
    }
}

impl Attempt {
    /// Returns this attempt with the address that was charged for it in another step, at a time of its own.
    #[must_use]
    pub fn with_address(mut self, address: Digest, charged: &Checked) -> Self {
        let at = charged.mark.map_or(self.at, |mark| mark.part);
        (self.address, self.address_at, self.address_history) = (Some(address), at, charged.history);
        self
    }

    /// Sets the history of the partition that its address was charged in.
    pub fn set_history(&mut self, history: History) {
        self.address_history = history;
    }

    /// Takes the address out, and returns the receipt that gives its charge back.
    pub fn take_address(&mut self, login: &Login) -> Option<Receipt> {
        let (mark, limit) = (Mark::new(self.address_at, 1), Limit::from(login.ip));
        let address = self.address.take()?;
        Some(Receipt::of_charge(self.id, address, &limit, (mark, self.address_history), self.address_at))
    }

    /// Gives its charge back to the balance of its address.
    pub(crate) fn give_back_to(&self, address: &mut Balance, now: Timestamp) {
        if self.address.is_some() {
            address.give_back(Mark::new(self.address_at, 1), now, self.id);
        }
    }

    /// The versions of its bytes that are read.
    pub(crate) const VERSIONS: Versions = Versions::FIRST;

    /// Returns the signed token that the caller holds until the result.
    #[must_use]
    pub fn to_token(&self, secret: &Secret, format: Format) -> String {
        secret.seal(Purpose::Attempt, &to_bytes(Self::VERSIONS, format, |out| self.write(out)))
    }

    /// Appends this attempt to a larger record.
    pub(crate) fn write(&self, out: &mut Writer) {
        out.wide(self.id.to_u128());
        for digest in [self.account, self.address, self.folded] {
            out.byte(u8::from(digest.is_some()));
            out.wide(digest.map_or(0, Digest::to_u128));
        }
        out.number(u64::from(self.factor.0));
        out.number(self.device);
        out.number(self.at.micros());
        out.number(self.address_at.micros());
        self.address_history.write_after(History::default(), out);
    }

    /// Verifies and parses a token.
    ///
    /// # Errors
    /// Fails where this installation did not sign it as an attempt.
    pub fn from_token(token: &str, secrets: &Secrets) -> Result<Self, BytesError> {
        from_bytes(&secrets.open(Purpose::Attempt, token)?, Self::VERSIONS, Self::read)
    }

    /// Reads an attempt from the front of a larger record.
    pub(crate) fn read(from: &mut Reader<'_>) -> Result<Self, BytesError> {
        const WRONG: BytesError = BytesError::Malformed("attempt");
        let id = TraceId::from_u128(from.wide()?);
        let mut digest = || {
            let known = from.byte()?;
            let value = from.wide()?;
            match (known, value) {
                // One spelling for each attempt: a value behind a missing digest is refused.
                (1, value) => Ok(Some(Digest::from_u128(value))),
                (0, 0) => Ok(None),
                _ => Err(WRONG),
            }
        };
        let (account, address, folded) = (digest()?, digest()?, digest()?);
        let factor = Factor(u32::try_from(from.number()?).map_err(|_| WRONG)?);
        let device = from.number()?;
        let (at, address_at) = (Timestamp::from_micros(from.number()?), Timestamp::from_micros(from.number()?));
        let address_history = History::read_after(History::default(), from)?;
        Ok(Self { id, account, address, folded, factor, device, at, address_at, address_history })
    }
}
