// The columns of the list, and the orders that the store has an index for.

import type { Column, Sort } from "../../parts/table";

export const COLUMNS: Column[] = [
  { id: "state", title: "State", width: "6.5rem" },
  { id: "task", title: "Task", about: "Beginning of the task" },
  { id: "reward", title: "Reward", align: "end", width: "4.5rem", sortable: true },
  { id: "duration", title: "Duration", align: "end", width: "5.5rem", sortable: true },
  { id: "tokens", title: "Tokens", about: "Of prompts and answers", align: "end", width: "4rem", sortable: true },
  { id: "cost", title: "Cost", align: "end", width: "4.5rem", sortable: true },
  { id: "attempts", title: "Attempts", about: "Ended attempts", align: "end", width: "4.75rem" },
  { id: "failure", title: "Failure", width: "7rem" },
  { id: "version", title: "Version", about: "Of the agent", width: "5.5rem" },
  { id: "group", title: "Group", width: "4.5rem" },
  { id: "age", title: "Created", width: "5.5rem", sortable: true },
];

const ORDERS: Record<string, string> = {
  reward: "reward",
  duration: "duration",
  tokens: "token_count",
  cost: "cost_micros",
};

/** Returns the sort in an address, such as `-reward`; undefined for newest first. */
export function sortOf(text: string): Sort | undefined {
  const column = text.replace(/^-/, "");
  return column in ORDERS ? { column, isDescending: text.startsWith("-") } : undefined;
}

/** Writes a sort into an address; empty for newest first, the only order by age. */
export function sortText({ column, isDescending }: Sort): string {
  return column in ORDERS ? `${isDescending ? "-" : ""}${column}` : "";
}

/** Returns `order_by` of a sort. */
export function orderOf(sort: Sort | undefined): string {
  const field = sort && ORDERS[sort.column];
  return field ? `${field}${sort.isDescending ? " desc" : ""}` : "";
}

const FIRST_TEXT = /^\{\s*"[^"\\]*"\s*:\s*"((?:[^"\\]|\\.)*)/;

/** Returns what tells tasks apart: of an object that begins with a text, as most do, that text. */
export function taskLine(start: string): string {
  const text = FIRST_TEXT.exec(start)?.[1];
  if (!text) return start;
  try {
    return JSON.parse(`"${text}"`) as string;
  } catch {
    return text;
  }
}
