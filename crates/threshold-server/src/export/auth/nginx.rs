//! nginx: what a `server` includes, and what a location includes that sets headers of its own.

use std::fmt::Write as _;

use super::{ASKED, Believed, NO_COOKIES, Named, THRESHOLD, shown, written_from};

/// What Threshold says of a request that nginx hands on: the variable it is kept in, the header it comes in, and the one
/// that the client reads, if any.
const TOLD: [(&str, &str, &str); 13] = [
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
];

/// The file for a `server`.
pub(super) fn write(believed: &Believed) -> String {
    let mut out = written_from(
        "nginx-auth",
        &[
            "Every request of a server that includes this file is decided by Threshold first. It wants an `upstream threshold`.",
            "A location inherits `add_header`, `error_page` and `proxy_set_header` only if it has none of its own: one with an",
            "`add_header` or `error_page` must repeat those below, one with a `proxy_set_header` includes threshold_location.conf.",
        ],
    );
    out.push_str("\nauth_request /_threshold;\n\n");
    hash_sizes(believed, &mut out);
    out.push_str("# What Threshold answers.\n");
    for (variable, header, _) in TOLD {
        let variable = format!("$threshold_{variable}");
        let _ = writeln!(out, "auth_request_set {variable:<20} $upstream_http_{header};");
    }
    out.push_str("auth_request_set $threshold_answer    $upstream_status;\n");
    out.push_str("\n# What the client is told of it. nginx leaves out a header without a value.\n");
    for (variable, _, told) in TOLD.iter().filter(|(_, _, told)| !told.is_empty()) {
        let variable = format!("$threshold_{variable}");
        let _ = writeln!(out, "add_header {told:<21} {variable:<20} always;");
    }
    out.push_str(
        "\n# nginx hands on 403 and nothing else of what it is told here, so a denial comes as 403 and is put together again.\n\
         error_page 403 = /_threshold_denied/answer.$threshold_form;\n\n",
    );
    toward_application(believed, &mut out);
    out.push('\n');
    ask(believed, &mut out);
    out.push_str(AWAY);
    denied(believed, &mut out);
    out
}

/// The lines for a location that sets headers of its own.
pub(super) fn write_location(believed: &Believed) -> String {
    let mut out = written_from(
        "nginx-auth --location",
        &[
            "To be included in every location that has a `proxy_set_header` of its own, and so inherits none of its server's.",
        ],
    );
    out.push('\n');
    toward_application(believed, &mut out);
    out
}

/// Removes the client's headers on the way to the application.
fn toward_application(believed: &Believed, out: &mut String) {
    out.push_str(
        "# What a client sends under these names does not reach the application. To tell it who is calling or where from, set\n\
         # the header in the location beside these lines: nginx sends no header without a value. A name with an underscore\n\
         # is dropped by nginx itself: leave `underscores_in_headers` off.\n",
    );
    for header in removed_names(believed) {
        let _ = writeln!(out, "proxy_set_header {} \"\";", shown(&header));
    }
}

/// What is removed on the way to the application.
fn removed_names(believed: &Believed) -> Vec<String> {
    let written = ["x-forwarded-for", "x-forwarded-host"].into_iter().chain(believed.removed()).map(str::to_owned);
    let respelled = believed.respelled().into_iter().filter(|name| !name.contains('_'));
    written.chain(respelled).collect()
}

/// nginx keeps the names of all `proxy_set_header` of a location in one hash, whose default size is too small for these.
fn hash_sizes(believed: &Believed, out: &mut String) {
    let longest = removed_names(believed).iter().map(String::len).max().unwrap_or(0);
    // A pointer, the length, the name, and the end of the bucket.
    let bucket = longest.saturating_add(32).next_power_of_two().max(128);
    let _ = write!(
        out,
        "# Room for the names of all headers that are set below, and for some of your own.\n\
         proxy_headers_hash_max_size 2048;\nproxy_headers_hash_bucket_size {bucket};\n\n"
    );
}

/// The location that asks Threshold.
fn ask(believed: &Believed, out: &mut String) {
    out.push_str(ASK);
    let none_pass = believed.counted.is_empty();
    out.push_str(if none_pass { NONE_PASS } else { ALL_PASS });
    let _ = writeln!(out, "    proxy_set_header Host {THRESHOLD};");
    out.push_str(ORIGINAL);
    if let Some(address) = &believed.address {
        let _ = writeln!(out, "    proxy_set_header {} $remote_addr;", shown(address));
    }
    if none_pass {
        out.push_str(ACCEPT);
        if believed.token {
            out.push_str(TOKEN);
        }
    } else {
        removed_from_question(believed, out);
    }
    out.push_str("    # If the server asks for a token, write it here:\n    #proxy_set_header X-Threshold-Token \"the token\";\n");
    names(believed, out);
    if none_pass {
        clients_own(believed, out);
    } else {
        clients_own_passed(believed, out);
    }
    out.push_str(REFUSED);
    out.push_str("    # Without Threshold, nginx answers 500. To let requests through instead:\n    #error_page 502 504 = @threshold_away;\n}\n");
}

/// Where all of the client's headers are passed on: those that Threshold would believe are not.
fn removed_from_question(believed: &Believed, out: &mut String) {
    let names = believed.names.iter().map(|named| named.header.as_str());
    let rest = ["forwarded", "x-forwarded-host"].into_iter().chain(ASKED).filter(|header| !is_original(header));
    let rest = rest.filter(|header| !believed.addresses.iter().any(|own| own == header));
    for header in believed.addresses.iter().map(String::as_str).chain(rest).chain(names) {
        let _ = writeln!(out, "    proxy_set_header {} \"\";", shown(header));
    }
}

/// Where the operator says who is calling.
fn names(believed: &Believed, out: &mut String) {
    let Some(Named { header, .. }) = believed.example() else { return };
    let all: Vec<String> = believed.names.iter().map(|own| format!("{} ({})", shown(&own.header), own.says)).collect();
    let _ = write!(
        out,
        "    # Who is calling is not for the client to say. Where you verify it, set what you have verified: {}.\n    \
         # nginx leaves out a line without a value. With `auth_basic`, for instance, which it checks before it asks here:\n    \
         #proxy_set_header {} $remote_user;\n",
        all.join(", "),
        shown(header)
    );
}

/// The client's own headers that the policy takes for a name.
fn clients_own(believed: &Believed, out: &mut String) {
    for line in believed.clients_own("switch its line on") {
        let _ = writeln!(out, "    # {line}");
    }
    for Named { header, .. } in &believed.clients {
        let _ = writeln!(out, "    #proxy_set_header {} $http_{};", shown(header), header.replace('-', "_"));
    }
}

/// The same where all of the client's headers are passed on.
fn clients_own_passed(believed: &Believed, out: &mut String) {
    let removed = |header: &str, out: &mut String| {
        let _ = writeln!(out, "    proxy_set_header {} \"\";", shown(header));
    };
    for line in believed.clients_own("delete the line that removes it") {
        let _ = writeln!(out, "    # {line}");
    }
    for Named { header, .. } in believed.clients.iter().filter(|named| named.header != "cookie") {
        removed(header, out);
    }
    if !believed.counts_cookies() {
        let _ = writeln!(out, "    # {NO_COOKIES}");
        removed("cookie", out);
    }
    if let Some(line) = believed.counted_by() {
        let _ = writeln!(out, "    # {line}");
    }
}

/// Whether nginx itself says this of the request.
fn is_original(header: &str) -> bool {
    header.starts_with("x-original-") || header == "x-threshold-request-id"
}

/// The location that puts a denial together.
fn denied(believed: &Believed, out: &mut String) {
    out.push_str(DENIED);
    for status in &believed.statuses {
        let _ = writeln!(out, "    if ($threshold_status = {status}) {{ return {status} $threshold_body; }}");
    }
    out.push_str(
        "    if ($threshold_status) { return 429 $threshold_body; }\n    \
         # Those of its HTTP server, which come without a body.\n    \
         if ($threshold_answer ~ \"431$\") { return 431 \"The headers of this request are too large.\\n\"; }\n    \
         if ($threshold_answer ~ \"(400|414)$\") { return 400 \"This request cannot be read.\\n\"; }\n    \
         # A 403 that was not Threshold's.\n    return 403;\n}\n",
    );
}

const ASK: &str = "\
location = /_threshold {
    internal;
    auth_request off;
    proxy_pass http://threshold/auth?deny=403;
    proxy_http_version 1.1;
    # A denial's body comes in a header.
    proxy_buffer_size 16k;
    proxy_buffers 4 16k;
    # A decision takes no longer, except for shadow bans, which are waited out: at most 3 s.
    proxy_connect_timeout 1s;
    proxy_send_timeout 5s;
    proxy_read_timeout 5s;
    proxy_pass_request_body off;
";

const NONE_PASS: &str = "    \
    # Threshold is sent what is set here and nothing else of the client's: it refuses a request with many or large headers.
    proxy_pass_request_headers off;
    proxy_set_header Content-Length \"\";
    proxy_set_header Connection \"\";
    # Without tokens Threshold answers only to its own address and to the names that --allow-host gives it.
";

const ALL_PASS: &str = "    \
    # The policy counts by headers of the client's. All of them are sent but those that are set here: nginx has no other way
    # to send a header that comes twice as it came.
    proxy_set_header Content-Length \"\";
    proxy_set_header Connection \"\";
    proxy_set_header Upgrade \"\";
    # Without tokens Threshold answers only to its own address and to the names that --allow-host gives it.
";

/// The client's token, where the policy takes a name from it.
const TOKEN: &str = "    \
    # Who is calling: Threshold verifies the token in it.
    proxy_set_header Authorization $http_authorization;
";

const ACCEPT: &str = "    \
    # Which form of a denial the client reads.
    proxy_set_header Accept $http_accept;
";

const REFUSED: &str = "    \
    # A request whose headers Threshold cannot read is refused as well; nginx would make 500 of it.
    proxy_intercept_errors on;
    error_page 400 414 431 = @threshold_refused;
";

const ORIGINAL: &str = "    \
    # What the client asks for.
    proxy_set_header X-Original-Method $request_method;
    proxy_set_header X-Original-URI $request_uri;
    proxy_set_header X-Original-Host $host;
    proxy_set_header X-Original-Content-Length $content_length;
    # The same after an internal redirect (`index`, `try_files`, `error_page`), so that a request is counted once.
    proxy_set_header X-Threshold-Request-Id $request_id;
    # Where it comes from: replaced, never appended to. Behind another proxy or a CDN let `set_real_ip_from` and
    # `real_ip_header` make $remote_addr the client's.
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
    # The form is the extension of this location's name.
    default_type text/plain;
    types {
        application/json            json;
        application/problem+json    problem;
        \"text/plain; charset=utf-8\" text;
    }
    # The statuses that Threshold answers with, and those that the policy's rules set.
";
