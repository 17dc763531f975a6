// Events: what was stopped, the newest first, live and by filters. A trace id shows one event in full.

import { follow, get, query } from "./api.js";
import { announce, card, h, replace, table } from "./dom.js";
import { count, dateTime, subjectLink, userKey } from "./format.js";

const PAGE = 100;
const FILTERS = [
  { name: "layer", options: ["", "global", "edge", "tenant", "user", "endpoint"] },
  { name: "verdict", options: ["", "allow", "warn", "slow", "deny", "ban"] },
  { name: "cause", options: ["", "limit", "missing", "ban", "ladder", "pause", "list", "outage", "login"] },
  { name: "tenant" },
  { name: "userId", label: "user" },
  { name: "ip", label: "address" },
  { name: "rule" },
  { name: "endpoint" },
  { name: "traceId", label: "trace id" },
];

const link = (layer, key, shown = key) => (key === null || key === undefined ? "–" : h("a", { href: subjectLink(layer, key) }, shown));
/** A refused login names the account that was tried, which is no user who was stopped. */
const userLink = (event, session) => event.userId && link(event.cause === "login" ? "account" : "user", userKey(session, event.tenant, event.userId), event.userId);

const columns = (session) => [
  { name: "time", short: true, cell: (event) => dateTime(event.at) },
  { name: "verdict", short: true, cell: (event) => h("span", { class: `tag ${event.verdict}` }, event.verdict) },
  { name: "cause", short: true, cell: (event) => event.cause ?? "–" },
  { name: "layer", short: true, cell: (event) => event.layer ?? "–" },
  { name: "rule", cell: (event) => event.rule ?? "–" },
  { name: "endpoint", cell: (event) => event.endpoint ?? "–" },
  { name: "tenant", cell: (event) => link("tenant", event.tenant) },
  { name: "user", cell: (event) => userLink(event, session) ?? "–" },
  { name: "address", short: true, cell: (event) => link("edge", event.ip) },
  { name: "count", number: true, cell: (event) => count(event.count) },
  { name: "why", short: true, cell: (event) => (event.traceId === null || event.traceId === undefined ? "–" : h("a", { href: `#/events/${event.traceId}`, class: "mono" }, event.traceId.slice(0, 8))) },
];

export function events({ session, rest: [trace] }) {
  return trace ? one(trace, session) : list(session);
}

/** The filters of the last visit, so that the way back from an event leads to the same list. */
const last = new Map();

function list(session) {
  const shownColumns = columns(session);
  const inputs = new Map(
    FILTERS.map(({ name, options }) => [
      name,
      options ? h("select", { name }, options.map((option) => h("option", { value: option }, option === "" ? "any" : option))) : h("input", { name, autocomplete: "off", spellcheck: "false" }),
    ]),
  );
  const labels = new Map(FILTERS.map(({ name, label }) => [name, label ?? name]));
  const rows = h("div");
  const live = h("button", { class: "button", type: "button", "aria-pressed": "false", onclick: () => toggle() }, "Follow live");
  const older = h("button", { class: "button", type: "button", hidden: true, onclick: () => load(previous) }, "Older events");
  const newest = h("button", { class: "button", type: "button", hidden: true, onclick: () => load() }, "Newest events");
  let previous = null;
  let shown = [];
  let end = null;

  const filters = () => Object.fromEntries([...inputs].map(([name, input]) => [name, name === "traceId" ? input.value.trim() : input.value]));
  const draw = () => replace(rows, table("Events", shownColumns, shown, "No event matches. Denials, warnings and strikes are recorded."));

  async function load(before = null) {
    inputs.forEach((input, name) => last.set(name, input.value));
    try {
      const page = await get(`/v1/events${query({ ...filters(), before, limit: PAGE })}`);
      shown = page.events.reverse();
      previous = page.previous;
      older.hidden = previous === null;
      newest.hidden = before === null;
      draw();
      announce(`${shown.length} events`);
    } catch (problem) {
      replace(rows, h("p", { class: "error", role: "alert" }, problem.message));
    }
  }

  function toggle() {
    if (end !== null) {
      end();
      end = null;
    } else {
      end = follow(`/v1/events${query(filters())}`, (event) => {
        shown = [event, ...shown].slice(0, PAGE);
        schedule();
      });
    }
    live.setAttribute("aria-pressed", String(end !== null));
    live.textContent = end === null ? "Follow live" : "Stop following";
  }

  // At most one drawing for each frame, however many events there are in a flood.
  let isScheduled = false;
  function schedule() {
    if (isScheduled) return;
    isScheduled = true;
    requestAnimationFrame(() => {
      isScheduled = false;
      draw();
    });
  }

  const restart = () => {
    if (end !== null) {
      toggle();
      toggle();
    }
    load();
  };
  const form = h(
    "form",
    {
      onsubmit: (event) => {
        event.preventDefault();
        restart();
      },
    },
    h("div", { class: "fields" }, [...inputs].map(([name, input]) => h("label", null, h("span", null, labels.get(name)), input))),
    h("div", { class: "actions" }, live, h("button", { class: "button primary", type: "submit" }, "Filter")),
  );
  inputs.forEach((input, name) => {
    input.value = last.get(name) ?? "";
  });
  load();
  return {
    element: h("div", null, h("div", { class: "top" }, h("h1", null, "Events"), h("span", { class: "quiet" }, `${PAGE} on a page, the newest first`)), h("div", { class: "grid" }, h("div", { class: "card" }, form), h("div", { class: "card" }, rows, h("div", { class: "actions" }, newest, older)))),
    close: () => end?.(),
  };
}

function one(trace, session) {
  const body = h("div");
  const element = h("div", null, h("div", { class: "top" }, h("h1", null, "One decision"), h("a", { href: "#/events" }, "All events")), body);
  (async () => {
    try {
      const { events: found } = await get(`/v1/events${query({ traceId: trace, limit: 1 })}`);
      replace(body, found.length === 0 ? h("p", { class: "notice" }, `No event has the trace id ${trace}. The request was allowed, or its event is deleted or on another server.`) : describe(found[0], session));
    } catch (problem) {
      replace(body, h("p", { class: "error", role: "alert" }, problem.message));
    }
  })();
  return { element };
}

/** What stopped a request, in a sentence, and what an operator can do about it. */
const CAUSES = {
  limit: "A limit was used up. The table shows which; the subject's view can reset it or raise it.",
  missing: "The request lacked an identity that the rule counts by, or a tier of the policy. Explain it to see which.",
  ban: "A ban was in force. The subject's view shows who has set it and why, and can lift it.",
  ladder: "A penalty of a ladder was in force, after repeated strikes. The subject's view can forgive it.",
  pause: "The subject was paused. The subject's view can forgive it.",
  list: "The policy's own list denies it. Only a change of the policy helps.",
  outage: "The store did not answer, and the rule is closed in that case.",
  login: "A login was refused: the account is locked, or the address or the account has failed too often. The account's view can forgive it.",
};

function describe(event, session) {
  const fact = (name, value) => value !== null && value !== undefined && [h("dt", null, name), h("dd", null, value)];
  const limits = table(
    "Limits at that moment",
    [
      { name: "rule", cell: (limit) => limit.rule },
      { name: "layer", cell: (limit) => limit.layer },
      { name: "mode", cell: (limit) => limit.mode },
      { name: "fits", cell: (limit) => (limit.allowed ? "yes" : h("strong", null, "no")) },
      { name: "remaining", number: true, cell: (limit) => `${count(limit.remaining)} of ${count(limit.limit)}` },
      { name: "cost", number: true, cell: (limit) => count(limit.cost) },
      { name: "fits at", cell: (limit) => (limit.resetAt === null ? "–" : dateTime(limit.resetAt * 1000)) },
    ],
    event.limits ?? [],
    "No limit was read: a ban, a list or a penalty decided before.",
  );
  const facts = [
    fact("Time", dateTime(event.at)),
    fact("Decided by", event.rule ?? event.cause ?? (event.layer ? `a penalty on the layer ${event.layer}` : "a list or a ban")),
    fact("Cause", event.cause),
    fact("Ends", event.until && dateTime(event.until)),
    fact("Degraded", event.degraded),
    fact("Layer", event.layer),
    fact("Endpoint", event.endpoint),
    fact("Tenant", event.tenant && link("tenant", event.tenant)),
    fact(event.cause === "login" ? "Account" : "User", userLink(event, session)),
    fact("Address", event.ip && link("edge", event.ip)),
    fact("Strikes", event.strikes),
    fact("Shadow banned until", event.shadowUntil && dateTime(event.shadowUntil)),
    fact("Banned until", event.bannedUntil && dateTime(event.bannedUntil)),
    fact("Stands for", event.count > 1 ? `${count(event.count)} equal decisions` : null),
    fact("Trace id", h("code", null, event.traceId)),
  ];
  return h("div", { class: "grid" }, h("div", { class: "card third" }, h("p", null, h("span", { class: `tag ${event.verdict}` }, event.verdict)), event.cause && h("p", null, CAUSES[event.cause]), h("dl", { class: "facts" }, facts)), h("div", { class: "card two-thirds" }, h("h2", null, "Its limits at that moment"), limits));
}
