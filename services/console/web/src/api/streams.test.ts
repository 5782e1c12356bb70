import { expect, test } from "vitest";

import { isEmpty, Paced } from "./streams.svelte";

test("at most ten rows a second are shown, the rest is counted", () => {
  const shown: number[] = [];
  const paced = new Paced<number>((items) => shown.push(...items));
  paced.offer(
    Array.from({ length: 25 }, (_, index) => index),
    0,
  );
  expect(shown).toHaveLength(10);
  expect(paced.held).toBe(15);
  paced.offer([25], 2_000);
  expect(paced.held).toBe(16); // what is held stays in order
  paced.release();
  expect(shown).toEqual(Array.from({ length: 26 }, (_, index) => index));
  paced.offer([26], 4_000);
  expect(shown).toHaveLength(27);
});

test("of what is held only the newest is kept", () => {
  const shown: number[] = [];
  const paced = new Paced<number>((items) => shown.push(...items), 5);
  paced.offer(
    Array.from({ length: 100 }, (_, index) => index),
    0,
  );
  expect(paced.held).toBe(90);
  paced.release();
  expect(shown.slice(10)).toEqual([95, 96, 97, 98, 99]);
});

test("a heartbeat is a message without any field", () => {
  expect(isEmpty({ $typeName: "m", name: "", count: 0n, items: [], event: { case: undefined }, map: {} })).toBe(true);
  expect(isEmpty({ $typeName: "m", name: "a" })).toBe(false);
  expect(isEmpty({ $typeName: "m", items: [1] })).toBe(false);
  expect(isEmpty({ $typeName: "m", event: { case: "run", value: {} } })).toBe(false);
  expect(isEmpty({ $typeName: "m", run: { $typeName: "r" } })).toBe(false);
});
