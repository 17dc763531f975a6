//! The body of a check, a peek, a record or a reservation: one request or a list. Unknown, mistyped or oversized fields are
//! refused by name.

use std::fmt;
use std::hash::{Hash, Hasher};

use serde::de::value::MapAccessDeserializer;
use serde::de::{Error as _, MapAccess, SeqAccess, Visitor};
use serde::{Deserialize, Deserializer};
use threshold_core::plan::Verb;
use threshold_core::policy::Policy;
use threshold_core::receipt::{MAX_RESERVATION, OnExpire};
use threshold_core::{Facts, Span, TraceId};

use super::ApiError;
use super::names::{Address, Method, RequestId};
use super::read::Object;
use super::text::{Pairs, Text, Whole};

/// How long a reservation lasts by default, in seconds.
const DEFAULT_TTL_SECS: u64 = 60;
/// The most requests in one list.
pub const MAX_ITEMS: usize = 1_000;

/// Facts of a request. All are optional: `on_missing` says what a rule does without one that it needs.
#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "camelCase", default, expecting = "an object of facts")]
#[cfg_attr(feature = "schemas", derive(schemars::JsonSchema), schemars(rename = "Request"))]
pub struct RequestBody<'a> {
    /// The client's address.
    ip: Option<Address>,
    /// The host the request is for.
    #[serde(borrow)]
    host: Option<Text<'a>>,
    /// Whose customer this is.
    #[serde(borrow)]
    tenant: Option<Text<'a>>,
    /// Who is calling.
    #[serde(borrow)]
    user: Option<Text<'a>>,
    /// The tenant's plan.
    #[serde(borrow)]
    tier: Option<Text<'a>>,
    /// The method, in any case: a token of RFC 9110.
    #[serde(borrow)]
    method: Option<Method<'a>>,
    /// The path, in any spelling.
    #[serde(borrow)]
    path: Option<Text<'a>>,
    /// The cost in requests; 1 by default, and 0 charges nothing.
    cost: Option<Whole>,
    /// The cost in bytes.
    bytes: Option<Whole>,
    /// The costs in named units.
    #[serde(borrow)]
    costs: Option<Pairs<'a, Whole>>,
    /// Facts of your own, by name.
    #[serde(borrow)]
    facts: Option<Pairs<'a, Text<'a>>>,
    /// The header fields that rules count by.
    #[serde(borrow)]
    headers: Option<HeaderPairs<'a>>,
    /// The endpoint, if you know it better than the policy: your router's matched route.
    #[serde(borrow)]
    endpoint: Option<Text<'a>>,
    /// The category, if you know it better than the policy.
    #[serde(borrow)]
    category: Option<Text<'a>>,
    /// Your own id of this request: it is charged at most once in 60 seconds, however often it is sent. A different request
    /// with the same id within that time is answered with 422 `request_id_reused`.
    #[serde(borrow)]
    request_id: Option<RequestId<'a>>,
    /// How long a reservation lasts, in seconds; 60 by default.
    #[cfg_attr(feature = "schemas", schemars(range(min = 1, max = 3_600)))]
    ttl_sec: Option<Whole>,
    /// Whether a reservation that is neither committed nor released stays charged or is refunded when it expires.
    on_expire: Option<Expiry>,
}

/// Hashes the meaning of a request without its id: a repeat has the same hash in whatever order its fields come.
impl Hash for RequestBody<'_> {
    fn hash<H: Hasher>(&self, state: &mut H) {
        // Every field is named: a field that is added later and left out of the hash would let two different requests
        // share an answer.
        let Self {
            ip,
            host,
            tenant,
            user,
            tier,
            method,
            path,
            cost,
            bytes,
            costs,
            facts,
            headers,
            endpoint,
            category,
            request_id: _,
            ttl_sec,
            on_expire,
        } = self;
        ip.map(|Address(ip)| ip).hash(state);
        let method = method.as_ref().map(|Method(method)| method);
        let texts = [host, tenant, user, tier, path, endpoint, category].map(Option::as_ref);
        for text in texts.into_iter().chain([method]) {
            // An empty text means the same as none to the policy, so a repeat may send either.
            text.map(Text::as_str).filter(|text| !text.is_empty()).hash(state);
        }
        // A default that is written out means the same as none.
        for (number, default) in [(cost, 1), (bytes, 0), (ttl_sec, DEFAULT_TTL_SECS)] {
            number.map_or(default, Whole::number).hash(state);
        }
        on_expire.unwrap_or(Expiry::Charge).hash(state);
        // Sorted, because the order of names in a JSON object has no meaning, and some clients change it at each
        // request.
        let mut costs = Pairs::costs(costs.as_ref());
        costs.sort_unstable();
        costs.hash(state);
        for pairs in [facts.as_ref(), headers.as_ref().map(|HeaderPairs(pairs)| pairs)] {
            let mut pairs = Pairs::texts(pairs);
            pairs.sort_unstable();
            pairs.hash(state);
        }
    }
}

/// One request, or a list of them.
#[derive(Debug)]
pub enum Requests<'a> {
    /// One request.
    One(Box<RequestBody<'a>>),
    /// A list of at most [`MAX_ITEMS`].
    Many(Vec<RequestBody<'a>>),
}

/// Header fields, with their names in lower case.
#[derive(Debug)]
pub(super) struct HeaderPairs<'a>(Pairs<'a, Text<'a>>);

/// What happens to a reservation that expires: it stays charged, or is refunded.
#[derive(Debug, Clone, Copy, Hash, Deserialize)]
#[serde(rename_all = "lowercase")]
#[cfg_attr(feature = "schemas", derive(schemars::JsonSchema))]
enum Expiry {
    Charge,
    Release,
}

/// The maps of a request, as [`Facts`] borrows them.
#[derive(Debug)]
pub struct Lists<'r> {
    facts: Vec<(&'r str, &'r str)>,
    headers: Vec<(&'r str, &'r str)>,
    costs: Vec<(&'r str, u64)>,
}

impl RequestBody<'_> {
    /// Returns the request's maps in the form of [`Facts`].
    #[must_use]
    pub fn lists(&self) -> Lists<'_> {
        Lists {
            facts: Pairs::texts(self.facts.as_ref()),
            headers: self.headers.as_ref().map(|headers| Pairs::texts(Some(&headers.0))).unwrap_or_default(),
            costs: Pairs::costs(self.costs.as_ref()),
        }
    }

    /// Returns the facts of the request. `lists` is what [`lists`](Self::lists) returned.
    #[must_use]
    pub fn facts<'r>(&'r self, lists: &'r Lists<'_>, trace: TraceId) -> Facts<'r> {
        fn text<'t>(text: &'t Option<Text<'_>>) -> Option<&'t str> {
            text.as_ref().map(Text::as_str)
        }
        Facts {
            ip: self.ip.map(|address| address.0),
            host: text(&self.host),
            method: self.method.as_ref().map(|method| method.0.as_str()),
            path: text(&self.path),
            route: None,
            from_client: false,
            tenant: text(&self.tenant),
            user: text(&self.user),
            tier: text(&self.tier),
            category: text(&self.category),
            endpoint: text(&self.endpoint),
            facts: &lists.facts,
            headers: &lists.headers,
            cost: self.cost.map(Whole::number),
            bytes: self.bytes.map(Whole::number),
            costs: &lists.costs,
            trace,
        }
    }

    /// Returns the caller's own id of the request.
    #[must_use]
    pub fn request_id(&self) -> Option<&str> {
        self.request_id.as_ref().map(RequestId::as_str)
    }

    /// Refuses a `requestId`, for a host that does not remember answers.
    ///
    /// # Errors
    /// 400 if the request has an id: a host that ignored it would charge a repeat again.
    pub fn without_request_id(&self) -> Result<(), ApiError> {
        self.request_id().map_or(Ok(()), |_| Err(ApiError::not_served("requestId", "charging a repeated request once")))
    }

    /// Returns how long a reservation lasts, and what happens to its charges when it expires.
    ///
    /// # Errors
    /// 400 if `ttlSec` is 0 or too long.
    pub fn reservation_terms(&self) -> Result<(Span, OnExpire), ApiError> {
        let ttl = Span::from_secs(self.ttl_sec.map_or(DEFAULT_TTL_SECS, Whole::number));
        if ttl == Span::ZERO || ttl > MAX_RESERVATION {
            let max = MAX_RESERVATION.secs_ceil();
            return Err(ApiError::bad("ttlSec", format!("ttlSec must be from 1 to {max}")));
        }
        Ok((ttl, self.on_expire.map(OnExpire::from).unwrap_or_default()))
    }

    /// Plans a request of a list without asking the store: a list with an invalid item charges nothing, so every item is
    /// planned before the first is charged.
    ///
    /// # Errors
    /// The error that deciding this request would return, without the index in the list.
    pub fn validate(&self, verb: Verb, policy: &Policy) -> Result<(), ApiError> {
        self.without_reservation()?;
        let lists = self.lists();
        let planned = policy.plan_for(verb, &self.facts(&lists, TraceId::default()));
        planned.map(drop).map_err(ApiError::from)
    }

    /// Refuses the fields that only a reservation has.
    ///
    /// # Errors
    /// 400 if the request has one of them.
    pub fn without_reservation(&self) -> Result<(), ApiError> {
        // Ignored, they would let a caller believe that a check expires by itself.
        let field = self.ttl_sec.map(|_| "ttlSec").or_else(|| self.on_expire.map(|_| "onExpire"));
        match field {
            None => Ok(()),
            Some(field) => Err(ApiError::bad(field, format!("only /v1/reserve takes {field}"))),
        }
    }
}

impl From<Expiry> for OnExpire {
    fn from(expiry: Expiry) -> Self {
        match expiry {
            Expiry::Charge => Self::Charge,
            Expiry::Release => Self::Release,
        }
    }
}

impl<'de: 'a, 'a> Deserialize<'de> for Requests<'a> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Read;
        impl<'de> Visitor<'de> for Read {
            type Value = Requests<'de>;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("an object of facts, or a list of them")
            }

            fn visit_map<A: MapAccess<'de>>(self, map: A) -> Result<Requests<'de>, A::Error> {
                RequestBody::deserialize(MapAccessDeserializer::new(map)).map(Box::new).map(Requests::One)
            }

            fn visit_seq<A: SeqAccess<'de>>(self, mut items: A) -> Result<Requests<'de>, A::Error> {
                let mut requests = Vec::new();
                // The bound is tested before the item is kept, so that a long list takes no more memory than the
                // longest valid one.
                while let Some(Object(request)) = items.next_element()? {
                    if requests.len() == MAX_ITEMS {
                        return Err(A::Error::custom(format!("a list has at most {MAX_ITEMS} items")));
                    }
                    requests.push(request);
                }
                Ok(Requests::Many(requests))
            }
        }
        deserializer.deserialize_any(Read)
    }
}

impl<'de: 'a, 'a> Deserialize<'de> for HeaderPairs<'a> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let mut pairs = Pairs::deserialize(deserializer)?;
        // Header names have no case, and rules name them in lower case.
        pairs.lower_names();
        Ok(Self(pairs))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::read_requests;

    /// A Worker has no store for request ids. It must not charge a repeat twice while its caller believes otherwise.
    #[test]
    fn a_host_without_request_ids_says_so() {
        let id = |body: &str| match read_requests(body.as_bytes()).unwrap() {
            Requests::One(request) => request.without_request_id(),
            Requests::Many(_) => panic!("one request"),
        };
        assert_eq!(id(r#"{"user": "u1"}"#), Ok(()));
        let refused = id(r#"{"user": "u1", "requestId": "r1"}"#).unwrap_err();
        assert_eq!(
            refused.to_json(),
            "{\"error\":\"bad_request\",\"message\":\"charging a repeated request once is served by `threshold serve` only: \
             leave out requestId\",\"field\":\"requestId\"}"
        );
    }
}
