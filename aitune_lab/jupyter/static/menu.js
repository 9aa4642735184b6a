// @ts-check
/** The menu of a row's backend: automatic, each candidate with its figures, leave alone. */

import { element, icon } from "./dom.js";

/** @typedef {import("./types").CandidateFigures} CandidateFigures */
/** @typedef {import("./types").Command} Command */

const BUSY_AFTER_MS = 1000;

/**
 * Open the menu under a button.
 * @param {HTMLElement} host what it is put into; it is shown above everything else
 * @param {HTMLElement} anchor
 * @param {{title: string, note: string, rule: string, wanted: string, path: string}} about
 * @param {Promise<CandidateFigures[]>} asked
 * @param {{choose: (command: Command) => void, closed: () => void}} on
 * @returns {() => void} closes it
 */
export function openMenu(host, anchor, about, asked, on) {
  const body = element("div", { class: "ait-menu-items", role: "none" });
  const menu = element("div", { class: "ait-menu", role: "menu", popover: "manual", "aria-label": `Backend of ${about.title}` });
  const head = element("div", { class: "ait-menu-head", role: "none" }, element("span", { class: "ait-menu-title" }, about.title));
  if (about.note) head.append(element("span", { class: "ait-menu-note" }, about.note));
  menu.append(head, body);
  let open = true;

  const wait = element("div", { class: "ait-menu-note ait-menu-wait" }, "Asking for its candidates …");
  const automatic = item("Automatic", "the fastest candidate that is right", about.rule === "auto", () => choose({ op: "unpin", path: about.path }));
  const leave = item("Leave alone (eager)", "run the original, tune nothing here", about.rule === "leave", () => choose({ op: "leave", path: about.path }));
  body.append(automatic, wait, element("div", { class: "ait-menu-line", role: "separator" }), leave);
  const busy = setTimeout(() => {
    wait.textContent = "The kernel is busy: the candidates come when the running cell ends.";
  }, BUSY_AFTER_MS);
  asked.then(fill, (error) => {
    wait.textContent = String(error.message ?? error);
  }).finally(() => clearTimeout(busy));

  /** @param {CandidateFigures[]} candidates */
  function fill(candidates) {
    const rows = candidates.map(candidateItem);
    if (rows.length) wait.replaceWith(...rows);
    else wait.textContent = "No candidate has been tried yet.";
    if (open) place();
  }

  /** @param {CandidateFigures} figures */
  function candidateItem(figures) {
    if (figures.label === "eager") return reference(figures);
    const pinned = figures.pinned && about.rule !== "auto";
    const made = item(figures.label, figures.status, pinned, () => {
      if (figures.pinnable === "yes") choose({ op: "pin", path: about.path, candidate: figures.label, accept_error: false });
      if (figures.pinnable === "accept") confirmError(made, figures);
    });
    const name = made.querySelector(".ait-item-name");
    if (figures.chosen) name?.append(element("span", { class: "ait-chosen" }, "chosen"));
    made.append(...figuresOf(figures));
    if (figures.pinnable === "no") made.setAttribute("aria-disabled", "true");
    return made;
  }

  /** A candidate out of tolerance takes a second click, which says what it accepts. @param {HTMLElement} made @param {CandidateFigures} figures */
  function confirmError(made, figures) {
    if (made.dataset.asked) {
      choose({ op: "pin", path: about.path, candidate: figures.label, accept_error: true });
      return;
    }
    made.dataset.asked = "true";
    const off = figures.error ? `, off by ${figures.error}` : "";
    const question = `Out of tolerance${off}. Choose it once more to pin it all the same.`;
    made.querySelector(".ait-item-more")?.remove();
    made.append(element("span", { class: "ait-item-more ait-item-ask", role: "alert" }, question));
  }

  /** @param {string} label @param {string} more @param {boolean} checked @param {() => void} pick */
  function item(label, more, checked, pick) {
    const made = element(
      "div",
      { class: "ait-item", role: "menuitemradio", "aria-checked": String(checked), tabindex: -1 },
      element("span", { class: "ait-item-mark" }, ...(checked ? [icon("check")] : [])),
      element("span", { class: "ait-item-name" }, label),
    );
    if (more) made.append(element("span", { class: "ait-item-more", title: more }, more));
    made.addEventListener("click", pick);
    return made;
  }

  /** @param {Command} command */
  function choose(command) {
    close();
    on.choose(command);
  }

  function close() {
    if (!open) return;
    open = false;
    clearTimeout(busy);
    document.removeEventListener("pointerdown", outside, true);
    menu.remove();
    on.closed();
  }

  /** @param {Event} event */
  function outside(event) {
    if (!event.composedPath().includes(menu)) close();
  }

  function place() {
    const at = anchor.getBoundingClientRect();
    const size = menu.getBoundingClientRect();
    const below = at.bottom + 4 + size.height <= innerHeight || at.top < size.height + 4;
    menu.style.left = `${Math.max(8, Math.min(at.left, innerWidth - size.width - 8))}px`;
    menu.style.top = `${below ? Math.min(at.bottom + 4, Math.max(8, innerHeight - size.height - 8)) : at.top - size.height - 4}px`;
  }

  /** @param {number} to */
  function focusItem(to) {
    const items = /** @type {NodeListOf<HTMLElement>} */ (menu.querySelectorAll(".ait-item"));
    items[(to + items.length) % items.length].focus();
  }

  menu.addEventListener("keydown", (event) => {
    const items = [...menu.querySelectorAll(".ait-item")];
    const now = items.indexOf(/** @type {Element} */ (document.activeElement));
    const keys = /** @type {Record<string, () => void>} */ ({
      ArrowDown: () => focusItem(now + 1),
      ArrowUp: () => focusItem(now - 1),
      Home: () => focusItem(0),
      End: () => focusItem(-1),
      Enter: () => /** @type {HTMLElement} */ (items[now])?.click(),
      " ": () => /** @type {HTMLElement} */ (items[now])?.click(),
      Escape: close,
      Tab: close,
    });
    if (!(event.key in keys)) return;
    event.preventDefault();
    keys[event.key]();
  });

  host.append(menu);
  menu.showPopover?.();
  place();
  document.addEventListener("pointerdown", outside, true);
  /** @type {HTMLElement} */ (menu.querySelector('[aria-checked="true"]') ?? automatic).focus();
  return close;
}

/** Eager is what all others are compared with: shown, but no choice of its own. @param {CandidateFigures} figures */
function reference(figures) {
  return element(
    "div",
    { class: "ait-item-eager", role: "none" },
    element("span", { class: "ait-item-mark" }),
    element("span", { class: "ait-item-name" }, "eager"),
    ...figuresOf(figures),
  );
}

/** @param {CandidateFigures} figures */
function figuresOf(figures) {
  const latency = element("span", { class: "ait-item-latency ait-number" }, figures.latency ? `${figures.latency} ms` : "");
  if (figures.at) latency.title = `at ${figures.at}`;
  const off = figures.error_class ? `${figures.error_class} ${figures.error}`.trim() : "";
  const error = element("span", { class: "ait-item-error" }, off);
  if (figures.error_class === "out of tolerance") error.classList.add("ait-refused");
  return [latency, element("span", { class: "ait-item-speedup ait-number" }, figures.speedup), error];
}
