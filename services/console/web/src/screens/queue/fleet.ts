// What is computed of queues and runners.

import type { RunnerLoad } from "../../api/gen/fulmen/store/v1/lease_pb";
import type { Queue } from "../../api/gen/fulmen/store/v1/queue_service_pb";
import type { Runner, RunnerLoadSample } from "../../api/gen/fulmen/store/v1/runner_registry_service_pb";

type Labels = Record<string, string>;

/** `gpu=h200, zone=a`; `any runner` without labels. */
export function labelText(labels: Labels): string {
  const pairs = Object.entries(labels).sort(([a], [b]) => a.localeCompare(b));
  return pairs.map(([key, value]) => `${key}=${value}`).join(", ") || "any runner";
}

/** How many of the runners have all these labels and are not draining. */
export function runnersWith(labels: Labels, runners: Runner[]): number {
  return runners.filter((each) => {
    const own = each.info?.labels ?? {};
    return !each.order?.drain && Object.entries(labels).every(([key, value]) => own[key] === value);
  }).length;
}

/** Share of the runners that a project gets while all those with work have more than enough of it; undefined without work. */
export function shareOf(queue: Queue, queues: Queue[]): number | undefined {
  const hasWork = (each: Queue) => !each.pauseTime && each.queuedCount + each.runningCount > 0n;
  if (!hasWork(queue)) return undefined;
  const sum = queues.filter(hasWork).reduce((total, each) => total + each.weight, 0);
  return sum ? queue.weight / sum : undefined;
}

/** Slots of a runner: in use, and how many there are. */
export function slotsOf(runner: Runner): { used: number; limit: number; automatic: boolean } {
  const slots = runner.load?.slots;
  return slots
    ? { used: slots.inUseCount, limit: slots.limitCount, automatic: slots.automatic }
    : { used: runner.runningCount, limit: runner.info?.slotCount ?? 0, automatic: false };
}

/** What is ordered and what the runner makes of it; empty if nothing is on its way. */
export function orderText(runner: Runner): string {
  const { order, orderPending } = runner;
  if (order?.drain) return orderPending ? "drain ordered" : "draining";
  if (!orderPending || !order?.slots) return "";
  return order.slots.automatic ? "automatic slots ordered" : `${order.slots.slotCount} slots ordered`;
}

/** A measure of a runner, 0 to 1; undefined if unknown. */
export type Measure = "slots" | "cpu" | "memory" | "gpu";

export function loadOf(runner: Runner, measure: Measure): number | undefined {
  if (measure !== "slots") return ratioOf(runner.load, measure);
  const { used, limit } = slotsOf(runner);
  return limit ? Math.min(1, used / limit) : undefined;
}

function ratioOf(load: RunnerLoad | undefined, measure: Measure): number | undefined {
  if (!load) return undefined;
  if (measure === "slots") {
    const slots = load.slots;
    return slots?.limitCount ? Math.min(1, slots.inUseCount / slots.limitCount) : undefined;
  }
  if (measure === "cpu") return load.cpuRatio;
  if (measure === "memory")
    return load.memoryLimitBytes ? Number(load.memoryBytes) / Number(load.memoryLimitBytes) : undefined;
  return load.gpus.length
    ? load.gpus.reduce((sum, each) => sum + each.utilizationRatio, 0) / load.gpus.length
    : undefined;
}

const minuteOf = (sample: RunnerLoadSample) => Number(sample.minuteTime?.seconds ?? 0) / 60;

/** The last minute in which any of the runners told its load, counted from 1970; by the store's clock. */
export function lastMinute(runners: Runner[]): number {
  return Math.max(0, ...runners.map(({ loadHistory }) => (loadHistory.length ? minuteOf(loadHistory.at(-1)!) : 0)));
}

/** What a runner told in each of the `count` minutes that end with `last`, oldest first; undefined where it told nothing. */
export function minutesOf(
  { loadHistory }: Runner,
  measure: Measure,
  last: number,
  count: number,
): (number | undefined)[] {
  const values = new Array<number | undefined>(count).fill(undefined);
  for (const sample of loadHistory) {
    const at = minuteOf(sample) - last + count - 1;
    if (at >= 0 && at < count) values[at] = ratioOf(sample.load, measure);
  }
  return values;
}

/** Mean of what is known. */
export function mean(values: (number | undefined)[]): number | undefined {
  const known = values.filter((each) => each !== undefined);
  return known.length ? known.reduce((sum, each) => sum + each, 0) / known.length : undefined;
}

/** Changes of the fleet: sessions by name, with those that came, changed or ended. */
export function changed(
  fleet: ReadonlyMap<string, Runner>,
  messages: { runners: Runner[]; removed: string[] }[],
): ReadonlyMap<string, Runner> {
  const next = new Map(fleet);
  for (const { runners, removed } of messages) {
    for (const each of runners) next.set(each.name, each);
    for (const name of removed) next.delete(name);
  }
  return next;
}
