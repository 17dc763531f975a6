//! Alerts: when a count of events is high enough to tell an operator, and when that is over.
//!
//! A host counts events, and tells each count to [`Alert::judge`]. An episode begins when the count reaches the warning threshold and
//! ends when it falls below. The operator hears of its beginning, of its rise to critical, and of its end, once each.

use std::collections::VecDeque;

use serde_json::json;

use crate::policy::{Alert, AlertOn};
use crate::time::{Span, Timestamp};

/// How urgent an alert is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum AlertLevel {
    /// Somebody should look.
    Warning,
    /// Somebody must look now.
    Critical,
}

impl AlertLevel {
    /// Returns the name.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Warning => "warning",
            Self::Critical => "critical",
        }
    }

    /// Returns the level with this name.
    #[must_use]
    pub fn named(name: &str) -> Option<Self> {
        [Self::Warning, Self::Critical].into_iter().find(|level| level.name() == name)
    }
}

impl AlertOn {
    /// All events that alerts count.
    pub const ALL: [Self; 4] = [Self::EdgeBlocks, Self::TenantBlocks, Self::UserBans, Self::IpBlocks];

    /// Returns the name, as a policy writes it.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::EdgeBlocks => "edge_blocks",
            Self::TenantBlocks => "tenant_blocks",
            Self::UserBans => "user_bans",
            Self::IpBlocks => "ip_blocks",
        }
    }

    /// Returns the thresholds that suit most, for a policy without own ones.
    #[must_use]
    pub const fn usual(self) -> Alert {
        let (per, warning, critical) = match self {
            Self::EdgeBlocks => (Span::MINUTE, 100, 1_000),
            Self::TenantBlocks => (Span::MINUTE, 50, 200),
            Self::UserBans => (Span::HOUR, 10, 50),
            Self::IpBlocks => (Span::MINUTE, 20, 100),
        };
        Alert { per, warning, critical }
    }
}

/// The time in which an alert stays raised.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Episode {
    /// The highest level so far.
    pub level: AlertLevel,
    /// When it began.
    pub since: Timestamp,
}

/// What an operator is told.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum AlertChange {
    /// The alert has reached this level.
    Raised(AlertLevel),
    /// The episode is over. It had reached this level.
    Resolved(AlertLevel),
}

impl Alert {
    /// Returns the level of a count; `None` if it is below both thresholds.
    #[must_use]
    pub const fn level(&self, count: u64) -> Option<AlertLevel> {
        if count >= self.critical {
            Some(AlertLevel::Critical)
        } else if count >= self.warning {
            Some(AlertLevel::Warning)
        } else {
            None
        }
    }

    /// Returns the episode after this count, and what an operator is told of the change.
    #[must_use]
    pub fn judge(&self, before: Option<Episode>, count: u64, now: Timestamp) -> (Option<Episode>, Option<AlertChange>) {
        match (before, self.level(count)) {
            (None, None) => (None, None),
            (None, Some(level)) => (Some(Episode { level, since: now }), Some(AlertChange::Raised(level))),
            (Some(before), None) => (None, Some(AlertChange::Resolved(before.level))),
            (Some(before), Some(level)) if level > before.level => {
                (Some(Episode { level, ..before }), Some(AlertChange::Raised(level)))
            }
            // From critical back to warning nothing is told, or a count around the threshold would tell it each time.
            (Some(before), Some(_)) => (Some(before), None),
        }
    }

    /// Returns the largest count in any time of [`per`](Alert::per), beginning included and end not. The counts are in order of time.
    #[must_use]
    pub fn peak(&self, counts: impl IntoIterator<Item = (Timestamp, u64)>) -> u64 {
        let (mut window, mut sum, mut peak) = (VecDeque::new(), 0_u64, 0);
        for (at, count) in counts {
            window.push_back((at, count));
            sum = sum.saturating_add(count);
            while let Some((first, gone)) = window.front().copied()
                && at.since(first) >= self.per
            {
                sum = sum.saturating_sub(gone);
                window.pop_front();
            }
            peak = sum.max(peak);
        }
        peak
    }
}

/// What is told about an alert, to a log or a webhook.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct AlertNotice<'a> {
    /// The event that it counts.
    pub on: AlertOn,
    /// Its thresholds.
    pub alert: Alert,
    /// The address, for alerts on one address.
    pub key: Option<&'a str>,
    /// What has changed.
    pub change: AlertChange,
    /// The count.
    pub count: u64,
    /// When the episode began.
    pub since: Timestamp,
    /// When this was noticed.
    pub at: Timestamp,
}

impl AlertNotice<'_> {
    /// Writes the notice as JSON, on one line. Characters that terminals interpret are escaped.
    #[must_use]
    pub fn to_json(&self) -> String {
        let (state, level) = match self.change {
            AlertChange::Raised(level) => ("raised", level),
            AlertChange::Resolved(level) => ("resolved", level),
        };
        let threshold = match level {
            AlertLevel::Warning => self.alert.warning,
            AlertLevel::Critical => self.alert.critical,
        };
        let millis = |at: Timestamp| at.micros().checked_div(1_000);
        let value = json!({
            "event": "alert",
            "alert": self.on.name(),
            "state": state,
            "level": level.name(),
            "key": self.key,
            "count": self.count,
            "threshold": threshold,
            "periodSec": self.alert.per.secs_ceil(),
            "since": millis(self.since),
            "at": millis(self.at),
        });
        crate::text::printable(&value.to_string()).into_owned()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const ALERT: Alert = Alert { per: Span::MINUTE, warning: 20, critical: 100 };

    fn at(second: u64) -> Timestamp {
        Timestamp::from_secs(1_767_225_600).plus(Span::from_secs(second))
    }

    #[test]
    fn an_episode_is_told_once_at_each_level_and_at_its_end() {
        use AlertChange::{Raised, Resolved};
        use AlertLevel::{Critical, Warning};
        let counts = [19, 20, 99, 100, 50, 100, 19, 0, 100, 0];
        let mut episode = None;
        let judged = (0..).zip(counts).map(|(second, count)| {
            let (next, change) = ALERT.judge(episode, count, at(second));
            episode = next;
            change
        });
        let told: Vec<_> = judged.collect();
        let expect = [
            None,
            Some(Raised(Warning)),
            None,
            Some(Raised(Critical)),
            None,
            None,
            Some(Resolved(Critical)),
            None,
            Some(Raised(Critical)),
            Some(Resolved(Critical)),
        ];
        assert_eq!(told, expect);
        let (rise, _) = ALERT.judge(Some(Episode { level: Warning, since: at(1) }), 100, at(3));
        assert_eq!(rise, Some(Episode { level: Critical, since: at(1) }));
    }

    #[test]
    fn an_alert_is_raised_at_its_threshold() {
        let usual = AlertOn::ALL.map(|on| (on.usual().per.secs_ceil(), on.usual().warning, on.usual().critical));
        assert_eq!(usual, [(60, 100, 1_000), (60, 50, 200), (3_600, 10, 50), (60, 20, 100)]);
        assert_eq!(
            [19, 20, 99, 100].map(|count| ALERT.level(count)),
            [None, Some(AlertLevel::Warning), Some(AlertLevel::Warning), Some(AlertLevel::Critical)]
        );
    }

    #[test]
    fn a_notice_is_one_line_of_json() {
        let notice = AlertNotice {
            on: AlertOn::IpBlocks,
            alert: ALERT,
            key: Some("203.0.113.7\u{1b}"),
            change: AlertChange::Raised(AlertLevel::Critical),
            count: 101,
            since: at(0),
            at: at(60),
        };
        assert_eq!(
            notice.to_json(),
            r#"{"event":"alert","alert":"ip_blocks","state":"raised","level":"critical","key":"203.0.113.7\u001b","#
                .to_owned()
                + r#""count":101,"threshold":100,"periodSec":60,"since":1767225600000,"at":1767225660000}"#
        );
    }

    proptest! {
        /// Woken by `>` in place of `>=` in `peak`.
        #[test]
        fn the_peak_is_the_largest_sum_of_any_period(mut counts in proptest::collection::vec((0..200_u64, 0..50_u64), 0..40)) {
            counts.sort_unstable();
            let sum = |begin: u64| -> u64 {
                counts.iter().filter(|(second, _)| (begin..begin.saturating_add(60)).contains(second)).map(|(_, count)| *count).sum()
            };
            let expect = (0..200).map(sum).max().unwrap_or(0);
            prop_assert_eq!(ALERT.peak(counts.iter().map(|(second, count)| (at(*second), *count))), expect);
        }

        /// No level is told twice within an episode, and nothing is told of what did not begin.
        #[test]
        fn notices_begin_rise_and_end_in_order(counts in proptest::collection::vec(0..130_u64, 0..50)) {
            let mut episode = None;
            let mut heard: Option<AlertLevel> = None;
            for (second, count) in (0..).zip(counts) {
                let (next, change) = ALERT.judge(episode, count, at(second));
                match change {
                    Some(AlertChange::Raised(level)) => {
                        prop_assert!(heard < Some(level));
                        heard = Some(level);
                    }
                    Some(AlertChange::Resolved(level)) => {
                        prop_assert_eq!(heard.take(), Some(level));
                        prop_assert!(count < ALERT.warning);
                    }
                    None => {}
                }
                prop_assert_eq!(next.map(|episode| episode.level), heard);
                prop_assert_eq!(next.is_some(), count >= ALERT.warning);
                episode = next;
            }
        }
    }
}
