//! Applications with a limited login, each on its usual server. They count how often the login ran.

use std::any::Any;
use std::io::{BufRead as _, BufReader};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use axum::Router;
use axum::extract::Path as Captured;
use axum::http::StatusCode;
use axum::response::IntoResponse as _;
use axum::routing::{any, post};

use super::client::Client;
use super::process::{PATIENCE, Scratch};
use super::proxy::Proxy;

/// The kind of application.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Kind {
    /// Flask on gunicorn.
    Flask,
    /// Django on waitress.
    Django,
    /// FastAPI on uvicorn, with the parser that needs no other package.
    FastApiH11,
    /// FastAPI on uvicorn, with the parser of `uvicorn[standard]`.
    FastApiHttptools,
    /// FastAPI on uvicorn, with a route for `/api/login/{rest:path}` as well.
    FastApiBelow,
    /// Express, `app.post('/api/login', …)`.
    ExpressPost,
    /// Express, `app.use('/api/login', …)`.
    ExpressUse,
    /// axum, `route("/api/login", …)`.
    AxumRoute,
    /// axum, `route("/api/{*rest}", …)`, which resolves the whole path itself.
    AxumResolving,
    /// axum, `route("/api/{*rest}", …)`, which resolves only the captured part, and so stays below `/api`.
    AxumResolvingBelow,
    /// axum, `route("/api/login/{*rest}", …)`.
    AxumCatchAll,
    /// axum, `nest("/api/login", …)`.
    AxumNest,
    /// nginx, `proxy_pass` with a path: it passes on the decoded and resolved path.
    NginxUri,
}

impl Kind {
    /// Whether everything below `/api/login` is the login too. Rules for such an application match `/api/login/**`.
    pub(crate) fn takes_everything_below(self) -> bool {
        matches!(self, Self::FastApiBelow | Self::ExpressUse | Self::AxumCatchAll | Self::AxumNest)
    }
}

/// An application that ends with its test.
pub(crate) struct Backend {
    pub(crate) kind: Kind,
    pub(crate) address: SocketAddr,
    /// Ends the application when it is dropped.
    _running: Box<dyn Any>,
}

impl Backend {
    pub(crate) fn start(kind: Kind) -> Self {
        let (address, running) = match kind {
            Kind::Flask => python("flask_app.py", &[]),
            Kind::Django => python("django_app.py", &[]),
            Kind::FastApiH11 => python("fastapi_app.py", &["h11"]),
            Kind::FastApiHttptools => python("fastapi_app.py", &["httptools"]),
            Kind::FastApiBelow => python("fastapi_app.py", &["httptools", "below"]),
            Kind::ExpressPost => express("post"),
            Kind::ExpressUse => express("use"),
            Kind::NginxUri => nginx(),
            Kind::AxumRoute | Kind::AxumResolving | Kind::AxumResolvingBelow | Kind::AxumCatchAll | Kind::AxumNest => {
                axum(kind)
            }
        };
        Self { kind, address, _running: running }
    }

    /// Returns how often the login ran, as counted by the application.
    pub(crate) fn logins(&self) -> u64 {
        let stream = TcpStream::connect(self.address).unwrap();
        stream.set_read_timeout(Some(PATIENCE)).unwrap();
        let answer = Client::new(stream).send("GET", "/health", &[], "").unwrap();
        answer.body.parse().unwrap_or_else(|error| panic!("{error}: {answer:?}"))
    }
}

/// A process that prints its port on the first line.
struct Process {
    child: Child,
    folder: Scratch,
}

impl Process {
    fn start(command: &mut Command) -> (SocketAddr, Self) {
        let folder = Scratch::folder();
        // A file, because it is read only if the test fails.
        let errors = std::fs::File::create(folder.path().join("errors")).unwrap();
        let child = command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(errors).spawn();
        let child = child.unwrap_or_else(|error| panic!("{command:?} does not start: {error}"));
        let mut own = Self { child, folder };
        let mut line = String::new();
        BufReader::new(own.child.stdout.as_mut().unwrap()).read_line(&mut line).unwrap();
        let port = line.trim().parse::<u16>().unwrap_or_else(|_| panic!("{command:?} printed {line:?} and no port"));
        (SocketAddr::from(([127, 0, 0, 1], port)), own)
    }
}

impl Drop for Process {
    /// Sends SIGTERM, so that its child processes end too, and SIGKILL if that does not help.
    fn drop(&mut self) {
        if std::thread::panicking() {
            eprintln!("{}", std::fs::read_to_string(self.folder.path().join("errors")).unwrap_or_default());
        }
        let _ =
            rustix::process::kill_process(rustix::process::Pid::from_child(&self.child), rustix::process::Signal::TERM);
        for _ in 0..200 {
            if matches!(self.child.try_wait(), Ok(Some(_))) {
                return;
            }
            std::thread::sleep(Duration::from_millis(25));
        }
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Returns a path from a variable that `./test` sets.
fn installed(variable: &str) -> PathBuf {
    std::env::var_os(variable).unwrap_or_else(|| panic!("{variable} is not set: ./test sets it")).into()
}

fn app(file: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/backends/apps").join(file)
}

fn python(file: &str, args: &[&str]) -> (SocketAddr, Box<dyn Any>) {
    let mut command = Command::new(installed("THRESHOLD_BACKENDS_PYTHON"));
    let (address, process) = Process::start(command.arg(app(file)).args(args).env("PYTHONDONTWRITEBYTECODE", "1"));
    (address, Box::new(process))
}

fn express(method: &str) -> (SocketAddr, Box<dyn Any>) {
    let modules = installed("THRESHOLD_BACKENDS_NODE_MODULES");
    let mut command = Command::new("node");
    let (address, process) = Process::start(command.arg(app("express_app.js")).arg(method).env("NODE_PATH", modules));
    (address, Box::new(process))
}

fn axum(kind: Kind) -> (SocketAddr, Box<dyn Any>) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap();
    listener.set_nonblocking(true).unwrap();
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build().unwrap();
    let app = router(kind);
    runtime.spawn(async move {
        axum::serve(tokio::net::TcpListener::from_std(listener).unwrap(), app).await.unwrap();
    });
    (address, Box::new(runtime))
}

fn router(kind: Kind) -> Router {
    let calls = Arc::new(AtomicU64::new(0));
    let read = Arc::clone(&calls);
    let login = move || {
        calls.fetch_add(1, Ordering::SeqCst);
        std::future::ready(([("x-login", "ran")], "login"))
    };
    let below = login.clone();
    let resolving = move |Captured(rest): Captured<String>| {
        let found = if kind == Kind::AxumResolving {
            resolved(&format!("/api/{rest}")) == ["api", "login"]
        } else {
            resolved(&rest) == ["login"]
        };
        let login = found.then(&below);
        async move {
            match login {
                Some(login) => login.await.into_response(),
                None => StatusCode::NOT_FOUND.into_response(),
            }
        }
    };
    let router = match kind {
        Kind::AxumResolving | Kind::AxumResolvingBelow => Router::new().route("/api/{*rest}", post(resolving)),
        Kind::AxumCatchAll => {
            Router::new().route("/api/login", post(login.clone())).route("/api/login/{*rest}", post(login))
        }
        Kind::AxumNest => Router::new().nest("/api/login", Router::new().fallback(login)),
        _ => Router::new().route("/api/login", post(login)),
    };
    router.route("/health", any(move || std::future::ready(read.load(Ordering::SeqCst).to_string())))
}

/// Returns the segments of a path, without empty ones and with dot segments resolved.
fn resolved(path: &str) -> Vec<&str> {
    let mut segments = Vec::new();
    for segment in path.split('/') {
        match segment {
            "" | "." => {}
            ".." => drop(segments.pop()),
            plain => segments.push(plain),
        }
    }
    segments
}

/// The shipped configuration without Threshold, and with a path in `proxy_pass`.
fn nginx() -> (SocketAddr, Box<dyn Any>) {
    let inner = Backend::start(Kind::AxumRoute);
    let proxy = Proxy::edited("127.0.0.1:1", &inner.address.to_string(), &|file, text| match file {
        "nginx.conf" => {
            let old = "location / {\n            proxy_pass http://app;";
            assert_eq!(text.matches(old).count(), 1, "{text}");
            text.replace(old, "location / {\n            proxy_pass http://app/;")
        }
        _ => without_threshold(file, text),
    });
    (proxy.address, Box::new((proxy, inner)))
}

/// Removes the question to Threshold from nginx's files.
pub(crate) fn without_threshold(file: &str, text: String) -> String {
    if file != "threshold.conf" {
        return text;
    }
    let old = "auth_request /_threshold;\n";
    assert_eq!(text.matches(old).count(), 1, "{text}");
    text.replace(old, "")
}
