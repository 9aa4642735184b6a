// @ts-check
/** How one row of the tree reads: figures in words and the cells that hold them. */

import { element, icon } from "./dom.js";

/** @typedef {import("./types").Columns} Columns */

const STATES = {
  "": "",
  "not run": "not called",
  untunable: "can’t be tuned",
  waiting: "waiting",
  pending: "not applied",
  running: "running",
  tried: "tried",
  tuned: "tuned",
  kept: "eager stays",
  left: "left alone",
  disturbed: "disturbed",
  failed: "failed",
};
const STATE_HELP = {
  "": "",
  "not run": "It did not run on your data.",
  untunable: "",
  waiting: "Its candidates have not been tried yet.",
  pending: "The plan names another candidate than the one in use; it counts from the next run on.",
  running: "A candidate is being tried now.",
  tried: "Candidates were tried; nothing is settled yet.",
  tuned: "A faster candidate that is right was chosen.",
  kept: "No candidate was both right and faster.",
  left: "The plan says to leave it alone.",
  disturbed: "Other load disturbed the measurement, so its speed-up decides nothing.",
  failed: "Every candidate failed.",
};
/** @type {Record<string, {word: string, icon: "check" | "about" | "cross", style: string}>} */
const CLASSES = {
  exact: { word: "exact", icon: "check", style: "exact" },
  "within budget": { word: "within budget", icon: "about", style: "budget" },
  refused: { word: "out of tolerance", icon: "cross", style: "refused" },
};

/** @param {number} share 0 to 1 */
export function percent(share) {
  const value = 100 * share;
  if (value === 0) return "";
  return value < 0.1 ? "< 0.1 %" : `${value.toFixed(1)} %`;
}

/** 25,728 as 25.7 k. @param {number} count */
export function short(count) {
  if (!count) return "";
  for (const [size, unit] of /** @type {[number, string][]} */ ([[1e9, "G"], [1e6, "M"], [1e3, "k"]])) {
    if (count >= size) return `${digits(count / size)} ${unit}`;
  }
  return String(count);
}

/** Three significant digits, no exponent. @param {number} value */
function digits(value) {
  return value >= 100 ? value.toFixed(0) : value >= 10 ? value.toFixed(1) : value.toFixed(2);
}

/** @param {number | null} ratio */
export function times(ratio) {
  return ratio === null ? "" : `×${digits(ratio)}`;
}

/** 5.3e-07, as in all tables. @param {number} value */
function errorText(value) {
  if (value === 0) return "0";
  const [mantissa, exponent] = value.toExponential(1).split("e");
  if (value >= 1e-4) return String(Number(value.toPrecision(2)));
  return `${Number(mantissa)}e${exponent[0]}${exponent.slice(1).padStart(2, "0")}`;
}

/** What a row goes by, for people: the path, or what a fold stands for. @param {Columns} c @param {number} i */
export function title(c, i) {
  if (c.copies[i]) return `${c.copies[i]} copies of ${c.class_name[i]}: ${c.path[i].slice(3)}`;
  return c.path[i] || "(model)";
}

/** Whether a row can be pinned: it runs, and it can be tuned. @param {Columns} c @param {number} i */
export function canPin(c, i) {
  return c.kind[i] !== "container" && c.calls[i] > 0 && !c.reason[i];
}

/** What the backend's button says: a pin or wish before what was found. @param {Columns} c @param {number} i */
export function backend(c, i) {
  if (c.rule[i] === "pin") return c.wanted[i];
  if (c.rule[i] === "leave") return "left alone";
  if (c.rule[i] === "mixed" || c.choice[i] === "mixed") return "mixed";
  return c.choice[i] ?? "automatic";
}

/** @param {Columns} c @param {number} i */
export function stateText(c, i) {
  const word = STATES[c.state[i]];
  const more = c.activity[i];
  if (c.state[i] === "running") return more || word;
  if (!more || !word) return word;
  return c.copies[i] ? `${more} ${word}` : `${word}, ${more}`;
}

/** One sentence for screen readers. @param {Columns} c @param {number} i */
export function spoken(c, i) {
  const parts = [c.name[i], c.copies[i] ? `${c.copies[i]} copies of ${c.class_name[i]}` : c.class_name[i]];
  if (c.share[i]) parts.push(`${percent(c.share[i])} of the time`);
  if (canPin(c, i)) parts.push(`backend ${backend(c, i)}${c.rule[i] === "pin" ? ", pinned" : ""}`);
  const ratio = c.speedup[i];
  if (ratio !== null) parts.push(`${digits(ratio)} times as fast`);
  const kind = c.error_class[i];
  if (kind) parts.push(`error ${CLASSES[kind].word}`);
  parts.push(stateText(c, i));
  return parts.filter(Boolean).join(", ");
}

/**
 * The cells of a row, in the order of the header.
 * @param {Columns} c
 * @param {number} i
 * @param {{parent: boolean, open: boolean, waiting: boolean}} how
 */
export function cells(c, i, how) {
  return [
    nameCell(c, i, how),
    shareCell(c, i),
    numberCell("ait-calls", c.calls[i] ? c.calls[i].toLocaleString("en") : "", ""),
    numberCell("ait-parameters", short(c.parameters[i]), c.parameters[i].toLocaleString("en")),
    backendCell(c, i, how.waiting),
    speedupCell(c, i),
    errorCell(c, i),
    stateCell(c, i),
  ];
}

/** @param {string} style @param {(Node | string)[]} children */
function cell(style, ...children) {
  return element("span", { role: "gridcell", class: `ait-cell ${style}` }, ...children);
}

/** @param {string} style @param {string} text @param {string} help */
function numberCell(style, text, help) {
  const made = cell(`ait-number ${style}`, text);
  if (help) made.title = help;
  return made;
}

/** @param {Columns} c @param {number} i @param {{parent: boolean, open: boolean}} how */
function nameCell(c, i, how) {
  const made = cell("ait-name");
  made.style.setProperty("--ait-depth", String(c.depth[i]));
  made.title = c.reason[i] ? `${title(c, i)}\n${c.reason[i]}` : title(c, i);
  const toggle = element("span", { class: `ait-toggle${how.open ? " ait-open" : ""}`, "data-toggle": how.parent });
  if (how.parent) toggle.append(icon("chevron"));
  made.append(toggle, element("span", { class: "ait-label" }, c.name[i]));
  if (c.copies[i]) made.append(element("span", { class: "ait-copies" }, `${c.copies[i]} ×`));
  made.append(element("span", { class: "ait-class" }, c.class_name[i]));
  return made;
}

/** @param {Columns} c @param {number} i */
function shareCell(c, i) {
  const made = cell("ait-share");
  const fill = element("span", { class: "ait-fill" });
  fill.style.width = `${Math.min(100, 100 * c.share[i]).toFixed(1)}%`;
  const ms = c.total_ms[i];
  if (ms) made.title = `${digits(ms)} ms in ${c.calls[i] || "all"} calls`;
  made.append(element("span", { class: "ait-track" }, fill), element("span", { class: "ait-number" }, percent(c.share[i])));
  return made;
}

/** @param {Columns} c @param {number} i @param {boolean} waiting */
function backendCell(c, i, waiting) {
  if (!canPin(c, i)) return cell("ait-backend");
  const text = backend(c, i);
  const pinned = c.rule[i] === "pin" || c.rule[i] === "leave";
  const quiet = text === "automatic" || text === "mixed" || text === "left alone" || text === "eager";
  const button = element(
    "button",
    {
      type: "button",
      tabindex: -1,
      class: `ait-pick${pinned ? " ait-pinned" : ""}${quiet ? " ait-quiet" : ""}${waiting ? " ait-waiting" : ""}`,
      "aria-haspopup": "menu",
      "aria-label": `Backend of ${title(c, i)}: ${text}${pinned ? ", pinned" : ""}`,
      title: c.rule[i] === "pin" && c.choice[i] && c.choice[i] !== text ? `now ${c.choice[i]}` : null,
    },
    element("span", { class: "ait-pick-text" }, text),
  );
  if (pinned) button.prepend(icon("pin"));
  button.append(icon("down"));
  return cell("ait-backend", button);
}

/** @param {Columns} c @param {number} i */
function speedupCell(c, i) {
  const ratio = c.speedup[i];
  const made = numberCell("ait-speedup", times(ratio), "");
  if (ratio !== null && ratio >= 1.05) made.classList.add("ait-faster");
  return made;
}

/** @param {Columns} c @param {number} i */
function errorCell(c, i) {
  const name = c.error_class[i];
  if (!name) return cell("ait-error");
  const { word, icon: glyph, style } = CLASSES[name];
  const value = c.error[i];
  const made = cell(`ait-error ait-${style}`, icon(glyph), element("span", {}, word));
  if (value !== null) made.append(element("span", { class: "ait-number" }, errorText(value)));
  made.title = `relative L2 error of the worst output${c.accepted[i] ? "; out of tolerance, and accepted by the plan" : ""}`;
  return made;
}

/** @param {Columns} c @param {number} i */
function stateCell(c, i) {
  const state = c.state[i];
  const made = cell(`ait-state ait-state-${state.replace(" ", "-") || "none"}`);
  if (!state) return made;
  made.title = STATE_HELP[state] || c.reason[i];
  made.append(element("span", { class: "ait-dot", "aria-hidden": "true" }), element("span", { class: "ait-words" }, stateText(c, i)));
  return made;
}
