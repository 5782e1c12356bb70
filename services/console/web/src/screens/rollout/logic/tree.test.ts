import { expect, test } from "vitest";

import { criticalPath } from "./critical";
import { drawn, layOut, MAX_LANES } from "./flame";
import type { TraceSpan } from "./spans";
import { buildTree, extent, rowsOf, walk } from "./tree";

function span(id: string, start: number, end: number, parent = ""): TraceSpan {
  return { id, parent, attempt: 1, name: id, start, end, isFailed: false, scope: "" } as unknown as TraceSpan;
}

const NONE = new Set<string>();
const lines = (spans: TraceSpan[], closed = NONE) =>
  rowsOf(buildTree(spans), closed).map(({ node }) => " ".repeat(node.depth) + node.span.id);

test("children stand below their parents, by start, whatever the order in which they came", () => {
  const spans = [span("c", 5, 6, "a"), span("b", 1, 4, "a"), span("d", 2, 3, "b"), span("a", 0, 9)];
  expect(lines(spans)).toEqual(["a", " b", "  d", " c"]);
  expect(lines(spans, new Set(["b"]))).toEqual(["a", " b", " c"]);
});

test("a span whose parent never came, or that is its own parent, is a root that says so", () => {
  const roots = buildTree([span("a", 0, 9), span("b", 1, 2, "gone"), span("c", 3, 4, "c")]);
  expect(roots.map(({ span: { id }, isOrphan }) => [id, isOrphan])).toEqual([
    ["a", false],
    ["b", true],
    ["c", true],
  ]);
});

test("circles are cut where they begin, and every span is there once", () => {
  const spans = [
    span("a", 3, 4, "c"),
    span("b", 1, 2, "a"),
    span("c", 2, 3, "b"),
    span("d", 5, 6, "c"),
    span("e", 0, 9),
  ];
  expect(lines(spans)).toEqual(["e", "b", " c", "  a", "  d"]);
  expect([...walk(buildTree(spans))].length).toBe(5);
});

test("a span that began before its parent shows that clocks differ", () => {
  const [root] = buildTree([span("a", 10, 20), span("b", 2, 12, "a"), span("c", 9.5, 11, "a")]);
  expect(root!.children.map(({ isSkewed }) => isSkewed)).toEqual([true, false]);
});

test("a tree that is 20,000 spans deep is built and walked", () => {
  const deep = Array.from({ length: 20_000 }, (_, n) => span(`${n}`, n, 40_000 - n, n ? `${n - 1}` : ""));
  const roots = buildTree(deep);
  expect(rowsOf(roots, NONE).at(-1)!.node.depth).toBe(19_999);
  expect(criticalPath(roots).length).toBeGreaterThan(0);
  expect(layOut(roots).lanes).toBe(MAX_LANES);
});

test("the critical path follows what ended last", () => {
  const roots = buildTree([span("a", 0, 100), span("b", 10, 40, "a"), span("c", 20, 90, "a"), span("d", 30, 80, "c")]);
  const path = criticalPath(roots).reverse();
  expect(path.map(({ id, from, to }) => `${id} ${from}-${to}`)).toEqual([
    "a 0-20",
    "c 20-30",
    "d 30-80",
    "c 80-90",
    "a 90-100",
  ]);
});

test("the parts of a critical path do not overlap, whatever the spans", () => {
  let seed = 1;
  const next = (below: number) => (seed = (seed * 48271) % 2147483647) % below;
  for (let round = 0; round < 50; round++) {
    const spans = Array.from({ length: 40 }, (_, n) => {
      const start = next(1000);
      return span(`${n}`, start, start + next(300), n ? `${next(n + 5)}` : "");
    });
    const parts = criticalPath(buildTree(spans)).sort((a, b) => a.from - b.from);
    for (const [at, { from, to }] of parts.entries()) {
      expect(to).toBeGreaterThan(from);
      if (at) expect(from).toBeGreaterThanOrEqual(parts[at - 1]!.to);
    }
  }
});

test("what runs at the same time has lanes of its own", () => {
  const { blocks, lanes } = layOut(
    buildTree([span("a", 0, 10), span("b", 1, 5, "a"), span("c", 2, 6, "a"), span("d", 6, 9, "a")]),
  );
  expect(blocks.map(({ node, lane }) => `${node.span.id}${lane}`)).toEqual(["a0", "b1", "c2", "d1"]);
  expect(lanes).toBe(3);
});

test("of ten thousand spans no more are drawn than there are pixels", () => {
  const { blocks } = layOut(buildTree(Array.from({ length: 10_000 }, (_, n) => span(`${n}`, n, n + 0.5))));
  expect(drawn(blocks, { from: 0, to: 10_000 }, 500).length).toBeLessThanOrEqual(500);
  expect(drawn(blocks, { from: 100, to: 110 }, 500).length).toBe(11);
});

test("an extent without length has some", () => {
  expect(extent([])).toBeUndefined();
  const { from, to } = extent([span("a", 5, 5)])!;
  expect(to).toBeGreaterThan(from);
});
