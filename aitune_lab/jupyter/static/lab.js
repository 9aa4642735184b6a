// @ts-check
// The Lab's page: draws the sections that the kernel sends, and sends commands back. It knows nothing of tuning.
// Every text from the kernel is untrusted and becomes a text node. Plain ES modules, type-checked by `tsc`.

import { fill, h } from "./vdom.js";
import { MARKS, drawBlock, drawButton } from "./lab_blocks.js";

/** @typedef {import("./vdom.js").VNode} VNode */
/** @typedef {import("./lab_blocks.js").Action} Action */
/** @typedef {import("./lab_blocks.js").Block} Block */
/** @typedef {{key: string, title: string, done: boolean, now: boolean, note: string}} Step */
/** @typedef {{title: string, status: {tone: string, text: string}, steps: Step[], now: string}} Head */
/** @typedef {{text: string, tone: string, actions: Action[]}} Notice */
/** @typedef {{revision: number, sections: Record<string, any>}} View */
/** @typedef {{op: "ack", id: string, ok: boolean, reply: any, error: string}} Answer */
/** @typedef {{get(name: string): any, set(name: string, value: any): void, save_changes(): void, send(content: any): void, on(name: string, callback: (...args: any[]) => void): void, off(name: string, callback: (...args: any[]) => void): void}} LabModel */
/** @typedef {{getWidget(ref: string): Promise<{render(options: {el: HTMLElement, signal?: AbortSignal}): Promise<void>}>}} Host */

const QUEUED_AFTER_MS = 700;
const SETTLED_AFTER_MS = 400;
const SLOT_ATTEMPTS = 40;

export class Page {
  /** @param {LabModel} model @param {Host} host @param {HTMLElement} el */
  constructor(model, host, el) {
    this.model = model;
    this.host = host;
    this.el = el;
    this.ended = new AbortController();
    this.signal = this.ended.signal;
    this.root = document.createElement("div");
    this.root.className = "aitl";
    // Keys pressed here are ours: the notebook's shortcuts (Enter, x, d d, …) don't see them.
    this.root.dataset.lmSuppressShortcuts = "true";
    for (const kind of ["keydown", "keypress", "keyup"]) this.root.addEventListener(kind, (event) => event.stopPropagation());
    /** Where each part is scrolled to, and what has the focus: an element that is moved loses both. @type {Map<Element, number>} */
    this.scrolled = new Map();
    /** @type {HTMLElement | null} */
    this.focused = null;
    this.root.addEventListener("scroll", ({ target }) => target instanceof Element && this.scrolled.set(target, target.scrollTop), true);
    this.root.addEventListener("focusin", ({ target }) => {
      this.focused = /** @type {HTMLElement} */ (target);
    });
    this.root.addEventListener("focusout", ({ target }) => {
      // The focus that goes because the page is being moved comes back.
      queueMicrotask(() => {
        if (this.root.isConnected && this.focused === target) this.focused = null;
      });
    });
    /** @type {Map<string, HTMLElement>} */
    this.slots = new Map();
    /** Callbacks of commands that the kernel has not answered yet. @type {Map<string, (answer: Answer) => void>} */
    this.waiting = new Map();
    /** The latest command of each control. @type {WeakMap<HTMLElement, number>} */
    this.latest = new WeakMap();
    /** Keys of table rows whose details are shown. @type {Set<string>} */
    this.opened = new Set();
    /** @type {Map<string, (event: Event) => void>} */
    this.handlers = new Map();
    this.said = { text: "", tone: "" };
    this.prefix = Math.random().toString(36).slice(2);
    this.counter = 0;
    this.scheduled = false;
    this.drawnStep = "";
    /** @type {View} */
    this.view = { revision: -1, sections: {} };
    /** @type {[string, (...args: any[]) => void][]} */
    this.heard = [
      ["msg:custom", (message) => this.received(message)],
      [
        "change:view",
        () => {
          this.view = this.model.get("view");
          this.draw();
        },
      ],
      ["change:step", () => this.draw()],
    ];
  }

  /** Stand in this element, and follow the model as this view of it sees it. @param {LabModel} model @param {HTMLElement} el */
  moveTo(model, el) {
    for (const [name, callback] of this.heard) {
      this.model.off(name, callback);
      model.on(name, callback);
    }
    this.model = model;
    this.el = el;
    const view = model.get("view");
    if (view.revision > this.view.revision) this.view = view;
    el.append(this.root);
    this.draw();
    // The element may not stand in the document yet.
    requestAnimationFrame(() => {
      this.scrollBack();
      if (this.focused && document.activeElement === document.body) this.focused.focus({ preventScroll: true });
    });
  }

  /** Scroll as it was before parts of the page were moved, or taken out and put back. */
  scrollBack() {
    for (const [element, top] of this.scrolled) {
      if (element.isConnected) element.scrollTop = top;
      else if (![...this.slots.values()].some((slot) => slot.contains(element))) this.scrolled.delete(element);
    }
  }

  /** Show nothing any more. The kernel closes its widgets only when it knows that no page shows them. */
  end() {
    this.ended.abort();
    for (const [name, callback] of this.heard) this.model.off(name, callback);
    this.model.send({ id: `${this.prefix}-gone`, op: "gone", args: { view: this.prefix } });
  }

  /** @returns {string} */
  get step() {
    return this.model.get("step") || "inspect";
  }

  /** Show another step; the kernel is told, so that a page that reloads shows it again. @param {string} step */
  go(step) {
    this.model.set("step", step);
    this.model.save_changes();
    this.draw();
  }

  /** @param {string} op @param {Record<string, unknown>} args @returns {Promise<Answer>} */
  ask(op, args) {
    const id = `${this.prefix}-${++this.counter}`;
    return new Promise((resolve) => {
      this.waiting.set(id, resolve);
      this.model.send({ id, op, args });
    });
  }

  /** Send a command of a control, and say what the kernel answers. @param {string} op @param {Record<string, unknown>} args @param {HTMLElement} [control] */
  async send(op, args, control) {
    control?.setAttribute("aria-busy", "true");
    const late = setTimeout(() => this.say("Queued until the running cell ends", "waiting"), QUEUED_AFTER_MS);
    const asked = this.ask(op, args);
    const number = this.counter;
    if (control) this.latest.set(control, number);
    const settle = () => {
      if (!control || this.latest.get(control) !== number) return;
      control.removeAttribute("aria-busy");
      this.draw();
    };
    const answer = await asked;
    clearTimeout(late);
    // The new state comes a moment after the answer: a field shows what was chosen until then, not what was before.
    if (answer.ok && control?.matches("select, input")) setTimeout(settle, SETTLED_AFTER_MS);
    else settle();
    if (!answer.ok && control instanceof HTMLInputElement && control.type === "checkbox") control.checked = !control.checked;
    this.say(answer.ok ? String(answer.reply?.said ?? "") : answer.error, answer.ok ? "good" : "error");
  }

  /** The kernel learns that this page shows the Lab, and tells its whole present state. */
  async arrive() {
    const answer = await this.ask("here", { view: this.prefix });
    if (!answer.ok || this.signal.aborted) return;
    this.view = answer.reply.view;
    this.draw();
  }

  /** @param {string} text @param {string} tone */
  say(text, tone) {
    this.said = { text, tone };
    this.draw();
  }

  /** @param {any} message */
  received(message) {
    if (message?.op === "ack") {
      const waiting = this.waiting.get(message.id);
      this.waiting.delete(message.id);
      waiting?.(message);
    } else if (message?.op === "patch" && message.revision > this.view.revision) {
      if (message.revision !== this.view.revision + 1) void this.arrive();
      this.view = { revision: message.revision, sections: { ...this.view.sections, ...message.sections } };
      this.draw();
    }
  }

  /** Draw soon; many changes at once are drawn once. */
  draw() {
    if (this.scheduled) return;
    this.scheduled = true;
    queueMicrotask(() => {
      this.scheduled = false;
      if (!this.signal.aborted) this.drawNow();
    });
  }

  drawNow() {
    const sections = this.view.sections;
    if (!sections?.head) return;
    const step = this.step;
    /** @type {Notice | null} */
    const notice = sections.notice ?? null;
    /** @type {Block[]} */
    const blocks = sections[step] ?? [];
    fill(this.root, [
      this.head(sections.head, step),
      h("div", { key: "said", class: "aitl-said", role: "status", "data-tone": this.said.tone }, this.said.text),
      ...(notice ? [this.notice(notice)] : []),
      h(
        "div",
        { key: `step-${step}`, class: "aitl-step", role: "tabpanel", "aria-label": step, "data-step": step },
        blocks.map((block) => drawBlock(this, block)),
      ),
    ]);
    if (step !== this.drawnStep) this.scrollBack();
    this.drawnStep = step;
    for (const element of this.root.querySelectorAll(".aitl-lines")) followEnd(/** @type {HTMLElement} */ (element));
  }

  /** @param {Head} head @param {string} step @returns {VNode} */
  head(head, step) {
    const steps = head.steps.map((item, i) =>
      h(
        "button",
        {
          key: item.key,
          class: "aitl-stepper-item",
          role: "tab",
          type: "button",
          "aria-selected": String(item.key === step),
          tabindex: item.key === step ? "0" : "-1",
          "data-done": item.done,
          "data-now": item.now,
          "data-step": item.key,
          onclick: this.handler(`go-${item.key}`, () => this.go(item.key)),
          onkeydown: this.handler("stepper-keys", (event) => this.stepperKey(/** @type {KeyboardEvent} */ (event))),
        },
        h("span", { class: "aitl-dot", "aria-hidden": "true" }, item.done ? "✓" : String(i + 1)),
        h(
          "span",
          { class: "aitl-stepper-text" },
          h("span", { class: "aitl-stepper-title" }, item.title),
          h("span", { class: "aitl-stepper-note" }, item.note || "\u00a0"),
        ),
      ),
    );
    const status = h("span", { class: "aitl-status", "data-tone": head.status.tone }, h("span", { class: "aitl-status-dot", "aria-hidden": "true" }), head.status.text);
    return h(
      "header",
      { key: "head", class: "aitl-head" },
      h("div", { class: "aitl-title" }, h("span", { class: "aitl-name" }, head.title), status),
      h("div", { class: "aitl-stepper", role: "tablist", "aria-label": "Steps" }, steps),
    );
  }

  /** @param {KeyboardEvent} event */
  stepperKey(event) {
    const items = [...this.root.querySelectorAll(".aitl-stepper-item")];
    const at = items.indexOf(/** @type {Element} */ (event.currentTarget));
    const to = { ArrowRight: at + 1, ArrowLeft: at - 1, Home: 0, End: items.length - 1 }[event.key];
    if (to === undefined) return;
    const next = /** @type {HTMLElement} */ (items[(to + items.length) % items.length]);
    event.preventDefault();
    this.go(next.dataset.step ?? "inspect");
    this.drawNow();
    next.focus();
  }

  /** @param {Notice} notice @returns {VNode} */
  notice(notice) {
    return h(
      "div",
      { key: "notice", class: "aitl-notice", role: notice.tone === "error" ? "alert" : "status", "data-tone": notice.tone },
      h("span", { class: "aitl-mark", "aria-hidden": "true" }, MARKS[notice.tone] ?? "i"),
      h("span", { class: "aitl-notice-text" }, notice.text),
      h("span", { class: "aitl-notice-actions" }, notice.actions.map((action) => drawButton(this, action))),
    );
  }

  /** The element of a widget of its own, made once and moved to where it stands now. @param {string} name @returns {VNode} */
  slot(name) {
    let el = this.slots.get(name);
    if (!el) {
      el = document.createElement("div");
      el.className = `aitl-slot aitl-slot-${name}`;
      this.slots.set(name, el);
      void this.fillSlot(name, el);
    }
    return { tag: "div", key: `slot-${name}`, props: {}, children: [], node: el };
  }

  /** @param {string} name @param {HTMLElement} el */
  async fillSlot(name, el) {
    for (let attempt = 0; attempt < SLOT_ATTEMPTS && !this.signal.aborted; attempt++) {
      try {
        const widget = await this.host.getWidget(this.model.get(name));
        await widget.render({ el, signal: this.signal });
        return;
      } catch {
        // After a reload the page makes its models in no certain order.
        await new Promise((resolve) => setTimeout(resolve, 250));
      }
    }
    if (!this.signal.aborted) el.textContent = "This part could not be drawn; reload the page.";
  }

  /** One function object for one purpose, so that drawing anew doesn't attach it anew. @param {string} key @param {(event: Event) => void} callback */
  handler(key, callback) {
    const known = this.handlers.get(key) ?? callback;
    this.handlers.set(key, known);
    return known;
  }
}

/** Keep the end of a log in sight when lines come in. @param {HTMLElement} element */
function followEnd(element) {
  const length = String(element.textContent?.length);
  if (element.dataset.length !== length) element.scrollTop = element.scrollHeight;
  element.dataset.length = length;
}

/** Every page of this widget that has not ended. @type {Set<Page>} */
const pages = new Set();

/**
 * Draw the Lab into an element. When the static copy in the notebook is brought up to date, JupyterLab draws the whole
 * output anew and drops the element of before without a word: its page then moves to the new one, with all that was
 * typed, opened and scrolled in it.
 * @param {{model: LabModel, el: HTMLElement, host: Host}} context
 */
function render({ model, el, host }) {
  const dropped = [...pages].find((held) => !held.el.parentNode);
  const page = dropped ?? new Page(model, host, el);
  pages.add(page);
  page.moveTo(model, el);
  if (!dropped) void page.arrive();
  return () => {
    if (page.el !== el) return;
    pages.delete(page);
    page.end();
  };
}

export default { render };
