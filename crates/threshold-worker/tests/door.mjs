// Runs a Worker of one's own that imports the module, and the module itself as an entrypoint, on workerd, and checks both doors.
//
//   node door.mjs NODE_MODULES WORKER
//
// WORKER is a folder that tools/build has made.

import assert from "node:assert/strict";
import { createHmac, generateKeyPairSync, sign as createSign } from "node:crypto";
import http from "node:http";
import net from "node:net";
import { join } from "node:path";
import { setTimeout as wait } from "node:timers/promises";

import { TOKEN, folder, index, run, runAll } from "./workerd.mjs";

const POLICY = `
[identity]
client_ip = "cf-connecting-ip"
user = "header:x-user"
default_tier = "free"
[tiers.free]
reads = "3/h"
[tiers.paid]
reads = "5/h"
[[rule]]
name = "user"
per = ["user"]
match = { path = "/user" }
limit = "tier:reads"
[[rule]]
name = "tenant"
per = ["tenant"]
match = { path = "/tenant" }
limit = "2/h"
[[rule]]
name = "address"
per = ["ip"]
match = { path = "/address" }
limit = "2/h"
[[rule]]
name = "held"
per = ["ip"]
match = { path = "/held/**" }
algorithm = "concurrency"
limit = "1"
ttl = "1h"
[[rule]]
name = "bytes"
per = ["ip"]
match = { path = "/bytes/**" }
limit = "1000B/h"
`;

// A Worker that authenticates by a header of its test, and answers by itself.
const OWN = `
import { api, guard, ThresholdObject } from "./index.js";
export { ThresholdObject };

async function handler(request) {
  const { pathname } = new URL(request.url);
  if (pathname === "/throw") {
    throw new Error("the handler fails");
  }
  if (pathname === "/nothing") {
    return "no response";
  }
  return new Response(request.method + " " + pathname + " " + (await request.text()), { headers: { "x-own": "yes" } });
}

export default {
  async fetch(request, env, ctx) {
    const url = new URL(request.url);
    if (url.hostname === "api") {
      return api(request, env, ctx);
    }
    const identity = request.headers.get("x-test-identity");
    try {
      return await guard(request, env, ctx, url.pathname === "/no-handler" ? 7 : handler, identity === null ? undefined : JSON.parse(identity));
    } catch (error) {
      return new Response(error.name + ": " + error.message, { status: 599 });
    }
  },
};
`;

function settings(vars) {
  return {
    modulesRoot: folder,
    compatibilityDate: "2026-04-01",
    durableObjects: { THRESHOLD: { className: "ThresholdObject", useSQLite: true } },
    bindings: { THRESHOLD_POLICY: POLICY, THRESHOLD_SECRET: "0123456789abcdef0123456789abcdef", ...vars },
  };
}

function start(...workers) {
  return run({ workers });
}

// The Worker of one's own. It has neither an upstream nor a token.
const own = (vars = {}) =>
  start({ name: "own", ...settings(vars), modules: [{ type: "ESModule", path: join(folder, "own.js"), contents: OWN }, ...index] });

// The module itself, in front of an upstream that is reached by a URL or, with `script`, by a service binding.
async function entry(url, script) {
  const upstream = { name: "upstream", modules: true, script: script ?? "export default {}", compatibilityDate: "2026-04-01" };
  const vars = { THRESHOLD_TOKEN: TOKEN, ...(url && { UPSTREAM_URL: url }) };
  const worker = start(
    {
      name: "entry",
      ...settings(vars),
      modules: index,
      serviceBindings: script ? { UPSTREAM: "upstream" } : {},
      // Without miniflare's own Worker in front.
      unsafeDirectSockets: [{ host: "127.0.0.1", port: 0 }],
    },
    upstream,
  );
  const { port } = await worker.unsafeGetDirectURL("entry");
  return { worker, port };
}

// An upstream in Node.js. `seen` has the requests in the order in which they came, with their bodies.
async function upstream(answer) {
  const seen = [];
  const server = http.createServer(async (request, response) => {
    const chunks = [];
    for await (const chunk of request) {
      chunks.push(chunk);
    }
    const { method, url, headers } = request;
    seen.push({ method, url, headers, body: Buffer.concat(chunks).toString() });
    answer(url, response);
  });
  await new Promise((resolve) => server.listen(0, "127.0.0.1", resolve));
  return { url: `http://127.0.0.1:${server.address().port}`, seen, close: () => (server.closeAllConnections(), server.close()) };
}

// Sends a request as it is written here, and returns the response as it is written. workerd leaves connections open.
function raw(port, lines, body = "") {
  return new Promise((resolve, reject) => {
    const socket = net.connect(port, "127.0.0.1");
    let received = "";
    socket.on("data", (data) => {
      received += data.toString("latin1");
      const [head, rest] = received.split(/\r\n\r\n(.*)/s);
      const length = /\r\ncontent-length: (\d+)/i.exec(head)?.[1];
      const whole = length === undefined ? rest?.endsWith("0\r\n\r\n") : rest?.length === Number(length);
      if (whole || (rest !== undefined && lines[0].startsWith("HEAD "))) {
        socket.destroy();
      }
    });
    socket.on("close", () => resolve(received));
    socket.on("error", reject);
    socket.write(Buffer.from([...lines, "", body].join("\r\n"), "latin1"));
  });
}
const status = (received) => Number(received.split(" ")[1]);

// Sends a GET with a client of its own connection. Resolves with the response when its header has come.
function get(port, path, ip) {
  return new Promise((resolve, reject) => {
    const request = http.get({ host: "127.0.0.1", port, path, agent: false, headers: { "cf-connecting-ip": ip } }, resolve);
    request.on("error", reject);
  });
}
async function text(response) {
  const chunks = [];
  for await (const chunk of response) {
    chunks.push(chunk);
  }
  return Buffer.concat(chunks).toString();
}

// Asks again until the answer has this status: a slot is given back after the answer.
async function eventually(expected, ask) {
  for (let left = 100; ; left -= 1) {
    const found = await ask();
    if (found === expected || left === 0) {
      assert.equal(found, expected);
      return;
    }
    await wait(100);
  }
}

const statuses = (answers) => answers.map((answer) => answer.status);
async function repeat(count, send) {
  const answers = [];
  for (let at = 0; at < count; at += 1) {
    answers.push(await send(at));
  }
  return answers;
}

const tests = {
  async "guard limits a handler"() {
    const worker = own();
    const send = () =>
      worker.dispatchFetch("http://own/address", { method: "POST", body: "text", headers: { "cf-connecting-ip": "203.0.113.1" } });
    const answers = await repeat(3, send);
    assert.deepEqual(statuses(answers), [200, 200, 429]);
    assert.equal(await answers[0].text(), "POST /address text");
    assert.equal(answers[0].headers.get("x-own"), "yes");
    assert.equal(answers[0].headers.get("x-ratelimit-remaining"), "1");
    assert.equal((await answers[2].json()).error, "rate_limited");
    return worker;
  },

  async "guard believes the Worker's own authentication, and no header"() {
    const worker = own();
    const send = (path, identity, forged = "") =>
      worker.dispatchFetch(`http://own${path}`, {
        headers: { "cf-connecting-ip": "203.0.113.1", "x-test-identity": JSON.stringify(identity), ...(forged && { "x-user": forged }) },
      });
    assert.deepEqual(statuses(await repeat(4, (at) => send("/user", { user: "a" }, `forged-${at}`))), [200, 200, 200, 429]);
    assert.deepEqual(statuses(await repeat(1, () => send("/user", { user: "b" }))), [200]);
    assert.deepEqual(statuses(await repeat(6, () => send("/user", { user: "c", tier: "paid" }))), [200, 200, 200, 200, 200, 429]);
    assert.deepEqual(statuses(await repeat(3, (at) => send("/tenant", { tenant: "t", user: `u${at}` }))), [200, 200, 429]);
    return worker;
  },

  async "guard refuses arguments of another type"() {
    const worker = own();
    const send = async (path, identity) => {
      const answer = await worker.dispatchFetch(`http://own${path}`, {
        headers: { "cf-connecting-ip": "203.0.113.1", "x-test-identity": JSON.stringify(identity) },
      });
      return [answer.status, await answer.text()];
    };
    assert.deepEqual(await send("/no-handler", {}), [599, "TypeError: guard: the handler is not a function"]);
    assert.deepEqual(await send("/", "a"), [599, "TypeError: guard: the identity is not an object"]);
    assert.deepEqual(await send("/", { user: 7 }), [599, "TypeError: guard: identity.user is not a string"]);
    assert.deepEqual(await send("/", { users: "a" }), [599, "TypeError: guard: identity.users is unknown; it has tenant, user and tier"]);
    assert.equal((await send("/", { user: null }))[0], 200);
    assert.equal((await send("/", null))[0], 200);
    return worker;
  },

  async "a handler that fails is a bad gateway"() {
    const worker = own();
    for (const path of ["/throw", "/nothing"]) {
      const answer = await worker.dispatchFetch(`http://own${path}`, { headers: { "cf-connecting-ip": "203.0.113.1" } });
      assert.equal(answer.status, 502);
      assert.equal(await answer.text(), '{"error":"bad_gateway"}');
    }
    return worker;
  },

  async "api needs no token, and knows its paths"() {
    const worker = own();
    const call = (path, body) => worker.dispatchFetch(`http://api${path}`, { method: "POST", body: JSON.stringify(body) });
    const check = { ip: "203.0.113.1", method: "GET", path: "/address" };
    const decisions = await repeat(3, async () => (await call("/v1/check", check)).json());
    assert.deepEqual(decisions.map((decision) => decision.allowed), [true, true, false]);
    const limit = { key: "k", limit: 1, windowSec: 60 };
    assert.equal((await (await call("/v1/limit", limit)).json()).allowed, true);
    assert.equal((await (await call("/check", limit)).json()).allowed, false);
    for (const path of ["/", "/v1/nope", "/v1/check/", "/v1"]) {
      const unknown = await call(path, {});
      assert.equal(unknown.status, 404, path);
      assert.equal((await unknown.json()).error, "not_found");
    }
    const wrong = await worker.dispatchFetch("http://api/v1/check");
    assert.equal(wrong.status, 405);
    assert.equal(wrong.headers.get("allow"), "POST");
    return worker;
  },

  async "a slot is given back when the response ends or the client leaves"() {
    const open = [];
    const up = await upstream((path, response) => {
      if (path === "/held/quick") {
        response.end("quick");
      } else {
        // The rest comes when the test says so.
        open.push(response);
        if (path === "/held/begun") {
          response.writeHead(200, { "content-length": 1000 });
          response.write("x".repeat(10));
        }
      }
    });
    const { worker, port } = await entry(up.url);
    const quick = async () => {
      const answer = await get(port, "/held/quick", "203.0.113.1");
      await text(answer);
      return answer.statusCode;
    };
    await eventually(200, quick);
    await eventually(200, quick);

    // It leaves in the middle of its answer.
    const begun = await get(port, "/held/begun", "203.0.113.1");
    begun.on("error", () => {});
    await new Promise((resolve) => begun.once("data", resolve));
    assert.equal(await quick(), 429);
    begun.destroy();
    // workerd notices it when it has something to send.
    const dripping = setInterval((response) => response.write("x"), 50, open.pop());
    await eventually(200, quick);
    clearInterval(dripping);

    // It leaves before its answer.
    const leaving = net.connect(port, "127.0.0.1");
    leaving.write("GET /held/later HTTP/1.1\r\nHost: a\r\nCF-Connecting-IP: 203.0.113.1\r\n\r\n");
    await eventually(1, () => open.length);
    assert.equal(await quick(), 429);
    leaving.destroy();
    open.pop().end("later");
    await eventually(200, quick);
    up.close();
    return worker;
  },

  async "a socket holds its slot until it ends"() {
    const script = `export default {
      fetch(request) {
        if (request.headers.get("upgrade") !== "websocket") {
          return new Response("plain");
        }
        const [client, server] = Object.values(new WebSocketPair());
        server.binaryType = "arraybuffer";
        server.accept();
        server.addEventListener("message", ({ data }) => {
          if (data === "end") {
            server.close(4000, "as asked");
          } else {
            server.send(typeof data === "string" ? "echo " + data : data);
          }
        });
        return new Response(null, { status: 101, webSocket: client, headers: { "x-upstream": "yes" } });
      },
    };`;
    const { worker } = await entry(undefined, script);
    const send = (path, headers = {}) =>
      worker.dispatchFetch(`http://entry${path}`, { headers: { "cf-connecting-ip": "203.0.113.1", ...headers } });
    const plain = async () => (await send("/held/plain")).status;
    for (const who of ["upstream", "client"]) {
      const answer = await send("/held/socket", { upgrade: "websocket" });
      assert.equal(answer.status, 101);
      assert.equal(answer.headers.get("x-upstream"), "yes");
      const socket = answer.webSocket;
      const messages = [];
      const closed = new Promise((resolve) => socket.addEventListener("close", resolve));
      socket.addEventListener("message", ({ data }) => messages.push(data));
      socket.accept();
      socket.send("hello");
      socket.send(new Uint8Array([1, 2, 3]));
      await eventually(2, () => messages.length);
      assert.equal(messages[0], "echo hello");
      assert.deepEqual(new Uint8Array(messages[1]), new Uint8Array([1, 2, 3]));
      assert.equal(await plain(), 429);
      if (who === "upstream") {
        socket.send("end");
        const { code, reason } = await closed;
        assert.deepEqual([code, reason], [4000, "as asked"]);
      } else {
        socket.close(1000, "enough");
      }
      await eventually(200, plain);
    }
    return worker;
  },

  async "a length stays, and a broken answer is an error"() {
    const up = await upstream((path, response) => {
      if (path.endsWith("/break")) {
        response.writeHead(200, { "content-length": 1000 });
        response.write("x".repeat(10), () => response.destroy());
      } else if (path.endsWith("/stream")) {
        response.write("a");
        response.end("b");
      } else if (path.endsWith("/cookies")) {
        response.writeHead(404, "Not Here", { "set-cookie": ["a=1", "b=2"], "x-name": "caf\u00e9" });
        response.end("none");
      } else {
        response.writeHead(200, { "content-length": 4 });
        response.end("text");
      }
    });
    const { worker, port } = await entry(up.url);
    const header = ["Host: a", "CF-Connecting-IP: 203.0.113.2"];
    for (const path of ["/free", "/held/one", "/bytes/one"]) {
      const answer = await raw(port, [`POST ${path} HTTP/1.1`, ...header, "Content-Length: 3"], "abc");
      assert.match(answer, /^HTTP\/1.1 200 OK\r\n/, path);
      assert.match(answer, /\r\nContent-Length: 4\r\n/i, path);
      assert.doesNotMatch(answer, /transfer-encoding/i, path);
      const { headers, body } = up.seen.pop();
      assert.deepEqual([headers["content-length"], headers["transfer-encoding"], body], ["3", undefined, "abc"], path);
      const chunked = await raw(port, [`POST ${path} HTTP/1.1`, ...header, "Transfer-Encoding: chunked"], "3\r\nabc\r\n0\r\n\r\n");
      // A slot is given back after the answer.
      if (status(chunked) === 200) {
        assert.equal(up.seen.pop().body, "abc", path);
      } else {
        assert.equal(path, "/held/one");
      }
    }
    assert.match(await raw(port, ["HEAD /free HTTP/1.1", ...header]), /\r\nContent-Length: 4\r\n/i);
    for (const length of ["0", "3"]) {
      assert.equal(status(await raw(port, ["GET /free HTTP/1.1", ...header, `Content-Length: ${length}`], "abc".slice(0, length))), 200);
    }
    assert.match(await raw(port, ["GET /stream HTTP/1.1", ...header]), /\r\n\r\n(1\r\na\r\n1\r\nb|2\r\nab)\r\n0\r\n\r\n$/);
    const cookies = await raw(port, ["GET /cookies HTTP/1.1", ...header]);
    assert.match(cookies, /^HTTP\/1.1 404 Not Here\r\n/);
    assert.deepEqual(cookies.match(/set-cookie: .=./gi).map((line) => line.slice(-3)), ["a=1", "b=2"]);
    for (const path of ["/free/break", "/held/break"]) {
      const broken = await get(port, path, "203.0.113.3");
      assert.equal(broken.headers["content-length"], "1000");
      await assert.rejects(text(broken), path);
    }
    up.close();
    return worker;
  },

  async "bytes are counted as they stream"() {
    const up = await upstream((_, response) => response.end("text"));
    const { worker, port } = await entry(up.url);
    const header = ["Host: a", "CF-Connecting-IP: 203.0.113.4"];
    const chunks = "1f4\r\n" + "x".repeat(500) + "\r\n0\r\n\r\n";
    const stream = () => raw(port, ["POST /bytes/x HTTP/1.1", ...header, "Transfer-Encoding: chunked"], chunks);
    const known = (length) => raw(port, ["POST /bytes/x HTTP/1.1", ...header, `Content-Length: ${length}`], "x".repeat(length));
    assert.equal(status(await stream()), 200);
    // They are charged after the answer.
    await eventually(429, async () => status(await known(501)));
    assert.equal(status(await known(499)), 200);
    assert.equal(status(await known(2)), 429);
    assert.equal(status(await known(1001)), 413);
    assert.deepEqual(up.seen.map(({ body }) => body.length), [500, 499]);
    up.close();
    return worker;
  },

  async "an odd request is answered, and not with 500"() {
    const up = await upstream((_, response) => response.end("text"));
    const { worker, port } = await entry(up.url);
    const send = (path, ...more) => raw(port, [`GET ${path} HTTP/1.1`, "Host: a", "CF-Connecting-IP: 203.0.113.5", ...more]);
    for (const path of ["/a<b", "/a>b", "/a`b", "/a^b", "/a\\b", '/a"b', "/a{b}", "/a|b", "/a%b", "/a%zz", "/a\xffb", "/a\xc3\xa9", "/?q=<a>", "/?q=\xff", "/#a"]) {
      assert.ok([200, 400].includes(status(await send(path))), `${path}: ${await send(path)}`);
    }
    const odd = await send("/a<b");
    assert.equal(status(odd), 400);
    assert.equal(JSON.parse(odd.split("\r\n\r\n")[1]).field, "path");
    const long = await send("/" + "a".repeat(65_530));
    assert.ok([400, 414, 431].includes(status(long)), long.slice(0, 200));
    assert.equal(status(await send("/" + "a".repeat(70_000))), 414);
    assert.equal(status(await send("/free", "X-Name: caf\xe9")), 200);
    assert.equal(up.seen.pop().headers["x-name"], "caf\xe9");
    up.close();
    return worker;
  },

  async "a name comes from a token that verifies, and from no other"() {
    const encode = (value) => Buffer.from(typeof value === "string" ? value : JSON.stringify(value)).toString("base64url");
    const signed = (header, claims, sign) => {
      const message = `${encode(header)}.${encode(claims)}`;
      return `${message}.${sign(message).toString("base64url")}`;
    };
    const hmac = (secret) => (message) => createHmac("sha256", secret).update(message).digest();
    const now = Math.floor(Date.now() / 1000);
    const [secret, other] = ["a secret of at least thirty-two bytes", "another secret of thirty-two bytes.."];
    const claims = { sub: "alice", team: "acme", plan: "paid", exp: now + 600, iss: "https://id.example.com" };
    const HS256 = { alg: "HS256", typ: "JWT" };
    const policy = (alg) => `
      [identity]
      client_ip = "cf-connecting-ip"
      tenant = "claim:team"
      user = "claim:sub"
      tier = "claim:plan"
      default_tier = "free"
      [identity.jwt]
      alg = "${alg}"
      key = "\${JWT_KEY}"
      iss = "https://id.example.com"
      [tiers.free]
      reads = "1/h"
      [tiers.paid]
      reads = "3/h"
      [[rule]]
      name = "user"
      per = ["tenant", "user"]
      limit = "tier:reads"
      `;
    const remaining = async (worker, token, ip) => {
      const headers = { "cf-connecting-ip": ip, "x-user": "forged", "x-tenant": "forged", "x-tier": "paid" };
      const answer = await worker.dispatchFetch("http://own/", { headers: { ...headers, ...(token && { authorization: `Bearer ${token}` }) } });
      return [answer.status, Number(answer.headers.get("x-ratelimit-limit"))];
    };
    const worker = own({ THRESHOLD_POLICY: policy("HS256"), JWT_KEY: secret });
    const valid = signed(HS256, claims, hmac(secret));
    // Four of one user, from four addresses.
    const answers = await repeat(4, (at) => remaining(worker, valid, `203.0.113.${at}`));
    assert.deepEqual(answers, [[200, 3], [200, 3], [200, 3], [429, 3]]);
    const bad = {
      none: `${encode({ alg: "none" })}.${encode(claims)}.`,
      "none in other letters": `${encode({ alg: "nOnE" })}.${encode(claims)}.`,
      forged: signed(HS256, claims, hmac(other)),
      changed: valid.replace(/\.[^.]*\./, `.${encode({ ...claims, sub: "bob" })}.`),
      unsigned: valid.replace(/[^.]*$/, ""),
      expired: signed(HS256, { ...claims, exp: now - 61 }, hmac(secret)),
      endless: signed(HS256, { ...claims, exp: undefined }, hmac(secret)),
      early: signed(HS256, { ...claims, nbf: now + 120 }, hmac(secret)),
      issuer: signed(HS256, { ...claims, iss: "https://evil.example.com" }, hmac(secret)),
      audience: signed(HS256, { ...claims, aud: "another" }, hmac(secret)),
      critical: signed({ ...HS256, crit: ["x"] }, claims, hmac(secret)),
      algorithm: signed({ alg: "HS512" }, claims, (message) => createHmac("sha512", secret).update(message).digest()),
      twice: signed(HS256, JSON.stringify(claims).replace("{", '{"sub":"bob",'), hmac(secret)),
      long: signed(HS256, { ...claims, pad: "x".repeat(9000) }, hmac(secret)),
      nothing: "",
      dots: "..",
    };
    let at = 10;
    for (const [name, token] of Object.entries(bad)) {
      at += 1;
      // It counts by its address, in the lowest tier.
      assert.deepEqual(await repeat(2, () => remaining(worker, token, `203.0.113.${at}`)), [[200, 1], [429, 1]], name);
    }
    await worker.dispose();

    const pair = {
      RS256: generateKeyPairSync("rsa", { modulusLength: 2048 }),
      ES256: generateKeyPairSync("ec", { namedCurve: "P-256" }),
      EdDSA: generateKeyPairSync("ed25519"),
    };
    for (const [alg, { publicKey, privateKey }] of Object.entries(pair)) {
      const sign = (message) => createSign(alg === "EdDSA" ? null : "sha256", Buffer.from(message), { key: privateKey, dsaEncoding: "ieee-p1363" });
      const pem = publicKey.export({ type: "spki", format: "pem" });
      const jwks = JSON.stringify({ keys: [{ kty: "oct", k: "AAAA" }, { ...publicKey.export({ format: "jwk" }), kid: "one", use: "sig" }] });
      for (const key of [pem, jwks]) {
        const worker = own({ THRESHOLD_POLICY: policy(alg), JWT_KEY: key });
        assert.deepEqual(await remaining(worker, signed({ alg, kid: "one" }, claims, sign), "203.0.113.1"), [200, 3], alg);
        // The public key is known to everyone, and is no secret.
        const confused = signed(HS256, claims, hmac(key));
        assert.deepEqual(await remaining(worker, confused, "203.0.113.2"), [200, 1], alg);
        assert.deepEqual(await remaining(worker, signed({ alg, kid: "one" }, claims, () => sign("another")), "203.0.113.3"), [200, 1], alg);
        if (key === jwks) {
          assert.deepEqual(await remaining(worker, signed({ alg, kid: "two" }, claims, sign), "203.0.113.4"), [200, 1], alg);
        }
        await worker.dispose();
      }
    }

    const weak = generateKeyPairSync("rsa", { modulusLength: 1024 }).publicKey.export({ type: "spki", format: "pem" });
    const wrong = [
      [policy("HS256"), "too short"],
      [policy("HS256"), pair.RS256.publicKey.export({ type: "spki", format: "pem" })],
      [policy("HS256"), '{"a secret": "of at least thirty-two bytes"}'],
      [policy("RS256"), secret],
      [policy("RS256"), weak],
      [policy("RS256"), pair.RS256.privateKey.export({ type: "pkcs8", format: "pem" })],
      [policy("ES256"), pair.RS256.publicKey.export({ type: "spki", format: "pem" })],
      [policy("RS256").replace("key = ", "key_file = "), "/keys.json"],
    ];
    for (const [policy, key] of wrong) {
      const worker = own({ THRESHOLD_POLICY: policy, JWT_KEY: key });
      const answer = await worker.dispatchFetch("http://own/", { headers: { "cf-connecting-ip": "203.0.113.1" } });
      assert.deepEqual([answer.status, await answer.text()], [500, '{"error":"misconfigured"}'], key);
      await worker.dispose();
    }
  },

  async "a request in flight takes less than 100 KB"() {
    // Catches the memory of the module when it is made.
    const hook = `const Instance = WebAssembly.Instance;
      export let memory;
      WebAssembly.Instance = function (module, imports) {
        const made = new Instance(module, imports);
        memory = made.exports.memory;
        return made;
      };`;
    const script = `import { memory } from "./hook.js";
      import { guard, ThresholdObject } from "./index.js";
      export { ThresholdObject };
      // Sends requests that all wait for each other, and returns by how much the memory has grown.
      async function grown(count, env, ctx) {
        const before = memory.buffer.byteLength;
        let inside = 0;
        let release;
        const gate = new Promise((resolve) => (release = resolve));
        const handler = async () => {
          inside += 1;
          if (inside === count) {
            release();
          }
          await gate;
          return new Response("text");
        };
        const send = (_, at) =>
          guard(new Request("http://own/address", { headers: { "cf-connecting-ip": "10.0.0." + at } }), env, ctx, handler);
        const answers = await Promise.all(Array.from({ length: count }, send));
        return answers.every(({ status }) => status === 200) ? memory.buffer.byteLength - before : Infinity;
      }
      export default {
        async fetch(request, env, ctx) {
          await grown(1, env, ctx);
          return Response.json(await grown(100, env, ctx));
        },
      };`;
    const parts = [
      { type: "ESModule", path: join(folder, "own.js"), contents: script },
      { type: "ESModule", path: join(folder, "hook.js"), contents: hook },
    ];
    const worker = start({ name: "own", ...settings({}), modules: [...parts, ...index] });
    const grown = await (await worker.dispatchFetch("http://own/")).json();
    assert.ok(grown < 100 * 100_000, `100 requests took ${grown} bytes`);
    return worker;
  },

  async "the token stays at the door, and a call is read no further than its bound"() {
    const up = await upstream((_, response) => response.end("text"));
    const { worker, port } = await entry(up.url);
    const call = (method, path, ...more) => raw(port, [`${method} ${path} HTTP/1.1`, "Host: a", `Authorization: Bearer ${TOKEN}`, ...more]);
    for (const path of ["/v1/nope", "/v1/check/", "/v1", "/", "/free"]) {
      const answer = await call("POST", path, "Content-Length: 0");
      assert.equal(status(answer), 404, path);
      assert.equal(JSON.parse(answer.split("\r\n\r\n")[1]).error, "not_found");
    }
    assert.equal(status(await call("GET", "/v1/check")), 405);
    // Other spellings, and a second line.
    for (const line of [`bearer ${TOKEN}`, `BEARER   ${TOKEN}  `, `Basic eA==, Bearer ${TOKEN}`, `Bearer x\r\nAuthorization: Bearer ${TOKEN}`]) {
      const answer = await raw(port, ["GET /free HTTP/1.1", "Host: a", `Authorization: ${line}`]);
      assert.equal(status(answer), 404, line);
    }
    assert.deepEqual(up.seen, []);
    // Neither of the two ends by itself.
    const announced = net.connect(port, "127.0.0.1");
    const endless = net.connect(port, "127.0.0.1");
    const answers = [announced, endless].map((socket) => new Promise((resolve) => socket.once("data", (data) => resolve(status(String(data))))));
    const header = `POST /v1/check HTTP/1.1\r\nHost: a\r\nAuthorization: Bearer ${TOKEN}\r\n`;
    announced.write(`${header}Content-Length: 70000\r\n\r\n{`);
    endless.write(`${header}Transfer-Encoding: chunked\r\n\r\n${("2710\r\n" + " ".repeat(10_000) + "\r\n").repeat(7)}`);
    assert.deepEqual(await Promise.all(answers), [413, 413]);
    announced.destroy();
    endless.destroy();
    up.close();
    return worker;
  },
};

await runAll(tests);
