// How much better each answer of a group did than the group.

/** Returns (reward − mean) ÷ standard deviation of each reward; undefined where there is no reward, 0 if all are the same. */
export function advantages(rewards: (number | undefined)[]): (number | undefined)[] {
  const known = rewards.filter((each) => each !== undefined);
  const mean = known.reduce((sum, each) => sum + each, 0) / known.length;
  const spread = Math.sqrt(known.reduce((sum, each) => sum + (each - mean) ** 2, 0) / known.length);
  return rewards.map((each) => (each === undefined ? undefined : spread > 0 ? (each - mean) / spread : 0));
}
