//! One request at the gate: it crosses, waits and then crosses, or is refused.

use std::net::{IpAddr, SocketAddr};
use std::panic::resume_unwind;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use http::request::Parts;
use http::{HeaderMap, Response};
use http_body::SizeHint;
use threshold_core::{Decision, PlanError, Span};

use super::answer::{self, Form};
use super::body::Count;
use super::layer::Door;
use super::pending_charges::{Admitted, Answers, Boxed, PendingCharges, Undecided};
use super::pool::Place;
use super::request_facts::{Learned, Lines, RequestFacts, address};
use crate::store::Durability;

/// The limiters that have decided on a request, as an extension of it.
#[derive(Debug, Clone, Default)]
struct Decided(Vec<usize>);

/// What becomes of a request.
pub(super) enum Gate {
    /// Another layer of this limiter has seen to it.
    Passed,
    /// The store has not answered yet.
    Deciding(Boxed<'static, Admission>),
    /// It was decided.
    Decided(Admission),
}

/// What was decided.
pub(super) enum Admission {
    /// It crosses.
    Open(Crossing, Option<Box<Count>>),
    /// It crosses after a delay.
    Slow(Box<Slowed>, Option<Box<Count>>),
    /// It does not.
    Refused(Response<Bytes>, Strike),
}

/// A strike that is being written down; nothing where there was none, or nobody writes.
#[derive(Default)]
pub(super) struct Strike(pub(super) Option<Durability>);

impl std::fmt::Debug for Strike {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_tuple("Strike").field(&self.0.is_some()).finish()
    }
}

/// A request that crosses: what its answer says, and what it gives back in the end.
#[derive(Debug)]
pub(super) struct Crossing {
    pub(super) fields: HeaderMap,
    pub(super) pending: Option<Box<PendingCharges>>,
    /// What its answer waits for.
    pub(super) strike: Strike,
}

/// A request that waits before it crosses.
#[derive(Debug)]
pub(super) struct Slowed {
    pub(super) delay: Duration,
    place: Option<Place>,
    pending: Option<Box<PendingCharges>>,
    strike: Strike,
    request_facts: RequestFacts<'static>,
    learned: Arc<Learned>,
    decision: Decision,
    answers: Answers,
}

/// Refuses a request undecided, and says so to observers.
#[cold]
fn refused(door: &Door, learned: &Learned, (ip, reason): (Option<IpAddr>, &str), answer: Response<Bytes>) -> Admission {
    // What gRPC reads as an error has the status 200.
    let request = Undecided { ip, status: answer.status().as_u16(), reason };
    door.limiter.tell_refused(&request, &learned.policy);
    Admission::Refused(answer, Strike::default())
}

/// Decides on a request that comes from `peer`.
pub(super) fn decide(door: &Arc<Door>, parts: &mut Parts, peer: Option<SocketAddr>, size: &SizeHint) -> Gate {
    // A door whose answers are elsewhere has nothing behind it that could be another.
    if door.answers == Answers::Seen && !first_time(door, parts) {
        return Gate::Passed;
    }
    let learned = door.learned();
    let form = Form::of(&parts.headers);
    if learned.policy.lacks_token_verifier() {
        let ip = peer.map(|peer| address(parts, &learned, peer));
        let reason = (ip, super::layer::NO_VERIFIER);
        return Gate::Decided(refused(door, &learned, reason, answer::unavailable(form)));
    }
    let claims = |lines: &Lines<'_>| door.tokens.claims(&learned.policy, lines);
    let request_facts = match RequestFacts::new(parts, size, &learned, peer, door.identify(parts), claims) {
        Ok(request_facts) => request_facts,
        Err(bad) => {
            let ip = peer.map(|peer| address(parts, &learned, peer));
            return Gate::Decided(refused(door, &learned, (ip, bad.message), answer::bad_request(bad, form)));
        }
    };
    let streams = learned.counts_bytes && size.exact().is_none();
    if !door.limiter.answers_at_once() {
        return Gate::Deciding(deciding(Arc::clone(door), request_facts.into_owned(), learned, form, streams));
    }
    let mut decision = Decision::default();
    let admitted = door.limiter.admit_at_once(&learned.policy, &request_facts, door.answers, &mut decision);
    Gate::Decided(decided(door, request_facts, learned, form, streams, decision, admitted))
}

/// Decides on a store that takes its time. The decision goes on where its request leaves, so that what was charged for
/// nothing is given back.
fn deciding(
    door: Arc<Door>,
    request_facts: RequestFacts<'static>,
    learned: Arc<Learned>,
    form: Form,
    streams: bool,
) -> Boxed<'static, Admission> {
    let background = door.background.clone();
    let deciding = async move {
        let mut decision = Decision::default();
        let admitted = door.limiter.admit(&learned.policy, &request_facts, door.answers, &mut decision).await;
        decided(&door, request_facts, learned, form, streams, decision, admitted)
    };
    match background.start(deciding) {
        Ok(task) => Box::pin(async move { task.await.unwrap_or_else(|stopped| resume_unwind(stopped.into_panic())) }),
        Err(deciding) => Box::pin(deciding),
    }
}

/// What becomes of a request that was decided.
fn decided(
    door: &Arc<Door>,
    mut request_facts: RequestFacts<'_>,
    learned: Arc<Learned>,
    form: Form,
    streams: bool,
    decision: Decision,
    admitted: Result<Admitted, PlanError>,
) -> Admission {
    let Admitted { pending, if_full } = match admitted {
        Ok(admitted) => admitted,
        Err(error) => {
            let answer = answer::impossible(&error, form);
            return refused(door, &learned, (request_facts.ip(), &error.to_string()), answer);
        }
    };
    request_facts.trace = decision.trace;
    let struck = !decision.escalations.is_empty();
    let strike = Strike(struck.then(|| door.limiter.durability()).flatten());
    let (limiter, background) = (&door.limiter, &door.background);
    let pending =
        pending.map(|pending| Box::new(PendingCharges::new(Arc::clone(limiter), background.clone(), pending)));
    if !decision.allowed() {
        return Admission::Refused(denied(&request_facts, &decision, &learned, form), strike);
    }
    let count = streams.then(|| {
        let (limiter, background) = (Arc::clone(limiter), background.clone());
        Box::new(Count { limiter, background, request_facts: request_facts.clone().into_owned(), seen: 0 })
    });
    if decision.delay == Span::ZERO {
        let fields = answer::fields(&decision, &learned.policy);
        return Admission::Open(Crossing { fields, pending, strike }.left_to(door.answers), count);
    }
    let Some(place) = door.pool.enter() else {
        if let Some(pending) = pending {
            pending.withdraw();
        }
        return Admission::Refused(
            denied(&request_facts, if_full.as_deref().unwrap_or(&decision), &learned, form),
            strike,
        );
    };
    // What it holds, it holds from now on: it was admitted, and nothing is left to be decided when the wait is over.
    Admission::Slow(
        Box::new(Slowed {
            delay: Duration::from_micros(decision.delay.micros()),
            place: Some(place),
            pending,
            strike,
            request_facts: request_facts.into_owned(),
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
    /// Keeps the pending only if it has something to give back and somebody will see when.
    fn left_to(mut self, answers: Answers) -> Self {
        self.pending = match (self.pending, answers) {
            (Some(pending), Answers::Seen) => Some(pending).filter(|pending| pending.is_open()),
            (Some(pending), Answers::Unseen) => {
                pending.leave();
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
    pub(super) async fn cross(self: Box<Self>) -> Crossing {
        let Self { mut pending, strike, request_facts, learned, mut decision, answers, .. } = *self;
        if let Some(pending) = &mut pending {
            pending.renew(&learned.policy, &request_facts, &mut decision).await;
        }
        let fields = answer::fields(&decision, &learned.policy);
        Crossing { fields, pending, strike }.left_to(answers)
    }
}

fn denied(request_facts: &RequestFacts<'_>, decision: &Decision, learned: &Learned, form: Form) -> Response<Bytes> {
    request_facts.facts(|facts| answer::denial(decision, &learned.policy, facts, form))
}
