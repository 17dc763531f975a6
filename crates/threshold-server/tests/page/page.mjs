// Drives the dashboard in Chromium, as an operator does: with a mouse, with the keyboard alone, on a phone, in the dark.
//
//   node page.mjs BINARY MODULES SCREENSHOTS

import assert from "node:assert/strict";
import { spawnSync } from "node:child_process";
import { copyFile, mkdir } from "node:fs/promises";
import { createRequire } from "node:module";
import { join, resolve } from "node:path";
import { readFileSync, writeFileSync } from "node:fs";

import { start, startDemo } from "./server.mjs";

const [binary, modules, screenshots] = process.argv.slice(2).map((path) => resolve(path));
const load = createRequire(join(modules, "node_modules", "/"));
const { chromium } = load("playwright-core");
const axe = readFileSync(load.resolve("axe-core/axe.min.js"), "utf8");
await mkdir(screenshots, { recursive: true });

const POLICY = `
[identity]
log_identifiers = true
trusted_proxies = ["127.0.0.1/32"]

[ladders.steep]
rungs = ["warn", "shadow", "ban 1h"]

[[rule]]
name = "address"
layer = "edge"
per = ["ip"]
limit = "1000/min"

[[rule]]
name = "posts"
layer = "user"
per = ["user"]
match = { method = "POST", path = "/api/posts" }
limit = "2/h"
ladder = "steep"
strike = "request"

[[rule]]
name = "tenants"
layer = "tenant"
per = ["tenant"]
limit = "500/min"

[[rule]]
name = "watched"
layer = "endpoint"
per = ["user"]
mode = "observe"
limit = "1/h"
`;

const OPERATOR = "an-operators-token-1234";
const READER = "a-read-only-token-12345";
/** Names that would be markup, scripts or styles if the page parsed them. */
const HOSTILE = `<img src=x onerror=alert(1)>"'\u202e&<script>document.title='owned'</script>`;

const browser = await chromium.launch({
  executablePath: process.env.THRESHOLD_CHROMIUM ?? "/usr/bin/chromium",
  args: ["--headless", "--no-sandbox", "--disable-gpu", "--disable-background-networking"],
});

/** Random names depend on this alone, and a failure prints it. */
const SEED = Number(process.env.SEED ?? Date.now() % 2 ** 31);

/** Returns pairs of a tenant and a user: some that were taken for others, and random ones. */
function names() {
  let state = SEED;
  const random = (below) => {
    state = (Math.imul(state, 1103515245) + 12345) & 0x7fffffff;
    return (state >> 8) % below;
  };
  const parts = ["%", "/", "@", " ", "#", "%40", "%2F", "%25", "?", "&", "+", "'", '"', "\\", "=", ",", "é", "日本", "🦀", "a", "Z", "7", "-"];
  // A blank at an end is a name of its own, which no person sees.
  const name = () => `n${Array.from({ length: 1 + random(6) }, () => parts[random(parts.length)]).join("")}.`;
  const known = [["acme", "ada%40example.com"], ["a/b", "c/d"], ["acme", "#0123456789abcdef"], ["100%", "-rf %zz"]];
  return [...known, ...Array.from({ length: 6 }, () => [name(), name()])];
}

/** Returns the names that a user is taken for where its name is decoded or encoded once too often. */
function others(user) {
  const decoded = [];
  try {
    decoded.push(decodeURIComponent(user));
  } catch {
    // It cannot be decoded.
  }
  return [...decoded, encodeURIComponent(user), user.split("/").at(-1)].filter((other) => other !== user);
}

let failures = 0;
async function test(name, work) {
  if (process.env.ONLY && !name.includes(process.env.ONLY)) return;
  try {
    await work();
    console.log(`ok  ${name}`);
  } catch (error) {
    failures += 1;
    console.error(`FAILED  ${name}\n${error.stack}`);
  }
}

/** Opens a page that fails the test on any message of the console, and on any request to another host. */
async function open(server, options = {}) {
  const context = await browser.newContext({ viewport: { width: 1280, height: 900 }, ...options });
  const page = await context.newPage();
  page.problems = [];
  page.on("console", (message) => ["error", "warning"].includes(message.type()) && page.problems.push(message.text()));
  page.on("pageerror", (error) => page.problems.push(error.message));
  page.on("request", (request) => {
    if (!request.url().startsWith(server.url)) page.problems.push(`a request to ${request.url()}`);
  });
  await page.goto(server.url);
  return page;
}

async function close(page) {
  assert.deepEqual(page.problems, []);
  await page.context().close();
}

/** Waits until a text is on the page. */
const see = (page, text) => page.getByText(text).first().waitFor({ timeout: 10_000 });
const visit = async (page, view) => {
  await page.evaluate((hash) => {
    location.hash = hash;
  }, `#/${view}`);
  await page.waitForTimeout(150);
};

/** Fails on serious findings of axe-core. */
async function accessible(page, where) {
  await page.evaluate(axe);
  const { violations } = await page.evaluate(() => globalThis.axe.run({ resultTypes: ["violations"] }));
  const serious = violations.filter((one) => ["serious", "critical"].includes(one.impact));
  const text = serious.map((one) => `${one.id}: ${one.nodes.map((node) => node.target.join(" ")).join(", ")}`);
  assert.deepEqual(text, [], where);
}

const check = (server, facts) => server.call("POST", "/v1/check", facts);
const VIEWS = ["", "events", "penalties", "subject/user/u1", "policy", "try"];

const server = await start(binary, POLICY, { flags: ["--allow-edit"] });
for (let request = 0; request < 6; request += 1) {
  await check(server, { ip: "203.0.113.7", tenant: "acme", user: "u1", method: "POST", path: "/api/posts" });
}

await test("the charts show the traffic that was sent", async () => {
  const page = await open(server);
  await see(page, "live");
  await page.waitForTimeout(1500);
  for (let request = 0; request < 40; request += 1) {
    await check(server, { ip: "203.0.113.8", tenant: "acme", user: `user-${request}`, method: "GET", path: "/" });
  }
  await page.waitForTimeout(2500);
  const { body: series } = await server.call("GET", "/v1/series?period=5min");
  const sum = (values) => values.reduce((total, value) => total + value, 0);
  assert.ok(sum(series.decisions.allow) >= 40, JSON.stringify(series.decisions));
  // By the arrow keys the chart reads out the value of each second.
  const chart = page.getByRole("slider", { name: /^Decisions/ });
  await chart.focus();
  let shown = 0;
  await page.keyboard.press("End");
  for (let step = 0; step < 8; step += 1) {
    const text = await chart.getAttribute("aria-valuetext");
    shown += Number(text.match(/allow ([0-9.,]+)/)[1].replace(",", ""));
    await page.keyboard.press("ArrowLeft");
  }
  assert.ok(shown >= 40, `${shown} decisions in the last seconds`);
  await page.screenshot({ path: join(screenshots, "overview-light.png"), fullPage: true });
  await close(page);
});

await test("every field of /v1/stats is shown", async () => {
  const page = await open(server);
  await see(page, "Top blocked tenants");
  const { body: stats } = await server.call("GET", "/v1/stats");
  const shown = {
    edgeBlocks: "Edge blocks",
    tenantBlocks: "Tenant blocks",
    userBlocks: "User blocks",
    endpointBlocks: "Endpoint blocks",
    otherBlocks: "Other blocks",
    warningsIssued: "Warnings",
    shadowBansActive: "Shadow bans",
    bansActive: "Bans",
    topBlockedTenants: "Top blocked tenants",
    topBlockedEndpoints: "Top blocked endpoints",
    topBlockedIps: "Top blocked addresses",
    topBlockedUsers: "Top blocked users",
    topFailedLoginIps: "Failed logins by address",
    topFailedLoginAccounts: "Failed logins by account",
  };
  assert.deepEqual(Object.keys(stats).sort(), Object.keys(shown).sort());
  for (const text of Object.values(shown)) await see(page, text);
  await close(page);
});

await test("a ban appears, is explained and lifted, with the keyboard alone", async () => {
  const page = await open(server);
  await see(page, "Overview");
  await visit(page, "penalties");
  await page.getByRole("button", { name: "Ban", exact: true }).focus();
  await page.keyboard.press("Enter");
  await page.keyboard.press("Tab");
  await page.keyboard.type("198.51.100.9");
  await page.keyboard.press("Tab");
  await page.keyboard.type("2");
  await page.keyboard.press("Tab");
  await page.keyboard.type("scrapes the catalogue");
  await page.keyboard.press("Enter");
  await see(page, "scrapes the catalogue");
  const { body: denied } = await check(server, { ip: "198.51.100.9" });
  assert.equal(denied.verdict, "ban");
  await page.getByRole("link", { name: "198.51.100.9" }).focus();
  await page.keyboard.press("Enter");
  await see(page, "Why it is stopped");
  await see(page, /banned by .*scrapes the catalogue/);
  await page.screenshot({ path: join(screenshots, "subject-banned.png"), fullPage: true });
  await visit(page, "try");
  await page.getByLabel("Address").fill("198.51.100.9");
  await page.keyboard.press("Enter");
  await see(page, /It would be denied/);
  await visit(page, "penalties");
  await page.getByRole("button", { name: "Lift the ban on 198.51.100.9" }).focus();
  await page.keyboard.press("Enter");
  await page.keyboard.type("a customer after all");
  await page.keyboard.press("Enter");
  await page.getByRole("link", { name: "198.51.100.9" }).waitFor({ state: "detached" });
  assert.equal((await check(server, { ip: "198.51.100.9" })).body.allowed, true);
  await close(page);
});

await test("an event leads to its reason and its subject", async () => {
  const page = await open(server);
  await visit(page, "events");
  await page.getByLabel("user", { exact: true }).fill("u1");
  await page.getByRole("button", { name: "Filter" }).click();
  await page.locator("tbody a.mono").first().click();
  await see(page, "Its limits at that moment");
  await page.getByRole("link", { name: "u1", exact: true }).click();
  await see(page, "Budgets");
  await see(page, "posts");
  await page.screenshot({ path: join(screenshots, "subject-light.png"), fullPage: true });
  await close(page);
});

await test("events are followed live", async () => {
  const page = await open(server);
  await visit(page, "events");
  await page.getByRole("button", { name: "Follow live" }).click();
  await page.waitForTimeout(300);
  await check(server, { ip: "203.0.113.7", user: "live-user", method: "POST", path: "/api/posts", cost: 2 });
  await check(server, { ip: "203.0.113.7", user: "live-user", method: "POST", path: "/api/posts" });
  await see(page, "live-user");
  await close(page);
});

await test("older events are on further pages", async () => {
  const requests = [...Array(110).keys()].flatMap((number) => {
    const request = { ip: "203.0.113.8", user: `paged-${number}`, method: "POST", path: "/api/posts" };
    return [{ ...request, cost: 2 }, request];
  });
  await server.call("POST", "/v1/check", requests);
  const page = await open(server);
  await visit(page, "events");
  await see(page, "paged-109");
  assert.equal(await page.getByText("paged-1", { exact: true }).count(), 0);
  assert.equal(await page.locator("tbody tr").count(), 100);
  await page.getByRole("button", { name: "Older events" }).click();
  await see(page, /^paged-1$/);
  await page.getByRole("button", { name: "Newest events" }).click();
  await see(page, "paged-109");
  await close(page);
});

await test("a draft is checked, rehearsed and saved", async () => {
  const page = await open(server);
  await visit(page, "policy");
  await see(page, "As it runs");
  await page.getByRole("link", { name: "posts" }).first().click();
  await page.locator(".row.marked").waitFor();
  assert.match(await page.locator(".row.marked").textContent(), /name = "posts"/);
  const draft = page.getByLabel("Draft of the policy");
  await draft.fill(POLICY.replace('limit = "1000/min"', 'limit = "1000/mni"'));
  await see(page, /error\[/);
  const tighter = POLICY.replace('limit = "500/min"', 'limit = "1/h"');
  await draft.fill(tighter);
  await see(page, /Nothing wrong|warning\[/);
  await page.getByRole("button", { name: "Rehearse on the last hour" }).click();
  await see(page, "Newly denied");
  await page.screenshot({ path: join(screenshots, "policy-light.png"), fullPage: true });
  await page.getByRole("button", { name: "Save" }).click();
  await page.keyboard.type("a tighter limit");
  await page.keyboard.press("Enter");
  await page.waitForTimeout(2500);
  assert.equal(readFileSync(server.file, "utf8"), tighter);
  const { body: policy } = await server.call("GET", "/v1/policy");
  assert.match(policy.text, /1\/h/);
  const { body: audit } = await server.call("GET", "/v1/audit");
  assert.ok(audit.some((line) => line.action.startsWith("save the policy: rule tenants: limit 500/min -> 1/h") && line.why === "a tighter limit"), JSON.stringify(audit));
  await close(page);
});

await test("hostile names are shown as text", async () => {
  const page = await open(server);
  await check(server, { ip: "203.0.113.9", tenant: HOSTILE, user: HOSTILE, method: "POST", path: "/api/posts", endpoint: HOSTILE, cost: 2 });
  await check(server, { ip: "203.0.113.9", tenant: HOSTILE, user: HOSTILE, method: "POST", path: "/api/posts", endpoint: HOSTILE });
  await server.call("POST", "/v1/bans", { layer: "user", key: HOSTILE, reason: HOSTILE });
  for (const view of ["", "events", "penalties", `subject/user/${encodeURIComponent(HOSTILE)}`]) {
    await visit(page, view);
    await page.waitForTimeout(600);
    assert.equal(await page.locator("img[src=x]").count(), 0, view);
    assert.notEqual(await page.title(), "owned", view);
  }
  // As its number: it would write the rest of the line backwards.
  await see(page, /<img src=x.*\\u\{202e\}/);
  assert.equal(await page.getByText("\u202e").count(), 0);
  await close(page);
});

for (const [name, options] of [
  ["light", { colorScheme: "light" }],
  ["dark", { colorScheme: "dark" }],
  ["phone", { colorScheme: "light", viewport: { width: 360, height: 740 }, deviceScaleFactor: 2, isMobile: true, hasTouch: true }],
]) {
  await test(`every view is accessible and fits: ${name}`, async () => {
    const page = await open(server, options);
    await see(page, "Overview");
    for (const view of VIEWS) {
      await visit(page, view);
      await page.waitForTimeout(800);
      const { wide, whole } = await page.evaluate(() => ({ wide: document.documentElement.scrollWidth, whole: innerWidth }));
      assert.ok(wide <= whole, `${view} is ${wide} wide on ${whole}`);
      await page.screenshot({ path: join(screenshots, `${name}-${view.split("/")[0] || "overview"}.png`), fullPage: true });
      await accessible(page, `${name} ${view}`);
    }
    await close(page);
  });
}

await server.stop();

// The page and `why` joined the names of an event without encoding them, so that the key of `ada%40example.com` was that of another user.
// Every name is shown, looked up, banned and lifted as the very same, in the browser and by the commands that `why` prints.
for (const scope of ["global", "tenant"]) {
  await test(`names are opaque: user_scope = "${scope}"`, async () => {
    const policy = `[identity]\nlog_identifiers = true\nuser_scope = "${scope}"\n[[rule]]\nname = "all"\nlayer = "user"\nper = ["user"]\nlimit = "1/h"\n`;
    const own = await start(binary, policy);
    const page = await open(own);
    const cli = (...args) => spawnSync(binary, args, { encoding: "utf8", env: { PATH: process.env.PATH, THRESHOLD_SERVER: own.url } });
    for (const [number, [tenant, user]] of names().entries()) {
      const request = { ip: "203.0.113.7", tenant, user };
      await check(own, request);
      const { traceId } = (await check(own, request)).body;
      const label = JSON.stringify({ tenant, user, seed: SEED });
      // From the event to the subject, where the same event is its history.
      await visit(page, `events/${traceId}`);
      await page.locator("dt:text-is('User') + dd a").click();
      const key = await page.getByLabel("Name", { exact: true }).inputValue();
      await page.locator(`a[href="#/events/${traceId}"]`).waitFor();
      await page.getByRole("button", { name: "Ban", exact: true }).click();
      await page.keyboard.press("Tab");
      await page.keyboard.type("a test");
      await page.keyboard.press("Enter");
      await see(page, /banned by .*a test/);
      const { body: bans } = await own.call("GET", "/v1/bans");
      assert.deepEqual(bans.map((ban) => ban.key), [key], label);
      assert.equal((await check(own, request)).body.verdict, "ban", label);
      for (const other of others(user)) assert.notEqual((await check(own, { ...request, user: other })).body.verdict, "ban", `${label} and ${other}`);
      // By the list of bans, to the same subject, and lifted.
      await visit(page, "penalties");
      await page.locator(`a[href="#/subject/user/${encodeURIComponent(key)}"]`).click();
      await page.getByRole("button", { name: /^Lift the ban on/ }).click();
      await page.keyboard.type("over");
      await page.keyboard.press("Enter");
      await page.getByText(/banned by .*a test/).waitFor({ state: "detached" });
      assert.notEqual((await check(own, request)).body.verdict, "ban", label);
      // The command that is printed is copied into a shell.
      const printed = cli("why", traceId).stdout.split("\n").find((line) => line.startsWith("threshold subject user "));
      const shell = spawnSync("sh", ["-c", `threshold() { printf '%s\\0' "$@"; }; ${printed}`], { encoding: "utf8" });
      assert.equal(shell.stdout.split("\0").filter((word) => word !== "--").at(2), key, label);
      assert.equal(cli("bans", "add", "--reason", "a test", "user", "--", key).status, 0, label);
      assert.match(cli("subject", "user", "--", key).stdout, /Stopped by:\n {2}ban /, label);
      assert.equal((await check(own, request)).body.verdict, "ban", `${label} ${number}`);
      assert.equal(cli("bans", "lift", "--reason", "over", "user", "--", key).status, 0, label);
      assert.deepEqual((await own.call("GET", "/v1/bans")).body, [], label);
    }
    await close(page);
    await own.stop();
  });
}

await test("with tokens nothing is shown before signing in, and a reader changes nothing", async () => {
  const guarded = await start(binary, POLICY, { env: { THRESHOLD_ADMIN_TOKEN: OPERATOR, THRESHOLD_READ_TOKEN: READER } });
  const page = await open(guarded);
  await see(page, "Sign in");
  assert.equal(await page.getByText("Overview").count(), 0);
  await page.getByLabel("Token").fill("a-wrong-token-0000000");
  await page.keyboard.press("Enter");
  await see(page, "no operator has this token");
  // The browser reports the refusal in its console, as it does for every 401.
  page.problems = page.problems.filter((text) => !text.includes("401"));
  await page.screenshot({ path: join(screenshots, "sign-in.png") });
  await page.getByLabel("Token").fill(READER);
  await page.keyboard.press("Enter");
  await see(page, "read only");
  // A reader may look at everything: the policy checks its draft, and a request may be tried.
  await visit(page, "policy");
  await see(page, /The draft is the policy as it runs|warning\[/);
  assert.equal(await page.getByRole("button", { name: "Rehearse on the last hour" }).count(), 0);
  await visit(page, "try");
  await page.getByLabel("Address").fill("203.0.113.7");
  await page.keyboard.press("Enter");
  await see(page, /It would be allowed/);
  await visit(page, "penalties");
  await page.waitForTimeout(300);
  assert.equal(await page.getByRole("button", { name: "Ban", exact: true }).count(), 0);
  const cookies = await page.context().cookies();
  const session = cookies.find((cookie) => cookie.name.startsWith("threshold_session_"));
  assert.ok(session.httpOnly && session.sameSite === "Strict", JSON.stringify(session));
  assert.equal(await page.evaluate(() => document.cookie), "");
  const cookie = `${session.name}=${session.value}`;
  const ban = { layer: "edge", key: "192.0.2.1", reason: "test" };
  const origin = guarded.url;
  const refused = await guarded.call("POST", "/v1/bans", ban, { Cookie: cookie, Origin: origin });
  assert.equal(refused.status, 403, "a reader cannot ban");
  await page.getByRole("button", { name: "Sign out" }).click();
  await see(page, "Sign in");
  assert.equal((await guarded.call("GET", "/v1/stats", undefined, { Cookie: cookie })).status, 401, "the session has ended");
  await page.getByLabel("Token").fill(OPERATOR);
  await page.keyboard.press("Enter");
  await see(page, "Overview");
  const own = (await page.context().cookies()).find((one) => one.name.startsWith("threshold_session_"));
  const signed = { Cookie: `${own.name}=${own.value}` };
  assert.equal((await guarded.call("POST", "/v1/bans", ban, { ...signed, Origin: "https://evil.example" })).status, 403);
  assert.equal((await guarded.call("POST", "/v1/bans", ban, signed)).status, 401, "a change without Origin is not of a page");
  assert.equal((await guarded.call("POST", "/v1/bans", ban, { ...signed, Origin: origin, "Content-Type": "text/plain" })).status, 415);
  assert.equal((await guarded.call("GET", "/v1/stats", undefined, { ...signed, "Sec-Fetch-Site": "cross-site" })).status, 403);
  assert.equal((await guarded.call("POST", "/v1/bans", ban, { ...signed, Origin: origin })).status, 200);
  await close(page);
  await guarded.stop();
});

await test("pictures of the demo and of a replay", async () => {
  // A taller window than a screen has: the picture is shown small.
  const viewport = { width: 1280, height: 1000 };
  const demo = await startDemo(binary);
  // Long enough for lines instead of dots.
  const page = await open(demo, { viewport });
  await see(page, "This is a demo");
  await page.waitForTimeout(45_000);
  await page.screenshot({ path: join(screenshots, "dashboard.png") });
  await close(page);
  await demo.stop();
  const report = join(screenshots, "replay.html");
  const policy = spawnSync(binary, ["init", "grove"]).stdout;
  // Half an hour of visitors, with a scraper in the middle of it and one who guesses passwords near the end.
  const log = [];
  const line = (second, ip, method, uri) =>
    log.push(JSON.stringify({ time: new Date(Date.UTC(2026, 0, 15, 9) + second * 1_000).toISOString(), remote_addr: ip, method, uri, status: 200 }));
  for (let second = 0; second < 1_800; second += 1) {
    const visitors = 4 + Math.round(3 * Math.sin(second / 120));
    for (let number = 0; number < visitors; number += 1) line(second, `203.0.113.${(second * 7 + number * 31) % 200}`, "GET", ["/", "/api/feed", "/api/posts"][number % 3]);
    if (second >= 600 && second < 960) for (let number = 0; number < 30; number += 1) line(second, "198.51.100.23", "GET", `/api/posts/${second * 30 + number}`);
    if (second >= 1_300 && second < 1_500) for (let number = 0; number < 2; number += 1) line(second, "192.0.2.66", "POST", "/login");
  }
  writeFileSync(join(screenshots, "policy.toml"), policy);
  writeFileSync(join(screenshots, "access.json"), `${log.join("\n")}\n`);
  const replay = spawnSync(binary, ["replay", "policy.toml", "access.json", "--html", report], { cwd: screenshots, encoding: "utf8" });
  assert.ok([0, 1].includes(replay.status), replay.stderr);
  const context = await browser.newContext({ viewport });
  const shown = await context.newPage();
  await shown.goto(`file://${report}`);
  await shown.screenshot({ path: join(screenshots, "replay.png") });
  await context.close();
});

// The pictures of the documentation are made here, and only replaced when asked for: no two are alike.
if (process.env.UPDATE_PICTURES) {
  const pictures = new URL("../../../../docs/pictures/", import.meta.url);
  await mkdir(pictures, { recursive: true });
  for (const name of ["dashboard.png", "replay.png"]) await copyFile(join(screenshots, name), new URL(name, pictures));
}

await browser.close();
if (failures > 0) {
  console.error(`${failures} failed`);
  process.exit(1);
}
