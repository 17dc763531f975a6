//! Devices that have logged in before, and the tokens that prove it.

use crate::codec::{BytesError, Format, Reader, Versions, Writer, from_bytes, to_bytes};
use crate::key::Digest;
use crate::secret::{Purpose, Secret, Secrets};
use crate::time::{Span, Timestamp};

/// The largest number of known devices of one account. A further one replaces the one that logged in longest ago.
pub const MAX_DEVICES: usize = 10;
/// How long a device token is valid.
pub(super) const KNOWN_FOR: Span = Span::from_secs(180 * 86_400);

/// A device from which an account has been logged in to, as its token describes it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Device {
    pub(super) account: Digest,
    pub(super) nonce: u64,
    pub(super) issued: Timestamp,
    /// The number of resets before it logged in. A later reset makes it unknown.
    pub(super) credential: u32,
}

impl Device {
    /// The versions of its bytes that are read.
    pub(crate) const VERSIONS: Versions = Versions::FIRST;

    /// Returns when the token was issued.
    #[must_use]
    pub fn issued(&self) -> Timestamp {
        self.issued
    }

    /// Returns the signed token, for a cookie that is `__Host-`, `HttpOnly`, `Secure` and `SameSite=Lax`.
    #[must_use]
    pub fn to_token(&self, secret: &Secret, format: Format) -> String {
        secret.seal(Purpose::Device, &to_bytes(Self::VERSIONS, format, |out| self.write(out)))
    }

    /// Appends this device to a larger record.
    pub(crate) fn write(&self, out: &mut Writer) {
        out.wide(self.account.to_u128());
        out.number(self.nonce);
        out.number(self.issued.micros());
        out.number(u64::from(self.credential));
    }

    /// Verifies and parses a token. Only its [`Account`](super::Account) can tell whether the device is still known.
    ///
    /// # Errors
    /// Fails where this installation did not sign it as a device token.
    pub fn from_token(token: &str, secrets: &Secrets) -> Result<Self, BytesError> {
        from_bytes(&secrets.open(Purpose::Device, token)?, Self::VERSIONS, Self::read)
    }

    /// Reads a device from the front of a larger record.
    pub(crate) fn read(from: &mut Reader<'_>) -> Result<Self, BytesError> {
        const WRONG: BytesError = BytesError::Malformed("device");
        Ok(Self {
            account: Digest::from_u128(from.wide()?),
            nonce: from.number()?,
            issued: Timestamp::from_micros(from.number()?),
            credential: u32::try_from(from.number()?).map_err(|_| WRONG)?,
        })
    }
}
