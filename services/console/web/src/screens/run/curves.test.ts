import { expect, test } from "vitest";

import { drawn, extended, FIGURES, spentOf, together } from "./curves";

test("curves of several runs share one axis", () => {
  const found = together([
    { x: [1, 2, 4], y: [0.1, 0.2, 0.4] },
    { x: [2, 3], y: [5, 6] },
  ]);
  expect(found.x).toEqual([1, 2, 3, 4]);
  expect(found.values).toEqual([
    [0.1, 0.2, null, 0.4],
    [null, 5, 6, null],
  ]);
});

test("a chart has the lines that the run measured, and the spread around the first", () => {
  const curves = new Map([
    ["reward_mean", { x: [1, 2], y: [0.5, 0.6] }],
    ["reward_std", { x: [1], y: [0.1] }],
    ["loss", { x: [1], y: [2] }],
  ]);
  const found = drawn(FIGURES, curves);
  expect(found.map(({ title }) => title)).toEqual(["Reward", "Loss"]);
  expect(found[0]?.series).toEqual([
    { label: "mean", values: [0.5, 0.6], spread: { low: [0.4, null], high: [0.6, null] } },
  ]);
});

test("a repeated step replaces what came after it", () => {
  const curve = { x: [1, 2, 3], y: [3, 2, 9] };
  expect(extended(curve, 4, 1)).toEqual({ x: [1, 2, 3, 4], y: [3, 2, 9, 1] });
  expect(extended(curve, 2, 1)).toEqual({ x: [1, 2], y: [3, 1] });
  expect(extended(undefined, 0, 7)).toEqual({ x: [0], y: [7] });
});

test("time is told by activity, the longest first", () => {
  const latest = new Map([
    ["spent_train_seconds", 30],
    ["spent_generation_wait_seconds", 60],
    ["spent_custom_thing_seconds", 10],
    ["spent_submit_seconds", 0],
    ["loss", 1],
  ]);
  expect(spentOf(latest)).toEqual([
    { kind: "waiting for rollouts", seconds: 60, share: 0.6 },
    { kind: "training", seconds: 30, share: 0.3 },
    { kind: "custom thing", seconds: 10, share: 0.1 },
  ]);
});
