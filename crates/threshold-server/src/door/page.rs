//! The dashboard at `/`: files that are part of the program. They are the same for everyone and hold no data: a browser gets that from
//! the operators' API, after signing in.

use axum::extract::Path;
use axum::response::Response;
use http::header::{CACHE_CONTROL, CONTENT_TYPE, REFERRER_POLICY, X_CONTENT_TYPE_OPTIONS, X_FRAME_OPTIONS};
use http::{HeaderName, HeaderValue, StatusCode};
use serde_json::json;

use super::ApiError;
use super::openapi::{Operation, Schemas, WRONG_HOST, path_parameter};
use super::routes::{Route, get};

/// Scripts, styles and connections of this server alone: no inline script, no other site, no frame around the page.
const CONTENT_SECURITY_POLICY: &str = "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; \
                                       base-uri 'none'; form-action 'none'; frame-ancestors 'none'";

/// A file of the page.
struct File {
    name: &'static str,
    kind: &'static str,
    contents: &'static str,
}

const HTML: &str = "text/html; charset=utf-8";
const SCRIPT: &str = "text/javascript; charset=utf-8";

macro_rules! files {
    ($($name:literal $kind:expr;)+) => {
        &[$(File { name: $name, kind: $kind, contents: include_str!(concat!("../page/", $name)) }),+]
    };
}

const FILES: &[File] = files! {
    "index.html" HTML;
    "style.css" "text/css; charset=utf-8";
    "icon.svg" "image/svg+xml";
    "api.js" SCRIPT;
    "chart.js" SCRIPT;
    "dom.js" SCRIPT;
    "events.js" SCRIPT;
    "format.js" SCRIPT;
    "main.js" SCRIPT;
    "overview.js" SCRIPT;
    "penalties.js" SCRIPT;
    "policy.js" SCRIPT;
    "subject.js" SCRIPT;
    "try.js" SCRIPT;
};

pub(super) fn routes() -> Vec<Route> {
    vec![get("/", index, |_| describe("page", "The dashboard")), get("/page/{file}", file, describe_file)]
}

fn describe_file(_: &mut Schemas) -> Operation {
    describe("pageFile", "A file of the dashboard")
        .parameter(path_parameter("file"))
        .errors(&[(404, "The dashboard has no such file")])
}

fn describe(id: &'static str, summary: &'static str) -> Operation {
    let content = json!({"*/*": {"schema": {"type": "string"}}});
    Operation::new(id, summary).response(200, "The file", &content).errors(&[WRONG_HOST]).security(json!([]))
}

async fn index() -> Result<Response, ApiError> {
    answer("index.html")
}

async fn file(Path(name): Path<String>) -> Result<Response, ApiError> {
    answer(&name)
}

fn answer(name: &str) -> Result<Response, ApiError> {
    let file = FILES.iter().find(|file| file.name == name);
    let file =
        file.ok_or_else(|| ApiError::new(StatusCode::NOT_FOUND, "not_found", "there is nothing at this path"))?;
    let mut response = Response::new(file.contents.into());
    let fields: [(HeaderName, &'static str); 6] = [
        (CONTENT_TYPE, file.kind),
        // A server that was upgraded must not be shown by scripts of the old one.
        (CACHE_CONTROL, "no-cache"),
        (X_CONTENT_TYPE_OPTIONS, "nosniff"),
        (X_FRAME_OPTIONS, "DENY"),
        // Names of subjects are in the fragment of the address, which is never sent; the rest need not be either.
        (REFERRER_POLICY, "no-referrer"),
        (HeaderName::from_static("content-security-policy"), CONTENT_SECURITY_POLICY),
    ];
    for (name, value) in fields {
        response.headers_mut().insert(name, HeaderValue::from_static(value));
    }
    Ok(response)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The files of the folder and the list above must be the same, or a script is missing in the program.
    ///
    /// Woken by leaving a file out of the list.
    #[test]
    fn every_file_of_the_page_is_served_and_every_import_exists() {
        let folder = concat!(env!("CARGO_MANIFEST_DIR"), "/src/page");
        let mut found: Vec<String> =
            std::fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
        let mut listed: Vec<&str> = FILES.iter().map(|file| file.name).collect();
        found.sort_unstable();
        listed.sort_unstable();
        assert_eq!(found, listed);
        for file in FILES.iter().filter(|file| file.kind == SCRIPT) {
            let imports = file.contents.split(" from \"./").skip(1).filter_map(|rest| rest.split('"').next());
            imports.for_each(|name| assert!(listed.contains(&name), "{} imports {name}", file.name));
        }
    }

    /// The content security policy forbids what these would need, and text of callers must never be parsed.
    #[test]
    fn no_file_has_inline_scripts_or_parses_html() {
        for file in FILES {
            for wrong in [
                "innerHTML",
                "outerHTML",
                "insertAdjacentHTML",
                "document.write",
                "eval(",
                "new Function",
                "http://",
                "https://",
            ] {
                let text = file.contents.replace("http://www.w3.org", "");
                assert!(!text.contains(wrong), "{} has {wrong}", file.name);
            }
        }
        let html = FILES.iter().find(|file| file.name == "index.html").map_or("", |file| file.contents);
        assert!(!html.contains("style=") && !html.contains("onclick") && html.matches("<script").count() == 1);
    }
}
