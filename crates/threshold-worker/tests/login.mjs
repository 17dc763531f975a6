// Checks the login calls of the Worker on workerd: budgets, locks and devices in Durable Objects, over restarts and rotations.
//
//   node login.mjs NODE_MODULES WORKER
//
// WORKER is a folder that tools/build has made.

import assert from "node:assert/strict";
import { existsSync, mkdtempSync, rmSync } from "node:fs";
import { tmpdir } from "node:os";
import { join } from "node:path";

import { TOKEN, folder, index, run, runAll } from "./workerd.mjs";

const FIRST = "0123456789abcdef0123456789abcdef";
const SECOND = "fedcba9876543210fedcba9876543210";
// Named objects for one policy, and objects named by digests for the other.
const NAMED = `
[login]
ip = "6/h"
account_place = "SESSIONS/auth:user:{account}"
ip_place = "SESSIONS/auth:ip:{ip}"
[[rule]]
name = "posts"
per = ["user"]
limit = "3/h"
match = { path = "/posts" }
ladder = "quick"
strike = "request"
place = "SESSIONS/user:{user}"
[ladders.quick]
rungs = ["warn", "ban 24h"]
`;
const UNNAMED = NAMED.split("\n").filter((line) => !/_place|^place/.test(line)).join("\n");

// A class whose objects fail.
const BROKEN = `
import { DurableObject } from "cloudflare:workers";
export class Broken extends DurableObject {
  fetch() {
    throw new Error("the object fails");
  }
}
export default { fetch: () => new Response("") };
`;

function start({ policy = NAMED, persist, vars = {}, broken = false } = {}) {
  const sessions = broken ? { className: "Broken", scriptName: "broken" } : { className: "SessionDO", useSQLite: true };
  return run({
    handleStructuredLogs: () => {},
    durableObjectsPersist: persist,
    workers: [
      {
        name: "threshold",
        modulesRoot: folder,
        modules: index,
        compatibilityDate: "2026-04-01",
        durableObjects: { THRESHOLD: { className: "ThresholdObject", useSQLite: true }, SESSIONS: sessions },
        bindings: { THRESHOLD_POLICY: policy, THRESHOLD_SECRET: FIRST, THRESHOLD_TOKEN: TOKEN, ...vars },
      },
      { name: "broken", modules: true, script: BROKEN, compatibilityDate: "2026-04-01", durableObjects: { OWN: "Broken" } },
    ],
  });
}

async function call(worker, path, body) {
  const answer = await worker.dispatchFetch(`http://worker${path}`, {
    method: "POST",
    body: typeof body === "string" ? body : JSON.stringify(body),
    headers: { authorization: `Bearer ${TOKEN}` },
  });
  return { status: answer.status, wait: answer.headers.get("retry-after"), ...(await answer.json()) };
}
const attempt = (worker, account, ip, more = {}) => call(worker, "/v1/login/attempt", { account, ip, ...more });
const result = (worker, { attempt }, success) => call(worker, "/v1/login/result", { attempt, success });
async function fail(worker, account, ip) {
  const begun = await attempt(worker, account, ip);
  assert.equal(begun.status, 200, JSON.stringify(begun));
  return result(worker, begun, false);
}

// A folder for storage, which is removed in the end.
async function kept(run) {
  const persist = mkdtempSync(join(tmpdir(), "threshold-login-"));
  try {
    await run(persist);
  } finally {
    rmSync(persist, { recursive: true });
  }
}

const tests = {
  async "three failures lock the account from every address and in every spelling"() {
    const worker = start();
    await fail(worker, "Ada", "203.0.113.1");
    await fail(worker, " ada", "203.0.113.2");
    const third = await fail(worker, "ADA", "203.0.113.3");
    assert.equal(third.success, false);
    assert.equal(third.mayRetry, false);
    assert.ok(third.lockoutRemaining > 0 && third.lockoutRemaining <= 60);
    const locked = await attempt(worker, "ada", "203.0.113.4");
    assert.equal(locked.status, 429);
    assert.equal(locked.error, "account_locked");
    assert.equal(locked.message, "Too many failed attempts. Account temporarily locked.");
    assert.equal(Number(locked.wait), locked.lockoutRemaining);
    assert.equal((await attempt(worker, "bob", "203.0.113.4")).allowed, true);
    await worker.dispose();
  },

  async "attempts count before they end, and a success resets the failures"() {
    const worker = start();
    // Parallel guesses: at most three reach the verifier.
    const guesses = await Promise.all(Array.from({ length: 20 }, (_, at) => attempt(worker, "eve", `198.51.100.${at}`)));
    assert.equal(guesses.filter((guess) => guess.allowed).length, 3);
    for (let round = 0; round < 3; round += 1) {
      await fail(worker, "ada", `203.0.113.${round}`);
      await fail(worker, "ada", `203.0.113.${round}`);
      const right = await result(worker, await attempt(worker, "ada", `203.0.113.${round}`), true);
      assert.equal(right.success, true);
      assert.equal(typeof right.device, "string");
      // Two budgets: the account's 5 in 15 minutes are used up by failures alone.
      if (round === 1) {
        break;
      }
    }
    await worker.dispose();
  },

  async "an address has a budget for all accounts, and a success gives its own back"() {
    const worker = start();
    const ip = "203.0.113.9";
    for (let at = 0; at < 8; at += 1) {
      const right = await result(worker, await attempt(worker, `user${at}`, ip), true);
      assert.equal(right.success, true, `${at}`);
    }
    for (let at = 0; at < 6; at += 1) {
      await fail(worker, `guess${at}`, ip);
    }
    const refused = await attempt(worker, "somebody", ip);
    assert.equal(refused.status, 429);
    assert.equal(refused.error, "too_many_requests");
    assert.equal(refused.message, "Too many authentication attempts. Please try again later.");
    assert.ok(Number(refused.wait) >= 1);
    // A login without an account counts for its address alone.
    assert.equal((await attempt(worker, undefined, ip)).error, "too_many_requests");
    assert.equal((await attempt(worker, undefined, "203.0.113.10")).allowed, true);
    await worker.dispose();
  },

  async "a known device is not locked out by others"() {
    const worker = start();
    const { device } = await result(worker, await attempt(worker, "ada", "203.0.113.1"), true);
    for (let at = 0; at < 3; at += 1) {
      await fail(worker, "ada", `198.51.100.${at}`);
    }
    assert.equal((await attempt(worker, "ada", "198.51.100.9")).error, "account_locked");
    assert.equal((await attempt(worker, "ada", "198.51.100.9", { device })).allowed, true);
    await worker.dispose();
  },

  async "a banned user cannot log in under any spelling"() {
    const worker = start();
    for (let at = 0; at < 5; at += 1) {
      await call(worker, "/v1/check", { user: "eve", ip: "203.0.113.1", path: "/posts" });
    }
    for (const account of ["eve", " Eve ", "EVE"]) {
      const refused = await attempt(worker, account, "203.0.113.2");
      assert.equal(refused.error, "banned", account);
    }
    await worker.dispose();
  },

  async "both budgets are in the objects that the policy names, and outlive a restart"() {
    await kept(async (persist) => {
      let worker = start({ persist });
      const sessions = await worker.getDurableObjectNamespace("SESSIONS", "threshold");
      const ids = ["auth:user:ada", "auth:ip:203.0.113.7", "auth:user:bob"].map((name) => sessions.idFromName(name).toString());
      const begun = await attempt(worker, "Ada", "203.0.113.7");
      await fail(worker, "ada", "203.0.113.7");
      await worker.dispose();
      const rows = (id) => existsSync(join(persist, "threshold-SessionDO", `${id}.sqlite`));
      assert.deepEqual(ids.map(rows), [true, true, false]);
      // Another isolate ends the attempt: it learns from the token which objects have it.
      worker = start({ persist });
      assert.equal((await result(worker, begun, false)).status, 200);
      assert.equal((await result(worker, begun, false)).error, "unknown_attempt");
      assert.equal((await fail(worker, "ada", "203.0.113.7")).mayRetry, false, "the third failure locks");
      await worker.dispose();
    });
  },

  async "a result finds objects without names too"() {
    await kept(async (persist) => {
      let worker = start({ policy: UNNAMED, persist });
      const begun = await attempt(worker, "ada", "203.0.113.7");
      await worker.dispose();
      worker = start({ policy: UNNAMED, persist });
      assert.equal((await result(worker, begun, true)).success, true);
      await worker.dispose();
    });
  },

  async "what is no login is refused with the field"() {
    const worker = start();
    for (const [body, field] of [[{}, "ip"], [{ ip: "x" }, "ip"], [{ ip: "203.0.113.1", nope: 1 }, "nope"], [{ ip: "203.0.113.1", account: " " }, "account"]]) {
      const refused = await call(worker, "/v1/login/attempt", body);
      assert.equal(refused.status, 400);
      assert.equal(refused.field, field, JSON.stringify(refused));
    }
    const begun = await attempt(worker, "ada", "203.0.113.1");
    const forged = begun.attempt.slice(0, -2) + (begun.attempt.endsWith("AA") ? "BB" : "AA");
    for (const token of ["", "x", forged]) {
      const refused = await result(worker, { attempt: token }, true);
      assert.equal(refused.status, 400, token);
      assert.equal(refused.field, "attempt");
    }
    await worker.dispose();
  },

  async "an object that fails refuses the login"() {
    const worker = start({ broken: true });
    const refused = await attempt(worker, "ada", "203.0.113.1");
    assert.equal(refused.status, 503);
    assert.equal(refused.error, "unavailable");
    assert.ok(Number(refused.wait) >= 1);
    await worker.dispose();
  },
};

// A new secret changes every digest. What was counted under the old one still counts while both are set, and afterwards.
async function rotation(policy) {
  await kept(async (persist) => {
    const posts = (worker, user) => call(worker, "/v1/check", { user, ip: "203.0.113.1", path: "/posts" });
    let worker = start({ policy, persist });
    for (let at = 0; at < 3; at += 1) {
      await fail(worker, "ada", `203.0.113.${at}`);
    }
    for (let at = 0; at < 6; at += 1) {
      await fail(worker, `guess${at}`, "198.51.100.1");
    }
    for (let at = 0; at < 5; at += 1) {
      await posts(worker, "eve");
    }
    await posts(worker, "bob");
    await worker.dispose();
    for (const vars of [{ THRESHOLD_SECRET: SECOND, THRESHOLD_SECRET_OLD: FIRST }, { THRESHOLD_SECRET: SECOND }]) {
      worker = start({ policy, persist, vars });
      assert.equal((await attempt(worker, "ada", "203.0.113.9")).error, "account_locked");
      assert.equal((await attempt(worker, "other", "198.51.100.1")).error, "too_many_requests");
      assert.equal((await posts(worker, "eve")).verdict, "ban");
      const left = await posts(worker, "bob");
      assert.equal(left.degraded, false);
      assert.equal(left.remaining, vars.THRESHOLD_SECRET_OLD ? 1 : 0, "what was charged before counts");
      await worker.dispose();
    }
  });
}
tests["a rotation keeps locks, budgets and bans in named objects"] = () => rotation(NAMED);
tests["a rotation keeps locks, budgets and bans in objects named by digests"] = () => rotation(UNNAMED);

await runAll(tests);
