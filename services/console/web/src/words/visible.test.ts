import { expect, test } from "vitest";

import { cut, line, visible } from "./visible";

test("controls and marks of direction are seen", () => {
  expect(visible("a\u0000b\u001b[31mc\u202ed\u200be")).toBe("a␀b␛[31mc⟨202E⟩d⟨200B⟩e");
  expect(visible("two\nlines\tand a tab")).toBe("two\nlines\tand a tab");
});

test("a long text is cut, but not within a character", () => {
  expect(cut("abc", 3)).toEqual({ text: "abc", left: 0 });
  expect(cut("ab😀cd", 3)).toEqual({ text: "ab", left: 4 });
});

test("a text becomes one line", () => {
  expect(line("  a\n\n b ")).toBe("a b");
  expect(line("x".repeat(1_000_000), 10)).toBe(`${"x".repeat(10)}…`);
});
