// Sessions: `Authorization: Bearer CLAIMS.SIGNATURE`, both in base64url. The claims are JSON with `tenant` and `user`.

const encoder = new TextEncoder();
const encode = (bytes) => btoa(String.fromCharCode(...bytes)).replaceAll("+", "-").replaceAll("/", "_").replaceAll("=", "");
const decode = (text) => Uint8Array.from(atob(text.replaceAll("-", "+").replaceAll("_", "/")), (letter) => letter.charCodeAt(0));
const importKey = (key) => crypto.subtle.importKey("raw", encoder.encode(key), { name: "HMAC", hash: "SHA-256" }, false, ["sign", "verify"]);

// Returns the tenant and the user of a session; undefined if it is missing or was not signed with this key.
export async function readSession(authorization, key) {
  const [, claims, signature] = /^Bearer ([\w-]+)\.([\w-]+)$/.exec(authorization ?? "") ?? [];
  if (claims === undefined || !key) {
    return undefined;
  }
  try {
    const isOurs = await crypto.subtle.verify("HMAC", await importKey(key), decode(signature), encoder.encode(claims));
    const { tenant, user } = JSON.parse(new TextDecoder().decode(decode(claims)));
    return isOurs ? { tenant, user } : undefined;
  } catch {
    return undefined;
  }
}

// Signs a session, as a login would.
export async function signSession(tenant, user, key) {
  const claims = encode(encoder.encode(JSON.stringify({ tenant, user })));
  const signature = await crypto.subtle.sign("HMAC", await importKey(key), encoder.encode(claims));
  return `${claims}.${encode(new Uint8Array(signature))}`;
}
