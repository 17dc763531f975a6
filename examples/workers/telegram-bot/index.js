// A Telegram bot behind a webhook: who may write to it, then how much, and only then the work.

import { guard } from "threshold";
import policy from "../../../policies/telegram-bot.toml";

export default {
  async fetch(request, env, ctx) {
    if (new URL(request.url).pathname !== "/webhook" || request.method !== "POST") {
      return new Response(null, { status: 404 });
    }
    if (!(await isSecret(request.headers.get("x-telegram-bot-api-secret-token"), env.WEBHOOK_SECRET))) {
      return new Response(null, { status: 401 });
    }
    const update = await request.json().catch(() => undefined);
    if (update === null || typeof update !== "object") {
      return new Response(null, { status: 400 });
    }
    const { from, chat, text } = update.message ?? {};
    const allowed = (env.ALLOWED_USERS ?? "").split(",").map((id) => id.trim());
    if (Number.isSafeInteger(from?.id) && Number.isSafeInteger(chat?.id) && allowed.includes(String(from.id))) {
      const answer = await limited(String(from.id), () => work(text), env, ctx);
      await reply(chat.id, answer, env);
    }
    // Any other answer makes Telegram deliver the message again.
    return Response.json({ ok: true });
  },
};

const FAILED = "Something went wrong. Please try again later.";

// Does the work, unless the user has sent too much: then the answer is the rule's message.
async function limited(user, work, env, ctx) {
  const asked = new Request("https://bot/message");
  const guarded = await guard(asked, { ...env, THRESHOLD_POLICY: policy }, ctx, async () => new Response(await work()), { user });
  if (guarded.ok) {
    return guarded.text();
  }
  // Only a denial has a message of the rule. A bot whose settings or whose work fail has none.
  const { message } = await guarded.json().catch(() => ({}));
  return message ?? FAILED;
}

// The model would be asked here.
function work(text) {
  return `You said: ${text ?? ""}`;
}

async function reply(chat, text, env) {
  try {
    const sent = await fetch(`${env.BOT_API}/bot${env.BOT_TOKEN}/sendMessage`, {
      method: "POST",
      headers: { "content-type": "application/json" },
      body: JSON.stringify({ chat_id: chat, text }),
      signal: AbortSignal.timeout(5_000),
    });
    if (!sent.ok) {
      console.warn(JSON.stringify({ event: "reply_failed", status: sent.status }));
    }
    await sent.body?.cancel();
  } catch (error) {
    // Its message may have the URL, and that has the token.
    console.warn(JSON.stringify({ event: "reply_failed", reason: error.name }));
  }
}

// Compares digests, so that the time tells nothing about the secret.
async function isSecret(given, secret) {
  if (!given || !secret) {
    return false;
  }
  const digest = (text) => crypto.subtle.digest("SHA-256", new TextEncoder().encode(text));
  return crypto.subtle.timingSafeEqual(await digest(given), await digest(secret));
}
