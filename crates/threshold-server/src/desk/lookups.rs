//! What operators look up beside subjects: a ban by the beginning of its id, locked accounts, and the audit.

use threshold_core::key::is_redacted;
use threshold_core::policy::{Layer, ListEntry};
use threshold_core::{Digest, Timestamp};
use threshold_limiter::journal::{AuditLine, Journal};
use threshold_limiter::store::{Kind, Listed};

use super::names::written_name;
use super::subjects::{ListedBan, shown_digest};
use super::{Desk, OperationError};

/// The shortest beginning of an id that names a ban: one in 65,536 bans has it, so that a typing mistake seldom names another.
const MIN_PREFIX: usize = 4;
/// The length of an id.
const ID_DIGITS: usize = 32;
/// The most bans that an ambiguous beginning of an id is answered with.
const MAX_AMBIGUOUS: usize = 20;
/// The number of accounts that are read at a time.
const ACCOUNTS: usize = 1_000;

/// A locked account.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Lock {
    /// The key of the account.
    pub(crate) id: Digest,
    /// The digest that `subject` shows for the account. Its name is not stored.
    pub(crate) digest: String,
    /// Consecutive failures from unknown devices.
    pub(crate) failures: u32,
    /// The end of the lock; `Timestamp::MAX` at the ceiling.
    pub(crate) until: Timestamp,
}

impl Desk {
    /// Returns the ban whose id begins with these hexadecimal digits.
    pub(crate) async fn ban_with_prefix(&self, prefix: &str) -> Result<Digest, OperationError> {
        // `from_str_radix` also accepts a plus sign.
        let is_hexadecimal = prefix.bytes().all(|byte| byte.is_ascii_hexdigit());
        let number = u128::from_str_radix(prefix, 16).ok().filter(|_| is_hexadecimal);
        let number = number.filter(|_| (MIN_PREFIX..=ID_DIGITS).contains(&prefix.len())).ok_or_else(|| {
            let message = format!(
                "the id of a ban has {ID_DIGITS} hexadecimal digits; its first {MIN_PREFIX} or more are enough"
            );
            OperationError::invalid("id", message)
        })?;
        // A whole id is not looked up here: the operation itself reports an unknown one.
        let missing = u32::try_from(ID_DIGITS.saturating_sub(prefix.len()).saturating_mul(4)).unwrap_or(0);
        if missing == 0 {
            return Ok(Digest::from_u128(number));
        }
        let first = number.checked_shl(missing).unwrap_or(0);
        let last = first | u128::MAX.checked_shr(u128::BITS.saturating_sub(missing)).unwrap_or(0);
        // `bans` lists ids above this one, and `first` itself must be among them. Below id 0 there is none, so the
        // list begins at its start.
        let after = first.checked_sub(1).map(Digest::from_u128);
        let mut found = self.bans(after, MAX_AMBIGUOUS.saturating_add(1)).await?;
        found.retain(|listed| listed.id.to_u128() <= last);
        match found.as_slice() {
            [] => Err(OperationError::UnknownBan),
            [one] => Ok(one.id),
            _ => Err(OperationError::AmbiguousBan(found.iter().map(|listed| self.describe_ban(listed)).collect())),
        }
    }

    /// Ends all bans on exactly this subject: by operators, by ladders and of imported sets. Returns their number.
    pub(crate) async fn lift_subject(
        &self,
        who: &str,
        (layer, key): (Layer, &str),
        reason: Option<&str>,
    ) -> Result<usize, OperationError> {
        let (policy, now) = (self.policy(), self.now());
        let wrong = |error: threshold_core::policy::SubjectError| OperationError::invalid("key", error.to_string());
        let target = policy.ban_target(layer, key).map_err(wrong)?;
        // An IPv6 address stands for its prefix, and may be banned as a single address too.
        let named = ListEntry::named(layer, &target.key()).ok().into_iter().chain(ListEntry::named(layer, key));
        let mut ids: Vec<Digest> =
            named.chain([target]).flat_map(|whom| self.limiter.bans().on(&whom, now)).map(|(id, _)| id).collect();
        for standing in policy.keys_of(layer, &policy.subject_key(layer, key).map_err(wrong)?).standings {
            let standing = (standing, self.limiter.standing(standing).await?);
            if standing.1.is_some_and(|own| own.banned_until().is_some_and(|until| until > now)) {
                ids.push(standing.0);
            }
        }
        // An address that is its own prefix is found under both names, and a second lift would fail as unknown.
        ids.sort_unstable();
        ids.dedup();
        if ids.is_empty() {
            return Err(OperationError::UnknownBan);
        }
        for id in &ids {
            self.lift(who, *id, reason).await?;
        }
        Ok(ids.len())
    }

    /// Returns at most `limit` locked accounts with keys above `after`, ordered by key.
    pub(crate) async fn locks(&self, mut after: Option<Digest>, limit: usize) -> Result<Vec<Lock>, OperationError> {
        // One policy and one time for all pages, or an account could be judged by another ceiling than the one before
        // it.
        let (login, now) = (self.policy().login().cloned().unwrap_or_default(), self.now());
        let mut locks = Vec::new();
        loop {
            let page = self.limiter.list(Kind::Accounts, after, ACCOUNTS).await?;
            // Most accounts in a page are not locked, so an empty result of a page does not mean that there are no
            // more.
            let is_last = page.len() < ACCOUNTS;
            for listed in page {
                let Listed::Account { key, account } = listed else { continue };
                after = Some(key);
                if let Some(until) = account.locked_until(&login, now) {
                    locks.push(Lock { id: key, digest: shown_digest(key), failures: account.failures(now), until });
                    if locks.len() >= limit {
                        return Ok(locks);
                    }
                }
            }
            if is_last {
                return Ok(locks);
            }
        }
    }

    /// Returns the key of the account that a digest stands for, as `locks` or the event of a refused login shows it; `None` if the text is
    /// a name.
    ///
    /// # Errors
    /// If the text is the digest of no account.
    pub(super) async fn account_with_digest(&self, text: &str) -> Result<Option<Digest>, OperationError> {
        if written_name(Layer::User, text, &self.policy()).is_some() {
            return Ok(None);
        }
        // Events of refused logins show the digest of the name.
        let named = || self.policy().account_digest(&self.named(Layer::User, text).ok()?).ok().flatten();
        let digits = text.strip_prefix('#').filter(|_| is_redacted(text));
        let Some(digest) = digits.and_then(|digits| u64::from_str_radix(digits, 16).ok()) else {
            return named().map(Some).ok_or(OperationError::UnknownDigest);
        };
        // It is the first half of the key, so the account is the first one of a range.
        let first = u128::from(digest) << 64;
        let after = first.checked_sub(1).map(Digest::from_u128);
        let found = self.limiter.list(Kind::Accounts, after, 1).await?;
        let key = found.into_iter().find_map(|listed| match listed {
            Listed::Account { key, .. } => Some(key),
            _ => None,
        });
        let key = key.filter(|key| key.to_u128() >> 64 == u128::from(digest)).or_else(named);
        key.map(Some).ok_or(OperationError::UnknownDigest)
    }

    /// Returns at most `limit` audit lines with numbers below `before`, the newest first. It reads the disk, and may block.
    pub(crate) fn audit(&self, before: Option<u64>, limit: usize) -> Result<Vec<(u64, AuditLine)>, OperationError> {
        let journal = self.journal.as_ref().ok_or(OperationError::NoJournal)?;
        Journal::read_audit(journal.path(), before, limit).map_err(|error| {
            tracing::error!(reason = format!("{:#}", anyhow::Error::from(error)), "audit not read");
            OperationError::AuditUnreadable
        })
    }

    fn describe_ban(&self, listed: &ListedBan) -> String {
        let whom =
            listed.ban.as_ref().map(|ban| format!(" ({} {})", ban.whom.layer(), self.policy().shown_key(&ban.whom)));
        format!("{:032x}{}", listed.id.to_u128(), whom.unwrap_or_default())
    }
}
