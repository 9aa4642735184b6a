// @ts-check
// What the kernel says stands on the page, drawn: one function for each kind of block (aitune_lab/jupyter/blocks.py).

import { h } from "./vdom.js";

/** @typedef {import("./vdom.js").VNode} VNode */
/** @typedef {import("./lab.js").Page} Page */
/** @typedef {{op: string, label: string, args: Record<string, unknown>, primary?: boolean, disabled?: string, goto?: string}} Action */
/** @typedef {{type: string, op: string, name: string, label: string, value: any, options?: {value: string, label: string}[], help?: string, placeholder?: string, disabled?: string}} Field */
/** @typedef {{kind: string} & Record<string, any>} Block */

export const MARKS = /** @type {Record<string, string>} */ ({ good: "✓", warning: "!", error: "✕", info: "i" });

/** @param {Page} page @param {Block} block @returns {VNode} */
export function drawBlock(page, block) {
  switch (block.kind) {
    case "text":
      return h("p", { class: "aitl-text", "data-tone": block.tone }, MARKS[block.tone] ? h("span", { class: "aitl-mark", "aria-hidden": "true" }, MARKS[block.tone]) : null, h("span", null, block.text));
    case "heading":
      return h("h3", { class: "aitl-heading" }, block.text);
    case "facts":
      return h(
        "div",
        { class: "aitl-facts", role: "list" },
        block.items.map((/** @type {{label: string, value: string}} */ item) =>
          h("div", { class: "aitl-fact", role: "listitem" }, h("span", { class: "aitl-fact-value" }, item.value), h("span", { class: "aitl-note" }, item.label)),
        ),
      );
    case "progress":
      return drawProgress(block);
    case "actions":
      return h("div", { class: "aitl-actions" }, block.items.map((/** @type {Action} */ action) => drawButton(page, action)));
    case "form":
      return drawForm(page, block);
    case "tabs":
      return drawTabs(page, block);
    case "table":
      return drawTable(page, block);
    case "details":
      return h("details", { key: `details-${block.key}`, class: "aitl-details", open: block.open }, h("summary", null, block.summary), h("div", null, block.blocks.map((/** @type {Block} */ b) => drawBlock(page, b))));
    case "panel":
      return h(
        "section",
        { key: `panel-${block.title}`, class: "aitl-panel" },
        h("h3", { class: "aitl-heading" }, block.title, block.note ? h("span", { class: "aitl-note" }, block.note) : null),
        block.blocks.map((/** @type {Block} */ b) => drawBlock(page, b)),
      );
    case "code":
      return drawCode(page, block);
    case "lines":
      return h("pre", { class: "aitl-lines", tabindex: "0" }, block.lines.length ? block.lines.join("\n") : block.empty);
    case "slot":
      return page.slot(block.name);
    default:
      return h("p", null, `This page cannot draw a ${block.kind}; reload it.`);
  }
}

/** @param {Block} block @returns {VNode} */
function drawProgress(block) {
  const known = typeof block.fraction === "number";
  const percent = known ? Math.round(100 * block.fraction) : undefined;
  return h(
    "div",
    { class: "aitl-progress" },
    h("div", { class: "aitl-progress-label" }, h("span", null, block.label), h("span", { class: "aitl-note" }, block.note || "")),
    h(
      "div",
      { class: "aitl-bar", role: "progressbar", "aria-label": block.label, "aria-valuemin": "0", "aria-valuemax": "100", "aria-valuenow": percent, "data-open": !known },
      h("div", { class: "aitl-bar-fill", style: known ? `width: ${percent}%` : null }),
    ),
  );
}

/** @param {Page} page @param {Action} action @param {boolean} [quiet] @returns {VNode} */
export function drawButton(page, action, quiet) {
  return h(
    "button",
    {
      key: `${action.op}-${action.goto ?? ""}-${action.label}`,
      type: "button",
      class: quiet ? "aitl-link" : "aitl-button",
      "data-primary": action.primary,
      "data-op": action.op || `go-${action.goto}`,
      title: action.disabled || undefined,
      "aria-disabled": action.disabled ? "true" : undefined,
      onclick: (/** @type {Event} */ event) => {
        const button = /** @type {HTMLElement} */ (event.currentTarget);
        if (action.disabled || button.getAttribute("aria-busy")) return;
        if (action.goto) return page.go(action.goto);
        const form = button.closest(".aitl-form");
        const typed = /** @type {Record<string, unknown>} */ ({});
        for (const field of form?.querySelectorAll("[data-field]") ?? []) {
          const input = /** @type {HTMLInputElement} */ (field);
          typed[input.dataset.field ?? ""] = input.type === "checkbox" ? input.checked : input.value;
        }
        void page.send(action.op, { ...action.args, ...typed }, button);
        if (action.op === "tune") page.go("tune");
      },
    },
    action.label,
  );
}

/** @param {Page} page @param {Block} block @returns {VNode} */
function drawForm(page, block) {
  return h(
    "div",
    { class: "aitl-form", role: "group", "aria-label": block.label || undefined },
    block.label ? h("span", { class: "aitl-form-label" }, block.label) : null,
    block.fields.map((/** @type {Field} */ field) => drawField(page, field)),
    block.actions.map((/** @type {Action} */ action) => drawButton(page, action)),
  );
}

/** @param {Page} page @param {Field} field @returns {VNode} */
function drawField(page, field) {
  const changed = (/** @type {Event} */ event) => {
    const input = /** @type {HTMLInputElement} */ (event.currentTarget);
    if (field.op) void page.send(field.op, { name: field.name, value: input.type === "checkbox" ? input.checked : input.value }, input);
  };
  const common = { "data-field": field.name, "data-op": field.op, title: field.help || undefined, onchange: changed };
  if (field.type === "check") {
    return h(
      "label",
      { key: field.name, class: "aitl-check", "data-off": Boolean(field.disabled), title: field.disabled || field.help || undefined },
      h("input", { ...common, type: "checkbox", checked: field.value, disabled: Boolean(field.disabled) }),
      field.label,
      field.disabled ? h("span", { class: "aitl-note" }, "not here") : null,
    );
  }
  const input =
    field.type === "select"
      ? h("select", { ...common, value: field.value }, (field.options ?? []).map((o) => h("option", { key: o.value, value: o.value, selected: o.value === field.value }, o.label)))
      : h("input", { ...common, type: "text", inputmode: field.type === "number" ? "decimal" : undefined, value: field.value, placeholder: field.placeholder || undefined, spellcheck: "false" });
  return h("label", { key: field.name, class: "aitl-field" }, h("span", { class: "aitl-field-label" }, field.label), input);
}

/** @param {Page} page @param {Block} block @returns {VNode} */
function drawTabs(page, block) {
  return h(
    "div",
    { class: "aitl-tabs", role: "radiogroup", "aria-label": block.label },
    block.options.map((/** @type {{value: string, label: string}} */ option) =>
      h(
        "button",
        {
          key: option.value,
          type: "button",
          class: "aitl-tab",
          role: "radio",
          "aria-checked": String(option.value === block.value),
          "data-value": option.value,
          onclick: (/** @type {Event} */ event) => void page.send(block.op, { name: block.name, value: option.value }, /** @type {HTMLElement} */ (event.currentTarget)),
        },
        option.label,
      ),
    ),
  );
}

/** @param {Page} page @param {Block} block @returns {VNode} */
function drawTable(page, block) {
  if (!block.rows.length) return h("p", { class: "aitl-text", "data-tone": "muted" }, block.empty);
  /** @type {{key: string, title: string, right: boolean}[]} */
  const columns = block.columns;
  const acts = block.rows.some((/** @type {any} */ row) => row.action);
  const opens = block.rows.some((/** @type {any} */ row) => row.detail);
  const width = columns.length + (acts ? 1 : 0) + (opens ? 1 : 0);
  const opened = page.opened;
  /** @type {VNode[]} */
  const body = [];
  for (const row of block.rows) {
    const open = opened.has(row.key);
    const toggle = () => {
      if (!row.detail) return;
      if (!opened.delete(row.key)) opened.add(row.key);
      page.draw();
    };
    body.push(
      h(
        "tr",
        { key: row.key, "data-tone": row.tone || undefined, "data-opens": Boolean(row.detail), onclick: row.detail ? toggle : undefined },
        opens
          ? h(
              "td",
              { class: "aitl-opener" },
              row.detail
                ? h("button", { type: "button", class: "aitl-twist", "aria-expanded": String(open), "aria-label": open ? "Hide details" : "Show details", onclick: (/** @type {Event} */ event) => (event.stopPropagation(), toggle()) }, "▸")
                : null,
            )
          : null,
        columns.map((column) => h("td", { "data-right": column.right, "data-column": column.key }, drawCell(row, column.key))),
        acts ? h("td", { "data-right": true }, row.action ? drawButton(page, row.action, true) : null) : null,
      ),
    );
    if (open && row.detail) body.push(h("tr", { key: `${row.key}-detail`, class: "aitl-detail" }, h("td", { colspan: String(width) }, h("pre", { tabindex: "0" }, row.detail))));
  }
  return h(
    "div",
    { class: "aitl-table-box" },
    h(
      "table",
      { class: "aitl-table" },
      block.caption ? h("caption", null, block.caption) : null,
      columns.some((c) => c.title) && columns.length > 1
        ? h("thead", null, h("tr", null, opens ? h("th", { class: "aitl-opener" }, h("span", { class: "aitl-hidden" }, "details")) : null, columns.map((c) => h("th", { "data-right": c.right, scope: "col" }, c.title)), acts ? h("th", null) : null))
        : null,
      h("tbody", null, body),
    ),
  );
}

/** @param {Record<string, any>} row @param {string} name @returns {VNode | string} */
function drawCell(row, name) {
  const text = String(row[name] ?? "");
  if (name === "mark" && text) return h("span", { class: "aitl-chip" }, text);
  return text;
}

/** @param {Page} page @param {Block} block @returns {VNode} */
function drawCode(page, block) {
  return h(
    "div",
    { class: "aitl-code" },
    h(
      "button",
      {
        type: "button",
        class: "aitl-button",
        "data-op": "copy",
        onclick: async () => {
          const ok = await copy(block.text);
          page.say(ok ? block.copied : "The browser does not allow copying here: select the text and copy it", ok ? "good" : "error");
        },
      },
      block.label,
    ),
    h("pre", { tabindex: "0" }, block.text),
  );
}

/** @param {string} text @returns {Promise<boolean>} */
async function copy(text) {
  try {
    await navigator.clipboard.writeText(text);
    return true;
  } catch {
    // Pages that aren't served over https have no clipboard; the old way still works there.
    const area = document.createElement("textarea");
    area.value = text;
    area.style.position = "fixed";
    area.style.opacity = "0";
    document.body.append(area);
    area.select();
    const done = document.execCommand("copy");
    area.remove();
    return done;
  }
}
