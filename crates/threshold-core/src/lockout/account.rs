//! What is known of one account's logins: failures in a row, locks, attempts under way, known devices.

use super::device::{Device, KNOWN_FOR, MAX_DEVICES};
use super::{Attempt, Factor, Login, RESULT_WITHIN, UnknownAttempt};
use crate::balance::Balance;
use crate::codec::{BytesError, Reader, Writer};
use crate::key::{Digest, TraceId};
use crate::limit::{Limit, MAX_LOG, Mark};
use crate::time::{Span, Timestamp};

/// The version of the bytes below.
const VERSION: u8 = 1;
/// The most counters of one account: a few factors for unknown devices, and for each known one.
const MAX_TRACKS: usize = 64;
/// The factors with counters of their own; any further ones share the last. Their names are the host's, not the caller's.
const MAX_FACTORS: usize = 4;
/// Failures below the ceiling are forgotten this long after the last one. Without an end, every name ever guessed would
/// be kept for good.
const FORGOTTEN_AFTER: Span = Span::from_secs(30 * 86_400);

/// The stored state of one account.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Account {
    /// Counts resets: device tokens of an older credential are no longer known.
    credential: u32,
    devices: Vec<(u64, Timestamp)>,
    tracks: Vec<Track>,
}

/// The counters of one factor and one device; device 0 is every device that is not known.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Track {
    factor: Factor,
    device: u64,
    failures: u32,
    locked_until: Timestamp,
    /// When the last failure was.
    last: Timestamp,
    /// Attempts under way, the oldest first.
    in_flight: Vec<(TraceId, Timestamp)>,
    budget: Balance,
}

impl Track {
    fn new(factor: Factor, device: u64) -> Self {
        Self {
            factor,
            device,
            failures: 0,
            locked_until: Timestamp::EPOCH,
            last: Timestamp::EPOCH,
            in_flight: Vec::new(),
            budget: Balance::default(),
        }
    }

    fn fail(&mut self, login: &Login, at: Timestamp) {
        self.failures = self.failures.saturating_add(1);
        self.last = self.last.max(at);
        if let Some(span) = login.lock(self.failures) {
            self.locked_until = self.locked_until.max(at.plus(span));
        }
    }

    /// Attempts whose time is up have failed, and old failures are forgotten.
    fn bring(&mut self, login: &Login, now: Timestamp) {
        let late = self.in_flight.partition_point(|(_, at)| at.plus(RESULT_WITHIN) <= now);
        for (_, at) in self.in_flight.drain(..late).collect::<Vec<_>>() {
            self.fail(login, at.plus(RESULT_WITHIN));
        }
        if self.failures < login.ceiling && self.last.plus(FORGOTTEN_AFTER) <= now {
            self.failures = 0;
        }
    }

    /// Until when nothing may be tried, with everything under way counted as failed. `Some(None)` is for good.
    fn locked(&self, login: &Login, now: Timestamp) -> Option<Option<Timestamp>> {
        let flying = u32::try_from(self.in_flight.len()).unwrap_or(u32::MAX);
        let failures = self.failures.saturating_add(flying);
        if self.failures >= login.ceiling {
            return Some(None);
        }
        // Where the next one would pass the ceiling, those under way are waited for.
        let at_ceiling = (failures >= login.ceiling).then_some(RESULT_WITHIN);
        let newest = self.in_flight.last().map(|(_, at)| *at);
        let virtually = newest.and_then(|at| login.lock(failures).max(at_ceiling).map(|span| at.plus(span)));
        let until = self.locked_until.max(virtually.unwrap_or_default());
        (until > now).then_some(Some(until))
    }

    /// The first moment from which this says the same as none.
    fn silent_from(&self, ceiling_reached: bool) -> Timestamp {
        let flying =
            self.in_flight.last().map_or(Timestamp::EPOCH, |(_, at)| at.plus(RESULT_WITHIN).plus(FORGOTTEN_AFTER));
        let counted = match self.failures {
            0 => Timestamp::EPOCH,
            _ if ceiling_reached => Timestamp::MAX,
            _ => self.last.plus(FORGOTTEN_AFTER),
        };
        self.budget.silent_from().max(self.locked_until).max(counted).max(flying)
    }
}

impl Account {
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
        let listed = self.devices.contains(&(device.nonce, device.issued));
        listed && device.nonce != 0 && device.credential == self.credential && now < device.issued.plus(KNOWN_FOR)
    }

    /// The number of a known device, or 0. One that has guessed up to the ceiling is in the wrong hands: it is an unknown
    /// one from now on.
    pub(super) fn recognise(&mut self, login: &Login, device: &Device, now: Timestamp) -> u64 {
        if !self.knows(device, now) {
            return 0;
        }
        let own = self.tracks.iter_mut().filter(|track| track.device == device.nonce);
        let worn_out = own.fold(false, |worn_out, track| {
            track.bring(login, now);
            worn_out || track.failures >= login.ceiling
        });
        if worn_out {
            self.devices.retain(|(nonce, _)| *nonce != device.nonce);
            self.tracks.retain(|track| track.device != device.nonce);
            return 0;
        }
        device.nonce
    }

    /// The failures in a row of unknown devices, the most of any factor.
    #[must_use]
    pub fn failures(&self) -> u32 {
        self.tracks.iter().filter(|track| track.device == 0).map(|track| track.failures).max().unwrap_or(0)
    }

    /// Until when unknown devices are locked at `now`; `Timestamp::MAX` at the ceiling.
    #[must_use]
    pub fn locked_until(&self, login: &Login, now: Timestamp) -> Option<Timestamp> {
        let unknown = self.tracks.iter().filter(|track| track.device == 0);
        unknown.filter_map(|track| track.locked(login, now)).map(|until| until.unwrap_or(Timestamp::MAX)).max()
    }

    /// The first moment from which this account says the same as none. A ceiling stays until it is lifted.
    #[must_use]
    pub fn silent_from(&self, login: &Login) -> Timestamp {
        let tracks = self.tracks.iter().map(|track| track.silent_from(track.failures >= login.ceiling)).max();
        let devices = self.devices.iter().map(|(_, issued)| issued.plus(KNOWN_FOR)).max();
        // A reset must be remembered for as long as a token of the credential before it could still be shown.
        let reset = if self.credential > 0 { Timestamp::MAX } else { Timestamp::EPOCH };
        tracks.unwrap_or_default().max(devices.unwrap_or_default()).max(reset)
    }

    /// After a reset of the secret: nothing is locked, and devices must log in anew.
    pub fn reset(&mut self) {
        self.credential = self.credential.saturating_add(1);
        self.devices.clear();
        self.tracks.clear();
    }

    /// An operator's pardon: nothing is locked, and known devices stay known.
    pub fn lift(&mut self) {
        self.tracks.clear();
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
        let budget = Limit::Log(login.account);
        let track = self.track(factor, device);
        track.bring(login, now);
        if let Some(until) = track.locked(login, now) {
            return Err(until);
        }
        let (look, _) = track.budget.look(&budget, 1, now);
        if !look.fits {
            return Err(Some(look.ready_at));
        }
        track.budget.charge(&budget, 1, now, id);
        track.in_flight.push((id, now));
        Ok(())
    }

    /// Ends an attempt. Returns until when its kind of device is locked now.
    pub(super) fn end(
        &mut self,
        login: &Login,
        attempt: &Attempt,
        success: bool,
        now: Timestamp,
    ) -> Result<Option<Timestamp>, UnknownAttempt> {
        let own = |track: &&mut Track| {
            track.device == attempt.device && track.in_flight.iter().any(|(id, _)| *id == attempt.id)
        };
        let track = self.tracks.iter_mut().find(own).ok_or(UnknownAttempt)?;
        track.bring(login, now);
        let at = track.in_flight.iter().position(|(id, _)| *id == attempt.id).ok_or(UnknownAttempt)?;
        track.in_flight.remove(at);
        if success {
            track.failures = 0;
            track.locked_until = Timestamp::EPOCH;
            track.budget.give_back(Mark { part: attempt.at, amount: 1 }, now, attempt.id);
            return Ok(None);
        }
        track.fail(login, now);
        Ok(track.locked(login, now).map(|until| until.unwrap_or(Timestamp::MAX)))
    }

    /// Makes the device that has just logged in a known one, in place of what it was before.
    pub(super) fn welcome(&mut self, account: Digest, before: u64, nonce: TraceId, now: Timestamp) -> Device {
        self.devices.retain(|(known, issued)| *known != before && now < issued.plus(KNOWN_FOR));
        let nonce = u64::try_from(nonce.to_u128() >> 64).unwrap_or(1).max(1);
        if self.devices.len() >= MAX_DEVICES {
            self.devices.remove(0);
        }
        self.devices.push((nonce, now));
        let devices = &self.devices;
        self.tracks.retain(|track| track.device == 0 || devices.iter().any(|(known, _)| *known == track.device));
        Device { account, nonce, issued: now, credential: self.credential }
    }

    fn track(&mut self, factor: Factor, device: u64) -> &mut Track {
        let mut own = self.tracks.iter().filter(|track| track.device == device);
        let factors = own.clone().count();
        let factor = match own.clone().find(|track| track.factor == factor) {
            None if factors >= MAX_FACTORS => own.next_back().map_or(factor, |track| track.factor),
            _ => factor,
        };
        if let Some(at) = self.tracks.iter().position(|track| track.device == device && track.factor == factor) {
            return self.tracks.get_mut(at).expect("the position was just found");
        }
        if self.tracks.len() >= MAX_TRACKS {
            // Cannot be reached while devices and factors are bounded; if it is, known devices give way first.
            self.tracks.retain(|track| track.device == 0);
        }
        self.tracks.push(Track::new(factor, device));
        self.tracks.last_mut().expect("a track was just pushed")
    }

    /// The bytes a store keeps.
    #[must_use]
    pub fn to_bytes(&self) -> Vec<u8> {
        let mut out = Writer::new(VERSION);
        out.number(u64::from(self.credential));
        out.number(self.devices.len() as u64);
        for (nonce, issued) in &self.devices {
            out.number(*nonce);
            out.number(issued.micros());
        }
        out.number(self.tracks.len() as u64);
        for track in &self.tracks {
            out.number(u64::from(track.factor.0));
            out.number(track.device);
            out.number(u64::from(track.failures));
            out.number(track.locked_until.micros());
            out.number(track.last.micros());
            out.number(track.in_flight.len() as u64);
            for (id, at) in &track.in_flight {
                out.wide(id.to_u128());
                out.number(at.micros());
            }
            track.budget.write(&mut out);
        }
        out.finish()
    }

    /// Reads what [`to_bytes`](Self::to_bytes) wrote.
    ///
    /// # Errors
    /// On another version, and on bytes no account has.
    pub fn from_bytes(bytes: &[u8]) -> Result<Self, BytesError> {
        const WRONG: BytesError = BytesError::Malformed("account");
        let mut from = Reader::new(bytes, VERSION)?;
        let mut account = Self { credential: u32::try_from(from.number()?).map_err(|_| WRONG)?, ..Self::default() };
        for _ in 0..from.count(MAX_DEVICES)? {
            account.devices.push((from.number()?, Timestamp::from_micros(from.number()?)));
        }
        for _ in 0..from.count(MAX_TRACKS)? {
            account.tracks.push(read_track(&mut from)?);
        }
        from.finish()?;
        Ok(account)
    }
}

fn read_track(from: &mut Reader<'_>) -> Result<Track, BytesError> {
    const WRONG: BytesError = BytesError::Malformed("account");
    let most = usize::from(MAX_LOG);
    let factor = Factor(u32::try_from(from.number()?).map_err(|_| WRONG)?);
    let mut track = Track::new(factor, from.number()?);
    track.failures = u32::try_from(from.number()?).map_err(|_| WRONG)?;
    track.locked_until = Timestamp::from_micros(from.number()?);
    track.last = Timestamp::from_micros(from.number()?);
    for _ in 0..from.count(most)? {
        let flying = (TraceId::from_u128(from.wide()?), Timestamp::from_micros(from.number()?));
        track.in_flight.push(flying);
    }
    track.budget = Balance::read(from)?;
    Ok(track)
}
