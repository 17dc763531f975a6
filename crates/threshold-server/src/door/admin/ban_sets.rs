//! `/v1/bans/sets/ORIGIN`: imports a set of bans, in place of the set before.

use std::sync::Arc;

use axum::extract::{Path, Request, State};
use axum::response::Response;
use http::StatusCode;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use threshold_core::policy::Layer;
use threshold_wire::{LayerName, Text, Whole, read};

use super::operator::Operator;
use crate::desk::{self, ImportedSet, NewEnd, NewSetBan};
use crate::door::json_body::JsonBody;
use crate::door::{ApiError, App, json};

/// The largest body of an import, whatever `--max-body` is: half a million bans with a reason of their own. Only operators may
/// send one, and only one is read at a time.
const MAX_SET_BODY: usize = 64 << 20;

/// A set of bans to import.
#[derive(Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, rename_all = "camelCase", expecting = "an object")]
#[schemars(rename = "NewBanSet")]
pub(super) struct NewBanSet<'a> {
    /// The reason for bans without one of their own. It is not disclosed to banned clients.
    #[serde(borrow)]
    #[schemars(length(min = 1, max = 1_000))]
    reason: Text<'a>,
    /// The length of bans without an end of their own; permanent if both this and `until` are left out.
    #[schemars(range(min = 1, max = 315_360_000))]
    duration_sec: Option<Whole>,
    /// The end of bans without one of their own, in Unix seconds.
    until: Option<Whole>,
    /// The bans; an empty list lifts those of before.
    #[serde(borrow)]
    #[schemars(length(max = 500_000))]
    bans: Vec<NewBanSetEntry<'a>>,
}

/// A ban of a set.
#[derive(Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, rename_all = "camelCase", expecting = "an object")]
#[schemars(rename = "NewBanSetEntry")]
pub(super) struct NewBanSetEntry<'a> {
    /// `edge` if left out.
    layer: Option<LayerName>,
    /// An address or CIDR (edge), a tenant, or a user.
    #[serde(borrow)]
    #[schemars(length(min = 1))]
    key: Text<'a>,
    /// The reason, in place of that of the set.
    #[serde(borrow)]
    #[schemars(length(min = 1, max = 1_000))]
    reason: Option<Text<'a>>,
    /// The length.
    #[schemars(range(min = 1, max = 315_360_000))]
    duration_sec: Option<Whole>,
    /// The end, in Unix seconds. A ban that has ended is left out.
    until: Option<Whole>,
    /// The line of the file that it comes from, for errors.
    line: Option<Whole>,
}

/// The result of an import.
#[derive(Debug, Serialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
#[schemars(rename = "BanSet")]
pub(super) struct BanSetBody {
    origin: String,
    /// The number of bans in the set.
    bans: usize,
    /// The number of those that were not in the set of before.
    added: usize,
    /// The number of bans of the set of before that were lifted.
    lifted: usize,
    /// The number of entries that repeat another one, or that had ended already.
    left_out: usize,
}

pub(super) async fn replace(
    operator: Operator,
    State(app): State<Arc<App>>,
    Path(origin): Path<String>,
    request: Request,
) -> Result<Response, ApiError> {
    // Before the body is read, so that only one large body is in memory at a time.
    let _turn = app.desk.import_turn.lock().await;
    let JsonBody(body) = JsonBody::read_in_turn(request, &app, MAX_SET_BODY).await?;
    let NewBanSet { reason, duration_sec, until, bans } = read(&body)?;
    let end = end(duration_sec, until).map_err(|message| ApiError::bad("until", message))?;
    // The strings stay borrowed from the body: half a million copies would double the memory of an import.
    let entries = bans.iter().enumerate().map(|(index, new)| {
        let end = end_of(new).map_err(|message| ApiError::bad("bans", message).at(Some(index)))?;
        Ok(NewSetBan {
            layer: new.layer.as_ref().map_or(Layer::Edge, |layer| layer.0),
            key: new.key.as_str(),
            reason: new.reason.as_ref().map(Text::as_str),
            end,
            line: new.line.map(Whole::number),
        })
    });
    let bans = entries.collect::<Result<_, ApiError>>()?;
    let set = desk::NewBanSet { origin: &origin, reason: reason.as_str(), end, bans };
    let ImportedSet { bans, added, lifted, left_out } = app.desk.import_bans(&operator.0, set).await?;
    Ok(json(StatusCode::OK, &BanSetBody { origin, bans, added, lifted, left_out }))
}

fn end_of(new: &NewBanSetEntry<'_>) -> Result<NewEnd, &'static str> {
    end(new.duration_sec, new.until)
}

fn end(duration_sec: Option<Whole>, until: Option<Whole>) -> Result<NewEnd, &'static str> {
    match (duration_sec, until) {
        (None, None) => Ok(NewEnd::Open),
        (Some(seconds), None) => Ok(NewEnd::After(seconds.number())),
        (None, Some(at)) => Ok(NewEnd::At(at.number())),
        (Some(_), Some(_)) => Err("send durationSec or until, not both"),
    }
}
