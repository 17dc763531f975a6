//! A slow model of the login, written from the specification's prose and not from the code: everything that ever happened
//! stays in a list, and every answer is worked out from the whole of it.

use threshold_core::limit::SlidingLog;
use threshold_core::lockout::{AttemptOutcome, Login, UnknownAttempt};
use threshold_core::{Span, Timestamp, TraceId};

/// An attempt without a result counts as a failure after this long.
const MINUTE: Span = Span::from_secs(60);
/// Known devices of one account, and tokens of one device, that are good at once.
const DEVICES: usize = 10;
const TOKENS: usize = 4;

/// Whose counters: an account, a factor, and a known device if it is one.
type Class = (u8, u8, Option<usize>);

/// Whoever tries.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Asks {
    pub(crate) account: u8,
    pub(crate) factor: u8,
    pub(crate) host: u8,
    /// The token that is shown, as the how manieth of all.
    pub(crate) token: Option<usize>,
    pub(crate) id: TraceId,
}

#[derive(Debug)]
struct Tried {
    id: TraceId,
    class: Class,
    at: Timestamp,
    /// When it ended, as the how manieth result, and whether well.
    ended: Option<(Timestamp, usize, bool)>,
    /// An operator has pardoned it: it is no failure, whatever comes of it.
    pardoned: bool,
    /// The secret was reset since: there is no such attempt any more.
    void: bool,
}

#[derive(Debug)]
struct Token {
    account: u8,
    device: usize,
    good: bool,
}

/// How it stands with one class at one moment.
struct Row {
    /// When each failure in a row was.
    failures: Vec<Timestamp>,
    /// When each attempt under way began.
    under_way: Vec<Timestamp>,
}

#[derive(Debug)]
pub(crate) struct Model {
    login: Login,
    tried: Vec<Tried>,
    /// What addresses were charged and have not got back.
    charged: Vec<(u8, Timestamp, TraceId)>,
    tokens: Vec<Token>,
    devices: usize,
    results: usize,
}

impl Model {
    pub(crate) fn new(login: Login) -> Self {
        Self { login, tried: Vec::new(), charged: Vec::new(), tokens: Vec::new(), devices: 0, results: 0 }
    }

    /// `None` where the secret may be checked, else what is answered.
    pub(crate) fn attempt(&mut self, asks: &Asks, now: Timestamp) -> Option<AttemptOutcome> {
        let device = asks.token.and_then(|token| self.shown(token, asks.account, now));
        if device.is_none() {
            let own = self.charged.iter().filter(|(host, ..)| *host == asks.host);
            let until = fits_at(&self.login.ip, own.map(|(_, at, _)| *at).collect(), now);
            if until > now {
                return Some(AttemptOutcome::TooMany { until });
            }
            self.charged.push((asks.host, now, asks.id));
        }
        let class = (asks.account, asks.factor, device);
        let until = self.opens_at(class, now);
        if until > now {
            return Some(AttemptOutcome::Locked { until: (until < Timestamp::MAX).then_some(until) });
        }
        self.tried.push(Tried { id: asks.id, class, at: now, ended: None, pardoned: false, void: false });
        None
    }

    /// Until when the caller is kept from trying, if that is so.
    pub(crate) fn result(
        &mut self,
        id: TraceId,
        success: bool,
        now: Timestamp,
    ) -> Result<Option<Timestamp>, UnknownAttempt> {
        let own = self.tried.iter_mut().find(|tried| tried.id == id).ok_or(UnknownAttempt)?;
        if own.void || own.ended.is_some() || own.at.plus(MINUTE) <= now {
            return Err(UnknownAttempt);
        }
        self.results += 1;
        own.ended = Some((now, self.results, success));
        let class = own.class;
        if !success {
            return Ok(Some(self.opens_at(class, now)).filter(|until| *until > now));
        }
        self.charged.retain(|(_, _, charged)| *charged != id);
        self.issue(class);
        Ok(None)
    }

    /// An operator's pardon: whatever was tried so far is forgotten, and what is under way may still succeed.
    pub(crate) fn pardon(&mut self, account: u8) {
        self.tried.iter_mut().filter(|tried| tried.class.0 == account).for_each(|tried| tried.pardoned = true);
    }

    /// A new secret: whoever tried the old one must try again, and so must every device.
    pub(crate) fn reset(&mut self, account: u8) {
        self.tried.iter_mut().filter(|tried| tried.class.0 == account).for_each(|tried| tried.void = true);
        self.tokens.iter_mut().filter(|token| token.account == account).for_each(|token| token.good = false);
    }

    /// The device of a token, if it is known. Those that it had before this one are over.
    fn shown(&mut self, token: usize, account: u8, now: Timestamp) -> Option<usize> {
        let device = self.tokens[token].device;
        if !self.tokens[token].good || self.tokens[token].account != account {
            return None;
        }
        self.end_tokens(|at, other| other.device == device && at < token);
        let at_ceiling = (0..2).any(|factor| {
            let row = self.row((account, factor, Some(device)), now);
            row.failures.len() as u64 >= u64::from(self.login.ceiling)
        });
        if at_ceiling {
            self.end_tokens(|_, other| other.device == device);
            return None;
        }
        Some(device)
    }

    fn end_tokens(&mut self, which: impl Fn(usize, &Token) -> bool) {
        for (at, token) in self.tokens.iter_mut().enumerate() {
            if which(at, token) {
                token.good = false;
            }
        }
    }

    /// A success makes a device known, or gives a known one a further token.
    fn issue(&mut self, (account, _, device): Class) {
        let good = |device: usize, tokens: &[Token]| -> Vec<usize> {
            (0..tokens.len()).filter(|at| tokens[*at].good && tokens[*at].device == device).collect()
        };
        let known = device.filter(|device| !good(*device, &self.tokens).is_empty());
        let device = match known {
            Some(device) => {
                let own = good(device, &self.tokens);
                if own.len() >= TOKENS {
                    self.tokens[own[1]].good = false;
                }
                device
            }
            None => {
                // Who has not logged in for longest: the last of its tokens, whether good or not, is the oldest.
                let last = |device: usize| self.tokens.iter().rposition(|token| token.device == device);
                let mut all: Vec<usize> = (0..self.devices)
                    .filter(|device| good(*device, &self.tokens).iter().any(|at| self.tokens[*at].account == account))
                    .collect();
                all.sort_by_key(|device| last(*device));
                if all.len() >= DEVICES {
                    let oldest = all[0];
                    self.end_tokens(|_, token| token.device == oldest);
                }
                self.devices += 1;
                self.devices - 1
            }
        };
        self.tokens.push(Token { account, device, good: true });
    }

    fn row(&self, class: Class, at: Timestamp) -> Row {
        let own = || self.tried.iter().filter(|tried| tried.class == class && !tried.void && tried.at <= at);
        let end = |tried: &Tried| {
            let late = tried.at.plus(MINUTE);
            tried.ended.or((late <= at).then_some((late, 0, false)))
        };
        let mut ends: Vec<_> = own().filter_map(|tried| Some((end(tried)?, tried.pardoned))).collect();
        ends.sort_unstable();
        let mut failures = Vec::new();
        for ((at, _, success), pardoned) in ends {
            if success {
                failures.clear();
            } else if !pardoned {
                failures.push(at);
            }
        }
        let under_way = own().filter(|tried| !tried.pardoned && end(tried).is_none()).map(|tried| tried.at).collect();
        Row { failures, under_way }
    }

    /// How long the `count`th failure in a row locks: thresholds are floors.
    fn lock(&self, count: usize) -> Option<Span> {
        let reached = self.login.locks.iter().filter(|(floor, _)| *floor as usize <= count);
        reached.max_by_key(|(floor, _)| *floor).map(|(_, span)| *span)
    }

    /// What the account's budget has been charged, and has not given back.
    fn budget(&self, class: Class) -> Vec<Timestamp> {
        let counts = |tried: &&Tried| {
            let failed = tried.ended.is_none_or(|(.., success)| !success);
            tried.class == class && failed && !tried.pardoned && !tried.void
        };
        self.tried.iter().filter(counts).map(|tried| tried.at).collect()
    }

    /// Whether an attempt would be let through at a moment, if nothing happens before but that others time out.
    fn is_open(&self, class: Class, at: Timestamp) -> bool {
        let Row { failures, under_way } = self.row(class, at);
        let count = failures.len() + under_way.len();
        let holds = |from: Timestamp, span: Option<Span>| span.is_some_and(|span| from.plus(span) > at);
        let failed = failures.iter().enumerate().any(|(index, from)| holds(*from, self.lock(index + 1)));
        // Whoever is under way counts as a failure, so the last of all, failed or under way, is the `count`th.
        let last = failures.last().max(under_way.iter().max()).filter(|_| !under_way.is_empty());
        let flying = last.is_some_and(|from| holds(*from, self.lock(count)));
        let fits = fits_at(&self.login.account, self.budget(class), at) <= at;
        !failed && !flying && fits && count < self.login.ceiling as usize
    }

    /// When an attempt is let through: the first moment of all those at which anything changes. `MAX` at the ceiling.
    fn opens_at(&self, class: Class, now: Timestamp) -> Timestamp {
        let Row { failures, under_way } = self.row(class, now);
        if failures.len() >= self.login.ceiling as usize {
            return Timestamp::MAX;
        }
        let spans: Vec<Span> = self.login.locks.iter().map(|(_, span)| *span).collect();
        let own = self.tried.iter().filter(|tried| tried.class == class);
        let begun = own.flat_map(|tried| [Some(tried.at), Some(tried.at.plus(MINUTE)), tried.ended.map(|(at, ..)| at)]);
        let mut moments: Vec<Timestamp> = begun
            .flatten()
            .flat_map(|at| {
                spans.iter().map(move |span| at.plus(*span)).chain([at, at.plus(self.login.account.period())])
            })
            .filter(|at| *at > now)
            .chain([now])
            .collect();
        moments.sort_unstable();
        if failures.len() + under_way.len() < self.login.ceiling as usize {
            return moments.into_iter().find(|at| self.is_open(class, *at)).unwrap();
        }
        // Those under way may bring it to the ceiling or be right; that is known when the last of them has ended.
        let locks = failures.iter().enumerate().filter_map(|(index, at)| Some(at.plus(self.lock(index + 1)?)));
        let ends = under_way.iter().map(|at| at.plus(MINUTE));
        let budget = fits_at(&self.login.account, self.budget(class), now);
        locks.chain(ends).chain([budget]).max().unwrap()
    }
}

/// When one more fits into a budget with these charges.
fn fits_at(budget: &SlidingLog, mut charges: Vec<Timestamp>, now: Timestamp) -> Timestamp {
    charges.retain(|at| at.plus(budget.period()) > now);
    charges.sort_unstable();
    let most = usize::try_from(budget.quota()).unwrap();
    charges.len().checked_sub(most).map_or(now, |over| charges[over].plus(budget.period()))
}
