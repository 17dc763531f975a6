//! One request at the gate: it crosses, waits and then crosses, or is refused.

use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use http::request::Parts;
use http::{HeaderMap, Response};
use http_body::SizeHint;
use threshold_core::{Decision, Facts, Span};

use super::answer::{self, Form};
use super::asked::{Asked, Learned, Lines, address};
use super::body::Count;
use super::layer::Door;
use super::pool::Place;
use super::tab::{Admitted, Answers, Tab, Undecided};
use crate::store::Saving;

/// The limiters that have decided on a request, as an extension of it.
#[derive(Debug, Clone, Default)]
struct Decided(Vec<usize>);

/// What becomes of a request.
pub(super) enum Gate {
    /// Another layer of this limiter has seen to it.
    Passed,
    /// It crosses.
    Open(Crossing, Option<Box<Count>>),
    /// It crosses after a delay.
    Slow(Box<Slowed>, Option<Box<Count>>),
    /// It does not.
    Refused(Response<Bytes>, Strike),
}

/// A strike that is being written down; nothing where there was none, or nobody writes.
#[derive(Default)]
pub(super) struct Strike(pub(super) Option<Saving>);

impl std::fmt::Debug for Strike {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_tuple("Strike").field(&self.0.is_some()).finish()
    }
}

/// A request that crosses: what its answer says, and what it gives back in the end.
#[derive(Debug)]
pub(super) struct Crossing {
    pub(super) fields: HeaderMap,
    pub(super) tab: Option<Box<Tab>>,
    /// What its answer waits for.
    pub(super) strike: Strike,
}

/// A request that waits before it crosses.
#[derive(Debug)]
pub(super) struct Slowed {
    pub(super) delay: Duration,
    place: Option<Place>,
    tab: Option<Box<Tab>>,
    strike: Strike,
    asked: Asked<'static>,
    learned: Arc<Learned>,
    decision: Decision,
    answers: Answers,
}

/// Refuses a request undecided, and says so to observers.
#[cold]
fn refused(door: &Door, learned: &Learned, (ip, reason): (Option<IpAddr>, &str), answer: Response<Bytes>) -> Gate {
    // What gRPC reads as an error has the status 200.
    let request = Undecided { ip, status: answer.status().as_u16(), reason };
    door.limiter.tell_refused(&request, &learned.policy);
    Gate::Refused(answer, Strike::default())
}

/// Decides on a request that comes from `peer`.
pub(super) fn decide(door: &Arc<Door>, parts: &mut Parts, peer: Option<SocketAddr>, size: &SizeHint) -> Gate {
    // A door whose answers are elsewhere has nothing behind it that could be another.
    if door.answers == Answers::Seen && !first_time(door, parts) {
        return Gate::Passed;
    }
    let learned = door.learned();
    if learned.policy.lacks_token_verifier() {
        let ip = peer.map(|peer| address(parts, &learned, peer));
        let answer = answer::unavailable(Form::of(&parts.headers));
        return refused(door, &learned, (ip, super::layer::NO_VERIFIER), answer);
    }
    let claims = |lines: &Lines<'_>| door.tokens.claims(&learned.policy, lines);
    let mut asked = match Asked::new(parts, size, &learned, peer, door.identify(parts), claims) {
        Ok(asked) => asked,
        Err(bad) => {
            let ip = peer.map(|peer| address(parts, &learned, peer));
            let answer = answer::bad_request(bad, Form::of(&parts.headers));
            return refused(door, &learned, (ip, bad.message), answer);
        }
    };
    let mut decision = Decision::default();
    let admit = |facts: &Facts<'_>| door.limiter.admit(&learned.policy, facts, door.answers, &mut decision);
    let Admitted { pending, if_full } = match asked.facts(admit) {
        Ok(admitted) => admitted,
        Err(error) => {
            let answer = answer::impossible(&error, Form::of(&parts.headers));
            return refused(door, &learned, (asked.ip(), &error.to_string()), answer);
        }
    };
    asked.trace = decision.trace;
    let struck = !decision.escalations.is_empty();
    let strike = Strike(struck.then(|| door.limiter.saving()).flatten());
    let tab = pending.map(|pending| Box::new(Tab::new(Arc::clone(&door.limiter), pending)));
    if !decision.allowed() {
        return Gate::Refused(denied(&asked, &decision, &learned, Form::of(&parts.headers)), strike);
    }
    let streams = learned.counts_bytes && size.exact().is_none();
    let count = streams
        .then(|| Box::new(Count { limiter: Arc::clone(&door.limiter), asked: asked.clone().into_owned(), seen: 0 }));
    if decision.delay == Span::ZERO {
        let fields = answer::fields(&decision, &learned.policy);
        return Gate::Open(Crossing { fields, tab, strike }.left_to(door.answers), count);
    }
    let form = Form::of(&parts.headers);
    let Some(place) = door.pool.enter() else {
        if let Some(tab) = tab {
            tab.withdraw();
        }
        return Gate::Refused(denied(&asked, if_full.as_deref().unwrap_or(&decision), &learned, form), strike);
    };
    // What it holds, it holds from now on: it was admitted, and nothing is left to be decided when the wait is over.
    Gate::Slow(
        Box::new(Slowed {
            delay: Duration::from_micros(decision.delay.micros()),
            place: Some(place),
            tab,
            strike,
            asked: asked.into_owned(),
            learned,
            decision,
            answers: door.answers,
        }),
        count,
    )
}

/// Whether no other layer of this limiter has decided on this request.
fn first_time(door: &Door, parts: &mut Parts) -> bool {
    let decided = parts.extensions.get_or_insert_default::<Decided>();
    let first = !decided.0.contains(&door.id());
    if first {
        decided.0.push(door.id());
    }
    first
}

impl Crossing {
    /// Keeps the tab only if it has something to give back and somebody will see when.
    fn left_to(mut self, answers: Answers) -> Self {
        self.tab = match (self.tab, answers) {
            (Some(tab), Answers::Seen) => Some(tab).filter(|tab| tab.is_open()),
            (Some(tab), Answers::Unseen) => {
                tab.leave();
                None
            }
            (None, _) => None,
        };
        self
    }
}

impl Slowed {
    /// The wait is over: makes room for the next.
    pub(super) fn leave_pool(&mut self) {
        self.place = None;
    }

    /// It was admitted when it came, so it crosses. Its charges move to now, and its answer has the figures of now: those
    /// of its arrival would tell how long it has waited.
    pub(super) fn cross(self) -> Crossing {
        let Self { mut tab, strike, asked, learned, mut decision, answers, .. } = self;
        if let Some(tab) = &mut tab {
            asked.facts(|facts| tab.renew(&learned.policy, facts, &mut decision));
        }
        let fields = answer::fields(&decision, &learned.policy);
        Crossing { fields, tab, strike }.left_to(answers)
    }
}

fn denied(asked: &Asked<'_>, decision: &Decision, learned: &Learned, form: Form) -> Response<Bytes> {
    asked.facts(|facts| answer::denial(decision, &learned.policy, facts, form))
}
