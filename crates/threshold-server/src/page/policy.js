// The policy as it runs, rule by rule, with what each has done; and an editor that checks a draft and rehearses it.

import { get, post, put } from "./api.js";
import { announce, askReason, card, h, replace, table } from "./dom.js";
import { count, dateTime, percent } from "./format.js";

/** How long after the last key a draft is checked. */
const PAUSE = 400;

/** The draft, until it is saved or discarded: other views may be looked at meanwhile. */
let kept = null;
addEventListener("beforeunload", (event) => {
  if (kept !== null) event.preventDefault();
});

export function policy({ session, rest: [marked] }) {
  const body = h("div");
  const element = h("div", null, h("div", { class: "top" }, h("h1", null, "Policy")), body);
  let timer = null;

  async function load(state = null) {
    if (state === null && body.childElementCount === 0) replace(body, h("p", { class: "empty" }, "Loading …"));
    try {
      replace(body, describe(state ?? (await get("/v1/policy"))));
      document.querySelector(".row.marked")?.scrollIntoView({ block: "center" });
    } catch (problem) {
      replace(body, h("p", { class: "notice error", role: "alert" }, problem.message));
    }
  }

  /** Loads the policy until a condition holds, for a few seconds. */
  async function loaded(holds) {
    let state = await get("/v1/policy");
    for (let tries = 0; tries < 8 && !holds(state); tries += 1) {
      await new Promise((done) => setTimeout(done, 500));
      state = await get("/v1/policy");
    }
    return state;
  }

  function describe(state) {
    const line = state.rules.find((rule) => rule.name === marked)?.line ?? null;
    const rules = table(
      "Rules",
      [
        { name: "rule", cell: (rule) => h("a", { href: `#/policy/${encodeURIComponent(rule.name)}` }, rule.name) },
        { name: "layer", cell: (rule) => rule.layer },
        { name: "mode", cell: (rule) => rule.mode },
        { name: "limit", cell: (rule) => rule.limit || "by tier" },
        { name: "per", cell: (rule) => rule.per },
        { name: "hits", number: true, cell: (rule) => count(rule.hits) },
        { name: "near limit", number: true, cell: (rule) => count(rule.near) },
        { name: "blocked", number: true, cell: (rule) => count(rule.blocked) },
        { name: "would have blocked", number: true, cell: (rule) => count(rule.observed) },
      ],
      state.rules,
      "The policy has no rules.",
    );
    const sample = state.recorded === 0 ? "No requests are recorded yet." : `Of ${count(state.recorded)} requests since ${dateTime(state.since)}${state.share < 1 ? `, a sample of ${percent(state.share)}` : ""}. Counters begin empty, so that limits of more than an hour look wider than they are.`;
    const text = h(
      "pre",
      { class: "code", tabindex: "0", "aria-label": "The policy as it runs" },
      state.text.split("\n").map((row, index) => h("span", { class: index + 1 === line ? "row marked" : "row" }, `${row}\n`)),
    );
    return h(
      "div",
      { class: "grid" },
      card("Rules", h("span", { class: "quiet" }, sample), rules),
      card("As it runs", h("span", { class: "quiet" }, `generation ${state.generation}${session.role === "reader" ? ", without comments" : ""}`), h("div", { class: "scroll" }, text)),
      editor(state),
    );
  }

  function editor(state) {
    const draft = h("textarea", { class: "code", spellcheck: "false", autocomplete: "off", autocapitalize: "off", wrap: "off", "aria-label": "Draft of the policy" });
    draft.value = kept?.text ?? state.text;
    const findings = h("div", { "aria-live": "polite" });
    const rehearsal = h("div", { "aria-live": "polite" });
    const replay = h("button", { class: "button", type: "button", disabled: true, onclick: () => rehearse() }, "Rehearse on the last hour");
    const save = h("button", { class: "button primary", type: "button", disabled: true, onclick: () => store() }, "Save");
    const discard = h("button", { class: "button", type: "button", hidden: kept === null, onclick: () => reset() }, "Discard the draft");
    let rehearsed = null;
    // Somebody else has changed the policy since the draft was begun.
    const rebase = kept !== null && kept.basedOn !== state.text
      && h(
        "p",
        { class: "notice", role: "alert" },
        "The policy has changed since this draft was begun, and saving the draft would undo that. Compare it with the policy as it runs. ",
        h("button", { class: "button small", type: "button", onclick: () => {
          kept.basedOn = state.text;
          rebase.remove();
        } }, "Save it over the new policy"),
      );

    function reset() {
      kept = null;
      draft.value = state.text;
      discard.hidden = true;
      lint();
    }

    async function lint() {
      const text = draft.value;
      try {
        const { findings: found } = await post("/v1/policy/lint", { text });
        if (text !== draft.value) return;
        const isValid = !found.some((one) => one.level === "error");
        replay.disabled = !isValid;
        save.disabled = !(isValid && rehearsed === text && state.editable && session.role === "operator");
        replace(
          findings,
          found.length === 0
            ? h("p", { class: "quiet" }, text === state.text ? "The draft is the policy as it runs." : "Nothing wrong was found.")
            : h("ul", { class: "findings" }, found.map((one) => h("li", { class: one.level === "error" ? "wrong" : "" }, h("strong", null, `${one.level}[${one.code}] `), one.line ? `line ${one.line}: ` : "", one.message))),
        );
      } catch (problem) {
        replace(findings, h("p", { class: "error", role: "alert" }, problem.message));
      }
    }

    async function rehearse() {
      const text = draft.value;
      replay.disabled = true;
      replace(rehearsal, h("p", { class: "quiet" }, "Rehearsing …"));
      try {
        const result = await post("/v1/policy/rehearse", { text });
        rehearsed = text;
        replace(rehearsal, describeRehearsal(result));
        announce("The rehearsal is done");
      } catch (problem) {
        replace(rehearsal, h("p", { class: "error", role: "alert" }, problem.message));
      }
      await lint();
    }

    async function store() {
      let conflict = false;
      const work = async (reason) => {
        try {
          await put("/v1/policy", { text: draft.value, basedOn: kept?.basedOn ?? state.text, reason });
        } catch (problem) {
          // Nothing is overwritten: the draft is compared with the new file once more.
          if (problem.code !== "policy_changed") throw problem;
          conflict = true;
        }
      };
      if (!(await askReason("Save the policy?", "It is written to the server's policy file and in force within seconds.", "Save", work))) return;
      if (conflict) {
        await load(await loaded((now) => now.text !== state.text));
        body.prepend(h("p", { class: "notice error", role: "alert" }, "Nothing was saved: the policy file has changed meanwhile. Your draft is kept below."));
        return;
      }
      const text = draft.value;
      kept = null;
      // A server looks at its file each second.
      const now = await loaded((one) => one.text === text);
      await load(now);
      const isInForce = now.text === text;
      body.prepend(h("p", { class: "notice", role: "status" }, isInForce ? "The policy is saved and in force." : "The policy is saved, and not in force yet: the log of the server says why."));
      announce("The policy is saved");
    }

    draft.addEventListener("input", () => {
      kept = draft.value === state.text ? null : { text: draft.value, basedOn: kept?.basedOn ?? state.text };
      discard.hidden = kept === null;
      save.disabled = true;
      clearTimeout(timer);
      timer = setTimeout(lint, PAUSE);
    });
    lint();
    const note = session.role !== "operator" ? "A read-only token checks drafts; operators rehearse them." : state.editable ? "Rehearse a draft before you save it." : "This server saves no policies: it was started without --allow-edit.";
    return card("Draft", h("span", { class: "quiet" }, note), rebase, draft, h("div", { class: "actions" }, discard, session.role === "operator" && replay, state.editable && session.role === "operator" && save), findings, rehearsal);
  }

  load();
  return { element, close: () => clearTimeout(timer) };
}

function describeRehearsal(result) {
  if (result.requests === 0) return h("p", { class: "empty" }, "No requests were recorded in the last hour.");
  const share = result.share < 1 ? ` They are ${percent(result.share)} of all, because there were too many to keep.` : "";
  return h(
    "div",
    null,
    h("h3", null, "Rehearsal"),
    h("p", null, `${count(result.requests)} requests since ${dateTime(result.since)}.${share}`),
    h("dl", { class: "figures wide" }, [["Allowed now", result.present.allowed], ["Denied now", result.present.denied], ["Allowed by the draft", result.draft.allowed], ["Denied by the draft", result.draft.denied], ["Newly denied", result.newlyDenied], ["Newly allowed", result.newlyAllowed]].map(([name, value]) => h("div", { class: "figure" }, h("dt", null, name), h("dd", null, count(value))))),
    table(
      "Rules of the draft",
      [
        { name: "rule", cell: (rule) => rule.name },
        { name: "denied now", number: true, cell: (rule) => count(rule.deniedNow) },
        { name: "denied by the draft", number: true, cell: (rule) => count(rule.deniedByDraft) },
      ],
      result.rules,
      "No rule denied anything.",
    ),
  );
}
