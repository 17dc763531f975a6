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

const worker = new Miniflare({
  modulesRoot: folder,
  modules: [
    { type: "ESModule", path: join(folder, "index.js") },
    { type: "CompiledWasm", path: join(folder, "index_bg.wasm") },
  ],
  compatibilityDate: "2026-04-01",
  // Otherwise miniflare fetches the properties of a request from the network.
  cf: false,
  telemetry: { enabled: false },
});

let passed = 0;
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
    failures.push(...played.failures.map((failure) => `${path}: ${failure}`));
  }
} finally {
  await worker.dispose();
}

for (const failure of failures) {
  console.error(failure);
}
console.log(`${passed} of ${passed + failures.length} vectors passed on wasm32, store ${store}`);
if (passed === 0 || failures.length > 0) {
  process.exit(1);
}
