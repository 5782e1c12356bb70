// The real services, started before the tests of a lane and stopped after them. FULMEN_BROWSER_STACK, a line as
// tests/support/browser_stack.py prints it, names a stack that runs already.

import { spawn } from "node:child_process";
import { createInterface } from "node:readline";
import { fileURLToPath } from "node:url";

const ROOT = fileURLToPath(new URL("../..", import.meta.url));

/** Longest start or stop. */
export const LIMIT_MS = 180_000;

/** Starts a stack, which `stack()` returns from then on; returns what stops it. */
export async function start(): Promise<() => Promise<void>> {
  if (process.env.FULMEN_BROWSER_STACK) return async () => {};
  const python = process.env.PYTHON ?? `${ROOT}.venv/bin/python`;
  const stack = spawn(python, ["-m", "tests.support.browser_stack"], { cwd: ROOT, stdio: ["pipe", "pipe", "inherit"] });
  const ended = new Promise<void>((resolve) => stack.once("exit", () => resolve()));
  const ready = (async () => {
    for await (const line of createInterface({ input: stack.stdout })) if (line.startsWith("{")) return line;
    throw new Error("The stack ended before it was ready.");
  })();
  const late = setTimeout(() => stack.kill(), LIMIT_MS);
  process.env.FULMEN_BROWSER_STACK = await ready;
  clearTimeout(late);
  stack.stdout.resume();
  return async () => {
    stack.stdin.end();
    await ended;
  };
}
