//! Caddy: two snippets and a site that imports them.

use std::fmt::Write as _;

use super::{APP, Believed, NO_COOKIES, Named, RESPELLED, THRESHOLD, shown, written_from};

pub(super) fn write(believed: &Believed) -> String {
    let mut out = written_from(
        "caddy-auth",
        &[
            "A site behind Threshold. What a site of yours needs are the two snippets, and to import them ahead of your own.",
        ],
    );
    out.push_str(
        "\n# What a client sends under these names reaches neither Threshold nor the application. Caddy itself replaces\n\
         # X-Forwarded-For, -Host and -Proto, unless the client is one of its trusted_proxies.\n(threshold_clean) {\n",
    );
    for header in believed.removed() {
        let _ = writeln!(out, "\trequest_header -{}", shown(header));
    }
    let _ = writeln!(out, "\t# {RESPELLED}");
    for header in believed.respelled() {
        let _ = writeln!(out, "\trequest_header -{}", shown(&header));
    }
    out.push_str("}\n\n");
    ask(believed, &mut out);
    out.push_str("\n:80 {\n\troute {\n\t\timport threshold_clean\n");
    if let Some(Named { header, .. }) = believed.example() {
        let all: Vec<String> =
            believed.names.iter().map(|own| format!("{} ({})", shown(&own.header), own.says)).collect();
        let _ = write!(
            out,
            "\t\t# Who is calling is not for the client to say. Your own authentication belongs here, and sets what it has\n\
             \t\t# verified, for Threshold and the application: {}.\n\
             \t\t#request_header {} {{http.auth.user.id}}\n",
            all.join(", "),
            shown(header)
        );
    }
    let _ = write!(out, "\t\timport threshold_ask\n\n\t\treverse_proxy {APP}\n\t}}\n}}\n");
    out
}

/// The snippet that asks Threshold.
fn ask(believed: &Believed, out: &mut String) {
    let _ = write!(
        out,
        "# Caddy's `forward_auth` written out, so that clients who may cross are told how they stand as well.\n\
         (threshold_ask) {{\n\treverse_proxy {THRESHOLD} {{\n"
    );
    out.push_str(ASK);
    if let Some(address) = &believed.address {
        let _ = writeln!(out, "\t\theader_up {} {{remote_host}}", shown(address));
    }
    for line in believed.clients_own("delete the line that removes it") {
        let _ = writeln!(out, "\t\t# {line}");
    }
    for Named { header, .. } in believed.clients.iter().filter(|named| named.header != "cookie") {
        let _ = writeln!(out, "\t\theader_up -{}", shown(header));
    }
    if !believed.counts_cookies() {
        let _ = write!(out, "\t\t# {NO_COOKIES}\n\t\theader_up -Cookie\n");
    }
    if let Some(line) = believed.counted_by() {
        let _ = writeln!(out, "\t\t# {line}");
    }
    out.push_str(ANSWER);
}

const ASK: &str = "		method GET
		# Without the question mark the client's own query would go along.
		rewrite /auth?
		# Without tokens Threshold answers only to its own address and to the names that --allow-host gives it.
		header_up Host {http.reverse_proxy.upstream.hostport}
		header_up X-Forwarded-Method {method}
		header_up X-Forwarded-Uri {uri}
		# Of one of its trusted_proxies Caddy would pass on what it says, and that may be the client's own word.
		header_up X-Forwarded-Host {hostport}
		header_up X-Original-Content-Length {header.Content-Length}
		# If the server asks for a token:
		#header_up X-Threshold-Token {env.THRESHOLD_TOKEN}
";

const ANSWER: &str = "
		# A decision takes no longer, except for shadow bans, which are waited out: at most 3 s.
		transport http {
			dial_timeout 1s
			write_timeout 5s
			response_header_timeout 5s
			read_timeout 5s
		}

		# Any other answer goes to the client as it is.
		@crosses status 2xx
		handle_response @crosses {
			copy_response_headers {
				include X-RateLimit-Limit X-RateLimit-Remaining X-RateLimit-Reset RateLimit RateLimit-Policy
				include X-RateLimit-Warning Set-Cookie
			}
		}
	}
}
";
