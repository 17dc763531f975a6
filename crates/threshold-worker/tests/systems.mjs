// Starts the systems of examples/workers and checks over HTTP what they promise. Each test is one sentence.
//
//   node systems.mjs [NAME]

import { chatTenants } from "./systems/chat-tenants.mjs";
import { grove } from "./systems/grove.mjs";
import { serve } from "./systems/serve.mjs";
import { telegramBot } from "./systems/telegram-bot.mjs";
import { weatherApi } from "./systems/weather-api.mjs";
import { stopAll } from "./systems/world.mjs";

const systems = { serve, "chat-tenants": chatTenants, "telegram-bot": telegramBot, "weather-api": weatherApi, grove };
const only = process.argv[2];
if (only !== undefined && systems[only] === undefined) {
  console.error(`usage: node systems.mjs [${Object.keys(systems).join("|")}]`);
  process.exit(2);
}

let failed = 0;
async function test(name, run) {
  try {
    await run();
    console.log(`ok ${name}`);
  } catch (error) {
    failed += 1;
    console.error(`FAILED ${name}\n${error.stack}`);
  }
}

for (const [name, system] of Object.entries(systems)) {
  if (only === undefined || only === name) {
    await test(`${name} runs`, () => system((sentence, run) => test(`${name}: ${sentence}`, run)));
    await stopAll();
  }
}
process.exit(failed > 0 ? 1 : 0);
