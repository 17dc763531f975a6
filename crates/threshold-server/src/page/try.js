// Describes a request and shows what the server would decide, and why. Nothing is charged.

import { post } from "./api.js";
import { card, h, replace, table } from "./dom.js";
import { count, duration, until } from "./format.js";

const FIELDS = [
  { name: "ip", label: "Address", example: "203.0.113.7" },
  { name: "tenant", label: "Tenant", example: "acme" },
  { name: "user", label: "User", example: "u1" },
  { name: "method", label: "Method", example: "POST" },
  { name: "path", label: "Path", example: "/api/posts" },
  { name: "host", label: "Host", example: "" },
  { name: "endpoint", label: "Endpoint", example: "" },
  { name: "category", label: "Category", example: "" },
  { name: "tier", label: "Tier", example: "" },
  { name: "cost", label: "Cost", example: "1", number: true },
];

export function tryRequest() {
  const inputs = new Map(FIELDS.map((field) => [field.name, h("input", { name: field.name, placeholder: field.example, type: field.number ? "number" : "text", min: field.number && 0, autocomplete: "off", spellcheck: "false" })]));
  const result = h("div", { "aria-live": "polite" });
  async function explain(event) {
    event?.preventDefault();
    const request = {};
    for (const field of FIELDS) {
      const value = inputs.get(field.name).value.trim();
      if (value !== "") request[field.name] = field.number ? Number(value) : value;
    }
    try {
      replace(result, describe(await post("/v1/explain", request)));
    } catch (problem) {
      replace(result, h("p", { class: "notice error", role: "alert" }, problem.field ? `${problem.field}: ${problem.message}` : problem.message));
    }
  }
  return {
    element: h(
      "div",
      null,
      h("div", { class: "top" }, h("h1", null, "Try a request"), h("span", { class: "quiet" }, "Nothing is charged.")),
      h("div", { class: "grid" }, h("form", { class: "card", onsubmit: explain }, h("div", { class: "fields" }, FIELDS.map((field) => h("label", null, h("span", null, field.label), inputs.get(field.name)))), h("div", { class: "actions" }, h("button", { class: "button primary", type: "submit" }, "Decide")))),
      result,
    ),
  };
}

function describe({ decision, rules, penalties, path }) {
  const head = h(
    "p",
    { class: "verdict" },
    h("span", { class: `tag ${decision.verdict}` }, decision.verdict),
    ` ${decision.allowed ? "It would be allowed" : "It would be denied"}`,
    decision.rule ? ` by the rule ${decision.rule}` : "",
    decision.retryAfter ? `; it fits in ${duration(decision.retryAfter)}` : "",
    decision.delayMs > 0 ? `; delayed by ${decision.delayMs} ms` : "",
    ".",
  );
  const refused = path?.refusedAtClientDoors;
  return h(
    "div",
    { class: "grid" },
    card("Decision", null, head, refused && h("p", { class: "notice" }, `At doors that face clients this path is refused: ${refused.message}`)),
    penalties.length > 0 &&
      card(
        "Penalties",
        null,
        table(
          "Penalties",
          [
            { name: "layer", cell: (one) => one.layer },
            { name: "verdict", cell: (one) => one.verdict },
            { name: "key", cell: (one) => one.key ?? "–" },
            { name: "reason", cell: (one) => one.reason ?? "–" },
            { name: "ends", cell: (one) => until(one.until) },
          ],
          penalties,
          "",
        ),
      ),
    card(
      "Rules",
      null,
      table(
        "Rules",
        [
          { name: "rule", cell: (rule) => h("a", { href: `#/policy/${encodeURIComponent(rule.name ?? rule.rule)}` }, rule.name ?? rule.rule) },
          { name: "layer", cell: (rule) => rule.layer },
          { name: "applies", cell: (rule) => (rule.applies ? "yes" : (rule.why ?? rule.reason ?? "no")) },
          { name: "limit", cell: (rule) => (rule.limit === null || rule.limit === undefined ? "–" : String(rule.limit)) },
          { name: "left before", number: true, cell: (rule) => count(rule.before) },
          { name: "left after", number: true, cell: (rule) => count(rule.after) },
        ],
        rules,
        "The policy has no rules.",
      ),
    ),
  );
}
