// Curves of metrics: which are shown together, and how those of several runs share one axis.

import { RunAxis } from "../../api/gen/fulmen/store/v1/run_history_service_pb";
import type { RunCurve } from "../../api/gen/fulmen/store/v1/run_history_service_pb";
import type { Series } from "../../parts/chart";

/** Axes, by the word in the address. */
export const AXES = { step: RunAxis.STEP, time: RunAxis.TIME, tokens: RunAxis.TOKENS } as const;
export type AxisWord = keyof typeof AXES;

export function axisOf(word: string | null): AxisWord {
  return word === "time" || word === "tokens" ? word : "step";
}

/** A chart of a run. */
export interface Figure {
  title: string;
  /** What it measures, in words. */
  about?: string;
  /** Its lines: label by metric. */
  lines: Record<string, string>;
  /** Metric with the spread around the first line. */
  spread?: string;
}

/** Charts of a run, in this order; those without a metric are left out. */
export const FIGURES: Figure[] = [
  { title: "Reward", lines: { reward_mean: "mean" }, spread: "reward_std" },
  {
    title: "Validation",
    lines: { validation_accuracy: "mean reward", validation_loss: "loss", validation_pass_at_1: "pass@1" },
  },
  {
    title: "Loss",
    about: "The quantity that training minimises. With rewards it need not fall: look at the reward.",
    lines: { loss: "loss", value_loss: "of the critic" },
  },
  {
    title: "KL",
    about:
      "KL divergence: how far the sampling policy is from the policy in training, and how far that is from the initial policy. 0 means equal.",
    lines: { kl_sampler_trainer: "sampler to trainer", kl_reference: "to the reference" },
  },
  {
    title: "Entropy",
    about: "How uncertain the policy is at each token. Near 0 it always gives the same answer.",
    lines: { entropy_estimate: "nats per token" },
  },
  {
    title: "Staleness",
    about: "By how many steps the sampling policy is older than the policy in training.",
    lines: { staleness_mean: "mean", staleness_max: "max" },
  },
  {
    title: "Engine mismatch",
    about:
      "How far the probabilities of the engine are from the trainer's for the same tokens and weights. 0 means equal.",
    lines: { engine_mismatch_kl: "KL", engine_mismatch_logprob_mean: "mean", engine_mismatch_logprob_max: "max" },
  },
  { title: "Tokens of a rollout", lines: { rollout_tokens_mean: "mean", rollout_tokens_max: "max" } },
  {
    title: "Gradient norm",
    about: "Norm of the gradient of a step, before clipping.",
    lines: { grad_norm: "before clipping" },
  },
  { title: "Tokens per second", lines: { tokens_per_second: "sampled", trained_tokens_per_second: "trained" } },
];

/** All metrics that the charts of a run show. */
export const FIGURE_METRICS = [
  ...new Set(FIGURES.flatMap(({ lines, spread }) => [...Object.keys(lines), ...(spread ? [spread] : [])])),
];

export const OUTCOMES: Record<string, string> = {
  groups_trained: "trained on",
  groups_no_variance: "equal rewards",
  groups_too_stale: "too old",
  groups_too_few_usable: "failed",
};

/** Points of a metric. */
export interface Curve {
  x: number[];
  y: number[];
}

export function curveOf({ positions, values }: RunCurve): Curve {
  return { x: positions, y: values };
}

/** Lays curves over one ascending axis; null where one has no point. */
export function together(curves: Curve[]): { x: number[]; values: (number | null)[][] } {
  const x = [...new Set(curves.flatMap((each) => each.x))].sort((a, b) => a - b);
  const place = new Map(x.map((position, index) => [position, index]));
  const values = curves.map((curve) => {
    const row = new Array<number | null>(x.length).fill(null);
    curve.x.forEach((position, index) => (row[place.get(position)!] = curve.y[index]!));
    return row;
  });
  return { x, values };
}

/** What a chart draws. */
export interface Drawn {
  title: string;
  about?: string | undefined;
  x: number[];
  series: Series[];
}

/** Returns the charts of a run of which there are points. */
export function drawn(figures: Figure[], curves: ReadonlyMap<string, Curve>): Drawn[] {
  return figures.flatMap((figure) => {
    const metrics = Object.keys(figure.lines).filter((metric) => curves.get(metric)?.x.length);
    if (!metrics.length) return [];
    const spread = figure.spread ? curves.get(figure.spread) : undefined;
    const { x, values } = together([...metrics.map((metric) => curves.get(metric)!), ...(spread ? [spread] : [])]);
    const series = metrics.map((metric, index): Series => ({ label: figure.lines[metric]!, values: values[index]! }));
    const around = spread && values.at(-1);
    const first = series[0]!;
    if (around)
      first.spread = {
        low: first.values.map((value, at) => edge(value, around[at], -1)),
        high: first.values.map((value, at) => edge(value, around[at], 1)),
      };
    return [{ title: figure.title, ...(figure.about ? { about: figure.about } : {}), x, series }];
  });
}

function edge(value: number | null, spread: number | null | undefined, sign: number): number | null {
  return value === null || spread === null || spread === undefined ? null : value + sign * spread;
}

/** Adds a measurement; of a repeated step the last one counts, and what comes after it is undone. */
export function extended(curve: Curve | undefined, x: number, y: number): Curve {
  const known = curve ?? { x: [], y: [] };
  let end = known.x.length;
  while (end > 0 && known.x[end - 1]! >= x) end -= 1;
  return { x: [...known.x.slice(0, end), x], y: [...known.y.slice(0, end), y] };
}

/** An activity with its share of the time. */
export interface Spent {
  kind: string;
  seconds: number;
  share: number;
}

const KINDS: Record<string, string> = {
  start: "loading and starting",
  generation_wait: "waiting for rollouts",
  train: "training",
  exchange: "exchanging gradients",
  publish: "publishing",
  validate: "validation",
  submit: "submitting rollouts",
  checkpoint: "writing checkpoints",
};

/** Returns where the time of a run went, longest first; metrics carry cumulative sums. */
export function spentOf(latest: ReadonlyMap<string, number>): Spent[] {
  const found = [...latest]
    .filter(([name, seconds]) => /^spent_.+_seconds$/.test(name) && seconds > 0)
    .map(([name, seconds]) => ({ kind: name.slice("spent_".length, -"_seconds".length), seconds }));
  const total = found.reduce((sum, { seconds }) => sum + seconds, 0);
  return found
    .sort((a, b) => b.seconds - a.seconds)
    .map(({ kind, seconds }) => ({ kind: KINDS[kind] ?? kind.replaceAll("_", " "), seconds, share: seconds / total }));
}
