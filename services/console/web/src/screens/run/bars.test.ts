import { create } from "@bufbuild/protobuf";
import { expect, test } from "vitest";

import { StepRewardsSchema } from "../../api/gen/fulmen/store/v1/run_history_service_pb";
import { outcomesOf, rewardPicture } from "./bars";

const rewards = (step: number, values: number[], counts: number[]) =>
  create(StepRewardsSchema, { step: BigInt(step), rewards: { values, counts: counts.map(BigInt) } });

test("groups are told by outcome for each step that had some", () => {
  const curves = new Map([
    ["groups_trained", { x: [0, 1, 2], y: [0, 3, 4] }],
    ["groups_no_variance", { x: [1], y: [1] }],
  ]);
  expect(outcomesOf(curves, 10)).toEqual([
    { x: 1, counts: [3, 1, 0, 0] },
    { x: 2, counts: [4, 0, 0, 0] },
  ]);
  expect(outcomesOf(curves, 1)).toHaveLength(1);
});

test("few rewards have a row each, many share rows of equal height", () => {
  const exact = rewardPicture([rewards(1, [0, 1], [3, 1]), rewards(2, [1], [4])], 10);
  expect(exact?.rows).toBe(2);
  expect(exact?.squares).toEqual([
    { column: 0, row: 0, share: 0.75 },
    { column: 0, row: 1, share: 0.25 },
    { column: 1, row: 1, share: 1 },
  ]);
  const many = Array.from({ length: 25 }, (_, index) => index / 24);
  const found = rewardPicture(
    [
      rewards(
        1,
        many,
        many.map(() => 1),
      ),
    ],
    10,
  );
  expect(found?.rows).toBe(12);
  expect(found?.squares.reduce((sum, { share }) => sum + share, 0)).toBeCloseTo(1);
  expect(rewardPicture([], 10)).toBeUndefined();
});
