// A publishing platform whose every request passes Threshold: limits of addresses, tenants, users and endpoints, and a protected login.

import { api, guard, scheduled } from "threshold";
import policy from "../../../policies/grove.toml";
import { issue, refresh, remove, session, signUp, tierOf, verify } from "./accounts.js";

export { SessionDO, TenantDO } from "threshold";

const DOMAIN = ".grove.place";
const AUTH_HOST = `auth${DOMAIN}`;
const TOKEN_PATHS = ["/token", "/oauth/token", "/api/auth/token"];
const NAME = /^[a-z0-9][a-z0-9-]{0,31}$/;
const DEVICE = "__Host-grove_device";

const settingsOf = (env) => ({ ...env, THRESHOLD_POLICY: policy });

export default {
  async fetch(request, env, ctx) {
    const settings = settingsOf(env);
    // Operators read /v1/stats here.
    if (await isToken(request, env.THRESHOLD_TOKEN)) {
      return api(request, settings, ctx);
    }
    const caller = await authenticate(request, env);
    const handler = (allowed) => answer(allowed, { env, settings, ctx, caller });
    return guard(request, settings, ctx, handler, { tenant: caller.tenant, user: caller.user, tier: caller.tier });
  },

  // Moves events to the database and raises alerts, every minute.
  scheduled: (controller, env) => scheduled(controller, settingsOf(env)),
};

// Compares digests, so that the time does not tell how much of a guess is right.
async function isToken(request, token) {
  const given = request.headers.get("authorization");
  if (!token || given === null) {
    return false;
  }
  const digest = (text) => crypto.subtle.digest("SHA-256", new TextEncoder().encode(text));
  return crypto.subtle.timingSafeEqual(await digest(given), await digest(`Bearer ${token}`));
}

// Who is calling: nothing of it comes from a header that a client can write. A session counts on the host of its own tenant only.
async function authenticate(request, env) {
  const { hostname } = new URL(request.url);
  const named = hostname.endsWith(DOMAIN) && hostname !== AUTH_HOST ? hostname.slice(0, -DOMAIN.length) : undefined;
  const own = await session(env, request);
  const tenant = named ?? own?.tenant;
  const tier = tenant === undefined ? undefined : await tierOf(env, tenant);
  if (tier === undefined) {
    return { unknownHost: named !== undefined };
  }
  return { tenant, tier, user: own?.tenant === tenant ? own.user : undefined };
}

async function answer(request, context) {
  const { pathname } = new URL(request.url);
  const call = `${request.method} ${pathname}`;
  if (request.method === "POST" && TOKEN_PATHS.includes(pathname)) {
    return token(request, context);
  }
  if (call === "POST /api/signup") {
    return join(request, context.env);
  }
  const { user, tenant, unknownHost } = context.caller;
  if (unknownHost) {
    return Response.json({ error: "no_such_tenant" }, { status: 404 });
  }
  if (user === undefined && request.method !== "GET" && request.method !== "HEAD") {
    return Response.json({ error: "unauthorized" }, { status: 401, headers: { "www-authenticate": "Bearer" } });
  }
  if (call === "DELETE /api/account") {
    await remove(context.env, user);
    return new Response(null, { status: 204 });
  }
  // Posts, comments, uploads and models are not what this example is about.
  return Response.json({ call, tenant, user });
}

async function join(request, env) {
  const body = (await request.json().catch(() => undefined)) ?? {};
  const isText = (value) => typeof value === "string" && value.trim() !== "";
  if (!isText(body.username) || !isText(body.password) || !isText(body.tenant) || !NAME.test(body.tenant)) {
    return Response.json({ error: "invalid_request", message: "username, password and tenant are needed" }, { status: 400 });
  }
  const isNew = await signUp(env, body);
  return isNew ? Response.json({ tenant: body.tenant }, { status: 201 }) : Response.json({ error: "name_taken" }, { status: 409 });
}

// The token endpoint of OAuth 2 (RFC 6749). Every grant is an attempt of its address; a password is one on its account too.
async function token(request, { env, settings, ctx }) {
  const form = new URLSearchParams(await request.text());
  const grant = form.get("grant_type");
  const account = grant === "password" ? (form.get("username") ?? "") : undefined;
  if (account !== undefined && account.trim() === "") {
    return refused("invalid_request", 400);
  }
  const ip = request.headers.get("cf-connecting-ip");
  const device = cookie(request, DEVICE);
  const attempt = await ask("/v1/login/attempt", { account, ip, device });
  if (!attempt.ok) {
    const { error, message } = await attempt.json();
    const wait = attempt.headers.get("retry-after");
    return Response.json({ error, message }, { status: attempt.status, headers: { "cache-control": "no-store", ...(wait && { "retry-after": wait }) } });
  }
  const proven = await checked(env, grant, form);
  const answered = await ask("/v1/login/result", { attempt: (await attempt.json()).attempt, success: proven !== null });
  const result = await answered.json();
  if (proven === null || !result.success) {
    return refused(grant === "password" || grant === "refresh_token" ? "invalid_grant" : "unsupported_grant_type", 400);
  }
  const headers = new Headers({ "cache-control": "no-store" });
  if (result.device !== undefined) {
    headers.set("set-cookie", `${DEVICE}=${result.device}; Path=/; Max-Age=15552000; HttpOnly; Secure; SameSite=Lax`);
  }
  return Response.json(await issue(env, proven), { headers });

  function ask(path, body) {
    const call = new Request(`https://threshold${path}`, { method: "POST", body: JSON.stringify(body) });
    return api(call, settings, ctx);
  }
}

function checked(env, grant, form) {
  switch (grant) {
    case "password":
      return verify(env, form.get("username"), form.get("password") ?? "");
    case "refresh_token":
      return refresh(env, form.get("refresh_token") ?? "");
    default:
      return null;
  }
}

const refused = (error, status) => Response.json({ error }, { status, headers: { "cache-control": "no-store" } });

function cookie(request, name) {
  const found = (request.headers.get("cookie") ?? "").split("; ").find((one) => one.startsWith(`${name}=`));
  return found?.slice(name.length + 1);
}
