//! Categories, ladders and login protection built in code.

use super::{PeriodText, extend, name, period, some, text};
use crate::policy::OnStoreError;
use crate::policy::file::{CategoryFile, LadderFile, LoginFile, Texts};

/// A category in the making, for [`PolicyBuilder::category`](super::PolicyBuilder::category).
///
/// Every kind of pattern must match, each with any of its values: `path("/a/**").path("/b/**")` matches either.
#[derive(Debug, Clone)]
#[must_use = "a category does nothing until it is added to a policy"]
pub struct CategoryBuilder {
    pub(super) file: CategoryFile,
}

impl CategoryBuilder {
    /// Begins a category under whose name tiers set limits.
    pub fn new(name: impl Into<String>) -> Self {
        Self { file: CategoryFile { name: text(name), ..CategoryFile::default() } }
    }

    /// Matches this method.
    pub fn method(mut self, method: impl Into<String>) -> Self {
        extend(&mut self.file.method, [method]);
        self
    }

    /// Matches this path pattern.
    pub fn path(mut self, pattern: impl Into<String>) -> Self {
        extend(&mut self.file.path, [pattern]);
        self
    }

    /// Matches this host pattern.
    pub fn host(mut self, pattern: impl Into<String>) -> Self {
        extend(&mut self.file.host, [pattern]);
        self
    }
}

/// A ladder in the making, for [`PolicyBuilder::ladder`](super::PolicyBuilder::ladder).
///
/// Without rungs it changes the built-in ladder of its name.
#[derive(Debug, Clone, Default)]
#[must_use = "a ladder does nothing until it is added to a policy"]
pub struct LadderBuilder {
    pub(super) file: LadderFile,
}

impl LadderBuilder {
    /// Begins a ladder.
    pub fn new() -> Self {
        Self::default()
    }

    /// Sets the rungs, one per strike: `warn`, `deny`, `shadow`, `cooldown 1min`, `ban 24h`, joined by `+`. The last one
    /// repeats.
    pub fn rungs<R: Into<String>>(mut self, rungs: impl IntoIterator<Item = R>) -> Self {
        self.file.rungs = Some(Texts { items: rungs.into_iter().map(text).collect(), span: 0..0 });
        self
    }

    /// Sets how long after the last strike all strikes are forgotten. Default: 24 hours.
    pub fn decay(mut self, decay: impl Into<PeriodText>) -> Self {
        self.file.decay = Some(period(decay));
        self
    }

    /// Sets the name of a cookie that is set with each warning.
    pub fn warning_cookie(mut self, name: impl Into<String>) -> Self {
        self.file.warning_cookie = Some(text(name));
        self
    }
}

impl<R: Into<String>, const N: usize> From<[R; N]> for LadderBuilder {
    fn from(rungs: [R; N]) -> Self {
        Self::new().rungs(rungs)
    }
}

impl<R: Into<String>> From<Vec<R>> for LadderBuilder {
    fn from(rungs: Vec<R>) -> Self {
        Self::new().rungs(rungs)
    }
}

/// Login protection in the making, for [`PolicyBuilder::login`](super::PolicyBuilder::login).
#[derive(Debug, Clone, Default)]
#[must_use = "login protection does nothing until it is added to a policy"]
pub struct LoginBuilder {
    pub(super) file: LoginFile,
}

impl LoginBuilder {
    /// Begins login protection with the defaults.
    pub fn new() -> Self {
        Self::default()
    }

    /// Sets the attempts allowed on one account. Default: `"5/15min"`.
    pub fn account(mut self, limit: impl Into<String>) -> Self {
        self.file.account = Some(text(limit));
        self
    }

    /// Sets the attempts allowed from one address. Default: `"20/5min"`.
    pub fn ip(mut self, limit: impl Into<String>) -> Self {
        self.file.ip = Some(text(limit));
        self
    }

    /// Adds a lock: from so many consecutive failures on, each failure locks the account for this long. The first call
    /// replaces the defaults.
    pub fn lock(mut self, failures: u32, length: impl Into<PeriodText>) -> Self {
        let locks = self.file.locks.get_or_insert_default();
        locks.0.push((text(failures.to_string()), period(length)));
        self
    }

    /// Sets the number of consecutive failures after which unknown devices are refused until a reset. Default: 100.
    pub fn ceiling(mut self, failures: u32) -> Self {
        self.file.ceiling = some(failures);
        self
    }

    /// Sets how to decide when the store fails. Default: [`OnStoreError::Closed`].
    pub fn on_store_error(mut self, on_store_error: OnStoreError) -> Self {
        self.file.on_store_error = name(on_store_error);
        self
    }

    /// Sets the Durable Objects with the records of accounts on Cloudflare, as `BINDING/NAME`. Default: by digest.
    pub fn account_place(mut self, place: impl Into<String>) -> Self {
        self.file.account_place = Some(text(place));
        self
    }

    /// Sets the Durable Objects with the budgets of addresses on Cloudflare, as `BINDING/NAME`. Default: by digest.
    pub fn ip_place(mut self, place: impl Into<String>) -> Self {
        self.file.ip_place = Some(text(place));
        self
    }
}
