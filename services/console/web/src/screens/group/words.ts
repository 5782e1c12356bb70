// The difference between two texts, word by word.

/** A part of two texts: in both, only in the first, or only in the second. */
export interface Part {
  kind: "same" | "removed" | "added";
  text: string;
}

/** Words of each text that are compared; what follows is shown as different. */
export const MAX_WORDS = 4_000;
const MAX_EDITS = 1_200;

/** Returns the parts of two texts in order: removed ones before added ones. */
export function difference(before: string, after: string): Part[] {
  const [one, other] = [words(before), words(after)];
  let start = 0;
  while (start < one.length && start < other.length && one[start] === other[start]) start++;
  let end = 0;
  while (end < one.length - start && end < other.length - start && one.at(-1 - end) === other.at(-1 - end)) end++;
  const parts = between(one.slice(start, one.length - end), other.slice(start, other.length - end));
  return merged([
    { kind: "same", text: one.slice(0, start).join("") },
    ...parts,
    { kind: "same", text: one.slice(one.length - end).join("") },
  ]);
}

function words(text: string): string[] {
  return text.match(/\s+|[\p{L}\p{N}_]+|[^\s\p{L}\p{N}_]/gu) ?? [];
}

/** The shortest way from one list of words to another (Myers, "An O(ND) Difference Algorithm", 1986), if it is short. */
function between(one: string[], other: string[]): Part[] {
  const whole: Part[] = [
    { kind: "removed", text: one.join("") },
    { kind: "added", text: other.join("") },
  ];
  if (one.length > MAX_WORDS || other.length > MAX_WORDS) return whole;
  const furthest = new Map([[1, 0]]);
  const trail: Map<number, number>[] = [];
  for (let edits = 0; edits <= Math.min(MAX_EDITS, one.length + other.length); edits++) {
    trail.push(new Map(furthest));
    for (let line = -edits; line <= edits; line += 2) {
      const [below, above] = [furthest.get(line + 1) ?? -1, furthest.get(line - 1) ?? -1];
      let x = line === -edits || (line !== edits && above < below) ? below : above + 1;
      while (x < one.length && x - line < other.length && one[x] === other[x - line]) x++;
      furthest.set(line, x);
      if (x >= one.length && x - line >= other.length) return back(one, other, trail, edits);
    }
  }
  return whole;
}

function back(one: string[], other: string[], trail: Map<number, number>[], edits: number): Part[] {
  const parts: Part[] = [];
  let [x, y] = [one.length, other.length];
  for (let left = edits; left >= 0; left--) {
    const furthest = trail[left]!;
    const line = x - y;
    const [below, above] = [furthest.get(line + 1) ?? -1, furthest.get(line - 1) ?? -1];
    const isAdded = line === -left || (line !== left && above < below);
    const fromX = left === 0 ? 0 : isAdded ? below : above;
    const fromY = left === 0 ? 0 : fromX - (isAdded ? line + 1 : line - 1);
    while (x > fromX && y > fromY) {
      parts.push({ kind: "same", text: one[x - 1]! });
      x--;
      y--;
    }
    if (left > 0) {
      parts.push(isAdded ? { kind: "added", text: other[y - 1]! } : { kind: "removed", text: one[x - 1]! });
      if (isAdded) y--;
      else x--;
    }
  }
  return parts.reverse();
}

/** Joins neighbours of one kind; between texts that are the same, what is removed comes first. */
function merged(parts: Part[]): Part[] {
  const found: Part[] = [];
  let [removed, added] = ["", ""];
  const flush = () => {
    if (removed) found.push({ kind: "removed", text: removed });
    if (added) found.push({ kind: "added", text: added });
    [removed, added] = ["", ""];
  };
  for (const { kind, text } of parts) {
    if (!text) continue;
    if (kind === "removed") removed += text;
    else if (kind === "added") added += text;
    else {
      flush();
      const last = found.at(-1);
      if (last?.kind === "same") last.text += text;
      else found.push({ kind, text });
    }
  }
  flush();
  return found;
}
