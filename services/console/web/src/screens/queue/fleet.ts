// What is computed of queues and runners.

import type { Queue } from "../../api/gen/fulmen/store/v1/queue_service_pb";
import type { Runner } from "../../api/gen/fulmen/store/v1/runner_registry_service_pb";

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
  const { load } = runner;
  if (measure === "slots") {
    const { used, limit } = slotsOf(runner);
    return limit ? Math.min(1, used / limit) : undefined;
  }
  if (!load) return undefined;
  if (measure === "cpu") return load.cpuRatio;
  if (measure === "memory")
    return load.memoryLimitBytes ? Number(load.memoryBytes) / Number(load.memoryLimitBytes) : undefined;
  return load.gpus.length
    ? load.gpus.reduce((sum, each) => sum + each.utilizationRatio, 0) / load.gpus.length
    : undefined;
}

/** The last samples of all runners, by name. */
export class Samples {
  #rows = new Map<string, (Record<Measure, number | undefined> | undefined)[]>();
  #taken = 0;

  constructor(readonly limit: number) {}

  /** Takes a sample of each runner; those that are gone lose their samples. */
  take(runners: Runner[]): void {
    const next = new Map<string, (Record<Measure, number | undefined> | undefined)[]>();
    for (const each of runners) {
      const old =
        this.#rows.get(each.name) ?? new Array<undefined>(Math.min(this.#taken, this.limit - 1)).fill(undefined);
      const sample = Object.fromEntries(
        (["slots", "cpu", "memory", "gpu"] as const).map((measure) => [measure, loadOf(each, measure)]),
      ) as Record<Measure, number | undefined>;
      next.set(each.name, [...old, sample].slice(-this.limit));
    }
    this.#rows = next;
    this.#taken += 1;
  }

  /** The samples of a runner, oldest first; undefined where it was not there, or did not tell. */
  of(name: string, measure: Measure): (number | undefined)[] {
    return (this.#rows.get(name) ?? []).map((sample) => sample?.[measure]);
  }
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
