//! Login attempts: before and after the password is checked.

use threshold_core::command::{AccountChange, Answer, Command};
use threshold_core::lockout::{
    Account, Attempt, AttemptKeys, Attempted, Login, LoginRequest, LoginResult, Refusal, UnknownAttempt,
};
use threshold_core::policy::OnStoreError;
use threshold_core::{Digest, Format, Outcome, Plan, Policy, Timestamp};

use super::Limiter;
use crate::clock::Clock;
use crate::observer::{DecidedAttempt, Operation};
use crate::random_id;
use crate::store::{ImmediateStore, Store, StoreError, at_once};

/// Why a login could not be decided, or an account not be changed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum LoginError {
    /// The policy has no `[login]`.
    #[error("the policy has no [login]")]
    NoLogin,
    /// The name of the account is empty, or has no visible character.
    #[error("the account has no name")]
    NoAccount,
    /// Users belong to tenants, and the account does not name its tenant.
    #[error(
        "the account does not say whose it is: users belong to tenants (user_scope = \"tenant\"), so write \
         TENANT/ACCOUNT, each part percent-encoded, or /ACCOUNT for one without a tenant"
    )]
    WhoseAccount,
    /// The token was not issued as a login attempt by this installation.
    #[error("the token is not a login attempt of this installation")]
    NotOurs,
    /// The attempt is unknown, already ended, or expired. An expired attempt counts as failed.
    #[error("{UnknownAttempt}")]
    UnknownAttempt,
    /// The store failed, and `[login]` fails closed: answer with a 503.
    #[error(transparent)]
    Store(#[from] StoreError),
}

impl<S: ImmediateStore, C: Clock> Limiter<S, C> {
    /// Decides whether the secret of a login may be checked. The attempt counts as a failure until
    /// [`login_result`](Self::login_result) reports a success. A caller who is banned, deny-listed or cooling down is refused
    /// and not counted, and so cannot lock an account.
    ///
    /// ```
    /// use threshold_limiter::{Attempted, Limiter, LoginRequest, Policy};
    ///
    /// let limiter = Limiter::new(Policy::parse("[login]", &|_| None)?);
    /// let request = LoginRequest { account: Some("ada"), ip: "203.0.113.7".parse().ok(), ..LoginRequest::default() };
    /// match limiter.login_attempt(&request)? {
    ///     Attempted::Refused(refusal) => println!("429 {}: {}", refusal.code(), refusal.message()),
    ///     Attempted::Allowed(attempt) => {
    ///         let verified = false; // the result of checking the password
    ///         let result = limiter.login_result(&attempt, verified)?;
    ///         assert!(!result.success && result.may_retry);
    ///     }
    /// }
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// # Errors
    /// Returns an error if the policy has no `[login]`, if the account's name is empty after normalisation, or if the store
    /// cannot answer.
    pub fn login_attempt(&self, request: &LoginRequest<'_>) -> Result<Attempted, LoginError> {
        at_once(self.login_attempt_async(request))
    }

    /// Reports whether the secret was right. `attempt` is the token of the attempt, which is valid for a minute.
    ///
    /// # Errors
    /// Returns an error if the attempt is unknown or has ended, or if the policy has no `[login]`.
    pub fn login_result(&self, attempt: &str, success: bool) -> Result<LoginResult, LoginError> {
        at_once(self.login_result_async(attempt, success))
    }

    /// Unlocks an account after its secret was changed. All known devices become unknown.
    ///
    /// # Errors
    /// Returns an error if the account has no name.
    pub fn reset_account(&self, account: &str) -> Result<(), LoginError> {
        at_once(self.reset_account_async(account))
    }

    /// Unlocks an account for an operator. Known devices stay known.
    ///
    /// # Errors
    /// Returns an error if the account has no name.
    pub fn pardon_account(&self, account: &str) -> Result<(), LoginError> {
        at_once(self.pardon_account_async(account))
    }
}

impl<S: Store, C: Clock> Limiter<S, C> {
    /// Does what [`login_attempt`](Self::login_attempt) does, on any store.
    ///
    /// # Errors
    /// As for [`login_attempt`](Self::login_attempt).
    pub async fn login_attempt_async(&self, request: &LoginRequest<'_>) -> Result<Attempted, LoginError> {
        let policy = self.policy();
        let (login, keys, now) = self.begun(&policy, request)?;
        let attempt = self.attempt(&policy, login, request, keys, now);
        self.perform(Operation::LoginAttempt, keys.account, attempt).await.map(|decided| decided.attempted)
    }

    async fn attempt(
        &self,
        policy: &Policy,
        login: &Login,
        request: &LoginRequest<'_>,
        keys: AttemptKeys,
        now: Timestamp,
    ) -> Result<DecidedAttempt, LoginError> {
        self.store.learn_places(&mut || request.places(policy, &keys));
        let checks = request.penalty_checks(policy, keys.id);
        let rekeyed = self.rekey_login(policy, request, &checks).await;
        // Before the attempt is counted: a caller who is banned must not be able to lock an account.
        for check in checks {
            let mut outcome = Outcome::default();
            // Without the moved records a penalty under the old secret would be missed.
            let settled = match rekeyed {
                Ok(()) => self.store.settle(&check, now, &mut outcome).await,
                Err(error) => Err(error),
            };
            let failed = settled.err();
            match self.refusal_of(login, &check, settled.map(|()| outcome), now) {
                Ok(None) => {}
                Ok(Some(refusal)) => return Ok(DecidedAttempt { attempted: Attempted::Refused(refusal), failed }),
                Err(error) => {
                    // A lock that is known needs no store either.
                    let locked = self.locks.refuse(&keys, now).ok_or(error)?;
                    let attempted = locked.into_answer(self.secrets.present(), Format::PRESENT, now);
                    return Ok(DecidedAttempt { attempted, failed });
                }
            }
        }
        let command = Command::BeginLogin { login: login.clone(), keys };
        let answered = match rekeyed {
            Ok(()) => self.store.execute(command, now).await,
            Err(error) => Err(error),
        };
        let failed = answered.as_ref().err().copied();
        let (outcome, at) = match answered {
            Ok(Answer::Attempted { outcome, at }) => {
                if !self.store.answers_at_once() {
                    self.locks.see_attempt(&keys, &outcome, at);
                }
                (outcome, at)
            }
            Ok(other) => return Err(StoreError::unexpected(other).into()),
            Err(error) => (self.attempt_without_store(policy, login, &keys, error, now)?, now),
        };
        let attempted = outcome.into_answer(self.secrets.present(), Format::PRESENT, at);
        Ok(DecidedAttempt { attempted, failed })
    }

    /// Does what [`login_result`](Self::login_result) does, on any store.
    ///
    /// # Errors
    /// As for [`login_result`](Self::login_result), and if the store cannot answer.
    pub async fn login_result_async(&self, attempt: &str, success: bool) -> Result<LoginResult, LoginError> {
        let policy = self.policy();
        let (login, attempt, now) = self.ended(&policy, attempt)?;
        self.perform(Operation::LoginResult, attempt.account, self.end_login(login, attempt, success, now)).await
    }

    /// Verifies and decodes the token of an attempt.
    ///
    /// # Errors
    /// Returns [`LoginError::NotOurs`] if this limiter did not issue it.
    pub fn read_attempt(&self, attempt: &str) -> Result<Attempt, LoginError> {
        let attempt = Attempt::from_token(attempt, &self.secrets).map_err(|_| LoginError::NotOurs)?;
        Ok(self.present_attempt(attempt))
    }

    async fn end_login(
        &self,
        login: &Login,
        attempt: Attempt,
        success: bool,
        now: Timestamp,
    ) -> Result<LoginResult, LoginError> {
        let nonce = random_id();
        // First the stand-in: the store knows nothing of an attempt that was decided without it.
        let (outcome, at) = match self.result_without_store(login, &attempt, success, nonce, now) {
            Some(outcome) => (outcome, now),
            None => {
                let command = Command::EndLogin { login: login.clone(), attempt, success, nonce };
                match self.store.execute(command, now).await? {
                    Answer::LoginEnded { ended, at } => {
                        let ended = ended.map_err(|_| LoginError::UnknownAttempt)?;
                        if !self.store.answers_at_once() {
                            self.locks.see_result(&attempt, &ended, at);
                        }
                        (ended, at)
                    }
                    other => return Err(StoreError::unexpected(other).into()),
                }
            }
        };
        Ok(outcome.into_answer(self.secrets.present(), Format::PRESENT, at))
    }

    /// Does what [`reset_account`](Self::reset_account) does, on any store.
    ///
    /// # Errors
    /// Returns an error if the account has no name, or if the store cannot answer.
    pub async fn reset_account_async(&self, account: &str) -> Result<(), LoginError> {
        self.change_account(account, AccountChange::Reset).await
    }

    /// Does what [`pardon_account`](Self::pardon_account) does, on any store.
    ///
    /// # Errors
    /// As for [`reset_account_async`](Self::reset_account_async).
    pub async fn pardon_account_async(&self, account: &str) -> Result<(), LoginError> {
        self.change_account(account, AccountChange::Lift).await
    }

    async fn change_account(&self, account: &str, change: AccountChange) -> Result<(), LoginError> {
        let name = account;
        let account = self.account_key(name)?;
        self.perform(Operation::ChangeAccount, Some(account), async {
            self.rekey_account(name, account).await?;
            self.execute(Command::ChangeAccount { account, change }).await?;
            Ok(())
        })
        .await
    }

    fn begun<'p>(
        &self,
        policy: &'p Policy,
        request: &LoginRequest<'_>,
    ) -> Result<(&'p Login, AttemptKeys, Timestamp), LoginError> {
        let login = policy.login().ok_or(LoginError::NoLogin)?;
        let keys = request.attempt_keys(policy, &self.secrets, random_id());
        if request.account.is_some() && keys.account.is_none() {
            return Err(LoginError::NoAccount);
        }
        Ok((login, keys, self.time()))
    }

    fn ended<'p>(&self, policy: &'p Policy, attempt: &str) -> Result<(&'p Login, Attempt, Timestamp), LoginError> {
        let login = policy.login().ok_or(LoginError::NoLogin)?;
        Ok((login, self.read_attempt(attempt)?, self.time()))
    }

    /// Returns the account with this name; `None` if nothing is stored of it.
    ///
    /// # Errors
    /// Returns an error if the store cannot answer.
    pub async fn account_named(&self, name: &str) -> Result<Option<Account>, StoreError> {
        let Some(account) = self.policy().account_digest(name).ok().flatten() else { return Ok(None) };
        self.rekey_account(name, account).await?;
        self.account(account).await
    }

    fn account_key(&self, account: &str) -> Result<Digest, LoginError> {
        let account = self.policy().account_digest(account).map_err(|_| LoginError::WhoseAccount)?;
        account.ok_or(LoginError::NoAccount)
    }

    /// Returns the refusal of a caller whom a ban, a list or a penalty keeps from logging in. Bans and lists apply without the
    /// store, and so do penalties that this node has seen; for others the mode of the login decides while the store fails.
    fn refusal_of(
        &self,
        login: &Login,
        check: &Plan<'_>,
        settled: Result<Outcome, StoreError>,
        now: Timestamp,
    ) -> Result<Option<Refusal>, StoreError> {
        let error = match settled {
            Ok(outcome) => {
                let decision = check.decide(&outcome);
                if !self.store.answers_at_once() {
                    self.penalties.see(check, &outcome, &decision, self.clock.now());
                }
                return Ok(Refusal::from_decision(&decision));
            }
            Err(error) => error,
        };
        let seen = self.penalties.decide(check, self.clock.now());
        let decision = seen.unwrap_or_else(|| check.decide_blind(true, error.into(), now));
        match Refusal::from_decision(&decision) {
            None if error == StoreError::Full || login.on_store_error == OnStoreError::Closed => Err(error),
            known => Ok(known),
        }
    }
}
