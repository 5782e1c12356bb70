// The tree of an attempt's spans, whatever writers sent: parents that never came, circles, and clocks that differ.

import type { TraceSpan } from "./spans";

export interface Node {
  span: TraceSpan;
  depth: number;
  parent?: Node;
  /** By start. */
  children: Node[];
  /** Its parent is not there, or is below itself. */
  isOrphan: boolean;
  /** It began before its parent: their clocks differ. */
  isSkewed: boolean;
}

/** A line of the list. */
export interface Row {
  node: Node;
  isOpen: boolean;
}

const SKEW_MS = 1;

/** Builds the trees, by start. Every span is in exactly one. */
export function buildTree(spans: TraceSpan[]): Node[] {
  const byId = new Map<string, Node>();
  const nodes = [...spans].sort(byStart).map((span): Node => {
    const node = { span, depth: 0, children: [], isOrphan: false, isSkewed: false };
    byId.set(span.id, node);
    return node;
  });
  const roots: Node[] = [];
  for (const node of nodes) {
    const parent = node.span.parent ? byId.get(node.span.parent) : undefined;
    if (parent && parent !== node) {
      node.parent = parent;
      parent.children.push(node);
    } else {
      node.isOrphan = node.span.parent !== "";
      roots.push(node);
    }
  }
  const reached = new Set<Node>();
  for (const root of roots) descend(root, reached);
  // What no root reaches goes in circles: the first of each circle becomes a root.
  for (const node of nodes) {
    if (reached.has(node)) continue;
    node.parent!.children = node.parent!.children.filter((each) => each !== node);
    node.parent = undefined;
    node.isOrphan = true;
    roots.push(node);
    descend(node, reached);
  }
  return roots.sort((a, b) => byStart(a.span, b.span));
}

/** Returns the lines of the trees, without what is below closed ones. */
export function rowsOf(roots: Node[], closed: ReadonlySet<string>): Row[] {
  const rows: Row[] = [];
  const stack = [...roots].reverse();
  for (let node = stack.pop(); node; node = stack.pop()) {
    const isOpen = !closed.has(node.span.id);
    rows.push({ node, isOpen });
    if (isOpen) for (let at = node.children.length - 1; at >= 0; at--) stack.push(node.children[at]!);
  }
  return rows;
}

/** Returns all nodes, parents before children. */
export function* walk(roots: Node[]): Generator<Node> {
  const stack = [...roots].reverse();
  for (let node = stack.pop(); node; node = stack.pop()) {
    yield node;
    for (let at = node.children.length - 1; at >= 0; at--) stack.push(node.children[at]!);
  }
}

/** Returns from when to when spans last; undefined without any. */
export function extent(spans: TraceSpan[]): { from: number; to: number } | undefined {
  let from = Infinity;
  let to = -Infinity;
  for (const { start, end } of spans) {
    from = Math.min(from, start);
    to = Math.max(to, end);
  }
  return from <= to ? { from, to: Math.max(to, from + 0.001) } : undefined;
}

function descend(root: Node, reached: Set<Node>): void {
  const stack = [root];
  reached.add(root);
  for (let node = stack.pop(); node; node = stack.pop()) {
    for (const child of node.children) {
      if (reached.has(child)) continue;
      reached.add(child);
      child.depth = node.depth + 1;
      child.isSkewed = child.span.start < node.span.start - SKEW_MS;
      stack.push(child);
    }
  }
}

function byStart(a: TraceSpan, b: TraceSpan): number {
  return a.start - b.start || b.end - a.end || (a.id < b.id ? -1 : 1);
}
