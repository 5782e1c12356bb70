// The tree of a prompt search, and what an edit changed.

import type { PromptCandidate } from "../../api/gen/fulmen/algorithm/v1/prompt_search_pb";

/** A candidate with its depth below the first prompt. */
export interface Branch {
  candidate: PromptCandidate;
  depth: number;
}

/** Returns the candidates so that each stands below the one that it is an edit of. */
export function treeOf(candidates: PromptCandidate[]): Branch[] {
  const children = new Map<string, PromptCandidate[]>();
  const known = new Set(candidates.map(({ id }) => id));
  for (const each of candidates) {
    const parent = known.has(each.parent) ? each.parent : "";
    children.set(parent, [...(children.get(parent) ?? []), each]);
  }
  const found: Branch[] = [];
  const waiting: Branch[] = (children.get("") ?? []).map((candidate) => ({ candidate, depth: 0 })).reverse();
  while (waiting.length) {
    const next = waiting.pop()!;
    found.push(next);
    const below = (children.get(next.candidate.id) ?? []).map((candidate) => ({ candidate, depth: next.depth + 1 }));
    waiting.push(...below.reverse());
  }
  return found;
}

/** Returns the candidate with the best validation, or the best of the beam while none is validated. */
export function bestOf(candidates: PromptCandidate[], beam: string[]): PromptCandidate | undefined {
  const validated = candidates.filter(({ validation }) => validation !== undefined);
  if (validated.length) return validated.reduce((best, each) => (each.validation! > best.validation! ? each : best));
  return candidates.find(({ id }) => id === beam[0]);
}

/** A part of a text that is the same, or was added or removed. */
export interface Change {
  kind: "same" | "added" | "removed";
  text: string;
}

const MOST_PARTS = 1_500;

/** Returns what makes one text of another: by words, or by lines if there are too many. */
export function changes(before: string, after: string): Change[] {
  const byWord = [before, after].map((text) => text.match(/\s+|[^\s]+/g) ?? []);
  const parts = byWord.every((each) => each.length <= MOST_PARTS)
    ? byWord
    : [before, after].map((text) => text.split(/(?<=\n)/).slice(0, MOST_PARTS));
  return merged(compared(parts[0]!, parts[1]!));
}

/** Longest common subsequence, by the table of lengths. */
function compared(before: string[], after: string[]): Change[] {
  const width = after.length + 1;
  const lengths = new Uint16Array((before.length + 1) * width);
  for (let i = before.length - 1; i >= 0; i--)
    for (let j = after.length - 1; j >= 0; j--)
      lengths[i * width + j] =
        before[i] === after[j]
          ? lengths[(i + 1) * width + j + 1]! + 1
          : Math.max(lengths[(i + 1) * width + j]!, lengths[i * width + j + 1]!);
  const found: Change[] = [];
  let i = 0;
  let j = 0;
  while (i < before.length || j < after.length) {
    if (i < before.length && j < after.length && before[i] === after[j]) {
      found.push({ kind: "same", text: before[i]! });
      i += 1;
      j += 1;
    } else if (
      j === after.length ||
      (i < before.length && lengths[(i + 1) * width + j]! >= lengths[i * width + j + 1]!)
    ) {
      found.push({ kind: "removed", text: before[i]! });
      i += 1;
    } else {
      found.push({ kind: "added", text: after[j]! });
      j += 1;
    }
  }
  return found;
}

function merged(parts: Change[]): Change[] {
  const found: Change[] = [];
  for (const part of parts) {
    const last = found.at(-1);
    if (last?.kind === part.kind) last.text += part.text;
    else found.push({ ...part });
  }
  return found;
}
