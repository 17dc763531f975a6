//! Limits and lengths of time that a builder takes, as text or as values.

use std::time::Duration;

use super::{some, text};
use crate::limit::{Limit, LimitOption, Quota, Unit};
use crate::policy::file::{NamedEntries, RuleFile, Text};
use crate::time::Span;

/// The limit of a rule: text as in a policy file, or a [`Limit`] that counts requests.
#[derive(Debug, Clone)]
pub struct LimitText(Source);

#[derive(Debug, Clone)]
enum Source {
    Text(String),
    Limit(Limit),
}

impl From<&str> for LimitText {
    fn from(text: &str) -> Self {
        Self(Source::Text(text.to_owned()))
    }
}

impl From<String> for LimitText {
    fn from(text: String) -> Self {
        Self(Source::Text(text))
    }
}

impl From<Limit> for LimitText {
    fn from(limit: Limit) -> Self {
        Self(Source::Limit(limit))
    }
}

impl LimitText {
    /// Sets `limit` and, for a limit that is a value, every key that decides how it is counted.
    pub(super) fn set(self, file: &mut RuleFile) {
        let limit = match self.0 {
            Source::Text(limit) => {
                file.limit = Some(text(limit));
                return;
            }
            Source::Limit(limit) => limit,
        };
        let (quota, options) = limit.to_parts();
        let algorithm = options.algorithm;
        // An option of another algorithm would be an error in the file.
        let takes = |option| algorithm.is_some_and(|algorithm| algorithm.takes(option));
        file.limit = Some(text(quota.to_string()));
        file.algorithm = algorithm.and_then(super::name);
        file.anchor = super::name(options.anchor).filter(|_| takes(LimitOption::Anchor));
        file.buckets = some(options.buckets).filter(|_| takes(LimitOption::Buckets));
        file.burst = options.burst.and_then(some).filter(|_| takes(LimitOption::Burst));
        file.ttl = Some(super::period(options.ttl)).filter(|_| takes(LimitOption::Ttl));
    }
}

/// A length of time: text as in a policy file (`"15min"`), or a value. A policy counts whole milliseconds.
#[derive(Debug, Clone)]
pub struct PeriodText(pub(super) String);

impl From<&str> for PeriodText {
    fn from(text: &str) -> Self {
        Self(text.to_owned())
    }
}

impl From<String> for PeriodText {
    fn from(text: String) -> Self {
        Self(text)
    }
}

impl From<Span> for PeriodText {
    fn from(period: Span) -> Self {
        // A limit's notation ends with its period.
        let limit = Quota::Per { amount: 1, unit: Unit::Count, period, burst: None }.to_string();
        Self(limit.split_once('/').map_or_else(String::new, |(_, period)| period.to_owned()))
    }
}

/// Rounds up to whole milliseconds.
impl From<Duration> for PeriodText {
    fn from(duration: Duration) -> Self {
        // Milliseconds are the smallest unit of the notation. Rounded up, so that a short period does not become 0.
        let millis = duration.as_nanos().div_ceil(1_000_000);
        Self::from(Span::from_millis(u64::try_from(millis).unwrap_or(u64::MAX)))
    }
}

pub(super) fn named<K: Into<String>, V: Into<String>>(entries: impl IntoIterator<Item = (K, V)>) -> NamedEntries<Text> {
    NamedEntries(entries.into_iter().map(|(key, value)| (text(key), text(value))).collect())
}
