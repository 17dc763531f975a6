// A chat service for many tenants. Each user of each tenant has a Durable Object of the class RateLimiter, named TENANT:ratelimit:USER.

import { guard, RateLimiter } from "threshold";
import policy from "../../../policies/chat-tenants.toml";
import { readSession } from "./session.mjs";

export { RateLimiter };

export default {
  async fetch(request, env, ctx) {
    // Who is calling comes from the session alone. Without one, requests are counted by address.
    const session = await readSession(request.headers.get("authorization"), env.SESSION_KEY);
    const answer = (allowed) => chat(allowed, session);
    const guarded = await guard(request, { ...env, THRESHOLD_POLICY: policy }, ctx, answer, session ?? {});
    if (guarded.headers.has("x-trace-id")) {
      return guarded;
    }
    const traced = new Response(guarded.body, guarded);
    traced.headers.set("x-trace-id", crypto.randomUUID());
    return traced;
  },
};

async function chat(request, session) {
  if (new URL(request.url).pathname !== "/chat") {
    return refuse(404, "not_found", "The path is /chat.");
  }
  if (request.method !== "POST") {
    return refuse(405, "method_not_allowed", "/chat takes POST.", { allow: "POST" });
  }
  if (session === undefined) {
    return refuse(401, "unauthorized", "A session is needed.", { "www-authenticate": "Bearer" });
  }
  const body = await request.json().catch(() => undefined);
  if (typeof body?.message !== "string") {
    return refuse(400, "bad_request", '"message" must be a string.');
  }
  // The model would be asked here.
  return Response.json({ ok: true, reply: `You said: ${body.message}` });
}

// An error has the same form as the limiter's.
function refuse(status, code, message, headers = {}) {
  const traceId = crypto.randomUUID();
  return Response.json({ ok: false, error: { code, message }, traceId }, { status, headers: { ...headers, "x-trace-id": traceId } });
}
