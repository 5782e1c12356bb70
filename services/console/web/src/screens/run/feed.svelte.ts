// A run as it goes on: its curves, rewards and notices from the store, then each event as it happens.

import { TrainingRunService } from "../../api/gen/fulmen/algorithm/v1/training_run_service_pb";
import type { TrainingRun } from "../../api/gen/fulmen/algorithm/v1/training_run_pb";
import type { WatchTrainingRunResponse } from "../../api/gen/fulmen/algorithm/v1/training_run_service_pb";
import { RunHistoryService } from "../../api/gen/fulmen/store/v1/run_history_service_pb";
import type { StepRewards } from "../../api/gen/fulmen/store/v1/run_history_service_pb";
import { loading } from "../../api/loading.svelte";
import { live } from "../../api/streams.svelte";
import { client } from "../../api/transport";
import { dateOf } from "../../words/format";
import { getRun } from "../runs/runs";
import { isOpen } from "../runs/facts";
import { AXES, type AxisWord, type Curve, curveOf, extended, FIGURE_METRICS, OUTCOMES } from "./curves";

const POINTS = 1_000;
const STEPS = 200;
const NOTICES = 200;
const MOST_METRICS = 64;
const AGAIN_MS = 5_000;

/** A notice of a run. */
export interface RunNotice {
  sequence: bigint;
  time: Date | undefined;
  step: number;
  severity: string;
  message: string;
}

interface History {
  curves: Map<string, Curve>;
  names: string[];
  rewards: StepRewards[];
  notices: RunNotice[];
  lastSequence: bigint;
  firstTime: Date | undefined;
}

async function read(name: string, axis: AxisWord, metric: string, signal: AbortSignal): Promise<History> {
  const store = client(RunHistoryService);
  const [known, rewards, notices] = await Promise.all([
    store.getRunMetrics({ trainingRuns: [name] }, { signal }),
    store.listRewardDistributions({ trainingRun: name, maxSteps: STEPS }, { signal }),
    store.listRunNotices({ trainingRun: name, pageSize: NOTICES }, { signal }),
  ]);
  const names = known.runs[0]?.metricNames ?? [];
  const wanted = new Set([...FIGURE_METRICS, ...Object.keys(OUTCOMES), "tokens", ...(metric ? [metric] : [])]);
  const metrics = names.filter((each) => wanted.has(each) || /^spent_.+_seconds$/.test(each)).slice(0, MOST_METRICS);
  const answer = await store.getRunMetrics(
    { trainingRuns: [name], metrics, axis: AXES[axis], maxPoints: POINTS },
    { signal },
  );
  const found = answer.runs[0];
  return {
    curves: new Map((found?.curves ?? []).map((each) => [each.metric, curveOf(each)])),
    names,
    rewards: rewards.steps,
    notices: notices.notices.map(({ sequence, eventTime, step, severity, message }) => ({
      sequence,
      time: dateOf(eventTime),
      step: Number(step),
      severity,
      message,
    })),
    lastSequence: found?.lastSequence ?? 0n,
    firstTime: dateOf(found?.firstEventTime),
  };
}

/** What a page knows of a run. Make it in a component. */
export class RunFeed {
  run = $state.raw<TrainingRun>();
  isFromStore = $state(false);
  curves = $state.raw<ReadonlyMap<string, Curve>>(new Map());
  names = $state.raw<string[]>([]);
  rewards = $state.raw<StepRewards[]>([]);
  notices = $state.raw<RunNotice[]>([]);
  readonly found;
  readonly history;
  readonly stream;
  #sequence = 0n;
  #step = 0;

  constructor(
    name: string,
    private readonly axis: () => AxisWord,
    metric: () => string,
  ) {
    this.found = loading((signal) => getRun(name, signal));
    this.history = loading((signal) => read(name, axis(), metric(), signal));
    this.stream = live<WatchTrainingRunResponse>(() => {
      if (!this.history.value || this.isFromStore || !this.found.value) return undefined;
      return {
        open: (signal) =>
          client(TrainingRunService).watchTrainingRun({ name, afterSequence: this.#sequence }, { signal }),
        take: (messages) => messages.forEach((each) => this.#take(each)),
        isOver: () => this.run !== undefined && !isOpen(this.run),
      };
    });
    $effect(() => {
      const value = this.found.value;
      if (!value) return;
      this.run = value.run;
      this.isFromStore = value.isFromStore;
    });
    $effect(() => {
      const value = this.history.value;
      if (!value) return;
      this.curves = value.curves;
      this.names = value.names;
      this.rewards = value.rewards;
      this.notices = value.notices;
      this.#sequence = value.lastSequence;
      this.#step = Number(value.rewards.at(-1)?.step ?? this.found.value?.run.step ?? 0n);
    });
    // What its service would tell is asked of the store while that is gone.
    $effect(() => {
      if (!this.isFromStore) return;
      const timer = setInterval(() => (this.found.reload(), this.history.reload()), AGAIN_MS);
      return () => clearInterval(timer);
    });
  }

  /** The newest value of each metric. */
  latest = $derived(
    new Map([...this.curves].flatMap(([name, { y }]) => (y.length ? [[name, y.at(-1)!] as const] : []))),
  );

  /** Asks for the run anew, such as after it was changed. */
  reload = (): void => {
    this.found.reload();
    this.history.reload();
  };

  #take({ event }: WatchTrainingRunResponse): void {
    if (!event || event.sequence <= this.#sequence) return;
    this.#sequence = event.sequence;
    const time = dateOf(event.eventTime);
    const { case: kind, value } = event.event;
    if (kind === "run") {
      const wasRolledBack = value.rollbackCount > (this.run?.rollbackCount ?? 0);
      // Name and tags change without an event, so they may be newer than what the event holds.
      const { displayName, tags } = this.run ?? value;
      this.run = { ...value, displayName, tags };
      if (wasRolledBack) this.history.reload();
    } else if (kind === "notice") {
      const notice = { sequence: event.sequence, time, step: this.#step, ...value };
      this.notices = [notice, ...this.notices].slice(0, NOTICES);
    } else if (kind === "step") {
      this.#step = Number(value.step);
      this.#measured(value.values, time);
      if (value.rewards)
        this.rewards = [
          ...this.rewards.filter(({ step }) => step < value.step),
          { $typeName: "fulmen.store.v1.StepRewards" as const, step: value.step, rewards: value.rewards },
        ].slice(-STEPS);
      if (this.run && value.step > this.run.step) this.run = { ...this.run, step: value.step };
    }
  }

  #measured(values: Record<string, number>, time: Date | undefined): void {
    const x = this.#position(values, time);
    if (x === undefined) return;
    const curves = new Map(this.curves);
    for (const [metric, value] of Object.entries(values)) {
      if (!Number.isFinite(value)) continue;
      const isShown =
        curves.has(metric) || FIGURE_METRICS.includes(metric) || metric in OUTCOMES || /^spent_/.test(metric);
      if (isShown) curves.set(metric, extended(curves.get(metric), x, value));
    }
    this.curves = curves;
    const unknown = Object.keys(values).filter((each) => !this.names.includes(each));
    if (unknown.length) this.names = [...this.names, ...unknown].sort();
  }

  #position(values: Record<string, number>, time: Date | undefined): number | undefined {
    const axis = this.axis();
    if (axis === "step") return this.#step;
    if (axis === "time") {
      const first = this.history.value?.firstTime ?? time;
      return time && first && (time.getTime() - first.getTime()) / 1000;
    }
    const before = this.curves.get("tokens")?.x.at(-1) ?? 0;
    return before + (values.tokens ?? 0);
  }
}
