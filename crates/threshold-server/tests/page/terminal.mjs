// Drives `threshold top` in tmux, as a terminal does, and reads the screen back.
//
//   node terminal.mjs BINARY

import assert from "node:assert/strict";
import { spawnSync } from "node:child_process";
import { resolve } from "node:path";

import { start } from "./server.mjs";

const binary = resolve(process.argv[2]);
const socket = `threshold-top-${process.pid}`;
const tmux = (...args) => {
  const done = spawnSync("tmux", ["-L", socket, "-f", "/dev/null", ...args], { encoding: "utf8" });
  assert.equal(done.status, 0, `tmux ${args.join(" ")}: ${done.stderr}`);
  return done.stdout;
};
const pause = (millis) => new Promise((done) => setTimeout(done, millis));

/** Waits until the screen has a text. */
async function see(pattern) {
  let screen = "";
  for (let tries = 0; tries < 100; tries += 1) {
    screen = tmux("capture-pane", "-p", "-t", "top");
    if (pattern.test(screen)) return screen;
    await pause(100);
  }
  throw new Error(`${pattern} is not on the screen:\n${screen}`);
}

const POLICY = `
[identity]
log_identifiers = true

[[rule]]
name = "posts"
layer = "user"
per = ["user"]
limit = "2/h"
`;

const server = await start(binary, POLICY);
let isStopped = false;
try {
  const hostile = "u1\u001b]0;owned\u0007";
  const check = (user) => server.call("POST", "/v1/check", { ip: "203.0.113.7", user, tenant: "acme", method: "POST", path: "/api/posts" });
  for (let number = 0; number < 7; number += 1) await check("u1");
  for (let number = 0; number < 5; number += 1) await check(hostile);
  // The shell stays after the program has ended, so that what it leaves behind can be read.
  const open = () =>
    tmux("new-session", "-d", "-s", "top", "-x", "120", "-y", "40", `${binary} top --server ${server.url}; echo "exit $?"; sleep 60`);
  open();
  // All blocks are of this user layer: 5 of one user and 3 of the other.
  const screen = await see(/user blocks +8\b/);
  assert.match(screen, /acme/);
  assert.match(screen, /203\.0\.113\.7/);
  assert.ok(!screen.includes("owned\u0007"), screen);
  assert.equal(tmux("display-message", "-p", "-t", "top", "#{pane_title}").includes("owned"), false, "a name has set the title of the terminal");
  tmux("send-keys", "-t", "top", "2");
  await see(/last hour/);
  // A small window is drawn too, and nothing panics.
  tmux("resize-window", "-t", "top", "-x", "40", "-y", "12");
  await pause(1200);
  tmux("resize-window", "-t", "top", "-x", "120", "-y", "40");
  await see(/user blocks +8\b/);
  tmux("send-keys", "-t", "top", "q");
  await see(/exit 0/);
  console.log("ok  top shows what is blocked, follows keys and the size of the window, and ends");

  // A server that is away is an ordinary error: the screen is not taken.
  tmux("kill-server");
  await server.stop();
  isStopped = true;
  open();
  await see(/no server answers at/);
  await see(/exit [1-9]/);
  console.log("ok  top without a server says so");
} finally {
  spawnSync("tmux", ["-L", socket, "kill-server"]);
  if (!isStopped) await server.stop();
}
