import { expect, test } from "vitest";

import { beginning, contentText, plainText } from "./contents";

const bytes = (text: string) => new TextEncoder().encode(text);

test("JSON is indented, other text is as it is, and bytes are counted", () => {
  expect(contentText(bytes('{"a":1}'), "application/json")).toBe('{\n  "a": 1\n}');
  expect(contentText(bytes('{"a":'), "application/json")).toBe('{"a":');
  expect(contentText(bytes('{"a":1}'), "text/plain")).toBe('{"a":1}');
  expect(contentText(Uint8Array.of(0xff, 1), "image/png")).toBe("2 bytes that are no text");
  expect(plainText(Uint8Array.of(0xff))).toBeUndefined();
});

test("a text begins with some lines, or some characters", () => {
  expect(beginning("a\nb\nc\nd", 2, 100)).toBe(3);
  expect(beginning("a\nb", 5, 100)).toBe(100);
  expect(beginning("x".repeat(500), 5, 100)).toBe(100);
});
