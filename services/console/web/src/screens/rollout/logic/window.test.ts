import { expect, test } from "vitest";

import { moved, place, ticks, zoomed } from "./window";

const WHOLE = { from: 1000, to: 2000 };

test("zooming keeps what is under the pointer, and stays within the whole", () => {
  const half = zoomed(WHOLE, WHOLE, 0.5, 0.25);
  expect(half).toEqual({ from: 1125, to: 1625 });
  expect(zoomed(half, WHOLE, 100, 0.5)).toEqual(WHOLE);
  let deep = WHOLE;
  for (let n = 0; n < 100; n++) deep = zoomed(deep, WHOLE, 0.5, 0.3);
  expect(deep.to).toBeGreaterThan(deep.from);
});

test("moving stops at the ends", () => {
  const half = { from: 1000, to: 1500 };
  expect(moved(half, WHOLE, 0.5)).toEqual({ from: 1250, to: 1750 });
  expect(moved(half, WHOLE, -3)).toEqual(half);
  expect(moved(half, WHOLE, 30)).toEqual({ from: 1500, to: 2000 });
});

test("places are cut at the edges", () => {
  expect(place(900, 1250, WHOLE)).toEqual({ left: 0, width: 25 });
  expect(place(0, 10, WHOLE)).toEqual({ left: 0, width: 0 });
});

test("ticks are round", () => {
  expect(ticks({ from: 1003, to: 1503 }, 1000, 5)).toEqual([100, 200, 300, 400, 500]);
  expect(ticks({ from: 0, to: 0.01 }, 0, 4).length).toBeLessThan(12);
});
