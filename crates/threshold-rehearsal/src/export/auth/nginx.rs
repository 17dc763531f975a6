//! nginx: a file to include in a `server`, and one for locations that set headers of their own.

use std::fmt::Write as _;

use super::{DESCRIBING, IdentityHeader, NO_COOKIES, THRESHOLD, TrustedHeaders, shown, written_from};

/// The headers of Threshold's answer: the variable that nginx keeps it in, its name, and the client's header, if any.
const ANSWER_HEADERS: [(&str, &str, &str); 14] = [
    ("status", "x_threshold_status", ""),
    ("form", "x_threshold_form", ""),
    ("body", "x_threshold_body", ""),
    ("limit", "x_ratelimit_limit", "X-RateLimit-Limit"),
    ("remaining", "x_ratelimit_remaining", "X-RateLimit-Remaining"),
    ("reset", "x_ratelimit_reset", "X-RateLimit-Reset"),
    ("fields", "ratelimit", "RateLimit"),
    ("policy", "ratelimit_policy", "RateLimit-Policy"),
    ("retry", "retry_after", "Retry-After"),
    ("cache", "cache_control", "Cache-Control"),
    ("warning", "x_ratelimit_warning", "X-RateLimit-Warning"),
    ("banned", "x_ratelimit_banned", "X-RateLimit-Banned"),
    ("cookie", "set_cookie", "Set-Cookie"),
    ("trace", "x_trace_id", "X-Trace-Id"),
];

/// Writes the file for a `server`.
pub(super) fn write(trusted: &TrustedHeaders) -> String {
    let mut out = written_from(
        "nginx-auth",
        &[
            "Every request of a server that includes this file is decided by Threshold first. It requires an `upstream threshold`.",
            "A location inherits `add_header`, `error_page` and `proxy_set_header` only if it has none of its own: one with an",
            "`add_header` or `error_page` must repeat those below, one with a `proxy_set_header` must include",
            "threshold_location.conf.",
        ],
    );
    out.push_str("\nauth_request /_threshold;\n\n");
    hash_sizes(trusted, &mut out);
    out.push_str("# Threshold's answer.\n");
    for (variable, header, _) in ANSWER_HEADERS {
        let variable = format!("$threshold_{variable}");
        let _ = writeln!(out, "auth_request_set {variable:<20} $upstream_http_{header};");
    }
    out.push_str("auth_request_set $threshold_answer    $upstream_status;\n");
    out.push_str("\n# The headers that the client gets. nginx omits a header without a value.\n");
    for (variable, _, sent) in ANSWER_HEADERS.iter().filter(|(_, _, sent)| !sent.is_empty()) {
        let variable = format!("$threshold_{variable}");
        let _ = writeln!(out, "add_header {sent:<21} {variable:<20} always;");
    }
    out.push_str(
        "\n# auth_request passes on only the status 403, so a denial arrives as 403 and is rebuilt from its headers.\n\
         error_page 403 = /_threshold_denied/answer.$threshold_form;\n\n",
    );
    toward_application(trusted, &mut out);
    out.push('\n');
    ask(trusted, &mut out);
    out.push_str(AWAY);
    denied(trusted, &mut out);
    out
}

/// Writes the lines for a location that sets headers of its own.
pub(super) fn write_location(trusted: &TrustedHeaders) -> String {
    let mut out = written_from(
        "nginx-auth --location",
        &[
            "Include it in every location with a `proxy_set_header` of its own, which then inherits none of its server's.",
        ],
    );
    out.push('\n');
    toward_application(trusted, &mut out);
    out
}

/// Removes the client's headers on the way to the application.
fn toward_application(trusted: &TrustedHeaders, out: &mut String) {
    out.push_str(
        "# Removes headers that a client must not send to the application. To send the application a verified identity or\n\
         # address, set the header in the location beside these lines. nginx itself drops names with an underscore: leave\n\
         # `underscores_in_headers` off.\n",
    );
    for header in removed_names(trusted) {
        let _ = writeln!(out, "proxy_set_header {} \"\";", shown(&header));
    }
}

/// Returns the headers that are removed on the way to the application.
fn removed_names(trusted: &TrustedHeaders) -> Vec<String> {
    let written = ["x-forwarded-for", "x-forwarded-host"].into_iter().chain(trusted.removed()).map(str::to_owned);
    // nginx drops names with an underscore itself, and `proxy_set_header` for each spelling would fill its hash.
    let respelled = trusted.respelled().into_iter().filter(|name| !name.contains('_'));
    written.chain(respelled).collect()
}

/// Writes the size of the hash in which nginx keeps the `proxy_set_header` names of a location: the default is too small.
fn hash_sizes(trusted: &TrustedHeaders, out: &mut String) {
    let longest = removed_names(trusted).iter().map(String::len).max().unwrap_or(0);
    // An entry has a pointer, the length and the name; a bucket ends with another pointer.
    let bucket = longest.saturating_add(32).next_power_of_two().max(128);
    let _ = write!(
        out,
        "# Large enough for the headers that are set below, and for some of your own.\n\
         proxy_headers_hash_max_size 2048;\nproxy_headers_hash_bucket_size {bucket};\n\n"
    );
}

/// Writes the location that asks Threshold.
fn ask(trusted: &TrustedHeaders, out: &mut String) {
    out.push_str(ASK);
    // If no rule counts by a header, the client's headers stay out of the question altogether: they could be too
    // large, or be believed.
    let none_pass = trusted.counted.is_empty();
    out.push_str(if none_pass { NONE_PASS } else { ALL_PASS });
    let _ = writeln!(out, "    proxy_set_header Host {THRESHOLD};");
    out.push_str(ORIGINAL);
    if let Some(address) = &trusted.address {
        let _ = writeln!(out, "    proxy_set_header {} $remote_addr;", shown(address));
    }
    if none_pass {
        out.push_str(ACCEPT);
        if trusted.token {
            out.push_str(TOKEN);
        }
    } else {
        removed_from_question(trusted, out);
    }
    out.push_str("    # If the server requires a token:\n    #proxy_set_header X-Threshold-Token \"the token\";\n");
    names(trusted, out);
    if none_pass {
        clients_own(trusted, out);
    } else {
        clients_own_passed(trusted, out);
    }
    out.push_str(REFUSED);
    out.push_str("    # If Threshold does not answer, nginx answers 500. To allow requests instead:\n    #error_page 502 504 = @threshold_away;\n}\n");
}

/// Removes the headers that Threshold would trust, where the client's headers are passed on.
fn removed_from_question(trusted: &TrustedHeaders, out: &mut String) {
    let names = trusted.names.iter().map(|named| named.header.as_str());
    let rest = ["forwarded", "x-forwarded-host"].into_iter().chain(DESCRIBING).filter(|header| !is_original(header));
    let rest = rest.filter(|header| !trusted.addresses.iter().any(|own| own == header));
    for header in trusted.addresses.iter().map(String::as_str).chain(rest).chain(names) {
        let _ = writeln!(out, "    proxy_set_header {} \"\";", shown(header));
    }
}

/// Writes the comment that shows how to set the verified identity.
fn names(trusted: &TrustedHeaders, out: &mut String) {
    let Some(IdentityHeader { header, .. }) = trusted.example() else { return };
    let all: Vec<String> = trusted.names.iter().map(|own| format!("{} ({})", shown(&own.header), own.says)).collect();
    let _ = write!(
        out,
        "    # Set the identity that you have verified, which a client cannot send itself: {}.\n    \
         # nginx omits a header without a value. An example with `auth_basic`, which nginx checks first:\n    \
         #proxy_set_header {} $remote_user;\n",
        all.join(", "),
        shown(header)
    );
}

/// Writes the comments about headers that clients write themselves and the policy takes for an identity.
fn clients_own(trusted: &TrustedHeaders, out: &mut String) {
    for line in trusted.clients_own("uncomment its line") {
        let _ = writeln!(out, "    # {line}");
    }
    for IdentityHeader { header, .. } in &trusted.clients {
        let _ = writeln!(out, "    #proxy_set_header {} $http_{};", shown(header), header.replace('-', "_"));
    }
}

/// Removes such headers, where the client's headers are passed on.
fn clients_own_passed(trusted: &TrustedHeaders, out: &mut String) {
    let removed = |header: &str, out: &mut String| {
        let _ = writeln!(out, "    proxy_set_header {} \"\";", shown(header));
    };
    for line in trusted.clients_own("delete the line that removes it") {
        let _ = writeln!(out, "    # {line}");
    }
    for IdentityHeader { header, .. } in trusted.clients.iter().filter(|named| named.header != "cookie") {
        removed(header, out);
    }
    if !trusted.counts_cookies() {
        let _ = writeln!(out, "    # {NO_COOKIES}");
        removed("cookie", out);
    }
    if let Some(line) = trusted.counted_by() {
        let _ = writeln!(out, "    # {line}");
    }
}

/// Whether nginx sets this header itself.
fn is_original(header: &str) -> bool {
    header.starts_with("x-original-") || header == "x-threshold-request-id"
}

/// Writes the location that rebuilds a denial.
fn denied(trusted: &TrustedHeaders, out: &mut String) {
    out.push_str(DENIED);
    // nginx takes no variable as the status of `return`, so each possible one has a line.
    for status in &trusted.statuses {
        let _ = writeln!(out, "    if ($threshold_status = {status}) {{ return {status} $threshold_body; }}");
    }
    out.push_str(
        "    if ($threshold_status) { return 429 $threshold_body; }\n    \
         # Answers to requests that are not valid HTTP, which are not in headers.\n    \
         if ($threshold_answer ~ \"431$\") { return 431 \"The headers of this request are too large.\\n\"; }\n    \
         if ($threshold_answer ~ \"(400|414)$\") { return 400 \"This request cannot be read.\\n\"; }\n    \
         # A 403 that is not from Threshold.\n    return 403;\n}\n",
    );
}

const ASK: &str = "\
location = /_threshold {
    internal;
    auth_request off;
    proxy_pass http://threshold/auth?deny=403;
    proxy_http_version 1.1;
    # The body of a denial is in a header.
    proxy_buffer_size 16k;
    proxy_buffers 4 16k;
    # A decision is faster, except for shadow bans, which are delayed by at most 3 s.
    proxy_connect_timeout 1s;
    proxy_send_timeout 5s;
    proxy_read_timeout 5s;
    proxy_pass_request_body off;
";

const NONE_PASS: &str = "    \
    # Only the headers that are set here are sent: Threshold refuses a request with many or large headers.
    proxy_pass_request_headers off;
    proxy_set_header Content-Length \"\";
    proxy_set_header Connection \"\";
    # Without tokens Threshold accepts only its own address and the names of --allow-host.
";

const ALL_PASS: &str = "    \
    # The policy counts by headers of the client, so all of them are sent except those that are set here: nginx has no other
    # way to send a repeated header unchanged.
    proxy_set_header Content-Length \"\";
    proxy_set_header Connection \"\";
    proxy_set_header Upgrade \"\";
    # Without tokens Threshold accepts only its own address and the names of --allow-host.
";

/// The client's token, if the policy uses its claims.
const TOKEN: &str = "    \
    # The client's token, which Threshold verifies.
    proxy_set_header Authorization $http_authorization;
";

const ACCEPT: &str = "    \
    # Selects the format of a denial.
    proxy_set_header Accept $http_accept;
";

const REFUSED: &str = "    \
    # Also refuses a request whose headers Threshold cannot parse; nginx would answer 500.
    proxy_intercept_errors on;
    error_page 400 414 431 = @threshold_refused;
";

const ORIGINAL: &str = "    \
    # The client's request.
    proxy_set_header X-Original-Method $request_method;
    proxy_set_header X-Original-URI $request_uri;
    proxy_set_header X-Original-Host $host;
    proxy_set_header X-Original-Content-Length $content_length;
    # The id stays the same after an internal redirect (`index`, `try_files`, `error_page`), so that a request is counted once.
    proxy_set_header X-Threshold-Request-Id $request_id;
    # The client's address: replaced, never appended. Behind another proxy or a CDN, use `set_real_ip_from` and
    # `real_ip_header` to set $remote_addr.
    proxy_set_header X-Forwarded-For $remote_addr;
";

const AWAY: &str = "
location @threshold_refused {
    auth_request off;
    return 403;
}

#location @threshold_away {
#    auth_request off;
#    return 204;
#}

";

const DENIED: &str = "\
location /_threshold_denied/ {
    internal;
    auth_request off;
    # The format is the extension of the URI.
    default_type text/plain;
    types {
        application/json            json;
        application/problem+json    problem;
        \"text/plain; charset=utf-8\" text;
    }
    # The statuses of Threshold and of the policy's rules.
";
