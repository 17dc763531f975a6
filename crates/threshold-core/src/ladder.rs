//! Strike, rung, penalty: the graduated response to a subject that keeps going over its limits.

mod notices;

use crate::bill::Terms;
use crate::codec::{BytesError, Format, Reader, Versions, Writer, from_bytes, to_bytes};
use crate::key::Digest;
use crate::limit::{Limit, NotationError, parse_span};
use crate::policy::Rule;
use crate::time::{Span, Timestamp};
use notices::{MAX_NOTICES, Notice, Notices};

/// A request less than this after a denial may have been under way before the client could read it.
const IN_FLIGHT: Span = Span::SECOND;
/// The longest wait between two strikes from one rule. Over a daily limit the wait would otherwise last as long as the
/// usual decay, and nobody would ever reach the second rung.
const LONGEST_WAIT: Span = Span::HOUR;

/// What happens at one strike.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Rung {
    /// The client is warned.
    pub warn: bool,
    /// This request is denied.
    pub deny: bool,
    /// Allowed requests are delayed from now on.
    pub shadow: bool,
    /// Denied for so long.
    pub cooldown: Option<Span>,
    /// Banned for so long.
    pub ban: Option<Span>,
}

impl Rung {
    /// Whether the request that struck is let through.
    #[must_use]
    pub const fn allows(&self) -> bool {
        !self.deny && self.cooldown.is_none() && self.ban.is_none()
    }

    /// Reads terms joined by `+`: `warn`, `deny`, `shadow`, `cooldown D`, `ban D`.
    ///
    /// # Errors
    /// Where a term is unknown, with its place.
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

/// The rungs a subject climbs, one a strike, and how long a strike is remembered.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Ladder {
    /// All strikes vanish together this long after the last.
    pub decay: Span,
    /// Never empty; the last one repeats.
    pub rungs: Vec<Rung>,
    /// A cookie that is set with each warning.
    pub warning_cookie: Option<Box<str>>,
}

impl Ladder {
    /// The ladders that need no table in the policy.
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
            // For people who are more likely clumsy than hostile: no shadow, no ban.
            "gentle" => {
                vec![warn, warn, warn, Rung { cooldown: MIN, ..NONE }, Rung { cooldown: FIVE, ..NONE }]
            }
            _ => return None,
        };
        Some(Self { decay: Span::DAY, rungs, warning_cookie: None })
    }

    /// Whether the client has been told anything by so many strikes: it was warned or denied. A shadow ban alone tells
    /// nothing, and nothing may give it away.
    fn has_told(&self, strikes: u32) -> bool {
        let climbed = usize::try_from(strikes).unwrap_or(usize::MAX);
        self.rungs.iter().take(climbed).any(|rung| rung.warn || !rung.allows())
    }

    /// The rung of the `strikes`th strike.
    fn rung(&self, strikes: u32) -> Rung {
        let index = usize::try_from(strikes).unwrap_or(usize::MAX).saturating_sub(1);
        self.rungs.get(index).or(self.rungs.last()).copied().unwrap_or_default()
    }
}

/// Which violations count as strikes.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum StrikeMode {
    /// No sooner than the limit's period, and at most an hour, after the last one from the same rule.
    #[default]
    Window,
    /// Every one.
    Request,
    /// Only those that come after a denial could have been read and before its Retry-After.
    Ignored,
}

/// What holds for every request of a subject until it ends.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Penalty {
    /// Denied until then.
    CoolDown(Timestamp),
    /// Banned until then.
    Ban(Timestamp),
}

impl Penalty {
    /// A ban is harsher than a cool-down, and of two alike the longer one.
    pub(crate) fn rank(self) -> (u8, Timestamp) {
        match self {
            Self::CoolDown(until) => (0, until),
            Self::Ban(until) => (1, until),
        }
    }
}

/// The rule a strike came from, shortened; only ever compared within one subject.
pub(crate) type RuleTag = u32;

/// A violation, as the settle step sees it.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Violation {
    /// What is remembered apart: a rule under one period, or a single budget where the denial of that is what counts.
    tag: RuleTag,
    mode: StrikeMode,
    /// How long after this strike the next one may follow.
    wait: Span,
}

impl Violation {
    /// A request over a limit under these terms, on this key.
    pub(crate) fn new(terms: &Terms, key: Digest, limit: &Limit) -> Self {
        let (mode, period) = (terms.strike, limit.period());
        let tag = match mode {
            // Only the budget that was denied was told to wait: another one of the same rule was not.
            StrikeMode::Ignored => low_bits(key.to_u128()),
            // A rule by tier has limits of several periods, and a strike on one must not cover the others.
            StrikeMode::Window | StrikeMode::Request => terms.tag ^ low_bits(u128::from(period.micros())),
        };
        Self { tag, mode, wait: period.min(LONGEST_WAIT) }
    }
}

fn low_bits(number: u128) -> RuleTag {
    RuleTag::try_from(number & u128::from(RuleTag::MAX)).unwrap_or_default()
}

impl Rule {
    /// How long after a strike the next one from the same limit may follow; `None` where there is no such wait.
    pub(crate) fn strike_wait(&self, limit: &Limit) -> Option<Span> {
        (self.strike == StrikeMode::Window).then(|| limit.period().min(LONGEST_WAIT))
    }
}

/// The abuse state of one subject.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Standing {
    strikes: u32,
    /// When all strikes vanish, and the shadow ban with them.
    decays_at: Timestamp,
    shadow: bool,
    cooldown_until: Timestamp,
    ban_until: Timestamp,
    notices: Notices,
}

impl Standing {
    /// The versions in which it is read.
    pub(crate) const VERSIONS: Versions = Versions::FIRST;

    /// The standing of somebody of whom nothing is known but that something was: banned until then.
    #[must_use]
    pub fn banned(until: Timestamp) -> Self {
        Self { ban_until: until, ..Self::default() }
    }

    /// The strikes that still count at `now`.
    #[must_use]
    pub fn strikes(&self, now: Timestamp) -> u32 {
        if now < self.decays_at { self.strikes } else { 0 }
    }

    /// Whether the subject is shadow banned at `now`.
    #[must_use]
    pub fn is_shadowed(&self, now: Timestamp) -> bool {
        self.shadow && now < self.decays_at
    }

    /// Until when a denied client is warned, if it is: its strikes count, and it knows of them.
    pub(crate) fn warned_until(&self, ladder: &Ladder, now: Timestamp) -> Option<Timestamp> {
        let strikes = self.strikes(now);
        (strikes > 0 && ladder.has_told(strikes)).then_some(self.decays_at)
    }

    /// Whether this violation would be a strike that denies or warns, and does not ban.
    pub(crate) fn would_tell(&self, ladder: &Ladder, violation: &Violation, now: Timestamp) -> bool {
        let strikes = self.strikes(now).saturating_add(1);
        self.counts(violation, now) && ladder.has_told(strikes) && ladder.rung(strikes).ban.is_none()
    }

    /// The penalty in force at `now`, the harsher first.
    #[must_use]
    pub fn penalty(&self, now: Timestamp) -> Option<Penalty> {
        if self.ban_until > now {
            Some(Penalty::Ban(self.ban_until))
        } else if self.cooldown_until > now {
            Some(Penalty::CoolDown(self.cooldown_until))
        } else {
            None
        }
    }

    /// When the last of its penalties ends: past a ban, a cool-down may still run.
    #[must_use]
    pub fn denied_until(&self) -> Timestamp {
        self.ban_until.max(self.cooldown_until)
    }

    /// When the current ban ends, if one was ever set.
    #[must_use]
    pub fn banned_until(&self) -> Option<Timestamp> {
        (self.ban_until > Timestamp::EPOCH).then_some(self.ban_until)
    }

    /// The first moment from which this standing says the same as none.
    #[must_use]
    pub fn silent_from(&self) -> Timestamp {
        let remembered = self.notices.iter().map(|notice| notice.until).max().unwrap_or_default();
        self.decays_at.max(self.cooldown_until).max(self.ban_until).max(remembered)
    }

    /// Brings back what was dated ahead by a clock that has since gone back: strikes count for no longer than their decay
    /// from now on, and penalties for no longer than the longest of the ladder. Says whether that changed anything.
    #[inline]
    pub(crate) fn bring(&mut self, ladder: &Ladder, now: Timestamp) -> bool {
        let latest = now.plus(ladder.decay);
        let is_ahead = self.decays_at > latest.plus(Span::SECOND);
        if is_ahead {
            self.bring_back(ladder, self.decays_at.since(latest), now);
        }
        is_ahead
    }

    #[cold]
    fn bring_back(&mut self, ladder: &Ladder, ahead: Span, now: Timestamp) {
        let at_most = |until: Timestamp, longest: Option<Span>| longest.map_or(until, |span| until.min(now.plus(span)));
        self.decays_at = now.plus(ladder.decay);
        self.ban_until = at_most(self.ban_until, ladder.rungs.iter().filter_map(|rung| rung.ban).max());
        self.cooldown_until = at_most(self.cooldown_until, ladder.rungs.iter().filter_map(|rung| rung.cooldown).max());
        self.notices.bring_back(ahead, now);
    }

    /// Whether this violation is a strike.
    pub(crate) fn counts(&self, violation: &Violation, now: Timestamp) -> bool {
        let notice = self.notices.iter().find(|notice| notice.rule == violation.tag && now < notice.until);
        match violation.mode {
            StrikeMode::Request => true,
            StrikeMode::Window => notice.is_none(),
            StrikeMode::Ignored => notice.is_some_and(|notice| now >= notice.at.plus(IN_FLIGHT)),
        }
    }

    /// Adds one strike and whatever its rung brings. Returns the rung.
    pub(crate) fn strike(&mut self, ladder: &Ladder, violation: &Violation, now: Timestamp) -> Rung {
        if now >= self.decays_at {
            self.strikes = 0;
            self.shadow = false;
        }
        self.strikes = self.strikes.saturating_add(1);
        self.decays_at = now.plus(ladder.decay);
        let rung = ladder.rung(self.strikes);
        self.shadow |= rung.shadow;
        if let Some(span) = rung.cooldown {
            self.cooldown_until = self.cooldown_until.max(now.plus(span));
        }
        if let Some(span) = rung.ban {
            self.ban_until = self.ban_until.max(now.plus(span));
        }
        if violation.mode == StrikeMode::Window {
            self.notice(violation.tag, now, now.plus(violation.wait));
        }
        rung
    }

    /// Remembers that a denial was answered which told the client to wait until `told`, where a later request would ignore it.
    /// A series counts from its first denial, until one of them is a strike or tells of a longer wait. Whoever was let through
    /// was told nothing, and the denial before still stands. Says whether anything changed.
    pub(crate) fn denied(&mut self, violation: &Violation, struck: bool, now: Timestamp, told: Timestamp) -> bool {
        // Waits are told in whole seconds: less than one more is the same moment, told at another time.
        let says_it = |notice: &Notice| now < notice.until && told < notice.until.plus(Span::SECOND);
        let known = self.notices.iter().any(|notice| notice.rule == violation.tag && says_it(&notice));
        if violation.mode != StrikeMode::Ignored || (known && !struck) {
            return false;
        }
        self.notice(violation.tag, now, told);
        true
    }

    fn notice(&mut self, rule: RuleTag, at: Timestamp, until: Timestamp) {
        self.notices.add(Notice { rule, at, until });
    }

    /// The bytes a store keeps.
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
        out.number(self.notices.iter().count() as u64);
        for notice in self.notices.iter() {
            out.number(u64::from(notice.rule));
            out.number(notice.at.micros());
            out.number(notice.until.micros());
        }
    }

    /// Reads what [`to_bytes`](Self::to_bytes) wrote.
    ///
    /// # Errors
    /// On another version, and on bytes no standing has.
    pub fn from_bytes(bytes: &[u8]) -> Result<Self, BytesError> {
        from_bytes(bytes, Self::VERSIONS, Self::read)
    }

    /// Takes a standing off the front of a larger record.
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
            notices: Notices::default(),
        };
        for _ in 0..from.count(MAX_NOTICES)? {
            let notice = Notice {
                rule: u32::try_from(from.number()?).map_err(|_| WRONG)?,
                at: Timestamp::from_micros(from.number()?),
                until: Timestamp::from_micros(from.number()?),
            };
            if !standing.notices.push(notice) {
                return Err(WRONG);
            }
        }
        Ok(standing)
    }
}
