// A Telegram bot whose counts are in KV.

import assert from "node:assert/strict";
import { createServer } from "node:http";

import { eventually, freePort, namespace, start } from "./world.mjs";

const HOUR = 3_600_000;
const MESSAGE = "You've reached the message limit. Please try again later.";

// Receives what the bot writes. `status` is its answer; 0 closes the connection.
async function startTelegram() {
  const telegram = { sent: [], status: 200 };
  const server = createServer((request, response) => {
    let body = "";
    request.on("data", (text) => (body += text));
    request.on("end", () => {
      telegram.sent.push({ path: request.url, ...JSON.parse(body) });
      if (telegram.status === 0) {
        request.socket.destroy();
      } else {
        response.writeHead(telegram.status).end('{"ok":true}');
      }
    });
  });
  await new Promise((listening) => server.listen(0, "127.0.0.1", listening));
  telegram.url = `http://127.0.0.1:${server.address().port}`;
  telegram.close = () => server.close();
  return telegram;
}

function update(worker, user, text = "hello", headers = { "x-telegram-bot-api-secret-token": "hush" }) {
  const body = JSON.stringify({ update_id: 1, message: { from: { id: user }, chat: { id: user + 1_000 }, text } });
  return worker.fetch("/webhook", { method: "POST", body, headers });
}

async function isOk(answer) {
  assert.equal(answer.status, 200);
  assert.equal(await answer.text(), '{"ok":true}');
}

// Runs a test whose messages must all be in one window of the clock. Every attempt is of another user.
async function inOneWindow(window, run) {
  for (let user = 42; user < 46; user += 1) {
    const before = Math.floor(Date.now() / window);
    const done = await run(user, before);
    if (Math.floor(Date.now() / window) === before) {
      return done();
    }
  }
  throw new Error("every attempt was at the turn of a window");
}

export async function telegramBot(test) {
  const telegram = await startTelegram();
  const env = { BOT_API: telegram.url, ALLOWED_USERS: "42, 43,44,45,50,51,52,53" };
  const worker = await start("telegram-bot", { env });
  const kv = namespace(worker, "RATE_LIMIT_KV");

  await test("only Telegram, with the secret of the webhook, is heard", async () => {
    for (const headers of [{}, { "x-telegram-bot-api-secret-token": "hus" }, { "x-telegram-bot-api-secret-token": "hush!" }]) {
      assert.equal((await update(worker, 42, "hello", headers)).status, 401);
    }
    assert.equal((await worker.fetch("/webhook")).status, 404);
    const broken = await worker.fetch("/webhook", { method: "POST", body: "{", headers: { "x-telegram-bot-api-secret-token": "hush" } });
    assert.equal(broken.status, 400);
    assert.deepEqual([telegram.sent, await kv.keys()], [[], []]);
  });

  await test("the sender allow-list comes before the count", async () => {
    await isOk(await update(worker, 7));
    assert.deepEqual([telegram.sent, await kv.keys()], [[], []]);
  });

  await test("20 messages an hour, then the message of the limit, and 200 in both cases", async () => {
    await inOneWindow(HOUR, async (user, window) => {
      telegram.sent.length = 0;
      for (let at = 0; at < 22; at += 1) {
        await isOk(await update(worker, user, `message ${at}`));
      }
      return async () => {
        const chat_id = user + 1_000;
        const path = "/bot123:development/sendMessage";
        const worked = Array.from({ length: 20 }, (_, at) => ({ path, chat_id, text: `You said: message ${at}` }));
        const refused = { path, chat_id, text: MESSAGE };
        assert.deepEqual(telegram.sent, [...worked, refused, refused]);
        const key = `ratelimit:${user}:${window}`;
        await eventually(async () => (await kv.get(key)) === "20", `the count in ${key}`);
        const { expiration } = (await kv.keys()).find(({ name }) => name === key);
        const life = expiration - Date.now() / 1_000;
        assert.ok(life > 3_400 && life <= 3_601, `the key lives ${life} s, as long as the window`);
      };
    });
  });

  await test("a user's count is no other's", async () => {
    telegram.sent.length = 0;
    await isOk(await update(worker, 50));
    assert.deepEqual(telegram.sent.map(({ text }) => text), ["You said: hello"]);
  });

  await test("the answer is 200 when the reply fails, and the message counts", async () => {
    telegram.status = 500;
    await isOk(await update(worker, 51));
    telegram.status = 0;
    await isOk(await update(worker, 51));
    telegram.status = 200;
    assert.match(worker.log, /"event":"reply_failed","status":500/);
    assert.ok(!worker.log.includes("123:development"), "the log does not have the token");
    const mine = async () => (await kv.keys()).filter(({ name }) => name.startsWith("ratelimit:51:"));
    await eventually(async () => {
      const counts = await Promise.all((await mine()).map(({ name }) => kv.get(name)));
      return counts.reduce((sum, count) => sum + Number(count), 0) === 2;
    }, "two messages are counted");
  });
  await worker.stop();

  await test("RATE_LIMIT_MAX and RATE_LIMIT_WINDOW_MS set limit and window; a key lives at least 60 s", async () => {
    const window = 20_000;
    const short = await start("telegram-bot", { env: { ...env, RATE_LIMIT_MAX: "2", RATE_LIMIT_WINDOW_MS: String(window) } });
    const counts = namespace(short, "RATE_LIMIT_KV");
    await inOneWindow(window, async (user, number) => {
      telegram.sent.length = 0;
      for (let at = 0; at < 3; at += 1) {
        await isOk(await update(short, user));
      }
      return async () => {
        assert.deepEqual(telegram.sent.map(({ text }) => text), ["You said: hello", "You said: hello", MESSAGE]);
        const key = `ratelimit:${user}:${number}`;
        await eventually(async () => (await counts.get(key)) === "2", `the count in ${key}`);
        const { expiration } = (await counts.keys()).find(({ name }) => name === key);
        assert.ok(expiration - Date.now() / 1_000 > 30, "it lives longer than its window");
        // In the next window the user has room again.
        await eventually(() => Math.floor(Date.now() / window) > number, "the next window");
        await isOk(await update(short, user));
        assert.equal(telegram.sent.at(-1).text, "You said: hello");
      };
    });
    await short.stop();
  });

  await test("over the limit the answer is 200 too when that reply fails", async () => {
    const nowhere = `http://127.0.0.1:${await freePort()}`;
    const alone = await start("telegram-bot", { env: { ...env, RATE_LIMIT_MAX: "1", BOT_API: nowhere } });
    for (let at = 0; at < 3; at += 1) {
      await isOk(await update(alone, 52));
    }
    await alone.stop();
  });

  await test("a bot whose policy is wrong says that something went wrong", async () => {
    const wrong = await start("telegram-bot", { env: { ...env, RATE_LIMIT_MAX: "abc" } });
    telegram.sent.length = 0;
    await isOk(await update(wrong, 53));
    assert.deepEqual(telegram.sent.map(({ text }) => text), ["Something went wrong. Please try again later."]);
    await wrong.stop();
  });
  telegram.close();
}
