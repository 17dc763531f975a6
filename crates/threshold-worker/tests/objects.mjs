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

import { TOKEN, folder, index, run, runAll } from "./workerd.mjs";

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

async function restart() {
  const persist = mkdtempSync(join(tmpdir(), "threshold-objects-"));
  try {
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
  } finally {
    rmSync(persist, { recursive: true });
  }
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
    const until = Date.now() + 10_000;
    const logged = (event) => lines.filter((line) => line.includes(`"event":"${event}"`)).map((line) => JSON.parse(line));
    while (logged("decided_without_store").length === 0 && Date.now() < until) {
      await new Promise((resolve) => setTimeout(resolve, 50));
    }
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

tests["a restart keeps penalties"] = restart;
tests["failing objects are logged, and each rule decides"] = failing;
tests["a Worker without its settings answers 500"] = misconfigured;
// One Worker for each: workerd closes connections that were idle for a while, and a client may be using one of them again.
await runAll(tests, () => start(POLICY));
