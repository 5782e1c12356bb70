import { expect, test } from "vitest";

import { orderOf, sortOf, sortText, taskLine } from "./columns";

test("an address says how the list is sorted", () => {
  expect(sortOf("")).toBeUndefined();
  expect(sortOf("state")).toBeUndefined();
  expect(orderOf(sortOf("-tokens"))).toBe("token_count desc");
  expect(orderOf(sortOf("cost"))).toBe("cost_micros");
  expect(sortText({ column: "age", isDescending: false })).toBe("");
  expect(sortOf(sortText({ column: "reward", isDescending: true }))).toEqual({ column: "reward", isDescending: true });
});

test("of a task that begins with a text, the text is shown", () => {
  expect(taskLine('{"question": "What is \\"4\\"?", "answer": "x"}')).toBe('What is "4"?');
  expect(taskLine('{"question": "cut in the midd')).toBe("cut in the midd");
  expect(taskLine('{"n": 4, "question": "x"}')).toBe('{"n": 4, "question": "x"}');
  expect(taskLine("plain text")).toBe("plain text");
  expect(taskLine("")).toBe("");
});
