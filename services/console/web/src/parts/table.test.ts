import { expect, test } from "vitest";

import { windowOf } from "./table";

test("only the rows in sight are on the page, and some on both sides", () => {
  expect(windowOf(100_000, 0, 640, 32)).toEqual({ from: 0, to: 40 });
  expect(windowOf(100_000, 32_000, 640, 32)).toEqual({ from: 980, to: 1040 });
  expect(windowOf(10, 0, 640, 32)).toEqual({ from: 0, to: 10 });
  // The list became shorter than where it was scrolled to.
  expect(windowOf(10, 32_000, 640, 32)).toEqual({ from: 10, to: 10 });
});
