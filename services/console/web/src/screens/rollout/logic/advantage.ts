// How much better a rollout was than its group. Algorithms compute advantages when they train, and store none: this is
// what follows from the rewards.

/** Of a rollout among the members of its group. */
export interface Advantage {
  /** Reward minus the group's mean. */
  value: number;
  mean: number;
  /** Standard deviation of the group's rewards. */
  spread: number;
  /** Members with a reward. */
  count: number;
}

/** Returns the advantage of a reward; undefined without one, or without other members. */
export function advantageOf(reward: number | undefined, group: (number | undefined)[]): Advantage | undefined {
  const known = group.filter((each): each is number => each !== undefined && Number.isFinite(each));
  if (reward === undefined || known.length < 2) return undefined;
  const mean = known.reduce((sum, each) => sum + each, 0) / known.length;
  const variance = known.reduce((sum, each) => sum + (each - mean) ** 2, 0) / known.length;
  return { value: reward - mean, mean, spread: Math.sqrt(variance), count: known.length };
}
