// The kernel's side of these is aitune_lab/jupyter/protocol.py, report/tree_rows.py and report/tree_candidates.py.

export type RuleWord = "auto" | "pin" | "strategy" | "leave" | "mixed";
export type Kind = "module" | "method" | "container" | "fold";
export type ErrorClass = "exact" | "within budget" | "refused";
export type RowState =
  | ""
  | "not run"
  | "untunable"
  | "waiting"
  | "pending"
  | "running"
  | "tried"
  | "tuned"
  | "kept"
  | "left"
  | "disturbed"
  | "failed";

export interface Columns {
  path: string[];
  name: string[];
  class_name: string[];
  kind: Kind[];
  depth: number[];
  copies: number[];
  calls: number[];
  parameters: number[];
  share: number[];
  total_ms: number[];
  reason: string[];
  rule: RuleWord[];
  wanted: string[];
  choice: (string | null)[];
  speedup: (number | null)[];
  error_class: (ErrorClass | null)[];
  error: (number | null)[];
  accepted: boolean[];
  state: RowState[];
  activity: string[];
}

export interface Tree {
  revision: number;
  columns: Columns;
}

export type Changes = Record<string, Record<string, unknown>>;

export interface Patch {
  op: "patch";
  revision: number;
  rows: Changes;
}

export interface Ack {
  op: "ack";
  id: string;
  ok: boolean;
  reply: unknown;
  error: string;
}

export interface CandidateFigures {
  label: string;
  latency: string;
  at: string;
  speedup: string;
  error_class: string;
  error: string;
  status: string;
  chosen: boolean;
  pinned: boolean;
  pinnable: "yes" | "accept" | "no";
}

export interface Command {
  op: "hello" | "select" | "candidates" | "pin" | "unpin" | "leave";
  path: string;
  candidate?: string;
  accept_error?: boolean;
  revision?: number;
}

/** What a front end gives to `mount`. A command's promise is kept when the kernel has answered. */
export interface Api {
  columns: Columns;
  height: number;
  command(command: Command): Promise<unknown>;
}

/** What `mount` gives back. */
export interface Mounted {
  /** Values in `columns` changed in place: draw these rows again. */
  changed(rows: number[]): void;
  /** Show other rows. */
  show(columns: Columns): void;
  /** Remove everything that was added. */
  remove(): void;
}

/** The part of an anywidget model that is used here. */
export interface Model {
  get(name: string): any;
  send(content: unknown): void;
  on(name: string, callback: (...values: any[]) => void): void;
  off(name: string, callback: (...values: any[]) => void): void;
}
