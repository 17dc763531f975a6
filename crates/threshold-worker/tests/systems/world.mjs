// What the tests of the systems share: Workers that `examples/workers/serve` runs, and clients of them.

import { spawn } from "node:child_process";
import { copyFileSync, mkdtempSync, rmSync, writeFileSync } from "node:fs";
import { createServer } from "node:net";
import { tmpdir } from "node:os";
import { dirname, join } from "node:path";
import { fileURLToPath } from "node:url";

export const ROOT = join(dirname(fileURLToPath(import.meta.url)), "../../../..");
export const SERVE = join(ROOT, "examples/workers/serve");

const running = new Set();
const folders = [];

export async function stopAll() {
  await Promise.all([...running].map((worker) => worker.stop()));
  for (const folder of folders.splice(0)) {
    rmSync(folder, { recursive: true, force: true });
  }
}

export function newFolder() {
  const folder = mkdtempSync(join(tmpdir(), "threshold-systems-"));
  folders.push(folder);
  return folder;
}

export const freePort = () =>
  new Promise((found) => {
    const server = createServer().listen(0, "127.0.0.1", () => {
      const { port } = server.address();
      server.close(() => found(port));
    });
  });

// Runs `serve` until it ends. Returns its exit status and what it wrote.
export function runServe(...args) {
  return new Promise((done) => {
    const child = spawn(SERVE, args, { stdio: ["ignore", "pipe", "pipe"] });
    let [out, err] = ["", ""];
    child.stdout.on("data", (text) => (out += text));
    child.stderr.on("data", (text) => (err += text));
    child.on("close", (status) => done({ status, out, err }));
  });
}

// Starts a Worker and waits until it is ready.
export async function start(name, { env = {}, args = [], port } = {}) {
  port ??= await freePort();
  const child = spawn(SERVE, [name, String(port), ...args], { stdio: ["ignore", "pipe", "pipe"], env: { ...process.env, ...env } });
  const worker = { url: `http://127.0.0.1:${port}`, port, log: "", out: "" };
  const ended = new Promise((done) => child.on("close", (status) => done(status)));
  worker.stop = async (signal = "SIGTERM") => {
    running.delete(worker);
    child.kill(signal);
    return ended;
  };
  worker.fetch = (path, init = {}) => fetch(worker.url + path, { redirect: "manual", ...init });
  running.add(worker);
  child.stderr.on("data", (text) => (worker.log += text));
  await new Promise((ready, failed) => {
    child.stdout.on("data", (text) => {
      worker.out += text;
      if (worker.out === "ready\n") {
        ready();
      }
    });
    ended.then((status) => failed(new Error(`serve ended with ${status} before it was ready\n${worker.log}`)));
  });
  return worker;
}

// Makes a Worker around an example. In its script EXAMPLE is the module of the example.
export function wrapped(name, wrangler, script) {
  const folder = newFolder();
  const example = join(ROOT, "examples/workers", name);
  writeFileSync(join(folder, "wrangler.toml"), wrangler.replaceAll("../../..", ROOT));
  copyFileSync(join(example, ".dev.vars"), join(folder, ".dev.vars"));
  writeFileSync(join(folder, "index.js"), script.replaceAll("EXAMPLE", JSON.stringify(join(example, "index.js"))));
  return folder;
}

// A namespace of a running Worker.
export function namespace(worker, binding) {
  const base = `/cdn-cgi/explorer/api/storage/kv/namespaces/${binding}`;
  const one = (key) => `${base}/values/${encodeURIComponent(key)}`;
  return {
    put: (key, value) => worker.fetch(one(key), { method: "PUT", body: value }),
    delete: (key) => worker.fetch(one(key), { method: "DELETE" }),
    async get(key) {
      const found = await worker.fetch(one(key));
      return found.status === 200 ? found.text() : undefined;
    },
    keys: async () => (await (await worker.fetch(`${base}/keys`)).json()).result,
  };
}

// Asks until a condition holds. Only a broken system waits for the deadline.
export async function eventually(condition, message, seconds = 60) {
  const deadline = Date.now() + seconds * 1_000;
  for (;;) {
    if (await condition()) {
      return;
    }
    if (Date.now() > deadline) {
      throw new Error(`not within ${seconds} s: ${message}`);
    }
    await new Promise((done) => setTimeout(done, 250));
  }
}

// Counts the statuses of answers, and reads their bodies to the end.
export async function statuses(answers) {
  const count = {};
  for (const answer of await Promise.all(answers)) {
    await answer.arrayBuffer();
    count[answer.status] = (count[answer.status] ?? 0) + 1;
  }
  return count;
}

export const times = (count, run) => Array.from({ length: count }, (_, at) => run(at));
