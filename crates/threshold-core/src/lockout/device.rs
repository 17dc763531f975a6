//! A device that has logged in before, and the token that says so.

use crate::codec::{BytesError, Format, Reader, Versions, Writer, from_bytes, to_bytes};
use crate::key::Digest;
use crate::secret::{Purpose, Secret, Secrets};
use crate::time::{Span, Timestamp};

/// How many devices of one account are known at once; the oldest makes room.
pub const MAX_DEVICES: usize = 10;
/// How long a device stays known.
pub(super) const KNOWN_FOR: Span = Span::from_secs(180 * 86_400);

/// A device that an account has been used from.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Device {
    pub(super) account: Digest,
    pub(super) nonce: u64,
    pub(super) issued: Timestamp,
    /// Which credential it logged in with: a reset makes all devices unknown.
    pub(super) credential: u32,
}

impl Device {
    /// The versions in which it is read.
    pub(crate) const VERSIONS: Versions = Versions::FIRST;

    /// When it was issued.
    #[must_use]
    pub fn issued(&self) -> Timestamp {
        self.issued
    }

    /// The signed token, for a cookie that is `__Host-`, `HttpOnly`, `Secure` and `SameSite=Lax`.
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

    /// Reads a token. Whether the device is still known, its account says.
    ///
    /// # Errors
    /// Where it was not signed by this installation as a device.
    pub fn from_token(token: &str, secrets: &Secrets) -> Result<Self, BytesError> {
        from_bytes(&secrets.open(Purpose::Device, token)?, Self::VERSIONS, Self::read)
    }

    /// Takes a device off the front of a larger record.
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
