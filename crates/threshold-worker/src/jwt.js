// Keys and signatures of bearer tokens, with the cryptography of the platform.

const HASH = { 256: "SHA-256", 384: "SHA-384", 512: "SHA-512" };

// Returns the algorithm that keys are imported for, the one that signatures are verified with, and which JWKs fit.
function algorithm(alg) {
  const hash = HASH[alg.slice(2)];
  switch (alg) {
    case "HS256":
    case "HS384":
    case "HS512":
      return { import: { name: "HMAC", hash }, verify: "HMAC", kty: "oct", bytes: Number(alg.slice(2)) / 8 };
    case "RS256":
    case "RS384":
    case "RS512":
      return { import: { name: "RSASSA-PKCS1-v1_5", hash }, verify: "RSASSA-PKCS1-v1_5", kty: "RSA" };
    case "ES256":
    case "ES384": {
      const namedCurve = `P-${alg.slice(2)}`;
      return { import: { name: "ECDSA", namedCurve }, verify: { name: "ECDSA", hash }, kty: "EC", crv: namedCurve };
    }
    case "EdDSA":
      return { import: { name: "Ed25519" }, verify: "Ed25519", kty: "OKP", crv: "Ed25519" };
    default:
      throw new Error("the algorithm is not supported");
  }
}

const parsed = (text) => {
  try {
    return JSON.parse(text);
  } catch {
    return undefined;
  }
};

async function imported(own, format, data, damaged) {
  let key;
  try {
    key = await crypto.subtle.importKey(format, data, own.import, false, ["verify"]);
  } catch {
    // Its message could repeat something of the key.
    throw new Error(damaged);
  }
  const { modulusLength: bits } = key.algorithm;
  if (bits !== undefined && (bits < 2048 || bits > 8192)) {
    throw new Error(`this RSA key has ${bits} bits, and 2048 to 8192 are accepted`);
  }
  return key;
}

function secret(own, alg, bytes) {
  if (bytes.length < own.bytes) {
    throw new Error(`the secret is too short: ${alg} takes at least ${own.bytes} bytes`);
  }
  return imported(own, "raw", bytes, "the secret cannot be used");
}

function octets(text) {
  return Uint8Array.from(atob(text.replaceAll("-", "+").replaceAll("_", "/")), (char) => char.charCodeAt(0));
}

async function jwk(own, alg, { kty, crv, n, e, x, y, k }) {
  if (kty === "oct") {
    return secret(own, alg, octets(String(k)));
  }
  // Without what is private, and without restrictions that were checked already.
  return imported(own, "jwk", { kty, crv, n, e, x, y }, "the JWK cannot be decoded");
}

// Returns whether a key of a set is meant for verifying signatures of this algorithm.
const fits = (own, alg, key) =>
  key?.kty === own.kty &&
  (own.crv === undefined || key.crv === own.crv) &&
  (key.alg === undefined || key.alg === alg) &&
  (key.use === undefined || key.use === "sig") &&
  (key.key_ops === undefined || (Array.isArray(key.key_ops) && key.key_ops.includes("verify")));

async function keySet(own, alg, set) {
  const keys = [];
  let fault = `the JWKS holds no key for ${alg}`;
  for (const key of set.filter((key) => fits(own, alg, key))) {
    try {
      keys.push({ kid: typeof key.kid === "string" ? key.kid : undefined, key: await jwk(own, alg, key) });
    } catch (error) {
      // A key that cannot be used must not take the others out of use.
      fault = error.message;
      console.warn(JSON.stringify({ event: "key_skipped", reason: fault }));
    }
  }
  if (keys.length === 0) {
    throw new Error(fault);
  }
  return keys;
}

// Returns the keys in a text: a shared secret, a public key in PEM or a JWKS. A single key has no id, and `any` is true.
export async function importKeys(alg, text) {
  const own = algorithm(alg);
  const pem = /-----BEGIN ([^-]*)-----([^-]*)-----END/.exec(text);
  // A public key is no secret: as one, it would let everyone sign tokens.
  if (text.includes("-----BEGIN ") && own.kty === "oct") {
    throw new Error(`this is a key in PEM, and ${alg} takes a shared secret`);
  }
  if (pem !== null) {
    if (pem[1] !== "PUBLIC KEY") {
      throw new Error(`a Worker takes a PEM of "PUBLIC KEY", or a JWKS`);
    }
    let der;
    try {
      der = octets(pem[2].replaceAll(/\s/g, ""));
    } catch {
      throw new Error("the key in PEM is damaged");
    }
    const key = await imported(own, "spki", der, `the key in PEM is damaged, or none for ${alg}`);
    return { any: true, keys: [{ key }] };
  }
  const set = parsed(text)?.keys;
  if (Array.isArray(set)) {
    return { any: false, keys: await keySet(own, alg, set) };
  }
  if (own.kty !== "oct") {
    throw new Error("this is neither a public key in PEM nor a JWKS");
  }
  if (/^\s*[{<]|^(ssh-|ecdsa-|sk-)/.test(text)) {
    throw new Error("this is a public key or a document, not a shared secret");
  }
  return { any: true, keys: [{ key: await secret(own, alg, new TextEncoder().encode(text.replace(/\r?\n$/, ""))) }] };
}

// Returns whether a signature is that of a key.
export async function verifySignature(alg, key, signature, message) {
  return crypto.subtle.verify(algorithm(alg).verify, key, signature, message);
}
