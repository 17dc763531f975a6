//! The listener for Envoy, which asks over gRPC.

use std::sync::Arc;

use tokio_rustls::TlsAcceptor;

use super::{Address, Listener, Protocols, Server, Tokens, caller_guard};
use crate::cli::ServeArgs;
use crate::door::{App, Audience, Bounds, Doors, Hosts};

/// Where Envoy is answered, unless said.
const GRPC_ADDRESS: &str = "127.0.0.1:8081";

/// Binds the listener for gRPC. The default address need not be free: an operator who has asked for nothing may run two servers.
pub(super) async fn listener(args: &ServeArgs, tokens: &Tokens) -> anyhow::Result<Option<Listener>> {
    match &args.grpc {
        _ if args.no_grpc => Ok(None),
        Some(address) => address.listen(caller_guard(tokens)).await.map(Some),
        None => {
            let listener = Address::Tcp(GRPC_ADDRESS.to_owned()).listen(caller_guard(tokens)).await;
            if let Err(error) = &listener {
                tracing::warn!(
                    error = format!("{error:#}"),
                    "no gRPC (--grpc ADDR chooses another address, --no-grpc none)"
                );
            }
            Ok(listener.ok())
        }
    }
}

pub(super) fn server(app: &Arc<App>, listener: Listener, tls: Option<TlsAcceptor>, bounds: Bounds) -> Server {
    let tls = tls.filter(|_| matches!(listener, Listener::Tcp(_)));
    // A proxy calls the server by a name of its own configuration.
    let doors = Doors::new(Arc::clone(app), Hosts::Any, Audience::Grpc);
    Server { listener, tls, protocols: Protocols::Grpc, doors, bounds }
}
