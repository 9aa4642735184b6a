// @ts-check
// A small virtual DOM: what is in focus, scrolled or open stays so when a part of the page is drawn anew.
// Text becomes text nodes, never markup.

/** @typedef {{tag: string, key?: string, props: Record<string, any>, children: (VNode | string)[], node?: HTMLElement}} VNode */

/** @param {string} tag @param {Record<string, any> | null} [props] @param {...(VNode | string | null | undefined | (VNode | string | null)[])} children @returns {VNode} */
export function h(tag, props, ...children) {
  const { key, ...rest } = props ?? {};
  const flat = /** @type {(VNode | string)[]} */ (children.flat().filter((c) => c !== null && c !== undefined && c !== ""));
  return { tag, key, props: rest, children: flat };
}

/** @type {WeakMap<Node, {key: string | undefined, tag: string, props: Record<string, any>}>} */
const drawn = new WeakMap();

/** @param {VNode | string} vnode @returns {Node} */
function create(vnode) {
  if (typeof vnode === "string") return document.createTextNode(vnode);
  const el = vnode.node ?? document.createElement(vnode.tag);
  drawn.set(el, { key: vnode.key, tag: vnode.tag, props: {} });
  update(el, vnode, true);
  return el;
}

/** @param {HTMLElement} el @param {VNode} vnode @param {boolean} fresh */
function update(el, vnode, fresh) {
  const state = drawn.get(el);
  const before = state ? state.props : {};
  for (const name of Object.keys(before)) if (!(name in vnode.props)) assign(el, name, undefined, before[name], fresh);
  for (const [name, value] of Object.entries(vnode.props)) if (value !== before[name] || name === "value") assign(el, name, value, before[name], fresh);
  drawn.set(el, { key: vnode.key, tag: vnode.tag, props: vnode.props });
  if (!vnode.node) fill(el, vnode.children);
}

/** @param {HTMLElement} el @param {string} name @param {any} value @param {any} before @param {boolean} fresh */
function assign(el, name, value, before, fresh) {
  if (name.startsWith("on")) {
    if (before) el.removeEventListener(name.slice(2), before);
    if (value) el.addEventListener(name.slice(2), value);
  } else if (name === "value" || name === "checked") {
    const field = /** @type {any} */ (el);
    // What was chosen stands while the kernel has not answered yet.
    if (el.hasAttribute("aria-busy")) return;
    // What the user is typing is never taken away; what the kernel says comes after the focus has left.
    if (document.activeElement !== el || el.tagName === "SELECT" || name === "checked") {
      if (name === "value" && !fresh && before === value && el.tagName !== "SELECT") return;
      field[name] = value;
    }
  } else if (name === "open") {
    if (fresh) /** @type {HTMLDetailsElement} */ (el).open = Boolean(value);
  } else if (value === undefined || value === null || value === false) el.removeAttribute(name);
  else el.setAttribute(name, value === true ? "" : String(value));
}

/** @param {HTMLElement} el @param {(VNode | string)[]} vnodes */
export function fill(el, vnodes) {
  const old = [...el.childNodes];
  const keyed = new Map(old.map((node) => [drawn.get(node)?.key, node]).filter(([key]) => key !== undefined).map(([key, node]) => [key, node]));
  const used = new Set();
  /** @type {ChildNode | null} */
  let cursor = el.firstChild;
  const skip = () => {
    while (cursor && used.has(cursor)) cursor = cursor.nextSibling;
  };
  for (const vnode of vnodes) {
    skip();
    /** @type {Node | undefined} */
    let found;
    if (typeof vnode === "string") {
      if (cursor && cursor.nodeType === Node.TEXT_NODE) {
        found = cursor;
        if (found.nodeValue !== vnode) found.nodeValue = vnode;
      }
    } else if (vnode.node) found = vnode.node;
    else if (vnode.key !== undefined) found = /** @type {Node | undefined} */ (keyed.get(vnode.key));
    else if (cursor && drawn.get(cursor)?.key === undefined && drawn.get(cursor)?.tag === vnode.tag) found = cursor;
    if (found && typeof vnode !== "string" && !vnode.node && drawn.get(found)?.tag !== vnode.tag) found = undefined;
    if (found && typeof vnode !== "string" && !vnode.node) update(/** @type {HTMLElement} */ (found), vnode, false);
    const node = found ?? create(vnode);
    used.add(node);
    // Moving a node would make it lose focus and scroll position, so one that is in its place stays there.
    if (node !== cursor) el.insertBefore(node, cursor);
  }
  for (const node of old) if (!used.has(node) && node.parentNode === el) node.remove();
}
