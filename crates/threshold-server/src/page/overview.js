// The overview: what is decided now, who is blocked, what is raised.

import { follow, get } from "./api.js";
import { bars, timeChart } from "./chart.js";
import { card, h, replace, table } from "./dom.js";
import { compact, count, dateTime, duration, percent, rate, subjectLink } from "./format.js";

const PERIODS = [
  { id: "5min", name: "5 min", stats: "min", totals: "in the last minute" },
  { id: "h", name: "1 h", stats: "h", totals: "in the last hour" },
  { id: "day", name: "24 h", stats: "day", totals: "in the last day" },
];
const VERDICTS = ["allow", "warn", "slow", "deny", "ban"];
const LAYERS = ["edge", "tenant", "user", "endpoint", "other"];
/** How many samples of the newest period are shown: five minutes of seconds. */
const LIVE = 300;

export function overview() {
  let period = PERIODS[0];
  let series = null;
  const state = h("span", { class: "state" }, "connecting");
  const store = h("span", { class: "state" });
  const charts = {
    verdicts: timeChart({ title: "Decisions", unit: "per second", stacked: true, format: rate, series: VERDICTS.map((name) => ({ name, color: name })) }),
    blocks: timeChart({ title: "Blocks by layer", unit: "per second", stacked: true, format: rate, series: LAYERS.map((name) => ({ name, color: name })) }),
    latency: timeChart({ title: "Time of a decision", unit: "time", format: duration, series: [{ name: "half of them", color: "accent" }, { name: "99 %", color: "deny" }] }),
    keys: timeChart({ title: "Keys in memory", unit: "keys", format: compact, series: [{ name: "keys", color: "accent" }] }),
    degraded: timeChart({ title: "Decided without the store", unit: "share", format: percent, series: [{ name: "degraded", color: "ban" }] }),
  };
  const figures = h("dl", { class: "figures" });
  const caption = h("h2", { class: "caption" });
  const tops = h("div", { class: "grid" });
  const alerts = h("div");
  const health = h("div");
  const segments = h(
    "div",
    { class: "segments", role: "group", "aria-label": "Period" },
    PERIODS.map((one) => h("button", { type: "button", "aria-pressed": String(one === period), onclick: () => choose(one) }, one.name)),
  );
  const element = h(
    "div",
    null,
    h("div", { class: "top" }, h("h1", null, "Overview"), state, store, h("span", { class: "grow" }), segments),
    health,
    caption,
    figures,
    h("div", { class: "grid" }, h("div", { class: "card" }, charts.verdicts), h("div", { class: "card half" }, charts.blocks), h("div", { class: "card half" }, charts.latency)),
    alerts,
    tops,
    h("div", { class: "grid" }, h("div", { class: "card half" }, charts.keys), h("div", { class: "card half" }, charts.degraded)),
  );

  function draw() {
    const { times, decisions, blocks, p50, p99, keys, degraded } = series;
    const each = (group, names) => names.map((name) => group[name].map((value) => value / series.stepSec));
    charts.verdicts.update({ times, values: each(decisions, VERDICTS) });
    charts.blocks.update({ times, values: each(blocks, LAYERS) });
    charts.keys.update({ times, values: [keys] });
    const all = times.map((_, index) => VERDICTS.reduce((sum, name) => sum + decisions[name][index], 0));
    // Without a decision there is no time and no share.
    const decided = (list) => list.map((value, index) => (all[index] > 0 ? value : null));
    charts.latency.update({ times, values: [decided(p50), decided(p99)] });
    charts.degraded.update({ times, values: [decided(degraded.map((value, index) => value / all[index]))] });
  }

  function add(sample) {
    if (series === null || period.id !== "5min") return;
    const push = (list, value) => {
      list.push(value);
      if (list.length > LIVE) list.shift();
    };
    push(series.times, sample.at);
    VERDICTS.forEach((name) => push(series.decisions[name], sample.decisions[name]));
    LAYERS.forEach((name) => push(series.blocks[name], sample.blocks[name]));
    for (const name of ["p50", "p99", "keys", "degraded"]) push(series[name], sample[name]);
    draw();
  }

  const figure = (name, value, note) => h("div", { class: "figure" }, h("dt", null, name), h("dd", null, value, note && h("small", null, note)));
  const top = (title, rows, key, layer, counted, empty) => {
    const note = (row) => (row.error > 0 ? `to ${count(row[counted] + row.error)}` : null);
    const shown = rows.map((row) => ({ label: row[key], value: row[counted], note: note(row), link: layer && subjectLink(layer, row[key]) }));
    return card(title, null, bars(shown, count, empty));
  };

  async function refresh() {
    try {
      const [stats, raised, ready] = await Promise.all([get(`/v1/stats?period=${period.stats}`), get("/v1/alerts?state=raised"), readiness()]);
      caption.textContent = `Totals and top lists ${period.totals}`;
      replace(
        figures,
        figure("Edge blocks", count(stats.edgeBlocks)),
        figure("Tenant blocks", count(stats.tenantBlocks)),
        figure("User blocks", count(stats.userBlocks)),
        figure("Endpoint blocks", count(stats.endpointBlocks)),
        figure("Other blocks", count(stats.otherBlocks)),
        figure("Warnings", count(stats.warningsIssued)),
        figure("Shadow bans", count(stats.shadowBansActive), "now"),
        figure("Bans", count(stats.bansActive), "now"),
      );
      const lists = [
        ...[
          ["Top blocked tenants", stats.topBlockedTenants, "tenant", "tenant"],
          ["Top blocked endpoints", stats.topBlockedEndpoints, "endpoint", null],
          ["Top blocked addresses", stats.topBlockedIps, "ip", "edge"],
          ["Top blocked users", stats.topBlockedUsers, "user", "user"],
        ].map((list) => top(...list, "blocks", "Nobody was blocked in this period.")),
        ...[
          ["Failed logins by address", stats.topFailedLoginIps, "ip", "edge"],
          ["Failed logins by account", stats.topFailedLoginAccounts, "account", "account"],
        ].map((list) => top(...list, "failures", "No login has failed in this period.")),
      ];
      lists.forEach((list) => list.classList.add("half"));
      replace(tops, lists);
      replace(
        alerts,
        raised.length > 0 &&
          h(
            "div",
            { class: "grid" },
            card(
              "Alerts",
              null,
              table(
                "Alerts that are raised",
                [
                  { name: "alert", cell: (row) => row.alert },
                  { name: "level", cell: (row) => h("span", { class: `tag ${row.level}` }, row.level) },
                  { name: "who", cell: (row) => who(row) },
                  { name: "count", number: true, cell: (row) => count(row.count) },
                  { name: "threshold", number: true, cell: (row) => `${count(row.threshold)} in ${duration(row.periodSec)}` },
                  { name: "since", cell: (row) => dateTime(row.since) },
                ],
                // The worst first.
                raised.sort((one, other) => (one.level === "critical" ? 0 : 1) - (other.level === "critical" ? 0 : 1) || other.count - one.count),
                "",
              ),
            ),
          ),
      );
      store.className = `state ${ready.status === "ok" ? "good" : "bad"}`;
      store.textContent = ready.status === "ok" ? "store, files and policy are in order" : ready.status;
      replace(health, ready.status === "ok" ? null : h("p", { class: "notice", role: "alert" }, h("strong", null, `The server is ${ready.status}. `), ready.reason ?? ""));
    } catch (problem) {
      replace(health, h("p", { class: "notice", role: "alert" }, problem.message));
    }
  }

  async function choose(next) {
    period = next;
    [...segments.children].forEach((button, index) => button.setAttribute("aria-pressed", String(PERIODS[index] === period)));
    try {
      series = await get(`/v1/series?period=${period.id}`);
      draw();
    } catch (problem) {
      replace(health, h("p", { class: "notice", role: "alert" }, problem.message));
    }
    refresh();
  }

  choose(period);
  const end = follow("/v1/series", add, (isLive) => {
    state.className = `state ${isLive ? "good" : "bad"}`;
    state.textContent = isLive ? "live" : "connection lost, trying again";
    if (!isLive) {
      store.className = "state";
      store.textContent = "unknown";
    }
  });
  const timer = setInterval(refresh, 5000);
  return {
    element,
    close() {
      end();
      clearInterval(timer);
    },
  };
}

/** Whom an alert is about: one address, or many. */
function who(row) {
  if (row.key) return h("a", { href: subjectLink("edge", row.key) }, row.key);
  if (!row.largest) return "–";
  return [`${count(row.addresses)} addresses, most from `, h("a", { href: subjectLink("edge", row.largest) }, row.largest)];
}

/** The answer of `/readyz`, which is 503 while the server is degraded. */
async function readiness() {
  try {
    return await get("/readyz");
  } catch (problem) {
    return problem.body ?? { status: "unknown", reason: problem.message };
  }
}
