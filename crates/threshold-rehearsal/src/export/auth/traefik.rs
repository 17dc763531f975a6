//! Traefik: a chain of middlewares for its file provider.

use std::fmt::Write as _;

use super::{APP, RESPELLED, THRESHOLD, TrustedHeaders, shown, written_from};

pub(super) fn write(trusted: &TrustedHeaders) -> String {
    let mut out = written_from(
        "traefik-auth",
        &["A router behind Threshold, for Traefik's file provider. Your own routers need the middleware `threshold`."],
    );
    let names: Vec<String> = trusted.names.iter().map(|own| format!("{} ({})", shown(&own.header), own.says)).collect();
    let own = if names.is_empty() {
        String::new()
    } else {
        format!(
            "        # Put your own authentication after the first of these. It sets the verified identity for Threshold and the\n\
             \x20       # application, which a client cannot: {}.\n",
            names.join(", ")
        )
    };
    let _ = write!(
        out,
        "\nhttp:\n  routers:\n    app:\n      rule: PathPrefix(`/`)\n      entryPoints: [web]\n      middlewares: [threshold]\n      \
         service: app\n\n  middlewares:\n    threshold:\n      chain:\n{own}        middlewares: [threshold-clean, threshold-ask, threshold-done]\n\n    \
         # Removes headers that a client must not send to Threshold or the application. Traefik itself replaces\n    \
         # X-Forwarded-For and -Host.\n    threshold-clean:\n      headers:\n        customRequestHeaders:\n"
    );
    for header in trusted.removed() {
        let _ = writeln!(out, "          {}: \"\"", shown(header));
    }
    let _ = writeln!(out, "          # {RESPELLED}");
    for header in trusted.respelled() {
        let _ = writeln!(out, "          {}: \"\"", shown(&header));
    }
    out.push_str("          # If the server requires a token, in place of the empty X-Threshold-Token above:\n          #X-Threshold-Token: the token\n");
    asking(trusted, &mut out);
    let _ =
        write!(out, "\n  services:\n    app:\n      loadBalancer:\n        servers:\n          - url: http://{APP}\n");
    out
}

fn asking(trusted: &TrustedHeaders, out: &mut String) {
    let handed: Vec<String> = ["accept", "x-threshold-token"]
        .into_iter()
        .chain(trusted.names.iter().map(|named| named.header.as_str()))
        .chain(trusted.counted.iter().map(String::as_str))
        .chain(trusted.token.then_some("authorization"))
        .map(shown)
        .collect();
    let _ = write!(
        out,
        "\n    # Traefik waits 30 s for an answer; that cannot be changed.\n    threshold-ask:\n      forwardAuth:\n        \
         address: http://{THRESHOLD}/auth\n        # Replaces the client's X-Forwarded-* headers instead of appending.\n        \
         trustForwardHeader: false\n        # The body of a denial; a longer one would become a 401.\n        maxResponseBodySize: 65536\n"
    );
    let own = trusted.clients_own("add it to authRequestHeaders");
    for line in own.into_iter().chain(trusted.counted_by()) {
        let _ = writeln!(out, "        # {line}");
    }
    out.push_str("        # All headers that are sent to Threshold besides X-Forwarded-*, which Traefik sets itself.\n        authRequestHeaders:\n");
    for header in handed {
        let _ = writeln!(out, "          - {header}");
    }
    out.push_str(
        "\n    # The application does not need the token.\n    threshold-done:\n      headers:\n        customRequestHeaders:\n          \
         X-Threshold-Token: \"\"\n",
    );
}
