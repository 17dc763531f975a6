//! The operators' changes: bans, forgiveness, settings and pauses.
//!
//! Each is one function that validates, makes the change together with its audit record, and waits for the disk. Doors only
//! parse the arguments and write the result.

use std::sync::Arc;
use std::time::Duration;

use threshold_core::control::ControlChange;
use threshold_core::policy::{Ban, Layer, Owner, Setting};
use threshold_core::{Digest, Facts, Span, Timestamp};
use threshold_limiter::store::{AccountChange, Command, StoreError};
use threshold_limiter::{LoginError, PauseError};

use super::Desk;
use super::audit::{Entry, moment};
use super::names::written_name;
use super::settings::{NewSetting, describe};
use super::subjects::Target;

/// How long a change waits for the disk before it is answered with `not_saved`.
const SAVE_TIMEOUT: Duration = Duration::from_secs(5);
/// The longest ban with an end: ten years.
pub(super) const MAX_BAN: u64 = 10 * 365 * 86_400;
/// The longest pause: a year.
const MAX_PAUSE: u64 = 365 * 86_400;
/// The longest reason, in characters.
const MAX_REASON: usize = 1_000;

/// Why a change was not made, or is not known to be saved.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum OperationError {
    /// A field is invalid. Nothing was changed.
    Invalid { field: String, message: String },
    /// The ban is unknown or already ended.
    UnknownBan,
    /// More than one ban has an id that begins like this; they are described. Nothing was changed.
    AmbiguousBan(Vec<String>),
    /// The key is a digest, and no caller with this digest was stopped of late. Nothing was changed.
    UnknownDigest,
    /// More than one caller has this digest; they are described. Nothing was changed.
    AmbiguousDigest(Vec<String>),
    /// The entry of a list with this index is invalid. Nothing was changed.
    InvalidEntry { index: usize, message: String },
    /// There is no journal, and so no audit.
    NoJournal,
    /// The audit could not be read.
    AuditUnreadable,
    /// The list of bans is full. Nothing was changed.
    TooManyBans,
    /// The list of settings is full. Nothing was changed.
    TooManySettings,
    /// The store could not answer. The change may have been made.
    Store(StoreError),
    /// The queue of audit records that wait for the disk is full. Nothing was changed.
    NotRecorded,
    /// The change is in effect, but not on disk yet. The journal goes on trying.
    NotSaved,
}

impl OperationError {
    pub(super) fn invalid(field: impl Into<String>, message: impl Into<String>) -> Self {
        Self::Invalid { field: field.into(), message: message.into() }
    }
}

impl From<StoreError> for OperationError {
    fn from(error: StoreError) -> Self {
        Self::Store(error)
    }
}

/// A ban to set.
#[derive(Debug, Clone, Copy)]
pub(crate) struct NewBan<'a> {
    pub(crate) layer: Layer,
    pub(crate) key: &'a str,
    pub(crate) reason: &'a str,
    /// The length in seconds; `None` for a permanent ban.
    pub(crate) seconds: Option<u64>,
}

impl Desk {
    /// Sets a ban, which replaces the one on the same subject. Returns its id.
    pub(crate) async fn ban(&self, who: &str, new: NewBan<'_>) -> Result<(Digest, Ban), OperationError> {
        let reason = reason_of(new.reason)?;
        let policy = self.policy();
        let whom =
            policy.ban_target(new.layer, new.key).map_err(|error| OperationError::invalid("key", error.to_string()))?;
        // A ban on a trusted proxy or on a wide block would deny all clients behind it.
        if let Some(why) = policy.refuses_ban(&whom) {
            return Err(OperationError::invalid("key", why.to_string()));
        }
        let turn = self.operations.lock().await;
        // The clock is read inside the turn, so that a later audit line never has an earlier time.
        let now = self.now();
        let until = match new.seconds {
            None => Timestamp::MAX,
            Some(seconds @ 1..=MAX_BAN) => now.plus(Span::from_secs(seconds)),
            Some(_) => {
                let message = format!("a ban lasts between 1 and {MAX_BAN} seconds");
                return Err(OperationError::invalid("durationSec", message));
            }
        };
        let (bans, id) = (self.limiter.bans(), whom.ban_id(self.limiter.key()));
        let (layer, key) = (whom.layer().name(), self.audited_key(whom.layer(), &whom.key()));
        // The audit has the old state too, so that a ban that replaces another one can be undone by hand.
        let before = bans.one(id, now).map(|before| format!("{} -> ", length(before.until)));
        let action = format!("ban: {}{}", before.unwrap_or_default(), length(until));
        let ban = Ban { whom, reason: reason.into(), by: who.into(), from: now, until };
        let change = self.begin(Entry { who, action, layer, key: &key, why: reason })?;
        let set = ControlChange::Ban { id, ban: Some(Arc::new(ban.clone())) };
        if let Err(error) = self.limiter.change_control(set).await {
            return Err(change.fail_control(error, OperationError::TooManyBans));
        }
        change.confirm();
        // The next operator need not wait for this one's disk write: the order of changes is fixed as soon as they
        // are queued.
        drop(turn);
        self.acknowledged().await?;
        Ok((id, ban))
    }

    /// Ends a ban by an operator, by a ladder, or by both.
    pub(crate) async fn lift(&self, who: &str, id: Digest, reason: Option<&str>) -> Result<(), OperationError> {
        let reason = reason.map_or(Ok(""), reason_of)?;
        let turn = self.operations.lock().await;
        let (bans, now) = (self.limiter.bans(), self.now());
        let by_operator = bans.one(id, now);
        let by_ladder = self.limiter.standing(id).await?.and_then(|standing| standing.banned_until());
        // The store keeps a standing after its ban has ended, for its strikes.
        let by_ladder = by_ladder.filter(|until| *until > now);
        // `None` is less than any time, so this is the later end of those that exist.
        let until = by_operator.as_ref().map(|ban| ban.until).max(by_ladder).ok_or(OperationError::UnknownBan)?;
        let is_by_operator = by_operator.is_some();
        let named = by_operator.or_else(|| bans.named(id));
        let (by, because) = named.as_ref().map_or(("ladder", ""), |ban| (&*ban.by, &*ban.reason));
        let action = format!("lift: {}, by {by}: {because}", length(until));
        let whom = named.as_ref().map(|ban| {
            let layer = ban.whom.layer();
            // A ladder's ban has the digest of a secret name already.
            let key = if is_by_operator {
                self.audited_key(layer, &ban.whom.key())
            } else {
                self.policy().shown_key(&ban.whom)
            };
            (layer.name(), key)
        });
        // A ladder's ban is stored by digest. If the list of names was full when it was set, only its id can be
        // recorded.
        let (layer, key) = whom.unwrap_or_else(|| ("ban", format!("{:032x}", id.to_u128())));
        let change = self.begin(Entry { who, action, layer, key: &key, why: reason })?;
        // If only the first of the two steps succeeds, the ban is still listed and can be lifted again.
        if by_ladder.is_some()
            && let Err(error) = self.limiter.forgive_standing(id).await
        {
            return Err(change.fail(error));
        }
        self.penalties.forgive([id]);
        if is_by_operator && let Err(error) = self.limiter.change_control(ControlChange::Ban { id, ban: None }).await {
            return Err(change.fail(error));
        }
        change.confirm();
        drop(turn);
        self.acknowledged().await
    }

    /// Clears the strikes and penalties of a subject and what it has used, or the failures of an account.
    pub(crate) async fn forgive(
        &self,
        who: &str,
        whom: Target<'_>,
        reason: Option<&str>,
    ) -> Result<(), OperationError> {
        let reason = reason.map_or(Ok(""), reason_of)?;
        let key = whom.spelled(&self.policy())?;
        // Read and forgiven by the same spelling, or the audit would describe another subject than the one that is
        // forgiven.
        let whom = whom.with_key(&key);
        let turn = self.operations.lock().await;
        // Read inside the turn: after the change nobody can tell what was forgiven.
        let mut before = self.subject(whom).await?;
        if matches!(whom, Target::Subject(..)) {
            // The lock of a user's account is lifted by forgiving the account.
            before.account = None;
        }
        let action = format!("forgive: {}", before.describe());
        let by_digest = match whom {
            Target::Account(name) => self.account_with_digest(name).await?,
            Target::Subject(..) => None,
        };
        let audited = match whom {
            Target::Subject(layer, key) => self.audited_key(layer, key),
            Target::Account(name) => name.to_owned(),
        };
        let change = self.begin(Entry { who, action, layer: whom.layer_name(), key: &audited, why: reason })?;
        let forgiven = match whom {
            Target::Subject(layer, key) => self.limiter.forgive_async(layer, key).await.map_err(LoginError::Store),
            Target::Account(name) => match by_digest {
                Some(account) => {
                    let lift = Command::ChangeAccount { account, change: AccountChange::Lift };
                    self.limiter.execute(lift).await.map(drop).map_err(LoginError::Store)
                }
                None => {
                    let name = written_name(Layer::User, name, &self.policy()).unwrap_or_default();
                    self.limiter.pardon_account_async(&name).await
                }
            },
        };
        match forgiven {
            Ok(()) => {
                if let Target::Subject(layer, key) = whom {
                    self.penalties.forgive(self.policy().keys_of(layer, key).standings);
                }
                change.confirm();
            }
            Err(LoginError::Store(error)) => return Err(change.fail(error)),
            Err(error) => {
                // Every other error is about the name, and is returned before the store is asked.
                change.withdraw();
                return Err(OperationError::invalid("key", error.to_string()));
            }
        }
        drop(turn);
        self.acknowledged().await
    }

    /// Replaces the setting of a tenant or a user; an empty one removes it. Returns the new setting.
    pub(crate) async fn set(
        &self,
        who: &str,
        owner: Owner,
        name: &str,
        new: NewSetting,
    ) -> Result<Option<Setting>, OperationError> {
        let name = &*self.owner_name(owner, name)?;
        let turn = self.operations.lock().await;
        // Parsed inside the turn, because it contains the time from which the setting is in force.
        let setting = new.into_setting(name, who, self.now())?;
        // Checked before the audit record begins: a refused setting is not a change.
        self.check_setting(owner, name, &setting)?;
        let word = if setting.is_empty() { "take-back" } else { "give" };
        let before = describe(self.setting(owner, name).as_ref());
        let action = format!("{word}: {before} -> {}", describe(Some(&setting)));
        let layer = if owner == Owner::User { Layer::User } else { Layer::Tenant };
        let key = &self.audited_key(layer, name);
        let change = self.begin(Entry { who, action, layer: layer.name(), key, why: &setting.reason })?;
        if let Err(error) = self.store_setting(owner, name, &setting).await {
            return Err(change.fail_control(error, OperationError::TooManySettings));
        }
        change.confirm();
        drop(turn);
        self.acknowledged().await?;
        Ok(Some(setting).filter(|setting| !setting.is_empty()))
    }

    /// Denies a subject for a while. Returns whether any rule counts by it alone.
    ///
    /// Unlike other changes it is made by callers, as often as their providers answer with Retry-After. So it does not wait
    /// for the disk, at most ten a second are recorded, and it is made even if it cannot be recorded.
    pub(crate) async fn pause(&self, who: &str, layer: Layer, key: &str, seconds: u64) -> Result<bool, OperationError> {
        let length = pause_length(seconds)?;
        let policy = self.policy();
        // The global layer has one budget, without a name.
        let key = &*if layer == Layer::Global { key.into() } else { Target::Subject(layer, key).spelled(&policy)? };
        match self.limiter.pause_async(layer, key, length.into()).await {
            Ok(()) => {}
            Err(PauseError::Store(error)) => return Err(error.into()),
            // A pause that no rule counts by changes nothing, and is not recorded.
            Err(_) => return Ok(false),
        }
        self.record_pause(who, length, (layer.name(), &self.audited_key(layer, key)));
        Ok(true)
    }

    /// Denies for a while what a rule counts under the same key as a request with these facts.
    pub(crate) async fn pause_rule(
        &self,
        who: &str,
        rule: &str,
        facts: &Facts<'_>,
        seconds: u64,
    ) -> Result<(), OperationError> {
        let length = pause_length(seconds)?;
        self.limiter.pause_rule_async(rule, facts, length.into()).await.map_err(not_of_a_rule)?;
        self.record_pause(who, length, ("rule", rule));
        Ok(())
    }

    /// Clears what a rule has counted under the same key as a request with these facts, with its pause.
    pub(crate) async fn forgive_rule(
        &self,
        who: &str,
        rule: &str,
        facts: &Facts<'_>,
        reason: Option<&str>,
    ) -> Result<(), OperationError> {
        let reason = reason.map_or(Ok(""), reason_of)?;
        let turn = self.operations.lock().await;
        let entry = Entry { who, action: "forgive".to_owned(), layer: "rule", key: rule, why: reason };
        let change = self.begin(entry)?;
        match self.limiter.forgive_rule_async(rule, facts).await {
            Ok(()) => change.confirm(),
            Err(PauseError::Store(error)) => return Err(change.fail(error)),
            Err(error) => {
                change.withdraw();
                return Err(not_of_a_rule(error));
            }
        }
        drop(turn);
        self.acknowledged().await
    }

    /// Records a pause after it was made.
    fn record_pause(&self, who: &str, length: Span, (layer, key): (&str, &str)) {
        let now = self.now();
        let Some(left_out) = self.pauses.sample(now) else { return };
        let left_out = if left_out > 0 { format!(", {left_out} before it are left out") } else { String::new() };
        let action = format!("pause: {} s, until {}{left_out}", length.secs_ceil(), moment(now.plus(length)));
        match self.begin(Entry { who, action, layer, key, why: "" }) {
            Ok(change) => change.confirm(),
            Err(_) => tracing::warn!("pause not recorded: the audit is full"),
        }
    }

    /// Waits until a change is on disk.
    pub(super) async fn acknowledged(&self) -> Result<(), OperationError> {
        self.wait_until_saved(SAVE_TIMEOUT).await.map_err(|_| OperationError::NotSaved)
    }
}

/// Says which field of a call names nothing that a rule counts.
fn not_of_a_rule(error: PauseError) -> OperationError {
    match error {
        PauseError::Store(error) => error.into(),
        PauseError::NoKey => OperationError::invalid("request", error.to_string()),
        error => OperationError::invalid("rule", error.to_string()),
    }
}

fn pause_length(seconds: u64) -> Result<Span, OperationError> {
    if !(1..=MAX_PAUSE).contains(&seconds) {
        return Err(OperationError::invalid("seconds", format!("a pause lasts between 1 and {MAX_PAUSE} seconds")));
    }
    Ok(Span::from_secs(seconds))
}

/// Trims a reason, and refuses an empty or too long one.
pub(super) fn reason_of(text: &str) -> Result<&str, OperationError> {
    // The length as sent, with the spaces that are trimmed: the schema of the API counts them too.
    let is_long = text.chars().count() > MAX_REASON;
    let text = text.trim();
    if text.is_empty() || is_long {
        return Err(OperationError::invalid(
            "reason",
            format!("the reason must have from 1 to {MAX_REASON} characters"),
        ));
    }
    Ok(text)
}

/// Describes the end of a ban, for the audit.
pub(super) fn length(until: Timestamp) -> String {
    until.unless_never().map_or_else(|| "for good".to_owned(), |until| format!("until {}", moment(until)))
}
