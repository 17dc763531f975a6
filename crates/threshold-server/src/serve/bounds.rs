//! How many connections each listener may have, by the options and the limit on open files.

use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

use super::duration;
use crate::cli::ServeArgs;
use crate::door::Bounds;

/// The most connections to `--admin`. They are apart from those of callers, so that a flood keeps no operator out.
pub(super) const OPERATOR_CONNECTIONS: usize = 64;
/// The most connections to `--grpc`, as many files as may be open. A proxy has one or a few for each of its threads.
const GRPC_CONNECTIONS: std::ops::RangeInclusive<u64> = 256..=1_024;
/// The fewest requests at once for which a listener has room, on connections of HTTP/2. One connection has up to 256, and one peer a quarter.
const MIN_REQUESTS: usize = 4_096;
/// File descriptors besides those of callers' connections: 64 for operators, and 64 for the journal, files that are reloaded, standard
/// streams and the runtime's own.
const OTHER_FILES: u64 = 128;

/// The bounds of the listeners of callers.
#[derive(Debug, Clone, Copy)]
pub(super) struct ServerBounds {
    pub(super) http: Bounds,
    pub(super) grpc: Bounds,
    pub(super) resp: Bounds,
}

impl ServerBounds {
    pub(super) fn of(args: &ServeArgs) -> anyhow::Result<Self> {
        let Connections { http, grpc, resp } = connections(args);
        let per_peer = args.max_connections_per_peer.map(usize::try_from).transpose()?;
        let all = Bounds {
            body: usize::try_from(args.max_body)?,
            client_timeout: duration(args.client_timeout),
            request_ids: usize::try_from(args.request_id_memory)?,
            ..Bounds::default()
        };
        let with_connections = |connections: u64| {
            let connections = usize::try_from(connections).unwrap_or(usize::MAX);
            let requests = connections.max(MIN_REQUESTS);
            Bounds {
                connections,
                connections_per_peer: per_peer.unwrap_or_else(|| connections.div_ceil(4)),
                requests,
                requests_per_peer: requests.div_ceil(4),
                ..all
            }
        };
        Ok(Self { http: with_connections(http), grpc: with_connections(grpc), resp: with_connections(resp) })
    }
}

/// The most connections to each listener of callers.
#[derive(Debug, PartialEq, Eq)]
struct Connections {
    http: u64,
    grpc: u64,
    resp: u64,
}

/// Returns the number of connections to each listener: as many as configured, if the limit on open files allows it. The soft limit
/// (usually 1,024) is raised to the hard limit first.
fn connections(args: &ServeArgs) -> Connections {
    let limit = getrlimit(Resource::Nofile);
    // A process may raise its soft limit up to the hard one without privileges.
    let raised = Rlimit { current: limit.maximum, maximum: limit.maximum };
    let files = match setrlimit(Resource::Nofile, raised) {
        Ok(()) => limit.maximum,
        Err(_) => limit.current,
    };
    let wanted = u64::from(args.max_connections);
    let divided = divide(files.unwrap_or(u64::MAX), wanted, args.no_resp);
    if divided.http < wanted {
        tracing::warn!(wanted, room = divided.http, "connections limited by the number of open files (ulimit -n)");
    }
    divided
}

/// Divides the files that may be open among the listeners: Redis clients, which keep few connections, get at least an eighth of what
/// is left by proxies that speak gRPC, and else what is left. Fewer connections than configured are better than `accept` failing for lack of
/// descriptors, which would also hit the journal.
fn divide(files: u64, wanted: u64, no_resp: bool) -> Connections {
    let grpc = (files / 16).clamp(*GRPC_CONNECTIONS.start(), *GRPC_CONNECTIONS.end());
    let room = files.saturating_sub(OTHER_FILES.saturating_add(grpc)).max(2);
    let least = if no_resp { 0 } else { (room / 8).max(1) };
    let http = room.saturating_sub(least).min(wanted);
    Connections { http, grpc: grpc.min(wanted), resp: room.saturating_sub(http).min(wanted) }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Woken by: giving `--http` all of the room.
    #[test]
    fn each_listener_has_room_however_few_files_may_be_open() {
        for (files, no_resp, [http, grpc, resp]) in [
            (u64::MAX, false, [16_384, 1_024, 16_384]),
            (21_152, false, [16_384, 1_024, 3_616]),
            (1_280, false, [784, 256, 112]),
            (1_280, true, [896, 256, 0]),
            (2, false, [1, 256, 1]),
        ] {
            assert_eq!(divide(files, 16_384, no_resp), Connections { http, grpc, resp }, "{files}");
        }
        assert_eq!(divide(u64::MAX, 8, false), Connections { http: 8, grpc: 8, resp: 8 });
    }
}
