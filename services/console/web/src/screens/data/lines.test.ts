import { expect, test } from "vitest";

import { Lines } from "./lines";

function parts(text: string, size: number): { lines: Lines; reads: () => number } {
  const bytes = new TextEncoder().encode(text);
  let reads = 0;
  const lines = new Lines(async (offset) => {
    reads += 1;
    return bytes.slice(offset, offset + size);
  });
  return { lines, reads: () => reads };
}

const signal = new AbortController().signal;

test("lines are whole, whatever parts they arrive in", async () => {
  const text = '{"input":"ä→😀"}\n\n{"input":2}\n{"input":3}';
  for (let size = 1; size < 40; size += 1) {
    const { lines } = parts(text, size);
    expect(await lines.next(100, signal)).toEqual([
      { number: 1, text: '{"input":"ä→😀"}' },
      { number: 2, text: '{"input":2}' },
      { number: 3, text: '{"input":3}' },
    ]);
    expect(await lines.next(100, signal)).toEqual([]);
  }
});

test("no more is read than is looked at", async () => {
  const { lines, reads } = parts("1\n2\n3\n4\n5\n6\n", 4);
  expect((await lines.next(2, signal)).map(({ text }) => text)).toEqual(["1", "2"]);
  expect(reads()).toBe(1);
  expect((await lines.next(3, signal)).map(({ text }) => text)).toEqual(["3", "4", "5"]);
  expect((await lines.next(3, signal)).map(({ text }) => text)).toEqual(["6"]);
});
