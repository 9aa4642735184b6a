// @ts-check
/** Which rows are shown, in which order: open and closed, searched, sorted. No DOM here. */

/** @typedef {import("./types").Columns} Columns */
/** @typedef {"share" | "calls" | "parameters" | "choice" | "speedup" | "error" | "state"} SortKey */

const ROOM = 24;

export class Rows {
  /** @param {Columns} columns */
  constructor(columns) {
    this.columns = columns;
    this.count = columns.path.length;
    /** @type {Int32Array} */
    this.parent = new Int32Array(this.count).fill(-1);
    /** @type {number[][]} */
    this.children = Array.from({ length: this.count }, () => []);
    /** @type {number[]} */
    this.roots = [];
    this.open = new Uint8Array(this.count);
    this.query = "";
    /** @type {SortKey | null} */
    this.sortKey = null;
    this.descending = true;
    /** Row numbers in the order in which they are shown. @type {number[]} */
    this.shown = [];
    /** @type {Map<number, number>} */
    this.place = new Map();
    /** @type {number[]} */
    const above = [];
    for (let i = 0; i < this.count; i++) {
      const depth = columns.depth[i];
      above.length = depth;
      above.push(i);
      if (depth > 0) {
        this.parent[i] = above[depth - 1];
        this.children[above[depth - 1]].push(i);
      } else this.roots.push(i);
    }
    this.#openWhatFits();
    this.arrange();
  }

  /** Open level after level while it all fits into one look; folds stay closed. */
  #openWhatFits() {
    let level = this.roots;
    let visible = level.length;
    while (level.length) {
      const opened = level.filter((i) => this.children[i].length && this.columns.kind[i] !== "fold");
      const next = opened.flatMap((i) => this.children[i]);
      if (!next.length || visible + next.length > ROOM) return;
      for (const i of opened) this.open[i] = 1;
      visible += next.length;
      level = next;
    }
  }

  /** Keep what was open, by path, when other columns are shown. @param {Rows} before */
  openLike(before) {
    const was = new Map(before.columns.path.map((path, i) => [path, before.open[i]]));
    this.columns.path.forEach((path, i) => {
      const open = was.get(path);
      if (open !== undefined) this.open[i] = open;
    });
    this.query = before.query;
    this.sortKey = before.sortKey;
    this.descending = before.descending;
    this.arrange();
  }

  /** @param {number} i */
  isParent(i) {
    return this.children[i].length > 0;
  }

  /** Whether what lies under a row is shown; a search opens whatever leads to a match. @param {number} i */
  isOpen(i) {
    return this.children[i].length > 0 && (this.open[i] === 1 || this.query !== "");
  }

  /** @param {number} i @param {boolean} open */
  setOpen(i, open) {
    this.open[i] = open ? 1 : 0;
    this.arrange();
  }

  /** @param {boolean} open */
  setAllOpen(open) {
    for (let i = 0; i < this.count; i++) this.open[i] = open && this.children[i].length ? 1 : 0;
    this.arrange();
  }

  /** @param {string} query */
  search(query) {
    this.query = query.trim().toLowerCase();
    this.arrange();
  }

  /** Three clicks on a column: largest first, smallest first, the model's own order. @param {SortKey} key */
  sortBy(key) {
    if (this.sortKey !== key) [this.sortKey, this.descending] = [key, true];
    else if (this.descending) this.descending = false;
    else this.sortKey = null;
    this.arrange();
  }

  /** Work out `shown`. */
  arrange() {
    const kept = this.query ? this.#matching(this.query.split(/\s+/)) : null;
    this.shown = [];
    const stack = this.#ordered(this.roots).reverse();
    for (let i = stack.pop(); i !== undefined; i = stack.pop()) {
      if (kept && !kept[i]) continue;
      this.shown.push(i);
      if (this.isOpen(i)) stack.push(...this.#ordered(this.children[i]).reverse());
    }
    this.place = new Map(this.shown.map((i, place) => [i, place]));
  }

  /** Rows that hold every word, and all rows above them. @param {string[]} words */
  #matching(words) {
    const kept = new Uint8Array(this.count);
    const c = this.columns;
    for (let i = this.count - 1; i >= 0; i--) {
      const text = `${c.path[i]} ${c.name[i]} ${c.class_name[i]} ${c.choice[i] ?? ""} ${c.state[i]}`.toLowerCase();
      if (words.every((word) => text.includes(word))) kept[i] = 1;
      if (kept[i] && this.parent[i] >= 0) kept[this.parent[i]] = 1;
    }
    return kept;
  }

  /** Siblings in the order of the sorted column; those without a value come last. @param {number[]} siblings */
  #ordered(siblings) {
    const key = this.sortKey;
    if (!key) return [...siblings];
    /** @type {(string | number | null)[]} */
    const values = this.columns[key];
    const sign = this.descending ? -1 : 1;
    return [...siblings].sort((a, b) => {
      const [x, y] = [values[a], values[b]];
      if (x === y) return a - b;
      if (x === null || x === "") return 1;
      if (y === null || y === "") return -1;
      if (typeof x === "string" || typeof y === "string") return -sign * String(x).localeCompare(String(y));
      return sign * (x - y);
    });
  }
}
