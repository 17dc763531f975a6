// Follows docs/cloudflare.md with the real wrangler: writes the files of the page, and runs its commands in their order. Then it bundles
// the Workers of examples/workers, which import the module in target/worker/module.
//
//   node cloudflare.mjs NODE_MODULES WORKER
//
// NODE_MODULES has wrangler, and WORKER is a folder that tools/build has made. There is no account: commands that need one run until
// wrangler asks for it, after it has read their flags and wrangler.toml.

import assert from "node:assert/strict";
import { spawn } from "node:child_process";
import { appendFileSync, cpSync, existsSync, mkdtempSync, readFileSync, readdirSync, rmSync } from "node:fs";
import { createServer } from "node:http";
import { tmpdir } from "node:os";
import { dirname, join, resolve } from "node:path";
import { fileURLToPath } from "node:url";

const [modules, worker] = process.argv.slice(2).map((path) => resolve(path));
const root = join(dirname(fileURLToPath(import.meta.url)), "../../..");
const folder = mkdtempSync(join(tmpdir(), "threshold-wrangler-"));

// Without the credentials of the person who runs the tests.
const inherited = Object.entries(process.env).filter(([name]) => !/^(CLOUDFLARE|CF|WRANGLER)_/.test(name));
const env = {
  ...Object.fromEntries(inherited),
  PATH: `${join(modules, ".bin")}:${process.env.PATH}`,
  HOME: folder,
  XDG_CONFIG_HOME: join(folder, "config"),
  CI: "1",
  NO_COLOR: "1",
  WRANGLER_SEND_METRICS: "false",
  CLOUDFLARE_CF_FETCH_ENABLED: "false",
};

function start(command, cwd) {
  const child = spawn("bash", ["-c", `set -o pipefail; ${command}`], { cwd, env, stdio: ["ignore", "pipe", "pipe"], detached: true });
  const running = { child, output: "" };
  for (const stream of [child.stdout, child.stderr]) {
    stream.on("data", (data) => (running.output += data));
  }
  running.ended = new Promise((ended) => child.once("close", (status) => ended({ status, output: running.output })));
  return running;
}
const run = (command, cwd) => start(command, cwd).ended;

async function succeeds(command, cwd) {
  const { status, output } = await run(command, cwd);
  assert.equal(status, 0, `${command}\n${output}`);
  assert.ok(!output.includes("WARNING"), `${command}\n${output}`);
  return output;
}

// Wrangler has understood the command if it wants to log in.
async function needsAccount(command, cwd) {
  const { status, output } = await run(command, cwd);
  assert.notEqual(status, 0, command);
  assert.match(output, /necessary to set a CLOUDFLARE_API_TOKEN/, `${command}\n${output}`);
}

// Starts `wrangler dev` on a free port, in front of an application of the test.
async function dev(command, cwd) {
  const application = createServer((_, response) => response.end("the application"));
  await new Promise((listening) => application.listen(0, "127.0.0.1", listening));
  const upstream = `http://127.0.0.1:${application.address().port}`;
  const running = start(`${command} --ip 127.0.0.1 --port 0 --inspector-port 0 --var UPSTREAM_URL:${upstream}`, cwd);
  let ended = false;
  running.ended.then(() => (ended = true));
  while (!/Ready on (\S+)/.test(running.output)) {
    assert.ok(!ended, running.output);
    await new Promise((resolve) => setTimeout(resolve, 50));
  }
  const stop = async () => {
    process.kill(-running.child.pid, "SIGTERM");
    await running.ended;
    await new Promise((closed) => application.close(closed));
  };
  return { url: running.output.match(/Ready on (\S+)/)[1], stop };
}

// The limit is that of the policy which the page has put into KV, and the answer is the application's.
async function checkAnswer(answer, url) {
  assert.match(answer, /^HTTP\/1.1 200 OK\r\n/);
  assert.match(answer, /\r\nX-RateLimit-Limit: 100\r\n/i);
  assert.match(answer, /\r\nX-RateLimit-Remaining: 99\r\n/i);
  assert.match(answer, /\r\n\r\nthe application$/);
  let sent = 1;
  while ((await fetch(url)).status === 200) {
    sent += 1;
    assert.ok(sent < 1000, "there is no limit");
  }
  assert.ok(sent >= 100, `${sent} of 100`);
}

let cwd = folder;
let server;
const asked = [];
const ran = [];

async function follow(command) {
  ran.push(command);
  if (command.startsWith("crates/threshold-worker/tools/build ")) {
    const [tool, to] = command.split(" ");
    assert.ok(existsSync(join(root, tool)));
    cpSync(worker, join(cwd, to), { recursive: true });
  } else if (command.startsWith("cd ")) {
    cwd = join(cwd, command.slice(3));
  } else if (command === "wrangler login") {
    // It would open a browser.
    await succeeds(`${command} --help`, cwd);
  } else if (command === "wrangler dev") {
    server = await dev(command, cwd);
  } else if (command.startsWith("curl ")) {
    const { status, output } = await run(command.replace("curl ", "curl -s ").replace("http://127.0.0.1:8787", server.url), cwd);
    assert.equal(status, 0, output);
    await checkAnswer(output, server.url);
    await server.stop();
    server = undefined;
  } else if (!command.includes("wrangler ") || command.includes(" --local ")) {
    await succeeds(command, cwd);
  } else {
    asked.push(needsAccount(command, cwd));
    if (command.includes(" --remote ")) {
      await succeeds(command.replace(" --remote ", " --local "), cwd);
    } else if (command === "wrangler deploy") {
      await succeeds(`${command} --dry-run`, cwd);
    }
  }
}

// An id as Cloudflare makes them, in place of the one that the reader has been shown.
let ids = 0;
const withIds = (text) =>
  text.replace(/"…"/g, () => {
    ids += 1;
    return `"${String(ids).padStart(32, "0")}"`;
  });

const page = readFileSync(join(root, "docs/cloudflare.md"), "utf8");
try {
  for (const [, language, text] of page.matchAll(/^```(sh|toml)\n(.*?)^```$/gms)) {
    const file = /^# ((?:wrangler|policy)\.toml)/.exec(text)?.[1];
    if (language === "toml" && file !== undefined) {
      appendFileSync(join(cwd, file), withIds(text));
    } else if (language === "sh") {
      for (const command of text.trimEnd().split("\n")) {
        await follow(command);
      }
    }
  }
  await Promise.all(asked);
  // What would be found if a flag of the page were unknown.
  await assert.rejects(needsAccount("wrangler kv namespace create threshold-config --no-such-flag", cwd), /Unknown argument/);
  assert.ok(ran.length > 12, "the page has lost its commands");
  console.log(`ok the ${ran.length} commands of docs/cloudflare.md`);
  const folders = readdirSync(join(root, "examples/workers")).map((name) => join(root, "examples/workers", name));
  const examples = folders.filter((path) => existsSync(join(path, "wrangler.toml")));
  await Promise.all(examples.map((path) => succeeds("wrangler deploy --dry-run", path)));
  console.log("ok wrangler bundles the examples");
} finally {
  await server?.stop();
  rmSync(folder, { recursive: true });
}
