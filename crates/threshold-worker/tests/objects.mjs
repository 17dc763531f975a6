// Runs the Worker on workerd in front of an upstream, and checks what its clients see.
//
//   node objects.mjs NODE_MODULES WORKER
//
// WORKER is a folder that tools/build has made.

import assert from "node:assert/strict";
import { mkdtempSync, rmSync } from "node:fs";
import { createInterface } from "node:readline";
import { tmpdir } from "node:os";
import { join } from "node:path";

import { TOKEN, clock, eventually, folder, index, run, runAll } from "./workerd.mjs";

const POLICY = `
[identity]
client_ip = "cf-connecting-ip"
tenant = "host:{tenant}.example.com"
user = "header:x-user"
[[rule]]
name = "hundred"
per = ["ip"]
match = { path = "/hundred" }
limit = "100/h"
[[rule]]
name = "tenant"
layer = "tenant"
per = ["tenant"]
match = { path = "/shared/**" }
limit = "\${TENANT_LIMIT:-40}/h"
algorithm = "fixed-window"
place = "TENANTS/tenant:{tenant}"
[[rule]]
name = "address"
per = ["ip"]
match = { path = "/shared/**" }
limit = "10/h"
algorithm = "sliding-log"
place = "SESSIONS/ip:{ip}"
[[rule]]
name = "posts"
per = ["ip"]
match = { path = "/posts" }
limit = "1/h"
ladder = "quick"
ban_shared = true
strike = "request"
allow = ["shared-ladder: the test has no users"]
[[rule]]
name = "hot"
per = ["tenant"]
match = { path = "/hot" }
limit = "2000000/h"
algorithm = "fixed-window"
cost = "tokens"
shards = 4
place = "TENANTS/tenant:{tenant}"
[ladders.quick]
rungs = ["warn", "cooldown 1min", "ban 24h"]
`;

// The upstream counts what reaches it, and shows the headers.
const UPSTREAM = `
let seen = 0;
export default {
  fetch(request) {
    seen += 1;
    if (new URL(request.url).pathname === "/throw") {
      throw new Error("the upstream fails");
    }
    return Response.json({ seen, path: new URL(request.url).pathname }, { headers: { "x-upstream": "yes" } });
  },
};
`;

// A class of another author, on Threshold's: with a table, an entry and an alarm of its own. Each alarm takes a minute of the clock.
const SHOP = `
import "./clock.js";
import { DurableObject } from "cloudflare:workers";
import { TenantDO as Plain } from "./index.js";
export { default } from "./index.js";

const tablesOf = (storage) =>
  storage.sql.exec("SELECT name FROM sqlite_master ORDER BY name").toArray().map(({ name }) => name);

// Shows what is in the storage of an object of ours that nobody extends.
class Holder extends DurableObject {
  #plain = new Plain(this.ctx, this.env);

  fetch(request) {
    return new URL(request.url).pathname === "/shop/look" ? Response.json(tablesOf(this.ctx.storage)) : this.#plain.fetch(request);
  }

  alarm(info) {
    return this.#plain.alarm(info);
  }
}

class Shop extends Plain {
  constructor(ctx, env) {
    super(ctx, env);
    ctx.storage.sql.exec("CREATE TABLE IF NOT EXISTS orders (at INTEGER)");
  }

  async fetch(request) {
    const { pathname, searchParams } = new URL(request.url);
    const { storage } = this.ctx;
    switch (pathname) {
      case "/shop/look": {
        const tables = tablesOf(storage).filter((name) => !name.startsWith("_cf_"));
        const [{ orders }] = storage.sql.exec("SELECT count(*) AS orders FROM orders").toArray();
        const [entry, alarm] = [await storage.get("entry"), await storage.getAlarm()];
        return Response.json({ tables, orders, entry, alarm });
      }
      case "/shop/hour":
        await storage.put("entry", "kept");
        await storage.put("rounds", 60);
        return new Response(await storage.setAlarm(1));
      case "/shop/alarm":
        return new Response(await storage.setAlarm(Number(searchParams.get("at"))));
      case "/shop/ask":
        return new Response(await super.alarm());
      case "/shop/forget":
        return new Response(await storage.deleteAll());
      case "/shop/collide":
        storage.sql.exec("CREATE TABLE threshold_records (own TEXT)");
        storage.sql.exec("INSERT INTO threshold_records VALUES ('mine')");
        return new Response();
      case "/shop/own":
        return Response.json(storage.sql.exec("SELECT * FROM threshold_records").toArray());
    }
    return super.fetch(request);
  }

  async alarm(info) {
    const { storage } = this.ctx;
    const rounds = (await storage.get("rounds")) ?? 0;
    storage.sql.exec("INSERT INTO orders VALUES (?)", Date.now());
    if (rounds > 0) {
      globalThis.shift += 60_000;
      await storage.put("rounds", rounds - 1);
      if (rounds > 1) {
        // By the time without the shift. workerd takes an alarm at the very millisecond of the present one for that, and drops it.
        await storage.setAlarm(Object.getPrototypeOf(Date).now() + 5);
      }
      if (rounds > 10 && rounds % 10 === 0) {
        const body = JSON.stringify({ limit: 100, windowSec: 60 });
        await super.fetch(new Request("https://object/check", { method: "POST", body }));
      }
    }
    await super.alarm(info);
  }
}
`;

const DAY = 86_400_000;

// Starts the Worker with one of these classes in place of TenantDO, and returns calls of one of its objects.
function shop(persist, className = "Shop") {
  const own = { type: "ESModule", path: join(folder, "own.js"), contents: `${SHOP}\nexport { ${className} as TenantDO };` };
  const worker = run({
    durableObjectsPersist: persist,
    name: "threshold",
    modulesRoot: folder,
    modules: [own, clock, ...index],
    compatibilityDate: "2026-04-01",
    durableObjects: { TENANTS: { className: "TenantDO", useSQLite: true } },
    bindings: { THRESHOLD_POLICY: POLICY, THRESHOLD_SECRET: "0123456789abcdef0123456789abcdef" },
  });
  const send = async (path, init) => {
    const objects = await worker.getDurableObjectNamespace("TENANTS");
    return objects.get(objects.idFromName("acme")).fetch(`https://object${path}`, init);
  };
  const check = (windowSec) => send("/check", { method: "POST", body: JSON.stringify({ limit: 100, windowSec }) });
  const look = async () => (await send("/shop/look")).json();
  return { worker, send, check, look };
}

function start(policy, persist, vars = {}, { sqlite = true, lines } = {}) {
  return run({
    ...(lines && {
      handleRuntimeStdio(stdout, stderr) {
        createInterface(stdout).on("line", (line) => lines.push(line));
        createInterface(stderr).on("line", (line) => lines.push(line));
      },
    }),
    durableObjectsPersist: persist,
    workers: [
      {
        name: "threshold",
        modulesRoot: folder,
        modules: index,
        compatibilityDate: "2026-04-01",
        durableObjects: {
          THRESHOLD: { className: "ThresholdObject", useSQLite: true },
          TENANTS: { className: "TenantDO", useSQLite: true },
          SESSIONS: { className: "SessionDO", useSQLite: sqlite },
        },
        serviceBindings: { UPSTREAM: "upstream" },
        bindings: {
          THRESHOLD_POLICY: policy,
          THRESHOLD_SECRET: "0123456789abcdef0123456789abcdef",
          THRESHOLD_TOKEN: TOKEN,
          ...vars,
        },
      },
      { name: "upstream", modules: true, script: UPSTREAM, compatibilityDate: "2026-04-01" },
    ],
  });
}

// Sends a request of a client with this address.
const from = (worker, ip, url, init = {}) =>
  worker.dispatchFetch(url, { ...init, headers: { "cf-connecting-ip": ip, ...init.headers } });
const statuses = async (answers) => {
  const count = {};
  for (const answer of await Promise.all(answers)) {
    count[answer.status] = (count[answer.status] ?? 0) + 1;
  }
  return count;
};
const call = (worker, path, body, token = TOKEN) =>
  worker.dispatchFetch(`http://worker${path}`, {
    method: "POST",
    body: typeof body === "string" ? body : JSON.stringify(body),
    headers: { authorization: `Bearer ${token}` },
  });

const tests = {
  async "500 at once on a limit of 100 admit exactly 100"(worker) {
    const answers = Array.from({ length: 500 }, () => from(worker, "203.0.113.1", "http://a.example.com/hundred"));
    assert.deepEqual(await statuses(answers), { 200: 100, 429: 400 });
  },

  async "an answer has the headers of the other doors"(worker) {
    const allowed = await from(worker, "203.0.113.2", "http://a.example.com/hundred");
    assert.equal(allowed.status, 200);
    assert.equal(allowed.headers.get("x-upstream"), "yes");
    assert.equal(allowed.headers.get("x-ratelimit-limit"), "100");
    assert.equal(allowed.headers.get("x-ratelimit-remaining"), "99");
    assert.match(allowed.headers.get("ratelimit-policy"), /"hundred";q=100;w=3600/);
    await Promise.all(Array.from({ length: 99 }, () => from(worker, "203.0.113.2", "http://a.example.com/hundred")));
    const denied = await from(worker, "203.0.113.2", "http://a.example.com/hundred");
    assert.equal(denied.status, 429);
    assert.ok(Number(denied.headers.get("retry-after")) >= 1);
    assert.equal(denied.headers.get("cache-control"), "no-store");
    const body = await denied.json();
    assert.equal(body.error, "rate_limited");
    assert.equal(body.rule, "hundred");
  },

  async "a denial by one object charges no other"(worker) {
    // The address has 10 an hour and the tenant 40. What the address is denied must not count for the tenant.
    const url = "http://b.example.com/shared/x";
    const first = Array.from({ length: 60 }, () => from(worker, "203.0.113.3", url));
    const admitted = (await statuses(first))[200];
    assert.ok(admitted <= 10, `${admitted} of 10`);
    // Give-backs come after the answer.
    let rest = 0;
    for (let ip = 10; ip < 60; ip += 1) {
      for (let attempt = 0; attempt < 3; attempt += 1) {
        const answer = await from(worker, `203.0.113.${ip}`, url);
        rest += answer.status === 200 ? 1 : 0;
      }
    }
    assert.equal(admitted + rest, 40, "the tenant's limit is used up, and not passed");
  },

  async "a flood on one tenant changes no decision of another"(worker) {
    // At most 50 at once: a busy workerd closes connections whose requests it has not read within some seconds.
    let sent = 0;
    const flood = [];
    const sender = async () => {
      while (sent < 300) {
        sent += 1;
        const asked = from(worker, `198.51.100.${sent % 200}`, "http://c.example.com/shared/x");
        flood.push(asked);
        await asked;
      }
    };
    const flooded = Promise.all(Array.from({ length: 50 }, sender));
    const calm = [];
    for (let at = 0; at < 30; at += 1) {
      calm.push(await from(worker, `192.0.2.${at}`, "http://d.example.com/shared/x"));
    }
    await flooded;
    assert.ok(((await statuses(flood))[200] ?? 0) <= 40);
    assert.deepEqual(await statuses(calm), { 200: 30 });
  },

  async "a hot limit is counted by several objects and not passed"(worker) {
    // Each of the four shards has 500,000, so one request of 300,000 fits into each.
    const hot = { ip: "203.0.113.1", tenant: "acme", path: "/hot", costs: { tokens: 300_000 } };
    const answers = await Promise.all(Array.from({ length: 100 }, async () => (await call(worker, "/v1/check", hot)).json()));
    assert.equal(answers.filter((answer) => answer.allowed).length, 4);
    assert.ok(answers.every((answer) => answer.limit === 2_000_000));
  },

  async "headers of clients name nobody"(worker) {
    // Anyone can send these headers. Only Cloudflare sets the address.
    const forged = (at) => ({
      "x-user": `user-${at}`,
      "x-forwarded-for": `192.0.2.${at}`,
      forwarded: `for=192.0.2.${at}`,
      "x-real-ip": `192.0.2.${at}`,
    });
    const answers = Array.from({ length: 110 }, (_, at) =>
      from(worker, "203.0.113.4", "http://a.example.com/hundred", { headers: forged(at) }),
    );
    assert.deepEqual(await statuses(answers), { 200: 100, 429: 10 });
  },

  async "a GET with an announced body and a failing upstream are answered"(worker) {
    const empty = await from(worker, "203.0.113.6", "http://a.example.com/other", { headers: { "content-length": "0" } });
    assert.equal(empty.status, 200);
    const failing = await from(worker, "203.0.113.6", "http://a.example.com/throw");
    assert.equal(failing.status, 502);
    assert.equal(await failing.text(), '{"error":"bad_gateway"}');
  },

  async "other Workers call the API with the token, and clients do not"(worker) {
    const body = { ip: "203.0.113.5", path: "/hundred", method: "GET" };
    const allowed = await call(worker, "/v1/check", body);
    assert.equal(allowed.status, 200);
    const decision = await allowed.json();
    assert.equal(decision.allowed, true);
    assert.equal(decision.remaining, 99);
    const limit = { key: "k", limit: 2, windowSec: 60 };
    const answers = [];
    for (let at = 0; at < 3; at += 1) {
      answers.push(await (await call(worker, at === 1 ? "/check" : "/v1/limit", limit)).json());
    }
    assert.deepEqual(answers.map((answer) => answer.allowed), [true, true, false]);
    assert.deepEqual(answers.map((answer) => answer.remaining), [1, 0, 0]);
    // A client's request goes to the upstream, whatever its path.
    const guessed = await call(worker, "/v1/check", body, "another token for workers");
    assert.equal((await guessed.json()).path, "/v1/check");
    for (const [bad, field] of [["{", null], ['{"nope":1}', "nope"], ['{"ip":"x"}', "ip"], ['{"requestId":"a"}', "requestId"]]) {
      const refused = await call(worker, "/v1/check", bad);
      assert.equal(refused.status, 400, bad);
      const answer = await refused.json();
      if (field !== null) {
        assert.equal(answer.field, field, JSON.stringify(answer));
      }
    }
    assert.equal((await call(worker, "/v1/check", " ".repeat(70_000))).status, 413);
  },
};

async function withFolder(test) {
  const persist = mkdtempSync(join(tmpdir(), "threshold-objects-"));
  try {
    await test(persist);
  } finally {
    rmSync(persist, { recursive: true });
  }
}

async function restart(persist) {
  let worker = start(POLICY, persist);
  const seen = [];
  for (let at = 0; at < 5; at += 1) {
    seen.push(await from(worker, "203.0.113.9", "http://a.example.com/posts"));
  }
  assert.equal(seen[1].headers.get("x-ratelimit-warning"), "true", "the first violation warns");
  assert.deepEqual(seen.map((answer) => answer.status), [200, 200, 429, 429, 429]);
  await worker.dispose();
  worker = start(POLICY, persist);
  const after = await from(worker, "203.0.113.9", "http://a.example.com/hundred");
  assert.equal(after.status, 429, "the penalty outlives the restart, on every path");
  assert.equal((await from(worker, "203.0.113.8", "http://a.example.com/posts")).status, 200);
  await worker.dispose();
}

// The class of one binding was not declared for SQLite, so its objects fail. The rules decide, and the log says so.
async function failing() {
  const rule = (name, mode) =>
    `[[rule]]\nname = "${name}"\nper = ["ip"]\nmatch = { path = "/${name}" }\nlimit = "2/h"\non_store_error = "${mode}"\nplace = "SESSIONS/ip:{ip}"\n`;
  const lines = [];
  const worker = start(rule("lets-pass", "open") + rule("stops", "closed"), undefined, {}, { sqlite: false, lines });
  try {
    for (let at = 0; at < 4; at += 1) {
      assert.equal((await from(worker, "203.0.113.1", "http://a.example.com/lets-pass")).status, 200);
    }
    assert.equal((await from(worker, "203.0.113.1", "http://a.example.com/stops")).status, 503);
    const logged = (event) => lines.filter((line) => line.includes(`"event":"${event}"`)).map((line) => JSON.parse(line));
    await eventually(() => logged("decided_without_store").length > 0, "the log");
    assert.deepEqual(logged("decided_without_store")[0].rules, { "lets-pass": "open" });
    assert.equal(logged("object_failed")[0].binding, "SESSIONS");
    assert.match(logged("object_failed")[0].reason, /SQL/i);
  } finally {
    await worker.dispose();
  }
}

async function misconfigured() {
  const bad = [
    start("[[rule]]\nname = 'x'", undefined),
    start(POLICY, undefined, { THRESHOLD_SECRET: "" }),
    start(POLICY, undefined, { THRESHOLD_TOKEN: "short" }),
    start(POLICY.replace("TENANTS/", "MISSING/"), undefined),
    start(POLICY.replace('per = ["ip"]', 'per = ["ip"]\nconsistency = "leased"'), undefined),
    start(POLICY, undefined, { UPSTREAM_URL: "https://app.example.com/path" }),
  ];
  for (const worker of bad) {
    const answer = await from(worker, "203.0.113.1", "http://a.example.com/");
    assert.equal(answer.status, 500);
    assert.equal(await answer.text(), '{"error":"misconfigured"}');
    await worker.dispose();
  }
}

// The first clean-up deleted the whole storage of the object, and with it the table of the class that extends ours.
tests["a class that extends ours keeps its table, its entries and its alarms for an hour"] = async () => {
  const { worker, send, check, look } = shop();
  assert.equal((await (await check(60)).json()).allowed, true);
  assert.equal((await look()).tables.length, 2, "one of its own, and one of ours");
  await send("/shop/hour");
  const { tables, orders, entry, alarm } = await eventually(async () => {
    const found = await look();
    return found.orders === 60 && found;
  }, "60 alarms");
  assert.deepEqual({ tables, orders, entry, alarm }, { tables: ["orders"], orders: 60, entry: "kept", alarm: null });
  // It may also delete everything itself.
  await check(60);
  await send("/shop/forget");
  assert.equal((await (await check(60)).json()).remaining, 99);
  return worker;
};

// An object has one alarm. A clean-up a day later at most must not wait for the other author's, nor take its place for good.
tests["another author's alarm is not lost, and ours comes before it"] = () => withFolder(async (persist) => {
  const far = Math.floor(Date.now() / 1000) * 1000 + 40 * DAY;
  const idle = (look, alarm) =>
    eventually(async () => {
      const found = await look();
      return found.tables.join() === "orders" && found.alarm === alarm;
    }, `Threshold's rows are gone and the alarm is at ${alarm}`);
  let { worker, send, check, look } = shop(persist);
  // The clean-up is put before it, also over a restart.
  await send(`/shop/alarm?at=${far}`);
  await check(3);
  await worker.dispose();
  ({ worker, send, check, look } = shop(persist));
  await idle(look, far);
  // Set after ours, it is found by the next command.
  await check(1);
  await send(`/shop/alarm?at=${far + DAY}`);
  await check(1);
  await idle(look, far + DAY);
  // Or when the class asks for the clean-up; the alarm that it has replaced itself does not come back.
  await check(1);
  await send(`/shop/alarm?at=${far + 2 * DAY}`);
  await send("/shop/ask");
  await idle(look, far + 2 * DAY);
  // One that comes within a day stays where it is, since it cleans up too.
  const soon = far - 40 * DAY + 3_600_000;
  await send(`/shop/alarm?at=${soon}`);
  await check(1);
  assert.equal((await look()).alarm, soon);
  await worker.dispose();
});

// Storage is billed while there is any. But an earlier deployment may have left something of another author in it.
tests["an idle object of ours has no storage, and one with another author's table keeps it"] = async () => {
  for (const [first, left] of [["Shop", "_cf_METADATA,orders"], ["Holder", ""]]) {
    await withFolder(async (persist) => {
      const before = shop(persist, first);
      assert.equal((await before.check(1)).status, 200);
      await before.worker.dispose();
      const { worker, check, look } = shop(persist, "Holder");
      assert.equal((await check(1)).status, 200);
      await eventually(async () => (await look()).join() === left, `only "${left}" is left`);
      await worker.dispose();
    });
  }
};

// Its rows cannot be read as ours, so it is a failure, and nothing of it is changed.
tests["a table of another author under the name of ours is left alone"] = async () => {
  const { worker, send, check } = shop();
  await send("/shop/collide");
  assert.equal((await check(60)).status, 500);
  await send("/shop/ask");
  assert.deepEqual(await (await send("/shop/own")).json(), [{ own: "mine" }]);
  return worker;
};

tests["a restart keeps penalties"] = () => withFolder(restart);
tests["failing objects are logged, and each rule decides"] = failing;
tests["a Worker without its settings answers 500"] = misconfigured;
// One Worker for each: workerd closes connections that were idle for a while, and a client may be using one of them again.
await runAll(tests, () => start(POLICY));
