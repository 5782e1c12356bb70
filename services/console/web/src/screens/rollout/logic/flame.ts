// The flame view: spans above those that they called; what ran at the same time in lanes of its own.

import type { Node } from "./tree";
import { walk } from "./tree";
import type { Window } from "./window";

export interface Block {
  node: Node;
  lane: number;
}

export const MAX_LANES = 200;

/** Puts each span in the first lane below its parent's in which nothing else runs; beyond the last lane they lie over each other. */
export function layOut(roots: Node[]): { blocks: Block[]; lanes: number } {
  const ends: number[] = [];
  const laneOf = new Map<Node, number>();
  const blocks: Block[] = [];
  for (const node of walk(roots)) {
    let lane = node.parent ? Math.min(MAX_LANES - 1, laneOf.get(node.parent)! + 1) : 0;
    while (lane < MAX_LANES - 1 && (ends[lane] ?? -Infinity) > node.span.start) lane += 1;
    ends[lane] = Math.max(ends[lane] ?? -Infinity, node.span.end);
    laneOf.set(node, lane);
    blocks.push({ node, lane });
  }
  return { blocks, lanes: ends.length };
}

/** A block on the screen, pixels. */
export interface Drawn {
  block: Block;
  left: number;
  width: number;
}

/** Returns the blocks of a window that can be seen: of those that are smaller than a pixel, one per pixel. */
export function drawn(blocks: Block[], shown: Window, width: number): Drawn[] {
  const scale = width / (shown.to - shown.from);
  const taken = new Map<number, number>();
  const found: Drawn[] = [];
  for (const block of blocks) {
    const { start, end } = block.node.span;
    if (end < shown.from || start > shown.to) continue;
    const left = Math.max(0, (start - shown.from) * scale);
    const right = Math.min(width, (end - shown.from) * scale);
    if (right - left < 1) {
      const pixel = Math.floor(left);
      if (taken.get(block.lane) === pixel) continue;
      taken.set(block.lane, pixel);
    }
    found.push({ block, left, width: Math.max(1, right - left) });
  }
  return found;
}

/** Returns what is at a point, in pixels from the left and in lanes. */
export function blockAt(found: Drawn[], x: number, lane: number): Block | undefined {
  return found.findLast(({ block, left, width }) => block.lane === lane && x >= left && x <= left + Math.max(width, 3))
    ?.block;
}
