//! A slow model of the login, written from the specification and not from the code: it keeps every event in a list and computes
//! every answer from the whole list.

use threshold_core::limit::SlidingLog;
use threshold_core::lockout::{AttemptOutcome, Login, UnknownAttempt};
use threshold_core::{Span, Timestamp, TraceId};

/// An attempt without a result counts as a failure after this long.
const MINUTE: Span = Span::from_secs(60);
/// The largest numbers of known devices of one account and of valid tokens of one device.
const DEVICES: usize = 10;
const TOKENS: usize = 4;

/// The key of a set of counters: an account, a factor, and the known device, if it is one.
type Class = (u8, u8, Option<usize>);

/// One attempt.
#[derive(Debug, Clone, Copy)]
pub(crate) struct ModelAttempt {
    pub(crate) account: u8,
    pub(crate) factor: u8,
    pub(crate) host: u8,
    /// The index of the token that comes with it, among all tokens issued.
    pub(crate) token: Option<usize>,
    pub(crate) id: TraceId,
}

#[derive(Debug)]
struct PastAttempt {
    id: TraceId,
    class: Class,
    at: Timestamp,
    /// When it ended, the number of its result, and whether it succeeded.
    ended: Option<(Timestamp, usize, bool)>,
    /// Whether an operator has lifted the locks since. It is no failure then, whatever its result.
    lifted: bool,
    /// Whether the secret was reset since. The attempt is unknown then.
    void: bool,
}

#[derive(Debug)]
struct Token {
    account: u8,
    device: usize,
    valid: bool,
}

/// The counters of one class at one time.
struct Row {
    /// The times of the consecutive failures.
    failures: Vec<Timestamp>,
    /// The times at which the attempts under way began.
    under_way: Vec<Timestamp>,
}

#[derive(Debug)]
pub(crate) struct Model {
    login: Login,
    tried: Vec<PastAttempt>,
    /// The charges of addresses that were not given back.
    charged: Vec<(u8, Timestamp, TraceId)>,
    tokens: Vec<Token>,
    devices: usize,
    results: usize,
}

impl Model {
    pub(crate) fn new(login: Login) -> Self {
        Self { login, tried: Vec::new(), charged: Vec::new(), tokens: Vec::new(), devices: 0, results: 0 }
    }

    /// Returns `None` where the secret may be checked, or else the answer.
    pub(crate) fn attempt(&mut self, attempt: &ModelAttempt, now: Timestamp) -> Option<AttemptOutcome> {
        let device = attempt.token.and_then(|token| self.recognise(token, attempt.account, now));
        if device.is_none() {
            let own = self.charged.iter().filter(|(host, ..)| *host == attempt.host);
            let until = fits_at(&self.login.ip, own.map(|(_, at, _)| *at).collect(), now);
            if until > now {
                return Some(AttemptOutcome::TooMany { until });
            }
            self.charged.push((attempt.host, now, attempt.id));
        }
        let class = (attempt.account, attempt.factor, device);
        let until = self.opens_at(class, now);
        if until > now {
            return Some(AttemptOutcome::Locked { until: (until < Timestamp::MAX).then_some(until) });
        }
        self.tried.push(PastAttempt { id: attempt.id, class, at: now, ended: None, lifted: false, void: false });
        None
    }

    /// Returns until when the caller is locked, if it is.
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

    /// Lifts all locks: attempts so far are forgotten, and those under way may still succeed.
    pub(crate) fn lift(&mut self, account: u8) {
        self.tried.iter_mut().filter(|tried| tried.class.0 == account).for_each(|tried| tried.lifted = true);
    }

    /// Resets the secret: attempts under way become unknown, and all tokens become invalid.
    pub(crate) fn reset(&mut self, account: u8) {
        self.tried.iter_mut().filter(|tried| tried.class.0 == account).for_each(|tried| tried.void = true);
        self.tokens.iter_mut().filter(|token| token.account == account).for_each(|token| token.valid = false);
    }

    /// Returns the device of a valid token, and ends its older tokens.
    fn recognise(&mut self, token: usize, account: u8, now: Timestamp) -> Option<usize> {
        let device = self.tokens[token].device;
        if !self.tokens[token].valid || self.tokens[token].account != account {
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
                token.valid = false;
            }
        }
    }

    /// Issues a token after a success, for a new device or a known one.
    fn issue(&mut self, (account, _, device): Class) {
        let valid = |device: usize, tokens: &[Token]| -> Vec<usize> {
            (0..tokens.len()).filter(|at| tokens[*at].valid && tokens[*at].device == device).collect()
        };
        let known = device.filter(|device| !valid(*device, &self.tokens).is_empty());
        let device = match known {
            Some(device) => {
                let own = valid(device, &self.tokens);
                if own.len() >= TOKENS {
                    self.tokens[own[1]].valid = false;
                }
                device
            }
            None => {
                // The device that logged in longest ago is the one whose last token, valid or not, is the oldest.
                let last = |device: usize| self.tokens.iter().rposition(|token| token.device == device);
                let mut all: Vec<usize> = (0..self.devices)
                    .filter(|device| valid(*device, &self.tokens).iter().any(|at| self.tokens[*at].account == account))
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
        self.tokens.push(Token { account, device, valid: true });
    }

    fn row(&self, class: Class, at: Timestamp) -> Row {
        let own = || self.tried.iter().filter(|tried| tried.class == class && !tried.void && tried.at <= at);
        let end = |tried: &PastAttempt| {
            let late = tried.at.plus(MINUTE);
            tried.ended.or((late <= at).then_some((late, 0, false)))
        };
        let mut ends: Vec<_> = own().filter_map(|tried| Some((end(tried)?, tried.lifted))).collect();
        ends.sort_unstable();
        let mut failures = Vec::new();
        for ((at, _, success), lifted) in ends {
            if success {
                failures.clear();
            } else if !lifted {
                failures.push(at);
            }
        }
        let under_way = own().filter(|tried| !tried.lifted && end(tried).is_none()).map(|tried| tried.at).collect();
        Row { failures, under_way }
    }

    /// Returns how long the `count`th consecutive failure locks, by the highest threshold reached.
    fn lock(&self, count: usize) -> Option<Span> {
        let reached = self.login.locks.iter().filter(|(floor, _)| *floor as usize <= count);
        reached.max_by_key(|(floor, _)| *floor).map(|(_, span)| *span)
    }

    /// Returns the charges of the account's budget that were not given back.
    fn budget(&self, class: Class) -> Vec<Timestamp> {
        let counts = |tried: &&PastAttempt| {
            let failed = tried.ended.is_none_or(|(.., success)| !success);
            tried.class == class && failed && !tried.lifted && !tried.void
        };
        self.tried.iter().filter(counts).map(|tried| tried.at).collect()
    }

    /// Returns whether an attempt would be allowed at a time, if nothing happens before but that others time out.
    fn is_open(&self, class: Class, at: Timestamp) -> bool {
        let Row { failures, under_way } = self.row(class, at);
        let count = failures.len() + under_way.len();
        let holds = |from: Timestamp, span: Option<Span>| span.is_some_and(|span| from.plus(span) > at);
        let failed = failures.iter().enumerate().any(|(index, from)| holds(*from, self.lock(index + 1)));
        // Attempts under way count as failures, so the latest of all, failed or under way, is the `count`th.
        let last = failures.last().max(under_way.iter().max()).filter(|_| !under_way.is_empty());
        let under_way_locks = last.is_some_and(|from| holds(*from, self.lock(count)));
        let fits = fits_at(&self.login.account, self.budget(class), at) <= at;
        !failed && !under_way_locks && fits && count < self.login.ceiling as usize
    }

    /// Returns when an attempt is allowed: the first of all times at which anything changes. `MAX` at the ceiling.
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
        // Attempts under way may reach the ceiling or succeed. That is known when the last of them has ended.
        let locks = failures.iter().enumerate().filter_map(|(index, at)| Some(at.plus(self.lock(index + 1)?)));
        let ends = under_way.iter().map(|at| at.plus(MINUTE));
        let budget = fits_at(&self.login.account, self.budget(class), now);
        locks.chain(ends).chain([budget]).max().unwrap()
    }
}

/// Returns when one more charge fits into a budget with these charges.
fn fits_at(budget: &SlidingLog, mut charges: Vec<Timestamp>, now: Timestamp) -> Timestamp {
    charges.retain(|at| at.plus(budget.period()) > now);
    charges.sort_unstable();
    let most = usize::try_from(budget.quota()).unwrap();
    charges.len().checked_sub(most).map_or(now, |over| charges[over].plus(budget.period()))
}
