// One subject: why it is stopped, its strikes, its budgets as bars, its history; and forgive, ban, raise its limits.

import { get, post, put, query, remove } from "./api.js";
import { meter } from "./chart.js";
import { announce, askReason, card, h, replace, table } from "./dom.js";
import { count, dateTime, subjectLink, until } from "./format.js";

const LAYERS = [
  { id: "edge", name: "address", field: "ip" },
  { id: "tenant", name: "tenant", field: "tenant" },
  { id: "user", name: "user", field: "userId" },
  { id: "account", name: "account (logins)", field: null },
];

export function subject({ session, rest: [layer = "user", key = ""] }) {
  const canChange = session.role === "operator";
  const choice = h("select", { name: "layer", "aria-label": "Layer" }, LAYERS.map((one) => h("option", { value: one.id, selected: one.id === layer }, one.name)));
  const input = h("input", { name: "key", value: key, placeholder: "address, tenant, user or #digest", "aria-label": "Name", autocomplete: "off", spellcheck: "false" });
  const body = h("div");
  const form = h(
    "form",
    {
      class: "top",
      onsubmit: (event) => {
        event.preventDefault();
        const wanted = subjectLink(choice.value, input.value);
        if (location.hash === wanted) load();
        else location.hash = wanted;
      },
    },
    h("h1", null, "Subject"),
    h("div", { class: "fields lookup" }, choice, input, h("button", { class: "button primary", type: "submit" }, "Look up")),
  );
  const path = `/v1/subjects/${encodeURIComponent(layer)}/${encodeURIComponent(key)}`;

  const change = async (work, text) => {
    try {
      await work();
      announce(text);
      await load();
    } catch (problem) {
      body.prepend(h("p", { class: "notice error", role: "alert" }, problem.message));
    }
  };

  async function forgive() {
    const reason = await askReason("Forgive?", `Strikes, penalties and usage of ${key} are reset.`, "Forgive");
    if (reason !== null) await change(() => remove(`${path}${query({ reason })}`), `${key} is forgiven`);
  }

  async function ban() {
    const hours = h("input", { type: "number", min: 1, max: 87_600, placeholder: "no end" });
    const reason = await askReason("Ban?", `Every request of ${key} is denied.`, "Ban", [{ label: "Hours", input: hours }]);
    if (reason === null) return;
    const duration = hours.value === "" ? {} : { durationSec: Number(hours.value) * 3600 };
    await change(() => post("/v1/bans", { layer, key, reason, ...duration }), `${key} is banned`);
  }

  async function lift(one) {
    const reason = await askReason("Lift this ban?", one.reason, "Lift the ban");
    if (reason !== null) await change(() => remove(`/v1/bans/${one.id}${query({ reason })}`), "The ban is lifted");
  }

  async function raise() {
    const times = h("input", { type: "number", min: 1, max: 1000, value: 2, required: true });
    const end = h("input", { type: "datetime-local" });
    const reason = await askReason("Raise its limits", `Every limit of ${key} is multiplied until the given time.`, "Raise", [
      { label: "Times", input: times },
      { label: "Until", input: end },
    ]);
    if (reason === null) return;
    const untilTime = end.value === "" ? {} : { until: Math.floor(new Date(end.value).getTime() / 1000) };
    await change(() => put(`/v1/${layer}s/${encodeURIComponent(key)}`, { times: Number(times.value), reason, ...untilTime }), "The limits are raised");
  }

  async function load() {
    if (key === "") {
      replace(body, h("p", { class: "empty" }, "Look up an address, a tenant, a user or an account."));
      return;
    }
    try {
      const field = LAYERS.find((one) => one.id === layer)?.field;
      const [state, history] = await Promise.all([get(path), field ? get(`/v1/events${query({ [field]: key, limit: 50 })}`) : { events: [] }]);
      replace(body, describe(state, history.events.reverse()));
    } catch (problem) {
      replace(body, h("p", { class: "notice error", role: "alert" }, problem.message));
    }
  }

  function describe(state, history) {
    const reasons = [
      state.listed && `the policy's ${state.listed.list} list names ${state.listed.key}`,
      ...state.bans.map((one) => `banned by ${one.by}, ${one.until ? "ends " : ""}${until(one.until)}: ${one.reason}`),
      state.bannedUntil && `banned by a ladder until ${dateTime(state.bannedUntil * 1000)}`,
      state.deniedUntil && !state.bannedUntil && `in a cool-down until ${dateTime(state.deniedUntil * 1000)}`,
      state.pausedUntil && `paused until ${dateTime(state.pausedUntil * 1000)}`,
      state.shadowBanned && "shadow banned: its requests are delayed",
      state.lockedUntil && `locked until ${dateTime(state.lockedUntil * 1000)} after ${state.failures} failed logins`,
      state.atCeiling && "locked until it is reset: it has reached the ceiling of failed logins",
      ...state.budgets.filter((budget) => budget.used >= budget.limit && budget.limit > 0).map((budget) => `the budget of ${budget.rule} is used up`),
    ].filter(Boolean);
    const buttons =
      canChange &&
      h(
        "span",
        { class: "actions" },
        ["tenant", "user"].includes(layer) && h("button", { class: "button", type: "button", onclick: raise }, "Raise limits"),
        layer !== "account" && h("button", { class: "button", type: "button", onclick: ban }, "Ban"),
        h("button", { class: "button primary", type: "button", onclick: forgive }, "Forgive"),
      );
    return h(
      "div",
      { class: "grid" },
      card("Why it is stopped", buttons, reasons.length === 0 ? h("p", { class: "empty" }, "Nothing stops it now.") : h("ul", { class: "reasons" }, reasons.map((text) => h("li", null, text))), state.digest && h("p", { class: "quiet" }, "In the log: ", h("code", null, state.digest))),
      half(card("Budgets", null, state.budgets.length === 0 ? h("p", { class: "empty" }, "No limit counts it alone.") : state.budgets.map((one) => meter(one.category ? `${one.rule}, ${one.category}` : one.rule, one.used, one.limit, `${one.notation}${one.freeAt ? `, more ${until(one.freeAt)}` : ""}`)))),
      half(
        card(
          "Ladders",
          null,
          table(
            "Ladders",
            [
              { name: "ladder", cell: (one) => one.ladder },
              { name: "strikes", number: true, cell: (one) => count(one.strikes) },
              { name: "penalty", cell: (one) => (one.penalty ? `${one.penalty}, ends ${until(one.until)}` : "–") },
              { name: "next strike", cell: (one) => one.next },
              { name: "forgotten", cell: (one) => (one.forgottenAt ? until(one.forgottenAt) : "–") },
            ],
            state.ladders,
            "No ladder counts it.",
          ),
        ),
      ),
      state.bans.length > 0 &&
        card(
          "Bans",
          null,
          table(
            "Bans of this subject",
            [
              { name: "key", cell: (one) => one.key },
              { name: "reason", cell: (one) => one.reason },
              { name: "by", cell: (one) => one.by },
              { name: "ends", cell: (one) => until(one.until) },
              { name: "", cell: (one) => canChange && h("button", { class: "button small", type: "button", onclick: () => lift(one), "aria-label": `Lift the ban on ${one.key}` }, "Lift") },
            ],
            state.bans,
            "",
          ),
        ),
      card(
        "History",
        null,
        table(
          "Events of this subject",
          [
            { name: "time", cell: (one) => dateTime(one.at) },
            { name: "verdict", cell: (one) => h("span", { class: `tag ${one.verdict}` }, one.verdict) },
            { name: "rule", cell: (one) => one.rule ?? "–" },
            { name: "endpoint", cell: (one) => one.endpoint ?? "–" },
            { name: "count", number: true, cell: (one) => count(one.count) },
            { name: "strikes", number: true, cell: (one) => count(one.strikes) },
            { name: "why", cell: (one) => (one.traceId ? h("a", { href: `#/events/${one.traceId}`, class: "mono" }, one.traceId.slice(0, 8)) : "–") },
          ],
          history,
          "Nothing is recorded about it.",
        ),
      ),
    );
  }

  load();
  return { element: h("div", null, form, body) };
}

function half(element) {
  element.classList.add("half");
  return element;
}
