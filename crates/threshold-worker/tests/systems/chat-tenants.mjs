// A chat service for many tenants, on Durable Objects.

import assert from "node:assert/strict";
import { readFileSync } from "node:fs";
import { join } from "node:path";

import { signSession } from "../../../../examples/workers/chat-tenants/session.mjs";
import { ROOT, eventually, namespace, newFolder, start, statuses, times, wrapped } from "./world.mjs";

const KEY = "development-key-of-sessions";
const WRANGLER = readFileSync(join(ROOT, "examples/workers/chat-tenants/wrangler.toml"), "utf8");
// Reaches the objects as a Worker does: /object/NAME is the /check of the object NAME. /v1/check is the API.
const OBJECTS = `
import { api } from "threshold";
import policy from "${ROOT}/policies/chat-tenants.toml";
export { RateLimiter } from EXAMPLE;
export default {
  fetch(request, env, ctx) {
    if (new URL(request.url).pathname === "/v1/check") {
      return api(request, { ...env, THRESHOLD_POLICY: CHANGED }, ctx);
    }
    const name = decodeURIComponent(new URL(request.url).pathname.slice("/object/".length));
    return env.RATE_LIMITER.getByName(name).fetch(new Request("https://object/check", request));
  },
};
`;

async function session(tenant, user) {
  return { authorization: `Bearer ${await signSession(tenant, user, KEY)}` };
}

const say = (worker, headers, init = {}) =>
  worker.fetch("/chat", { method: "POST", body: '{"message":"hello"}', ...init, headers: { ...headers, ...init.headers } });

function isLimited(answer) {
  for (const name of ["x-ratelimit-limit", "x-ratelimit-remaining", "x-ratelimit-reset"]) {
    assert.match(answer.headers.get(name) ?? "", /^\d+$/, `${name} of ${answer.status}`);
  }
}

// Runs a statement in the database of an object.
async function query(worker, object, sql) {
  const base = "/cdn-cgi/explorer/api/workers/durable_objects/namespaces";
  const [{ id }] = (await (await worker.fetch(base)).json()).result;
  const body = JSON.stringify({ durable_object_name: object, queries: [{ sql }] });
  const answer = await worker.fetch(`${base}/${id}/query`, { method: "POST", body, headers: { "content-type": "application/json" } });
  return answer.json();
}

export async function chatTenants(test) {
  const worker = await start("chat-tenants");
  const tenants = namespace(worker, "TENANTS");
  const configure = (tenant, rateLimit) => tenants.put(`${tenant}/tenant.config.json`, JSON.stringify({ name: tenant, rateLimit }));

  await test("one user of one tenant sends exactly 60 in any 60 s", async () => {
    const [one, other, elsewhere] = [await session("acme", "u1"), await session("acme", "u2"), await session("beta", "u1")];
    assert.deepEqual(await statuses(times(80, () => say(worker, one))), { 200: 60, 429: 20 });
    const fresh = await say(worker, other);
    assert.equal(fresh.headers.get("x-ratelimit-remaining"), "59", "another user has a budget of its own");
    assert.deepEqual(await fresh.json(), { ok: true, reply: "You said: hello" });
    assert.equal((await say(worker, elsewhere)).headers.get("x-ratelimit-remaining"), "59", "and the same name in another tenant");
  });

  await test("the object is named TENANT:ratelimit:USER", async () => {
    await say(worker, await session("named", "u1"));
    const found = await query(worker, "named:ratelimit:u1", "SELECT count(*) FROM threshold_records");
    assert.equal(found.success, true, JSON.stringify(found));
    const missing = await query(worker, "named:ratelimit:u2", "SELECT count(*) FROM threshold_records");
    assert.equal(missing.success, false, "an object that nobody has asked has no table");
  });

  await test("rateLimit.perMinute of a tenant's file applies", async () => {
    await configure("small", { perMinute: 5 });
    assert.deepEqual(await statuses(times(8, async () => say(worker, await session("small", "u1")))), { 200: 5, 429: 3 });
  });

  await test("rateLimit.burst is the most in any one second", async () => {
    await configure("bursty", { perMinute: 600, burst: 3 });
    const headers = await session("bursty", "u1");
    const begin = Date.now();
    const answers = await Promise.all(times(60, () => say(worker, headers)));
    const windows = Math.floor((Date.now() - begin) / 1_000) + 1;
    const denied = answers.filter((answer) => answer.status === 429);
    const admitted = answers.length - denied.length;
    assert.ok(admitted >= 3 && admitted <= 3 * windows, `${admitted} in ${windows} s`);
    assert.match((await denied[0].json()).error.message, /at once/);
  });

  await test("a tenant without burst has no such limit", async () => {
    await configure("wide", { perMinute: 100 });
    const headers = await session("wide", "u1");
    assert.deepEqual(await statuses(times(110, () => say(worker, headers))), { 200: 100, 429: 10 });
  });

  await test("a changed, a wrong and a removed file apply while the Worker runs", async () => {
    let user = 0;
    const limit = async () => (await say(worker, await session("small", `new-${(user += 1)}`))).headers.get("x-ratelimit-limit");
    assert.equal(await limit(), "5");
    await configure("small", { perMinute: 7 });
    await eventually(async () => (await limit()) === "7", "the new limit");
    await configure("small", { perMinute: 7, brust: 1 });
    await eventually(async () => /tenant_config_refused.*small.*brust/.test((await limit(), worker.log)), "the warning");
    assert.equal(await limit(), "7", "a file with a mistake changes nothing");
    await tenants.delete("small/tenant.config.json");
    await eventually(async () => (await limit()) === "60", "the limit of the policy");
  });

  await test("X-RateLimit-* are on every /chat response", async () => {
    const headers = await session("headers", "u1");
    const answers = {
      200: await say(worker, headers),
      400: await say(worker, headers, { body: "{" }),
      401: await say(worker, { "cf-connecting-ip": "203.0.113.1" }),
      405: await worker.fetch("/chat", { headers }),
    };
    await statuses(times(60, () => say(worker, headers)));
    answers[429] = await say(worker, headers);
    for (const [status, answer] of Object.entries(answers)) {
      assert.equal(answer.status, Number(status));
      isLimited(answer);
    }
  });

  await test("over the limit the answer is 429 with the envelope", async () => {
    const denied = await say(worker, await session("headers", "u1"));
    assert.equal(denied.status, 429);
    assert.equal(denied.headers.get("x-ratelimit-remaining"), "0");
    assert.ok(Number(denied.headers.get("retry-after")) >= 1);
    const body = await denied.json();
    assert.deepEqual(body, {
      ok: false,
      error: { code: "rate_limited", message: "Too many messages. Please wait a moment and try again." },
      traceId: denied.headers.get("x-trace-id"),
    });
  });

  await test("X-Trace-Id is on every response, and its own", async () => {
    const headers = await session("traced", "u1");
    const answers = [
      await say(worker, headers),
      await say(worker, headers),
      await say(worker, headers, { body: "{}" }),
      await say(worker, {}),
      await worker.fetch("/nowhere", { headers }),
      await worker.fetch("/chat/%2e%2e/x", { headers }),
      await say(worker, await session("headers", "u1")),
    ];
    const ids = answers.map((answer) => answer.headers.get("x-trace-id"));
    assert.ok(ids.every((id) => /^[0-9a-f-]{32,36}$/.test(id ?? "")), ids.join(" "));
    assert.equal(new Set(ids).size, ids.length);
    for (const answer of answers.slice(2)) {
      const { traceId } = await answer.json();
      assert.equal(traceId, answer.headers.get("x-trace-id"), `${answer.status}`);
    }
  });

  await test("headers and forged sessions name nobody", async () => {
    const headers = await session("forged", "u1");
    const pretend = (at) => ({ ...headers, "x-tenant": `t${at}`, "x-user": `u${at}`, "x-forwarded-for": `192.0.2.${at}` });
    assert.deepEqual(await statuses(times(70, (at) => say(worker, pretend(at)))), { 200: 60, 429: 10 });
    const [claims] = (await signSession("forged", "u1", "another key")).split(".");
    const unsigned = await Promise.all([
      say(worker, { authorization: `Bearer ${await signSession("forged", "u2", "another key")}` }),
      say(worker, { authorization: `Bearer ${claims}.AAAA` }),
      say(worker, { authorization: `Bearer ${claims}` }),
    ]);
    assert.deepEqual(await statuses(unsigned), { 401: 3 });
    assert.equal((await say(worker, await session("forged", "u2"))).headers.get("x-ratelimit-remaining"), "59");
  });

  await test("a flood on one tenant changes no decision of another", async () => {
    const [loud, calm] = [await session("loud", "u1"), await session("calm", "u1")];
    const flood = times(300, () => say(worker, loud));
    const remaining = [];
    for (let at = 0; at < 20; at += 1) {
      remaining.push(Number((await say(worker, calm)).headers.get("x-ratelimit-remaining")));
    }
    assert.deepEqual(remaining, times(20, (at) => 59 - at));
    assert.deepEqual(await statuses(flood), { 200: 60, 429: 240 });
  });
  await worker.stop();

  await test("a restart keeps what was used", async () => {
    const [args, headers] = [["--persist", newFolder()], await session("kept", "u1")];
    const before = await start("chat-tenants", { args });
    assert.deepEqual(await statuses(times(60, () => say(before, headers))), { 200: 60 });
    await before.stop();
    const after = await start("chat-tenants", { args });
    assert.equal((await say(after, headers)).status, 429);
    await after.stop();
  });

  await test("a hot key is split over shards and stays within its limit", async () => {
    // As the policy says it: another algorithm for the first rule, and its line with shards.
    const changed = 'policy.replace(/"sliding-log"/, \'"sliding-window"\').replace("#shards", "shards")';
    const hot = await start(wrapped("chat-tenants", WRANGLER, OBJECTS.replace("CHANGED", changed)));
    await namespace(hot, "TENANTS").put("hot/tenant.config.json", '{"rateLimit":{"perMinute":40000}}');
    // Each of the four shards has 10,000, so one request of 6,000 fits into each.
    const body = JSON.stringify({ tenant: "hot", user: "u1", cost: 6_000 });
    const answers = await Promise.all(times(40, async () => (await hot.fetch("/v1/check", { method: "POST", body })).json()));
    const allowed = answers.filter((answer) => answer.allowed).length;
    assert.ok(allowed >= 2 && allowed <= 4, `${allowed} of 4: ${JSON.stringify(answers[0])}`);
    assert.ok(answers.every((answer) => answer.limit === 40_000));
    const names = ["hot:ratelimit:u1", "hot:ratelimit:u1:1", "hot:ratelimit:u1:2", "hot:ratelimit:u1:3"];
    const used = await Promise.all(names.map((name) => query(hot, name, "SELECT count(*) FROM threshold_records")));
    assert.ok(used.filter((answer) => answer.success).length >= allowed);
    await hot.stop();
  });

  const objects = await start(wrapped("chat-tenants", WRANGLER, OBJECTS.replace("CHANGED", "policy")));
  const check = (name, body) =>
    objects.fetch(`/object/${encodeURIComponent(name)}`, { method: "POST", body: typeof body === "string" ? body : JSON.stringify(body) });

  await test("a tenant's file applies to /v1/check too", async () => {
    await namespace(objects, "TENANTS").put("small/tenant.config.json", '{"rateLimit":{"perMinute":5}}');
    const limit = async (tenant) => {
      const body = JSON.stringify({ tenant, user: "u1", ip: "203.0.113.1" });
      return (await (await objects.fetch("/v1/check", { method: "POST", body })).json()).limit;
    };
    assert.deepEqual([await limit("small"), await limit("other")], [5, 60]);
  });

  await test("POST /check of an object answers allowed, remaining and resetAt; its name is the key", async () => {
    const answers = [];
    for (let at = 0; at < 4; at += 1) {
      answers.push(await (await check("acme:ratelimit:u1", { limit: 3, windowSec: 3600 })).json());
    }
    assert.deepEqual(answers.map((answer) => answer.allowed), [true, true, true, false]);
    assert.deepEqual(answers.map((answer) => answer.remaining), [2, 1, 0, 0]);
    const now = Math.floor(Date.now() / 1_000);
    assert.ok(answers.every(({ resetAt }) => Number.isInteger(resetAt) && resetAt > now && resetAt <= now + 3_601));
    const other = await (await check("acme:ratelimit:u2", { limit: 3, windowSec: 3600 })).json();
    assert.deepEqual([other.allowed, other.remaining], [true, 2]);
    const atOnce = await Promise.all(times(50, async () => (await check("at once", { limit: 10, windowSec: 3600 })).json()));
    assert.equal(atOnce.filter((answer) => answer.allowed).length, 10);
  });

  await test("an object prunes old times, keeps at most the limit, and stores no denials", async () => {
    const size = async () => (await query(objects, "pruned", "SELECT sum(length(value)) FROM threshold_records")).result[0].rows[0][0];
    const full = async () => {
      let answer;
      do {
        answer = await (await check("pruned", { limit: 5, windowSec: 2 })).json();
      } while (answer.allowed);
      return answer;
    };
    const denied = await full();
    const first = await size();
    for (let at = 0; at < 20; at += 1) {
      await check("pruned", { limit: 5, windowSec: 2 });
    }
    // A denial that was stored would be counted still, and the row would have grown.
    await eventually(() => Date.now() >= denied.resetAt * 1_000, "the time of the answer");
    assert.equal((await (await check("pruned", { limit: 5, windowSec: 2 })).json()).allowed, true);
    await full();
    const second = await size();
    assert.ok(Math.abs(second - first) < 10, `${first} bytes, then ${second}: 20 more times would take 20 at least`);
  });

  await test("a bad body of /check is 400 and says what", async () => {
    const bad = [
      ["", null],
      ["{", null],
      ["[]", null],
      [{}, "limit"],
      [{ limit: 5 }, "windowSec"],
      [{ limit: 0, windowSec: 60 }, "limit"],
      [{ limit: 1.5, windowSec: 60 }, "limit"],
      [{ limit: -1, windowSec: 60 }, "limit"],
      [{ limit: "5", windowSec: 60 }, "limit"],
      [{ limit: 5, windowSec: 0 }, "windowSec"],
      [{ limit: 5, windowSec: 1e12 }, "windowSec"],
      [{ limit: 5, windowSec: 60, key: "k" }, "key"],
      [{ limit: 5, windowSec: 60, cost: 6 }, "cost"],
      [{ limit: 5, windowSec: 60, algorithm: "concurrency" }, "algorithm"],
    ];
    for (const [body, field] of bad) {
      const refused = await check("bad", body);
      assert.equal(refused.status, 400, JSON.stringify(body));
      const answer = await refused.json();
      assert.ok(answer.message.length > 0);
      if (field !== null) {
        assert.equal(answer.field, field, JSON.stringify(answer));
      }
    }
    assert.equal((await check("bad", " ".repeat(5_000))).status, 413);
    assert.equal((await objects.fetch("/object/bad")).status, 404);
  });
}
