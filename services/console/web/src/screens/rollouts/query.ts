// The language of filters (AIP-160), as far as the page has to know it: which word may follow, and how filters are joined.

const FIELDS = [
  "state",
  "failure_kind",
  "reward",
  "duration",
  "token_count",
  "cost_micros",
  "ended_attempt_count",
  "input",
  "output",
  "agent",
  "task_type",
  "training_run",
  "group_id",
  "mode",
  "priority",
  "create_time",
  "end_time",
  "prompt_token_count",
  "completion_token_count",
  "name",
  "metadata.",
  "required_labels.",
  "resource_versions.",
] as const;

const WORDS: Record<string, readonly string[]> = {
  state: ["QUEUED", "RUNNING", "RETRY_WAIT", "SUCCEEDED", "FAILED", "CANCELLED"],
  failure_kind: [
    "AGENT_ERROR",
    "TIMEOUT",
    "LEASE_LOST",
    "INFRA",
    "REWARD_MISSING",
    "CANCELLED",
    "RUNNER_LOST",
    "UNSPECIFIED",
  ],
  mode: ["TRAIN", "VALIDATION", "TEST"],
  duration: ["1s", "10s", "60s"],
};
const EQUALITY = ["=", "!="];
const ORDER = ["=", "!=", "<", "<=", ">", ">="];
const SEARCHED = new Set(["input", "output"]);
const UNORDERED = new Set(["state", "failure_kind", "mode", "agent", "task_type", "training_run", "group_id", "name"]);
const MAX_OPTIONS = 12;

/** What may be written at a place of a filter. */
export interface Completion {
  /** The part of the text that a choice replaces: [from, to). */
  from: number;
  to: number;
  options: string[];
}

const TOKEN = /\s+|\(|\)|<=|>=|!=|=|<|>|"(?:[^"\\]|\\.)*"?|'(?:[^'\\]|\\.)*'?|[^\s()=<>!"'\\]+|./g;

/**
 * Returns what may be written at the cursor.
 *
 * `values` are values of fields that the list has: of `metadata` and other maps `key=value`.
 */
export function complete(text: string, cursor: number, values: Record<string, string[]>): Completion {
  let from = cursor;
  let word = "";
  let expected: "field" | "operator" | "value" | "joint" = "field";
  let field = "";
  for (const [token] of text.slice(0, cursor).matchAll(TOKEN)) {
    if (/^\s/.test(token)) {
      if (word) [expected, field] = after(expected, word, field);
      word = "";
    } else if (/^[()=<>!]/.test(token)) {
      if (word) [expected, field] = after(expected, word, field);
      word = "";
      if (token === "(") expected = "field";
      else if (token === ")") expected = "joint";
      else expected = "value";
    } else if (expected === "operator" && token.startsWith(":")) {
      [expected, word] = ["value", token.slice(1)];
    } else {
      word += token;
      const colon: number = expected === "field" ? word.indexOf(":") : -1;
      if (colon > 0) {
        field = word.slice(0, colon);
        [expected, word] = ["value", word.slice(colon + 1)];
      }
    }
  }
  from = cursor - word.length;
  const rest = /^[^\s()=<>!"']*/.exec(text.slice(cursor))?.[0].length ?? 0;
  const wanted = word.replace(/^["']/, "").toLowerCase();
  const options = possible(expected, field, values).filter(
    (each) => each.replace(/^"/, "").toLowerCase().includes(wanted) && each !== word,
  );
  options.sort((one, other) => Number(begins(other, wanted)) - Number(begins(one, wanted)));
  return { from, to: cursor + rest, options: options.slice(0, MAX_OPTIONS) };
}

function begins(option: string, wanted: string): boolean {
  return option.replace(/^"/, "").toLowerCase().startsWith(wanted);
}

function after(expected: string, word: string, field: string): ["field" | "operator" | "value" | "joint", string] {
  if (word === "AND" || word === "OR" || word === "NOT") return ["field", ""];
  if (expected === "field") return ["operator", word];
  if (expected === "operator") return ["value", field];
  return ["joint", ""];
}

function possible(expected: string, field: string, values: Record<string, string[]>): string[] {
  if (expected === "joint") return ["AND", "OR"];
  if (expected === "operator") {
    if (SEARCHED.has(field)) return [":"];
    return [...(UNORDERED.has(field) || field.includes(".") ? EQUALITY : ORDER), ":*"];
  }
  if (expected === "value") return valuesOf(field, values);
  const keys = Object.entries(values).flatMap(([map, entries]) =>
    FIELDS.includes(`${map}.` as (typeof FIELDS)[number])
      ? [...new Set(entries.map((entry) => entry.slice(0, entry.indexOf("="))))].map((key) => `${map}.${keyText(key)}`)
      : [],
  );
  return [...FIELDS, ...keys, "NOT"];
}

function valuesOf(field: string, values: Record<string, string[]>): string[] {
  const known = WORDS[field];
  if (known) return [...known];
  const dot = field.indexOf(".");
  if (dot > 0) {
    const key = `${field.slice(dot + 1).replace(/^"|"$/g, "")}=`;
    return (values[field.slice(0, dot)] ?? [])
      .filter((entry) => entry.startsWith(key))
      .map((entry) => quoted(entry.slice(key.length)));
  }
  return (values[field] ?? []).filter(Boolean).map(quoted);
}

function keyText(key: string): string {
  return /^[\w.-]+$/.test(key) ? key : quoted(key);
}

/** Writes a text as a value of a filter. */
export function quoted(text: string): string {
  return `"${text.replaceAll("\\", "\\\\").replaceAll('"', '\\"')}"`;
}

/** Returns a filter that also requires a term. `OR` binds more tightly than `AND`: no parentheses are needed. */
export function joined(filter: string, term: string): string {
  return filter.trim() ? `${filter.trim()} AND ${term}` : term;
}

/** Returns where a term stands in a filter, joined by `AND` to the rest: [from, to) with one joint; undefined if nowhere. */
function placeOf(filter: string, term: string): [number, number] | undefined {
  const text = filter.trim();
  if (text === term) return [0, text.length];
  if (text.startsWith(`${term} AND `)) return [0, term.length + 5];
  const at = text.indexOf(` AND ${term}`);
  const end = at + term.length + 5;
  return at >= 0 && (end === text.length || text.startsWith(" AND ", end)) ? [at, end] : undefined;
}

/** True if a filter requires a term, as `joined` writes it. */
export function requires(filter: string, term: string): boolean {
  return placeOf(filter, term) !== undefined;
}

/** Returns a filter with a term, or without it if it is there. */
export function toggled(filter: string, term: string): string {
  const found = placeOf(filter, term);
  const text = filter.trim();
  return found ? (text.slice(0, found[0]) + text.slice(found[1])).trim() : joined(filter, term);
}
