// Calls the server. Every change is JSON, so that no form of another site can make it.

/** An answer that is an error, as the server describes it. */
export class ApiError extends Error {
  constructor(status, body) {
    super(body?.message ?? `the server answered ${status}`);
    this.status = status;
    this.code = body?.error ?? "unknown";
    this.field = body?.field ?? null;
    this.body = body;
  }
}

let onSignedOut = () => {};

/** Sets what happens when the server no longer knows this session. */
export function whenSignedOut(callback) {
  onSignedOut = callback;
}

async function call(method, path, body) {
  const init = { method, headers: { Accept: "application/json" }, cache: "no-store", redirect: "error" };
  if (method !== "GET") {
    init.headers["Content-Type"] = "application/json";
    init.body = body === undefined ? undefined : JSON.stringify(body);
  }
  let response;
  try {
    response = await fetch(path, init);
  } catch {
    throw new ApiError(0, { error: "unreachable", message: "the server does not answer" });
  }
  const text = await response.text();
  let answer = null;
  try {
    answer = text === "" ? null : JSON.parse(text);
  } catch {
    // Not from this server: a proxy's own page.
    answer = { error: "unknown", message: `the server answered ${response.status} without JSON` };
  }
  if (response.ok) return answer;
  if (response.status === 401 && path !== "/v1/session") await checkSession();
  throw new ApiError(response.status, answer);
}

/** A refusal may be of one call alone: the session has ended only if the server says so. */
async function checkSession() {
  const session = await call("GET", "/v1/session").catch(() => null);
  if (session?.role === "none") onSignedOut();
}

export const get = (path) => call("GET", path);
export const post = (path, body) => call("POST", path, body);
export const put = (path, body) => call("PUT", path, body);
export const remove = (path) => call("DELETE", path);

/** Builds a query string from the values that are set. */
export function query(values) {
  const set = Object.entries(values).filter(([, value]) => value !== "" && value !== null && value !== undefined);
  const text = new URLSearchParams(set).toString();
  return text === "" ? "" : `?${text}`;
}

/**
 * Follows a stream of server-sent events. `onMessage` gets each as parsed JSON, `onState` whether the stream is connected.
 * Returns a function that ends it. The browser connects again by itself.
 */
export function follow(path, onMessage, onState) {
  const source = new EventSource(path);
  source.onopen = () => onState?.(true);
  source.onerror = () => onState?.(false);
  source.onmessage = (message) => {
    try {
      onMessage(JSON.parse(message.data), message.lastEventId);
    } catch {
      // A line that is cut off; the next one is whole.
    }
  };
  return () => source.close();
}
