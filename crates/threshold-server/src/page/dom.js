// Builds elements. Text is always set as text, never parsed as HTML: names of users, paths and agents come from attackers.

const SVG = "http://www.w3.org/2000/svg";

// Control characters, and those that reorder or hide text, as a name of an attacker may have them.
const INVISIBLE = /[\u0000-\u0008\u000b-\u001f\u007f-\u009f\u00ad\u061c\u180e\u200b-\u200f\u2028-\u202e\u2060-\u2069\ufeff]/gu;

/** Writes invisible characters as their numbers, so that no name looks like another one. */
export const printable = (text) => text.replace(INVISIBLE, (character) => `\\u{${character.codePointAt(0).toString(16)}}`);

const shown = (children) =>
  children
    .flat(Infinity)
    .filter((child) => child !== null && child !== undefined && child !== false)
    .map((child) => (child instanceof Node ? child : printable(String(child))));

function fill(element, properties, children) {
  for (const [name, value] of Object.entries(properties ?? {})) {
    if (value === undefined || value === null || value === false) continue;
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (name === "style") for (const [key, text] of Object.entries(value)) element.style.setProperty(key, text);
    else if (name === "title" || name === "aria-label") element.setAttribute(name, printable(String(value)));
    else element.setAttribute(name, value === true ? "" : String(value));
  }
  element.append(...shown(children));
  return element;
}

/** Creates an HTML element: `h("p", {class: "quiet"}, "text", child)`. */
export function h(tag, properties, ...children) {
  return fill(document.createElement(tag), properties, children);
}

/** Creates an SVG element. */
export function s(tag, properties, ...children) {
  return fill(document.createElementNS(SVG, tag), properties, children);
}

/** Replaces the children of an element. */
export function replace(element, ...children) {
  element.replaceChildren(...shown(children));
  return element;
}

/** Tells a screen reader what has changed. */
export function announce(text) {
  const region = document.getElementById("announcer");
  region.textContent = "";
  // A text that is set twice is read once, unless it was empty between.
  requestAnimationFrame(() => {
    region.textContent = text;
  });
}

/**
 * Creates a table with a caption, headings and rows. A column is `{name, cell(row), number?}`.
 * `empty` is shown in place of the table if there are no rows.
 */
export function table(caption, columns, rows, empty) {
  if (rows.length === 0) return h("p", { class: "empty" }, empty);
  const head = columns.map((column) => h("th", { scope: "col", class: column.number && "number" }, column.name));
  const body = rows.map((row) =>
    h("tr", null, columns.map((column) => h("td", { class: column.number ? "number" : column.short && "nowrap" }, column.cell(row)))),
  );
  return h(
    "div",
    { class: "scroll", tabindex: "0", role: "region", "aria-label": caption },
    h("table", null, h("caption", { class: "hidden" }, caption), h("thead", null, h("tr", null, head)), h("tbody", null, body)),
  );
}

/** Creates a card: a section with a heading, what belongs beside the heading, and contents. */
export function card(title, aside, ...children) {
  return h("section", { class: "card" }, h("header", null, h("h2", null, title), aside), children);
}

/**
 * Asks for a reason, and makes a change with it. The dialog stays open with the server's message if the change is refused, so that nothing
 * has to be typed again. Resolves to whether the change was made.
 */
export function askReason(title, text, action, work, fields = []) {
  return new Promise((resolve) => {
    let isDone = false;
    const reason = h("input", { name: "reason", required: true, maxlength: 200, autocomplete: "off", id: "dialog-reason" });
    const error = h("p", { class: "error", role: "alert" });
    const go = h("button", { type: "submit", class: "button primary" }, action);
    const submit = async (event) => {
      event.preventDefault();
      go.disabled = true;
      try {
        await work(reason.value);
        isDone = true;
        dialog.close();
      } catch (problem) {
        replace(error, problem.message);
        go.disabled = false;
      }
    };
    const form = h(
      "form",
      { onsubmit: submit },
      h("h2", { id: "dialog-title" }, title),
      h("p", { class: "quiet" }, text),
      fields.map((field) => h("label", null, h("span", null, field.label), field.input)),
      h("label", null, h("span", null, "Reason, for the audit"), reason),
      error,
      h("div", { class: "actions" }, h("button", { type: "button", class: "button", onclick: () => dialog.close() }, "Cancel"), go),
    );
    const dialog = h("dialog", { "aria-labelledby": "dialog-title" }, form);
    const before = document.activeElement;
    dialog.addEventListener("close", () => {
      dialog.remove();
      // What was focused may have gone with the change.
      (before?.isConnected ? before : document.getElementById("main"))?.focus?.();
      resolve(isDone);
    });
    document.body.append(dialog);
    dialog.showModal();
    (fields[0]?.input ?? reason).focus();
  });
}
