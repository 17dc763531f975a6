//! Addresses, methods, ids and names of layers and algorithms in a body: strings of which not every one is valid.

use std::borrow::Cow;
use std::net::IpAddr;

use serde::de::Error as _;
use serde::{Deserialize, Deserializer};
use threshold_core::address::parse_address;
use threshold_core::limit::Algorithm;
use threshold_core::path::is_method;
use threshold_core::policy::Layer;

use super::Text;

/// An IPv4 or IPv6 address.
#[derive(Debug, Clone, Copy)]
pub struct Address(pub IpAddr);

/// A method, or an empty string, which means none.
#[derive(Debug)]
pub(super) struct Method<'a>(pub(super) Text<'a>);

/// A caller's id of a request: 1 to 128 characters.
#[derive(Debug)]
pub(super) struct RequestId<'a>(Cow<'a, str>);

/// The name of a layer.
#[derive(Debug, Clone, Copy)]
pub struct LayerName(pub Layer);

/// The name of an algorithm.
#[derive(Debug, Clone, Copy)]
pub(super) struct AlgorithmName(pub(super) Algorithm);

impl RequestId<'_> {
    pub(super) fn as_str(&self) -> &str {
        &self.0
    }
}

pub(super) const LAYERS: [Layer; 5] = [Layer::Global, Layer::Edge, Layer::Tenant, Layer::User, Layer::Endpoint];

/// Another name of the layer `edge`.
pub(super) const EDGE_ALIAS: &str = "ip";

/// Returns the layer with this name. `ip` is another name of the edge, whose subjects are addresses.
#[must_use]
pub fn layer_named(text: &str) -> Option<Layer> {
    if text == EDGE_ALIAS {
        return Some(Layer::Edge);
    }
    LAYERS.into_iter().find(|layer| layer.name() == text)
}

/// Returns the message for a name that is no layer.
#[must_use]
pub fn unknown_layer(text: &str) -> String {
    let known = LAYERS.map(Layer::name).join(", ");
    format!("unknown layer \"{text}\"; known: {known}, and {EDGE_ALIAS} for edge")
}

/// Deserializes a string and parses it.
fn parsed<'de, D: Deserializer<'de>, T>(
    deserializer: D,
    parse: impl FnOnce(&str) -> Option<T>,
    wrong: impl FnOnce(&str) -> String,
) -> Result<T, D::Error> {
    let text = Text::deserialize(deserializer)?;
    parse(text.as_str()).ok_or_else(|| D::Error::custom(wrong(text.as_str())))
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
