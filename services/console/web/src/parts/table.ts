/** A column of a table. */
export interface Column {
  id: string;
  title: string;
  /** What the column says, on hover. */
  about?: string;
  align?: "end";
  /** CSS width, for tables in a box. */
  width?: string;
  sortable?: boolean;
  /** Takes the room that the others leave. */
  wide?: boolean;
}

export interface Sort {
  column: string;
  isDescending: boolean;
}

const OVERSCAN = 20;

/** Returns which of `count` rows of the same height are in sight, and some on both sides: [from, to). */
export function windowOf(count: number, top: number, height: number, rowHeight: number): { from: number; to: number } {
  const from = Math.max(0, Math.min(Math.floor(top / rowHeight) - OVERSCAN, count));
  const to = Math.min(count, Math.ceil((top + height) / rowHeight) + OVERSCAN);
  return { from, to: Math.max(from, to) };
}
