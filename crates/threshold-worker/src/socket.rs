//! WebSockets of requests that hold concurrency.

use threshold_limiter::tower::{Hold, Runtime};
use worker::Result;
use worker::js_sys::{Promise, Reflect};
use worker::send::SendFuture;
use worker::wasm_bindgen::prelude::wasm_bindgen;
use worker::wasm_bindgen::{self, JsCast as _, JsValue};
use worker::wasm_bindgen_futures::JsFuture;
use worker::web_sys::WebSocket;

#[wasm_bindgen(module = "/src/socket.js")]
extern "C" {
    #[wasm_bindgen(js_name = relay, catch)]
    fn relayed(upstream: &WebSocket) -> core::result::Result<JsValue, JsValue>;
}

/// Returns a socket for the client that is connected to the upstream's. The platform tells nobody when a socket ends that it passes on
/// by itself. `hold` is dropped when either side has ended.
pub(crate) fn relay(upstream: &WebSocket, hold: Hold, runtime: &dyn Runtime) -> Result<JsValue> {
    let relay = relayed(upstream)?;
    let ended: Promise = Reflect::get(&relay, &"ended".into())?.unchecked_into();
    let ended = SendFuture::new(JsFuture::from(ended));
    runtime.spawn(Box::pin(async move {
        let _ = ended.await;
        drop(hold);
    }));
    Ok(Reflect::get(&relay, &"client".into())?)
}
