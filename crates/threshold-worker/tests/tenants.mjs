// Runs Workers on workerd that read the limits of tenants from KV, and checks which limits are in force while a file cannot be used.
//
//   node tenants.mjs NODE_MODULES WORKER
//
// WORKER is a folder that tools/build has made.

import assert from "node:assert/strict";
import { createInterface } from "node:readline";
import { join } from "node:path";

import { clock, eventually, folder, index, run, runAll } from "./workerd.mjs";

const POLICY = `
[identity]
default_tier = "free"
[tiers.free]
requests = "60/min"
[[rule]]
name = "minute"
per = ["tenant"]
limit = "tier"
`;

const OWN = `
import "./clock.js";
import { api } from "./index.js";
export { ThresholdObject } from "./index.js";
export default {
  fetch(request, env, context) {
    globalThis.shift += Number(request.headers.get("x-later") ?? 0);
    return api(request, env, context);
  },
};
`;

// Two isolates on one namespace.
function start() {
  const lines = [];
  const isolate = (name) => ({
    name,
    modulesRoot: folder,
    modules: [{ type: "ESModule", path: join(folder, "own.js"), contents: OWN }, clock, ...index],
    compatibilityDate: "2026-04-01",
    durableObjects: { THRESHOLD: { className: "ThresholdObject", useSQLite: true } },
    kvNamespaces: { TENANTS: "tenants", MONITOR_KV: "events" },
    bindings: { THRESHOLD_POLICY: POLICY, THRESHOLD_SECRET: "0123456789abcdef0123456789abcdef" },
  });
  const worker = run({
    handleRuntimeStdio(stdout, stderr) {
      createInterface(stdout).on("line", (line) => lines.push(line));
      createInterface(stderr).on("line", (line) => lines.push(line));
    },
    workers: [isolate("a"), isolate("b")],
  });
  const files = () => worker.getKVNamespace("TENANTS", "a");
  const name = (tenant) => `${tenant}/tenant.config.json`;
  // The limit of a tenant in one of the isolates, when its file is due to be read again.
  const limit = async (isolate, tenant) => {
    const body = JSON.stringify({ tenant });
    const init = { method: "POST", body, headers: { "x-later": "11000" } };
    return (await (await (await worker.getWorker(isolate)).fetch("http://worker/v1/check", init)).json()).limit;
  };
  return {
    worker,
    limit,
    put: async (tenant, rateLimit) => (await files()).put(name(tenant), JSON.stringify({ name: tenant, rateLimit })),
    remove: async (tenant) => (await files()).delete(name(tenant)),
    kept: async (tenant) => (await files()).get(`${tenant}/tenant.config.last-good.json`, "json"),
    refusals: () =>
      lines.filter((line) => line.includes('"event":"tenant_config_refused"')).map((line) => JSON.parse(line.slice(line.indexOf("{")))),
    async events() {
      const namespace = await worker.getKVNamespace("MONITOR_KV", "a");
      const { keys } = await namespace.list();
      return Promise.all(keys.map((key) => namespace.get(key.name, "json")));
    },
  };
}

await runAll({
  // A tenant with 2,000 a minute had the 60 of its tier in every new isolate after a mistake in its file, and each reading was logged.
  async "a refused file leaves the limits of the last good one in force, also in a new isolate, and is reported once"() {
    const { worker, limit, put, kept, refusals, events } = start();
    await put("acme", { perMinute: 500 });
    assert.equal(await limit("a", "acme"), 500);
    await eventually(async () => (await kept("acme"))?.rateLimit.perMinute === 500, "the copy");

    await put("acme", { perMinut: 700 });
    for (let at = 0; at < 5; at += 1) {
      assert.equal(await limit("a", "acme"), 500);
    }
    await eventually(() => refusals().length > 0, "the log");
    assert.equal(refusals().length, 1, "five readings, one mistake");
    assert.match(refusals()[0].reason, /^acme\/tenant\.config\.json:1:\d+: rateLimit\.perMinut: /);
    assert.deepEqual(refusals()[0].inForce, { perMinute: 500, burst: null });

    assert.equal(await limit("b", "acme"), 500, "another isolate has never seen the good file");
    assert.equal(await limit("b", "acme"), 500);
    await eventually(() => refusals().length === 2, "its log");
    assert.deepEqual(refusals()[1].inForce, { perMinute: 500, burst: null });

    // The policy has no rule for it: a mistake that only the policy shows.
    await put("acme", { perMinute: 700, burst: 5 });
    assert.equal(await limit("a", "acme"), 500);
    await eventually(() => refusals().length === 3, "another mistake");
    assert.match(refusals()[2].reason, /rateLimit\.burst/);

    const found = await eventually(async () => {
      const found = await events();
      return found.length === 3 && found;
    }, "an event for each");
    for (const { blocked, layer, tenant, rule, verdict } of found) {
      const expect = { blocked: false, layer: "tenant", tenant: "acme", rule: "tenant.config.json", verdict: "allow" };
      assert.deepEqual({ blocked, layer, tenant, rule, verdict }, expect);
    }
    return worker;
  },

  async "a good file is taken again, its copy follows, and a removed one leaves none"() {
    const { worker, limit, put, remove, kept, refusals } = start();
    await put("acme", { perMinute: 500 });
    await limit("a", "acme");
    await put("acme", { perMinute: "many" });
    assert.equal(await limit("a", "acme"), 500);
    await put("acme", { perMinute: 600 });
    assert.equal(await limit("a", "acme"), 600);
    await eventually(async () => (await kept("acme"))?.rateLimit.perMinute === 600, "the copy");
    await put("acme", { perMinute: "many" });
    assert.equal(await limit("a", "acme"), 600);
    await eventually(() => refusals().length === 2, "the same mistake again is reported again");
    await remove("acme");
    assert.equal(await limit("a", "acme"), 60);
    await eventually(async () => (await kept("acme")) === null, "no copy");
    return worker;
  },

  async "a tenant without a good file has the limits of the policy, and the log says so"() {
    const { worker, limit, put, kept, refusals } = start();
    await put("new", { perMinute: 0 });
    assert.equal(await limit("a", "new"), 60);
    await eventually(() => refusals().length === 1, "the log");
    assert.equal(refusals()[0].inForce, "the policy");
    assert.equal(await kept("new"), null);
    return worker;
  },
});
