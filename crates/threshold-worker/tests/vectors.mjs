// Plays the conformance vectors in a Worker that runs on workerd, and fails on any answer that differs.
//
//   node vectors.mjs NODE_MODULES WORKER STORE
//
// WORKER is a folder that tools/build has made with `--features vectors`. Nothing here knows what a vector means: the Worker plays
// each file by itself and returns how many cases have passed.

import { readFileSync, readdirSync } from "node:fs";
import { createRequire } from "node:module";
import { basename, dirname, join } from "node:path";
import { fileURLToPath } from "node:url";

const [modules, folder, store] = process.argv.slice(2);
if (store === undefined) {
  console.error("usage: node vectors.mjs NODE_MODULES WORKER STORE");
  process.exit(2);
}
const { Miniflare } = createRequire(join(modules, "/"))("miniflare");
const root = join(dirname(fileURLToPath(import.meta.url)), "../../..");

const read = (path) => readFileSync(path, "utf8");
const cases = (of) => readdirSync(join(root, of)).filter((name) => name.endsWith(".json")).sort();
const files = [
  ...cases("conformance").map((name) => ({ path: join("conformance", name), preset: null })),
  ...cases("policies/cases").map((name) => ({
    path: join("policies/cases", name),
    preset: read(join(root, "policies", `${basename(name, ".json")}.toml`)),
  })),
];

// The bindings that the presets name, and the one of rules without a place.
const classes = { THRESHOLD: "ThresholdObject", TENANTS: "TenantDO", SESSIONS: "SessionDO", RATE_LIMITER: "RateLimiter" };
const durableObjects = Object.fromEntries(
  Object.entries(classes).map(([binding, className]) => [binding, { className, useSQLite: true }]),
);

const worker = new Miniflare({
  modulesRoot: folder,
  modules: [
    { type: "ESModule", path: join(folder, "index.js") },
    { type: "CompiledWasm", path: join(folder, "index_bg.wasm") },
  ],
  compatibilityDate: "2026-04-01",
  durableObjects,
  // Otherwise miniflare fetches the properties of a request from the network.
  cf: false,
  telemetry: { enabled: false },
});

// Cases that a store does not pass, by file. Each must fail, or it is taken off this list.
const differences = {
  "key-value": {},
  objects: {
    // The Worker serves no pauses and no pardons: operators have no way to find the objects of a subject.
    "conformance/block-for.json": [
      "a pause denies until its time, whatever is left",
      "a pause of the one budget for all holds for everyone",
      "requests denied by a pause charge nothing",
    ],
    "conformance/forgive.json": [
      "a pause is lifted with the rest",
      "an address is forgiven by its address",
      "the login attempts of an address are forgiven with it, and those of another one are not",
      "rules of every layer that count by the user alone are forgiven, and paused",
      "a limit by tier is found whichever tier the requests came with",
      "an endpoint is forgiven by its method and pattern, or as callers name it",
      "a budget that others share stays as it is",
    ],
    "conformance/user-scope.json": ["a pause and a pardon are for one tenant's user"],
    "conformance/ladder.json": [
      "strike = ignored: who comes back during a pause ignores its end, and no warning lifts a pause",
      "strike = ignored: who waits for the end of a pause never strikes, and under another strike a pause is no offence",
      "a request denied by a pause is no violation",
      // Ladders in two objects, as in two partitions of a Cluster: only the last object strikes.
      "a warning lifts only limits of its own subject and ladder: the request is denied and charges nothing, and the strike counts",
      "of two subjects that one request strikes, the harshest rung wins",
      "of two penalties the ban is the verdict, and retryAfter the end of both",
      "strike = ignored: what counts is the Retry-After that was sent, also where another limit or a block made it longer",
    ],
  },
};

let passed = 0;
let different = 0;
const failures = [];
try {
  for (const { path, preset } of files) {
    const body = JSON.stringify({ store, preset, file: JSON.parse(read(join(root, path))) });
    const response = await worker.dispatchFetch("http://worker/vectors", { method: "POST", body });
    if (response.status !== 200) {
      failures.push(`${path}: status ${response.status}: ${await response.text()}`);
      continue;
    }
    const played = await response.json();
    passed += played.passed;
    const known = new Set(differences[store]?.[path] ?? []);
    for (const failure of played.failures) {
      const name = [...known].find((name) => failure.startsWith(`${name}: `));
      if (name === undefined) {
        failures.push(`${path}: ${failure}`);
      } else {
        known.delete(name);
        different += 1;
      }
    }
    failures.push(...[...known].map((name) => `${path}: ${name}: passes, and is listed as different`));
  }
} finally {
  await worker.dispose();
}

for (const failure of failures) {
  console.error(failure);
}
console.log(`${passed} of ${passed + different + failures.length} vectors passed on wasm32, store ${store}; ${different} differ as listed`);
if (passed === 0 || failures.length > 0) {
  process.exit(1);
}
