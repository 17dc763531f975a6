//! The response future: a state machine from the decision to the service's response.

use std::fmt;
use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};

use bytes::Bytes;
use http::request::Parts;
use http::{Request, Response};
use http_body::Body;
use pin_project_lite::pin_project;
use tower_service::Service;

use super::answer::add_fields;
use super::body::{RequestBody, ResponseBody};
use super::gate::{Admission, Allowed, Delayed, Strike};
use super::layer::Door;
use super::pending_charges::Boxed;
use super::runtime::Task;

pin_project! {
    /// The response of a [`ThresholdService`](super::ThresholdService). If it is dropped early, the concurrency that the request
    /// holds is given back.
    #[must_use = "futures do nothing unless polled"]
    pub struct ResponseFuture<S, B>
    where
        S: Service<Request<RequestBody<B>>>,
    {
        #[pin]
        stage: Stage<S, B>,
    }
}

pin_project! {
    #[project = StageProjected]
    enum Stage<S, B>
    where
        S: Service<Request<RequestBody<B>>>,
    {
        /// The store has not answered yet.
        Deciding { deciding: Boxed<'static, Admission>, arrived: Option<Arrived<S, B>> },
        /// The request is refused; the response may wait for a strike to be on disk.
        Refused { response: Option<Response<Bytes>>, strike: Strike },
        /// The request is delayed.
        Waiting { sleep: Task, entering: Option<Entering<S, B>> },
        /// The request waits for the service to be ready.
        Entering { entering: Option<Entering<S, B>> },
        /// The delay is over, and the charges are moved to the present.
        Renewing { renewing: Boxed<'static, Allowed>, entered: Option<(S, Request<RequestBody<B>>)> },
        /// The service handles the request.
        Called { #[pin] future: S::Future, allowed: Option<Allowed> },
        /// The service has answered; the response may wait for a strike to be on disk.
        Answered { answer: Option<S::Response>, allowed: Option<Allowed> },
    }
}

/// A request whose decision is pending.
pub(super) struct Arrived<S, B> {
    pub(super) service: S,
    pub(super) door: Arc<Door>,
    pub(super) parts: Parts,
    pub(super) body: B,
}

/// A request that is called when the service is ready.
struct Entering<S, B> {
    service: S,
    request: Request<RequestBody<B>>,
    admitted: Admitted,
}

enum Admitted {
    /// Without a delay.
    Now(Allowed),
    /// After a delay.
    Delayed(Box<Delayed>),
}

impl<S, B> ResponseFuture<S, B>
where
    S: Service<Request<RequestBody<B>>>,
{
    pub(super) fn passing(future: S::Future) -> Self {
        Self { stage: Stage::Called { future, allowed: None } }
    }

    pub(super) fn allowed(future: S::Future, allowed: Allowed) -> Self {
        Self { stage: Stage::Called { future, allowed: Some(allowed) } }
    }

    pub(super) fn waiting(service: S, request: Request<RequestBody<B>>, delayed: Box<Delayed>) -> Self {
        Self { stage: Stage::waiting(service, request, delayed) }
    }

    pub(super) fn deciding(deciding: Boxed<'static, Admission>, arrived: Arrived<S, B>) -> Self {
        Self { stage: Stage::Deciding { deciding, arrived: Some(arrived) } }
    }

    pub(super) fn refused(response: Response<Bytes>, strike: Strike) -> Self {
        Self { stage: Stage::Refused { response: Some(response), strike } }
    }
}

/// Why `take` finds a value: each part is taken in the poll that ends its stage, and a future is not polled after it is ready.
const ONCE: &str = "a stage ends once";

impl<S, B, ResBody> Future for ResponseFuture<S, B>
where
    S: Service<Request<RequestBody<B>>, Response = Response<ResBody>>,
    ResBody: Body<Data = Bytes>,
{
    type Output = Result<Response<ResponseBody<ResBody>>, S::Error>;

    fn poll(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        let mut stage = self.project().stage;
        loop {
            let next = match stage.as_mut().project() {
                StageProjected::Deciding { deciding, arrived } => {
                    let admission = ready!(deciding.as_mut().poll(cx));
                    arrived.take().expect(ONCE).admit(admission)
                }
                StageProjected::Refused { response, strike } => {
                    ready!(strike.poll(cx));
                    let response = response.take().expect(ONCE);
                    return Poll::Ready(Ok(response.map(ResponseBody::refusal)));
                }
                StageProjected::Waiting { sleep, entering } => {
                    ready!(sleep.as_mut().poll(cx));
                    let mut entering = entering.take().expect(ONCE);
                    // Permits bound the requests that sleep. One that waits for the service must not keep others from
                    // being delayed.
                    if let Admitted::Delayed(delayed) = &mut entering.admitted {
                        delayed.release_permit();
                    }
                    Stage::Entering { entering: Some(entering) }
                }
                StageProjected::Entering { entering } => {
                    // This is a clone of the service, and only a service that was ready itself may be called.
                    ready!(entering.as_mut().expect(ONCE).service.poll_ready(cx))?;
                    entering.take().expect(ONCE).enter()
                }
                StageProjected::Renewing { renewing, entered } => {
                    let allowed = ready!(renewing.as_mut().poll(cx));
                    let (service, request) = entered.take().expect(ONCE);
                    Stage::called(service, request, allowed)
                }
                StageProjected::Called { future, allowed } => {
                    // After an error there is no response, so charges that depend on one stay. Concurrency is given
                    // back when this future is dropped.
                    let answer = ready!(future.poll(cx))?;
                    Stage::Answered { answer: Some(answer), allowed: allowed.take() }
                }
                StageProjected::Answered { answer, allowed } => {
                    // The client must not see the consequence of a strike that a crash could still undo.
                    if let Some(allowed) = allowed {
                        ready!(allowed.strike.poll(cx));
                    }
                    return Poll::Ready(Ok(answered(answer.take().expect(ONCE), allowed.take())));
                }
            };
            stage.set(next);
        }
    }
}

impl<S, B> Stage<S, B>
where
    S: Service<Request<RequestBody<B>>>,
{
    fn waiting(service: S, request: Request<RequestBody<B>>, delayed: Box<Delayed>) -> Self {
        let sleep = delayed.sleep();
        let entering = Entering { service, request, admitted: Admitted::Delayed(delayed) };
        Self::Waiting { sleep, entering: Some(entering) }
    }

    fn called(mut service: S, request: Request<RequestBody<B>>, mut allowed: Allowed) -> Self {
        // Before the call: if it panics, the service was called all the same.
        if let Some(pending) = &mut allowed.pending {
            pending.call();
        }
        Self::Called { future: service.call(request), allowed: Some(allowed) }
    }
}

impl<S, B> Arrived<S, B>
where
    S: Service<Request<RequestBody<B>>>,
{
    fn admit(self, admission: Admission) -> Stage<S, B> {
        let Self { service, door, parts, body } = self;
        let wrapped = |parts, count| Request::from_parts(parts, RequestBody::new(body, count));
        match admission {
            Admission::Allowed(allowed, count) => {
                let (request, admitted) = (wrapped(parts, count), Admitted::Now(allowed));
                Stage::Entering { entering: Some(Entering { service, request, admitted }) }
            }
            Admission::Delayed(delayed, count) => Stage::waiting(service, wrapped(parts, count), delayed),
            Admission::Refused(refused) => {
                let (response, strike) = door.respond(&parts, refused);
                Stage::Refused { response: Some(response), strike }
            }
        }
    }
}

impl<S, B> Entering<S, B>
where
    S: Service<Request<RequestBody<B>>>,
{
    fn enter(self) -> Stage<S, B> {
        let Self { service, request, admitted } = self;
        match admitted {
            Admitted::Now(allowed) => Stage::called(service, request, allowed),
            Admitted::Delayed(delayed) => {
                // Only once the service is ready, so that the figures are those of the moment at which it is called.
                Stage::Renewing { renewing: Box::pin(delayed.admit()), entered: Some((service, request)) }
            }
        }
    }
}

impl Strike {
    /// Resolves when the strike is on disk, or when that takes too long.
    fn poll(&mut self, cx: &mut Context<'_>) -> Poll<()> {
        if let Some(saving) = &mut self.0 {
            ready!(saving.as_mut().poll(cx));
            self.0 = None;
        }
        Poll::Ready(())
    }
}

/// Adds the rate-limit fields to the service's response. Concurrency is held until the body ends.
fn answered<B>(mut response: Response<B>, allowed: Option<Allowed>) -> Response<ResponseBody<B>> {
    let mut pending = None;
    if let Some(allowed) = allowed {
        add_fields(response.headers_mut(), allowed.fields);
        pending = allowed.pending;
    }
    if let Some(pending) = &mut pending {
        // The status decides what is charged, so this does not wait for the body.
        pending.answer(response.status().as_u16());
    }
    response.map(|body| ResponseBody::inner(body, pending.filter(|pending| pending.has_holds())))
}

impl<S, B> fmt::Debug for ResponseFuture<S, B>
where
    S: Service<Request<RequestBody<B>>>,
{
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let stage = match &self.stage {
            Stage::Deciding { .. } => "deciding",
            Stage::Refused { .. } => "refused",
            Stage::Waiting { .. } => "waiting",
            Stage::Entering { .. } => "entering",
            Stage::Renewing { .. } => "renewing",
            Stage::Called { .. } => "called",
            Stage::Answered { .. } => "answered",
        };
        f.debug_struct("ResponseFuture").field("stage", &stage).finish_non_exhaustive()
    }
}
