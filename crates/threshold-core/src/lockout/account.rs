//! The login state of one account: consecutive failures, locks, attempts under way, known devices.

use super::device::{Device, MAX_DEVICES};
use super::known::{KnownDevice, nonce_of};
use super::track::Track;
use super::{Attempt, Factor, Login, UnknownAttempt};
use crate::balance::Balance;
use crate::codec::{BytesError, Format, Reader, Versions, Writer, from_bytes, to_bytes};
use crate::key::TraceId;
use crate::limit::{Limit, Mark};
use crate::time::Timestamp;

/// The largest number of counters of one account: a few factors for unknown devices and for each known one, and those of
/// devices that were forgotten while an attempt of theirs was under way.
const MAX_TRACKS: usize = 64;
/// How many factors of one device have counters of their own. Further ones share the last. The application names factors, not
/// the client, so honest use stays far below.
const MAX_FACTORS: usize = 4;

/// The stored state of one account.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Account {
    /// The number of resets. Device tokens of an older credential are no longer valid.
    credential: u32,
    /// Known devices; the one that logged in last is the last.
    devices: Vec<KnownDevice>,
    tracks: Vec<Track>,
}

impl Account {
    /// The versions of its bytes that are read.
    pub(crate) const VERSIONS: Versions = Versions::FIRST.containing(Balance::VERSIONS);

    /// Makes an account that is locked until `until` for every device and knows nothing else, for a journal record that cannot be
    /// read: its account may have been locked.
    #[must_use]
    pub fn locked(factor: Factor, until: Timestamp) -> Self {
        let mut account = Self::default();
        // Device 0 only: no device is known to this account, so every device is an unknown one.
        account.track(factor, 0).locked_until = until;
        account
    }

    /// Returns whether a device token belongs to this account and its current credential, and has not expired.
    #[must_use]
    pub fn knows(&self, device: &Device, now: Timestamp) -> bool {
        self.device_of(device, now).is_some()
    }

    /// Returns whether an attempt with this token is counted by its device, and so not by its address.
    pub(crate) fn recognises(&self, login: &Login, device: &Device, now: Timestamp) -> bool {
        // On a copy: recognising a device ends its older tokens, which only an attempt may do.
        self.knows(device, now) && self.clone().recognise(login, device, now) != 0
    }

    /// Returns when the last device token expires; `None` where no device is known.
    #[must_use]
    pub fn devices_known_until(&self) -> Option<Timestamp> {
        self.devices.iter().map(KnownDevice::known_until).max()
    }

    /// Returns the id of a known device, or 0, and ends its tokens that were issued before this one. A device that has failed up
    /// to the ceiling is in the wrong hands, and is unknown from now on.
    pub(super) fn recognise(&mut self, login: &Login, device: &Device, now: Timestamp) -> u64 {
        let Some(at) = self.device_of(device, now) else { return 0 };
        // The use of a token proves that the device has it. Only then its older tokens end.
        let Some(known) = self.devices.get_mut(at) else { return 0 };
        known.show(device);
        let id = known.id;
        let own = self.tracks.iter_mut().filter(|track| track.device == id);
        let at_ceiling = own.fold(false, |at_ceiling, track| {
            track.bring(login, now);
            at_ceiling || track.failures >= login.ceiling
        });
        // A known device is not counted by its address, so one in the wrong hands could go on guessing for ever.
        if at_ceiling {
            self.devices.remove(at);
            self.drop_idle_tracks();
            return 0;
        }
        let has_track = self.tracks.iter().any(|track| track.device == id);
        // All counters are in use by attempts under way. Without counters of its own, it is counted as an unknown device.
        if has_track || self.tracks.len() < MAX_TRACKS { id } else { 0 }
    }

    /// Returns the consecutive failures of unknown devices, for the factor with the most.
    #[must_use]
    pub fn failures(&self, now: Timestamp) -> u32 {
        let unknown = self.tracks.iter().filter(|track| track.device == 0);
        unknown.map(|track| track.failures_at(now)).max().unwrap_or(0)
    }

    /// Returns until when unknown devices are refused, by a lock or by the account's budget; [`Timestamp::MAX`] at the ceiling,
    /// `None` where they are not refused at `now`.
    #[must_use]
    pub fn locked_until(&self, login: &Login, now: Timestamp) -> Option<Timestamp> {
        let unknown = self.tracks.iter().filter(|track| track.device == 0);
        unknown.filter_map(|track| track.locked(login, now)).max()
    }

    /// Returns whether any attempt waits for its result at `now`.
    #[must_use]
    pub fn is_under_way(&self, now: Timestamp) -> bool {
        self.tracks.iter().any(|track| track.is_under_way(now))
    }

    /// Returns the time from which this account decides the same as an empty one. At the ceiling there is none until it is
    /// lifted.
    #[must_use]
    pub fn silent_from(&self, login: &Login) -> Timestamp {
        let tracks = self.tracks.iter().map(|track| track.silent_from(track.failures >= login.ceiling)).max();
        // A reset is never forgotten: an account without it would accept the device tokens of the old credential again.
        let reset = if self.credential > 0 { Timestamp::MAX } else { Timestamp::EPOCH };
        tracks.unwrap_or_default().max(self.devices_known_until().unwrap_or_default()).max(reset)
    }

    /// Unlocks the account after a reset of its secret, and forgets all devices, which have to log in again. Attempts under way
    /// tried the old secret and are forgotten too.
    pub fn reset(&mut self) {
        // Without this a stolen device token would survive the reset of the password.
        self.credential = self.credential.saturating_add(1);
        self.devices.clear();
        self.tracks.clear();
    }

    /// Unlocks the account for an operator. Known devices stay known. Attempts under way may still succeed, and do not count as
    /// failures if they do not.
    pub fn lift(&mut self) {
        self.tracks.iter_mut().for_each(Track::lift);
        // A track without attempts is empty after the lift, and an empty one says the same as none.
        self.tracks.retain(|track| !track.under_way.is_empty());
    }

    /// Counts an attempt.
    ///
    /// # Errors
    /// Returns until when the account is locked; `None` at the ceiling.
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
        // `locked` decides, because it also counts attempts under way.
        track.budget.bring(&budget, now);
        if let Some(until) = track.locked(login, now) {
            return Err(until.unless_never());
        }
        track.budget.charge(&budget, 1, now, id);
        // Charged and begun before the secret is checked, so that parallel guesses see each other.
        track.begin(id, now);
        Ok(())
    }

    /// Ends an attempt. Returns until when its kind of device is locked now; [`Timestamp::MAX`] at the ceiling.
    pub(super) fn end(
        &mut self,
        login: &Login,
        attempt: &Attempt,
        success: bool,
        now: Timestamp,
    ) -> Result<Option<Timestamp>, UnknownAttempt> {
        // Found by id and not by factor: a factor without counters of its own shares those of another.
        let own = |track: &&mut Track| track.device == attempt.device && track.has(attempt.id);
        let track = self.tracks.iter_mut().find(own).ok_or(UnknownAttempt)?;
        track.bring(login, now);
        let counted = track.end(attempt.id).ok_or(UnknownAttempt)?;
        let locked = match (success, counted) {
            // A success ends the series of consecutive failures, also one whose attempt began before a lift.
            (true, _) => {
                track.forget_failures();
                None
            }
            (false, true) => {
                track.fail(login, now);
                track.locked(login, now)
            }
            // An operator lifted the locks after this attempt began, and with them what it would have counted as.
            (false, false) => track.locked(login, now),
        };
        // If an operator lifted the locks meanwhile, the budget was cleared. Its present charges are those of other attempts.
        if success && counted {
            track.budget.give_back(Mark::new(attempt.at, 1), now, attempt.id);
        }
        self.drop_idle_tracks();
        Ok(locked)
    }

    /// Removes an attempt under way as if it had not been made. Returns whether it was under way.
    pub(crate) fn withdraw(&mut self, login: &Login, attempt: &Attempt, now: Timestamp) -> bool {
        let own = |track: &&mut Track| track.device == attempt.device && track.has(attempt.id);
        let Some(track) = self.tracks.iter_mut().find(own) else { return false };
        track.bring(login, now);
        // It has timed out, and is a failure.
        let Some(counted) = track.end(attempt.id) else { return false };
        // If an operator lifted the locks meanwhile, the budget was cleared, as in `end`.
        if counted {
            track.budget.give_back(Mark::new(attempt.at, 1), now, attempt.id);
        }
        self.drop_idle_tracks();
        true
    }

    /// Makes the device that has just logged in a known one, and returns its new token. The older tokens of a known device stay
    /// valid until the new one is used: the answer with the new one may be lost, or another tab may be logging in with an old
    /// one.
    pub fn remember_device(&mut self, attempt: &Attempt, nonce: TraceId, now: Timestamp) -> Option<Device> {
        let account = attempt.account?;
        let nonce = nonce_of(nonce);
        // First, so that a device whose tokens have expired does not take the place of one that is known.
        self.devices.retain_mut(|known| known.drop_expired(now));
        // A device that logs in again moves to the end, which makes the first one the one to replace.
        let own = self.devices.iter().position(|known| attempt.device != 0 && known.id == attempt.device);
        let mut known = match own {
            Some(at) => self.devices.remove(at),
            None => KnownDevice::new(nonce),
        };
        known.issue(nonce, now);
        if self.devices.len() >= MAX_DEVICES {
            // The first one logged in longest ago.
            self.devices.remove(0);
        }
        self.devices.push(known);
        self.drop_idle_tracks();
        // The credential is in the token, so that a reset ends all tokens without a list of them.
        Some(Device { account, nonce, issued: now, credential: self.credential })
    }

    /// Returns the index of the device that a token belongs to.
    fn device_of(&self, device: &Device, now: Timestamp) -> Option<usize> {
        let current = device.nonce != 0 && device.credential == self.credential;
        self.devices.iter().position(|known| current && known.has(device, now))
    }

    /// Drops the counters of devices that are no longer known, unless an attempt of theirs is under way.
    fn drop_idle_tracks(&mut self) {
        let devices = &self.devices;
        let is_known = |device: u64| device == 0 || devices.iter().any(|known| known.id == device);
        self.tracks.retain(|track| is_known(track.device) || !track.under_way.is_empty());
    }

    /// Returns the counters of a factor on a device, and adds them where they are new. Without room, the factor shares the
    /// counters of another one on the same device.
    fn track(&mut self, factor: Factor, device: u64) -> &mut Track {
        let mut own = self.tracks.iter().filter(|track| track.device == device);
        let factors = own.clone().count();
        let full = self.tracks.len() >= MAX_TRACKS;
        let factor = match own.clone().find(|track| track.factor == factor) {
            // The last and not the first: the counters of earlier factors, such as the password, stay their own.
            None if factors >= MAX_FACTORS || full => own.next_back().map_or(factor, |track| track.factor),
            _ => factor,
        };
        if let Some(at) = self.tracks.iter().position(|track| track.device == device && track.factor == factor) {
            return self.tracks.get_mut(at).expect("the position was just found");
        }
        // May be one more than `MAX_TRACKS`, for unknown devices only: `recognise` gives no id to a known device
        // without room, and a second factor of device 0 shares the first one's counters.
        self.tracks.push(Track::new(factor, device));
        self.tracks.last_mut().expect("a track was just pushed")
    }

    /// Returns the stored bytes.
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

    /// Parses what [`to_bytes`](Self::to_bytes) wrote.
    ///
    /// # Errors
    /// Fails on an unknown version and on malformed bytes.
    pub fn from_bytes(bytes: &[u8]) -> Result<Self, BytesError> {
        from_bytes(bytes, Self::VERSIONS, Self::read)
    }

    /// Reads an account from the front of a larger record.
    pub(crate) fn read(from: &mut Reader<'_>) -> Result<Self, BytesError> {
        const WRONG: BytesError = BytesError::Malformed("account");
        let mut account = Self { credential: u32::try_from(from.number()?).map_err(|_| WRONG)?, ..Self::default() };
        for _ in 0..from.count(MAX_DEVICES)? {
            account.devices.push(KnownDevice::read(from)?);
        }
        // One more, as in `track`.
        for _ in 0..from.count(MAX_TRACKS + 1)? {
            account.tracks.push(Track::read(from)?);
        }
        Ok(account)
    }
}
