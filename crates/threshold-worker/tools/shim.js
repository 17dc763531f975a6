// The entry of the Worker: hands events to Rust, and starts the wasm again after a panic.

import { DurableObject, WorkerEntrypoint } from "cloudflare:workers";
import * as rust from "./bindings.js";

const state = rust.__worker_init_state();

function noteTrap(error) {
  if (error instanceof WebAssembly.RuntimeError) {
    console.error("panic", error);
    state.criticalError = true;
  }
}

// A panic in a task that no event waits for.
addEventListener("error", (event) => noteTrap(event.error));

// The memory of an instance that has panicked may be half changed, so no later event may see it.
function restartAfterPanic() {
  if (state.criticalError) {
    rust.__wbg_reset_state();
    state.criticalError = false;
    state.instanceId += 1;
  }
}

async function guarded(run) {
  restartAfterPanic();
  try {
    return await run();
  } catch (error) {
    noteTrap(error);
    throw error;
  }
}

export default class Entrypoint extends WorkerEntrypoint {
  fetch(request) {
    return guarded(() => rust.fetch(request, this.env, this.ctx));
  }

  scheduled() {
    return guarded(() => rust.scheduled(this.env));
  }
}

// For the JavaScript of a Worker that imports this module: guards `handler`, a function that answers a Request, and decides on what
// the Worker's own authentication says of the caller.
export function guard(request, env, ctx, handler, identity) {
  return guarded(() => rust.guard(request, env, ctx, handler, identity));
}

// Answers a call of the API for the same JavaScript, without a token.
export function api(request, env, ctx) {
  return guarded(() => rust.api(request, env, ctx));
}

// Does what is due every minute, for the same JavaScript.
export function scheduled(controller, env) {
  return guarded(() => rust.scheduled(env));
}

// An object of Rust belongs to one instance of the wasm. After a restart it is made again from the same state: rows survive, fields
// in memory do not.
function durableObject(name) {
  const own = class extends DurableObject {
    #object;
    #instance;

    #current() {
      if (this.#object === undefined || this.#instance !== state.instanceId) {
        this.#object = new rust[name](this.ctx, this.env);
        this.#instance = state.instanceId;
      }
      return this.#object;
    }

    fetch(request) {
      return guarded(() => this.#current().fetch(request));
    }

    async alarm(info) {
      await guarded(() => this.#current().alarm(info));
      // What is left belongs to the class that extends this one, if there is one.
      if (this.constructor === own) {
        await deleteEmpty(this.ctx.storage);
      }
    }
  };
  return own;
}

// Deletes the storage of an object in which nobody has anything. Without storage the object costs nothing, and does not exist until it
// is asked again.
async function deleteEmpty(storage) {
  const alarm = await storage.getAlarm();
  const tables = storage.sql.exec("SELECT 1 FROM sqlite_master WHERE name NOT GLOB '_cf_*' LIMIT 1").toArray();
  const entries = [...storage.kv.list({ limit: 1 })];
  if (alarm === null && tables.length === 0 && entries.length === 0) {
    await storage.deleteAll();
  }
}
