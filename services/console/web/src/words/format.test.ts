import { describe, expect, test } from "vitest";

import { ago, bytes, compact, count, dollars, enumWord, measure, percent, seconds, shortName } from "./format";

describe("formats", () => {
  test.each([
    [0, "0 ms"],
    [0.0004, "0 ms"],
    [0.82, "820 ms"],
    [1.23, "1.2 s"],
    [59.97, "1 min"],
    [200, "3 min 20 s"],
    [7500, "2 h 5 min"],
    [3600, "1 h"],
    [273_600, "3 d 4 h"],
    [-5, "−5.0 s"],
    [undefined, "–"],
    [Number.NaN, "–"],
  ])("%d seconds as %s", (value, text) => expect(seconds(value)).toBe(text));

  test.each([
    [0, "0.000"],
    [0.8734, "0.873"],
    [12.34, "12.34"],
    [1e-7, "1.0e−7"],
    [-0.5, "−0.500"],
    [1234567, "1.23M"],
    [Infinity, "∞"],
    [Number.NaN, "–"],
    [undefined, "–"],
  ])("the measurement %d as %s", (value, text) => expect(measure(value)).toBe(text));

  test("counts, bytes, money and shares", () => {
    expect(count(1234567n)).toBe("1,234,567");
    expect(compact(1234567)).toBe("1.23M");
    expect(bytes(1023)).toBe("1023 B");
    expect(bytes(3_565_158n)).toBe("3.4 MiB");
    expect(dollars(0)).toBe("$0.00");
    expect(dollars(0.01234)).toBe("$0.0123");
    expect(percent(0.8731)).toBe("87.3 %");
    expect(percent(1)).toBe("100 %");
  });

  test("times by their distance from now", () => {
    const now = new Date("2026-03-14T12:00:00Z");
    const before = (s: number) => ago(new Date(now.getTime() - s * 1000), now);
    expect([before(2), before(20), before(180), before(7200), before(3 * 86_400), before(-7200)]).toEqual([
      "just now",
      "20 s ago",
      "3 min ago",
      "2 h ago",
      "3 d ago",
      "in 2 h",
    ]);
  });

  test("names by what tells them apart", () => {
    expect(shortName("projects/default/rollouts/0193")).toBe("0193");
    expect(shortName("resources/policy.small/versions/3")).toBe("policy.small v3");
    expect(enumWord({ 2: "RETRY_WAIT" }, 2)).toBe("retry wait");
    expect(enumWord({}, 9)).toBe("unknown 9");
  });
});
