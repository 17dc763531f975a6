//! Login attempts: budgets, locks, the ceiling, and the devices an attacker cannot lock out.
//!
//! An attempt is counted before its secret is checked and stays counted as a failure until its result says otherwise, so
//! parallel guesses gain nothing. Two budgets, one by account and one by address, never one joint key. Devices that have
//! logged in before have counters of their own.

mod account;
mod barred;
mod device;
mod exchange;
mod known;
mod name;
mod track;

use std::net::IpAddr;

use crate::balance::Balance;
use crate::codec::{BytesError, Format, Reader, Versions, Writer, from_bytes, to_bytes};
use crate::key::{AddressGroup, Anchors, Digest, DigestKey, Domain, Part, TraceId};
use crate::limit::{Limit, Mark, SlidingLog};
use crate::policy::OnStoreError;
use crate::secret::{Purpose, Secret, Secrets};
use crate::time::{Span, Timestamp};

pub use account::Account;
pub use device::{Device, MAX_DEVICES};
pub use exchange::{Attempted, LoginRequest, LoginResult, Refusal, RefusedBy};
#[cfg(feature = "login")]
pub use name::canonical_account;
#[cfg(not(feature = "login"))]
pub(crate) use name::canonical_account;
pub use name::{Spellings, account_digest};

/// An attempt without a result for this long has failed.
pub const RESULT_WITHIN: Span = Span::MINUTE;

/// How a login is protected.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Login {
    /// Attempts on one account.
    pub account: SlidingLog,
    /// Attempts from one address.
    pub ip: SlidingLog,
    /// So many failures in a row, and how long each further one locks; ascending.
    pub locks: Vec<(u32, Span)>,
    /// So many failures in a row, and unknown devices are refused until a reset.
    pub ceiling: u32,
    /// What to do when the store fails.
    pub on_store_error: OnStoreError,
}

impl Default for Login {
    fn default() -> Self {
        let log = |quota, seconds| SlidingLog::new(quota, Span::from_secs(seconds)).expect("the defaults are possible");
        Self {
            account: log(5, 15 * 60),
            ip: log(20, 5 * 60),
            locks: vec![(3, Span::MINUTE), (5, Span::from_secs(300)), (10, Span::HOUR)],
            ceiling: 100,
            on_store_error: OnStoreError::Closed,
        }
    }
}

/// Which secret is being tried: counters are kept for each factor.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct Factor(pub(crate) u32);

impl Factor {
    /// From its name; a password, unless said. It is the same under every secret, so that an account keeps its counters
    /// when the secret is rotated.
    #[must_use]
    pub fn named(name: Option<&str>) -> Self {
        let name = name.map(str::trim).filter(|name| !name.is_empty()).unwrap_or("password");
        let mut digest = DigestKey::OF_NAMES.begin(Domain::Account);
        digest.text(Part::Fact, name);
        Self(u32::try_from(digest.finish().to_u128() >> 96).unwrap_or(u32::MAX))
    }
}

/// Whose login is tried, and with what.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Try {
    /// The account's digest; `None` where the login names none.
    pub account: Option<Digest>,
    /// The address's digest; `None` where the address is allow-listed, which skips its budget and nothing else.
    pub address: Option<Digest>,
    /// Where the attempt is counted by a store that has no room for its address or its account.
    pub wider: Wider,
    /// Which secret.
    pub factor: Factor,
    /// The device token that came with it, if it opened.
    pub device: Option<Device>,
    /// The id of the attempt.
    pub id: TraceId,
}

/// What stands in for an address, or for an account's name, that a store has no room for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Wider {
    /// Everyone behind the same /24 or /48; `None` where the address is not known.
    pub prefix: Option<Digest>,
    /// Everyone.
    pub all: Digest,
}

impl Wider {
    /// Of an attempt from this address.
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

/// What an attempt is told.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[must_use = "an attempt that nobody reads protects nothing"]
pub enum AttemptOutcome {
    /// Check the secret, then say how it went.
    Allowed(Attempt),
    /// Too many attempts from this address: `too_many_requests`.
    TooMany {
        /// When to try again.
        until: Timestamp,
    },
    /// The account is locked for this caller: `account_locked`.
    Locked {
        /// When to try again; `None` at the ceiling, where only a reset helps.
        until: Option<Timestamp>,
    },
}

/// An attempt under way; its token goes to the caller and comes back with the result.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Attempt {
    /// Its id.
    pub id: TraceId,
    /// The account it is on.
    pub account: Option<Digest>,
    /// The address it came from.
    pub address: Option<Digest>,
    /// Under what it is counted in place of its account, by a store that had no room for that.
    pub folded: Option<Digest>,
    pub(crate) factor: Factor,
    /// The known device it came from; 0 for any other.
    pub(crate) device: u64,
    pub(crate) at: Timestamp,
}

/// What a result is told.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[must_use = "a result that nobody reads protects nothing"]
pub struct ResultOutcome {
    /// Whether the caller may try again, or is in.
    pub allowed: bool,
    /// Until when the account is locked now; `Timestamp::MAX` at the ceiling.
    pub locked_until: Option<Timestamp>,
    /// After a success: the device that is known from now on.
    pub device: Option<Device>,
}

/// The login attempt is unknown, already ended, or expired. An expired attempt counts as failed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("the attempt is unknown, already ended, or expired")]
pub struct UnknownAttempt;

/// The digest of an address's login budget.
#[must_use]
pub fn address_digest(key: DigestKey, group: AddressGroup) -> Digest {
    let mut digest = key.begin(Domain::LoginAddress);
    digest.address(Part::Address, group);
    digest.finish().in_partition(Anchors::new(key).address(group))
}

impl Login {
    /// Before the secret is checked. `account` and `address` are what is stored under the digests of `tried`.
    pub fn attempt(
        &self,
        tried: &Try,
        account: Option<&mut Account>,
        address: &mut Balance,
        now: Timestamp,
    ) -> AttemptOutcome {
        let ip = Limit::from(self.ip);
        let mut account = account.filter(|_| tried.account.is_some());
        let device = match (&mut account, tried.device) {
            (Some(account), Some(device)) => account.recognise(self, &device, now),
            _ => 0,
        };
        let counts_address = tried.address.is_some() && device == 0;
        if counts_address {
            let (look, _) = address.look(&ip, 1, now);
            if !look.allowed {
                return AttemptOutcome::TooMany { until: look.ready_at };
            }
            // Charged whatever the account says: tries on a locked account count against whoever makes them.
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
        })
    }

    /// After the secret was checked. `nonce` is fresh and random: a new device gets it.
    ///
    /// # Errors
    /// Where the attempt is not under way (any more).
    pub fn result(
        &self,
        attempt: &Attempt,
        success: bool,
        account: Option<&mut Account>,
        address: &mut Balance,
        nonce: TraceId,
        now: Timestamp,
    ) -> Result<ResultOutcome, UnknownAttempt> {
        let mut outcome = ResultOutcome { allowed: true, locked_until: None, device: None };
        match (attempt.account, account) {
            (Some(_), Some(account)) => {
                outcome.locked_until = account.end(self, attempt, success, now)?;
                // What stands in for many accounts knows the devices of none.
                if success && attempt.folded.is_none() {
                    outcome.device = account.welcome(attempt, nonce, now);
                }
            }
            (Some(_), None) => return Err(UnknownAttempt),
            (None, _) if now >= attempt.at.plus(RESULT_WITHIN) => return Err(UnknownAttempt),
            (None, _) => {}
        }
        outcome.allowed = success || outcome.locked_until.is_none();
        if success && attempt.address.is_some() {
            address.give_back(Mark::new(attempt.at, 1), now, attempt.id);
        }
        Ok(outcome)
    }

    /// The same for what stands in for many accounts: it has no ceiling, since nobody could lift it.
    #[must_use]
    pub fn without_ceiling(&self) -> Self {
        Self { ceiling: u32::MAX, ..self.clone() }
    }

    /// How long the `failures`th failure in a row locks. Thresholds are floors: between two of them the lower holds.
    pub(crate) fn lock(&self, failures: u32) -> Option<Span> {
        self.locks.iter().rev().find(|(floor, _)| failures >= *floor).map(|(_, span)| *span)
    }
}

impl Attempt {
    /// The versions in which it is read.
    pub(crate) const VERSIONS: Versions = Versions::FIRST;

    /// The signed token that the caller holds until the result.
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
    }

    /// Reads a token.
    ///
    /// # Errors
    /// Where it was not signed by this installation as an attempt.
    pub fn from_token(token: &str, secrets: &Secrets) -> Result<Self, BytesError> {
        from_bytes(&secrets.open(Purpose::Attempt, token)?, Self::VERSIONS, Self::read)
    }

    /// Takes an attempt off the front of a larger record.
    pub(crate) fn read(from: &mut Reader<'_>) -> Result<Self, BytesError> {
        const WRONG: BytesError = BytesError::Malformed("attempt");
        let id = TraceId::from_u128(from.wide()?);
        let mut digest = || {
            let known = from.byte()?;
            let value = from.wide()?;
            match (known, value) {
                (1, value) => Ok(Some(Digest::from_u128(value))),
                (0, 0) => Ok(None),
                _ => Err(WRONG),
            }
        };
        let (account, address, folded) = (digest()?, digest()?, digest()?);
        let factor = Factor(u32::try_from(from.number()?).map_err(|_| WRONG)?);
        let device = from.number()?;
        let at = Timestamp::from_micros(from.number()?);
        Ok(Self { id, account, address, folded, factor, device, at })
    }
}
