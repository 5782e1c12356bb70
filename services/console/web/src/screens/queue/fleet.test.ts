import { create, type MessageInitShape } from "@bufbuild/protobuf";
import { TimestampSchema } from "@bufbuild/protobuf/wkt";
import { expect, test } from "vitest";

import { QueueSchema } from "../../api/gen/fulmen/store/v1/queue_service_pb";
import { RunnerSchema } from "../../api/gen/fulmen/store/v1/runner_registry_service_pb";
import {
  changed,
  labelText,
  lastMinute,
  loadOf,
  mean,
  minutesOf,
  orderText,
  runnersWith,
  shareOf,
  slotsOf,
} from "./fleet";

const runner = (name: string, init: Omit<MessageInitShape<typeof RunnerSchema>, "$typeName"> = {}) =>
  create(RunnerSchema, { name, info: { labels: { gpu: "h200" }, slotCount: 4 }, ...init });

test("labels are told in one order, and none as any runner", () => {
  expect(labelText({ zone: "a", gpu: "h200" })).toBe("gpu=h200, zone=a");
  expect(labelText({})).toBe("any runner");
});

test("a runner that drains takes no labels", () => {
  const fleet = [runner("a"), runner("b", { order: { number: 1n, drain: {} } })];
  expect(runnersWith({ gpu: "h200" }, fleet)).toBe(1);
  expect(runnersWith({ gpu: "h100" }, fleet)).toBe(0);
  expect(runnersWith({}, fleet)).toBe(1);
});

test("a project shares with those that have work, by weight", () => {
  const [large, small, idle, paused] = [
    create(QueueSchema, { project: "projects/a", weight: 300, queuedCount: 5n }),
    create(QueueSchema, { project: "projects/b", weight: 100, runningCount: 1n }),
    create(QueueSchema, { project: "projects/c", weight: 100 }),
    create(QueueSchema, { project: "projects/d", weight: 100, queuedCount: 9n, pauseTime: create(TimestampSchema) }),
  ] as const;
  const all = [large, small, idle, paused];
  expect(all.map((each) => shareOf(each, all))).toEqual([0.75, 0.25, undefined, undefined]);
});

test("slots are those reported, else those of the start", () => {
  expect(slotsOf(runner("a", { runningCount: 1 }))).toEqual({ used: 1, limit: 4, automatic: false });
  const told = { slots: { inUseCount: 3, limitCount: 8, automatic: true } };
  expect(slotsOf(runner("a", { load: told }))).toEqual({ used: 3, limit: 8, automatic: true });
});

test("an order is told until it is confirmed, a drain until the end", () => {
  expect(orderText(runner("a"))).toBe("");
  expect(orderText(runner("a", { orderPending: true, order: { slots: { slotCount: 8 } } }))).toBe("8 slots ordered");
  expect(orderText(runner("a", { orderPending: true, order: { slots: { automatic: true } } }))).toMatch(/^automatic/);
  expect(orderText(runner("a", { order: { slots: { slotCount: 8 } } }))).toBe("");
  expect(orderText(runner("a", { orderPending: true, order: { drain: {} } }))).toBe("drain ordered");
  expect(orderText(runner("a", { order: { drain: {} } }))).toBe("draining");
});

test("a load that was not measured is unknown, not zero", () => {
  expect(loadOf(runner("a"), "cpu")).toBeUndefined();
  const load = { cpuRatio: 0.5, memoryBytes: 1n, memoryLimitBytes: 4n };
  expect(loadOf(runner("a", { load }), "memory")).toBe(0.25);
  expect(loadOf(runner("a", { load }), "gpu")).toBeUndefined();
  expect(loadOf(runner("a", { load: { ...load, gpus: [{ utilizationRatio: 1 }, {}] } }), "gpu")).toBe(0.5);
  expect(mean([undefined, 1, 0])).toBe(0.5);
  expect(mean([undefined])).toBeUndefined();
});

test("minutes end at the last of all runners, and a minute without a report stays empty", () => {
  const at = (minute: number, cpuRatio: number) => ({
    minuteTime: { seconds: BigInt(minute * 60) },
    load: { cpuRatio },
  });
  const steady = runner("a", { loadHistory: [at(96, 0.9), at(97, 0.1), at(99, 0.3), at(100, 0.4)] });
  const late = runner("b", { loadHistory: [at(99, 1)] });
  expect(lastMinute([late, steady, runner("c")])).toBe(100);
  expect(minutesOf(steady, "cpu", 100, 4)).toEqual([0.1, undefined, 0.3, 0.4]);
  expect(minutesOf(late, "cpu", 100, 4)).toEqual([undefined, undefined, 1, undefined]);
  expect(minutesOf(late, "slots", 100, 2)).toEqual([undefined, undefined]);
  expect(lastMinute([])).toBe(0);
});

test("changes of the fleet are taken in order", () => {
  const known = changed(new Map(), [{ runners: [runner("a"), runner("b")], removed: [] }]);
  const now = changed(known, [
    { runners: [runner("a", { runningCount: 2 })], removed: ["b"] },
    { runners: [], removed: ["c"] },
  ]);
  expect([...now.values()].map((each) => [each.name, each.runningCount])).toEqual([["a", 2]]);
});
