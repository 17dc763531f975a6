// Runs Workers with eventual rules on workerd, and checks what they keep in KV, what they do when KV fails, and by how much two isolates
// on one namespace pass a limit.
//
//   node kv.mjs NODE_MODULES WORKER
//
// WORKER is a folder that tools/build has made.

import assert from "node:assert/strict";
import { mkdtempSync, rmSync } from "node:fs";
import { tmpdir } from "node:os";
import { join } from "node:path";

import { folder, index, run, runAll } from "./workerd.mjs";

const rule = (name, lines) => `[[rule]]\nname = "${name}"\nmatch = { path = "/${name}" }\n${lines}\n`;
const FIXED = 'algorithm = "fixed-window"\nconsistency = "eventual"';
const POLICY = [
  rule("messages", `per = ["user"]\nlimit = "20/day"\n${FIXED}\nplace = "RATE_KV/ratelimit:{user}:{window}"`),
  rule("bucket", `per = ["ip"]\nlimit = "10/min"\nalgorithm = "token-bucket"\nconsistency = "eventual"\napproximate = true\nplace = "RATE_KV/ip:{hash}"`),
  rule("blocked", `per = ["user"]\nlimit = "3/day"\nblock_for = "2h"\n${FIXED}\nplace = "RATE_KV/blocked:{user}"`),
  rule("first", `per = ["user"]\nlimit = "3/day"\nanchor = "first"\n${FIXED}`),
  rule("all", `per = []\nlimit = "4/day"\n${FIXED}\nplace = "RATE_KV/all:{window}"`),
  rule("sliding", `per = ["user"]\nlimit = "3/day"\nalgorithm = "sliding-log"\nconsistency = "eventual"\napproximate = true`),
  rule("open", `per = ["user"]\nlimit = "2/day"\non_store_error = "open"\n${FIXED}\nplace = "RATE_KV/open:{user}"`),
  rule("closed", `per = ["user"]\nlimit = "2/day"\non_store_error = "closed"\n${FIXED}\nplace = "RATE_KV/closed:{user}"`),
  rule("local", `per = ["user"]\nlimit = "2/day"\non_store_error = "local"\n${FIXED}\nplace = "RATE_KV/local:{user}"`),
  // One request meets a rule in an object and one in KV.
  '[[rule]]\nname = "object"\nmatch = { path = "/mixed/**" }\nper = ["user"]\nlimit = "5/h"\nalgorithm = "sliding-log"\n',
  `[[rule]]\nname = "wide"\nmatch = { path = "/mixed/wide" }\nper = ["user"]\nlimit = "8/day"\n${FIXED}\nplace = "RATE_KV/wide:{user}"\n`,
  `[[rule]]\nname = "narrow"\nmatch = { path = "/mixed/narrow" }\nper = ["user"]\nlimit = "2/day"\n${FIXED}\nplace = "RATE_KV/narrow:{user}"\n`,
  `[[rule]]\nname = "sure"\nmatch = { path = "/mixed/sure" }\nper = ["user"]\nlimit = "8/day"\non_store_error = "closed"\n${FIXED}\nplace = "RATE_KV/sure:{user}"\n`,
].join("");

// Serves the API in process, on a namespace that counts calls and fails when it is told to.
const OWN = `
import { api, ThresholdObject } from "./index.js";
export { ThresholdObject };
const state = { get: false, put: false, gets: 0, puts: 0 };
let own;
function watched(namespace) {
  const fails = (verb) => {
    state[verb + "s"] += 1;
    if (state[verb]) {
      throw new Error("KV " + verb.toUpperCase() + " failed: 500 Internal Server Error");
    }
  };
  return {
    async get(...args) { fails("get"); return namespace.get(...args); },
    async put(...args) { fails("put"); return namespace.put(...args); },
    getWithMetadata() {}, list() {}, delete() {},
  };
}
export default {
  async fetch(request, env, context) {
    if (new URL(request.url).pathname === "/state") {
      return Response.json(Object.assign(state, await request.json()));
    }
    own ??= { ...env, RATE_KV: watched(env.RATE_KV) };
    return api(request, own, context);
  },
};
`;

function worker(name, policy, more = {}) {
  return {
    name,
    modulesRoot: folder,
    modules: [
      { type: "ESModule", path: join(folder, "own.js"), contents: OWN },
      ...index,
    ],
    compatibilityDate: "2026-04-01",
    durableObjects: { THRESHOLD: { className: "ThresholdObject", useSQLite: true } },
    kvNamespaces: { RATE_KV: "rates", THRESHOLD_KV: "others" },
    bindings: {
      THRESHOLD_POLICY: policy,
      THRESHOLD_SECRET: "0123456789abcdef0123456789abcdef",
      THRESHOLD_TOKEN: "a token for other workers",
    },
    ...more,
  };
}

const start = (policy, more = {}) =>
  run({
    workers: [worker("a", policy, more.worker), worker("b", policy, more.worker)],
    ...more.options,
  });

// Asks one of the two isolates.
async function check(server, name, path, user, more = {}) {
  const isolate = await server.getWorker(name);
  const body = JSON.stringify({ user, ip: "203.0.113.7", method: "GET", path, ...more });
  const answer = await isolate.fetch("http://worker/v1/check", { method: "POST", body });
  return { status: answer.status, ...(await answer.json()) };
}
async function state(server, change = {}) {
  const isolate = await server.getWorker("a");
  return (await isolate.fetch("http://worker/state", { method: "POST", body: JSON.stringify(change) })).json();
}
const entries = async (server, binding) => {
  const namespace = await server.getKVNamespace(binding, "a");
  const { keys } = await namespace.list();
  return Promise.all(keys.map(async (key) => ({ ...key, value: await namespace.get(key.name) })));
};
// Waits until a key has a value that fits; the writes of a second follow in one.
async function value(server, binding, prefix, fits) {
  for (let attempt = 0; attempt < 200; attempt += 1) {
    const found = (await entries(server, binding)).find((entry) => entry.name.startsWith(prefix) && fits(entry.value));
    if (found !== undefined) {
      return found;
    }
    await new Promise((resolve) => setTimeout(resolve, 50));
  }
  throw new Error(`no such value: ${JSON.stringify(await entries(server, binding))}`);
}
// Asks several times in a row, and returns which requests were allowed.
async function inARow(server, times, path, user, name = "a") {
  const answers = [];
  for (let at = 0; at < times; at += 1) {
    answers.push(await check(server, name, path, user));
  }
  return answers;
}
const allowed = (answers) => answers.filter((answer) => answer.allowed).length;
const lifetime = (entry) => entry.expiration - Date.now() / 1000;

const tests = {
  async "a window of the clock is one key with its count"(server) {
    const first = await check(server, "a", "/messages", "42");
    assert.equal(first.approximate, true);
    assert.equal(first.limits[0].approximate, true);
    assert.equal(first.remaining, 19);
    // The count is written before the answer.
    const window = Math.floor(Date.now() / 86_400_000);
    const [written] = await entries(server, "RATE_KV");
    assert.equal(written.value, "1");
    assert.ok([window, window - 1].map((number) => `ratelimit:42:${number}`).includes(written.name), written.name);
    assert.ok(lifetime(written) > 86_300 && lifetime(written) <= 86_401, `${lifetime(written)}`);
    assert.deepEqual(await state(server), { get: false, put: false, gets: 1, puts: 1 }, "one get and one put");
    assert.equal(allowed(await inARow(server, 25, "/messages", "42")), 19);
    await value(server, "RATE_KV", "ratelimit:42:", (text) => text === "20");
    assert.equal((await check(server, "b", "/messages", "42")).allowed, false, "another isolate reads the count");
    assert.equal((await check(server, "a", "/messages", "43")).remaining, 19);
  },

  async "one isolate counts exactly, and writes about once a second"(server) {
    const answers = await Promise.all(Array.from({ length: 200 }, () => check(server, "a", "/messages", "flood")));
    assert.equal(allowed(answers), 20);
    await value(server, "RATE_KV", "ratelimit:flood:", (text) => text === "20");
    const { gets, puts } = await state(server);
    console.log(`  200 requests at once: ${gets} gets, ${puts} puts`);
    assert.ok(puts < 20, `${puts} puts`);
  },

  async "a bucket has its tokens, and a bucket of all its own key"(server) {
    assert.equal(allowed(await inARow(server, 12, "/bucket", "x")), 10);
    const { name, value: text } = await value(server, "RATE_KV", "ip:", (text) => JSON.parse(text).tokens < 1);
    const bucket = JSON.parse(text);
    assert.match(name, /^ip:[0-9a-f]{32}$/);
    assert.deepEqual(Object.keys(bucket), ["tokens", "lastRefill", "ttl"]);
    assert.ok(Math.abs(bucket.lastRefill - Date.now()) < 60_000 && bucket.ttl >= 60, text);
    assert.equal(allowed(await inARow(server, 5, "/all", "y")), 4);
    const all = await value(server, "RATE_KV", "all:", (text) => text === "4");
    assert.match(all.name, /^all:\d+$/);
  },

  async "a block and a window of its own are JSON"(server) {
    assert.equal(allowed(await inARow(server, 5, "/blocked", "u")), 3);
    const found = await value(server, "RATE_KV", "blocked:u", (text) => text.includes("blockedUntil"));
    const { count, blockedUntil } = JSON.parse(found.value);
    assert.equal(count, 3);
    assert.ok(blockedUntil - Date.now() > 7_100_000, found.value);
    assert.ok(lifetime(found) > 7_100, `${lifetime(found)}`);
    const denied = await check(server, "b", "/blocked", "u");
    assert.ok(denied.retryAfter > 7_100, "another isolate knows the block");
    assert.equal(allowed(await inARow(server, 4, "/first", "u")), 3);
    const own = await value(server, "THRESHOLD_KV", "key:", (text) => JSON.parse(text).count === 3);
    assert.ok(Math.abs(JSON.parse(own.value).start - Date.now()) < 60_000, own.value);
    assert.equal(allowed(await inARow(server, 4, "/sliding", "u")), 3);
    await value(server, "THRESHOLD_KV", "key:", (text) => typeof JSON.parse(text).balance === "string");
  },

  async "objects and KV in one request: all or nothing, and KV denies without an object"(server) {
    const wide = await inARow(server, 8, "/mixed/wide", "u");
    assert.equal(allowed(wide), 5, "the object denies");
    assert.deepEqual(wide[7].limits.map((limit) => [limit.rule, limit.remaining]), [["object", 0], ["wide", 3]]);
    assert.equal(wide[0].limits[0].approximate, undefined);
    assert.equal(wide[0].limits[1].approximate, true);
    await value(server, "RATE_KV", "wide:u", (text) => JSON.parse(text).count === 5);
    const narrow = await inARow(server, 4, "/mixed/narrow", "v");
    assert.equal(allowed(narrow), 2);
    assert.deepEqual(narrow[3].limits.map((limit) => limit.rule), ["narrow"], "no object was asked");
    assert.equal((await check(server, "a", "/mixed/wide", "v")).limits[0].remaining, 2, "nor charged");
    const flood = await Promise.all(Array.from({ length: 50 }, () => check(server, "a", "/mixed/narrow", "w")));
    assert.equal(allowed(flood), 2);
    // What objects were charged before KV denied comes back after the answer.
    let left = 0;
    for (let attempt = 0; attempt < 100 && left !== 3; attempt += 1) {
      left = (await check(server, "a", "/mixed/wide", "w", { cost: 0 })).limits[0].remaining;
    }
    assert.equal(left, 3);
  },

  async "a failing KV concerns eventual rules alone, each by its own mode"(server) {
    await state(server, { get: true });
    const open = await inARow(server, 4, "/open", "u");
    assert.equal(allowed(open), 4);
    assert.deepEqual([open[0].degraded, open[0].degradedReason, open[0].limits], [true, "store_error", []]);
    const closed = await check(server, "a", "/closed", "u");
    assert.deepEqual([closed.status, closed.allowed, closed.degraded], [503, false, true]);
    const local = await inARow(server, 3, "/local", "u");
    assert.deepEqual(local.map((answer) => answer.allowed), [true, true, false], "the isolate counts alone");
    assert.ok(local.every((answer) => answer.degraded));
    // The rule in an object decides as always; the default of the eventual one is to count alone.
    assert.equal(allowed(await inARow(server, 7, "/mixed/wide", "u")), 5);
    await state(server, { get: false, put: true });
    assert.equal((await check(server, "a", "/closed", "w")).status, 503, "what cannot be written is not allowed");
    const opened = await check(server, "a", "/open", "w");
    assert.deepEqual([opened.allowed, opened.degraded, opened.remaining], [true, true, 1]);
    assert.equal((await check(server, "a", "/mixed/sure", "w")).status, 503);
    await state(server, { put: false });
    let left = 0;
    for (let attempt = 0; attempt < 100 && left !== 5; attempt += 1) {
      left = (await check(server, "a", "/mixed/wide", "w", { cost: 0 })).limits[0].remaining;
    }
    assert.equal(left, 5, "the object gave its charge back");
  },

  async "a value that is not ours is a failure of its rule"(server) {
    const namespace = await server.getKVNamespace("RATE_KV", "a");
    for (const path of ["open", "closed"]) {
      await namespace.put(`${path}:u`, "hello");
      await namespace.put(`${path}:v`, '{"count":-1,"start":1}');
    }
    for (const user of ["u", "v"]) {
      const open = await check(server, "a", "/open", user);
      assert.deepEqual([open.status, open.allowed, open.degraded], [200, true, true]);
      assert.equal((await check(server, "a", "/closed", user)).status, 503);
    }
    assert.equal(await namespace.get("open:u"), "hello", "it is left as it is");
    // A count that somebody else has written in the right form is believed.
    const window = Math.floor(Date.now() / 86_400_000);
    for (const number of [window, window + 1]) {
      await namespace.put(`ratelimit:z:${number}`, "18");
    }
    assert.equal(allowed(await inARow(server, 4, "/messages", "z")), 2);
  },

  async "two isolates on one namespace pass the limit by less than the limit"(server) {
    // An isolate never admits more than the limit by itself, so two admit at most twice as much, whatever they know of each other.
    const sent = [];
    for (let at = 0; at < 28; at += 1) {
      sent.push(check(server, "a", "/messages", "slow"), check(server, "b", "/messages", "slow"));
      await new Promise((resolve) => setTimeout(resolve, 250));
    }
    const slow = allowed(await Promise.all(sent));
    const burst = ["a", "b"].flatMap((name) => Array.from({ length: 200 }, () => check(server, name, "/messages", "burst")));
    const fast = allowed(await Promise.all(burst));
    console.log(`  limit 20, two isolates: ${slow} admitted of 56 at 8 a second, ${fast} of 400 at once`);
    assert.ok(slow >= 20 && slow <= 40, `${slow}`);
    assert.ok(fast >= 20 && fast <= 40, `${fast}`);
    // Both have read what the other has written by now.
    await value(server, "RATE_KV", "ratelimit:burst:", (text) => Number(text) >= 20);
    assert.equal(allowed([...(await inARow(server, 2, "/messages", "burst")), ...(await inARow(server, 2, "/messages", "burst", "b"))]), 0);
  },
};

async function move() {
  const eventual = `[[rule]]\nname = "posts"\nper = ["user"]\nlimit = "5/h"\n${FIXED}\n`;
  const strong = eventual.replace('consistency = "eventual"', 'consistency = "strong"');
  const observed = strong.replace('"posts"', '"posts-exact"') + 'mode = "observe"\n';
  const persist = mkdtempSync(join(tmpdir(), "threshold-kv-"));
  const options = { kvPersist: join(persist, "kv"), durableObjectsPersist: join(persist, "objects") };
  const used = async (policy, times, count) => {
    const server = start(policy, { options });
    try {
      const answers = await inARow(server, times, "/", "u");
      if (count !== undefined) {
        await value(server, "THRESHOLD_KV", "key:", (text) => JSON.parse(text).count === count);
      }
      return answers;
    } finally {
      await server.dispose();
    }
  };
  try {
    assert.equal((await used(eventual, 2, 2))[1].remaining, 3);
    // First the new rule only watches, beside the old one: it begins at 0 and denies nothing.
    const both = await used(eventual + observed, 2, 4);
    const [inKv, exact] = ["posts", "posts-exact"].map((name) => both[1].limits.find((limit) => limit.rule === name));
    assert.deepEqual([inKv.remaining, exact.remaining, exact.mode], [1, 3, "observe"]);
    // Then it is enforced alone. It goes on with what it has counted, and what KV had counted before is forgotten.
    const after = await used(observed.replace('mode = "observe"\n', ""), 5);
    assert.deepEqual(after.map((answer) => answer.allowed), [true, true, true, false, false]);
    assert.equal(after[0].approximate, undefined);
  } finally {
    rmSync(persist, { recursive: true });
  }
}

async function misconfigured() {
  const cases = [
    [POLICY, {}, 401],
    [POLICY, { kvNamespaces: { RATE_KV: "rates" } }],
    [POLICY, { kvNamespaces: { THRESHOLD_KV: "others" }, durableObjects: { RATE_KV: { className: "ThresholdObject", useSQLite: true } } }],
    [`[[rule]]\nname = "r"\nper = ["ip"]\nlimit = "5/h"\ncount = "status:401"\n${FIXED}\n`, {}],
  ];
  for (const [policy, more, status = 500] of cases) {
    const server = start(policy, { worker: { ...more, modules: worker("x", "").modules.slice(1) } });
    const answer = await (await server.getWorker("a")).fetch("http://worker/", { headers: { "cf-connecting-ip": "203.0.113.7" } });
    assert.equal(answer.status, status);
    assert.equal((await answer.json()).error, status === 500 ? "misconfigured" : "unauthorized");
    await server.dispose();
  }
}

tests["a rule moves from KV to objects"] = move;
tests["a Worker without the namespaces of its rules answers 500"] = misconfigured;
await runAll(tests, () => start(POLICY));
