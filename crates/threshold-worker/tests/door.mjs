// Runs a Worker of one's own that imports the module, and the module itself as an entrypoint, on workerd, and checks both doors.
//
//   node door.mjs NODE_MODULES WORKER
//
// WORKER is a folder that tools/build has made.

import assert from "node:assert/strict";
import { createRequire } from "node:module";
import { join } from "node:path";

const [modules, folder] = process.argv.slice(2);
if (folder === undefined) {
  console.error("usage: node door.mjs NODE_MODULES WORKER");
  process.exit(2);
}
const { Log, LogLevel, Miniflare } = createRequire(join(modules, "/"))("miniflare");

const POLICY = `
[identity]
client_ip = "cf-connecting-ip"
user = "header:x-user"
default_tier = "free"
[tiers.free]
reads = "3/h"
[tiers.paid]
reads = "5/h"
[[rule]]
name = "user"
per = ["user"]
match = { path = "/user" }
limit = "tier:reads"
[[rule]]
name = "tenant"
per = ["tenant"]
match = { path = "/tenant" }
limit = "2/h"
[[rule]]
name = "address"
per = ["ip"]
match = { path = "/address" }
limit = "2/h"
`;

// A Worker that authenticates by a header of its test, and answers by itself.
const OWN = `
import { api, guard, ThresholdObject } from "./index.js";
export { ThresholdObject };

async function handler(request) {
  const { pathname } = new URL(request.url);
  if (pathname === "/throw") {
    throw new Error("the handler fails");
  }
  if (pathname === "/nothing") {
    return "no response";
  }
  return new Response(request.method + " " + pathname + " " + (await request.text()), { headers: { "x-own": "yes" } });
}

export default {
  async fetch(request, env, ctx) {
    const url = new URL(request.url);
    if (url.hostname === "api") {
      return api(request, env, ctx);
    }
    const identity = request.headers.get("x-test-identity");
    try {
      return await guard(request, env, ctx, url.pathname === "/no-handler" ? 7 : handler, identity === null ? undefined : JSON.parse(identity));
    } catch (error) {
      return new Response(error.name + ": " + error.message, { status: 599 });
    }
  },
};
`;

function settings(vars) {
  return {
    modulesRoot: folder,
    compatibilityDate: "2026-04-01",
    durableObjects: { THRESHOLD: { className: "ThresholdObject", useSQLite: true } },
    bindings: { THRESHOLD_POLICY: POLICY, THRESHOLD_SECRET: "0123456789abcdef0123456789abcdef", ...vars },
  };
}

const index = [
  { type: "ESModule", path: join(folder, "index.js") },
  { type: "CompiledWasm", path: join(folder, "index_bg.wasm") },
];

function start(...workers) {
  return new Miniflare({ log: new Log(LogLevel.NONE), cf: false, telemetry: { enabled: false }, workers });
}

// The Worker of one's own. It has neither an upstream nor a token.
const own = (vars = {}) =>
  start({ name: "own", ...settings(vars), modules: [{ type: "ESModule", path: join(folder, "own.js"), contents: OWN }, ...index] });

const statuses = (answers) => answers.map((answer) => answer.status);
async function repeat(count, send) {
  const answers = [];
  for (let at = 0; at < count; at += 1) {
    answers.push(await send(at));
  }
  return answers;
}

const tests = {
  async "guard limits a handler"() {
    const worker = own();
    const send = () =>
      worker.dispatchFetch("http://own/address", { method: "POST", body: "text", headers: { "cf-connecting-ip": "203.0.113.1" } });
    const answers = await repeat(3, send);
    assert.deepEqual(statuses(answers), [200, 200, 429]);
    assert.equal(await answers[0].text(), "POST /address text");
    assert.equal(answers[0].headers.get("x-own"), "yes");
    assert.equal(answers[0].headers.get("x-ratelimit-remaining"), "1");
    assert.equal((await answers[2].json()).error, "rate_limited");
    return worker;
  },

  async "guard believes the Worker's own authentication, and no header"() {
    const worker = own();
    const send = (path, identity, forged = "") =>
      worker.dispatchFetch(`http://own${path}`, {
        headers: { "cf-connecting-ip": "203.0.113.1", "x-test-identity": JSON.stringify(identity), ...(forged && { "x-user": forged }) },
      });
    assert.deepEqual(statuses(await repeat(4, (at) => send("/user", { user: "a" }, `forged-${at}`))), [200, 200, 200, 429]);
    assert.deepEqual(statuses(await repeat(1, () => send("/user", { user: "b" }))), [200]);
    assert.deepEqual(statuses(await repeat(6, () => send("/user", { user: "c", tier: "paid" }))), [200, 200, 200, 200, 200, 429]);
    assert.deepEqual(statuses(await repeat(3, (at) => send("/tenant", { tenant: "t", user: `u${at}` }))), [200, 200, 429]);
    return worker;
  },

  async "guard refuses arguments of another type"() {
    const worker = own();
    const send = async (path, identity) => {
      const answer = await worker.dispatchFetch(`http://own${path}`, {
        headers: { "cf-connecting-ip": "203.0.113.1", "x-test-identity": JSON.stringify(identity) },
      });
      return [answer.status, await answer.text()];
    };
    assert.deepEqual(await send("/no-handler", {}), [599, "TypeError: guard: the handler is not a function"]);
    assert.deepEqual(await send("/", "a"), [599, "TypeError: guard: the identity is not an object"]);
    assert.deepEqual(await send("/", { user: 7 }), [599, "TypeError: guard: identity.user is not a string"]);
    assert.deepEqual(await send("/", { users: "a" }), [599, "TypeError: guard: identity.users is unknown; it has tenant, user and tier"]);
    assert.equal((await send("/", { user: null }))[0], 200);
    assert.equal((await send("/", null))[0], 200);
    return worker;
  },

  async "a handler that fails is a bad gateway"() {
    const worker = own();
    for (const path of ["/throw", "/nothing"]) {
      const answer = await worker.dispatchFetch(`http://own${path}`, { headers: { "cf-connecting-ip": "203.0.113.1" } });
      assert.equal(answer.status, 502);
      assert.equal(await answer.text(), '{"error":"bad_gateway"}');
    }
    return worker;
  },

  async "api needs no token, and knows its paths"() {
    const worker = own();
    const call = (path, body) => worker.dispatchFetch(`http://api${path}`, { method: "POST", body: JSON.stringify(body) });
    const check = { ip: "203.0.113.1", method: "GET", path: "/address" };
    const decisions = await repeat(3, async () => (await call("/v1/check", check)).json());
    assert.deepEqual(decisions.map((decision) => decision.allowed), [true, true, false]);
    const limit = { key: "k", limit: 1, windowSec: 60 };
    assert.equal((await (await call("/v1/limit", limit)).json()).allowed, true);
    assert.equal((await (await call("/check", limit)).json()).allowed, false);
    for (const path of ["/", "/v1/nope", "/v1/check/", "/v1"]) {
      const unknown = await call(path, {});
      assert.equal(unknown.status, 404, path);
      assert.equal((await unknown.json()).error, "not_found");
    }
    const wrong = await worker.dispatchFetch("http://api/v1/check");
    assert.equal(wrong.status, 405);
    assert.equal(wrong.headers.get("allow"), "POST");
    return worker;
  },
};

let failed = 0;
for (const [name, test] of Object.entries(tests)) {
  let worker;
  try {
    worker = await test();
    console.log(`ok ${name}`);
  } catch (error) {
    failed += 1;
    console.error(`FAILED ${name}\n${error.stack}`);
  }
  await worker?.dispose();
}
process.exit(failed > 0 ? 1 : 0);
