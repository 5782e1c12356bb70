// Commands for a terminal, quoted so that a shell takes every text as it is.

const SAFE = /^[A-Za-z0-9_./:=@%+-]+$/;
// A command line that is longer is no help, and some shells refuse it.
const MAX_INPUT = 32_000;

/** Quotes a word for POSIX shells. */
export function quoted(word: string): string {
  return SAFE.test(word) ? word : `'${word.replaceAll("'", `'\\''`)}'`;
}

/** Returns the command that runs an agent once on this input, on the reader's machine. */
export function checkCommand(input: string): { command: string; isCut: boolean } {
  // Shells cannot pass NUL; a terminal obeys escapes that are pasted.
  const isHostile = /[\u0000-\u0008\u000b-\u001f\u007f]/.test(input);
  if (input.length > MAX_INPUT || isHostile) {
    return { command: "fulmen agent check train.toml --input-file input.json", isCut: true };
  }
  return { command: `fulmen agent check train.toml --input ${quoted(input)}`, isCut: false };
}
