// The frame of the page: signing in, navigation, and which view is shown.

import { get, post, remove, whenSignedOut } from "./api.js";
import { announce, h, replace } from "./dom.js";
import { overview } from "./overview.js";
import { events } from "./events.js";
import { penalties } from "./penalties.js";
import { subject } from "./subject.js";
import { policy } from "./policy.js";
import { tryRequest } from "./try.js";

// A view is a function of the session and the parts of its address. It returns its element, and what to do when it is left.
const VIEWS = [
  { path: "", name: "Overview", view: overview },
  { path: "events", name: "Events", view: events },
  { path: "penalties", name: "Bans and locks", view: penalties },
  { path: "subject", name: "Subject", view: subject },
  { path: "policy", name: "Policy", view: policy },
  { path: "try", name: "Try a request", view: tryRequest },
];

const app = document.getElementById("app");
let session = null;
let leave = () => {};
let alertsTimer = null;

const theme = {
  get: () => document.documentElement.dataset.theme ?? "auto",
  set(name) {
    if (name === "auto") delete document.documentElement.dataset.theme;
    else document.documentElement.dataset.theme = name;
    try {
      localStorage.setItem("threshold-theme", name);
    } catch {
      // Storage may be switched off; the theme then lasts until the page is left.
    }
  },
};
try {
  theme.set(localStorage.getItem("threshold-theme") ?? "auto");
} catch {
  theme.set("auto");
}

function signIn(message) {
  leave();
  leave = () => {};
  clearInterval(alertsTimer);
  const token = h("input", { type: "password", name: "token", required: true, autocomplete: "current-password", id: "token" });
  const error = h("p", { class: "error", role: "alert" }, message ?? "");
  const submit = async (event) => {
    event.preventDefault();
    error.textContent = "";
    try {
      session = await post("/v1/session", { token: token.value });
      frame();
    } catch (problem) {
      error.textContent = problem.message;
      token.select();
    }
  };
  document.title = "Sign in · Threshold";
  replace(
    app,
    h(
      "main",
      { class: "sign-in", id: "main" },
      h("p", { class: "brand" }, h("img", { src: "page/icon.svg", alt: "" }), "Threshold"),
      h(
        "section",
        { class: "card" },
        h("form", { onsubmit: submit }, h("h1", null, "Sign in"), h("p", { class: "quiet" }, "With an operator's token: THRESHOLD_ADMIN_TOKEN, or THRESHOLD_READ_TOKEN to look only."), h("label", null, h("span", null, "Token"), token), error, h("button", { class: "button primary", type: "submit" }, "Sign in")),
      ),
    ),
  );
  token.focus();
}

function frame() {
  const links = new Map();
  const item = ({ path, name }) => {
    const link = h("a", { href: `#/${path}` }, name);
    links.set(path, link);
    return h("li", null, link);
  };
  const badge = h("span", { class: "badge", hidden: true });
  const main = h("main", { id: "main", tabindex: "-1" });
  const themes = h(
    "select",
    { "aria-label": "Colours", onchange: (event) => theme.set(event.target.value) },
    ["auto", "light", "dark"].map((name) => h("option", { value: name, selected: theme.get() === name }, name)),
  );
  const out = session.signIn && h("button", { class: "button small", type: "button", onclick: signOut }, "Sign out");
  const role = session.role === "reader" ? "read only" : session.signIn ? "operator" : "open to this machine";
  replace(
    app,
    session.demo && h("div", { class: "demo", role: "note" }, "This is a demo: its tenants, users and traffic are made up."),
    h(
      "div",
      { class: "frame" },
      h(
        "div",
        { class: "side" },
        h("div", { class: "brand" }, h("img", { src: "page/icon.svg", alt: "" }), "Threshold"),
        h("nav", { "aria-label": "Views" }, h("ul", null, VIEWS.map(item))),
        h("div", { class: "foot" }, h("span", null, `${session.node} · ${session.version}`), h("span", null, role), h("span", null, `times: ${Intl.DateTimeFormat().resolvedOptions().timeZone}`), themes, out),
      ),
      main,
    ),
  );
  links.get("").append(badge);

  const show = () => {
    const [path = "", ...rest] = location.hash.replace(/^#\/?/, "").split("/").map((part) => {
      try {
        return decodeURIComponent(part);
      } catch {
        return part;
      }
    });
    const found = VIEWS.find((one) => one.path === path) ?? VIEWS[0];
    leave();
    for (const [own, link] of links) {
      if (own === found.path) link.setAttribute("aria-current", "page");
      else link.removeAttribute("aria-current");
    }
    document.title = `${found.name} · Threshold`;
    const { element, close } = found.view({ session, rest });
    leave = close ?? (() => {});
    replace(main, element);
    announce(found.name);
  };
  window.onhashchange = () => {
    show();
    main.focus({ preventScroll: true });
    scrollTo(0, 0);
  };
  show();

  const watchAlerts = async () => {
    try {
      const raised = await get("/v1/alerts?state=raised");
      badge.hidden = raised.length === 0;
      replace(badge, String(raised.length), h("span", { class: "hidden" }, " alerts raised"));
    } catch {
      // The overview says that the server does not answer.
    }
  };
  clearInterval(alertsTimer);
  alertsTimer = setInterval(watchAlerts, 5000);
  watchAlerts();
}

async function signOut() {
  try {
    await remove("/v1/session");
  } finally {
    signIn();
  }
}

whenSignedOut(() => signIn("The session has ended. Sign in again."));

try {
  session = await get("/v1/session");
  if (session.role === "none") signIn();
  else frame();
} catch (problem) {
  replace(app, h("main", { class: "sign-in", id: "main" }, h("p", { class: "notice", role: "alert" }, `Threshold cannot be reached: ${problem.message}.`)));
}
