//! A service of the world outside that an example calls: it writes down what it is sent, and answers as it is told.

use std::net::SocketAddr;
use std::sync::mpsc;
use std::time::Duration;

use ::axum::Router;
use ::axum::http::{StatusCode, Uri};
use serde_json::Value;
use tokio::net::TcpListener;
use tokio::runtime::Runtime;
use tokio::sync::watch;

/// Longer than anything here takes; who waits so long waits for what never comes.
const TOO_LONG: Duration = Duration::from_secs(60);

/// A service on a socket of its own, until this is dropped.
pub(crate) struct Outside {
    address: SocketAddr,
    asked: mpsc::Receiver<(String, Value)>,
    answer: watch::Sender<Option<StatusCode>>,
    _runtime: Runtime,
}

impl Outside {
    /// Answers everything with 200 unless it is told otherwise.
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

    /// From now on answers with this status; with none it keeps who asks waiting until there is one.
    pub(crate) fn answer_with(&self, status: Option<StatusCode>) {
        self.answer.send(status).unwrap();
    }

    /// The path and the body of the next request, which may be yet to come.
    #[track_caller]
    pub(crate) fn next(&self) -> (String, Value) {
        self.asked.recv_timeout(TOO_LONG).unwrap()
    }

    /// Whether nothing was asked but what was already looked at.
    pub(crate) fn is_quiet(&self) -> bool {
        self.asked.try_recv().is_err()
    }
}
