//! What operators do. Each operation is one function, which validates, makes the change together with its line of the audit,
//! and waits for the disk. Doors only translate a request into its arguments, and its result into an answer.

use std::sync::Arc;
use std::time::Duration;

use threshold_core::control::ControlChange;
use threshold_core::policy::{Ban, Layer, Owner, Setting};
use threshold_core::{Digest, Span, Timestamp};
use threshold_limiter::LoginError;
use threshold_limiter::store::StoreError;

use super::Desk;
use super::audit::{Entry, moment};
use super::settings::{NewSetting, in_words};
use super::subjects::Target;

/// How long a change waits for the disk before it is refused.
const CHANGE_WAIT: Duration = Duration::from_secs(5);
/// The longest ban with an end: ten years.
const MAX_BAN: u64 = 10 * 365 * 86_400;
/// The longest pause: a year.
const MAX_PAUSE: u64 = 365 * 86_400;
/// The longest reason, in characters.
const MAX_REASON: usize = 1_000;

/// Why an operation was not done, or not acknowledged.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Refused {
    /// A field is wrong. Nothing was changed.
    Invalid { field: String, message: String },
    /// There is no such ban, or no longer.
    UnknownBan,
    /// There is room for no more bans. Nothing was changed.
    TooManyBans,
    /// There is room for no more settings. Nothing was changed.
    TooManySettings,
    /// The store could not answer.
    Store(StoreError),
    /// So many lines of the audit wait for the disk that there is room for no more. Nothing was changed.
    NotRecorded,
    /// It is in force, and not on disk yet. It is written as soon as that can be done.
    NotSaved,
}

impl Refused {
    pub(super) fn invalid(field: impl Into<String>, message: impl Into<String>) -> Self {
        Self::Invalid { field: field.into(), message: message.into() }
    }
}

impl From<StoreError> for Refused {
    fn from(error: StoreError) -> Self {
        Self::Store(error)
    }
}

/// Somebody to ban.
#[derive(Debug, Clone, Copy)]
pub(crate) struct NewBan<'a> {
    pub(crate) layer: Layer,
    pub(crate) key: &'a str,
    pub(crate) reason: &'a str,
    /// For how long; for good unless said.
    pub(crate) seconds: Option<u64>,
}

impl Desk {
    /// Bans somebody, in place of the ban there is on them. Returns its number.
    pub(crate) async fn ban(&self, who: &str, new: NewBan<'_>) -> Result<(Digest, Ban), Refused> {
        let reason = reason_of(new.reason)?;
        let policy = self.policy();
        let whom = policy.ban_target(new.layer, new.key).map_err(|error| Refused::invalid("key", error.to_string()))?;
        if let Some(why) = policy.refuses_ban(&whom) {
            return Err(Refused::invalid("key", why));
        }
        let turn = self.operations.lock().await;
        let now = self.now();
        let until = match new.seconds {
            None => Timestamp::MAX,
            Some(seconds @ 1..=MAX_BAN) => now.plus(Span::from_secs(seconds)),
            Some(_) => {
                let message = format!("a ban lasts between 1 and {MAX_BAN} seconds");
                return Err(Refused::invalid("durationSec", message));
            }
        };
        let (bans, id, layer, key) =
            (self.limiter.bans(), whom.ban_id(self.limiter.key()), whom.layer().name(), whom.key());
        let before = bans.one(id, now).map(|before| format!("{} -> ", length(before.until)));
        let action = format!("ban: {}{}", before.unwrap_or_default(), length(until));
        let ban = Ban { whom, reason: reason.into(), by: who.into(), from: now, until };
        let change = self.begin(Entry { who, action, layer, key: &key, why: reason })?;
        let set = ControlChange::Ban { id, ban: Some(Arc::new(ban.clone())) };
        if let Err(error) = self.limiter.change_control(set).await {
            return Err(change.fail_control(error, Refused::TooManyBans));
        }
        change.confirm();
        drop(turn);
        self.acknowledged().await?;
        Ok((id, ban))
    }

    /// Ends a ban, whoever has set it: an operator, a ladder, or both.
    pub(crate) async fn lift(&self, who: &str, id: Digest, reason: Option<&str>) -> Result<(), Refused> {
        let reason = reason.map_or(Ok(""), reason_of)?;
        let turn = self.operations.lock().await;
        let (bans, now) = (self.limiter.bans(), self.now());
        let by_operator = bans.one(id, now);
        let by_ladder = self.limiter.standing(id).await?.and_then(|standing| standing.banned_until());
        let by_ladder = by_ladder.filter(|until| *until > now);
        let until = by_operator.as_ref().map(|ban| ban.until).max(by_ladder).ok_or(Refused::UnknownBan)?;
        let is_by_operator = by_operator.is_some();
        let named = by_operator.or_else(|| bans.named(id));
        let (by, because) = named.as_ref().map_or(("ladder", ""), |ban| (&*ban.by, &*ban.reason));
        let action = format!("lift: {}, by {by}: {because}", length(until));
        let whom = named.as_ref().map(|ban| (ban.whom.layer().name(), ban.whom.key()));
        let (layer, key) = whom.unwrap_or_else(|| ("ban", format!("{:032x}", id.to_u128())));
        let change = self.begin(Entry { who, action, layer, key: &key, why: reason })?;
        // Lifted by half it is still in force, and can be lifted again.
        if by_ladder.is_some()
            && let Err(error) = self.limiter.forgive_standing(id).await
        {
            return Err(change.fail(error));
        }
        if is_by_operator && let Err(error) = self.limiter.change_control(ControlChange::Ban { id, ban: None }).await {
            return Err(change.fail(error));
        }
        change.confirm();
        drop(turn);
        self.acknowledged().await
    }

    /// Forgets the strikes and penalties of a subject and what it has used, or the failures of an account.
    pub(crate) async fn forgive(&self, who: &str, whom: Target<'_>, reason: Option<&str>) -> Result<(), Refused> {
        let reason = reason.map_or(Ok(""), reason_of)?;
        let key = whom.spelled(&self.policy())?;
        let whom = whom.with_key(&key);
        let turn = self.operations.lock().await;
        let action = format!("forgive: {}", self.subject(whom).await?.in_words());
        let change = self.begin(Entry { who, action, layer: whom.layer_name(), key: whom.key(), why: reason })?;
        let forgiven = match whom {
            Target::Subject(layer, key) => self.limiter.forgive_async(layer, key).await.map_err(LoginError::Store),
            Target::Account(name) => self.limiter.pardon_account_async(name).await,
        };
        match forgiven {
            Ok(()) => change.confirm(),
            Err(LoginError::Store(error)) => return Err(change.fail(error)),
            Err(error) => {
                change.withdraw();
                return Err(Refused::invalid("key", error.to_string()));
            }
        }
        drop(turn);
        self.acknowledged().await
    }

    /// Gives a tenant or a user something instead of what they were given before. What says nothing takes it all back.
    /// Returns what they have now.
    pub(crate) async fn set(
        &self,
        who: &str,
        owner: Owner,
        name: &str,
        new: NewSetting,
    ) -> Result<Option<Setting>, Refused> {
        let name = &*self.owner_name(owner, name)?;
        let turn = self.operations.lock().await;
        let setting = new.meant(name, who, self.now())?;
        // What is refused is no change, and is not recorded as one.
        self.refuses(owner, name, &setting)?;
        let word = if setting.is_empty() { "take-back" } else { "give" };
        let before = in_words(self.setting(owner, name).as_ref());
        let action = format!("{word}: {before} -> {}", in_words(Some(&setting)));
        let layer = if owner == Owner::User { "user" } else { "tenant" };
        let change = self.begin(Entry { who, action, layer, key: name, why: &setting.reason })?;
        if let Err(error) = self.give(owner, name, &setting).await {
            return Err(change.fail_control(error, Refused::TooManySettings));
        }
        change.confirm();
        drop(turn);
        self.acknowledged().await?;
        Ok(Some(setting).filter(|setting| !setting.is_empty()))
    }

    /// Denies a subject for a while. Says whether any rule counts by it alone.
    ///
    /// Unlike other changes it is made by callers, as often as their providers ask for it. So it waits for no disk, at most
    /// ten a second are recorded, and it holds whether or not it is.
    pub(crate) async fn pause(&self, who: &str, layer: Layer, key: &str, seconds: u64) -> Result<bool, Refused> {
        if !(1..=MAX_PAUSE).contains(&seconds) {
            return Err(Refused::invalid("seconds", format!("a pause lasts between 1 and {MAX_PAUSE} seconds")));
        }
        let key =
            &*self.policy().subject_key(layer, key).map_err(|error| Refused::invalid("key", error.to_string()))?;
        let (length, now) = (Span::from_secs(seconds), self.now());
        let known = self.limiter.pause_async(layer, key, length.into()).await?;
        if known && let Some(left_out) = self.pauses.take(now) {
            let left_out = if left_out > 0 { format!(", {left_out} before it are left out") } else { String::new() };
            let action = format!("pause: {seconds} s, until {}{left_out}", moment(now.plus(length)));
            match self.begin(Entry { who, action, layer: layer.name(), key, why: "" }) {
                Ok(change) => change.confirm(),
                Err(_) => tracing::warn!("a pause could not be written to the journal"),
            }
        }
        Ok(known)
    }

    /// Waits until a change is on disk.
    async fn acknowledged(&self) -> Result<(), Refused> {
        self.saved(CHANGE_WAIT).await.map_err(|_| Refused::NotSaved)
    }
}

/// A reason without the blanks around it, if it says anything and is not too long.
pub(super) fn reason_of(text: &str) -> Result<&str, Refused> {
    // As it was sent: blanks that are dropped below have their length too.
    let is_long = text.chars().count() > MAX_REASON;
    let text = text.trim();
    if text.is_empty() || is_long {
        return Err(Refused::invalid("reason", format!("say why, in at most {MAX_REASON} characters")));
    }
    Ok(text)
}

/// How long a ban lasts, in words.
fn length(until: Timestamp) -> String {
    until.unless_never().map_or_else(|| "for good".to_owned(), |until| format!("until {}", moment(until)))
}
