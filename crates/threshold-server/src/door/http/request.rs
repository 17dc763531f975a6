//! The JSON bodies that callers send. Unknown, mistyped or oversized fields are refused by name.

use std::borrow::Cow;
use std::fmt;
use std::hash::{Hash, Hasher};
use std::net::IpAddr;

use http::StatusCode;
use schemars::JsonSchema;
use serde::de::value::MapAccessDeserializer;
use serde::de::{Error as _, MapAccess, SeqAccess, Visitor};
use serde::{Deserialize, Deserializer};
use serde_path_to_error::{Path, Segment};
use threshold_core::address::parse_address;
use threshold_core::limit::Algorithm;
use threshold_core::path::is_method;
use threshold_core::policy::Layer;
use threshold_core::receipt::OnExpire;
use threshold_core::{Facts, TraceId};

use super::text::{Pairs, Text, Whole};
use crate::door::ApiError;

/// The most requests in one list.
pub(super) const MAX_ITEMS: usize = 1_000;

/// Facts of a request. All are optional: `on_missing` says what a rule does without one that it needs.
#[derive(Debug, Default, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, rename_all = "camelCase", default, expecting = "an object of facts")]
#[schemars(rename = "Request")]
pub(super) struct RequestBody<'a> {
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
    pub(super) request_id: Option<RequestId<'a>>,
    /// How long a reservation lasts, in seconds; 60 by default.
    #[schemars(range(min = 1, max = 3_600))]
    pub(super) ttl_sec: Option<Whole>,
    /// Whether a reservation that is neither committed nor released stays charged or is refunded when it expires.
    pub(super) on_expire: Option<Expiry>,
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
        for (number, default) in [(cost, 1), (bytes, 0), (ttl_sec, super::DEFAULT_TTL_SECS)] {
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
pub(super) enum OneOrMany<'a> {
    One(Box<RequestBody<'a>>),
    Many(Vec<RequestBody<'a>>),
}

/// Ends a reservation with its actual cost. A cost that is left out stays as it was reserved.
#[derive(Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, expecting = "an object")]
#[schemars(rename = "Commit")]
pub(super) struct CommitBody<'a> {
    #[serde(borrow)]
    pub(super) reservation: Text<'a>,
    pub(super) cost: Option<Whole>,
    pub(super) bytes: Option<Whole>,
    #[serde(borrow)]
    pub(super) costs: Option<Pairs<'a, Whole>>,
}

/// Ends a reservation without any cost.
#[derive(Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, expecting = "an object")]
#[schemars(rename = "Release")]
pub(super) struct ReleaseBody<'a> {
    #[serde(borrow)]
    pub(super) reservation: Text<'a>,
}

/// Gives back what a receipt was charged.
#[derive(Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, expecting = "an object")]
#[schemars(rename = "Refund")]
pub(super) struct RefundBody<'a> {
    #[serde(borrow)]
    pub(super) receipt: Text<'a>,
}

/// Denies a subject for a while.
#[derive(Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, expecting = "an object")]
#[schemars(rename = "Pause")]
pub(super) struct PauseBody<'a> {
    pub(super) layer: LayerName,
    /// The address, tenant, user or endpoint; empty for the global layer.
    #[serde(borrow, default)]
    pub(super) key: Text<'a>,
    /// For how many seconds, at most a year.
    #[schemars(range(min = 1, max = 31_536_000))]
    pub(super) seconds: Whole,
}

/// Checks one limit by a key of your own; no policy is needed.
#[derive(Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, rename_all = "camelCase", expecting = "an object")]
#[schemars(rename = "Limit", extend("oneOf" = [
    {"required": ["windowSec"], "properties": {"windowSec": {"type": "integer"}, "windowSeconds": {"type": "null"}}},
    {"required": ["windowSeconds"], "properties": {"windowSec": {"type": "null"}, "windowSeconds": {"type": "integer"}}},
]))]
pub(super) struct LimitBody<'a> {
    /// The key that is counted.
    #[serde(borrow)]
    #[schemars(length(min = 1))]
    pub(super) key: Text<'a>,
    /// The most cost in one window.
    #[schemars(range(min = 1, max = 999_999_999_999_999u64))]
    pub(super) limit: Whole,
    /// The length of a window in seconds; for concurrency, how long a request counts that never ends.
    #[schemars(range(min = 1, max = 3_153_600_000u64))]
    window_sec: Option<Whole>,
    /// The same as `windowSec`.
    #[schemars(range(min = 1, max = 3_153_600_000u64))]
    window_seconds: Option<Whole>,
    /// The algorithm; sliding-log by default. A sliding-log over 1,024 is served by sliding-window, and the answer says so.
    pub(super) algorithm: Option<AlgorithmName>,
    /// The cost; 1 by default, and 0 charges nothing.
    pub(super) cost: Option<Whole>,
}

/// Header fields, with their names in lower case.
#[derive(Debug)]
pub(super) struct HeaderPairs<'a>(Pairs<'a, Text<'a>>);

/// An IPv4 or IPv6 address.
#[derive(Debug, Clone, Copy)]
pub(in crate::door) struct Address(pub(in crate::door) IpAddr);

/// A method, or an empty string, which means none.
#[derive(Debug)]
pub(super) struct Method<'a>(Text<'a>);

/// A caller's id of a request: 1 to 128 characters.
#[derive(Debug)]
pub(super) struct RequestId<'a>(pub(super) Cow<'a, str>);

/// What happens to a reservation that expires: it stays charged, or is refunded.
#[derive(Debug, Clone, Copy, Hash, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub(super) enum Expiry {
    Charge,
    Release,
}

/// The name of a layer.
#[derive(Debug, Clone, Copy)]
pub(in crate::door) struct LayerName(pub(in crate::door) Layer);

/// The name of an algorithm.
#[derive(Debug, Clone, Copy)]
pub(super) struct AlgorithmName(pub(super) Algorithm);

/// Parses a body. An error names the field and, in a list, the item.
pub(in crate::door) fn read<'a, T: Deserialize<'a>>(body: &'a [u8]) -> Result<T, ApiError> {
    serde_json::from_slice(body).map(|Object(value)| value).map_err(|error| refusal::<Object<T>>(body, &error))
}

/// Parses one request or a list, as [`read`] does.
pub(super) fn read_requests(body: &[u8]) -> Result<OneOrMany<'_>, ApiError> {
    serde_json::from_slice(body).map_err(|error| refusal::<OneOrMany<'_>>(body, &error))
}

/// Finds the field of an error by parsing once more: to track the path every time would slow down valid requests.
#[cold]
fn refusal<'a, T: Deserialize<'a>>(body: &'a [u8], error: &serde_json::Error) -> ApiError {
    let message = error.to_string();
    // serde_json reports a number out of range as a syntax error, but it is valid JSON and belongs to a field.
    if !error.is_data() && !message.starts_with("number out of range") {
        return ApiError::new(StatusCode::BAD_REQUEST, "bad_request", format!("this is not JSON: {message}"));
    }
    let mut reader = serde_json::Deserializer::from_slice(body);
    // The error is the same as before, so the second one is used only for its path.
    let (index, mut field) = match serde_path_to_error::deserialize::<_, T>(&mut reader) {
        Err(tracked) => place(tracked.path()),
        Ok(_) => (None, String::new()),
    };
    // For an unknown, missing or duplicate field the path ends at its object, and only the message names the field.
    let named = ["unknown field `", "missing field `", "duplicate field `"];
    if let Some(name) = named.iter().find_map(|start| message.strip_prefix(start)?.split('`').next()) {
        // For a duplicate, the path may already end with the name.
        if !field.is_empty() && !field.ends_with(name) {
            field.push('.');
            field.push_str(name);
        } else if field.is_empty() {
            field.push_str(name);
        }
    }
    let field = (!field.is_empty()).then_some(field);
    ApiError::new(StatusCode::BAD_REQUEST, "bad_request", message).about(field).at(index)
}

/// Returns the index in a list, and the path of the field.
fn place(path: &Path) -> (Option<usize>, String) {
    let mut index = None;
    let mut names: Vec<&str> = Vec::new();
    for segment in path {
        match segment {
            // Only the outermost list is one of requests. An index further inside belongs to a field.
            Segment::Seq { index: item } if index.is_none() && names.is_empty() => index = Some(*item),
            Segment::Map { key } => names.push(key),
            _ => {}
        }
    }
    (index, names.join("."))
}

/// The maps of a request, as [`Facts`] borrows them.
#[derive(Debug)]
pub(super) struct Lists<'r> {
    facts: Vec<(&'r str, &'r str)>,
    headers: Vec<(&'r str, &'r str)>,
    costs: Vec<(&'r str, u64)>,
}

impl LimitBody<'_> {
    /// Returns the length of a window in seconds, and the name of its field.
    pub(super) fn window(&self) -> Result<(u64, &'static str), ApiError> {
        match (self.window_sec, self.window_seconds) {
            (Some(seconds), None) => Ok((seconds.number(), "windowSec")),
            (None, Some(seconds)) => Ok((seconds.number(), "windowSeconds")),
            (None, None) => Err(ApiError::bad("windowSec", "missing field `windowSec`")),
            // Refused even if both are equal: which of them counts must not depend on the order of fields.
            (Some(_), Some(_)) => {
                Err(ApiError::bad("windowSeconds", "windowSec and windowSeconds are the same: send one of them"))
            }
        }
    }
}

impl RequestBody<'_> {
    pub(super) fn lists(&self) -> Lists<'_> {
        Lists {
            facts: Pairs::texts(self.facts.as_ref()),
            headers: self.headers.as_ref().map(|headers| Pairs::texts(Some(&headers.0))).unwrap_or_default(),
            costs: Pairs::costs(self.costs.as_ref()),
        }
    }

    /// Returns the facts of the request. `lists` is what [`lists`](Self::lists) returned.
    pub(super) fn facts<'r>(&'r self, lists: &'r Lists<'_>, trace: TraceId) -> Facts<'r> {
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

    /// Refuses the fields that only a reservation has.
    pub(super) fn without_reservation(&self) -> Result<(), ApiError> {
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

/// A JSON object. serde's derived structs would also accept an array of their values.
struct Object<T>(T);

impl<'de, T: Deserialize<'de>> Deserialize<'de> for Object<T> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Read<T>(std::marker::PhantomData<T>);
        impl<'de, T: Deserialize<'de>> Visitor<'de> for Read<T> {
            type Value = T;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("an object")
            }

            fn visit_map<A: MapAccess<'de>>(self, map: A) -> Result<T, A::Error> {
                T::deserialize(MapAccessDeserializer::new(map))
            }
        }
        deserializer.deserialize_map(Read(std::marker::PhantomData)).map(Self)
    }
}

impl<'de: 'a, 'a> Deserialize<'de> for OneOrMany<'a> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Read;
        impl<'de> Visitor<'de> for Read {
            type Value = OneOrMany<'de>;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("an object of facts, or a list of them")
            }

            fn visit_map<A: MapAccess<'de>>(self, map: A) -> Result<OneOrMany<'de>, A::Error> {
                RequestBody::deserialize(MapAccessDeserializer::new(map)).map(Box::new).map(OneOrMany::One)
            }

            fn visit_seq<A: SeqAccess<'de>>(self, mut items: A) -> Result<OneOrMany<'de>, A::Error> {
                let mut requests = Vec::new();
                // The bound is tested before the item is kept, so that a long list takes no more memory than the
                // longest valid one.
                while let Some(Object(request)) = items.next_element()? {
                    if requests.len() == MAX_ITEMS {
                        return Err(A::Error::custom(format!("a list has at most {MAX_ITEMS} items")));
                    }
                    requests.push(request);
                }
                Ok(OneOrMany::Many(requests))
            }
        }
        deserializer.deserialize_any(Read)
    }
}

/// Returns the layer with this name. `ip` is another name of the edge, whose subjects are addresses.
pub(in crate::door) fn layer_named(text: &str) -> Option<Layer> {
    if text == EDGE_ALIAS {
        return Some(Layer::Edge);
    }
    super::schema::LAYERS.into_iter().find(|layer| layer.name() == text)
}

/// Returns the error for a name that is no layer.
pub(in crate::door) fn unknown_layer(text: &str) -> String {
    let known = super::schema::LAYERS.map(Layer::name).join(", ");
    format!("unknown layer \"{text}\"; known: {known}, and {EDGE_ALIAS} for edge")
}

/// Another name of the layer `edge`.
pub(super) const EDGE_ALIAS: &str = "ip";

/// Deserializes a string and parses it.
fn parsed<'de, D: Deserializer<'de>, T>(
    deserializer: D,
    parse: impl FnOnce(&str) -> Option<T>,
    wrong: impl FnOnce(&str) -> String,
) -> Result<T, D::Error> {
    let text = Text::deserialize(deserializer)?;
    parse(text.as_str()).ok_or_else(|| D::Error::custom(wrong(text.as_str())))
}

impl<'de: 'a, 'a> Deserialize<'de> for HeaderPairs<'a> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let mut pairs = Pairs::deserialize(deserializer)?;
        // Header names have no case, and rules name them in lower case.
        pairs.lower_names();
        Ok(Self(pairs))
    }
}

impl<'de> Deserialize<'de> for Address {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        parsed(deserializer, parse_address, |text| format!("\"{text}\" is not an address")).map(Self)
    }
}

impl<'de: 'a, 'a> Deserialize<'de> for Method<'a> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let text = Text::deserialize(deserializer)?;
        if text.as_str().is_empty() || is_method(text.as_str()) {
            return Ok(Self(text));
        }
        // The message goes to logs and terminals, and a refused method may contain anything.
        let shown = text.as_str().escape_debug();
        Err(D::Error::custom(format!("\"{shown}\" is not a method, such as POST")))
    }
}

impl<'de: 'a, 'a> Deserialize<'de> for RequestId<'a> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let Text(text) = Text::deserialize(deserializer)?;
        // Bounded although only a digest is kept: an id that long is a mistake, such as a whole body.
        let fits = (1..=128).contains(&text.chars().count());
        if fits { Ok(Self(text)) } else { Err(D::Error::custom("a requestId has from 1 to 128 characters")) }
    }
}

impl<'de> Deserialize<'de> for LayerName {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        parsed(deserializer, layer_named, unknown_layer).map(Self)
    }
}

impl<'de> Deserialize<'de> for AlgorithmName {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        parsed(deserializer, Algorithm::named, |text| format!("unknown algorithm \"{text}\"")).map(Self)
    }
}
