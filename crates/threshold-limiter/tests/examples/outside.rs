//! An external service that an example calls. It records requests and gives the configured answers.

use std::net::SocketAddr;
use std::sync::mpsc;
use std::time::Duration;

use ::axum::Router;
use ::axum::http::{StatusCode, Uri};
use serde_json::Value;
use tokio::net::TcpListener;
use tokio::runtime::Runtime;
use tokio::sync::watch;

/// A timeout that is longer than any step takes.
const TOO_LONG: Duration = Duration::from_secs(60);

/// A service on a socket of its own, until this value is dropped.
pub(crate) struct Outside {
    address: SocketAddr,
    asked: mpsc::Receiver<(String, Value)>,
    answer: watch::Sender<Option<StatusCode>>,
    _runtime: Runtime,
}

impl Outside {
    /// Starts the service, which answers every request with 200.
    pub(crate) fn start() -> Self {
        let runtime = Runtime::new().unwrap();
        let listener = runtime.block_on(TcpListener::bind("127.0.0.1:0")).unwrap();
        let address = listener.local_addr().unwrap();
        let (answer, told) = watch::channel(Some(StatusCode::OK));
        let (tell, asked) = mpsc::channel();
        let take = move |uri: Uri, body: String| {
            tell.send((uri.path().to_owned(), serde_json::from_str(&body).unwrap())).unwrap();
            let mut told = told.clone();
            async move { told.wait_for(Option::is_some).await.unwrap().unwrap() }
        };
        let router = Router::new().fallback(take);
        runtime.spawn(async move { ::axum::serve(listener, router).await });
        Self { address, asked, answer, _runtime: runtime }
    }

    pub(crate) fn url(&self) -> String {
        format!("http://{}", self.address)
    }

    /// Sets the status of all answers from now on. With `None`, requests wait until there is one.
    pub(crate) fn answer_with(&self, status: Option<StatusCode>) {
        self.answer.send(status).unwrap();
    }

    /// Waits for the next request and returns its path and body.
    #[track_caller]
    pub(crate) fn next(&self) -> (String, Value) {
        self.asked.recv_timeout(TOO_LONG).unwrap()
    }

    /// Returns whether there is no further request.
    pub(crate) fn is_quiet(&self) -> bool {
        self.asked.try_recv().is_err()
    }
}
