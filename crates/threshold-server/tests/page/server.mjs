// Starts a real server for a test of the page, and calls it.

import { spawn } from "node:child_process";
import { mkdtemp, rm, writeFile } from "node:fs/promises";
import { tmpdir } from "node:os";
import { join } from "node:path";

/** The servers that run. A test that fails must not leave one behind. */
const running = new Set();
process.on("exit", () => running.forEach((child) => child.kill("SIGKILL")));

/** Starts a server with this policy. Stops it and removes its files with `stop()`. */
export async function start(binary, policy, { flags = [], env = {} } = {}) {
  const folder = await mkdtemp(join(tmpdir(), "threshold-page-"));
  const file = join(folder, "policy.toml");
  await writeFile(file, policy);
  const own = ["--http", "127.0.0.1:0", "--no-grpc", "--no-resp", "--db", join(folder, "threshold.db")];
  const args = ["serve", file, ...own, ...flags];
  const server = await launch(binary, args, folder, env);
  return { ...server, file };
}

/** Starts the demo. */
export async function startDemo(binary) {
  const folder = await mkdtemp(join(tmpdir(), "threshold-demo-"));
  return launch(binary, ["demo", "--http", "127.0.0.1:0"], folder, {});
}

async function launch(binary, args, folder, env) {
  const child = spawn(binary, args, {
    cwd: folder,
    env: { PATH: process.env.PATH, HOME: folder, ...env },
    stdio: ["ignore", "pipe", "pipe"],
  });
  running.add(child);
  let log = "";
  child.stderr.on("data", (data) => {
    log += data;
  });
  const url = await new Promise((resolve, reject) => {
    let out = "";
    child.stdout.on("data", (data) => {
      out += data;
      const found = out.match(/http:\/\/[0-9.:]+/);
      if (found && out.includes("tokens")) resolve(found[0]);
    });
    child.on("exit", (code) => reject(new Error(`the server exited with ${code}\n${out}\n${log}`)));
  });
  const call = async (method, path, body, headers = {}) => {
    const response = await fetch(`${url}${path}`, {
      method,
      headers: { "Content-Type": "application/json", ...headers },
      body: body === undefined ? undefined : JSON.stringify(body),
    });
    return { status: response.status, headers: response.headers, body: await response.json().catch(() => null) };
  };
  const stop = async () => {
    child.removeAllListeners("exit");
    const ended = new Promise((resolve) => child.on("exit", resolve));
    child.kill("SIGTERM");
    await ended;
    running.delete(child);
    await rm(folder, { recursive: true });
  };
  return { url, call, stop, log: () => log };
}
