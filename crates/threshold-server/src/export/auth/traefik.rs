//! Traefik: a chain of middlewares for its file provider.

use std::fmt::Write as _;

use super::{APP, Believed, RESPELLED, THRESHOLD, shown, written_from};

pub(super) fn write(believed: &Believed) -> String {
    let mut out = written_from(
        "traefik-auth",
        &[
            "A router behind Threshold, for Traefik's file provider. What a router of yours needs is the middleware `threshold`.",
        ],
    );
    let names: Vec<String> =
        believed.names.iter().map(|own| format!("{} ({})", shown(&own.header), own.says)).collect();
    let own = if names.is_empty() {
        String::new()
    } else {
        format!(
            "        # Who is calling is not for the client to say. Your own authentication belongs after the first of these, and\n\
             \x20       # sets what it has verified, for Threshold and the application: {}.\n",
            names.join(", ")
        )
    };
    let _ = write!(
        out,
        "\nhttp:\n  routers:\n    app:\n      rule: PathPrefix(`/`)\n      entryPoints: [web]\n      middlewares: [threshold]\n      \
         service: app\n\n  middlewares:\n    threshold:\n      chain:\n{own}        middlewares: [threshold-clean, threshold-ask, threshold-done]\n\n    \
         # What a client sends under these names reaches neither Threshold nor the application. Traefik itself replaces\n    \
         # X-Forwarded-For and -Host.\n    threshold-clean:\n      headers:\n        customRequestHeaders:\n"
    );
    for header in believed.removed() {
        let _ = writeln!(out, "          {}: \"\"", shown(header));
    }
    let _ = writeln!(out, "          # {RESPELLED}");
    for header in believed.respelled() {
        let _ = writeln!(out, "          {}: \"\"", shown(&header));
    }
    out.push_str("          # If the server asks for a token, in place of the empty X-Threshold-Token above:\n          #X-Threshold-Token: the token\n");
    asking(believed, &mut out);
    let _ =
        write!(out, "\n  services:\n    app:\n      loadBalancer:\n        servers:\n          - url: http://{APP}\n");
    out
}

fn asking(believed: &Believed, out: &mut String) {
    let handed: Vec<String> = ["accept", "x-threshold-token"]
        .into_iter()
        .chain(believed.names.iter().map(|named| named.header.as_str()))
        .chain(believed.counted.iter().map(String::as_str))
        .chain(believed.token.then_some("authorization"))
        .map(shown)
        .collect();
    let _ = write!(
        out,
        "\n    # Traefik waits 30 s for an answer; that cannot be changed.\n    threshold-ask:\n      forwardAuth:\n        \
         address: http://{THRESHOLD}/auth\n        # Replaced, never appended to: what the client sent says nothing.\n        \
         trustForwardHeader: false\n        # A denial's body; a longer one would be a 401.\n        maxResponseBodySize: 65536\n"
    );
    let own = believed.clients_own("add it to authRequestHeaders");
    for line in own.into_iter().chain(believed.counted_by()) {
        let _ = writeln!(out, "        # {line}");
    }
    out.push_str("        # All that Threshold is told besides X-Forwarded-*, which Traefik writes itself.\n        authRequestHeaders:\n");
    for header in handed {
        let _ = writeln!(out, "          - {header}");
    }
    out.push_str(
        "\n    # The application has no use for the token.\n    threshold-done:\n      headers:\n        customRequestHeaders:\n          \
         X-Threshold-Token: \"\"\n",
    );
}
