// `examples/workers/serve` itself.

import assert from "node:assert/strict";
import { createServer } from "node:net";
import { writeFileSync } from "node:fs";
import { join } from "node:path";

import { freePort, newFolder, runServe, start } from "./world.mjs";

const WRANGLER = `
name = "small"
main = "index.js"
compatibility_date = "2026-04-01"
kv_namespaces = [{ binding = "KEPT", id = "kept" }]
d1_databases = [{ binding = "DB", database_name = "db", database_id = "db" }]
triggers = { crons = ["0 * * * *"] }
[vars]
WHO = "wrangler"
`;
const SCRIPT = `
export default {
  async fetch(request, env) {
    const before = await env.KEPT.get("scheduled");
    const { one } = await env.DB.prepare("SELECT 1 AS one").first();
    return Response.json({ who: env.WHO, secret: env.SECRET, ip: request.headers.get("cf-connecting-ip"), before, one });
  },
  async scheduled(event, env) {
    await env.KEPT.put("scheduled", "yes");
  },
};
`;

export async function serve(test) {
  await test("bad arguments are refused with a reason", async () => {
    const bad = [
      [[], "NAME and PORT are missing"],
      [["chat-tenants"], "NAME and PORT are missing"],
      [["no-such-system", "8787"], 'no example "no-such-system"; there are: chat-tenants'],
      [["chat-tenants", "http"], "PORT is a number"],
      [["chat-tenants", "70000"], "PORT is a number"],
      [["chat-tenants", "8787", "--persist"], "--persist needs a folder"],
      [["chat-tenants", "8787", "--fast"], "unknown argument: --fast"],
    ];
    for (const [args, reason] of bad) {
      const { status, out, err } = await runServe(...args);
      assert.equal(status, 2, args.join(" "));
      assert.equal(out, "");
      assert.ok(err.includes(reason), err);
    }
  });

  const folder = newFolder();
  writeFileSync(join(folder, "wrangler.toml"), WRANGLER);
  writeFileSync(join(folder, "index.js"), SCRIPT);
  writeFileSync(join(folder, ".dev.vars"), "# A comment.\nSECRET=a=b\n");

  await test("a port in use and a binding that is not known are refused", async () => {
    const port = await freePort();
    const server = createServer();
    await new Promise((listening) => server.listen(port, "127.0.0.1", listening));
    const taken = await runServe(folder, String(port));
    await new Promise((closed) => server.close(closed));
    assert.equal(taken.status, 1);
    assert.match(taken.err, new RegExp(`port ${port} cannot be used: EADDRINUSE`));
    const other = newFolder();
    writeFileSync(join(other, "wrangler.toml"), `${WRANGLER}\n[[r2_buckets]]\nbinding = "B"\n`);
    const unknown = await runServe(other, String(port));
    assert.equal(unknown.status, 1);
    assert.match(unknown.err, /serve does not know "r2_buckets"/);
  });

  await test("bindings come from wrangler.toml, secrets from .dev.vars, and the environment replaces values", async () => {
    const worker = await start(folder, { env: { WHO: "environment" } });
    const seen = await (await worker.fetch("/", { headers: { "cf-connecting-ip": "203.0.113.1" } })).json();
    assert.deepEqual(seen, { who: "environment", secret: "a=b", ip: "203.0.113.1", before: null, one: 1 });
    assert.equal((await (await worker.fetch("/")).json()).ip, "127.0.0.1");
    await worker.stop();
  });

  await test("a scheduled handler runs, --persist keeps what it wrote, and SIGTERM and SIGINT stop it", async () => {
    const args = ["--persist", join(newFolder(), "kept")];
    const first = await start(folder, { args });
    assert.equal((await first.fetch("/cdn-cgi/handler/scheduled")).status, 200);
    assert.equal(await first.stop("SIGTERM"), 0);
    const second = await start(folder, { args });
    assert.equal((await (await second.fetch("/")).json()).before, "yes");
    assert.equal(await second.stop("SIGINT"), 0);
  });
}
