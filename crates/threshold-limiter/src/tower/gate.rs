//! One request at the gate: it crosses, waits and then crosses, or is refused.

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use http::request::Parts;
use http::{HeaderMap, Response};
use http_body::SizeHint;
use threshold_core::{Decision, Facts, Span};

use super::answer::{self, Form};
use super::asked::{Asked, Learned};
use super::body::Count;
use super::layer::Door;
use super::pool::Place;
use super::tab::{Admitted, Answers, Tab};
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
    crossing: Crossing,
    /// What it is to hold once it crosses, if anything.
    holds: Option<Request>,
    door: Arc<Door>,
}

/// What becomes of a request that has waited.
pub(super) enum Waited {
    Crosses(Crossing),
    Refused(Response<Bytes>),
}

/// A request, and the policy it is decided under.
#[derive(Debug)]
struct Request {
    asked: Asked<'static>,
    learned: Arc<Learned>,
    form: Form,
}

/// Decides on a request that comes from `peer`.
pub(super) fn decide(door: &Arc<Door>, parts: &mut Parts, peer: Option<SocketAddr>, size: &SizeHint) -> Gate {
    // A door whose answers are elsewhere has nothing behind it that could be another.
    if door.answers == Answers::Seen && !first_time(door, parts) {
        return Gate::Passed;
    }
    let learned = door.learned();
    let mut asked = match Asked::new(parts, size, &learned, peer, door.identify(parts)) {
        Ok(asked) => asked,
        Err(bad) => return Gate::Refused(answer::bad_request(bad, Form::of(&parts.headers)), Strike::default()),
    };
    let mut decision = Decision::default();
    let admit = |facts: &Facts<'_>| door.limiter.admit(&learned.policy, facts, door.answers, &mut decision);
    let Admitted { pending, if_full } = match asked.facts(admit) {
        Ok(admitted) => admitted,
        Err(error) => {
            return Gate::Refused(answer::impossible(&error, Form::of(&parts.headers)), Strike::default());
        }
    };
    asked.trace = decision.trace;
    let struck = !decision.escalations.is_empty();
    let strike = Strike(struck.then(|| door.limiter.saving()).flatten());
    let mut tab = pending.map(|pending| Box::new(Tab::new(Arc::clone(&door.limiter), pending)));
    if !decision.allowed() {
        return Gate::Refused(denied(&asked, &decision, &learned, Form::of(&parts.headers)), strike);
    }
    let fields = answer::fields(&decision, &learned.policy);
    let streams = learned.counts_bytes && size.exact().is_none();
    let count = streams
        .then(|| Box::new(Count { limiter: Arc::clone(&door.limiter), asked: asked.clone().into_owned(), seen: 0 }));
    if decision.delay == Span::ZERO {
        return Gate::Open(Crossing { fields, tab, strike }.left_to(door.answers), count);
    }
    let form = Form::of(&parts.headers);
    let Some(place) = door.pool.enter() else {
        if let Some(tab) = tab {
            tab.withdraw();
        }
        return Gate::Refused(denied(&asked, if_full.as_deref().unwrap_or(&decision), &learned, form), strike);
    };
    // Who waits occupies nothing. The hold was taken for an instant only, to ask whether there is any point in waiting;
    // it is taken again, alone, when the wait is over. All other limits are charged once, when the request comes.
    let holds = tab.as_ref().is_some_and(|tab| tab.has_holds());
    if let Some(tab) = &mut tab {
        tab.release_holds();
    }
    Gate::Slow(
        Box::new(Slowed {
            delay: Duration::from_micros(decision.delay.micros()),
            place: Some(place),
            crossing: Crossing { fields, tab, strike },
            holds: holds.then(|| Request { asked: asked.into_owned(), learned, form }),
            door: Arc::clone(door),
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

    /// Takes what the request holds while it lasts. Where that is no longer there, the request is refused after all, and
    /// what it was charged is given back.
    pub(super) fn cross(self) -> Waited {
        let Self { mut crossing, holds, door, .. } = self;
        let Some(request) = holds else { return Waited::Crosses(crossing.left_to(door.answers)) };
        let mut decision = Decision::default();
        let hold = |facts: &Facts<'_>| door.limiter.hold(&request.learned.policy, facts, &mut decision);
        let held = request.asked.facts(hold);
        let refusal = match held {
            Ok(Admitted { pending, .. }) if decision.allowed() => {
                if let (Some(tab), Some(pending)) = (&mut crossing.tab, pending) {
                    tab.hold_again(*pending);
                }
                return Waited::Crosses(crossing.left_to(door.answers));
            }
            Ok(_) => denied(&request.asked, &decision, &request.learned, request.form),
            Err(error) => answer::impossible(&error, request.form),
        };
        if let Some(tab) = crossing.tab {
            tab.withdraw();
        }
        Waited::Refused(refusal)
    }
}

fn denied(asked: &Asked<'_>, decision: &Decision, learned: &Learned, form: Form) -> Response<Bytes> {
    asked.facts(|facts| answer::denial(decision, &learned.policy, facts, form))
}
