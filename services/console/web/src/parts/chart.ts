/** A series of a chart: one value per x; null where it has none. */
export interface Series {
  label: string;
  values: (number | null)[];
  /** Lower and upper edge of the spread around it. */
  spread?: { low: (number | null)[]; high: (number | null)[] };
}

/** Something that happened at an x. */
export interface Mark {
  x: number;
  text: string;
  tone: "warn" | "bad" | "idle";
}

/** Colours of series, in order; they repeat after eight. */
export function seriesColour(index: number): string {
  return `var(--series-${(index % 8) + 1})`;
}
