// What the tests on workerd share: the module that they run, its start, and the list of tests.
//
//   node TEST.mjs NODE_MODULES WORKER
//
// WORKER is a folder that tools/build has made.

import { createRequire } from "node:module";
import { basename, join } from "node:path";

const [modules, worker] = process.argv.slice(2);
if (worker === undefined) {
  console.error(`usage: node ${basename(process.argv[1])} NODE_MODULES WORKER`);
  process.exit(2);
}
const { Log, LogLevel, Miniflare } = createRequire(join(modules, "/"))("miniflare");

export const folder = worker;
export const TOKEN = "a token for other workers";

// The files of the module.
export const index = [
  { type: "ESModule", path: join(folder, "index.js") },
  { type: "CompiledWasm", path: join(folder, "index_bg.wasm") },
];

// The clock of an isolate that imports it first: `shift` moves it, in milliseconds. Alarms come by the clock of the machine.
export const clock = {
  type: "ESModule",
  path: join(folder, "clock.js"),
  contents: `
    const Real = Date;
    globalThis.shift = 0;
    globalThis.Date = class extends Real {
      constructor(...given) {
        super(...(given.length === 0 ? [Real.now() + globalThis.shift] : given));
      }
      static now() {
        return Real.now() + globalThis.shift;
      }
    };`,
};

// Waits until something is so, and returns it.
export async function eventually(condition, what) {
  const until = Date.now() + 20_000;
  let found = await condition();
  while (!found) {
    if (Date.now() >= until) {
      throw new Error(`it took too long: ${what}`);
    }
    await new Promise((resolve) => setTimeout(resolve, 50));
    found = await condition();
  }
  return found;
}

// Starts workerd. Without `cf: false` miniflare fetches the properties of a request from the network.
export const run = (options) => new Miniflare({ log: new Log(LogLevel.NONE), cf: false, telemetry: { enabled: false }, ...options });

// Runs the tests, and ends the process. A test may get a Worker from `start`, or return one, which is stopped after it.
export async function runAll(tests, start = () => undefined) {
  // A hanging test fails too.
  setTimeout(() => {
    console.error("FAILED: the tests take too long");
    process.exit(1);
  }, 240_000).unref();
  let failed = 0;
  for (const [name, test] of Object.entries(tests)) {
    const given = start();
    let returned;
    try {
      returned = await test(given);
      console.log(`ok ${name}`);
    } catch (error) {
      failed += 1;
      console.error(`FAILED ${name}\n${error.stack}`);
    }
    await given?.dispose();
    await returned?.dispose();
  }
  // Workers of failed tests are still running.
  process.exit(failed > 0 ? 1 : 0);
}
