// A public API for browsers: CORS, logging, error handling, limit, authentication, in this order and on all routes.

import { guard } from "threshold";
import policy from "../../../policies/weather-api.toml";

// What a script on another site may read of an answer. The browser hides every other field from it.
const EXPOSED = "ratelimit, ratelimit-policy, retry-after, x-ratelimit-limit, x-ratelimit-remaining, x-ratelimit-reset, x-trace-id";

export default {
  fetch(request, env, ctx) {
    const limit = (inner) => (request) => guard(request, { ...env, THRESHOLD_POLICY: policy }, ctx, inner);
    // A route that fails is answered inside of the limit too, so that the answer has the rate-limit headers.
    return cors(log(handleErrors(limit(authenticate(env.API_TOKEN, handleErrors(route))))))(request);
  },
};

const cors = (inner) => async (request) => {
  // A preflight is answered as often as it comes, and never counted.
  const isPreflight = request.method === "OPTIONS" && request.headers.has("origin") && request.headers.has("access-control-request-method");
  const answer = isPreflight ? new Response(null, { status: 204 }) : await inner(request);
  const readable = new Response(answer.body, answer);
  readable.headers.set("access-control-allow-origin", "*");
  if (isPreflight) {
    readable.headers.set("access-control-allow-methods", "GET");
    readable.headers.set("access-control-allow-headers", "authorization");
    readable.headers.set("access-control-max-age", "7200");
  } else {
    readable.headers.set("access-control-expose-headers", EXPOSED);
  }
  return readable;
};

const log = (inner) => async (request) => {
  const answer = await inner(request);
  console.log(JSON.stringify({ event: "request", method: request.method, path: new URL(request.url).pathname, status: answer.status }));
  return answer;
};

const handleErrors = (inner) => async (request) => {
  try {
    return await inner(request);
  } catch (error) {
    console.error(JSON.stringify({ event: "request_failed", reason: String(error) }));
    return Response.json({ error: "internal" }, { status: 500 });
  }
};

const authenticate = (token, inner) => async (request) => {
  if (!(await isToken(request.headers.get("authorization"), token))) {
    return Response.json({ error: "unauthorized" }, { status: 401, headers: { "www-authenticate": "Bearer" } });
  }
  return inner(request);
};

function route(request) {
  switch (new URL(request.url).pathname) {
    case "/forecast":
      return Response.json({ forecast: "sunny, later rain" });
    case "/storm":
      // A handler with a bug, to show that a page can read even that answer.
      throw new Error("nobody knows where it goes");
    default:
      return Response.json({ error: "not_found" }, { status: 404 });
  }
}

// Compares digests, so that the time tells nothing about the token.
async function isToken(given, token) {
  if (!given || !token) {
    return false;
  }
  const digest = (text) => crypto.subtle.digest("SHA-256", new TextEncoder().encode(text));
  return crypto.subtle.timingSafeEqual(await digest(given), await digest(`Bearer ${token}`));
}
