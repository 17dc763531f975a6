// A public API for browsers whose buckets are in KV.

import assert from "node:assert/strict";
import { readFileSync } from "node:fs";
import { join } from "node:path";

import { ROOT, eventually, namespace, start, statuses, times, wrapped } from "./world.mjs";

const WRANGLER = readFileSync(join(ROOT, "examples/workers/weather-api/wrangler.toml"), "utf8");
const RATE_HEADERS = ["x-ratelimit-limit", "x-ratelimit-remaining", "x-ratelimit-reset", "retry-after"];
const AUTHORIZED = { authorization: "Bearer sunny", origin: "https://page.example" };

// Another Worker calls the example: its requests have no CF-Connecting-IP.
const INTERNAL = `
import app from EXAMPLE;
export default {
  fetch(request, env, ctx) {
    const headers = new Headers(request.headers);
    headers.delete("cf-connecting-ip");
    return app.fetch(new Request(request, { headers }), env, ctx);
  },
};
`;
// A namespace that fails.
const BROKEN = `
import app from EXAMPLE;
const fail = () => Promise.reject(new Error("KV GET failed: 500 Internal Server Error"));
const broken = { get: fail, getWithMetadata: fail, put: fail, list: fail, delete: fail };
export default {
  fetch: (request, env, ctx) => app.fetch(request, { ...env, RATE_LIMIT_KV: broken }, ctx),
};
`;

const ask = (worker, ip, { path = "/forecast", headers = AUTHORIZED, ...init } = {}) =>
  worker.fetch(path, { ...init, headers: { "cf-connecting-ip": ip, ...headers } });

function isReadable(answer) {
  assert.equal(answer.headers.get("access-control-allow-origin"), "*", `${answer.status}`);
  const exposed = (answer.headers.get("access-control-expose-headers") ?? "").split(/\s*,\s*/);
  assert.deepEqual(RATE_HEADERS.filter((name) => !exposed.includes(name)), [], `${answer.status}`);
}

// Sends requests one after another. A bucket refills meanwhile: `most` is what it holds and what has come back.
async function admitted(count, capacity, send) {
  const begin = Date.now();
  let allowed = 0;
  for (let at = 0; at < count; at += 1) {
    const [status] = Object.keys(await statuses([send(at)]));
    allowed += status === "429" ? 0 : 1;
  }
  const refilled = Math.floor(((Date.now() - begin) * capacity) / 60_000) + 1;
  assert.ok(allowed >= capacity && allowed <= capacity + refilled, `${allowed} of ${capacity}, and at most ${refilled} came back`);
}

export async function weatherApi(test) {
  const worker = await start("weather-api");
  const kv = namespace(worker, "RATE_LIMIT_KV");

  await test("an address has 10 at once, in a bucket", async () => {
    await admitted(14, 10, () => ask(worker, "203.0.113.1"));
    const other = await ask(worker, "203.0.113.2");
    assert.equal(other.status, 200);
    assert.equal(other.headers.get("x-ratelimit-limit"), "10");
    assert.equal(other.headers.get("x-ratelimit-remaining"), "9");
  });

  await test("a bucket is {tokens,lastRefill,ttl} in the key ip:{hash}", async () => {
    const find = async () => (await kv.keys()).filter(({ name }) => name.startsWith("ip:"));
    await eventually(async () => (await find()).length >= 2, "a key for each address");
    for (const { name, expiration } of await find()) {
      assert.match(name, /^ip:[0-9a-f]{16,}$/, "the address itself is not in the key");
      const bucket = JSON.parse(await kv.get(name));
      assert.deepEqual(Object.keys(bucket).sort(), ["lastRefill", "tokens", "ttl"]);
      assert.ok(bucket.tokens >= 0 && bucket.tokens <= 10, JSON.stringify(bucket));
      assert.ok(Math.abs(bucket.lastRefill - Date.now()) < 600_000, "lastRefill is a time in milliseconds");
      assert.ok(expiration > Date.now() / 1_000);
    }
  });

  await test("a 429 has Retry-After, JSON, and CORS headers that expose the rate-limit headers", async () => {
    await statuses(times(12, () => ask(worker, "203.0.113.3")));
    let denied;
    await eventually(async () => (denied = await ask(worker, "203.0.113.3")).status === 429, "a denial");
    assert.ok(Number(denied.headers.get("retry-after")) >= 1);
    assert.match(denied.headers.get("content-type"), /^application\/json/);
    const body = await denied.json();
    assert.equal(body.error, "rate_limited");
    assert.equal(body.message, "Too many requests from your address. Please slow down.");
    isReadable(denied);
  });

  await test("preflights are answered and not counted", async () => {
    const headers = { origin: "https://page.example", "access-control-request-method": "GET", "access-control-request-headers": "authorization" };
    for (let at = 0; at < 20; at += 1) {
      const preflight = await ask(worker, "203.0.113.4", { method: "OPTIONS", headers });
      assert.equal(preflight.status, 204);
      assert.equal(preflight.headers.get("access-control-allow-origin"), "*");
      assert.match(preflight.headers.get("access-control-allow-headers"), /authorization/);
    }
    assert.equal((await ask(worker, "203.0.113.4")).headers.get("x-ratelimit-remaining"), "9");
  });

  await test("the limit comes before authentication, on all routes", async () => {
    const paths = ["/forecast", "/nowhere", "/"];
    await admitted(14, 10, (at) => ask(worker, "203.0.113.5", { path: paths[at % 3], headers: {} }));
    const denied = await ask(worker, "203.0.113.6", { headers: { authorization: "Bearer rainy" } });
    assert.equal(denied.status, 401);
    assert.equal(denied.headers.get("x-ratelimit-remaining"), "9");
    isReadable(denied);
    const missing = await ask(worker, "203.0.113.6", { path: "/nowhere" });
    assert.equal(missing.status, 404);
    isReadable(missing);
  });

  await test("what fails is logged and answered inside of CORS and logging", async () => {
    const failed = await ask(worker, "203.0.113.7", { path: "/storm" });
    assert.equal(failed.status, 500);
    assert.deepEqual(await failed.json(), { error: "internal" });
    isReadable(failed);
    await eventually(() => worker.log.includes('"event":"request_failed"'), "the error in the log");
    for (const status of [200, 401, 404, 429, 500]) {
      await eventually(() => new RegExp(`"event":"request".*"status":${status}`).test(worker.log), `a line with ${status}`);
    }
  });
  await worker.stop();

  await test("RATE_LIMIT_GLOBAL is for all addresses together", async () => {
    const small = await start("weather-api", { env: { RATE_LIMIT_PER_IP: "50", RATE_LIMIT_GLOBAL: "4" } });
    await admitted(9, 4, (at) => ask(small, `203.0.113.${at}`));
    let denied;
    await eventually(async () => (denied = await ask(small, "203.0.113.99")).status === 429, "a denial");
    assert.equal((await denied.json()).message, "The service is busy. Please try again shortly.");
    isReadable(denied);
    await small.stop();
  });

  await test("the address is that of CF-Connecting-IP, else that of X-Forwarded-For", async () => {
    const env = { RATE_LIMIT_PER_IP: "5" };
    const outside = await start("weather-api", { env });
    await admitted(8, 5, (at) => ask(outside, "203.0.113.1", { headers: { ...AUTHORIZED, "x-forwarded-for": `192.0.2.${at}` } }));
    await outside.stop();
    const inside = await start(wrapped("weather-api", WRANGLER, INTERNAL), { env });
    const forwarded = (ip) => inside.fetch("/forecast", { headers: { ...AUTHORIZED, "x-forwarded-for": ip } });
    await admitted(8, 5, () => forwarded("192.0.2.1"));
    assert.equal((await forwarded("192.0.2.2")).headers.get("x-ratelimit-remaining"), "4");
    await inside.stop();
  });

  await test("a store failure lets the request through and logs a structured warning", async () => {
    const broken = await start(wrapped("weather-api", WRANGLER, BROKEN), { env: { RATE_LIMIT_PER_IP: "2" } });
    assert.deepEqual(await statuses(times(8, () => ask(broken, "203.0.113.1"))), { 200: 8 });
    const warning = () =>
      broken.log.split("\n").some((line) => /"event":"kv_failed"/.test(line) && JSON.parse(line).onStoreError === "open");
    await eventually(warning, "a line of JSON");
    await broken.stop();
  });
}
