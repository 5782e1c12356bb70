import { expect, test } from "vitest";

import { advantages } from "./advantages";
import { difference, MAX_WORDS } from "./words";

test("advantages are distances from the mean in standard deviations", () => {
  expect(advantages([0, 1])).toEqual([-1, 1]);
  expect(advantages([1, undefined, 1])).toEqual([0, undefined, 0]);
  expect(advantages([0, 0, 0, 1]).map((each) => each?.toFixed(3))).toEqual(["-0.577", "-0.577", "-0.577", "1.732"]);
  expect(advantages([])).toEqual([]);
});

test("a difference names the words that were removed and added", () => {
  expect(difference("the answer is 4 apples", "the answer is 5 apples")).toEqual([
    { kind: "same", text: "the answer is " },
    { kind: "removed", text: "4" },
    { kind: "added", text: "5" },
    { kind: "same", text: " apples" },
  ]);
  expect(difference("same", "same")).toEqual([{ kind: "same", text: "same" }]);
  expect(difference("", "new")).toEqual([{ kind: "added", text: "new" }]);
});

test("both texts can be read from a difference, whatever they are", () => {
  const texts = ["", "a", "a b c", "c b a", "a  b\nc d e", "größe 🙂 <b>", "x ".repeat(50), "x y ".repeat(40)];
  for (const before of texts)
    for (const after of texts) {
      const parts = difference(before, after);
      const read = (kind: string) =>
        parts
          .filter((each) => each.kind !== kind)
          .map(({ text }) => text)
          .join("");
      expect(read("added")).toBe(before);
      expect(read("removed")).toBe(after);
    }
});

test("texts that are too long to be compared are shown as different", () => {
  const [before, after] = ["a ".repeat(MAX_WORDS), "b ".repeat(MAX_WORDS)];
  expect(difference(before, after).map(({ kind }) => kind)).toEqual(["removed", "added", "same"]);
});
