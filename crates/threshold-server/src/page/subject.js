// One subject: why it is stopped, its strikes, its budgets as bars, its history; and forgive, ban, raise its limits.

import { get, post, put, query, remove } from "./api.js";
import { meter } from "./chart.js";
import { announce, askReason, card, h, replace, table } from "./dom.js";
import { count, dateTime, subjectLink, until, userNames } from "./format.js";

const LAYERS = [
  { id: "edge", name: "address", field: "ip" },
  { id: "tenant", name: "tenant", field: "tenant" },
  { id: "user", name: "user", field: "userId" },
  { id: "account", name: "account (logins)", field: "userId" },
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
  let setting = null;
  const path = `/v1/subjects/${encodeURIComponent(layer)}/${encodeURIComponent(key)}`;

  /** Asks for a reason, makes the change, and shows the subject as it is then. */
  const change = async (title, text, action, work, done, fields) => {
    if (!(await askReason(title, text, action, work, fields))) return;
    announce(done);
    await load();
  };

  async function forgive() {
    await change("Forgive?", `Strikes, penalties and usage of ${key} are reset.`, "Forgive", (reason) => remove(`${path}${query({ reason })}`), `${key} is forgiven`);
  }

  async function ban() {
    const hours = h("input", { type: "number", min: 1, max: 87_600, placeholder: "no end" });
    const work = (reason) => post("/v1/bans", { layer, key, reason, ...(hours.value === "" ? {} : { durationSec: Number(hours.value) * 3600 }) });
    await change("Ban?", `Every request of ${key} is denied.`, "Ban", work, `${key} is banned`, [{ label: "Hours", input: hours }]);
  }

  async function lift(one) {
    const text = `Requests of ${one.layer ?? ""} ${one.key} are decided by the policy again. It was banned because: ${one.reason}`;
    await change("Lift this ban?", text, "Lift the ban", (reason) => remove(`/v1/bans/${one.id}${query({ reason })}`), "The ban is lifted");
  }

  async function raise() {
    const isPermanent = setting.from !== null && setting.until === null;
    const times = h("input", { type: "number", min: 1, max: 1_000_000, value: setting.times * 2, required: true });
    const end = h("input", { type: "datetime-local", required: !isPermanent });
    const work = (reason) => {
      // A tier or limits of its own stay: a setting replaces the one before it.
      const { tier, limits } = setting;
      const until = end.value === "" ? null : Math.floor(new Date(end.value).getTime() / 1000);
      if (until !== null && !(until > Date.now() / 1000)) throw new Error("the time is in the past");
      return put(`/v1/${layer}s/${encodeURIComponent(key)}`, { ...(tier ? { tier } : {}), limits, times: Number(times.value), ...(until === null ? {} : { until }), reason });
    };
    const present = setting.from ? ` They are multiplied by ${setting.times} now${setting.tier ? `, with the tier ${setting.tier}` : ""}.` : "";
    const ends = isPermanent ? " Its present setting has no end: leave the time empty, or all of it ends then." : setting.from ? " Its present setting ends then too." : "";
    const text = `Every limit of ${key} is multiplied by this.${present}${ends}`;
    await change("Raise its limits", text, "Raise", work, "The limits are raised", [
      { label: "Times", input: times },
      { label: "Until, by the clock of this browser", input: end },
    ]);
  }

  async function takeBack() {
    const work = (reason) => put(`/v1/${layer}s/${encodeURIComponent(key)}`, { reason });
    await change("Take its setting back?", `The policy's own limits count for ${key} again.`, "Take back", work, "The setting is taken back");
  }

  /** What an operator has set for this subject, above the policy. */
  function described() {
    if (!setting?.from) return null;
    const limits = Object.entries(setting.limits).map(([name, limit]) => `${name} ${limit}`);
    const parts = [setting.tier && `the tier ${setting.tier}`, ...limits, setting.times > 1 && `${setting.times} times every limit`].filter(Boolean);
    const button = canChange && h("button", { class: "button", type: "button", onclick: takeBack }, "Take back");
    return card("Setting", h("span", { class: "actions" }, button), h("p", null, `${parts.join(", ")}, ${setting.until ? `ends ${until(setting.until)}` : "no end"}. By ${setting.by}: ${setting.reason}`));
  }

  /** Events have the tenant of a user beside its name. */
  function historyFilter(field) {
    if (field !== "userId") return { [field]: key };
    const { tenant, user } = userNames(session, key);
    return { tenant, userId: user };
  }

  async function load() {
    if (key === "") {
      replace(body, h("p", { class: "empty" }, "Look up an address, a tenant, a user or an account."));
      return;
    }
    try {
      const field = LAYERS.find((one) => one.id === layer)?.field;
      const hasSetting = ["tenant", "user"].includes(layer);
      const filter = historyFilter(field);
      const [state, history, own] = await Promise.all([get(path), get(`/v1/events${query({ ...filter, limit: 50 })}`), hasSetting ? get(`/v1/${layer}s/${encodeURIComponent(key)}`) : null]);
      setting = own;
      replace(body, describe(state, history.events.reverse()));
    } catch (problem) {
      replace(body, h("p", { class: "notice error", role: "alert" }, problem.message));
    }
  }

  function describe(state, history) {
    const enforced = state.budgets.filter((budget) => budget.mode !== "observe");
    const reasons = [
      state.listed && `the policy's ${state.listed.list} list names ${state.listed.key}`,
      ...state.bans.map((one) => `banned by ${one.by}, ${one.until ? "ends " : ""}${until(one.until)}: ${one.reason}`),
      state.bannedUntil && `banned by a ladder until ${dateTime(state.bannedUntil * 1000)}`,
      state.deniedUntil && !state.bannedUntil && `in a cool-down until ${dateTime(state.deniedUntil * 1000)}`,
      state.pausedUntil && `paused until ${dateTime(state.pausedUntil * 1000)}`,
      state.shadowBanned && "shadow banned: its requests are delayed",
      state.lockedUntil && `locked until ${dateTime(state.lockedUntil * 1000)} after ${state.failures} failed logins`,
      state.atCeiling && "locked until it is reset: it has reached the ceiling of failed logins",
      ...enforced.filter((budget) => budget.why && budget.used === 0).map((budget) => `the rule ${budget.rule}: ${budget.why}`),
      ...enforced.filter((budget) => budget.used >= budget.limit && budget.limit > 0).map((budget) => `the budget of ${budget.category ? `${budget.rule}, ${budget.category},` : budget.rule} is used up`),
    ].filter(Boolean);
    const buttons =
      canChange &&
      h(
        "span",
        { class: "actions" },
        ["tenant", "user"].includes(layer) && h("button", { class: "button", type: "button", onclick: raise }, "Raise limits"),
        layer !== "account" && h("button", { class: "button", type: "button", onclick: ban }, "Ban"),
        h("button", { class: reasons.length > 0 ? "button primary" : "button", type: "button", onclick: forgive }, "Forgive"),
      );
    return h(
      "div",
      { class: "grid" },
      card("Why it is stopped", buttons, reasons.length === 0 ? h("p", { class: "empty" }, "Nothing stops it now.") : h("ul", { class: "reasons" }, reasons.map((text) => h("li", null, text))), h("p", { class: "quiet" }, "Name: ", h("code", null, key)), state.digest && h("p", { class: "quiet" }, "In the log: ", h("code", null, state.digest))),
      described(),
      half(card("Budgets", null, state.budgets.length === 0 ? h("p", { class: "empty" }, "No limit counts it alone.") : state.budgets.map((one) => meter(one.category ? `${one.rule}, ${one.category}` : one.rule, one.used, one.limit, `${one.why ?? one.notation}${one.freeAt ? `, more ${until(one.freeAt)}` : ""}`)))),
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
