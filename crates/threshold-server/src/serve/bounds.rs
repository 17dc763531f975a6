//! How many connections each listener may have, by the options and the limit on open files.

use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

use super::duration;
use crate::cli::ServeArgs;
use crate::door::Bounds;

/// The most connections to `--admin`. They are apart from those of callers, so that a flood keeps no operator out.
pub(super) const OPERATOR_CONNECTIONS: usize = 64;
/// File descriptors besides those of callers' connections: 64 for operators, 256 for gRPC, and 64 for the journal, files that are
/// reloaded, standard streams and the runtime's own.
const OTHER_FILES: u64 = 384;

/// The bounds of the listeners of callers.
#[derive(Debug, Clone, Copy)]
pub(super) struct ServerBounds {
    pub(super) http: Bounds,
    pub(super) resp: Bounds,
}

impl ServerBounds {
    pub(super) fn of(args: &ServeArgs) -> anyhow::Result<Self> {
        let (http, resp) = connections(args);
        let per_peer = args.max_connections_per_peer.map(usize::try_from).transpose()?;
        let with_connections = |connections: usize, bounds: Bounds| Bounds {
            connections,
            connections_per_peer: per_peer.unwrap_or_else(|| connections.div_ceil(4)),
            ..bounds
        };
        let all = Bounds {
            body: usize::try_from(args.max_body)?,
            client_timeout: duration(args.client_timeout),
            request_ids: usize::try_from(args.request_id_memory)?,
            ..Bounds::default()
        };
        Ok(Self { http: with_connections(http, all), resp: with_connections(resp, all) })
    }
}

/// Returns the number of connections to `--http` and to `--resp`: as many as configured, if the limit on open files allows it. The
/// soft limit (usually 1,024) is raised to the hard limit first.
fn connections(args: &ServeArgs) -> (usize, usize) {
    let limit = getrlimit(Resource::Nofile);
    // A process may raise its soft limit up to the hard one without privileges.
    let raised = Rlimit { current: limit.maximum, maximum: limit.maximum };
    let files = match setrlimit(Resource::Nofile, raised) {
        Ok(()) => limit.maximum,
        Err(_) => limit.current,
    };
    // Fewer connections than configured are better than `accept` failing for lack of descriptors, which would also
    // hit the journal.
    let room = files.map_or(u64::MAX, |files| files.saturating_sub(OTHER_FILES).max(2));
    let wanted = u64::from(args.max_connections);
    let (http, resp) = split(room, wanted, args.no_resp);
    if http < wanted {
        tracing::warn!(wanted, room = http, "connections limited by the number of open files (ulimit -n)");
    }
    (usize::try_from(http).unwrap_or(usize::MAX), usize::try_from(resp).unwrap_or(usize::MAX))
}

/// Divides the room for connections: Redis clients, which keep few connections, get at least an eighth, and else what is left.
fn split(room: u64, wanted: u64, no_resp: bool) -> (u64, u64) {
    let least = if no_resp { 0 } else { (room / 8).max(1) };
    let http = room.saturating_sub(least).min(wanted);
    (http, room.saturating_sub(http).min(wanted))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Woken by: giving `--http` all of the room.
    #[test]
    fn both_listeners_have_room_however_few_files_may_be_open() {
        for (room, no_resp, expect) in [
            (u64::MAX, false, (16_384, 16_384)),
            (20_000, false, (16_384, 3_616)),
            (896, false, (784, 112)),
            (896, true, (896, 0)),
            (2, false, (1, 1)),
        ] {
            assert_eq!(split(room, 16_384, no_resp), expect, "{room}");
        }
    }
}
