//! Ladders: the graduated response to a subject that keeps exceeding its limits.
//!
//! Each strike takes the subject one rung up. A rung warns, denies, delays or bans. The state of one subject is its
//! [`Standing`].

mod recent;

use crate::bill::Terms;
use crate::codec::{BytesError, Format, Reader, Versions, Writer, from_bytes, to_bytes};
use crate::key::Digest;
use crate::limit::{Limit, NotationError, parse_span};
use crate::policy::Rule;
use crate::time::{Span, Timestamp};
use recent::{MAX_RECENT, Recent, RecentList};

/// A request that comes sooner than this after a denial may have been sent before the client could read the denial, so it
/// does not count as ignoring it.
const IN_FLIGHT: Span = Span::SECOND;
/// The longest wait between two strikes from one rule. Under a daily limit the wait would otherwise be a day, which is also
/// the usual decay, and no subject would ever reach the second rung.
const LONGEST_WAIT: Span = Span::HOUR;

/// The consequences of one strike.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Rung {
    /// Whether the client is warned.
    pub warn: bool,
    /// Whether this request is denied.
    pub deny: bool,
    /// Whether allowed requests are delayed from now on.
    pub shadow: bool,
    /// How long all requests of the subject are denied.
    pub cooldown: Option<Span>,
    /// How long the subject is banned.
    pub ban: Option<Span>,
}

impl Rung {
    /// Returns whether the request that caused the strike is let through.
    #[must_use]
    pub const fn allows(&self) -> bool {
        !self.deny && self.cooldown.is_none() && self.ban.is_none()
    }

    /// Parses terms joined by `+`: `warn`, `deny`, `shadow`, `cooldown D`, `ban D`.
    ///
    /// # Errors
    /// Returns the position of an unknown term, or of a duration that cannot be parsed.
    pub fn parse(text: &str) -> Result<Self, NotationError> {
        let mut rung = Self::default();
        let mut at: usize = 0;
        for term in text.split('+') {
            let start = at.saturating_add(term.len().saturating_sub(term.trim_start().len()));
            let words = term.trim();
            rung.add(words).map_err(|(message, offset)| {
                let from = start.saturating_add(offset);
                let end = start.saturating_add(words.len()).max(from);
                let help = "a rung is \"warn\", \"deny\", \"shadow\", \"cooldown 1min\", \"ban 24h\", or several \
                            joined by +";
                NotationError { at: from..end, message, help: help.to_owned() }
            })?;
            at = at.saturating_add(term.len()).saturating_add(1);
        }
        Ok(rung)
    }

    fn add(&mut self, term: &str) -> Result<(), (String, usize)> {
        let (word, rest) = term.split_once(char::is_whitespace).unwrap_or((term, ""));
        let length = || {
            let offset = term.len().saturating_sub(rest.trim_start().len());
            if rest.trim().is_empty() {
                return Err((format!("\"{word}\" needs a length of time"), 0));
            }
            parse_span(rest.trim()).map_err(|error| (error.message, offset))
        };
        match word {
            // A length here was meant for another term. Dropping it would leave a milder rung than the policy says.
            "warn" | "deny" | "shadow" if !rest.trim().is_empty() => {
                return Err((format!("nothing may follow \"{word}\""), 0));
            }
            "warn" => self.warn = true,
            "deny" => self.deny = true,
            "shadow" => self.shadow = true,
            "cooldown" => self.cooldown = Some(length()?),
            "ban" => self.ban = Some(length()?),
            other => return Err((format!("unknown term \"{other}\""), 0)),
        }
        Ok(())
    }
}

/// The rungs that a subject climbs, one for each strike, and how long strikes are remembered.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Ladder {
    /// How long after the last strike all of them are forgotten together.
    pub decay: Span,
    /// Never empty. Strikes beyond the last rung repeat it.
    pub rungs: Vec<Rung>,
    /// A cookie that is set with each warning.
    pub warning_cookie: Option<Box<str>>,
}

impl Ladder {
    /// Returns a built-in ladder; a policy needs no table for it.
    #[must_use]
    pub fn built_in(name: &str) -> Option<Self> {
        const MIN: Option<Span> = Some(Span::MINUTE);
        const FIVE: Option<Span> = Some(Span::from_secs(300));
        const DAY: Option<Span> = Some(Span::DAY);
        const NONE: Rung = Rung { warn: false, deny: false, shadow: false, cooldown: None, ban: None };
        let warn = Rung { warn: true, ..NONE };
        let deny = Rung { deny: true, ..NONE };
        let rungs = match name {
            "graduated" => vec![
                warn,
                warn,
                Rung { cooldown: MIN, ..NONE },
                Rung { cooldown: FIVE, shadow: true, ..NONE },
                Rung { ban: DAY, ..NONE },
            ],
            "strict" => vec![
                Rung { warn: true, ..deny },
                Rung { warn: true, ..deny },
                Rung { shadow: true, ..deny },
                Rung { shadow: true, ..deny },
                Rung { ban: DAY, ..NONE },
            ],
            // For callers that are more likely to be clumsy than hostile: no shadow ban, no ban.
            "gentle" => {
                vec![warn, warn, warn, Rung { cooldown: MIN, ..NONE }, Rung { cooldown: FIVE, ..NONE }]
            }
            _ => return None,
        };
        Some(Self { decay: Span::DAY, rungs, warning_cookie: None })
    }

    /// Returns whether the client has noticed any of its first `strikes` strikes, because one of them warned or denied. A
    /// shadow ban alone is not noticed, and no answer may give it away.
    fn has_notified(&self, strikes: u32) -> bool {
        // Beyond the last rung `take` sees all of them, and the last one repeats.
        let climbed = usize::try_from(strikes).unwrap_or(usize::MAX);
        self.rungs.iter().take(climbed).any(|rung| rung.warn || !rung.allows())
    }

    /// Returns the rung of the `strikes`th strike.
    pub(crate) fn rung(&self, strikes: u32) -> Rung {
        // Strikes count from 1, rungs from 0.
        let index = usize::try_from(strikes).unwrap_or(usize::MAX).saturating_sub(1);
        self.rungs.get(index).or(self.rungs.last()).copied().unwrap_or_default()
    }
}

/// Which violations count as strikes.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum StrikeMode {
    /// At most one for each rule within its limit's period, or within an hour where the period is longer. A retry loop is
    /// then one offence and not many.
    #[default]
    Window,
    /// Every violation.
    Request,
    /// Only those that come after the client could read a denial, and before its `Retry-After` has passed.
    Ignored,
}

/// A denial of every request of a subject, until a given time.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Penalty {
    /// A cool-down, until this time.
    CoolDown(Timestamp),
    /// A ban, until this time.
    Ban(Timestamp),
}

impl Penalty {
    /// Returns the order of harshness: a ban is harsher than a cool-down, and of two of a kind the longer one is.
    pub(crate) fn rank(self) -> (u8, Timestamp) {
        match self {
            Self::CoolDown(until) => (0, until),
            Self::Ban(until) => (1, until),
        }
    }
}

/// A shortened digest of the rule that a strike came from. 32 bits are enough, because tags are compared only within one
/// subject, which remembers [`MAX_RECENT`] of them.
pub(crate) type RuleTag = u32;

/// A request over a limit, as the settle step sees it.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Violation {
    /// The tag under which a strike or denial is remembered: of the rule and the period, or of one budget where its denial is
    /// what counts.
    tag: RuleTag,
    mode: StrikeMode,
    /// How long after this strike the next one from the same rule may follow.
    wait: Span,
}

impl Violation {
    /// Makes the violation of a limit under these terms, on this key.
    pub(crate) fn new(terms: &Terms, key: Digest, limit: &Limit) -> Self {
        let (mode, period) = (terms.strike, limit.period());
        let tag = match mode {
            // The client was asked to wait for the budget that denied it. A request on another budget of the same rule ignores
            // nothing.
            StrikeMode::Ignored => low_bits(key.to_u128()),
            // A rule by tier has limits of several periods, and a strike on one must not shield the others.
            StrikeMode::Window | StrikeMode::Request => terms.tag ^ low_bits(u128::from(period.micros())),
        };
        Self { tag, mode, wait: period.min(LONGEST_WAIT) }
    }
}

fn low_bits(number: u128) -> RuleTag {
    RuleTag::try_from(number & u128::from(RuleTag::MAX)).unwrap_or_default()
}

impl Rule {
    /// Returns how long after a strike the next one from the same limit may follow; `None` where every violation counts.
    pub(crate) fn strike_wait(&self, limit: &Limit) -> Option<Span> {
        (self.strike == StrikeMode::Window).then(|| limit.period().min(LONGEST_WAIT))
    }
}

/// The abuse state of one subject.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Standing {
    strikes: u32,
    /// When all strikes are forgotten, and the shadow ban with them.
    decays_at: Timestamp,
    shadow: bool,
    cooldown_until: Timestamp,
    ban_until: Timestamp,
    recent: RecentList,
}

impl Standing {
    /// The versions of its bytes that are read.
    pub(crate) const VERSIONS: Versions = Versions::FIRST;

    /// Makes a standing that is banned until `until` and knows nothing else, for a journal record that cannot be read: its
    /// subject was punished, and must not be let off.
    #[must_use]
    pub fn banned(until: Timestamp) -> Self {
        Self { ban_until: until, ..Self::default() }
    }

    /// Returns the number of strikes that still count at `now`.
    #[must_use]
    pub fn strikes(&self, now: Timestamp) -> u32 {
        if now < self.decays_at { self.strikes } else { 0 }
    }

    /// Returns when all strikes are forgotten; a time in the past where none counts.
    #[must_use]
    pub fn decays_at(&self) -> Timestamp {
        self.decays_at
    }

    /// Returns whether the subject is shadow banned at `now`.
    #[must_use]
    pub fn is_shadowed(&self, now: Timestamp) -> bool {
        self.shadow && now < self.decays_at
    }

    /// Returns until when a denial carries the warning; `None` where no strike counts or the client has noticed none.
    pub(crate) fn warned_until(&self, ladder: &Ladder, now: Timestamp) -> Option<Timestamp> {
        let strikes = self.strikes(now);
        (strikes > 0 && ladder.has_notified(strikes)).then_some(self.decays_at)
    }

    /// Returns whether this violation would be a strike that the client notices and that does not ban it.
    pub(crate) fn would_notify(&self, ladder: &Ladder, violation: &Violation, now: Timestamp) -> bool {
        let strikes = self.strikes(now).saturating_add(1);
        self.counts(violation, now) && ladder.has_notified(strikes) && ladder.rung(strikes).ban.is_none()
    }

    /// Returns the penalty in force at `now`; of a ban and a cool-down, the ban.
    #[must_use]
    pub fn penalty(&self, now: Timestamp) -> Option<Penalty> {
        // The ban first: its answer is the harsher one, even where a cool-down lasts longer.
        if self.ban_until > now {
            Some(Penalty::Ban(self.ban_until))
        } else if self.cooldown_until > now {
            Some(Penalty::CoolDown(self.cooldown_until))
        } else {
            None
        }
    }

    /// Returns when the last penalty ends. A cool-down can outlast a ban.
    #[must_use]
    pub fn denied_until(&self) -> Timestamp {
        self.ban_until.max(self.cooldown_until)
    }

    /// Returns when the latest ban ends or ended; `None` where there was none.
    #[must_use]
    pub fn banned_until(&self) -> Option<Timestamp> {
        (self.ban_until > Timestamp::EPOCH).then_some(self.ban_until)
    }

    /// Returns the time from which this standing decides the same as an empty one. Dropping it then is exact.
    #[must_use]
    pub fn silent_from(&self) -> Timestamp {
        // Under `Ignored` a denial that is remembered turns an early request into a strike, also where no strike counts
        // yet.
        let remembered = self.recent.iter().map(|recent| recent.until).max().unwrap_or_default();
        self.decays_at.max(self.cooldown_until).max(self.ban_until).max(remembered)
    }

    /// Corrects a standing dated in the future by a clock that has since been set back: strikes count for no longer than their
    /// decay from now on, and penalties last no longer than the longest of the ladder. Returns whether anything changed.
    #[inline]
    pub(crate) fn bring(&mut self, ladder: &Ladder, now: Timestamp) -> bool {
        // Every strike sets `decays_at` to its own time plus the decay, so this one comparison finds a clock that was
        // set back. It is on the path of each request.
        let latest = now.plus(ladder.decay);
        // A second of tolerance, so that small differences between the clocks of nodes do not make every request a write.
        let is_ahead = self.decays_at > latest.plus(Span::SECOND);
        if is_ahead {
            self.bring_back(ladder, self.decays_at.since(latest), now);
        }
        is_ahead
    }

    #[cold]
    fn bring_back(&mut self, ladder: &Ladder, ahead: Span, now: Timestamp) {
        // Without such a rung the penalty is from an earlier policy, and nothing says how long it may last: it stays.
        let at_most = |until: Timestamp, longest: Option<Span>| longest.map_or(until, |span| until.min(now.plus(span)));
        self.decays_at = now.plus(ladder.decay);
        self.ban_until = at_most(self.ban_until, ladder.rungs.iter().filter_map(|rung| rung.ban).max());
        self.cooldown_until = at_most(self.cooldown_until, ladder.rungs.iter().filter_map(|rung| rung.cooldown).max());
        self.recent.bring_back(ahead, now);
    }

    /// Returns whether this violation is a strike.
    pub(crate) fn counts(&self, violation: &Violation, now: Timestamp) -> bool {
        let recent = self.recent.iter().find(|recent| recent.rule == violation.tag && now < recent.until);
        // Under `Window` the entry is the last strike, under `Ignored` the last denial.
        match violation.mode {
            StrikeMode::Request => true,
            StrikeMode::Window => recent.is_none(),
            StrikeMode::Ignored => recent.is_some_and(|denial| now >= denial.at.plus(IN_FLIGHT)),
        }
    }

    /// Adds one strike with the consequences of its rung. Returns the rung.
    pub(crate) fn strike(&mut self, ladder: &Ladder, violation: &Violation, now: Timestamp) -> Rung {
        // All strikes are forgotten together, so this is the first one again. Penalties stay: they have ends of their
        // own.
        if now >= self.decays_at {
            self.strikes = 0;
            self.shadow = false;
        }
        self.strikes = self.strikes.saturating_add(1);
        self.decays_at = now.plus(ladder.decay);
        let rung = ladder.rung(self.strikes);
        // A later rung without `shadow` does not lift the shadow ban. Only the decay does.
        self.shadow |= rung.shadow;
        // A new penalty never shortens one in force.
        if let Some(span) = rung.cooldown {
            self.cooldown_until = self.cooldown_until.max(now.plus(span));
        }
        if let Some(span) = rung.ban {
            self.ban_until = self.ban_until.max(now.plus(span));
        }
        // `Request` strikes every time and needs no memory. `Ignored` remembers denials instead, in `remember_denial`.
        if violation.mode == StrikeMode::Window {
            self.remember(violation.tag, now, now.plus(violation.wait));
        }
        rung
    }

    /// Remembers a denial whose `Retry-After` ends at `retry_at`, under rules that strike requests which ignore it. Returns
    /// whether anything changed.
    ///
    /// In a series of denials the first one counts: it is replaced only after a strike, or by a denial with a later
    /// `retry_at`. Otherwise a client that never pauses would always be within [`IN_FLIGHT`] of its last denial. A request
    /// that is let through has no `Retry-After`, so the denial before it stays in force.
    pub(crate) fn remember_denial(
        &mut self,
        violation: &Violation,
        struck: bool,
        now: Timestamp,
        retry_at: Timestamp,
    ) -> bool {
        // `Retry-After` is in whole seconds. A difference of less than one is the same time, rounded at another moment.
        let covers = |denial: &Recent| now < denial.until && retry_at < denial.until.plus(Span::SECOND);
        let known = self.recent.iter().any(|denial| denial.rule == violation.tag && covers(&denial));
        if violation.mode != StrikeMode::Ignored || (known && !struck) {
            return false;
        }
        self.remember(violation.tag, now, retry_at);
        true
    }

    fn remember(&mut self, rule: RuleTag, at: Timestamp, until: Timestamp) {
        self.recent.add(Recent { rule, at, until });
    }

    /// Returns the stored bytes.
    #[must_use]
    pub fn to_bytes(&self, format: Format) -> Vec<u8> {
        to_bytes(Self::VERSIONS, format, |out| self.write(out))
    }

    /// Appends this standing to a larger record.
    pub(crate) fn write(&self, out: &mut Writer) {
        out.number(u64::from(self.strikes));
        out.number(self.decays_at.micros());
        out.byte(u8::from(self.shadow));
        out.number(self.cooldown_until.micros());
        out.number(self.ban_until.micros());
        out.number(self.recent.iter().count() as u64);
        for recent in self.recent.iter() {
            out.number(u64::from(recent.rule));
            out.number(recent.at.micros());
            out.number(recent.until.micros());
        }
    }

    /// Parses what [`to_bytes`](Self::to_bytes) wrote.
    ///
    /// # Errors
    /// Fails on an unknown version and on malformed bytes.
    pub fn from_bytes(bytes: &[u8]) -> Result<Self, BytesError> {
        from_bytes(bytes, Self::VERSIONS, Self::read)
    }

    /// Reads a standing from the front of a larger record.
    pub(crate) fn read(from: &mut Reader<'_>) -> Result<Self, BytesError> {
        const WRONG: BytesError = BytesError::Malformed("standing");
        let mut standing = Self {
            strikes: u32::try_from(from.number()?).map_err(|_| WRONG)?,
            decays_at: Timestamp::from_micros(from.number()?),
            shadow: match from.byte()? {
                0 => false,
                1 => true,
                _ => return Err(WRONG),
            },
            cooldown_until: Timestamp::from_micros(from.number()?),
            ban_until: Timestamp::from_micros(from.number()?),
            recent: RecentList::default(),
        };
        for _ in 0..from.count(MAX_RECENT)? {
            let recent = Recent {
                rule: u32::try_from(from.number()?).map_err(|_| WRONG)?,
                at: Timestamp::from_micros(from.number()?),
                until: Timestamp::from_micros(from.number()?),
            };
            // Only sorted entries are written: equal standings must have equal bytes, for compare-and-set.
            if !standing.recent.push(recent) {
                return Err(WRONG);
            }
        }
        Ok(standing)
    }
}
