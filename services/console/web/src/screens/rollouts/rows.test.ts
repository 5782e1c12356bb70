import { create } from "@bufbuild/protobuf";
import { expect, test } from "vitest";

import { type Rollout, RolloutSchema, RolloutState } from "../../api/gen/fulmen/store/v1/rollout_pb";
import { Rows } from "./rows.svelte";

function rollout(id: number, state = RolloutState.QUEUED): Rollout {
  return create(RolloutSchema, { name: `projects/a/rollouts/${String(id).padStart(8, "0")}`, state });
}

function ids(rows: Rows): number[] {
  return rows.shown.map(({ name }) => Number(name.slice(-8)));
}

test("pages follow each other, and a rollout that moved is kept once", () => {
  const rows = new Rows();
  rows.take([rollout(9), rollout(8)], true);
  rows.take([rollout(8), rollout(7)], false);
  expect(ids(rows)).toEqual([9, 8, 7]);
  rows.take([rollout(5)], true);
  expect(ids(rows)).toEqual([5]);
});

test("changes replace rows, and new rollouts come on top of a list of all", () => {
  const rows = new Rows();
  rows.take([rollout(9), rollout(8)], true);
  rows.change([rollout(8, RolloutState.RUNNING), rollout(11), rollout(10), rollout(2)], true);
  expect(ids(rows)).toEqual([11, 10, 9, 8]);
  expect(rows.shown[3]?.state).toBe(RolloutState.RUNNING);
  rows.change([rollout(10, RolloutState.RUNNING)], true);
  expect(rows.shown[1]?.state).toBe(RolloutState.RUNNING);
  expect(rows.changed).toBe(0);
});

test("what may belong into a filtered list is counted until it is loaded again", () => {
  const rows = new Rows();
  rows.take([rollout(9)], true);
  rows.change([rollout(12), rollout(3), rollout(9, RolloutState.RUNNING)], false);
  expect(ids(rows)).toEqual([9]);
  expect(rows.changed).toBe(2);
  rows.take([rollout(12), rollout(9)], true);
  expect(rows.changed).toBe(0);
});

test("of a flood of new rollouts some are shown, and the others are counted", () => {
  const rows = new Rows();
  rows.take([rollout(9)], true);
  rows.change(
    Array.from({ length: 1_000 }, (_, index) => rollout(10 + index)),
    true,
  );
  expect(rows.shown).toHaveLength(201);
  expect(rows.changed).toBe(800);
});

test("a change of one in a hundred thousand rows leaves the others as they are", () => {
  const rows = new Rows();
  rows.take(
    Array.from({ length: 100_000 }, (_, index) => rollout(200_000 - index)),
    true,
  );
  const before = rows.shown[500];
  rows.change([rollout(150_000, RolloutState.RUNNING)], true);
  expect(rows.shown).toHaveLength(100_000);
  expect(rows.shown[500]).toBe(before);
  expect(rows.shown[50_000]?.state).toBe(RolloutState.RUNNING);
}, 60_000);
