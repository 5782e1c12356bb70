// Bars of groups by outcome, and squares of rewards, by step.

import type { StepRewards } from "../../api/gen/fulmen/store/v1/run_history_service_pb";
import { type Curve, OUTCOMES } from "./curves";

/** Groups of a step by outcome, in the order of `OUTCOMES`. */
export interface StepOutcomes {
  x: number;
  counts: number[];
}

/** Returns the outcomes of the last `limit` steps that had groups. */
export function outcomesOf(curves: ReadonlyMap<string, Curve>, limit: number): StepOutcomes[] {
  const metrics = Object.keys(OUTCOMES);
  const byX = new Map<number, number[]>();
  metrics.forEach((metric, index) => {
    const curve = curves.get(metric);
    curve?.x.forEach((x, at) => {
      const row = byX.get(x) ?? metrics.map(() => 0);
      row[index] = curve.y[at] ?? 0;
      byX.set(x, row);
    });
  });
  return [...byX]
    .map(([x, counts]) => ({ x, counts }))
    .filter(({ counts }) => counts.some((each) => each > 0))
    .sort((a, b) => a.x - b.x)
    .slice(-limit);
}

/** A square of the picture of rewards. */
export interface Square {
  column: number;
  row: number;
  /** Share of the step's rollouts, 0 to 1. */
  share: number;
}

/** The picture of rewards: columns are steps, rows are rewards, the least at the bottom (row 0). */
export interface RewardPicture {
  steps: number[];
  low: number;
  high: number;
  rows: number;
  squares: Square[];
}

const ROWS = 12;

/** Returns the picture of the last `limit` steps. */
export function rewardPicture(steps: StepRewards[], limit: number): RewardPicture | undefined {
  const shown = steps.filter(({ rewards }) => rewards?.values.length).slice(-limit);
  const values = [...new Set(shown.flatMap(({ rewards }) => rewards!.values))].sort((a, b) => a - b);
  if (!values.length) return undefined;
  const low = values[0]!;
  const high = values.at(-1)!;
  // Few rewards have a row each, as 0 and 1 have.
  const isExact = values.length <= ROWS;
  const rows = isExact ? values.length : ROWS;
  const rowOf = (value: number) =>
    isExact ? values.indexOf(value) : Math.min(ROWS - 1, Math.floor(((value - low) / (high - low || 1)) * ROWS));
  const squares = shown.flatMap(({ rewards }, column) => {
    const shares = new Map<number, number>();
    const total = rewards!.counts.reduce((sum, each) => sum + Number(each), 0);
    rewards!.values.forEach((value, at) => {
      const row = rowOf(value);
      shares.set(row, (shares.get(row) ?? 0) + Number(rewards!.counts[at] ?? 0n) / (total || 1));
    });
    return [...shares].map(([row, share]) => ({ column, row, share }));
  });
  return { steps: shown.map(({ step }) => Number(step)), low, high, rows, squares };
}
