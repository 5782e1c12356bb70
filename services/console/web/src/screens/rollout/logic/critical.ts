// The critical path: what an attempt waited for, moment by moment. A faster span of it would have ended the attempt earlier.

import type { Node } from "./tree";

/** A part of the path, in which nothing below `id` was waited for. Milliseconds. */
export interface Part {
  id: string;
  from: number;
  to: number;
}

const SLACK_MS = 2;

interface Frame {
  id: string;
  start: number;
  /** What is not explained yet ends here. */
  until: number;
  /** By end, the last one first. */
  waiting: Node[];
  next: number;
}

/** Returns the parts of the path through trees, the last one first. */
export function criticalPath(roots: Node[]): Part[] {
  if (!roots.length) return [];
  const parts: Part[] = [];
  const from = roots[0]!.span.start; // they are in the order of their starts
  let to = -Infinity;
  for (const { span } of roots) to = Math.max(to, span.end);
  const stack: Frame[] = [frame("", from, to, roots)];
  while (stack.length) {
    const top = stack.at(-1)!;
    const child = top.until > top.start ? top.waiting[top.next] : undefined;
    if (!child) {
      if (top.id && top.until > top.start) parts.push({ id: top.id, from: top.start, to: top.until });
      stack.pop();
      continue;
    }
    top.next += 1;
    const { span } = child;
    // What ends later was not waited for, but for what clocks differ.
    if (span.start >= top.until || span.end <= top.start || span.end > top.until + SLACK_MS) continue;
    const end = Math.min(span.end, top.until);
    if (top.id && end < top.until) parts.push({ id: top.id, from: end, to: top.until });
    const start = Math.max(span.start, top.start);
    top.until = start;
    stack.push(frame(span.id, start, end, child.children));
  }
  return parts;
}

function frame(id: string, start: number, until: number, children: Node[]): Frame {
  const waiting = [...children].sort((a, b) => b.span.end - a.span.end || a.span.start - b.span.start);
  return { id, start, until, waiting, next: 0 };
}
