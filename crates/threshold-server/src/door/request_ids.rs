//! Answers that are remembered by the id of their request, so that a repeat within a minute is charged no second time.
//!
//! Both doors share one bound in bytes. A caller of the API that sends a `requestId` is promised that it is charged once:
//! room for its answer is taken before the request is decided, and where there is none, the request is refused and charges
//! nothing. A proxy that sends `X-Threshold-Request-Id` is promised nothing: its answers use the room that is left, and the
//! oldest make room for others.
//!
//! On a store that other nodes share, the store is asked too: it knows what they were asked, and tells them of what is
//! answered here. Repeats that come to the same node wait for each other here, without asking the store.

mod bytes;
#[cfg(test)]
mod shared;
#[cfg(test)]
mod tests;

use std::collections::hash_map::Entry;
use std::collections::{HashMap, VecDeque};
use std::hash::Hash;
#[cfg(test)]
use std::hash::{BuildHasher as _, RandomState};
use std::pin::pin;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use ::bytes::Bytes;
use http::{HeaderMap, HeaderName, HeaderValue, StatusCode};
use threshold_core::{Digest, DigestKey, Span, Timestamp};
use threshold_limiter::store::StoreError;
use tokio::sync::watch;

use super::ApiError;
use super::http::Answered;
use crate::desk::{Beginning, Begun, Desk, MEMORY, SharedRequests};

/// So that ids seldom wait for each other.
const SHARDS: usize = 16;
/// The room that is taken for an answer while it is not there yet: most take less, also under many rules.
const EXPECTED: usize = 4_096;
/// What an answer takes beside its own bytes: its places in the map and in the queue, which may be half empty, and what the
/// allocator adds.
const OVERHEAD: usize = 384;
/// What a header field takes besides its text.
const FIELD: usize = 96;
/// Callers of the API may use all but one part in so many, which is left for proxies.
const PARTS: usize = 8;
/// An answer that is forgotten sooner than this may be gone before the list is decided that it is in.
const SOON: Span = Span::from_secs(10);
/// How often a proxy is given an answer again. nginx follows ten internal redirects and answers 500 to the next.
const MAX_REPEATS: u8 = 10;
/// How soon the store is asked again whether another node has answered, at first and at last: each time twice as late.
const ASK_AGAIN: [Duration; 2] = [Duration::from_millis(10), Duration::from_millis(250)];

/// The answers of the last minute.
#[derive(Debug)]
pub(super) struct RequestIds {
    /// A secret: nobody can prepare ids or requests that are taken for each other, or that meet in one shard.
    key: DigestKey,
    /// Those of all nodes, where there may be others.
    shared: Option<SharedRequests>,
    shards: [Mutex<Shard>; SHARDS],
    /// The most bytes of all answers.
    most: usize,
    /// The bytes of the answers to callers of the API, of those that are there and those under way.
    promised: AtomicUsize,
    /// The bytes of the answers to proxies.
    spare: AtomicUsize,
    /// The shard that makes room next.
    next: AtomicUsize,
}

/// An id, and what was asked under it.
#[derive(Debug, Clone, Copy)]
pub(super) struct Named {
    pub(super) id: Digest,
    pub(super) question: Digest,
}

/// Why a request with an id is not decided.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Refused {
    /// There is no room to remember another answer.
    NoRoom,
    /// The id was used for another request.
    Reused,
    /// Another node has remembered the answer, and this one cannot read it.
    Unreadable,
}

/// Room for answers that are not there yet; what is left of it is given back.
#[derive(Debug)]
pub(super) struct Room<'r> {
    ids: &'r RequestIds,
    bytes: usize,
    /// Those that the other nodes know to be carried out here.
    begun: HashMap<Digest, Begun>,
}

#[derive(Debug, Default)]
struct Shard {
    answers: HashMap<Digest, Remembered>,
    /// When the API's were remembered, oldest first.
    promised: VecDeque<(Timestamp, Digest)>,
    /// When the proxies' were remembered, oldest first.
    spare: VecDeque<(Timestamp, Digest)>,
    /// Which ids are being decided, and for what; the receiver is told when that is over. Bounded by the requests under way.
    under_way: HashMap<Digest, (Digest, watch::Receiver<()>)>,
}

#[derive(Debug)]
struct Remembered {
    at: Timestamp,
    question: Digest,
    answer: Answer,
    /// What it takes in all.
    bytes: usize,
}

#[derive(Debug)]
enum Answer {
    Api(Answered),
    Proxy { fields: Box<[(HeaderName, HeaderValue)]>, repeats: u8 },
}

/// Bytes that are free again.
#[derive(Debug, Default, Clone, Copy)]
struct Freed {
    promised: usize,
    spare: usize,
}

/// What is known of an id.
enum Known<'r> {
    Answer(Answered),
    /// It is being decided by another.
    UnderWay(watch::Receiver<()>),
    /// It was used, or is being used, for another request.
    Reused,
    /// Nothing: it is this one's to decide.
    Nothing(Ticket<'r>),
}

/// The right to decide on an id. When it is dropped, the next in line has it.
struct Ticket<'r> {
    ids: &'r RequestIds,
    named: Named,
    _over: watch::Sender<()>,
}

impl From<Refused> for ApiError {
    fn from(refused: Refused) -> Self {
        let (status, error, message) = match refused {
            Refused::NoRoom => (
                StatusCode::SERVICE_UNAVAILABLE,
                "too_many_request_ids",
                "there is no room to remember another requestId; nothing was charged: try again later, or send the \
                 request without an id",
            ),
            Refused::Reused => (
                StatusCode::UNPROCESSABLE_ENTITY,
                "request_id_reused",
                "this requestId was used for a different request within the last minute; nothing was charged: send each \
                 request with an id of its own",
            ),
            Refused::Unreadable => (
                StatusCode::SERVICE_UNAVAILABLE,
                "unavailable",
                "this request was charged before, and another node remembers its answer in a form that this one does not \
                 read; nothing was charged again",
            ),
        };
        Self::new(status, error, message).about(Some("requestId".to_owned()))
    }
}

impl RequestIds {
    /// Remembers at most so many bytes, and asks the desk's store where other nodes share it.
    pub(super) fn of(desk: &Desk, most: usize) -> Self {
        Self::keyed(desk.digest_key(), desk.shared_requests(), most)
    }

    /// Remembers at most so many bytes, for nobody else.
    #[cfg(test)]
    pub(super) fn new(most: usize) -> Self {
        let random = || RandomState::new().hash_one(()).to_be_bytes();
        let mut key = [0; 16];
        key[..8].copy_from_slice(&random());
        key[8..].copy_from_slice(&random());
        Self::keyed(DigestKey::new(key), None, most)
    }

    fn keyed(key: DigestKey, shared: Option<SharedRequests>, most: usize) -> Self {
        Self {
            key,
            shared,
            shards: std::array::from_fn(|_| Mutex::default()),
            most,
            promised: AtomicUsize::new(0),
            spare: AtomicUsize::new(0),
            next: AtomicUsize::new(0),
        }
    }

    pub(super) fn digest(&self, value: &impl Hash) -> Digest {
        self.key.request(value)
    }

    /// The answer that this id was given within the last minute, else what `decide` says. A repeat that comes while the
    /// first is being decided waits for it. `room` is used up first, where there is any.
    ///
    /// # Errors
    /// Where the id is of another request, where there is no room for the answer, and where `decide` fails.
    pub(super) async fn run<E: From<Refused>>(
        &self,
        named: Named,
        now: impl Fn() -> Timestamp,
        mut room: Option<&mut Room<'_>>,
        decide: impl Future<Output = Result<Answered, E>>,
    ) -> Result<Answered, E> {
        let mut begun = room.as_mut().and_then(|room| room.begun.remove(&named.id));
        let ticket = loop {
            match self.look(named, now()) {
                Known::Answer(answer) => return Ok(answer),
                Known::UnderWay(mut over) => {
                    // The other one waits until this one has ended in the store.
                    if let Some(begun) = begun.take() {
                        begun.end(None).await;
                    }
                    // It ends by an error: nothing is ever sent.
                    drop(over.changed().await);
                }
                Known::Reused => return Err(Refused::Reused.into()),
                Known::Nothing(ticket) => break ticket,
            }
        };
        let begun = match &self.shared {
            None => None,
            Some(shared) => match begun_or_answered(shared, named, begun).await? {
                Started::Begun(begun) => Some(begun),
                // Remembered by the store, until its minute is over.
                Started::Answered(answer) => return Ok(answer),
                Started::Alone => None,
            },
        };
        let room = match room.and_then(Room::split) {
            Some(room) => room,
            None => self.room(1, now())?,
        };
        let mut decide = pin!(decide);
        let answer = match &begun {
            Some(begun) => begun.during(decide.as_mut()).await?,
            None => decide.as_mut().await?,
        };
        // A denial is decided again.
        if answer.charged {
            self.remember(ticket.named, &answer, room, now());
        }
        if let Some(begun) = begun {
            begun.end(answer.charged.then(|| bytes::of_answer(&answer))).await;
        }
        Ok(answer)
    }

    /// Room for the answers to a list, as [`room_for`](Self::room_for) has it, and the other nodes know of its requests.
    ///
    /// # Errors
    /// As for `room_for`.
    pub(super) async fn open(
        &self,
        list: &[Named],
        now: impl Fn() -> Timestamp,
    ) -> Result<Room<'_>, (Option<usize>, Refused)> {
        let mut room = self.room_for(list, now())?;
        let Some(shared) = &self.shared else { return Ok(room) };
        for (place, named) in list.iter().enumerate() {
            if self.shard(named.id).answer(named.id, now()).is_some() {
                continue;
            }
            match shared.begin((named.id, named.question), None).await {
                Ok(Beginning::Begun(begun)) => {
                    room.begun.insert(named.id, begun);
                }
                Ok(Beginning::Reused) => return Err((Some(place), Refused::Reused)),
                // What is there, or will be, is asked for when it is its turn.
                Ok(Beginning::Answered(_) | Beginning::UnderWay) => {}
                Err(StoreError::Full) => return Err((None, Refused::NoRoom)),
                // The others would wait as long for nothing.
                Err(_) => break,
            }
        }
        Ok(room)
    }

    /// The requests of all nodes, where there may be others.
    pub(super) fn shared(&self) -> Option<&SharedRequests> {
        self.shared.as_ref()
    }

    /// Room for the answers to those of a list whose ids are not known: it is decided as a whole, or not at all.
    ///
    /// # Errors
    /// The place in `list` of an id that is of another request; or none, where there is no room.
    pub(super) fn room_for(&self, list: &[Named], now: Timestamp) -> Result<Room<'_>, (Option<usize>, Refused)> {
        let mut seen: HashMap<Digest, Digest> = HashMap::with_capacity(list.len());
        let mut unknown = 0usize;
        for (place, named) in list.iter().enumerate() {
            match seen.entry(named.id) {
                Entry::Occupied(before) if *before.get() != named.question => {
                    return Err((Some(place), Refused::Reused));
                }
                Entry::Occupied(_) => {}
                Entry::Vacant(first) => {
                    first.insert(named.question);
                    if self.shard(named.id).is_reused(*named, now) {
                        return Err((Some(place), Refused::Reused));
                    }
                    if self.shard(named.id).answer(named.id, now.plus(SOON)).is_none() {
                        unknown = unknown.saturating_add(1);
                    }
                }
            }
        }
        self.room(unknown, now).map_err(|refused| (None, refused))
    }

    /// The fields that a proxy was answered this question with within the last minute.
    pub(super) fn repeat(&self, question: Digest, now: Timestamp) -> Option<HeaderMap> {
        let mut shard = self.shard(question);
        let known = shard.answers.get_mut(&question).filter(|known| now < known.at.plus(MEMORY))?;
        let Answer::Proxy { fields, repeats } = &mut known.answer else { return None };
        *repeats = repeats.checked_add(1).filter(|repeats| *repeats <= MAX_REPEATS)?;
        Some(fields.iter().cloned().collect())
    }

    /// Remembers the fields of an answer to a proxy, as far as there is room.
    pub(super) fn keep(&self, question: Digest, now: Timestamp, headers: &HeaderMap) {
        let fields: Box<[_]> = headers.iter().map(|(name, value)| (name.clone(), value.clone())).collect();
        let text = |(name, value): &(HeaderName, HeaderValue)| {
            FIELD.saturating_add(name.as_str().len()).saturating_add(value.len())
        };
        let bytes = fields.iter().map(text).fold(OVERHEAD, usize::saturating_add);
        self.spare.fetch_add(bytes, Ordering::Relaxed);
        // Before it is there, so that it does not make room for itself.
        if !self.evict() {
            self.give_back(Freed { promised: 0, spare: bytes });
            return;
        }
        let mut shard = self.shard(question);
        let mut freed = shard.sweep(now);
        let answer = Answer::Proxy { fields, repeats: 0 };
        freed.add(shard.insert(question, Remembered { at: now, question, answer, bytes }));
        drop(shard);
        self.give_back(freed);
    }

    fn room(&self, answers: usize, now: Timestamp) -> Result<Room<'_>, Refused> {
        let bytes = answers.saturating_mul(EXPECTED);
        if !self.promise(bytes) {
            // Those whose minute is over are mostly forgotten when another is remembered.
            for shard in &self.shards {
                let freed = lock(shard).sweep(now);
                self.give_back(freed);
            }
            if !self.promise(bytes) {
                return Err(Refused::NoRoom);
            }
        }
        self.evict();
        Ok(Room { ids: self, bytes, begun: HashMap::new() })
    }

    fn promise(&self, bytes: usize) -> bool {
        let most = self.most.saturating_sub(self.most.checked_div(PARTS).unwrap_or(0));
        let fits = |promised: usize| promised.checked_add(bytes).filter(|promised| *promised <= most);
        self.promised.fetch_update(Ordering::Relaxed, Ordering::Relaxed, fits).is_ok()
    }

    fn give_back(&self, freed: Freed) {
        self.promised.fetch_sub(freed.promised, Ordering::Relaxed);
        self.spare.fetch_sub(freed.spare, Ordering::Relaxed);
    }

    /// How many bytes there are too many.
    fn over(&self) -> usize {
        let used = self.promised.load(Ordering::Relaxed).saturating_add(self.spare.load(Ordering::Relaxed));
        used.saturating_sub(self.most)
    }

    /// Forgets answers to proxies until all fit, a shard's oldest first; says whether they do.
    fn evict(&self) -> bool {
        for _ in 0..SHARDS {
            let over = self.over();
            if over == 0 {
                return true;
            }
            let number = self.next.fetch_add(1, Ordering::Relaxed);
            if let Some(shard) = number.checked_rem(SHARDS).and_then(|number| self.shards.get(number)) {
                let freed = lock(shard).evict(over);
                self.give_back(freed);
            }
        }
        self.over() == 0
    }

    fn remember(&self, named: Named, answer: &Answered, mut room: Room<'_>, now: Timestamp) {
        // A copy, since what was written has room for more than it holds.
        let answer = Answered { body: Bytes::copy_from_slice(&answer.body), ..answer.clone() };
        let bytes = answer.body.len().saturating_add(OVERHEAD);
        // Few take more than they were expected to. Those are kept too: they were charged.
        self.promised.fetch_add(bytes, Ordering::Relaxed);
        self.give_back(Freed { promised: std::mem::take(&mut room.bytes), spare: 0 });
        let Named { id, question } = named;
        let mut shard = self.shard(id);
        let mut freed = shard.sweep(now);
        freed.add(shard.insert(id, Remembered { at: now, question, answer: Answer::Api(answer), bytes }));
        drop(shard);
        self.give_back(freed);
        self.evict();
    }

    fn look(&self, named: Named, now: Timestamp) -> Known<'_> {
        let mut shard = self.shard(named.id);
        if shard.is_reused(named, now) {
            return Known::Reused;
        }
        if let Some(answer) = shard.answer(named.id, now) {
            return Known::Answer(answer.clone());
        }
        if let Some((_, over)) = shard.under_way.get(&named.id) {
            return Known::UnderWay(over.clone());
        }
        let (sender, over) = watch::channel(());
        shard.under_way.insert(named.id, (named.question, over));
        Known::Nothing(Ticket { ids: self, named, _over: sender })
    }

    fn shard(&self, id: Digest) -> MutexGuard<'_, Shard> {
        let [first, _] = id.halves();
        // The four highest bits: there are sixteen of them.
        let number = usize::try_from(first >> 60).unwrap_or(0);
        lock(self.shards.get(number).expect("four bits number sixteen shards"))
    }
}

/// How a request starts whose id no other on this node has.
enum Started {
    Begun(Begun),
    /// It was carried out by another node.
    Answered(Answered),
    /// The store cannot answer: what becomes of the request then is the policy's to say, and the others do not hear of it.
    Alone,
}

/// Begins a request, unless this node has, or waits until another one has answered it.
async fn begun_or_answered(
    shared: &SharedRequests,
    named: Named,
    mut begun: Option<Begun>,
) -> Result<Started, Refused> {
    let [mut pause, longest] = ASK_AGAIN;
    loop {
        let beginning = match begun.take() {
            Some(begun) if !begun.is_old() => return Ok(Started::Begun(begun)),
            Some(begun) => begun.confirm(None).await,
            None => shared.begin((named.id, named.question), None).await,
        };
        match beginning {
            Ok(Beginning::Begun(begun)) => return Ok(Started::Begun(begun)),
            Ok(Beginning::Answered(bytes)) => {
                return bytes::to_answer(&bytes).map(Started::Answered).ok_or(Refused::Unreadable);
            }
            Ok(Beginning::Reused) => return Err(Refused::Reused),
            Ok(Beginning::UnderWay) => {
                tokio::time::sleep(pause).await;
                pause = pause.saturating_mul(2).min(longest);
            }
            Err(StoreError::Full) => return Err(Refused::NoRoom),
            Err(_) => return Ok(Started::Alone),
        }
    }
}

/// A proxy's question that this node answers, of which the others are to hear.
pub(super) struct OwnedQuestion(Begun);

impl OwnedQuestion {
    /// The fields that a proxy was answered this question with, by any node; else who tells the others what it is answered,
    /// unless they cannot hear of it.
    pub(super) async fn begin(shared: &SharedRequests, question: Digest) -> Result<HeaderMap, Option<Self>> {
        match shared.begin((question, question), Some(u32::from(MAX_REPEATS))).await {
            Ok(Beginning::Answered(fields)) => bytes::to_fields(&fields).ok_or(None),
            Ok(Beginning::Begun(begun)) => Err(Some(Self(begun))),
            // Nobody was promised anything.
            Ok(Beginning::UnderWay | Beginning::Reused) | Err(_) => Err(None),
        }
    }

    /// Tells the other nodes what the proxy is answered; nothing where it is denied.
    pub(super) async fn end(self, fields: Option<&HeaderMap>) {
        self.0.end(fields.map(bytes::of_fields)).await;
    }
}

impl Room<'_> {
    /// Room for one answer out of this.
    fn split(&mut self) -> Option<Self> {
        self.bytes = self.bytes.checked_sub(EXPECTED)?;
        Some(Self { ids: self.ids, bytes: EXPECTED, begun: HashMap::new() })
    }
}

impl Drop for Room<'_> {
    fn drop(&mut self) {
        self.ids.give_back(Freed { promised: self.bytes, spare: 0 });
    }
}

impl Drop for Ticket<'_> {
    fn drop(&mut self) {
        self.ids.shard(self.named.id).under_way.remove(&self.named.id);
    }
}

impl Freed {
    fn add(&mut self, other: Self) {
        self.promised = self.promised.saturating_add(other.promised);
        self.spare = self.spare.saturating_add(other.spare);
    }
}

impl Remembered {
    fn freed(&self) -> Freed {
        match self.answer {
            Answer::Api(_) => Freed { promised: self.bytes, spare: 0 },
            Answer::Proxy { .. } => Freed { promised: 0, spare: self.bytes },
        }
    }
}

impl Shard {
    /// The answer that the API gave to this id, if it is remembered at `now`.
    fn answer(&self, id: Digest, now: Timestamp) -> Option<&Answered> {
        match self.live(id, now) {
            Some(Remembered { answer: Answer::Api(answer), .. }) => Some(answer),
            _ => None,
        }
    }

    fn live(&self, id: Digest, now: Timestamp) -> Option<&Remembered> {
        self.answers.get(&id).filter(|known| now < known.at.plus(MEMORY))
    }

    /// Whether this id was answered, or is being decided, for another request.
    fn is_reused(&self, named: Named, now: Timestamp) -> bool {
        let answered = self.live(named.id, now).map(|known| known.question);
        let question = answered.or_else(|| self.under_way.get(&named.id).map(|(question, _)| *question));
        question.is_some_and(|question| question != named.question)
    }

    /// Remembers an answer; says what another one took in its place.
    fn insert(&mut self, id: Digest, remembered: Remembered) -> Freed {
        let at = remembered.at;
        let order = match remembered.answer {
            Answer::Api(_) => &mut self.promised,
            Answer::Proxy { .. } => &mut self.spare,
        };
        let before = self.answers.insert(id, remembered);
        // One that is replaced at the same instant has its place.
        if before.as_ref().is_none_or(|before| before.at != at) {
            order.push_back((at, id));
        }
        // Places of answers that were replaced are taken out before there are more of them than of the others.
        if order.len() > self.answers.len().saturating_mul(2).saturating_add(SHARDS) {
            order.retain(|(at, id)| self.answers.get(id).is_some_and(|known| known.at == *at));
        }
        before.map(|before| before.freed()).unwrap_or_default()
    }

    /// Forgets the answers whose minute is over; says what they took.
    fn sweep(&mut self, now: Timestamp) -> Freed {
        let mut freed = Freed::default();
        for order in [&mut self.promised, &mut self.spare] {
            while let Some((at, id)) = order.pop_front_if(|(at, _)| now >= at.plus(MEMORY)) {
                freed.add(forget(&mut self.answers, id, at));
            }
        }
        freed
    }

    /// Forgets the oldest answers to proxies, so many bytes of them; says what they took.
    fn evict(&mut self, bytes: usize) -> Freed {
        let mut freed = Freed::default();
        while freed.spare < bytes {
            let Some((at, id)) = self.spare.pop_front() else { break };
            freed.add(forget(&mut self.answers, id, at));
        }
        freed
    }
}

/// Forgets the answer that was remembered at this time: the id may have been remembered again since.
fn forget(answers: &mut HashMap<Digest, Remembered>, id: Digest, at: Timestamp) -> Freed {
    match answers.entry(id) {
        Entry::Occupied(known) if known.get().at == at => known.remove().freed(),
        _ => Freed::default(),
    }
}

fn lock(shard: &Mutex<Shard>) -> MutexGuard<'_, Shard> {
    shard.lock().unwrap_or_else(PoisonError::into_inner)
}
