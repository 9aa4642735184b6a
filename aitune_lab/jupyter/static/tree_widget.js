// @ts-check
/** The module tree as an anywidget: commands and their answers, patches, and pages that come late. */

import { mount } from "./tree.js";

/** @typedef {import("./types").Ack} Ack */
/** @typedef {import("./types").Command} Command */
/** @typedef {import("./types").Model} Model */
/** @typedef {import("./types").Mounted} Mounted */
/** @typedef {import("./types").Patch} Patch */
/** @typedef {import("./types").Tree} Tree */

/** One of these per model: it follows the patches whether or not a view is shown. */
export default function widget() {
  /** @type {Tree} */
  let tree;
  /** @type {Set<Mounted>} */
  const views = new Set();
  /** @type {Map<string, {kept: (reply: unknown) => void, broken: (error: Error) => void}>} */
  const asked = new Map();
  let last = 0;
  const page = Math.random().toString(36).slice(2);

  /** @param {Model} model @param {Command} command */
  function send(model, command) {
    const id = `${page}-${++last}`;
    return new Promise((kept, broken) => {
      asked.set(id, { kept, broken });
      model.send({ id, ...command });
    });
  }

  /** @param {Model} model */
  async function catchUp(model) {
    const present = /** @type {Tree | null} */ (await send(model, { op: "hello", path: "", revision: tree.revision }));
    if (!present) return;
    tree = present;
    for (const view of views) view.show(tree.columns);
  }

  return {
    /** @param {{model: Model}} context */
    initialize({ model }) {
      tree = structuredClone(model.get("tree"));
      model.on("change:tree", () => {
        tree = structuredClone(model.get("tree"));
        for (const view of views) view.show(tree.columns);
      });
      model.on("msg:custom", (/** @type {Patch | Ack} */ message) => {
        if (message.op === "ack") {
          const { kept, broken } = asked.get(message.id) ?? {};
          asked.delete(message.id);
          if (message.ok) kept?.(message.reply);
          else broken?.(new Error(message.error));
          return;
        }
        if (message.op !== "patch" || message.revision <= tree.revision) return;
        if (message.revision > tree.revision + 1) return void catchUp(model);
        tree.revision = message.revision;
        for (const [row, values] of Object.entries(message.rows)) {
          for (const [column, value] of Object.entries(values)) {
            /** @type {Record<string, unknown[]>} */ (/** @type {unknown} */ (tree.columns))[column][Number(row)] = value;
          }
        }
        for (const view of views) view.changed(Object.keys(message.rows).map(Number));
      });
      // A patch that came between the state's arrival and now was heard by nobody.
      void catchUp(model);
    },
    /** @param {{model: Model, el: HTMLElement}} context */
    render({ model, el }) {
      const start = performance.now();
      const view = mount(el, {
        columns: tree.columns,
        height: model.get("height"),
        command: (command) => send(model, command),
      });
      views.add(view);
      el.dataset.paintMs = (performance.now() - start).toFixed(1);
      return () => {
        views.delete(view);
        view.remove();
      };
    },
  };
}
