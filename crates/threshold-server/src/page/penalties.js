// Bans, shadow bans and locked accounts: with a filter, their reasons, and how to lift them.

import { get, post, query, remove } from "./api.js";
import { announce, askReason, card, h, replace, table } from "./dom.js";
import { count, dateTime, subjectLink, until } from "./format.js";

/** How many bans one request brings. A server may have a hundred thousand. */
const PAGE = 200;
// A page with fewer is the last one: one that the server has cut, because reasons are long, has more.
const FEWEST = 20;

export function penalties({ session }) {
  const canChange = session.role === "operator";
  const message = h("div");
  const filter = h("input", { type: "search", placeholder: "key, reason or operator", "aria-label": "Filter", autocomplete: "off", oninput: () => draw() });
  const bansTable = h("div");
  const shadowTable = h("div");
  const locksTable = h("div");
  const more = h("button", { class: "button", type: "button", hidden: true, onclick: () => loadBans(false) }, "Load more");
  let bans = [];
  let shadowBans = [];
  let locks = [];

  const fail = (problem) => replace(message, h("p", { class: "notice error", role: "alert" }, problem.message));
  const matches = (...texts) => {
    const wanted = filter.value.trim().toLowerCase();
    return wanted === "" || texts.some((text) => String(text ?? "").toLowerCase().includes(wanted));
  };

  async function lift(ban) {
    const work = (reason) => remove(`/v1/bans/${ban.id}${query({ reason })}`);
    if (!(await askReason("Lift this ban?", `Requests of ${ban.layer ?? ""} ${ban.key} are decided by the policy again. It was banned because: ${ban.reason}`, "Lift the ban", work))) return;
    announce(`The ban on ${ban.key} is lifted`);
    await loadBans(true).catch(fail);
  }

  async function forgive(layer, key, what) {
    const work = (reason) => remove(`/v1/subjects/${encodeURIComponent(layer)}/${encodeURIComponent(key)}${query({ reason })}`);
    if (!(await askReason("Forgive?", `${what} of ${key} ends, and its strikes and usage are reset.`, "Forgive", work))) return;
    announce(`${key} is forgiven`);
    await load();
  }

  async function add() {
    const layer = h("select", null, ["edge", "tenant", "user"].map((name) => h("option", { value: name }, name === "edge" ? "address or block" : name)));
    const key = h("input", { required: true, maxlength: 256, autocomplete: "off", spellcheck: "false" });
    const hours = h("input", { type: "number", min: 1, max: 87_600, placeholder: "no end" });
    const work = (reason) => post("/v1/bans", { layer: layer.value, key: key.value, reason, ...(hours.value === "" ? {} : { durationSec: Number(hours.value) * 3600 }) });
    const isDone = await askReason("Ban", "Every request of this subject is denied from now on.", "Ban", work, [
      { label: "Layer", input: layer },
      { label: "Address, tenant or user", input: key },
      { label: "Hours", input: hours },
    ]);
    if (!isDone) return;
    announce(`${key.value} is banned`);
    await loadBans(true).catch(fail);
  }

  function draw() {
    replace(
      bansTable,
      table(
        "Bans",
        [
          { name: "layer", cell: (ban) => ban.layer ?? "–" },
          { name: "key", cell: (ban) => (ban.layer ? h("a", { href: subjectLink(ban.layer, ban.key) }, ban.key) : ban.key) },
          { name: "reason", cell: (ban) => ban.reason },
          { name: "by", cell: (ban) => ban.by },
          { name: "since", cell: (ban) => dateTime(ban.from * 1000) },
          { name: "ends", cell: (ban) => until(ban.until) },
          { name: "", cell: (ban) => canChange && h("button", { class: "button small", type: "button", onclick: () => lift(ban), "aria-label": `Lift the ban on ${ban.key}` }, "Lift") },
        ],
        bans.filter((ban) => matches(ban.key, ban.reason, ban.by, ban.layer)),
        bans.length === 0 ? "Nobody is banned." : "No ban matches.",
      ),
    );
    replace(
      shadowTable,
      table(
        "Shadow bans",
        [
          { name: "subject", cell: (one) => (one.key ? h("a", { href: subjectLink(one.layer, one.key) }, one.subject) : (one.subject ?? h("code", null, one.id))) },
          { name: "ends", cell: (one) => until(one.until) },
          { name: "", cell: (one) => canChange && one.key && h("button", { class: "button small", type: "button", onclick: () => forgive(one.layer, one.key, "The shadow ban") }, "Forgive") },
        ],
        shadowBans.filter((one) => matches(one.subject, one.id)),
        shadowBans.length === 0 ? "Nobody is shadow banned." : "No shadow ban matches.",
      ),
    );
    replace(
      locksTable,
      table(
        "Locked accounts",
        [
          { name: "account", cell: (lock) => h("a", { href: subjectLink("account", lock.digest), class: "mono" }, lock.digest) },
          { name: "failures", number: true, cell: (lock) => count(lock.failures) },
          { name: "ends", cell: (lock) => (lock.atCeiling ? "until it is reset" : until(lock.lockedUntil)) },
          { name: "", cell: (lock) => canChange && h("button", { class: "button small", type: "button", onclick: () => forgive("account", lock.digest, "The lock"), "aria-label": `Forgive the account ${lock.digest}` }, "Forgive") },
        ],
        locks.filter((lock) => matches(lock.digest)),
        locks.length === 0 ? "No account is locked." : "No account matches.",
      ),
    );
  }

  async function loadBans(isFirst) {
    const page = await get(`/v1/bans${query({ limit: PAGE, after: isFirst ? null : bans.at(-1)?.id })}`);
    bans = isFirst ? page : [...bans, ...page];
    more.hidden = page.length < FEWEST;
    draw();
  }

  async function load() {
    try {
      [shadowBans, locks] = await Promise.all([get("/v1/shadow-bans"), get(`/v1/locks${query({ limit: PAGE })}`)]);
      await loadBans(true);
      replace(message);
    } catch (problem) {
      fail(problem);
    }
  }

  draw();
  load();
  const button = canChange && h("button", { class: "button primary", type: "button", onclick: add }, "Ban");
  return {
    element: h(
      "div",
      null,
      h("div", { class: "top" }, h("h1", null, "Bans and locks"), h("span", { class: "grow" }), button),
      message,
      h("div", { class: "filter" }, filter),
      h("div", { class: "grid" }, card("Bans", null, bansTable, more), card("Shadow bans", null, shadowTable), card("Locked accounts", null, locksTable)),
    ),
  };
}
