// A publishing platform with four layers of limits, a ladder and a protected login.

import assert from "node:assert/strict";
import { cpSync, mkdtempSync, readFileSync, rmSync, writeFileSync } from "node:fs";
import { Agent, request as send } from "node:http";
import { join } from "node:path";
import { eventually, namespace, newFolder, ROOT, start } from "./world.mjs";

const sleep = (ms) => new Promise((done) => setTimeout(done, ms));
const keptAlive = new Agent({ keepAlive: true, maxSockets: 50 });

// Sends a request to a host of the platform, from an address.
function ask(app, method, url, { ip = "192.0.2.1", headers = {}, body, announced } = {}) {
  const { host, pathname, search } = new URL(url);
  const size = announced ?? (body === undefined ? undefined : Buffer.byteLength(body));
  const length = size === undefined ? {} : { "content-length": size };
  const agent = announced === undefined ? keptAlive : false;
  const options = { host: "127.0.0.1", port: app.port, agent, method, path: pathname + search };
  return new Promise((done, failed) => {
    const sent = send({ ...options, headers: { host, "cf-connecting-ip": ip, ...length, ...headers } }, (answer) => {
      const chunks = [];
      answer.on("data", (chunk) => chunks.push(chunk));
      answer.on("end", () => {
        const text = Buffer.concat(chunks).toString();
        if (announced !== undefined) {
          sent.destroy();
        }
        let json;
        try {
          json = JSON.parse(text);
        } catch {
          json = undefined;
        }
        done({ status: answer.statusCode, headers: answer.headers, text, json });
      });
    });
    sent.once("error", (error) => {
      // workerd closes connections that were idle for a while, and this one was about to be used again: nothing was answered.
      if (sent.reusedSocket && error.code === "ECONNRESET") {
        ask(app, method, url, { ip, headers, body, announced }).then(done, failed);
      } else {
        failed(error);
      }
    });
    // A body that is announced and does not come: the answer must not wait for it.
    if (announced === undefined) {
      sent.end(body);
    } else {
      sent.flushHeaders();
    }
  });
}

async function times(count, ask) {
  const answers = [];
  for (let at = 0; at < count; at += 25) {
    answers.push(...(await Promise.all(Array.from({ length: Math.min(25, count - at) }, (_, more) => ask(at + more)))));
  }
  return answers;
}
function statuses(answers) {
  const count = {};
  for (const { status } of answers) {
    count[status] = (count[status] ?? 0) + 1;
  }
  return count;
}

const AUTH = "https://auth.grove.place";
const PASSWORD = "correct horse battery staple";

// An address of its own for each caller, since addresses are limited too.
let addresses = 0;
function address() {
  addresses += 1;
  return `198.18.${addresses >> 8}.${addresses & 255}`;
}

async function sql(app, text) {
  const answer = await ask(app, "POST", "http://127.0.0.1/cdn-cgi/explorer/api/d1/database/ACCOUNTS/raw", {
    headers: { "content-type": "application/json", host: `127.0.0.1:${app.port}` },
    body: JSON.stringify({ sql: text }),
  });
  assert.equal(answer.status, 200, answer.text);
}

// Returns the number of records in an object.
async function recordsOf(app, className, object) {
  const base = "/cdn-cgi/explorer/api/workers/durable_objects/namespaces";
  const found = (await (await app.fetch(base)).json()).result;
  const { id } = found.find((own) => own.class === className);
  const body = JSON.stringify({ durable_object_name: object, queries: [{ sql: "SELECT COUNT(*) AS count FROM threshold_records" }] });
  const headers = { "content-type": "application/json" };
  const answer = await app.fetch(`${base}/${id}/query`, { method: "POST", headers, body });
  const { result } = await answer.json();
  // An object that was never written has no table.
  return result?.[0].rows[0][0] ?? 0;
}

function form(app, fields, { ip = address(), path = "/token", headers = {} } = {}) {
  const body = new URLSearchParams(fields).toString();
  return ask(app, "POST", `${AUTH}${path}`, { ip, body, headers: { "content-type": "application/x-www-form-urlencoded", ...headers } });
}
const login = (app, username, password, more) => form(app, { grant_type: "password", username, password }, more);

// Creates a tenant with one account, and returns a client that is logged in.
async function member(app, name, tier = "seedling") {
  const signed = await ask(app, "POST", `https://grove.place/api/signup`, {
    ip: address(),
    body: JSON.stringify({ username: name, password: PASSWORD, tenant: name }),
  });
  assert.equal(signed.status, 201, signed.text);
  if (tier !== "seedling") {
    await sql(app, `UPDATE tenants SET tier = '${tier}' WHERE name = '${name}'`);
  }
  const tokens = await login(app, name, PASSWORD);
  assert.equal(tokens.status, 200, tokens.text);
  const ip = address();
  return (method, path, { headers = {}, ...more } = {}) =>
    ask(app, method, `https://${name}.grove.place${path}`, { ip, headers: { authorization: `Bearer ${tokens.json.access_token}`, ...headers }, ...more });
}

const sentences = {
  async "each edge rule answers with its body, and blocks"(app) {
    const rules = [
      [1000, "GET", "https://grove.place/", "rate_limited", 60],
      [50, "GET", `${AUTH}/oauth/authorize`, "auth_rate_limited", 300],
      [100, "GET", "https://grove.place/api/images/1", "upload_rate_limited", 3600],
      [500, "GET", "https://grove.place/api/wisp/x", "ai_rate_limited", 86400],
    ];
    for (const [limit, method, url, error, wait] of rules) {
      const ip = address();
      assert.deepEqual(statuses(await times(limit, () => ask(app, method, url, { ip }))), { 200: limit }, error);
      // Exact within one isolate: what it has charged it knows before KV does.
      const denied = await ask(app, method, url, { ip });
      assert.equal(denied.status, 429, error);
      assert.equal(denied.text, JSON.stringify({ error, retry_after: wait }));
      assert.ok(Number(denied.headers["retry-after"]) >= 1);
      assert.equal((await ask(app, method, url, { ip: address() })).status, 200, "another address");
    }
  },

  async "a tenant has the limits of its tier for each category, and its flood changes no other's"(app) {
    await member(app, "quiet");
    await member(app, "loud");
    const get = (tenant, path = "/") => ask(app, "GET", `https://${tenant}.grove.place${path}`, { ip: address() });
    const flood = times(150, () => get("loud"));
    const calm = await times(60, () => get("quiet"));
    assert.deepEqual(statuses(calm), { 200: 60 });
    assert.deepEqual(statuses(await flood), { 200: 100, 429: 50 });
    const denied = await get("loud");
    assert.equal(denied.json.error, "tenant_rate_limited");
    assert.equal(denied.json.category, "requests");
    assert.equal(denied.headers["x-ratelimit-limit"], "100");
    assert.equal(denied.headers["x-ratelimit-remaining"], "0");
    assert.ok(denied.json.resetAt.endsWith("Z"));
    // Other categories of the tenant have room.
    assert.deepEqual(statuses(await times(26, () => get("loud", "/api/ai/x"))), { 200: 25, 429: 1 });
    assert.deepEqual(statuses(await times(11, () => get("loud", "/api/images/x"))), { 200: 10, 429: 1 });
    const writes = await times(51, () => ask(app, "POST", "https://loud.grove.place/api/x", { ip: address() }));
    assert.deepEqual(statuses(writes), { 401: 50, 429: 1 });
    // A larger tier has larger limits, at once.
    await sql(app, "UPDATE tenants SET tier = 'sapling' WHERE name = 'loud'");
    const room = await get("loud");
    assert.equal(room.status, 200);
    assert.equal(room.headers["x-ratelimit-limit"], "500");
  },

  async "users are limited by what they do, endpoints on top, and neither if anonymous"(app) {
    const ada = await member(app, "ada", "evergreen");
    const limits = [
      [10, "POST", "/api/posts"],
      [30, "PATCH", "/api/posts/7"],
      [20, "POST", "/api/comments"],
    ];
    // Strikes: 1 and 2 warn, 3 denies.
    const last = [];
    for (const [limit, method, path] of limits) {
      const answers = await times(limit, () => ada(method, path));
      assert.deepEqual(statuses(answers), { 200: limit }, path);
      last.push(await ada(method, path));
    }
    assert.deepEqual(last.map(({ status }) => status), [200, 200, 429]);
    for (const warned of last.slice(0, 2)) {
      assert.equal(warned.headers["x-ratelimit-warning"], "true");
      assert.match(String(warned.headers["set-cookie"]), /grove_warning=/);
    }
    // Everything of this user is stopped for a minute, and nobody else.
    const cooling = await ada("GET", "/");
    assert.equal(cooling.status, 429);
    assert.ok(Number(cooling.headers["retry-after"]) <= 60, "a cool-down of a minute");
    assert.equal((await ask(app, "GET", "https://ada.grove.place/", { ip: address() })).status, 200);
    const anonymous = await times(15, () => ask(app, "POST", "https://ada.grove.place/api/comments", { ip: address() }));
    assert.deepEqual(statuses(anonymous), { 401: 15 });
    // The default for all other paths is a user's, too.
    const bob = await member(app, "bob", "evergreen");
    assert.deepEqual(statuses(await times(100, () => bob("GET", "/x"))), { 200: 100 });
    assert.equal((await bob("GET", "/x")).headers["x-ratelimit-warning"], "true");
    assert.equal((await bob("GET", "/x")).json.error, "rate_limited");
  },

  async "records are in the objects and keys that the platform names"(app) {
    const heidi = await member(app, "heidi");
    await heidi("POST", "/api/posts", { ip: "203.0.113.77" });
    await login(app, "heidi", "no", { ip: "203.0.113.78" });
    for (const [className, object] of [
      ["TenantDO", "tenant:heidi"],
      ["SessionDO", "user:heidi:heidi"],
      ["SessionDO", "auth:ip:203.0.113.78"],
      ["SessionDO", "auth:user:heidi"],
    ]) {
      assert.ok((await recordsOf(app, className, object)) > 0, object);
    }
    assert.equal(await recordsOf(app, "SessionDO", "auth:user:nobody-at-all"), 0);
    const keys = namespace(app, "RATE_KV");
    await eventually(async () => (await keys.get("edge:203.0.113.77")) !== undefined, "the edge rule is in RATE_KV");
  },

  async "endpoint limits say their period"(app) {
    const ip = address();
    const signUp = () => ask(app, "POST", "https://grove.place/api/signup", { ip, body: "{}" });
    assert.deepEqual((await times(3, signUp)).map(({ status }) => status), [400, 400, 400]);
    const denied = await signUp();
    assert.equal(denied.status, 429);
    assert.equal(denied.json.error, "endpoint_rate_limited");
    assert.equal(denied.json.endpoint, "POST:/api/signup");
    assert.equal(denied.json.period, "3 signups per day per IP");
    assert.equal(denied.json.limit, 3);
    // Auth rules count by address where there is no user.
    const reset = () => ask(app, "POST", "https://grove.place/api/auth/password-reset", { ip });
    assert.deepEqual((await times(3, reset)).map(({ status }) => status), [401, 401, 401]);
    assert.equal((await reset()).status, 429);
    // 50 MB of uploads a day, and never more at once.
    const carol = await member(app, "carol", "evergreen");
    const large = await carol("POST", "/api/upload/file", { announced: 50_000_001 });
    assert.equal(large.status, 413);
  },

  async "headers of clients name nobody"(app) {
    const dave = await member(app, "dave");
    const forged = { "x-tenant": "other", "x-user": "somebody", "x-tier": "evergreen", "x-forwarded-for": "203.0.113.99" };
    const seen = await dave("GET", "/", { headers: forged });
    assert.deepEqual(seen.json, { call: "GET /", tenant: "dave", user: "dave" });
    assert.equal(seen.headers["x-ratelimit-limit"], "100", "the tier is the tenant's");
    // A session of one tenant is nobody on the host of another, and a forged one is nobody anywhere.
    await member(app, "erin");
    const elsewhere = await dave("GET", "/", { headers: { host: "erin.grove.place" } });
    assert.deepEqual(elsewhere.json, { call: "GET /", tenant: "erin" });
    const unsigned = Buffer.from(JSON.stringify({ use: "session", user: "dave", tenant: "dave", until: 1e12 })).toString("base64url");
    for (const token of [unsigned, `${unsigned}.AAAA`, "x", "x.y.z"]) {
      const answer = await dave("POST", "/api/posts", { headers: { authorization: `Bearer ${token}` } });
      assert.equal(answer.status, 401, token);
    }
  },

  async "the token endpoint protects accounts and addresses"(app) {
    await member(app, "frank");
    // A right password forgets the failures before it.
    for (const password of ["no", "no", PASSWORD, "no", "no", PASSWORD]) {
      assert.equal((await login(app, "frank", password)).status, password === PASSWORD ? 200 : 400, password);
    }
    // Five in a quarter of an hour, whatever the address: the two of each round above were failures.
    const tokens = await login(app, "Frank ", PASSWORD);
    assert.equal(tokens.json.token_type, "Bearer");
    const device = /__Host-grove_device=([^;]+); Path=\/; .*HttpOnly; Secure; SameSite=Lax/.exec(String(tokens.headers["set-cookie"]))[1];
    assert.deepEqual((await login(app, "frank", "no")).json, { error: "invalid_grant" });
    const locked = await login(app, "frank", PASSWORD);
    assert.equal(locked.status, 429);
    assert.deepEqual(locked.json, { error: "account_locked", message: "Too many failed attempts. Account temporarily locked." });
    assert.ok(Number(locked.headers["retry-after"]) >= 1);
    // An unknown account behaves alike.
    for (let at = 0; at < 3; at += 1) {
      assert.deepEqual((await login(app, "nobody", "no")).json, { error: "invalid_grant" });
    }
    assert.deepEqual((await login(app, "nobody", "no")).json, locked.json);
    // The owner's device and the owner's sessions go on.
    assert.equal((await login(app, "frank", PASSWORD, { headers: { cookie: `__Host-grove_device=${device}` } })).status, 200);
    const refreshed = await form(app, { grant_type: "refresh_token", refresh_token: tokens.json.refresh_token });
    assert.equal(refreshed.status, 200);
    // Other grants count for their address, and for no account: 20 in 5 minutes.
    const ip = address();
    const guess = () => form(app, { grant_type: "refresh_token", refresh_token: "x" }, { ip });
    assert.deepEqual(statuses(await times(20, guess)), { 400: 20 });
    const refused = await guess();
    assert.equal(refused.status, 429);
    assert.deepEqual(refused.json, { error: "too_many_requests", message: "Too many authentication attempts. Please try again later." });
    assert.equal((await login(app, "nobody-else", "no", { ip })).json.error, "too_many_requests");
    assert.equal((await form(app, { grant_type: "other" })).json.error, "unsupported_grant_type");
    assert.match(app.log, /"event":"auth_ip_rate_limit"/);
    assert.match(app.log, /"event":"auth_user_lockout"/);
  },

  async "what was blocked is kept as events, and answered as statistics"(app) {
    await member(app, "grace");
    await times(101, () => ask(app, "GET", "https://grace.grove.place/", { ip: address() }));
    const events = namespace(app, "MONITOR_KV");
    const isOwn = async ({ name }) => {
      assert.match(name, /^ratelimit:\d{13}:[0-9a-f-]{36}$/);
      const { layer, tenant, blocked } = JSON.parse((await events.get(name)) ?? "{}");
      return layer === "tenant" && tenant === "grace" && blocked === true;
    };
    const found = async () => (await Promise.all((await events.keys()).map(isOwn))).includes(true);
    await eventually(found, "an event of the tenant is in MONITOR_KV");
    await app.fetch("/cdn-cgi/handler/scheduled");
    const stats = async (token) => ask(app, "GET", "https://grove.place/v1/stats", { headers: { authorization: `Bearer ${token}` } });
    const answer = await stats("development-token-of-operators");
    assert.equal(answer.status, 200, answer.text);
    assert.ok(answer.json.tenantBlocks >= 1);
    assert.ok(answer.json.topBlockedTenants.some(({ tenant }) => tenant === "grace"));
    // Nobody else reads them.
    assert.equal((await stats("another-token-of-nobody")).json.edgeBlocks, undefined);
  },
};

// The ladder with short cool-downs, in a copy of the example. All else is the policy's own.
async function climb() {
  // As deep in the repository as the example, so that its paths hold.
  const folder = mkdtempSync(join(ROOT, "target/worker/grove-"));
  try {
    cpSync(join(ROOT, "examples/workers/grove"), folder, { recursive: true });
    const policy = readFileSync(join(ROOT, "policies/grove.toml"), "utf8");
    const quick = policy.replace('"cooldown 1min"', '"cooldown 2s"').replace('"cooldown 5min + shadow"', '"cooldown 3s + shadow"');
    assert.notEqual(quick, policy);
    writeFileSync(join(folder, "policy.toml"), quick);
    const index = join(folder, "index.js");
    writeFileSync(index, readFileSync(index, "utf8").replace("../../../policies/grove.toml", "./policy.toml"));
    const args = ["--persist", newFolder()];
    let app = await start(folder, { args });

    const eve = await member(app, "eve", "evergreen");
    // Uses a limit up, and returns the answer to one request more.
    const exceed = async (limit, method, path) => {
      assert.deepEqual(statuses(await times(limit, () => eve(method, path))), { 200: limit }, path);
      return eve(method, path);
    };
    // A cool-down concerns every path. Waits until it is over.
    const coolDown = async (most) => {
      const cooling = await eve("GET", "/");
      assert.equal(cooling.status, 429);
      const wait = Number(cooling.headers["retry-after"]);
      assert.ok(wait <= most, `${wait}`);
      await sleep(wait * 1_000 + 100);
    };

    const first = await exceed(10, "POST", "/api/posts");
    const second = await exceed(20, "POST", "/api/comments");
    for (const warned of [first, second]) {
      assert.equal(warned.status, 200);
      assert.equal(warned.headers["x-ratelimit-warning"], "true");
      assert.match(String(warned.headers["set-cookie"]), /grove_warning=/);
    }
    const third = await exceed(30, "PUT", "/api/posts/1");
    assert.equal(third.status, 429);
    await coolDown(2);
    const before = await eve("GET", "/");
    assert.equal(before.status, 200);
    const fourth = await exceed(10, "POST", "/api/upload/media");
    assert.equal(fourth.status, 429);
    await coolDown(3);
    // The shadow ban delays, and says nothing.
    const began = performance.now();
    const slow = await eve("GET", "/");
    assert.ok(performance.now() - began >= 900, "delayed by at least a second");
    assert.equal(slow.status, 200);
    assert.deepEqual(Object.keys(slow.headers).sort(), Object.keys(before.headers).sort(), "no field tells of it");
    assert.deepEqual(slow.json, before.json);
    assert.equal((await eve("DELETE", "/api/account")).status, 204);
    const banned = await eve("DELETE", "/api/account");
    assert.equal(banned.status, 429);
    assert.equal(banned.headers["x-ratelimit-banned"], "true");
    assert.equal(banned.json.error, "banned");
    assert.ok(Number(banned.headers["retry-after"]) > 23 * 3_600);
    assert.match(app.log, /abuse_escalation/);
    await app.stop();

    app = await start(folder, { args, port: app.port });
    const after = await eve("GET", "/");
    assert.equal(after.status, 429);
    assert.equal(after.headers["x-ratelimit-banned"], "true");
  } finally {
    rmSync(folder, { recursive: true });
  }
}

export async function grove(test) {
  const app = await start("grove");
  for (const [sentence, check] of Object.entries(sentences)) {
    await test(sentence, () => check(app));
  }
  await test("all five rungs are climbed, and a restart keeps the ban", climb);
}
