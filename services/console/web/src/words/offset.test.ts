import { describe, expect, test } from "vitest";

import { offsetAfter } from "./offset";

const NOW = Date.parse("2026-03-14T12:00:00Z");
const HOUR = 3_600_000;

describe("the clock of the services", () => {
  test("is the browser's as long as answers agree with it", () => {
    expect(offsetAfter(0, NOW, NOW - 20, NOW + 30)).toBe(0);
    // The header has whole seconds: at 12:00:00.900 it says 12:00:00.
    expect(offsetAfter(0, NOW, NOW + 900, NOW + 950)).toBe(0);
    // A stream that had nothing to say for a while answers late.
    expect(offsetAfter(0, NOW + 14_000, NOW, NOW + 15_000)).toBe(0);
  });

  test.each([HOUR, -HOUR, 5_000])("is ahead of the browser's by %d ms", (ahead) => {
    expect(offsetAfter(0, NOW + ahead, NOW, NOW + 10)).toBe(ahead + 495);
    expect(offsetAfter(ahead, NOW + ahead, NOW, NOW + 10)).toBe(ahead);
  });

  test("is kept if an answer does not tell", () => {
    expect(offsetAfter(HOUR, Number.NaN, NOW, NOW)).toBe(HOUR);
  });
});
