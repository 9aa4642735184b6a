// @ts-check
/** The module tree: virtual rows that are searched, sorted, opened and pinned by mouse or keyboard. */

import { canPin, cells, spoken, title } from "./cells.js";
import { element, icon } from "./dom.js";
import { openMenu } from "./menu.js";
import { Rows } from "./rows.js";

/** @typedef {import("./types").Api} Api */
/** @typedef {import("./types").Columns} Columns */
/** @typedef {import("./types").Command} Command */
/** @typedef {import("./types").CandidateFigures} CandidateFigures */

const ROW_HEIGHT = 28;
const HEAD_HEIGHT = 30;
const BEYOND = 8;
const SELECT_AFTER_MS = 120;
const QUEUED_AFTER_MS = 1000;
/** @type {[string, string, import("./rows.js").SortKey | null][]} */
const HEADER = [
  ["ait-name", "Module", null],
  ["ait-share", "Share of time", "share"],
  ["ait-number ait-calls", "Calls", "calls"],
  ["ait-number ait-parameters", "Parameters", "parameters"],
  ["ait-backend", "Backend", "choice"],
  ["ait-number ait-speedup", "Speed-up", "speedup"],
  ["ait-error", "Worst error", "error"],
  ["ait-state", "State", "state"],
];
let mounted = 0;

/**
 * Draw a tree into `host`. It needs nothing of the front end but the answers to its commands.
 * @param {HTMLElement} host
 * @param {Api} api
 * @returns {import("./types").Mounted}
 */
export function mount(host, api) {
  const id = `ait-tree-${++mounted}`;
  let rows = new Rows(api.columns);
  let focused = rows.shown[0] ?? -1;
  let selectTimer = 0;
  let frame = 0;
  /** @type {(() => void) | null} */
  let closeMenu = null;
  /** @type {Map<number, HTMLElement>} */
  const drawn = new Map();
  /** @type {Set<string>} */
  const waiting = new Set();

  const search = /** @type {HTMLInputElement} */ (
    element("input", { type: "search", placeholder: "Search modules", "aria-label": "Search modules", spellcheck: "false" })
  );
  const count = element("span", { class: "ait-count", role: "status" });
  const expand = element("button", { type: "button", class: "ait-plain" }, "Expand all");
  const collapse = element("button", { type: "button", class: "ait-plain" }, "Collapse all");
  const said = element("div", { class: "ait-said", role: "status", "aria-live": "polite" });
  const head = element("div", { class: "ait-row ait-head", role: "row", "aria-rowindex": 1 });
  const body = element("div", { class: "ait-body", role: "rowgroup" });
  const grid = element(
    "div",
    { class: "ait-grid", role: "treegrid", tabindex: 0, "aria-label": "Modules of the target", "aria-readonly": "true" },
    element("div", { role: "rowgroup", class: "ait-sticky" }, head),
    body,
  );
  const root = element(
    "div",
    { class: "ait-tree" },
    element("div", { class: "ait-bar" }, element("label", { class: "ait-search" }, icon("search"), search), count, expand, collapse),
    grid,
    said,
  );
  for (const [style, label, key] of HEADER) head.append(headCell(style, label, key));
  grid.style.maxHeight = `${api.height}px`;
  host.append(root);
  arranged();

  /** @param {string} style @param {string} label @param {import("./rows.js").SortKey | null} key */
  function headCell(style, label, key) {
    const made = element("span", { role: "columnheader", class: `ait-cell ${style}` });
    if (!key) {
      made.append(label);
      return made;
    }
    const button = element("button", { type: "button", class: "ait-plain", title: `Sort by ${label.toLowerCase()}` }, label, icon("down"));
    button.addEventListener("click", () => {
      rows.sortBy(key);
      arranged();
    });
    made.dataset.key = key;
    made.append(button);
    return made;
  }

  /** The order or the number of rows changed: draw everything again. */
  function arranged() {
    for (const row of drawn.values()) row.remove();
    drawn.clear();
    body.style.height = `${rows.shown.length * ROW_HEIGHT}px`;
    grid.setAttribute("aria-rowcount", String(rows.shown.length + 1));
    for (const made of /** @type {NodeListOf<HTMLElement>} */ (head.querySelectorAll("[data-key]"))) {
      const sorted = made.dataset.key === rows.sortKey;
      made.setAttribute("aria-sort", sorted ? (rows.descending ? "descending" : "ascending") : "none");
    }
    if (!rows.place.has(focused)) focused = rows.shown[0] ?? -1;
    const found = rows.query ? `${rows.shown.length} of ` : "";
    count.textContent = rows.count ? `${found}${rows.count.toLocaleString("en")} rows` : "nothing was inspected yet";
    body.classList.toggle("ait-nothing", rows.count > 0 && rows.shown.length === 0);
    draw();
  }

  /** Draw the rows that are in view, and take away those that are not. */
  function draw() {
    frame = 0;
    const first = Math.max(0, Math.floor(grid.scrollTop / ROW_HEIGHT) - BEYOND);
    const last = Math.min(rows.shown.length, Math.ceil((grid.scrollTop + api.height) / ROW_HEIGHT) + BEYOND);
    const wanted = new Set(rows.shown.slice(first, last));
    for (const [i, row] of drawn) {
      if (wanted.has(i)) continue;
      row.remove();
      drawn.delete(i);
    }
    for (const i of wanted) if (!drawn.has(i)) body.append(made(i));
    if (focused >= 0) grid.setAttribute("aria-activedescendant", `${id}-${focused}`);
    else grid.removeAttribute("aria-activedescendant");
  }

  /** @param {number} i */
  function made(i) {
    const place = rows.place.get(i) ?? 0;
    const parent = rows.isParent(i);
    const row = element(
      "div",
      {
        class: `ait-row${i === focused ? " ait-focused" : ""}${rows.columns.kind[i] === "container" ? " ait-container" : ""}`,
        role: "row",
        id: `${id}-${i}`,
        "aria-level": rows.columns.depth[i] + 1,
        "aria-rowindex": place + 2,
        "aria-selected": String(i === focused),
        "aria-expanded": parent ? String(rows.isOpen(i)) : null,
        "aria-label": spoken(rows.columns, i),
        "data-row": i,
      },
      ...cells(rows.columns, i, { parent, open: rows.isOpen(i), waiting: waiting.has(rows.columns.path[i]) }),
    );
    row.style.transform = `translateY(${place * ROW_HEIGHT}px)`;
    drawn.set(i, row);
    return row;
  }

  /** @param {number} i */
  function redraw(i) {
    const old = drawn.get(i);
    if (old) old.replaceWith(made(i));
  }

  /** @param {number} i */
  function focus(i) {
    if (i < 0) return;
    const before = focused;
    focused = i;
    redraw(before);
    redraw(i);
    const top = (rows.place.get(i) ?? 0) * ROW_HEIGHT;
    const room = grid.clientHeight - HEAD_HEIGHT;
    if (top < grid.scrollTop) grid.scrollTop = top;
    else if (top + ROW_HEIGHT > grid.scrollTop + room) grid.scrollTop = top + ROW_HEIGHT - room;
    draw();
    clearTimeout(selectTimer);
    if (i !== before) selectTimer = window.setTimeout(() => ask({ op: "select", path: rows.columns.path[i] }), SELECT_AFTER_MS);
  }

  /** Move by a number of rows that are shown. @param {number} by */
  function move(by) {
    const place = (rows.place.get(focused) ?? 0) + by;
    focus(rows.shown[Math.max(0, Math.min(rows.shown.length - 1, place))] ?? -1);
  }

  /** @param {number} i @param {boolean} open */
  function setOpen(i, open) {
    if (!rows.isParent(i) || rows.query) return;
    rows.setOpen(i, open);
    arranged();
  }

  /** Send a command; say so if it fails. @param {Command} command */
  async function ask(command) {
    try {
      return await api.command(command);
    } catch (error) {
      said.textContent = error instanceof Error ? error.message : String(error);
      return undefined;
    }
  }

  /** @param {number} i */
  function menu(i) {
    if (i < 0 || !canPin(rows.columns, i)) return;
    const anchor = drawn.get(i)?.querySelector(".ait-pick");
    if (!anchor) return;
    closeMenu?.();
    const c = rows.columns;
    const path = c.path[i];
    const note = c.copies[i] ? `One rule for all ${c.copies[i]} copies: ${path}` : "";
    const asked = /** @type {Promise<CandidateFigures[]>} */ (api.command({ op: "candidates", path }).then((reply) => reply ?? []));
    closeMenu = openMenu(
      root,
      /** @type {HTMLElement} */ (anchor),
      { title: c.copies[i] ? `${c.copies[i]} copies of ${c.class_name[i]}` : title(c, i), note, rule: c.rule[i], wanted: c.wanted[i], path },
      asked,
      {
        choose: (command) => void pin(command),
        closed: () => {
          closeMenu = null;
          grid.focus({ preventScroll: true });
        },
      },
    );
  }

  /** Send a change of the plan; the row shows that it waits until the kernel has answered. @param {Command} command */
  async function pin(command) {
    const redrawn = () => redraw(rows.columns.path.indexOf(command.path));
    waiting.add(command.path);
    redrawn();
    said.textContent = "";
    const late = setTimeout(() => {
      said.textContent = "Queued until the running cell ends.";
    }, QUEUED_AFTER_MS);
    await ask(command).then((reply) => {
      if (reply !== undefined) said.textContent = "";
    });
    clearTimeout(late);
    if (said.textContent === "Queued until the running cell ends.") said.textContent = "";
    waiting.delete(command.path);
    redrawn();
  }

  /** @param {KeyboardEvent} event */
  function key(event) {
    if (event.target !== grid || event.ctrlKey || event.metaKey || event.altKey) return;
    const page = Math.max(1, Math.floor((grid.clientHeight - HEAD_HEIGHT) / ROW_HEIGHT) - 1);
    const keys = /** @type {Record<string, () => void>} */ ({
      ArrowDown: () => move(1),
      ArrowUp: () => move(-1),
      PageDown: () => move(page),
      PageUp: () => move(-page),
      Home: () => move(-rows.shown.length),
      End: () => move(rows.shown.length),
      ArrowRight: () => (rows.isOpen(focused) ? move(1) : setOpen(focused, true)),
      ArrowLeft: () => (rows.isOpen(focused) && !rows.query ? setOpen(focused, false) : focus(rows.parent[focused] ?? -1)),
      Enter: () => menu(focused),
      " ": () => setOpen(focused, !rows.isOpen(focused)),
      "/": () => search.focus(),
    });
    if (!(event.key in keys) || focused < 0) return;
    event.preventDefault();
    keys[event.key]();
  }

  grid.addEventListener("keydown", key);
  // Whatever is typed here is meant for the tree: the notebook would take "a", "b" or Enter for commands on cells.
  // Saving is left to it, as nothing else could mean that.
  root.addEventListener("keydown", (event) => {
    const saving = (event.ctrlKey || event.metaKey) && event.key.toLowerCase() === "s";
    if (!saving) event.stopPropagation();
  });
  grid.addEventListener("scroll", () => {
    if (!frame) frame = requestAnimationFrame(draw);
    if (closeMenu) closeMenu();
  });
  body.addEventListener("click", (event) => {
    const target = /** @type {Element} */ (event.target);
    const row = /** @type {HTMLElement | null} */ (target.closest("[data-row]"));
    if (!row) return;
    const i = Number(row.dataset.row);
    focus(i);
    if (target.closest("[data-toggle]")) setOpen(i, !rows.isOpen(i));
    else if (target.closest(".ait-pick")) menu(i);
  });
  body.addEventListener("dblclick", (event) => {
    const target = /** @type {Element} */ (event.target);
    const row = /** @type {HTMLElement | null} */ (target.closest("[data-row]"));
    if (!row || target.closest("[data-toggle], .ait-pick")) return;
    setOpen(Number(row.dataset.row), !rows.isOpen(Number(row.dataset.row)));
  });
  search.addEventListener("input", () => {
    rows.search(search.value);
    arranged();
    grid.scrollTop = 0;
  });
  search.addEventListener("keydown", (event) => {
    if (event.key === "Escape" && search.value) {
      search.value = "";
      rows.search("");
      arranged();
    } else if (event.key !== "Escape" && event.key !== "ArrowDown" && event.key !== "Enter") return;
    event.preventDefault();
    grid.focus();
  });
  expand.addEventListener("click", () => {
    rows.setAllOpen(true);
    arranged();
  });
  collapse.addEventListener("click", () => {
    rows.setAllOpen(false);
    arranged();
  });

  return {
    changed(numbers) {
      for (const i of numbers) redraw(i);
    },
    show(columns) {
      closeMenu?.();
      const before = rows;
      rows = new Rows(columns);
      rows.openLike(before);
      const path = before.columns.path[focused];
      focused = path === undefined ? -1 : columns.path.indexOf(path);
      arranged();
    },
    remove() {
      closeMenu?.();
      clearTimeout(selectTimer);
      cancelAnimationFrame(frame);
      root.remove();
    },
  };
}
