//! The answer to come: at once for a refusal, after a wait for some, and else when the service has it.

use std::fmt;
use std::future::Future;
use std::pin::Pin;
use std::task::{Context, Poll, ready};

use bytes::Bytes;
use http::request::Parts;
use http::{Request, Response};
use http_body::Body;
use pin_project_lite::pin_project;
use tokio::time::Sleep;
use tower_service::Service;

use super::answer::add_fields;
use super::body::{RequestBody, ResponseBody};
use super::gate::{Admission, Crossing, Slowed, Strike};
use super::pending_charges::Boxed;

pin_project! {
    /// The answer of a [`ThresholdService`](super::ThresholdService). Dropped early, it gives back what the request holds.
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
        /// Refused, and not told yet.
        Refused { response: Option<Response<Bytes>>, strike: Strike },
        /// Waiting before it may cross.
        Waiting { #[pin] sleep: Sleep, entering: Option<Entering<S, B>> },
        /// Waiting for the service to be ready.
        Entering { entering: Option<Entering<S, B>> },
        /// It has waited, and its charges are moved to now.
        Renewing { renewing: Boxed<'static, Crossing>, entered: Option<(S, Request<RequestBody<B>>)> },
        /// The service is at work.
        Called { #[pin] future: S::Future, crossing: Option<Crossing> },
        /// The service has answered, and a strike is being written down.
        Answered { answer: Option<S::Response>, crossing: Option<Crossing> },
    }
}

/// A request that the store is asked about.
pub(super) struct Arrived<S, B> {
    pub(super) service: S,
    pub(super) parts: Parts,
    pub(super) body: B,
}

/// A request that is to cross when the service is ready.
struct Entering<S, B> {
    service: S,
    request: Request<RequestBody<B>>,
    admitted: Admitted,
}

enum Admitted {
    /// At once.
    Now(Crossing),
    /// It has waited.
    Slowed(Box<Slowed>),
}

impl<S, B> ResponseFuture<S, B>
where
    S: Service<Request<RequestBody<B>>>,
{
    pub(super) fn passing(future: S::Future) -> Self {
        Self { stage: Stage::Called { future, crossing: None } }
    }

    pub(super) fn crossing(future: S::Future, crossing: Crossing) -> Self {
        Self { stage: Stage::Called { future, crossing: Some(crossing) } }
    }

    pub(super) fn waiting(service: S, request: Request<RequestBody<B>>, slowed: Box<Slowed>) -> Self {
        Self { stage: Stage::waiting(service, request, slowed) }
    }

    pub(super) fn deciding(deciding: Boxed<'static, Admission>, arrived: Arrived<S, B>) -> Self {
        Self { stage: Stage::Deciding { deciding, arrived: Some(arrived) } }
    }

    pub(super) fn refused(response: Response<Bytes>, strike: Strike) -> Self {
        Self { stage: Stage::Refused { response: Some(response), strike } }
    }
}

/// Why a part of a stage is there: it is taken in the poll that ends the stage, and no poll follows an answer.
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
                    ready!(sleep.poll(cx));
                    let mut entering = entering.take().expect(ONCE);
                    if let Admitted::Slowed(slowed) = &mut entering.admitted {
                        slowed.leave_pool();
                    }
                    Stage::Entering { entering: Some(entering) }
                }
                StageProjected::Entering { entering } => {
                    ready!(entering.as_mut().expect(ONCE).service.poll_ready(cx))?;
                    entering.take().expect(ONCE).enter()
                }
                StageProjected::Renewing { renewing, entered } => {
                    let crossing = ready!(renewing.as_mut().poll(cx));
                    let (service, request) = entered.take().expect(ONCE);
                    Stage::called(service, request, crossing)
                }
                StageProjected::Called { future, crossing } => {
                    let answer = ready!(future.poll(cx))?;
                    Stage::Answered { answer: Some(answer), crossing: crossing.take() }
                }
                StageProjected::Answered { answer, crossing } => {
                    if let Some(crossing) = crossing {
                        ready!(crossing.strike.poll(cx));
                    }
                    return Poll::Ready(Ok(answered(answer.take().expect(ONCE), crossing.take())));
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
    fn waiting(service: S, request: Request<RequestBody<B>>, slowed: Box<Slowed>) -> Self {
        let sleep = tokio::time::sleep(slowed.delay);
        let entering = Entering { service, request, admitted: Admitted::Slowed(slowed) };
        Self::Waiting { sleep, entering: Some(entering) }
    }

    fn called(mut service: S, request: Request<RequestBody<B>>, mut crossing: Crossing) -> Self {
        if let Some(pending) = &mut crossing.pending {
            pending.call();
        }
        Self::Called { future: service.call(request), crossing: Some(crossing) }
    }
}

impl<S, B> Arrived<S, B>
where
    S: Service<Request<RequestBody<B>>>,
{
    fn admit(self, admission: Admission) -> Stage<S, B> {
        let Self { service, parts, body } = self;
        let wrapped = |count| Request::from_parts(parts, RequestBody::new(body, count));
        match admission {
            Admission::Open(crossing, count) => {
                let (request, admitted) = (wrapped(count), Admitted::Now(crossing));
                Stage::Entering { entering: Some(Entering { service, request, admitted }) }
            }
            Admission::Slow(slowed, count) => Stage::waiting(service, wrapped(count), slowed),
            Admission::Refused(response, strike) => Stage::Refused { response: Some(response), strike },
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
            Admitted::Now(crossing) => Stage::called(service, request, crossing),
            Admitted::Slowed(slowed) => {
                Stage::Renewing { renewing: Box::pin(slowed.cross()), entered: Some((service, request)) }
            }
        }
    }
}

impl Strike {
    /// Ready once it is written down, or has taken too long.
    fn poll(&mut self, cx: &mut Context<'_>) -> Poll<()> {
        if let Some(saving) = &mut self.0 {
            ready!(saving.as_mut().poll(cx));
            self.0 = None;
        }
        Poll::Ready(())
    }
}

/// The service's answer with what the client is told, holding what the request holds until its body ends.
fn answered<B>(mut response: Response<B>, crossing: Option<Crossing>) -> Response<ResponseBody<B>> {
    let mut pending = None;
    if let Some(crossing) = crossing {
        add_fields(response.headers_mut(), crossing.fields);
        pending = crossing.pending;
    }
    if let Some(pending) = &mut pending {
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
