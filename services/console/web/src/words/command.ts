// Commands for a terminal, quoted so that a shell takes every text as it is.

const SAFE = /^[A-Za-z0-9_./:=@%+-]+$/;
// Shells cannot pass NUL; a terminal obeys escapes that are pasted.
const HOSTILE = /[\u0000-\u0008\u000b-\u001f\u007f]/;
// A command line that is longer is no help, and some shells refuse it.
const MAX_INPUT = 32_000;

/** Quotes a word for POSIX shells. */
export function quoted(word: string): string {
  return SAFE.test(word) ? word : `'${word.replaceAll("'", `'\\''`)}'`;
}

/** Returns the command that runs an agent once on this input, on the reader's machine. */
export function checkCommand(input: string): { command: string; isCut: boolean } {
  if (input.length > MAX_INPUT || HOSTILE.test(input)) {
    return { command: "fulmen agent check train.toml --input-file input.json", isCut: true };
  }
  return { command: `fulmen agent check train.toml --input ${quoted(input)}`, isCut: false };
}

/** Returns the command that scores the stored rollouts that match a filter with a grader of the reader. */
export function rescoreCommand(filter: string): string {
  const begin = "fulmen rollout rescore --grader grader.py:grade --name scores.mine";
  if (!filter) return begin;
  return `${begin} --filter ${HOSTILE.test(filter) ? "FILTER" : quoted(filter)}`;
}

/** Returns the command that publishes the scores of a dimension as rewards. */
export function publishCommand(dimension: string): string {
  return `fulmen annotations publish scores.${dimension} --dimension ${dimension}`;
}
