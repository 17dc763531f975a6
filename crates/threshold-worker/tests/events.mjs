// Runs the Worker on workerd with KV, D1 and its scheduled handler, and checks events, statistics and alerts.
//
//   node events.mjs NODE_MODULES WORKER
//
// WORKER is a folder that tools/build has made.

import assert from "node:assert/strict";
import { randomUUID } from "node:crypto";
import { mkdtempSync, rmSync } from "node:fs";
import { createServer } from "node:http";
import { tmpdir } from "node:os";
import { join } from "node:path";

import { TOKEN, folder, index, run, runAll } from "./workerd.mjs";

const POLICY = `
[identity]
client_ip = "cf-connecting-ip"
log_identifiers = true
[[rule]]
name = "pages"
layer = "edge"
per = ["ip"]
match = { path = "/pages/**" }
limit = "2/h"
[[rule]]
name = "closed"
layer = "edge"
per = ["ip"]
match = { path = "/closed" }
limit = "none"
[[rule]]
name = "tenant"
layer = "tenant"
per = ["tenant"]
match = { path = "/shared/*" }
limit = "2/h"
[[rule]]
name = "posts"
layer = "user"
per = ["user"]
match = { method = "POST", path = "/api/posts" }
limit = "1/h"
ladder = "quick"
strike = "request"
[[rule]]
name = "signup"
layer = "endpoint"
per = ["ip"]
match = { method = "POST", path = "/api/signup" }
limit = "1/h"
[ladders.quick]
rungs = ["warn", "deny + shadow", "ban 24h"]
`;

// A Worker that imports the module.
const OWN = `
import { api, guard, scheduled, ThresholdObject } from "./index.js";
export { ThresholdObject };
export default {
  fetch(request, env, ctx) {
    const isCall = new URL(request.url).pathname.startsWith("/v1/");
    return isCall ? api(request, env, ctx) : guard(request, env, ctx, () => new Response("own"), { user: "u9" });
  },
  scheduled,
};
`;

/** A Worker with what it logs. */
function start({ policy = POLICY, vars = {}, own = false, persist } = {}) {
  const lines = [];
  const collect = (stream) => {
    let rest = "";
    stream.setEncoding("utf8").on("data", (text) => {
      const parts = (rest + text).split("\n");
      rest = parts.pop();
      lines.push(...parts);
    });
  };
  const worker = run({
    handleRuntimeStdio(stdout, stderr) {
      collect(stdout);
      collect(stderr);
    },
    modulesRoot: folder,
    modules: own ? [{ type: "ESModule", path: join(folder, "own.js"), contents: OWN }, ...index] : index,
    compatibilityDate: "2026-04-01",
    durableObjects: { THRESHOLD: { className: "ThresholdObject", useSQLite: true } },
    kvNamespaces: ["MONITOR_KV"],
    d1Databases: ["DB"],
    kvPersist: persist && join(persist, "kv"),
    d1Persist: persist && join(persist, "d1"),
    serviceBindings: own ? {} : { UPSTREAM: () => new Response("upstream") },
    bindings: {
      THRESHOLD_POLICY: policy,
      THRESHOLD_SECRET: "0123456789abcdef0123456789abcdef",
      ...(own ? {} : { THRESHOLD_TOKEN: TOKEN }),
      ...vars,
    },
  });
  return { worker, lines };
}

/** Does what cron does every minute. */
async function cron(worker) {
  const result = await (await worker.getWorker()).scheduled({ cron: "* * * * *" });
  assert.equal(result.outcome, "ok");
}

/** Returns the events in KV, by key. */
async function recorded(worker) {
  const namespace = await worker.getKVNamespace("MONITOR_KV");
  const events = {};
  let cursor;
  do {
    const page = await namespace.list({ cursor });
    for (const key of page.keys) {
      events[key.name] = JSON.parse(await namespace.get(key.name));
    }
    cursor = page.list_complete ? undefined : page.cursor;
  } while (cursor !== undefined);
  return events;
}

/** Waits until the events in KV stand for this many decisions: they are written after the answer. */
async function untilRecorded(worker, count) {
  for (let attempt = 0; ; attempt += 1) {
    const events = await recorded(worker);
    const sum = Object.values(events).reduce((sum, event) => sum + event.count, 0);
    assert.ok(sum <= count, `${sum} of ${count}`);
    if (sum === count) {
      return events;
    }
    assert.ok(attempt < 600, `${sum} of ${count}`);
    await new Promise((resolve) => setTimeout(resolve, 50));
  }
}

const rows = async (worker, sql) => (await (await worker.getD1Database("DB")).prepare(sql).all()).results;
const from = (worker, ip, path) => worker.dispatchFetch(`http://a.example.com${path}`, { headers: { "cf-connecting-ip": ip } });
const call = (worker, path, init = {}) =>
  worker.dispatchFetch(`http://a.example.com${path}`, { ...init, headers: { authorization: `Bearer ${TOKEN}` } });
const check = async (worker, body) => (await call(worker, "/v1/check", { method: "POST", body: JSON.stringify(body) })).json();
const stats = async (worker, query = "") => (await call(worker, `/v1/stats${query}`)).json();

/** Puts an event into KV as the Worker does. */
async function put(worker, event) {
  const full = { id: randomUUID(), at: Date.now(), blocked: true, ...event };
  const namespace = await worker.getKVNamespace("MONITOR_KV");
  await namespace.put(`ratelimit:${full.at}:${full.id}`, JSON.stringify(full), { expirationTtl: 3600 });
}

/** Does something this many times, of which 100 at once. */
async function inTurns(count, act) {
  const results = [];
  for (let at = 0; at < count; at += 100) {
    const turn = Array.from({ length: Math.min(100, count - at) }, (_, more) => act(at + more));
    results.push(...(await Promise.all(turn)));
  }
  return results;
}

/** A server that answers with the next of these; "cut" closes the connection after it has read the body. */
async function receiver(answers) {
  const seen = [];
  const server = createServer((request, response) => {
    let body = "";
    request.on("data", (text) => (body += text));
    request.on("end", () => {
      seen.push({ url: request.url, method: request.method, authorization: request.headers.authorization, body: JSON.parse(body) });
      const answer = answers.shift() ?? 200;
      return answer === "cut" ? request.socket.destroy() : response.writeHead(answer).end();
    });
  });
  await new Promise((resolve) => server.listen(0, "127.0.0.1", resolve));
  const close = () => new Promise((resolve) => (server.close(resolve), server.closeAllConnections()));
  return { seen, url: `http://127.0.0.1:${server.address().port}`, close };
}

/** Sends requests that are denied in each layer, and returns the number of events' decisions. */
async function traffic(worker) {
  for (let at = 0; at < 5; at += 1) {
    assert.equal((await from(worker, "203.0.113.1", `/pages/${at}?secret=canary`)).status, at < 2 ? 200 : 429);
  }
  for (let at = 0; at < 4; at += 1) {
    await check(worker, { tenant: "acme", path: "/shared/canary", ip: "203.0.113.2" });
  }
  const verdicts = [];
  for (let at = 0; at < 5; at += 1) {
    verdicts.push((await check(worker, { user: "u1", path: "/api/posts", method: "POST", ip: "203.0.113.3" })).verdict);
  }
  assert.deepEqual(verdicts, ["allow", "warn", "deny", "ban", "ban"]);
  for (let at = 0; at < 3; at += 1) {
    await check(worker, { path: "/api/signup", method: "POST", ip: "203.0.113.4" });
  }
  return 3 + 2 + 4 + 2;
}

const SENT = {
  edgeBlocks: 3,
  tenantBlocks: 2,
  userBlocks: 3,
  endpointBlocks: 2,
  warningsIssued: 1,
  shadowBansActive: 1,
  bansActive: 1,
  topBlockedTenants: [{ tenant: "acme", blocks: 2 }],
  topBlockedEndpoints: [
    { endpoint: "GET:/pages/**", blocks: 3 },
    { endpoint: "POST:/api/posts", blocks: 3 },
    { endpoint: "*:/shared/*", blocks: 2 },
    { endpoint: "POST:/api/signup", blocks: 2 },
  ],
  topBlockedIps: [
    { ip: "203.0.113.1", blocks: 3 },
    { ip: "203.0.113.3", blocks: 3 },
    { ip: "203.0.113.2", blocks: 2 },
    { ip: "203.0.113.4", blocks: 2 },
  ],
};

const tests = {
  async "events are recorded for an hour, moved to D1 once, and counted"() {
    const { worker, lines } = start();
    const before = Math.floor(Date.now() / 1000);
    const events = await untilRecorded(worker, await traffic(worker));
    const after = Math.ceil(Date.now() / 1000);
    const { keys } = await (await worker.getKVNamespace("MONITOR_KV")).list();
    for (const key of keys) {
      assert.match(key.name, /^ratelimit:\d{13}:[0-9a-f]{8}-[0-9a-f]{4}-4[0-9a-f]{3}-[89ab][0-9a-f]{3}-[0-9a-f]{12}$/);
      assert.ok(key.expiration >= before + 3600 && key.expiration <= after + 3600, `${key.expiration}`);
      const event = events[key.name];
      assert.equal(key.name, `ratelimit:${event.at}:${event.id}`);
    }
    const text = JSON.stringify(events);
    assert.ok(!text.includes("canary"), "paths hold secrets");
    const denied = Object.values(events).find((event) => event.layer === "tenant");
    const { layer, blocked, tenant, userId, endpoint, ip, rule, verdict } = denied;
    assert.deepEqual(
      { layer, blocked, tenant, userId, endpoint, ip, rule, verdict },
      { layer: "tenant", blocked: true, tenant: "acme", userId: null, endpoint: "*:/shared/*", ip: "203.0.113.2", rule: "tenant", verdict: "deny" },
    );
    const ban = Object.values(events).find((event) => event.bannedUntil !== null);
    assert.equal(ban.subject, "user=u1");
    assert.ok(Math.abs(ban.bannedUntil - ban.at - 86_400_000) < 1000);
    const strikes = lines.filter((line) => line.includes('"event":"abuse_escalation"')).map((line) => JSON.parse(line));
    assert.deepEqual(strikes.map(({ warnings, shadowBanned }) => [warnings, shadowBanned]), [[1, false], [2, true], [3, true]]);
    assert.equal(strikes[2].userId, "u1");
    assert.equal(strikes[2].bannedUntil, Math.floor(ban.bannedUntil / 1000));

    assert.deepEqual((await stats(worker)).edgeBlocks, 0, "before the first run");
    await cron(worker);
    assert.deepEqual(await recorded(worker), {});
    assert.deepEqual(await stats(worker), SENT);
    await cron(worker);
    assert.deepEqual(await stats(worker), SENT);
    const kept = await rows(worker, "SELECT event FROM rate_limit_events");
    assert.deepEqual(
      kept.map((row) => JSON.parse(row.event).id).sort(),
      Object.values(events).map((event) => event.id).sort(),
    );

    // A run that ends after the insertion leaves the events in both.
    const namespace = await worker.getKVNamespace("MONITOR_KV");
    for (const [key, event] of Object.entries(events)) {
      await namespace.put(key, JSON.stringify(event));
    }
    await cron(worker);
    assert.deepEqual(await recorded(worker), {});
    assert.deepEqual(await stats(worker), SENT);
    return worker;
  },

  async "the statistics are for callers with the token"() {
    const { worker } = start();
    for (const period of ["min", "h", "day"]) {
      assert.equal((await stats(worker, `?period=${period}`)).edgeBlocks, 0);
    }
    for (const [query, field] of [["?period=year", "period"], ["?since=1", "query"]]) {
      const refused = await call(worker, `/v1/stats${query}`);
      assert.equal(refused.status, 400);
      assert.equal((await refused.json()).field, field);
    }
    assert.equal((await call(worker, "/v1/stats", { method: "POST" })).status, 405);
    assert.equal(await (await from(worker, "203.0.113.1", "/v1/stats")).text(), "upstream");
    return worker;
  },

  async "events stay in KV while D1 fails, and one that is none is deleted"() {
    const { worker, lines } = start();
    await put(worker, { layer: "edge" });
    await put(worker, { layer: "tenant", count: 5 });
    const namespace = await worker.getKVNamespace("MONITOR_KV");
    const broken = `ratelimit:1:${randomUUID()}`;
    await namespace.put(broken, '{"layer":"edge"}');
    // A counter of an eventual rule, as another Worker keeps it.
    const others = ["other:key", "ratelimit:17:20500", "ratelimit:u1:20500"];
    await Promise.all(others.map((key) => namespace.put(key, "5")));
    const database = await worker.getD1Database("DB");
    await database.prepare("CREATE VIEW rate_limit_events AS SELECT 1").run();
    await cron(worker);
    assert.equal((await namespace.list()).keys.length, 6);
    assert.equal((await call(worker, "/v1/stats")).status, 503);
    await database.prepare("DROP VIEW rate_limit_events").run();
    await cron(worker);
    assert.deepEqual((await namespace.list()).keys.map((key) => key.name), others);
    const { edgeBlocks, tenantBlocks } = await stats(worker);
    assert.deepEqual({ edgeBlocks, tenantBlocks }, { edgeBlocks: 1, tenantBlocks: 5 });
    assert.ok(lines.some((line) => line.includes('"event":"events_failed"')), lines.join("\n"));
    assert.ok(lines.some((line) => line.includes('"event":"event_deleted"') && line.includes(broken)));
    return worker;
  },

  async "1,200 events are moved over several pages, and old ones deleted"() {
    const { worker } = start();
    await inTurns(1200, (at) => put(worker, { layer: "edge", ip: `10.0.${at % 200}.1` }));
    await put(worker, { layer: "edge", at: Date.now() - 31 * 86_400_000 });
    await put(worker, { layer: "edge", at: Date.now() - 29 * 86_400_000 });
    await cron(worker);
    assert.deepEqual(await recorded(worker), {});
    assert.deepEqual(await rows(worker, "SELECT count(*) AS events FROM rate_limit_events"), [{ events: 1201 }]);
    const { edgeBlocks, topBlockedIps } = await stats(worker);
    assert.equal(edgeBlocks, 1200, "the last day");
    assert.deepEqual(topBlockedIps[0], { ip: "10.0.0.1", blocks: 6 });
    assert.equal(topBlockedIps.length, 10);
    // As if a million had come since.
    await rows(worker, "UPDATE rate_limit_events SET number = 1000101 WHERE number = 1202");
    await cron(worker);
    assert.deepEqual(await rows(worker, "SELECT count(*) AS events, min(number) AS oldest FROM rate_limit_events"), [
      { events: 1101, oldest: 102 },
    ]);
    return worker;
  },

  async "a run that is killed loses and duplicates nothing"() {
    const persist = mkdtempSync(join(tmpdir(), "threshold-events-"));
    const seen = [];
    let { worker } = start({ persist });
    // At whatever moment: the sums are the same.
    for (const delay of [60, 200]) {
      await cron(worker);
      await inTurns(300, () => put(worker, { layer: "edge" }));
      const running = cron(worker).catch(() => {});
      await new Promise((resolve) => setTimeout(resolve, delay));
      await worker.dispose();
      await running;
      ({ worker } = start({ persist }));
      const [{ events }] = await rows(worker, "SELECT count(*) AS events FROM rate_limit_events");
      seen.push(`${events} in D1 and ${Object.keys(await recorded(worker)).length} in KV`);
    }
    await cron(worker);
    assert.deepEqual(await recorded(worker), {});
    assert.deepEqual(await rows(worker, "SELECT count(*) AS events FROM rate_limit_events"), [{ events: 600 }]);
    assert.equal((await stats(worker)).edgeBlocks, 600);
    console.log(`  killed with ${seen.join(", ")}`);
    return { dispose: () => worker.dispose().finally(() => rmSync(persist, { recursive: true })) };
  },

  async "a flood costs a bounded number of writes, and its sum is exact"() {
    const { worker, lines } = start();
    const began = Date.now();
    const flood = await inTurns(600, (at) => from(worker, `198.51.${at % 100}.${Math.floor(at / 100)}`, "/closed"));
    const same = await inTurns(400, () => from(worker, "203.0.113.9", "/closed"));
    assert.ok([...flood, ...same].every((answer) => answer.status === 429));
    const events = Object.values(await untilRecorded(worker, 1000));
    // Writes are a second apart, each with 32 callers and one event for the others.
    const writes = Math.ceil((Date.now() - began) / 1000) + 1;
    assert.ok(events.length <= writes * 33, `${events.length} keys in ${writes} writes`);
    const unnamed = events.filter((event) => event.ip === null).reduce((sum, event) => sum + event.count, 0);
    assert.ok(unnamed > 0, "the flood was larger than the bound");
    const logged = lines.filter((line) => line.includes('"event":"events_unnamed"'));
    assert.equal(logged.reduce((sum, line) => sum + JSON.parse(line.slice(line.indexOf("{"))).count, 0), unnamed);
    await cron(worker);
    assert.equal((await stats(worker)).edgeBlocks, 1000);
    return worker;
  },

  async "users and addresses are hidden unless the policy shows them"() {
    const { worker } = start({ policy: POLICY.replace("log_identifiers = true", "") });
    await from(worker, "203.0.113.1", "/closed");
    for (let at = 0; at < 2; at += 1) {
      await check(worker, { user: "u1", tenant: "acme", path: "/api/posts", method: "POST", ip: "203.0.113.3" });
    }
    const events = Object.values(await untilRecorded(worker, 2));
    assert.ok(events.every((event) => /^#[0-9a-f]{16}$/.test(event.ip)));
    const warned = events.find((event) => event.verdict === "warn");
    assert.match(warned.userId, /^#[0-9a-f]{16}$/);
    assert.equal(warned.tenant, "acme");
    assert.equal(warned.subject, `user=${warned.userId}`);
    return worker;
  },

  async "a server is sent each event until it has accepted it"() {
    const server = await receiver([500, "cut", 200]);
    const vars = { THRESHOLD_EVENTS_URL: `${server.url}/v1/events`, THRESHOLD_EVENTS_TOKEN: "a token of the server" };
    const { worker, lines } = start({ vars });
    await inTurns(150, () => put(worker, { layer: "edge", count: 10 }));
    const ids = Object.values(await recorded(worker)).map((event) => event.id);
    for (const expect of [0, 0, 150, 150]) {
      await cron(worker);
      assert.deepEqual(await recorded(worker), {}, "D1 has them");
      const [{ accepted }] = await rows(worker, "SELECT count(*) AS accepted FROM rate_limit_events WHERE unsent IS NULL");
      assert.equal(accepted, expect);
    }
    assert.equal(lines.filter((line) => line.includes('"event":"events_failed"')).length, 2);
    assert.ok(!lines.some((line) => line.includes('"event":"alert"')), "the server raises alerts");
    // Refused, cut off, and then two batches, the first of them the same as before.
    assert.deepEqual(server.seen.map(({ body }) => body.length), [100, 100, 100, 50]);
    assert.deepEqual(server.seen[1].body, server.seen[2].body);
    assert.deepEqual(server.seen.slice(2).flatMap(({ body }) => body.map(({ id }) => id)).sort(), ids.sort());
    for (const { url, method, authorization } of server.seen) {
      assert.deepEqual({ url, method, authorization }, { url: "/v1/events", method: "POST", authorization: "Bearer a token of the server" });
    }
    const { layer, blocked, count } = server.seen[0].body[0];
    assert.deepEqual({ layer, blocked, count }, { layer: "edge", blocked: true, count: 10 });
    await server.close();
    return worker;
  },

  async "each alert is raised at its threshold, once, and resolved"() {
    const operator = await receiver([500]);
    const { worker, lines } = start({ vars: { THRESHOLD_ALERT_URL: `${operator.url}/hook` } });
    const alerts = () =>
      lines
        .filter((line) => line.includes('"event":"alert"'))
        .map((line) => JSON.parse(line.slice(line.indexOf("{"))))
        .map(({ alert, state, level, key, count }) => [alert, state, level, key, count]);
    const expect = [];
    const step = async (...more) => {
      expect.push(...more);
      await cron(worker);
      assert.deepEqual(alerts(), expect);
    };
    const ban = (at) => put(worker, { layer: "user", userId: `u${at}`, subject: `user=u${at}`, strikes: 5, bannedUntil: Date.now() + 86_400_000 });
    // One below each.
    await put(worker, { layer: "edge", count: 99 });
    await put(worker, { layer: "tenant", count: 49 });
    await Promise.all(Array.from({ length: 9 }, (_, at) => ban(at)));
    await put(worker, { layer: "endpoint", ip: "203.0.113.1", count: 19 });
    await put(worker, { layer: "endpoint", ip: "203.0.113.2", count: 19 });
    await put(worker, { layer: "edge", blocked: false, verdict: "warn", count: 50 });
    await step();
    await put(worker, { layer: "edge" });
    await step(["edge_blocks", "raised", "warning", null, 100]);
    assert.equal(operator.seen.length, 1, "it was not accepted");
    await put(worker, { layer: "tenant" });
    await ban(9);
    await put(worker, { layer: "endpoint", ip: "203.0.113.2" });
    await step(
      ["tenant_blocks", "raised", "warning", null, 50],
      ["user_bans", "raised", "warning", null, 10],
      ["ip_blocks", "raised", "warning", "203.0.113.2", 20],
    );
    await step();
    await put(worker, { layer: "edge", count: 899 });
    await step();
    await put(worker, { layer: "edge" });
    await step(["edge_blocks", "raised", "critical", null, 1000]);
    await step();
    // Five minutes later: bans are counted by the hour.
    await rows(worker, "UPDATE rate_limit_events SET at = at - 300000");
    await step(
      ["edge_blocks", "resolved", "critical", null, 0],
      ["tenant_blocks", "resolved", "warning", null, 0],
      ["ip_blocks", "resolved", "warning", "203.0.113.2", 0],
    );
    await step();
    await put(worker, { layer: "edge", count: 100 });
    await step(["edge_blocks", "raised", "warning", null, 100]);
    const told = operator.seen.slice(1).map(({ body }) => [body.alert, body.state, body.level, body.key, body.count]);
    assert.deepEqual(told.sort(), expect.sort(), "the operator hears of each once it answers");
    assert.equal(operator.seen[0].url, "/hook");
    assert.deepEqual(
      await rows(worker, "SELECT alert, level, notice FROM rate_limit_alerts ORDER BY alert"),
      [
        { alert: "edge_blocks", level: "warning", notice: null },
        { alert: "user_bans", level: "warning", notice: null },
      ],
    );
    await operator.close();
    return worker;
  },

  async "runs at the same time tell the operator once"() {
    const operator = await receiver([]);
    const { worker } = start({ vars: { THRESHOLD_ALERT_URL: `${operator.url}/hook` } });
    await put(worker, { layer: "edge", count: 100 });
    await put(worker, { layer: "tenant", count: 50 });
    await cron(worker);
    await put(worker, { layer: "edge", count: 900 });
    await Promise.all(Array.from({ length: 5 }, () => cron(worker)));
    await cron(worker);
    const told = operator.seen.map(({ body }) => [body.alert, body.level]);
    assert.deepEqual(told, [["edge_blocks", "warning"], ["tenant_blocks", "warning"], ["edge_blocks", "critical"]]);
    await operator.close();
    return worker;
  },

  async "the policy sets the thresholds"() {
    const { worker, lines } = start({ policy: `${POLICY}\n[alerts]\nedge_blocks = { per = "h", warning = 3, critical = 5 }\n` });
    await put(worker, { layer: "edge", count: 2, at: Date.now() - 1_800_000 });
    await cron(worker);
    assert.ok(!lines.some((line) => line.includes('"event":"alert"')));
    await put(worker, { layer: "edge" });
    await cron(worker);
    const [line] = lines.filter((line) => line.includes('"event":"alert"'));
    assert.ok(line?.includes('"threshold":3,"periodSec":3600'), lines.join("\n"));
    return worker;
  },

  async "a Worker that imports the module has the same"() {
    const { worker } = start({ own: true });
    await from(worker, "203.0.113.1", "/closed");
    await untilRecorded(worker, 1);
    await cron(worker);
    assert.deepEqual(await recorded(worker), {});
    const { edgeBlocks, topBlockedIps } = await (await from(worker, "203.0.113.1", "/v1/stats")).json();
    assert.deepEqual({ edgeBlocks, topBlockedIps }, { edgeBlocks: 1, topBlockedIps: [{ ip: "203.0.113.1", blocks: 1 }] });
    const [event] = await rows(worker, "SELECT user_id FROM rate_limit_events");
    assert.deepEqual(event, { user_id: "u9" });
    return worker;
  },
};

await runAll(tests);
