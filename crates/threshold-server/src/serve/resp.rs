//! The listener for Redis clients.

use std::sync::Arc;

use super::{Address, Listener, Protocols, Server, Tokens, caller_guard};
use crate::cli::ServeArgs;
use crate::door::{App, Audience, Bounds, Doors, Hosts};

/// Where Redis clients are served, unless said: beside Redis itself, whose port is 6379.
const RESP_ADDRESS: &str = "127.0.0.1:6380";

/// Binds the listener for Redis clients. The default address need not be free, as that for gRPC need not.
pub(super) async fn listener(args: &ServeArgs, tokens: &Tokens) -> anyhow::Result<Option<Listener>> {
    match &args.resp {
        _ if args.no_resp => Ok(None),
        Some(address) => address.listen(caller_guard(tokens)).await.map(Some),
        None => {
            let listener = Address::Tcp(RESP_ADDRESS.to_owned()).listen(caller_guard(tokens)).await;
            if let Err(error) = &listener {
                tracing::warn!(
                    error = format!("{error:#}"),
                    "no RESP listener (--resp ADDR chooses another address, --no-resp none)"
                );
            }
            Ok(listener.ok())
        }
    }
}

pub(super) fn server(app: &Arc<App>, listener: Listener, bounds: Bounds) -> Server {
    // Names and paths are matters of HTTP.
    let doors = Doors::new(Arc::clone(app), Hosts::Any, Audience::Callers);
    Server { listener, tls: None, protocols: Protocols::Resp, doors, bounds }
}
