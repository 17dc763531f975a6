// Runs the Worker of a folder on workerd, with the bindings of its wrangler.toml. Called by `serve`, which checks the arguments.
//
//   node serve.mjs NODE_MODULES FOLDER PORT [DIR]

import { existsSync, readFileSync } from "node:fs";
import { createRequire } from "node:module";
import { createServer } from "node:net";
import { basename, extname, join, resolve } from "node:path";

const [modules, folder, port, persist] = process.argv.slice(2);
const packages = createRequire(join(modules, "/"));
const esbuild = packages("esbuild");
const { Log, LogLevel, Miniflare } = packages("miniflare");
const { parse } = packages("smol-toml");

const HOST = "127.0.0.1";

class Refusal extends Error {}

// What wrangler.toml may say. A binding that is not served would be missing without a word.
const KNOWN = new Set([
  ...["name", "main", "compatibility_date", "compatibility_flags", "alias", "rules", "vars", "triggers", "observability"],
  ...["kv_namespaces", "durable_objects", "migrations", "d1_databases"],
]);

function readConfig() {
  const path = join(folder, "wrangler.toml");
  let config;
  try {
    config = parse(readFileSync(path, "utf8"));
  } catch (error) {
    throw new Refusal(`${path}: ${error.message}`);
  }
  const unknown = Object.keys(config).find((key) => !KNOWN.has(key));
  if (unknown !== undefined) {
    throw new Refusal(`${path}: serve does not know "${unknown}"`);
  }
  for (const key of ["main", "compatibility_date"]) {
    if (typeof config[key] !== "string") {
      throw new Refusal(`${path}: "${key}" is missing`);
    }
  }
  return config;
}

// The values of wrangler.toml, then the development secrets of `.dev.vars`, then the environment, for names that one of the two has.
function variables(config) {
  const path = join(folder, ".dev.vars");
  const lines = existsSync(path) ? readFileSync(path, "utf8").split("\n") : [];
  const secrets = lines.filter((line) => /^\w+=/.test(line)).map((line) => [line.split("=", 1)[0], line.slice(line.indexOf("=") + 1)]);
  const all = { ...config.vars, ...Object.fromEntries(secrets) };
  return Object.fromEntries(Object.entries(all).map(([name, value]) => [name, process.env[name] ?? value]));
}

// Bundles the Worker as `wrangler deploy` does: wasm and the files of its rules stay modules.
async function bundle(config) {
  const texts = (config.rules ?? []).filter((rule) => rule.type === "Text").flatMap((rule) => rule.globs);
  const main = join(folder, config.main);
  const out = join(folder, "bundle");
  const built = await esbuild.build({
    entryPoints: [main],
    bundle: true,
    write: false,
    format: "esm",
    target: "es2022",
    outdir: out,
    assetNames: "[name]",
    logLevel: "warning",
    external: ["cloudflare:*"],
    alias: Object.fromEntries(Object.entries(config.alias ?? {}).map(([name, path]) => [name, resolve(folder, path)])),
    loader: { ".wasm": "copy", ...Object.fromEntries(texts.map((glob) => [extname(glob), "text"])) },
  });
  const entry = join(out, `${basename(main, extname(main))}.js`);
  const types = { ".js": "ESModule", ".wasm": "CompiledWasm" };
  const found = built.outputFiles.map(({ path, contents }) => ({ type: types[extname(path)], path, contents }));
  return { modulesRoot: out, modules: found.sort((one, other) => (other.path === entry) - (one.path === entry)) };
}

// The options of miniflare for the bindings.
function bindings(config) {
  const sqlite = new Set((config.migrations ?? []).flatMap((migration) => migration.new_sqlite_classes ?? []));
  const objects = (config.durable_objects?.bindings ?? []).map(({ name, class_name }) => [name, { className: class_name, useSQLite: sqlite.has(class_name) }]);
  const namespaces = (config.kv_namespaces ?? []).map(({ binding }) => [binding, binding]);
  const databases = (config.d1_databases ?? []).map(({ binding }) => [binding, binding]);
  return {
    bindings: variables(config),
    durableObjects: Object.fromEntries(objects),
    kvNamespaces: Object.fromEntries(namespaces),
    d1Databases: Object.fromEntries(databases),
  };
}

// Workerd would fail with a message of its own, or take another port.
function checkPort() {
  return new Promise((done, refused) => {
    const server = createServer();
    server.once("error", (error) => refused(new Refusal(`port ${port} cannot be used: ${error.code}`)));
    server.listen({ host: HOST, port: Number(port) }, () => server.close(done));
  });
}

// Standard output has only `ready`.
class ErrorLog extends Log {
  log(message) {
    console.error(message);
  }
}

async function run() {
  const config = readConfig();
  await checkPort();
  const kept = (kind) => (persist === undefined ? undefined : join(persist, kind));
  const worker = new Miniflare({
    host: HOST,
    port: Number(port),
    log: new ErrorLog(LogLevel.ERROR),
    handleStructuredLogs: ({ message }) => console.error(message),
    // Without it miniflare asks Cloudflare where this machine is.
    cf: false,
    telemetry: { enabled: false },
    kvPersist: kept("kv"),
    durableObjectsPersist: kept("objects"),
    d1Persist: kept("d1"),
    // /cdn-cgi/handler/scheduled runs the scheduled handler; /cdn-cgi/explorer/api reads and writes namespaces and databases.
    unsafeTriggerHandlers: config.triggers !== undefined,
    unsafeLocalExplorer: true,
    name: config.name ?? basename(folder),
    compatibilityDate: config.compatibility_date,
    compatibilityFlags: config.compatibility_flags,
    ...(await bundle(config)),
    ...bindings(config),
  });
  let stopping = false;
  const stop = () => {
    if (!stopping) {
      stopping = true;
      worker.dispose().then(() => process.exit(0));
    }
  };
  for (const signal of ["SIGTERM", "SIGINT"]) {
    // Miniflare's own handlers exit before the runtime has stopped.
    process.removeAllListeners(signal).on(signal, stop);
  }
  await worker.ready;
  console.log("ready");
}

run().catch((error) => {
  console.error(error instanceof Refusal ? `serve: ${error.message}` : error);
  process.exit(1);
});
