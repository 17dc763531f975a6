//! Requests and responses of JavaScript as those of the crate `http`.
//!
//! A body that nothing counts stays a stream of JavaScript, which the platform passes on by itself: with its length, and with its error
//! if it breaks off.

use std::pin::Pin;
use std::task::{Context, Poll};

use bytes::Bytes;
use http::header::{CONTENT_ENCODING, CONTENT_LENGTH, HeaderMap, HeaderName, HeaderValue, SET_COOKIE};
use http::request::Parts;
use http::{Method, Request, Response, StatusCode, Uri};
use http_body::{Body as HttpBody, Frame, SizeHint};
use threshold_limiter::tower::{BodyParts, RequestBody, ResponseBody, Runtime};
use worker::js_sys::{BigInt, Reflect, Uint8Array};
use worker::send::{SendFuture, SendWrapper};
use worker::wasm_bindgen::prelude::wasm_bindgen;
use worker::wasm_bindgen::{self, JsCast as _, JsValue};
use worker::wasm_bindgen_futures::JsFuture;
use worker::web_sys::{self, ReadableStream, TransformStream};
use worker::worker_sys::FixedLengthStream;
use worker::worker_sys::ext::ResponseExt as _;
use worker::{Body, Result, request_to_wasm};

use crate::socket;

/// The longest URL that the crate `http` takes.
const MAX_URL: usize = 65_534;

/// Why a request cannot be read.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum BadRequest {
    /// The URL is too long.
    TooLong,
    /// The URL has characters that no URL has.
    Url,
    /// The method is not a token.
    Method,
    /// A field cannot be in a header.
    Header,
}

/// The request or response of JavaScript that parts were read from, as an extension of them.
#[derive(Debug, Clone)]
struct Original<T>(SendWrapper<T>);

/// How many cookies the upstream has set, as an extension of its response.
#[derive(Debug, Clone, Copy)]
struct Cookies(usize);

/// A body, read here only if something asks for its bytes.
#[derive(Debug, Default)]
pub(crate) struct JsBody {
    stream: Option<SendWrapper<ReadableStream>>,
    read: Option<Body>,
}

impl JsBody {
    fn new(stream: Option<ReadableStream>) -> Self {
        Self { stream: stream.map(SendWrapper::new), read: None }
    }

    /// Returns the stream, unless it is empty or something has begun to read it.
    fn into_stream(self) -> Option<ReadableStream> {
        self.stream.map(|stream| stream.0)
    }

    /// Returns the body as one that is read here.
    pub(crate) fn read(&mut self) -> &mut Body {
        let stream = &mut self.stream;
        self.read.get_or_insert_with(|| stream.take().map_or_else(Body::empty, |stream| Body::new(stream.0)))
    }
}

impl HttpBody for JsBody {
    type Data = Bytes;
    type Error = worker::Error;

    fn poll_frame(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>>>> {
        Pin::new(self.read()).poll_frame(cx)
    }

    fn is_end_stream(&self) -> bool {
        self.stream.is_none() && self.read.as_ref().is_none_or(HttpBody::is_end_stream)
    }

    fn size_hint(&self) -> SizeHint {
        if self.is_end_stream() { SizeHint::with_exact(0) } else { SizeHint::default() }
    }
}

/// Reads a request.
pub(crate) fn read_request(request: web_sys::Request) -> core::result::Result<Request<JsBody>, BadRequest> {
    let url = request.url();
    if url.len() > MAX_URL {
        return Err(BadRequest::TooLong);
    }
    let mut read = Request::new(JsBody::new(request.body()));
    *read.uri_mut() = url.parse::<Uri>().map_err(|_| BadRequest::Url)?;
    *read.method_mut() = request.method().parse::<Method>().map_err(|_| BadRequest::Method)?;
    *read.headers_mut() = read_headers(&request.headers()).ok_or(BadRequest::Header)?;
    read.extensions_mut().insert(Original(SendWrapper::new(request)));
    Ok(read)
}

/// Reads the response of an upstream.
pub(crate) fn read_response(response: web_sys::Response) -> Result<Response<JsBody>> {
    let mut read = Response::new(JsBody::new(response.body()));
    *read.status_mut() = StatusCode::from_u16(response.status())?;
    *read.headers_mut() =
        read_headers(&response.headers()).ok_or("the response has a field that cannot be in a header")?;
    let cookies = Cookies(read.headers().get_all(SET_COOKIE).iter().count());
    read.extensions_mut().insert(cookies);
    read.extensions_mut().insert(Original(SendWrapper::new(response)));
    Ok(read)
}

/// Reads header fields. A value may have characters beyond ASCII.
fn read_headers(headers: &web_sys::Headers) -> Option<HeaderMap> {
    let mut read = HeaderMap::new();
    for entry in headers.entries() {
        let entry = entry.ok()?;
        let text = |at| Reflect::get_u32(&entry, at).ok()?.as_string();
        let (name, value) = (HeaderName::from_bytes(text(0)?.as_bytes()), HeaderValue::from_bytes(text(1)?.as_bytes()));
        read.append(name.ok()?, value.ok()?);
    }
    Some(read)
}

/// Makes a request for an upstream. `url` replaces that of the client.
pub(crate) fn write_request(
    request: Request<RequestBody<JsBody>>,
    url: Option<&str>,
    runtime: &dyn Runtime,
) -> Result<web_sys::Request> {
    let (parts, body) = request.into_parts();
    let original = original_request(&parts)?;
    // JavaScript makes no GET or HEAD with a body, also not with an empty one that a client has announced.
    let has_body = !matches!(parts.method, Method::GET | Method::HEAD) && !body.is_end_stream();
    let counted = match (body.into_uncounted(), url) {
        // The platform's own request.
        (Ok(_), None) => return Ok(Clone::clone(original)),
        (Ok(_), Some(url)) if has_body || original.body().is_none() => {
            return Ok(web_sys::Request::new_with_str_and_init(url, original.unchecked_ref())?);
        }
        (Ok(_), Some(_)) => None,
        (Err(body), _) => Some(body).filter(|_| has_body),
    };
    let init = web_sys::RequestInit::new();
    init.set_method(parts.method.as_str());
    init.set_headers(&original.headers());
    init.set_redirect(original.redirect());
    init.set_signal(Some(&original.signal()));
    Reflect::set(&init, &"cf".into(), &Reflect::get(original, &"cf".into())?)?;
    if let Some(body) = counted {
        let stream = request_to_wasm(Request::post("http://body/").body(body)?)?.body();
        let stream = stream.map(|stream| piped(&stream, content_length(&parts.headers), (), runtime)).transpose()?;
        init.set_body(&stream.into());
    }
    Ok(web_sys::Request::new_with_str_and_init(url.unwrap_or(&original.url()), &init)?)
}

fn original_request(parts: &Parts) -> Result<&web_sys::Request> {
    let original = parts.extensions.get::<Original<web_sys::Request>>();
    Ok(original.map(|original| &*original.0).ok_or("the request was not read from JavaScript")?)
}

/// Makes the response for the client. What a request holds is given back when its body or its socket has ended, or when the client has
/// left.
pub(crate) fn write_response(
    response: Response<ResponseBody<JsBody>>,
    runtime: &dyn Runtime,
) -> Result<web_sys::Response> {
    let (mut parts, body) = response.into_parts();
    let original = parts.extensions.remove::<Original<web_sys::Response>>().map(|original| original.0.0);
    let (body, hold) = match body.into_parts() {
        BodyParts::Refusal(text) => return refusal(parts.status, &parts.headers, &text),
        BodyParts::Service(body, hold) => (body.into_stream(), hold),
    };
    let original = original.ok_or("the response was not read from JavaScript")?;
    let written = match (body, original.websocket(), hold) {
        (Some(stream), _, Some(hold)) => {
            // The length is that of the encoded body, and what passes here is decoded.
            let length = content_length(&parts.headers).filter(|_| !parts.headers.contains_key(CONTENT_ENCODING));
            let stream = piped(&stream, length, hold, runtime)?;
            web_sys::Response::new_with_opt_readable_stream_and_init(Some(&stream), original.unchecked_ref())?
        }
        (None, Some(upstream), Some(hold)) => {
            let init = web_sys::ResponseInit::new();
            init.set_status(original.status());
            init.set_headers(&original.headers());
            Reflect::set(&init, &"webSocket".into(), &socket::relay(&upstream, hold, runtime)?)?;
            web_sys::Response::new_with_opt_readable_stream_and_init(None, &init)?
        }
        // Nothing is held, or there is nothing to wait for.
        (stream, ..) => {
            web_sys::Response::new_with_opt_readable_stream_and_init(stream.as_ref(), original.unchecked_ref())?
        }
    };
    let cookies = parts.extensions.remove::<Cookies>().unwrap_or(Cookies(0));
    add_fields(&written.headers(), &original.headers(), &parts.headers, cookies)?;
    Ok(written)
}

/// Returns a stream with the bytes of another one. `held` is dropped when all bytes were read, the stream has failed, or nobody reads
/// the bytes any more.
fn piped(
    stream: &ReadableStream,
    length: Option<u64>,
    held: impl Send + 'static,
    runtime: &dyn Runtime,
) -> Result<ReadableStream> {
    let through: TransformStream = match length {
        Some(length) => FixedLengthStream::new_big_int(BigInt::from(length))?.unchecked_into(),
        None => IdentityTransformStream::new()?.unchecked_into(),
    };
    let ended = SendFuture::new(JsFuture::from(stream.pipe_to(&through.writable())));
    runtime.spawn(Box::pin(async move {
        // A failure reaches the reader through the stream.
        let _ = ended.await;
        drop(held);
    }));
    Ok(through.readable())
}

/// Adds the fields that the upstream has not set. Of cookies, every one is a field of its own, and those of the upstream come first.
fn add_fields(to: &web_sys::Headers, own: &web_sys::Headers, all: &HeaderMap, cookies: Cookies) -> Result<()> {
    for name in all.keys().filter(|name| **name != SET_COOKIE) {
        if !own.has(name.as_str())? {
            for value in all.get_all(name) {
                to.append(name.as_str(), text(value)?)?;
            }
        }
    }
    for cookie in all.get_all(SET_COOKIE).iter().skip(cookies.0) {
        to.append(SET_COOKIE.as_str(), text(cookie)?)?;
    }
    Ok(())
}

fn refusal(status: StatusCode, headers: &HeaderMap, body: &[u8]) -> Result<web_sys::Response> {
    let init = web_sys::ResponseInit::new();
    init.set_status(status.as_u16());
    let fields = web_sys::Headers::new()?;
    for (name, value) in headers {
        fields.append(name.as_str(), text(value)?)?;
    }
    init.set_headers(&fields);
    let body = (!body.is_empty()).then(|| Uint8Array::from(body));
    Ok(web_sys::Response::new_with_opt_buffer_source_and_init(body.as_deref(), &init)?)
}

fn text(value: &HeaderValue) -> Result<&str> {
    Ok(std::str::from_utf8(value.as_bytes())?)
}

/// Returns the announced length of a body.
pub(crate) fn content_length(headers: &HeaderMap) -> Option<u64> {
    headers.get(CONTENT_LENGTH)?.to_str().ok()?.parse().ok()
}

#[wasm_bindgen]
extern "C" {
    /// A stream that passes bytes on as they come.
    type IdentityTransformStream;

    #[wasm_bindgen(constructor, catch)]
    fn new() -> core::result::Result<IdentityTransformStream, JsValue>;
}
