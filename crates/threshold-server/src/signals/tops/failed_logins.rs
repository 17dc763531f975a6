//! Logins that failed or were refused, by address and by account, in bounded memory.
//!
//! Wrong passwords below every limit stop nobody and are no events. An operator finds here the address that tries many accounts, and the
//! account that many addresses try.

use std::sync::Arc;

use threshold_core::Timestamp;

use super::ring::Ring;
use super::space_saving::SpaceSaving;
use super::{COUNTERS, Period, TopFailedAccount, TopFailedIp, merged};

/// Counts failed logins. Its names take as much memory as two kinds of names of [`Tops`](super::Tops): less than 6 MiB.
#[derive(Debug)]
pub(crate) struct FailedLogins {
    /// In the order of [`Period::ALL`].
    rings: [Ring<Failures>; 3],
}

#[derive(Debug)]
struct Failures {
    ips: SpaceSaving,
    accounts: SpaceSaving,
}

impl Default for FailedLogins {
    fn default() -> Self {
        Self { rings: Period::ALL.map(Ring::new) }
    }
}

impl Default for Failures {
    fn default() -> Self {
        Self { ips: SpaceSaving::new(COUNTERS), accounts: SpaceSaving::new(COUNTERS) }
    }
}

impl FailedLogins {
    /// Counts a failed login, whose names are those that statistics show.
    pub(crate) fn add(&mut self, ip: Option<&str>, account: Option<&str>, now: Timestamp) {
        let [ip, account] = [ip, account].map(|name| name.map(Arc::<str>::from));
        for failures in self.rings.iter_mut().filter_map(|ring| ring.at(now, now)) {
            ip.iter().for_each(|ip| failures.ips.add(ip, 1));
            account.iter().for_each(|account| failures.accounts.add(account, 1));
        }
    }

    /// Returns the addresses and the accounts with the most failures in the last period.
    pub(crate) fn top(&self, period: Period, now: Timestamp) -> (Vec<TopFailedIp>, Vec<TopFailedAccount>) {
        let ring = self.rings.iter().find(|ring| ring.period == period);
        let steps: Vec<&Failures> = ring.map(|ring| ring.last(now).collect()).unwrap_or_default();
        let ips = merged(steps.iter().map(|failures| &failures.ips));
        let accounts = merged(steps.iter().map(|failures| &failures.accounts));
        (ips.into_iter().map(Into::into).collect(), accounts.into_iter().map(Into::into).collect())
    }

    /// Removes the addresses with these names, as statistics show them.
    pub(crate) fn forget_ips(&mut self, names: &[String]) {
        for failures in self.rings.iter_mut().flat_map(Ring::all_mut) {
            names.iter().for_each(|name| failures.ips.forget(name));
        }
    }

    /// Removes the accounts for whose name this does not hold, as statistics show it.
    pub(crate) fn retain_accounts(&mut self, stays: impl Fn(&str) -> bool) {
        for failures in self.rings.iter_mut().flat_map(Ring::all_mut) {
            let erased: Vec<_> =
                failures.accounts.counters().map(|(name, _)| name).filter(|name| !stays(name)).cloned().collect();
            erased.iter().for_each(|name| failures.accounts.forget(name));
        }
    }
}

#[cfg(test)]
mod tests {
    use threshold_core::Span;

    use super::*;

    const NOW: Timestamp = Timestamp::from_secs(1_767_225_600);

    /// Woken by leaving out either `add`, and by a `SpaceSaving` that keeps each name.
    #[test]
    fn the_busiest_address_is_found_among_many_in_bounded_memory() {
        let mut logins = FailedLogins::default();
        for number in 0..10_000_u32 {
            let once = number.to_string();
            logins.add(Some(&once), Some("ada"), NOW);
            if number % 20 == 0 {
                logins.add(Some("busy"), Some(&once), NOW);
            }
        }
        for period in Period::ALL {
            let (ips, accounts) = logins.top(period, NOW);
            assert_eq!((ips.len(), accounts.len()), (10, 10));
            assert_eq!((&*ips[0].ip, &*accounts[0].account), ("busy", "ada"));
            assert!(ips[0].failures + ips[0].error >= 500 && accounts[0].failures == 10_000, "{ips:?}");
        }
        let all = logins.rings.iter().flat_map(Ring::all);
        assert!(all.map(|failures| failures.ips.counters().count()).all(|counters| counters <= COUNTERS));
        logins.forget_ips(&["busy".to_owned()]);
        logins.retain_accounts(|name| name != "ada");
        let (ips, accounts) = logins.top(Period::Day, NOW);
        assert!(ips.iter().all(|top| &*top.ip != "busy") && accounts.iter().all(|top| &*top.account != "ada"));
        let later = NOW.plus(Span::DAY).plus(Span::HOUR);
        assert_eq!(logins.top(Period::Day, later), (Vec::new(), Vec::new()));
    }
}
