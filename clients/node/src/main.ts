// A client of Fulmen in one program: `client COMMAND [--flag value]...`. docs/clients.md explains commands and flags.
//
// Prints one JSON object per line. Errors are printed to stderr, with the exit status 1 (2: invalid command line).

import { readFileSync } from "node:fs";
import { parseArgs } from "node:util";

import { connect, type Connection } from "./connection.js";
import { decoded, FulmenError } from "./errors.js";
import { create, watch } from "./feed.js";
import { Runner } from "./runner.js";
import { check } from "./vectors.js";

const DEFAULTS = {
  project: "projects/default",
  "training-run": "",
  "group-id": "",
  "request-id": "",
  label: "",
  input: '{"question": "6*7="}',
  cursor: "",
  count: "1",
  slots: "1",
  model: "",
  "work-s": "0",
  "deadline-s": "60",
};

export type Options = ReturnType<typeof read>["options"];
export type Emit = (event: object) => void;

const emit: Emit = (event) => console.log(JSON.stringify(event));

const COMMANDS: Record<string, (store: Connection, options: Options) => Promise<void>> = {
  create: (store, options) => create(store, options, emit),
  run: (store, options) => new Runner(store, options, emit).run(),
  watch: (store, options) => watch(store, options, emit),
};

function labelsOf(text: string): Record<string, string> {
  const [key, value] = text.split("=", 2);
  return value === undefined ? {} : { [key]: value };
}

function numberOf(text: string): number {
  const number = Number(text);
  if (Number.isNaN(number)) throw new Error(`no number: ${text}`);
  return number;
}

function read(argv: string[]) {
  const flags = Object.entries(DEFAULTS).map(([name, value]) => [name, { type: "string", default: value }] as const);
  const { values, positionals } = parseArgs({ args: argv, options: Object.fromEntries(flags), allowPositionals: true });
  const flag = (name: keyof typeof DEFAULTS) => String((values as Record<string, unknown>)[name]);
  const options = {
    project: flag("project"),
    trainingRun: flag("training-run"),
    groupId: flag("group-id"),
    requestId: flag("request-id"),
    labels: labelsOf(flag("label")),
    input: flag("input"),
    cursor: flag("cursor"),
    count: numberOf(flag("count")),
    slots: numberOf(flag("slots")),
    model: flag("model"),
    workMs: numberOf(flag("work-s")) * 1000,
    deadline: new Date(Date.now() + numberOf(flag("deadline-s")) * 1000),
  };
  const [command = "", ...files] = positionals;
  if (!(command in COMMANDS) && command !== "vectors") throw new Error(`unknown command: ${command}`);
  return { command, files, options };
}

async function perform({ command, files, options }: ReturnType<typeof read>) {
  if (command === "vectors") return files.forEach((file) => emit(check(readFileSync(file, "utf8"))));
  const store = connect(options.deadline);
  try {
    await COMMANDS[command](store, options);
  } finally {
    store.close();
  }
}

function fail(status: number, error: FulmenError) {
  console.error(JSON.stringify({ error }));
  process.exitCode = status;
}

async function main() {
  let asked;
  try {
    asked = read(process.argv.slice(2));
  } catch (cause) {
    return fail(2, new FulmenError("USAGE", String((cause as Error).message)));
  }
  try {
    await perform(asked);
  } catch (cause) {
    const error = decoded(cause);
    fail(1, error instanceof FulmenError ? error : new FulmenError("FAILED", String((error as Error).message)));
  }
}

await main();
