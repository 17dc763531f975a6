// Prints a session for the local example: node sign.mjs TENANT USER

import { signSession } from "./session.mjs";

const [tenant, user] = process.argv.slice(2);
if (user === undefined) {
  console.error("usage: node sign.mjs TENANT USER");
  process.exit(2);
}
// The key of .dev.vars.
console.log(await signSession(tenant, user, process.env.SESSION_KEY ?? "development-key-of-sessions"));
