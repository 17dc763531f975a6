//! The layer on a runtime that is not tokio's, as in a Cloudflare Worker: no test here runs inside of tokio.

#![cfg(feature = "tower")]
#![expect(clippy::unwrap_used, reason = "a test that cannot go on should say so loudly, on the line where it stops")]

use std::convert::Infallible;
use std::future::Future;
use std::net::SocketAddr;
use std::pin::{Pin, pin};
use std::sync::{Arc, Mutex};
use std::task::{Context, Poll, Waker};
use std::time::Duration;

use http::{Request, Response, StatusCode};
use http_body_util::Empty;
use threshold_core::{Span, Timestamp};
use threshold_limiter::limiter::LimiterBuilder;
use threshold_limiter::tower::{PeerAddr, RequestBody, ResponseBody, Runtime, Task, ThresholdLayer};
use threshold_limiter::{Facts, Limiter, ManualClock, Policy};
use tokio::sync::oneshot;
use tower::{Layer as _, Service as _, service_fn};

use key_value::KeyValueStore;

#[path = "stores/key_value.rs"]
mod key_value;

type Bytes = axum::body::Bytes;
type Body = Empty<Bytes>;
type Answered = Result<Response<ResponseBody<Body>>, Infallible>;

const START: Timestamp = Timestamp::from_secs(1_767_225_600);
const CLIENT: ([u8; 4], u16) = ([203, 0, 113, 7], 4711);

/// A runtime that does nothing by itself: a test polls its tasks and ends its sleeps.
#[derive(Default)]
struct ByHand {
    tasks: Mutex<Vec<Task>>,
    sleeps: Mutex<Vec<(Duration, oneshot::Sender<()>)>>,
}

impl Runtime for ByHand {
    fn sleep(&self, delay: Duration) -> Task {
        let (end, ended) = oneshot::channel();
        self.sleeps.lock().unwrap().push((delay, end));
        Box::pin(async { drop(ended.await) })
    }

    fn spawn(&self, task: Task) {
        self.tasks.lock().unwrap().push(task);
    }
}

impl ByHand {
    /// Polls every task once. Returns how many go on.
    fn poll(&self) -> usize {
        // Taken out, because a task may spawn another one.
        let mut tasks = std::mem::take(&mut *self.tasks.lock().unwrap());
        tasks.retain_mut(|task| poll(task.as_mut()).is_none());
        let mut all = self.tasks.lock().unwrap();
        all.append(&mut tasks);
        all.len()
    }

    /// Polls a future and the tasks until it is ready, or until nothing changes any more.
    fn drive<F: Future>(&self, mut future: Pin<&mut F>) -> Option<F::Output> {
        (0..100).find_map(|_| {
            self.poll();
            poll(future.as_mut())
        })
    }

    /// Polls the tasks until all have ended.
    fn finish(&self) {
        assert!((0..100).any(|_| self.poll() == 0), "a task does not end");
    }
}

fn poll<F: Future + ?Sized>(future: Pin<&mut F>) -> Option<F::Output> {
    match future.poll(&mut Context::from_waker(Waker::noop())) {
        Poll::Ready(output) => Some(output),
        Poll::Pending => None,
    }
}

struct World {
    clock: Arc<ManualClock>,
    limiter: Arc<Limiter<KeyValueStore, Arc<ManualClock>>>,
    runtime: Arc<ByHand>,
}

impl World {
    fn new(policy: &str) -> Self {
        let clock = Arc::new(ManualClock::new(START));
        let policy = Policy::parse(policy, &|_| None).unwrap();
        let limiter = LimiterBuilder::new(policy, KeyValueStore::default(), Arc::clone(&clock)).build().unwrap();
        Self { clock, limiter: Arc::new(limiter), runtime: Arc::default() }
    }

    fn layer(&self) -> ThresholdLayer {
        ThresholdLayer::with_runtime(Arc::clone(&self.limiter), Arc::clone(&self.runtime) as Arc<dyn Runtime>).unwrap()
    }

    fn call(&self, layer: &ThresholdLayer) -> impl Future<Output = Answered> + use<> {
        let hello = |_: Request<RequestBody<Body>>| async { Ok::<_, Infallible>(Response::new(Body::new())) };
        let peer = PeerAddr(SocketAddr::from(CLIENT));
        let request = Request::builder().uri("/x").extension(peer).body(Body::new()).unwrap();
        layer.layer(service_fn(hello)).call(request)
    }

    fn remaining(&self) -> u64 {
        let facts = Facts { ip: Some(CLIENT.0.into()), cost: Some(0), ..Facts::default() };
        let peek = pin!(self.limiter.peek_async(&facts));
        self.runtime.drive(peek).unwrap().unwrap().bound_by().unwrap().remaining
    }
}

#[test]
fn a_shadow_ban_is_slept_on_the_runtime_of_the_host() {
    let world = World::new(
        "[ladders.quiet]\nrungs = ['shadow', 'deny']\n\
         [[rule]]\nname = 'ip'\nper = ['ip']\nlimit = '2/h'\nalgorithm = 'fixed-window'\nladder = 'quiet'",
    );
    let (layer, facts) = (world.layer(), Facts { ip: Some(CLIENT.0.into()), ..Facts::default() });
    for _ in 0..3 {
        assert!(world.runtime.drive(pin!(world.limiter.check_async(&facts))).unwrap().unwrap().allowed());
    }
    // The next hour begins with the shadow ban of the third request, and with nothing used.
    world.clock.advance(Span::HOUR);
    let mut delayed = pin!(world.call(&layer));
    assert!(world.runtime.drive(delayed.as_mut()).is_none(), "the request sleeps");
    let (delay, end) = world.runtime.sleeps.lock().unwrap().pop().unwrap();
    assert!((Duration::from_secs(1)..=Duration::from_secs(3)).contains(&delay), "{delay:?}");
    end.send(()).unwrap();
    assert_eq!(world.runtime.drive(delayed).unwrap().unwrap().status(), StatusCode::OK);
}

/// The client left while the store settled its request. In a Worker there was no tokio runtime to go on in, and the slot stayed
/// taken until its `ttl`.
#[test]
fn a_request_that_left_is_given_back_by_a_task_of_the_host() {
    let world = World::new("[[rule]]\nname = 'ip'\nper = ['ip']\nlimit = '1'\nalgorithm = 'concurrency'");
    let mut left = Box::pin(world.call(&world.layer()));
    assert!(poll(left.as_mut()).is_none());
    // The key-value store sends, executes, and answers: after the second poll the request is charged and not yet answered.
    world.runtime.poll();
    world.runtime.poll();
    drop(left);
    assert_eq!(world.remaining(), 0);
    world.runtime.finish();
    assert_eq!(world.remaining(), 1);
}

/// A Worker's tasks belong to one event, so each request brings a runtime of its own.
#[test]
fn each_request_may_bring_its_own_runtime() {
    let world = World::new("[[rule]]\nname = 'ip'\nper = ['ip']\nlimit = '5/h'");
    let own = Arc::new(ByHand::default());
    let layer = world.layer().runtime(Arc::clone(&own) as Arc<dyn Runtime>);
    let mut asked = pin!(world.call(&layer));
    assert!(world.runtime.drive(asked.as_mut()).is_none(), "the first runtime has no task of it");
    assert_eq!(own.drive(asked).unwrap().unwrap().status(), StatusCode::OK);
}
