//! The decision on one request: it is allowed, delayed, or refused.

use std::net::IpAddr;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use http::request::Parts;
use http::{HeaderMap, HeaderValue, Response};
use http_body::SizeHint;
use threshold_core::{Decision, PlanError};

use super::answer::{self, Form};
use super::body::Count;
use super::layer::Door;
use super::pending_charges::{Admitted, Answers, Boxed, PendingCharges, Undecided};
use super::pool::Permit;
use super::request_facts::{Lines, Peer, PolicyView, RequestFacts, address};
use super::runtime::{Background, Task};
use crate::random_id;
use crate::store::Durability;

/// The limiters that have decided on a request, as an extension of it.
#[derive(Debug, Clone, Default)]
struct Decided(Vec<usize>);

/// The state of the decision on a request.
pub(super) enum Gate {
    /// The request is not decided here: an outer layer of this limiter has done so, or the application skips it.
    Passed,
    /// The store has not answered yet; the future resolves with the decision.
    Deciding(Boxed<'static, Admission>),
    /// The decision was made.
    Decided(Admission),
}

/// The decision on a request.
pub(super) enum Admission {
    /// The request goes to the service.
    Allowed(Allowed, Option<Box<Count>>),
    /// The request goes to the service after a delay.
    Delayed(Box<Delayed>, Option<Box<Count>>),
    /// The request is answered here.
    Refused(Refused),
}

/// A request that is answered here, not by the service.
pub(super) struct Refused {
    pub(super) response: Response<Bytes>,
    /// The response waits until this is on disk.
    pub(super) strike: Strike,
    /// The decision and its policy; kept only where the application makes the response, since a decision is large.
    pub(super) denied: Option<(Box<Decision>, Arc<PolicyView>)>,
}

/// A strike that is being written to the journal; `None` without a strike or without a journal.
#[derive(Default)]
pub(super) struct Strike(pub(super) Option<Durability>);

impl std::fmt::Debug for Strike {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_tuple("Strike").field(&self.0.is_some()).finish()
    }
}

/// An allowed request: the fields of its response, and what it gives back when it ends.
#[derive(Debug)]
pub(super) struct Allowed {
    pub(super) fields: HeaderMap,
    pub(super) pending: Option<Box<PendingCharges>>,
    /// The response waits until this is on disk.
    pub(super) strike: Strike,
}

/// A request of a shadow-banned caller, which is delayed.
#[derive(Debug)]
pub(super) struct Delayed {
    delay: Duration,
    background: Background,
    permit: Option<Permit>,
    pending: Option<Box<PendingCharges>>,
    strike: Strike,
    request_facts: RequestFacts<'static>,
    view: Arc<PolicyView>,
    decision: Decision,
    answers: Answers,
}

/// Refuses a request without a decision, and notifies observers.
#[cold]
fn refused(
    door: &Door,
    view: &PolicyView,
    (ip, reason): (Option<IpAddr>, &str),
    undecided: answer::Undecided<'_>,
    form: Form,
) -> Admission {
    // No plan was made that would have drawn one.
    let trace = random_id();
    let answer = undecided.response(&view.policy, trace, form);
    // A gRPC error has the HTTP status 200.
    let request = Undecided { ip, status: answer.status().as_u16(), reason, trace };
    door.limiter.tell_refused(&request, &view.policy);
    Admission::Refused(Refused { response: answer, strike: Strike::default(), denied: None })
}

/// Decides on a request from `peer`.
pub(super) fn decide(door: &Arc<Door>, parts: &mut Parts, peer: Peer, size: &SizeHint) -> Gate {
    if door.skips(parts) {
        return Gate::Passed;
    }
    // There is no service behind a layer that only decides, and so no second layer.
    if door.answers == Answers::Seen && !first_time(door, parts) {
        return Gate::Passed;
    }
    let view = door.view();
    let form = Form::of(&parts.headers);
    // Without a verifier no claim is read, and every rule that counts by one would be skipped.
    if view.policy.lacks_token_verifier() {
        let reason = (address(parts, &view, peer), super::layer::NO_VERIFIER);
        return Gate::Decided(refused(door, &view, reason, answer::Undecided::unavailable(), form));
    }
    let claims = |lines: &Lines<'_>| door.tokens.claims(&view.policy, lines);
    let request_facts = match RequestFacts::new(parts, size, &view, peer, door.identify(parts), claims) {
        Ok(request_facts) => request_facts,
        Err(bad) => {
            let ip = address(parts, &view, peer);
            let undecided = answer::Undecided::bad_request(bad);
            return Gate::Decided(refused(door, &view, (ip, bad.message), undecided, form));
        }
    };
    // The body does not guarantee a length, so bytes beyond the announced one are charged once they have streamed.
    let streams = view.counts_bytes && size.exact().is_none();
    if !door.limiter.answers_at_once() {
        return Gate::Deciding(deciding(Arc::clone(door), request_facts.into_owned(), view, form, streams));
    }
    let mut decision = Decision::default();
    let admitted = door.limiter.admit_at_once(&view.policy, &request_facts, door.answers, &mut decision);
    Gate::Decided(decided(door, request_facts, view, form, streams, decision, admitted))
}

/// Decides on a store that is not immediate. The decision continues in the background if the client leaves: only then is it
/// known what was charged, and must be given back.
fn deciding(
    door: Arc<Door>,
    request_facts: RequestFacts<'static>,
    view: Arc<PolicyView>,
    form: Form,
    streams: bool,
) -> Boxed<'static, Admission> {
    let background = door.background.clone();
    let deciding = async move {
        let mut decision = Decision::default();
        let admitted = door.limiter.admit(&view.policy, &request_facts, door.answers, &mut decision).await;
        decided(&door, request_facts, view, form, streams, decision, admitted)
    };
    match background.start(deciding) {
        // A panic in the decision reaches the caller, as it would without a task.
        Ok(task) => Box::pin(task.join()),
        // Too many tasks, or no runtime. Decided by the request itself, its charges may stay if the client leaves
        // meanwhile.
        Err(deciding) => Box::pin(deciding),
    }
}

/// Turns a decision into an admission.
fn decided(
    door: &Arc<Door>,
    mut request_facts: RequestFacts<'_>,
    view: Arc<PolicyView>,
    form: Form,
    streams: bool,
    decision: Decision,
    admitted: Result<Admitted, PlanError>,
) -> Admission {
    let Admitted { pending, if_full } = match admitted {
        Ok(admitted) => admitted,
        Err(error) => {
            let reason = error.to_string();
            // Without any source of addresses no request ever has one: a mistake of the program, not of its clients.
            let is_misconfigured = matches!(error, PlanError::Missing { .. }) && !request_facts.has_address_source();
            let undecided = if is_misconfigured {
                door.report_no_address();
                answer::Undecided::no_address()
            } else {
                answer::Undecided::impossible(&error, &reason)
            };
            return refused(door, &view, (request_facts.ip(), &reason), undecided, form);
        }
    };
    request_facts.trace = decision.trace;
    let struck = !decision.escalations.is_empty();
    // Nothing else that a decision changes has to survive a crash.
    let strike = Strike(struck.then(|| door.limiter.durability()).flatten());
    let (limiter, background) = (&door.limiter, &door.background);
    let pending =
        pending.map(|pending| Box::new(PendingCharges::new(Arc::clone(limiter), background.clone(), pending)));
    if !decision.allowed() {
        let response = denied(&request_facts, &decision, &view, form);
        let denied = door.makes_responses().then(|| (Box::new(decision), view));
        return Admission::Refused(Refused { response, strike, denied });
    }
    let count = streams.then(|| {
        let (limiter, background) = (Arc::clone(limiter), background.clone());
        Box::new(Count { limiter, background, request_facts: request_facts.clone().into_owned(), seen: 0 })
    });
    if decision.delay().is_zero() {
        let fields = answer::fields(&decision, &view.policy);
        return Admission::Allowed(Allowed { fields, pending, strike }.keep_pending(door.answers), count);
    }
    if let Some(name) = &door.delay_field {
        let mut fields = answer::fields(&decision.after_delay(), &view.policy);
        let millis = u64::try_from(decision.delay().as_millis()).unwrap_or(u64::MAX);
        fields.insert(name.clone(), HeaderValue::from(millis));
        return Admission::Allowed(Allowed { fields, pending, strike }.keep_pending(door.answers), count);
    }
    let Some(permit) = door.pool.acquire() else {
        if let Some(pending) = pending {
            pending.withdraw();
        }
        // Denied as if a limit were used up: any other answer would reveal the shadow ban.
        let decision = if_full.map_or(decision, |if_full| *if_full);
        let response = denied(&request_facts, &decision, &view, form);
        let denied = door.makes_responses().then(|| (Box::new(decision), view));
        return Admission::Refused(Refused { response, strike, denied });
    };
    // It is charged now and holds its concurrency while it is delayed: after the delay nothing is decided again.
    Admission::Delayed(
        Box::new(Delayed {
            delay: decision.delay(),
            background: background.clone(),
            permit: Some(permit),
            pending,
            strike,
            request_facts: request_facts.into_owned(),
            view,
            decision,
            answers: door.answers,
        }),
        count,
    )
}

/// Returns whether no other layer of this limiter has decided on this request.
fn first_time(door: &Door, parts: &mut Parts) -> bool {
    // Nested layers of one limiter would charge a request twice.
    let decided = parts.extensions.get_or_insert_default::<Decided>();
    let first = !decided.0.contains(&door.id());
    if first {
        decided.0.push(door.id());
    }
    first
}

impl Allowed {
    /// Keeps the pending charges only if they may be given back and the response is seen here.
    fn keep_pending(mut self, answers: Answers) -> Self {
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

impl Delayed {
    /// Returns a future that resolves when the delay is over.
    pub(super) fn sleep(&self) -> Task {
        self.background.sleep(self.delay)
    }

    /// Returns the permit when the delay is over.
    pub(super) fn release_permit(&mut self) {
        self.permit = None;
    }

    /// Lets the request through after its delay. Its charges move to the present, and its response has the present figures:
    /// those of its arrival would reveal the delay.
    pub(super) async fn admit(self: Box<Self>) -> Allowed {
        let Self { mut pending, strike, request_facts, view, mut decision, answers, .. } = *self;
        if let Some(pending) = &mut pending {
            pending.renew(&view.policy, &request_facts, &mut decision).await;
        }
        let fields = answer::fields(&decision, &view.policy);
        Allowed { fields, pending, strike }.keep_pending(answers)
    }
}

fn denied(request_facts: &RequestFacts<'_>, decision: &Decision, view: &PolicyView, form: Form) -> Response<Bytes> {
    request_facts.facts(|facts| answer::denial(decision, &view.policy, facts, form))
}
