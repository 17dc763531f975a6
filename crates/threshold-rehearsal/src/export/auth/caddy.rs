//! Caddy: two snippets and a site that imports them.

use std::fmt::Write as _;

use super::{APP, IdentityHeader, NO_COOKIES, RESPELLED, THRESHOLD, TrustedHeaders, shown, written_from};

pub(super) fn write(trusted: &TrustedHeaders) -> String {
    let mut out = written_from(
        "caddy-auth",
        &[
            "A site behind Threshold. To use it in your own site, copy the two snippets and import them before your handlers.",
        ],
    );
    out.push_str(
        "\n# Removes headers that a client must not send to Threshold or the application. Caddy itself replaces\n\
         # X-Forwarded-For, -Host and -Proto, unless the client is one of its trusted_proxies.\n(threshold_clean) {\n",
    );
    for header in trusted.removed() {
        let _ = writeln!(out, "\trequest_header -{}", shown(header));
    }
    let _ = writeln!(out, "\t# {RESPELLED}");
    for header in trusted.respelled() {
        let _ = writeln!(out, "\trequest_header -{}", shown(&header));
    }
    out.push_str("}\n\n");
    ask(trusted, &mut out);
    out.push_str("\n:80 {\n\troute {\n\t\timport threshold_clean\n");
    if let Some(IdentityHeader { header, .. }) = trusted.example() {
        let all: Vec<String> =
            trusted.names.iter().map(|own| format!("{} ({})", shown(&own.header), own.says)).collect();
        let _ = write!(
            out,
            "\t\t# Put your own authentication here. It sets the verified identity for Threshold and the application, which a\n\
             \t\t# client cannot: {}.\n\
             \t\t#request_header {} {{http.auth.user.id}}\n",
            all.join(", "),
            shown(header)
        );
    }
    let _ = write!(out, "\t\timport threshold_ask\n\n\t\treverse_proxy {APP}\n\t}}\n}}\n");
    out
}

/// Writes the snippet that asks Threshold.
fn ask(trusted: &TrustedHeaders, out: &mut String) {
    let _ = write!(
        out,
        "# Caddy's `forward_auth` in its long form, so that allowed requests get the rate limit headers too.\n\
         (threshold_ask) {{\n\treverse_proxy {THRESHOLD} {{\n"
    );
    out.push_str(ASK);
    if let Some(address) = &trusted.address {
        let _ = writeln!(out, "\t\theader_up {} {{remote_host}}", shown(address));
    }
    for line in trusted.clients_own("delete the line that removes it") {
        let _ = writeln!(out, "\t\t# {line}");
    }
    // Cookies are removed below for a reason of their own.
    for IdentityHeader { header, .. } in trusted.clients.iter().filter(|named| named.header != "cookie") {
        let _ = writeln!(out, "\t\theader_up -{}", shown(header));
    }
    if !trusted.counts_cookies() {
        let _ = write!(out, "\t\t# {NO_COOKIES}\n\t\theader_up -Cookie\n");
    }
    if let Some(line) = trusted.counted_by() {
        let _ = writeln!(out, "\t\t# {line}");
    }
    out.push_str(ANSWER);
}

const ASK: &str = "		method GET
		# Without the question mark the client's own query would be appended.
		rewrite /auth?
		# Without tokens Threshold accepts only its own address and the names of --allow-host.
		header_up Host {http.reverse_proxy.upstream.hostport}
		header_up X-Forwarded-Method {method}
		header_up X-Forwarded-Uri {uri}
		# From one of its trusted_proxies Caddy would pass on this header, which may be the client's.
		header_up X-Forwarded-Host {hostport}
		header_up X-Original-Content-Length {header.Content-Length}
		# If the server requires a token:
		#header_up X-Threshold-Token {env.THRESHOLD_TOKEN}
";

const ANSWER: &str = "
		# A decision is faster, except for shadow bans, which are delayed by at most 3 s.
		transport http {
			dial_timeout 1s
			write_timeout 5s
			response_header_timeout 5s
			read_timeout 5s
		}

		# Any other answer is passed on to the client unchanged.
		@crosses status 2xx
		handle_response @crosses {
			copy_response_headers {
				include X-RateLimit-Limit X-RateLimit-Remaining X-RateLimit-Reset RateLimit RateLimit-Policy
				include X-RateLimit-Warning Set-Cookie X-Trace-Id
			}
		}
	}
}
";
