import { expect, test } from "vitest";

import { messagesOf, parsed, previewOf, textOf, useOf } from "./tasks";

test("a task is known by its input, a demonstration by its last message", () => {
  expect(previewOf('{"input":"2+3","answer":5}')).toBe("2+3");
  expect(previewOf('{"input":{"a":1}}')).toBe('{"a":1}');
  expect(previewOf('{"messages":[{"role":"user","content":"hi"},{"role":"assistant","content":"hello"}]}')).toBe(
    "hello",
  );
  expect(previewOf("not JSON")).toBe("not JSON");
});

test("contents of messages are texts, parts of text, or JSON", () => {
  expect(
    messagesOf(parsed('[{"role":"user","content":[{"type":"text","text":"a"},{"type":"text","text":"b"}]}]')),
  ).toEqual([{ role: "user", text: "a\nb" }]);
  expect(messagesOf({ messages: [{ content: "no role" }] })).toBeUndefined();
  expect(messagesOf([])).toBeUndefined();
  expect(textOf({ x: 1 })).toBe('{\n  "x": 1\n}');
});

test("the name of a data set says what it is for", () => {
  expect(useOf("dataset.demo.train_tasks")).toBe("train tasks");
  expect(useOf("dataset.demo.demonstrations")).toBe("demonstrations");
  expect(useOf("mine")).toBe("");
});
