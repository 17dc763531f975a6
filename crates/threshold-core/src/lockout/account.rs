//! What is known of one account's logins: failures in a row, locks, attempts under way, known devices.

use super::device::{Device, MAX_DEVICES};
use super::known::{KnownDevice, nonce_of};
use super::track::Track;
use super::{Attempt, Factor, Login, UnknownAttempt};
use crate::balance::Balance;
use crate::codec::{BytesError, Format, Reader, Versions, Writer, from_bytes, to_bytes};
use crate::key::TraceId;
use crate::limit::{Limit, Mark};
use crate::time::Timestamp;

/// The most counters of one account: a few factors for unknown devices and for each known one, and those of devices that
/// were forgotten while an attempt of theirs was under way.
const MAX_TRACKS: usize = 64;
/// The factors with counters of their own; any further ones share the last. Their names are the host's, not the caller's.
const MAX_FACTORS: usize = 4;

/// The stored state of one account.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Account {
    /// Counts resets: device tokens of an older credential are no longer known.
    credential: u32,
    /// The one that logged in last is the last.
    devices: Vec<KnownDevice>,
    tracks: Vec<Track>,
}

impl Account {
    /// The versions in which it is read.
    pub(crate) const VERSIONS: Versions = Versions::FIRST.containing(Balance::VERSIONS);

    /// An account of which nothing is known but that something was: locked until then for every device.
    #[must_use]
    pub fn locked(factor: Factor, until: Timestamp) -> Self {
        let mut account = Self::default();
        account.track(factor, 0).locked_until = until;
        account
    }

    /// Whether a device token is of this account, of its present credential, and not too old.
    #[must_use]
    pub fn knows(&self, device: &Device, now: Timestamp) -> bool {
        self.device_of(device, now).is_some()
    }

    /// Whether an attempt with this token is counted by its device, and so not by its address.
    pub(crate) fn recognises(&self, login: &Login, device: &Device, now: Timestamp) -> bool {
        self.knows(device, now) && self.clone().recognise(login, device, now) != 0
    }

    /// The last moment at which any device is known; `None` where none is.
    #[must_use]
    pub fn devices_known_until(&self) -> Option<Timestamp> {
        self.devices.iter().map(KnownDevice::known_until).max()
    }

    /// The number of a known device, or 0. Showing a token ends those that were issued before it. A device that has
    /// failed up to the ceiling is in the wrong hands: it is an unknown one from now on.
    pub(super) fn recognise(&mut self, login: &Login, device: &Device, now: Timestamp) -> u64 {
        let Some(at) = self.device_of(device, now) else { return 0 };
        let Some(known) = self.devices.get_mut(at) else { return 0 };
        known.show(device);
        let id = known.id;
        let own = self.tracks.iter_mut().filter(|track| track.device == id);
        let at_ceiling = own.fold(false, |at_ceiling, track| {
            track.bring(login, now);
            at_ceiling || track.failures >= login.ceiling
        });
        if at_ceiling {
            self.devices.remove(at);
            self.drop_idle_tracks();
            return 0;
        }
        let has_track = self.tracks.iter().any(|track| track.device == id);
        // Every track holds attempts under way: without room for counters of its own, it is counted as an unknown device.
        if has_track || self.tracks.len() < MAX_TRACKS { id } else { 0 }
    }

    /// The failures in a row of unknown devices, the most of any factor.
    #[must_use]
    pub fn failures(&self, now: Timestamp) -> u32 {
        let unknown = self.tracks.iter().filter(|track| track.device == 0);
        unknown.map(|track| track.failures_at(now)).max().unwrap_or(0)
    }

    /// Until when unknown devices are kept from trying at `now`, by a lock or by the account's budget; `Timestamp::MAX` at
    /// the ceiling.
    #[must_use]
    pub fn locked_until(&self, login: &Login, now: Timestamp) -> Option<Timestamp> {
        let unknown = self.tracks.iter().filter(|track| track.device == 0);
        unknown.filter_map(|track| track.locked(login, now)).max()
    }

    /// Whether any attempt waits for its result at `now`.
    #[must_use]
    pub fn is_under_way(&self, now: Timestamp) -> bool {
        self.tracks.iter().any(|track| track.is_under_way(now))
    }

    /// The first moment from which this account says the same as none. A ceiling stays until it is lifted.
    #[must_use]
    pub fn silent_from(&self, login: &Login) -> Timestamp {
        let tracks = self.tracks.iter().map(|track| track.silent_from(track.failures >= login.ceiling)).max();
        // A reset must be remembered for as long as a token of the credential before it could still be shown.
        let reset = if self.credential > 0 { Timestamp::MAX } else { Timestamp::EPOCH };
        tracks.unwrap_or_default().max(self.devices_known_until().unwrap_or_default()).max(reset)
    }

    /// After a reset of the secret: nothing is locked, and devices must log in anew. Attempts under way were made with the
    /// old secret, and are forgotten.
    pub fn reset(&mut self) {
        self.credential = self.credential.saturating_add(1);
        self.devices.clear();
        self.tracks.clear();
    }

    /// An operator's pardon: nothing is locked, and known devices stay known. It covers the attempts under way too: they
    /// may still succeed, and count for nothing if they do not.
    pub fn lift(&mut self) {
        self.tracks.iter_mut().for_each(Track::lift);
        self.tracks.retain(|track| !track.under_way.is_empty());
    }

    /// Counts an attempt; refused with the time until which it is locked, `None` being for good.
    pub(super) fn begin(
        &mut self,
        login: &Login,
        factor: Factor,
        device: u64,
        id: TraceId,
        now: Timestamp,
    ) -> Result<(), Option<Timestamp>> {
        let budget = Limit::from(login.account);
        let track = self.track(factor, device);
        track.bring(login, now);
        let _ = track.budget.look(&budget, 1, now);
        if let Some(until) = track.locked(login, now) {
            return Err(until.unless_never());
        }
        track.budget.charge(&budget, 1, now, id);
        track.begin(id, now);
        Ok(())
    }

    /// Ends an attempt. Returns until when its kind of device is locked now; `Timestamp::MAX` at the ceiling.
    pub(super) fn end(
        &mut self,
        login: &Login,
        attempt: &Attempt,
        success: bool,
        now: Timestamp,
    ) -> Result<Option<Timestamp>, UnknownAttempt> {
        let own = |track: &&mut Track| track.device == attempt.device && track.has(attempt.id);
        let track = self.tracks.iter_mut().find(own).ok_or(UnknownAttempt)?;
        track.bring(login, now);
        let counted = track.end(attempt.id).ok_or(UnknownAttempt)?;
        let locked = match (success, counted) {
            (true, _) => {
                track.forget_failures();
                None
            }
            (false, true) => {
                track.fail(login, now);
                track.locked(login, now)
            }
            (false, false) => track.locked(login, now),
        };
        // A pardon has cleared the budget: what is charged there now, other attempts were charged.
        if success && counted {
            track.budget.give_back(Mark::new(attempt.at, 1), now, attempt.id);
        }
        self.drop_idle_tracks();
        Ok(locked)
    }

    /// Makes the device that has just logged in a known one. One that was known gets a further token: those it has stay
    /// good until the new one is shown, since its answer may be lost, or another tab may be logging in with the old one.
    pub fn welcome(&mut self, attempt: &Attempt, nonce: TraceId, now: Timestamp) -> Option<Device> {
        let account = attempt.account?;
        let nonce = nonce_of(nonce);
        self.devices.retain_mut(|known| known.drop_expired(now));
        let own = self.devices.iter().position(|known| attempt.device != 0 && known.id == attempt.device);
        let mut known = match own {
            Some(at) => self.devices.remove(at),
            None => KnownDevice::new(nonce),
        };
        known.issue(nonce, now);
        if self.devices.len() >= MAX_DEVICES {
            self.devices.remove(0);
        }
        self.devices.push(known);
        self.drop_idle_tracks();
        Some(Device { account, nonce, issued: now, credential: self.credential })
    }

    /// Which device a token is of.
    fn device_of(&self, device: &Device, now: Timestamp) -> Option<usize> {
        let current = device.nonce != 0 && device.credential == self.credential;
        self.devices.iter().position(|known| current && known.has(device, now))
    }

    /// Drops the counters of devices that are not known any more, unless an attempt of theirs is under way.
    fn drop_idle_tracks(&mut self) {
        let devices = &self.devices;
        let is_known = |device: u64| device == 0 || devices.iter().any(|known| known.id == device);
        self.tracks.retain(|track| is_known(track.device) || !track.under_way.is_empty());
    }

    fn track(&mut self, factor: Factor, device: u64) -> &mut Track {
        let mut own = self.tracks.iter().filter(|track| track.device == device);
        let factors = own.clone().count();
        let full = self.tracks.len() >= MAX_TRACKS;
        let factor = match own.clone().find(|track| track.factor == factor) {
            None if factors >= MAX_FACTORS || full => own.next_back().map_or(factor, |track| track.factor),
            _ => factor,
        };
        if let Some(at) = self.tracks.iter().position(|track| track.device == device && track.factor == factor) {
            return self.tracks.get_mut(at).expect("the position was just found");
        }
        self.tracks.push(Track::new(factor, device));
        self.tracks.last_mut().expect("a track was just pushed")
    }

    /// The bytes a store keeps.
    #[must_use]
    pub fn to_bytes(&self, format: Format) -> Vec<u8> {
        to_bytes(Self::VERSIONS, format, |out| self.write(out))
    }

    /// Appends this account to a larger record.
    pub(crate) fn write(&self, out: &mut Writer) {
        out.number(u64::from(self.credential));
        out.number(self.devices.len() as u64);
        for known in &self.devices {
            known.write(out);
        }
        out.number(self.tracks.len() as u64);
        for track in &self.tracks {
            track.write(out);
        }
    }

    /// Reads what [`to_bytes`](Self::to_bytes) wrote.
    ///
    /// # Errors
    /// On another version, and on bytes no account has.
    pub fn from_bytes(bytes: &[u8]) -> Result<Self, BytesError> {
        from_bytes(bytes, Self::VERSIONS, Self::read)
    }

    /// Takes an account off the front of a larger record.
    pub(crate) fn read(from: &mut Reader<'_>) -> Result<Self, BytesError> {
        const WRONG: BytesError = BytesError::Malformed("account");
        let mut account = Self { credential: u32::try_from(from.number()?).map_err(|_| WRONG)?, ..Self::default() };
        for _ in 0..from.count(MAX_DEVICES)? {
            account.devices.push(KnownDevice::read(from)?);
        }
        for _ in 0..from.count(MAX_TRACKS + 1)? {
            account.tracks.push(Track::read(from)?);
        }
        Ok(account)
    }
}
