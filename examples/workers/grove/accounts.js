// Accounts, passwords and sessions: what a platform has of its own, as small as it can be.

// The most that Workers compute.
const ITERATIONS = 100_000;
const HOUR = 3_600;
const MONTH = 30 * 24 * HOUR;

const encoder = new TextEncoder();
const toBase64 = (bytes) => btoa(String.fromCharCode(...new Uint8Array(bytes))).replaceAll("+", "-").replaceAll("/", "_").replaceAll("=", "");
const fromBase64 = (text) => Uint8Array.from(atob(text.replaceAll("-", "+").replaceAll("_", "/")), (one) => one.charCodeAt(0));

// The name that an account is stored under, whatever its spelling.
export const canonical = (name) => name.normalize("NFKC").trim().toLowerCase();

async function derive(password, salt) {
  const key = await crypto.subtle.importKey("raw", encoder.encode(password), "PBKDF2", false, ["deriveBits"]);
  return crypto.subtle.deriveBits({ name: "PBKDF2", hash: "SHA-256", salt, iterations: ITERATIONS }, key, 256);
}

// Whether this isolate knows that the tables exist.
let created = false;

async function database({ ACCOUNTS: db }) {
  if (!created) {
    await db.batch([
      db.prepare("CREATE TABLE IF NOT EXISTS tenants (name TEXT PRIMARY KEY, tier TEXT NOT NULL)"),
      db.prepare("CREATE TABLE IF NOT EXISTS accounts (name TEXT PRIMARY KEY, tenant TEXT NOT NULL, salt TEXT NOT NULL, hash TEXT NOT NULL)"),
    ]);
    created = true;
  }
  return db;
}

// Creates an account and its tenant. Returns whether both names were free.
export async function signUp(env, { username, password, tenant }) {
  const salt = crypto.getRandomValues(new Uint8Array(16));
  const hash = await derive(password, salt);
  const db = await database(env);
  try {
    await db.batch([
      db.prepare("INSERT INTO tenants VALUES (?, 'seedling')").bind(tenant),
      db.prepare("INSERT INTO accounts VALUES (?, ?, ?, ?)").bind(canonical(username), tenant, toBase64(salt), toBase64(hash)),
    ]);
    return true;
  } catch (error) {
    if (String(error).includes("UNIQUE")) {
      return false;
    }
    throw error;
  }
}

export async function remove(env, user) {
  await (await database(env)).prepare("DELETE FROM accounts WHERE name = ?").bind(user).run();
}

// Returns the tier of a tenant; undefined where there is no such tenant.
export async function tierOf(env, tenant) {
  return (await (await database(env)).prepare("SELECT tier FROM tenants WHERE name = ?").bind(tenant).first("tier")) ?? undefined;
}

// Returns the account if the password is right, else null.
export async function verify(env, username, password) {
  const found = await (await database(env)).prepare("SELECT * FROM accounts WHERE name = ?").bind(canonical(username)).first();
  // An unknown account takes as long as a known one.
  const hash = await derive(password, found === null ? new Uint8Array(16) : fromBase64(found.salt));
  const known = found === null ? new Uint8Array(32) : fromBase64(found.hash);
  return crypto.subtle.timingSafeEqual(hash, known) && found !== null ? { user: found.name, tenant: found.tenant } : null;
}

const signingKey = (env) =>
  crypto.subtle.importKey("raw", encoder.encode(env.SESSION_SECRET), { name: "HMAC", hash: "SHA-256" }, false, ["sign", "verify"]);

async function signed(env, content) {
  const text = toBase64(encoder.encode(JSON.stringify(content)));
  return `${text}.${toBase64(await crypto.subtle.sign("HMAC", await signingKey(env), encoder.encode(text)))}`;
}

// Returns the content of a token that this Worker has signed for this use and that has not ended, else null.
async function opened(env, use, token) {
  const [text, signature] = token.split(".");
  try {
    if (!(await crypto.subtle.verify("HMAC", await signingKey(env), fromBase64(signature), encoder.encode(text)))) {
      return null;
    }
    const content = JSON.parse(new TextDecoder().decode(fromBase64(text)));
    return content.use === use && content.until > Date.now() / 1_000 ? content : null;
  } catch {
    return null;
  }
}

// Makes the tokens of a session, as OAuth answers them.
export async function issue(env, { user, tenant }) {
  const now = Math.floor(Date.now() / 1_000);
  return {
    access_token: await signed(env, { use: "session", user, tenant, until: now + HOUR }),
    refresh_token: await signed(env, { use: "refresh", user, tenant, until: now + MONTH }),
    token_type: "Bearer",
    expires_in: HOUR,
  };
}

export const refresh = (env, token) => opened(env, "refresh", token);

// Returns the session of a request, from its bearer token, else null.
export async function session(env, request) {
  const [, token] = /^Bearer (\S+)$/.exec(request.headers.get("authorization") ?? "") ?? [];
  return token === undefined ? null : opened(env, "session", token);
}
