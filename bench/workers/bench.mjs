// Measures the Worker on bare workerd, without miniflare in between.
//
//   node bench.mjs NODE_MODULES WORKER

import { spawn } from "node:child_process";
import { mkdtempSync, readFileSync, rmSync, writeFileSync } from "node:fs";
import http from "node:http";
import { createRequire } from "node:module";
import net from "node:net";
import { tmpdir } from "node:os";
import { join, resolve } from "node:path";
import { setTimeout as wait } from "node:timers/promises";
import { gzipSync } from "node:zlib";

const [modules, folder] = process.argv.slice(2);
if (folder === undefined) {
  console.error("usage: node bench.mjs NODE_MODULES WORKER");
  process.exit(2);
}
const seconds = Number(process.env.SECONDS_EACH ?? 3);
const STARTS = 5;
const CONNECTIONS = 32;

// One rule for each object. No request is denied.
const POLICY = `
[identity]
client_ip = "cf-connecting-ip"
[[rule]]
name = "address"
per = ["ip"]
match = { path = ["/one", "/two"] }
limit = "1000000000/h"
algorithm = "fixed-window"
[[rule]]
name = "all"
per = []
match = { path = "/two" }
limit = "1000000000/h"
algorithm = "fixed-window"
place = "THRESHOLD/all"
`;

const OWN = `
import { guard, ThresholdObject } from "./index.js";
export { ThresholdObject };
const handler = () => new Response("hello");
export default {
  fetch: (request, env, ctx) => (request.url.endsWith("/bare") ? handler() : guard(request, env, ctx, handler)),
};
`;

const config = (port, data) => `
using Workerd = import "/workerd/workerd.capnp";
const config :Workerd.Config = (
  services = [
    (name = "main", worker = .own),
    (name = "data", disk = (path = ${JSON.stringify(data)}, writable = true)),
  ],
  sockets = [(name = "http", address = "127.0.0.1:${port}", http = (), service = "main")],
);
const own :Workerd.Worker = (
  modules = [
    (name = "own.js", esModule = embed "own.js"),
    (name = "index.js", esModule = embed "index.js"),
    (name = "index_bg.wasm", wasm = embed "index_bg.wasm"),
  ],
  compatibilityDate = "2026-04-01",
  durableObjectNamespaces = [(className = "ThresholdObject", uniqueKey = "objects", enableSql = true)],
  durableObjectStorage = (localDisk = "data"),
  bindings = [
    (name = "THRESHOLD", durableObjectNamespace = "ThresholdObject"),
    (name = "THRESHOLD_SECRET", text = "0123456789abcdef0123456789abcdef"),
    (name = "THRESHOLD_POLICY", text = ${JSON.stringify(POLICY)}),
  ],
);
`;

function freePort() {
  return new Promise((resolve) => {
    const server = net.createServer().listen(0, "127.0.0.1", () => {
      const { port } = server.address();
      server.close(() => resolve(port));
    });
  });
}

const agent = new http.Agent({ keepAlive: true, maxSockets: CONNECTIONS });
function get(port, path, address) {
  return new Promise((resolve, reject) => {
    const options = { host: "127.0.0.1", port, path, agent, headers: { "cf-connecting-ip": address } };
    const request = http.get(options, (response) => {
      response.resume();
      response.on("end", () => resolve(response.statusCode));
      response.on("error", reject);
    });
    request.on("error", reject);
  });
}

// workerd ends with this program, also after an error.
let running;
process.once("exit", () => running?.kill());

// Starts workerd, and resolves when it has answered a first request.
async function start(port, path) {
  const began = performance.now();
  const workerd = spawn(program, ["serve", join(work, "config.capnp")], { stdio: ["ignore", "inherit", "inherit"] });
  running = workerd;
  const died = new Promise((_, reject) => workerd.once("exit", (code) => reject(new Error(`workerd ended with ${code}`))));
  died.catch(() => {});
  const answered = async () => {
    for (;;) {
      const status = await get(port, path, "203.0.113.1").catch(() => undefined);
      if (status !== undefined) {
        return status;
      }
      await wait(5);
    }
  };
  const status = await Promise.race([answered(), died]);
  return { workerd, status, millis: performance.now() - began };
}

function stop(workerd) {
  return new Promise((resolve) => {
    workerd.once("exit", resolve);
    workerd.kill();
  });
}

// Counts the answers of some seconds, over all connections, from as many addresses.
async function measure(port, path) {
  const until = performance.now() + seconds * 1000;
  const counts = await Promise.all(
    Array.from({ length: CONNECTIONS }, async (_, at) => {
      let count = 0;
      while (performance.now() < until) {
        const status = await get(port, path, `203.0.113.${at}`);
        if (status !== 200) {
          throw new Error(`${path} answered ${status}`);
        }
        count += 1;
      }
      return count;
    }),
  );
  return Math.round(counts.reduce((sum, count) => sum + count) / seconds);
}

const median = (values) => [...values].sort((a, b) => a - b)[Math.floor(values.length / 2)];
const program = createRequire(join(resolve(modules), "/"))("workerd").default;
const work = mkdtempSync(join(tmpdir(), "threshold-bench-"));
try {
  let size = 0;
  for (const name of ["index.js", "index_bg.wasm"]) {
    const content = readFileSync(join(folder, name));
    writeFileSync(join(work, name), content);
    const gzipped = gzipSync(content, { level: 9 }).length;
    size += gzipped;
    console.log(`${name}: ${content.length} bytes, ${gzipped} gzipped`);
  }
  console.log(`together: ${size} bytes gzipped`);
  writeFileSync(join(work, "own.js"), OWN);

  const port = await freePort();
  for (const [path, name] of [["/bare", "with the module, not called"], ["/one", "with a decision of one object"]]) {
    const starts = [];
    for (let at = 0; at < STARTS; at += 1) {
      const data = mkdtempSync(join(work, "data-"));
      writeFileSync(join(work, "config.capnp"), config(port, data));
      const { workerd, status, millis } = await start(port, path);
      if (status !== 200) {
        throw new Error(`${path} answered ${status}`);
      }
      starts.push(millis);
      await stop(workerd);
      agent.destroy();
    }
    console.log(`from the start of workerd to its first answer, ${name}: ${Math.round(median(starts))} ms (median of ${STARTS})`);
  }

  const { workerd } = await start(port, "/bare");
  try {
    const scenarios = [
      ["/bare", "without the guard"],
      ["/static", "guarded, no rule matches"],
      ["/one", "one object for each of 32 addresses"],
      ["/two", "two objects, one of them shared by all"],
    ];
    for (const [path, name] of scenarios) {
      await get(port, path, "203.0.113.1");
      console.log(`${name}: ${await measure(port, path)} requests a second`);
    }
  } finally {
    await stop(workerd);
  }
} finally {
  agent.destroy();
  rmSync(work, { recursive: true });
}
