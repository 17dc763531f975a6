//! Sends the decoders random bytes, and messages that are damaged.

use std::collections::VecDeque;
use std::convert::Infallible;
use std::io::Write as _;
use std::pin::Pin;
use std::task::{Context, Poll};

use bytes::Bytes;
use http_body::Frame;
use proptest::prelude::*;
use prost::Message as _;
use threshold_core::Policy;
use threshold_limiter::ManualClock;

use super::proto::{CheckRequest, Entry, RateLimitDescriptor, RateLimitOverride, RateLimitRequest};
use super::*;
use crate::desk::Desk;
use crate::door::Bounds;
use crate::door::client_memory::ClientMemory;
use crate::serve::Tokens;

/// How long each test goes on, unless `THRESHOLD_FUZZ_SECS` says otherwise.
const SECONDS: u64 = 1;

fn until_time_is_up(mut test: impl FnMut(&mut proptest::test_runner::TestRunner)) {
    let seconds = std::env::var("THRESHOLD_FUZZ_SECS").ok().map_or(SECONDS, |text| text.parse().unwrap());
    let begun = std::time::Instant::now();
    let mut runner = proptest::test_runner::TestRunner::new(ProptestConfig::with_cases(64));
    while begun.elapsed().as_secs() < seconds {
        test(&mut runner);
    }
}

fn descriptor() -> impl Strategy<Value = RateLimitDescriptor> {
    let key = prop_oneof![Just("remote_address".to_owned()), Just("user".to_owned()), ".{0,8}"];
    let text = prop_oneof![Just("192.0.2.1".to_owned()), Just("2001:db8::/64".to_owned()), ".{0,8}"];
    let value = prop_oneof![text.prop_map(String::into_bytes), any::<Vec<u8>>()];
    let entry = (key, value).prop_map(|(key, value)| Entry { key, value });
    let limit =
        (any::<u32>(), 0..9).prop_map(|(requests_per_unit, unit)| RateLimitOverride { requests_per_unit, unit });
    let parts = (prop::collection::vec(entry, 0..4), prop::option::of(limit), any::<Option<u64>>(), any::<bool>());
    parts.prop_map(|(entries, limit, hits_addend, is_negative_hits)| RateLimitDescriptor {
        entries,
        limit,
        hits_addend,
        is_negative_hits,
    })
}

const POLICY: &str = "[envoy.domains.all]\nnegative_hits = true\noverride = true\n[envoy.descriptors]\nuser = 'user'\n\
    [[rule]]\nname = 'ip'\nper = ['ip']\nlimit = '5/min'\n[[rule]]\nname = 'user'\nper = ['user']\nlimit = '5/h'\n\
    [[rule]]\nname = 'all'\nper = []\nlimit = '100/day'\nalgorithm = 'sliding-log'\n";

/// Every answer has a status for each descriptor, and none is unknown; everything else is an error. Woken by: `Code::Unknown`, and an
/// `unwrap` of what a message lacks.
#[test]
fn no_message_panics_or_has_an_unknown_answer() {
    let policy = Policy::parse(POLICY, &|_| None).unwrap();
    let app = App::new(Desk::new(policy, Arc::<ManualClock>::default()), Tokens::default(), Bounds::default());
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    let peer = SocketAddr::from(([127, 0, 0, 1], 4711));
    let ask = |bytes: Vec<u8>| {
        let message = Bytes::from(bytes);
        if let Ok(asked) = wire::decode::<RateLimitRequest>(message.clone())
            && let Ok(answer) = runtime.block_on(envoy::should_rate_limit(&app, &HeaderMap::new(), &asked))
        {
            assert_eq!(answer.statuses.len(), asked.descriptors.len());
            assert!(
                matches!(answer.overall_code, 1 | 2) && answer.statuses.iter().all(|own| matches!(own.code, 1 | 2))
            );
        }
        if let Ok(asked) = wire::decode::<CheckRequest>(message) {
            let _ = runtime.block_on(ext_authz::check(&app, peer, asked));
        }
    };
    let domain = prop_oneof![Just("all".to_owned()), Just("edge".to_owned()), Just(String::new())];
    let request = (domain, prop::collection::vec(descriptor(), 0..18), any::<u32>());
    let damaged = (request, any::<prop::sample::Index>(), any::<Option<u8>>()).prop_map(
        |((domain, descriptors, hits_addend), at, byte)| {
            let mut bytes = RateLimitRequest { domain, descriptors, hits_addend }.encode_to_vec();
            if let (Some(byte), false) = (byte, bytes.is_empty()) {
                let at = at.index(bytes.len());
                bytes[at] = byte;
            }
            bytes
        },
    );
    let bytes = prop_oneof![3 => damaged, 1 => prop::collection::vec(any::<u8>(), 0..200)];
    until_time_is_up(|runner| {
        runner
            .run(&bytes, |bytes| {
                ask(bytes);
                Ok(())
            })
            .unwrap();
    });
}

/// A body in several frames.
struct FramedBody(VecDeque<Bytes>);

impl http_body::Body for FramedBody {
    type Data = Bytes;
    type Error = Infallible;

    fn poll_frame(mut self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, Infallible>>> {
        Poll::Ready(self.0.pop_front().map(|data| Ok(Frame::data(data))))
    }
}

/// Compresses a message.
fn gzip(message: &[u8]) -> Vec<u8> {
    let mut encoder = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::fast());
    encoder.write_all(message).unwrap();
    encoder.finish().unwrap()
}

/// Woken by: leaving out the comparison of lengths in `unframe`.
#[test]
fn a_message_is_read_alike_in_any_number_of_frames() {
    let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
    let memory = ClientMemory::for_bodies(64);
    let cases = (prop::collection::vec(any::<u8>(), 0..40), any::<prop::sample::Index>(), 0..8_u8);
    until_time_is_up(|runner| {
        runner
            .run(&cases, |(message, cut, length)| {
                let framed = [&[0, 0, 0, 0, length][..], &message].concat();
                let (before, after) = framed.split_at(cut.index(framed.len()));
                let frames = FramedBody([before, after].map(Bytes::copy_from_slice).into());
                let none = HeaderMap::new();
                let read: Result<RateLimitRequest, _> = runtime.block_on(wire::read(&none, frames, 64, &memory));
                let whole = wire::unframe(Bytes::from(framed)).and_then(|(_, message)| wire::decode(message));
                prop_assert_eq!(read, whole);
                Ok(())
            })
            .unwrap();
    });
}

/// Woken by: leaving out `take` or the `acquire` in `inflate`, or either length.
#[test]
fn what_a_message_expands_to_is_bounded_and_holds_memory() {
    const MAX: usize = 64 << 10;
    let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
    let fields = HeaderMap::from_iter([("grpc-encoding".parse().unwrap(), "gzip".parse().unwrap())]);
    let read = |message: &[u8], memory: &ClientMemory| {
        let framed = [&[1], &u32::try_from(message.len()).unwrap().to_be_bytes()[..], message].concat();
        let body = FramedBody([Bytes::from(framed)].into());
        let read: Result<RateLimitRequest, _> = runtime.block_on(wire::read(&fields, body, MAX, memory));
        read.map(|asked| asked.encoded_len()).map_err(|error| error.code)
    };
    // A message of this length, which is mostly one text.
    let asked = |length: usize| {
        let text = |length| RateLimitRequest { domain: "d".repeat(length), ..RateLimitRequest::default() };
        let rest = text(length).encoded_len() - length;
        gzip(&text(length - rest).encode_to_vec())
    };
    let (free, full) = (ClientMemory::for_bodies(MAX), ClientMemory::for_bodies(MAX));
    let _held = full.try_acquire(MAX).unwrap();
    let denied = Err(GrpcCode::ResourceExhausted);
    for (length, where_free, where_full) in [
        (1_000, Ok(1_000), Ok(1_000)),
        (MAX / 2, Ok(MAX / 2), denied),
        (MAX, Ok(MAX), denied),
        (MAX + 1, denied, denied),
        (64 << 20, denied, denied),
    ] {
        let compressed = asked(length);
        assert_eq!((read(&compressed, &free), read(&compressed, &full)), (where_free, where_full), "{length}");
    }
    assert_eq!(read(&asked(1_000)[..20], &free), Err(GrpcCode::InvalidArgument));
}
