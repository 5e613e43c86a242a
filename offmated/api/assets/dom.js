// What all parts of the page use: elements, tables that keep the focus, questions.

import { printable } from "./words.js";

export const find = (selector) => document.querySelector(selector);

export function element(name, text = "", kind = "") {
  const made = document.createElement(name);
  made.textContent = printable(text);
  if (kind) made.className = kind;
  return made;
}

// A button without text: its style draws it, and `name` says what it does. `at` is its name in `fill`.
export function sign(kind, name, at, doing) {
  const made = element("button", "", kind);
  made.type = "button";
  made.title = printable(name);
  made.setAttribute("aria-label", printable(name));
  made.dataset.at = at;
  if (doing) made.onclick = doing;
  else made.setAttribute("aria-disabled", "true"); // and not `disabled`: it would lose the focus
  return made;
}

// Puts new children into `place`. What had the focus there has it again, in its new form.
export function fill(place, made) {
  const at = place.contains(document.activeElement) ? document.activeElement.dataset.at : null;
  place.replaceChildren(...made);
  if (at) place.querySelector(`[data-at="${at}"]`)?.focus({ preventScroll: true });
}

export function ask(heading, text, word) {
  const dialog = find("#ask");
  dialog.querySelector("h2").textContent = heading;
  dialog.querySelector("p").textContent = printable(text);
  dialog.querySelector(".yes").textContent = word;
  dialog.returnValue = "";
  dialog.showModal();
  return new Promise((answered) => { dialog.onclose = () => answered(dialog.returnValue === "yes"); });
}
